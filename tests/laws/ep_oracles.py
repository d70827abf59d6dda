"""Expectation propagation written twice in NumPy, sharing no code with the package: on a dense grid, and as textbooks have it."""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import log_ndtr

from .oracles import log_partition

LINKS = {"logit": lambda u: -np.logaddexp(0, -u), "probit": log_ndtr}


def grid_ep(X, y, labels, link="logit", power=1.0, prior_sd=2.0, sweeps=60, diagonal=False):
    """Power EP of a binary regression, one site per label.

    Args:
        X: Float[N, D], D of 1 or 2.
        y: binary responses.
        labels: group of each row.
        link: "logit" or "probit".
        power: alpha.
        prior_sd: sd of the independent prior.
        sweeps: sweeps over all groups.
        diagonal: whether q is mean-field.

    Returns:
        ``(loc, covariance, log evidence)``.
    """

    def factor_of(g):
        mine = labels == g
        return lambda theta: LINKS[link]((theta @ X[mine].T) * (2 * y[mine] - 1)).sum(1)

    factors = [factor_of(g) for g in np.unique(labels)]
    prior = np.zeros(X.shape[1]), np.eye(X.shape[1]) / prior_sd**2
    base = log_partition(*prior)
    return factors_ep(factors, prior, base, power=power, sweeps=sweeps, diagonal=diagonal)


def factors_ep(factors, prior, base, start=None, power=1.0, sweeps=60, diagonal=False):
    """Sequential power EP, every tilted distribution summed over a grid in whitened coordinates.

    Args:
        factors: log densities of many points, one per site.
        prior: natural parameters of the exactly held prior.
        base: its log partition function.
        start: sites to start from.
        power: alpha.
        sweeps: sweeps over all factors.
        diagonal: whether q is mean-field.

    Returns:
        ``(loc, covariance, log evidence)``.
    """
    dim = len(prior[0])
    axis = np.arange(-60, 61) * 0.2
    grid = np.stack(np.meshgrid(*[axis] * dim, indexing="ij"), -1).reshape(-1, dim)
    sites = dict(enumerate(start or [(np.zeros(dim), np.zeros((dim, dim))) for _ in factors]))

    def posterior():
        return tuple(prior[k] + sum(site[k] for site in sites.values()) for k in (0, 1))

    def tilted(g, vector, precision):
        covariance = np.linalg.inv(precision)
        root = np.linalg.cholesky(covariance)
        theta = covariance @ vector + grid @ root.T
        h, P = vector - power * sites[g][0], precision - power * sites[g][1]
        logs = theta @ h - 0.5 * np.einsum("ni,ij,nj->n", theta, P, theta) + power * factors[g](theta)
        cell = 0.2**dim * np.prod(np.diag(root))
        return theta, logs, cell

    for _ in range(sweeps):
        for g in sites:
            vector, precision = posterior()
            theta, logs, _ = tilted(g, vector, precision)
            weights = np.exp(logs - logs.max())
            weights /= weights.sum()
            loc = weights @ theta
            covariance = (theta - loc).T @ (weights[:, None] * (theta - loc))
            new = np.linalg.inv(np.diag(np.diag(covariance)) if diagonal else covariance)
            sites[g] = sites[g][0] + (new @ loc - vector) / power, sites[g][1] + (new - precision) / power
    vector, precision = posterior()
    evidence = log_partition(vector, precision) - base
    for g in sites:
        _, logs, cell = tilted(g, vector, precision)
        log_mass = logs.max() + np.log(np.exp(logs - logs.max()).sum() * cell)
        evidence += (log_mass - log_partition(vector, precision)) / power
    covariance = np.linalg.inv(precision)
    return covariance @ vector, covariance, evidence


def probit_ep(K, y, sweeps=60):
    """EP for probit classification with a Gaussian prior N(0, K) over the predictors, one site per row.

    The update is in the marginals' closed form, with the whole posterior computed anew after every row.

    Args:
        K: Float[N, N] prior covariance.
        y: binary responses.
        sweeps: sweeps over all rows.

    Returns:
        ``(loc, covariance, log evidence)`` over the predictors.

    References:
        Rasmussen and Williams, Gaussian Processes for Machine Learning, algorithm 3.5 and eq. 3.58, 3.65.
    """
    size, sign = len(y), 2 * np.asarray(y) - 1
    tau, nu = np.zeros(size), np.zeros(size)

    def posterior():
        root = np.sqrt(np.maximum(tau, 0))
        B = np.eye(size) + root[:, None] * K * root
        covariance = K - (K * root) @ np.linalg.solve(B, root[:, None] * K)
        return covariance @ nu, covariance

    for _ in range(sweeps):
        for n in range(size):
            loc, covariance = posterior()
            tau_c, nu_c = 1 / covariance[n, n] - tau[n], loc[n] / covariance[n, n] - nu[n]
            mean, variance = nu_c / tau_c, 1 / tau_c
            z = sign[n] * mean / np.sqrt(1 + variance)
            ratio = np.exp(stats.norm.logpdf(z) - log_ndtr(z))
            new_mean = mean + sign[n] * variance * ratio / np.sqrt(1 + variance)
            new_variance = variance - variance**2 * ratio / (1 + variance) * (z + ratio)
            tau[n], nu[n] = 1 / new_variance - tau_c, new_mean / new_variance - nu_c
    loc, covariance = posterior()
    tau_c, nu_c = 1 / np.diag(covariance) - tau, loc / np.diag(covariance) - nu
    mean, variance = nu_c / tau_c, 1 / tau_c
    # Eq. 3.65 as the integral of the prior times the sites, each with its own constant.
    mu = nu / tau
    S = np.diag(1 / tau)
    evidence = stats.multivariate_normal(np.zeros(size), K + S, allow_singular=False).logpdf(mu)
    evidence += np.sum(log_ndtr(sign * mean / np.sqrt(1 + variance)))
    evidence += np.sum(0.5 * np.log(variance + 1 / tau) + (mean - mu) ** 2 / (2 * (variance + 1 / tau)))
    return loc, covariance, evidence + 0.5 * size * np.log(2 * np.pi)
