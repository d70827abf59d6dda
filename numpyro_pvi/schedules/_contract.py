"""The contract of a schedule: what it is shown, what it keeps, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError, not_under_families
from ..expectations import Expected
from ..families import Moments
from ..sites import SiteStack, damp, posterior
from ..solvers import LocalResult, LocalSolver
from ._stream import Stream


class Points(NamedTuple):
    """Memory of how factors without structure are evaluated; two entries each, the likelihood and the prior factor."""

    # Whether random points have taken the place of sigma points.
    sampled: Bool[Array, "2"]
    # Mean log sd of q when draws last contradicted the sigma points.
    anchor: Float[Array, "2"]
    # How far q has moved since they were last compared, in posterior sds.
    moved: Float[Array, ""]
    # Whether a product rule has taken the place of sigma points that were contradicted.
    finer: Bool[Array, "2"]


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
    moments: Moments
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
    # Means and sds of the local latents under q, per chunk and row, or where clients keep them; None when there are none.
    local: Any = None
    # Slots of the rows that see q most widely, where rows are many; else None.
    wide: Int[Array, "K"] | None = None


class RoundReport(NamedTuple):
    """What happened to every factor in one round; the prior factor, if any, comes first."""

    # Largest change of a posterior mean by this factor's step, in posterior sds.
    move: Float[Array, "F"]
    step: Float[Array, "F"]
    backoffs: Int[Array, "F"]
    skipped: Bool[Array, "F"]
    # Rounds running in which the factor was skipped.
    skip_run: Int[Array, "F"]
    # Changes of q between a group's reading it and its last site's being absorbed; 0 where every site is fresh.
    staleness: Int[Array, "F"]
    # Largest change of any posterior mean or log sd in the round, in posterior sds; at least the last move of every factor
    # that took no part (half a sd where that was larger), so that a fit is not taken for settled before all were heard.
    total_move: Float[Array, ""]
    # Whether q was normalisable at the end of the round.
    valid: Bool[Array, ""]
    # Simulated time since the start: in the units of a schedule's delays, else one a round.
    clock: Float[Array, ""]
    # Natural parameters sent since the start, each once for every group that gets or sends them: sites to the server (or
    # to a neighbour), and q's from it.
    messages: Int[Array, "2"]
    # Largest distance of a group's own q from the common one, in posterior sds; 0 with a server.
    consensus: Float[Array, ""]
    # DELBO on the rows that the round took, its consensus gap and its modelling gap, nats; NaN under other schedules.
    delbo: Float[Array, "3"]
    # The move that each factor asked for, undamped, to first order, in posterior sds; infinite where it was not finite.
    asked: Float[Array, "F"]
    # What is left to move, in posterior sds: the larger of what all factors together ask for and the sum of the moves to
    # come at the observed rate of contraction. ``tol`` is about ``left``, which is never much below the last estimate.
    estimate: Float[Array, ""]
    # The estimate of the round before.
    before: Float[Array, ""]
    left: Float[Array, ""]
    # Share of a round's move that came again in the next, in [0, 1), and a sketch of the round's move.
    rate: Float[Array, ""]
    trail: Float[Array, "16"]
    # The longest of the recent rounds' steps.
    paced: Float[Array, ""]
    # Rounds running in which every step was refused, and a code of why the last one was.
    refused: Int[Array, ""]
    why: Int[Array, ""]
    # Whether the loss was finite, where it was looked at.
    finite: Bool[Array, ""]
    # Round trips of the round, and bytes to clients and from them, as really sent; zeros where there are none.
    traffic: Int[Array, "3"]
    # What is left to numpyro.param values: the root of twice the nats that steps to come gain, which is sds where the loss is
    # quadratic; 0 where there are none. The nats that the last step gained, and whose they are most, in the order of names.
    param_move: Float[Array, ""]
    param_gain: Float[Array, ""]
    param: Int[Array, ""]


class RoundCarry(NamedTuple):
    """What goes from round to round."""

    sites: SiteStack
    evaluation: Evaluation
    # Solver states: of the groups (leading axis M) and of the prior factor.
    solver: Any
    prior_solver: Any
    schedule: Any
    report: RoundReport
    # Given where the schedule ``opens``: whether nothing is known of q yet.
    opening: Any = None


class Errands(Protocol):
    """Visits of groups that work on their own: they are begun, and those that are done first are taken first.

    Where a problem has errands, its evaluations are of what every group saw last at the q of its own visit; the value of a group
    that has answered none yet is NaN, and minus infinity where what it said is no number.
    """

    def begin(
        self, tickets: Any, groups: Any, q: Any, sites: Any, states: Any, key: Any, rule: Rule, noise: Any
    ) -> tuple[Int[Array, "k 2"], Bool[Array, "k"]]:
        """Let groups begin a visit from q, and do not wait; those that are at the visit of their ticket are left at it.

        Args:
            tickets: Int[k 2], of the visits that groups are believed to be at.
            groups: which groups.
            q: natural parameters that they read.
            sites: their sites in it.
            states: their solver's memories.
            key: a random key.
            rule: the quadrature rule.
            noise: the round's draws, or None.

        Returns:
            Tickets of the visits that they are at now, and which of them were begun here.
        """
        ...

    def next(self, tickets: Any, allowed: Any, young: Any, site: Any, state: Any) -> tuple[Any, Any, LocalResult]:
        """Wait for the visit that is done first.

        Args:
            tickets: of all visits under way.
            allowed: Bool[M], whose may be taken.
            young: Bool[M], whose is from a q that is no older than it may be.
            site: any group's, for its shapes.
            state: any solver's memory, likewise.

        Returns:
            The group, seconds since the last one was taken, and its answer.
        """
        ...


class Turns(NamedTuple):
    """Where a sweep by turns of components leads: ``problem.sweep(carry, share, noise, order)``.

    Under an order the prior factor and then the groups follow one another, each through all of its turns; without one all factors
    move in the same turns. What a schedule takes of a sweep goes into it as ``share``, since later turns see earlier ones: a share
    of where full turns lead is no shorter sweep.
    """

    sites: SiteStack
    # What visits report, without sites.
    groups: LocalResult
    prior: LocalResult | None
    # Of every change that was asked for, what was taken: the schedule's share times the solver's own.
    share: Float[Array, ""]
    # How often q went out to every group, and an answer came back.
    trips: Any = 1


class Part(NamedTuple):
    """Some groups as a problem of their own, beside the sites of all others: ``problem.part(carry, groups, there, noise)``.

    Its ELBO is the local free energy of these groups and the prior factor, ``sum_S E_q[log f_m] - KL(q || q without the sites of
    S)`` (PVI eq. 2).
    """

    problem: Any
    # Without a schedule's memory, as those that come back from `whole`.
    carry: RoundCarry
    # Statistics of the part's q among those of all, and all of them with the part's in their places.
    near: Callable[[Any], Any]
    far: Callable[[Any, Any], Any]
    # What a round of the part is for all groups; they have no evaluation.
    whole: Callable[[RoundCarry], RoundCarry]


class ProblemDefaults(Protocol):
    """A base class to derive a problem from: exact factors, a site per group and nothing beside it, a prior that is held exactly.

    A subclass writes down where it differs, and ``family``, ``solver``, ``labels``, ``num_groups``, ``prior_natural``, ``stream``,
    ``evaluate``, its visits, and ``rest(moments)``: the ELBO without its factors. See :class:`Problem`.
    """

    # Whether there are groups whose rows are not at hand: the prior factor has then been visited before.
    continued: Any = False
    # Which of the groups at hand had a site before their rows came back; None when none had.
    known: Any = None
    has_prior_factor: Any = False
    # Whether the likelihood is quadratic in the latents jointly.
    quadratic: Any = False
    # How many units have how many local latents each; None without any.
    units: Any = None
    # Whether expectations may be by draws, so that values compare only on common draws.
    noisy: Any = False
    # Whether local solves take noisy steps of their own: evaluations then hold values only, all on the same draws.
    stochastic: Any = False
    # Whether local solves match moments: rounds are then accepted when q is valid.
    matches_moments: Any = False
    # Whether visits alone may look at rows, or turns by some of them: evaluations have no values, and rounds are accepted when q
    # is valid.
    blind: Any = False
    # Whether all groups share one site, held as its product in a stack of one; ``visit_all`` then answers with that.
    tied: Any = False
    # Whether evaluations tell products with the curvature of a mean-field q's factors, by which parallel steps are capped.
    capped: Any = False
    # Whether the sites of all groups lie in one vector over rows, in a stack of one; ``visit_all`` then answers with that, and
    # ``split``, ``merge`` and ``shift`` say what a group's part of it is.
    flat: Any = False
    # Whether visits move components one after another, each from the q that the last left, and say nothing by an evaluation:
    # the problem itself then has ``sweep`` and ``part``, as of :class:`Turns` and :class:`Part`, and evaluations hold values only.
    in_turns: Any = False
    # Where groups work on their own, at the visits that are under way; None where a visit is made when it is asked for.
    errands: Any = None

    def sampled(self, rule: Any) -> Bool[Array, ""]:
        """Whether expectations are by draws under this rule, so that q hovers within their error."""
        return jnp.array(False)

    def allowance(self, new_sites: SiteStack, new: Any, old_sites: SiteStack, old: Any, step: Any) -> Any:
        """Nats that the ELBO on common draws may lose in a good joint step, because of their noise; else 0."""
        return 0.0

    def noise(self, key: Any, num_particles: int = 1) -> Any:
        """Fresh draws for expectations, or None where they are exact."""

    def unread(self: Any, sites: SiteStack, rule: Any) -> Evaluation:
        """The q of these sites without a pass over any row: the values of the factors are 0, and the ELBO is not one."""
        q = posterior(self.prior_natural, sites)
        moments = self.family.moments(q)
        rest = self.rest(moments)
        zero, zeros = jnp.zeros_like(rest), jnp.zeros((self.num_groups,), rest.dtype)
        groups = Expected(zeros, None, None, zeros, zeros, zeros)
        return Evaluation(q, moments, groups, None, rest, zero, zero, rule, jnp.array(False))

    def shaped(self, sites: SiteStack, rule: Any) -> Evaluation | None:
        """An evaluation of the right shapes and dtypes, for which no factor is traced; None where they are not known so."""
        return None

    def zero_sites(self: Any, dtype: Any) -> SiteStack:
        """Zeros of the shapes of the sites that rounds move: of the groups, and of the prior factor where it has one."""
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), self.prior_natural)
        groups = jax.tree.map(lambda x: jnp.zeros((1 if self.flat else self.num_groups, *x.shape), dtype), none)
        return SiteStack(groups, none if self.has_prior_factor else None)

    def own_products(self, evaluation: Any, local: Any, change: Any) -> Any:
        """Of changes of the rows' own naturals (leading axis W), inner products in q's Fisher metric; 0 where they have none.

        ``evaluation``: at q; ``local``: what groups hold of these latents there.
        """
        return 0.0

    def tidy(self: Any, sites: SiteStack) -> SiteStack:
        """Remove rounding asymmetry; where groups have local latents, take their sites from the joint natural parameters."""
        even = self.family.symmetrise
        return SiteStack(even(sites.groups), None if sites.prior is None else even(sites.prior), sites.local)

    def split(self, groups: Any) -> Any:
        """Sites of all groups, or what they want to be, one by one on a leading axis of M."""
        return groups

    def merge(self, sites: Any) -> Any:
        """The inverse of :meth:`split`: sites one by one, as a state holds those of all groups."""
        return sites

    def shift(self: Any, change: Any, moments: Any) -> Float[Array, "#M D"]:
        """First-order change of q's location by the change of each group's site, as a state holds them, in sds."""
        return self.family.shift(change, moments)

    def between(self, old: SiteStack, aim: SiteStack, step: Any) -> SiteStack:
        """Sites at a share of the way, tidied: ``old + step (aim - old)``, with what groups hold beside them."""
        return self.tidy(damp(old, aim, step))

    def own_move(self, new: Evaluation, old: Evaluation) -> Float[Array, ""]:
        """Largest change of a mean or log sd of the groups' own latents, in sds; of evaluations that are of some."""
        return jnp.zeros(())

    def local_proposal(self, carry: RoundCarry, moved: Bool[Array, "M"]) -> Any:
        """What groups that moved want beside their sites (local latents), in joint natural space; None without any."""

    def own_between(self, old: Any, new: Any, share: Float[Array, "M"]) -> Any:
        """What groups hold beside their sites, each at its own share of the way to what visits have answered with."""
        return new

    def own_rest(self, q: Any, local: Any) -> Float[Array, ""]:
        """What the ELBO owes to what groups hold beside their sites, in nats, where no factor's value has it."""
        return jnp.zeros(())

    def refined(self, evaluation: Evaluation, results: LocalResult) -> LocalResult:
        """What all groups propose from one q, with steps that a few rows may have taken on their own since."""
        return results


