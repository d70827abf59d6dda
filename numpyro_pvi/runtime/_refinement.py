"""Which quadrature rule an evaluation uses, when it refines, and the few rows that see q widely and need their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, in_batches, mixing_shares
from ..expectations import (
    FIXED_RULES,
    AffineProgram,
    Expected,
    TermNumbers,
    add_expected,
    refined,
    rule_index,
    sum_by_group,
)
from ..factors import Packing
from ..families import GaussianMoments, GaussianNatural
from ..schedules import Points, Rule
from ..sites import SiteStack, posterior, select
from ..solvers import LocalResult

# Relative quadrature error that does no harm while q still moves by more than a posterior sd in a round.
LOOSE_TOLERANCE = 2e-2
LOOSE_MOVE = 1.0
# The same of a fresh state's q, for which the finest rule is not compiled: nothing is made of it but a first step, of several sds,
# which is shortened until the loss falls.
ROUGH_TOLERANCE = 1.0


def first_rule(dtype, spread: Float[Array, ""] | None = None, cheaper: Any = 0) -> Rule:
    """The rule of a fresh state: the cheapest, or (less ``cheaper``) the one for predictors known to be so wide."""
    zero = jnp.zeros((), dtype)
    rough = zero + ROUGH_TOLERANCE
    # Nothing compared yet: as if q had come from far away.
    points = Points(jnp.zeros((2,), bool), jnp.full((2,), jnp.inf, dtype), zero + jnp.inf, jnp.zeros((2,), bool))
    if spread is None:
        return Rule(jnp.int32(0), zero, zero, rough, points)
    level = jnp.clip(rule_index(spread) - cheaper, 0, len(FIXED_RULES) - 1).astype(jnp.int32)
    return Rule(level, spread, spread, rough, points)


def cheaper_rule(rule: Rule) -> Rule:
    """Where the next evaluation starts: a cheaper rule is tried again whenever the predictor sd has halved."""
    lower = (rule.level > 0) & (rule.spread < 0.5 * rule.anchor)
    level = jnp.minimum(rule.level - 1, rule_index(rule.spread))
    return rule._replace(
        level=jnp.where(lower, level, rule.level).astype(jnp.int32), anchor=jnp.where(lower, rule.spread, rule.anchor)
    )


def rule_at_start(rule: Rule, again: bool | Bool[Array, ""]) -> Rule:
    """Where an evaluation starts: with the rule as it is if the last one is made again to the letter, else a cheaper one."""
    return select(jnp.asarray(again), rule, cheaper_rule(rule))


def next_rule(rule: Rule, used: Int[Array, ""], spread: Float[Array, ""]) -> Rule:
    """What an evaluation leaves behind: the rule it ended with, and the sd at which it had to refine."""
    return rule._replace(level=used, spread=spread, anchor=jnp.where(used > rule.level, spread, rule.anchor))


def relative_error(expected: Expected) -> Float[Array, ""]:
    """Estimated quadrature error of all rows, relative to the precision of q.

    Errors and sizes are weighted by the predictors' variances, so both are traces of (a precision times the covariance of q),
    and the trace of q's own precision times its covariance is D: curvature much smaller than that needs no relative accuracy.
    ``expected``: expectations of one or more groups. Returns the ratio; infinity where the error is unknown.
    """
    total = jnp.maximum(jnp.sum(expected.weight), expected.product.shape[-1])
    ratio = jnp.sum(expected.error) / total
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)


def escalate(
    evaluate: Callable[[Any], tuple[Any, Float[Array, ""]]], rule: Rule, num_rules: int
) -> tuple[Any, Int[Array, ""], Float[Array, ""]]:
    """Evaluate with a quadrature rule, and again with finer ones while the error is above the rule's tolerance.

    ``evaluate``: the index of a quadrature rule to ``(result, relative error)``; ``rule``: where to start, and the tolerance.
    Returns ``(result, rule used, relative error)``; the error is above the tolerance only where the finest rule missed it.
    """
    return refined(evaluate, rule.level, held_to(rule).tolerance, num_rules)


def held_to(rule: Rule) -> Rule:
    """The rule as of a state that is not fresh: what finer rules that are at hand are tried for, and losses are held to."""
    return rule._replace(tolerance=jnp.minimum(rule.tolerance, LOOSE_TOLERANCE))


def escalated(evaluate: Callable[[Any], Expected], rule: Rule, num_rules: int) -> Expected:
    """:func:`escalate` for one factor, judged by its own error.

    ``rule``: where to start, and the tolerance. Returns the expectations under the rule that was accurate enough, or the
    finest.
    """

    def split(level):
        result = evaluate(level)
        return result, relative_error(result)

    return escalate(split, rule, num_rules)[0]


# ------------------------------------------------------------------------------------------------------ Anderson mixing
# Fixed points of natural-gradient steps by Anderson mixing, with a bound that must rise.

# Steps remembered, looks at most, and the residual (in posterior sds and their like for the precision) that ends the search.
_WINDOW, _MOST_LOOKS, _STILL = 5, 80, 1e-3
# Shortest step tried.
_SHORTEST = 2.0**-10


class _Search(NamedTuple):
    """The last points and the targets of their steps, oldest first, on a leading axis of ``_WINDOW``."""

    points: Any
    targets: Any
    filled: Int[Array, ""]
    energy: Float[Array, ""]
    # Of the newest point, and the residuals of all points in its coordinates.
    moments: GaussianMoments
    residuals: Float[Array, "W P"]
    step: Float[Array, ""]
    mixing: Bool[Array, ""]
    looks: Int[Array, ""]


def climb(start: Any, found: tuple, value: Callable[[Any], tuple]) -> tuple[Any, Bool[Array, ""]]:
    """Iterate ``point <- target(point)``, extrapolated from the last steps, while an energy rises.

    The combination of past targets is the one whose residuals, in standard coordinates of the newest q, are least (Anderson
    1965; Walker and Ni 2011). Where it is refused the plain step is tried, and halved. ``start``: a pytree with the field
    ``natural``, of a full-covariance Gaussian; linear combinations of it stand for linear combinations of q; ``found``:
    ``value(start)``; ``value``: a point to its ``(energy, size of the energy's terms, moments, target)``. Returns the last
    point, and whether it is one: False where not even the start has a finite energy and a normalisable q.
    """
    energy, _, moments, target = found

    def stacked(x):
        return jnp.zeros((_WINDOW, *x.shape), x.dtype).at[-1].set(x)

    points, targets = jax.tree.map(stacked, start), jax.tree.map(stacked, target)
    one = jnp.ones((), energy.dtype)
    residuals = _residuals(points, targets, moments)
    usable = moments.valid & jnp.isfinite(energy) & all_finite(target)
    first = _Search(points, targets, jnp.int32(1), energy, moments, residuals, one, jnp.array(False), jnp.int32(0))

    def unfinished(s: _Search) -> Bool[Array, ""]:
        still = jnp.linalg.norm(s.residuals[-1]) <= _STILL
        return usable & ~still & (s.looks < _MOST_LOOKS) & (s.step >= _SHORTEST)

    def attempt(s: _Search) -> _Search:
        change = jnp.append(s.residuals[-1] - s.residuals[:-1], s.residuals[-1:], axis=0)
        shares = mixing_shares(change @ change.T, s.filled)
        newest = jax.tree.map(lambda x: x[-1], s.points)

        def candidate(share, target, point):
            return jnp.where(s.mixing, jnp.tensordot(share, target, 1), point + s.step * (target[-1] - point))

        found = jax.tree.map(lambda t, p: candidate(shares, t, p), s.targets, newest)
        energy, size, moments, target = value(found)
        good = (
            moments.valid & all_finite((found, target)) & (energy >= s.energy - 20 * jnp.finfo(size.dtype).eps * size)
        )

        def push(stack, new):
            return jnp.where(good, jnp.roll(stack, -1, axis=0).at[-1].set(new), stack)

        points, targets = jax.tree.map(push, s.points, found), jax.tree.map(push, s.targets, target)
        moments = jax.tree.map(lambda new, old: jnp.where(good, new, old), moments, s.moments)
        filled = jnp.minimum(s.filled + good, _WINDOW)
        # A refused mixture gives way to the plain step; that one is halved, and grows back.
        step = jnp.where(good, jnp.minimum(2 * s.step, 1.0), jnp.where(s.mixing, s.step, 0.5 * s.step))
        energy = jnp.where(good, energy, s.energy)
        residuals = _residuals(points, targets, moments)
        return _Search(points, targets, filled, energy, moments, residuals, step, good, s.looks + 1)

    last = jax.lax.while_loop(unfinished, attempt, first)
    return jax.tree.map(lambda x: x[-1], last.points), usable


def _residuals(points: Any, targets: Any, moments: GaussianMoments) -> Float[Array, "W P"]:
    """What each point's step would change, in standard coordinates: ``S^T (dh - dLambda m)`` and ``S^T dLambda S / sqrt 2``.

    The squared length of such a vector is twice the divergence, to second order.
    """
    change: GaussianNatural = targets.natural - points.natural
    root = moments.scale
    vector = (change.precision_mean - change.precision @ moments.loc) @ root
    matrix = jnp.einsum("ki,wkl,lj->wij", root, change.precision, root, optimize="greedy") / 2**0.5
    return jnp.concatenate([vector, matrix.reshape(matrix.shape[0], -1)], axis=-1)


# ----------------------------------------------------------------------------------------------- rows that see q widely
# Rows that see q widely, a few of many: a quadrature rule of their own, and steps of their own within a round.

# Rows from which a share of them is set apart, that share, and the most latents whose steps are extrapolated.
LEAST_ROWS, SHARE, MOST_LATENTS = 1 << 15, 24, 256
# Chunks whose widths are found at once; picked rows that are looked at together; the smallest block of them.
_AT_ONCE, _BLOCK, _SMALLEST = 16, 1024, 16


@dataclasses.dataclass(frozen=True, eq=False)
class WideRows:
    """Picks the rows that see q most widely, whatever their groups; padding of groups can change how many, by a factor of two.

    ``program``: quadrature over affine predictors, for a full-covariance q; ``prepare``: the rows and which of them count, both
    of length K, to what ``program`` reads; ``rows``: which row stands in every slot of every chunk; ``block``: how
    many of the ``count`` picked rows are read and summed together, so that a block is of few groups.
    """

    program: AffineProgram
    prepare: Callable[[Int[Array, "K"], Bool[Array, "K"]], Any]
    rows: Int[Array, "C R"]
    mask: Bool[Array, "C R"]
    count: int
    block: int

    def select(self, chunks: Any, moments: GaussianMoments) -> Int[Array, "K"]:
        """The slots, counted through all chunks, of the rows with the largest predictor sds under q."""
        found = in_batches(lambda c: self.program.widths(c, moments), chunks, _AT_ONCE)
        # Single precision will do, and is sorted ten times as fast; NaNs are no rows to single out.
        widths = jnp.nan_to_num(jnp.where(self.mask, found, -1.0).astype(jnp.float32).reshape(-1))
        return jnp.sort(jax.lax.top_k(widths, self.count)[1]).astype(jnp.int32)

    def read(self, slots: Int[Array, "K"]) -> Any:
        """What the program reads of these slots, in blocks of rows on a leading axis."""

        def prepared(own: Int[Array, "B"]) -> Any:
            return self.prepare(self.rows.reshape(-1)[own], self.mask.reshape(-1)[own])

        return self.by_block(prepared, slots.reshape(-1, self.block))

    def by_block(self, function: Callable[[Any], Any], blocks: Any) -> Any:
        """A function of every block: nodes of all picked rows at once would take more memory than a pass over the others."""
        return in_batches(function, blocks, max(1, _BLOCK // self.block))

    def widest(self, blocks: Any, moments: GaussianMoments) -> Float[Array, ""]:
        """The largest sd under q of any predictor of these rows."""
        return jnp.max(self.by_block(lambda own: self.program.widths(own, moments), blocks))

    def numbers(self, blocks: Any, moments: GaussianMoments, level: Any) -> tuple[TermNumbers, ...]:
        """Numbers of these rows, by block."""
        return self.by_block(lambda own: self.program.numbers(own, moments, level), blocks)

    def total(self, blocks: Any, numbers: tuple[TermNumbers, ...], moments: GaussianMoments) -> Expected:
        """Numbers summed over the design of all these rows."""
        found = self.by_block(lambda both: self.program.contract(*both, moments), (blocks, numbers))
        return jax.tree.map(lambda x: x[0], sum_by_group(found, jnp.zeros(found.value.shape, jnp.int32), 1))

    def without(self, chunks: Any, slots: Int[Array, "K"]) -> Any:
        """All chunks, in which these slots do not count."""
        kept = jnp.ones((self.mask.size,), bool).at[slots].set(False).reshape(self.mask.shape)
        return tuple((data, mask & kept) for data, mask in chunks)


def wide_rows(plan: Any, program: Any, solver: Any, packing: Any, read: Callable) -> WideRows | None:
    """How the widest rows of a likelihood are set apart, or None where its rows are few or not of that kind.

    ``read``: the program and any rows to what the program reads of them. Returns how to pick and read them.
    """
    if not isinstance(program, AffineProgram) or not isinstance(packing, Packing) or plan.partition.local is not None:
        return None
    if packing.places is not None:
        # The widest of all rows are on any device; to know them would be to gather a number of every row, and then them.
        return None
    family, size = plan.family, packing.rows.size
    if not (family.full and solver.immediate and size >= LEAST_ROWS and family.dim <= MOST_LATENTS):
        return None
    if any(spec.row_dim != -1 for spec in program.terms):
        return None
    # A power of two: the number of slots, padding with them, depends a little on how rows are grouped.
    count = 1 << ((size // SHARE).bit_length() - 1)
    # At most as many rows are summed group by group as there are, however many groups.
    block = min(count, _BLOCK, 1 << (max(size // (packing.offsets.shape[0] - 1), _SMALLEST).bit_length() - 1))
    probe = jax.eval_shape(partial(read, program), *(jax.ShapeDtypeStruct((block,), t) for t in (jnp.int32, bool)))
    if any(mask.shape != (block,) for _, mask in probe):
        return None
    return WideRows(program, partial(read, program), packing.rows, packing.mask, count, block)


class WideFound(NamedTuple):
    """Of the picked rows: their slots, what quadrature says of them by group, and how well."""

    slots: Int[Array, "K"]
    groups: Expected
    error: Float[Array, ""]


def expect_wide(problem: Any, moments: GaussianMoments, rule: Rule) -> WideFound:
    """Expectations of the widest rows under the cheapest rule that serves them.

    ``rule``: the tolerance; where to start is read off the rows. Returns the rows' part of every group's expectations, and its
    relative error.
    """
    wide: WideRows = problem.wide
    slots = wide.select(problem.data.chunks, moments)
    blocks = wide.read(slots)
    widest = wide.widest(blocks, moments)

    def at(level):
        numbers = wide.numbers(blocks, moments, level)
        return numbers, relative_error(wide.total(blocks, numbers, moments))

    first = jnp.clip(rule_index(widest), 0, len(FIXED_RULES) - 1).astype(jnp.int32)
    numbers, _, error = escalate(at, rule._replace(level=first), problem.num_rules)
    return WideFound(slots, by_group(problem, slots, blocks, numbers, moments), error)


def joined(groups: Expected, values: Any, error: Any, apart: WideFound) -> tuple[Expected, Any, Any]:
    """All rows' expectations, values and error, from those of the rows set apart and of the others."""
    found = add_expected(groups, apart.groups)
    return found, values + jnp.sum(apart.groups.value), jnp.maximum(error, apart.error)


def by_group(problem: Any, slots: Any, blocks: Any, numbers: tuple[TermNumbers, ...], moments: Any) -> Expected:
    """Sum the picked rows' numbers over their design, group by group: of every block, what each of its groups has there."""
    wide: WideRows = problem.wide
    if problem.num_groups == 1:
        return jax.tree.map(lambda x: x[None], wide.total(blocks, numbers, moments))
    # Slots are in order, and so are their groups: a piece begins where a block or a group does.
    owner = problem.data.chunk_group[slots // wide.mask.shape[1]]
    place = jnp.arange(wide.count)
    begins = (place % wide.block == 0) | (owner != jnp.roll(owner, 1))
    most = wide.count // wide.block + problem.num_groups - 1
    (first,) = jnp.nonzero(begins, size=most, fill_value=wide.count - 1)
    real, group, owners = jnp.arange(most) < jnp.sum(begins), owner[first], owner.reshape(-1, wide.block)

    def contract(piece: tuple) -> Expected:
        at, own, there = piece
        chunk, found, whose = jax.tree.map(lambda x: x[at], (blocks, numbers, owners))
        mine = there & (whose == own)
        kept = (jax.tree.map(partial(_where, mine), n._replace(spread=None))._replace(spread=n.spread) for n in found)
        return wide.program.contract(chunk, tuple(kept), moments)

    return problem.runtime.sum_chunks(
        contract,
        (first // wide.block, group, real),
        group,
        jnp.searchsorted(group, jnp.arange(problem.num_groups + 1)),
        wide.program.working_bytes(jax.tree.map(lambda x: x[0], blocks)),
    )


def _where(mine: Bool[Array, "B"], x: Float[Array, "B"]) -> Float[Array, "B"]:
    return jnp.where(mine, x, 0.0)


class _Rows(NamedTuple):
    """One q of the search: natural parameters, and the numbers of the picked rows that it stands for."""

    natural: GaussianNatural
    numbers: Any


def refine(problem: Any, evaluation: Any, results: LocalResult) -> LocalResult:
    """Go on with the widest rows alone, the other rows' proposals held, before all rows are looked at again.

    Where labels separate the rows that see a direction (rare categories), each step takes q a fixed way along it, as Newton's
    method does on an exponential, for dozens of rounds; the rows that say so are few. With the others' sites held, theirs are
    iterated on the local free energy of all of them together. Where the first proposal is a fixed point of all rows the search
    ends at once, whatever the quadrature: its target at the old q is the exact one. ``problem``: the factors;
    ``evaluation.wide`` are the picked slots; ``evaluation``: of the q that the proposals were made at; ``results``: what the
    groups propose; where one proposes nothing, nothing is refined. Returns the proposals, refined.
    """
    proposed, moved = results.site, results.moved
    wide: WideRows = problem.wide
    family = problem.family
    wide = dataclasses.replace(wide, program=dataclasses.replace(wide.program, num_rules=len(FIXED_RULES)))
    blocks = wide.read(evaluation.wide)

    def numbers_at(moments):
        level = jnp.clip(rule_index(wide.widest(blocks, moments)), 0, len(FIXED_RULES) - 1)
        found = wide.numbers(blocks, moments, level)
        kept = tuple((n.rows, n.weight) for n in found)
        return kept, wide.total(blocks, found, moments)

    prior = None if evaluation.prior is None else evaluation.prior.target
    start = posterior(problem.prior_natural, SiteStack(proposed, prior))
    first = family.moments(start)
    # Both looks from one compiled program.
    ends = jax.lax.map(numbers_at, jax.tree.map(lambda *xs: jnp.stack(xs), evaluation.moments, first))
    (before, own), at_start = (jax.tree.map(lambda x, i=i: x[i], ends) for i in (0, 1))
    rest = start - own.target

    def energy_of(moments, looked):
        numbers, found = looked
        energy = found.value + family.expect_quadratic(rest, moments) - 0.5 * moments.log_det_precision
        size = jnp.abs(found.value) + jnp.abs(energy - found.value)
        return energy, size, moments, _Rows(family.symmetrise(rest + found.target), numbers)

    def value(point: _Rows):
        moments = family.moments(point.natural)
        return energy_of(moments, numbers_at(moments))

    best, usable = climb(_Rows(start, before), energy_of(first, at_start), value)
    change = jax.tree.map(lambda new, old: new - old, best.numbers, before)
    zero = jnp.zeros((wide.count,), start.precision_mean.dtype).reshape(-1, wide.block)
    parts = tuple(TermNumbers(zero, rows, weight, zero, zero, zero[:, 0]) for rows, weight in change)
    by = by_group(problem, evaluation.wide, blocks, parts, evaluation.moments).target
    usable = usable & jnp.all(moved)
    return results._replace(site=select(jnp.broadcast_to(usable, moved.shape), proposed + by, proposed))
