"""The factors of a model whose rows are with clients: looks and visits go out of a compiled round, and answers come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._state import Plan, PVIState
from ..errors import PVIError
from ..expectations import (
    RULES,
    AffineProgram,
    DrawsProgram,
    Expected,
    IntegratedProgram,
    LocalLatentProgram,
    LocalNoise,
    PointSet,
    PointsProgram,
    QuadraticProgram,
)
from ..factors import exact_log_constant
from ..schedules import Evaluation, RoundCarry, Rule
from ..sites import Held, SiteStack, cavity, damp
from ..solvers import LocalResult
from ._answers import NUMBERS
from ._engine import Engine
from ._factors import Draws, FactorData
from ._held import Wanted
from ._local import LocalProblem, fall_explained
from ._network import TICKET, Leaf, Network, ask_all, call_out, seed_of, spent, stacked
from ._programs import FactorReader, whole_call
from ._refinement import cheaper_rule
from ._tilted import keeps_rows
from ._verification import Check, direction_of, draws_of, num_draws, verify_claims


class _Rows(NamedTuple):
    """Values of the groups' rows at points, asked for; takes the place of :class:`GroupRows`."""

    network: Network
    count: int
    dtype: Any
    num_rules: int
    fresh: bool
    params: tuple = ()

    def values(self, points: Float[Array, "S D"]) -> Float[Array, "M"]:
        """Each group's log-likelihood in nats, averaged over points."""
        how = {"ask": "values", "rules": self.num_rules, "clip": False}
        one = (jax.ShapeDtypeStruct((), self.dtype),)
        if not self.fresh:
            told, value = _last_seen(self.network, one, self.count, (points,))
            return _as_told(told, value)
        return ask_all(self.network, how, one, self.count, (points,), params=self.params)[0]


class InTurn(NamedTuple):
    """In which order clients came that have their own rows; takes the place of :class:`RowStream`, whose rows nobody reads."""

    places: tuple[int, ...]

    def first_rows(self) -> Int[Array, "M"]:
        """A number for every group that orders them as rows would in one process."""
        return jnp.asarray(self.places, jnp.int32)


