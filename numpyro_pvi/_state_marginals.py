"""What a state says: the guide's params, marginals of the latents, sites and cavities, whatever form its sites have."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ._compiling import Program
from ._group_lifecycle import position, site_of
from ._locals import joint_params, local_distributions
from ._posterior_views import NaturalView, agent_natural, latent_distributions
from ._prototype import prototype
from ._row_states import row_distributions, row_params, row_view
from ._state import PVIState
from .errors import PartitionError
from .guides import natural_to_params
from .handlers import PRIOR
from .sites import cavity, posterior

_posterior = Program(posterior)


def guide_params(guide: Any, state: PVIState) -> dict[str, Any]:
    """The guide's params (constrained, under the guide's own names).

    Args:
        guide: the guide, set up.
        state: any state.

    Returns:
        Params for ``Predictive(guide, params=...)``, ``guide.median`` and the like.
    """
    part = state.plan.partition
    if state.plan.rows is not None:
        return row_params(guide, state)
    q = _posterior(state.prior, state.sites)
    if part.local is not None:
        return joint_params(guide, state, q)
    return natural_to_params(guide, state.plan.family, part.layout.names, part.layout.shapes, q)


def marginals(pvi: Any, state: PVIState, what: str, joint: bool, agent: Hashable | None = None) -> dict[Any, Any]:
    """Marginals of every latent in its own support.

    Args:
        pvi: what the state belongs to.
        state: any state.
        what: "posterior" or "prior".
        joint: whether to add the joint Gaussian under the tuple of names.
        agent: label of a group, under a schedule without a server, whose q is meant; or None.

    Returns:
        Distributions by latent name, local latents' among them for the posterior.

    Raises:
        ImproperError: when q (or the prior) is not normalisable.
        PVIError: for an agent under a schedule with a server.
    """
    trace = prototype(pvi, state)
    if state.plan.rows is not None and agent is None:
        return row_distributions(state, trace, what, joint)
    if what == "prior":
        natural = state.prior if state.sites.prior is None else state.prior + state.sites.prior
        return latent_distributions(state.plan, natural, trace, what, joint)
    q = posterior(state.prior, state.sites) if agent is None else agent_natural(pvi.schedule, state, agent)
    return latent_distributions(state.plan, q, trace, what, joint) | local_distributions(state, q, trace)


def own_marginals(pvi: Any, state: PVIState) -> tuple[tuple, Callable[[Hashable], dict[str, Any]]] | None:
    """Agents that have a q of their own, and what reads one's marginals; None where one q is everybody's.

    Args:
        pvi: what the state belongs to.
        state: any state.

    Returns:
        Labels, and a function of a label.
    """
    if not pvi.schedule.has_agents:
        return None
    return state.plan.partition.table.labels, lambda agent: pvi.posterior(state, agent=agent)


def group_view(state: PVIState, group: Hashable, what: str) -> NaturalView:
    """One group's site or cavity in natural space; PRIOR names the prior factor's.

    Args:
        state: any state.
        group: the group's label.
        what: "site" or "cavity".

    Returns:
        Natural parameters.

    Raises:
        PartitionError: for an unknown label.
    """
    words = f"{what} of group {group!r}"
    if group is PRIOR and state.sites.prior is None:
        raise PartitionError("there is no PRIOR site: the prior is held exactly. See pvi.prior(state).")
    if state.plan.rows is not None:
        return row_view(state, position(state.plan, group), words, what == "cavity")
    site = state.sites.prior if group is PRIOR else site_of(state, group)
    natural = site if what == "site" else cavity(posterior(state.prior, state.sites), site)
    return NaturalView(natural, state.plan.family, words)


__all__ = ["group_view", "guide_params", "marginals", "own_marginals"]
