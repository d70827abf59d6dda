"""First rounds without structure, far from any optimum: q may narrow but not widen where its sites ask for no Gaussian."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._numerics import all_finite, congruent, invert_lower, missing_eigenvalues
from ..sites import SiteStack, posterior
from ._contract import Evaluation, Problem

# After so many held rounds q is as near an optimum as holding brings it.
_MOST_HELD = 30


def may_hold(problem: Problem) -> bool:
    """Whether rounds can be held at all: expectations that may be by draws, a full covariance, one global ELBO.

    Args:
        problem: the factors.

    Returns:
        Known when tracing: other problems' programs have nothing of it.
    """
    one_bound = not problem.stochastic and not problem.matches_moments and problem.units is None
    return problem.noisy and one_bound and problem.family.full and not problem.flat


def hold_width(
    problem: Problem, proposal: SiteStack, old: Evaluation, moved: Bool[Array, "M"], held: Int[Array, ""]
) -> tuple[SiteStack, Int[Array, ""]]:
    """Add what a round's sites lack of q's own precision, where together they ask for no normalisable q.

    With ``L`` the old precision, ``S S^T = L^-1``, and ``P`` the precision that prior and proposals sum to,

        P + S^-T (W' - W) S^-1,    W = S^T P S,    W' = W with eigenvalues raised to 1 at least,

    takes the place of ``P``; the gradient at the old location stays, and the groups that moved share what is added in
    equal parts, so that sites still sum to q and q does not depend on the partition. It is a Levenberg-Marquardt step
    with q's own precision for its damping. Far from an optimum, curvatures of models such as networks are indefinite; a
    fraction of the step towards them goes to the next saddle and widens q in those directions, until latents (a hidden
    unit) are lost to their prior, which no later step mends. A later round's proposals replace the sites as
    ever, so nothing of what was added is left at a fixed point.

    Args:
        problem: the factors.
        proposal: where the local solves want the sites.
        old: evaluation before the round.
        moved: which groups made a proposal.
        held: rounds held so far; the 31st and later ones are not.

    Returns:
        ``(proposal, held)``: unchanged where q is normalisable at the proposal, and where that is not finite.

    References:
        Marquardt, An algorithm for least-squares estimation of nonlinear parameters, SIAM J. Appl. Math. 11 (1963).
        Khan and Rue, The Bayesian Learning Rule, section 4 (natural-gradient steps as Newton steps).
    """
    total = posterior(problem.prior_natural, proposal)
    due = ~problem.family.in_domain(total) & old.moments.valid
    due = due & all_finite(total) & jnp.any(moved) & (held < _MOST_HELD)

    def added():
        whitened = congruent(old.moments.scale.T, total.precision)
        precision = congruent(invert_lower(old.moments.scale.T), missing_eigenvalues(whitened, 1.0))
        extra = problem.family.natural(precision @ old.moments.loc, precision)
        share = moved / jnp.sum(moved)
        return jax.tree.map(lambda site, x: site + jnp.multiply.outer(share.astype(x.dtype), x), proposal.groups, extra)

    groups = jax.lax.cond(due, added, lambda: proposal.groups)
    return dataclasses.replace(proposal, groups=groups), held + due.astype(held.dtype)
