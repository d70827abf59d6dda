"""What files need to know of states under AutoExponentialFamily: their types, and the latents of plan and guide."""

from __future__ import annotations

from typing import Any

from . import families
from .errors import StateError
from .expectations import Chains, FactorStructure, LatentRole
from .families import base_family, registered_families, repeated
from .runtime import JointBlock, ProductMemory, ProductPlan, RowLatent, RowMatches
from .sites import MemberSites
from .solvers import MatchState

_PLAN = (ProductPlan, JointBlock, RowLatent, FactorStructure, LatentRole)
_STATE = (MemberSites, ProductMemory, MatchState, RowMatches, Chains)


def product_types(guide: Any) -> dict[str, type]:
    """Types of plans and states by name: the package's, and those of families that were registered or given.

    Args:
        guide: whose families are looked at.

    Returns:
        The types; a family's natural parameters are those of its unit factor. Functions that make a family have given the guide
        theirs where it is set up.
    """
    public = [getattr(families, name) for name in families.__all__]
    known = [x for x in public if isinstance(x, type) and x.__name__.endswith(("Family", "Natural"))]
    given = [*registered_families().values(), *guide.families.values()]
    given += [latent.family for latent in guide._latents.values()]
    found = {}
    for family in given:
        # A registered function makes the family of a distribution, which only a guide that is set up has seen.
        if isinstance(family, families.Family):
            base = base_family(family)
            found |= {kind.__name__: kind for kind in (type(family), type(base), type(base.zeros()))}
    return found | {kind.__name__: kind for kind in (*known, *_PLAN, *_STATE)}


def product_latents(plan: ProductPlan) -> dict[str, tuple[int, ...]]:
    """Shapes of a plan's latents, in their own supports."""
    blocks, found = {block.name: block for block in plan.blocks}, {}
    for name, family in plan.family.components:
        if name in blocks:
            found |= dict(zip(blocks[name].latents, blocks[name].shapes, strict=True))
        else:
            found[name] = tuple(family.event_shape)
    return found


def guide_shapes(guide: Any) -> dict[str, tuple[int, ...]]:
    """The same of a guide that is set up."""
    names = (*guide._latents, *(name for block in guide._blocks for name in block.names))
    return {n: tuple(guide.prototype_trace[n]["fn"].shape()) for n in names}


def check_families(guide: Any, plan: ProductPlan) -> None:
    """Refuse a guide whose latents have other families than a plan's.

    Args:
        guide: set up, with the plan's latents.
        plan: the plan.

    Raises:
        StateError: naming the latent.
    """
    for name, family in plan.family.components:
        latent = guide._latents.get(name)
        if latent is None:
            continue
        own = repeated(latent.family, guide.prototype_trace[name]["fn"].batch_shape)
        if own != family:
            raise StateError(
                f"the state has family {type(base_family(family)).__name__} for latent {name!r}, but the guide "
                f"{type(base_family(own)).__name__}: it belongs to another model. Make the PVI from the model that the "
                f"state was fitted with, or give families={{{name!r}: ...}}."
            )
