"""Matched moments of products of families: what factors remember, rows that are factors of their own, and the evidence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import (
    Tilted,
    Unconstrained,
    grid_of,
    num_draws,
)
from ..factors import GroupMasks, Packing
from ..families import ProductNatural
from ..sites import MAX_HALVINGS, RowVisits, SiteStack, back_off, cavity, posterior, select, take
from ..solvers import TROUBLES, LocalResult, MatchState, RowMatches, first_match_state
from ._moments import Shares, summed_evidence
from ._product_own import TOGETHER
from ._product_plan import touched
from ._product_problem import ProductProblem
from ._product_rounds import rows_of, shared_of
from ._product_tilted import ProductTilted
from ._tilted import with_chains

# --------------------------------------------------------------------------------------------------- every row a factor
# Every row a factor of its own, where q is a product of families and moments are matched.
#
# A group's site is the product of its rows'. The rows of a group are visited in parallel, from the q that the group was
# sent, so that a visit of a group stays one message; rows stand in the slots of the chunks that groups have anyhow, and
# one compiled program visits all of them.


@dataclasses.dataclass(frozen=True)
class RowFactors(ProductProblem):
    """A problem whose "groups" are slots of rows, those of one group side by side.

    Args:
        full: the problem of the groups.
        owner: position of each slot's group.
        counted: whether a row is in the slot.
        offsets: first block of slots of each group, and the number of blocks at the end.
        block: slots of a block.
    """

    full: ProductProblem
    owner: Int[Array, "S"]
    counted: Bool[Array, "S"]
    offsets: Int[Array, "G"]
    block: int

    @property
    def num_groups(self) -> int:
        """S."""
        return self.owner.shape[0]

    def sums(self, slots: Any) -> Any:
        """Sums over every group's rows, of arrays with a leading axis of slots."""
        return _sums(slots, self.counted, self.owner, self.full.num_groups)

    def lacking(self, groups: ProductNatural, rows: ProductNatural) -> ProductNatural:
        """What the rows' sites lack of their groups', after a start or a change from outside, in equal shares by slot.

        Args:
            groups: all groups' sites.
            rows: sites by slot.
        """
        counts = jnp.maximum(self.sums(jnp.ones(self.owner.shape, jnp.result_type(float))), 1.0)
        shares = (groups - self.sums(rows)) * (1.0 / counts)
        return _kept(take(shares, self.owner), self.counted)


def _kept(slots: Any, counted: Bool[Array, "S"]) -> Any:
    """Zero where no row is."""
    return select(counted, slots, jax.tree.map(jnp.zeros_like, slots))


def _sums(slots: Any, counted: Bool[Array, "S"], owner: Int[Array, "S"], num: int) -> Any:
    return jax.tree.map(lambda x: jax.ops.segment_sum(x, owner, num), _kept(slots, counted))


def by_rows(problem: ProductProblem) -> RowFactors:
    """The problem in which every row is a factor.

    Args:
        problem: the problem of the groups.

    Returns:
        The problem; where rows cannot be taken each costs a pass over all of them.
    """
    packing, num = problem.packing, problem.num_groups
    if isinstance(packing, GroupMasks):
        everyone = jnp.concatenate(list(packing.group_of_row.values()))
        order, numbers = jnp.argsort(everyone, stable=True), jnp.arange(everyone.shape[0] + 1, dtype=jnp.int32)
        owner, places, begin = everyone[order], jnp.argsort(order).astype(jnp.int32), 0
        own = {}
        for key, index in packing.group_of_row.items():
            own[key], begin = places[begin : begin + index.shape[0]], begin + index.shape[0]
        # Rows of nobody stand in front of all groups.
        offsets = jnp.searchsorted(owner, jnp.arange(num + 1)).astype(jnp.int32)
        slots, counted = GroupMasks(own, numbers[:-1], numbers), owner >= 0
        owner, block = jnp.maximum(owner, 0), 1
    else:
        block = packing.rows.shape[1]
        # Slots of all devices; each reads the rows of its own.
        owner, counted = jnp.repeat(packing.chunk_group, block), problem.runtime.gathered(packing.mask).reshape(-1)
        numbers, offsets = jnp.arange(owner.shape[0] + 1, dtype=jnp.int32), packing.offsets
        places = None if problem.placed is None else packing.stands.reshape(-1, 1)
        slots = Packing(packing.rows.reshape(-1, 1), packing.mask.reshape(-1, 1), numbers[:-1], numbers, places)
    plan = problem.plan
    plan = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, chunk_rows=1))
    settings = problem.call, slots, problem.prior, problem.num_draws, problem.runtime
    return RowFactors(plan, *settings, problem, owner, counted, offsets, block)


