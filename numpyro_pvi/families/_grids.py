"""Coordinates of families with one or two numbers, in which their densities are smooth and fall off on both sides.

The integral of a density over such a coordinate u is a plain sum over evenly spaced points to about rounding, because the
integrand is analytic and vanishes at both ends (or is periodic). Logarithms and logits do that for gammas and betas, however
small their concentrations, and keep the statistics of values that round to an end of the support.

Product rules have their nodes in *levels* of standard normals, independent along every axis: ``theta = F^-1(Phi(z))``, so that
Gauss and Hermite's rule in z, whose weights are those of all members, is a rule for each. Normals are affine in z, gammas have a
table, and the stick lengths of a Dirichlet are betas.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from ._base import Family
from ._dirichlet import BetaFamily, BetaMean, BetaNatural, DirichletFamily, DirichletMean
from ._gamma import (
    ExponentialLawFamily,
    ExponentialMean,
    GammaFamily,
    GammaMean,
    InverseGammaFamily,
    InverseGammaMean,
)
from ._gamma_quantiles import log_gamma_quantile
from ._gaussian import LogNormalFamily, LogNormalMean, MultivariateNormalFamily, NormalFamily, ScalarNormalFamily
from ._levels import at_levels
from ._product import base_family
from ._transformed import TransformedNormalFamily
from ._von_mises import VonMisesFamily


@runtime_checkable
class GridRule(Protocol):
    """How a family's values are reached from coordinates u; what every implementor owes.

    Values, statistics and coordinates have the members' axes behind those of the points. ``circle`` says that u is an angle.
    :class:`GridDefaults` has the rest beside ``around``, ``value``, ``statistics`` and ``log_slope``.
    """

    @property
    def family(self) -> Any:
        """Whose values."""
        ...

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

    @property
    def levels(self) -> int | None:
        """Independent levels of a member: D of them on a last axis, 0 for one without an axis of its own; None without any."""
        ...

    def at_levels(self, natural: Any, z: Float[Array, "n"]) -> Float[Array, "n *members levels"]:
        """What each level alone says of coordinates, at the same levels in all of them.

        Differentiable in the natural parameters. ``z``: between -9 and 9.
        """
        ...

    def of_levels(self, found: Float[Array, "S *members levels"]) -> Array:
        """The coordinates that levels say together, each taken of :meth:`at_levels` at its own z."""
        ...


@dataclasses.dataclass(frozen=True)
class GridDefaults:
    """What follows from the rest of a rule: see :class:`GridRule`.

    ``family``: whose values; those of numbers have a level each, by a distribution function that is summed.
    """

    family: Any
    circle = False
    lacks = 0

    @property
    def levels(self) -> int | None:
        """One for every member, where an event is a number; else None."""
        return None if self.family.event_shape or self.lacks else 0

    def held(self, u: Array) -> Array:
        """The coordinates themselves."""
        return u

    def at_levels(self, natural: Any, z: Float[Array, "n"]) -> Array:
        """By a sum over points; see :func:`._levels.at_levels`."""
        return at_levels(self, natural, z)

    def of_levels(self, found: Array) -> Array:
        """The coordinates themselves."""
        return found


class _Affine:
    """Coordinates that are normal."""

    def at_levels(self: Any, natural: Any, z: Array) -> Array:
        centre, width = self.around(natural)
        return centre + width * z.reshape(-1, *(1,) * jnp.ndim(centre))


def _log_gamma(z, a):
    return jax.vmap(lambda level: log_gamma_quantile(level, a))(z)


class _Real(_Affine, GridDefaults):
    @property
    def levels(self):
        return 0

    def around(self, natural):
        first, precision = jax.tree.leaves(natural)
        return first / precision, 1 / jnp.sqrt(precision)

    def value(self, natural, u):
        return u

    def statistics(self, natural, u):
        return self.family.sufficient_statistics(u)

    def log_slope(self, natural, u):
        return jnp.zeros_like(u)


class _Circle(GridDefaults):
    circle = True

    def around(self, natural):
        return jnp.arctan2(natural.sin, natural.cos), 1 / jnp.sqrt(1 + jnp.hypot(natural.sin, natural.cos))

    def value(self, natural, u):
        return jnp.mod(u + jnp.pi, 2 * jnp.pi) - jnp.pi

    def statistics(self, natural, u):
        return self.family.sufficient_statistics(u)

    def log_slope(self, natural, u):
        return jnp.zeros_like(u)


class _Vector(_Affine, GridDefaults):
    """Coordinates in which q is a standard normal."""

    @property
    def levels(self):
        return self.family.dim

    def around(self, natural):
        return jnp.zeros_like(natural.precision_mean), jnp.ones_like(natural.precision_mean)

    def value(self, natural, u):
        moments = self.family.moments(natural)
        return moments.loc + jnp.einsum("...ij,...j->...i", moments.scale, u)

    def statistics(self, natural, u):
        return self.family.sufficient_statistics(self.value(natural, u))

    def log_slope(self, natural, u):
        share = -0.5 * self.family.moments(natural).log_det_precision / self.family.dim
        return jnp.broadcast_to(jnp.asarray(share)[..., None], u.shape)


class _Log(GridDefaults):
    """u = log x of positive values."""

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


class _LogNormal(_Affine, _Log):
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

    def at_levels(self, natural, z):
        return _log_gamma(z, natural.log + 1) - jnp.log(natural.rate)


class _InverseGamma(_Log):
    def around(self, natural):
        a = natural.log - 1
        return jnp.log(natural.rate / a), 1 / jnp.sqrt(a)

    def statistics(self, natural, u):
        return InverseGammaMean(-u, -_exp(-u))

    def at_levels(self, natural, z):
        # Of 1/x the tails change places.
        return jnp.log(natural.rate) - _log_gamma(-z, natural.log - 1)


class _Exponential(_Log):
    def around(self, natural):
        return -jnp.log(natural.rate), jnp.ones_like(natural.rate)

    def statistics(self, natural, u):
        return ExponentialMean(-_exp(u))

    def at_levels(self, natural, z):
        return _log_gamma(z, jnp.ones_like(natural.rate)) - jnp.log(natural.rate)


class _Beta(GridDefaults):
    """u = logit x."""

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


class _Dirichlet(GridDefaults):
    """u = log of the shares over the last one; levels are of sticks, every share among itself and those behind it."""

    lacks = 1

    @property
    def levels(self):
        return self.family.event_shape[0] - 1

    def at_levels(self, natural, z):
        """Log odds of sticks, which are betas."""
        a = natural.log + 1
        behind = jnp.flip(jnp.cumsum(jnp.flip(a, -1), -1), -1)[..., 1:]
        return at_levels(_Beta(BetaFamily()), BetaNatural(a[..., :-1] - 1, behind - 1), z)

    def of_levels(self, found):
        left = jnp.cumsum(jax.nn.log_sigmoid(-found), -1)
        logs = jax.nn.log_sigmoid(found) + jnp.concatenate([jnp.zeros_like(left[..., :1]), left[..., :-1]], -1)
        return logs - left[..., -1:]

    def around(self, natural):
        a, last = natural.log[..., :-1] + 1, natural.log[..., -1:] + 1
        return jnp.log(a / last), jnp.sqrt(1 / a + 1 / last)

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
class _Transformed(_Affine):
    """The coordinates in which q is normal, of a vector those in which it is standard normal."""

    family: TransformedNormalFamily
    circle: bool = False
    of_levels = GridDefaults.of_levels

    @property
    def levels(self):
        return self._normal.levels

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
        LogNormalFamily: _LogNormal(family),
        GammaFamily: _Gamma(family),
        InverseGammaFamily: _InverseGamma(family),
        ExponentialLawFamily: _Exponential(family),
        BetaFamily: _Beta(family),
        DirichletFamily: _Dirichlet(family),
        VonMisesFamily: _Circle(family),
    }
    return rules.get(type(family)) or family.grid_rule


def levels_of(family: Family) -> GridRule | None:
    """How a family's members are reached from levels of standard normals.

    ``family``: a family; repetitions are looked through. Returns its coordinates; None where they have no levels: of families over
    finitely many values, chains and matrices.
    """
    rule = grid_rule(family)
    return None if rule is None or rule.levels is None else rule
