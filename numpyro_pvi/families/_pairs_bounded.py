"""Pairs of points for families on an interval, a simplex, a circle, and of precision matrices."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from .._numerics import inside_unit, scaled_cholesky, symmetrise
from ._dirichlet import BetaFamily, BetaNatural, DirichletFamily, DirichletNatural
from ._pair_contract import ANCHOR_GAP, MeanGap, Means
from ._von_mises import VonMisesFamily, VonMisesNatural
from ._wishart import WishartFamily, WishartNatural


@dataclasses.dataclass(frozen=True)
class BetaPairs:
    """Pairs of a beta: two points of the unit interval with given mean logarithms of x and of 1 - x.

    Coordinates are the mean statistics themselves, ``(E log x, E log(1 - x))``, of shape batch. The points have the
    product ``p = exp(2 E log x)`` and the product of complements ``c = exp(2 E log(1 - x))``, so that they solve ``x^2
    - (1 + p - c) x + p = 0``; with the smaller of x and 1 - x as the unknown no digits are lost near the ends.
    Anchored: a wide beta has no such pair in floats, so the average is taken at a pair around q's mean.
    """

    axes: int = 0
    anchored: bool = True

    def coordinates(self, natural):
        """Mean statistics of natural parameters: ``Means(E log x, E log(1 - x))``."""
        mean = BetaFamily().natural_to_mean(natural)
        return Means(mean.log, mean.log_complement)

    def _mean(self, natural):
        a, b = natural.log + 1, natural.log_complement + 1
        return a / (a + b)

    def anchor(self, natural):
        """Those of the points ``m (1 -+ 1/2)`` around the mean m, on the side of the nearer end."""
        m = self._mean(natural)
        h = 0.5 * jnp.minimum(m, 1 - m)
        return Means(0.5 * (jnp.log(m + h) + jnp.log(m - h)), 0.5 * (jnp.log(1 - m + h) + jnp.log(1 - m - h)))

    def points(self, coordinates, signs):
        """The larger root for the sign +1, the smaller for -1, in (0, 1)."""
        # With u the smaller of x and 1 - x, the points have the product p and the sum s.
        swap = coordinates.first > coordinates.second
        low = jnp.where(swap, coordinates.second, coordinates.first)
        high = jnp.where(swap, coordinates.first, coordinates.second)
        p = jnp.exp(2 * low)
        half = 0.5 * (p - jnp.expm1(2 * high))
        larger = half + jnp.sqrt(half**2 - p)
        u = jnp.where(signs > 0, larger, p / larger)
        return jnp.where(swap, 1 - u, u)

    def message(self, coordinates, gradient):
        """``(dF/dE log x, dF/dE log(1 - x))``: coordinates are mean parameters."""
        del coordinates
        return BetaNatural(gradient.first, gradient.second)

    def fit(self, values):
        """Average mean statistics of values in (0, 1), over the first axis."""
        return Means(jnp.mean(jnp.log(values), axis=0), jnp.mean(jnp.log1p(-values), axis=0))

    def probe(self, natural, key, count):
        """Values with logits normally spread by 0.8 around the mean's, ``count`` on a leading axis."""
        m = self._mean(natural)
        return jax.nn.sigmoid(jnp.log(m / (1 - m)) + 0.8 * jax.random.normal(key, (count, *m.shape), m.dtype))


@dataclasses.dataclass(frozen=True)
class DirichletPairs:
    """Pairs of a Dirichlet: two points of the simplex with given mean logarithms.

    The coordinates are the mean statistics, ``E log x_k``, of shape batch x K. The points are ``x_+- = exp(E log x +-
    c)`` in the largest entry and ``exp(E log x -+ d)`` in the others, with the c and d for which both sum to one (a
    quadratic equation in ``e^c``). Anchored: the pair is taken at ``log(0.9 m)`` around q's mean m, and what is affine
    continued to q's own coordinates.

    Args:
        family: whose members; K is its ``dim``.
    """

    family: DirichletFamily
    axes: int = 0
    anchored: bool = True

    def coordinates(self, natural):
        """Mean statistics of natural parameters: ``Means(E log x)``, batch x K."""
        return Means(self.family.natural_to_mean(natural).log)

    def _mean(self, natural):
        a = natural.log + 1
        return a / jnp.sum(a, axis=-1, keepdims=True)

    def anchor(self, natural):
        """``log(0.9 m)``, m the mean: the pair's geometric mean is nine tenths of it in every entry."""
        return Means(jnp.log(0.9 * self._mean(natural)))

    def points(self, coordinates, signs):
        """The point for each sign, batch x K; entries sum to one."""
        # log x_+- = mu +- c on the largest entry (A) and mu -+ d on the others (B), c and d such that both sum to one:
        # with x = e^c, S_A x^2 + (S_B^2 - S_A^2 - 1) x + S_A = 0 and e^d = S_B / (1 - S_A x).
        log = coordinates.first
        largest = jax.lax.stop_gradient(log == jnp.max(log, axis=-1, keepdims=True))
        largest = largest & (jnp.cumsum(largest, axis=-1) == 1)
        a = jnp.sum(jnp.where(largest, jnp.exp(log), 0.0), axis=-1, keepdims=True)
        b = jnp.sum(jnp.where(largest, 0.0, jnp.exp(log)), axis=-1, keepdims=True)
        middle = 0.5 * (1 + a**2 - b**2)
        x = (middle + jnp.sqrt(middle**2 - a**2)) / a
        shift = jnp.where(largest, jnp.log(x), -jnp.log(b / (1 - a * x)))
        return jnp.exp(log + jnp.asarray(signs)[..., None] * shift)

    def message(self, coordinates, gradient):
        """``dF/dE log x``: coordinates are mean parameters."""
        del coordinates
        return DirichletNatural(gradient.first)

    def fit(self, values):
        """Average logarithms of points of the simplex, over the first axis."""
        return Means(jnp.mean(jnp.log(values), axis=0))

    def probe(self, natural, key, count):
        """Softmax of logits normally spread by 0.7 around those of the mean, ``count`` on a leading axis."""
        m = self._mean(natural)
        return jax.nn.softmax(jnp.log(m) + 0.7 * jax.random.normal(key, (count, *m.shape), m.dtype), axis=-1)


