"""From a state through rounds, where q is a product of families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compiling import Bounds, look, owned_jit
from .._state import PVIState
from ..expectations import TOLERANCE
from ..factors import ValueCall, prior_log_density, take_rows
from ..families import Family, ProductFamily, ProductNatural, member_family
from ..schedules import (
    Evaluation,
    RoundCarry,
    Schedule,
    empty_report,
    sound,
)
from ..sites import MemberSites, OwnMembers, SiteStack, posterior, select, sum_slots, take
from ..solvers import LocalSolver
from ._base import Runtime
from ._engine import furthest_apart
from ._moments import solver_of_prior
from ._product_batches import visit_family
from ._product_factors import BatchFactors, OwnFactors, ProductFactors
from ._product_matching import (
    first_match_states,
    first_rows,
    marginal_elbo,
    product_evidence,
)
from ._product_plan import exact_prior_of, owners, prior_members
from ._product_problem import ProductProblem
from ._product_rounds import (
    Beside,
    shared_of,
)
from ._refinement import LOOSE_MOVE, LOOSE_TOLERANCE
from ._rounds import RoundEngine, RoundsDone, carry_of, moved_by, present_alone, run_rounds, unevaluated
from ._verification import Check, product_claims, q_of, verify_product


class LookedAtLess(NamedTuple):
    """A schedule's memory, where rounds know of no loss."""

    schedule: Any
    # What remains of the rounds after which losses are due.
    loss_from: Int[Array, ""]


# What is folded into a state's key for the draws of its loss and of its next round.
_DRAWS = 0x9E37


