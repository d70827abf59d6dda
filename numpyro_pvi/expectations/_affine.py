"""Expectations of factors whose rows see the latents through one or two affine predictors: 1-D and 2-D quadrature.

With predictors ``u_i = a_i^T theta + c_i`` a row's gradient and Hessian are ``sum_i a_i psi_i`` and ``sum_ij psi_ij a_i
a_j^T``, so the expectations need the Gaussian law of (u_1, u_2) only, and a factor's natural parameters are two or five
numbers per row, contracted with the design once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import clip_psd_2x2
from ..factors import ModelCall, TermData, TermSpec, prepare_term, term_log_prob
from ..families import GaussianFamily, GaussianMoments
from ._expected import Expected
from ._rules import RULES
from .quadrature import expect_1d, expect_2d

# Which rows count, by partitioned axis.
Masks = Mapping[str | None, Bool[Array, "R"]]

# Numbers held per element of a term during a pass, beside its arrays: with the fixed rules only, and with the finest.
_WORKING = (160, 600)

# Units of rounding that a row's error estimate may hold, about 8 times the root of the number of nodes.
_ROUNDING = 64


class TermNumbers(NamedTuple):
    """What quadrature says of every element of one term, before it meets the design; elements that do not count hold zeros."""

    # E[f], nats.
    value: Float[Array, "E"]
    # Per predictor what its design pulls on (for a full-covariance q ``E f' - E f'' E u``), and -E[f''] by pair.
    rows: tuple[Float[Array, "E"], ...]
    weight: dict[tuple[int, int], Float[Array, "E"]]
    # Estimated error of f'' times the predictors' variances, the size of the same, and the largest predictor sd.
    error: Float[Array, "E"]
    size: Float[Array, "E"]
    spread: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class AffineProgram:
    """Quadrature over affine predictors.

    Args:
        terms: the structure of every term.
        family: the Gaussian family of q.
        num_rules: how many of the quadrature rules are compiled in.
    """

    terms: tuple[TermSpec, ...]
    family: GaussianFamily
    num_rules: int
    noisy: bool = dataclasses.field(default=False, init=False)

    def prepare(self, call: ModelCall, masks: Masks) -> tuple:
        """Read every term's design off the model on one chunk.

        Args:
            call: the model on the chunk's rows.
            masks: which rows are real, by partitioned axis.

        Returns:
            Per term, its arrays and a Bool[E] mask.
        """
        return self.mask(tuple(prepare_term(call, spec) for spec in self.terms), masks)

    def mask(self, data: tuple[TermData, ...], masks: Masks) -> tuple:
        """Add to every term's arrays which of their elements count.

        Args:
            data: per term, its arrays.
            masks: which rows are real, by partitioned axis; an axis that is not named counts whole.

        Returns:
            Per term, its arrays and a Bool[E] mask.
        """
        return tuple((d, _elements(d, spec, masks)) for spec, d in zip(self.terms, data, strict=True))

    def working_bytes(self, chunks: tuple) -> int:
        """What a pass over one chunk holds beside its arrays.

        Args:
            chunks: what :meth:`prepare` returned, with or without a leading chunk axis.

        Returns:
            Bytes, roughly.
        """
        itemsize = jnp.finfo(jnp.result_type(float)).bits // 8
        elements = sum(mask.shape[-1] for _, mask in chunks)
        return elements * itemsize * _WORKING[self.num_rules == len(RULES)]

    def expected(
        self, chunk: tuple, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk's terms.

        Args:
            chunk: what :meth:`prepare` returned.
            moments: q.
            probe: Float[D] vector for the curvature product, or None.
            level: Int[] quadrature rule.
            noise: unused; quadrature has no draws.
            clip: whether (a bool, traced or not) to raise each row's curvature to positive semi-definite (for curvature
                starts).

        Returns:
            The chunk's expectations.
        """
        del noise
        return self.contract(chunk, self.numbers(chunk, moments, level, clip), moments, probe)

    def numbers(self, chunk: tuple, moments: GaussianMoments, level: Any, clip: Any = False) -> tuple[TermNumbers, ...]:
        """Quadrature of one chunk's terms, element by element.

        Args:
            chunk: what :meth:`prepare` returned.
            moments: q.
            level: Int[] quadrature rule.
            clip: as of :meth:`expected`.

        Returns:
            Per term, its numbers.
        """
        return tuple(
            self._numbers(spec, *data, moments, level, clip) for spec, data in zip(self.terms, chunk, strict=True)
        )

    def contract(
        self, chunk: tuple, numbers: tuple[TermNumbers, ...], moments: GaussianMoments, probe: Any = None
    ) -> Expected:
        """Sum elements' numbers over their design.

        Args:
            chunk: what :meth:`prepare` returned.
            numbers: per term, as :meth:`numbers` gives them.
            moments: q.
            probe: Float[D] vector for the curvature product, or None.

        Returns:
            The chunk's expectations.
        """
        loc = moments.loc
        vector, precision, product = 0.0, 0.0, jnp.zeros_like(loc)
        for (data, _), found in zip(chunk, numbers, strict=True):
            pulled, curved, turned = self._contract(data.design, found, probe)
            vector, precision = vector + pulled, precision + curved
            product = product if probe is None else product + turned
        # In a full-covariance family the row formula already includes H loc; the diagonal needs its own part of it.
        target = self.family.natural(vector if self.family.full else vector + precision * loc, precision)
        value, error, size = (sum(jnp.sum(getattr(n, of)) for n in numbers) for of in ("value", "error", "size"))
        return Expected(value, target, product, error, size, jnp.stack([n.spread for n in numbers]).max())

    def widths(self, chunk: tuple, moments: GaussianMoments) -> Float[Array, "E"]:
        """Largest sd under q of any element's predictors, over terms with the same elements; zero for those not counted."""
        found = []
        for data, mask in chunk:
            covariance = self._covariances(data, moments)
            for i in range(len(data.design)):
                found.append(jnp.where(mask, jnp.sqrt(jnp.clip(covariance[i, i], 0.0, None)), 0.0))
        return jnp.stack(found).max(axis=0)

    def _numbers(self, spec: TermSpec, data: TermData, mask, moments: GaussianMoments, level, clip) -> TermNumbers:
        center = tuple(_project(a, moments.loc) for a in data.design)
        mean = tuple(m + c for m, c in zip(center, data.offset, strict=True))
        covariance = self._covariances(data, moments)
        value, grad, hess, error = _row_expectations(spec, data, mean, covariance, level, self.num_rules)
        # Rows whose second derivative is negligible (a saturated logit) need no relative accuracy of their own.
        size = jnp.where(mask, sum(jnp.abs(h) * jnp.abs(covariance[pair]) for pair, h in hess.items()), 0.0)
        wrong = jnp.where(mask, _error_beyond_rounding(error, size, mean), 0.0)
        variances = [jnp.max(jnp.where(mask, covariance[i, i], 0.0)) for i in range(len(data.design))]
        spread = jnp.sqrt(jnp.stack(variances).max())
        weight = {pair: jnp.where(mask, -h, 0.0) for pair, h in hess.items()}
        if clip is not False:
            weight = {pair: jnp.where(clip, w, weight[pair]) for pair, w in _clip_weights(weight).items()}
        rows = tuple(jnp.where(mask, g, 0.0) for g in grad)
        if self.family.full:
            turned = (
                sum(weight[min(i, j), max(i, j)] * center[j] for j in range(len(center))) for i in range(len(center))
            )
            rows = tuple(row + turn for row, turn in zip(rows, turned, strict=True))
        return TermNumbers(jnp.where(mask, value, 0.0), rows, weight, wrong, size, spread)

    def _contract(self, design: tuple, numbers: TermNumbers, probe: Any) -> tuple:
        vector, precision, product = 0.0, 0.0, 0.0
        for i, own in enumerate(design):
            vector = vector + _pull(own, numbers.rows[i])
            for j, other in enumerate(design):
                w = numbers.weight[min(i, j), max(i, j)]
                if probe is not None:
                    product = product + _pull(own, w * _project(other, probe))
                if j < i:
                    continue
                block = _gram(own, w, other) if self.family.full else _gram_diagonal(own, w, other)
                if self.family.full and j > i:
                    block = block + block.T
                precision = precision + (block if i == j or self.family.full else 2 * block)
        return vector, precision, product

    def _covariances(self, data: TermData, moments: GaussianMoments) -> dict[tuple[int, int], Array]:
        if not self.family.full:
            variance = moments.scale**2
            return {
                (i, j): (data.design[i] * data.design[j]) @ variance
                for i in range(len(data.design))
                for j in range(i, len(data.design))
            }
        spread = [a @ moments.scale for a in data.design]
        return {
            (i, j): jnp.sum(spread[i] * spread[j], axis=-1) for i in range(len(spread)) for j in range(i, len(spread))
        }