@dataclasses.dataclass(frozen=True)
class WishartPairs:
    """Pairs of a Wishart: two multiples of its mean matrix with given mean log determinant.

    Coordinates are ``mean = E X``, batch x D x D, and ``gap = (E log det X - log det E X) / D <= 0``, of shape batch.
    The points are ``E X (1 +- sqrt(1 - exp(2 gap)))``, whose mean is E X and whose mean log determinant is ``log det E
    X + D gap``. Anchored: the gap is that of points at 0.4 and 1.6 times the mean, whatever q's.

    Args:
        family: whose members; D is its ``dim``.
    """

    family: WishartFamily
    axes: int = 0
    anchored: bool = True

    def _mean(self, natural):
        return -2 * self.family.natural_to_mean(natural).matrix

    def coordinates(self, natural):
        """Of natural parameters: ``MeanGap(E X, (E log det X - log det E X) / D)``."""
        found = self.family.natural_to_mean(natural)
        mean = -2 * found.matrix
        return MeanGap(mean, (found.log_det - _log_det(mean)) / self.family.dim)

    def anchor(self, natural):
        """The same mean, with the gap of a moderate width."""
        return MeanGap(self._mean(natural), jnp.full_like(natural.log_det, ANCHOR_GAP))

    def points(self, coordinates, signs):
        """The multiple of the mean for each sign, batch x D x D."""
        width = signs * jnp.sqrt(-jnp.expm1(2 * coordinates.gap))
        return coordinates.mean * (1 + width)[..., None, None]

    def message(self, coordinates, gradient):
        """``dF/dE log det X`` is ``g = dF/dgap / D``, and ``dF/dE(-X/2)`` is ``2 (g (E X)^-1 - dF/dE X)``, symmetric.

        The mean enters the mean log determinant too, at a given gap, which the first term takes out again.
        """
        log_det = gradient.gap / self.family.dim
        inner = log_det[..., None, None] * jnp.linalg.inv(coordinates.mean) - symmetrise(gradient.mean)
        return WishartNatural(log_det, 2 * symmetrise(inner))

    def fit(self, values):
        """Coordinates of the averages of positive definite matrices and their log determinants, over the first axis."""
        mean = jnp.mean(values, axis=0)
        return MeanGap(mean, (jnp.mean(_log_det(values), axis=0) - _log_det(mean)) / self.family.dim)

    def probe(self, natural, key, count):
        """Wishart draws of D + 4 degrees of freedom with q's mean, ``count`` on a leading axis."""
        mean = self._mean(natural)
        size = self.family.dim + 4
        noise = jax.random.normal(key, (count, *mean.shape[:-1], size), mean.dtype) / math.sqrt(size)
        root = jnp.einsum("...ij,...jk->...ik", scaled_cholesky(mean)[0], noise)
        return jnp.einsum("...ik,...jk->...ij", root, root)


@dataclasses.dataclass(frozen=True)
class VonMisesPairs:
    """Pairs of a von Mises: two angles with given mean cosine and sine.

    Coordinates are the mean statistics ``(E cos x, E sin x)``, of shape batch, a point inside the unit circle at the
    angle ``loc`` and the distance r. The points are ``loc +- arccos r``, in [-pi, pi). Anchored at r = 1/2, so that a
    concentrated q keeps its digits.
    """

    axes: int = 0
    anchored: bool = True

    def coordinates(self, natural):
        """Mean statistics of natural parameters: ``Means(E cos x, E sin x)``."""
        mean = VonMisesFamily().natural_to_mean(natural)
        return Means(mean.cos, mean.sin)

    def anchor(self, natural):
        """Half the unit vector of q's location; that of the angle 0 where q is uniform."""
        length = jnp.hypot(natural.cos, natural.sin)
        flat = length == 0
        length = jnp.where(flat, 1.0, length)
        return Means(0.5 * jnp.where(flat, 1.0, natural.cos / length), 0.5 * natural.sin / length)

    def points(self, coordinates, signs):
        """The angle for each sign, in [-pi, pi)."""
        loc = jnp.arctan2(coordinates.second, coordinates.first)
        angle = jnp.arccos(inside_unit(jnp.hypot(coordinates.first, coordinates.second)))
        return _wrap(loc + signs * angle)

    def message(self, coordinates, gradient):
        """``(dF/dE cos x, dF/dE sin x)``: coordinates are mean parameters."""
        del coordinates
        return VonMisesNatural(gradient.first, gradient.second)

    def fit(self, values):
        """Average cosine and sine of angles, over the first axis."""
        return Means(jnp.mean(jnp.cos(values), axis=0), jnp.mean(jnp.sin(values), axis=0))

    def probe(self, natural, key, count):
        """Angles normally spread by 0.8 around the location, ``count`` on a leading axis."""
        loc = jnp.arctan2(natural.sin, natural.cos)
        return _wrap(loc + 0.8 * jax.random.normal(key, (count, *loc.shape), loc.dtype))


def _log_det(matrix):
    return jnp.linalg.slogdet(matrix)[1]


def _wrap(angle):
    return jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
