"""How a state and a run are shown: distributions per latent, natural parameters, the report, and the end in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ._state import Plan, PVIInfo, PVIState, PVITrace
from .errors import ImproperError, NonFiniteLossError, PartitionError, PVIError
from .expectations import GRID_DIM, RULES, ImportanceMoments, LaplaceMoments, MCMCMoments, with_settings
from .families import GaussianFamily, GaussianMoments
from .guides import event_rank, in_own_support
from .handlers import PRIOR
from .runtime import noise_floor
from .schedules import (
    BY_FACTOR,
    FELL,
    IMPROPER,
    NOT_FINITE,
    STALL_ROUNDS,
    VISITS,
    RoundReport,
    params_move,
    settled,
    stalled,
    within_noise,
)
from .solvers import LocalSolver, Matched, matched, trouble_of

# ----------------------------------------------------------------------------------------------------- endings in words
# How a run ended, in words: converged, stalled, or short of its tolerance; and what an end may not be.

# Rates of contraction above which rounds are called slow, and what is left below which nobody is told.
_SLOW, _LITTLE = 0.9, 1e-3
_REFUSALS = {
    FELL: "the ELBO would have fallen",
    IMPROPER: "no step left q normalisable",
    NOT_FINITE: "a factor's log density was not finite there",
}
_REMEDIES = {
    FELL: "Start nearer ({start}), narrow the priors, scale the columns to sds near 1, or pass "
    "Synchronous(damping=0.25); under draws, more of them (num_draws)",
    IMPROPER: "Narrow the priors, pass Synchronous(damping=0.25), or start with init_sites='prior'",
    NOT_FINITE: "Narrow the prior or scale the columns, look for a link that overflows and for an observation outside the "
    "likelihood's support, or start nearer (init_params)",
    VISITS: "Allow more visits or ask them for less: Streaming(visits=..., tol=...), Committee(max_visits=..., tol=...); larger "
    "steps of the solver, or a schedule that comes back to its groups, such as Synchronous()",
}


def labels_of(plan: Any) -> tuple:
    """Labels of all factors, the prior factor (if any) first."""
    part = plan.partition
    return ((PRIOR,) if part.has_prior_factor else ()) + part.table.labels


def named(label: Any) -> str:
    """A factor's name in a sentence."""
    return "the prior factor (PRIOR)" if label is PRIOR else f"group {label!r}"


def ending(state: PVIState, done: int, tol: float | None, once: bool = False) -> tuple[bool | None, str]:
    """Whether a run has converged (None when that was not asked for), and why it should stop now, if it should.

    ``state``: after the rounds so far; ``tol``: tolerance in posterior sds, or None; ``once``: whether every group is absorbed
    once, in its turn, and nothing that comes later mends what it said. Returns ``(converged, sentence)``; the
    sentence is empty where rounds go on.
    """
    if tol is None or not done:
        return None if tol is None else False, ""
    report, floor = jax.device_get((state.report, noise_floor(state.solver_state, state.report)))
    if bool(settled(report, tol, floor)):
        if state.plan.partition.jumps_unseen:
            why = " ".join(state.plan.partition.remarks)
            return False, f"q stands still after {done} rounds, and has not converged. {why}"
        if once:
            return True, (
                f"complete after {done} rounds: every group was absorbed once, and none is asked again at the q of all of them, "
                "where a fixed point may be elsewhere"
            )
        if float(report.left) <= tol:
            return True, f"converged after {done} rounds: no more than {tol:g} posterior sd is left to move"
        return True, (
            f"converged after {done} rounds: no move above {max(tol, float(floor)):g} posterior sd, the noise of sampled moments "
            "(more draws would lower it)"
        )
    if bool(stalled(report, tol, floor)):
        return False, f"stalled after {done} rounds: {standstill(state)}"
    return False, ""


def is_stuck(state: PVIState) -> bool:
    """Whether nothing moves and something is asked for, which ends a run before a callback or the user does."""
    return bool(stalled(jax.device_get(state.report), 0.0, 0.0))


