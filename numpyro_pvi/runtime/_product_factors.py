"""The factors of a product of families as schedules see them: all rounds, by batches of rows, and visits of single groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..expectations import Expected
from ..families import FamilyMoments, ProductFamily, ProductNatural
from ..schedules import (
    Evaluation,
    Part,
    ProblemDefaults,
    RoundCarry,
    Rule,
    Turns,
)
from ..sites import MemberSites, OwnMembers, SiteStack, cavity, posterior, take
from ..solvers import LocalResult, LocalSolver, share_of_steps
from ._base import Runtime
from ._factors import GroupFactor
from ._local import explained, unlooked
from ._moments import solver_of_prior
from ._product_batches import ProductRows, expected_of, stacked, visit_family
from ._product_matching import (
    rows_of_group,
    rows_together,
    tilted_of,
)
from ._product_plan import SAMPLED_WAYS, along
from ._product_problem import ProductProblem
from ._product_rounds import (
    Chosen,
    Walked,
    few_of,
    others,
    part_of,
    row_ids,
    rows_of,
    shared_of,
    sweep,
    walk,
    whole_groups,
    with_local,
)
from ._product_tilted import ProductTilted
from ._programs import first_rows_of

# Fall of the ELBO that counts as rounding, in units of eps times the size of its terms.
_ROUNDING = 20.0

# The likelihood of a group is handed to a solver as a factor whose expectation and natural-gradient target are those of
# :class:`ProductProblem`; q, sites and cavities are natural parameters of the product, moves are measured in its Fisher
# metric.


@dataclasses.dataclass(frozen=True)
class GroupOrder:
    """In which order groups come: implements what :class:`numpyro_pvi.schedules.Stream` is asked for where rows are not."""

    packing: Any
    sizes: tuple[int, ...]
    runtime: Runtime

    def first_rows(self) -> Int[Array, "M"]:
        """Index of every group's first row: where its label first appears."""
        return first_rows_of(self.packing, len(self.sizes), self.runtime)


