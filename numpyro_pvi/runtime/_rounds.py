"""Rounds of a fit in one compiled loop, whatever the family of q, and steps of the model's params between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from .._compiling import ROUNDS
from .._numerics import Flat, either_mode
from .._state import SKIP_LIMIT, Plan, PVIState
from ..factors import GroupMasks, Packing, abstract_trace
from ..schedules import Evaluation, RoundCarry, Schedule, finished, sound, with_params
from ..sites import select
from ..solvers import LocalSolver, step_and_slope
from ._base import Runtime
from ._moments import noise_floor
from ._tilted import chains_wanted

# -------------------------------------------------------------------------------------------------- numpyro.param sites
# Values of a model's ``numpyro.param`` sites: constrained for the model, and moved by one step of the user's optimiser.


class FitsParams:
    """What engines know of the model's params, and of where its rows are; a base class for those that say which they are."""

    model: Callable
    solver: LocalSolver
    schedule: Schedule
    runtime: Runtime
    optim: Any

    # Whether groups' own latents are with clients.
    of_clients = False
    # How well rounds are compiled, by what they compute: see :mod:`numpyro_pvi._compiling`.
    levels = ROUNDS
    # Whether compiled rounds depend on the groups' sizes.
    reads_sizes = False

    def runtime_of(self, packing: Packing | GroupMasks) -> Runtime:
        """Where the rows of a packing are read: on the devices that they were placed on, or on the one where all of them are."""
        placed = isinstance(packing, Packing) and packing.places is not None
        return self.runtime if placed else self.runtime.alone

    @property
    def _may_open(self) -> bool:
        """Whether rounds that evaluate are this fit's."""
        return not (self.schedule.streams or self.solver.stochastic or self.solver.private)

    def _opens(self, problem: Any, ends_evaluating: bool) -> bool:
        """Whether the state's own q is evaluated in a place of the rounds' own, before the first.

        A second place would be compiled a second time. ``ends_evaluating``: whether rounds end with an evaluation of their own.
        """
        return self._may_open and (ends_evaluating or self.schedule.opens(problem))

    def param_transforms(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Bijections from unconstrained space to the supports of the model's ``numpyro.param`` sites."""
        trace = abstract_trace(self.model, jax.random.key(0), args, kwargs)
        return {
            n: biject_to(s["kwargs"].get("constraint", constraints.real))
            for n, s in trace.items()
            if s["type"] == "param"
        }

    def constrain(self, plan: Plan, args: tuple, kwargs: dict, optim_state: Any) -> dict[str, Any]:
        """Constrained values of the model's ``numpyro.param`` sites held in an optimiser state."""
        if not plan.partition.params:
            return {}
        transforms = self.param_transforms(args, kwargs)
        return {n: transforms[n](v) for n, v in self.optim.get_params(optim_state).items()}

    def moved_params(
        self, loss: Callable[[dict], Float[Array, ""]], optim_state: Any, args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Any], Float[Array, "P"]]:
        """One step of the optimiser (PVI eq. 5); none where the loss, or what it leads to, is not finite.

        ``loss``: negative ELBO in nats at constrained values, q held fixed. Returns the optimiser's state, the constrained
        values after it, and the nats that every param's part of the step gains to first order (by name, sorted), 0 within
        rounding of the loss.
        """
        transforms = self.param_transforms(args, kwargs)

        def constrained(values: dict) -> dict:
            return {n: transforms[n](v) for n, v in values.items()}

        # The optimiser looks at the objective itself: its value, and as often as a line search or a minimiser wants.
        def step(forward: bool):
            return step_and_slope(self.optim, lambda values: loss(constrained(values)), optim_state, forward)

        value, moved, slope = either_mode(step)
        numbers = [value, *jax.tree.leaves(self.optim.get_params(moved))]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in numbers]))
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, optim_state)
        now, before = self.optim.get_params(moved), self.optim.get_params(optim_state)
        # A step that was refused has gained nothing, and says nothing of how far it is.
        return moved, constrained(now), jnp.where(finite, _gains(slope, before, now, value), jnp.inf)


def _gains(slope: Any, before: dict[str, Any], now: dict[str, Any], value: Any) -> Float[Array, "P"]:
    """Nats that a step gains to first order, by param: 0 within rounding of the loss, and where the optimiser takes no slope."""
    dtype = jnp.result_type(float)
    if slope is None:
        return jnp.zeros((len(before),), dtype)

    def gain(name: str) -> Array:
        parts = jax.tree.map(lambda g, a, b: jnp.vdot(g, b - a), slope[name], now[name], before[name])
        return jnp.abs(sum(jax.tree.leaves(parts)))

    gains = jnp.stack([gain(name) for name in sorted(before)]).astype(dtype)
    return jnp.where(gains <= jnp.finfo(jnp.result_type(value)).eps * jnp.abs(value), 0.0, gains)


