"""All sites from the same q, absorbed together; extrapolated over rounds, and kept from widening much at first."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, congruent, invert_lower, missing_eigenvalues, mixing_shares, power_iteration_step
from ..errors import PVIError
from ..sites import MAX_HALVINGS, SiteStack, posterior, select
from ._acceptance import (
    Averaging,
    accept_jointly,
    accept_once,
    average_late,
    averaging_step,
    elbo_gain,
    no_averaging,
    taken_whole,
)
from ._contract import Evaluation, Problem, RoundCarry, ScheduleDefaults, Turns
from ._convergence import CRAWL, round_report, with_prior

# ------------------------------------------------------------------------------------------------------ Anderson mixing
# Extrapolation over rounds, where sites are two numbers per row, q is mean-field, rows have latents of their own, or components
# move in turns: Anderson mixing of their last targets.

# Rounds remembered; rows from which on a round costs so much that fewer rounds matter; and the residual, in posterior sds and
# their like for the precision, beyond which steps say too little of one another.
WINDOW, LEAST_ROWS, NEAR = 6, 128, 5.0
# Numbers in the sites of a q of independent parts up to which so many rounds of them are remembered.
_MOST_MIXED = 1 << 17
# Units in the last place of its summands that an ELBO may differ by where another program sums it.
_SAME_ELBO = 16


class Mixing(NamedTuple):
    """The last rounds' sites and what they asked for, oldest first; a leading axis of :data:`WINDOW`."""

    points: Any
    targets: Any
    filled: Int[Array, ""]
    # Whether the last mixture was refused: the next round then takes its plain step.
    refused: Bool[Array, ""]
    # How far such a q was from where these rounds lead, as far as they tell, posterior sds; and how far it went for a change of
    # what is asked for, at most.
    left: Float[Array, ""]
    reach: Float[Array, ""]
    # The ELBO where the last round ended: at another one, of other data or params, the same sites ask for something else.
    elbo: Float[Array, ""]


def no_mixing(problem: Any, whole: bool, dtype: Any) -> Mixing | None:
    """An empty memory, or None where rounds are not extrapolated.

    ``whole``: whether the schedule takes full steps of its own accord. Returns the memory: for sites by rows, from
    :data:`LEAST_ROWS` rows on, for those of a mean-field q or beside rows' own latents, and of components in turns, under a solver
    of one full step a visit.
    """
    solver = problem.solver
    if not whole or not solver.immediate or solver.step_size != 1.0:
        return None
    if not (problem.prior_natural.precision.shape[0] >= LEAST_ROWS if problem.flat else _mixes_sites(problem)):
        return None
    sites = jax.eval_shape(lambda: problem.zero_sites(dtype))
    memory = jax.tree.map(lambda x: jnp.zeros((WINDOW, *x.shape), x.dtype), sites)
    none = jnp.zeros((), dtype)
    return Mixing(memory, memory, jnp.int32(0), jnp.array(False), none, none, none)


def _mixes_sites(problem: Any) -> bool:
    """Whether rounds on a q of independent parts are extrapolated: they contract by the correlations that it does not have.

    So are those of a full covariance where rows have latents of their own, which follow what they say of their law by steps.
    """
    if problem.stochastic or problem.blind or problem.matches_moments or problem.tied:
        return False
    # Values by draws compare between two q of one round, and rounds do not; latents of rows follow within turns, and what clients
    # hold of theirs is nowhere else.
    sites = jax.eval_shape(lambda: problem.zero_sites(float))
    here = sites.local is None if problem.in_turns else problem.units is None or sites.local is not None
    contracts = (problem.in_turns and not problem.noisy) or problem.capped or problem.units is not None
    return contracts and here and sum(x.size for x in jax.tree.leaves(sites)) <= _MOST_MIXED


class _Asked(NamedTuple):
    """What all sites ask of q together, by rounds (leading axis), and what rows ask of their own latents, where they have any."""

    shared: Any
    own: Any


def _asked(problem: Any, residuals: SiteStack) -> _Asked:
    if problem.flat:
        return _Asked(jax.tree.map(lambda r: r[:, 0], residuals.groups), None)
    nothing, own = jax.tree.map(jnp.zeros_like, problem.prior_natural), residuals.local
    return _Asked(jax.vmap(lambda mine: posterior(nothing, mine))(residuals), None if problem.units is None else own)


