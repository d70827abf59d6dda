"""Scales with gamma and inverse gamma priors under `AutoExponentialFamily`: no draws, and the optimum of the closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import optimize, special

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import _gamma_quantiles

Y = np.array([0.3, -1.2, 0.8, 2.0, -0.4, 1.1])
N, SQUARES = len(Y), float(np.sum(Y**2))
TWO_PI = N / 2 * np.log(2 * np.pi)


def scale(prior):
    def model(y):
        s = numpyro.sample("s", prior)
        with numpyro.plate("data", N):
            numpyro.sample("obs", dist.Normal(0.0, s), obs=y)

    return model


def gamma_loss(at):
    """Minus the ELBO of Gamma(a, b), prior Exponential(1): E 1/s^2 = b^2 / ((a - 1)(a - 2))."""
    a, b = 2 + np.exp(at[0]), np.exp(at[1])
    entropy = a - np.log(b) + special.gammaln(a) + (1 - a) * special.digamma(a)
    return TWO_PI + N * (special.digamma(a) - np.log(b)) + SQUARES / 2 * b**2 / ((a - 1) * (a - 2)) + a / b - entropy


def inverse_loss(at):
    """The same of InverseGamma(a, b), prior InverseGamma(3, 2): E 1/s^2 = a (a + 1) / b^2."""
    a, b = np.exp(at)
    log_s, inverse = np.log(b) - special.digamma(a), a / b
    prior = 3 * np.log(2) - special.gammaln(3) - 4 * log_s - 2 * inverse
    entropy = a + np.log(b) + special.gammaln(a) - (1 + a) * special.digamma(a)
    return TWO_PI + N * log_s + SQUARES / 2 * a * (a + 1) / b**2 - prior - entropy


CASES = {
    "gamma": (dist.Exponential(1.0), gamma_loss, lambda x: (2 + np.exp(x[0]), np.exp(x[1]))),
    "inverse gamma": (dist.InverseGamma(3.0, 2.0), inverse_loss, np.exp),
}


def fitted(name):
    model = scale(CASES[name][0])
    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    return pvi.run(random.key(0), 60, jnp.asarray(Y), tol=1e-3, progress_bar=False)


def optimum(name):
    _, loss, read = CASES[name]
    best = optimize.minimize(
        loss, [1.5, 1.5], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-13, "maxiter": 5000}
    )
    return np.array(read(best.x)), best.fun


@pytest.mark.parametrize("name", CASES)
def test_the_optimum_is_that_of_the_closed_form(name):
    (a, b), loss = optimum(name)
    result = fitted(name)
    assert result.converged and result.info.expectation[0] == "quadrature in s"
    found = float(result.params["s_auto_concentration"]), float(result.params["s_auto_rate"])
    # Within the tolerance in sds of log s, which a and b - a / mean say.
    np.testing.assert_allclose(np.log(found[0] / found[1]), np.log(a / b), atol=2e-3 / a**0.5)
    np.testing.assert_allclose(found[0], a, rtol=1e-2)
    np.testing.assert_allclose(float(result.losses[-1]), loss, atol=2e-4)


def test_and_is_not_where_nodes_stay_as_the_concentration_moves(monkeypatch):
    monkeypatch.setattr(_gamma_quantiles, "log_gamma_slope", lambda s, a: jnp.zeros_like(s))
    (a, _), _ = optimum("gamma")
    jax.clear_caches()
    result = fitted("gamma")
    jax.clear_caches()
    assert abs(float(result.params["s_auto_concentration"]) / a - 1) > 0.1


GROUP = np.arange(18) % 6
EFFECTS = np.random.default_rng(0).normal(size=6)[GROUP] + 0.5 * np.random.default_rng(1).normal(size=18)


def effects_loss(at):
    """Minus the ELBO of six normal effects with a gamma scale each for them and for the rows, both priors Exponential(1)."""
    loc, variance = at[:6], np.exp(at[6:12])
    (a, b), (c, d) = ((2 + np.exp(x), np.exp(y)) for x, y in (at[12:14], at[14:16]))
    found = 0.0
    for shape, rate, squares, count in (
        (a, b, np.sum(loc**2 + variance), 6),
        (c, d, np.sum((EFFECTS - loc[GROUP]) ** 2 + variance[GROUP]), 18),
    ):
        log_scale, inverse = special.digamma(shape) - np.log(rate), rate**2 / ((shape - 1) * (shape - 2))
        entropy = shape - np.log(rate) + special.gammaln(shape) + (1 - shape) * special.digamma(shape)
        found += count / 2 * np.log(2 * np.pi) + count * log_scale + squares / 2 * inverse + shape / rate - entropy
    return found - np.sum(0.5 * np.log(2 * np.pi * np.e * variance))


def test_effects_with_an_exponential_scale_take_no_draws():
    def model(group, y):
        t, s = (numpyro.sample(n, dist.Exponential(1.0)) for n in ("t", "s"))
        with numpyro.plate("groups", 6):
            a = numpyro.sample("a", dist.Normal(0.0, t))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.Normal(a[group], s), obs=y)

    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model))
    result = pvi.run(random.key(0), 60, jnp.asarray(GROUP), jnp.asarray(EFFECTS), tol=1e-2, progress_bar=False)
    assert result.converged and not any("draws" in said for said in result.info.expectation)
    best = optimize.minimize(effects_loss, np.concatenate([np.zeros(6), np.full(6, -2.0), [2.0, 2.0, 3.0, 3.0]]))
    loc, sd = best.x[:6], np.exp(0.5 * best.x[6:12])
    assert abs(float(result.losses[-1]) - best.fun) < 2e-3
    np.testing.assert_allclose((result.params["a_auto_loc"] - loc) / sd, 0.0, atol=0.03)
