"""Chains on mini-batches: exact for Gaussians when gradients are, and within their error of a grid when they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_pvi.expectations._chains as chains
from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import MCMCMoments, from_chains
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily
from numpyro_pvi.solvers import SNEP

ROWS, BATCH, SEEDS = 60, 10, 12
RNG = np.random.default_rng(3)
X = RNG.normal(size=(ROWS, 2))
Y = RNG.random(ROWS) < 1 / (1 + np.exp(-X @ [1.5, -0.5]))
SIGNED = np.where(Y, 1.0, -1.0)[:, None] * X
# About the posterior of these rows under a standard normal prior.
LOC, PRECISION = np.array([1.1, -0.4]), np.array([[9.0, -1.0], [-1.0, 11.0]])
SITE = np.array([8.0, -4.0]), PRECISION - np.eye(2)
SETTINGS = MCMCMoments(num_warmup=50, num_samples=256, kernel="langevin", batch_size=BATCH)


def log_rows(theta, rows):
    return -jnp.logaddexp(0.0, -jnp.asarray(rows) @ theta)


def naturals(vector, precision):
    return GaussianNatural(jnp.asarray(vector), jnp.asarray(precision))


def visits(weight=ROWS / (BATCH // 2), settings=SETTINGS):
    """Tilted moments (mean and covariance) from a dozen seeds, and the share of the evidence."""
    q, site, family = naturals(PRECISION @ LOC, PRECISION), naturals(*SITE), MultivariateNormalFamily(2)
    look = jax.value_and_grad(lambda theta: jnp.sum(log_rows(theta, SIGNED)))

    def look_rows(theta, other, key):
        taken = jnp.asarray(SIGNED)[jax.random.randint(key, (2, BATCH // 2), 0, ROWS)]
        slope = jax.grad(lambda point, rows: jnp.sum(log_rows(point, rows)))
        return weight * jax.vmap(lambda rows: slope(theta, rows) - slope(other, rows))(taken)

    batches = None if settings.batch_size is None else look_rows

    @jax.jit
    def run(key):
        found = from_chains(family, look, q, site, 1.0, key, settings, None, batches)
        moments = family.moments(q + found.change)
        return moments.loc, moments.scale @ moments.scale.T, found.value, found.variance, found.valid

    return [np.array(x) for x in jax.lax.map(run, jax.random.split(jax.random.key(0), SEEDS))]


@functools.cache
def grid():
    """Mean, covariance and share of the evidence by sums over a grid in NumPy."""
    covariance = np.linalg.inv(PRECISION)
    root = np.linalg.cholesky(covariance)
    axis = np.linspace(-8, 8, 321)
    eps = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    theta = LOC + eps @ root.T
    site = theta @ SITE[0] - 0.5 * np.einsum("ni,ij,nj->n", theta, SITE[1], theta)
    base = -0.5 * (eps**2).sum(1)
    logs = base - np.logaddexp(0.0, -theta @ SIGNED.T).sum(1) - site
    weights = np.exp(logs - logs.max())
    value = logs.max() + np.log(weights.sum()) - np.log(np.exp(base).sum())
    weights /= weights.sum()
    mean = weights @ theta
    return mean, (theta - mean).T @ (weights[:, None] * (theta - mean)), value


def gaps(found):
    """Errors of the mean over seeds in sds, and of the variances in logs; largest of each."""
    mean, covariance, _ = grid()
    sds = np.sqrt(np.diag(covariance))
    variances = np.diagonal(found[1], axis1=1, axis2=2).mean(0)
    return np.abs((found[0].mean(0) - mean) / sds).max(), np.abs(np.log(variances / sds**2)).max()


def test_mini_batches_meet_a_grid():
    """A dozen seeds' mean: five standard errors of it are .02 sds and .05; biases of the steps come to as much."""
    found = visits()
    assert np.all(found[4])
    location, width = gaps(found)
    assert location < 0.03 and width < 0.08
    spread = np.std(found[2], ddof=1)
    assert abs(found[2].mean() - grid()[2]) < 5 * spread / np.sqrt(SEEDS) + 0.01
    assert 1 / 3 < spread / np.sqrt(np.mean(found[3])) < 3


def test_a_wrong_weight_of_batches_is_seen():
    location, width = gaps(visits(weight=1.0))
    assert location > 0.03 or width > 0.08


@pytest.mark.parametrize("joint", [True, False])
def test_noise_of_batches_does_not_shrink_the_control_variates_weight(joint):
    """Of a Gaussian it is the covariance (1 and 4 here), however noisy the scores; the planted fault counts the noise."""
    draws = RNG.normal(size=(40_000, 2)) * [1.0, 2.0]
    halves = (-draws / [1.0, 4.0])[:, None] + RNG.normal(size=(40_000, 2, 2))
    eps, score = jnp.asarray(draws), jnp.asarray(halves.mean(axis=1))
    found = np.asarray(chains._coefficients(eps, score, joint, jnp.asarray(halves)))
    np.testing.assert_allclose(np.diag(found) if joint else found, [1.0, 4.0], rtol=0.1)
    fault = np.asarray(chains._coefficients(eps, score, joint, None))
    assert np.all((np.diag(fault) if joint else fault) < [0.75, 1.75])


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=x @ w), obs=y)


LABELS = ["a"] * 24 + ["b"] * 36


def fit(settings, labels=LABELS, mode="auto"):
    pvi = PVI(Partition(model, "data", labels, mode=mode), AutoMultivariateNormal(model), solver=SNEP(moments=settings))
    return pvi.run(jax.random.key(0), 12, jnp.asarray(X), jnp.asarray(Y, float), progress_bar=False).params


@pytest.mark.slow
def test_a_fit_of_unequal_groups_is_that_of_all_rows():
    """Moments of the posterior within a tenth of an sd of those by NUTS on all rows of a group."""
    batches, whole = fit(SETTINGS), fit(MCMCMoments(num_samples=256))
    sds = np.sqrt(np.sum(np.asarray(whole["auto_scale_tril"]) ** 2, axis=1))
    assert np.all(np.abs(batches["auto_loc"] - whole["auto_loc"]) < 0.1 * sds)
    np.testing.assert_allclose(np.sqrt(np.sum(np.asarray(batches["auto_scale_tril"]) ** 2, axis=1)), sds, rtol=0.1)


def test_what_cannot_take_batches_says_so():
    with pytest.raises(PVIError, match=r"batch_size=3.*even int"):
        MCMCMoments(kernel="langevin", batch_size=3)
    with pytest.raises(PVIError, match=r"kernel='nuts', batch_size=4.*kernel='langevin'"):
        MCMCMoments(batch_size=4)
    with pytest.raises(PVIError, match=r"batch_size=26.*group 'a' has only 24 row"):
        fit(MCMCMoments(kernel="langevin", batch_size=26))
    with pytest.raises(PVIError, match="evaluated by masks"):
        fit(SETTINGS, mode="mask")