class _RowTilted(ProductTilted):
    """Tilted moments of rows; slots without one ask for nothing."""

    problem: RowFactors

    def group(self, index: Int[Array, ""], *given: Any) -> Tilted:
        """One row's tilted moments: see :meth:`ProductTilted.group`."""
        found = super().group(index, *given)
        change, zero = jax.tree.map(jnp.zeros_like, found.change), jnp.zeros_like(found.value)
        quiet = {"change": change, "value": zero, "variance": zero, "noise": zero, "temper": zero + 1.0}
        sound = {"finite": jnp.array(True), "valid": jnp.array(True)}
        return select(self.problem.counted[index], found, found._replace(**quiet, **sound))


def factors_of(problem: ProductProblem, solver: Any) -> ProductProblem:
    """The problem whose "groups" are the factors of a solver: itself, or :func:`by_rows`."""
    return by_rows(problem) if solver.factors == "row" else problem


def tilted_of(problem: ProductProblem, solver: Any, key: Any) -> ProductTilted:
    """Takes the tilted moments of the factors of one round, whose ``problem`` is that of :func:`factors_of`."""
    own = factors_of(problem, solver)
    return (_RowTilted if isinstance(own, RowFactors) else ProductTilted)(own, solver, key)


def first_rows(problem: ProductProblem, solver: Any, dtype: Any) -> tuple[RowMatches, RowVisits]:
    """The memory of rows that nobody has visited.

    Args:
        problem: of the groups.
        solver: whose ``damping`` counts.
        dtype: floating dtype.

    Returns:
        What their groups remember, and what is kept beside the groups' sites.
    """
    count, num = by_rows(problem).num_groups, problem.num_groups
    empty = jax.tree.map(lambda x: jnp.zeros((count, *jnp.shape(x)), jnp.asarray(x).dtype), problem.prior)
    zero, none, full = jnp.zeros((num,), dtype), jnp.zeros((num,), jnp.int32), jnp.ones((count,), dtype)
    matches = RowMatches(zero + jnp.nan, zero, zero + 1.0, none, none)
    return matches, RowVisits(empty, full * float(solver.damping), empty, 0.0 * full)


class _Seen(NamedTuple):
    """What visits of rows were for their groups: sums, smallest and largest numbers by name; leading axis of groups."""

    added: dict[str, Any]
    least: dict[str, Array]
    most: dict[str, Array]


def rows_together(tilted: Any, q: ProductNatural, groups: ProductNatural, kept: RowVisits) -> LocalResult:
    """Visit all rows from one q.

    Args:
        tilted: as of :func:`tilted_of`.
        q: natural parameters.
        groups: all groups' sites.
        kept: what rows keep.

    Returns:
        The groups' results, and in ``local`` what rows keep afterwards.
    """
    problem: RowFactors = tilted.problem
    before, count = kept.sites + problem.lacking(groups, kept.sites), problem.num_groups
    own = dataclasses.replace(kept, sites=before)
    found = _visited(tilted.together(q), jnp.arange(count), q, own, _batch(tilted, count))
    seen = _seen(tilted, found, before, problem.counted, problem.owner, problem.full.num_groups)
    local = RowVisits(_kept(found.site, problem.counted), found.state.step, found.state.last, found.step)
    return _result(tilted, seen, groups + seen.added["change"], 0)._replace(local=local)


