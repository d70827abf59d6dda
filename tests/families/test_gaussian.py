"""The Gaussian families beyond law 7: domain, batches, arithmetic, and matrices that are hard in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily, NormalFamily, inner

FULL, DIAGONAL = MultivariateNormalFamily(2), NormalFamily(2)
each_family = pytest.mark.parametrize("family", [FULL, DIAGONAL], ids=["full", "diagonal"])


def natural(family, precision, vector=(1.0, -2.0)):
    precision = jnp.asarray(precision, float)
    return GaussianNatural(jnp.asarray(vector), precision if family.full else jnp.diagonal(precision))


@each_family
@pytest.mark.parametrize(
    ("precision", "proper"),
    [
        ([[2.0, 0.0], [0.0, 3.0]], True),
        ([[2.0, 0.0], [0.0, -1e-3]], False),
        ([[2.0, 0.0], [0.0, 0.0]], False),
        ([[2.0, 0.0], [0.0, jnp.nan]], False),
        ([[2.0, 0.0], [0.0, jnp.inf]], False),
    ],
)
def test_in_domain(family, precision, proper):
    own = natural(family, precision)
    assert bool(family.in_domain(own)) is proper
    assert bool(family.moments(own).valid) is proper
    assert bool(jnp.isnan(family.log_partition(own))) is not proper


def test_correlation_beyond_one_is_out_of_the_full_domain():
    assert not FULL.in_domain(natural(FULL, [[1.0, 1.1], [1.1, 1.0]]))
    assert FULL.in_domain(natural(FULL, [[1.0, 0.9], [0.9, 1.0]]))


@each_family
def test_non_finite_precision_mean_is_out_of_the_domain(family):
    assert not family.in_domain(natural(family, np.eye(2), vector=(jnp.nan, 0.0)))


@each_family
def test_nearest_valid_leaves_valid_parameters_alone_and_is_idempotent(family):
    good = natural(family, [[2.0, 0.3], [0.3, 1.0]])
    for a, b in zip(jax.tree.leaves(family.nearest_valid(good)), jax.tree.leaves(good), strict=True):
        np.testing.assert_array_equal(a, b)
    once = family.nearest_valid(natural(family, [[2.0, 0.3], [0.3, -1.0]]))
    assert bool(family.in_domain(once))
    for a, b in zip(jax.tree.leaves(family.nearest_valid(once)), jax.tree.leaves(once), strict=True):
        np.testing.assert_array_equal(a, b)


@each_family
def test_batches_are_the_stack_of_single_results(family):
    items = [natural(family, [[2.0 + k, 0.3], [0.3, 1.0]], (k, 1.0)) for k in range(3)]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *items)
    for function in (family.log_partition, family.natural_to_mean, family.in_domain, family.moments):
        batched = function(stack)
        for k, item in enumerate(items):
            single = function(item)
            for a, b in zip(jax.tree.leaves(batched), jax.tree.leaves(single), strict=True):
                np.testing.assert_allclose(a[k], b, rtol=1e-6)


@each_family
def test_expect_quadratic_is_the_pairing_with_the_mean_parameter(family):
    q, eta = natural(family, [[2.0, 0.3], [0.3, 1.0]]), natural(family, [[0.5, -0.2], [-0.2, 0.1]], (0.2, 0.7))
    found = family.expect_quadratic(eta, family.moments(q))
    np.testing.assert_allclose(found, inner(eta, family.natural_to_mean(q)), rtol=1e-6)


@each_family
def test_arithmetic_of_natural_parameters(family):
    a, b = natural(family, np.eye(2)), natural(family, 2 * np.eye(2), (0.0, 1.0))
    np.testing.assert_allclose((a + b).precision, 3 * (a.precision))
    np.testing.assert_allclose((a - b).precision_mean, np.array([1.0, -3.0]))
    np.testing.assert_allclose((-a * 2).precision, -2 * a.precision)
    with pytest.raises(TypeError):
        a + family.natural_to_mean(a)


def test_scaling_takes_leading_axes():
    stack = FULL.zeros((3,)) + jax.tree.map(lambda x: jnp.broadcast_to(x, (3, *x.shape)), natural(FULL, np.eye(2)))
    scaled = stack * jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(scaled.precision[2], 3 * np.eye(2))


def test_scales_over_many_decades_cost_no_digits():
    """Jacobi scaling: sds of 1e-3 and 1e3 with correlation .9, in the session's own precision."""
    sd = np.array([1e-3, 1e3])
    covariance = np.array([[1.0, 0.9], [0.9, 1.0]]) * sd[:, None] * sd
    own = FULL.from_loc_covariance(jnp.asarray([1e-3, 2e3]), jnp.asarray(covariance))
    moments = FULL.moments(own)
    rounding = 100 * float(jnp.finfo(own.precision.dtype).eps)
    assert bool(moments.valid)
    np.testing.assert_allclose(np.sqrt(FULL.variances(moments)), sd, rtol=rounding)
    np.testing.assert_allclose(moments.loc, [1e-3, 2e3], rtol=rounding)


@each_family
def test_draws_have_the_moments(family, rng):
    q = natural(family, [[2.0, 0.6], [0.6, 1.0]])
    moments = family.moments(q)
    draws = np.asarray(family.draw(moments, jnp.asarray(rng.normal(size=(20_000, 2)))))
    mean_params = family.natural_to_mean(q)
    error = 4 * draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - mean_params.first) < error)
    np.testing.assert_allclose(draws.var(0), family.variances(moments), rtol=0.06)
