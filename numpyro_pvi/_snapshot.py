"""What some Python objects close over, taken down so that a later look can be compared with it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import types
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

from ._compiling import content

_PLAIN = (bool, int, str, bytes, complex, type(None), type(Ellipsis), range, np.dtype)
# Packages whose functions are taken as they are: nothing in them is a user's to change.
_LIBRARIES = frozenset(
    (
        *sys.stdlib_module_names - {"__main__"},
        *(
            "jax",
            "jaxlib",
            "numpy",
            "numpyro",
            "numpyro_pvi",
            "scipy",
            "optax",
            "flax",
            "equinox",
            "funsor",
            "jaxtyping",
        ),
        *("pandas", "xarray", "arviz", "sklearn", "tqdm", "multipledispatch", "beartype"),
        # Where a test's model asserts something, pytest writes calls of its own into it.
        *("pytest", "_pytest", "pluggy", "hypothesis", "chex"),
    )
)
# With one of these a function may read any attribute.
_DYNAMIC = frozenset(("getattr", "vars", "__dict__", "globals", "eval", "attrgetter", "asdict", "astuple", "fields"))
# With one of these it may read what no object shows: files, the environment, an iterator.
_OUTSIDE = frozenset(
    (
        *("open", "read", "read_text", "read_bytes", "load", "loadtxt", "genfromtxt", "read_csv", "getenv", "environ"),
        *("eval", "exec", "next", "input"),
    )
)
_DEEPEST = 60
# Objects that are looked at, some milliseconds' worth. A model that reaches more, into a package that is not known here, is traced
# and compared at every call instead.
_MOST = 5_000


class _Same:
    """An object that is compared by identity, and kept, so that no other takes its place in memory."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]