def rows_of_group(
    tilted: Any, group: Int[Array, ""], q: ProductNatural, site: ProductNatural, kept: RowVisits
) -> tuple[LocalResult, RowVisits]:
    """Visit one group's rows from one q, block by block, as far together as leaves q normalisable.

    Args:
        tilted: as of :func:`tilted_of`.
        group: its position.
        q: natural parameters.
        site: the group's site.
        kept: what all groups' rows keep.

    Returns:
        The group's result, and what rows keep afterwards.
    """
    problem: RowFactors = tilted.problem
    span, batch = (problem.offsets[group], problem.offsets[group + 1]), _batch(tilted, problem.block)
    everyone, tilted = jnp.zeros((problem.block,), jnp.int32), tilted.alone(group, q)

    def places(block: Int[Array, ""]) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
        at = block * problem.block + jnp.arange(problem.block)
        return at, problem.counted[at]

    def add(block: Int[Array, ""], total: tuple) -> tuple:
        at, there = places(block)
        here = _sums((take(kept.sites, at), jnp.ones(at.shape, kept.steps.dtype)), there, everyone, 1)
        return jax.tree.map(jnp.add, total, here)

    zero = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), (site, kept.steps[0]))
    held, count = jax.lax.fori_loop(*span, add, zero)
    lacking = (site - take(held, 0)) * (1.0 / jnp.maximum(count[0], 1.0))

    def before(sites: ProductNatural, at: Any, there: Any) -> ProductNatural:
        return take(sites, at) + _kept(
            jax.tree.map(lambda x: jnp.broadcast_to(x, (*at.shape, *x.shape)), lacking), there
        )

    def look(block: Int[Array, ""], carry: tuple[RowVisits, _Seen]) -> tuple[RowVisits, _Seen]:
        kept, total = carry
        at, there = places(block)
        old = before(kept.sites, at, there)
        found = _visited(tilted, at, q, dataclasses.replace(take(kept, at), sites=old), batch)
        new = found.state.step, found.state.last, found.step
        steps, last, taken = jax.tree.map(lambda x, y: x.at[at].set(y), (kept.steps, kept.last, kept.taken), new)
        return RowVisits(kept.sites, steps, last, taken), _both(total, _seen(tilted, found, old, there, everyone, 1))

    kept, seen = jax.lax.fori_loop(*span, look, (kept, _nothing(site, kept.steps.dtype)))
    # Each row's step leaves q normalisable; their sum need not.
    change = take(seen.added["change"], 0)
    step, halvings = back_off(lambda s: problem.family.in_domain(q + change * s), jnp.ones((), kept.steps.dtype))
    step = jnp.where(halvings < MAX_HALVINGS, step, 0.0)

    def settle(block: Int[Array, ""], kept: RowVisits) -> RowVisits:
        at, there = places(block)
        own = take(kept, at)
        taken = own.taken * step
        new = before(kept.sites, at, there) + _kept(own.last * taken, there)
        sites, taken = jax.tree.map(lambda x, y: x.at[at].set(y), (kept.sites, kept.taken), (new, taken))
        return RowVisits(sites, kept.steps, kept.last, taken)

    kept = jax.lax.fori_loop(*span, settle, kept)
    result = take(_result(tilted, seen, None, halvings), 0)
    return result._replace(site=site + change * step, step=result.step * step), kept


