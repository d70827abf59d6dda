"""What moves the sites of a product of families: sweeps by turns of components, random groups, and steps by mini-batches of rows.

``StochasticSubset`` moves a random few of the groups; ``StochasticNaturalGradient`` gives every group that moves a batch of its
rows. Both together are doubly stochastic variational inference, whose round costs what its rows cost.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..factors import GroupMasks, Packing, ValueCall
from ..families import ProductFamily, ProductNatural, base_family, is_wild, members_of, repeated
from ..schedules import BY_FACTOR, UNHEARD_MOVE, Part, RoundCarry, RoundReport
from ..sites import MAX_HALVINGS, MemberSites, SiteStack, back_off, posterior, select, take
from ..solvers import late_from, late_weight, plan_batches
from ._product_plan import ProductPlan, along
from ._product_problem import ProductProblem, finite_or

# --------------------------------------------------------------------------------------------------------------- sweeps
# Natural-gradient steps of all sites by turns of components, from one q or one group after another.

# Longest step of a drawn member, in its Fisher metric: posterior sds, for a shift.
_REACH = 2.0
# A step goes at most half way out of the domain, and inwards at most this many times as far as it is to the edge.
_INWARDS = 3.0


class Swept(NamedTuple):
    """Sites after a sweep, before they are accepted."""

    sites: SiteStack
    # Halvings by validity, and which factors gave no finite message, the prior factor (if any) first.
    backoffs: Int[Array, "F"]
    skipped: Bool[Array, "F"]


def sweep(
    problem: ProductProblem,
    sites: SiteStack,
    share: Any,
    num_steps: int,
    noise: Any,
    order: Int[Array, "M"] | None = None,
    opening: Bool[Array, ""] | None = None,
) -> Swept:
    """Move every site once (``num_steps`` times): ``eta_m <- eta_m + step (dE_q[log f_m]/dmu - eta_m)``.

    In parallel, all factors see one q; components move in the plan's turns, each turn from the q that the last one left: with
    one factor or many that is coordinate ascent. One factor after another, each runs through all turns before the next one sees
    q. A step that would leave q outside its domain is halved until it does not (Khan and Lin, section 7). ``share``: of each
    change that is taken; ``order``: of the groups that follow one another; None where all move in parallel; ``opening``: whether
    nobody moves, in parallel.
    """
    if order is None:
        swept = _together(problem, sites, share, num_steps, noise, opening)
    else:
        swept = _one_after_another(problem, sites, share, num_steps, noise, order)
    return swept._replace(sites=_members_back(problem, swept.sites, sites))


def _together(problem, sites, share, num_steps, noise, opening) -> Swept:
    count = problem.num_groups + (sites.prior is not None)

    # Not the sites as they move, which know this round's draws.
    control = sites

    def turn(i, carry):
        sites, backoffs, skipped = carry
        sites, halvings, good = move_together(problem, sites, control, i, share, noise)
        return sites, backoffs + halvings, skipped | ~good

    first = sites, jnp.zeros((count,), jnp.int32), jnp.zeros((count,), bool)
    turns = problem.plan.num_turns * num_steps
    turns = turns if opening is None else jnp.where(opening, 0, turns)
    return Swept(*jax.lax.fori_loop(0, turns, turn, first))


def move_together(
    problem: ProductProblem,
    sites: SiteStack,
    control: SiteStack,
    i: Int[Array, ""],
    share: Any,
    noise: Any,
    active: Bool[Array, "M"] | bool = True,
    taken: bool = False,
) -> tuple[SiteStack, Int[Array, ""], Bool[Array, "F"]]:
    """One turn of all sites from one q.

    ``control``: sites that stand beside their factors on the draws; ``i``: number of the turn, whose components move;
    ``share``: of each change that is taken; ``taken``: whether :func:`member_shares` limits what is taken of a change, not the
    change: noise that small steps average out would be cut off on one side only. Returns the sites, halvings by validity, and
    which factors moved, the prior factor (if any) first.
    """
    q = posterior(problem.prior, sites)
    target = problem.group_messages(q, noise, control)
    good = problem.finite(target) & active
    prior, fine = None, None
    if sites.prior is not None:
        new, fine = finite_or(problem.prior_message(q, noise, control.prior), sites.prior)
        prior = _change(problem, new, sites.prior, fine, i)
    change = SiteStack(prior=prior, **_changes(problem, target, sites, good, i))
    total = posterior(jax.tree.map(jnp.zeros_like, q), change)
    change = _shortened(change, member_shares(problem, q, total * share if taken else total))
    if fine is not None:
        good = jnp.concatenate([fine[None], good])

    def valid(step):
        return problem.family.in_domain(posterior(problem.prior, sites + change * step))

    step, halvings = back_off(valid, share)
    step = jnp.where(halvings < MAX_HALVINGS, step, 0.0)
    return sites + change * step, halvings, good


def step_in_turns(
    problem: ProductProblem, sites: SiteStack, active: Bool[Array, "K"], step_size: Any, noise: Any
) -> tuple[SiteStack, Int[Array, ""], Bool[Array, "F"]]:
    """One step by a batch of every component in its turn: rows' own latents all the way, shared ones by the step size.

    ``problem``: the factors, as the batch sees them; ``step_size``: share of a message that shared components take. Returns the
    sites, halvings, and which factors moved, the prior factor (if any) first.
    """
    plan, control = problem.plan, sites
    own = {turn for (name, _), turn in zip(plan.family.components, plan.turns, strict=True) if name in plan.row_axes}
    dtype = jax.tree.leaves(sites.groups)[0].dtype
    shares = jnp.stack([jnp.asarray(1.0 if turn in own else step_size, dtype) for turn in range(plan.num_turns)])

    def turn(i: Int[Array, ""], carry: tuple) -> tuple:
        sites, backoffs, moved = carry
        sites, halvings, good = move_together(problem, sites, control, i, shares[i], noise, active, taken=True)
        return sites, backoffs + halvings, moved & good

    everyone = jnp.ones((problem.num_groups + (sites.prior is not None),), bool)
    return jax.lax.fori_loop(0, plan.num_turns, turn, (sites, jnp.int32(0), everyone))


def restrained_of(plan: ProductPlan) -> set[str]:
    """Components that some factor takes at points, or at nodes where expectations under some members are infinite."""
    factors, families = [f for f in (plan.likelihood, plan.prior_factor) if f is not None], dict(plan.family.components)
    wild = {n for factor in factors for n in factor.by_nodes if is_wild(families[n])}
    return wild | {name for factor in factors for name in factor.by_points}


def member_shares(problem: ProductProblem, q: Any, change: Any) -> dict[str, Any]:
    """How much of its change each member of a restrained component takes: at most two sds, and half the way out of its domain.

    One noisy message of thousands would otherwise hold all members back, or throw its own far out. The Fisher metric alone
    would let the rate of a gamma of small concentration grow without bound. Of what is left, all members take the same share of
    a step, so that halving it shortens every one. ``change``: of q, that of a full step. By such component, numbers in
    [0, 1] by member; 0 where none is small enough.
    """
    drawn, found = restrained_of(problem.plan), {}
    sizes = problem.sizes(q, change)
    for name, family in problem.family.components:
        if name not in drawn:
            continue
        own, step, base = q.parts[name], change.parts[name], base_family(family)

        def halve(_: Any, shares: Any, own: Any = own, step: Any = step, base: Any = base) -> Any:
            ahead, behind = own + _spread(step, 2 * shares), own - _spread(step, shares / _INWARDS)
            return jnp.where(base.in_domain(ahead) & base.in_domain(behind), shares, 0.5 * shares)

        first = jnp.minimum(1.0, _REACH / (sizes[name] + 1e-30))
        first = jnp.where(jnp.isfinite(first), first, 0.0)
        shares = jax.lax.fori_loop(0, MAX_HALVINGS, halve, first)
        found[name] = jnp.where(base.in_domain(own + _spread(step, shares)), shares, 0.0)
    return found


def _spread(step: Any, shares: Any) -> Any:
    """A change of members, each times its own number; a stack of changes may lead."""

    def times(x: Any) -> Any:
        return x * shares.reshape(shares.shape + (1,) * (x.ndim - shares.ndim))

    return jax.tree.map(times, step)


def _times(change: Any, shares: dict[str, Any], lead: int = 0) -> Any:
    parts = {
        n: _spread(x, shares[n].reshape((1,) * lead + shares[n].shape)) if n in shares else x
        for n, x in change.parts.items()
    }
    return type(change)(parts)


def _shortened(change: SiteStack, shares: dict[str, Any]) -> SiteStack:
    prior = None if change.prior is None else _times(change.prior, shares)
    local = None if change.local is None else _times(change.local, shares)
    return SiteStack(_times(change.groups, shares, lead=1), prior, local)


def _changes(problem: ProductProblem, target: SiteStack, sites: SiteStack, good: Any, i: Any) -> dict[str, Any]:
    """What one step would change of all groups' sites, by field."""
    numbers = jnp.arange(problem.num_groups)

    def one(new: Any, old: Any, ok: Any, _: Any) -> Any:
        return _change(problem, new, old, ok, i)

    local = None
    if sites.local is not None:
        plan, step = problem.plan, {}
        for name, old in sites.local.parts.items():
            owner = problem.owners(jax.tree.leaves(old)[0].shape[plan.row_axes[name]])
            step[name] = plan.masked(name, target.local.parts[name] - old, good[owner] & (owner >= 0))
        local = problem.only(MemberSites(step), i % plan.num_turns)
    return {"groups": jax.vmap(one)(target.groups, sites.groups, good, numbers), "local": local}


