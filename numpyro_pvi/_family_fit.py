"""What PVI asks of a fit whose q is a product of families: sites are terms of the product of the latents' families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import diagnostics, export
from ._closures import other_family
from ._compiling import Program, level_of_looks, look, on_device, owned_jit
from ._exponential_guide import block_marginals, make_latent, of_no_row, with_events
from ._exponential_plan import (
    Components,
    blocks_of,
    check_families,
    check_partial,
    components_of,
    expectation_of,
    guide_shapes,
    inside_of,
    narrow_members,
    plan_beside,
    plan_product,
    product_prior_now,
    product_types,
    proved_plan,
    turns_of,
)
from ._fits import Begun
from ._initial import away_from, init_optim, initial_params, streams
from ._posterior_views import FactorWords
from ._saving import prototype
from ._state import Plan, PVIState
from ._state_marginals import natural_of
from ._user_inputs import Opening, float_dtype, watched
from ._verified import Contradiction, cannot_go_on, remark
from .errors import ImproperError, PVIError, StateError
from .expectations import FactorStructure, with_draws, with_rule
from .factors import (
    Arrival,
    Planned,
    ValueCall,
    arrive,
    choose_chunk_rows,
    is_latent,
    join_arguments,
    pack_rows,
    split_arguments,
)
from .families import ProductFamily, ProductNatural, repeated
from .guides import NOT_SET_UP, given_params
from .handlers import GroupTable
from .runtime import (
    DESIGN,
    RULE,
    SHARED,
    SLOPES,
    ProductEngine,
    ProductPlan,
    apart,
    best_of_short_runs,
    curvature_start,
    factors_of,
    first_weights,
    jointly_affine,
    prior_members,
    spread,
    tamed_sites,
    value_shapes,
    with_tilted,
)
from .schedules import Points, Rule
from .sites import MemberSites, SiteStack, posterior

# How tilted moments are taken, in words.
_WORDS = {
    "exact": "closed form",
    "quadrature": "quadrature over the latents",
    "importance": "weighted draws",
    "laplace": "weighted draws of a Laplace approximation",
    "mcmc": "mcmc",
}


class FamilyFit:
    """Implements :class:`numpyro_pvi._fits.Fit` for :class:`numpyro_pvi.AutoExponentialFamily`.

    A group's site is a term of the product family, and its update the conjugate-computation step
    ``eta_m <- (1 - step) eta_m + step dE_q[log p(y_m | theta)]/dmu``. Where a factor is affine in a latent's statistics given the
    others, the message is exact (variational message passing); other latents are drawn. ``info`` says which are which.
    ``PowerEP`` matches the mean statistics of tilted distributions instead.

    References:
        Khan and Lin, Conjugate-Computation Variational Inference, algorithm 1. Winn and Bishop, Variational Message Passing.
    """

    plan_type, stores_memories = ProductPlan, True

    def engine(self, pvi: Any, num_particles: int) -> ProductEngine:
        """An engine of a product."""
        pvi.solver.check_families()
        pvi.schedule.check_families(pvi.solver)
        if pvi.init_sites == "curvature":
            raise PVIError(
                "init_sites='curvature' is for Gaussian guides; under AutoExponentialFamily q starts at the prior. Leave it out, "
                "or give init_params."
            )
        return ProductEngine(pvi.model, pvi.solver, pvi.schedule, pvi.runtime, num_particles, pvi.optim)

    def families(self, guide: Any) -> Collection[str]:
        """Those that the guide was given families for."""
        return guide.families

    # ------------------------------------------------------------------------------------------------ how it begins

    def plan(self, pvi: Any, opening: Opening, init_params: dict | None) -> Begun:
        """Find what every factor is conjugate in."""
        args, kwargs, plan_key, solver = opening.args, opening.kwargs, opening.plan_key, pvi.solver
        elsewhere = pvi.runtime.elsewhere
        if elsewhere is not None:
            refuse_members_elsewhere(opening)
        components = components_of(pvi.guide, value_shapes(opening.trace))

        def split(opening: Opening) -> Planned:
            if elsewhere is not None:
                return elsewhere.plan_families(components.family, expectation_of(solver), plan_key)
            return plan_beside(opening.partition, components.family, opening.held, args, kwargs, plan_key)

        opening, planned = opening.plan(pvi, split)
        inside = inside_of(opening.trace, opening.rows, pvi.guide)
        turns = turns_of(components, blocks_of(solver, inside))
        params = initial_params(planned.params, init_params, pvi.optim is not None)
        call = ValueCall(planned.plan.model(pvi.model), args, kwargs, params=params)
        base = Plan(planned.plan, components.family, opening.signature, tied=solver.tied)
        given = expectation_of(solver), turns, inside, plan_key
        away = away_from(pvi.guide, params, plan_key)
        plan, prior, base_site = plan_product(planned, components, call, base, *given, away=away)
        plan = proved_plan(plan, expectation_of(solver)) if solver.private else plan
        check_partial(solver, pvi.schedule, plan)
        if elsewhere is not None:
            elsewhere.compare_priors(pvi._engine, plan, (args, kwargs))
        optim_state = init_optim(pvi.optim, pvi.guide, params)
        rows = split_arguments(args, kwargs)
        return Begun(opening, planned, plan, optim_state, *rows, components.start, (prior, base_site))

    def first_state(self, pvi: Any, begun: Begun, init_params: dict | None) -> PVIState:
        """Sites at 1, but for what would stay there for ever, or for very long."""
        args, kwargs, engine = begun.opening.args, begun.opening.kwargs, pvi._engine
        state = _at_prior(engine, begun, begun.lay_out(pvi, begun.plan))
        curved = pvi.init_sites == "auto" and init_params is None
        state = _away_from_prior(engine, state, begun.at, args, kwargs, curved)
        if init_params is not None:
            state = self.at_params(pvi, state, init_params)
        if not bool(_proper(state=state, level="cheap")):
            raise ImproperError(
                "q is not normalisable at the start: give every latent a proper prior, or valid init_params."
            )
        return _ready_to_match(engine, state, args, kwargs)

    def at_params(self, pvi: Any, state: PVIState, init_params: dict) -> PVIState:
        """q at the guide params that the user gave, the change spread over all sites in equal shares."""
        own, plan = pvi.get_params(state), _plan_of(state)
        unknown = sorted(set(init_params) - set(own))
        if unknown:
            raise PVIError(f"init_params has unknown name(s) {', '.join(unknown)}; expected some of {', '.join(own)}.")
        # A latent that rows had which are not at hand begins where those of these rows do.
        given = {n: jnp.asarray(x) for n, x in init_params.items()}
        given = {n: x for n, x in given.items() if x.size or not own[n].size}
        given = given_params({n: x for n, x in given.items() if n not in plan.partition.params}, own)
        wanted = pvi.guide.get_posterior(own | given)
        joint = {block.name: block.latents for block in plan.blocks}
        families = plan.family.components
        natural = ProductNatural({n: f.from_distribution(wanted[joint.get(n, n)]) for n, f in families})
        return self.at_natural(state, natural)

    def other_start(
        self, pvi: Any, state: PVIState, init_params: dict | None, dynamic: list, static: tuple
    ) -> PVIState | None:
        """Around the guide's ``init_loc_fn``, as narrow as Gaussian guides begin; None where moments are matched, too."""
        if init_params is not None or pvi.init_sites != "auto" or streams(pvi.schedule) or pvi.solver.matches_moments:
            return None
        # Clients hold the rows that the guide is set up with, or their latents.
        if pvi.runtime.elsewhere is not None:
            return None
        key = jax.random.fold_in(state.rng_key, 0x57A)
        wanted = narrow_members(pvi.guide, _plan_of(state), posterior(state.prior, state.sites), key)
        return self.at_natural(state, wanted)

    def at_natural(self, state: PVIState, wanted: Any) -> PVIState:
        """In equal shares of all sites; the members of a row in its group's."""
        change = wanted - posterior(state.prior, state.sites)
        return dataclasses.replace(state, sites=spread(_plan_of(state), state.sites, change))

    def read_prior(self, pvi: Any, state: PVIState, dynamic: list, static: tuple) -> Any:
        """Members of the latents' families, 1 where the prior is a factor."""
        call, q = pvi._engine.call(state, *join_arguments(dynamic, static)), posterior(state.prior, state.sites)
        return product_prior_now(_plan_of(state), call, q)

    # ------------------------------------------------------------------------------------------------- what is shown

    def params(self, guide: Any, state: PVIState) -> dict[str, Any]:
        """Parameters of every latent's distribution."""
        return _params(guide, state, posterior(state.prior, state.sites))

    def distributions(
        self, pvi: Any, state: PVIState, what: str, joint: bool, agent: Hashable | None = None
    ) -> dict[Any, Any]:
        """Members of the latents' families; of a prior outside its family, the distribution of the PRIOR site."""
        plan, natural = _plan_of(state), natural_of(pvi.schedule, state, what, agent)
        family = plan.family
        if what == "prior":
            # What rows have of their own, given other latents, has no prior by itself.
            shown = [(n, f) for n, f in family.components if n in plan.exact or n not in plan.own_latents]
            family, natural = ProductFamily(shown), ProductNatural({n: natural.parts[n] for n, _ in shown})
        if not bool(family.in_domain(natural)):
            raise ImproperError(
                f"the {what} is not normalisable; run rounds until the data complete it, or use a proper prior."
            )
        trace, found = prototype(pvi, state), {}
        members = dict(_members(family, natural))
        for block in plan.blocks:
            found |= block_marginals(block.latents, block.shapes, members.pop(block.name), trace)
        found |= {name: with_events(own, trace[name]["fn"].support.event_dim) for name, own in members.items()}
        return {name: d for name, d in found.items() if joint or isinstance(name, str)}

    def words(self, state: PVIState, solver: Any) -> tuple[FactorWords, FactorWords]:
        """What they are conjugate in."""
        plan = _plan_of(state)

        def told(factor: FactorStructure, which: int) -> FactorWords:
            way = _WORDS[plan.tilted[which]] if plan.tilted else factor.expectation
            return FactorWords(str(factor), way, factor.evidence)

        groups = told(plan.likelihood, 0)
        return groups, groups if plan.prior_factor is None else told(plan.prior_factor, 1)

    def khat(
        self, pvi: Any, state: PVIState, args: tuple, kwargs: dict, rng_key: Any, num_samples: int, by_group: bool
    ) -> Any:
        """In the latents' own supports; of a group, with the latents of its rows beside the shared ones."""
        elsewhere = pvi.runtime.elsewhere
        q, params = posterior(state.prior, state.sites), pvi._param_values(state)
        fixed = state.plan.partition.model(pvi.model), state.plan, q, args, kwargs

        def weights(count: int) -> Any:
            if by_group:
                given = rng_key, pvi._engine, state, args, kwargs, count
                return diagnostics.product_group_weights(*given, likelihood=elsewhere is None)
            return diagnostics.product_weights(rng_key, *fixed, count, params)

        def judged(q: Any, sites: Any) -> dict:
            return elsewhere.judged(state.plan, rng_key, q, sites, params, num_samples)

        how = {"num_samples": num_samples, "by_group": by_group, "elsewhere": None if elsewhere is None else judged}
        return diagnostics.khat_of_product(weights, state, (args, kwargs), **how)

    def judge(
        self, pvi: Any, plan: Any, rng_key: Any, q: Any, sites: Any, rows: tuple, num_samples: int
    ) -> list[float]:
        """See :func:`numpyro_pvi.diagnostics.khat_of_members`."""
        return diagnostics.khat_of_members(rng_key, pvi.model, plan, q, sites, *rows, num_samples=num_samples)

    def shared_to_arviz(
        self, pvi: Any, state: PVIState, args: tuple, kwargs: dict, rng_key: Any, num_samples: int, trace: Any
    ) -> Any:
        """In the latents' own supports."""
        q = posterior(state.prior, state.sites)
        return export.product_to_arviz(rng_key, state.plan, q, num_samples=num_samples, trace=trace)

    # ------------------------------------------------------------------------------------- groups that come and go

    def arrival(self, solver: Any, plan: Any, table: GroupTable, rows: dict[str, int]) -> Arrival:
        """As of Gaussian fits; batches of rows, and rows' own members, are taken from a packing without empty slots."""
        found = arrive(plan.partition, table, rows, False)
        if not (found.padded_rows and (solver.stochastic or plan.inside)):
            return found
        length = choose_chunk_rows(table.sizes)
        part = dataclasses.replace(found.plan, chunk_rows=length, num_chunks=-(-table.num_rows // length))
        return Arrival(part, pack_rows(table, length), 0)

    def arrived(self, pvi: Any, state: PVIState, dynamic: list, static: tuple, known: Any) -> tuple[dict, Any]:
        """A new group's site is 1, and the schedule begins anew. What factors are conjugate in is what ``init`` found."""
        plan = _plan_of(state)
        if plan.inside:
            state = _with_members(pvi, state, *join_arguments(dynamic, static))
        fields = _unvisited(pvi._engine, state, known)
        if bool(np.all(known)) and not plan.inside:
            # Sites that were fitted before are as settled as they were.
            settled = jnp.asarray(state.report.total_move)
            fields["report"] = fields["report"]._replace(total_move=settled)
        return fields | {"plan": state.plan, "prior": state.prior}, None

    def demoted(self, pvi: Any, state: PVIState, found: list, dynamic: list, static: tuple) -> PVIState:
        """Components are drawn, q stays."""
        return demoted(pvi, state, found, dynamic, static)

    # -------------------------------------------------------------------------------------------------------- files

    def guide_latents(self, guide: Any) -> dict[str, tuple[int, ...]]:
        """In their own supports."""
        return guide_shapes(guide)

    def check_guide(self, guide: Any, plan: Any) -> None:
        """Latent by latent."""
        check_families(guide, plan)

    def check_family(self, guide: Any, plan: Any) -> None:
        """Latent by latent, once the guide is set up."""
        if guide.prototype_trace is not None:
            check_families(guide, plan)

    def check_solver(self, solver: Any, plan: Any) -> None:
        """Moments are matched in ways that the plan knows, and closed forms need factors that have them."""
        if bool(plan.tilted) != bool(solver.matches_moments):
            has, wants = ("tilted moments", "expectations")[:: 1 if plan.tilted else -1]
            raise PVIError(f"its factors were planned for {has}, and {type(solver).__name__} takes {wants}.")
        factors = [f for f in (plan.likelihood, plan.prior_factor) if f is not None]
        if solver.closed_form and not all(f.closed for f in factors):
            raise PVIError(
                f"{type(solver).__name__} needs factors in closed form, and some of the state's are by quadrature or draws."
            )

    def memories(self, pvi: Any, state: PVIState, dynamic: list, static: tuple) -> dict[str, Any]:
        """As where groups have come."""

        def begin(state: PVIState, dynamic: list) -> dict[str, Any]:
            return pvi._engine.unvisited(state, float_dtype(), None, *join_arguments(dynamic, static))

        return jax.eval_shape(begin, state, dynamic)

    def guide_settings(self, guide: Any, words: Callable[[Any], str]) -> dict[str, str]:
        """Families that were given, and joint blocks."""
        given = {name: guide.families[name] for name in sorted(guide.families)}
        return {"families": words(given), "joint": repr(guide.joint)}

    def types(self, guide: Any) -> dict[str, type]:
        """Those of families that were registered or given, too."""
        return product_types(guide)


def refuse_members_elsewhere(opening: Opening) -> None:
    """Raise for latents of rows that are not here. ``opening``: the call of ``init``. Raises PVIError naming them."""
    inside = [n for n, s in opening.trace.items() if is_latent(s) and opening.rows.of(s) is not None]
    if inside:
        raise PVIError(
            f"clients do not go with latents inside the partitioned plate ({', '.join(inside)}) under AutoExponentialFamily: q has "
            "members for single rows, which a server would hold. Sum or integrate them out in the model, or use a Gaussian guide, "
            "under which they stay with their client."
        )


def _plan_of(state: PVIState) -> Any:
    """A state's plan, which is a :class:`numpyro_pvi.runtime.ProductPlan`."""
    return state.plan


@partial(Program, static=("family",))
def _members(family: ProductFamily, natural: ProductNatural) -> dict[str, Any]:
    """Every component's distribution."""
    return family.to_distribution(natural)


def _normalisable(state: PVIState) -> Any:
    return state.plan.family.in_domain(posterior(state.prior, state.sites))


_proper = owned_jit(_normalisable, ())


def _params(guide: Any, state: PVIState, natural: Any) -> dict[str, Any]:
    """Natural parameters as the guide's params."""
    if guide.prototype_trace is None:
        raise StateError(NOT_SET_UP)

    def read(natural: Any) -> dict[str, Any]:
        members, found = state.plan.family.to_distribution(natural), {}
        for block in _plan_of(state).blocks:
            whole = members[block.name]
            found[guide._name(block.latents[0], "joint_loc")] = whole.mean
            found[guide._name(block.latents[0], "joint_scale_tril")] = whole.scale_tril
        for name, latent in guide._latents.items():
            own = latent.params(members[name]) if name in members else of_no_row(latent, _plan_of(state).row_axes[name])
            found |= {guide._name(name, p): x for p, x in own.items()}
        return found

    return look(read, natural)


# ---------------------------------------------------------------------------------------------------------- first states
# Where q begins, and the beginnings of solvers and schedules.


def _at_prior(engine: ProductEngine, begun: Begun, packing: Any) -> PVIState:
    """The state with all sites at 1."""
    assert begun.first is not None  # plans of families read the prior
    plan, (prior, base_site) = begun.plan, begun.first
    count, dtype = len(plan.partition.table.labels), float_dtype()
    shared = ProductNatural({n: prior.parts[n] for n in plan.shared})
    stack = 1 if plan.tied else count
    groups = jax.tree.map(lambda x: on_device(np.zeros((stack, *x.shape)), x.dtype), shared)
    rows = {n: jax.tree.map(lambda x: on_device(np.zeros(x.shape), x.dtype), prior.parts[n]) for n in plan.row_axes}
    sites, zero = SiteStack(groups, base_site, MemberSites(rows) if rows else None), on_device(0.0, dtype)
    idle = Points(on_device(np.zeros((2,), bool)), zero, zero, on_device(np.zeros((2,), bool)))
    state = PVIState(
        rng_key=begun.opening.key,
        sites=sites,
        prior=prior,
        exact=None,
        optim_state=begun.optim_state,
        solver_state=(),
        prior_solver_state=None,
        schedule_state=None,
        packing=packing,
        report=None,
        rule=Rule(on_device(0, np.int32), zero, zero, zero, idle),
        step=on_device(0, np.int32),
        plan=plan,
    )
    fields = engine.unvisited(state, dtype)
    return dataclasses.replace(state, **fields)


def _away_from_prior(
    engine: ProductEngine, state: PVIState, start: ProductNatural, args: tuple, kwargs: dict, curved: bool
) -> PVIState:
    """Put q where its rounds begin: at the prior, but for what would stay there for ever, or for very long.

    Latents that are taken by quadrature begin at the curvature of the groups' factors. Where values are summed over, q
    begins where the best of a few short runs ends (not where moments are matched); else latents inside the partitioned plate
    begin half way to a draw each.
    """
    plan: Any = state.plan
    if engine.solver.matches_moments and plan.inside:
        # Integrated out, they need no member that tells them apart, but one to draw from.
        old = posterior(state.prior, state.sites)
        q = ProductNatural({n: start.parts[n] if n in plan.row_axes else x for n, x in old.parts.items()})
        return dataclasses.replace(state, sites=spread(plan, state.sites, q - old))
    by_predictors = plan.likelihood.by_predictors and not plan.inside
    if curved and not engine.solver.matches_moments:
        state = dataclasses.replace(state, sites=tamed_sites(plan, state.prior, state.sites))
    arrays, static = split_arguments(args, kwargs)
    # Where rows' own latents have a prior given others alone, there is no q yet at which to look for a curvature.
    there = not plan.inside or bool(_proper(state=state, level="cheap"))
    # A site that all groups share has no group's curvature.
    if curved and (plan.likelihood.by_nodes or by_predictors) and not (plan.summed or plan.tied) and there:
        run = partial(_curved_sites, engine, static, state, arrays, level=level_of_looks(state, arrays))
        sites = watched(engine.runtime, plan, run)
        return dataclasses.replace(state, sites=sites)
    if engine.solver.matches_moments or engine.solver.private or (not plan.inside and not plan.summed):
        return state
    key = look(lambda key: jax.random.fold_in(key, 0), state.rng_key)
    weights = first_weights(plan, key) if plan.summed else None
    given = state, start, key, weights, arrays
    run = partial(_sites_apart, engine, static, *given, level=level_of_looks(given))
    return dataclasses.replace(state, sites=watched(engine.runtime, plan, run))


# Programs of the fit that begins, like its rounds: traced when it is first made, and not at every `run`.


def _at_curvatures(engine: ProductEngine, static: tuple, state: PVIState, arrays: list) -> SiteStack:
    args, kwargs = join_arguments(arrays, static)
    return curvature_start(engine.problem(state, args, kwargs), state.sites, engine.noise(state.rng_key))


def _moved_apart(
    engine: ProductEngine, static: tuple, state: PVIState, start: Any, key: Any, weights: Any, arrays: list
) -> SiteStack:
    plan: Any = state.plan
    old = posterior(state.prior, state.sites)
    q = ProductNatural({n: start.parts[n] if n in plan.row_axes else x for n, x in old.parts.items()})
    if weights is None:
        q = apart(plan.family, tuple(plan.row_axes), q, key)
    else:
        args, kwargs = join_arguments(arrays, static)
        q = best_of_short_runs(engine.problem(state, args, kwargs), q, weights, engine.noise(state.rng_key))
    return spread(plan, state.sites, q - old)


_curved_sites = owned_jit(_at_curvatures, ("engine", "static"))
_sites_apart = owned_jit(_moved_apart, ("engine", "static"))


def _ready_to_match(engine: ProductEngine, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
    """A first state, whose q is normalisable, with the ways to take tilted moments where the solver matches them."""
    if not engine.solver.matches_moments:
        return state
    plan: Any = state.plan
    solver: Any = engine.solver
    arrays, static = split_arguments(args, kwargs)

    def affine(state: PVIState, arrays: list) -> Any:
        args, kwargs = join_arguments(arrays, static)
        problem = factors_of(engine.problem(state, args, kwargs), solver)
        return jointly_affine(problem, state.sites, engine.noise(state.rng_key))

    likelihood, prior = watched(engine.runtime, plan, partial(look, affine, state, arrays))
    plan = with_tilted(plan, solver, (bool(likelihood), bool(prior)))
    state = dataclasses.replace(state, plan=plan)
    fields = engine.unvisited(state, float_dtype(), None, args, kwargs)
    return dataclasses.replace(state, **fields | {"report": state.report})


def _with_members(pvi: Any, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
    """A state with members for the rows that have come: at their prior, given a draw of the shared latents from q.

    ``state``: with the plan and packing of these rows, and without members. Returns the state. What q says of shared latents is
    as it was. Raises StateError where a prior that was held exactly is of another family now.
    """
    plan, call, q = _plan_of(state), pvi._engine.call(state, args, kwargs), posterior(state.prior, state.sites)
    key = jax.random.fold_in(state.rng_key, 0xA77)
    shared = jax.tree.map(lambda x: x[0], plan.shared_draws(q, key, 1))
    trace, families, start = call.trace(plan.latent_values(shared), key), dict(plan.family.components), {}
    for own in plan.inside:
        fn = trace[own.name]["fn"]
        latent = make_latent(own.name, fn, pvi.guide.families.get(own.name))
        families[own.name] = repeated(latent.family, fn.batch_shape)
        start[own.name] = families[own.name].from_distribution(latent.member(latent.start))
    plan = dataclasses.replace(plan, family=ProductFamily(families))
    values = plan.family.sample(q.combine(ProductNatural(start)), key)
    held, exact = prior_members(call, plan.family, plan.blocks, values), set(plan.exact) & start.keys()
    if missing := exact - held.keys():
        raise other_family(min(missing))
    none = {name: jax.tree.map(jnp.zeros_like, own) for name, own in start.items()}
    members = ProductNatural({name: held[name] if name in exact else own for name, own in none.items()})
    prior_site = None if state.sites.prior is None else state.sites.prior.combine(ProductNatural(none))
    local = MemberSites((ProductNatural(start) - members).parts)
    sites = dataclasses.replace(state.sites, prior=prior_site, local=local)
    return dataclasses.replace(state, plan=plan, prior=state.prior.combine(members), sites=sites)


def _unvisited(engine: ProductEngine, state: PVIState, known: Any = None) -> dict[str, Any]:
    """Fields of a state whose groups no round has visited as they are now, the clock and messages as they were.

    ``known`` says which groups have a site (Bool[M]); None where none counts as one.
    """
    last = state.report
    fields = engine.unvisited(state, last.move.dtype, known)
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    return fields | {"report": report}


# --------------------------------------------------------------------------------------------------- structure given up
# What a fit under AutoExponentialFamily does when the model contradicts its structure: components are drawn, q stays.


def demoted(pvi: Any, state: PVIState, found: list[Contradiction], dynamic: list, static: tuple) -> PVIState:
    """The state with the contradicted structure given up: see :func:`numpyro_pvi._verified.demoted`."""
    args, kwargs = join_arguments(dynamic, static)
    names: dict[str, list[str]] = {"likelihood": [], "prior factor": [], "prior": []}
    for one in found:
        factor, _, name = one.claim.partition("/")
        names[factor].append(name)
    notes = tuple(_remark(state, one) for one in found)
    try:
        if names["prior"]:
            state = _with_prior_factor(pvi, state, names["prior"], args, kwargs)
        state = dataclasses.replace(state, plan=_drawn(pvi, state, names, notes))
    except PVIError as error:
        raise cannot_go_on(error, notes) from error
    # Solver and schedule begin again.
    state = dataclasses.replace(state, **_unvisited(pvi._engine, state))
    return _ready_to_match(pvi._engine, state, args, kwargs)


def _remark(state: PVIState, found: Contradiction) -> str:
    factor, _, name = found.claim.partition("/")
    plan: Any = state.plan
    label = plan.partition.table.labels[found.factor] if factor == "likelihood" else None
    if name.startswith(SLOPES):
        whose, name = "the prior factor" if label is None else "its likelihood", name.removeprefix(SLOPES)
        claimed = f"{whose} was taken to change along {name!r} as its slopes say"
        return remark(state, found, claimed, f"it jumps, and {name!r} is drawn and taken by values", label)
    if name == DESIGN or name.startswith(SHARED):
        own = plan.likelihood if factor == "likelihood" else plan.prior_factor
        whose, name = "the prior factor" if label is None else "its likelihood", name.removeprefix(SHARED)
        if name == DESIGN:
            claimed = f"{whose} was averaged over signs of which at most {own.strength} meet in a product"
            return remark(state, found, claimed, "over all combinations of them, or drawn ones", label)
        claimed = f"{whose} was taken as one of which no term sees two entries along an axis of {name!r}"
        return remark(state, found, claimed, "its members share no signs", label)
    if name == RULE:
        own = plan.likelihood if factor == "likelihood" else plan.prior_factor
        whose, names = "the prior factor" if label is None else "its likelihood", ", ".join(map(repr, own.by_rule))
        return remark(state, found, f"{whose} was taken by {own.rule} in {names}", f"{names} are drawn", label)
    if factor == "prior":
        return remark(state, found, f"the prior of {name!r} was held exactly", "it is a factor of its own")
    structure = plan.likelihood if factor == "likelihood" else plan.prior_factor
    words = {
        "absent": "constant in",
        "predictors": "a function of one or two predictors of",
        "quadrature": "a sum of functions of one member each of",
    }
    kind = words.get(next(role.kind for role in structure.roles if role.name == name), "conjugate in")
    if factor == "prior factor":
        return remark(state, found, f"the prior factor was taken as {kind} {name!r}", f"{name!r} is drawn")
    return remark(state, found, f"its likelihood was taken as {kind} {name!r}", f"{name!r} is drawn", label)


def _drawn(pvi: Any, state: PVIState, names: dict[str, list[str]], notes: tuple[str, ...]) -> ProductPlan:
    """The plan with contradicted components drawn."""
    plan: Any = state.plan
    expectation = expectation_of(pvi.solver)

    def drawn(structure: FactorStructure, claimed: list[str], where: str) -> FactorStructure:
        jumping = [name.removeprefix(SLOPES) for name in claimed if name.startswith(SLOPES)]
        every = [name.removeprefix(SLOPES) for name in claimed]
        own = [name.removeprefix(SHARED) for name in claimed if name.startswith(SHARED)]
        found = with_draws(structure, plan.family, every, expectation, where, jumping, own)
        # What a fixed rule was in it is in still, with what is at points beside, unless it is the rule that did not serve.
        kept = structure.by_rule and RULE not in claimed
        return with_rule(found, plan.family, expectation, plan.terms_together) if kept else found

    likelihood, prior_factor = plan.likelihood, plan.prior_factor
    if names["likelihood"]:
        likelihood = drawn(likelihood, names["likelihood"], "groups' likelihood")
    if names["prior factor"] and prior_factor is not None:
        prior_factor = drawn(prior_factor, names["prior factor"], "prior factor")
    part = dataclasses.replace(plan.partition, remarks=(*plan.partition.remarks, *notes))
    return dataclasses.replace(plan, partition=part, likelihood=likelihood, prior_factor=prior_factor, tilted=())


def _with_prior_factor(pvi: Any, state: PVIState, names: list[str], args: tuple, kwargs: dict) -> PVIState:
    """The same q, with the priors of some components in the PRIOR site; what the factor is conjugate in is found around q."""
    plan: Any = state.plan
    key, q = jax.random.fold_in(state.rng_key, 0xD1), posterior(state.prior, state.sites)
    components = Components(plan.family, q, plan.blocks)
    base = Plan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)})
    planned = Planned(plan.partition, state.packing, np.zeros(0), np.zeros(0), {}, structure=plan.likelihood)
    kept = {*names, *(n for n, _ in plan.family.components if n not in plan.exact)}
    given = expectation_of(pvi.solver), plan.turns, plan.inside, key, kept
    call = pvi._engine.call(state, args, kwargs)
    new, _, _ = plan_product(planned, components, call, base, *given, away=away_from(pvi.guide, call.params, key))
    # What was found of the groups before stands, with what was already given up of it.
    proved = new.partition.proved & plan.partition.proved
    new = dataclasses.replace(new, partition=dataclasses.replace(new.partition, proved=proved))

    def only(parts: dict, moved: bool) -> ProductNatural:
        return ProductNatural(
            {n: x if (n in names) == moved else jax.tree.map(jnp.zeros_like, x) for n, x in parts.items()}
        )

    own = only(state.prior.parts, True)
    own = own if state.sites.prior is None else own + state.sites.prior
    sites = dataclasses.replace(state.sites, prior=own)
    return dataclasses.replace(state, plan=new, prior=only(state.prior.parts, False), sites=sites)
