"""Answers in NumPy and SciPy, always in float64, sharing no code with the package."""

from __future__ import annotations

import numpy as np
from scipy import optimize

LOG_2PI = np.log(2 * np.pi)
# Dense trapezoidal integration against the standard normal. Its error falls as exp(-2 pi^2 / (sd * step)) for a logistic
# link; Gauss-Hermite with 80 nodes leaves 1e-8 already at predictor sd 2.
_NODES = np.linspace(-9, 9, 1801)
_WEIGHTS = np.exp(-0.5 * _NODES**2)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def log_partition(vector, precision):
    """log of the integral of exp(vector . x - 1/2 x . precision x)."""
    _, log_det = np.linalg.slogdet(precision)
    return 0.5 * vector @ np.linalg.solve(precision, vector) - 0.5 * log_det + 0.5 * len(vector) * LOG_2PI


def gaussian_kl(loc, covariance, other_loc, other_covariance):
    gap = other_loc - loc
    inner = np.trace(np.linalg.solve(other_covariance, covariance)) + gap @ np.linalg.solve(other_covariance, gap)
    return 0.5 * (inner - len(loc) + np.linalg.slogdet(other_covariance)[1] - np.linalg.slogdet(covariance)[1])


# ---------------------------------------------------------------- linear regression with known noise


def linear_factor(X, y, noise):
    """Natural parameters (precision-mean, precision) of the likelihood of some rows."""
    return X.T @ y / noise**2, X.T @ X / noise**2


def linear_posterior(X, y, noise, prior_loc, prior_covariance):
    """Location and covariance."""
    vector, precision = linear_factor(X, y, noise)
    covariance = np.linalg.inv(np.linalg.inv(prior_covariance) + precision)
    return covariance @ (np.linalg.solve(prior_covariance, prior_loc) + vector), covariance


def linear_log_evidence(X, y, noise, prior_loc, prior_covariance):
    """log p(y), from the marginal distribution of y and not from any identity of variational inference."""
    covariance = X @ prior_covariance @ X.T + noise**2 * np.eye(len(y))
    gap = y - X @ prior_loc
    return -0.5 * (gap @ np.linalg.solve(covariance, gap) + np.linalg.slogdet(covariance)[1] + len(y) * LOG_2PI)


def best_noise(X, y, prior_loc, prior_covariance):
    """The noise scale that maximises the evidence."""
    found = optimize.minimize_scalar(
        lambda u: -linear_log_evidence(X, y, np.exp(u), prior_loc, prior_covariance),
        bounds=(-4, 3),
        options={"xatol": 1e-10},
    )
    return float(np.exp(found.x))


def mean_field_of_gaussian(loc, covariance):
    """The independent Gaussian closest in KL(q || p): the same location, variances 1 / diag(precision)."""
    return loc, 1 / np.diag(np.linalg.inv(covariance))


# ---------------------------------------------------------------- expected log-likelihoods of rows under a Gaussian


def expected_linear(X, y, loc, covariance, noise):
    """E log p(y_n | theta) per row, in nats."""
    return -0.5 * LOG_2PI - np.log(noise) - 0.5 * ((y - X @ loc) ** 2 + _variances(X, covariance)) / noise**2


def expected_logistic(X, y, loc, covariance):
    """E log p(y_n | theta) per row, by dense integration."""
    predictor = (X @ loc)[:, None] + np.sqrt(_variances(X, covariance))[:, None] * _NODES
    return (y[:, None] * predictor - np.logaddexp(0, predictor)) @ _WEIGHTS


def expected_scale(X, y, loc, covariance):
    """E log Normal(y_n | x_n . w, exp(u)) per row with theta = (w, u) jointly Gaussian, in closed form.

    exp(-2u) tilts the Gaussian: E[exp(-2u) g(w)] = exp(-2 m_u + 2 v_u) E[g(w shifted by -2 cov(w, u))].
    """
    loc_u, var_u = loc[-1], covariance[-1, -1]
    shifted = X @ (loc[:-1] - 2 * covariance[:-1, -1])
    square = (y - shifted) ** 2 + _variances(X, covariance[:-1, :-1])
    return -0.5 * LOG_2PI - loc_u - 0.5 * np.exp(-2 * loc_u + 2 * var_u) * square


