"""Two equally likely points with given mean statistics, for every family that has such a pair."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from .._numerics import inside_unit, scaled_cholesky, symmetrise
from ._base import Family
from ._dirichlet import BetaFamily, BetaNatural, DirichletFamily, DirichletNatural
from ._gamma import (
    ExponentialLawFamily,
    ExponentialNatural,
    GammaFamily,
    GammaNatural,
    InverseGammaFamily,
    InverseGammaNatural,
)
from ._gamma_quantiles import log_gamma_quantile
from ._gaussian import (
    GaussianNatural,
    LogNormalFamily,
    LogNormalNatural,
    MultivariateNormalFamily,
    NormalFamily,
    ScalarNormalFamily,
    ScalarNormalNatural,
)
from ._markov import MarkovGaussianFamily, MarkovNatural
from ._product import IndependentFamily, base_family
from ._special import log_minus_digamma
from ._transformed import TransformedNormalFamily
from ._von_mises import VonMisesFamily, VonMisesNatural
from ._wishart import WishartFamily, WishartNatural

# --------------------------------------------------------------------------------------------------------- the contract
# Two equally likely points with given mean statistics, for every family that has such a pair.
#
# A function that is affine in ``T(x)`` has the same mean under every distribution with the same mean statistics, so its
# expectation under q is the average over two points ``x_+`` and ``x_-`` with ``(T(x_+) + T(x_-))/2 = mu``. The points
# are differentiable functions of *coordinates* of q (``mu`` itself, or what is well-conditioned in its place), so the
# derivative of that average in them gives the derivative in ``mu``: a conjugate message. A Gaussian vector with full
# covariance has one sign per dimension instead of one.
#
# The pair of a very wide or very narrow q would lie where floats end. Where a rule is ``anchored``, the average is
# taken at other coordinates with the same location and a moderate width, and continued linearly: what is affine allows
# it.

# Relative half-distance of an anchored pair, and log of the ratio of its geometric to its arithmetic mean.
HALF_WIDTH = 0.6
# Least concentration at which a gamma's expectations by nodes begin: those of 1/x^2 are infinite up to 2.
_TAME = 8.0
ANCHOR_GAP = 0.5 * math.log1p(-(HALF_WIDTH**2))


@runtime_checkable
class PairRule(Protocol):
    """How a family's pairs are found; what every implementor owes. Leading axes of everything are batch axes.

    :class:`PairDefaults` has the rest beside ``coordinates``, ``points``, ``message``, ``fit`` and ``probe``. Where a rule has
    ``nodes``, it has these too: ``at_nodes(coordinates, z)``, the values at the levels of a standard normal's ``z``, a function of
    ``node_coordinates(natural)`` with a derivative, and ``node_message``, which makes natural parameters of that.
    """

    @property
    def axes(self) -> int:
        """Signs per member: 0 stands for one sign without an axis of its own, D for D of them on a last axis."""
        ...

    @property
    def anchored(self) -> bool:
        """Whether the average is taken at other coordinates than q's, those of :meth:`anchor`."""
        ...

    @property
    def marginal(self) -> bool:
        """Whether pairs are those of members' marginals, and of use for terms that see one member each alone."""
        ...

    @property
    def scales(self) -> bool:
        """Whether the mean statistics of multiples of values are a function of the values' own."""
        ...

    @property
    def normal(self) -> bool:
        """Whether values are normal; coordinates have the methods of :class:`LocVariance` then."""
        ...

    @property
    def nodes(self) -> bool:
        """Whether values at any level of a standard normal may be asked for; see the class."""
        ...

    @property
    def wild(self) -> bool:
        """Whether expectations at nodes are infinite under some members."""
        ...

    @property
    def value(self) -> Any:
        """A function from coordinates that are normal to values that are images of these; None of others."""
        ...

    @property
    def inverse(self) -> Any:
        """The way back from ``value``; None of others."""
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

    def tamed(self, natural: Any) -> Any:
        """A member near by at which expectations at nodes are finite."""
        ...


