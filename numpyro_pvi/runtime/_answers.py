"""What a client runs: the programs over its rows that answer looks and visits, for every family of q."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiling import Program
from .._numerics import value_and_grad
from .._state import Plan
from ..errors import PVIError
from ..expectations import RULES, Expected, PointSet
from ..factors import ValueCall, claims_likelihood, join_arguments, may_jump
from ..families import ProductNatural
from ..sites import SiteStack, take
from ._base import Vmap
from ._engine import Engine
from ._factors import Draws
from ._held import HeldPrograms, Units, by_looks, held_programs, own_draws, starting
from ._moments import GaussianMatched
from ._product_batches import expected_of
from ._product_engine import ProductEngine
from ._product_factors import ProductFactors
from ._product_matching import first_match_states, tilted_of
from ._product_problem import ProductProblem
from ._product_tilted import rows_affine
from ._programs import whole_call
from ._refinement import escalate, first_rule, relative_error
from ._tilted import whole_factor, with_chains
from ._verification import SLOPES_OF, Check, checked, rows_checks

# ----------------------------------------------------------------------------------------------------- Gaussian guides

# What a group's expectations are named by, less its target, in the order in which they are sent.
NUMBERS = ("value", "error", "weight", "spread")
_SLOPES = SLOPES_OF + "likelihood"


class Programs(NamedTuple):
    """What answers for one group's rows, compiled, of ``(arrays, packing, prior)`` first.

    Looks, pairs of draws to compare them with, values at points, visits, what is claimed of the rows beside the model, and their
    part of the evidence.
    """

    look: Program
    pairs: Program
    values: Program
    visit: Program
    verify: Program
    evidence: Program
    # Value and derivatives by the params of what the rows add to the ELBO.
    slope: Program
    # What is done with latents of the group's own, where it has any.
    held: HeldPrograms | None = None


def programs_of(engine: Engine, plan: Plan, static: tuple) -> Programs:
    """The programs of all clients that differ in their rows only. Returns the programs; nothing is compiled yet."""

    def problem(rows: tuple, rules: int) -> Any:
        arrays, packing, prior, _, params = rows
        return engine.problem(plan, packing, *join_arguments(arrays, static), params, prior, rules)

    def look(rows, moments, level, probe, draws, raised, tolerance, clip, rules, slopes):
        own = problem(rows, rules)
        if slopes is not None:
            draws = draws._replace(slopes=slopes)
        clip = raised if clip is None else clip

        def at(level):
            found = own.sum_groups(own.looking(moments, level, draws, clip, probe))
            return found, relative_error(found)

        if tolerance is None:
            found = at(level)[0]
        else:
            asked = first_rule(tolerance.dtype)._replace(level=level, tolerance=tolerance)
            found, _, error = escalate(at, asked, rules)
            # Judged by what it was told: a look that is read later, under a stricter tolerance, was not wrong.
            found = dataclasses.replace(found, error=jnp.where(error <= tolerance, 0.0, found.error))
        return told(found, probe is not None)

    def told(found, probed):
        numbers = (*jax.tree.leaves(found.target), *(getattr(found, name) for name in NUMBERS))
        return tuple(x[0] for x in (*numbers, *((found.product,) * probed)))

    def pairs(rows, moments, eps, rules):
        found = problem(rows, rules).pairs(moments, eps)
        return (*jax.tree.leaves(found.target), found.value, found.product)

    def values(rows, points, rules):
        return (problem(rows, rules).rows.values(points)[0],)

    def visit(rows, rest, site, state, key, rule, pairs, points, start, guarded, rules):
        own, zero = problem(rows, rules), jnp.int32(0)
        noise = None if pairs is None else Draws(pairs, jnp.zeros((1, plan.family.dim), pairs.dtype), points, None)
        # One group's factor, as visits of all groups in one process have it.
        factor = whole_factor(own, zero, rule) if own.matches_moments else own._factor(zero, rule, noise)
        return own.solver.solve(factor, rest, site, state, key, start=start, guarded=guarded)

    return Programs(
        Program(look, ("clip", "rules", "slopes")),
        Program(pairs, ("rules",)),
        Program(values, ("rules",)),
        Program(visit, ("guarded", "rules")),
        *_beside_rounds(engine, plan, static, problem),
        None if plan.partition.local is None else held_programs(problem, plan, told),
    )


def _beside_rounds(engine: Engine, plan: Plan, static: tuple, problem: Callable) -> tuple[Program, Program, Program]:
    """What is claimed of the rows beside the model, their part of the evidence, and their slopes by the params."""

    def verify(rows, draws, moved, tangent):
        arrays, packing, *_, params = rows
        call = whole_call(engine.model, plan.partition, *join_arguments(arrays, static), params)
        part, none = plan.partition, jnp.zeros(draws.shape[0], draws.dtype)
        claims = ["likelihood"] * claims_likelihood(part) + [_SLOPES] * may_jump(part, "likelihood")
        found = checked(call, part, packing, tuple(claims), (draws, moved), tangent) if claims else {}
        return tuple(
            x[:, 0] for c in ("likelihood", _SLOPES) for x in found.get(c, Check(none[:, None], none[:, None]))
        )

    def slope(rows, moments, rule, noise, held, rules, looks):
        def value(params):
            return by_looks(problem((*rows[:4], params), rules), looks).rows_elbo_at(moments, noise, rule, held)

        found, slopes = value_and_grad(value)(rows[4])
        return (found, *jax.tree.leaves(slopes))

    def evidence(rows, q, site, state, key, rule, rules):
        return GaussianMatched(problem(rows, rules), rule).share(jnp.int32(0), q, site, state, key)

    return Program(verify), Program(evidence, ("rules",)), Program(slope, ("rules", "looks"))


class Answers:
    """Answers for one group's rows: a look, values at points, and a visit.

    Args:
        solver: the fit's.
        plan: of one group.
        packing: of its rows.
        dynamic: arrays of its arguments.
        prior: ``(natural, exact mask or None)`` of the exactly held prior, which enters no answer.
        programs: what :meth:`compiled` has made.
        units: where the group has latents of its own, its units; else None.
        params: values of the model's ``numpyro.param`` sites, of which structure and shapes are read.
    """

    def __init__(
        self,
        solver: Any,
        plan: Any,
        packing: Any,
        dynamic: list,
        prior: tuple,
        programs: Any,
        units: Units | None = None,
        params: Any = None,
    ):
        self.family, self.solver, self._programs, self.plan = plan.family, solver, programs, plan
        self._rows = jax.tree.map(jnp.asarray, (dynamic, packing, prior, units))
        self._params = jax.tree.map(jnp.asarray, {} if params is None else params)
        self.dtype = jax.tree.leaves(prior[0])[0].dtype
        self.site = jax.eval_shape(lambda: self.family.zeros((), self.dtype))
        # What it is told of a q.
        self.moments = self._shapes_of_q()
        # What it holds beside its site before the first round; None where it holds nothing.
        self.first_held = None if units is None else starting(plan, packing, solver, units, self.dtype)
        self.first_memory = jax.tree.map(jnp.asarray, self._first_memory())
        self._rule = jax.tree.structure(jax.eval_shape(lambda: first_rule(self.dtype)))

    @property
    def structure(self) -> str:
        """What was found of the factor."""
        return self.plan.partition.likelihood

    def _shapes_of_q(self) -> Any:
        return jax.eval_shape(lambda: self.family.moments(self.family.zeros((), self.dtype)))

    def _first_memory(self) -> Any:
        return self.solver.init_among(self.family, self.dtype, 1)

    @classmethod
    def compiled(cls, model: Any, solver: Any, num_particles: int, plan: Any, static: tuple) -> Any:
        """The programs of all clients that differ in their rows only: see :func:`programs_of`."""
        return programs_of(Engine(model, solver, None, Vmap(), None, num_particles), plan, static)  # type: ignore[arg-type]

    def ask_held(self, how: dict[str, Any], shared: tuple, own: tuple, held: Callable) -> tuple[tuple, Any]:
        """The answer to a question about what it holds beside its site, and what is to be kept, or None.

        ``how``: of the question; ``shared``: what all clients are told; ``own``: what this one is told, a ticket or two among
        it; ``held``: a ticket to what it names.
        """
        programs: Any = self._programs.held
        rows, shared = self._told(how, shared)
        if how["ask"] == "slope":
            return self._slope(how, rows, shared, held(own[0]), own[1]), None
        if how["ask"] == "between":
            return programs.between(held(own[0]), held(own[1]), jnp.asarray(shared[0]))
        if how["ask"] == "apart":
            like, size = jax.tree.structure(self.moments), len(jax.tree.leaves(self.moments))
            at = like.unflatten(shared[:size]), like.unflatten(shared[size:])
            return programs.apart(held(own[0]), held(own[1]), *at), None
        if how["ask"] == "evidence":
            given = self._evidence_arguments(how, shared, own[:-1])
            return programs.evidence(rows, held(own[-1]), *given, rules=how["rules"]), None
        ticket, offset = own
        moments, level, probe, draws, raised, _ = self._looked_at(how, shared)
        draws, seed, *flags = draws if how["draws"] == "units" else (draws, None)
        seed = None if seed is None else jax.random.wrap_key_data(jnp.asarray(seed), impl=how["seed"])
        given = rows, held(ticket), offset, seed, moments, level, probe, draws, tuple(flags), raised
        static = {name: how[name] for name in ("clip", "rules", "looks")}
        found, finite, valid, aim = programs.look(*given, **static, total=how["units"])
        return (*found, finite, valid), aim if how["held"] else None

    def look(self, how: dict[str, Any], shared: tuple, own: tuple = ()) -> tuple:
        """The answer to :meth:`Network.look`, without its leading axis."""
        rows, shared = self._told(how, shared)
        if how["ask"] == "slope":
            return self._slope(how, rows, shared)
        if how["ask"] == "pairs":
            like = jax.tree.structure(self.moments)
            return self._programs.pairs(rows, like.unflatten(shared[:-1]), shared[-1], rules=how["rules"])
        if how["ask"] == "values":
            return self._programs.values(rows, shared[0], rules=how["rules"])
        if how["ask"] == "verify":
            return self._programs.verify(
                rows, *shared[:2], jax.tree.unflatten(jax.tree.structure(self._params), shared[2:])
            )
        if how["ask"] == "evidence":
            given = self._evidence_arguments(how, shared, own)
            return self._programs.evidence(rows, *given, rules=how["rules"])
        given = rows, *self._looked_at(how, shared)
        return self._programs.look(*given, clip=how["clip"], rules=how["rules"], slopes=how.get("slopes"))

    def _told(self, how: dict[str, Any], shared: tuple) -> tuple[tuple, tuple]:
        """The rows at the params that were told, and what else was."""
        count, structure = how.get("params", 0), jax.tree.structure(self._params)
        if count != structure.num_leaves:
            raise PVIError(f"a question tells {count} values of params, where the model has {structure.num_leaves}")
        shared, params = shared[: len(shared) - count], shared[len(shared) - count :]
        return (*self._rows, structure.unflatten([jnp.asarray(x) for x in params])), shared

    def _slope(self, how: dict[str, Any], rows: tuple, shared: tuple, held: Any = None, offset: Any = 0) -> tuple:
        """What the rows add to the ELBO at a q, and its derivatives by the params."""
        like, size = jax.tree.structure(self.moments), len(jax.tree.leaves(self.moments))
        moments, shared = like.unflatten(shared[:size]), shared[size:]
        rule, drawn = self._rule.unflatten(shared[: self._rule.num_leaves]), list(shared[self._rule.num_leaves :])
        noise = None
        if how["draws"]:
            pairs, points, local = jnp.asarray(drawn.pop(0)), None, None
            if how["points"]:
                points = PointSet(*(jnp.asarray(drawn.pop(0)) for _ in range(3)))
            if "seed" in how:
                seed = jax.random.wrap_key_data(jnp.asarray(drawn.pop(0)), impl=how["seed"])
                width = self.first_held.rows.linear.shape[-1]
                local = own_draws(rows[3], offset, seed, (self.family.dim, width, pairs.shape[0]), how["units"])
            noise = Draws(pairs, jnp.zeros((1, self.family.dim), pairs.dtype), points, None, local)
        return self._programs.slope(rows, moments, rule, noise, held, rules=how["rules"], looks=how.get("looks", 0))

    def _evidence_arguments(self, how: dict[str, Any], shared: tuple, own: tuple) -> tuple:
        """q, site, memory, key and rule that the evidence is asked for at."""
        like = self.site, self.first_memory
        site, memory = jax.tree.unflatten(jax.tree.structure(like), own[:-1])
        at = self._rule.unflatten(shared[-self._rule.num_leaves :])
        q = jax.tree.unflatten(jax.tree.structure(self.site), shared[: -self._rule.num_leaves])
        return q, site, memory, jax.random.wrap_key_data(jnp.asarray(own[-1]), impl=how["key"]), at

    def _looked_at(self, how: dict[str, Any], shared: tuple) -> tuple:
        """Moments, level, probe, draws, whether curvatures are raised, and the tolerance of a look."""
        size = len(jax.tree.leaves(self.moments))
        moments = jax.tree.unflatten(jax.tree.structure(self.moments), shared[:size])
        level, *rest = shared[size:]
        probe = rest.pop(0) if how["probe"] else None
        count = {"": 0, "units": 5, "points": len(PointSet._fields)}[how["draws"]]
        told, rest = rest[:count], rest[count:]
        draws: Any = (PointSet(*told) if how["draws"] == "points" else tuple(told)) if told else None
        raised = rest.pop(0) if how["clip"] is None else None
        tolerance = jnp.asarray(rest.pop(0)) if how.get("refines", False) else None
        return moments, level, probe, draws, raised, tolerance

    def visit_held(
        self, how: dict[str, Any], shared: tuple, rest: Any, site: Any, memory: Any, key: Any, held: Any, offset: Any
    ) -> tuple[Any, Any]:
        """The answer to a visit of a group with latents of its own, and what it holds of them afterwards."""
        programs: Any = self._programs.held
        rows, shared = self._told(how, shared)
        rule = jax.tree.unflatten(self._rule, shared[: self._rule.num_leaves])
        pairs, seed = None, None
        if "seed" in how:
            pairs, seed = shared[self._rule.num_leaves], shared[-1]
            seed = jax.random.wrap_key_data(jnp.asarray(seed), impl=how["seed"])
        given = rows, held, offset, seed, rest, site, memory, key, rule, pairs
        static = {name: how[name] for name in ("guarded", "rules", "looks")}
        return programs.visit(*given, **static, total=how["units"])

    def visit(
        self, how: dict[str, Any], shared: tuple, rest: Any, site: Any, memory: Any, key: Any, start: tuple
    ) -> Any:
        """The answer to :meth:`Network.visit`, as the solver gives it."""
        rows, shared = self._told(how, shared)
        shape = self._rule
        rule = jax.tree.unflatten(shape, shared[: shape.num_leaves])
        pairs = shared[shape.num_leaves] if how["draws"] else None
        points = PointSet(*shared[-3:]) if how["points"] else None
        known = None
        if how["start"]:
            like = Expected(0.0, self.site, 0.0, 0.0, 0.0, 0.0)
            known = jax.tree.unflatten(jax.tree.structure(like), start)
        given = rows, rest, site, memory, key, rule, pairs, points, known
        return self._programs.visit(*given, guarded=how["guarded"], rules=how["rules"])

    def tells_step(self) -> bool:
        """Whether the solver's visits say what share of their change was taken, found without a pass over the rows."""
        rule, rows = jax.eval_shape(lambda: first_rule(self.dtype)), (*self._rows, self._params)
        key = jax.eval_shape(lambda: jax.random.key(0))
        pairs = None
        if not self.solver.matches_moments:
            pairs = jax.ShapeDtypeStruct((max(1, self.solver.num_draws), self.family.dim), self.dtype)
        if self.first_held is not None and not self.solver.keeps_conditionals:
            # One step, halved until q is normalisable: shares of it are taken of nothing else.
            return False
        given = rows, self.site, self.site, self.first_memory, key, rule, pairs, None, None
        if self.first_held is not None:
            given = rows, self.first_held, 0, None if pairs is None else key, *given[1:6], pairs
            looks = self.plan.partition.local.looks
            visit: Any = partial(self._programs.held.visit, guarded=True, rules=len(RULES), looks=looks, total=1)  # type: ignore[union-attr]
            return jax.eval_shape(visit, *given)[0].step is not None
        visit = partial(self._programs.visit, guarded=True, rules=len(RULES))
        return jax.eval_shape(visit, *given).step is not None


