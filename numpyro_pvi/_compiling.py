"""How programs are compiled: cheaply where that is most of what they cost, once for their owner's life, and kept on disk.

A first fit spends most of its time in XLA. Its cheapest level compiles four to seven times faster and makes programs that run two
to seven times slower: right for what runs once, or over little. Which level a program gets follows from sizes alone, never from a
clock: a run that is gone on with would otherwise not be the same to the bit.

A function under a module's own ``jax.jit`` keeps every program that was ever made of it, with the model that its static
arguments hold and the arrays that the model closes over, until ``jax.clear_caches()``; and it finds a program by what those
arguments compare equal to, which says nothing of what the model closes over. Here a function is copied for every owner and every
choice of static arguments, which JAX does not see: it drops a copy's programs when the copy goes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.interpreters.partial_eval import dce_jaxpr

from .errors import PVIError

# On CPU jaxlib 0.10.2 hands sums to YNNPACK, which gets two of one array wrong beyond its first 65,536 numbers where another array
# is spread over it: jit(lambda c, y: (y * c).sum(-1) + c.sum(-1)), c of shape (400, 150, 2) and y of (150, 2). Beta and Dirichlet
# log densities are of this form. None are handed over here: an update of 20,000 x 50 under full covariance takes 35.4 ms with
# it and 35.2 without, of 50,000 x 10 under mean-field 28.0 and 31.2 (medians of three runs in turn, which differ by as much).
_RIGHT = {"xla_cpu_experimental_ynn_fusion_type": ""}
# XLA's levels, on CPU. The fusion emitters cost compiling and save little there. "plain" asks for nothing: on other devices, and
# within another program, which decides how it is compiled.
# Half of the time in XLA's own passes goes to moving what does not change out of loops, round after round of simplifications: in
# eight schools 16 for 8, and 2.9 s for 1.6 of 4.6 s. Rounds are no slower without: 200 of 300 rows of 4 columns 118, 110 and 106 ms
# with it, 103, 104 and 97 without (in turn).
_BRIEF = {"xla_cpu_use_fusion_emitters": False, "xla_disable_hlo_passes": "while-loop-invariant-code-motion", **_RIGHT}
_CHEAP = {"xla_backend_optimization_level": 0, **_BRIEF}
_MIDDLE = {"xla_backend_optimization_level": 1, **_BRIEF}
_OPTIONS: dict[str, dict[str, Any]] = {"cheap": _CHEAP, "middle": _MIDDLE, "full": _RIGHT, "plain": {}}
# Numbers that a call makes up to which the cheapest level costs less than it saves, of programs that run once or a few times a fit.
_LARGEST_ONCE = 1 << 24


class Bounds(NamedTuple):
    """Numbers that a round makes up to which rounds are compiled at a level; beyond both at the fullest."""

    cheap: int
    middle: int


# Of rounds there may be thousands: an update of 300 rows of 4 columns takes 4.8 ms at the cheapest level and 2.5 at the next, for
# 2 s of compiling. All that XLA has takes three seconds more, for a fifth of rounds that take half a second (10,000 images under a
# network of 160,000 weights; rounds of 200,000 rows of 54 columns are ten times below it).
ROUNDS = Bounds(1 << 12, 1 << 30)
# Arrays of readings are passed over about once; a look at a model evaluates it at some 64 points.
_LARGEST_READING, _POINTS = 1 << 20, 64
# What a loop is taken for whose number of passes is not known before it runs.
_PASSES = 100
_PRECISION = "jax_default_matmul_precision"
# Settings of JAX that a trace depends on, with what sets each for a thread.
_TRACED_UNDER: dict[str, Callable] = {
    "jax_enable_x64": jax.enable_x64,
    _PRECISION: jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
}
# Programs of looks at a model that one owner keeps; more belong to models or shapes that are not asked for any more.
_MOST_KEPT = 16

# Options that this XLA does not know: asked for once, then left out.
_unknown: set[str] = set()


def _options(level: str) -> dict[str, Any]:
    return {name: value for name, value in _OPTIONS[level].items() if name not in _unknown}


def level_of(work: int, often: Bounds | None = None) -> str:
    """How well a program is to be compiled.

    ``work``: numbers that one call (of a program that runs often: one round) makes; ``often``: of a program that runs many times
    in a fit, where its levels end. Returns "cheap" where compiling outweighs running, else "middle"; "full" for many rounds of
    what takes a good part of a second.
    """
    if often is None:
        return "cheap" if work <= _LARGEST_ONCE else "middle"
    if work <= often.cheap:
        return "cheap"
    return "middle" if work <= often.middle else "full"


def level_of_looks(*arrays: Any) -> str:
    """How well a program is to be compiled that looks at a model some dozen times. Returns as :func:`level_of`."""
    return level_of(_POINTS * _size(arrays))


def work_of(jaxpr: Any) -> int:
    """Numbers that a program makes: those of every equation, as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(work_of(x) for x in _jaxprs_in(equation))
        times = equation.params.get("length", _PASSES if equation.primitive.name == "while" else 1)
        total += int(times) * inner if inner else _made_by(equation)
    return total