# ------------------------------------------------------------------------------------------------------------- the loop


def opened(
    opening: Any, ends_evaluating: bool, state: PVIState, carry: RoundCarry, moved: Callable[[RoundCarry], tuple]
) -> tuple[PVIState, RoundCarry]:
    """A round; while ``opening``, none of it but, where no evaluation ends it, that of the state's own q in a candidate's place.

    ``opening``: Bool, or None where rounds never open; ``moved``: state and carry after the schedule's round, of the carry.
    """
    if opening is None:
        return moved(carry)
    if ends_evaluating:
        return jax.lax.cond(opening, lambda: (state, carry), lambda: moved(carry))
    after, done = moved(carry._replace(opening=opening))
    # Such a round leaves the sites where they are: there is nothing to choose, and no copy of them to choose from.
    state, carry = dataclasses.replace(state, sites=after.sites), carry._replace(sites=done.sites)
    return select(opening, (state, carry._replace(evaluation=done.evaluation)), (after, done))


def unevaluated(problem: Any, sites: Any, rule: Any, evaluate: Callable[[], Evaluation]) -> Evaluation:
    """An evaluation of the right shapes that says nothing but its rule.

    ``problem``: the factors; ``sites``: those of q; ``evaluate``: traced for its shapes where the problem does not know them.
    """

    def found() -> Evaluation:
        known = problem.shaped(sites, rule)
        return evaluate() if known is None else known

    shapes = jax.eval_shape(found)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)._replace(rule=rule)


class RoundsDone(NamedTuple):
    """The outcome of :meth:`Engine.rounds`."""

    state: PVIState
    # Negative ELBOs of the rounds that ran, NaN after them, and their reports, laid flat, with a leading axis of that length.
    losses: Float[Array, "length"]
    reports: Flat
    done: Int[Array, ""]
    # Whether the next round needs the finest quadrature rule compiled in.
    missed: Bool[Array, ""]
    # The first of the losses, for who asks for one round.
    loss: Float[Array, ""]
    # What the next rounds from this state on begin with, where rounds were told of their own state: see ``Engine.unseen``.
    evaluation: Any = None


def run_rounds(
    state: PVIState,
    carry: Any,
    one: Callable[[PVIState, Any, Any], tuple[PVIState, Any, Float[Array, ""], Any]],
    count: Int[Array, ""],
    tol: Float[Array, ""],
    length: int,
    solver: LocalSolver,
    missed: Any = False,
    opening: Any = None,
    reopens: bool = False,
) -> tuple[RoundsDone, Any]:
    """Run up to ``count`` rounds in one compiled loop, whatever a round is.

    ``carry``: what rounds hand on to one another beside the state; ``one``: a round: of a state, a carry and ``opening`` the
    state and the carry afterwards, the loss in nats, and whether the round is not to be, as it needs the finest quadrature
    rule; None where none ever does; ``tol``: largest move of a round, in posterior sds, that ends them; no lower than what the
    noise of sampled moments explains. Negative never ends them; ``length``: rounds that there is room for; ``solver``: where
    its weights keep collapsing rounds end early, so that chains can be compiled in; ``missed``: whether the first round needs
    that rule already; ``opening``: whether the first is no round, but the evaluation of the state's own q; None where it never
    is; ``reopens``: whether such an evaluation, on fresh draws, follows every round and gives its loss. Returns the rounds, and
    what the last of them hands on.
    """

    def unfinished(loop: tuple) -> Array:
        i, state, *_, missed, opening = loop
        floor = noise_floor(state.solver_state, state.report)
        halted = finished(state.report, tol, floor) | jnp.any(state.report.skip_run >= SKIP_LIMIT)
        halted = halted | chains_wanted(solver, state.solver_state)
        halted = halted & (i > 0)
        return (i < count) & ~missed & ~(halted & ~opening if reopens else halted)

    def again(loop: tuple) -> tuple:
        i, *before, losses, reports, missed, opening = loop
        state, carry, loss, over = one(*before, opening)
        if over is not None:
            missed, loss = over, jnp.where(over, jnp.nan, loss)
        # What is there before the first round is nobody's loss.
        place = jnp.where(i < 0, length, i) if reopens else i
        losses = losses.at[place].set(loss, mode="drop")
        reports = jax.tree.map(lambda all_, new: all_.at[place].set(new, mode="drop"), reports, Flat.of(state.report))
        if over is not None:
            state, carry = jax.tree.map(lambda old, new: jnp.where(missed, old, new), tuple(before), (state, carry))
        if opening is None:
            return i + ~missed, state, carry, losses, reports, missed, None
        if reopens:
            return i + opening, state, carry, losses, reports, missed, ~opening
        return i + (~missed & ~opening), state, carry, losses, reports, missed, jnp.array(False)

    losses = jnp.full((length,), jnp.nan, state.report.move.dtype)
    reports = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), Flat.of(state.report))
    start = -opening.astype(jnp.int32) if reopens else jnp.int32(0)
    first = start, state, carry, losses, reports, jnp.asarray(missed), opening
    done, state, carry, losses, reports, missed, _ = jax.lax.while_loop(unfinished, again, first)
    return RoundsDone(state, losses, reports, done, missed, losses[0]), carry


