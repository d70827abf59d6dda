"""Moments of tilted distributions from Markov chains: NUTS, Hamiltonian ones in step, Langevin; what chains say of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer.hmc import hmc

from .._numerics import all_finite, inverse_root, scaled_cholesky, solve_lower, symmetrise
from ..families import GaussianFamily, GaussianMoments, GaussianNatural
from ._tilted import MCMCMoments, Proposal, Tilted, matched_change, normal_cloud, proper_share, shifted_normals

# ------------------------------------------------------------------------------------------------------- chains in step
# Hamiltonian chains that take their steps together: all chains of all groups make the same number of leapfrog steps.

# A quarter of the period of a standard normal: draws of a Gaussian that q has matched are then independent.
_QUARTER = 0.5 * math.pi
# Step sizes vary by this share from transition to transition, so that no period of the trajectory is met again and again.
_JITTER = 0.15
# Nats of energy error beyond which a trajectory counts as divergent.
_DIVERGENT = 1000.0
# Step sizes in whitened coordinates stay within this range, and are adapted by a gain that falls as t to this power.
_LEAST_LEAP, _LARGEST_LEAP, _FADING = 1e-3, 1.6, 0.6


class LockstepDraws(NamedTuple):
    """What the chains of one factor leave; leading axes C (chains) and S (draws)."""

    eps: Float[Array, "C S D"]
    score: Float[Array, "C S D"]
    log_density: Float[Array, "C S"]
    diverging: Bool[Array, "C S"]
    accepted: Float[Array, "C S"]
    last: Float[Array, "C D"]
    step_size: Float[Array, "C"]


class _LockstepWalk(NamedTuple):
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

    NUTS decides after every leapfrog step whether to go on, lane by lane: side by side, every group waits for the deepest tree
    of all. In coordinates whitened by q, where the tilted distribution is about a standard normal, a quarter period is the best
    length and known beforehand: ``ceil((pi / 2) / step)`` leapfrog steps of the smallest step of the group's chains, a handful,
    and no trees. Steps are jittered by 15%. ``energy``: a point to the negative log density and its gradient there; ``places``:
    where the chains start; finite; ``fresh``: whether to begin with a whole warm-up.

    References:
        Neal, MCMC using Hamiltonian dynamics, Handbook of Markov Chain Monte Carlo (2011), sections 5.3 and 5.4.2.
    """
    many = jax.vmap(energy)
    burn = jnp.where(fresh, settings.num_warmup, settings.num_refresh)

    def draw(walk: _LockstepWalk, index):
        # What is thrown away comes before the first one, in the same loop: a transition is compiled once.
        def one(t, carry):
            adapts = fresh & (index == 0)
            rate = jnp.where(adapts, (1.0 + t) ** -_FADING, 0.0).astype(places.dtype)
            return _move(settings, many, carry[0], jax.random.fold_in(jax.random.fold_in(key, index), t), rate)

        flags = jnp.zeros(walk.energy.shape, bool), jnp.zeros_like(walk.energy)
        walk, diverging, chance = jax.lax.fori_loop(0, jnp.where(index == 0, burn, 1), one, (walk, *flags))
        return walk, (walk.eps, -walk.slope, -walk.energy, diverging, chance)

    value, slope = _finite(many(places))
    first = _LockstepWalk(places, value, slope, jnp.log(step_size))
    walk, found = jax.lax.scan(draw, first, jnp.arange(settings.num_samples + 1))
    eps, score, log_density, diverging, accepted = (jnp.moveaxis(x[1:], 0, 1) for x in found)
    return LockstepDraws(eps, score, log_density, diverging, accepted, walk.eps, jnp.exp(walk.log_step))


def _finite(values: tuple) -> tuple:
    """Energies and slopes with infinite energy where there is none."""
    value, slope = values
    return jnp.where(jnp.isfinite(value), value, jnp.inf), jnp.where(jnp.isfinite(slope), slope, 0.0)


def _move(settings: MCMCMoments, many: Callable, walk: _LockstepWalk, key: Any, rate: Float[Array, ""]) -> tuple:
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
    log_step = jnp.clip(wanted, math.log(_LEAST_LEAP), math.log(_LARGEST_LEAP)).astype(walk.log_step.dtype)
    new = _LockstepWalk(
        jnp.where(taken[:, None], eps, walk.eps),
        jnp.where(taken, value, walk.energy),
        jnp.where(taken[:, None], slope, walk.slope),
        log_step,
    )
    return new, gap > _DIVERGENT, chance