def _one_after_another(problem, sites, share, num_steps, noise, order) -> Swept:
    q = posterior(problem.prior, sites)

    def visit(here, q, site, message):
        """One factor's turns, in a problem of its rows; ``site`` is what it moves, the message is asked for at q and the site."""

        def turn(i, carry):
            q, site, backoffs, good = carry
            new, fine = finite_or(message(q, site), site)
            change = jax.tree.map(lambda a, b: a - b, new, site)
            change = [here.only(own, i % here.plan.num_turns) for own in change]
            total = _moved(jax.tree.map(jnp.zeros_like, q), change, 1.0)
            shares = member_shares(here, q, total)
            change = [_times(own, shares) for own in change]
            step, halvings = back_off(lambda s: here.family.in_domain(_moved(q, change, s)), share)
            step = jnp.where(halvings < MAX_HALVINGS, step, 0.0)
            site = [own + x * step for own, x in zip(site, change, strict=True)]
            return _moved(q, change, step), site, backoffs + halvings, good & fine

        first = q, site, jnp.int32(0), jnp.array(True)
        return jax.lax.fori_loop(0, problem.plan.num_turns * num_steps, turn, first)

    prior, backoffs, good = None, [], []
    if sites.prior is not None:
        q, (prior,), halvings, fine = visit(
            problem, q, [sites.prior], lambda q, site: [problem.prior_message(q, noise, *site)]
        )
        backoffs, good = [halvings[None]], [fine[None]]

    def scanned(carry, step):
        q, *local = carry
        index, site = step
        here, seen, own, place = problem, q, local, index
        if local:
            # A visit costs as much as its group's rows; room is made for the largest.
            chosen = whole_groups(problem, index[None], jnp.ones((1,), bool))
            here, place = view_of(problem, chosen, q), jnp.int32(0)
            seen = ProductNatural(q.parts | rows_of(problem.plan, q.parts, row_ids(chosen)))
            own = [local_of(problem, chosen, local[0])]

        def message(q, site):
            shared, *own = site
            stack = SiteStack(jax.tree.map(lambda x: x[None], shared), None, *own)
            shared, rows = here.group_message(q, stack, place, noise)
            return [shared] if rows is None else [shared, rows]

        seen, (site, *own), halvings, fine = visit(here, seen, [site, *own], message)
        if local:
            local = [with_local(problem, chosen, local[0], own[0])]
            whole = MemberSites(rows_of(problem.plan, q.parts, None))
            members = with_local(problem, chosen, whole, MemberSites(rows_of(problem.plan, seen.parts, None)))
            seen = ProductNatural(seen.parts | members.parts)
        return (seen, *local), (site, halvings, fine)

    first = (q,) if sites.local is None else (q, sites.local)
    (_, *local), (groups, halvings, fine) = jax.lax.scan(scanned, first, (order, take(sites.groups, order)))
    back = jnp.argsort(order)
    groups, halvings, fine = take((groups, halvings, fine), back)
    skipped = ~jnp.concatenate([*good, fine])
    return Swept(SiteStack(groups, prior, *local), jnp.concatenate([*backoffs, halvings]), skipped)


