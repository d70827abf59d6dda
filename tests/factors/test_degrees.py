"""The interpreter of traces: what it proves holds for all values, and what it does not know it does not claim."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.scipy.special import erf, logit, ndtr

from numpyro_pvi.factors import Form, Statistics, forms_of, is_affine, marked, unmarked
from numpyro_pvi.factors import _proof as degrees

RNG = np.random.default_rng(0)
X, T, Y = RNG.normal(size=(5, 3)), np.linspace(-1, 1, 5), RNG.normal(size=5)
INDEX = np.array([0, 1, 2, 0, 1])
W, U = jnp.full((3,), 0.3), jnp.asarray(0.7)
COUNTS = jnp.array([0, 1, 2, 1, 0])


def form(function, *args, moving=None, statistics=None, sign=""):
    """The form of a function's only output in some of its arguments, all of them by default."""
    moving = range(len(args)) if moving is None else moving
    own = marked("latents", "", (-np.pi, np.pi)) if sign == "angle" else marked("latents", sign)
    inputs = [own if i in moving else unmarked(f"p{i}") for i in range(len(args))]
    (found,) = forms_of(jax.make_jaxpr(function)(*args), inputs, statistics or Statistics())
    return found


# Polynomials of the latents: name, function, arguments, degree (of a log density 2: quadratic).
POLYNOMIALS = {
    "linear": (lambda w: dist.Normal(X @ w, 0.5).log_prob(Y), (W,), 2),
    "validated": (lambda w: dist.Normal(X @ w, 0.5, validate_args=True).log_prob(Y), (W,), 2),
    "effects by index": (lambda w, g: dist.Normal(X @ w + g[INDEX], 0.5).log_prob(Y), (W, W), 2),
    "one-hot": (lambda w: jax.nn.one_hot(INDEX, 3) @ w, (W,), 1),
    "einsum": (lambda w: jnp.einsum("ij,j->i", X, w), (W,), 1),
    "standardised inside": (lambda w: ((X - X.mean(0)) / X.std(0)) @ w, (W,), 1),
    "where on data": (lambda w: jnp.where(INDEX > 0, X @ w, T), (W,), 1),
    "masked by NaN": (lambda w: jnp.where(jnp.isnan(X @ w), 0.0, X @ w), (W,), 1),
    "scatter": (lambda w: jnp.zeros(5).at[INDEX].add(w[INDEX]), (W,), 1),
    "random walk": (lambda w: jnp.cumsum(w), (W,), 1),
    "splines": (lambda w: jnp.interp(T, jnp.linspace(-1, 1, 5), Y) * w, (U,), 1),
    "AR(1) by scan": (lambda w: jax.lax.scan(lambda c, t: (0.5 * c + w[0] * t,) * 2, 0.0, T)[1], (W,), 1),
    "linear system": (lambda w: jnp.linalg.solve(2 * jnp.eye(3), w), (W,), 1),
    "GP by Cholesky": (lambda w: jnp.linalg.cholesky(jnp.eye(3) + 0.5) @ w, (W,), 1),
    "interaction": (lambda w, v: w * v * T, (U, U), 2),
    "cubic": (lambda w: w**3, (W,), 3),
    "MVN": (lambda w: dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)).log_prob(w), (W,), 2),
    "MVN, precision": (lambda w: dist.MultivariateNormal(0.0, precision_matrix=jnp.eye(3)).log_prob(w), (W,), 2),
    "GaussianRandomWalk": (lambda w: dist.GaussianRandomWalk(0.5, 3).log_prob(w), (W,), 2),
    "log-normal in its logarithm": (lambda z: dist.LogNormal(0, 1).log_prob(jnp.exp(z)) + z, (W,), 2),
    "cond on a constant": (lambda w: jax.lax.cond(True, lambda w: w * 2, lambda w: w + 1, w), (W,), 1),
    "checkpointed": (jax.checkpoint(lambda w: X @ w), (W,), 1),
    "positive, guarded": (lambda z: jnp.log(jnp.maximum(jnp.exp(z), 1e-38)), (W,), 1),
}
LINKS = {
    "exp": (lambda w: jnp.exp(X @ w + T), "log"),
    "exp, exposure": (lambda w: jnp.exp(X @ w) * (1 + T**2), "log"),
    "inverse": (lambda w: 2.0 / jnp.exp(X @ w), "log"),
    "variance": (lambda w: jnp.sqrt(jnp.exp(X @ w) ** 3), "log"),
    "exp, some": (lambda w: jnp.where(INDEX > 0, jnp.exp(X @ w), 1.0), "log"),
    "sigmoid": (lambda w: jax.nn.sigmoid(X @ w), "logit"),
    "sigmoid by hand": (lambda w: 1 / (1 + jnp.exp(-X @ w)), "logit"),
    "one minus": (lambda w: 1 - jax.nn.sigmoid(X @ w), "logit"),
    "clamped": (lambda w: dist.util.clamp_probs(jax.nn.sigmoid(X @ w)), "logit"),
    "softplus": (lambda w: jax.nn.softplus(X @ w), "softplus"),
    "softplus by hand": (lambda w: jnp.log1p(jnp.exp(X @ w)), "softplus"),
    "probit": (lambda w: ndtr(X @ w), "probit"),
    "probit by hand": (lambda w: 0.5 * (1 + erf(X @ w / np.sqrt(2.0))), "probit"),
    "negative binomial": (lambda w: dist.NegativeBinomial2(jnp.exp(X @ w), jnp.exp(w[0]))._gamma.rate, "log"),
}
KINKS = {
    "abs": lambda w: dist.Normal(jnp.abs(w[0]) * T, 0.5).log_prob(Y),
    "maximum": lambda w: dist.Normal(w[1] + jnp.maximum(w[0], 0) * T, 0.5).log_prob(Y),
    "relu": lambda w: jax.nn.relu(X @ w),
    "clip": lambda w: jnp.clip(X @ w, -3, 3),
    "clipped probability": lambda w: jnp.clip(jax.nn.sigmoid(X @ w), 1e-6, 1 - 1e-6),
    "where": lambda w: jnp.where(w > 0, 3.0, 0.1),
    "equal to what is clipped": lambda w: jnp.where(jax.nn.relu(w) == 0, w, 2 * w),
    "root of a square": lambda w: jnp.abs(w) + 0 * w,
    "floor": lambda w: jnp.floor(w) * w,
    "index": lambda w: jnp.asarray(X)[jnp.int32(w[0])],
    "sorted": lambda w: jnp.sort(w),
    "cond": lambda w: jax.lax.cond(w[0] > 0, lambda w: w, lambda w: 2 * w, w),
    "scan": lambda w: jax.lax.scan(lambda c, t: (jnp.maximum(c, w[0] * t),) * 2, 0.0, T)[1],
    "angle": lambda w: jnp.remainder(w, 2 * jnp.pi) ** 2,
    "Laplace": lambda w: dist.Laplace(0.0, 1.0).log_prob(w),
    "bounds": lambda w: dist.Uniform(0.0, jnp.exp(w[0])).log_prob(jnp.asarray(0.5)),
}
SMOOTH = {
    "tanh": lambda w: w[0] + 3 * jnp.tanh(w[1] * T),
    "product of a scale": lambda w: w[0] * jnp.exp(w[1]),
    "quotient": lambda w: w[0] / w[1],
    "Student-t": lambda w: dist.StudentT(30.0).log_prob(w),
    "logsumexp": lambda w: jax.nn.logsumexp(w),
    "root of a square": lambda w: jnp.sqrt(w**2),
    "sum of exponentials": lambda w: jnp.sum(jnp.exp(w)),
    "logit of a logistic": lambda w: logit(jax.nn.sigmoid(w)),
    "growing scan": lambda w: jax.lax.scan(lambda c, t: (w[0] * c + t,) * 2, 0.0, T)[1],
}


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_degrees(name):
    function, args, degree = POLYNOMIALS[name]
    found = form(function, *args)
    assert found.at_most(degree) and not found.at_most(degree - 1), found