def _visited(tilted: Any, at: Int[Array, "S"], q: ProductNatural, own: RowVisits, batch: int | None) -> LocalResult:
    """Visits of the rows in some slots, whose sites and memories are given."""
    first = first_match_state(None, float(tilted.solver.damping), own.steps.dtype)

    def one(operands: tuple) -> LocalResult:
        index, row = operands
        state = first._replace(step=row.steps, last=row.last)
        return tilted.visit(index, cavity(q, row.sites), row.sites, state, None)

    return jax.lax.map(one, (at, own), batch_size=batch)


def _batch(tilted: Any, most: int) -> int | None:
    """Rows that are visited at a time."""
    problem, method = tilted.problem, tilted.problem.plan.tilted[0]
    if not problem.runtime.vectorised:
        return None
    points = 1
    if method in ("importance", "laplace"):
        points = num_draws(tilted.solver.moments)
    elif method == "quadrature":
        grid = grid_of(touched(problem.family, problem.plan.likelihood))
        points = 1 if grid is None else math.prod(grid.counts)
    return max(1, min(most, TOGETHER // points))


def _alike(tilted: Any) -> bool:
    """Whether rows are weighed by the same draws, so that they err together."""
    return tilted.methods[0] == "importance"


def _nothing(site: ProductNatural, dtype: Any) -> _Seen:
    """What no visits were for one group."""
    zero, none = jnp.zeros((1,), dtype), jnp.zeros((1,), jnp.int32)
    change = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), site)
    troubles = jnp.zeros((1, TROUBLES), jnp.int32)
    added = {"change": change, "noise": zero, "step": zero, "count": zero, "moved": none, "troubles": troubles}
    return _Seen(added, {"ess": zero + jnp.inf, "temper": zero + 1.0}, {"backoffs": none})


def _seen(
    tilted: Any,
    found: LocalResult,
    before: ProductNatural,
    counted: Bool[Array, "S"],
    owner: Int[Array, "S"],
    num: int,
) -> _Seen:
    """What visits of rows were for their groups."""
    states, whole = found.state, jnp.int32
    added = {
        "change": found.site - before,
        "noise": states.noise if _alike(tilted) else states.noise**2,
        "step": found.step,
        "count": jnp.ones_like(found.step),
        "moved": found.moved.astype(whole),
        "troubles": (states.trouble[:, None] == jnp.arange(TROUBLES)).astype(whole),
    }
    ess = jnp.where(counted & ~jnp.isnan(states.ess), states.ess, jnp.inf)
    least = {"ess": ess, "temper": jnp.where(counted, states.temper, 1.0)}
    return _Seen(
        _sums(added, counted, owner, num),
        {name: jax.ops.segment_min(x, owner, num) for name, x in least.items()},
        {"backoffs": jax.ops.segment_max(jnp.where(counted, found.backoffs, 0), owner, num)},
    )


def _both(a: _Seen, b: _Seen) -> _Seen:
    """What the visits of two lots of rows were for the same groups."""
    least, most = (
        jax.tree.map(f, x, y) for f, x, y in ((jnp.minimum, a.least, b.least), (jnp.maximum, a.most, b.most))
    )
    return _Seen(jax.tree.map(jnp.add, a.added, b.added), least, most)


def _result(tilted: Any, seen: _Seen, site: Any, halvings: Any) -> LocalResult:
    """The groups' results."""
    added, ess, troubles = seen.added, seen.least["ess"], seen.added["troubles"].at[:, 0].set(0)
    worst = jnp.argmax(troubles > 0, axis=1).astype(jnp.int32)
    matches = RowMatches(
        jnp.where(jnp.isfinite(ess), ess, jnp.nan),
        added["noise"] if _alike(tilted) else jnp.sqrt(added["noise"]),
        seen.least["temper"],
        worst,
        jnp.take_along_axis(troubles, worst[:, None], axis=1)[:, 0],
    )
    step = added["step"] / jnp.maximum(added["count"], 1.0)
    return LocalResult(site, matches, seen.most["backoffs"] + halvings, added["moved"] > 0, step)


# ----------------------------------------------------------------------------------------------------- product matching


