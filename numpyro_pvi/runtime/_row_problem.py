"""The factors of a model whose sites are two numbers per row, as a schedule sees them, and where those start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compiling import Program
from .._numerics import all_finite
from .._state import Plan
from ..errors import PVIError
from ..expectations import RULES, Expected, RowNumbers, RowNumbersProgram
from ..factors import GroupMasks, ModelCall, Packing, places_of_elements, read_rows
from ..families import GaussianNatural, RowFamily, RowMoments, RowPrior
from ..schedules import Evaluation, ProblemDefaults, RoundCarry, Rule
from ..sites import SiteStack, cavity, damp, posterior, take
from ..solvers import LocalResult, LocalSolver
from ._factors import GroupFactor
from ._refinement import (
    cheaper_rule,
    escalate,
    escalated,
    first_rule,
    next_rule,
    relative_error,
    rule_at_start,
)


@dataclasses.dataclass(frozen=True)
class _NoOthers:
    """What a schedule may ask of a problem's arrays: no group stands beside the prior, which covers every latent."""

    exact: Bool[Array, "D"]
    others: None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RowProblem(ProblemDefaults):
    """Implements :class:`numpyro_pvi.schedules.Problem` for sites kept by rows.

    The sites of all groups lie in one vector over rows, ``SiteStack.groups`` with a leading axis of 1: a group's site are its
    rows' two numbers, and zero for others. Exact: quadrature only, no draws, no prior factor.

    ``family``: q, with the prior and the rows' vectors; ``program``: expectations of all rows; ``runtime``: where rows
    are on several devices, what sums over them; ``places``: there, where the elements of a device's rows stand among all.
    """

    family: RowFamily
    solver: LocalSolver
    program: RowNumbersProgram
    labels: tuple
    num_groups: int
    num_rules: int
    data: _NoOthers
    runtime: Any = None
    places: Int[Array, "L"] | None = None

    # Sites of all groups in one vector: schedules that visit groups one by one leave the sweep to the problem.
    flat = True
    prior_program = stream = None
    redraws = can_switch = chained = False

    @property
    def dtype(self) -> Any:
        """The floating dtype of q."""
        return self.family.prior.root.dtype

    @property
    def prior_natural(self) -> GaussianNatural:
        """Nothing: the family has the prior in it."""
        return self.family.zeros((), self.dtype)

    def draws_of(self, *args: Any) -> None:
        """There are none."""

    def empty_sites(self, prior_site: Any) -> SiteStack:
        """Unit sites."""
        return SiteStack(self.family.zeros((1,), self.dtype), prior_site)

    def finite_sites(self, natural: GaussianNatural) -> GaussianNatural:
        """The sites, with unit ones for groups of which some row is not finite."""
        return _where(self._finite(natural), natural, self.family.zeros((1,), self.dtype))

    # ------------------------------------------------------------------------------------------------- evaluations

    def evaluate(
        self,
        sites: SiteStack,
        rule: Rule,
        noise: Any,
        probe: Any = None,
        again: bool | Bool[Array, ""] = False,
        trial: bool = False,
        hopeless: Any = None,
    ) -> Evaluation:
        """One pass over all rows: see :class:`numpyro_pvi.schedules.Problem`."""
        q = posterior(self.prior_natural, sites)
        moments = self.family.moments(q)
        rule = rule_at_start(rule, again)

        rest = self.rest(moments)

        def at(level):
            groups = self.expect(self.program, moments=moments, level=level, clip=False)
            error = relative_error(groups)
            if hopeless is not None:
                error = jnp.where(jnp.sum(groups.value) + rest < hopeless, 0.0, error)
            return groups, error

        groups, used, error = escalate(at, rule, self.num_rules)
        elbo = jnp.sum(groups.value) + rest
        size = jnp.sum(jnp.abs(groups.value)) + jnp.abs(rest)
        after = next_rule(rule, used, jnp.max(groups.spread))
        return Evaluation(q, moments, groups, None, rest, elbo, size, after, error > rule.tolerance)

    def expect(
        self, program: RowNumbersProgram, *, moments: RowMoments, level: Any, clip: Any, **unused: Any
    ) -> Expected:
        """All groups' expectations under one quadrature rule."""
        group = self.family.prior.group
        return program.sums(self._rows(program, moments, group >= 0, level, clip), group, self.num_groups)

    def _rows(
        self, program: RowNumbersProgram, moments: RowMoments, counted: Bool[Array, "P"], level: Any, clip: Any
    ) -> RowNumbers:
        """What quadrature says of every row; where rows are on several devices, each looks at its own, and tells their numbers."""
        law = moments.loc, jnp.sum(moments.scale**2, axis=-1), counted
        if self.places is None:
            return program.rows(*law, level, clip)
        count, at = counted.shape[0], self.places
        loc, variance, mine = (x[at] for x in law)
        own = program.rows(loc, variance, mine & (at < count), level, clip)
        return self.runtime.total(jax.tree.map(lambda x: jnp.zeros((count,), x.dtype).at[at].set(x, mode="drop"), own))

    def sum_groups(self, expect: Callable[[], Expected]) -> Expected:
        """All rows are read at once."""
        return expect()

    def rest(self, moments: RowMoments) -> Float[Array, ""]:
        """Minus KL from the prior to q, in nats."""
        return -self.family.divergence(moments)

    def _factor(self, mine: Bool[Array, "P"], rule: Rule) -> GroupFactor:
        def expected(moments: RowMoments) -> Expected:
            def at(level):
                return self.program.one_group(self._rows(self.program, moments, mine, level, False), mine)

            return escalated(at, rule, self.num_rules)

        return GroupFactor(self.family, False, False, expected)

    # ------------------------------------------------------------------------------------------------------ visits

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Any = None) -> LocalResult:
        """Every group's local solve from the same q; the site is that of all rows."""
        start, solver = carry.evaluation.groups, cast(Any, self.solver)
        old = carry.sites.groups
        if solver.immediate:
            wanted = start.target if solver.step_size == 1.0 else damp(old, start.target, solver.step_size)
            good = self._finite_groups(wanted) & jnp.isfinite(start.value)
            site = _where(good[self._owner] & self._counted, wanted, old)
            return LocalResult(site, carry.solver, jnp.zeros((self.num_groups,), jnp.int32), good)
        q = carry.evaluation.q

        def visit(whole, operands):
            index, state, key = operands
            mine = self.family.prior.group == index
            site = _where(mine, take(old, 0), self.prior_natural)
            factor = self._factor(mine, carry.evaluation.rule)
            result = solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=True)
            return _where(mine, result.site, whole), result._replace(site=None)

        operands = (jnp.arange(self.num_groups), carry.solver, jax.random.split(key, self.num_groups))
        whole, results = jax.lax.scan(visit, take(old, 0), operands)
        return results._replace(site=jax.tree.map(lambda x: x[None], whole))

    def visit_group(
        self,
        index: Any,
        q: Any,
        site: Any,
        state: Any,
        key: Any,
        rule: Rule,
        noise: Any,
        local: Any = None,
        alone: bool = False,
    ) -> tuple[LocalResult, None]:
        """One group's local solve from the current q; its site is zero in others' rows."""
        factor = self._factor(self.family.prior.group == index, cheaper_rule(rule))
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False), None

    def visit_prior(self, *args: Any, **kwargs: Any) -> LocalResult:
        """The prior is held exactly. Raises PVIError always; ``has_prior_factor`` is False."""
        raise PVIError("there is no prior factor: the prior is held exactly.")

    def sweep(
        self, carry: RoundCarry, q: Any, order: Int[Array, "M"], key: Any, damping: float
    ) -> tuple[Any, LocalResult]:
        """Visit all groups, each from the q that the last one left.

        Returns the sites of all rows, and what the visits report in the order of the groups.
        """

        def visit(before, operands):
            q, whole = before
            index, state, key = operands
            mine = self.family.prior.group == index
            site = _where(mine, whole, self.prior_natural)
            result, _ = self.visit_group(index, q, site, state, key, carry.evaluation.rule, None)
            new = damp(site, result.site, damping)
            return (q + (new - site), _where(mine, new, whole)), result._replace(site=None)

        keys = jax.random.split(key, self.num_groups)
        operands = (order, jax.tree.map(lambda x: x[order], carry.solver), keys)
        (_, whole), results = jax.lax.scan(visit, (q, take(carry.sites.groups, 0)), operands)
        back = jnp.argsort(order)
        return jax.tree.map(lambda x: x[None], whole), jax.tree.map(lambda x: x[back], results)

    def natural_gradient_proposal(self, carry: RoundCarry) -> SiteStack:
        """Every row's natural-gradient target at the carry's q; groups that are not finite stay."""
        found = carry.evaluation.groups
        good = self._finite_groups(found.target) & jnp.isfinite(found.value)
        return SiteStack(_where(good[self._owner] & self._counted, found.target, carry.sites.groups), None)

    # ------------------------------------------------------------------------------------------------------- moves

    def moves(self, new: SiteStack, old: SiteStack, after: Evaluation, before: Evaluation) -> tuple[Array, Array]:
        """How far a round moved the latents, in posterior sds.

        ``new``: sites after it; ``old``: sites before it; ``after``: evaluation after it; ``before``: evaluation before it.
        Returns what it is by each group's step, to first order, Float[M]; and altogether, means and log sds.
        """
        family = self.family
        sd = family.latent_sd(after.moments)
        change = jax.tree.map(lambda a, b: (a - b)[0], new.groups, old.groups)
        force = change.precision_mean - change.precision * after.moments.loc
        by_row = family.prior.root * force[:, None]
        zero = jnp.zeros((self.num_groups + 1, by_row.shape[1]), by_row.dtype)
        by_group = zero.at[self._owner].add(by_row)[: self.num_groups]
        shift = family.latent_shift(family.white_shift(after.moments, by_group))
        largest = jnp.max(jnp.abs(self.shifts(after, before)))
        return jnp.max(jnp.abs(shift) / sd, axis=-1), jnp.where(before.moments.valid, largest, jnp.inf)

    def shifts(self, after: Evaluation, before: Evaluation) -> Float[Array, "two_D"]:
        """How far every latent's mean moved between two evaluations, in posterior sds, and its log sd."""
        family, white, white_before = self.family, *(cast(RowMoments, e.moments).white for e in (after, before))
        sd, sd_before = family.latent_sd(after.moments), family.latent_sd(before.moments)
        return jnp.concatenate([family.latent_shift(white - white_before) / sd, jnp.log(sd) - jnp.log(sd_before)])

    # -------------------------------------------------------------------------------------------------------- rows

    @property
    def _counted(self) -> Bool[Array, "P"]:
        return self.family.prior.group >= 0

    @property
    def _owner(self) -> Int[Array, "P"]:
        """Each row's group; M for those that are nobody's."""
        group = self.family.prior.group
        return jnp.where(group < 0, self.num_groups, group)

    def _finite_groups(self, natural: GaussianNatural) -> Bool[Array, "M"]:
        good = jax.vmap(all_finite)(take(natural, 0))
        return jnp.ones((self.num_groups + 1,), bool).at[self._owner].min(good)[: self.num_groups]

    def _finite(self, natural: GaussianNatural) -> Bool[Array, "P"]:
        return self._finite_groups(natural)[self._owner] & self._counted


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
    data = _NoOthers(jnp.ones((family.dim,), bool))
    placed = isinstance(packing, Packing) and packing.places is not None
    places = places_of_elements(packing, terms, rows, count) if placed else None
    labels, num_groups = plan.partition.table.labels, packing.offsets.shape[0] - 1
    return RowProblem(family, solver, program, labels, num_groups, num_rules, data, runtime, places)