def _products(problem: Any, old: Evaluation, local: Any, change: _Asked) -> Float[Array, "W W"]:
    """Inner products of changes of the naturals in q's Fisher metric, that of the rows' own latents with it.

    ``local``: what groups hold of these at q.
    """
    found = problem.family.inner_products(old.moments, change.shared)
    return found if change.own is None else found + problem.own_products(old, local, change.own)


def mixture(
    problem: Any, mixing: Mixing, carry: Any, proposal: SiteStack, step: Any, whole: Any
) -> tuple[Mixing, SiteStack, Bool[Array, ""]]:
    """Remember a round's sites and targets, and extrapolate from those remembered.

    ``problem``: the factors; ``proposal``: what every row, or group, asks for there; ``step``: the plain step, which parallel
    updates of a mean-field q are capped at; None where it is a whole one; ``whole``: whether all of them asked, and for all that
    they want: else the map is another one, and what was remembered goes. Returns the memory, the mixture of targets (of steps
    so long towards them) whose residuals are least in q's Fisher metric (Anderson 1965), and whether to try it.
    """

    def push(stack, new):
        return jnp.roll(stack, -1, axis=0).at[-1].set(new)

    here = dataclasses.replace(carry.sites, others=None)
    points, targets = jax.tree.map(push, mixing.points, here), jax.tree.map(push, mixing.targets, proposal)
    # What draws ask for does not tell how rounds contract.
    sampled = problem.noisy and problem.sampled(carry.evaluation.rule)
    known = jnp.where(_is_where_it_ended(mixing, carry.evaluation), mixing.filled, 0)
    filled = jnp.where(sampled | ~jnp.asarray(whole), 0, jnp.minimum(known + 1, WINDOW))
    residuals = targets - points
    asked = _asked(problem, residuals)
    change = jax.tree.map(lambda r: jnp.append(r[-1] - r[:-1], r[-1:], axis=0), asked)
    gram = _products(problem, carry.evaluation, here.local, change)
    shares = mixing_shares(gram, filled)
    # A mean-field q waits until the memory is full, and takes the plain steps that it always took until then.
    attempt = (filled > 1 if problem.flat else filled == WINDOW) & ~mixing.refused & carry.evaluation.moments.valid
    attempt = attempt & (_length(gram) <= NEAR)
    memory = mixing._replace(points=points, targets=targets, filled=filled)
    if not problem.flat:
        steps = _asked(problem, jax.tree.map(lambda p: p[-1] - p[:-1], points))
        left, reach = _still_to_go(problem, carry.evaluation, here.local, gram, steps, filled, mixing.reach)
        left = jnp.where(sampled, 0.0, left)
        memory = memory._replace(left=left.astype(mixing.left.dtype), reach=reach.astype(mixing.reach.dtype))
    aims = targets if step is None else jax.tree.map(lambda p, r: p + step * r, points, residuals)
    return memory, jax.tree.map(lambda aim: jnp.tensordot(shares, aim, 1), aims), attempt


def _ended(mixing: Mixing, attempt: Bool[Array, ""], done: Any) -> tuple[Mixing, Bool[Array, ""]]:
    """What is remembered of how a round ended, and whether it went to the mixture that it was to attempt."""
    refused = attempt & ((done.halvings > 0) | ~done.accepted)
    elbo = done.evaluation.elbo.astype(mixing.elbo.dtype)
    return mixing._replace(refused=refused, elbo=elbo), attempt & ~refused


def _is_where_it_ended(mixing: Mixing, here: Evaluation) -> Bool[Array, ""]:
    """Whether a round begins with the ELBO that the last one ended with: with the same data and params, but for rounding.

    In single precision sums of many rows hide small changes of these: a mixture is then taken only if the ELBO does not fall.
    """
    return jnp.abs(here.elbo - mixing.elbo) <= _SAME_ELBO * jnp.finfo(here.size.dtype).eps * here.size


