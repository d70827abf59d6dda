"""The contract of a schedule, and the acceptance test that every schedule's joint step passes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import Expected
from ..families import GaussianMoments, RowMoments
from ..sites import MAX_HALVINGS, SiteStack, back_off, damp, posterior, select
from ..solvers import LocalResult, LocalSolver
from ._convergence import FELL, IMPROPER, NOT_FINITE, NOTHING
from ._report import RoundReport
from ._stream import Stream

# Halvings of a sweep's joint step before the natural gradient at the old q takes its place.
SWEEP_HALVINGS = 4
# Fall of the ELBO, in units of the size of its terms, that is no error of a coarse quadrature rule.
_HOPELESS = 0.1


class Points(NamedTuple):
    """Memory of how factors without structure are evaluated; two entries each, the likelihood and the prior factor."""

    # Whether random points have taken the place of sigma points.
    sampled: Bool[Array, "2"]
    # Mean log sd of q when draws last contradicted the sigma points.
    anchor: Float[Array, "2"]
    # How far q has moved since they were last compared, in posterior sds.
    moved: Float[Array, ""]


class Rule(NamedTuple):
    """Memory of the quadrature rule, and of the points where there is no structure."""

    # The rule that the last evaluation ended with, and the largest predictor sd it saw.
    level: Int[Array, ""]
    spread: Float[Array, ""]
    # The predictor sd at which a cheaper rule was last found wanting (or tried).
    anchor: Float[Array, ""]
    # Relative error aimed at: loose while q still moves by more than a posterior sd.
    tolerance: Float[Array, ""]
    points: Points


class Evaluation(NamedTuple):
    """Everything one pass over the data says about one q."""

    q: Any
    moments: GaussianMoments | RowMoments
    # Expectations per group (leading axis M) and of the prior factor (None when there is none).
    groups: Expected
    prior: Expected | None
    # E_q[log p(theta)] of the exactly held prior plus the entropy of q, nats.
    rest: Float[Array, ""]
    elbo: Float[Array, ""]
    # Size of the summands of the ELBO, for rounding tolerances.
    size: Float[Array, ""]
    rule: Rule
    # Whether rows missed the error target under the finest rule.
    missed: Bool[Array, ""]
    # Means and sds of the local latents under q, per chunk and row; None when there are none.
    local: tuple[Float[Array, "C R K"], Float[Array, "C R K"]] | None = None
    # Slots of the rows that see q most widely, where rows are many; else None.
    wide: Int[Array, "K"] | None = None


class RoundCarry(NamedTuple):
    """What goes from round to round."""

    sites: SiteStack
    evaluation: Evaluation
    # Solver states: of the groups (leading axis M) and of the prior factor.
    solver: Any
    prior_solver: Any
    schedule: Any
    report: RoundReport


@runtime_checkable
class Problem(Protocol):
    """What a runtime offers to a schedule."""

    # A Gaussian family, or what stands for one where sites are kept by rows.
    family: Any
    solver: LocalSolver
    num_groups: int
    # Labels of the groups, in the order of every stacked array.
    labels: tuple
    # The exactly held prior, times the sites of groups whose rows are not at hand.
    prior_natural: Any
    # Whether there are such groups: the prior factor has then been visited before.
    continued: bool
    # Which of the groups at hand had a site before their rows came back; None when none had.
    known: Bool[Array, "M"] | None
    has_prior_factor: bool
    # Whether the likelihood is quadratic in the latents jointly.
    quadratic: bool
    # How many units have how many local latents each; None without any.
    units: tuple[int, int] | None
    # Whether expectations may be by draws, so that values compare only on common draws.
    noisy: bool
    # Whether local solves take noisy steps of their own: evaluations then hold values only, all on the same draws.
    stochastic: bool
    # The groups' rows one by one, for schedules that take them as they come.
    stream: Stream
    # Whether local solves match moments: rounds are then accepted when q is valid.
    matches_moments: bool
    # Whether all groups share one site, held as its product in a stack of one; ``visit_all`` then answers with that.
    tied: bool
    # Whether the sites of all groups lie in one vector over rows, in a stack of one; ``visit_all`` then answers with that,
    # and the problem itself has ``sweep``, ``moves`` and ``natural_gradient_proposal`` for schedules that carry numbers of rows.
    flat: bool

    def sampled(self, rule: Rule) -> Bool[Array, ""]:
        """Whether expectations are by draws under this rule, so that q hovers within their error."""
        ...

    def allowance(
        self, new_sites: SiteStack, new: Evaluation, old_sites: SiteStack, old: Evaluation, step: Float[Array, ""]
    ) -> Any:
        """Nats that the ELBO on common draws may lose in a good joint step, because of their noise; else 0."""
        ...

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
        """One pass over all groups at the q of these sites.

        ``again`` repeats the last evaluation's rule to the letter. Of a ``trial`` by draws only the values are needed: the
        accepted q is evaluated again on fresh draws. No finer quadrature rule is tried for an ELBO below ``hopeless``.
        """
        ...

    def noise(self, key: Any, num_particles: int = 1) -> Any:
        """Fresh draws for expectations, or None where they are exact."""
        ...

    def unread(self, sites: SiteStack, rule: Rule) -> Evaluation:
        """The q of these sites without a pass over any row: the values of the factors are 0, and the ELBO is not one."""
        ...

    def tidy(self, sites: SiteStack) -> SiteStack:
        """Remove rounding asymmetry; where groups have local latents, take their sites from the joint natural parameters."""
        ...

    def local_proposal(self, carry: RoundCarry, moved: Bool[Array, "M"]) -> Any:
        """What groups that moved want beside their sites (local latents), in joint natural space; None without any."""
        ...

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's local solve from the same q, or those of the groups named only; leading axis M, or k."""
        ...

    def refined(self, evaluation: Evaluation, results: LocalResult) -> LocalResult:
        """What all groups propose from one q, with steps that a few rows may have taken on their own since."""
        ...

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
        """One group's local solve from the current q, and what groups hold beside their sites after it.

        ``alone``: no joint step follows that the schedule would test, so that the visit tests its own with local latents too.
        """
        ...

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve; ``start`` gives its expectations at q when they are known (a guarded step)."""
        ...


@runtime_checkable
class Schedule(Protocol):
    """Who moves when, and how far; what every implementor owes.

    Frozen and hashable (settings only). A schedule that takes rows as they come says ``streams = True``: it starts
    from the prior, and nothing passes over all rows before a round. ``round`` is pure and traceable. After it the
    sites are symmetrised, q is their fresh sum with the prior, ``evaluation`` belongs to that q, and the report
    covers every factor.
    """

    def init(self, problem: Problem, dtype: Any) -> Any:
        """The schedule's own state, a pytree of arrays."""
        ...

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """One round.

        Args:
            problem: the factors.
            carry: where things stand; its evaluation belongs to its sites and to ``noise``.
            key: a random key.
            noise: the round's draws, or None where expectations are exact.

        Returns:
            The carry after the round.
        """
        ...


