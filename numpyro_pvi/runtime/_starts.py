"""Where the groups' sites start: at first, when rows come to a state, and where q is a product of families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions.transforms import biject_to

from .._compiling import look
from .._numerics import all_finite, clip_to_psd
from .._state import Plan, PVIState
from ..errors import PVIError
from ..expectations import FIXED_RULES, LocalNoise, PointsProgram, rule_index
from ..factors import GroupMasks, ModelCall, Packing, PartitionPlan, claimed_rows, claims_likelihood, row_log_likelihood
from ..families import (
    ConditionalNatural,
    GaussianMoments,
    GaussianNatural,
    ProductFamily,
    ProductNatural,
    RowMoments,
    members_of,
    pair_rule,
    support_of,
)
from ..schedules import Rule
from ..sites import LocalSites, MemberSites, OwnConditionals, SiteStack, keep_groups, posterior, select, sum_slots, take
from ._local import LocalProblem
from ._product_plan import ProductPlan
from ._product_problem import ProductProblem
from ._programs import first_conditionals, whole_call
from ._refinement import escalate, first_rule, relative_error
from ._tilted import refuse_arrivals

# The first step from the prior may be cruder still: at worst a step is halved.
START_TOLERANCE = 0.3
# How often a step from the prior to a worse q is halved.
MAX_START_HALVINGS = 12
# Scale of the q, in prior sds, under which a factor's curvature at a point is read from gradients.
POINT_SCALE = 0.01


def first_sites(
    problem: LocalProblem,
    at_prior: GaussianMoments | RowMoments,
    loc: Float[Array, "D"],
    mode: str,
    base: GaussianNatural | None = None,
) -> tuple[SiteStack, Rule]:
    """Where the groups' sites start.

    ``at_prior``: the prior as moments; ``mode``: "prior" (unit sites), "curvature" (each factor's positive semi-definite
    curvature and gradient at ``loc``, the cure for wide priors), or "auto": curvature, or one natural-gradient step of all
    groups from the prior where a fixed quadrature rule resolves every factor there and the global ELBO is higher after it;
    halved where both end below the prior's own ELBO; ``base``: what stands in for the part of the prior that is not exact, None
    where there is none. Returns sites (the prior factor's is None), and the quadrature rule to begin with. A factor that is not
    finite where it is read gets the unit site.
    """
    if mode == "prior":
        return problem.empty_sites(None), first_rule(problem.dtype)
    points = isinstance(problem.program, PointsProgram)
    # One row of zeros evaluates at the location; points at a distance read the curvature there from gradients.
    zero = jnp.zeros((1, problem.family.dim), problem.dtype)
    draws = problem.draws_of(problem.program, None, None) if points else zero

    def look(xs):
        moments, clip = xs

        def by(level):
            return problem.sum_groups(problem.looking(moments, level, draws, clip))

        def judged(level):
            found = by(level)
            wanted = rule_index(jnp.max(found.spread))
            # One rule finer than the widths ask for, where errors do: what that does not resolve is no matter of nodes.
            error = jnp.where(level > wanted, 0.0, relative_error(found))
            return found, jnp.where(level < wanted, jnp.inf, error)

        # Two predictors have 2,348 nodes under the finest rule and 64 under the first, which serves all but the prior's own width.
        return by(0) if points else escalate(judged, first_rule(problem.dtype), len(FIXED_RULES))[0]

    def rest(moments):
        outside = 0.0 if base is None else problem.family.expect_quadratic(base, moments)
        return problem.rest(moments) + outside

    # Traced once for its shapes and the loop.
    @partial(jax.jit, inline=True)
    def look_at(moments):
        found = jax.lax.map(look, (moments, jnp.array([False, True])))
        return found, jnp.sum(found.value, axis=-1) + jax.vmap(rest)(moments)

    def after(sites):
        return jax.vmap(
            lambda groups: problem.family.moments(posterior(problem.prior_natural, SiteStack(groups, base)))
        )(sites)

    point = at_prior._replace(loc=loc, scale=(POINT_SCALE if points else 0.0) * at_prior.scale)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), at_prior, point)
    finite = jax.vmap(problem.finite_sites)
    if points and mode == "auto":
        # Of the two steps the curvature's alone: its Hessians are exact, and the other's look would be at a few points.
        step = _best_step(problem, both, look_at, lambda found: finite(found.target), after, from_prior=False)
        return step[0], first_rule(problem.dtype)
    if mode == "curvature" or problem.redraws or points:
        sites = finite(look_at(both)[0].target)
        return SiteStack(jax.tree.map(lambda x: x[1], sites), None), first_rule(problem.dtype)
    return _best_step(problem, both, look_at, lambda found: finite(found.target), after)


class _Steps(NamedTuple):
    """The sites that two looks ask for, and the shares of them taken so far."""

    turn: Int[Array, ""]
    # What q is looked at next, the prior and its location or a step from there.
    moments: Any
    sites: Any
    # Of the prior, less the size of the factors where quadrature does not resolve them; minus infinity where it is not finite.
    lowest: Float[Array, ""]
    resolved: Bool[Array, ""]
    share: Float[Array, ""]
    elbos: Float[Array, "2"]
    spreads: Float[Array, "2"]


def _best_step(
    problem: Any, both: Any, look_at: Callable, sites_of: Callable, after: Callable, from_prior: bool = True
) -> tuple[SiteStack, Rule]:
    """The better of two steps, from the factors under the prior and at its location; halved until q beats the prior.

    ``both``: the prior and its location, as moments; ``look_at``: two q to the factors' expectations and ELBOs; ``sites_of``:
    those expectations to the sites they ask for; ``after``: sites to the two q that come of them;
    ``from_prior``: whether the step from the factors under the prior is a candidate. Without it looks are at points, whose errors
    are not known, and the prior's is compared with where it is finite. Returns as :func:`first_sites`.
    """

    def unfinished(steps: _Steps) -> Bool[Array, ""]:
        below = ~jnp.any(steps.elbos > steps.lowest)
        return (steps.turn < 2) | (below & (steps.turn <= MAX_START_HALVINGS + 1))

    def stage(steps: _Steps) -> _Steps:
        # First at the prior and at its location, then at the two q that come of them: one program for all looks.
        found, elbos = look_at(steps.moments)
        first = steps.turn == 0
        sites = select(first, sites_of(found), steps.sites)
        share = jnp.where(first, 1.0, 0.5 * steps.share).astype(problem.dtype)
        moments = after(jax.tree.map(lambda x: share * x, sites))
        at_prior = jax.tree.map(lambda x: x[0], found)
        sure = relative_error(at_prior) <= START_TOLERANCE if from_prior else True
        resolved = jnp.where(first, all_finite(at_prior) & sure, steps.resolved)
        # What quadrature does not resolve of the prior is known to the order of its size: a step may not end far below that either.
        least = elbos[0] - jnp.where(sure, 0.0, jnp.sum(jnp.abs(at_prior.value)))
        usable = steps.moments.valid & jnp.isfinite(elbos) & jnp.stack([resolved & from_prior, jnp.array(True)])
        return _Steps(
            turn=steps.turn + 1,
            moments=moments,
            sites=sites,
            lowest=jnp.where(
                first, jnp.where(all_finite(at_prior) & jnp.isfinite(least), least, -jnp.inf), steps.lowest
            ),
            resolved=resolved,
            share=share,
            elbos=jnp.where(first, -jnp.inf, jnp.where(usable, elbos, -jnp.inf)),
            spreads=jnp.max(found.spread, axis=-1),
        )

    blank = jnp.zeros((2,), problem.dtype)
    shapes = jax.eval_shape(lambda m: sites_of(look_at(m)[0]), both)
    sites = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    lowest = jnp.full((), -jnp.inf, problem.dtype)
    first = _Steps(jnp.int32(0), both, sites, lowest, jnp.array(False), blank[0], blank, blank)
    steps = jax.lax.while_loop(unfinished, stage, first)
    # The share of the last look: the next one has been prepared already.
    share, better = 2.0 * steps.share, steps.elbos[0] > steps.elbos[1]
    # Where no share beats the prior q stays there; what it is compared with may be unknown, and no ELBO found at all.
    missed = ~jnp.any(steps.elbos > steps.lowest)
    share = jnp.where(missed, jnp.where(jnp.isfinite(steps.lowest), 0.0, 1.0), share).astype(problem.dtype)
    groups = [jax.tree.map(lambda x, i=i: share * x[i], steps.sites) for i in (0, 1)]
    # From a start that had to be halved q still moves far: one rule cheaper serves, and is tested.
    far = (share < 1).astype(jnp.int32)
    rules = [first_rule(problem.dtype, steps.spreads[i], far) for i in (0, 1)]
    return SiteStack(select(better, *groups), None), select(better, *rules)


def refuse_curvature(solver: Any, mode: str) -> None:
    """Raise where sites should start from curvature though moments are matched and local latents integrated out.

    Raises PVIError naming what to write instead.
    """
    if mode == "curvature":
        raise PVIError(
            f"init_sites='curvature' does not fit {type(solver).__name__} with local latents, whose integrals at a single point "
            "say little: leave init_sites out, so that sites start at 1."
        )


def first_local_sites(
    problem: LocalProblem, at_prior: GaussianMoments, loc: Float[Array, "D"], mode: str, rows: ConditionalNatural
) -> tuple[SiteStack, Rule]:
    """Where sites of groups with local latents start.

    ``at_prior``: the prior as moments; ``mode``: "prior" and "auto" (unit sites: in a hierarchy the curvature at one point says
    little), or "curvature": each factor's positive semi-definite curvature, local latents integrated out, at ``loc``; ``rows``:
    the local latents' prior given ``loc``. Returns sites (the prior factor's is None), and the quadrature rule to begin with. A
    factor that is not finite where it is read gets the unit site.
    """
    dtype, group = problem.dtype, problem.data.chunk_group
    if problem.matches_moments:
        refuse_curvature(problem.solver, mode)
        return SiteStack(problem.family.zeros((problem.num_groups,), dtype), None, OwnConditionals(rows)), first_rule(
            dtype
        )
    local = LocalSites(problem.family.zeros((problem.num_groups,), dtype), rows)
    start = SiteStack(problem.family.zeros((problem.num_groups,), dtype), None, local)

    def beside(sites: SiteStack) -> SiteStack:
        return (
            dataclasses.replace(sites, local=OwnConditionals(sites.local.rows)) if problem.keeps_conditionals else sites
        )

    if mode != "curvature" or problem.units is None:
        return beside(start), first_rule(dtype)
    count, width = problem.units
    point = at_prior._replace(loc=loc, scale=jnp.zeros_like(at_prior.scale))
    noise = LocalNoise(jnp.zeros((1, problem.family.dim), dtype), jnp.zeros((count, 1, width), dtype))
    found = problem.sum_groups(problem.looking(point, 0, noise), local)
    precision = found.target.precision
    precision = clip_to_psd(precision) if problem.family.full else jnp.maximum(precision, 0.0)
    site = problem.family.natural(found.target.precision_mean, precision)
    # The shared block is the site and what integrating the local latents out takes from it.
    wanted = LocalSites(found.local.shared + (site - found.target), found.local.rows)
    finite = jax.vmap(all_finite)((site, wanted.shared)) & jnp.isfinite(found.value)
    rows_finite = jax.vmap(all_finite)(wanted.rows).astype(jnp.int32)
    finite &= jax.ops.segment_min(rows_finite, group, problem.num_groups) > 0
    kept = keep_groups(finite, wanted, local, group)
    return beside(problem.tidy(SiteStack(start.groups, None, kept))), first_rule(dtype)


# ----------------------------------------------------------------------------------------------------- groups that come
# The first arrays of groups whose rows have come to a state that was fitted before.

# Points at which arriving rows are compared with the structure that was found before, and draws of local latents' priors.
_POINTS, _PRIOR_DRAWS = 2, 64


class Comparison(NamedTuple):
    """Log-likelihoods of arriving rows at points drawn from q, in nats: two ways to get them, and the size of their parts."""

    # Sum over the rows, from the untouched model and from the program of the structure found before.
    model: Float[Array, "P"]
    program: Float[Array, "P"]
    # The largest difference of a row's value when half as many rows are evaluated together.
    split: Float[Array, "P"]
    size: Float[Array, "P"]


def start_arrivals(
    engine: Any, state: PVIState, args: tuple, kwargs: dict, known: Bool[Array, "M"], mode: str
) -> tuple[dict[str, Any], Comparison]:
    """Solver and schedule states of groups that have come, and where their sites start.

    ``state``: the state, with the plan and packing of the new rows; ``sites.groups`` holds the site that each group already
    has, zero where it has none; ``mode``: "prior" (a new group's site is 1) or "curvature" (its factor's positive semi-definite
    curvature at q's location). Returns fields of the state to replace, and the comparison with the untouched model.
    """
    plan, packing = state.plan, state.packing
    others = None if state.sites.others is None else sum_slots(state.sites.others)
    params = engine.constrain(plan, args, kwargs, state.optim_state)
    problem = engine.problem(plan, packing, args, kwargs, params, (state.prior, state.exact), len(FIXED_RULES), others)
    refuse_arrivals(problem)
    moments = plan.family.moments(posterior(state.prior, state.sites))
    key = jax.random.fold_in(state.rng_key, 0xA77)
    groups, local = state.sites.groups, None
    if plan.partition.local is None:
        if mode == "curvature":
            groups = select(known, groups, first_sites(problem, moments, moments.loc, mode)[0].groups)
    else:
        loc, sd = _local_prior(engine, plan, args, kwargs, params, moments.loc, key)
        rows = first_conditionals(plan, packing, loc, sd)
        # Without coupling to the shared latents, integrating the local ones out leaves a known site as it is.
        local = OwnConditionals(rows) if problem.keeps_conditionals else LocalSites(groups, rows)
        if problem.matches_moments:
            refuse_curvature(problem.solver, mode)
        elif mode == "curvature":
            fresh = first_local_sites(problem, moments, moments.loc, mode, rows)[0]
            chunk_known = known[packing.chunk_group]
            kept = select(chunk_known, rows, fresh.local.rows)
            if problem.keeps_conditionals:
                groups, local = select(known, groups, fresh.groups), OwnConditionals(kept)
            else:
                local = LocalSites(select(known, groups, fresh.local.shared), kept)
    sites = problem.tidy(SiteStack(groups, state.sites.prior, local))
    sites = dataclasses.replace(sites, others=state.sites.others)
    fields = engine.unvisited(dataclasses.replace(problem, known=known))
    last = state.report
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    # Sites that were fitted before are as settled as they were: a first round at loose accuracy would only be refused.
    report = report._replace(total_move=jnp.where(jnp.all(known), last.total_move, report.total_move))
    rule, before = first_rule(problem.dtype), state.rule.points
    # What draws have said of points holds of the same density: a narrow q says nothing against points that were wrong around it.
    rule = rule._replace(points=rule.points._replace(sampled=before.sampled, anchor=before.anchor, finer=before.finer))
    fields |= {"sites": sites, "rule": rule, "report": report}
    call = whole_call(engine.model, plan.partition, args, kwargs, params)
    return fields, compare(problem, plan, packing, call, moments, key)


def compare(
    problem: LocalProblem,
    plan: Plan,
    packing: Packing | GroupMasks,
    call: ModelCall,
    moments: GaussianMoments,
    key: Any,
) -> Comparison:
    """Evaluate arriving rows by the structure found before, by the untouched model, and in halves.

    ``call``: the model on all of them; ``moments``: q, from which the points are drawn. Returns the comparison; where there is
    no structure, or local latents, only what applies.
    """
    part, family = plan.partition, problem.family
    points = family.draw(moments, jax.random.normal(key, (_POINTS, family.dim), problem.dtype))

    def rows_at(at: ModelCall, point) -> Float[Array, "N"]:
        terms = row_log_likelihood(at, point, part.rows)
        if len(terms) and len({key for key, _ in terms.values()}) > 1:
            return jnp.concatenate([values for _, values in terms.values()])
        return sum((values for _, values in terms.values()), start=jnp.zeros((), point.dtype))

    def total(point):
        rows = rows_at(call, point)
        rows = jnp.where(_counted(part, packing, rows.shape[0]), rows, 0.0)
        return rows, jnp.sum(rows), jnp.sum(jnp.abs(rows))

    rows, model, size = jax.vmap(total)(points)
    # A quadratic is read at the origin, so its rounding is that of the values there.
    _, _, at_origin = total(jnp.zeros((family.dim,), problem.dtype))
    program = model
    if claims_likelihood(part):
        program = jax.lax.map(partial(_claimed_sum, part, packing, call), points)
    split = jnp.zeros_like(model)
    if isinstance(packing, Packing) and part.mechanism == "args" and packing.rows.shape[1] % 2 == 0:
        halves = packing.rows.reshape(packing.rows.shape[0] * 2, -1)

        def by_halves(point):
            values = jax.lax.map(lambda chunk: rows_at(part.reading.call(call, (chunk, None)), point), halves)
            found = jnp.zeros(rows.shape[1:], point.dtype).at[halves.reshape(-1)].set(values.reshape(-1))
            return jnp.where(_counted(part, packing, found.shape[0]), found, 0.0)

        split = jnp.max(jnp.abs(jax.lax.map(by_halves, points) - rows), axis=1)
    return Comparison(model, program, split, size + at_origin)


def _claimed_sum(
    part: PartitionPlan, packing: Packing | GroupMasks, call: ModelCall, point: Float[Array, "D"]
) -> Float[Array, ""]:
    """The rows' log-likelihood at a point, as the structure found before has it: see :func:`numpyro_pvi.factors.claimed_rows`."""
    rows = (own.claimed for own in claimed_rows(call, part, point).values())
    counted = (jnp.sum(jnp.where(_counted(part, packing, x.shape[0]), x, 0.0)) for x in rows)
    return sum(counted, start=jnp.zeros((), point.dtype))


def _counted(part: Any, packing: Packing | GroupMasks, num_rows: int) -> Bool[Array, "N"]:
    """Which of the arguments' rows count, in their own order."""
    if isinstance(packing, GroupMasks) or part.mechanism != "args":
        return jnp.ones((num_rows,), bool)
    return jnp.zeros((num_rows,), bool).at[packing.rows.reshape(-1)].max(packing.mask.reshape(-1))


def _local_prior(
    engine: Any, plan: Plan, args: tuple, kwargs: dict, params: dict, loc: Float[Array, "D"], key: Any
) -> tuple[Float[Array, "U K"], Float[Array, "U K"]]:
    """Location and sd of every unit's local latents under their prior at one value of the shared ones, from draws."""
    part = plan.partition
    call = ModelCall(part.model(engine.model), part.layout, args, kwargs, params)

    def one(key):
        trace, _ = call.trace(loc, key)
        drawn = {n: biject_to(trace[n]["fn"].support).inv(trace[n]["value"]) for n in part.local.names}
        return part.local.flatten(drawn)

    draws = jax.vmap(one)(jax.random.split(key, _PRIOR_DRAWS)).astype(loc.dtype)
    spread = jnp.std(draws, axis=0)
    return jnp.mean(draws, axis=0), jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)


