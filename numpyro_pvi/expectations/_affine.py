"""Expectations of factors whose rows see the latents through affine predictors: whole factors, single rows, terms.

With predictors ``u_i = a_i^T theta + c_i`` a row's gradient and Hessian are ``sum_i a_i psi_i`` and ``sum_ij psi_ij a_i
a_j^T``, so the expectations need the Gaussian law of (u_1, u_2) only, and a factor's natural parameters are two or five
numbers per row, contracted with the design once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.custom_derivatives import SymbolicZero
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, clip_psd_2x2
from ..errors import PVIError
from ..factors import (
    Instead,
    Layout,
    ModelCall,
    SeenCall,
    TermData,
    TermSpec,
    ValueCall,
    claimed_term,
    prepare_term,
    term_log_prob,
    unread_held,
)
from ..families import GaussianFamily, GaussianMoments, GaussianNatural
from ._closed_forms import closed_form, has_closed_form
from ._expected import Expected, ProgramDefaults
from ._rules import RULES, TOLERANCE, fixed_nodes
from .quadrature import Share, derivatives, expect_1d, expect_2d, refined, rule_index

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
class AffineProgram(ProgramDefaults):
    """Quadrature over affine predictors. ``num_rules``: how many of the quadrature rules are compiled in."""

    terms: tuple[TermSpec, ...]
    family: GaussianFamily
    num_rules: int
    noisy: bool = dataclasses.field(default=False, init=False)

    def prepare(self, call: ModelCall, masks: Masks) -> tuple:
        """Read every term's design off the model on one chunk.

        ``call``: the model on the chunk's rows; ``masks``: which rows are real, by partitioned axis. Returns per term, its
        arrays and a Bool[E] mask.
        """
        return self.mask(tuple(prepare_term(call, spec) for spec in self.terms), masks)

    def mask(self, data: tuple[TermData, ...], masks: Masks) -> tuple:
        """Add to every term's arrays which of their elements count.

        ``data``: per term, its arrays; ``masks``: which rows are real, by partitioned axis; an axis that is not named counts
        whole. Returns per term, its arrays and a Bool[E] mask.
        """
        return tuple((d, _elements(d, spec, masks)) for spec, d in zip(self.terms, data, strict=True))

    def working_bytes(self, chunks: tuple) -> int:
        """What a pass over one chunk holds beside its arrays.

        ``chunks``: what :meth:`prepare` returned, with or without a leading chunk axis. Returns bytes, roughly.
        """
        itemsize = jnp.finfo(jnp.result_type(float)).bits // 8
        elements = sum(mask.shape[-1] for _, mask in chunks)
        return elements * itemsize * _WORKING[self.num_rules == len(RULES)]

    def expected(
        self, chunk: tuple, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk's terms.

        ``chunk``: what :meth:`prepare` returned; ``moments``: q; ``probe``: Float[D] vector for the curvature product, or None;
        ``level``: Int[] quadrature rule; ``noise``: unused; quadrature has no draws; ``clip``: whether (a bool, traced or not)
        to raise each row's curvature to positive semi-definite (for curvature starts). Returns the chunk's expectations.
        """
        return self.contract(chunk, self.numbers(chunk, moments, level, clip), moments, probe)

    def numbers(self, chunk: tuple, moments: GaussianMoments, level: Any, clip: Any = False) -> tuple[TermNumbers, ...]:
        """Quadrature of one chunk's terms, element by element.

        ``chunk``: what :meth:`prepare` returned; ``moments``: q; ``level``: Int[] quadrature rule; ``clip``: as of
        :meth:`expected`. Returns per term, its numbers.
        """
        return tuple(
            self._numbers(spec, *data, moments, level, clip) for spec, data in zip(self.terms, chunk, strict=True)
        )

    def contract(
        self, chunk: tuple, numbers: tuple[TermNumbers, ...], moments: GaussianMoments, probe: Any = None
    ) -> Expected:
        """Sum elements' numbers over their design.

        ``chunk``: what :meth:`prepare` returned; ``numbers``: per term, as :meth:`numbers` gives them; ``moments``: q;
        ``probe``: Float[D] vector for the curvature product, or None. Returns the chunk's expectations.
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
class SharedAffineProgram(ProgramDefaults):
    """Quadrature where every chunk is all rows with the other groups' masked: the arrays are prepared once and shared.

    ``data``: per term, its arrays on all rows; ``masks``: a chunk to which rows count, by partitioned axis.
    """

    program: AffineProgram
    data: tuple[TermData, ...]
    masks: Callable[[Any], Masks]
    noisy: bool = dataclasses.field(default=False, init=False)

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk reads and holds: see :meth:`AffineProgram.working_bytes`."""
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
        return jnp.ones((math.prod(shape),), bool)
    aligned = mask.reshape(mask.shape + (1,) * (-spec.row_dim - 1))
    return jnp.broadcast_to(aligned, shape).reshape(-1)


