"""Planning a fit under AutoExponentialFamily: components, the exactly held prior, and what every factor is conjugate in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from numpyro.distributions import biject_to, constraints

from . import families
from ._closures import other_family
from ._compiling import Program, look, on_device
from ._exponential_guide import AutoExponentialFamily
from ._numerics import all_finite
from ._state import Plan
from .errors import GuideError, PVIError, StateError
from .expectations import (
    MAX_TERMS,
    Chains,
    FactorStructure,
    LatentRole,
    find_structure,
    over_values,
    probe_values,
    some_values,
    sums_of,
    with_draws,
)
from .factors import (
    NUM_DIRECTIONS,
    Form,
    Planned,
    SeenFactor,
    ValueCall,
    forms_of,
    is_latent,
    marked,
    plan_factors,
    predictor_terms,
    proved_only,
    unmarked,
    with_values_held,
)
from .families import (
    MultivariateNormalFamily,
    ProductFamily,
    ProductNatural,
    base_family,
    registered_families,
    repeated,
    support_of,
)
from .handlers import Partition, RowAxes
from .runtime import (
    SLOPES,
    JointBlock,
    LookedAtLess,
    ProductPlan,
    RowLatent,
    check_tilted,
    prior_members,
    product_claims,
)
from .sites import MemberSites, RowVisits, select
from .solvers import MatchState, RowMatches

# ---------------------------------------------------------------------------------------------- what files need to know
# What files need to know of states under AutoExponentialFamily: their types, and the latents of plan and guide.

_PLAN = (ProductPlan, JointBlock, RowLatent, FactorStructure, LatentRole)
_STATE = (MemberSites, RowVisits, LookedAtLess, MatchState, RowMatches, Chains)


def product_types(guide: Any) -> dict[str, type]:
    """Types of plans and states by name: the package's, and those of families that were registered or given.

    Returns the types; a family's natural parameters are those of its unit factor. Functions that make a family have given the
    guide theirs where it is set up.
    """
    public = [getattr(families, name) for name in families.__all__]
    known = [x for x in public if isinstance(x, type) and x.__name__.endswith(("Family", "Natural"))]
    given = [*registered_families().values(), *guide.families.values()]
    given += [latent.family for latent in guide._latents.values()]
    found = {}
    for family in given:
        # A registered function makes the family of a distribution, which only a guide that is set up has seen.
        if isinstance(family, families.Family):
            base = base_family(family)
            found |= {kind.__name__: kind for kind in (type(family), type(base), type(base.zeros()))}
    return found | {kind.__name__: kind for kind in (*known, *_PLAN, *_STATE)}


def guide_shapes(guide: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the latents of a guide that is set up, in their own supports."""
    names = (*guide._latents, *(name for block in guide._blocks for name in block.names))
    return {n: tuple(guide.prototype_trace[n]["fn"].shape()) for n in names}


def check_families(guide: Any, plan: ProductPlan) -> None:
    """Refuse a guide whose latents have other families than a plan's.

    ``guide``: set up, with the plan's latents. Raises StateError naming the latent.
    """
    for name, family in plan.family.components:
        latent = guide._latents.get(name)
        if latent is None:
            continue
        batch = guide.prototype_trace[name]["fn"].batch_shape
        # Rows come and go, and what they have of their own with them: as many as the plan has.
        own = repeated(latent.family, plan.latent_shapes[name][: len(batch)] if name in plan.own_latents else batch)
        if own != family:
            raise StateError(
                f"the state has family {type(base_family(family)).__name__} for latent {name!r}, but the guide "
                f"{type(base_family(own)).__name__}: it belongs to another model. Make the PVI from the model that the "
                f"state was fitted with, or give families={{{name!r}: ...}}."
            )


