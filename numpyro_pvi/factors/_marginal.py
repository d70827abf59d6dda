"""A model with its local discrete latents summed out by funsor; imported only where a model has such latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import funsor
import funsor.optimizer
import funsor.sum_product
import jax
import jax.numpy as jnp
import numpyro
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.contrib.funsor import config_enumerate, enum, infer_config, log_density
from numpyro.contrib.funsor.enum_messenger import _DIM_STACK, NamedMessenger
from numpyro.contrib.funsor.enum_messenger import plate as enum_plate
from numpyro.primitives import Messenger

from ..errors import PartitionError
from ..handlers import FullPlates
from ._model import EnumeratedRows, Enumeration, ModelCall


@dataclasses.dataclass(frozen=True)
class MarginalModel:
    """A model whose partitioned plates hold, for every row, its log-likelihood with the discrete latents summed out.

    To handlers around it the model has its continuous latents, its plates, and one observed site in each partitioned
    plate; the discrete latents and the observed sites of that plate stay inside. Every mechanism that takes rows of the
    plate therefore works on it as on any model, and padding needs no care: a row's sum is a number of its own.
    """

    model: Callable
    enumeration: Enumeration

    def __post_init__(self) -> None:
        """Show the model's own signature."""
        object.__setattr__(self, "__wrapped__", self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with enumerated latents, then declare the rows' marginal log-likelihoods."""
        spec = self.enumeration

        def configure(site: dict) -> dict:
            return {"enumerate": "parallel"} if site["type"] == "sample" and site["name"] in spec.latents else {}

        model = enum(infer_config(FullPlates(self.model), configure), first_available_dim=-1 - spec.depth)
        terms = RowTerms(spec)
        with _enumerable_plates(), terms:
            result = model(*args, **kwargs)
        for plate, dim, name in zip(spec.plates, spec.dims, spec.names, strict=True):
            if plate not in terms.plates:
                continue
            size, length = terms.plates[plate]
            rows = terms.row_log_likelihood(plate, length)
            fn = EnumeratedRows(rows.reshape((length,) + (1,) * (-dim - 1)))
            with numpyro.plate(plate, size, subsample_size=length, dim=dim):
                numpyro.sample(name, fn, obs=fn.sample(None))
        return result


@dataclasses.dataclass(frozen=True)
class WholeMarginalModel:
    """A model with one observed site: the log-likelihood of all its data, discrete latents summed out by NumPyro itself.

    It need not fall into rows: a discrete latent may be shared by all of them, or be the state of a `scan`.
    """

    model: Callable
    enumeration: Enumeration

    def __post_init__(self) -> None:
        """Show the model's own signature."""
        object.__setattr__(self, "__wrapped__", self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model for its continuous latents and params, then declare the log-likelihood given these."""
        latents = self.enumeration.latents

        def first_values(site: dict) -> Array | None:
            return jnp.zeros(site["fn"].shape(), int) if site["name"] in latents else None

        def inside(site: dict) -> bool:
            return site["type"] == "sample" and (site["is_observed"] or site["name"] in latents)

        # A substitution function also reaches the bodies of scans.
        model = FullPlates(self.model)
        with (
            handlers.block(hide_fn=lambda site: site["type"] == "deterministic" or inside(site)),
            handlers.trace() as own,
        ):
            result = handlers.substitute(model, substitute_fn=first_values)(*args, **kwargs)
        kept = {n: s["value"] for n, s in own.items() if s["type"] in ("sample", "param") and not inside(s)}
        shapes = {n: tuple(s["fn"].batch_shape) for n, s in own.items() if s["type"] == "sample" and n in kept}
        with handlers.block():
            given = handlers.seed(handlers.substitute(model, data=kept), jax.random.key(0))
            checked = _SameShapes(given, shapes, latents)
            # The priors of the continuous latents are told outside; a scan names states of its own, which stay.
            counted = handlers.block(checked, hide=list(shapes))
            enumerable = enum(config_enumerate(counted), first_available_dim=-1 - self.enumeration.depth)
            density = jnp.asarray(log_density(enumerable, args, kwargs, {})[0])
        fn = EnumeratedRows(density)
        numpyro.sample(self.enumeration.names[0], fn, obs=fn.sample(None))
        return result


class _SameShapes(Messenger):
    """Refuses continuous latents that depend on an enumerated one: their densities would belong inside the sum.

    ``shapes``: batch shapes of the continuous latents without enumeration; ``latents``: the enumerated ones, for the message.
    """

    def __init__(self, fn: Callable, shapes: dict[str, tuple[int, ...]], latents: tuple[str, ...]) -> None:
        self.shapes, self.latents = shapes, latents
        super().__init__(fn)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Compare a latent's batch shape."""
        shape = self.shapes.get(msg["name"]) if msg["type"] == "sample" else None
        if shape is not None and len(tuple(msg["fn"].batch_shape)) > len(shape):
            raise PartitionError(
                f"continuous latent {msg['name']!r} depends on the enumerated latent(s) {', '.join(self.latents)}, so it cannot "
                "be held while these are summed out: give it a plate of its own, one value for each of theirs, and index it."
            )


class RowTerms(Messenger):
    """Keep the sample sites of the partitioned plates' rows to itself, with the names of their enumerated axes."""

    def __init__(self, spec: Enumeration) -> None:
        super().__init__(None)
        self.spec = spec
        # Per plate: full size, and rows that it runs over.
        self.plates: dict[str, tuple[int, int]] = {}
        self._sites: dict[str, dict[str, Any]] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Hide what belongs to single rows from the handlers outside; refuse what leaves its row."""
        if msg["type"] == "deterministic":
            # It may depend on an enumerated latent, and then has an axis that nobody outside expects.
            msg["stop"] = any(frame.name in self.spec.plates for frame in msg["cond_indep_stack"])
        if msg["type"] != "sample":
            return
        inside = any(frame.name in self.spec.plates for frame in msg["cond_indep_stack"])
        if msg["name"] in self.spec.latents or (inside and msg["is_observed"]):
            msg["stop"] = True
        elif self._is_enumerated(msg):
            what = "an observed site outside the plate" if msg["is_observed"] else "a continuous latent"
            raise PartitionError(
                f"sample site {msg['name']!r}, {what}, depends on the enumerated latent(s) {', '.join(self.spec.latents)}: "
                "only observed sites inside the partitioned plate may. Index a continuous latent of its own plate by the "
                "discrete one, `mu[z]`, instead."
            )

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Take down sizes of plates, and the hidden sites with the names of their axes."""
        if msg["type"] == "plate" and msg["name"] in self.spec.plates:
            self.plates[msg["name"]] = (msg["args"][0], msg["value"].shape[0])
        if msg["type"] == "sample" and msg.get("stop"):
            value, fn = msg["value"], msg["fn"]
            shape = jnp.shape(value)[: jnp.ndim(value) - fn.event_dim]
            axes = NamedMessenger._get_dim_to_name(jax.lax.broadcast_shapes(tuple(fn.batch_shape), shape))
            self._sites[msg["name"]] = {**msg, "axes": axes}

    def row_log_likelihood(self, plate: str, length: int) -> Float[Array, "R"]:
        """Log of the sum over all values of a plate's discrete latents, for each of its rows, in nats.

        ``length``: R, the rows it runs over. Returns one number per row; what other plates inside it hold is summed.
        """
        sites = {n: s for n, s in self._sites.items() if any(f.name == plate for f in s["cond_indep_stack"])}
        factors = [self._factor(site) for site in sites.values()]
        plates = frozenset(f.name for s in sites.values() for f in s["cond_indep_stack"])
        summed = frozenset(n for n in sites if n in self.spec.latents) | (plates - {plate})
        with funsor.interpretations.lazy:
            lazy = funsor.sum_product.sum_product(
                funsor.ops.logaddexp, funsor.ops.add, factors, eliminate=summed, plates=plates
            )
        result: Any = funsor.optimizer.apply_optimizer(lazy)
        if left := set(result.inputs) - {plate}:
            raise PartitionError(
                f"the sum over {', '.join(self.spec.latents)} leaves {', '.join(sorted(left))}: a sample site of plate "
                f"{plate!r} has a batch axis that is no plate's. Make it an event, `.to_event(1)`, or give it a plate."
            )
        # A plate of one index has no name on its axis.
        rows = funsor.to_data(result, name_to_dim={plate: -1}) if result.inputs else result.data
        return jnp.broadcast_to(rows, (length,))

    def _is_enumerated(self, msg: Mapping[str, Any]) -> bool:
        shape = msg["fn"].batch_shape
        frames = (_DIM_STACK.current_frame, _DIM_STACK.global_frame)
        return any(
            shape[dim] != 1 and frame.dim_to_name.get(dim) in self.spec.latents
            for dim in range(-len(shape), -self.spec.depth)
            for frame in frames
        )

    def _factor(self, site: Mapping[str, Any]) -> Any:
        log_prob = site["fn"].log_prob(site["value"])
        axes, scale = site["axes"], self._own_scale(site)
        if scale is not None and set(axes.values()) & set(self.spec.latents):
            raise PartitionError(
                f"sample site {site['name']!r} has a scale (handlers.scale) and depends on the enumerated latent(s) "
                f"{', '.join(self.spec.latents)}: inside the log of a sum a scaled term is no likelihood. Leave the scale out."
            )
        if scale is not None:
            log_prob = log_prob * scale
        if not axes and all(size == 1 for size in log_prob.shape):
            log_prob = log_prob.squeeze()
        return funsor.to_funsor(log_prob, output=funsor.Real, dim_to_name=axes)

    def _own_scale(self, site: Mapping[str, Any]) -> Any:
        """The user's scale: without N/B of the rows, which would sit inside the log of a sum."""
        scale = site["scale"]
        if scale is None:
            return None
        for frame in site["cond_indep_stack"]:
            if frame.name in self.plates:
                size, length = self.plates[frame.name]
                scale = scale * (length / size)
        return None if isinstance(scale, float) and abs(scale - 1.0) < 1e-12 else scale


class _Plate(enum_plate):
    """NumPyro's plate for enumeration, with its indices on an axis: it hands a model with one index a scalar."""

    def __enter__(self) -> Array:
        """Enter, and give the indices of the plate."""
        self.indices = super().__enter__().reshape(-1)
        return self.indices


@contextmanager
def _enumerable_plates() -> Iterator[None]:
    """Make `numpyro.plate` the enumerable one; what it was before is restored, so that these nest."""
    before = numpyro.plate.__dict__.get("__new__")
    numpyro.plate.__new__ = lambda cls, *args, **kwargs: _Plate(*args, **kwargs)
    try:
        yield
    finally:
        # Once set, the attribute cannot be taken off again: object.__new__ would refuse the arguments.
        plain = before or (lambda cls, *args, **kwargs: object.__new__(cls))
        numpyro.plate.__new__ = plain


def numpyro_log_density(call: ModelCall, enumeration: Enumeration, latents: Mapping[str, Array]) -> Float[Array, ""]:
    """Log density of the partitioned plates' sites in the untouched model by NumPyro's own enumeration, in nats.

    ``call``: the untouched model on all rows; ``enumeration``: what the plates are, and the first free axis; ``latents``:
    constrained values of the continuous latents. Returns the log-likelihood of all rows.
    """

    def elsewhere(site: dict) -> bool:
        return site["type"] == "sample" and not any(f.name in enumeration.plates for f in site["cond_indep_stack"])

    # Hidden: latents whose batch axes are no plates', which NumPyro's enumeration takes for plates.
    model = handlers.substitute(FullPlates(call.model), data={**call.params, **latents})
    model = handlers.block(handlers.seed(model, jax.random.key(0)), hide_fn=elsewhere)
    model = enum(config_enumerate(model), first_available_dim=-1 - enumeration.depth)
    return jnp.asarray(log_density(model, call.args, call.kwargs, {})[0])
