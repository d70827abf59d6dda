"""Moments of the tilted distribution ``q (p / t)^alpha`` from weighted points, and the ways there are to take them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, inverse_root, scaled_cholesky, solve_lower, symmetrise
from ..errors import PVIError
from ..families import GaussianFamily, GaussianMoments, GaussianNatural

# Powers are halved so often before a group's moments are given up: 2^-12 of its power.
TEMPERINGS = 12
# A weighted set of points is believed from this share of its size on, and from twice as many as there are latents.
LEAST_SHARE, LEAST_PER_LATENT = 0.05, 2.0
# Nats below the heaviest point that the border of a grid must lie.
_BORDER = 16.0


class Tilted(NamedTuple):
    """What moment matching one factor asks for, at the power alpha (or a smaller one, ``temper`` times it)."""

    # (eta_qhat - eta_q) / alpha: what a full step adds to the site.
    change: Any
    # (1 / alpha) log E_q[(p / t)^alpha], nats: the factor's share of the evidence; and its Monte Carlo variance.
    value: Float[Array, "*M"]
    variance: Float[Array, "*M"]
    # Effective sample size at the full power, NaN where nothing is sampled.
    ess: Float[Array, "*M"]
    # Standard error of the change of q's mean that a full step makes, in sds, largest coordinate; 0 where nothing is sampled.
    noise: Float[Array, "*M"]
    # Share of the power that was used: 1 unless the cavity was improper or the weights had collapsed.
    temper: Float[Array, "*M"]
    # Rows that kept their sites because their moments were not finite.
    held: Int[Array, "*M"]
    # Whether a finer quadrature rule is needed than was compiled in.
    missed: Bool[Array, "*M"]
    # Whether the factor is finite where q is, and whether a tilted distribution with moments was found.
    finite: Bool[Array, "*M"]
    valid: Bool[Array, "*M"]
    # What to hand to the factor's next visit: where its chains stand; None where nothing is kept.
    memory: Any = None
    # Whether integrals over rows' own latents are not known at points that count; None where there are none.
    unknown: Any = None


def least_ess(count: int, size: int) -> float:
    """The smallest effective sample size of weighted draws that is believed.

    ``count``: draws; ``size``: numbers that are matched. Returns a twentieth of the draws, or twice as many as there are
    numbers.
    """
    return max(LEAST_SHARE * count, LEAST_PER_LATENT * size)


def largest_share(look: Callable[[Array], tuple[Array, Any]], dtype: Any) -> tuple[Array, Array, Any]:
    """The largest share 1, 1/2, 1/4, ... of a power that will do, whether there is any, and what is known of the whole power.

    ``look``: a share to whether it will do, and what else is known of it.
    """
    shares = 0.5 ** jnp.arange(TEMPERINGS + 1, dtype=dtype)
    good, known = jax.vmap(look)(shares)
    return shares[jnp.argmax(good)], jnp.any(good), jax.tree.map(lambda x: x[0], known)


def proper_share(family: Any, q: Any, site: Any, power: Any, dtype: Any) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The largest share of the power at which the cavity can be normalised, and whether there is any."""
    return largest_share(lambda share: (family.in_domain(q - site * (power * share)), ()), dtype)[:2]


def believed(base: Array, ratio: Array, power: Any, least: Any, proper: Callable) -> tuple[Array, Array, Array, Array]:
    """The largest share of the power at which weights ``exp(base + power share ratio)`` are believed, and whether there is any.

    ``base``: log of q over the points' density; ``ratio``: log of the factor over its site; ``least``: the smallest effective
    sample size; ``proper``: a share and the weights' logarithms to whether the tilted distribution can be normalised. Returns
    also the effective sample size at the full power, and whether the factor is finite at the points.
    """

    def look(share: Array) -> tuple[Array, Array]:
        logs = base + power * share * ratio
        weights = jnp.exp(logs - jnp.max(logs))
        ess = jnp.sum(weights) ** 2 / jnp.sum(weights**2)
        return proper(share, logs) & (ess >= least), ess

    finite = jnp.all(~jnp.isnan(ratio)) & jnp.any(jnp.isfinite(ratio))
    return *largest_share(look, ratio.dtype), finite


