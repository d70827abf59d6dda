"""The laws as functions of a trajectory: each returns the largest violation, to be compared with a tolerance.

They read only the arrays of the states and the data; expectations come from ``oracles.py``.
"""

from __future__ import annotations

import numpy as np

from numpyro_pvi.runtime._refinement import LOOSE_MOVE

from . import oracles
from .fits import guide_moments, numbers, scale_of


def _gap(found, wanted):
    """Largest difference relative to the largest entry (absolute where all entries are zero)."""
    return float(np.max(np.abs(found - wanted)) / (np.max(np.abs(wanted)) or 1.0))


def sums(fitted):
    """Law 1: relative difference between prior + sites and the naturals of the guide's params, at every state."""
    worst = 0.0
    for state in fitted.states:
        own = numbers(state)
        loc, covariance = guide_moments(fitted.pvi, state)
        precision = np.linalg.inv(covariance)
        worst = max(worst, _gap(precision, own.total[1]), _gap(precision @ loc, own.total[0]))
    return worst


def asymmetry(fitted):
    """Law 1, the small print: stored sites are symmetric to the last bit. Returns the largest asymmetry."""
    own = [numbers(state) for state in fitted.states]
    matrices = [site[1] for n in own for site in [*n.groups, *([n.prior_site] if n.prior_site else [])]]
    return max(float(np.max(np.abs(m - m.T))) for m in matrices)


def conjugate(fitted, noise, damping=1.0):
    """Law 2: error of every site after r rounds against (1 - damping)^r of its error at the start.

    At damping 1 it includes q against the closed-form posterior after one round.
    """
    worst = 0.0
    start = numbers(fitted.states[0])
    for done, state in enumerate(fitted.states):
        own, left = numbers(state), (1 - damping) ** done
        for index, (site, first) in enumerate(zip(own.groups, start.groups, strict=True)):
            exact = oracles.linear_factor(*fitted.rows_of(index), noise)
            for now, before, wanted in zip(site, first, exact, strict=True):
                size = np.max(np.abs(wanted))
                worst = max(worst, float(np.max(np.abs((now - wanted) - left * (before - wanted))) / size))
    if damping == 1.0:
        loc, covariance = guide_moments(fitted.pvi, fitted.states[1])
        prior_covariance = np.linalg.inv(start.prior[1])
        wanted = oracles.linear_posterior(
            fitted.X, fitted.y, noise, prior_covariance @ start.prior[0], prior_covariance
        )
        worst = max(worst, _gap(loc, wanted[0]), _gap(covariance, wanted[1]))
    return worst


def stationarity(fitted, elbo):
    """Law 3: largest slope of the global ELBO at the last q, in nats per posterior sd."""
    return float(np.max(np.abs(oracles.elbo_gradient(elbo, *scale_of(fitted)))))


def distance(fitted, loc, covariance):
    """Law 3: largest difference of a mean, in sds, or of a covariance, relative, from a given optimum."""
    own, spread = numbers(fitted.last).moments
    return max(float(np.max(np.abs(own - loc) / np.sqrt(np.diag(covariance)))), _gap(spread, covariance))


def accounting(fitted, expected, expected_prior=None):
    """Law 6: difference between the reported ELBO and the identity, relative to the size of its summands.

    While q still moves by a good part of a posterior sd in a round, quadrature is run at a loose tolerance on purpose; the
    identity is then compared with a loss that carries that error, so those states have a figure of their own.

    Args:
        fitted: a trajectory.
        expected: ``(X, y, loc, covariance)`` to E log p(y_n | theta) per row.
        expected_prior: ``(loc, covariance)`` to E log p of the prior factor, where there is one.

    Returns:
        ``(settled, moving)``: the largest violation where expectations are at their full accuracy, and elsewhere.
    """
    worst = {True: 0.0, False: 0.0}
    closed_form = fitted.last.plan.partition.likelihood == "quadratic"
    steps = zip(fitted.states[:-1], fitted.states[1:], fitted.losses[1:], strict=True)
    for previous, state, loss in steps:
        settled = closed_form or float(previous.report.total_move) < LOOSE_MOVE
        own = numbers(state)
        loc, covariance = own.moments
        second = covariance + np.outer(loc, loc)
        pair = lambda eta: eta[0] @ loc - 0.5 * np.sum(eta[1] * second)  # noqa: E731, B023
        terms = [expected(*fitted.rows_of(i), loc, covariance).sum() - pair(site) for i, site in enumerate(own.groups)]
        if own.prior_site is not None:
            terms.append(expected_prior(loc, covariance) - pair(own.prior_site))
        held = np.asarray(state.exact)
        terms.append(oracles.log_partition(*own.total))
        terms.append(-oracles.log_partition(own.prior[0][held], own.prior[1][np.ix_(held, held)]))
        worst[settled] = max(worst[settled], abs(sum(terms) + loss) / sum(abs(t) for t in terms))
    return worst[True], worst[False]


def evidence(fitted, noise):
    """Law 6 under law 2's conditions: reported evidence after one full round against log p(y), relative."""
    start = numbers(fitted.states[0])
    prior_covariance = np.linalg.inv(start.prior[1])
    exact = oracles.linear_log_evidence(fitted.X, fitted.y, noise, prior_covariance @ start.prior[0], prior_covariance)
    return abs(fitted.losses[1] + exact) / abs(exact)
