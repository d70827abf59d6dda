"""How far a product of families is from the exact posterior, by importance weights in the latents' own supports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compiling import owned_jit
from .._state import PVIState
from ..factors import ValueCall, join_arguments, site_log_prob, split_arguments
from ..families import ProductNatural
from ..runtime import JointBlock, latent_values
from ..sites import posterior
from ._calls import map_draws
from ._khat import check_draws, settled


def khat_of_product(
    rng_key: Any, model: Callable, state: PVIState, args: tuple, kwargs: dict, params: dict, *, num_samples: int = 1000
) -> float:
    """Pareto k-hat of the importance weights from a product of families to the exact posterior: see :func:`khat`.

    ``log w_s = log p(y, theta_s) - log q(theta_s)`` at draws of all latents in their own supports, rows' own and discrete ones
    among them; latents that the model sums out stay summed out. A change of variables multiplies both densities alike, so
    that this is k-hat in unconstrained space as well.

    Args:
        rng_key: random key.
        model: the NumPyro model, discrete latents without a family summed out.
        state: a state; it is only read.
        args: the model's positional arguments. All rows are read.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_samples: draws S from q, at least 100.

    Returns:
        k-hat, as of :func:`khat`.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.
    """
    q, plan = posterior(state.prior, state.sites), state.plan
    check_draws(num_samples, plan, q)
    return settled(
        lambda count: product_weights(rng_key, model, plan, q, args, kwargs, count, params),
        num_samples,
        (q, args, kwargs),
    )


def product_weights(
    rng_key: Any,
    model: Callable,
    plan: Any,
    q: ProductNatural,
    args: tuple,
    kwargs: dict,
    num_samples: int,
    params: dict | None = None,
) -> Float[Array, "S"]:
    """Log importance weights of :meth:`ProductFamily.sample`, up to a constant.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        plan: of the state.
        q: natural parameters.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        num_samples: draws S.
        params: constrained values of the model's ``numpyro.param`` sites.

    Returns:
        ``log p(y, theta_s) - log q(theta_s)`` less its value at the first draw, in nats.
    """
    arrays, static = split_arguments(args, kwargs)
    return _weights(model, plan.family, plan.blocks, static, num_samples, rng_key, q, arrays, params or {})


@functools.partial(owned_jit, static_argnames=("model", "family", "blocks", "static", "num_samples"))
def _weights(
    model: Callable,
    family: Any,
    blocks: tuple[JointBlock, ...],
    static: tuple,
    num_samples: int,
    rng_key: Any,
    q: ProductNatural,
    arrays: list,
    params: dict,
) -> Array:
    call = ValueCall(model, *join_arguments(arrays, static), params=params)
    draws = family.sample(q, rng_key, (num_samples,))

    def terms(values: dict) -> tuple[dict, dict]:
        trace = call.trace(latent_values(blocks, values))
        model_terms = {n: site_log_prob(s) for n, s in trace.items() if s["type"] == "sample"}
        own = {n: (f.sufficient_statistics(values[n]), f.log_base_measure(values[n])) for n, f in family.components}
        return model_terms, own

    # Terms and statistics are compared with those of the first draw one by one: over many rows the sums are large and nearly
    # equal, and float32 would keep little of their differences.
    first = terms(jax.tree.map(lambda x: x[0], draws))
    first = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), first)

    def weight(values: dict) -> Array:
        model_terms, own = jax.tree.map(jnp.subtract, terms(values), first)
        found = sum(jnp.sum(x) for x in model_terms.values())
        for name, part in family.components:
            statistics, base = own[name]
            found = found - part.inner(q.parts[name], statistics) - base
        return jnp.asarray(found)

    return map_draws(weight, draws, num_samples, elements_of=terms)


__all__ = ["khat_of_product", "product_weights"]
