"""Groups that have latents of their own: visits to them, and factors with these integrated out at every theta."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import (
    Expected,
    ImportanceMoments,
    IntegratedProgram,
    LocalChunk,
    MaskedIntegratedProgram,
    Proposal,
    from_points,
    owners,
)
from ..factors import GroupMasks, ModelCall, Packing, PartitionPlan, row_log_likelihood
from ..families import GaussianFamily, GaussianNatural, schur_complement
from ..schedules import RoundCarry
from ..sites import MAX_HALVINGS, LocalSites, OwnConditionals, back_off, damp, keep_groups, select, take
from ..solvers import LocalResult, local_free_energy
from ._factors import Factors, OwnRows
from ._tilted import cloud_of

_MAX_TRIES = 20
# Roundings of its largest parts by which a local free energy may fall.
_ROUNDING = 20


@dataclasses.dataclass(frozen=True)
class _Move:
    """One group's way from where its sites are to its natural-gradient target.

    ``old`` and ``shared`` are the joint sites' part over theta, there and at the target; ``mine`` and ``rows`` those of
    the group's own latents given theta, in the chunks that are here.
    """

    problem: Factors
    # The group's chunks that are here, first and past the last.
    span: tuple
    q: Any
    site: Any
    old: GaussianNatural
    shared: GaussianNatural
    mine: Any
    rows: Any
    noise: Any

    def site_at(self, step: Float[Array, ""]) -> GaussianNatural:
        """The site over theta, the group's own latents integrated out, at a share of the way."""
        joint = damp(self.old, self.shared, step)
        if not self.mine.full:
            return joint

        def subtract(c, total: GaussianNatural) -> GaussianNatural:
            vector, matrix = schur_complement(self._rows_at(c, step))
            return GaussianNatural(total.precision_mean - vector, total.precision - matrix)

        zero = jax.tree.map(jnp.zeros_like, joint)
        return joint + self.problem.runtime.total(jax.lax.fori_loop(*self.span, subtract, zero))

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
        value = self.problem.runtime.total(jax.lax.fori_loop(*self.span, add, zero))
        found = Expected(value, None, None, zero, zero, zero)
        energy, _ = local_free_energy(family, found, new, q, moments)
        return moments.valid & jnp.isfinite(found.value) & ((energy >= least) | ~jnp.isfinite(least))

    def settled(self, step: Float[Array, ""], moved: Bool[Array, ""]) -> Any:
        """The own latents' sites of all groups, with this group's moved."""

        def settle(c, kept):
            mixed = select(moved, self._rows_at(c, step), take(self.mine, c))
            return jax.tree.map(lambda x, value: x.at[c].set(value), kept, mixed)

        return self.problem.runtime.gathered(jax.lax.fori_loop(*self.span, settle, self.mine))

    def _rows_at(self, c: Any, step: Float[Array, ""]) -> Any:
        return damp(take(self.mine, c), take(self.rows, c), step)


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

    Where nothing later tests it, it is halved until the local free energy has not fallen either: that of the joint Gaussian
    over theta and the group's own latents, which are those of their conditional at any theta. ``state``: the group's solver
    state, handed back; ``rule``: which of them are in use; ``local``: what all groups hold of their local latents; ``alone``:
    whether no joint step of all groups follows, whose ELBO would be looked at. Returns the site, and ``local`` with this
    group's part replaced.
    """
    family, data = problem.family, problem.data
    moments, old, draws = family.moments(q), take(local.shared, index), problem.draws_of(problem.program, noise, rule)
    span, mine = problem.span(index), problem.runtime.mine(local.rows, problem.held)

    def expect(c, carry):
        value, shared, rows = carry
        chunk = LocalChunk(*take(data.chunks, c), take(mine, c))
        found = problem.program.expected(chunk, moments, None, 0, draws, False)
        rows = jax.tree.map(lambda x, new: x.at[c].set(new), rows, found.local)
        return value + found.value, shared + found.target, rows

    zero = family.zeros((), moments.loc.dtype)
    value, shared, rows = jax.lax.fori_loop(*span, expect, (jnp.zeros((), moments.loc.dtype), zero, mine))
    value, shared = problem.runtime.total((value, shared))
    move = _Move(problem, span, q, site, old, shared, mine, rows, draws)
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
    kept = select(moved, damp(old, shared, step), old)
    joint = jax.tree.map(lambda x, value: x.at[index].set(value), local.shared, kept)
    return LocalResult(select(moved, new, site), state, tries, moved), LocalSites(joint, move.settled(step, moved))


def own_move(
    new: tuple[Float[Array, "*rows"], Float[Array, "*rows"]], old: tuple[Float[Array, "*rows"], Float[Array, "*rows"]]
) -> Float[Array, ""]:
    """Largest change of a mean or log sd of local latents. ``new``: means and sds under q. In new sds, where of means."""
    (mean_new, own_new), (mean_old, own_old) = new, old
    shift = jnp.max(jnp.abs(mean_new - mean_old) / own_new)
    return jnp.maximum(shift, jnp.max(jnp.abs(jnp.log(own_new) - jnp.log(own_old))))


# ------------------------------------------------------------------------------------------------------- integrated out
# Factors of solvers that match moments where groups have latents of their own: these are integrated out at every theta.


def integrated_program(
    part: PartitionPlan,
    packing: Packing | GroupMasks,
    call: ModelCall,
    read: Callable[[Any], ModelCall],
    family: GaussianFamily,
) -> IntegratedProgram:
    """The program of factors over the shared latents alone.

    ``part``: the partition's plan, with local latents; ``read``: one chunk's arrays to the model on its rows. Returns the
    program; one pass over all rows serves all groups where they are masked.
    """
    local = part.local
    assert local is not None
    if isinstance(packing, Packing):

        def by_slot(data, theta, z):
            terms = row_log_likelihood(dataclasses.replace(read(data), local=z), theta, part.rows)
            return sum((values for _, values in terms.values()), start=jnp.zeros(z.shape[0], z.dtype))

        return IntegratedProgram(by_slot, family, packing.rows.shape[1])

    return _masked_program(part, packing, call, family)


def _masked_program(
    part: PartitionPlan, packing: GroupMasks, call: ModelCall, family: GaussianFamily
) -> MaskedIntegratedProgram:
    """The same where every group is a pass over all rows: rows are added to the unit that they depend on."""
    local = part.local
    assert local is not None
    key_of, place, free, by_row = _row_places(part, packing, call)
    group_of, count = packing.group_of_row, part.table.num_groups

    def by_unit(data, theta, z):
        total = jnp.zeros((local.size,), z.dtype)
        for name, (_, values) in by_row(theta, z).items():
            if name in place:
                values = jax.ops.segment_sum(values, place[name], local.size)
            total = total + values
        return total

    def loose(theta):
        found, total = by_row(theta, jnp.zeros_like(call.local)), jnp.zeros((count,), theta.dtype)
        for name in key_of:
            total = total + jax.ops.segment_sum(found[name][1], free[name], count)
        return total

    rows = max([local.size, *(group_of[key].shape[0] for key in key_of.values())])
    return MaskedIntegratedProgram(
        by_unit,
        family,
        rows,
        group_of_unit=group_of[local.key],
        num_groups=count,
        rest=loose if key_of else None,
    )


def _row_places(part: PartitionPlan, packing: GroupMasks, call: ModelCall) -> tuple[dict, dict, dict, Callable]:
    """Of sample sites whose rows are not the units: their axis, each row's unit, and the group of rows that have none.

    A row that is nobody's, or not of the kind, has the number past the last, which sums by segment drop.
    """
    local = part.local
    assert local is not None

    def by_row(theta, z):
        return row_log_likelihood(dataclasses.replace(call, local=z), theta, part.rows)

    key_of: dict[str, str] = {}

    def note(theta, z):
        key_of.update({name: key for name, (key, _) in by_row(theta, z).items() if key != local.key})
        return theta

    def elsewhere(theta, z):
        found = by_row(theta, z)
        return {name: found[name][1] for name in key_of}

    dim, dtype = part.layout.dim, call.local.dtype
    jax.eval_shape(note, jnp.zeros((dim,), dtype), call.local)
    if not key_of:
        return {}, {}, {}, by_row
    unit_of = owners(elsewhere, dim, (local.size, local.width), dtype)
    group_of, count = packing.group_of_row, part.table.num_groups
    place, free = {}, {}
    for name, key in key_of.items():
        somebody, own = group_of[key] >= 0, unit_of[name] >= 0
        place[name] = jnp.where(own & somebody, unit_of[name], local.size)
        free[name] = jnp.where(~own & somebody, group_of[key], count)
    return key_of, place, free, by_row


# ------------------------------------------------------------------------------------------------------- conditionals


def at_conditionals(problem: Factors, local: Any) -> Factors:
    """The factors with what q says of their groups' own latents in the chunks, where integrals are searched from."""
    if not isinstance(local, OwnConditionals):
        return problem
    return dataclasses.replace(problem, data=dataclasses.replace(problem.data, chunks=chunks_with(problem, local)))


