"""In which latents' statistics a factor is affine: proved on its trace where that can be, else found by values.

For every component of the product family, four values x_1 .. x_4 of a member and a pair of points with the same average
statistics are put into each term: where the term is affine in T given the other latents, both averages agree. Whether terms
see more than one member of a component is found by exchanging random subsets of its members, and how many signs meet in a
product by comparing designs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from .._compiling import Program, look
from ..errors import PVIError
from ..factors import Form, Statistics, TermSpec, forms_of, is_affine, marked, unmarked
from ..families import (
    BetaFamily,
    DirichletFamily,
    ExponentialLawFamily,
    GammaFamily,
    InverseGammaFamily,
    LogNormalFamily,
    MarkovGaussianFamily,
    MultivariateNormalFamily,
    NormalFamily,
    ProductFamily,
    ProductNatural,
    ScalarNormalFamily,
    VonMisesFamily,
    base_family,
    is_wild,
    levels_of,
    members_of,
    pair_rule,
    support_of,
)
from ._mean_space import (
    FEW_SIGNS,
    MANY_SIGNS,
    MOST_OF_FIVE,
    FactorStructure,
    LatentRole,
    MeanSpace,
    all_signs,
    all_values,
    count_signs,
    rule_axes,
    strength_five,
    strength_three,
)

# -------------------------------------------------------------------------------------------------- statistics as forms
# Every family's sufficient statistics as the interpreter of traces knows them.

_LOG = frozenset(("log",))
_QUADRATIC = Statistics(2)
# A product of two members counts as affine in those of either, given the other's. Of a chain this is so for terms that see one
# state; (log x)^2, of a log-normal, is not followed.
_STATISTICS: dict[type, Statistics] = {
    ScalarNormalFamily: _QUADRATIC,
    NormalFamily: _QUADRATIC,
    MultivariateNormalFamily: _QUADRATIC,
    MarkovGaussianFamily: _QUADRATIC,
    GammaFamily: Statistics(1, (), _LOG),
    InverseGammaFamily: Statistics(0, (-1.0,), _LOG),
    ExponentialLawFamily: Statistics(1),
    LogNormalFamily: Statistics(0, (), _LOG),
    BetaFamily: Statistics(0, (), frozenset(("log", "log1m"))),
    DirichletFamily: Statistics(0, (), _LOG),
    VonMisesFamily: Statistics(0, (), frozenset(("cos", "sin"))),
}


def statistics_of(family: Any) -> Statistics:
    """Functions of a value that a factor may be affine in to be conjugate; none of a family that is not known.

    ``family``: a family; repetitions are looked through.
    """
    return _STATISTICS.get(type(base_family(family)), Statistics())


def marked_component(name: str, family: Any) -> Form:
    """The form of a component's values, with what their support says of their sign and their ends."""
    low, high = base_family(family).ends
    return marked(name, "" if low < 0 else "+" if high > 1 else "unit", (low, high))


# ------------------------------------------------------------------------------------------------------------- affinity

# Values whose average statistics a pair is fitted to, and the backgrounds that the other latents are held at.
_FITTED, _BACKGROUNDS = 4, 3
_SUBSETS = 12
_MEMBERS = 8
# Largest difference of two averages, relative to the values averaged, by dtype: rounding of the log densities.
_TOLERANCE = {"float32": 3e-4, "float64": 1e-8}
# One of many members in a sum hardly bends it: where multiples may be taken, members are also looked at that dominate it.
_FAR = (1.0, 16.0, 256.0)
# Signs beyond which a design is larger than what it saves.
_MOST_SIGNS = 2048
# Terms that are looked at; of more, a random choice.
MAX_TERMS = 4096
# Nodes along every axis of a product rule at most and at least, by the number of axes and for more; and most axes.
_MOST_NODES, _NODES_OF_MORE, _LEAST_NODES, _LEAST_OF_MORE = {1: 15, 2: 9, 3: 7, 4: 5}, 4, {1: 7, 2: 4, 3: 4}, 3
_MOST_AXES = 5
# Evaluations of a term that a factor may take by one; as many for each are nodes over predictors. Points of degree five that are
# few enough whatever the rows: of five axes.
_MOST_EVALUATIONS, _NODES_BESIDE, _AS_DRAWS = 1 << 18, 16, 64


