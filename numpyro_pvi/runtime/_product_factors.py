"""The factors of a product of families as schedules see them: every schedule's own rounds, by every solver's own visits.

The likelihood of a group is handed to a solver as a factor whose expectation and natural-gradient target are those of
:class:`ProductProblem`; q, sites and cavities are natural parameters of the product, moves are measured in its Fisher metric.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..expectations import Expected
from ..families import FamilyMoments, ProductFamily, ProductNatural
from ..schedules import Evaluation, RoundCarry, Rule
from ..sites import SiteStack, cavity, posterior, take, tied_site
from ..solvers import LocalResult, LocalSolver
from ._factor import GroupFactor
from ._moments import solver_of_prior
from ._product_moment_choice import SAMPLED_WAYS
from ._product_problem import ProductProblem
from ._product_rows import ProductRows, expected_of
from ._product_tilted import ProductTilted


@dataclasses.dataclass(frozen=True)
class GroupOrder:
    """In which order groups come: implements what :class:`numpyro_pvi.schedules.Stream` is asked for where rows are not."""

    packing: Any
    sizes: tuple[int, ...]

    def first_rows(self) -> Int[Array, "M"]:
        """Index of every group's first row: where its label first appears."""
        return self.packing.first_rows()


@dataclasses.dataclass(frozen=True)
class ProductFactors:
    """Implements :class:`numpyro_pvi.schedules.Problem` for a product of families without latents of the rows' own.

    Args:
        problem: expectations and messages of the factors.
        solver: who refines a site.
        known: which groups had a site before their rows came back; None when none had.
        continued: whether there are sites of groups whose rows are not at hand.
    """

    problem: ProductProblem
    solver: LocalSolver
    known: Bool[Array, "M"] | None = None
    continued: bool = False

    quadratic: bool = dataclasses.field(default=False, init=False)
    units: None = dataclasses.field(default=None, init=False)
    capped: bool = dataclasses.field(default=False, init=False)
    flat: bool = dataclasses.field(default=False, init=False)

    @property
    def family(self) -> ProductFamily:
        """Of q."""
        return self.problem.family

    @property
    def num_groups(self) -> int:
        """M."""
        return self.problem.num_groups

    @property
    def labels(self) -> tuple:
        """Labels of the groups, in the order of every stacked array."""
        return self.problem.plan.partition.table.labels

    @property
    def prior_natural(self) -> ProductNatural:
        """The exactly held prior, times the sites of groups whose rows are not at hand."""
        return self.problem.prior

    @property
    def has_prior_factor(self) -> bool:
        """Whether the prior has a site."""
        return self.problem.plan.prior_factor is not None

    @property
    def matches_moments(self) -> bool:
        """Whether visits match the moments of tilted distributions."""
        return bool(self.problem.plan.tilted)

    @property
    def stochastic(self) -> bool:
        """Whether visits take noisy steps of their own, so that evaluations hold values only."""
        return self.solver.stochastic

    @property
    def tied(self) -> bool:
        """Whether all groups share one site."""
        return self.solver.tied

    @property
    def noisy(self) -> bool:
        """Whether any expectation, or any moment of a tilted distribution, is by draws."""
        return self.problem.plan.noisy or self._sampled

    @property
    def _sampled(self) -> bool:
        """Whether visits are by draws."""
        plan = self.problem.plan
        return not SAMPLED_WAYS.isdisjoint(plan.tilted) if plan.tilted else plan.noisy

    @property
    def stream(self) -> GroupOrder:
        """The order in which groups come."""
        return GroupOrder(self.problem.packing, self.problem.plan.partition.table.sizes)

    def sampled(self, rule: Rule) -> Bool[Array, ""]:
        """Whether visits are by draws, whatever the rule: of the ELBO alone q does not hover."""
        del rule
        return jnp.array(self._sampled)

    def allowance(self, new_sites: SiteStack, new: Any, old_sites: SiteStack, old: Any, step: Any) -> Any:
        """Nothing: values on common draws compare."""
        del new_sites, new, old_sites, old, step
        return 0.0

    def noise(self, key: Any, num_particles: int = 1) -> Any:
        """The key of the draws; how many there are is the solver's."""
        del num_particles
        return key

    def tidy(self, sites: SiteStack) -> SiteStack:
        """The sites without rounding asymmetry."""
        even = self.family.symmetrise
        return SiteStack(even(sites.groups), None if sites.prior is None else even(sites.prior), sites.local)

    def local_proposal(self, carry: RoundCarry, moved: Bool[Array, "M"]) -> None:
        """Rows have no latents of their own."""
        del carry, moved

    def refined(self, evaluation: Evaluation, results: LocalResult) -> LocalResult:
        """The results as they are."""
        del evaluation
        return results

    def evaluate(
        self,
        sites: SiteStack,
        rule: Rule,
        noise: Any,
        probe: Any = None,
        again: bool = False,
        trial: bool = False,
        hopeless: Any = None,
    ) -> Evaluation:
        """One pass over all groups: see :class:`numpyro_pvi.schedules.Problem`."""
        del probe, again, trial, hopeless
        q = posterior(self.prior_natural, sites)
        moments = self.family.moments(q)
        prior = self._prior_expected(moments, noise, sites.prior)
        if self.stochastic:
            values = self.problem.group_averages(q, noise, sites)
            groups = expected_of(values, None)
            prior = None if prior is None else dataclasses.replace(prior, target=None)
        else:
            values, messages = self.problem.group_values(q, noise, sites)
            # Where moments are matched nobody asks for the messages.
            groups = expected_of(values, None if self.matches_moments else messages.groups)
        rest = jnp.sum(self.problem.divergences(q))
        terms = [values, rest[None], *([] if prior is None else [prior.value[None]])]
        every = jnp.concatenate(terms)
        elbo = jnp.where(moments.valid, jnp.sum(every), jnp.nan)
        size = jnp.sum(jnp.abs(every))
        return Evaluation(q, moments, groups, prior, rest, elbo, size, rule, jnp.array(False))

    def unread(self, sites: SiteStack, rule: Rule) -> Evaluation:
        """The q of these sites without a pass over any row: see :class:`numpyro_pvi.schedules.Problem`."""
        q = posterior(self.prior_natural, sites)
        rest = jnp.sum(self.problem.divergences(q))
        groups = expected_of(jnp.zeros((self.num_groups,), rest.dtype), None)
        zero = jnp.zeros_like(rest)
        return Evaluation(q, self.family.moments(q), groups, None, rest, zero, zero, rule, jnp.array(False))

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's local solve from the same q, or those of some groups; or their moments matched."""
        evaluation, keys = carry.evaluation, jax.random.split(key, self.num_groups)
        if self.matches_moments:
            return self._match_all(carry, key, only)

        def solve(xs: tuple) -> LocalResult:
            index, site, state, own, start = xs
            factor = self._factor(index, site, noise)
            return self.solver.solve(factor, cavity(evaluation.q, site), site, state, own, start=start, guarded=True)

        operands = (jnp.arange(self.num_groups), carry.sites.groups, carry.solver, keys, evaluation.groups)
        if only is not None:
            operands = jax.tree.map(lambda x: x[only], operands)
        return jax.lax.map(solve, operands)

    def _match_all(self, carry: RoundCarry, key: Any, only: Int[Array, "k"] | None) -> LocalResult:
        """Every group's moments matched, from one q and on draws that all share."""
        q, sites = carry.evaluation.q, carry.sites.groups
        tilted = ProductTilted(self.problem, self.solver, jax.random.fold_in(key, 0))
        shared, numbers = tilted.shared(q), jnp.arange(self.num_groups)
        if not self.tied:
            operands = numbers, sites, carry.solver
            if only is not None:
                operands = take(operands, only)
            return jax.lax.map(lambda xs: tilted.visit(xs[0], q, *xs[1:], shared), operands)
        site = tied_site(sites, self.num_groups)

        def visit(total: Any, xs: tuple) -> tuple[Any, LocalResult]:
            result = tilted.visit(xs[0], q, site, xs[1], shared)
            return total + (result.site - site), result._replace(site=None)

        # Of the mean of what groups ask for M copies make the sum.
        zero = jax.tree.map(jnp.zeros_like, site)
        change, results = jax.lax.scan(visit, zero, (numbers, carry.solver))
        return results._replace(site=sites + change)

    def visit_group(
        self,
        index: Any,
        q: Any,
        site: Any,
        state: Any,
        key: Any,
        rule: Rule,
        noise: Any,
        local: Any,
        alone: bool = False,
    ) -> tuple[LocalResult, None]:
        """One group's local solve from the current q, tested by its own free energy; or its moments matched."""
        del rule, local, alone
        if self.matches_moments:
            tilted = ProductTilted(self.problem, self.solver, jax.random.fold_in(key, 0))
            return tilted.visit(index, q, site, state, tilted.alone(index, q)), None
        factor = self._factor(index, site, noise)
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False), None

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve; it has no rows, so under a stochastic solver it takes natural-gradient steps."""
        del rule
        if self.matches_moments:
            return ProductTilted(self.problem, self.solver, jax.random.fold_in(key, 1)).visit_prior(q, site, state)

        def expected(moments: FamilyMoments) -> Expected | None:
            return self._prior_expected(moments, noise, site)

        factor: Any = GroupFactor(self.family, False, self.noisy, expected)
        guarded = start is not None
        if self.stochastic:
            start = None
        solver = solver_of_prior(self.solver)
        return solver.solve(factor, cavity(q, site), site, state, key, start=start, guarded=guarded)

    def _factor(self, index: Any, site: Any, noise: Any) -> Any:
        def expected(moments: FamilyMoments) -> Expected:
            stack = SiteStack(jax.tree.map(lambda x: x[None], site), None)
            message, _, value = self.problem.group_value_and_message(moments.natural, stack, index, noise)
            return expected_of(value, message)

        return GroupFactor(self.family, False, self.noisy, expected, self._rows(), index)

    def _rows(self) -> ProductRows | None:
        """The groups' rows, for a solver that takes some of them at a time."""
        if not self.stochastic:
            return None
        solver: Any = self.solver
        return ProductRows(dataclasses.replace(self.problem, num_draws=solver.num_particles))

    def _prior_expected(self, moments: FamilyMoments, noise: Any, site: Any) -> Expected | None:
        found = self.problem.prior_value_and_message(moments.natural, noise, site)
        return None if found is None else expected_of(*found)
