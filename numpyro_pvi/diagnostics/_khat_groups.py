"""How well each group's site stands in for its factor where q is, by importance weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._compiling import owned_jit
from .._state import PVIState
from ..errors import PVIError
from ..factors import ModelCall, join_arguments, split_arguments
from ..handlers import PRIOR
from ..runtime import chunk_log_likelihoods
from ..sites import posterior, tied_site
from ._calls import map_draws
from ._khat import check_draws, log_importance_weights, settled


def khat_by_group(
    rng_key: Any,
    model: Callable,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
    local: Any = None,
) -> dict[Hashable, float]:
    """Pareto k-hat of ``p(y_m | theta) / t_m(theta)`` at draws from q, for every group m.

    These are the weights from q to the tilted distribution of group m: q with the exact factor in its site's place. Their product
    over all factors is the weight from q to the posterior, which :func:`khat` judges.

    Args:
        rng_key: random key.
        model: the NumPyro model, as factors are read off it.
        state: a Gaussian fit's state with dense sites, all rows at hand, no local latents; it is only read.
        args: the model's positional arguments. All rows are read.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_samples: draws S from q, at least 100; more are taken as of :func:`khat`.
        local: what :func:`khat` takes; anything but None is refused.

    Returns:
        k-hat by label, ``PRIOR`` first where the prior has a site; read as :func:`khat`'s. Of a factor that is quadratic in the
        latents it is 0.

    Raises:
        PVIError: for fewer than 100 draws, or a model with local latents.
        ImproperError: when q is not normalisable.
    """
    plan, part = state.plan, state.plan.partition
    if local is not None:
        raise PVIError(
            "khat(by_group=True) is not there for latents inside the partitioned plate: they are no part of a site. Leave by_group "
            "out; k-hat of the whole q counts them."
        )
    q = posterior(state.prior, state.sites)
    check_draws(num_samples, plan, q)
    arrays, static = split_arguments(args, kwargs)
    sites, groups = state.sites.groups, len(part.table.labels)
    if plan.tied:
        sites = jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape)), tied_site(sites, groups))
    labels = (*((PRIOR,) if part.has_prior_factor else ()), *part.table.labels)

    @functools.cache
    def weights(count: int) -> np.ndarray:
        fixed = model, part, plan.family, static, count
        own = np.asarray(_group_weights(*fixed, rng_key, q, sites, state.packing, params, arrays), np.float64)
        if not part.has_prior_factor:
            return own
        whole = log_importance_weights(
            rng_key, model, part.layout, plan.family, q, args, kwargs, params, num_samples=count
        )
        return np.concatenate([(np.asarray(whole, np.float64) - own.sum(1))[:, None], own], axis=1)

    read = q, args, kwargs
    return {
        label: settled(lambda count, i=i: weights(count)[:, i], num_samples, read) for i, label in enumerate(labels)
    }


@functools.partial(owned_jit, static_argnames=("model", "part", "family", "static", "num_samples"))
def _group_weights(
    model: Callable,
    part: Any,
    family: Any,
    static: tuple,
    num_samples: int,
    rng_key: Any,
    natural: Any,
    sites: Any,
    packing: Any,
    params: dict,
    arrays: list,
) -> Float[Array, "S M"]:
    call = ModelCall(model, part.layout, *join_arguments(arrays, static), params)
    moments = family.moments(natural)

    def terms(point: Array) -> tuple[Array, Array, Array]:
        linear = sites.precision_mean @ point
        square = jax.vmap(lambda site: jnp.vdot(point, family.precision_product(site, point)))(sites)
        return chunk_log_likelihoods(part, packing, call, point), linear, -0.5 * square

    # Relative to q's location, as of the whole q's weights.
    centre = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), terms(moments.loc))

    def weight(noise: Array) -> Array:
        factor, linear, square = jax.tree.map(jnp.subtract, terms(family.draw(moments, noise)), centre)
        return factor - linear - square

    noise = jax.random.normal(rng_key, (num_samples, family.dim), moments.loc.dtype)
    return map_draws(weight, noise, num_samples, elements_of=terms)


__all__ = ["khat_by_group"]