class PairDefaults:
    """What follows from the rest of a rule, and what most rules do not have: see :class:`PairRule`."""

    axes: int = 0
    anchored: bool = False
    marginal: bool = False
    scales: bool = False
    normal: bool = False
    nodes: bool = False
    wild: bool = False
    value: Any = None
    inverse: Any = None

    def anchor(self: Any, natural: Any) -> Any:
        """Coordinates of q itself."""
        return self.coordinates(natural)

    def tamed(self, natural: Any) -> Any:
        """The member itself."""
        return natural


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


class Rates(NamedTuple):
    """Coordinates of gammas: concentration and rate, of x or of 1/x."""

    concentration: Any
    rate: Any

    def narrowed(self, widest: float) -> Rates:
        """The same: what is tamed is as narrow as that."""
        return self

    def bent(self) -> Rates:
        """The derivative itself."""
        return self


class Means(NamedTuple):
    """Mean statistics themselves, of families with one or two of them."""

    first: Any
    second: Any = None


# ------------------------------------------------------------------------------ bounded families and precision matrices
# Pairs of points for families on an interval, a simplex, a circle, and of precision matrices.


@dataclasses.dataclass(frozen=True)
class BetaPairs(PairDefaults):
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
        return BetaNatural(gradient.first, gradient.second)

    def fit(self, values):
        """Average mean statistics of values in (0, 1), over the first axis."""
        return Means(jnp.mean(jnp.log(values), axis=0), jnp.mean(jnp.log1p(-values), axis=0))

    def probe(self, natural, key, count):
        """Values with logits normally spread by 0.8 around the mean's, ``count`` on a leading axis."""
        m = self._mean(natural)
        return jax.nn.sigmoid(jnp.log(m / (1 - m)) + 0.8 * jax.random.normal(key, (count, *m.shape), m.dtype))


@dataclasses.dataclass(frozen=True)
class DirichletPairs(PairDefaults):
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
        # with x = e^c, S_A x^2 + (S_B^2 - S_A^2 - 1) x + S_A = 0, and the same of e^d with A and B exchanged. Both roots are made
        # of sums and products of positive numbers: a distribution that is validated has no density beside the simplex.
        log = coordinates.first
        largest = jax.lax.stop_gradient(log == jnp.max(log, axis=-1, keepdims=True))
        largest = largest & (jnp.cumsum(largest, axis=-1) == 1)
        a = jnp.sum(jnp.where(largest, jnp.exp(log), 0.0), axis=-1, keepdims=True)
        b = jnp.sum(jnp.where(largest, 0.0, jnp.exp(log)), axis=-1, keepdims=True)
        root = 0.5 * jnp.sqrt((1 - a - b) * (1 - a + b) * (1 + a - b) * (1 + a + b))
        c = jnp.log((0.5 * (a**2 + (1 - b) * (1 + b)) + root) / a)
        d = jnp.log((0.5 * (b**2 + (1 - a) * (1 + a)) + root) / b)
        found = jnp.exp(log + jnp.asarray(signs)[..., None] * jnp.where(largest, c, -d))
        # What exponentials are rounded to still adds up, and does so whatever the coordinates.
        return found / jax.lax.stop_gradient(jnp.sum(found, axis=-1, keepdims=True))

    def message(self, coordinates, gradient):
        """``dF/dE log x``: coordinates are mean parameters."""
        return DirichletNatural(gradient.first)

    def fit(self, values):
        """Average logarithms of points of the simplex, over the first axis."""
        return Means(jnp.mean(jnp.log(values), axis=0))

    def probe(self, natural, key, count):
        """Softmax of logits normally spread by 0.7 around those of the mean, ``count`` on a leading axis."""
        m = self._mean(natural)
        return jax.nn.softmax(jnp.log(m) + 0.7 * jax.random.normal(key, (count, *m.shape), m.dtype), axis=-1)