def _still_to_go(
    problem: Any, old: Evaluation, local: Any, gram: Any, steps: Any, filled: Int[Array, ""], reach: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """An estimate of how far q is from where rounds lead: the residual, times the most that q went for a change of residuals.

    Mixtures converge much faster than the slowest mode that they go through, and their moves do not show what is left of it.
    ``gram``: inner products of differences of residuals, and of the newest, last; ``steps``: how far q went meanwhile. Differences
    within rounding say nothing, nor do modes that no step of the window went along. ``reach``: what the last round found: the
    window has seen it go, where it has begun anew. Returns posterior sds, and their like for the precision; and what q went for a
    change at most.
    """
    whole = _squares(problem, old, local, _Asked(jax.tree.map(lambda x: x[None], old.q), None))[0]
    if problem.units is not None:
        # Of a Gaussian's own naturals it is a half for every coordinate.
        whole = whole + 0.5 * math.prod(problem.units)
    within = 64 * jnp.finfo(gram.dtype).eps * jnp.sqrt(jnp.maximum(whole, 1.0))
    changes = jnp.sqrt(jnp.maximum(jnp.diagonal(gram)[:-1], 0.0))
    there = (jnp.arange(WINDOW - 1) >= WINDOW - filled) & (changes > within)
    ratios = jnp.sqrt(jnp.maximum(_squares(problem, old, local, steps), 0.0)) / jnp.where(there, changes, 1.0)
    found = jnp.max(jnp.where(there, ratios, 0.0), initial=1.0)
    reach = jnp.where(filled == WINDOW, found, jnp.maximum(found, reach))
    length = _length(gram)
    return jnp.where(length > within, length * reach, 0.0), reach


def _squares(problem: Any, old: Evaluation, local: Any, change: _Asked) -> Float[Array, "W"]:
    """Squared lengths of changes of the naturals in q's Fisher metric."""
    return jnp.diagonal(_products(problem, old, local, change))


def _length(gram: Float[Array, "W W"]) -> Float[Array, ""]:
    """Of the newest residual; infinity where it is no number."""
    square = gram[-1, -1]
    return jnp.where(jnp.isfinite(square), jnp.sqrt(jnp.maximum(square, 0.0)), jnp.inf)


# ---------------------------------------------------------------------------------------------------- control of widths
# First rounds without structure, far from any optimum: q may narrow but widen by little where its sites ask for no Gaussian.

# What a held round leaves of q's precision in every direction, at least: sds grow by no more than 1.2 times. At 1, a q that had
# become narrow (a poor start, a first round on a steep slope) kept its width, and crawled by about one sd a round for all that it
# was held. Well below, some networks lost hidden units again.
_LEAST_KEPT = 0.7
# After so many held rounds q is as near an optimum as holding brings it.
_MOST_HELD = 30


def may_hold(problem: Problem) -> bool:
    """Whether rounds can be held at all: expectations that may be by draws, a full covariance, one global ELBO.

    Known when tracing: other problems' programs have nothing of it.
    """
    one_bound = not problem.stochastic and not problem.matches_moments and problem.units is None
    return problem.noisy and one_bound and problem.family.full


def hold_width(
    problem: Problem, proposal: SiteStack, old: Evaluation, moved: Bool[Array, "M"], held: Int[Array, ""]
) -> tuple[SiteStack, Int[Array, ""]]:
    """Add what a round's sites lack of q's own precision, where together they ask for no normalisable q.

    With ``L`` the old precision, ``S S^T = L^-1``, and ``P`` the precision that prior and proposals sum to,

        P + S^-T (W' - W) S^-1,    W = S^T P S,    W' = W with eigenvalues raised to 0.7 at least,

    takes the place of ``P``; the gradient at the old location stays, and the groups that moved share what is added in equal
    parts, so that sites still sum to q and q does not depend on the partition. It is a Levenberg-Marquardt step with a share of q's
    own precision for its damping. Far from an optimum, curvatures of models such as networks are indefinite; a fraction of the step
    towards them goes to the next saddle and widens q in those directions, until latents (a hidden unit) are lost to their
    prior, which no later step mends. A later round's proposals replace the sites as ever, so nothing of what was added is left
    at a fixed point. ``proposal``: where the local solves want the sites; ``old``: evaluation before the round; ``held``:
    rounds held so far; the 31st and later ones are not. Returns ``(proposal, held)``: unchanged where q is normalisable at the
    proposal, and where that is not finite.

    References:
        Marquardt, An algorithm for least-squares estimation of nonlinear parameters, SIAM J. Appl. Math. 11 (1963).
        Khan and Rue, The Bayesian Learning Rule, section 4 (natural-gradient steps as Newton steps).
    """
    total = posterior(problem.prior_natural, proposal)
    due = ~problem.family.in_domain(total) & old.moments.valid
    due = due & all_finite(total) & jnp.any(moved) & (held < _MOST_HELD)

    def added():
        whitened = congruent(old.moments.scale.T, total.precision)
        precision = congruent(invert_lower(old.moments.scale.T), missing_eigenvalues(whitened, _LEAST_KEPT))
        extra = problem.family.natural(precision @ old.moments.loc, precision)
        share = moved / jnp.sum(moved)
        return jax.tree.map(lambda site, x: site + jnp.multiply.outer(share.astype(x.dtype), x), proposal.groups, extra)

    groups = jax.lax.cond(due, added, lambda: proposal.groups)
    return dataclasses.replace(proposal, groups=groups), held + due.astype(held.dtype)


# ---------------------------------------------------------------------------------------------------------- synchronous


class SynchronousState(NamedTuple):
    """The joint step's memory."""

    step: Float[Array, ""]
    # Unit vector of the power iteration on D^-1/2 Lambda D^-1/2 (mean-field q only; a zero-length stand-in otherwise).
    probe: Float[Array, "P"]
    # Its Rayleigh quotient at the last evaluation, a lower bound of the largest eigenvalue.
    eigenvalue: Float[Array, ""]
    averaging: Averaging
    # What the last round would have moved by with a whole step, posterior sds.
    last_move: Float[Array, ""]
    # Rounds in which q was kept from widening much.
    held: Int[Array, ""]
    # The last rounds, where they are extrapolated; else None.
    mixing: Mixing | None = None

    @property
    def drift(self) -> Float[Array, ""]:
        """What is left at least, posterior sds: of rounds by draws, or of those that are extrapolated."""
        own = self.averaging.drift
        return own if self.mixing is None else jnp.maximum(own, self.mixing.left)


def without_mixing(memory: Any) -> Any:
    """A schedule's memory of rounds that are not extrapolated; as it is where none of its ever are."""
    return memory._replace(mixing=None) if isinstance(memory, SynchronousState) else memory


def mixing_as(wanted: Any, memory: Any) -> Any:
    """A schedule's memory, with nothing yet to extrapolate from where another one has room for that and it has not.

    Likewise without, and as it is where they agree, or are of different schedules. ``wanted``: what has the room, or has not.
    """
    if not (isinstance(memory, SynchronousState) and isinstance(wanted, SynchronousState)):
        return memory
    if jax.tree.structure(memory.mixing) == jax.tree.structure(wanted.mixing):
        return memory
    return memory._replace(mixing=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted.mixing))


