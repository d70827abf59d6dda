"""Draws of what rows see of a mean-field q in place of draws of q: local reparameterisation, read off a trace.

Where a row sees latents by a product of its own numbers with them, ``a = h^T w``, as the layers of a network do, ``a`` is normal
with location ``h^T m`` and variance ``(h^2)^T v``. Every row takes a draw of its own ``a``, and a batch's gradient has the noise
of as many draws as it has rows, not of one. With E[f] as a function of the locations and variances of the latents, its gradients
are

    dE[f]/dm = E[grad f],    2 dE[f]/dv = E[hess f] (its diagonal),

as Bonnet and Price have it, both unbiased from one such draw.

References:
    Kingma, Salimans and Welling, Variational Dropout and the Local Reparameterization Trick, NeurIPS 2015, section 2.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, Float

from .._numerics import value_and_grad
from ..errors import PVIError
from ..factors import CALLS, called_jaxpr

# Every entry of the output is one of the input's, and of each there is one.
_PLACED = frozenset(("slice", "reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "copy_p", "split"))
# Of a row that sees nothing, in place of a variance of zero, whose root has no derivative.
_LEAST = 1e-30


class _Latents(NamedTuple):
    """Entries of the flat vector: which, their location and variance under q, and the draw that rows share."""

    index: np.ndarray
    loc: Array
    variance: Array
    drawn: Array


class _Normal(NamedTuple):
    """Sums of products of rows' numbers with latents, not drawn yet: entries that are independent within every row."""

    loc: Array
    variance: Array


class _Seen(NamedTuple):
    """A number of the trace, and whether the rows at hand had a part in it."""

    value: Any
    of_rows: bool