@dataclasses.dataclass(frozen=True)
class _Component:
    name: str
    family: Any
    # Float[7 ...]: fitted values, then backgrounds. None of the pairs where the family has none.
    values: Any
    pairs: Any
    coordinates: Any

    @property
    def scales(self) -> bool:
        """Whether multiples of values span the same statistics, so that pairs of multiples are multiples of pairs."""
        rule = pair_rule(self.family)
        return rule is not None and rule.scales

    @property
    def members(self) -> tuple[int, ...]:
        return members_of(self.family)

    def mixed(self, new: Any, old: Any, mask: np.ndarray) -> Any:
        """``new`` where the mask over members is set."""
        return np.where(mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim)), new, old)


class _Look:
    """Collects settings of the latents, evaluates all terms at all of them at once, and hands the rows back."""

    def __init__(self, components: list[_Component]):
        self.components = components
        self.settings: list[dict[str, Any]] = []

    def ask(self, background: int, changes: dict[str, Any]) -> int:
        """Which row holds the terms at a background with some components changed."""
        held = {c.name: c.values[_FITTED + background] for c in self.components}
        self.settings.append(held | changes)
        return len(self.settings) - 1

    def evaluate(self, terms: Callable[[dict], Array]) -> np.ndarray:
        """The terms at all settings."""
        stacked = {n: np.stack([s[n] for s in self.settings]) for n in self.settings[0]}
        return np.asarray(look(lambda x: jax.lax.map(terms, x), stacked))


def find_structure(
    family: ProductFamily,
    natural: ProductNatural,
    terms: Callable[..., Array],
    key: Any,
    expectation: str,
    where: str,
    rows: Mapping[str, int] | None = None,
    params: dict | None = None,
    predictors: Callable[[tuple[str, ...]], tuple[TermSpec, ...] | None] | None = None,
    size: int = 1,
) -> FactorStructure:
    """Find how a factor's expectation is to be taken.

    ``family``: of q; ``natural``: a member of it, around whose location values are looked at; ``terms``: the factor's terms
    Float[E] at a dict of values by component (and at ``params``, where there are any); ``key``: a random key; ``expectation``:
    "auto", "exact" (refuse what is not conjugate), "quadrature" (refuse draws), "monte_carlo" (draw everything), or "values"
    ("auto", of which no derivative will be taken); ``where``: the factor's name, for messages; ``rows``: by component whose
    members belong to rows, the axis of members that runs over them; ``params``: values of the model's params. What is proved
    holds for all values that they may take, what is found at these; ``predictors``: says of some normal components how the
    factor's terms see them through predictors, if they all do; ``size``: terms that every evaluation of the factor has, if more
    than are looked at here. Returns the structure. Raises PVIError where something must be drawn that cannot be, or may not be.
    """
    components = _components(family, natural, key)
    rng = np.random.default_rng(0)
    asks = _Look(components)
    plans = [_plan(asks, c, rng) for c in components]
    terms, forms, together = _traced(components, terms, params)
    values = asks.evaluate(terms)
    roles, first = [], 0
    for component, asked in zip(components, plans, strict=True):
        axis = (rows or {}).get(component.name)
        role = _role(component, asked, values, expectation, forms[component.name], axis)
        if role.kind == "exact":
            signs = count_signs(component.family, role)
            role = dataclasses.replace(role, first=first, signs=signs)
            first += signs
        roles.append(role)
    asked = None if expectation in ("values", "monte_carlo") else predictors
    apart = partial(_apart, components, terms, together, np.random.default_rng(1))
    if rows:
        # Where latents of rows begin q is not tame yet.
        roles = [_not_wild(role, dict(family.components)[role.name]) for role in roles]
    roles, found = _by_predictors(roles, dict(family.components), asked, apart)
    structure = FactorStructure(tuple(roles), "all", terms=found)
    if first > _MOST_SIGNS:
        structure = dataclasses.replace(structure, design="random")
    elif first > FEW_SIGNS:
        structure = dataclasses.replace(structure, design=_design(family, components, structure, terms, rng))
    structure = with_rule(structure, family, expectation, max(size, values.shape[1]))
    structure = _by_values_where_periodic(structure, family, expectation)
    _refuse(structure, expectation, where)
    return structure