def expected_half_normal(loc, covariance):
    """E log p(u) with exp(u) ~ HalfNormal(1), the Jacobian included."""
    return 0.5 * np.log(2 / np.pi) + loc[-1] - 0.5 * np.exp(2 * loc[-1] + 2 * covariance[-1, -1])


def _variances(X, covariance):
    return np.einsum("ni,ij,nj->n", X, covariance, X)


# ---------------------------------------------------------------- global ELBOs


def elbo_linear(X, y, noise, prior_loc, prior_covariance):
    def elbo(loc, covariance):
        return expected_linear(X, y, loc, covariance, noise).sum() - gaussian_kl(
            loc, covariance, prior_loc, prior_covariance
        )

    return elbo


def elbo_logistic(X, y, prior_sd=2.0):
    def elbo(loc, covariance):
        prior = prior_sd**2 * np.eye(len(loc))
        return expected_logistic(X, y, loc, covariance).sum() - gaussian_kl(loc, covariance, np.zeros(len(loc)), prior)

    return elbo


def elbo_scale(X, y, prior_sd=2.0):
    def elbo(loc, covariance):
        size = len(loc)
        entropy = 0.5 * size * (1 + LOG_2PI) + 0.5 * np.linalg.slogdet(covariance)[1]
        second = loc[:-1] @ loc[:-1] + np.trace(covariance[:-1, :-1])
        prior = -0.5 * second / prior_sd**2 - (size - 1) * (0.5 * LOG_2PI + np.log(prior_sd))
        likelihood = expected_scale(X, y, loc, covariance).sum()
        return likelihood + prior + expected_half_normal(loc, covariance) + entropy

    return elbo


def elbo_gradient(elbo, loc, scale, step=1e-4):
    """Central differences of a global ELBO along q's own parameters, each in posterior sd units.

    Args:
        elbo: ``(loc, covariance)`` to nats.
        loc: Float[D].
        scale: Float[D, D] lower Cholesky factor, or Float[D] standard deviations of a mean-field q.
        step: in sds.

    Returns:
        Nats per posterior sd, one per parameter; zero at a stationary point.
    """
    full = scale.ndim == 2
    sd = np.sqrt(np.diag(scale @ scale.T)) if full else scale
    covariance = lambda s: s @ s.T if full else np.diag(s**2)  # noqa: E731
    found = []
    for i in range(len(loc)):
        shift = np.zeros(len(loc))
        shift[i] = step * sd[i]
        found.append(elbo(loc + shift, covariance(scale)) - elbo(loc - shift, covariance(scale)))
    for index in zip(*(np.tril_indices(len(loc)) if full else (np.arange(len(loc)),)), strict=True):
        shift = np.zeros_like(scale)
        shift[index] = step * sd[index[0]]
        found.append(elbo(loc, covariance(scale + shift)) - elbo(loc, covariance(scale - shift)))
    return np.array(found) / (2 * step)


def batch_vi_logistic(X, y, prior_sd=2.0, diagonal=False):
    """Location and covariance of the Gaussian with the largest ELBO: BFGS on (loc, Cholesky factor), exact gradients.

    With ``diagonal`` the factor is diagonal, so the optimum is the mean-field one.
    """
    dim = X.shape[1]
    free = np.diag_indices(dim) if diagonal else np.tril_indices(dim)
    elbo = elbo_logistic(X, y, prior_sd)

    def unpack(z):
        scale = np.zeros((dim, dim))
        scale[free] = z[dim:]
        return z[:dim], scale

    def loss(z):
        loc, scale = unpack(z)
        covariance = scale @ scale.T
        predictor = (X @ loc)[:, None] + np.sqrt(_variances(X, covariance))[:, None] * _NODES
        mean = 1 / (1 + np.exp(-predictor))
        slope, curvature = (y[:, None] - mean) @ _WEIGHTS, -(mean * (1 - mean)) @ _WEIGHTS
        d_loc = X.T @ slope - loc / prior_sd**2
        d_covariance = 0.5 * (X.T * curvature) @ X - 0.5 * np.eye(dim) / prior_sd**2
        d_scale = 2 * d_covariance @ scale + np.diag(1 / np.diag(scale))
        return -elbo(loc, covariance), -np.concatenate([d_loc, d_scale[free]])

    start = np.concatenate([np.zeros(dim), np.eye(dim)[free]])
    found = optimize.minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 500})
    loc, scale = unpack(found.x)
    return loc, scale @ scale.T
