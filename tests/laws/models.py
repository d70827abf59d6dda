"""Small models with exact oracles.

Every maker returns a *fresh* model: the model object is part of a compiled program's key.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

NOISE = 0.7
PRIOR_LOC = np.array([0.5, -1.0])
PRIOR_COVARIANCE = np.array([[1.5, 0.4], [0.4, 0.8]])


def rows(num_rows=12, correlation=0.0, seed=0):
    """Covariates (two columns), a real response and a binary one."""
    rng = np.random.default_rng(seed)
    covariance = np.array([[1.0, correlation], [correlation, 1.0]])
    X = rng.normal(size=(num_rows, 2)) @ np.linalg.cholesky(covariance).T
    y = X @ np.array([0.8, -0.5]) + 0.6 * rng.normal(size=num_rows)
    labels = (rng.random(num_rows) < 1 / (1 + np.exp(-X @ np.array([1.0, -0.7])))).astype(int)
    return X, y, labels


def groups(num_groups, num_rows=12):
    """Unequal groups, the last of one row, in no order; as many groups as rows gives every row its own."""
    if num_groups >= num_rows:
        return np.random.default_rng(1).permutation(num_rows)
    labels = np.arange(num_rows) % max(num_groups - 1, 1)
    labels[num_rows // 2] = num_groups - 1
    return labels


def make_linear(prior_covariance=PRIOR_COVARIANCE):
    """Known noise, correlated Gaussian prior: quadratic, so everything has a closed form."""

    def linear(X, y):
        w = numpyro.sample("w", dist.MultivariateNormal(jnp.asarray(PRIOR_LOC), jnp.asarray(prior_covariance)))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, NOISE), obs=y)

    return linear


def make_independent_linear():
    """Known noise, independent priors: the mean-field family holds the prior exactly."""

    def independent_linear(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, NOISE), obs=y)

    return independent_linear


def make_logistic():
    """One affine predictor per row: log-concave, expectations by quadrature."""

    def logistic(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)

    return logistic


def make_scale():
    """Unknown noise scale with a prior outside the family: a PRIOR site, and two predictors per row."""

    def scale(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, s), obs=y)

    return scale


def make_hyper():
    """Known Gaussian prior, noise scale as a hyperparameter: the evidence has a closed form for every value of it."""

    def hyper(X, y):
        s = numpyro.param("sigma", jnp.asarray(1.5), constraint=constraints.positive)
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, s), obs=y)

    return hyper
