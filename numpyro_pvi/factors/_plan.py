"""The static result of planning, as a user reads it; rows that come after it; whether sites are two numbers per row."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from ..errors import DataError, PartitionError, StateError
from ..families import RowPrior, see_latents, see_rows
from ..handlers import BatchPlates, GroupTable, RowAxes, numbered_table
from ._arguments import ArgumentSignature
from ._chunks import GroupMasks, Packing, Reading, choose_chunk_rows, group_masks, pack_rows
from ._enumerate import summed_out
from ._model import Enumeration, Layout, LocalLayout, ModelCall, abstract_trace, is_observed, latent_log_density
from ._structure import TermData, TermSpec, prepare_term


@dataclasses.dataclass(frozen=True)
class PartitionPlan:
    """How a model is split into a prior part and one factor per group. Static and hashable; ``str()`` is a table.

    ``exact`` latents have a prior inside the Gaussian family; ``prior_latents`` and ``outside`` (observed sites in no
    partitioned plate) form the prior factor.
    """

    # What is partitioned, in words, and the batch axes that run over its rows.
    where: str
    rows: RowAxes
    table: GroupTable
    layout: Layout
    # How one group is evaluated, and why so.
    reading: Reading
    reason: str
    # Names of the arguments whose rows are taken ("args" only).
    sliced: tuple[str, ...]
    chunk_rows: int
    num_chunks: int
    observed: tuple[str, ...]
    outside: tuple[str, ...]
    # "quadratic", "affine", "draws", "reparameterised" or "local" (latents inside the plate), with the terms found (empty
    # when there are none).
    likelihood: str
    terms: tuple[TermSpec, ...]
    exact: tuple[str, ...]
    prior_latents: tuple[str, ...]
    prior_terms: tuple[TermSpec, ...]
    # "none", "affine", "draws" or "reparameterised".
    prior_kind: str
    params: tuple[str, ...]
    # Latents inside the partitioned plate, which belong to their groups and never enter a site.
    local: LocalLayout | None = None
    # Discrete latents that are summed out of every row, or None.
    enumeration: Enumeration | None = None
    # How factors without structure are evaluated: "auto" (sigma points while draws agree with them, then finer ones),
    # "sigma_points", "monte_carlo" (random points), "values" (the same, where values jump and gradients do not say by how much),
    # or "slopes" (where the solver follows gradients alone all the same).
    unstructured: str = "auto"
    # Of "likelihood" and "prior factor": what may jump in the latents, as the model's program says.
    jumps: tuple[str, ...] = ()
    # Whether rows with latents of their own may have kinks in them, of which second derivatives see nothing.
    kinks: bool = False
    # Of "likelihood", "prior" (its exact part and its factor) and "additivity" (a sum over groups): what holds for all values
    # of latents and parameters; everything that is said of the others was found at points.
    proved: frozenset[str] = frozenset()
    # What was found and then contradicted at draws from q, one sentence each.
    remarks: tuple[str, ...] = ()
    # Why rows are split as they are (or not at all), in one sentence, where that was not the user's own choice.
    why: str = ""
    # Whether plates keep the mini-batches that they draw, the data being no more than that.
    batches: bool = False

    def model(self, model: Callable) -> Callable:
        """The model that factors are read off: the user's, with discrete latents summed out where it has local ones."""
        model = BatchPlates(model) if self.batches else model
        return model if self.enumeration is None else summed_out(model, self.enumeration)

    @property
    def jumps_unseen(self) -> bool:
        """Whether a factor was seen to jump, and the solver follows gradients, which do not say so."""
        return self.unstructured == "slopes"

    @property
    def mechanism(self) -> str:
        """Rows of the arguments ("args"), of the plate's indices ("index"), or all with the others masked ("mask")."""
        return self.reading.mechanism

    @property
    def has_prior_factor(self) -> bool:
        """Whether part of the prior is outside the family and gets a site of its own."""
        return self.prior_kind != "none"

    def __str__(self) -> str:
        padded = self.num_chunks * self.chunk_rows
        # Masking evaluates all rows for every group: the share beyond one pass is its price.
        sizes = self.table.sizes
        shown = ", ".join(f"{label!r}: {size}" for label, size in zip(self.table.labels[:8], sizes[:8], strict=True))
        more = f", ... ({len(sizes)} groups)" if len(sizes) > 8 else ""
        rows = [
            ("partitioned", "nothing" if self.rows.whole else f"{self.where}, size {self.table.num_rows}"),
            *([("because", self.why)] if self.why else []),
            ("groups (rows)", shown + more),
            ("mechanism", f"{self.mechanism}: {self.reason}"),
            *([("arguments sliced", ", ".join(self.sliced))] if self.sliced else []),
            ("chunks", f"{self.num_chunks} of {self.chunk_rows} rows, padding {padded / self.table.num_rows - 1:.0%}"),
            ("observed sites", ", ".join(self.observed)),
            *([("enumerated", str(self.enumeration))] if self.enumeration else []),
            (
                "likelihood",
                self._with_evidence(_describe(self.likelihood, self.terms, self.unstructured), "likelihood"),
            ),
            *([("local latents", ", ".join(self.local.names))] if self.local is not None else []),
            ("prior held exactly", self._with_evidence(", ".join(self.exact), "prior") if self.exact else "none"),
            ("prior factor", self._prior_line()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def evidence(self, factor: str) -> str:
        """How the structure of a factor is known: "proved", "found", or "" where none is claimed.

        ``factor``: "likelihood", or "prior" (what is held exactly, and the prior factor). Returns "proved" where it holds for
        all values of latents and parameters, "found" where it was seen at points.
        """
        kinds = (
            (self.likelihood,) if factor == "likelihood" else (self.prior_kind, "quadratic" if self.exact else "none")
        )
        if not {"quadratic", "affine"} & set(kinds):
            return ""
        return "proved" if factor in self.proved else "found"

    def _with_evidence(self, text: str, factor: str) -> str:
        evidence = self.evidence(factor)
        return f"{text}; {evidence}" if evidence else text

    def _prior_line(self) -> str:
        if not self.has_prior_factor:
            return "none"
        parts = [", ".join(self.prior_latents)] if self.prior_latents else []
        if self.outside:
            parts.append("observed outside the plate: " + ", ".join(self.outside))
        text = "; ".join(parts) + f" ({_describe(self.prior_kind, self.prior_terms, self.unstructured)})"
        return self._with_evidence(text, "prior") if self.prior_kind == "affine" else text


_UNSTRUCTURED = {
    "auto": "sigma points while draws agree with them",
    "sigma_points": "sigma points",
    "monte_carlo": "random points, gradients only",
    "values": "random points, values and gradients",
    "slopes": "gradients, though it jumps",
}
_REPARAMETERISED = {"values": ", values and gradients", "slopes": ", though it jumps"}


def _describe(kind: str, terms: tuple[TermSpec, ...], unstructured: str) -> str:
    if kind == "quadratic":
        return "quadratic in the latents (closed form)"
    if kind == "local":
        return "with local latents (antithetic draws)"
    if kind == "reparameterised":
        return f"no structure found (reparameterised draws{_REPARAMETERISED.get(unstructured, '')})"
    if kind == "draws":
        return f"no structure used ({_UNSTRUCTURED[unstructured]})"
    counts = ", ".join(f"{t.site}: {len(t.predictors)} affine predictor{'s' * (len(t.predictors) > 1)}" for t in terms)
    return f"{counts} (quadrature)"


# ------------------------------------------------------------------------------------------------- rows that come later
# Rows that come after planning: checked against the plan, filled up to a length that programs are compiled for, packed.

# Chunks of arriving rows are as long as this at most, or as eight times D.
_LONGEST_CHUNK = 1024
# Rows that every group is filled up to: a few more cost nothing beside a program of their own.
_FEWEST_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Rows that have come, in the form that programs take."""

    plan: PartitionPlan
    packing: Packing | GroupMasks
    # Rows to which the arguments are to be filled up; 0 to take them as they are.
    padded_rows: int


def padded_length(num_rows: int) -> int:
    """The power of two at or above a number of rows, at least 16: groups of similar size share a program."""
    return max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())


def pad_rows(axes: tuple[int | None, ...], args: tuple, kwargs: dict, length: int) -> tuple[tuple, dict]:
    """Fill every per-row argument up by repeating its first row, which masks then keep out of the likelihood.

    ``axes``: per leaf of ``(args, kwargs)``, the axis that runs over the rows, or None; ``args``: positional arguments
    (arrays); ``kwargs``: keyword arguments; ``length``: rows wanted; 0 leaves everything as it is. Returns ``(args, kwargs)``
    with ``length`` rows.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    if length == 0:
        return args, kwargs

    def pad(leaf: Any, axis: int | None) -> Any:
        if axis is None or leaf.shape[axis] == length:
            return leaf
        index = np.where(np.arange(length) < leaf.shape[axis], np.arange(length), 0)
        if isinstance(leaf, jax.core.Tracer):
            return jnp.take(leaf, index, axis=axis)
        # Outside of JAX: there, every number of rows would be a program of its own.
        return jnp.asarray(np.take(np.asarray(leaf), index, axis=axis))

    return structure.unflatten([pad(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)])


def count_rows(
    plan: PartitionPlan,
    model: Any,
    expected: ArgumentSignature,
    got: ArgumentSignature,
    args: tuple,
    kwargs: dict,
    who: str,
) -> dict[str, int]:
    """Check arriving arguments against those the plan was made for, and count their rows.

    ``plan``: the plan; ``model``: the NumPyro model (traced abstractly where rows are not read off the arguments);
    ``expected``: signature of the arguments before; ``got``: signature of those that arrive; ``args``: the arguments that
    arrive (arrays); ``kwargs``: likewise; ``who``: whose rows they are, for messages. Returns rows by partitioned axis (plate,
    or labelled sample site). Raises StateError for another structure, dtype, number of columns, or static value; DataError for
    no rows at all, or per-row arguments of different lengths; PartitionError where the model's plate does not follow its
    arguments.
    """
    if plan.rows.whole:
        raise PartitionError(
            f"{who}: the model was kept whole ({plan.why}), so it has no rows that could come or go by group. Name what is "
            "split: Partition(model, plate, groups), or Partition(model, groups=..., sites={'obs': -1})."
        )
    if expected.structure != got.structure:
        raise StateError(
            f"{who}: the arguments are {_names(got)}, but the state was made with {_names(expected)}. Pass what `init` was "
            "given, with the rows of this group only, positional and by keyword alike."
        )
    by_rows = plan.mechanism == "args"
    axes = plan.reading.axes if by_rows else (None,) * len(got.leaves)
    sizes: dict[str, int] = {}
    for before, now, axis in zip(expected.leaves, got.leaves, axes, strict=True):
        _check_leaf(before, now, axis, by_rows, who)
        if axis is not None and now.shape is not None:
            sizes[now.name] = now.shape[axis]
    if by_rows:
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise DataError(f"{who}: per-row arguments differ in their number of rows ({found}).")
        num_rows = next(iter(sizes.values()))
        rows = dict.fromkeys(plan.reading.keys, num_rows)
    else:
        rows = _traced_rows(plan, model, args, kwargs, who)
    if min(rows.values()) < 1:
        raise DataError(f"{who}: there are no rows. Pass at least one, or leave the group out.")
    return rows


def arrive(plan: PartitionPlan, table: GroupTable, rows: dict[str, int], full: bool) -> Arrival:
    """Pack the rows of groups that are at hand from now on.

    ``plan``: the plan of the rows before; its structure stays; ``table``: groups of the arriving rows; ``rows``: rows by
    partitioned axis, from :func:`count_rows`; ``full``: whether q has full covariance (chunks are then several times longer
    than D). Returns the plan and packing of the new rows. A single group's rows are filled up to a power of two where they are
    read off the arguments, so that its programs serve other groups.
    """
    padded, packing = 0, None
    if plan.mechanism == "mask":
        ends = np.cumsum([0, *rows.values()])
        index = {key: table.index_of_row[a:b] for key, (a, b) in zip(rows, itertools.pairwise(ends), strict=True)}
        packing = group_masks(index, table.num_groups)
    elif plan.mechanism == "args" and table.num_groups == 1:
        padded = padded_length(table.num_rows)
        packing = _pack_padded(table.num_rows, padded, plan.layout.dim if full else 1)
    else:
        packing = pack_rows(table, choose_chunk_rows(table.sizes, dim=plan.layout.dim))
    local = plan.local
    if local is not None:
        local = dataclasses.replace(local, size=rows[local.key])
    chunk_rows = packing.rows.shape[1] if isinstance(packing, Packing) else table.num_rows
    chunks = int(packing.chunk_group.shape[0])
    found = dataclasses.replace(plan, table=table, local=local, chunk_rows=chunk_rows, num_chunks=chunks)
    return Arrival(found, packing, padded)


def nobody(plan: PartitionPlan, packing: Packing | GroupMasks) -> Arrival:
    """The plan when no group's rows are at hand."""
    none = np.zeros(0, np.int32)
    if isinstance(packing, GroupMasks):
        empty: Packing | GroupMasks = group_masks(dict.fromkeys(plan.reading.keys, none), 0)
    else:
        slots = jnp.zeros((0, 1), jnp.int32)
        empty = Packing(slots, slots > 0, jnp.asarray(none), jnp.zeros(1, jnp.int32))
    local = None if plan.local is None else dataclasses.replace(plan.local, size=0)
    table = numbered_table(())
    return Arrival(dataclasses.replace(plan, table=table, local=local, chunk_rows=0, num_chunks=0), empty, 0)


def without_labels(plan: PartitionPlan, padded_rows: int, keep_sizes: bool, keep_labels: bool = False) -> PartitionPlan:
    """The plan as compiled programs may see it: equal for all groups that one program serves.

    ``plan``: the plan; ``padded_rows``: rows to which arguments are filled up, or 0; ``keep_sizes``: whether programs read the
    groups' sizes (a stochastic solver's do); ``keep_labels``: whether they read the labels (those of a schedule with settings
    by label). Returns the plan under the labels 0, 1, ..., or its own.
    """
    count = plan.table.num_groups
    sizes = (padded_rows,) if padded_rows else plan.table.sizes if keep_sizes else (0,) * count
    local = plan.local
    if local is not None and padded_rows:
        local = dataclasses.replace(local, size=padded_rows)
    table = numbered_table(sizes)
    if keep_labels:
        table = dataclasses.replace(table, labels=plan.table.labels)
    return dataclasses.replace(plan, table=table, local=local, remarks=())


def _pack_padded(num_rows: int, length: int, dim: int) -> Packing:
    chunk_rows = min(length, max(_LONGEST_CHUNK, padded_length(8 * dim)))
    slots = np.arange(length).reshape(-1, chunk_rows)
    chunks = np.zeros(slots.shape[0], np.int32)
    return Packing(
        rows=jnp.asarray(slots.astype(np.int32)),
        mask=jnp.asarray(slots < num_rows),
        chunk_group=jnp.asarray(chunks),
        offsets=jnp.asarray(np.array([0, slots.shape[0]], np.int32)),
    )


def _check_leaf(before: Any, now: Any, axis: int | None, by_rows: bool, who: str) -> None:
    if before.shape is None or now.shape is None:
        # Where rows follow a static number, it may well differ from group to group.
        if before.dtype == now.dtype and (before == now or not by_rows):
            return
        raise StateError(f"{who}: {now.name} is {now}, but the state was made with {before}: pass the same value.")
    if before.dtype != now.dtype or len(before.shape) != len(now.shape):
        raise StateError(f"{who}: {now.name} is {now}, but the state was made with {before}.")
    if not by_rows:
        return
    kept = [i for i in range(len(now.shape)) if i != axis]
    if [before.shape[i] for i in kept] != [now.shape[i] for i in kept]:
        what = "only the number of rows may differ" if axis is not None else "it is not per row, so its shape must stay"
        raise StateError(f"{who}: {now.name} is {now}, but the state was made with {before}; {what}.")


def _traced_rows(plan: PartitionPlan, model: Any, args: tuple, kwargs: dict, who: str) -> dict[str, int]:
    trace = abstract_trace(plan.model(model), jax.random.key(0), args, kwargs)
    missing = [name for name in plan.observed if name not in trace or not is_observed(trace[name])]
    rows = {} if missing else plan.rows.sizes(trace)
    if missing or set(rows) != set(plan.reading.keys):
        what = ", ".join(map(repr, missing or plan.observed))
        raise PartitionError(
            f"{who}: with these arguments the model has no observed sample site {what} in {plan.where}."
        )
    lengths = {size for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "shape") for size in leaf.shape}
    for key, size in rows.items():
        if size not in lengths:
            raise PartitionError(
                f"{who}: {key!r} has {size} rows, but no argument given has as many, so the model does not take its rows from its "
                f"arguments: size the plate by one, numpyro.plate({key!r}, X.shape[0]), and pass all per-row data as arguments."
            )
    return rows


def _names(signature: ArgumentSignature) -> str:
    return ", ".join(leaf.name for leaf in signature.leaves) or "none"


# -------------------------------------------------------------------------------------------------- two numbers per row
# Whether sites can be kept as two numbers per row, and what such a fit reads off the model.

# How far the prior as it is read may be from the model's own log density, of the size of its terms.
_AGREEMENT = {"float32": 1e-4, "float64": 1e-9}


def why_not_rows(part: PartitionPlan, trace: dict) -> str | None:
    """What keeps sites from being kept by rows, as far as names and shapes say; None where nothing does.

    ``part``: the plan; ``trace``: an abstract trace of the model on all rows. Returns a reason in words.
    """
    if part.likelihood not in ("quadratic", "affine") or not part.terms:
        return "the rows were not found to see the latents through affine predictors"
    for spec in part.terms:
        if len(spec.predictors) != 1:
            return f"the rows of {spec.site!r} have two predictors"
        if spec.predictors[0].shared:
            return f"all rows of {spec.site!r} share one predictor"
    if part.has_prior_factor:
        beyond = ", ".join((*part.prior_latents, *part.outside))
        return f"part of the prior ({beyond}) is outside the Gaussian family"
    if part.params:
        return f"the model has numpyro.param site(s) {', '.join(part.params)}"
    if part.local is not None or part.enumeration is not None:
        return "rows have latents of their own"
    odd = [
        name for name in part.layout.names if _scale_of(trace[name]["fn"]) is None or trace[name]["scale"] is not None
    ]
    return f"the prior of {', '.join(odd)} is neither Normal nor MultivariateNormal" if odd else None


def num_elements(part: PartitionPlan, trace: dict) -> int:
    """P, the number of predictors of all rows."""
    return sum(math.prod(trace[spec.site]["fn"].batch_shape) for spec in part.terms)


def read_row_prior(call: ModelCall, part: PartitionPlan, packing: Packing | GroupMasks, diagonal: bool) -> RowPrior:
    """The prior as the rows see it.

    ``call``: the model on all rows; ``part``: the plan; ``packing``: says whose the rows are; ``diagonal``: whether each row
    sees a multiple of one latent, row n that of latent n. Returns the prior; its making takes ``O(P^2 D)``.
    """
    loc, scales = _read_prior(call)
    design, data = read_design(call, part.terms)
    group = _groups_of_elements(part, packing, data)
    if diagonal:
        return see_latents(loc, scales, jnp.diagonal(design), group)
    return see_rows(loc, scales, design, group)


def read_design(call: ModelCall, terms: tuple[TermSpec, ...]) -> tuple[Float[Array, "P D"], tuple[TermData, ...]]:
    """The rows' vectors a_n, by reverse derivatives, and the terms' other arrays."""
    dim = call.layout.dim
    few = num_terms(call, terms) <= dim
    data = tuple(prepare_term(call, spec, few=few) for spec in terms)
    return jnp.concatenate([d.design[0] for d in data]), data


def num_terms(call: ModelCall, terms: tuple[TermSpec, ...]) -> int:
    """Elements of all terms, by shapes alone."""
    found: list[int] = []

    def count(point):
        trace, _ = call.trace(point)
        found.append(sum(math.prod(trace[spec.site]["fn"].batch_shape) for spec in terms))
        return point

    jax.eval_shape(count, jnp.zeros((call.layout.dim,)))
    return found[-1]


def read_rows(call: ModelCall, terms: tuple[TermSpec, ...], loc: Float[Array, "D"]) -> tuple[TermData, ...]:
    """The terms' arrays at the prior's location, whose predictors are the offsets of centred ones; no design is made.

    ``call``: the model on all rows; ``terms``: their structure, one predictor each; ``loc``: the prior's location. Returns per
    term its arrays, with an empty design.
    """
    return tuple(_moved(call, spec, loc) for spec in terms)


def look_at_rows(
    call: ModelCall, part: PartitionPlan, points: Float[Array, "2 D"]
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """What values alone can tell.

    ``call``: the model on all rows; ``part``: the plan; ``points``: two points. Returns whether the prior is the Gaussian that
    was read off it, and whether each row sees a multiple of one latent, row n that of latent n.
    """
    loc, scales = _read_prior(call)
    prior = see_latents(loc, scales, jnp.ones_like(loc), jnp.zeros(loc.shape, jnp.int32))

    def wrong(point):
        away = point - loc
        own = -0.5 * jnp.sum(away * prior.precision_product(away)) - prior.half_log_det()
        own = own - 0.5 * loc.shape[0] * jnp.log(2 * jnp.pi)
        parts = jnp.stack(list(latent_log_density(call, point).values()))
        return jnp.abs(own - jnp.sum(parts)) / (1 + jnp.sum(jnp.abs(parts)))

    agrees = jnp.all(jax.vmap(wrong)(points) <= _AGREEMENT[loc.dtype.name])
    if num_terms(call, part.terms) != loc.shape[0]:
        return agrees, jnp.array(False)
    design, _ = read_design(call, part.terms)
    slope = jnp.diagonal(design)
    return agrees, jnp.all(slope != 0) & jnp.all(design == jnp.diag(slope))


def _moved(call: ModelCall, spec: TermSpec, loc: Float[Array, "D"]) -> TermData:
    # A model of the deviation from loc: its offsets are those of the centred predictor.
    centred = dataclasses.replace(call, layout=_Centred(call.layout, loc))
    return prepare_term(centred, spec, design=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Centred:
    """A layout whose origin is a given point."""

    layout: Any
    loc: Float[Array, "D"]

    @property
    def dim(self) -> int:
        """D."""
        return self.loc.shape[0]

    def unflatten(self, flat: Array) -> dict:
        """Latents at the point plus ``flat``."""
        return self.layout.unflatten(self.loc + flat)


def _read_prior(call: ModelCall) -> tuple[Float[Array, "D"], tuple]:
    """Location and roots of every latent's prior, at the flat origin."""
    dtype = jnp.result_type(float)
    trace, _ = call.trace(jnp.zeros((call.layout.dim,), dtype))
    locs, scales = [], []
    for name, shape in zip(call.layout.names, call.layout.shapes, strict=True):
        fn = trace[name]["fn"]
        base: Any = _plain(fn)
        locs.append(jnp.broadcast_to(base.loc, shape).astype(dtype).reshape(-1))
        if isinstance(base, dist.Normal):
            scales.append(jnp.broadcast_to(base.scale, shape).astype(dtype).reshape(-1))
        else:
            size = shape[-1]
            whole = jnp.broadcast_to(base.scale_tril, (*shape[:-1], size, size)).astype(dtype)
            scales.append(whole.reshape(-1, size, size))
    return jnp.concatenate(locs), tuple(scales)


def _plain(fn: dist.Distribution) -> dist.Distribution:
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def _scale_of(fn: dist.Distribution) -> str | None:
    kind = type(_plain(fn))
    return {dist.Normal: "sd", dist.MultivariateNormal: "root"}.get(kind)


def _groups_of_elements(
    part: PartitionPlan, packing: Packing | GroupMasks, data: tuple[TermData, ...]
) -> Int[Array, "P"]:
    found = []
    for spec, one in zip(part.terms, data, strict=True):
        shape = one.fn.batch_shape
        rows = _groups_of_rows(part.rows, packing, spec, shape)
        aligned = rows.reshape(rows.shape + (1,) * (-(spec.row_dim or -1) - 1))
        found.append(jnp.broadcast_to(aligned, shape).reshape(-1))
    return jnp.concatenate(found)


def _groups_of_rows(rows: RowAxes, packing: Packing | GroupMasks, spec: TermSpec, shape: tuple) -> Int[Array, "N"]:
    if rows.whole:
        return jnp.zeros((), jnp.int32)
    if isinstance(packing, GroupMasks):
        return packing.group_of_row[spec.row_key]
    size = shape[spec.row_dim]
    # Padding goes to a place beyond the last, which is dropped; a row that no chunk holds is nobody's.
    place = jnp.where(packing.mask, packing.rows, size)
    owner = jnp.broadcast_to(packing.chunk_group[:, None], place.shape)
    return jnp.full((size + 1,), -1, jnp.int32).at[place.reshape(-1)].set(owner.reshape(-1))[:size]


def places_of_elements(
    packing: Packing, terms: tuple[TermSpec, ...], data: tuple[TermData, ...], count: int
) -> Int[Array, "L"]:
    """Where the elements of a device's rows stand among those of all rows; ``count`` for what fills its chunks up.

    Args:
        packing: the device's chunks.
        terms: structure of every term.
        data: their arrays on the device's rows, in the order of the slots.
        count: P, elements of all rows.

    Returns:
        Indices, term by term as ``data`` has them.
    """
    rows, real = packing.rows.reshape(-1), packing.mask.reshape(-1)
    shapes = [one.fn.batch_shape for one in data]
    # A row has as many elements here as it has there.
    num_rows = count * rows.shape[0] // sum(map(math.prod, shapes))
    found, start = [], 0
    for spec, shape in zip(terms, shapes, strict=True):
        axis = cast(int, spec.row_dim) % len(shape)
        every = jnp.arange(math.prod(shape) // shape[axis] * num_rows, dtype=jnp.int32)
        own = jnp.take(every.reshape(*shape[:axis], num_rows, *shape[axis + 1 :]), rows, axis=axis) + start
        there = real.reshape((-1,) + (1,) * (len(shape) - axis - 1))
        found.append(jnp.where(there, own, count).reshape(-1))
        start += every.shape[0]
    return jnp.concatenate(found)
