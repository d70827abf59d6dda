"""How a state is shown: distributions per latent, natural parameters with a way to a distribution, and the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ._compiling import Program
from ._endings import labels_of, limits
from ._marginals import event_rank, in_own_support
from ._state import Plan, PVIInfo, PVIState, PVITrace
from ._wording import words_of
from .errors import ImproperError, PartitionError, PVIError
from .families import GaussianFamily, GaussianMoments, RowFamily, RowPrior
from .schedules import BY_FACTOR, RoundReport
from .sites import SiteStack, posterior, tied_site
from .solvers import trouble_of


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

    Args:
        plan: the state's plan.
        natural: natural parameters over the flat vector.
        trace: a prototype trace with every latent's support and shapes.
        what: "posterior" or "prior", for the message.
        joint: whether to add the joint Gaussian under the tuple of names.

    Returns:
        Distributions by latent name.

    Raises:
        ImproperError: when the parameters are not normalisable.
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

    Args:
        schedule: of the fit.
        state: a state.
        agent: the group's label.

    Returns:
        Natural parameters over the flat vector.

    Raises:
        PVIError: when there is one q for all, or for an unknown label.
    """
    if not schedule.has_agents:
        raise PVIError(
            f"posterior(agent={agent!r}): under {type(schedule).__name__} there is one q for all groups; leave agent out, or pass "
            "schedule=Decentralized(...), where every group has its own."
        )
    return schedule.agent_natural(state.schedule_state, state.prior, state.plan.partition.table.index(agent))


def last_round(state: PVIState, report: RoundReport, schedule: Any) -> dict[str, Any]:
    """What every kind of fit reports of its last round: fields of :class:`numpyro_pvi.PVIInfo`.

    Args:
        state: the state.
        report: its report, by the factors that are shown.
        schedule: of the fit.

    Returns:
        Fields by name.
    """
    by_factor = ("move", "asked", "step", "backoffs", "skipped", "skip_run")
    whole = {"valid": bool(report.valid), "total_move": float(report.total_move), "rounds": int(state.step)}
    whole |= {"left": float(report.left), "consensus": float(report.consensus)}
    whole["agents"] = AgentViews(schedule, state) if schedule.has_agents else {}
    return {name: getattr(report, name) for name in by_factor} | whole


def optim_notes(has_optim: bool, state: PVIState) -> tuple[str, ...]:
    """A note for an optimiser that has nothing to do."""
    if not has_optim or state.plan.partition.params:
        return ()
    return ("optim was given, but the model has no numpyro.param site: there is nothing for it to optimise.",)


@dataclasses.dataclass(frozen=True)
class AgentViews(Mapping[Hashable, NaturalView]):
    """Every agent's own q by label, where there is no server: read from the state when it is asked for.

    Attributes:
        schedule: of the fit.
        state: the state.
    """

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


def describe(state: PVIState, has_optim: bool, solver: Any, schedule: Any) -> PVIInfo:
    """The last round's report with labels and what was found about every factor."""
    notes = optim_notes(has_optim, state)
    part, family, report = state.plan.partition, state.plan.family, jax.device_get(state.report)
    notes = (*notes, *split_notes(state))
    labels, absent = factor_labels(state.plan), state.plan.absent
    count, apart = len(part.table.labels), len(absent)
    tied = count if state.plan.tied else None
    if state.plan.rows is None:
        found_proper = _cavities_proper(family, state.prior, state.sites, tied)
    else:
        found_proper = rows_proper(state.prior, state.sites, jnp.zeros(count)), True, True
        notes = (*notes, row_note(state))
    proper, others_proper, prior_proper = jax.device_get(found_proper)
    found = part.likelihood if part.enumeration is None else "enumerated"
    structure, expectation = (found,) * count, (words_of(part.likelihood, state, 0, solver),) * count
    if absent:
        # Nothing happens to a group whose rows are not at hand.
        first = int(part.has_prior_factor)
        by_factor = {n: getattr(report, n) for n in BY_FACTOR}
        report = report._replace(**{n: np.insert(x, [first] * apart, 0) for n, x in by_factor.items()})
        labels, proper = (*labels[:first], *absent, *labels[first:]), np.concatenate([others_proper[:apart], proper])
        structure, expectation = (found,) * apart + structure, ("site only",) * apart + expectation
    if part.has_prior_factor:
        proper = np.concatenate([[prior_proper], proper])
        structure, expectation = (
            (part.prior_kind, *structure),
            (words_of(part.prior_kind, state, 1, solver), *expectation),
        )
    rhat = _by_factor(state, len(labels), lambda s: chain_reading(s, "rhat"))
    return PVIInfo(
        **last_round(state, report, schedule),
        labels=labels,
        cavity_proper=proper,
        ess=_by_factor(state, len(labels), lambda s: getattr(s, "ess", None)),
        structure=structure,
        evidence=_evidence(part, len(structure)),
        expectation=tuple("mcmc" if x == x else word for x, word in zip(rhat, expectation, strict=True)),
        delbo=tuple(float(x) for x in report.delbo),
        rhat=rhat,
        divergent=_by_factor(state, len(labels), lambda s: chain_reading(s, "divergent")),
        sites="dense" if state.plan.rows is None else "rows",
        notes=(*notes, *part.remarks, *moment_notes(state), *limits(state)),
    )


