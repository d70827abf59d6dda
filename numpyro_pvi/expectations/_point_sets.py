"""Sets of points that stand for a standard normal: sigma points, product rules, random ones; and whether two of them agree."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..families import GaussianFamily, GaussianMoments
from ._expected import Expected

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


@cache
def sigma_arrays(dim: int) -> tuple[np.ndarray, np.ndarray]:
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
    eps, weight = sigma_arrays(dim)
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
def product_arrays(dim: int, nodes: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
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
    eps, weight = product_arrays(dim, nodes)
    pairs = sigma_arrays(dim)[0].shape[0]
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


def either_points(choice: Bool[Array, ""], one: PointSet, other: PointSet) -> PointSet:
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
    pairs = sigma_arrays(dim)[0].shape[0]
    blocks, rotations = -(-num_pairs // pairs), pairs // dim
    axes_key, shift_key = jax.random.split(key)
    gaussian = jax.random.normal(axes_key, (blocks * rotations, dim, dim), dtype)
    axes = jnp.linalg.qr(gaussian)[0].reshape(blocks, pairs, dim)
    steps = np.asarray(_GOLDEN * np.arange(blocks * pairs) % 1.0)
    level = (jax.random.uniform(shift_key, (), dtype) + jnp.asarray(steps, dtype)) % 1.0
    table = jnp.asarray(_radius_quantiles(dim), dtype)
    radius = jnp.interp(level * _QUANTILES - 0.5, jnp.arange(_QUANTILES, dtype=dtype), table).reshape(blocks, pairs)
    return PointSet(axes * radius[..., None], 1.0 / (rotations * radius**2), blocks)


# ------------------------------------------------------------------------------------------- shared and own latents
# Fixed points for factors whose rows have latents of their own: a rule in the shared latents times one in those of a row.

# Nodes an axis of a row's own latents, by their number, which do not become narrow as rows become many, and those that they are
# held to; beyond, sigma points.
_OWN_NODES, _OWN_CHECK = {1: 5, 2: 3, 3: 3}, {1: 6, 2: 4, 3: 4}
# Nodes an axis of the shared latents at most, by their number, and for more; and at least.
_MOST_SHARED, _SHARED_OF_MORE, _LEAST_SHARED = {1: 9, 2: 6, 3: 5, 4: 4}, 4, {1: 9, 2: 4, 3: 4}
# Rows times points times latents, each of which is a tangent, that an evaluation by such points may cost.
_MOST_TANGENTS = 1 << 20
# Points that are few enough whatever the rows: two and a half times as many as draws, which are looked at twice a round.
_AS_DRAWS = 100


class FixedRule(NamedTuple):
    """Points of a standard normal and their weights, which add up to 1, with its mean and covariance."""

    eps: np.ndarray
    weight: np.ndarray


class JointRules(NamedTuple):
    """Fixed points over shared and own latents, what they are held to, and whether they are a product rule."""

    used: FixedRule
    check: FixedRule
    product: bool


@cache
def joint_rules(dim: int, width: int, num_rows: int) -> JointRules | None:
    """Fixed points over the shared latents and those of one row.

    ``dim``: D, shared latents; ``width``: K, latents of a row; ``num_rows``: N. Returns a product of Gauss-Hermite rules where both
    and the rows are few enough; else nodes in the latents of a row times a fully symmetric rule in the shared ones, which many rows
    know well: of degree five from four latents on, or sigma points; None where not even these are few enough. More than three own
    latents are at sigma points, and then nothing is called a product. Each is held to a rule of its kind with fewer or other nodes.
    """
    own, own_check = _own(width, False), _own(width, True)
    each = max(num_rows, 1) * (dim + width) * len(own.weight)
    most = _MOST_SHARED.get(dim, _SHARED_OF_MORE)
    nodes = [n for n in range(most, _LEAST_SHARED.get(dim, 3) - 1, -1) if n**dim * each <= _MOST_TANGENTS]
    if nodes:
        # Two nodes are no measure of three, which are of degree five.
        check = (
            fifth_degree(dim, dim + 2)
            if nodes[0] == 3 and dim > 4
            else product_rule_of(dim, nodes[0] - 1 if nodes[0] > 3 else 4)
        )
        # Sigma points of many own latents are no product, and leave out what no node has seen.
        return JointRules(_times(product_rule_of(dim, nodes[0]), own), _times(check, own_check), width in _OWN_NODES)
    if dim >= 4 and (2 * dim**2 + 1) * each <= _MOST_TANGENTS:
        # In four dimensions points on axes have no weight, and both are one, whose coordinates are those of three nodes.
        check = fifth_degree(dim, dim + 2) if dim > 4 else product_rule_of(dim, 4)
        return JointRules(_times(fifth_degree(dim, 3), own), _times(check, own_check), False)
    shared = _signed(*sigma_arrays(dim))
    check = product_rule_of(dim, 7 if dim == 1 else 3) if dim < 4 else _star(dim, dim + 2)
    rules = JointRules(_times(shared, own), _times(check, own_check), False)
    few = len(rules.used.weight) <= _AS_DRAWS or len(shared.weight) * each <= _MOST_TANGENTS
    return rules if few else None


def product_rule_of(dim: int, nodes: int) -> FixedRule:
    """A product of Gauss-Hermite rules as single points. ``dim``: D; ``nodes``: along every axis."""
    return _signed(*product_arrays(dim, nodes))


def _own(width: int, check: bool) -> FixedRule:
    if width in _OWN_NODES:
        return product_rule_of(width, (_OWN_CHECK if check else _OWN_NODES)[width])
    return _star(width, width + 2) if check else _signed(*sigma_arrays(width))


def _signed(eps: np.ndarray, weight: np.ndarray) -> FixedRule:
    """Pairs as single points, the centre with the weight that is left."""
    centre, zero = 1.0 - weight.sum(), np.zeros((1, eps.shape[1]))
    points, weights = np.concatenate([zero, eps, -eps]), np.concatenate([[centre], 0.5 * weight, 0.5 * weight])
    kept = np.abs(weights) > 1e-12
    return FixedRule(points[kept], weights[kept])


def _star(dim: int, square: int) -> FixedRule:
    """Points along the axes at one distance, with its square: exact to degree three."""
    return _signed(np.sqrt(square) * np.eye(dim), np.full(dim, 1 / square))


def fifth_degree(dim: int, square: int) -> FixedRule:
    """The centre and points on axes and on diagonals of pairs of them: exact to degree five for squares of 3 and D + 2.

    ``dim``: D, at least 2; ``square``: s, of the distance of points on axes, whose weight is a; those on diagonals have squared
    coordinates t and weight b. Of the moments, ``x^4`` asks for ``3 = 2 a s^2 + 4 (D - 1) b t^2``, ``x^2 y^2`` for
    ``1 = 4 b t^2`` and ``x^2`` for ``1 = 2 a s + 4 (D - 1) b t``, which t = 3 and t = s / 2 meet for these.
    """
    plane = 3.0 if square == 3 else square / 2
    pairs = [np.eye(dim)[i] + sign * np.eye(dim)[j] for i in range(dim) for j in range(i) for sign in (1, -1)]
    diagonal = 1 / (4 * plane**2)
    axis = (3 - (dim - 1)) / (2 * square**2)
    eps = np.concatenate([np.sqrt(square) * np.eye(dim), np.sqrt(plane) * np.array(pairs)])
    return _signed(eps, 2 * np.concatenate([np.full(dim, axis), np.full(len(pairs), diagonal)]))


def _times(one: FixedRule, other: FixedRule) -> FixedRule:
    """The product of two rules, each in coordinates of its own; points that count for next to nothing are left out."""
    first, second = np.repeat(one.eps, len(other.eps), axis=0), np.tile(other.eps, (len(one.eps), 1))
    eps, weight = np.concatenate([first, second], axis=1), np.outer(one.weight, other.weight).ravel()
    kept = np.abs(weight) > 0.5 * _LEAST_WEIGHT
    return FixedRule(eps[kept], weight[kept])


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
    wrong = differing(value, even, odd, eps.shape[1], weight, telling, again)
    drawn = jnp.isfinite(jnp.sum(pairs.value) + jnp.sum(even) + jnp.sum(odd))
    known = jnp.isfinite(factor.value) & jnp.all(jnp.isfinite(image))
    finite = jnp.isfinite(jnp.sum(pairs.value)) & jnp.all(jnp.isfinite(pairs.target.precision_mean))
    return jnp.where(known, drawn & wrong, finite)


def differing(
    value: Float[Array, "K"],
    even: Float[Array, "K J"],
    odd: Float[Array, "K"],
    dim: int,
    weight: Float[Array, "K"] | None = None,
    telling: Bool[Array, ""] | bool = True,
    again: Bool[Array, ""] | bool = False,
) -> Bool[Array, ""]:
    """Whether the means of samples are further from 0 than is put up with, beyond their own standard errors.

    ``value``: of what a value is off, in nats; ``even``: of what gradients are, in nats per posterior sd; ``odd``: of what the
    whitened curvature's trace is; ``dim``: coordinates of that; the others as of :func:`disagreement`. Returns whether one is.
    """
    count, by_draws = value.shape[0], weight is None
    share = jnp.full((count,), 1.0 / count, value.dtype) if weight is None else weight

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
    return wrong | (telling & (jnp.sqrt(variance(value)) > jnp.where(again, _CONFIRMING, _UNTELLING)))