def short_of(state: PVIState, tol: float | None, report: RoundReport) -> str:
    """What a run that has used up its rounds says beside their number; empty where there is nothing to say.

    ``tol``: tolerance in posterior sds, or None; ``report``: its report, on the host.
    """
    if bool(np.any(report.skip_run > 0)):
        worst = labels_of(state.plan)[int(np.argmax(report.skip_run))]
        return f"{named(worst)} was skipped in the last {int(report.skip_run.max())} rounds"
    if state.plan.partition.remarks and not np.isfinite(report.total_move):
        # What verification found after the last round, with memories that begin anew.
        return f"{state.plan.partition.remarks[-1].removesuffix('.')}; go on from this state with run(..., init_state=state)"
    if int(report.refused) >= STALL_ROUNDS and float(report.left) > (_LITTLE if tol is None else tol):
        return standstill(state)
    notes = limits(state, report) if tol is None else (*limits(state, report), _left(state, report))
    words = [notes[0].removesuffix(".")] if notes else []
    if tol is not None and bool(params_move(report, tol)):
        name, gain = sorted(state.plan.partition.params)[int(report.param)], 0.5 * float(report.param_move) ** 2
        words.insert(0, f"numpyro.param {name!r} still moves, with about {gain:.2g} nats to gain")
    return "; ".join(words)


def standstill(state: PVIState) -> str:
    """Why q stands still while factors ask for more: who asks, what was refused, and what to do."""
    report = jax.device_get(state.report)
    worst, why = int(np.argmax(report.asked)), int(report.why)
    who, asked = named(labels_of(state.plan)[worst]), float(report.asked[worst])
    size = f"{asked:.2g} posterior sds" if np.isfinite(asked) else "no finite move"
    start = "init_params, or init_sites='curvature'" if state.plan.starts_curved else "init_params"
    verdict = "q is not at an optimum"
    if why == FELL and report.estimate.dtype == np.float32:
        verdict += " (or, where the last losses agree in six digits, at one but for rounding: jax_enable_x64 goes on from there)"
    if why == VISITS:
        return (
            f"the visits that the schedule allows ended before {who} had settled (about {size} are left), and it does not come "
            f"back. {_REMEDIES[VISITS]}"
        )
    return (
        f"{who} asks for {size}, all together for {float(report.estimate):.2g}, but every step was refused in the last "
        f"{int(report.refused)} rounds because {_REFUSALS.get(why, _REFUSALS[FELL])}; {verdict}. "
        f"{_REMEDIES.get(why, _REMEDIES[FELL]).format(start=start)}"
    )


def _left(state: PVIState, report: RoundReport) -> str:
    left = f"about {float(report.left):.2g} posterior sds are left to move"
    # Of moments that are matched by draws, the ending itself tells the noise.
    if matched(state.solver_state) is not None or not state.plan.by_draws(jax.device_get(state.rule)):
        return f"{left}."
    return (
        f"{left}. Expectations are by draws, whose noise late rounds average away: it falls with the root of the number of rounds "
        "and of draws. Ask for no more than it allows (a larger tol), or for more draws (num_draws)."
    )


def limits(state: PVIState, report: RoundReport) -> tuple[str, ...]:
    """Notes on what holds a fit back: refused steps, visits that ended, a slow contraction, a solver's own small steps.

    ``state``: after a round; ``report``: its report, on the host. Returns sentences; none where nothing is held back, or next
    to nothing is left.
    """
    found = []
    if not np.isfinite(float(report.total_move)) or not float(report.left) > _LITTLE:
        return ()
    if int(report.refused) >= STALL_ROUNDS:
        return (f"stalled: {standstill(state)}.",)
    if bool(report.finite) and np.isinf(float(report.estimate)):
        return (
            "not all has been told: some factor's value was no number where the last round began, or its group, which works at its "
            "own pace, has not answered yet. What is left to move is not known; run on, and max_staleness= makes the others wait.",
        )
    moved, far = float(report.total_move), float(report.estimate) > 4 * float(report.total_move)
    far = far and not bool(within_noise(report, _floor(state)))
    # Whole steps, of which as much comes again as there is left: nothing but the contraction itself takes its time.
    whole = bool(np.max(report.step, initial=0.0) > 0.5) and moved >= 0.5 * float(report.estimate) * (
        1 - float(report.rate)
    )
    if float(report.rate) > _SLOW or (far and whole):
        wanted = "small steps want larger ones"
        if not state.plan.family.full:
            wanted = "correlated latents want a guide with a full covariance, and small steps larger ones"
        found.append(
            f"slow contraction: {float(report.rate):.4g} of a round's move comes again in the next, so that about "
            f"{float(report.left):.2g} posterior sds are left to move. Run on; {wanted}."
        )
    elif far:
        found.append(
            f"small steps: the last round moved q by {moved:.2g} posterior sds, while its factors ask for "
            f"{float(report.estimate):.2g}: a step size of the solver's or a damping, noise that is averaged, steps that were "
            "halved, or groups that are still at a visit from an older q hold it back."
        )
    return tuple(found)