def _moved(q: Any, change: list, step: Any) -> Any:
    """q after a step of some sites, each with some components."""
    parts = dict(q.parts)
    for own in change:
        for name, x in own.parts.items():
            parts[name] = parts[name] + x * step
    return type(q)(parts)


def _change(problem: ProductProblem, new: Any, old: Any, good: Any, i: Any) -> Any:
    """What one step would change of a site: nothing where its message is not finite."""
    step = jax.tree.map(lambda a, b: jnp.where(good, a - b, 0.0), new, old)
    return problem.only(step, i % problem.plan.num_turns)


def _members_back(problem: ProductProblem, new: SiteStack, old: SiteStack) -> SiteStack:
    """Members of drawn components whose sum of sites has left the domain by rounding, back where they were."""
    q, families = posterior(problem.prior, new), dict(problem.family.components)
    good = {n: base_family(families[n]).in_domain(q.parts[n]) for n in restrained_of(problem.plan)}

    def back(own: Any, before: Any, lead: int = 0) -> Any:
        parts = dict(own.parts)
        for name in [n for n in parts if n in good]:
            keep = good[name].reshape((1,) * lead + good[name].shape)
            parts[name] = select(keep, parts[name], before.parts[name])
        return type(own)(parts)

    prior = None if new.prior is None else back(new.prior, old.prior)
    local = None if new.local is None else back(new.local, old.local)
    return SiteStack(back(new.groups, old.groups, 1), prior, local)


# ----------------------------------------------------------------------------------------------- some rows as a problem
# Some rows of some groups as a problem of their own: what a round of a few groups sees, and a step by a mini-batch.
#
# The sites of all other groups count as a prior, and of latents inside the partitioned plate only the rows at hand are
# looked up, so that what is done with them costs as much as these rows.


