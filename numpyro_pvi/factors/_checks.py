"""What must hold of a probe's values: groups' own rows add up to the whole, and own latents belong to one unit of one group."""

from __future__ import annotations

import numpy as np

from ..errors import PartitionError
from ..handlers import GroupTable
from ._model import LocalLayout
from ._probe import Probe, ray_steps
from ._reading import Reading

# How many times worse than at its best a log-likelihood may be at a probe point.
HOSTILE = 1e3


class CoupledLatentError(PartitionError):
    """A latent inside the partitioned plate reaches beyond its own index or group."""


def check_additive(probe: Probe, where: str, table: GroupTable, reading: Reading, sliced: tuple[str, ...]) -> None:
    """Compare every group's factor, evaluated from its own rows alone, with the untouched model.

    Args:
        probe: values at the check points.
        where: what is partitioned, for the message.
        table: which row belongs to which group.
        reading: how a group is evaluated.
        sliced: names of the sliced arguments, for the message.

    Raises:
        PartitionError: naming the first group that differs by more than 1e-5 (float32; 1e-10 in x64) of its own
            absolute row terms.
    """
    tolerance = 1e-5 if probe.reference.dtype == np.float32 else 1e-10
    index = table.index_of_row
    for reference, chunked in zip(probe.reference, probe.chunked, strict=True):
        for m, label in enumerate(table.labels):
            rows = index == m
            expected, got = reference[rows].astype(np.float64), chunked[rows].astype(np.float64)
            if not np.all(np.isfinite(expected)):
                continue
            gap, size = abs(expected.sum() - got.sum()), np.abs(expected).sum()
            if not gap <= tolerance * size + 100 * np.finfo(probe.reference.dtype).tiny:
                raise PartitionError(
                    f"{where} is not a sum over groups by {reading.mechanism!r}: the log-likelihood of group {label!r} from "
                    f"its own rows differs from its share of the whole model by {gap:.3g} nats. "
                    f"{_coupling_advice(reading, sliced)}"
                )


def check_local(probe: Probe, where: str, layout: LocalLayout | None) -> None:
    """Refuse latents inside the partitioned plate that reach beyond their own index or group.

    Args:
        probe: derivatives at a check point.
        where: what is partitioned, for the message.
        layout: the local latents, or None.

    Raises:
        CoupledLatentError: naming the latent and an index of the plate; no mechanism can do with it.
    """
    if probe.local is None or layout is None:
        return
    found = probe.local
    # Every unit by its own scale: one steep row must not hide the coupling of the others.
    scale = 1 + np.max(np.where(np.isfinite(found.size), found.size, 0.0), axis=1, keepdims=True, initial=0.0)
    tolerance = 1e-3 if found.size.dtype == np.float32 else 1e-8
    reasons = (
        (found.between_units, "depends on the same terms as another index's, so it is not private to its own"),
        (found.between_groups, "enters rows of other groups: labels of the plates disagree, or ids tie it to them"),
        (found.outside, "enters terms outside the partitioned plates, which belong to no group"),
    )
    for gaps, reason in reasons:
        gaps = np.abs(np.where(np.isfinite(gaps), gaps, 0.0)) / scale
        if gaps.max(initial=0.0) > tolerance:
            unit, k = np.unravel_index(int(gaps.argmax()), gaps.shape)
            name = next(n for n in layout.names if layout.slice_of(n).start <= k < layout.slice_of(n).stop)
            raise CoupledLatentError(
                f"{where}: local latent {name!r} at index {unit} of plate {layout.key!r} {reason}. Declare it outside the "
                "partitioned plate, in a plate of its own, and index it by row; it is then shared by all groups."
            )


def _coupling_advice(reading: Reading, sliced: tuple[str, ...]) -> str:
    why = "Something couples rows (standardising inside the model, ids into an array that is restricted too, per-row randomness)"
    if reading.mechanism == "args":
        return (
            f"{why}, or an argument that is not per-row was sliced (sliced: {', '.join(sliced)}). Move such steps outside the "
            "model, or exclude the argument with Partition(..., data_axes={'name': None})."
        )
    return (
        f"{why}. Move such steps outside the model, or accept a full pass per group with Partition(..., mode='mask')."
    )


def is_hostile(probe: Probe) -> bool:
    """Whether densities under the prior are of no use to start a fit from.

    Args:
        probe: values at the probe points.

    Returns:
        True when one is not finite within ten prior sds, or rows are a thousand times less likely at some point within three,
        on either side, than at the best one.
    """
    near, nearer = (np.flatnonzero(np.tile(ray_steps() <= reach, probe.rays.blocks)) for reach in (10.0, 3.0))
    if not all(np.all(np.isfinite(v[near])) for v in (*probe.rows.values(), *probe.latents.values())):
        return True
    sizes = (v[nearer].reshape(nearer.size, -1).sum(axis=1, dtype=np.float64) for v in probe.rows.values())
    total = np.abs(np.append(sum(sizes, start=np.zeros(nearer.size)), probe.sides.astype(np.float64)))
    return not np.all(np.isfinite(total)) or bool(np.max(total) > HOSTILE * np.min(total))
