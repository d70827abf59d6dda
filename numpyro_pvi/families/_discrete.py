"""Bernoulli and categorical distributions, and messages of families over finitely many values."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from .._numerics import finite_logits
from ._base import (
    Family,
    FamilyDefaults,
    ScalarDefaults,
    Vector,
    base_of,
    natural_parameters,
    read_parameters,
    register_family,
)
from ._product import base_family


@natural_parameters
class BernoulliNatural(Vector):
    """The natural parameter of a Bernoulli: its logit."""

    logit: Float[Array, "*batch"]


@natural_parameters
class BernoulliMean(Vector):
    """The mean parameter of a Bernoulli: the probability of 1."""

    prob: Float[Array, "*batch"]


@natural_parameters
class CategoricalNatural(Vector):
    """Natural parameters of a categorical: one logit per category; adding a number to all changes nothing."""

    logits: Float[Array, "*batch K"]


@natural_parameters
class CategoricalMean(Vector):
    """Mean parameters of a categorical: the probabilities."""

    probs: Float[Array, "*batch K"]


@dataclasses.dataclass(frozen=True)
class BernoulliFamily(ScalarDefaults):
    """Bernoulli distributions over {0, 1}, ``T(x) = x``."""

    _natural = BernoulliNatural

    def sufficient_statistics(self, theta: Any) -> BernoulliMean:
        """x."""
        return BernoulliMean(jnp.asarray(theta, jnp.result_type(float)))

    def log_partition(self, natural: BernoulliNatural) -> Float[Array, "*batch"]:
        """``log(1 + exp(eta))`` in nats."""
        return jax.nn.softplus(natural.logit)

    def natural_to_mean(self, natural: BernoulliNatural) -> BernoulliMean:
        """The probability of 1. In float32 it rounds to 1 from a logit of 17 on."""
        return BernoulliMean(jax.nn.sigmoid(natural.logit))

    def mean_to_natural(self, mean_params: BernoulliMean) -> BernoulliNatural:
        """The inverse of :meth:`natural_to_mean`."""
        return BernoulliNatural(jnp.log(mean_params.prob) - jnp.log1p(-mean_params.prob))

    def to_distribution(self, natural: BernoulliNatural) -> dist.Distribution:
        """``Bernoulli(logits=...)``."""
        return dist.BernoulliLogits(natural.logit)

    def from_distribution(self, distribution: dist.Distribution) -> BernoulliNatural:
        """Natural parameters of a ``Bernoulli``, by logits or by probabilities."""
        if isinstance(base_of(distribution), dist.BernoulliLogits):
            return BernoulliNatural(*read_parameters(distribution, "logits"))
        (probs,) = read_parameters(distribution, "probs")
        return self.mean_to_natural(BernoulliMean(probs))

    def in_domain(self, natural: BernoulliNatural) -> Bool[Array, "*batch"]:
        """Whether the logit is finite."""
        return jnp.isfinite(natural.logit)

    def nearest_valid(self, natural: BernoulliNatural) -> BernoulliNatural:
        """Infinite logits become finite ones whose probabilities round to 0 and 1."""
        return BernoulliNatural(finite_logits(natural.logit))

    def entropy(self, natural: BernoulliNatural) -> Float[Array, "*batch"]:
        """Entropy in nats."""
        eta = natural.logit
        return jax.nn.sigmoid(eta) * jax.nn.softplus(-eta) + jax.nn.sigmoid(-eta) * jax.nn.softplus(eta)

    def kl(self, natural: BernoulliNatural, other: BernoulliNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats."""
        q, p = natural.logit, other.logit
        one = jax.nn.sigmoid(q) * (jax.nn.softplus(-p) - jax.nn.softplus(-q))
        return one + jax.nn.sigmoid(-q) * (jax.nn.softplus(p) - jax.nn.softplus(q))

    def fisher_product(self, natural: BernoulliNatural, tangent: BernoulliNatural) -> BernoulliMean:
        """``p (1 - p) d_eta``, without 1 - p rounding to 0; see :class:`Family`."""
        variance = jax.nn.sigmoid(natural.logit) * jax.nn.sigmoid(-natural.logit)
        return BernoulliMean(variance * tangent.logit)

    def fisher_solve(self, natural: BernoulliNatural, tangent: BernoulliMean) -> BernoulliNatural:
        """``d_mu / (p (1 - p))``; see :class:`Family`."""
        variance = jax.nn.sigmoid(natural.logit) * jax.nn.sigmoid(-natural.logit)
        return BernoulliNatural(tangent.prob / variance)


