"""Programs that read a model's factors, by the structure that was found, and single rows as affine predictors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import constraints

from .._numerics import in_batches
from .._state import Plan
from ..errors import PVIError
from ..expectations import (
    AffineProgram,
    JointRules,
    LocalLatentProgram,
    MaskedLocalProgram,
    PointsProgram,
    QuadraticProgram,
    ReparameterisedProgram,
    RowProgram,
    SharedAffineProgram,
    joint_rules,
    product_nodes,
    read_quadratic,
    read_well,
    sum_by_group,
)
from ..factors import (
    GroupMasks,
    ModelCall,
    Packing,
    PartitionPlan,
    TermData,
    gather_rows,
    prepare_term,
    prior_factor_log_density,
    row_log_likelihood,
)
from ..families import ConditionalNatural, GaussianMoments, MultivariateNormalFamily, conditional_moments
from ..sites import take
from ..solvers import LocalSolver
from ._base import Runtime
from ._factors import GroupRows
from ._local_latents import integrated_program

# Antithetic pairs of the prior factor, which reads no rows, where it has no structure.
_PRIOR_PAIRS = 64


@dataclasses.dataclass(frozen=True)
class FactorReader:
    """Makes the programs of one model's factors.

    ``num_particles``: draws of the loss where it is Monte Carlo; ``held``: the exactly held prior, which places a second look at
    quadratic factors; ``roughly``: whether values may have lost their digits.
    """

    plan: Plan
    call: ModelCall
    packing: Packing | GroupMasks
    solver: LocalSolver
    runtime: Runtime
    num_particles: int
    num_rules: int
    held: Any
    roughly: bool = False

    def likelihood(self):
        """The program, what it reads chunk by chunk, each chunk's group, and each group's first chunk."""
        plan, call, packing, num_rules = self.plan, self.call, self.packing, self.num_rules
        part, family = plan.partition, plan.family
        reading, groups, offsets = part.reading, packing.chunk_group, packing.offsets

        def masks(chunk):
            return reading.masks(packing, chunk)

        if part.likelihood == "affine":
            program = AffineProgram(part.terms, family, num_rules)
            if isinstance(packing, GroupMasks):
                shared = tuple(prepare_term(call, spec) for spec in part.terms)
                return SharedAffineProgram(program, shared, masks), packing.chunks, groups, offsets
            chunks = self._prepare(lambda c: program.prepare(reading.call(call, c), masks(c)), packing, family.dim)
            return program, chunks, groups, offsets
        if part.likelihood in ("draws", "reparameterised", "local"):
            program, chunks = self._draws()
            return program, chunks, groups, offsets
        density = partial(_chunk_log_likelihood, part, packing, lambda c: reading.call(call, c))
        reader = AffineProgram(part.terms, MultivariateNormalFamily(family.dim), 1)

        def read(point, chunk):
            if not part.terms:
                return read_quadratic(partial(density, (chunk, None)), point)
            arrays = reader.prepare(reading.call(call, chunk), masks(chunk))
            here = GaussianMoments(
                point, jnp.zeros((family.dim,) * 2, point.dtype), jnp.zeros_like(point[0]), jnp.array(True)
            )
            # A static rule: params are differentiated through this, and loops of traced length have no reverse mode.
            return reader.expected(arrays, here, None, 0, None, False)

        count = offsets.shape[0]

        def of_groups(point):
            if part.params or isinstance(packing, GroupMasks):
                # Params are differentiated, where a runtime's loop of traced length has no reverse mode; and masks hold all
                # rows, of which one group at a time is enough.
                owner = self.runtime.mine(groups, jax.tree.leaves(packing.chunks)[0].shape[0])
                found = jax.lax.map(partial(read, point), packing.chunks)
                return self.runtime.total(sum_by_group(found, owner, count - 1))
            return self.runtime.sum_chunks(partial(read, point), packing.chunks, groups, offsets, 0)

        return (
            QuadraticProgram(family),
            read_well(of_groups, self.held, self.roughly),
            jnp.arange(count - 1),
            jnp.arange(count),
        )

    def chunk_of_rows(self, program: AffineProgram, rows: Int[Array, "K"], mask: Bool[Array, "K"]) -> tuple:
        """What quadrature reads of any rows: see :meth:`AffineProgram.prepare`."""
        reading = self.plan.partition.reading
        return program.prepare(reading.call(self.call, (rows, mask)), reading.masks(self.packing, (rows, mask)))

    def _draws(self):
        plan, call, packing = self.plan, self.call, self.packing
        part = plan.partition

        def program(read: Callable[[Any], ModelCall], data: Any):
            density = partial(_chunk_log_likelihood, part, packing, read)
            if part.local is None:
                return self._unstructured(density, part.likelihood, _num_rows(packing)), (data, None)

            slots = (data, *unit_slots(part, packing))
            if self.solver.matches_moments:
                return integrated_program(part, packing, call, read, plan.family), slots

            def joint(chunk, theta, z):
                return density((chunk, None), theta, local=z)

            # Steps by batches of rows look at curvatures of their own.
            how = plan.family, self.solver.stochastic and not part.kinks, own_rules(part, self.solver)
            # Forward derivatives of all groups at once take D^2 passes, reverse ones some 3 D for every group.
            few = plan.family.dim < 3 * part.table.num_groups and not part.kinks
            if isinstance(packing, GroupMasks) and few:
                densities = partial(_group_densities, part, packing, call)
                group = packing.group_of_row[part.local.key]
                return MaskedLocalProgram(joint, *how, densities=densities, group_of_unit=group), slots
            return LocalLatentProgram(joint, *how, kinks=part.kinks), slots

        # A stochastic solver takes a few rows at a time: gathering all of them would only copy the data.
        if not isinstance(packing, Packing) or part.mechanism != "args" or self.solver.stochastic:
            return program(lambda c: part.reading.call(call, c), packing.chunks)
        # Rows are gathered here, once, and not at every pass.
        leaves, structure = jax.tree.flatten((call.args, call.kwargs))
        axes = part.reading.axes
        packed = [None if a is None else gather_rows(x, packing, a) for x, a in zip(leaves, axes, strict=True)]

        def packed_call(chunk) -> ModelCall:
            args, kwargs = structure.unflatten([x if o is None else o for x, o in zip(leaves, chunk[0], strict=True)])
            model = part.reading.sized(call.model, packing.rows.shape[1])
            return dataclasses.replace(call, model=model, args=args, kwargs=kwargs)

        return program(packed_call, (packed, packing.mask))

    def _unstructured(self, density: Callable, kind: str, num_rows: int, least: int = 1) -> Any:
        plan, part = self.plan, self.plan.partition
        mode = part.unstructured
        # What follows gradients alone has steps of its own.
        mode = "values" if mode == "slopes" else mode
        if kind == "reparameterised":
            return ReparameterisedProgram(density, plan.family, mode == "values")
        pairs = max(self.solver.num_draws, -(-self.num_particles // 2), least)
        return PointsProgram(density, plan.family, mode, pairs, product_nodes(plan.family.dim, num_rows))

    def _prepare(self, prepare: Callable, packing: Packing, dim: int):
        count, rows = packing.rows.shape
        # A batch's tangents of the model (D per row) are what takes memory here.
        batch = max(1, min(count, (1 << 17) // max(rows * dim, 1)))
        return in_batches(prepare, packing.chunks, batch)

    def prior_factor(self):
        """The program and the arrays of the prior factor; a pair of None when there is none."""
        plan, call, num_rules = self.plan, self.call, self.num_rules
        part = plan.partition
        call = beside_rows(part, self.packing, call)
        if not part.has_prior_factor:
            return None, None
        if part.prior_kind == "affine":
            program = AffineProgram(part.prior_terms, plan.family, num_rules)
            return program, program.prepare(call, {})

        def log_density(chunk, point):
            return prior_factor_log_density(call, point, part.prior_latents, part.outside, part.rows)

        return self._unstructured(log_density, part.prior_kind, plan.family.dim, _PRIOR_PAIRS), (None, None)

    def group_rows(self) -> GroupRows | None:
        """The groups' rows at points, for a stochastic solver, or chains on mini-batches; else None.

        Where rows have latents of their own, at draws of these given a point.
        """
        if not self.solver.stochastic and self.solver.moments_batch is None:
            return None
        part, call = self.plan.partition, self.call
        density = partial(_chunk_log_likelihood, part, self.packing, lambda c: part.reading.call(call, c))
        padded = self.plan.padded_rows > 0
        rows = self.packing, part.table.sizes, padded, self.runtime

        def beside_own(chunk: Any, point: Array) -> Array:
            named, own, draws = chunk
            q, count = conditional_moments(own), draws.shape[1]
            found = (density((named, None), point, local=q.draw(point, draws[:, i])) for i in range(count))
            return sum(found, start=jnp.zeros((), point.dtype)) / count

        return GroupRows(beside_own if part.local else lambda chunk, point: density((chunk, None), point), *rows)


def own_rules(part: PartitionPlan, solver: LocalSolver) -> JointRules | None:
    """Fixed points for rows with latents of their own; None where draws are asked for, or a solver has steps by draws."""
    own = part.local
    assert own is not None
    fixed = part.unstructured == "auto" and not (solver.stochastic or solver.matches_moments)
    return joint_rules(part.layout.dim, own.width, own.looks) if fixed else None


def _num_rows(packing: Packing | GroupMasks) -> int:
    """Rows of all groups, with what pads them; programs that are shared by groups of many sizes know their shapes alone."""
    return packing.rows.size if isinstance(packing, Packing) else sum(len(x) for x in packing.group_of_row.values())


def whole_call(model: Callable, part: PartitionPlan, args: tuple, kwargs: dict, params: dict) -> ModelCall:
    """The model on all rows; its local latents, if any, at zero: what they touch is read chunk by chunk."""
    own = None if part.local is None else jnp.zeros((part.local.size, part.local.width))
    return ModelCall(part.model(model), part.layout, args, kwargs, params, part.local, own)


def beside_rows(part: PartitionPlan, packing: Packing | GroupMasks, call: ModelCall) -> ModelCall:
    """The model for what is not of its rows, its prior: on all rows, or on one chunk of those that a device holds."""
    if isinstance(packing, GroupMasks) or packing.places is None:
        return call
    return part.reading.call(call, take(packing.chunks, 0))


def unit_slots(part: PartitionPlan, packing: Packing | GroupMasks) -> tuple[Int[Array, "C R"], Bool[Array, "C R"]]:
    """Which unit's local latents every slot of every chunk holds, and which slots count."""
    if isinstance(packing, Packing):
        return packing.rows, packing.mask
    group = packing.group_of_row[part.local.key]
    shape = (packing.chunk_group.shape[0], group.shape[0])
    return jnp.broadcast_to(jnp.arange(shape[1]), shape), group == packing.chunk_group[:, None]


