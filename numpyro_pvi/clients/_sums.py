"""Clients that are heard in sums only: what is added, how it is rounded so that sums are exact, and who took part."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from .._compiling import precisely
from ..errors import ClientError, PVIError
from ..handlers import numbered_table
from ..runtime import Engine, SummedEngine
from ..wire import KeyData, Message, decode, digest_of, encode
from ._exchange import RECORDS, Exchange, Traffic, Transport
from ._holders import Holders, _fixed, _joined, _same, _shapes, agree_on
from ._own import Client
from ._runtimes import ClientsRuntime, Nearby, in_order

_LOG = logging.getLogger("numpyro_pvi")
# The label of the one group that a server has of them all.
EVERYONE = "all clients"
# Numbers before a contribution's own: whether they did not fit, and whether a visit moved.
_COUNTS = 2
# Nats that the value of one row is taken to be within at first, and how often it is asked for again, with a reach that is each time
# 2^16 times as wide.
_NATS, _WIDER = 64.0, 2
# Reach is this many times the largest number of the last sum, falls by at most the second factor a round, and grows by the third
# where a client's numbers did not fit.
_MARGIN, _FALL, _GROWTH = 8.0, 2.0**-8, 2.0**8
_LEAST_REACH, _MOST_REACH = 2.0**-30, 2.0**60
# Relative distance between a state's sum and the clients' that is rounding.
_ROUNDING = {"float32": 1e-4, "float64": 1e-9}


class Summed(NamedTuple):
    """A sum of clients' numbers, and whose they are.

    Attributes:
        numbers: Int[K], the sum.
        who: places of the clients that are in it.
    """

    numbers: np.ndarray
    who: tuple[int, ...]


@runtime_checkable
class SecureSum(Protocol):
    """What adds clients' numbers so that no one but the client has seen a single one.

    Attributes:
        capacity: the largest absolute value of a number of one client's, at most ``2^52``.
    """

    capacity: int

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of the clients, by place."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Round trips and bytes of all sums so far."""
        ...

    def open(self) -> Transport:
        """What carries questions that clients answer one by one: what their rows look like, never what they say."""
        ...

    def sum(self, question: bytes) -> Summed | None:
        """Have every client's :meth:`Summand.contribute` answer a question, and add the answers.

        Args:
            question: its bytes, the same for all.

        Returns:
            The sum of those that went through to the end, and exactly of these; None where nothing became known of any (too few
            were left), so that the question may be asked again.
        """
        ...

    def close(self) -> None:
        """Let the clients go."""
        ...


class SumReport(NamedTuple):
    """What a server knows of the sums of a fit.

    Attributes:
        rounds: sums of site changes that were absorbed.
        absent: labels of clients that the last one is without.
        unfit: how many clients' changes did not fit the last one's reach and stayed out; they know themselves who they are.
        reach: largest number of one client's change that the next one takes, in units of q: see :func:`lattice`.
        error: largest error of a number of the last sum by rounding, in these units. It does not add up over rounds: clients round
            what they still have to say.
    """

    rounds: int = 0
    absent: tuple[Hashable, ...] = ()
    unfit: int = 0
    reach: float = math.nan
    error: float = math.nan


# -------------------------------------------------------------------------------------------------------------- rounding
# Changes are whole multiples of powers of two that everybody knows, so that sums of them are exact and clients know what of
# theirs was absorbed.


