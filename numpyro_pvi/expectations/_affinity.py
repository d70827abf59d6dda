"""In which latents' statistics a factor is affine, found by looking at values.

For every component of the product family, four values x_1 .. x_4 of a member and a pair of points with the same average
statistics are put into each term: where the term is affine in T given the other latents, both averages agree. Whether terms
see more than one member of a component is found by exchanging random subsets of its members, and how many signs meet in a
product by comparing designs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..errors import PVIError
from ..families import ProductFamily, ProductNatural, VonMisesFamily, base_family, members_of, pair_rule
from ._designs import FEW_SIGNS, MANY_SIGNS, strength_three
from ._factor_structure import FactorStructure, LatentRole
from ._mean_space import count_signs, sign_shape

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
        return getattr(pair_rule(self.family), "scales", False)

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
        stacked = {n: jnp.asarray(np.stack([s[n] for s in self.settings])) for n in self.settings[0]}
        return np.asarray(jax.jit(lambda x: jax.lax.map(terms, x))(stacked))


def find_structure(
    family: ProductFamily,
    natural: ProductNatural,
    terms: Callable[[dict], Array],
    key: Any,
    expectation: str,
    where: str,
    rows: Mapping[str, int] | None = None,
) -> FactorStructure:
    """Find how a factor's expectation is to be taken.

    Args:
        family: of q.
        natural: a member of it, around whose location values are looked at.
        terms: the factor's terms Float[E] at a dict of values by component.
        key: a random key.
        expectation: "auto", "exact" (refuse what is not conjugate), "quadrature" (refuse draws), "monte_carlo" (draw everything),
            or "values" ("auto", of which no derivative will be taken).
        where: the factor's name, for messages.
        rows: by component whose members belong to rows, the axis of members that runs over them.

    Returns:
        The structure.

    Raises:
        PVIError: where something must be drawn that cannot be, or may not be.
    """
    components = _components(family, natural, key)
    rng = np.random.default_rng(0)
    look = _Look(components)
    plans = [_plan(look, c, rng) for c in components]
    values = look.evaluate(terms)
    roles, first = [], 0
    for component, asked in zip(components, plans, strict=True):
        role = dataclasses.replace(_role(component, asked, values, expectation), axis=(rows or {}).get(component.name))
        if role.kind == "exact":
            signs = count_signs(component.family, role)
            role = dataclasses.replace(role, first=first, signs=signs)
            first += signs
        roles.append(role)
    roles = _one_by_nodes(roles)
    structure = FactorStructure(tuple(roles), "all")
    if first > _MOST_SIGNS:
        structure = dataclasses.replace(structure, design="random")
    elif first > FEW_SIGNS:
        structure = dataclasses.replace(structure, design=_design(family, components, structure, terms, rng))
    _refuse(structure, family, expectation, where)
    return structure


def probe_values(family: ProductFamily, natural: ProductNatural, key: Any) -> dict[str, Array]:
    """A value of every component, around q's location.

    Args:
        family: of q.
        natural: a member.
        key: a random key.

    Returns:
        Values by component.
    """
    found = {}
    for i, (name, own) in enumerate(family.components):
        rule, at, draw = pair_rule(own), natural.parts[name], jax.random.fold_in(key, i)
        found[name] = own.sample(at, draw) if rule is None else rule.probe(at, draw, 1)[0]
    return found


def _components(family: ProductFamily, natural: ProductNatural, key: Any) -> list[_Component]:
    found = jax.device_get(_probe(family, natural, key))
    return [_Component(name, own, *found[name]) for name, own in family.components]


# Compiled: operation by operation, these cost seconds the first time.
@partial(jax.jit, static_argnames="family")
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


@partial(jax.jit, static_argnames=("family", "roles"))
def _at_signs(
    family: ProductFamily, roles: tuple[LatentRole, ...], coordinates: dict, signs: Array
) -> dict[str, Array]:
    """Values of the conjugate components at rows of signs."""
    families, found = dict(family.components), {}
    for role in roles:
        rule = pair_rule(families[role.name])
        if role.kind == "exact" and rule is not None:
            own = signs[:, role.first : role.first + role.signs]

            def one(row: Array, rule: Any = rule, role: LatentRole = role) -> Array:
                return rule.points(coordinates[role.name], sign_shape(families[role.name], role, row))

            found[role.name] = jax.vmap(one)(own)
    return found


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
    return _Asked(none, whole, subsets, together, alone, far)


def _compare(
    look: _Look, component: _Component, background: int, mask: np.ndarray, scale: float = 1.0
) -> tuple[list[int], list[int]]:
    held = component.values[_FITTED + background]

    def rows(points: Any) -> list[int]:
        return [look.ask(background, {component.name: component.mixed(scale * x, held, mask)}) for x in points]

    assert component.pairs is not None
    return rows(component.values[:_FITTED]), rows(component.pairs)


def _role(component: _Component, asked: _Asked, values: np.ndarray, expectation: str) -> LatentRole:
    name = component.name
    if np.array_equal(values[asked.none], values[asked.all], equal_nan=True):
        return LatentRole(name, "absent")
    tolerance = _TOLERANCE[values.dtype.name]
    none, whole = values[asked.none], values[asked.all]
    single = True
    for row in asked.subsets:
        seen, size = values[row], np.abs(values[row]) + np.abs(none) + np.abs(whole)
        near = np.minimum(np.abs(seen - none), np.abs(seen - whole)) <= tolerance * size
        single = single and bool(np.all(near))
    rule = pair_rule(component.family)
    if component.pairs is None or expectation == "monte_carlo" or (getattr(rule, "marginal", False) and not single):
        return LatentRole(name, "draws", single=single)
    checks = asked.alone if not single else asked.together + asked.alone
    affine = all(_agree(values[a], values[b], tolerance) for a, b in checks)
    affine = affine and all(_agree_in_change(values[a], values[b], tolerance) for a, b in asked.far)
    if affine:
        return LatentRole(name, "exact", single=single)
    return LatentRole(name, "quadrature" if single and getattr(rule, "nodes", False) else "draws", single=single)


def _one_by_nodes(roles: list[LatentRole]) -> list[LatentRole]:
    """Quadrature where one component asks for it and nothing is drawn; of several, all are drawn."""
    if sum(role.kind in ("quadrature", "draws") for role in roles) <= 1:
        return roles
    return [dataclasses.replace(r, kind="draws") if r.kind == "quadrature" else r for r in roles]


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
    """The cheapest design that is exact, as far as three relabelled arrays of strength 3 agree."""
    count = structure.num_signs
    array, look = strength_three(count), _Look(components)
    if len(array) >= 2**count:
        return "all"
    coordinates = {c.name: c.coordinates for c in components}
    rows = []
    for _ in range(3):
        signs = array[:, rng.permutation(count)] * rng.choice([-1.0, 1.0], count)
        placed = jax.device_get(
            _at_signs(family, structure.roles, coordinates, jnp.asarray(signs, jnp.result_type(float)))
        )
        rows.append([look.ask(0, {n: x[i] for n, x in placed.items()}) for i in range(len(array))])
    values = look.evaluate(terms)
    tolerance = _TOLERANCE[values.dtype.name]
    if all(_agree(values[rows[0]], values[other], tolerance) for other in rows[1:]):
        return "strength 3"
    return "all" if count <= MANY_SIGNS else "random"


def _refuse(structure: FactorStructure, family: ProductFamily, expectation: str, where: str) -> None:
    if expectation == "quadrature" and not structure.exact:
        raise PVIError(
            f"expectation='quadrature' is for one normal latent, or one Gaussian chain, of which no term sees two members; the "
            f"{where} is {structure}. Leave expectation='auto'."
        )
    if expectation == "exact" and (structure.by_nodes or not structure.exact):
        drawn = structure.drawn or structure.by_nodes
        what = f"it is {structure}" if drawn else "too many latents meet in one term"
        raise PVIError(
            f"an exact expectation was asked for, but the {where} has none ({what}). Leave expectation='auto', which draws "
            "what is not conjugate and takes the rest in closed form."
        )
    families = dict(family.components)
    for name in structure.drawn if expectation != "values" else ():
        if isinstance(base_family(families[name]), VonMisesFamily):
            raise PVIError(
                f"latent {name!r} has a von Mises family, and the {where} depends on it in more than its cosine and sine, "
                "which would take draws that are not differentiable: use AutoNormal or AutoMultivariateNormal, or another "
                f"prior for {name!r}."
            )
