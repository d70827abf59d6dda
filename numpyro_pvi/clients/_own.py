"""A client that is made in its own process from its own rows, before any server is there."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.optim import SGD

from .. import export
from .._closures import Followed
from .._compiling import Program, precisely
from .._fits import begin_fit
from .._state_marginals import own_distributions, rows_by_unit
from ..diagnostics import MIN_SAMPLES
from ..errors import PVIError, WireError
from ..factors import ModelCall, abstract_trace, join_arguments, row_arguments, signature_of, split_arguments
from ..families import conditional_moments
from ..guides import keeps_supports
from ..handlers import FullPlates, Partition, numbered_table
from ..pvi import PVI
from ..runtime import Units
from ..wire import KeyData, Message, decode, digest_of, encode
from ._client import Respondent
from ._exchange import RECORDS
from ._holders import told_settings
from ._share import Share


class Client(Respondent):
    """A group of a fit whose rows are here and nowhere else: ``Client(model, guide, "north", X, y)`` answers a server's questions.

    It is made from what the server's ``PVI`` is made from, and its own rows. Asked to *describe* itself it says how many rows it
    has, of which shapes and dtypes, and the structure that it has found at them; told what all clients' rows are to be taken for,
    it answers looks and visits. No answer holds a row; see the page on privacy for what answers say of rows. Under
    :class:`numpyro_pvi.solvers.DifferentialPrivacy` it tells of its rows their number, shapes and dtypes and what visits release,
    and describes rows that everybody may know (``like``) in place of its own.

    Args:
        model: the NumPyro model, or a :class:`numpyro_pvi.Partition` of one that names the plate (whose groups are not read).
        guide: a guide of it, of the kind that the server has.
        label: the group's label.
        args: the model's positional arguments, with this client's rows.
        load_rows: in place of these, called once to load them: the positional arguments as a tuple, or a pair of that and a dict of
            keyword arguments.
        solver: the server's local solver; :class:`numpyro_pvi.solvers.NaturalGradient` by default.
        loss: the server's; it gives the number of particles where the loss is Monte Carlo.
        secret: under a solver that is ``private``, 16 to 64 bytes that nobody else has, such as ``os.urandom(32)``, kept beside the
            rows as long as the fit runs: visits draw by keys that are made of them and of all that is asked, so that the server,
            whose own key travels in every question, cannot make the noise again. Asked the same, the client draws the same. Fits
            are then no more those of one process.
        like: under a solver that is ``private``, the model's arguments with rows that everybody may know, agreed on beforehand, as
            ``load_rows`` returns them; as many as one likes, of the same columns. What the client tells the server before the first
            visit (the structure that rows show, how likely they are near the prior) is told of these, and not of its own rows.
        kwargs: the model's keyword arguments.

    Raises:
        PVIError: for choices that no fit takes, for ``secret`` and ``like`` of a solver that is not private, for one that is
            without ``like``, and for rows that are not along one plate of the model's.
        DataError: for NaN or infinity in the rows, when the client is asked to describe them.
    """

    def __init__(
        self,
        model: Callable | Partition,
        guide: Any,
        label: Hashable,
        *args: Any,
        load_rows: Callable[[], Any] | None = None,
        solver: Any = None,
        loss: Any = None,
        secret: bytes | None = None,
        like: Any = None,
        **kwargs: Any,
    ):
        super().__init__(label, None, {})
        self._secret = secret
        if load_rows is not None:
            if args or kwargs:
                raise PVIError(f"client {label!r} is given rows and load_rows, which loads them: leave one out.")
            args, kwargs = _loaded(load_rows())
        how: dict[str, Any] = {"loss": loss, "solver": solver}
        if isinstance(model, Partition):
            kept = {n: getattr(model, n) for n in ("sites", "data_axes", "mode", "chunk_size", "check")}
            model = Partition(model.fn, model.plate, 1, **kept)
        else:
            how["num_groups"] = 1
        self._pvi = PVI(model, guide, **how)
        self._args, self._kwargs = self._pvi._arguments(args, kwargs)
        trace = abstract_trace(self._pvi.model, jax.random.key(0), self._args, self._kwargs)
        if any(site["type"] == "param" for site in trace.values()):
            # The server's optimiser moves them: what is here only holds the values that they start from.
            self._pvi = PVI(model, guide, SGD(1.0), **how)
        partition = self._pvi._partitions(trace)[0]
        self._axes = partition.row_axes(trace)
        sizes = self._axes.sizes(trace)
        if self._axes.whole or len(self._axes.plates) != 1:
            raise PVIError(
                f"client {label!r}: its rows are to be along one plate of the model, named by Partition(model, plate) where there "
                "are several."
            )
        (self._rows,) = sizes.values()
        call = self._args, self._kwargs
        self._row_axes, _ = row_arguments(partition, self._pvi.model, *call, self._rows)
        self._like = self._check_privacy(secret, like)
        self._begun: tuple[Any, Any] | None = None
        # What the model alone closes over, alike for all clients of it, and what stood for that when it was last asked to describe
        # itself, or told the plan.
        self._followed = Followed((model.fn if isinstance(model, Partition) else model,))
        self._token = self._followed.programs.token
        self._known: dict[Any, Any] = {}
        # Values of the model's params, as leaves, that the last look told; none where it has none, or nobody has looked.
        self._last_params: tuple = ()

    def compile_with(self, known: dict[Any, Any]) -> None:
        """Take programs of other clients in this process, which serve this one where it differs from them in its rows only.

        Args:
            known: theirs; what this one compiles is put there.
        """
        self._known = known

    def _reply(self, ask: Message) -> tuple[str, dict[str, Any], tuple]:
        same = self._memory, self._version
        if ask.kind in ("describe?", "plan?"):
            self._follow()
        if ask.kind == "describe?":
            return "describe", {"facts": self._describe(*ask.fields["key"])}, same
        if ask.kind == "plan?":
            self._plan(*ask.fields["key"], ask.fields["taken"])
            told = Message("plan?", ask.fields | {"run": "", "sequence": 0})
            self._told = encode(told, RECORDS)
            return "hello", {"facts": self.facts}, (self._memory, self._version)
        looks = ask.kind == "look?"
        if looks or (ask.kind == "visit?" and ask.fields["how"].get("look") is not None):
            self._refuse_looks()
        if looks and ask.fields["how"]["ask"] == "khat":
            self._recall()
            return "look", {"found": (self._judge(*(ask.fields[n] for n in ("how", "q", "rest"))),)}, same
        found = super()._reply(ask)
        # Slopes are asked for at values that a search may not take.
        if looks and ask.fields["how"]["ask"] == "look" and (count := ask.fields["how"].get("params", 0)):
            self._last_params = ask.fields["q"][-count:]
        return found

    def _follow(self) -> None:
        """Drop what was found and compiled where the model closes over something else by now."""
        followed, before = self._followed, self._token
        with followed.turn(True):
            if not followed.programs.snapshot.exact:
                followed.compare(self._pvi.model, self._args, self._kwargs)
        self._token = followed.programs.token
        if self._token is not before:
            self._begun = None
            for key in [key for key in self._known if key[0] is before]:
                del self._known[key]

    def _refuses(self, error: Exception) -> bool:
        # Whatever carries the error from here would carry its words.
        return self._pvi.solver.private or super()._refuses(error)

    def _why(self, error: Exception) -> str:
        """What is told of an error: under a solver that is private, where it is no refusal of this package's, only its kind."""
        if not self._pvi.solver.private or isinstance(error, PVIError):
            return super()._why(error)
        logging.getLogger("numpyro_pvi").error("client %r cannot answer a question", self.label, exc_info=error)
        return f"it cannot answer ({type(error).__name__}): the log in its own process says why"

    def _refuse_looks(self) -> None:
        """Raise where nobody but visits may hear the rows, whoever asks."""
        solver = self._pvi.solver
        if solver.private:
            raise PVIError(
                f"under {type(solver).__name__} it answers visits alone: a look is neither noised nor counted"
            )

    def _recall(self) -> None:
        if self._answers is None and self._told:
            ask, leaves, own = decode(self._told, RECORDS), self._leaves, self._own_leaves
            self._plan(*ask.fields["key"], ask.fields["taken"])
            self._leaves, self._own_leaves = leaves, own
        super()._recall()

    def _describe(self, key: KeyData | None = None) -> dict[str, Any]:
        leaves = jax.tree.leaves((self._args, self._kwargs))
        pairs = zip(leaves, self._row_axes, strict=True)
        facts = {
            "rows": self._rows,
            "signature": signature_of(self._args, self._kwargs),
            "plates": self._axes,
            "axes": self._row_axes,
            # Of arguments that are no rows, by which it is seen that all have the same.
            "others": tuple(
                b"" if a is not None or not hasattr(x, "dtype") else digest_of((np.asarray(x),)) for x, a in pairs
            ),
            "settings": told_settings(self._pvi),
        }
        if key is None:
            return facts
        begun = self._shown(key)
        planned, plan = begun.planned, begun.plan
        engine, at = self._pvi._engine, tuple(np.asarray(x) for x in jax.tree.leaves(begun.at))

        def numbers(arrays: list, at: tuple) -> tuple:
            return engine.told_prior(plan, *join_arguments(arrays, begun.static), at)

        part = dataclasses.replace(plan.partition, table=numbered_table((self._rows,)))
        prior = () if part.params else tuple(np.asarray(x) for x in Program(numbers)(begun.dynamic, at))
        found = {"at": at, "sd": np.asarray(planned.prior_sd), "nearby": np.asarray(planned.nearby), "prior": prior}
        return {
            **facts,
            "part": part,
            "found": plan.found,
            "params": jax.tree.map(np.asarray, planned.params),
            **found,
        }

    def _check_privacy(self, secret: bytes | None, like: Any) -> Any:
        """What is given for a solver that is private; arguments with public rows, or None."""
        solver = self._pvi.solver
        if not solver.private:
            given = "secret" if secret is not None else "like"
            if secret is not None or like is not None:
                raise PVIError(
                    f"client {self.label!r}: {given}= is for solver=DifferentialPrivacy(...), and this is {type(solver).__name__}, "
                    "whose visits are not private: leave it out."
                )
            return None
        if secret is not None and not (isinstance(secret, bytes) and 16 <= len(secret) <= 64):
            raise PVIError(
                f"client {self.label!r}: expected secret= to be 16 to 64 bytes, such as os.urandom(32), kept beside the rows."
            )
        if like is None:
            raise PVIError(
                f"client {self.label!r}: under {type(solver).__name__} it would tell what structure its rows show and how likely "
                "they are near the prior, which is neither noised nor counted. Pass like=, the model's arguments with rows that "
                "everybody may know (made up, of the same columns), and it describes these."
            )
        public, own = self._pvi._arguments(*_loaded(like)), (self._args, self._kwargs)
        shapes, wanted = (self._shapes_of_rows(x) for x in (public, own))
        if jax.tree.structure(public) != jax.tree.structure(own) or shapes != wanted:
            raise PVIError(
                f"client {self.label!r}: like= has, but for the number of rows, the shapes {shapes}, and its rows {wanted}: pass "
                "the model's arguments as the rows are given, as a tuple or a pair of that and a dict of keyword arguments."
            )
        return public

    def _shapes_of_rows(self, arguments: Any) -> list[list[int]]:
        """Shapes of the arguments, without the axis along which there are rows."""
        pairs = zip(jax.tree.leaves(arguments), self._row_axes, strict=False)
        return [[n for i, n in enumerate(np.shape(x)) if a is None or i != a % np.ndim(x)] for x, a in pairs]

    def _key(self, key: KeyData, fields: dict[str, Any], memory: tuple) -> Any:
        """The server's; with a secret, one that only this client can make, the same for the same question and no other."""
        found = super()._key(key, fields, memory)
        if self._secret is None:
            return found
        # Under another number it is the same question, whether its memory was sent or was here; a digest of it says less.
        return self._secretly(
            found, encode(Message("visit?", fields | {"run": "", "sequence": 0, "memory": memory}), RECORDS)
        )

    def _secretly(self, key: Any, asked: bytes) -> Any:
        """A key that only who has the secret can make, the same for the same question."""
        assert self._secret is not None
        for word in np.frombuffer(hashlib.blake2b(asked, key=self._secret, digest_size=32).digest(), np.uint32):
            key = jax.random.fold_in(key, word)
        return key

    def _shown(self, key: KeyData) -> Any:
        """What the server is told was found: at the rows, or where visits are private at those that everybody knows."""
        if self._like is None:
            return self._begin(key)
        if not isinstance(key, KeyData):
            raise PVIError("structure is looked for with a random key")
        return begin_fit(self._pvi, jax.random.key(0), *self._like, plan_key=key.on_device())

    def _privately(self, key: KeyData) -> Any:
        """What was found at the rows; where visits are private, what is wrong with them is not told, but only that something is."""
        solver = self._pvi.solver
        try:
            begun = self._begin(key)
            if solver.private:
                solver.check_groups({self.label: self._rows}, begun.plan.partition.mechanism)
            return begun
        except Exception as error:
            if not solver.private:
                raise
            logging.getLogger("numpyro_pvi").exception("the rows of client %r cannot be fitted", self.label)
            why = f"its rows cannot be fitted ({type(error).__name__}): the log in its own process says why"
            raise PVIError(why) from None

    def _begin(self, key: KeyData) -> Any:
        """What was found at the rows with a key; looked for once."""
        if not isinstance(key, KeyData):
            raise PVIError("structure is looked for with a random key")
        of = key.implementation, key.data.tobytes()
        if self._begun is None or self._begun[0] != of:
            begun = begin_fit(self._pvi, jax.random.key(0), self._args, self._kwargs, plan_key=key.on_device())
            self._begun = of, begun
        return self._begun[1]

    def _plan(self, key: KeyData, taken: dict[str, Any]) -> None:
        """Take the rows for what all clients' are taken for."""
        begun, engine = self._privately(key), self._pvi._engine
        plan = begun.plan.taking(taken)
        part = plan.partition
        arrays, static = split_arguments(self._args, self._kwargs)
        dtype = np.asarray(begun.planned.prior_loc).dtype
        prior = plan.family.zeros((), dtype), np.zeros(plan.family.dim, bool)
        given = self.label, engine.model, engine.solver, engine.num_particles, plan, begun.planned.packing
        units = None
        if part.local is not None:
            own = begun.planned.local_loc, begun.planned.local_sd
            units = Units(np.arange(self._rows, dtype=np.int32), *(np.asarray(x) for x in own))
        share = Share(*given, arrays, static, prior, units, begun.planned.params)
        answers, self.facts = share.answers(self._known, self._token)
        self._take_up(answers)

    def _judge(self, how: dict[str, Any], told: tuple, own: tuple) -> np.ndarray:
        """k-hat of its factor over its site, at draws from a q: one number of them all."""
        count, most = how["samples"], 1 << 20
        if not MIN_SAMPLES <= count <= most:
            raise PVIError(f"k-hat is of {MIN_SAMPLES} to {most} draws, and {count} are asked for")
        assert self._begun is not None
        begun, site = self._begun[1], jax.tree.structure(self._answers.site)
        q, key, params = told[: site.num_leaves], told[site.num_leaves], told[site.num_leaves + 1 :]
        values = jax.tree.structure(begun.planned.params).unflatten([jnp.asarray(x) for x in params])
        at = site.unflatten([jnp.asarray(x) for x in q]), site.unflatten([jnp.asarray(x)[None] for x in own])
        drawn = jax.random.wrap_key_data(jnp.asarray(key), impl=how["key"])
        rows = begun.planned.packing, self._args, self._kwargs, values
        (found,) = self._pvi._fit.judge(self._pvi, self._answers.plan, drawn, *at, rows, count)
        return np.asarray(found, np.float64)

    @precisely()
    def posterior(self) -> dict[str, Any]:
        """Marginal posteriors of latents of this group's own, at the q of the last look: nobody else is told them.

        The last look of a round may have been at a q that was tried and refused: ``pvi.evaluate(state)`` has clients look at a
        state's.

        Returns:
            NumPyro distributions by latent, in their own supports, along this client's rows.

        Raises:
            PVIError: where the model has no latents inside the plate, or nobody has looked yet.
        """
        shared, rows = self._last_look()
        local = self._begun[1].plan.partition.local  # type: ignore[index]
        if local is None:
            raise PVIError(
                f"client {self.label!r} has no latents of its own: pvi.posterior(state) has those that all share."
            )
        return own_distributions(local, self._answers.family, shared, rows, self._pvi.guide.prototype_trace)

    @precisely()
    def to_arviz(self, rng_key: Any, *, num_samples: int = 1000) -> Any:
        """Draws of all latents with this client's rows as ArviZ data, at the q of the last look: nobody else is told them.

        The last look of a round may have been at a q that was tried and refused: ``pvi.evaluate(state)`` has clients look at a
        state's.
        Needs ArviZ.

        Args:
            rng_key: random key.
            num_samples: draws S.

        Returns:
            As of :meth:`numpyro_pvi.PVI.to_arviz`: draws of the latents that all share, from q, whether or not this client's rows
            see them, and of latents of this group's own given these; deterministics; log-likelihoods (nats) and observed data of
            its rows alone. Params of the model have the values that the last look told. There are no rounds: they are the server's.

        Raises:
            PVIError: where nobody has looked yet, as under solvers whose visits alone see the rows; under
                ``AutoExponentialFamily``, whose clients keep no q; where the client was begun anew since and the model has params;
                for less than one draw.
        """
        shared, rows = self._last_look()
        plan, model = self._begun[1].plan, FullPlates(self._begun[1].plan.partition.model(self._pvi.model))  # type: ignore[index]
        params = self._begun[1].planned.params  # type: ignore[index]
        if self._last_params:
            params = jax.tree.structure(params).unflatten([jnp.asarray(x) for x in self._last_params])
        elif jax.tree.leaves(params):
            raise PVIError(
                f"client {self.label!r} was begun anew and does not know the params of the last look: have it asked once more, by "
                "pvi.evaluate(state)."
            )
        drawn = _Drawn(model, plan, shared, rows, params, self._pvi.guide.prototype_trace)
        whole = None if plan.partition.enumeration is None else FullPlates(self._pvi.model)
        given = self._args, self._kwargs
        return export.to_arviz(rng_key, model, drawn, params, *given, num_samples=num_samples, whole=whole)

    def _last_look(self) -> tuple[Any, Any]:
        """Moments of the q of the last look, and natural parameters of latents of this group's own there, or None."""
        if keeps_supports(self._pvi.guide):
            raise PVIError(
                f"client {self.label!r} has no latents of its own under AutoExponentialFamily and keeps no q: "
                "pvi.posterior(state) and pvi.to_arviz(key, state) have what all share."
            )
        if self._pvi.solver.private:
            raise PVIError(
                f"client {self.label!r} answers visits alone under {type(self._pvi.solver).__name__}, so that no look has told it "
                "a q: pvi.posterior(state) has it."
            )
        self._recall()
        if self._answers is None or self._begun is None or self._kept.seen is None:
            raise PVIError(
                f"client {self.label!r} has not been asked yet what it sees at a q: fit first, with a solver whose rounds look at "
                "rows beside visits (LocalELBO does not); pvi.posterior(state) has what all share."
            )
        local, (ticket, leaves) = self._begun[1].plan.partition.local, self._kept.seen
        shared = jax.tree.unflatten(jax.tree.structure(self._answers.moments), [jnp.asarray(x) for x in leaves])
        if local is None:
            return shared, None
        return shared, rows_by_unit(self._kept.at(ticket).rows, local, self._begun[1].planned.packing)

    def serve(self, receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
        """Answer questions until ``receive`` raises ``EOFError`` or ``OSError``.

        Args:
            receive: waits for the next question's bytes.
            send: sends an answer's.
        """
        while True:
            try:
                answer = self.answer(receive())
            except WireError:
                # As good as lost: whoever asked will ask again.
                continue
            except (EOFError, OSError):
                return
            if answer is not None:
                send(answer)


@dataclasses.dataclass(frozen=True, eq=False)
class _Drawn:
    """All latents of a client's model as it last saw them: as much of a guide as an export draws from."""

    model: Any
    plan: Any
    shared: Any
    rows: Any
    params: dict[str, Any]
    prototype_trace: dict[str, Any]

    def sample_posterior(self, rng_key: Any, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """One draw in the latents' own supports."""
        family, part, own = self.plan.family, self.plan.partition, None
        keys = jax.random.split(rng_key)
        point = family.draw(self.shared, jax.random.normal(keys[0], (family.dim,), self.shared.loc.dtype))
        if self.rows is not None:
            noise = jax.random.normal(keys[1], self.rows.linear.shape, self.shared.loc.dtype)
            own = conditional_moments(self.rows).draw(point, noise)
        trace, _ = ModelCall(self.model, part.layout, args, kwargs, self.params, part.local, own).trace(point)
        names = (*part.layout.names, *(() if part.local is None else part.local.names))
        return {name: trace[name]["value"] for name in names}


def _loaded(given: Any) -> tuple[tuple, dict]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given
    return (given if isinstance(given, tuple) else (given,)), {}
