"""Gaussians held by row sites as NumPyro distributions: marginals and draws without a covariance over all latents."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int
from numpyro.distributions import constraints

from .._numerics import scaled_cholesky, symmetrise
from ._gaussian_base import GaussianNatural
from ._row_gaussian import RowFamily
from ._row_prior import RowPrior, prior_variances


class RowGaussian(dist.Distribution):
    """``N(m, V0 - W (I - B^-1) W^T)``, some of its coordinates in the shape of a latent.

    Draws are pathwise (Matheron's rule): a draw of the prior, moved by what it misses of a draw of the rows' predictors,
    ``theta = theta_0 + W (u - u_0)``. Nothing of size D x D is made but by ``covariance_matrix`` and ``scale_tril``, and by
    the density of a part of the coordinates.

    Args:
        prior: the prior and the rows.
        white: mean of u.
        white_root: root of its covariance, Float[r r].
        log_det: log det B, nats.
        start: first coordinate.
        shape: shape of one draw.

    References:
        Wilson et al., Pathwise Conditioning of Gaussian Processes, section 3.
    """

    reparametrized_params = ["white", "white_root"]
    pytree_data_fields = ("prior", "white", "white_root", "log_det")
    pytree_aux_fields = ("start",)

    def __init__(
        self,
        prior: RowPrior,
        white: Float[Array, "r"],
        white_root: Float[Array, "r r"],
        log_det: Float[Array, ""],
        start: int = 0,
        shape: tuple[int, ...] | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.prior, self.white, self.white_root, self.log_det, self.start = prior, white, white_root, log_det, start
        event = (prior.loc.shape[0],) if shape is None else shape
        super().__init__((), event, validate_args=validate_args)

    @constraints.dependent_property
    def support(self) -> Any:
        """All reals, in the shape of one draw."""
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def _where(self) -> slice:
        return slice(self.start, self.start + math.prod(self.event_shape))

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws by Matheron's rule."""
        prior = self.prior
        keys = jax.random.split(key)
        noise = jax.random.normal(keys[0], (*sample_shape, self.white.shape[0]), self.white.dtype)
        white = self.white + noise @ self.white_root.T
        if prior.diagonal:
            theta = prior.loc + white @ prior.link.T
        else:
            shape = (*sample_shape, prior.loc.shape[0])
            own = prior.spread(jax.random.normal(keys[1], shape, prior.loc.dtype))
            theta = prior.loc + own + (white - prior.whiten(own)) @ prior.link.T
        return theta[..., self._where].reshape(*sample_shape, *self.event_shape)

    @property
    def mean(self) -> Array:
        """Location."""
        return (self.prior.loc + self.prior.link @ self.white)[self._where].reshape(self.event_shape)

    @property
    def variance(self) -> Array:
        """Marginal variances, in O(P^2 D)."""
        link = self.prior.link[self._where]
        own = self.prior.rest[self._where] + jnp.sum((link @ self.white_root) ** 2, axis=-1)
        return own.reshape(self.event_shape)

    @property
    def covariance_matrix(self) -> Array:
        """The dense covariance of the flattened coordinates: made when it is asked for."""
        prior, where = self.prior, self._where
        link = prior.link[where]
        spread = link @ self.white_root
        if prior.diagonal:
            return symmetrise(spread @ spread.T)
        size = prior.loc.shape[0]
        unit = jnp.zeros((where.stop - where.start, size), prior.loc.dtype)
        unit = unit.at[jnp.arange(where.stop - where.start), jnp.arange(where.start, where.stop)].set(1.0)
        whole = prior.covariance_product(unit)[:, where]
        return symmetrise(whole - link @ link.T + spread @ spread.T)

    @property
    def scale_tril(self) -> Array:
        """The dense Cholesky factor of ``covariance_matrix``."""
        return scaled_cholesky(self.covariance_matrix)[0]

    @property
    def precision_matrix(self) -> Array:
        """The dense inverse of ``covariance_matrix``."""
        return dist.MultivariateNormal(
            jnp.zeros(self.covariance_matrix.shape[0]), self.covariance_matrix
        ).precision_matrix

    def log_prob(self, value: Array) -> Array:
        """Log density in nats: by Woodbury for all coordinates, from the dense covariance for some of them."""
        rank = len(self.event_shape)
        flat = value.reshape(*value.shape[: value.ndim - rank], -1)
        prior = self.prior
        if flat.shape[-1] != prior.loc.shape[0]:
            law = dist.MultivariateNormal(self.mean.reshape(-1), self.covariance_matrix)
            return law.log_prob(flat)
        away = flat - prior.loc
        white = prior.whiten(away)
        gap = white - self.white
        # B = white_root^-T white_root^-1.
        solved = jax.scipy.linalg.solve_triangular(self.white_root, gap.reshape(-1, gap.shape[-1]).T, lower=False)
        square = jnp.sum(solved**2, axis=0).reshape(gap.shape[:-1])
        rows = 0.5 * self.log_det - 0.5 * square + 0.5 * jnp.sum(white**2, axis=-1)
        own = -0.5 * jnp.sum(away * prior.precision_product(away), axis=-1) - prior.half_log_det()
        return own + rows - 0.5 * prior.loc.shape[0] * math.log(2 * math.pi)


# JAX rebuilds pytrees around placeholders, so the constructor must not check its arguments.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowRoot:
    """Stands for a dense ``scale_tril`` among a guide's params: an array is made of it where one is needed.

    Attributes:
        law: the joint Gaussian.
        order: the guide's order of the coordinates; None where it is the law's own.
    """

    law: RowGaussian
    order: Int[Array, " D"] | None

    @property
    def shape(self) -> tuple[int, int]:
        """``(D, D)``."""
        size = self.law.event_shape[0]
        return size, size

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def dtype(self) -> Any:
        """Of its numbers."""
        return self.law.white.dtype

    def __jax_array__(self) -> Array:
        covariance = self.law.covariance_matrix
        if self.order is not None:
            covariance = covariance[self.order][:, self.order]
        return scaled_cholesky(covariance)[0]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        return np.asarray(self.__jax_array__(), dtype)


def row_gaussian(
    prior: RowPrior, natural: GaussianNatural, start: int = 0, shape: tuple[int, ...] | None = None
) -> tuple[RowGaussian, Array]:
    """The Gaussian of a prior and rows' numbers.

    Args:
        prior: the prior and the rows.
        natural: ``(h, l)`` of all rows.
        start: first coordinate.
        shape: shape of one draw; all coordinates where None.

    Returns:
        The distribution, and whether it is normalisable.
    """
    moments = RowFamily(prior).moments(natural)
    law = RowGaussian(prior, moments.white, moments.white_root, moments.log_det_precision, start, shape)
    return law, moments.valid


def dense_natural(prior: RowPrior, natural: GaussianNatural, with_prior: bool) -> GaussianNatural:
    """Natural parameters over theta, D x D, of rows' numbers.

    Args:
        prior: the prior and the rows.
        natural: ``(h, l)`` of all rows, zero for those that are not meant.
        with_prior: whether to add the prior's own.

    Returns:
        ``precision = A^T diag(l) A`` and ``precision_mean = A^T (h + l A m0)``, with the prior's if asked for.
    """
    eye = jnp.eye(prior.loc.shape[0], dtype=prior.loc.dtype)
    design = prior.push(eye).T
    precision = design.T @ (natural.precision[:, None] * design)
    vector = prior.pull(natural.precision_mean + natural.precision * prior.push(prior.loc))
    if with_prior:
        precision = precision + prior.precision_product(eye)
        vector = vector + prior.precision_product(prior.loc)
    return GaussianNatural(vector, symmetrise(precision))


__all__ = ["RowGaussian", "RowRoot", "dense_natural", "prior_variances", "row_gaussian"]
