"""What plates a traced model has, and which of them can be split into groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PartitionError

__all__ = [
    "PlateInfo",
    "choose_plate",
    "find_plates",
    "pick_plate",
    "pick_plates",
    "refuse_latents",
    "require_observed",
]


@dataclass(frozen=True)
class PlateInfo:
    """What one plate of a traced model holds.

    Attributes:
        size: Full number of indices of the plate.
        subsample_size: Indices drawn per evaluation; `size` where the plate is not subsampled.
        dims: Batch dimensions it takes (negative, counted from the right), ascending; one unless it is entered at
            several.
        observed: Names of the observed sample sites inside, `numpyro.factor` included, in order of appearance.
        latents: Names of the latent sample sites inside, in order of appearance.
    """

    size: int
    subsample_size: int
    dims: tuple[int, ...]
    observed: tuple[str, ...]
    latents: tuple[str, ...]


def find_plates(trace: Mapping[str, Mapping[str, Any]]) -> dict[str, PlateInfo]:
    """List the plates of a traced model with what is inside each.

    Args:
        trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.

    Returns:
        Plate name to its `PlateInfo`, in order of appearance. A plate inside a `scan` body shows through its sample
        sites.
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

    Observed sample sites outside the plate are legal: they belong to the prior factor.

    Args:
        trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.
        plate: Name of the plate, or None for the only one with observed sample sites.

    Returns:
        The plate's name.

    Raises:
        PartitionError: If there is no such plate, no observed sample site in it, or several candidates; if a discrete
            latent couples all groups.
    """
    name = pick_plate(trace, plate)
    refuse_latents(trace, (name,))
    return name


def pick_plates(trace: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> tuple[str, ...]:
    """Check several plates that are split together: all are there, and at least one holds an observed sample site.

    Args:
        trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.
        names: The plates.

    Returns:
        Their names.

    Raises:
        PartitionError: If there is no such plate, or nothing observed in any of them.
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

    Args:
        trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.
        name: The sample site.

    Raises:
        PartitionError: Naming the site and the observed ones.
    """
    observed = [msg["name"] for msg in trace.values() if msg["type"] == "sample" and msg["is_observed"]]
    if name not in observed:
        what = "a latent, not observed" if name in trace else "not there"
        raise PartitionError(
            f"sites names sample site {name!r}, which is {what}; the observed sample sites are: {_names(observed)}."
        )


def refuse_latents(trace: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> None:
    """Refuse latents that plates to be split cannot do with.

    Args:
        trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.
        names: The plates to be split.

    Raises:
        PartitionError: For discrete latents outside them, which couple all groups.
    """
    plates = find_plates(trace)
    inside = {latent for name in names for latent in plates[name].latents}
    for name in names:
        _refuse_latents(trace, name, plates[name], inside)


def pick_plate(trace: Mapping[str, Mapping[str, Any]], plate: str | None) -> str:
    """Choose the plate to split by its observed sample sites alone.

    Args:
        trace: As `numpyro.handlers.trace(...).get_trace(...)` gives it.
        plate: Name of the plate, or None for the only one with observed sample sites.

    Returns:
        The plate's name.

    Raises:
        PartitionError: If there is no such plate, no observed sample site in it, or several candidates.
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