def chunks_with(problem: Factors, local: Any) -> Any:
    """Chunks with what groups hold of their own latents; sites of single rows are the solver's own."""
    chunks = problem.data.chunks
    if not isinstance(local, LocalSites | OwnConditionals):
        return chunks
    return LocalChunk(*chunks, problem.runtime.mine(local.rows, problem.held))


def beside_conditionals(problem: Any, local: Any) -> Any:
    """The factors with what q says of their groups' own latents beside the rows, where steps are by batches of these."""
    if problem.rows is None or not isinstance(local, OwnConditionals):
        return problem
    packing, slots = problem.rows.packing, jnp.arange(local.rows.linear.shape[1])
    count = jnp.arange(packing.chunk_group.shape[0])
    # Masks have all units in every group's only chunk.
    before = 0 * count if isinstance(packing, GroupMasks) else count - packing.offsets[packing.chunk_group]
    own = OwnRows(local.rows, before[:, None] * slots.shape[0] + slots)
    rows = dataclasses.replace(problem.rows, own=problem.runtime.mine(own, problem.held))
    return dataclasses.replace(at_conditionals(problem, local), rows=rows)


def conditionals_at(problem: Factors, q: Any, local: OwnConditionals) -> OwnConditionals:
    """Every unit's conditional matched to q(theta) and the exact one."""
    moments, chunks = problem.family.moments(q), chunks_with(problem, local)
    if isinstance(problem.program, MaskedIntegratedProgram):
        return OwnConditionals(problem.program.match_all(chunks, q, moments))
    found = jax.lax.map(lambda chunk: problem.program.match(chunk, q, moments), chunks)
    return OwnConditionals(problem.runtime.gathered(found))


