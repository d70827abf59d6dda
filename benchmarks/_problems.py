"""The models of `benchmarks._models` as float64 reference problems, written out by hand from their densities."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array

from benchmarks._references import LOG_2PI, Problem, Rows, gauss_hermite


def expected_softplus(mean: Array, variance: Array) -> Array:
    """E[log(1 + exp(x))] for x ~ N(mean, variance), accurate for any variance.

    Up to sd 1 Gauss-Hermite resolves it. Beyond, max(x, 0) is integrated in closed form and what is left,
    log(1 + exp(-|x|)), is a bump of width one, integrated over x itself on panels that resolve it.
    """
    nodes, weights = gauss_hermite(48, 1)
    sd = jnp.sqrt(variance)
    narrow_sd = jnp.minimum(sd, 1.0)
    narrow = jax.nn.softplus(mean[:, None] + narrow_sd[:, None] * nodes[:, 0]) @ weights
    wide_sd = jnp.maximum(sd, 1.0)
    standard = mean / wide_sd
    ramp = mean * jax.scipy.stats.norm.cdf(standard) + wide_sd * jax.scipy.stats.norm.pdf(standard)
    points, point_weights = _bump_panels()
    density = jax.scipy.stats.norm.pdf(points, mean[:, None], wide_sd[:, None])
    return jnp.where(sd < 1.0, narrow, ramp + density @ point_weights)


@functools.lru_cache
def _bump_panels() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(12)
    edges = np.concatenate([np.arange(0.0, 8.0, 1.0), np.arange(8.0, 40.1, 4.0)])
    half = 0.5 * np.diff(edges)
    points = (0.5 * (edges[1:] + edges[:-1])[:, None] + half[:, None] * nodes).ravel()
    point_weights = (half[:, None] * weights).ravel() * np.log1p(np.exp(-points))
    return np.concatenate([-points[::-1], points]), np.concatenate([point_weights[::-1], point_weights])


def logistic_problem(X: np.ndarray, y: np.ndarray, prior_scale: float = 1.0, wide: bool = False) -> Problem:
    """Bernoulli rows with logit link; ``wide`` takes the rule for any predictor sd instead of Gauss-Hermite."""

    def log_density(a: Array, t: Array) -> Array:
        return t * a[0] - jax.nn.softplus(a[0])

    def expectation(mean: Array, variance: Array, t: Array) -> Array:
        return t * mean - expected_softplus(mean, variance)

    rows = Rows(np.asarray(X, np.float64)[:, None, :], np.asarray(y, np.float64), log_density)
    if wide:
        rows = dataclasses.replace(rows, expectation=expectation)
    return Problem(X.shape[1], np.full(X.shape[1], prior_scale), (rows,))


def linear_problem(X: np.ndarray, y: np.ndarray) -> Problem:
    """Gaussian rows with unit noise; expectations in closed form."""

    def log_density(a: Array, t: Array) -> Array:
        return -0.5 * ((t - a[0]) ** 2 + LOG_2PI)

    def expectation(mean: Array, variance: Array, t: Array) -> Array:
        return -0.5 * ((t - mean) ** 2 + variance + LOG_2PI)

    rows = Rows(np.asarray(X, np.float64)[:, None, :], np.asarray(y, np.float64), log_density, expectation=expectation)
    return Problem(X.shape[1], np.ones(X.shape[1]), (rows,))


def poisson_problem(X: np.ndarray, y: np.ndarray) -> Problem:
    """Poisson rows with log link; expectations in closed form."""

    def log_density(a: Array, t: Array) -> Array:
        return t * a[0] - jnp.exp(a[0]) - gammaln(t + 1.0)

    def expectation(mean: Array, variance: Array, t: Array) -> Array:
        return t * mean - jnp.exp(mean + 0.5 * variance) - gammaln(t + 1.0)

    rows = Rows(np.asarray(X, np.float64)[:, None, :], np.asarray(y, np.float64), log_density, expectation=expectation)
    return Problem(X.shape[1], np.ones(X.shape[1]), (rows,))


def _with_shared(X: np.ndarray, num_shared: int) -> np.ndarray:
    """Designs (N, 1 + num_shared, D + num_shared): the row's own predictor, then latents that every row shares."""
    num_rows, dim = X.shape
    design = np.zeros((num_rows, 1 + num_shared, dim + num_shared))
    design[:, 0, :dim] = X
    design[:, 1:, dim:] = np.eye(num_shared)
    return design


