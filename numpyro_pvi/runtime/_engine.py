"""From a plan and arrays to the factors of a model, and from a state through rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._compiling import Program
from .._state import Plan, PVIState
from ..expectations import FIXED_RULES, RULES, TOLERANCE, LocalLatentProgram, PointsProgram
from ..factors import (
    GroupMasks,
    ModelCall,
    Packing,
    exact_diagonal_prior,
    exact_log_constant,
    exact_prior,
    prior_factor_log_density,
    read_row_prior,
)
from ..schedules import (
    Evaluation,
    Points,
    RoundCarry,
    Schedule,
    empty_report,
)
from ..sites import SiteStack, posterior, select, sum_slots, take, tie, tied_site
from ..solvers import LocalSolver, NaturalGradient
from ._base import Runtime
from ._factors import Draws, FactorData
from ._local import BARRED_LEFT, LocalProblem
from ._moments import evidence, first_row_sites, moments_missed, solver_of_prior
from ._programs import FactorReader, RowStream, beside_rows, first_conditionals, whole_call
from ._refinement import LOOSE_MOVE, LOOSE_TOLERANCE, held_to, wide_rows
from ._rounds import RoundEngine, moved_by, present_alone, unevaluated
from ._row_problem import first_numbers, row_problem, rows_proper
from ._starts import Comparison, first_local_sites, first_sites, start_arrivals
from ._tilted import keeps_rows, most_chunks, refuse_rows, with_chains
from ._verification import Check, begin_again, claims_of, memories, verify_claims

# ------------------------------------------------------------------------------------------ sigma points or random ones
# Between rounds: sigma points or random ones, and an evaluation under the choice and on fresh draws.

# Posterior sds that q moves before sigma points are compared with draws again.
COMPARED_MOVE = 0.5
# Drop of q's mean log sd, or number of rounds, after which sigma points that failed are tried again; how many times as long a
# failed retry waits for the next.
RETRY_DROP, RETRY_ROUNDS, _LONGER = 0.2, 8, 4
# Refused rounds running, with more posterior sds left than is put up with, after which sigma points are given up.
BARRED_ROUNDS = 2


def settle(
    problem: LocalProblem,
    sites: SiteStack,
    evaluation: Evaluation,
    noise: Draws | None,
    moved: Float[Array, ""],
    stale: bool | Bool[Array, ""],
    again: bool | Bool[Array, ""] = False,
    barred: bool | Bool[Array, ""] = False,
) -> Evaluation:
    """Decide whether sigma points still serve, and evaluate q under the decision.

    Sigma points stay while a few random draws agree with them; the comparison is made whenever q has moved by half a posterior
    sd since the last one, and every eight rounds: what the points do not see, q may grow into until it stands still at an
    optimum of theirs. Once contradicted they give way to a product rule, where there is one, and that in the same way to draws, of
    which all three are tried again when q has become narrower, and every eight rounds; from then on draws have to confirm sigma
    points. ``evaluation``: an evaluation at these sites, or one of the right shapes when ``stale``;
    ``noise``: draws for this evaluation and the next round; ``moved``: how far q has moved since the last call, in posterior
    sds; ``stale``: whether the evaluation must be made afresh; known before the program runs where there is nothing to decide;
    ``again``: whether to repeat the last evaluation to the letter: its quadrature rule, and its choice of points; ``barred``:
    whether rounds stand still, which contradicts fixed points: their messages do not lead up their own values. Returns the
    evaluation; its rule carries the decision.
    """
    able = _of_programs(problem, lambda p: p.mode == "auto")
    old = evaluation.rule.points
    # Values alone say nothing of where points lead.
    values = problem.stochastic and problem.units is None
    if values or not (problem.can_switch and noise is not None):
        return problem.evaluate(sites, evaluation.rule, noise, again=again) if stale else evaluation
    spread = -0.5 * cast(Any, evaluation.moments).log_det_precision / problem.family.dim
    any_sampled = jnp.any(old.sampled)
    # Noise moves q for ever: where draws are in use, rounds count and not moves; and where groups have latents of their own, a
    # comparison being some looks at all rows. Looking again is no round.
    least = COMPARED_MOVE / RETRY_ROUNDS
    by_rounds = any_sampled | isinstance(problem.program, LocalLatentProgram)
    further = old.moved + jnp.where(by_rounds, least, jnp.maximum(moved, least))
    travelled = jnp.where(again, old.moved, further)
    due = travelled >= COMPARED_MOVE
    # Before the first evaluation there is no spread to go by.
    retry = old.sampled & ((spread < old.anchor - RETRY_DROP) | due) & cast(Any, evaluation.moments).valid
    # Rows that were fewer had a product rule: draws stand for it, until sigma points are tried anew.
    gone = old.finer & ~_refinable(problem)
    ask = able & ~(old.sampled & ~retry) & (due | retry) & ~gone
    barred = able & ~old.sampled & barred & ~jnp.asarray(again)
    wait = jnp.where(jnp.any(barred), (1 - _LONGER) * COMPARED_MOVE, jnp.where(due, 0.0, travelled))
    begins = _of_programs(problem, lambda p: p.begins_finer)
    refined = barred & _refinable(problem) & ~(old.finer | begins)
    points = Points(
        (old.sampled & ~retry) | gone | (barred & ~refined),
        jnp.where(barred & ~refined, spread, old.anchor),
        wait.astype(old.moved.dtype),
        # From sigma points on: where a product rule is no number, few points may well be some.
        (old.finer & ~retry & ~gone) | refined | begins,
    )
    anew = problem.sampled(evaluation.rule) | jnp.any(barred | gone) | stale
    return _settled(problem, sites, evaluation, noise, points, (ask & ~barred) | refined, anew, again)


def _refinable(problem: LocalProblem) -> Bool[Array, "2"]:
    """Whether a product rule may take the place of sigma points: of the likelihood, and of the prior factor."""
    return _of_programs(problem, lambda p: p.refinable)


def _of_programs(problem: LocalProblem, asked: Callable[[Any], bool]) -> Bool[Array, "2"]:
    """What the likelihood's program says, and the prior factor's; False where there is none."""
    return jnp.asarray([p is not None and asked(p) for p in (problem.program, problem.prior_program)])


def _settled(problem, sites, evaluation: Evaluation, noise, points: Points, ask, stale, again) -> Evaluation:
    # Finite once they have been contradicted.
    before = jnp.isfinite(points.anchor)
    refinable = _refinable(problem)

    def unfinished(state):
        _, ask, stale = state
        return jnp.any(ask) | stale

    def step(state):
        evaluation, ask, stale = state
        rule = evaluation.rule
        own = jnp.array(False)
        if isinstance(problem.program, LocalLatentProgram) and problem.program.mode == "auto":
            evaluation, own = problem.compared(sites, evaluation, noise, stale, ask[0], again)
        else:
            evaluation = jax.lax.cond(
                stale, lambda: problem.evaluate(sites, rule, noise, again=again), lambda: evaluation
            )
        found = evaluation.rule.points
        wrong = ask & jax.lax.cond(
            jnp.any(ask),
            lambda: _contradicted(problem, evaluation, noise, before, found.finer, own),
            lambda: jnp.zeros((2,), bool),
        )
        spread = -0.5 * evaluation.moments.log_det_precision / problem.family.dim
        # In the place of sigma points a product rule is asked first, and at once.
        refined = wrong & refinable & ~found.finer
        lost = wrong & ~refined
        wait = jnp.where(jnp.any(lost & before), (1 - _LONGER) * COMPARED_MOVE, found.moved)
        found = Points(
            found.sampled | lost,
            jnp.where(lost, spread, found.anchor),
            wait.astype(found.moved.dtype),
            found.finer | refined,
        )
        rule = evaluation.rule._replace(points=found)
        return evaluation._replace(rule=rule), refined, jnp.any(wrong)

    first = evaluation._replace(rule=evaluation.rule._replace(points=points))
    return jax.lax.while_loop(unfinished, step, (first, ask, jnp.asarray(stale)))[0]


def _contradicted(
    problem: LocalProblem, evaluation: Evaluation, noise: Draws, before: Any, finer: Any, own: Any
) -> Any:
    """Whether the points of the likelihood, and of the prior factor, are contradicted, or not confirmed again.

    ``before``: Bool[2], whether draws have done so before; ``finer``: Bool[2], whether the points are a product rule;
    ``own``: whether those for groups with latents of their own are contradicted.
    """
    return jnp.stack(
        [
            own | _likelihood(problem, evaluation, noise, before[0], finer[0]),
            _prior(problem, evaluation, noise, before[1], finer[1]),
        ]
    )


def _likelihood(problem: LocalProblem, evaluation: Evaluation, noise: Draws, before: Any, finer: Any) -> Any:
    program, moments = problem.program, evaluation.moments
    if not isinstance(program, PointsProgram):
        return jnp.array(False)
    pairs = partial(problem.pairs, moments)
    return program.contradicted(moments, sum_slots(evaluation.groups), noise.compared, pairs, before, finer)


def _prior(problem: LocalProblem, evaluation: Evaluation, noise: Draws, before: Any, finer: Any) -> Any:
    program, moments = problem.prior_program, evaluation.moments
    if not isinstance(program, PointsProgram) or evaluation.prior is None:
        return jnp.array(False)
    pairs = jax.vmap(lambda e: program.pair(problem.data.prior, moments, e))
    return program.contradicted(moments, evaluation.prior, noise.compared, pairs, before, finer)


# --------------------------------------------------------------------------------------------------------------- engine


def furthest_apart(one: list[Array], other: list[Array]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The largest difference of two lists of numbers, and the largest of the first (1 at least)."""
    gaps = [jnp.max(jnp.abs(a - b), initial=0.0) for a, b in zip(one, other, strict=True)]
    return jnp.max(jnp.stack(gaps)), jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=1.0) for x in one]))


