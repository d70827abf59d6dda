"""Pairs of Gaussian chains: those of their states' marginals, for terms that see one state each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._gaussian import MultivariateNormalFamily
from ._markov import MarkovGaussianFamily, MarkovNatural
from ._pair_contract import LocVariance, PairRule


@dataclasses.dataclass(frozen=True)
class ChainPairs:
    """Pairs of a :class:`MarkovGaussianFamily`: coordinates are those of the marginals q(x_t), states are members.

    A sum of terms of one state each has the same expectation under q as under the product of q's marginals, which a Kalman
    smoother gives in O(T). Its derivative in the mean parameters is then that of the marginals', and nothing in ``E[x_(t+1) x_t]``.

    Attributes:
        family: of chains.
        base: the rule of one state: of a scalar normal, or of a normal vector.
        scalar: whether states are scalars, so that expectations of terms that are not quadratic are sums over nodes.
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

    def anchor(self, natural: MarkovNatural) -> Any:
        """The coordinates: a chain's are not anchored elsewhere."""
        return self.coordinates(natural)

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

    def probe(self, natural: MarkovNatural, key: Any, count: int) -> Any:
        """Draws of whole chains."""
        return self.family.sample(natural, key, (count,))


__all__ = ["ChainPairs"]
