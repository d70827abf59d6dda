"""Sites are natural parameters: they add to the prior to give q, and subtract from q to give a cavity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..families import Vector, natural_parameters
from ._members import MemberSites
from ._slots import sum_slots

# Halvings of a step before it is given up: 2^-20 is about 1e-6.
MAX_HALVINGS = 20


@natural_parameters
class SiteStack(Vector):
    """Every site of a state, in natural space.

    ``groups`` is one natural-parameter object whose leaves carry a leading group axis M (of length 1 where all groups share
    one site: :mod:`numpyro_pvi.sites._tied`); ``prior`` is the site of the
    prior factor (no group axis), or None when the prior is held exactly. ``local`` holds what groups with local latents
    keep beside their sites (:class:`LocalSites`), or the sites of latents inside the partitioned plate
    (:class:`MemberSites`, which ``groups`` then leaves out), or None. ``others`` holds the sites of groups whose rows are not at
    hand, with a leading axis of slots (:mod:`numpyro_pvi.sites._slots`; empty slots are zero), or None without any.
    """

    groups: Any
    prior: Any
    local: Any = None
    others: Any = None


def posterior(prior_natural: Any, sites: SiteStack) -> Any:
    """Sum the prior and every site, absent groups' included: ``eta_q = eta_0 + eta_PRIOR + sum_m eta_m`` (PVI eq. 1).

    Args:
        prior_natural: natural parameters of the exactly held part of the prior.
        sites: all sites.

    Returns:
        Natural parameters of q. Always a fresh sum: carrying q along as ``q + new - old`` drifts in float32.
    """
    total = jax.tree.map(lambda eta, site: eta + site, prior_natural, _sum_groups(prior_natural, sites))
    if sites.others is not None:
        total = total + sum_slots(sites.others)
    return total if sites.prior is None else total + sites.prior


def _sum_groups(prior_natural: Any, sites: SiteStack) -> Any:
    total = jax.tree.map(lambda site: jnp.sum(site, axis=0), sites.groups)
    if not isinstance(sites.local, MemberSites):
        return total
    return type(prior_natural)({**total.parts, **sites.local.parts})


def with_shares(sites: SiteStack, groups: Any, others: Any = None, prior: float = 1.0) -> SiteStack:
    """Every site to a power of its own: share 0 takes it out of the product, 1 leaves it as it is.

    Args:
        sites: all sites.
        groups: Float[M], shares of the groups whose rows are at hand (Float[1] where all groups share one site, Float[1 P] where
            sites are held by P rows).
        others: Float[S], shares of the slots of the other groups; as they are by default.
        prior: share of the prior factor's site.

    Returns:
        The sites ``share * eta``; what groups with local latents keep stays as it is.
    """

    def scaled(stack: Any, shares: Any) -> Any:
        shape = jnp.shape(shares)
        return jax.tree.map(
            lambda x: x * jnp.reshape(jnp.asarray(shares, x.dtype), (*shape, *(1,) * (x.ndim - len(shape)))), stack
        )

    return SiteStack(
        groups=scaled(sites.groups, groups),
        prior=None if sites.prior is None else sites.prior * prior,
        local=sites.local,
        others=sites.others if sites.others is None or others is None else scaled(sites.others, others),
    )


def cavity(posterior_natural: Any, site: Any, power: float | Float[Array, ""] = 1.0) -> Any:
    """Natural parameters of q with a ``power`` share of one site removed, ``eta_q - power * eta_m``."""
    return posterior_natural - site * power


def damp(old: Any, new: Any, damping: Any) -> Any:
    """``old + damping * (new - old)`` in natural space; ``damping`` 1 is the full step, as in earlier PVI code."""
    return old + (new - old) * damping


def back_off(
    valid: Callable[[Any], Bool[Array, ""]], step: Float[Array, ""], halvings: Int[Array, ""] | int = 0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Halve a step until it is valid.

    Args:
        valid: whether a step may be taken.
        step: the first one tried.
        halvings: those made before; they count towards the :data:`MAX_HALVINGS` after which a step is given up.

    Returns:
        ``(step, halvings)``; the step is not valid where there are MAX_HALVINGS of them, unless the last one was.
    """

    def refused(tried):
        return ~valid(tried[0]) & (tried[1] < MAX_HALVINGS)

    first = step, jnp.asarray(halvings, jnp.int32)
    return jax.lax.while_loop(refused, lambda tried: (0.5 * tried[0], tried[1] + 1), first)


def take(stack: Any, index: Any) -> Any:
    """One group's slice of a stacked pytree."""
    return jax.tree.map(lambda x: x[index], stack)


def select(keep: Bool[Array, "*batch"], new: Any, old: Any) -> Any:
    """Leaf-wise ``where(keep, new, old)`` with ``keep`` broadcast over trailing axes."""
    return jax.tree.map(lambda a, b: jnp.where(keep.reshape(keep.shape + (1,) * (a.ndim - keep.ndim)), a, b), new, old)