# Seed of the draws on which losses under a stochastic solver are taken.
_LOSS_DRAWS = 0x9E37
# What is folded into a state's key for the draws of its evidence.
_EVIDENCE_DRAWS = 0x51ED


@dataclasses.dataclass(frozen=True)
class Engine(RoundEngine):
    """Everything static about a fit except its plan: the model and the independent choices.

    Args:
        model: the NumPyro model.
        solver: local solver.
        schedule: who moves when.
        runtime: where passes over rows run.
        optim: NumPyro optimiser of the model's ``numpyro.param`` sites, or None.
        num_particles: draws of the loss where it is Monte Carlo.
    """

    model: Callable
    solver: LocalSolver
    schedule: Schedule
    runtime: Runtime
    optim: Any
    num_particles: int

    @property
    def whole_groups(self) -> bool:
        """Whether a visit reads its group's rows again and again, so that all of them have to be on one device."""
        return not self.solver.immediate

    def reporting(self, loss_every: int) -> Engine:
        """The engine of a run that reports losses now and then: itself, since every round knows its own."""
        return self

    def counted(self, state: PVIState, loss_every: int) -> PVIState:
        """The state that such a run begins with, given by the user: as it is."""
        return state

    @property
    def for_evidence(self) -> Engine:
        """The engine on whose draws the ELBO is an estimate of the evidence: those of a natural gradient.

        A stochastic solver's own losses are on few draws that no round changes, so that rounds compare: a constant is between
        them and the ELBO, of either sign.
        """
        return dataclasses.replace(self, solver=NaturalGradient()) if self.solver.stochastic else self

    def problem(
        self,
        plan: Plan,
        packing: Packing | GroupMasks,
        args: tuple,
        kwargs: dict,
        params: dict,
        prior: Any,
        num_rules: int,
        others: Any = None,
        roughly: bool = False,
    ) -> LocalProblem:
        """Prepare every factor's arrays from the model's arguments.

        ``plan``: the static plan; ``packing``: rows of each chunk; ``args``: positional arguments (arrays); ``kwargs``: keyword
        arguments; ``params``: constrained values of the model's ``numpyro.param`` sites; ``prior``: ``(natural, exact mask)``
        of the exactly held prior, or None to read it off the model; ``num_rules``: how many quadrature rules are compiled in;
        ``others``: natural parameters of all sites of groups whose rows are not at hand, summed, or None; ``roughly``: whether no
        value of a factor will be asked for, which takes care. Returns the factors, ready to be evaluated.
        """
        part = plan.partition
        call = whole_call(self.model, part, args, kwargs, params)
        few, runtime = beside_rows(part, packing, call), self.runtime_of(packing)
        natural, exact = prior if prior is not None else self.held_prior(plan, few, packing)[:2]
        if plan.rows is not None:
            return row_problem(plan, call, natural, self.solver, packing, num_rules, runtime)
        reader = FactorReader(
            plan, call, packing, self.solver, runtime, self.num_particles, num_rules, natural, roughly
        )
        program, chunks, group, offsets = reader.likelihood()
        prior_program, prior_data = reader.prior_factor()
        partition = -exact_log_constant(few, part.exact)
        data = FactorData(chunks, group, offsets, prior_data, natural, exact, partition, others)
        quadratic = part.likelihood == "quadratic"
        units = None if part.local is None else (part.local.size, part.local.width)
        return LocalProblem(
            plan.family,
            self.solver,
            runtime,
            program,
            prior_program,
            quadratic,
            num_rules,
            data,
            units=units,
            rows=reader.group_rows(),
            labels=part.table.labels,
            stream=RowStream(part, call, packing, runtime, plan.padded_rows > 0),
            one_chunk_each=part.num_chunks == part.table.num_groups,
            most_chunks=most_chunks(part.table.sizes, packing),
            longest=max(part.table.sizes),
            chained=plan.chained,
            wide=wide_rows(plan, program, self.solver, packing, reader.chunk_of_rows),
        )

    def prior_gap(self, plan: Plan, packing: Packing, args: tuple, kwargs: dict, optim_state: Any, at: Any) -> Any:
        """How far the prior is another on the rows of one chunk than on all of them, at a point.

        ``plan``: the static plan; ``packing``: rows of each chunk; ``args``: positional arguments (arrays); ``kwargs``: keyword
        arguments; ``optim_state``: of the params, or None; ``at``: Float[D], where the prior is looked at. Returns the largest
        difference of its numbers, and the largest of them (1 at least).
        """
        part, loc = plan.partition, jnp.asarray(at, jnp.result_type(float))
        params = self.constrain(plan, args, kwargs, optim_state)
        whole = whole_call(self.model, part, args, kwargs, params)
        chunk = part.reading.call(whole, take(packing.chunks, 0))
        return furthest_apart(self.prior_numbers(plan, whole, loc), self.prior_numbers(plan, chunk, loc))

    def prior_numbers(self, plan: Plan, call: ModelCall, loc: Float[Array, "D"]) -> list[Array]:
        """What tells one prior from another: the exact part's natural parameters and constant, and the factor near a point.

        ``plan``: the static plan; ``call``: the model with its arguments; ``loc``: where the prior factor is looked at. Returns
        arrays, the same for all rows where the prior does not depend on them.
        """
        part = plan.partition
        found = jax.tree.leaves(self.exact_prior(plan, call)[0]), exact_log_constant(call, part.exact)
        if not part.has_prior_factor:
            return jax.tree.leaves(found)
        own = [prior_factor_log_density(call, loc + x, part.prior_latents, part.outside, part.rows) for x in (0, 0.5)]
        return jax.tree.leaves((found, own))

    def told_prior(self, plan: Plan, args: tuple, kwargs: dict, at: tuple) -> tuple[Array, ...]:
        """:meth:`prior_numbers` of a model without params; ``at`` are arrays that say where the prior factor is looked at."""
        return tuple(self.prior_numbers(plan, whole_call(self.model, plan.partition, args, kwargs, {}), *at))

    def exact_prior(self, plan: Plan, call: ModelCall) -> tuple[Any, Bool[Array, "D"], Bool[Array, ""]]:
        """Read the exactly held prior off the model.

        ``plan``: the static plan; ``call``: the model with its arguments. Returns ``(natural, exact, outside)``: its natural
        parameters, the coordinates it covers, and whether it is outside the family after all (correlated under a mean-field q).
        """
        part, dim, dtype = plan.partition, plan.family.dim, jnp.result_type(float)
        exact = jnp.zeros((dim,), bool)
        for name in part.exact:
            exact = exact.at[part.layout.slice_of(name)].set(True)
        if not part.exact:
            return plan.family.zeros((), dtype), exact, jnp.array(False)
        origin = jnp.zeros((dim,), dtype)
        if plan.family.full:
            return plan.family.natural(*exact_prior(call, part.exact, origin)), exact, jnp.array(False)
        vector, precision, coupled = exact_diagonal_prior(call, part.exact, origin)
        return plan.family.natural(vector, precision), exact, coupled

    def held_prior(
        self, plan: Plan, call: ModelCall, packing: Packing | GroupMasks
    ) -> tuple[Any, Bool[Array, "D"], Any]:
        """:meth:`exact_prior` as states hold it: where sites are two numbers per row, seen from the rows."""
        if plan.rows is None:
            return self.exact_prior(plan, call)
        seen = read_row_prior(call, plan.partition, packing, plan.rows == "latents")
        return seen, jnp.ones((plan.family.dim,), bool), jnp.array(False)

    def noise(self, problem: LocalProblem, rng_key: Any) -> Any:
        """The draws that belong to a state's key: the loss of a state and its next round share them.

        A stochastic solver draws for itself, and one evaluation a round is all that its rounds may cost: their losses
        are on the same draws throughout, so that they can be compared. Where groups have latents of their own these move by what an
        evaluation finds, and would end where its draws are best: draws are fresh then.
        """
        if self.solver.stochastic and problem.units is None:
            return problem.noise(jax.random.key(_LOSS_DRAWS), self.num_particles)
        return problem.noise(jax.random.fold_in(rng_key, 0x9E37), self.num_particles)

    def _evaluated(self, problem: LocalProblem, state: PVIState) -> Evaluation:
        """See :meth:`RoundEngine._evaluated`; where there is a choice of points, it is settled."""
        noise = self.noise(problem, state.rng_key)
        if self.solver.stochastic or noise is None or not problem.can_switch:
            # With no choice of points to settle, nothing has to be traced for its shapes alone.
            return problem.evaluate(state.sites, state.rule, noise, again=True)
        empty = self._blank(problem, state)
        still = jnp.zeros((), empty.elbo.dtype)
        return settle(problem, state.sites, empty, noise, still, stale=True, again=True)

    def _blank(self, problem: LocalProblem, state: PVIState) -> Evaluation:
        """See :meth:`RoundEngine._blank`."""
        noise = self.noise(problem, state.rng_key)
        given = state.sites, state.rule
        return unevaluated(problem, *given, lambda: problem.evaluate(*given, noise, again=True))

    def _ends_evaluating(self, problem: LocalProblem, state: PVIState, moves: bool) -> bool:
        """See :meth:`RoundEngine._ends_evaluating`."""
        settled = self.solver.stochastic and problem.units is None
        return (problem.redraws and not (settled or problem.blind)) or moves

    def _state_problem(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> LocalProblem:
        """See :meth:`RoundEngine._state_problem`."""
        params, others = self.constrain(state.plan, args, kwargs, state.optim_state), state.sites.others
        prior, num_rules = (state.prior, state.exact), len(RULES) - (not fine)
        others = None if others is None else sum_slots(others)
        return self.problem(state.plan, state.packing, args, kwargs, params, prior, num_rules, others)

    def _missed(self, carry: RoundCarry, opening: Any, fine: bool) -> Bool[Array, ""]:
        """See :meth:`RoundEngine._missed`."""
        missed = carry.evaluation.missed | moments_missed(carry)
        if opening is not None:
            missed = jnp.where(opening, carry.evaluation.missed, missed)
        return missed & (not fine)

    def _looks_afresh(self, problem: LocalProblem, moves: bool) -> bool:
        """See :meth:`RoundEngine._looks_afresh`."""
        return moves or not problem.can_switch

    def _looked_again(
        self, problem: LocalProblem, state: PVIState, carry: RoundCarry, opening: Any, moves: bool
    ) -> Evaluation:
        """See :meth:`RoundEngine._looked_again`; where there is a choice of points, it is settled."""
        afresh, report = self._looks_afresh(problem, moves), carry.report
        again, stale = (False, afresh) if opening is None else (opening, True if afresh else opening)
        barred = (report.refused >= BARRED_ROUNDS) & (report.left > BARRED_LEFT)
        how = {"stale": stale, "again": again, "barred": barred}
        travelled = jnp.where(again, 0.0, report.total_move)
        noise = self.noise(problem, state.rng_key)
        return settle(problem, state.sites, carry.evaluation, noise, travelled, **how)

    def _round(self, problem: LocalProblem, state: PVIState, carry: RoundCarry) -> tuple[PVIState, RoundCarry]:
        """See :meth:`RoundEngine._round`."""
        # Set before the round, so that a state's rule is the one its own evaluation (and the loss that went with it)
        # used.
        rule, dtype = carry.evaluation.rule, carry.evaluation.elbo.dtype
        settled = (carry.report.total_move < LOOSE_MOVE) | self.schedule.single_pass
        tolerance = jnp.where(settled, TOLERANCE[dtype.name], LOOSE_TOLERANCE).astype(dtype)
        rule = rule._replace(
            tolerance=tolerance if carry.opening is None else select(carry.opening, rule.tolerance, tolerance)
        )
        carry = carry._replace(evaluation=carry.evaluation._replace(rule=rule))
        return moved_by(self.schedule, problem, state, carry, self.noise(problem, state.rng_key))

    def _objective(
        self, problem: LocalProblem, state: PVIState, carry: RoundCarry, args: tuple, kwargs: dict, fine: bool
    ) -> tuple[Callable[[dict], Float[Array, ""]], Callable[[dict], Any]]:
        """See :meth:`RoundEngine._objective`."""
        moments = carry.evaluation.moments
        noise = self.noise(problem, state.rng_key)

        def at(params) -> Any:
            return self._at_params(state, args, kwargs, params, fine)

        def loss(params):
            # Each device differentiates what its own rows say, and all of them what is not of the rows.
            rows = at(problem.runtime.shared(params)).rows_elbo_at(
                moments, noise, carry.evaluation.rule, state.sites.local
            )
            return -rows - at(params).rest_elbo_at(moments, noise, carry.evaluation.rule)

        def prior(params):
            part = state.plan.partition
            call = beside_rows(part, state.packing, whole_call(self.model, part, args, kwargs, params))
            return self.exact_prior(state.plan, call)[0]

        return loss, prior

    def _at_params(self, state: PVIState, args: tuple, kwargs: dict, params: dict, fine: bool) -> Any:
        """The factors at other values of the params than a state's."""
        return self.problem(state.plan, state.packing, args, kwargs, params, None, len(RULES) - (not fine))

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state in nats, and whether rows asked for a finer quadrature rule than was compiled in."""
        problem = self._state_problem(state, args, kwargs, fine)
        state = dataclasses.replace(state, rule=held_to(state.rule))
        evaluation = self._evaluated(problem, present_alone(state))
        return -evaluation.elbo, evaluation.missed & (not fine)

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool):
        """Power EP's log evidence at a state, its Monte Carlo standard error (nats), and whether a finer rule is needed."""
        return self.evidence_at(self._state_problem(state, args, kwargs, fine), state)

    def evidence_at(self, problem: Any, state: PVIState, ask: Callable | None = None):
        """The same of factors that are at hand; ``ask`` as of :func:`numpyro_pvi.runtime._moments.evidence`."""
        key = jax.random.fold_in(state.rng_key, _EVIDENCE_DRAWS)
        memories = state.solver_state, state.prior_solver_state
        return evidence(problem, state.sites, state.rule, key, memories, ask)

    def start(self, plan: Plan, packing: Packing | GroupMasks, args, kwargs, optim_state, loc, sd, local, mode: str):
        """Arrays of a fresh state: prior, start of the sites, solver and schedule states.

        ``plan``: the static plan; ``packing``: rows of each chunk; ``args``: positional arguments (arrays); ``kwargs``: keyword
        arguments; ``optim_state``: optimiser state of the params, or None; ``loc``: Float[D] prior location; ``sd``: Float[D]
        prior sd; ``local``: the same of every unit's local latents, Float[U K] each, or None; ``mode``: where sites start:
        "prior", "curvature" or "auto". Returns the fields of a :class:`PVIState` that depend on arrays, whether the exact prior
        is outside the family, and whether q is normalisable.
        """
        params = self.constrain(plan, args, kwargs, optim_state)
        call = whole_call(self.model, plan.partition, args, kwargs, params)
        held, exact, outside = self.held_prior(plan, call, packing)
        by_numbers = plan.rows is not None and mode == "auto"
        num_rules = len(RULES if by_numbers else FIXED_RULES)
        # Of the first sites' factors nobody asks for the value.
        problem = self.problem(plan, packing, args, kwargs, params, (held, exact), num_rules, roughly=True)
        family, natural, base = problem.family, problem.prior_natural, None
        if problem.has_prior_factor:
            # The exactly held prior knows its location better than draws do.
            unit = family.from_loc_sd(jnp.where(exact, 0.0, loc), jnp.where(exact, 1.0, sd))
            base = jax.tree.map(lambda x: jnp.where(_outside(exact, x), x, 0.0), unit)
        moments = family.moments(natural if base is None else natural + base)
        point = moments.loc if problem.flat else jnp.where(moments.valid, moments.loc, loc)
        if keeps_rows(problem):
            refuse_rows(self.schedule)
            sites, rule = first_row_sites(problem, moments, point, mode)
        elif by_numbers:
            sites, rule = first_numbers(problem, moments)
        elif local is None:
            sites, rule = first_sites(problem, moments, point, mode, base)
        else:
            rows = first_conditionals(plan, packing, *local)
            sites, rule = first_local_sites(problem, moments, point, mode, rows)
        groups = tie(sites.groups) if problem.tied else sites.groups
        sites = dataclasses.replace(sites, groups=groups, prior=base)
        proper = family.in_domain(posterior(natural, sites))
        if isinstance(problem, LocalProblem):
            rule = problem.always_drawn(rule)
        fields = {"sites": sites, "prior": held, "exact": exact, "rule": rule, "step": jnp.int32(0)}
        return fields | self.unvisited(problem), outside, proper

    def arrive(
        self, state: PVIState, args: tuple, kwargs: dict, known: Bool[Array, "M"], mode: str
    ) -> tuple[dict[str, Any], Comparison]:
        """Fields of the state of groups that have come: see :func:`numpyro_pvi.runtime._starts.start_arrivals`."""
        return start_arrivals(self, state, args, kwargs, known, mode)

    def claims(self, plan: Plan) -> tuple[str, ...]:
        """What a plan claims of the model that is to be verified: see :func:`numpyro_pvi.runtime._verification.claims_of`."""
        return () if self.solver.private else claims_of(plan)

    def verify(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
        """The claims beside the model: see :func:`numpyro_pvi.runtime._verification.verify_claims`."""
        return verify_claims(self, state, args, kwargs)

    def begin_again(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Fields of a state with a new plan: see :func:`numpyro_pvi.runtime._verification.begin_again`."""
        return begin_again(self, state, args, kwargs)

    def memories(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Any]:
        """What solver and schedule begin with at a state: see :func:`numpyro_pvi.runtime._verification.memories`."""
        return memories(self, state, args, kwargs)

    def cavities_proper(self, state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, "*slots"], Bool[Array, ""]]:
        """Whether q without each group's site, each absent group's, and the prior factor's, is normalisable."""
        plan, count = state.plan, len(state.plan.partition.table.labels)
        if plan.rows is not None:
            return rows_proper(state.prior, state.sites, jnp.zeros(count)), jnp.array(True), jnp.array(True)
        return _cavities_proper(plan.family, state.prior, state.sites, count if plan.tied else None)

    def unvisited(self, problem: LocalProblem) -> dict[str, Any]:
        """Solver and schedule states, and the report, of groups that no round has visited yet.

        ``problem``: the factors. Returns fields of a :class:`PVIState`.
        """
        family, dtype = problem.family, problem.dtype
        one = self.solver.init_among(family, dtype, problem.num_groups)
        if problem.chained:
            one = with_chains(self.solver, one, family.dim, dtype)
        solver = jax.tree.map(lambda x: jnp.broadcast_to(x, (problem.num_groups, *x.shape)), one)
        solver = self.solver.init_groups(problem, solver)
        prior_solver = solver_of_prior(self.solver).init(family, dtype) if problem.has_prior_factor else None
        count = problem.num_groups + problem.has_prior_factor
        return {
            "solver_state": solver,
            "prior_solver_state": prior_solver,
            "schedule_state": self.schedule.init(problem, dtype),
            "report": empty_report(count, dtype),
        }


@partial(Program, static=("family", "tied"))
def _cavities_proper(family: Any, prior: Any, sites: SiteStack, tied: int | None) -> tuple[Any, Any, Any]:
    """See :meth:`Engine.cavities_proper`; ``tied`` is the number of groups that share one site, or None."""
    q = posterior(prior, sites)

    def without(stack: Any) -> Any:
        return family.in_domain(jax.tree.map(lambda a, b: a - b, q, stack))

    others = jnp.array(True) if sites.others is None else without(sites.others)
    if tied is None:
        own = without(sites.groups)
    else:
        own = jnp.full((tied,), family.in_domain(q - tied_site(sites.groups, tied)))
    return own, others, jnp.array(True) if sites.prior is None else family.in_domain(q - sites.prior)


def _outside(exact: Bool[Array, "D"], leaf: Array) -> Array:
    return ~exact if leaf.ndim == 1 else ~exact[:, None] & ~exact[None, :]
