"""What is not missing: entries of a latent that NumPyro's ``obs_mask`` leaves without a density."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost

_OBSERVED, _UNOBSERVED = "_observed", "_unobserved"
_LOG_2PI = math.log(2 * math.pi)


class Completed(dist.MaskedDistribution):
    """A masked distribution whose masked entries have a density that integrates to 1 and depends on nothing: a standard normal's.

    In unconstrained space, that is; of finitely many values, the same probability for each. Draws are the base's, as of every
    masked distribution.
    """

    def log_prob(self, value: Any, intermediates: Any = None) -> Float[Array, "*batch"]:
        """Log density in nats."""
        return jnp.asarray(super().log_prob(value)) + jnp.where(self._mask, 0.0, self._log_reference(value))

    def _log_reference(self, value: Any) -> Any:
        if self.support.is_discrete:
            return -math.log(len(self.enumerate_support(expand=False)))
        transform = biject_to(self.support)
        free = transform.inv(value)
        batch = jnp.ndim(value) - self.event_dim
        jacobian = jnp.asarray(transform.log_abs_det_jacobian(free, value))
        terms = (-0.5 * (free**2 + _LOG_2PI), -jacobian)
        return sum(sum_rightmost(x, jnp.ndim(x) - batch) for x in terms)


def _completed(fn: Any, of: Any) -> Any:
    """A latent's distribution with its ``obs_mask`` completed; the same one where there is none, or its values are without end.

    ``of``: the distribution of what is observed. The same masks lie around both, and within both a user's own, but for NumPyro's
    own two, each of which leaves in what the other leaves out: the innermost that are not one array.
    """
    wrapped = dist.MaskedDistribution | dist.ExpandedDistribution
    if not (isinstance(fn, wrapped) and type(fn) is type(of)):
        return fn
    inner, masked = _completed(fn.base_dist, of.base_dist), isinstance(fn, dist.MaskedDistribution)
    if inner is not fn.base_dist:
        return inner.mask(fn._mask) if masked else inner.expand(fn.batch_shape)
    if not masked or fn._mask is of._mask or (fn.support.is_discrete and not fn.has_enumerate_support):
        return fn
    return Completed(inner, fn._mask)


def missing_of(name: str) -> str:
    """The sample site whose missing data a latent stands for, by its name; an empty one where it is no such name."""
    return name.removesuffix(_UNOBSERVED) if name.endswith(_UNOBSERVED) else ""


def with_missing_only(msg: dict[str, Any], observed: dict[str, Any]) -> None:
    """Complete the latent that ``numpyro.sample(name, fn, obs=, obs_mask=)`` has for what is missing.

    It is as long as all of the data. Where these are there, NumPyro masks it, and nothing reads it: an improper posterior, along
    which q would run away. With a density of their own that depends on nothing, these entries change neither the posterior of
    the others nor the evidence.

    Args:
        msg: a sample site's message, whose distribution is replaced.
        observed: distributions of observed sites so far by name, to which this one is added if it is one: NumPyro's own latent
            ``<name>_unobserved`` comes after ``<name>_observed``.
    """
    name = msg["name"]
    of = observed.get(missing_of(name) + _OBSERVED)
    if msg["is_observed"]:
        observed[name] = msg["fn"]
    elif of is not None:
        msg["fn"] = _completed(msg["fn"], of)


def completed_in(fn: Any) -> Completed | None:
    """What is completed of a latent's distribution, inside what lies around it; None where nothing is."""
    while hasattr(fn, "base_dist") and not isinstance(fn, Completed):
        fn = fn.base_dist
    return fn if isinstance(fn, Completed) else None