def with_rule(structure: FactorStructure, family: ProductFamily, expectation: str, size: int) -> FactorStructure:
    """A structure with a fixed rule in the place of draws, where all that would be drawn, and the factor, are small enough.

    A product of Gauss and Hermite's rules, or one of degree five. ``structure``: what was found; ``family``: of q;
    ``expectation``: as of :func:`find_structure`; ``size``: terms of the factor. Returns the structure.
    """
    drawn, families = structure.drawn, dict(family.components)
    if not drawn or expectation not in ("auto", "quadrature") or structure.design == "random":
        return structure
    own = [role for role in structure.roles if role.kind == "draws"]
    # A component of rows may begin at members under which expectations are infinite.
    if any(
        (r.by_values and (r.jumps or not base_family(families[r.name]).periodic))
        or levels_of(families[r.name]) is None
        or (r.axis is not None and is_wild(families[r.name]))
        for r in own
    ):
        return structure
    roles = tuple(dataclasses.replace(r, kind="rule") if r.name in drawn else r for r in structure.roles)
    axes = rule_axes(family, roles)
    beside = len(all_signs(structure.num_signs)) if structure.num_signs <= FEW_SIGNS else 2 * structure.num_signs
    beside *= _NODES_BESIDE if structure.by_predictors else 1

    found = dataclasses.replace(structure, roles=roles)
    affordable = _MOST_EVALUATIONS / (beside * size)
    most, least = _MOST_NODES.get(axes, _NODES_OF_MORE), _LEAST_NODES.get(axes, _LEAST_OF_MORE)
    for nodes in range(most, least - 1, -1) if axes <= _MOST_AXES else ():
        # Of one or two axes the fewest are about as many as draws, whatever the rows.
        if nodes**axes <= affordable or (axes <= 2 and nodes == least):
            return dataclasses.replace(found, nodes=nodes)
    return found if axes > 2 and 2 * axes**2 + 1 <= max(affordable, _AS_DRAWS) else structure


def with_draws(
    structure: FactorStructure,
    family: ProductFamily,
    names: Collection[str],
    expectation: str,
    where: str,
    by_values: Collection[str] = (),
    own_signs: Collection[str] = (),
) -> FactorStructure:
    """A structure with some components drawn after all.

    ``structure``: what was found; ``family``: of q; ``names``: components that are to be drawn; ``expectation``: as of
    :func:`find_structure`; ``where``: the factor's name, for messages; ``by_values``: of them, those that the factor jumps in;
    ``own_signs``: components whose members do not share signs after all. Returns the structure; a design of signs that was only
    found to be exact is not trusted any more. Raises PVIError where something must be drawn that cannot be, or may not be.
    """
    # What terms see of several components together is not known of some of them.
    terms = () if set(structure.by_predictors) & set(names) else structure.terms
    names = {*names, *(() if terms else structure.by_predictors)}
    roles, first = [], 0
    for role in structure.roles:
        # A fixed rule is in all components that would be drawn.
        kind = "draws" if role.name in names or role.kind == "rule" else role.kind
        role = dataclasses.replace(
            role, kind=kind, first=0, signs=0, by_values=role.by_values or role.name in by_values
        )
        if kind == "exact":
            role = dataclasses.replace(role, apart=() if role.name in own_signs else role.apart)
            role = dataclasses.replace(role, first=first, signs=count_signs(dict(family.components)[role.name], role))
            first += role.signs
        roles.append(role)
    design = "all" if first <= MANY_SIGNS else "random"
    changed = dataclasses.replace(structure, roles=tuple(_by_nodes(roles)), design=design, terms=terms, nodes=0)
    changed = _by_values_where_periodic(changed, family, expectation)
    _refuse(changed, expectation, where)
    return changed


def _by_values_where_periodic(structure: FactorStructure, family: ProductFamily, expectation: str) -> FactorStructure:
    """A structure whose drawn components on the circle are taken by values: their draws have no derivatives in q."""
    families, asked = dict(family.components), expectation != "values"

    def one(role: LatentRole) -> LatentRole:
        periodic = asked and role.kind == "draws" and base_family(families[role.name]).periodic
        return dataclasses.replace(role, by_values=True) if periodic else role

    return dataclasses.replace(structure, roles=tuple(map(one, structure.roles)))


