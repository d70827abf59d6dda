"""What a client runs where q is a product of families: the programs over its rows that answer looks and visits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiling import Program
from .._numerics import value_and_grad
from ..errors import PVIError
from ..expectations import RULES
from ..factors import ValueCall, join_arguments
from ..families import ProductNatural
from ..sites import SiteStack, take
from ._base import Vmap
from ._product_engine import ProductEngine, ProductFactors, expected_of
from ._product_matching import first_match_states, group_product_evidence, tilted_of
from ._product_problem import ProductProblem
from ._product_tilted import rows_affine
from ._tilted import with_chains
from ._verification import rows_checks


class ProductPrograms(NamedTuple):
    """What answers for one group's rows, compiled, of ``(arrays, packing, prior, params)`` first.

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
    """The programs of all clients that differ in their rows only.

    Args:
        engine: the client's choices.
        plan: of one group.
        static: the static leaves of its arguments.

    Returns:
        The programs; nothing is compiled yet.
    """

    def problem(rows: tuple, rules: int) -> ProductProblem:
        arrays, packing, prior, params = rows
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
            return problem((*rows[:3], params), rules).group_averages(q, key, sites)[0]

        found, slopes = value_and_grad(value)(rows[3])
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
        shared = tilted.shared(q) if guarded and tilted.methods[0] == "importance" else tilted.alone(zero, q)
        return tilted.visit(zero, q, site, state, shared)

    return ProductPrograms(
        *(Program(f, ("rules",)) for f in (message, average, slope)),
        Program(visit, ("guarded", "rules")),
        *_beside_rounds(engine.solver, problem),
    )


def _beside_rounds(solver: Any, problem: Callable) -> tuple[Program, ...]:
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
        memory = state if solver.anchored else (), getattr(state, "chains", None)
        return group_product_evidence(tilted, jnp.int32(0), q, site, memory, None)

    return (
        Program(curvature, ("rules", "widest")),
        *(Program(f, ("rules",)) for f in (affine, error)),
        Program(verify, ("rules", "names")),
        Program(evidence, ("rules",)),
    )


class ProductAnswers:
    """Answers for one group's rows, as :class:`Answers` gives them under Gaussian guides.

    Args:
        solver: the fit's.
        plan: of one group.
        packing: of its rows.
        dynamic: arrays of its arguments.
        prior: ``(natural parameters of the exactly held prior, None)``, which enter no answer.
        programs: what :meth:`compiled` has made.
        units: None.
        params: values of the model's ``numpyro.param`` sites, of which structure and shapes are read.
    """

    # Groups keep nothing beside their sites.
    first_held = None

    def __init__(
        self,
        solver: Any,
        plan: Any,
        packing: Any,
        dynamic: list,
        prior: tuple,
        programs: ProductPrograms,
        units: Any = None,
        params: Any = None,
    ):
        del units
        self.family, self.solver, self._programs, self._plan = plan.family, solver, programs, plan
        self._rows = jax.tree.map(jnp.asarray, (dynamic, packing, prior[0]))
        self._params = jax.tree.map(jnp.asarray, {} if params is None else params)
        self.dtype = jax.tree.leaves(self._rows[2])[0].dtype
        self.site = jax.eval_shape(lambda: self.family.zeros((), self.dtype))
        # Of q a client is told the natural parameters.
        self.moments = self.site
        self.structure = str(plan.likelihood)
        self.first_memory = jax.tree.map(jnp.asarray, self._first_memory())

    @classmethod
    def compiled(cls, model: Any, solver: Any, num_particles: int, plan: Any, static: tuple) -> ProductPrograms:
        """The programs of all clients that differ in their rows only: see :func:`product_programs`."""
        engine = ProductEngine(model, solver, None, Vmap(), num_particles)  # type: ignore[arg-type]
        return product_programs(engine, plan, static)

    def _first_memory(self) -> Any:
        if self._undecided:
            return ()
        if not self._plan.tilted:
            return self.solver.init_among(self.family, self.dtype, 1)
        arrays, packing, prior = self._rows
        call: Any = None
        problem = ProductProblem(self._plan, call, packing, prior, 1, Vmap())
        memory = take(first_match_states(problem, self.solver, self.dtype)[0], 0)
        return with_chains(self.solver, memory, self._plan.chain_dim, self.dtype) if self._plan.chained else memory

    def ask_held(self, *_: Any) -> Any:
        """Nothing is kept beside sites."""
        raise PVIError("a question is about latents of the group's own, and under AutoExponentialFamily it has none")

    visit_held = ask_held

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
        names = sorted(name for name, _ in self._plan.likelihood.cells)
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
        return self.solver.matches_moments and not self._plan.tilted

    def _told(self, how: dict[str, Any], shared: tuple) -> tuple[tuple, tuple]:
        """The rows at the params that were told, and what else was."""
        count, structure = how.get("params", 0), jax.tree.structure(self._params)
        if count != structure.num_leaves:
            raise PVIError(f"a question tells {count} values of params, where the model has {structure.num_leaves}")
        shared, params = shared[: len(shared) - count], shared[len(shared) - count :]
        return (*self._rows, structure.unflatten([jnp.asarray(x) for x in params])), shared

    def _beside(self, own: tuple) -> SiteStack | None:
        """The group's own site, of which it is told what stands beside its factor on draws; None where it is told nothing."""
        if not own:
            return None
        drawn = self._plan.likelihood.drawn
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
