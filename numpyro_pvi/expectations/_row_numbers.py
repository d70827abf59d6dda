"""Expectations of rows with one affine predictor each, as two numbers per row and nothing over the latents."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..factors import TermData, TermSpec
from ..families import GaussianNatural
from ._affine import _error_beyond_rounding, _row_expectations
from ._expected import Expected


class RowNumbers(NamedTuple):
    """Of every row: value in nats, the site that it wants, and how good its quadrature is."""

    value: Float[Array, "P"]
    target: GaussianNatural
    error: Float[Array, "P"]
    weight: Float[Array, "P"]
    spread: Float[Array, "P"]


@dataclasses.dataclass(frozen=True, eq=False)
class RowNumbersProgram:
    """Quadrature over one predictor per row. Its predictors are ``offset + z`` with z as q has it.

    Args:
        terms: the structure of every term.
        data: their arrays on all rows.
        num_rules: how many of the quadrature rules are compiled in.
        dim: D, the number of latents.
    """

    terms: tuple[TermSpec, ...]
    data: tuple[TermData, ...]
    num_rules: int
    dim: int

    def rows(
        self, loc: Float[Array, "P"], variance: Float[Array, "P"], counted: Bool[Array, "P"], level: Any, clip: Any
    ) -> RowNumbers:
        """One pass over all rows.

        Args:
            loc: mean of z.
            variance: of z.
            counted: which rows belong to a group.
            level: Int[] quadrature rule.
            clip: whether (a bool, traced or not) to raise curvatures to zero.

        Returns:
            Expectations by row: the site wanted has ``l = -E[f'']`` and ``h = E[f'] + l E[z]``.
        """
        parts, start = [], 0
        for spec, data in zip(self.terms, self.data, strict=True):
            where = slice(start, start + _size(data))
            parts.append(self._term(spec, data, loc[where], variance[where], counted[where], level, clip))
            start = where.stop
        value, vector, weight, error, size = (jnp.concatenate(column) for column in zip(*parts, strict=True))
        spread = jnp.sqrt(jnp.where(counted, variance, 0.0))
        return RowNumbers(value, GaussianNatural(vector, weight), error, size, spread)

    def _term(self, spec: TermSpec, data: TermData, loc, variance, counted, level, clip):
        mean, covariance = (loc + data.offset[0],), {(0, 0): variance}
        value, slopes, hess, error = _row_expectations(spec, data, mean, covariance, level, self.num_rules)
        size = jnp.where(counted, jnp.abs(hess[0, 0]) * jnp.abs(variance), 0.0)
        wrong = jnp.where(counted, _error_beyond_rounding(error, size, mean), 0.0)
        weight = jnp.where(counted, -hess[0, 0], 0.0)
        if clip is not False:
            weight = jnp.where(clip, jnp.clip(weight, 0.0, None), weight)
        vector = jnp.where(counted, slopes[0], 0.0) + weight * loc
        return jnp.where(counted, value, 0.0), vector, weight, wrong, size

    def sums(self, rows: RowNumbers, group: Int[Array, "P"], count: int) -> Expected:
        """Rows summed by group; the sites that all of them want stay row by row, under a leading axis of 1."""
        # What is nobody's goes to a place beyond the last.
        owner = jnp.where(group < 0, count, group)

        def total(x):
            return jnp.zeros((count + 1,), x.dtype).at[owner].add(x)[:count]

        spread = jnp.zeros((count + 1,), rows.spread.dtype).at[owner].max(rows.spread)[:count]
        target = GaussianNatural(rows.target.precision_mean[None], rows.target.precision[None])
        # The relative error of a pass is judged against the number of latents, which the product's length tells.
        product = jnp.zeros((count, self.dim), rows.value.dtype)
        return Expected(total(rows.value), target, product, total(rows.error), total(rows.weight), spread)

    def one_group(self, rows: RowNumbers, mine: Bool[Array, "P"]) -> Expected:
        """The sums of one group, with the sites that its rows want, zero for others."""

        def total(x):
            return jnp.sum(jnp.where(mine, x, 0.0))

        vector, precision = (jnp.where(mine, x, 0.0) for x in (rows.target.precision_mean, rows.target.precision))
        spread = jnp.max(jnp.where(mine, rows.spread, 0.0))
        product = jnp.zeros((self.dim,), rows.value.dtype)
        target = GaussianNatural(vector, precision)
        return Expected(total(rows.value), target, product, total(rows.error), total(rows.weight), spread)


def _size(data: TermData) -> int:
    size = 1
    for length in data.fn.batch_shape:
        size *= length
    return size
