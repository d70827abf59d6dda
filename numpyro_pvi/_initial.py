"""How a fit begins: what a model is split into when nobody said so, and the values that sites start from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform

from ._compiling import is_traced, owned_jit
from ._state import Plan, PVIState
from ._state_marginals import own_at_params
from ._warnings import warn
from .errors import ImproperError, PartitionError, PVIError, StateError
from .factors import PartitionPlan, Planned, abstract_trace, far_worse, is_observed, proved_only, with_expectation
from .guides import (
    given_params,
    guide_param_names,
    latents_given,
    natural_to_params,
    param_transforms,
    params_to_natural,
)
from .handlers import Partition, PlateInfo, WholePartition, find_plates, kept_batch
from .runtime import first_conditionals
from .sites import Held, LocalSites, OwnConditionals, SiteStack, posterior

# Where q is tried as well, as shares of the way from 0 to where a guide starts at random.
_NEARER = (0.5, 0.25, 0.0)


def initial_params(found: dict, given: dict | None, has_optim: bool) -> dict:
    """Constrained values of the model's ``numpyro.param`` sites to start from.

    ``found``: values that the model itself starts from; a param of a flax module is a pytree of arrays; ``given``: the user's
    ``init_params``, or None; ``has_optim``: whether there is an optimiser for them. Returns one value per site, in the model's
    dtypes. Raises PVIError when nothing would fit them.
    """
    if found and not has_optim:
        raise PVIError(
            f"the model has numpyro.param site(s) {', '.join(sorted(found))} but optim is None, so nothing would fit them: "
            "pass an optimiser, PVI(model, guide, numpyro.optim.Adam(0.01)), or give them a prior with numpyro.sample."
        )

    return {n: _like(n, (given or {}).get(n, v), v) for n, v in found.items()}


def _like(name: str, given: Any, default: Any) -> Any:
    """The start of one ``numpyro.param`` site, of the structure and in the dtypes that the model gives it."""
    if jax.tree.structure(given) != jax.tree.structure(default):
        raise PVIError(
            f"init_params[{name!r}] is another tree than the model's numpyro.param: give it {_shapes(default)}."
        )
    for value, own in zip(jax.tree.leaves(given), jax.tree.leaves(default), strict=True):
        if np.shape(value) != np.shape(own):
            raise PVIError(
                f"init_params[{name!r}] has shape {np.shape(value)}, and the model's numpyro.param {np.shape(own)}: give it that."
            )
        if not is_traced(value) and not bool(np.all(np.isfinite(value))):
            raise PVIError(f"init_params[{name!r}], a numpyro.param, has entries that are not finite.")
    return jax.tree.map(lambda value, own: jnp.asarray(value, jnp.result_type(own)), given, default)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(np.shape, tree)


def init_optim(optim: Any, guide: Any, params: dict) -> Any:
    """The optimiser's state at unconstrained values of the model's params; None without an optimiser.

    Raises PVIError for a param outside of its constraint.
    """
    if optim is None:
        return None
    transforms, dtype = param_transforms(guide), jnp.result_type(float)
    start = {n: jax.tree.map(lambda x: jnp.asarray(x, dtype), transforms[n].inv(v)) for n, v in params.items()}
    for name, value in start.items():
        if not is_traced(value) and not all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(value)):
            raise PVIError(
                f"numpyro.param {name!r} starts outside of its constraint, or at its edge: give a value inside in init_params, or "
                "in the model."
            )
    return optim.init(start)


def away_from(guide: Any, params: dict, rng_key: Any) -> dict:
    """Values of the model's params near where they start, and no special ones: a slope or a scale of 0 hides what it multiplies.

    Returns constrained values, half an unconstrained unit or so away.
    """
    if not params:
        return {}
    transforms, dtype = param_transforms(guide), jnp.result_type(float)

    def moved(leaf: Any, transform: Any, key: Any) -> Any:
        own = jnp.asarray(transform.inv(leaf), dtype)
        return jnp.asarray(transform(own + 0.5 * jax.random.normal(key, own.shape, dtype)), jnp.result_type(leaf))

    found = {}
    for i, (name, value) in enumerate(sorted(params.items())):
        leaves, tree = jax.tree.flatten(value)
        keys = jax.random.split(jax.random.fold_in(rng_key, i), len(leaves))
        found[name] = tree.unflatten([moved(x, transforms[name], k) for x, k in zip(leaves, keys, strict=True)])
    return found


def param_values(optim: Any, guide: Any, state: PVIState) -> dict:
    """Constrained values of the model's ``numpyro.param`` sites."""
    if not state.plan.partition.params:
        return {}
    transforms = param_transforms(guide)
    return {n: transforms[n](v) for n, v in optim.get_params(state.optim_state).items()}


