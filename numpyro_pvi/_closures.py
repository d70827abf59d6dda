"""What a model closes over, followed at every call: snapshots, fingerprints, and the exactly held prior of now.

Compiled programs have everything that a model closes over as constants. A PVI therefore looks at it whenever one of its methods is
called, and drops its programs where something has changed. The first look, at every call, is a *snapshot* of the Python objects
that the model's code can reach (:mod:`numpyro_pvi._closures`). Where that has met something it cannot look into (files, iterators,
extension types), or what the model itself changes, the second, at calls that may cost a trace, compares the model as traced
(:mod:`numpyro_pvi._closures`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import pickle
import re
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

from ._compiling import Programs, at_work, content, is_traced
from ._numerics import nearly_same
from ._state import PVIState
from .errors import PVIError, StateError
from .factors import (
    is_latent,
    is_observed,
    join_arguments,
    over_plates,
    positional_names,
    split_arguments,
)

# ------------------------------------------------------------------------------------------------------------- snapshot
# What some Python objects close over, taken down so that a later look can be compared with it.

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

    ``names``: attributes and globals that are known to be named; ``unread``: containers, by identity, that the model's code
    writes into, each with the number of entries that count; ``exact``: whether everything that was met could be looked into;
    ``sizes``: mutable containers, by identity, with their lengths.
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


# ---------------------------------------------------------------------------------------------------------- fingerprint
# What a model is, as far as a trace of it tells: digests of every sample site's density, closed-over numbers included.
#
# The model is traced with abstract arguments, every latent at a value that nothing else enters. A density's digest is
# that of the graph of operations which leads to it: their kinds and settings, and the numbers that enter them from
# anywhere but the model's arguments and latents. Two models with the same digests are the same function of arguments
# and latents.

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Settings of operations that say how a program runs, or how its derivatives are taken, and not what it computes.
_NO_MATTER = frozenset(
    (
        *(
            "jvp_jaxpr_fun",
            "jvp_jaxpr_thunk",
            "fwd_jaxpr_thunk",
            "bwd",
            "symbolic_zeros",
            "sharding",
            "ctx_mesh",
            "name",
        ),
        *("in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "inline", "keep_unused"),
        *("compiler_options_kvs", "split_transpose", "out_sharding", "num_consts"),
    )
)


@dataclasses.dataclass(frozen=True)
class SiteDigest:
    """One sample site of a traced model.

    ``words``: its distribution's classes, shapes and plates; ``value``: hexadecimal digits of what is observed; empty for a
    latent; ``density``: the same of its log density.
    """

    latent: bool
    words: str
    value: str
    density: str


def model_digest(model: Callable, arrays: list, static: tuple, salt: str = "") -> dict[str, SiteDigest]:
    """Digests of a model's sample sites, in the order of the model.

    ``arrays``: the arrays among its arguments, or their shapes; ``static``: the rest, as of ``split_arguments``. Returns by
    site. ``numpyro.param`` sites are there with their initial values.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    told: dict[str, tuple[bool, str]] = {}

    def densities(model: Callable, place: Any, arrays: list) -> list:
        args, kwargs = join_arguments(arrays, static)
        told.clear()
        found = []
        for name, site in _trace(model, place, args, kwargs).items():
            if site["type"] == "param":
                told[name] = False, f"param with constraint {_plain(site['kwargs'].get('constraint'))}"
                found.append((site["value"], ()))
            elif site["type"] == "sample":
                told[name] = is_latent(site), _words(site)
                value = site["value"] if is_observed(site) else ()
                scale = () if site["scale"] is None else site["scale"]
                found.append((value, (site["fn"].log_prob(site["value"]), scale)))
        return found

    def traced(model: Callable) -> Any:
        at = functools.partial(densities, model)
        return jax.make_jaxpr(at, return_shape=True)(jax.ShapeDtypeStruct((), float), shapes)

    with numpyro.validation_enabled(False):
        closed, shape = over_plates(traced, model)
    graph = _Graph(closed, salt.encode())
    digests = iter(graph.outputs())
    by_site = jax.tree.map(lambda _: next(digests).hex(), shape)
    return {
        name: SiteDigest(latent, words, _join(value), _join(density))
        for (name, (latent, words)), (value, density) in zip(told.items(), by_site, strict=True)
    }


def _trace(model: Callable, place: Any, args: tuple, kwargs: dict) -> dict:
    """The model's trace, its latents at values that depend on their shapes and supports alone."""

    def given(site: dict) -> Any:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        support, shape = site["fn"].support, site["fn"].shape()
        if support.is_discrete:
            return jnp.full(shape, place).astype(int)
        transform = biject_to(support)
        return transform(jnp.full(transform.inverse_shape(shape), place))

    # A substitution function is the one handler that also reaches the sample sites inside a scan's body.
    key = jax.random.key(0)
    return handlers.trace(handlers.seed(handlers.substitute(model, substitute_fn=given), key)).get_trace(
        *args, **kwargs
    )