@dataclasses.dataclass(frozen=True)
class CategoricalFamily(FamilyDefaults):
    """Categorical distributions over ``0 .. dim - 1``, ``T(z)`` one indicator per category.

    All K logits and probabilities are kept, so that no category's probability is what rounding leaves of 1 minus the
    others'. Minimal coordinates are logits relative to the last category's; :meth:`mean_to_natural` gives normalised
    logits, :meth:`fisher_solve` directions of mean 0 under q.

    Args:
        dim: K, the number of categories.
    """

    dim: int

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``()``."""
        return ()

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> CategoricalNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return CategoricalNatural(jnp.zeros((*batch_shape, self.dim), dtype))

    def sufficient_statistics(self, theta: Any) -> CategoricalMean:
        """Indicators."""
        return CategoricalMean(jax.nn.one_hot(theta, self.dim, dtype=jnp.result_type(float)))

    def log_partition(self, natural: CategoricalNatural) -> Float[Array, "*batch"]:
        """``logsumexp(eta)`` in nats."""
        return jax.nn.logsumexp(natural.logits, axis=-1)

    def natural_to_mean(self, natural: CategoricalNatural) -> CategoricalMean:
        """Probabilities."""
        return CategoricalMean(jax.nn.softmax(natural.logits, axis=-1))

    def mean_to_natural(self, mean_params: CategoricalMean) -> CategoricalNatural:
        """Log probabilities: the inverse of :meth:`natural_to_mean` in minimal coordinates."""
        return CategoricalNatural(jnp.log(mean_params.probs))

    def to_distribution(self, natural: CategoricalNatural) -> dist.Distribution:
        """``Categorical(logits=...)``."""
        return dist.CategoricalLogits(natural.logits)

    def from_distribution(self, distribution: dist.Distribution) -> CategoricalNatural:
        """Natural parameters of a ``Categorical``, by logits or by probabilities."""
        base: Any = base_of(distribution)
        logits = base.logits if isinstance(base, dist.CategoricalLogits) else jnp.log(base.probs)
        logits = jnp.asarray(logits, jnp.result_type(float, logits))
        shape = (*distribution.batch_shape, *distribution.event_shape, self.dim)
        return CategoricalNatural(jnp.broadcast_to(logits, shape))

    def in_domain(self, natural: CategoricalNatural) -> Bool[Array, "*batch"]:
        """Whether every logit is finite."""
        return jnp.all(jnp.isfinite(natural.logits), axis=-1)

    def nearest_valid(self, natural: CategoricalNatural) -> CategoricalNatural:
        """Infinite logits become finite ones whose probabilities round to 0 and 1."""
        return CategoricalNatural(finite_logits(natural.logits))

    def entropy(self, natural: CategoricalNatural) -> Float[Array, "*batch"]:
        """Entropy in nats."""
        log_probs = jax.nn.log_softmax(natural.logits, axis=-1)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, natural: CategoricalNatural, other: CategoricalNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats."""
        own, others = jax.nn.log_softmax(natural.logits, axis=-1), jax.nn.log_softmax(other.logits, axis=-1)
        return jnp.sum(jnp.exp(own) * (own - others), axis=-1)

    def to_minimal(self, natural: CategoricalNatural) -> Float[Array, "*batch P"]:
        """Logits relative to the last category's."""
        return natural.logits[..., :-1] - natural.logits[..., -1:]

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> CategoricalNatural:
        """Logits with 0 for the last category."""
        return CategoricalNatural(jnp.concatenate([coordinates, jnp.zeros_like(coordinates[..., :1])], axis=-1))

    def fisher_product(self, natural: CategoricalNatural, tangent: CategoricalNatural) -> CategoricalMean:
        """``p (d_eta - E d_eta)``; see :class:`Family`."""
        probs = jax.nn.softmax(natural.logits, axis=-1)
        mean = jnp.sum(probs * tangent.logits, axis=-1, keepdims=True)
        return CategoricalMean(probs * (tangent.logits - mean))

    def fisher_diagonal(self, natural: CategoricalNatural) -> CategoricalNatural:
        """``p (1 - p)``; see :class:`Family`."""
        probs = jax.nn.softmax(natural.logits, axis=-1)
        return CategoricalNatural(probs * (1 - probs))

    def fisher_solve(self, natural: CategoricalNatural, tangent: CategoricalMean) -> CategoricalNatural:
        """``d_mu / p`` for directions that add up to 0, the answer of mean 0 under q; see :class:`Family`."""
        probs = jax.nn.softmax(natural.logits, axis=-1)
        return CategoricalNatural((tangent.probs - probs * jnp.sum(tangent.probs, axis=-1, keepdims=True)) / probs)


def _categorical(distribution: Any) -> CategoricalFamily:
    values = distribution.logits if isinstance(distribution, dist.CategoricalLogits) else distribution.probs
    return CategoricalFamily(jnp.shape(values)[-1])


register_family(dist.BernoulliProbs, BernoulliFamily())
register_family(dist.BernoulliLogits, BernoulliFamily())
register_family(dist.CategoricalProbs, _categorical)
register_family(dist.CategoricalLogits, _categorical)


# ------------------------------------------------------------------------------------------------- finitely many values
# Families over finitely many values: their probabilities, and messages from what each value contributes.
#
# Every function of a latent with finitely many values is affine in its indicators, so its expectation is the sum over
# the values and the derivative in the mean parameters is the function itself.


class Support(NamedTuple):
    """The values ``0 .. size - 1`` of a family; leading axes of everything are batch axes and members'.

    Attributes:
        size: K.
        binary: whether the natural parameter is one logit.
    """

    size: int
    binary: bool

    def probs(self, natural: Any) -> Float[Array, "*batch K"]:
        """The probability of every value under given natural parameters."""
        if self.binary:
            return jnp.stack([jax.nn.sigmoid(-natural.logit), jax.nn.sigmoid(natural.logit)], axis=-1)
        return jax.nn.softmax(natural.logits, axis=-1)

    def message(self, gradient: Float[Array, "*batch K"]) -> Any:
        """Natural parameters ``dF/dmu`` from the derivative of F in the probabilities, each taken on its own."""
        if self.binary:
            return BernoulliNatural(gradient[..., 1] - gradient[..., 0])
        # Adding a number to all logits changes nothing; without a large one they keep their digits in sums.
        return CategoricalNatural(gradient - jnp.max(gradient, axis=-1, keepdims=True))

    def natural(self, probs: Float[Array, "*batch K"]) -> Any:
        """Natural parameters of given probabilities, all positive."""
        return self.message(jnp.log(probs))


def support_of(family: Family) -> Support | None:
    """The values of a family.

    Args:
        family: a family; repetitions are looked through.

    Returns:
        The values; None where there are infinitely many.
    """
    family = base_family(family)
    if isinstance(family, BernoulliFamily):
        return Support(2, True)
    return Support(family.dim, False) if isinstance(family, CategoricalFamily) else None