@pytest.mark.parametrize("name", LINKS)
def test_links(name):
    function, link = LINKS[name]
    assert form(function, W).predictor_link == link


@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_not_followed(name):
    found = form(KINKS[name], W)
    assert found.kind in ("unknown", "link") and found.kink and not found.predictor_link, found


JUMPS = {
    "where": lambda w: jnp.where(w > 0.3, 1.0, 2.0),
    "floor": jnp.floor,
    "round": jnp.round,
    "sign": jnp.sign,
    "remainder": lambda w: jnp.remainder(w, 2.0),
    "integers": lambda w: w.astype(int) * 1.0,
    "looked up": lambda w: jnp.arange(3.0)[w.astype(int)],
    "argmax": lambda w: 1.0 * jnp.argmax(w),
    "ranks": lambda w: jnp.argsort(w).astype(float),
    "beyond a table": lambda w: jnp.interp(w, jnp.arange(3.0), jnp.arange(3.0) ** 2, left=9.0),
    "cond": lambda w: jax.lax.cond(w[0] > 0, lambda: w, lambda: 2 * w),
    "then smoothed": lambda w: jnp.exp(-(jnp.where(w > 0.3, 1.0, 2.0) ** 2)),
}
CONTINUOUS = {
    "abs": jnp.abs,
    "maximum": lambda w: jnp.maximum(w, 0.0),
    "clip": lambda w: jnp.clip(w, 0.0, 1.0),
    "sort": jnp.sort,
    "relu": jax.nn.relu,
    "leaky relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "log ndtr": jax.scipy.special.log_ndtr,
    "on data": lambda w: jnp.where(jnp.arange(3) > 1, w, 2 * w),
    "ordered categories": lambda w: dist.OrderedLogistic(w[0], jnp.array([-1.0, 1.0])).log_prob(1),
    "truncated normal": lambda w: dist.TruncatedNormal(w, 1.0, low=0.0).log_prob(1.0),
    "asymmetric Laplace": lambda w: dist.AsymmetricLaplace(w, 1.0, 2.0).log_prob(1.0),
}


