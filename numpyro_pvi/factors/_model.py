"""Reading a NumPyro model at a point of the flat unconstrained space; which latents are summed out; the exact prior."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Num
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.primitives import Messenger

from .._compiling import without_unread, work_of
from .._numerics import grad
from ..handlers import BatchPlates, FullPlates, RowAxes
from ._arguments import join_arguments, split_arguments

T = TypeVar("T")


class _EndToEnd:
    """Latents of given unconstrained shapes, end to end in one vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of coordinates of each latent in the vector."""
        return tuple(int(np.prod(shape)) for shape in self.shapes)

    def slice_of(self, name: str) -> slice:
        """Where a latent lies in the vector."""
        index = self.names.index(name)
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])


@dataclasses.dataclass(frozen=True)
class Layout(_EndToEnd):
    """Names and unconstrained shapes of the latents, in the order in which they lie in the flat vector.

    It is the guide's own order, fixed when a state is made and carried in it: a guide that is set up under ``jit``
    sorts its latents differently from one that is set up eagerly, and the same parameters would mean another posterior.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def dim(self) -> int:
        """D, the length of the flat vector."""
        return sum(self.sizes)

    def unflatten(self, flat: Float[Array, "*batch D"]) -> dict[str, Array]:
        """Flat unconstrained vector(s) to a dict of unconstrained latents."""
        batch = flat.shape[:-1]
        return {n: flat[..., self.slice_of(n)].reshape(batch + s) for n, s in zip(self.names, self.shapes, strict=True)}

    def flatten(self, values: dict[str, Array], batch_shape: tuple[int, ...] = ()) -> Float[Array, "*batch D"]:
        """A dict of unconstrained latents to flat vector(s)."""
        parts = [jnp.reshape(values[n], batch_shape + (size,)) for n, size in zip(self.names, self.sizes, strict=True)]
        return jnp.concatenate(parts, axis=-1) if parts else jnp.zeros((*batch_shape, 0))

    def coordinate_name(self, index: int) -> str:
        """A readable name of one flat coordinate, for messages: ``w[3]`` or ``sigma``."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            where = self.slice_of(name)
            if where.start <= index < where.stop:
                position = np.unravel_index(index - where.start, shape) if shape else ()
                return name + (f"[{','.join(str(int(i)) for i in position)}]" if shape else "")
        raise IndexError(index)


@dataclasses.dataclass(frozen=True)
class LocalLayout(_EndToEnd):
    """Latents inside the partitioned plate: K unconstrained coordinates for each of its U indices (*units*).

    ``shapes``: unconstrained shape of one unit's share of each; ``dims``: where the plate's axis lies in each latent's
    unconstrained value, counted from the right; ``terms``: log densities of a unit, on average and at least 1, by which the cost
    of a look at it is judged.
    """

    key: str
    size: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    terms: int = 1

    @property
    def looks(self) -> int:
        """Log densities of all units, about."""
        return self.size * self.terms

    @property
    def width(self) -> int:
        """K, coordinates per unit."""
        return sum(self.sizes)

    def unflatten(self, flat: Num[Array, "R K"]) -> dict[str, Array]:
        """Coordinates of R units to a dict of unconstrained latents in the model's shapes."""
        found = {}
        for name, shape, dim in zip(self.names, self.shapes, self.dims, strict=True):
            value = flat[:, self.slice_of(name)].reshape(flat.shape[0], *shape)
            found[name] = jnp.moveaxis(value, 0, value.ndim + dim)
        return found

    def flatten(self, values: dict[str, Array]) -> Float[Array, "R K"]:
        """A dict of unconstrained latents to coordinates per unit."""
        parts = []
        for name, dim in zip(self.names, self.dims, strict=True):
            value = jnp.moveaxis(values[name], jnp.ndim(values[name]) + dim, 0)
            parts.append(value.reshape(value.shape[0], -1))
        return jnp.concatenate(parts, axis=-1)