def given_to_guide(pvi: Any, planned: Planned, init_params: dict | None) -> set[str]:
    """Latents that start where the guide's user said, ``init_to_value``.

    ``pvi``: the PVI, its guide set up; ``init_params``: the user's, or None; params of the guide among them have precedence.
    Returns names; none where ``init_sites`` says where sites start, where rows have latents of their own, for streams, and where
    the model is of no use under its prior, so that q starts where the guide does altogether.
    """
    names = planned.plan.layout.names
    given = latents_given(pvi.guide) & set(names)
    if not given or set(init_params or {}) & guide_param_names(pvi.guide, names):
        return set()
    elsewise = planned.plan.local is not None or pvi.solver.factors == "row"
    elsewise = elsewise or streams(pvi.schedule) or pvi.init_sites != "auto"
    return set() if elsewise or planned.hostile else given


def at_given(guide: Any, state: PVIState, given: set[str]) -> PVIState:
    """A fresh state whose q stands at the values that a guide was given, with its initial scale, and elsewhere where it was.

    ``guide``: a Gaussian guide that is set up; ``state``: a fresh state without sites of rows; ``given``: latents that there
    are values for. Returns the state, its q spread over the sites in equal shares.
    """
    family, layout = state.plan.family, state.plan.partition.layout
    moments = family.moments(posterior(state.prior, state.sites))
    loc, sd = np.array(moments.loc), np.array(family.sds(moments))
    for name in given:
        loc[layout.slice_of(name)], sd[layout.slice_of(name)] = np.ravel(guide._init_locs[name]), guide._init_scale
    return at_natural(state, family.from_loc_sd(jnp.asarray(loc), jnp.asarray(sd)))


def spread_params(guide: Any, state: PVIState, init_params: dict) -> PVIState:
    """Move q to the guide params that the user gave, in equal shares of every factor's site.

    ``guide``: the guide whose names the params bear; ``init_params``: (partial) params of the guide, and of the model's
    ``numpyro.param`` sites. Returns the state with the prior plus all sites at the params given, and groups' own latents at
    theirs. Raises PVIError for unknown names.
    """
    layout, family = state.plan.partition.layout, state.plan.family
    of_guide = guide_param_names(guide, _of_guide(state.plan))
    known = of_guide | set(state.plan.partition.params)
    if unknown := set(init_params) - known:
        raise PVIError(
            f"init_params has unknown name(s) {', '.join(sorted(unknown))}; expected some of {', '.join(sorted(known))}."
        )
    if not set(init_params) & of_guide:
        return state
    local = state.plan.partition.local
    if local is not None and isinstance(state.sites.local, Held):
        raise PVIError(
            f"init_params of the guide cannot be given where local latents ({', '.join(local.names)}) are with the clients: each "
            "finds its own. Give values of numpyro.param sites only, or continue from a state with init_state=."
        )
    if local is not None:
        wanted, *own_at = own_at_params(guide, state, init_params)
        dtype = jnp.result_type(float)
        loc, sd = (local.flatten({n: jnp.asarray(x, dtype) for n, x in each.items()}) for each in own_at)
        # What sites say of latents that are integrated out goes with where those were.
        return at_natural(_unit_sites(state), wanted, first_conditionals(state.plan, state.packing, loc, sd))
    if state.sites.local is not None:
        raise PVIError(
            "init_params of the guide cannot be given where single rows have sites (PowerEP(factors='row'), or one row a group): a "
            "group's site is the sum of its rows'. Use factors='group', or continue from a state with init_state=."
        )
    q, order = posterior(state.prior, state.sites), (layout.names, layout.shapes)
    own = jax.eval_shape(lambda q: natural_to_params(guide, family, *order, q), q)
    given = given_params({n: x for n, x in init_params.items() if n in own}, own)
    return at_natural(state, params_to_natural(guide, family, *order, given, q))


