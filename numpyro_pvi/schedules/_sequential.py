"""One site at a time, each from the last one's result; or every visit moving the one site that all groups share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import PVIError
from ..sites import SiteStack, damp, posterior, tied_site
from ..solvers import LocalResult
from ._acceptance import (
    SWEEP_HALVINGS,
    Averaging,
    accept_jointly,
    accept_once,
    average_late,
    averaging_step,
    no_averaging,
)
from ._contract import Problem, RoundCarry, ScheduleDefaults
from ._convergence import natural_gradient_proposal, round_report, with_prior

# ---------------------------------------------------------------------------------------------- one site for all groups
# Sweeps over groups that share one site: every visit moves it by 1/M of what the group asks for.


class TiedSteps(NamedTuple):
    """Shares of what is asked for: of each visit's change, and of the sweep's."""

    visit: Float[Array, ""]
    joint: Float[Array, ""]


def tied_steps(problem: Problem, share: Float[Array, ""]) -> TiedSteps:
    """How far a sweep goes.

    Groups are mini-batches of the site's mean: at a fixed step the last ones always weigh more, so steps shrink within the
    sweep, and no part of the sweep is held back after it. One group is no mini-batch. ``share``: ``10 / (10 + k)`` with k the
    sweeps so far; for one group, the rounds in which draws decided the move.
    """
    one = jnp.ones_like(share)
    return TiedSteps(one, share) if problem.num_groups == 1 else TiedSteps(share, one)


def sweep_tied(
    problem: Problem, carry: RoundCarry, q: Any, order: Int[Array, "M"], key: Any, noise: Any, step: Any
) -> tuple[Any, Any, LocalResult]:
    """Visit all groups, each from the q that the last one left: ``eta_t <- eta_t + step / M (wanted - eta_t)``.

    ``q``: natural parameters of q (the prior factor may have moved it). Returns the q that the sweep ends at; the product of all
    M sites, with a leading axis of 1; and what the visits report, in the order of the groups. What groups hold beside the site is
    read as it stood before the sweep.
    """
    count, local = problem.num_groups, carry.sites.local

    def visit(before, operands):
        q, whole = before
        index, state, key = operands
        site = tied_site(whole, count)
        result, _ = problem.visit_group(index, q, site, state, key, carry.evaluation.rule, noise, local)
        # Of M equal sites each moves by an M-th of this, and their product by all of it.
        change = (result.site - site) * step
        return (q + change, whole + change), result._replace(site=None)

    states = jax.tree.map(lambda x: x[order], carry.solver)
    operands = (order, states, jax.random.split(key, count))
    (q, whole), results = jax.lax.scan(visit, (q, carry.sites.groups), operands)
    back = jnp.argsort(order)
    return q, whole, jax.tree.map(lambda x: x[back], results)


# ----------------------------------------------------------------------------------------------------------- sequential


@dataclasses.dataclass(frozen=True)
class Sequential(ScheduleDefaults):
    """A sweep over all groups; every visit sees the previous one's q. The prior factor, if any, is visited first.

    A visit must leave q normalisable and, where the solver backtracks, not lower the local free energy; after the sweep
    the global ELBO must not have fallen beyond rounding, else the sweep's joint step is halved; a sweep that four halvings
    have not mended gives way to one natural-gradient step of all sites from the old q, along which the ELBO rises (where
    components move in turns, by all groups' turns in the next round). Where expectations are by draws, the naturals of late
    sweeps are averaged, as :class:`Synchronous` does. After a sweep of a stochastic solver the ELBO is looked at once; a
    sweep that has lost more than its noise explains is undone. A site that groups share
    (:class:`numpyro_pvi.solvers.StochasticEP`) follows each group by 1/M of the way, by less in every sweep.

    Args:
        order: "cyclic" (the order of ``pvi.groups``) or "random" (a fresh permutation each round).
        damping: share of each visit's change that is taken, in (0, 1]; 1 is the full step, as in earlier PVI code.

    Raises:
        PVIError: on construction, for another order or a damping outside (0, 1].

    References:
        Ashman et al., Partitioned Variational Inference, algorithm 1 with sequential updates (section 3.2).
    """

    order: str = "cyclic"
    damping: float = 1.0

    # Sites of single rows go along with the groups'; all groups may share one site.
    carries_rows = True
    carries_tied = True
    carries_numbers = True
    evaluates = True

    @property
    def carries_own(self) -> bool:
        """Where visits are taken whole: no share of what one leaves beside its site is taken."""
        return self.damping == 1.0

    def __post_init__(self):
        if self.order not in ("cyclic", "random"):
            raise PVIError(f"Sequential(order={self.order!r}): expected 'cyclic' or 'random'.")
        if not (isinstance(self.damping, (int, float)) and 0.0 < self.damping <= 1.0):
            raise PVIError(f"Sequential(damping={self.damping!r}): expected a number in (0, 1]; 1 is the full step.")

    def fuses(self, solver: Any) -> bool:
        """Under solvers of whole groups: a visit by mini-batches is one of a single group."""
        return solver.fused_families and not solver.stochastic

    def check_families(self, solver: Any) -> None:
        """Goes with every family and every solver that does."""

    def round_trips(self, solver: Any, num_groups: int) -> int:
        """One for every visit, and a look at the end."""
        return num_groups + 1

    def init(self, problem: Problem, dtype: Any) -> Averaging:
        """Nothing averaged yet; the solver remembers each group's step."""
        return no_averaging(problem.family.dim if problem.noisy else 0, dtype)

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """A full sweep: see :class:`numpyro_pvi.schedules.Schedule`."""
        if problem.in_turns:
            return self._in_turns(problem, carry, key, noise)
        order_key, prior_key, visit_key = jax.random.split(key, 3)
        old = carry.evaluation
        prior, prior_site, q = None, carry.sites.prior, old.q
        if problem.has_prior_factor:
            prior = problem.visit_prior(q, prior_site, carry.prior_solver, prior_key, old.rule, noise, start=None)
            prior_site = damp(prior_site, prior.site, self.damping)
            q = posterior(problem.prior_natural, dataclasses.replace(carry.sites, prior=prior_site))
        order = self._order(problem, order_key)
        share = averaging_step(carry.schedule, old.elbo.dtype)
        if problem.tied:
            steps = tied_steps(problem, share)
            q, groups, results = sweep_tied(problem, carry, q, order, visit_key, noise, self.damping * steps.visit)
            # No visit knows how far q goes with it: what groups hold beside the site is taken where the sweep has ended.
            local = problem.local_proposal(carry._replace(evaluation=old._replace(q=q)), results.moved)
            share = steps.joint
        else:
            groups, local, results = self._sweep(problem, carry, q, order, visit_key, noise)
        proposal = SiteStack(groups, prior_site, local)
        if problem.stochastic:
            done = accept_once(problem, carry.sites, proposal, old, jnp.ones_like(share), noise)
        else:
            # No bound has to rise where moments are matched, or where there is none.
            fallback = None if problem.matches_moments or problem.blind else natural_gradient_proposal(problem, carry)
            done = accept_jointly(problem, carry.sites, proposal, old, share, noise, fallback=fallback)
        return self._finish(problem, carry, results, prior, done, self.damping)

    def _order(self, problem: Problem, key: Any) -> Int[Array, "M"]:
        order = jnp.arange(problem.num_groups)
        return jax.random.permutation(key, order) if self.order == "random" else order

    def _in_turns(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        late, report = averaging_step(carry.schedule, carry.evaluation.elbo.dtype), carry.report
        # Sites may sum to an optimum and each be wrong, as equal shares are at a start: whoever comes first then takes q far away,
        # and no share of such a sweep helps. Seen from one q all of them come right at once.
        together = jnp.min(report.backoffs) >= SWEEP_HALVINGS
        # A share of where a sweep leads is no shorter sweep: after a refusal the next one takes less of every turn.
        shorter = 0.25 ** jnp.maximum(report.refused - together, 0).astype(late.dtype)
        given, order = (carry, self.damping * late * shorter, noise), self._order(problem, key)
        sweep = cast(Any, problem).sweep
        swept = jax.lax.cond(together, lambda: sweep(*given), lambda: sweep(*given, order))
        done = accept_jointly(problem, carry.sites, swept.sites, carry.evaluation, jnp.ones_like(late), noise)
        return self._finish(problem, carry, swept.groups, swept.prior, done, swept.share)

    def _sweep(self, problem: Problem, carry: RoundCarry, q, order, key, noise):
        def visit(before, step):
            q, local = before
            index, site, state, key = step
            result, local = problem.visit_group(index, q, site, state, key, carry.evaluation.rule, noise, local)
            new = damp(site, result.site, self.damping)
            return (q + (new - site), local), (new, result._replace(site=None))

        take = lambda tree: jax.tree.map(lambda x: x[order], tree)  # noqa: E731
        keys = jax.random.split(key, problem.num_groups)
        # Sites are scanned inputs and outputs: carrying the stack and scattering into it would copy it at every visit.
        swept = (order, take(problem.split(carry.sites.groups)), take(carry.solver), keys)
        (_, local), (sites, results) = jax.lax.scan(visit, (q, carry.sites.local), swept)
        back = jnp.argsort(order)
        sites, results = jax.tree.map(lambda x: x[back], (sites, results))
        if local is not None and self.damping != 1.0:
            local = damp(carry.sites.local, local, self.damping)
        return problem.merge(sites), local, results

    def _shares(self, problem: Problem, results: Any) -> bool:
        """Whether visits tell how much of what they ask for they took."""
        return problem.stochastic and results.step is not None

    def _finish(self, problem: Problem, carry: RoundCarry, results, prior, done, damping: Any) -> RoundCarry:
        skipped = with_prior(None if prior is None else ~prior.moved, ~results.moved)
        averaging, own = carry.schedule, jnp.asarray(damping, done.step.dtype)
        if problem.tied and problem.num_groups > 1:
            damping = damping * tied_steps(problem, averaging_step(averaging, done.step.dtype)).visit
            averaging = averaging._replace(late=averaging.late + 1)
        elif problem.noisy:
            averaging = average_late(problem, averaging, done.evaluation, carry.evaluation)
        report = round_report(
            problem,
            carry,
            done,
            step=jnp.where(skipped | ~done.accepted, 0.0, done.step * damping),
            backoffs=with_prior(None if prior is None else prior.backoffs, results.backoffs) + done.halvings,
            skipped=skipped,
            # One for the visit, and one to all groups for every ELBO that is asked for.
            exchanges=problem.num_groups * (1 + done.tries),
            states=results.state,
            prior_state=None if prior is None else prior.state,
            late=1.0 if problem.stochastic else averaging_step(carry.schedule, done.step.dtype),
            drift=carry.schedule.drift,
            own=own * (results.step if self._shares(problem, results) else 1.0),
        )
        return RoundCarry(
            done.sites,
            done.evaluation,
            results.state,
            None if prior is None else prior.state,
            averaging,
            report,
        )
