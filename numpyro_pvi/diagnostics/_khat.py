"""How far q is from the exact posterior, by importance weights."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._compiling import owned_jit
from .._state import PVIState
from ..errors import ImproperError, PVIError
from ..factors import Layout, ModelCall, join_arguments, site_log_prob, split_arguments
from ..families import GaussianFamily, GaussianNatural, conditional_moments
from ..sites import posterior
from ._calls import map_draws
from ._psis import MIN_SAMPLES, pareto_khat

# Above this k-hat importance weights do not repair q.
USABLE = 0.7
# Share of S that the effective sample size has where weights are nearly equal, factor to more draws, numbers that they may read.
_NEARLY_EQUAL, _MORE, _MOST_READ = 0.5, 8, 1e8


def khat(
    rng_key: Any,
    model: Callable,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
    local: Any = None,
) -> float:
    """Pareto k-hat of the importance weights from q to the exact posterior.

    ``log w_s = log p(y, theta_s) - log q(theta_s)`` at draws from q, in unconstrained space (Jacobians included); k-hat
    is the shape of a generalised Pareto distribution fitted to the largest weights. It judges the whole q at once, so
    it grows with the number of latents, and one bad direction is enough to raise it.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        state: a state; it is only read.
        args: the model's positional arguments. All rows are read.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        local: natural parameters of every unit's local latents given the shared ones, or None.
        num_samples: draws S from q, at least 100. Each costs one evaluation of the model on all rows; draws go in
            batches, so memory does not grow with S. More are taken where so few cannot tell: see :func:`settled`.

    Returns:
        k-hat: below .5 good, below .7 usable, above that q's means and (first of all) variances cannot be trusted, nor
        repaired by importance weighting. 0.0 when the weights are equal up to rounding (q is exact); inf when a handful
        of draws carries all the weight; NaN, with a warning, when the model's log density is NaN or +inf at a draw.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.

    References:
        Yao et al., Yes, but Did It Work?: Evaluating Variational Inference, section 3. Vehtari et al., Pareto Smoothed
        Importance Sampling.
    """
    plan = state.plan
    q = posterior(state.prior, state.sites)
    check_draws(num_samples, plan, q)
    fixed = model, plan.partition.layout, plan.family, q, args, kwargs, params
    own = None if local is None else (plan.partition.local, local)
    return settled(
        lambda count: log_importance_weights(rng_key, *fixed, num_samples=count, local=own),
        num_samples,
        (q, args, kwargs),
    )


def settled(weights_of: Callable[[int], Any], num_samples: int, read: Any) -> float:
    """k-hat of some draws, or of more where these are too few to say that q is bad.

    The tail of S draws is the largest ``3 sqrt(S)`` weights, a tenth of a thousand. Of a q that is nearly right, log weights are
    about cubic in a skewed direction: they have a local maximum near one sd, and the largest tenth mixes the draws about it with
    those of the far tail. A Pareto shape fitted to both is above 1 where that of the far tail is .2.

    Args:
        weights_of: a number of draws to their log weights.
        num_samples: draws S to begin with.
        read: arrays that every draw reads.

    Returns:
        k-hat: of eight times as many draws, up to 64 times, while it is above .7 and the effective sample size above S / 2, as far
        as that reads a hundred million numbers at most.
    """
    count, size = num_samples, sum(jnp.size(x) for x in jax.tree.leaves(read))
    while True:
        weights = np.asarray(weights_of(count))
        found = judged(weights, count)
        more = _MORE * count
        if not (USABLE < found < np.inf) or more > _MORE**2 * num_samples or more * size > _MOST_READ:
            return found
        shares = np.exp(weights - weights.max(), dtype=np.float64)
        if shares.sum() ** 2 < _NEARLY_EQUAL * count * (shares**2).sum():
            return found
        count = more


def check_draws(num_samples: int, plan: Any, q: Any) -> None:
    """Refuse too few draws, and a q that cannot be drawn from.

    Args:
        num_samples: draws S.
        plan: of the state.
        q: natural parameters.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.
    """
    if num_samples < MIN_SAMPLES:
        raise PVIError(f"khat(num_samples={num_samples!r}): the fit of the tail needs at least {MIN_SAMPLES} draws.")
    if not bool(plan.family.in_domain(q)):
        raise ImproperError("q is not normalisable, so it cannot be drawn from: run more rounds before calling khat.")


def judged(log_weights: Float[np.ndarray | Array, "S"], num_samples: int) -> float:
    """k-hat of some log weights; NaN, with a warning, where some are NaN or +inf.

    Args:
        log_weights: in nats, up to a constant.
        num_samples: their number.

    Returns:
        k-hat.
    """
    values = np.asarray(log_weights)
    bad = int(np.sum(np.isnan(values) | (values == np.inf)))
    if bad:
        warnings.warn(
            f"khat is NaN: the model's log density is NaN or +inf at {bad} of {num_samples} draws from q; look for "
            "a latent that overflows there (an exp link, a scale near zero).",
            stacklevel=6,
        )
    return pareto_khat(values, rounding=float(np.sqrt(np.finfo(values.dtype).eps)))


def log_importance_weights(
    rng_key: Any,
    model: Callable,
    layout: Layout,
    family: GaussianFamily,
    natural: GaussianNatural,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int,
    local: Any = None,
) -> Float[Array, "S"]:
    """Log importance weights of draws from a Gaussian in unconstrained space, up to a constant.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        layout: flat layout of its latents.
        family: family of q.
        natural: natural parameters of q.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_samples: draws S.
        local: layout of the local latents, and their natural parameters given the shared ones by unit; or None.

    Returns:
        ``log p(y, theta_s) - log q(theta_s)`` minus its value at q's location, in nats.
    """
    arrays, static = split_arguments(args, kwargs)
    own, rows = (None, None) if local is None else local
    return _log_weights(model, (layout, own), family, static, num_samples, rng_key, natural, params, arrays, rows)


@functools.partial(owned_jit, static_argnames=("model", "layouts", "family", "static", "num_samples"))
def _log_weights(model, layouts, family, static, num_samples, rng_key, natural, params, arrays, local):
    call = ModelCall(model, layouts[0], *join_arguments(arrays, static), params, layouts[1])
    moments, own = family.moments(natural), None if local is None else conditional_moments(local)

    def at(point, noise):
        return call if own is None else dataclasses.replace(call, local=own.draw(point, noise))

    # Every term is taken relative to its value at q's location before summing: over many rows the sums are large and
    # nearly equal, and float32 would keep little of their differences.
    mean = at(moments.loc, None if local is None else jnp.zeros_like(local.linear))
    centre = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), _log_terms(mean, moments.loc))

    def terms(noise):
        point = family.draw(moments, noise[0])
        return jax.tree.map(jnp.subtract, _log_terms(at(point, noise[1]), point), centre)

    def weight(noise):
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(noise))
        return sum(jnp.sum(x) for x in jax.tree.leaves(terms(noise))) + 0.5 * squares

    shape = (num_samples, layouts[0].dim)
    noise = (jax.random.normal(rng_key, shape, moments.loc.dtype), None)
    if local is not None:
        shape = (num_samples, *local.linear.shape)
        noise = (noise[0], jax.random.normal(jax.random.fold_in(rng_key, 1), shape, moments.loc.dtype))
    return map_draws(weight, noise, num_samples, elements_of=terms)


def _log_terms(call: ModelCall, point: Float[Array, "D"]) -> dict[str, Array]:
    """Elementwise log densities of every sample site, latent and observed."""
    trace, jacobians = call.trace(point)
    return {n: site_log_prob(s, jacobians.get(n)) for n, s in trace.items() if s["type"] == "sample"}
