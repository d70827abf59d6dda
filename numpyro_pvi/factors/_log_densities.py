"""Log densities of a model at given values, term by term: the model's own, and what the structure in use claims."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.primitives import Messenger

from .._compiling import has_tangents
from ..handlers import FullPlates, PlateRows, RowAxes
from ._chunks import GroupMasks, Packing, Reading, plate_rows, slice_rows
from ._model import (
    Layout,
    ModelCall,
    TracedAt,
    is_latent,
    is_observed,
    prior_factor_log_density,
    row_log_likelihood,
    rows_first,
    site_log_prob,
    site_parts,
    with_wide_observations,
)
from ._plan import PartitionPlan
from ._structure import TermSpec, prepare_term, read_predictors, term_log_prob


@dataclasses.dataclass(frozen=True)
class ValueCall:
    """A model with its arguments, to be evaluated at given values of all its latents.

    ``params``: constrained values of the model's ``numpyro.param`` sites.
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
        self, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...] = (), parts: bool = False
    ) -> dict[str, Array]:
        """Elementwise log density of the groups' sites, in nats: those with a partitioned axis but latents held exactly.

        ``parts``: whether entries of an observation's event are apart: see :func:`site_parts`.
        """
        found = self.sites(values, rows, exact, True).items()
        return {n: site_parts(s) if parts and is_observed(s) else site_log_prob(s) for n, s in found}

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

    def prior_terms(
        self, values: Mapping[str, Array], rows: RowAxes, exact: tuple[str, ...], parts: bool = False
    ) -> dict[str, Array]:
        """Elementwise log density of the prior factor's sites, in nats: no partitioned axis, and not held exactly.

        ``parts``: whether entries of an event are apart: see :func:`site_parts`.
        """
        of = site_parts if parts else site_log_prob
        return {name: of(site) for name, site in self.sites(values, rows, exact, False).items()}


