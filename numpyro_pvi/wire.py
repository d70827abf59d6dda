"""Every byte that crosses a boundary: frames of a JSON header and arrays, values as both, and the messages of clients.

A frame, all numbers little-endian::

    preamble   64 bytes   magic (8), version (4), zero (4), bytes of header (8), of arrays (8), SHA-256 of these 32 bytes
    header     JSON in UTF-8; "arrays" lists name, dtype and shape of every array in the frame's order
    arrays     their numbers, one after the other
    digest     32 bytes   SHA-256 of everything before

The preamble is the same in every version, so that a newer frame is told from a damaged one. Nothing in a frame is ever
imported, called or unpickled, and no array is made before its declared size has been found to fit the frame. A checkpoint is
one frame in a file; clients and servers talk in frames of another magic.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import struct
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

from .errors import PVIError, WireError

__all__ = [
    "MESSAGES",
    "Contents",
    "Decoder",
    "Encoder",
    "Form",
    "KeyData",
    "Message",
    "check_start",
    "decode",
    "digest_of",
    "encode",
    "frame",
    "is_record",
    "open_frame",
    "storable",
]

# --------------------------------------------------------------------------------------------------------------- frames

_PREAMBLE = struct.Struct("<8sIIQQ")
DIGEST_BYTES = 32
START_BYTES = _PREAMBLE.size + DIGEST_BYTES
_MOST_DIMS = 32
# Every dtype that a frame may hold, and the unit in which its bytes are ordered.
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


class Form(NamedTuple):
    """One kind of frame: how it begins, and how large it may be.

    Attributes:
        magic: its first eight bytes.
        version: the newest one that is read, and the one that is written.
        oldest: the oldest one that is read.
        header_bytes: largest header.
        array_bytes: most bytes of all arrays.
        arrays: most arrays.
    """

    magic: bytes
    version: int
    oldest: int
    header_bytes: int
    array_bytes: int
    arrays: int


class Contents(NamedTuple):
    """What a frame holds: the header, and the arrays in its order."""

    header: dict[str, Any]
    arrays: list[np.ndarray]


class Start(NamedTuple):
    """What a frame's first 64 bytes say of it: its version, and bytes of its header, of its arrays and of all of it."""

    version: int
    header_bytes: int
    array_bytes: int
    size: int


def frame(form: Form, header: dict[str, Any], arrays: list[tuple[str, np.ndarray]]) -> list[bytes]:
    """The parts of a frame, in order.

    Args:
        form: its kind.
        header: what JSON can hold.
        arrays: names and arrays.

    Returns:
        Bytes; :func:`open_frame` reads them back.

    Raises:
        WireError: for a dtype that no frame holds, and for more than the form allows.
    """
    table, numbers = [], []
    for name, array in arrays:
        if array.dtype.name not in _UNITS:
            raise WireError(f"{name} has dtype {array.dtype}, which a message or a checkpoint cannot hold.", "value")
        table.append([name, array.dtype.name, list(array.shape)])
        unit = np.dtype(_UNITS[array.dtype.name])
        numbers.append(np.ascontiguousarray(array).reshape(-1).view(unit.newbyteorder("=")).astype(unit).tobytes())
    text = json.dumps({**header, "arrays": table}, allow_nan=False, separators=(",", ":")).encode()
    size = sum(map(len, numbers))
    if len(text) > form.header_bytes or len(table) > form.arrays or size > form.array_bytes:
        raise WireError(
            f"a header of {len(text)} bytes and {len(table)} arrays of {size} bytes, where {form.header_bytes}, {form.arrays} and "
            f"{form.array_bytes} are allowed at most: write shorter labels.",
            "large",
        )
    first = _PREAMBLE.pack(form.magic, form.version, 0, len(text), size)
    parts = [first, hashlib.sha256(first).digest(), text, *numbers]
    return [*parts, _digest(parts)]


def _digest(parts: Any) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest()