# ----------------------------------------------------------------------------------------------------- exponential plan


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of q, and where it starts: the prior, or the member nearest to it."""

    family: ProductFamily
    start: ProductNatural
    blocks: tuple[JointBlock, ...]
    # Components in the model's order, where a guide says so.
    order: tuple[str, ...] = ()


def components_of(guide: AutoExponentialFamily, latents: dict[str, tuple[int, ...]]) -> Components:
    """Read the components off a guide.

    ``latents``: the model's latents and their shapes. Raises GuideError for a guide of another model, or discrete latents
    without finitely many values.
    """
    own = {n: tuple(guide.prototype_trace[n]["fn"].shape()) for n in (*guide._latents, *_blocked(guide))}
    if own != latents:
        differ = sorted(set(own.items()) ^ set(latents.items()))
        raise GuideError(
            "the guide AutoExponentialFamily was made for another model or other data; they differ in "
            f"{', '.join(f'{n} {shape}' for n, shape in differ)}. Make a fresh one, AutoExponentialFamily(model), from the model "
            "given to PVI."
        )
    families: dict[str, Any] = {}
    for name, latent in guide._latents.items():
        fn: Any = guide.prototype_trace[name]["fn"]
        if fn.support.is_discrete and support_of(latent.family) is None:
            raise GuideError(
                f"latent {name!r} is discrete with family {type(latent.family).__name__}, whose values cannot be summed over: "
                f"write families={{{name!r}: CategoricalFamily(n)}} or BernoulliFamily(), or marginalise it in the model."
            )
        families[name] = repeated(latent.family, fn.batch_shape)
    given = {name: latent.start for name, latent in guide._latents.items()}

    def members(given: dict) -> dict:
        return {n: families[n].from_distribution(guide._latents[n].member(x)) for n, x in given.items()}

    start, blocks = look(members, given), []
    for block in guide._blocks:
        name = "+".join(block.names)
        blocks.append(JointBlock(name, block.names, block.shapes))
        families[name] = MultivariateNormalFamily(block.dim)
        root = guide._block_start(block, "scale_tril")
        start[name] = families[name].from_loc_covariance(guide._block_start(block, "loc"), root @ root.T)
    first = {block.latents[0]: block.name for block in blocks}
    order = tuple(first.get(n, n) for n in latents if n in families or n in first)
    return Components(ProductFamily(families), ProductNatural(start), tuple(blocks), order)


# Sd of another start, which is that of NumPyro's Gaussian guides; and draws that its members are matched to, for every coordinate
# of a latent and at least: each is taken with its mirror image, and their sds are set right.
_NARROW, _PAIRS_EACH, _LEAST_PAIRS = 0.1, 2, 32


def narrow_members(
    guide: AutoExponentialFamily, plan: Components | ProductPlan, q: ProductNatural, key: Any
) -> ProductNatural:
    """A narrow q around where the guide's ``init_loc_fn`` puts the latents, for a fit that cannot leave its prior.

    Every member has the mean statistics of draws from a normal of sd .1 around there in the latent's unconstrained space, taken
    back to its support: up to the draws, of all members it has the least KL(normal || member). ``guide``: set up; ``plan``: its
    components; ``q``: what discrete latents keep, and those for which there is no such member, or no map to their support;
    ``key``: for the draws. Returns natural parameters.
    """
    blocks = {block.name: block.latents for block in plan.blocks}
    trace, keys = guide.prototype_trace, jax.random.split(key, len(q.parts))
    values = {n: trace[n]["value"] for name in q.parts for n in blocks.get(name, (name,))}

    def drawn(value: Any, support: Any, key: Any) -> Any:
        to_support = biject_to(support)
        middle = to_support.inv(value)
        pairs = max(_LEAST_PAIRS, _PAIRS_EACH * jnp.size(middle))
        away = jax.random.normal(key, (pairs, *middle.shape), middle.dtype)
        away = _NARROW * away / jnp.sqrt(jnp.mean(away**2, axis=0))
        return to_support(middle + jnp.concatenate([away, -away]))

    def member(name: str, family: Any, values: dict, key: Any) -> Any:
        fn: Any = trace[blocks.get(name, (name,))[0]]["fn"]
        if fn.support.is_discrete:
            return q.parts[name]
        value, support = values.get(name), fn.support
        if name in blocks:
            value, support = jnp.concatenate([jnp.ravel(values[n]) for n in blocks[name]]), constraints.real_vector
        try:
            theta = drawn(value, support, key)
        except NotImplementedError:
            # Of a support that NumPyro maps nothing to.
            return q.parts[name]
        if theta.shape[1:] != family.event_shape:
            # A batch of the latents that q has.
            return q.parts[name]
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), family.sufficient_statistics(theta))
        found = jax.tree.map(lambda x, old: x.astype(old.dtype), family.mean_to_natural(mean), q.parts[name])
        return select(all_finite(found) & jnp.all(family.in_domain(found)), found, q.parts[name])

    def members(values: dict, keys: Any) -> dict:
        return {n: member(n, f, values, k) for (n, f), k in zip(plan.family.components, keys, strict=True)}

    return ProductNatural(look(members, values, keys))


def _blocked(guide: AutoExponentialFamily) -> tuple[str, ...]:
    return tuple(name for block in guide._blocks for name in block.names)


def plan_product(
    planned: Planned,
    components: Components,
    call: ValueCall,
    base: Plan,
    expectation: str,
    turns: tuple[int, ...],
    inside: tuple[RowLatent, ...],
    key: Any,
    factors: Collection[str] = (),
    away: dict | None = None,
) -> tuple[ProductPlan, ProductNatural, Any]:
    """Find the exactly held prior and the structure of the factors.

    ``expectation``: "auto", "exact" or "monte_carlo"; ``factors``: components whose prior is a factor, whatever it looks like;
    ``away``: values of the model's params at which structure is looked for: special ones, such as a start at 0, would hide it.
    Returns the plan, natural parameters of the exactly held prior (zero elsewhere), and those where the PRIOR site starts (zero
    where the prior is exact; None without a prior factor). Raises PVIError where a factor cannot be treated as asked.
    """
    part, family = planned.plan, components.family
    plan = ProductPlan(
        **{f.name: getattr(base, f.name) for f in dataclasses.fields(Plan)},
        blocks=components.blocks,
        turns=turns,
        inside=inside,
    )
    plan = dataclasses.replace(plan, family=family)
    held, certain = _exact_prior(components, call, key)
    held = {n: x for n, x in held.items() if n not in factors}
    exact = tuple(sorted(held))
    plan = dataclasses.replace(plan, exact=exact)
    prior = ProductNatural({n: held[n] if n in held else _zeros(x) for n, x in components.start.parts.items()})

    structure = partial(_structure, plan, call, components, key, expectation, (away or {}, call.params))

    def likelihood_terms(values: dict, params: dict) -> dict:
        here = dataclasses.replace(call, params=params)
        found = here.likelihood_terms(plan.latent_values(values), part.rows, plan.exact_latents, _in_parts(family))
        return {n: plan.over_base_measure(values, n, x) for n, x in found.items()}

    likelihood = planned.structure
    if likelihood is None:
        likelihood = structure(likelihood_terms, "groups' likelihood", True)
    prior_factor, base_site = None, None
    if any(n not in held and n not in plan.row_axes for n, _ in family.components) or part.outside:

        def prior_terms(values: dict, params: dict) -> dict:
            base = {f"log h of {n}": x for n, x in plan.log_base_measures(values).items()}
            here = dataclasses.replace(call, params=params)
            return base | here.prior_terms(plan.latent_values(values), part.rows, plan.exact_latents, _in_parts(family))

        prior_factor = structure(prior_terms, "prior factor", False)
        zero = {*held, *plan.row_axes}
        base_site = ProductNatural({n: _zeros(x) if n in zero else x for n, x in components.start.parts.items()})
    partition = dataclasses.replace(
        part,
        likelihood="draws",
        terms=(),
        exact=plan.exact_latents,
        local=None,
        prior_latents=tuple(n for n in part.layout.names if n not in plan.exact_latents),
        prior_terms=(),
        prior_kind="none" if prior_factor is None else "draws",
        proved=_proved(part.proved, likelihood, certain, prior_factor),
    )
    plan = dataclasses.replace(plan, partition=partition, likelihood=likelihood, prior_factor=prior_factor)
    return plan, prior, base_site


def _in_parts(family: ProductFamily) -> bool:
    """Whether structure may be looked for in parts of terms: where latents are summed over, these have their members' axes."""
    return all(support_of(own) is None for _, own in family.components)