class Accepted(NamedTuple):
    """The outcome of a joint step."""

    sites: SiteStack
    evaluation: Evaluation
    step: Float[Array, ""]
    halvings: Int[Array, ""]
    accepted: Bool[Array, ""]
    # How often the ELBO was asked for.
    tries: Int[Array, ""]
    # Why no step was acceptable; means nothing otherwise.
    why: Any = NOTHING


def elbo_gain(new: Evaluation, old: Evaluation) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How much the global ELBO has risen, over the factors that were finite before.

    Args:
        new: evaluation of a candidate.
        old: evaluation of the q it would replace, on the same draws if there are any.

    Returns:
        ``(gain, rounding)`` in nats: gains smaller than ``rounding`` in size mean nothing.
    """
    known = jnp.isfinite(old.groups.value)
    gain = jnp.sum(jnp.where(known, new.groups.value - old.groups.value, 0.0)) + new.rest - old.rest
    if new.prior is not None and old.prior is not None:
        gain = gain + jnp.where(jnp.isfinite(old.prior.value), new.prior.value - old.prior.value, 0.0)
    rounding = 8 * jnp.finfo(new.size.dtype).eps * jnp.where(jnp.isfinite(old.size), old.size, 0.0)
    return gain, rounding


def elbo_has_not_fallen(new: Evaluation, old: Evaluation, allowance: Any = 0.0) -> Bool[Array, ""]:
    """Whether a candidate is at least as good as the old q beyond rounding.

    Groups whose factor was not finite before are left out of the comparison; none may become non-finite.

    Args:
        new: evaluation of the candidate.
        old: evaluation of the q it would replace, on the same draws if there are any.
        allowance: nats it may lose beside rounding.

    Returns:
        True when the candidate may be taken.
    """
    stays_finite = jnp.all(jnp.isfinite(new.groups.value) | ~jnp.isfinite(old.groups.value))
    gain, rounding = elbo_gain(new, old)
    # A q that was not normalisable has no bound to fall from.
    better = (gain >= -rounding - allowance) | ~old.moments.valid
    return new.moments.valid & stays_finite & better


def shorten(problem: Problem, at: Callable[[Any], SiteStack], step: Any, halvings: Any = 0) -> tuple[Any, Any]:
    """Halve a joint step until q is normalisable at the sites ``at(step)``."""

    def valid(step):
        return problem.family.in_domain(posterior(problem.prior_natural, at(step)))

    return back_off(valid, step, halvings)


def accept_jointly(
    problem: Problem,
    old_sites: SiteStack,
    proposal: SiteStack,
    old: Evaluation,
    step: Float[Array, ""],
    noise: Any,
    probe: Any = None,
    fallback: SiteStack | None = None,
    test: Callable[[Evaluation, SiteStack], Any] | None = None,
    restart: Any = None,
) -> Accepted:
    """Move all sites together towards their proposals, halving the joint step until q is valid and the ELBO has not fallen.

    ``eta <- eta + step * (proposal - eta)`` with one common factor.

    Args:
        problem: the factors.
        old_sites: where the sites are.
        proposal: where the local solves want them.
        old: evaluation at the old sites, on the same draws.
        step: first step tried.
        noise: the round's draws, or None.
        probe: vector for the curvature product of a mean-field q, or None.
        fallback: proposals that take over, from a full step again, when a few halvings have not helped.
        test: whether a candidate may be taken, from its evaluation and sites, in place of the test of the global ELBO.
        restart: the step below which they do; None for ``2^-SWEEP_HALVINGS`` of the first.

    Returns:
        The accepted sites with their evaluation; the old ones, with ``accepted`` False, when no step was acceptable.
    """
    if problem.matches_moments:
        return accept_valid(problem, old_sites, proposal, old, step, noise, probe)
    restart = step * 2.0**-SWEEP_HALVINGS if restart is None else restart

    def share(step):
        """The share of the proposal's change: the fallback begins again with a full step."""
        return step if fallback is None else jnp.where(step < restart, 2 * step / restart, step)

    def at(step):
        aim = proposal if fallback is None else select(step < restart, fallback, proposal)
        return problem.tidy(damp(old_sites, aim, share(step)))

    # A fall that no error of quadrature explains is refused by the rule at hand.
    hopeless = jnp.where(old.moments.valid, old.elbo - _HOPELESS * (1.0 + old.size), -jnp.inf) if test is None else None

    def unfinished(state: Accepted):
        return ~state.accepted & (state.halvings < MAX_HALVINGS)

    def attempt(state: Accepted) -> Accepted:
        # Validity costs one Cholesky, the ELBO a pass over the data: settle the first before paying for the second.
        step, halvings = shorten(problem, at, state.step, state.halvings)
        sites = at(step)
        evaluation = problem.evaluate(sites, old.rule, noise, probe, trial=probe is None, hopeless=hopeless)
        if test is None:
            spare = problem.allowance(sites, evaluation, old_sites, old, share(step))
            good = elbo_has_not_fallen(evaluation, old, spare)
        else:
            good = test(evaluation, sites)
        return Accepted(sites, evaluation, jnp.where(good, step, 0.5 * step), halvings + ~good, good, state.tries + 1)

    first = Accepted(old_sites, old, step, jnp.int32(0), jnp.array(False), jnp.int32(0))
    last = jax.lax.while_loop(unfinished, attempt, first)

    def keep(new, previous):
        return jax.tree.map(lambda a, b: jnp.where(last.accepted, a, b), new, previous)

    sites, evaluation = keep(last.sites, old_sites), keep(last.evaluation, old)
    why = _why(last.evaluation, old)
    return last._replace(sites=sites, evaluation=evaluation, step=share(last.step), why=why)


