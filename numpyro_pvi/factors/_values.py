"""Log densities of a model at values of its latents in their own supports, term by term."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpyro import handlers

from ..handlers import FullPlates, PlateRows, RowAxes
from ._model import is_latent, is_observed, rows_first, site_log_prob
from ._packing import Packing
from ._reading import GroupMasks, Reading, slice_rows


@dataclasses.dataclass(frozen=True)
class ValueCall:
    """A model with its arguments, to be evaluated at given values of all its latents.

    Args:
        model: the NumPyro model.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    model: Callable
    args: tuple
    kwargs: dict

    def trace(self, values: Mapping[str, Array]) -> dict:
        """The model's trace with every latent at the value given, in its own support."""

        # A substitution function is the one handler that also reaches the sample sites inside a scan's body.
        def given(site: dict) -> Array | None:
            return values.get(site["name"]) if is_latent(site) else None

        seeded = handlers.seed(handlers.substitute(FullPlates(self.model), substitute_fn=given), jax.random.key(0))
        with jax.named_scope("numpyro_model"):
            return handlers.trace(seeded).get_trace(*self.args, **self.kwargs)

    def rows(self, reading: Reading, chunk: Any) -> ValueCall:
        """The model on one chunk's rows (on all of them where the others are masked)."""
        if reading.mechanism == "mask":
            return self
        if reading.mechanism == "index":
            return dataclasses.replace(self, model=PlateRows(self.model, reading.keys[0], chunk[0]))
        args, kwargs = slice_rows((self.args, self.kwargs), reading.axes, chunk[0])
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def likelihood_terms(self, values: Mapping[str, Array], rows: RowAxes) -> dict[str, Array]:
        """Elementwise log density of every observed site with a partitioned axis, in nats."""
        trace = self.trace(values)
        return {n: site_log_prob(s) for n, s in trace.items() if is_observed(s) and rows.of(s) is not None}

    def prior_terms(self, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...]) -> dict[str, Array]:
        """Elementwise log density of the prior factor's sites, in nats: latents not held exactly, and outside observations."""
        found = {}
        for name, site in self.trace(values).items():
            if (is_latent(site) and name not in exact) or (is_observed(site) and rows.of(site) is None):
                found[name] = site_log_prob(site)
        return found


def chunk_log_likelihood(
    call: ValueCall,
    values: Mapping[str, Array],
    rows: RowAxes,
    reading: Reading,
    packing: Packing | GroupMasks,
    chunk: Any,
) -> Array:
    """Log-likelihood of one chunk's rows, in nats.

    Args:
        call: the model on all rows.
        values: every latent's value in its own support.
        rows: the partitioned axes.
        reading: how a chunk is read.
        packing: rows of each chunk.
        chunk: one entry of the packing's ``chunks``.

    Returns:
        One number.
    """
    trace, masks = call.rows(reading, chunk).trace(values), reading.masks(packing, chunk)
    total: Any = 0.0
    for site in trace.values():
        axis = rows.of(site) if is_observed(site) else None
        if axis is not None:
            own = rows_first(site_log_prob(site), axis.dim)
            total = total + jnp.sum(jnp.where(masks[axis.key], own, 0.0))
    return jnp.asarray(total)


def prior_log_density(call: ValueCall, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...]) -> Array:
    """Log density of the prior factor, in nats: see :meth:`ValueCall.prior_terms`."""
    terms = call.prior_terms(values, rows, exact)
    return sum((jnp.sum(x) for x in terms.values()), start=jnp.zeros((), jnp.result_type(float)))
