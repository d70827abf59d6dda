"""The server's side where only clients have rows: what they say of them, and what all agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiling import Program
from .._initial import refuse_nothing_shared
from .._saving import settings_of
from .._state import Plan
from ..errors import ClientError, PVIError, StateError
from ..expectations import FactorStructure, joint_design, with_draws, with_rule
from ..factors import PartitionPlan, Planned, TermSpec, choose_chunk_rows, join_arguments, pack_rows, split_arguments
from ..guides import family_of
from ..handlers import Partition, known_labels, labels_table
from ..wire import KeyData, digest_of

# From what says most of rows to what says least.
_KINDS = ("quadratic", "affine", "draws")
# Relative difference of two readings of one prior that is rounding.
_SAME = {"float32": 1e-4, "float64": 1e-9}


def agree_on(labels: tuple, facts: list[dict[str, Any]], apart: tuple[str, ...]) -> None:
    """Raise where clients do not see one model.

    ``apart``: names of facts in which they may differ. Raises ClientError naming the first fact in which one differs from the
    first.
    """
    for label, said in zip(labels, facts, strict=True):
        for name, value in said.items():
            if name not in apart and value != facts[0].get(name):
                raise ClientError(
                    f"client {label!r} says {name} = {value!r}, and client {labels[0]!r} {facts[0].get(name)!r}: they are not of "
                    "one model, guide and solver.",
                    label,
                )


@dataclasses.dataclass(frozen=True)
class Holders:
    """Clients that have their own rows: implements :class:`numpyro_pvi.runtime.Elsewhere`."""

    runtime: Any

    @property
    def line(self) -> Any:
        """The conversation."""
        return self.runtime._line

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of the clients, by place."""
        return self.runtime.labels

    @property
    def came(self) -> tuple[int, ...]:
        """See :attr:`numpyro_pvi.runtime.Elsewhere.came`."""
        return self.runtime.came

    def expect_answers(self, verb: str) -> None:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.expect_answers`."""

    def _open(self) -> Any:
        line = self.line
        if line.exchange is None or line.exchange.error is not None:
            line.close()
            line.exchange = self.runtime.open()
            line.exchange.pins = tuple(line.pins.values())
        return line.exchange

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """What clients answer; where one does not, or differently than can be, the conversation is begun anew at the next call."""
        try:
            return ask(self._open())
        except BaseException:
            self.line.close()
            raise

    # ------------------------------------------------------------------ what rows look like

    def described(self) -> list[dict[str, Any]]:
        """What every client says of its rows, found to be of one kind."""
        line = self.line
        if line.described is None:
            facts = self._asked(lambda exchange: exchange.describe())
            agree_on(self.labels, [_shapes(said) for said in facts], ())
            line.described = facts
        return line.described

    def _compare_settings(self, pvi: Any) -> None:
        """Raise where clients, who are of one guide and solver, are of others than a fit."""
        own, theirs = told_settings(pvi), self.described()[0]["settings"]
        for name in theirs:
            if own[name] != theirs[name]:
                raise ClientError(
                    f"clients, {self.labels[0]!r} to begin with, are made with another {name} than the server: "
                    f"{_words(theirs[name])}, here {_words(own[name])}. Make them with the same.",
                    self.labels[0],
                )

    def arguments(self, pvi: Any, args: tuple, kwargs: dict, names: tuple[str, ...]) -> tuple[tuple, dict]:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.arguments`."""
        self.line.follow(pvi._engine.model)
        self._compare_settings(pvi)
        facts = self.described()
        first, total = facts[0], sum(said["rows"] for said in facts)
        own = first["signature"].structure
        leaves, structure = jax.tree.flatten((args, kwargs))
        given: list[Any] = [None] * own.num_leaves
        if args or kwargs:
            if structure != own:
                raise PVIError(
                    f"the arguments are {structure}, and the clients' {own}: pass shapes (jax.ShapeDtypeStruct) in place of the "
                    "clients' rows, positional and by keyword as they do, or nothing at all."
                )
            given = leaves
        pairs = zip(given, first["signature"].leaves, first["axes"], first["others"], strict=True)
        found = [self._stand_in(*x, total, bool(args or kwargs), place) for place, x in enumerate(pairs)]
        return own.unflatten(found)

    def _stand_in(
        self, given: Any, leaf: Any, axis: int | None, digest: bytes, total: int, told: bool, place: int
    ) -> Any:
        if leaf.shape is None:
            if told and given != leaf.static:
                raise PVIError(f"{leaf.name} is {given!r}, and {leaf.static!r} with the clients: pass the same value.")
            return leaf.static
        if axis is None:
            if not told:
                raise PVIError(
                    f"{leaf.name} is no array of rows ({leaf}), so the server has to be given its values: pass all arguments, with "
                    "shapes (jax.ShapeDtypeStruct) in place of the clients' rows."
                )
            value = np.asarray(jnp.asarray(given, leaf.dtype))
            if digest_of((value,)) != digest:
                raise PVIError(f"{leaf.name} has other values than with client {self.labels[0]!r}: pass the same.")
            return value
        shape = (*leaf.shape[:axis], total, *leaf.shape[axis + 1 :])
        if told and hasattr(given, "shape") and tuple(given.shape) != shape:
            raise PVIError(f"{leaf.name} has the shape {tuple(given.shape)}, and all clients' rows together {shape}.")
        stands = self.line.stands = self.line.stands or {}
        if (place, shape) not in stands:
            dtype = jnp.dtype(leaf.dtype)
            # Nobody is to read them: what does all the same is no number.
            empty = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
            stands[place, shape] = jnp.full(shape, empty, dtype)
        return stands[place, shape]

    def compare(self, plan: Any) -> None:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.compare`."""
        table, here = plan.partition.table, self.labels
        if not table.labels:
            return
        if table.labels != here:
            gone, new = ([x for x in a if x not in b] for a, b in ((table.labels, here), (here, table.labels)))
            told = [f"the state has group(s) {known_labels(tuple(gone))}"] * bool(gone)
            told += [f"there are clients {known_labels(tuple(new))}"] * bool(new)
            raise StateError(
                f"the state was made with other clients: {' and '.join(told)}. Go on with the clients that it was made with, or "
                "begin anew with init."
            )
        for label, size, said in zip(here, table.sizes, self.described(), strict=True):
            if size != said["rows"]:
                raise StateError(
                    f"the state was made with other rows: client {label!r} had {size} and now has {said['rows']}. Give it the "
                    "rows that the state was made with, or begin anew with init."
                )

    def partitions(self, model: Callable, given: Any) -> tuple[Partition, ...]:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.partitions`."""
        if given is not None:
            raise PVIError(
                "a Partition is given, and clients that have their own rows are the groups, under their own labels: write "
                "PVI(model, guide, ...), and name the plate where clients are made."
            )
        facts = self.described()
        (plate,) = facts[0]["plates"].plates
        rows = [label for label, said in zip(self.labels, facts, strict=True) for _ in range(said["rows"])]
        return (Partition(model, plate, rows),)

    # ------------------------------------------------------------------ what rows are taken for

    def plan(self, pvi: Any, layout: Any, family: Any, arguments: tuple, key: Any) -> Planned:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.plan`."""
        args, kwargs, signature = arguments
        facts = self._found(key)
        parts = [said["part"] for said in facts]
        local = parts[0].local
        own = () if local is None else local.names
        if list(zip(parts[0].layout.names, parts[0].layout.shapes, strict=True)) != [
            (n, s) for n, s in zip(layout.names, layout.shapes, strict=True) if n not in own
        ]:
            raise ClientError(
                f"client {self.labels[0]!r} has the latents {parts[0].layout}, and the server {layout}: they are not of one model.",
                self.labels[0],
            )
        refuse_nothing_shared(parts[0])
        part, packing = self._split(facts)
        self.compare_priors(pvi._engine, Plan(part, family_of(pvi.guide, part.layout.dim), signature), (args, kwargs))
        (loc,), nearby = facts[0]["at"], np.sum([said["nearby"] for said in facts], axis=0)
        return Planned(part, packing, loc, facts[0]["sd"], self._params(facts), nearby=nearby)

    def plan_families(self, family: Any, expectation: str, key: Any) -> Planned:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.plan_families`."""
        facts = self._found(key)
        found = [said["found"] for said in facts]
        agree_on(self.labels, found, ("structure",))
        own = tuple((name, repr(one)) for name, one in family.components)
        if found[0]["families"] != own:
            raise ClientError(
                f"client {self.labels[0]!r} has the latents {found[0]['families']}, and the server {own}: they are not of one "
                "model and guide.",
                self.labels[0],
            )
        part, packing = self._split(facts)
        size = max(part.table.sizes)
        structure = joined_structure([one["structure"] for one in found], family, expectation, size)
        return Planned(part, packing, np.zeros(0), np.zeros(0), self._params(facts), structure=structure)

    def _found(self, key: Any) -> list[dict[str, Any]]:
        """What clients have found at their rows with a key, of one model's."""
        place = KeyData(np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))
        facts = self._asked(lambda exchange: exchange.describe(place))
        self.line.described = facts
        agree_on(self.labels, [_shapes(said) for said in facts], ())
        agree_on(self.labels, [_fixed(said["part"]) for said in facts], ())
        self.line.place = place
        return facts

    def _split(self, facts: list[dict[str, Any]]) -> tuple[PartitionPlan, Any]:
        """How all rows together are taken, and where they would stand."""
        parts = [said["part"] for said in facts]
        rows = [label for label, said in zip(self.labels, facts, strict=True) for _ in range(said["rows"])]
        table = labels_table(rows)
        packing = pack_rows(table, choose_chunk_rows(table.sizes, dim=parts[0].layout.dim))
        shape: dict[str, Any] = {"chunk_rows": packing.rows.shape[1], "num_chunks": packing.rows.shape[0]}
        if parts[0].local is not None:
            terms = max(part.local.terms for part in parts if part.local is not None)
            shape["local"] = dataclasses.replace(parts[0].local, size=len(rows), terms=terms)
        return dataclasses.replace(_joined(parts), table=table, **shape), packing

    def compare_priors(self, engine: Any, plan: Any, arguments: tuple) -> None:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.compare_priors`."""
        if plan.partition.params:
            return
        dynamic, static = split_arguments(*arguments)

        def numbers(arrays: list, at: tuple) -> tuple:
            return engine.told_prior(plan, *join_arguments(arrays, static), at)

        program = Program(numbers)
        for label, said in zip(self.labels, self.described(), strict=True):
            own = [np.asarray(x) for x in program(dynamic, said["at"])]
            if not all(_same(a, b) for a, b in zip(own, said["prior"], strict=True)):
                raise ClientError(
                    f"client {label!r} has another prior than the server: the model closes over other numbers there, or its "
                    "prior depends on the rows (a scale that is X.std(), say). Compute such a number beforehand, the same for all, "
                    "and pass it as an argument of its own.",
                    label,
                )

    def _params(self, facts: list[dict[str, Any]]) -> dict[str, Any]:
        """Where the model's ``numpyro.param`` sites start: at the same values with all clients, or there is no saying where."""
        first, structure = jax.tree.flatten(facts[0]["params"])
        for label, said in zip(self.labels, facts, strict=True):
            leaves, own = jax.tree.flatten(said["params"])
            if own != structure or not all(
                _same(np.asarray(a), np.asarray(b)) for a, b in zip(first, leaves, strict=True)
            ):
                raise ClientError(
                    f"client {label!r} has its model's numpyro.param sites start from other values than client "
                    f"{self.labels[0]!r}: compute such a value beforehand, the same for all, and not from the rows.",
                    label,
                )
        return jax.tree.map(jnp.asarray, facts[0]["params"])

    def watched(self, plan: Any, run: Callable[[], Any]) -> Any:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.watched`."""
        self.attend(plan)
        found = jax.block_until_ready(run())
        exchange = self.line.exchange
        if exchange is not None and exchange.error is not None:
            # What the program made of it since is worth nothing: the state stays what it was.
            raise exchange.error
        return found

    def judged(
        self, plan: Any, rng_key: Any, q: Any, sites: Any, params: dict, num_samples: int
    ) -> dict[Hashable, float]:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.judged`."""
        key, values = _typed(rng_key), jax.tree.leaves(params)
        how = {"ask": "khat", "samples": int(num_samples), "key": str(jax.random.key_impl(key)), "params": len(values)}
        told = tuple(np.asarray(x) for x in (*jax.tree.leaves(q), jax.random.key_data(key), *values))
        own, one = tuple(np.asarray(x) for x in jax.tree.leaves(sites)), (np.zeros((), np.float64),)
        (found,) = self.watched(plan, lambda: self.line.look(how, told, one, own))
        return dict(zip(plan.partition.table.labels, found.tolist(), strict=True))

    def attend(self, plan: Any) -> None:
        """Have clients take their rows for what a plan says, those that have not been told or were told otherwise."""
        line, exchange, taken = self.line, self._open(), plan.told
        if line.taken == taken:
            return
        if line.place is None:
            # A state that was read from a file: any points will do, since what they would show is in the state.
            key = jax.random.key(0)
            line.place = KeyData(np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))
        facts = self._asked(lambda exchange: exchange.agree(line.place, taken))
        agree_on(exchange.labels, facts, ("rows",))
        _compare_latents(plan, exchange.labels, facts)
        line.tells_step, line.taken = facts[0]["step"], taken