@pytest.mark.parametrize("name", JUMPS)
def test_jumps_are_told_from_kinks(name):
    assert form(JUMPS[name], W).jump


@pytest.mark.parametrize("name", CONTINUOUS)
def test_what_is_continuous_has_no_jump(name):
    assert not form(CONTINUOUS[name], W).jump


@pytest.mark.parametrize("name", SMOOTH)
def test_what_is_smooth_and_no_structure_is_told_from_what_has_kinks(name):
    found = form(SMOOTH[name], W)
    assert found.kind == "unknown" and found.smooth and not found.kink, found


def test_what_is_not_followed_is_neither():
    found = form(lambda w: jnp.linalg.cholesky(jnp.diag(jnp.exp(w))) @ w, W)
    assert found.opaque and not found.kink and not found.forbids(True, "latents")


class TestParameters:
    """Inputs that are not marked may have any value."""

    def test_a_slope_that_may_vanish_counts(self):
        found = form(lambda w, a: w * T + a * w**2 * T, U, U, moving=[0])
        assert found.at_most(2) and not found.at_most(1) and "p1" in found.labels

    def test_functions_of_parameters_are_constants(self):
        found = form(lambda w, a, b: w * jax.nn.relu(a) + a * jnp.tanh(b * T), U, U, U, moving=[0])
        assert found.at_most(1) and found.labels == {"latents", "p1", "p2"}
        assert form(lambda w, u: dist.Normal(X @ w, jnp.exp(u)).log_prob(Y), W, U, moving=[0]).at_most(2)

    def test_what_hangs_on_a_parameter_may_not_be_guessed(self):
        found = form(lambda w, a: w + jax.nn.relu(a) * jnp.tanh(w), U, U, moving=[0])
        assert found.forbids(False, "latents")
        alone = form(lambda w: w + jnp.tanh(w), U)
        assert alone.forbids(True, "latents") and not alone.forbids(False, "latents")

    def test_what_is_cut_off_from_gradients_is_no_dependence(self):
        assert form(lambda w, a: w + jax.lax.stop_gradient(a), U, U, moving=[0]).labels == {"latents"}