def _where(keep: Bool[Array, "P"], new: Any, old: Any) -> Any:
    """Row by row, one or the other."""
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)


# --------------------------------------------------------------------------------------------------------------- starts
# Where sites of two numbers per row start: at their factors' curvature under the prior, or under a narrower Gaussian.
#
# Under a prior whose predictors have a wide law, a log-linear factor is two straight lines with a kink. Looked at from
# the prior's location alone its curvature is that of the kink, many times what it will be where q ends, and from there
# q reaches out by a few units of the predictor a round.

# Largest sds of predictors, in units of the link's scale, under which factors are looked at between the prior's own and none.
_BETWEEN = (96.0, 24.0)


def first_numbers(problem: RowProblem, at_prior: RowMoments) -> tuple[SiteStack, Rule]:
    """One natural-gradient step of all groups from that Gaussian around the prior's location after which the ELBO is highest.

    The Gaussians are the prior, the prior at a single point, and between them the prior narrowed until no predictor's sd is
    above one of a few limits. ``problem``: the factors, with all quadrature rules compiled in; ``at_prior``: the prior as
    moments. Returns sites, unit ones where no step leaves an ELBO, and the quadrature rule to begin with.
    """
    finest, dtype = len(RULES) - 1, problem.dtype
    sd = jnp.sqrt(jnp.max(jnp.where(problem.family.prior.group >= 0, jnp.sum(at_prior.scale**2, axis=-1), 0.0)))
    between = [jnp.minimum(1.0, limit / jnp.maximum(sd, 1e-30)) for limit in _BETWEEN]
    shares = jnp.stack([jnp.ones((), dtype), *between, jnp.zeros((), dtype)]).astype(dtype)

    def look(share: Float[Array, ""]) -> tuple:
        around = at_prior._replace(scale=share * at_prior.scale)
        found = problem.expect(problem.program, moments=around, level=finest, clip=share < 1)
        groups = problem.finite_sites(found.target)
        return groups, *after(groups)

    def after(groups) -> tuple[Float[Array, ""], Bool[Array, ""], Float[Array, ""]]:
        moments = problem.family.moments(jax.tree.map(lambda x: x[0], groups))
        found = problem.expect(problem.program, moments=moments, level=finest, clip=False)
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