@dataclasses.dataclass(frozen=True)
class ProductEngine(RoundEngine):
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

    # Visits add up what devices find in their own rows of a group.
    whole_groups = False
    # Their special functions are long chains of arithmetic, which cost more to compile than rounds of a few hundred rows gain:
    # of a zero-inflated Poisson regression 3.9 s, 7.6 at the next level and 12.7 at the fullest, and rounds of 60 rows then take
    # 23, 11 and 12 ms; of a gamma times affine predictors 2.1, 4.5 and 9.8 s, and rounds 25, 9 and 10 ms. Of 5,000 rows the
    # fullest is a quarter faster than the next.
    levels = Bounds(1 << 15, 1 << 20)

    def reporting(self, loss_every: int) -> ProductEngine:
        """The engine of a run that reports losses now and then: where rounds see some rows only, others are not computed."""
        return self if loss_every == self.loss_every else dataclasses.replace(self, loss_every=int(loss_every))

    def counted(self, state: PVIState, loss_every: int) -> PVIState:
        """The state that such a run begins with, given by the user: it counts rounds from there, without compiling anew."""
        memory = state.schedule_state
        if loss_every == 1 or not self.reads_some:
            return state
        memory = memory._replace(loss_from=jnp.int32(state.step % loss_every))
        return dataclasses.replace(state, schedule_state=memory)

    @property
    def for_evidence(self) -> ProductEngine:
        """The engine on whose draws the ELBO is an estimate of the evidence: its own, which every round has anew."""
        return self

    @property
    def in_turns(self) -> bool:
        """Whether components move in the plan's turns."""
        return self.schedule.fuses(self.solver)

    @property
    def by_batches(self) -> bool:
        """Whether groups step together by batches of their rows."""
        return self.in_turns and self.solver.stochastic

    def visits_own(self, plan: Any) -> bool:
        """Whether groups are visited alone while their rows have latents of their own."""
        return bool(plan.inside) and not self.in_turns

    @property
    def reads_some(self) -> bool:
        """Whether rounds look at some of the rows only, and know of no loss."""
        return self.in_turns and (self.schedule.partial or self.solver.stochastic)

    def call(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ValueCall:
        """The model with all rows, at the state's params or at others."""
        if params is None:
            params = self.constrain(state.plan, args, kwargs, state.optim_state)
        return ValueCall(state.plan.partition.model(self.model), args, kwargs, params=params)

    def problem(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ProductProblem:
        """The factors of a state.

        ``state``: a state; ``args``: positional arguments (arrays); ``kwargs``: keyword arguments; ``params``: constrained
        values of the model's params; the state's own by default. Returns the factors; the sites of groups whose rows are not at
        hand count as a prior.
        """
        plan: Any = state.plan
        runtime, others = self.runtime_of(state.packing), state.sites.others
        kind, prior = (
            (ProductProblem, state.prior) if others is None else (Beside, state.prior.combine(sum_slots(others)))
        )
        return kind(plan, self.call(state, args, kwargs, params), state.packing, prior, self.num_draws, runtime)

    @property
    def num_draws(self) -> int:
        """Draws of a latent that is drawn."""
        return max(int(self.solver.num_draws), self.num_particles)

    def factors(self, problem: ProductProblem, *beside: Any) -> ProductFactors:
        """The factors as schedules see them; what follows the problem is as of :class:`ProductFactors` after its solver."""
        return ProductFactors(problem, self.solver, *beside)

    def prior_gap(self, plan: Any, packing: Any, args: tuple, kwargs: dict, optim_state: Any, at: Any) -> Any:
        """See :meth:`numpyro_pvi.runtime.Engine.prior_gap`; ``at`` are natural parameters, where other latents are looked at."""
        params = self.constrain(plan, args, kwargs, optim_state)
        whole = ValueCall(plan.partition.model(self.model), args, kwargs, params=params)
        values, reading, chunk = (
            plan.family.sample(at, jax.random.key(0)),
            plan.partition.reading,
            take(packing.chunks, 0),
        )
        few = whole.rows(reading, chunk), take_rows(values, plan.row_axes, reading, chunk)

        return furthest_apart(self.prior_numbers(plan, whole, values), self.prior_numbers(plan, *few))

    def prior_numbers(self, plan: Any, call: ValueCall, values: dict) -> list[Array]:
        """What tells one prior from another, at values of all components: see :meth:`numpyro_pvi.runtime.Engine.prior_numbers`."""
        held = prior_members(call, plan.family, plan.blocks, values)
        own = prior_log_density(call, plan.latent_values(values), plan.partition.rows, plan.exact_latents)
        return jax.tree.leaves(({n: x for n, x in held.items() if n in plan.exact}, own))

    def told_prior(self, plan: Any, args: tuple, kwargs: dict, at: tuple) -> tuple[Array, ...]:
        """The same of a model without params; ``at`` are leaves of natural parameters, from which values are drawn."""
        natural = jax.tree.unflatten(jax.tree.structure(plan.family.zeros()), at)
        call = ValueCall(plan.partition.model(self.model), args, kwargs, params={})
        return tuple(self.prior_numbers(plan, call, plan.family.sample(natural, jax.random.key(0))))

    def claims(self, plan: Any) -> tuple[str, ...]:
        """What a plan claims of the model: see :func:`numpyro_pvi.runtime._verification.product_claims`."""
        return () if self.solver.private else product_claims(plan)

    def verify(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
        """The claims beside the model: see :func:`numpyro_pvi.runtime._verification.verify_product`."""
        problem = self.problem(state, args, kwargs)
        return verify_product(problem, state, q_of(problem, state))

    @property
    def reads_sizes(self) -> bool:
        """Whether compiled rounds depend on the groups' sizes: room is made for the largest ones."""
        return self.schedule.partial or self.solver.stochastic

    def unvisited(
        self, state: PVIState, dtype: Any, known: Any = None, args: tuple = (), kwargs: dict | None = None
    ) -> dict[str, Any]:
        """Solver and schedule states, and the report, of groups that no round has visited yet.

        ``state``: with their plan, packing and sites; its own such states are not looked at; ``dtype``: floating dtype;
        ``known``: Bool[M], which of the groups had a site before their rows came back; None when none had; ``args``: the
        model's positional arguments, where they are at hand; ``kwargs``: its keyword arguments. Returns fields of a
        :class:`PVIState`.
        """
        plan: Any = state.plan
        count, solver, prior_solver = len(plan.partition.table.labels), (), None
        problem = self.problem(state, args, kwargs or {}, params={})
        sites = state.sites
        if plan.tilted:
            solver, prior_solver = first_match_states(problem, self.solver, dtype)
            solver = self.solver.init_groups(ProductFactors(problem, self.solver, known), solver)
            if self.solver.factors == "row":
                sites = dataclasses.replace(sites, local=first_rows(problem, self.solver, dtype)[1])
        elif not (self.in_turns or self.solver.matches_moments):
            one = self.solver.init_among(visit_family(problem), dtype, count)
            solver = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), one)
            has_prior = state.sites.prior is not None
            prior_solver = solver_of_prior(self.solver).init(plan.family, dtype) if has_prior else None
        others = state.sites.others is not None
        factors = ProductFactors(problem, self.solver, known, others, self.in_turns)
        memory: Any = look(lambda sites: self.schedule.init(self._as_seen(factors, sites), dtype), sites)
        if self.reads_some:
            memory = LookedAtLess(memory, jnp.int32(0))
        return {
            "sites": sites,
            "solver_state": solver,
            "prior_solver_state": prior_solver,
            "schedule_state": memory,
            "report": empty_report(count + (state.sites.prior is not None), dtype),
        }

    def _as_seen(self, factors: ProductFactors, sites: SiteStack) -> ProductFactors:
        """The factors as the schedule's rounds see them."""
        if self.visits_own(factors.problem.plan):
            return OwnFactors.of_all(factors, sites)
        return BatchFactors.of_all(factors, sites.prior) if self.by_batches else factors

    def _bare(self, state: PVIState) -> PVIState:
        """A state as rounds have it: by batches, what rows have of their own is the solver's memory, and no site.

        In visits of single groups it is what groups hold beside their sites.
        """
        if self.reads_some:
            state = dataclasses.replace(state, schedule_state=state.schedule_state.schedule)
        sites, plan = state.sites, cast(Any, state.plan)
        if not (self.by_batches or self.visits_own(plan)):
            return state
        prior, local = None if sites.prior is None else shared_of(plan, sites.prior), cast(Any, sites.local)
        if self.by_batches:
            return dataclasses.replace(state, sites=SiteStack(sites.groups, prior), solver_state=local)
        return dataclasses.replace(state, sites=SiteStack(sites.groups, prior, OwnMembers(local.parts)))

    def _whole(self, state: PVIState, before: PVIState) -> PVIState:
        """The state of rounds with what they do not see of it."""
        if self.reads_some:
            memory = before.schedule_state._replace(schedule=state.schedule_state)
            state = dataclasses.replace(state, schedule_state=memory)
        if not (self.by_batches or self.visits_own(state.plan)):
            return state
        prior, local = state.sites.prior, cast(Any, state.sites.local)
        if prior is not None:
            prior = ProductNatural(before.sites.prior.parts | prior.parts)
        if self.by_batches:
            sites = SiteStack(state.sites.groups, prior, state.solver_state)
            return dataclasses.replace(state, sites=sites, solver_state=before.solver_state)
        return dataclasses.replace(state, sites=SiteStack(state.sites.groups, prior, MemberSites(local.parts)))

    def noise(self, rng_key: Any) -> Any:
        """Key of the draws that belong to a state: its loss and its next round share them."""
        return jax.random.fold_in(rng_key, _DRAWS)

    def _ruled(self, state: PVIState, fine: bool) -> PVIState:
        """See :meth:`RoundEngine._ruled`."""
        return with_rules(state, fine)

    def _checked(self, done: RoundsDone, given: PVIState, args: tuple, kwargs: dict, fine: bool) -> RoundsDone:
        """See :meth:`RoundEngine._checked`: without the finest rule, rounds that end where predictors ask for it are not done."""
        if not fine and _over_predictors(given.plan) and not self.solver.private:
            moving = done.state.report.total_move > LOOSE_MOVE
            missed = self._misses(done.state, args, kwargs, moving)
            back = select(missed, with_rules(given, fine), done.state)
            done = done._replace(state=back, done=jnp.where(missed, 0, done.done), missed=missed)
        return done._replace(state=dataclasses.replace(done.state, plan=given.plan))

    def _state_problem(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> ProductProblem:
        """See :meth:`RoundEngine._state_problem`."""
        return self.problem(state, args, kwargs)

    def _ends_evaluating(self, problem: ProductFactors, state: PVIState, moves: bool) -> bool:
        """See :meth:`RoundEngine._ends_evaluating`."""
        plan: Any = state.plan
        return not self.reads_some and (moves or plan.noisy)

    def _opens(self, problem: ProductFactors, ends_evaluating: bool) -> bool:
        """See :meth:`RoundEngine._opens`; visits of single groups read their rows."""
        return super()._opens(problem, ends_evaluating) and (ends_evaluating or self.in_turns)

    def _reopens(self, problem: ProductFactors, moves: bool) -> bool:
        """See :meth:`RoundEngine._reopens`."""
        # Steps of params are no part of a look, and clients would be asked for more than it needs.
        return not (moves or self.of_clients) and self.in_turns and self.schedule.opens(problem)

    def _seen(self, problem: ProductProblem, state: PVIState, continued: bool) -> ProductFactors:
        """See :meth:`RoundEngine._seen`."""
        beside = state.sites if self.in_turns else None
        return self._as_seen(self.factors(problem, None, continued, self.in_turns, beside), state.sites)

    def _evaluated(self, problem: ProductFactors, state: PVIState) -> Evaluation:
        """See :meth:`RoundEngine._evaluated`."""
        return problem.evaluate(self._bare(state).sites, state.rule, self.noise(state.rng_key))

    def _blank(self, problem: ProductFactors, state: PVIState) -> Evaluation:
        """See :meth:`RoundEngine._blank`."""
        return unevaluated(problem, self._bare(state).sites, state.rule, lambda: self._evaluated(problem, state))

    def _misses(self, state: PVIState, args: tuple, kwargs: dict, moving: Any) -> Bool[Array, ""]:
        """Whether quadrature over predictors misses its tolerance at a state; a looser one while q still moves."""
        error = self.problem(state, args, kwargs).quadrature_error(
            present_alone(state).sites, self.noise(state.rng_key)
        )
        return error > jnp.where(moving, LOOSE_TOLERANCE, TOLERANCE[error.dtype.name])

    def _round(self, problem: ProductFactors, state: PVIState, carry: RoundCarry) -> tuple[PVIState, RoundCarry]:
        """See :meth:`RoundEngine._round`."""
        done, carry = moved_by(self.schedule, problem, self._bare(state), carry, self.noise(state.rng_key))
        return self._whole(done, state), carry

    def _loop(self, state, problem_of, moved, how: tuple, fine: bool, moves: bool, seen: tuple | None) -> RoundsDone:
        """See :meth:`RoundEngine._loop`."""
        if self.reads_some:
            return self._rounds_of_some(state, problem_of, moved, how)
        return super()._loop(state, problem_of, moved, how, fine, moves, seen)

    def _rounds_of_some(self, state: PVIState, problem_of: Callable, moved: Callable, how: tuple) -> RoundsDone:
        """Rounds that look at some rows only, and know of no loss but where it is due; arguments as of :meth:`_loop`."""

        def one(state: PVIState, _carry: None, _opening: None) -> tuple[PVIState, None, Array, None]:
            # Nothing of a look at some rows is of use to the next round, and a part of some groups is looked at as such.
            in_parts = self.in_turns and self.schedule.partial
            evaluation = None if in_parts else self._evaluated(problem_of(state), state)
            state, carry = moved(state, carry_of(self._bare(state), evaluation))
            loss, finite = self._loss_when_due(state, lambda: -self._elbo(problem_of(state).problem, state))
            state = _with_report(state, finite=finite)
            state, _ = self.tallied(state, carry._replace(report=state.report), jnp.array(True), loss)
            return state, None, loss, None

        return run_rounds(state, None, one, *how)[0]

    def _loss_when_due(
        self, state: PVIState, loss: Callable[[], Float[Array, ""]]
    ) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """The loss of all rows where somebody asks for it, else NaN; and whether it is a number, or nobody has looked."""
        due = (state.step - state.schedule_state.loss_from) % self.loss_every == 0
        nobody = jnp.full((), jnp.nan, state.report.move.dtype)
        found = loss() if self.loss_every == 1 else jax.lax.cond(due, loss, lambda: nobody)
        return found, sound(found) | ~due

    def _objective(
        self, problem: ProductFactors, state: PVIState, carry: RoundCarry, args: tuple, kwargs: dict, fine: bool
    ) -> tuple[Callable[[dict], Float[Array, ""]], Callable[[dict], Any]]:
        """See :meth:`RoundEngine._objective`."""
        noise, q, plan = self.noise(state.rng_key), posterior(state.prior, state.sites), cast(Any, state.plan)

        def at(params: dict) -> ProductProblem:
            found = self.problem(state, args, kwargs, params)
            return dataclasses.replace(found, prior=exact_prior_of(found, q))

        def loss(params: dict) -> Float[Array, ""]:
            if plan.tilted and plan.inside:
                return -marginal_elbo(at(params), state.sites, self.solver, noise, q)
            return -at(params).elbo(state.sites, noise, q)

        return loss, lambda params: at(params).prior

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state in nats, and whether predictors asked for a finer rule than was compiled in."""
        state = with_rules(state, fine)
        sure = fine or not _over_predictors(state.plan)
        missed = jnp.array(False) if sure else self._misses(state, args, kwargs, False)
        return -self.elbo(state, args, kwargs), missed

    def elbo(self, state: PVIState, args: tuple, kwargs: dict) -> Float[Array, ""]:
        """The global ELBO at a state in nats, on the draws that belong to it."""
        return self._elbo(self.problem(state, args, kwargs), present_alone(state))

    def _elbo(self, problem: ProductProblem, state: PVIState) -> Float[Array, ""]:
        return problem.elbo(state.sites, self.noise(state.rng_key))

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Any, Any, Any]:
        """Power EP's log evidence at a state and its Monte Carlo standard error (nats); no finer rule is ever needed."""
        key = self.noise(jax.random.fold_in(state.rng_key, 1))
        states = state.solver_state, state.prior_solver_state
        return product_evidence(self.problem(state, args, kwargs), state.sites, states, self.solver, key)

    def cavities_proper(self, state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, "*slots"], Bool[Array, ""]]:
        """Whether q without each group's site, each absent group's, and the prior factor's, is normalisable."""
        return _cavities_proper(state=state, level="cheap")


def _over_predictors(plan: Any) -> bool:
    """Whether some factor's expectation is taken by quadrature over predictors."""
    return any(factor is not None and bool(factor.terms) for factor in (plan.likelihood, plan.prior_factor))


def with_rules(state: PVIState, fine: bool) -> PVIState:
    """A state in whose programs the finest quadrature rule is compiled in, or is not."""
    return dataclasses.replace(state, plan=dataclasses.replace(state.plan, fine=fine))


def _with_report(state: PVIState, **fields: Any) -> PVIState:
    """A state whose report says something else."""
    return dataclasses.replace(state, report=state.report._replace(**fields))


def _proper_without(state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, "*slots"], Bool[Array, ""]]:
    q, sites, family = posterior(state.prior, state.sites), state.sites, state.plan.family
    others = jnp.array(True) if sites.others is None else _without_each(family, q, sites.others)
    prior = jnp.array(True) if sites.prior is None else family.in_domain(q - sites.prior)
    return _without_groups(state, q), others, prior


