"""How well q foretells rows that it has not seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compiling import owned_jit
from .._state import PVIState
from ..errors import ImproperError, PVIError
from ..factors import (
    join_arguments,
    observed_log_likelihood,
    pad_rows,
    padded_length,
    split_arguments,
    summed_out,
)
from ..sites import posterior


class LogScore(NamedTuple):
    """Log predictive densities of rows under q, in nats; higher is better.

    Attributes:
        rows: Float[N], of each row by itself, ``log E_q[p(y_n | theta)]``, in the order in which the rows were given.
        joint: of all rows together, ``log E_q[prod_n p(y_n | theta)]``: what rows say of each other counts.
        ess: effective number of draws behind ``joint``; below some tens it is too low by chance, and ``rows`` is the better
            figure.
    """

    rows: Float[Array, "N"]
    joint: Float[Array, ""]
    ess: Float[Array, ""]

    @property
    def total(self) -> Float[Array, ""]:
        """Sum over the rows of their own log predictive densities, in nats."""
        return jnp.sum(self.rows)


def log_score(
    rng_key: Any,
    model: Callable,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    num_rows: int,
    *,
    num_samples: int = 1000,
) -> LogScore:
    """Log predictive density of rows under q, by Monte Carlo.

    ``rows[n] = log 1/S sum_s p(y_n | theta_s)`` and ``joint = log 1/S sum_s prod_n p(y_n | theta_s)`` with ``theta_s`` from q.
    Latents of the rows' own are drawn from their prior given ``theta_s``, once for every s; discrete ones are summed out.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        state: a state that has not seen these rows; it is only read.
        args: the rows.
        kwargs: likewise.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_rows: number of rows.
        num_samples: draws S.

    Returns:
        The scores. Both estimates are too low by about half their relative variance; neither counts observed sites outside the
        partitioned plates.

    Raises:
        PVIError: for fewer than 2 draws.
        ImproperError: when q is not normalisable.

    References:
        Dawid, Statistical Theory: The Prequential Approach, J. R. Statist. Soc. A 147 (1984), section 2.
    """
    if num_samples < 2:
        raise PVIError(f"prequential(num_samples={num_samples!r}): expected at least 2 draws from q.")
    plan = state.plan
    q = posterior(state.prior, state.sites)
    if not bool(plan.family.in_domain(q)):
        raise ImproperError("q is not normalisable, so it foretells nothing: run rounds, or use a proper prior.")
    part, length = plan.partition, 0
    if part.mechanism == "args":
        length = padded_length(num_rows)
        args, kwargs = pad_rows(part.reading.axes, args, kwargs, length)
    arrays, static = split_arguments(args, kwargs)
    draws = plan.shared_draws(q, rng_key, num_samples)
    # Not the whole plan, which knows labels and sizes of the state's own groups: a program serves rows of any group.
    reading = part.enumeration, plan.latents, part.rows
    counted = num_rows if length else -1
    rows, joint, ess = _scores(model, reading, static, draws, rng_key, params, arrays, jnp.int32(counted))
    return LogScore(rows[:num_rows] if length else rows, joint, ess)


@functools.partial(owned_jit, static_argnames=("model", "reading", "static"))
def _scores(model, reading, static, draws, rng_key, params, arrays, num_rows):
    """Scores of the first ``num_rows`` rows; of all of them where it is negative."""
    enumeration, latents, axes = reading
    model = model if enumeration is None else summed_out(model, enumeration)
    args, kwargs = join_arguments(arrays, static)
    count = jax.tree.leaves(draws)[0].shape[0]
    keys = jax.random.split(jax.random.fold_in(rng_key, 1), count)

    def rows_at(draw, key):
        return observed_log_likelihood(latents.trace(model, args, kwargs, params, draw, key), axes)

    def one(total, drawn):
        rows = rows_at(*drawn)
        counted = (num_rows < 0) | (jnp.arange(rows.shape[0]) < num_rows)
        return jnp.logaddexp(total, rows), jnp.sum(jnp.where(counted, rows, 0.0))

    shape = jax.eval_shape(rows_at, *jax.tree.map(lambda x: x[0], (draws, keys)))
    # One draw after another: all at once would hold every row's density under each.
    first = jnp.full(shape.shape, -jnp.inf, shape.dtype)
    total, joint = jax.lax.scan(one, first, (draws, keys))
    log_count = jnp.log(jnp.asarray(count, shape.dtype))
    weights = jax.nn.softmax(joint)
    return total - log_count, jax.nn.logsumexp(joint) - log_count, 1.0 / jnp.sum(weights**2)