class _Walk:
    """One evaluation of a trace: what is seen by products alone is drawn by row, the other coordinates once.

    A second trace, of one row more, tells the axis of rows from others that are as long.

    ``shared``: Bool[D], coordinates that all rows see at the same draw.
    """

    def __init__(self, rows: int, shared: np.ndarray, key: Any):
        self.rows, self.shared, self.key, self.count = rows, shared, key, 0
        # Coordinates that rows saw by a product, and those that they saw otherwise, or twice.
        self.by_row, self.otherwise = np.zeros_like(shared), np.zeros_like(shared)

    def walk(self, jaxpr: Any, longer: Any, consts: list, seen: list[_Seen]) -> list[_Seen]:
        """What a jaxpr makes of its inputs; the same jaxpr with a row more says where rows are."""
        found = dict(zip(jaxpr.constvars, (_Seen(c, False) for c in consts), strict=True))
        found |= dict(zip(jaxpr.invars, seen, strict=True))
        users = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        uses = Counter(v for v in users if not isinstance(v, Literal))

        def read(var: Any) -> _Seen:
            return _Seen(var.val, False) if isinstance(var, Literal) else found[var]

        for eqn, other in zip(jaxpr.eqns, longer.eqns, strict=True):
            for var, made in zip(eqn.outvars, self._equation(eqn, other, [read(v) for v in eqn.invars]), strict=True):
                # All who read a sum must see the same draw of it: only its one reader may add to it first.
                pending = isinstance(made.value, _Normal) and uses[var] == 1
                found[var] = made if pending or isinstance(made.value, _Latents) else self._settled(made)
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, other: Any, seen: list[_Seen]) -> list[_Seen]:
        of_rows, name = any(s.of_rows for s in seen), eqn.primitive.name
        values = [s.value for s in seen]
        if not any(isinstance(v, _Latents | _Normal) for v in values):
            return [_Seen(v, of_rows) for v in _bind(eqn, values)]
        if name in CALLS:
            # A sum may have several readers inside.
            inside = [self._settled(s) if isinstance(s.value, _Normal) else s for s in seen]
            jaxpr, consts = called_jaxpr(eqn)
            return self.walk(jaxpr, called_jaxpr(other)[0], consts, inside)
        if name in _PLACED and isinstance(values[0], _Latents):
            return [_Seen(v, of_rows) for v in _place(eqn, values[0])]
        rules = {"broadcast_in_dim": self._spread, "dot_general": self._product, "add": self._sum, "add_any": self._sum}
        made = rules[name](eqn, other, seen) if name in rules else None
        if made is not None:
            return [_Seen(made, isinstance(made, _Normal))]
        return [_Seen(v, True) for v in _bind(eqn, [self._settled(s).value for s in seen])]

    def _spread(self, eqn: Any, other: Any, seen: list[_Seen]) -> _Latents | _Normal | None:
        """Latents with axes of length 1 more, or one for every row."""
        value, shape = seen[0].value, eqn.outvars[0].aval.shape
        if not isinstance(value, _Latents):
            return None
        axes = _axes_of_rows(eqn.outvars[0], other.outvars[0])
        if not axes and math.prod(shape) == value.loc.size:
            return _place(eqn, value)[0]
        # Spread over rows alone: over anything else, a row would see several draws of one latent.
        if len(axes) != 1 or math.prod(shape) != value.loc.size * self.rows or not self._take(value.index):
            return None
        return _Normal(*(_bind(eqn, [x])[0] for x in (value.loc, value.variance)))

    def _product(self, eqn: Any, other: Any, seen: list[_Seen]) -> _Normal | None:
        """Rows' numbers times latents; None where it is not that."""
        contracted, batched = eqn.params["dimension_numbers"]
        ours = [isinstance(s.value, _Latents) for s in seen]
        if sum(ours) != 1 or any(map(len, batched)):
            return None
        at = ours.index(True)
        given, latents = self._settled(seen[1 - at]), seen[at].value
        free = [i for i in range(given.value.ndim) if i not in contracted[1 - at]]
        axes = _axes_of_rows(eqn.invars[1 - at], other.invars[1 - at])
        # A row with several sets of numbers (times, places) sees one draw of the latents with all of them.
        alone = math.prod(given.value.shape[i] for i in free) == self.rows
        if not given.of_rows or len(axes) != 1 or axes[0] not in free or not alone or not self._take(latents.index):
            return None

        def product(x: Array, w: Array) -> Array:
            return _bind(eqn, [x, w] if at == 1 else [w, x])[0]

        return _Normal(product(given.value, latents.loc), product(jnp.square(given.value), latents.variance))

    def _sum(self, eqn: Any, other: Any, seen: list[_Seen]) -> _Normal | None:
        """What is not drawn yet plus something; None where it has to be drawn first."""
        (a, b), shape = (s.value for s in seen), eqn.outvars[0].aval.shape
        if not isinstance(a, _Normal):
            a, b = b, a
        # An entry that is spread over several would be drawn for each of them.
        if not isinstance(a, _Normal) or a.loc.shape != shape:
            return None
        if isinstance(b, _Latents):
            spread = [i for i, (n, own) in enumerate(zip(shape, b.loc.shape, strict=True)) if n != own]
            if spread != _axes_of_rows(eqn.outvars[0], other.outvars[0]) or len(spread) != 1 or not self._take(b.index):
                return None
        elif not isinstance(b, _Normal):
            return _Normal(a.loc + b, a.variance)
        return (
            _Normal(a.loc + b.loc, a.variance + b.variance) if isinstance(b, _Latents) or b.loc.shape == shape else None
        )

    def _take(self, index: np.ndarray) -> bool:
        """Whether rows may have draws of their own of these coordinates: each is seen here once, and nowhere else."""
        flat = index.reshape(-1)
        if np.any(self.shared[flat] | self.by_row[flat]) or len(np.unique(flat)) < len(flat):
            return False
        self.by_row[flat] = True
        return True

    def _settled(self, seen: _Seen) -> _Seen:
        """A draw in place of what is not drawn yet."""
        value = seen.value
        if isinstance(value, _Latents):
            self.otherwise[value.index.reshape(-1)] = True
            return seen._replace(value=value.drawn)
        if not isinstance(value, _Normal):
            return seen
        self.count += 1
        noise = jax.random.normal(jax.random.fold_in(self.key, self.count), value.loc.shape, value.loc.dtype)
        return seen._replace(value=value.loc + jnp.sqrt(value.variance + _LEAST) * noise)


