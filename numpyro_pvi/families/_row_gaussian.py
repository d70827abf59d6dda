"""Gaussians ``q(theta) ~ p(theta) prod_n exp(h_n z_n - 1/2 l_n z_n^2)`` of a Gaussian prior and two numbers per row.

``z = A (theta - m0)`` are the rows' centred predictors. Everything is found from the P x P matrix ``B = I + R^T diag(l) R``
(Woodbury; see :mod:`numpyro_pvi.families._row_gaussian` for R, W and u): under q, ``u ~ N(B^-1 R^T h, B^-1)``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import constraints

from .._numerics import diagonal, inverse_root, scaled_cholesky, symmetrise
from ._gaussian import GaussianNatural

# ----------------------------------------------------------------------------------------- the prior seen from the rows
# A Gaussian prior seen from the rows: what affine predictors of its vector say, with no matrix over all latents.
#
# The prior is ``N(m0, V0)`` with ``V0`` given by a root per latent. Rows see it through ``z = A (theta - m0)``, one
# predictor each, whose covariance ``K = A V0 A^T = R R^T`` is P x P. With ``z = R u`` and ``u ~ N(0, I)``
#
#     theta = m0 + W u + rest,      W = V0 A^T R^-T,      rest independent of u,
#
# so that factors which see z only change the law of u and leave that of the rest alone.

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

    ``loc``: m0; ``scales``: by latent, see :class:`RowPrior`; ``design``: A; rows may depend on each other; ``group``: position
    of each row's group. Returns the prior. Of rows that depend on each other R has zero columns.
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

    ``loc``: m0; ``scales``: by latent, see :class:`RowPrior`; ``slope``: the diagonal of A, without zeros; ``group``: position
    of each row's group. Returns the prior.
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


# --------------------------------------------------------------------------------------------------------- row gaussian


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
        force = self.pull(change, moments.loc)
        return force @ covariance @ force.T + 0.5 * change.precision @ covariance**2 @ change.precision.T

    def sds(self, moments: RowMoments) -> Float[Array, "D"]:
        """Marginal standard deviations of the latents, in O(P^2 D)."""
        return jnp.sqrt(self.prior.rest + jnp.sum((self.prior.link @ moments.white_root) ** 2, axis=-1))

    def displacement(self, new: RowMoments, old: RowMoments) -> Float[Array, "P"]:
        """What rounds by draws remember of a move: the change of the location."""
        return new.loc - old.loc

    def displacement_sds(self, moments: RowMoments) -> Float[Array, "D"]:
        """What that is measured by."""
        return self.sds(moments)

    def moves(self, new: RowMoments, old: RowMoments) -> Float[Array, "two_D"]:
        """How far apart two Gaussians are: differences of the latents' means in the new one's sds, then of log sds."""
        sd, before = self.sds(new), self.sds(old)
        return jnp.concatenate([(new.white - old.white) @ self.prior.link.T / sd, jnp.log(sd) - jnp.log(before)])

    def pull(self, change: GaussianNatural, loc: Float[Array, "P"]) -> Float[Array, "*S P"]:
        """``dh - dl E z``: what a change of natural parameters is to the gradient of log q in z at its location."""
        return change.precision_mean - change.precision * loc

    def covariance_product(self, moments: RowMoments, force: Float[Array, "*S r"]) -> Float[Array, "*S D"]:
        """``W B^-1 force``: the change of the latents' means by a change of the gradient in u, or by each of a stack of them."""
        return ((force @ moments.white_root) @ moments.white_root.T) @ self.prior.link.T


# ---------------------------------------------------------------------------------------------------- as a distribution
# Gaussians held by row sites as NumPyro distributions: marginals and draws without a covariance over all latents.


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

    ``prior``: the prior and the rows; ``natural``: ``(h, l)`` of all rows; ``start``: first coordinate; ``shape``: shape of one
    draw; all coordinates where None. Returns the distribution, and whether it is normalisable.
    """
    moments = RowFamily(prior).moments(natural)
    law = RowGaussian(prior, moments.white, moments.white_root, moments.log_det_precision, start, shape)
    return law, moments.valid


def dense_natural(prior: RowPrior, natural: GaussianNatural, with_prior: bool) -> GaussianNatural:
    """Natural parameters over theta, D x D, of rows' numbers.

    ``prior``: the prior and the rows; ``natural``: ``(h, l)`` of all rows, zero for those that are not meant; ``with_prior``:
    whether to add the prior's own. Returns ``precision = A^T diag(l) A`` and ``precision_mean = A^T (h + l A m0)``, with the
    prior's if asked for.
    """
    eye = jnp.eye(prior.loc.shape[0], dtype=prior.loc.dtype)
    design = prior.push(eye).T
    precision = design.T @ (natural.precision[:, None] * design)
    vector = prior.pull(natural.precision_mean + natural.precision * prior.push(prior.loc))
    if with_prior:
        precision = precision + prior.precision_product(eye)
        vector = vector + prior.precision_product(prior.loc)
    return GaussianNatural(vector, symmetrise(precision))
