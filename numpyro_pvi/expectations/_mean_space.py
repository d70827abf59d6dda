"""E_q of a log density of latents of different families, latent by latent, and its natural gradient.

``F(q) = E_q[f(theta)]`` depends on a latent in whose statistics f is affine through its mean parameters alone. F is then an
average over pairs of points (:mod:`numpyro_pvi.families._pairs`), exact for products of such latents over a sign design, and
``dF/dmu`` is its derivative. The other latents are drawn; their ``dF/dmu`` is ``I(eta)^-1 dF/deta`` with implicitly
reparameterised draws and I the Fisher metric, which is solved with and never inverted. A conjugate latent's message is
averaged over the draws of the others (Rao-Blackwell). Where all that are not conjugate are normal (or log-normal, or Gaussian
chains), and no term sees two members of any, Gauss and Hermite's rule in every member at once takes the draws' place; where they
and the rows are few, a product of such rules in the levels of all members (:mod:`numpyro_pvi.families._levels`) does, or a rule
of degree five in these. Normal
latents that terms see through one or two affine predictors are not drawn either: given the others, terms hand in their
expectations over these (:mod:`._affine`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Int

from .._numerics import in_batches
from ..factors import TermSpec
from ..families import ProductFamily, ProductNatural, base_family, levels_of, members_of, pair_rule, support_of
from ._point_sets import fifth_degree
from ._rules import NEGLIGIBLE

# -------------------------------------------------------------------------------------------------- structure by latent
# How a factor's expectation is taken, latent by latent: what was found, static and hashable.


@dataclasses.dataclass(frozen=True)
class LatentRole:
    """How one component of the product family enters a factor.

    ``kind``: "exact" (the factor is affine in its statistics), "sum" (over its values), "quadrature" (of a normal one, or its
    exponential: no term sees two members of all that are taken so), "predictors" (of normal ones: every term sees one or two
    affine functions of them), "rule" (at the points of a fixed rule in all that would be drawn), "draws", or "absent";
    ``signs``: how many signs it takes in the design, and where they begin; ``single``: whether every term depends on one member
    at most, so that all members share their signs; ``axis``: of members, the axis that runs over rows, of which every term sees
    one; None where members belong to no row; ``apart``: other axes of members of which every term sees one entry, whose signs are
    shared along them; ``proved``: whether that is so for all values of all latents, and was not found at
    a few; ``jumps``: whether the factor may jump in it, as the model's program says; ``by_values``: whether it does, so that what
    is drawn of it is taken by values, of which slopes say nothing.
    """

    name: str
    kind: str
    first: int = 0
    signs: int = 0
    single: bool = True
    axis: int | None = None
    proved: bool = False
    jumps: bool = False
    by_values: bool = False
    apart: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class FactorStructure:
    """How a factor's expectation is taken. Static and hashable.

    Attributes:
        roles: one per component.
        design: "all" combinations of signs, an array of "strength 3" or "strength 5", or "random" rows.
        terms: where components are seen through predictors, all terms that see them, and how.
        cells: for every component that is summed over, the names of the terms that see it, each element its own member's value.
        nodes: along every axis of the product rule, where there is one; 0 where the rule is one of degree five.
    """

    roles: tuple[LatentRole, ...]
    design: str = "all"
    cells: tuple[tuple[str, tuple[str, ...]], ...] = ()
    terms: tuple[TermSpec, ...] = ()
    nodes: int = 0

    @property
    def num_signs(self) -> int:
        """K, columns of the design."""
        return sum(role.signs for role in self.roles)

    @property
    def strength(self) -> int | float:
        """How many signs may meet in a product whose average is exact."""
        return {"strength 3": 3, "strength 5": 5, "all": self.num_signs, "random": math.inf}[self.design]

    @property
    def drawn(self) -> tuple[str, ...]:
        """Components whose expectations are by draws."""
        return tuple(role.name for role in self.roles if role.kind == "draws")

    @property
    def by_rule(self) -> tuple[str, ...]:
        """Components whose expectations are by a fixed rule."""
        return tuple(role.name for role in self.roles if role.kind == "rule")

    @property
    def rule(self) -> str:
        """What that rule is called."""
        return "a product rule" if self.nodes else "a rule of degree five"

    @property
    def by_points(self) -> tuple[str, ...]:
        """Components whose expectations are by values of theirs, drawn or fixed."""
        return (*self.drawn, *self.by_rule)

    @property
    def by_values(self) -> tuple[str, ...]:
        """Drawn components in which the factor jumps."""
        return tuple(role.name for role in self.roles if role.kind == "draws" and role.by_values)

    def draws(self, asked: int) -> int:
        """How many draws are taken where so many are asked for: by values alone every one says less."""
        return asked * (_BY_VALUES if self.by_values else 1)

    @property
    def by_slopes(self) -> tuple[str, ...]:
        """Components that the factor may jump in, and is taken not to."""
        by_slopes = ("draws", "quadrature", "rule")
        return tuple(
            r.name for r in self.roles if r.kind in by_slopes and r.jumps and not r.by_values and r.axis is None
        )

    @property
    def by_nodes(self) -> tuple[str, ...]:
        """Components whose expectations are by Gauss-Hermite quadrature, of which no term sees two."""
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

        ``weights``: what a density is given beside the values: by component, the probability of its value for every member, and
        1 where that is the first value, else 0; ``name``: of the term; ``term``: elementwise, in nats. Returns the term's share
        of a sum over all values; terms that do not see a component count with its first value.
        """
        for component, names in self.cells:
            own, first = weights[component]
            term = term * (own if name in names else first)
        return term

    @property
    def exact(self) -> bool:
        """Whether nothing is drawn: closed form, quadrature in components or over predictors, or a fixed rule."""
        return not self.drawn and self.design != "random"

    @property
    def closed(self) -> bool:
        """Whether every expectation is in closed form."""
        return self.exact and not (self.by_nodes or self.by_predictors or self.by_rule)

    @property
    def evidence(self) -> str:
        """How the claims are known: "proved" for all values of all latents, "found" at a few, or "" where there are none."""
        claimed = [role for role in self.roles if role.kind not in ("draws", "rule")]
        if not claimed:
            return ""
        return "proved" if self.design in ("all", "random") and all(role.proved for role in claimed) else "found"

    def __str__(self) -> str:
        parts = [f"conjugate in {', '.join(self.conjugate)}"] if self.conjugate else []
        others = (*self.by_nodes, *self.by_predictors, *self.by_points)
        parts += [f"not conjugate in {', '.join(others)}"] if others else []
        return "; ".join(parts) or "constant"

    @property
    def expectation(self) -> str:
        """In words, how expectations are taken."""
        parts = [f"quadrature in {', '.join(self.by_nodes)}"] if self.by_nodes else []
        parts += [f"quadrature over the predictors of {', '.join(self.by_predictors)}"] if self.by_predictors else []
        parts += [f"{self.rule} in {', '.join(self.by_rule)}"] if self.by_rule else []
        signs = " and of signs" if self.design == "random" else ""
        parts += [f"draws of {', '.join(self.drawn)}{signs}"] if self.drawn else ["drawn signs"] if signs else []
        parts += [f"by values in {', '.join(self.by_values)}"] if self.by_values else []
        return "; ".join(parts) or "closed form"