def probe_values(family: ProductFamily, natural: ProductNatural, key: Any) -> dict[str, Array]:
    """A value of every component, around q's location.

    ``family``: of q; ``natural``: a member; ``key``: a random key. Returns values by component.
    """
    found = {}
    for i, (name, own) in enumerate(family.components):
        rule, at, draw = pair_rule(own), natural.parts[name], jax.random.fold_in(key, i)
        found[name] = own.sample(at, draw) if rule is None else rule.probe(at, draw, 1)[0]
    return found


def _components(family: ProductFamily, natural: ProductNatural, key: Any) -> list[_Component]:
    found = jax.device_get(_probe(family=family, natural=natural, key=key))
    return [_Component(name, own, *found[name]) for name, own in family.components]


# Compiled: operation by operation, these cost seconds the first time.
@partial(Program, static=("family",))
def _probe(family: ProductFamily, natural: ProductNatural, key: Any) -> dict[str, tuple]:
    """Every component's values, pairs and coordinates, the last two None where it has no pairs."""
    found, count = {}, _FITTED + _BACKGROUNDS
    for i, (name, own) in enumerate(family.components):
        rule, at, draw = pair_rule(own), natural.parts[name], jax.random.fold_in(key, i)
        if rule is None:
            found[name] = own.sample(at, draw, (count,)), None, None
            continue
        values = rule.probe(at, draw, count)
        coordinates = rule.fit(values[:_FITTED])
        if rule.axes:
            # Any function that is quadratic has its mean over the 2 D points at distance sqrt(D) along the axes.
            signs = np.concatenate([np.eye(rule.axes), -np.eye(rule.axes)]) * math.sqrt(rule.axes)
        else:
            signs = np.array([1.0, -1.0])
        pairs = jnp.stack([rule.points(coordinates, jnp.asarray(x, values.dtype)) for x in signs])
        found[name] = values, pairs, coordinates
    return found