def _error_beyond_rounding(error: Array, size: Array, mean: tuple) -> Array:
    """What is left of rows' quadrature errors once rounding is taken off: infinity where they are unknown.

    A log density is itself only good to rounding of its predictors; the error estimate amplifies that and must not read it as
    the rule's failure. ``error``: estimated errors of the rows' second derivatives times their predictors' variances. Returns
    one number per row.
    """
    rounding = _ROUNDING * jnp.finfo(size.dtype).eps * (1.0 + sum(jnp.abs(m) for m in mean))
    return jnp.where(jnp.isnan(error) | ~jnp.isfinite(size), jnp.inf, jnp.maximum(error - rounding, 0.0))


def _row_expectations(spec: TermSpec, data: TermData, mean: tuple, covariance: dict, level, num_rules: int):
    """Expectations of every row: ``(E f, E f' by predictor, E f'' by pair, absolute error)``."""
    size = math.prod(data.fn.batch_shape)
    mean = tuple(jnp.broadcast_to(m, (size,)) for m in mean)
    spread = {k: jnp.broadcast_to(v, (size,)) for k, v in covariance.items()}
    if has_closed_form(spec, data.fn):
        return closed_form(spec, data, mean, spread)
    return over_predictors(partial(_evaluate, spec, data), mean, spread, level, num_rules)[:4]


def over_predictors(
    row_fn: Callable[..., Array],
    mean: tuple,
    spread: dict,
    level: Any,
    num_rules: int,
    share: Share | None = None,
    beside: Sequence[Callable[..., Array]] = (),
) -> tuple:
    """Quadrature of rows over their one or two predictors.

    ``row_fn``: log densities of rows at predictors Float[E] each, nats; ``mean``: the predictors' means, Float[E] each;
    ``spread``: their covariances by pair, Float[E] each; ``level``: Int[] quadrature rule; ``share``: what the rows count in an
    average over other latents, or None; ``beside``: further functions of the predictors, whose expectations are taken at the same
    nodes. Returns ``(E f, E f' by predictor, E f'' by pair, absolute error, expectations beside)``.
    """
    options: dict = {"rule": level, "num_rules": num_rules, "share": share, "beside": beside}
    if len(mean) == 1:
        sd = jnp.sqrt(jnp.clip(spread[0, 0], 0.0, None))
        result = expect_1d(row_fn, mean[0], sd, **options)
        return result.value, (result.grad,), {(0, 0): result.hess}, result.absolute, result.beside
    law = (mean[0], mean[1], spread[0, 0], spread[0, 1], spread[1, 1])
    result = expect_2d(row_fn, *law, **options)
    hess = {(0, 0): result.hess[..., 0], (0, 1): result.hess[..., 1], (1, 1): result.hess[..., 2]}
    return result.value, (result.grad[..., 0], result.grad[..., 1]), hess, result.absolute, result.beside


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


# ---------------------------------------------------------------------------------------------------------- single rows
# Expectations of single rows under the Gaussian law of their affine predictors: what streaming updates are made of.
#
# A row of a term with P predictors and E elements sees K = P E numbers ``u = A theta + c``, so that an update needs the
# law of u only: its mean, its covariance ``A V A^T``, and what the row's log-likelihood says there.

# Slope of the probit that stands in for the logistic function: sigma(x) is about Phi(.61 x) (003, lemma 4).
PROBIT_SLOPE = 0.61
# Below this sd a row's curvature is read from second derivatives, above it from Stein's identity, which sees kinks.
_STEIN_SD = 0.03
# How much wider than the fitted law the rule for a row's normaliser reaches.
_WIDER = 1.5


class RowExpected(NamedTuple):
    """What a row says at a Gaussian law of its K predictors."""

    # E log l, nats.
    value: Float[Array, ""]
    gradient: Float[Array, "K"]
    # -E hess log l.
    curvature: Float[Array, "K K"]


