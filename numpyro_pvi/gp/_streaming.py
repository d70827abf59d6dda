"""Sparse Gaussian processes over batches that arrive: :class:`SparseGP` and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._compiling import Programs, is_traced, level_of
from ..errors import ImproperError, PVIError, StateError
from ..families import GaussianNatural, MultivariateNormalFamily, NormalFamily
from ._likelihoods import Likelihood, as_likelihood
from ._process import (
    Block,
    Kernel,
    Prior,
    Process,
    appended,
    block_of,
    conditioned,
    empty,
    evidence,
    grown,
    kernel_params,
    marginals,
    placed,
    reach,
    spread_rows,
)
from ._visit import Problem, PseudoSite, Setting, Visit, draws, projected, slope, unit_site, visit

# Nodes of a quadrature with their derivatives, about.
_NODES = 300
_PSEUDO = ("private", "shared")
_HYPERPARAMETERS = ("point", "distribution", "fixed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchSite:
    """What a batch left behind.

    Attributes:
        site: in the values at its pseudo-inputs (private) or at all (shared): natural parameters and a log scale, in nats.
        slope: of its term of the bound by the flat hyperparameters, for visits to others; zero where they are not a point.
        q_site: its site in the hyperparameters, natural parameters of independent Gaussians; zero where they are a point.
        bound: what it added to the bound, in nats; under q over hyperparameters only.
    """

    site: PseudoSite
    slope: Float[Array, "P"]
    q_site: GaussianNatural
    bound: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseGPState:
    """A sparse Gaussian process given some batches' sites; an immutable pytree.

    Attributes:
        params: ``{"kernel": ..., "likelihood": ...}``, unconstrained; under q over hyperparameters its location.
        q: natural parameters of q over the flat hyperparameters, independent Gaussians; None where they are a point.
        pseudo_inputs: of every batch (private), or one set (shared).
        batches: what every batch left behind, in the order of their arrival.
        process: the factored process given all sites, at ``params``.
        rng_key: for draws of hyperparameters.
        names: of the batches.
        arrived: how many there ever were.
    """

    params: Any
    q: GaussianNatural | None
    pseudo_inputs: tuple[Array, ...]
    batches: tuple[BatchSite, ...]
    process: Process
    rng_key: Array
    names: tuple[Hashable, ...] = dataclasses.field(metadata={"static": True})
    arrived: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class SparseGP:
    """A Gaussian process with pseudo-inputs over batches of rows that arrive one after another (PVI, section 6 and C).

    q over the function is the prior times a Gaussian site per batch in the values at pseudo-inputs,
    ``q(f) = p(f) prod_m t_m(u_m) / Z``. A batch's site is the best for ``E_q log p(y_m | f) - KL(q || p) + E_q sum log t``
    of the others; Gaussian noise makes it in closed form, other likelihoods by natural-gradient steps of two numbers a row.

    - ``pseudo="private"`` (C.2): each batch brings its own pseudo-inputs and its site is in the values there, ``t_m(b)``. The
      values there are correlated with the older ones by the prior, and so is q. With a batch of n rows and m
      pseudo-inputs, M of them in all, a batch at fixed hyperparameters costs O(n M^2 + M^2 m): its rows of one Cholesky
      factor are appended. Where hyperparameters move, all of it is made anew in every step, O(M^3).
    - ``pseudo="shared"`` (C.1): one set for all batches, O(n m^2 + m^3) a batch. Where it moves (``pseudo_inputs=`` of
      :meth:`add_batch`, or ``move_pseudo_inputs``) the older sites are projected through the prior conditional,
      ``E[log t(u_old) | u_new]``, which loses what the new values leave open; O(m^3) more for every batch kept.

    Hyperparameters, those of kernel and likelihood alike, are

    - ``"point"`` (C.1, C.2): moved by ``optim`` on the online free energy, in which older sites stay the functions of the
      pseudo-values that they are. :meth:`revisit` adds the slopes that the other batches' terms had at their last visit, so that
      visits to all of them in turn stop at the free energy of all rows.
    - ``"distribution"`` (C.3, C.4): q over them is a product of independent Gaussians of the unconstrained numbers, with a
      site for every batch. A batch moves it by ``E_q [increment of the log bound] - KL(q || q without the batch)`` along
      reparameterised draws. Other than in the paper q over pseudo-values is conditional on hyperparameters (prior times
      sites, renormalised at each), which bounds the evidence no worse than a factorised one; sites in pseudo-values are
      made at q's location, and an increment counts what the batch adds at hyperparameters while older sites stay. Increments
      add up in the order of arrival only, so that :meth:`revisit` fits q anew to the whole bound of all sites,
      ``E_q [log bound] - KL(q || prior)``, and puts the change down to its batch.
    - ``"fixed"``.

    Args:
        kernel: ``kernel(params, x, z) -> covariances``, :func:`squared_exponential`, :func:`matern`, or one's own.
        likelihood: :class:`GaussianNoise`, :class:`LogDensity`, or ``f -> NumPyro distribution``.
        pseudo: "private" or "shared".
        hyperparameters: "point", "distribution" or "fixed".
        optim: any optax or NumPyro optimiser; Adam with step 0.05 by default.
        num_steps: of it, at every visit.
        move_pseudo_inputs: whether it moves the pseudo-inputs of the visit as well.
        prior_sd: of q's prior over unconstrained hyperparameters, around where ``init`` puts them; "distribution" only.
        num_nodes: draws of hyperparameters a step, and for predictions; "distribution" only.
        jitter: variance of independent noise in pseudo-values, as a share of their own; 1e-6 by default (1e-5 in float32), and
            0 is right where pseudo-inputs are far apart. The model is exact with it, for noisy values.

    Raises:
        PVIError: for an unknown setting.
    """

    kernel: Kernel
    likelihood: Any
    pseudo: str = "private"
    hyperparameters: str = "point"
    optim: Any = None
    num_steps: int = 100
    move_pseudo_inputs: bool = False
    prior_sd: float = 1.0
    num_nodes: int = 16
    jitter: float | None = None
    _likelihood: Likelihood = dataclasses.field(init=False, repr=False)
    _programs: Programs = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("pseudo", self.pseudo, _PSEUDO),
            ("hyperparameters", self.hyperparameters, _HYPERPARAMETERS),
        ):
            if value not in known:
                raise PVIError(f"SparseGP({name}={value!r}): expected one of {', '.join(map(repr, known))}.")
        if not callable(self.kernel):
            raise PVIError(
                f"SparseGP(kernel={self.kernel!r}): expected a function (params, x, z) -> covariances, such as "
                "gp.squared_exponential or gp.matern(1.5)."
            )
        if self.jitter is not None and self.jitter < 0:
            raise PVIError(f"SparseGP(jitter={self.jitter}): a share of a variance cannot be negative.")
        if self.optim is None:
            import optax

            object.__setattr__(self, "optim", optax.adam(0.05))
        object.__setattr__(self, "_likelihood", as_likelihood(self.likelihood))
        object.__setattr__(self, "_programs", Programs())

    # ------------------------------------------------------------------------------------------------------- the verbs

    def init(
        self,
        rng_key: ArrayLike,
        num_inputs: int,
        *,
        kernel_params: Any = None,
        likelihood_params: Any = None,
        pseudo_inputs: ArrayLike | None = None,
    ) -> SparseGPState:
        """The prior, before any batch.

        Args:
            rng_key: for draws of hyperparameters.
            num_inputs: D, the number of columns of the inputs.
            kernel_params: where the kernel's parameters start, unconstrained; by default :func:`kernel_params` of D columns, which
                fits the kernels of this module.
            likelihood_params: where the likelihood's start; by default where it says.
            pseudo_inputs: Float[m D], the set of ``pseudo="shared"``.

        Returns:
            A state without batches.

        Raises:
            PVIError: shared pseudo-inputs are missing or of another number of columns, or the kernel does not give a matrix.
        """
        kernel = _default_params(num_inputs) if kernel_params is None else kernel_params
        likelihood = self._likelihood.init_params() if likelihood_params is None else likelihood_params
        dtype = jnp.result_type(float)
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), {"kernel": kernel, "likelihood": likelihood})
        self._check_kernel(params, num_inputs)
        flat = ravel_pytree(params)[0]
        q = None
        if self.hyperparameters == "distribution":
            q = NormalFamily(len(flat)).from_loc_sd(flat, jnp.full_like(flat, self.prior_sd))
        if (pseudo_inputs is None) != (self.pseudo == "private"):
            raise PVIError(
                'init(pseudo_inputs=...) is the set of pseudo="shared": give it there, and with pseudo="private" give each '
                "batch its own in add_batch."
            )
        held: tuple[Array, ...] = ()
        process = empty(1, num_inputs, dtype)
        if pseudo_inputs is not None:
            held = (_inputs("pseudo_inputs", pseudo_inputs, num_inputs, dtype),)
            process = empty(len(held[0]), num_inputs, dtype)
            process = dataclasses.replace(process, inputs=held[0])
        return SparseGPState(params, q, held, (), process, rng_key, (), 0)

    def add_batch(
        self,
        state: SparseGPState,
        X: ArrayLike,
        y: ArrayLike,
        *,
        name: Hashable = None,
        pseudo_inputs: int | ArrayLike | None = None,
    ) -> SparseGPState:
        """Take a new batch in, with a site of its own.

        Args:
            state: before it.
            X: Float[N D], its rows' inputs.
            y: [N], its observations, one a row.
            name: to address it by; by default the number of batches before it.
            pseudo_inputs: with ``pseudo="private"`` its own: an array, or how many of its rows to take, those at which
                f is least known (10 by default). With ``pseudo="shared"`` an array moves the set there; by default it stays.

        Returns:
            The state with the batch.

        Raises:
            PVIError: the name is taken, or arrays do not fit.
            ImproperError: the bound is not finite at the batch.
        """
        name = state.arrived if name is None else name
        if name in state.names:
            raise PVIError(f"add_batch(name={name!r}): that batch is there already; revisit takes its rows again.")
        X, y = self._rows(state, f"batch {name!r}", X, y)
        if self.pseudo == "private":
            at = self._own_inputs(state, name, X, 10 if pseudo_inputs is None else pseudo_inputs)
            others = state.process
        else:
            at = state.pseudo_inputs[0]
            if pseudo_inputs is not None:
                at = _inputs(f"batch {name!r}: pseudo_inputs", pseudo_inputs, X.shape[1], X.dtype)
            others = None
        zeros = jnp.zeros_like(ravel_pytree(state.params)[0])
        problem = Problem(X, y, others, self._base(state, None), self._base_inputs(state, at), zeros, state.q)
        moved = self.pseudo == "shared" and (pseudo_inputs is not None or self.move_pseudo_inputs)
        found, setting = self._visited(state, name, problem, at, moved, False)
        return self._joined(state, name, problem, found, setting, None)

    def revisit(self, state: SparseGPState, name: Hashable, X: ArrayLike, y: ArrayLike) -> SparseGPState:
        """Fit a batch's site again from its rows, the others' as they are; hyperparameters move as well.

        Args:
            state: with the batch.
            name: of the batch.
            X: Float[N D], the inputs of its rows, those that it came with.
            y: [N], their observations.

        Returns:
            The state with its site replaced. Visits to all batches in turn, of few steps each, end at the optimum of the bound
            of all rows; with a point for hyperparameters and steps that are small enough that is the batch fit's.

        Raises:
            PVIError: there is no such batch, or arrays do not fit.
            ImproperError: the bound is not finite at the batch.
        """
        k = self._place(state, name)
        X, y = self._rows(state, f"batch {name!r}", X, y)
        without = dataclasses.replace(state, batches=state.batches[:k] + state.batches[k + 1 :])
        process = None
        if self.pseudo == "private":
            process = self._without_block(state, k)
            at = state.pseudo_inputs[k]
        else:
            at = state.pseudo_inputs[0]
        slopes = sum((b.slope for b in without.batches), jnp.zeros_like(ravel_pytree(state.params)[0]))
        around = state.q
        for batch in state.batches:
            around = None if around is None else around - batch.q_site
        base = self._base(state, k)
        problem = Problem(X, y, process, base, self._base_inputs(state, at), slopes, around)
        moved = self.pseudo == "shared" and self.move_pseudo_inputs
        whole = self.hyperparameters == "distribution"
        found, setting = self._visited(state, name, problem, at, moved, whole)
        return self._joined(state, name, problem, found, setting, k)

    def forget(self, state: SparseGPState, name: Hashable) -> SparseGPState:
        """Take a batch's sites out; no rows are needed.

        Args:
            state: with the batch.
            name: of the batch.

        Returns:
            The state without it. Under Gaussian noise at fixed hyperparameters and shared pseudo-inputs that never moved it is
            that of never having seen it; private sites that came after it were made with it there. Point hyperparameters stay.

        Raises:
            PVIError: there is no such batch.
            ImproperError: q over hyperparameters is not proper without its site.
        """
        k = self._place(state, name)
        q = None if state.q is None else state.q - state.batches[k].q_site
        params = state.params
        if q is not None:
            if not is_traced(q) and not bool(jnp.all(q.precision > 0)):
                raise ImproperError(f"batch {name!r}: q over the hyperparameters is not proper without its site.")
            params = ravel_pytree(params)[1](q.precision_mean / q.precision)
        drop = slice(k, k + 1)
        state = dataclasses.replace(
            state,
            params=params,
            q=q,
            pseudo_inputs=_dropped(state.pseudo_inputs, drop) if self.pseudo == "private" else state.pseudo_inputs,
            batches=_dropped(state.batches, drop),
            names=_dropped(state.names, drop),
        )
        return self._refactored(state)

    def predict(self, state: SparseGPState, X: ArrayLike) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
        """Mean and variance of f, the predictor, at inputs.

        Args:
            state: with any number of batches.
            X: Float[N D], inputs.

        Returns:
            Means and variances, of q over hyperparameters' mixture where there is one. Noise is not in them: see
            :meth:`log_predictive`.
        """
        X = _inputs("predict: X", X, state.process.inputs.shape[1], state.process.root.dtype)
        means, spreads = self._run(_predicted, state, X=X)[:2]
        mean = jnp.mean(means, axis=0)
        return mean, jnp.mean(spreads + (means - mean) ** 2, axis=0)

    def log_predictive(self, state: SparseGPState, X: ArrayLike, y: ArrayLike) -> Float[Array, "N"]:
        """``log q(y_n | x_n)`` of new rows, one by one, in nats.

        Args:
            state: with any number of batches.
            X: Float[N D], inputs.
            y: [N], observations.

        Returns:
            Log densities, those of q over hyperparameters' mixture where there is one.

        Raises:
            PVIError: where there is not one finite observation for every row of inputs.
        """
        X, y = self._rows(state, "log_predictive", X, y)
        scores = self._run(_predicted, state, X=X, y=y)[2]
        return logsumexp(scores, axis=0) - jnp.log(len(scores))

    def free_energy(self, state: SparseGPState) -> Float[Array, ""]:
        """The running free energy in nats, to be lowered: minus a bound on the log evidence of all batches.

        Args:
            state: with any number of batches.

        Returns:
            ``-log int p(u) prod_m t_m(u_m) du`` at ``state.params``, in which every site counts its rows as its last visit did.
            After one batch, or visits to all at a fixed point, it is the free energy of those rows. Under q over hyperparameters
            it is minus the sum of what visits added.
        """
        if self.hyperparameters == "distribution":
            return -sum((b.bound for b in state.batches), jnp.zeros((), state.process.root.dtype))
        return -self._programs.of(_evidence, ())(process=state.process)

    def posterior(self, state: SparseGPState) -> tuple[Float[Array, "M D"], GaussianNatural]:
        """q over the values at all pseudo-inputs.

        Args:
            state: with any number of batches.

        Returns:
            All pseudo-inputs, and natural parameters of the Gaussian over the values there: the prior's, and the sites' in their
            places.
        """
        if not state.pseudo_inputs:
            raise StateError('posterior: with pseudo="private" there are no pseudo-inputs before the first batch.')
        inputs = jnp.concatenate(state.pseudo_inputs)
        size = len(inputs)
        process = state.process
        root, target = process.root[:size, :size], process.target[:size]
        return inputs, self._programs.of(_posterior, (("setting", self._setting()),))(
            params=state.params, inputs=inputs, root=root, target=target
        )

    # ---------------------------------------------------------------------------------------------------- behind them

    def _setting(self, moved: bool = False, whole: bool = False) -> Setting:
        learn = {"point": {"params"}, "distribution": {"q"}, "fixed": set()}[self.hyperparameters]
        if self.num_steps and self.move_pseudo_inputs:
            learn = learn | {"inputs"}
        if not self.num_steps and self.hyperparameters == "point":
            learn = set()
        return Setting(
            self.kernel,
            self._likelihood,
            self.jitter,
            self.optim,
            self.num_steps,
            frozenset(learn),
            moved,
            self.num_nodes,
            whole,
        )

    def _run(self, function: Any, state: SparseGPState, **arrays: Any) -> Any:
        static = (("setting", self._setting()),)
        return self._programs.of(function, static)(
            params=state.params, q=state.q, process=state.process, key=state.rng_key, **arrays
        )

    def _visited(
        self, state: SparseGPState, name: Hashable, problem: Problem, at: Array, moved: bool, whole: bool
    ) -> tuple[Visit, Setting]:
        setting = self._setting(moved, whole)
        key = jax.random.fold_in(state.rng_key, state.arrived) if "q" in setting.learn else None
        program = self._programs.of(visit, (("setting", setting),))
        # About how many numbers a visit makes: small ones are compiled at XLA's cheapest level.
        room = 0 if problem.process is None else len(problem.process.inputs)
        work = len(problem.X) * (_NODES + len(at) ** 2 + room**2) + room**3
        level = level_of(work * (1 + self.num_steps * (self.num_nodes if key is not None else 1)))
        found = program(level=level, params=state.params, q=state.q, inputs=at, problem=problem, key=key)
        if not is_traced(found) and not bool(found.valid):
            raise ImproperError(
                f"batch {name!r}: the bound is not finite there. Pseudo-inputs that nearly coincide need a larger jitter; "
                "hyperparameters that ran away need a smaller step of optim or fewer num_steps."
            )
        return found, setting

    def _joined(
        self,
        state: SparseGPState,
        name: Hashable,
        problem: Problem,
        found: Visit,
        setting: Setting,
        k: int | None,
    ) -> SparseGPState:
        """The state with what a visit found, in the place of the batch's old site or after all others."""
        zeros = jnp.zeros_like(ravel_pytree(state.params)[0])
        q_site, bound = GaussianNatural(zeros, zeros), found.value
        if found.q is not None:
            # Whatever a visit moves is put down to its batch.
            q_site = found.q - state.q if k is None else found.q - state.q + state.batches[k].q_site
            others = [b.bound for i, b in enumerate(state.batches) if i != k]
            bound = bound if k is None else bound - sum(others, jnp.zeros_like(bound))
        new = BatchSite(found.site, zeros, q_site, bound)
        batches, held = list(state.batches), list(state.pseudo_inputs)
        if setting.moved:
            project = self._programs.of(_projected, (("setting", setting),))
            batches = [
                dataclasses.replace(b, site=project(params=found.params, old=held[0], site=b.site, new=found.inputs))
                for b in batches
            ]
        if k is None:
            batches.append(new)
        else:
            batches[k] = new
        if self.pseudo == "shared":
            held = [found.inputs]
        elif k is None:
            held.append(found.inputs)
        else:
            held[k] = found.inputs
        fresh = k is None
        before = state
        state = dataclasses.replace(
            state,
            params=found.params,
            q=found.q,
            pseudo_inputs=tuple(held),
            batches=tuple(batches),
            names=(*state.names, name) if fresh else state.names,
            arrived=state.arrived + fresh,
        )
        if self.pseudo == "private" and fresh:
            state = dataclasses.replace(state, process=self._with_block(before, found, setting))
        else:
            state = self._refactored(state)
        if "params" in setting.learn:
            state = self._with_slope(state, problem, found, len(before.batches) if k is None else k)
        return state

    def _with_slope(self, state: SparseGPState, problem: Problem, found: Visit, k: int) -> SparseGPState:
        after = state.process if self.pseudo == "private" else self._base(state, None)
        problem = problem._replace(base=self._base(state, k), base_inputs=found.inputs)
        program = self._programs.of(slope, (("setting", self._setting()),))
        value = program(params=found.params, inputs=found.inputs, problem=problem, rows=found.rows, after=after)
        batches = list(state.batches)
        batches[k] = dataclasses.replace(batches[k], slope=value)
        return dataclasses.replace(state, batches=tuple(batches))

    def _with_block(self, state: SparseGPState, found: Visit, setting: Setting) -> Process:
        """A new private block: appended where the factor is still that of the hyperparameters."""
        offset = sum(len(z) for z in state.pseudo_inputs)
        needed, process = offset + len(found.inputs), state.process
        capacity = max(16, 1 << (needed - 1).bit_length())
        if capacity > len(process.inputs):
            process = grown(process, capacity)
        static = (("setting", setting), ("anew", bool(setting.learn & {"params", "q"})))
        return self._programs.of(_taken_in, static)(
            params=found.params, process=process, inputs=found.inputs, site=found.site, offset=jnp.asarray(offset)
        )

    def _without_block(self, state: SparseGPState, k: int) -> Process:
        """The process given the other private blocks, which stay in their places."""
        kept = [i for i in range(len(state.batches)) if i != k]
        return self._factored(state, kept, len(state.process.inputs))

    def _refactored(self, state: SparseGPState) -> SparseGPState:
        if self.pseudo == "private":
            total = sum(len(z) for z in state.pseudo_inputs)
            capacity = max(16, 1 << (max(total, 1) - 1).bit_length())
            process = self._factored(state, range(len(state.batches)), capacity)
        else:
            static = (("setting", self._setting()),)
            process = self._programs.of(_of_one, static)(
                params=state.params, inputs=state.pseudo_inputs[0], site=self._base(state, None)
            )
        return dataclasses.replace(state, process=process)

    def _factored(self, state: SparseGPState, kept: Any, capacity: int) -> Process:
        process = empty(capacity, state.process.inputs.shape[1], state.process.root.dtype)
        offsets = np.cumsum([0, *(len(z) for z in state.pseudo_inputs)])
        place = self._programs.of(_put, ())
        for i in kept:
            process = place(
                process=process,
                inputs=state.pseudo_inputs[i],
                site=state.batches[i].site,
                offset=jnp.asarray(int(offsets[i])),
            )
        return self._programs.of(_conditioned, (("setting", self._setting()),))(params=state.params, process=process)

    def _base(self, state: SparseGPState, k: int | None) -> PseudoSite:
        """The sum of shared sites without one; a site that says nothing where pseudo-inputs are private."""
        dtype = state.process.root.dtype
        if self.pseudo == "private":
            return unit_site(1, dtype)
        total = unit_site(len(state.pseudo_inputs[0]), dtype)
        for i, batch in enumerate(state.batches):
            if i != k:
                total = total + batch.site
        return total

    def _base_inputs(self, state: SparseGPState, at: Array) -> Array:
        return state.pseudo_inputs[0] if self.pseudo == "shared" else at

    def _own_inputs(self, state: SparseGPState, name: Hashable, X: Array, given: Any) -> Array:
        if not isinstance(given, int | np.integer):
            return _inputs(f"batch {name!r}: pseudo_inputs", given, X.shape[1], X.dtype)
        if given < 1:
            raise PVIError(f"batch {name!r}: pseudo_inputs={given}: expected at least one, or an array of them.")
        static = (("setting", self._setting()), ("count", min(int(given), len(X))))
        return self._programs.of(_spread, static)(params=state.params, process=state.process, X=X)

    def _place(self, state: SparseGPState, name: Hashable) -> int:
        if name not in state.names:
            known = ", ".join(map(repr, state.names)) or "none"
            raise PVIError(f"there is no batch {name!r}: the batches of this state are {known}.")
        return state.names.index(name)

    def _rows(self, state: SparseGPState, what: str, X: Any, y: Any) -> tuple[Array, Array]:
        X = _inputs(f"{what}: X", X, state.process.inputs.shape[1], state.process.root.dtype)
        y = jnp.asarray(y)
        if y.shape != X.shape[:1]:
            raise PVIError(f"{what}: y has shape {y.shape}, expected ({len(X)},), one observation for every row of X.")
        if not is_traced(y) and not bool(jnp.all(jnp.isfinite(y))):
            raise PVIError(f"{what}: y has entries that are not finite.")
        return X, y

    def _check_kernel(self, params: Any, num_inputs: int) -> None:
        x, z = jnp.zeros((3, num_inputs)), jnp.ones((2, num_inputs))
        try:
            shape = jax.eval_shape(self.kernel, params["kernel"], x, z).shape
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise PVIError(
                f"kernel(params, x, z) failed for 3 and 2 inputs of {num_inputs} columns: {type(error).__name__}: {error}. Does "
                "init(kernel_params=...) fit it?"
            ) from error
        if shape != (3, 2):
            raise PVIError(f"kernel(params, x, z) gave shape {shape} for 3 and 2 inputs, expected (3, 2).")