@dataclasses.dataclass(frozen=True)
class RemoteProblem(LocalProblem):
    """The factors of a model as a schedule sees them, whose groups' parts clients answer; the prior factor's is here.

    A look is asked for once under every quadrature rule that is tried; a visit whose target is the message of the look at q
    (``solver.immediate``) is no question at all.

    Args:
        network: what carries questions and answers.
        tells_step: whether visits say what share of their change was taken.
        fresh: whether a look asks clients, and waits for those that are at work; else what they saw last stands for it, and the
            value of one that has said nothing yet is NaN (minus infinity where what it said is no number).
        only_visits: whether rounds ask for visits alone: of clients that are heard in sums there is one group, and its site is the
            sum of theirs.
        summed: whether it is such clients that look: no message is known, so that sigma points stay what they are.
        keeps: whether clients keep what a look finds that their groups want beside their sites, where they have latents of their
            own: what a schedule holds are names of it (:class:`numpyro_pvi.sites.Held`).
        starts: by group, the number of its first unit (plate index) among all, less what its client knows of that itself.
        params: leaves of the constrained values of the model's ``numpyro.param`` sites, which every question tells.
    """

    network: Any = None
    tells_step: bool = False
    fresh: bool = False
    only_visits: bool = False
    summed: bool = False
    keeps: bool = True
    starts: tuple[int, ...] = ()
    params: tuple = ()

    @property
    def blind(self) -> bool:
        """Whether visits alone look at rows: under a solver that says so, and where rounds only add."""
        return self.solver.private or self.only_visits

    @property
    def can_switch(self) -> bool:
        """Whether draws may take the place of sigma points."""
        return not self.summed and super().can_switch

    def sum_groups(self, expect: Callable[[Any], Expected], local: Any = None, apart: Any = None) -> Expected:
        """Ask all clients for their expectations; the moments and the rule are those that ``expect`` was made with."""
        del apart
        given = expect.keywords  # type: ignore[attr-defined]
        moments, probe, draws = given["moments"], given["probe"], given["noise"]
        # Known before a program runs in all looks but those of a start, which differ in nothing else.
        clip = given["clip"] if isinstance(given["clip"], bool) else None
        how = {"ask": "look", "rules": self.num_rules, "clip": clip}
        said, draws = _told(draws)
        how |= {"probe": probe is not None} | said
        raised = given["clip"] if clip is None else None
        shared = jax.tree.leaves((moments, jnp.asarray(given["level"], jnp.int32), probe, draws, raised))
        target = jax.eval_shape(lambda: self.family.zeros((), self.dtype))
        size, product = len(jax.tree.leaves(target)), jnp.zeros((self.num_groups, self.family.dim), self.dtype)
        wanted = None
        if self.units is not None:
            how |= {"held": self.keeps, "units": self.units[0]}
            own = local.tickets, jnp.asarray(self.starts, jnp.int32)
            flag = jax.ShapeDtypeStruct((), jnp.bool_)
            found = self._ask_held(how, (*self.seen_shapes(probe is not None), flag, flag), tuple(shared), own)
            *found, finite, valid, tickets = found
            wanted = Wanted(tickets, finite, valid)
            product = found[-1] if probe is not None else product
        elif self.fresh:
            one = self.seen_shapes(probe is not None)
            found = self._look(how, one, tuple(shared))
            product = found[-1] if probe is not None else product
        else:
            told, *found = _last_seen(self.network, self.seen_shapes(False), self.num_groups, tuple(shared))
            found[size] = _as_told(told, found[size])
        numbers = dict(zip(NUMBERS, found[size:], strict=False))
        numbers |= {"product": product, "local": wanted}
        return Expected(target=jax.tree.unflatten(jax.tree.structure(target), found[:size]), **numbers)

    def pairs(self, moments: Any, eps: Float[Array, "K D"]) -> Expected:
        """Ask all clients for antithetic pairs of draws; see :meth:`LocalProblem.pairs`."""
        count, zeros = eps.shape[0], jax.eval_shape(lambda: self.family.zeros((eps.shape[0],), self.dtype))
        number, vector = (jax.ShapeDtypeStruct((count, *x), self.dtype) for x in ((), (self.family.dim,)))
        one = (*jax.tree.leaves(zeros), number, vector)
        how = {"ask": "pairs", "rules": self.num_rules}
        found = self._look(how, one, (*jax.tree.leaves(moments), eps))
        *target, value, product = (jnp.sum(x, axis=0) for x in found)
        nothing = jnp.zeros_like(value)
        return Expected(value, jax.tree.unflatten(jax.tree.structure(zeros), target), product, *(nothing,) * 3)

    def _look(self, how: dict[str, Any], one: tuple, shared: tuple, own: tuple = ()) -> tuple:
        """Ask all clients; see :meth:`Network.look`."""
        return ask_all(self.network, how, one, self.num_groups, shared, own, self.params)

    # ---------------------------------------------------------------------------------------------------- params

    def rows_elbo_at(self, moments: Any, noise: Any, rule: Rule, local: Any = None) -> Float[Array, ""]:
        """What clients' rows add to the ELBO; its derivative by the params is the sum of what clients tell of theirs."""
        how, shared = {"ask": "slope", "rules": self.num_rules}, tuple(jax.tree.leaves((moments, rule)))
        said, arrays = self._drawn(noise, None if noise is None else noise.points)
        how, shared, own = how | said, (*shared, *arrays), ()
        if self.units is not None:
            how |= {"held": False, "units": self.units[0]}
            own = local.tickets, jnp.asarray(self.starts, jnp.int32)
        number = jax.ShapeDtypeStruct((), self.dtype)

        def ask(params: tuple, shared: tuple, own: tuple) -> tuple[Array, list[Array]]:
            one = (number, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params))
            value, *slopes = ask_all(self.network, how, one, self.num_groups, shared, own, params)
            return jnp.sum(value), [jnp.sum(x, axis=0) for x in slopes]

        @jax.custom_jvp
        def value(params, shared, own):
            return ask(params, shared, own)[0]

        @value.defjvp
        def _(primals, tangents):
            found, slopes = ask(*primals)
            return found, sum(jnp.sum(x * t) for x, t in zip(slopes, tangents[0], strict=True))

        return value(self.params, shared, own)

    def _drawn(self, noise: Draws | None, points: Any) -> tuple[dict[str, Any], tuple]:
        """How clients are told of a round's draws, and the arrays: pairs, points, and the key of what units draw for themselves."""
        how, arrays = {"draws": noise is not None, "points": points is not None}, ()
        if noise is not None:
            arrays += (noise.pairs,)
        if points is not None:
            arrays += points.eps, points.weight, jnp.asarray(points.count, jnp.int32)
        if self.units is not None and noise is not None and noise.local is not None:
            how["seed"], seed = seed_of(noise.local)
            arrays += (seed,)
        return how, arrays

    # -------------------------------------------------------------------------------- latents of the clients' own

    def _ask_held(self, how: dict[str, Any], one: tuple, shared: tuple, own: tuple) -> tuple:
        """Ask all clients about what they hold beside their sites; where they are to keep what comes of it, its names come last."""
        if how["held"] or how["ask"] == "look":
            one = (*one, TICKET)
        return self._look(how, one, shared, own)

    def noise(self, key: Any, num_particles: int = 1) -> Draws | None:
        """The draws of a round; those of units are made where these are, of the key that stands for them."""
        found = super().noise(key, num_particles)
        if found is None or self.units is None:
            return found
        return found._replace(local=jax.random.split(key, 5)[0])

    def between(self, old: SiteStack, aim: SiteStack, step: Any) -> SiteStack:
        """A share of the way, by clients where they hold something beside their sites."""
        if self.units is None:
            return super().between(old, aim, step)
        bare, given = (dataclasses.replace(x, local=None) for x in (old, aim))
        sites = self.tidy(damp(bare, given, step))
        zeros = jax.eval_shape(lambda: self.family.zeros((), self.dtype))
        one = () if self.matches_moments else tuple(jax.tree.leaves(zeros))
        own = old.local.tickets, aim.local.tickets
        *site, tickets = self._ask_held({"ask": "between", "held": True}, one, (jnp.asarray(step, self.dtype),), own)
        if site:
            sites = dataclasses.replace(sites, groups=jax.tree.unflatten(jax.tree.structure(zeros), site))
        return dataclasses.replace(sites, local=dataclasses.replace(old.local, tickets=tickets))

    def _apart(self, new: tuple, old: tuple) -> tuple:
        """How far clients' own latents have moved: the largest move in sds, and their part of the squared length in nats."""
        number = jax.ShapeDtypeStruct((), self.dtype)
        (one, at), (other, before) = new, old
        shared = tuple(jax.tree.leaves((at, before)))
        return self._ask_held({"ask": "apart", "held": False}, (number, number), shared, (one.tickets, other.tickets))

    def own_latents(self, local: Any, moments: Any, groups: Expected) -> tuple[Any, Bool[Array, ""]]:
        """Where clients keep them, and whether all of these say that they are normalisable."""
        if self.units is None:
            return super().own_latents(local, moments, groups)
        return local, jnp.all(groups.local.valid)

    def own_move(self, new: Evaluation, old: Evaluation) -> Float[Array, ""]:
        """The largest that any client tells; see :meth:`LocalProblem.own_move`."""
        return jnp.max(self._apart((new.local, new.moments), (old.local, old.moments))[0])

    def allowance(
        self, new_sites: SiteStack, new: Evaluation, old_sites: SiteStack, old: Evaluation, step: Float[Array, ""]
    ) -> Any:
        """What draws that contradict themselves may lose: see :meth:`LocalProblem.allowance`."""
        if self.units is None or not self.program.noisy:
            return super().allowance(new_sites, new, old_sites, old, step)
        own = jnp.sum(self._apart((new.local, new.moments), (old.local, old.moments))[1])
        noisy = [p for p in (self.program, self.prior_program) if p is not None and p.noisy]
        bare = (dataclasses.replace(x, local=None) for x in (new_sites, old_sites))
        pairs = tuple(zip(bare, (new, old), strict=True))
        return fall_explained(self.family, noisy, *pairs, step, self.units, own)

    def local_proposal(self, carry: RoundCarry, moved: Bool[Array, "M"]) -> Any:
        """Names of what groups that moved, and were finite, want beside their sites."""
        local, wanted = carry.sites.local, carry.evaluation.groups.local
        if self.units is None or wanted is None:
            return super().local_proposal(carry, moved)
        good = moved & wanted.finite & jnp.isfinite(carry.evaluation.groups.value)
        return dataclasses.replace(local, tickets=jnp.where(good[:, None], wanted.tickets, local.tickets))

    # ------------------------------------------------------------------------------------------------------ visits

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Ask all clients, or some, for their sites from the same q; see :class:`numpyro_pvi.schedules.Problem`."""
        if self.solver.immediate and not (self.matches_moments or self.only_visits):
            return super().visit_all(carry, key, noise, only)
        keys = jax.random.split(key, self.num_groups)
        groups = jnp.arange(self.num_groups, dtype=jnp.int32)
        start = None
        if not (self.matches_moments or self.stochastic or self.blind):
            start = dataclasses.replace(carry.evaluation.groups, local=None)
        operands = groups, carry.sites.groups, carry.solver, keys, start
        if only is not None:
            operands = jax.tree.map(lambda x: x[only], operands)
        groups, site, state, keys, start = operands
        rest = jax.vmap(lambda one: cavity(carry.evaluation.q, one))(site)
        noise, local = self._visit_noise(key, noise), carry.sites.local
        asked = groups, rest, site, state, keys, start
        if self.units is None:
            return self._ask(asked, carry.evaluation.rule, noise, guarded=True)
        found = self._ask(asked, carry.evaluation.rule, noise, guarded=True, held=local.tickets[groups])
        kept = jnp.where(found.moved[:, None], found.local, local.tickets[groups])
        return found._replace(local=dataclasses.replace(local, tickets=local.tickets.at[groups].set(kept)))

    def visit_group(
        self,
        index: Any,
        q: Any,
        site: Any,
        state: Any,
        key: Any,
        rule: Rule,
        noise: Any,
        local: Any = None,
        alone: bool = False,
    ) -> tuple[LocalResult, Any]:
        """Ask one client for its site from the current q."""
        del alone
        one = jnp.asarray(index, jnp.int32), cavity(q, site), site, state, key
        operands = (*jax.tree.map(lambda x: jnp.asarray(x)[None], one), None)
        rule = rule if self.matches_moments else cheaper_rule(rule)
        held = None if self.units is None else local.tickets[operands[0]]
        found = self._ask(operands, rule, self._visit_noise(key, noise), guarded=False, held=held)
        found = jax.tree.map(lambda x: x[0], found)
        if held is not None:
            local = dataclasses.replace(local, tickets=local.tickets.at[index].set(found.local))
        return found._replace(step=None if self.matches_moments else found.step, local=None), local

    def seen_shapes(self, probe: bool) -> tuple:
        """Shapes and dtypes of what one client says of a q."""
        number = jax.ShapeDtypeStruct((), self.dtype)
        vector = jax.ShapeDtypeStruct((self.family.dim,), self.dtype)
        target = jax.eval_shape(lambda: self.family.zeros((), self.dtype))
        return (*jax.tree.leaves(target), *(number,) * len(NUMBERS), *(vector,) * probe)

    @property
    def errands(self) -> Errands:
        """Visits that clients are at while others are absorbed."""
        return Errands(self)

    def evidence_of_groups(
        self, q: Any, sites: Any, states: Any, keys: Any, rule: Rule, local: Any = None
    ) -> tuple[Array, Array, Array]:
        """Ask all clients for their parts of the evidence: see :func:`numpyro_pvi.runtime._moments.group_evidence`."""
        how = {"ask": "evidence", "rules": self.num_rules, "key": str(jax.random.key_impl(keys))}
        own = tuple(jax.tree.leaves((sites, states, jax.random.key_data(keys))))
        number = jax.ShapeDtypeStruct((), self.dtype)
        one = number, number, jax.ShapeDtypeStruct((), jnp.bool_)
        if self.units is not None:
            how |= {"held": False}
            own = (*own, local.tickets)
        found = self._look(how, one, tuple(jax.tree.leaves((q, rule))), own)
        return found[0], found[1], found[2]

    def _ask(self, operands: tuple, rule: Rule, noise: Draws | None, guarded: bool, held: Any = None) -> LocalResult:
        how, own, shared, shapes = self.question(operands, rule, noise, guarded)
        groups, site, state = operands[0], operands[2], operands[3]
        names: tuple = ()
        if held is not None:
            how, names = {**how, "units": self.units[0]}, (TICKET,)  # type: ignore[index]
            own = (*own, (held, jnp.asarray(self.starts, jnp.int32)[groups]))
        found = call_out(
            lambda who, own, shared: self.network.visit(how, shared, who, own, shapes),
            stacked((*(x for part in shapes for x in part), *names), groups.shape[0]),
            (groups, own, shared),
        )
        if held is None:
            return visited(found, site, state)
        return visited(found[:-1], site, state)._replace(local=found[-1])

    def question(self, operands: tuple, rule: Rule, noise: Draws | None, guarded: bool) -> tuple:
        """A visit's settings, what each client is told and what all are told, and shapes of an answer's three parts."""
        _, rest, site, state, keys, start = operands
        how = {"rules": self.num_rules, "guarded": guarded, "start": start is not None}
        said, arrays = self._drawn(noise, None if noise is None or self.stochastic else noise.points)
        how |= {"key": str(jax.random.key_impl(keys)), **said}
        if self.only_visits:
            how |= {"counter": self.solver.counter(state)}
        told = () if start is None else jax.tree.leaves(start)
        own = tuple(tuple(jax.tree.leaves(x)) for x in (rest, site, state)) + (jax.random.key_data(keys), tuple(told))
        shared = (*jax.tree.leaves(rule), *arrays)
        if self.params:
            how, shared = {**how, "params": len(self.params)}, (*shared, *self.params)
        number, flag = jax.ShapeDtypeStruct((), self.dtype), jax.ShapeDtypeStruct((), jnp.bool_)
        reported = (jax.ShapeDtypeStruct((), jnp.int32), flag, *(number,) * self.tells_step)
        # Of a Gaussian's natural parameters a matrix is a precision.
        first = tuple(Leaf(x.shape[1:], x.dtype, x.ndim == 3) for x in own[1])
        memory = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in own[2])
        return how, own, shared, (first, memory, reported)


def visited(found: tuple, site: Any, state: Any) -> LocalResult:
    """What clients answer to a visit, in the structures of the site and the memory that they were asked with."""
    shapes = jax.tree.structure(site), jax.tree.structure(state)
    first, second = shapes[0].num_leaves, shapes[0].num_leaves + shapes[1].num_leaves
    backoffs, moved, *step = found[second:]
    new, memory = jax.tree.unflatten(shapes[0], found[:first]), jax.tree.unflatten(shapes[1], found[first:second])
    return LocalResult(new, memory, backoffs, moved, step[0] if step else None)


class Errands(NamedTuple):
    """Visits that clients are at while others are absorbed: implements :class:`numpyro_pvi.schedules.Errands`."""

    problem: RemoteProblem

    def begin(
        self, tickets: Any, groups: Any, q: Any, sites: Any, states: Any, key: Any, rule: Rule, noise: Any
    ) -> tuple[Int[Array, "k 2"], Bool[Array, "k"]]:
        """Send groups on their way from q; see :class:`numpyro_pvi.schedules.Errands`."""
        problem = self.problem
        visit_rule = rule if problem.matches_moments else cheaper_rule(rule)
        keys = jax.random.split(key, groups.shape[0])
        rest = jax.vmap(lambda one: cavity(q, one))(sites)
        operands = groups, rest, sites, states, keys, None
        how, own, shared, shapes = problem.question(operands, visit_rule, problem._visit_noise(key, noise), False)
        look, at, seen = self._look(q, rule, noise)
        how = {**how, "look": look}
        # Of every client, though all are told the same: the next that is sent out reads another q.
        at = tuple(jnp.broadcast_to(x, (groups.shape[0], *x.shape)) for x in at)
        parts = (*shapes, seen)
        pair = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
        found = call_out(
            lambda tickets, who, own, shared: self.problem.network.begin(how, shared, tickets, who, own, parts),
            stacked(pair, groups.shape[0]),
            (tickets, groups, (*own[:4], at), shared),
        )
        return found[0], found[1]

    def next(self, tickets: Any, allowed: Any, young: Any, site: Any, state: Any) -> tuple[Any, Any, LocalResult]:
        """The visit that is done first; see :class:`numpyro_pvi.schedules.Errands`."""
        problem = self.problem
        number, flag = jax.ShapeDtypeStruct((), problem.dtype), jax.ShapeDtypeStruct((), jnp.bool_)
        whole = jax.ShapeDtypeStruct((), jnp.int32)
        own = jax.tree.leaves(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (site, state)))
        shapes = (whole, number, *own, whole, flag, *(number,) * problem.tells_step)
        # Tickets are told so that nothing is waited for before it was begun.
        index, seconds, *found = call_out(
            lambda tickets, allowed, young: problem.network.arrive(allowed, young, shapes),
            shapes,
            (tickets, allowed, young),
        )
        result = visited(tuple(found), site, state)
        return index, seconds, (result._replace(step=None) if problem.matches_moments else result)

    def _look(self, q: Any, rule: Rule, noise: Any) -> tuple[dict[str, Any], tuple, tuple]:
        """The look at q that a round's evaluation would ask for, by the rule that a client finds fine enough, and what is seen."""
        problem = self.problem
        moments = problem.family.moments(q)
        number = jax.ShapeDtypeStruct((), problem.dtype)
        if problem.stochastic and problem.program.noisy:
            how = {"ask": "values", "rules": problem.num_rules, "clip": False}
            return how, (problem.family.draw(moments, noise.pairs),), (number,)
        draws = problem.draws_of(problem.program, noise, rule, True)
        told, draws = _told(draws)
        how = {"ask": "look", "rules": problem.num_rules, "clip": False, "probe": False, **told}
        # A rule that does not do is found out there: nobody would wait for a second look.
        how |= {"refines": True}
        at = tuple(jax.tree.leaves((moments, jnp.asarray(rule.level, jnp.int32), None, draws, rule.tolerance)))
        return how, at, problem.seen_shapes(False)


