"""Hamiltonian chains that take their steps together: all chains of all groups make the same number of leapfrog steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._moments import MCMCMoments

# A quarter of the period of a standard normal: draws of a Gaussian that q has matched are then independent.
_QUARTER = 0.5 * math.pi
# Step sizes vary by this share from transition to transition, so that no period of the trajectory is met again and again.
_JITTER = 0.15
# Nats of energy error beyond which a trajectory counts as divergent.
_DIVERGENT = 1000.0
# Step sizes in whitened coordinates stay within this range, and are adapted by a gain that falls as t to this power.
_LEAST_STEP, _LARGEST_STEP, _FADING = 1e-3, 1.6, 0.6


class LockstepDraws(NamedTuple):
    """What the chains of one factor leave; leading axes C (chains) and S (draws)."""

    eps: Float[Array, "C S D"]
    score: Float[Array, "C S D"]
    log_density: Float[Array, "C S"]
    diverging: Bool[Array, "C S"]
    accepted: Float[Array, "C S"]
    last: Float[Array, "C D"]
    step_size: Float[Array, "C"]


class _Walk(NamedTuple):
    eps: Float[Array, "C D"]
    # Negative log density and its gradient.
    energy: Float[Array, "C"]
    slope: Float[Array, "C D"]
    log_step: Float[Array, "C"]


def run_lockstep(
    settings: MCMCMoments,
    energy: Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]],
    key: Any,
    places: Float[Array, "C D"],
    step_size: Float[Array, "C"],
    fresh: Bool[Array, ""],
) -> LockstepDraws:
    """Hamiltonian Monte Carlo of all chains of one factor, in step.

    NUTS decides after every leapfrog step whether to go on, lane by lane: side by side, every group waits for the deepest
    tree of all. In coordinates whitened by q, where the tilted distribution is about a standard normal, a quarter
    period is the best length and known beforehand: ``ceil((pi / 2) / step)`` leapfrog steps of the smallest step of the
    group's chains, a handful, and no trees. Steps are jittered by 15%.

    Args:
        settings: lengths and aims.
        energy: a point to the negative log density and its gradient there.
        key: random key.
        places: where the chains start; finite.
        step_size: their step sizes.
        fresh: whether to begin with a whole warm-up.

    Returns:
        The draws.

    References:
        Neal, MCMC using Hamiltonian dynamics, Handbook of Markov Chain Monte Carlo (2011), sections 5.3 and 5.4.2.
    """
    many = jax.vmap(energy)
    burn = jnp.where(fresh, settings.num_warmup, settings.num_refresh)

    def draw(walk: _Walk, index):
        # What is thrown away comes before the first one, in the same loop: a transition is compiled once.
        def one(t, carry):
            adapts = fresh & (index == 0)
            rate = jnp.where(adapts, (1.0 + t) ** -_FADING, 0.0).astype(places.dtype)
            return _move(settings, many, carry[0], jax.random.fold_in(jax.random.fold_in(key, index), t), rate)

        flags = jnp.zeros(walk.energy.shape, bool), jnp.zeros_like(walk.energy)
        walk, diverging, chance = jax.lax.fori_loop(0, jnp.where(index == 0, burn, 1), one, (walk, *flags))
        return walk, (walk.eps, -walk.slope, -walk.energy, diverging, chance)

    value, slope = _finite(many(places))
    first = _Walk(places, value, slope, jnp.log(step_size))
    walk, found = jax.lax.scan(draw, first, jnp.arange(settings.num_samples + 1))
    eps, score, log_density, diverging, accepted = (jnp.moveaxis(x[1:], 0, 1) for x in found)
    return LockstepDraws(eps, score, log_density, diverging, accepted, walk.eps, jnp.exp(walk.log_step))


def _finite(values: tuple) -> tuple:
    """Energies and slopes with infinite energy where there is none."""
    value, slope = values
    return jnp.where(jnp.isfinite(value), value, jnp.inf), jnp.where(jnp.isfinite(slope), slope, 0.0)


def _move(settings: MCMCMoments, many: Callable, walk: _Walk, key: Any, rate: Float[Array, ""]) -> tuple:
    """One transition of all chains, whether each diverged, and its chance of being taken; ``rate`` adapts the steps."""
    noise_key, turn_key, jitter_key = jax.random.split(key, 3)
    step = jnp.exp(walk.log_step)
    most = 2**settings.max_tree_depth - 1
    steps = jnp.clip(jnp.ceil(_QUARTER / jnp.min(step)), 1, most).astype(jnp.int32)
    jitter = 1.0 + _JITTER * (2.0 * jax.random.uniform(jitter_key, step.shape, step.dtype) - 1.0)
    size = (step * jitter)[:, None]
    momentum = jax.random.normal(noise_key, walk.eps.shape, walk.eps.dtype)

    def leap(_, state):
        eps, push, _, slope = state
        push = push - 0.5 * size * slope
        eps = eps + size * push
        value, slope = _finite(many(eps))
        return eps, push - 0.5 * size * slope, value, slope

    eps, push, value, slope = jax.lax.fori_loop(0, steps, leap, (walk.eps, momentum, walk.energy, walk.slope))
    gap = value - walk.energy + 0.5 * jnp.sum(push**2 - momentum**2, axis=-1)
    gap = jnp.where(jnp.isnan(gap), jnp.inf, gap)
    chance = jnp.exp(-jnp.maximum(gap, 0.0))
    taken = jax.random.uniform(turn_key, chance.shape, chance.dtype) < chance
    wanted = walk.log_step + rate * (chance - settings.target_accept)
    log_step = jnp.clip(wanted, math.log(_LEAST_STEP), math.log(_LARGEST_STEP)).astype(walk.log_step.dtype)
    new = _Walk(
        jnp.where(taken[:, None], eps, walk.eps),
        jnp.where(taken, value, walk.energy),
        jnp.where(taken[:, None], slope, walk.slope),
        log_step,
    )
    return new, gap > _DIVERGENT, chance