@partial(Program, static=("family", "structure"))
def _at_signs(family: ProductFamily, structure: FactorStructure, coordinates: dict, signs: Array) -> dict[str, Array]:
    """Values of the conjugate components at rows of signs."""
    space = MeanSpace(family, structure, 1)
    return jax.vmap(lambda row: space.at_signs(coordinates, row))(signs)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Rows of the settings that speak of one component."""

    # Terms with none, with all, and with a random subset of the members exchanged.
    none: int
    all: int
    subsets: list[int]
    # Pairs of (rows at the fitted values, rows at the pair), for all members together and for single ones.
    together: list[tuple[list[int], list[int]]]
    alone: list[tuple[list[int], list[int]]]
    # For single members at multiples of their values.
    far: list[tuple[list[int], list[int]]]
    # By axis of members, terms with random entries along it exchanged; none where one axis is all there is.
    along: dict[int, list[int]]


def _plan(look: _Look, component: _Component, rng: np.random.Generator) -> _Asked:
    name, values, members = component.name, component.values, component.members
    old, new = values[_FITTED], values[_FITTED + 1]
    everyone = np.ones(members, bool)
    count = everyone.size
    none, whole = look.ask(0, {}), look.ask(0, {name: new})
    subsets = []
    if count > 1:
        masks = rng.random((_SUBSETS, *members)) < 0.5
        subsets = [look.ask(0, {name: component.mixed(new, old, mask)}) for mask in masks]
    together, alone, far = [], [], []
    if component.pairs is not None:
        together = [_compare(look, component, background, everyone) for background in (0, 2)]
        if count > 1:
            for index in rng.permutation(count)[:_MEMBERS]:
                mask = (np.arange(count) == index).reshape(members)
                if component.scales:
                    far += [_compare(look, component, 0, mask, scale) for scale in _FAR]
                else:
                    alone.append(_compare(look, component, 0, mask))
    along: dict[int, list[int]] = {}
    if sum(size > 1 for size in members) > 1:
        own = np.random.default_rng(2)
        for axis, size in enumerate(members):
            if size > 1:
                shape = tuple(size if i == axis else 1 for i in range(len(members)))
                masks = (own.random((_SUBSETS, *shape)) < 0.5) & everyone
                along[axis] = [look.ask(0, {name: component.mixed(new, old, mask)}) for mask in masks]
    return _Asked(none, whole, subsets, together, alone, far, along)


def _compare(
    look: _Look, component: _Component, background: int, mask: np.ndarray, scale: float = 1.0
) -> tuple[list[int], list[int]]:
    held = component.values[_FITTED + background]

    def rows(points: Any) -> list[int]:
        return [look.ask(background, {component.name: component.mixed(scale * x, held, mask)}) for x in points]

    assert component.pairs is not None
    return rows(component.values[:_FITTED]), rows(component.pairs)


def _traced(
    components: list[_Component], terms: Callable, params: dict | None
) -> tuple[Callable[[dict], Array], dict[str, Form], Callable[[Collection[str]], Form]]:
    """The terms, traced once, and what they are of values, for all values of the others and of params.

    By component of its own; and a function that says what they are of those of several, each in a place of its own.
    """
    at, beside = {c.name: jnp.asarray(c.values[0]) for c in components}, jax.tree.leaves(params)
    closed = jax.make_jaxpr(terms)(at, params) if beside else jax.make_jaxpr(terms)(at)
    names, forms, others = sorted(at), {}, [unmarked() for _ in beside]
    for c in components:
        inputs = [marked_component(c.name, c.family) if n == c.name else unmarked() for n in names]
        (forms[c.name],) = forms_of(closed, inputs + others, statistics_of(c.family))
    families = {c.name: c.family for c in components}

    def together(chosen: Collection[str]) -> Form:
        own = {n: marked_component(n, families[n])._replace(place=-1 - i) for i, n in enumerate(names) if n in chosen}
        (form,) = forms_of(closed, [own.get(n, unmarked()) for n in names] + others, Statistics())
        return form

    return lambda values: jaxpr_as_fun(closed)(*(values[n] for n in names), *beside)[0], forms, together


def _role(
    component: _Component, asked: _Asked, values: np.ndarray, expectation: str, form: Form, axis: int | None
) -> LatentRole:
    found = dataclasses.replace(_role_of(component, asked, values, expectation, form), axis=axis, jumps=bool(form.jump))
    # A kink may hide from values that a term sees several entries.
    if found.single or found.kind == "absent" or form.kink:
        return found
    apart = [i for i in asked.along if i != axis and _see_one(values, asked.none, asked.all, asked.along[i])]
    return dataclasses.replace(found, apart=tuple(apart), proved=found.proved and not apart)


def _role_of(component: _Component, asked: _Asked, values: np.ndarray, expectation: str, form: Form) -> LatentRole:
    name = component.name
    if form.constant:
        return LatentRole(name, "absent", proved=True)
    if not form.kink and np.array_equal(values[asked.none], values[asked.all], equal_nan=True):
        return LatentRole(name, "absent")
    tolerance = _TOLERANCE[values.dtype.name]
    none, single = values[asked.none], _see_one(values, asked.none, asked.all, asked.subsets)
    rule = pair_rule(component.family)
    if rule is None or expectation == "monte_carlo" or (rule.marginal and not single):
        return LatentRole(name, "draws", single=single)
    # Terms that see one member each: of several members, by the places that their entries come from.
    one = int(np.prod(component.members)) == 1 or form.place is not None
    # Of a chain, whose product of any two states counts as affine, terms that see one state got here.
    if is_affine(form, statistics_of(component.family)) and np.all(np.isfinite(none)):
        return LatentRole(name, "exact", single=single, proved=one or not single)
    if not form.forbids(values.dtype == np.float32, name) and _seems_affine(asked, values, single, tolerance):
        return LatentRole(name, "exact", single=single)
    # A kink may hide from values that a term sees several members.
    nodes = single and rule.nodes and (one or not form.kink)
    return LatentRole(name, "quadrature" if nodes else "draws", single=single, proved=bool(nodes and one))


def _not_wild(role: LatentRole, family: Any) -> LatentRole:
    """A role without nodes where expectations at them are infinite under some members."""
    wild = role.kind == "quadrature" and is_wild(family)
    return dataclasses.replace(role, kind="draws", proved=False) if wild else role


def _see_one(values: np.ndarray, none: int, whole: int, subsets: Collection[int]) -> bool:
    """Whether every term, with some of all that was exchanged, is what it is with none of it or with all."""
    tolerance = _TOLERANCE[values.dtype.name]
    for row in subsets:
        # Where the prior's members reach places without density, infinite ones differ by no number, and are no small gap.
        with np.errstate(invalid="ignore"):
            ends = np.abs(values[row] - values[none]), np.abs(values[row] - values[whole])
        size = np.abs(values[row]) + np.abs(values[none]) + np.abs(values[whole])
        if not np.all(np.minimum(*ends) <= tolerance * size):
            return False
    return True


def _seems_affine(asked: _Asked, values: np.ndarray, single: bool, tolerance: float) -> bool:
    """Whether averages over values and over pairs of the same average statistics agree."""
    checks = asked.alone if not single else asked.together + asked.alone
    affine = all(_agree(values[a], values[b], tolerance) for a, b in checks)
    return affine and all(_agree_in_change(values[a], values[b], tolerance) for a, b in asked.far)


def _by_nodes(
    roles: list[LatentRole], apart: Callable[[tuple[str, ...]], tuple[bool, bool]] | None = None
) -> list[LatentRole]:
    """Quadrature where all that would be drawn ask for it and are apart: Hermite's rule in all of them at once; else draws.

    ``apart``: of some components whether no term sees two of them, and whether that is proved; None where roles say so.
    """
    lone = [role for role in roles if role.kind in ("quadrature", "draws")]
    if len(lone) <= 1:
        return roles
    names = tuple(role.name for role in lone)
    fit = all(role.kind == "quadrature" for role in lone)
    holds, proved = (fit, True) if apart is None or not fit else apart(names)
    if not holds:
        return [dataclasses.replace(r, kind="draws") if r.name in names else r for r in roles]
    return [dataclasses.replace(r, proved=r.proved and proved) if r.name in names else r for r in roles]


def _apart(
    components: list[_Component],
    terms: Callable[[dict], Array],
    together: Callable[[Collection[str]], Form],
    rng: np.random.Generator,
    names: tuple[str, ...],
) -> tuple[bool, bool]:
    """Whether no term sees two members of some components, all taken together, and whether that is proved."""
    form = together(names)
    if form.place is not None:
        return True, True
    if form.kink:
        # It may hide from values what a term sees.
        return False, False
    look, chosen = _Look(components), [c for c in components if c.name in names]

    def exchanged(part: Callable[[_Component], np.ndarray]) -> int:
        old, new = _FITTED, _FITTED + 1
        return look.ask(0, {c.name: c.mixed(c.values[new], c.values[old], part(c)) for c in chosen})

    none, whole = look.ask(0, {}), exchanged(lambda c: np.ones(c.members, bool))
    subsets = [exchanged(lambda c: np.asarray(rng.random(c.members) < 0.5)) for _ in range(_SUBSETS)]
    # One component whole and the others not at all: with few members, random subsets may have missed it.
    subsets += [exchanged(lambda c, own=name: np.full(c.members, c.name == own)) for name in names]
    return _see_one(look.evaluate(terms), none, whole, subsets), False


def _by_predictors(
    roles: list[LatentRole], families: dict[str, Any], predictors: Callable | None, apart: Callable
) -> tuple[list[LatentRole], tuple[TermSpec, ...]]:
    """Quadrature over what terms see of normal components, as many of them as that is found for, where some would be drawn."""
    asked = [
        r.name for r in roles if r.kind in ("quadrature", "draws") and r.axis is None and _is_normal(families[r.name])
    ]
    lone = [r for r in roles if r.kind in ("quadrature", "draws")]
    if predictors is None or not asked or (len(lone) == 1 and lone[0].kind == "quadrature"):
        return _by_nodes(roles, apart), ()
    terms = predictors(tuple(asked))
    if terms is None and len(asked) > 1:
        asked = [name for name in asked if predictors((name,)) is not None]
        terms = predictors(tuple(asked)) if asked else None
    if terms is None:
        return _by_nodes(roles, apart), ()
    proved = all(term.proved for term in terms)
    seen = [dataclasses.replace(r, kind="predictors", proved=proved) if r.name in asked else r for r in roles]
    return _by_nodes(seen, apart), terms


def _is_normal(family: Any) -> bool:
    """Whether a component's values are normal, of which linear functions are."""
    rule = pair_rule(family)
    return rule is not None and rule.normal