# ------------------------------------------------------------------------------------------------- products of families
# Where q starts: changes spread over sites, and short runs from random groupings where values are summed over.
#
# At the prior all components of a mixture are equal, and so is every message to them: a fixed point. Several runs of a
# few rounds start from weights that differ between the components, and the one with the highest ELBO goes on
# (Biernacki, Celeux and Govaert's em-EM).

# Short runs, and rounds of each after the one that its weights start.
_RUNS, _ROUNDS = 10, 4


def site_with_rows(plan: ProductPlan, sites: SiteStack, group: int) -> ProductNatural:
    """One group's site: of a latent inside the plate, its own rows' members, zero elsewhere.

    ``plan``: the plan; ``sites``: all sites; ``group``: the group's position. Returns natural parameters.
    """
    own = jnp.asarray(plan.partition.table.index_of_row == group)
    rows = () if sites.local is None else sites.local.parts.items()
    return ProductNatural(take(sites.groups, group).parts | {n: plan.masked(n, x, own) for n, x in rows})


def spread(plan: ProductPlan, sites: SiteStack, change: ProductNatural) -> SiteStack:
    """Add a change of q to the sites: in equal shares, but that of a row's own latents to its group's site.

    ``plan``: the plan; ``sites``: all sites; ``change``: natural parameters. Returns sites whose sum has moved by the change.
    """
    count, inside = len(plan.partition.table.labels), plan.row_axes
    share = 1.0 / (count + (sites.prior is not None))
    groups, prior = dict(sites.groups.parts), None if sites.prior is None else dict(sites.prior.parts)
    rows = {} if sites.local is None else dict(sites.local.parts)
    for name, own in change.parts.items():
        if name in inside:
            rows[name] = rows[name] + own
            continue
        # A tied site's stack holds the product of all groups'.
        copies = count if plan.tied else 1
        groups[name] = jax.tree.map(lambda site, x, s=share * copies: site + s * x, groups[name], own)
        if prior is not None:
            prior[name] = jax.tree.map(lambda site, x: site + share * x, prior[name], own)
    local = MemberSites(rows) if rows else None
    return SiteStack(ProductNatural(groups), None if prior is None else ProductNatural(prior), local)