class Chosen(NamedTuple):
    """K groups, and some of the rows of each in chunks."""

    # Positions of different groups, and which of them take part; the others' sites stay as they are.
    groups: Int[Array, "K"]
    there: Bool[Array, "K"]
    # Plate indices of the rows, as a packing has them; all groups' masks where rows cannot be taken.
    packing: Packing | GroupMasks
    # What a sum over a group's rows is multiplied by; None is 1.
    weights: Float[Array, "K"] | None
    # Where the rows stand on this device, and which of them are here; None where all of them are, at their plate indices.
    here: tuple[Int[Array, "C R"], Bool[Array, "C R"]] | None = None
    # Where each row stands among its group's.
    places: Int[Array, "C R"] | None = None

    @property
    def within(self) -> Chosen:
        """The same rows of one group by their places among its own, in place of plate indices."""
        if self.places is None:
            return self
        return self._replace(packing=dataclasses.replace(self.packing, rows=self.places))


@dataclasses.dataclass(frozen=True)
class _Gathered(ValueCall):
    """A model whose chunks name places in a list of rows."""

    ids: Int[Array, "P"]

    def rows(self, reading: Any, chunk: Any) -> ValueCall:
        """The model on one chunk's rows."""
        return super().rows(reading, (self.ids[chunk[0]], chunk[1]))


@dataclasses.dataclass(frozen=True)
class Beside(ProductProblem):
    """A problem whose prior holds the sites of other groups, and need not be normalisable."""

    def divergences(self, q: ProductNatural) -> Float[Array, "C"]:
        """Of every component ``A(q) - <q - prior, mu>``, nats: minus a divergence to a prior that need not be normalisable."""
        found = []
        for name, family in self.family.components:
            own = q.parts[name]
            gap = own - self.prior.parts[name]
            found.append(family.log_partition(own) - family.inner(gap, family.natural_to_mean(own)))
        return jnp.stack([jnp.asarray(x) for x in found])


@dataclasses.dataclass(frozen=True)
class SomeRows(Beside):
    """A problem of K groups, or of a batch of the rows of each.

    Its ELBO is the local free energy of these groups and the prior factor, ``sum_S E_q[log f_m] - KL(q || q without the sites of
    S)`` with an unnormalised second argument (PVI eq. 2). Under ``weights`` a message about shared latents is ``N_m / B`` times
    the batch's; a row's own latents get their own.

    Args:
        full: the problem of all groups.
        chosen: the groups and rows, by plate index.
    """

    full: ProductProblem
    chosen: Chosen

    @property
    def num_groups(self) -> int:
        """K."""
        return self.chosen.groups.shape[0]

    def _by_group(self, results: Any) -> Any:
        found, weights = super()._by_group(results), self.chosen.weights
        if weights is None:
            return found
        return jax.tree.map(lambda x: x * weights.reshape((-1,) + (1,) * (x.ndim - 1)), found)

    def _known(self, sites: SiteStack | None, chunk: Any, group: Any, place: Any, counts: Any) -> dict[str, Any]:
        found, weights = super()._known(sites, chunk, group, place, counts), self.chosen.weights
        if self.chosen.here is not None:
            # Of what is known of a chunk as much as there is of its rows here.
            packing = self.chosen.packing
            assert isinstance(packing, Packing)  # rows have places
            rows = jnp.sum(packing.mask.reshape(-1)[chunk[0]])
            # Of a chunk without rows, which counts as one of its group's, all devices know an equal share.
            each = 1.0 / self.runtime.total(jnp.ones((), counts.dtype))
            share = jnp.where(rows > 0, jnp.sum(chunk[1]) / jnp.maximum(rows, 1), each)
            found = jax.tree.map(lambda x: x * share, found)
        if weights is None:
            return found
        # A batch's share of what its group's site says, so that the whole is what the batch's total is compared with.
        inside, share = self.plan.row_axes, 1.0 / weights[group]
        return {n: x if n in inside else jax.tree.map(lambda a: a * share, x) for n, x in found.items()}

    def chunks_of(self, group: Int[Array, ""]) -> tuple[Any, tuple[Any, Any]]:
        """The same without chunks that hold no row: room is made for the largest groups."""
        packing = self.chosen.packing
        if isinstance(packing, GroupMasks):
            return super().chunks_of(group)
        filled = jnp.any(packing.mask, axis=1).astype(packing.offsets.dtype)
        counts = jax.ops.segment_sum(filled, packing.chunk_group, self.num_groups)
        return counts, (packing.offsets[group], packing.offsets[group] + counts[group])

    def _of_all(self, local: MemberSites | None) -> MemberSites | None:
        """Sites of the rows' own latents, each as the device has them that holds the row; without one as they were."""
        if local is None or self.chosen.here is None:
            return local
        here, axes = self.chosen.here[1].reshape(-1), self.plan.row_axes
        held = self.runtime.total(here)

        def known(x: Array, axis: int) -> Array:
            first = jnp.moveaxis(x, axis, 0)
            found = jnp.where(along(held, 0, x.ndim), self.runtime.total(first, here), first)
            return jnp.moveaxis(found, 0, axis)

        return MemberSites({n: jax.tree.map(lambda x, n=n: known(x, axes[n]), own) for n, own in local.parts.items()})

    def _rows_key(self, key: Any, chunk: Any) -> Any:
        if isinstance(self.packing, GroupMasks):
            return None
        ids = row_ids(self.chosen)
        assert ids is not None
        return self.full._rows_key(key, (ids[chunk[0]], chunk[1]))

    def prior_density(self, values: dict, weights: Any = None, laws: Any = None) -> Array:
        """See :meth:`ProductProblem.prior_density`."""
        # The prior factor reads the model's own arguments; it says nothing of rows' latents, whose values are of no account.
        count, axes = self.plan.partition.table.num_rows, self.plan.row_axes
        if not isinstance(self.packing, GroupMasks):
            first = jnp.zeros((count,), jnp.int32)
            values = {n: jnp.take(x, first, axis=axes[n]) if n in axes else x for n, x in values.items()}
        return self.full.prior_density(values, weights, laws)