def carry_of(state: PVIState, evaluation: Any) -> RoundCarry:
    """A state in the form that rounds take."""
    return RoundCarry(
        state.sites, evaluation, state.solver_state, state.prior_solver_state, state.schedule_state, state.report
    )


def moved_by(
    schedule: Schedule, problem: Any, state: PVIState, carry: RoundCarry, noise: Any
) -> tuple[PVIState, RoundCarry]:
    """State and carry after a schedule's round. ``state``: before it; ``carry``: likewise, in the form that rounds take."""
    next_key, round_key = jax.random.split(state.rng_key)
    carry = schedule.round(problem, carry, round_key, noise)
    state = dataclasses.replace(
        state,
        rng_key=next_key,
        sites=carry.sites,
        solver_state=carry.solver,
        prior_solver_state=carry.prior_solver,
        schedule_state=carry.schedule,
        report=carry.report,
        step=state.step + 1,
    )
    return state, carry


def present_alone(state: PVIState) -> PVIState:
    """A state without the sites of groups whose rows are not at hand, which rounds take as one factor beside the prior."""
    return dataclasses.replace(state, sites=dataclasses.replace(state.sites, others=None))


# -------------------------------------------------------------------------------------------------------- engines' rounds
# The rounds of every engine; what is another's under each family of q is in methods that it has of its own.