def tamed_sites(plan: ProductPlan, prior: ProductNatural, sites: SiteStack) -> SiteStack:
    """Sites under which expectations at nodes are finite, as those of 1/x^2 are not under an exponential prior.

    ``plan``: the plan; ``prior``: what is held exactly; ``sites``: where they are. Returns them with what tells q of latents that
    are taken at nodes from the nearest tame one, in equal shares.
    """
    factors = [own for own in (plan.likelihood, plan.prior_factor) if own is not None]
    names = {name for own in factors for name in (*own.by_nodes, *own.by_rule) if name not in plan.row_axes}
    rules = {name: pair_rule(family) for name, family in plan.family.components if name in names}
    rules = {name: rule for name, rule in rules.items() if rule is not None and rule.nodes}

    def tamed(prior: ProductNatural, sites: SiteStack) -> SiteStack:
        parts = posterior(prior, sites).parts
        change = {name: rule.tamed(parts[name]) - parts[name] for name, rule in rules.items()}
        return spread(plan, sites, ProductNatural(change))

    return look(tamed, prior, sites) if rules else sites


def apart(family: ProductFamily, inside: tuple[str, ...], q: ProductNatural, key: Any) -> ProductNatural:
    """Move the latents inside the plate half way from their mean statistics to those of a draw, each of its own.

    Where a loading and a score are both zero on average, neither learns from the other; members that differ do. ``family``: of
    q; ``inside``: the latents; ``q``: natural parameters; ``key``: a random key. Returns natural parameters.
    """
    parts, families = dict(q.parts), dict(family.components)
    for i, name in enumerate(inside):
        own, natural = families[name], parts[name]
        draw = own.sufficient_statistics(own.sample(natural, jax.random.fold_in(key, i)))
        middle = jax.tree.map(lambda a, b: 0.5 * (a + b), own.natural_to_mean(natural), draw)
        parts[name] = own.mean_to_natural(middle)
    return ProductNatural(parts)