def _typed(key: Any) -> Any:
    """A random key of today's kind."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _compare_latents(plan: Any, labels: tuple, facts: list[dict[str, Any]]) -> None:
    """Raise where clients see other latents than a plan that they have no part in, such as a file's."""
    layout = plan.partition.layout
    wanted = tuple((n, tuple(s)) for n, s in zip(layout.names, layout.shapes, strict=True))
    for label, said in zip(labels, facts, strict=True):
        if said["latents"] != wanted:
            raise ClientError(
                f"client {label!r} has the latents {said['latents']}, and the state {wanted}: they are not of one model.",
                label,
            )


def _shapes(facts: dict[str, Any]) -> dict[str, Any]:
    """What a client says of its rows but for their number."""
    leaves, axes = facts["signature"].leaves, facts["axes"]
    shapes = {}
    for x, a in zip(leaves, axes, strict=True):
        shape = None if x.shape is None else tuple(n for i, n in enumerate(x.shape) if i != a)
        shapes[x.name] = x.static if shape is None else f"{x.dtype} {'per row' if a is not None else 'in all'} {shape}"
    rest = {n: facts[n] for n in ("plates", "axes", "others", "settings")}
    return {"structure": facts["signature"].structure, **shapes, **rest}


def _fixed(part: PartitionPlan) -> dict[str, Any]:
    """What all clients must have found alike: everything but how their own rows are taken."""
    free = (
        "table",
        "chunk_rows",
        "num_chunks",
        "likelihood",
        "terms",
        "unstructured",
        "jumps",
        "proved",
        "reason",
        "remarks",
    )
    found = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name not in free}
    # One for every row, whose number is the client's own, and what a look at it costs.
    return found | {"local": None if part.local is None else dataclasses.replace(part.local, size=0, terms=1)}


