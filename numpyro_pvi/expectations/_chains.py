"""Chains of NumPyro's HMC and NUTS on a density over whitened coordinates, and what they say of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer.hmc import hmc

from .._numerics import all_finite
from ._langevin import run_langevin, safe_step
from ._lockstep import run_lockstep
from ._moments import MCMCMoments

# A quarter of the period of a standard normal: draws of a Gaussian that q has matched are then independent.
_QUARTER = 0.5 * math.pi
# Where chains start, as shares of draws of q: the first at which the density is finite.
_SHARES = (1.0, 0.3, 0.1, 0.0)
# Step sizes in whitened coordinates: the first one, and between which those kept from visit to visit stay.
_FIRST_STEP, _LEAST_STEP, _LARGEST_STEP = 0.5, 1e-3, 1.6


class Chains(NamedTuple):
    """Where one factor's chains stand, kept from visit to visit, and what the last visit found of them."""

    positions: Float[Array, "C D"]
    # In coordinates whitened by q.
    step_size: Float[Array, "C"]
    # 0: the next visit starts anew, with a whole warm-up.
    visits: Int[Array, ""]
    # Whether moments are taken by chains at all: under moments="auto" they are where weights have collapsed.
    used: Bool[Array, ""]
    # Largest split R-hat, share of transitions that diverged, and mean acceptance.
    rhat: Float[Array, ""]
    divergent: Float[Array, ""]
    acceptance: Float[Array, ""]


class ChainDraws(NamedTuple):
    """Draws of all chains in whitened coordinates, and the chains after them."""

    eps: Float[Array, "C S D"]
    # Gradient of the log density there, which has mean zero.
    score: Float[Array, "C S D"]
    # Log density up to the constant of q's own, nats.
    log_density: Float[Array, "C S"]
    last: Float[Array, "C D"]
    step_size: Float[Array, "C"]
    divergent: Float[Array, ""]
    acceptance: Float[Array, ""]
    # Whether every chain found a place to start.
    finite: Bool[Array, ""]
    # Two independent noisy estimates of the score, whose mean it is; None where it is exact.
    halves: Float[Array, "C S 2 D"] | None = None


def no_chains(settings: MCMCMoments, dim: int, dtype: Any, used: bool) -> Chains:
    """Chains that have not started.

    Args:
        settings: how many there are.
        dim: D.
        dtype: floating dtype.
        used: whether moments are taken by them.

    Returns:
        The memory of a factor that no visit has seen.
    """
    count, nothing = settings.num_chains, jnp.asarray(jnp.nan, dtype)
    steps = jnp.full((count,), _FIRST_STEP, dtype)
    return Chains(
        jnp.zeros((count, dim), dtype), steps, jnp.int32(0), jnp.array(used), nothing, jnp.zeros((), dtype), nothing
    )


def run_chains(
    settings: MCMCMoments,
    energy: Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]],
    key: Any,
    warm: Float[Array, "C D"],
    step_size: Float[Array, "C"],
    fresh: Bool[Array, ""],
) -> ChainDraws:
    """Run all chains of one factor side by side.

    Args:
        settings: lengths and kernel.
        energy: a point to the negative log density and its gradient there.
        key: random key.
        warm: where the chains stood.
        step_size: their step sizes.
        fresh: whether to start anew: from draws of q, with a whole warm-up.

    Returns:
        The draws.
    """
    place_key, chain_key = jax.random.split(key)
    count, dim = warm.shape
    places = jnp.where(fresh, jax.random.normal(place_key, (count, dim), warm.dtype), warm)
    places, found = jax.vmap(lambda place: _finite_place(energy, place))(places)
    steps = jnp.where(fresh, _FIRST_STEP, step_size).astype(warm.dtype)

    if settings.kernel == "lockstep":
        drawn = run_lockstep(settings, energy, chain_key, places, steps, fresh)
    else:

        def chain(key, place, step):
            return _one_chain(settings, energy, key, place, step, fresh)

        drawn = jax.vmap(chain)(jax.random.split(chain_key, count), places, steps)
    eps, score, log_density, diverging, accepted, last, adapted = drawn
    # What short visits need of an adaptation: too many refusals shorten the next visit's steps, too few lengthen them.
    kept = adapted * jnp.exp(jnp.mean(accepted, axis=1) - settings.target_accept)
    kept = jnp.clip(kept, _LEAST_STEP, _LARGEST_STEP).astype(warm.dtype)
    share = jnp.mean(diverging.astype(warm.dtype))
    return ChainDraws(eps, score, log_density, last, kept, share, jnp.mean(accepted).astype(warm.dtype), jnp.all(found))


def run_noisy_chains(
    settings: MCMCMoments,
    slope: Callable[[Float[Array, "D"]], Float[Array, "D"]],
    slopes: Callable[[Float[Array, "D"], Any], Float[Array, "2 D"]],
    key: Any,
    warm: Float[Array, "C D"],
    fresh: Bool[Array, ""],
) -> ChainDraws:
    """Run all chains of one factor by Langevin dynamics on estimates of the gradient.

    Args:
        settings: lengths.
        slope: a point to the whole gradient of the negative log density.
        slopes: a point and a key to two independent unbiased estimates of it.
        key: random key.
        warm: where the chains stood.
        fresh: whether to start anew: from draws of q, with a whole warm-up.

    Returns:
        The draws, without log densities.
    """
    place_key, step_key, chain_key = jax.random.split(key, 3)
    places = jnp.where(fresh, jax.random.normal(place_key, warm.shape, warm.dtype), warm)
    step = safe_step(slope, step_key, warm.shape[1], warm.dtype)
    drawn = run_langevin(settings, slopes, chain_key, places, step, fresh)
    one, share = jnp.ones((), warm.dtype), jnp.mean(drawn.lost.astype(warm.dtype))
    sizes = jnp.broadcast_to(step, warm.shape[:1])
    nothing, score = jnp.zeros(drawn.eps.shape[:2], warm.dtype), jnp.mean(drawn.halves, axis=2)
    return ChainDraws(drawn.eps, score, nothing, drawn.last, sizes, share, one, jnp.isfinite(step), drawn.halves)