@dataclasses.dataclass(frozen=True)
class ProductFactors(ProblemDefaults):
    """Implements :class:`numpyro_pvi.schedules.Problem` for a product of families.

    ``problem``: expectations and messages of the factors; ``known``: which groups had a site before their rows came back; None
    when none had; ``continued``: whether there are sites of groups whose rows are not at hand; ``in_turns``: whether components
    move in the plan's turns, rows' own latents among them; else those are :class:`OwnFactors`'; ``beside``: sites that stand
    beside their factors on the draws of every evaluation, so that all of a round compare; None for those that are evaluated.
    """

    problem: ProductProblem
    solver: LocalSolver
    known: Bool[Array, "M"] | None = None
    continued: bool = False
    in_turns: bool = False
    beside: SiteStack | None = None

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

    def zero_sites(self, dtype: Any) -> SiteStack:
        """See :class:`numpyro_pvi.schedules.ProblemDefaults`; latents inside the plate have sites of their own members."""
        none, plan = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), self.prior_natural), self.problem.plan
        own = {name: none.parts[name] for name in plan.row_axes}
        groups = jax.tree.map(lambda x: jnp.zeros((self.num_groups, *x.shape), dtype), shared_of(plan, none))
        return SiteStack(groups, none if self.has_prior_factor else None, MemberSites(own) if own else None)

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
    def blind(self) -> bool:
        """Whether visits alone may look at rows."""
        return self.solver.private

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
        problem = self.problem
        return GroupOrder(problem.packing, problem.plan.partition.table.sizes, problem.runtime)

    def sampled(self, rule: Any) -> Bool[Array, ""]:
        """Whether visits are by draws, whatever the rule: of the ELBO alone q does not hover."""
        return jnp.array(self._sampled)

    def allowance(self, new_sites: SiteStack, new: Any, old_sites: SiteStack, old: Any, step: Any) -> Any:
        """What rounding makes of sums over rows, for turns that end at the top of an ELBO; values on common draws compare.

        Those of factors that jump do not: see :func:`numpyro_pvi.runtime._local.explained`.
        """
        rounding = _ROUNDING * jnp.finfo(old.elbo.dtype).eps * (new.size + old.size) if self.in_turns else 0.0
        factors = self.problem.plan.likelihood, self.problem.plan.prior_factor
        draws = [x.draws(self.problem.num_draws) for x in factors if x is not None and x.by_values]
        if not draws:
            return rounding
        sizes = self.problem.sizes(old.q, new.q + jax.tree.map(jnp.negative, old.q)).values()
        length = sum((jnp.sum(x**2) for x in sizes), start=jnp.zeros(()))
        promised = length / jnp.maximum(step, jnp.finfo(length.dtype).tiny)
        return rounding + explained(promised, sum(x.size for x in jax.tree.leaves(old.q)), min(draws))

    def noise(self, key: Any, num_particles: int = 1) -> Any:
        """The key of the draws; how many there are is the solver's."""
        return key

    def evaluate(
        self,
        sites: SiteStack,
        rule: Any,
        noise: Any,
        probe: Any = None,
        again: bool | Bool[Array, ""] = False,
        trial: bool = False,
        hopeless: Any = None,
    ) -> Evaluation:
        """One pass over all groups: see :class:`numpyro_pvi.schedules.Problem`."""
        if self.blind:
            return unlooked(self.unread(sites, rule))
        q = posterior(self.prior_natural, sites)
        moments, whole = self.family.moments(q), self.whole(q, sites.local)
        beside = self.of_problem(sites) if self.beside is None else self.beside
        if self.stochastic or self.matches_moments or self.in_turns:
            # Nobody asks for the messages.
            values, messages = self.problem.group_averages(whole, noise, beside), None
            prior = self.problem.prior_average(whole, noise, beside)
            prior = None if prior is None else expected_of(prior, None)
        else:
            values, messages = self.problem.group_values(whole, noise, beside)
            prior, messages = self._prior_expected(whole, noise, beside.prior), messages.groups
        groups, rest = expected_of(values, messages), jnp.sum(self.problem.divergences(whole))
        terms = [values, rest[None], *([] if prior is None else [prior.value[None]])]
        every = jnp.concatenate(terms)
        elbo = jnp.where(moments.valid, jnp.sum(every), jnp.nan)
        size = jnp.sum(jnp.abs(every))
        return Evaluation(q, moments, groups, prior, rest, elbo, size, rule, jnp.array(False))

    def shaped(self, sites: SiteStack, rule: Any) -> Evaluation:
        """See :class:`numpyro_pvi.schedules.ProblemDefaults`: messages are of the shapes of sites."""
        if self.blind:
            return self.unread(sites, rule)
        q = posterior(self.prior_natural, sites)
        moments = self.family.moments(q)
        none = jnp.zeros_like(moments.log_partition)
        values = expected_of(jnp.zeros((self.num_groups,), none.dtype), None)
        found = Evaluation(q, moments, values, None, none, none, none, rule, jnp.array(False))
        told = not (self.stochastic or self.matches_moments or self.in_turns)
        groups = expected_of(found.groups.value, sites.groups if told else None)
        prior = expected_of(found.rest, sites.prior if told else None) if self.has_prior_factor else None
        return found._replace(groups=groups, prior=prior)

    def whole(self, q: ProductNatural, local: Any) -> ProductNatural:
        """Natural parameters of the problem's q, of those that schedules see and what groups hold beside their sites."""
        return q

    def of_problem(self, sites: SiteStack) -> SiteStack:
        """The sites as the problem has them."""
        return sites

    def rest(self, moments: FamilyMoments) -> Float[Array, ""]:
        """Of all components, minus KL to the exact prior, or the entropy, in nats."""
        return jnp.sum(self.problem.divergences(moments.natural))

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's local solve from the same q, or those of some groups; or their moments matched."""
        evaluation, keys = carry.evaluation, jax.random.split(key, self.num_groups)
        if self.matches_moments:
            return self._match_all(carry, key, only)

        def solve(xs: tuple) -> LocalResult:
            index, site, state, own, start = xs
            factor = self.factor(index, site, noise)
            return self.solver.solve(factor, cavity(evaluation.q, site), site, state, own, start=start, guarded=True)

        operands = (jnp.arange(self.num_groups), carry.sites.groups, carry.solver, keys, evaluation.groups)
        if only is not None:
            operands = jax.tree.map(lambda x: x[only], operands)
        return jax.lax.map(solve, operands)

    def sweep(self, carry: RoundCarry, share: Any, noise: Any, order: Int[Array, "M"] | None = None) -> Turns:
        """Every site moved by turns of components: see :class:`numpyro_pvi.schedules.Turns`.

        ``share``: of each change that is taken; ``order``: of the groups, which then follow one another. Returns sites, reports
        of the visits, and the share with the solver's own.
        """
        solver, dtype = self.solver, carry.evaluation.elbo.dtype
        share = jnp.asarray(share * float(solver.step_size), dtype)
        swept = sweep(self.problem, carry.sites, share, solver.num_steps or 1, noise, order, carry.opening)
        prior, first = None, int(self.has_prior_factor)
        if self.has_prior_factor:
            prior = LocalResult(None, carry.prior_solver, swept.backoffs[0], ~swept.skipped[0])
        groups = LocalResult(None, carry.solver, swept.backoffs[first:], ~swept.skipped[first:])
        return Turns(swept.sites, groups, prior, share)

    def part(self, carry: RoundCarry, groups: Int[Array, "K"], there: Bool[Array, "K"], noise: Any) -> Part:
        """Some groups as a problem of their own: see :func:`numpyro_pvi.runtime._product_rounds.part_of`."""
        return part_of(self, carry, groups, there, noise)

    def few(self, sites: SiteStack, groups: Int[Array, "K"], there: Bool[Array, "K"]) -> tuple[Chosen, ProductProblem]:
        """Some groups and the problem of these: see :func:`numpyro_pvi.runtime._product_rounds.few_of`."""
        return few_of(self.problem, sites, groups, there)

    def among(self, chosen: Chosen, problem: ProductProblem, sites: SiteStack) -> ProductFactors:
        """The factors of some groups, with their problem and sites."""
        return dataclasses.replace(self, problem=problem, beside=sites)

    def _members(self, local: Any) -> ProductNatural | None:
        """Natural parameters in q of rows' own latents that are held beside the sites: in ``local``, or as the round begins."""
        del local

    def _tilted(self, key: Any, local: Any) -> ProductTilted:
        return dataclasses.replace(tilted_of(self.problem, self.solver, key), members=self._members(local))

    def _match_all(self, carry: RoundCarry, key: Any, only: Int[Array, "k"] | None) -> LocalResult:
        """Every group's moments matched, from one q and on draws that all share."""
        q, sites = carry.evaluation.q, carry.sites.groups
        tilted = self._tilted(jax.random.fold_in(key, 0), carry.sites.local)
        if self.solver.factors == "row":
            return rows_together(tilted, q, sites, carry.sites.local)
        keys = jax.vmap(tilted.step_key)(jnp.arange(self.num_groups))
        return tilted.together(q).visit_all(q, sites, carry.solver, keys, only)

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
    ) -> tuple[LocalResult, Any]:
        """One group's local solve from the current q, tested by its own free energy; or its moments matched."""
        if self.matches_moments:
            tilted = self._tilted(jax.random.fold_in(key, 0), local)
            if self.solver.factors == "row":
                return rows_of_group(tilted, index, q, site, local)
            return tilted.alone(index, q).visit(index, cavity(q, site), site, state, tilted.step_key(index)), None
        factor = self.factor(index, site, noise)
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False), None

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve; it has no rows, so under a stochastic solver it takes natural-gradient steps."""
        if self.matches_moments:
            key, members = jax.random.fold_in(key, 1), self._members(None)
            tilted = ProductTilted(self.problem, self.solver, key, members=members)
            return tilted.visit(None, cavity(q, site), site, state, tilted.step_key(None))

        def expected(moments: FamilyMoments) -> Expected | None:
            return self._prior_expected(moments.natural, noise, site)

        factor: Any = GroupFactor(self.family, False, self.noisy, expected)
        guarded = start is not None
        if self.stochastic:
            start = None
        solver = solver_of_prior(self.solver)
        return solver.solve(factor, cavity(q, site), site, state, key, start=start, guarded=guarded)

    def factor(self, index: Any, site: Any, noise: Any) -> Any:
        """One group's factor as a solver's visit sees it; ``noise`` is the key of the draws."""
        stack = stacked(self.problem.plan, site, rows_of(self.problem.plan, site.parts, None))

        def expected(moments: FamilyMoments) -> Expected:
            message, _, value = self.problem.group_value_and_message(moments.natural, stack, index, noise)
            return expected_of(value, message)

        return GroupFactor(self.family, False, self.noisy, expected, self._rows(), index)

    def _rows(self) -> ProductRows | None:
        """The groups' rows, for a solver that takes some of them at a time."""
        if not self.stochastic:
            return None
        solver: Any = self.solver
        return ProductRows(dataclasses.replace(self.problem, num_draws=solver.num_particles))

    def _prior_expected(self, q: ProductNatural, noise: Any, site: Any) -> Expected | None:
        found = self.problem.prior_value_and_message(q, noise, site)
        return None if found is None else expected_of(*found)