def lattice(q: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The unit of every natural parameter, a power of two made of q alone, which everybody knows.

    Of the precision's entry ``(i, j)`` it is ``(Lambda_ii Lambda_jj)^(1/2)``, of the precision-mean's ``i`` it is
    ``Lambda_ii^(1/2) max(1, max_j Lambda_jj^(1/2) m_j)`` with m the location's absolute value, rounded up. ``q``:
    precision-mean and precision, Float[D] and Float[D D] or Float[D]. Returns Float64 arrays of the same shapes.
    """
    h, precision = (np.asarray(x, np.float64) for x in q)
    full = precision.ndim == 2
    roots = np.sqrt(np.diagonal(precision) if full else precision)
    loc = np.linalg.solve(precision, h) if full else h / precision
    far = max(1.0, float(np.max(roots * np.abs(loc), initial=0.0)))
    return _power_of_two(roots * far), _power_of_two(np.multiply.outer(roots, roots) if full else precision)


def _power_of_two(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp2(np.ceil(np.log2(x))))


def _flat(leaves: tuple[np.ndarray, ...]) -> np.ndarray:
    """Numbers of a change, those of a symmetric matrix once."""
    h, precision = leaves
    return np.concatenate([h, precision[np.tril_indices(len(h))] if precision.ndim == 2 else precision])


def _leaves(flat: np.ndarray, like: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The inverse of :func:`_flat`."""
    dim = like[0].shape[0]
    h, rest = flat[:dim], flat[dim:]
    if like[1].ndim == 1:
        return h, rest
    lower = np.zeros((dim, dim))
    lower[np.tril_indices(dim)] = rest
    return h, lower + np.tril(lower, -1).T


def _step(reach: float, capacity: int) -> float:
    """What a whole number stands for: the smallest power of two by which ``reach`` is at most ``capacity``."""
    return 2.0 ** math.ceil(math.log2(reach) - math.log2(capacity))


# ------------------------------------------------------------------------------------------------------ the client's side


class _Change(NamedTuple):
    """What a client has last said of its site, and what it remembers of that visit, once it is absorbed."""

    sequence: int
    change: tuple[np.ndarray, ...]
    memory: Any


class Summand(Client):
    """A client that is heard in sums only: it keeps its site beside its rows, and tells it to nobody.

    It describes its rows as a :class:`Client` does, but for their log-likelihoods; asked to look or to visit on its own it refuses.
    What it says to a sum is the rounded change of its site; it moves its site by what was absorbed of it, which it is told with
    the next visit, and not at all where its change was lost on the way. Arguments are those of :class:`Client`.

    Under a solver that is ``private`` every one of its changes is noised by itself, before it is added to any other, and counts as
    released once it is made, whether or not it comes to be absorbed; it answers visits alone, and no look.

    Attributes:
        notes: what it has to say of itself, in its own process only: changes that did not fit.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.notes: list[str] = []
        self._run, self._settled = "", 0
        self._site: tuple[np.ndarray, ...] = ()
        self._said: tuple[int, np.ndarray] = (0, np.zeros(0, np.int64))
        self._open: _Change | None = None
        # Of fits by name, how many private visits it has made in each: it outlives whoever asked for them.
        self._released: dict[int, int] = {}

    @property
    def site(self) -> tuple[np.ndarray, ...]:
        """Its site as far as it knows what was absorbed: precision-mean and precision, float64; empty before the first round."""
        return self._site

    def _reply(self, ask: Message) -> tuple[str, dict[str, Any], tuple]:
        if ask.kind in ("look?", "visit?"):
            raise PVIError("it is heard in sums only, and answers no such question on its own")
        kind, fields, after = super()._reply(ask)
        if ask.kind == "plan?":
            fields = {"facts": {**fields["facts"], "released": _as_arrays(self._released)}}
            if self._open is not None:
                # A plan is taken up with memory as it is at first, and what is open is absorbed under it.
                self._open = self._open._replace(memory=self._memory)
        return kind, fields, after

    def save(self) -> bytes:
        """All that it has to remember between two questions, for :meth:`restore`: to be kept where its rows are.

        Returns:
            The bytes of a message of :mod:`numpyro_pvi.wire`: what it was told, its site, its solver's memory, and what it has
            said last.
        """
        number, said = self._said
        fields = {"run": self._run, "sequence": number, "label": self.label, "version": self._settled, "said": (said,)}
        fields |= {"told": (np.frombuffer(self._told, np.uint8),), "site": self._site}
        fields |= {"memory": tuple(np.asarray(x) for x in jax.tree.leaves(self._memory)), "open": ()}
        fields["released"] = _as_arrays(self._released)
        if (open_ := self._open) is not None:
            leaves = tuple(np.asarray(x) for x in jax.tree.leaves(open_.memory))
            fields["open"] = (np.asarray(open_.sequence), *open_.change, *leaves)
        return encode(Message("summand", fields))

    def restore(self, data: bytes) -> None:
        """Go on where another client of the same label and rows was when it was saved.

        Args:
            data: what :meth:`save` has returned.

        Raises:
            WireError: for bytes that are no whole message.
            PVIError: for those of something else, or of another label.
        """
        kept = decode(data)
        fields = kept.fields
        if kept.kind != "summand" or fields["label"] != self.label:
            raise PVIError(
                f"client {self.label!r} is to be restored from what {fields.get('label')!r} has saved ({kept.kind!r}): pass "
                "the bytes that save of a client of its own label has returned."
            )
        told = fields["told"][0].tobytes()
        if told and told != self._told:
            self._reply(decode(told, RECORDS))
        self._run, self._settled, self._site = fields["run"], fields["version"], fields["site"]
        self._said, self._open = (fields["sequence"], fields["said"][0]), None
        _count_in(self._released, fields["released"])
        if told:
            tree = jax.tree.structure(self._answers.first_memory)
            self._memory = tree.unflatten(fields["memory"])
            if fields["open"]:
                number, h, precision, *leaves = fields["open"]
                self._open = _Change(int(number), (h, precision), tree.unflatten(leaves))

    def recount(self, data: bytes) -> None:
        """Know of private visits that another client of these rows has made, for the server that goes on with their fit.

        Args:
            data: what :meth:`save` of the other has returned.

        Raises:
            WireError: for bytes that are no whole message.
        """
        if self._pvi.solver.private:
            _count_in(self._released, decode(data).fields.get("released", _as_arrays({})))

    def _describe(self, key: KeyData | None = None) -> dict[str, Any]:
        facts = super()._describe(key)
        # Log-likelihoods of its rows at points that everybody knows would say what they are.
        return facts if key is None else {**facts, "nearby": np.zeros_like(facts["nearby"])}

    @precisely()
    def contribute(self, question: bytes, capacity: int) -> np.ndarray:
        """What it adds to a sum.

        Args:
            question: its bytes.
            capacity: the largest absolute value of a number.

        Returns:
            Int64[K]: 1 where its own numbers did not fit and are 0, 1 where its visit moved, and these.

        Raises:
            WireError: for bytes that are no message.
            PVIError: for a question that it does not answer, and where it has lost what was absorbed of it.
        """
        try:
            return self._contributed(question, capacity)
        except PVIError:
            raise
        except Exception as error:
            if not self._pvi.solver.private:
                raise
            raise PVIError(self._why(error)) from None

    def _contributed(self, question: bytes, capacity: int) -> np.ndarray:
        ask = decode(question, RECORDS)
        fields = ask.fields
        if ask.kind != "sum?" or self._answers is None:
            raise PVIError(
                f"client {self.label!r} is asked {ask.kind!r}, and adds to sums only, once it has been told the plan."
            )
        what = fields["how"]["ask"]
        if what in ("look", "values", "verify"):
            # Of a q that is told, whosever it is: nothing of its own site goes in, and nothing is done to it.
            self._refuse_looks()
            return self._verified(fields, capacity) if what == "verify" else self._looked(fields, capacity)
        if what not in ("visit", "settle"):
            raise PVIError(f"client {self.label!r} is asked for {what!r}, which is no sum that it adds to.")
        number, said = self._said
        if fields["run"] == self._run and fields["sequence"] <= number:
            if fields["sequence"] < number:
                raise PVIError(f"client {self.label!r} has answered a newer question.")
            return said
        place = self._settle(fields)
        if what == "visit":
            numbers = self._visited(fields, place, capacity)
        else:
            numbers, self._open = np.zeros(_COUNTS, np.int64), None
        self._said = fields["sequence"], numbers
        return numbers

    def _settle(self, fields: dict[str, Any]) -> int:
        """Take up what the server has made of the last change; its place."""
        labels, rounds, shares, start, _ = fields["ledger"]
        if self.label not in labels:
            raise PVIError(f"client {self.label!r} is not among those of the sum.")
        place = labels.index(self.label)
        last = int(rounds[place])
        if fields["run"] != self._run:
            self._run, self._settled, self._open = fields["run"], 0, None
            self._site = tuple(np.asarray(x, np.float64) for x in start)
            self._memory = self._answers.first_memory
        if self._open is not None and self._open.sequence == last:
            share = float(shares[place])
            self._site = tuple(a + share * b for a, b in zip(self._site, self._open.change, strict=True))
            self._memory, self._settled, self._open = self._open.memory, last, None
        if self._settled != last:
            raise PVIError(
                f"client {self.label!r} knows what was absorbed of its answers up to number {self._settled}, and the server has "
                f"absorbed number {last}: it was begun anew, and nobody else knows its site. Begin the fit again by pvi.init."
            )
        return place

    def _visited(self, fields: dict[str, Any], place: int, capacity: int) -> np.ndarray:
        """The change that it wants of its site, undamped, rounded."""
        key, shared = fields["rest"]
        like, dtype, q = self._answers.site, self._answers.dtype, fields["q"]
        exact = tuple(np.asarray(x, np.float64) for x in q)
        rest = tuple((a - b).astype(dtype) for a, b in zip(exact, self._site, strict=True))
        site = tuple(x.astype(dtype) for x in self._site)
        tree = jax.tree.structure(like)
        own = jax.random.fold_in(key.on_device(), place)
        given = tree.unflatten(rest), tree.unflatten(site), self._memory, self._own_key(own, fields), ()
        found = self._answers.visit(fields["how"], shared, *given)
        if self._answers.solver.private:
            # What was made is released, whatever becomes of it: it may have been heard where it is said to be lost.
            self._memory, fit = found.state, fields["ledger"][-1]
            self._released[fit] = self._released.get(fit, 0) + 1
        wanted = tuple(np.asarray(x, np.float64) for x in jax.tree.leaves(found.site))
        units, step = _flat(lattice(q)), _step(fields["reach"], capacity)
        change = _flat(tuple(a - b for a, b in zip(wanted, self._site, strict=True))) / units
        moved = bool(found.moved) and bool(np.all(np.isfinite(change)))
        change = change if moved else np.zeros_like(change)
        fits = bool(np.max(np.abs(change), initial=0.0) <= fields["reach"])
        if not fits:
            self._note(change, fields["reach"])
        whole = np.rint(change / step) if fits else np.zeros_like(change)
        # What was said before and not absorbed by now was lost on the way.
        self._open = _Change(fields["sequence"], _leaves(whole * step * units, exact), found.state)
        return np.concatenate([[not fits, moved], whole]).astype(np.int64)

    def _own_key(self, key: Any, fields: dict[str, Any]) -> Any:
        """Of a question and of what it is answered from: asked with another site, or once more, it draws anew."""
        if self._secret is None:
            return key
        # Every field but the run's and the fit's name and the question's number, by which a repetition would be another question.
        nameless = {"run": "", "sequence": 0, "ledger": fields["ledger"][:-1]}
        asked = encode(Message("sum?", fields | nameless), RECORDS)
        own = (*self._site, *jax.tree.leaves(self._memory))
        return self._secretly(key, asked + b"".join(np.asarray(x).tobytes() for x in own))

    def _note(self, change: np.ndarray, reach: float) -> None:
        assert self._begun is not None
        layout = self._begun[1].plan.partition.layout
        worst = int(np.argmax(np.abs(change)))
        names = [n for n, s in zip(layout.names, layout.shapes, strict=True) for _ in range(math.prod(s))]
        rows, columns = np.tril_indices(len(names))
        of = [*((n,) for n in names), *((names[i], names[j]) for i, j in zip(rows, columns, strict=True))]
        self.notes.append(
            f"client {self.label!r}: the change of its site at {' and '.join(dict.fromkeys(of[worst]))} is "
            f"{abs(change[worst]):.3g} units of q, and a sum takes {reach:.3g}: it has said nothing this time, and the "
            "server was told that some client's change did not fit, which widens the next one. SummedClients(reach=) begins wider."
        )

    def _looked(self, fields: dict[str, Any], capacity: int) -> np.ndarray:
        """Its value at q and the value's error, in nats, rounded."""
        how = fields["how"]
        found = [np.asarray(x, np.float64) for x in self._answers.look(how, fields["q"], ())]
        if how["ask"] == "look":
            self._note_look(fields["q"])
        size = 0 if how["ask"] == "values" else len(jax.tree.leaves(self._answers.site))
        both = np.array([found[size], 0.0 if how["ask"] == "values" else found[size + 1]])
        fits = bool(np.all(np.abs(both) <= fields["reach"]))
        whole = np.rint(both / _step(fields["reach"], capacity)) if fits else np.zeros(2)
        return np.concatenate([[not fits, 0], whole]).astype(np.int64)

    def _verified(self, fields: dict[str, Any], capacity: int) -> np.ndarray:
        """Whether its rows contradict what they were taken for, at draws from q, and then by how much at most, in nats, rounded."""
        found = [np.asarray(x, np.float64) for x in self._answers.look(fields["how"], fields["q"], ())]
        # Of structure and of slopes, which are told as one.
        gap, allowed = np.concatenate(found[::2]), np.concatenate(found[1::2])
        with np.errstate(invalid="ignore"):
            beyond = gap > allowed
        largest = min(float(np.max(gap, initial=0.0, where=beyond)), fields["reach"])
        return np.array([0, beyond.any(), np.rint(largest / _step(fields["reach"], capacity))], np.int64)


def _name_of(keys: np.ndarray) -> int:
    """A positive int32 of random keys."""
    return int.from_bytes(digest_of((keys,))[:4], "little") >> 1 or 1


def _as_arrays(released: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Names of fits, and visits in each."""
    found = np.array(sorted(released.items()), np.int32).reshape(-1, 2)
    return found[:, 0].copy(), found[:, 1].copy()


def _count_in(released: dict[int, int], told: tuple) -> None:
    """Take up what was told of visits, where it is more."""
    names, counts = told
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        released[name] = max(released.get(name, 0), count)


# ------------------------------------------------------------------------------------------------------ the server's side


class SumExchange(Exchange):
    """Questions to clients that are heard in sums only: a sum of clients is a client, whose site is the sum of theirs.

    Implements :class:`numpyro_pvi.runtime.Network` for a fit of one group. The sum of the clients' sites is here;
    each keeps its own.

    ``wait``: seconds after which a question in the open is repeated; ``tries``: times that a question is asked; ``reach``:
    largest number of a client's first change, in units of q; ``made``: of fits by name, visits that all were asked for, in
    conversations before and by states that were gone back from as well; this one goes on counting in it.
    """

    def __init__(self, sums: SecureSum, wait: float, tries: int, reach: float, made: dict[int, int] | None = None):
        super().__init__((EVERYONE,), sums.open(), wait, tries)
        self.sums, self.clients = sums, sums.labels
        self.report = SumReport(reach=reach)
        self._first = reach
        self._known = Exchange(self.clients, self.transport, wait, tries)
        self._rows, self._made = 0, {} if made is None else made
        self.recall()

    def recall(self) -> None:
        """Rounds of another fit begin: clients forget their sites."""
        super().recall()
        self.run, self.report = secrets.token_hex(8), SumReport(reach=self._first)
        count = len(self.clients)
        self._number, self._start, self._total = 0, (), ()
        self._rounds, self._shares = np.zeros(count, np.int64), np.zeros(count)
        # What the last sum changed, and the state's sites when it was asked for.
        self._change: tuple[np.ndarray, ...] | None = None
        self._asked: tuple[np.ndarray, ...] = ()
        self._who: tuple[int, ...] = ()
        self._round = 0
        # The fit's name, where visits are counted.
        self._fit = 0

    # ------------------------------------------------------------------ in the open

    def hello(self) -> list[dict[str, Any]]:
        """There is no rowful client to greet. Raises ClientError always."""
        raise ClientError("clients that are heard in sums have their own rows: give the fit none.")

    def describe(self, key: KeyData | None = None) -> list[dict[str, Any]]:
        """What all clients together look like: see :meth:`Exchange.describe`."""
        facts = self._in_the_open(lambda known: known.describe(key))
        agree_on(self.clients, [_shapes(said) for said in facts], ())
        self._rows = sum(said["rows"] for said in facts)
        found = {**facts[0], "rows": self._rows}
        if key is None:
            return [found]
        parts = [said["part"] for said in facts]
        agree_on(self.clients, [_fixed(part) for part in parts], ())
        for label, said in zip(self.clients, facts, strict=True):
            if not all(_same(a, b) for a, b in zip(facts[0]["prior"], said["prior"], strict=True)):
                raise ClientError(
                    f"client {label!r} has another prior than client {self.clients[0]!r}: compute numbers that it is made of "
                    "beforehand, the same for all, and pass them as arguments of their own.",
                    label,
                )
        part = dataclasses.replace(_joined(parts), table=numbered_table((self._rows,)))
        return [{**found, "part": part, "nearby": np.sum([said["nearby"] for said in facts], axis=0)}]

    def agree(self, key: KeyData, taken: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell clients what their rows are taken for: see :meth:`Exchange.agree`."""
        facts = self._in_the_open(lambda known: known.agree(key, taken))
        # What another server asked for, or this one before its process began, nobody else knows.
        for said in facts:
            _count_in(self._made, said.pop("released"))
        agree_on(self.clients, facts, ("rows",))
        self._rows = sum(said["rows"] for said in facts)
        return [{**facts[0], "rows": self._rows, "step": False}]

    def _in_the_open(self, ask: Any) -> list[dict[str, Any]]:
        before = self._known.traffic
        found = ask(self._known)
        self._add(before, self._known.traffic)
        return found

    def _add(self, before: Traffic, after: Traffic) -> None:
        """Count what others have sent."""
        self._count(**{name: b - a for name, a, b in zip(Traffic._fields, before, after, strict=True)})

    # ------------------------------------------------------------------ in sums

    def look(self, how: dict[str, Any], shared: tuple, shapes: tuple, own: tuple = (), groups: Any = None) -> tuple:
        """The sum of the clients' values at a q; NaN where it is without a client. See :meth:`numpyro_pvi.runtime.Network.look`."""

        def ask() -> list[tuple]:
            if how["ask"] not in ("look", "values", "verify") or own:
                raise ClientError(
                    f"a fit whose clients are heard in sums only does not go with what asks each of them ({how['ask']!r}): "
                    "fit with runtime=InProcess(clients=...), whose clients answer one by one."
                )
            reach = float(_power_of_two(np.array(_NATS * max(self._rows, 1))))
            for _ in range(_WIDER + 1):
                found, step = self._sum(how, shared, (), reach), _step(reach, self.sums.capacity)
                self._count(looks=1)
                if found.numbers[0] == 0:
                    break
                # As of visits: asked again, wider, at the price of coarser rounding.
                reach *= _GROWTH**2
            else:
                _LOG.warning(
                    "%d clients' values are no number, or too large for a sum: the loss is NaN", found.numbers[0]
                )
            if how["ask"] == "verify":
                # Told at every draw alike: that some client's rows contradict, and the sum of what they differ by at most.
                gap = max(float(found.numbers[_COUNTS] * step), step) if found.numbers[1] else 0.0
                told = (gap, gap / 2) * (len(shapes) // 2)
                return [tuple(np.full(x.shape, y, x.dtype) for x, y in zip(shapes, told, strict=True))]
            whole = len(found.who) == len(self.clients) and found.numbers[0] == 0
            value, error = (found.numbers[_COUNTS:] * step) if whole else (np.nan, 0.0)
            leaves = [np.zeros(x.shape, x.dtype) for x in shapes]
            size = 0 if how["ask"] == "values" else 2
            leaves[size] = np.asarray(value, shapes[size].dtype)
            if how["ask"] == "look":
                leaves[size + 1] = np.asarray(error, shapes[size + 1].dtype)
            return [tuple(leaves)]

        return self._kept(ask, shapes, 1)

    def visit(self, how: dict[str, Any], shared: tuple, groups: np.ndarray, own: tuple, shapes: tuple) -> tuple:
        """The sum of what clients make of their sites: see :meth:`numpyro_pvi.runtime.Network.visit`."""
        rest, site, memory, keys, _ = own
        how = {**how}
        counter = how.pop("counter", None)

        def ask() -> list[tuple]:
            here = tuple(np.asarray(x)[0] for x in site)
            self._settle(here)
            q = tuple(np.asarray(x)[0] + y for x, y in zip(rest, here, strict=True))
            key = KeyData(np.asarray(keys)[0], how["key"])
            kept, reach = [np.asarray(x)[0] for x in memory], self.report.reach
            if counter is not None:
                # A fit has its name from its first key: one that is begun again from a file of no round is the same.
                self._fit = int(kept[counter + 1]) or _name_of(np.asarray(keys))
                self._made[self._fit] = max(self._made.get(self._fit, 0), int(kept[counter]))
            found = self._sum({**how, "ask": "visit"}, q, (key, shared), reach)
            self._count(visits=1)
            units, step = lattice(q), _step(reach, self.sums.capacity)
            counts, whole = found.numbers[:_COUNTS], found.numbers[_COUNTS:]
            self._change, self._asked, self._who = _leaves(whole * step * _flat(units), self._total), here, found.who
            self._report(found, whole * step, reach, step)
            told = [(a + b).astype(x.dtype) for a, b, x in zip(self._total, self._change, here, strict=True)]
            flag = np.asarray(bool(counts[1]))
            if counter is not None:
                # Each client has made at most so many releases: one a time that all were asked.
                for i, number in enumerate((self._made[self._fit], self._fit)):
                    kept[counter + i] = np.asarray(number, kept[counter + i].dtype)
            return [(*told, *kept, np.zeros((), np.int32), flag)]

        return self._kept(ask, tuple(x for part in shapes for x in part), 1)

    def settle(self, site: tuple[np.ndarray, ...]) -> None:
        """Tell clients what a state has absorbed, which they are else told with the next visit."""
        self._settle(site)
        self._sum({"ask": "settle"}, (), (), 1.0)

    def begin(self, *args: Any, **kwargs: Any) -> tuple:
        """No client goes on its way alone. Raises ClientError always."""
        raise ClientError("clients that are heard in sums only are asked all at once")

    def arrive(self, *args: Any, **kwargs: Any) -> tuple:
        """Likewise. Raises ClientError always."""
        raise ClientError("clients that are heard in sums only are asked all at once")

    def close(self) -> None:
        """Let the clients go."""
        super().close()
        self.sums.close()

    def _sum(self, how: dict[str, Any], q: tuple, rest: tuple, reach: float) -> Summed:
        """One question to all clients, asked anew under the next number where nothing came of it."""
        ledger = (self.clients, self._rounds, self._shares, self._start, self._fit)
        for attempt in range(self.tries):
            self._number += 1
            if self._fit and how["ask"] == "visit":
                self._made[self._fit] += 1
            fields = {"run": self.run, "sequence": self._number, "how": how, "q": q, "rest": rest, "reach": reach}
            question = encode(Message("sum?", {**fields, "ledger": ledger}), RECORDS)
            before = self.sums.traffic
            found = self.sums.sum(question)
            self._add(before, self.sums.traffic)
            self._count(repeats=int(attempt > 0))
            if found is not None and found.who:
                return found
        raise ClientError(
            f"no sum of the clients came about in {self.tries} tries: too few went through to the end for any to be heard. Nothing "
            "was absorbed, and every client's site is what it was; call again, or pass more tries."
        )

    def _settle(self, site: tuple[np.ndarray, ...]) -> None:
        """See what share of the last sum a state has absorbed, and note it for those that took part."""
        exact = tuple(np.asarray(x, np.float64) for x in site)
        if not self._total:
            self._total = exact
            self._start = tuple(x / len(self.clients) for x in exact)
            return
        # Where all of the last sum is told, the state is the clients' own sum; it differs from what was asked at by rounding alone.
        since = self._total if self._change is None else self._asked
        change = tuple(map(np.zeros_like, exact)) if self._change is None else self._change
        moved = [a - b for a, b in zip(exact, since, strict=True)]
        # The schedule goes towards what it was told, from where it was: the one differs from the clients' sum by rounding.
        aim = [t + c - b for t, c, b in zip(self._total, change, since, strict=True)]
        length = sum(float(np.sum(x * x)) for x in aim)
        share = sum(float(np.sum(a * b)) for a, b in zip(moved, aim, strict=True)) / length if length > 0 else 0.0
        size = max(float(np.max(np.abs(x), initial=1.0)) for x in (*exact, *since))
        gap = max(float(np.max(np.abs(a - share * b), initial=0.0)) for a, b in zip(moved, aim, strict=True))
        if gap > _ROUNDING[np.dtype(site[0].dtype).name] * size or not -0.01 < share < 1.01:
            raise ClientError(
                "this state is not the one that the clients were left at: each keeps its site to itself, and goes on from the last "
                "round only. Go on from the last state, or begin again by pvi.init."
            )
        if self._change is None:
            return
        self._total = tuple(t + share * c for t, c in zip(self._total, self._change, strict=True))
        for place in self._who:
            self._rounds[place], self._shares[place] = self._round, share
        self._change = None

    def _report(self, found: Summed, largest: np.ndarray, reach: float, step: float) -> None:
        """What is told of a sum, and the next one's reach."""
        self._round = self._number
        unfit = int(found.numbers[0])
        wanted = _MARGIN * float(np.max(np.abs(largest), initial=0.0))
        wanted = reach * _GROWTH if unfit else max(wanted, reach * _FALL)
        wanted = min(max(wanted, _LEAST_REACH), _MOST_REACH)
        absent = tuple(label for place, label in enumerate(self.clients) if place not in found.who)
        error = 0.5 * step * len(found.who)
        self.report = SumReport(self.report.rounds + 1, absent, unfit, float(_power_of_two(np.array(wanted))), error)


@dataclasses.dataclass(frozen=True)
class _Summed(Holders):
    """Clients of whom nobody hears one alone."""

    def expect_answers(self, verb: str) -> None:
        """See :meth:`numpyro_pvi.runtime.Elsewhere.expect_answers`."""
        raise PVIError(
            f"{verb} needs what single clients say, and these are heard in sums only: fit with runtime=InProcess(clients=...), "
            "whose clients answer one by one."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SummedClients(ClientsRuntime):
    """Clients that have their own rows and are heard in sums only: ``PVI(..., runtime=SummedClients(sums=InMemorySums(clients)))``.

    It goes with ``schedule=Synchronous(damping=0.5)``, or another number.

    A sum of clients is a client: the fit has one group, whose site is the sum of the clients' sites, and every round absorbs the
    sum of their changes. Rounds ask for visits and no looks: they are accepted where q is normalisable, and ``losses`` are NaN;
    ``pvi.evaluate(state)`` asks for the sum of the clients' values. A client that drops out of a round keeps the site that it had,
    and takes part in the next. Visits know no look at q: solvers that make several steps a visit go another way
    than in one process, and those that draw have draws of each client's own. Fits go on from the last state only, since each client
    knows its own site and nobody else does.

    Args:
        wait: see :class:`Processes`; of questions in the open, before the first round.
        tries: times that a question is asked where no sum of it came about.
        sums: what adds: :class:`InMemorySums`, or one that hides what it adds (``numpyro_pvi.flower.SecAggSums``).
        reach: largest number of a client's change in the first round, in units of q (:func:`lattice`); later rounds' follow the
            sums.

    Raises:
        PVIError: without sums, or for a reach that is not positive; and by the fit for what sums do not suffice
            for: schedules other than ``Synchronous(damping=...)``, and what refuses clients anyway.
    """

    sums: Any = None
    reach: float = 2.0**12
    _made: dict[int, int] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        super().__post_init__()
        if self.sums is None:
            raise PVIError("SummedClients(): pass sums=, what adds what clients say, such as InMemorySums(clients).")
        if not (isinstance(self.reach, int | float) and 0 < self.reach < _MOST_REACH):
            raise PVIError(f"SummedClients(reach={self.reach!r}): expected a positive number, of units of q.")

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of the one group that the fit has."""
        return (EVERYONE,)

    @property
    def elsewhere(self) -> Holders | None:
        """See :attr:`numpyro_pvi.runtime.Runtime.elsewhere`."""
        return _Summed(self) if self.labels else None

    @property
    def report(self) -> SumReport:
        """Of the last sum of site changes."""
        return self._exchange.report

    @staticmethod
    def expect_sums_suffice(schedule: Any, otherwise: str) -> None:
        """Raise for a schedule that needs more of clients than the sum of what they change.

        Args:
            schedule: the fit's.
            otherwise: what to write where clients are to answer one by one.

        Raises:
            PVIError: naming the schedule, and what to write.
        """
        if not schedule.only_adds:
            raise PVIError(
                f"clients that are heard in sums only do not go with {schedule!r}: its rounds need "
                "what single clients say, or a step that follows looks. Write schedule=Synchronous(damping=0.5), a "
                f"damping of your own; or {otherwise}, whose clients answer one by one."
            )

    def settle(self, state: Any) -> None:
        """Tell clients what the last round has absorbed, which they are else told with the next visit.

        Args:
            state: the last one.

        Raises:
            ClientError: for another state than the last.
        """
        self._exchange.settle(tuple(np.asarray(x)[0] for x in jax.tree.leaves(jax.device_get(state.sites.groups))))

    @property
    def _exchange(self) -> SumExchange:
        found: Any = self._line.exchange
        if found is None:
            raise ClientError("there are no clients: call pvi.init, which begins them")
        return found

    def engine(self, engine: Any) -> Any:
        """The engine of a fit that only adds.

        Raises:
            PVIError: for choices that need more than sums, and what to write instead.
        """
        self.expect_sums_suffice(engine.schedule, "runtime=InProcess(clients=...)")
        engine.solver.check_sums()
        if not isinstance(engine, Engine):
            raise PVIError(
                "clients that are heard in sums only do not go with AutoExponentialFamily, whose components move in turns, each "
                "from what every client says of the last: fit with runtime=InProcess(clients=...), or use a Gaussian guide."
            )
        given = (engine.model, engine.solver, engine.schedule, self, engine.optim, engine.num_particles)
        return SummedEngine(*given, network=self._line)

    def open(self) -> Exchange:
        """See :meth:`ClientsRuntime.open`."""
        return SumExchange(self.sums, self.wait, self.tries, self.reach, self._made)


class InMemorySums:
    """Sums of clients in this process, added as they are: what a sum that hides its summands gives, without the hiding.

    Args:
        clients: one a group.
        capacity: the largest absolute value of a number; ``2^52`` rounds nothing that float64 would tell.
    """

    def __init__(self, clients: list[Summand] | tuple[Summand, ...], capacity: int = 1 << 52):
        order = in_order(self, [client.label for client in clients])
        self.clients, self.capacity, self.traffic = tuple(clients[i] for i in order), capacity, Traffic()

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """See :class:`SecureSum`."""
        return tuple(client.label for client in self.clients)

    def open(self) -> Transport:
        """See :class:`SecureSum`."""
        return Nearby(list(self.clients))

    def sum(self, question: bytes) -> Summed | None:
        """See :class:`SecureSum`."""
        found = {place: client.contribute(question, self.capacity) for place, client in enumerate(self.clients)}
        trips, sent, received = self.traffic.trips, self.traffic.sent, self.traffic.received
        received += sum(numbers.nbytes for numbers in found.values())
        self.traffic = Traffic(trips=trips + 1, sent=sent + len(question) * len(found), received=received)
        return Summed(np.sum(list(found.values()), axis=0), tuple(found))

    def close(self) -> None:
        """There is nothing to let go."""
