"""A random few of the groups each round, from the same q."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..sites import MAX_HALVINGS, SiteStack, damp, select
from ..solvers import ByLabel, LocalResult, by_label, check_labels, freeze, resolve
from ._acceptance import Averaging, accept_jointly, accept_once, average_late, averaging_step, no_averaging, taken_whole
from ._contract import Evaluation, Part, Problem, RoundCarry, ScheduleDefaults, check_visits
from ._convergence import round_report, with_prior
from ._network import next_share
from ._synchronous import Synchronous, SynchronousState


class SubsetState(NamedTuple):
    """The joint step's memory, and each group's own."""

    step: Float[Array, ""]
    share: Float[Array, "M"]
    # The force of each group's last change on the location, in precision-mean space.
    force: Float[Array, "M D"]
    averaging: Averaging


@dataclasses.dataclass(frozen=True)
class StochasticSubset(ScheduleDefaults):
    """Some groups each round, from the same q, absorbed together: ``eta_m <- eta_m + step rho_m (proposal_m - eta_m)``.

    Of the prior factor, which the server holds, the share ``a = |S| / M`` takes part where ``|S|`` of M groups do: what a round
    moves is on average that share of what all would move. Moved whole in every round it would outrun groups whose sites it
    balances. A round is accepted only if q is normalisable and the local free energy of the groups S that took part, and of that
    share of the prior factor f_0, has not fallen beyond rounding, on common draws where expectations are by draws:

        F_S(q) = sum_{m in S} E_q[log p(y_m | theta)] + a E_q[log f_0] - KL(q || q without the sites of S and a of f_0's);

    otherwise the joint step is halved, and doubled again when accepted at once. With all groups in S this is the global ELBO.
    With fewer the ELBO is no test, as the first of two groups that disagree lowers it rightly; but a round in which it falls by
    more than ``D / 2`` nats is halved (under a stochastic solver undone) as well: beside sites that were fitted elsewhere F_S
    may rise without end.
    Beside it every group's own step is halved when its changes turn back without getting shorter. Under a stochastic solver
    "auto" is one (or the ``power`` of ``LocalELBO``) over the number of groups that may take part (also under ``SNEP`` with anchors
    that outlast a visit); a round is undone only where it lost more than noise explains.

    ``tol`` waits for every group: one that took no part counts with its last move.

    Under ``AutoExponentialFamily`` and natural gradients the prior factor moves whole, the joint step alone is halved, one number
    is the damping of all, and under :class:`numpyro_pvi.solvers.StochasticNaturalGradient` "auto" is what is said there.

    Args:
        k: how many groups take part in a round, chosen at random: an int, or a share of all groups in (0, 1); None is all
            that are there (``rates``).
        rates: chance that a group is there in a round, in (0, 1]: a number, one per group, or a dict by label (1 for groups
            it does not name). The k are chosen among those that are there; in a round without any nothing moves.
        damping: "auto", or the largest step of every group in (0, 1]: a number, one per group, or a dict by label. 1 is the
            full step, as in earlier PVI code.

    Raises:
        PVIError: on construction, for values outside these ranges or neither ``k`` nor ``rates``; at ``init``, for numbers
            that do not fit the groups.

    References:
        Ashman et al., Partitioned Variational Inference, section 3.2. McMahan et al., Communication-Efficient Learning of
        Deep Networks from Decentralized Data, algorithm 1 (a random share of clients each round).
    """

    k: int | float | None = None
    rates: Any = None
    damping: Any = "auto"

    partial = True
    carries_own = True
    evaluates = True

    def __post_init__(self):
        k = self.k
        whole = isinstance(k, int) and not isinstance(k, bool) and k >= 1
        if not (k is None or whole or (isinstance(k, float) and 0.0 < k < 1.0)):
            raise PVIError(
                f"StochasticSubset(k={k!r}): expected a positive int, a share of all groups in (0, 1), or None with rates."
            )
        if k is None and self.rates is None:
            raise PVIError(
                "StochasticSubset() chooses nothing: give k, how many groups take part in a round, or rates, the chances that "
                "they do; for all groups in every round write Synchronous()."
            )
        if self.rates is not None:
            rates = freeze(self.rates, "StochasticSubset(rates)", lambda x: 0.0 < x <= 1.0, "a probability in (0, 1]")
            object.__setattr__(self, "rates", rates)
        if self.damping != "auto" or not isinstance(self.damping, str):
            wanted = "'auto', or a number in (0, 1]; 1 is the full step"
            damping = freeze(self.damping, "StochasticSubset(damping)", lambda x: 0.0 < x <= 1.0, wanted)
            object.__setattr__(self, "damping", damping)

    def _count(self, problem: Any) -> int:
        """Most groups that take part in a round."""
        count = problem.num_groups
        if self.k is None:
            return count
        if isinstance(self.k, float):
            return math.ceil(self.k * count)
        # Of a few groups whose rows are at hand all take part.
        return min(self.k, count) if problem.continued else self.k

    @property
    def by_label(self) -> bool:
        """Whether settings name groups, so that compiled programs depend on the labels."""
        return by_label(self.rates) or by_label(self.damping)

    def _dampings(self, problem: Problem, dtype: Any) -> Float[Array, "M"]:
        # One number for all is the largest joint step.
        if self.damping == "auto" or isinstance(self.damping, float):
            return jnp.ones((problem.num_groups,), dtype)
        return jnp.asarray(resolve(self.damping, "StochasticSubset(damping)", problem, 1.0), dtype)

    @property
    def discards(self) -> bool:
        """Where groups may be away: who is there is found out while all are visited."""
        return self.rates is not None

    def fuses(self, solver: Any) -> bool:
        """Under solvers that steps of some groups at once are written for."""
        return solver.fused_families

    def check_families(self, solver: Any) -> None:
        """Goes with every family; under natural gradients all groups of a round move by one common step.

        Raises:
            PVIError: saying what to write.
        """
        if not self.fuses(solver):
            check_visits(self, solver)
        elif not isinstance(self.damping, (str, float)):
            raise PVIError(
                f"StochasticSubset(damping={self.damping!r}) by group is for Gaussian guides; under AutoExponentialFamily all "
                "groups of a round move by one common step: write one number, or 'auto'."
            )

    def init(self, problem: Problem, dtype: Any) -> SubsetState | SynchronousState:
        """Start at the largest steps."""
        count, dim = problem.num_groups, problem.family.dim
        if self._count(problem) > count:
            raise PVIError(f"StochasticSubset(k={self.k}): there are only {count} groups.")
        if self.rates is not None:
            check_labels(self.rates, "StochasticSubset(rates)", problem)
            resolve(self.rates, "StochasticSubset(rates)", problem, 1.0)
        check_labels(self.damping, "StochasticSubset(damping)", problem)
        if problem.in_turns:
            # Rounds of other groups each time are no iteration of one map.
            return Synchronous(self.damping).init(problem, dtype)._replace(mixing=None)
        self._dampings(problem, dtype)
        averaging = no_averaging(dim if problem.noisy and not problem.stochastic else 0, dtype)
        one = jnp.ones((), dtype)
        return SubsetState(
            one * self._largest(problem), jnp.ones((count,), dtype), jnp.zeros((count, dim), dtype), averaging
        )

    def _largest(self, problem: Problem) -> float:
        return self.damping if isinstance(self.damping, float) else self._full(problem)

    def _full(self, problem: Problem) -> float:
        """The joint step that takes all that is asked for."""
        return min(1.0, taken_whole(problem) / self._count(problem)) if self.damping == "auto" else 1.0

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """One update of the sites of a few groups: see :class:`numpyro_pvi.schedules.Schedule`."""
        solve_key, prior_key, who_key = jax.random.split(key, 3)
        if problem.in_turns:
            return self._as_if_alone(problem, carry, who_key, noise)
        old, sites, state = carry.evaluation, carry.sites, carry.schedule
        taking_part, results = self._visit(problem, carry, solve_key, who_key, noise)
        prior = None
        if problem.has_prior_factor:
            prior = problem.visit_prior(
                old.q, sites.prior, carry.prior_solver, prior_key, old.rule, noise, start=old.prior
            )
        share = self._dampings(problem, state.step.dtype)
        if self.damping == "auto" and not problem.stochastic:
            share = state.share
        share = jnp.where(taking_part & results.moved, share, 0.0)
        if results.local is None:
            local = self._local_proposal(problem, carry, taking_part & results.moved)
        else:
            local = problem.own_between(sites.local, results.local, share)
        groups = jax.vmap(damp)(sites.groups, results.site, share)
        fraction = _fraction(taking_part, state.step.dtype)
        proposal = SiteStack(groups, None if prior is None else damp(sites.prior, prior.site, fraction), local)

        def test(evaluation: Evaluation, candidate: SiteStack) -> Bool[Array, ""]:
            return _free_energy_has_not_fallen(problem, (evaluation, candidate), (old, sites), taking_part)

        if problem.stochastic:
            done = accept_once(problem, sites, proposal, old, state.step, noise, test)
        else:
            late = averaging_step(state.averaging, state.step.dtype)
            first = jnp.minimum(state.step, self._largest(problem) * late)
            done = accept_jointly(problem, sites, proposal, old, first, noise, test=test)
        return self._finish(problem, carry, (results, prior, done, taking_part, share))

    def _visit(self, problem: Problem, carry: RoundCarry, key: Any, who_key: Any, noise: Any):
        """Who takes part, and the results of their visits at their places among all groups."""
        if self._count(problem) == problem.num_groups:
            return self.who(problem, who_key)[1], problem.visit_all(carry, key, noise)
        chosen, there = self.who(problem, who_key)
        found = problem.visit_all(carry, key, noise, chosen)
        local = found.local
        nobody = jnp.zeros((problem.num_groups,), jnp.int32)
        site, state = jax.tree.map(
            lambda x, new: x.at[chosen].set(new), (carry.sites.groups, carry.solver), (found.site, found.state)
        )
        step = None
        if found.step is not None:
            step = jnp.ones((problem.num_groups,), found.step.dtype).at[chosen].set(found.step)
        results = LocalResult(
            site, state, nobody.at[chosen].set(found.backoffs), (nobody > 0).at[chosen].set(found.moved), step, local
        )
        return (nobody > 0).at[chosen].set(there), results

    def who(self, problem: Any, key: Any) -> tuple[Int[Array, "K"], Bool[Array, "K"]]:
        """At most k of the groups that are there: see :class:`numpyro_pvi.schedules.Schedule`."""
        num, count = problem.num_groups, self._count(problem)
        groups, there = jnp.arange(num, dtype=jnp.int32), jnp.ones((num,), bool)
        if self.rates is not None:
            rates = jnp.asarray(resolve(self.rates, "StochasticSubset(rates)", problem, 1.0))
            there = jax.random.uniform(jax.random.fold_in(key, 1), rates.shape) < rates
        if count < num:
            scores = jnp.where(there, jax.random.uniform(key, there.shape), -1.0)
            groups = jnp.sort(jax.lax.top_k(scores, count)[1]).astype(jnp.int32)
        return groups, there[groups]

    def _as_if_alone(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """A round of :class:`Synchronous` in which there are no other groups."""
        state, alone = carry.schedule, Synchronous(self.damping)
        part: Part = cast(Any, problem).part(carry, *self.who(problem, key), noise)

        before = state.averaging
        near = state._replace(averaging=before.at(part.near))
        done = alone.round(part.problem, part.carry._replace(schedule=near), key, noise)
        after = done.schedule.averaging.at(part.far, before)
        return part.whole(done)._replace(schedule=done.schedule._replace(averaging=after))

    def _local_proposal(self, problem: Problem, carry: RoundCarry, moves: Bool[Array, "M"]) -> Any:
        local = problem.local_proposal(carry, moves)
        if local is not None and isinstance(self.damping, (tuple, ByLabel)):
            raise PVIError(
                "StochasticSubset(damping=...) per group does not fit a model with local latents, whose own parts move with one "
                "common step: write one number, or 'auto'."
            )
        return local

    def _finish(self, problem: Problem, carry: RoundCarry, outcome: tuple) -> RoundCarry:
        results, prior, done, taking_part, share = outcome
        old, state = carry.evaluation, carry.schedule
        averaging = state.averaging
        if problem.noisy and not problem.stochastic:
            averaging = average_late(problem, averaging, done.evaluation, old)
        grown = jnp.minimum(jnp.where(done.halvings == 0, 2.0, 1.0) * done.step, self._largest(problem))
        refused = done.step if problem.stochastic else 0.125
        step = jnp.where(done.accepted, jnp.maximum(grown, 2.0**-MAX_HALVINGS), refused)
        shares, forces = jax.vmap(lambda a, f, change: next_share(problem, a, f, change, old.moments))(
            state.share, state.force, results.site - carry.sites.groups
        )
        moves = taking_part & results.moved
        state = SubsetState(
            step.astype(state.step.dtype),
            jnp.where(moves, shares, state.share),
            jnp.where(moves[:, None], forces, state.force),
            averaging,
        )
        skipped = with_prior(None if prior is None else ~prior.moved, taking_part & ~results.moved)
        taken = with_prior(None if prior is None else prior.moved * _fraction(taking_part, share.dtype), share)
        backoffs = jnp.where(taking_part, results.backoffs + done.halvings, 0)
        asked = jnp.sum(taking_part)
        report = round_report(
            problem,
            carry,
            done,
            step=jnp.where(skipped | ~done.accepted, 0.0, done.step * taken),
            backoffs=with_prior(None if prior is None else prior.backoffs + done.halvings, backoffs),
            skipped=skipped,
            # One for the visit, and one for every test of a joint step.
            exchanges=asked * (1 + done.tries),
            heard=with_prior(None if prior is None else jnp.array(True), taking_part),
            states=select(taking_part, results.state, carry.solver),
            prior_state=None if prior is None else prior.state,
            largest=self._largest(problem),
            full=self._full(problem),
            late=1.0 if problem.stochastic else averaging_step(carry.schedule.averaging, done.step.dtype),
            drift=carry.schedule.averaging.drift,
            own=None if results.step is None or not problem.stochastic else jnp.where(taking_part, results.step, 1.0),
        )
        solver = select(taking_part, results.state, carry.solver)
        return RoundCarry(done.sites, done.evaluation, solver, None if prior is None else prior.state, state, report)


def _free_energy_has_not_fallen(
    problem: Problem,
    new: tuple[Evaluation, SiteStack],
    old: tuple[Evaluation, SiteStack],
    taking_part: Bool[Array, "M"],
) -> Bool[Array, ""]:
    """Whether the local free energy of some groups is at least what it was, up to rounding or a stochastic solver's noise.

    And whether the global ELBO has fallen by no more than ``D / 2`` nats.
    """
    (after, _), (before, _) = new, old
    known = jnp.isfinite(before.groups.value) & taking_part
    stays_finite = jnp.all(jnp.isfinite(after.groups.value) | ~known)
    prior = old[1].prior, _fraction(taking_part, before.elbo.dtype)
    found, size = zip(*(_free_energy(problem, *each, known, *prior) for each in (new, old)), strict=True)
    slack = 8 * jnp.finfo(size[0].dtype).eps * (size[0] + size[1])
    if problem.stochastic:
        # What a jitter of one posterior sd in every coordinate would cost.
        slack = slack + 0.5 * problem.family.dim
    # What a site stands for that was fitted elsewhere, or never, may let the free energy of some rise without end where the rest of
    # the rows forbid it. They may lose what others will mend, and no more: of a jitter of one posterior sd in every coordinate.
    bearable = ~(before.elbo - after.elbo > 0.5 * problem.family.dim)
    better = ((found[0] - found[1] >= -slack) & bearable) | ~before.moments.valid
    return after.moments.valid & stays_finite & better


def _fraction(taking_part: Bool[Array, "M"], dtype: Any) -> Float[Array, ""]:
    """The share of all groups, and of the prior factor, that takes part."""
    return jnp.mean(taking_part, dtype=dtype)


def _free_energy(
    problem: Problem, evaluation: Evaluation, sites: SiteStack, known: Bool[Array, "M"], prior: Any, fraction: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """``sum_S {E_q[f_m] - <eta_m, mu_q>} + A(eta_q)`` and the size of its parts, nats.

    ``prior``: the prior factor's site before the round; ``fraction``: the share of that factor that is in S; the rest stays.
    """
    moments = evaluation.moments
    pairings = problem.family.expect_quadratic(sites.groups, moments)
    parts = [jnp.where(known, evaluation.groups.value, 0.0), -jnp.where(known, pairings, 0.0)]
    if evaluation.prior is not None and sites.prior is not None:
        finite = jnp.isfinite(evaluation.prior.value)
        parts.append(fraction * jnp.where(finite, evaluation.prior.value, 0.0)[None])
        own = jax.tree.map(lambda new, old: new - (1 - fraction) * old, sites.prior, prior)
        parts.append(-problem.family.expect_quadratic(own, moments)[None])
    parts.append(jnp.stack(problem.family.log_partition_parts(evaluation.q, moments)))
    # Rows of groups that are not in S stay, and their part with them.
    parts.append(problem.own_rest(evaluation.q, sites.local)[None])
    every = jnp.concatenate(parts)
    return jnp.sum(every), jnp.sum(jnp.abs(every))
