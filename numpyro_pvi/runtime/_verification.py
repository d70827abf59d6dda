"""The structure in use beside the model itself, at draws from q: what was guessed, and not proved, is verified where q is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._state import Plan, PVIState
from ..expectations import FIXED_RULES
from ..factors import (
    Claim,
    GroupMasks,
    ModelCall,
    Packing,
    PartitionPlan,
    claimed_exact_prior,
    claimed_prior_factor,
    claimed_rows,
    claims_likelihood,
    row_log_likelihood,
)
from ..families import row_gaussian
from ..sites import posterior, sum_slots, take
from ._product_plan import owners
from ._programs import chunk_log_likelihoods, whole_call
from ._rules import first_rule

# Draws from q: at least so many, and more where rows are few.
_FEWEST, _MOST, _ELEMENTS = 8, 32, 1 << 14
# Rows times draws that are evaluated together.
_TOGETHER = 1 << 18
# Largest difference, relative to a factor's own terms; and what nobody would notice, in nats.
_TOLERANCE, _UNNOTICED = {"float32": 2e-5, "float64": 1e-8}, 1e-3
# Units of rounding by which draws are moved to see what rounding does to the model, and how much more is let pass.
_ULPS, _ROUNDING = 4.0, 16.0
# What is folded into a state's key for these draws.
_SEED = 0x5EE5


class Check(NamedTuple):
    """How far what is claimed is from the model at each of P draws, for each of F factors, and what rounding explains. In nats."""

    gap: Float[Array, "P F"]
    allowed: Float[Array, "P F"]


def claims_of(plan: Plan) -> tuple[str, ...]:
    """What a Gaussian fit's plan claims and nothing has proved: "likelihood", "prior", "prior factor", "additivity"."""
    part = plan.partition
    claimed = []
    if claims_likelihood(part) and "likelihood" not in part.proved:
        claimed.append("likelihood")
    if "prior" not in part.proved:
        claimed += ["prior"] * bool(part.exact) + ["prior factor"] * (part.prior_kind == "affine")
    if part.params and part.mechanism != "mask" and part.local is None and "additivity" not in part.proved:
        claimed.append("additivity")
    return tuple(claimed)


def verify_claims(engine: Any, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
    """Compare every claim of a Gaussian fit's plan with the untouched model at draws from q.

    Where the model has ``numpyro.param`` sites, slopes along them are compared as well: a parameter that is 0 leaves values as
    they were claimed, and what it would do is seen by its slope alone.

    Args:
        engine: the model and the choices.
        state: whose q, structure and params.
        args: the model's positional arguments (arrays).
        kwargs: its keyword arguments.

    Returns:
        By claim (see :func:`claims_of`) its check: of groups for "likelihood" and "additivity", else of one factor. No gap where
        q is not normalisable, which other parts of a round report.
    """
    plan, packing = state.plan, state.packing
    part, claims = plan.partition, claims_of(plan)
    params = engine.constrain(plan, args, kwargs, state.optim_state)
    draws, valid = _draws(state, num_draws(packing))
    signs = jax.random.rademacher(jax.random.fold_in(state.rng_key, _SEED + 1), draws.shape, dtype=draws.dtype)
    moved = draws * (1 + _ULPS * jnp.finfo(draws.dtype).eps * signs)
    tangent = _direction(params, jax.random.fold_in(state.rng_key, _SEED + 2))

    def at(point: Array, params: dict) -> dict[str, dict[str, Claim]]:
        call = whole_call(engine.model, part, args, kwargs, params)
        return {claim: _claimed(claim, part, packing, call, point) for claim in claims}

    def look(pair: tuple[Array, Array]) -> dict[str, Check]:
        again = at(pair[1], params)
        if not params:
            return {claim: _check(packing, own, again[claim]) for claim, own in at(pair[0], params).items()}
        found, slopes = jax.jvp(lambda p: at(pair[0], p), (params,), (tangent,))
        return {c: _worse(_check(packing, found[c], again[c]), _slopes(packing, found[c], slopes[c])) for c in claims}

    found = jax.lax.map(look, (draws, moved), batch_size=max(1, _TOGETHER // _num_rows(packing)))
    if "prior" in claims and plan.rows is None:
        call = whole_call(engine.model, part, args, kwargs, params)
        found["prior"] = _worse(found["prior"], _held_prior(state, call, draws))
    return {claim: Check(jnp.where(valid, own.gap, 0.0), own.allowed) for claim, own in found.items()}


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


def _direction(params: dict, key: Any) -> dict:
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, max(1, len(leaves)))
    return structure.unflatten(
        [jax.random.normal(k, jnp.shape(x), x.dtype) for k, x in zip(keys, leaves, strict=False)]
    )


def _claimed(claim: str, part: PartitionPlan, packing: Any, call: ModelCall, point: Array) -> dict[str, Claim]:
    """One claim at one draw: of rows, by partitioned axis, for "likelihood"; else of factors, under the name ""."""
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

    Args:
        engine: the model and the choices.
        state: with the new plan, and sites that stay where they are.
        args: the model's positional arguments (arrays).
        kwargs: its keyword arguments.

    Returns:
        Fields of the state to replace.
    """
    others = None if state.sites.others is None else sum_slots(state.sites.others)
    params = engine.constrain(state.plan, args, kwargs, state.optim_state)
    prior = state.prior, state.exact
    problem = engine.problem(state.plan, state.packing, args, kwargs, params, prior, len(FIXED_RULES), others)
    fields, last = engine.unvisited(problem), state.report
    if engine.schedule.has_agents:
        # Every agent has a q of its own, which is what the sites are of.
        fields["schedule_state"] = state.schedule_state
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    return fields | {"rule": first_rule(problem.dtype), "report": report}