def _joined(parts: list[PartitionPlan]) -> PartitionPlan:
    """The plan that holds of all rows: of every claim the least, proved where it is proved everywhere."""
    kinds = {part.likelihood for part in parts}
    same_terms = all(_bare(part.terms) == _bare(parts[0].terms) for part in parts)
    terms = parts[0].terms if same_terms else ()
    if terms:
        terms = tuple(_joined_term(own) for own in zip(*(part.terms for part in parts), strict=True))
    if len(kinds) == 1:
        (kind,) = kinds
    else:
        known = [_KINDS.index(kind) if kind in _KINDS else len(_KINDS) - 1 for kind in kinds]
        kind = _KINDS[max(known)]
    if kind == "affine" and not terms:
        kind = "draws"
    proved = frozenset.intersection(*(part.proved for part in parts))
    if kind not in ("quadratic", "affine"):
        terms, proved = (), proved - {"likelihood"}
    forms = {part.unstructured for part in parts}
    mixed = next((form for form in ("slopes", "values") if form in forms), "monte_carlo")
    form = parts[0].unstructured if len(forms) == 1 else mixed
    # Own latents stay with the clients, and rows are not looked at without them.
    jumps = {factor for part in parts for factor in part.jumps if part.local is None or factor != "likelihood"}
    found = {"terms": terms, "proved": proved, "jumps": tuple(sorted(jumps))}
    return dataclasses.replace(parts[0], likelihood=kind, unstructured=form, remarks=(), **found)


