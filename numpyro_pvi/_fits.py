"""What PVI asks of the kind of q that a guide stands for: one contract, and what is answered where q is Gaussian."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from . import diagnostics, export
from ._closures import other_family
from ._compiling import owned_jit
from ._group_lifecycle import reduced
from ._initial import (
    as_the_solver_takes,
    at_given,
    at_natural,
    best_guide_start,
    better_start,
    check_structure,
    given_to_guide,
    init_optim,
    initial_params,
    is_free,
    refuse_nothing_shared,
    spread_params,
    start_mode,
    streams,
)
from ._posterior_views import FactorWords, latent_distributions, words_of
from ._saving import prototype
from ._state import Plan, PVIState
from ._state_marginals import (
    SharedOnly,
    by_unit,
    choose_rows,
    dense_form,
    guide_params,
    local_distributions,
    natural_of,
    row_distributions,
)
from ._user_inputs import (
    Opening,
    arrive_groups,
    open_call,
    refuse_prior_of_rows,
    start_arrays,
    watched,
)
from ._verified import demoted
from .errors import StateError
from .factors import (
    GAUSSIAN,
    Arrival,
    Layout,
    Planned,
    abstract_trace,
    arrive,
    base_distribution,
    join_arguments,
    lengths_named,
    model_layout,
    move_to_prior_factor,
    plan_factors,
    split_arguments,
)
from .guides import family_of, guide_layout
from .handlers import FullPlates, GroupTable
from .runtime import Engine, whole_call
from .sites import Held, posterior


@dataclasses.dataclass(frozen=True)
class Begun:
    """A fit that is planned.

    Attributes:
        opening: the call of ``init``.
        planned: the partition's plan, and what was found on the way.
        optim_state: of the optimiser of the model's ``numpyro.param`` sites, or None.
        at: where the prior is looked at: Float[D], its location; natural parameters where q is a product of families.
        first: natural parameters of the exactly held prior, and where the PRIOR site starts, where planning has read them.
    """

    opening: Opening
    planned: Planned
    plan: Any
    optim_state: Any
    dynamic: list
    static: tuple
    at: Any
    first: tuple[Any, Any] | None = None

    def lay_out(self, pvi: Any, plan: Any) -> Any:
        """Where rows stand, under the plan that is followed: see :meth:`numpyro_pvi.runtime.Runtime.lay_out`.

        Raises PVIError for a prior that depends on rows which no device has all of.
        """
        packing = pvi.runtime.lay_out(self.planned.packing, pvi._engine.whole_groups, self.planned.plan.mechanism)
        refuse_prior_of_rows(pvi._engine, plan, packing, self.dynamic, self.static, self.optim_state, self.at)
        return packing


class Fit(Protocol):
    """All in which fits under one kind of guide differ from those under another; ``pvi`` is the PVI, ``guide`` its guide.

    ``plan_type``: class of the plans of its states; ``stores_memories``: whether a file has solvers' memories with their
    structure; else that is the solver's own.
    """

    plan_type: type
    stores_memories: bool

    def engine(self, pvi: Any, num_particles: int) -> Any:
        """Everything static about the fit except its plan; raises ``PVIError`` for choices that do not go together."""
        ...

    def families(self, guide: Any) -> Collection[str]:
        """Latents that have a family, so that q holds them though they are discrete."""
        ...

    def plan(self, pvi: Any, opening: Opening, init_params: dict | None) -> Begun:
        """Split the model, and find the structure of every factor."""
        ...

    def first_state(self, pvi: Any, begun: Begun, init_params: dict | None) -> PVIState:
        """The state that rounds begin with, at the params given; raises ``ImproperError`` where q is not normalisable."""
        ...

    def other_start(
        self, pvi: Any, state: PVIState, init_params: dict | None, dynamic: list, static: tuple
    ) -> PVIState | None:
        """A fresh state with q where the guide starts, for a run that cannot leave its own; None where that was asked for."""
        ...

    def at_natural(self, state: PVIState, wanted: Any) -> PVIState:
        """A fresh state with its q moved to natural parameters."""
        ...

    def read_prior(self, pvi: Any, state: PVIState, dynamic: list, static: tuple) -> Any:
        """The exactly held prior as the model has it now; raises ``StateError`` where it is of another family."""
        ...

    def params(self, guide: Any, state: PVIState) -> dict[str, Any]:
        """The guide's params."""
        ...

    def distributions(
        self, pvi: Any, state: PVIState, what: str, joint: bool, agent: Hashable | None = None
    ) -> dict[Any, Any]:
        """Marginals of every latent in its own support: see :meth:`numpyro_pvi.PVI.posterior` and :meth:`numpyro_pvi.PVI.prior`."""
        ...

    def words(self, state: PVIState, solver: Any) -> tuple[FactorWords, FactorWords]:
        """The groups' factors and the prior's."""
        ...

    def khat(
        self, pvi: Any, state: PVIState, args: tuple, kwargs: dict, rng_key: Any, num_samples: int, by_group: bool
    ) -> Any:
        """Pareto k-hat of q, or of every group's site: see :mod:`numpyro_pvi.diagnostics`."""
        ...

    def judge(
        self, pvi: Any, plan: Any, rng_key: Any, q: Any, sites: Any, rows: tuple, num_samples: int
    ) -> list[float]:
        """Of groups whose rows are here, at the same draws from a q that is told.

        ``plan``: of these rows; ``q``, ``sites``: natural parameters, those of the groups with a leading axis; ``rows``: their
        packing, the model's positional and keyword arguments, and constrained values of its params. Returns k-hat of each.
        """
        ...

    def shared_to_arviz(
        self, pvi: Any, state: PVIState, args: tuple, kwargs: dict, rng_key: Any, num_samples: int, trace: Any
    ) -> Any:
        """Draws of the latents that all share as ArviZ data, where the rows are elsewhere."""
        ...

    def arrival(self, solver: Any, plan: Any, table: GroupTable, rows: dict[str, int]) -> Arrival:
        """Where the rows of groups that come stand."""
        ...

    def arrived(self, pvi: Any, state: PVIState, dynamic: list, static: tuple, known: Any) -> tuple[dict, Any]:
        """Fields of the state of groups that have come, and their factors beside the model; None where rounds compare them."""
        ...

    def demoted(self, pvi: Any, state: PVIState, found: list, dynamic: list, static: tuple) -> PVIState:
        """The state with contradicted structure given up: see :func:`numpyro_pvi._verified.demoted`."""
        ...

    def guide_latents(self, guide: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of the latents of a guide that is set up, measured as the plan's are."""
        ...

    def check_guide(self, guide: Any, plan: Any) -> None:
        """Raise ``StateError`` for a guide, set up, with a plan's latents but not their families."""
        ...

    def check_family(self, guide: Any, plan: Any) -> None:
        """Raise ``StateError`` for a guide with a q of another family than a plan's, as far as it knows before its set-up."""
        ...

    def check_solver(self, solver: Any, plan: Any) -> None:
        """Raise ``PVIError`` for a solver that cannot treat the factors of a plan which another may have been made for."""
        ...

    def memories(self, pvi: Any, state: PVIState, dynamic: list, static: tuple) -> dict[str, Any]:
        """Shapes of the memories that solver and schedule of the PVI begin with at a state, by field of the state; traced only."""
        ...

    def guide_settings(self, guide: Any, words: Callable[[Any], str]) -> dict[str, str]:
        """What must be the same of a guide where a state goes on, in words."""
        ...

    def types(self, guide: Any) -> dict[str, type]:
        """Types of plans and states by name that the guide knows."""
        ...


def begin_fit(
    pvi: Any, rng_key: Any, args: tuple, kwargs: dict, init_params: dict | None = None, plan_key: Any = None
) -> Begun:
    """Split a model and find the structure of every factor; where the rows are elsewhere, ask for what was found there.

    ``plan_key``: random key of the points at which structure is looked for; None takes one of ``rng_key``'s. Returns the plan.
    How sites are held is still to be decided. Raises PVIError as of ``PVI.init``.
    """
    opening = open_call(pvi, rng_key, args, kwargs, pvi._fit.families(pvi.guide))
    if plan_key is not None:
        opening = dataclasses.replace(opening, plan_key=plan_key)
    with lengths_named(opening.untouched):
        opening.set_up(pvi.guide)
        return pvi._fit.plan(pvi, opening, init_params)


# ------------------------------------------------------------------------------------------------------------- Gaussian


class GaussianFit:
    """Implements :class:`Fit` for guides whose q is a Gaussian in unconstrained space."""

    plan_type, stores_memories = Plan, False

    def engine(self, pvi: Any, num_particles: int) -> Engine:
        """An engine of one block."""
        return Engine(pvi.model, pvi.solver, pvi.schedule, pvi.runtime, pvi.optim, num_particles)

    def families(self, guide: Any) -> Collection[str]:
        """None: discrete latents are summed out."""
        return ()

    def plan(self, pvi: Any, opening: Opening, init_params: dict | None) -> Begun:
        """Find what every factor is in unconstrained space."""
        args, kwargs, plan_key = opening.args, opening.kwargs, opening.plan_key
        own = model_layout(opening.trace)
        layout = Layout(*guide_layout(pvi.guide, dict(zip(own.names, own.shapes, strict=True))))
        family, elsewhere = family_of(pvi.guide, layout.dim), pvi.runtime.elsewhere

        def split(opening: Opening) -> Planned:
            if elsewhere is not None:
                return elsewhere.plan(pvi, layout, family, (args, kwargs, opening.signature), plan_key)
            planned = plan_factors(opening.partition, args, kwargs, key=plan_key, layout=layout)
            refuse_nothing_shared(planned.plan)
            return planned

        opening, planned = opening.plan(pvi, split)
        # Latents inside the plate are not q's.
        family = family_of(pvi.guide, planned.plan.layout.dim)
        if elsewhere is None:
            planned = as_the_solver_takes(pvi.solver, planned, family.full)
        plan = Plan(planned.plan, family, opening.signature, tied=pvi.solver.tied)
        params = initial_params(planned.params, init_params, pvi.optim is not None)
        optim_state = init_optim(pvi.optim, pvi.guide, params)
        dynamic, static = split_arguments(args, kwargs)
        return Begun(opening, planned, plan, optim_state, dynamic, static, planned.prior_loc)

    def first_state(self, pvi: Any, begun: Begun, init_params: dict | None) -> PVIState:
        """Sites at 1, at curvatures, or where the guide starts: see ``init_sites`` of :class:`numpyro_pvi.PVI`."""
        plan, planned, optim_state = begun.plan, begun.planned, begun.optim_state
        given = given_to_guide(pvi, begun.planned, init_params)
        arguments = begun.dynamic, begun.static
        if pvi.runtime.elsewhere is None:
            seen = planned, begun.opening.trace, arguments, init_params, begun.opening.plan_key
            plan = choose_rows(pvi._engine, pvi.guide, plan, *seen)
        packing = begun.lay_out(pvi, plan)
        local = None if planned.local_loc is None else (planned.local_loc, planned.local_sd)

        def start(plan: Plan, mode: str | None = None) -> Any:
            asked = "prior" if given else start_mode(pvi.guide, pvi.init_sites, plan, init_params, pvi.schedule)
            mode = asked if mode is None else mode
            fixed = plan, packing, *arguments, optim_state, planned.prior_loc, planned.prior_sd, local
            run = partial(start_arrays, pvi._engine, *fixed, mode=mode, level=pvi._level(plan, *arguments, often=False))
            return watched(pvi.runtime, plan, run)

        arrays, outside, proper = start(plan)
        if bool(outside):
            # A correlated Gaussian prior is outside a mean-field family: its latents go to the prior factor.
            moved = as_the_solver_takes(pvi.solver, move_to_prior_factor(planned), plan.family.full)
            plan = dataclasses.replace(plan, partition=moved.plan)
            arrays, _, proper = start(plan)
        if not bool(proper) and pvi.init_sites == "auto" and not streams(pvi.schedule):
            # An improper prior that the data complete: q is normalisable from the factors' curvature only.
            arrays, _, proper = start(plan, "curvature")
        check_structure(pvi.solver, plan)
        state = PVIState(rng_key=begun.opening.key, optim_state=optim_state, packing=packing, plan=plan, **arrays)
        if given and state.sites.local is None:
            state = at_given(pvi.guide, state, given)
            proper = state.plan.family.in_domain(posterior(state.prior, state.sites))
        if init_params is not None:
            state = spread_params(pvi.guide, state, init_params)
            proper = state.plan.family.in_domain(posterior(state.prior, state.sites))
        return better_start(pvi, state, planned, proper, init_params, *arguments)

    def other_start(
        self, pvi: Any, state: PVIState, init_params: dict | None, dynamic: list, static: tuple
    ) -> PVIState | None:
        """As under SVI, or nearer to 0: see :func:`numpyro_pvi._initial.best_guide_start`."""
        return best_guide_start(pvi, state, dynamic, static)[0] if is_free(pvi, state, init_params) else None

    def at_natural(self, state: PVIState, wanted: Any) -> PVIState:
        """In equal shares of every factor's site."""
        return at_natural(state, wanted)

    def read_prior(self, pvi: Any, state: PVIState, dynamic: list, static: tuple) -> Any:
        """A Gaussian."""
        trace = abstract_trace(pvi.model, jax.random.key(0), *join_arguments(dynamic, static))
        for name in state.plan.partition.exact:
            if not isinstance(base_distribution(trace[name]["fn"]), GAUSSIAN):
                raise other_family(name)
        return _read(pvi._engine, state.plan, state.packing, dynamic, static, state.optim_state, level="cheap")

    def params(self, guide: Any, state: PVIState) -> dict[str, Any]:
        """A location, and scales or the root of a covariance."""
        return guide_params(guide, state)

    def distributions(
        self, pvi: Any, state: PVIState, what: str, joint: bool, agent: Hashable | None = None
    ) -> dict[Any, Any]:
        """Gaussians seen through the bijection of each latent's support, local latents' among them for the posterior."""
        trace = prototype(pvi, state)
        if state.plan.rows is not None and agent is None:
            return row_distributions(state, trace, what, joint)
        natural = natural_of(pvi.schedule, state, what, agent)
        found = latent_distributions(state.plan, natural, trace, what, joint)
        if what == "prior":
            return found
        found |= local_distributions(state, natural, trace)
        return SharedOnly(found, state.plan.partition.local) if isinstance(state.sites.local, Held) else found

    def words(self, state: PVIState, solver: Any) -> tuple[FactorWords, FactorWords]:
        """What the partition's plan says of them."""
        part = state.plan.partition
        found, known = part.likelihood if part.enumeration is None else "enumerated", part.evidence("likelihood")
        groups = FactorWords(found, words_of(part.likelihood, state, 0, solver), known)
        if not part.has_prior_factor:
            return groups, groups
        known = part.evidence("prior") if part.prior_kind == "affine" else ""
        return groups, FactorWords(part.prior_kind, words_of(part.prior_kind, state, 1, solver), known)

    def khat(
        self, pvi: Any, state: PVIState, args: tuple, kwargs: dict, rng_key: Any, num_samples: int, by_group: bool
    ) -> Any:
        """In unconstrained space, Jacobians included."""
        local, params = None if state.plan.partition.local is None else by_unit(state), pvi._param_values(state)
        fixed = FullPlates(state.plan.partition.model(pvi.model)), dense_form(state), args, kwargs, params
        by_clients = partial(diagnostics.khat_by_group, elsewhere=pvi.runtime.elsewhere)
        judge = by_clients if by_group else diagnostics.khat
        return judge(rng_key, *fixed, num_samples=num_samples, local=local)

    def judge(
        self, pvi: Any, plan: Any, rng_key: Any, q: Any, sites: Any, rows: tuple, num_samples: int
    ) -> list[float]:
        """See :func:`numpyro_pvi.diagnostics.khat_of_sites`."""
        fixed = rng_key, FullPlates(plan.partition.model(pvi.model)), plan.partition, plan.family, q, sites
        return diagnostics.khat_of_sites(*fixed, *rows, num_samples=num_samples)

    def shared_to_arviz(
        self, pvi: Any, state: PVIState, args: tuple, kwargs: dict, rng_key: Any, num_samples: int, trace: Any
    ) -> Any:
        """See :func:`numpyro_pvi.export.shared_to_arviz`."""
        model, q = FullPlates(state.plan.partition.model(pvi.model)), posterior(state.prior, state.sites)
        fixed = model, state.plan, q, args, kwargs, pvi._param_values(state)
        return export.shared_to_arviz(rng_key, *fixed, num_samples=num_samples, trace=trace)

    def arrival(self, solver: Any, plan: Any, table: GroupTable, rows: dict[str, int]) -> Arrival:
        """See :func:`numpyro_pvi.factors.arrive`."""
        return arrive(plan.partition, table, rows, plan.family.full)

    def arrived(self, pvi: Any, state: PVIState, dynamic: list, static: tuple, known: Any) -> tuple[dict, Any]:
        """New groups' sites at 1, since q has been informed by others; or at the curvature that was asked for."""
        mode = "curvature" if pvi.init_sites == "curvature" else "prior"
        return arrive_groups(pvi._engine, reduced(state, pvi._engine), dynamic, static, known, mode=mode)

    def demoted(self, pvi: Any, state: PVIState, found: list, dynamic: list, static: tuple) -> PVIState:
        """Factors are taken by draws."""
        return demoted(pvi, state, found, dynamic, static)

    def guide_latents(self, guide: Any) -> dict[str, tuple[int, ...]]:
        """In unconstrained space."""
        return {name: tuple(jnp.shape(value)) for name, value in guide._init_locs.items()}

    def check_guide(self, guide: Any, plan: Any) -> None:
        """Nothing is left to compare: one family holds all latents."""

    def check_family(self, guide: Any, plan: Any) -> None:
        """Full covariance, or none."""
        own = family_of(guide, plan.family.dim)
        if type(own) is not type(plan.family):
            kinds = [f"a q with {'full' if f.full else 'diagonal'} covariance" for f in (plan.family, own)]
            raise StateError(
                f"this state has {kinds[0]}, and the guide {type(guide).__name__} is {kinds[1]}. Begin anew with this PVI, without "
                "init_state, or make the PVI with the guide of the state."
            )

    def check_solver(self, solver: Any, plan: Any) -> None:
        """See :func:`numpyro_pvi._initial.check_structure`."""
        check_structure(solver, plan)

    def memories(self, pvi: Any, state: PVIState, dynamic: list, static: tuple) -> dict[str, Any]:
        """As of groups that no round has visited."""

        def begin(state: PVIState, dynamic: list) -> dict[str, Any]:
            return pvi._engine.memories(state, *join_arguments(dynamic, static))

        return jax.eval_shape(begin, reduced(state, pvi._engine), dynamic)

    def guide_settings(self, guide: Any, words: Callable[[Any], str]) -> dict[str, str]:
        """How wide it starts under SVI, where a fit may start as well."""
        return {"init_scale": words(guide._init_scale)}

    def types(self, guide: Any) -> dict[str, type]:
        """None beside the package's own."""
        return {}


@partial(owned_jit, static_argnames=("engine", "plan", "static"))
def _read(engine: Engine, plan: Plan, packing: Any, dynamic: list, static: tuple, optim_state: Any) -> Any:
    """The exactly held prior, compiled."""
    args, kwargs = join_arguments(dynamic, static)
    call = whole_call(engine.model, plan.partition, args, kwargs, engine.constrain(plan, args, kwargs, optim_state))
    return engine.held_prior(plan, call, packing)[0]
