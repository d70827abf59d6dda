"""Expectations from sigma points and from random points, whether they agree, and log densities at any points.

A set of P antithetic pairs ``loc +- S eps_k`` with weights ``w_k``, ``sum_k w_k eps_k eps_k^T = I``, and its centre give

    E[f]      =  f(loc) + sum_k w_k ((f_k^+ + f_k^-) / 2 - f(loc)),
    E[grad f] =  the same sum over gradients,
    E[hess f] =  sym S^-T sum_k w_k eps_k (g_k^+ - g_k^-)^T / 2         (Stein's identity, E[Lambda (theta - m) grad f^T]),

all exact for cubic f, and further where the set is a product of Gauss-Hermite rules, which few latents allow. The gradient may
jump: no second derivative is ever taken. Where f itself jumps its gradient does not say by how much, and what it leaves of f
beside the quadratic with these expectations, ``r``, has expectations of its own, by values:

    E[grad r] = S^-T E[eps r],    E[hess r] = S^-T E[(eps eps^T - I) r] S^-1           (Bonnet's and Price's theorems, by parts).

For an f that does not jump both are zero in expectation: the quadratic's curvature is that of the other blocks of points, so that
it does not hang together with those that it is taken off at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial, singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, clip_to_psd, grad, invert_lower, value_and_grad
from ..factors import term_log_prob
from ..families import GaussianFamily, GaussianMoments, NormalFamily
from ._affine import AffineProgram, SharedAffineProgram
from ._expected import Expected, QuadraticProgram
from ._local_latents import IntegratedProgram

# Low-discrepancy steps of the radii: any run of them is spread evenly.
_GOLDEN = 0.6180339887498949
_QUANTILES = 1025


class PointSet(NamedTuple):
    """Antithetic pairs in whitened coordinates, in blocks whose mean counts; those of random pairs are complete rules each."""

    eps: Float[Array, "R P D"]
    weight: Float[Array, "R P"]
    # How many of the blocks are in use; the others have weight 0.
    count: Int[Array, ""] | int
    # Whether gradients are wanted; values alone cost a third.
    slopes: Bool[Array, ""] | bool = True


@dataclasses.dataclass(frozen=True)
class PointsProgram:
    """``E_q`` of a factor without structure, by values and gradients.

    ``log_density``: ``(data, point) -> nats``, the factor on one chunk's rows; ``mode``: "sigma_points" (the same points at
    every q), "monte_carlo" (fresh random rotations and radii every round), "values" (the same, with what gradients do not say of
    a factor that jumps), or "auto" (sigma points while a few random draws agree with them; then a product rule while these and a
    coarser one agree with it; then random points); ``num_pairs``: antithetic pairs of a random set, rounded up to whole
    rotations; ``nodes``: of a product rule, along every axis, 0 where there is none: see :func:`product_nodes`.
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: GaussianFamily
    mode: str = "auto"
    num_pairs: int = 16
    nodes: int = 0

    @property
    def noisy(self) -> bool:
        """Whether rounds need draws."""
        return self.mode != "sigma_points"

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: not known of a model in general."""
        return 0

    def draw(self, key: Any, dtype: Any) -> PointSet | None:
        """A round's random points, or None where none are needed."""
        if not self.noisy:
            return None
        dim, pairs = self.family.dim, self.num_pairs
        if self.mode != "values":
            return random_points(key, dim, pairs, dtype)
        # At least two blocks, and independent ones, their radii too: each is told the curvature by the others.
        size = _sigma_arrays(dim)[0].shape[0]
        keys = jax.random.split(key, max(2, -(-pairs // size)))
        eps, weight = jax.vmap(lambda own: random_points(own, dim, size, dtype)[:2])(keys)
        return PointSet(eps[:, 0], weight[:, 0], len(keys))

    def choose(
        self,
        random: PointSet | None,
        sampled: Bool[Array, ""] | bool,
        dtype: Any,
        trial: bool = False,
        finer: Bool[Array, ""] | bool = False,
    ) -> PointSet:
        """The points to use.

        ``random``: what :meth:`draw` gave, or None; ``sampled``: whether random points take the place of all others ("auto"
        only); ``dtype``: of the sigma points; ``trial``: whether values alone will do of random points; ``finer``: whether a
        product rule, where there is one, takes the place of sigma points ("auto" only). Returns sigma points, a product rule, or
        the random ones, as the mode and the flags say.
        """
        sigma = sigma_points(self.family.dim, dtype)
        if random is None or self.mode == "sigma_points":
            return sigma
        if self.mode in ("monte_carlo", "values"):
            return random._replace(slopes=not trial)
        fixed = sigma
        if self.nodes:
            fixed = _either(jnp.asarray(finer), product_rule(self.family.dim, self.nodes, dtype), sigma)
        else:
            # Sigma points that gave way to a rule which more rows have none of: they do not stand for it.
            sampled = jnp.asarray(sampled) | finer
        return _either(jnp.asarray(sampled), random, fixed)._replace(slopes=jnp.logical_not(sampled) if trial else True)

    @property
    def refinable(self) -> bool:
        """Whether there is something finer than sigma points before draws."""
        return self.mode == "auto" and self.nodes > 0

    def contradicted(
        self,
        moments: GaussianMoments,
        factor: Expected,
        draws: Float[Array, "K D"],
        pairs: Callable[[Float[Array, "L D"]], Expected],
        before: Bool[Array, ""],
        finer: Bool[Array, ""],
    ) -> Bool[Array, ""]:
        """Whether expectations at fixed points are contradicted by random draws or, of a product rule, by a coarser one.

        ``moments``: q; ``factor``: the expectations, summed over groups; ``draws``: standard normal; ``pairs``: what :meth:`pair`
        finds at each of many points (leading axis), summed over groups; ``before``: whether draws have contradicted sigma points
        before; ``finer``: whether the points are a product rule. See :func:`disagreement`.
        """
        if not self.refinable:
            return disagreement(self.family, moments, factor, draws, pairs(draws), before)
        coarse, weight = (jnp.asarray(x, draws.dtype) for x in _product_arrays(self.family.dim, self.nodes - 1, True))
        # One place for both: the density is most of what is compiled.
        found, judged = pairs(jnp.concatenate([draws, coarse])), partial(disagreement, self.family, moments, factor)
        by_draws, by_rule = (jax.tree.map(f, found) for f in (lambda x: x[: len(draws)], lambda x: x[len(draws) :]))
        # However much a factor varies about its quadratic model, a product rule knows it. Where it is no number at the same nodes
        # round after round, draws are at other places.
        lost = ~(jnp.isfinite(factor.value) & all_finite(factor.target))
        wrong = judged(draws, by_draws, before & ~finer, telling=~finer)
        return wrong | (finer & (lost | judged(coarse, by_rule, weight=weight)))

    def expected(
        self, chunk: Any, moments: GaussianMoments, probe: Any, level: Any, noise: PointSet, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: the chunk's data; ``moments``: q; ``probe``: Float[D] vector for the curvature product, or None; ``level``: a
        Python int where the result is to be differentiated in reverse mode; not used otherwise; ``noise``: the points;
        ``clip``: whether (a bool, traced or not) to raise the curvature to positive semi-definite. Returns the chunk's
        expectations.
        """
        if noise.slopes is True:
            value, gradient, cross = self._sums(chunk, moments, noise, unrolled=isinstance(level, int))
        elif noise.slopes is False:
            value, gradient, cross = self._values(chunk, moments, noise)
        else:
            value, gradient, cross = jax.lax.cond(
                noise.slopes,
                lambda: self._sums(chunk, moments, noise, unrolled=False),
                lambda: self._values(chunk, moments, noise),
            )
        curvature = -self._from_whitened(moments, cross)
        if clip is not False:
            clipped = clip_to_psd(curvature) if self.family.full else jnp.clip(curvature, 0.0, None)
            curvature = jnp.where(clip, clipped, curvature)
        product = jnp.zeros_like(moments.loc)
        if probe is not None:
            product = curvature @ probe if self.family.full else self._dense(moments, cross) @ probe
        pull = curvature @ moments.loc if self.family.full else curvature * moments.loc
        return Expected(value, self.family.natural(gradient + pull, curvature), product, *(jnp.zeros_like(value),) * 3)

    def pair(self, chunk: Any, moments: GaussianMoments, eps: Float[Array, "D"]) -> Expected:
        """One antithetic pair of draws, in the form that chunks are summed in.

        ``chunk``: the chunk's data; ``moments``: q; ``eps``: a standard normal draw. Returns ``value`` and
        ``target.precision_mean`` are the means of the two values and gradients, ``product`` is half the difference of the
        gradients; the rest is zero.
        """
        points = self.family.draw(moments, jnp.stack([eps, -eps]))
        value, gradient = self._look(chunk, points)
        zeros = self.family.zeros((), eps.dtype)
        target = dataclasses.replace(zeros, precision_mean=jnp.mean(gradient, axis=0))
        odd = 0.5 * (gradient[0] - gradient[1])
        return Expected(jnp.mean(value), target, odd, *(jnp.zeros((), eps.dtype),) * 3)

    def _values(self, chunk, moments: GaussianMoments, points: PointSet):
        """As :meth:`_sums` with zeros for everything but the value."""
        dim = self.family.dim
        eps = points.eps.reshape(-1, dim)
        at = self.family.draw(moments, jnp.concatenate([jnp.zeros((1, dim), eps.dtype), eps, -eps]))
        value = jax.vmap(lambda point: self.log_density(chunk, point))(at)
        plus, minus = jnp.split(value[1:], 2)
        even = points.weight.reshape(-1) @ (0.5 * (plus + minus) - value[0])
        total = value[0] + even / jnp.asarray(points.count, even.dtype)
        return total, jnp.zeros((dim,), eps.dtype), jnp.zeros((dim, dim), eps.dtype)

    def _look(self, chunk, points):
        return jax.vmap(lambda point: value_and_grad(self.log_density, argnums=1)(chunk, point))(points)

    def _sums(self, chunk, moments: GaussianMoments, points: PointSet, unrolled: bool) -> Any:
        """Value, gradient and ``sum_k w_k eps_k (g_k^+ - g_k^-)^T / 2``, averaged over the blocks in use."""
        blocks, pairs, dim = points.eps.shape

        def block(eps, weight):
            centre = jnp.zeros((1, dim), eps.dtype)
            value, gradient = self._look(chunk, self.family.draw(moments, jnp.concatenate([centre, eps, -eps])))
            plus, minus = slice(1, pairs + 1), slice(pairs + 1, None)
            even = 0.5 * (value[plus] + value[minus]) - value[0]
            slope = weight @ (0.5 * (gradient[plus] + gradient[minus]) - gradient[0])
            cross = (weight[:, None] * eps).T @ (0.5 * (gradient[plus] - gradient[minus]))
            found = value[0] + weight @ even, gradient[0] + slope, cross
            return (*found, even, 0.5 * (value[plus] - value[minus])) if self.mode == "values" else found

        if self.mode == "values":
            return self._with_jumps(moments, points, jax.lax.map(lambda xs: block(*xs), (points.eps, points.weight)))
        if blocks == 1:
            return block(points.eps[0], points.weight[0])
        if unrolled:
            used = jnp.arange(blocks) < points.count
            found = jax.lax.map(lambda xs: block(*xs), (points.eps, points.weight))
            totals = jax.tree.map(lambda x: jnp.tensordot(used.astype(x.dtype), x, axes=1), found)
        else:
            # One trace serves for the shapes and for the loop.
            block = jax.jit(block, inline=True)
            shapes = jax.eval_shape(block, points.eps[0], points.weight[0])
            zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            totals = jax.lax.fori_loop(
                0,
                points.count,
                lambda i, total: jax.tree.map(jnp.add, total, block(points.eps[i], points.weight[i])),
                zero,
            )
        return jax.tree.map(lambda x: x / jnp.asarray(points.count, x.dtype), totals)

    def _with_jumps(self, moments: GaussianMoments, points: PointSet, found: tuple) -> tuple:
        """Value, gradient and cross sums of all blocks with what gradients leave of values: see the top of the module.

        ``found``: by block value, gradient, cross sums, half the sums of the pairs' values less the centre's, and half their
        differences. The value has the same derivatives in q's moments.
        """
        eps, weight, count = points.eps, points.weight, points.eps.shape[0]
        value, gradient, cross = (jnp.mean(x, axis=0) for x in found[:3])
        root = moments.scale if self.family.full else jnp.diag(moments.scale)
        inverse = invert_lower(moments.scale.T).T if self.family.full else jnp.diag(1.0 / moments.scale)
        _, slopes, bends, even, odd = jax.lax.stop_gradient(found)
        root_held, inverse = jax.lax.stop_gradient((root, inverse))
        # Weights times eps eps^T add up to the identity in every block: its own gradient may be taken off at its own points.
        odd = odd - jnp.einsum("bpi,bi->bp", eps, slopes @ root_held)
        slope = inverse.T @ (jnp.einsum("bpi,bp->i", eps, weight * odd) / count)
        bends = bends @ root_held
        bends = 0.5 * (bends + jnp.swapaxes(bends, 1, 2))
        others = (jnp.sum(bends, axis=0) - bends) / max(count - 1, 1)
        share = weight * (even - 0.5 * jnp.einsum("bpi,bij,bpj->bp", eps, others, eps))
        second = jnp.einsum("bpi,bp,bpj->ij", eps, share, eps) - jnp.sum(share) * jnp.eye(
            eps.shape[-1], dtype=eps.dtype
        )
        # By blocks the others' curvature has the mean that all have.
        second = second / count
        hessian = inverse.T @ second @ inverse
        moved = slope @ moments.loc + 0.5 * jnp.sum(hessian * (root @ root.T))
        return value + moved - jax.lax.stop_gradient(moved), gradient + slope, cross + second @ inverse

    def _dense(self, moments: GaussianMoments, cross: Float[Array, "D D"]) -> Float[Array, "D D"]:
        """``-E[hess f]`` under a mean-field q, its off-diagonal entries included."""
        scaled = cross / moments.scale[:, None]
        return -0.5 * (scaled + scaled.T)

    def _from_whitened(self, moments: GaussianMoments, cross: Float[Array, "D D"]) -> Array:
        if not self.family.full:
            return jnp.diagonal(cross) / moments.scale
        hessian = invert_lower(moments.scale.T) @ cross
        return 0.5 * (hessian + hessian.T)


@cache
def _sigma_arrays(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs and weights of the sigma points: exact to degree 7 or more in one dimension, 5 in two and three, 3 above."""
    if dim == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        return nodes[4:, None], 2 * weights[4:] / weights.sum()
    if dim == 2:
        angles = np.pi / 4 * np.arange(4)
        return 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1), np.full(4, 1 / 8)
    if dim == 3:
        golden = (1 + 5**0.5) / 2
        corners = [np.roll([0, 1, sign * golden], k) for k in range(3) for sign in (1, -1)]
        return np.sqrt(5 / (1 + golden**2)) * np.array(corners), np.full(6, 1 / 10)
    return np.sqrt(dim) * np.eye(dim), np.full(dim, 1 / dim)


def sigma_points(dim: int, dtype: Any) -> PointSet:
    """The same points at every q: ``+- sqrt(D) e_i``, and rules of higher degree in up to three dimensions.

    ``dim``: D; ``dtype``: of the arrays. Returns one block of D pairs (4, 4 and 6 for D = 1, 2, 3).
    """
    eps, weight = _sigma_arrays(dim)
    return PointSet(jnp.asarray(eps[None], dtype), jnp.asarray(weight[None], dtype), 1)


# Nodes an axis of product rules at most, by the number of latents, and for more of these; and at least, for a higher degree than
# that of sigma points.
_MOST_NODES, _OF_MORE = {1: 15, 2: 11, 3: 7, 4: 5}, 4
_LEAST_NODES, _LEAST_OF_MORE = {1: 9, 2: 4, 3: 4}, 3
# Pairs that count for less are left out: far out in all coordinates at once densities overflow.
_LEAST_WEIGHT = 1e-9
# Rows times points that an evaluation by a product rule may cost.
_MOST_LOOKS = 1 << 18


def product_nodes(dim: int, num_rows: int) -> int:
    """Nodes an axis of a product rule that latents and rows are few enough for.

    ``dim``: D; ``num_rows``: N. Returns the most, up to 15, 11, 7 and 5 for one to four latents and 4 for more, with at most 2^18
    points of rows in all; 0 where as few as are of a higher degree than :func:`sigma_points` have more.
    """
    most, least = _MOST_NODES.get(dim, _OF_MORE), _LEAST_NODES.get(dim, _LEAST_OF_MORE)
    affordable = (n for n in range(most, least - 1, -1) if n**dim * max(num_rows, 1) <= _MOST_LOOKS)
    return next(affordable, 0)


@cache
def _product_arrays(dim: int, nodes: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Pairs and weights of a product of Gauss-Hermite rules; without the centre, which has the weight that is left.

    ``whole``: with the centre, if it is a node, as a pair of its own, and with every pair.
    """
    at, weights = np.polynomial.hermite_e.hermegauss(nodes)
    eps = np.stack(np.meshgrid(*[at] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    share = (
        np.stack(np.meshgrid(*[weights / weights.sum()] * dim, indexing="ij"), axis=-1).reshape(-1, dim).prod(axis=1)
    )
    half, odd = len(eps) // 2, len(eps) % 2
    pairs, weight = eps[half + odd :], 2 * share[half + odd :]
    if whole:
        return np.concatenate([eps[half : half + odd], pairs]), np.concatenate([share[half : half + odd], weight])
    pairs, weight = pairs[weight > _LEAST_WEIGHT], weight[weight > _LEAST_WEIGHT]
    # Unit covariance along every axis alike, whatever was left out.
    return pairs / np.sqrt(weight @ pairs[:, 0] ** 2), weight


def product_rule(dim: int, nodes: int, dtype: Any) -> PointSet:
    """A product of Gauss-Hermite rules, exact along every axis to degree ``2 nodes - 1``.

    ``dim``: D; ``nodes``: along every axis; ``dtype``: of the arrays. Returns blocks of as many pairs as :func:`sigma_points` has.
    """
    eps, weight = _product_arrays(dim, nodes)
    pairs = _sigma_arrays(dim)[0].shape[0]
    blocks = -(-len(weight) // pairs)
    spare = blocks * pairs - len(weight)
    eps, weight = np.pad(eps, [(0, spare), (0, 0)]), np.pad(weight, (0, spare))
    # The mean over blocks counts.
    return PointSet(
        jnp.asarray(eps.reshape(blocks, pairs, dim), dtype),
        jnp.asarray(blocks * weight.reshape(blocks, pairs), dtype),
        blocks,
    )


def _padded(*arrays: Array) -> tuple[Array, ...]:
    """Arrays with zeros behind them, as long as the longest."""
    longest = max(len(x) for x in arrays)
    return tuple(jnp.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in arrays)


def _either(choice: Bool[Array, ""], one: PointSet, other: PointSet) -> PointSet:
    """One of two sets of points; blocks that are not in use have no weight."""
    eps, weight = (jnp.where(choice, *_padded(a, b)) for a, b in zip(one[:2], other[:2], strict=True))
    return PointSet(eps, weight, jnp.where(choice, one.count, other.count))


@cache
def _radius_quantiles(dim: int) -> np.ndarray:
    """Quantiles of the chi distribution with ``dim + 2`` degrees of freedom at evenly spaced levels."""
    grid = np.linspace(0.0, np.sqrt(dim + 2) + 9.0, 200_001)
    with np.errstate(divide="ignore"):
        log_density = (dim + 1) * np.log(grid) - 0.5 * grid**2
    cumulative = np.cumsum(np.exp(log_density - log_density.max()))
    levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return np.interp(levels, cumulative / cumulative[-1], grid)


def random_points(key: Any, dim: int, num_pairs: int, dtype: Any) -> PointSet:
    """Randomly rotated orthogonal axes with random radii: unbiased, and exact for cubics in every draw.

    Along a random axis a pair at radius r has weight ``1 / r^2``; the density of a standard normal's radius times ``r^2 / D``
    is that of a chi variable with D + 2 degrees of freedom, so radii are drawn from that, evenly spread. ``key``: random key;
    ``dim``: D; ``num_pairs``: pairs wanted, rounded up to whole blocks; ``dtype``: of the arrays. Returns blocks of as many
    pairs as :func:`sigma_points` has.

    References:
        Genz and Monahan, Stochastic integration rules for infinite regions, SIAM J. Sci. Comput. 19 (1998), degree 3.
    """
    pairs = _sigma_arrays(dim)[0].shape[0]
    blocks, rotations = -(-num_pairs // pairs), pairs // dim
    axes_key, shift_key = jax.random.split(key)
    gaussian = jax.random.normal(axes_key, (blocks * rotations, dim, dim), dtype)
    axes = jnp.linalg.qr(gaussian)[0].reshape(blocks, pairs, dim)
    steps = np.asarray(_GOLDEN * np.arange(blocks * pairs) % 1.0)
    level = (jax.random.uniform(shift_key, (), dtype) + jnp.asarray(steps, dtype)) % 1.0
    table = jnp.asarray(_radius_quantiles(dim), dtype)
    radius = jnp.interp(level * _QUANTILES - 0.5, jnp.arange(_QUANTILES, dtype=dtype), table).reshape(blocks, pairs)
    return PointSet(axes * radius[..., None], 1.0 / (rotations * radius**2), blocks)


# ------------------------------------------------------------------------------------------------------------ agreement
# Whether a few random draws agree with what sigma points say about a factor.

# Differences that do no harm: of the value in nats, of the gradient in nats per posterior sd, and of the whitened
# curvature's trace per root of the dimension. To second order they cost q half their square, and a quarter.
VALUE_TOLERANCE = 0.05
GRADIENT_TOLERANCE = 0.1
CURVATURE_TOLERANCE = 0.2
# Standard errors by which draws must differ before they count (few draws know their own error badly); and the sd of a
# draw's value, in nats, above which so few draws cannot tell, and the factor is too far from its quadratic model for
# sigma points to be believed.
_ERRORS = 6.0
_UNTELLING = 0.5
# The sd of a draw's value below which draws confirm points that others have contradicted.
_CONFIRMING = 0.1


def disagreement(
    family: GaussianFamily,
    moments: GaussianMoments,
    factor: Expected,
    eps: Float[Array, "K D"],
    pairs: Expected,
    again: Bool[Array, ""] | bool = False,
    weight: Float[Array, "K"] | None = None,
    telling: Bool[Array, ""] | bool = True,
) -> Bool[Array, ""]:
    """Whether antithetic draws contradict the expectations of a factor beyond their own standard errors, or vary too much.

    The factor's value v, gradient g and curvature -H make a quadratic model of f whose expectations are these; the means over
    draws of f minus the model, of the gradient of that, and of ``eps`` times it estimate what the expectations miss.
    ``family``: the family of q; ``moments``: q; ``factor``: expectations by sigma points, summed over groups; ``eps``: K
    standard normal draws, at least two; ``pairs``: what :meth:`PointsProgram.pair` found for each (leading axis K), summed over
    groups; ``again``: whether such points have been contradicted before. Heavy tails hide from most sets of draws: the points
    are then believed only where draws hardly differ from the quadratic model; ``weight``: where the pairs are a rule and no draws,
    theirs, which add up to 1: what they say has no standard error; ``telling``: whether draws that vary too much contradict.
    Returns True when one of the three differs, or the first varies too much to tell; False where the draws are not finite.
    """
    (count, dim), by_draws = eps.shape, weight is None
    share = jnp.full((count,), 1.0 / count, eps.dtype) if weight is None else weight
    precision, scale = factor.target.precision, moments.scale
    gradient = family.pull(factor.target, moments.loc)
    if family.full:
        curvature = scale.T @ precision @ scale
        whiten, image, trace = (lambda v: v @ scale), eps @ curvature, jnp.trace(curvature)
    else:
        curvature = precision * scale**2
        whiten, image, trace = (lambda v: v * scale), eps * curvature, jnp.sum(curvature)
    square = jnp.sum(eps * image, axis=-1)
    value = pairs.value - (factor.value - 0.5 * (square - trace))
    even = whiten(pairs.target.precision_mean - gradient)
    odd = jnp.sum(eps * (whiten(pairs.product) + image), axis=-1)

    def variance(sample):
        return jnp.var(sample, axis=0, ddof=1) if by_draws else 0.0 * sample[0]

    def mean_of(sample):
        # No product of matrices, which accelerators take in half the digits.
        return jnp.sum(sample.T * share, axis=-1)

    def differs(sample, tolerance):
        return jnp.abs(mean_of(sample)) > tolerance + _ERRORS * jnp.sqrt(variance(sample) / count)

    mean, spread = mean_of(even), jnp.sum(variance(even))
    # Unbiased for the squared length of the mean; its own sd is at most the last factor below.
    excess = jnp.sum(mean**2) - spread / count
    noise = spread * (2.0 / (count * max(count - 1, 1))) ** 0.5
    wrong = differs(value, VALUE_TOLERANCE) | (excess > GRADIENT_TOLERANCE**2 + 3 * _ERRORS * noise)
    wrong = wrong | differs(odd, CURVATURE_TOLERANCE * dim**0.5)
    wrong = wrong | (telling & (jnp.sqrt(variance(value)) > jnp.where(again, _CONFIRMING, _UNTELLING)))
    drawn = jnp.isfinite(jnp.sum(pairs.value) + jnp.sum(even) + jnp.sum(odd))
    known = jnp.isfinite(factor.value) & jnp.all(jnp.isfinite(image))
    finite = jnp.isfinite(jnp.sum(pairs.value)) & jnp.all(jnp.isfinite(pairs.target.precision_mean))
    return jnp.where(known, drawn & wrong, finite)


# ------------------------------------------------------------------------------------------------------ reparameterised
# Expectations by antithetic reparameterised draws for a mean-field q in many dimensions: nothing is D x D.

# Pairs from which the correction by the others' coefficient lowers the variance.
_ENOUGH = 6


@dataclasses.dataclass(frozen=True)
class ReparameterisedProgram:
    """``E_q`` by pairs ``theta = loc +- sd * eps``, with two gradients and no Hessian a pair.

    The gradient is ``E[grad f]``; the diagonal of the curvature is Stein's identity under the reparameterisation,

        -E[hess f]_dd = -E[(eps_d / sd_d) grad_d f],

    from the half-difference of a pair's gradients, which the gradient at ``loc`` has left. The part of it that is
    proportional to ``eps_d^2 - 1`` (all of it for a factor that is quadratic and separable) is taken off with the
    coefficient that the *other* draws give, so that the estimate stays unbiased (of S pairs this leaves a variance of
    8 / (S (S - 1)) squared curvatures in place of 2 / S, so it is done from six pairs on). It needs no second derivative, hence is
    right where the gradient jumps (ReLU, Laplace). Memory is a handful of vectors of length D, whatever the number of
    draws.

    Args:
        log_density: ``(data, point) -> nats``, the factor on one chunk's rows.
        family: the mean-field Gaussian family of q.
        by_values: whether what gradients leave of a factor that jumps is added by values, as in :class:`PointsProgram`.

    References:
        Khan and Rue, The Bayesian Learning Rule, eq. 10 and 11 (Bonnet's and Price's theorems).
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: NormalFamily
    by_values: bool = False
    noisy: bool = dataclasses.field(default=True, init=False)

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: a few vectors of length D."""
        return 8 * self.family.dim * jnp.dtype(jnp.result_type(float)).itemsize

    def expected(
        self, chunk: tuple, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: ``(data, mask)``; ``moments``: q; ``probe``: Float[D] vector for the curvature product, or None. The product
        is a central difference of the mean gradient along it, on the same draws; ``level``: unused; there is no rule to choose;
        ``noise``: Float[S D] standard normal draws; each is used with both signs; ``clip``: whether (a bool, traced or not) to
        raise negative curvatures to zero. Returns the chunk's expectations.
        """
        loc, sd = moments.loc, moments.scale
        value_and_gradient = value_and_grad(self.log_density, argnums=1)
        zero = jnp.zeros_like(loc)

        def pair(total, eps):
            value, gradient, bend, weighted, product = total
            up, grad_up = value_and_gradient(chunk, loc + sd * eps)
            down, grad_down = value_and_gradient(chunk, loc - sd * eps)
            turn = 0.5 * eps * (grad_up - grad_down)
            product = product if probe is None else product + self._secant(chunk, moments, eps, probe)
            mean = 0.5 * (grad_up + grad_down)
            added = (value + 0.5 * (up + down), gradient + mean)
            own = None
            if self.by_values:
                # What the pair's own gradient and curvature would take off at its own points.
                square = eps**2 - 1
                own = (
                    0.5 * (up + down),
                    0.5 * (up - down),
                    eps * (eps @ (sd * mean)),
                    0.5 * square * (square @ (sd * turn)),
                )
            return (*added, bend + turn, weighted + turn * eps**2, product), own

        first = (jnp.zeros((), loc.dtype), zero, zero, zero, zero)
        totals, pairs = jax.lax.scan(pair, first, noise)
        count = noise.shape[0]
        value, gradient, bend, weighted, product = totals
        own_bend = sd * bend / count
        if count >= _ENOUGH:
            square = jnp.sum(noise**2, axis=0)
            bend = bend - (bend * (square - count + 1) - weighted) / (count - 1)
        precision = -bend / (count * sd)
        if clip is not False:
            precision = jnp.where(clip, jnp.clip(precision, 0.0, None), precision)
        gradient, value = gradient / count, value / count
        if self.by_values:
            own = noise, own_bend, pairs, clip
            gradient, precision, value = self._with_jumps(moments, gradient, value, *own)
        target = self.family.natural(gradient + precision * loc, precision)
        nothing = jnp.zeros((), loc.dtype)
        return Expected(value, target, product / count, nothing, nothing, nothing)

    def _with_jumps(self, moments, gradient, value, noise: Float[Array, "S D"], bend, found: tuple, clip: Any):
        """Gradient, precision and value with what gradients leave of the pairs' values, as in :class:`PointsProgram`.

        At every pair the quadratic that is taken off is that of all others. ``bend``: mean of the pairs' own curvatures in
        whitened coordinates; ``found``: of every pair half the sum and the difference of its values, and what its own gradient and
        curvature would take off.
        """
        count, (even, odd, by_slope, by_bend) = noise.shape[0], found
        square, sd = noise**2 - 1, jax.lax.stop_gradient(moments.scale)
        even, odd, whole, bend, by_slope, by_bend = jax.lax.stop_gradient(
            (even, odd, gradient, bend, by_slope, by_bend)
        )

        def of_others(all_of_it: Array, own: Array) -> Array:
            # From sums with everybody's and with one's own.
            return (count * jnp.mean(all_of_it, axis=0) - jnp.mean(own, axis=0)) / max(count - 1, 1)

        linear = of_others(noise * (noise @ (sd * whole))[:, None], by_slope)
        # Of a single pair there are no others.
        there = float(count > 1)
        slope = (jnp.mean(noise * odd[:, None], axis=0) - linear) / sd + there * whole
        curved = of_others(0.5 * square * (square @ bend)[:, None], by_bend)
        level = of_others(square * jnp.mean(even), square * even[:, None])
        hessian = (jnp.mean(square * even[:, None], axis=0) - level - curved + there * bend) / sd**2
        jump, precision = slope - whole, -hessian
        if clip is not False:
            precision = jnp.where(clip, jnp.clip(precision, 0.0, None), precision)
        # The value's own derivative in a deviation is the pairs' own curvature times it.
        moved = jump @ moments.loc + 0.5 * (hessian - bend / sd**2) @ moments.scale**2
        return gradient + jump, precision, value + moved - jax.lax.stop_gradient(moved)

    def _secant(self, chunk: tuple, moments: GaussianMoments, eps, probe) -> Float[Array, "D"]:
        """``-E[hess f] @ probe`` from one draw: a difference of gradients sees the jumps that a Hessian misses."""
        gradient = grad(self.log_density, argnums=1)
        point = moments.loc + moments.scale * eps
        return 0.5 * (gradient(chunk, point - probe) - gradient(chunk, point + probe))


# ---------------------------------------------------------------------------------------------- log densities at points
# Log densities of one chunk's rows at points, whatever the structure that was found.

# Rows times points that are evaluated at once.
_AT_ONCE = 1 << 18


@singledispatch
def log_density_at(program: Any, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    """The log density of one chunk's rows at one point of the flat unconstrained space, in nats.

    ``program``: the program of the expectations of the chunk; ``chunk``: its arrays; ``point``: where. Returns the sum over the
    chunk's rows; differentiable in ``point``.
    """
    raise TypeError(f"{type(program).__name__} has no log density at a point of the shared latents alone")


@log_density_at.register
def _(program: AffineProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    total = jnp.zeros((), point.dtype)
    for spec, (data, mask) in zip(program.terms, chunk, strict=True):
        predictors = tuple(a @ point + c for a, c in zip(data.design, data.offset, strict=True))
        total = total + jnp.sum(jnp.where(mask, term_log_prob(spec, data, predictors), 0.0))
    return total


@log_density_at.register
def _(program: SharedAffineProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    return log_density_at(program.program, program.program.mask(program.data, program.masks(chunk)), point)


@log_density_at.register
def _(program: QuadraticProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    target = chunk.target
    return chunk.value + point @ target.precision_mean - 0.5 * point @ (target.precision @ point)


@log_density_at.register(IntegratedProgram)
@log_density_at.register(PointsProgram)
@log_density_at.register(ReparameterisedProgram)
def _(program: Any, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    return program.log_density(chunk, point)


def log_densities_at(program: Any, chunk: Any, points: Float[Array, "S D"]) -> Float[Array, "S"]:
    """:func:`log_density_at` at many points, in batches of bounded size."""
    rows = max((x.shape[0] for x in jax.tree.leaves(chunk) if jnp.ndim(x) > 0), default=1)
    if isinstance(program, IntegratedProgram):
        rows = program.cost(chunk.rows.linear.shape[-1])
    batch = max(1, min(points.shape[0], _AT_ONCE // rows))
    if batch >= points.shape[0]:
        return jax.vmap(lambda point: log_density_at(program, chunk, point))(points)
    return jax.lax.map(lambda point: log_density_at(program, chunk, point), points, batch_size=batch)
