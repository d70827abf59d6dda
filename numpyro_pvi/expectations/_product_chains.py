"""Moments of a tilted distribution of a product of families from Markov chains.

Chains move in unconstrained coordinates whitened by q. Their draws are matched on themselves
(:mod:`numpyro_pvi.expectations._product_draws`): with ``b_s = 1 / w_s`` in place of q, the members ``b_s exp <d, T>`` include the
tilted distribution where ``log w`` is affine in T, and the match is then exact, whatever the draws; elsewhere its noise is
that of what an affine function leaves of ``log w``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._numerics import all_finite
from ..families import ProductNatural
from ._chains import ChainDraws, Chains, batch_variance, effective_size, kept_chains, no_chains, run_chains
from ._moments import MCMCMoments
from ._product_draws import Matching, matched, paired, weighable
from ._tilted import Tilted, proper_share
from ._unconstrained import Unconstrained, Whitening


def tilted_by_chains(
    space: Unconstrained,
    look: Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
    key: Any,
    settings: MCMCMoments,
    memory: Chains | None = None,
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, from chains; the power is halved while the cavity is improper.

    Args:
        space: coordinates of the components that the factor sees.
        look: coordinates to the factor's log density, nats, and its gradient in them.
        q: natural parameters of q, of these components.
        site: the factor's site.
        power: alpha.
        key: a random key.
        settings: lengths and kernel.
        memory: where the chains stood; None starts them anew.

    Returns:
        What moment matching asks for, and the chains after this visit as its ``memory``. ``value`` is
        ``(1 / power) log E_q[(p / t)^power]`` in nats, by the mean of ``exp <d, T> / w`` over the draws, which q knows.
    """
    family, dtype = space.family, jax.tree.leaves(q)[0].dtype
    memory = no_chains(settings, space.dim, dtype, True) if memory is None else memory
    share, proper = proper_share(family, q, site, power, dtype)
    used = power * share
    cavity = q - site * used
    white_key, chain_key = jax.random.split(key)
    white = space.whitening(q, white_key)

    def energy(eps: Array) -> tuple[Array, Array]:
        u = white.at(eps)
        value, slope = look(u)
        rest, pulled = jax.value_and_grad(lambda u: space.log_member(cavity, u))(u)
        return -(rest + used * value), -(white.scale.T @ (pulled + used * slope))

    warm = jax.vmap(white.back)(memory.positions)
    fresh = (memory.visits == 0) | ~jnp.all(jnp.isfinite(warm))
    draws = run_chains(settings, energy, chain_key, warm, memory.step_size, fresh)
    kept = proper & draws.finite & jnp.all(jnp.isfinite(draws.score)) & jnp.all(jnp.isfinite(draws.eps))
    found, moving = _matched_chains(space, white, draws, q, site, share, power)
    shape = draws.log_density.shape
    error = batch_variance((found.influence * found.influence.shape[0]).reshape(*shape, -1))
    spread = batch_variance((found.apart * found.apart.shape[0]).reshape(*shape, 1))[0]
    after = kept_chains(memory, jax.vmap(white.at)(draws.last), draws, kept)
    return Tilted(
        found.change * (1.0 / used),
        found.value,
        spread / power**2,
        effective_size(moving.reshape(*shape, -1)),
        jnp.sqrt(jnp.sum(error)) / used,
        share,
        jnp.int32(0),
        jnp.array(False),
        draws.finite,
        kept & found.fits & all_finite(found.change),
        after,
    )


def _matched_chains(
    space: Unconstrained, white: Whitening, draws: ChainDraws, q: Any, site: Any, share: Any, power: Any
) -> tuple[Matching, Float[Array, "S P"]]:
    """The member with the chains' mean statistics, and the statistics in whitened coordinates."""
    family, used = space.family, power * share
    u = jax.vmap(white.at)(draws.eps.reshape(-1, space.dim))
    values = jax.vmap(lambda point: space.values(point)[0])(u)
    statistics = {n: own.sufficient_statistics(values[n]) for n, own in family.components}
    rest = jax.vmap(lambda point: space.log_member(q - site * used, point))(u)
    factor = (draws.log_density.reshape(-1) - rest) / used
    ready = weighable(family, q, values, statistics)
    ratio = factor - paired(family, site, statistics)
    return matched(family, ready, -used * ratio, ratio, q, share, power, normalised=False), ready.white
