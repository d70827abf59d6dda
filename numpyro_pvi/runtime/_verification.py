"""The structure in use beside the model itself, at draws from q: what was guessed, and not proved, is verified there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._numerics import in_batches, value_and_grad
from .._state import Plan, PVIState
from ..expectations import FIXED_RULES, FactorStructure, LatentRole, Laws, MeanSpace, all_signs, claimed_terms
from ..factors import (
    Claim,
    GroupMasks,
    Instead,
    ModelCall,
    Packing,
    PartitionPlan,
    chunk_log_likelihood,
    claimed_by_slopes,
    claimed_exact_prior,
    claimed_prior_factor,
    claimed_rows,
    claims_likelihood,
    may_jump,
    rise,
    row_log_likelihood,
    take_rows,
)
from ..families import ProductNatural, conditional_moments, members_of, pair_rule, row_gaussian
from ..sites import posterior, sum_slots, take
from ._product_plan import ProductPlan, owners
from ._product_problem import ProductProblem
from ._programs import chunk_log_likelihoods, unit_slots, whole_call
from ._refinement import first_rule
from ._rule_checks import RULE, rule_check, rule_gaps

# Draws from q: at least so many, and more where rows are few.
_FEWEST, _MOST, _ELEMENTS = 8, 32, 1 << 14
# Rows times draws that are evaluated together.
_TOGETHER = 1 << 18
# Largest difference, relative to a factor's own terms; and what nobody would notice, in nats.
_TOLERANCE, _UNNOTICED = {"float32": 2e-5, "float64": 1e-8}, 1e-3
# Units of rounding by which draws are moved to see what rounding does to the model, and how much more is let pass.
_ULPS, _ROUNDING = 4.0, 16.0
# What a claim begins with that a factor changes as its slopes say.
SLOPES_OF = "slopes of "
# What is folded into a state's key for these draws.
_SEED = 0x5EE5


class Check(NamedTuple):
    """How far what is claimed is from the model at each of P draws, for each of F factors, and what rounding explains. In nats."""

    gap: Float[Array, "P F"]
    allowed: Float[Array, "P F"]


def claims_of(plan: Plan) -> tuple[str, ...]:
    """What a Gaussian fit's plan claims and nothing has proved: "likelihood", "prior", "prior factor", "additivity".

    Of factors that may jump it claims that they change as their slopes say, as "slopes of likelihood" and "slopes of prior factor".
    """
    part = plan.partition
    claimed = []
    if claims_likelihood(part) and "likelihood" not in part.proved:
        claimed.append("likelihood")
    if "prior" not in part.proved:
        claimed += ["prior"] * bool(part.exact) + ["prior factor"] * (part.prior_kind == "affine")
    claimed += [SLOPES_OF + factor for factor in ("likelihood", "prior factor") if may_jump(part, factor)]
    if part.params and part.mechanism != "mask" and part.local is None and "additivity" not in part.proved:
        claimed.append("additivity")
    return tuple(claimed)


def verify_claims(engine: Any, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
    """Compare every claim of a Gaussian fit's plan with the untouched model at draws from q.

    Where the model has ``numpyro.param`` sites, slopes along them are compared as well: a parameter that is 0 leaves values as
    they were claimed, and what it would do is seen by its slope alone. By claim (see :func:`claims_of`) its check: of
    groups for "likelihood" and "additivity", else of one factor. No gap where q is not normalisable, which other parts of a
    round report.
    """
    plan, packing = state.plan, state.packing
    claims, params = claims_of(plan), engine.constrain(plan, args, kwargs, state.optim_state)
    places, valid = draws_of(state, num_draws(packing))
    tangent = direction_of(params, state)
    call = whole_call(engine.model, plan.partition, args, kwargs, params)
    if plan.partition.local is not None and state.sites.local is not None:
        call = dataclasses.replace(call, local=_own_means(state, call.local))
    found = checked(call, plan.partition, packing, claims, places, tangent)
    if "prior" in claims and plan.rows is None:
        found["prior"] = _worse(found["prior"], _held_prior(state, call, places[0]))
    return {claim: Check(jnp.where(valid, own.gap, 0.0), own.allowed) for claim, own in found.items()}


def _own_means(state: PVIState, like: Float[Array, "U K"]) -> Float[Array, "U K"]:
    """Where a state has the rows' own latents, in the order of the rows; 0 for rows of nobody."""
    loc = state.plan.family.moments(posterior(state.prior, state.sites)).loc
    means = conditional_moments(state.sites.local.rows).mean(loc)
    units, counted = unit_slots(state.plan.partition, state.packing)
    return like.at[jnp.where(counted, units, like.shape[0])].set(means, mode="drop")


