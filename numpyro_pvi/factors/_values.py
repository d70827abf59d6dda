"""Log densities of a model at values of its latents in their own supports, term by term."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from ..handlers import FullPlates, PlateRows, RowAxes
from ._model import Layout, is_latent, is_observed, rows_first, site_log_prob, with_wide_observations
from ._packing import Packing
from ._reading import GroupMasks, Reading, slice_rows


@dataclasses.dataclass(frozen=True)
class ValueCall:
    """A model with its arguments, to be evaluated at given values of all its latents.

    Args:
        model: the NumPyro model.
        args: positional arguments.
        kwargs: keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
    """

    model: Callable
    args: tuple
    kwargs: dict
    params: dict = dataclasses.field(default_factory=dict, kw_only=True)

    def trace(self, values: Mapping[str, Array], rng_key: Any = None) -> dict:
        """The model's trace with every latent at the value given, in its own support; others are drawn from their prior."""
        key = jax.random.key(0) if rng_key is None else rng_key

        # A substitution function is the one handler that also reaches the sample sites inside a scan's body.
        def given(site: dict) -> Array | None:
            return values.get(site["name"]) if is_latent(site) else None

        model = handlers.substitute(FullPlates(self.model), data=self.params)
        seeded = handlers.seed(handlers.substitute(model, substitute_fn=given), key)
        with jax.named_scope("numpyro_model"):
            return with_wide_observations(handlers.trace(seeded).get_trace(*self.args, **self.kwargs))

    def rows(self, reading: Reading, chunk: Any) -> ValueCall:
        """The model on one chunk's rows (on all of them where the others are masked)."""
        if reading.mechanism == "mask":
            return self
        if reading.mechanism == "index":
            return dataclasses.replace(self, model=PlateRows(self.model, reading.keys[0], chunk[0]))
        args, kwargs = slice_rows((self.args, self.kwargs), reading.axes, chunk[0])
        return dataclasses.replace(self, model=reading.sized(self.model, chunk[0].shape[0]), args=args, kwargs=kwargs)

    def likelihood_terms(
        self, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...] = ()
    ) -> dict[str, Array]:
        """Elementwise log density of the groups' sites, in nats: those with a partitioned axis but latents held exactly."""
        return {name: site_log_prob(site) for name, site in self.sites(values, rows, exact, True).items()}

    def sites(
        self, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...], groups: bool
    ) -> dict[str, dict]:
        """The groups' sites of a trace, or else the prior factor's: see :meth:`likelihood_terms` and :meth:`prior_terms`."""
        found = self.trace(values).items()
        return {n: s for n, s in found if _counts(n, s, exact) and (rows.of(s) is not None) == groups}

    def latent_terms(self, values: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
        """Elementwise log prior density of some latents, in nats."""
        trace = self.trace(values)
        return {name: site_log_prob(trace[name]) for name in names}

    def prior_terms(self, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...]) -> dict[str, Array]:
        """Elementwise log density of the prior factor's sites, in nats: no partitioned axis, and not held exactly."""
        return {name: site_log_prob(site) for name, site in self.sites(values, rows, exact, False).items()}


@dataclasses.dataclass(frozen=True)
class SeenCall:
    """A model as a function of some of its latents in one vector, in their own supports, where predictors are read off it.

    Args:
        call: the model on one chunk's rows, or on all.
        values: of the other latents (and any of these), by name.
        layout: of the vector.
    """

    call: ValueCall
    values: Mapping[str, Array]
    layout: Layout

    def trace(self, point: Array) -> tuple[dict, dict[str, Array]]:
        """The model's trace at a vector; no Jacobian belongs to a latent in its own support."""
        return self.call.trace({**self.values, **self.layout.unflatten(point)}), {}


# What is said of elementwise terms in the model's place, by sample site, given the model on the rows at hand and which of them
# count, by partitioned axis.
Instead = Callable[[ValueCall, Mapping[str | None, Any]], Mapping[str, Array]]


