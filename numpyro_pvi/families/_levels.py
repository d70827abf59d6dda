"""Members' values at levels of standard normals, independent along every axis: what product rules have nodes in.

``theta = F^-1(Phi(z))`` carries a standard normal to a member, smoothly in z and in the member's natural parameters, so that
Gauss and Hermite's rule in z, whose weights are those of all members, is a rule for each. Normals are affine in z, gammas have a
table, and the stick lengths of a Dirichlet are betas. Of betas, von Mises laws and families from outside the distribution function
is summed over points of :mod:`._grids`' coordinates and interpolated backwards.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from ._base import Family
from ._dirichlet import BetaFamily, BetaNatural, DirichletFamily
from ._gamma import ExponentialLawFamily, GammaFamily, InverseGammaFamily
from ._gamma_quantiles import log_gamma_quantile
from ._gaussian import LogNormalFamily, MultivariateNormalFamily, NormalFamily, ScalarNormalFamily
from ._grids import GridRule, grid_rule
from ._pairs import members_of
from ._product import base_family
from ._transformed import TransformedNormalFamily

# Points of a distribution function, how far v reaches to either side, and the widths within which u is about linear in it before
# it grows as v's hyperbolic sine: to 200 widths along a line; around a circle, of half whose angle the tangent grows so, to
# within rounding of its end.
_ALONG, _AROUND = (512, 15.0, 3.0), (1024, 50.0, 3.0)

_NORMAL = (ScalarNormalFamily, NormalFamily, LogNormalFamily, TransformedNormalFamily, MultivariateNormalFamily)
_GAMMAS = (GammaFamily, InverseGammaFamily, ExponentialLawFamily)


class Levels(NamedTuple):
    """How a family's members are reached from levels.

    ``axes``: levels of a member, which are independent; ``spread``: whether coordinates have an axis of these behind the
    members'.
    """

    family: Any
    rule: GridRule
    axes: int
    spread: bool

    def coordinates(self, natural: Any, z: Float[Array, "n"]) -> Float[Array, "n *members axes"]:
        """Coordinates of every axis at the same levels, differentiable in the natural parameters.

        ``natural``: natural parameters, members leading; ``z``: between -9 and 9. Of a Dirichlet they are the log odds of its
        sticks: of every share among itself and those behind it.
        """
        if isinstance(self.family, DirichletFamily):
            a = natural.log + 1
            behind = jnp.flip(jnp.cumsum(jnp.flip(a, -1), -1), -1)[..., 1:]
            family = BetaFamily()
            return _at_levels(family, grid_rule(family), BetaNatural(a[..., :-1] - 1, behind - 1), z)
        u = self._coordinates(natural, z)
        return u if self.spread else u[..., None]

    def _coordinates(self, natural: Any, z: Float[Array, "n"]) -> Array:
        if isinstance(self.family, _NORMAL):
            centre, width = self.rule.around(natural)
            return centre + width * z.reshape(-1, *(1,) * jnp.ndim(centre))
        if isinstance(self.family, GammaFamily):
            return _log_gamma(z, natural.log + 1) - jnp.log(natural.rate)
        if isinstance(self.family, InverseGammaFamily):
            # Of 1/x the tails change places.
            return jnp.log(natural.rate) - _log_gamma(-z, natural.log - 1)
        if isinstance(self.family, ExponentialLawFamily):
            return _log_gamma(z, jnp.ones_like(natural.rate)) - jnp.log(natural.rate)
        return _at_levels(self.family, self.rule, natural, z)

    def points(self, natural: Any, coordinates: Float[Array, "S *members axes"]) -> tuple[Array, Any]:
        """Values and their statistics at coordinates that each axis has its own level of."""
        u = coordinates
        if isinstance(self.family, DirichletFamily):
            left = jnp.cumsum(jax.nn.log_sigmoid(-u), -1)
            logs = jax.nn.log_sigmoid(u) + jnp.concatenate([jnp.zeros_like(left[..., :1]), left[..., :-1]], -1)
            u = logs - left[..., -1:]
        elif not self.spread:
            u = u[..., 0]
        return self.rule.value(natural, u), self.rule.statistics(natural, u)


def levels_of(family: Family) -> Levels | None:
    """How a family's members are reached from levels of standard normals.

    ``family``: a family; repetitions are looked through. Returns None where there is no such way: of families over finitely many
    values, chains, matrices, and of vectors of several members.
    """
    base: Any = base_family(family)
    rule = grid_rule(family)
    if rule is None:
        return None
    if isinstance(base, DirichletFamily):
        return Levels(base, rule, base.event_shape[0] - 1, True)
    vectors = isinstance(base, MultivariateNormalFamily) or (isinstance(base, TransformedNormalFamily) and base.full)
    if vectors:
        return None if members_of(family) else Levels(base, rule, base.event_shape[0] - rule.lacks, True)
    # Entries of the other vectors are members.
    if not isinstance(base, (*_NORMAL, *_GAMMAS)) and (base.event_shape or rule.lacks):
        return None
    return Levels(base, rule, 1, False)


def _log_gamma(z: Float[Array, "n"], a: Array) -> Float[Array, "n *members"]:
    return jax.vmap(lambda level: log_gamma_quantile(level, a))(z)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _at_levels(family: Any, rule: Any, natural: Any, z: Float[Array, "n"]) -> Float[Array, "n *members"]:
    return _summed(family, rule, natural, z)


@_at_levels.defjvp
def _at_levels_jvp(family: Any, rule: Any, primals: tuple, tangents: tuple) -> tuple:
    # A member's own numbers move its coordinates alone: derivatives go forward, whatever is wanted of them.
    leaves, structure = jax.tree.flatten(primals[0])
    found, tangent = jax.linearize(lambda *x: _summed(family, rule, structure.unflatten(x), primals[1]), *leaves)
    total = jnp.zeros_like(found)
    for i, way in enumerate(jax.tree.leaves(tangents[0])):
        slope = tangent(*(jnp.full_like(x, i == j) for j, x in enumerate(leaves)))
        total = total + slope * way
    return found, total


def _summed(family: Any, rule: Any, natural: Any, z: Float[Array, "n"]) -> Float[Array, "n *members"]:
    """Coordinates at levels by a distribution function that is summed over points.

    To about 1e-5 of a level within four, and 1e-4 where one tail is hundreds of times as steep as the other.

    Sums of either tail are by the trapezoidal rule with Euler and Maclaurin's correction at its end, whose error is a share of
    the tail itself. Between points the level's inverse is a cubic with the known slopes.
    """
    # Where the points are is no function of the member.
    centre, width = jax.lax.stop_gradient(rule.around(natural))
    number, reach, slow = _AROUND if rule.circle else _ALONG
    step = 2 * reach / (number - 1)
    v = jnp.asarray(np.linspace(-reach, reach, number), centre.dtype).reshape(-1, *(1,) * centre.ndim)
    v = jnp.broadcast_to(v, (number, *centre.shape))

    def place(v: Array) -> Array:
        away = slow * width * jnp.sinh(v / slow)
        return centre + (2 * jnp.arctan(0.5 * away) if rule.circle else away)

    def log_mass(v: Array) -> Array:
        u = place(v)
        known = family.inner(natural, rule.statistics(natural, u)) + family.log_base_measure(rule.value(natural, u))
        known = known + rule.log_slope(natural, u) + jnp.log(jnp.cosh(v / slow))
        return known - jnp.log1p((0.5 * slow * width * jnp.sinh(v / slow)) ** 2) if rule.circle else known

    logs, slope = jax.jvp(log_mass, (v,), (jnp.ones_like(v),))
    logs = logs - jax.lax.stop_gradient(jnp.max(logs, axis=0))
    mass = jnp.exp(logs)

    bend = mass * slope * (step**2 / 12)
    ends = step * 0.5 * (mass + mass[:1]), step * 0.5 * (mass + mass[-1:])
    below = step * _running(mass) - ends[0] - bend + bend[:1]
    above = step * jnp.flip(_running(jnp.flip(mass, 0)), 0) - ends[1] + bend - bend[-1:]
    total, tiny = below[-1:], 4 * float(jnp.finfo(v.dtype).tiny)
    side = jnp.where(below < above, 1.0, -1.0).astype(v.dtype)
    tail = jnp.clip(jnp.minimum(below, above) / total, tiny, 0.5)
    held = jax.lax.stop_gradient(tail)
    levels = side * ndtri(held)
    # By the slope that is known, and not those of ndtri's polynomials.
    levels = levels + side * (tail - held) * jnp.exp(0.5 * levels**2 + 0.5 * math.log(2 * math.pi))
    # dv / dz.
    rate = jnp.exp(-0.5 * levels**2 - 0.5 * math.log(2 * math.pi) + jnp.log(total) - jnp.maximum(logs, math.log(tiny)))
    order = jax.lax.stop_gradient(levels)

    def at(level: Array) -> Array:
        first = jnp.clip(jnp.sum(order <= level, axis=0) - 1, 0, number - 2)[None]
        (v0, z0, r0), (v1, z1, r1) = (
            [jnp.take_along_axis(x, first + i, axis=0)[0] for x in (v, levels, rate)] for i in (0, 1)
        )
        length = z1 - z0
        t = jnp.clip((level - z0) / length, 0.0, 1.0)
        middle = v0 * (1 + 2 * t) * (1 - t) ** 2 + v1 * t**2 * (3 - 2 * t)
        return place(middle + length * t * (1 - t) * (r0 * (1 - t) - r1 * t))

    return jax.vmap(at)(z)


def _running(x: Float[Array, "G *members"]) -> Float[Array, "G *members"]:
    """Running sums, of blocks of sixteen and of these: two small products compile in a fraction of what ``cumsum`` takes."""
    blocks = x.reshape(-1, 16, *x.shape[1:])
    within = jnp.einsum("ij,bj...->bi...", np.tril(np.ones((16, 16), x.dtype)), blocks, precision="highest")
    before = np.tril(np.ones((len(blocks), len(blocks)), x.dtype), -1)
    return (within + jnp.tensordot(before, within[:, -1], 1, precision="highest")[:, None]).reshape(x.shape)
