"""Gaussians of local latents given the shared ones: what is left of a joint Gaussian once its marginal has been taken.

A row's local latents z and the shared latents theta are jointly Gaussian with natural parameters

    precision [[A, C^T], [C, B]],  precision-mean (a, b)      (blocks theta, z),

so that ``q(z | theta)`` has precision B and mean ``B^-1 (b - C theta)``, and what the row says about theta alone is the
Schur complement ``(a - C^T B^-1 b, A - C^T B^-1 C)``. Rows are independent given theta, so the joint precision of all
of them is an arrowhead and only these blocks are ever held. Under a mean-field q the cross blocks are absent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import clip_to_psd, diagonal, inverse_root, scaled_cholesky, symmetrise
from ._base import Vector, natural_parameters
from ._gaussian import GaussianMoments

_LOG_2PI = math.log(2 * math.pi)
# A step may lower the precision of a local latent given the shared ones at most to this share of what it was: where the
# log density is not concave the curvature can be anything.
_SMALLEST_SHARE = 0.1


@natural_parameters
class ConditionalNatural(Vector):
    """Natural parameters of local latents given the shared ones, one entry per row."""

    # b.
    linear: Float[Array, "*rows K"]
    # B: K x K, or its diagonal under a mean-field q.
    precision: Float[Array, "..."]
    # C; K x 0 under a mean-field q.
    cross: Float[Array, "*rows K D"]

    @property
    def full(self) -> bool:
        """Whether local latents are correlated with each other and with the shared ones."""
        return self.precision.ndim > self.linear.ndim


class ConditionalMoments(NamedTuple):
    """The same Gaussians as an affine mean and a square root of the covariance."""

    # Mean at theta = 0, and its slope in theta (K x 0 under a mean-field q).
    offset: Float[Array, "*rows K"]
    slope: Float[Array, "*rows K D"]
    # Full: S with S S^T the covariance given theta. Mean-field: standard deviations.
    root: Float[Array, "..."]
    # Entropy given theta, in nats.
    entropy: Float[Array, "*rows"]
    valid: Bool[Array, "*rows"]

    def mean(self, theta: Float[Array, "D"]) -> Float[Array, "*rows K"]:
        """Mean at given values of the shared latents."""
        return self.offset if not self.slope.shape[-1] else self.offset + self.slope @ theta

    def draw(self, theta: Float[Array, "D"], noise: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
        """``mean(theta) + S eps`` for standard normal ``eps``."""
        spread = jnp.einsum("...kj,...j->...k", self.root, noise) if self.root.ndim > noise.ndim else self.root * noise
        return self.mean(theta) + spread

    def marginal_sd(self, shared: GaussianMoments) -> Float[Array, "*rows K"]:
        """Standard deviations with the shared latents integrated out."""
        if not self.slope.shape[-1]:
            return self.root
        inherited = self.slope @ shared.scale
        return jnp.sqrt(jnp.sum(self.root**2, axis=-1) + jnp.sum(inherited**2, axis=-1))


def conditional_moments(natural: ConditionalNatural) -> ConditionalMoments:
    """Means, slopes, roots and entropies of every row's local latents.

    Args:
        natural: natural parameters.

    Returns:
        The moments; ``valid`` is False where a precision is not positive definite.
    """
    size = natural.linear.shape[-1]
    if not natural.full:
        good = jnp.isfinite(natural.precision) & (natural.precision > 0)
        precision = jnp.where(good, natural.precision, 1.0)
        entropy = 0.5 * size * (1 + _LOG_2PI) - 0.5 * jnp.sum(jnp.log(precision), axis=-1)
        valid = jnp.all(good & jnp.isfinite(natural.linear), axis=-1)
        return ConditionalMoments(natural.linear / precision, natural.cross, 1.0 / jnp.sqrt(precision), entropy, valid)
    factor, good = scaled_cholesky(natural.precision)
    root = inverse_root(factor)
    covariance = jnp.einsum("...ik,...jk->...ij", root, root)
    entropy = 0.5 * size * (1 + _LOG_2PI) - jnp.sum(jnp.log(diagonal(factor)), axis=-1)
    valid = good & jnp.all(jnp.isfinite(natural.linear), axis=-1) & jnp.all(jnp.isfinite(natural.cross), axis=(-2, -1))
    return ConditionalMoments(
        jnp.einsum("...ij,...j->...i", covariance, natural.linear),
        -jnp.einsum("...ij,...jd->...id", covariance, natural.cross),
        root,
        entropy,
        valid,
    )


def schur_complement(
    natural: ConditionalNatural,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D D"]]:
    """What integrating local latents out takes away from their rows' say about the shared ones, summed over rows.

    Args:
        natural: natural parameters of full conditionals; the last row axis is summed over.

    Returns:
        ``(C^T B^-1 b, C^T B^-1 C)``, precision-mean and precision.
    """
    moments = conditional_moments(natural)
    vector = -jnp.einsum("...rkd,...rk->...d", moments.slope, natural.linear)
    matrix = -jnp.einsum("...rkd,...rke->...de", natural.cross, moments.slope)
    return vector, symmetrise(matrix)


def bounded_precision(wanted: Float[Array, "..."], natural: ConditionalNatural) -> Float[Array, "..."]:
    """A proposed precision of local latents, raised where it would fall below a share of the present one.

    Args:
        wanted: proposed precisions (K x K or diagonal), possibly not positive.
        natural: the present natural parameters, valid.

    Returns:
        Positive precisions; proposals that are already large enough come back up to rounding.
    """
    if not natural.full:
        return jnp.maximum(wanted, _SMALLEST_SHARE * natural.precision)
    if natural.linear.shape[-1] == 1:
        return jnp.maximum(wanted, _SMALLEST_SHARE * natural.precision)
    # In coordinates where the present precision is the identity, eigenvalues are the shares.
    factor, _ = scaled_cholesky(natural.precision)
    inverse = jnp.swapaxes(inverse_root(factor), -1, -2)
    share = jnp.einsum("...ij,...jk,...lk->...il", inverse, wanted, inverse)
    values = jnp.linalg.eigvalsh(symmetrise(jnp.where(jnp.isfinite(share), share, 0.0)))
    low = (values[..., 0] < _SMALLEST_SHARE)[..., None, None]
    eye = jnp.eye(share.shape[-1], dtype=share.dtype)
    raised = clip_to_psd(symmetrise(share) - _SMALLEST_SHARE * eye) + _SMALLEST_SHARE * eye
    return jnp.where(low, symmetrise(jnp.einsum("...ij,...jk,...lk->...il", factor, raised, factor)), wanted)


def conditional_divergence(
    new: ConditionalNatural, old: ConditionalNatural, shared: GaussianMoments
) -> Float[Array, "*rows"]:
    """Symmetrised Kullback-Leibler divergence between two conditionals, expected over the shared latents.

    Args:
        new: natural parameters.
        old: others.
        shared: the Gaussian of theta under which to expect.

    Returns:
        ``KL(new | old) + KL(old | new)`` in nats, one per row: ``1/2 E[d^T (B + B') d] + 1/2 tr (B - B')(S' - S)`` with
        ``d`` the difference of the means at theta, ``B`` and ``S`` precisions and covariances.
    """
    to, before = conditional_moments(new), conditional_moments(old)
    change, total = old.precision - new.precision, old.precision + new.precision
    shift = to.mean(shared.loc) - before.mean(shared.loc)
    if not new.full:
        return 0.5 * jnp.sum(total * shift**2 + change * (to.root**2 - before.root**2), axis=-1)
    spread = jnp.einsum("...ik,...jk->...ij", to.root, to.root) - jnp.einsum(
        "...ik,...jk->...ij", before.root, before.root
    )
    tilt = (to.slope - before.slope) @ shared.scale
    second = shift[..., :, None] * shift[..., None, :] + jnp.einsum("...is,...js->...ij", tilt, tilt)
    return 0.5 * jnp.sum(total * second + change * spread, axis=(-2, -1))