def _why(tried: Evaluation, old: Evaluation) -> Int[Array, ""]:
    """Why the last candidate of a search was refused."""
    lost = ~jnp.all(jnp.isfinite(tried.groups.value) | ~jnp.isfinite(old.groups.value))
    code = jnp.where(lost | ~jnp.isfinite(old.elbo), NOT_FINITE, FELL)
    return jnp.where(tried.moments.valid, code, IMPROPER).astype(jnp.int32)


def accept_valid(
    problem: Problem,
    old_sites: SiteStack,
    proposal: SiteStack,
    old: Evaluation,
    step: Float[Array, ""],
    noise: Any,
    probe: Any = None,
) -> Accepted:
    """Take the proposals of a solver that matches moments as far as q stays valid: no bound has to rise on its way.

    Args:
        problem: the factors.
        old_sites: where the sites are.
        proposal: where the local solves want them.
        old: evaluation at the old sites.
        step: joint step; halved until q is normalisable, at most 20 times.
        noise: the round's draws, or None.
        probe: vector for the curvature product of a mean-field q, or None.

    Returns:
        As of :func:`accept_jointly`.
    """

    def at(step):
        return problem.tidy(damp(old_sites, proposal, step))

    step, halvings = shorten(problem, at, step)
    sites = at(step)
    good = problem.family.in_domain(posterior(problem.prior_natural, sites))
    sites = jax.tree.map(lambda a, b: jnp.where(good, a, b), sites, old_sites)
    evaluation = problem.evaluate(sites, old.rule, noise, probe)
    return Accepted(sites, evaluation, step, halvings, good, jnp.int32(1), IMPROPER)


