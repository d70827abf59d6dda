"""PVI for guides whose latents keep their own supports: sites are terms of the product of the latents' families."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import diagnostics
from ._arriving_groups import Newcomers
from ._closures import follows
from ._compiling import on_device, owned_jit
from ._contracts import not_under_families
from ._endings import limits
from ._exponential_demoted import demoted
from ._exponential_locals import begun, inside_of, plan_beside
from ._exponential_matching import expectation_of, matching_info, ready_to_match
from ._exponential_partial import blocks_of, check_partial
from ._exponential_plan import components_of, plan_product, product_prior_now, turns_of
from ._exponential_stream import ProductNewcomers, refuse_own_rows, start_of
from ._group_lifecycle import refuse_absent
from ._initial import away_from, init_optim, initial_params
from ._inspection import open_call
from ._posterior_views import agent_natural, factor_labels, last_round, optim_notes, split_notes
from ._prior_now import with_prior_of_now
from ._state import Plan, PVIInfo, PVIState
from ._user_inputs import check_state, float_dtype, positional_names
from .errors import ImproperError, PVIError, StateError
from .factors import ValueCall, is_latent, join_arguments, split_arguments
from .families import ProductNatural
from .guides import NOT_SET_UP, keeps_supports
from .pvi import PVI
from .runtime import LaxMap, ProductEngine, Vmap, spread
from .schedules import Points, Rule
from .sites import MemberSites, SiteStack, posterior

_RUNTIMES = Vmap, LaxMap


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
        _check_choices(self.solver, self.schedule, self.runtime, self.init_sites)
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
        check_partial(self.solver, self.schedule, plan)
        state = self._first_state(plan, planned.packing, prior, base_site, opening.key)
        state = dataclasses.replace(state, optim_state=init_optim(self.optim, self.guide, params))
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
        self._memory.keep(state, split_arguments(args, kwargs)[0])
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
        members, found = state.plan.family.to_distribution(natural), {}
        for block in _product_plan(state).blocks:
            whole = members[block.name]
            found[self.guide._name(block.latents[0], "joint_loc")] = whole.mean
            found[self.guide._name(block.latents[0], "joint_scale_tril")] = whole.scale_tril
        for name, latent in self.guide._latents.items():
            found |= {self.guide._name(name, p): x for p, x in latent.params(members[name]).items()}
        return found

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
            **last_round(state, report, self.schedule),
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
        return ProductNewcomers(self.model, positional_names(self.model), start, self._drive, self.solver, False)

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


def _check_choices(solver: Any, schedule: Any, runtime: Any, init_sites: str) -> None:
    solver.check_families()
    schedule.check_families(solver)
    if type(runtime) not in _RUNTIMES:
        raise not_under_families("runtime", runtime, "Vmap() or LaxMap()")
    if init_sites == "curvature":
        raise PVIError(
            "init_sites='curvature' is for Gaussian guides; under AutoExponentialFamily q starts at the prior. Leave it out, or "
            "give init_params."
        )
