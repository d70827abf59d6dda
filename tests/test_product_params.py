"""``numpyro.param`` sites under AutoExponentialFamily: marginal likelihoods in closed form, and structure that a start hides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi.runtime import _product_engine
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset
from numpyro_pvi.solvers import PowerEP

KEY = jax.random.key(0)
TIGHT = {"float32": 2e-3, "float64": 1e-5}[jnp.result_type(float).name]
RNG = np.random.default_rng(3)
COUNTS = RNG.poisson(3.0, 12)
X = RNG.normal(size=12)
Y = 1.0 - 2.0 * X + 0.5 * RNG.normal(size=12)
LABELS = np.array(["a"] * 3 + ["b"] * 4 + ["c"] * 5)
SHAPE = 2.0


def poisson(counts):
    b = numpyro.param("b", 1.0, constraint=constraints.positive)
    rate = numpyro.sample("rate", dist.Gamma(SHAPE, b))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate), obs=counts)


def line(x, y):
    """The slope is a parameter, and starts where nobody sees it."""
    slope = numpyro.param("slope", 0.0)
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(level + slope * x, 0.5), obs=y)


def bent(x, y):
    """Quadratic in the level while the parameter is where it starts, and nowhere else."""
    a = numpyro.param("a", 0.0)
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(level + a * level**2 * x, 0.5), obs=y)


def scale_of(x, y):
    """The rows' precision is a latent, its prior a parameter's; the level's prior is one as well."""
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    level = numpyro.sample("level", dist.Normal(0.0, spread))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y - 2 * x)


def made(model, **options):
    options = {"optim": numpyro.optim.Minimize()} | options
    return PVI(Partition(model, "data", LABELS), AutoExponentialFamily(model), **options)


@functools.cache
def counted(**options):
    pvi = made(poisson, **options)
    return pvi, pvi.run(KEY, 25, jnp.asarray(COUNTS), progress_bar=False)


def at_the_maximum(pvi, result):
    """``b`` maximises ``b^a / (b + N)^(a + S)``, and q is the posterior under that prior."""
    b = SHAPE * len(COUNTS) / COUNTS.sum()
    np.testing.assert_allclose(result.params["b"], b, rtol=TIGHT)
    np.testing.assert_allclose(result.params["rate_auto_rate"], b + len(COUNTS), rtol=TIGHT)
    np.testing.assert_allclose(result.params["rate_auto_concentration"], SHAPE + COUNTS.sum(), rtol=TIGHT)


@pytest.mark.parametrize(
    "schedule",
    [None, Sequential(), StochasticSubset(2), Asynchronous()],
    ids=["synchronous", "in turn", "some", "late"],
)
def test_a_prior_is_fitted_to_the_marginal_likelihood(schedule):
    at_the_maximum(*counted(schedule=schedule))


def test_matched_moments_take_params_with_them():
    at_the_maximum(*counted(solver=PowerEP()))


def test_a_prior_that_is_not_read_again_is_noticed(monkeypatch):
    monkeypatch.setattr(_product_engine, "exact_prior_of", lambda problem, q: COUNTED_PRIOR)
    pvi = made(poisson)
    state = pvi.init(KEY, jnp.asarray(COUNTS))
    global COUNTED_PRIOR
    COUNTED_PRIOR = state.prior
    result = pvi.run(KEY, 25, jnp.asarray(COUNTS), progress_bar=False, init_state=state)
    with pytest.raises(AssertionError):
        at_the_maximum(pvi, result)


def test_a_likelihood_is_fitted_from_where_its_slope_is_hidden():
    """Generalised least squares, of rows that share the level; and Adam, by small steps, on its way there."""
    result = made(line).run(KEY, 40, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    covariance = 0.25 * np.eye(12) + 9.0
    weighed = np.linalg.solve(covariance, X)
    np.testing.assert_allclose(result.params["slope"], weighed @ Y / (weighed @ X), rtol=10 * TIGHT)


def test_a_variance_of_the_prior_is_fitted():
    """Type II maximum likelihood: the mean of the rows has variance ``spread^2 + .25 / N``."""
    result = made(scale_of).run(KEY, 60, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    mean, noise = np.mean(Y - 2 * X), 0.25 / 12
    np.testing.assert_allclose(result.params["spread"], np.sqrt(mean**2 - noise), rtol=10 * TIGHT)


def test_structure_holds_for_all_values_of_params():
    plan = made(bent).init(KEY, jnp.asarray(X), jnp.asarray(Y)).plan
    (role,) = plan.likelihood.roles
    assert role.kind != "exact"
    (role,) = made(line).init(KEY, jnp.asarray(X), jnp.asarray(Y)).plan.likelihood.roles
    assert role.kind == "exact" and role.proved


def test_what_a_state_is_good_for_knows_the_params(tmp_path):
    pvi, args = made(poisson, optim=numpyro.optim.Adam(0.1)), (jnp.asarray(COUNTS),)
    result = pvi.run(KEY, 3, *args, progress_bar=False)
    state, b = result.state, float(result.params["b"])
    assert b != 1.0
    np.testing.assert_allclose(pvi.evaluate(state, *args), result.losses[-1], rtol=1e-5)
    # The prior is the last step's, and the sites are exact at every q.
    assert pvi.khat(state, *args, rng_key=KEY) < 0.5
    score = pvi.prequential(state, args[0][:3], rng_key=KEY, num_samples=200)
    assert np.all(np.isfinite(score.rows))
    pvi.save(tmp_path / "fit.pvi", state)
    fresh = made(poisson, optim=numpyro.optim.Adam(0.1))
    pairs = zip(
        *(p.get_params(p.update(s, *args)[0]).items() for p, s in _both(pvi, fresh, state, tmp_path)), strict=True
    )
    assert all(one == other for one, other in pairs)
    with pytest.warns(UserWarning, match="numpyro.param site.s. b were fitted with it"):
        state = pvi.forget_group(state, "c")
    state = pvi.add_group(state, "c", args[0][7:], num_steps=1)
    params = pvi.get_params(state)
    np.testing.assert_allclose(params["rate_auto_rate"], b + len(COUNTS), rtol=TIGHT)
    np.testing.assert_allclose(params["rate_auto_concentration"], SHAPE + COUNTS.sum(), rtol=TIGHT)


def _both(pvi, fresh, state, folder):
    return (pvi, state), (fresh, fresh.load(folder / "fit.pvi", jnp.asarray(COUNTS)))


def test_params_without_an_optimiser_are_refused():
    with pytest.raises(PVIError, match=r"numpyro.param site\(s\) b but optim is None"):
        made(poisson, optim=None).init(KEY, jnp.asarray(COUNTS))
