"""`Partition`: which rows of a model's likelihood belong to which group, as a NumPyro effect handler."""

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from numpyro import handlers
from numpyro.primitives import Messenger

from ..errors import PartitionError
from ._groups import (
    PRIOR,
    GroupTable,
    as_int,
    checked_axes,
    checked_group,
    known_labels,
    labels_table,
    one_group_table,
    parse_splits,
    split_table,
)
from ._missing import with_missing_only

# ----------------------------------------------------------------------------------------------------------------- rows
# Handlers that decide which indices a plate runs over: all of them, or the rows of one chunk.


class FullPlates(Messenger):
    """Run every plate over all of its indices, in order: a fit visits all rows, so a plate's own mini-batch is not drawn.

    Of latents that stand for missing data, entries that are not missing have a density: see :func:`with_missing_only`.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        # Whether a plate had drawn fewer indices than it has.
        self.widened = False
        self._observed: dict[str, Any] = {}

    def __enter__(self) -> Any:
        """Begin a run of the model."""
        self._observed = {}
        return super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a subsampled plate all of its indices; one that has values already passes."""
        if msg["type"] == "sample":
            with_missing_only(msg, self._observed)
        if msg["type"] == "plate" and msg["value"] is None:
            size, drawn = msg["args"]
            msg["drawn"] = size if drawn is None else drawn
            self.widened |= msg["drawn"] != size
            msg["args"], msg["value"] = (size, size), jnp.arange(size)


class BatchPlates(Messenger):
    """Keep the mini-batch of every plate that draws one, as its first indices, scaled as the model scales it.

    For a model whose arguments are themselves the mini-batch, so that the plate's size is only the number to scale up to.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a subsampled plate as many indices as it draws."""
        if msg["type"] == "plate" and msg["value"] is None and msg["args"][1] is not None:
            msg["kept"] = msg["args"][1]
            msg["value"] = jnp.arange(msg["args"][1])


def kept_batch(trace: Mapping[str, Mapping[str, Any]]) -> tuple[str, int, int] | None:
    """The first plate of a trace under `BatchPlates` that kept a mini-batch.

    ``trace``: As `numpyro.handlers.trace(...).get_trace(...)` gives it. Returns its name, size, and the number of indices it
    drew; None where every plate ran over all of its indices.
    """
    for name, site in trace.items():
        if site["type"] == "plate" and site.get("kept", site["args"][0]) != site["args"][0]:
            return name, site["args"][0], site["kept"]
    return None


class PlateRows(Messenger):
    """Run one plate over given rows, without the factor N/B by which NumPyro scales a mini-batch's terms.

    The plate keeps its full size, so that `numpyro.subsample` and `numpyro.param(event_dim=)` inside take the same rows
    as the model's own indexing. With as many rows as the plate has indices they take nothing: give those in order.

    ``rows``: Indices that the plate runs over.
    """

    def __init__(self, fn: Callable[..., Any], plate: str, rows: Int[Array, " R"]) -> None:
        super().__init__(fn)
        self.plate, self.rows = plate, rows
        self.size: int | None = None

    def process_message(self, msg: dict[str, Any]) -> None:
        """Set the plate's indices; divide the mini-batch scale out of the sample sites inside."""
        if msg["type"] == "plate" and msg["name"] == self.plate:
            self.size = msg["args"][0]
            msg["args"], msg["value"] = (self.size, self.rows.shape[0]), self.rows
        if msg["type"] != "sample" or self.size is None or self.size == self.rows.shape[0]:
            return
        # Plates are further in: the frames are there, and the scale already holds N/B once for each of them.
        count = sum(frame.name == self.plate for frame in msg["cond_indep_stack"])
        if count:
            scale = msg["scale"] * (self.rows.shape[0] / self.size) ** count
            one = isinstance(scale, float) and abs(scale - 1.0) < 1e-12
            msg["scale"] = None if one else scale


