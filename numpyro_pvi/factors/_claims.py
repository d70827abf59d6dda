"""What the structure in use says of a model's log densities at a point, row by row, beside the model itself.

A structure that was found by values on a few rays is a claim about all other points. Its claims are read off the model as
programs read them: predictors by their value and slope at the origin, a quadratic by its value, slope and bend there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._model import ModelCall, TracedAt, is_latent, is_observed, rows_first, site_log_prob
from ._plan import PartitionPlan
from ._terms import TermSpec, prepare_term, read_predictors, term_log_prob


class Claim(NamedTuple):
    """Log densities in nats, of rows (by sample site) or whole: what is claimed, what the model says, and their parts' size."""

    claimed: Any
    model: Any
    size: Any


def claims_likelihood(part: PartitionPlan) -> bool:
    """Whether the rows' likelihood is taken for anything but what the model computes at draws."""
    return part.local is None and part.likelihood in ("quadratic", "affine")


def claimed_rows(call: ModelCall, part: PartitionPlan, point: Float[Array, "D"]) -> dict[str, Claim]:
    """Every row's log-likelihood at a point, as claimed and as it is.

    Args:
        call: the model on all rows.
        part: the plan, of which :func:`claims_likelihood` holds.
        point: unconstrained latents.

    Returns:
        By partitioned axis, Float[N] each: what its sites say, summed by row.
    """
    model = _rows(call, part, point)
    if part.terms:
        terms = {
            s.site: [rows_first(x, s.row_dim) for x in claimed_term(call, s, point, part.likelihood == "quadratic")]
            for s in part.terms
        }
        value, size = ({key: {n: terms[n][i] for n in own} for key, own in model.items()} for i in (0, 1))
    else:
        value, size = _quadratic(lambda z: _rows(call, part, z), point)
    size = jax.tree.map(lambda x, m: x + jnp.abs(m), size, model)

    def whole(rows: dict[str, Array]) -> Array:
        return sum(rows.values(), start=jnp.zeros((), point.dtype))

    return {key: Claim(whole(value[key]), whole(model[key]), whole(size[key])) for key in model}


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