def _evidence(part: Any, count: int) -> tuple[str, ...]:
    """How the structure of every factor is known, the prior factor's first."""
    first = (part.evidence("prior") if part.prior_kind == "affine" else "",) * part.has_prior_factor
    return first + (part.evidence("likelihood"),) * (count - len(first))


def moment_notes(state: PVIState) -> tuple[str, ...]:
    """One sentence for every factor whose tilted moments were not what was asked for in its last visit."""
    solvers = jax.device_get((state.solver_state, state.prior_solver_state))
    count = len(state.plan.partition.table.labels)
    found = [trouble_of(solvers[0], i) for i in range(count)]
    if state.plan.partition.has_prior_factor:
        found = [trouble_of(solvers[1]), *found]
    pairs = zip(factor_labels(state.plan), found, strict=True)
    return tuple(f"group {label!r}: {text}." for label, text in pairs if text is not None)


def _by_factor(state: PVIState, count: int, read: Callable[[Any], Any]) -> np.ndarray:
    """What solver states say of sampled moments, by factor; NaN where they say nothing."""
    sizes = (int(state.plan.partition.has_prior_factor), len(state.plan.partition.table.labels))
    found = []
    for solver, size in zip((state.prior_solver_state, state.solver_state), sizes, strict=True):
        value = None if size == 0 else read(solver)
        found.append(np.full(size, np.nan) if value is None else np.asarray(value).reshape(-1))
    # Groups whose rows are not at hand stand behind the prior factor, and nothing of them is sampled.
    own = np.concatenate(found)
    return np.insert(own, [sizes[0]] * (count - len(own)), np.nan)


def chain_reading(state: Any, name: str) -> Any:
    """One of the numbers that chains leave; NaN for factors that have none, or whose chains have not moved yet."""
    chains = getattr(state, "chains", None)
    if chains is None:
        return None
    return np.where(
        np.asarray(chains.used) & (np.asarray(chains.visits) > 0), np.asarray(getattr(chains, name)), np.nan
    )


def trace_of(state: PVIState, losses: Any, reports: RoundReport | None) -> PVITrace | None:
    """The rounds of a run with labels.

    Args:
        state: the state after the last round.
        losses: Float[R], negative ELBOs in nats.
        reports: of every round, with a leading axis R; None when none ran.

    Returns:
        The trace; None when no round ran.
    """
    if reports is None:
        return None
    count = len(losses)
    # Of sites held by rows a message has the rows' numbers, at most all of them.
    size = sum(x.nbytes for x in jax.tree.leaves(state.prior if state.plan.rows is None else state.sites.groups))
    return PVITrace(
        labels=factor_labels(state.plan),
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
    )


def factor_labels(plan: Plan) -> tuple:
    """Labels of all factors, the prior factor (if any) first."""
    return labels_of(plan)


@partial(Program, static=("family", "tied"))
def _cavities_proper(family: GaussianFamily, prior: Any, sites: SiteStack, tied: int | None) -> tuple[Any, Any, Any]:
    """Whether q without each group's site, each absent group's, and the prior factor's, is normalisable.

    ``tied`` is the number of groups that share one site, or None.
    """
    q = posterior(prior, sites)

    def without(stack: Any) -> Any:
        return family.in_domain(jax.tree.map(lambda a, b: a - b, q, stack))

    others = True if sites.others is None else without(sites.others)
    if tied is None:
        own = without(sites.groups)
    else:
        own = jnp.full((tied,), family.in_domain(q - tied_site(sites.groups, tied)))
    return own, others, True if sites.prior is None else family.in_domain(q - sites.prior)


@Program
def rows_proper(prior: RowPrior, sites: SiteStack, count: Any) -> Any:
    """Whether q without each group's site is normalisable; ``count`` is an array of M zeros."""
    rows, family = jax.tree.map(lambda x: x[0], sites.groups), RowFamily(prior)

    def proper(index):
        return family.in_domain(jax.tree.map(lambda x: jnp.where(prior.group == index, 0.0, x), rows))

    return jax.lax.map(proper, jnp.arange(count.shape[0]))


def row_note(state: PVIState) -> str:
    """How the sites of a state are held, in one sentence."""
    rows, dim = state.prior.root.shape[0], state.plan.family.dim
    seen = "one predictor per latent" if state.plan.rows == "latents" else f"{rows} rows and {dim} latents"
    return f"sites are held by rows ({seen}): two numbers each, and no {dim} x {dim} matrix."