def check_start(form: Form, start: bytes) -> Start:
    """What the first 64 bytes of a frame say, before memory is taken for the rest.

    Args:
        form: the kind that is expected.
        start: the bytes; fewer where there are no more.

    Returns:
        Version and sizes.

    Raises:
        WireError: its ``fault`` is "empty", "foreign", "short", "damaged", "newer", "older" or "large".
    """
    if not start:
        raise WireError("there are no bytes.", "empty")
    if start[: len(form.magic)] != form.magic[: len(start)]:
        raise WireError("it does not begin as one.", "foreign")
    if len(start) < START_BYTES:
        raise WireError(f"it ends after {len(start)} bytes.", "short")
    _, version, zero, header_bytes, array_bytes = _PREAMBLE.unpack(start[: _PREAMBLE.size])
    if hashlib.sha256(start[: _PREAMBLE.size]).digest() != start[_PREAMBLE.size : START_BYTES]:
        raise WireError("its first bytes do not fit their checksum", "damaged")
    if version > form.version:
        raise WireError(f"it is of format {version}, newer than the {form.version} that is read here.", "newer")
    if 1 <= version < form.oldest:
        raise WireError(f"it is of format {version}, older than the {form.oldest} that is read here.", "older")
    if version < 1 or zero or header_bytes > form.header_bytes:
        raise WireError("its first bytes make no sense", "damaged")
    if array_bytes > form.array_bytes:
        raise WireError(f"it announces {array_bytes} bytes of arrays; {form.array_bytes} are allowed.", "large")
    return Start(version, header_bytes, array_bytes, START_BYTES + header_bytes + array_bytes + DIGEST_BYTES)


def open_frame(form: Form, start: bytes, text: bytes, numbers: bytes, digest: bytes) -> Contents:
    """A frame's header and arrays, from its parts.

    Args:
        form: its kind.
        start: its first 64 bytes, that :func:`check_start` has passed.
        text: its header.
        numbers: the bytes of its arrays.
        digest: its last 32 bytes.

    Returns:
        Header and arrays (read-only).

    Raises:
        WireError: where the bytes do not fit their checksum, or the header makes no sense.
    """
    if _digest([start, text, numbers]) != digest:
        raise WireError("its bytes do not fit their checksum", "damaged")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        return Contents(header, _arrays(header["arrays"], numbers, form.arrays))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError("its header makes no sense", "damaged") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _arrays(table: Any, numbers: bytes, most: int) -> list[np.ndarray]:
    if not isinstance(table, list) or len(table) > most:
        raise ValueError("too many arrays")
    # All declared sizes are held against the bytes that are there before the first array is made.
    plans, offset = [], 0
    for name, kind, shape in table:
        plain = all(type(length) is int and length >= 0 for length in shape)
        if not isinstance(name, str) or kind not in _UNITS or not plain or len(shape) > _MOST_DIMS:
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
        *(
            "real",
            "positive",
            "nonnegative",
            "boolean",
            "unit_interval",
            "circular",
            "softplus_positive",
            "simplex",
            "sphere",
        ),
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
    "integer_interval": (constraints.integer_interval, ("lower_bound", "upper_bound")),
}