def whole_groups(problem: ProductProblem, groups: Int[Array, "K"], there: Bool[Array, "K"]) -> Chosen:
    """All rows of some groups, in as many chunks as the K largest groups have.

    ``groups``: positions of the groups, all different.
    """
    packing, count = problem.packing, groups.shape[0]
    if isinstance(packing, GroupMasks):
        place = jnp.full((problem.num_groups,), -1, jnp.int32)
        place = place.at[groups].set(jnp.where(there, jnp.arange(count, dtype=jnp.int32), -1))
        own = {key: jnp.where(index >= 0, place[index], -1) for key, index in packing.group_of_row.items()}
        numbers = jnp.arange(count + 1, dtype=jnp.int32)
        return Chosen(groups, there, GroupMasks(own, numbers[:-1], numbers), None)
    length = packing.rows.shape[1]
    chunks = np.sort(-(-np.asarray(problem.plan.partition.table.sizes) // length))[::-1]
    most = int(chunks[:count].sum())
    counts = problem.chunk_counts()[groups]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    numbers = jnp.arange(most, dtype=jnp.int32)
    slot = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), count - 1).astype(jnp.int32)
    spare = numbers >= ends[-1]
    own = numbers - (ends[slot] - counts[slot])
    found = problem.look_up(groups[slot], jnp.where(spare, 0, own))
    take_part = (~spare & there[slot])[:, None]
    places = own[:, None] * length + jnp.arange(length, dtype=jnp.int32)
    # Spare chunks belong to the last group and hold no row.
    offsets = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1], jnp.full((1,), most, ends.dtype)])
    packed = Packing(found.rows, found.mask & take_part, slot, offsets)
    return Chosen(groups, there, packed, None, _here(problem, found.stands, found.here & take_part), places)


def _here(problem: ProductProblem, stands: Array, here: Array) -> tuple[Array, Array] | None:
    return None if problem.placed is None else (stands, here)