def _dropped(values: tuple, drop: slice) -> tuple:
    return values[: drop.start] + values[drop.stop :]


def _default_params(dim: int) -> dict[str, Array]:
    return kernel_params(dim)


def _inputs(where: str, given: Any, dim: int, dtype: Any) -> Array:
    found = jnp.asarray(given, dtype)
    if found.ndim != 2 or found.shape[1] != dim or not len(found):
        raise PVIError(f"{where} has shape {found.shape}, expected at least one row of {dim} columns.")
    if not is_traced(found) and not bool(jnp.all(jnp.isfinite(found))):
        raise PVIError(f"{where} has entries that are not finite.")
    return found


# --------------------------------------------------------------------------------------------------- what is compiled


def _evidence(*, process: Process) -> Array:
    return evidence(process)


def _conditioned(*, setting: Setting, params: Any, process: Process) -> Process:
    return conditioned(setting.prior(params), process)


def _put(*, process: Process, inputs: Array, site: PseudoSite, offset: Array) -> Process:
    return placed(process, block_of(inputs, site.natural, site.log_scale), offset)


def _taken_in(
    *, setting: Setting, anew: bool, params: Any, process: Process, inputs: Array, site: PseudoSite, offset: Array
) -> Process:
    block, prior = block_of(inputs, site.natural, site.log_scale), setting.prior(params)
    return conditioned(prior, placed(process, block, offset)) if anew else appended(prior, process, block, offset)


