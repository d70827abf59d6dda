"""What a fit under AutoExponentialFamily claims of its factors, at draws from q: conjugacy, independence, exact priors.

A factor that is affine in a latent's statistics given the others has the same weighted sum over values with equal average
statistics: four draws from q and the pair of points that is fitted to them. A factor without a latent does not move with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._derivatives import value_and_grad
from .._state import PVIState
from ..expectations import FactorStructure, LatentRole, MeanSpace, claimed_terms
from ..factors import Instead, chunk_log_likelihood, take_rows
from ..families import ProductNatural, members_of, pair_rule
from ..sites import posterior
from ._product_plan import ProductPlan
from ._product_problem import ProductProblem
from ._verification import Check, distance

# Draws that a pair of points is fitted to, and backgrounds at which the other latents are held.
_FITTED, _BACKGROUNDS = 4, 3
# Largest weighted sum, relative to the factor's own terms; and what nobody would notice, in nats.
_TOLERANCE, _UNNOTICED = {"float32": 3e-4, "float64": 1e-8}, 1e-3
_TOGETHER = 1 << 16
# What is folded into a state's key for these draws.
_SEED = 0x5EE6
# Kinds of roles that claim something of a factor.
_CLAIMED = ("exact", "absent", "predictors")
# Points and weights of a third difference between two values: 0 for what is quadratic along the line.
_LINE, _THIRD = (0.0, 1 / 3, 2 / 3, 1.0), (1.0, -3.0, 3.0, -1.0)


def product_claims(plan: ProductPlan) -> tuple[str, ...]:
    """What a plan claims and nothing has proved, as "factor/component".

    That it is exact in the component, sees it through predictors, or does not see it.

    Args:
        plan: the plan.

    Returns:
        Names under "likelihood" and "prior factor", and under "prior" components whose prior is held exactly.
    """
    claimed, proved = [], plan.partition.proved
    for factor, found in (("likelihood", plan.likelihood), ("prior factor", plan.prior_factor)):
        if found is not None and factor.split()[0] not in proved:
            claimed += [f"{factor}/{role.name}" for role in found.roles if role.kind in _CLAIMED]
    if "prior" not in proved:
        claimed += [f"prior/{name}" for name in plan.exact]
    return tuple(claimed)


def verify_product(problem: ProductProblem, state: PVIState, natural: Any) -> dict[str, Check]:
    """Compare every claim of a plan with the untouched model at draws from q.

    Args:
        problem: the factors.
        state: the state.
        natural: natural parameters of q.

    Returns:
        By claim (see :func:`product_claims`) its check: of groups under "likelihood", else of one factor.
    """
    plan, claims = problem.plan, product_claims(problem.plan)
    draws = problem.family.sample(natural, jax.random.fold_in(state.rng_key, _SEED), (_BACKGROUNDS, 1 + _FITTED))
    found = {}
    for factor in ("likelihood", "prior factor"):
        names = tuple(c.split("/")[1] for c in claims if c.startswith(factor + "/"))
        if names:
            checks = _factor_checks(problem, factor, names, natural, draws)
            found |= {f"{factor}/{name}": check for name, check in zip(names, checks, strict=True)}
    if plan.exact and "prior" not in plan.partition.proved:
        own = {n: x.reshape(-1, *x.shape[2:]) for n, x in draws.items()}
        found |= {f"prior/{name}": _held(problem, state.prior, name, own) for name in plan.exact}
    valid = problem.family.in_domain(natural)
    return {claim: Check(jnp.where(valid, own.gap, 0.0), own.allowed) for claim, own in found.items()}


def _factor_checks(
    problem: ProductProblem, factor: str, names: tuple[str, ...], natural: ProductNatural, draws: dict
) -> list[Check]:
    """One check for every component of one factor."""
    structure = problem.plan.likelihood if factor == "likelihood" else problem.plan.prior_factor
    assert structure is not None  # there are claims of it
    roles, checks = {role.name: role for role in structure.roles}, {}
    anchored = [name for name in names if _is_anchored(problem, roles[name])]
    for name in anchored:
        checks[name] = _by_message(problem, factor, roles[name], natural, draws)
    seen = [name for name in names if roles[name].kind == "predictors"]
    if seen:
        checks |= dict.fromkeys(seen, _by_claimed_terms(problem, factor, structure, draws))
    local = [name for name in names if name not in checks]
    rng, settings, weights = np.random.default_rng(0), [], []
    for name in local:
        own = [_settings(problem, roles[name], {n: x[b] for n, x in draws.items()}, rng) for b in range(_BACKGROUNDS)]
        settings += [s for pairs, _ in own for s in pairs]
        weights.append(own[0][1])
    if local:
        checks |= dict(zip(local, _weighed(factor_values(problem, factor, _stacked(settings)), weights), strict=True))
    return [checks[name] for name in names]


def _stacked(settings: list[dict]) -> dict:
    return {n: jnp.stack([s[n] for s in settings]) for n in settings[0]}


def _weighed(evaluated: tuple[Array, Array], weights: list[list[float]]) -> list[Check]:
    """One check for every component, of weighted sums of the values at its settings against each of the backgrounds."""
    checks, begin = [], 0
    values, sizes = evaluated
    for own in weights:
        count = _BACKGROUNDS * len(own)
        value, size = (x[begin : begin + count].reshape(_BACKGROUNDS, len(own), -1) for x in (values, sizes))
        begin, share = begin + count, jnp.asarray(own, values.dtype)[:, None]
        plus, minus = (jnp.sum(jnp.maximum(sign * share, 0.0) * value, axis=1) for sign in (1, -1))
        size = jnp.sum(jnp.abs(share) * jnp.where(jnp.isfinite(size), size, 0.0), axis=1)
        checks.append(Check(_where_finite(plus, minus), _allowed(size)))
    return checks


def _where_finite(one: Array, other: Array) -> Array:
    """``|one - other|``, and 0 where either is not finite: far draws from wide families overflow."""
    return jnp.where(jnp.isfinite(one) & jnp.isfinite(other), jnp.abs(one - other), 0.0)


def _allowed(size: Array) -> Array:
    return _UNNOTICED + _TOLERANCE[size.dtype.name] * jnp.where(jnp.isfinite(size), size, 0.0)


def _is_anchored(problem: ProductProblem, role: LatentRole) -> bool:
    rule = pair_rule(dict(problem.family.components)[role.name])
    return (
        role.kind == "exact"
        and role.single
        and getattr(rule, "anchored", False)
        and role.name not in problem.plan.row_axes
    )


def _by_message(problem: ProductProblem, factor: str, role: LatentRole, natural: ProductNatural, draws: dict) -> Check:
    """The affine function that the program in use makes of a factor, given the others, beside the factor at draws."""
    family, name = dict(problem.family.components)[role.name], role.name
    structure = FactorStructure(
        tuple(
            dataclasses.replace(role, first=0) if n == name else LatentRole(n, "absent")
            for n, _ in problem.family.components
        )
    )
    space, key = MeanSpace(problem.family, structure, 1), jax.random.key(0)
    variables, rest = space.variables(natural)
    points, mean = draws[name][:, 1:], family.natural_to_mean(natural.parts[name])

    def one(held: dict) -> tuple[Array, Any]:
        fixed = rest | {"fixed": {n: held[n] for n in rest["fixed"]}}
        if factor == "prior factor":
            value, slope = value_and_grad(lambda v: space.average(v, fixed, problem.prior_density, key))(variables)
            return value[None], jax.tree.map(lambda x: x[None], slope)
        return problem.group_gradients(space, variables, fixed, key)

    def beside(pair: tuple[dict, Array]) -> tuple[Array, Array]:
        held, own = pair
        value, slope = one(held)
        message = jax.vmap(lambda g: space.message(natural, variables, g, (name,)).parts[name])(slope)

        def affine(at: Any) -> Array:
            return jax.vmap(lambda eta: jnp.sum(family.inner(eta, at)))(message)

        at_mean = affine(mean)
        at_points = jax.lax.map(lambda x: affine(family.sufficient_statistics(x)), own)
        return value + at_points - at_mean, jnp.abs(at_points) + jnp.abs(at_mean)

    held = {n: x[:, 0] for n, x in draws.items()}
    claimed, moved = jax.lax.map(beside, (held, points))
    settings = [
        {n: x[b] for n, x in held.items()} | {name: points[b, i]} for b in range(_BACKGROUNDS) for i in range(_FITTED)
    ]
    values, sizes = factor_values(problem, factor, _stacked(settings))
    claimed, moved = (x.reshape(values.shape) for x in (claimed, moved))
    return Check(_where_finite(claimed, values), _allowed(sizes + moved))


def _by_claimed_terms(problem: ProductProblem, factor: str, structure: FactorStructure, draws: dict) -> Check:
    """A factor at draws of what it sees through predictors, given the others, beside what it would be if they are affine."""
    names, plan = structure.by_predictors, problem.plan
    settings = [
        {n: x[b, 1 + i] if n in names else x[b, 0] for n, x in draws.items()}
        for b in range(_BACKGROUNDS)
        for i in range(_FITTED)
    ]
    law = plan.predictor_law(structure, dict.fromkeys(names))

    def instead(values: dict) -> Instead:
        point = jnp.concatenate([values[n].reshape(-1) for n, _ in problem.family.components if n in names])
        return claimed_terms(law, plan.latent_values(values), point)

    claimed, parts = factor_values(problem, factor, _stacked(settings), instead)
    values, sizes = factor_values(problem, factor, _stacked(settings))
    return Check(_where_finite(claimed, values), _allowed(sizes + parts))


def _settings(problem: ProductProblem, role: Any, draws: dict, rng: Any) -> tuple[list[dict], list[float]]:
    """Values of all components, and weights of the factor's values there that add up to 0 if what is claimed holds."""
    family, held = dict(problem.family.components)[role.name], {n: x[0] for n, x in draws.items()}
    old, new = held[role.name], draws[role.name][1:]
    rule = pair_rule(family)
    if role.kind == "absent" or rule is None:
        points, weights = jnp.stack([old, new[0]]), [1.0, -1.0]
    elif rule.axes:
        steps = jnp.asarray(_LINE, new.dtype).reshape(-1, *(1,) * old.ndim)
        points, weights = old + steps * (new[0] - old), list(_THIRD)
    else:
        signs = jnp.asarray([1.0, -1.0], new.dtype)
        pair = jax.vmap(lambda sign: rule.points(rule.fit(new), sign))(signs)
        points, weights = jnp.concatenate([new, pair.astype(new.dtype)]), [1 / _FITTED] * _FITTED + [-0.5, -0.5]
    members = members_of(family)
    if role.kind == "exact" and not role.single and members:
        # Given all others, of which it is affine in the statistics.
        mask = np.arange(math.prod(members)) == rng.integers(math.prod(members))
        mask = mask.reshape(*members, *(1,) * (old.ndim - len(members)))
        points = jnp.where(mask, points, old)
    return [held | {role.name: x} for x in points], weights


