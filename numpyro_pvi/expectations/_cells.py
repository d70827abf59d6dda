"""Which terms of a factor see a latent with finitely many values, and that every term sees one member of it only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._compiling import look
from ..errors import PVIError
from ..families import ProductFamily, members_of, support_of
from ._affinity import _TOLERANCE
from ._factor_structure import FactorStructure, LatentRole
from ._mean_space import all_values

# Combinations of values that are summed over, and random choices of values that single members are told apart by.
MOST_VALUES = 256
_CHOICES = 3


def over_values(family: ProductFamily, terms: Callable[[dict], Array]) -> Callable[[dict], Array]:
    """Terms at every combination of the values of the finite components, all members at the same one.

    Args:
        family: of q.
        terms: a factor's terms Float[E] at a dict of values by component.

    Returns:
        The terms Float[C E] flattened, a function of the values of the other components.
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
    term(k)``, element by element. That is tested at random values of all members.

    Args:
        family: of q.
        values: of the other components.
        terms: the factor's terms by name, elementwise.
        structure: found for the other components.
        where: the factor's name, for messages.

    Returns:
        The structure, its roles in the family's order.

    Raises:
        PVIError: for a term that sees several members at once, and where there are too many combinations of values.
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


__all__ = ["MOST_VALUES", "over_values", "some_values", "sums_of"]