def _axes_of_rows(var: Any, longer: Any) -> list[int]:
    return [i for i, (n, more) in enumerate(zip(var.aval.shape, longer.aval.shape, strict=True)) if n != more]


def _place(eqn: Any, latents: _Latents) -> list[_Latents]:
    with jax.ensure_compile_time_eval():
        index = [np.asarray(x) for x in _bind(eqn, [jnp.asarray(latents.index)])]
    parts = [_bind(eqn, [x]) for x in (latents.loc, latents.variance, latents.drawn)]
    return [_Latents(*each) for each in zip(index, *parts, strict=True)]


def _bind(eqn: Any, values: list) -> list:
    params = eqn.primitive.get_bind_params(eqn.params)
    # Older JAX gives functions apart.
    functions, params = params if isinstance(params, tuple) else ((), params)
    found = eqn.primitive.bind(*functions, *values, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def at_rows_draws(
    density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]],
    chunk: Any,
    rows: int,
    loc: Float[Array, "D"],
    sd: Float[Array, "D"],
    key: Any,
) -> tuple[Float[Array, ""], Float[Array, "D"], Float[Array, "D"]]:
    """A log-likelihood at a draw of a mean-field q that is each row's own, and what it says of q's location and variances.

    Rows' terms must be conditionally independent given the latents, as those of a partitioned plate are. Latents that rows see
    otherwise than by one product with numbers of the rows (and what is added to it for every row) are drawn once. ``density``:
    ``(chunk, point) -> nats``; ``chunk``: names the rows, along the first axis of its arrays; ``rows``: how many they are;
    ``loc``: location of q; ``sd``: its sds; ``key``: of the draws. Returns unbiased estimates of ``E[f]`` in nats, of ``E[grad
    f]``, and of the diagonal of ``E[hess f]``. Raises PVIError where no latent is seen by a product alone.
    """
    closed = jax.make_jaxpr(density)(chunk, loc)
    more = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows + 1, *x.shape[1:]), x.dtype), chunk)
    longer = jax.make_jaxpr(density)(more, loc)
    if [e.primitive.name for e in closed.eqns] != [e.primitive.name for e in longer.eqns]:
        raise PVIError(
            f"local_reparameterisation=True: what the model does with {rows} rows and with {rows + 1} differs by more than their "
            "number, so that it cannot be told which axes are rows: leave it out."
        )
    shared_key, own_key = jax.random.split(key)
    noise = jax.random.normal(shared_key, loc.shape, loc.dtype)

    def value(loc: Array, variance: Array) -> Array:
        shared = np.zeros(loc.shape, bool)
        latents = _Latents(np.arange(loc.size), loc, variance, loc + jnp.sqrt(variance) * noise)
        seen = [_Seen(x, True) for x in jax.tree.leaves(chunk)] + [_Seen(latents, False)]
        while True:
            walk = _Walk(rows, shared, own_key)
            (found,) = walk.walk(closed.jaxpr, longer.jaxpr, list(closed.consts), seen)
            # Who is seen in both ways has one draw for both.
            if not np.any(walk.by_row & walk.otherwise):
                break
            shared = shared | walk.otherwise
        if not np.any(walk.by_row):
            raise PVIError(
                "local_reparameterisation=True: no latent is seen by rows through a product with their own numbers alone, as the "
                "weights of `X @ w + b` are (without batch axes, and in one place of the model). Leave it out."
            )
        return found.value

    nats, (gradient, by_variance) = value_and_grad(value, argnums=(0, 1))(loc, jnp.square(sd))
    return nats, gradient, 2.0 * by_variance
