"""Where sites start that are taken by quadrature: at the curvature of their factors, near the prior's location.

Under a wide prior the expected curvature of a log-linear factor is that of its far tail, and q would shrink towards the data by
one unit of the predictor a round. Looked at with a moderate sd it says where the data are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..sites import SiteStack
from ._product_problem import ProductProblem

# Largest variance at which a latent is looked at, and how often the step to its sites may be halved.
_WIDEST, _HALVINGS = 1.0, 8


def curvature_start(problem: ProductProblem, sites: SiteStack, key: Any) -> SiteStack:
    """Sites at the curvature of factors that are taken by quadrature, as far towards it as the ELBO is highest.

    Args:
        problem: the factors.
        sites: where they are.
        key: for draws, of which there are none.

    Returns:
        The sites, those of other latents as they were; all as they were where no step raises the ELBO.
    """
    found = problem.curvatures(sites, _WIDEST, key)
    names = (*problem.plan.likelihood.by_nodes, *problem.plan.likelihood.by_predictors)

    def kept(own: Any) -> Any:
        """Nothing of the other latents."""
        return type(own)({n: x if n in names else jax.tree.map(jnp.zeros_like, x) for n, x in own.parts.items()})

    change = SiteStack(kept(found.groups), None, None if found.local is None else kept(found.local))
    dtype = jax.tree.leaves(sites.groups)[0].dtype
    shares = jnp.concatenate([0.5 ** jnp.arange(_HALVINGS + 1), jnp.zeros(1)]).astype(dtype)

    def at(share: Any) -> SiteStack:
        step = change * share
        return SiteStack(
            sites.groups + step.groups, sites.prior, None if sites.local is None else sites.local + step.local
        )

    elbos = jax.lax.map(lambda share: problem.objective(at(share), key).elbo, shares)
    return at(shares[jnp.argmax(jnp.where(jnp.isfinite(elbos), elbos, -jnp.inf))])


__all__ = ["curvature_start"]