def checked(
    call: ModelCall,
    part: PartitionPlan,
    packing: Packing | GroupMasks,
    claims: tuple[str, ...],
    places: tuple[Float[Array, "P D"], Float[Array, "P D"]],
    tangent: dict,
) -> dict[str, Check]:
    """Claims beside the model at given points.

    ``places``: points, and the same moved by some units of rounding; ``tangent``: direction of the params in which slopes are
    compared; empty where there are none. By claim its check.
    """

    def at(point: Array, base: Array, params: dict) -> dict[str, dict[str, Claim]]:
        own = dataclasses.replace(call, params=params)
        return {claim: _claimed(claim, part, packing, own, point, base) for claim in claims}

    def look(place: tuple[Array, Array, Array]) -> dict[str, Check]:
        point, moved, base = place
        again = at(moved, base, call.params)
        if not tangent:
            return {claim: _check(packing, own, again[claim]) for claim, own in at(point, base, call.params).items()}
        found, slopes = jax.jvp(lambda p: at(point, base, p), (call.params,), (tangent,))
        checks = {c: _check(packing, found[c], again[c]) for c in claims}
        along = {c: _slopes(packing, found[c], slopes[c]) for c in claims if not c.startswith(SLOPES_OF)}
        return checks | {c: _worse(checks[c], own) for c, own in along.items()}

    # Lines are from one draw to another.
    lines = (*places, jnp.roll(places[0], 1, axis=0))
    return in_batches(look, lines, max(1, _TOGETHER // _num_rows(packing)))


def draws_of(state: PVIState, count: int) -> tuple[tuple[Float[Array, "P D"], Float[Array, "P D"]], Any]:
    """Draws from a state's q at which claims are compared, the same moved by rounding, and whether q is normalisable.

    Returns ``((draws, moved), valid)``.
    """
    draws, valid = _draws(state, count)
    signs = jax.random.rademacher(jax.random.fold_in(state.rng_key, _SEED + 1), draws.shape, dtype=draws.dtype)
    return (draws, draws * (1 + _ULPS * jnp.finfo(draws.dtype).eps * signs)), valid


def num_draws(packing: Packing | GroupMasks) -> int:
    """P, at how many draws claims are verified: more where rows are few."""
    return int(min(_MOST, max(_FEWEST, _ELEMENTS // _num_rows(packing))))


def _num_rows(packing: Packing | GroupMasks) -> int:
    if isinstance(packing, Packing):
        return max(1, packing.rows.size)
    return max(1, sum(x.size for x in packing.group_of_row.values()))


def _draws(state: PVIState, count: int) -> tuple[Float[Array, "P D"], Any]:
    """Draws from q, and whether it is normalisable."""
    plan, key = state.plan, jax.random.fold_in(state.rng_key, _SEED)
    if plan.rows is not None:
        law, valid = row_gaussian(state.prior, take(state.sites.groups, 0))
        return law.sample(key, (count,)), valid
    moments = plan.family.moments(posterior(state.prior, state.sites))
    noise = jax.random.normal(key, (count, plan.family.dim), moments.loc.dtype)
    return plan.family.draw(moments, noise), moments.valid


def direction_of(params: dict, state: PVIState) -> dict:
    """Along which params are moved where slopes are compared: the same at every look at a state."""
    return _direction(params, jax.random.fold_in(state.rng_key, _SEED + 2))


def _direction(params: dict, key: Any) -> dict:
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, max(1, len(leaves)))
    return structure.unflatten(
        [jax.random.normal(k, jnp.shape(x), x.dtype) for k, x in zip(keys, leaves, strict=False)]
    )


def _claimed(
    claim: str, part: PartitionPlan, packing: Any, call: ModelCall, point: Array, base: Array
) -> dict[str, Claim]:
    """One claim at one draw: of rows, by partitioned axis, for "likelihood"; else of factors, under the name ""."""
    if claim.startswith(SLOPES_OF):
        factor = claim.removeprefix(SLOPES_OF)
        found = claimed_by_slopes(call, part, factor, base, point)
        return found if factor == "likelihood" else jax.tree.map(lambda x: x[None], found)
    if claim == "likelihood":
        return claimed_rows(call, part, point)
    if claim == "additivity":
        rows = row_log_likelihood(call, point, part.rows).values()
        whole = sum(by_group(packing, key, x) for key, x in rows)
        size = sum(by_group(packing, key, jnp.abs(x)) for key, x in rows)
        return {"": Claim(chunk_log_likelihoods(part, packing, call, point), whole, size)}
    read = claimed_exact_prior if claim == "prior" else claimed_prior_factor
    return {"": jax.tree.map(lambda x: x[None], read(call, part, point))}


def by_group(packing: Packing | GroupMasks, key: str, values: Float[Array, "N"]) -> Float[Array, "M"]:
    """Numbers of all rows of a partitioned axis, summed by group; rows of nobody are left out."""
    count = packing.offsets.shape[0] - 1
    owner = owners(packing, values.shape[0], key)
    return jax.ops.segment_sum(values, jnp.where(owner < 0, count, owner), count)


def _check(packing: Any, found: dict[str, Claim], again: dict[str, Claim]) -> Check:
    """Gaps of values, with the rounding that a draw moved by some units of it shows."""
    gap, allowed = 0.0, _UNNOTICED
    for key, own in found.items():
        rounding = _finite(jnp.abs(own.model - again[key].model))
        size = _TOLERANCE[own.size.dtype.name] * _finite(own.size) + _ROUNDING * rounding
        size = size if own.slack is None else size + _finite(own.slack)
        gap = gap + _by_factor(packing, key, distance(own.claimed, own.model))
        allowed = allowed + _by_factor(packing, key, size)
    return Check(jnp.asarray(gap), jnp.asarray(allowed))


def _slopes(packing: Any, found: dict[str, Claim], slopes: dict[str, Claim]) -> Check:
    """The same of slopes along the model's params, in nats per unit of them."""
    sized = {k: s._replace(size=found[k].size + jnp.abs(s.claimed) + jnp.abs(s.model)) for k, s in slopes.items()}
    return _check(packing, sized, sized)


def _worse(one: Check, other: Check) -> Check:
    """Of two checks of the same factors, the one that is further from what is allowed, factor by factor."""
    worse = other.gap * one.allowed > one.gap * other.allowed
    return Check(jnp.where(worse, other.gap, one.gap), jnp.where(worse, other.allowed, one.allowed))


def _finite(values: Array) -> Array:
    return jnp.where(jnp.isfinite(values), values, 0.0)


def _held_prior(state: PVIState, call: ModelCall, draws: Float[Array, "P D"]) -> Check:
    """The prior that a state holds beside the model's, from draw to draw: its constant is not held."""
    family, prior = state.plan.family, state.prior
    model = jax.vmap(lambda z: claimed_exact_prior(call, state.plan.partition, z))(draws)
    linear = draws * prior.precision_mean
    square = 0.5 * draws * jax.vmap(lambda z: family.precision_product(prior, z))(draws)
    rest = model.model - jnp.sum(linear - square, axis=-1)
    size = model.size + jnp.sum(jnp.abs(linear) + jnp.abs(square), axis=-1)
    allowed = _UNNOTICED + _TOLERANCE[size.dtype.name] * (size + jnp.roll(size, 1))
    return Check(distance(rest, jnp.roll(rest, 1))[:, None], allowed[:, None])


def distance(claimed: Array, model: Array) -> Array:
    """``|claimed - model|``: infinite where only the model is not finite, 0 where the claim is not, which visits report."""
    gap = jnp.where(jnp.isfinite(model), jnp.abs(claimed - model), jnp.inf)
    return jnp.where(jnp.isfinite(claimed), gap, 0.0)


def _by_factor(packing: Any, key: str, values: Array) -> Array:
    return by_group(packing, key, values) if key else values


def begin_again(engine: Any, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Solver and schedule states of factors that are from now on taken in another way, and their first quadrature rule.

    ``state``: with the new plan, and sites that stay where they are. Returns fields of the state to replace.
    """
    fields, last = memories(engine, state, args, kwargs), state.report
    if engine.schedule.has_agents:
        # Every agent has a q of its own, which is what the sites are of.
        fields["schedule_state"] = state.schedule_state
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    return fields | {"rule": first_rule(last.move.dtype), "report": report}


def memories(engine: Any, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Solver and schedule states, and the report, of a state's factors as if no round had visited them: fields of the state."""
    others = None if state.sites.others is None else sum_slots(state.sites.others)
    params = engine.constrain(state.plan, args, kwargs, state.optim_state)
    prior = state.prior, state.exact
    return engine.unvisited(
        engine.problem(state.plan, state.packing, args, kwargs, params, prior, len(FIXED_RULES), others)
    )


# ------------------------------------------------------------------------------------------------- products of families
# What a fit under AutoExponentialFamily claims of its factors, at draws from q: conjugacy, independence, exact priors.
#
# A factor that is affine in a latent's statistics given the others has the same weighted sum over values with equal
# average statistics: four draws from q and the pair of points that is fitted to them. A factor without a latent does
# not move with it.

# Draws that a pair of points is fitted to, and backgrounds at which the other latents are held.
_FITTED, _BACKGROUNDS = 4, 3
# Largest weighted sum, relative to the factor's own terms; and what nobody would notice, in nats.
_PRODUCT_TOLERANCE, _PRODUCT_UNNOTICED = {"float32": 3e-4, "float64": 1e-8}, 1e-3
# So many units in the last place settings are moved by, and so many times the change that makes is no contradiction.
_DIGITS, _ROUNDINGS = 4, 1.0
_PRODUCT_TOGETHER = 1 << 16
# What is folded into a state's key for these draws.
_PRODUCT_SEED = 0x5EE6
# What a claim begins with that is of slopes along a component, and of members that share their signs along an axis; and what it is
# called that the design of signs is exact.
SLOPES, SHARED, DESIGN = "slopes along ", "shared signs of ", "a design of signs"
# Kinds of roles that claim something of a factor.
_CLAIMED = ("exact", "absent", "predictors")
# Points and weights of a third difference between two values: 0 for what is quadratic along the line.
_LINE, _THIRD = (0.0, 1 / 3, 2 / 3, 1.0), (1.0, -3.0, 3.0, -1.0)


def product_claims(plan: ProductPlan) -> tuple[str, ...]:
    """What a plan claims and nothing has proved, as "factor/component".

    That it is exact in the component, sees it through predictors, does not see it, or that no term sees two members of all that
    Hermite's rule is in at once; as "factor/slopes along component", that it changes along one as its slopes say, where it
    may jump; as "factor/shared signs of component", that no term sees two entries along an axis of its members; as "factor/a design
    of signs", that no more of them meet in a product than the design has strength for; and as "factor/a fixed rule", proved or not,
    that such a rule serves. ``plan``: the plan. Returns names under "likelihood" and "prior factor", and under "prior" components
    whose prior is held exactly.
    """
    claimed, proved = [], plan.partition.proved
    for factor, found in (("likelihood", plan.likelihood), ("prior factor", plan.prior_factor)):
        if found is not None and factor.split()[0] not in proved:
            claimed += [f"{factor}/{role.name}" for role in found.roles if role.kind in _CLAIMED or _is_apart(role)]
            claimed += [f"{factor}/{SHARED}{role.name}" for role in found.roles if role.kind == "exact" and role.apart]
            claimed += [f"{factor}/{DESIGN}"] if found.strength < found.num_signs else []
        # Moments are of values: no slope is taken for what a factor does.
        if found is not None and not plan.tilted:
            claimed += [f"{factor}/{SLOPES}{name}" for name in found.by_slopes]
        if found is not None and found.by_rule:
            claimed.append(f"{factor}/{RULE}")
    if "prior" not in proved:
        claimed += [f"prior/{name}" for name in plan.exact]
    return tuple(claimed)


def verify_product(problem: ProductProblem, state: PVIState, natural: Any) -> dict[str, Check]:
    """Compare every claim of a plan with the untouched model at draws from q.

    By claim (see :func:`product_claims`) its check: of groups under "likelihood", else of one factor.
    """
    plan, claims = problem.plan, product_claims(problem.plan)
    key, found = jax.random.fold_in(state.rng_key, _PRODUCT_SEED), {}
    draws = _draws_of(problem, natural, key) if any(not c.endswith(RULE) for c in claims) else {}
    for factor in ("likelihood", "prior factor"):
        names = tuple(c.removeprefix(factor + "/") for c in claims if c.startswith(factor + "/"))
        if names and factor == "likelihood":
            here = functools.partial(rows_checks, problem, names, natural, key)
            gaps = problem.of_rows("verify", here, natural, key, names=names)
            checks = [Check(gaps[i].T, gaps[i + 1].T) for i in range(0, len(gaps), 2)]
        elif names:
            checks = _factor_checks(problem, factor, names, natural, key, draws)
        if RULE in names:
            site = state.sites.prior
            if factor == "likelihood":
                site = natural - problem.prior if site is None else natural - problem.prior - site
            last = names.index(RULE)
            checks[last] = Check(*rule_check(problem, factor, natural, site, tuple(checks[last]), key))
        if names:
            found |= {f"{factor}/{name}": check for name, check in zip(names, checks, strict=True)}
    if plan.exact and "prior" not in plan.partition.proved:
        own = {n: x.reshape(-1, *x.shape[2:]) for n, x in draws.items()}
        found |= {f"prior/{name}": _held(problem, state.prior, name, own) for name in plan.exact}
    valid = problem.family.in_domain(natural)
    return {claim: Check(jnp.where(valid, own.gap, 0.0), own.allowed) for claim, own in found.items()}


def _draws_of(problem: ProductProblem, natural: ProductNatural, key: Any) -> dict:
    """Draws of all components from q, with a leading axis of backgrounds and one of draws."""
    return problem.family.sample(natural, key, (_BACKGROUNDS, 1 + _FITTED))


def rows_checks(
    problem: ProductProblem, names: tuple[str, ...], natural: ProductNatural, key: Any
) -> tuple[Float[Array, "M _"], ...]:
    """What is claimed of every group's factor in some components, at draws from q.

    Returns of each component two arrays, gaps and what is allowed of them, with a leading axis of groups.
    """
    draws = _draws_of(problem, natural, key) if any(n != RULE for n in names) else {}
    checks = _factor_checks(problem, "likelihood", names, natural, key, draws)
    return tuple(x.T for check in checks for x in check)


def _factor_checks(
    problem: ProductProblem, factor: str, names: tuple[str, ...], natural: ProductNatural, key: Any, draws: dict
) -> list[Check]:
    """One check for every component of one factor; of a fixed rule what :func:`rule_check` makes one of."""
    structure = problem.plan.likelihood if factor == "likelihood" else problem.plan.prior_factor
    assert structure is not None  # there are claims of it
    roles, checks = {role.name: role for role in structure.roles}, {}
    if RULE in names:
        checks[RULE] = Check(*rule_gaps(problem, factor, natural, key))
    for name in (n for n in names if n.startswith(SLOPES)):
        checks[name] = _by_slopes(problem, factor, name.removeprefix(SLOPES), draws)
    shared = [name for name in names if name.startswith(SHARED)]
    anchored = [n for n in names if n not in checks and n in roles and _is_anchored(problem, roles[n])]
    for name in anchored:
        checks[name] = _by_message(problem, factor, roles[name], natural, draws)
    seen = [name for name in names if name not in checks and name in roles and roles[name].kind == "predictors"]
    if seen:
        checks |= dict.fromkeys(seen, _by_claimed_terms(problem, factor, structure, draws))
    # All that is left are sums over settings: one pass for all of them, most of what is compiled.
    rng, sums = np.random.default_rng(0), {}
    for name in (n for n in names if n not in checks):
        if name == DESIGN:
            sums[name] = _by_signs(problem, structure, natural, draws)
            continue
        at = [{n: x[b] for n, x in draws.items()} for b in range(_BACKGROUNDS)]
        if name in shared:
            own = [_along(problem, roles[name.removeprefix(SHARED)], x, b) for b, x in enumerate(at)]
        else:
            own = [_settings(problem, structure, roles[name], x, rng, b) for b, x in enumerate(at)]
        sums[name] = _stacked([s for pairs, _ in own for s in pairs]), own[0][1]
    checks |= _weighed(problem, factor, sums) if sums else {}
    return [checks[name] for name in names]


def _stacked(settings: list[dict]) -> dict:
    return {n: jnp.stack([s[n] for s in settings]) for n in settings[0]}


def _measured(problem: ProductProblem, factor: str, settings: dict) -> tuple[Float[Array, "S F"], Float[Array, "S F"]]:
    """What :func:`factor_values` gives, sizes that cover what the last digits of the settings decide as well.

    Terms are seen as the model adds them up: of a count of a hundred thousand what is left of two numbers of a million, which
    single precision has to a tenth.
    """
    nudge = _DIGITS * jnp.finfo(jnp.result_type(float)).eps

    def nudged(x: Array) -> Array:
        # Towards 0, which most supports reach down to.
        return x - nudge * x if jnp.issubdtype(x.dtype, jnp.floating) else x

    both = jax.tree.map(lambda x: jnp.concatenate([x, nudged(x)]), settings)
    (values, near), (sizes, _) = (jnp.split(x, 2) for x in factor_values(problem, factor, both))
    return values, sizes + _ROUNDINGS * _where_finite(values, near) / _PRODUCT_TOLERANCE[values.dtype.name]


def _weighed(problem: ProductProblem, factor: str, sums: dict[str, tuple[dict, Sequence[float]]]) -> dict[str, Check]:
    """By name a check of weighted sums of a factor's values at settings, as many at a time as there are weights."""
    settings = jax.tree.map(lambda *x: jnp.concatenate(x), *(own for own, _ in sums.values()))
    evaluated, begin, checks = _measured(problem, factor, settings), 0, {}
    for name, (own, weights) in sums.items():
        count = len(jax.tree.leaves(own)[0])
        value, size = (x[begin : begin + count].reshape(-1, len(weights), x.shape[-1]) for x in evaluated)
        begin, share = begin + count, jnp.asarray(weights, value.dtype)[:, None]
        plus, minus = (jnp.sum(jnp.maximum(sign * share, 0.0) * value, axis=1) for sign in (1, -1))
        size = jnp.sum(jnp.abs(share) * jnp.where(jnp.isfinite(size), size, 0.0), axis=1)
        checks[name] = Check(_where_finite(plus, minus), _allowed(size))
    return checks


def _where_finite(one: Array, other: Array) -> Array:
    """``|one - other|``, and 0 where either is not finite: far draws from wide families overflow."""
    return jnp.where(jnp.isfinite(one) & jnp.isfinite(other), jnp.abs(one - other), 0.0)


def _allowed(size: Array) -> Array:
    return _PRODUCT_UNNOTICED + _PRODUCT_TOLERANCE[size.dtype.name] * jnp.where(jnp.isfinite(size), size, 0.0)


def _is_anchored(problem: ProductProblem, role: LatentRole) -> bool:
    rule = pair_rule(dict(problem.family.components)[role.name])
    return (
        role.kind == "exact"
        and role.single
        and rule is not None
        and rule.anchored
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
    values, sizes = _measured(problem, factor, _stacked(settings))
    claimed, moved = (x.reshape(values.shape) for x in (claimed, moved))
    return Check(_where_finite(claimed, values), _allowed(sizes + moved))


def _by_slopes(problem: ProductProblem, factor: str, name: str, draws: dict) -> Check:
    """A factor from one draw of a component to another, given the others, beside what its slopes on the line between them say."""
    held = {n: x[:, 0] for n, x in draws.items()}
    way = draws[name][:, 1] - held[name]

    def at(step: Any) -> dict:
        return held | {name: held[name] + step * way}

    (begin, first), (end, last) = (_measured(problem, factor, at(step)) for step in (0, 1))
    whole, missed = rise(lambda step: factor_values(problem, factor, at(step))[0], way.dtype)
    return Check(_where_finite(begin + whole, end), _allowed(first + last) + _finite(missed))


def _by_claimed_terms(problem: ProductProblem, factor: str, structure: FactorStructure, draws: dict) -> Check:
    """A factor at draws of what it sees through predictors, given the others, beside what it would be if they are affine."""
    names, plan = structure.by_predictors, problem.plan
    settings = [
        {n: x[b, 1 + i] if n in names else x[b, 0] for n, x in draws.items()}
        for b in range(_BACKGROUNDS)
        for i in range(_FITTED)
    ]
    law = plan.predictor_law(structure, Laws(dict.fromkeys(names)))

    def instead(values: dict) -> Instead:
        point = jnp.concatenate([values[n].reshape(-1) for n, _ in problem.family.components if n in names])
        return claimed_terms(law, plan.latent_values(values), point)

    claimed, parts = factor_values(problem, factor, _stacked(settings), instead)
    values, sizes = _measured(problem, factor, _stacked(settings))
    return Check(_where_finite(claimed, values), _allowed(sizes + parts))


def _is_apart(role: LatentRole) -> bool:
    """Whether it was found, and not proved, that no term sees a member of the component and another of what goes with it."""
    return role.kind == "quadrature" and not role.proved


def _settings(
    problem: ProductProblem, structure: FactorStructure, role: LatentRole, draws: dict, rng: Any, background: int
) -> tuple[list[dict], list[float]]:
    """Values of all components, and weights of the factor's values there that add up to 0 if what is claimed holds."""
    family, held = dict(problem.family.components)[role.name], {n: x[0] for n, x in draws.items()}
    if role.kind == "quadrature":
        return _mixed(problem, structure, role, draws, background)
    old, new = held[role.name], draws[role.name][1:]
    rule = pair_rule(family)
    if role.kind == "absent" or rule is None:
        points, weights = jnp.stack([old, new[0]]), [1.0, -1.0]
    elif rule.axes:
        # Along a line of the coordinates that are normal.
        to, back = (way or (lambda x: x) for way in (rule.value, rule.inverse))
        one, other = back(old), back(new[0])
        steps = jnp.asarray(_LINE, one.dtype).reshape(-1, *(1,) * one.ndim)
        points, weights = to(one + steps * (other - one)), list(_THIRD)
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


def _mixed(
    problem: ProductProblem, structure: FactorStructure, role: LatentRole, draws: dict, background: int
) -> tuple[list[dict], list[float]]:
    """The same of a sum of functions of one member each: what some members change is the same whatever the others are.

    Some are the component, or half of its members: at every two backgrounds that follow one another each of them once.
    """
    families = dict(problem.family.components)
    some, rng = {}, np.random.default_rng(background // 2)
    for name in structure.by_nodes:
        members = members_of(families[name])
        mask = np.full(members, name == role.name)
        if name == role.name and mask.size > 1:
            mask = rng.permutation(np.arange(mask.size) % 2 == background % 2).reshape(members)
        some[name] = mask.reshape((*members, *(1,) * (draws[name].ndim - 1 - len(members))))
    return _both_ways(draws, some)


def _both_ways(draws: dict, some: dict[str, np.ndarray]) -> tuple[list[dict], list[float]]:
    """A draw with another's values at both parts of the members of some components, at one of them, and at none."""
    held, settings = {n: x[0] for n, x in draws.items()}, []
    for first, second in ((True, True), (True, False), (False, True), (False, False)):
        new = {n: jnp.where(np.where(x, first, second), draws[n][1], held[n]) for n, x in some.items()}
        settings.append(held | new)
    return settings, [1.0, -1.0, -1.0, 1.0]


def _along(problem: ProductProblem, role: LatentRole, draws: dict, background: int) -> tuple[list[dict], list[float]]:
    """The same of a component whose members share signs along axes: half of the entries along each of them."""
    members = members_of(dict(problem.family.components)[role.name])
    settings, weights, rng = [], [], np.random.default_rng(background)
    for axis in role.apart:
        half = rng.permutation(np.arange(members[axis]) % 2 == 0)
        mask = half.reshape([-1 if i == axis else 1 for i in range(draws[role.name].ndim - 1)])
        own = _both_ways(draws, {role.name: mask})
        settings, weights = settings + own[0], weights + own[1]
    return settings, weights


def _by_signs(
    problem: ProductProblem, structure: FactorStructure, natural: ProductNatural, draws: dict
) -> tuple[dict, list[float]]:
    """Settings at rows of signs, and weights that add up to 0 if no more signs meet in a product than the design has strength for.

    The factor is a polynomial of the signs. Of some blocks of them, one more than the strength, the sum over flips of whole blocks,
    each with its sign, leaves only products of signs from all the blocks. They are dealt out at random.
    """
    space, strength = MeanSpace(problem.family, structure, 1), int(structure.strength)
    coordinates, rng = space.variables(natural)[0]["coordinates"], np.random.default_rng(0)
    flips = all_signs(strength + 1)
    times = _BACKGROUNDS * max(1, len(space.signs(jax.random.key(0))) // len(flips))
    rows, held = [], []
    for i in range(times):
        owner = rng.permutation(np.arange(structure.num_signs) % (strength + 1))
        rows.append(rng.choice([-1.0, 1.0], structure.num_signs) * flips[:, owner])
        held.append(np.full(len(flips), i % _BACKGROUNDS))
    backgrounds = np.concatenate(held)
    settings = {n: x[backgrounds, 0] for n, x in draws.items()}
    signs = jnp.asarray(np.concatenate(rows), jnp.result_type(float))
    settings |= jax.vmap(lambda row: space.at_signs(coordinates, row))(signs)
    return settings, [float(x) for x in flips.prod(axis=1) / 2**strength]


def factor_values(
    problem: ProductProblem, factor: str, settings: dict, instead: Callable[[dict], Instead] | None = None
) -> tuple[Float[Array, "S F"], Float[Array, "S F"]]:
    """The factors' log densities over base measures at settings of all components, and the size of their terms, in nats.

    ``problem``: the factors; ``factor``: "likelihood", of which there is one a group, or "prior factor"; ``settings``: S values
    of every component, in its own support; ``instead``: from a setting to the terms that are taken as they are claimed to be.
    Returns both; where the prior of a component is held exactly it is no part of either.
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
    batch = max(1, _PRODUCT_TOGETHER // max(rows, 1))
    return in_batches(groups if factor == "likelihood" else prior, settings, batch)


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

    apart, size = in_batches(gap, draws, 8)
    return Check(apart[:, None], _allowed(size)[:, None])


def q_of(problem: ProductProblem, state: PVIState) -> ProductNatural:
    """Natural parameters of q, sites of groups whose rows are not at hand included, which the problem has for a prior."""
    sites = dataclasses.replace(state.sites, others=None)
    return posterior(problem.prior, sites)