@dataclasses.dataclass(frozen=True)
class SharedAffineProgram:
    """Quadrature where every chunk is all rows with the other groups' masked: the arrays are prepared once and shared.

    Args:
        program: the program of one chunk.
        data: per term, its arrays on all rows.
        masks: a chunk to which rows count, by partitioned axis.
    """

    program: AffineProgram
    data: tuple[TermData, ...]
    masks: Callable[[Any], Masks]
    noisy: bool = dataclasses.field(default=False, init=False)

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk reads and holds: see :meth:`AffineProgram.working_bytes`."""
        del chunks
        # A distribution may keep the plain number that it was given, as StudentT(3.0, ...).expand([N]) does.
        shared = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.data) if hasattr(x, "dtype"))
        return shared + self.program.working_bytes(self.program.mask(self.data, {}))

    def expected(self, chunk: Any, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any) -> Expected:
        """Expectations of one chunk's terms: see :meth:`AffineProgram.expected`."""
        arrays = self.program.mask(self.data, self.masks(chunk))
        return self.program.expected(arrays, moments, probe, level, noise, clip)


def _elements(data: TermData, spec: TermSpec, masks: Masks) -> Bool[Array, "E"]:
    shape, mask = data.fn.batch_shape, masks.get(spec.row_key)
    if mask is None or spec.row_dim is None:
        return jnp.ones((_size(shape),), bool)
    aligned = mask.reshape(mask.shape + (1,) * (-spec.row_dim - 1))
    return jnp.broadcast_to(aligned, shape).reshape(-1)


