"""Two forms of an expected Hessian compared on the same draws: second derivatives, and Stein's identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._derivatives import grad, hessian_of
from .._state import Plan
from ._engine import Engine

# Antithetic pairs of the comparison, chunks that it reads at most, and standard errors that count.
_PAIRS, _CHUNKS, _ERRORS = 64, 8, 5.0


def gradient_jumps(
    engine: Engine,
    plan: Plan,
    packing: Any,
    args: tuple,
    kwargs: dict,
    params: dict,
    loc: Float[Array, "D"],
    sd: Float[Array, "D"],
    key: Any,
) -> Bool[Array, ""]:
    """Whether second derivatives miss part of the curvature, because some factor's gradient jumps.

    Args:
        engine: the model and its engine.
        plan: the plan, its factors without structure.
        packing: rows of each chunk.
        args: positional arguments (arrays).
        kwargs: keyword arguments.
        params: values of the model's ``numpyro.param`` sites.
        loc: prior location.
        sd: prior standard deviations.
        key: random key.

    Returns:
        True when ``E[eps grad f^T]`` and ``E[hess f]`` differ beyond their standard errors in some coordinate, or in
        their trace, over a few chunks and the prior factor.
    """
    draws = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, unstructured="hessian"))
    prior = (plan.family.zeros((), loc.dtype), jnp.zeros(loc.shape, bool))
    problem: Any = engine.problem(draws, packing, args, kwargs, params, prior, 1)
    chunks = jax.tree.map(lambda x: x[:_CHUNKS], problem.data.chunks)

    def density(point):
        rows = jax.lax.map(lambda chunk: problem.program.log_density(chunk, point), chunks)
        total = jnp.sum(rows)
        if problem.prior_program is None or plan.partition.prior_kind != "draws":
            return total
        return total + problem.prior_program.log_density(problem.data.prior, point)

    return forms_differ(density, loc, sd, jax.random.normal(key, (_PAIRS, loc.shape[0]), loc.dtype))


def forms_differ(
    density: Callable[[Float[Array, "D"]], Float[Array, ""]],
    loc: Float[Array, "D"],
    sd: Float[Array, "D"],
    eps: Float[Array, "S D"],
) -> Bool[Array, ""]:
    """Compare ``E[eps_i grad_i f]`` with ``E[hess_ii f]`` (whitened) on antithetic pairs.

    Their difference on a pair, less what the mean Hessian H explains, ``eps_i (H eps)_i - H_ii``, has mean zero when the
    gradient is continuous, and vanishes for a quadratic f.

    Args:
        density: f, in nats.
        loc: location of the draws.
        sd: their standard deviations.
        eps: standard normal draws; each is used with both signs.

    Returns:
        Whether some coordinate, or the trace, is more than five standard errors away.
    """

    def whitened(e):
        return density(loc + sd * e)

    def one(e):
        gradient, hessian = jax.vmap(grad(whitened))(jnp.stack([e, -e])), hessian_of(whitened)
        return 0.5 * (gradient[0] - gradient[1]), 0.5 * (hessian(e) + hessian(-e))

    odd, hessian = jax.lax.map(one, eps)
    mean = jnp.mean(hessian, axis=0)
    explained = eps * (eps @ mean) - jnp.diagonal(mean)
    gap = eps * odd - jnp.diagonal(hessian, axis1=1, axis2=2) - explained
    gap = jnp.concatenate([gap, jnp.sum(gap, axis=1, keepdims=True)], axis=1)
    error = jnp.std(gap, axis=0, ddof=1) / eps.shape[0] ** 0.5
    rounding = 100 * jnp.finfo(loc.dtype).eps * (1.0 + jnp.mean(jnp.abs(eps * odd)))
    return jnp.any(jnp.abs(jnp.mean(gap, axis=0)) > _ERRORS * error + rounding)