@dataclasses.dataclass(frozen=True)
class WishartPairs(PairDefaults):
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
class VonMisesPairs(PairDefaults):
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


# --------------------------------------------------------------------------------------------------------------- chains
# Pairs of Gaussian chains: those of their states' marginals, for terms that see one state each.


@dataclasses.dataclass(frozen=True)
class ChainPairs(PairDefaults):
    """Pairs of a :class:`MarkovGaussianFamily`: coordinates are those of the marginals q(x_t), states are members.

    A sum of terms of one state each has the same expectation under q as under the product of q's marginals, which a Kalman
    smoother gives in O(T). Its derivative in the mean parameters is then that of the marginals', and nothing in ``E[x_(t+1) x_t]``.

    ``base``: the rule of one state: of a scalar normal, or of a normal vector; ``scalar``: whether states are scalars, so that
    expectations of terms that are not quadratic are sums over nodes.
    """

    family: MarkovGaussianFamily
    base: PairRule
    scalar: bool
    anchored: bool = False
    # Terms that see two states depend on more than marginals.
    marginal: bool = True

    @property
    def axes(self) -> int:
        """Signs per state: none of its own for scalars, else D."""
        return self.base.axes

    @property
    def nodes(self) -> bool:
        """Whether values at any multiple of the sd may be asked for."""
        return self.scalar

    def coordinates(self, natural: MarkovNatural) -> Any:
        """Locations and variances (..., T) of scalar states; locations and roots of the covariances of others."""
        loc, covariance, _ = self.family.moments(natural)
        if self.scalar:
            return LocVariance(loc[..., 0], covariance[..., 0, 0])
        own = MultivariateNormalFamily(loc.shape[-1])
        return self.base.coordinates(own.from_loc_covariance(loc, covariance))

    def points(self, coordinates: Any, signs: Any) -> Any:
        """Values of all states, (..., T) or (..., T, D)."""
        return self.base.points(coordinates, signs)

    def message(self, coordinates: Any, gradient: Any) -> MarkovNatural:
        """``dF/dmu``: in the states' own blocks alone."""
        vector, precision = jax.tree.leaves(self.base.message(coordinates, gradient))
        if self.scalar:
            vector, precision = vector[..., None], precision[..., None, None]
        return MarkovNatural(vector, precision, jnp.zeros_like(precision[..., 1:, :, :]))

    def fit(self, values: Any) -> Any:
        """Coordinates of every state on its own."""
        return self.base.fit(values)

    node_coordinates, at_nodes, node_message = coordinates, points, message

    def probe(self, natural: MarkovNatural, key: Any, count: int) -> Any:
        """Draws of whole chains."""
        return self.family.sample(natural, key, (count,))


# ------------------------------------------------------------------------------------------------------ rules by family


@dataclasses.dataclass(frozen=True)
class _Normal(PairDefaults):
    """Of numbers that are normal, or whose ``coordinates`` are; ``shift``: what is added to the first natural parameter."""

    kind: Any
    shift: float = 0.0
    value: Any = None
    inverse: Any = None
    axes: int = 0
    anchored: bool = False
    # "Signs" of any size are values at that multiple of the sd.
    nodes: bool = True

    @property
    def normal(self):
        return self.value is None

    def coordinates(self, natural):
        first, precision = jax.tree.leaves(natural)
        return LocVariance((first + self.shift) / precision, 1 / precision)

    def points(self, coordinates, signs):
        x = coordinates.loc + signs * jnp.sqrt(coordinates.variance)
        return x if self.value is None else self.value(x)

    def message(self, coordinates, gradient):
        precision = -2 * gradient.variance
        return self.kind(gradient.loc + precision * coordinates.loc, precision)

    def fit(self, values):
        x = values if self.inverse is None else self.inverse(values)
        return LocVariance(jnp.mean(x, axis=0), jnp.var(x, axis=0))

    node_coordinates, at_nodes, node_message = coordinates, points, message

    def probe(self, natural, key, count):
        loc, variance = self.coordinates(natural)
        noise = jax.random.normal(key, (count, *loc.shape), loc.dtype)
        if self.value is None:
            return loc + jnp.sqrt(variance) * noise
        # A log-normal as wide as some priors overflows a few sds out.
        return self.value(loc + jnp.minimum(jnp.sqrt(variance), 1.0) * noise)


