"""Expectations of terms that see normal latents through one or two affine predictors, given all other latents.

Element e of a term is ``f_e(u)`` with ``u_i = a_ei^T w + c_ei``. Under a normal q of w the predictors have a normal law of their
own, with means ``a^T m + c`` and covariances ``a_i^T V a_j``, and quadrature over that law gives ``E f``, ``E f_i`` and ``E f_ij``.
They are the derivatives of ``E f`` in the law (Bonnet's and Price's theorems),

    d E f / d mean_i = E f_i,    d E f / d cov_ii = 1/2 E f_ii,    d E f / d cov_12 = E f_12,

so that the transpose of the map from (m, V) to the law makes the message. What else f depends on (a dispersion that is drawn, a
precision at a sign's point) has the derivative ``E df/dx``, by the same rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from ..factors import (
    Instead,
    Layout,
    SeenCall,
    TermData,
    TermSpec,
    ValueCall,
    claimed_term,
    prepare_term,
    term_log_prob,
)
from ._affine import _elements, _error_beyond_rounding, over_predictors
from ._rules import TOLERANCE
from .quadrature import refined, rule_index


@dataclasses.dataclass(frozen=True)
class PredictorLaw:
    """The law of the normal latents that a factor sees through predictors.

    Args:
        terms: what was found of every term that sees them.
        layout: of the latents in one vector, end to end.
        laws: coordinates of the components that they make, in the vector's order: locations and variances of independent
            normals, or locations and roots of the covariances of normal vectors.
        num_rules: how many of the quadrature rules are compiled in.
    """

    terms: tuple[TermSpec, ...]
    layout: Layout
    laws: tuple[Any, ...]
    num_rules: int

    @property
    def loc(self) -> Float[Array, "D"]:
        """The vector's mean."""
        return jnp.concatenate([own.loc.reshape(-1) for own in self.laws])

    def covariance(self, left: Array, right: Array) -> Array:
        """Covariance of two predictors of the same elements.

        Args:
            left: a design, Float[E D], or Float[D] of a predictor that all elements share.
            right: the other's.

        Returns:
            Float[E], or a number where both are shared.
        """
        total: Any = 0.0
        begin = 0
        for own in self.laws:
            here = slice(begin, begin + own.loc.size)
            total = total + own.between(left[..., here], right[..., here])
            begin = here.stop
        return total


def expected_terms(law: PredictorLaw, values: Mapping[str, Array]) -> Instead:
    """Expectations of a factor's terms over the normal latents, given the others.

    Args:
        law: of the normal latents.
        values: of all latents, by name; those of the law's are not looked at.

    Returns:
        A function of the model on some rows, and of which rows count, that gives the terms by sample site, elementwise in nats.
        It is differentiable once in everything, in reverse mode, too.
    """

    def read(call: ValueCall, masks: Mapping[str | None, Any]) -> dict[str, Array]:
        seen = SeenCall(call, values, law.layout)
        return {spec.site: _expected(law, spec, prepare_term(seen, spec), masks) for spec in law.terms}

    return read


def worst_error(
    law: PredictorLaw, values: Mapping[str, Array], call: ValueCall, masks: Mapping[str | None, Any]
) -> Float[Array, ""]:
    """Estimated error of the terms' curvature by the rule that :func:`expected_terms` ends with, relative to the curvature.

    Args:
        law: of the normal latents.
        values: of all latents, by name.
        call: the model on some rows.
        masks: which of them count, by partitioned axis.

    Returns:
        The largest of the terms'. It is above the tolerance where even the finest rule that is compiled in missed it.
    """
    seen = SeenCall(call, values, law.layout)
    found = []
    for spec in law.terms:
        data = prepare_term(seen, spec)
        row_fn = partial(_density, spec, data)
        found.append(_settled(row_fn, *_law_of(law, data), _elements(data, spec, masks), law.num_rules)[1])
    return jnp.stack(found).max()


def claimed_terms(law: PredictorLaw, values: Mapping[str, Array], point: Float[Array, "D"]) -> Instead:
    """The same terms at one value of the vector, as they would be if their predictors are affine."""

    def read(call: ValueCall, masks: Mapping[str | None, Any]) -> dict[str, Array]:
        del masks
        seen = SeenCall(call, values, law.layout)
        return {spec.site: claimed_term(seen, spec, point)[0] for spec in law.terms}

    return read


def _expected(law: PredictorLaw, spec: TermSpec, data: TermData, masks: Mapping[str | None, Any]) -> Array:
    """One term's expectation, elementwise in its batch shape."""
    shape, counted = data.fn.batch_shape, _elements(data, spec, masks)
    # The density reads nothing else of the term.
    leaves, structure = jax.tree.flatten(dataclasses.replace(data, design=(), offset=()))

    def density(leaves: tuple, *predictors: Array) -> Array:
        return _density(spec, structure.unflatten(leaves), *predictors)

    expected = _expectation_of(density, shape, law.num_rules)
    return expected(*_law_of(law, data), counted, tuple(leaves)).reshape(shape)