def at_natural(state: PVIState, wanted: Any, rows: Any = None) -> PVIState:
    """Move q of a fresh state to natural parameters, in equal shares of every factor's site.

    ``rows``: where the groups' own latents start, given nothing of the shared ones; None where they stay.
    """
    share = (wanted - posterior(state.prior, state.sites)) * (1.0 / state.report.move.shape[0])
    # A tied site is held as the product of all groups'.
    each = share * float(len(state.plan.groups)) if state.plan.tied else share

    def moved(stack: Any) -> Any:
        return jax.tree.map(lambda site, extra: site + extra, stack, each)

    local = state.sites.local
    if isinstance(local, LocalSites):
        local = LocalSites(moved(local.shared), local.rows if rows is None else rows)
    elif isinstance(local, OwnConditionals):
        local = local if rows is None else OwnConditionals(rows)
    prior = None if state.sites.prior is None else state.sites.prior + share
    return dataclasses.replace(state, sites=SiteStack(moved(state.sites.groups), prior, local))


def at_guide_start(guide: Any, state: PVIState, share: float = 1.0) -> PVIState:
    """A fresh state's q where the guide starts under SVI: its initialisation strategy's location, its initial scale.

    ``guide``: a Gaussian guide that is set up; ``state``: a fresh state, whose sites are given up; not one that has sites of
    rows; ``share``: of the way there from 0, in unconstrained space. Returns the state. Latents inside the partitioned plate
    start where the guide starts them, too.
    """
    part = state.plan.partition
    names = (*part.layout.names, *(() if part.local is None else part.local.names))
    locs = {n: share * guide._init_locs[n] for n in names}
    return _at_start(state=state, locs=locs, scale=guide._init_scale, level="cheap")


def _from_start(state: PVIState, locs: dict[str, Any], scale: Any) -> PVIState:
    plan, dtype = state.plan, jnp.result_type(float)

    def at(layout: Any) -> tuple[Any, Any]:
        loc = layout.flatten({n: jnp.asarray(locs[n], dtype) for n in layout.names}).astype(dtype)
        return loc, jnp.full_like(loc, scale)

    rows = None if plan.partition.local is None else first_conditionals(plan, state.packing, *at(plan.partition.local))
    return at_natural(_unit_sites(state), plan.family.from_loc_sd(*at(plan.partition.layout)), rows)


# One program for some thirty small ones.
_at_start = owned_jit(_from_start, ())


def _unit_sites(state: PVIState) -> PVIState:
    sites = state.sites
    groups, prior = jax.tree.map(jnp.zeros_like, (sites.groups, sites.prior))
    local = sites.local
    if isinstance(local, LocalSites):
        local = LocalSites(jax.tree.map(jnp.zeros_like, local.shared), local.rows)
    return dataclasses.replace(state, sites=SiteStack(groups, prior, local))


