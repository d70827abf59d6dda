"""Two equally likely points with given mean statistics, for every family that has such a pair.

A function that is affine in ``T(x)`` has the same mean under every distribution with the same mean statistics, so its
expectation under q is the average over two points ``x_+`` and ``x_-`` with ``(T(x_+) + T(x_-))/2 = mu``. The points are
differentiable functions of *coordinates* of q (``mu`` itself, or what is well-conditioned in its place), so the
derivative of that average in them gives the derivative in ``mu``: a conjugate message. A Gaussian vector with full
covariance has one sign per dimension instead of one.

The pair of a very wide or very narrow q would lie where floats end. Where a rule is ``anchored``, the average is taken at
other coordinates with the same location and a moderate width, and continued linearly: what is affine allows it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array

# Relative half-distance of an anchored pair, and log of the ratio of its geometric to its arithmetic mean.
HALF_WIDTH = 0.6
ANCHOR_GAP = 0.5 * math.log1p(-(HALF_WIDTH**2))


@runtime_checkable
class PairRule(Protocol):
    """How a family's pairs are found; what every implementor owes. Leading axes of everything are batch axes.

    ``axes`` is the number of signs per member: 0 stands for one sign without an axis of its own, D for D of them on a last
    axis. ``anchored`` says whether :meth:`anchor` gives other coordinates. A rule may have ``scales = True``: the mean
    statistics of multiples of values are a function of the values' own; and ``normal = True``: values are normal, and coordinates
    have the methods of :class:`LocVariance`.
    """

    @property
    def axes(self) -> int:
        """Signs per member; see the class."""
        ...

    @property
    def anchored(self) -> bool:
        """Whether the average is taken at other coordinates than q's."""
        ...

    def coordinates(self, natural: Any) -> Any:
        """A tuple of arrays that fixes the mean statistics."""
        ...

    def anchor(self, natural: Any) -> Any:
        """Coordinates of a moderate width, at q's location."""
        ...

    def points(self, coordinates: Any, signs: Any) -> Array:
        """The values that signs of +1 and -1 stand for."""
        ...

    def message(self, coordinates: Any, gradient: Any) -> Any:
        """Natural parameters ``dF/dmu`` from the derivative of F in the coordinates."""
        ...

    def fit(self, values: Array) -> Any:
        """Coordinates whose mean statistics are the averages of some values' (first axis)."""
        ...

    def probe(self, natural: Any, key: Any, count: int) -> Array:
        """Values around q's location, ``count`` on a leading axis: spread moderately, whatever q's width."""
        ...


class LocVariance(NamedTuple):
    """Coordinates of normals: location and variance."""

    loc: Any
    variance: Any

    def between(self, left: Array, right: Array) -> Array:
        """Covariance of the linear functions ``left @ x`` and ``right @ x`` of all members x (last axis)."""
        return (left * right) @ self.variance.reshape(-1)

    def narrowed(self, widest: float) -> LocVariance:
        """The same with variances of at most ``widest``."""
        return self._replace(variance=jnp.minimum(self.variance, widest))

    def bent(self) -> LocVariance:
        """Of a derivative in these coordinates, what makes no precision below zero."""
        return self._replace(variance=jnp.minimum(self.variance, 0.0))


class LocRoot(NamedTuple):
    """Coordinates of normal vectors: location and a square root of the covariance. Its methods are those of LocVariance."""

    loc: Any
    root: Any

    def between(self, left: Array, right: Array) -> Array:
        """Covariance of linear functions of all vectors, end to end; see :meth:`LocVariance.between`."""
        dim = self.loc.shape[-1]
        root = self.root.reshape(-1, dim, dim)
        a, b = (jnp.einsum("...mi,mij->...mj", x.reshape(*x.shape[:-1], -1, dim), root) for x in (left, right))
        return jnp.sum(a * b, axis=(-1, -2))

    def narrowed(self, widest: float) -> LocRoot:
        """The same with smaller covariances, whose variances are at most ``widest``."""
        largest = jnp.max(jnp.sum(self.root**2, axis=-1), axis=-1)
        return self._replace(root=self.root * jnp.sqrt(jnp.minimum(1.0, widest / largest))[..., None, None])

    def bent(self) -> LocRoot:
        """The derivative itself: what it makes is a matrix."""
        return self


class MeanGap(NamedTuple):
    """Coordinates of gammas and Wisharts: mean, and by how much the mean logarithm (per dimension) is below its logarithm."""

    mean: Any
    gap: Any


class Means(NamedTuple):
    """Mean statistics themselves, of families with one or two of them."""

    first: Any
    second: Any = None
