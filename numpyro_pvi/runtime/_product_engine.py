"""From a state through rounds, where q is a product of families, with the factors as every schedule sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._compiling import owned_jit
from .._state import PVIState
from ..expectations import TOLERANCE, Expected
from ..factors import Packing, ValueCall, prior_log_density, take_rows
from ..families import Family, FamilyMoments, ProductFamily, ProductNatural, member_family
from ..schedules import (
    Evaluation,
    Part,
    ProblemDefaults,
    RoundCarry,
    Rule,
    Schedule,
    Turns,
    empty_report,
    sound,
    with_params,
)
from ..sites import MemberSites, OwnMembers, SiteStack, cavity, posterior, select, sum_slots, take
from ..solvers import BatchStep, LocalResult, LocalSolver, share_of_steps
from ._base import Runtime
from ._engine import FitsParams, RoundsDone, carry_of, furthest_apart, moved_by, present_alone, run_rounds
from ._factors import GroupFactor
from ._local import unlooked
from ._moments import solver_of_prior
from ._product_matching import (
    first_match_states,
    first_rows,
    marginal_elbo,
    product_evidence,
    rows_of_group,
    rows_together,
    tilted_of,
)
from ._product_plan import SAMPLED_WAYS, along, exact_prior_of, owners, prior_members
from ._product_problem import ProductProblem
from ._product_rounds import (
    Beside,
    Chosen,
    SomeRows,
    Walked,
    batch_rows,
    family_of_rows,
    few_of,
    others,
    part_of,
    row_ids,
    rows_of,
    shared_of,
    step_in_turns,
    sweep,
    view_of,
    walk,
    whole_groups,
    with_local,
)
from ._product_tilted import ProductTilted
from ._programs import first_rows_of
from ._refinement import LOOSE_MOVE, LOOSE_TOLERANCE
from ._verification import Check, product_claims, q_of, verify_product

# -------------------------------------------------------------------------------------- rows of a group by mini-batches
# The rows of groups where q is a product of families: what a visit of one group by mini-batches takes its steps from.


@dataclasses.dataclass(frozen=True)
class ProductRows:
    """The rows of all groups, a batch of one group's at a time, beside a cavity.

    Natural parameters of rows' own latents are those of one group's rows, by their places among these.

    Args:
        problem: of all groups, with as many draws as a step takes.
    """

    problem: ProductProblem

    # Rows give messages.
    pointwise = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return self.problem.plan.partition.table.sizes

    def num_rows(self, group: Int[Array, ""]) -> int | Int[Array, ""]:
        """Rows of one group: a number known beforehand where it is the same for all."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else jnp.asarray(self.sizes, jnp.int32)[group]

    def message(self, group: Any, cavity: ProductNatural, site: Any, key: Any, rows: Any) -> Expected:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.message`.

        ``cavity``: natural parameters of q without its site; ``rows``: positions within the group, or None for all. Returns
        value and message, times ``N_m / B``; of rows' own latents, those of the rows that are looked at.
        """
        view = self._view(group, cavity, rows)
        values, messages = view.group_values(self._seen(view, cavity + site), key, self._stacked(view, site))
        return expected_of(values[0], self._site(view, messages, site))

    def value(self, group: Any, cavity: ProductNatural, q: ProductNatural, site: Any, key: Any) -> Float[Array, ""]:
        """``E_q[log f]`` of all of a group's rows, in nats; ``site`` stands beside it on the draws."""
        view = self._view(group, cavity, None)
        return view.group_averages(self._seen(view, q), key, self._stacked(view, site))[0]

    def step(self, group: Any, cavity: ProductNatural, site: Any, share: Any, key: Any, rows: Any) -> BatchStep:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.step`; the other arguments are those of :meth:`message`."""
        view = self._view(group, cavity, rows)
        stack, halvings, good = step_in_turns(view, self._stacked(view, site), jnp.ones((1,), bool), share, key)
        return BatchStep(self._site(view, stack, site), halvings, good[0])

    def _own(self, view: SomeRows, natural: ProductNatural) -> dict[str, Any]:
        """What is said of the latents of the rows that are looked at."""
        return rows_of(self.problem.plan, natural.parts, row_ids(view.chosen.within))

    def _seen(self, view: SomeRows, q: ProductNatural) -> ProductNatural:
        """q as some rows see it."""
        return ProductNatural(q.parts | self._own(view, q))

    def _stacked(self, view: SomeRows, site: ProductNatural) -> SiteStack:
        return stacked(self.problem.plan, site, self._own(view, site))

    def _site(self, view: SomeRows, stack: SiteStack, site: Any) -> ProductNatural:
        """The site of a stack of one, which says of other rows' own latents what it said before."""
        shared, plan = take(stack.groups, 0), self.problem.plan
        if stack.local is None:
            return shared
        before = MemberSites(rows_of(plan, site.parts, None))
        return ProductNatural(shared.parts | with_local(self.problem, view.chosen.within, before, stack.local).parts)

    def _view(self, group: Any, cavity: ProductNatural, rows: Any) -> SomeRows:
        groups, there = jnp.asarray(group, jnp.int32)[None], jnp.ones((1,), bool)
        if rows is None:
            chosen = whole_groups(self.problem, groups, there)
        else:
            chosen = batch_rows(self.problem, groups, there, rows[None])
        view = view_of(self.problem, chosen, cavity)
        return dataclasses.replace(view, prior=ProductNatural(view.prior.parts | self._own(view, cavity)))