@runtime_checkable
class TracedAt(Protocol):
    """A model as a function of one vector of latents, off which terms are read."""

    @property
    def layout(self) -> Layout:
        """Of the vector."""
        ...

    def trace(self, point: Float[Array, "D"]) -> tuple[dict, dict[str, Array]]:
        """NumPyro's trace at a vector, and the log Jacobian of each of its latents, where it has one."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """A model with everything that stays fixed while the flat vector moves.

    ``layout``: the flat layout of its latents; ``args``: positional arguments (arrays or static leaves); ``params``:
    constrained values of the model's ``numpyro.param`` sites; ``local_layout``: layout of the latents inside the partitioned
    plate, or None when there are none; ``local``: Float[R K], their unconstrained values on the rows of ``args``.
    """

    model: Callable
    layout: Layout
    args: tuple
    kwargs: dict
    params: dict
    local_layout: LocalLayout | None = None
    local: Any = None

    def trace(self, point: Float[Array, "D"], rng_key: Any = None) -> tuple[dict, dict[str, Array]]:
        """Trace the model at a flat unconstrained point.

        ``point``: unconstrained latents; ``rng_key``: for latents that have no value here (local ones without a
        ``local_layout``): they are drawn from their prior given the others; a fixed key by default. Returns ``(trace,
        log_jacobians)``: the NumPyro trace (constrained values) and each latent's log |d constrained / d unconstrained|, in its
        batch shape.
        """
        values = self.layout.unflatten(point)
        if self.local_layout is not None:
            values |= self.local_layout.unflatten(self.local)

        # A substitution function is the one handler that also reaches the sample sites inside a scan's body.
        def constrained(site: dict) -> Array | None:
            if site["type"] != "sample" or site["is_observed"] or site["name"] not in values:
                return None
            return biject_to(site["fn"].support)(values[site["name"]])

        model = handlers.substitute(FullPlates(self.model), data=self.params)
        key = jax.random.key(0) if rng_key is None else rng_key
        seeded = handlers.seed(handlers.substitute(model, substitute_fn=constrained), key)
        with jax.named_scope("numpyro_model"):
            trace = with_wide_observations(handlers.trace(seeded).get_trace(*self.args, **self.kwargs))
        return trace, {n: _log_jacobian(trace[n], point) for n, point in values.items() if n in trace}


def with_wide_observations(trace: dict) -> dict:
    """A trace in which an observed site's distribution is as wide as what is observed.

    ``numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)`` in no plate has one distribution for all numbers of y: its log density
    has y's shape, which is where terms are looked for. So have the plates' own rows where y has axes to the left of them, in no
    plate. Returns the trace, the same where nothing is wider; a site that is has the shape that it was given under "declared".
    """
    wide = {}
    for name, site in trace.items():
        if not is_observed(site):
            continue
        fn, value = site["fn"], jnp.shape(site["value"])
        try:
            shape = jax.lax.broadcast_shapes(tuple(fn.batch_shape), value[: len(value) - fn.event_dim])
        except ValueError:
            # What does not go together is refused where it meets.
            continue
        own = tuple(fn.batch_shape)
        # A plate's own axes have the rows that it has: what is as long as all of them beside one row is refused where it meets.
        if shape != own and (not site["cond_indep_stack"] or shape[len(shape) - len(own) :] == own):
            wide[name] = {**site, "fn": fn.expand(shape), "declared": tuple(fn.shape())}
    return type(trace)((n, wide.get(n, s)) for n, s in trace.items()) if wide else trace


def _log_jacobian(site: dict, point: Array) -> Array:
    transform = biject_to(site["fn"].support)
    value = site["value"]
    jacobian = transform.log_abs_det_jacobian(point, value)
    event_dim = len(site["fn"].event_shape)
    return sum_rightmost(jacobian, jnp.ndim(jacobian) - jnp.ndim(value) + event_dim)


class DrawImproper(Messenger):
    """Draw improper latents, which have no sampler, from a standard normal in unconstrained space; others pass."""

    def __init__(self, fn: Callable, key: Any):
        self.key, self.count = key, 0
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give an improper latent a value."""
        if msg["value"] is None and is_latent(msg) and isinstance(base_distribution(msg["fn"]), dist.ImproperUniform):
            self.count += 1
            transform = biject_to(msg["fn"].support)
            key = jax.random.fold_in(self.key, self.count)
            msg["value"] = transform(jax.random.normal(key, transform.inverse_shape(msg["fn"].shape())))


