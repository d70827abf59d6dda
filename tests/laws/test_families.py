"""Law 7: conversions are identities, the gradient of A is the mean parameter, densities and KL are NumPyro's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions.kl import kl_divergence

from numpyro_pvi.families import GaussianMean, GaussianNatural, MultivariateNormalFamily, NormalFamily, inner

FAMILIES = [MultivariateNormalFamily(3), NormalFamily(3)]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=["full", "diagonal"])
# Relative to the largest entry. Float32: 6e-8 times the condition of the covariances below (up to about 300).
TOLERANCE = (1e-10, 1e-4)

seeds = st.integers(0, 2**31 - 1)
spreads = st.floats(0.0, 1.0)


def natural_of(family, seed, spread=0.5):
    """A valid natural parameter: correlated, with sds between exp(-spread) and exp(spread)."""
    rng = np.random.default_rng(seed)
    sd = np.exp(spread * rng.uniform(-1, 1, family.dim))
    root = np.eye(family.dim) + 0.5 * np.tril(rng.uniform(-1, 1, (family.dim, family.dim)), -1)
    precision = root @ root.T * sd[:, None] * sd if family.full else sd**2
    vector = rng.normal(size=family.dim)
    return GaussianNatural(jnp.asarray(vector), jnp.asarray(precision))


def assert_close(found, wanted, x64):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[not x64] * (1 + np.max(np.abs(b))))


@each_family
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=seeds, spread=spreads)
def test_natural_to_mean_and_back(family, x64, seed, spread):
    natural = natural_of(family, seed, spread)
    assert_close(family.mean_to_natural(family.natural_to_mean(natural)), natural, x64)


@each_family
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=seeds, spread=spreads)
def test_mean_to_natural_and_back(family, x64, seed, spread):
    """Mean parameters made without the family: E[theta] and -E[theta theta^T] / 2 of a covariance drawn here."""
    loc = jnp.asarray(np.random.default_rng(seed).normal(size=family.dim))
    covariance = natural_of(family, seed, spread).precision
    second = loc[:, None] * loc + covariance if family.full else loc**2 + covariance
    mean_params = GaussianMean(loc, -0.5 * second)
    assert_close(family.natural_to_mean(family.mean_to_natural(mean_params)), mean_params, x64)


@each_family
@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_the_log_partition_is_the_mean_parameter(family, x64, seed):
    natural = natural_of(family, seed)
    found = jax.grad(family.log_partition)(natural)
    # The gradient of a function of a symmetric matrix is read in the space of symmetric matrices.
    assert_close(
        family.symmetrise(GaussianNatural(found.precision_mean, found.precision)), natural_leaves(family, natural), x64
    )


def natural_leaves(family, natural):
    mean_params = family.natural_to_mean(natural)
    return GaussianNatural(mean_params.first, mean_params.second)


@each_family
@pytest.mark.parametrize("seed", range(3))
def test_density_is_numpyros(family, x64, seed):
    natural = natural_of(family, seed)
    theta = jnp.asarray(np.random.default_rng(seed + 10).normal(size=family.dim) * 2)
    own = inner(natural, family.sufficient_statistics(theta)) - family.log_partition(natural)
    assert_close(own, family.to_distribution(natural).log_prob(theta), x64)


@each_family
def test_density_against_numpy(family, x64):
    """Not through NumPyro: the normal density written out in float64."""
    natural, theta = natural_of(family, 5), np.array([0.3, -1.0, 2.0])
    precision = np.asarray(natural.precision, np.float64)
    precision = precision if family.full else np.diag(precision)
    gap = theta - np.linalg.solve(precision, np.asarray(natural.precision_mean, np.float64))
    wanted = -0.5 * gap @ precision @ gap + 0.5 * np.linalg.slogdet(precision)[1] - 1.5 * np.log(2 * np.pi)
    own = inner(natural, family.sufficient_statistics(jnp.asarray(theta))) - family.log_partition(natural)
    assert_close(own, wanted, x64)


@each_family
def test_bregman_divergence_is_numpyros_kl(family, x64):
    """KL(q || p) = A(p) - A(q) - <eta_p - eta_q, mu_q>."""
    q, p = natural_of(family, 1), natural_of(family, 2)
    own = family.log_partition(p) - family.log_partition(q) - inner(p - q, family.natural_to_mean(q))
    assert_close(own, kl_divergence(family.to_distribution(q), family.to_distribution(p)), x64)


@each_family
def test_from_distribution_inverts_to_distribution(family, x64):
    natural = natural_of(family, 3)
    assert_close(family.from_distribution(family.to_distribution(natural)), natural, x64)


def test_from_distribution_reads_numpyros_own_parameters(x64):
    normal = dist.Normal(jnp.array([1.0, -2.0]), jnp.array([0.5, 4.0])).to_event(1)
    wanted = GaussianNatural(np.array([4.0, -0.125]), np.array([4.0, 0.0625]))
    assert_close(NormalFamily(2).from_distribution(normal), wanted, x64)
