"""Gamma draws and their implicit derivative, against SciPy: the distribution function, and central differences of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_pvi.families import GammaFamily, GammaNatural, InverseGammaFamily, InverseGammaNatural
from numpyro_pvi.families._gamma import log_gamma_draws, log_gamma_slope

DTYPE = jnp.result_type(float)
LOOSE, TIGHT = {"float32": (2e-3, 2e-6), "float64": (1e-4, 1e-6)}[DTYPE.name]
QUANTILES = np.array([0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])


@pytest.mark.parametrize("a", [0.05, 0.3, 1.0, 2.5, 7.99, 8.01, 20.0, 1e4])
def test_the_slope_is_that_of_the_quantile(a):
    x, h = stats.gamma.ppf(QUANTILES, a), 1e-4 * a
    # dP/da + p dx/da = 0 where P stays.
    slope = (special.gammainc(a + h, x) - special.gammainc(a - h, x)) / (2 * h)
    density = np.exp(a * np.log(x) - x - special.gammaln(a))
    found = np.asarray(log_gamma_slope(jnp.asarray(np.log(x), DTYPE), jnp.full(x.shape, a, DTYPE)), float)
    np.testing.assert_allclose(found, -slope / density, rtol=LOOSE)
    assert np.max(np.abs(found * density + slope)) < TIGHT


def test_draws_have_the_distribution_and_the_slope_its_mean():
    shapes = np.array([0.02, 0.4, 1.0, 1.7, 30.0])
    a = jnp.asarray(shapes, DTYPE)
    log_x, slope = jax.jvp(lambda a: log_gamma_draws(jax.random.key(0), a, (20_000,)), (a,), (jnp.ones_like(a),))
    for i, shape in enumerate(shapes):
        own = np.asarray(log_x[:, i], float)
        # Where x underflows, P(a, x) = x^a / Gamma(a + 1).
        low = np.exp(shape * own - special.gammaln(shape + 1))
        assert stats.kstest(np.where(own < -30, low, special.gammainc(shape, np.exp(own))), "uniform").pvalue > 1e-3
        # d E[log x] / da = psi'(a); five standard errors.
        each = np.asarray(slope[:, i], float)
        error = 5 * each.std() / len(each) ** 0.5
        assert abs(each.mean() - special.polygamma(1, shape)) < error


def test_invalid_concentrations_give_nan_and_end():
    found = log_gamma_draws(jax.random.key(1), jnp.asarray([0.0, -1.0, jnp.nan, jnp.inf, 2.0], DTYPE))
    assert np.array_equal(np.isnan(found), [True, True, True, True, False])


def test_families_draw_at_their_rates():
    family, natural = GammaFamily(), GammaNatural(jnp.asarray(4.0), jnp.asarray(8.0))
    x = np.asarray(family.sample(natural, jax.random.key(2), (20_000,)), float)
    assert stats.kstest(x, stats.gamma(5.0, scale=1 / 8).cdf).pvalue > 1e-3
    other = InverseGammaNatural(jnp.asarray(6.0), jnp.asarray(8.0))
    x = np.asarray(InverseGammaFamily().sample(other, jax.random.key(3), (20_000,)), float)
    assert stats.kstest(x, stats.invgamma(5.0, scale=8.0).cdf).pvalue > 1e-3


def test_statistics_of_draws_that_underflow_have_their_mean_and_their_slope():
    # E log x = psi(a) - log b is -1000 here, far below the logarithm of the smallest number.
    natural = GammaNatural(jnp.asarray(1e-3 - 1, DTYPE), jnp.asarray(2.0, DTYPE))
    a = float(natural.log) + 1
    family, inverse = GammaFamily(), InverseGammaFamily()

    def log_statistics(natural):
        return family.sample_with_statistics(natural, jax.random.key(4), (4_000,))[1].log

    each, slope = (
        np.asarray(x, float)
        for x in jax.jvp(log_statistics, (natural,), (GammaNatural(jnp.ones((), DTYPE), jnp.zeros((), DTYPE)),))
    )
    assert abs(each.mean() - (special.digamma(a) - np.log(2.0))) < 5 * each.std() / len(each) ** 0.5
    assert abs(slope.mean() - special.polygamma(1, a)) < 5 * slope.std() / len(slope) ** 0.5
    other = InverseGammaNatural(natural.log + 2, natural.rate)
    each = np.asarray(inverse.sample_with_statistics(other, jax.random.key(4), (4_000,))[1].log, float)
    assert abs(each.mean() - (special.digamma(a) - np.log(2.0))) < 5 * each.std() / len(each) ** 0.5


def test_a_product_of_draws_that_underflow_is_positive():
    natural = GammaNatural(jnp.asarray(1e-4 - 1, DTYPE), jnp.asarray(2.0, DTYPE))
    x = GammaFamily().sample(natural, jax.random.key(5), (2, 100))
    assert bool(jnp.all(x[0] * x[1] > 0))