class Snapshot:
    """All that some objects close over, in an order and a form in which two snapshots compare.

    Numbers and text are held by value, NumPy arrays by a checksum of their bytes (they can change in place), JAX arrays and code by
    identity. Functions are followed into their cells, defaults, attributes and the globals that their code names; methods,
    partials, containers, and the attributes of objects and modules that code so reached names, likewise.

    Args:
        roots: the objects.
        names: attributes and globals that are known to be named.
        unread: containers, by identity, that the model's code writes into, each with the number of entries that count.

    Attributes:
        exact: whether everything that was met could be looked into.
        sizes: mutable containers, by identity, with their lengths.
    """

    def __init__(
        self, roots: tuple[Any, ...], names: frozenset[str] = frozenset(), unread: Mapping[int, Any] | None = None
    ) -> None:
        self.names, self.constant, self.exact, self.unread = set(names), True, True, unread or {}
        while True:
            # Objects made on the way are kept until the end, so that none takes another's place in memory.
            before, self.seen, self.made, self.held, self.sizes = len(self.names), {}, [], [], {}
            for root in roots:
                self._look(root, 0)
            # A name that is met late may be an attribute of what was met before.
            if len(self.names) == before:
                break
        self.seen, self.made = {}, []
        self.exact = self.exact and _OUTSIDE.isdisjoint(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.held == other.held

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple:
        """Nothing of it goes into a pickle: objects are others where it is read."""
        return Snapshot, ((),)

    def _look(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self.held.append((type(value), value))
        elif isinstance(value, float):
            # By its digits: a NaN does not equal itself.
            self.held.append((float, value.hex()))
        elif isinstance(value, jax.core.Tracer):
            self.held.append((jax.core.Tracer, id(value)))
        elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            self.held.append((np.ndarray, value.dtype.str, value.shape, _checksum(value)))
            self.constant = self.constant and isinstance(value, np.generic)
        elif isinstance(value, jax.Array):
            self.held.append(_Same(value))
        elif depth > _DEEPEST or (len(self.seen) >= _MOST and id(value) not in self.seen):
            self.held.append(_Same(value))
            self.exact = False
        elif id(value) in self.unread and id(value) not in self.seen:
            self.seen[id(value)] = len(self.seen)
            self.held.append(_Same(value))
            self._beginning(value, depth + 1)
        elif id(value) in self.seen:
            self.held.append((Snapshot, self.seen[id(value)]))
        else:
            self.seen[id(value)] = len(self.seen)
            self._inside(value, depth + 1)

    def _inside(self, value: Any, depth: int) -> None:
        if isinstance(value, list | dict | set):
            self.sizes[id(value)] = value, len(value)
        self.constant = self.constant and (isinstance(value, tuple | type) or _is_frozen(value))
        if isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType):
            self._all((value.__func__, value.__self__), depth)
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, staticmethod | classmethod):
            self._look(value.__func__, depth)
        elif isinstance(value, property):
            self._all((value.fget,), depth)
        elif isinstance(value, types.ModuleType):
            self._module(value, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, Mapping):
            self.held.append((type(value), len(value)))
            self._all((x for pair in value.items() for x in pair), depth)
        elif isinstance(value, tuple | list | set | frozenset):
            self.held.append((type(value), len(value)))
            self._all(value, depth)
        elif isinstance(value, np.ndarray):
            self.made.append(value.tolist())
            self._look(self.made[-1], depth)
        else:
            self._object(value, depth)

    def _beginning(self, value: Any, depth: int) -> None:
        """What a container held before the model's code began to write into it."""
        if isinstance(value, set):
            self.exact = False
            return
        pairs = value.items() if isinstance(value, dict) else ((x,) for x in value)
        self._all((x for pair in itertools.islice(pairs, self.unread[id(value)][1]) for x in pair), depth)

    def _all(self, values: Any, depth: int) -> None:
        for value in values:
            self._look(value, depth)

    def _function(self, value: types.FunctionType, depth: int) -> None:
        self.held.append(_Same(value.__code__))
        if _is_library(value.__module__) and "<locals>" not in value.__qualname__:
            return
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):
                self._look(cell.cell_contents, depth)
        if _is_library(value.__module__):
            return
        self._all((value.__defaults__, value.__kwdefaults__, vars(value)), depth)
        named = _names_of(value.__code__)
        self.names |= named
        for name in sorted(named & value.__globals__.keys()):
            self._look(value.__globals__[name], depth)

    def _module(self, value: types.ModuleType, depth: int) -> None:
        self.held.append(_Same(value))
        if not _is_library(value.__name__):
            self._all((vars(value)[name] for name in sorted(self.names & vars(value).keys())), depth)

    def _class(self, value: type, depth: int) -> None:
        self.held.append(_Same(value))
        for kind in value.__mro__:
            if not _is_library(kind.__module__):
                wanted = self._wanted(vars(kind)) | ({"__call__", "__getattr__", "__getitem__"} & vars(kind).keys())
                self._all((vars(kind)[name] for name in sorted(wanted)), depth)

    def _object(self, value: Any, depth: int) -> None:
        self.held.append(_Same(value))
        if _is_own_machinery(value):
            # A distribution or a sampler may have been written into; fits and guides change with every call.
            self.exact = self.exact and isinstance(value, SVI | AutoGuide)
            return
        self._look(type(value), depth)
        if hasattr(value, "__array__") and hasattr(value, "items") and np.ndim(value) == 2:
            # A table, column by column: as one array it would be one of objects.
            self._all((np.asarray(column) for _, column in value.items()), depth)
            return
        if hasattr(value, "__array__"):
            with contextlib.suppress(Exception):
                self._look(np.asarray(value), depth)
                return
        own = _attributes(value)
        self.exact = self.exact and (bool(own) or hasattr(value, "__dict__") or callable(value))
        names = own.keys() if _is_library(type(value).__module__) else self._wanted(own)
        self._all((own[name] for name in sorted(names)), depth)

    def _wanted(self, own: Mapping[str, Any]) -> set[str]:
        """The names among some attributes that code may ask for."""
        if _DYNAMIC.isdisjoint(self.names):
            return self.names & own.keys()
        return {name for name in own if not name.startswith("__")}


def _is_frozen(value: Any) -> bool:
    """Whether an object is a dataclass of this package that cannot change, such as a solver; what its fields hold may."""
    kind = type(value)
    return _is_library(kind.__module__) and dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen


def _is_own_machinery(value: Any) -> bool:
    """Whether an object is a fit or a guide, which changes with every call; solvers, schedules and handlers are not."""
    if type(value).__module__.partition(".")[0] not in ("numpyro", "numpyro_pvi"):
        return isinstance(value, SVI)
    return not (dataclasses.is_dataclass(value) or isinstance(value, Messenger))


def _attributes(value: Any) -> dict[str, Any]:
    slots = [x for kind in type(value).__mro__ for x in _as_tuple(vars(kind).get("__slots__", ()))]
    found = {
        name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    inner = (
        {"__wrapped__": value.__wrapped__}
        if isinstance(getattr(value, "__wrapped__", None), types.FunctionType)
        else {}
    )
    return found | getattr(value, "__dict__", {}) | inner


def _as_tuple(slots: Any) -> tuple:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Globals and attributes that code names, that of functions inside it among it."""
    inner = (_names_of(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _checksum(array: Any) -> int:
    return zlib.crc32(content(array))


__all__ = ["Snapshot"]
