"""E_q of a log density of latents of different families, and its natural gradient.

``F(q) = E_q[f(theta)]`` depends on a latent in whose statistics f is affine through its mean parameters alone. F is then an
average over pairs of points (:mod:`numpyro_pvi.families._pairs`), exact for products of such latents over a sign design, and
``dF/dmu`` is its derivative. The other latents are drawn; their ``dF/dmu`` is ``I(eta)^-1 dF/deta`` with implicitly
reparameterised draws and I the Fisher metric, which is solved with and never inverted. A conjugate latent's message is
averaged over the draws of the others (Rao-Blackwell).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..families import ProductFamily, ProductNatural, members_of, pair_rule
from ._designs import all_signs, strength_three

# Antithetic pairs of sign rows where no fixed design is known to be exact.
_RANDOM_PAIRS = 16
# Points evaluated together.
_TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class LatentRole:
    """How one component of the product family enters a factor.

    Attributes:
        name: the component.
        kind: "exact" (the factor is affine in its statistics), "draws", or "absent".
        signs: how many signs it takes in the design, and where they begin.
        single: whether every term depends on one member at most, so that all members share their signs.
    """

    name: str
    kind: str
    first: int = 0
    signs: int = 0
    single: bool = True


@dataclasses.dataclass(frozen=True)
class FactorStructure:
    """How a factor's expectation is taken. Static and hashable.

    Attributes:
        roles: one per component.
        design: "all" combinations of signs, an array of "strength 3", or "random" rows.
    """

    roles: tuple[LatentRole, ...]
    design: str = "all"

    @property
    def num_signs(self) -> int:
        """K, columns of the design."""
        return sum(role.signs for role in self.roles)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Components whose expectations are by draws."""
        return tuple(role.name for role in self.roles if role.kind == "draws")

    @property
    def conjugate(self) -> tuple[str, ...]:
        """Components in whose statistics the factor is affine given the others."""
        return tuple(role.name for role in self.roles if role.kind == "exact")

    @property
    def exact(self) -> bool:
        """Whether nothing is drawn."""
        return not self.drawn and self.design != "random"

    def __str__(self) -> str:
        parts = [f"conjugate in {', '.join(self.conjugate)}"] if self.conjugate else []
        parts += [f"not conjugate in {', '.join(self.drawn)}"] if self.drawn else []
        return "; ".join(parts) or "constant"

    @property
    def expectation(self) -> str:
        """In words, how expectations are taken."""
        if self.exact:
            return "closed form"
        if not self.drawn:
            return "drawn signs"
        return f"draws of {', '.join(self.drawn)}" + (" and of signs" if self.design == "random" else "")


