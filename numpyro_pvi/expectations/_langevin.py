"""Stochastic-gradient chains: Langevin dynamics of tilted distributions from mini-batches of a group's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._moments import MCMCMoments

# Steps in whitened coordinates, as a share of the smallest scale that the curvature shows, and at most.
_SHARE, _LARGEST_STEP = 0.5, 0.5
# Friction in the same coordinates: velocities are forgotten within one posterior sd.
_FRICTION = 1.0
# A chain this many sds of q from where q is has left for good; it begins again at q's location.
_LOST = 1e3
# Evaluations of the whole gradient by which the largest curvature is found.
_POWER_STEPS = 5


class LangevinDraws(NamedTuple):
    """What the chains of one factor leave; leading axes C (chains) and S (draws)."""

    eps: Float[Array, "C S D"]
    # Two independent unbiased estimates of the score at each.
    halves: Float[Array, "C S 2 D"]
    lost: Bool[Array, "C S"]
    last: Float[Array, "C D"]


class _Walk(NamedTuple):
    eps: Float[Array, "C D"]
    push: Float[Array, "C D"]
    # Two estimates of the gradient of the negative log density.
    slope: Float[Array, "C 2 D"]
    lost: Bool[Array, "C"]


def safe_step(slope: Callable[[Float[Array, "D"]], Float[Array, "D"]], key: Any, dim: int, dtype: Any) -> Any:
    """A step at which the dynamics are stable and nearly exact: half of the narrowest scale about q's location.

    Args:
        slope: whitened coordinates to the whole gradient of the negative log density.
        key: random key.
        dim: D.
        dtype: floating dtype.

    Returns:
        The step, by power iteration on differences of the gradient.
    """
    at, start = jnp.zeros((dim,), dtype), jax.random.normal(key, (dim,), dtype)
    base, reach = slope(at), jnp.asarray(0.1, dtype)

    def turn(_, state):
        direction, _ = state
        found = (slope(at + reach * direction) - base) / reach
        size = jnp.linalg.norm(found)
        return jnp.where(size > 0, found / jnp.where(size > 0, size, 1.0), direction), size

    first = start / jnp.linalg.norm(start), jnp.ones((), dtype)
    _, largest = jax.lax.fori_loop(0, _POWER_STEPS, turn, first)
    return jnp.minimum(_LARGEST_STEP, _SHARE / jnp.sqrt(jnp.maximum(largest, 1e-6)))


def run_langevin(
    settings: MCMCMoments,
    slopes: Callable[[Float[Array, "D"], Any], Float[Array, "2 D"]],
    key: Any,
    places: Float[Array, "C D"],
    step: Float[Array, ""],
    fresh: Bool[Array, ""],
) -> LangevinDraws:
    """Underdamped Langevin dynamics of all chains of one factor, in the splitting BAOAB, without an accept step.

    Its draws are exact for a Gaussian at any stable step when gradients are, with an error of second order in the step
    elsewhere. The noise of mini-batches heats the chains; it is measured by the difference of two halves of a batch, and
    as much less noise is added.

    Args:
        settings: lengths.
        slopes: a point and a key to two independent unbiased estimates of the gradient of the negative log density.
        key: random key.
        places: where the chains start; finite.
        step: the step.
        fresh: whether to begin with a whole warm-up.

    Returns:
        The draws.

    References:
        Leimkuhler and Matthews, Rational construction of stochastic numerical methods for molecular sampling (2013), BAOAB.
        Chen, Fox and Guestrin, Stochastic gradient Hamiltonian Monte Carlo, ICML 2014, section 3.3 (noise that is already there).
    """
    count = places.shape[0]
    burn = jnp.where(fresh, settings.num_warmup, settings.num_refresh)
    keep = jnp.exp(-_FRICTION * step)

    def estimate(eps, key):
        return jax.vmap(slopes)(eps, jax.random.split(key, count))

    def move(walk: _Walk, key: Any) -> _Walk:
        noise_key, batch_key = jax.random.split(key)
        push = walk.push - 0.5 * step * jnp.mean(walk.slope, axis=1)
        eps = walk.eps + 0.5 * step * push
        # The mean of both halves has a quarter of the variance of their difference.
        heat = step**2 * jnp.mean((walk.slope[:, 0] - walk.slope[:, 1]) ** 2, axis=0) / 4
        spread = jnp.sqrt(jnp.maximum(1.0 - keep**2 - heat, 0.0))
        push = keep * push + spread * jax.random.normal(noise_key, push.shape, push.dtype)
        eps = eps + 0.5 * step * push
        slope = estimate(eps, batch_key)
        push = push - 0.5 * step * jnp.mean(slope, axis=1)
        size = jnp.max(jnp.abs(eps), axis=1)
        lost = ~(size < _LOST) | ~jnp.all(jnp.isfinite(slope), axis=(1, 2)) | ~jnp.all(jnp.isfinite(push), axis=1)

        def here(new, back):
            return jnp.where(lost.reshape(-1, *(1,) * (new.ndim - 1)), back, new)

        return _Walk(here(eps, 0.0), here(push, 0.0), here(slope, 0.0), lost)

    def draw(walk: _Walk, index):
        def one(t, walk):
            return move(walk, jax.random.fold_in(jax.random.fold_in(key, index), t))

        walk = jax.lax.fori_loop(0, jnp.where(index == 0, burn, 1), one, walk)
        return walk, (walk.eps, -walk.slope, walk.lost)

    push_key, start_key = jax.random.split(jax.random.fold_in(key, 2**30))
    push = jax.random.normal(push_key, places.shape, places.dtype)
    first = _Walk(places, push, estimate(places, start_key), jnp.zeros((count,), bool))
    walk, found = jax.lax.scan(draw, first, jnp.arange(settings.num_samples + 1))
    eps, halves, lost = (jnp.moveaxis(x[1:], 0, 1) for x in found)
    return LangevinDraws(eps, halves, lost, walk.eps)
