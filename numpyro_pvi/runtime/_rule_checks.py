"""What a fixed rule says of a factor, beside another rule and points of Latin hypercubes: whether it still serves.

A rule is a guess about how smooth a factor is where q lies. Its values and messages are held to those with one node more along
every axis (or with other points, of degree five), and to draws that have every level once, of which what the sites say is taken
away (:meth:`MeanSpace.left_over`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from .._numerics import value_and_grad
from ..expectations import (
    GRADIENT_TOLERANCE,
    VALUE_TOLERANCE,
    FactorStructure,
    MeanSpace,
    RulePoints,
    latin_cube,
    rule_axes,
    rule_points,
)
from ..families import ProductNatural
from ._product_problem import ProductProblem

# What a claim is called that a fixed rule serves.
RULE = "a fixed rule"
# Hypercubes, how many points each has at most, and standard errors by which they must differ.
_CUBES, _MOST_TOGETHER, _ERRORS = 8, 256, 6.0
# Rounding of sums over rows, relative to their size.
_ROUNDING = 32.0


def _names(problem: ProductProblem, structure: FactorStructure) -> tuple[str, ...]:
    """Components that messages are compared of: those outside the partitioned plate that the factor sees."""
    rows = problem.plan.row_axes
    return tuple(r.name for r in structure.roles if r.kind != "absent" and r.name not in rows)


def _points(
    problem: ProductProblem, structure: FactorStructure, key: Any
) -> tuple[RulePoints, Int[np.ndarray, "B"], Float[np.ndarray, "B"]]:
    """Points of the rule, of the one that it is held to, and of hypercubes, in blocks of as many: a leading axis.

    Returns the blocks, what they belong to (0, 1, and from 2 on hypercubes), and what their means count in that of the whole.
    """
    axes = rule_axes(problem.family, structure.roles)
    rules = [rule_points(structure.nodes, axes, held) for held in (False, True)]
    size = min(_MOST_TOGETHER, max(len(rule.shares) for rule in rules))
    count = max(len(rule.levels) for rule in rules)

    def blocks(rule: RulePoints) -> RulePoints:
        number, own = -(-len(rule.shares) // size), len(rule.shares)
        # Points that are missing count for nothing.
        index = jnp.pad(rule.index, [(0, number * size - own), (0, 0)], mode="edge").reshape(number, size, -1)
        shares = jnp.pad(rule.shares, (0, number * size - own)).reshape(number, size)
        levels = jnp.pad(rule.levels, (0, max(count, size) - len(rule.levels)))
        return RulePoints(jnp.broadcast_to(levels, (number, *levels.shape)), index, shares)

    cubes = jax.vmap(lambda own: latin_cube(own, size, axes))(jax.random.split(key, _CUBES))
    cubes = cubes._replace(levels=jnp.pad(cubes.levels, [(0, 0), (0, max(count - size, 0))]))
    parts = [*map(blocks, rules), cubes]
    numbers = [len(part.shares) for part in parts]
    owner = np.concatenate([np.repeat([0, 1], numbers[:2]), 2 + np.arange(_CUBES)])
    weight = np.repeat([*(size / len(rule.shares) for rule in rules), 1.0], numbers)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts), owner, weight


def rule_gaps(
    problem: ProductProblem, factor: str, natural: ProductNatural, key: Any
) -> tuple[Float[Array, "P F"], Float[Array, "P F"]]:
    """How far values and messages by a rule are from others.

    ``problem``: the factors; ``factor``: "likelihood", of which there is one a group, or "prior factor"; ``natural``: of q;
    ``key``: of the hypercubes, which are the same for all factors. Returns what others say more, of every factor, of the other
    rule and of each hypercube one value in nats and its message's natural parameters; and how large they are by the rule itself and
    by each hypercube, of which what is no number tells who has none.
    """
    structure: Any = problem.plan.likelihood if factor == "likelihood" else problem.plan.prior_factor
    names = _names(problem, structure)

    def asked(points: RulePoints) -> Float[Array, "F J"]:
        space = MeanSpace(problem.family, structure, 1, points)
        variables, rest = space.variables(natural)
        if factor == "likelihood":
            value, slope = problem.group_gradients(space, variables, rest, key)
        else:
            value, slope = value_and_grad(lambda v: space.average(v, rest, problem.prior_density, key))(variables)
            value, slope = value[None], jax.tree.map(lambda x: x[None], slope)
        found = jax.vmap(lambda g: ravel_pytree(space.message(natural, variables, g, names))[0])(slope)
        return jnp.concatenate([value[:, None], found], axis=1)

    # One pass for all of them: most of what is compiled.
    points, owner, weight = _points(problem, structure, key)
    found = jax.lax.map(asked, points)
    found = found * jnp.asarray(weight, found.dtype)[:, None, None]
    found = jax.ops.segment_sum(found, owner, 2 + _CUBES, indices_are_sorted=True)
    off = found[1:] - found[0]
    size = jnp.abs(jnp.concatenate([found[:1], found[2:]]))
    gaps, sizes = (jnp.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) for x in (off, size))
    return gaps, sizes


def rule_check(
    problem: ProductProblem,
    factor: str,
    natural: ProductNatural,
    site: ProductNatural,
    gaps: tuple[Float[Array, "P F"], Float[Array, "P F"]],
    key: Any,
) -> tuple[Float[Array, "Q F"], Float[Array, "Q F"]]:
    """How far a rule is from others in all factors together, and what is put up with, of the factor that is furthest off.

    ``site``: of all factors together; ``gaps``: as of :func:`rule_gaps`; ``key``: that of the hypercubes. Returns both in nats:
    differences of values, and what a shift by those of messages costs q.
    """
    structure: Any = problem.plan.likelihood if factor == "likelihood" else problem.plan.prior_factor
    names = _names(problem, structure)
    count = gaps[0].shape[1]
    off, size = (x.reshape(1 + _CUBES, -1, count) for x in gaps)
    worst = jnp.argmax(jnp.max(jnp.where(jnp.isfinite(off[0]), jnp.abs(off[0]), jnp.inf), axis=0))
    off, size = jnp.sum(off, axis=-1), jnp.sum(size, axis=-1)
    known_here, *known_there = jnp.all(jnp.isfinite(size), axis=-1)
    counted = jnp.stack(known_there) & known_here
    known = {n: site.parts[n] for n in structure.by_points if n in names}

    def beside(points: RulePoints) -> Float[Array, "J"]:
        """What points make of the site, which is known, less what they should: taken away again."""
        space = MeanSpace(problem.family, structure, 1, points)
        variables, rest = space.variables(natural)

        def nothing(*_: Any, **__: Any) -> Array:
            return jnp.zeros(())

        (_, value), slope = value_and_grad(lambda v: space.left_over(v, rest, nothing, key, None, known), has_aux=True)(
            variables
        )
        message = dict(space.message(natural, variables, slope, names).parts)
        message |= {n: message[n] + x for n, x in known.items()}
        return jnp.concatenate([value[None], ravel_pytree(ProductNatural(message))[0]])

    points, owner, _ = _points(problem, structure, key)
    cubes = off[1:] + jax.lax.map(beside, jax.tree.map(lambda x: x[owner > 1], points))
    rounding = _ROUNDING * float(jnp.finfo(off.dtype).eps) * size[0]

    _, unravel = ravel_pytree(ProductNatural({n: natural.parts[n] for n in names}))

    def sds(flat: Float[Array, "J"]) -> Float[Array, ""]:
        """Length of a change of q's natural parameters, in its sds."""
        found = problem.sizes(natural, unravel(flat)).values()
        return jnp.sqrt(sum((jnp.sum(x**2) for x in found), start=jnp.zeros(())))

    gap, allowed = _judged(off[0], cubes, counted, rounding, sds)
    gap = jnp.where(jnp.isfinite(gap) & jnp.isfinite(allowed), gap, 0.0)
    # A rule reaches further than draws: where it alone has no number it is the rule that does not serve.
    lost = ~known_here & (jnp.sum(jnp.stack(known_there)) >= _CUBES // 2)
    gap, allowed = gap.at[0].set(jnp.where(lost, jnp.inf, gap[0])), jnp.where(jnp.isfinite(allowed), allowed, 1.0)
    here: Bool[Array, "F"] = jnp.arange(count) == worst
    return jnp.where(here, gap[:, None], 0.0), jnp.broadcast_to(allowed[:, None], (len(gap), count))


def _judged(
    other: Float[Array, "J"],
    cubes: Float[Array, "C J"],
    counted: Bool[Array, "C"],
    rounding: Float[Array, "J"],
    sds: Any,
) -> tuple[Float[Array, "4"], Float[Array, "4"]]:
    """Values and messages by the other rule, and by the hypercubes that count: how far off, and what is put up with, in nats.

    ``rounding``: of the numbers; ``sds``: of a change of natural parameters.
    """
    # Of hypercubes in which everything is a number: of a few their spread is known.
    cubes, many = jnp.where(counted[:, None], cubes, 0.0), jnp.maximum(jnp.sum(counted), 2)
    mean = jnp.sum(cubes, axis=0) / many
    about = jnp.where(counted[:, None], cubes - mean, 0.0)
    spread = jnp.sum(about[:, 0] ** 2) / (many - 1), jnp.sum(jax.vmap(sds)(about[:, 1:]) ** 2) / (many - 1)
    # Unbiased for the squared length of the mean; its own sd is at most the last factor of the noise.
    excess = sds(mean[1:]) ** 2 - spread[1] / many
    noise = spread[1] * (2.0 / (many * (many - 1))) ** 0.5
    least = (GRADIENT_TOLERANCE + sds(rounding[1:])) ** 2
    enough = jnp.sum(counted) >= _CUBES // 2
    by_cubes = jnp.stack([jnp.abs(mean[0]), 0.5 * excess]) * enough
    gap = jnp.stack([jnp.abs(other[0]), 0.5 * sds(other[1:]) ** 2, *by_cubes])
    few = _ERRORS * jnp.sqrt(spread[0] / many)
    allowed = [VALUE_TOLERANCE + rounding[0], 0.5 * least, VALUE_TOLERANCE + rounding[0] + few]
    allowed = jnp.stack([*allowed, 0.5 * (least + 3 * _ERRORS * noise)])
    return gap, allowed