# ----------------------------------------------------------------------------------------------- chains by mini-batches
# Stochastic-gradient chains: Langevin dynamics of tilted distributions from mini-batches of a group's rows.

# Steps in whitened coordinates, as a share of the smallest scale that the curvature shows, and at most.
_SHARE, _LARGEST_DRIFT = 0.5, 0.5
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


class _LangevinWalk(NamedTuple):
    eps: Float[Array, "C D"]
    push: Float[Array, "C D"]
    # Two estimates of the gradient of the negative log density.
    slope: Float[Array, "C 2 D"]
    lost: Bool[Array, "C"]


def safe_step(slope: Callable[[Float[Array, "D"]], Float[Array, "D"]], key: Any, dim: int, dtype: Any) -> Any:
    """A step at which the dynamics are stable and nearly exact: half of the narrowest scale about q's location.

    ``slope``: whitened coordinates to the whole gradient of the negative log density. Returns the step, by power iteration on
    differences of the gradient.
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
    return jnp.minimum(_LARGEST_DRIFT, _SHARE / jnp.sqrt(jnp.maximum(largest, 1e-6)))


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
    elsewhere. The noise of mini-batches heats the chains; it is measured by the difference of two halves of a batch, and as
    much less noise is added. ``slopes``: a point and a key to two independent unbiased estimates of the gradient of the
    negative log density; ``places``: where the chains start; finite; ``fresh``: whether to begin with a whole warm-up.

    References:
        Leimkuhler and Matthews, Rational construction of stochastic numerical methods for molecular sampling (2013), BAOAB.
        Chen, Fox and Guestrin, Stochastic gradient Hamiltonian Monte Carlo, ICML 2014, section 3.3 (noise that is already there).
    """
    count = places.shape[0]
    burn = jnp.where(fresh, settings.num_warmup, settings.num_refresh)
    keep = jnp.exp(-_FRICTION * step)

    def estimate(eps, key):
        return jax.vmap(slopes)(eps, jax.random.split(key, count))

    def move(walk: _LangevinWalk, key: Any) -> _LangevinWalk:
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

        return _LangevinWalk(here(eps, 0.0), here(push, 0.0), here(slope, 0.0), lost)

    def draw(walk: _LangevinWalk, index):
        def one(t, walk):
            return move(walk, jax.random.fold_in(jax.random.fold_in(key, index), t))

        walk = jax.lax.fori_loop(0, jnp.where(index == 0, burn, 1), one, walk)
        return walk, (walk.eps, -walk.slope, walk.lost)

    push_key, start_key = jax.random.split(jax.random.fold_in(key, 2**30))
    push = jax.random.normal(push_key, places.shape, places.dtype)
    first = _LangevinWalk(places, push, estimate(places, start_key), jnp.zeros((count,), bool))
    walk, found = jax.lax.scan(draw, first, jnp.arange(settings.num_samples + 1))
    eps, halves, lost = (jnp.moveaxis(x[1:], 0, 1) for x in found)
    return LangevinDraws(eps, halves, lost, walk.eps)


