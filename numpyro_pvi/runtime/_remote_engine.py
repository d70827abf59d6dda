"""The engines of fits whose rounds are with clients, for every family of q; and what clients do not answer for."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._state import Plan, PVIState
from ..errors import PVIError
from ..expectations import (
    RULES,
    AffineProgram,
    IntegratedProgram,
    LocalLatentProgram,
    PointsProgram,
    QuadraticProgram,
    product_nodes,
)
from ..factors import exact_log_constant
from ..schedules import RoundCarry
from ..sites import Held
from ._engine import Engine
from ._factors import FactorData
from ._network import ask_all, spent
from ._product_engine import ProductEngine
from ._product_factors import ProductFactors
from ._product_problem import ProductProblem
from ._programs import FactorReader, own_rules, whole_call
from ._remote import AskedFactors, AskedProduct, InTurn, RemoteProblem, RowValues
from ._tilted import keeps_rows
from ._verification import SLOPES_OF, Check, direction_of, draws_of, num_draws, verify_claims


def refuse_remotely(plan: Any, engine: Any) -> None:
    """Raise for a fit whose factors clients cannot answer for. Raises PVIError naming what it is, and why."""
    part, schedule, who = plan.partition, engine.schedule, type(engine.solver).__name__
    reasons = engine.unasked(plan) | {
        f"{type(schedule).__name__}": (
            bool(schedule.streams or schedule.has_agents),
            "its groups talk with each other, without a server, and in this process they are simulated",
        ),
        f"one site for all groups ({who})": (plan.tied, "every client has a site of its own"),
        f"sites of single rows ({who}(factors='row'))": (
            engine.solver.factors == "row",
            "a server would hold them; pass factors='group'",
        ),
        "groups whose rows are not at hand": (bool(plan.absent), "no client answers for them"),
        "rows that no argument holds": (
            part.mechanism != "args" or part.rows.whole,
            "a client is given its rows as arguments whose leading axis is the plate's",
        ),
    }
    for what, (found, why) in reasons.items():
        if found:
            raise PVIError(f"clients do not go with {what}: {why}. Leave runtime out to fit in this process.")


def remote_problem(
    engine: Any,
    plan: Plan,
    network: Any,
    prior: tuple,
    num_rules: int,
    tells_step: bool,
    fresh: bool = False,
    stream: Any = None,
    keeps: bool = True,
    starts: tuple[int, ...] = (),
    params: Any = (),
) -> RemoteProblem:
    """The factors of clients, as rounds take them.

    ``plan``: the plan, of which labels, sizes and structure are read; ``prior``: ``(natural, exact, log partition)`` of the
    exactly held prior, and ``(program, arrays)`` of the prior factor; ``tells_step``: whether visits say what share of their
    change was taken; ``fresh``: whether looks wait for clients that are at work; ``params``: constrained values of the model's
    ``numpyro.param`` sites. Raises PVIError where expectations are by points that only a look at all rows can choose.
    """
    natural, exact, partition, (prior_program, prior_data) = prior
    part, family, count = plan.partition, plan.family, plan.partition.table.num_groups
    program = bare_program(plan, num_rules, engine)
    # Of the rows nothing is here; more than one a group, for whoever asks how many.
    chunks = ((None, jnp.zeros((count, 2), bool)),)
    data = FactorData(chunks, jnp.arange(count), jnp.arange(count + 1), prior_data, natural, exact, partition)
    dtype = natural.precision_mean.dtype
    told = tuple(jax.tree.leaves(params))
    rows = RowValues(network, count, dtype, num_rules, fresh, told) if engine.solver.stochastic else None
    fields = {"rows": rows, "labels": part.table.labels, "network": network, "tells_step": tells_step, "fresh": fresh}
    fields |= {"stream": stream, "params": told}
    if part.local is not None:
        fields |= {"units": (part.local.size, part.local.width), "keeps": keeps, "starts": starts or (0,) * count}
        fields |= {"looks": part.local.looks}
    quadratic = part.likelihood == "quadratic"
    return RemoteProblem(
        family, engine.solver, engine.runtime, program, prior_program, quadratic, num_rules, data, **fields
    )


def bare_program(plan: Plan, num_rules: int, engine: Any) -> Any:
    """The likelihood's program as far as it is known without rows.

    Raises PVIError for a likelihood whose expectations no question asks for.
    """
    part, family = plan.partition, plan.family
    if part.likelihood == "quadratic":
        return QuadraticProgram(family)
    if part.likelihood == "affine":
        return AffineProgram(part.terms, family, num_rules)
    if part.likelihood == "draws":
        pairs = max(engine.solver.num_draws, -(-engine.num_particles // 2))
        nodes = product_nodes(family.dim, part.table.num_rows)
        return PointsProgram(_no_rows, family, part.unstructured, pairs, nodes)
    if part.likelihood == "local":
        local = LocalLatentProgram(_no_rows, family, rules=own_rules(part, engine.solver))
        return IntegratedProgram(_no_rows, family, 1) if engine.solver.matches_moments else local
    raise PVIError(
        "clients answer for factors that are quadratic, seen through affine predictors, or taken by points or draws; the "
        f"likelihood of {part.where} was found to be {part.likelihood!r}, of which no question asks. Pass solver=LocalELBO() or "
        "PowerEP(moments='importance'), or leave runtime out to fit in this process."
    )


def _no_rows(*_: Any) -> Any:
    raise PVIError("a server has no rows to evaluate")


class Tallies:
    """Rounds that ask clients, and count what is sent; a base class of the engines."""

    network: Any
    of_clients = True

    def tallied(
        self, state: PVIState, carry: RoundCarry, ends: Bool[Array, ""], loss: Float[Array, ""]
    ) -> tuple[PVIState, RoundCarry]:
        """See :meth:`numpyro_pvi.runtime._rounds.RoundEngine.tallied`: what was really sent, repetitions included."""
        # All that the round asked for must have come before it is counted.
        after = carry.sites, carry.schedule, carry.report, loss
        report = carry.report._replace(traffic=spent(self.network, ends, after))
        return dataclasses.replace(state, report=report), carry._replace(report=report)


@dataclasses.dataclass(frozen=True)
class RemoteEngine(Tallies, Engine):
    """The engine of a fit whose rounds are with clients; what is done before and between them passes over the rows here.

    Args:
        network: who carries questions.
        fresh: whether looks wait for clients that are at work.
        keeps: whether clients keep what looks find that their own latents want, as rounds go by it.
    """

    network: Any = None
    fresh: bool = False
    keeps: bool = True

    # Whether this process has the rows, too.
    rows_here = True

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state, which every client is asked for, in nats; see :meth:`Engine.loss`."""
        return Engine.loss(dataclasses.replace(self, fresh=True, keeps=False), state, args, kwargs, fine)

    def factor_values(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Float[Array, "F"]:
        """Every factor's expected log density under a state's q, which every client is asked for; see :class:`RoundEngine`."""
        return Engine.factor_values(dataclasses.replace(self, fresh=True, keeps=False), state, args, kwargs, fine)

    def start(self, plan: Plan, packing: Any, args, kwargs, optim_state, loc, sd, local, mode: str):
        """Arrays of a fresh state; what groups hold beside their sites is with the clients. See :meth:`Engine.start`.

        Raises PVIError for a start from the curvature of groups with latents of their own.
        """
        if plan.partition.local is None:
            return super().start(plan, packing, args, kwargs, optim_state, loc, sd, local, mode)
        if mode == "curvature":
            raise PVIError(
                "init_sites='curvature' does not go with clients that have latents of their own "
                f"({', '.join(plan.partition.local.names)}): leave init_sites out, so that sites start at 1."
            )
        fields, outside, proper = super().start(plan, packing, args, kwargs, optim_state, loc, sd, local, "prior")
        held = Held(jnp.zeros((plan.partition.table.num_groups, 2), jnp.int32), local)
        return fields | {"sites": dataclasses.replace(fields["sites"], local=held)}, outside, proper

    def unvisited(self, problem: Any) -> dict[str, Any]:
        """See :meth:`Engine.unvisited`; of rows that are here rounds see what clients say, and nothing of their own latents."""
        return super().unvisited(dataclasses.replace(problem, away=True))

    def unasked(self, plan: Plan) -> dict[str, tuple[bool, str]]:
        """What no question is asked about under a Gaussian guide: whether it is there, and why."""
        part, schedule = plan.partition, self.schedule
        return {
            f"numpyro.param sites ({', '.join(part.params)}) under {schedule!r}": (
                bool(part.params) and schedule.at_their_pace,
                "their step needs all rows' gradients at one q, and no round waits for all clients",
            ),
            "sites of two numbers a row": (
                plan.rows is not None,
                "they say what the rows are: pass NaturalGradient(sites='dense')",
            ),
            f"latents inside the partitioned plate under {schedule!r}": (
                part.local is not None and not schedule.carries_own,
                "pass Synchronous(), StochasticSubset(...) or Sequential(), under which they stay with their client",
            ),
        }

    def refuse(self, state: PVIState) -> None:
        """Raise for a fit whose factors clients cannot answer for."""
        refuse_remotely(state.plan, self)
        bare_program(state.plan, len(RULES), self)

    def _state_problem(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Any:
        params, prior = self.constrain(state.plan, args, kwargs, state.optim_state), (state.prior, state.exact)
        return self._asked(state, args, kwargs, params, prior, fine)

    def _at_params(self, state: PVIState, args: tuple, kwargs: dict, params: dict, fine: bool) -> Any:
        return self._asked(state, args, kwargs, params, None, fine)

    def _asked(self, state: PVIState, args, kwargs, params: dict, prior: Any, fine: bool) -> Any:
        """The factors of clients, whose prior is read off the model here."""
        self.refuse(state)
        num_rules = len(RULES) - (not fine)
        own: Any = self.problem(state.plan, state.packing, args, kwargs, params, prior, num_rules)
        if own.matches_moments and keeps_rows(own):
            raise PVIError(
                f"clients do not go with sites of single rows ({type(self.solver).__name__}(factors='row'), or groups of one row "
                "each): a server would hold them. Pass PowerEP(factors='group')."
            )
        prior = own.data.prior_natural, own.data.exact, own.data.prior_partition, (own.prior_program, own.data.prior)
        tells, fresh = self.network.tells_step, self.fresh or not self.schedule.at_their_pace
        how = num_rules, tells, fresh, own.stream, self.keeps, (), params
        return remote_problem(self, state.plan, self.network, prior, *how)

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool):
        """The evidence, from the rows in this process, or from what clients say of theirs that have latents of their own."""
        if self.rows_here and state.plan.partition.local is None:
            here = Engine(self.model, self.solver, self.schedule, self.runtime, self.optim, self.num_particles)
            return here.evidence(state, args, kwargs, fine)
        problem: Any = self._state_problem(state, args, kwargs, fine)
        return self.evidence_at(problem, state, partial(problem.evidence_of_groups, local=state.sites.local))


@dataclasses.dataclass(frozen=True)
class RowlessEngine(RemoteEngine):
    """The engine of a fit in a process that has no row: what is done before and between rounds is asked of the clients, too.

    The model's arguments here are arrays of the rows' shapes that hold nothing; of the model nothing is evaluated but its prior.
    """

    rows_here = False
    # Programs tell each client where its units stand among all, and one of a single row from others.
    reads_sizes = True

    def problem(
        self,
        plan: Plan,
        packing: Any,
        args: tuple,
        kwargs: dict,
        params: dict,
        prior: Any,
        num_rules: int,
        others: Any = None,
        roughly: bool = False,
    ) -> Any:
        """The factors of clients: see :meth:`Engine.problem`."""
        refuse_remotely(plan, self)
        part = plan.partition
        if self.solver.matches_moments and (self.solver.factors == "row" or min(part.table.sizes) == 1):
            raise PVIError(
                f"clients do not go with sites of single rows ({type(self.solver).__name__}(factors='row'), or a client of one "
                "row): a server would hold them. Pass PowerEP(factors='group'), and give every client two rows or more."
            )
        call = whole_call(self.model, part, args, kwargs, params)
        natural, exact = self.exact_prior(plan, call)[:2] if prior is None else prior
        reader = FactorReader(plan, call, packing, self.solver, self.runtime, self.num_particles, num_rules, natural)
        given = natural, exact, -exact_log_constant(call, part.exact), reader.prior_factor()
        fresh = self.fresh or not self.schedule.at_their_pace
        holders: Any = self.runtime.elsewhere
        stream = InTurn(holders.came)
        sizes = part.table.sizes
        starts = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        how = num_rules, self.network.tells_step, fresh, stream, self.keeps, starts, params
        return remote_problem(self, plan, self.network, given, *how)

    def _state_problem(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Any:
        return Engine._state_problem(self, state, args, kwargs, fine)

    def _at_params(self, state: PVIState, args: tuple, kwargs: dict, params: dict, fine: bool) -> Any:
        return Engine._at_params(self, state, args, kwargs, params, fine)

    def verify(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
        """The claims beside the model: those of the likelihood are compared by the clients, at the same draws from q."""
        plan, count = state.plan, num_draws(state.packing)
        proved = plan.partition.proved | {"likelihood", "additivity"}
        jumps = tuple(factor for factor in plan.partition.jumps if factor != "likelihood")
        prior = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, proved=proved, jumps=jumps))
        found = verify_claims(self, dataclasses.replace(state, plan=prior), args, kwargs) if self.claims(prior) else {}
        asked = [claim for claim in ("likelihood", SLOPES_OF + "likelihood") if claim in self.claims(plan)]
        if not asked:
            return found
        places, valid = draws_of(state, count)
        one = (jax.ShapeDtypeStruct((count,), places[0].dtype),) * 4
        params = self.constrain(plan, args, kwargs, state.optim_state)
        tangent = jax.tree.leaves(direction_of(params, state))
        count, told = plan.partition.table.num_groups, tuple(jax.tree.leaves(params))
        own = ask_all(self.network, {"ask": "verify"}, one, count, (*places, *tangent), params=told)
        checks = {"likelihood": own[:2], SLOPES_OF + "likelihood": own[2:]}
        return found | {c: Check(jnp.where(valid, checks[c][0].T, 0.0), checks[c][1].T) for c in asked}


@dataclasses.dataclass(frozen=True)
class SummedEngine(RowlessEngine):
    """The engine of a fit whose clients are heard in sums only: one group, whose site is the sum of the clients' sites.

    Args:
        looks: whether the clients' values are asked for, in sum, as a loss needs them; rounds ask for none.
    """

    looks: bool = False

    tells_factors = False

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state, from the sum of the clients' values, in nats; see :meth:`Engine.loss`."""
        return Engine.loss(dataclasses.replace(self, fresh=True, looks=True), state, args, kwargs, fine)

    def unseen(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> None:
        """Rounds evaluate nothing."""

    def problem(self, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        """The factors of clients: see :meth:`Engine.problem`.

        Raises PVIError for a model with ``numpyro.param`` sites, or latents inside the plate.
        """
        part = plan.partition
        what = [f"numpyro.param sites ({', '.join(part.params)}), whose step is of the clients' gradients"] * bool(
            part.params
        )
        if part.local is not None:
            what += [
                f"latents inside the plate ({', '.join(part.local.names)}), whose own steps go with each client's site"
            ]
        if what:
            raise PVIError(
                f"clients that are heard in sums only do not go with {' or '.join(what)}: fit with "
                "runtime=InProcess(clients=...), whose clients answer one by one."
            )
        return dataclasses.replace(super().problem(plan, *args, **kwargs), only_visits=not self.looks, summed=True)

    def start(self, plan: Plan, packing: Any, args, kwargs, optim_state, loc, sd, local, mode: str):
        """Arrays of a fresh state, whose sites say nothing: clients start from nothing too; see :meth:`Engine.start`.

        Raises PVIError for a start from the clients' curvatures.
        """
        if mode == "curvature":
            raise PVIError(
                "init_sites='curvature' starts sites at what each client sees alone, and clients that are heard in sums tell no "
                "such thing: leave init_sites out, and sites start at 1; init_params may say where q starts."
            )
        return super().start(plan, packing, args, kwargs, optim_state, loc, sd, local, "prior")

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool):
        """There is none: it is made of every client's own part. Raises PVIError always."""
        raise PVIError(
            "log_evidence needs every client's own site and what normalises it, and these clients are heard in sums only: "
            "pvi.evaluate(state) is a bound of it, or fit with runtime=InProcess(clients=...), which hears clients one by one."
        )

    def _opens(self, problem: Any, fits_params: bool) -> bool:
        return False

    def _state_problem(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> Any:
        # No look tells a server that a finer rule is needed: clients refine on their own, as far as there are rules.
        return super()._state_problem(state, args, kwargs, True)


# ------------------------------------------------------------------------------------------------ products of families


@dataclasses.dataclass(frozen=True)
class RemoteProductEngine(Tallies, ProductEngine):
    """The engine of a fit under families whose rounds are with clients; what is done before and between passes over the rows here.

    Args:
        network: who carries questions.
        asks: whether factors are the clients', as they are in rounds.
    """

    network: Any = None
    asks: bool = False

    def problem(self, state: PVIState, args: tuple, kwargs: dict, params: dict | None = None) -> ProductProblem:
        """The factors of a state, those of clients in rounds."""
        found = super().problem(state, args, kwargs, params)
        if not self.asks:
            return found
        given = {f.name: getattr(found, f.name) for f in dataclasses.fields(ProductProblem)}
        return AskedProduct(**given, network=self.network, params=tuple(jax.tree.leaves(found.call.params)))

    def factors(self, problem: Any, *beside: Any) -> ProductFactors:
        """The factors as schedules see them."""
        return AskedFactors(problem, self.solver, *beside, tells_step=self.network.tells_step)

    def rounds(self, *args: Any, **kwargs: Any) -> Any:
        """Run rounds, which ask clients: see :meth:`ProductEngine.rounds`."""
        return ProductEngine.rounds(self._asking, *args, **kwargs)

    def unseen(self, *args: Any, **kwargs: Any) -> Any:
        """Of the clients' factors: see :meth:`ProductEngine.unseen`."""
        return ProductEngine.unseen(self._asking, *args, **kwargs)

    def factor_values(self, *args: Any, **kwargs: Any) -> Any:
        """Every factor's expected log density at a state, which every client is asked for: see :class:`RoundEngine`."""
        return ProductEngine.factor_values(self._asking, *args, **kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Negative global ELBO at a state, which every client is asked for, in nats: see :meth:`ProductEngine.loss`."""
        return ProductEngine.loss(self._asking, *args, **kwargs)

    @property
    def _asking(self) -> RemoteProductEngine:
        return dataclasses.replace(self, asks=True)

    def unasked(self, plan: Any) -> dict[str, tuple[bool, str]]:
        """What no question is asked about under families: whether it is there, and why."""
        own, who = ", ".join(x.name for x in plan.inside), type(self.solver).__name__
        return {
            f"latents inside the partitioned plate ({own}) under AutoExponentialFamily": (
                bool(plan.inside),
                "q has members for single rows, which a server would hold: sum or integrate them out in the model, or use a "
                "Gaussian guide, under which they stay with their client",
            ),
            f"{who} under {type(self.schedule).__name__} and AutoExponentialFamily": (
                self.in_turns and self.solver.stochastic,
                "groups take every step together, each by a few of its rows, so that a round would ask as often as it has steps: "
                "pass NaturalGradient(), or LocalELBO(...), whose steps are a client's own",
            ),
        }

    def refuse(self, state: PVIState) -> None:
        """Raise for a fit whose factors clients cannot answer for."""
        refuse_remotely(state.plan, self)


@dataclasses.dataclass(frozen=True)
class RowlessProductEngine(RemoteProductEngine):
    """The same in a process that has no row: what is done before and between rounds is asked of the clients, too."""

    asks: bool = True

    def factors(self, problem: Any, *beside: Any) -> ProductFactors:
        """The factors as schedules see them."""
        holders: Any = self.runtime.elsewhere
        return dataclasses.replace(super().factors(problem, *beside), came=holders.came)
