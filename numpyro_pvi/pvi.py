"""PVI, the one shell: joins the rooms and holds no algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from numpyro.infer import SVI, Trace_ELBO

from . import diagnostics, export
from ._arriving_groups import Newcomers
from ._closures import Followed, check_picklable, follows, with_prior_of_now
from ._compiling import is_traced, on_device, precisely
from ._driver import BLOCK, Progress, Run, begin, begun_elsewhere, drive, nearer, other_start, waiting
from ._family_fit import FamilyFit
from ._fits import GaussianFit, begin_fit
from ._group_lifecycle import (
    begin_chains,
    check_rows,
    forgotten,
    reduced,
    refuse_absent,
    refuse_other_rows,
    restored,
    rows_of,
)
from ._initial import default_partitions, param_values
from ._posterior_views import NaturalView, describe, trace_of
from ._saving import guide_of_rows, load_state, prepare_guide, save_state
from ._state import Plan, PVIInfo, PVIRunResult, PVIState
from ._state_marginals import dense_form, group_view, own_marginals
from ._user_inputs import (
    check_choices,
    check_keywords,
    check_loss,
    check_run,
    check_state,
    evaluate_factors,
    evaluate_loss,
    evidence_of,
    float_dtype,
    level_for,
    placed,
    private_start,
    refuse_elsewhere,
    refuse_held,
    refuse_look,
    refuse_two_starts,
    run_rounds,
    unseen,
)
from ._verified import Memory, Verifier, after_update, check_family, taken_over
from .errors import PVIError, SkippedGroupError, StateError
from .factors import (
    abstract_trace,
    as_arrays,
    check_data,
    join_arguments,
    masks_named,
    positional_names,
    split_arguments,
)
from .guides import check_guide, keeps_supports
from .handlers import BatchPlates, FullPlates, Partition
from .runtime import RoundsDone, Runtime, Vmap
from .schedules import Schedule, Synchronous
from .solvers import LocalSolver, NaturalGradient, of_params

# Groups times rounds up to which one update has room for a block of rounds.
_ROOM = 1 << 16


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
        optim: optimiser of ``numpyro.optim``, ``jax.example_libraries.optimizers`` or optax for the model's ``numpyro.param``
            sites, one step a round at the round's q; those that search (``numpyro.optim.Minimize``, ``optax.lbfgs``) go as far
            as they see fit. It does not fit q.
        loss: gives the number of particles where the loss is Monte Carlo.
        solver: local solver; :class:`numpyro_pvi.solvers.NaturalGradient` by default.
        schedule: :class:`numpyro_pvi.schedules.Synchronous` by default.
        num_groups: number of random blocks of rows, for a model that is not a ``Partition``; ``min(10, plate size)`` by
            default. One plate with observed sites is split; several are split together, or the one with most observations is;
            a model without any, or whose rows are coupled, is kept whole, as one group: ``info`` says so, and a warning does
            where this number was given.
        init_sites: "prior" (sites at 1), "curvature" (each site the positive semi-definite curvature of its factor at
            the prior's location), or "auto": the prior where a fixed quadrature rule can resolve the factors there,
            else curvature where the structure gives it cheaply. Where the model is not finite within ten sds of the prior, or its
            log-likelihood there a thousand times worse than at best (a hundred, where no structure is found), "auto" looks at the
            loss of that start and at the guide's own (its initialisation strategy's location, its initial scale, in equal shares
            of all sites), and takes the guide's if the other is not finite or so many times as large.
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
        if solver.private:
            init_sites = private_start(init_sites, schedule, runtime, optim)
        if optim is not None:
            super().__init__(inner, guide, of_params(optim), loss, **static_kwargs)
        else:
            self.model, self.guide, self.loss, self.optim = inner, guide, loss, None
            self.static_kwargs, self.constrain_fn = static_kwargs, None
        self.partition = model if isinstance(model, Partition) else None
        self.num_groups, self.init_sites = num_groups, init_sites
        self.solver, self.schedule, self.runtime = solver, schedule, runtime
        self._fit = FamilyFit() if keeps_supports(guide) else GaussianFit()
        self._engine = runtime.engine(self._fit.engine(self, int(getattr(loss, "num_particles", 1))))
        self._followed = Followed((inner, solver, schedule, runtime, self.optim))
        # The last to be set: from here on nothing is.
        self._memory = Memory(self._followed)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refused for what the constructor has set: a solver put in later would fit nothing, for the rounds are the first one's.

        A subclass may still set attributes of its own.
        """
        if "_memory" in vars(self) and name in vars(self):
            raise AttributeError(
                f"PVI.{name} cannot be set on a PVI that is made: what it compiles follows its constructor's arguments. Make a new "
                "one for another choice; states of a Gaussian guide go on under it by run(..., init_state=state) where guide and "
                "groups are the same, and solver and schedule begin their memories anew."
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without compiled programs, which are made anew; an error that says what to do where a part cannot be pickled."""
        check_picklable(self)
        return super().__reduce_ex__(protocol)

    # ------------------------------------------------------------------ SVI's verbs

    @follows
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
        begun = begin_fit(self, rng_key, args, kwargs, init_params)
        with masks_named(lambda: begun.opening.untouched):
            state = self._fit.first_state(self, begun, init_params)
        self._memory.labels = state.plan.partition.table.labels
        self._memory.keep(state, begun.dynamic)
        self._memory.accept(state)
        self._followed.programs.note(state)
        return state

    @follows(trace=False)
    def update(
        self, state: PVIState, /, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
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
            Where rounds evaluate q themselves, the state that the last call returned is not evaluated again while model and rows
            are the same: the same arrays of JAX, or up to 4 MB each the same numbers.
            What was found of the model's structure and not proved is verified at draws from q where the data are others than
            those it was found with, and after 32, 64, 128 ... rounds; where it does not hold, factors are taken by draws from
            then on, with a warning and a note in ``info``. Inside ``jit``, ``vmap`` or ``scan`` there are no values to look at:
            nothing is verified there, and the data must stay what they were.

        Raises:
            StateError: when the arguments differ in structure, shape or dtype from those given to ``init``.
        """
        state, dynamic, static = taken_over(self, state, args, kwargs)
        once, never = np.int32(1), np.asarray(-1.0, float_dtype())
        # The program of `run`, while the rounds that it has room for are not many numbers.
        traced = is_traced((state, dynamic))
        length = 1 if traced or len(state.plan.groups) * BLOCK > _ROOM else BLOCK
        done = self._advance(state, dynamic, static, once, never, length, traced)
        if is_traced(done.done):
            return done.state, done.loss
        if done.state.plan.fine and not state.plan.fine:
            done = self._advance(done.state, dynamic, static, once, never, length, traced)
        return after_update(self, done.state, done.loss, dynamic, static)

    def stable_update(
        self, state: PVIState, /, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[PVIState, Float[Array, ""]]:
        """The same as :meth:`update`: a PVI round never takes a step to an invalid q or from a non-finite factor."""
        return self.update(state, *args, forward_mode_differentiation=forward_mode_differentiation, **kwargs)

    @follows
    def evaluate(self, state: PVIState, /, *args: Any, **kwargs: Any) -> Float[Array, ""]:
        """Negative global ELBO at a state, in nats; ``update``'s loss equals this at the state it returns.

        Groups whose rows are not at hand count by their sites, which stand in for their factors up to a constant: losses
        of states with the same absent groups compare, others do not. Where expectations are by draws (``info`` says which are) it
        is an estimate by one set of them, off by some tenths of a nat: ``log_evidence(state, *args, with_error=True)`` has the mean
        over 16 sets, and its standard error. Under solvers that match moments (``PowerEP``, ``SNEP``) ``log_evidence`` is that of
        the moments instead.
        """
        refuse_look(self.solver, "evaluate")
        return self._loss_under(self._engine, *taken_over(self, state, args, kwargs))

    @precisely()
    def get_params(self, state: PVIState) -> dict[str, Any]:
        """The guide's params (constrained, under the guide's own names) and the model's ``numpyro.param`` values.

        Of latents that rows have of their own there are none while no row is at hand (after :meth:`forget_group`): params are then
        those of the latents that remain.
        """
        check_family(self, state)
        return self._fit.params(self.guide, state) | self._param_values(state)

    @follows
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
            progress_bar: show what is waited for, rounds, ELBO and the largest move in posterior sds.
            stable_update: accepted for SVI's sake; every PVI round is stable.
            forward_mode_differentiation: accepted for SVI's sake.
            init_state: continue from this state, which may be of another PVI with the same kind of guide and the same groups. Of
                another solver or schedule, these begin their memories anew (Gaussian guides).
            init_params: see :meth:`init`; not together with ``init_state``.
            tol: stop when no posterior mean or log sd has more than ``tol`` posterior sds left to move, by what all factors
                together ask for and by the rate at which moves shrink; also when every step was refused for five rounds. With
                ``numpyro.param`` sites, twice the nats that steps of ``optim`` still gain are then within ``tol ** 2`` as well;
                what ``numpyro.optim.Minimize`` has found in a round counts as all there is.
            callback: called after every round with ``(rounds done, state, info)``; returning True stops.
            loss_every: rounds between reported losses; the others are NaN. Where expectations are by draws (``info`` says which
                are) a loss is an estimate by the draws of its round, off by some tenths of a nat: see :meth:`log_evidence`.
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
            StateError: for an ``init_state`` of another kind of guide, of other groups or arguments, or one that the solver or the
                schedule cannot go on from.
            SkippedGroupError: when a group was skipped in 10 rounds running; its ``.state`` is the last good state. Where the
                group has made no step, and nobody said where q starts, the run is begun again where the guide starts, and says so.
            NonFiniteLossError: when the rounds end with a loss that is no number; its ``.state`` is the last state.
        """
        check_run(num_steps, tol, loss_every)
        refuse_two_starts(init_state, init_params)
        with waiting(int(num_steps), progress_bar) as bar:
            given = self._arguments(args, kwargs)
            refuse_other_rows(self.partition, init_state)
            if init_state is not None:
                check_state(init_state)
                init_state = self._engine.counted(init_state, loss_every)
            kept, before = begin(self, checkpoint, checkpoint_every, rng_key, given, init_params, init_state)
            engine = self._engine.reporting(loss_every)

            def driven(before: Progress, shown: Any) -> Run:
                state, *rows = taken_over(self, before.state, args, kwargs)
                how = int(num_steps), tol, callback, shown, kept
                return self._drive(dataclasses.replace(before, state=state), *rows, *how, engine=engine)

            try:
                run = driven(before, bar)
            except SkippedGroupError as stuck:
                if init_state is not None:
                    raise
                before = begun_elsewhere(self, stuck, (rng_key, given), init_params, before)
                run = driven(before, progress_bar)
            # What visits have released is spent.
            if init_state is None and not self.solver.private:
                start = partial(other_start, self, (rng_key, given), init_params, before)
                run, before = nearer(run, before, start, partial(driven, shown=progress_bar), kept)
        # On the host: a result is not worth a program.
        shown = np.arange(1, len(run.losses) + 1) % loss_every == 0
        losses = np.asarray(run.losses)
        losses = on_device(np.where(shown, losses, np.asarray(np.nan, losses.dtype)))
        trace = trace_of(run.state, run.losses, run.reports)
        params, info = self.get_params(run.state), self.info(run.state)
        message = "; ".join(words for words in (run.message, before.again) if words)
        return PVIRunResult(params, run.state, losses, info, run.converged, message, trace)

    # ------------------------------------------------------------------ what SVI does not have

    @follows(trace=False)
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

    @follows(trace=False)
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
        self._memory.labels, self._memory.supports = loaded.state.groups, loaded.supports
        self._memory.accept(loaded.state)
        if not loaded.state.plan.signature.by_value:
            # Where the model reads values of arguments, a file cannot be compared with it: its prior is read anew.
            self._followed.programs.note(loaded.state)
        if args or kwargs:
            self._checked_arguments(loaded.state, args, kwargs)
        return loaded.state

    @precisely()
    def posterior(self, state: PVIState, joint: bool = False, agent: Hashable | None = None) -> dict[Any, Any]:
        """Marginal posterior of every latent, as NumPyro distributions in the latents' own supports.

        Args:
            state: a state.
            joint: also give the joint Gaussian over all latents' unconstrained coordinates, under the tuple of their
                names (q of full covariance only); under ``AutoExponentialFamily`` those of its joint blocks, likewise.
            agent: label of a group, under a schedule without a server: the q of that agent instead of the network's mean.

        Returns:
            Distributions by latent name.

        Raises:
            ImproperError: when q is not normalisable.
            PVIError: for an agent under a schedule with a server.
        """
        check_family(self, state)
        return self._fit.distributions(self, state, "posterior", joint, agent)

    @precisely()
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
        return self._fit.distributions(self, state, "prior", joint)

    @precisely()
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

    @precisely()
    def cavity(self, state: PVIState, group: Hashable) -> NaturalView:
        """q without one group's site, in natural space; see :meth:`site`."""
        return group_view(state, group, "cavity")

    @follows
    def log_evidence(self, state: PVIState, /, *args: Any, with_error: bool = False, **kwargs: Any) -> Any:
        """Estimate of log p(y) in nats: the global ELBO, a lower bound, for variational solvers; EP's own if moments are matched.

        Where expectations are by draws, the ELBO is the mean over 16 fresh sets of them, a lower bound up to its standard error;
        the losses of rounds are on fewer draws, and under a stochastic solver (``LocalELBO``, ``StochasticNaturalGradient``) on
        the same ones in every round, so that they compare with each other but are not themselves bounds. Where "auto" goes by
        sigma points (``info`` says so), which may be some hundredths of a nat off, the ELBO is by draws as well; not where they
        were asked for.

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
        refuse_look(self.solver, "log_evidence")
        refuse_absent(state, "log_evidence is of the density of all rows")
        arguments = self._checked_arguments(state, args, kwargs)
        rows = rows_of(state.plan, *arguments)
        state = with_prior_of_now(self, state, *rows)
        return evidence_of(self._engine, state, arguments, lambda *of: self._loss_under(*of, *rows), with_error)

    @follows(trace=False)
    def info(self, state: PVIState) -> PVIInfo:
        """What happened to every factor in the last round; ``print`` it for a table."""
        return describe(self, state)

    @property
    def groups(self) -> tuple:
        """Labels of the groups of the last ``init``, or of the last state that this object added to or took from.

        In the order of every stacked array: those whose rows are not at hand first. A state's own are ``state.groups``.
        """
        return self._memory.labels

    @follows
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

        Where clients have their own rows, this PVI's runtime is one of the state's clients and the new one, under ``label``: all of
        them are there, and the rounds are over all. Structure is agreed on anew.

        Args:
            state: a state.
            label: a label that no group has.
            args: the model's positional arguments, with the rows of this group only.
            num_steps: rounds of the schedule over the new group (with clients, over all); 0 leaves its site at 1
                (``init_sites="curvature"``: at its factor's curvature).
            tol: posterior sds below which rounds stop, as in :meth:`run`.
            kwargs: the model's keyword arguments.

        Returns:
            The state. Groups whose numbers of rows round up to the same power of two share their compiled programs where rows
            are taken from the arguments; other models compile for every number of rows.

        Raises:
            PartitionError: for a label that is there already, or rows that do not fit the structure.
            StateError: for arguments of other types, columns or static values, and for clients that are not the state's and this.
            DataError: for NaN or infinity, or no rows.
            SkippedGroupError: when no round could absorb the group.
        """
        refuse_look(self.solver, "add_group")
        if self.runtime.elsewhere is not None:
            check_state(state)
            self.runtime.elsewhere.expect_answers("add_group")
            fresh = self.init(state.rng_key, *args, **kwargs)
            rows = self._rows(fresh, args, kwargs)
            return self._named(Newcomers(self).join(fresh, state, label, rows, num_steps, tol))
        refuse_held(state, "add_group")
        args, kwargs = self._arguments(args, kwargs, state)
        return self._named(Newcomers(self).add(dense_form(state), label, args, kwargs, num_steps, tol))

    @follows
    def revisit(
        self, state: PVIState, labels: Any, /, *args: Any, num_steps: int = 20, tol: float | None = 1e-3, **kwargs: Any
    ) -> PVIState:
        """Bring rows of known groups back, so that their sites are fitted again; all other groups keep theirs.

        Where clients have their own rows, and one of them was forgotten, this PVI's runtime is one of all that are left, whose
        labels are given; the rounds are over all of them.

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
        refuse_look(self.solver, "revisit")
        if self.runtime.elsewhere is not None:
            check_state(state)
            self.runtime.elsewhere.expect_answers("revisit")
            fresh = self.init(state.rng_key, *args, **kwargs)
            rows = self._rows(fresh, args, kwargs)
            return self._named(Newcomers(self).rejoin(fresh, state, labels, rows, num_steps, tol))
        refuse_held(state, "revisit")
        args, kwargs = self._arguments(args, kwargs, state)
        return self._named(Newcomers(self).revisit(dense_form(state), labels, args, kwargs, num_steps, tol))

    @precisely()
    def forget_group(self, state: PVIState, label: Hashable) -> PVIState:
        """Take a group's site out of the posterior; no rows are needed.

        Where all factors are quadratic in the latents, q has full covariance, the solver gives such factors their own parameters
        (``Conjugate``, ``NaturalGradient``, ``PowerEP``) and nothing but sites was fitted, this equals never having seen the group.
        So it does under ``AutoExponentialFamily`` where factors see one latent alone that they are conjugate in.
        Elsewhere the other groups' sites were fitted beside it, and a warning says that the
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
        refuse_look(self.solver, "forget_group")
        check_state(state)
        return self._named(forgotten(dense_form(state), label, self.solver))

    @follows
    def prequential(
        self, state: PVIState, /, *args: Any, rng_key: Any, num_samples: int = 1000, **kwargs: Any
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
        refuse_look(self.solver, "prequential")
        refuse_elsewhere(self.runtime, "prequential")
        args, kwargs = self._arguments(args, kwargs, state)
        rows = Newcomers(self).count(state, "the rows to be predicted", args, kwargs)
        fixed = self.model, dense_form(state), args, kwargs, self._param_values(state), sum(rows.values())
        return diagnostics.log_score(rng_key, *fixed, num_samples=num_samples)

    @follows
    def khat(
        self,
        state: PVIState,
        /,
        *args: Any,
        rng_key: Any,
        num_samples: int = 1000,
        by_group: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Pareto k-hat of importance weights from q to the exact posterior: below .7 q is usable, below .5 good.

        Args:
            state: a state.
            args: the model's positional arguments.
            rng_key: random key.
            num_samples: draws from q; each costs one evaluation of the model on all rows. Up to 64 times as many are taken where
                k-hat is above .7 although the effective sample size is above half of the draws, unless the data are large: a
                tenth of a thousand draws is too much to be the tail of a q that is nearly right.
            by_group: judge every group's site by itself: k-hat of the weights ``p(y_m | theta) / t_m(theta)``, from q to q with the
                exact factor of group m in its site's place. Rows' own latents count by their density in the model over that in q.
                Clients that have their own rows judge their own sites, at the same draws, and tell that number alone.
            kwargs: the model's keyword arguments.

        Returns:
            k-hat; with ``by_group`` a dict of one by label, ``PRIOR`` first where the prior has a site.

        Raises:
            StateError: when the rows of some groups are not at hand.
            PVIError: for fewer than 100 draws, and for ``by_group`` where there is no such thing.
            ImproperError: when q is not normalisable.

        References:
            Yao et al., Yes, but Did It Work?: Evaluating Variational Inference, section 3.
        """
        refuse_look(self.solver, "khat")
        if not by_group:
            refuse_elsewhere(self.runtime, "khat")
        elif self.runtime.elsewhere is not None:
            self.runtime.elsewhere.expect_answers("khat(by_group=True)")
        refuse_held(state, "khat")
        args, kwargs = self._checked_arguments(state, args, kwargs)
        refuse_absent(state, "khat compares q with the posterior given all rows")
        state = with_prior_of_now(self, state, *split_arguments(args, kwargs))
        return self._fit.khat(self, state, args, kwargs, rng_key, num_samples, by_group)

    @follows
    def to_arviz(
        self,
        rng_key: Any,
        state_or_result: PVIState | PVIRunResult,
        /,
        *args: Any,
        num_samples: int = 1000,
        **kwargs: Any,
    ) -> Any:
        """Posterior draws and log-likelihoods as ArviZ data, with chain and draw dimensions.

        Args:
            rng_key: random key.
            state_or_result: a state, or what ``run`` returned; that has a trace, which becomes the group ``rounds``.
            args: the model's positional arguments. After ``add_group``, ``revisit`` or ``forget_group`` those of any rows, all of
                them or the latest; of models with latents inside the plate the latest.
            num_samples: draws.
            kwargs: the model's keyword arguments.

        Returns:
            ``InferenceData`` (ArviZ 0.23) or ``DataTree`` (1.x); log-likelihoods use the fitted ``numpyro.param``
            values. Without a server the group ``agents`` has every agent's own marginals. Where clients have their own rows there
            are draws of the latents that all share, and nothing that is read off rows: each client has the rest of its own, by
            :meth:`numpyro_pvi.clients.Client.to_arviz` in its process.
        """
        refuse_look(self.solver, "to_arviz")
        if not isinstance(state_or_result, PVIState | PVIRunResult):
            raise PVIError(
                "to_arviz takes a random key, then a state or a result of run, and got "
                f"{type(state_or_result).__name__} there: write to_arviz(rng_key, result, *args)."
            )
        state = state_or_result if isinstance(state_or_result, PVIState) else state_or_result.state
        elsewhere = self.runtime.elsewhere is not None
        if not elsewhere:
            refuse_held(state, "to_arviz")
        args, kwargs = self._shown_arguments(state, args, kwargs)
        model, trace = FullPlates(state.plan.partition.model(self.model)), getattr(state_or_result, "trace", None)
        if elsewhere:
            return self._fit.shared_to_arviz(self, state, args, kwargs, rng_key, num_samples, trace)
        params, guide = self.get_params(state), guide_of_rows(self, state, args, kwargs)
        shown = {"trace": trace, "agents": own_marginals(self, state)}
        if state.plan.partition.enumeration is not None:
            shown["whole"] = FullPlates(self.model)
        return export.to_arviz(rng_key, model, guide, params, args, kwargs, num_samples=num_samples, **shown)

    # ------------------------------------------------------------------ joints between the rooms

    def _advance(
        self, state: PVIState, dynamic: list, static: tuple, count, tol, length: int, traced: bool, engine: Any = None
    ) -> RoundsDone:
        """Run rounds; a state whose rows ask for the finest quadrature rule comes back marked for it, with no round done."""
        # A traced call cannot look at values between rounds, so it carries every rule from the start.
        fine, before = state.plan.fine or traced, state
        state = with_prior_of_now(self, state, dynamic, static)
        small = reduced(state, self._engine)
        level = self._level(state.plan, dynamic, static)
        programs, how = self._followed.programs, (engine or self._engine, small.plan, static, fine)
        small, rows = placed(self._engine, small, dynamic, static)
        told = None
        if not traced:
            shapes = tuple((x.shape, x.dtype) for x in dynamic)
            found = programs.once((*how, shapes), lambda: unseen(how[0], small, rows, static, fine))
            told = self.runtime.publish(self._memory.look.at(programs, before, dynamic, how, found))
        call = how[0], small, rows, static, count, tol, told
        try:
            done = self.runtime.fetch(self.runtime.call(run_rounds, *call, length=length, fine=fine, level=level))
        except BaseException:
            # Whoever has seen the last look may be gone, or hold no more what it left.
            self._memory.look.forget()
            raise
        done = done._replace(state=begin_chains(self.solver, restored(done.state, state)))
        missed = not fine and bool(done.missed)
        if missed:
            marked = dataclasses.replace(done.state, plan=dataclasses.replace(done.state.plan, fine=True))
            done = done._replace(state=marked)
        programs.note(done.state)
        if told is not None:
            self._memory.look.keep(programs, done.state, dynamic, how, None if missed else done)
        return done

    def _loss_under(
        self, engine: Any, state: PVIState, dynamic: list, static: tuple, often: bool = True, exact: bool = True
    ) -> Float[Array, ""]:
        before, traced = state, is_traced((state, dynamic))
        state = with_prior_of_now(self, state, dynamic, static)
        fine, state = state.plan.fine or traced, reduced(state, engine)
        if exact and not traced and self.runtime.elsewhere is None:
            how = engine, state.plan, static, fine
            known = self._memory.look.loss(self._followed.programs, before, dynamic, how)
            if known is not None:
                return known
        level = self._level(state.plan, dynamic, static, often)
        state, dynamic = placed(engine, state, dynamic, static)
        call = engine, state, dynamic, static
        loss, missed = self.runtime.fetch(self.runtime.call(evaluate_loss, *call, fine=fine, level=level))
        if exact and not fine and bool(missed):
            loss, _ = self.runtime.fetch(self.runtime.call(evaluate_loss, *call, fine=True, level=level))
        return loss

    def _level(self, plan: Plan, dynamic: list, static: tuple, often: bool = True) -> str:
        return level_for(self._followed.programs, self._engine, plan, dynamic, static, often)

    def _drive(self, before: Progress, dynamic: list, static: tuple, *how: Any, engine: Any = None) -> Run:
        def rounds(state, count, tol, length):
            return self._advance(state, dynamic, static, count, tol, length, is_traced((state, dynamic)), engine)

        self.runtime.hold("call", before.state)
        verify = Verifier(self, dynamic, static, before.state.plan.early_checks)
        elsewhere = self.runtime.elsewhere is not None

        def trace() -> dict:
            return {} if elsewhere else abstract_trace(self.model, jax.random.key(0), *join_arguments(dynamic, static))

        def values(state: PVIState) -> Any:
            if self.solver.private or not self._engine.tells_factors:
                return None
            state = with_prior_of_now(self, state, dynamic, static)
            bare, rows = placed(self._engine, reduced(state, self._engine), dynamic, static)
            level = self._level(state.plan, dynamic, static, often=False)
            call = self._engine, bare, rows, static
            return self.runtime.fetch(self.runtime.call(evaluate_factors, *call, fine=True, level=level))

        watch = {"verify": verify, "workers": lambda: self.runtime.workers, "values": values}
        watch["once"] = self.schedule.single_pass
        with masks_named(trace):
            return drive(rounds, self.info, before, *how, **watch)

    def _partition_of(self, state: PVIState, args: tuple, kwargs: dict) -> Partition:
        """The partition that a state was planned with."""
        trace = abstract_trace(self.model, jax.random.key(0), args, kwargs)
        rows = state.plan.partition.rows
        return next(p for p in self._partitions(trace) if p.row_axes(trace) == rows)

    def _rows(self, state: PVIState, args: tuple, kwargs: dict) -> tuple[list, tuple]:
        programs, last = self._followed.programs, self._memory.call
        # A trace of the model, or a guide that is not set up, asks for the arguments themselves.
        simple = self._followed.known and self.runtime.elsewhere is None and isinstance(state, PVIState)
        if simple and (found := last.again(programs, state.plan, args, kwargs)) is not None:
            self._followed.renew_guide(self.guide)
            if self.guide.prototype_trace is not None:
                return found
        args_now, kwargs_now = self._checked_arguments(state, args, kwargs)
        found = rows_of(state.plan, args_now, kwargs_now)
        # Whether by this call or before it, the model was traced with them where it has to be.
        if simple and self._followed.programs is programs:
            last.keep(programs, state.plan, args, kwargs, found)
        return found

    def _named(self, state: PVIState) -> PVIState:
        self._memory.labels = state.groups
        return state

    def _arguments(
        self, args: tuple, kwargs: dict, state: PVIState | None = None, by_value: tuple[int, ...] = ()
    ) -> tuple[tuple, dict]:
        if state is not None:
            check_state(state)
            by_value = state.plan.signature.by_value
        kwargs, names = {**self.static_kwargs, **kwargs}, positional_names(self.model)
        if (elsewhere := self.runtime.elsewhere) is not None:
            args, kwargs = elsewhere.arguments(self, args, kwargs, names)
        args, kwargs = as_arrays(args, kwargs, names, by_value)
        self._followed.compare(self.model, args, kwargs)
        return args, kwargs

    def _checked_arguments(self, state: PVIState, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        args, kwargs = self._arguments(args, kwargs, state)
        if (elsewhere := self.runtime.elsewhere) is not None:
            elsewhere.compare(state.plan)
        check_rows(state, args, kwargs, positional_names(self.model))
        if not is_traced((state, args, kwargs)):
            if elsewhere is None and not self._memory.missing:
                model = BatchPlates(self.model) if state.plan.partition.batches else self.model
                self._memory.missing = check_data(model, args, kwargs, positional_names(self.model))
            self._followed.renew_guide(self.guide)
        prepare_guide(self, state, args, kwargs)
        return args, kwargs

    def _shown_arguments(self, state: PVIState, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Checked arguments of rows that are read at draws from q alone: any rows, where some groups' are not at hand."""
        try:
            return self._checked_arguments(state, args, kwargs)
        except StateError:
            if not state.plan.absent or state.plan.own_latents:
                raise
            args, kwargs = self._arguments(args, kwargs, state)
            Newcomers(self).count(state, "the rows to be shown", args, kwargs)
            prepare_guide(self, state, args, kwargs)
            return args, kwargs

    def _partitions(self, trace: dict) -> tuple[Partition, ...]:
        """The partition that the user gave, or those that stand in for it, the first choice first."""
        if (elsewhere := self.runtime.elsewhere) is not None:
            return elsewhere.partitions(self.model, self.partition)
        return (self.partition,) if self.partition else default_partitions(self.model, trace, self.num_groups)

    def _param_values(self, state: PVIState) -> dict:
        return param_values(self.optim, self.guide, state)


__all__ = ["PVI"]