def _of_one(*, setting: Setting, params: Any, inputs: Array, site: PseudoSite) -> Process:
    block: Block = block_of(inputs, site.natural, site.log_scale)
    process = empty(len(inputs), inputs.shape[1], inputs.dtype)
    return conditioned(setting.prior(params), placed(process, block, 0))


def _projected(*, setting: Setting, params: Any, old: Array, site: PseudoSite, new: Array) -> PseudoSite:
    return projected(setting.prior(params), old, site, new)


def _posterior(*, setting: Setting, params: Any, inputs: Array, root: Array, target: Array) -> GaussianNatural:
    family = MultivariateNormalFamily(len(inputs))
    prior = family.from_loc_covariance(jnp.zeros_like(target), setting.prior(params).gram(inputs))
    return family.symmetrise(prior + GaussianNatural(root @ target, root @ root.T))


def _spread(*, setting: Setting, count: int, params: Any, process: Process, X: Array) -> Array:
    prior = setting.prior(params)
    _, half = reach(prior, process, X)

    def column(at: Array) -> Array:
        return prior.covariance(X, X[at][None])[:, 0] - half.T @ half[:, at]

    return X[spread_rows(column, prior.variance(X) - jnp.sum(half**2, axis=0), count)]


def _predicted(
    *, setting: Setting, params: Any, q: GaussianNatural | None, process: Process, key: Array, X: Array, y: Any = None
) -> tuple[Array, Array, Array]:
    """Means, variances and log predictive densities at each of the hyperparameters' nodes; one where they are a point."""

    def at(params: Any, process: Process) -> tuple[Array, Array, Array]:
        prior: Prior = setting.prior(params)
        mean, variance = marginals(prior, process, X)
        score = mean if y is None else setting.likelihood.log_predictive(params["likelihood"], y, mean, variance)
        return mean, variance, score

    if q is None:
        return jax.tree.map(lambda x: x[None], at(params, process))
    flat, unravel = ravel_pytree(params)
    nodes = flat + draws(setting, params, key) / jnp.sqrt(q.precision)
    return jax.lax.map(lambda node: at(unravel(node), conditioned(setting.prior(unravel(node)), process)), nodes)
