"""One file of a JSON header and arrays: how values are coded, and that it is written whole or not at all.

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
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import stat
import struct
import tempfile
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray
from numpyro.distributions import constraints

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


# -------------------------------------------------------------------------------------------- values as JSON and arrays
# Values as JSON and a list of arrays, and back: numbers, text, containers, arrays, and the dataclasses that are named
# here.
#
# A node is null, a bool, an int, a float, a str, or an object with one kind of key: ``tuple``, ``list``, ``frozenset``,
# ``dict``, ``bytes``, ``float`` (infinite ones), ``array``, ``key`` (a random key), ``structure`` (of the arguments),
# ``support``, or ``type`` with ``fields``. A type is looked up in a list by its name; nothing is imported or called
# because a file says so.

_PLAIN = (bool, int, str)
_MOST_BITS = 4096
_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_SUPPORTS = {
    type(getattr(constraints, name)): name
    for name in (
        *("real", "positive", "nonnegative", "unit_interval", "circular", "softplus_positive", "simplex", "sphere"),
        *("real_vector", "real_matrix", "ordered_vector", "positive_ordered_vector", "l1_ball", "corr_cholesky"),
        *(
            "corr_matrix",
            "lower_cholesky",
            "scaled_unit_lower_cholesky",
            "softplus_lower_cholesky",
            "positive_definite",
        ),
    )
}
# Supports with bounds: their class, and the names of the arguments that make one.
_BOUNDED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "greater_than": (constraints.greater_than, ("lower_bound",)),
    "greater_than_eq": (constraints.greater_than_eq, ("lower_bound",)),
    "less_than": (constraints.less_than, ("upper_bound",)),
    "less_than_eq": (constraints.less_than_eq, ("upper_bound",)),
    "interval": (constraints.interval, ("lower_bound", "upper_bound")),
    "open_interval": (constraints.open_interval, ("lower_bound", "upper_bound")),
}


def storable(value: Any) -> bool:
    """Whether a label can be stored: str, int, float, bool, bytes, None, or a tuple of them."""
    if type(value) is tuple:
        return all(storable(part) for part in value)
    if type(value) is int:
        return value.bit_length() <= _MOST_BITS
    return value is None or type(value) in (str, float, bool, bytes)


class Encoder:
    """Turn values into nodes and collect their arrays.

    Args:
        types: dataclasses and NamedTuples that may occur.
    """

    def __init__(self, types: dict[str, type]) -> None:
        self.types = types
        self.arrays: list[tuple[str, np.ndarray]] = []

    def node(self, value: Any, where: str) -> Any:
        """The node of a value.

        Args:
            value: what to store.
            where: its name, for messages and for the arrays.

        Returns:
            What JSON can hold.

        Raises:
            CheckpointError: naming what cannot be stored.
        """
        if isinstance(value, jax.core.Tracer):
            raise CheckpointError(f"{where} has no value yet: call pvi.save outside jit, vmap and grad.")
        if storable(value) and type(value) is not tuple:
            return self._scalar(value)
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, jax.tree_util.PyTreeDef):
            return {"structure": self._structure(jax.tree.unflatten(value, _leaves_of(value)), where)}
        if type(value) in (tuple, list):
            kind = type(value).__name__
            return {kind: [self.node(part, f"{where}[{i}]") for i, part in enumerate(value)]}
        if type(value) is frozenset:
            return {"frozenset": [self.node(part, where) for part in sorted(value)]}
        if type(value) is dict:
            pairs = [[self.node(k, f"{where}'s key"), self.node(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {"dict": pairs}
        if self.types.get(type(value).__name__) is type(value):
            fields = {name: self.node(getattr(value, name), f"{where}.{name}") for name in _field_names(type(value))}
            return {"type": type(value).__name__, "fields": fields}
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it holds str, int, float, bool, bytes, None, "
            "arrays, and tuples, lists and dicts of them."
        )

    def leaves(self, tree: Any, where: str) -> list:
        """Paths and nodes of a tree's leaves, without its structure."""
        found = jax.tree_util.tree_leaves_with_path(tree)
        return [[jax.tree_util.keystr(path), self.node(x, where + jax.tree_util.keystr(path))] for path, x in found]

    def support(self, support: Any, where: str) -> Any:
        """The node of a latent's support; None for one that has no name here."""
        if type(support) is constraints.independent:
            base = self.support(support.base_constraint, where)
            return base and {"support": "independent", "of": base, "dims": support.reinterpreted_batch_ndims}
        for name, (kind, fields) in _BOUNDED.items():
            if type(support) is kind:
                bounds = [getattr(support, field) for field in fields]
                nodes = [self._array(np.asarray(x), f"{where}'s support") for x in bounds]
                return {"support": name, "bounds": nodes}
        name = _SUPPORTS.get(type(support))
        return name and {"support": name}

    def _scalar(self, value: Any) -> Any:
        if type(value) is bytes:
            return {"bytes": value.hex()}
        if type(value) is float and not math.isfinite(value):
            return {"float": repr(value)}
        return value

    def _array(self, value: Any, where: str) -> dict:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            implementation = str(jax.random.key_impl(value))
            if implementation not in _KEY_IMPLEMENTATIONS:
                raise CheckpointError(
                    f"{where} is a random key of implementation {implementation!r}; a checkpoint holds "
                    f"{', '.join(_KEY_IMPLEMENTATIONS)}."
                )
            return {"key": self._array(jax.random.key_data(value), where)["array"], "implementation": implementation}
        self.arrays.append((where, np.asarray(value)))
        return {"array": len(self.arrays) - 1}

    def _structure(self, tree: Any, where: str) -> Any:
        if tree is _LEAF:
            return True
        if tree is None:
            return None
        if type(tree) is dict:
            return {"dict": [[self.node(k, where), self._structure(v, where)] for k, v in tree.items()]}
        if type(tree) in (tuple, list):
            return {type(tree).__name__: [self._structure(part, where) for part in tree]}
        raise CheckpointError(
            f"the model's arguments hold a {type(tree).__name__}, which a checkpoint cannot describe: pass tuples, lists and "
            "dicts of arrays."
        )


