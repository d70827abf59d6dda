"""A model's arguments as what is traced and what is hashed.

Arrays are JAX's and traced. Those whose values a model reads in Python (``len(np.unique(idx))`` as a plate's size) have to
stay concrete: they are kept as NumPy arrays, which are part of a program like numbers and text, and compared by content.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from .._compiling import content


@dataclasses.dataclass(frozen=True)
class ReadByValue:
    """An array that a model reads values of, as a leaf that can be hashed; equal to another of the same content.

    Args:
        array: the values.
    """

    array: np.ndarray = dataclasses.field(compare=False, repr=False)
    digest: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Take the digest."""
        object.__setattr__(self, "digest", digest_of(self.array))


def digest_of(array: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and content."""
    found = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    found.update(content(array))
    return found.hexdigest()


def is_dynamic(leaf: Any) -> bool:
    """Whether a leaf of converted arguments is an array that is traced."""
    return hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray)


def split_arguments(args: tuple, kwargs: dict) -> tuple[list, tuple]:
    """Separate the arrays of a model's arguments, which are traced, from the static leaves, which are hashed.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        ``(arrays, static)``; ``static`` is hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if is_dynamic(x)]
    return arrays, (structure, tuple(None if is_dynamic(x) else (_hashable(x),) for x in leaves))


def join_arguments(arrays: list, static: tuple) -> tuple[tuple, dict]:
    """The inverse of :func:`split_arguments`."""
    structure, kept = static
    rest = iter(arrays)
    return structure.unflatten([next(rest) if leaf is None else _plain(leaf[0]) for leaf in kept])


def _hashable(leaf: Any) -> Any:
    return ReadByValue(leaf) if isinstance(leaf, np.ndarray) else leaf


def _plain(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, ReadByValue) else leaf
