"""Moments of the tilted distribution from Markov chains, with the score as control variate, and its normaliser by a bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._numerics import inverse_root, scaled_cholesky, symmetrise
from ..families import GaussianFamily, GaussianMoments, GaussianNatural
from ._chains import (
    ChainDraws,
    Chains,
    batch_variance,
    effective_size,
    kept_chains,
    no_chains,
    run_chains,
    run_noisy_chains,
)
from ._clouds import normal_cloud, shifted_normals
from ._moments import MCMCMoments
from ._tilted import Proposal, Tilted, matched_change, proper_share

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
        back = jax.scipy.linalg.solve_triangular(root, gap.T, lower=True).T
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