def _one_latent_prior(dim: int, index: int, log_density: Callable[[Array], Array]) -> Rows:
    design = np.zeros((1, 1, dim))
    design[0, 0, index] = 1.0
    return Rows(design, np.zeros(1), lambda a, t: log_density(a[0]), num_nodes=48)


def negative_binomial_problem(X: np.ndarray, y: np.ndarray) -> Problem:
    """Negative binomial rows, theta = (w, log concentration), Exponential(0.5) prior on the concentration."""
    dim = X.shape[1] + 1

    def log_density(a: Array, t: Array) -> Array:
        r, log_mean = jnp.exp(a[1]), a[0]
        log_total = jnp.logaddexp(a[1], log_mean)
        return gammaln(t + r) - gammaln(r) - gammaln(t + 1.0) + r * (a[1] - log_total) + t * (log_mean - log_total)

    prior = _one_latent_prior(dim, dim - 1, lambda z: jnp.log(0.5) - 0.5 * jnp.exp(z) + z)
    scale = np.append(np.ones(dim - 1), np.inf)
    return Problem(dim, scale, (Rows(_with_shared(X, 1), np.asarray(y, np.float64), log_density, 12), prior))


def student_t_problem(X: np.ndarray, y: np.ndarray) -> Problem:
    """Student-t rows with 4 degrees of freedom, theta = (w, log sigma), HalfNormal(1) prior on sigma."""
    dim = X.shape[1] + 1
    constant = float(gammaln(2.5) - gammaln(2.0)) - 0.5 * np.log(4.0 * np.pi)

    def log_density(a: Array, t: Array) -> Array:
        return constant - a[1] - 2.5 * jnp.log1p(((t - a[0]) * jnp.exp(-a[1])) ** 2 / 4.0)

    half_normal = np.log(2.0) - 0.5 * LOG_2PI
    prior = _one_latent_prior(dim, dim - 1, lambda z: half_normal - 0.5 * jnp.exp(2.0 * z) + z)
    scale = np.append(np.ones(dim - 1), np.inf)
    return Problem(dim, scale, (Rows(_with_shared(X, 1), np.asarray(y, np.float64), log_density, 12), prior))


def ordinal_problem(X: np.ndarray, y: np.ndarray, num_levels: int) -> Problem:
    """Ordered logistic rows, theta = (w, z) with cutpoints z_1, z_1 + exp z_2, ..."""
    num_cuts = num_levels - 1

    def log_density(a: Array, t: Array) -> Array:
        cuts = jnp.cumsum(jnp.concatenate([a[1:2], jnp.exp(a[2:])])) - a[0]
        level = t.astype(int)
        upper, lower = cuts[jnp.minimum(level, num_cuts - 1)], cuts[jnp.maximum(level - 1, 0)]
        # log(sigmoid(u) - sigmoid(l)) = logsig(u) + logsig(-l) + log(1 - exp(l - u))
        between = jnp.where((level > 0) & (level < num_cuts), upper - lower, 1.0)
        inner = jax.nn.log_sigmoid(upper) + jax.nn.log_sigmoid(-lower) + jnp.log(-jnp.expm1(-between))
        ends = jnp.where(level == 0, jax.nn.log_sigmoid(upper), jax.nn.log_sigmoid(-lower))
        return jnp.where((level > 0) & (level < num_cuts), inner, ends)

    dim = X.shape[1] + num_cuts
    rows = Rows(_with_shared(X, num_cuts), np.asarray(y, np.float64), log_density, 6)
    return Problem(dim, np.ones(dim), (rows,))


def multinomial_problem(X: np.ndarray, y: np.ndarray, num_classes: int) -> Problem:
    """Multinomial rows, theta = w (D, K) row by row; a row depends on its K - 1 contrasts with the last class."""
    num_rows, dim = X.shape
    contrasts = np.eye(num_classes)[: num_classes - 1] - np.eye(num_classes)[num_classes - 1]
    design = np.einsum("nd,ck->ncdk", np.asarray(X, np.float64), contrasts).reshape(num_rows, num_classes - 1, -1)

    def log_density(a: Array, t: Array) -> Array:
        logits = jnp.append(a, 0.0)
        return logits[t.astype(int)] - jax.nn.logsumexp(logits)

    rows = Rows(design, np.asarray(y, np.float64), log_density, 6)
    return Problem(dim * num_classes, np.ones(dim * num_classes), (rows,))
