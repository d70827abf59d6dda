"""Expectations of single rows under the Gaussian law of their affine predictors: what streaming updates are made of.

A row of a term with P predictors and E elements sees K = P E numbers ``u = A theta + c``, so that an update needs the law
of u only: its mean, its covariance ``A V A^T``, and what the row's log-likelihood says there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from ..errors import PVIError
from ..factors import TermData, TermSpec, term_log_prob
from ._affine import _row_expectations
from ._rules import RULES, fixed_nodes
from .quadrature import derivatives

# Slope of the probit that stands in for the logistic function: sigma(x) is about Phi(.61 x) (003, lemma 4).
PROBIT_SLOPE = 0.61
# Below this sd a row's curvature is read from second derivatives, above it from Stein's identity, which sees kinks.
_STEIN_SD = 0.03
# How much wider than the fitted law the rule for a row's normaliser reaches.
_WIDER = 1.5
ROW_RULES = ("exact", "quadrature", "probit")


class RowExpected(NamedTuple):
    """What a row says at a Gaussian law of its K predictors."""

    # E log l, nats.
    value: Float[Array, ""]
    gradient: Float[Array, "K"]
    # -E hess log l.
    curvature: Float[Array, "K K"]


@dataclasses.dataclass(frozen=True)
class RowProgram:
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

        Args:
            data: the arrays of one row, of which only structure is read.

        Raises:
            PVIError: naming the sample site.
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
        """The design rows and the offsets of one row's predictors.

        Args:
            data: the arrays of one row.

        Returns:
            ``(A, c)``.
        """
        rows, offsets = [], []
        for term in data:
            size = _elements(term)
            for design, offset in zip(term.design, term.offset, strict=True):
                rows.append(jnp.broadcast_to(design, (size, design.shape[-1])))
                offsets.append(jnp.broadcast_to(offset, (size,)))
        return jnp.concatenate(rows), jnp.concatenate(offsets)

    def expected(
        self, data: tuple[TermData, ...], mean: Float[Array, "K"], covariance: Float[Array, "K K"], value: bool = True
    ) -> RowExpected:
        """Expectations of one row.

        Args:
            data: the arrays of one row.
            mean: of its predictors.
            covariance: of its predictors.
            value: whether the value is asked for; 0 stands for it where it is not.

        Returns:
            The row's expectations.
        """
        at, total = 0, jnp.zeros((), mean.dtype)
        gradient, curvature = jnp.zeros_like(mean), jnp.zeros_like(covariance)
        for spec, term in zip(self.terms, data, strict=True):
            count, size = len(term.design), _elements(term)
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

        Args:
            data: the arrays of one row, of one term with one element.
            weight: w.
            mean: of the predictor before the update.
            sd: its standard deviation.
            new_mean: the mean after it, around which the nodes are laid.
            new_sd: the standard deviation after it.

        Returns:
            The log normaliser of the exact update.
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


def _elements(term: TermData) -> int:
    return int(np.prod(term.fn.batch_shape))


def _is_logistic(spec: TermSpec, fn: Any) -> bool:
    kinds = {"logits": dist.BernoulliLogits, "probs": dist.BernoulliProbs}
    if len(spec.predictors) != 1 or len(spec.leaves) != 1:
        return False
    ((path, link),) = {(p.path, p.link) for p in spec.predictors}
    wanted = {"logits": "identity", "probs": "logit"}.get(path)
    return link == wanted and isinstance(fn, kinds[path])
