"""Warnings at the line of the user's that they are about."""

from __future__ import annotations

import sys
import warnings

# What stands between a user's line and a warning: this package, what calls into it, and its decorators, those of checked types too.
_BETWEEN = {__name__.partition(".")[0], "contextlib", "functools", "jax", "numpyro", "jaxtyping", "beartype"}


def warn(message: str) -> None:
    """Warn (UserWarning) at the nearest line that is neither this package's nor of what stands between.

    How many frames lie between differs from one way into the package to the next, and with how a method is decorated: a number
    counted by hand names a line of the package's own, and Python shows a warning once for each line.
    """
    depth, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