@dataclasses.dataclass(frozen=True)
class Synchronous(ScheduleDefaults):
    """One update of every site from the same q, then absorbed together: ``eta_m <- eta_m + step (proposal_m - eta_m)``.

    The joint step starts at ``damping`` and is halved until q is normalisable and the global ELBO has not fallen beyond
    rounding (on common draws where expectations are by draws), and doubled again when a round is
    accepted at once; it is also halved when the moves grow, and turn back, while the ELBO stands still. A
    mean-field q also caps it at ``1 / lambda_max(D^-1/2 Lambda D^-1/2)``, D the diagonal of the curvature Lambda:
    parallel mean-field updates blow up at moderate correlations with every q and cavity valid. Where expectations are
    by draws, the naturals of late rounds are averaged: steps shrink as c / (c + k) with the number k of rounds in which the
    location turned back, and a fall of the ELBO that the draws' own contradictions explain is no reason to halve. Where
    they may be by draws (there is no structure), sds of a full-covariance q grow by no more than 1.2 times in each of the
    first 30 rounds whose sites together ask for no normalisable q.

    Under "auto", where sites are two numbers per row (``NaturalGradient(sites=)``), from 128 rows on, or, where
    expectations are not by draws, q is mean-field or components move in turns, from the sixth round on, the joint step
    aims at the mixture of the last six rounds' targets whose residuals are least in the Fisher metric of q (Anderson
    mixing), once these are below five posterior sds; where the ELBO has fallen there, at the round's own target. A number
    takes plain steps.

    Under a stochastic solver each site has been moved as if alone, so that M of them together go M times too far: "auto"
    is then 1/M (a mean of M normalisable q's is normalisable), or ``power / M`` under :class:`numpyro_pvi.solvers.LocalELBO` with
    a ``power``, whose visits allow for so many groups. The ELBO is looked at once, and a round is undone, and the
    step halved, only where it has lost more than noise explains.

    Args:
        damping: largest joint step in (0, 1], or "auto": 1, and 1/M or ``power / M`` under a stochastic solver, or one that
            moves sites as if alone (``SNEP`` with anchors that outlast a visit). 1 is the full step, as in earlier PVI code.

    Raises:
        PVIError: on construction, for a damping outside (0, 1].

    References:
        Ashman et al., Partitioned Variational Inference, section 3.2 (synchronous updates) and property 5.
        Kesten, Accelerated Stochastic Approximation, 1958 (a step that falls with the changes of sign).
    """

    damping: float | str = "auto"

    # Sites of single rows go along with the groups'; all groups may share one site.
    carries_rows = True
    carries_tied = True
    carries_numbers = True
    carries_own = True
    evaluates = True

    def __post_init__(self):
        if self.damping != "auto" and not (isinstance(self.damping, (int, float)) and 0.0 < self.damping <= 1.0):
            raise PVIError(
                f"Synchronous(damping={self.damping!r}): expected 'auto' or a number in (0, 1]; 1 is the full step."
            )

    @property
    def only_adds(self) -> bool:
        """With a damping of one's own: "auto" asks what lone groups want."""
        return self.damping != "auto"

    def _largest(self, problem: Problem) -> float:
        # Turns are shortened one by one: what is left to a joint step is to take all of them, or less.
        return self._full(problem) if self.damping == "auto" or problem.in_turns else float(self.damping)

    def _full(self, problem: Problem) -> float:
        """The joint step that takes all that is asked for."""
        return min(1.0, taken_whole(problem) / problem.num_groups)

    def opens(self, problem: Problem) -> bool:
        """Where visits read no rows, or turns are left out, and a candidate's evaluation is all that any evaluation is."""
        plain = not (problem.stochastic or problem.matches_moments or problem.blind)
        return plain and not problem.solver.rereads

    def fuses(self, solver: Any) -> bool:
        """Under solvers that steps of all groups at once are written for."""
        return solver.fused_families

    def check_families(self, solver: Any) -> None:
        """Goes with every family and every solver that does."""

    def init(self, problem: Problem, dtype: Any) -> SynchronousState:
        """Start at the largest step."""
        dim = problem.family.dim if problem.capped and not problem.stochastic else 0
        probe = jnp.ones((dim,), dtype) / jnp.sqrt(jnp.asarray(max(dim, 1), dtype))
        one = jnp.ones((), dtype)
        averaging = no_averaging(problem.family.dim if problem.noisy and not problem.stochastic else 0, dtype)
        largest = self._largest(problem)
        mixing = no_mixing(problem, self.damping == "auto" and largest == 1.0, dtype)
        return SynchronousState(one * largest, probe, one, averaging, one * jnp.inf, jnp.int32(0), mixing)

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """One update of every site: see :class:`numpyro_pvi.schedules.Schedule`."""
        if problem.in_turns:
            return self._in_turns(problem, carry, noise)
        solve_key, prior_key = jax.random.split(key)
        probe, scale = (None, None) if problem.stochastic else self._probe(problem, carry)
        old = carry.evaluation
        results = problem.visit_all(carry, solve_key, noise)
        if self.damping == "auto":
            results = problem.refined(old, results)
        prior = None
        if problem.has_prior_factor:
            prior = problem.visit_prior(
                old.q, carry.sites.prior, carry.prior_solver, prior_key, old.rule, noise, start=old.prior
            )
        local = problem.local_proposal(carry, results.moved) if results.local is None else results.local
        proposal, mixed = SiteStack(results.site, None if prior is None else prior.site, local), False
        if problem.stochastic:
            done = accept_once(problem, carry.sites, proposal, old, carry.schedule.step, noise)
        else:
            first = self._first_step(problem, carry.schedule)
            if may_hold(problem):
                proposal, held = hold_width(problem, proposal, old, results.moved, carry.schedule.held)
                # Such a step widens q by little and is short already: what earlier rounds had to halve says nothing of it.
                first = jnp.where(held > carry.schedule.held, self._largest(problem), first).astype(first.dtype)
                carry = carry._replace(schedule=carry.schedule._replace(held=held))
            mixing, aim, fallback, restart = carry.schedule.mixing, proposal, None, None
            if mixing is not None:
                own = 1.0 if problem.flat else first
                whole = _all_asked(results, prior)
                mixing, aims, attempt = mixture(problem, mixing, carry, proposal, None if problem.flat else own, whole)
                plain = proposal if problem.flat else carry.sites + (proposal - carry.sites) * own
                aim, fallback = select(attempt, aims, proposal), plain
                # A mixture is taken whole or not at all; without one there is nothing to fall back on.
                first = jnp.where(attempt, self._largest(problem), first).astype(first.dtype)
                restart = jnp.where(attempt, first, 0.0)
            searched = {"restart": restart, "opening": carry.opening}
            done = accept_jointly(problem, carry.sites, aim, old, first, noise, probe, fallback, **searched)
            if mixing is not None:
                done = done._replace(step=jnp.where(attempt, own * done.step, done.step))
                mixing, mixed = _ended(mixing, attempt, done)
                carry = carry._replace(schedule=carry.schedule._replace(mixing=mixing))
        return self._finish(problem, carry, results, prior, done, scale, mixed=mixed)

    def _in_turns(self, problem: Problem, carry: RoundCarry, noise: Any) -> RoundCarry:
        late, step = self._late(problem, carry.schedule), carry.schedule.step
        share = late if self.damping == "auto" else late * self.damping
        # What was halved before is a shorter sweep, and not a share of a full one, whose later turns have seen all of the earlier.
        swept = cast(Any, problem).sweep(carry, share * step, noise)
        one, aim, how, taken = jnp.ones_like(step), swept.sites, {"opening": carry.opening}, False
        if (mixing := carry.schedule.mixing) is not None:
            whole = (step == 1.0) & _all_asked(swept.groups, swept.prior)
            mixing, mixed, attempt = mixture(problem, mixing, carry, swept.sites, None, whole)
            how |= {"fallback": aim, "restart": jnp.where(attempt, one, 0.0)}
            aim = select(attempt, mixed, aim)
        done = accept_jointly(problem, carry.sites, aim, carry.evaluation, one, noise, **how)
        if mixing is not None:
            mixing, taken = _ended(mixing, attempt, done)
            carry = carry._replace(schedule=carry.schedule._replace(mixing=mixing))
        swept = swept._replace(share=swept.share / step)
        done = done._replace(step=done.step * step)
        return self._finish(problem, carry, swept.groups, swept.prior, done, None, swept, taken)

    def _late(self, problem: Problem, state: SynchronousState) -> Float[Array, ""]:
        """The largest step of a round; turns by some of the rows keep all of a step that was given, and the noise of it."""
        given = problem.in_turns and problem.blind and self.damping != "auto"
        return jnp.ones_like(state.step) if given else averaging_step(state.averaging, state.step.dtype)

    def _probe(self, problem: Problem, carry: RoundCarry):
        if not problem.capped:
            return None, None
        # The curvature at the target, not q's own precision, is what the next parallel step divides by.
        scale = _curvature_diagonal(problem, carry.evaluation)
        return carry.schedule.probe / jnp.sqrt(scale), scale

    def _first_step(self, problem: Problem, state: SynchronousState) -> Float[Array, ""]:
        largest = jnp.minimum(state.step, self._largest(problem) * averaging_step(state.averaging, state.step.dtype))
        return jnp.minimum(largest, 1.0 / jnp.maximum(state.eigenvalue, 1.0))

    def _finish(
        self,
        problem: Problem,
        carry: RoundCarry,
        results,
        prior,
        done,
        scale,
        swept: Turns | None = None,
        mixed: Any = False,
    ) -> RoundCarry:
        old, state = carry.evaluation, carry.schedule
        share = 1.0 if swept is None else swept.share
        # The pass that tests a joint step also finds what the groups want next, but for visits that look by themselves.
        looks = 0 if swept is not None and problem.blind else done.tries
        skipped = with_prior(None if prior is None else ~prior.moved, ~results.moved)
        taken = jnp.where(done.accepted, done.step * share, 0.0)
        report = round_report(
            problem,
            carry,
            done,
            step=jnp.where(skipped, 0.0, taken),
            backoffs=with_prior(None if prior is None else prior.backoffs, results.backoffs) + done.halvings,
            skipped=skipped,
            exchanges=problem.num_groups * ((problem.stochastic if swept is None else swept.trips) + looks),
            states=results.state,
            prior_state=None if prior is None else prior.state,
            largest=self._largest(problem),
            full=self._full(problem),
            late=1.0 if problem.stochastic else self._late(problem, state),
            drift=state.drift,
            own=results.step if problem.stochastic else share,
            mixed=mixed,
        )
        moved = report.total_move
        averaging = state.averaging
        if problem.noisy and not problem.stochastic:
            averaging = average_late(problem, averaging, done.evaluation, old)
        # Moves of steps of unequal length are compared by what the steps are a share of.
        asked = moved / jnp.maximum(done.step, 2.0**-MAX_HALVINGS)
        grew = (asked > state.last_move) & _turns_back(report.trail, carry.report.trail)
        oscillates = _oscillates(problem, grew, done.evaluation, old) & ~jnp.asarray(mixed)
        step = self._next_step(problem, done, oscillates)
        if problem.capped and not problem.stochastic:
            state = _probed(problem, state, done, scale)
        return RoundCarry(
            done.sites,
            done.evaluation,
            results.state,
            None if prior is None else prior.state,
            state._replace(
                step=step.astype(state.step.dtype),
                averaging=averaging,
                # How far a mixture went is no measure for the next round.
                last_move=jnp.where(mixed, state.last_move, asked),
            ),
            report,
        )

    def _next_step(self, problem: Problem, done: Any, oscillates: Bool[Array, ""]) -> Float[Array, ""]:
        """Where the next round's search begins."""
        grown = jnp.minimum(jnp.where(done.halvings == 0, 2.0, 1.0) * done.step, self._largest(problem))
        step = jnp.where(oscillates, 0.5 * done.step, grown)
        # A round that found no acceptable step starts the next search a little below the full one; and so where one was short
        # enough to be within rounding, whatever it does, as reports count it among the refused: growing from there takes rounds.
        refused = done.step if problem.stochastic else 0.125
        taken = done.accepted & (problem.stochastic | (done.step >= CRAWL * self._largest(problem)))
        return jnp.where(taken, jnp.maximum(step, 2.0**-MAX_HALVINGS), refused)


