"""The marginal of one latent as a distribution in its own support, with the moments that NumPyro leaves out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions.transforms import ExpTransform, IndependentTransform, ReshapeTransform, biject_to


class _Marginal(dist.TransformedDistribution):
    """A Gaussian seen through one transform, which knows its mean and variance where these have closed forms."""

    @property
    def _kind(self) -> Any:
        """The transform of one element, or of the shape."""
        (transform,) = self.transforms
        return transform.base_transform if isinstance(transform, IndependentTransform) else transform

    @property
    def mean(self) -> Array:
        if isinstance(self._kind, ReshapeTransform):
            return self.base_dist.mean.reshape(self.batch_shape + self.event_shape)
        if isinstance(self._kind, ExpTransform):
            return jnp.exp(self.base_dist.mean + 0.5 * self.base_dist.variance)
        return super().mean

    @property
    def variance(self) -> Array:
        if isinstance(self._kind, ReshapeTransform):
            return self.base_dist.variance.reshape(self.batch_shape + self.event_shape)
        if isinstance(self._kind, ExpTransform):
            return self.mean**2 * jnp.expm1(self.base_dist.variance)
        return super().variance


def event_rank(fn: Any) -> int:
    """Number of axes of one event of a latent in unconstrained space."""
    return biject_to(fn.support).domain.event_dim


def in_own_support(
    fn: Any, loc: Float[Array, "*shape"], sd: Float[Array, "*shape"], covariance: Float[Array, "*batch E E"] | None
) -> dist.Distribution:
    """The distribution of a latent that is Gaussian in unconstrained space.

    Args:
        fn: the latent's distribution in the model, which gives the support.
        loc: unconstrained mean.
        sd: unconstrained standard deviations.
        covariance: within each event, flattened; None where its elements are independent.

    Returns:
        A distribution with the latent's shapes. ``mean`` and ``variance`` are there for real and positive supports.
    """
    rank, transform = event_rank(fn), biject_to(fn.support)
    if covariance is None or rank == 0:
        base: dist.Distribution = dist.Normal(loc, sd).to_event(rank)
    else:
        event = loc.shape[loc.ndim - rank :]
        size = int(np.prod(event))
        base = dist.MultivariateNormal(loc.reshape(*loc.shape[: loc.ndim - rank], size), covariance)
        if rank != 1:
            base = _Marginal(base, ReshapeTransform(event, (size,)))
    real = getattr(fn.support, "base_constraint", fn.support) is dist.constraints.real
    return base if real else _Marginal(base, transform)
