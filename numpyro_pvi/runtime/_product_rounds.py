"""Sweeps of natural-gradient steps over the sites of a product of families, and the compiled loop that rounds run in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._state import SKIP_LIMIT, PVIState
from ..families import base_family
from ..schedules import finished
from ..sites import MAX_HALVINGS, MemberSites, SiteStack, back_off, posterior, select, take
from ._engine import RoundsDone
from ._moments import noise_floor
from ._product_plan import ProductPlan
from ._product_problem import ProductProblem, finite_or
from ._tilted import chains_wanted

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
) -> Swept:
    """Move every site once (``num_steps`` times): ``eta_m <- eta_m + step (dE_q[log f_m]/dmu - eta_m)``.

    In parallel, all factors see one q; components move in the plan's turns, each turn from the q that the last one left:
    with one factor or many that is coordinate ascent. One factor after another, each runs through all turns before the
    next one sees q. A step that would leave q outside its domain is halved until it does not (Khan and Lin, section 7).

    Args:
        problem: the factors.
        sites: where they are.
        share: of each change that is taken.
        num_steps: how often.
        noise: key of this round's draws.
        order: of the groups that follow one another; None where all move in parallel.

    Returns:
        The sites.
    """
    if order is None:
        swept = _together(problem, sites, share, num_steps, noise)
    else:
        swept = _one_after_another(problem, sites, share, num_steps, noise, order)
    return swept._replace(sites=_members_back(problem, swept.sites, sites))


def _together(problem, sites, share, num_steps, noise) -> Swept:
    count = problem.num_groups + (sites.prior is not None)

    # Not the sites as they move, which know this round's draws.
    control = sites

    def turn(i, carry):
        sites, backoffs, skipped = carry
        sites, halvings, good = move_together(problem, sites, control, i, share, noise)
        return sites, backoffs + halvings, skipped | ~good

    first = sites, jnp.zeros((count,), jnp.int32), jnp.zeros((count,), bool)
    return Swept(*jax.lax.fori_loop(0, problem.plan.num_turns * num_steps, turn, first))


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

    Args:
        problem: the factors.
        sites: where they are.
        control: sites that stand beside their factors on the draws.
        i: number of the turn, whose components move.
        share: of each change that is taken.
        noise: key of the draws.
        active: which groups move.
        taken: whether :func:`member_shares` limits what is taken of a change, not the change: noise that small steps average
            out would be cut off on one side only.

    Returns:
        The sites, halvings by validity, and which factors moved, the prior factor (if any) first.
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

    Args:
        problem: the factors, as the batch sees them.
        sites: where they are.
        active: which groups move.
        step_size: share of a message that shared components take.
        noise: key of the draws.

    Returns:
        The sites, halvings, and which factors moved, the prior factor (if any) first.
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


def drawn_of(plan: ProductPlan) -> set[str]:
    """Components that some factor draws."""
    factors = [f for f in (plan.likelihood, plan.prior_factor) if f is not None]
    return {name for factor in factors for name in factor.drawn}


def member_shares(problem: ProductProblem, q: Any, change: Any) -> dict[str, Any]:
    """How much of its change each member of a drawn component takes: at most two sds, and half the way out of its domain.

    One noisy message of thousands would otherwise hold all members back, or throw its own far out. The Fisher metric alone would
    let the rate of a gamma of small concentration grow without bound. Of what is left, all members take the same share of a step,
    so that halving it shortens every one.

    Args:
        problem: the factors.
        q: natural parameters.
        change: of q, that of a full step.

    Returns:
        By drawn component, numbers in [0, 1] by member; 0 where none is small enough.
    """
    drawn, found = drawn_of(problem.plan), {}
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

    def visit(q, site, message):
        """One factor's turns; ``site`` is what it moves, the message is asked for at q and the site."""

        def turn(i, carry):
            q, site, backoffs, good = carry
            new, fine = finite_or(message(q, site), site)
            change = jax.tree.map(lambda a, b: a - b, new, site)
            change = [problem.only(own, i % problem.plan.num_turns) for own in change]
            total = _moved(jax.tree.map(jnp.zeros_like, q), change, 1.0)
            shares = member_shares(problem, q, total)
            change = [_times(own, shares) for own in change]
            step, halvings = back_off(lambda s: problem.family.in_domain(_moved(q, change, s)), share)
            step = jnp.where(halvings < MAX_HALVINGS, step, 0.0)
            site = [own + x * step for own, x in zip(site, change, strict=True)]
            return _moved(q, change, step), site, backoffs + halvings, good & fine

        first = q, site, jnp.int32(0), jnp.array(True)
        return jax.lax.fori_loop(0, problem.plan.num_turns * num_steps, turn, first)

    prior, backoffs, good = None, [], []
    if sites.prior is not None:
        q, (prior,), halvings, fine = visit(q, [sites.prior], lambda q, site: [problem.prior_message(q, noise, *site)])
        backoffs, good = [halvings[None]], [fine[None]]

    def scanned(carry, step):
        q, *local = carry
        index, site = step

        def message(q, site):
            own, *local = site
            stack = SiteStack(jax.tree.map(lambda x: x[None], own), None, *local)
            shared, rows = problem.group_message(q, stack, index, noise)
            return [shared] if rows is None else [shared, rows]

        q, (site, *local), halvings, fine = visit(q, [site, *local], message)
        return (q, *local), (site, halvings, fine)

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
    good = {n: base_family(families[n]).in_domain(q.parts[n]) for n in drawn_of(problem.plan)}

    def back(own: Any, before: Any, lead: int = 0) -> Any:
        parts = dict(own.parts)
        for name in parts.keys() & good.keys():
            keep = good[name].reshape((1,) * lead + good[name].shape)
            parts[name] = select(keep, parts[name], before.parts[name])
        return type(own)(parts)

    prior = None if new.prior is None else back(new.prior, old.prior)
    local = None if new.local is None else back(new.local, old.local)
    return SiteStack(back(new.groups, old.groups, 1), prior, local)


