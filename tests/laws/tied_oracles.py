"""Stochastic EP and its variational limit written in NumPy, sharing no code with the package."""

from __future__ import annotations

import numpy as np

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def decayed(sweep):
    """The share of a step that is left in a sweep, counted from 0."""
    return 10.0 / (10.0 + sweep)


def grid_stochastic_ep(X, y, labels, rounds, power=1.0, parallel=False, prior_sd=2.0):
    """Stochastic power EP of a logistic regression on one latent: one site t, and q = prior * t^M.

    Args:
        X: Float[N, 1].
        y: binary responses.
        labels: group of each row.
        rounds: sweeps.
        power: alpha.
        parallel: whether t moves to the mean of all groups' answers to one q, else after every group.
        prior_sd: sd of the prior.

    Returns:
        ``(trajectory, evidence)``: precision-mean and precision of q after every sweep, and at the last q
        ``A(q) - A(prior) + sum_m (1/alpha) log E_q[(p_m/t)^alpha]``.
    """
    groups = np.unique(labels)
    count, prior, site = len(groups), np.array([0.0, prior_sd**-2]), np.zeros(2)
    eps = np.arange(-1500, 1501) * 0.01

    def tilted(g, q):
        theta = q[0] / q[1] + eps / np.sqrt(q[1])
        mine = labels == g
        factor = -np.logaddexp(0, -(theta[:, None] * X[mine, 0]) * (2 * y[mine] - 1)).sum(1)
        logs = -0.5 * eps**2 + power * (factor - site[0] * theta + 0.5 * site[1] * theta**2)
        weights = np.exp(logs - logs.max())
        mass = logs.max() + np.log(weights.sum()) - np.log(np.exp(-0.5 * eps**2).sum())
        weights /= weights.sum()
        mean = weights @ theta
        variance = weights @ (theta - mean) ** 2
        return (np.array([mean / variance, 1 / variance]) - q) / power, mass / power

    found = []
    for sweep in range(rounds):
        if parallel:
            site = site + np.mean([tilted(g, prior + count * site)[0] for g in groups], axis=0)
        else:
            step = decayed(sweep) if count > 1 else 1.0
            for g in groups:
                site = site + step / count * tilted(g, prior + count * site)[0]
        found.append(prior + count * site)
    q = found[-1]
    half = [0.5 * eta[0] ** 2 / eta[1] - 0.5 * np.log(eta[1]) for eta in (q, prior)]
    return np.array(found), half[0] - half[1] + sum(tilted(g, q)[1] for g in groups)


def minibatch_natural_gradient(X, y, labels, rounds, prior_sd=2.0):
    """Stochastic variational inference: a natural-gradient step on the ELBO per mini-batch, its likelihood weighted M times.

    ``eta_q <- (1 - r) eta_q + r (eta_0 + M grad_mu E_q[log p(y_m | theta)])`` with steps ``r = decayed(sweep) / M``, for a
    logistic regression on one latent.

    Args:
        X: Float[N, 1].
        y: binary responses.
        labels: mini-batch of each row.
        rounds: sweeps over all mini-batches.
        prior_sd: sd of the prior.

    Returns:
        Precision-mean and precision of q after every sweep.

    References:
        Hoffman et al., Stochastic Variational Inference, 2013, figure 4.
    """
    groups = np.unique(labels)
    count, prior = len(groups), np.array([0.0, prior_sd**-2])
    q, found = prior, []
    for sweep in range(rounds):
        for g in groups:
            x, response = X[labels == g, 0], y[labels == g]
            mean, sd = q[0] / q[1], q[1] ** -0.5
            chance = 1 / (1 + np.exp(-np.outer(x, mean + sd * NODES)))
            slope = np.sum(x * (response - chance @ WEIGHTS))
            curve = np.sum(x**2 * ((chance * (1 - chance)) @ WEIGHTS))
            wanted = prior + count * np.array([slope + curve * mean, curve])
            step = decayed(sweep) / count
            q = (1 - step) * q + step * wanted
        found.append(q)
    return np.array(found)


def minibatch_mean_field(factors, prior_precision, rounds):
    """The same for a mean-field q of quadratic factors, whose expected gradients have a closed form.

    Args:
        factors: per mini-batch ``(h, P)`` of ``h^T theta - 1/2 theta^T P theta``.
        prior_precision: of every latent, independent and centred.
        rounds: sweeps over all mini-batches.

    Returns:
        Per sweep, precision-mean and precision of q, Float[rounds, 2, D].
    """
    count, dim = len(factors), len(factors[0][0])
    prior = np.stack([np.zeros(dim), np.full(dim, prior_precision)])
    q, found = prior, []
    for sweep in range(rounds):
        for h, P in factors:
            own = np.diag(P)
            wanted = prior + count * np.stack([h - P @ (q[0] / q[1]) + own * q[0] / q[1], own])
            step = decayed(sweep) / count
            q = (1 - step) * q + step * wanted
        found.append(q)
    return np.array(found)