@dataclasses.dataclass(frozen=True)
class MeanSpace:
    """Takes expectations of one kind of factor: its structure beside the family of q.

    Args:
        family: of q.
        structure: what was found.
        num_draws: draws of the latents that are drawn.
    """

    family: ProductFamily
    structure: FactorStructure
    num_draws: int

    def _components(self, kind: str) -> list[tuple[LatentRole, Any]]:
        families = dict(self.family.components)
        return [(role, families[role.name]) for role in self.structure.roles if role.kind == kind]

    def variables(self, q: ProductNatural) -> tuple[dict[str, dict], dict[str, Any]]:
        """What the expectation is differentiated in.

        Args:
            q: natural parameters.

        Returns:
            ``(variables, beyond)``: coordinates of conjugate components and naturals of drawn ones; and, of the components
            whose pairs are taken at an anchor, how far q's own coordinates are from it.
        """
        coordinates, beyond = {}, {}
        for role, family in self._components("exact"):
            rule, natural = _rule(family), q.parts[role.name]
            own = rule.coordinates(natural)
            # Continued linearly in all members at once, which is exact where no term has two of them.
            if rule.anchored and role.single:
                at = rule.anchor(natural)
                beyond[role.name] = jax.tree.map(jnp.subtract, own, at)
                own = at
            coordinates[role.name] = own
        drawn = {role.name: q.parts[role.name] for role, _ in self._components("draws")}
        fixed = {role.name: _typical(family, q.parts[role.name]) for role, family in self._components("absent")}
        return {"coordinates": coordinates, "natural": drawn}, {"beyond": beyond, "fixed": fixed}

    def average(
        self, variables: dict[str, dict], rest: dict[str, Any], density: Callable[[dict], Array], key: Any
    ) -> Float[Array, ""]:
        """``E_q[f]`` in nats.

        Args:
            variables: as :meth:`variables` gives them, or where they are moved to.
            rest: what :meth:`variables` gives beside them.
            density: f, of a dict of values by component.
            key: for draws; not used where there are none.

        Returns:
            The expectation.
        """
        signs, draws = self._signs(key), self._draws(variables["natural"], key)

        def at(coordinates: dict) -> Array:
            def one(index: tuple) -> Array:
                row, draw = index
                values = rest["fixed"] | {n: x[draw] for n, x in draws.items()}
                return density(values | self._points(coordinates, signs[row]))

            rows, columns = len(signs), self.num_draws if draws else 1
            index = jnp.repeat(jnp.arange(rows), columns), jnp.tile(jnp.arange(columns), rows)
            if rows * columns <= _TOGETHER:
                return jnp.mean(jax.vmap(one)(index))
            return jnp.mean(jax.lax.map(one, index, batch_size=_TOGETHER))

        def continued(coordinates: dict, names: list[str]) -> Array:
            if not names:
                return at(coordinates)
            name, *others = names

            def along(own: Any) -> Array:
                return continued(coordinates | {name: own}, others)

            # The slope is the same everywhere: its derivative in these coordinates would be rounding times a long way.
            fixed = jax.lax.stop_gradient(coordinates[name])
            _, slope = jax.jvp(along, (fixed,), (rest["beyond"][name],))
            return along(coordinates[name]) + slope

        return continued(variables["coordinates"], list(rest["beyond"]))

    def message(self, q: ProductNatural, variables: dict[str, dict], gradient: dict[str, dict]) -> ProductNatural:
        """``dF/dmu`` as natural parameters, from the derivative in the variables.

        Args:
            q: natural parameters.
            variables: where the derivative was taken.
            gradient: the derivative.

        Returns:
            Natural parameters; zero for absent components.
        """
        found = {}
        for role, family in self._components("exact"):
            rule = _rule(family)
            found[role.name] = rule.message(variables["coordinates"][role.name], gradient["coordinates"][role.name])
        for role, family in self._components("draws"):
            own, slope = q.parts[role.name], gradient["natural"][role.name]
            like = jax.tree.structure(jax.eval_shape(family.natural_to_mean, own))
            found[role.name] = family.fisher_solve(own, jax.tree.unflatten(like, jax.tree.leaves(slope)))
        for role, _ in self._components("absent"):
            found[role.name] = jax.tree.map(jnp.zeros_like, q.parts[role.name])
        return ProductNatural({name: found[name] for name, _ in self.family.components})

    def _signs(self, key: Any) -> Array:
        count = self.structure.num_signs
        if self.structure.design == "random":
            half = jax.random.rademacher(jax.random.fold_in(key, 1), (_RANDOM_PAIRS, count)).astype(float)
            return jnp.concatenate([half, -half])
        rows = all_signs(count) if self.structure.design == "all" else strength_three(count)
        return jnp.asarray(rows, jnp.result_type(float))

    def _draws(self, naturals: Mapping[str, Any], key: Any) -> dict[str, Array]:
        families, found = dict(self.family.components), {}
        for i, (name, natural) in enumerate(sorted(naturals.items())):
            found[name] = families[name].sample(natural, jax.random.fold_in(key, 2 + i), (self.num_draws,))
        return found

    def _points(self, coordinates: dict[str, Any], signs: Array) -> dict[str, Array]:
        found = {}
        for role, family in self._components("exact"):
            rule, own = _rule(family), signs[role.first : role.first + role.signs]
            found[role.name] = rule.points(coordinates[role.name], sign_shape(family, role.single, own))
        return found


def sign_shape(family: Any, single: bool, signs: Array) -> Array:
    """A component's signs in a shape that broadcasts against its members."""
    axes, members = _rule(family).axes, () if single else members_of(family)
    return signs.reshape(*members, axes) if axes else signs.reshape(members)


def count_signs(family: Any, single: bool) -> int:
    """Signs that a component takes in a design."""
    members = 1 if single else int(np.prod(members_of(family)))
    return members * max(_rule(family).axes, 1)


def _rule(family: Any) -> Any:
    rule = pair_rule(family)
    assert rule is not None  # only components with a rule are ever given the role "exact"
    return rule


def _typical(family: Any, natural: Any) -> Array:
    """Any value of a component that does not matter."""
    return jax.lax.stop_gradient(family.sample(natural, jax.random.key(0)))