@dataclasses.dataclass(frozen=True)
class RowProgram(ProgramDefaults):
    """Single rows of affine terms.

    Args:
        terms: the structure of every term.
        rule: "exact" (quadratic log-likelihoods, in closed form: 003, lemma 7), "quadrature", or "probit" (a Bernoulli
            response whose logistic function is taken for a probit: 003, lemma 4).
    """

    terms: tuple[TermSpec, ...]
    rule: str

    def check(self, data: tuple[TermData, ...]) -> None:
        """Refuse what the rule does not fit.

        ``data``: the arrays of one row, of which only structure is read. Raises PVIError naming the sample site.
        """
        if self.rule != "probit":
            return
        for spec, term in zip(self.terms, data, strict=True):
            if not _is_logistic(spec, term.fn):
                raise PVIError(
                    f"expectation='probit' takes the logistic function for a probit, but sample site {spec.site!r} is "
                    f"{type(term.fn).__name__}, not a Bernoulli with affine logits: leave expectation='quadrature'."
                )

    def linear(self, data: tuple[TermData, ...]) -> tuple[Float[Array, "K D"], Float[Array, "K"]]:
        """The design rows and the offsets of one row's predictors. ``data``: the arrays of one row. Returns ``(A, c)``."""
        rows, offsets = [], []
        for term in data:
            size = _num_elements(term)
            for design, offset in zip(term.design, term.offset, strict=True):
                rows.append(jnp.broadcast_to(design, (size, design.shape[-1])))
                offsets.append(jnp.broadcast_to(offset, (size,)))
        return jnp.concatenate(rows), jnp.concatenate(offsets)

    def expected(
        self, data: tuple[TermData, ...], mean: Float[Array, "K"], covariance: Float[Array, "K K"], value: bool = True
    ) -> RowExpected:
        """Expectations of one row.

        ``data``: the arrays of one row; ``mean``: of its predictors; ``covariance``: of its predictors; ``value``: whether the
        value is asked for; 0 stands for it where it is not. Returns the row's expectations.
        """
        at, total = 0, jnp.zeros((), mean.dtype)
        gradient, curvature = jnp.zeros_like(mean), jnp.zeros_like(covariance)
        for spec, term in zip(self.terms, data, strict=True):
            count, size = len(term.design), _num_elements(term)
            here = slice(at, at + count * size)
            block = covariance[here, here].reshape(count, size, count, size)
            pairs = {(i, j): jnp.diagonal(block[i, :, j]) for i in range(count) for j in range(i, count)}
            means = tuple(mean[here].reshape(count, size))
            found, slopes, bends = self._term(spec, term, means, pairs, value)
            total = total + jnp.sum(found)
            gradient = gradient.at[here].set(jnp.concatenate(slopes))
            rows = [
                jnp.concatenate([jnp.diag(-bends[min(i, j), max(i, j)]) for j in range(count)], 1) for i in range(count)
            ]
            curvature = curvature.at[here, here].set(jnp.concatenate(rows))
            at += count * size
        return RowExpected(total, gradient, curvature)

    def value(self, data: tuple[TermData, ...], mean: Float[Array, "K"], covariance: Float[Array, "K K"]) -> Array:
        """``E log l`` of one row in nats, by the row's own likelihood whatever the rule."""
        rule = dataclasses.replace(self, rule="quadrature") if self.rule == "probit" else self
        return rule.expected(data, mean, covariance).value

    def log_normaliser(self, data, weight, mean, sd, new_mean, new_sd) -> Float[Array, ""]:
        """``log int l(u)^w N(u; mean, sd^2) du`` of a row with one predictor, in nats.

        ``data``: the arrays of one row, of one term with one element; ``weight``: w; ``mean``: of the predictor before the
        update; ``sd``: its standard deviation; ``new_mean``: the mean after it, around which the nodes are laid; ``new_sd``:
        the standard deviation after it. Returns the log normaliser of the exact update.
        """
        nodes, weights = (jnp.asarray(x, mean.dtype) for x in fixed_nodes("trapezoid", mean.dtype.name))
        wide = _WIDER * new_sd
        points = new_mean + wide * nodes
        (spec,), (term,) = self.terms, data
        values = jax.vmap(lambda u: term_log_prob(spec, term, (u[None],))[0])(points)
        logs = weight * values + norm.logpdf(points, mean, sd) - norm.logpdf(points, new_mean, wide)
        return jax.scipy.special.logsumexp(logs, b=weights)

    def _term(self, spec: TermSpec, term: TermData, mean: tuple[Array, ...], pairs: dict, value: bool):
        """Value, slopes and second derivatives of every element of one term."""
        if self.rule == "probit":
            response, scale = jnp.reshape(jnp.asarray(term.value, mean[0].dtype), (-1,)), PROBIT_SLOPE
            scale = scale / jnp.sqrt(1.0 + scale**2 * pairs[0, 0])
            slope = response - norm.cdf(scale * mean[0])
            bend = -scale * norm.pdf(scale * mean[0])
            return jnp.zeros_like(slope), (term.scale * slope,), {(0, 0): term.scale * bend}
        first = mean[0]
        if len(mean) > 1:
            level = RULES.index("gh20" if self.rule == "quadrature" else "gh8")
            return _row_expectations(spec, term, mean, pairs, level, len(RULES) - 1)[:3]

        def row_fn(u):
            return term_log_prob(spec, term, (u,))

        if self.rule == "exact":
            value_, slope, bend = derivatives(row_fn, first)
            return value_ + 0.5 * bend * pairs[0, 0], (slope,), {(0, 0): bend}
        return _by_nodes(row_fn, first, jnp.sqrt(jnp.maximum(pairs[0, 0], 0.0)), value)