_probed = Program(probe_values, static=("family",))


def _proved(
    before: frozenset[str], likelihood: FactorStructure, certain: bool, prior_factor: FactorStructure | None
) -> frozenset[str]:
    """What holds for all values of all latents: see :class:`PartitionPlan`."""
    prior = certain and (prior_factor is None or prior_factor.evidence != "found")
    found = {"likelihood": likelihood.evidence != "found", "prior": prior, "additivity": "additivity" in before}
    return frozenset(n for n, proved in found.items() if proved)


def _sites(plan: ProductPlan, call: ValueCall, groups: bool, values: dict, params: dict) -> dict:
    """The sites that the groups' factors have, or else the prior factor, at values of all latents."""
    return dataclasses.replace(call, params=params).sites(values, plan.partition.rows, plan.exact_latents, groups)


def _structure(
    plan: ProductPlan,
    call: ValueCall,
    components: Components,
    key: Any,
    expectation: str,
    params: tuple[dict, dict],
    terms: Callable,
    where: str,
    groups: bool,
) -> FactorStructure:
    """Of one factor, with its terms by name: in the other latents at every value of those with finitely many.

    ``groups``: whether it is that of the groups, and not of the prior.
    """
    family, sites = components.family, partial(_sites, plan, call, groups)
    continuous = ProductFamily([(n, f) for n, f in family.components if support_of(f) is None])
    start = ProductNatural({n: components.start.parts[n] for n, _ in continuous.components})
    places, at = None, params[1]
    if at:
        whole = over_values(family, lambda values: _flat(terms(values, params[0])))
        seen = look(whole, _probed(continuous, start, jax.random.fold_in(key, 202)))
        at = params[0] if bool(np.all(np.isfinite(seen))) else at

    def here(values: dict) -> dict:
        return terms(values, at)

    if len(continuous.components) == len(family.components):
        places = _places(here, [_probed(family, start, jax.random.fold_in(key, i)) for i in (200, 201)])

    def chosen(values: dict, params: dict | None = None) -> Any:
        own = at if params is None else params
        everywhere = over_values(family, lambda values: _some(terms(values, own), places))
        return _some({"": everywhere(values)})

    def predictors(names: tuple[str, ...]) -> Any:
        own = [_probed(continuous, start, jax.random.fold_in(key, 300 + i)) for i in range(NUM_DIRECTIONS + 1)]
        seen = jax.device_get(own)
        points = np.stack(
            [np.concatenate([x[n].reshape(-1) for n, _ in family.components if n in names]) for x in seen]
        )
        others = [plan.latent_values(x | y) for x, y in zip(own, some_values(family, 2), strict=False)]
        return predictor_terms(
            SeenFactor(sites, plan.vector_layout(names), plan.partition.rows, others, at or {}, points)
        )

    size = plan.terms_together if groups else 1
    found = find_structure(continuous, start, chosen, key, expectation, where, plan.row_axes, at, predictors, size)
    return sums_of(family, _probed(continuous, start, key), here, found, where)