def stacked(plan: Any, site: ProductNatural, own: dict[str, Any]) -> SiteStack:
    """A site as a stack of one, with what it says of rows' own latents beside it."""
    groups = jax.tree.map(lambda x: x[None], shared_of(plan, site))
    return SiteStack(groups, None, MemberSites(own) if own else None)


def expected_of(value: Float[Array, "*M"], target: Any) -> Expected:
    """A value and a message without quadrature whose error would be known.

    ``value``: in nats. Returns as solvers and schedules read them.
    """
    zero = jnp.zeros_like(value)
    return Expected(value, target, None, zero, zero, zero)


# Fall of the ELBO that counts as rounding, in units of eps times the size of its terms.
_ROUNDING = 20.0

# ---------------------------------------------------------------------------------------- factors as schedules see them
# The factors of a product of families as schedules see them: every schedule's own rounds, by every solver's own visits.
#
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
        """What rounding makes of sums over rows, for turns that end at the top of an ELBO; values on common draws compare."""
        return _ROUNDING * jnp.finfo(old.elbo.dtype).eps * (new.size + old.size) if self.in_turns else 0.0

    def noise(self, key: Any, num_particles: int = 1) -> Any:
        """The key of the draws; how many there are is the solver's."""
        return key

    def evaluate(
        self,
        sites: SiteStack,
        rule: Any,
        noise: Any,
        probe: Any = None,
        again: bool = False,
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
        swept = sweep(self.problem, carry.sites, share, solver.num_steps or 1, noise, order)
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


def visit_family(problem: ProductProblem) -> ProductFamily:
    """The family of q as a visit of one group sees it: with the latents of as many rows as the largest group has room for."""
    plan, packing = problem.plan, problem.packing
    if not plan.inside or not isinstance(packing, Packing):
        return plan.family
    length = packing.rows.shape[1]
    return family_of_rows(plan, -(-max(plan.partition.table.sizes) // length) * length)


# ------------------------------------------------------------------------------------------------------- product engine


class LookedAtLess(NamedTuple):
    """A schedule's memory, where rounds know of no loss."""

    schedule: Any
    # What remains of the rounds after which losses are due.
    loss_from: Int[Array, ""]


# What is folded into a state's key for the draws of its loss and of its next round.
_DRAWS = 0x9E37


@dataclasses.dataclass(frozen=True)
class ProductEngine(FitsParams):
    """Everything static about a fit except its plan; the counterpart of :class:`numpyro_pvi.runtime.Engine`.

    Args:
        model: the NumPyro model.
        solver: one that goes with families (:meth:`numpyro_pvi.solvers.LocalSolver.check_families`).
        schedule: likewise.
        runtime: where passes over rows run.
        num_particles: draws of the loss where it is Monte Carlo.
    """

    model: Callable
    solver: LocalSolver
    schedule: Schedule
    runtime: Runtime
    num_particles: int
    # NumPyro optimiser of the model's params, or None.
    optim: Any = None
    # Where rounds see some rows only, the ELBO of all is taken after every so many rounds from that one on.
    loss_every: int = 1

    # Visits add up what devices find in their own rows of a group.
    whole_groups = False

    def reporting(self, loss_every: int) -> ProductEngine:
        """The engine of a run that reports losses now and then: where rounds see some rows only, others are not computed."""
        return self if loss_every == self.loss_every else dataclasses.replace(self, loss_every=int(loss_every))

    def counted(self, state: PVIState, loss_every: int) -> PVIState:
        """The state that such a run begins with, given by the user: it counts rounds from there, without compiling anew."""
        memory = state.schedule_state
        if loss_every == 1 or not self.reads_some:
            return state
        memory = memory._replace(loss_from=jnp.int32(state.step % loss_every))
        return dataclasses.replace(state, schedule_state=memory)

    @property
    def for_evidence(self) -> ProductEngine:
        """The engine on whose draws the ELBO is an estimate of the evidence: its own, which every round has anew."""
        return self

    @property
    def in_turns(self) -> bool:
        """Whether components move in the plan's turns."""
        return self.schedule.fuses(self.solver)

    @property
    def by_batches(self) -> bool:
        """Whether groups step together by batches of their rows."""
        return self.in_turns and self.solver.stochastic

    def visits_own(self, plan: Any) -> bool:
        """Whether groups are visited alone while their rows have latents of their own."""
        return bool(plan.inside) and not self.in_turns

    @property
    def reads_some(self) -> bool:
        """Whether rounds look at some of the rows only, and know of no loss."""
        return self.in_turns and (self.schedule.partial or self.solver.stochastic)

    def call(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ValueCall:
        """The model with all rows, at the state's params or at others."""
        if params is None:
            params = self.constrain(state.plan, args, kwargs, state.optim_state)
        return ValueCall(state.plan.partition.model(self.model), args, kwargs, params=params)

    def problem(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ProductProblem:
        """The factors of a state.

        ``state``: a state; ``args``: positional arguments (arrays); ``kwargs``: keyword arguments; ``params``: constrained
        values of the model's params; the state's own by default. Returns the factors; the sites of groups whose rows are not at
        hand count as a prior.
        """
        plan: Any = state.plan
        runtime, others = self.runtime_of(state.packing), state.sites.others
        kind, prior = (
            (ProductProblem, state.prior) if others is None else (Beside, state.prior.combine(sum_slots(others)))
        )
        return kind(plan, self.call(state, args, kwargs, params), state.packing, prior, self.num_draws, runtime)

    @property
    def num_draws(self) -> int:
        """Draws of a latent that is drawn."""
        return max(int(self.solver.num_draws), self.num_particles)

    def factors(self, problem: ProductProblem, *beside: Any) -> ProductFactors:
        """The factors as schedules see them; what follows the problem is as of :class:`ProductFactors` after its solver."""
        return ProductFactors(problem, self.solver, *beside)

    def tallied(
        self, state: PVIState, carry: RoundCarry, loss: Float[Array, ""]
    ) -> tuple[PVIState, RoundCarry, Float[Array, ""]]:
        """State, carry and loss after a round, whose report tells what was sent in it: nothing, where nobody is asked."""
        return state, carry, loss

    def prior_gap(self, plan: Any, packing: Any, args: tuple, kwargs: dict, optim_state: Any, at: Any) -> Any:
        """See :meth:`numpyro_pvi.runtime.Engine.prior_gap`; ``at`` are natural parameters, where other latents are looked at."""
        params = self.constrain(plan, args, kwargs, optim_state)
        whole = ValueCall(plan.partition.model(self.model), args, kwargs, params=params)
        values, reading, chunk = (
            plan.family.sample(at, jax.random.key(0)),
            plan.partition.reading,
            take(packing.chunks, 0),
        )
        few = whole.rows(reading, chunk), take_rows(values, plan.row_axes, reading, chunk)

        return furthest_apart(self.prior_numbers(plan, whole, values), self.prior_numbers(plan, *few))

    def prior_numbers(self, plan: Any, call: ValueCall, values: dict) -> list[Array]:
        """What tells one prior from another, at values of all components: see :meth:`numpyro_pvi.runtime.Engine.prior_numbers`."""
        held = prior_members(call, plan.family, plan.blocks, values)
        own = prior_log_density(call, plan.latent_values(values), plan.partition.rows, plan.exact_latents)
        return jax.tree.leaves(({n: x for n, x in held.items() if n in plan.exact}, own))

    def told_prior(self, plan: Any, args: tuple, kwargs: dict, at: tuple) -> tuple[Array, ...]:
        """The same of a model without params; ``at`` are leaves of natural parameters, from which values are drawn."""
        natural = jax.tree.unflatten(jax.tree.structure(plan.family.zeros()), at)
        call = ValueCall(plan.partition.model(self.model), args, kwargs, params={})
        return tuple(self.prior_numbers(plan, call, plan.family.sample(natural, jax.random.key(0))))

    def claims(self, plan: Any) -> tuple[str, ...]:
        """What a plan claims of the model that is to be verified, as ``_product_verification.product_claims`` names it."""
        return () if self.solver.private else product_claims(plan)

    def verify(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
        """The claims beside the model: see :func:`numpyro_pvi.runtime._verification.verify_product`."""
        problem = self.problem(state, args, kwargs)
        return verify_product(problem, state, q_of(problem, state))

    @property
    def reads_sizes(self) -> bool:
        """Whether compiled rounds depend on the groups' sizes: room is made for the largest ones."""
        return self.schedule.partial or self.solver.stochastic

    def unvisited(
        self, state: PVIState, dtype: Any, known: Any = None, args: tuple = (), kwargs: dict | None = None
    ) -> dict[str, Any]:
        """Solver and schedule states, and the report, of groups that no round has visited yet.

        ``state``: with their plan, packing and sites; its own such states are not looked at; ``dtype``: floating dtype;
        ``known``: Bool[M], which of the groups had a site before their rows came back; None when none had; ``args``: the
        model's positional arguments, where they are at hand; ``kwargs``: its keyword arguments. Returns fields of a
        :class:`PVIState`.
        """
        plan: Any = state.plan
        count, solver, prior_solver = len(plan.partition.table.labels), (), None
        problem = self.problem(state, args, kwargs or {}, params={})
        sites = state.sites
        if plan.tilted:
            solver, prior_solver = first_match_states(problem, self.solver, dtype)
            solver = self.solver.init_groups(ProductFactors(problem, self.solver, known), solver)
            if self.solver.factors == "row":
                sites = dataclasses.replace(sites, local=first_rows(problem, self.solver, dtype)[1])
        elif not (self.in_turns or self.solver.matches_moments):
            one = self.solver.init_among(visit_family(problem), dtype, count)
            solver = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), one)
            has_prior = state.sites.prior is not None
            prior_solver = solver_of_prior(self.solver).init(plan.family, dtype) if has_prior else None
        others = state.sites.others is not None
        factors = ProductFactors(problem, self.solver, known, others, self.in_turns)
        memory: Any = self.schedule.init(self._as_seen(factors, sites), dtype)
        if self.reads_some:
            memory = LookedAtLess(memory, jnp.int32(0))
        return {
            "sites": sites,
            "solver_state": solver,
            "prior_solver_state": prior_solver,
            "schedule_state": memory,
            "report": empty_report(count + (state.sites.prior is not None), dtype),
        }

    def _as_seen(self, factors: ProductFactors, sites: SiteStack) -> ProductFactors:
        """The factors as the schedule's rounds see them."""
        if self.visits_own(factors.problem.plan):
            return OwnFactors.of_all(factors, sites)
        return BatchFactors.of_all(factors, sites.prior) if self.by_batches else factors

    def _bare(self, state: PVIState) -> PVIState:
        """A state as rounds have it: by batches, what rows have of their own is the solver's memory, and no site.

        In visits of single groups it is what groups hold beside their sites.
        """
        if self.reads_some:
            state = dataclasses.replace(state, schedule_state=state.schedule_state.schedule)
        sites, plan = state.sites, cast(Any, state.plan)
        if not (self.by_batches or self.visits_own(plan)):
            return state
        prior, local = None if sites.prior is None else shared_of(plan, sites.prior), cast(Any, sites.local)
        if self.by_batches:
            return dataclasses.replace(state, sites=SiteStack(sites.groups, prior), solver_state=local)
        return dataclasses.replace(state, sites=SiteStack(sites.groups, prior, OwnMembers(local.parts)))

    def _whole(self, state: PVIState, before: PVIState) -> PVIState:
        """The state of rounds with what they do not see of it."""
        if self.reads_some:
            memory = before.schedule_state._replace(schedule=state.schedule_state)
            state = dataclasses.replace(state, schedule_state=memory)
        if not (self.by_batches or self.visits_own(state.plan)):
            return state
        prior, local = state.sites.prior, cast(Any, state.sites.local)
        if prior is not None:
            prior = ProductNatural(before.sites.prior.parts | prior.parts)
        if self.by_batches:
            sites = SiteStack(state.sites.groups, prior, state.solver_state)
            return dataclasses.replace(state, sites=sites, solver_state=before.solver_state)
        return dataclasses.replace(state, sites=SiteStack(state.sites.groups, prior, MemberSites(local.parts)))

    def noise(self, rng_key: Any) -> Any:
        """Key of the draws that belong to a state: its loss and its next round share them."""
        return jax.random.fold_in(rng_key, _DRAWS)

    def rounds(
        self,
        state: PVIState,
        args: tuple,
        kwargs: dict,
        count: Int[Array, ""],
        tol: Float[Array, ""],
        length: int,
        fine: bool,
        seen: None = None,
    ) -> RoundsDone:
        """Run up to ``count`` rounds in one compiled loop: see :meth:`numpyro_pvi.runtime.Engine.rounds`.

        Without the finest quadrature rule, rounds that end where predictors ask for it are not done.
        """
        plan, given = state.plan, with_rules(state, fine)
        done = self._rounds(given, args, kwargs, count, tol, length)
        if not fine and _over_predictors(plan) and not self.solver.private:
            moving = done.state.report.total_move > LOOSE_MOVE
            missed = self._missed(done.state, args, kwargs, moving)
            back, ran = select(missed, given, done.state), jnp.where(missed, 0, done.done)
            done = done._replace(state=back, done=ran, missed=missed)
        return done._replace(state=dataclasses.replace(done.state, plan=plan))

    def unseen(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> None:
        """Rounds of families begin with a look of their own: see :meth:`numpyro_pvi.runtime.Engine.unseen`."""

    def _missed(self, state: PVIState, args: tuple, kwargs: dict, moving: Any) -> Bool[Array, ""]:
        """Whether quadrature over predictors misses its tolerance at a state; a looser one while q still moves."""
        error = self.problem(state, args, kwargs).quadrature_error(
            present_alone(state).sites, self.noise(state.rng_key)
        )
        return error > jnp.where(moving, LOOSE_TOLERANCE, TOLERANCE[error.dtype.name])

    def _rounds(
        self,
        state: PVIState,
        args: tuple,
        kwargs: dict,
        count: Int[Array, ""],
        tol: Float[Array, ""],
        length: int,
    ) -> RoundsDone:
        """Rounds by the rules that the state's plan has compiled in: the schedule's own, of visits that are the solver's."""
        # Sites say nothing of params: they move only while all groups' rows are at hand.
        continued = state.sites.others is not None
        moves = bool(state.plan.partition.params) and not continued
        fixed, state = self.problem(state, args, kwargs), present_alone(state)

        def factors(state: PVIState) -> ProductProblem:
            return self.problem(state, args, kwargs) if moves else fixed

        def problem_of(state: PVIState) -> ProductFactors:
            beside = state.sites if self.in_turns else None
            found = self.factors(factors(state), None, continued, self.in_turns, beside)
            return self._as_seen(found, state.sites)

        def begun(state: PVIState) -> RoundCarry:
            # A part of some groups is looked at as such.
            in_parts, bare, evaluation = self.in_turns and self.schedule.partial, self._bare(state), None
            if not in_parts:
                evaluation = problem_of(state).evaluate(bare.sites, state.rule, self.noise(state.rng_key))
            return carry_of(bare, evaluation)

        def one(state: PVIState, carry: RoundCarry | None, _: None) -> tuple[PVIState, RoundCarry | None, Array, None]:
            # Nothing of a look at some rows is of use to the next round.
            old, noise = begun(state) if carry is None else carry, self.noise(state.rng_key)
            done, carry = moved_by(self.schedule, problem_of(state), self._bare(state), old, noise)
            state = self._whole(done, state)
            if moves:
                state = self._with_params(state, args, kwargs)
            if self.reads_some:
                loss, finite = self._loss_when_due(state, lambda: -self._elbo(factors(state), state))
                state = _with_report(state, finite=finite)
                state, _carry, loss = self.tallied(state, carry._replace(report=state.report), loss)
                return state, None, loss, None
            # Fresh draws for the next round, or params that have moved, need a new evaluation.
            if moves or fixed.plan.noisy:
                carry = carry._replace(evaluation=begun(state).evaluation)
                state = _with_report(state, finite=sound(carry.evaluation.elbo) | self.solver.private)
            return *self.tallied(state, carry._replace(report=state.report), -carry.evaluation.elbo), None

        first = None if self.reads_some else begun(state)
        return run_rounds(state, first, one, count, tol, length, self.solver)[0]

    def _loss_when_due(
        self, state: PVIState, loss: Callable[[], Float[Array, ""]]
    ) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """The loss of all rows where somebody asks for it, else NaN; and whether it is a number, or nobody has looked."""
        due = (state.step - state.schedule_state.loss_from) % self.loss_every == 0
        nobody = jnp.full((), jnp.nan, state.report.move.dtype)
        found = loss() if self.loss_every == 1 else jax.lax.cond(due, loss, lambda: nobody)
        return found, sound(found) | ~due

    def _with_params(self, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
        """One optimiser step on the model's params at the round's q held fixed (PVI eq. 5), then the prior re-read."""
        noise, q, plan = self.noise(state.rng_key), posterior(state.prior, state.sites), cast(Any, state.plan)

        def at(params: dict) -> ProductProblem:
            found = self.problem(state, args, kwargs, params)
            return dataclasses.replace(found, prior=exact_prior_of(found, q))

        def loss(params: dict) -> Float[Array, ""]:
            if plan.tilted and plan.inside:
                return -marginal_elbo(at(params), state.sites, self.solver, noise, q)
            return -at(params).elbo(state.sites, noise, q)

        optim_state, params, gains = self.moved_params(loss, state.optim_state, args, kwargs)
        after = at(params)
        factors = ProductFactors(after, self.solver)
        noisy = bool(factors.noisy or factors.stochastic or factors.blind)
        prior, report = after.prior, with_params(state.report, gains, noisy)
        return dataclasses.replace(state, optim_state=optim_state, prior=prior, report=report)

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state in nats, and whether predictors asked for a finer rule than was compiled in."""
        state = with_rules(state, fine)
        sure = fine or not _over_predictors(state.plan)
        missed = jnp.array(False) if sure else self._missed(state, args, kwargs, False)
        return -self.elbo(state, args, kwargs), missed

    def elbo(self, state: PVIState, args: tuple, kwargs: dict) -> Float[Array, ""]:
        """The global ELBO at a state in nats, on the draws that belong to it."""
        return self._elbo(self.problem(state, args, kwargs), present_alone(state))

    def _elbo(self, problem: ProductProblem, state: PVIState) -> Float[Array, ""]:
        return problem.elbo(state.sites, self.noise(state.rng_key))

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Any, Any, Any]:
        """Power EP's log evidence at a state and its Monte Carlo standard error (nats); no finer rule is ever needed."""
        key = self.noise(jax.random.fold_in(state.rng_key, 1))
        states = state.solver_state, state.prior_solver_state
        return product_evidence(self.problem(state, args, kwargs), state.sites, states, self.solver, key)

    def cavities_proper(self, state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, "*slots"], Bool[Array, ""]]:
        """Whether q without each group's site, each absent group's, and the prior factor's, is normalisable."""
        return _cavities_proper(state=state, level="cheap")


def _over_predictors(plan: Any) -> bool:
    """Whether some factor's expectation is taken by quadrature over predictors."""
    return any(factor is not None and bool(factor.terms) for factor in (plan.likelihood, plan.prior_factor))


def with_rules(state: PVIState, fine: bool) -> PVIState:
    """A state in whose programs the finest quadrature rule is compiled in, or is not."""
    return dataclasses.replace(state, plan=dataclasses.replace(state.plan, fine=fine))


def _with_report(state: PVIState, **fields: Any) -> PVIState:
    """A state whose report says something else."""
    return dataclasses.replace(state, report=state.report._replace(**fields))


def _proper_without(state: PVIState) -> tuple[Bool[Array, "M"], Bool[Array, "*slots"], Bool[Array, ""]]:
    q, sites, family = posterior(state.prior, state.sites), state.sites, state.plan.family
    others = jnp.array(True) if sites.others is None else _without_each(family, q, sites.others)
    prior = jnp.array(True) if sites.prior is None else family.in_domain(q - sites.prior)
    return _without_groups(state, q), others, prior


_cavities_proper = owned_jit(_proper_without, ())


def _without_each(family: ProductFamily, q: Any, stack: Any) -> Bool[Array, "*K"]:
    """Whether the shared components of q without each site of a stack are normalisable."""
    families, found = dict(family.components), jnp.array(True)
    for name, site in stack.parts.items():
        found = found & jax.vmap(lambda own, name=name: families[name].in_domain(q.parts[name] - own))(site)
    return found


def _without_groups(state: PVIState, q: Any) -> Bool[Array, "M"]:
    plan: Any = state.plan
    families, sites = dict(plan.family.components), state.sites
    count = len(plan.partition.table.labels)
    groups = jax.tree.map(lambda x: x / count, sites.groups) if plan.tied else sites.groups
    found = jnp.broadcast_to(_without_each(plan.family, q, groups), (count,))
    # Integrated out, rows' own latents are no part of a cavity.
    for name, site in () if sites.local is None or plan.tilted else sites.local.parts.items():
        whole = families[name].in_domain(q.parts[name])
        improper = ~proper_members(families[name], q.parts[name] - site)
        owner = owners(state.packing, improper.shape[plan.row_axes[name]], plan.row_key)
        found = found & whole & (plan.largest_by_group(name, improper, owner) == 0)
    return found


def proper_members(family: Family, natural: Any) -> Bool[Array, "*members"]:
    """Which members of a latent, one or more for every row, are normalisable. Returns one flag per member."""
    own, natural = member_family(family, natural)
    return own.in_domain(natural)