def _by_nodes(row_fn, mean: Float[Array, "E"], sd: Float[Array, "E"], value: bool):
    """All nodes at once: a row is too short for a loop over them."""
    nodes, weights = (jnp.asarray(x, mean.dtype) for x in fixed_nodes("trapezoid", mean.dtype.name))
    values, slopes, bends = jax.vmap(lambda z: derivatives(row_fn, mean + sd * z))(nodes)
    slope = weights @ slopes
    safe = jnp.maximum(sd, _STEIN_SD)
    bend = jnp.where(sd > _STEIN_SD, (weights * nodes) @ slopes / safe, weights @ bends)
    return weights @ values if value else jnp.zeros_like(slope), (slope,), {(0, 0): bend}


def _num_elements(term: TermData) -> int:
    return int(np.prod(term.fn.batch_shape))


def _is_logistic(spec: TermSpec, fn: Any) -> bool:
    kinds = {"logits": dist.BernoulliLogits, "probs": dist.BernoulliProbs}
    if len(spec.predictors) != 1 or len(spec.leaves) != 1:
        return False
    ((path, link),) = {(p.path, p.link) for p in spec.predictors}
    wanted = {"logits": "identity", "probs": "logit"}.get(path)
    return link == wanted and isinstance(fn, kinds[path])


# -------------------------------------------------------------------------------------------------- two numbers per row
# Expectations of rows with one affine predictor each, as two numbers per row and nothing over the latents.


class RowNumbers(NamedTuple):
    """Of every row: value in nats, the site that it wants, and how good its quadrature is."""

    value: Float[Array, "P"]
    target: GaussianNatural
    error: Float[Array, "P"]
    weight: Float[Array, "P"]
    spread: Float[Array, "P"]


@dataclasses.dataclass(frozen=True, eq=False)
class RowNumbersProgram(ProgramDefaults):
    """Quadrature over one predictor per row. Its predictors are ``offset + z`` with z as q has it.

    ``num_rules``: how many of the quadrature rules are compiled in.
    """

    terms: tuple[TermSpec, ...]
    data: tuple[TermData, ...]
    num_rules: int
    dim: int
    noisy: bool = dataclasses.field(default=False, init=False)

    def rows(
        self, loc: Float[Array, "P"], variance: Float[Array, "P"], counted: Bool[Array, "P"], level: Any, clip: Any
    ) -> RowNumbers:
        """One pass over all rows.

        ``loc``: mean of z; ``variance``: of z; ``counted``: which rows belong to a group; ``level``: Int[] quadrature rule;
        ``clip``: whether (a bool, traced or not) to raise curvatures to zero. Returns expectations by row: the site wanted has
        ``l = -E[f'']`` and ``h = E[f'] + l E[z]``.
        """
        parts, start = [], 0
        for spec, data in zip(self.terms, self.data, strict=True):
            where = slice(start, start + _num_elements(data))
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


# ---------------------------------------------------------------------------------------------- given all other latents
# Expectations of terms that see normal latents through one or two affine predictors, given all other latents.
#
# Element e of a term is ``f_e(u)`` with ``u_i = a_ei^T w + c_ei``. Under a normal q of w the predictors have a normal
# law of their own, with means ``a^T m + c`` and covariances ``a_i^T V a_j``, and quadrature over that law gives ``E
# f``, ``E f_i`` and ``E f_ij``. They are the derivatives of ``E f`` in the law (Bonnet's and Price's theorems),
#
#     d E f / d mean_i = E f_i,    d E f / d cov_ii = 1/2 E f_ii,    d E f / d cov_12 = E f_12,
#
# so that the transpose of the map from (m, V) to the law makes the message. What else f depends on (a dispersion that
# is drawn, a precision at a sign's point) has the derivative ``E df/dx``, by the same rule.