# ------------------------------------------------------------------------------------ what is planned around, and in turns
# How groups are read, latents inside the partitioned plate, the order in which latents move, and what goes together.


def plan_beside(
    partition: Partition, family: ProductFamily, held: tuple[str, ...], args: tuple, kwargs: dict, key: Any
) -> Planned:
    """Plan how groups are read, with the discrete latents that q holds at one value.

    Returns the plan, in which those latents are no observations.
    """
    if partition.mode == "auto" and any(base_family(f).chained for _, f in family.components):
        # A chain has as many states as there are rows: looking up a chunk's states in it costs as much as all rows.
        partition = partition._copy(mode="mask")
    if not held:
        return plan_factors(partition, args, kwargs, key=key)
    assert partition.fn is not None  # PVI was given a model
    planned = plan_factors(partition._copy(fn=with_values_held(partition.fn, held)), args, kwargs, key=key)
    plan = dataclasses.replace(
        planned.plan,
        observed=tuple(n for n in planned.plan.observed if n not in held),
        outside=tuple(n for n in planned.plan.outside if n not in held),
    )
    return dataclasses.replace(planned, plan=plan)


def inside_of(trace: dict, rows: RowAxes, guide: AutoExponentialFamily) -> tuple[RowLatent, ...]:
    """The latents inside the partitioned plate.

    Raises GuideError for a joint block with one of them, or where they are in several partitioned plates.
    """
    axes = {n: axis for n, s in trace.items() if is_latent(s) and (axis := rows.of(s)) is not None}
    blocked = [n for n in axes if n not in guide._latents]
    if blocked:
        raise GuideError(
            f"joint={[list(block.names) for block in guide._blocks]}: latent {blocked[0]!r} is inside the partitioned plate, one "
            "per row, and a Gaussian with full covariance would couple the rows: leave it out of the block."
        )
    if len({axis.key for axis in axes.values()}) > 1:
        raise GuideError(
            f"latents {', '.join(map(repr, axes))} are in several partitioned plates: keep those of one plate inside it, and "
            "declare the others outside, in plates of their own."
        )
    ranks = {n: len(trace[n]["fn"].batch_shape) for n in axes}
    return tuple(RowLatent(n, ranks[n] + axis.dim, guide._latents[n].family, axis.key) for n, axis in axes.items())