def _words(site: dict) -> str:
    fn, kinds = site["fn"], []
    while fn is not None:
        kinds.append(type(fn).__name__)
        fn = getattr(fn, "base_dist", None)
    plates = ", ".join(f"{frame.name} ({frame.size})" for frame in site["cond_indep_stack"])
    shapes = f"of shape {tuple(site['fn'].batch_shape)} {tuple(site['fn'].event_shape)}"
    return f"{' of '.join(kinds)} {shapes}, {'in plate ' + plates if plates else 'in no plate'}"


def _join(digests: Any) -> str:
    leaves = jax.tree.leaves(digests)
    return leaves[0] if len(leaves) == 1 else hashlib.sha256("".join(leaves).encode()).hexdigest() if leaves else ""


class _Graph:
    """Digests of a traced function's outputs, each of the operations that lead to it and of no others."""

    def __init__(self, closed: Any, salt: bytes, known: dict | None = None) -> None:
        self.salt, self.jaxpr = salt, closed.jaxpr
        self.known: dict[int, bytes] = {} if known is None else known
        inputs = {var: self.hash("in", str(i), str(var.aval)) for i, var in enumerate(self.jaxpr.invars)}
        constants = {v: self.hash(self.number(x)) for v, x in zip(self.jaxpr.constvars, closed.consts, strict=True)}
        self.found: dict[Any, bytes] = inputs | constants

    def hash(self, *parts: str | bytes) -> bytes:
        found = hashlib.blake2b(self.salt, digest_size=16)
        for part in parts:
            found.update(part.encode() if isinstance(part, str) else part)
            found.update(b"\0")
        return found.digest()

    def outputs(self) -> list[bytes]:
        for eqn in self.jaxpr.eqns:
            # In how many digits a product is taken is the device's and the user's choice, and was none where digests were kept.
            params = {**eqn.params, "precision": None} if "precision" in eqn.params else eqn.params
            settings = [self.setting(params[k], k) for k in sorted(params) if k not in _NO_MATTER]
            own = self.hash(eqn.primitive.name, *settings, *map(self.of, eqn.invars))
            self.found.update((var, self.hash(own, str(i))) for i, var in enumerate(eqn.outvars))
        return [self.of(var) for var in self.jaxpr.outvars]

    def of(self, var: Any) -> bytes:
        if isinstance(var, Literal):
            return self.hash(self.number(var.val), str(var.aval))
        return self.found[var]

    def setting(self, value: Any, name: str = "") -> bytes:
        """Digest of one setting of an operation."""
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self.program(value)
        if isinstance(value, tuple | list):
            return self.hash(name, *(self.setting(x) for x in value))
        if isinstance(value, dict):
            return self.hash(name, *(self.setting(x, str(k)) for k, x in value.items()))
        if isinstance(value, jax.Array | np.ndarray):
            return self.hash(name, self.number(value))
        return self.hash(name, _plain(value))

    def program(self, value: Any) -> bytes:
        """Digest of a program within: a loop's body, a compiled function."""
        if id(value) not in self.known:
            closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
            inner = _Graph(closed, self.salt, self.known)
            self.known[id(value)] = self.hash(*inner.outputs())
        return self.known[id(value)]

    def number(self, value: Any) -> bytes:
        """Digest of a number or array that is fixed in the program."""
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            return self.hash(_plain(value))
        array = np.asarray(value)
        return self.hash(f"{array.dtype} {array.shape}", bytes(content(array)))