class Decoder:
    """Turn nodes back into values; the inverse of :class:`Encoder`.

    Args:
        types: dataclasses and NamedTuples that may occur.
        arrays: the file's arrays.
    """

    def __init__(self, types: dict[str, type], arrays: list[np.ndarray]) -> None:
        self.types, self.arrays = types, arrays

    def value(self, node: Any, device: bool = False) -> Any:
        """The value of a node.

        Args:
            node: as :meth:`Encoder.node` gives it.
            device: whether arrays become JAX's, else they stay NumPy's and cannot be written to.

        Returns:
            The value.

        Raises:
            CheckpointError: for a type that lacks a field, or has one more.
            TypeError, ValueError, KeyError, IndexError: for a node that makes no sense.
        """
        if node is None or type(node) in (*_PLAIN, float):
            return node
        decode: dict[str, Callable] = {
            "tuple": lambda x: tuple(self.value(part, device) for part in _list(x)),
            "list": lambda x: [self.value(part, device) for part in _list(x)],
            "frozenset": lambda x: frozenset(self.value(part) for part in _list(x)),
            "dict": lambda x: {self.value(k): self.value(v, device) for k, v in _list(x)},
            "bytes": bytes.fromhex,
            "float": float,
            "array": lambda x: jnp.asarray(self._array(x)) if device else self._array(x),
            "key": lambda x: jax.random.wrap_key_data(jnp.asarray(self._array(x)), impl=_known_key(node)),
            "structure": lambda x: jax.tree.structure(self._structure(x)),
            "support": lambda x: self._support(x, node),
            "type": lambda x: self._instance(x, node["fields"], device),
        }
        kind = next(iter(node))
        return decode[kind](node[kind])

    def leaves(self, pairs: Any, like: Any, where: str) -> Any:
        """A tree of the structure of ``like`` from :meth:`Encoder.leaves`.

        Args:
            pairs: paths and nodes.
            like: what the leaves belong into.
            where: what it is, for the message.

        Returns:
            The tree.

        Raises:
            CheckpointError: when the paths are others, naming the first.
        """
        wanted = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
        found = [path for path, _ in pairs]
        if found != wanted:
            parts = [f"the file has {x!r} more" for x in found if x not in wanted][:1]
            parts += [f"the file lacks {x!r}" for x in wanted if x not in found][:1]
            raise CheckpointError(
                f"the {where} in the file is of another kind than this PVI's: {', '.join(parts) or 'its order differs'}."
            )
        return jax.tree.unflatten(jax.tree.structure(like), [self.value(node, True) for _, node in pairs])

    def _array(self, index: Any) -> np.ndarray:
        if type(index) is not int or not 0 <= index < len(self.arrays):
            raise ValueError("no such array")
        return self.arrays[index]

    def _instance(self, name: str, fields: dict, device: bool) -> Any:
        kind = self.types.get(name)
        if kind is None:
            raise CheckpointError(f"the file has a {name}, which this PVI (its solver, its schedule) does not know.")
        names = _field_names(kind)
        if set(fields) != set(names):
            parts = [f"lacks {x!r}" for x in names if x not in fields] + [
                f"has {x!r} more" for x in fields if x not in names
            ]
            raise CheckpointError(
                f"the file was written by another version of numpyro_pvi: its {name} {', '.join(parts)}. Install that version, "
                "or start anew."
            )
        values, hints = {x: self.value(fields[x], device) for x in names}, _hints(kind)
        if wrong := [x for x in names if not _fits(values[x], hints.get(x, Any))]:
            raise TypeError(f"{name}.{wrong[0]}")
        return kind(**values)

    def _structure(self, node: Any) -> Any:
        if node is None:
            return None
        if node is True:
            return 0
        if "dict" in node:
            return {self.value(k): self._structure(v) for k, v in node["dict"]}
        parts = [self._structure(part) for part in _list(node["list"] if "list" in node else node["tuple"])]
        return parts if "list" in node else tuple(parts)

    def _support(self, name: str, node: dict) -> Any:
        if name == "independent":
            return constraints.independent(self.value(node["of"]), int(node["dims"]))
        if name in _BOUNDED:
            return _BOUNDED[name][0](*(jnp.asarray(self.value(bound)) for bound in node["bounds"]))
        if name not in _SUPPORTS.values():
            raise ValueError("no such support")
        return getattr(constraints, name)


_LEAF = object()


def _leaves_of(structure: Any) -> list:
    return [_LEAF] * structure.num_leaves


def _field_names(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return kind._fields  # type: ignore[attr-defined]


def is_record(kind: Any) -> bool:
    """Whether a class is a dataclass or a NamedTuple, whose fields are all there is to it."""
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Annotations of a record's fields; none where they name what is imported for checkers only."""
    try:
        return typing.get_type_hints(kind)
    except Exception:
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a field's value is of its annotation, as far as plain values, containers, records and arrays go."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is tuple or hint is tuple:
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is ...:
            return all(_fits(x, parts[0]) for x in value)
        return not parts or (len(parts) == len(value) and all(map(_fits, value, parts)))
    if hint in (bool, int, str, bytes, type(None)):
        return type(value) is hint
    if hint is float:
        return type(value) in (int, float)
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return hasattr(value, "shape")
    return not is_record(hint) or isinstance(value, hint)


def _list(x: Any) -> list:
    if not isinstance(x, list):
        raise TypeError("expected a list")
    return x


def _known_key(node: dict) -> str:
    if node["implementation"] not in _KEY_IMPLEMENTATIONS:
        raise ValueError("no such key")
    return node["implementation"]