def streams(schedule: Any, init_sites: str = "auto") -> bool:
    """Whether a schedule takes rows as they come, and so starts from the prior: a curvature start counts rows twice.

    Returns the schedule's own word. Raises PVIError when a curvature start was asked for all the same.
    """
    found = bool(schedule.streams)
    if found and init_sites == "curvature":
        raise PVIError(
            f"init_sites='curvature' reads all rows beforehand, which {type(schedule).__name__} would then count a second time: "
            "leave init_sites out."
        )
    return found


def refuse_nothing_shared(plan: PartitionPlan) -> None:
    """Refuse a model whose latents are all inside the partitioned plate: sites would have nothing to hold.

    Raises PartitionError always then.
    """
    if plan.local is not None and not plan.layout.names:
        raise PartitionError(
            f"every latent ({', '.join(plan.local.names)}) is inside {plan.where}, so no latent is shared by groups and there is "
            "nothing to pass between them: fit each group on its own with SVI, or give the latents' prior a shared latent."
        )


def refuse_improper(state: PVIState) -> None:
    """Name the latent that keeps the first q from being normalisable.

    ``state``: a fresh state whose q is not normalisable. Raises ImproperError always.
    """
    q = posterior(state.prior, state.sites)
    layout = state.plan.partition.layout
    diag = np.asarray(state.plan.family.precision_diagonal(q))
    worst = int(np.argmin(np.where(np.isfinite(diag), diag, -np.inf)))
    raise ImproperError(
        f"q is not normalisable at the start: latent {layout.coordinate_name(worst)} has no proper prior and the data do not "
        "determine it (no curvature at the starting point). Give it a proper prior, or start from init_params."
    )


def start_mode(guide: Any, init_sites: str, plan: Plan, init_params: dict | None, schedule: Any) -> str:
    """Where sites start: "prior", "curvature", or "auto" to let the first looks at the factors decide.

    Raises PVIError for curvature where it could not be read.
    """
    if init_params is not None and guide_param_names(guide, _of_guide(plan)) & set(init_params):
        return "prior"
    if init_sites == "curvature" and plan.partition.likelihood == "reparameterised":
        raise PVIError(
            "init_sites='curvature' reads Hessians at the prior's location, which reparameterised draws are there to avoid: "
            "leave init_sites='auto' and start q near the data with init_params, or pass "
            "NaturalGradient(expectation='monte_carlo')."
        )
    if streams(schedule, init_sites):
        return "prior"
    if init_sites != "auto":
        return init_sites
    # Draws make curvature dear; a quadratic factor needs no start; but a prior that is held nowhere cannot do
    # without one.
    cheap = plan.partition.likelihood in ("affine", "local") or not plan.partition.exact
    return "auto" if cheap else "prior"


def is_free(pvi: Any, state: PVIState, init_params: dict | None) -> bool:
    """Whether nobody has said where q starts, so that it may start where the guide does.

    Args:
        pvi: the PVI, whose guide is Gaussian.
        state: a fresh state.
        init_params: the user's, or None.
    """
    free = pvi.init_sites == "auto" and not streams(pvi.schedule) and state.plan.rows is None
    free &= not isinstance(state.sites.local, Held)
    return free and not set(init_params or {}) & guide_param_names(pvi.guide, _of_guide(state.plan))


def _of_guide(plan: Plan) -> tuple[str, ...]:
    """Latents of the guide: shared ones, and the groups' own."""
    local = plan.partition.local
    return (*plan.partition.layout.names, *(() if local is None else local.names))


def better_start(
    pvi: Any, state: PVIState, planned: Planned, proper: Any, init_params: dict | None, dynamic: list, static: tuple
) -> PVIState:
    """The state, or q where the guide starts if the state's loss is not finite or far worse than that one's.

    ``planned``: knows whether the model is of no use to start from under the prior; ``proper``: whether the state's q is
    normalisable. Returns the state to begin with. The guide's start is for ``init_sites="auto"`` where nothing else was asked
    for: streams start from the prior, and sites that are held by rows have no share of a q over latents. Raises ImproperError
    when q is not normalisable.
    """
    if planned.hostile and is_free(pvi, state, init_params):
        other, there = best_guide_start(pvi, state, dynamic, static)
        if _is_far_worse(_loss_at(pvi, state, dynamic, static), there, far_worse(state.plan.partition)):
            return other
    if not bool(proper):
        refuse_improper(state)
    return state