@dataclasses.dataclass(frozen=True)
class SeenCall:
    """A model as a function of some of its latents in one vector, in their own supports, where predictors are read off it.

    ``call``: the model on one chunk's rows, or on all; ``values``: of the other latents (and any of these), by name.
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

    ``tree``: arrays (or pytrees of them) by latent; ``axes``: by latent inside the plate, the axis that runs over its rows;
    ``reading``: how a chunk is read; where others are masked, all rows stay; ``chunk``: one entry of the packing's ``chunks``.
    Returns the same, with R rows for the latents named in ``axes``.
    """
    if reading.mechanism == "mask" or not axes:
        return dict(tree)
    rows = plate_rows(chunk)
    return {
        name: jax.tree.map(lambda x, name=name: jnp.take(x, rows, axis=axes[name]), own) if name in axes else own
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

    ``call``: the model on all rows; ``values``: every latent's value in its own support; of those inside the partitioned plate,
    the chunk's; ``rows``: the partitioned axes; ``reading``: how a chunk is read; ``packing``: rows of each chunk; ``chunk``:
    one entry of the packing's ``chunks``; ``exact``: latents whose prior is held exactly; ``weigh``: what an elementwise term
    counts, given its sample site's name; ``instead``: terms that are not the model's at these values, such as their
    expectations. Returns one number.
    """
    terms = _masked_rows(call, values, rows, reading, packing, chunk, exact, weigh, instead)
    return jnp.asarray(sum((jnp.sum(own) for own in terms), start=0.0))


def rows_log_likelihood(
    call: ValueCall,
    values: Mapping[str, Array],
    rows: RowAxes,
    reading: Reading,
    packing: Packing | GroupMasks,
    chunk: Any,
    exact: tuple[str, ...] = (),
) -> Float[Array, "R"]:
    """:func:`chunk_log_likelihood` of every row, where all terms are of one partitioned axis; 0 of rows that do not count."""
    return sum(_masked_rows(call, values, rows, reading, packing, chunk, exact), start=jnp.zeros(()))


def _masked_rows(
    call: ValueCall,
    values: Mapping[str, Array],
    rows: RowAxes,
    reading: Reading,
    packing: Packing | GroupMasks,
    chunk: Any,
    exact: tuple[str, ...],
    weigh: Callable[[str, Array], Array] = lambda _, term: term,
    instead: Instead | None = None,
) -> list[Float[Array, "R"]]:
    """Every term's sum over each row: see :func:`chunk_log_likelihood`."""
    here, masks = call.rows(reading, chunk), reading.masks(packing, chunk)
    trace, given, found = here.trace(values), {} if instead is None else instead(here, masks), []
    for name, site in trace.items():
        axis = rows.of(site) if _counts(name, site, exact) else None
        if axis is not None:
            term = given[name] if name in given else site_log_prob(site)
            found.append(jnp.where(masks[axis.key], rows_first(weigh(name, term), axis.dim), 0.0))
    return found


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

    ``model``: the NumPyro model; ``latents``: names of discrete latents. Returns a model of the same arguments; the model
    itself where there are none.
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


# -------------------------------------------------------------------------------------------- what the structure claims
# What the structure in use says of a model's log densities at a point, row by row, beside the model itself.
#
# A structure that was found by values on a few rays is a claim about all other points. Its claims are read off the
# model as programs read them: predictors by their value and slope at the origin, a quadratic by its value, slope and
# bend there.


class Claim(NamedTuple):
    """Log densities in nats, of rows (by sample site) or whole: what is claimed, what the model says, and their parts' size."""

    claimed: Any
    model: Any
    size: Any
    # How far apart they may be beside rounding, in nats; None for not at all.
    slack: Any = None


def claims_likelihood(part: PartitionPlan) -> bool:
    """Whether the rows' likelihood is taken for anything but what the model computes at draws."""
    return part.local is None and part.likelihood in ("quadratic", "affine")


def claimed_rows(call: ModelCall, part: PartitionPlan, point: Float[Array, "D"]) -> dict[str, Claim]:
    """Every row's log-likelihood at a point, as claimed and as it is.

    ``call``: the model on all rows; ``part``: the plan, of which :func:`claims_likelihood` holds; ``point``: unconstrained
    latents. Returns by partitioned axis, Float[N] each: what its sites say, summed by row.
    """
    model = _rows(call, part, point)
    if part.terms:
        terms = {
            s.site: [
                rows_first(x, s.row_dim or 0) for x in claimed_term(call, s, point, part.likelihood == "quadratic")
            ]
            for s in part.terms
        }
        value, size = ({key: {n: terms[n][i] for n in own} for key, own in model.items()} for i in (0, 1))
    else:
        value, size = _quadratic(lambda z: _rows(call, part, z), point)
    size = jax.tree.map(lambda x, m: x + jnp.abs(m), size, model)

    def whole(rows: dict[str, Array]) -> Array:
        return sum(rows.values(), start=jnp.zeros((), point.dtype))

    return {key: Claim(whole(value[key]), whole(model[key]), whole(size[key])) for key in model}


# Steps of Simpson's rule for a factor's slope along a line.
_STEPS = 32


def may_jump(part: PartitionPlan, factor: str) -> bool:
    """Whether a factor is taken to change as its slopes say though the model's program has primitives that jump.

    ``factor``: "likelihood" or "prior factor".
    """
    kind = part.likelihood if factor == "likelihood" else part.prior_kind
    by_slopes = kind == "affine" or part.unstructured not in ("values", "slopes")
    return by_slopes and kind not in ("quadratic", "none") and factor in part.jumps


def claimed_by_slopes(
    call: ModelCall, part: PartitionPlan, factor: str, base: Float[Array, "D"], point: Float[Array, "D"]
) -> dict[str, Claim]:
    """A factor at a point as it would be if it changed as its slopes say on the line from a base, and as it is.

    ``factor``: "likelihood", of which there is a claim for every partitioned axis, Float[N] each, or "prior factor", whose is
    under the name "". Rows' own latents stay where ``call`` has them.
    """

    def density(step: Array) -> dict[str, Array]:
        at = base + step * (point - base)
        if factor == "likelihood":
            found: dict[str, Array] = {}
            for key, own in row_log_likelihood(call, at, part.rows).values():
                found[key] = found[key] + own if key in found else own
            return found
        return {"": prior_factor_log_density(call, at, part.prior_latents, part.outside, part.rows)}

    zero = jnp.zeros_like(base[0])
    begin, end, (whole, missed) = density(zero), density(zero + 1), rise(density, base.dtype)
    size = {key: jnp.abs(begin[key]) + jnp.abs(end[key]) for key in end}
    return {key: Claim(begin[key] + whole[key], end[key], size[key], missed[key]) for key in end}


def rise(density: Callable[[Array], Any], dtype: Any) -> tuple[Any, Any]:
    """The integral of a function's slope from 0 to 1, and what the rule may miss of it, for every leaf of what it returns.

    Simpson's rule: of a bend of the function, a step of its slope, it misses two thirds of the step times the distance of two nodes
    at most. The slope's second differences see every step twice: three times as much as it can miss is told. A function that has
    reverse derivatives alone is not looked at, and changes as it does.
    """
    nodes = jnp.linspace(0.0, 1.0, _STEPS + 1, dtype=dtype)
    shares = np.full(_STEPS + 1, 2.0)
    shares[1::2], shares[[0, -1]] = 4.0, 1.0
    shares = jnp.asarray(shares / (3 * _STEPS), dtype)

    # One trace serves for whether there are slopes, for their shapes and for the loop.
    slope_at = jax.jit(lambda step: jax.jvp(density, (step,), (jnp.ones_like(step),))[1], inline=True)
    if not has_tangents(slope_at, nodes[0]):
        ends = density(nodes[0]), density(nodes[-1])
        whole = jax.tree.map(lambda begin, end: end - begin, *ends)
        return whole, jax.tree.map(jnp.zeros_like, whole)

    def add(carry: tuple, own: tuple[Array, Array, Array]) -> tuple[tuple, None]:
        (whole, missed, before, last), (step, share, inner) = carry, own
        slope = slope_at(step)
        bend = jax.tree.map(lambda x, y, z: inner * jnp.abs((x - y) - (y - z)) / _STEPS, slope, before, last)
        whole = jax.tree.map(lambda total, x: total + share * x, whole, slope)
        return (whole, jax.tree.map(jnp.add, missed, bend), slope, before), None

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(slope_at, nodes[0]))
    inner = jnp.asarray(np.arange(_STEPS + 1) > 1, dtype)
    (whole, missed, _, _), _ = jax.lax.scan(add, (zero, zero, zero, zero), (nodes, shares, inner))
    return whole, missed


