"""How far a product of families is from the exact posterior, by importance weights in the latents' own supports."""

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
from ..factors import ValueCall, join_arguments, site_log_prob, split_arguments
from ..families import ProductNatural, member_family
from ..handlers import PRIOR
from ..runtime import JointBlock, ProductEngine, factor_values, latent_values
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


def khat_of_product_by_group(
    rng_key: Any, engine: ProductEngine, state: PVIState, args: tuple, kwargs: dict, *, num_samples: int = 1000
) -> dict[Hashable, float]:
    """Pareto k-hat of ``p(y_m | theta) / t_m(theta)`` at draws from a product of families: see :func:`khat_by_group`.

    Where rows have latents of their own, a group's factor is ``p(y_m, z_m | theta)`` and its site has terms in their members.

    Args:
        rng_key: random key.
        engine: of the fit.
        state: a state with all rows at hand; it is only read.
        args: the model's positional arguments. All rows are read.
        kwargs: the model's keyword arguments.
        num_samples: draws S from q, at least 100; more are taken as of :func:`khat`.

    Returns:
        k-hat by label, ``PRIOR`` first where the prior has a site.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.
    """
    q, plan = posterior(state.prior, state.sites), state.plan
    check_draws(num_samples, plan, q)
    labels = (*((PRIOR,) if state.sites.prior is not None else ()), *plan.partition.table.labels)

    @functools.cache
    def weights(count: int) -> np.ndarray:
        return np.asarray(product_group_weights(rng_key, engine, state, args, kwargs, count), np.float64)

    return {
        label: settled(lambda count, i=i: weights(count)[:, i], num_samples, (q, args, kwargs))
        for i, label in enumerate(labels)
    }


def product_group_weights(
    rng_key: Any, engine: ProductEngine, state: PVIState, args: tuple, kwargs: dict, num_samples: int
) -> Float[Array, "S F"]:
    """Log weights of every factor over its site at draws of :meth:`ProductFamily.sample`, the prior factor (if any) first.

    Args:
        rng_key: random key.
        engine: of the fit.
        state: a state.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        num_samples: draws S.

    Returns:
        In nats, less their values at the first draw; their sum over factors is that of :func:`product_weights`.
    """
    arrays, static = split_arguments(args, kwargs)
    return _factor_weights(engine, static, num_samples, rng_key, state, arrays)


@functools.partial(owned_jit, static_argnames=("engine", "static", "num_samples"))
def _factor_weights(
    engine: ProductEngine, static: tuple, num_samples: int, rng_key: Any, state: PVIState, arrays: list
) -> Array:
    plan: Any = state.plan
    problem, sites = engine.problem(state, *join_arguments(arrays, static)), state.sites
    draws = problem.family.sample(posterior(state.prior, sites), rng_key, (num_samples,))
    families, values = dict(problem.family.components), []

    def of_sites(values: dict) -> list[Array]:
        statistics = {n: f.sufficient_statistics(values[n]) for n, f in families.items()}

        def paired(site: ProductNatural) -> Array:
            return sum((families[n].inner(x, statistics[n]) for n, x in site.parts.items()), start=jnp.zeros(()))

        groups = jax.vmap(paired)(sites.groups)
        for name, own in () if sites.local is None else sites.local.parts.items():
            member, natural, mean = member_family(families[name], own, statistics[name])
            groups = groups + plan.sum_by_group(name, jnp.asarray(member.inner(natural, mean)), problem.packing)
        return [*(() if sites.prior is None else (paired(sites.prior)[None],)), groups]

    if sites.prior is not None:
        values.append(factor_values(problem, "prior factor", draws)[0])
    values.append(factor_values(problem, "likelihood", draws)[0])
    found = jnp.concatenate(values, axis=1) - jnp.concatenate(jax.lax.map(of_sites, draws), axis=1)
    # Where the first draw is outside a factor's support nothing is taken off.
    return found - jnp.where(jnp.isfinite(found[0]), found[0], 0.0)


__all__ = ["khat_of_product", "khat_of_product_by_group", "product_group_weights", "product_weights"]