def best_guide_start(pvi: Any, state: PVIState, dynamic: list, static: tuple) -> tuple[PVIState, float]:
    """A fresh state's q where the guide starts, and its loss; nearer to 0 where that is a place at random, and far worse.

    A natural gradient is as long as slopes are steep: from where the loss is a thousand times that of other places the first step
    leads past all that is likely. A location that the user's strategy says is kept. ``state``: as of :func:`at_guide_start`.
    """
    starts = [at_guide_start(pvi.guide, state)]
    if _is_at_random(pvi.guide.init_loc_fn):
        starts += [at_guide_start(pvi.guide, state, share) for share in _NEARER]
    losses = [_loss_at(pvi, each, dynamic, static) for each in starts]
    best = int(np.argmin([x if math.isfinite(x) else math.inf for x in losses]))
    if not _is_far_worse(losses[0], losses[best], far_worse(state.plan.partition)):
        best = 0
    return starts[best], losses[best]


def _loss_at(pvi: Any, state: PVIState, dynamic: list, static: tuple) -> float:
    """The loss at a state that may be begun with: compiled as what is run once, without the finest of quadrature rules."""
    pvi._followed.programs.note(state)
    return float(pvi._loss_under(pvi._engine, state, dynamic, static, often=False, exact=False))


def _is_far_worse(loss: float, other: float, far_worse: float) -> bool:
    return not math.isfinite(loss) or loss > far_worse * abs(other)


def _is_at_random(strategy: Any) -> bool:
    """Whether a strategy puts latents anywhere: that of guides to which none is given."""
    return getattr(strategy, "func", strategy) is init_to_uniform


def as_the_solver_takes(solver: Any, planned: Planned, full: bool) -> Planned:
    """A plan with every factor treated as the solver insists; only structure that is proved, where values must not show.

    ``full``: whether q has full covariance. Returns the plan to follow.
    """
    planned = with_expectation(planned, solver.expectation, full)
    if solver.matches_moments:
        # Moments are of values: no slope is taken for what a factor does.
        planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, jumps=()))
    return dataclasses.replace(planned, plan=proved_only(planned.plan)) if solver.private else planned


def check_structure(solver: Any, plan: Plan) -> None:
    """Refuse factors that the solver cannot treat. Raises PVIError naming the factor and the solver to use."""
    part = plan.partition
    solver.check_groups(dict(zip(part.table.labels, part.table.sizes, strict=True)), part.mechanism)
    solver.check(part.likelihood, plan.family.full, f"likelihood in {part.where}")
    if part.has_prior_factor:
        solver.check(part.prior_kind, plan.family.full, f"prior of {', '.join(part.prior_latents)}")


# ----------------------------------------------------------------------------------------------------- the literal swap
# What a model is split into when nobody said so: the literal swap of PVI for SVI, which fits whatever SVI fits.

_DEFAULT_GROUPS = 10