def _floor(state: PVIState) -> Any:
    return noise_floor(state.solver_state, state.report)


def refuse_unbounded(
    state: PVIState, report: RoundReport, loss: float, done: int, values: Callable[[PVIState], Any]
) -> None:
    """Raise where a run ends with a loss that is no number.

    ``report``: its report, on the host; ``loss``: negative ELBO in nats, NaN where it was not looked at; ``values``: of a state,
    Float[F] the factors' expected log densities under q, that of the prior factor first, or None where nobody may look. Raises
    NonFiniteLossError naming the factor; its ``.state`` is the last state.
    """
    if not done or bool(report.finite):
        return
    runs, found = np.asarray(report.skip_run), values(state)
    bad = np.zeros(runs.shape, bool) if found is None else ~np.isfinite(np.asarray(found))
    worst = int(np.argmax(bad if bad.any() else runs if runs.max() > 0 else np.asarray(report.asked)))
    latents = ", ".join(str(name) for name in _latents(state, worst))
    others = int(bad.sum()) - 1
    who = named(labels_of(state.plan)[worst])
    who += f", as {others} other factor{'s' * (others > 1)}," if others > 0 else ""
    raise NonFiniteLossError(
        f"the loss is {loss:.3g} nats after {done} rounds, which is no bound of anything: {who} has no finite log density, or an "
        f"astronomically small one, under q in latent(s) {latents}. {_REMEDIES[NOT_FINITE]}. The exception's .state is the last "
        "state.",
        state,
    )


def _latents(state: PVIState, index: int) -> tuple:
    part = state.plan.partition
    of_prior = labels_of(state.plan)[index] is PRIOR and part.prior_latents
    return part.prior_latents if of_prior else part.layout.names


# ------------------------------------------------------------------------------------------------ expectations in words
# How a factor's expectations or tilted moments are taken, in words for the report.

# How tilted moments are taken where they are sampled.
_SAMPLED_WORDS = {ImportanceMoments: "weighted draws", LaplaceMoments: "weighted draws (laplace)", MCMCMoments: "mcmc"}


def words_of(kind: str, state: PVIState, which: int, solver: LocalSolver) -> str:
    """The words of one factor.

    ``which``: 0 for the groups', 1 for the prior factor. Returns a few words, with the quadrature rule of the last round.
    """
    if solver.matches_moments:
        word = _moment_words(kind, state, which, solver)
        if word is not None:
            return word
    if kind == "affine":
        return f"quadrature ({RULES[min(int(state.rule.level), len(RULES) - 1)]})"
    if kind in ("quadratic", "reparameterised"):
        return {"quadratic": "closed form", "reparameterised": "reparameterised draws"}[kind]
    mode = state.plan.partition.unstructured
    if mode == "auto" and not (kind == "local" and solver.stochastic):
        sampled, finer = (bool(np.asarray(x)[which]) for x in (state.rule.points.sampled, state.rule.points.finer))
        mode = "monte_carlo" if sampled else "product rule" if finer else "sigma_points"
    return "monte_carlo" if kind == "local" and mode not in ("sigma_points", "product rule") else mode


def _moment_words(kind: str, state: PVIState, which: int, solver: Any) -> str | None:
    """How tilted moments are taken of the groups (0) or of the prior factor (1); None where by rows, as expectations are."""
    wanted, one_dimensional = with_settings(solver.moments), which == 1 and kind == "affine"
    if not isinstance(wanted, str):
        return None if one_dimensional and isinstance(wanted, MCMCMoments) else _SAMPLED_WORDS[type(wanted)]
    if which == 0 and kind == "quadratic":
        return "closed form"
    single = all(size == 1 for size in state.plan.partition.table.sizes) and not solver.anchored
    if one_dimensional or (which == 0 and kind == "affine" and (solver.factors == "row" or single)):
        return None
    return "quadrature over the latents" if state.plan.family.dim <= GRID_DIM else _SAMPLED_WORDS[ImportanceMoments]


