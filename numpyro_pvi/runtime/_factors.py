"""What is known of the factors of a fit before anything is evaluated: their arrays, their rows, one group's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import hessian_of, value_and_grad
from ..expectations import (
    Expected,
    LocalLatentProgram,
    LocalNoise,
    PointSet,
    PointsProgram,
    ReparameterisedProgram,
    at_rows_draws,
)
from ..factors import GroupMasks, Packing
from ..families import ConditionalNatural, GaussianFamily, GaussianMoments, GaussianNatural
from ..schedules import Rule
from ..sites import take
from ..solvers import BatchStep, Derivatives, LocalSolver
from ._base import Runtime, Vmap, sum_span
from ._refinement import WideRows

# --------------------------------------------------------------------------------------------------------------- arrays
# Arrays that a problem is made of: those of its factors, and a round's draws.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorData:
    """Arrays of all factors, prepared once per run from the model's arguments."""

    # Leading chunk axis C; a quadratic likelihood has one "chunk" per group.
    chunks: Any
    chunk_group: Int[Array, "C"]
    offsets: Int[Array, "ends"]
    prior: Any
    prior_natural: GaussianNatural
    # Which flat coordinates the exactly held prior covers, and minus its log density at the origin in nats: its log partition
    # function, where it is normalised.
    exact: Bool[Array, "D"]
    prior_partition: Float[Array, ""]
    # Product of the sites of groups whose rows are not at hand; None without any.
    others: GaussianNatural | None = None


class Draws(NamedTuple):
    """A round's standard normal draws; one row of zeros among ``pairs`` evaluates at the location."""

    pairs: Float[Array, "S D"]
    # For the comparison with sigma points.
    compared: Float[Array, "K D"]
    # Random point sets of the likelihood and of the prior factor, where they have no structure.
    points: PointSet | None
    prior_points: PointSet | None
    # For every unit's local latents, so that a unit's draws do not depend on the partition, or None: see LocalNoise.
    local: Float[Array, "U T K"] | None = None
    # The batch of these that is meant, where fixed points are compared with batches: see LocalNoise.
    batch: Int[Array, ""] | None = None


# ------------------------------------------------------------------------------------------------------- rows at points
# Log-likelihoods of a group's rows at points: what stochastic solvers take their steps from, and rounds are tested by.


# Where rows are that nobody has placed.
_HERE = Vmap()


