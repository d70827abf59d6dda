"""How a factor's expectation is taken, latent by latent: what was found, static and hashable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxtyping import Array

from ..factors import TermSpec


@dataclasses.dataclass(frozen=True)
class LatentRole:
    """How one component of the product family enters a factor.

    Attributes:
        name: the component.
        kind: "exact" (the factor is affine in its statistics), "sum" (over its values), "quadrature" (of a normal one: no term sees
            two members), "predictors" (of normal ones: every term sees one or two affine functions of them), "draws", or
            "absent".
        signs: how many signs it takes in the design, and where they begin.
        single: whether every term depends on one member at most, so that all members share their signs.
        axis: of members, the axis that runs over rows, of which every term sees one; None where members belong to no row.
        proved: whether that is so for all values of all latents, and was not found at a few.
    """

    name: str
    kind: str
    first: int = 0
    signs: int = 0
    single: bool = True
    axis: int | None = None
    proved: bool = False


@dataclasses.dataclass(frozen=True)
class FactorStructure:
    """How a factor's expectation is taken. Static and hashable.

    Attributes:
        roles: one per component.
        design: "all" combinations of signs, an array of "strength 3", or "random" rows.
        terms: where components are seen through predictors, all terms that see them, and how.
        cells: for every component that is summed over, the names of the terms that see it, each element its own member's value.
    """

    roles: tuple[LatentRole, ...]
    design: str = "all"
    cells: tuple[tuple[str, tuple[str, ...]], ...] = ()
    terms: tuple[TermSpec, ...] = ()

    @property
    def num_signs(self) -> int:
        """K, columns of the design."""
        return sum(role.signs for role in self.roles)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Components whose expectations are by draws."""
        return tuple(role.name for role in self.roles if role.kind == "draws")

    @property
    def by_nodes(self) -> tuple[str, ...]:
        """Components whose expectations are by Gauss-Hermite quadrature: one at most."""
        return tuple(role.name for role in self.roles if role.kind == "quadrature")

    @property
    def by_predictors(self) -> tuple[str, ...]:
        """Components whose expectations are by quadrature over what terms see of them, one or two numbers each."""
        return tuple(role.name for role in self.roles if role.kind == "predictors")

    @property
    def conjugate(self) -> tuple[str, ...]:
        """Components in whose statistics the factor is affine given the others."""
        return tuple(role.name for role in self.roles if role.kind in ("exact", "sum"))

    def weigh(self, weights: Mapping[str, tuple[Array, Array]], name: str, term: Array) -> Array:
        """A term times the probability of the values that the components summed over have.

        Args:
            weights: what a density is given beside the values: by component, the probability of its value for every member,
                and 1 where that is the first value, else 0.
            name: of the term.
            term: elementwise, in nats.

        Returns:
            The term's share of a sum over all values; terms that do not see a component count with its first value.
        """
        for component, names in self.cells:
            own, first = weights[component]
            term = term * (own if name in names else first)
        return term

    @property
    def exact(self) -> bool:
        """Whether nothing is drawn: closed form, or quadrature in one component, or over predictors."""
        return not self.drawn and self.design != "random"

    @property
    def evidence(self) -> str:
        """How the claims are known: "proved" for all values of all latents, "found" at a few, or "" where there are none."""
        claimed = [role for role in self.roles if role.kind != "draws"]
        if not claimed:
            return ""
        return "proved" if self.design != "strength 3" and all(role.proved for role in claimed) else "found"

    def __str__(self) -> str:
        parts = [f"conjugate in {', '.join(self.conjugate)}"] if self.conjugate else []
        others = (*self.by_nodes, *self.by_predictors, *self.drawn)
        parts += [f"not conjugate in {', '.join(others)}"] if others else []
        return "; ".join(parts) or "constant"

    @property
    def expectation(self) -> str:
        """In words, how expectations are taken."""
        parts = [f"quadrature in {', '.join(self.by_nodes)}"] if self.by_nodes else []
        parts += [f"quadrature over the predictors of {', '.join(self.by_predictors)}"] if self.by_predictors else []
        signs = " and of signs" if self.design == "random" else ""
        parts += [f"draws of {', '.join(self.drawn)}{signs}"] if self.drawn else ["drawn signs"] if signs else []
        return "; ".join(parts) or "closed form"
