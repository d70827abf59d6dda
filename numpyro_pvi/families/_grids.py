"""Coordinates of families with one or two numbers, in which their densities are smooth and fall off on both sides.

The integral of a density over such a coordinate u is a plain sum over evenly spaced points to about rounding, because the
integrand is analytic and vanishes at both ends (or is periodic). Logarithms and logits do that for gammas and betas, however
small their concentrations, and keep the statistics of values that round to an end of the support.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpyro.distributions import constraints

from ._base import Family
from ._dirichlet import BetaFamily, BetaMean, DirichletFamily, DirichletMean
from ._gamma import (
    ExponentialLawFamily,
    ExponentialMean,
    GammaFamily,
    GammaMean,
    InverseGammaFamily,
    InverseGammaMean,
)
from ._gaussian import LogNormalFamily, LogNormalMean, MultivariateNormalFamily, NormalFamily, ScalarNormalFamily
from ._product import base_family
from ._transformed import TransformedNormalFamily
from ._von_mises import VonMisesFamily


@runtime_checkable
class GridRule(Protocol):
    """How a family's values are reached from coordinates u; what every implementor owes.

    Values, statistics and coordinates have the members' axes behind those of the points. ``circle`` says that u is an angle.
    """

    @property
    def circle(self) -> bool:
        """Whether u is periodic, with period 2 pi."""
        ...

    @property
    def lacks(self) -> int:
        """How many fewer coordinates an event has than entries: 1 where these add up to 1."""
        ...

    def around(self, natural: Any) -> tuple[Array, Array]:
        """Where a member's mass lies in u, and how wide it is there, roughly."""
        ...

    def held(self, u: Array) -> Array:
        """The nearest coordinates whose values are numbers inside the support, and can be told from their neighbours."""
        ...

    def value(self, natural: Any, u: Array) -> Array:
        """The value of the coordinates that are held."""
        ...

    def statistics(self, natural: Any, u: Array) -> Any:
        """T of the value, finite."""
        ...

    def log_slope(self, natural: Any, u: Array) -> Array:
        """log of du's image, ``log |d theta / du|``, one number per coordinate."""
        ...


@dataclasses.dataclass(frozen=True)
class _Real:
    family: Any
    circle: bool = False
    lacks: int = 0

    def around(self, natural):
        first, precision = jax.tree.leaves(natural)
        return first / precision, 1 / jnp.sqrt(precision)

    def held(self, u):
        return u

    def value(self, natural, u):
        return u

    def statistics(self, natural, u):
        return self.family.sufficient_statistics(u)

    def log_slope(self, natural, u):
        return jnp.zeros_like(u)


@dataclasses.dataclass(frozen=True)
class _Circle(_Real):
    circle: bool = True

    def around(self, natural):
        return jnp.arctan2(natural.sin, natural.cos), 1 / jnp.sqrt(1 + jnp.hypot(natural.sin, natural.cos))

    def value(self, natural, u):
        return jnp.mod(u + jnp.pi, 2 * jnp.pi) - jnp.pi


@dataclasses.dataclass(frozen=True)
class _Vector(_Real):
    """Coordinates in which q is a standard normal."""

    def around(self, natural):
        return jnp.zeros_like(natural.precision_mean), jnp.ones_like(natural.precision_mean)

    def value(self, natural, u):
        moments = self.family.moments(natural)
        return moments.loc + jnp.einsum("ij,...j->...i", moments.scale, u)

    def statistics(self, natural, u):
        return self.family.sufficient_statistics(self.value(natural, u))

    def log_slope(self, natural, u):
        share = -0.5 * self.family.moments(natural).log_det_precision / self.family.dim
        return jnp.full_like(u, share)


class _Log:
    """u = log x of positive values."""

    circle, lacks = False, 0

    def held(self, u):
        # The square of the largest is a number still.
        most = math.log(float(jnp.finfo(u.dtype).max))
        return jnp.clip(u, -0.98 * most, 0.49 * most)

    def value(self, natural, u):
        return jnp.exp(self.held(u))

    def log_slope(self, natural, u):
        return u


def _exp(u):
    return jnp.exp(jnp.minimum(u, 0.98 * math.log(float(jnp.finfo(u.dtype).max))))


class _LogNormal(_Log):
    def around(self, natural):
        return (natural.log + 1) / natural.precision, 1 / jnp.sqrt(natural.precision)

    def statistics(self, natural, u):
        return LogNormalMean(u, -0.5 * u**2)


class _Gamma(_Log):
    def around(self, natural):
        a = natural.log + 1
        return jnp.log(a / natural.rate), 1 / jnp.sqrt(a)

    def statistics(self, natural, u):
        return GammaMean(u, -_exp(u))


class _InverseGamma(_Log):
    def around(self, natural):
        a = natural.log - 1
        return jnp.log(natural.rate / a), 1 / jnp.sqrt(a)

    def statistics(self, natural, u):
        return InverseGammaMean(-u, -_exp(-u))