@runtime_checkable
class Problem(ProblemDefaults, Protocol):
    """What a runtime offers to a schedule: what :class:`ProblemDefaults` says, and the factors themselves."""

    # A Gaussian family, or what stands for one where sites are kept by rows.
    family: Any
    solver: LocalSolver
    num_groups: int
    # Labels of the groups, in the order of every stacked array.
    labels: tuple
    # The exactly held prior, times the sites of groups whose rows are not at hand.
    prior_natural: Any
    # The groups' rows one by one, for schedules that take them as they come.
    stream: Stream

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
        """One pass over all groups at the q of these sites.

        ``again`` repeats the last evaluation's rule to the letter. Of a ``trial`` by draws only the values are needed: the
        accepted q is evaluated again on fresh draws. No finer quadrature rule is tried for an ELBO below ``hopeless``.
        """
        ...

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's local solve from the same q, or those of the groups named only; leading axis M, or k."""
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

        Under a tied site the latter is as it was: how far q goes with one visit is for the schedule to say, which takes it
        (:meth:`local_proposal`) where a sweep has ended. ``alone``: no joint step follows that the schedule would test, so that
        the visit tests its own with local latents too.
        """
        ...

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve; ``start`` gives its expectations at q when they are known (a guarded step)."""
        ...


class _ScheduleVerbs(Protocol):
    """What a schedule may say of itself beside its settings, and what is said where it does not."""

    def agent_natural(self, state: Any, prior_natural: Any, index: int) -> Any:
        """Natural parameters of one group's own q, where the schedule ``has_agents``.

        Raises:
            NotImplementedError: where there is one q for all groups.
        """
        # The cast keeps type checkers from taking it for a member that subclasses have to write.
        raise cast(Exception, NotImplementedError(f"{type(self).__name__} has one q for all groups"))

    def tickets(self, state: Any) -> Any:
        """Int[M 2], of the visits that groups were left at, where they work on their own; else None.

        Args:
            state: the schedule's.
        """

    def opens(self, problem: Problem) -> bool:
        """Whether ``round`` can evaluate the q that it was given in the place of a candidate, where ``carry.opening`` says so.

        Such a round leaves the sites to the last bit, and everything else of it is thrown away. A pass over the rows then
        stands in one place of the program of rounds, and is compiled once.
        """
        return False

    def who(self, problem: Any, key: Any) -> tuple[Int[Array, "K"], Bool[Array, "K"]]:
        """Positions of the groups that may take part in a round, all different, and which of them are there.

        Args:
            problem: the factors, or whoever knows ``num_groups``, ``labels`` and whether groups are ``continued``.
            key: a random key.
        """
        return jnp.arange(problem.num_groups, dtype=jnp.int32), jnp.ones((problem.num_groups,), bool)

    def fuses(self, solver: Any) -> bool:
        """Whether rounds over a product of families visit by turns of components: :class:`Turns`."""
        return False

    def unvalued(self: Any, problem: Any, sites: SiteStack, rule: Any) -> Evaluation | None:
        """The evaluation that rounds begin with, where they read nothing of it but q, its moments and the rule; else None.

        That is so where moments are matched: no ELBO tests a step, and a pass over the rows would be made for nobody.
        """
        return problem.shaped(sites, rule) if self.evaluates and problem.matches_moments else None

    def round_trips(self, solver: Any, num_groups: int) -> int:
        """How often a round asks groups and waits, where clients have the rows and no step is halved and no rule refined.

        By default one look, and one visit of all groups at once where that is not the look's message itself.

        Args:
            solver: of the fit.
            num_groups: M.
        """
        return 1 if solver.immediate and not solver.matches_moments else 2

    def check_families(self, solver: Any) -> None:
        """Raise when the schedule, with this solver, is for Gaussian guides only, and not for AutoExponentialFamily.

        Raises:
            PVIError: naming what is not; always, unless a schedule says otherwise.
        """
        raise not_under_families(
            "schedule",
            self,
            "Synchronous(), Sequential(), StochasticSubset(), Asynchronous(), Committee(), Decentralized(...) or Streaming()",
        )