def _last_seen(network: Any, one: tuple, count: int, after: tuple) -> tuple:
    """Whether each client has said anything yet, and what it said last; ``after`` are arrays that must be there before."""
    shapes = stacked((jax.ShapeDtypeStruct((), jnp.bool_), *one), count)
    return call_out(lambda *_: network.seen(one), shapes, after)


def _as_told(told: Bool[Array, "M"], value: Float[Array, "M"]) -> Float[Array, "M"]:
    """Values of which those that nobody has told are NaN, and those that are told and no number minus infinity."""
    return jnp.where(told, jnp.where(jnp.isnan(value), -jnp.inf, value), jnp.nan)


def _told(draws: Any) -> tuple[dict[str, Any], tuple]:
    """How clients are told of a look's draws: none, pairs, or points with what is wanted at them; and the arrays."""
    if isinstance(draws, LocalNoise):
        kind, seed = seed_of(draws.local)
        return {"draws": "units", "seed": kind}, (draws.shared, seed)
    if not isinstance(draws, PointSet):
        return {"draws": "" if draws is None else "pairs"}, () if draws is None else (draws,)
    # Known before a program runs, but where a fit goes from points to draws.
    slopes = draws.slopes if isinstance(draws.slopes, bool) else None
    arrays = draws.eps, draws.weight, jnp.asarray(draws.count, jnp.int32), jnp.asarray(draws.slopes)
    return {"draws": "points", "slopes": slopes}, arrays


