"""What the planner finds about each likelihood and prior, and that the terms it prepares are the model's own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import ndtr
from numpyro.infer.util import log_likelihood, potential_energy

from numpyro_pvi import Partition
from numpyro_pvi.factors import ModelCall, exact_prior, prepare_term, term_log_prob
from numpyro_pvi.factors._planner import plan_factors
from numpyro_pvi.factors._structure import Rays, SiteFacts, affine_link, find_term, is_quadratic, moves

N, D = 24, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D))
REAL = 2.0 * RNG.normal(size=N)
POSITIVE = RNG.gamma(2.0, size=N)
BINARY = RNG.integers(0, 2, size=N)
COUNT = RNG.poisson(2.0, size=N)
LEVEL = RNG.integers(0, 3, size=N)


def regression(likelihood, prior=None, scale=1.0):
    """A model with weights w and the likelihood that the function makes of the predictor."""

    def model(x, y):
        w = numpyro.sample("w", prior if prior is not None else dist.Normal(0, scale).expand([D]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", likelihood(x @ w), obs=y)

    return model


def with_latent(name, prior, likelihood):
    """A model with weights w and one more latent in the likelihood."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        extra = numpyro.sample(name, prior)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", likelihood(x @ w, extra), obs=y)

    return model


def two_latents(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.StudentT(nu, x @ w, scale), obs=y)


def three_numbers(x, y):
    """No covariates: the three parameters are the same numbers in every row."""
    loc = numpyro.sample("loc", dist.Normal(0.0, 5.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.StudentT(nu, loc, scale), obs=y)


def softmax(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D, 3]).to_event(2))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Categorical(logits=x @ w), obs=y)


def heteroscedastic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0, 0.3).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, jnp.exp(x @ v)), obs=y)


def two_sites(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, 1.0), obs=y)
        numpyro.sample("sign", dist.Bernoulli(logits=2 * (x @ w)), obs=(y > 0).astype(int))


# Those of whose parameters one is a multiple of another's predictor, which is found by values.
NOT_PROVED = {"negative binomial"}
CUTPOINTS = jnp.array([-0.5, 0.7])
# Name: (model, observations, kind, predictors of each term, latents of the prior factor).
LIKELIHOODS = {
    "normal": (regression(lambda u: dist.Normal(u, 0.5)), REAL, "quadratic", None, ()),
    "normal, nonlinear data": (regression(lambda u: dist.Normal(3.0 - 2.0 * u, 0.5)), REAL, "quadratic", None, ()),
    "normal, unknown scale": (
        with_latent("scale", dist.HalfNormal(1.0), dist.Normal),
        REAL,
        "affine",
        (2,),
        ("scale",),
    ),
    "normal, log scale latent": (
        with_latent("log_scale", dist.Normal(0, 1), lambda u, s: dist.Normal(u, jnp.exp(s))),
        REAL,
        "affine",
        (2,),
        (),
    ),
    "normal, heteroscedastic": (heteroscedastic, REAL, "affine", (2,), ()),
    "normal, sine": (regression(lambda u: dist.Normal(jnp.sin(u), 0.5)), REAL, "draws", (), ()),
    "student": (regression(lambda u: dist.StudentT(4.0, u, 1.0)), REAL, "affine", (1,), ()),
    "student, unknown scale": (
        with_latent("scale", dist.HalfNormal(1.0), lambda u, s: dist.StudentT(4.0, u, s)),
        REAL,
        "affine",
        (2,),
        ("scale",),
    ),
    "student, all unknown": (two_latents, REAL, "draws", (), ("scale", "nu")),
    "student, three numbers": (three_numbers, REAL, "draws", (), ("scale", "nu")),
    "laplace": (regression(lambda u: dist.Laplace(u, 1.0)), REAL, "affine", (1,), ()),
    "cauchy": (regression(lambda u: dist.Cauchy(u, 1.0)), REAL, "affine", (1,), ()),
    "logit": (regression(lambda u: dist.Bernoulli(logits=u)), BINARY, "affine", (1,), ()),
    "sigmoid": (regression(lambda u: dist.Bernoulli(probs=jax.nn.sigmoid(u))), BINARY, "affine", (1,), ()),
    "probit": (regression(lambda u: dist.Bernoulli(probs=ndtr(u))), BINARY, "affine", (1,), ()),
    "binomial": (regression(lambda u: dist.Binomial(9, logits=u)), COUNT, "affine", (1,), ()),
    "poisson": (regression(lambda u: dist.Poisson(jnp.exp(u)), scale=0.3), COUNT, "affine", (1,), ()),
    "poisson, softplus": (regression(lambda u: dist.Poisson(jax.nn.softplus(u))), COUNT, "affine", (1,), ()),
    "negative binomial": (
        with_latent("c", dist.Gamma(2.0, 1.0), lambda u, c: dist.NegativeBinomial2(jnp.exp(u), c)),
        COUNT,
        "affine",
        (2,),
        ("c",),
    ),
    "gamma, log mean": (regression(lambda u: dist.Gamma(2.0, 2.0 / jnp.exp(u))), POSITIVE, "affine", (1,), ()),
    "lognormal": (regression(lambda u: dist.LogNormal(u, 0.5)), POSITIVE, "quadratic", None, ()),
    "ordinal": (regression(lambda u: dist.OrderedLogistic(u, CUTPOINTS)), LEVEL, "affine", (1,), ()),
    "ordinal, unknown cutpoints": (
        with_latent(
            "c",
            dist.TransformedDistribution(dist.Normal(0, 1).expand([2]).to_event(1), dist.transforms.OrderedTransform()),
            dist.OrderedLogistic,
        ),
        LEVEL,
        "draws",
        (),
        None,
    ),
    "categorical": (softmax, LEVEL, "draws", (), ()),
    "two sites": (two_sites, REAL, "affine", (1, 1), ()),
}