@runtime_checkable
class Schedule(_ScheduleVerbs, Protocol):
    """Who moves when, and how far; what every implementor owes.

    Frozen and hashable (settings only). ``round`` is pure and traceable. After it the sites are symmetrised, q is their
    fresh sum with the prior, ``evaluation`` belongs to that q, and the report covers every factor.

    :class:`ScheduleDefaults` declares the rest of what an engine reads; ``init`` and ``round`` are every schedule's own.
    """

    @property
    def damping(self) -> Any:
        """Share of each proposal that is taken; "auto" where the schedule chooses it."""
        ...

    @property
    def partial(self) -> bool:
        """Whether a round visits some of the groups only, drawn at random."""
        ...

    @property
    def k(self) -> Any:
        """How many groups a ``partial`` round visits, an int or a share; None for all that are there."""
        ...

    @property
    def rates(self) -> Any:
        """Probabilities that a group is there in a ``partial`` round; None where all are."""
        ...

    @property
    def streams(self) -> bool:
        """Whether rows are taken as they come: it starts from the prior, and nothing passes over all rows before a round."""
        ...

    @property
    def single_pass(self) -> bool:
        """Whether every group is absorbed once, so that no later round mends what a loose tolerance has left."""
        ...

    @property
    def by_label(self) -> bool:
        """Whether settings name groups."""
        ...

    @property
    def at_their_pace(self) -> bool:
        """Whether groups work on their own while others are absorbed, so that no round waits for all of them to look at q."""
        ...

    @property
    def only_adds(self) -> bool:
        """Whether a round without looks needs no more of its visits than the sum of their changes, by a step that is fixed."""
        ...

    @property
    def carries_rows(self) -> bool:
        """Whether sites of single rows go with their groups' sites from round to round."""
        ...

    @property
    def carries_tied(self) -> bool:
        """Whether it moves one site that all groups share."""
        ...

    @property
    def carries_numbers(self) -> bool:
        """Whether it moves sites that are kept as two numbers a row."""
        ...

    @property
    def carries_own(self) -> bool:
        """Whether what groups hold beside their sites moves by :meth:`Problem.between` alone, so that clients may hold it."""
        ...

    @property
    def has_agents(self) -> bool:
        """Whether every group has a q of its own, which ``agent_natural`` gives."""
        ...

    @property
    def discards(self) -> bool:
        """Whether visits are made whose answers, and states, are thrown away: of groups that are away, of copies of messages."""
        ...

    @property
    def evaluates(self) -> bool:
        """Whether no round ends without an evaluation of its own.

        Of the one that it begins with :meth:`ScheduleDefaults.unvalued` then tells what it reads.
        """
        ...

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


