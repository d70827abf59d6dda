"""From a state through rounds, where q is a product of families in the latents' own supports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compiling import owned_jit
from .._state import PVIState
from ..expectations import TOLERANCE
from ..factors import ValueCall
from ..families import Family, member_family
from ..schedules import RoundCarry, Schedule, empty_report, sound
from ..sites import posterior, select, sum_slots
from ..solvers import LocalSolver
from ._base import Runtime
from ._engine import RoundsDone
from ._mapping import Vmap
from ._moments import solver_of_prior
from ._params import FitsParams
from ._product_factors import ProductFactors
from ._product_loop import run_rounds, stepped
from ._product_matching import first_match_states, matching_round, product_evidence
from ._product_moment_choice import SAMPLED_WAYS
from ._product_plan import owners
from ._product_prior import exact_prior_of
from ._product_problem import Objective, ProductProblem
from ._product_rounds import ProductMemory, Settings, first_memory, one_round
from ._product_subset import first_partial_memory, is_partial, partial_rounds
from ._product_sweeps import MatchStates
from ._product_verification import product_claims, q_of, verify_product
from ._product_view import Beside
from ._rules import LOOSE_MOVE, LOOSE_TOLERANCE
from ._verification import Check

# What is folded into a state's key for the draws of its loss and of its next round.
_DRAWS = 0x9E37


@dataclasses.dataclass(frozen=True)
class ProductEngine(FitsParams):
    """Everything static about a fit except its plan; the counterpart of :class:`numpyro_pvi.runtime.Engine`.

    Args:
        model: the NumPyro model.
        solver: one that goes with families (:meth:`numpyro_pvi.solvers.LocalSolver.check_families`).
        schedule: likewise.
        runtime: where passes over rows run.
        num_particles: draws of the loss where it is Monte Carlo.
    """

    model: Callable
    solver: LocalSolver
    schedule: Schedule
    runtime: Runtime
    num_particles: int
    # NumPyro optimiser of the model's params, or None.
    optim: Any = None
    # Where rounds see some rows only, the ELBO of all is taken after every so many rounds from that one on.
    loss_every: int = 1

    def reporting(self, loss_every: int) -> ProductEngine:
        """The engine of a run that reports losses now and then: where rounds see some rows only, others are not computed."""
        return self if loss_every == self.loss_every else dataclasses.replace(self, loss_every=int(loss_every))

    def counted(self, state: PVIState, loss_every: int) -> PVIState:
        """The state that such a run begins with, given by the user: it counts rounds from there, without compiling anew."""
        memory = state.schedule_state
        if loss_every == 1 or getattr(memory, "loss_from", None) is None:
            return state
        memory = memory._replace(loss_from=jnp.int32(state.step % loss_every))
        return dataclasses.replace(state, schedule_state=memory)

    @property
    def settings(self) -> Settings:
        """What rounds take from the solver and the schedule."""
        schedule, solver = self.schedule, self.solver
        return Settings(
            sequential=schedule.in_turn,
            random=schedule.at_random,
            damping=1.0 if schedule.damping == "auto" else float(schedule.damping),
            step_size=float(solver.step_size),
            num_steps=int(solver.num_steps),
        )

    @property
    def fused(self) -> bool:
        """Whether rounds are this engine's own, by turns of components, and not the schedule's."""
        return self.schedule.fuses(self.solver)

    def call(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ValueCall:
        """The model with all rows, at the state's params or at others."""
        if params is None:
            params = self.constrain(state.plan, args, kwargs, state.optim_state)
        return ValueCall(state.plan.partition.model(self.model), args, kwargs, params=params)

    def problem(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ProductProblem:
        """The factors of a state.

        Args:
            state: a state.
            args: positional arguments (arrays).
            kwargs: keyword arguments.
            params: constrained values of the model's params; the state's own by default.

        Returns:
            The factors; the sites of groups whose rows are not at hand count as a prior.
        """
        plan: Any = state.plan
        draws = max(int(self.solver.num_draws), self.num_particles)
        together, others = isinstance(self.runtime, Vmap), state.sites.others
        kind, prior = (ProductProblem, state.prior) if others is None else (Beside, state.prior + sum_slots(others))
        return kind(plan, self.call(state, args, kwargs, params), state.packing, prior, draws, together)

    def claims(self, plan: Any) -> tuple[str, ...]:
        """What a plan claims of the model that is to be verified, as ``_product_verification.product_claims`` names it."""
        return product_claims(plan)

    def verify(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
        """The claims beside the model: see :func:`numpyro_pvi.runtime._product_verification.verify_product`."""
        problem = self.problem(state, args, kwargs)
        return verify_product(problem, state, q_of(problem, state))

    @property
    def reads_sizes(self) -> bool:
        """Whether compiled rounds depend on the groups' sizes: room is made for the largest ones."""
        return is_partial(self.solver, self.schedule)

    def first_memory(self, plan: Any, q: Any, dtype: Any) -> ProductMemory:
        """The schedule's memory before the first round."""
        return first_partial_memory(self.solver, self.schedule, q, plan.shared, first_memory(plan, q, dtype))

    def unvisited(
        self, state: PVIState, q: Any, dtype: Any, known: Any = None, args: tuple = (), kwargs: dict | None = None
    ) -> dict[str, Any]:
        """Solver and schedule states, and the report, of groups that no round has visited yet.

        Args:
            state: with their plan, packing and sites; its own such states are not looked at.
            q: natural parameters.
            dtype: floating dtype.
            known: Bool[M], which of the groups had a site before their rows came back; None when none had.
            args: the model's positional arguments, where they are at hand.
            kwargs: its keyword arguments.

        Returns:
            Fields of a :class:`PVIState`.
        """
        plan: Any = state.plan
        count, solver, prior_solver = len(plan.partition.table.labels), (), None
        problem = self.problem(state, args, kwargs or {}, params={})
        if plan.tilted:
            solver, prior_solver = first_match_states(problem, self.solver, dtype)
            solver = self.solver.init_groups(ProductFactors(problem, self.solver, known), solver)
        elif not (self.fused or self.solver.matches_moments):
            one = self.solver.init_among(plan.family, dtype, count)
            solver = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), one)
            has_prior = state.sites.prior is not None
            prior_solver = solver_of_prior(self.solver).init(plan.family, dtype) if has_prior else None
        if self.fused:
            memory: Any = self.first_memory(plan, q, dtype)
            if plan.tilted:
                # Moments may be drawn where expectations are not, and the other way round.
                sampled = not SAMPLED_WAYS.isdisjoint(plan.tilted)
                memory = memory._replace(last=jax.tree.map(jnp.zeros_like, state.prior) if sampled else None)
        else:
            others = state.sites.others is not None
            memory = self.schedule.init(ProductFactors(problem, self.solver, known, others), dtype)
        return {
            "solver_state": solver,
            "prior_solver_state": prior_solver,
            "schedule_state": memory,
            "report": empty_report(count + (state.sites.prior is not None), dtype),
        }

    def noise(self, rng_key: Any) -> Any:
        """Key of the draws that belong to a state: its loss and its next round share them."""
        return jax.random.fold_in(rng_key, _DRAWS)

    def rounds(
        self,
        state: PVIState,
        args: tuple,
        kwargs: dict,
        count: Int[Array, ""],
        tol: Float[Array, ""],
        length: int,
        fine: bool,
    ) -> RoundsDone:
        """Run up to ``count`` rounds in one compiled loop: see :meth:`numpyro_pvi.runtime.Engine.rounds`.

        Without the finest quadrature rule, rounds that end where predictors ask for it are not done.
        """
        plan, given = state.plan, with_rules(state, fine)
        done = self._rounds(given, args, kwargs, count, tol, length)
        if not fine and _over_predictors(plan):
            moving = done.state.report.total_move > LOOSE_MOVE
            missed = self._missed(done.state, args, kwargs, moving)
            back, ran = select(missed, given, done.state), jnp.where(missed, 0, done.done)
            done = done._replace(state=back, done=ran, missed=missed)
        return done._replace(state=dataclasses.replace(done.state, plan=plan))

    def _missed(self, state: PVIState, args: tuple, kwargs: dict, moving: Any) -> Bool[Array, ""]:
        """Whether quadrature over predictors misses its tolerance at a state; a looser one while q still moves."""
        error = self.problem(state, args, kwargs).quadrature_error(
            present_alone(state).sites, self.noise(state.rng_key)
        )
        return error > jnp.where(moving, LOOSE_TOLERANCE, TOLERANCE[error.dtype.name])

    def _rounds(
        self,
        state: PVIState,
        args: tuple,
        kwargs: dict,
        count: Int[Array, ""],
        tol: Float[Array, ""],
        length: int,
    ) -> RoundsDone:
        """Rounds by the rules that the state's plan has compiled in."""
        # Sites say nothing of params: they move only while all groups' rows are at hand.
        moves = bool(state.plan.partition.params) and state.sites.others is None
        fixed, state = self.problem(state, args, kwargs), present_alone(state)

        def with_params(state: PVIState) -> PVIState:
            return self._with_params(state, args, kwargs) if moves else state

        def factors(state: PVIState) -> ProductProblem:
            return self.problem(state, args, kwargs) if moves else fixed

        if not self.fused:
            return self._scheduled(state, factors, with_params, moves, count, tol, length)
        if is_partial(self.solver, self.schedule):
            return partial_rounds(self, state, factors, with_params, count, tol, length)
        settings = self.settings
        noisy, matches = fixed.plan.noisy, bool(fixed.plan.tilted)

        def one(state: PVIState, before: Objective) -> tuple[PVIState, Objective, Float[Array, ""]]:
            problem = factors(state)
            next_key, round_key = jax.random.split(state.rng_key)
            memory, noise = state.schedule_state, self.noise(state.rng_key)
            choices = memory, state.report, settings
            if matches:
                states = MatchStates(state.solver_state, state.prior_solver_state)
                given = state.sites, states, before, *choices, self.solver, round_key, noise
                done, states = matching_round(problem, *given)
                state = dataclasses.replace(state, solver_state=states.groups, prior_solver_state=states.prior)
            else:
                done = one_round(problem, state.sites, before, *choices, round_key, noise)
            state = with_params(stepped(state, next_key, done))
            # Fresh draws for the next round, or params that have moved, need a new evaluation.
            anew = noisy or moves
            found = factors(state).objective(state.sites, self.noise(next_key)) if anew else done.objective
            report = state.report._replace(finite=sound(found.elbo))
            return dataclasses.replace(state, report=report), found, -found.elbo

        first = fixed.objective(state.sites, self.noise(state.rng_key))
        return run_rounds(state, first, one, count, tol, length, self.solver)

    def _scheduled(
        self,
        state: PVIState,
        factors: Callable[[PVIState], ProductProblem],
        with_params: Callable[[PVIState], PVIState],
        anew: bool,
        count: Int[Array, ""],
        tol: Float[Array, ""],
        length: int,
    ) -> RoundsDone:
        """Rounds that are the schedule's own, of visits that are the solver's; ``anew``: each is followed by another evaluation."""
        continued = state.sites.others is not None

        def problem_of(state: PVIState) -> ProductFactors:
            return ProductFactors(factors(state), self.solver, None, continued)

        def looked_at(problem: ProductFactors, state: PVIState) -> Any:
            return problem.evaluate(state.sites, state.rule, self.noise(state.rng_key))

        def one(state: PVIState, carry: RoundCarry) -> tuple[PVIState, RoundCarry, Float[Array, ""]]:
            next_key, round_key = jax.random.split(state.rng_key)
            problem = problem_of(state)
            carry = self.schedule.round(problem, carry, round_key, self.noise(state.rng_key))
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
            state = with_params(state)
            if anew or problem.noisy:
                evaluation = looked_at(problem_of(state), state)
                report = carry.report._replace(finite=sound(evaluation.elbo))
                carry = carry._replace(evaluation=evaluation, report=report)
                state = dataclasses.replace(state, report=report)
            return state, carry, -carry.evaluation.elbo

        evaluation = looked_at(problem_of(state), state)
        memories = state.solver_state, state.prior_solver_state, state.schedule_state
        first = RoundCarry(state.sites, evaluation, *memories, state.report)
        return run_rounds(state, first, one, count, tol, length, self.solver)

    def _with_params(self, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
        """One optimiser step on the model's params at the round's q held fixed (PVI eq. 5), then the prior re-read."""
        plan: Any = state.plan
        noise, q = self.noise(state.rng_key), posterior(state.prior, state.sites)

        def loss(params: dict) -> Float[Array, ""]:
            own = dataclasses.replace(state, prior=exact_prior_of(plan, self.call(state, args, kwargs, params), q))
            return -self.problem(own, args, kwargs, params).objective(state.sites, noise, q=q).elbo

        optim_state, params = self.moved_params(loss, state.optim_state, args, kwargs)
        prior = exact_prior_of(plan, self.call(state, args, kwargs, params), q)
        return dataclasses.replace(state, optim_state=optim_state, prior=prior)

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state in nats, and whether predictors asked for a finer rule than was compiled in."""
        state = with_rules(state, fine)
        sure = fine or not _over_predictors(state.plan)
        missed = jnp.array(False) if sure else self._missed(state, args, kwargs, False)
        return -self.objective(state, args, kwargs).elbo, missed

    def objective(self, state: PVIState, args: tuple, kwargs: dict) -> Objective:
        """The global ELBO at a state, on the draws that belong to it."""
        problem = self.problem(state, args, kwargs)
        return problem.objective(present_alone(state).sites, self.noise(state.rng_key))

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Any, Any, Any]:
        """Power EP's log evidence at a state and its Monte Carlo standard error (nats); no finer rule is ever needed."""
        del fine
        key = self.noise(jax.random.fold_in(state.rng_key, 1))
        states = MatchStates(state.solver_state, state.prior_solver_state)
        return product_evidence(self.problem(state, args, kwargs), state.sites, states, self.solver, key)

    def cavities_proper(self, state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, ""]]:
        """Whether q without each group's site, and without the prior factor's, is normalisable."""
        return _cavities_proper(state=state, level="cheap")


