"""Latents whose prior has no family: normals carried to the prior's support, against SciPy's optimum over these."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import biject_to, constraints
from scipy import optimize, special, stats

from numpyro_pvi import PVI, AutoExponentialFamily, GuideError, Partition
from numpyro_pvi.factors import forms_of, marked
from numpyro_pvi.families import BetaFamily, CategoricalFamily, TransformedNormalFamily, family_for, grid_rule
from numpyro_pvi.solvers import PowerEP

from . import family_ep

U = np.linspace(-16, 16, 6001)
Y = np.array([2.1, 1.6, 3.0, 2.4, 1.9])

# Prior, values and log |dx/du| of u, and the prior's log density, in NumPy.
ABOVE = (lambda u: 1 + np.exp(u), lambda u: u)
BETWEEN = (lambda u: -1 + 61 * special.expit(u), lambda u: np.log(61) + special.log_expit(u) + special.log_expit(-u))
CASES = {
    "Pareto": (dist.Pareto(1.0, 1.5), *ABOVE, lambda x: stats.pareto.logpdf(x, 1.5), constraints.greater_than(1.0)),
    "Uniform": (
        dist.Uniform(-1, 60),
        *BETWEEN,
        lambda x: stats.uniform.logpdf(x, -1, 61),
        constraints.interval(-1, 60),
    ),
    "truncated from above": (
        dist.TruncatedNormal(0.0, 2.0, high=4.0),
        lambda u: 4 - np.exp(u),
        lambda u: u,
        lambda x: stats.truncnorm.logpdf(x, -np.inf, 2, 0, 2),
        constraints.less_than(4.0),
    ),
}


def model_of(prior):
    def model(y=None):
        x = numpyro.sample("x", prior)
        with numpyro.plate("data", 5):
            numpyro.sample("obs", dist.Normal(x, 0.7), obs=y)

    return model


def optimum(value, log_slope, log_density):
    """Location, sd and least loss of a normal u whose image has the least divergence from the posterior."""
    target = log_density(value(U)) + log_slope(U)

    def loss(at):
        log_q = stats.norm.logpdf(U, at[0], np.exp(at[1]))
        mass = np.exp(log_q) * (U[1] - U[0])
        return np.sum(mass * (log_q - np.where(mass > 0, target, 0.0)))

    start = np.sum(U * special.softmax(target))
    found = optimize.minimize(loss, [start, -1.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13})
    return found.x[0], np.exp(found.x[1]), found.fun


def loc_and_scale(result):
    return tuple(float(result.params[f"x_auto_{p}"]) for p in ("loc", "scale"))


@functools.cache
def fitted(name):
    model = model_of(CASES[name][0])
    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    return pvi, pvi.run(random.key(0), 60, jnp.asarray(Y), tol=1e-4, progress_bar=False)


@pytest.mark.parametrize("name", CASES)
def test_q_is_the_best_image_of_a_normal(name):
    _, value, log_slope, log_prior, support = CASES[name]
    pvi, result = fitted(name)
    wanted = optimum(value, log_slope, lambda x: log_prior(x) + stats.norm.logpdf(Y[:, None], x, 0.7).sum(axis=0))
    found = (*loc_and_scale(result), float(result.losses[-1]))
    assert result.converged
    np.testing.assert_allclose(found, wanted, atol=2e-3 * wanted[1], rtol=2e-3)
    posterior = pvi.guide.get_posterior(result.params)["x"]
    assert family_for(posterior) == TransformedNormalFamily(support)
    levels = np.array([0.1, 0.5, 0.9])
    # Of a falling map the upper tail is the lower one's image.
    image = np.sort(value(stats.norm.ppf(levels, *found[:2])))
    np.testing.assert_allclose(pvi.guide.quantiles(result.params, levels)["x"], image, rtol=1e-4)


def test_and_is_not_where_the_base_measure_is_forgotten(monkeypatch):
    monkeypatch.setattr(TransformedNormalFamily, "log_base_measure", lambda self, x: jnp.zeros_like(x))
    _, value, log_slope, log_prior, _ = CASES["Pareto"]
    wanted = optimum(value, log_slope, lambda x: log_prior(x) + stats.norm.logpdf(Y[:, None], x, 0.7).sum(axis=0))
    _, result = fitted.__wrapped__("Pareto")
    jax.clear_caches()
    assert abs(loc_and_scale(result)[0] - wanted[0]) > 0.1 * wanted[1]


def test_power_ep_of_a_prior_that_is_a_member(monkeypatch):
    monkeypatch.setitem(
        family_ep.FAMILIES,
        "Above",
        family_ep.OneDimension(
            *ABOVE, lambda x, u: (u, -(u**2) / 2), lambda m: family_ep._normal(m) - [1, 0], (-14.0, 14.0)
        ),
    )
    prior = dist.TransformedDistribution(dist.Normal(0.3, 0.8), biject_to(constraints.greater_than(1.0)))
    model = model_of(prior)
    pvi = PVI(Partition(model, "data", 5), AutoExponentialFamily(model), solver=PowerEP(power=0.5))
    result = pvi.run(random.key(0), 60, jnp.asarray(Y), tol=1e-5, progress_bar=False)
    factors = [lambda x, y=y: stats.norm.logpdf(y, x, 0.7) for y in Y]
    # In the oracle densities are over x: the base measure is the prior's own -u.
    natural = np.array([0.3 / 0.64 - 1, 1 / 0.64])
    (first, precision), evidence = family_ep.power_ep(["Above"], natural, factors, 0.5)
    np.testing.assert_allclose(
        loc_and_scale(result), ((first + 1) / precision, precision**-0.5), rtol=1e-3, atol=1e-3 * precision**-0.5
    )
    np.testing.assert_allclose(pvi.log_evidence(result.state, jnp.asarray(Y)), evidence, atol=1e-3)


def counted(low):
    def model(y):
        t = numpyro.sample("t", dist.TruncatedNormal(1.0, 2.0, low=low).expand([2]).to_event(1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.Poisson(t).to_event(1), obs=y)

    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    return pvi.run(random.key(0), 40, jnp.array([[2, 5], [1, 3], [4, 0], [1, 2]]), tol=1e-3, progress_bar=False)


def test_a_half_line_from_next_to_zero_is_the_positive_one():
    # Log-normals have another base measure, and their statistics are shifted by it.
    shifted, positive = counted(1e-9), counted(0.0)
    assert shifted.converged and positive.converged
    # What the prior asks of a value, to be beyond its end, is known of all q's: nothing hides, and nothing is drawn.
    assert all("quadrature in t" in said for said in shifted.info.expectation)
    np.testing.assert_allclose(shifted.losses[-1], positive.losses[-1], atol=1e-4)
    for p in ("t_auto_loc", "t_auto_scale"):
        np.testing.assert_allclose(
            shifted.params[p], positive.params[p], atol=1e-3 * float(positive.params["t_auto_scale"].min())
        )


def test_correlations_have_a_family():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(18, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])

    def model(y):
        root = numpyro.sample("L", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(2), scale_tril=root), obs=y)

    def log_density(r):
        # The prior of the correlation r is a beta's on (-1, 1), which is that of L's second row.
        quadratic = (data[:, 0, None] ** 2 - 2 * r * data[:, 0, None] * data[:, 1, None] + data[:, 1, None] ** 2) / (
            1 - r**2
        )
        own = -np.log(2 * np.pi) - 0.5 * np.log1p(-(r**2)) - 0.5 * quadratic
        return own.sum(axis=0) + stats.beta.logpdf((1 + r) / 2, 2, 2) - np.log(2)

    global_u = np.abs(U) < 8
    loc, scale, loss = optimum(
        np.tanh,
        lambda u: np.log(4) + special.log_expit(2 * u) + special.log_expit(-2 * u),
        lambda r: np.where(global_u, log_density(np.where(global_u, r, 0.0)), -1e6),
    )
    pvi = PVI(Partition(model, "data", 3), AutoExponentialFamily(model))
    result = pvi.run(random.key(0), 60, jnp.asarray(data), tol=1e-2, progress_bar=False)
    found = float(result.params["L_auto_loc"][0]), float(result.params["L_auto_scale_tril"][0, 0])
    # By draws: over twelve keys these are off with sds of .029, .020 and .010 nats.
    assert abs(found[0] - loc) < 0.05 * scale and abs(found[1] / scale - 1) < 0.05
    assert abs(float(np.mean(result.losses[-20:])) - loss) < 0.03


def test_a_uniform_share_is_a_beta_and_its_counts_are_conjugate():
    def model(y):
        p = numpyro.sample("p", dist.Uniform(0, 1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.Bernoulli(p), obs=y)

    y = jnp.array([1.0, 0.0, 1.0, 1.0])
    assert family_for(dist.Uniform(0.0, 1.0).expand([2]).to_event(1)).base == BetaFamily()
    result = PVI(Partition(model, "data", 2), AutoExponentialFamily(model)).run(random.key(0), 5, y, progress_bar=False)
    found = [float(result.params[f"p_auto_concentration{i}"]) for i in (1, 0)]
    np.testing.assert_allclose(found, [4.0, 2.0], rtol=1e-5)
    # The evidence is the beta function.
    assert abs(float(result.losses[-1]) + special.betaln(4, 2)) < 1e-5


MOVING = "'x': the upper bound of its support moves .* shift and scale"


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda z, k: dist.Uniform(0, jnp.exp(z)), MOVING),
        (lambda z, k: dist.Uniform(0.0, jax.lax.stop_gradient(jnp.exp(z))), MOVING),
        (lambda z, k: dist.Uniform(0.0, jnp.floor(jnp.exp(z)) + 1), MOVING),
        (lambda z, k: dist.Uniform(0.0, 1.0 + k), MOVING),
        (lambda z, k: dist.Uniform(0.0, numpyro.param("high", 3.0)), MOVING),
        (
            lambda z, k: dist.Pareto(jnp.array([1.0, 2.0]), 1.0).to_event(1),
            "lower bound .* differs from element to element",
        ),
        (
            lambda z, k: dist.ZeroSumNormal(1.0, (2, 3)),
            "coordinates have the shape .1, 2., and only a number or a vector",
        ),
    ],
    ids=["moving", "without slope", "rounded", "with a count", "with a param", "several", "matrix"],
)
def test_what_has_no_support_of_its_own_is_refused(prior, message):
    def model():
        z, k = numpyro.sample("z", dist.Normal(0, 1)), numpyro.sample("k", dist.Categorical(jnp.ones(4) / 4))
        numpyro.sample("x", prior(z, k))

    guide = AutoExponentialFamily(model, families={"k": CategoricalFamily(4)})
    with pytest.raises(GuideError, match=message):
        numpyro.handlers.seed(guide, random.key(0))()


def test_ends_that_are_computed_are_known_where_the_model_runs():
    def model(y):
        x = numpyro.sample("x", dist.Uniform(0.0, jnp.max(y)))
        numpyro.sample("obs", dist.Normal(x, 1.0), obs=y)

    numpyro.handlers.seed(AutoExponentialFamily(model), random.key(0))(jnp.asarray(Y))
    with pytest.raises(GuideError, match="upper bound .* is computed from what is not known yet"):
        jax.jit(lambda y: numpyro.handlers.seed(AutoExponentialFamily(model), random.key(0))(y))(jnp.asarray(Y))


SUPPORTS = [
    (constraints.nonnegative, ()),
    (constraints.softplus_positive, ()),
    (constraints.circular, ()),
    (constraints.unit_interval, ()),
    (constraints.open_interval(0.1, 0.7), ()),
    (constraints.less_than(0.3), ()),
    (constraints.positive_ordered_vector, (2,)),
    (constraints.positive_semidefinite, (2, 2)),
    (constraints.zero_sum(1), (3,)),
    (constraints.l1_ball, (2,)),
]


@pytest.mark.parametrize(("support", "shape"), SUPPORTS, ids=lambda x: type(x).__name__)
def test_a_family_knows_its_members(support, shape):
    family = TransformedNormalFamily(support, shape)
    loc = jnp.zeros(family._coordinate_shape)
    base = dist.MultivariateNormal(loc, jnp.eye(len(loc))) if shape else dist.Normal(loc, 1.0)
    natural = family.normal.from_distribution(base)
    assert family_for(family.to_distribution(natural)) == family
    # Inside a program as outside.
    found = []
    jax.eval_shape(lambda n: found.append(family_for(family.to_distribution(n))), natural)
    assert found == [family]
    assert family.log_base_measure(family.sample(natural, random.key(0))).shape == ()


def test_a_grid_reaches_as_far_as_a_softplus_does():
    family = TransformedNormalFamily(constraints.softplus_positive)
    natural = family.normal.from_distribution(dist.Normal(95.0, 3.0))
    u = jnp.array([90.0, 95.0, 100.0])
    np.testing.assert_allclose(grid_rule(family).value(natural, u), u, rtol=1e-6)


@pytest.mark.parametrize(
    ("asked", "kink"),
    [
        (lambda x: x >= 0.5, False),
        (lambda x: x[::-1] <= 3.0, False),
        (lambda x: x >= 0.6, True),
        (lambda x: 2 * x <= 3.0, True),
        (lambda x: x.astype(int) >= 0.5, True),
    ],
    ids=["beyond its end", "turned round", "inside", "stretched", "rounded"],
)
def test_what_lies_between_ends_is_asked_nothing_at_them(asked, kink):
    def density(x):
        return jnp.where(asked(x), -(x**4), 0.0)

    (form,) = forms_of(jax.make_jaxpr(density)(jnp.ones(2)), [marked("x", "+", (0.5, 3.0))])
    assert bool(form.kink) == kink


def test_a_state_is_saved_and_goes_on(tmp_path):
    pvi, result = fitted("Pareto")
    pvi.save(tmp_path / "state", result.state)
    model = model_of(CASES["Pareto"][0])
    other = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    other.init(random.key(3), jnp.asarray(Y))
    state = other.load(tmp_path / "state")
    assert state.plan.family == result.state.plan.family
    (one, first), (two, second) = pvi.update(result.state, jnp.asarray(Y)), other.update(state, jnp.asarray(Y))
    np.testing.assert_array_equal(first, second)
    for name, value in pvi.get_params(one).items():
        np.testing.assert_array_equal(value, other.get_params(two)[name])


def test_rows_with_latents_of_their_own_alone():
    def model(y):
        with numpyro.plate("data", len(y)):
            x = numpyro.sample("x", dist.LogNormal(0.0, 1.0))
            numpyro.sample("obs", dist.Normal(x, 1.0), obs=y)

    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    result = pvi.run(random.key(0), 30, jnp.asarray(Y), tol=1e-3, progress_bar=False)
    wanted = np.array(
        [optimum(np.exp, lambda u: u, lambda x, y=y: stats.lognorm.logpdf(x, 1.0) + stats.norm.logpdf(y, x)) for y in Y]
    )
    np.testing.assert_allclose(result.params["x_auto_loc"], wanted[:, 0], atol=2e-3)
    np.testing.assert_allclose(float(result.losses[-1]), wanted[:, 2].sum(), atol=2e-3)


def test_an_improper_prior_starts_where_nothing_can_be_drawn_of_it():
    def model(y):
        x = numpyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.Normal(x, 1.0), obs=y)

    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    result = pvi.run(random.key(0), 3, jnp.arange(4.0), progress_bar=False)
    np.testing.assert_allclose(loc_and_scale(result), (1.5, 0.5), rtol=1e-5)


def test_the_state_of_a_member_is_that_of_its_params():
    pvi, result = fitted("Pareto")
    again = pvi.init(random.key(1), jnp.asarray(Y), init_params=result.params)
    for name, value in pvi.get_params(again).items():
        np.testing.assert_allclose(value, result.params[name], rtol=1e-5)
    posterior = pvi.posterior(result.state)["x"]
    draws = posterior.sample(random.key(2), (20_000,))
    # Five standard errors of the mean; of the variance, whose own is about .01.
    assert abs(float(posterior.mean) - float(draws.mean())) < 5 * float(draws.std()) / 20_000**0.5
    assert abs(float(posterior.variance) / float(draws.var()) - 1) < 0.05