# ------------------------------------------------------------------------------------------------- products of families


class ProductPrograms(NamedTuple):
    """What answers for one group's rows, compiled, of ``(arrays, packing, prior, units, params)`` first.

    Values with messages, values alone, with derivatives by the params, and visits; what a start asks for: messages at no more than
    some variance, and whether factors are affine; how much quadrature misses, what is claimed of the rows beside the model, and
    their part of the evidence.
    """

    message: Program
    average: Program
    slope: Program
    visit: Program
    curvature: Program
    affine: Program
    error: Program
    verify: Program
    evidence: Program


def product_programs(engine: ProductEngine, plan: Any, static: tuple) -> ProductPrograms:
    """The programs of all clients that differ in their rows only. Returns the programs; nothing is compiled yet."""

    def problem(rows: tuple, rules: int) -> ProductProblem:
        arrays, packing, (prior, _), _, params = rows
        args, kwargs = join_arguments(arrays, static)
        own = dataclasses.replace(plan, fine=rules == len(RULES))
        call = ValueCall(plan.partition.model(engine.model), args, kwargs, params=params)
        return ProductProblem(own, call, packing, prior, engine.num_draws, engine.runtime)

    def message(rows, q, sites, key, probs, rules):
        own = problem(rows, rules)
        values, messages = own.values_and_messages(q, key, probs, sites)
        return (*jax.tree.leaves(take(messages.groups, 0)), jnp.sum(values))

    def average(rows, q, sites, key, rules):
        return (problem(rows, rules).group_averages(q, key, sites)[0],)

    def slope(rows, q, sites, key, rules):
        def value(params):
            return problem((*rows[:4], params), rules).group_averages(q, key, sites)[0]

        found, slopes = value_and_grad(value)(rows[4])
        return (found, *jax.tree.leaves(slopes))

    def visit(rows, rest, site, state, key, noise, place, start, guarded, rules):
        own, zero = problem(rows, rules), jnp.int32(0)
        factors = ProductFactors(own, engine.solver)
        if not factors.matches_moments:
            known = None if start is None else expected_of(*start)
            return engine.solver.solve(
                factors.factor(zero, site, noise), rest, site, state, key, start=known, guarded=guarded
            )
        q, tilted = rest + site, dataclasses.replace(tilted_of(own, engine.solver, key), first=place)
        # Draws are common to all groups that are visited together.
        seen = tilted.together(q) if guarded and tilted.methods[0] == "importance" else tilted.alone(zero, q)
        return seen.visit(zero, rest, site, state, tilted.step_key(zero), guarded)

    return ProductPrograms(
        *(Program(f, ("rules",)) for f in (message, average, slope)),
        Program(visit, ("guarded", "rules")),
        *_beside_product_rounds(engine.solver, problem),
    )


