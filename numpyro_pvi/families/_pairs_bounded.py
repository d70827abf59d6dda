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
    axes: int = 0
    anchored: bool = True

    def coordinates(self, natural):
        mean = BetaFamily().natural_to_mean(natural)
        return Means(mean.log, mean.log_complement)

    def _mean(self, natural):
        a, b = natural.log + 1, natural.log_complement + 1
        return a / (a + b)

    def anchor(self, natural):
        m = self._mean(natural)
        h = 0.5 * jnp.minimum(m, 1 - m)
        return Means(0.5 * (jnp.log(m + h) + jnp.log(m - h)), 0.5 * (jnp.log(1 - m + h) + jnp.log(1 - m - h)))

    def points(self, coordinates, signs):
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
        del coordinates
        return BetaNatural(gradient.first, gradient.second)

    def fit(self, values):
        return Means(jnp.mean(jnp.log(values), axis=0), jnp.mean(jnp.log1p(-values), axis=0))

    def probe(self, natural, key, count):
        m = self._mean(natural)
        return jax.nn.sigmoid(jnp.log(m / (1 - m)) + 0.8 * jax.random.normal(key, (count, *m.shape), m.dtype))


@dataclasses.dataclass(frozen=True)
class DirichletPairs:
    family: DirichletFamily
    axes: int = 0
    anchored: bool = True

    def coordinates(self, natural):
        return Means(self.family.natural_to_mean(natural).log)

    def _mean(self, natural):
        a = natural.log + 1
        return a / jnp.sum(a, axis=-1, keepdims=True)

    def anchor(self, natural):
        return Means(jnp.log(0.9 * self._mean(natural)))

    def points(self, coordinates, signs):
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
        del coordinates
        return DirichletNatural(gradient.first)

    def fit(self, values):
        return Means(jnp.mean(jnp.log(values), axis=0))

    def probe(self, natural, key, count):
        m = self._mean(natural)
        return jax.nn.softmax(jnp.log(m) + 0.7 * jax.random.normal(key, (count, *m.shape), m.dtype), axis=-1)


@dataclasses.dataclass(frozen=True)
class WishartPairs:
    family: WishartFamily
    axes: int = 0
    anchored: bool = True

    def _mean(self, natural):
        return -2 * self.family.natural_to_mean(natural).matrix

    def coordinates(self, natural):
        found = self.family.natural_to_mean(natural)
        mean = -2 * found.matrix
        return MeanGap(mean, (found.log_det - _log_det(mean)) / self.family.dim)

    def anchor(self, natural):
        return MeanGap(self._mean(natural), jnp.full_like(natural.log_det, ANCHOR_GAP))

    def points(self, coordinates, signs):
        width = signs * jnp.sqrt(-jnp.expm1(2 * coordinates.gap))
        return coordinates.mean * (1 + width)[..., None, None]

    def message(self, coordinates, gradient):
        log_det = gradient.gap / self.family.dim
        inner = log_det[..., None, None] * jnp.linalg.inv(coordinates.mean) - symmetrise(gradient.mean)
        return WishartNatural(log_det, 2 * symmetrise(inner))

    def fit(self, values):
        mean = jnp.mean(values, axis=0)
        return MeanGap(mean, (jnp.mean(_log_det(values), axis=0) - _log_det(mean)) / self.family.dim)

    def probe(self, natural, key, count):
        mean = self._mean(natural)
        size = self.family.dim + 4
        noise = jax.random.normal(key, (count, *mean.shape[:-1], size), mean.dtype) / math.sqrt(size)
        root = jnp.einsum("...ij,...jk->...ik", scaled_cholesky(mean)[0], noise)
        return jnp.einsum("...ik,...jk->...ij", root, root)


@dataclasses.dataclass(frozen=True)
class VonMisesPairs:
    axes: int = 0
    anchored: bool = True

    def coordinates(self, natural):
        mean = VonMisesFamily().natural_to_mean(natural)
        return Means(mean.cos, mean.sin)

    def anchor(self, natural):
        length = jnp.hypot(natural.cos, natural.sin)
        flat = length == 0
        length = jnp.where(flat, 1.0, length)
        return Means(0.5 * jnp.where(flat, 1.0, natural.cos / length), 0.5 * natural.sin / length)

    def points(self, coordinates, signs):
        loc = jnp.arctan2(coordinates.second, coordinates.first)
        angle = jnp.arccos(inside_unit(jnp.hypot(coordinates.first, coordinates.second)))
        return _wrap(loc + signs * angle)

    def message(self, coordinates, gradient):
        del coordinates
        return VonMisesNatural(gradient.first, gradient.second)

    def fit(self, values):
        return Means(jnp.mean(jnp.cos(values), axis=0), jnp.mean(jnp.sin(values), axis=0))

    def probe(self, natural, key, count):
        loc = jnp.arctan2(natural.sin, natural.cos)
        return _wrap(loc + 0.8 * jax.random.normal(key, (count, *loc.shape), loc.dtype))


def _log_det(matrix):
    return jnp.linalg.slogdet(matrix)[1]


def _wrap(angle):
    return jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