GAMMA, BETA = Statistics(1, (), frozenset({"log"})), Statistics(0, (), frozenset({"log", "log1m"}))
LOG, INVERSE = Statistics(0, (), frozenset({"log"})), Statistics(0, (-1.0,), frozenset({"log"}))
TURNS = Statistics(0, (), frozenset({"cos", "sin"}))
P3 = jnp.full((3,), 1 / 3)
# Name: (log density of a latent x, a value, its statistics, its sign, whether it is affine in them).
CONJUGATE = {
    "precision": (lambda x: dist.Normal(0.0, 1 / jnp.sqrt(x)).log_prob(Y), U, GAMMA, "+", True),
    "precision, power": (lambda x: dist.Normal(0.0, x**-0.5).log_prob(Y), U, GAMMA, "+", True),
    "Poisson": (lambda x: dist.Poisson(x * (2 + T)).log_prob(COUNTS), U, GAMMA, "+", True),
    "rate": (lambda x: dist.Gamma(2.0, x).log_prob(1 + T**2), U, GAMMA, "+", True),
    "prior of a gamma": (lambda x: dist.Gamma(2.0, 3.0).log_prob(x), U, GAMMA, "+", True),
    "Poisson with a floor": (lambda x: dist.Poisson(0.5 + x).log_prob(COUNTS), U, GAMMA, "+", False),
    "scale": (lambda x: dist.Normal(0.0, x).log_prob(Y), U, GAMMA, "+", False),
    "shape": (lambda x: dist.Gamma(x, 2.0).log_prob(1 + T**2), U, GAMMA, "+", False),
    "Bernoulli": (lambda x: dist.Bernoulli(x).log_prob(COUNTS % 2), U, BETA, "unit", True),
    "Bernoulli, complement": (lambda x: dist.Bernoulli(1 - x).log_prob(COUNTS % 2), U, BETA, "unit", True),
    "Binomial": (lambda x: dist.Binomial(9, x).log_prob(COUNTS), U, BETA, "unit", True),
    "Geometric": (lambda x: dist.Geometric(x).log_prob(COUNTS), U, BETA, "unit", True),
    "Bernoulli, half": (lambda x: dist.Bernoulli(x / 2).log_prob(COUNTS % 2), U, BETA, "unit", False),
    "Categorical": (lambda x: dist.Categorical(probs=x).log_prob(COUNTS), P3, LOG, "unit", True),
    "Multinomial": (lambda x: dist.Multinomial(5, probs=x).log_prob(jnp.array([2, 2, 1])), P3, LOG, "unit", True),
    "prior of a Dirichlet": (lambda x: dist.Dirichlet(jnp.ones(3)).log_prob(x), P3, LOG, "unit", True),
    "variance": (lambda x: dist.Normal(0.0, jnp.sqrt(x)).log_prob(Y), U, INVERSE, "+", True),
    "prior of a variance": (lambda x: dist.InverseGamma(2.0, 3.0).log_prob(x), U, INVERSE, "+", True),
    "direction": (lambda x: dist.VonMises(x, 3.0).log_prob(T), U, TURNS, "angle", True),
    "prior of a direction": (lambda x: dist.VonMises(0.3, 3.0).log_prob(x), U, TURNS, "angle", True),
}


@pytest.mark.parametrize("name", CONJUGATE)
def test_conjugacy(name):
    function, at, statistics, sign, expected = CONJUGATE[name]
    found = form(function, at, statistics=statistics, sign=sign)
    assert is_affine(found, statistics) == expected and not found.kink, found


def test_terms_that_see_one_member_each_have_a_place():
    statistics = Statistics(2)
    for terms, alone in (
        (lambda w: dist.Normal(w[INDEX] * T, 0.5).log_prob(Y), True),
        (lambda w: jnp.concatenate([w**2, w[:2]]), True),
        (lambda w: w[:2] * w[1:], False),
        (lambda w: X @ w, False),
        (lambda w: jnp.cumsum(w), False),
    ):
        assert (form(terms, W, statistics=statistics).place is not None) == alone


def test_an_interpreter_that_takes_a_maximum_for_linear_is_seen(monkeypatch):
    monkeypatch.setitem(degrees._RULES, "max", lambda eqn, forms, _: max(forms, key=lambda f: f.degree))
    with pytest.raises(AssertionError):
        test_kinks_are_not_followed("maximum")


def test_an_interpreter_that_ignores_a_parameter_is_seen(monkeypatch):
    monkeypatch.setattr(degrees._Interpreter, "_place", lambda *_: None)
    monkeypatch.setattr(Form, "forbids", lambda self, single, latents: bool(self.kink))
    with pytest.raises(AssertionError):
        TestParameters().test_what_hangs_on_a_parameter_may_not_be_guessed()