def _beside_product_rounds(solver: Any, problem: Callable) -> tuple[Program, ...]:
    """What starts, verification and the evidence ask for, of ``problem(rows, rules)``."""

    def curvature(rows, q, key, rules, widest):
        return tuple(jax.tree.leaves(take(problem(rows, rules).curvatures(q, widest, key).groups, 0)))

    def affine(rows, q, key, rules):
        return (rows_affine(problem(rows, rules), q, key)[0],)

    def error(rows, q, key, rules):
        return (problem(rows, rules).rows_error(q, key)[0],)

    def verify(rows, q, key, rules, names):
        return tuple(x[0] for x in rows_checks(problem(rows, rules), names, q, key))

    def evidence(rows, q, key, place, site, state, rules):
        tilted = dataclasses.replace(tilted_of(problem(rows, rules), solver, key), first=place)
        return tilted.share(jnp.int32(0), q, site, state, key)[:2]

    return (
        Program(curvature, ("rules", "widest")),
        *(Program(f, ("rules",)) for f in (affine, error)),
        Program(verify, ("rules", "names")),
        Program(evidence, ("rules",)),
    )


class ProductAnswers(Answers):
    """The same where q is a product of families; a question tells natural parameters of a q."""

    @classmethod
    def compiled(cls, model: Any, solver: Any, num_particles: int, plan: Any, static: tuple) -> Any:
        """The programs of all clients that differ in their rows only: see :func:`product_programs`."""
        engine = ProductEngine(model, solver, None, Vmap(), num_particles)  # type: ignore[arg-type]
        return product_programs(engine, plan, static)

    @property
    def structure(self) -> str:
        """What was found of the factor."""
        return str(self.plan.likelihood)

    def _shapes_of_q(self) -> Any:
        return self.site

    def _first_memory(self) -> Any:
        if self._undecided:
            return ()
        if not self.plan.tilted:
            return super()._first_memory()
        _, packing, (prior, _), _ = self._rows
        call: Any = None
        problem = ProductProblem(self.plan, call, packing, prior, 1, Vmap())
        memory = take(first_match_states(problem, self.solver, self.dtype)[0], 0)
        return with_chains(self.solver, memory, self.plan.chain_dim, self.dtype) if self.plan.chained else memory

    def ask_held(self, *_: Any) -> Any:
        """Nothing is kept beside sites."""
        raise PVIError("a question is about latents of the group's own, and under AutoExponentialFamily it has none")

    visit_held = ask_held  # type: ignore[assignment]

    def look(self, how: dict[str, Any], shared: tuple, own: tuple = ()) -> tuple:
        """The answer to a question about a q: see :meth:`numpyro_pvi.runtime.Network.look`."""
        rows, shared = self._told(how, shared)
        size = jax.tree.structure(self.site).num_leaves
        q = jax.tree.unflatten(jax.tree.structure(self.site), [jnp.asarray(x) for x in shared[:size]])
        key, programs, ask = _key_of(how, shared[size:]), self._programs, how["ask"]
        given, static = (rows, q), {"rules": how["rules"]}
        if ask == "message":
            probs = self._probs(shared[size + ("seed" in how) :]) if how.get("probs") else None
            return programs.message(*given, self._beside(own), key, probs, **static)
        if ask in ("average", "slope"):
            return getattr(programs, ask)(*given, self._beside(own), key, **static)
        if ask in ("curvature", "affine", "error", "verify"):
            static |= {name: how[name] for name in ("widest", "names") if name in how}
            return getattr(programs, ask)(*given, key, **static)
        if ask == "evidence":
            place, *told = (jnp.asarray(x) for x in own)
            like = self.site, self.first_memory
            return programs.evidence(*given, key, place, *jax.tree.unflatten(jax.tree.structure(like), told), **static)
        raise PVIError(f"a question {ask!r} is none that is asked under AutoExponentialFamily")

    def _probs(self, arrays: tuple) -> dict[str, Any]:
        """Weights of the values of components that are summed over, by component."""
        names = sorted(name for name, _ in self.plan.likelihood.cells)
        return dict(zip(names, (jnp.asarray(x) for x in arrays), strict=True))

    def visit(
        self, how: dict[str, Any], shared: tuple, rest: Any, site: Any, memory: Any, key: Any, start: tuple
    ) -> Any:
        """The answer to :meth:`numpyro_pvi.runtime.Network.visit`, as the solver gives it."""
        rows, shared = self._told(how, shared)
        place, *known = (jnp.asarray(x) for x in start)
        found = None
        if how["start"]:
            found = known[0], jax.tree.unflatten(jax.tree.structure(self.site), known[1:])
        given = rows, rest, site, memory, key, _key_of(how, shared), place, found
        return self._programs.visit(*given, guarded=how["guarded"], rules=how["rules"])

    def tells_step(self) -> bool:
        """Whether the solver's visits say what share of their change was taken, found without a pass over the rows."""
        if self._undecided:
            return False
        key, place = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
        given = (*self._rows, self._params), self.site, self.site, self.first_memory, key, key, place, None
        return jax.eval_shape(partial(self._programs.visit, guarded=True, rules=len(RULES)), *given).step is not None

    @property
    def _undecided(self) -> bool:
        """Whether it is still to be found how moments are taken: nobody visits before."""
        return self.solver.matches_moments and not self.plan.tilted

    def _beside(self, own: tuple) -> SiteStack | None:
        """The group's own site, of which it is told what stands beside its factor on draws; None where it is told nothing."""
        if not own:
            return None
        drawn = self.plan.likelihood.drawn
        parts = dict(self.family.zeros((1,), self.dtype).parts)
        told = {n: x for n, x in parts.items() if n in drawn}
        structure = jax.tree.structure(told)
        if structure.num_leaves != len(own):
            raise PVIError(f"a question tells {len(own)} arrays of a site, where {structure.num_leaves} are drawn")
        return SiteStack(ProductNatural(parts | structure.unflatten([jnp.asarray(x)[None] for x in own])), None)


def _key_of(how: dict[str, Any], arrays: tuple) -> Any:
    """The key of the draws; where nothing is drawn, none that is looked at."""
    if "seed" not in how:
        return jax.random.key(0)
    return jax.random.wrap_key_data(jnp.asarray(arrays[0]), impl=how["seed"])
