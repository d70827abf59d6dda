"""Bayesian committee machines: every group fits a posterior of its own, once, and the posteriors are multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..errors import PVIError
from ..families import Moments
from ..sites import SiteStack, damp, posterior, select, with_more
from ._acceptance import refuse_power, shorten
from ._contract import Accepted, Problem, RoundCarry, ScheduleDefaults, check_visits
from ._convergence import Approach, Asked, approach, at_rest, round_report, with_prior

# Relative quadrature error that members' fits, of which there is only one, aim at.
_TOLERANCE = {"float32": 1e-5, "float64": 1e-8}


class _Member(NamedTuple):
    """One member's fit."""

    site: Any
    state: Any
    prior: Any
    prior_state: Any
    moments: Moments
    # How far the last visit moved the member's posterior, and what is left, in its sds.
    approach: Approach
    backoffs: Int[Array, ""]
    moved: Bool[Array, ""]
    visits: Int[Array, ""]
    # What all groups hold beside their sites, with this member's rows as its fit has them.
    local: Any = None


@dataclasses.dataclass(frozen=True)
class Committee(ScheduleDefaults):
    """A baseline without coordination: every member fits its own posterior to convergence, and they are multiplied once.

    ``prior="same"``: member m fits ``p(theta) p(y_m | theta)``, and ``eta_q = sum_m eta_{q_m} - (M - 1) eta_0``.
    ``prior="split"``: member m fits ``p(theta)^(1/M) p(y_m | theta)``, and ``eta_q = sum_m eta_{q_m}``. Either way a member's
    posterior is its share of the prior plus a site, so that q is the prior plus all sites. Where part of the prior is outside
    the family ("same" only), every member fits that part with its rows, and one more member fits it alone and stands for it.

    A member visits its own group until its posterior moves by at most ``tol`` sds, ``max_visits`` times at most (always as
    often under a stochastic solver, whose moves do not die out). The first round does it all; later ones change nothing.
    Rows' own latents are those of their member's posterior; where moments are matched and they are integrated out, they are
    matched to the product.

    Members never see each other, so in general q is not a fixed point of anything. For linear-Gaussian models it is the exact
    posterior, both ways. The loss is the negative ELBO of the product q, a bound of log p(y) as under any schedule, and
    nothing that a member has fitted.

    Args:
        prior: "same" or "split".
        tol: largest move of a converged member, in its own posterior sds.
        max_visits: most visits of a member.

    Raises:
        PVIError: on construction, for values outside these ranges; at ``init``, for "split" with a prior outside the
            family.

    References:
        Tresp, A Bayesian Committee Machine, Neural Computation 12 (2000). Ashman et al., Partitioned Variational Inference,
        section 7.1 and appendix E.2 (same and split priors).
    """

    prior: str = "same"
    tol: float = 1e-4
    max_visits: int = 100

    def __post_init__(self):
        if self.prior not in ("same", "split"):
            raise PVIError(f"Committee(prior={self.prior!r}): expected 'same' or 'split'.")
        if not (isinstance(self.tol, float) and self.tol > 0):
            raise PVIError(f"Committee(tol={self.tol!r}): expected a positive number of posterior sds.")
        if isinstance(self.max_visits, bool) or not isinstance(self.max_visits, int) or self.max_visits < 1:
            raise PVIError(f"Committee(max_visits={self.max_visits!r}): expected a positive int.")

    def check_families(self, solver: Any) -> None:
        """Goes with every family under solvers that visit one group alone."""
        check_visits(self, solver)

    def init(self, problem: Problem, dtype: Any) -> Bool[Array, ""]:
        """Not complete yet."""
        refuse_power(self, problem)
        if self.prior == "split" and problem.has_prior_factor:
            raise PVIError(
                "Committee(prior='split') raises the prior to the power 1/M, which needs a prior inside the Gaussian family, but "
                "part of this model's prior (or an observed site outside the plate) is not: write Committee(prior='same')."
            )
        return jnp.array(False)

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """Every member's fit, and their product: see :class:`numpyro_pvi.schedules.Schedule`."""
        return jax.lax.cond(carry.schedule, _rest, lambda c: self._fit(problem, c, key, noise), carry)

    def _fit(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        alone_key, key = jax.random.split(key)
        dtype = carry.evaluation.elbo.dtype
        rule = carry.evaluation.rule._replace(tolerance=jnp.asarray(_TOLERANCE[dtype.name], dtype))
        base, sites = problem.prior_natural, carry.sites
        alone = None
        if problem.has_prior_factor:
            alone = self._member(problem, carry, (None, base, sites.prior, rule, noise), alone_key)
        if self.prior == "split":
            base = base * (1.0 / problem.num_groups)

        def member(local, xs):
            index, key = xs
            start = None if alone is None else alone.prior
            found = self._member(problem, carry, (index, base, start, rule, noise), key, local)
            return found.local, found._replace(local=None)

        each = jnp.arange(problem.num_groups), jax.random.split(key, problem.num_groups)
        local, members = jax.lax.scan(member, sites.local, each)
        product = SiteStack(members.site, None if alone is None else alone.prior, local)
        if alone is not None:
            # What each member made of the prior, beyond what stands for it.
            product = with_more(product, jax.tree.map(lambda each, one: each - one, members.prior, alone.prior))
        done = _take(problem, carry, _settled(problem, carry, product, members.moved), rule, noise)
        skipped = with_prior(None if alone is None else ~alone.moved, ~members.moved)
        left = with_prior(None if alone is None else alone.approach.left, members.approach.left)
        report = round_report(
            problem,
            carry,
            done,
            step=jnp.where(skipped | ~done.accepted, 0.0, done.step),
            backoffs=with_prior(None if alone is None else alone.backoffs, members.backoffs) + done.halvings,
            skipped=skipped,
            exchanges=problem.num_groups,
            asked=Asked(left, jnp.max(left)),
        )
        prior_state = None if alone is None else alone.prior_state
        return RoundCarry(done.sites, done.evaluation, members.state, prior_state, jnp.array(True), report)

    def _member(self, problem: Problem, carry: RoundCarry, what: tuple, key: Any, local: Any = None) -> _Member:
        """One member's fit; without an index, that of the prior factor alone. ``local``: what all hold beside their sites."""
        index, base, prior, rule, noise = what
        family = problem.family
        site, state = family.zeros((), carry.evaluation.elbo.dtype), ()
        if index is not None:
            state = jax.tree.map(lambda x: x[index], carry.solver)
            own = jax.tree.map(lambda x: x[index], carry.sites.groups)
            # A start that was made for all groups together need not do for one alone; one beside own latents is of these, too.
            usable = family.in_domain(_sum(base, own, prior))
            site = own if local is not None else select(usable, own, site)

        def unfinished(m: _Member) -> Bool[Array, ""]:
            settled = (m.visits > 0) & ((m.approach.left <= self.tol) | ~m.moved)
            return (m.visits < self.max_visits) & (~settled | problem.stochastic)

        def visit(m: _Member) -> _Member:
            group_key, prior_key = jax.random.split(jax.random.fold_in(key, m.visits))
            site, state, local, moved, backoffs = m.site, m.state, m.local, jnp.array(False), m.backoffs
            if index is not None:
                q = _sum(base, site, m.prior)
                result, local = problem.visit_group(index, q, site, state, group_key, rule, noise, local, alone=True)
                site, state, moved = result.site, result.state, result.moved
                backoffs = backoffs + result.backoffs
            prior, prior_state = m.prior, m.prior_state
            if prior is not None:
                q = _sum(base, site, prior)
                found = problem.visit_prior(q, prior, prior_state, prior_key, rule, noise, start=None)
                prior, prior_state, moved = found.site, found.state, moved | found.moved
                backoffs = backoffs + found.backoffs
            moments = family.moments(_sum(base, site, prior))
            nearer = approach(m.approach, family.moves(moments, m.moments))
            return _Member(site, state, prior, prior_state, moments, nearer, backoffs, moved, m.visits + 1, local)

        moments = family.moments(_sum(base, site, prior))
        far = Approach(jnp.zeros((family.num_moves,), moments.loc.dtype), jnp.full((), jnp.inf, moments.loc.dtype))
        first = _Member(
            site, state, prior, carry.prior_solver, moments, far, jnp.int32(0), jnp.array(True), jnp.int32(0), local
        )
        last = jax.lax.while_loop(unfinished, visit, first)
        # A member that came to rest moved all the same.
        return last._replace(moved=last.moved | (last.visits > 1))


def _sum(base: Any, site: Any, prior: Any) -> Any:
    return base + site if prior is None else base + site + prior


def _settled(problem: Problem, carry: RoundCarry, product: SiteStack, moved: Bool[Array, "M"]) -> SiteStack:
    """The product of the members with own latents that are integrated out of them matched to its q; others are the members'."""
    if product.local is None or not problem.matches_moments:
        return product
    q = posterior(problem.prior_natural, product)
    at = carry._replace(sites=product, evaluation=carry.evaluation._replace(q=q))
    local = problem.local_proposal(at, moved & problem.family.in_domain(q))
    return dataclasses.replace(product, local=local)


def _take(problem: Problem, carry: RoundCarry, proposal: SiteStack, rule: Any, noise: Any) -> Accepted:
    """The product of the members, or as large a step towards it as leaves q normalisable."""

    def at(step):
        return problem.tidy(damp(carry.sites, proposal, step))

    step, halvings = shorten(problem, at, jnp.ones((), carry.evaluation.elbo.dtype))
    sites = at(step)
    evaluation = problem.evaluate(sites, rule, noise, trial=True)
    good = evaluation.moments.valid

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

    sites, evaluation = keep(sites, carry.sites), keep(evaluation, carry.evaluation)
    return Accepted(sites, evaluation, step, halvings, good, jnp.int32(0))


def _rest(carry: RoundCarry) -> RoundCarry:
    """Nothing moves any more."""
    report = carry.report
    still = jnp.zeros_like(report.move)
    still = report._replace(
        move=still,
        step=still,
        total_move=jnp.zeros_like(report.total_move),
        clock=report.clock + 1.0,
        rate=jnp.zeros_like(report.rate),
        trail=jnp.zeros_like(report.trail),
    )
    return carry._replace(report=at_rest(report, still))
