"""One file of a JSON header and arrays: written whole or not at all, and checked before anything is made of it.

The layout, all numbers little-endian::

    preamble   64 bytes   magic (8), version (4), zero (4), bytes of header (8), of arrays (8), SHA-256 of these 32 bytes
    header     JSON in UTF-8; "arrays" lists name, dtype and shape of every array in the file's order
    arrays     their numbers, one after the other
    digest     32 bytes   SHA-256 of everything before

The preamble is the same in every version, so that a newer file is told from a damaged one. Nothing in a file is ever
imported, called or unpickled, and no array is made before its declared size has been found to fit the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import stat
import struct
import tempfile
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .errors import CheckpointError

MAGIC = b"\x89PVI\r\n\x1a\n"
VERSION = 2
MAX_HEADER_BYTES = 1 << 26
MAX_ARRAYS = 1 << 16
MAX_DIMS = 32
_PREAMBLE = struct.Struct("<8sIIQQ")
_DIGEST_BYTES = 32
_START = _PREAMBLE.size + _DIGEST_BYTES
# Every dtype that a file may hold, and the unit in which its bytes are ordered.
_UNITS = {
    "bool": "u1",
    **{f"{sign}int{bits}": f"<u{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "<u2",
    "bfloat16": "<u2",
    "float32": "<u4",
    "float64": "<u8",
    "complex64": "<u4",
    "complex128": "<u8",
}


class Contents(NamedTuple):
    """What a file holds: the header, and the arrays in its order."""

    header: dict[str, Any]
    arrays: list[np.ndarray]


def write_checkpoint(path: Any, header: dict[str, Any], arrays: list[tuple[str, np.ndarray]]) -> None:
    """Write a file so that at any moment the path holds all of the old one or all of the new one.

    A temporary file in the same folder (mode 0600) is written, flushed to the disk and renamed over the path; then the
    folder is flushed. A hard link to an older file keeps that one's content. What writers that were killed have left behind
    is removed.

    Args:
        path: where; its folder exists.
        header: what JSON can hold.
        arrays: names and arrays.

    Raises:
        CheckpointError: for a dtype that cannot be stored, a path that is a link or no file, and whatever the system
            refuses.
    """
    parts = _encode(header, arrays)
    try:
        target = _target(path)
        _remove_leftovers(target)
        with _temporary(target) as (file, name):
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, target)
        _flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {str(path)!r} cannot be written: {error.strerror or error}.") from error


def read_checkpoint(path: Any) -> Contents:
    """Read a file of :func:`write_checkpoint`.

    Args:
        path: the file.

    Returns:
        Header and arrays (read-only).

    Raises:
        CheckpointError: says whether the file is missing, a link, empty, no checkpoint, of a newer version, cut short, or
            damaged.
    """
    path = as_path(path)
    name = repr(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if _is_link(path):
            raise CheckpointError(_link_message(name)) from error
        raise CheckpointError(f"the checkpoint {name} cannot be read: {error.strerror or error}.") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} is no file: pass the path of a checkpoint that pvi.save has written.")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return _read(file, status.st_size, name)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {name} cannot be read: {error.strerror or error}.") from error
    finally:
        os.close(descriptor)


def _encode(header: dict[str, Any], arrays: list[tuple[str, np.ndarray]]) -> list[bytes]:
    table, numbers = [], []
    for name, array in arrays:
        if array.dtype.name not in _UNITS:
            raise CheckpointError(f"{name} has dtype {array.dtype}, which a checkpoint cannot hold.")
        table.append([name, array.dtype.name, list(array.shape)])
        unit = np.dtype(_UNITS[array.dtype.name])
        numbers.append(np.ascontiguousarray(array).reshape(-1).view(unit.newbyteorder("=")).astype(unit).tobytes())
    text = json.dumps({**header, "arrays": table}, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES or len(table) > MAX_ARRAYS:
        raise CheckpointError(
            f"the state needs a header of {len(text)} bytes and {len(table)} arrays; a checkpoint holds {MAX_HEADER_BYTES} and "
            f"{MAX_ARRAYS} at most: write shorter labels."
        )
    first = _PREAMBLE.pack(MAGIC, VERSION, 0, len(text), sum(map(len, numbers)))
    parts = [first, hashlib.sha256(first).digest(), text, *numbers]
    return [*parts, _digest(parts)]


def _digest(parts: list[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest()


def _read(file: Any, size: int, name: str) -> Contents:
    start = file.read(_START)
    if not start:
        raise CheckpointError(f"{name} is empty: it is no checkpoint.")
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise CheckpointError(f"{name} is no checkpoint of numpyro_pvi: pass a file that pvi.save has written.")
    if len(start) < _START:
        raise CheckpointError(_short_message(name, size, None))
    _, version, zero, header_bytes, array_bytes = _PREAMBLE.unpack(start[: _PREAMBLE.size])
    if hashlib.sha256(start[: _PREAMBLE.size]).digest() != start[_PREAMBLE.size :]:
        raise CheckpointError(_damaged_message(name, "its first bytes do not fit their checksum"))
    if version > VERSION:
        raise CheckpointError(
            f"{name} is a checkpoint of format {version}, newer than the {VERSION} that this numpyro_pvi reads: install the "
            "version that wrote it, or a later one."
        )
    if version == 1:
        raise CheckpointError(
            f"{name} is a checkpoint of format 1, which does not say what model it was made with; this numpyro_pvi reads format "
            f"{VERSION}: install the version that wrote it, or start anew."
        )
    wanted = _START + header_bytes + array_bytes + _DIGEST_BYTES
    if version < 1 or zero or header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(_damaged_message(name, "its first bytes make no sense"))
    if size < wanted:
        raise CheckpointError(_short_message(name, size, wanted))
    if size > wanted:
        raise CheckpointError(_damaged_message(name, f"{size - wanted} bytes follow its end"))
    text, numbers, digest = file.read(header_bytes), file.read(array_bytes), file.read(_DIGEST_BYTES)
    if len(digest) < _DIGEST_BYTES:
        raise CheckpointError(_short_message(name, size, wanted))
    if _digest([start, text, numbers]) != digest:
        raise CheckpointError(_damaged_message(name, "its bytes do not fit their checksum"))
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        return Contents(header, _arrays(header["arrays"], numbers))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(_damaged_message(name, "its header makes no sense")) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _arrays(table: Any, numbers: bytes) -> list[np.ndarray]:
    if not isinstance(table, list) or len(table) > MAX_ARRAYS:
        raise ValueError("too many arrays")
    # All declared sizes are held against the bytes that are there before the first array is made.
    plans, offset = [], 0
    for name, kind, shape in table:
        plain = all(type(length) is int and length >= 0 for length in shape)
        if not isinstance(name, str) or kind not in _UNITS or not plain or len(shape) > MAX_DIMS:
            raise ValueError(f"array {name!r}")
        dtype = jnp.dtype(kind)
        length = math.prod(shape) * dtype.itemsize
        plans.append((dtype, np.dtype(_UNITS[kind]), tuple(shape), offset, length))
        offset += length
    if offset != len(numbers):
        raise ValueError("sizes of arrays")
    return [_array(*plan, numbers) for plan in plans]


def _array(dtype: np.dtype, unit: np.dtype, shape: tuple, offset: int, length: int, numbers: bytes) -> np.ndarray:
    raw = np.frombuffer(numbers, unit, length // unit.itemsize, offset)
    if dtype == np.bool_ and raw.size and raw.max() > 1:
        raise ValueError("a truth value")
    return raw.astype(unit.newbyteorder("="), copy=False).view(dtype).reshape(shape)


# ------------------------------------------------------------------------------------------------------------- on disk


def as_path(path: Any) -> pathlib.Path:
    """The path of a checkpoint.

    Args:
        path: the user's.

    Returns:
        The path.

    Raises:
        CheckpointError: for what the system would not take as a path: a number, or text with NUL bytes or lone surrogates.
    """
    try:
        found = pathlib.Path(os.fsdecode(path))
        if b"\0" not in os.fsencode(found):
            return found
        reason = "has a NUL byte, where the system would cut it off"
    except TypeError:
        reason = f"is {path!r}"
    except UnicodeError:
        reason = f"is {path!r}, which cannot be encoded"
    raise CheckpointError(f"the path of a checkpoint {reason}: write a str or a pathlib.Path, such as 'fit.pvi'.")


def _is_link(path: pathlib.Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:
        # A name that the system does not take (too long) is none of its links.
        return False


def _target(path: Any) -> pathlib.Path:
    target = as_path(path)
    if target.is_symlink():
        raise CheckpointError(_link_message(repr(str(target))))
    if target.exists() and not target.is_file():
        raise CheckpointError(f"{str(target)!r} is no file, so no checkpoint can be written there.")
    if not target.parent.is_dir():
        raise CheckpointError(
            f"the checkpoint {str(target)!r} cannot be written: there is no folder {str(target.parent)!r}."
        )
    return target


@contextlib.contextmanager
def _temporary(target: pathlib.Path):
    """A locked file beside the target, removed unless it was renamed. The lock ends with the process that holds it."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        # Another writer, tidying up, may have taken it for a leftover before it was locked.
        if _lock(descriptor) in (None, True) and os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _remove_leftovers(target: pathlib.Path) -> None:
    prefix, suffix = f".{target.name}.", ".tmp"
    for entry in os.scandir(target.parent):
        middle = entry.name[len(prefix) : -len(suffix)]
        if not (
            entry.name.startswith(prefix) and entry.name.endswith(suffix) and len(middle) == 8 and "." not in middle
        ):
            continue
        # Whatever another writer removes meanwhile, or what is not ours to touch, stays out of the way of this one.
        with contextlib.suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                if _lock(descriptor):
                    os.unlink(entry.path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether nobody else is writing the file; None where the system cannot tell."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flush_folder(folder: pathlib.Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_message(name: str) -> str:
    return f"{name} is a symbolic link, which is not followed: pass the path of the file itself."


def _short_message(name: str, size: int, wanted: int | None) -> str:
    of = "" if wanted is None else f" of {wanted}"
    return f"the checkpoint {name} is truncated: it ends after {size}{of} bytes. Use an earlier copy, or start anew."


def _damaged_message(name: str, what: str) -> str:
    return f"the checkpoint {name} is corrupted: {what}. Use an earlier copy, or start anew."