def _over_predictors(plan: Any) -> bool:
    """Whether some factor's expectation is taken by quadrature over predictors."""
    return any(factor is not None and bool(factor.terms) for factor in (plan.likelihood, plan.prior_factor))


def with_rules(state: PVIState, fine: bool) -> PVIState:
    """A state in whose programs the finest quadrature rule is compiled in, or is not."""
    return dataclasses.replace(state, plan=dataclasses.replace(state.plan, fine=fine))


def _proper_without(state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, ""]]:
    q, family = posterior(state.prior, state.sites), state.plan.family
    groups = _without_groups(state, q)
    prior = jnp.array(True) if state.sites.prior is None else family.in_domain(q - state.sites.prior)
    return groups, prior


_cavities_proper = owned_jit(_proper_without, ())


def _without_groups(state: PVIState, q: Any) -> Bool[Array, "M"]:
    plan: Any = state.plan
    families, sites = dict(plan.family.components), state.sites
    count = len(plan.partition.table.labels)
    found = jnp.ones((count,), bool)
    groups = jax.tree.map(lambda x: x / count, sites.groups) if plan.tied else sites.groups
    for name, site in groups.parts.items():
        proper = jax.vmap(lambda own, name=name: families[name].in_domain(q.parts[name] - own))(site)
        found = found & proper
    for name, site in () if sites.local is None else sites.local.parts.items():
        whole = families[name].in_domain(q.parts[name])
        improper = ~proper_members(families[name], q.parts[name] - site)
        owner = owners(state.packing, improper.shape[plan.row_axes[name]], plan.row_key)
        found = found & whole & (plan.largest_by_group(name, improper, owner) == 0)
    return found


def present_alone(state: PVIState) -> PVIState:
    """A state without the sites of groups whose rows are not at hand, which the problem has for a prior."""
    if state.sites.others is None:
        return state
    return dataclasses.replace(state, sites=dataclasses.replace(state.sites, others=None))


def proper_members(family: Family, natural: Any) -> Bool[Array, "*members"]:
    """Which members of a latent, one or more for every row, are normalisable.

    Args:
        family: the latent's.
        natural: natural parameters of all members.

    Returns:
        One flag per member.
    """
    own, natural = member_family(family, natural)
    return own.in_domain(natural)
