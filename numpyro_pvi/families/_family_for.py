"""The family of a distribution."""

from __future__ import annotations

import numpyro.distributions as dist

from ..errors import GuideError
from ._base import Family
from ._independent import repeated
from ._registry import registered_families


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
    if isinstance(distribution, dist.ExpandedDistribution):
        return family_for(distribution.base_dist)
    if isinstance(distribution, dist.Independent):
        base = distribution.base_dist
        shape = base.batch_shape[len(base.batch_shape) - distribution.reinterpreted_batch_ndims :]
        return repeated(family_for(base), tuple(shape))
    known = registered_families()
    for cls in type(distribution).__mro__:
        if cls in known:
            found = known[cls]
            return found if isinstance(found, Family) else found(distribution)
    names = ", ".join(sorted(cls.__name__ for cls in known))
    raise GuideError(
        f"no exponential family is registered for {type(distribution).__name__}. Registered are {names}. Name a family "
        f"for this latent, or add one with numpyro_pvi.families.register_family({type(distribution).__name__}, family)."
    )
