"""The contract of an exponential family and the arithmetic of its natural parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float


@dataclass_transform(frozen_default=True)
def natural_parameters(cls):
    """Class decorator: a frozen dataclass registered as a pytree, with ``+ - *`` defined leaf by leaf.

    Args:
        cls: a class with annotated array fields only.

    Returns:
        The registered class. ``a + b`` and ``a - b`` need the same class on both sides; ``a * s`` scales by a number or
        by an array that broadcasts against the *leading* (batch) axes.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


class Vector:
    """Arithmetic of an element of a parameter space; the base of natural and mean parameters and of stacks of sites."""

    def __add__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return jax.tree.map(jnp.add, self, other)

    def __sub__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return jax.tree.map(jnp.subtract, self, other)

    def __mul__(self, scale):
        scale = jnp.asarray(scale)
        return jax.tree.map(
            lambda x: x * scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim)).astype(x.dtype), self
        )

    __rmul__ = __mul__

    def __neg__(self):
        return jax.tree.map(jnp.negative, self)


@runtime_checkable
class Family(Protocol):
    """An exponential family ``exp(<eta, T(theta)> - A(eta))``: what every implementor owes.

    Natural parameters are frozen registered dataclasses with ``+ - *`` (:func:`natural_parameters`, :class:`Vector`),
    mean parameters likewise; both take leading batch axes. The functions are pure, keep the inputs' dtype, and hold no
    key and no data. ``in_domain`` says whether the distribution is normalisable, ``nearest_valid`` is idempotent and
    leaves valid parameters alone. ``log_partition`` is in nats and belongs to a *unit* base measure, so that ``<eta, T>
    - A`` is NumPyro's ``log_prob`` exactly.
    """

    dim: int

    def sufficient_statistics(self, theta: Float[Array, "*batch D"]) -> Any:
        """T(theta), as mean parameters of a point mass."""
        ...

    def log_partition(self, natural: Any) -> Float[Array, "*batch"]:
        """A(eta) in nats; its gradient is the mean parameter."""
        ...

    def natural_to_mean(self, natural: Any) -> Any:
        """mu = E_q[T] = grad A(eta)."""
        ...

    def mean_to_natural(self, mean_params: Any) -> Any:
        """The inverse of :meth:`natural_to_mean`."""
        ...

    def to_distribution(self, natural: Any) -> dist.Distribution:
        """The NumPyro distribution with these natural parameters."""
        ...

    def from_distribution(self, distribution: dist.Distribution) -> Any:
        """Natural parameters of a NumPyro distribution of this family."""
        ...

    def in_domain(self, natural: Any) -> Bool[Array, "*batch"]:
        """Whether the parameters are finite and normalisable."""
        ...

    def nearest_valid(self, natural: Any) -> Any:
        """A normalisable neighbour; valid parameters come back unchanged."""
        ...


def inner(natural: Any, mean_params: Any) -> Float[Array, ""]:
    """The pairing ``<eta, mu>`` of one (unbatched) natural and mean parameter, in nats."""
    pairs = zip(jax.tree.leaves(natural), jax.tree.leaves(mean_params), strict=True)
    return sum((jnp.vdot(a, b) for a, b in pairs), start=jnp.zeros(()))
