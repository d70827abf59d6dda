"""Where the rows that groups split lie in each sample site: a plate's axis, or a labelled batch axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PartitionError

__all__ = ["WHOLE", "Axis", "RowAxes"]

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

        Args:
            site: An entry of a NumPyro trace.

        Returns:
            The axis, or None for a site that has none.

        Raises:
            PartitionError: For a labelled axis that the site's batch shape lacks, or a site inside two partitioned
                plates.
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