class ScheduleDefaults(_ScheduleVerbs):
    """A base class to derive a schedule from: all groups every round, from one q, their sites as natural parameters.

    See :class:`Schedule` for what each says. A subclass writes down where it differs, and ``init`` and ``round``.
    """

    damping: Any = 1.0
    partial: bool = False
    k: Any = None
    rates: Any = None
    streams: Any = False
    single_pass: bool = False
    by_label: Any = False
    at_their_pace: Any = False
    only_adds: Any = False
    carries_rows: bool = False
    carries_tied: bool = False
    carries_numbers: bool = False
    carries_own: Any = False
    has_agents: bool = False
    discards: Any = False
    evaluates: Any = False


def check_visits(schedule: Any, solver: Any) -> None:
    """Refuse solvers whose visits are not written for products of families, under a schedule that makes no others.

    Raises PVIError saying what to write.
    """
    if solver.factors == "row":
        raise PVIError(
            f"{type(schedule).__name__} does not go with {type(solver).__name__}(factors='row') under AutoExponentialFamily: write "
            "solver=NaturalGradient(), Conjugate() or PowerEP(), or schedule=Synchronous()."
        )


class Accepted(NamedTuple):
    """The outcome of a joint step."""

    sites: SiteStack
    evaluation: Evaluation
    step: Float[Array, ""]
    halvings: Int[Array, ""]
    accepted: Bool[Array, ""]
    # How often the ELBO was asked for.
    tries: Int[Array, ""]
    # Why no step was acceptable, a code of numpyro_pvi.schedules (FELL, ...); means nothing otherwise.
    why: Any = 0
