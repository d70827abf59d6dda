"""Gamma factors, which are conjugate in nothing, against the best factorised posterior found without the package.

Oracle of two loadings, D = 2: the ELBO on a product grid, by Gauss and Legendre's rule in the quantiles, maximised by SciPy over
both shapes and rates in float64. Oracle of weights inside the plate: the same with one weight, one pattern, D = 1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import optimize, special, stats

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import NaturalGradient

RNG = np.random.default_rng(5)
LOADING, NOISE = np.array([1.2, 0.6]), 0.3
Y = RNG.normal(size=(16, 1)) * LOADING + NOISE**0.5 * RNG.normal(size=(16, 2))
COUNTS = np.array([[4, 7], [0, 1], [9, 6]])
NODES, WEIGHTS = np.polynomial.legendre.leggauss(60)
NODES, WEIGHTS = 0.5 * (NODES + 1), 0.5 * WEIGHTS
DTYPE = jnp.result_type(float)


def factors(y):
    with numpyro.plate("columns", 2):
        z = numpyro.sample("z", dist.Gamma(1.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        covariance = z[:, None] * z + NOISE * jnp.eye(2)
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(2), covariance), obs=y)


def counts(x):
    w = numpyro.sample("w", dist.Gamma(3.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        z = numpyro.sample("z", dist.Gamma(2.0, 1.0))
        # A softened product: affine in neither factor's statistics.
        numpyro.sample("x", dist.Poisson(0.5 + (w * z)[:, None] * jnp.ones(2)).to_event(1), obs=x)


def divergence(a, b, other_a, other_b):
    """KL between gammas, nats."""
    log = special.digamma(a) - np.log(b)
    own = a * np.log(b) - special.gammaln(a) + (a - 1) * log - a
    return own - (other_a * np.log(other_b) - special.gammaln(other_a) + (other_a - 1) * log - other_b * a / b)


def quantiles(a, b):
    return stats.gamma.ppf(NODES, a) / b


def elbo_factors(parameters):
    """ELBO in nats of log shapes and log rates of both loadings."""
    a, b = np.exp(parameters.reshape(2, 2))
    first, second = quantiles(a[0], b[0])[:, None], quantiles(a[1], b[1])[None, :]
    s, n = Y.T @ Y, len(Y)
    one, two, cross = first**2 + NOISE, second**2 + NOISE, first * second
    det = one * two - cross**2
    square = (s[0, 0] * two + s[1, 1] * one - 2 * s[0, 1] * cross) / det
    log_density = -0.5 * (n * np.log(det) + square) - n * np.log(2 * np.pi)
    return WEIGHTS @ log_density @ WEIGHTS - divergence(a, b, 1.0, 1.0).sum()


def elbo_counts(parameters):
    """ELBO in nats of log shapes and log rates of w, then of every row's z."""
    a, b = np.exp(parameters.reshape(2, -1))
    w, total = quantiles(a[0], b[0])[:, None], 0.0
    for x, shape, rate in zip(COUNTS, a[1:], b[1:], strict=True):
        mean = 0.5 + w * quantiles(shape, rate)[None, :]
        log_density = x.sum() * np.log(mean) - 2 * mean - special.gammaln(x + 1).sum()
        total += WEIGHTS @ log_density @ WEIGHTS - divergence(shape, rate, 2.0, 1.0)
    return total - divergence(a[0], b[0], 3.0, 1.0)


@functools.cache
def best(elbo, size):
    start = np.concatenate([np.full(size, 1.0), np.full(size, 1.0)])
    found = optimize.minimize(lambda p: -elbo(p), start, method="BFGS", options={"gtol": 1e-3})
    return -found.fun


def gap(elbo, params, names):
    """How far fitted params are below the optimum, nats."""
    found = [
        np.log(np.concatenate([np.ravel(np.asarray(params[f"{n}_auto_{what}"], float)) for n in names]))
        for what in ("concentration", "rate")
    ]
    return best(elbo, len(found[0])) - elbo(np.concatenate(found))


def fitted(model, data, schedule, rounds=80):
    pvi = PVI(
        Partition(model, "rows", 3),
        AutoExponentialFamily(model),
        solver=NaturalGradient(num_draws=64),
        schedule=schedule(),
    )
    result = pvi.run(jax.random.key(0), rounds, jnp.asarray(data, DTYPE), progress_bar=False)
    return pvi, result


@pytest.mark.parametrize("schedule", [Synchronous, pytest.param(Sequential, marks=pytest.mark.slow)])
def test_loadings_reach_the_best_factorised_posterior(schedule):
    pvi, result = fitted(factors, Y, schedule)
    assert set(pvi.info(result.state).structure) == {"not conjugate in z"}
    # Draws of late rounds move q about the optimum.
    assert -1e-3 < gap(elbo_factors, result.params, ["z"]) < 0.03


@pytest.mark.parametrize("schedule", [Synchronous, pytest.param(Sequential, marks=pytest.mark.slow)])
def test_rows_weights_reach_the_best_factorised_posterior(schedule):
    pvi, result = fitted(counts, COUNTS, schedule)
    assert set(pvi.info(result.state).structure) == {"not conjugate in w, z"}
    assert -1e-3 < gap(elbo_counts, result.params, ["w", "z"]) < 0.03
    # Rows' own sites are held once, whatever the number of groups.
    assert result.state.sites.local.parts["z"].log.shape == (3,)
    assert set(result.state.sites.groups.parts) == {"w"}


def test_the_law_sees_a_posterior_that_is_off():
    _, result = fitted(factors, Y, Synchronous, rounds=40)
    broken = dict(result.params) | {"z_auto_rate": result.params["z_auto_rate"] * 1.2}
    assert gap(elbo_factors, broken, ["z"]) > 0.03


def many(x):
    w = numpyro.sample("w", dist.Gamma(0.1, 0.3).expand([40]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Poisson(jnp.sum(w)), obs=x)


def test_a_member_that_is_one_of_many_in_a_sum_is_not_taken_for_conjugate():
    pvi = PVI(Partition(many, "rows", 1), AutoExponentialFamily(many))
    x = jnp.asarray([30.0, 20.0, 25.0], DTYPE)
    assert pvi.info(pvi.init(jax.random.key(0), x)).structure == ("not conjugate in w",)