def joined_structure(
    found: list[FactorStructure], family: Any, expectation: str, size: int | None = None
) -> FactorStructure:
    """What holds of all clients' factors: of every component the least, which is drawn where they have found different things.

    Or at the points of a fixed rule, where the largest group's rows, ``size``, allow one: each evaluates it at its own; None for
    draws in any case.

    A component that some rows do not see is taken as the others find it, whose factors see all that any do: the factors of
    those rows are constant in it. Where no client's rows see all components, those that only others see are drawn.
    ``expectation``: as of :func:`numpyro_pvi.expectations.find_structure`. Returns the structure; proved is what is proved of
    all. Raises PVIError where a component would have to be drawn that cannot be, or may not be.
    """

    def absent(structure: FactorStructure) -> set[str]:
        return {role.name for role in structure.roles if role.kind == "absent"}

    base = min(found, key=lambda one: len(absent(one)))
    differ = {
        role.name
        for one in found
        for role, own in zip(base.roles, one.roles, strict=True)
        if own.kind not in ("absent", role.kind)
        or (own.kind != "absent" and (own.single, own.apart) != (role.single, role.apart))
    }
    terms, every = base.terms, [one.terms for one in found if one.terms]
    if any(_bare(own) != _bare(terms) for own in every):
        differ |= set(base.by_predictors)
    elif terms:
        terms = tuple(_joined_term(own) for own in zip(*every, strict=True))
    proved = [all(each) for each in zip(*([role.proved for role in one.roles] for one in found), strict=True)]
    jumps = [any(each) for each in zip(*([role.jumps for role in one.roles] for one in found), strict=True)]
    roles = tuple(
        dataclasses.replace(role, proved=sure, jumps=own)
        for role, sure, own in zip(base.roles, proved, jumps, strict=True)
    )
    design = joint_design(base.num_signs, found)
    # A term that a component's values move at anybody's rows is one that they move.
    cells = tuple(
        (name, tuple(dict.fromkeys(t for one in found for n, own in one.cells if n == name for t in own)))
        for name, _ in base.cells
    )
    nodes = min(one.nodes for one in found if one.by_rule) if base.by_rule else 0
    joined = dataclasses.replace(base, roles=roles, design=design, cells=cells, terms=terms, nodes=nodes)
    if not differ:
        return joined
    drawn = with_draws(joined, family, sorted(differ), expectation, "groups' likelihood")
    return drawn if size is None else with_rule(drawn, family, expectation, size)