def base_distribution(fn: Any) -> Any:
    """A distribution without its expansions, masks and transforms."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def site_log_prob(site: dict, log_jacobian: Array | None = None) -> Array:
    """Elementwise log density of a sample site in its batch shape, with its scale, mask and Jacobian, in nats."""
    value = site["fn"].log_prob(site["value"])
    if log_jacobian is not None:
        value = value + log_jacobian
    return value if site["scale"] is None else value * site["scale"]


def site_parts(site: dict) -> Array:
    """What the log density of a sample site is a sum of: :func:`site_log_prob`, with the entries of an event apart.

    They are where the event is many by ``to_event`` alone, as in ``Normal(0, tau).expand([3]).to_event(1)``.
    """
    part = site
    while isinstance(part["fn"], dist.Independent) and jnp.ndim(1.0 if site["scale"] is None else site["scale"]) == 0:
        part = {**part, "fn": part["fn"].base_dist}
    return site_log_prob(part)


def is_latent(site: dict) -> bool:
    """Whether a trace entry is an unobserved sample site."""
    return site["type"] == "sample" and not site["is_observed"]


def is_observed(site: dict) -> bool:
    """Whether a trace entry is an observed sample site (``numpyro.factor`` included)."""
    return site["type"] == "sample" and site["is_observed"]


def latent_log_density(call: ModelCall, point: Float[Array, "D"]) -> dict[str, Array]:
    """Each latent's log density in unconstrained space at a flat point, in nats."""
    trace, jacobians = call.trace(point)
    return {n: jnp.sum(site_log_prob(s, jacobians.get(n))) for n, s in trace.items() if is_latent(s)}


def outside_log_likelihood(call: ModelCall, point: Float[Array, "D"], rows: RowAxes) -> Array:
    """Log density of the observed sites that no group owns, in nats: they belong to the prior factor."""
    trace, _ = call.trace(point)
    terms = [jnp.sum(site_log_prob(s)) for s in trace.values() if is_observed(s) and rows.of(s) is None]
    return sum(terms, start=jnp.zeros((), point.dtype))


def row_log_likelihood(
    call: ModelCall, point: Float[Array, "D"], rows: RowAxes
) -> dict[str, tuple[str, Float[Array, "N"]]]:
    """Log-likelihood of every row of the partitioned axes at one flat point, and log density of the rows' own latents.

    ``call``: the model and its (full or sliced) arguments; ``point``: unconstrained latents; ``rows``: where the rows are.
    Returns for each sample site with a partitioned axis: the axis' key, and one number per row, in nats; other batch axes are
    summed.
    """
    trace, jacobians = call.trace(point)
    found = {}
    for name, site in trace.items():
        axis = rows.of(site) if site["type"] == "sample" else None
        if axis is not None:
            found[name] = axis.key, rows_first(site_log_prob(site, jacobians.get(name)), axis.dim)
    return found


@dataclasses.dataclass(frozen=True)
class FlatLatents:
    """How a model is traced at draws of a flat unconstrained vector."""

    layout: Layout

    def trace(self, model: Callable, args: tuple, kwargs: dict, params: dict, draw: Any, rng_key: Any) -> dict:
        """The model's trace at one draw; latents that are not in it are drawn from their prior given the others.

        ``model``: the NumPyro model; ``args``: positional arguments; ``kwargs``: keyword arguments; ``params``: constrained
        values of the model's ``numpyro.param`` sites; ``draw``: Float[D]; ``rng_key``: for the other latents. Returns NumPyro's
        trace.
        """
        return ModelCall(model, self.layout, args, kwargs, params).trace(draw, rng_key)[0]


def observed_log_likelihood(trace: dict, rows: RowAxes) -> Float[Array, "N"]:
    """Log density of every row's observations alone.

    ``trace``: of the model; ``rows``: where the rows are; those of several axes come end to end. Returns one number per row, in
    nats, sample sites and other batch axes summed.
    """
    by_axis: dict[str, Array] = {}
    for site in trace.values():
        axis = rows.of(site) if is_observed(site) else None
        if axis is not None:
            values = rows_first(site_log_prob(site), axis.dim)
            by_axis[axis.key] = by_axis[axis.key] + values if axis.key in by_axis else values
    return jnp.concatenate(list(by_axis.values()))