def _group_densities(
    part: PartitionPlan, packing: GroupMasks, call: ModelCall, point: Float[Array, "D"], local: Float[Array, "U K"]
) -> Float[Array, "M"]:
    """Every group's log density at one point, from one pass over all rows."""
    terms = row_log_likelihood(dataclasses.replace(call, local=local), point, part.rows)
    count, total = part.table.num_groups, jnp.zeros((part.table.num_groups,), point.dtype)
    for key, values in terms.values():
        group = packing.group_of_row[key]
        # Rows that are nobody's go to a segment beyond the last, which is dropped.
        total = total + jax.ops.segment_sum(values, jnp.where(group < 0, count, group), count)
    return total


def _chunk_log_likelihood(
    part: PartitionPlan,
    packing: Packing | GroupMasks,
    read: Callable[[Any], ModelCall],
    chunk: tuple,
    point: Float[Array, "D"],
    local: Float[Array, "R K"] | None = None,
) -> Float[Array, ""]:
    rows, _ = chunk
    masks = part.reading.masks(packing, rows)
    call = read(rows)
    if local is not None:
        call = dataclasses.replace(call, local=local)
    terms = row_log_likelihood(call, point, part.rows)
    counted = (jnp.sum(jnp.where(masks[key], values, 0.0)) for key, values in terms.values())
    return sum(counted, start=jnp.zeros((), point.dtype))


