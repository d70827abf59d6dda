"""Which rule finds a family's pairs of points, and the rules of normals and gammas; see :mod:`._pair_contract`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from .._numerics import symmetrise
from ._base import Family
from ._dirichlet import BetaFamily, DirichletFamily
from ._gamma import (
    ExponentialLawFamily,
    ExponentialNatural,
    GammaFamily,
    GammaNatural,
    InverseGammaFamily,
    InverseGammaNatural,
)
from ._gaussian import MultivariateNormalFamily, NormalFamily
from ._gaussian_base import GaussianNatural
from ._independent import IndependentFamily, base_family
from ._markov import MarkovGaussianFamily
from ._normal import LogNormalFamily, LogNormalNatural, ScalarNormalFamily, ScalarNormalNatural
from ._pair_contract import ANCHOR_GAP, LocRoot, LocVariance, MeanGap, Means, PairRule
from ._pairs_bounded import BetaPairs, DirichletPairs, VonMisesPairs, WishartPairs
from ._pairs_chain import ChainPairs
from ._special import log_minus_digamma
from ._von_mises import VonMisesFamily
from ._wishart import WishartFamily


@dataclasses.dataclass(frozen=True)
class _Normal:
    kind: Any
    log: bool = False
    axes: int = 0
    anchored: bool = False
    # "Signs" of any size are values at that multiple of the sd.
    nodes: bool = True

    @property
    def normal(self):
        return not self.log

    def coordinates(self, natural):
        first, precision = jax.tree.leaves(natural)
        return LocVariance((first + self.log) / precision, 1 / precision)

    def anchor(self, natural):
        return self.coordinates(natural)

    def points(self, coordinates, signs):
        x = coordinates.loc + signs * jnp.sqrt(coordinates.variance)
        return jnp.exp(x) if self.log else x

    def message(self, coordinates, gradient):
        precision = -2 * gradient.variance
        return self.kind(gradient.loc + precision * coordinates.loc, precision)

    def fit(self, values):
        x = jnp.log(values) if self.log else values
        return LocVariance(jnp.mean(x, axis=0), jnp.var(x, axis=0))

    def probe(self, natural, key, count):
        loc, variance = self.coordinates(natural)
        noise = jax.random.normal(key, (count, *loc.shape), loc.dtype)
        # A log-normal as wide as some priors overflows a few sds out.
        sd = jnp.minimum(jnp.sqrt(variance), 1.0) if self.log else jnp.sqrt(variance)
        return jnp.exp(loc + sd * noise) if self.log else loc + sd * noise


@dataclasses.dataclass(frozen=True)
class _NormalVector:
    family: MultivariateNormalFamily
    anchored: bool = False
    normal: bool = True

    @property
    def axes(self):
        return self.family.dim

    def coordinates(self, natural):
        moments = self.family.moments(natural)
        return LocRoot(moments.loc, moments.scale)

    def anchor(self, natural):
        return self.coordinates(natural)

    def points(self, coordinates, signs):
        return coordinates.loc + jnp.einsum("...ij,...j->...i", coordinates.root, signs)

    def message(self, coordinates, gradient):
        # dF/dV = 1/2 (dF/dS) S^-1 with V = S S^T and S upper triangular.
        turned = jnp.swapaxes(gradient.root, -1, -2)
        precision = -symmetrise(solve_triangular(coordinates.root, turned, trans=1, lower=False))
        image = jnp.einsum("...ij,...j->...i", precision, coordinates.loc)
        return GaussianNatural(gradient.loc + image, precision)

    def fit(self, values):
        loc = jnp.mean(values, axis=0)
        around = values - loc
        covariance = jnp.einsum("n...i,n...j->...ij", around, around) / values.shape[0]
        size, basis = jnp.linalg.eigh(covariance)
        return LocRoot(loc, basis * jnp.sqrt(jnp.maximum(size, 0.0))[..., None, :])

    def probe(self, natural, key, count):
        return self.family.sample(natural, key, (count,))


@dataclasses.dataclass(frozen=True)
class _Gamma:
    inverse: bool = False
    axes: int = 0
    anchored: bool = True
    scales: bool = True

    def _rates(self, natural):
        """Concentration and rate of x, or of 1/x."""
        return natural.log + (-1 if self.inverse else 1), natural.rate

    def coordinates(self, natural):
        a, b = self._rates(natural)
        return MeanGap(a / b, -log_minus_digamma(a))

    def anchor(self, natural):
        a, b = self._rates(natural)
        return MeanGap(a / b, jnp.full_like(a, ANCHOR_GAP))

    def points(self, coordinates, signs):
        y = coordinates.mean * (1 + signs * jnp.sqrt(-jnp.expm1(2 * coordinates.gap)))
        return 1 / y if self.inverse else y

    def message(self, coordinates, gradient):
        rate = gradient.gap / coordinates.mean - gradient.mean
        return (InverseGammaNatural if self.inverse else GammaNatural)(gradient.gap, rate)

    def fit(self, values):
        y = 1 / values if self.inverse else values
        mean = jnp.mean(y, axis=0)
        return MeanGap(mean, jnp.mean(jnp.log(y), axis=0) - jnp.log(mean))

    def probe(self, natural, key, count):
        a, b = self._rates(natural)
        y = a / b * jnp.exp(0.7 * jax.random.normal(key, (count, *a.shape), a.dtype))
        return 1 / y if self.inverse else y


@dataclasses.dataclass(frozen=True)
class _Exponential:
    axes: int = 0
    anchored: bool = False
    scales: bool = True

    def coordinates(self, natural):
        return Means(1 / natural.rate)

    def anchor(self, natural):
        return self.coordinates(natural)

    def points(self, coordinates, signs):
        return coordinates.first * (1 + 0.5 * signs)

    def message(self, coordinates, gradient):
        del coordinates
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
    if isinstance(family, DirichletFamily):
        return DirichletPairs(family)
    if isinstance(family, WishartFamily):
        return WishartPairs(family)
    rules: dict[type, PairRule] = {
        ScalarNormalFamily: _Normal(ScalarNormalNatural),
        NormalFamily: _Normal(GaussianNatural),
        LogNormalFamily: _Normal(LogNormalNatural, log=True),
        GammaFamily: _Gamma(),
        InverseGammaFamily: _Gamma(inverse=True),
        ExponentialLawFamily: _Exponential(),
        BetaFamily: BetaPairs(),
        VonMisesFamily: VonMisesPairs(),
    }
    return rules.get(type(family)) or family.pair_rule


def members_of(family: Family) -> tuple[int, ...]:
    """Axes of a family's parameters along which members are, batch axes apart: independent ones, or states of a chain."""
    found: tuple[int, ...] = ()
    while isinstance(family, IndependentFamily):
        found, family = (*found, *family.shape), family.base
    if isinstance(family, MarkovGaussianFamily):
        return (*found, family.num_steps)
    return (*found, family.dim) if isinstance(family, NormalFamily) else found