def rows_first(values: Array, dim: int) -> Float[Array, "N"]:
    """Move a plate's (negative) batch axis to the front and sum the others; axis 0 is none: everything is one row."""
    if dim == 0:
        return jnp.sum(values)[None]
    values = jnp.moveaxis(values, values.ndim + dim, 0)
    return values.reshape(values.shape[0], -1).sum(axis=-1)


def abstract_trace(model: Callable, key, args: tuple, kwargs: dict) -> dict:
    """Trace a model's structure (names, plates, shapes, supports) without computing anything.

    Plates run over all of their indices. Where the arguments are a mini-batch that does not broadcast to them (``X @ w`` of the
    rows that a plate draws), plates keep what they draw: see :func:`numpyro_pvi.handlers.kept_batch`. ``model``: the NumPyro
    model; ``key``: a random key; ``args``: positional arguments; ``kwargs``: keyword arguments. Returns the trace; its values
    are abstract and must not be computed with.
    """

    def traced(model: Callable) -> dict:
        found: dict = {}

        def run(key):
            seeded = handlers.seed(DrawImproper(model, key), key)
            found.update(with_wide_observations(handlers.trace(seeded).get_trace(*args, **kwargs)))
            return jnp.zeros(())

        with numpyro.validation_enabled(False):
            jax.eval_shape(run, key)
        return found

    return over_plates(traced, model)


def over_plates(traced: Callable[[Callable], T], model: Callable) -> T:
    """Trace a model with all indices of its plates, or with the mini-batches that they draw where its arguments are no more.

    ``traced``: traces the model that it is given; ``model``: the NumPyro model. Returns what it returns. Plates keep their
    mini-batches where shapes do not go together otherwise and do so then.
    """
    full = FullPlates(model)
    try:
        return traced(full)
    except (TypeError, ValueError):
        # JAX has both for shapes that do not go together.
        if not full.widened:
            raise
        try:
            return traced(BatchPlates(model))
        except (TypeError, ValueError):
            pass
        raise


def model_work(model: Callable, args: tuple, kwargs: dict) -> int:
    """Numbers that one evaluation of a model's density makes on the way, counted without computing anything.

    ``model``: the NumPyro model; ``args``: positional arguments; ``kwargs``: keyword arguments. Returns the sum over all
    operations, those of a loop as often as it runs.
    """
    arrays, static = split_arguments(args, kwargs)

    def density(key, arrays):
        given, named = join_arguments(arrays, static)
        seeded = handlers.seed(DrawImproper(FullPlates(model), key), key)
        trace = handlers.trace(seeded).get_trace(*given, **named)
        return [jnp.sum(site_log_prob(s)) for s in trace.values() if s["type"] == "sample"]

    with numpyro.validation_enabled(False):
        return work_of(jax.make_jaxpr(density)(jax.random.key(0), arrays).jaxpr)


# ------------------------------------------------------------------------------------------ latents that are summed out
# Which discrete latents are summed out.


class EnumeratedRows(dist.Unit):
    """The log-likelihood of every row with its discrete latents summed out, as an observed site's distribution.

    A type of its own, since no structure may be looked for in a log of sums: wherever one value of a latent explains
    every row it passes for a quadratic, which it is not elsewhere.
    """


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """Which discrete latents of a model are summed out, and where. Static and hashable.

    ``plates``: partitioned plates that hold discrete latents; none where the model is kept whole; ``names``: per plate, the
    name of the site that stands for its rows: the observed sites' names, joined by "+"; ``depth``: batch dimensions that the
    model's plates take; enumeration uses those to the left.
    """

    plates: tuple[str, ...]
    dims: tuple[int, ...]
    latents: tuple[str, ...]
    names: tuple[str, ...]
    depth: int

    def __str__(self) -> str:
        if not self.plates:
            return f"{', '.join(self.latents)}, summed out exactly"
        where = " and ".join(repr(plate) for plate in self.plates)
        return f"{', '.join(self.latents)} in plate {where}, summed out exactly row by row"


