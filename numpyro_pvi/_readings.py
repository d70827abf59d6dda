"""What is read off a state: distributions of the latents, and sites and cavities, however the sites are held."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ._groups import position, site_of
from ._locals import local_distributions
from ._row_states import row_distributions, row_view
from ._state import PVIState
from ._views import NaturalView, agent_natural, latent_distributions
from .errors import PartitionError
from .handlers import PRIOR
from .sites import cavity, posterior


def posterior_of(schedule: Any, state: PVIState, trace: dict, joint: bool, agent: Hashable | None) -> dict[Any, Any]:
    """Marginal posteriors: see :meth:`numpyro_pvi.PVI.posterior`.

    Args:
        schedule: of the fit.
        state: a state.
        trace: the model's sample sites, for names, shapes and supports.
        joint: whether to give the joint Gaussian as well.
        agent: a group's label, where groups have a q each.

    Returns:
        Distributions by latent name.
    """
    if state.plan.rows is not None and agent is None:
        return row_distributions(state, trace, "posterior", joint)
    q = posterior(state.prior, state.sites) if agent is None else agent_natural(schedule, state, agent)
    return latent_distributions(state.plan, q, trace, "posterior", joint) | local_distributions(state, q, trace)


def prior_of(state: PVIState, trace: dict, joint: bool) -> dict[Any, Any]:
    """Marginal priors: see :meth:`numpyro_pvi.PVI.prior`.

    Args:
        state: a state.
        trace: the model's sample sites.
        joint: whether to give the joint Gaussian as well.

    Returns:
        Distributions by latent name.
    """
    if state.plan.rows is not None:
        return row_distributions(state, trace, "prior", joint)
    natural = state.prior if state.sites.prior is None else state.prior + state.sites.prior
    return latent_distributions(state.plan, natural, trace, "prior", joint)


def site_view(state: PVIState, group: Hashable) -> Any:
    """One group's site.

    Args:
        state: a state.
        group: the group's label, or ``PRIOR``.

    Returns:
        Its natural parameters, with a way to a distribution.

    Raises:
        PartitionError: for an unknown label.
    """
    what = f"site of group {group!r}"
    if state.plan.rows is not None and group is not PRIOR:
        return row_view(state, position(state.plan, group), what, False)
    return NaturalView(_natural_site(state, group), state.plan.family, what)


def cavity_view(state: PVIState, group: Hashable) -> Any:
    """q without one group's site; see :func:`site_view`."""
    what = f"cavity of group {group!r}"
    if state.plan.rows is not None and group is not PRIOR:
        return row_view(state, position(state.plan, group), what, True)
    site = _natural_site(state, group)
    return NaturalView(cavity(posterior(state.prior, state.sites), site), state.plan.family, what)


def _natural_site(state: PVIState, group: Hashable) -> Any:
    if group is not PRIOR:
        return site_of(state, group)
    if state.sites.prior is None:
        raise PartitionError("there is no PRIOR site: the prior is held exactly. See pvi.prior(state).")
    return state.sites.prior
