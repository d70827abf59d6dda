"""What every agent of a network without a server holds, as an xarray data set."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ._dims import Dims


def agents_dataset(labels: Sequence[Hashable], marginals: Callable[[Hashable], dict[str, Any]], dims: Dims) -> Any:
    """Means and standard deviations of every agent's own marginals.

    Args:
        labels: the agents.
        marginals: one agent's distributions by latent, in the latents' own supports.
        dims: names of the latents' axes.

    Returns:
        ``xarray.Dataset`` with one variable per latent, of dims ``agent``, ``moment`` ("mean", "sd") and its own; labels of
        agents are shown as strings. A moment that a marginal does not have is NaN.
    """
    import xarray

    held = [marginals(label) for label in labels]
    variables = {}
    for name in held[0]:
        values = np.stack([np.stack([_moment(q[name], moment) for moment in ("mean", "sd")]) for q in held])
        variables[name] = (["agent", "moment", *dims.of(name, values.shape[2:])], values)
    return xarray.Dataset(variables, coords={"agent": [str(label) for label in labels], "moment": ["mean", "sd"]})


def _moment(q: Any, moment: str) -> np.ndarray:
    try:
        value = q.mean if moment == "mean" else q.variance**0.5
    except NotImplementedError:
        return np.full((*q.batch_shape, *q.event_shape), np.nan)
    return np.asarray(value)


__all__ = ["agents_dataset"]
