"""Latents of the groups' own that clients keep to themselves: their programs for them, whose results are named and not told."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compiling import Program
from ..expectations import LocalLatentProgram, LocalNoise, joint_rules, own_normals
from ..families import GaussianMoments, conditional_divergence, conditional_moments
from ..sites import LocalSites, OwnConditionals, damp, marginal_sites, take
from ._factors import Draws
from ._local_latents import at_conditionals, conditionals_after, conditionals_at, own_move, visit_with_locals
from ._moments import GaussianMatched
from ._programs import first_conditionals


class Wanted(NamedTuple):
    """What a look leaves with every client: names of what groups want beside their sites, and what is told of it."""

    tickets: Int[Array, "M 2"]
    # Whether all of it is finite, and whether what the look was at is normalisable.
    finite: Bool[Array, "M"]
    valid: Bool[Array, "M"]


class Units(NamedTuple):
    """A client's units (plate indices) among all: what their draws are told by, and their latents' prior, Float[n K] each."""

    index: Int[Array, "n"]
    loc: Float[Array, "n K"]
    sd: Float[Array, "n K"]


def starting(plan: Any, packing: Any, solver: Any, units: Units, dtype: Any) -> LocalSites | OwnConditionals:
    """What a client holds beside its site before the first round."""
    rows = first_conditionals(plan, packing, jnp.asarray(units.loc, dtype), jnp.asarray(units.sd, dtype))
    return OwnConditionals(rows) if solver.keeps_conditionals else LocalSites(plan.family.zeros((1,), dtype), rows)


def own_draws(units: Units, offset: Any, seed: Any, shape: tuple[int, int, int], total: int) -> Float[Array, "n T K"]:
    """Draws of a client's units among those of all."""
    dim, width, count = shape
    return own_normals(seed, dim, width, count, total, units.loc.dtype).local[units.index + offset]


def _wanted(solver: Any, held: Any, found: Any) -> tuple[Any, Bool[Array, ""]]:
    """What a look finds that own latents want, and whether all of it is finite; what is held, where it finds nothing."""
    if found is None:
        return held, jnp.array(True)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(found.rows)]))
    if solver.keeps_conditionals:
        return OwnConditionals(found.rows), finite
    return held + (found - held) * solver.step_size, finite


def by_looks(problem: Any, looks: int) -> Any:
    """A client's factors with the fixed points that all rows together are looked at by. ``looks``: log densities of all units."""
    program = problem.program
    if not isinstance(program, LocalLatentProgram) or program.rules is None:
        return problem
    rules = joint_rules(problem.family.dim, problem.units[1], looks)
    return dataclasses.replace(problem, program=dataclasses.replace(program, rules=rules))


class HeldPrograms(NamedTuple):
    """What a client does with what it holds, compiled, of ``(arrays, packing, prior, units)`` and of that first.

    A look, a visit, a share of the way, how far one is from another, and its part of the evidence.
    """

    look: Program
    visit: Program
    between: Program
    apart: Program
    evidence: Program


def held_programs(problem_of: Any, plan: Any, prepared: Any) -> HeldPrograms:
    """The programs of all clients that differ in their rows only.

    ``problem_of``: ``(rows, rules)`` to the factors; ``prepared``: ``(own problem, settings)``: how a look is made, see
    :func:`numpyro_pvi.runtime._answers.programs_of`.
    """
    family, width = plan.family, plan.partition.local.width

    def look(rows, held, offset, seed, moments, level, probe, draws, flags, raised, clip, rules, looks, total):
        own = by_looks(problem_of(rows, rules), looks)
        if seed is not None:
            drawn = own_draws(rows[3], offset, seed, (family.dim, width, draws.shape[0]), total)
            draws = LocalNoise(draws, drawn, *flags)
        clip = raised if clip is None else clip
        found = own.sum_groups(own.looking(moments, level, draws, clip, probe), held)
        aim, finite = _wanted(own.solver, held, found.local)
        valid = jnp.all(conditional_moments(held.rows).valid)
        return prepared(found, probe is not None), finite, valid, aim

    def visit(rows, held, offset, seed, rest, site, state, key, rule, pairs, guarded, rules, looks, total):
        own, zero = by_looks(problem_of(rows, rules), looks), jnp.int32(0)
        if not own.matches_moments:
            draws = own_draws(rows[3], offset, seed, (family.dim, width, pairs.shape[0]), total)
            noise = Draws(pairs, jnp.zeros((1, family.dim), pairs.dtype), None, None, draws)
            if own.keeps_conditionals:
                found, new = own.visit_group(zero, rest + site, site, state, key, rule, noise, held)
                # What groups want together of their own latents is what the round's look has found.
                return found, held if guarded else new
            return visit_with_locals(own, zero, rest + site, site, state, noise, rule, held)
        matched = GaussianMatched(at_conditionals(own, held), rule)
        found = matched.visit(zero, rest, site, state, key, guarded)
        if guarded:
            return found, conditionals_at(own, rest + site, held)
        return found, conditionals_after(own, zero, rest + found.site, held)

    def between(held, aim, step):
        mixed = damp(held, aim, step)
        if isinstance(mixed, OwnConditionals):
            return (), mixed
        mixed = LocalSites(family.symmetrise(mixed.shared), mixed.rows)
        group = jnp.zeros(mixed.rows.linear.shape[:1], jnp.int32)
        return tuple(jax.tree.leaves(take(marginal_sites(mixed, group), 0))), mixed

    def apart(new, old, moments, before):
        def seen(held: Any, at: GaussianMoments) -> Any:
            found = conditional_moments(held.rows)
            return found.mean(at.loc), found.marginal_sd(at)

        return own_move(seen(new, moments), seen(old, before)), jnp.sum(
            conditional_divergence(new.rows, old.rows, moments)
        )

    def evidence(rows, held, q, site, state, key, rule, rules):
        own = at_conditionals(problem_of(rows, rules), held)
        return GaussianMatched(own, rule).share(jnp.int32(0), q, site, state, key)

    return HeldPrograms(
        Program(look, ("clip", "rules", "looks", "total")),
        Program(visit, ("guarded", "rules", "looks", "total")),
        Program(between),
        Program(apart),
        Program(evidence, ("rules",)),
    )