class KeyData(NamedTuple):
    """A typed random key as NumPy's numbers, for where nothing of JAX may run.

    Attributes:
        data: the numbers, as ``jax.random.key_data`` gives them.
        implementation: how keys of their kind are made.
    """

    data: np.ndarray
    implementation: str

    def on_device(self) -> Any:
        """The key.

        Raises:
            TypeError, ValueError: where the numbers are none of a key's.
        """
        return jax.random.wrap_key_data(jnp.asarray(self.data), impl=self.implementation)


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
        error: what is raised for a value that cannot be stored.
    """

    def __init__(self, types: dict[str, type], error: type[PVIError] = WireError) -> None:
        self.types, self.error = types, error
        self.arrays: list[tuple[str, np.ndarray]] = []

    def node(self, value: Any, where: str) -> Any:
        """The node of a value.

        Args:
            value: what to store.
            where: its name, for messages and for the arrays.

        Returns:
            What JSON can hold.

        Raises:
            PVIError: naming what cannot be stored.
        """
        if isinstance(value, jax.core.Tracer):
            raise self.error(f"{where} has no value yet: call pvi.save outside jit, vmap and grad.")
        if storable(value) and type(value) is not tuple:
            return self._scalar(value)
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value, where)
        if type(value) is KeyData:
            return {"key": self._array(value.data, where)["array"], "implementation": value.implementation}
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
        raise self.error(
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
                raise self.error(
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
        raise self.error(
            f"the model's arguments hold a {type(tree).__name__}, which a checkpoint cannot describe: pass tuples, lists and "
            "dicts of arrays."
        )


class Decoder:
    """Turn nodes back into values; the inverse of :class:`Encoder`.

    Args:
        types: dataclasses and NamedTuples that may occur.
        arrays: the frame's arrays.
        error: what is raised for a type that is not what it was.
        written_by: the version of this package that the nodes are from, where it is known.
    """

    def __init__(
        self,
        types: dict[str, type],
        arrays: list[np.ndarray],
        error: type[PVIError] = WireError,
        written_by: str = "that version",
    ) -> None:
        self.types, self.arrays, self.error, self.written_by = types, arrays, error, written_by

    def value(self, node: Any, device: bool = False) -> Any:
        """The value of a node.

        Args:
            node: as :meth:`Encoder.node` gives it.
            device: whether arrays become JAX's, else they stay NumPy's and cannot be written to.

        Returns:
            The value.

        Raises:
            PVIError: for a type that lacks a field, or has one more.
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
            "key": lambda x: self._key(x, node, device),
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
            PVIError: when the paths are others, naming the first.
        """
        wanted = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
        found = [path for path, _ in pairs]
        if found != wanted:
            parts = [f"the file has {x!r} more" for x in found if x not in wanted][:1]
            parts += [f"the file lacks {x!r}" for x in wanted if x not in found][:1]
            raise self.error(
                f"the {where} in the file is of another kind than this PVI's: {', '.join(parts) or 'its order differs'}."
            )
        return jax.tree.unflatten(jax.tree.structure(like), [self.value(node, True) for _, node in pairs])

    def _array(self, index: Any) -> np.ndarray:
        if type(index) is not int or not 0 <= index < len(self.arrays):
            raise ValueError("no such array")
        return self.arrays[index]

    def _key(self, index: Any, node: dict, device: bool) -> Any:
        found = KeyData(self._array(index), _known_key(node))
        return found.on_device() if device else found

    def _instance(self, name: str, fields: dict, device: bool) -> Any:
        kind = self.types.get(name)
        if kind is None:
            raise self.error(f"the file has a {name}, which this PVI (its solver, its schedule) does not know.")
        names = _field_names(kind)
        if set(fields) != set(names):
            parts = [f"lacks {x!r}" for x in names if x not in fields] + [
                f"has {x!r} more" for x in fields if x not in names
            ]
            raise self.error(
                f"the file was written by another version of numpyro_pvi: its {name} {', '.join(parts)}. Install "
                f"{self.written_by}, or start anew."
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


# ------------------------------------------------------------------------------------------------------------- messages
# What clients and a server say to each other. Every message has the fields of its kind, all of them and no others, each of its
# type; what a tuple of arrays must look like the receiver knows, who made the family and the solver.


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: a name in :data:`MESSAGES`.
        fields: values by name.
    """

    kind: str
    fields: dict[str, Any]


# 1 had no `own` in `client`, and less in the `rest` of `visit?`, 2 no `released` in `summand` and less in the `ledger` of `sum?`: a
# client of those versions would answer something else.
_FORM = Form(b"\x89PVW\r\n\x1a\n", 3, 3, 1 << 20, 1 << 30, 1 << 12)
# Fields of every kind of message and their types; "any" is a label, or a key that the kind of fit may do without.
_ASK = {"run": str, "sequence": int, "label": "any"}
_ANSWER = {"run": str, "sequence": int, "label": "any"}
MESSAGES: dict[str, dict[str, Any]] = {
    "hello?": _ASK,
    "hello": {**_ANSWER, "facts": dict},
    "look?": {**_ASK, "how": dict, "q": tuple, "rest": tuple},
    "look": {**_ANSWER, "found": tuple},
    "visit?": {**_ASK, "how": dict, "cavity": tuple, "site": tuple, "memory": tuple, "digest": bytes, "rest": tuple},
    # What was seen at the q that was visited from, where that was asked for.
    "visit": {**_ANSWER, "version": int, "site": tuple, "memory": tuple, "rest": tuple, "found": tuple},
    # The memory that a visit was to go on from is not the client's own.
    "gap": {**_ANSWER, "digest": bytes},
    # The client was begun anew, and does not know yet what its rows are to be taken for.
    "untold": _ANSWER,
    # The client could not do what it was asked, in its own words.
    "refusal": {**_ANSWER, "why": str},
    "stop?": _ASK,
    # Of a client that has its rows from somewhere else: what they look like and, with a random key, what was found of them.
    "describe?": {**_ASK, "key": tuple},
    "describe": {**_ANSWER, "facts": dict},
    # What all clients are to take their rows for; answered with a "hello".
    "plan?": {**_ASK, "key": tuple, "taken": dict},
    # Who somebody is that is met for the first time.
    "who?": {"run": str},
    "who": {"run": str, "label": "any"},
    # What a client keeps for itself where its process ends between two questions: the plan that it was told, as that question's
    # bytes, the last question that it answered, with the answer's, and latents of its own; nothing of it is ever sent.
    "client": {**_ANSWER, "version": int, "memory": tuple, "told": tuple, "answer": tuple, "own": tuple},
    # What clients answer in sum only, to all of them alike: q and what a visit or a look takes, how large a number may be, and
    # what was made of every client's last answer, with the fit's name.
    "sum?": {"run": str, "sequence": int, "how": dict, "q": tuple, "rest": tuple, "reach": float, "ledger": tuple},
    # What a client that is heard in sums only keeps for itself where its process ends between two questions; it is never sent.
    "summand": {
        **_ANSWER,
        "version": int,
        "said": tuple,
        "told": tuple,
        "site": tuple,
        "memory": tuple,
        "open": tuple,
        # Of fits by name, how many private visits it has made in each.
        "released": tuple,
    },
}