_cavities_proper = owned_jit(_proper_without, ())


def _without_each(family: ProductFamily, q: Any, stack: Any) -> Bool[Array, "*K"]:
    """Whether the shared components of q without each site of a stack are normalisable."""
    families, found = dict(family.components), jnp.array(True)
    for name, site in stack.parts.items():
        found = found & jax.vmap(lambda own, name=name: families[name].in_domain(q.parts[name] - own))(site)
    return found


def _without_groups(state: PVIState, q: Any) -> Bool[Array, "M"]:
    plan: Any = state.plan
    families, sites = dict(plan.family.components), state.sites
    count = len(plan.partition.table.labels)
    groups = jax.tree.map(lambda x: x / count, sites.groups) if plan.tied else sites.groups
    found = jnp.broadcast_to(_without_each(plan.family, q, groups), (count,))
    # Integrated out, rows' own latents are no part of a cavity.
    for name, site in () if sites.local is None or plan.tilted else sites.local.parts.items():
        whole = families[name].in_domain(q.parts[name])
        improper = ~proper_members(families[name], q.parts[name] - site)
        owner = owners(state.packing, improper.shape[plan.row_axes[name]], plan.row_key)
        found = found & whole & (plan.largest_by_group(name, improper, owner) == 0)
    return found


def proper_members(family: Family, natural: Any) -> Bool[Array, "*members"]:
    """Which members of a latent, one or more for every row, are normalisable. Returns one flag per member."""
    own, natural = member_family(family, natural)
    return own.in_domain(natural)