# Elements that count for so much say which rule is tried first.
_WIDE = 1e-2


@dataclasses.dataclass(frozen=True)
class PredictorLaw:
    """The law of the normal latents that a factor sees through predictors.

    ``terms``: what was found of every term that sees them; ``layout``: of the latents in one vector, end to end; ``laws``:
    coordinates of the components that they make, in the vector's order: locations and variances of independent normals, or
    locations and roots of the covariances of normal vectors; ``num_rules``: how many of the quadrature rules are compiled in;
    ``share``: what the values of the other latents count in the average over these, where the mean of all is 1.
    """

    terms: tuple[TermSpec, ...]
    layout: Layout
    laws: tuple[Any, ...]
    num_rules: int
    share: Any = 1.0

    @property
    def loc(self) -> Float[Array, "D"]:
        """The vector's mean."""
        return jnp.concatenate([own.loc.reshape(-1) for own in self.laws])

    def covariance(self, left: Array, right: Array) -> Array:
        """Covariance of two predictors of the same elements.

        ``left``: a design, Float[E D], or Float[D] of a predictor that all elements share; ``right``: the other's. Returns
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

    ``law``: of the normal latents; ``values``: of all latents, by name; those of the law's are not looked at. Returns a
    function of the model on some rows, and of which rows count, that gives the terms by sample site, elementwise in nats. It is
    differentiable once in everything, in reverse mode, too.
    """

    def read(call: ValueCall, masks: Mapping[str | None, Any]) -> dict[str, Array]:
        seen = SeenCall(call, values, law.layout)
        return {spec.site: _expected(law, spec, prepare_term(seen, spec), masks) for spec in law.terms}

    return read


def worst_error(
    law: PredictorLaw, values: Mapping[str, Array], call: ValueCall, masks: Mapping[str | None, Any]
) -> Float[Array, ""]:
    """Estimated error of the terms' curvature by the rule that :func:`expected_terms` ends with, relative to the curvature.

    ``law``: of the normal latents; ``values``: of all latents, by name; ``call``: the model on some rows; ``masks``: which of
    them count, by partitioned axis. Returns the largest of the terms'. It is above the tolerance where even the finest rule
    that is compiled in missed it.
    """
    seen = SeenCall(call, values, law.layout)
    found = []
    for spec in law.terms:
        data = prepare_term(seen, spec)
        row_fn = partial(_density, spec, data)
        counts = jnp.where(_elements(data, spec, masks), law.share, 0.0)
        found.append(_settled(row_fn, *_law_of(law, data), counts, law.num_rules)[1])
    return jnp.stack(found).max()


def claimed_terms(law: PredictorLaw, values: Mapping[str, Array], point: Float[Array, "D"]) -> Instead:
    """The same terms at one value of the vector, as they would be if their predictors are affine."""

    def read(call: ValueCall, masks: Mapping[str | None, Any]) -> dict[str, Array]:
        seen = SeenCall(call, values, law.layout)
        return {spec.site: claimed_term(seen, spec, point)[0] for spec in law.terms}

    return read