class OwnRows(NamedTuple):
    """What q says of the rows' own latents given the shared ones, as the rows are packed, and each row's place in its group."""

    conditionals: ConditionalNatural
    # By which its draws are told, whatever else is in a chunk.
    places: Int[Array, "C R"]


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """The rows of all groups, gathered when they are asked for and never copied as a whole.

    ``density``: ``(chunk, point) -> nats``, the log-likelihood of the rows that a chunk names; ``sizes``: rows of each group;
    with ``padded``, those there is room for; ``padded``: whether the packing's masks say how many of them there are; ``own``:
    where rows have latents of their own, what q says of them: a chunk is then the rows that it names, their conditionals, and
    draws of a standard normal, Float[R P K], over which ``density`` averages.
    """

    density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    packing: Packing | GroupMasks
    sizes: tuple[int, ...]
    padded: bool = False
    runtime: Runtime = _HERE
    own: OwnRows | None = None

    # Rows give derivatives at points.
    pointwise = True

    @property
    def equal(self) -> bool:
        """Whether all groups have as many rows."""
        return len(set(self.sizes)) == 1

    def num_rows(self, group: Int[Array, ""]) -> int | Int[Array, ""]:
        """Rows of one group: a number known beforehand where it is the same for all."""
        if self.padded and isinstance(self.packing, Packing):
            counts = jnp.sum(self.packing.mask, axis=1, dtype=jnp.int32)
            owner = self.runtime.mine(self.packing.chunk_group, self.held)
            return self.runtime.total(jax.ops.segment_sum(counts, owner, len(self.sizes)))[group]
        return self.sizes[0] if self.equal else jnp.asarray(self.sizes, jnp.int32)[group]

    @property
    def held(self) -> int:
        """How many chunks are here."""
        return jax.tree.leaves(self.packing.chunks)[0].shape[0]

    def derivatives(
        self,
        group: Int[Array, ""],
        points: Float[Array, "S D"],
        rows: Int[Array, "B"] | None,
        hessian: bool,
        key: Any = None,
    ) -> Derivatives:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.derivatives`.

        ``rows``: positions within the group, or None for all; ``key``: of the draws of rows' own latents. Returns value, gradient
        and Hessian of the sum over those rows at every point; the value is less the entropy of the rows' own latents.
        """
        return self._of(group, rows, lambda chunk: self._at(self._drawn(chunk, key), points, hessian))

    def at_rows_draws(
        self, group: Int[Array, ""], moments: GaussianMoments, count: int, rows: Int[Array, "B"] | None, key: Any
    ) -> Derivatives:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.at_rows_draws`.

        ``rows``: positions within the group, or None for all. Returns the sum over those rows, by draw; the diagonal of the
        Hessian.
        """

        def one(chunk: Any, key: Any) -> Derivatives:
            # Rows that come in several chunks are told apart by the first of each.
            stands = chunk[0] if self.own is None else chunk[0][0]
            own = jax.random.fold_in(key, stands[0])
            # Whoever is seen twice has no draw of a row's own.
            seen = self._drawn(chunk, key, paired=False)
            return Derivatives(*at_rows_draws(self.density, seen, stands.shape[0], moments.loc, moments.scale, own))

        keys = jax.random.split(key, count)
        if count == 1:
            return self._of(group, rows, lambda chunk: jax.tree.map(lambda x: x[None], one(chunk, keys[0])))
        return self._of(group, rows, lambda chunk: jax.vmap(lambda key: one(chunk, key))(keys))

    def _of(self, group: Int[Array, ""], rows: Int[Array, "B"] | None, at: Callable[[Any], Derivatives]) -> Derivatives:
        """What some of a group's rows say, or all of them."""
        packing = self.packing
        # Masks have no rows to take; settings that ask for some are refused beforehand.
        if rows is None or isinstance(packing, GroupMasks):
            return self._all(group, at)
        length, runtime = packing.rows.shape[1], self.runtime
        first, _ = runtime.span(packing.offsets, group, self.held)
        slots = first + rows // length, rows % length
        taken = packing.stands[slots]
        named: Any = taken, jnp.ones(taken.shape, bool)
        if self.own is not None:
            named = named, jax.tree.map(lambda x: x[slots], self.own)
        found = at(named)
        return runtime.total(found, runtime.holds(packing.offsets, group, self.held))

    def values(self, points: Float[Array, "S D"]) -> Float[Array, "M"]:
        """Each group's log-likelihood in nats, averaged over points; one chunk of rows at a time."""
        chunks, count = self.packing.chunks, len(self.sizes)
        owner = self.runtime.mine(self.packing.chunk_group, self.held)

        def one(chunk):
            if points.shape[0] == 1:
                return self.density(chunk, points[0])
            return jnp.mean(jax.lax.map(lambda point: self.density(chunk, point), points))

        values = jax.ops.segment_sum(jax.lax.map(one, chunks), owner, count, indices_are_sorted=True)
        return self.runtime.total(values)

    def _all(self, group, at: Callable[[Any], Derivatives]) -> Derivatives:
        offsets, runtime = self.packing.offsets, self.runtime
        chunks = self.packing.chunks if self.own is None else (self.packing.chunks, self.own)
        span = runtime.span(offsets, group, self.held)
        if offsets.shape[0] - 1 == self.packing.chunk_group.shape[0]:
            found = at(take(chunks, span[0]))
            return runtime.total(found, runtime.holds(offsets, group, self.held))
        return runtime.total(sum_span(at, chunks, *span))

    def _drawn(self, chunk: Any, key: Any, paired: bool = True) -> Any:
        """A chunk with draws for the rows' own latents, the same at all points: of both signs, where ``paired``."""
        if self.own is None:
            return chunk
        named, own = chunk
        rows, linear = own.conditionals, own.conditionals.linear

        def draw(place: Int[Array, ""]) -> Float[Array, "K"]:
            return jax.random.normal(jax.random.fold_in(key, place), linear.shape[-1:], linear.dtype)

        draws = jax.vmap(draw)(own.places)[:, None]
        # A linear gradient is then that at the mean.
        return named, rows, jnp.concatenate([draws, -draws], axis=1) if paired else draws

    def _at(self, chunk, points, hessian: bool) -> Derivatives:
        def one(point):
            value, gradient = value_and_grad(self.density, argnums=1)(chunk, point)
            bend = hessian_of(self.density, argnums=1)(chunk, point) if hessian else None
            return Derivatives(value, gradient, bend)

        if points.shape[0] == 1:
            return jax.tree.map(lambda x: x[None], one(points[0]))
        return jax.vmap(one)(points)


