"""The factors of a model whose rows are with clients: looks and visits go out of a compiled round, and answers come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..expectations import RULES, Expected, LocalNoise, PointSet
from ..families import ProductFamily, ProductNatural
from ..schedules import Evaluation, ProblemDefaults, RoundCarry, Rule
from ..sites import SiteStack, cavity, damp
from ..solvers import LocalResult
from ._answers import NUMBERS
from ._factors import Draws
from ._held import Wanted
from ._local import LocalProblem, fall_explained
from ._moments import Shares
from ._network import TICKET, Leaf, Network, ask_all, call_out, seed_of, stacked
from ._product_factors import ProductFactors
from ._product_problem import ProductProblem
from ._product_rounds import Beside, Chosen, others
from ._refinement import cheaper_rule

# ------------------------------------------------------------------------------------------- questions of every family


def value_with_slopes(value: Callable[..., Array], slopes: Callable[..., tuple]) -> Callable[..., Float[Array, "M"]]:
    """``value`` of params and other arrays, by client, differentiable in the params by what ``slopes`` of the same asks for."""
    found = jax.custom_jvp(value)

    @found.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        here, *by = slopes(*primals)
        parts = zip(by, tangents[0], strict=True)
        return here, sum(jnp.sum(x * t, axis=tuple(range(1, x.ndim))) for x, t in parts)

    return found


def visit_operands(
    problem: Any, carry: RoundCarry, keys: Any, start: Any, only: Int[Array, "k"] | None
) -> tuple[Any, ...]:
    """What visits of all groups, or some, begin with: groups, cavities, sites, memories, keys and what is known at q."""
    operands = jnp.arange(problem.num_groups, dtype=jnp.int32), carry.sites.groups, carry.solver, keys, start
    if only is not None:
        operands = jax.tree.map(lambda x: x[only], operands)
    groups, site, *others = operands
    return groups, jax.vmap(lambda one: cavity(carry.evaluation.q, one))(site), site, *others


def visit_shapes(first: tuple[Leaf, ...], memory: tuple, tells_step: bool, dtype: Any) -> tuple:
    """Shapes of a client's answer: its site's arrays, its memory's (``memory`` is stacked), and what it reports."""
    number, flag = jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), jnp.bool_)
    own = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in memory)
    return first, own, (jax.ShapeDtypeStruct((), jnp.int32), flag, *(number,) * tells_step)


def ask_visits(network: Any, question: tuple, groups: Int[Array, "k"], site: Any, state: Any, names: tuple = ()) -> Any:
    """Ask some clients for visits, ``(how, own, shared, shapes)`` of :meth:`Network.visit`; ``local`` is what they have named."""
    how, own, shared, shapes = question
    found = call_out(
        lambda who, own, shared: network.visit(how, shared, who, own, shapes),
        stacked((*(x for part in shapes for x in part), *names), groups.shape[0]),
        (groups, own, shared),
    )
    return visited(found[:-1], site, state)._replace(local=found[-1]) if names else visited(found, site, state)


def visited(found: tuple, site: Any, state: Any) -> LocalResult:
    """What clients answer to a visit, in the structures of the site and the memory that they were asked with."""
    shapes = jax.tree.structure(site), jax.tree.structure(state)
    first, second = shapes[0].num_leaves, shapes[0].num_leaves + shapes[1].num_leaves
    backoffs, moved, *step = found[second:]
    new, memory = jax.tree.unflatten(shapes[0], found[:first]), jax.tree.unflatten(shapes[1], found[first:second])
    return LocalResult(new, memory, backoffs, moved, step[0] if step else None)


# ----------------------------------------------------------------------------------------------------- Gaussian guides