def correlated():
    return dist.MultivariateNormal(jnp.zeros(D), precision_matrix=jnp.eye(D) + 0.5)


def hierarchical():
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    return numpyro.sample("w", dist.Normal(0, tau).expand([D]))


def one_of_a_hierarchy():
    centre = numpyro.sample("centre", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    return numpyro.sample("w", dist.Normal(centre, tau)) * jnp.ones(D)


def location_and_scale(made=dist.Normal, scale=None):
    centre = numpyro.sample("centre", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0) if scale is None else scale)
    with numpyro.plate("members", D):
        w = numpyro.sample("w", made(centre, tau))
    return w if w.ndim == 1 else w[:, 1]


def in_an_event(centre, tau):
    return dist.Normal(centre * jnp.arange(2.0), jnp.asarray(tau)[..., None]).to_event(1)


def horseshoe():
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    local = numpyro.sample("local", dist.HalfCauchy(1.0).expand([D]).to_event(1))
    return numpyro.sample("w", dist.Normal(0.0, tau * local).to_event(1))


def hyper_mean():
    centre = numpyro.sample("centre", dist.Normal(0, 2))
    return numpyro.sample("w", dist.Normal(centre, 0.5).expand([D]).to_event(1))


# Name: (prior of the weights, latents held exactly, kind of the prior factor).
PRIORS = {
    "normal": (lambda: numpyro.sample("w", dist.Normal(0, 1).expand([D])), {"w"}, "none"),
    "mvn": (lambda: numpyro.sample("w", correlated()), {"w"}, "none"),
    "random walk": (lambda: numpyro.sample("w", dist.GaussianRandomWalk(0.5, D)), {"w"}, "none"),
    "hyper mean": (hyper_mean, {"w", "centre"}, "none"),
    "lognormal": (lambda: numpyro.sample("w", dist.LogNormal(0, 1).expand([D])), {"w"}, "none"),
    "student": (lambda: numpyro.sample("w", dist.StudentT(4.0, 0, 1).expand([D])), set(), "affine"),
    "laplace": (lambda: numpyro.sample("w", dist.Laplace(0, 1).expand([D])), set(), "affine"),
    "half-normal": (lambda: numpyro.sample("w", dist.HalfNormal(1.0).expand([D])), set(), "affine"),
    "gamma": (lambda: numpyro.sample("w", dist.Gamma(2.0, 1.0).expand([D])), set(), "affine"),
    "beta": (lambda: numpyro.sample("w", dist.Beta(2.0, 3.0).expand([D])), set(), "affine"),
    "hierarchical": (hierarchical, set(), "affine"),
    "hierarchical, one number": (one_of_a_hierarchy, {"centre"}, "affine"),
    "hierarchical, location and scale": (location_and_scale, {"centre"}, "affine"),
    "hierarchical, student": (
        lambda: location_and_scale(lambda m, s: dist.StudentT(4.0, 3.0 + m, s)),
        {"centre"},
        "affine",
    ),
    "hierarchical, a slope": (
        lambda: location_and_scale(lambda m, s: dist.Laplace(m * jnp.arange(3.0) - 1, s)),
        {"centre"},
        "affine",
    ),
    "hierarchical, curved": (lambda: location_and_scale(lambda m, s: dist.Normal(jnp.exp(m), s)), {"centre"}, "draws"),
    "hierarchical, positive": (lambda: location_and_scale(dist.LogNormal), {"centre"}, "draws"),
    "student, event": (lambda: numpyro.sample("w", dist.StudentT(4.0, 0, 1).expand([D]).to_event(1)), set(), "affine"),
    "hierarchical, truncated scale": (
        lambda: location_and_scale(scale=dist.TruncatedNormal(0.5, 1.0, low=0.0)),
        {"centre"},
        "affine",
    ),
    "hierarchical, event": (lambda: location_and_scale(in_an_event), {"centre"}, "affine"),
    "horseshoe": (horseshoe, set(), "affine"),
    "student, matrix": (
        lambda: numpyro.sample("w", dist.StudentT(4.0, 0, jnp.ones(D)[:, None]).expand([D, 2]).to_event(2))[:, 0],
        set(),
        "affine",
    ),
    "dirichlet": (lambda: numpyro.sample("w", dist.Dirichlet(jnp.ones(D))), set(), "draws"),
}


