"""Names for the axes of a model's variables, read from its plates."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Dims:
    """Axis names of a model's variables.

    ``wanted`` holds, for each variable, one name or None per axis: batch axes, then event axes. ``sizes`` holds the
    length that a name stands for; an axis of another length does not get it.
    """

    wanted: dict[str, list[str | None]]
    sizes: dict[str, int]

    def of(self, variable: str, shape: tuple[int, ...]) -> list[str]:
        """Names for the axes of an array of a variable; ``<variable>_dim_<i>`` where there is none.

        Args:
            variable: name of the sample or deterministic site.
            shape: shape without sample dims; the event axes may be missing, as in log-likelihoods.

        Returns:
            One name per axis, without repetition.
        """
        wanted = (self.wanted.get(variable, []) + [None] * len(shape))[: len(shape)]
        names: list[str] = []
        for axis, (name, size) in enumerate(zip(wanted, shape, strict=True)):
            fits = name is not None and self.sizes.get(name) == size and name not in names
            names.append(name if fits else f"{variable}_dim_{axis}")
        return names


def site_dims(trace: dict, sample_dims: Collection[str]) -> Dims:
    """Read axis names from a trace: plates for batch axes, ``infer["event_dims"]`` for event axes.

    Args:
        trace: a NumPyro trace; only names and shapes are read.
        sample_dims: names of the axes of draws, which no other axis may bear; neither may it bear a variable's name.

    Returns:
        The names. A deterministic has no batch shape of its own; its leading axes are named when their lengths are
        those of the plates around it.
    """
    sizes: dict[str, int] = {}
    wanted: dict[str, list[str | None]] = {}
    variables = {name: site for name, site in trace.items() if site["type"] in ("sample", "deterministic")}
    reserved = {*sample_dims, *variables}
    for name, site in variables.items():
        shape = tuple(jnp.shape(site["value"]))
        frames = {frame.dim: frame for frame in site["cond_indep_stack"]}
        if site["type"] == "sample":
            batch, event = len(site["fn"].batch_shape), tuple(site["fn"].event_shape)
        else:
            batch, event = max((-dim for dim in frames), default=0), ()
            if len(shape) < batch or any(shape[batch + dim] != frame.size for dim, frame in frames.items()):
                continue
        labels = [frames[axis - batch].name if axis - batch in frames else None for axis in range(batch)]
        labels = [None if label in reserved else label for label in labels]
        sizes.update({frame.name: frame.size for frame in frames.values()})
        for label, size in zip((site.get("infer") or {}).get("event_dims", ()), event, strict=False):
            labels.append(None if label in reserved else label)
            sizes.setdefault(label, size)
        wanted[name] = labels
    return Dims(wanted, sizes)
