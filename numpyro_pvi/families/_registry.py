"""Which exponential family a NumPyro distribution belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from .._contracts import lacking
from ._base import Family, FamilyDefaults

# Distribution class -> family, or a function that makes the family from a distribution of that class.
_REGISTRY: dict[type, Family | Callable[[Any], Family]] = {}


def register_family(distribution_class: type, family: Any) -> None:
    """Say which family a latent whose prior is a distribution of this class is given.

    Args:
        distribution_class: a subclass of ``numpyro.distributions.Distribution``. Its subclasses are covered too, unless
            they have an entry of their own.
        family: the family, or a function of the distribution that makes it, for families that depend on a size. Its
            ``from_distribution`` must accept distributions of this class. A later entry replaces an earlier one.

    Raises:
        TypeError: when the first argument is not a distribution class, or the second neither a family nor a function.
    """
    if not (isinstance(distribution_class, type) and issubclass(distribution_class, dist.Distribution)):
        raise TypeError(
            f"register_family: {distribution_class!r} is not a distribution class. numpyro.distributions.Bernoulli, "
            "Categorical and a few others are functions: register the classes they return, such as BernoulliProbs."
        )
    if not callable(family):
        check_family(family, f"register_family({distribution_class.__name__}, ...)")
    _REGISTRY[distribution_class] = family


def check_family(family: Any, where: str) -> None:
    """Refuse what is no family, saying what it lacks.

    Args:
        family: what was given.
        where: how it was given, for the message.

    Raises:
        TypeError: naming what is missing.
    """
    if not isinstance(family, Family):
        said = lacking(family, Family, FamilyDefaults, "numpyro_pvi.families")
        raise TypeError(f"{where}: {family!r} is not a family.{said}")


def registered_families() -> dict[type, Any]:
    """A copy of the registry: distribution class -> family, or function of the distribution."""
    return dict(_REGISTRY)


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