def _all_asked(groups: Any, prior: Any) -> Bool[Array, ""]:
    """Whether every factor made a proposal, and a whole one; ``prior``: of the prior factor, or None."""
    return jnp.all(jnp.stack([jnp.all(x.moved & (x.backoffs == 0)) for x in (groups, prior) if x is not None]))


def _oscillates(problem: Problem, grew: Bool[Array, ""], new: Evaluation, old: Evaluation) -> Bool[Array, ""]:
    """Whether steps overshoot: below rounding the ELBO no longer sees it, and growing moves that turn back do.

    Of draws growing moves show nothing: they grow in every other round, and steps would wither. How far
    a mixture went shows nothing either, and is not asked about.
    """
    gain, rounding = elbo_gain(new, old)
    oscillates = grew & (gain <= rounding) & (not (problem.stochastic or problem.blind))
    return oscillates & ~problem.sampled(old.rule) if problem.noisy else oscillates


def _turns_back(new: Float[Array, "16"], old: Float[Array, "16"]) -> Bool[Array, ""]:
    """Whether a move does not go the way of the one before; ``new``, ``old``: sketches of both.

    What goes on the same way, after params that move, say, is late, and shorter steps would make it later.
    """
    return ~(jnp.vdot(new, old) > 0)


def _probed(problem: Problem, state: SynchronousState, done: Any, scale: Float[Array, "D"]) -> SynchronousState:
    """One step of the power iteration on the curvature where the round has come to."""
    product = _curvature_product(problem, state, done.evaluation, scale)
    estimate, direction = power_iteration_step(product, scale, state.probe)
    usable = done.accepted & jnp.isfinite(estimate) & jnp.all(jnp.isfinite(direction))
    probe, eigenvalue = jnp.where(usable, direction, state.probe), jnp.where(usable, estimate, state.eigenvalue)
    return state._replace(probe=probe, eigenvalue=eigenvalue)


def _curvature_diagonal(problem: Problem, evaluation) -> Float[Array, "D"]:
    total = problem.family.precision_diagonal(problem.prior_natural) + jnp.sum(
        evaluation.groups.target.precision, axis=0
    )
    if evaluation.prior is not None:
        total = total + evaluation.prior.target.precision
    own = problem.family.precision_diagonal(evaluation.q)
    return jnp.where(jnp.isfinite(total) & (total > 0), total, jnp.where(own > 0, own, 1.0))


def _curvature_product(problem: Problem, state: SynchronousState, evaluation, scale) -> Float[Array, "D"]:
    vector = state.probe / jnp.sqrt(scale)
    product = problem.family.precision_diagonal(problem.prior_natural) * vector + jnp.sum(
        evaluation.groups.product, axis=0
    )
    return product if evaluation.prior is None else product + evaluation.prior.product
