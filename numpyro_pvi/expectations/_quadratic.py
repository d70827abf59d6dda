"""Expectations of factors that are quadratic in theta: read off once, in closed form ever after (CVI's conjugate computation)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..families import GaussianFamily, GaussianMoments, MultivariateNormalFamily
from ._expected import Expected


@dataclasses.dataclass(frozen=True)
class QuadraticProgram:
    """``f(theta) = c + h^T theta - 1/2 theta^T P theta``, one (c, h, P) per group.

    Args:
        reader: the program that evaluates the factor at a point (its curvature and gradient there are (P, h)).
        family: the Gaussian family of q.
    """

    reader: Any
    family: GaussianFamily
    noisy: bool = dataclasses.field(default=False, init=False)

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one group holds beside its arrays, in bytes: nothing to speak of."""
        del chunks
        return 0

    def expected(
        self, factor: Expected, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Closed-form expectations of one group's factor.

        Args:
            factor: value c, and natural parameters (h, P) as the full-covariance target, read at the origin.
            moments: q.
            probe: Float[D] vector for the curvature product, or None.
            level: unused.
            noise: unused.
            clip: unused; a quadratic factor is what it is.

        Returns:
            The group's expectations; for a full-covariance q the target is (h, P) itself, to the last bit.
        """
        del level, noise, clip
        full = MultivariateNormalFamily(self.family.dim)
        vector, precision = factor.target.precision_mean, factor.target.precision
        loc = moments.loc
        dense = moments if self.family.full else moments._replace(scale=jnp.diag(moments.scale))
        value = factor.value + full.expect_quadratic(factor.target, dense)
        product = jnp.zeros_like(loc) if probe is None else precision @ probe
        if self.family.full:
            target = factor.target
        else:
            diag = jnp.diagonal(precision)
            target = self.family.natural(vector - precision @ loc + diag * loc, diag)
        return Expected(value, target, product, *(jnp.zeros_like(value),) * 3)
