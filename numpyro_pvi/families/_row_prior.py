"""A Gaussian prior seen from the rows: what affine predictors of its vector say, with no matrix over all latents.

The prior is ``N(m0, V0)`` with ``V0`` given by a root per latent. Rows see it through ``z = A (theta - m0)``, one predictor
each, whose covariance ``K = A V0 A^T = R R^T`` is P x P. With ``z = R u`` and ``u ~ N(0, I)``

    theta = m0 + W u + rest,      W = V0 A^T R^-T,      rest independent of u,

so that factors which see z only change the law of u and leave that of the rest alone.
"""

from __future__ import annotations

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Float, Int

from .._numerics import diagonal, scaled_cholesky, symmetrise

# Smallest squared pivot, of the unit-diagonal K and in units of P times rounding, for which its Cholesky factor is used.
_PIVOT = 1e3


# JAX rebuilds pytrees around placeholders, so the constructor must not check its arguments.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPrior:
    """The prior and the rows' vectors: O(P^2 + P D) numbers where no latent has a full covariance of its own.

    Attributes:
        loc: m0.
        scales: by latent, in the order of the flat vector: standard deviations Float[d], or lower roots Float[B E E] of
            blocks.
        view: ``R^-1 A``; or, where row n sees latent n alone, the diagonal of A.
        root: R.
        link: W.
        rest: marginal variances of what no row sees of the latents.
        group: position of each row's group; -1 is nobody's.
    """

    loc: Float[Array, " D"]
    scales: tuple
    view: Float[Array, "..."]
    root: Float[Array, "P r"]
    link: Float[Array, "D r"]
    rest: Float[Array, " D"]
    group: Int[Array, " P"]

    @property
    def diagonal(self) -> bool:
        """Whether there is one predictor per latent, which it is a multiple of."""
        return self.view.ndim == 1

    def push(self, theta: Float[Array, "*S D"]) -> Float[Array, "*S P"]:
        """``A theta``."""
        return self.view * theta if self.diagonal else (theta @ self.view.T) @ self.root.T

    def pull(self, rows: Float[Array, "*S P"]) -> Float[Array, "*S D"]:
        """``A^T rows``."""
        return self.view * rows if self.diagonal else (rows @ self.root) @ self.view

    def whiten(self, theta: Float[Array, "*S D"]) -> Float[Array, "*S r"]:
        """What a deviation from m0 says of u."""
        if not self.diagonal:
            return theta @ self.view.T
        flat = theta.reshape(-1, theta.shape[-1])
        return solve_triangular(self.link, flat.T, lower=True).T.reshape(theta.shape)

    def spread(self, noise: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """``V0^1/2 noise``: deviations from m0 drawn from the prior for standard normal noise."""
        return _by_block(self.scales, noise, _times)

    def precision_product(self, theta: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """``V0^-1 theta``."""
        return _by_block(self.scales, theta, _divide)

    def covariance_product(self, theta: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """``V0 theta``."""
        return _by_block(self.scales, theta, _covary)

    def half_log_det(self) -> Float[Array, ""]:
        """``1/2 log det V0``."""
        logs = (jnp.log(s if s.ndim == 1 else diagonal(s)) for s in self.scales)
        return sum((jnp.sum(x) for x in logs), start=jnp.zeros((), self.loc.dtype))


def prior_variances(scales: tuple) -> Float[Array, "D"]:
    """The diagonal of V0."""
    return jnp.concatenate([s**2 if s.ndim == 1 else jnp.sum(s**2, axis=-1).reshape(-1) for s in scales])


def see_rows(loc: Float[Array, "D"], scales: tuple, design: Float[Array, "P D"], group: Int[Array, "P"]) -> RowPrior:
    """A prior seen through any rows: ``O(P^2 D + P^3)`` once.

    Args:
        loc: m0.
        scales: by latent, see :class:`RowPrior`.
        design: A; rows may depend on each other.
        group: position of each row's group.

    Returns:
        The prior. Of rows that depend on each other R has zero columns.
    """
    across = _by_block(scales, design, _covary)
    gram = symmetrise(across @ design.T)
    factor, good = scaled_cholesky(gram)
    size = jnp.where(diagonal(gram) > 0, diagonal(gram), 1.0)
    eps = jnp.finfo(gram.dtype).eps
    good &= jnp.min(diagonal(factor) ** 2 / size) > _PIVOT * eps * gram.shape[0]

    def triangular(_):
        return factor, solve_triangular(factor, jnp.eye(gram.shape[0], dtype=gram.dtype), lower=True)

    def spectral(_):
        values, vectors = jnp.linalg.eigh(gram)
        kept = values > eps * gram.shape[0] * jnp.max(values)
        values = jnp.where(kept, values, 1.0)
        # Columns of directions that rounding alone has made are zero, in the root and in its inverse.
        return vectors * jnp.where(kept, jnp.sqrt(values), 0.0), (vectors * jnp.where(kept, values**-0.5, 0.0)).T

    root, inverse = jax.lax.cond(good, triangular, spectral, None)
    link = across.T @ inverse.T
    rest = jnp.maximum(prior_variances(scales) - jnp.sum(link**2, axis=-1), 0.0)
    return RowPrior(loc, scales, inverse @ design, root, link, rest, group)


def see_latents(loc: Float[Array, "D"], scales: tuple, slope: Float[Array, "D"], group: Int[Array, "D"]) -> RowPrior:
    """A prior of which row n sees ``slope_n theta_n`` alone, as in Gaussian-process models: nothing is factorised.

    Args:
        loc: m0.
        scales: by latent, see :class:`RowPrior`.
        slope: the diagonal of A, without zeros.
        group: position of each row's group.

    Returns:
        The prior.
    """
    link = _by_block(scales, jnp.eye(loc.shape[0], dtype=loc.dtype), _times).T
    return RowPrior(loc, scales, slope, slope[:, None] * link, link, jnp.zeros_like(loc), group)


def _by_block(scales: tuple, theta: Array, apply) -> Array:
    parts, start = [], 0
    for scale in scales:
        size = scale.shape[0] * (1 if scale.ndim == 1 else scale.shape[1])
        parts.append(apply(scale, theta[..., start : start + size]))
        start += size
    return jnp.concatenate(parts, axis=-1)


def _times(scale: Array, part: Array) -> Array:
    if scale.ndim == 1:
        return scale * part
    blocks = part.reshape(*part.shape[:-1], *scale.shape[:2])
    return jnp.einsum("bij,...bj->...bi", scale, blocks).reshape(part.shape)


def _covary(scale: Array, part: Array) -> Array:
    if scale.ndim == 1:
        return scale**2 * part
    blocks = part.reshape(*part.shape[:-1], *scale.shape[:2])
    back = jnp.einsum("bij,...bi->...bj", scale, blocks)
    return jnp.einsum("bij,...bj->...bi", scale, back).reshape(part.shape)


def _divide(scale: Array, part: Array) -> Array:
    if scale.ndim == 1:
        return part / scale**2
    count, size = scale.shape[:2]
    columns = jnp.moveaxis(part.reshape(-1, count, size), 0, -1)
    return jnp.moveaxis(jax.vmap(lambda s, x: cho_solve((s, True), x))(scale, columns), -1, 0).reshape(part.shape)