def _plain(value: Any) -> str:
    """A value in words that are the same in every process."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__name__} {_ADDRESS.sub('', repr(value))}"


def first_difference(theirs: dict[str, SiteDigest], own: dict[str, SiteDigest], where: str = "the file") -> str | None:
    """How one model differs from another, at the first sample site where it does.

    Returns one clause, or None where they are the same.
    """
    return next(_differences(theirs, own, where), None)


def _differences(theirs: dict[str, SiteDigest], own: dict[str, SiteDigest], where: str) -> Iterator[str]:
    for name, site in theirs.items():
        here = own.get(name)
        what = f"the prior of {name!r}" if site.latent else f"the likelihood of {name!r}"
        if here is None:
            yield f"sample site {name!r} is in {where}'s model only"
        elif site.words != here.words or site.latent != here.latent:
            kinds = [f"{'a latent' if s.latent else 'no latent'}, {s.words}" for s in (site, here)]
            yield f"{what} differs: {kinds[0]}, in {where}; {kinds[1]}, here"
        elif site.value != here.value:
            yield f"the observations of {name!r} that the model closes over, or how it makes them of its arguments, differ"
        elif site.density != here.density:
            yield f"{what} differs: a number in it, an array that it closes over, or its form"
    yield from (f"sample site {name!r} is in this PVI's model only" for name in own if name not in theirs)


# ------------------------------------------------------------------------------------------------------------- closures

# NumPyro's stack of handlers is one for all threads, and so is whatever a model's code changes while it is traced.
_TURN = threading.RLock()
# What takes objects apart as pickle does, functions of any kind included.
_PICKLE_ALL = frozenset(("copy", "cloudpickle", "_dill", "dill"))
_NOT_ASKING = frozenset(("numpyro_pvi", "jaxtyping", "beartype"))
_MARK = "_numpyro_pvi_followed"


class ModelPrograms(Programs):
    """Programs of a model as it was at a snapshot, and what traces of it gave then.

    Args:
        snapshot: of the model and of what a fit does with it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        # By shapes and static values of the arguments.
        self.traced: dict[Any, dict[str, SiteDigest]] = {}
        # Whether the model's own code changes what it closes over, so that snapshots tell nothing.
        self.restless = False
        self._states: dict[int, weakref.ref] = {}

    @property
    def settled(self) -> bool:
        """Whether snapshots tell what the model closes over."""
        return not self.restless

    def note(self, state: Any) -> None:
        """Remember a state that this model has made."""
        leaf = _leaf(state)
        if leaf is not None and id(leaf) not in self._states:
            self._states[id(leaf)] = weakref.ref(leaf, functools.partial(_forget, self._states, id(leaf)))

    def has_made(self, state: Any) -> bool:
        """Whether a state is one of those."""
        leaf = _leaf(state)
        known = self._states.get(id(leaf))
        return leaf is None or (known is not None and known() is leaf)

    def clear(self) -> None:
        """Drop all programs and traces, and forget what states were made."""
        super().clear()
        self.traced.clear()
        self._states.clear()


def _leaf(state: Any) -> Any:
    """An array of a state that stands for its prior, or None while it has no value."""
    leaf = next(iter(jax.tree.leaves(state.prior)), None)
    return leaf if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) else None


def _forget(states: dict, place: int, gone: Any) -> None:
    if states.get(place) is gone:
        del states[place]


# Programs of the PVIs that there are. Two of one model share them while neither has anything else in view.
_ALIVE: weakref.WeakSet[ModelPrograms] = weakref.WeakSet()


def _programs_at(snapshot: Snapshot) -> ModelPrograms:
    with _TURN:
        for programs in list(_ALIVE):
            if programs.snapshot == snapshot:
                return programs
        made = ModelPrograms(snapshot)
        _ALIVE.add(made)
        return made


