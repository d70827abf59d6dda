"""A model's arguments as what is traced and what is hashed."""

from __future__ import annotations

import jax


def split_arguments(args: tuple, kwargs: dict) -> tuple[list, tuple]:
    """Separate the arrays of a model's arguments, which are traced, from the static leaves, which are hashed.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        ``(arrays, static)``; ``static`` is hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if hasattr(x, "dtype")]
    return arrays, (structure, tuple(None if hasattr(x, "dtype") else (x,) for x in leaves))


def join_arguments(arrays: list, static: tuple) -> tuple[tuple, dict]:
    """The inverse of :func:`split_arguments`."""
    structure, kept = static
    rest = iter(arrays)
    return structure.unflatten([next(rest) if leaf is None else leaf[0] for leaf in kept])