# ------------------------------------------------------------------------------------------------------ posterior views


@dataclasses.dataclass(frozen=True)
class NaturalView:
    """Natural parameters of a site or cavity over the flat unconstrained vector, or of the latents' own families.

    Attributes:
        natural: the natural-parameter object (``precision_mean`` Float[D], ``precision`` Float[D D] or Float[D]; under
            ``AutoExponentialFamily`` one object per latent in ``natural.parts``).
        family: its family.
        what: what it is, for messages.
    """

    natural: Any
    family: Any
    what: str

    @property
    def precision_mean(self):
        """Float[D], ``Lambda m``."""
        return self._number("precision_mean")

    @property
    def precision(self):
        """Float[D D] (full) or Float[D] (mean-field), Lambda."""
        return self._number("precision")

    def _number(self, name: str) -> Any:
        parts = getattr(self.natural, "parts", None)
        if parts is None:
            return getattr(self.natural, name)
        first = next(iter(parts))
        raise AttributeError(
            f"the {self.what} has no {name}: under AutoExponentialFamily there is one natural parameter per latent. Read "
            f".natural.parts[{first!r}] (latents {', '.join(parts)})."
        )

    def to_distribution(self) -> Any:
        """The normalised distribution with these natural parameters; a dict of them by latent under ``AutoExponentialFamily``.

        Raises:
            ImproperError: when they are not normalisable, as a site's need not be.
        """
        if not bool(self.family.in_domain(self.natural)):
            raise ImproperError(
                f"the {self.what} is not normalisable (a precision is not positive, or another parameter is outside its "
                "family): a site or cavity is a factor, not always a distribution. Read .natural instead."
            )
        return self.family.to_distribution(self.natural)


def latent_distributions(plan: Plan, natural: Any, trace: dict, what: str, joint: bool) -> dict[Any, dist.Distribution]:
    """Marginals of every latent in its own support.

    ``natural``: natural parameters over the flat vector; ``trace``: a prototype trace with every latent's support and shapes;
    ``what``: "posterior" or "prior", for the message; ``joint``: whether to add the joint Gaussian under the tuple of names.
    Returns distributions by latent name. Raises ImproperError when the parameters are not normalisable.
    """
    moments = plan.family.moments(natural)
    if not bool(moments.valid):
        raise ImproperError(
            f"the {what} is not normalisable; run rounds until the data complete it, or use a proper prior."
        )
    layout = plan.partition.layout
    found: dict[Any, dist.Distribution] = {
        name: _marginal(plan.family, moments, layout.slice_of(name), shape, trace[name]["fn"])
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    if joint and plan.family.full:
        found[layout.names] = plan.family.to_distribution(natural)
    return found


def _marginal(family: GaussianFamily, moments: GaussianMoments, where: slice, shape: tuple, fn) -> dist.Distribution:
    loc = moments.loc[where].reshape(shape)
    sd = family.sds(moments)[where].reshape(shape)
    rank = event_rank(fn)
    if not family.full or rank == 0:
        return in_own_support(fn, loc, sd, None)
    root = moments.scale[where].reshape(*shape[: len(shape) - rank], int(np.prod(shape[len(shape) - rank :])), -1)
    return in_own_support(fn, loc, sd, jnp.einsum("...ik,...jk->...ij", root, root))


def agent_natural(schedule: Any, state: PVIState, agent: Hashable) -> Any:
    """Natural parameters of one agent's own q.

    Returns natural parameters over the flat vector. Raises PVIError when there is one q for all, or for an unknown label.
    """
    if not schedule.has_agents:
        raise PVIError(
            f"posterior(agent={agent!r}): under {type(schedule).__name__} there is one q for all groups; leave agent out, or pass "
            "schedule=Decentralized(...), where every group has its own."
        )
    return schedule.agent_natural(state.schedule_state, state.prior, state.plan.partition.table.index(agent))


def last_round(state: PVIState, report: RoundReport, schedule: Any, solver: Any) -> dict[str, Any]:
    """What every kind of fit reports of its last round: fields of :class:`numpyro_pvi.PVIInfo`.

    ``report``: its report, by the factors that are shown.
    """
    by_factor = ("move", "asked", "step", "backoffs", "skipped", "skip_run")
    whole = {"valid": bool(report.valid), "total_move": float(report.total_move), "rounds": int(state.step)}
    whole |= {"left": float(report.left), "consensus": float(report.consensus)}
    whole["agents"] = AgentViews(schedule, state) if schedule.has_agents else {}
    table = state.plan.partition.table
    spent = solver.privacy(state.solver_state, table.sizes)
    if spent is not None:
        by_group = dict(zip(table.labels, (float(x) for x in spent.epsilon), strict=True))
        whole |= {"epsilon": max(by_group.values()), "delta": spent.delta, "epsilons": by_group}
    return {name: getattr(report, name) for name in by_factor} | whole


def optim_notes(has_optim: bool, state: PVIState) -> tuple[str, ...]:
    """A note for an optimiser that has nothing to do."""
    if not has_optim or state.plan.partition.params:
        return ()
    return ("optim was given, but the model has no numpyro.param site: there is nothing for it to optimise.",)


@dataclasses.dataclass(frozen=True)
class AgentViews(Mapping[Hashable, NaturalView]):
    """Every agent's own q by label, where there is no server: read from the state when it is asked for."""

    schedule: Any = dataclasses.field(repr=False)
    state: PVIState = dataclasses.field(repr=False)

    def __getitem__(self, label: Hashable) -> NaturalView:
        try:
            natural = agent_natural(self.schedule, self.state, label)
        except PartitionError as error:
            raise KeyError(label) from error
        return NaturalView(natural, self.state.plan.family, f"q of agent {label!r}")

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.state.plan.partition.table.labels)

    def __len__(self) -> int:
        return len(self.state.plan.partition.table.labels)