def _agree(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> bool:
    if not (np.all(np.isfinite(ours)) and np.all(np.isfinite(theirs))):
        return False
    one, other = (x.astype(np.float64).mean(axis=0) for x in (ours, theirs))
    size = np.abs(ours).max(axis=0) + np.abs(theirs).max(axis=0)
    return bool(np.all(np.abs(one - other) <= tolerance * size + 1e-30))


def _agree_in_change(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> bool:
    """The same, relative to how far the values are apart: of a member that is one of many in a sum."""
    if not (np.all(np.isfinite(ours)) and np.all(np.isfinite(theirs))):
        return False
    every = np.concatenate([ours, theirs]).astype(np.float64)
    one, other = (x.astype(np.float64).mean(axis=0) for x in (ours, theirs))
    size = tolerance * np.ptp(every, axis=0) + 0.03 * tolerance * np.abs(every).max(axis=0)
    return bool(np.all(np.abs(one - other) <= size + 1e-30))


def _design(
    family: ProductFamily,
    components: list[_Component],
    structure: FactorStructure,
    terms: Callable,
    rng: np.random.Generator,
) -> str:
    """The cheapest design that is exact, as far as three relabelled arrays of strength 3, or of 5, agree."""
    count = structure.num_signs
    if len(strength_three(count)) >= 2**count:
        return "all"
    coordinates = {c.name: c.coordinates for c in components}

    def is_exact(array: np.ndarray) -> bool:
        look, rows = _Look(components), []
        for _ in range(3):
            signs = array[:, rng.permutation(count)] * rng.choice([-1.0, 1.0], count)
            placed = jax.device_get(
                _at_signs(family, structure, coordinates, jnp.asarray(signs, jnp.result_type(float)))
            )
            rows.append([look.ask(0, {n: x[i] for n, x in placed.items()}) for i in range(len(array))])
        values = look.evaluate(terms)
        tolerance = _TOLERANCE[values.dtype.name]
        return all(_agree(values[rows[0]], values[other], tolerance) for other in rows[1:])

    if is_exact(strength_three(count)):
        return "strength 3"
    if count <= MOST_OF_FIVE and len(strength_five(count)) < 2**count and is_exact(strength_five(count)):
        return "strength 5"
    return "all" if count <= MANY_SIGNS else "random"


def _refuse(structure: FactorStructure, expectation: str, where: str) -> None:
    if expectation == "quadrature" and not structure.exact:
        raise PVIError(
            "expectation='quadrature' is for normal and log-normal latents, and Gaussian chains, of which no term sees two "
            "members, for normal latents that every term sees one or two affine functions of, or few of any kind beside few rows; "
            f"the {where} is {structure}. "
            "Leave expectation='auto'."
        )
    if expectation == "exact" and not structure.closed:
        drawn = structure.drawn or structure.by_nodes or structure.by_predictors
        what = f"it is {structure}" if drawn else "too many latents meet in one term"
        raise PVIError(
            f"an exact expectation was asked for, but the {where} has none ({what}). Leave expectation='auto', which draws "
            "what is not conjugate and takes the rest in closed form."
        )


# ------------------------------------------------------------------------------------ latents with finitely many values
# Which terms of a factor see a latent with finitely many values, and that every term sees one member of it only.

# Combinations of values that are summed over, and random choices of values that single members are told apart by.
MOST_VALUES = 256
_CHOICES = 3


def over_values(family: ProductFamily, terms: Callable[[dict], Array]) -> Callable[[dict], Array]:
    """Terms at every combination of the values of the finite components, all members at the same one.

    ``family``: of q; ``terms``: a factor's terms Float[E] at a dict of values by component. Returns the terms Float[C E]
    flattened, a function of the values of the other components.
    """
    finite = _finite(family)
    if not finite:
        return terms
    cells = all_values({n: k for n, (_, k) in finite.items()})
    return lambda values: jax.vmap(lambda cell: terms(values | _placed(finite, cell)))(jnp.asarray(cells)).reshape(-1)


def sums_of(
    family: ProductFamily,
    values: Mapping[str, Array],
    terms: Callable[[dict], Mapping[str, Array]],
    structure: FactorStructure,
    where: str,
) -> FactorStructure:
    """Add the components with finitely many values to a factor's structure.

    A term whose elements see the members of such a component one by one, as batch axes align, has the expectation ``sum_k q(k)
    term(k)``, element by element. That is tested at random values of all members. ``family``: of q; ``values``: of the other
    components; ``terms``: the factor's terms by name, elementwise; ``structure``: found for the other components; ``where``:
    the factor's name, for messages. Returns the structure, its roles in the family's order. Raises PVIError for a term that
    sees several members at once, and where there are too many combinations of values.
    """
    finite = _finite(family)
    if not finite:
        return structure
    sizes = {name: size for name, (_, size) in finite.items()}
    cells = all_values(sizes) if np.prod(list(sizes.values()), dtype=float) <= MOST_VALUES else None
    if cells is None:
        raise PVIError(
            f"latents {', '.join(f'{n} ({k} values)' for n, k in sizes.items())}: the {where} would be summed over every "
            f"combination of their values, of which at most {MOST_VALUES} are. Mark some for enumeration "
            "(infer={'enumerate': 'parallel'}) instead of giving them a family."
        )
    random = some_values(family, _CHOICES)

    def each_value(values: dict, chosen: dict) -> tuple[dict, dict]:
        table = jax.lax.map(lambda cell: dict(terms(values | _placed(finite, cell))), jnp.asarray(cells))
        return table, jax.lax.map(lambda own: dict(terms(values | own)), chosen)

    stacked = {n: jnp.asarray(np.stack([own[n] for own in random])) for n in finite}
    table, seen = jax.device_get(look(each_value, dict(values), stacked))
    found: dict[str, list[str]] = {name: [] for name in finite}
    for term, each in table.items():
        grid = each.reshape(*sizes.values(), *each.shape[1:])
        moving = [n for i, n in enumerate(finite) if np.any(grid != np.take(grid, [0], axis=i))]
        for name in moving:
            found[name].append(term)
        _check_alone(term, {n: finite[n][0] for n in moving}, grid, list(finite), random, seen[term], where)
    return _joined(family, structure, {n: tuple(x) for n, x in found.items()})


def some_values(family: ProductFamily, count: int) -> list[dict[str, np.ndarray]]:
    """Random values of all members of the components that have finitely many, several times."""
    rng, finite = np.random.default_rng(0), _finite(family)
    return [{n: rng.integers(0, k, shape) for n, (shape, k) in finite.items()} for _ in range(count)]


def _joined(family: ProductFamily, structure: FactorStructure, seen: dict[str, tuple[str, ...]]) -> FactorStructure:
    own = {role.name: role for role in structure.roles}
    own |= {name: LatentRole(name, "sum" if names else "absent") for name, names in seen.items()}
    cells = tuple((name, names) for name, names in seen.items() if names)
    return dataclasses.replace(structure, roles=tuple(own[n] for n, _ in family.components), cells=cells)


def _check_alone(term, moving: dict, grid, names: list[str], random: list, seen, where: str) -> None:
    """Every element of a term must have the value that its own members' values give."""
    shape = grid.shape[len(names) :]
    try:
        aligned = all(np.broadcast_shapes(own, shape) == shape for own in moving.values())
    except ValueError:
        aligned = False
    tolerance = _TOLERANCE[grid.dtype.name] if moving else 0.0
    for own, got in zip(random, seen if aligned else (), strict=False):
        index = [np.broadcast_to(own[n], shape) if n in moving else np.zeros(shape, int) for n in names]
        wanted = grid[tuple(index) + tuple(np.indices(shape))]
        both = np.isfinite(wanted) & np.isfinite(got)
        apart = np.abs(np.where(both, wanted - got, 0.0)) > tolerance * (np.abs(wanted) + np.abs(got) + 1e-30)
        aligned = aligned and not np.any(both & apart)
    if moving and not aligned:
        latents = ", ".join(map(repr, moving))
        raise PVIError(
            f"the {where}: elements of {term!r} see several members of discrete latent(s) {latents}, or one by an index: with a "
            "family each element may depend on the member at its own place in the plates alone. Declare the latent inside the "
            "plate of the rows that it belongs to, or mark it for enumeration (infer={'enumerate': 'parallel'})."
        )


def _finite(family: ProductFamily) -> dict[str, tuple[tuple[int, ...], int]]:
    """Members' axes and number of values of every component that has finitely many."""
    supports = {name: (own, support_of(own)) for name, own in family.components}
    return {name: (members_of(own), support.size) for name, (own, support) in supports.items() if support is not None}


def _placed(finite: Mapping[str, tuple], cell: Any) -> dict[str, Array]:
    return {name: jnp.full(shape, cell[i]) for i, (name, (shape, _)) in enumerate(finite.items())}
