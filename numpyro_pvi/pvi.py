"""PVI, the one shell: joins the rooms and holds no algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.infer import SVI, Trace_ELBO

from . import diagnostics, export
from ._driver import drive
from ._entry import (
    check_keywords,
    check_loss,
    compare_forms,
    evaluate_evidence,
    evaluate_loss,
    evidence_of,
    float_dtype,
    is_traced,
    positional_names,
    run_rounds,
    start_arrays,
)
from ._initial import initial_params, refuse_improper, refuse_nothing_shared, spread_params
from ._locals import by_unit, joint_params, local_distributions
from ._state import Plan, PVIInfo, PVIRunResult, PVIState
from ._views import NaturalView, describe, latent_distributions, trace_of
from .errors import PartitionError, PVIError, StateError
from .factors import (
    Layout,
    abstract_trace,
    as_arrays,
    check_finite_arguments,
    check_same_signature,
    enumerated,
    model_layout,
    move_to_prior_factor,
    plan_factors,
    refuse_unsupported,
    signature_of,
    split_arguments,
    with_expectation,
)
from .guides import (
    check_guide,
    family_of,
    guide_layout,
    guide_param_names,
    natural_to_params,
    param_transforms,
    setup_guide,
)
from .handlers import PRIOR, FullPlates, Partition, find_plates, pick_plate
from .runtime import Engine, RoundsDone, Runtime, Vmap
from .schedules import Schedule, Synchronous
from .sites import cavity, posterior, take
from .solvers import LocalSolver, NaturalGradient

_DEFAULT_GROUPS = 10


class PVI(SVI):
    """Partitioned variational inference with the interface of ``numpyro.infer.SVI``.

    The posterior is ``q(theta) ~ p(theta) prod_m t_m(theta)``: every group's exact factor ``p(y_m | theta)`` is stood
    in for by a *site* t_m, a Gaussian factor in unconstrained space. ``solver`` refines one site, ``schedule`` says
    which groups move when and how far, ``runtime`` where it runs. Results come back under the guide's own names, so
    ``Predictive``, ``guide.median`` and ArviZ work as after SVI.

    Args:
        model: a NumPyro model, or a :class:`numpyro_pvi.Partition` of one (groups by label).
        guide: ``AutoMultivariateNormal``, ``AutoDiagonalNormal`` or ``AutoNormal`` of the same model.
        optim: NumPyro, JAX or optax optimiser of the model's ``numpyro.param`` sites. It does not fit q.
        loss: gives the number of particles where the loss is Monte Carlo.
        solver: local solver; :class:`numpyro_pvi.solvers.NaturalGradient` by default.
        schedule: :class:`numpyro_pvi.schedules.Synchronous` by default.
        num_groups: number of random blocks of the only plate with observed sites, for a model that is not a
            ``Partition``; ``min(10, plate size)`` by default.
        init_sites: "prior" (sites at 1), "curvature" (each site the positive semi-definite curvature of its factor at
            the prior's location), or "auto": the prior where a fixed quadrature rule can resolve the factors there,
            else curvature where the structure gives it cheaply.
        runtime: :class:`numpyro_pvi.runtime.Vmap` by default.
        static_kwargs: keyword arguments of the model, as in SVI; checked against its signature.

    Raises:
        GuideError: for a guide that is not one of the three.
        PVIError: for an unknown keyword, an unsupported loss, or choices that do not fit together.

    References:
        Ashman et al., Partitioned Variational Inference: A Framework for Probabilistic Federated Learning.
    """

    def __init__(
        self,
        model: Callable | Partition,
        guide: Any,
        optim: Any = None,
        loss: Any = None,
        *,
        solver: LocalSolver | None = None,
        schedule: Schedule | None = None,
        num_groups: int | None = None,
        init_sites: str = "auto",
        runtime: Runtime | None = None,
        **static_kwargs: Any,
    ):
        loss = Trace_ELBO() if loss is None else loss
        check_loss(loss)
        check_guide(guide)
        inner = model.fn if isinstance(model, Partition) else model
        check_keywords(inner, static_kwargs, type(self).__init__, type(self).run)
        if init_sites not in ("auto", "prior", "curvature"):
            raise PVIError(f"init_sites={init_sites!r}: expected 'auto', 'prior' or 'curvature'.")
        if isinstance(model, Partition) and num_groups is not None:
            raise PVIError(
                "num_groups is given beside a Partition; write the number there: Partition(model, plate, num_groups)."
            )
        if isinstance(model, Partition) and model.group is not None:
            raise PVIError("the Partition is restricted to one group; pass it without `group`.")
        solver, schedule, runtime = solver or NaturalGradient(), schedule or Synchronous(), runtime or Vmap()
        for value, kind, word in (
            (solver, LocalSolver, "solver"),
            (schedule, Schedule, "schedule"),
            (runtime, Runtime, "runtime"),
        ):
            if isinstance(value, type) or not isinstance(value, kind):
                raise PVIError(f"{word}={value!r} is not a {word}; pass an instance, such as {_EXAMPLES[word]}.")
        if optim is not None:
            super().__init__(inner, guide, optim, loss, **static_kwargs)
        else:
            self.model, self.guide, self.loss, self.optim = inner, guide, loss, None
            self.static_kwargs, self.constrain_fn = static_kwargs, None
        self.partition = model if isinstance(model, Partition) else None
        self.num_groups, self.init_sites = num_groups, init_sites
        self.solver, self.schedule, self.runtime = solver, schedule, runtime
        self._labels: tuple = ()
        # Plates that draw mini-batches run over all of their rows here, wherever the model is evaluated.
        self._full_model = FullPlates(inner)
        self._engine = Engine(inner, solver, schedule, runtime, self.optim, int(getattr(loss, "num_particles", 1)))
        self._rounds = jax.jit(run_rounds, static_argnames=("engine", "static", "length", "fine"))
        self._start = jax.jit(start_arrays, static_argnames=("engine", "plan", "static", "mode"))
        self._loss = jax.jit(evaluate_loss, static_argnames=("engine", "static", "fine"))
        self._evidence = jax.jit(evaluate_evidence, static_argnames=("engine", "static", "fine"))

    # ------------------------------------------------------------------ SVI's verbs

    def init(self, rng_key: Any, *args: Any, init_params: dict | None = None, **kwargs: Any) -> PVIState:
        """Plan the partition, find the structure of every factor, and make the first state.

        Args:
            rng_key: random key.
            args: the model's positional arguments.
            init_params: guide params (constrained values, possibly partial) to start q from, spread over the sites in
                equal shares, and values of ``numpyro.param`` sites.
            kwargs: the model's keyword arguments.

        Returns:
            The state. It holds no data.

        Raises:
            PartitionError: when the model cannot be split.
            GuideError: when the guide was made for another model.
            DataError: for NaN or infinity in the arguments.
            ImproperError: when q is not normalisable (an improper prior that no data completes).
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((rng_key, args, kwargs))):
            raise PVIError(
                "jit(pvi.init) is not possible: planning looks at values. Call pvi.init eagerly; jit pvi.update."
            )
        names = positional_names(self.model)
        args, kwargs = self._arguments(args, kwargs)
        check_finite_arguments(args, kwargs, names)
        key, guide_key, plan_key = jax.random.split(rng_key, 3)
        trace = abstract_trace(self.model, plan_key, args, kwargs)
        refuse_unsupported(trace)
        partition = self.partition or self._default_partition(trace)
        rows = partition.row_axes(trace)
        _, trace, enumeration = enumerated(self.model, trace, rows, plan_key, args, kwargs)
        setup_guide(self.guide, guide_key, args, kwargs, enumeration and enumeration.wrap)
        own = model_layout(trace)
        layout = Layout(*guide_layout(self.guide, dict(zip(own.names, own.shapes, strict=True))))
        planned = plan_factors(partition, args, kwargs, key=plan_key, layout=layout)
        refuse_nothing_shared(planned.plan)
        family = family_of(self.guide, planned.plan.layout.dim)
        expectation = getattr(self.solver, "expectation", "auto")
        planned = with_expectation(planned, expectation, family.full)
        plan = Plan(planned.plan, family, signature_of(args, kwargs, names))
        params = initial_params(planned.params, init_params, self.optim is not None)
        optim_state = self._init_optim(plan, params)
        dynamic, static = split_arguments(args, kwargs)

        if planned.plan.unstructured == "monte_carlo":
            form = self._draws_form(plan, planned, dynamic, static, optim_state, plan_key)
            planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, unstructured=form))
            plan = dataclasses.replace(plan, partition=planned.plan)
        local = None if planned.local_loc is None else (planned.local_loc, planned.local_sd)

        def start(plan, mode=None):
            mode = self._start_mode(plan, init_params) if mode is None else mode
            moments = planned.prior_loc, planned.prior_sd, local
            return self._start(self._engine, plan, planned.packing, dynamic, static, optim_state, *moments, mode=mode)

        arrays, outside, proper = start(plan)
        if bool(outside):
            # A correlated Gaussian prior is outside a mean-field family: its latents go to the prior factor.
            moved = with_expectation(move_to_prior_factor(planned), expectation, family.full)
            plan = dataclasses.replace(plan, partition=moved.plan)
            arrays, _, proper = start(plan)
        if not bool(proper) and self.init_sites == "auto":
            # An improper prior that the data complete: q is normalisable from the factors' curvature only.
            arrays, _, proper = start(plan, "curvature")
        self._check_structure(plan)
        state = PVIState(rng_key=key, optim_state=optim_state, packing=planned.packing, plan=plan, **arrays)
        if init_params is not None:
            state = spread_params(self.guide, state, init_params)
            proper = state.plan.family.in_domain(posterior(state.prior, state.sites))
        if not bool(proper):
            refuse_improper(state)
        self._labels = plan.partition.table.labels
        return state

    def update(
        self, state: PVIState, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[PVIState, Float[Array, ""]]:
        """One round of the schedule.

        Args:
            state: current state.
            args: the model's positional arguments, of the shapes given to ``init``.
            forward_mode_differentiation: accepted for SVI's sake; PVI differentiates each factor in the mode that suits
                it.
            kwargs: the model's keyword arguments.

        Returns:
            ``(state, loss)``; the loss is the negative global ELBO in nats of the q *after* the round (SVI's is the one
            before).
            While q still moves by more than a posterior sd in a round, quadrature may leave a relative error of up to
            2e-2 in it; on settled states the target is 1e-8 (1e-5 in float32).

        Raises:
            StateError: when the arguments differ in structure, shape or dtype from those given to ``init``.
        """
        del forward_mode_differentiation
        args, kwargs = self._checked_arguments(state, args, kwargs)
        dynamic, static = split_arguments(args, kwargs)
        never = jnp.asarray(-1.0, float_dtype())
        done = self._advance(state, dynamic, static, jnp.int32(1), never, 1)
        if not is_traced(done.done) and int(done.done) == 0:
            done = self._advance(done.state, dynamic, static, jnp.int32(1), never, 1)
        return done.state, done.losses[0]

    def stable_update(
        self, state: PVIState, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[PVIState, Float[Array, ""]]:
        """The same as :meth:`update`: a PVI round never takes a step to an invalid q or from a non-finite factor."""
        return self.update(state, *args, forward_mode_differentiation=forward_mode_differentiation, **kwargs)

    def evaluate(self, state: PVIState, *args: Any, **kwargs: Any) -> Float[Array, ""]:
        """Negative global ELBO at a state, in nats; ``update``'s loss equals this at the state it returns."""
        args, kwargs = self._checked_arguments(state, args, kwargs)
        dynamic, static = split_arguments(args, kwargs)
        fine = state.plan.fine or is_traced((state, dynamic))
        loss, missed = self._loss(self._engine, state, dynamic, static, fine=fine)
        if not fine and bool(missed):
            loss, _ = self._loss(self._engine, state, dynamic, static, fine=True)
        return loss

    def get_params(self, state: PVIState) -> dict[str, Any]:
        """The guide's params (constrained, under the guide's own names) and the model's ``numpyro.param`` values."""
        part = state.plan.partition
        q = posterior(state.prior, state.sites)
        if part.local is not None:
            params = joint_params(self.guide, state, q)
        else:
            params = natural_to_params(self.guide, state.plan.family, part.layout.names, part.layout.shapes, q)
        params.update(self._param_values(state))
        return params

    def run(
        self,
        rng_key: Any,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: PVIState | None = None,
        init_params: dict | None = None,
        tol: float | None = None,
        callback: Callable[[int, PVIState, PVIInfo], bool | None] | None = None,
        loss_every: int = 1,
        **kwargs: Any,
    ) -> PVIRunResult:
        """Run up to ``num_steps`` rounds of the schedule in compiled blocks.

        Args:
            rng_key: random key; ignored when ``init_state`` is given, as in SVI.
            num_steps: number of rounds, at least 1.
            args: the model's positional arguments.
            progress_bar: show rounds, ELBO and the largest move in posterior sds.
            stable_update: accepted for SVI's sake; every PVI round is stable.
            forward_mode_differentiation: accepted for SVI's sake.
            init_state: continue from this state.
            init_params: see :meth:`init`.
            tol: stop when no posterior mean or log sd moves by more than ``tol`` posterior sds in a round.
            callback: called after every round with ``(rounds done, state, info)``; returning True stops.
            loss_every: rounds between reported losses; the others are NaN.
            kwargs: the model's keyword arguments.

        Returns:
            ``(params, state, losses)`` with ``.info``, ``.converged``, ``.message`` and ``.trace``. On KeyboardInterrupt the result
            holds the last state that was finished, and says so.

        Raises:
            PVIError: for ``num_steps`` below 1.
            SkippedGroupError: when a group was skipped in 10 rounds running; its ``.state`` is the last good state.
        """
        del stable_update, forward_mode_differentiation
        if not isinstance(num_steps, (int, np.integer)) or num_steps < 1:
            raise PVIError(f"num_steps={num_steps!r}: expected a positive int, the number of rounds.")
        if tol is not None and not tol > 0:
            raise PVIError(f"tol={tol!r}: expected a positive number of posterior sds, or None.")
        if not isinstance(loss_every, (int, np.integer)) or loss_every < 1:
            raise PVIError(f"loss_every={loss_every!r}: expected a positive int.")
        state = self.init(rng_key, *args, init_params=init_params, **kwargs) if init_state is None else init_state
        args, kwargs = self._checked_arguments(state, args, kwargs)
        dynamic, static = split_arguments(args, kwargs)

        def rounds(state, count, tol, length):
            return self._advance(state, dynamic, static, count, tol, length)

        run = drive(rounds, self.info, state, int(num_steps), tol, callback, progress_bar)
        losses = jnp.where((jnp.arange(1, len(run.losses) + 1) % loss_every) == 0, run.losses, jnp.nan)
        trace = trace_of(run.state, run.losses, run.reports)
        params, info = self.get_params(run.state), self.info(run.state)
        return PVIRunResult(params, run.state, losses, info, run.converged, run.message, trace)

    # ------------------------------------------------------------------ what SVI does not have

    def posterior(self, state: PVIState, joint: bool = False) -> dict[Any, Any]:
        """Marginal posterior of every latent, as NumPyro distributions in the latents' own supports.

        Args:
            state: a state.
            joint: also give the joint Gaussian over all latents' unconstrained coordinates, under the tuple of their
                names (q of full covariance only).

        Returns:
            Distributions by latent name.

        Raises:
            ImproperError: when q is not normalisable.
        """
        q = posterior(state.prior, state.sites)
        found = self._distributions(state, q, "posterior", joint)
        return found | local_distributions(state, q, self.guide.prototype_trace)

    def prior(self, state: PVIState, joint: bool = False) -> dict[Any, Any]:
        """Marginal prior of every latent; for a prior outside the family, the distribution of the PRIOR site.

        Args:
            state: a state.
            joint: as in :meth:`posterior`.

        Returns:
            Distributions by latent name.

        Raises:
            ImproperError: when the prior (or its site) is not normalisable.
        """
        natural = state.prior if state.sites.prior is None else state.prior + state.sites.prior
        return self._distributions(state, natural, "prior", joint)

    def site(self, state: PVIState, group: Hashable) -> NaturalView:
        """One group's site t_m in natural space; ``numpyro_pvi.PRIOR`` names the prior factor's.

        Args:
            state: a state.
            group: the group's label.

        Returns:
            Natural parameters, with ``.to_distribution()``, which raises where they are not normalisable.

        Raises:
            PartitionError: for an unknown label.
        """
        return NaturalView(self._site(state, group), state.plan.family, f"site of group {group!r}")

    def cavity(self, state: PVIState, group: Hashable) -> NaturalView:
        """q without one group's site, in natural space; see :meth:`site`."""
        q = posterior(state.prior, state.sites)
        return NaturalView(cavity(q, self._site(state, group)), state.plan.family, f"cavity of group {group!r}")

    def log_evidence(self, state: PVIState, *args: Any, with_error: bool = False, **kwargs: Any) -> Any:
        """Estimate of log p(y) in nats: the global ELBO, a lower bound, for variational solvers; EP's own for ``PowerEP``.

        ``A(eta_q) - A(eta_0) + sum_m (1/alpha) [log Z_m + A(eta_q - alpha eta_m) - A(eta_q)]`` with ``Z_m`` the mean of
        ``p(y_m | theta)^alpha`` under the normalised cavity. It is stationary in the sites at a fixed point, no bound, and
        exact for quadratic factors.

        Args:
            state: a state.
            args: the model's positional arguments.
            with_error: also give the Monte Carlo standard error (0 where nothing is sampled).
            kwargs: the model's keyword arguments.

        Returns:
            Nats; with ``with_error`` the pair ``(value, standard error)``.
        """
        args, kwargs = self._checked_arguments(state, args, kwargs)
        found = evidence_of(self._evidence, self._engine, state, args, kwargs, self.evaluate)
        return found if with_error else found[0]

    def info(self, state: PVIState) -> PVIInfo:
        """What happened to every factor in the last round; ``print`` it for a table."""
        notes = ()
        if self.optim is not None and not state.plan.partition.params:
            notes = ("optim was given, but the model has no numpyro.param site: there is nothing for it to optimise.",)
        return describe(state, notes)

    @property
    def groups(self) -> tuple:
        """Labels of the groups of the last ``init``, in the order of every stacked array; a state's own are in its plan."""
        return self._labels

    def khat(self, state: PVIState, *args: Any, rng_key: Any, num_samples: int = 1000, **kwargs: Any) -> float:
        """Pareto k-hat of importance weights from q to the exact posterior: below .7 q is usable, below .5 good.

        Args:
            state: a state.
            args: the model's positional arguments.
            rng_key: random key.
            num_samples: draws from q; each costs one evaluation of the model on all rows.
            kwargs: the model's keyword arguments.

        Returns:
            k-hat.

        References:
            Yao et al., Yes, but Did It Work?: Evaluating Variational Inference, section 3.
        """
        args, kwargs = self._checked_arguments(state, args, kwargs)
        local, params = None if state.plan.partition.local is None else by_unit(state), self._param_values(state)
        return diagnostics.khat(
            rng_key,
            state.plan.partition.model(self._full_model),
            state,
            args,
            kwargs,
            params,
            num_samples=num_samples,
            local=local,
        )

    def to_arviz(
        self, rng_key: Any, state_or_result: PVIState | PVIRunResult, *args: Any, num_samples: int = 1000, **kwargs: Any
    ) -> Any:
        """Posterior draws and log-likelihoods as ArviZ data, with chain and draw dimensions.

        Args:
            rng_key: random key.
            state_or_result: a state, or what ``run`` returned; that has a trace, which becomes the group ``rounds``.
            args: the model's positional arguments.
            num_samples: draws.
            kwargs: the model's keyword arguments.

        Returns:
            ``InferenceData`` (ArviZ 0.23) or ``DataTree`` (1.x); log-likelihoods use the fitted ``numpyro.param``
            values.
        """
        state = state_or_result if isinstance(state_or_result, PVIState) else state_or_result.state
        args, kwargs = self._checked_arguments(state, args, kwargs)
        model, params = state.plan.partition.model(self._full_model), self.get_params(state)
        trace = getattr(state_or_result, "trace", None)
        return export.to_arviz(rng_key, model, self.guide, params, args, kwargs, num_samples=num_samples, trace=trace)

    # ------------------------------------------------------------------ joints between the rooms

    def _draws_form(self, plan: Plan, planned: Any, dynamic: list, static: tuple, optim_state: Any, key: Any) -> str:
        """Second derivatives where they see all of the curvature, Stein's identity where gradients jump."""
        compare = jax.jit(compare_forms, static_argnames=("engine", "plan", "static"))
        jumps = compare(
            self._engine, plan, planned.packing, dynamic, static, optim_state, planned.prior_loc, planned.prior_sd, key
        )
        return "stein" if bool(jumps) else "hessian"

    def _advance(self, state: PVIState, dynamic: list, static: tuple, count, tol, length: int) -> RoundsDone:
        """Run rounds; a state whose rows ask for the finest quadrature rule comes back marked for it, with no round done."""
        # A traced call cannot look at values between rounds, so it carries every rule from the start.
        fine = state.plan.fine or is_traced((state, dynamic))
        done = self._rounds(self._engine, state, dynamic, static, count, tol, length=length, fine=fine)
        if not fine and bool(done.missed):
            marked = dataclasses.replace(done.state, plan=dataclasses.replace(done.state.plan, fine=True))
            done = done._replace(state=marked)
        return done

    def _arguments(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return as_arrays(args, {**self.static_kwargs, **kwargs}, positional_names(self.model))

    def _checked_arguments(self, state: PVIState, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not isinstance(state, PVIState):
            raise StateError(f"expected a PVIState (from pvi.init or result.state), got {type(state).__name__}.")
        args, kwargs = self._arguments(args, kwargs)
        check_same_signature(state.plan.signature, signature_of(args, kwargs, positional_names(self.model)))
        return args, kwargs

    def _default_partition(self, trace: dict) -> Partition:
        plate = pick_plate(trace, None)
        size = find_plates(trace)[plate].size
        return Partition(self.model, plate, min(_DEFAULT_GROUPS, size) if self.num_groups is None else self.num_groups)

    def _init_optim(self, plan: Plan, params: dict) -> Any:
        if self.optim is None:
            return None
        transforms = param_transforms(self.guide)
        dtype = float_dtype()
        unconstrained = {
            n: jax.tree.map(lambda x: jnp.asarray(x, dtype), transforms[n].inv(v)) for n, v in params.items()
        }
        return self.optim.init(unconstrained)

    def _param_values(self, state: PVIState) -> dict:
        if not state.plan.partition.params:
            return {}
        transforms, optim = param_transforms(self.guide), cast(Any, self.optim)
        return {n: transforms[n](v) for n, v in optim.get_params(state.optim_state).items()}

    def _start_mode(self, plan: Plan, init_params: dict | None) -> str:
        gaussian_params = guide_param_names(self.guide, plan.partition.layout.names)
        if init_params is not None and gaussian_params & set(init_params):
            return "prior"
        if self.init_sites == "curvature" and plan.partition.likelihood == "reparameterised":
            raise PVIError(
                "init_sites='curvature' reads Hessians at the prior's location, which reparameterised draws are there to avoid: "
                "leave init_sites='auto' and start q near the data with init_params, or pass "
                "NaturalGradient(expectation='monte_carlo')."
            )
        if self.init_sites != "auto":
            return self.init_sites
        # Draws make curvature dear; a quadratic factor needs no start; but a prior that is held nowhere cannot do
        # without one.
        cheap = plan.partition.likelihood in ("affine", "local") or not plan.partition.exact
        return "auto" if cheap else "prior"

    def _check_structure(self, plan: Plan) -> None:
        part = plan.partition
        sizes = dict(zip(part.table.labels, part.table.sizes, strict=True))
        self.solver.check_groups(sizes, part.mechanism)
        self.solver.check(part.likelihood, plan.family.full, f"likelihood in {part.where}")
        if part.has_prior_factor:
            self.solver.check(part.prior_kind, plan.family.full, f"prior of {', '.join(part.prior_latents)}")

    def _site(self, state: PVIState, group: Hashable) -> Any:
        if group is PRIOR:
            if state.sites.prior is None:
                raise PartitionError("there is no PRIOR site: the prior is held exactly. See pvi.prior(state).")
            return state.sites.prior
        return take(state.sites.groups, state.plan.partition.table.index(group))

    def _distributions(self, state: PVIState, natural: Any, what: str, joint: bool) -> dict:
        if self.guide.prototype_trace is None:
            raise StateError("the guide is not set up: call pvi.init(key, *args) once, its result may be thrown away.")
        return latent_distributions(state.plan, natural, self.guide.prototype_trace, what, joint)


_EXAMPLES = {"solver": "NaturalGradient()", "schedule": "Synchronous()", "runtime": "Vmap()"}


__all__ = ["PVI"]