def _made_by(equation: Any) -> int:
    made = sum(int(np.prod(x.aval.shape)) for x in equation.outvars)
    if equation.primitive.name != "dot_general":
        return made
    summed = equation.params["dimension_numbers"][0][0]
    return made * int(np.prod([equation.invars[0].aval.shape[i] for i in summed]))


class Program:
    """``jax.jit`` of a function, at a level of compiling that each call may choose.

    Under an outer ``jit`` or ``grad`` it is the plain one, since an outer program decides how it is compiled; under ``vmap`` alone
    there is none. Where JAX is asked to leave most optimisations out (``JAX_DISABLE_MOST_OPTIMIZATIONS``), "middle" is "cheap".
    """

    def __init__(self, fn: Callable, static: tuple[str, ...] = ()):
        self._fn, self._static = fn, static
        self._ways: dict[str, Any] = {}

    def __call__(self, *args: Any, level: str | None = None, **kwargs: Any) -> Any:
        """The function's value.

        ``level``: "cheap", "middle" or "full"; by default "cheap" for small arguments, "full" for others.
        """
        if level is None:
            level = "cheap" if _size((args, kwargs)) <= _LARGEST_READING else "full"
        if _within_program() or jax.default_backend() != "cpu":
            level = "plain"
        elif level == "middle" and jax.config.values.get("jax_disable_most_optimizations"):
            level = "cheap"
        while True:
            try:
                with precisely():
                    return self._way(level)(*args, **kwargs)
            except ValueError as error:
                # Derivatives are a program that is being written as well, which JAX says where this one would go into it.
                if level == "plain" or "compiler_options" not in str(error):
                    raise
                level = "plain"
            except jax.errors.JaxRuntimeError as error:
                # The others of the level are kept: with them programs still compile several times faster.
                gone = [name for name in _options(level) if f"No such compile option: '{name}'" in str(error)]
                if not gone:
                    raise
                _unknown.update(gone)
                del self._ways[level]

    def _way(self, level: str) -> Any:
        if level not in self._ways:
            options = _options(level) or None
            self._ways[level] = jax.jit(self._fn, static_argnames=self._static, compiler_options=options)
        return self._ways[level]

    def clear(self) -> None:
        """Drop everything that was compiled."""
        for way in self._ways.values():
            way.clear_cache()
        self._ways.clear()


class _Traced(NamedTuple):
    """A look as a jaxpr with what it closes over, what tells it from others, and how its results are put together."""

    closed: Any
    digest: bytes
    structure: Any


def _trace(look: Callable, args: tuple) -> _Traced:
    # A new function each time: JAX keeps what it traced by the function, whatever that closes over by now.
    closed, shape = jax.make_jaxpr(lambda *given: look(*given), return_shape=True)(*args)
    return _Traced(closed, _digest(closed), jax.tree.structure(shape))


def _keep(store: OrderedDict, key: Any, value: Any) -> Any:
    """Keep something in place of what was asked for longest ago; what was dropped, or None."""
    store[key] = value
    return store.popitem(last=False)[1] if len(store) > _MOST_KEPT else None


class Same:
    """A key that stands for one object, and is equal to no other object's.

    Args:
        value: the object; it lives as long as the key.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class Token:
    """Stands for what a model is while one owner's programs of it hold; hashable, equal to itself alone, and keeps none of them."""