# ----------------------------------------------------------------------------------------------------------------- axes
# Where the rows that groups split lie in each sample site: a plate's axis, or a labelled batch axis.

# Key of the one row that a model has whose likelihood is kept whole.
WHOLE = "likelihood"


@dataclass(frozen=True)
class Axis:
    """The partitioned batch axis of one sample site.

    Attributes:
        key: The plate's name, or the sample site's where a batch axis was labelled.
        dim: The axis, negative, counted from the right of the batch shape; 0 where all terms of the site are one row.
        size: Rows along it as the plate has them; the batch shape must agree.
    """

    key: str
    dim: int
    size: int


@dataclass(frozen=True)
class RowAxes:
    """Which batch axes run over rows.

    Attributes:
        plates: Partitioned plates; several are split together.
        sites: Sample sites in no plate with the batch axis that was labelled.
        whole: Whether nothing is split: every observed sample site is one row, the sum of its terms, of one group.
    """

    plates: tuple[str, ...] = ()
    sites: tuple[tuple[str, int], ...] = ()
    whole: bool = False

    def of(self, site: Mapping[str, Any]) -> Axis | None:
        """The partitioned axis of a sample site.

        ``site``: An entry of a NumPyro trace. Returns the axis, or None for a site that has none. Raises PartitionError for a
        labelled axis that the site's batch shape lacks, or a site inside two partitioned plates.
        """
        if self.whole:
            return Axis(WHOLE, 0, 1) if site["type"] == "sample" and site["is_observed"] else None
        if self.sites:
            return self._labelled(site)
        frames = [frame for frame in site["cond_indep_stack"] if frame.name in self.plates]
        if len(frames) > 1:
            names = ", ".join(repr(frame.name) for frame in frames)
            raise PartitionError(
                f"sample site {site['name']!r} is inside the partitioned plates {names}, whose labels disagree on some "
                "of its terms: split one of the plates only."
            )
        return Axis(frames[0].name, frames[0].dim, frames[0].size) if frames else None

    def _labelled(self, site: Mapping[str, Any]) -> Axis | None:
        dim = dict(self.sites).get(site["name"])
        if dim is None:
            return None
        shape = tuple(site["fn"].batch_shape)
        if len(shape) < -dim:
            raise PartitionError(
                f"sample site {site['name']!r} has batch shape {shape} and event shape "
                f"{tuple(site['fn'].event_shape)}, so there is no batch axis {dim}: a joint term over all rows cannot "
                "be split. Leave out to_event or the sum over rows."
            )
        return Axis(site["name"], dim, shape[dim])

    def sizes(self, trace: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Rows along every partitioned axis of a traced model, plates in the order in which they were given."""
        if self.whole:
            return {WHOLE: 1}
        found: dict[str, int] = {}
        for msg in trace.values():
            if msg["type"] == "plate" and msg["name"] in self.plates:
                found[msg["name"]] = msg["args"][0]
            if msg["type"] == "sample" and (axis := self.of(msg)) is not None:
                found.setdefault(axis.key, axis.size)
        order = self.plates or tuple(name for name, _ in self.sites)
        return {key: found[key] for key in order if key in found}


# --------------------------------------------------------------------------------------------------------------- plates
# What plates a traced model has, and which of them can be split into groups.


@dataclass(frozen=True)
class PlateInfo:
    """What one plate of a traced model holds.

    ``size``: Full number of indices of the plate; ``subsample_size``: Indices drawn per evaluation; `size` where the plate is
    not subsampled; ``dims``: Batch dimensions it takes (negative, counted from the right), ascending; one unless it is entered
    at several; ``observed``: Names of the observed sample sites inside, `numpyro.factor` included, in order of appearance;
    ``latents``: Names of the latent sample sites inside, in order of appearance.
    """

    size: int
    subsample_size: int
    dims: tuple[int, ...]
    observed: tuple[str, ...]
    latents: tuple[str, ...]


def find_plates(trace: Mapping[str, Mapping[str, Any]]) -> dict[str, PlateInfo]:
    """List the plates of a traced model with what is inside each.

    ``trace``: As `numpyro.handlers.trace(...).get_trace(...)` gives it. Returns plate name to its `PlateInfo`, in order of
    appearance. A plate inside a `scan` body shows through its sample sites.
    """
    plates: dict[str, tuple[int, int]] = {}
    inside: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for msg in trace.values():
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            plates[msg["name"]] = (size, size if subsample_size is None else subsample_size)
        if msg["type"] != "sample":
            continue
        for frame in msg["cond_indep_stack"]:
            plates.setdefault(frame.name, (frame.size, frame.size))
            inside.setdefault(frame.name, []).append((frame.dim, msg))
    return {name: _plate_info(*sizes, inside.get(name, [])) for name, sizes in plates.items()}


def choose_plate(trace: Mapping[str, Mapping[str, Any]], plate: str | None = None) -> str:
    """Choose the plate to split, and refuse a model that cannot be split along it.

    Observed sample sites outside the plate are legal: they belong to the prior factor. ``trace``: As
    `numpyro.handlers.trace(...).get_trace(...)` gives it; ``plate``: Name of the plate, or None for the only one with observed
    sample sites. Returns the plate's name. Raises PartitionError if there is no such plate, no observed sample site in it, or
    several candidates; if a discrete latent couples all groups.
    """
    name = pick_plate(trace, plate)
    refuse_latents(trace, (name,))
    return name


def pick_plates(trace: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> tuple[str, ...]:
    """Check several plates that are split together: all are there, and at least one holds an observed sample site.

    Raises PartitionError if there is no such plate, or nothing observed in any of them.
    """
    plates = find_plates(trace)
    for name in names:
        if name not in plates:
            pick_plate(trace, name)
    if not any(plates[name].observed for name in names):
        pick_plate(trace, names[0])
    return names


def require_observed(trace: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Refuse a labelled sample site that the model lacks, or does not observe.

    Raises PartitionError naming the site and the observed ones.
    """
    observed = [msg["name"] for msg in trace.values() if msg["type"] == "sample" and msg["is_observed"]]
    if name not in observed:
        what = "a latent, not observed" if name in trace else "not there"
        raise PartitionError(
            f"sites names sample site {name!r}, which is {what}; the observed sample sites are: {_names(observed)}."
        )


def refuse_latents(trace: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> None:
    """Refuse latents that plates to be split cannot do with.

    ``trace``: As `numpyro.handlers.trace(...).get_trace(...)` gives it; ``names``: The plates to be split. Raises
    PartitionError For discrete latents outside them, which couple all groups.
    """
    plates = find_plates(trace)
    inside = {latent for name in names for latent in plates[name].latents}
    for name in names:
        _refuse_latents(trace, name, plates[name], inside)


def pick_plate(trace: Mapping[str, Mapping[str, Any]], plate: str | None) -> str:
    """Choose the plate to split by its observed sample sites alone.

    ``trace``: As `numpyro.handlers.trace(...).get_trace(...)` gives it; ``plate``: Name of the plate, or None for the only one
    with observed sample sites. Returns the plate's name. Raises PartitionError if there is no such plate, no observed sample
    site in it, or several candidates.
    """
    plates = find_plates(trace)
    observed = [msg for msg in trace.values() if msg["type"] == "sample" and msg["is_observed"]]
    if plate is not None and plate not in plates:
        raise PartitionError(
            f"the model has no plate {plate!r}; {_plates_text(plates)} {_advice(plate, plates, observed)}"
        )
    if plate is not None and not plates[plate].observed:
        raise PartitionError(
            f"plate {plate!r} (size {plates[plate].size}) has no observed sample site inside (latents inside: "
            f"{_names(plates[plate].latents)}), so there is no likelihood to split. {_advice(plate, plates, observed)}"
        )
    if plate is not None:
        return plate
    candidates = {name: info for name, info in plates.items() if info.observed}
    if len(candidates) == 1:
        return next(iter(candidates))
    if candidates:
        raise PartitionError(
            f"several plates hold observed sample sites: {_sizes(candidates)}; name the one to split, "
            f"Partition(model, {next(iter(candidates))!r}, groups), or split them together, Partition(model, "
            f"groups={{{', '.join(f'{name!r}: labels_{i}' for i, name in enumerate(candidates, 1))}}}), one label per row of each."
        )
    raise PartitionError(
        f"no plate of the model holds an observed sample site; {_plates_text(plates)} "
        f"{_advice('data', plates, observed)}"
    )


def _plate_info(size: int, subsample_size: int, inside: list[tuple[int, Mapping[str, Any]]]) -> PlateInfo:
    return PlateInfo(
        size=size,
        subsample_size=subsample_size,
        dims=tuple(sorted({dim for dim, _ in inside})),
        observed=tuple(msg["name"] for _, msg in inside if msg["is_observed"]),
        latents=tuple(msg["name"] for _, msg in inside if not msg["is_observed"]),
    )


def _refuse_latents(trace: Mapping[str, Mapping[str, Any]], name: str, info: PlateInfo, inside: set[str]) -> None:
    latents = [msg for msg in trace.values() if msg["type"] == "sample" and not msg["is_observed"]]
    coupling = [msg["name"] for msg in latents if msg["name"] not in inside and _is_discrete(msg)]
    if coupling:
        raise PartitionError(
            f"discrete latent(s) {_names(coupling)} outside plate {name!r} couple all groups: summed out, log sum_k "
            "p(k) prod_m "
            f"p(y_m | k) is not a sum over groups. Move the discrete latent into plate {name!r}, or replace it by "
            "continuous "
            "mixing weights."
        )


def _is_discrete(msg: Mapping[str, Any]) -> bool:
    support = msg["fn"].support
    return support is not None and support.is_discrete


def _advice(wanted: str, plates: Mapping[str, PlateInfo], observed: list[Mapping[str, Any]]) -> str:
    """The line to write instead, from what the model does have."""
    candidates = [name for name, info in plates.items() if info.observed]
    if candidates:
        return f"The likelihood is in plate {candidates[0]!r}: write Partition(model, {candidates[0]!r}, groups)."
    if not observed:
        return "No sample site is observed: pass the data to the model, so that `obs=` is not None."
    for msg in observed:
        shape = tuple(msg["fn"].batch_shape)
        if shape:
            return _advice_on_axes(wanted, msg["name"], shape)
    events = ", ".join(f"{msg['name']!r} (event shape {tuple(msg['fn'].event_shape)})" for msg in observed)
    return (
        f"No observed sample site has a batch axis: {events}. One joint term over all rows (to_event over rows, a "
        "multivariate "
        "normal or Gaussian process over all rows, a summed numpyro.factor) cannot be split into groups. If the rows "
        "are "
        f"independent given the latents, leave the sum and to_event out and put the site inside `with "
        f"numpyro.plate({wanted!r}, N):`."
    )


def _advice_on_axes(wanted: str, name: str, shape: tuple[int, ...]) -> str:
    """The axes of a site in no plate that can be split, the longest first."""
    dims = sorted((d for d in range(-len(shape), 0) if shape[d] > 1), key=lambda d: -shape[d]) or [-1]
    axes = " or ".join(
        f"Partition(model, groups=labels, sites={{{name!r}: {dim}}}) ({shape[dim]} rows)" for dim in dims
    )
    plates = " or ".join(
        f"`with numpyro.plate({wanted!r}, {shape[dim]}{'' if dim == -1 else f', dim={dim}'}):`" for dim in dims
    )
    return (
        f"Observed sample site {name!r} has batch shape {shape} and is in no plate. Name the axis that runs over rows, "
        f"{axes}, which is the way for steps of a scan; or put the site inside {plates}."
    )


def _plates_text(plates: Mapping[str, PlateInfo]) -> str:
    return f"its plates are: {_sizes(plates)}." if plates else "it has no plates."


def _sizes(plates: Mapping[str, PlateInfo]) -> str:
    return ", ".join(f"{name!r} (size {info.size})" for name, info in plates.items())


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"


# ------------------------------------------------------------------------------------------------------------ partition

MODES = ("auto", "args", "index", "mask")


@dataclass
class _Run:
    """What one entry of the handler has met: plates or sites it restricted, other plates, observed sample sites."""

    found: set[str | None] = field(default_factory=set)
    plates: dict[str, int] = field(default_factory=dict)
    observed: list[str] = field(default_factory=list)


class Partition(Messenger):
    r"""Split a model's likelihood into groups of rows.

    Without `group` the handler changes nothing; it only carries the split. With ``group=g`` every sample site in the
    partitioned plate keeps the rows of group g: the other groups' observed terms (`numpyro.factor` included) and the
    log density of their local latents are masked out. Priors and everything outside the plate stay. Hence, with M
    groups and PRIOR standing for "no group at all",

        sum_g log_density(g) - (M - 1) * log_density(PRIOR) = log_density(model).

    A discrete latent marked ``infer={"enumerate": "parallel"}`` inside the plate is not masked: summed out without its
    observed terms it contributes exactly zero, masked it would contribute the log of its number of values per row.

    Use it around a model (``Partition(model, "data", labels)``), as a decorator, or as a context manager (name the
    plate).

    Args:
        fn: The model. None for a context manager or decorator.
        plate: Name of the plate to split. None: the only plate with observed sample sites.
        groups: One label per plate index (ints, strings, any hashables; list, NumPy, JAX or pandas array), or an int
            for that many random blocks labelled 0, 1, ... None: at most 10 random blocks. ``{"A": labels_a, "B":
            labels_b}``, with no `plate`, masks several plates together: a group is then its rows in each of them.
        group: The group whose terms remain; `PRIOR` for none of them. None: transparent.
        sites: ``{"obs": -1}`` masks that batch axis of a sample site that is in no plate.
        data_axes: Argument name or position to the axis that runs over rows (None: none does), where it is not the
            leading one.
        mode: How one group is evaluated: "auto", "args", "index" or "mask".
        chunk_size: Rows in a chunk below which smaller chunks stop paying; chunks are longer where groups are large.
        check: Whether to compare the split with the untouched model at random points before it is trusted.

    Raises:
        PartitionError: For labels, modes or combinations that make no sense, named in the message.
    """

    # Set by the room of factors, which knows how to plan.
    planner: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        plate: str | None = None,
        groups: Any = None,
        *,
        group: Hashable | None = None,
        sites: Mapping[str, int] | None = None,
        data_axes: Mapping[str | int, int | None] | None = None,
        mode: str = "auto",
        chunk_size: int = 128,
        check: bool = True,
    ) -> None:
        if fn is not None and not callable(fn):
            raise PartitionError(
                f"the model is {fn!r}, which cannot be called: write Partition(model, plate, groups), or plate={fn!r}."
            )
        if mode not in MODES:
            raise PartitionError(f"mode is {mode!r}; expected one of {known_labels(MODES)}.")
        chunk_rows = as_int(chunk_size)
        if chunk_rows is None or chunk_rows < 1:
            raise PartitionError(f"chunk_size is {chunk_size!r}; expected a number of rows, at least 1.")
        super().__init__(fn)
        self.mode = mode
        self.chunk_size = chunk_rows
        self.check = bool(check)
        self.data_axes = checked_axes(data_axes, "data_axes")
        self.sites = checked_axes(sites, "sites")
        if any(not isinstance(name, str) or axis >= 0 for name, axis in (self.sites or {}).items()):
            raise PartitionError(
                f"sites is {sites!r}; expected sample site names with batch axes counted from the right, such as -1."
            )
        self.plate, self._splits = parse_splits(plate, groups, self.sites)
        self._tables: dict[tuple[str | None, int], GroupTable] = {}
        self._runs: list[_Run] = []
        self.group = None if group is None else checked_group(group, self._splits)
        # Whether the split was chosen for a user who named none, and why it is this one, where that is no matter of course.
        self.by_default, self.why = False, ""
        # Whether plates keep the mini-batches that they draw (`BatchPlates`), the data being no more than that.
        self.batches = False

    def because(self, why: str) -> "Partition":
        """The same partition as one that was chosen for the user, with the reason, which its plan then tells."""
        new = self._copy()
        new.by_default, new.why = True, why
        return new

    def for_group(self, group: Hashable) -> "Partition":
        """The same partition restricted to one group.

        Args:
            group: A label, or `PRIOR` for none of the groups.

        Returns:
            A new handler; this one is left as it was.

        Raises:
            PartitionError: If there is no such group.
        """
        if group is None:
            raise PartitionError("for_group(None): write a label, or PRIOR for none of the groups' terms.")
        return self._copy(group=checked_group(group, self._splits))

    def without_rows(self, fn: Callable[..., Any]) -> "Partition":
        """A model without what its rows say: `PRIOR`'s restriction of this partition of it.

        Args:
            fn: The model.

        Returns:
            A new handler; this one is left as it was.
        """
        return self._copy(fn=fn, group=PRIOR)

    def resolve(self, plate_size: int, plate: str | None = None) -> GroupTable:
        """Table of groups for a plate of the given size.

        Args:
            plate_size: Number of indices N of the plate.
            plate: Which plate, where `groups` splits several.

        Returns:
            The table; the same object for the same size.

        Raises:
            PartitionError: If the number of labels is not the plate's size, there are more groups than rows, or
                `groups` splits several plates and `plate` names none of them.
        """
        key = plate if plate in self._splits else None
        if key not in self._splits and len(self._splits) == 1:
            (key,) = self._splits
        if key not in self._splits:
            raise PartitionError(
                f"`groups` splits the plates {known_labels(self._splits)}, not one plate: write Partition(model, "
                "plate, labels)."
            )
        if (key, plate_size) not in self._tables:
            self._tables[key, plate_size] = split_table(self._splits[key], plate_size, self.plate or key)
        return self._tables[key, plate_size]

    def labelled(self) -> GroupTable | None:
        """Table of all rows where every one of them was given a label; None where groups are random blocks.

        Returns:
            The table; plates that are split together end to end, in the order in which `groups` names them.
        """
        tables = [split for split in self._splits.values() if isinstance(split, GroupTable)]
        if len(tables) != len(self._splits):
            return None
        if self.sites or len(tables) == 1:
            return tables[0]
        return labels_table([table.labels[i] for table in tables for i in table.index_of_row])

    def row_axes(self, trace: Mapping[str, Mapping[str, Any]]) -> RowAxes:
        """Where this partition's rows lie in a traced model.

        Args:
            trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.

        Returns:
            The partitioned axes.

        Raises:
            PartitionError: If there is no such plate or sample site, nothing observed in it, or the one plate to split
                cannot be told; if the data are a mini-batch that a plate draws.
        """
        if (kept := kept_batch(trace)) is not None:
            name, size, drawn = kept
            raise PartitionError(
                f"the data are a mini-batch of the {drawn} rows that plate {name!r} of size {size} draws, and do not go together "
                f"with all of its rows, which groups would be split from. Pass all {size} rows, or leave the Partition out: the "
                "model is then kept whole, and batches of any size stand for all rows."
            )
        if self.sites:
            for name in self.sites:
                require_observed(trace, name)
            return RowAxes(sites=tuple(self.sites.items()))
        if len(self._splits) > 1:
            return RowAxes(pick_plates(trace, tuple(name for name in self._splits if name is not None)))
        return RowAxes((pick_plate(trace, self.plate),))

    def tables(self, sizes: Mapping[str, int]) -> tuple[GroupTable, dict[str, np.ndarray]]:
        """The groups over every partitioned axis.

        Args:
            sizes: Rows along each axis, by key (plate or labelled site).

        Returns:
            The table of all rows (axes that are split together end to end, in the order of `sizes`), and by key the
            position of each row's group in it.

        Raises:
            PartitionError: If labels and sizes do not fit.
        """
        own = {key: self.resolve(size, key) for key, size in sizes.items()}
        (first, *others) = own.values()
        if self.sites and any(table.num_rows != first.num_rows for table in others):
            found = ", ".join(f"{key!r} (size {size})" for key, size in sizes.items())
            raise PartitionError(f"sites are split by the same labels, but their axes differ in size: {found}.")
        if self.sites or not others:
            return first, {key: table.index_of_row for key, table in own.items()}
        merged = labels_table([table.labels[i] for table in own.values() for i in table.index_of_row])
        return merged, {
            key: np.asarray([merged.index(label) for label in table.labels])[table.index_of_row]
            for key, table in own.items()
        }

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """How the groups would be evaluated for these arguments, and why.

        Args:
            *args: The model's positional arguments.
            **kwargs: The model's keyword arguments.

        Returns:
            A `PartitionPlan`; its ``str()`` is a table: plate, groups with sizes, mechanism and reason, chunks, padded
            share.

        Raises:
            PartitionError: If the model cannot be split as asked.
        """
        return type(self).planner(self, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under this handler; without a model, decorate the one given."""
        if self.fn is None:
            if len(args) != 1 or kwargs or not callable(args[0]):
                raise PartitionError(
                    "this Partition holds no model: write Partition(model, plate, groups), or decorate a model with it."
                )
            return self._copy(fn=args[0])
        if self.group is not None and None in self._splits and not self.sites:
            return self._copy(plate=self._find_plate(args, kwargs))(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __enter__(self) -> "Partition":
        """Start masking; `group` without a plate name is refused, since only a model's trace could tell the plate."""
        if self.group is not None and None in self._splits and not self.sites:
            raise PartitionError(
                "a context manager cannot see the model ahead, so name the plate: Partition(plate=..., groups=..., "
                "group=...)."
            )
        self._runs.append(_Run())
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop masking, and refuse a model in which there was nothing to mask."""
        super().__exit__(exc_type, exc_value, traceback)
        run = self._runs.pop()
        wanted = self.sites or self._splits
        missing = [name for name in wanted if name not in run.found]
        if exc_type is None and self.group is not None and run.observed and missing:
            kind = "sample site" if self.sites else "plate"
            plates = ", ".join(f"{name!r} (size {size})" for name, size in run.plates.items()) or "none"
            raise PartitionError(
                f"group {self.group!r} was asked for, but the model has no {kind} {missing[0]!r}, so nothing was left "
                "out; its plates "
                f"are: {plates}; its observed sample sites: {known_labels(run.observed)}."
            )

    def process_message(self, msg: dict[str, Any]) -> None:
        """Mask the rows of the other groups; plates are further in, so `msg` has their frames and expanded `fn`."""
        if self.group is None:
            return
        if msg["type"] == "plate":
            self._meet_plate(msg)
        if msg["type"] != "sample":
            return
        run = self._runs[-1]
        run.plates.update({frame.name: frame.size for frame in msg["cond_indep_stack"]})
        if msg["is_observed"]:
            run.observed.append(msg["name"])
        axes = self._axes(msg)
        run.found.update(key for key, _, _ in axes)
        self._refuse_disagreement(msg, axes)
        if not msg["is_observed"] and msg["infer"].get("enumerate") == "parallel":
            return
        for key, dim, size in axes:
            msg["fn"] = msg["fn"].mask(self._mask(key, dim, size))

    def _meet_plate(self, msg: dict[str, Any]) -> None:
        size, subsample_size = msg["args"]
        self._runs[-1].plates[msg["name"]] = size
        if self.sites or msg["name"] not in self._splits:
            return
        self._runs[-1].found.add(msg["name"])
        if subsample_size is not None and subsample_size != size and msg["value"] is None:
            # Groups are sets of all rows: the restricted model visits every one of its group's.
            msg["args"], msg["value"] = (size, size), jnp.arange(size)

    def _axes(self, msg: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
        """The partitioned axes of a sample site: key of the split, batch dimension, size."""
        if not self.sites:
            return [
                (frame.name, frame.dim, frame.size) for frame in msg["cond_indep_stack"] if frame.name in self._splits
            ]
        if msg["name"] not in self.sites:
            return []
        dim, shape = self.sites[msg["name"]], tuple(msg["fn"].batch_shape)
        if len(shape) < -dim:
            raise PartitionError(
                f"sample site {msg['name']!r} has batch shape {shape} and event shape {tuple(msg['fn'].event_shape)}, "
                "so there is no "
                f"batch axis {dim}: a joint term over all rows cannot be split. Leave out to_event or the sum over "
                "rows."
            )
        return [(msg["name"], dim, shape[dim])]

    def _mask(self, key: str | None, dim: int, size: int) -> Bool[Array, "..."] | bool:
        table = self.resolve(size, key)
        # A plain False also skips the terms' computation. A group may be absent from one of several plates.
        if self.group is PRIOR or (len(self._splits) > 1 and self.group not in table):
            return False
        rows = table.index_of_row == table.index(self.group)
        return jnp.asarray(rows.reshape((size,) + (1,) * (-dim - 1)))

    def _refuse_disagreement(self, msg: dict[str, Any], axes: list[tuple[str | None, int, int]]) -> None:
        labels = {self.resolve(size, key).labels for key, _, size in axes}
        if len(axes) > 1 and (len(labels) > 1 or len(next(iter(labels))) > 1):
            raise PartitionError(
                f"sample site {msg['name']!r} is inside the partitioned plates "
                f"{known_labels(key for key, _, _ in axes)}, whose labels "
                "disagree on some of its terms: split one of the plates only."
            )

    def _find_plate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        # block() hides this extra pass from outer handlers; its draws are thrown away.
        with handlers.block():
            trace = handlers.trace(handlers.seed(self.fn, rng_seed=0)).get_trace(*args, **kwargs)
        return pick_plate(trace, None)

    def _copy(
        self, *, fn: Any = None, group: Any = None, plate: str | None = None, mode: str | None = None
    ) -> "Partition":
        new = copy.copy(self)
        # Tables are shared on purpose: they depend on the splits alone, and random blocks cost a permutation each.
        new._runs = []
        if fn is not None:
            Messenger.__init__(new, fn)
        if group is not None:
            new.group = group
        if plate is not None:
            new.plate, new._splits = plate, {plate: self._splits[None]}
        if mode is not None:
            new.mode = mode
        return new


class WholePartition(Partition):
    """A model that is not split: one group, labelled 0, has the whole likelihood as its single row.

    ``why``: Why it is not split, in one sentence; ``batches``: Whether its plates keep their mini-batches.
    """

    def __init__(self, fn: Callable[..., Any], why: str, batches: bool = False) -> None:
        super().__init__(BatchPlates(fn) if batches else fn, mode="mask")
        self.by_default, self.why, self.batches = True, why, batches

    def row_axes(self, trace: Mapping[str, Mapping[str, Any]]) -> RowAxes:
        """One row: all terms of all observed sample sites.

        ``trace``: As `numpyro.handlers.trace(...).get_trace(...)` gives it. Returns the axes; of a model without observed
        sites, whose q is fitted to the prior, nobody's.
        """
        return RowAxes(whole=True)

    def tables(self, sizes: Mapping[str, int]) -> tuple[GroupTable, dict[str, np.ndarray]]:
        """One group of one row; see `Partition.tables`."""
        table = one_group_table(0, 1)
        return table, dict.fromkeys(sizes, table.index_of_row)
