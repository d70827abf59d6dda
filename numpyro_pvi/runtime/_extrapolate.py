"""Fixed points of natural-gradient steps by Anderson mixing, with a bound that must rise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, mixing_shares
from ..families import GaussianMoments, GaussianNatural

# Steps remembered, looks at most, and the residual (in posterior sds and their like for the precision) that ends the search.
_WINDOW, _MOST_LOOKS, _STILL = 5, 80, 1e-3
# Shortest step tried.
_SHORTEST = 2.0**-10


class _Search(NamedTuple):
    """The last points and the targets of their steps, oldest first, on a leading axis of ``_WINDOW``."""

    points: Any
    targets: Any
    filled: Int[Array, ""]
    energy: Float[Array, ""]
    # Of the newest point, and the residuals of all points in its coordinates.
    moments: GaussianMoments
    residuals: Float[Array, "W P"]
    step: Float[Array, ""]
    mixing: Bool[Array, ""]
    looks: Int[Array, ""]


def climb(start: Any, found: tuple, value: Callable[[Any], tuple]) -> tuple[Any, Bool[Array, ""]]:
    """Iterate ``point <- target(point)``, extrapolated from the last steps, while an energy rises.

    The combination of past targets is the one whose residuals, in standard coordinates of the newest q, are least (Anderson
    1965; Walker and Ni 2011). Where it is refused the plain step is tried, and halved.

    Args:
        start: a pytree with the field ``natural``, of a full-covariance Gaussian; linear combinations of it stand for linear
            combinations of q.
        found: ``value(start)``.
        value: a point to its ``(energy, size of the energy's terms, moments, target)``.

    Returns:
        The last point, and whether it is one: False where not even the start has a finite energy and a normalisable q.
    """
    energy, _, moments, target = found

    def stacked(x):
        return jnp.zeros((_WINDOW, *x.shape), x.dtype).at[-1].set(x)

    points, targets = jax.tree.map(stacked, start), jax.tree.map(stacked, target)
    one = jnp.ones((), energy.dtype)
    residuals = _residuals(points, targets, moments)
    usable = moments.valid & jnp.isfinite(energy) & all_finite(target)
    first = _Search(points, targets, jnp.int32(1), energy, moments, residuals, one, jnp.array(False), jnp.int32(0))

    def unfinished(s: _Search) -> Bool[Array, ""]:
        still = jnp.linalg.norm(s.residuals[-1]) <= _STILL
        return usable & ~still & (s.looks < _MOST_LOOKS) & (s.step >= _SHORTEST)

    def attempt(s: _Search) -> _Search:
        change = jnp.append(s.residuals[-1] - s.residuals[:-1], s.residuals[-1:], axis=0)
        shares = mixing_shares(change @ change.T, s.filled)
        newest = jax.tree.map(lambda x: x[-1], s.points)

        def candidate(share, target, point):
            return jnp.where(s.mixing, jnp.tensordot(share, target, 1), point + s.step * (target[-1] - point))

        found = jax.tree.map(lambda t, p: candidate(shares, t, p), s.targets, newest)
        energy, size, moments, target = value(found)
        good = (
            moments.valid & all_finite((found, target)) & (energy >= s.energy - 20 * jnp.finfo(size.dtype).eps * size)
        )

        def push(stack, new):
            return jnp.where(good, jnp.roll(stack, -1, axis=0).at[-1].set(new), stack)

        points, targets = jax.tree.map(push, s.points, found), jax.tree.map(push, s.targets, target)
        moments = jax.tree.map(lambda new, old: jnp.where(good, new, old), moments, s.moments)
        filled = jnp.minimum(s.filled + good, _WINDOW)
        # A refused mixture gives way to the plain step; that one is halved, and grows back.
        step = jnp.where(good, jnp.minimum(2 * s.step, 1.0), jnp.where(s.mixing, s.step, 0.5 * s.step))
        energy = jnp.where(good, energy, s.energy)
        residuals = _residuals(points, targets, moments)
        return _Search(points, targets, filled, energy, moments, residuals, step, good, s.looks + 1)

    last = jax.lax.while_loop(unfinished, attempt, first)
    return jax.tree.map(lambda x: x[-1], last.points), usable


def _residuals(points: Any, targets: Any, moments: GaussianMoments) -> Float[Array, "W P"]:
    """What each point's step would change, in standard coordinates: ``S^T (dh - dLambda m)`` and ``S^T dLambda S / sqrt 2``.

    The squared length of such a vector is twice the divergence, to second order.
    """
    change: GaussianNatural = targets.natural - points.natural
    root = moments.scale
    vector = (change.precision_mean - change.precision @ moments.loc) @ root
    matrix = jnp.einsum("ki,wkl,lj->wij", root, change.precision, root, optimize="greedy") / 2**0.5
    return jnp.concatenate([vector, matrix.reshape(matrix.shape[0], -1)], axis=-1)
