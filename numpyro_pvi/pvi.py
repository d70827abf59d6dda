"""PVI, the one shell: joins the rooms and holds no algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.infer import SVI, Trace_ELBO

from . import diagnostics, export
from ._driver import Run, drive
from ._entry import (
    arrive_groups,
    check_choices,
    check_keywords,
    check_loss,
    check_run,
    check_state,
    draws_form,
    evaluate_loss,
    evidence_of,
    float_dtype,
    is_traced,
    positional_names,
    refuse_two_starts,
    run_rounds,
    shell_for,
    start_arrays,
)
from ._groups import begin_chains, check_rows, forgotten, reduced, refuse_absent, restored, rows_of
from ._initial import (
    check_structure,
    init_optim,
    initial_params,
    param_values,
    refuse_improper,
    refuse_nothing_shared,
    spread_params,
    start_mode,
    streams,
)
from ._locals import by_unit
from ._newcomers import Newcomers, arrival_mode
from ._opening import open_call
from ._prototype import prepare_guide
from ._readings import group_view, guide_params, marginals, own_marginals
from ._resume import Progress, begin
from ._row_states import choose_rows, dense_form
from ._saving import load_state, save_state
from ._state import Plan, PVIInfo, PVIRunResult, PVIState
from ._views import NaturalView, describe, trace_of
from .factors import (
    Layout,
    as_arrays,
    model_layout,
    move_to_prior_factor,
    plan_factors,
    split_arguments,
    with_expectation,
)
from .guides import check_guide, family_of, guide_layout
from .handlers import FullPlates, Partition, find_plates, pick_plate
from .runtime import Engine, RoundsDone, Runtime, Vmap
from .schedules import Schedule, Synchronous
from .sites import posterior
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
        guide: ``AutoMultivariateNormal``, ``AutoDiagonalNormal`` or ``AutoNormal`` of the same model, or
            :class:`numpyro_pvi.AutoExponentialFamily`, under which every latent keeps its support and sites are terms of the
            latents' families.
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
        GuideError: for a guide that is none of these.
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
        solver, schedule, runtime = solver or NaturalGradient(), schedule or Synchronous(), runtime or Vmap()
        check_choices(model, num_groups, init_sites, solver, schedule, runtime)
        if optim is not None:
            super().__init__(inner, guide, optim, loss, **static_kwargs)
        else:
            self.model, self.guide, self.loss, self.optim = inner, guide, loss, None
            self.static_kwargs, self.constrain_fn = static_kwargs, None
        self.partition = model if isinstance(model, Partition) else None
        self.num_groups, self.init_sites = num_groups, init_sites
        self.solver, self.schedule, self.runtime = solver, schedule, runtime
        self._labels: tuple = ()
        # Supports of the latents as a loaded file has them, until the guide is set up.
        self._supports: dict[str, Any] = {}
        # Plates that draw mini-batches run over all of their rows here, wherever the model is evaluated.
        self._full_model = FullPlates(inner)
        self._engine = self._make_engine(inner, int(getattr(loss, "num_particles", 1)))
        self._rounds = jax.jit(run_rounds, static_argnames=("engine", "static", "length", "fine"))
        self._start = jax.jit(start_arrays, static_argnames=("engine", "plan", "static", "mode"))
        self._loss = jax.jit(evaluate_loss, static_argnames=("engine", "static", "fine"))
        self._arrive = jax.jit(arrive_groups, static_argnames=("engine", "static", "mode"))

    def __new__(cls, model: Any = None, guide: Any = None, *args: Any, **kwargs: Any):
        """A PVI, or the one for a guide whose latents keep their own supports."""
        return super().__new__(shell_for(cls, guide) if cls is PVI else cls)

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
            The state. It holds no data, but for what rows say of the latents where sites are held by rows.

        Raises:
            PartitionError: when the model cannot be split.
            GuideError: when the guide was made for another model.
            DataError: for NaN or infinity in the arguments.
            ImproperError: when q is not normalisable (an improper prior that no data completes).
        """
        opening = open_call(self, rng_key, args, kwargs)
        args, kwargs, trace, plan_key = opening.args, opening.kwargs, opening.trace, opening.plan_key
        opening.set_up(self.guide)
        own = model_layout(trace)
        layout = Layout(*guide_layout(self.guide, dict(zip(own.names, own.shapes, strict=True))))
        planned = plan_factors(opening.partition, args, kwargs, key=plan_key, layout=layout)
        refuse_nothing_shared(planned.plan)
        family = family_of(self.guide, planned.plan.layout.dim)
        expectation = getattr(self.solver, "expectation", "auto")
        planned = with_expectation(planned, expectation, family.full)
        plan = Plan(planned.plan, family, opening.signature, tied=getattr(self.solver, "tied", False))
        params = initial_params(planned.params, init_params, self.optim is not None)
        optim_state = init_optim(self.optim, self.guide, params)
        dynamic, static = split_arguments(args, kwargs)

        if planned.plan.unstructured == "monte_carlo":
            form = draws_form(self._engine, plan, planned, dynamic, static, optim_state, plan_key)
            planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, unstructured=form))
            plan = dataclasses.replace(plan, partition=planned.plan)
        arguments = dynamic, static
        plan = choose_rows(self._engine, self.guide, plan, planned, trace, arguments, init_params, plan_key)
        local = None if planned.local_loc is None else (planned.local_loc, planned.local_sd)

        def start(plan, mode=None):
            mode = start_mode(self.guide, self.init_sites, plan, init_params, self.schedule) if mode is None else mode
            moments = planned.prior_loc, planned.prior_sd, local
            return self._start(self._engine, plan, planned.packing, dynamic, static, optim_state, *moments, mode=mode)

        arrays, outside, proper = start(plan)
        if bool(outside):
            # A correlated Gaussian prior is outside a mean-field family: its latents go to the prior factor.
            moved = with_expectation(move_to_prior_factor(planned), expectation, family.full)
            plan = dataclasses.replace(plan, partition=moved.plan)
            arrays, _, proper = start(plan)
        if not bool(proper) and self.init_sites == "auto" and not streams(self.schedule):
            # An improper prior that the data complete: q is normalisable from the factors' curvature only.
            arrays, _, proper = start(plan, "curvature")
        check_structure(self.solver, plan)
        state = PVIState(rng_key=opening.key, optim_state=optim_state, packing=planned.packing, plan=plan, **arrays)
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
        dynamic, static = self._rows(state, args, kwargs)
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
        """Negative global ELBO at a state, in nats; ``update``'s loss equals this at the state it returns.

        Groups whose rows are not at hand count by their sites, which stand in for their factors up to a constant: losses
        of states with the same absent groups compare, others do not.
        """
        dynamic, static = self._rows(state, args, kwargs)
        fine, state = state.plan.fine or is_traced((state, dynamic)), reduced(state, self._engine)
        loss, missed = self._loss(self._engine, state, dynamic, static, fine=fine)
        if not fine and bool(missed):
            loss, _ = self._loss(self._engine, state, dynamic, static, fine=True)
        return loss

    def get_params(self, state: PVIState) -> dict[str, Any]:
        """The guide's params (constrained, under the guide's own names) and the model's ``numpyro.param`` values."""
        params = guide_params(self.guide, state)
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
        checkpoint: Any = None,
        checkpoint_every: int | None = None,
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
            init_params: see :meth:`init`; not together with ``init_state``.
            tol: stop when no posterior mean or log sd moves by more than ``tol`` posterior sds in a round.
            callback: called after every round with ``(rounds done, state, info)``; returning True stops.
            loss_every: rounds between reported losses; the others are NaN.
            checkpoint: path of a file that the run keeps, and goes on from where it is there: a run that was killed is
                finished by the same call. ``num_steps`` counts the rounds of both, ``losses`` has them all, and the result
                is bit for bit that of a run that was never stopped. A file of another run (solver, schedule, groups,
                arguments, ``rng_key`` or ``init_state``) is refused. ``callback`` is called again for the round of the file.
            checkpoint_every: rounds between writes; None writes after every compiled block of up to 32 rounds.
            kwargs: the model's keyword arguments.

        Returns:
            ``(params, state, losses)`` with ``.info``, ``.converged``, ``.message`` and ``.trace``. On KeyboardInterrupt the result
            holds the last state that was finished, and says so.

        Raises:
            PVIError: for ``num_steps`` below 1, and for ``init_params`` beside ``init_state``.
            CheckpointError: for a checkpoint that cannot be written or read, or is another run's; before the first round.
            SkippedGroupError: when a group was skipped in 10 rounds running; its ``.state`` is the last good state.
        """
        del stable_update, forward_mode_differentiation
        check_run(num_steps, tol, loss_every)
        refuse_two_starts(init_state, init_params)
        given = self._arguments(args, kwargs)
        kept, before = begin(self, checkpoint, checkpoint_every, rng_key, given, init_params, init_state)
        rows = self._rows(before.state, args, kwargs)
        run = self._drive(before, *rows, int(num_steps), tol, callback, progress_bar, kept)
        losses = jnp.where((jnp.arange(1, len(run.losses) + 1) % loss_every) == 0, run.losses, jnp.nan)
        trace = trace_of(run.state, run.losses, run.reports)
        params, info = self.get_params(run.state), self.info(run.state)
        return PVIRunResult(params, run.state, losses, info, run.converged, run.message, trace)

    # ------------------------------------------------------------------ what SVI does not have

    def save(self, path: Any, state: PVIState) -> None:
        """Write a state to one file: no pickle, nothing of the data, and at any moment all of the old file or of the new.

        Args:
            path: the file (mode 0600); one that is there is replaced. Its folder exists; a symbolic link is refused.
            state: a state.

        Raises:
            CheckpointError: for what cannot be written: a label or argument that is neither text nor number, a path.
            StateError: for anything but a state.
        """
        save_state(path, self, state)

    def load(self, path: Any, *args: Any, **kwargs: Any) -> PVIState:
        """Read a state that :meth:`save` has written, or the last one of ``run(checkpoint=path)``.

        This PVI may be fresh: it needs the model, the kind of guide, ``optim``, ``solver`` and ``schedule`` that the file was
        written with, and goes on to the bit where the state was left (same versions, same device).

        Args:
            path: the file.
            args: the model's positional arguments, if they are at hand: ``get_params`` and ``Predictive`` want a guide that
                is set up, which takes them. Without them, ``posterior`` works at once, and ``update``, ``run`` and
                ``evaluate`` set the guide up.
            kwargs: the model's keyword arguments.

        Returns:
            The state.

        Raises:
            CheckpointError: saying whether the file is missing, cut short, damaged, foreign, of a newer version, or of a PVI
                with another guide, solver, schedule, model or precision. There is never a part of a state.
        """
        loaded = load_state(path, self)
        self._labels, self._supports = loaded.state.groups, loaded.supports
        if args or kwargs:
            self._checked_arguments(loaded.state, args, kwargs)
        return loaded.state

    def posterior(self, state: PVIState, joint: bool = False, agent: Hashable | None = None) -> dict[Any, Any]:
        """Marginal posterior of every latent, as NumPyro distributions in the latents' own supports.

        Args:
            state: a state.
            joint: also give the joint Gaussian over all latents' unconstrained coordinates, under the tuple of their
                names (q of full covariance only).
            agent: label of a group, under a schedule without a server: the q of that agent instead of the network's mean.

        Returns:
            Distributions by latent name.

        Raises:
            ImproperError: when q is not normalisable.
            PVIError: for an agent under a schedule with a server.
        """
        return marginals(self, state, "posterior", joint, agent)

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
        return marginals(self, state, "prior", joint)

    def site(self, state: PVIState, group: Hashable) -> NaturalView:
        """One group's site t_m in natural space; ``numpyro_pvi.PRIOR`` names the prior factor's.

        Under :class:`numpyro_pvi.solvers.StochasticEP` it is the same for every group: ``prior + M * site`` is q.

        Args:
            state: a state.
            group: the group's label.

        Returns:
            Natural parameters, with ``.to_distribution()``, which raises where they are not normalisable.

        Raises:
            PartitionError: for an unknown label.
        """
        return group_view(state, group, "site")

    def cavity(self, state: PVIState, group: Hashable) -> NaturalView:
        """q without one group's site, in natural space; see :meth:`site`."""
        return group_view(state, group, "cavity")

    def log_evidence(self, state: PVIState, *args: Any, with_error: bool = False, **kwargs: Any) -> Any:
        """Estimate of log p(y) in nats: the global ELBO, a lower bound, for variational solvers; EP's own if moments are matched.

        Of ``PowerEP``, ``AlphaDivergence`` and (with its one site for every eta_m) ``StochasticEP`` it is
        ``A(eta_q) - A(eta_0) + sum_m (1/alpha) [log Z_m + A(eta_q - alpha eta_m) - A(eta_q)]`` with ``Z_m`` the mean of
        ``p(y_m | theta)^alpha`` under the normalised cavity. It is no bound; with a site per group it is stationary in the
        sites at a fixed point, and exact for quadratic factors. Of ``SNEP`` it is the objective at the state's own anchors,
        which are q in the limit.

        Args:
            state: a state.
            args: the model's positional arguments.
            with_error: also give the Monte Carlo standard error (0 where nothing is sampled).
            kwargs: the model's keyword arguments.

        Returns:
            Nats; with ``with_error`` the pair ``(value, standard error)``.

        Raises:
            StateError: when the rows of some groups are not at hand; the sum of :meth:`prequential` scores estimates it then.
        """
        refuse_absent(state, "log_evidence is of the density of all rows")
        arguments = self._checked_arguments(state, args, kwargs)
        return evidence_of(self._engine, state, arguments, self.evaluate, with_error)

    def info(self, state: PVIState) -> PVIInfo:
        """What happened to every factor in the last round; ``print`` it for a table."""
        return describe(state, self.optim is not None, self.solver, self.schedule)

    @property
    def groups(self) -> tuple:
        """Labels of the groups of the last ``init``, or of the last state that this object added to or took from.

        In the order of every stacked array: those whose rows are not at hand first. A state's own are ``state.groups``.
        """
        return self._labels

    def add_group(
        self,
        state: PVIState,
        label: Hashable,
        /,
        *args: Any,
        num_steps: int = 20,
        tol: float | None = 1e-3,
        **kwargs: Any,
    ) -> PVIState:
        """Add a group of rows to a state: its site is fitted beside the sites of all others, whose rows are not needed.

        Afterwards the new group alone is *present*: ``update``, ``run(init_state=...)`` and ``evaluate`` take its rows, and
        every other group is held by its site (local latents of their rows are dropped). Structure and partition are those
        found at ``init``; the rows are compared with them. Values of ``numpyro.param`` sites stay as they are while any group
        is absent, since sites say nothing of them. Arguments that are not per row are to be what they were.

        Args:
            state: a state.
            label: a label that no group has.
            args: the model's positional arguments, with the rows of this group only.
            num_steps: rounds of the schedule over the new group; 0 leaves its site at 1 (``init_sites="curvature"``: at its
                factor's curvature).
            tol: posterior sds below which rounds stop, as in :meth:`run`.
            kwargs: the model's keyword arguments.

        Returns:
            The state. Groups whose numbers of rows round up to the same power of two share their compiled programs where rows
            are taken from the arguments; other models compile for every number of rows.

        Raises:
            PartitionError: for a label that is there already, or rows that do not fit the structure.
            StateError: for arguments of other types, columns or static values.
            DataError: for NaN or infinity, or no rows.
            SkippedGroupError: when no round could absorb the group.
        """
        args, kwargs = self._arguments(args, kwargs)
        return self._named(self._newcomers.add(dense_form(state), label, args, kwargs, num_steps, tol))

    def revisit(
        self, state: PVIState, labels: Any, /, *args: Any, num_steps: int = 20, tol: float | None = 1e-3, **kwargs: Any
    ) -> PVIState:
        """Bring rows of known groups back, so that their sites are fitted again; all other groups keep theirs.

        Args:
            state: a state.
            labels: one label per row (a list or an array), or a single label for all rows.
            args: the model's positional arguments, with the rows of the groups named only: all rows of each.
            num_steps: rounds of the schedule over these groups; 0 leaves that to ``update`` or ``run``.
            tol: posterior sds below which rounds stop.
            kwargs: the model's keyword arguments.

        Returns:
            The state, with the groups named *present*; see :meth:`add_group`.

        Raises:
            PartitionError: for an unknown label, naming near ones, or rows that do not fit the structure.
            StateError, DataError, SkippedGroupError: as of :meth:`add_group`.
        """
        args, kwargs = self._arguments(args, kwargs)
        return self._named(self._newcomers.revisit(dense_form(state), labels, args, kwargs, num_steps, tol))

    def forget_group(self, state: PVIState, label: Hashable) -> PVIState:
        """Take a group's site out of the posterior; no rows are needed.

        Where all factors are quadratic in the latents, q has full covariance and nothing but sites was fitted, this equals
        never having seen the group. Elsewhere the other groups' sites were fitted beside it, and a warning says that the
        result is approximate until they are revisited.

        Args:
            state: a state.
            label: the group's label.

        Returns:
            The state. When the group was present, so that its rows were among those of ``update``, no group is present
            afterwards: call :meth:`revisit` with the rows that remain.

        Raises:
            PartitionError: for an unknown label.
            ImproperError: when q is not normalisable without the group.
        """
        return self._named(forgotten(dense_form(state), label))

    def prequential(
        self, state: PVIState, *args: Any, rng_key: Any, num_samples: int = 1000, **kwargs: Any
    ) -> diagnostics.LogScore:
        """Predict, then update: log predictive density, under q, of a group's rows before it is added.

        Args:
            state: a state that has not seen these rows.
            args: the model's positional arguments, with these rows only.
            rng_key: random key.
            num_samples: draws from q.
            kwargs: the model's keyword arguments.

        Returns:
            ``.rows``, each row's log predictive density in nats; ``.total``, their sum; ``.joint``, that of all rows
            together: with the joint density of the first group under the prior, the joint scores of groups added one after
            another sum to log p(y) as far as q is exact. ``.ess`` says how many draws stand behind it.

        Raises:
            StateError: for arguments of other types, columns or static values.
            ImproperError: when q is not normalisable.
        """
        args, kwargs = self._arguments(args, kwargs)
        rows = self._newcomers.count(state, "the rows to be predicted", args, kwargs)
        fixed = self.model, dense_form(state), args, kwargs, self._param_values(state), sum(rows.values())
        return diagnostics.log_score(rng_key, *fixed, num_samples=num_samples)

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
        refuse_absent(state, "khat compares q with the posterior given all rows")
        local, params = None if state.plan.partition.local is None else by_unit(state), self._param_values(state)
        fixed = state.plan.partition.model(self._full_model), dense_form(state), args, kwargs, params
        return diagnostics.khat(rng_key, *fixed, num_samples=num_samples, local=local)

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
            values. Without a server the group ``agents`` has every agent's own marginals.
        """
        state = state_or_result if isinstance(state_or_result, PVIState) else state_or_result.state
        args, kwargs = self._checked_arguments(state, args, kwargs)
        model, params = state.plan.partition.model(self._full_model), self.get_params(state)
        trace = getattr(state_or_result, "trace", None)
        agents = own_marginals(self, state)
        shown = {"num_samples": num_samples, "trace": trace, "agents": agents}
        return export.to_arviz(rng_key, model, self.guide, params, args, kwargs, **shown)

    # ------------------------------------------------------------------ joints between the rooms

    def _make_engine(self, model: Callable, num_particles: int) -> Any:
        return Engine(model, self.solver, self.schedule, self.runtime, self.optim, num_particles)

    def _advance(self, state: PVIState, dynamic: list, static: tuple, count, tol, length: int) -> RoundsDone:
        """Run rounds; a state whose rows ask for the finest quadrature rule comes back marked for it, with no round done."""
        # A traced call cannot look at values between rounds, so it carries every rule from the start.
        fine = state.plan.fine or is_traced((state, dynamic))
        small = reduced(state, self._engine)
        done = self._rounds(self._engine, small, dynamic, static, count, tol, length=length, fine=fine)
        done = done._replace(state=begin_chains(self.solver, restored(done.state, state)))
        if not fine and bool(done.missed):
            marked = dataclasses.replace(done.state, plan=dataclasses.replace(done.state.plan, fine=True))
            done = done._replace(state=marked)
        return done

    def _drive(self, before: Progress, dynamic: list, static: tuple, *how: Any) -> Run:
        def rounds(state, count, tol, length):
            return self._advance(state, dynamic, static, count, tol, length)

        return drive(rounds, self.info, before, *how)

    def _rows(self, state: PVIState, args: tuple, kwargs: dict) -> tuple[list, tuple]:
        args, kwargs = self._checked_arguments(state, args, kwargs)
        return rows_of(state.plan, args, kwargs)

    @property
    def _newcomers(self) -> Newcomers:
        def start(state: PVIState, dynamic: list, static: tuple, known: Any) -> Any:
            small, mode = reduced(state, self._engine), arrival_mode(self.init_sites)
            return self._arrive(self._engine, small, dynamic, static, known, mode=mode)

        check = self.partition is None or self.partition.check
        return Newcomers(self.model, positional_names(self.model), start, self._drive, self.solver, check)

    def _named(self, state: PVIState) -> PVIState:
        self._labels = state.groups
        return state

    def _arguments(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return as_arrays(args, {**self.static_kwargs, **kwargs}, positional_names(self.model))

    def _checked_arguments(self, state: PVIState, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        check_state(state)
        args, kwargs = self._arguments(args, kwargs)
        check_rows(state, args, kwargs, positional_names(self.model))
        prepare_guide(self, state, args, kwargs)
        return args, kwargs

    def _default_partition(self, trace: dict) -> Partition:
        plate = pick_plate(trace, None)
        size = find_plates(trace)[plate].size
        return Partition(self.model, plate, min(_DEFAULT_GROUPS, size) if self.num_groups is None else self.num_groups)

    def _param_values(self, state: PVIState) -> dict:
        return param_values(self.optim, self.guide, state)


__all__ = ["PVI"]