class RowValues(NamedTuple):
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

    ``tells_step``: whether visits say what share of their change was taken; ``fresh``: whether a look asks clients, and waits
    for those that are at work; else what they saw last stands for it, and the value of one that has said nothing yet is NaN
    (minus infinity where what it said is no number); ``only_visits``: whether rounds ask for visits alone: of clients that are
    heard in sums there is one group, and its site is the sum of theirs; ``summed``: whether it is such clients that look: no
    message is known, so that sigma points stay what they are; ``keeps``: whether clients keep what a look finds that their
    groups want beside their sites, where they have latents of their own: what a schedule holds are names of it
    (:class:`numpyro_pvi.sites.Held`); ``starts``: by group, the number of its first unit (plate index) among all, less what its
    client knows of that itself; ``looks``: log densities of all units, by which fixed points are
    chosen; ``params``: leaves of the constrained values of the model's ``numpyro.param`` sites, which every question tells.
    """

    network: Any = None
    tells_step: bool = False
    fresh: bool = False
    only_visits: bool = False
    summed: bool = False
    keeps: bool = True
    starts: tuple[int, ...] = ()
    looks: int = 0
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
            how |= {"held": self.keeps, "units": self.units[0], "looks": self.looks}
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
            how |= {"held": False, "units": self.units[0], "looks": self.looks}
            own = local.tickets, jnp.asarray(self.starts, jnp.int32)
        number = jax.ShapeDtypeStruct((), self.dtype)

        def ask(params: tuple, shared: tuple, own: tuple) -> tuple:
            one = (number, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params))
            return ask_all(self.network, how, one, self.num_groups, shared, own, params)

        return jnp.sum(value_with_slopes(lambda *told: ask(*told)[0], ask)(self.params, shared, own))

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
        one = () if self.keeps_conditionals else tuple(jax.tree.leaves(zeros))
        own = old.local.tickets, aim.local.tickets
        share = self.own_share(step) if self.stochastic else step
        *site, tickets = self._ask_held({"ask": "between", "held": True}, one, (jnp.asarray(share, self.dtype),), own)
        if site:
            sites = dataclasses.replace(sites, groups=jax.tree.unflatten(jax.tree.structure(zeros), site))
        return dataclasses.replace(sites, local=dataclasses.replace(old.local, tickets=tickets))

    def _apart(self, new: tuple, old: tuple) -> tuple:
        """How far clients' own latents have moved: the largest move in sds, and their part of the squared length in nats."""
        number = jax.ShapeDtypeStruct((), self.dtype)
        (one, at), (other, before) = new, old
        shared = tuple(jax.tree.leaves((at, before)))
        return self._ask_held({"ask": "apart", "held": False}, (number, number), shared, (one.tickets, other.tickets))

    def compared(
        self, sites: SiteStack, evaluation: Evaluation, noise: Draws, stale: Any, ask: Any, again: Any
    ) -> tuple[Evaluation, Bool[Array, ""]]:
        """See :meth:`LocalProblem.compared`: clients keep nothing of what is looked at to be compared with."""
        evaluation = jax.lax.cond(
            stale, lambda: self.evaluate(sites, evaluation.rule, noise, again=again), lambda: evaluation
        )
        never = jnp.zeros_like(ask)
        looking = dataclasses.replace(self, keeps=False)
        return LocalProblem.compared(looking, sites, evaluation, noise, never, ask, again)

    def zero_sites(self, dtype: Any) -> SiteStack:
        """See :class:`numpyro_pvi.schedules.ProblemDefaults`: what clients hold of latents of their own is not here."""
        return ProblemDefaults.zero_sites(self, dtype)

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
        points = self.points_of(old.rule)
        noisy = [p for p in (self.program, self.prior_program) if p is not None and p.noisy]
        if self.units is None or (not noisy and points["sigma"] is False):
            return super().allowance(new_sites, new, old_sites, old, step)
        own = jnp.sum(self._apart((new.local, new.moments), (old.local, old.moments))[1])
        bare = (dataclasses.replace(x, local=None) for x in (new_sites, old_sites))
        pairs = tuple(zip(bare, (new, old), strict=True))
        return fall_explained(self.family, noisy, *pairs, step, self.units, own, **points)

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
        start = None
        if not (self.matches_moments or self.stochastic or self.blind):
            start = dataclasses.replace(carry.evaluation.groups, local=None)
        asked = visit_operands(self, carry, jax.random.split(key, self.num_groups), start, only)
        noise, local, groups = self._visit_noise(key, noise), carry.sites.local, asked[0]
        if self.units is None:
            return self._ask(asked, carry.evaluation.rule, noise, guarded=True)
        found = self._ask(asked, carry.evaluation.rule, noise, guarded=True, held=local.tickets[groups])
        if self.stochastic:
            return found._replace(local=None)
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

    def evidence_of_groups(self, q: Any, sites: Any, states: Any, keys: Any, rule: Rule, local: Any = None) -> Shares:
        """Ask all clients for their shares of the evidence."""
        how = {"ask": "evidence", "rules": self.num_rules, "key": str(jax.random.key_impl(keys))}
        own = tuple(jax.tree.leaves((sites, states, jax.random.key_data(keys))))
        number = jax.ShapeDtypeStruct((), self.dtype)
        one = number, number, jax.ShapeDtypeStruct((), jnp.bool_)
        if self.units is not None:
            how |= {"held": False}
            own = (*own, local.tickets)
        return Shares(*self._look(how, one, tuple(jax.tree.leaves((q, rule))), own)[:3])

    def _ask(self, operands: tuple, rule: Rule, noise: Draws | None, guarded: bool, held: Any = None) -> LocalResult:
        how, own, shared, shapes = self.question(operands, rule, noise, guarded)
        groups, _, site, state, *_ = operands
        names: tuple = ()
        if held is not None:
            how, names = {**how, "units": self.units[0], "looks": self.looks}, (TICKET,)  # type: ignore[index]
            own = (*own, (held, jnp.asarray(self.starts, jnp.int32)[groups]))
        return ask_visits(self.network, (how, own, shared, shapes), groups, site, state, names)

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
        # Of a Gaussian's natural parameters a matrix is a precision.
        first = tuple(Leaf(x.shape[1:], x.dtype, x.ndim == 3) for x in own[1])
        return how, own, shared, visit_shapes(first, own[2], self.tells_step, self.dtype)


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
    """How clients are told of a look's draws: none, those of units, or points with what is wanted at them; and the arrays."""
    if isinstance(draws, LocalNoise):
        kind, seed = seed_of(draws.local)
        batch = jnp.int32(-1) if draws.batch is None else draws.batch.astype(jnp.int32)
        flags = jnp.asarray(draws.sampled), jnp.asarray(draws.checking), batch
        return {"draws": "units", "seed": kind}, (draws.shared, seed, *flags)
    if not isinstance(draws, PointSet):
        # Other draws are of no use to what clients are asked.
        return {"draws": ""}, ()
    # Known before a program runs, but where a fit goes from points to draws.
    slopes = draws.slopes if isinstance(draws.slopes, bool) else None
    arrays = draws.eps, draws.weight, jnp.asarray(draws.count, jnp.int32), jnp.asarray(draws.slopes)
    return {"draws": "points", "slopes": slopes}, arrays


