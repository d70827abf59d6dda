"""Moments of products of families from points that are not q's draws: by chains and about modes, what they say of their errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_pvi.expectations import (
    ImportanceMoments,
    LaplaceMoments,
    MCMCMoments,
    Unconstrained,
    draw,
    paired,
    tilted_by_chains,
    tilted_by_draws,
    weighable,
)
from numpyro_pvi.expectations._product_moments import matched
from numpyro_pvi.families import GammaFamily, ProductFamily, ScalarNormalFamily, VonMisesFamily
from numpyro_pvi.runtime._product_tilted import tilted_by_laplace
from numpyro_pvi.solvers import MatchRules, first_match_state, match_visit

KEY = jax.random.key(3)


def of(family, law):
    """A product of one component, natural parameters of a law, and coordinates."""
    product = ProductFamily({"x": family})
    q = product.from_distribution({"x": law})
    return product, q, Unconstrained(product, q)


def look_of(space, log_factor, order):
    def at(u):
        def value(point):
            return log_factor(space.values(point)[0]["x"])

        found = jax.value_and_grad(value)(u)
        return found if order == 1 else (*found, jax.hessian(value)(u))

    return at


def by(way, product, q, space, log_factor, key, site=None, power=1.0):
    site = q * 0.0 if site is None else site
    if way == "laplace":
        settings = LaplaceMoments(512)
        look, many = look_of(space, log_factor, 2), lambda values: jax.vmap(log_factor)(values["x"])
        return tilted_by_laplace(space, look, many, q, site, power, key, settings)
    if way == "chains":
        settings = MCMCMoments(60, 128, 2, kernel="lockstep")
        return tilted_by_chains(space, look_of(space, log_factor, 1), q, site, power, key, settings)
    draws = draw(product, q, key, ImportanceMoments().num_draws)
    return tilted_by_draws(product, draws, jax.vmap(log_factor)(draws.values["x"]), q, site, power)


def flat(natural):
    return np.stack([np.asarray(x) for x in jax.tree.leaves(natural)], axis=-1)


@pytest.mark.parametrize("shape", [2.0, 1.0, 0.3])
def test_a_conjugate_factor_is_exact_about_its_mode_however_long_q_is_drawn_out(shape, x64):
    """A gamma of small shape reaches from 1e-10 to 1: draws of a Student's t in its logarithm overflow and must not count."""
    product, q, space = of(GammaFamily(), dist.Gamma(shape, 1.0))

    def change(key):
        found = by("laplace", product, q, space, lambda x: 0.2 * jnp.log(x) - 0.3 * x, key)
        return found.change, found.valid, found.value

    changes, valid, values = jax.jit(jax.vmap(change))(jax.random.split(KEY, 40))
    assert np.all(valid)
    np.testing.assert_allclose(flat(changes), np.tile([0.2, 0.3], (40, 1)), atol=1e-6 if x64 else 5e-3)
    exact = special.gammaln(shape + 0.2) - special.gammaln(shape) - (shape + 0.2) * np.log(1.3)
    np.testing.assert_allclose(values, exact, atol=1e-6 if x64 else 5e-3)


@pytest.mark.parametrize("way", ["laplace", "chains", "draws"])
def test_noise_is_the_spread_over_keys_in_sds_of_q(way):
    """Forty keys tell a standard deviation to 11%; what is said of it lies within a factor of 2."""
    product, q, space = of(GammaFamily(), dist.Gamma(2.0, 1.0))

    def log_factor(x):
        return jnp.sum(jnp.log(x) + 0.4 * jnp.log(1.5) - 2.0 * jnp.log1p(x))

    def one(key):
        found = by(way, product, q, space, log_factor, key)
        return found.change, found.noise, found.value, found.variance

    changes, noise, values, variances = jax.jit(jax.vmap(one))(jax.random.split(KEY, 40))
    gaps = jax.tree.map(lambda x: x - jnp.mean(x, axis=0), changes)
    sizes = jax.vmap(lambda gap: product.inner(gap, product.fisher_product(q, gap)))(gaps)
    real = float(jnp.sqrt(jnp.mean(sizes)))
    assert 0.5 < float(jnp.median(noise)) / real < 2
    assert 0.5 < float(jnp.sqrt(jnp.median(variances)) / jnp.std(values)) < 2
    # No one key's draws make it many times what it is.
    assert float(jnp.max(noise)) < 6 * real