def with_prior(prior):
    """A linear regression with known scale whose weights have the given prior."""

    def model(x, y):
        w = prior()
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Normal(x @ w, 0.5), obs=y)

    return model


def planned(model, *args):
    """The plan with its arrays, on arguments as JAX arrays."""
    args = tuple(jnp.asarray(a) for a in args)
    found = plan_factors(Partition(model, "data", 3), args, {}, key=jax.random.key(1))
    return found.plan, ModelCall(model, found.plan.layout, args, {}, {})


# --- tests


def points(layout):
    """Two points of the flat vector near the middle of the priors."""
    return [jnp.asarray(0.4 * row) for row in np.random.default_rng(1).normal(size=(2, layout.dim))]


def constrained(call, z):
    """The latents' own values, by NumPyro's transforms."""
    trace, _ = call.trace(z)
    return {name: trace[name]["value"] for name in call.layout.names}


def at(data, z):
    """A term's predictors at a point."""
    return tuple(design @ z + offset for design, offset in zip(data.design, data.offset, strict=True))


def check_terms(plan, call):
    """The terms of the rows equal the model's own row log-likelihood as NumPyro evaluates it."""
    for z in points(plan.layout):
        rows = log_likelihood(call.model, constrained(call, z), *call.args, batch_ndims=0)
        for spec in plan.terms:
            data = prepare_term(call, spec)
            found = term_log_prob(spec, data, at(data, z))
            size = max(1.0, float(jnp.abs(rows[spec.site]).max()))
            tolerance = (1e-9 if found.dtype == "float64" else 2e-4) * size
            np.testing.assert_allclose(found, rows[spec.site], rtol=0, atol=tolerance)


def check_whole(plan, call):
    """Exact prior, prior terms and row terms together are the model's log density, up to the exact prior's constant."""
    precision_mean, precision = exact_prior(call, plan.exact, jnp.zeros(plan.layout.dim))
    gaps = []
    for z in points(plan.layout):
        total = precision_mean @ z - 0.5 * z @ precision @ z
        for spec in plan.terms + plan.prior_terms:
            data = prepare_term(call, spec)
            total += term_log_prob(spec, data, at(data, z)).sum()
        if not plan.terms:
            total += log_likelihood(call.model, constrained(call, z), *call.args, batch_ndims=0)["obs"].sum()
        whole = potential_energy(call.model, call.args, call.kwargs, call.layout.unflatten(z))
        gaps.append(float(total + whole))
    np.testing.assert_allclose(gaps[0], gaps[1], atol=1e-8 if total.dtype == "float64" else 2e-3)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihood(name):
    model, observed, kind, predictors, prior_latents = LIKELIHOODS[name]
    plan, call = planned(model, X, observed)
    assert plan.likelihood == kind
    assert predictors is None or tuple(len(t.predictors) for t in plan.terms) == predictors
    assert prior_latents is None or plan.prior_latents == prior_latents
    assert plan.evidence("likelihood") == ("" if kind == "draws" else "found" if name in NOT_PROVED else "proved")
    check_terms(plan, call)
    if kind != "draws" and plan.prior_kind != "draws":
        check_whole(plan, call)


@pytest.mark.parametrize("name", PRIORS)
def test_prior(name):
    prior, exact, kind = PRIORS[name]
    plan, call = planned(with_prior(prior), X, REAL)
    assert set(plan.exact) == exact and plan.prior_kind == kind
    assert plan.evidence("prior") == ("" if not exact and kind == "draws" else "proved")
    assert set(plan.exact) | set(plan.prior_latents) == set(plan.layout.names)
    if kind != "draws":
        check_whole(plan, call)