# ------------------------------------------------------------------------------------------------ products of families


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

        def value(*given: tuple) -> Array:
            return self._answers(how, *given, (number,))[0]

        def slopes(params: tuple, *given: tuple) -> tuple:
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params)
            return self._answers({**how, "ask": "slope"}, params, *given, (number, *shapes))

        return value_with_slopes(value, slopes)(self.params, *told)

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
        return self._asked(visit_operands(self, carry, keys, start, only), noise, guarded=True)

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
        key = jax.random.fold_in(key, 0) if self.matches_moments else key
        one = jnp.asarray(index, jnp.int32), cavity(q, site), site, state, key
        found = self._asked((*jax.tree.map(lambda x: jnp.asarray(x)[None], one), None), noise, guarded=False)
        return jax.tree.map(lambda x: x[0], found), None

    def _asked(self, operands: tuple, noise: Any, guarded: bool) -> LocalResult:
        """Ask some clients for visits."""
        problem, (groups, rest, sites, states, keys, start) = self.problem, operands
        dtype = jax.tree.leaves(rest)[0].dtype
        how = {"rules": problem.rules, "guarded": guarded, "start": start is not None}
        how["key"], keys = seed_of(keys)
        shared: tuple = problem.params
        if problem.params:
            how["params"] = len(problem.params)
        if not (self.matches_moments or problem.plan.likelihood.exact):
            how["seed"], seed = seed_of(noise)
            shared = (seed, *shared)
        own = tuple(tuple(jax.tree.leaves(x)) for x in (rest, sites, states))
        own = (*own, keys, (groups, *jax.tree.leaves(start)))
        shapes = visit_shapes(symmetric_leaves(self.family, dtype), own[2], self.tells_step, dtype)
        return ask_visits(problem.network, (how, own, shared, shapes), groups, sites, states)


def symmetric_leaves(family: ProductFamily, dtype: Any) -> tuple[Leaf, ...]:
    """Shapes of a site's arrays, and which are symmetric matrices: those of which the family makes some.

    Returns one entry per array.
    """
    with jax.ensure_compile_time_eval():
        zeros = family.zeros((), dtype)
        uneven = jax.tree.map(lambda x: jnp.arange(x.size, dtype=dtype).reshape(x.shape) ** 2, zeros)
        even = family.symmetrise(uneven)
        pairs = zip(jax.tree.leaves(uneven), jax.tree.leaves(even), strict=True)
        return tuple(Leaf(x.shape, x.dtype, not np.array_equal(x, y)) for x, y in pairs)