def first_weights(plan: ProductPlan, key: Any) -> dict[str, Float[Array, "..."]]:
    """Weights of the values of every component that is summed over, one set for each short run.

    Every other run takes one row for each value and leaves the other rows out; the rest take random probabilities. ``plan``:
    the plan; ``key``: a random key. Returns by component, Float[runs members K].
    """
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    found, families = {}, dict(plan.family.components)
    for name in plan.summed:
        support = support_of(families[name])
        assert support is not None
        shape, axis = members_of(families[name]), plan.row_axes.get(name)
        weights = rng.dirichlet(np.ones(support.size), (_RUNS, *shape))
        if axis is not None and shape[axis] >= support.size:
            for run in range(0, _RUNS, 2):
                rows = rng.choice(shape[axis], support.size, replace=False)
                chosen = np.zeros((shape[axis], support.size))
                chosen[rows, np.arange(support.size)] = 1.0
                across = [1] * len(shape)
                across[axis] = shape[axis]
                weights[run] = chosen.reshape(*across, support.size)
        found[name] = jnp.asarray(weights, jnp.result_type(float))
    return found


def best_of_short_runs(
    problem: ProductProblem, q: ProductNatural, weights: dict[str, Float[Array, "..."]], key: Any
) -> ProductNatural:
    """Run a few rounds of coordinate ascent from every set of weights, and keep the q with the highest ELBO.

    ``problem``: the factors; ``q``: where all runs start but for the weights; ``weights``: as :func:`first_weights` gives them;
    ``key``: of draws. Returns natural parameters of the best.
    """
    turns, families = problem.plan.num_turns, dict(problem.family.components)

    def turn(i: Int[Array, ""], carry: tuple, own: dict) -> tuple:
        q, _ = carry
        probs = {}
        for name, x in own.items():
            support = support_of(families[name])
            assert support is not None
            probs[name] = jnp.where(i < turns, x, support.probs(q.parts[name]))
        values, messages = problem.values_and_messages(q, key, probs)
        target = posterior(problem.prior, messages)
        elbo = jnp.sum(values) + jnp.sum(problem.divergences(q))
        prior = problem.prior_value_and_message(q, key)
        if prior is not None:
            elbo, target = elbo + prior[0], target + prior[1]
        new = q + problem.only(target - q, i % turns)
        good = all_finite(new) & problem.family.in_domain(new)
        return select(good, new, q), elbo

    def run(own: dict) -> tuple:
        return jax.lax.fori_loop(0, turns * (1 + _ROUNDS), lambda i, c: turn(i, c, own), (q, jnp.zeros(())))

    found, elbos = jax.lax.map(run, weights)
    best = jnp.argmax(jnp.where(jnp.isfinite(elbos), elbos, -jnp.inf))
    return jax.tree.map(lambda x: x[best], found)