# -------------------------------------------------------------------------------------------------------------- factors


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one model as data, and what they say of themselves; :class:`LocalProblem` visits and evaluates them.

    ``runtime``: how to map over chunks and groups; ``program``: expectations of one chunk of the likelihood; ``prior_program``:
    expectations of the prior factor, or None; ``quadratic``: whether the likelihood is quadratic in the latents jointly;
    ``units``: ``(U, K)``, how many units have how many local latents each; None when there are none; ``rows``: the groups' rows
    at points, for a stochastic solver; else None; ``labels``: the groups' labels, in the order of every stacked array;
    ``known``: which groups had a site before their rows came back; None when none had; ``stream``: the groups' rows one by one;
    ``one_chunk_each``: whether every group is one chunk; ``most_chunks``: chunks of the largest group where sizes are known
    beforehand, else 0; ``chained``: whether chains are compiled in beside weighted draws; ``wide``: how the rows that see q
    most widely are set apart; None where rows are few; ``away``: whether what groups hold of their own latents is with clients in
    rounds.
    """

    family: GaussianFamily
    solver: LocalSolver
    runtime: Runtime
    program: Any
    prior_program: Any
    quadratic: bool
    num_rules: int
    data: FactorData
    units: tuple[int, int] | None = None
    rows: GroupRows | None = None
    labels: tuple = ()
    known: Bool[Array, "M"] | None = None
    stream: Any = None
    one_chunk_each: bool = False
    most_chunks: int = 0
    longest: int = 0
    chained: bool = False
    wide: WideRows | None = None
    away: bool = False

    @property
    def stochastic(self) -> bool:
        """Whether local solves take noisy steps of their own."""
        return self.solver.stochastic

    @property
    def matches_moments(self) -> bool:
        """Whether local solves match moments, so that rounds are accepted when q is valid."""
        return self.solver.matches_moments

    @property
    def keeps_conditionals(self) -> bool:
        """Whether what groups keep of their own latents stands beside their sites."""
        return self.solver.keeps_conditionals

    @property
    def blind(self) -> bool:
        """Whether visits alone may look at rows, so that an evaluation is q and no more."""
        return self.solver.private

    @property
    def capped(self) -> bool:
        """Whether q is mean-field, so that evaluations tell products with the curvature of its factors."""
        return not (self.family.full or self.blind)

    @property
    def tied(self) -> bool:
        """Whether all groups share one site."""
        return self.solver.tied

    @property
    def passes(self) -> Runtime:
        """Where passes over what programs read are run; a quadratic likelihood leaves as little as a site, which is everywhere."""
        return self.runtime.alone if self.quadratic else self.runtime

    @property
    def held(self) -> int:
        """How many of the chunks are here."""
        return jax.tree.leaves(self.data.chunks)[0].shape[0]

    def span(self, index: Int[Array, "*k"]) -> tuple[Any, Any]:
        """First chunk of a group among those that are here, and past its last."""
        return self.passes.span(self.data.offsets, index, self.held)

    def map_groups(self, solve: Callable, operands: Any, reads_rows: bool, side_by_side: bool = False) -> Any:
        """A computation for many groups, each where its rows are.

        ``solve``: these factors as one device sees them that visits groups of its own, and a group's operands, to its result;
        ``operands``: a tuple of pytrees with a leading group axis, the groups' places the first; ``reads_rows``: whether it
        passes over the group's rows; ``side_by_side``: whether it may do so for all groups in one vectorised program. Returns
        results with a leading group axis.
        """
        runtime = self.passes if self.rows is None else self.runtime
        if not reads_rows:
            return runtime.map_groups(partial(solve, self), operands, False)
        rows = None if self.rows is None else dataclasses.replace(self.rows, runtime=runtime.within)
        own = dataclasses.replace(self, runtime=runtime.within, rows=rows)
        if self.rows is None:
            holds = runtime.holds(self.data.offsets, operands[0], self.held)
        else:
            holds = runtime.holds(self.rows.packing.offsets, operands[0], self.rows.held)
        return runtime.map_groups(partial(solve, own), operands, True, side_by_side, holds)

    @property
    def num_groups(self) -> int:
        """M, without the prior factor."""
        return self.data.offsets.shape[0] - 1

    @property
    def continued(self) -> bool:
        """Whether groups that were fitted before stand beside the prior, by their sites alone."""
        return self.data.others is not None

    @property
    def prior_natural(self) -> GaussianNatural:
        """Natural parameters of what rounds start from: the exactly held prior, times the sites of absent groups."""
        held = self.data.prior_natural
        return held if self.data.others is None else held + self.data.others

    @property
    def has_prior_factor(self) -> bool:
        """Whether part of the prior has a site."""
        return self.prior_program is not None

    @property
    def dtype(self):
        """The floating dtype of q."""
        return self.data.prior_natural.precision_mean.dtype

    @property
    def redraws(self) -> bool:
        """Whether any expectation is by draws, so that a round's fresh draws need a fresh evaluation."""
        return self.program.noisy or (self.has_prior_factor and self.prior_program.noisy)

    @property
    def can_switch(self) -> bool:
        """Whether any factor goes from sigma points to draws when these contradict them."""
        return not self.blind and any(p is not None and p.mode == "auto" for p in (self.program, self.prior_program))

    def draws_of(self, program: Any, noise: Draws | None, rule: Rule | None, trial: bool = False) -> Any:
        """What one program takes of a round's draws: sigma points or random ones, pairs, or None."""
        if not isinstance(program, PointsProgram | LocalLatentProgram):
            return noise.pairs if noise is not None and isinstance(program, ReparameterisedProgram) else None
        prior = program is self.prior_program
        sampled, finer = (
            (False, False) if rule is None else (x[int(prior)] for x in (rule.points.sampled, rule.points.finer))
        )
        if isinstance(program, LocalLatentProgram):
            if noise is None:
                return None
            return program.choose(LocalNoise(noise.pairs, noise.local, batch=noise.batch), sampled, finer)
        random = None if noise is None else noise.prior_points if prior else noise.points
        return program.choose(random, sampled, self.dtype, trial, finer)


