"""A visit to one group that has local latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._numerics import all_finite
from ..expectations import LocalChunk
from ..families import GaussianNatural, schur_complement
from ..sites import LocalSites, damp, select, take
from ..solvers import LocalResult

if TYPE_CHECKING:
    from ._local import LocalProblem

_MAX_TRIES = 20


def visit_with_locals(
    problem: LocalProblem, index: Int[Array, ""], q: Any, site: Any, state: Any, noise: Any, local: LocalSites
) -> tuple[LocalResult, LocalSites]:
    """One natural-gradient step of one group over the shared and its own latents, halved until q is normalisable.

    Args:
        problem: the factors.
        index: the group.
        q: natural parameters of q(theta).
        site: the group's site.
        state: the group's solver state, handed back.
        noise: the round's draws.
        local: what all groups hold of their local latents.

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

    def good(new: GaussianNatural):
        return family.in_domain(q - site + new) & all_finite(new)

    def unfinished(carry):
        step, tries, new = carry
        return ~good(new) & (tries < _MAX_TRIES)

    def halve(carry):
        step, tries, _ = carry
        return 0.5 * step, tries + 1, site_at(0.5 * step)

    first = jnp.asarray(getattr(problem.solver, "step_size", 1.0), moments.loc.dtype)
    step, tries, new = jax.lax.while_loop(unfinished, halve, (first, jnp.int32(0), site_at(first)))
    moved = good(new) & jnp.isfinite(value)
    step = jnp.where(moved, step, 0.0)

    def settle(c, kept):
        mixed = damp(take(local.rows, c), take(rows, c), step)
        mixed = select(moved, mixed, take(local.rows, c))
        return jax.tree.map(lambda x, value: x.at[c].set(value), kept, mixed)

    settled = jax.lax.fori_loop(*span, settle, local.rows)
    mine = select(moved, damp(old, shared, step), old)
    joint = jax.tree.map(lambda x, value: x.at[index].set(value), local.shared, mine)
    return LocalResult(select(moved, new, site), state, tries, moved), LocalSites(joint, settled)
