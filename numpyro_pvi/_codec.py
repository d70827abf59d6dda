"""Values as JSON and a list of arrays, and back: numbers, text, containers, arrays, and the dataclasses that are named here.

A node is null, a bool, an int, a float, a str, or an object with one kind of key: ``tuple``, ``list``, ``frozenset``,
``dict``, ``bytes``, ``float`` (infinite ones), ``array``, ``key`` (a random key), ``structure`` (of the arguments), ``support``, or
``type`` with ``fields``. A type is looked up in a list by its name; nothing is imported or called because a file says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray
from numpyro.distributions import constraints

from .errors import CheckpointError

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