def expectation_of(solver: Any) -> str:
    """How a solver has the expectations of factors taken: as of :func:`numpyro_pvi.expectations.find_structure`."""
    if solver.matches_moments:
        return "values"
    return "exact" if solver.closed_form else solver.expectation


def blocks_of(solver: Any, inside: tuple[RowLatent, ...]) -> Any:
    """The order in which latents move: under mini-batches the rows' own first, since shared ones look at them."""
    if solver.stochastic:
        return tuple(latent.name for latent in inside) or "auto"
    return solver.blocks


def check_partial(solver: Any, schedule: Any, plan: ProductPlan) -> None:
    """Refuse random groups and rows that do not fit the groups or the model.

    Raises PVIError naming the group, the latent or the argument.
    """
    if solver.matches_moments:
        check_tilted(plan, solver)
    elif plan.inside and not schedule.fuses(solver) and solver.private:
        why = "their posteriors, one a row, are part of the state and are not noised: fit without it, or"
        raise PVIError(
            f"{type(schedule).__name__} with {type(solver).__name__} under AutoExponentialFamily is for models whose rows have no "
            f"latents of their own, and {plan.inside[0].name!r} is inside the partitioned plate; {why} integrate it out in the "
            "model."
        )
    if solver.stochastic:
        table = plan.partition.table
        solver.check_groups(dict(zip(table.labels, table.sizes, strict=True)), plan.partition.reading.mechanism)


def proved_plan(plan: ProductPlan, expectation: str) -> ProductPlan:
    """A plan for private visits, without structure that was seen in values of the rows and not proved.

    Raises PVIError for observations outside the partitioned plate, which are no group's; or a component that cannot be drawn.
    """
    part = proved_only(plan.partition)
    claims = [c.removeprefix("likelihood/") for c in product_claims(plan) if c.startswith("likelihood/")]
    # What may jump and is not looked at is taken as if it did.
    jumping = [name.removeprefix(SLOPES) for name in claims if name.startswith(SLOPES)]
    names = [name.removeprefix(SLOPES) for name in claims]
    likelihood = plan.likelihood
    if names:
        likelihood = with_draws(likelihood, plan.family, names, expectation, "groups' likelihood", jumping)
    prior = plan.prior_factor
    if prior is not None and prior.by_rule:
        # Nothing holds a rule to others here.
        prior = with_draws(prior, plan.family, prior.by_rule, expectation, "prior factor")
    return dataclasses.replace(plan, partition=part, likelihood=likelihood, prior_factor=prior)


def turns_of(components: Components, order: Any) -> tuple[int, ...]:
    """For every component, in the family's order, the number of its step in a round.

    ``order``: the solver's ``blocks``. Returns the numbers; all 0 where everything moves at once. Raises PVIError for an order
    that names what is no latent.
    """
    names = [name for name, _ in components.family.components]
    if order == "parallel":
        return (0,) * len(names)
    inside = {latent: block.name for block in components.blocks for latent in block.latents}
    asked = () if order == "auto" else tuple(dict.fromkeys(inside.get(n, n) for n in order))
    unknown = [n for n in asked if n not in names]
    if unknown:
        raise PVIError(
            f"NaturalGradient(blocks={order!r}) names {', '.join(map(repr, unknown))}, which is no latent of q; they are "
            f"{', '.join(components.order)}."
        )
    sequence = [*asked, *(n for n in components.order if n not in asked)]
    return tuple(sequence.index(n) for n in names)