@dataclasses.dataclass(frozen=True)
class _NormalVector(PairDefaults):
    """Of vectors that are normal, or whose ``coordinates`` are."""

    family: MultivariateNormalFamily
    value: Any = None
    inverse: Any = None
    anchored: bool = False

    @property
    def normal(self):
        return self.value is None

    @property
    def axes(self):
        return self.family.dim

    def coordinates(self, natural):
        moments = self.family.moments(natural)
        return LocRoot(moments.loc, moments.scale)

    def points(self, coordinates, signs):
        x = coordinates.loc + jnp.einsum("...ij,...j->...i", coordinates.root, signs)
        return x if self.value is None else self.value(x)

    def message(self, coordinates, gradient):
        # dF/dV = 1/2 (dF/dS) S^-1 with V = S S^T and S upper triangular.
        turned = jnp.swapaxes(gradient.root, -1, -2)
        precision = -symmetrise(solve_triangular(coordinates.root, turned, trans=1, lower=False))
        image = jnp.einsum("...ij,...j->...i", precision, coordinates.loc)
        return GaussianNatural(gradient.loc + image, precision)

    def fit(self, values):
        x = values if self.inverse is None else self.inverse(values)
        loc = jnp.mean(x, axis=0)
        around = x - loc
        covariance = jnp.einsum("n...i,n...j->...ij", around, around) / values.shape[0]
        size, basis = jnp.linalg.eigh(covariance)
        return LocRoot(loc, basis * jnp.sqrt(jnp.maximum(size, 0.0))[..., None, :])

    def probe(self, natural, key, count):
        x = self.family.sample(natural, key, (count,))
        return x if self.value is None else self.value(x)


@dataclasses.dataclass(frozen=True)
class _Gamma(PairDefaults):
    reciprocal: bool = False
    nodes: bool = True
    wild: bool = True
    axes: int = 0
    anchored: bool = True
    scales: bool = True

    def _rates(self, natural):
        """Concentration and rate of x, or of 1/x."""
        return natural.log - self._more, natural.rate

    def coordinates(self, natural):
        a, b = self._rates(natural)
        return MeanGap(a / b, -log_minus_digamma(a))

    def anchor(self, natural):
        a, b = self._rates(natural)
        return MeanGap(a / b, jnp.full_like(a, ANCHOR_GAP))

    def points(self, coordinates, signs):
        y = coordinates.mean * (1 + signs * jnp.sqrt(-jnp.expm1(2 * coordinates.gap)))
        return 1 / y if self.reciprocal else y

    def message(self, coordinates, gradient):
        rate = gradient.gap / coordinates.mean - gradient.mean
        return (InverseGammaNatural if self.reciprocal else GammaNatural)(gradient.gap, rate)

    def node_coordinates(self, natural):
        return Rates(*self._rates(natural))

    def at_nodes(self, coordinates, z):
        # Of 1/x the tails change places.
        log_y = log_gamma_quantile(-z if self.reciprocal else z, coordinates.concentration) - jnp.log(coordinates.rate)
        return jnp.exp(-log_y if self.reciprocal else log_y)

    def node_message(self, coordinates, gradient):
        family: Any = InverseGammaFamily() if self.reciprocal else GammaFamily()
        kind = InverseGammaNatural if self.reciprocal else GammaNatural
        slope = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(family.natural_to_mean, family.zeros())), gradient)
        return family.fisher_solve(kind(coordinates.concentration + self._more, coordinates.rate), slope)

    @property
    def _more(self):
        return 1 if self.reciprocal else -1

    def tamed(self, natural):
        a, b = self._rates(natural)
        more = jnp.maximum(1.0, _TAME / a)
        return type(natural)(a * more + self._more, b * more)

    def fit(self, values):
        y = 1 / values if self.reciprocal else values
        mean = jnp.mean(y, axis=0)
        return MeanGap(mean, jnp.mean(jnp.log(y), axis=0) - jnp.log(mean))

    def probe(self, natural, key, count):
        a, b = self._rates(natural)
        y = a / b * jnp.exp(0.7 * jax.random.normal(key, (count, *a.shape), a.dtype))
        return 1 / y if self.reciprocal else y