def _error_beyond_rounding(error: Array, size: Array, mean: tuple) -> Array:
    """What is left of rows' quadrature errors once rounding is taken off: infinity where they are unknown.

    A log density is itself only good to rounding of its predictors; the error estimate amplifies that and must not read it
    as the rule's failure.

    Args:
        error: estimated errors of the rows' second derivatives times their predictors' variances.
        size: size of the same.
        mean: the predictors' means.

    Returns:
        One number per row.
    """
    rounding = _ROUNDING * jnp.finfo(size.dtype).eps * (1.0 + sum(jnp.abs(m) for m in mean))
    return jnp.where(jnp.isnan(error) | ~jnp.isfinite(size), jnp.inf, jnp.maximum(error - rounding, 0.0))


def _row_expectations(spec: TermSpec, data: TermData, mean: tuple, covariance: dict, level, num_rules: int):
    """Quadrature of every row: ``(E f, E f' by predictor, E f'' by pair, absolute error)``."""
    size = _size(data.fn.batch_shape)
    mean = tuple(jnp.broadcast_to(m, (size,)) for m in mean)
    spread = {k: jnp.broadcast_to(v, (size,)) for k, v in covariance.items()}
    return over_predictors(partial(_evaluate, spec, data), mean, spread, level, num_rules)


def over_predictors(row_fn: Callable[..., Array], mean: tuple, spread: dict, level: Any, num_rules: int) -> tuple:
    """Quadrature of rows over their one or two predictors.

    Args:
        row_fn: log densities of rows at predictors Float[E] each, nats.
        mean: the predictors' means, Float[E] each.
        spread: their covariances by pair, Float[E] each.
        level: Int[] quadrature rule.
        num_rules: how many of the rules are compiled in.

    Returns:
        ``(E f, E f' by predictor, E f'' by pair, absolute error)``.
    """
    if len(mean) == 1:
        sd = jnp.sqrt(jnp.clip(spread[0, 0], 0.0, None))
        result = expect_1d(row_fn, mean[0], sd, rule=level, num_rules=num_rules)
        return result.value, (result.grad,), {(0, 0): result.hess}, result.absolute
    law = (mean[0], mean[1], spread[0, 0], spread[0, 1], spread[1, 1])
    result = expect_2d(row_fn, *law, rule=level, num_rules=num_rules)
    hess = {(0, 0): result.hess[..., 0], (0, 1): result.hess[..., 1], (1, 1): result.hess[..., 2]}
    return result.value, (result.grad[..., 0], result.grad[..., 1]), hess, result.absolute


def _evaluate(spec: TermSpec, data: TermData, *predictors: Float[Array, "E"]) -> Float[Array, "E"]:
    return term_log_prob(spec, data, predictors)


def _clip_weights(weight: dict) -> dict:
    if (1, 1) not in weight:
        return {(0, 0): jnp.clip(weight[0, 0], 0.0, None)}
    uu, uv, vv = clip_psd_2x2(weight[0, 0], weight[0, 1], weight[1, 1])
    return {(0, 0): uu, (0, 1): uv, (1, 1): vv}


def _project(design: Array, vector: Float[Array, "D"]) -> Array:
    return design @ vector


def _pull(design: Array, rows: Float[Array, "E"]) -> Float[Array, "D"]:
    return rows @ design if design.ndim == 2 else jnp.sum(rows) * design


def _gram(left: Array, weight: Float[Array, "E"], right: Array) -> Float[Array, "D D"]:
    if left.ndim == 2 and right.ndim == 2:
        return left.T @ (weight[:, None] * right)
    if left.ndim == right.ndim == 1:
        return jnp.sum(weight) * jnp.outer(left, right)
    return jnp.outer(_pull(left, weight), right) if left.ndim == 2 else jnp.outer(left, _pull(right, weight))


def _gram_diagonal(left: Array, weight: Float[Array, "E"], right: Array) -> Float[Array, "D"]:
    product = left * right
    return weight @ product if product.ndim == 2 else jnp.sum(weight) * product


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
