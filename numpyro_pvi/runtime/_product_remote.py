"""The factors of clients where q is a product of families: every turn over components is a question to those whose it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._state import PVIState
from ..errors import PVIError
from ..expectations import RULES
from ..families import ProductFamily, ProductNatural
from ..schedules import RoundCarry, Rule
from ..sites import SiteStack, cavity
from ..solvers import LocalResult
from ._network import Leaf, ask_all, call_out, seed_of, spent, stacked
from ._product_engine import ProductEngine, ProductFactors
from ._product_problem import ProductProblem
from ._product_rounds import Beside, Chosen, others
from ._remote import InTurn, visited


@dataclasses.dataclass(frozen=True)
class AskedProduct(ProductProblem):
    """The factors of all clients, or of some: what rows say of a q is asked for, and the prior factor's is here.

    Args:
        network: who carries questions.
        params: leaves of the constrained values of the model's ``numpyro.param`` sites, which every question tells.
        some: positions of the clients that are asked; None for all of them.
        there: which of these take part: what the others say is nothing.
    """

    network: Any = None
    params: tuple = ()
    some: Any = None
    there: Any = None

    @property
    def num_groups(self) -> int:
        """M, or as many as are asked."""
        return super().num_groups if self.some is None else self.some.shape[0]

    def values_and_messages(
        self, q: ProductNatural, key: Any, probs: Any = None, sites: SiteStack | None = None
    ) -> tuple[Float[Array, "M"], SiteStack]:
        """Every group's ``E_q[log f]`` in nats and its message; see :meth:`ProductProblem.values_and_messages`."""
        how, shared, own = self._question("message", q, key, sites)
        if probs is not None:
            own_probs = {n: probs[n] for n, _ in self.plan.likelihood.cells}
            how, shared = how | {"probs": True}, (*shared, *jax.tree.leaves(own_probs))
        *message, values = self._answers(how, self.params, shared, own, (*jax.tree.leaves(self._zeros), self._number))
        return values, self._stacked(message)

    def curvatures(self, q: ProductNatural, widest: float, key: Any) -> SiteStack:
        """Every group's message at no more than some variance: see :meth:`ProductProblem.curvatures`."""
        how, shared, own = self._question("curvature", q, key, None)
        told = how | {"widest": widest}, self.params, shared, own
        return self._stacked(list(self._answers(*told, tuple(jax.tree.leaves(self._zeros)))))

    @property
    def _zeros(self) -> Any:
        """Shapes of a message."""
        return jax.eval_shape(lambda: self.family.of(self.plan.shared).zeros((), self._dtype))

    def _stacked(self, message: list) -> SiteStack:
        return SiteStack(jax.tree.unflatten(jax.tree.structure(self._zeros), message), None)

    def _by_group(self, results: Any) -> Any:
        """Clients tell of groups, not of chunks."""
        return results

    def group_value_and_message(
        self, q: ProductNatural, sites: SiteStack, group: Int[Array, ""], key: Any
    ) -> tuple[ProductNatural, None, Float[Array, ""]]:
        """One group's message: that client is asked, and no other."""
        one = dataclasses.replace(self, some=jnp.asarray(group, jnp.int32)[None], there=None)
        values, messages = one.values_and_messages(q, key, sites=sites)
        return jax.tree.map(lambda x: x[0], messages.groups), None, values[0]

    def group_averages(self, q: ProductNatural, key: Any, control: SiteStack | None) -> Float[Array, "M"]:
        """Every group's ``E_q[log f_m]`` in nats; its derivative by the params is what clients tell of theirs."""
        if not self.params:
            return self._ask("average", q, key, control, (self._number,))[0]
        (how, *told), number = self._question("average", q, key, control), self._number

        @jax.custom_jvp
        def value(params: tuple, shared: tuple, own: tuple) -> Array:
            return self._answers(how, params, shared, own, (number,))[0]

        @value.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple:
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in primals[0])
            found, *slopes = self._answers({**how, "ask": "slope"}, *primals, (number, *shapes))
            parts = zip(slopes, tangents[0], strict=True)
            return found, sum(jnp.sum(x * t, axis=tuple(range(1, x.ndim))) for x, t in parts)

        return value(self.params, *told)

    def of_rows(
        self, what: str, here: Callable[[], tuple], q: ProductNatural, key: Any, own: Any = (), **how: Any
    ) -> tuple:
        """What clients say of their rows: see :meth:`ProductProblem.of_rows`."""
        one = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.eval_shape(here))
        told, shared, _ = self._question(what, q, key, None)
        if "seed" not in told:
            told["seed"], seed = seed_of(key)
            shared = (*shared, seed)
        places = jnp.arange(self.num_groups, dtype=jnp.int32)
        return self._answers(told | how, self.params, shared, (places, *jax.tree.leaves(own)), one)

    @property
    def _dtype(self) -> Any:
        return jax.tree.leaves(self.prior)[0].dtype

    @property
    def _number(self) -> Any:
        return jax.ShapeDtypeStruct((), self._dtype)

    @property
    def rules(self) -> int:
        """How many quadrature rules are compiled in."""
        return len(RULES) - (not self.plan.fine)

    def _ask(self, what: str, q: ProductNatural, key: Any, sites: SiteStack | None, one: tuple) -> tuple:
        """Ask clients about a q; ``sites`` are those of the clients that are asked, ``one`` shapes of an answer."""
        how, shared, own = self._question(what, q, key, sites)
        return self._answers(how, self.params, shared, own, one)

    def _question(self, what: str, q: ProductNatural, key: Any, sites: SiteStack | None) -> tuple[dict, tuple, tuple]:
        """A question's settings, what all clients are told, and what each alone is told: its site of what is drawn."""
        how, shared, own = {"ask": what, "rules": self.rules}, tuple(jax.tree.leaves(q)), ()
        if not self.plan.likelihood.exact:
            how["seed"], seed = seed_of(key)
            shared = (*shared, seed)
        if sites is not None:
            drawn = self.plan.likelihood.drawn
            own = tuple(jax.tree.leaves({n: x for n, x in sites.groups.parts.items() if n in drawn}))
        return how, shared, own

    def _answers(self, how: dict, params: tuple, shared: tuple, own: tuple, one: tuple) -> tuple:
        found = ask_all(self.network, how, one, self.num_groups, shared, own, params, self.some)
        if self.there is None:
            return found
        return tuple(jnp.where(self.there.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0) for x in found)