class _Exponential(_Log):
    def around(self, natural):
        return -jnp.log(natural.rate), jnp.ones_like(natural.rate)

    def statistics(self, natural, u):
        return ExponentialMean(-_exp(u))


class _Beta:
    """u = logit x."""

    circle, lacks = False, 0

    def around(self, natural):
        a, b = natural.log + 1, natural.log_complement + 1
        return jnp.log(a / b), jnp.sqrt(1 / a + 1 / b)

    def held(self, u):
        info = jnp.finfo(u.dtype)
        return jnp.clip(u, 0.98 * math.log(float(info.tiny)), -math.log(float(info.eps)))

    def value(self, natural, u):
        return jax.nn.sigmoid(self.held(u))

    def statistics(self, natural, u):
        return BetaMean(jax.nn.log_sigmoid(u), jax.nn.log_sigmoid(-u))

    def log_slope(self, natural, u):
        return jax.nn.log_sigmoid(u) + jax.nn.log_sigmoid(-u)


class _Dirichlet:
    """u = log of the shares over the last one."""

    circle, lacks = False, 1

    def around(self, natural):
        a, last = natural.log[..., :-1] + 1, natural.log[..., -1:] + 1
        return jnp.log(a / last), jnp.sqrt(1 / a + 1 / last)

    def held(self, u):
        return u

    def _logs(self, u):
        return jax.nn.log_softmax(jnp.concatenate([u, jnp.zeros_like(u[..., :1])], axis=-1), axis=-1)

    def value(self, natural, u):
        return jnp.exp(jnp.maximum(self._logs(u), 0.49 * math.log(float(jnp.finfo(u.dtype).tiny))))

    def statistics(self, natural, u):
        return DirichletMean(self._logs(u))

    def log_slope(self, natural, u):
        # The determinant is the product of all shares; the last one's part goes to the coordinates in equal parts.
        logs = self._logs(u)
        return logs[..., :-1] + logs[..., -1:] / u.shape[-1]


@dataclasses.dataclass(frozen=True)
class _Transformed:
    """The coordinates in which q is normal, of a vector those in which it is standard normal."""

    family: TransformedNormalFamily
    circle: bool = False

    @property
    def lacks(self):
        normal = self.family.normal
        return self.family.shape[0] - normal.dim if isinstance(normal, MultivariateNormalFamily) else 0

    @property
    def _normal(self):
        normal = self.family.normal
        return _Vector(normal) if isinstance(normal, MultivariateNormalFamily) else _Real(normal)

    def around(self, natural):
        return self._normal.around(natural)

    def held(self, u):
        if self.family.full:
            return u
        # Values within a few units in the last place of an end are none of their own.
        info, (low, high) = jnp.finfo(u.dtype), self.family.ends
        tiny = 0.98 * math.log(float(info.tiny))

        def nearest(end, size):
            return min(max(math.log(4 * float(info.eps) * abs(end) / size), tiny), math.log(0.25)) if end else tiny

        if math.isfinite(low) and math.isfinite(high):
            return jnp.clip(u, nearest(low, high - low), -nearest(high, high - low))
        ends = [end for end in (low, high) if math.isfinite(end)]
        if not ends:
            return u
        # Of an exponential the square of the largest is a number still; a softplus grows no faster than u.
        most = 0.49 * math.log(float(info.max))
        linear = self.family.constraint is constraints.softplus_positive
        return jnp.clip(u, nearest(ends[0], 1.0), math.sqrt(float(info.max)) if linear else most)

    def value(self, natural, u):
        return self.family.value(self._normal.value(natural, self.held(u)))

    def statistics(self, natural, u):
        return self._normal.statistics(natural, u)

    def log_slope(self, natural, u):
        own = self._normal.log_slope(natural, u)
        slope = self.family.log_slope(self._normal.value(natural, self.held(u)))
        return own + (slope[..., None] / u.shape[-1] if self.family.full else slope)


def grid_rule(family: Family) -> GridRule | None:
    """The coordinates of a family.

    Args:
        family: a family; repetitions are looked through, since every member has coordinates of its own.

    Returns:
        The rule; None where the family has none (those over finitely many values, chains and matrices). A family
        from outside may have one, as an attribute ``grid_rule``.
    """
    family = base_family(family)
    if isinstance(family, MultivariateNormalFamily):
        return _Vector(family)
    if isinstance(family, TransformedNormalFamily):
        return _Transformed(family) if len(family.shape) < 2 else None
    rules: dict[type, Any] = {
        ScalarNormalFamily: _Real(family),
        NormalFamily: _Real(family),
        LogNormalFamily: _LogNormal(),
        GammaFamily: _Gamma(),
        InverseGammaFamily: _InverseGamma(),
        ExponentialLawFamily: _Exponential(),
        BetaFamily: _Beta(),
        DirichletFamily: _Dirichlet(),
        VonMisesFamily: _Circle(family),
    }
    return rules.get(type(family)) or family.grid_rule
