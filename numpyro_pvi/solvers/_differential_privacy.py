"""Differential privacy: what groups release is clipped and noised, and what was released is counted."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._numerics import all_finite
from ..errors import PVIError, StateError
from ..expectations import Expected
from ..families import whitening
from ..sites import MAX_HALVINGS, back_off, select
from ._base import BatchStep, Derivatives, LocalFactor, LocalResult, PrivacySpent, SolverDefaults
from ._minibatch import SMALLEST_SHARE, check_batch_size

# What is folded into a visit's key for the noise, so that the wrapped solver draws what it draws without it.
_NOISE = 0xD1FF
# Rows whose gradients are held at once.
_AT_ONCE = 256
# Noise multipliers between which `calibrated` looks, and how near it comes.
_LEAST, _MOST, _NEAR = 0.05, 1e4, 1e-3


class PrivateState(NamedTuple):
    """One group's memory: the wrapped solver's, how many visits have released something, in which fit, and under which terms."""

    inner: Any
    releases: Int[Array, ""]
    # Where clients count beside their rows, the name that the fit has with them; else 0.
    fit: Int[Array, ""]
    # Noise multiplier, rows of a batch (0: all), steps of a visit (0: by passes), passes, level and relation as numbers.
    terms: Float[Array, "6"]


def counts_releases(state: Any) -> bool:
    """Whether a memory counts what visits have released of the rows."""
    return isinstance(state, PrivateState)


@dataclasses.dataclass(frozen=True)
class DifferentialPrivacy(SolverDefaults):
    """What a group's visits release, clipped and noised, so that it says little of any one group, or of any one row.

    With ``x`` the *whitened* coordinates of a change of natural parameters at the q that the visit starts from (of which a step
    of length 1 moves q by one posterior sd, :func:`numpyro_pvi.families.whitening`; q is known to everybody), and
    ``s = noise_multiplier * sensitivity``:

    * ``level="group"``: the wrapped solver refines the site to ``eta_m + u``, and what is released is

          eta_m <- eta_m + R^-T (x min(1, clip / norm(x)) + s xi),      x = R^T u,   xi ~ N(0, I),

      whatever the solver did on its way; it remembers nothing of the visit.
    * ``level="row"`` (DP-SGD): every step of :class:`LocalELBO` sees, in the place of the sum of its rows' gradients,
      ``sum_n x_n min(1, clip / |x_n|) + s xi``, with ``x_n`` one row's, whitened: under Gaussian guides its gradients at the
      step's draws, ``S^T grad f_n`` (precisions follow from the same noised gradients by Stein's identity), under
      ``AutoExponentialFamily`` the message ``R^T dE_q[log p(y_n | theta)] / d mu``. With ``batch_size`` every step draws its
      own rows afresh, without replacement.

    ``sensitivity`` is how far what is released can move between neighbouring data: ``2 clip`` where one group's (one row's) data
    are *replaced* by any others, or a group's are *removed*, that is replaced by data that say nothing (its site then changes back
    to 1); ``clip`` where one row's are removed. The number of groups and of their rows is the same for both neighbours. Releases
    compose: Gaussian mechanisms by Renyi differential privacy, sampled batches by its amplification, both counted by the ``dp-
    accounting`` library; groups' rows are disjoint, so that the largest group's epsilon is everybody's. ``pvi.info(state)`` and
    the result of ``run`` have ``epsilon`` and ``delta`` for *all visits that were made*, absorbed or not; the count is part of
    the state, so that a run that goes on from a state, a file or a checkpoint goes on counting. A fit from the beginning is a new
    release: the epsilons of several add up.

    What rounds may look at: sites alone. Under this solver no pass over the rows is made beside the visits: there is no acceptance
    by the ELBO (a joint step is halved only until q is normalisable), ``losses`` are NaN, ``tol`` is about the noised moves, no
    structure is used that was not proved from the model's program, quadrature is not refined by common looks, sites start at 1.
    ``evaluate``, ``log_evidence``, ``khat``, ``prequential``, ``to_arviz``, ``optim``, curvature starts, latents inside the
    plate, observations outside of it, and groups that come and go are refused.

    **What is not protected**: the model, its arguments' shapes and dtypes, the groups' labels, the number of rows of every group
    and which row belongs to which, the number of rounds; a prior that is made of the rows, and arguments that the model reads
    in Python; that the data are finite and the model splits (``init`` raises where not); anything, once the key is known or
    guessed, from which the noise can be made again (``jax.random.key(0)``; make one of the operating system's randomness and do
    not keep it; the key of a saved state makes *later* noise), or is used twice: two fits of other rows, or by another clip,
    from one key or state have the same noise, which goes out of their difference. Noise is of ordinary floating point numbers
    and JAX's generator: attacks on low bits, and on time and memory that are taken, are outside of the guarantee.
    ``level="row"`` protects a row and not a person with several rows; ``level="group"`` protects a group from who sees all that
    is released, not from its own process.

    Args:
        solver: the solver. ``level="group"``: ``NaturalGradient``, ``Conjugate``, ``LocalELBO`` or ``StochasticNaturalGradient``;
            ``level="row"``: ``LocalELBO`` (``curvature`` "auto" or "steps", an optimiser without a line search).
        noise_multiplier: sd of the noise over the sensitivity; 0 adds none, and epsilon is infinite.
        clip: largest whitened length of a change (a row's gradient); infinity clips nothing, and goes with no noise.
        level: what is protected, "group" or "row".
        relation: neighbouring data, "replace" or "remove". Batches are sampled with the amplification of "replace" alone.
        delta: the probability beside epsilon, in (0, 1); below one over the number of groups (of rows) it means something.

    Raises:
        PVIError: on construction, for values outside these ranges, a solver whose visits cannot be made private, or where there is
            noise and ``dp-accounting`` is not installed.

    References:
        Heikkila et al., Differentially Private Partitioned Variational Inference, algorithms 2 (DP optimisation: rows) and 3
        (perturbed changes: groups). Abadi et al., Deep Learning with Differential Privacy, algorithm 1. Mironov, Renyi
        Differential Privacy, propositions 1, 3 and 7. Wang et al., Subsampled Renyi Differential Privacy, theorem 9.
    """

    solver: Any
    noise_multiplier: float
    clip: float
    level: str = "group"
    relation: str = "replace"
    delta: float = 1e-5

    private = True
    rereads = True

    def __post_init__(self):
        def refuse(argument: str, wanted: str) -> None:
            raise PVIError(f"DifferentialPrivacy({argument}={getattr(self, argument)!r}): expected {wanted}.")

        if self.level not in ("group", "row"):
            refuse("level", "'group' or 'row'")
        if self.relation not in ("replace", "remove"):
            refuse("relation", "'replace' (a neighbour has other data) or 'remove' (a neighbour has none)")
        for name in ("noise_multiplier", "clip", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                refuse(name, "a number")
        if not 0.0 <= self.noise_multiplier < math.inf:
            refuse("noise_multiplier", "a finite number that is not negative; 0 adds no noise")
        if not self.clip > 0.0:
            refuse("clip", "a positive number, in posterior sds; math.inf clips nothing")
        if not 0.0 < self.delta < 1.0:
            refuse("delta", "a probability in (0, 1), such as 1e-5")
        if self.noise_multiplier > 0 and math.isinf(self.clip):
            raise PVIError(
                f"DifferentialPrivacy(noise_multiplier={self.noise_multiplier!r}, clip=inf): without a bound on what "
                "is released no noise protects it. Give a clip, in posterior sds, such as 1.0."
            )
        _check_solver(self.solver, self.level)
        if self.noise_multiplier > 0:
            accounting()
        if self.level == "row" and self.relation == "remove" and self.solver.batch_size is not None:
            raise PVIError(
                "DifferentialPrivacy(level='row', relation='remove') with a batch_size: a batch without the row has "
                "another in its place, so that neighbouring batches differ by a replacement, whose sensitivity is "
                "twice the clip. Write relation='replace', or batch_size=None."
            )

    @classmethod
    def calibrated(
        cls,
        solver: Any,
        *,
        epsilon: float,
        clip: float,
        rounds: int,
        delta: float = 1e-5,
        level: str = "group",
        relation: str = "replace",
        num_rows: int | Sequence[int] | None = None,
    ) -> DifferentialPrivacy:
        """The solver with the least noise that keeps to a budget.

        Args:
            solver: as of the class.
            epsilon: the budget, in nats.
            clip: as of the class.
            rounds: visits of a group that the budget is for: one a round under ``Synchronous``, ``Sequential``, at most one under
                ``StochasticSubset``; under ``Streaming`` and ``Committee`` all visits of their one round.
            delta: as of the class.
            level: as of the class.
            relation: as of the class.
            num_rows: rows of every group; for ``level="row"`` with ``batch_size``, where the largest epsilon of any counts: a small
                group's batches hold a larger share of it, and passes over a large one take more steps. One int stands for groups
                that are all of that size.

        Returns:
            The solver; its ``epsilon(rounds, num_rows)`` is at most the budget, and at least .99 of it.

        Raises:
            PVIError: for numbers out of range, or a budget that no noise multiplier between .05 and 10,000 keeps to.
        """
        if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0.0 < epsilon < math.inf:
            raise PVIError(f"DifferentialPrivacy.calibrated(epsilon={epsilon!r}): expected a positive number of nats.")
        if isinstance(rounds, bool) or not isinstance(rounds, (int, np.integer)) or rounds < 1:
            raise PVIError(f"DifferentialPrivacy.calibrated(rounds={rounds!r}): expected a positive int.")

        def at(noise: float) -> DifferentialPrivacy:
            return cls(solver, noise, clip, level, relation, delta)

        sizes = tuple(num_rows) if isinstance(num_rows, Sequence | np.ndarray) else (num_rows,)

        def spent(noise: float) -> float:
            return max(at(noise).epsilon(rounds, None if size is None else int(size)) for size in sizes)

        few, many = math.log(_LEAST), math.log(_MOST)
        if spent(_MOST) > epsilon:
            raise PVIError(
                f"DifferentialPrivacy.calibrated(epsilon={epsilon!r}, rounds={rounds}): no noise multiplier up to "
                f"{_MOST:g} keeps to it. Take fewer rounds, or a larger epsilon or delta."
            )
        if spent(_LEAST) <= epsilon:
            return at(_LEAST)
        while many - few > _NEAR:
            middle = 0.5 * (few + many)
            few, many = (few, middle) if spent(math.exp(middle)) <= epsilon else (middle, many)
        return at(math.exp(many))

    # ------------------------------------------------------------------ what was released

    @property
    def sensitivity(self) -> float:
        """How far one group's change, or a sum of rows' gradients, can move between neighbouring data; posterior sds.

        A group whose data say nothing changes its site as well, back to 1: only of a row's gradient is nothing left.
        """
        return self.clip * (1.0 if self.relation == "remove" and self.level == "row" else 2.0)

    def epsilon(self, visits: int, num_rows: int | None = None) -> float:
        """Epsilon, in nats, of a number of visits of one group at ``delta``.

        Args:
            visits: how many.
            num_rows: rows of the group; for ``level="row"`` where a visit samples batches, or is as long as its passes.

        Returns:
            Nats; 0 for none, infinity without noise.

        Raises:
            PVIError: when rows are needed and not given.
        """
        if int(visits) == 0:
            return 0.0
        if self.noise_multiplier == 0:
            return math.inf
        steps, share = self._steps(num_rows)
        return _epsilon(float(self.noise_multiplier), int(visits) * steps, share, float(self.delta))

    def _steps(self, num_rows: int | None) -> tuple[int, tuple[int, int] | None]:
        """Releases of one visit, and (batch, rows) where each is of a sampled batch."""
        if self.level == "group":
            return 1, None
        inner = self.solver
        passes = 1.0 if inner.epochs is None else float(inner.epochs)
        if inner.batch_size is None:
            return (math.ceil(passes) if inner.num_steps is None else inner.num_steps), None
        if num_rows is None:
            raise PVIError(
                "DifferentialPrivacy(level='row') with a batch_size: epsilon depends on the share of rows in a "
                "batch. Give num_rows, the rows of the group."
            )
        rows = int(num_rows)
        # As plan_batches counts them.
        steps = inner.num_steps or math.ceil(passes * rows / inner.batch_size * (1 - 1e-6))
        return steps, (inner.batch_size, rows)

    def privacy(self, state: PrivateState, sizes: tuple[int, ...]) -> PrivacySpent:
        """What the groups have spent: see :class:`numpyro_pvi.solvers.LocalSolver`.

        Raises:
            StateError: for a state of other terms, whose count says nothing under these.
        """
        self.check_state(state)
        counts = np.asarray(jax.device_get(state.releases)).reshape(-1)
        spent = [self.epsilon(int(n), size) for n, size in zip(counts, sizes, strict=True)]
        return PrivacySpent(np.asarray(spent, float), float(self.delta), counts)

    def counter(self, state: PrivateState) -> int:
        """Where visits are counted: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        return len(jax.tree.leaves(state.inner))

    def check_sums(self) -> None:
        """Raise where epsilon depends on how many rows each group has, which are told together.

        Raises:
            PVIError: for sampled batches.
        """
        if self.level == "row" and self.solver.batch_size is not None:
            raise PVIError(
                f"DifferentialPrivacy(level='row') with batch_size={self.solver.batch_size}: what a visit spends depends on the "
                "client's own number of rows, and clients that are heard in sums are one group, whose rows are all of theirs. "
                "Write LocalELBO(num_steps=..., batch_size=None), or runtime=InProcess(clients=...), whose clients answer in turn."
            )

    def check_state(self, state: Any) -> None:
        """Refuse a state whose visits were counted under other terms, or not at all.

        Raises:
            StateError: naming what is other.
        """
        if not isinstance(state, PrivateState):
            raise StateError(
                "this state was made without DifferentialPrivacy: what its sites say of the rows is covered by no "
                "noise and in no count. Begin anew, without init_state, or go on with the solver that it was made "
                "with."
            )
        found, own = np.asarray(jax.device_get(state.terms)).reshape(-1, 6), np.asarray(self._terms(), np.float32)
        if not np.array_equal(found.astype(np.float32), np.broadcast_to(own, found.shape)):
            names = ("noise_multiplier", "batch_size", "num_steps", "epochs", "level", "relation")
            worst = int(np.argmax(np.any(found.astype(np.float32) != own, axis=0)))
            raise StateError(
                f"this state's visits were released under another {names[worst]} than this DifferentialPrivacy has, "
                "so that its count of releases says nothing here: go on with the solver that the state was made "
                "with. A fit of the same rows from the beginning is one more release, whose epsilon adds to this "
                "one's."
            )

    def _terms(self) -> tuple[float, ...]:
        batch = steps = passes = 0.0
        if self.level == "row":
            inner = self.solver
            batch, steps, passes = float(inner.batch_size or 0), float(inner.num_steps or 0), float(inner.epochs or 0)
        kind = float(self.level == "row"), float(self.relation == "remove")
        return (float(self.noise_multiplier), batch, steps, passes, *kind)

    # ------------------------------------------------------------------ what the wrapped solver says

    @property
    def num_draws(self) -> Any:
        """The wrapped solver's."""
        return self.solver.num_draws

    @property
    def num_particles(self) -> Any:
        """The wrapped solver's, of one that is ``stochastic``."""
        return self.solver.num_particles

    @property
    def stochastic(self) -> Any:
        """As the wrapped solver."""
        return self.solver.stochastic

    @property
    def closed_form(self) -> Any:
        """As the wrapped solver."""
        return self.solver.closed_form

    @property
    def step_size(self) -> Any:
        """The wrapped solver's."""
        return self.solver.step_size

    @property
    def num_steps(self) -> Any:
        """The wrapped solver's."""
        return self.solver.num_steps

    @property
    def expectation(self) -> Any:
        """The wrapped solver's."""
        return self.solver.expectation

    @property
    def curvature(self) -> Any:
        """The wrapped solver's."""
        return self.solver.curvature

    @property
    def blocks(self) -> Any:
        """The wrapped solver's."""
        return self.solver.blocks

    @property
    def moves_alone(self) -> Any:
        """As the wrapped solver."""
        return self.solver.moves_alone

    @property
    def power(self) -> Any:
        """The wrapped solver's."""
        return self.solver.power

    @property
    def for_prior(self) -> Any:
        """The wrapped solver's: the prior says nothing of any row."""
        return self.solver.for_prior

    def init(self, family: Any, dtype: Any) -> PrivateState:
        """Nothing released yet."""
        return self._counting(self.solver.init(family, dtype))

    def init_among(self, family: Any, dtype: Any, count: int) -> PrivateState:
        """The same where the number of groups matters."""
        return self._counting(self.solver.init_among(family, dtype, count))

    def _counting(self, inner: Any) -> PrivateState:
        return PrivateState(inner, jnp.int32(0), jnp.int32(0), jnp.asarray(self._terms(), jnp.float32))

    def init_groups(self, groups: Any, state: Any) -> PrivateState:
        """The wrapped solver's own by group."""
        return state._replace(inner=self.solver.init_groups(groups, state.inner))

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise where rows have latents of their own, which would lie in the state unprotected; and as the wrapped solver.

        Raises:
            PVIError: saying what to write.
        """
        if structure == "local":
            raise PVIError(
                f"DifferentialPrivacy does not fit the {where}, which has local latents (inside the partitioned "
                "plate): their posteriors, one a row, are part of the state and are not noised. Integrate them out, "
                "or fit without it."
            )
        self.solver.check(structure, full, where)

    def check_families(self) -> None:
        """As the wrapped solver."""
        self.solver.check_families()

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Raise where no row stands by itself, and as the wrapped solver.

        Raises:
            PVIError: saying what to write.
        """
        if mechanism != "args":
            raise PVIError(
                "DifferentialPrivacy goes with models that are given a group's rows and nothing else; here groups are evaluated "
                f"by {mechanism!r}, so that the model has all rows at hand and may let some say something of others (a mean "
                "that is taken off, ids into them), which no clip of one group's bounds. Pass every per-row array as an "
                "argument, size the plate by one of them, and move such steps out of the model: see Partition.plan(*args)."
            )
        self.solver.check_groups(sizes, mechanism)
        if self.level == "row":
            # A row that is in a batch twice would move what is released by two clips.
            check_batch_size(type(self.solver).__name__, self.solver.batch_size, sizes, mechanism, filled=True)

    # ------------------------------------------------------------------ a visit

    def solve(
        self,
        factor: LocalFactor,
        cavity: Any,
        site: Any,
        state: PrivateState,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`. A look that was taken elsewhere is not looked at."""
        solve = self._solve_rows if self.level == "row" else self._solve_group
        found = solve(factor, cavity, site, state.inner, key, guarded)
        return found._replace(state=state._replace(inner=found.state, releases=state.releases + 1))

    def _solve_group(self, factor: Any, cavity: Any, site: Any, inner: Any, key: Any, guarded: bool) -> LocalResult:
        family = factor.family
        found = self.solver.solve(factor, cavity, site, inner, key, start=None, guarded=guarded)
        if math.isinf(self.clip):
            return found._replace(step=None)
        q = cavity + site
        white = whitening(family, q)
        released = self._released(white.coordinates(found.site - site), jax.random.fold_in(key, _NOISE))
        change = white.change(released)
        # From here on everything is made of what is released, and of q.

        def valid(share: Any) -> Array:
            return family.in_domain(q + change * (share / (1 - SMALLEST_SHARE)))

        share, tries = back_off(valid, jnp.ones((), released.dtype))
        new = family.symmetrise(site + change * share)
        good = (tries < MAX_HALVINGS) & family.in_domain(q) & all_finite(new)
        # What the solver would remember of the visit is made of the rows, and no noise covers it.
        return LocalResult(select(good, new, site), inner, tries, good)

    def _released(self, x: Float[Array, "K"], key: Any) -> Float[Array, "K"]:
        """A change, clipped and noised; one that is not finite says nothing."""
        return clipped(x, self.clip) + self.noise_multiplier * self.sensitivity * jax.random.normal(
            key, x.shape, x.dtype
        )

    def _solve_rows(self, factor: Any, cavity: Any, site: Any, inner: Any, key: Any, guarded: bool) -> LocalResult:
        q, family = cavity + site, factor.family
        by_rows = PrivateRows(
            family=family,
            factor=factor,
            clip=self.clip,
            sd=0.0 if self.noise_multiplier == 0 else self.noise_multiplier * self.sensitivity,
            moments=family.moments(q) if factor.pointwise else None,
            white=None if factor.pointwise else whitening(family, q),
        )
        solver = self.solver.by_gradients(factor.pointwise)
        return solver.solve(by_rows, cavity, site, inner, key, start=None, guarded=guarded)


def clipped(x: Float[Array, "*K"], clip: float) -> Float[Array, "*K"]:
    """A vector (of any shape) of length at most ``clip``; zero where it is not finite."""
    # Entries beyond it would make an infinite length of a finite vector.
    largest = jnp.max(jnp.abs(x), initial=0.0)
    sound = jnp.isfinite(largest)
    x = jnp.where(sound, x, 0.0)
    if math.isinf(clip):
        return x
    unit = jnp.where(sound & (largest > 0), largest, 1.0)
    length = unit * jnp.sqrt(jnp.sum((x / unit) ** 2))
    return x * jnp.minimum(1.0, clip / jnp.maximum(length, jnp.finfo(x.dtype).tiny))


# ------------------------------------------------------------------------------------------------------- rows, one by one


@dataclasses.dataclass(frozen=True)
class PrivateRows:
    """One group's factor whose rows are heard in clipped and noised sums only: a :class:`numpyro_pvi.solvers.LocalFactor`.

    ``clip``: largest length of a row's gradient, whitened; ``sd``: of the noise in every whitened coordinate of a sum;
    ``moments``: q at the start of the visit, a Gaussian's, by which gradients are whitened; else None; ``white``: whitened
    coordinates of a product of families at the same q; else None.
    """

    family: Any
    factor: Any
    clip: float
    sd: float
    moments: Any
    white: Any

    quadratic = False
    noisy = True
    # Every step draws its rows anew, which is what the accounting is for.
    fresh_batches = True

    @property
    def pointwise(self) -> bool:
        """As the factor."""
        return self.factor.pointwise

    @property
    def num_rows(self) -> Any:
        """N_m."""
        return self.factor.num_rows

    @property
    def max_rows(self) -> int:
        """Rows of the largest group."""
        return self.factor.max_rows

    def expected(self, moments: Any) -> Expected:
        """There is no noised expectation."""
        raise NotImplementedError("rows are heard in noised sums of gradients only")

    def derivatives(
        self,
        points: Float[Array, "S D"],
        rows: Int[Array, "B"] | None = None,
        hessian: bool = False,
        key: Any = None,
    ) -> Derivatives:
        """Noised gradients of the rows' sum at points, whose mean over the points has the noise of one release; no values."""
        if hessian or key is None:
            raise NotImplementedError("rows are heard in noised sums of gradients only, each with a key of its own")
        scale, count = self.moments.scale, points.shape[0]

        def one(row: Int[Array, ""]) -> Array:
            gradient = self.factor.derivatives(points, row[None]).gradient
            return (gradient @ scale if self.family.full else gradient * scale) / math.sqrt(count)

        total = self._total(one, rows, key) * math.sqrt(count)
        if self.family.full:
            # S^T g = u, with S the inverse of a triangular root.
            gradient = jnp.linalg.solve(scale.T, total.T).T
        else:
            gradient = total / scale
        return Derivatives(jnp.zeros((count,), total.dtype), gradient, None)

    def at_rows_draws(self, moments: Any, count: int, key: Any, rows: Int[Array, "B"] | None = None) -> Derivatives:
        """A row's draw is its own gradient's; solvers that ask for them are refused."""
        raise NotImplementedError("rows are heard in noised sums of gradients only")

    def message(self, cavity: Any, site: Any, key: Any, rows: Int[Array, "B"] | None = None) -> Expected:
        """The noised message of a product of families, for the whole group; no value."""
        weight = 1.0 / self.num_rows

        def one(row: Int[Array, ""]) -> Array:
            # Of one row the group's message is N_m times its own.
            return self.white.coordinates(self.factor.message(cavity, site, key, row[None]).target) * weight

        heard = 1.0 if rows is None else self.num_rows / rows.shape[0]
        total = self._total(one, rows, key) * heard
        zero = jnp.zeros((), total.dtype)
        return Expected(zero, self.white.change(total), None, zero, zero, zero)

    def step(self, cavity: Any, site: Any, share: Any, key: Any, rows: Int[Array, "B"] | None = None) -> BatchStep:
        """Steps are the solver's own."""
        raise NotImplementedError("rows are heard in noised sums of gradients only")

    def _total(self, one: Any, rows: Int[Array, "B"] | None, key: Any) -> Array:
        """The sum over rows of what each says, clipped, with noise."""
        if rows is None:
            rows = jnp.arange(self.max_rows)
            there = rows < self.num_rows
            rows = jnp.minimum(rows, self.num_rows - 1)
        else:
            there = jnp.ones(rows.shape, bool)

        def heard(xs: tuple) -> Array:
            row, counts = xs
            return jnp.where(counts, clipped(one(row), self.clip), 0.0)

        each = jax.lax.map(heard, (rows, there), batch_size=min(_AT_ONCE, rows.shape[0]))
        total = jnp.sum(each, axis=0)
        # The step's own key is what the wrapped solver draws by.
        return total + self.sd * jax.random.normal(jax.random.fold_in(key, _NOISE), total.shape, total.dtype)


# ------------------------------------------------------------------------------------------------------------- accounting


def _check_solver(solver: Any, level: str) -> None:
    """Refuse solvers whose visits cannot be made private."""
    name = type(solver).__name__
    if solver.private:
        raise PVIError(
            f"DifferentialPrivacy({name}(...)) wraps a solver that is private already: wrap the plain one once."
        )
    if solver.tied:
        raise PVIError(
            f"DifferentialPrivacy({name}(...)): groups share one site, which every group moves by 1/M of what it asks "
            "for, so that no change is a single group's to be clipped. Write PVI's other solvers, such as "
            "NaturalGradient()."
        )
    if solver.matches_moments:
        raise PVIError(
            f"DifferentialPrivacy({name}(...)): what it remembers of its visits (effective sample sizes, whether "
            "chains are wanted, errors of quadrature) steers the rounds and is shown by info: looks at the rows that "
            "no noise covers. Write NaturalGradient() or LocalELBO(...)."
        )
    if level == "group" and solver.carries_optimiser:
        raise PVIError(
            f"DifferentialPrivacy({name}(optimiser_state='keep'), level='group'): the optimiser's state, made of "
            "gradients that no noise covers, is part of the state that is saved and shown. Write "
            "optimiser_state='reset'."
        )
    if solver.sites == "rows":
        raise PVIError(
            f"DifferentialPrivacy({name}(sites='rows')): sites that are two numbers per row hold what rows say one by "
            "one. Leave sites out."
        )
    if level == "row":
        solver.by_gradients(True)


def accounting() -> Any:
    """The library that counts. Raises PVIError naming the line to install."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise PVIError(
            "DifferentialPrivacy counts epsilon with the package dp-accounting, which is not installed: "
            "pip install 'numpyro_pvi[privacy]'."
        )
    import dp_accounting

    return dp_accounting


@functools.lru_cache(maxsize=4096)
def _epsilon(noise: float, releases: int, share: tuple[int, int] | None, delta: float) -> float:
    """Epsilon of a number of Gaussian releases, each of a batch of rows where ``share`` is (batch, rows)."""
    library = accounting()
    from dp_accounting.rdp import RdpAccountant

    event = library.GaussianDpEvent(noise)
    if share is not None and share[0] < share[1]:
        event = library.SampledWithoutReplacementDpEvent(share[1], share[0], event)
    accountant = RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(event, releases).get_epsilon(delta))