def _some(terms: dict, places: np.ndarray | None = None) -> Any:
    """The terms in one vector; of very many, those in some places, or a random choice."""
    whole = _flat(terms)
    if whole.shape[0] <= MAX_TERMS:
        return whole
    if places is None:
        places = np.sort(np.random.default_rng(0).permutation(whole.shape[0])[:MAX_TERMS])
    return whole[places]


def _places(terms: Callable, values: list[dict]) -> np.ndarray | None:
    """Of very many terms, half a random choice, half a choice that prefers those that the latents move most."""
    one, other = jax.device_get(look(lambda own: [_flat(terms(x)) for x in own], values))
    if len(one) <= MAX_TERMS:
        return None
    rng, moved = np.random.default_rng(0), np.abs(np.float64(one) - np.float64(other))
    moved = np.where(np.isfinite(moved), moved, 0.0) + 1e-30
    liked = rng.choice(len(moved), MAX_TERMS // 2, p=moved / moved.sum())
    return np.sort(np.concatenate([liked, rng.permutation(len(moved))[: MAX_TERMS // 2]]))


def _flat(terms: dict) -> Any:
    flat = [x.reshape(-1) for x in terms.values()]
    return jnp.concatenate(flat) if flat else jnp.zeros((0,))


def product_prior_now(plan: ProductPlan, call: ValueCall, q: ProductNatural) -> ProductNatural:
    """The exactly held prior as the model has it now; see :func:`numpyro_pvi._closures.with_prior_of_now`.

    ``q``: where the other latents are looked at, of which it does not depend. Returns natural parameters by component, zero
    where the prior is a factor. Raises StateError where a prior that was held exactly is of another family now.
    """
    held, _ = _exact_prior(Components(plan.family, q, plan.blocks), call, jax.random.key(0))
    for name in plan.exact:
        if name not in held:
            raise other_family(name)
    kept = {n: x for n, x in held.items() if n in plan.exact}
    return ProductNatural({n: kept[n] if n in kept else _zeros(x) for n, x in q.parts.items()})


def _exact_prior(components: Components, call: ValueCall, key: Any) -> tuple[dict[str, Any], bool]:
    """Components whose prior is a member of their family, whatever the other latents, with its natural parameters.

    And whether that is proved. Equal parameters at two values are believed where no kink may hide a third.
    """
    families = dict(components.family.components)

    def read(values: dict, params: dict) -> dict[str, Any]:
        return prior_members(dataclasses.replace(call, params=params), components.family, components.blocks, values)

    family, start = components.family, components.start
    values = look(lambda k: [probe_values(family, start, jax.random.fold_in(k, i)) for i in (100, 101)], key)
    # The params are any: what holds, holds for all of their values.
    closed, shapes = jax.make_jaxpr(read, return_shape=True)(values[0], call.params)
    tree, run = jax.tree.structure(shapes), jaxpr_as_fun(closed)
    own = [unmarked() for _ in jax.tree.leaves(call.params)]
    flat = forms_of(closed, [*(marked("latents") for _ in jax.tree.leaves(values[0])), *own])
    forms = {name: jax.tree.leaves(own, is_leaf=_is_form) for name, own in jax.tree.unflatten(tree, flat).items()}

    def at(*leaves: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = jax.tree.unflatten(tree, run(*leaves))
        return found, {name: families[name].in_domain(natural) for name, natural in found.items()}

    (one, valid), (other, _) = (look(at, *jax.tree.leaves((x, call.params))) for x in values)

    def same(a: Any, b: Any) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    held = {
        name: natural
        for name, natural in one.items()
        if not any(form.kink for form in forms[name]) and same(natural, other[name]) and bool(valid[name])
    }
    return held, all(form.constant for name in held for form in forms[name])


def _zeros(natural: Any) -> Any:
    """Zero natural parameters of the same shapes, made on the host."""
    return jax.tree.map(lambda x: on_device(np.zeros(jnp.shape(x)), jnp.result_type(x)), natural)


def _is_form(x: Any) -> bool:
    return isinstance(x, Form)