def default_partitions(model: Callable, trace: Mapping[str, Any], num_groups: int | None) -> tuple[Partition, ...]:
    """Ways to split a model that names none, the one to try first first; the last one keeps it whole.

    One plate with observed sample sites is split into random blocks. Several are split together where no sample site is inside
    two of them, so that every row has one plate of its own; else, or where that fails, the one that holds most observations is,
    and the other observed sites join the prior factor. A model without any is kept whole. ``trace``: an abstract trace of it.
    Returns the ways, each with its reason (empty for the one plate that there is). Raises PartitionError for more blocks than
    any of these plates has rows.
    """
    if (plate := _needs_batches(trace)) is not None:
        why = f"the data have as many rows as plate {plate!r} draws for a mini-batch, and not as many as it has."
        return (WholePartition(model, why, batches=True),)
    plates = {name: info for name, info in find_plates(trace).items() if info.observed}
    if not plates:
        return (WholePartition(model, _why_whole(trace)),)
    _refuse_too_many(num_groups, plates)
    wanted = _DEFAULT_GROUPS if num_groups is None else num_groups
    last = WholePartition(model, "no split of its rows was possible")
    if len(plates) == 1:
        ((name, info),) = plates.items()
        return Partition(model, name, min(wanted, info.size)).because(""), last
    found: list[Partition] = []
    names = " and ".join(map(repr, plates))
    if not _nested(trace, plates):
        blocks = {name: min(wanted, info.size) for name, info in plates.items()}
        why = f"plates {names} hold observed sites, and are split together"
        found.append(Partition(model, groups=blocks).because(why))
    name = max(plates, key=lambda name: (_observations(trace, plates[name]), plates[name].size))
    rest = [n for n, s in trace.items() if is_observed(s) and n not in plates[name].observed]
    why = f"plates {names} hold observed sites; {name!r} has most observations"
    held = {site for info in plates.values() for site in info.observed}
    if len(held) == 1:
        why = f"observed site {min(held)!r} lies in plates {names}; {name!r} has most rows"
    if rest:
        why += f", and the likelihood of {', '.join(map(repr, rest))} joins the prior factor"
    found.append(Partition(model, name, min(wanted, plates[name].size)).because(why))
    return *found, last


def _needs_batches(trace: Mapping[str, Any]) -> str | None:
    """The plate whose data are no more than the mini-batch it draws; None where every plate has all of its rows."""
    if (kept := kept_batch(trace)) is not None:
        return kept[0]
    drawn = {n: site["drawn"] for n, site in trace.items() if site["type"] == "plate" and "drawn" in site}
    for site in trace.values():
        if not is_observed(site):
            continue
        shape = np.shape(site["value"])
        shape = shape[: len(shape) - site["fn"].event_dim]
        for frame in site["cond_indep_stack"]:
            few = drawn.get(frame.name, frame.size)
            if few != frame.size and len(shape) >= -frame.dim and shape[frame.dim] == few:
                return frame.name
    return None


def first_that_fits(
    partitions: tuple[Partition, ...], attempt: Callable[[Partition], Any]
) -> tuple[Any, tuple[Partition, ...]]:
    """Try partitions in order until one is not refused.

    ``partitions``: as of :func:`default_partitions`; a user's own alone; ``attempt``: raises ``PartitionError`` for one that
    does not fit. Returns what the attempt gave, and the partitions that are left: the one that was taken, whose reason says why
    those before it were not, and those behind it. Raises PartitionError of the first partition, where none fits.
    """
    refusals: list[PartitionError] = []
    for place, partition in enumerate(partitions):
        if refusals and isinstance(partition, WholePartition):
            partition = partition.because(f"its rows cannot be split: {refusals[0]}")
        try:
            return attempt(partition), (partition, *partitions[place + 1 :])
        except PartitionError as error:
            refusals.append(error)
    raise refusals[0]


def warn_of_choice(partition: Partition, num_groups: int | None) -> None:
    """Warn where a number of groups was asked for, and the model is not split into them by its only plate.

    ``num_groups``: what the user asked for; without that a note in ``info`` says the same.
    """
    if num_groups is None or not partition.why:
        return
    whole = isinstance(partition, WholePartition)
    if whole and num_groups == 1:
        return
    what = "the model is kept whole, as one group" if whole else "rows are split otherwise than by a single plate"
    warn(
        f"num_groups={num_groups}: {what}, because {partition.why} To choose yourself, pass Partition(model, plate, groups), "
        "Partition(model, groups={'A': labels_a, 'B': labels_b}) or Partition(model, groups=..., sites={'obs': -1}).",
    )


