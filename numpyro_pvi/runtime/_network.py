"""What carries questions out of a compiled program to clients, and their answers back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Int

from .._compiling import as_here


class Network(Protocol):
    """What carries questions to the clients and answers back. Called out of compiled programs: nothing of JAX runs in it."""

    def look(
        self, how: dict[str, Any], shared: tuple, shapes: tuple, own: tuple = (), groups: np.ndarray | None = None
    ) -> tuple:
        """Ask every client, or some, for its factor's value, message and error at a q.

        ``how``: static settings of the look; ``shared``: what all clients are told, arrays; ``shapes``: shapes and dtypes of
        one client's answer; ``own``: what each client alone is told, arrays with a leading axis of these clients; ``groups``:
        which clients; None for all of them. Returns NumPy arrays with a leading axis of these clients.
        """
        ...

    def seen(self, shapes: tuple) -> tuple:
        """What every client saw last, at the q of a visit of this fit's: nobody is asked.

        ``shapes``: shapes and dtypes of one client's answer. Returns NumPy arrays with a leading axis of clients: whether each
        has said anything yet, and what it said, zeros where not.
        """
        ...

    def visit(self, how: dict[str, Any], shared: tuple, groups: np.ndarray, own: tuple, shapes: tuple) -> tuple:
        """Ask some clients for a site from a cavity.

        ``how``: static settings of the visit; ``shared``: what all clients are told, arrays; ``groups``: which clients;
        ``own``: ``(cavity, site, memory, key, start)`` of each, trees of arrays with a leading axis of these clients;
        ``shapes``: shapes and dtypes of one client's site (each a :class:`Leaf`), and of its memory and what it reports.
        Returns NumPy arrays with a leading axis of these clients: the site's, the memory's, back-offs, moved, step.
        """
        ...

    def begin(
        self, how: dict[str, Any], shared: tuple, tickets: np.ndarray, groups: np.ndarray, own: tuple, shapes: tuple
    ) -> tuple:
        """Ask some clients for a visit, and do not wait; those whose visit is under way by their ticket are left at it.

        ``how``: static settings of the visit, and under "look" those of a look at the q that the visit is from; ``shared``:
        what all clients are told, arrays; ``tickets``: Int[k 2], of the visits that should be under way; ``groups``: which
        clients; ``own``: ``(cavity, site, memory, key, look)`` of each; ``shapes``: shapes and dtypes of one client's site, of
        its memory, of what it reports, and of what it sees. Returns tickets of the visits that are under way now, and which of
        them were begun here.
        """
        ...

    def arrive(self, allowed: np.ndarray, young: np.ndarray, shapes: tuple) -> tuple:
        """Wait for the visit that is done first.

        ``allowed``: Bool[M], whose may be taken; ``young``: Bool[M], whose is from a q that is no older than it may be; another
        one is refused, which is counted; ``shapes``: shapes and dtypes of what is returned. Returns the client, seconds since
        the last one, the site's arrays, the memory's, back-offs, moved, step.
        """
        ...

    def spent(self, ends: np.ndarray) -> tuple:
        """What was really sent since the last round that counted.

        ``ends``: Bool, whether this one does; else its part is left for the next. Returns int[3]: round trips, bytes to clients
        and bytes from them, 2^31 - 1 at most; zeros for a round that does not count.
        """
        ...


# -------------------------------------------------------------------------------------------- out of a compiled program

# What clients keep is named by: the conversation's number, and that of the question that it came of.
TICKET = jax.ShapeDtypeStruct((2,), jnp.int32)


def seed_of(key: Any) -> tuple[str, Array]:
    """A random key as it is told: how keys of its kind are made, and its numbers."""
    return str(jax.random.key_impl(key)), jax.random.key_data(key)


class Leaf(NamedTuple):
    """Shape and dtype of one array of a client's site, and whether it is the same when its last two axes are exchanged."""

    shape: tuple[int, ...]
    dtype: Any
    symmetric: bool = False


def stacked(one: tuple, count: int) -> tuple:
    """Shapes and dtypes of so many clients' answers, of one's."""
    return tuple(jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in one)


def ask_all(
    network: Any,
    how: dict[str, Any],
    one: tuple,
    count: int,
    shared: tuple,
    own: tuple = (),
    params: tuple = (),
    groups: Int[Array, "count"] | None = None,
) -> tuple:
    """Ask all of so many clients, or those of ``groups`` (see :meth:`Network.look`); they are told the params' values, if any."""
    if params:
        how, shared = {**how, "params": len(params)}, (*shared, *params)
    return call_out(
        lambda shared, own, groups: network.look(how, shared, one, own, groups),
        stacked(one, count),
        (shared, own, groups),
    )


def spent(network: Any, ends: Any, after: Any) -> Int[Array, "3"]:
    """What was really sent in a round, repetitions included: see :meth:`Network.spent`.

    ``after``: arrays that must be there before: all that the round asked for. Returns round trips, bytes to clients, and bytes
    from them.
    """
    shape = (jax.ShapeDtypeStruct((3,), jnp.int32),)
    return call_out(lambda ends, *_: network.spent(ends), shape, (ends, *jax.tree.leaves(after)))[0]


def call_out(ask: Callable, shapes: tuple, operands: tuple) -> tuple:
    """Leave a compiled program with arrays, and come back with arrays of these shapes.

    Numbers of eight bytes cross as two of four: JAX rounds what comes and goes to the precision of the thread that calls back,
    which is the process's and not that of ``with jax.enable_x64(...)`` around the fit.
    """
    leaves, structure = jax.tree.flatten(operands)
    given_as, crossing = [_shape(x) for x in leaves], tuple(_half_shape(x) for x in shapes)

    def host(*given: Any) -> tuple:
        found = ask(*structure.unflatten(_viewed(given, given_as)))
        return _viewed([np.asarray(x, y.dtype) for x, y in zip(found, shapes, strict=True)], crossing)

    found = io_callback(as_here(host), crossing, *map(_halves, leaves))
    return tuple(_whole(x, np.dtype(y.dtype)) for x, y in zip(found, shapes, strict=True))


def _viewed(arrays: Any, shapes: Any) -> tuple:
    """The same bytes as arrays of other types."""
    pairs = zip(arrays, shapes, strict=True)
    return tuple(np.ascontiguousarray(x).view(np.dtype(y.dtype)).reshape(y.shape) for x, y in pairs)


def _shape(x: Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _is_wide(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize == 8


def _halves(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32) if _is_wide(x.dtype) else x


def _half_shape(shape: Any) -> Any:
    return jax.ShapeDtypeStruct((*shape.shape, 2), jnp.uint32) if _is_wide(shape.dtype) else shape


def _whole(x: Array, dtype: np.dtype) -> Array:
    return jax.lax.bitcast_convert_type(x, dtype) if _is_wide(dtype) else x