def _expected(law: PredictorLaw, spec: TermSpec, data: TermData, masks: Mapping[str | None, Any]) -> Array:
    """One term's expectation, elementwise in its batch shape."""
    shape, counts = data.fn.batch_shape, jnp.where(_elements(data, spec, masks), law.share, 0.0)
    # The density reads nothing else of the term. Each leaf that moves costs a slope at every node.
    leaves, structure = jax.tree.flatten(dataclasses.replace(unread_held(spec, data), design=(), offset=()))

    def density(leaves: tuple, *predictors: Array) -> Array:
        return _density(spec, structure.unflatten(leaves), *predictors)

    expected = _expectation_of(density, shape, law.num_rules)
    return expected(*_law_of(law, data), counts, tuple(leaves)).reshape(shape)


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

    @jax.custom_jvp
    def expected(mean: tuple, covariance: dict, counted: Array, leaves: tuple) -> Array:
        return _settled(partial(density, leaves), mean, covariance, counted, num_rules)[0][0]

    def along(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        mean, covariance, counted, leaves = primals
        moving = [k for k, step in enumerate(tangents[3]) if not _still(step)]
        slopes = tuple(_slope_in(density, leaves, k, shape) for k in moving)
        found, _ = _settled(partial(density, leaves), mean, covariance, counted, num_rules, slopes)
        value, slope, bend, beside = found
        moved = jnp.zeros_like(value)
        for own, step in zip(slope, tangents[0], strict=True):
            moved = moved if _still(step) else moved + own * step
        for pair, step in tangents[1].items():
            half = 0.5 if pair[0] == pair[1] else 1.0
            moved = moved if _still(step) else moved + half * bend[pair] * step
        for own, k in zip(beside, moving, strict=True):
            moved = moved + own * _elementwise(tangents[3][k], shape)
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
    row_fn: Callable, mean: tuple, covariance: dict, counts: Array, num_rules: int, beside: tuple[Callable, ...] = ()
) -> tuple[tuple[Array, tuple, dict, tuple], Array]:
    """``(E f, E f_i, E f_ij, E g)`` of every element by the cheapest rule whose error does no harm, and that error.

    ``beside``: further functions g, f's derivatives in what it depends on besides; ``counts``: what each element counts in what is
    made of them. Elements that do not count have zeros, and an error is what it is times what it counts: the outermost of a rule's
    nodes in another latent, which see the widest predictors, have next to no weight, and would ask for the finest rule at all
    nodes. Where a result is not finite, nodes that count little are left out of it.
    """
    counts = jnp.broadcast_to(counts, mean[0].shape).astype(mean[0].dtype)
    counted, eps, most = counts > 0, jnp.finfo(counts.dtype).eps, jnp.max(counts, initial=0.0)

    def look(level: Any, careful: Any) -> tuple[Any, Array]:
        share = Share(most, careful)
        value, slope, bend, error, own = over_predictors(row_fn, mean, covariance, level, num_rules, share, beside)
        size = jnp.where(counted, sum(jnp.abs(h) * jnp.abs(covariance[pair]) for pair, h in bend.items()), 0.0)
        # Of what counts no more than rounding an error may be unknown.
        wrong = jnp.where(counts > eps, counts * _error_beyond_rounding(error, size, mean), 0.0)
        parts = jax.tree.map(lambda x: jnp.where(counted, x, 0.0), ((value, slope, bend), *own))
        # Curvature much smaller than q's precision needs no relative accuracy.
        return parts, largest(jnp.sum(wrong) / jnp.maximum(jnp.sum(counts * size), 1.0))

    def at(level: Any) -> tuple[Any, Array]:
        return _finite_or_careful(look, level)

    wide = counts > _WIDE
    widths = [jnp.max(jnp.where(wide, v, 0.0), initial=0.0) for (i, j), v in covariance.items() if i == j]
    widest = largest(jnp.sqrt(jnp.maximum(jnp.stack(widths).max(), 0.0)))
    (found, *own), _, error = refined(at, rule_index(widest), TOLERANCE[widest.dtype.name], num_rules)
    return (*found, tuple(own)), error


def _finite_or_careful(look: Callable, level: Any) -> tuple[tuple, Array]:
    """``look(level, careful)``, and again with care where that is not finite: one program serves for both.

    ``look``: to parts, and the error of the first. A part that is finite without care stays as it is.
    """
    look = jax.jit(look, inline=True)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(look, level, jnp.array(False)))

    def unfinished(state: tuple) -> Array:
        tries, (parts, error) = state
        # Of all that is mapped over, or each would have a rule of its own from here on.
        lost = largest(jnp.where(all_finite(parts), 0.0, 1.0).astype(error.dtype)) > 0
        return (tries == 0) | ((tries == 1) & lost)

    def again(state: tuple) -> tuple:
        tries, (parts, error) = state
        kept = [(tries > 0) & all_finite(part) for part in parts]
        found, wrong = look(level, tries > 0)
        found = tuple(
            jax.tree.map(partial(jnp.where, keep), *pair) for keep, *pair in zip(kept, parts, found, strict=True)
        )
        return tries + 1, (found, largest(jnp.where(kept[0], error, wrong)))

    return jax.lax.while_loop(unfinished, again, (jnp.int32(0), zero))[1]


@jax.custom_batching.custom_vmap
def largest(x: Array) -> Array:
    """A number as it is; the largest of all where many are mapped over together, for all of them.

    All rows that are evaluated together then take one rule: a branch that differed between them would be taken by all, twice.
    """
    return x


@largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: list[bool], x: Array) -> tuple[Array, bool]:
    return largest(jnp.max(x, axis=0) if in_batched[0] else x), False
