"""Where a fit starts: values that the user gives, spread over sites, and what cannot start."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._state import PVIState
from .errors import ImproperError, PartitionError, PVIError
from .factors import PartitionPlan
from .guides import guide_param_names, params_to_natural
from .sites import SiteStack, posterior


def initial_params(found: dict, given: dict | None, has_optim: bool) -> dict:
    """Constrained values of the model's ``numpyro.param`` sites to start from.

    Args:
        found: values that the model itself starts from; a param of a flax module is a pytree of arrays.
        given: the user's ``init_params``, or None.
        has_optim: whether there is an optimiser for them.

    Returns:
        One value per site, in the model's dtypes.

    Raises:
        PVIError: when nothing would fit them.
    """
    if found and not has_optim:
        raise PVIError(
            f"the model has numpyro.param site(s) {', '.join(sorted(found))} but optim is None, so nothing would fit them: "
            "pass an optimiser, PVI(model, guide, numpyro.optim.Adam(0.01)), or give them a prior with numpyro.sample."
        )

    def like(value, default):
        return jnp.asarray(value, jnp.result_type(default))

    return {n: jax.tree.map(like, (given or {}).get(n, v), v) for n, v in found.items()}


def spread_params(guide: Any, state: PVIState, init_params: dict) -> PVIState:
    """Move q to the guide params that the user gave, in equal shares of every factor's site.

    Args:
        guide: the guide whose names the params bear.
        state: a fresh state.
        init_params: (partial) params of the guide, and of the model's ``numpyro.param`` sites.

    Returns:
        The state with the prior plus all sites at the params given.

    Raises:
        PVIError: for unknown names.
    """
    layout, family = state.plan.partition.layout, state.plan.family
    own = () if state.plan.partition.local is None else state.plan.partition.local.names
    of_guide = guide_param_names(guide, (*layout.names, *own))
    known = of_guide | set(state.plan.partition.params)
    if unknown := set(init_params) - known:
        raise PVIError(
            f"init_params has unknown name(s) {', '.join(sorted(unknown))}; expected some of {', '.join(sorted(known))}."
        )
    if not set(init_params) & of_guide:
        return state
    if (local := state.plan.partition.local) is not None:
        raise PVIError(
            f"init_params of the guide cannot be given for a model with local latents ({', '.join(local.names)}): each group "
            "finds its own. Give values of numpyro.param sites only, or continue from a state with init_state=."
        )
    if state.sites.local is not None:
        raise PVIError(
            "init_params of the guide cannot be given where single rows have sites (PowerEP(factors='row'), or one row a group): a "
            "group's site is the sum of its rows'. Use factors='group', or continue from a state with init_state=."
        )
    q = posterior(state.prior, state.sites)
    wanted = params_to_natural(guide, family, layout.names, layout.shapes, init_params, q)
    share = (wanted - q) * (1.0 / state.report.move.shape[0])
    groups = jax.tree.map(lambda site, extra: site + extra, state.sites.groups, share)
    prior = None if state.sites.prior is None else state.sites.prior + share
    return dataclasses.replace(state, sites=SiteStack(groups, prior))


def refuse_nothing_shared(plan: PartitionPlan) -> None:
    """Refuse a model whose latents are all inside the partitioned plate: sites would have nothing to hold.

    Args:
        plan: the plan.

    Raises:
        PartitionError: always then.
    """
    if plan.local is not None and not plan.layout.names:
        raise PartitionError(
            f"every latent ({', '.join(plan.local.names)}) is inside {plan.where}, so no latent is shared by groups and there is "
            "nothing to pass between them: fit each group on its own with SVI, or give the latents' prior a shared latent."
        )


def refuse_improper(state: PVIState) -> None:
    """Name the latent that keeps the first q from being normalisable.

    Args:
        state: a fresh state whose q is not normalisable.

    Raises:
        ImproperError: always.
    """
    q = posterior(state.prior, state.sites)
    layout = state.plan.partition.layout
    diag = np.asarray(state.plan.family.precision_diagonal(q))
    worst = int(np.argmin(np.where(np.isfinite(diag), diag, -np.inf)))
    raise ImproperError(
        f"q is not normalisable at the start: latent {layout.coordinate_name(worst)} has no proper prior and the data do not "
        "determine it (no curvature at the starting point). Give it a proper prior, or start from init_params."
    )