# --------------------------------------------------------------------------------------------------- one group's factor
# One group's exact factor, as a local solver sees it.


@dataclasses.dataclass(frozen=True)
class GroupFactor:
    """One factor as a solver sees it: implements :class:`numpyro_pvi.solvers.LocalFactor`."""

    family: Any
    quadratic: bool
    noisy: bool
    expected: Callable[[Any], Expected]
    # GroupRows, or ProductRows under a product of families; None where rows are not offered.
    group_rows: Any = None
    index: Any = None

    # Rows are dealt out.
    fresh_batches = False

    @property
    def num_rows(self) -> Any:
        """N_m; 0 where rows are not offered."""
        return 0 if self.group_rows is None else self.group_rows.num_rows(self.index)

    @property
    def max_rows(self) -> int:
        """Rows of the largest group; 0 where rows are not offered."""
        return 0 if self.group_rows is None else max(self.group_rows.sizes)

    @property
    def pointwise(self) -> bool:
        """Whether rows are read at points."""
        return self.group_rows is None or self.group_rows.pointwise

    def derivatives(self, points, rows=None, hessian=False, key=None) -> Derivatives:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.derivatives`."""
        return self.group_rows.derivatives(self.index, points, rows, hessian, key)

    def at_rows_draws(self, moments, count, key, rows=None) -> Derivatives:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.at_rows_draws`."""
        return self.group_rows.at_rows_draws(self.index, moments, count, rows, key)

    def message(self, cavity: Any, site: Any, key: Any, rows: Any = None) -> Expected:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.message`."""
        return self.group_rows.message(self.index, cavity, site, key, rows)

    def step(self, cavity: Any, site: Any, share: Any, key: Any, rows: Any = None) -> BatchStep:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.step`."""
        return self.group_rows.step(self.index, cavity, site, share, key, rows)
