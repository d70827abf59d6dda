"""The priors that are members of the latents' own families, read off the model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import GuideError
from ..factors import ValueCall
from ..families import (
    MultivariateNormalFamily,
    NormalFamily,
    ProductFamily,
    ProductNatural,
    ScalarNormalFamily,
    family_for,
    repeated,
)
from ._product_plan import JointBlock, ProductPlan, latent_values

_GAUSSIAN = (ScalarNormalFamily, NormalFamily, MultivariateNormalFamily)


def prior_members(
    call: ValueCall, family: ProductFamily, blocks: tuple[JointBlock, ...], values: dict[str, Any]
) -> dict[str, Any]:
    """Natural parameters of every component whose prior, given the others, is a member of its family.

    Args:
        call: the model with its arguments.
        family: of q.
        blocks: joint blocks.
        values: of all components.

    Returns:
        Natural parameters by component.
    """
    trace, found = call.trace(latent_values(blocks, values)), {}
    for name, own in family.components:
        block = next((b for b in blocks if b.name == name), None)
        natural = _member(trace[name], own) if block is None else _gaussian_block(trace, block, own)
        if natural is not None:
            found[name] = natural
    return found


def exact_prior_of(plan: ProductPlan, call: ValueCall, q: ProductNatural) -> ProductNatural:
    """The exactly held prior as the model's params have it.

    Args:
        plan: of a fit.
        call: the model with all rows.
        q: where the other latents are looked at, of which it does not depend.

    Returns:
        Natural parameters by component, zero where the prior is a factor.
    """
    values = plan.family.sample(q, jax.random.key(0))
    held = prior_members(call, plan.family, plan.blocks, values)
    return ProductNatural(
        {n: held[n] if n in plan.exact else jax.tree.map(jnp.zeros_like, x) for n, x in q.parts.items()}
    )


def _member(site: dict, family: Any) -> Any:
    """Natural parameters of a latent's prior; None where it is not a member of the latent's family."""
    if site["scale"] is not None:
        return None
    try:
        own = repeated(family_for(site["fn"]), site["fn"].batch_shape)
    except GuideError:
        return None
    if own != family:
        return None
    natural = family.from_distribution(site["fn"])
    dtype = jnp.result_type(float)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), natural)


def _gaussian_block(trace: dict, block: JointBlock, family: MultivariateNormalFamily) -> Any:
    """That of a joint block whose latents have normal priors."""
    locs, sizes, covariance, begin = [], 0, jnp.zeros((family.dim, family.dim)), 0
    for name in block.latents:
        site = trace[name]
        fn = site["fn"]
        try:
            base = family_for(fn)
        except GuideError:
            return None
        while (inner := getattr(base, "base", None)) is not None:
            base = inner
        if site["scale"] is not None or not isinstance(base, _GAUSSIAN):
            return None
        locs.append(jnp.broadcast_to(fn.mean, fn.shape()).reshape(-1))
        sizes = int(np.prod(fn.shape()))
        if base.full:
            if fn.shape() != tuple(fn.event_shape):
                return None
            own = fn.covariance_matrix
        else:
            own = jnp.diag(jnp.broadcast_to(fn.variance, fn.shape()).reshape(-1))
        covariance = covariance.at[begin : begin + sizes, begin : begin + sizes].set(own)
        begin += sizes
    return family.from_loc_covariance(jnp.concatenate(locs), covariance)
