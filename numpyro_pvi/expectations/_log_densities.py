"""Log densities of one chunk's rows at points, whatever the structure that was found."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..factors import term_log_prob
from ._affine import AffineProgram, SharedAffineProgram
from ._draws import DrawsProgram
from ._integrated_program import IntegratedProgram
from ._points import PointsProgram
from ._quadratic import QuadraticProgram
from ._reparameterised import ReparameterisedProgram

# Rows times points that are evaluated at once.
_AT_ONCE = 1 << 18


@singledispatch
def log_density_at(program: Any, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    """The log density of one chunk's rows at one point of the flat unconstrained space, in nats.

    Args:
        program: the program of the expectations of the chunk.
        chunk: its arrays.
        point: where.

    Returns:
        The sum over the chunk's rows; differentiable in ``point``.
    """
    raise TypeError(f"{type(program).__name__} has no log density at a point of the shared latents alone")


@log_density_at.register
def _(program: AffineProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    total = jnp.zeros((), point.dtype)
    for spec, (data, mask) in zip(program.terms, chunk, strict=True):
        predictors = tuple(a @ point + c for a, c in zip(data.design, data.offset, strict=True))
        total = total + jnp.sum(jnp.where(mask, term_log_prob(spec, data, predictors), 0.0))
    return total


@log_density_at.register
def _(program: SharedAffineProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    return log_density_at(program.program, program.program.mask(program.data, program.masks(chunk)), point)


@log_density_at.register
def _(program: QuadraticProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    target = chunk.target
    return chunk.value + point @ target.precision_mean - 0.5 * point @ (target.precision @ point)


@log_density_at.register(DrawsProgram)
@log_density_at.register(IntegratedProgram)
@log_density_at.register(PointsProgram)
@log_density_at.register(ReparameterisedProgram)
def _(program: Any, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    return program.log_density(chunk, point)


def log_densities_at(program: Any, chunk: Any, points: Float[Array, "S D"]) -> Float[Array, "S"]:
    """:func:`log_density_at` at many points, in batches of bounded size."""
    rows = max((x.shape[0] for x in jax.tree.leaves(chunk) if jnp.ndim(x) > 0), default=1)
    if isinstance(program, IntegratedProgram):
        rows = program.cost(chunk.rows.linear.shape[-1])
    batch = max(1, min(points.shape[0], _AT_ONCE // rows))
    if batch >= points.shape[0]:
        return jax.vmap(lambda point: log_density_at(program, chunk, point))(points)
    return jax.lax.map(lambda point: log_density_at(program, chunk, point), points, batch_size=batch)