def kept_chains(memory: Chains, positions: Float[Array, "C D"], draws: ChainDraws, kept: Bool[Array, ""]) -> Chains:
    """The chains after a visit.

    Args:
        memory: before it.
        positions: where they stand now, in coordinates that do not change with q.
        draws: the visit's.
        kept: whether the visit counts; where it does not they stand where they stood, to start anew.

    Returns:
        The memory.
    """
    return Chains(
        jnp.where(kept, positions, memory.positions),
        jnp.where(kept, draws.step_size, memory.step_size),
        jnp.where(kept, memory.visits + 1, 0),
        memory.used,
        split_rhat(draws.eps),
        draws.divergent,
        draws.acceptance,
    )


def _finite_place(energy: Callable, place: Float[Array, "D"]) -> tuple[Float[Array, "D"], Bool[Array, ""]]:
    """The point nearest to a place, on the way to q's location, at which the density and its gradient are finite."""
    candidates = jnp.asarray(_SHARES, place.dtype)[:, None] * place
    good = jax.lax.map(lambda point: all_finite(energy(point)), candidates)
    return candidates[jnp.argmax(good)], jnp.any(good)


def _one_chain(settings: MCMCMoments, energy: Callable, key: Any, place, step_size, fresh: Bool[Array, ""]) -> tuple:
    def potential(point):
        # The gradient comes with the value, in one pass over the rows that may be a loop, which has no reverse mode.
        at = jax.lax.stop_gradient(point)
        value, slope = energy(at)
        value = jnp.where(jnp.isfinite(value), value, jnp.inf)
        return value + jnp.dot(jnp.where(jnp.isfinite(slope), slope, 0.0), point - at)

    nuts = settings.kernel == "nuts"
    start, kernel = hmc(potential, algo="NUTS" if nuts else "HMC")
    length: dict[str, Any] = {"max_tree_depth": settings.max_tree_depth} if nuts else {"trajectory_length": _QUARTER}
    state = start(
        place,
        num_warmup=settings.num_warmup,
        step_size=step_size,
        adapt_mass_matrix=False,
        target_accept_prob=settings.target_accept,
        rng_key=key,
        **length,
    )
    # The kernel adapts its step size before its num_warmup-th transition only.
    state = state._replace(i=jnp.where(fresh, 0, settings.num_warmup).astype(state.i.dtype))
    burn = jnp.where(fresh, settings.num_warmup, settings.num_refresh)

    def draw(state, index):
        # What is thrown away comes before the first one, in the same loop: the kernel is compiled once.
        state = jax.lax.fori_loop(0, jnp.where(index == 0, burn, 1), lambda _, s: kernel(s), state)
        return state, (state.z, -state.z_grad, -state.potential_energy, state.diverging, state.accept_prob)

    state, found = jax.lax.scan(draw, state, jnp.arange(settings.num_samples + 1))
    return *(x[1:] for x in found), state.z, state.adapt_state.step_size


# ------------------------------------------------------------------------------------------------------- diagnostics


def split_rhat(values: Float[Array, "C S K"]) -> Float[Array, ""]:
    """Largest split R-hat of several quantities: chains cut in half, variance between the halves against that within.

    Args:
        values: quantities along every chain.

    Returns:
        A number that tends to 1; NaN where nothing moves.

    References:
        Gelman et al., Bayesian Data Analysis, 3rd ed., section 11.4.
    """
    count, length, width = values.shape
    half = length // 2
    parts = values[:, : 2 * half].reshape(2 * count, half, width)
    within = jnp.mean(jnp.var(parts, axis=1, ddof=1), axis=0)
    between = jnp.var(jnp.mean(parts, axis=1), axis=0, ddof=1)
    return jnp.max(jnp.sqrt((half - 1) / half + between / within))


def batch_variance(values: Float[Array, "C S K"]) -> Float[Array, "K"]:
    """Variance of the mean over all chains, by batch means: batches of about the root of a chain's length.

    Args:
        values: quantities along every chain.

    Returns:
        Squared standard errors; batches of all chains are compared, so that chains that disagree count.

    References:
        Flegal and Jones, Batch means and spectral variance estimators in MCMC, Ann. Statist. 38 (2010).
    """
    count, length, width = values.shape
    size = max(1, math.isqrt(length))
    number = length // size
    means = jnp.mean(values[:, : number * size].reshape(count * number, size, width), axis=1)
    return jnp.var(means, axis=0, ddof=1) / (count * number)


def effective_size(values: Float[Array, "C S K"]) -> Float[Array, ""]:
    """Smallest effective sample size of several quantities, at most the number of draws.

    Args:
        values: quantities along every chain.

    Returns:
        The number of independent draws whose mean is as uncertain.
    """
    total = values.shape[0] * values.shape[1]
    spread = jnp.var(values.reshape(total, -1), axis=0)
    return jnp.min(jnp.minimum(spread / batch_variance(values), float(total)))