def chunk_log_likelihoods(
    part: PartitionPlan,
    packing: Packing | GroupMasks,
    call: ModelCall,
    point: Float[Array, "D"],
    local: Float[Array, "U K"] | None = None,
) -> Float[Array, "M"]:
    """Every group's log-likelihood at a point, each from its own rows alone, in nats.

    ``local``: where rows have latents of their own, values of every unit's; their density given the shared latents is then in it.
    """
    slots = None if local is None else unit_slots(part, packing)

    def one(xs: tuple) -> Array:
        chunk, place = xs
        own = None if local is None else local[place[0]]
        return _chunk_log_likelihood(part, packing, lambda c: part.reading.call(call, c), (chunk, None), point, own)

    return sum_of_chunks(packing, jax.lax.map(one, (packing.chunks, slots)))


def sum_of_chunks(packing: Packing | GroupMasks, values: Float[Array, "C"]) -> Float[Array, "M"]:
    """Numbers of chunks of rows, summed by group."""
    return jax.ops.segment_sum(values, packing.chunk_group, packing.offsets.shape[0] - 1, indices_are_sorted=True)


def sum_of_units(part: PartitionPlan, packing: Packing | GroupMasks, values: Float[Array, "U"]) -> Float[Array, "M"]:
    """Numbers of rows that have latents of their own, summed by group."""
    units, mask = unit_slots(part, packing)
    return sum_of_chunks(packing, jnp.sum(jnp.where(mask, values[units], 0.0), axis=1))