class Programs:
    """One owner's programs, which die with it: compiled copies of functions, and those of looks at a model.

    A look's program is kept by what it computes, its jaxpr, with the arrays that the model closes over as arguments: it cannot be
    stale, whatever these are by the time of the next call, and none of them is kept alive by it. Where the owner knows what its
    model closes over (:mod:`numpyro_pvi._closures`), the trace of a look may be kept as well, like programs of rounds: it goes with
    them.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Callable, tuple], Program] = {}
        self._kept: OrderedDict[bytes, Program] = OrderedDict()
        self._traced: OrderedDict[Any, tuple[_Traced, Any]] = OrderedDict()
        self._found: dict[Any, Any] = {}
        # Another one whenever they are dropped.
        self.token = Token()

    def of(self, function: Callable, static: tuple[tuple[str, Any], ...]) -> Program:
        """This owner's compiled copy of a function.

        ``static``: names and (hashable) values of its static arguments. Returns a program of the other arguments; the same one
        at every call.
        """
        key = function, static
        if key not in self._made:
            self._made[key] = Program(_copy(function, dict(static)))
        return self._made[key]

    def __call__(self, look: Callable, *args: Any) -> Any:
        """Trace a function, and run the program that computes the same, compiled before or now; see :func:`look`."""
        return self._run(_trace(look, args), args)

    def again(self, known: Any, make: Callable[[], tuple[Callable, Any]], *args: Any) -> tuple[Any, Any]:
        """See :func:`look_again`."""
        if known is None or not self.settled:
            fn, beside = make()
            return self(fn, *args), beside
        leaves, structure = jax.tree.flatten(args)
        # Settings within a `with` as well; shapes with their weak types.
        settings = tuple(getattr(jax.config, name) for name in _TRACED_UNDER)
        key = known, structure, tuple(jax.typeof(x) for x in leaves), settings
        found = self._traced.get(key)
        if found is None:
            fn, beside = make()
            found = _trace(fn, args), beside
            if not _calls_back(found[0].closed.jaxpr):
                _keep(self._traced, key, found)
        else:
            self._traced.move_to_end(key)
        return self._run(found[0], args), found[1]

    def _run(self, traced: _Traced, args: tuple) -> Any:
        closed = traced.closed
        program = self._kept.get(traced.digest)
        if program is None or _calls_back(closed.jaxpr):
            program = Program(_evaluator(closed.jaxpr))
            if (dropped := _keep(self._kept, traced.digest, program)) is not None:
                dropped.clear()
        self._kept.move_to_end(traced.digest)
        found = program(closed.consts, jax.tree.leaves(args), level=level_of_looks(args, closed.consts))
        return jax.tree.unflatten(traced.structure, found)

    @property
    def settled(self) -> bool:
        """Whether the model is known not to change what it closes over while it is traced."""
        return True

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """What was found of the programs before under a hashable key, or is now."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def __len__(self) -> int:
        return len(self._made) + len(self._kept)

    def clear(self) -> None:
        """Drop everything that was compiled; it is made anew when it is asked for."""
        for program in (*self._kept.values(), *self._made.values()):
            program.clear()
        self._kept.clear()
        self._traced.clear()
        self._made.clear()
        self._found.clear()
        self.token = Token()


# The owners at work, the present one last. What calls in here holds numpyro_pvi's lock.
_AT_WORK: list[Programs] = []


def as_here(call: Callable) -> Callable:
    """A function that runs under the settings of JAX that hold now, whichever thread calls it.

    JAX keeps what ``with jax.enable_x64(...)`` and the like set for the thread that said so; a program calls back from its own.
    Returns the same under the settings.
    """
    wanted = {name: getattr(jax.config, name) for name in _TRACED_UNDER}

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as settings:
            for name, value in wanted.items():
                if getattr(jax.config, name) != value:
                    settings.enter_context(_TRACED_UNDER[name](value))
            return call(*args, **kwargs)

    return run


@contextlib.contextmanager
def precisely() -> Iterator[None]:
    """Multiply matrices in all digits of their dtype while this lasts, unless the user has said how.

    Devices other than CPUs round the factors of a product first, to 11 or 8 binary digits, where nobody asks them not to
    (``jax_default_matmul_precision``): a fit then stops thousandths of a nat and more from where it should, and what a model says
    is no longer what a structure that was found in it says.
    """
    if jax.default_backend() == "cpu" or getattr(jax.config, _PRECISION) is not None:
        yield
    else:
        with jax.default_matmul_precision("highest"):
            yield


def settings_for_others() -> dict[str, Any]:
    """Settings of JAX that another process is to have which does a part of this one's work."""
    return {name: getattr(jax.config, name) for name in ("jax_enable_x64", _PRECISION)}


@contextlib.contextmanager
def at_work(programs: Programs) -> Iterator[None]:
    """Let programs belong to an owner while this context lasts."""
    _AT_WORK.append(programs)
    try:
        with precisely():
            yield
    finally:
        _AT_WORK.pop()


def _present() -> Programs:
    """The owner at work; without one, one that lasts for a single call."""
    return _AT_WORK[-1] if _AT_WORK else Programs()


def token_here() -> Token | None:
    """What stands for the model of the owner at work; None without one."""
    return _AT_WORK[-1].token if _AT_WORK else None


