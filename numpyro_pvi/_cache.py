"""Compiled programs kept on disk, for processes to come: only where a user asks for it."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from .errors import PVIError


def use_compilation_cache(path: Any = None) -> str:
    """Keep compiled programs in a folder, so that the next process that fits the same model compiles nothing.

    This sets JAX's own persistent compilation cache, for the whole process and every program in it, NumPyro's and yours too:
    ``jax_compilation_cache_dir`` to the folder, ``jax_persistent_cache_min_compile_time_secs`` and
    ``jax_persistent_cache_min_entry_size_bytes`` to 0, since a fit has many small programs. A folder that is set already, here, in
    ``jax.config`` or by ``JAX_COMPILATION_CACHE_DIR``, is left alone with its settings. Importing the package sets nothing.

    Programs hold what a model closes over: where data are globals, or bound to the model, their rows lie in that folder. Rows that
    are arguments do not, but for arguments whose values the model reads in Python. The folder is made for its owner alone (mode
    0700); nobody tidies it up, and it may be removed at any time.

    Args:
        path: the folder, made where it is not there; by default ``numpyro_pvi`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Returns:
        The folder in use: another than ``path`` where one was set before.

    Raises:
        PVIError: when the folder cannot be made or written to.
    """
    before = jax.config.values["jax_compilation_cache_dir"]
    if before:
        return str(before)
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "numpyro_pvi"
    folder = pathlib.Path(default if path is None else path).expanduser().resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PVIError(
            f"use_compilation_cache({str(folder)!r}): the folder cannot be made: {error.strerror}."
        ) from error
    if not os.access(folder, os.W_OK):
        raise PVIError(f"use_compilation_cache({str(folder)!r}): the folder cannot be written to.")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # JAX looks for the folder once, when it first compiles.
    compilation_cache.reset_cache()
    return str(folder)


__all__ = ["use_compilation_cache"]