def _density(spec: TermSpec, data: TermData, *predictors: Array) -> Array:
    return term_log_prob(spec, data, predictors)


def _law_of(law: PredictorLaw, data: TermData) -> tuple[tuple, dict]:
    """Means of a term's predictors, and their covariances by pair, for every element."""
    count, size = range(len(data.design)), math.prod(data.fn.batch_shape)

    def every(x: Any) -> Array:
        return jnp.broadcast_to(x, (size,))

    mean = tuple(every(a @ law.loc + c) for a, c in zip(data.design, data.offset, strict=True))
    pairs = [(i, j) for i in count for j in count if i <= j]
    return mean, {(i, j): every(law.covariance(data.design[i], data.design[j])) for i, j in pairs}


def _expectation_of(density: Callable, shape: tuple[int, ...], num_rules: int) -> Callable:
    """``E f`` of every element as a function of the predictors' law and of what else f depends on, with its derivatives."""

    def moments(row_fn: Callable, mean: tuple, covariance: dict, counted: Array) -> tuple:
        return _settled(row_fn, mean, covariance, counted, num_rules)[0]

    @jax.custom_jvp
    def expected(mean: tuple, covariance: dict, counted: Array, leaves: tuple) -> Array:
        return moments(partial(density, leaves), mean, covariance, counted)[0]

    def along(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        mean, covariance, counted, leaves = primals
        value, slope, bend = moments(partial(density, leaves), mean, covariance, counted)
        moved = jnp.zeros_like(value)
        for own, step in zip(slope, tangents[0], strict=True):
            moved = moved if _still(step) else moved + own * step
        for pair, step in tangents[1].items():
            half = 0.5 if pair[0] == pair[1] else 1.0
            moved = moved if _still(step) else moved + half * bend[pair] * step
        for k, step in enumerate(tangents[3]):
            if not _still(step):
                own = _slope_in(density, leaves, k, shape)
                moved = moved + moments(own, mean, covariance, counted)[0] * _elementwise(step, shape)
        return value, moved

    expected.defjvp(along, symbolic_zeros=True)
    return expected


def _slope_in(density: Callable, leaves: tuple, k: int, shape: tuple[int, ...]) -> Callable:
    """Elementwise derivative of a density in one of the numbers that it depends on, each element's its own."""

    def slope(*predictors: Array) -> Array:
        def at(x: Array) -> Array:
            return density((*leaves[:k], x, *leaves[k + 1 :]), *predictors)

        x = jnp.broadcast_to(leaves[k], shape)
        return jax.jvp(at, (x,), (jnp.ones_like(x),))[1]

    return slope


def _elementwise(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(x, shape).reshape(-1)


def _still(step: Any) -> bool:
    """Whether a tangent is zero whatever the direction."""
    return isinstance(step, SymbolicZero) or not jnp.issubdtype(jnp.result_type(step), jnp.inexact)


def _settled(
    row_fn: Callable, mean: tuple, covariance: dict, counted: Array, num_rules: int
) -> tuple[tuple[Array, tuple, dict], Array]:
    """``(E f, E f_i, E f_ij)`` of every element by the cheapest rule whose error does no harm, and that error.

    Elements that do not count have zeros.
    """

    def at(level: Any) -> tuple[Any, Array]:
        value, slope, bend, error = over_predictors(row_fn, mean, covariance, level, num_rules)
        size = jnp.where(counted, sum(jnp.abs(h) * jnp.abs(covariance[pair]) for pair, h in bend.items()), 0.0)
        wrong = jnp.where(counted, _error_beyond_rounding(error, size, mean), 0.0)
        found = jax.tree.map(lambda x: jnp.where(counted, x, 0.0), (value, slope, bend))
        # Curvature much smaller than q's precision needs no relative accuracy.
        return found, largest(jnp.sum(wrong) / jnp.maximum(jnp.sum(size), 1.0))

    widths = [jnp.max(jnp.where(counted, v, 0.0), initial=0.0) for (i, j), v in covariance.items() if i == j]
    widest = largest(jnp.sqrt(jnp.maximum(jnp.stack(widths).max(), 0.0)))
    found, _, error = refined(at, rule_index(widest), TOLERANCE[widest.dtype.name], num_rules)
    return found, error


@jax.custom_batching.custom_vmap
def largest(x: Array) -> Array:
    """A number as it is; the largest of all where many are mapped over together, for all of them.

    All rows that are evaluated together then take one rule: a branch that differed between them would be taken by all, twice.
    """
    return x


@largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: list[bool], x: Array) -> tuple[Array, bool]:
    del axis_size
    return largest(jnp.max(x, axis=0) if in_batched[0] else x), False


__all__ = ["PredictorLaw", "claimed_terms", "expected_terms", "worst_error"]
