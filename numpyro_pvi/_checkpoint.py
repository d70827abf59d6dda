"""One file that holds one frame of :mod:`numpyro_pvi.wire`, written whole or not at all, and read with what is wrong named."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import tempfile
from typing import Any

import numpy as np

from .errors import CheckpointError, WireError
from .wire import DIGEST_BYTES, START_BYTES, Contents, Form, check_start, frame, open_frame

VERSION = 2
# A file's arrays are as large as the file, whatever that is.
FORM = Form(b"\x89PVI\r\n\x1a\n", VERSION, VERSION, 1 << 26, 1 << 63, 1 << 16)


def write_checkpoint(path: Any, header: dict[str, Any], arrays: list[tuple[str, np.ndarray]]) -> None:
    """Write a file so that at any moment the path holds all of the old one or all of the new one.

    A temporary file in the same folder (mode 0600) is written, flushed to the disk and renamed over the path; then the folder
    is flushed. A hard link to an older file keeps that one's content. What writers that were killed have left behind is
    removed. Raises CheckpointError for a dtype that cannot be stored, a path that is a link or no file, and whatever the system
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

    Returns header and arrays (read-only). Raises CheckpointError that says whether the file is missing, a link, empty, no
    checkpoint, of a newer version, cut short, or damaged.
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
    try:
        return frame(FORM, header, arrays)
    except WireError as error:
        if error.fault == "large":
            raise CheckpointError(f"the state needs {error}") from error
        raise CheckpointError(str(error)) from error


def _read(file: Any, size: int, name: str) -> Contents:
    start = file.read(START_BYTES)
    try:
        found = check_start(FORM, start)
        if size < found.size:
            raise CheckpointError(_short_message(name, size, found.size))
        if size > found.size:
            raise CheckpointError(_damaged_message(name, f"{size - found.size} bytes follow its end"))
        parts = [file.read(count) for count in (found.header_bytes, found.array_bytes, DIGEST_BYTES)]
        if len(parts[-1]) < DIGEST_BYTES:
            raise CheckpointError(_short_message(name, size, found.size))
        return open_frame(FORM, start, *parts)
    except WireError as error:
        raise CheckpointError(_fault_message(name, size, error, start)) from error


def _fault_message(name: str, size: int, error: WireError, start: bytes) -> str:
    """What is wrong with a file, and what to do."""
    if error.fault == "empty":
        return f"{name} is empty: it is no checkpoint."
    if error.fault == "foreign":
        return f"{name} is no checkpoint of numpyro_pvi: pass a file that pvi.save has written."
    if error.fault == "short":
        return _short_message(name, size, None)
    version = int.from_bytes(start[8:12], "little")
    if error.fault == "newer":
        return (
            f"{name} is a checkpoint of format {version}, newer than the {VERSION} that this numpyro_pvi reads: install the "
            "version that wrote it, or a later one."
        )
    if error.fault == "older":
        return (
            f"{name} is a checkpoint of format 1, which does not say what model it was made with; this numpyro_pvi reads format "
            f"{VERSION}: install the version that wrote it, or start anew."
        )
    return _damaged_message(name, str(error))


# ------------------------------------------------------------------------------------------------------------- on disk


def as_path(path: Any) -> pathlib.Path:
    """The path of a checkpoint.

    Raises CheckpointError for what the system would not take as a path: a number, or text with NUL bytes or lone surrogates.
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