@dataclasses.dataclass(frozen=True)
class AskedBeside(AskedProduct, Beside):
    """The same of some clients, whose prior holds the sites of all others, and need not be normalisable."""


@dataclasses.dataclass(frozen=True)
class AskedFactors(ProductFactors):
    """The factors of clients as schedules see them: visits that are more than a look's message are theirs.

    Args:
        tells_step: whether visits say what share of their change was taken.
        came: by group, its client's number among those that were given, where clients have their own rows.
    """

    problem: AskedProduct
    tells_step: bool = False
    came: tuple[int, ...] = ()

    @property
    def stream(self) -> Any:
        """The order in which groups come: that in which clients were given, where they have their own rows."""
        return InTurn(self.came) if self.came else super().stream

    def few(self, sites: SiteStack, groups: Int[Array, "K"], there: Bool[Array, "K"]) -> tuple[Chosen, ProductProblem]:
        """Some clients and the problem of these, beside the sites of all others."""
        # Without rows, none of which is here.
        rows: Any = None
        chosen, whole = Chosen(groups, there, rows, None), self.problem
        given = {f.name: getattr(whole, f.name) for f in dataclasses.fields(AskedProduct)}
        prior = others(whole, sites, chosen)
        return chosen, AskedBeside(**given | {"prior": prior, "some": groups, "there": there})

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Ask all clients, or some, for their sites from the same q."""
        if self.solver.immediate and not self.matches_moments:
            return super().visit_all(carry, key, noise, only)
        start, keys = None, jax.random.split(key, self.num_groups)
        if self.matches_moments:
            keys = jnp.broadcast_to(jax.random.fold_in(key, 0), (self.num_groups,))
        elif not (self.stochastic or self.blind):
            start = carry.evaluation.groups.value, carry.evaluation.groups.target
        groups = jnp.arange(self.num_groups, dtype=jnp.int32)
        operands = groups, carry.sites.groups, carry.solver, keys, start
        if only is not None:
            operands = jax.tree.map(lambda x: x[only], operands)
        return self._asked(carry.evaluation.q, *operands, noise, guarded=True)

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
        """Ask one client for its site from the current q."""
        del rule, local, alone
        key = jax.random.fold_in(key, 0) if self.matches_moments else key
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], (jnp.asarray(index, jnp.int32), site, state, key))
        found = self._asked(q, *one, None, noise, guarded=False)
        return jax.tree.map(lambda x: x[0], found), None

    def _asked(
        self, q: Any, groups: Int[Array, "k"], sites: Any, states: Any, keys: Any, start: Any, noise: Any, guarded: bool
    ) -> LocalResult:
        """Ask some clients for visits."""
        problem, dtype = self.problem, jax.tree.leaves(q)[0].dtype
        how = {"rules": problem.rules, "guarded": guarded, "start": start is not None}
        how["key"], keys = seed_of(keys)
        shared: tuple = problem.params
        if problem.params:
            how["params"] = len(problem.params)
        if not (self.matches_moments or problem.plan.likelihood.exact):
            how["seed"], seed = seed_of(noise)
            shared = (seed, *shared)
        rest = jax.vmap(lambda one: cavity(q, one))(sites)
        own = tuple(tuple(jax.tree.leaves(x)) for x in (rest, sites, states))
        own = (*own, keys, (groups, *jax.tree.leaves(start)))
        number, flag = jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), jnp.bool_)
        reported = jax.ShapeDtypeStruct((), jnp.int32), flag, *(number,) * self.tells_step
        memory = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in own[2])
        shapes = symmetric_leaves(self.family, dtype), memory, reported
        found = call_out(
            lambda who, own, shared: problem.network.visit(how, shared, who, own, shapes),
            stacked(tuple(x for part in shapes for x in part), groups.shape[0]),
            (groups, own, shared),
        )
        return visited(found, sites, states)


def symmetric_leaves(family: ProductFamily, dtype: Any) -> tuple[Leaf, ...]:
    """Shapes of a site's arrays, and which are symmetric matrices: those of which the family makes some.

    Args:
        family: of q.
        dtype: floating dtype.

    Returns:
        One entry per array.
    """
    with jax.ensure_compile_time_eval():
        zeros = family.zeros((), dtype)
        uneven = jax.tree.map(lambda x: jnp.arange(x.size, dtype=dtype).reshape(x.shape) ** 2, zeros)
        even = family.symmetrise(uneven)
        pairs = zip(jax.tree.leaves(uneven), jax.tree.leaves(even), strict=True)
        return tuple(Leaf(x.shape, x.dtype, not np.array_equal(x, y)) for x, y in pairs)


@dataclasses.dataclass(frozen=True)
class RemoteProductEngine(ProductEngine):
    """The engine of a fit under families whose rounds are with clients; what is done before and between passes over the rows here.

    Args:
        network: who carries questions.
        asks: whether factors are the clients', as they are in rounds.
    """

    network: Any = None
    asks: bool = False

    of_clients = True

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

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Negative global ELBO at a state, which every client is asked for, in nats: see :meth:`ProductEngine.loss`."""
        return ProductEngine.loss(self._asking, *args, **kwargs)

    @property
    def _asking(self) -> RemoteProductEngine:
        return dataclasses.replace(self, asks=True)

    def tallied(self, state: PVIState, carry: RoundCarry, loss: Float[Array, ""]) -> Any:
        """See :meth:`ProductEngine.tallied`: what was really sent, repetitions included."""
        # All that the round asked for must have come before it is counted.
        after = carry.sites, carry.report, loss
        report = carry.report._replace(traffic=spent(self.network, jnp.array(True), after))
        return dataclasses.replace(state, report=report), carry._replace(report=report), loss

    def refuse(self, state: PVIState) -> None:
        """Raise for a fit whose factors clients cannot answer for."""
        refuse_product_remotely(state.plan, self)