def accept_once(
    problem: Problem,
    old_sites: SiteStack,
    proposal: SiteStack,
    old: Evaluation,
    step: Float[Array, ""],
    noise: Any,
    test: Callable[[Evaluation, SiteStack], Any] | None = None,
) -> Accepted:
    """Take the proposals of a stochastic solver after one evaluation: refuse only what its own noise cannot explain.

    A jitter of one posterior sd in every coordinate costs ``D / 2`` nats. A round that loses no more stays; one that loses
    more, or leaves a factor that is not finite, is undone, and the next one begins with half the step. There is no second
    evaluation: a round costs its gradients and one look at the values.

    Args:
        problem: the factors.
        old_sites: where the sites are.
        proposal: where the local solves want them.
        old: evaluation at the old sites, on the same draws.
        step: joint step; halved until q is normalisable.
        noise: the draws of all evaluations, or None.
        test: as of :func:`accept_jointly`.

    Returns:
        As of :func:`accept_jointly`.
    """

    def at(step):
        return problem.tidy(damp(old_sites, proposal, step))

    step, halvings = shorten(problem, at, step)
    sites = at(step)
    evaluation = problem.evaluate(sites, old.rule, noise)
    gain, rounding = elbo_gain(evaluation, old)
    known = jnp.isfinite(old.groups.value)
    good = (gain >= -rounding - 0.5 * problem.family.dim) | ~old.moments.valid
    good &= evaluation.moments.valid & jnp.all(jnp.isfinite(evaluation.groups.value) | ~known)
    good = good if test is None else test(evaluation, sites)

    def keep(new, previous):
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, previous)

    why = _why(evaluation, old)
    sites, evaluation = keep(sites, old_sites), keep(evaluation, old)
    return Accepted(sites, evaluation, jnp.where(good, step, 0.5 * step), halvings + ~good, good, jnp.int32(1), why)


def natural_gradient_proposal(problem: Problem, carry: RoundCarry) -> SiteStack:
    """Every site's natural-gradient target at the carry's q (PVI eq. 10): small joint steps towards it raise the ELBO.

    Args:
        problem: the factors.
        carry: where things stand.

    Returns:
        Targets; a site whose factor was not finite stays.
    """

    def usable(expected: Expected, site: Any) -> Any:
        expected = dataclasses.replace(expected, local=None)
        good = jax.vmap(all_finite)(expected) if jnp.ndim(expected.value) else all_finite(expected)
        return select(good, expected.target, site)

    if problem.flat:
        return cast(Any, problem).natural_gradient_proposal(carry)
    sites, evaluation = carry.sites, carry.evaluation
    prior = None if evaluation.prior is None or sites.prior is None else usable(evaluation.prior, sites.prior)
    local = problem.local_proposal(carry, jnp.ones((problem.num_groups,), bool))
    return SiteStack(usable(evaluation.groups, sites.groups), sites.prior if prior is None else prior, local)
