"""Normals carried to another support by a bijection: shifted half-lines, intervals, ordered vectors, correlations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from jaxtyping import Array, Bool, Float
from numpyro.distributions import biject_to, constraints, transforms

from .._numerics import inside_support
from ..errors import GuideError
from ._base import FamilyDefaults, base_of, register_family
from ._gaussian import MultivariateNormalFamily, ScalarNormalFamily

_ENDS = {"lower_bound": -math.inf, "upper_bound": math.inf}


@dataclasses.dataclass(frozen=True)
class TransformedNormalFamily(FamilyDefaults):
    """Images ``theta = t(u)`` of normals under a bijection t from real vectors to a support, ``T(theta) = (u, -u u^T / 2)``.

    What :class:`numpyro.infer.autoguide.AutoNormal` gives a latent, and with the covariance of its coordinates. The base measure
    is ``h(theta) = 1 / |det dt/du|``, so that divergences are those of the normals.

    Args:
        support: a constraint of NumPyro's with a bijection from real vectors (:func:`numpyro.distributions.biject_to`), its ends
            numbers; kept as its name and these, such as ``("interval", -1.0, 60.0)``, which may be given as well.
        shape: of one event; ``()`` for single numbers, whose members have a location and a variance each.

    Raises:
        GuideError: where the support is discrete, differs from element to element, is none of NumPyro's, or has coordinates that
            are no vector.
    """

    support: Any
    shape: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "support", self.support if isinstance(self.support, tuple) else _named(self.support))
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != self.constraint.event_dim:
            raise GuideError(
                f"TransformedNormalFamily({self.constraint}, {self.shape}): events of this support have "
                f"{self.constraint.event_dim} axes."
            )
        if len(self._coordinate_shape) > 1:
            raise GuideError(
                f"TransformedNormalFamily({self.constraint}, {self.shape}): coordinates have the shape {self._coordinate_shape}, "
                "and only a number or a vector of them has a normal."
            )

    # ---------------------------------------------------------------------------------------------------- coordinates

    @property
    def constraint(self) -> constraints.Constraint:
        """NumPyro's constraint of the support."""
        name, *ends = self.support
        found = getattr(constraints, name)
        return found(*ends) if isinstance(found, type) else found

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of an interval, infinite where there are none."""
        low, high = (getattr(self.constraint, end, far) for end, far in _ENDS.items())
        return low, high

    @property
    def transform(self) -> transforms.Transform:
        """t, from coordinates to values."""
        if self.constraint is constraints.positive_ordered_vector:
            return transforms.ComposeTransform([transforms.OrderedTransform(), _ExpOfOrdered()])
        return biject_to(self.constraint)

    @property
    def _coordinate_shape(self) -> tuple[int, ...]:
        try:
            return tuple(self.transform.inverse_shape(self.shape))
        except NotImplementedError:
            raise GuideError(
                f"TransformedNormalFamily: NumPyro knows no bijection from real vectors to {self.constraint}."
            ) from None

    @property
    def normal(self) -> ScalarNormalFamily | MultivariateNormalFamily:
        """The family of the coordinates u."""
        shape = self._coordinate_shape
        return MultivariateNormalFamily(shape[0]) if shape else ScalarNormalFamily()

    def value(self, u: Float[Array, "..."]) -> Float[Array, "..."]:
        """t(u), inside the support where rounding would put it at an end."""
        return _held_inside(jnp.asarray(self.transform(u)), self.ends)

    def coordinates(self, theta: Float[Array, "..."]) -> Float[Array, "..."]:
        """u of values, finite."""
        u = jnp.asarray(self.transform.inv(_held_inside(theta, self.ends)))
        most = 0.5 * math.log(float(jnp.finfo(u.dtype).max))
        return jnp.nan_to_num(u, nan=0.0, posinf=most, neginf=-most)

    def log_slope(self, u: Float[Array, "..."]) -> Float[Array, "*batch"]:
        """``log |det dt/du|``."""
        return jnp.asarray(self.transform.log_abs_det_jacobian(u, self.transform(u)))

    # --------------------------------------------------------------------------------------------------- the contract

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Of one theta."""
        return self.shape

    @property
    def full(self) -> bool:
        """Whether events have more than one coordinate, which have a covariance."""
        return bool(self._coordinate_shape)

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> Any:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return self.normal.zeros(batch_shape, dtype)

    def sufficient_statistics(self, theta: Float[Array, "..."]) -> Any:
        """The normal's, of the coordinates."""
        return self.normal.sufficient_statistics(self.coordinates(theta))

    def log_base_measure(self, theta: Float[Array, "..."]) -> Float[Array, "*batch"]:
        """``-log |det dt/du|`` in nats, of values inside the support."""
        # Nothing is held off the ends here: what does so has a kink, and is a term of the prior's factor.
        if self.shape:
            return -jnp.asarray(self.transform.log_abs_det_jacobian(self.transform.inv(theta), theta))
        # One by one they are seen to be of one entry each.
        found = jnp.zeros(())
        for part in reversed(_parts([self.transform])):
            inner = part.inv(theta)
            found, theta = found - part.log_abs_det_jacobian(inner, theta), inner
        return jnp.asarray(found)

    def log_partition(self, natural: Any) -> Float[Array, "*batch"]:
        """The normal's, in nats; NaN where not normalisable."""
        return self.normal.log_partition(natural)

    def natural_to_mean(self, natural: Any) -> Any:
        """The normal's."""
        return self.normal.natural_to_mean(natural)

    def mean_to_natural(self, mean_params: Any) -> Any:
        """The normal's."""
        return self.normal.mean_to_natural(mean_params)

    def to_distribution(self, natural: Any) -> dist.Distribution:
        """NumPyro's ``TransformedDistribution(Normal or MultivariateNormal, t)``."""
        return dist.TransformedDistribution(self.normal.to_distribution(natural), self.transform)

    def from_distribution(self, distribution: dist.Distribution) -> Any:
        """Natural parameters of a normal that was transformed by t."""
        base: Any = base_of(distribution)
        shape = distribution.batch_shape + distribution.event_shape
        batch = shape[: len(shape) - len(self.shape)]
        return self.normal.from_distribution(base.base_dist.expand(batch))

    def in_domain(self, natural: Any) -> Bool[Array, "*batch"]:
        """Whether the normal is one."""
        return self.normal.in_domain(natural)

    def nearest_valid(self, natural: Any) -> Any:
        """The normal's."""
        return self.normal.nearest_valid(natural)

    def sample(self, natural: Any, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Images of draws of the normal; reparameterised."""
        return self.sample_with_statistics(natural, key, shape)[0]

    def sample_with_statistics(
        self, natural: Any, key: Array, shape: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "..."], Any]:
        """:meth:`sample`, and the statistics of the coordinates before they are rounded to values."""
        u = self.normal.sample(natural, key, shape)
        return self.value(u), self.normal.sufficient_statistics(u)

    def entropy(self, natural: Any) -> Float[Array, "*batch"]:
        """That of the normal in nats, to which the base measure adds ``E log |det dt/du|``."""
        return self.normal.entropy(natural)

    def kl(self, natural: Any, other: Any) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, that of the normals."""
        return self.normal.kl(natural, other)

    def fisher_product(self, natural: Any, tangent: Any) -> Any:
        """The normal's."""
        return self.normal.fisher_product(natural, tangent)

    def fisher_diagonal(self, natural: Any) -> Any:
        """The normal's."""
        return self.normal.fisher_diagonal(natural)

    def fisher_solve(self, natural: Any, tangent: Any) -> Any:
        """The normal's."""
        return self.normal.fisher_solve(natural, tangent)

    def symmetrise(self, natural: Any) -> Any:
        """The normal's."""
        return self.normal.symmetrise(natural)

    def to_minimal(self, natural: Any) -> Float[Array, "*batch P"]:
        """The normal's."""
        return self.normal.to_minimal(natural)

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> Any:
        """The normal's."""
        return self.normal.from_minimal(coordinates)


class _ExpOfOrdered(transforms.ExpTransform):
    """NumPyro's bijection to ordered positive values ends, by what it says, where these are not ordered."""

    def __init__(self) -> None:
        super().__init__(domain=constraints.ordered_vector)

    @property
    def codomain(self) -> constraints.Constraint:
        return constraints.positive_ordered_vector

    def log_abs_det_jacobian(self, x: Any, y: Any, intermediates: Any = None) -> Any:
        return jnp.sum(x, axis=-1)


def _held_inside(theta: Float[Array, "..."], ends: tuple[float, float]) -> Float[Array, "..."]:
    return inside_support(theta, *(end if math.isfinite(end) else None for end in ends))


def _named(support: Any) -> tuple:
    """A constraint by its name in NumPyro and the numbers that make it. Raises GuideError where it has none."""
    support = getattr(support, "base_constraint", support)
    if not isinstance(support, constraints.Constraint) or support.is_discrete:
        raise GuideError(f"TransformedNormalFamily: {support!r} is no constraint of continuous values.")
    kind = type(support)
    if kind is constraints.zero_sum:
        return ("zero_sum", support.event_dim)
    if kind in _KINDS:
        return (_KINDS[kind], *(_number(support, end) for end in _ENDS if hasattr(support, end)))
    name = _SAME.get(kind) or next((n for n, own in vars(constraints).items() if own is support), None)
    if name is None:
        raise GuideError(f"TransformedNormalFamily: {support!r} is none of NumPyro's constraints.")
    return (name,)


def _number(support: Any, end: str) -> float:
    """An end of a support. Raises GuideError where it is not known, or several numbers."""
    x = getattr(support, end)
    if isinstance(x, Tracer) or np.unique(x).size != 1:
        where = "is computed from what is not known yet" if isinstance(x, Tracer) else "differs from element to element"
        raise GuideError(
            f"the {end.replace('_', ' ')} of the support {type(support).__name__.lstrip('_')} {where}, and a family has one "
            "support: give it as a number, or shift and scale a latent whose support is fixed."
        )
    # A sum of numbers that says the same end says it to so many digits.
    return float(f"{np.unique(x)[0]:.15g}")


# With and without its end a support is one: no density tells them apart.
_KINDS: dict[type, str] = {
    constraints.greater_than: "greater_than",
    constraints.greater_than_eq: "greater_than",
    constraints.less_than: "less_than",
    constraints.less_than_eq: "less_than",
    constraints.interval: "interval",
    constraints.open_interval: "interval",
    type(constraints.circular): "interval",
}
_SAME: dict[type, str] = {
    type(constraints.nonnegative): "positive",
    type(constraints.positive_semidefinite): "positive_definite",
}


def _of_distribution(distribution: Any) -> TransformedNormalFamily:
    """The family of a normal that NumPyro's own bijection carries to its support. Raises GuideError for what is none."""
    known = not any(isinstance(x, Tracer) for x in jax.tree.leaves(distribution.transforms))
    if known and type(distribution.base_dist) in (dist.Normal, dist.MultivariateNormal):
        chain = _parts(distribution.transforms)
        family = TransformedNormalFamily(_end_of(chain, distribution), distribution.event_shape)
        own = _parts([family.transform])
        if len(own) == len(chain) and all(_alike(a, b) for a, b in zip(own, chain, strict=True)):
            return family
    raise GuideError(
        f"no exponential family has {type(distribution).__name__}: it is no normal under NumPyro's own bijection to its support."
    )


def _end_of(chain: list[Any], distribution: Any) -> Any:
    """Where a chain of transforms ends. NumPyro works the ends of intervals out in JAX, where they are rounded or not known."""
    *first, last = chain
    if len(first) != 1 or not isinstance(last, transforms.AffineTransform):
        return distribution.support
    loc, scale = (np.asarray(x, float) for x in (last.loc, last.scale))
    if isinstance(first[0], transforms.SigmoidTransform):
        return constraints.interval(loc, loc + scale)
    return constraints.less_than(loc) if np.all(scale < 0) else constraints.greater_than(loc)


def _alike(one: Any, other: Any) -> bool:
    """Whether two transforms are the same, numbers to rounding in double precision."""
    if type(one) is not type(other) or not isinstance(one, transforms.AffineTransform):
        return one == other
    pairs = (one.loc, other.loc), (one.scale, other.scale)
    return all(np.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in pairs)


def _parts(chain: Sequence[Any]) -> list[Any]:
    """The transforms of a chain, chains inside it looked through."""
    found = []
    for one in chain:
        found += _parts(one.parts) if isinstance(one, transforms.ComposeTransform) else [one]
    return found


register_family(dist.TransformedDistribution, _of_distribution)