def refuse_remotely(plan: Plan, engine: Any) -> None:
    """Raise for a fit whose factors clients cannot answer for.

    Args:
        plan: the plan.
        engine: the fit's choices.

    Raises:
        PVIError: naming what it is, and why.
    """
    part, schedule = plan.partition, engine.schedule
    reasons = {
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
        f"{type(schedule).__name__}": (
            bool(schedule.streams or schedule.has_agents),
            "its groups talk with each other, without a server, and in this process they are simulated",
        ),
        f"one site for all groups ({type(engine.solver).__name__})": (plan.tied, "every client has a site of its own"),
        f"sites of single rows ({type(engine.solver).__name__}(factors='row'))": (
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

    Args:
        engine: the fit's choices.
        plan: the plan, of which labels, sizes and structure are read.
        network: who carries questions.
        prior: ``(natural, exact, log partition)`` of the exactly held prior, and ``(program, arrays)`` of the prior factor.
        num_rules: how many quadrature rules are compiled in.
        tells_step: whether visits say what share of their change was taken.
        fresh: whether looks wait for clients that are at work.
        stream: says which group came first.
        keeps: as of :class:`RemoteProblem`.
        starts: likewise.
        params: constrained values of the model's ``numpyro.param`` sites.

    Returns:
        The factors.

    Raises:
        PVIError: where expectations are by points that only a look at all rows can choose.
    """
    natural, exact, partition, (prior_program, prior_data) = prior
    part, family, count = plan.partition, plan.family, plan.partition.table.num_groups
    program = bare_program(plan, num_rules, engine)
    # Of the rows nothing is here; more than one a group, for whoever asks how many.
    chunks = ((None, jnp.zeros((count, 2), bool)),)
    data = FactorData(chunks, jnp.arange(count), jnp.arange(count + 1), prior_data, natural, exact, partition)
    dtype = natural.precision_mean.dtype
    told = tuple(jax.tree.leaves(params))
    rows = _Rows(network, count, dtype, num_rules, fresh, told) if engine.solver.stochastic else None
    fields = {"rows": rows, "labels": part.table.labels, "network": network, "tells_step": tells_step, "fresh": fresh}
    fields |= {"stream": stream, "params": told}
    if part.local is not None:
        fields |= {"units": (part.local.size, part.local.width), "keeps": keeps, "starts": starts or (0,) * count}
    quadratic = part.likelihood == "quadratic"
    return RemoteProblem(
        family, engine.solver, engine.runtime, program, prior_program, quadratic, num_rules, data, **fields
    )


def bare_program(plan: Plan, num_rules: int, engine: Any) -> Any:
    """The likelihood's program as far as it is known without rows.

    Args:
        plan: the plan.
        num_rules: how many quadrature rules are compiled in.
        engine: the fit's choices.

    Returns:
        The program; it evaluates nothing.

    Raises:
        PVIError: for a likelihood whose expectations no question asks for.
    """
    part, family = plan.partition, plan.family
    if part.likelihood == "quadratic":
        return QuadraticProgram(None, family)
    if part.likelihood == "affine":
        return AffineProgram(part.terms, family, num_rules)
    if part.likelihood == "draws" and part.unstructured == "hessian":
        return DrawsProgram(_no_rows, family)
    if part.likelihood == "draws":
        pairs = max(engine.solver.num_draws, -(-engine.num_particles // 2))
        return PointsProgram(_no_rows, family, part.unstructured, pairs)
    if part.likelihood == "local":
        local = LocalLatentProgram(_no_rows, family)
        return IntegratedProgram(_no_rows, family, 1) if engine.solver.matches_moments else local
    raise PVIError(
        "clients answer for factors that are quadratic, seen through affine predictors, or taken by points or draws; the "
        f"likelihood of {part.where} was found to be {part.likelihood!r}, of which no question asks. Pass solver=LocalELBO() or "
        "PowerEP(moments='importance'), or leave runtime out to fit in this process."
    )


def _no_rows(*_: Any) -> Any:
    raise PVIError("a server has no rows to evaluate")


@dataclasses.dataclass(frozen=True)
class RemoteEngine(Engine):
    """The engine of a fit whose rounds are with clients; what is done before and between them passes over the rows here.

    Args:
        network: who carries questions.
        fresh: whether looks wait for clients that are at work.
        keeps: whether clients keep what looks find that their own latents want, as rounds go by it.
    """

    network: Any = None
    fresh: bool = False
    keeps: bool = True

    of_clients = True

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state, which every client is asked for, in nats; see :meth:`Engine.loss`."""
        return Engine.loss(dataclasses.replace(self, fresh=True, keeps=False), state, args, kwargs, fine)

    def start(self, plan: Plan, packing: Any, args, kwargs, optim_state, loc, sd, local, mode: str):
        """Arrays of a fresh state; what groups hold beside their sites is with the clients. See :meth:`Engine.start`.

        Raises:
            PVIError: for a start from the curvature of groups with latents of their own.
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

    def tallied(self, state: PVIState, carry: RoundCarry, ends: Bool[Array, ""]) -> tuple[PVIState, RoundCarry]:
        """See :meth:`Engine.tallied`: what was really sent, repetitions included."""
        # All that the round asked for must have come before it is counted.
        after = carry.evaluation.elbo, carry.sites, carry.schedule
        report = carry.report._replace(traffic=spent(self.network, ends, after))
        return dataclasses.replace(state, report=report), carry._replace(report=report)

    def refuse(self, state: PVIState) -> None:
        """Raise for a fit whose factors clients cannot answer for."""
        refuse_remotely(state.plan, self)
        bare_program(state.plan, len(RULES), self)

    def _state_problem(self, state: PVIState, others: Any, args: tuple, kwargs: dict, fine: bool) -> Any:
        params, prior = self.constrain(state.plan, args, kwargs, state.optim_state), (state.prior, state.exact)
        return self._asked(state, args, kwargs, params, prior, others, fine)

    def _at_params(self, state: PVIState, args: tuple, kwargs: dict, params: dict, fine: bool) -> Any:
        return self._asked(state, args, kwargs, params, None, None, fine)

    def _asked(self, state: PVIState, args, kwargs, params: dict, prior: Any, others: Any, fine: bool) -> Any:
        """The factors of clients, whose prior is read off the model here."""
        self.refuse(state)
        num_rules = len(RULES) - (not fine)
        own: Any = self.problem(state.plan, state.packing, args, kwargs, params, prior, num_rules, others)
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
        if state.plan.partition.local is not None:
            problem: Any = self._state_problem(state, None, args, kwargs, fine)
            return self.evidence_at(problem, state, partial(problem.evidence_of_groups, local=state.sites.local))
        here = Engine(self.model, self.solver, self.schedule, self.runtime, self.optim, self.num_particles)
        return here.evidence(state, args, kwargs, fine)


@dataclasses.dataclass(frozen=True)
class RowlessEngine(RemoteEngine):
    """The engine of a fit in a process that has no row: what is done before and between rounds is asked of the clients, too.

    The model's arguments here are arrays of the rows' shapes that hold nothing; of the model nothing is evaluated but its prior.
    """

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
    ) -> Any:
        """The factors of clients: see :meth:`Engine.problem`."""
        del others
        refuse_remotely(plan, self)
        part = plan.partition
        if self.solver.matches_moments and (self.solver.factors == "row" or min(part.table.sizes) == 1):
            raise PVIError(
                f"clients do not go with sites of single rows ({type(self.solver).__name__}(factors='row'), or a client of one "
                "row): a server would hold them. Pass PowerEP(factors='group'), and give every client two rows or more."
            )
        call = whole_call(self.model, part, args, kwargs, params)
        natural, exact = self.exact_prior(plan, call)[:2] if prior is None else prior
        reader = FactorReader(plan, call, packing, self.solver, self.runtime, self.num_particles, num_rules)
        given = natural, exact, -exact_log_constant(call, part.exact), reader.prior_factor()
        fresh = self.fresh or not self.schedule.at_their_pace
        holders: Any = self.runtime.elsewhere
        stream = InTurn(holders.came)
        sizes = part.table.sizes
        starts = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        how = num_rules, self.network.tells_step, fresh, stream, self.keeps, starts, params
        return remote_problem(self, plan, self.network, given, *how)

    def _state_problem(self, state: PVIState, others: Any, args: tuple, kwargs: dict, fine: bool) -> Any:
        return Engine._state_problem(self, state, others, args, kwargs, fine)

    def _at_params(self, state: PVIState, args: tuple, kwargs: dict, params: dict, fine: bool) -> Any:
        return Engine._at_params(self, state, args, kwargs, params, fine)

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool):
        """The evidence, from what clients say of their rows."""
        problem: Any = self._state_problem(state, None, args, kwargs, fine)
        return self.evidence_at(problem, state, partial(problem.evidence_of_groups, local=state.sites.local))

    def verify(self, state: PVIState, args: tuple, kwargs: dict) -> dict[str, Check]:
        """The claims beside the model: those of the likelihood are compared by the clients, at the same draws from q."""
        plan, count = state.plan, num_draws(state.packing)
        proved = plan.partition.proved | {"likelihood", "additivity"}
        prior = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, proved=proved))
        found = verify_claims(self, dataclasses.replace(state, plan=prior), args, kwargs) if self.claims(prior) else {}
        if "likelihood" not in self.claims(plan):
            return found
        places, valid = draws_of(state, count)
        one = (jax.ShapeDtypeStruct((count,), places[0].dtype),) * 2
        params = self.constrain(plan, args, kwargs, state.optim_state)
        tangent = jax.tree.leaves(direction_of(params, state))
        count, told = plan.partition.table.num_groups, tuple(jax.tree.leaves(params))
        gap, allowed = ask_all(self.network, {"ask": "verify"}, one, count, (*places, *tangent), params=told)
        return {"likelihood": Check(jnp.where(valid, gap.T, 0.0), allowed.T), **found}


@dataclasses.dataclass(frozen=True)
class SummedEngine(RowlessEngine):
    """The engine of a fit whose clients are heard in sums only: one group, whose site is the sum of the clients' sites.

    Args:
        looks: whether the clients' values are asked for, in sum, as a loss needs them; rounds ask for none.
    """

    looks: bool = False

    def loss(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Negative global ELBO at a state, from the sum of the clients' values, in nats; see :meth:`Engine.loss`."""
        return Engine.loss(dataclasses.replace(self, fresh=True, looks=True), state, args, kwargs, fine)

    def unseen(self, state: PVIState, args: tuple, kwargs: dict, fine: bool) -> None:
        """Rounds evaluate nothing."""
        del state, args, kwargs, fine

    def problem(self, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        """The factors of clients: see :meth:`Engine.problem`.

        Raises:
            PVIError: for a model with ``numpyro.param`` sites, or latents inside the plate.
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

        Raises:
            PVIError: for a start from the clients' curvatures.
        """
        if mode == "curvature":
            raise PVIError(
                "init_sites='curvature' starts sites at what each client sees alone, and clients that are heard in sums tell no "
                "such thing: leave init_sites out, and sites start at 1; init_params may say where q starts."
            )
        return super().start(plan, packing, args, kwargs, optim_state, loc, sd, local, "prior")

    def evidence(self, state: PVIState, args: tuple, kwargs: dict, fine: bool):
        """There is none: it is made of every client's own part.

        Raises:
            PVIError: always.
        """
        raise PVIError(
            "log_evidence needs every client's own site and what normalises it, and these clients are heard in sums only: "
            "pvi.evaluate(state) is a bound of it, or fit with runtime=InProcess(clients=...), which hears clients one by one."
        )

    def _opens(self, problem: Any, fits_params: bool) -> bool:
        del problem, fits_params
        return False

    def _state_problem(self, state: PVIState, others: Any, args: tuple, kwargs: dict, fine: bool) -> Any:
        # No look tells a server that a finer rule is needed: clients refine on their own, as far as there are rules.
        del fine
        return super()._state_problem(state, others, args, kwargs, True)