class TestEdgeScales:
    """Detection does not depend on units: wide and narrow priors, columns over six decades, large offsets."""

    @pytest.mark.parametrize("scale", [1e-3, 100.0])
    @pytest.mark.parametrize("kind", ["quadratic", "affine"])
    def test_prior_sd(self, scale, kind):
        likelihood = {"quadratic": lambda u: dist.Normal(u, 0.5), "affine": lambda u: dist.Laplace(u, 0.5)}[kind]
        plan, call = planned(regression(likelihood, scale=scale), X, REAL)
        assert plan.likelihood == kind and plan.exact == ("w",)
        check_terms(plan, call)

    def test_columns_over_six_decades(self):
        plan, call = planned(regression(lambda u: dist.Bernoulli(logits=u)), X * np.array([1e-3, 1.0, 1e3]), BINARY)
        assert plan.likelihood == "affine" and plan.exact == ("w",)
        check_terms(plan, call)

    def test_large_offset(self):
        plan, _ = planned(regression(lambda u: dist.Normal(1e4 + u, 0.5)), X, REAL + 1e4)
        assert plan.likelihood == "quadratic" and plan.exact == ("w",)


class TestArrays:
    """The tests on values, on arrays made by hand."""

    RAYS = Rays(np.array([[0, 1, 2, 3], [0, 4, 5, 6]]))
    STEPS = np.array([0.0, 1, 2, 3, -0.1, -0.2, -0.3])

    def test_quadratic(self):
        u = self.STEPS[:, None] * [1.0, 3.0] + 0.2
        assert is_quadratic(-0.5 * u**2 + 3 * u, self.RAYS)
        assert not is_quadratic(-np.abs(u - 1.1), self.RAYS)
        assert not is_quadratic(-np.log1p(u**2), self.RAYS)
        assert not is_quadratic(np.where(u > 2, np.inf, u), self.RAYS)

    def test_moves(self):
        assert not moves(np.ones((7, 2)), self.RAYS) and moves(self.STEPS, self.RAYS)
        assert not moves(np.full((7, 2), np.nan), self.RAYS)

    @pytest.mark.parametrize(
        ("link", "inverse"),
        [
            ("identity", lambda u: u),
            ("log", np.exp),
            ("logit", lambda u: 1 / (1 + np.exp(-u))),
            ("softplus", lambda u: np.log1p(np.exp(u))),
        ],
    )
    def test_link(self, link, inverse):
        u = self.STEPS[:, None] * [1.0, -0.5] + 0.2
        found, predictor = affine_link(inverse(u), self.RAYS)
        assert found == link
        np.testing.assert_allclose(predictor, u, rtol=1e-8)
        assert affine_link(np.sin(u), self.RAYS) is None

    def test_a_third_predictor_is_too_many(self):
        facts = SiteFacts("obs", False, False, (2,), 0, (("loc", 0), ("scale", 0), ("df", 0)), False)
        u = np.random.default_rng(0).normal(size=(3, 2, 2))
        t = np.repeat(self.STEPS[:, None], 2, axis=1)
        t[4:] *= 7
        second = np.where(np.arange(7)[:, None] > 3, t, 0)
        paths = {n: np.exp(t * a[0] + second * a[1]) for n, a in zip(("df", "loc", "scale"), u, strict=True)}
        assert find_term(facts, paths, None, self.RAYS) is None
        paths["scale"] = paths["loc"] ** -2.0
        found = find_term(facts, paths, None, self.RAYS)
        assert len(found.predictors) == 2 and len(found.leaves) == 3


def test_a_predictor_whose_parts_cancel_is_still_affine():
    """In float32 among many rows some predictor is small because large parts cancel; its rounding is that of the parts."""
    rng = np.random.default_rng(0)
    design = rng.normal(size=(200_000, 50)).astype(np.float32)
    start, directions = rng.normal(size=50), rng.normal(size=(2, 50))
    steps = np.array([s * k / 3 for s in (1e-2, 3.0, 30.0) for k in (1, 2, 3)])
    points = np.concatenate([start[None], (start + steps[None, :, None] * directions[:, None]).reshape(-1, 50)])
    index = np.concatenate([np.zeros((6, 1), int), 1 + np.arange(18).reshape(6, 3)], axis=1)
    values = np.stack([design @ p.astype(np.float32) for p in points])
    found = affine_link(values, Rays(index))
    assert found is not None and found[0] == "identity"
    assert affine_link(np.sin(values), Rays(index)) is None
