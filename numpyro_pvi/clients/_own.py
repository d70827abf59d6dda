"""A client that is made in its own process from its own rows, before any server is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.optim import SGD

from .._compiling import Program
from .._opening import begin_fit
from .._saving import settings_of
from .._state_marginals import own_distributions, rows_by_unit
from ..errors import PVIError, WireError
from ..factors import abstract_trace, join_arguments, row_arguments, signature_of, split_arguments
from ..guides import keeps_supports
from ..handlers import Partition, numbered_table
from ..pvi import PVI
from ..runtime import Units, whole_call
from ..wire import KeyData, Message, decode, digest_of, encode
from ._client import Respondent
from ._exchange import RECORDS
from ._share import Share


class Client(Respondent):
    """A group of a fit whose rows are here and nowhere else: ``Client(model, guide, "north", X, y)`` answers a server's questions.

    It is made from what the server's ``PVI`` is made from, and its own rows. Asked to *describe* itself it says how many rows it
    has, of which shapes and dtypes, and the structure that it has found at them; told what all clients' rows are to be taken for,
    it answers looks and visits. No answer holds a row; see the page on privacy for what answers say of rows.

    Args:
        model: the NumPyro model, or a :class:`numpyro_pvi.Partition` of one that names the plate (whose groups are not read).
        guide: a Gaussian guide of it.
        label: the group's label.
        args: the model's positional arguments, with this client's rows.
        load_rows: in place of these, called once to load them: the positional arguments as a tuple, or a pair of that and a dict of
            keyword arguments.
        solver: the server's local solver; :class:`numpyro_pvi.solvers.NaturalGradient` by default.
        loss: the server's; it gives the number of particles where the loss is Monte Carlo.
        kwargs: the model's keyword arguments.

    Raises:
        PVIError: for choices that no fit takes, and for rows that are not along one plate of the model's.
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
        **kwargs: Any,
    ):
        super().__init__(label, None, {})
        if load_rows is not None:
            if args or kwargs:
                raise PVIError(f"client {label!r} is given rows and load_rows, which loads them: leave one out.")
            args, kwargs = _loaded(load_rows())
        if keeps_supports(guide):
            raise PVIError(
                f"client {label!r} does not go with AutoExponentialFamily, whose rounds take turns over components of q: use a "
                "Gaussian guide, such as AutoMultivariateNormal(model), here and with the server."
            )
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
        self._begun: tuple[Any, Any] | None = None
        self._known: dict[Any, Any] = {}

    def compile_with(self, known: dict[Any, Any]) -> None:
        """Take programs of other clients in this process, which serve this one where it differs from them in its rows only.

        Args:
            known: theirs; what this one compiles is put there.
        """
        self._known = known

    def _reply(self, ask: Message) -> tuple[str, dict[str, Any], tuple]:
        same = self._memory, self._version
        if ask.kind == "describe?":
            return "describe", {"facts": self._describe(*ask.fields["key"])}, same
        if ask.kind == "plan?":
            self._plan(*ask.fields["key"], ask.fields["taken"])
            told = Message("plan?", ask.fields | {"run": "", "sequence": 0})
            self._told = encode(told, RECORDS)
            return "hello", {"facts": self.facts}, (self._memory, self._version)
        return super()._reply(ask)

    def _recall(self) -> None:
        if self._answers is None and self._told:
            ask, leaves, own = decode(self._told, RECORDS), self._leaves, self._own_leaves
            self._plan(*ask.fields["key"], ask.fields["taken"])
            self._leaves, self._own_leaves = leaves, own
        super()._recall()

    def _describe(self, key: KeyData | None = None) -> dict[str, Any]:
        leaves = jax.tree.leaves((self._args, self._kwargs))
        pairs = zip(leaves, self._row_axes, strict=True)
        settings = settings_of(self._pvi)
        facts = {
            "rows": self._rows,
            "signature": signature_of(self._args, self._kwargs),
            "plates": self._axes,
            "axes": self._row_axes,
            # Of arguments that are no rows, by which it is seen that all have the same.
            "others": tuple(
                b"" if a is not None or not hasattr(x, "dtype") else digest_of((np.asarray(x),)) for x, a in pairs
            ),
            "settings": {name: settings[name] for name in ("guide", "solver")},
        }
        if key is None:
            return facts
        begun = self._begin(key)
        planned, plan = begun.planned, begun.plan
        engine, loc = self._pvi._engine, np.asarray(planned.prior_loc)

        def numbers(arrays: list, loc: Any) -> tuple:
            call = whole_call(engine.model, plan.partition, *join_arguments(arrays, begun.static), {})
            return tuple(engine.prior_numbers(plan, call, loc))

        part = dataclasses.replace(plan.partition, table=numbered_table((self._rows,)))
        prior = () if part.params else tuple(np.asarray(x) for x in Program(numbers)(begun.dynamic, loc))
        found = {"loc": loc, "sd": np.asarray(planned.prior_sd), "nearby": np.asarray(planned.nearby), "prior": prior}
        return {**facts, "part": part, "params": jax.tree.map(np.asarray, planned.params), **found}

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
        begun, engine = self._begin(key), self._pvi._engine
        part = dataclasses.replace(
            begun.plan.partition, **{n: taken[n] for n in ("likelihood", "terms", "unstructured")}
        )
        plan = dataclasses.replace(begun.plan, partition=part, chained=taken["chained"])
        arrays, static = split_arguments(self._args, self._kwargs)
        dtype = np.asarray(begun.planned.prior_loc).dtype
        prior = plan.family.zeros((), dtype), np.zeros(plan.family.dim, bool)
        given = self.label, engine.model, engine.solver, engine.num_particles, plan, begun.planned.packing
        units = None
        if part.local is not None:
            own = begun.planned.local_loc, begun.planned.local_sd
            units = Units(np.arange(self._rows, dtype=np.int32), *(np.asarray(x) for x in own))
        share = Share(*given, arrays, static, prior, units, begun.planned.params)
        answers, self.facts = share.answers(self._known)
        self._take_up(answers)

    def posterior(self) -> dict[str, Any]:
        """Marginal posteriors of latents of this group's own, at the q of the last look: nobody else is told them.

        Returns:
            NumPyro distributions by latent, in their own supports, along this client's rows.

        Raises:
            PVIError: where the model has no latents inside the plate, or nobody has looked yet.
        """
        self._recall()
        if self._answers is None or self._begun is None or self._kept.seen is None:
            raise PVIError(f"client {self.label!r} has not been asked yet what it sees at a q: fit first.")
        part, planned = self._begun[1].plan.partition, self._begun[1].planned
        if part.local is None:
            raise PVIError(
                f"client {self.label!r} has no latents of its own: pvi.posterior(state) has those that all share."
            )
        ticket, leaves = self._kept.seen
        shared = jax.tree.unflatten(jax.tree.structure(self._answers.moments), [jnp.asarray(x) for x in leaves])
        rows = rows_by_unit(self._kept.at(ticket).rows, part.local, planned.packing)
        return own_distributions(part.local, self._answers.family, shared, rows, self._pvi.guide.prototype_trace)

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


def _loaded(given: Any) -> tuple[tuple, dict]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given
    return (given if isinstance(given, tuple) else (given,)), {}