@dataclasses.dataclass(frozen=True)
class RowlessProductEngine(RemoteProductEngine):
    """The same in a process that has no row: what is done before and between rounds is asked of the clients, too."""

    asks: bool = True

    def factors(self, problem: Any, *beside: Any) -> ProductFactors:
        """The factors as schedules see them."""
        holders: Any = self.runtime.elsewhere
        return dataclasses.replace(super().factors(problem, *beside), came=holders.came)


def refuse_product_remotely(plan: Any, engine: Any) -> None:
    """Raise for a fit under families whose factors clients cannot answer for.

    Args:
        plan: the plan.
        engine: the fit's choices.

    Raises:
        PVIError: naming what it is, and why.
    """
    part, schedule, solver = plan.partition, engine.schedule, engine.solver
    who = f"{type(solver).__name__}"
    reasons = {
        f"latents inside the partitioned plate ({', '.join(x.name for x in plan.inside)}) under AutoExponentialFamily": (
            bool(plan.inside),
            "q has members for single rows, which a server would hold: sum or integrate them out in the model, or use a Gaussian "
            "guide, under which they stay with their client",
        ),
        f"{type(schedule).__name__}": (
            bool(schedule.streams or schedule.has_agents),
            "its groups talk with each other, without a server, and in this process they are simulated",
        ),
        f"{who} under {type(schedule).__name__} and AutoExponentialFamily": (
            engine.in_turns and solver.stochastic,
            "groups take every step together, each by a few of its rows, so that a round would ask as often as it has steps: pass "
            "NaturalGradient(), or LocalELBO(...), whose steps are a client's own",
        ),
        f"one site for all groups ({who})": (plan.tied, "every client has a site of its own"),
        f"sites of single rows ({who}(factors='row'))": (
            solver.factors == "row",
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