def first_conditionals(plan: Plan, packing: Packing | GroupMasks, loc, sd) -> ConditionalNatural:
    """Local latents at their prior given the shared ones, in the packing's slots; unit Gaussians where nothing counts."""
    units, mask = unit_slots(plan.partition, packing)
    loc = jnp.where(mask[..., None], loc[units], 0.0)
    precision = 1.0 / jnp.where(mask[..., None], sd[units], 1.0) ** 2
    dim = plan.family.dim if plan.family.full else 0
    cross = jnp.zeros((*loc.shape, dim), loc.dtype)
    dense = precision[..., None] * jnp.eye(loc.shape[-1], dtype=loc.dtype) if plan.family.full else precision
    return ConditionalNatural(loc * precision, dense, cross)


# -------------------------------------------------------------------------------------------- single rows as predictors
# Single rows of the groups as affine predictors, read off the model when they are asked for.

# A response of more values than these has no classes to balance.
_MOST_CLASSES = 64


def first_rows_of(packing: Packing | GroupMasks, num_groups: int, runtime: Runtime) -> Int[Array, "M"]:
    """Index of every group's first row."""
    if not isinstance(packing, Packing):
        return packing.first_rows()
    # A chunk's padding repeats its own first row.
    groups, held = jnp.arange(num_groups), packing.rows.shape[0]
    first, _ = runtime.span(packing.offsets, groups, held)
    return runtime.total(jnp.min(packing.rows, axis=1)[first], runtime.holds(packing.offsets, groups, held))