def split_notes(state: PVIState) -> tuple[str, ...]:
    """A note on what rows are split by, where the user left that open and it was no matter of course."""
    part = state.plan.partition
    if part.rows.whole:
        return (f"kept whole, as one group: {part.why}",)
    notes = (f"split: {part.why}.",) if part.why else ()
    return (*notes, f"{part.where}: {part.reason}") if full_passes(state) else notes


def full_passes(state: PVIState) -> int:
    """How many groups cost a pass over all rows each; 0 where groups are evaluated from their own rows."""
    part = state.plan.partition
    return part.table.num_groups if part.mechanism == "mask" and part.table.num_groups > 1 else 0


class FactorWords(NamedTuple):
    """A factor, or all groups' factors, in words.

    ``structure``: what it was found to be; ``expectation``: how its expectations are taken, or the moments of its tilted
    distribution.
    """

    structure: str
    expectation: str
    evidence: str


def describe(pvi: Any, state: PVIState) -> PVIInfo:
    """The last round's report with labels and what was found about every factor."""
    plan = state.plan
    report = last = jax.device_get(state.report)
    part, apart, first = plan.partition, len(plan.absent), int(plan.partition.has_prior_factor)
    groups, prior = pvi._fit.words(state, pvi.solver)
    proper, others_proper, prior_proper = jax.device_get(pvi._engine.cavities_proper(state))
    told = (prior,) * first + (groups,) * (apart + len(part.table.labels))
    words = [own.expectation for own in told]
    if apart:
        # Nothing happens to a group whose rows are not at hand.
        report = report._replace(**{n: np.insert(getattr(report, n), [first] * apart, 0) for n in BY_FACTOR})
        words[first : first + apart] = ["site only"] * apart
    rhat = _by_factor(state, len(told), lambda s: chain_reading(s, "rhat"))
    held = () if plan.rows is None else (row_note(state),)
    return PVIInfo(
        **last_round(state, report, pvi.schedule, pvi.solver),
        labels=(PRIOR,) * first + (*plan.absent, *part.table.labels),
        cavity_proper=np.array([*(prior_proper,) * first, *np.atleast_1d(others_proper)[:apart], *proper], bool),
        ess=_by_factor(state, len(told), lambda found: found.ess),
        structure=tuple(own.structure for own in told),
        evidence=tuple(own.evidence for own in told),
        expectation=tuple("mcmc" if x == x else word for x, word in zip(rhat, words, strict=True)),
        delbo=tuple(float(x) for x in report.delbo),
        rhat=rhat,
        divergent=_by_factor(state, len(told), lambda s: chain_reading(s, "divergent")),
        sites="dense" if plan.rows is None else "rows",
        notes=(
            *optim_notes(pvi.optim is not None, state),
            *split_notes(state),
            *_loss_notes(state),
            *held,
            *part.remarks,
            *moment_notes(state),
            *limits(state, last),
        ),
        traffic=pvi.runtime.traffic,
    )