# ------------------------------------------------------------------------------------------------------ some of the rows


class _OfShared(ProductFactors):
    """Factors of which schedules see the shared latents only; what rows have of their own is no part of q, and there is no ELBO."""

    @property
    def family(self) -> ProductFamily:
        """Of the shared latents."""
        return self.problem.family.of(self.problem.plan.shared)

    @property
    def prior_natural(self) -> ProductNatural:
        """The problem's, of shared components."""
        return shared_of(self.problem.plan, self.problem.prior)

    def rest(self, moments: FamilyMoments) -> Float[Array, ""]:
        """Nothing."""
        return jnp.zeros_like(moments.log_partition)


@dataclasses.dataclass(frozen=True)
class BatchFactors(_OfShared):
    """The same where groups step together by batches of their rows: nobody looks at the others, and q is that of shared latents.

    What rows have of their own is moved by their own batches alone, and no schedule's business: its sites are the solver's memory.

    Args:
        chosen: who takes part; sites of those who do not count as the problem's prior.
        said: what the prior factor's site says of rows' own latents.
    """

    chosen: Any = None
    said: Any = None

    @classmethod
    def of_all(cls, factors: ProductFactors, prior: ProductNatural | None) -> BatchFactors:
        """The factors of all groups.

        ``prior``: the prior factor's site, of all components. Returns the same, as rounds by batches see them.
        """
        problem = factors.problem
        count = problem.num_groups
        everyone = jnp.asarray(np.arange(count, dtype=np.int32)), jnp.asarray(np.ones((count,), bool))
        chosen = Chosen(*everyone, problem.packing, None)
        said = {} if prior is None else {n: prior.parts[n] for n in problem.plan.row_axes}
        return cls(problem, factors.solver, None, factors.continued, True, None, chosen, said)

    @property
    def num_groups(self) -> int:
        """Of those that may take part."""
        return self.chosen.groups.shape[0]

    @property
    def stochastic(self) -> bool:
        """No visit goes as if alone: groups step together."""
        return False

    @property
    def blind(self) -> bool:
        """Rounds are not tested by an ELBO, which would take all rows."""
        return True

    @property
    def _sampled(self) -> bool:
        return True

    def sweep(self, carry: RoundCarry, share: Any, noise: Any, order: None = None) -> Turns:
        """Steps by batches, of all groups together: see :meth:`ProductFactors.sweep`."""
        solver: Any = self.solver
        start = carry.sites, carry.sites, carry.solver, jnp.int32(0), jnp.zeros(carry.report.step.shape, bool)
        done, count = walk(self.problem, self.chosen, Walked(*start), self.said, solver, share, noise)
        prior, first = None, int(carry.sites.prior is not None)
        backoffs = jnp.broadcast_to(done.backoffs, done.moved.shape)
        if first:
            prior = LocalResult(None, carry.prior_solver, backoffs[0], done.moved[0])
        groups = LocalResult(None, done.local, backoffs[first:], done.moved[first:])
        taken = share_of_steps(solver.step_size * share, count, solver.average)
        return Turns(done.mean, groups, prior, jnp.asarray(taken, carry.report.step.dtype), count)

    def few(self, sites: SiteStack, groups: Int[Array, "K"], there: Bool[Array, "K"]) -> tuple[Chosen, ProductProblem]:
        """Some groups, of no rows yet, as every step looks at rows of its own; the others' sites count as the problem's prior."""
        chosen = Chosen(groups, there, self.problem.packing, None)
        prior = ProductNatural(self.problem.prior.parts | others(self.problem, sites, chosen).parts)
        return chosen, dataclasses.replace(self.problem, prior=prior)

    def among(self, chosen: Chosen, problem: ProductProblem, sites: SiteStack) -> BatchFactors:
        """The factors of some groups, with their problem."""
        return dataclasses.replace(self, problem=problem, chosen=chosen)