class Followed:
    """What one PVI closes over, and the programs that hold for it.

    Args:
        roots: the model, and whatever else of the PVI may call a user's function.
    """

    def __init__(self, roots: tuple[Any, ...]) -> None:
        # A solver of plain numbers is not looked at again: one look costs a tenth of a small model's round.
        self.roots = (roots[0], *(x for x in roots[1:] if not Snapshot((x,)).constant))
        self.programs: Any = None
        self._inside = self._to_trace = False
        # Containers that the model's code writes into while it is traced, such as a list of calls.
        self._unread: dict[int, Any] = {}
        self.follow()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle has of it: programs are made anew."""
        return {"roots": self.roots, "programs": None, "_inside": False, "_to_trace": False, "_unread": {}}

    @contextlib.contextmanager
    def turn(self, trace: bool) -> Iterator[None]:
        """One call of the PVI: what it closes over is looked at first, and does not change in the eyes of calls within.

        ``trace``: whether the call may cost a trace of the model.
        """
        if self._inside:
            with at_work(self.programs):
                yield
            return
        self.follow()
        self._inside, self._to_trace = True, trace
        try:
            # Numbers that nobody has looked at yet are NaN in reports, and a factor that is not finite is skipped by name:
            # under jax_debug_nans each of them would end a fit.
            with at_work(self.programs), jax.debug_nans(False):
                yield
        finally:
            self._inside = self._to_trace = False

    def follow(self) -> None:
        """Take a snapshot, and other programs where it is another."""
        if self.programs is not None and self.programs.restless:
            return
        snapshot = self._look()
        if self.programs is None or snapshot != self.programs.snapshot:
            self.programs = _programs_at(snapshot)

    def _look(self) -> Snapshot:
        known = frozenset() if self.programs is None else frozenset(self.programs.snapshot.names)
        return Snapshot(self.roots, known, self._unread)

    def compare(self, model: Callable, args: tuple, kwargs: dict) -> None:
        """Trace the model, where snapshots may not tell all of it, and drop programs if it is not what it was."""
        if not self._to_trace or is_traced((args, kwargs)):
            return
        arrays, static = split_arguments(args, kwargs)
        key, now = (static, tuple((x.shape, str(x.dtype)) for x in arrays)), self.programs
        if now.traced and now.snapshot.exact and not now.restless:
            self._to_trace = False
            return
        try:
            found = model_digest(model, arrays, static)
        except Exception:
            # Whatever is wrong with the model shows where it is used, with a message for it. Where it asks for values of its
            # arguments, they come with the next comparison of this call.
            self._settle(now)
            return
        self._to_trace = False
        if now.traced.setdefault(key, found) != found:
            now.clear()
            now.traced[key] = found
        self._settle(now)

    def _settle(self, now: ModelPrograms) -> None:
        """Leave out what a trace has just changed: it would be taken for a change at every call."""
        after = self._look()
        if after == now.snapshot:
            return
        before = now.snapshot.sizes
        written = {i: before[i] for i, (_, size) in after.sizes.items() if i in before and before[i][1] != size}
        self._unread |= written
        now.snapshot, now.restless = self._look(), not written

    @property
    def known(self) -> bool:
        """Whether this call takes the model for what its snapshot says, with no trace of it."""
        return not (self._to_trace or self.programs.restless)

    def renew_guide(self, guide: Any) -> None:
        """Have a guide set up anew that was set up when the model closed over something else."""
        whole, of_model = vars(guide).get(_MARK, (None, None))
        if whole is self.programs.snapshot:
            return
        now = Snapshot(self.roots[:1], frozenset(self.programs.snapshot.names))
        if of_model is not None and of_model != now:
            guide.prototype_trace = None
        setattr(guide, _MARK, (self.programs.snapshot, now))


def check_picklable(pvi: Any) -> None:
    """Refuse to pickle a PVI with a part that cannot be: an optimiser is made of functions that only this process has.

    ``pvi``: the PVI. What ``copy`` and picklers of closures ask for is left to them. Raises PVIError naming the part, and what
    to do.
    """
    if not _PICKLE_ALL.isdisjoint(_who_asks().split(".")):
        return
    for part in ("optim", "model", "guide", "partition", "solver", "schedule", "runtime", "loss", "static_kwargs"):
        try:
            pickle.dumps(getattr(pvi, part))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PVIError(
                f"this PVI cannot be pickled for its {part} ({error}). Write its state with pvi.save(path, state); where it is "
                "read, make the PVI by the same lines and call pvi.load(path)."
            ) from error


def _who_asks() -> str:
    """The module whose code has called into this package, checkers of types left out."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_ASKING:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def follows(verb: Callable | None = None, *, trace: bool = True) -> Any:
    """A method of PVI that takes its turn among all threads, and follows what the model closes over.

    ``trace``: whether a call may cost a trace of the model; without, only what a snapshot sees is followed.
    """
    if verb is None:
        return functools.partial(follows, trace=trace)
    own = {p.name for p in inspect.signature(verb).parameters.values() if p.kind is p.KEYWORD_ONLY}

    @functools.wraps(verb)
    def turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if shared := own & kwargs.keys():
            _refuse_shared(verb.__name__, self.model, shared, len(args) - 1)
        with _TURN, self._followed.turn(trace):
            return verb(self, *args, **kwargs)

    return turn


def _refuse_shared(verb: str, model: Callable, names: set[str], count: int) -> None:
    """Raise where a keyword is the verb's own and a parameter of the model that no positional argument is for.

    ``names``: keywords of the call that are the method's own. Raises PVIError naming the keyword.
    """
    for place, name in enumerate(positional_names(model)):
        if name in names and place >= count:
            raise PVIError(
                f"{name}= is a keyword of PVI.{verb}, and the model has a parameter of that name, which would not get it: pass the "
                f"model's arguments up to {name!r} by position."
            )


# ----------------------------------------------------------------------------------------------------- the prior of now
# The exactly held prior of a state that was made when the model closed over something else.


def with_prior_of_now(pvi: Any, state: PVIState, dynamic: list, static: tuple) -> PVIState:
    """A state with the prior that the model has at this call.

    A state carries the prior that is held exactly. States that the model as it is now has made are taken as they are; of others
    the prior is read anew, and put in where it differs. Returns the state. Under ``jit`` it is the one given. Raises StateError
    where a prior that was held exactly is of another family now.
    """
    followed = pvi._followed.programs
    if followed.has_made(state) or is_traced((state, dynamic)):
        return state
    now = pvi._fit.read_prior(pvi, state, dynamic, static)
    if not nearly_same(state.prior, now):
        state = dataclasses.replace(state, prior=now)
    followed.note(state)
    return state


def other_family(name: str) -> StateError:
    """The error for a prior of another kind than the state's."""
    return StateError(
        f"the prior of {name!r} is of another family than when this state was made, since what the model closes over has changed: "
        "start anew with init, or with run without init_state."
    )