class RoundEngine(FitsParams):
    """Rounds in one compiled loop: a base class of the engines, which say what factors, looks and a schedule's round are."""

    # Whether rounds look at some of the rows only, and know of no loss; whether factors' values are told one by one.
    reads_some, tells_factors = False, True

    def rounds(
        self,
        state: PVIState,
        args: tuple,
        kwargs: dict,
        count: Int[Array, ""],
        tol: Float[Array, ""],
        length: int,
        fine: bool,
        seen: tuple[Evaluation, Bool[Array, ""]] | None = None,
    ) -> RoundsDone:
        """Run up to ``count`` rounds in one compiled loop.

        ``state``: where to start; ``args``: positional arguments (arrays); ``kwargs``: keyword arguments; ``count``: rounds to
        run, at most ``length``; ``tol``: stop after a round whose largest move is at most this many posterior sds; negative
        never stops; ``length``: static size of the buffers; ``fine``: whether the finest quadrature rule is compiled in.
        Without it rounds that ask for it are not done; ``seen``: an evaluation of the state's q as the rounds that made it have
        left it, of the shapes of :meth:`unseen`, and whether it is one: where it is not, rounds begin with a pass over the
        rows. None where it never is. Returns the state and what was recorded.
        """
        given = self._ruled(state, fine)
        # Rounds see sites of groups whose rows are not at hand beside the prior; a state has them, which may be gone back to.
        stored, moves = given.sites.others, self._moves(given)
        fixed = None if moves else self._state_problem(given, args, kwargs, fine)

        def problem_of(state: PVIState) -> Any:
            own = self._state_problem(state, args, kwargs, fine) if fixed is None else fixed
            return self._seen(own, state, stored is not None)

        def moved(state: PVIState, carry: RoundCarry) -> tuple[PVIState, RoundCarry]:
            problem = problem_of(state)
            state, carry = self._round(problem, state, carry)
            if moves:
                objective = self._objective(problem, state, carry, args, kwargs, fine)
                state = self._step_params(problem, state, args, kwargs, *objective)
            return state, carry._replace(report=state.report)

        given = present_alone(given)
        done = self._loop(given, problem_of, moved, (count, tol, length, self.solver), fine, moves, seen)
        sites = dataclasses.replace(done.state.sites, others=stored)
        done = done._replace(state=dataclasses.replace(done.state, sites=sites))
        return self._checked(done, state, args, kwargs, fine)

    def unseen(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Evaluation | None:
        """An evaluation that says nothing, for :meth:`rounds`; None where rounds evaluate a state's q in a place of their own."""
        # With rows on several devices an evaluation is in part of each one's own.
        if self.reads_some or not self._may_open or self.runtime.alone is not self.runtime:
            return None
        state = self._ruled(state, fine)
        continued, moves = state.sites.others is not None, self._moves(state)
        problem = self._state_problem(state, args, kwargs, fine)
        state = present_alone(state)
        problem = self._seen(problem, state, continued)
        ends = self._ends_evaluating(problem, state, moves)
        return self._blank(problem, state) if self._opens(problem, ends) else None

    def factor_values(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Float[Array, "F"]:
        """Every factor's expected log density under a state's q in nats, that of the prior factor (if any) first."""
        state, continued = self._ruled(state, fine), state.sites.others is not None
        problem = self._state_problem(state, args, kwargs, fine)
        state = present_alone(state)
        found = self._evaluated(self._seen(problem, state, continued), state)
        prior = () if found.prior is None else (found.prior.value[None],)
        return jnp.concatenate([*prior, found.groups.value])

    def _loop(
        self,
        state: PVIState,
        problem_of: Callable[[PVIState], Any],
        moved: Callable[[PVIState, RoundCarry], tuple[PVIState, RoundCarry]],
        how: tuple,
        fine: bool,
        moves: bool,
        seen: tuple | None,
    ) -> RoundsDone:
        """Rounds that look at all rows.

        ``problem_of``: a state's factors as schedules see them; ``moved``: state and carry after the schedule's round, and a step
        of the params; ``how``: how many rounds, and when they end; ``moves``: whether params move; the others are as of
        :meth:`rounds`.
        """
        begun = problem_of(state)
        ends = self._ends_evaluating(begun, state, moves)
        opens = self._opens(begun, ends)
        reopens = opens and ends and self._reopens(begun, moves)
        first, opening = self._first(begun, state, opens, seen)

        def one(state: PVIState, carry: RoundCarry, opening: Any) -> tuple[PVIState, RoundCarry, Array, Any]:
            before, counts = state, jnp.array(True) if opening is None else ~opening
            here = ends and not reopens

            def after(carry: RoundCarry) -> tuple[PVIState, RoundCarry]:
                state, done = moved(before, carry)
                if here and self._looks_afresh(begun, moves):
                    # Nothing is left of the round's evaluation but where the next one starts.
                    done = done._replace(evaluation=carry.evaluation._replace(rule=done.evaluation.rule))
                return state, done

            state, carry = opened(opening, here, before, carry, after)
            if ends:
                # Fresh draws for the next round, or params that have moved, need a new evaluation: here, or in a round of its own.
                evaluation = (
                    carry.evaluation if reopens else self._looked_again(problem_of(state), state, carry, opening, moves)
                )
                finite = sound(evaluation.elbo) | self.solver.private
                finite = jnp.where(~counts if reopens else counts, finite, state.report.finite)
                report = state.report._replace(finite=finite)
                state, carry = (
                    dataclasses.replace(state, report=report),
                    carry._replace(evaluation=evaluation, report=report),
                )
            rule = carry.evaluation.rule
            state = dataclasses.replace(state, rule=rule if opening is None else select(opening, state.rule, rule))
            missed, loss = self._missed(carry, opening, fine), -carry.evaluation.elbo
            state, carry = self.tallied(state, carry, counts if missed is None else counts & ~missed, loss)
            return state, carry, loss, missed

        missed = jnp.array(False) if opens else first.missed & (not fine)
        carry = carry_of(self._bare(state), first)
        done, carry = run_rounds(state, carry, one, *how, missed=missed, opening=opening, reopens=reopens)
        return done._replace(evaluation=None if seen is None else carry.evaluation)

    def _first(
        self, problem: Any, state: PVIState, opens: bool, seen: tuple | None
    ) -> tuple[Evaluation, Bool[Array, ""] | None]:
        """The evaluation that rounds begin with, and whether it is still to do, in their own place; None where it never is."""
        if opens:
            evaluation, known = (self._blank(problem, state), jnp.array(False)) if seen is None else seen
            return evaluation._replace(rule=state.rule), ~known
        sites = self._bare(state).sites
        if self.schedule.streams:
            return problem.unread(sites, state.rule), None
        known = self.schedule.unvalued(problem, sites, state.rule)
        return self._evaluated(problem, state) if known is None else known, None

    def _step_params(
        self,
        problem: Any,
        state: PVIState,
        args: tuple,
        kwargs: dict,
        loss: Callable[[dict], Float[Array, ""]],
        prior: Callable[[dict], Any],
    ) -> PVIState:
        """A state after one optimiser step on the model's params at its q held fixed (PVI eq. 5), then the prior re-read."""
        optim_state, params, gains = self.moved_params(loss, state.optim_state, args, kwargs)
        noisy = bool(problem.noisy or problem.stochastic or problem.blind)
        report = with_params(state.report, gains, noisy)
        return dataclasses.replace(state, optim_state=optim_state, prior=prior(params), report=report)

    def _moves(self, state: PVIState) -> bool:
        """Whether rounds move the model's params: only while all groups' rows are at hand, as sites say nothing of them."""
        return bool(state.plan.partition.params) and state.sites.others is None

    def tallied(
        self, state: PVIState, carry: RoundCarry, ends: Bool[Array, ""], loss: Float[Array, ""]
    ) -> tuple[PVIState, RoundCarry]:
        """State and carry after a round whose report tells what was sent in it: nothing, where nobody is asked.

        ``state``: after the round; ``carry``: likewise; ``ends``: whether the round is kept; what was sent in one that is not
        counts for the next; ``loss``: what was asked for last.
        """
        return state, carry

    # ------------------------------------------------------------------------------------ what engines have of their own

    def _state_problem(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Any:
        """The factors of a state; the sites of groups whose rows are not at hand count as a prior."""
        raise NotImplementedError

    def _evaluated(self, problem: Any, state: PVIState) -> Evaluation:
        """A state's q evaluated."""
        raise NotImplementedError

    def _blank(self, problem: Any, state: PVIState) -> Evaluation:
        """An evaluation of the right shapes, and the state's rule."""
        raise NotImplementedError

    def _round(self, problem: Any, state: PVIState, carry: RoundCarry) -> tuple[PVIState, RoundCarry]:
        """State and carry after the schedule's round."""
        raise NotImplementedError

    def _objective(
        self, problem: Any, state: PVIState, carry: RoundCarry, args: tuple, kwargs: dict, fine: bool
    ) -> tuple[Callable[[dict], Float[Array, ""]], Callable[[dict], Any]]:
        """After a round, with q held fixed: the negative ELBO in nats at values of the params, and the exactly held prior there."""
        raise NotImplementedError

    def _ends_evaluating(self, problem: Any, state: PVIState, moves: bool) -> bool:
        """Whether a round ends with an evaluation of its own: on fresh draws for the next one, or under new params."""
        raise NotImplementedError

    def _ruled(self, state: PVIState, fine: bool) -> PVIState:
        """A state that says which quadrature rules are compiled in, where states do."""
        return state

    def _seen(self, problem: Any, state: PVIState, continued: bool) -> Any:
        """A state's factors as schedules see them; ``continued``: whether there are sites of groups whose rows are not at hand."""
        return problem

    def _bare(self, state: PVIState) -> PVIState:
        """A state as schedules have it."""
        return state

    def _looks_afresh(self, problem: Any, moves: bool) -> bool:
        """Whether an evaluation that ends a round takes nothing of the round's own."""
        return True

    def _looked_again(self, problem: Any, state: PVIState, carry: RoundCarry, opening: Any, moves: bool) -> Evaluation:
        """The evaluation that ends a round, of the state after it; while ``opening``, of the state's own q to the letter."""
        return self._evaluated(problem, state)

    def _reopens(self, problem: Any, moves: bool) -> bool:
        """Whether that evaluation is made by a round of its own that opens, so that it is compiled once."""
        return False

    def _missed(self, carry: RoundCarry, opening: Any, fine: bool) -> Bool[Array, ""] | None:
        """Whether a round needs the finest quadrature rule, and is not to be; None where no single round tells."""
        return None

    def _checked(self, done: RoundsDone, given: PVIState, args: tuple, kwargs: dict, fine: bool) -> RoundsDone:
        """Rounds that are done, from the state given, or that are not to be."""
        return done