def claimed_exact_prior(call: ModelCall, part: PartitionPlan, point: Float[Array, "D"]) -> Claim:
    """The log prior of the latents whose prior is held exactly: the quadratic that is read at the origin, and the model's own."""

    def density(z: Array) -> tuple[Array, Array]:
        terms = _latent_terms(call, z, part.exact)
        return sum_of(terms), sum_of({n: jnp.abs(x) for n, x in terms.items()})

    (claimed, _), (size, _) = _quadratic(density, point)
    model, own = density(point)
    return Claim(claimed, model, size + own)


def claimed_prior_factor(call: ModelCall, part: PartitionPlan, point: Float[Array, "D"]) -> Claim:
    """The prior factor's log density where it is taken by quadrature over affine predictors."""
    found = [claimed_term(call, spec, point) for spec in part.prior_terms]
    trace, jacobians = call.trace(point)
    model = [jnp.sum(site_log_prob(trace[s.site], jacobians.get(s.site))) for s in part.prior_terms]
    zero = jnp.zeros((), point.dtype)
    claimed, size = (sum((jnp.sum(pair[i]) for pair in found), start=zero) for i in (0, 1))
    return Claim(claimed, sum(model, start=zero), size)


def sum_of(terms: dict[str, Array]) -> Float[Array, ""]:
    """All elements of all terms, summed."""
    return sum((jnp.sum(x) for x in terms.values()), start=jnp.zeros(()))


def _rows(call: ModelCall, part: PartitionPlan, point: Array) -> dict[str, dict[str, Array]]:
    """Log-likelihood of rows, by partitioned axis and observed site."""
    trace, _ = call.trace(point)
    found: dict[str, dict[str, Array]] = {}
    for name, site in trace.items():
        axis = part.rows.of(site) if is_observed(site) else None
        if axis is not None:
            found.setdefault(axis.key, {})[name] = rows_first(site_log_prob(site), axis.dim)
    return found


def _latent_terms(call: ModelCall, point: Array, names: tuple[str, ...]) -> dict[str, Array]:
    trace, jacobians = call.trace(point)
    return {n: site_log_prob(trace[n], jacobians.get(n)) for n in names if is_latent(trace[n])}


def claimed_term(call: TracedAt, spec: TermSpec, point: Array, quadratic: bool = False) -> tuple[Array, Array]:
    """A term's elements in its batch shape where its predictors are affine (and the term quadratic in them), and their size."""
    data, origin = prepare_term(call, spec, design=False), jnp.zeros_like(point)
    offset, slope = jax.jvp(lambda z: read_predictors(call, spec, z), (origin,), (point,))

    def along(step: Array) -> Array:
        at = tuple(
            (o + step * s).reshape(-1) if jnp.ndim(o) else o + step * s for o, s in zip(offset, slope, strict=True)
        )
        return term_log_prob(spec, data, at).reshape(data.fn.batch_shape)

    if quadratic:
        return _bent(along, point.dtype)
    value = along(jnp.ones((), point.dtype))
    return value, jnp.abs(value)


def _quadratic(density: Callable, point: Array) -> tuple[Any, Any]:
    """What a density would be if it were quadratic, by its derivatives at the origin, and the size of the parts."""
    return _bent(lambda step: density(step * point), point.dtype)


def _bent(along: Callable, dtype: Any) -> tuple[Any, Any]:
    """``(v + v' + v''/2, |v| + |v'| + |v''|/2)`` of a function of one number, at 0."""
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)

    def moved(step: Array) -> tuple[Any, Any]:
        return jax.jvp(along, (step,), (one,))

    (value, first), (_, second) = jax.jvp(moved, (zero,), (one,))
    claimed = jax.tree.map(lambda v, f, s: v + f + 0.5 * s, value, first, second)
    size = jax.tree.map(lambda v, f, s: jnp.abs(v) + jnp.abs(f) + 0.5 * jnp.abs(s), value, first, second)
    return claimed, size