def unsampled(change: Any, value: Float[Array, ""], finite: Any, valid: Any, temper: Any = 1.0) -> Tilted:
    """What matching moments asks for where nothing is sampled."""
    zero, none, fine = jnp.zeros_like(value), jnp.int32(0), jnp.array(False)
    return Tilted(change, value, zero, zero + jnp.nan, zero, zero + temper, none, fine, finite, valid)


class PointCloud(NamedTuple):
    """Points in the whitened coordinates of a proposal, with their log weights under it."""

    eps: Float[Array, "S D"]
    # Log of the proposal's density over the points' own, up to a constant: zero for draws.
    log_weight: Float[Array, "S"]
    # Points on the border of a grid; none for draws.
    border: Bool[Array, "S"]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A Gaussian to weigh points from: q itself, or a Laplace approximation of the tilted distribution."""

    natural: GaussianNatural
    moments: GaussianMoments


def from_points(
    family: GaussianFamily,
    cloud: PointCloud,
    factor: Float[Array, "S"],
    q: GaussianNatural,
    site: GaussianNatural,
    proposal: Proposal,
    power: float | Float[Array, ""],
) -> Tilted:
    """Moments by self-normalised weights ``w_s ~ q(theta_s) / proposal(theta_s) (p / t)^alpha``, power halved as needed.

    In the proposal's whitened coordinates, where the points' own mean is 0 and their covariance the identity to the last
    digit (their moments as control variates: where weights are equal, the moments are the proposal's), with normalised w

        mu = sum_s w_s eps_s,    C = sum_s w_s eps_s eps_s^T - mu mu^T,

    and the natural parameters of the tilted distribution's match follow from ``C^-1 - 1`` and mu without a difference of large
    numbers. The power is halved while the cavity ``eta_q - alpha eta_m`` is not normalisable (a grid that sees its mass within
    its border needs no proper cavity) or the effective sample size is below a twentieth of the points. ``family``: the Gaussian
    family of q; ``cloud``: the points; ``factor``: log density of the factor at them, nats; ``q``: natural parameters of q;
    ``site``: the factor's site; ``proposal``: where the points come from; ``power``: alpha. Returns what moment matching asks
    for.
    """
    points = family.draw(proposal.moments, cloud.eps)
    ratio = factor - log_site(family, site, points)
    base = cloud.log_weight + log_gap(family, q, family.moments(q), proposal, points)
    is_grid = jnp.any(cloud.border)
    count = points.shape[0]

    def proper(share: Array, logs: Array) -> Array:
        # Mass beyond the border is what an improper tilted distribution has.
        inside = jnp.max(jnp.where(cloud.border, logs, -jnp.inf)) < jnp.max(logs) - _BORDER
        return jnp.where(is_grid, inside, family.in_domain(q - site * (power * share)))

    least = jnp.where(is_grid, 0.0, least_ess(count, family.dim))
    share, good, ess, finite = believed(base, ratio, power, least, proper)
    used, none, fine = power * share, jnp.int32(0), jnp.array(False)
    change, noise, fits = _matched(family, cloud, base + used * ratio, q, proposal, is_grid)
    change, noise, valid = change * (1.0 / used), noise / used, finite & good & fits
    value = (jax.nn.logsumexp(base + power * ratio) - jax.nn.logsumexp(cloud.log_weight)) / power
    spread = jnp.where(is_grid, 0.0, jnp.maximum(1.0 / ess - 1.0 / count, 0.0)) / power**2
    return Tilted(change, value, spread, jnp.where(is_grid, jnp.nan, ess), noise, share, none, fine, finite, valid)


def _matched(family, cloud: PointCloud, logs, q, proposal: Proposal, is_grid):
    """``eta_qhat - eta_q`` from weighted points, the mean's standard error in sds, and whether the covariance is one."""
    weights = jax.nn.softmax(logs)
    eps = cloud.eps
    mean = weights @ eps
    error = jnp.sqrt(jnp.max((weights - 1.0 / eps.shape[0]) ** 2 @ (eps - mean) ** 2))
    if not family.full:
        variance = weights @ eps**2 - mean**2
        change = matched_change(family, mean, variance, q, proposal)
        return change, jnp.where(is_grid, 0.0, error), jnp.all(variance > 0)
    covariance = symmetrise((weights[:, None] * eps).T @ eps - mean[:, None] * mean)
    fits = scaled_cholesky(covariance)[1]
    return matched_change(family, mean, covariance, q, proposal), jnp.where(is_grid, 0.0, error), fits


def matched_change(
    family: GaussianFamily, mean: Float[Array, "D"], covariance: Array, q: GaussianNatural, proposal: Proposal
) -> GaussianNatural:
    """``eta_qhat - eta_q`` of moments in a proposal's whitened coordinates, without a difference of large numbers.

    ``covariance``: its covariance, or (mean-field) variances. Returns the change of the natural parameters.
    """
    start, moments = proposal.natural - q, proposal.moments
    if not family.full:
        precision = (1.0 / covariance - 1.0) / moments.scale**2
        located = moments.loc + moments.scale * mean
        return start + GaussianNatural(precision * located + mean / moments.scale, precision)
    root = inverse_root(scaled_cholesky(covariance)[0])
    # S^-T of the proposal's covariance root S.
    back = proposal.natural.precision @ moments.scale
    inner = root @ root.T - jnp.eye(mean.shape[0], dtype=mean.dtype)
    precision = symmetrise(back @ inner @ back.T)
    vector = precision @ (moments.loc + moments.scale @ mean) + back @ mean
    return start + GaussianNatural(vector, precision)


def log_site(family: GaussianFamily, site: GaussianNatural, points: Float[Array, "S D"]) -> Float[Array, "S"]:
    """``log t_m`` at points, nats."""
    image = jax.vmap(lambda point: family.precision_product(site, point))(points)
    return points @ site.precision_mean - 0.5 * jnp.sum(points * image, axis=-1)


def log_gap(family, q: GaussianNatural, moments: GaussianMoments, proposal: Proposal, points) -> Float[Array, "S"]:
    """``log q - log proposal`` at points, both normalised, nats; exactly zero where they are the same."""
    gap = q - proposal.natural
    own, other = (
        0.5 * jnp.vdot(n.precision_mean, m.loc) - 0.5 * m.log_det_precision
        for n, m in ((q, moments), (proposal.natural, proposal.moments))
    )
    return log_site(family, gap, points) - (own - other)


def exact_tilted(
    family: GaussianFamily, factor: GaussianNatural, constant: Any, q: GaussianNatural, site: GaussianNatural, power
) -> Tilted:
    """The closed form for a quadratic factor ``f = c + h^T theta - 1/2 theta^T P theta``.

    Under full covariance ``(eta_qhat - eta_q) / alpha = eta_f - eta_m`` whatever alpha. Under a mean-field q the tilted
    Gaussian keeps its correlations and its marginals are matched. ``family``: the Gaussian family of q; ``factor``: dense
    natural parameters ``(h, P)``; ``constant``: c, nats; ``q``: natural parameters of q; ``site``: the factor's site;
    ``power``: alpha. Returns what moment matching asks for.
    """
    moments = family.moments(q)
    own = 0.5 * jnp.vdot(q.precision_mean, moments.loc) - 0.5 * moments.log_det_precision
    rest = q - site * power
    precision = rest.precision if family.full else jnp.diag(rest.precision)
    matrix, proper = scaled_cholesky(precision + power * factor.precision)
    root = inverse_root(matrix)
    vector = rest.precision_mean + power * factor.precision_mean
    loc = root @ (root.T @ vector)
    tilted = 0.5 * jnp.vdot(vector, loc) - jnp.sum(jnp.log(jnp.diagonal(matrix)))
    if family.full:
        change = factor - site
    else:
        found = 1.0 / jnp.sum(root**2, axis=-1)
        change = (GaussianNatural(found * loc, found) - q) * (1.0 / power)
    finite = jnp.isfinite(constant) & jnp.all(jnp.isfinite(factor.precision)) & jnp.all(jnp.isfinite(vector))
    # Full covariance needs no tilted distribution for its step: the difference is the factor itself.
    usable = finite & (proper | family.full)
    return unsampled(change, jnp.where(proper, (tilted - own) / power + constant, jnp.nan), finite, usable)


def linear_tilted(family: Any, factor: Any, constant: Float[Array, ""], q: Any, site: Any, power: Any) -> Tilted:
    """The closed form for a factor ``f = c + <eta_f, T(theta)>``, affine in the statistics of any family jointly.

    The tilted distribution is a member of the family, and ``(eta_qhat - eta_q) / alpha = eta_f - eta_m`` whatever alpha: no
    tilted distribution is needed for the step. ``family``: of q; ``factor``: natural parameters eta_f; ``constant``: c, nats;
    ``q``: natural parameters of q; ``site``: the factor's site; ``power``: alpha. Returns what moment matching asks for; the
    value is NaN where there is no tilted distribution.
    """
    change = factor - site
    tilted = q + change * power
    gap = family.log_partition(tilted) - family.log_partition(q)
    value = jnp.where(family.in_domain(tilted), gap / power + constant, jnp.nan)
    finite = jnp.isfinite(constant) & all_finite(change)
    return unsampled(change, value, finite, finite)


# ------------------------------------------------------------------------------------------------- ways to take moments
# Ways to take the moments of a tilted distribution, with their settings, and which one fits a factor.


@dataclasses.dataclass(frozen=True)
class ImportanceMoments:
    """Moments from weighted draws of q, with the draws' own moments as control variates.

    Args:
        num_draws: draws per factor and round, at least 16; quasi-random up to 32 latents.

    Raises:
        PVIError: on construction, for fewer draws.
    """

    num_draws: int = 1024

    def __post_init__(self):
        _check_count(type(self).__name__, self.num_draws)


@dataclasses.dataclass(frozen=True)
class LaplaceMoments:
    """Moments from weighted draws of a Laplace approximation of the tilted distribution.

    A damped Newton search from q's location finds the tilted distribution's mode; its curvature there gives the Gaussian
    that is drawn from. For groups that say much more than q knows yet, whose draws from q would hardly ever hit. Under
    :class:`numpyro_pvi.AutoExponentialFamily` the search is in unconstrained coordinates, and draws are of the Student's t of 5
    degrees of freedom there, because logarithms of gammas have longer tails than a Gaussian's.

    Args:
        num_draws: draws per factor and round, at least 16; quasi-random up to 32 latents.
        num_steps: most Newton steps.

    Raises:
        PVIError: on construction, for values outside these ranges.
    """

    num_draws: int = 1024
    num_steps: int = 20

    def __post_init__(self):
        _check_count(type(self).__name__, self.num_draws)
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise PVIError(f"LaplaceMoments(num_steps={self.num_steps!r}): expected a positive int.")


@dataclasses.dataclass(frozen=True)
class MCMCMoments:
    """Moments from Hamiltonian chains, or NumPyro's NUTS, on the tilted distribution, with the score as control variate.

    Chains run in coordinates whitened by q, those of all groups (of about equal size) in one vectorised program. A first
    visit starts from draws of q and warms up; later ones go on from where the chains stood, with the step sizes they had,
    after a few transitions that are thrown away. The gradient of the log density has mean zero under the tilted
    distribution and makes its mean and covariance exact where it is Gaussian, so that their noise is far below that of plain
    draws. The evidence needs a normaliser, which chains do not have: it is a bridge from the Gaussian with these moments,
    with a Monte Carlo error.

    Under :class:`numpyro_pvi.AutoExponentialFamily` chains move in unconstrained coordinates. Their draws are matched as a
    family of their own, with one over the weights that draws of q would have: exact, with the evidence, where the factor is
    conjugate.

    For factors whose weights collapse however many draws of q are weighted. Unlike weighted draws, chains need gradients.

    Args:
        num_warmup: transitions of a first visit that adapt the step size and are thrown away.
        num_samples: transitions kept in every visit, per chain.
        num_chains: chains per factor.
        kernel: NumPyro's "nuts", or "lockstep": Hamiltonian chains of a quarter period of q, all of a group in the same number of
            leapfrog steps, a handful, and so several times faster side by side, where every lane of NUTS waits for the deepest
            tree. NUTS is surer where a tilted distribution is far from q's shape.
            "langevin" is for large groups: underdamped Langevin dynamics without an accept step, on mini-batches.
        batch_size: "langevin" only: rows of a group that one step reads, an even number, taken with replacement; None for all
            of them. Gradients are differences from the whole gradient at q's location, so that their noise vanishes with
            q's width. A visit also takes 15 passes over the group's rows, for that gradient, the step size, and the evidence.
        num_refresh: transitions of later visits that are thrown away.
        target_accept: mean acceptance that step sizes aim at, in (0, 1).
        max_tree_depth: NUTS doubles a trajectory at most so often; "lockstep" takes at most ``2^max_tree_depth - 1`` steps.

    Raises:
        PVIError: on construction, for values outside these ranges.
    """

    num_warmup: int = 200
    num_samples: int = 256
    num_chains: int = 4
    kernel: str = "nuts"
    num_refresh: int = 8
    target_accept: float = 0.8
    max_tree_depth: int = 6
    batch_size: int | None = None

    def __post_init__(self):
        least = {"num_warmup": 10, "num_samples": 16, "num_chains": 2, "num_refresh": 0, "max_tree_depth": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise PVIError(f"MCMCMoments({name}={value!r}): expected an int of {low} or more.")
        if self.kernel not in ("nuts", "lockstep", "langevin"):
            instead = ": 'lockstep' takes HMC's place" if self.kernel == "hmc" else ""
            raise PVIError(f"MCMCMoments(kernel={self.kernel!r}): expected 'nuts', 'lockstep' or 'langevin'{instead}.")
        self._check_batch()
        if not isinstance(self.target_accept, float) or not 0.0 < self.target_accept < 1.0:
            raise PVIError(f"MCMCMoments(target_accept={self.target_accept!r}): expected a number between 0 and 1.")

    def _check_batch(self) -> None:
        size = self.batch_size
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or size < 2 or size % 2:
            raise PVIError(
                f"MCMCMoments(batch_size={size!r}): expected an even int of 2 or more (the noise of a batch is told by the "
                "difference of its halves), or None for all rows."
            )
        if self.kernel != "langevin":
            raise PVIError(
                f"MCMCMoments(kernel={self.kernel!r}, batch_size={size}): a step that is accepted or refused needs all rows. "
                "Mini-batches are of kernel='langevin'."
            )

    @property
    def num_draws(self) -> int:
        """Draws per visit, of all chains."""
        return self.num_samples * self.num_chains


# Words for ``moments=``: one of these, or an instance with settings.
MOMENTS = ("auto", "exact", "quadrature", "importance", "laplace", "mcmc")
# Classes of settings; the moments that they stand for are sampled.
SAMPLED = (ImportanceMoments, LaplaceMoments, MCMCMoments)

Moments = ImportanceMoments | LaplaceMoments | MCMCMoments | str


def with_settings(moments: Moments) -> Moments:
    """The default settings behind a word that has some."""
    words = {"importance": ImportanceMoments(), "laplace": LaplaceMoments(), "mcmc": MCMCMoments()}
    return words.get(moments, moments) if isinstance(moments, str) else moments


def num_draws(moments: Moments) -> int:
    """Draws that a factor's moments are taken from, where they are sampled."""
    return getattr(with_settings(moments), "num_draws", ImportanceMoments().num_draws)


def chain_settings(moments: Moments) -> MCMCMoments | None:
    """The chains' settings: those asked for, the default ones where weights may give way to chains, or None."""
    wanted = MCMCMoments() if moments == "auto" else with_settings(moments)
    return wanted if isinstance(wanted, MCMCMoments) else None


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 16:
        raise PVIError(f"{name}(num_draws={count!r}): expected an int of 16 or more.")


# ------------------------------------------------------------------------------------------------------ points to weigh
# Points to weigh: quasi-random or random draws of a standard normal, and dense grids in one and two dimensions.

# Dimensions up to which quasi-random points are worth their static table.
_QUASI_DIM = 32
# Grids: half-width in sds of q and spacing.
_GRIDS = {"float64": (12.0, 0.25), "float32": (12.0, 0.4)}
# Latents that a dense grid can have.
GRID_DIM = 2


def normal_cloud(key: Any, dim: int, count: int, dtype: Any) -> PointCloud:
    """Standard normal draws whose own mean is 0 and whose own covariance is the identity.

    Up to 32 dimensions they are Sobol points, shifted at random (modulo 1) by the key; beyond, pairs of both signs. ``key``:
    random key; ``dim``: D; ``count``: S, more than D + 1; ``dtype``: floating dtype. Returns the points, of equal weight.
    """
    if dim <= _QUASI_DIM:
        shifted = (jnp.asarray(_sobol(dim, count), dtype) + jax.random.uniform(key, (dim,), dtype)) % 1.0
        # Within the open unit interval: as far from its ends as half of the mean distance of the points.
        eps = ndtri(jnp.clip(shifted, 0.5 / count, 1.0 - 0.5 / count))
    else:
        half = jax.random.normal(key, (-(-count // 2), dim), dtype)
        eps = jnp.concatenate([half, -half])[:count]
    eps = eps - jnp.mean(eps, axis=0)
    factor, _ = scaled_cholesky(eps.T @ eps / count)
    eps = solve_lower(factor, eps.T).T
    return PointCloud(eps, jnp.zeros((count,), dtype), jnp.zeros((count,), bool))


def shifted_normals(key: Any, dim: int, width: int, count: int, units: int, dtype: Any) -> tuple[Array, Array]:
    """Standard normal draws for shared latents and for those of every unit, even jointly: unbiased, each as if drawn alone.

    Up to 32 dimensions together, the shared draws and those of any one unit are Sobol points shifted at random (modulo 1), with
    a shift of its own for every unit; beyond, they are independent. ``key``: random key; ``dim``: D, shared latents; ``width``:
    K, latents of a unit; 0 without any; ``count``: S; ``units``: U; ``dtype``: floating dtype. Returns Float[S D] and Float[U S
    K].
    """
    shared_key, own_key = jax.random.split(key)
    shape = (units, count, width)
    if dim + width > _QUASI_DIM:
        return jax.random.normal(shared_key, (count, dim), dtype), jax.random.normal(own_key, shape, dtype)
    table = jnp.asarray(_sobol(dim + width, count), dtype)
    shared = (table[:, :dim] + jax.random.uniform(shared_key, (dim,), dtype)) % 1.0
    own = (table[:, dim:] + jax.random.uniform(own_key, (units, 1, width), dtype)) % 1.0
    # As random.normal does, which is cheaper than ndtri; the ends of the interval are kept out.
    most = 1.0 - 0.5 * float(jnp.finfo(dtype).eps)
    shared, own = (np.sqrt(2) * jax.lax.erf_inv(jnp.clip(2.0 * u - 1.0, -most, most)) for u in (shared, own))
    return shared, own


def grid_cloud(dim: int, dtype: Any) -> PointCloud:
    """A trapezoidal grid over plus and minus 12 sds in one or two dimensions, coarser in float32.

    As wide in both precisions, because a long tail needs the width: where its mass reaches the border, less of the power is
    taken. Its error is of the order of rounding for tilted distributions down to about half the sd of q, in each direction.
    ``dim``: 1 or 2; ``dtype``: floating dtype. Returns the points with the standard normal's log density for weights.
    """
    eps, border = _grid(dim, jnp.dtype(dtype).name)
    return PointCloud(jnp.asarray(eps, dtype), jnp.asarray(-0.5 * np.sum(eps**2, axis=-1), dtype), jnp.asarray(border))


@functools.cache
def _sobol(dim: int, count: int) -> np.ndarray:
    from scipy.stats import qmc

    power = max(int(np.ceil(np.log2(count))), 0)
    return qmc.Sobol(dim, scramble=True, rng=np.random.default_rng(0)).random_base2(power)[:count]


@functools.cache
def _grid(dim: int, dtype_name: str) -> tuple[np.ndarray, np.ndarray]:
    limit, step = _GRIDS[dtype_name]
    axis = np.linspace(-limit, limit, 2 * round(limit / step) + 1)
    eps = np.stack([g.ravel() for g in np.meshgrid(*[axis] * dim, indexing="ij")], axis=-1)
    return eps, np.max(np.abs(eps), axis=-1) >= limit
