"""Whether a few random draws agree with what sigma points say about a factor."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..families import GaussianFamily, GaussianMoments
from ._expected import Expected

# Differences that do no harm: of the value in nats, of the gradient in nats per posterior sd, and of the whitened
# curvature's trace per root of the dimension. To second order they cost q half their square, and a quarter.
VALUE_TOLERANCE = 0.05
GRADIENT_TOLERANCE = 0.1
CURVATURE_TOLERANCE = 0.2
# Standard errors by which draws must differ before they count (few draws know their own error badly); and the sd of a
# draw's value, in nats, above which so few draws cannot tell, and the factor is too far from its quadratic model for
# sigma points to be believed.
_ERRORS = 6.0
_UNTELLING = 0.5
# The sd of a draw's value below which draws confirm points that others have contradicted.
_CONFIRMING = 0.1


def disagreement(
    family: GaussianFamily,
    moments: GaussianMoments,
    factor: Expected,
    eps: Float[Array, "K D"],
    pairs: Expected,
    again: Bool[Array, ""] | bool = False,
) -> Bool[Array, ""]:
    """Whether antithetic draws contradict the expectations of a factor beyond their own standard errors, or vary too much.

    The factor's value v, gradient g and curvature -H make a quadratic model of f whose expectations are these; the means
    over draws of f minus the model, of the gradient of that, and of ``eps`` times it estimate what the expectations miss.

    Args:
        family: the family of q.
        moments: q.
        factor: expectations by sigma points, summed over groups.
        eps: K standard normal draws, at least two.
        pairs: what :meth:`PointsProgram.pair` found for each (leading axis K), summed over groups.
        again: whether such points have been contradicted before. Heavy tails hide from most sets of draws: the points are
            then believed only where draws hardly differ from the quadratic model.

    Returns:
        True when one of the three differs, or the first varies too much to tell; False where the draws are not finite.
    """
    count, dim = eps.shape
    precision, scale = factor.target.precision, moments.scale
    gradient = family.pull(factor.target, moments.loc)
    if family.full:
        curvature = scale.T @ precision @ scale
        whiten, image, trace = (lambda v: v @ scale), eps @ curvature, jnp.trace(curvature)
    else:
        curvature = precision * scale**2
        whiten, image, trace = (lambda v: v * scale), eps * curvature, jnp.sum(curvature)
    square = jnp.sum(eps * image, axis=-1)
    value = pairs.value - (factor.value - 0.5 * (square - trace))
    even = whiten(pairs.target.precision_mean - gradient)
    odd = jnp.sum(eps * (whiten(pairs.product) + image), axis=-1)

    def differs(sample, tolerance):
        error = jnp.std(sample, ddof=1) / count**0.5
        return jnp.abs(jnp.mean(sample)) > tolerance + _ERRORS * error

    mean = jnp.mean(even, axis=0)
    spread = jnp.sum((even - mean) ** 2) / (count - 1)
    # Unbiased for the squared length of the mean; its own sd is at most the last factor below.
    excess = jnp.sum(mean**2) - spread / count
    noise = spread * (2.0 / (count * (count - 1))) ** 0.5
    wrong = differs(value, VALUE_TOLERANCE) | (excess > GRADIENT_TOLERANCE**2 + 3 * _ERRORS * noise)
    wrong = wrong | differs(odd, CURVATURE_TOLERANCE * dim**0.5)
    wrong = wrong | (jnp.std(value, ddof=1) > jnp.where(again, _CONFIRMING, _UNTELLING))
    drawn = jnp.isfinite(jnp.sum(pairs.value) + jnp.sum(even) + jnp.sum(odd))
    known = jnp.isfinite(factor.value) & jnp.all(jnp.isfinite(image))
    finite = jnp.isfinite(jnp.sum(pairs.value)) & jnp.all(jnp.isfinite(pairs.target.precision_mean))
    return jnp.where(known, drawn & wrong, finite)
