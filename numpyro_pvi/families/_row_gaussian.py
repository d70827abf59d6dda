"""Gaussians ``q(theta) ~ p(theta) prod_n exp(h_n z_n - 1/2 l_n z_n^2)`` of a Gaussian prior and two numbers per row.

``z = A (theta - m0)`` are the rows' centred predictors. Everything is found from the P x P matrix ``B = I + R^T diag(l) R``
(Woodbury; see :mod:`numpyro_pvi.families._row_prior` for R, W and u): under q, ``u ~ N(B^-1 R^T h, B^-1)``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import diagonal, inverse_root, scaled_cholesky, symmetrise
from ._gaussian_base import GaussianNatural
from ._row_prior import RowPrior


class RowMoments(NamedTuple):
    """The law of the centred predictors z, and of u behind them."""

    # E z, and S with S S^T the covariance of z.
    loc: Float[Array, "P"]
    scale: Float[Array, "P r"]
    # log det B: of q's precision over the prior's, nats.
    log_det_precision: Float[Array, ""]
    valid: Bool[Array, ""]
    # E u, and the root of its covariance.
    white: Float[Array, "r"]
    white_root: Float[Array, "r r"]


# Not registered as static anywhere: it holds arrays and lives inside one trace.
@dataclasses.dataclass(frozen=True, eq=False)
class RowFamily:
    """What schedules and solvers ask of a family, in the predictors' coordinates; the prior is not among the naturals.

    A natural parameter holds ``(h, l)`` of all rows, Float[P] each; a group's has zeros elsewhere.

    Args:
        prior: the prior and the rows.
    """

    prior: RowPrior
    full: bool = dataclasses.field(default=True, init=False)

    @property
    def dim(self) -> int:
        """D, the number of latents."""
        return self.prior.loc.shape[0]

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> GaussianNatural:
        """The unit factor, ``exp(0)``."""
        zero = jnp.zeros((*batch_shape, self.prior.root.shape[0]), dtype)
        return GaussianNatural(zero, zero)

    def symmetrise(self, natural: GaussianNatural) -> GaussianNatural:
        """Numbers of rows are symmetric already."""
        return natural

    def _precision(self, natural: GaussianNatural) -> Float[Array, "r r"]:
        root = self.prior.root
        inner = symmetrise(root.T @ (natural.precision[:, None] * root))
        return inner + jnp.eye(root.shape[1], dtype=root.dtype)

    def moments(self, natural: GaussianNatural) -> RowMoments:
        """The law of z: one Cholesky factorisation of B; ``valid`` is False where q is not normalisable."""
        root, matrix = self.prior.root, self._precision(natural)
        factor, valid = scaled_cholesky(matrix)
        own = inverse_root(factor)
        force = natural.precision_mean @ root
        white = own @ (force @ own)
        # One step of iterative refinement, as of a dense precision.
        white = white + own @ ((force - matrix @ white) @ own)
        log_det = 2 * jnp.sum(jnp.log(diagonal(factor)))
        valid = valid & jnp.all(jnp.isfinite(white))
        return RowMoments(root @ white, root @ own, log_det, valid, white, own)

    def in_domain(self, natural: GaussianNatural) -> Bool[Array, ""]:
        """Whether q is finite and normalisable: B is positive definite exactly where q's precision is."""
        return scaled_cholesky(self._precision(natural))[1] & jnp.all(jnp.isfinite(natural.precision_mean))

    def expect_quadratic(self, natural: GaussianNatural, moments: RowMoments) -> Float[Array, "*batch"]:
        """``E_q`` of the rows' log sites, in nats."""
        second = moments.loc**2 + jnp.sum(moments.scale**2, axis=-1)
        return jnp.sum(natural.precision_mean * moments.loc - 0.5 * natural.precision * second, axis=-1)

    def log_partition_parts(
        self, natural: GaussianNatural, moments: RowMoments
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """A(eta) up to a constant, in nats, in two parts."""
        return 0.5 * jnp.vdot(natural.precision_mean, moments.loc), -0.5 * moments.log_det_precision

    def divergence(self, moments: RowMoments) -> Float[Array, ""]:
        """KL from the prior to q in nats: that of u, since the rest of theta keeps its law."""
        size = moments.white.shape[0]
        trace = jnp.sum(moments.white_root**2) - size
        return 0.5 * (trace + jnp.sum(moments.white**2) + moments.log_det_precision)

    def inner_products(self, moments: RowMoments, change: GaussianNatural) -> Float[Array, "W W"]:
        """Of changes of the naturals, Float[W P] each, in q's Fisher metric: ``g_i^T C g_j + 1/2 l_i^T (C * C) l_j``.

        C is the covariance of z and ``g = h - l E z``; half the inner product of a small change with itself is its divergence.
        """
        covariance = moments.scale @ moments.scale.T
        force = change.precision_mean - change.precision * moments.loc
        return force @ covariance @ force.T + 0.5 * change.precision @ covariance**2 @ change.precision.T

    def latent_sd(self, moments: RowMoments) -> Float[Array, "D"]:
        """Marginal standard deviations of the latents, in O(P^2 D)."""
        return jnp.sqrt(self.prior.rest + jnp.sum((self.prior.link @ moments.white_root) ** 2, axis=-1))

    def latent_shift(self, white: Float[Array, "*S r"]) -> Float[Array, "*S D"]:
        """What a shift of u does to the latents' means."""
        return white @ self.prior.link.T

    def white_shift(self, moments: RowMoments, force: Float[Array, "*S r"]) -> Float[Array, "*S r"]:
        """``B^-1 force``."""
        return (force @ moments.white_root) @ moments.white_root.T