def taken(pvi: Any, state: Any, args: tuple, kwargs: dict) -> tuple[PVIState, list, tuple]:
    """Arguments as programs take them, and the state: planned anew where they are a mini-batch of another size.

    Returns ``(state, arrays, static leaves)``. Raises StateError for other arguments that do not fit the state.
    """
    if isinstance(state, PVIState) and not is_traced(state.solver_state):
        pvi.solver.check_state(state.solver_state)
    try:
        return state, *pvi._rows(state, args, kwargs)
    except StateError:
        other = _as_another_batch(pvi, state, args, kwargs)
        if other is None:
            raise
    return other, *pvi._rows(other, args, kwargs)


def _as_another_batch(pvi: Any, state: Any, args: tuple, kwargs: dict) -> PVIState | None:
    """The same q as a state of arguments of another shape, where the model takes those for a mini-batch or did so before.

    A plate that draws mini-batches says itself to how many rows its data are scaled up, so another number of them is no other
    model. The likelihood's site is taken over as it is: the next round replaces it. ``state``: a state that was made with other
    arguments. Returns the state, planned anew; None where these arguments are no mini-batch of the state's rows: under a
    ``Partition``, inside ``jit``, where the rows are with clients, with latents inside the plate, under a solver that counts
    what was released, and for all other models.
    """
    if not isinstance(state, PVIState) or pvi.partition is not None:
        return None
    if pvi.solver.private:
        # A state that is planned anew would begin to count anew.
        return None
    part, by_row = state.plan.partition, state.plan.rows is not None or state.sites.local is not None
    if by_row or state.plan.own_latents or state.plan.absent or streams(pvi.schedule):
        return None
    if is_traced((state, args, kwargs)) or pvi.runtime.elsewhere is not None:
        return None
    try:
        trace = abstract_trace(pvi.model, jax.random.key(0), *pvi._arguments(args, kwargs))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError):
        return None
    # The guide of a state that was read from a file may not be set up yet.
    if state.plan.shapes_in(trace) != state.plan.latent_shapes:
        return None
    if not part.batches and _needs_batches(trace) is None:
        return None
    made = dataclasses.replace(pvi.init(state.rng_key, *args, **kwargs), optim_state=state.optim_state)
    if made.plan.partition.params:
        # `init` has read the prior at the params that fits begin with.
        made = dataclasses.replace(made, prior=pvi._fit.read_prior(pvi, made, *pvi._rows(made, args, kwargs)))
    made = pvi._fit.at_natural(made, posterior(state.prior, state.sites))
    return dataclasses.replace(made, rng_key=state.rng_key, step=state.step)


def _why_whole(trace: Mapping[str, Any]) -> str:
    names = ", ".join(repr(name) for name, site in trace.items() if is_observed(site))
    if not names:
        return "no sample site is observed, so q is fitted to the prior; pass the data if there are any."
    return f"no plate holds the observed sample site(s) {names}."


def _refuse_too_many(num_groups: int | None, plates: Mapping[str, PlateInfo]) -> None:
    largest = max(info.size for info in plates.values())
    if num_groups is not None and num_groups > largest:
        shown = ", ".join(f"{name!r} (size {info.size})" for name, info in plates.items())
        raise PartitionError(
            f"num_groups={num_groups}, but the plate{'s' * (len(plates) > 1)} with observed sites {shown} has at most {largest} "
            f"rows, so some groups would be empty: write num_groups={largest} or less."
        )


def _nested(trace: Mapping[str, Any], plates: Mapping[str, PlateInfo]) -> bool:
    """Whether some sample site is inside two of the plates."""
    for site in trace.values():
        if site["type"] == "sample" and sum(frame.name in plates for frame in site["cond_indep_stack"]) > 1:
            return True
    return False


def _observations(trace: Mapping[str, Any], info: PlateInfo) -> int:
    return sum(int(np.prod(trace[name]["fn"].batch_shape)) for name in info.observed)
