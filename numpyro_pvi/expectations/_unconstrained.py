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
from ..families import ProductFamily, ProductNatural, base_family, support_of

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


class _Part(NamedTuple):
    """One component's transform from the reals, the shape of its coordinates, and the angle that 0 stands for."""

    name: str
    transform: Any
    shape: tuple[int, ...]
    turn: Any


@dataclasses.dataclass(frozen=True)
class Unconstrained:
    """Coordinates u of every component, one after another, by NumPyro's bijections to their supports.

    Args:
        family: the product; none of its components may have finitely many values (:func:`discrete_of`).
        q: natural parameters; circles are cut opposite its direction. None cuts them at pi.
    """

    family: ProductFamily
    q: ProductNatural | None = None

    @property
    def parts(self) -> list[_Part]:
        """The components."""
        found = []
        for name, family in self.family.components:
            law, turn = jax.eval_shape(family.to_distribution, family.zeros()), None
            transform = biject_to(law.support)
            if self.q is not None and base_family(family).periodic:
                angles = family.to_distribution(self.q.parts[name])
                turn = getattr(angles, "base_dist", angles).loc
            found.append(_Part(name, transform, transform.inverse_shape(tuple(family.event_shape)), turn))
        return found

    @property
    def dim(self) -> int:
        """D."""
        return sum(math.prod(part.shape) for part in self.parts)

    def values(self, u: Float[Array, "D"]) -> tuple[dict[str, Array], Float[Array, ""]]:
        """Values by component, and the logarithm of the Jacobian of all of them in u."""
        found, total, begin = {}, jnp.zeros((), u.dtype), 0
        for name, transform, shape, turn in self.parts:
            own = u[begin : begin + math.prod(shape)].reshape(shape)
            begin += math.prod(shape)
            value = transform(own)
            total = total + jnp.sum(transform.log_abs_det_jacobian(own, value))
            found[name] = value if turn is None else _wrapped(value + turn)
        return found, total

    def coordinates(self, values: dict[str, Array]) -> Float[Array, "D"]:
        """The u of values by component, within what floating point can tell from the border."""
        found = []
        for name, transform, _, turn in self.parts:
            value = values[name] if turn is None else _wrapped(values[name] - turn)
            found.append(jnp.ravel(transform.inv(value)))
        u = jnp.concatenate(found)
        most = 0.5 * math.log(float(jnp.finfo(u.dtype).max))
        return jnp.nan_to_num(u, nan=0.0, posinf=most, neginf=-most)

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


def _wrapped(angle: Array) -> Array:
    """The same angle between -pi and pi."""
    return jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi


def discrete_of(family: ProductFamily) -> list[str]:
    """Components with finitely many values, which have no such coordinates."""
    return [name for name, own in family.components if support_of(own) is not None]