def told_settings(pvi: Any) -> dict[str, Any]:
    """What a server and its clients are to be made with alike."""
    settings = settings_of(pvi)
    return {"guide": settings["guide"], "solver": settings["solver"], "num_particles": pvi._engine.num_particles}


def _words(settings: Any) -> str:
    if not isinstance(settings, dict):
        return str(settings)
    return f"{settings['type']}({', '.join(f'{n}={x}' for n, x in settings['fields'].items())})"


def _bare(terms: tuple) -> tuple:
    """Terms as far as clients have to agree on them: of a single row nobody sees whether others share its predictors."""
    return tuple(
        dataclasses.replace(
            term, proved=False, predictors=tuple(dataclasses.replace(p, shared=False) for p in term.predictors)
        )
        for term in terms
    )


def _joined_term(found: tuple[TermSpec, ...]) -> TermSpec:
    """A term that all clients have found: proved, and of predictors that rows share, where it is so everywhere."""
    shared = [all(own) for own in zip(*([p.shared for p in term.predictors] for term in found), strict=True)]
    predictors = tuple(dataclasses.replace(p, shared=s) for p, s in zip(found[0].predictors, shared, strict=True))
    return dataclasses.replace(found[0], proved=all(term.proved for term in found), predictors=predictors)


def _same(own: np.ndarray, other: np.ndarray) -> bool:
    if own.shape != other.shape or own.dtype != other.dtype:
        return False
    size = np.max(np.abs(own), initial=1.0)
    return bool(np.all(np.abs(own - other) <= _SAME[own.dtype.name] * size))