def batch_rows(
    problem: ProductProblem, groups: Int[Array, "K"], there: Bool[Array, "K"], positions: Int[Array, "K B"]
) -> Chosen:
    """A batch of B rows of each of some groups, weighted by ``N_m / B``.

    ``groups``: positions of the groups, all different; ``positions``: of the rows within their groups. A row that is there twice
    is so to the letter, draws included, so that what is found for its own latents is the same both times.
    """
    packing, (count, size) = problem.packing, positions.shape
    assert isinstance(packing, Packing)  # batches are refused where rows cannot be taken
    length = packing.rows.shape[1]
    found = problem.look_up(groups[:, None], positions // length, positions % length)
    # In the order of the plate: a model that reads a whole plate by its indices has to find them in order.
    order = jnp.argsort(found.rows, axis=1)
    rows, stands, here, places = (
        jnp.take_along_axis(x, order, axis=1) for x in (found.rows, found.stands, found.here, positions)
    )
    each = min(size, length)
    chunks = -(-size // each)
    slots = jnp.arange(chunks * each)
    mask = jnp.broadcast_to(slots < size, (count, chunks * each)) & there[:, None]
    rows, stands, here, places = (x[:, jnp.where(slots < size, slots, 0)] for x in (rows, stands, here, places))
    numbers = jnp.arange(count + 1, dtype=jnp.int32)
    shape = (count * chunks, each)
    packed = Packing(rows.reshape(shape), mask.reshape(shape), jnp.repeat(numbers[:-1], chunks), numbers * chunks)
    sizes = jnp.asarray(problem.plan.partition.table.sizes, jnp.result_type(float))
    own = _here(problem, stands.reshape(shape), (here & mask).reshape(shape))
    return Chosen(groups, there, packed, sizes[groups] / size, own, places.reshape(shape))


def others(problem: ProductProblem, sites: SiteStack, chosen: Chosen) -> ProductNatural:
    """The exact prior times the sites of all groups that take no part, of shared components."""
    rest = jnp.ones((problem.num_groups,), bool).at[chosen.groups].set(~chosen.there)
    parts = {}
    for name, site in sites.groups.parts.items():

        def add(prior: Array, x: Array) -> Array:
            return prior + jnp.sum(jnp.where(rest.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0), axis=0)

        parts[name] = jax.tree.map(add, problem.prior.parts[name], site)
    return ProductNatural(parts)


def own_groups(sites: SiteStack, chosen: Chosen) -> ProductNatural:
    """The groups' own sites, zero (the unit factor) of those that take no part."""

    def kept(x: Array) -> Array:
        there = chosen.there.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(there, x[chosen.groups], 0.0)

    return jax.tree.map(kept, sites.groups)


def view_of(problem: ProductProblem, chosen: Chosen, base: ProductNatural) -> SomeRows:
    """The problem of some rows.

    Returns the problem; its prior is ``base``, with the rows' part of the prior of their own latents.
    """
    plan, call, packing, ids = problem.plan, problem.call, chosen.packing, row_ids(chosen)
    if isinstance(packing, Packing) and ids is not None:
        stands, mask = (packing.rows, packing.mask) if chosen.here is None else chosen.here
        call = _Gathered(call.model, call.args, call.kwargs, stands.reshape(-1), params=call.params)
        places = jnp.arange(ids.shape[0], dtype=jnp.int32).reshape(packing.rows.shape)
        packing = Packing(places, mask, packing.chunk_group, packing.offsets)
        plan = dataclasses.replace(plan, family=family_of_rows(plan, ids.shape[0]))
    prior = ProductNatural(base.parts | rows_of(problem.plan, problem.prior.parts, ids))
    return SomeRows(plan, call, packing, prior, problem.num_draws, problem.runtime.side_by_side, problem, chosen)


def row_ids(chosen: Chosen) -> Int[Array, "P"] | None:
    """Plate indices of the places of some rows; None where all rows have their own place."""
    return chosen.packing.rows.reshape(-1) if isinstance(chosen.packing, Packing) else None


def rows_of(plan: ProductPlan, parts: dict[str, Any], ids: Any) -> dict[str, Any]:
    """Of latents inside the partitioned plate, the members of some rows; of all rows where ``ids`` is None."""
    axes = plan.row_axes
    own = {n: x for n, x in parts.items() if n in axes}
    if ids is None:
        return own
    return {n: jax.tree.map(lambda x, n=n: jnp.take(x, ids, axis=axes[n]), part) for n, part in own.items()}


def shared_of(plan: ProductPlan, natural: ProductNatural) -> ProductNatural:
    """The components outside the partitioned plate."""
    return ProductNatural({name: natural.parts[name] for name in plan.shared})


def local_of(problem: ProductProblem, chosen: Chosen, local: MemberSites | None) -> MemberSites | None:
    """The sites of the rows' own latents."""
    if local is None:
        return None
    return MemberSites(rows_of(problem.plan, local.parts, row_ids(chosen)))


def with_local(problem: ProductProblem, chosen: Chosen, local: Any, new: Any) -> Any:
    """Sites of all rows' own latents (or any natural parameters by latent) with those of some rows replaced."""
    if local is None or not isinstance(chosen.packing, Packing):
        return new
    packing, axes = chosen.packing, problem.plan.row_axes
    # A row that is not there is left out.
    ids = jnp.where(packing.mask, packing.rows, np.iinfo(np.int32).max).reshape(-1)

    def put(axis: int, old: Array, x: Array) -> Array:
        moved = jnp.moveaxis(old, axis, 0).at[ids].set(jnp.moveaxis(x, axis, 0), mode="drop")
        return jnp.moveaxis(moved, 0, axis)

    parts = {
        n: jax.tree.map(lambda a, b, n=n: put(axes[n], a, b), local.parts[n], x) if n in axes else x
        for n, x in new.parts.items()
    }
    return type(local)(parts)


def with_groups(sites: SiteStack, chosen: Chosen, new: ProductNatural) -> ProductNatural:
    """All groups' sites with those that take part replaced."""

    def put(x: Array, own: Array) -> Array:
        there = chosen.there.reshape((-1,) + (1,) * (own.ndim - 1))
        return x.at[chosen.groups].set(jnp.where(there, own, x[chosen.groups]))

    return jax.tree.map(put, sites.groups, new)


def family_of_rows(plan: ProductPlan, count: int) -> ProductFamily:
    """The family of q where latents inside the plate have a given number of rows."""
    families = dict(plan.family.components)
    for latent in plan.inside:
        members = list(members_of(families[latent.name]))
        members[latent.axis] = count
        # The last axes are those of one event, which its family has already.
        batch = members[: len(members) - len(members_of(latent.family))]
        families[latent.name] = repeated(latent.family, tuple(batch))
    return ProductFamily(families)


# ---------------------------------------------------------------------------------------------------------- some groups
# Some groups as a problem of their own, and what a round of it is for all groups.


def _merged(last: RoundReport, own: RoundReport, chosen: Chosen, heard: Bool[Array, "M"]) -> RoundReport:
    """The report of some groups among those of all; groups that took no part keep their last move."""
    extra = last.move.shape[0] - heard.shape[0]
    part = jnp.concatenate([jnp.ones((extra,), bool), heard])

    def put(old: Array, new: Array, keep: bool) -> Array:
        groups = old[extra:].at[chosen.groups].set(new[extra:])
        return jnp.where(part, jnp.concatenate([new[:extra], groups]), old if keep else jnp.zeros_like(old))

    move = put(last.move, own.move, True)
    waiting = jnp.max(jnp.where(part, 0.0, move), initial=0.0)
    unheard = jnp.minimum(waiting, UNHEARD_MOVE).astype(own.left.dtype)
    return own._replace(
        move=move,
        asked=put(last.asked, own.asked, True),
        # What all ask for as well: some that stand still would be taken for the noise of moments that have none.
        estimate=jnp.maximum(own.estimate, unheard),
        left=jnp.maximum(own.left, unheard),
        step=put(last.step, own.step, False),
        backoffs=put(last.backoffs, own.backoffs, False),
        skipped=put(last.skipped, own.skipped, False),
        skip_run=put(last.skip_run, own.skip_run, True),
        staleness=last.staleness,
        total_move=jnp.maximum(own.total_move, unheard),
    )


def _of_some(last: RoundReport, chosen: Chosen, extra: int) -> RoundReport:
    """What a report says of some groups, after that of the prior factor, if there is one."""
    places = jnp.concatenate([jnp.arange(extra, dtype=jnp.int32), extra + chosen.groups])
    return last._replace(**{name: getattr(last, name)[places] for name in BY_FACTOR})


def _own_prior(problem: ProductProblem, chosen: Chosen, prior: Any) -> Any:
    """The prior factor's site beside some rows."""
    if prior is None:
        return None
    return ProductNatural(prior.parts | rows_of(problem.plan, prior.parts, row_ids(chosen)))


def _whole_prior(prior: Any, new: Any, plan: ProductPlan) -> Any:
    """The same beside all rows, of whose own latents it says nothing."""
    if prior is None:
        return None
    return ProductNatural(new.parts | {n: x for n, x in prior.parts.items() if n in plan.row_axes})


def few_of(
    problem: ProductProblem, sites: SiteStack, groups: Int[Array, "K"], there: Bool[Array, "K"]
) -> tuple[Chosen, ProductProblem]:
    """Some groups, and the problem of their rows beside the sites of all others; arguments as of :func:`part_of`."""
    chosen = whole_groups(problem, groups, there)
    return chosen, view_of(problem, chosen, others(problem, sites, chosen))


def part_of(factors: Any, carry: RoundCarry, groups: Int[Array, "K"], there: Bool[Array, "K"], noise: Any) -> Part:
    """Some groups as a problem of their own: see :class:`numpyro_pvi.schedules.Part`.

    ``factors``: those of all groups, as schedules see them; ``groups``: positions of the groups, all different; ``there``:
    which of them take part; the others stay. Returns the part; of rows' own latents it has those of its rows.
    """
    problem, sites, last = factors.problem, carry.sites, carry.report
    chosen, few = factors.few(sites, groups, there)
    ids, prior = row_ids(chosen), _own_prior(problem, chosen, sites.prior)
    own = SiteStack(own_groups(sites, chosen), prior, local_of(problem, chosen, sites.local))
    here = factors.among(chosen, few, own)
    report = _of_some(last, chosen, int(prior is not None))
    # Visits that match moments read nothing of an evaluation but q.
    known = here.shaped(own, None) if here.matches_moments else here.evaluate(own, None, noise)
    begun = carry._replace(sites=own, evaluation=known, report=report)
    by_row = factors.noisy and sites.local is not None

    def near(whole: Array) -> Array:
        if not by_row:
            return whole
        parts = problem.family.unflat(whole).parts
        return here.family.flat(ProductNatural(parts | rows_of(problem.plan, parts, ids)))

    def far(whole: Array, some: Array) -> Array:
        if not by_row:
            return some
        return problem.family.flat(with_local(problem, chosen, problem.family.unflat(whole), here.family.unflat(some)))

    def whole(done: RoundCarry) -> RoundCarry:
        new = SiteStack(
            with_groups(sites, chosen, done.sites.groups),
            _whole_prior(sites.prior, done.sites.prior, problem.plan),
            with_local(problem, chosen, sites.local, done.sites.local),
        )
        # Only those that are there get a q and send a site.
        each = (done.report.messages - last.messages) // groups.shape[0]
        report = done.report._replace(messages=last.messages + jnp.sum(there, dtype=jnp.int32) * each)
        heard = jnp.zeros((problem.num_groups,), bool).at[groups].set(there)
        return done._replace(sites=new, evaluation=None, report=_merged(last, report, chosen, heard))

    return Part(here, begun, near, far, whole)


# ------------------------------------------------------------------------------------------------------------ some rows
# Steps of groups that move together, each by a batch of its rows.

# Rows are drawn one by one, not by shuffling a group's, where there are at least so many for each that is drawn.
_SPARSE = 8


class _Rows(NamedTuple):
    """What dealing out batches reads of a group."""

    num_rows: Any
    max_rows: int
    fresh_batches: bool = False


class Walked(NamedTuple):
    """Where the steps of a visit have led."""

    # Shared latents' sites of those who take part and of the prior factor, the average of late ones, and rows' own latents' sites.
    sites: SiteStack
    mean: SiteStack
    local: MemberSites | None
    backoffs: Int[Array, ""]
    # Which factors have made a step, the prior factor (if any) first.
    moved: Bool[Array, "F"]


def walk(
    problem: ProductProblem,
    chosen: Chosen,
    start: Walked,
    said: dict[str, Any],
    solver: Any,
    share: Any,
    key: Any,
) -> tuple[Walked, Int[Array, ""]]:
    """Steps of all groups that take part, together, each by a batch of its rows.

    ``problem``: of all groups; sites of those that take no part count as its prior; ``said``: what the prior factor's site says
    of rows' own latents; ``share``: of its step size that steps have: small steps, not small shares of large ones, as q would
    go astray in every visit, and messages there are of another q. Returns where they stand afterwards, and how many steps those
    made that made most.
    """
    rows_key, draws_key = jax.random.split(key)
    groups, there = chosen.groups, chosen.there
    rows, steps = _deal(problem, solver, groups, rows_key)
    few, most = dataclasses.replace(problem, num_draws=solver.num_particles), jnp.max(steps)
    base = shared_of(problem.plan, problem.prior)
    lengths = SiteStack(steps, None if start.sites.prior is None else most)
    first = jax.tree.map(lambda count: late_from(count, solver.average), lengths)

    def averaged(mean: Any, new: Any, count: Any, first: Any, k: Any) -> Any:
        return mean + (new - mean) * jnp.where(k < count, late_weight(k, first), 0.0)

    def step(k: Int[Array, ""], walk: Walked) -> Walked:
        here = whole_groups(few, groups, there) if rows is None else batch_rows(few, groups, there, rows[:, k])
        view, prior = view_of(few, here, base), walk.sites.prior
        if prior is not None:
            prior = ProductNatural(prior.parts | rows_of(few.plan, said, row_ids(here)))
        stack = SiteStack(walk.sites.groups, prior, local_of(few, here, walk.local))
        stack, halvings, good = step_in_turns(
            view, stack, there & (k < steps), solver.step_size * share, jax.random.fold_in(draws_key, k)
        )
        mean = SiteStack(averaged(walk.mean.groups, stack.groups, lengths.groups, first.groups, k), None)
        sites = SiteStack(stack.groups, None)
        if prior is not None:
            shared = shared_of(few.plan, stack.prior)
            own = averaged(walk.mean.prior, shared, lengths.prior, first.prior, k)
            mean, sites = dataclasses.replace(mean, prior=own), dataclasses.replace(sites, prior=shared)
        local = with_local(few, here, walk.local, stack.local)
        return Walked(sites, mean, local, walk.backoffs + halvings, walk.moved | good)

    return jax.lax.fori_loop(0, most, step, start), most


def _deal(
    problem: ProductProblem, solver: Any, groups: Int[Array, "K"], key: Any
) -> tuple[Int[Array, "K S B"] | None, Int[Array, "K"]]:
    """Rows of every step, by position within their group (None where all are taken), and how many steps a group makes."""
    sizes = problem.plan.partition.table.sizes
    most, (size, num_steps, epochs) = max(sizes), (solver.batch_size, solver.num_steps, solver.epochs)
    longest = plan_batches(_Rows(most, most), key, size, num_steps, epochs).num_steps
    total = (size or 0) * (num_steps or 0)

    def own(group: Int[Array, ""]) -> tuple:
        count, own_key = jnp.asarray(sizes)[group], jax.random.fold_in(key, group)
        if 0 < _SPARSE * total <= min(sizes):
            return some_of(own_key, count, total).reshape(num_steps, size), jnp.int32(num_steps)
        found = plan_batches(_Rows(count, most), own_key, size, num_steps, epochs)
        dealt = None if found.rows is None else jax.vmap(found.rows)(jnp.arange(longest))
        return dealt, jnp.asarray(found.num_steps, jnp.int32)

    return jax.vmap(own)(groups)


def some_of(key: Any, count: Any, size: int) -> Int[Array, "size"]:
    """Some different numbers below a count, each of which is as likely in every place; what it costs depends on their number alone.

    The first different ones of twice as many draws. They are drawn anew where there are too few, which depends on which draws
    are equal and not on their numbers, so that all orders of all numbers stay equally likely. ``count``: the numbers are 0 to
    count - 1; several times ``size``.
    """

    def draw(tried: tuple) -> tuple:
        key, _, _ = tried
        key, own = jax.random.split(key)
        drawn = jax.random.randint(own, (2 * size,), 0, count, jnp.int32)
        order = jnp.argsort(drawn, stable=True)
        again = jnp.concatenate([jnp.zeros((1,), bool), jnp.diff(drawn[order]) == 0])
        later = jnp.zeros((2 * size,), bool).at[order].set(again)
        return key, drawn[jnp.argsort(later, stable=True)[:size]], jnp.sum(~later) >= size

    first = key, jnp.zeros((size,), jnp.int32), jnp.array(False)
    return jax.lax.while_loop(lambda tried: ~tried[2], draw, first)[1]
