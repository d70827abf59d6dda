"""A visit to one group that has local latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import Expected, LocalChunk
from ..families import GaussianNatural, schur_complement
from ..sites import LocalSites, damp, select, take
from ..solvers import LocalResult, local_free_energy
from ._factors import Factors

_MAX_TRIES = 20
# Roundings of its largest parts by which a local free energy may fall.
_ROUNDING = 20


@dataclasses.dataclass(frozen=True)
class _Move:
    """One group's way from where its sites are to its natural-gradient target.

    ``old`` and ``shared`` are the joint sites' part over theta, there and at the target; ``local.rows`` and ``rows`` those of
    the group's own latents given theta.
    """

    problem: Factors
    # The group's chunks, first and past the last.
    span: tuple
    q: Any
    site: Any
    old: GaussianNatural
    shared: GaussianNatural
    local: LocalSites
    rows: Any
    noise: Any

    def site_at(self, step: Float[Array, ""]) -> GaussianNatural:
        """The site over theta, the group's own latents integrated out, at a share of the way."""
        joint = damp(self.old, self.shared, step)
        if not self.local.rows.full:
            return joint

        def subtract(c, total: GaussianNatural) -> GaussianNatural:
            vector, matrix = schur_complement(self._rows_at(c, step))
            return GaussianNatural(total.precision_mean - vector, total.precision - matrix)

        return jax.lax.fori_loop(*self.span, subtract, joint)

    def usable(self, new: GaussianNatural) -> Bool[Array, ""]:
        """Whether q is normalisable with this site."""
        return self.problem.family.in_domain(self.q - self.site + new) & all_finite(new)

    def least_energy(self, value: Float[Array, ""]) -> Float[Array, ""]:
        """The local free energy where the sites are (nats), less what rounding may take of it."""
        family = self.problem.family
        before = Expected(value, None, None, value, value, value)
        energy, size = local_free_energy(family, before, self.site, self.q, family.moments(self.q))
        return energy - _ROUNDING * jnp.finfo(size.dtype).eps * size

    def raises(self, step: Float[Array, ""], new: GaussianNatural, least: Float[Array, ""]) -> Bool[Array, ""]:
        """Whether a share of the way does not lower the local free energy; one that was not finite is no bar."""
        family, data = self.problem.family, self.problem.data
        q = self.q - self.site + new
        moments = family.moments(q)

        def add(c, total):
            chunk = LocalChunk(*take(data.chunks, c), self._rows_at(c, step))
            return total + self.problem.program.expected(chunk, moments, None, 0, self.noise, False).value

        zero = jnp.zeros((), moments.loc.dtype)
        found = Expected(jax.lax.fori_loop(*self.span, add, zero), None, None, zero, zero, zero)
        energy, _ = local_free_energy(family, found, new, q, moments)
        return moments.valid & jnp.isfinite(found.value) & ((energy >= least) | ~jnp.isfinite(least))

    def settled(self, step: Float[Array, ""], moved: Bool[Array, ""]) -> Any:
        """The own latents' sites of all groups, with this group's moved."""

        def settle(c, kept):
            mixed = select(moved, self._rows_at(c, step), take(self.local.rows, c))
            return jax.tree.map(lambda x, value: x.at[c].set(value), kept, mixed)

        return jax.lax.fori_loop(*self.span, settle, self.local.rows)

    def _rows_at(self, c: Any, step: Float[Array, ""]) -> Any:
        return damp(take(self.local.rows, c), take(self.rows, c), step)


def visit_with_locals(
    problem: Factors,
    index: Int[Array, ""],
    q: Any,
    site: Any,
    state: Any,
    noise: Any,
    rule: Any,
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
        rule: which of them are in use.
        local: what all groups hold of their local latents.
        alone: whether no joint step of all groups follows, whose ELBO would be looked at.

    Returns:
        The site, and ``local`` with this group's part replaced.
    """
    family, data = problem.family, problem.data
    moments, old, draws = family.moments(q), take(local.shared, index), problem.draws_of(problem.program, noise, rule)
    span = data.offsets[index], data.offsets[index + 1]

    def expect(c, carry):
        value, shared, rows = carry
        chunk = LocalChunk(*take(data.chunks, c), take(local.rows, c))
        found = problem.program.expected(chunk, moments, None, 0, draws, False)
        rows = jax.tree.map(lambda x, new: x.at[c].set(new), rows, found.local)
        return value + found.value, shared + found.target, rows

    zero = family.zeros((), moments.loc.dtype)
    value, shared, rows = jax.lax.fori_loop(*span, expect, (jnp.zeros((), moments.loc.dtype), zero, local.rows))
    move = _Move(problem, span, q, site, old, shared, local, rows, draws)
    least = move.least_energy(value) if alone else None

    def attempt(step, tries):
        new = move.site_at(step)
        return step, tries, new, move.usable(new) & (least is None or move.raises(step, new, least))

    first = jnp.asarray(problem.solver.step_size, moments.loc.dtype)
    step, tries, new, found = jax.lax.while_loop(
        lambda carry: ~carry[3] & (carry[1] < _MAX_TRIES),
        lambda carry: attempt(0.5 * carry[0], carry[1] + 1),
        attempt(first, jnp.int32(0)),
    )
    moved = found & jnp.isfinite(value)
    step = jnp.where(moved, step, 0.0)
    mine = select(moved, damp(old, shared, step), old)
    joint = jax.tree.map(lambda x, value: x.at[index].set(value), local.shared, mine)
    return LocalResult(select(moved, new, site), state, tries, moved), LocalSites(joint, move.settled(step, moved))
