"""One pass over the groups: each site is absorbed once, from the posterior of what came before, and never revisited."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..families import Moments
from ..sites import SiteStack, damp, posterior, select
from ._acceptance import Averaging, average_late, averaging_step, no_averaging, refuse_power
from ._contract import Accepted, Problem, RoundCarry, Rule, ScheduleDefaults, check_visits
from ._convergence import Approach, Asked, approach, at_rest, round_report, with_prior

# Visits at most where "auto" is asked for: a solver of exact expectations stops long before; a stochastic one has no
# tolerance to stop at.
_VISITS, _STOCHASTIC_VISITS = 30, 10


class StreamingState(NamedTuple):
    """Which factors have been absorbed."""

    done: Bool[Array, "M"]
    # Groups that had no site when their rows came: until they are absorbed, they are no part of any cavity.
    fresh: Bool[Array, "M"]
    prior_done: Bool[Array, ""]


class _At(NamedTuple):
    """A q with its moments, and how expectations are taken: what averaging and tolerances look at."""

    q: Any
    moments: Moments
    rule: Rule


class _Visits(NamedTuple):
    """One factor while it is being absorbed."""

    site: Any
    solver: Any
    local: Any
    at: _At
    averaging: Averaging
    count: Int[Array, ""]
    approach: Approach
    backoffs: Int[Array, ""]
    moved: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Streaming(ScheduleDefaults):
    """Absorb every group once: ``q_m`` is the solver's fit to ``q_{m-1} p(y_m | theta)``, and then the next prior.

    Groups are taken in the order in which their labels first appear among the rows, so that data in the order of time are
    streamed as they came, whatever the labels are (``pvi.groups`` has them sorted).

    With a VI solver this is variational continual learning, or streaming variational Bayes. Sites of groups that have not
    been reached are no part of the cavity, only where their own fits start. The prior factor, if any, comes first. While
    a site is absorbed the solver visits it again and again, until q moves by no more than ``tol`` posterior sds in a
    visit; then it is left alone, since nothing later than itself may change what it said. The schedule is complete after
    one round (later rounds do nothing, so that ``run(..., tol=...)`` stops), and complete again after
    ``add_group``; ``revisit`` absorbs the groups named anew, from the cavity that all others leave them.

    A group whose factor or gradient is not finite, or that leaves no normalisable q, keeps the site it started from; it is
    reported as skipped and tried again in the next round. Steps by draws are averaged as :class:`Synchronous` does, on
    fresh draws at every visit.

    Args:
        visits: most visits to a site while it is absorbed, or "auto": 30, and 10 under a stochastic solver, which has no
            tolerance to stop at.
        tol: posterior sds (of a mean, or of a log sd); visits stop below.

    Raises:
        PVIError: on construction, for values outside these ranges.

    References:
        Ashman et al., Partitioned Variational Inference, section 4.3 (continual learning). Nguyen et al., Variational
        Continual Learning, eq. 3 and 4. Broderick et al., Streaming Variational Bayes, section 2.
    """

    visits: int | str = "auto"
    tol: float = 1e-3

    # One round is all there is: its quadrature is at full accuracy from the start.
    single_pass = True

    def __post_init__(self):
        if self.visits != "auto" and not (isinstance(self.visits, int) and self.visits >= 1):
            raise PVIError(f"Streaming(visits={self.visits!r}): expected 'auto' or a positive int.")
        if not (isinstance(self.tol, (int, float)) and self.tol > 0):
            raise PVIError(f"Streaming(tol={self.tol!r}): expected a positive number of posterior sds.")

    def check_families(self, solver: Any) -> None:
        """Goes with every family under solvers that visit one group alone."""
        check_visits(self, solver)

    def init(self, problem: Problem, dtype: Any) -> StreamingState:
        """No group absorbed; the prior factor is, where other groups' sites were fitted before."""
        refuse_power(self, problem)
        none = jnp.zeros((problem.num_groups,), bool)
        return StreamingState(none, ~(none if problem.known is None else problem.known), jnp.asarray(problem.continued))

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """One pass over what has not been absorbed: see :class:`numpyro_pvi.schedules.Schedule`."""
        state = carry.schedule
        nothing = jnp.all(state.done)
        if problem.has_prior_factor:
            nothing = nothing & state.prior_done
        return jax.lax.cond(nothing, self._rest, lambda c: self._pass(problem, c, key, noise), carry)

    def _rest(self, carry: RoundCarry) -> RoundCarry:
        last = carry.report
        still = jax.tree.map(jnp.zeros_like, last)
        totals = {"valid": last.valid, "clock": last.clock, "messages": last.messages, "consensus": last.consensus}
        return carry._replace(report=at_rest(last, still._replace(**totals)))

    def _pass(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        state, sites, rule = carry.schedule, carry.sites, carry.evaluation.rule
        prior_key, key = jax.random.split(key)
        counted = state.done | ~state.fresh
        groups = jax.tree.map(lambda x: jnp.where(counted.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), sites.groups)
        q, prior = posterior(problem.prior_natural, SiteStack(groups, None)), None
        if problem.has_prior_factor:

            def visit_prior(q, site, solver, key, noise, local):
                return problem.visit_prior(q, site, solver, key, rule, noise, start=None), local

            start = sites.prior, carry.prior_solver, None
            prior = self._absorb(problem, rule, visit_prior, q, *start, prior_key, noise, state.prior_done)
            q = q + prior.site

        def absorb(before, step):
            q, local = before
            index, site, solver, done, counted, key = step

            def visit(q, site, solver, key, noise, local):
                return problem.visit_group(index, q, site, solver, key, rule, noise, local, alone=True)

            rest = select(counted, q - site, q)
            found = self._absorb(problem, rule, visit, rest, site, solver, local, key, noise, done)
            return (rest + found.site, found.local), (
                found.site,
                found.solver,
                found.backoffs,
                found.moved,
                found.approach.left,
            )

        keys = jax.random.split(key, problem.num_groups)
        steps = (jnp.arange(problem.num_groups), sites.groups, carry.solver, state.done, counted, keys)
        order = jnp.argsort(problem.stream.first_rows())
        (_, local), found = jax.lax.scan(absorb, (q, sites.local), jax.tree.map(lambda x: x[order], steps))
        groups, solver, backoffs, moved, left = jax.tree.map(lambda x: x[jnp.argsort(order)], found)
        new = problem.tidy(SiteStack(groups, None if prior is None else prior.site, local))
        evaluation = problem.evaluate(new, rule, noise)
        carry = carry._replace(solver=solver, prior_solver=None if prior is None else prior.solver)
        return self._finish(problem, carry, new, evaluation, prior, backoffs, moved, left)

    def _absorb(self, problem: Problem, rule: Rule, visit, cavity, site, solver, local, key, noise, done) -> _Visits:
        """Visit one factor until its site has settled; not at all when it was absorbed before."""
        family = problem.family
        most = self.visits if isinstance(self.visits, int) else _STOCHASTIC_VISITS if problem.stochastic else _VISITS
        # Local latents are fitted jointly with the site, which an average of sites would not belong to, but where integrated out.
        apart = local is None or (problem.matches_moments and problem.units is not None)
        by_draws = problem.noisy and not problem.stochastic and apart

        def unfinished(v: _Visits):
            settled = (v.approach.left <= self.tol) & (not problem.stochastic)
            return ~done & (v.count < most) & v.moved & ~settled

        def again(v: _Visits) -> _Visits:
            own = jax.random.fold_in(key, v.count)
            draws = problem.noise(jax.random.fold_in(own, 1)) if by_draws else noise
            result, local = visit(v.at.q, v.site, v.solver, own, draws, v.local)
            share = averaging_step(v.averaging, v.approach.left.dtype) if by_draws else 1.0
            site = damp(v.site, result.site, share)
            at = _at(family, cavity + site, rule)
            averaging = average_late(problem, v.averaging, at, v.at) if by_draws else v.averaging
            moved = result.moved & at.moments.valid
            kept = select(moved, (site, result.state, at), (v.site, v.solver, v.at))
            if problem.blind:
                # A visit has released something also where nothing of it is kept.
                kept = kept[0], result.state, kept[2]
            count, backoffs = v.count + 1, v.backoffs + result.backoffs
            # A factor that came this far is absorbed, should a later visit find no better step.
            nearer = approach(v.approach, _moves(family, at, v.at))
            return _Visits(*kept[:2], local, kept[2], averaging, count, nearer, backoffs, moved)

        at = _at(family, cavity + site, rule)
        far = Approach(
            jnp.zeros((family.num_moves,), at.moments.loc.dtype), jnp.full((), jnp.inf, at.moments.loc.dtype)
        )
        averaging = no_averaging(family.dim if by_draws else 0, far.left.dtype)
        zero = jnp.int32(0)
        first = _Visits(site, solver, local, at, averaging, zero, far, zero, jnp.array(True))
        last = jax.lax.while_loop(unfinished, again, first)
        return last._replace(moved=last.moved | (last.count > 1))

    def _finish(self, problem: Problem, carry: RoundCarry, new, evaluation, prior, backoffs, moved, left) -> RoundCarry:
        old, state = carry.evaluation, carry.schedule
        before = with_prior(None if prior is None else state.prior_done, state.done)
        absorbed = with_prior(None if prior is None else prior.moved, moved)
        skipped = ~before & ~absorbed
        # What was absorbed earlier stays as it was; what this pass could not settle is left.
        asked = jnp.where(before, carry.report.asked, with_prior(None if prior is None else prior.approach.left, left))
        report = round_report(
            problem,
            carry,
            Accepted(new, evaluation, jnp.ones_like(old.elbo), jnp.int32(0), jnp.array(True), jnp.int32(0)),
            step=jnp.where(before | skipped, 0.0, 1.0).astype(old.elbo.dtype),
            backoffs=with_prior(None if prior is None else prior.backoffs, backoffs),
            skipped=skipped,
            # A group is alone with its rows while its site settles; no ELBO is asked for.
            exchanges=jnp.sum(~state.done),
            asked=Asked(asked, jnp.max(asked)),
        )
        prior_done = state.prior_done if prior is None else state.prior_done | prior.moved
        state = StreamingState(state.done | moved, state.fresh, prior_done)
        return carry._replace(sites=new, evaluation=evaluation, schedule=state, report=report)


def _at(family: Any, q: Any, rule: Rule) -> _At:
    return _At(q, family.moments(q), rule)


def _moves(family: Any, new: _At, old: _At) -> Float[Array, "N"]:
    """Changes of the means and log sds, in posterior sds; infinite from a q that was none."""
    return jnp.where(old.moments.valid, family.moves(new.moments, old.moments), jnp.inf)