# ---------------------------------------------------------------------------------------------------------------- NUTS

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

    ``settings``: how many there are; ``dim``: D; ``dtype``: floating dtype; ``used``: whether moments are taken by them.
    Returns the memory of a factor that no visit has seen.
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

    ``energy``: a point to the negative log density and its gradient there; ``fresh``: whether to start anew: from draws of q,
    with a whole warm-up.
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

    ``slope``: a point to the whole gradient of the negative log density; ``slopes``: a point and a key to two independent
    unbiased estimates of it; ``fresh``: whether to start anew: from draws of q, with a whole warm-up. Returns the draws,
    without log densities.
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

    ``memory``: before it; ``positions``: where they stand now, in coordinates that do not change with q; ``kept``: whether the
    visit counts; where it does not they stand where they stood, to start anew.
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

    start, kernel = hmc(potential, algo="NUTS")
    state = start(
        place,
        num_warmup=settings.num_warmup,
        step_size=step_size,
        adapt_mass_matrix=False,
        target_accept_prob=settings.target_accept,
        rng_key=key,
        max_tree_depth=settings.max_tree_depth,
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

    Returns a number that tends to 1; NaN where nothing moves.

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

    Returns squared standard errors; batches of all chains are compared, so that chains that disagree count.

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

    Returns the number of independent draws whose mean is as uncertain.
    """
    total = values.shape[0] * values.shape[1]
    spread = jnp.var(values.reshape(total, -1), axis=0)
    return jnp.min(jnp.minimum(spread / batch_variance(values), float(total)))


# ------------------------------------------------------------------------------------------- tilted moments from chains
# Moments of the tilted distribution from Markov chains, with the score as control variate, and its normaliser by a
# bridge.

# Draws per latent from which on the control variates' coefficients are fitted jointly, else coordinate by coordinate.
_DRAWS_PER_LATENT = 8
# Steps of the bridge's fixed-point iteration, which converges linearly and fast.
_BRIDGE_STEPS = 40
# Antithetic pairs by which chains on mini-batches tell the evidence.
_EVIDENCE_PAIRS = 4


def from_chains(
    family: GaussianFamily,
    look: Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]],
    q: GaussianNatural,
    site: GaussianNatural,
    power: float | Float[Array, ""],
    key: Any,
    settings: MCMCMoments,
    memory: Chains | None = None,
    look_rows: Callable[[Float[Array, "D"], Float[Array, "D"], Any], Float[Array, "2 D"]] | None = None,
) -> Tilted:
    r"""Moments of ``q (p / t)^alpha`` from NumPyro's chains, in coordinates ``theta = m + S eps`` whitened by q.

    The chains' log density there, with ``S S^T`` the covariance of q, and its gradient, the score s, are

        log pi(eps) = -1/2 |eps|^2 + alpha [log p(theta) - log t(theta)],
        s(eps)      = -eps + alpha S^T [grad log p - (h_t - Lambda_t theta)].

    Under pi the score has mean 0 and ``E[s (eps - c)^T] = -1`` for any c, so with any matrix B

        mu = mean(eps) + B mean(s),      d = eps - mu,
        C  = mean[d d^T + 1/2 (B s d^T + d s^T B)] + B

    estimate its mean and covariance. B comes from the regression of eps on s: for a Gaussian pi it is the covariance,
    and both are exact, whatever the draws. (It is fitted to the same draws, which costs a bias of the order of one over
    their number times what the score leaves unexplained.) The power is halved while the cavity
    ``eta_q - alpha eta_m`` is not normalisable, before any chain moves.

    Chains give no normaliser. ``value``, the factor's share of the evidence, is a bridge between the chains and as many draws
    of the Gaussian g with the moments found, ``Z = E_g[h pi] / E_pi[h g]`` with ``h = 1 / (s_1 pi + s_2 Z g)``; its
    variance counts the chains' autocorrelation by batch means.

    Under ``kernel="langevin"`` scores are estimates from mini-batches, ``grad log p(m) + (N/B) sum_b [grad log p_b(theta) -
    grad log p_b(m)]``. Their noise has mean zero and leaves the formulas as they are, but would shrink B, so that the score's
    own covariance is taken from the two halves of each batch. Mean and covariance are then also rid of what the steps and
    the noise of batches do to the draws, as far as the tilted distribution is Gaussian. The evidence is the mean of
    ``pi / g`` over a few draws of g.

    Args:
        family: the Gaussian family of q.
        look: a point to the factor's log density, nats, and its gradient.
        q: natural parameters of q.
        site: the factor's site.
        power: alpha.
        key: random key.
        settings: lengths and kernel.
        memory: where the chains stood; None starts them anew.
        look_rows: a point, another and a key to two independent unbiased estimates, each from half of a mini-batch, of the
            difference of the gradients at both; None where all rows are read.

    Returns:
        What moment matching asks for, and the chains after this visit as its ``memory``.

    References:
        Mira, Solgi and Imparato, Zero variance Markov chain Monte Carlo, Stat. Comput. 23 (2013), section 2. Meng and Wong,
        Simulating ratios of normalizing constants, Stat. Sinica 6 (1996), eq. 4.1. Baker et al., Control variates for
        stochastic gradient MCMC, Stat. Comput. 29 (2019), section 3.
    """
    dtype, moments = q.precision_mean.dtype, family.moments(q)
    memory = no_chains(settings, family.dim, dtype, True) if memory is None else memory
    share, proper = proper_share(family, q, site, power, dtype)
    used = power * share

    def site_image(theta):
        return family.precision_product(site, theta)

    def energy(eps):
        theta = family.draw(moments, eps)
        value, slope = look(theta)
        image = site_image(theta)
        ratio = value - theta @ (site.precision_mean - 0.5 * image)
        pulled = _pull(family, moments, slope - site.precision_mean + image)
        return 0.5 * jnp.sum(eps**2) - used * ratio, eps - used * pulled

    chain_key, bridge_key = jax.random.split(key)
    warm = jax.vmap(lambda x: _whiten(family, q, moments, x))(memory.positions)
    fresh = (memory.visits == 0) | ~jnp.all(jnp.isfinite(warm))
    if settings.kernel == "langevin":
        slopes = _noisy_slopes(
            family, moments, look, look_rows, lambda theta: site.precision_mean - site_image(theta), used
        )
        draws = run_noisy_chains(settings, lambda eps: energy(eps)[1], slopes, chain_key, warm, fresh)
    else:
        draws = run_chains(settings, energy, chain_key, warm, memory.step_size, fresh)
    mean, covariance, root, fits, noise = _controlled(family, draws)
    change = matched_change(family, mean, covariance, q, Proposal(q, moments)) * (1.0 / used)
    normaliser = _bridge if draws.halves is None else _by_gaussian
    value, variance = normaliser(energy, bridge_key, draws, mean, root)
    ess = effective_size(jnp.concatenate([draws.eps, (draws.eps - mean) ** 2], axis=-1))
    kept = draws.finite & jnp.all(jnp.isfinite(draws.score)) & jnp.all(jnp.isfinite(draws.eps))
    after = kept_chains(memory, family.draw(moments, draws.last), draws, kept)
    return Tilted(
        change,
        value / used,
        variance / used**2,
        ess,
        noise / used,
        share,
        jnp.int32(0),
        jnp.array(False),
        draws.finite,
        kept & proper & fits,
        after,
    )


def _noisy_slopes(
    family: GaussianFamily,
    moments: GaussianMoments,
    look: Callable,
    look_rows: Callable | None,
    own: Callable,
    used: Any,
) -> Callable[[Float[Array, "D"], Any], Float[Array, "2 D"]]:
    """Two independent estimates of the gradient of ``-log pi``; ``own(theta)`` is the gradient of the site's ``log t``."""
    middle = look(moments.loc)[1]

    def slopes(eps, key):
        theta = family.draw(moments, eps)
        if look_rows is None:
            slope = jnp.broadcast_to(look(theta)[1], (2, *theta.shape))
        else:
            slope = middle + look_rows(theta, moments.loc, key)
        return eps - used * jax.vmap(lambda g: _pull(family, moments, g))(slope - own(theta))

    return slopes


def _pull(family, moments: GaussianMoments, slope: Float[Array, "D"]) -> Float[Array, "D"]:
    """``S^T g``: a gradient in theta as one in whitened coordinates."""
    return slope @ moments.scale if family.full else moments.scale * slope


def _whiten(family, q: GaussianNatural, moments: GaussianMoments, point: Float[Array, "D"]) -> Float[Array, "D"]:
    """``S^-1 (theta - m)``."""
    gap = point - moments.loc
    return (family.precision_product(q, gap) @ moments.scale) if family.full else gap / moments.scale


def _controlled(family: GaussianFamily, draws: ChainDraws) -> tuple:
    """Mean, covariance (or variances), its root, whether it is one, and the largest standard error of the mean."""
    dim = family.dim
    eps, score = draws.eps.reshape(-1, dim), draws.score.reshape(-1, dim)
    joint = eps.shape[0] >= _DRAWS_PER_LATENT * dim
    halves = None if draws.halves is None else draws.halves.reshape(-1, 2, dim)
    slope = _coefficients(eps, score, joint, halves)
    follow = score @ slope.T if joint else score * slope
    mean = jnp.mean(eps + follow, axis=0)
    rest = (draws.eps.reshape(-1, dim) + follow).reshape(draws.eps.shape)
    noise = jnp.sqrt(jnp.max(batch_variance(rest)))
    center = eps - mean
    if not (joint or family.full):
        raw, spread = jnp.mean(center**2, axis=0), jnp.mean(center**2 + follow * center, axis=0) + slope
        good = jnp.all(spread > 0)
        variance = jnp.where(good, spread, raw)
        return mean, variance, jnp.sqrt(variance), jnp.all(variance > 0), noise
    matrix = symmetrise(slope) if joint else jnp.diag(slope)
    follow = score @ matrix
    raw = symmetrise(center.T @ center) / eps.shape[0]
    found = raw + symmetrise(follow.T @ center) / eps.shape[0] + matrix
    # Few draws of a wide tail may leave the corrected one without a root; the draws' own has one.
    root, good = scaled_cholesky(found)
    plain, fits = scaled_cholesky(raw)
    covariance, root = jnp.where(good, found, raw), jnp.where(good, root, plain)
    return mean, covariance if family.full else jnp.diagonal(covariance), root, good | fits, noise


def _coefficients(
    eps: Float[Array, "N D"], score: Float[Array, "N D"], joint: bool, halves: Float[Array, "N 2 D"] | None
) -> Array:
    """B with ``eps`` nearest to ``const - B s``; the identity (q's own covariance) where the scores determine none.

    The noise of two halves of a batch is independent, and does not count in the scores' covariance.
    """
    center, slope = eps - jnp.mean(eps, axis=0), score - jnp.mean(score, axis=0)
    pair = (slope, slope) if halves is None else tuple(jnp.moveaxis(halves - jnp.mean(halves, axis=0), 1, 0))
    if not joint:
        square = jnp.sum(pair[0] * pair[1], axis=0)
        return jnp.where(square > 0, -jnp.sum(slope * center, axis=0) / jnp.where(square > 0, square, 1.0), 1.0)
    factor, good = scaled_cholesky(symmetrise(pair[0].T @ pair[1]))
    root = inverse_root(factor)
    # (G^-1 s^T eps)^T with G = s^T s.
    found = -(center.T @ slope) @ root @ root.T
    return jnp.where(good, found, jnp.eye(eps.shape[1], dtype=eps.dtype))


def _bridge(energy: Callable, key: Any, draws: ChainDraws, mean, root) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """``log E_q[(p / t)^alpha]`` (the integral of pi over that of a standard normal) and its Monte Carlo variance."""
    count, length, dim = draws.eps.shape
    cloud = normal_cloud(key, dim, count * length, mean.dtype).eps
    points = mean + (cloud @ root.T if root.ndim == 2 else cloud * root)
    scale = jnp.sum(jnp.log(jnp.diagonal(root) if root.ndim == 2 else root))
    # As many points at a time as there are chains: no more memory than the chains themselves.
    values = jax.lax.map(lambda some: jax.vmap(lambda x: energy(x)[0])(some), points.reshape(length, count, dim))
    values = jnp.where(jnp.isfinite(values), values, jnp.inf).reshape(-1)
    # log pi - log g, the constants of both normals left out.
    at_g = -values + 0.5 * jnp.sum(cloud**2, axis=-1) + scale
    gap = (draws.eps - mean).reshape(-1, dim)
    if root.ndim == 2:
        back = solve_lower(root, gap.T).T
    else:
        back = gap / root
    at_pi = (draws.log_density.reshape(-1) + 0.5 * jnp.sum(back**2, axis=-1) + scale).reshape(count, length, 1)
    size = jnp.maximum(effective_size(at_pi), 1.0)
    shares = jnp.log(size / (size + at_g.shape[0])), jnp.log(at_g.shape[0] / (size + at_g.shape[0]))

    def terms(value):
        def below(logs):
            return jnp.logaddexp(shares[0] + logs, shares[1] + value)

        return at_g - below(at_g), -below(at_pi)

    def step(_, value):
        top, bottom = terms(value)
        return _log_mean(top) - _log_mean(bottom)

    value = jax.lax.fori_loop(0, _BRIDGE_STEPS, step, _log_mean(at_g))
    top, bottom = (jnp.exp(x - _log_mean(x)) for x in terms(value))
    return value, jnp.var(top) / at_g.shape[0] + batch_variance(bottom)[0]


def _by_gaussian(
    energy: Callable, key: Any, draws: ChainDraws, mean, root
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The same from a few draws of the Gaussian g with the moments found, ``E_g[pi / g]``: so many passes over the rows."""
    half, _ = shifted_normals(key, mean.shape[0], 0, _EVIDENCE_PAIRS, 0, mean.dtype)
    cloud = jnp.concatenate([half, -half])
    points = mean + (cloud @ root.T if root.ndim == 2 else cloud * root)
    scale = jnp.sum(jnp.log(jnp.diagonal(root) if root.ndim == 2 else root))
    values = jax.lax.map(lambda x: energy(x)[0], points)
    logs = 0.5 * jnp.sum(cloud**2, axis=-1) + scale - jnp.where(jnp.isfinite(values), values, jnp.inf)
    value = _log_mean(logs)
    pairs = jnp.mean(jnp.exp(logs - value).reshape(2, -1), axis=0)
    return value, jnp.var(pairs, ddof=1) / _EVIDENCE_PAIRS


def _log_mean(logs: Array) -> Float[Array, ""]:
    return jax.nn.logsumexp(logs) - jnp.log(float(logs.size))