# ------------------------------------------------------------------------------------------- rows' own latents in visits


@dataclasses.dataclass(frozen=True)
class OwnFactors(_OfShared):
    """The same where rows have latents of their own and a visit is one group's: q is that of shared latents.

    What a group's rows have of their own is held beside its site (:class:`numpyro_pvi.sites.OwnMembers`). A visit moves both, in
    the space of both, and tests them by one free energy. A natural-gradient step is one by turns of components, as in rounds of
    all groups: from one q the rows' latents would see shared ones of before, and these the rows'. Where moments are matched, rows'
    latents are integrated out of a visit, and then matched to q(theta) themselves.

    Args:
        own: what groups hold where the round begins.
        said: what the prior factor's site says of rows' own latents.
    """

    own: Any = None
    said: Any = None

    @classmethod
    def of_all(cls, factors: ProductFactors, sites: SiteStack) -> OwnFactors:
        """The factors as schedules see them that visit one group alone."""
        axes = factors.problem.plan.row_axes
        said = {} if sites.prior is None else {n: sites.prior.parts[n] for n in axes}
        local: Any = sites.local
        given = factors.problem, factors.solver, factors.known, factors.continued, False, factors.beside
        return cls(*given, OwnMembers(local.parts), said)

    @property
    def units(self) -> tuple[int, int]:
        """As many as there are rows, each with the plan's latents."""
        plan = self.problem.plan
        return plan.partition.table.num_rows, len(plan.inside)

    def _without(self, ids: Any = None) -> dict[str, Any]:
        """Natural parameters of rows' own latents in q without their groups' sites; of some rows, or of all."""
        plan = self.problem.plan
        found, said = (rows_of(plan, parts, ids) for parts in (self.problem.prior.parts, self.said))
        return {n: x + said[n] if n in said else x for n, x in found.items()}

    def whole(self, q: ProductNatural, local: Any) -> ProductNatural:
        """See :meth:`ProductFactors.whole`."""
        return ProductNatural(q.parts | {n: x + local.parts[n] for n, x in self._without().items()})

    def of_problem(self, sites: SiteStack) -> SiteStack:
        """See :meth:`ProductFactors.of_problem`."""
        local: Any = sites.local
        prior = None if sites.prior is None else ProductNatural(sites.prior.parts | self.said)
        return SiteStack(sites.groups, prior, MemberSites(local.parts))

    def _members(self, local: Any) -> ProductNatural | None:
        """See :meth:`ProductFactors._members`."""
        own = (self.own if local is None else local).parts
        return ProductNatural({n: x + own[n] for n, x in self._without().items()})

    def _beside(self, members: ProductNatural) -> OwnMembers:
        """What groups hold where rows' own latents have these members in q."""
        return OwnMembers({n: members.parts[n] - x for n, x in self._without().items()})

    def local_proposal(self, carry: RoundCarry, moved: Bool[Array, "M"]) -> Any:
        """What rows have of their own stays: a step of shared latents alone raises the ELBO as well.

        Where moments are matched, those of groups that moved are matched to this round's q.
        """
        local = carry.sites.local
        if not self.matches_moments:
            return local
        return self._beside(self._tilted(None, local).settled(carry.evaluation.q, moved))

    def own_between(self, old: Any, new: Any, share: Float[Array, "M"]) -> Any:
        """See :meth:`numpyro_pvi.schedules.Problem.own_between`; rows of no group are as they were."""
        plan, parts = self.problem.plan, {}
        for name, part in old.parts.items():
            axis = plan.row_axes[name]
            shares = share[self.problem.owners(jax.tree.leaves(part)[0].shape[axis])]
            parts[name] = jax.tree.map(
                lambda a, b, s=shares, axis=axis: a + along(s, axis, a.ndim) * (b - a), part, new.parts[name]
            )
        return OwnMembers(parts)

    def own_rest(self, q: Any, local: Any) -> Float[Array, ""]:
        """Minus KL to their exact prior, or the entropy, of rows' own latents."""
        return jnp.sum(self.problem.divergences(self.whole(q, local), self.problem.plan.row_axes))

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's local solve from the same q; each moves its own rows' latents."""
        if self.matches_moments:
            return self._match_all(carry, key, only)
        q, rule, keys = carry.evaluation.q, carry.evaluation.rule, jax.random.split(key, self.num_groups)

        def visit(local: Any, xs: tuple) -> tuple:
            index, site, state, own = xs
            found, local = self.visit_group(index, q, site, state, own, rule, noise, local)
            return local, found

        operands = (jnp.arange(self.num_groups), carry.sites.groups, carry.solver, keys)
        operands = operands if only is None else take(operands, only)
        local, found = jax.lax.scan(visit, carry.sites.local, operands)
        return found._replace(local=local)

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
    ) -> tuple[LocalResult, Any]:
        """One group's local solve, and what all hold beside their sites after it: of its own rows' latents what is new."""
        if self.matches_moments:
            found, _ = super().visit_group(index, q, site, state, key, rule, noise, local)
            if local is None or self.tied:
                return found, local
            after = cavity(q, site) + found.site
            return found, self._beside(self._tilted(None, local).settled_group(after, index))
        # A visit costs as much as the rows of the largest group.
        plan, rows = self.problem.plan, ProductRows(self.problem)
        chosen = whole_groups(self.problem, jnp.asarray(index, jnp.int32)[None], jnp.ones((1,), bool))
        ids = row_ids(chosen)
        both = ProductNatural(site.parts | rows_of(plan, local.parts, ids))
        rest = ProductNatural(cavity(q, site).parts | self._without(ids))

        def expected(moments: FamilyMoments) -> Expected:
            here = moments.natural
            target = rows.step(index, rest, here - rest, 1.0, noise, None).site
            return expected_of(rows.value(index, rest, here, both, noise), target)

        factor = GroupFactor(visit_family(self.problem), False, self.noisy, expected, self._rows(), index)
        found = self.solver.solve(factor, rest, both, state, key, start=None, guarded=False)
        own = with_local(self.problem, chosen, local, OwnMembers(rows_of(plan, found.site.parts, None)))
        return found._replace(site=shared_of(plan, found.site)), own

    def _prior_expected(self, q: ProductNatural, noise: Any, site: Any) -> Expected | None:
        """Of shared latents: the prior factor says nothing of rows', whose q is then of no account."""
        site = None if site is None else ProductNatural(site.parts | self.said)
        found = super()._prior_expected(self.whole(q, self.own), noise, site)
        return None if found is None else expected_of(found.value, shared_of(self.problem.plan, found.target))