# --------------------------------------------------------------------------------------------------------- sign designs
# Sign designs: rows of +1 and -1 over which low-order products of signs average to zero.
#
# An average over all combinations of signs is exact for every function of them, and takes 2^K evaluations. A function
# in which at most three signs meet in any product has the same average over an orthogonal array of strength 3, which
# takes about 2 K: the rows of a Hadamard matrix and their negatives.

# Signs up to which all combinations are taken without asking for more structure.
FEW_SIGNS = 4
# Signs up to which all combinations are taken where more than five meet in a product.
MANY_SIGNS = 9
# Signs that an array of strength 5 is made for: 512 rows of it.
MOST_OF_FIVE = 16
# Irreducible polynomials of the degrees 3 and 4 over the field of two elements, as binary numbers.
_POLYNOMIALS = {3: 0b1011, 4: 0b10011}


def all_signs(count: int) -> np.ndarray:
    """All combinations of ``count`` signs, Float[2^count count]."""
    rows = list(itertools.product([1.0, -1.0], repeat=count))
    return np.asarray(rows).reshape(2**count, count)


def strength_three(count: int) -> np.ndarray:
    """An orthogonal array of strength 3.

    ``count``: signs, K >= 1. Returns Float[R K] with R the power of two from 2 K on: every product of one, two or three
    different columns sums to zero.

    References:
        Hedayat, Sloane and Stufken, Orthogonal Arrays, 1999, theorem 7.5.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < count:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.concatenate([matrix, -matrix])[:, :count]


def strength_five(count: int) -> np.ndarray:
    """An orthogonal array of strength 5, of the dual of an extended code that corrects two errors.

    ``count``: signs, K from 1 to 16. Returns Float[R K] with R = 128 up to eight signs, else 512: every product of one to five
    different columns sums to zero. Row u has ``(-1)^(u . v_c)`` in column c, where ``v_c`` holds the bits of ``1``, ``c`` and
    ``c^3`` in a field of 8 or 16 elements: any five of those vectors are independent.

    References:
        Hedayat, Sloane and Stufken, Orthogonal Arrays, 1999, sections 4.3 and 5.7. MacWilliams and Sloane, The Theory of
        Error-Correcting Codes, chapter 7.
    """
    degree = 3 if count <= 8 else 4
    polynomial, size = _POLYNOMIALS[degree], 1 << degree

    def times(a: int, b: int) -> int:
        found = 0
        for bit in range(degree):
            found ^= (a << bit) * (b >> bit & 1)
        for bit in reversed(range(degree, 2 * degree - 1)):
            found ^= (polynomial << bit - degree) * (found >> bit & 1)
        return found

    vectors = np.asarray([1 << 2 * degree | c << degree | times(c, times(c, c)) for c in range(size)][:count])
    rows = np.arange(2 * size**2)[:, None] & vectors
    return 1.0 - 2.0 * (np.bitwise_count(rows.astype(np.uint64)) % 2)


def joint_design(count: int, found: Collection[FactorStructure]) -> str:
    """The cheapest design of signs that is exact for all factors that were found so, each at its own rows.

    ``count``: signs of all components that any of them sees; ``found``: their structures. Returns a word as of
    :class:`FactorStructure`; "random" where one of them has none, or all combinations are too many.
    """
    wanted = max(one.strength for one in found)
    if not count:
        return "all"
    if wanted <= 3 and len(strength_three(count)) < 2**count:
        return "strength 3"
    if wanted <= 5 and count <= MOST_OF_FIVE and len(strength_five(count)) < 2**count:
        return "strength 5"
    return "all" if wanted < math.inf and count <= MANY_SIGNS else "random"


# ----------------------------------------------------------------------------------------------------------- mean space

# Fewest antithetic pairs of sign rows where no fixed design is known to be exact.
_RANDOM_PAIRS = 16
# Nodes of Gauss and Hermite's rule in a normal latent that is not conjugate, before those that count for nothing are left out.
_NUM_NODES = 32
# Points evaluated together.
_TOGETHER = 64
# How many times as many draws are taken of what a factor jumps in: of 16 a threshold's posterior was .2 sds off after 100 rounds.
_BY_VALUES = 16


class Laws(NamedTuple):
    """What a density is given of the components that it sees through predictors."""

    # Coordinates by component.
    coordinates: dict[str, Any]
    # What the values of the others count in the average over these, where the mean of all is 1.
    share: Any = 1.0


class RulePoints(NamedTuple):
    """Points over the levels of all components that a fixed rule is in."""

    # Levels of a standard normal, which of them every point has along each axis, and what it counts in the mean over points.
    levels: Float[Array, "L"]
    index: Int[Array, "S axes"]
    shares: Float[Array, "S"]


@dataclasses.dataclass(frozen=True)
class MeanSpace:
    """Takes expectations of one kind of factor: its structure beside the family of q.

    ``num_draws``: draws of the latents that are drawn; ``points``: what takes the place of a fixed rule's own.
    """

    family: ProductFamily
    structure: FactorStructure
    num_draws: int
    points: RulePoints | None = None

    def _components(self, kind: str) -> list[tuple[LatentRole, Any]]:
        families = dict(self.family.components)
        return [(role, families[role.name]) for role in self.structure.roles if role.kind == kind]

    def variables(self, q: ProductNatural) -> tuple[dict[str, dict], dict[str, Any]]:
        """What the expectation is differentiated in.

        ``q``: natural parameters. Returns ``(variables, rest)``, dicts of dicts by component: coordinates of conjugate
        components, naturals of those at points and probabilities of those summed over; and, of the components whose pairs are taken
        at an anchor, how far q's own coordinates are from it, with any value of absent ones.
        """
        coordinates, beyond = {}, {}
        probs = {role.name: _values(f).probs(q.parts[role.name]) for role, f in self._components("sum")}
        for role, family in self._components("exact"):
            rule, natural = _rule(family), q.parts[role.name]
            own = rule.coordinates(natural)
            # Continued linearly in all members at once, which is exact where no term has two of them. The slope of an expectation
            # over predictors is not differentiated again.
            if rule.anchored and role.single and not self.structure.terms:
                at = rule.anchor(natural)
                beyond[role.name] = jax.tree.map(jnp.subtract, own, at)
                own = at
            coordinates[role.name] = own
        for role, family in self._components("predictors"):
            coordinates[role.name] = _rule(family).coordinates(q.parts[role.name])
        for role, family in self._components("quadrature"):
            coordinates[role.name] = _rule(family).node_coordinates(q.parts[role.name])
        drawn = {name: q.parts[name] for name in self.structure.by_points}
        fixed = {role.name: _typical(family, q.parts[role.name]) for role, family in self._components("absent")}
        variables = {"coordinates": coordinates, "natural": drawn}
        return variables | ({"probs": probs} if probs else {}), {"beyond": beyond, "fixed": fixed}

    def average(
        self,
        variables: dict[str, dict],
        rest: dict[str, Any],
        density: Callable[..., Array],
        key: Any,
        rows_key: Any = None,
    ) -> Float[Array, ""]:
        """``E_q[f]`` in nats.

        ``variables``: as :meth:`variables` gives them, or where they are moved to; ``rest``: what :meth:`variables` gives
        beside them; ``density``: f, of a dict of values by component; where components are summed over, of a dict of weights
        besides, which it hands to :meth:`FactorStructure.weigh` with each of its terms; where components are seen through
        predictors, of ``laws=`` besides (:class:`Laws`), and then it is f's expectation over them; ``key``: for
        draws; not used where there are none; ``rows_key``: for draws of what belongs to rows, where it differs from one call to
        another. Returns the expectation.
        """
        return self.left_over(variables, rest, density, key, rows_key, {})[1]

    def left_over(
        self,
        variables: dict[str, dict],
        rest: dict[str, Any],
        density: Callable[..., Array],
        key: Any,
        rows_key: Any,
        sites: Mapping[str, Any],
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """``E_q[f - <site, T>]`` over common points, and ``E_q[f]``, in nats.

        What a factor's site says of it is known without draws. Taken away here, and given back to the message, only what the
        site leaves over is estimated, with less noise the better the site fits. The value, too, has the known part in closed
        form. ``variables``: as for :meth:`average`; ``rest``: as for :meth:`average`; ``density``: as for :meth:`average`;
        ``key``: as for :meth:`average`; ``rows_key``: as for :meth:`average`; ``sites``: natural parameters by component, of
        some that are at points. Returns both; the first less the base measure.
        """
        found, shares = self._points_of(variables["natural"], key, rows_key)
        draws = {name: own for name, (own, _) in found.items()}
        value = self._average(variables, rest, density, self.signs(key), draws, shares)
        families, known, exact = dict(self.family.components), jnp.zeros(()), jnp.zeros(())
        for name, site in sites.items():
            family = base_family(families[name])
            average = jax.tree.map(lambda x: _mean_of(x, shares), found[name][1])
            known = known + jnp.sum(family.inner(site, average))
            exact = exact + jnp.sum(family.inner(site, family.natural_to_mean(variables["natural"][name])))
        if self.structure.by_values:
            value = jnp.mean(value) + self._of_jumps(variables["natural"], found, value, sites)
        return value - known, value - known + exact

    def _of_jumps(self, natural: dict, found: dict, values: Float[Array, "S"], sites: Mapping[str, Any]) -> Array:
        """Zero, with the derivative of ``E_q[f - <site, T>]`` in the naturals of components that f jumps in.

        ``Cov(T, f - <site, T>)`` over the draws, which no derivative of f is asked for: that of the expectation of a function
        that its draws leave as it is, by the score of q (Salimans and Knowles, Fixed-Form Variational Posterior Approximation
        through Stochastic Linear Regression, 2013, section 3, for the site's own statistics as control variates).
        """
        families, count, score = dict(self.family.components), values.shape[0], jnp.zeros(())

        def along(name: str, eta: Any) -> Float[Array, "S"]:
            family = base_family(families[name])
            return jax.vmap(lambda own: jnp.sum(family.inner(eta, own)))(found[name][1])

        left = jax.lax.stop_gradient(values - sum((along(n, site) for n, site in sites.items()), start=jnp.zeros(())))
        for name in self.structure.by_values:
            # Draws of these do not move with q.
            score = score + jnp.sum((left - jnp.mean(left)) * along(name, natural[name])) / max(count - 1, 1)
        return score - jax.lax.stop_gradient(score)

    def _average(
        self, variables: dict, rest: dict, density: Callable[..., Array], signs: Array, draws: dict, parts: Any
    ) -> Array:
        """The average over all that is not given, or, where the factor jumps in what is drawn, one for every draw.

        ``parts``: what each point counts in the mean over them; None where all count alike.
        """
        by_draw = bool(self.structure.by_values)
        probs = variables.get("probs", {})
        cells, by_nodes = all_values({n: x.shape[-1] for n, x in probs.items()}), self._components("quadrature")
        seen = self.structure.by_predictors
        nodes, shares = (jnp.asarray(x, signs.dtype) for x in _nodes(signs.dtype.name))
        count = len(nodes) if by_nodes else 1

        def at(coordinates: dict) -> Array:
            def one(index: tuple) -> Array:
                row, draw, cell, node = index
                part = None if parts is None else parts[draw]
                return settled(jax.tree.map(lambda x: x[draw], draws), part, row, cell, node)

            def settled(drawn: dict, part: Any, row: Any, cell: Any, node: Any) -> Array:
                values = rest["fixed"] | drawn | self.at_signs(coordinates, signs[row])
                for role, family in by_nodes:
                    # The same node in all of them: every term sees one at most.
                    values[role.name] = _rule(family).at_nodes(coordinates[role.name], nodes[node])
                share = shares[node] if by_nodes else 1.0
                if part is not None:
                    share = share * part
                return share * weighted(values, cell, share)

            def weighted(values: dict, cell: Any, share: Any) -> Array:
                laws = {"laws": Laws({n: coordinates[n] for n in seen}, share)} if seen else {}
                values |= {n: coordinates[n].loc for n in seen}
                if not probs:
                    return density(values, **laws)
                chosen = {n: jnp.asarray(cells)[cell, i] for i, n in enumerate(probs)}
                values |= {n: jnp.full(probs[n].shape[:-1], k) for n, k in chosen.items()}
                return density(values, {n: (probs[n][..., k], 1.0 * (k == 0)) for n, k in chosen.items()}, **laws)

            points = len(jax.tree.leaves(draws)[0]) if draws else 1
            counts = len(signs), points, len(cells), count
            if draws and np.prod(counts) == counts[1] <= _TOGETHER:
                # Looking draws up by an index would cost more than what is done with them.
                found = jax.vmap(lambda own, part: settled(own, part, 0, 0, 0))(draws, parts)
                return found if by_draw else jnp.mean(found)
            index = tuple(x.reshape(-1) for x in np.indices(counts))
            found = in_batches(one, index, _TOGETHER)
            return counts[2] * (jnp.mean(found.reshape(counts), axis=(0, 2, 3)) if by_draw else jnp.mean(found))

        return _continued(at, variables["coordinates"], rest["beyond"])

    def message(
        self,
        q: ProductNatural,
        variables: dict[str, dict],
        gradient: dict[str, dict],
        names: Collection[str] | None = None,
    ) -> ProductNatural:
        """``dF/dmu`` as natural parameters, from the derivative in the variables.

        ``q``: natural parameters; ``variables``: where the derivative was taken; ``gradient``: the derivative; ``names``:
        components that are asked for; None for all. Returns natural parameters; zero for absent components.
        """
        found = self._messages(q, variables, gradient)
        return ProductNatural({n: found(n) for n, _ in self.family.components if names is None or n in names})

    def _messages(self, q: ProductNatural, variables: dict, gradient: dict) -> Callable[[str], Any]:
        kinds = {role.name: role.kind for role in self.structure.roles}
        families = dict(self.family.components)

        def of(name: str) -> Any:
            kind, family = kinds[name], families[name]
            if kind == "quadrature":
                return _rule(family).node_message(variables["coordinates"][name], gradient["coordinates"][name])
            if kind in ("exact", "predictors"):
                own = variables["coordinates"][name]
                return _rule(family).message(own, gradient["coordinates"][name])
            if kind in ("draws", "rule"):
                own, slope = q.parts[name], gradient["natural"][name]
                like = jax.tree.structure(jax.eval_shape(family.natural_to_mean, own))
                return family.fisher_solve(own, jax.tree.unflatten(like, jax.tree.leaves(slope)))
            if kind == "sum":
                return _values(family).message(gradient["probs"][name])
            return jax.tree.map(jnp.zeros_like, q.parts[name])

        return of

    def signs(self, key: Any) -> Float[Array, "R K"]:
        """Rows of the design of signs. ``key``: for rows that are drawn."""
        count = self.structure.num_signs
        if self.structure.design == "random":
            pairs = max(_RANDOM_PAIRS, self.num_draws)
            half = jax.random.rademacher(jax.random.fold_in(key, 1), (pairs, count)).astype(float)
            return jnp.concatenate([half, -half])
        rows = {"all": all_signs, "strength 3": strength_three, "strength 5": strength_five}[self.structure.design](
            count
        )
        return jnp.asarray(rows, jnp.result_type(float))

    @property
    def fixed(self) -> RulePoints | None:
        """The points of the fixed rule, or what takes their place; None where there is none."""
        if self.points is not None or not self.structure.by_rule:
            return self.points
        return rule_points(self.structure.nodes, rule_axes(self.family, self.structure.roles))

    def _points_of(
        self, naturals: Mapping[str, Any], key: Any, rows_key: Any = None
    ) -> tuple[dict[str, tuple[Array, Any]], Array | None]:
        """Points by component, with the statistics of their members, and what each counts in the mean over them.

        Those of draws, which all count alike, or of a fixed rule.
        """
        at = self.fixed
        if at is None:
            return self._draws(naturals, key, rows_key), None
        found, begin = {}, 0
        for role, family in self._components("rule"):
            rule, natural = _levels(family), naturals[role.name]
            u, own = rule.at_levels(natural, at.levels), level_shape(family, role)
            count = int(np.prod(own))
            picked = at.index[:, begin : begin + count].reshape(-1, *own)
            picked = jnp.broadcast_to(picked, (len(picked), *u.shape[1:]))
            u = rule.of_levels(jnp.take_along_axis(u, picked, axis=0))
            found[role.name] = rule.value(natural, u), rule.statistics(natural, u)
            begin += count
        return found, at.shares

    def _draws(self, naturals: Mapping[str, Any], key: Any, rows_key: Any = None) -> dict[str, tuple[Array, Any]]:
        """Draws by component, with the statistics of their members."""
        families, found = dict(self.family.components), {}
        belongs = {role.name for role in self.structure.roles if role.axis is not None}
        for i, role in enumerate(sorted(self.structure.roles, key=lambda role: role.name)):
            if (name := role.name) in naturals:
                own = rows_key if rows_key is not None and name in belongs else key
                family, own_key = base_family(families[name]), jax.random.fold_in(own, 2 + i)
                natural = jax.lax.stop_gradient(naturals[name]) if role.by_values else naturals[name]
                count = self.structure.draws(self.num_draws)
                found[name] = family.sample_with_statistics(natural, own_key, (count,))
        return found

    def at_signs(self, coordinates: dict[str, Any], signs: Float[Array, "K"]) -> dict[str, Array]:
        """Values of the conjugate components at one row of signs. ``coordinates``: by component, as of :meth:`variables`."""
        found = {}
        for role, family in self._components("exact"):
            rule, own = _rule(family), signs[role.first : role.first + role.signs]
            found[role.name] = rule.points(coordinates[role.name], sign_shape(family, role, own))
        return found


def _continued(at: Callable[[dict], Array], coordinates: dict, beyond: Mapping[str, Any]) -> Array:
    """A function of coordinates, continued linearly in those of some components as far as they are beyond."""
    if not beyond:
        return at(coordinates)
    name, *others = beyond

    def along(own: Any) -> Array:
        return _continued(at, coordinates | {name: own}, {n: beyond[n] for n in others})

    # The slope is the same everywhere: its derivative in these coordinates would be rounding times a long way. Their own
    # derivative comes through the tangent, which they leave as it is, so that one evaluation serves for both.
    own, fixed = coordinates[name], jax.lax.stop_gradient(coordinates[name])
    tangent = jax.tree.map(lambda far, x, at: far + (x - at), beyond[name], own, fixed)
    value, slope = jax.jvp(along, (fixed,), (tangent,))
    return value + slope


def _mean_of(points: Array, shares: Array | None) -> Array:
    """The mean over points."""
    if shares is None:
        return jnp.mean(points, axis=0)
    return jnp.mean(points * shares.reshape(-1, *(1,) * (points.ndim - 1)), axis=0)


def rule_points(nodes: int, axes: int, other: bool = False) -> RulePoints:
    """The points of a product of Gauss and Hermite's rules, or of one of degree five.

    ``nodes``: along every axis; 0 for the other rule; ``axes``: how many; ``other``: whether what such a rule is held to is
    wanted: one with a node more, or with other points.
    """
    dtype = jnp.result_type(float)
    if nodes:
        nodes += other
        levels = np.polynomial.hermite_e.hermegauss(nodes)[0]
        index, shares = _product_rule(nodes, axes)
    else:
        rule = fifth_degree(axes, axes + 2 if other else 3)
        levels, index = np.unique(np.round(rule.eps, 12), return_inverse=True)
        index, shares = index.reshape(rule.eps.shape), rule.weight * len(rule.weight)
    return RulePoints(jnp.asarray(levels, dtype), jnp.asarray(index), jnp.asarray(shares, dtype))


@cache
def _product_rule(nodes: int, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Which node each point has along every axis, and what points count in the mean over them.

    Points that count for next to nothing are left out, where densities would overflow.
    """
    index = np.indices((nodes,) * axes).reshape(axes, -1).T
    weight = np.polynomial.hermite_e.hermegauss(nodes)[1]
    weights = np.prod((weight / weight.sum())[index], axis=1)
    kept = weights > NEGLIGIBLE["float32"]
    return index[kept], weights[kept] / weights[kept].mean()


def latin_cube(key: Any, count: int, axes: int) -> RulePoints:
    """Points of a Latin hypercube: levels one in each of as many parts of equal probability, and each along every axis once.

    ``key``: a random key; ``count``: of points; ``axes``: how many. Means over them are without bias, and exact but for a
    rest where a function is a sum of functions of one level each (McKay, Beckman and Conover, Technometrics 21 (1979)).
    """
    dtype, keys = jnp.result_type(float), jax.random.split(key)
    within = jnp.clip(jax.random.uniform(keys[0], (count,), dtype), 1e-3, 1 - 1e-3)
    levels = ndtri((jnp.arange(count, dtype=dtype) + within) / count)
    index = jnp.argsort(jax.random.uniform(keys[1], (count, axes), dtype), axis=0)
    return RulePoints(levels, index, jnp.ones((count,), dtype))


def level_shape(family: Any, role: LatentRole) -> tuple[int, ...]:
    """Axes of a component in a fixed rule: members that no term sees two of share theirs."""
    own, levels = _own_members(family, role) or (1,) * len(members_of(family)), _levels(family).levels
    return (*own, levels) if levels else own


def rule_axes(family: ProductFamily, roles: Collection[LatentRole]) -> int:
    """Axes of the rule in all components that have this role."""
    families = dict(family.components)
    return sum(int(np.prod(level_shape(families[r.name], r))) for r in roles if r.kind == "rule")


def _levels(family: Any) -> Any:
    found = levels_of(family)
    assert found is not None  # only components with levels are given the role "rule"
    return found


@cache
def _nodes(dtype_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in a normal latent, and what each counts in the mean over them; at the outermost ones densities would overflow."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    kept = weights > NEGLIGIBLE[dtype_name] * weights.sum()
    return nodes[kept], weights[kept] / weights[kept].mean()


def all_values(sizes: Mapping[str, int]) -> np.ndarray:
    """All combinations of the values of some components.

    Returns int[C J], one column per component; one empty row where there are none.
    """
    return (
        np.stack([x.reshape(-1) for x in np.indices(tuple(sizes.values()))], axis=-1)
        if sizes
        else np.zeros((1, 0), int)
    )


def sign_shape(family: Any, role: LatentRole, signs: Array) -> Array:
    """A component's signs in a shape that broadcasts against its members."""
    axes, members = _rule(family).axes, _own_members(family, role)
    return signs.reshape(*members, axes) if axes else signs.reshape(members)


def count_signs(family: Any, role: LatentRole) -> int:
    """Signs that a component takes in a design."""
    return int(np.prod(_own_members(family, role))) * max(_rule(family).axes, 1)


def _own_members(family: Any, role: LatentRole) -> tuple[int, ...]:
    """Axes along which members have signs or levels of their own; no term sees two rows, so that rows share theirs."""
    if role.single:
        return ()
    shared = {role.axis, *role.apart}
    return tuple(1 if i in shared else size for i, size in enumerate(members_of(family)))


def _values(family: Any) -> Any:
    values = support_of(family)
    assert values is not None  # only components with finitely many values are ever given the role "sum"
    return values


def _rule(family: Any) -> Any:
    rule = pair_rule(family)
    assert rule is not None  # only components with a rule are given the roles "exact", "quadrature" and "predictors"
    return rule


def _typical(family: Any, natural: Any) -> Array:
    """Any value of a component that does not matter: one of its pair, and a draw where it has none."""
    rule = pair_rule(family)
    if rule is None:
        return jax.lax.stop_gradient(family.sample(natural, jax.random.key(0)))
    signs = jnp.ones((rule.axes,) if rule.axes else (), jax.tree.leaves(natural)[0].dtype)
    return jax.lax.stop_gradient(rule.points(rule.anchor(natural), signs))