def first_match_states(problem: ProductProblem, solver: Any, dtype: Any) -> tuple[Any, MatchState | None]:
    """The memory of factors that nobody has visited.

    Args:
        problem: of the groups; its plan says how moments are taken.
        solver: the solver.
        dtype: floating dtype.

    Returns:
        The groups', and the prior factor's; None where there is none.
    """
    plan = problem.plan

    def first(who: Any, factor: Any, method: str, count: int) -> MatchState:
        state = who.init_among(plan.matched, dtype, count)
        if method != "mcmc":
            return state
        return with_chains(who, state, Unconstrained(touched(plan.matched, factor)).dim, dtype, True)

    if solver.factors == "row":
        groups: Any = first_rows(problem, solver, dtype)[0]
    else:
        one = first(solver, plan.likelihood, plan.tilted[0], problem.num_groups)
        groups = jax.tree.map(lambda x: jnp.broadcast_to(x, (problem.num_groups, *jnp.shape(x))), one)
    prior = plan.prior_factor
    return groups, None if prior is None else first(solver.for_prior, prior, plan.tilted[1], 1)


def product_evidence(
    problem: ProductProblem, sites: SiteStack, states: tuple[Any, Any], solver: Any, key: Any
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats: see :func:`summed_evidence`.

    ``states``: what the groups remember, and the prior factor; ``solver``: whose ``factors``, ``power`` and ``moments`` count. No
    finer rule is ever needed.
    """
    q, tilted, family = posterior(problem.prior, sites), tilted_of(problem, solver, key), problem.plan.matched
    factors, own, (groups, prior) = tilted.problem, sites.groups, states
    if problem.plan.inside:
        tilted = dataclasses.replace(tilted, members=ProductNatural(rows_of(problem.plan, q.parts, None)))
        q = shared_of(problem.plan, q)
    if isinstance(factors, RowFactors):
        own = sites.local.sites + factors.lacking(own, sites.local.sites)

    def here() -> tuple[Array, Array]:
        # A group remembers nothing of its rows.
        known = groups if factors is problem else None
        keys = jnp.broadcast_to(tilted.key, (factors.num_groups, *jnp.shape(tilted.key)))
        return tilted.together(q).shares(q, own, known, keys)[:2]

    found = Shares(*factors.of_rows("evidence", here, q, key, (own, groups)), jnp.array(False))
    said = None
    if sites.prior is not None:
        said = tilted.share(None, q, shared_of(problem.plan, sites.prior), prior, tilted.key)
    exact = [f.log_partition(problem.prior.parts[n]) for n, f in family.components if n in problem.plan.exact]
    base = sum((jnp.asarray(x) for x in exact), start=jnp.zeros(()))
    return summed_evidence(family, q, base, found, said)


def marginal_elbo(
    problem: ProductProblem, sites: SiteStack, solver: Any, key: Any, q: ProductNatural
) -> Float[Array, ""]:
    """The ELBO of the shared latents under the marginal model: what a step of the params raises where moments are matched.

    Rows' own latents are integrated out, so that what is known of them under the params of before does not hold the params
    where they are.

    Args:
        problem: the factors.
        sites: all sites.
        solver: whose ``moments`` count.
        key: of draws.
        q: natural parameters of all components, held fixed.

    Returns:
        The ELBO in nats, differentiable in the params.
    """
    plan, names = problem.plan, [name for name, _ in problem.family.components]
    members = ProductNatural(rows_of(plan, q.parts, None))
    tilted = dataclasses.replace(tilted_of(problem, solver, key), members=members)
    shared = jnp.asarray([name in plan.shared for name in names])
    prior = problem.prior_average(q, key, sites)
    rest = jnp.sum(jnp.where(shared, problem.divergences(q), 0.0)) + (0.0 if prior is None else prior)
    return jnp.sum(tilted.averages(shared_of(plan, q))) + rest