@dataclasses.dataclass(frozen=True)
class _Exponential(PairDefaults):
    axes: int = 0
    anchored: bool = False
    scales: bool = True

    def coordinates(self, natural):
        return Means(1 / natural.rate)

    def points(self, coordinates, signs):
        return coordinates.first * (1 + 0.5 * signs)

    def message(self, coordinates, gradient):
        return ExponentialNatural(-gradient.first)

    def fit(self, values):
        return Means(jnp.mean(values, axis=0))

    def probe(self, natural, key, count):
        rate = natural.rate
        return jnp.exp(0.7 * jax.random.normal(key, (count, *rate.shape), rate.dtype)) / rate


def pair_rule(family: Family) -> PairRule | None:
    """How pairs of a family are found.

    Args:
        family: a family; repetitions are looked through, since their parameters are those of a batch of members.

    Returns:
        The rule; None where the family has no pairs (discrete ones, families from outside), and its
        expectations are taken by draws. A family from outside may have one, as an attribute ``pair_rule``.
    """
    family = base_family(family)
    if isinstance(family, MultivariateNormalFamily):
        return _NormalVector(family)
    if isinstance(family, MarkovGaussianFamily):
        scalar = family.dim is None
        base = _Normal(ScalarNormalNatural) if scalar else _NormalVector(MultivariateNormalFamily(family.dim))
        return ChainPairs(family, base, scalar)
    if isinstance(family, TransformedNormalFamily):
        to, back = family.value, family.coordinates
        if isinstance(family.normal, MultivariateNormalFamily):
            return _NormalVector(family.normal, to, back)
        return _Normal(ScalarNormalNatural, 0.0, to, back)
    if isinstance(family, DirichletFamily):
        return DirichletPairs(family)
    if isinstance(family, WishartFamily):
        return WishartPairs(family)
    rules: dict[type, PairRule] = {
        ScalarNormalFamily: _Normal(ScalarNormalNatural),
        NormalFamily: _Normal(GaussianNatural),
        LogNormalFamily: _Normal(LogNormalNatural, 1.0, jnp.exp, jnp.log),
        GammaFamily: _Gamma(),
        InverseGammaFamily: _Gamma(reciprocal=True),
        ExponentialLawFamily: _Exponential(),
        BetaFamily: BetaPairs(),
        VonMisesFamily: VonMisesPairs(),
    }
    return rules.get(type(family)) or family.pair_rule


def is_wild(family: Family) -> bool:
    """Whether expectations at nodes are infinite under some of a family's members."""
    rule = pair_rule(family)
    return rule is not None and rule.wild


def members_of(family: Family) -> tuple[int, ...]:
    """Axes of a family's parameters along which members are, batch axes apart: independent ones, or states of a chain."""
    found: tuple[int, ...] = ()
    while isinstance(family, IndependentFamily):
        found, family = (*found, *family.shape), family.base
    if isinstance(family, MarkovGaussianFamily):
        return (*found, family.num_steps)
    return (*found, family.dim) if isinstance(family, NormalFamily) else found