@dataclasses.dataclass(frozen=True)
class RowStream:
    """The rows of every group in their order: implements :class:`numpyro_pvi.schedules.Stream`.

    Nothing is prepared: a row's design is computed where it is used, by one reverse pass of the model on that row.

    ``padded``: whether rows were filled up after a group came, so that the plan does not know how many there are.
    """

    part: PartitionPlan
    call: ModelCall
    packing: Any
    runtime: Runtime
    padded: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return self.part.table.sizes

    def first_rows(self) -> Int[Array, "M"]:
        """Index of every group's first row."""
        return first_rows_of(self.packing, len(self.sizes), self.runtime)

    def program(self, expectation: str) -> RowProgram:
        """How a row's expectations are taken.

        ``expectation``: "auto" (closed form where the log-likelihood is quadratic, else quadrature), "quadrature" or "probit".
        Raises PVIError where rows are not seen through affine predictors, or cannot be read one by one.
        """
        part = self.part
        if not part.terms or part.likelihood not in ("quadratic", "affine") or part.params:
            found = "params to optimise" if part.params else f"likelihood {part.likelihood!r}"
            raise PVIError(
                f"Decentralized(mixing='consensus') takes rows one by one through their affine predictors (regressions, "
                f"classification), but in {part.where} there are {found}: use mixing='tracking'. Partition.plan(*args) shows "
                "what was found."
            )
        if not isinstance(self.packing, Packing):
            raise PVIError(
                "Decentralized(mixing='consensus') reads rows one by one, but this model is read with masks: pass the data as "
                "arguments whose leading axis is the plate's, or index them by the plate's value."
            )
        if self.packing.places is not None:
            raise PVIError(
                "Decentralized(mixing='consensus') reads single rows of every agent in turn, which Sharded() has on one device: "
                "write runtime=Vmap(), or mixing='tracking'."
            )
        if self.padded:
            raise PVIError(
                "Decentralized(mixing='consensus') goes with one fixed set of agents: make a new state with the new group's rows."
            )
        rule = "exact" if part.likelihood == "quadratic" else "quadrature"
        program = RowProgram(part.terms, rule if expectation == "auto" else expectation)
        program.check(self.row(jnp.int32(0), jnp.int32(0)))
        return program

    def row(self, group: Int[Array, ""], position: Int[Array, ""]) -> tuple[TermData, ...]:
        """The arrays of one row. ``position``: which of its rows, from 0. Returns one entry per term of the likelihood."""
        call = self._call(group, position)
        return tuple(prepare_term(call, spec, few=True) for spec in self.part.terms)

    def classes(self) -> tuple[Int[Array, "M N"], int] | None:
        """The class of every group's rows in their order, and how many classes there are.

        Classes are the values of the first response that has finitely many (a Bernoulli's, a Categorical's); positions after a
        group's last row are of class -1. Returns None where every response is a number among many.
        """
        found = self._response(jnp.int32(0), jnp.int32(0))
        if found is None:
            return None
        most = jnp.arange(max(self.sizes))
        groups = jnp.arange(len(self.sizes))

        def one(group, position):
            value, _ = self._response(group, position)  # type: ignore[misc]
            inside = position < jnp.asarray(self.sizes, jnp.int32)[group]
            return jnp.where(inside, jnp.reshape(value, (-1,))[0].astype(jnp.int32), -1)

        return jax.vmap(lambda group: jax.vmap(lambda at: one(group, at))(most))(groups), found[1]

    def _response(self, group, position) -> tuple[Array, int] | None:
        """The value of the first response with classes, and their number."""
        call = self._call(group, position)
        trace, _ = call.trace(jnp.zeros((call.layout.dim,), jnp.result_type(float)))
        for spec in self.part.terms:
            support = trace[spec.site]["fn"].support
            if support is constraints.boolean:
                return trace[spec.site]["value"], 2
            upper = getattr(support, "upper_bound", None)
            if support.is_discrete and isinstance(upper, int) and upper < _MOST_CLASSES:
                return trace[spec.site]["value"], upper + 1
        return None

    def _call(self, group, position) -> ModelCall:
        packing, length = self.packing, self.packing.rows.shape[1]
        # Positions beyond a group's end read its last chunk's padding, or another group's row: masked by who asks.
        chunk = jnp.minimum(packing.offsets[group] + position // length, packing.rows.shape[0] - 1)
        row = packing.rows[chunk, position % length][None]
        return self.part.reading.call(self.call, (row, jnp.ones(row.shape, bool)))
