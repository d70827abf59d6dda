"""Which exponential family a NumPyro distribution belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from ..errors import GuideError
from ._base import Family

# Distribution class -> family, or a function that makes the family from a distribution of that class.
_REGISTRY: dict[type, Family | Callable[[Any], Family]] = {}


def register_family(distribution_class: type, family: Family | Callable[[Any], Family]) -> None:
    """Say which family a latent whose prior is a distribution of this class is given.

    Args:
        distribution_class: a subclass of ``numpyro.distributions.Distribution``. Its subclasses are covered too, unless
            they have an entry of their own.
        family: the family, or a function of the distribution that makes it, for families that depend on a size. Its
            ``from_distribution`` must accept distributions of this class. A later entry replaces an earlier one.

    Raises:
        TypeError: when the first argument is not a distribution class.
    """
    if not (isinstance(distribution_class, type) and issubclass(distribution_class, dist.Distribution)):
        raise TypeError(
            f"register_family: {distribution_class!r} is not a distribution class. numpyro.distributions.Bernoulli, "
            "Categorical and a few others are functions: register the classes they return, such as BernoulliProbs."
        )
    _REGISTRY[distribution_class] = family


def registered_families() -> dict[type, Any]:
    """A copy of the registry: distribution class -> family, or function of the distribution."""
    return dict(_REGISTRY)


def family_for(distribution: dist.Distribution) -> Family:
    """The family of a distribution.

    Batch axes of the distribution stay leading axes of the parameters; axes that ``to_event`` has made part of an event
    become an :class:`IndependentFamily` (for a normal, the diagonal :class:`NormalFamily`).

    Args:
        distribution: a NumPyro distribution; ``expand`` and ``to_event`` are looked through.

    Returns:
        The family, such that ``family_for(d).from_distribution(d)`` are the natural parameters of ``d``.

    Raises:
        GuideError: where no family is registered for the distribution's class.
    """
    from ._product import repeated  # which needs the registry itself

    if isinstance(distribution, dist.ExpandedDistribution):
        return family_for(distribution.base_dist)
    if isinstance(distribution, dist.Independent):
        base = distribution.base_dist
        shape = base.batch_shape[len(base.batch_shape) - distribution.reinterpreted_batch_ndims :]
        return repeated(family_for(base), tuple(shape))
    for cls in type(distribution).__mro__:
        if cls in _REGISTRY:
            found = _REGISTRY[cls]
            return found if isinstance(found, Family) else found(distribution)
    known = ", ".join(sorted(cls.__name__ for cls in _REGISTRY))
    raise GuideError(
        f"no exponential family is registered for {type(distribution).__name__}. Registered are {known}. Name a family "
        f"for this latent, or add one with numpyro_pvi.families.register_family({type(distribution).__name__}, family)."
    )


def base_of(distribution: dist.Distribution) -> Any:
    """The distribution inside ``expand`` and ``to_event``."""
    while isinstance(distribution, dist.ExpandedDistribution | dist.Independent):
        distribution = distribution.base_dist
    return distribution


def read_parameters(distribution: dist.Distribution, *names: str) -> list[Float[Array, "..."]]:
    """Scalar parameters of a distribution, broadcast to its batch and independent axes, in one dtype.

    Args:
        distribution: a distribution of scalar events, possibly inside ``expand`` and ``to_event``.
        names: its attributes.

    Returns:
        One array per name.
    """
    base = base_of(distribution)
    shape = distribution.batch_shape + distribution.event_shape
    values = [getattr(base, name) for name in names]
    dtype = jnp.result_type(float, *values)
    return [jnp.broadcast_to(jnp.asarray(value, dtype), shape) for value in values]