def encode(message: Message, types: dict[str, type] | None = None) -> bytes:
    """A message's bytes.

    Args:
        message: of a kind and with the fields of :data:`MESSAGES`; arrays may be NumPy's or JAX's, and keys typed ones.
        types: dataclasses and NamedTuples that may occur, by name; none by default.

    Returns:
        One frame.

    Raises:
        WireError: for what no message holds.
    """
    _check(message)
    encoder = Encoder(types or {})
    fields = {name: encoder.node(value, f"{message.kind}.{name}") for name, value in message.fields.items()}
    return b"".join(frame(_FORM, {"kind": message.kind, "fields": fields}, encoder.arrays))


def decode(data: bytes, types: dict[str, type] | None = None) -> Message:
    """The message that some bytes are.

    Args:
        data: one frame.
        types: dataclasses and NamedTuples that may occur, by name; none by default.

    Returns:
        The message; arrays are NumPy's and cannot be written to.

    Raises:
        WireError: for anything that is not one whole message of this version with the fields of its kind.
    """
    header, arrays = _opened(bytes(data))
    if set(header) != {"kind", "fields", "arrays"} or not isinstance(header["fields"], dict):
        raise WireError(
            f"a message has the fields {sorted(map(str, header))}, where kind and fields are known.", "value"
        )
    decoder = Decoder(types or {}, arrays)
    try:
        fields = {name: decoder.value(node) for name, node in header["fields"].items()}
    except WireError:
        raise
    except Exception as error:
        raise WireError("a message holds a value that makes no sense.", "value") from error
    message = Message(header["kind"], fields)
    _check(message)
    return message


def kind_of(data: bytes) -> str:
    """A message's kind, by which one is told from others without a look at its values.

    Returns a name in :data:`MESSAGES`. Raises WireError for bytes that are no frame, or of no known kind.
    """
    kind = _opened(bytes(data)).header.get("kind")
    if not isinstance(kind, str) or kind not in MESSAGES:
        raise WireError(f"a message of the kind {kind!r} is not known here.", "value")
    return kind


def _opened(data: bytes) -> Contents:
    """The header and the arrays of a whole frame."""
    try:
        start = check_start(_FORM, data[:START_BYTES])
        if len(data) != start.size:
            raise WireError(
                f"it has {len(data)} bytes and not {start.size}", "short" if len(data) < start.size else "damaged"
            )
        ends = START_BYTES + start.header_bytes, len(data) - DIGEST_BYTES
        return open_frame(
            _FORM, data[:START_BYTES], data[START_BYTES : ends[0]], data[ends[0] : ends[1]], data[ends[1] :]
        )
    except WireError as error:
        raise WireError(f"what came is no message of numpyro_pvi: {error}", error.fault) from error


def _check(message: Message) -> None:
    kind, fields = message
    known = MESSAGES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise WireError(f"a message of the kind {kind!r} is not known here.", "value")
    if set(fields) != set(known):
        parts = [f"lacks {x!r}" for x in known if x not in fields] + [
            f"has {x!r} more" for x in fields if x not in known
        ]
        raise WireError(f"a message {kind!r} {', '.join(parts)}.", "value")
    for name, hint in known.items():
        value = fields[name]
        fits = storable(value) if hint == "any" else type(value) is hint
        if not fits:
            raise WireError(f"a message {kind!r} has {name!r} of the type {type(value).__name__}.", "value")


def digest_of(arrays: tuple) -> bytes:
    """Eight bytes that tell arrays from others: what two sides compare in place of the arrays."""
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        array = np.ascontiguousarray(array)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()