def conditionals_proposal(problem: Factors, carry: RoundCarry, moved: Bool[Array, "M"]) -> OwnConditionals | None:
    """The same at a round's q for the groups that moved; None where there are no own latents."""
    local = carry.sites.local
    if not isinstance(local, OwnConditionals):
        return None
    return keep_groups(moved, conditionals_at(problem, carry.evaluation.q, local), local, problem.data.chunk_group)


def conditionals_after(problem: Factors, index: Int[Array, ""], q: Any, local: Any, *draws: Any) -> Any:
    """The same for one group: what its visit leaves.

    ``q``: natural parameters of q(theta) after the visit; ``draws``: what the program takes of a round's, where these latents are
    not integrated out: their step is then halved until the local ELBO at q has not fallen on these draws. Returns ``local`` with
    this group's part replaced; as it is where there are no own latents.
    """
    if not isinstance(local, OwnConditionals):
        return local
    moments, chunks = problem.family.moments(q), chunks_with(problem, local)
    span, mine = problem.span(index), problem.runtime.mine(local.rows, problem.held)
    if draws:
        return OwnConditionals(problem.runtime.gathered(_not_fallen(problem, span, moments, chunks, mine, *draws)))

    def settle(c, rows):
        found = problem.program.match(take(chunks, c), q, moments)
        return jax.tree.map(lambda x, new: x.at[c].set(new), rows, found)

    return OwnConditionals(problem.runtime.gathered(jax.lax.fori_loop(*span, settle, mine)))


def _not_fallen(problem: Factors, span: tuple, moments: Any, chunks: LocalChunk, old: Any, draws: Any) -> Any:
    """As much of the way from the old conditionals to those that one group wants as does not lower its local ELBO.

    Where a density grows exponentially a full natural-gradient step goes to where it overflows.
    """
    zero = jnp.zeros((), moments.loc.dtype)

    def settle(c, carry):
        rows, total = carry
        found, value = problem.program.match(take(chunks, c), moments, draws)
        return jax.tree.map(lambda x, new: x.at[c].set(new), rows, found), total + value

    # The pass that says where to go says how good it is here, too.
    wanted, value = jax.lax.fori_loop(*span, settle, (old, zero))
    before = problem.runtime.total(value)
    least = before - _ROUNDING * jnp.finfo(before.dtype).eps * jnp.abs(before)

    def holds(step: Any) -> Bool[Array, ""]:
        def add(c, total):
            rows = damp(take(old, c), take(wanted, c), step)
            chunk = LocalChunk(*take(problem.data.chunks, c), rows)
            return total + problem.program.expected(chunk, moments, None, 0, draws, False).value

        found = problem.runtime.total(jax.lax.fori_loop(*span, add, zero))
        return jnp.isfinite(found) & ((found >= least) | ~jnp.isfinite(least))

    step, tries = back_off(holds, jnp.ones_like(zero))
    return damp(old, wanted, jnp.where(tries < MAX_HALVINGS, step, 0.0))


# ------------------------------------------------------------------------------------------------------- shared points


def shares_points(problem: Factors, method: Any) -> bool:
    """Whether one pass over all rows at common points of q serves the moments of all groups.

    So it is where every group's own pass would be over all rows, and moments are taken from weighted points of q, once a
    visit.
    """
    return (
        isinstance(problem.program, MaskedIntegratedProgram)
        and problem.solver.looks_once
        and (method == "grid" or isinstance(method, ImportanceMoments))
    )


def look_together(problem: Factors, method: Any, q: Any, key: Any) -> Callable[[Int[Array, ""]], Callable]:
    """Evaluate every group's factor at common points of q.

    ``problem``: the factors, with their conditionals in the chunks; ``method``: "grid" or the settings of weighted draws.
    Returns a group's index to its way to take moments (of q, site, power, key and memory).
    """
    family, proposal = problem.family, Proposal(q, problem.family.moments(q))
    cloud = cloud_of(family, method, key, q.precision_mean.dtype)
    points = family.draw(proposal.moments, cloud.eps)
    table: Float[Array, "S M"] = problem.program.log_densities_at(problem.data.chunks, points)

    def of_group(index):
        return partial(_weighed, family, cloud, table[:, index], proposal)

    return of_group


def _weighed(family, cloud, factor, proposal, q, site, power, key, memory=None):
    return from_points(family, cloud, factor, q, site, proposal, power)
