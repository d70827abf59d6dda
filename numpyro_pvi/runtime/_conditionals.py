"""A visit to one group that has local latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._numerics import all_finite
from ..expectations import Expected, LocalChunk
from ..families import GaussianNatural, schur_complement
from ..sites import LocalSites, damp, select, take
from ..solvers import LocalResult, local_free_energy

if TYPE_CHECKING:
    from ._local import LocalProblem

_MAX_TRIES = 20
# Roundings of its largest parts by which a local free energy may fall.
_ROUNDING = 20


def visit_with_locals(
    problem: LocalProblem,
    index: Int[Array, ""],
    q: Any,
    site: Any,
    state: Any,
    noise: Any,
    local: LocalSites,
    alone: bool = False,
) -> tuple[LocalResult, LocalSites]:
    """One natural-gradient step of one group over the shared and its own latents, halved until q is normalisable.

    Where nothing later tests it, it is halved until the local free energy has not fallen either: that of the joint
    Gaussian over theta and the group's own latents, which are those of their conditional at any theta.

    Args:
        problem: the factors.
        index: the group.
        q: natural parameters of q(theta).
        site: the group's site.
        state: the group's solver state, handed back.
        noise: the round's draws.
        local: what all groups hold of their local latents.
        alone: whether no joint step of all groups follows, whose ELBO would be looked at.

    Returns:
        The site, and ``local`` with this group's part replaced.
    """
    family, data = problem.family, problem.data
    moments, old = family.moments(q), take(local.shared, index)
    span = data.offsets[index], data.offsets[index + 1]

    def expect(c, carry):
        value, shared, rows = carry
        chunk = LocalChunk(*take(data.chunks, c), take(local.rows, c))
        found = problem.program.expected(chunk, moments, None, 0, noise, False)
        rows = jax.tree.map(lambda x, new: x.at[c].set(new), rows, found.local)
        return value + found.value, shared + found.target, rows

    zero = family.zeros((), moments.loc.dtype)
    value, shared, rows = jax.lax.fori_loop(*span, expect, (jnp.zeros((), moments.loc.dtype), zero, local.rows))

    def site_at(step) -> GaussianNatural:
        joint = damp(old, shared, step)
        if not local.rows.full:
            return joint

        def subtract(c, total: GaussianNatural) -> GaussianNatural:
            vector, matrix = schur_complement(damp(take(local.rows, c), take(rows, c), step))
            return GaussianNatural(total.precision_mean - vector, total.precision - matrix)

        return jax.lax.fori_loop(*span, subtract, joint)

    def energy_at(step, new: GaussianNatural):
        there = q - site + new
        moments = family.moments(there)

        def add(c, total):
            chunk = LocalChunk(*take(data.chunks, c), damp(take(local.rows, c), take(rows, c), step))
            return total + problem.program.expected(chunk, moments, None, 0, noise, False).value

        zero = jnp.zeros((), moments.loc.dtype)
        found = Expected(jax.lax.fori_loop(*span, add, zero), None, None, zero, zero, zero)
        energy, size = local_free_energy(family, found, new, there, moments)
        return energy, size, moments.valid & jnp.isfinite(found.value)

    if alone:
        before = Expected(value, None, None, value, value, value)
        energy, size = local_free_energy(family, before, site, q, moments)
        least = energy - _ROUNDING * jnp.finfo(size.dtype).eps * size

    def good(step, new: GaussianNatural):
        usable = family.in_domain(q - site + new) & all_finite(new)
        if not alone:
            return usable
        found, _, finite = energy_at(step, new)
        return usable & finite & ((found >= least) | ~jnp.isfinite(least))

    def unfinished(carry):
        _, tries, _, found = carry
        return ~found & (tries < _MAX_TRIES)

    def halve(carry):
        step, tries, *_ = carry
        new = site_at(0.5 * step)
        return 0.5 * step, tries + 1, new, good(0.5 * step, new)

    first = jnp.asarray(getattr(problem.solver, "step_size", 1.0), moments.loc.dtype)
    start = site_at(first)
    step, tries, new, found = jax.lax.while_loop(unfinished, halve, (first, jnp.int32(0), start, good(first, start)))
    moved = found & jnp.isfinite(value)
    step = jnp.where(moved, step, 0.0)

    def settle(c, kept):
        mixed = damp(take(local.rows, c), take(rows, c), step)
        mixed = select(moved, mixed, take(local.rows, c))
        return jax.tree.map(lambda x, value: x.at[c].set(value), kept, mixed)

    settled = jax.lax.fori_loop(*span, settle, local.rows)
    mine = select(moved, damp(old, shared, step), old)
    joint = jax.tree.map(lambda x, value: x.at[index].set(value), local.shared, mine)
    return LocalResult(select(moved, new, site), state, tries, moved), LocalSites(joint, settled)
