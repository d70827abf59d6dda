"""All of R^D as coordinates of a product of continuous families: where chains move, and where a Gaussian is laid over a mode."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions.transforms import biject_to

from .._numerics import scaled_cholesky
from ..families import ProductFamily, ProductNatural, support_of

# Draws of q that its coordinates are whitened by, at least, and per coordinate.
_DRAWS, _PER_COORDINATE = 512, 8


class Whitening(NamedTuple):
    """``u = loc + scale @ eps``, with eps about standard normal under q."""

    loc: Float[Array, "D"]
    scale: Float[Array, "D D"]

    def at(self, eps: Float[Array, "D"]) -> Float[Array, "D"]:
        """The coordinates u of eps."""
        return self.loc + self.scale @ eps

    def back(self, u: Float[Array, "D"]) -> Float[Array, "D"]:
        """The eps of coordinates u."""
        return jax.scipy.linalg.solve_triangular(self.scale, u - self.loc, lower=True)


@dataclasses.dataclass(frozen=True)
class Unconstrained:
    """Coordinates u of every component, one after another, by NumPyro's bijections to their supports.

    Args:
        family: the product; none of its components may have finitely many values (:func:`discrete_of`).
    """

    family: ProductFamily

    @property
    def parts(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Of every component its name, the transform from the reals, and the shape of its coordinates."""
        found = []
        for name, family in self.family.components:
            law = jax.eval_shape(family.to_distribution, family.zeros())
            transform = biject_to(law.support)
            found.append((name, transform, transform.inverse_shape(tuple(family.event_shape))))
        return found

    @property
    def dim(self) -> int:
        """D."""
        return sum(math.prod(shape) for *_, shape in self.parts)

    def values(self, u: Float[Array, "D"]) -> tuple[dict[str, Array], Float[Array, ""]]:
        """Values by component, and the logarithm of the Jacobian of all of them in u."""
        found, total, begin = {}, jnp.zeros((), u.dtype), 0
        for name, transform, shape in self.parts:
            own = u[begin : begin + math.prod(shape)].reshape(shape)
            begin += math.prod(shape)
            found[name] = transform(own)
            total = total + jnp.sum(transform.log_abs_det_jacobian(own, found[name]))
        return found, total

    def coordinates(self, values: dict[str, Array]) -> Float[Array, "D"]:
        """The u of values by component, within what floating point can tell from the border."""
        found = jnp.concatenate([jnp.ravel(transform.inv(values[name])) for name, transform, _ in self.parts])
        most = 0.5 * math.log(float(jnp.finfo(found.dtype).max))
        return jnp.clip(jnp.nan_to_num(found, nan=0.0), -most, most)

    def log_member(self, natural: ProductNatural, u: Float[Array, "D"]) -> Float[Array, ""]:
        """``<natural, T> + log h`` of the values at u with their Jacobian, nats: a density in u up to its normaliser."""
        values, log_slope = self.values(u)
        for name, family in self.family.components:
            statistics = family.sufficient_statistics(values[name])
            log_slope = log_slope + family.inner(natural.parts[name], statistics)
            log_slope = log_slope + family.log_base_measure(values[name])
        return log_slope

    def whitening(self, q: ProductNatural, key: Any) -> Whitening:
        """Coordinates in which q is about standard normal, by its draws.

        Args:
            q: natural parameters.
            key: a random key.

        Returns:
            Mean and Cholesky factor of u under q; coordinates that hardly move are given a width of rounding.
        """
        count = max(_DRAWS, _PER_COORDINATE * self.dim)
        u = jax.vmap(self.coordinates)(self.family.sample(q, key, (count,)))
        loc = jnp.mean(u, axis=0)
        spread = (u - loc).T @ (u - loc) / count
        least = float(jnp.finfo(u.dtype).eps) ** 0.5 * (1 + jnp.abs(loc))
        scale, _ = scaled_cholesky(spread + jnp.diag(least**2))
        return Whitening(loc, scale)


def discrete_of(family: ProductFamily) -> list[str]:
    """Components with finitely many values, which have no such coordinates."""
    return [name for name, own in family.components if support_of(own) is not None]