# ------------------------------------------------------------------------------------ curvature of products of families
# Where sites start that are taken by quadrature: at the curvature of their factors, near the prior's location.
#
# Under a wide prior the expected curvature of a log-linear factor is that of its far tail, and q would shrink towards
# the data by one unit of the predictor a round. Looked at with a moderate sd it says where the data are.

# Largest variance at which a latent is looked at, and how often the step to its sites may be halved.
WIDEST, _HALVINGS = 1.0, 8


def curvature_start(problem: ProductProblem, sites: SiteStack, key: Any) -> SiteStack:
    """Sites at the curvature of factors that are taken by quadrature; shares of that step, halved while that raises the ELBO.

    ``problem``: the factors; ``sites``: where they are; ``key``: for draws, of which there are none. Returns the sites, those
    of other latents as they were; all as they were where no step raises the ELBO, and the whole step where it is finite nowhere.
    A group whose curvature is no number, far from its rows (a normal truncated there), makes no step.
    """
    found = problem.curvatures(posterior(problem.prior, sites), WIDEST, key)
    names = (*problem.plan.likelihood.by_nodes, *problem.plan.likelihood.by_predictors)

    def kept(own: Any) -> Any:
        """Nothing of the other latents."""
        return type(own)({n: x if n in names else jax.tree.map(jnp.zeros_like, x) for n, x in own.parts.items()})

    groups, local = kept(found.groups), None if found.local is None else kept(found.local)
    known = jax.vmap(lambda own, _: all_finite(own))(groups, jnp.arange(problem.num_groups))
    # Rows' own members are in no order of groups: all of them, or none.
    whole = jnp.array(True) if local is None else all_finite(local) & jnp.all(known)
    groups = select(known & whole, groups, jax.tree.map(jnp.zeros_like, groups))
    local = None if local is None else select(whole, local, jax.tree.map(jnp.zeros_like, local))
    change = SiteStack(groups, None, local)
    dtype = jax.tree.leaves(sites)[0].dtype
    # None of the step, which every share is held against, comes first.
    shares = jnp.concatenate([jnp.zeros(1), 0.5 ** jnp.arange(_HALVINGS + 1)]).astype(dtype)

    def at(share: Any) -> SiteStack:
        step = change * share
        return SiteStack(
            sites.groups + step.groups, sites.prior, None if sites.local is None else sites.local + step.local
        )

    def rises(search: tuple) -> Any:
        i, *_, fell = search
        return (i < shares.shape[0]) & ~fell

    def shorter(search: tuple) -> tuple:
        i, share, best, last, _ = search
        elbo = problem.elbo(at(shares[i]), key)
        elbo = jnp.where(jnp.isfinite(elbo), elbo, -jnp.inf)
        # The first of the shares has none before it.
        fell, last = elbo < last, jnp.where(i == 0, -jnp.inf, elbo)
        return i + 1, jnp.where(elbo > best, shares[i], share), jnp.maximum(elbo, best), last, fell

    nothing = jnp.asarray(-jnp.inf, dtype)
    first = jnp.int32(0), shares[1], nothing, nothing, jnp.array(False)
    return at(jax.lax.while_loop(rises, shorter, first)[1])