def take_rows(tree: Mapping[str, Any], axes: Mapping[str, int], reading: Reading, chunk: Any) -> dict[str, Any]:
    """One chunk's rows of everything that belongs to latents inside the partitioned plate.

    Args:
        tree: arrays (or pytrees of them) by latent.
        axes: by latent inside the plate, the axis that runs over its rows.
        reading: how a chunk is read; where others are masked, all rows stay.
        chunk: one entry of the packing's ``chunks``.

    Returns:
        The same, with R rows for the latents named in ``axes``.
    """
    if reading.mechanism == "mask" or not axes:
        return dict(tree)
    return {
        name: jax.tree.map(lambda x, name=name: jnp.take(x, chunk[0], axis=axes[name]), own) if name in axes else own
        for name, own in tree.items()
    }


def chunk_log_likelihood(
    call: ValueCall,
    values: Mapping[str, Array],
    rows: RowAxes,
    reading: Reading,
    packing: Packing | GroupMasks,
    chunk: Any,
    exact: tuple[str, ...] = (),
    weigh: Callable[[str, Array], Array] = lambda _, term: term,
    instead: Instead | None = None,
) -> Array:
    """Log-likelihood of one chunk's rows, with the log density of their own latents, in nats.

    Args:
        call: the model on all rows.
        values: every latent's value in its own support; of those inside the partitioned plate, the chunk's.
        rows: the partitioned axes.
        reading: how a chunk is read.
        packing: rows of each chunk.
        chunk: one entry of the packing's ``chunks``.
        exact: latents whose prior is held exactly.
        weigh: what an elementwise term counts, given its sample site's name.
        instead: terms that are not the model's at these values, such as their expectations.

    Returns:
        One number.
    """
    here, masks = call.rows(reading, chunk), reading.masks(packing, chunk)
    trace, given = here.trace(values), {} if instead is None else instead(here, masks)
    total: Any = 0.0
    for name, site in trace.items():
        axis = rows.of(site) if _counts(name, site, exact) else None
        if axis is not None:
            term = given[name] if name in given else site_log_prob(site)
            own = rows_first(weigh(name, term), axis.dim)
            total = total + jnp.sum(jnp.where(masks[axis.key], own, 0.0))
    return jnp.asarray(total)


def prior_log_density(
    call: ValueCall,
    values: Mapping[str, Array],
    rows: RowAxes,
    exact: tuple[str, ...],
    weigh: Callable[[str, Array], Array] = lambda _, term: term,
    instead: Instead | None = None,
) -> Array:
    """Log density of the prior factor, in nats: see :meth:`ValueCall.prior_terms` and :func:`chunk_log_likelihood`."""
    terms = call.prior_terms(values, rows, exact)
    if instead is not None:
        terms |= instead(call, {})
    return sum((jnp.sum(weigh(n, x)) for n, x in terms.items()), start=jnp.zeros((), jnp.result_type(float)))


def with_values_held(model: Callable, latents: tuple[str, ...]) -> Callable:
    """A model whose discrete latents are observed at 0: what it says of the others can be planned without them.

    Args:
        model: the NumPyro model.
        latents: names of discrete latents.

    Returns:
        A model of the same arguments; the model itself where there are none.
    """
    if not latents:
        return model

    @functools.wraps(model)
    def held(*args: Any, **kwargs: Any) -> Any:
        with _Held(latents):
            return model(*args, **kwargs)

    return held


class _Held(Messenger):
    """Observes some latents at 0."""

    def __init__(self, latents: tuple[str, ...]):
        super().__init__(None)
        self.latents = latents

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a latent the value 0 at every place, and count it as observed."""
        if msg["type"] == "sample" and msg["name"] in self.latents:
            msg["value"], msg["is_observed"] = jnp.zeros(msg["fn"].shape(), int), True


def _counts(name: str, site: dict, exact: tuple[str, ...]) -> bool:
    return is_observed(site) or (is_latent(site) and name not in exact)
