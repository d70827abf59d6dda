"""What is not missing: entries of a latent that NumPyro's ``obs_mask`` leaves without a density."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost

_OBSERVED, _UNOBSERVED = "_observed", "_unobserved"
_LOG_2PI = math.log(2 * math.pi)


class Completed(dist.Distribution):
    """A distribution whose masked entries have a density that integrates to 1 and depends on nothing: a standard normal's.

    In unconstrained space, that is; of finitely many values, the same probability for each.

    Args:
        base: the distribution where it counts.
        mask: Bool[*batch], where it does.
    """

    def __init__(self, base: Any, mask: Any) -> None:
        # Under another name than NumPyro's `base_dist`, which stands for what the whole distribution is made of.
        self.counted, self.mask_of = base, mask
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def support(self) -> Any:  # type: ignore[override]
        """The same as of the base."""
        return self.counted.support

    @property
    def has_enumerate_support(self) -> bool:  # type: ignore[override]
        """The same as of the base."""
        return self.counted.has_enumerate_support

    def enumerate_support(self, expand: bool = True) -> Array:
        """The same as of the base."""
        return self.counted.enumerate_support(expand=expand)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws, everywhere of the base: masked entries are read by nothing."""
        return self.counted.sample(key, sample_shape)

    def log_prob(self, value: Any, intermediates: Any = None) -> Array:
        """Log density in nats, in batch shape."""
        return jnp.where(self.mask_of, self.counted.log_prob(value), self._log_reference(value))

    def _log_reference(self, value: Any) -> Any:
        if self.support.is_discrete:
            return -math.log(len(self.enumerate_support(expand=False)))
        transform = biject_to(self.support)
        free = transform.inv(value)
        batch = jnp.ndim(value) - self.event_dim
        jacobian = transform.log_abs_det_jacobian(free, value)
        normal, volume = (
            sum_rightmost(x, jnp.ndim(x) - batch) for x in (-0.5 * (free**2 + _LOG_2PI), jnp.asarray(jacobian))
        )
        return normal - volume


def _completed(fn: Any) -> Any:
    """A distribution with the entries of its innermost mask completed; the same one where it has none to complete."""
    if not isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution):
        return fn
    inner = _completed(fn.base_dist)
    if inner is not fn.base_dist:
        return inner.mask(fn._mask) if isinstance(fn, dist.MaskedDistribution) else inner.expand(fn.batch_shape)
    if isinstance(fn, dist.ExpandedDistribution) or (inner.support.is_discrete and not inner.has_enumerate_support):
        return fn
    return Completed(inner, fn._mask)


def missing_of(name: str) -> str:
    """The sample site whose missing data a latent stands for, by its name; an empty one where it is no such name."""
    return name.removesuffix(_UNOBSERVED) if name.endswith(_UNOBSERVED) else ""


def with_missing_only(msg: dict[str, Any], observed: set[str]) -> None:
    """Complete the latent that ``numpyro.sample(name, fn, obs=, obs_mask=)`` has for what is missing.

    It is as long as all of the data. Where these are there, NumPyro masks it, and nothing reads it: an improper posterior, along
    which q would run away. With a density of their own that depends on nothing, these entries change neither the posterior of
    the others nor the evidence.

    Args:
        msg: a sample site's message, whose distribution is replaced.
        observed: names of observed sites so far, to which this one is added if it is one: NumPyro's own latent
            ``<name>_unobserved`` comes after ``<name>_observed``.
    """
    name = msg["name"]
    if msg["is_observed"]:
        observed.add(name)
    elif missing_of(name) + _OBSERVED in observed:
        msg["fn"] = _completed(msg["fn"])
