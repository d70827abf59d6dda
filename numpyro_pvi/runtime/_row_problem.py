"""The one problem where sites are two numbers per row: what a group's part of them is, and where they start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compiling import Program
from .._state import Plan
from ..expectations import RULES, Expected, RowNumbers, RowNumbersProgram
from ..factors import GroupMasks, ModelCall, Packing, places_of_elements, read_rows
from ..families import GaussianNatural, RowFamily, RowMoments, RowPrior
from ..schedules import Rule
from ..sites import SiteStack, take
from ..solvers import LocalSolver
from ._factors import FactorData
from ._local import LocalProblem
from ._refinement import first_rule


@dataclasses.dataclass(frozen=True, eq=False)
class RowProblem(LocalProblem):
    """The factors of a model whose sites are two numbers per row.

    The sites of all groups lie in one vector over rows, ``SiteStack.groups`` with a leading axis of 1: a group's site are its
    rows' two numbers, and zero for others. ``family`` has the prior and the rows' vectors in it, and ``program`` reads all rows
    in one pass. ``places``: where rows are on several devices, where the elements of a device's rows stand among all.
    """

    family: Any
    places: Int[Array, "L"] | None = None

    flat = True

    def split(self, groups: GaussianNatural) -> GaussianNatural:
        """Each group's numbers, zero in the rows of others."""
        return jax.tree.map(lambda x: jnp.where(self._mine, x, 0.0), groups)

    def merge(self, sites: GaussianNatural) -> GaussianNatural:
        """The rows' numbers, each of its own group's site."""
        return jax.tree.map(lambda x: jnp.sum(jnp.where(self._mine, x, 0.0), axis=0, keepdims=True), sites)

    def shift(self, change: GaussianNatural, moments: RowMoments) -> Float[Array, "M D"]:
        """First-order change of the latents' means by the change of each group's rows, in sds."""
        family, owner = self.family, self._owner
        by_row = family.prior.root * family.pull(take(change, 0), moments.loc)[:, None]
        # What is nobody's goes to a place beyond the last.
        zero = jnp.zeros((self.num_groups + 1, by_row.shape[1]), by_row.dtype)
        force = zero.at[jnp.where(owner < 0, self.num_groups, owner)].add(by_row)[: self.num_groups]
        return family.covariance_product(moments, force) / family.sds(moments)

    def expect(self, chunk, *, moments, probe, level, noise, clip) -> RowNumbers:
        """What quadrature says of rows; ``chunk``: which rows count.

        Where rows are on several devices, each looks at its own, and tells their numbers.
        """
        law = moments.loc, jnp.sum(moments.scale**2, axis=-1), chunk
        if self.places is None:
            return self.program.rows(*law, level, clip)
        count, at = chunk.shape[0], self.places
        loc, variance, mine = (x[at] for x in law)
        own = self.program.rows(loc, variance, mine & (at < count), level, clip)
        return self.runtime.total(jax.tree.map(lambda x: jnp.zeros((count,), x.dtype).at[at].set(x, mode="drop"), own))

    def sum_groups(self, expect: Callable, local: Any = None, apart: Any = None) -> Expected:
        """One pass over all rows, summed by group."""
        return self.program.sums(expect(self._owner >= 0), self._owner, self.num_groups)

    def sum_group(self, expect: Callable, index: Any) -> Expected:
        """One pass over all rows, of which one group's count."""
        mine = self._owner == index
        return take(self.program.sums(expect(mine), jnp.where(mine, 0, -1), 1), 0)

    def rest(self, moments: RowMoments) -> Float[Array, ""]:
        """Minus KL from the prior to q, in nats."""
        return -self.family.divergence(moments)

    @property
    def _owner(self) -> Int[Array, "P"]:
        """Each row's group; -1 for those that are nobody's."""
        return self.family.prior.group

    @property
    def _mine(self) -> Bool[Array, "M P"]:
        return self._owner == jnp.arange(self.num_groups)[:, None]


