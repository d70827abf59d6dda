"""PVI for guides whose latents keep their own supports: sites are terms of the product of the latents' families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import diagnostics
from ._arriving_groups import Newcomers
from ._closures import follows, with_prior_of_now
from ._compiling import look, on_device, owned_jit
from ._exponential_guide import AutoExponentialFamily
from ._exponential_plan import components_of, plan_product, product_prior_now, turns_of
from ._group_lifecycle import refuse_absent
from ._initial import away_from, init_optim, initial_params
from ._posterior_views import (
    agent_natural,
    chain_reading,
    factor_labels,
    last_round,
    limits,
    moment_notes,
    optim_notes,
    split_notes,
)
from ._state import Plan, PVIInfo, PVIState
from ._user_inputs import (
    check_state,
    float_dtype,
    open_call,
    positional_names,
    refuse_look,
    refuse_prior_of_rows,
)
from ._verified import Contradiction, cannot_go_on, remark
from .errors import GuideError, ImproperError, PVIError, StateError
from .expectations import with_draws
from .factors import (
    Arrival,
    Planned,
    ValueCall,
    abstract_trace,
    arrive,
    choose_chunk_rows,
    is_latent,
    join_arguments,
    pack_rows,
    plan_factors,
    proved_only,
    split_arguments,
    with_values_held,
)
from .families import ProductFamily, ProductNatural, base_family
from .guides import NOT_SET_UP, keeps_supports
from .handlers import GroupTable, Partition, RowAxes
from .pvi import PVI
from .runtime import (
    ProductEngine,
    ProductPlan,
    RowLatent,
    apart,
    best_of_short_runs,
    check_tilted,
    curvature_start,
    factors_of,
    first_weights,
    jointly_affine,
    product_claims,
    spread,
    with_tilted,
)
from .schedules import Points, Rule
from .sites import MemberSites, SiteStack, posterior

# ---------------------------------------------------------------------------------------- random groups and random rows
# Random groups and random rows under AutoExponentialFamily: what goes together, and in which order latents then move.


def blocks_of(solver: Any, inside: tuple[RowLatent, ...]) -> Any:
    """The order in which latents move: under mini-batches the rows' own first, since shared ones look at them.

    Args:
        solver: of the fit.
        inside: latents inside the partitioned plate.

    Returns:
        What :func:`turns_of` takes.
    """
    if solver.stochastic:
        return tuple(latent.name for latent in inside) or "auto"
    return solver.blocks


def check_partial(solver: Any, schedule: Any, plan: ProductPlan) -> None:
    """Refuse random groups and rows that do not fit the groups or the model.

    Args:
        solver: of the fit.
        schedule: of the fit.
        plan: of the fit.

    Raises:
        PVIError: naming the group, the latent or the argument.
    """
    if solver.matches_moments:
        check_tilted(plan, type(solver).__name__)
    if not schedule.fuses(solver) and plan.inside:
        instead = "" if solver.fused_families else "solver=NaturalGradient() and "
        raise PVIError(
            f"{type(schedule).__name__} with {type(solver).__name__} under AutoExponentialFamily is for models whose rows have no "
            f"latents of their own, and {plan.inside[0].name!r} is inside the partitioned plate: write {instead}"
            "schedule=Synchronous(), or integrate it out."
        )
    if solver.stochastic:
        table = plan.partition.table
        solver.check_groups(dict(zip(table.labels, table.sizes, strict=True)), plan.partition.reading.mechanism)


# ---------------------------------------------------------------------------------------------- groups that come and go
# Groups that come and go under AutoExponentialFamily: how their rows are packed, and where their sites start.


@dataclasses.dataclass(frozen=True)
class ProductNewcomers(Newcomers):
    """:class:`Newcomers` where q is a product of families. What factors are conjugate in is what ``init`` found."""

    def arrival(self, plan: Plan, table: GroupTable, rows: dict[str, int]) -> Arrival:
        """The same; batches of rows are taken from a packing without empty slots."""
        found = arrive(plan.partition, table, rows, False)
        if not (found.padded_rows and self.solver.stochastic):
            return found
        length = choose_chunk_rows(table.sizes)
        part = dataclasses.replace(found.plan, chunk_rows=length, num_chunks=-(-table.num_rows // length))
        return Arrival(part, pack_rows(table, length), 0)


def start_of(engine: ProductEngine, state: PVIState, known: Any) -> dict[str, Any]:
    """Fields of a state whose groups have come: a new group's site is 1, and the schedule begins anew.

    Args:
        engine: of the fit.
        state: with the plan, packing and sites of the rows that came.
        known: Bool[M], which groups have a site.

    Returns:
        Fields to replace.
    """
    last, dtype = state.report, state.report.move.dtype
    fields = engine.unvisited(state, posterior(state.prior, state.sites), dtype, known)
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    if bool(np.all(known)):
        # Sites that were fitted before are as settled as they were.
        report = report._replace(total_move=jnp.asarray(last.total_move))
    return fields | {"report": report}


def refuse_own_rows(state: PVIState, call: str) -> None:
    """Raise where groups cannot come or go: where q has members of their rows.

    Args:
        state: a state.
        call: the method that was called.

    Raises:
        PVIError: naming the latent and what to write.
    """
    plan: Any = state.plan
    if plan.inside:
        raise PVIError(
            f"{call} is not possible where latents are inside the partitioned plate under AutoExponentialFamily "
            f"({plan.inside[0].name!r}): q has members for the rows that init saw. Make a fit of the other rows, "
            "pvi.init(key, *args, init_params=...) with the shared latents' params of this one."
        )


# ------------------------------------------------------------------------------------------- local and discrete latents
# Latents inside the partitioned plate and discrete ones under AutoExponentialFamily: planned around, and begun apart.


def plan_beside(
    partition: Partition, family: ProductFamily, held: tuple[str, ...], args: tuple, kwargs: dict, key: Any
) -> Planned:
    """Plan how groups are read, with the discrete latents that q holds at one value.

    Args:
        partition: the model with its grouping.
        family: of q.
        held: the latents.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.
        key: a random key.

    Returns:
        The plan, in which those latents are no observations.
    """
    if partition.mode == "auto" and any(base_family(f).chained for _, f in family.components):
        # A chain has as many states as there are rows: looking up a chunk's states in it costs as much as all rows.
        partition = partition._copy(mode="mask")
    if not held:
        return plan_factors(partition, args, kwargs, key=key)
    assert partition.fn is not None  # PVI was given a model
    planned = plan_factors(partition._copy(fn=with_values_held(partition.fn, held)), args, kwargs, key=key)
    plan = dataclasses.replace(
        planned.plan,
        observed=tuple(n for n in planned.plan.observed if n not in held),
        outside=tuple(n for n in planned.plan.outside if n not in held),
    )
    return dataclasses.replace(planned, plan=plan)


def inside_of(trace: dict, rows: RowAxes, guide: AutoExponentialFamily) -> tuple[RowLatent, ...]:
    """The latents inside the partitioned plate.

    Args:
        trace: an abstract trace of the model.
        rows: the partitioned axes.
        guide: set up.

    Returns:
        The latents.

    Raises:
        GuideError: for a joint block with one of them, or where they are in several partitioned plates.
    """
    axes = {n: axis for n, s in trace.items() if is_latent(s) and (axis := rows.of(s)) is not None}
    blocked = [n for n in axes if n not in guide._latents]
    if blocked:
        raise GuideError(
            f"joint={[list(block.names) for block in guide._blocks]}: latent {blocked[0]!r} is inside the partitioned plate, one "
            "per row, and a Gaussian with full covariance would couple the rows: leave it out of the block."
        )
    if len({axis.key for axis in axes.values()}) > 1:
        raise GuideError(
            f"latents {', '.join(map(repr, axes))} are in several partitioned plates: keep those of one plate inside it, and "
            "declare the others outside, in plates of their own."
        )
    ranks = {n: len(trace[n]["fn"].batch_shape) for n in axes}
    return tuple(RowLatent(n, ranks[n] + axis.dim, guide._latents[n].family, axis.key) for n, axis in axes.items())


def begun(
    engine: ProductEngine, state: PVIState, start: ProductNatural, args: tuple, kwargs: dict, curved: bool
) -> PVIState:
    """Put q where its rounds begin: at the prior, but for what would stay there for ever, or for very long.

    Latents that are taken by quadrature begin at the curvature of the groups' factors. Where values are summed over, q
    begins where the best of a few short runs ends (not where moments are matched); else latents inside the partitioned plate
    begin half way to a draw each.

    Args:
        engine: of the fit.
        state: with sites at 1.
        start: the prior, or the members of the families nearest to it.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.
        curved: whether sites may begin at curvatures.

    Returns:
        The state.
    """
    plan: Any = state.plan
    by_predictors = plan.likelihood.by_predictors and not plan.inside
    if curved and (plan.likelihood.by_nodes or by_predictors) and not plan.summed:
        arrays, static = split_arguments(args, kwargs)

        def curvature(state: PVIState, arrays: list) -> Any:
            args, kwargs = join_arguments(arrays, static)
            return curvature_start(engine.problem(state, args, kwargs), state.sites, engine.noise(state.rng_key))

        return dataclasses.replace(state, sites=look(curvature, state, arrays))
    if engine.solver.matches_moments or engine.solver.private or (not plan.inside and not plan.summed):
        return state
    key = look(lambda key: jax.random.fold_in(key, 0), state.rng_key)
    weights = first_weights(plan, key) if plan.summed else None
    arrays, static = split_arguments(args, kwargs)

    def run(state: PVIState, start: Any, key: Any, weights: Any, arrays: list) -> Any:
        old = posterior(state.prior, state.sites)
        q = ProductNatural({n: start.parts[n] if n in plan.row_axes else x for n, x in old.parts.items()})
        if weights is None:
            q = apart(plan.family, tuple(plan.row_axes), q, key)
        else:
            args, kwargs = join_arguments(arrays, static)
            q = best_of_short_runs(engine.problem(state, args, kwargs), q, weights, engine.noise(state.rng_key))
        return spread(plan, state.sites, q - old)

    return dataclasses.replace(state, sites=look(run, state, start, key, weights, arrays))


# ------------------------------------------------------------------------------------------------------ matched moments
# PowerEP under AutoExponentialFamily: what is decided at init, and what a state says of its visits.

# How tilted moments are taken, in words.
_WORDS = {
    "exact": "closed form",
    "quadrature": "quadrature over the latents",
    "importance": "weighted draws",
    "laplace": "weighted draws of a Laplace approximation",
    "mcmc": "mcmc",
}


def expectation_of(solver: Any) -> str:
    """How a solver has the expectations of factors taken: as of :func:`numpyro_pvi.expectations.find_structure`."""
    if solver.matches_moments:
        return "values"
    return "exact" if solver.closed_form else solver.expectation


def ready_to_match(engine: ProductEngine, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
    """A first state with the ways to take tilted moments, where the solver matches them.

    Args:
        engine: of the fit.
        state: with a normalisable q.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.

    Returns:
        The state; as it is under solvers that match no moments.

    Raises:
        PVIError: for moments that do not fit a factor.
    """
    if not engine.solver.matches_moments:
        return state
    plan: Any = state.plan
    solver: Any = engine.solver
    arrays, static = split_arguments(args, kwargs)

    def affine(state: PVIState, arrays: list) -> Any:
        args, kwargs = join_arguments(arrays, static)
        problem = factors_of(engine.problem(state, args, kwargs), solver)
        return jointly_affine(problem, state.sites, engine.noise(state.rng_key))

    likelihood, prior = look(affine, state, arrays)
    plan = with_tilted(plan, solver, (bool(likelihood), bool(prior)))
    state = dataclasses.replace(state, plan=plan)
    fields = engine.unvisited(state, posterior(state.prior, state.sites), float_dtype(), None, args, kwargs)
    return dataclasses.replace(state, **fields | {"report": state.report})


def matching_info(state: PVIState) -> dict[str, Any]:
    """What the last visits found, as fields of :class:`numpyro_pvi.PVIInfo`.

    Args:
        state: of a fit that matches moments.

    Returns:
        Fields by name: ``ess``, ``expectation``, ``notes``, ``rhat`` and ``divergent``.
    """
    plan: Any = state.plan
    groups, prior = jax.device_get((state.solver_state, state.prior_solver_state))
    count = len(plan.partition.table.labels)
    ways = [(groups, _WORDS[plan.tilted[0]], count)]
    if prior is not None:
        ways.insert(0, (prior, _WORDS[plan.tilted[1]], 1))

    def read(of: Callable[[Any], Any]) -> np.ndarray:
        return np.concatenate([np.broadcast_to(of(one), size) for one, _, size in ways])

    def of_chains(name: str) -> np.ndarray:
        readings = {id(one): chain_reading(one, name) for one, *_ in ways}
        return read(lambda one: np.nan if readings[id(one)] is None else readings[id(one)])

    rhat, divergent = of_chains("rhat"), of_chains("divergent")
    words = [word for _, word, size in ways for _ in range(size)]
    return {
        "ess": read(lambda one: np.asarray(one.ess)),
        "expectation": tuple("mcmc" if x == x else word for x, word in zip(rhat, words, strict=True)),
        "notes": moment_notes(state),
        "rhat": rhat,
        "divergent": divergent,
    }


# ------------------------------------------------------------------------------------------------------------- privacy


def proved_plan(plan: ProductPlan, expectation: str) -> ProductPlan:
    """A plan for private visits, without structure that was seen in values of the rows and not proved.

    Args:
        plan: of the fit.
        expectation: how the solver has expectations taken.

    Returns:
        The plan; components of unproved roles are drawn.

    Raises:
        PVIError: for observations outside the partitioned plate, which are no group's; or a component that cannot be drawn.
    """
    part = proved_only(plan.partition)
    claims = [c.split("/", 1) for c in product_claims(plan)]
    names = [name for factor, name in claims if factor == "likelihood"]
    likelihood = plan.likelihood
    if names:
        likelihood = with_draws(likelihood, plan.family, names, expectation, "groups' likelihood")
    return dataclasses.replace(plan, partition=part, likelihood=likelihood)


# --------------------------------------------------------------------------------------------------- structure given up
# What a fit under AutoExponentialFamily does when the model contradicts its structure: components are drawn, q stays.


def demoted(pvi: Any, state: PVIState, found: list[Contradiction], dynamic: list, static: tuple) -> PVIState:
    """The state with the contradicted structure given up: see :func:`numpyro_pvi._verified.demoted`."""
    args, kwargs = join_arguments(dynamic, static)
    names: dict[str, list[str]] = {"likelihood": [], "prior factor": [], "prior": []}
    for one in found:
        factor, name = one.claim.split("/")
        names[factor].append(name)
    notes = tuple(_remark(state, one) for one in found)
    try:
        if names["prior"]:
            state = _with_prior_factor(pvi, state, names["prior"], args, kwargs)
        state = dataclasses.replace(state, plan=_drawn(pvi, state, names, notes))
    except PVIError as error:
        raise cannot_go_on(error, notes) from error
    return _begun_again(pvi, state, args, kwargs)


def _remark(state: PVIState, found: Contradiction) -> str:
    factor, name = found.claim.split("/")
    plan: Any = state.plan
    if factor == "prior":
        return remark(state, found, f"the prior of {name!r} was held exactly", "it is a factor of its own")
    structure = plan.likelihood if factor == "likelihood" else plan.prior_factor
    words = {"absent": "constant in", "predictors": "a function of one or two predictors of"}
    kind = words.get(next(role.kind for role in structure.roles if role.name == name), "conjugate in")
    if factor == "prior factor":
        return remark(state, found, f"the prior factor was taken as {kind} {name!r}", f"{name!r} is drawn")
    label = plan.partition.table.labels[found.factor]
    return remark(state, found, f"its likelihood was taken as {kind} {name!r}", f"{name!r} is drawn", label)


def _drawn(pvi: Any, state: PVIState, names: dict[str, list[str]], notes: tuple[str, ...]) -> ProductPlan:
    """The plan with contradicted components drawn."""
    plan: Any = state.plan
    expectation = expectation_of(pvi.solver)
    likelihood, prior_factor = plan.likelihood, plan.prior_factor
    if names["likelihood"]:
        likelihood = with_draws(likelihood, plan.family, names["likelihood"], expectation, "groups' likelihood")
    if names["prior factor"] and prior_factor is not None:
        prior_factor = with_draws(prior_factor, plan.family, names["prior factor"], expectation, "prior factor")
    part = dataclasses.replace(plan.partition, remarks=(*plan.partition.remarks, *notes))
    return dataclasses.replace(plan, partition=part, likelihood=likelihood, prior_factor=prior_factor, tilted=())


def _with_prior_factor(pvi: Any, state: PVIState, names: list[str], args: tuple, kwargs: dict) -> PVIState:
    """The same q, with the priors of some components in the PRIOR site; what the factor is conjugate in is found around q."""
    plan: Any = state.plan
    key, q = jax.random.fold_in(state.rng_key, 0xD1), posterior(state.prior, state.sites)
    trace = abstract_trace(pvi.model, key, args, kwargs)
    components = components_of(pvi.guide, {n: tuple(s["fn"].shape()) for n, s in trace.items() if is_latent(s)})
    components = dataclasses.replace(components, start=q)
    base = Plan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)})
    planned = Planned(plan.partition, state.packing, jnp.zeros(0), jnp.zeros(0), {})
    kept = {*names, *(n for n, _ in plan.family.components if n not in plan.exact)}
    given = expectation_of(pvi.solver), plan.turns, plan.inside, key, kept
    call = pvi._engine.call(state, args, kwargs)
    new, _, _ = plan_product(planned, components, call, base, *given, away=away_from(pvi.guide, call.params, key))
    # What was found of the groups before stands, with what was already given up of it.
    proved = new.partition.proved & plan.partition.proved
    new = dataclasses.replace(
        new, likelihood=plan.likelihood, partition=dataclasses.replace(new.partition, proved=proved)
    )

    def only(parts: dict, moved: bool) -> ProductNatural:
        return ProductNatural(
            {n: x if (n in names) == moved else jax.tree.map(jnp.zeros_like, x) for n, x in parts.items()}
        )

    own = only(state.prior.parts, True)
    own = own if state.sites.prior is None else own + state.sites.prior
    sites = dataclasses.replace(state.sites, prior=own)
    return dataclasses.replace(state, plan=new, prior=only(state.prior.parts, False), sites=sites)


def _begun_again(pvi: Any, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
    """The state with its schedule and solver at their beginnings."""
    dtype, last = float_dtype(), state.report
    fields = pvi._engine.unvisited(state, posterior(state.prior, state.sites), dtype)
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    fresh = dataclasses.replace(state, **fields | {"report": report})
    return ready_to_match(pvi._engine, fresh, args, kwargs)


# -------------------------------------------------------------------------------------------------------------- the fit


class ExponentialPVI(PVI, serves=keeps_supports):
    """What ``PVI(model, AutoExponentialFamily(model), ...)`` makes: every latent keeps its support and family.

    A group's site is a term of the product family, and its update the conjugate-computation step
    ``eta_m <- (1 - step) eta_m + step dE_q[log p(y_m | theta)]/dmu``. Where a factor is affine in a latent's statistics given the
    others, the message is exact (variational message passing); other latents are drawn. ``info`` says which are which.
    ``PowerEP`` matches the mean statistics of tilted distributions instead.

    References:
        Khan and Lin, Conjugate-Computation Variational Inference, algorithm 1. Winn and Bishop, Variational Message Passing.
    """

    def _make_engine(self, model: Any, num_particles: int) -> Any:
        _check_choices(self.solver, self.schedule, self.init_sites)
        return ProductEngine(model, self.solver, self.schedule, self.runtime, num_particles, self.optim)

    @follows
    def init(self, rng_key: Any, *args: Any, init_params: dict | None = None, **kwargs: Any) -> PVIState:
        """Plan the partition, find what every factor is conjugate in, and make the first state; see :meth:`PVI.init`."""
        opening = open_call(self, rng_key, args, kwargs, self.guide.families)
        args, kwargs, plan_key = opening.args, opening.kwargs, opening.plan_key
        opening.set_up(self.guide)
        shapes = {n: tuple(s["fn"].shape()) for n, s in opening.trace.items() if is_latent(s)}
        components = components_of(self.guide, shapes)

        def split(opening):
            return plan_beside(opening.partition, components.family, opening.held, args, kwargs, plan_key)

        opening, planned = opening.plan(self, split)
        inside = inside_of(opening.trace, opening.rows, self.guide)
        turns = turns_of(components, blocks_of(self.solver, inside))
        params = initial_params(planned.params, init_params, self.optim is not None)
        call = ValueCall(planned.plan.model(self.model), args, kwargs, params=params)
        base = Plan(planned.plan, components.family, opening.signature, tied=self.solver.tied)
        expectation = expectation_of(self.solver)
        given = expectation, turns, inside, plan_key
        away = away_from(self.guide, params, plan_key)
        plan, prior, base_site = plan_product(planned, components, call, base, *given, away=away)
        plan = proved_plan(plan, expectation) if self.solver.private else plan
        check_partial(self.solver, self.schedule, plan)
        packing = self.runtime.lay_out(planned.packing, self._engine.whole_groups, planned.plan.mechanism)
        state = self._first_state(plan, packing, prior, base_site, opening.key)
        state = dataclasses.replace(state, optim_state=init_optim(self.optim, self.guide, params))
        rows = split_arguments(args, kwargs)
        refuse_prior_of_rows(self._engine, plan, packing, *rows, state.optim_state, components.start)
        curved = self.init_sites == "auto" and init_params is None
        state = begun(self._engine, state, components.start, args, kwargs, curved)
        if init_params is not None:
            state = self._at_params(state, init_params)
        if not bool(_proper(state=state, level="cheap")):
            raise ImproperError(
                "q is not normalisable at the start: give every latent a proper prior, or valid init_params."
            )
        self._memory.labels = plan.partition.table.labels
        state = ready_to_match(self._engine, state, args, kwargs)
        self._memory.keep(state, rows[0])
        self._followed.programs.note(state)
        return state

    def _demoted(self, state: PVIState, found: list, dynamic: list, static: tuple) -> PVIState:
        return demoted(self, state, found, dynamic, static)

    def _read_prior(self, state: PVIState, dynamic: list, static: tuple) -> Any:
        plan: Any = state.plan
        call = self._engine.call(state, *join_arguments(dynamic, static))
        return product_prior_now(self.guide, plan, call)

    def _first_state(self, plan: Any, packing: Any, prior: Any, base_site: Any, key: Any) -> PVIState:
        count, dtype = len(plan.partition.table.labels), float_dtype()
        shared = ProductNatural({n: prior.parts[n] for n in plan.shared})
        stack = 1 if plan.tied else count
        groups = jax.tree.map(lambda x: on_device(np.zeros((stack, *x.shape)), x.dtype), shared)
        rows = {n: jax.tree.map(lambda x: on_device(np.zeros(x.shape), x.dtype), prior.parts[n]) for n in plan.row_axes}
        sites, zero = SiteStack(groups, base_site, MemberSites(rows) if rows else None), on_device(0.0, dtype)
        idle = Points(on_device(np.zeros((2,), bool)), zero, zero)
        state = PVIState(
            rng_key=key,
            sites=sites,
            prior=prior,
            exact=None,
            optim_state=None,
            solver_state=(),
            prior_solver_state=None,
            schedule_state=None,
            packing=packing,
            report=None,
            rule=Rule(on_device(0, np.int32), zero, zero, zero, idle),
            step=on_device(0, np.int32),
            plan=plan,
        )
        fields = self._engine.unvisited(state, _posterior(prior, sites, level="cheap"), dtype)
        return dataclasses.replace(state, **fields)

    def _at_params(self, state: PVIState, init_params: dict) -> PVIState:
        """q at the guide params that the user gave, the change spread over all sites in equal shares."""
        own, plan = self.get_params(state), _product_plan(state)
        unknown = sorted(set(init_params) - set(own))
        if unknown:
            raise PVIError(f"init_params has unknown name(s) {', '.join(unknown)}; expected some of {', '.join(own)}.")
        wanted = self.guide.get_posterior(own | {n: jnp.asarray(x) for n, x in init_params.items()})
        joint = {block.name: block.latents for block in plan.blocks}
        families = plan.family.components
        natural = ProductNatural({n: f.from_distribution(wanted[joint.get(n, n)]) for n, f in families})
        change = natural - posterior(state.prior, state.sites)
        return dataclasses.replace(state, sites=spread(plan, state.sites, change))

    # ------------------------------------------------------------------------------------------- reading results

    def get_params(self, state: PVIState) -> dict[str, Any]:
        """The guide's params (constrained, under the guide's own names)."""
        return self._params(state, posterior(state.prior, state.sites)) | self._param_values(state)

    def posterior(self, state: PVIState, joint: bool = False, agent: Hashable | None = None) -> dict[Any, Any]:
        """Marginal posterior of every latent, a member of its family in its own support; see :meth:`PVI.posterior`.

        Args:
            state: a state.
            joint: also give the Gaussians of joint blocks, under the tuples of their names.
            agent: label of a group, under a schedule without a server: the q of that agent instead of the network's mean.

        Returns:
            Distributions by latent name.

        Raises:
            ImproperError: when q is not normalisable.
            PVIError: for an agent under a schedule with a server.
        """
        q = posterior(state.prior, state.sites) if agent is None else agent_natural(self.schedule, state, agent)
        return self._distributions(state, q, "posterior", joint)

    def prior(self, state: PVIState, joint: bool = False) -> dict[Any, Any]:
        """Marginal prior of every latent; of one outside its family, the distribution of the PRIOR site: see :meth:`PVI.prior`."""
        natural = state.prior if state.sites.prior is None else state.prior + state.sites.prior
        return self._distributions(state, natural, "prior", joint)

    def _params(self, state: PVIState, natural: Any) -> dict[str, Any]:
        if self.guide.prototype_trace is None:
            raise StateError(NOT_SET_UP)

        def read(natural: Any) -> dict[str, Any]:
            members, found = state.plan.family.to_distribution(natural), {}
            for block in _product_plan(state).blocks:
                whole = members[block.name]
                found[self.guide._name(block.latents[0], "joint_loc")] = whole.mean
                found[self.guide._name(block.latents[0], "joint_scale_tril")] = whole.scale_tril
            for name, latent in self.guide._latents.items():
                found |= {self.guide._name(name, p): x for p, x in latent.params(members[name]).items()}
            return found

        return look(read, natural)

    def _distributions(self, state: PVIState, natural: Any, what: str, joint: bool) -> dict:
        if not bool(state.plan.family.in_domain(natural)):
            raise ImproperError(
                f"the {what} is not normalisable; run rounds until the data complete it, or use a proper prior."
            )
        found = self.guide.get_posterior(self._params(state, natural))
        return {name: d for name, d in found.items() if joint or isinstance(name, str)}

    @follows(trace=False)
    def info(self, state: PVIState) -> PVIInfo:
        """What happened to every factor in the last round, what it was found conjugate in, and what is drawn."""
        plan: Any = state.plan
        report, (proper, prior_proper) = jax.device_get((state.report, self._engine.cavities_proper(state)))
        labels = factor_labels(plan)
        count = len(plan.partition.table.labels)
        factors = ((plan.prior_factor,) if plan.prior_factor is not None else ()) + (plan.likelihood,) * count
        if plan.prior_factor is not None:
            proper = [bool(prior_proper), *proper]
        found: dict[str, Any] = {
            "ess": on_device(np.full(len(labels), np.nan), float_dtype()),
            "expectation": tuple(f.expectation for f in factors),
            "notes": (),
        }
        found |= matching_info(state) if plan.tilted else {}
        return PVIInfo(
            **last_round(state, report, self.schedule, self.solver),
            labels=labels,
            cavity_proper=proper,
            ess=found["ess"],
            structure=tuple(str(f) for f in factors),
            evidence=tuple(f.evidence for f in factors),
            expectation=found["expectation"],
            rhat=found.get("rhat"),
            divergent=found.get("divergent"),
            notes=(
                *optim_notes(self.optim is not None, state),
                *split_notes(state),
                *plan.partition.remarks,
                *found["notes"],
                *limits(state),
            ),
        )

    # ------------------------------------------------------------------------------------------ groups that come and go

    @property
    def _newcomers(self) -> Newcomers:
        def start(state: PVIState, dynamic: list, static: tuple, known: Any) -> Any:
            del dynamic, static
            return start_of(self._engine, state, known), None

        # What init found is not looked for again.
        how = self.solver, False, self.runtime, self._engine.whole_groups
        return ProductNewcomers(self.model, positional_names(self.model), start, self._drive, *how)

    def add_group(self, state: PVIState, label: Hashable, /, *args: Any, **kwargs: Any) -> PVIState:
        """Add a group of rows beside the sites of all others; see :meth:`PVI.add_group`. Not with latents of the rows' own."""
        check_state(state)
        refuse_own_rows(state, "add_group")
        return super().add_group(state, label, *args, **kwargs)

    def revisit(self, state: PVIState, labels: Any, /, *args: Any, **kwargs: Any) -> PVIState:
        """Bring rows of known groups back; see :meth:`PVI.revisit`. Not with latents of the rows' own."""
        check_state(state)
        refuse_own_rows(state, "revisit")
        return super().revisit(state, labels, *args, **kwargs)

    def forget_group(self, state: PVIState, label: Hashable) -> PVIState:
        """Take a group's site out; see :meth:`PVI.forget_group`. Not with latents of the rows' own.

        This equals never having seen the group where factors see one latent alone that they are conjugate in; elsewhere a warning
        says that it is approximate.
        """
        check_state(state)
        refuse_own_rows(state, "forget_group")
        return super().forget_group(state, label)

    @follows
    def khat(
        self, state: PVIState, *args: Any, rng_key: Any, num_samples: int = 1000, by_group: bool = False, **kwargs: Any
    ) -> Any:
        """Pareto k-hat of importance weights from q to the exact posterior, in the latents' own supports; see :meth:`PVI.khat`.

        With ``by_group`` the groups' factors have the latents of their rows beside the shared ones.
        """
        refuse_look(self.solver, "khat")
        args, kwargs = self._checked_arguments(state, args, kwargs)
        refuse_absent(state, "khat compares q with the posterior given all rows")
        state = with_prior_of_now(self, state, *split_arguments(args, kwargs))
        if by_group:
            fixed = self._engine, state, args, kwargs
            return diagnostics.khat_of_product_by_group(rng_key, *fixed, num_samples=num_samples)
        model = state.plan.partition.model(self.model)
        params = self._param_values(state)
        return diagnostics.khat_of_product(rng_key, model, state, args, kwargs, params, num_samples=num_samples)


_posterior = owned_jit(posterior, ())


def _normalisable(state: PVIState) -> Any:
    return state.plan.family.in_domain(posterior(state.prior, state.sites))


_proper = owned_jit(_normalisable, ())


def _product_plan(state: PVIState) -> Any:
    """A state's plan, which is a :class:`numpyro_pvi.runtime.ProductPlan`."""
    return state.plan


def _check_choices(solver: Any, schedule: Any, init_sites: str) -> None:
    solver.check_families()
    schedule.check_families(solver)
    if init_sites == "curvature":
        raise PVIError(
            "init_sites='curvature' is for Gaussian guides; under AutoExponentialFamily q starts at the prior. Leave it out, or "
            "give init_params."
        )
