"""Handlers that decide which indices a plate runs over: all of them, or the rows of one chunk."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int
from numpyro.primitives import Messenger

__all__ = ["BatchPlates", "FullPlates", "PlateRows"]


class FullPlates(Messenger):
    """Run every plate over all of its indices, in order: a fit visits all rows, so a plate's own mini-batch is not drawn.

    Args:
        fn: The model.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a subsampled plate all of its indices; one that has values already passes."""
        if msg["type"] == "plate" and msg["value"] is None:
            size, drawn = msg["args"]
            msg["drawn"] = size if drawn is None else drawn
            msg["args"], msg["value"] = (size, size), jnp.arange(size)


class BatchPlates(Messenger):
    """Keep the mini-batch of every plate that draws one, as its first indices, scaled as the model scales it.

    For a model whose arguments are themselves the mini-batch, so that the plate's size is only the number to scale up to.

    Args:
        fn: The model.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a subsampled plate as many indices as it draws."""
        if msg["type"] == "plate" and msg["value"] is None and msg["args"][1] is not None:
            msg["value"] = jnp.arange(msg["args"][1])


class PlateRows(Messenger):
    """Run one plate over given rows, without the factor N/B by which NumPyro scales a mini-batch's terms.

    The plate keeps its full size, so that `numpyro.subsample` and `numpyro.param(event_dim=)` inside take the same rows
    as the model's own indexing. With as many rows as the plate has indices they take nothing: give those in order.

    Args:
        fn: The model.
        plate: The plate's name.
        rows: Indices that the plate runs over.
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