def factor_values(
    problem: ProductProblem, factor: str, settings: dict, instead: Callable[[dict], Instead] | None = None
) -> tuple[Float[Array, "S F"], Float[Array, "S F"]]:
    """The factors' log densities over base measures at settings of all components, and the size of their terms, in nats.

    Args:
        problem: the factors.
        factor: "likelihood", of which there is one a group, or "prior factor".
        settings: S values of every component, in its own support.
        instead: from a setting to the terms that are taken as they are claimed to be.

    Returns:
        Both; where the prior of a component is held exactly it is no part of either.
    """
    plan, part = problem.plan, problem.plan.partition

    def sized(values: dict, size: bool, chunk: Any) -> Array:
        def weigh(name: str, term: Array) -> Array:
            term = plan.over_base_measure(values, name, term)
            return jnp.abs(term) if size else term

        own = plan.latent_values(values)
        arguments = part.rows, part.reading, problem.packing, chunk, plan.exact_latents
        return chunk_log_likelihood(problem.call, own, *arguments, weigh, instead and instead(values))

    def groups(values: dict) -> tuple[Array, Array]:
        def one(chunk: Any) -> tuple[Array, Array]:
            own = take_rows(values, plan.row_axes, part.reading, chunk)
            return sized(own, False, chunk), sized(own, True, chunk)

        found = jax.lax.map(one, problem.packing.chunks)
        count, owner = problem.num_groups, problem.packing.chunk_group
        value, size = (jax.ops.segment_sum(x, owner, count, indices_are_sorted=True) for x in found)
        return value, size

    def prior(values: dict) -> tuple[Array, Array]:
        terms = problem.call.prior_terms(plan.latent_values(values), part.rows, plan.exact_latents)
        terms |= {} if instead is None else instead(values)(problem.call, {})
        terms = terms | {f"log h of {n}": -x for n, x in plan.log_base_measures(values).items()}
        value, size = (sum(jnp.sum(f(x)) for x in terms.values()) for f in (lambda x: x, jnp.abs))
        return jnp.asarray(value)[None], jnp.asarray(size)[None]

    rows = problem.packing.chunk_group.shape[0] * part.chunk_rows
    batch = max(1, _TOGETHER // max(rows, 1))
    return jax.lax.map(groups if factor == "likelihood" else prior, settings, batch_size=batch)


def _held(problem: ProductProblem, prior: ProductNatural, name: str, draws: dict) -> Check:
    """A prior that is held exactly beside the model's, from draw to draw."""
    plan, family = problem.plan, dict(problem.family.components)[name]
    block = next((b.latents for b in plan.blocks if b.name == name), (name,))

    def gap(values: dict) -> tuple[Array, Array]:
        from_model = problem.call.latent_terms(plan.latent_values(values), block)
        whole = sum((jnp.sum(x) for x in from_model.values()), start=jnp.zeros(()))
        held = jnp.sum(family.to_distribution(prior.parts[name]).log_prob(values[name]))
        size = jnp.abs(held) + sum((jnp.sum(jnp.abs(x)) for x in from_model.values()), start=jnp.zeros(()))
        return distance(held, whole), size

    apart, size = jax.lax.map(gap, draws, batch_size=8)
    return Check(apart[:, None], _allowed(size)[:, None])


def q_of(problem: ProductProblem, state: PVIState) -> ProductNatural:
    """Natural parameters of q, sites of groups whose rows are not at hand included, which the problem has for a prior."""
    sites = dataclasses.replace(state.sites, others=None)
    return posterior(problem.prior, sites)


__all__ = ["factor_values", "product_claims", "q_of", "verify_product"]