# ------------------------------------------------------------------------------------------------------------- the loop
# Rounds of a product of families in one compiled loop, whatever a round is.


def run_rounds(
    state: PVIState,
    carry: Any,
    one: Callable[[PVIState, Any], tuple[PVIState, Any, Float[Array, ""]]],
    count: Int[Array, ""],
    tol: Float[Array, ""],
    length: int,
    solver: Any,
) -> RoundsDone:
    """Run up to ``count`` rounds: see :meth:`numpyro_pvi.runtime.Engine.rounds`.

    Args:
        state: where they start.
        carry: what rounds hand on to one another beside the state.
        one: a round: the state and the carry afterwards, and the loss in nats.
        count: most rounds.
        tol: largest move of a round, in posterior sds, that ends them; no lower than what the noise of sampled moments explains.
            Negative never ends them.
        length: rounds that there is room for.
        solver: where its weights keep collapsing rounds end early, so that chains can be compiled in.

    Returns:
        The rounds; no quadrature is ever missed.
    """

    def unfinished(loop: tuple) -> Array:
        i, state, *_ = loop
        floor = noise_floor(state.solver_state, state.report)
        halted = finished(state.report, tol, floor) | jnp.any(state.report.skip_run >= SKIP_LIMIT)
        halted = halted | chains_wanted(solver, state.solver_state)
        return (i < count) & ~((i > 0) & halted)

    def again(loop: tuple) -> tuple:
        i, state, carry, losses, reports = loop
        state, carry, loss = one(state, carry)
        reports = jax.tree.map(lambda all_, new: all_.at[i].set(new), reports, state.report)
        return i + 1, state, carry, losses.at[i].set(loss), reports

    losses = jnp.full((length,), jnp.nan, state.report.move.dtype)
    reports = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), state.report)
    done, state, _, losses, reports = jax.lax.while_loop(
        unfinished, again, (jnp.int32(0), state, carry, losses, reports)
    )
    return RoundsDone(state, losses, reports, done, jnp.array(False))