# ------------------------------------------------------------------------------------------------------ the exact prior
# The exactly held part of the prior, and the prior factor.


def exact_log_constant(call: ModelCall, exact: tuple[str, ...]) -> Float[Array, ""]:
    """What the exactly held prior's log density has beside its quadratic part, in nats: its value at the origin.

    It is ``-A(eta_0)`` for a normalised prior, ``-s A(eta_0)`` for one that ``handlers.scale`` multiplies by s, and 0 for a
    flat one or an exponential tilt (an ``ImproperUniform`` on a bounded support, of which the Jacobian alone is left), which
    have no normaliser to compute it from. ``call``: the model and its arguments; ``exact``: latents whose priors are jointly
    quadratic in the flat vector. Returns nats, with the gradient of the model's ``numpyro.param`` values.
    """
    origin = jnp.zeros((call.layout.dim,), jnp.result_type(float))
    return _log_prior(call, exact, origin) if exact else jnp.zeros((), origin.dtype)


def _log_prior(call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]) -> Float[Array, ""]:
    terms = latent_log_density(call, point)
    return sum((terms[n] for n in exact), start=jnp.zeros((), point.dtype))


def _log_prior_alone(call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]) -> Callable[[Array], Array]:
    """The log prior without the rest of the model, whose second derivatives nobody needs, and which may have none: an ODE's.

    ``point``: of the shape and dtype of those to come.
    """
    return without_unread(partial(_log_prior, call, exact), point)


def exact_prior(
    call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]
) -> tuple[Float[Array, "D"], Float[Array, "D D"]]:
    """Natural parameters of the quadratic part of the log prior.

    ``call``: the model and its arguments; ``exact``: latents whose priors are jointly quadratic in the flat vector; ``point``:
    where to read them (anywhere: they are quadratic). Returns ``(precision_mean, precision)``; zero on every other coordinate.
    """
    slope = grad(_log_prior_alone(call, exact, point))
    gradient, precision = slope(point), -jax.jacfwd(slope)(point)
    return gradient + precision @ point, precision


def exact_diagonal_prior(
    call: ModelCall, exact: tuple[str, ...], point: Float[Array, "D"]
) -> tuple[Float[Array, "D"], Float[Array, "D"], Bool[Array, ""]]:
    """The quadratic part of the log prior where it is separable, from two Hessian-vector products.

    A diagonal Hessian H satisfies ``H v = (H 1) * v`` for every v; one v with no two entries equal tells it from another.
    ``call``: the model and its arguments; ``exact``: latents whose priors are jointly quadratic in the flat vector; ``point``:
    where to read them (anywhere: they are quadratic). Returns ``(precision_mean, precision, coupled)``: zero on every other
    coordinate, and whether some coordinates are coupled, in which case the other two mean nothing.
    """
    gradient, product = jax.linearize(grad(_log_prior_alone(call, exact, point)), point)
    precision = -product(jnp.ones_like(point))
    probe = 0.5 + jax.random.uniform(jax.random.key(0), point.shape, point.dtype)
    image = -product(probe)
    rest = jnp.abs(image - precision * probe)
    coupled = jnp.any(rest > 1e3 * jnp.finfo(point.dtype).eps * (jnp.abs(image) + jnp.abs(precision)))
    return gradient + precision * point, precision, coupled


def prior_factor_log_density(
    call: ModelCall, point: Float[Array, "D"], latents: tuple[str, ...], outside: tuple[str, ...], rows: RowAxes
) -> Float[Array, ""]:
    """Log density of the prior factor at a flat point: priors outside the family, and likelihood that no group owns, in nats."""
    trace, jacobians = call.trace(point)
    terms = [jnp.sum(site_log_prob(trace[n], jacobians[n])) for n in latents if is_latent(trace[n])]
    total = sum(terms, start=jnp.zeros((), point.dtype))
    return total + outside_log_likelihood(call, point, rows) if outside else total