def owned_jit(function: Callable, static_argnames: tuple[str, ...]) -> Callable:
    """``jax.jit`` whose programs belong to the owner at work.

    ``static_argnames``: its arguments that are no arrays; hashable. Returns the compiled function, with one keyword more:
    ``level``, "cheap", "middle" or "full" (the default).
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, level: str = "full", **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        static = tuple((name, given.pop(name)) for name in static_argnames)
        return _present().of(function, static)(level=level, **given)

    return call


def _copy(function: Callable, static: dict[str, Any]) -> Callable:
    """Another function that does the same with its static arguments fixed: JAX knows functions by identity."""

    def own(**given: Any) -> Any:
        return function(**given, **static)

    own.__name__ = own.__qualname__ = function.__name__
    return own


def look(fn: Callable, *args: Any) -> Any:
    """Run a function of a model once, as one program, which the fit that is being made keeps for its next call.

    ``fn``: a function of pytrees of arrays.
    """
    return _present()(fn, *args)


def look_again(known: Any, make: Callable[[], tuple[Callable, Any]], *args: Any) -> tuple[Any, Any]:
    """Run a function of a model as :func:`look` does; the fit that is being made traces it once, while its model is the same.

    ``known``: hashable; all that the function depends on beside its arguments and what the model closes over. None where that
    cannot be told: the function is traced; ``make``: makes the function, and what else was found on the way to it. Returns its
    value, and what else was found.
    """
    return _present().again(known, make, *args)


def on_device(value: Any, dtype: Any = None) -> Any:
    """An array of what is known on the host. ``jnp.asarray`` compiles a program to convert or copy it, one for every shape.

    ``dtype``: of the array; by default the value's, as JAX holds it.
    """
    return jax.device_put(np.array(value, dtype))


def _evaluator(jaxpr: Any) -> Callable:
    def evaluate(consts: list, leaves: list) -> list:
        return jax.core.eval_jaxpr(jaxpr, consts, *leaves)

    return evaluate


def _digest(closed: Any) -> bytes:
    """What a program computes, but for the values of the arrays that it closes over: those are its arguments."""
    digest = hashlib.blake2b(str(closed.jaxpr).encode(), digest_size=20)
    digest.update(repr([jax.typeof(x) for x in closed.consts]).encode())
    # Arrays inside of inner jaxprs are printed by name only.
    for const in _inner_consts(closed.jaxpr):
        digest.update(str(jax.typeof(const)).encode())
        digest.update(content(const))
    return digest.digest()


def _inner_consts(jaxpr: Any) -> list:
    found = []
    for equation in jaxpr.eqns:
        for value in _values_in(equation):
            if isinstance(value, jax.extend.core.ClosedJaxpr):
                found += value.consts
            elif isinstance(value, jax.Array | np.ndarray) and value.ndim:
                found.append(value)
        found += [x.val for x in equation.invars if isinstance(x, jax.extend.core.Literal) and np.ndim(x.val)]
        found += [x for inner in _jaxprs_in(equation) for x in _inner_consts(inner)]
    return found


def _calls_back(jaxpr: Any) -> bool:
    """Whether it runs Python of the model's, of which nothing is known but where it lies in memory."""
    own = any("callback" in equation.primitive.name for equation in jaxpr.eqns)
    return own or any(_calls_back(inner) for equation in jaxpr.eqns for inner in _jaxprs_in(equation))


def loops_on(jaxpr: Any) -> bool:
    """Whether it has a loop whose length is known only as it runs: a solver's, of equations that may be as stiff as they like."""
    return _has(jaxpr, "while")


def has_tangents(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a function has forward derivatives: one of reverse derivatives alone (``jax.custom_vjp``) inside has none.

    ``function``: that asks for them; ``args``: of the shapes and dtypes of those to come.
    """
    try:
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    except TypeError:
        return False
    return not _has(jaxpr, "custom_lin")


def _has(jaxpr: Any, name: str) -> bool:
    own = any(equation.primitive.name == name for equation in jaxpr.eqns)
    return own or any(_has(inner, name) for equation in jaxpr.eqns for inner in _jaxprs_in(equation))


def without_unread(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function without what it computes and its results do not depend on: that would be differentiated with the rest.

    ``function``: of pytrees of arrays, to one; ``args``: of the shapes and dtypes of those to come. Returns the function.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)

    def alone(*args: Any) -> Any:
        found = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return alone


def _values_in(equation: Any) -> list:
    return jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)


def _jaxprs_in(equation: Any) -> list:
    return [getattr(x, "jaxpr", x) for x in _values_in(equation) if _is_jaxpr(x)]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)


def is_traced(tree: Any) -> bool:
    """Whether any leaf has no value yet."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def content(array: Any) -> memoryview:
    """The bytes of an array in order, for a digest; a view where the array lies in order, else of a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# What JAX says of where it is, where nothing is traced.
_OUTSIDE = jax.extend.core.get_opaque_trace_state(convention="flax")


def _within_program() -> bool:
    if jax.extend.core.get_opaque_trace_state(convention="flax") == _OUTSIDE:
        return False
    # Of arguments that are traced nothing says by what; a new array is traced by programs alone, and not by ``vmap``.
    return isinstance(jax.device_put(np.float32(0)), jax.core.Tracer)


def _size(tree: Any) -> int:
    return sum(int(np.prod(jnp.shape(x))) for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


# --------------------------------------------------------------------------------------------------------- kept on disk
# Compiled programs kept on disk, for processes to come: only where a user asks for it.


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