def row_problem(
    plan: Plan,
    call: ModelCall,
    prior: RowPrior,
    solver: LocalSolver,
    packing: Packing | GroupMasks,
    num_rules: int,
    runtime: Any,
) -> RowProblem:
    """The factors, ready to be evaluated.

    ``prior``: the prior as the rows see it. Returns the problem; of the model only what rows' densities read is evaluated.
    """
    terms, count = plan.partition.terms, prior.group.shape[0]
    family, rows = RowFamily(prior), read_rows(call, terms, prior.loc)
    program = RowNumbersProgram(terms, rows, num_rules, family.dim)
    nothing, every = family.zeros((), prior.root.dtype), jnp.ones((family.dim,), bool)
    zero = jnp.zeros((), prior.root.dtype)
    data = FactorData(packing.chunks, packing.chunk_group, packing.offsets, None, nothing, every, zero)
    placed = isinstance(packing, Packing) and packing.places is not None
    places = places_of_elements(packing, terms, rows, count) if placed else None
    given: Any = (family, solver, runtime, program, None, False, num_rules, data)
    return RowProblem(*given, labels=plan.partition.table.labels, places=places)


# --------------------------------------------------------------------------------------------------------------- starts
# Where sites of two numbers per row start: at their factors' curvature under the prior, or under a narrower Gaussian.
#
# Under a prior whose predictors have a wide law, a log-linear factor is two straight lines with a kink. Looked at from
# the prior's location alone its curvature is that of the kink, many times what it will be where q ends, and from there
# q reaches out by a few units of the predictor a round.

# Largest sds of predictors, in units of the link's scale, under which factors are looked at between the prior's own and none.
_BETWEEN = (96.0, 24.0)


def first_numbers(problem: LocalProblem, at_prior: Any) -> tuple[SiteStack, Rule]:
    """One natural-gradient step of all groups from that Gaussian around the prior's location after which the ELBO is highest.

    The Gaussians are the prior, the prior at a single point, and between them the prior narrowed until no predictor's sd is
    above one of a few limits. ``problem``: the factors, with all quadrature rules compiled in; ``at_prior``: the prior as
    moments. Returns sites, unit ones where no step leaves an ELBO, and the quadrature rule to begin with.
    """
    family: Any = problem.family
    finest, dtype = len(RULES) - 1, problem.dtype
    sd = jnp.sqrt(jnp.max(jnp.where(family.prior.group >= 0, jnp.sum(at_prior.scale**2, axis=-1), 0.0)))
    between = [jnp.minimum(1.0, limit / jnp.maximum(sd, 1e-30)) for limit in _BETWEEN]
    shares = jnp.stack([jnp.ones((), dtype), *between, jnp.zeros((), dtype)]).astype(dtype)

    def look_at(moments: Any, clip: Any) -> Expected:
        return problem.sum_groups(problem.looking(moments, finest, None, clip))

    def look(share: Float[Array, ""]) -> tuple:
        around = at_prior._replace(scale=share * at_prior.scale)
        groups = problem.finite_sites(look_at(around, share < 1).target)
        return groups, *after(groups)

    def after(groups) -> tuple[Float[Array, ""], Bool[Array, ""], Float[Array, ""]]:
        moments = family.moments(take(groups, 0))
        found = look_at(moments, False)
        elbo = jnp.sum(found.value) + problem.rest(moments)
        return elbo, moments.valid & jnp.isfinite(elbo), jnp.max(found.spread)

    groups, elbos, valid, spread = jax.lax.map(look, shares)
    best = jnp.argmax(jnp.where(valid, elbos, -jnp.inf))
    usable = jnp.any(valid)
    chosen = jax.tree.map(lambda x: jnp.where(usable, x[best], 0.0), groups)
    return SiteStack(chosen, None), first_rule(dtype, jnp.where(usable, spread[best], 0.0))


@Program
def rows_proper(prior: RowPrior, sites: SiteStack, count: Any) -> Any:
    """Whether q without each group's site is normalisable; ``count`` is an array of M zeros."""
    rows, family = jax.tree.map(lambda x: x[0], sites.groups), RowFamily(prior)

    def proper(index):
        return family.in_domain(jax.tree.map(lambda x: jnp.where(prior.group == index, 0.0, x), rows))

    return jax.lax.map(proper, jnp.arange(count.shape[0]))
