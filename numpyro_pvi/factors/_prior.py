"""The exactly held part of the prior, and the prior factor."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._derivatives import grad
from ..handlers import RowAxes
from ._model import ModelCall, is_latent, latent_log_density, outside_log_likelihood, site_log_prob


def exact_log_constant(call: ModelCall, exact: tuple[str, ...]) -> Float[Array, ""]:
    """What the exactly held prior's log density has beside its quadratic part, in nats: its value at the origin.

    It is ``-A(eta_0)`` for a normalised prior, ``-s A(eta_0)`` for one that ``handlers.scale`` multiplies by s, and 0 for a flat
    one or an exponential tilt (an ``ImproperUniform`` on a bounded support, of which the Jacobian alone is left), which have no
    normaliser to compute it from.

    Args:
        call: the model and its arguments.
        exact: latents whose priors are jointly quadratic in the flat vector.

    Returns:
        Nats, with the gradient of the model's ``numpyro.param`` values.
    """
    origin = jnp.zeros((call.layout.dim,), jnp.result_type(float))
    return _log_prior(call, exact, origin) if exact else jnp.zeros((), origin.dtype)


def _log_prior(call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]) -> Float[Array, ""]:
    terms = latent_log_density(call, point)
    return sum((terms[n] for n in exact), start=jnp.zeros((), point.dtype))


def exact_prior(
    call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]
) -> tuple[Float[Array, "D"], Float[Array, "D D"]]:
    """Natural parameters of the quadratic part of the log prior.

    Args:
        call: the model and its arguments.
        exact: latents whose priors are jointly quadratic in the flat vector.
        point: where to read them (anywhere: they are quadratic).

    Returns:
        ``(precision_mean, precision)``; zero on every other coordinate.
    """
    slope = grad(partial(_log_prior, call, exact))
    gradient, precision = slope(point), -jax.jacfwd(slope)(point)
    return gradient + precision @ point, precision


def exact_diagonal_prior(
    call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]
) -> tuple[Float[Array, "D"], Float[Array, "D"], Bool[Array, ""]]:
    """The quadratic part of the log prior where it is separable, from two Hessian-vector products.

    A diagonal Hessian H satisfies ``H v = (H 1) * v`` for every v; one v with no two entries equal tells it from another.

    Args:
        call: the model and its arguments.
        exact: latents whose priors are jointly quadratic in the flat vector.
        point: where to read them (anywhere: they are quadratic).

    Returns:
        ``(precision_mean, precision, coupled)``: zero on every other coordinate, and whether some coordinates are
        coupled, in which case the other two mean nothing.
    """
    gradient, product = jax.linearize(grad(partial(_log_prior, call, exact)), point)
    precision = -product(jnp.ones_like(point))
    probe = 0.5 + jax.random.uniform(jax.random.key(0), point.shape, point.dtype)
    image = -product(probe)
    rest = jnp.abs(image - precision * probe)
    coupled = jnp.any(rest > 1e3 * jnp.finfo(point.dtype).eps * (jnp.abs(image) + jnp.abs(precision)))
    return gradient + precision * point, precision, coupled


def prior_factor_log_density(
    call: ModelCall, point: Float[Array, "D"], latents: tuple[str, ...], outside: tuple[str, ...], rows: RowAxes
) -> Float[Array, ""]:
    """Log density of the prior factor at a flat point: priors outside the family, and likelihood that no group owns, in nats."""
    trace, jacobians = call.trace(point)
    terms = [jnp.sum(site_log_prob(trace[n], jacobians[n])) for n in latents if is_latent(trace[n])]
    total = sum(terms, start=jnp.zeros((), point.dtype))
    return total + outside_log_likelihood(call, point, rows) if outside else total