def apart(product, q, space, log_factor, way):
    """Distance of the mean changes over sixteen keys from those by draws of q, in its standard errors."""

    def over_keys(way):
        def one(key):
            found = by(way, product, q, space, log_factor, key)
            return found.change, found.valid

        changes, valid = jax.jit(jax.vmap(one))(jax.random.split(KEY, 16))
        assert np.all(valid)
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), changes)
        gaps = changes - mean
        return mean, jnp.mean(jax.vmap(lambda gap: product.inner(gap, product.fisher_product(q, gap)))(gaps)) / 15

    (mean, error), (wanted, other) = over_keys(way), over_keys("draws")
    gap = mean - wanted
    far, error = product.inner(gap, product.fisher_product(q, gap)), error + other
    return float(jnp.sqrt(far / error)), float(jnp.sqrt(error))


@pytest.mark.parametrize("way", ["laplace", "chains"])
def test_coordinates_far_from_zero_are_no_border(way):
    """x about 1,000 under a Student's t."""
    product, q, space = of(ScalarNormalFamily(), dist.Normal(1000.0, 10.0))
    white = space.whitening(q, KEY)
    np.testing.assert_allclose([white.loc[0], white.scale[0, 0]], [1000, 10], rtol=0.1)
    far, error = apart(product, q, space, lambda x: jnp.sum(dist.StudentT(4.0, x, 5.0).log_prob(1008.0)), way)
    assert far < 4 and error < 0.1


@pytest.mark.parametrize("way", ["laplace", "chains"])
def test_circles_are_cut_opposite_q(way):
    product, q, space = of(VonMisesFamily(), dist.VonMises(3.1, 4.0))
    far, error = apart(product, q, space, lambda x: jnp.sum(dist.Normal(jnp.cos(x - 2.9), 0.7).log_prob(0.8)), way)
    assert far < 4 and error < 0.02


def test_the_value_is_that_of_the_whole_power_where_less_of_it_was_used(x64):
    """Draws of ``q w^(1/2)`` tell ``log E_q[w]``: a conjugate w, whose integral is known."""
    product, q, _ = of(GammaFamily(), dist.Gamma(2.0, 1.0))
    x = stats.gamma.rvs(2.0 + 0.75, scale=1 / 1.6, size=4000, random_state=0)
    values = {"x": jnp.asarray(x)}
    ratio = jnp.asarray(1.5 * np.log(x) - 1.2 * x)
    ready = weighable(product, q, values, {"x": GammaFamily().sufficient_statistics(values["x"])})
    found = matched(product, ready, -0.5 * ratio, ratio, q, jnp.asarray(0.5), 1.0, normalised=False)
    exact = special.gammaln(3.5) - special.gammaln(2.0) - 3.5 * np.log(2.2)
    error = float(jnp.sqrt(jnp.sum(found.apart**2)))
    assert abs(float(found.value) - exact) < 4 * error < 0.3
    np.testing.assert_allclose(flat(found.change), [0.75, 0.6], rtol=1e-8 if x64 else 1e-2)


@pytest.mark.parametrize("way", ["chains", "draws"])
def test_a_factor_at_a_power_is_its_power_at_one(way, x64):
    """Beside a site of 0 both are ``q p^a``: what is divided by a, and how often, and what is not, as the size of the sample."""
    product, q, space = of(GammaFamily(), dist.Gamma(2.0, 1.0))

    @jax.jit
    def find(share, power):
        def log_factor(x):
            return share * jnp.sum(2.0 * jnp.log(x) - 5.0 * jnp.log1p(x))

        found = by(way, product, q, space, log_factor, KEY, power=power)
        return found.change * power, found.value * power, found.noise * power, found.variance * power**2, found.ess

    inside, outside = find(1.0, 0.25), find(0.25, 1.0)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6 if x64 else 1e-3)


@functools.cache
def visited(collapsed):
    """The memory after one visit whose weights collapse altogether, or whose cavity is improper with all draws worth the same."""
    product, q, _ = of(GammaFamily(), dist.Gamma(2.0, 1.0))
    draws = draw(product, q, KEY, 1024)
    zero = q * 0.0
    if collapsed:
        site, factor = zero, jnp.where(jnp.arange(1024) == 3, 0.0, -1e6)
    else:
        site = q * 1.5
        # As the site says, so that all weights are equal.
        factor = paired(product, site, draws.statistics)
    found = tilted_by_draws(product, draws, factor, q, site, 1.0)
    rules = MatchRules(1.0, "auto", 51.2, 2, True)
    return found, match_visit(product, q, site, found, first_match_state(zero, 1.0, factor.dtype), rules).state


def test_total_collapse_counts_towards_chains():
    found, state = visited(True)
    assert float(found.ess) < 1.1 and not bool(found.valid)
    assert int(state.collapses) == 1
    assert "did not reach it" in state.sentence() and "'mcmc'" in state.sentence()


def test_an_improper_cavity_is_no_collapse():
    found, state = visited(False)
    assert float(found.ess) > 1000 and float(found.temper) < 1
    assert int(state.collapses) == 0
    assert "improper at the full power" in state.sentence()
