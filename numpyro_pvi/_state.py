"""States and results: what travels between calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.svi import SVIRunResult

from .factors import FlatLatents, GroupMasks, Packing, PartitionPlan, may_jump, model_layout, without_labels
from .schedules import RoundReport, Rule
from .sites import SiteStack

# A group skipped in so many rounds running ends a run.
SKIP_LIMIT = 10


# What is found at rows of how a likelihood is taken.
_TOLD = ("likelihood", "terms", "unstructured", "jumps")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static, hashable part of a state: everything that was decided by looking at values, decided once in ``init``."""

    partition: PartitionPlan
    # Of q: a Gaussian family; the product of the latents' families in a ProductPlan.
    family: Any
    # Structure, shapes and dtypes of the model's arguments.
    signature: Any
    # Whether the costliest quadrature rule is compiled in: switched on when rows first ask for it.
    fine: bool = False
    # Labels of the groups whose rows are not at hand, in the order of their sites' slots.
    absent: tuple = ()
    # Rows to which the arguments are filled up before a compiled program sees them; 0 where they are taken as they are.
    padded_rows: int = 0
    # Whether all groups share one site, held as its product (numpyro_pvi.sites.tie).
    tied: bool = False
    # Whether chains are compiled in beside weighted draws: switched on when some group's weights keep collapsing.
    chained: bool = False
    # "rows" or "latents" where sites are two numbers per row, the latter with one predictor per latent; else None.
    rows: str | None = None
    # Whether the rows at hand came by add_group or revisit, so that no Partition has their labels.
    arrived: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Its fields: what was worked out of them is not of another process, where words have other hashes."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Programs are looked up by it, in every round of its own.
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.compare))

    @functools.cached_property
    def _reduced(self) -> dict[tuple[bool, bool], Plan]:
        return {}

    def reduced(self, sizes: bool, labels: bool) -> Plan:
        """The plan as compiled programs see it, always the same object: no signature, no absent groups.

        ``sizes``: whether they read the groups' sizes; ``labels``: whether they read their labels.
        """
        if (sizes, labels) not in self._reduced:
            part = without_labels(self.partition, self.padded_rows, sizes, labels)
            self._reduced[sizes, labels] = dataclasses.replace(
                self, partition=part, signature=None, absent=(), arrived=False
            )
        return self._reduced[sizes, labels]

    @property
    def groups(self) -> tuple:
        """Labels of all groups: absent ones, then those whose rows are at hand."""
        return (*self.absent, *self.partition.table.labels)

    @property
    def factors(self) -> tuple:
        """What the factors are to a solver: how their expectations, or their moments, are taken."""
        return self.partition.likelihood, self.partition.prior_kind

    # What latents are measured in, in words: see :attr:`latent_shapes`.
    measured = "unconstrained shapes"

    @property
    def own_latents(self) -> tuple[str, ...]:
        """Latents inside the partitioned plate, of which every row has its own."""
        local = self.partition.local
        return () if local is None else local.names

    @property
    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all latents by name, rows' own among them: in unconstrained space."""
        part = self.partition
        found = dict(zip(part.layout.names, part.layout.shapes, strict=True))
        if part.local is not None:
            flat = jax.ShapeDtypeStruct((part.local.size, part.local.width), jnp.result_type(float))
            found |= {n: tuple(x.shape) for n, x in jax.eval_shape(part.local.unflatten, flat).items()}
        return found

    def shapes_in(self, trace: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The same as a trace of the model has them."""
        layout = model_layout(trace)
        return dict(zip(layout.names, layout.shapes, strict=True))

    @property
    def coupled(self) -> str | None:
        """Why the other groups' sites would be others without a group's rows, in words; None where they would not (law 10)."""
        part = self.partition
        if part.params:
            return f"the model's numpyro.param site(s) {', '.join(part.params)} were fitted with it"
        return self._coupled_by_q

    @property
    def _coupled_by_q(self) -> str | None:
        part = self.partition
        if part.likelihood != "quadratic":
            return "the other groups' sites were fitted at a q that had it in"
        if not self.family.full:
            return "q is mean-field, so the other groups' sites were fitted at a q that had it in"
        if part.has_prior_factor:
            return f"the PRIOR site ({', '.join(part.prior_latents)}) was fitted at a q that had it in"
        return None

    @property
    def loss_by_draws(self) -> bool:
        """Whether a factor's part of the ELBO is by draws though its moments, which are all that rounds need, are not."""
        return False

    def without_members(self, natural: Any) -> tuple[Plan, Any]:
        """The plan, and natural parameters, where no row is at hand: without members of q that only rows have."""
        return self, natural

    @property
    def chain_dim(self) -> int:
        """Coordinates of chains on a group's tilted distribution."""
        return self.family.dim

    @property
    def latents(self) -> Any:
        """How the model is traced at one of :meth:`shared_draws`: see :class:`numpyro_pvi.factors.FlatLatents`."""
        return FlatLatents(self.partition.layout)

    @property
    def told(self) -> dict[str, Any]:
        """What clients are told to take their rows for."""
        return {n: getattr(self.partition, n) for n in _TOLD} | {"chained": self.chained}

    def taking(self, told: Mapping[str, Any]) -> Plan:
        """A client's plan, with its rows taken for what it is told: the inverse of :attr:`told`."""
        part = dataclasses.replace(self.partition, **{n: told[n] for n in _TOLD})
        return dataclasses.replace(self, partition=part, chained=told["chained"])

    @property
    def found(self) -> dict[str, Any]:
        """What a client says that it has found at its rows, beside how the model is partitioned."""
        return {}

    @property
    def starts_curved(self) -> bool:
        """Whether ``init_sites="curvature"`` is for such a fit."""
        return True

    @property
    def early_checks(self) -> tuple[int, ...]:
        """Rounds after which claims are verified besides: the first where factors may jump, of which slopes say nothing."""
        return (1,) if self.by_slopes else ()

    @property
    def by_slopes(self) -> bool:
        """Whether any factor that may jump is taken to change as its slopes say."""
        return any(may_jump(self.partition, factor) for factor in ("likelihood", "prior factor"))

    def by_draws(self, rule: Rule) -> bool:
        """Whether any factor's expectations are by random draws, under a rule as NumPy's arrays."""
        part = self.partition
        random = {"auto": rule.points.sampled, "sigma_points": (False, False)}.get(part.unstructured, (True, True))
        kinds = zip((part.likelihood, part.prior_kind), random, strict=True)
        return any(kind == "reparameterised" or (kind in ("draws", "local") and bool(own)) for kind, own in kinds)

    def shared_draws(self, q: Any, rng_key: Any, count: int) -> Any:
        """Draws of the latents outside the partitioned plates from q, a leading axis long; latents of rows are left out.

        Returns what ``latents.trace`` takes, with a leading axis S.
        """
        return self.family.sample(q, rng_key, (count,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PVIState:
    """State of a fit: arrays, and one static field ``plan``. Holds no data, but for the rows' vectors where sites are by rows.

    With local latents ``sites.local`` holds the posterior of every row's own latents. The groups whose rows ``update``
    takes are *present*; of every other group there is its site alone, in ``sites.others``.

    ``rng_key``, ``optim_state`` and ``mutable_state`` are named as in ``SVIState``.
    """

    rng_key: Any
    # Natural parameters of every site, the groups' with a leading axis M (1 where they share one).
    sites: SiteStack
    # Natural parameters of the exactly held prior (at the current hyperparameters), and the coordinates it covers.
    prior: Any
    exact: Any
    # Optimiser state of the model's numpyro.param sites (their unconstrained values are inside); None without optim.
    optim_state: Any
    solver_state: Any
    prior_solver_state: Any
    schedule_state: Any
    packing: Packing | GroupMasks
    # The last round's report, and how often each factor has backed off since the start.
    report: RoundReport
    rule: Rule
    # Rounds done.
    step: Any
    plan: Plan = dataclasses.field(metadata={"static": True})

    @property
    def groups(self) -> tuple:
        """Labels of all groups, in the order of the stacked sites: absent ones, then present ones."""
        return self.plan.groups

    @property
    def present(self) -> tuple:
        """Labels of the groups whose rows ``update`` takes."""
        return self.plan.partition.table.labels

    @property
    def mutable_state(self) -> None:
        """PVI refuses models with mutable sites; here for readers of ``SVIState``."""
        return None


class PVIRunResult(SVIRunResult):
    """What ``run`` returns: an ``SVIRunResult`` (same fields, same unpacking) with three attributes more.

    Attributes:
        params: the guide's params and the model's ``numpyro.param`` values.
        state: the last :class:`PVIState`.
        losses: Float[rounds]; negative global ELBO in nats after each round; NaN where ``loss_every`` skipped it.
        info: the last round's :class:`PVIInfo`.
        converged: whether ``tol`` was reached: no factor was left out, the loss is finite, and what q is still asked to move is
            within ``tol``, or within the noise of draws (the message says so); None when ``tol`` was not given.
        message: one sentence on how the run ended.
        trace: the :class:`PVITrace` of the rounds that ran; None when none did.

    ``epsilon`` and ``delta`` are those of ``info``: what was released since the state was made, None where nothing is counted.
    """

    info: PVIInfo | None
    converged: bool | None
    message: str
    trace: PVITrace | None

    def __new__(cls, params, state, losses, info=None, converged=None, message="", trace=None):
        """Make the three-tuple and attach the rest."""
        self = super().__new__(cls, params, state, losses)
        self.info, self.converged, self.message, self.trace = info, converged, message, trace
        return self

    @property
    def epsilon(self) -> float | None:
        """Epsilon in nats of all that was released, under a solver that is private: see :class:`PVIInfo`."""
        return None if self.info is None else self.info.epsilon

    @property
    def delta(self) -> float | None:
        """The probability beside it."""
        return None if self.info is None else self.info.delta

    def __getattr__(self, name: str) -> Any:
        """Say what to write where a result is given for a state."""
        known = {field.name for field in dataclasses.fields(PVIState)}
        remedy = ": its state has, so pass result.state" if name in known else ""
        raise AttributeError(f"a PVIRunResult has no attribute {name!r}{remedy}")


@dataclasses.dataclass(frozen=True)
class PVITrace:
    """What happened in every round of a run, as NumPy arrays with a leading axis of rounds (R); F factors as ``labels``.

    Attributes:
        labels: the factors, the prior factor (if any) first.
        rounds: Int[R], rounds since the state was made.
        elbo: Float[R], global ELBO after each round, nats.
        total_move: Float[R], largest change of a posterior mean or log sd in the round, in posterior sds.
        move: Float[R F], largest change of a posterior mean by each factor's step, in posterior sds.
        step: Float[R F], share of each factor's proposed change that was taken.
        backoffs: Int[R F], halvings.
        skipped: Bool[R F].
        staleness: Int[R F], changes of q that a group had not seen when its last site was absorbed.
        clock: Float[R], simulated time at the end of each round: in the units of a schedule's delays (seconds where they are real),
            else one a round.
        messages: Int[R 2], natural parameters sent so far, by groups and to groups.
        bytes: Int[R], their bytes so far, as the numbers lie in memory.
        trips: Int[R], under a runtime with clients, how often they were asked in each round, all that were asked at once counted
            once; zeros without. What was sent for evaluations between rounds is in ``info.traffic`` alone.
        sent: Int[R], bytes that were really sent to clients in each round, repetitions included; likewise.
        received: Int[R], bytes that really came from them; likewise.
        consensus: Float[R], largest distance of a group's own q from the common one, in posterior sds; 0 with a server.
        gaps: Float[R 2], nats, of consensus rounds, whose ``elbo`` is DELBO on the rows that the round took: its consensus gap
            (mean KL from the network's mean to the agents' q) and its modelling gap (KL of the Gaussian updates to the exact
            ones; known for updates by one number or of quadratic factors). NaN where they are not known.
        asked: Float[R F], the move that each factor asked for, undamped, in posterior sds.
        left: Float[R], what q was still asked to move, or would still have moved at the observed rate of contraction, in
            posterior sds: what ``tol`` is about.
    """

    labels: tuple
    rounds: Any
    elbo: Any
    total_move: Any
    move: Any
    step: Any
    backoffs: Any
    skipped: Any
    staleness: Any
    clock: Any
    messages: Any
    bytes: Any
    consensus: Any
    gaps: Any = None
    asked: Any = None
    left: Any = None
    trips: Any = None
    sent: Any = None
    received: Any = None


@dataclasses.dataclass(frozen=True)
class PVIInfo:
    """What happened to every factor in the last round; ``str()`` is a table with labels.

    One entry per factor, in the order of ``labels`` (the prior factor, if any, first).

    Attributes:
        labels: the factors: ``PRIOR`` where the prior has a site, groups whose rows are not at hand, groups whose rows are.
        move: Float[F], largest change of a posterior mean by the factor's step, in posterior sds.
        asked: Float[F], the same by the whole of what the factor asks for, undamped (under some solvers log sds as well).
        step: Float[F], share of the proposed change that was taken; 0 for a skipped factor.
        backoffs: Int[F], halvings in the last round.
        skipped: Bool[F], whether the factor made no step in the last round.
        skip_run: Int[F], rounds running in which it made none.
        cavity_proper: Bool[F], whether q without the factor's site (its cavity) is normalisable; an improper one is legal for VI
            solvers.
        ess: Float[F], effective number of weighted draws, where moments are matched by them; NaN where expectations are exact, or
            by draws that all count alike.
        structure: what every factor was found to be: "quadratic", "affine", "draws", "enumerated", ...
        expectation: how its expectations, or the moments of its tilted distribution, are taken.
        valid: whether q was normalisable.
        total_move: largest change of any posterior mean or log sd in the last round, in posterior sds.
        rounds: since the state was made.
        consensus: largest distance of a group's own q from the common one, in posterior sds; 0 with a server.
        agents: without a server, natural parameters of every agent's own q by label, read when they are asked for; else empty.
        left: posterior sds that q is still asked to move, or would still move at the observed rate: what ``tol`` is about.
        delbo: DELBO on the rows that the last consensus round took, its consensus gap and its modelling gap, nats; NaN elsewhere.
        rhat: of factors whose tilted moments are by chains, the largest split R-hat; NaN elsewhere.
        divergent: of the same, the share of divergent transitions.
        evidence: how the structure is known: "proved" for all values of latents and parameters, "found" at points and verified
            where q is, "" where none is used.
        sites: how sites are held: "dense", or "rows" where they are two numbers per row.
        notes: remarks, a sentence each: what holds the fit back, what was given up, what was kept whole.
        traffic: under a runtime with clients, round trips, messages and bytes that were really sent so far; else None.
        epsilon: under :class:`numpyro_pvi.solvers.DifferentialPrivacy`, epsilon in nats of all that was released since the state
            was made, of the group of which most was; infinite without noise, None under other solvers.
        delta: the probability beside it.
        epsilons: the same by group; groups' rows are disjoint, so that they do not add up.
    """

    labels: tuple
    move: Any
    asked: Any
    step: Any
    backoffs: Any
    skipped: Any
    skip_run: Any
    cavity_proper: Any
    ess: Any
    structure: tuple[str, ...]
    expectation: tuple[str, ...]
    valid: bool
    total_move: float
    rounds: int
    consensus: float = 0.0
    agents: Mapping[Hashable, Any] = dataclasses.field(default_factory=dict)
    left: float = math.nan
    delbo: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    rhat: Any = None
    divergent: Any = None
    evidence: tuple[str, ...] = ()
    sites: str = "dense"
    notes: tuple[str, ...] = ()
    traffic: Any = None
    epsilon: float | None = None
    delta: float | None = None
    epsilons: Mapping[Hashable, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        header = (
            "factor",
            "asked (sd)",
            "taken (sd)",
            "step",
            "back-offs",
            "skipped",
            "cavity",
            "ess",
            "structure",
            "expectation",
        )
        rows = [header]
        for i, label in enumerate(self.labels):
            rows.append(
                (
                    str(label),
                    f"{float(self.asked[i]):.2e}",
                    f"{float(self.move[i]):.2e}",
                    f"{float(self.step[i]):.3g}",
                    str(int(self.backoffs[i])),
                    f"{int(self.skip_run[i])} rounds" if self.skipped[i] else "no",
                    "proper" if self.cavity_proper[i] else "improper",
                    "-" if self.ess[i] != self.ess[i] else f"{float(self.ess[i]):.0f}",
                    self.structure[i]
                    + (f" ({self.evidence[i]})" if i < len(self.evidence) and self.evidence[i] else ""),
                    self.expectation[i],
                )
            )
        widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        state = "normalisable" if self.valid else "NOT normalisable"
        lines.append(
            f"after {self.rounds} rounds: q is {state}; largest move in the last round {self.total_move:.2e} sd, "
            f"about {self.left:.2e} sd left"
        )
        if self.consensus > 0:
            lines.append(f"agents are at most {self.consensus:.2e} sd from the network's mean")
        if self.delbo[0] == self.delbo[0]:
            value, consensus, modelling = self.delbo
            lines.append(
                f"DELBO of the last rows {value:.6g} nats; gaps: consensus {consensus:.2e}, modelling {modelling:.2e}"
            )
        if self.rhat is not None and any(x == x for x in self.rhat):
            told = [
                f"{label}: R-hat {float(rhat):.3f}, {float(share):.1%} divergent"
                for label, rhat, share in zip(self.labels, self.rhat, self.divergent, strict=True)
                if rhat == rhat
            ]
            lines.append(f"chains: {'; '.join(told)}")
        if self.traffic is not None:
            lines.append(
                f"clients: {self.traffic.trips} round trips so far, {self.traffic.sent} bytes to them and {self.traffic.received} "
                "from them" + (f", {self.traffic.restarts} clients begun anew" if self.traffic.restarts else "")
            )
        if self.epsilon is not None:
            lines.append(f"released so far: epsilon {self.epsilon:.4g} at delta {self.delta:.2g}")
        return "\n".join([*lines, *self.notes])