def _loss_notes(state: PVIState) -> tuple[str, ...]:
    """Where the loss is less exact than what is said of the factors."""
    if not state.plan.loss_by_draws:
        return ()
    return (
        "losses and evaluate: the ELBO by draws, off by some tenths of a nat, of factors too whose moments are matched without "
        "any; log_evidence is of the moments.",
    )


def moment_notes(state: PVIState) -> tuple[str, ...]:
    """One sentence for every factor whose tilted moments were not what was asked for in its last visit."""
    solvers = jax.device_get((state.solver_state, state.prior_solver_state))
    count = len(state.plan.partition.table.labels)
    found = [trouble_of(solvers[0], i, state.plan.own_latents) for i in range(count)]
    if state.plan.partition.has_prior_factor:
        found = [trouble_of(solvers[1]), *found]
    pairs = zip(labels_of(state.plan), found, strict=True)
    return tuple(f"group {label!r}: {text}." for label, text in pairs if text is not None)


def _by_factor(state: PVIState, count: int, read: Callable[[Matched], Any]) -> np.ndarray:
    """What memories of matched moments say of them, by factor; NaN where there are none."""
    sizes = (int(state.plan.partition.has_prior_factor), len(state.plan.partition.table.labels))
    found = []
    for solver, size in zip((state.prior_solver_state, state.solver_state), sizes, strict=True):
        memory = matched(solver)
        value = None if size == 0 or memory is None else read(memory)
        found.append(np.full(size, np.nan) if value is None else np.asarray(value).reshape(-1))
    # Groups whose rows are not at hand stand behind the prior factor, and nothing of them is sampled.
    own = np.concatenate(found)
    return np.insert(own, [sizes[0]] * (count - len(own)), np.nan)


def chain_reading(memory: Matched, name: str) -> Any:
    """One of the numbers that chains leave; NaN for factors that have none, or whose chains have not moved yet."""
    chains = memory.chains
    if chains is None:
        return None
    return np.where(
        np.asarray(chains.used) & (np.asarray(chains.visits) > 0), np.asarray(getattr(chains, name)), np.nan
    )


def trace_of(state: PVIState, losses: Any, reports: RoundReport | None) -> PVITrace | None:
    """The rounds of a run with labels.

    ``state``: the state after the last round; ``losses``: Float[R], negative ELBOs in nats; ``reports``: of every round, with a
    leading axis R; None when none ran. Returns the trace; None when no round ran.
    """
    if reports is None:
        return None
    count = len(losses)
    # Of sites held by rows a message has the rows' numbers, at most all of them.
    size = sum(x.nbytes for x in jax.tree.leaves(state.prior if state.plan.rows is None else state.sites.groups))
    return PVITrace(
        labels=labels_of(state.plan),
        rounds=int(state.step) - count + 1 + np.arange(count),
        elbo=-np.asarray(losses),
        total_move=reports.total_move,
        move=reports.move,
        step=reports.step,
        backoffs=reports.backoffs,
        skipped=reports.skipped,
        staleness=reports.staleness,
        clock=reports.clock,
        messages=reports.messages,
        bytes=np.sum(reports.messages, axis=-1, dtype=np.int64) * size,
        consensus=reports.consensus,
        gaps=reports.delbo[:, 1:],
        asked=reports.asked,
        left=reports.left,
        **dict(zip(("trips", "sent", "received"), reports.traffic.T, strict=True)),
    )


def row_note(state: PVIState) -> str:
    """How the sites of a state are held, in one sentence."""
    rows, dim = state.prior.root.shape[0], state.plan.family.dim
    seen = "one predictor per latent" if state.plan.rows == "latents" else f"{rows} rows and {dim} latents"
    return f"sites are held by rows ({seen}): two numbers each, and no {dim} x {dim} matrix."
