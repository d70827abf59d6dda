"""A client: rows, its solver's memory and nothing else, in a process of its own; it answers looks and visits."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from .._compiling import precisely
from ..errors import PVIError, WireError
from ..runtime import Answers, ProductAnswers
from ..wire import KeyData, Message, decode, digest_of, encode
from ._exchange import RECORDS, ticket_of
from ._kept import Kept


class Respondent:
    """Answers questions about one group's rows, each once and only once.

    A question that was answered before gets the same answer again, to the byte; one that is older gets none. Whatever goes
    wrong on the way leaves memory, version and the last answer as they were.

    Args:
        label: the group's label.
        answers: the programs over its rows; None where they are still to be made.
        facts: what it says of itself.
    """

    def __init__(self, label: Hashable, answers: Answers | ProductAnswers | None, facts: dict[str, Any]):
        self.label, self.facts = label, facts
        self._version, self._last = 0, ("", 0, b"")
        self._answers: Any = None
        self._memory: Any = ()
        # What it was told its rows are to be taken for, as a question's bytes, and the memory of a client that was kept, as leaves,
        # until it is known what they belong to.
        self._told, self._leaves = b"", None
        # What it holds of latents of its own, what was kept of that, and what the question at hand adds to it.
        self._kept, self._own_leaves, self._made = Kept(None), None, None
        if answers is not None:
            self._take_up(answers)

    def _take_up(self, answers: Answers | ProductAnswers) -> None:
        self._answers, self._memory, self._leaves = answers, answers.first_memory, None
        # What it holds outlives the plan that it is told anew, by a conversation or a server that begins anew.
        self._kept = Kept(answers.first_held).after(self._kept)

    def save(self) -> bytes:
        """All that it has to remember between two questions, for :meth:`restore`: nothing of its rows but what answers say of them.

        Returns:
            The bytes of a message of :mod:`numpyro_pvi.wire`: what it was told, its solver's memory, its site's version, the
            last question that it answered with the answer, and posteriors of latents of its own, which nobody else has: keep them
            where the rows are kept.
        """
        run, sequence, last = self._last
        memory = _numbers(jax.tree.leaves(self._memory)) if self._leaves is None else self._leaves
        fields = {"run": run, "sequence": sequence, "label": self.label, "version": self._version, "memory": memory}
        kept = {"told": (np.frombuffer(self._told, np.uint8),), "answer": (np.frombuffer(last, np.uint8),)}
        kept["own"] = self._kept.save() if self._own_leaves is None else self._own_leaves
        return encode(Message("client", fields | kept))

    def restore(self, data: bytes) -> None:
        """Go on where another client of the same label and rows was when it was saved: answers are the same, to the bit.

        Programs are made again, or taken from JAX's compilation cache, when the first question needs them; a client that was
        told the same before keeps its own.

        Args:
            data: what :meth:`save` has returned.

        Raises:
            WireError: for bytes that are no whole message.
            PVIError: for those of something else, or of another label.
        """
        kept = decode(data)
        if kept.kind != "client" or kept.fields["label"] != self.label:
            raise PVIError(
                f"client {self.label!r} is to be restored from what {kept.fields.get('label')!r} has said ({kept.kind!r}): pass "
                "the bytes that save of a client of its own label has returned."
            )
        fields = kept.fields
        told, last = (_bytes_of(fields[name]) for name in ("told", "answer"))
        if told != self._told:
            self._told, self._answers = told, None
        self._leaves, self._version = fields["memory"], fields["version"]
        self._own_leaves = fields["own"]
        self._last = fields["run"], fields["sequence"], last

    def _recall(self) -> None:
        """Take up the memory that was kept."""
        if self._leaves is not None and self._answers is not None:
            self._memory = _as(self._answers.first_memory, self._leaves, "memory that was kept")
            self._leaves = None
        if self._own_leaves is not None and self._answers is not None:
            self._kept.restore(self._own_leaves)
            self._own_leaves = None

    @precisely()
    def answer(self, data: bytes) -> bytes | None:
        """The answer to a question.

        Args:
            data: the question's bytes.

        Returns:
            The answer's bytes; None where a newer question was answered already.

        Raises:
            WireError: for bytes that are no message; nothing was done.
        """
        try:
            ask = decode(data, RECORDS)
        except WireError as error:
            if error.fault not in ("newer", "older"):
                raise
            # In this version's own format, by which the other side sees what is installed here.
            return encode(Message("refusal", {"run": "", "sequence": 0, "label": self.label, "why": str(error)[:1000]}))
        if ask.kind == "who?":
            return encode(Message("who", {"run": ask.fields["run"], "label": self.label}))
        run, sequence, label = (ask.fields[name] for name in ("run", "sequence", "label"))
        last_run, last_sequence, last = self._last
        if run == last_run and sequence <= last_sequence:
            return last if sequence == last_sequence else None
        head, self._made = {"run": run, "sequence": sequence, "label": self.label}, None
        try:
            if label != self.label:
                raise PVIError(f"the question is for {label!r}, and this is {self.label!r}")
            if ask.kind in ("look?", "visit?"):
                self._recall()
                self._kept.pinned = ask.fields["how"].get("pins", ())
                if self._answers is None:
                    # One that was begun anew: whoever asks tells it, and asks again.
                    return encode(Message("untold", head))
            kind, fields, after = self._reply(ask)
        except Exception as error:
            if not self._refuses(error):
                raise
            return encode(Message("refusal", head | {"why": self._why(error)[:1000]}))
        try:
            found = encode(Message(kind, head | fields), RECORDS)
        except WireError as error:
            return encode(Message("refusal", head | {"why": str(error)[:1000]}))
        self._memory, self._version = after
        if self._made is not None:
            self._kept.keep(ticket_of(run, sequence), self._made)
        self._last = run, sequence, found
        return found

    def _refuses(self, error: Exception) -> bool:
        """Whether an error is an answer, and not a fault of the process, which ends."""
        return isinstance(error, PVIError | ValueError | TypeError | KeyError | IndexError)

    def _why(self, error: Exception) -> str:
        """What is told of an error."""
        return str(error)

    def _reply(self, ask: Message) -> tuple[str, dict[str, Any], tuple]:
        self._recall()
        same = self._memory, self._version
        if ask.kind == "hello?":
            return "hello", {"facts": self.facts}, same
        if ask.kind == "look?":
            told = ask.fields["how"], ask.fields["q"], ask.fields["rest"]
            if "held" in told[0]:
                found, self._made = self._answers.ask_held(*told, self._kept.at)
            else:
                found = self._answers.look(*told)
            if told[0]["ask"] == "look":
                self._note_look(told[1], *(told[2][:1] if "held" in told[0] else ()))
            return "look", {"found": _numbers(found)}, same
        if ask.kind == "visit?":
            return self._visit(ask.fields)
        raise PVIError(f"a message {ask.kind!r} is no question that a client answers")

    def _note_look(self, shared: tuple, ticket: Any = (0, 0)) -> None:
        """At which q a look was, for whoever asks for latents in this process.

        ``shared``: what all were told, the moments of q first; ``ticket``: the name of what it holds of latents of its own.
        """
        self._kept.seen = np.asarray(ticket, np.int32), shared[: len(jax.tree.leaves(self._answers.moments))]

    def _key(self, key: KeyData, fields: dict[str, Any], memory: tuple) -> Any:
        """The random key of a visit, which is made with this memory."""
        return key.on_device()

    def _visit(self, fields: dict[str, Any]) -> tuple[str, dict[str, Any], tuple]:
        own = digest_of(_numbers(jax.tree.leaves(self._memory)))
        memory, structure = self._memory, jax.tree.structure(self._memory)
        if own != fields["digest"]:
            given = fields["memory"]
            if len(given) != structure.num_leaves:
                return "gap", {"digest": own}, (self._memory, self._version)
            if digest_of(given) != fields["digest"]:
                raise PVIError("the memory that it is sent is not the one that the digest beside it is of")
            memory = jax.tree.unflatten(structure, given)
        like = self._answers.site
        rest, site = (_as(like, fields[name], name) for name in ("cavity", "site"))
        key, start, shared, at, beside = fields["rest"]
        leaves = _numbers(jax.tree.leaves(memory))
        if not isinstance(key, KeyData):
            raise PVIError("a visit needs a random key")
        given = fields["how"], shared, rest, site, memory, self._key(key, fields, leaves)
        if beside:
            found, self._made = self._answers.visit_held(*given, self._kept.at(beside[0]), beside[1])
        else:
            found = self._answers.visit(*given, start)
        look = fields["how"].get("look")
        seen = () if look is None else self._answers.look(look, at)
        step = () if found.step is None else (found.step,)
        told = {"site": found.site, "memory": found.state, "rest": (found.backoffs, found.moved, *step), "found": seen}
        # One that was begun anew is newer than what it has forgotten: questions are numbered through.
        version = max(self._version + 1, fields["sequence"])
        sent = {name: _numbers(jax.tree.leaves(tree)) for name, tree in told.items()}
        return "visit", {"version": version, **sent}, (found.state, version)


def _bytes_of(arrays: tuple) -> bytes:
    if len(arrays) != 1 or arrays[0].dtype != np.uint8:
        raise PVIError("what was kept of a client is damaged: bytes are an array of them.")
    return arrays[0].tobytes()


def _numbers(leaves: Any) -> tuple:
    return tuple(np.asarray(x) for x in leaves)


def _as(like: Any, leaves: tuple, what: str) -> Any:
    wanted = [(x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(like)]
    found = [(x.shape, x.dtype) for x in leaves]
    if found != wanted:
        raise PVIError(f"the {what} has the shapes {found} and not {wanted}")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
