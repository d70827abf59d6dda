"""Factors whose groups have latents of their own: taken together with the shared ones, or integrated out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._numerics import diagonal, grad, hessian_of, inverse_root, scaled_cholesky, symmetrise, value_and_grad
from ..families import (
    ConditionalMoments,
    ConditionalNatural,
    GaussianFamily,
    GaussianMoments,
    GaussianNatural,
    bounded_precision,
    conditional_moments,
)
from ._expected import Expected
from ._tilted import normal_cloud, shifted_normals


class LocalNoise(NamedTuple):
    """Standard normal draws of one round; see :func:`own_normals`."""

    # For the shared latents; all groups use the same.
    shared: Float[Array, "S D"]
    # For every unit's (plate index's) local latents, so that a unit's draws do not depend on the partition; those after the first S
    # are for the curvature that corrects values.
    local: Float[Array, "U T K"]


# Pairs whose curvature corrects values: one for so many, up to so many. Four leave .95 to 1.4 times the noise that the draws' own
# curvature does (graded responses, Gamma-Poisson, measurement error).
_PAIRS_A_CORRECTION, _MOST_CORRECTIONS = 4, 4
# Of the shared latents' part in these, which is the same in every round; and what makes the key of the others. A small number would
# give one of the keys that the round's own draws are of: splitting a key folds numbers from 0 in.
_CORRECTION_SEED = 0xC0FFEE


def own_normals(key: Any, dim: int, width: int, count: int, units: int, dtype: Any) -> LocalNoise:
    """Draws of one round as :func:`shifted_normals` makes them, and independent ones for the curvature that corrects values.

    ``key``: random key; ``dim``: D, shared latents; ``width``: K, latents of a unit; 0 without any; ``count``: S; ``units``: U;
    ``dtype``: floating dtype. Returns Float[S D] and Float[U T K], of which T - S are those others.
    """
    shared, local = shifted_normals(key, dim, width, count, units, dtype)
    more = min(max(count // _PAIRS_A_CORRECTION, 1), _MOST_CORRECTIONS)
    apart = jax.random.normal(jax.random.fold_in(key, _CORRECTION_SEED), (units, more, width), dtype)
    return LocalNoise(shared, jnp.concatenate([local, apart], axis=1))


def _both_signs(noise: LocalNoise, local: Float[Array, "R T K"]) -> tuple[Array, Array, int]:
    """Pairs with both signs, leading axis 2 T: those of the round first, whose number 2 S comes third.

    ``local``: of the rows at hand.
    """
    count, dim = noise.shared.shape
    more = local.shape[1] - count
    apart = jax.random.normal(jax.random.key(_CORRECTION_SEED), (more, dim), noise.shared.dtype)
    local = jnp.swapaxes(local, 0, 1)
    shared = jnp.concatenate([noise.shared, -noise.shared, apart, -apart])
    return shared, jnp.concatenate([local[:count], -local[:count], local[count:], -local[count:]]), 2 * count


def _over_draws(found: Any, count: int) -> tuple[Any, Any]:
    """Means over the round's draws, and over those that correct values; zeros for the latter if there are none."""
    return jax.tree.map(lambda x: jnp.mean(x[:count], axis=0), found), jax.tree.map(
        lambda x: jnp.mean(x[count:], axis=0) if len(x) > count else jnp.zeros_like(x[0]), found
    )


class LocalChunk(NamedTuple):
    """One chunk of rows, and what q says about their local latents."""

    data: Any
    # Unit of every slot, and whether the slot is one (no padding, not another group's).
    units: Int[Array, "R"]
    mask: Bool[Array, "R"]
    rows: ConditionalNatural


class _Curvature(NamedTuple):
    """-E[hess f]: blocks between shared (s) and local (l) latents; K x K and K x D ones per row."""

    shared: Array
    cross: Array
    local: Array


def _symmetric(curvature: _Curvature) -> _Curvature:
    shared, local = (0.5 * (x + jnp.swapaxes(x, -1, -2)) for x in (curvature.shared, curvature.local))
    return _Curvature(shared, curvature.cross, local)


@dataclasses.dataclass(frozen=True)
class LocalLatentProgram:
    """``E_q`` of a chunk's log density and local entropy over shared and local latents, by antithetic draws with Hessians.

    The value is the local ELBO given q(theta), ``E_q[log p(y, z | theta)] + E_q[H(q(z | theta))]``; the target is the
    natural gradient in the joint natural space, blocks of ``-E[hess f]`` and ``E[grad f] - E[hess f] loc``. Rows are
    independent given theta, so one tangent per shared and per local coordinate serves all rows at once.

    A quadratic form, a control variate, takes out of values what the draws' own second moments are off, so that those of
    quadratics are exact. Its curvature is that at other draws: the draws' own covaries with their second moments, which made
    values too good (.74 nats of 571, graded responses with full covariance).

    Args:
        log_density: ``(data, theta, z) -> nats``, observed and local terms of one chunk, z Float[R K].
        family: the Gaussian family of q(theta).
        at_mean: whether the shared block of the curvature is that at q's means in place of the draws' average: for solvers whose
            steps do not read it, since its D tangents of every draw are most of what a pass costs where D is large. The value
            stays exact for quadratics.
    """

    log_density: Callable[[Any, Float[Array, "D"], Float[Array, "R K"]], Float[Array, ""]]
    family: GaussianFamily
    at_mean: bool = False
    noisy: bool = dataclasses.field(default=True, init=False)

    def working_bytes(self, chunks: LocalChunk) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: the draws' tangents of every row."""
        rows, width = chunks.rows.linear.shape[1:]
        return 4 * rows * width * (self.family.dim + width) * 40

    def expected(
        self, chunk: LocalChunk, moments: GaussianMoments, probe: Any, level: Any, noise: LocalNoise, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: rows and their conditionals; ``moments``: q(theta); ``probe``: Float[D] vector for the curvature product, or
        None; ``level``: unused; there is no rule to choose; ``noise``: the round's draws; each is used with both signs;
        ``clip``: unused; precisions of local latents are always bounded from below. Returns the chunk's expectations;
        ``target`` is the shared block, ``local`` the rows' targets.
        """
        q = conditional_moments(chunk.rows)
        shared, local, count = _both_signs(noise, noise.local[chunk.units])
        theta = self.family.draw(moments, shared)
        z = jax.vmap(q.draw)(theta, local)
        mean = q.mean(moments.loc)
        found, apart = self._derivatives(chunk.data, theta, z, (moments.loc, mean), count)
        value, (slope, slope_local), curvature = found
        away, out = theta[:count] - moments.loc, z[:count] - mean
        value = value - self._quadratic_correction(apart, moments, q, away, out)
        value = value + jnp.sum(jnp.where(chunk.mask, q.entropy, 0.0))
        own = self._own_precision(chunk, curvature.local)
        product = jnp.zeros_like(moments.loc) if probe is None else _times(curvature.shared, probe)
        vector = slope + _times(curvature.shared, moments.loc)
        linear = slope_local + _times(own, mean)
        cross = jnp.zeros_like(chunk.rows.cross)
        if self.family.full:
            cross = jnp.where(chunk.mask[:, None, None], curvature.cross, 0.0)
            vector = vector + jnp.einsum("rkd,rk->d", cross, mean)
            linear = linear + cross @ moments.loc
        rows = ConditionalNatural(jnp.where(chunk.mask[:, None], linear, 0.0), own, cross)
        zero = jnp.zeros_like(value)
        target = self.family.natural(vector, curvature.shared)
        return Expected(value, target, product, zero, zero, zero, rows)

    def match(
        self, chunk: LocalChunk, moments: GaussianMoments, noise: LocalNoise
    ) -> tuple[ConditionalNatural, Float[Array, ""]]:
        """The targets of the rows' conditionals at q(theta); a row of which something is no number keeps its own.

        ``chunk``: rows and their conditionals; ``moments``: q(theta); ``noise``: the round's draws. Returns the targets, and the
        local ELBO at the conditionals as they are, in nats.
        """
        found = self.expected(chunk, moments, None, 0, noise, False)
        wanted: Any = found.local
        count = chunk.mask.shape[0]
        finite = [jnp.all(jnp.isfinite(x).reshape(count, -1), axis=-1) for x in jax.tree.leaves(wanted)]
        good = functools.reduce(jnp.logical_and, finite)
        return jax.tree.map(lambda new, old: _pick(good, new, old), wanted, chunk.rows), found.value

    def given(self, chunk: LocalChunk, moments: GaussianMoments, noise: LocalNoise) -> Expected:
        """Expectations of the factor over theta alone that is left where rows' latents are what their conditionals say.

        ``E[log p(y, z | theta)] + H(q(z | theta))`` over ``q(z | theta)``, whose mean is affine in theta with slopes M, bends in
        theta by ``A + C^T M + M^T C + M^T B M``, with the blocks of ``-E[hess f]``. ``chunk``, ``moments``, ``noise``: as of
        :meth:`expected`. Returns the chunk's expectations, without any for the rows' own latents.
        """
        found = self.expected(chunk, moments, None, 0, noise, False)
        if not self.family.full:
            return dataclasses.replace(found, local=None)
        joint, own, q = found.target, found.local, conditional_moments(chunk.rows)
        mean, slope, loc = q.mean(moments.loc), q.slope, moments.loc
        force = joint.precision_mean - _times(joint.precision, loc) - jnp.einsum("rkd,rk->d", own.cross, mean)
        force_own = own.linear - _times(own.precision, mean) - own.cross @ loc
        half = jnp.einsum("rkd,rke->de", slope, own.cross + 0.5 * own.precision @ slope)
        precision = joint.precision + half + half.T
        vector = force + jnp.einsum("rkd,rk->d", slope, force_own) + precision @ loc
        return dataclasses.replace(found, target=self.family.natural(vector, precision), local=None)

    def _derivatives(self, data, theta: Float[Array, "S D"], z: Float[Array, "S R K"], middle: tuple, count: int):
        """Means over draws of value, gradients and curvature blocks (their diagonals under a mean-field q).

        ``middle``: q's means of theta and z; ``count``: of the draws, those of the round. Returns them, and the curvature that
        corrects values.
        """
        dim, width, full = theta.shape[-1], z.shape[-1], self.family.full

        def one(theta, z):
            density = value_and_grad(lambda a, b: self.log_density(data, a, b), argnums=(0, 1))
            (value, gradient), tangent = jax.linearize(density, theta, z)
            zero, none = jnp.zeros_like(z), jnp.zeros_like(theta)
            shared = cross = jnp.zeros((dim, 0), theta.dtype)
            if full or not self.at_mean:
                shared, cross = jax.vmap(lambda e: tangent(e, zero)[1])(jnp.eye(dim, dtype=theta.dtype))
            # Rows do not see each other's local latents: one tangent moves the k-th coordinate of all of them.
            local = jax.vmap(lambda e: tangent(none, zero + e)[1][1])(jnp.eye(width, dtype=z.dtype))
            cross, local = jnp.moveaxis(cross, 0, -1), jnp.moveaxis(local, 0, -1)
            if not full:
                shared, cross = jnp.diagonal(shared), jnp.zeros((0,), theta.dtype)
                local = jnp.diagonal(local, axis1=-2, axis2=-1)
            return value, gradient, _Curvature(-shared, -cross, -local)

        (value, gradient, own), (_, _, apart) = _over_draws(jax.vmap(one)(theta, z), count)
        if self.at_mean:
            loc, mean = middle
            shared = -hessian_of(lambda a: self.log_density(data, a, mean))(loc)
            own, apart = (x._replace(shared=shared if full else jnp.diagonal(shared)) for x in (own, apart))
        if full:
            own, apart = (_symmetric(x) for x in (own, apart))
        return (value, gradient, own), apart

    def _own_precision(self, chunk: LocalChunk, wanted: Array) -> Array:
        bounded = bounded_precision(wanted, chunk.rows)
        shape = chunk.mask.shape + (1,) * (bounded.ndim - 1)
        width = chunk.rows.linear.shape[-1]
        unit = jnp.eye(width, dtype=bounded.dtype) if chunk.rows.full else jnp.ones((width,), bounded.dtype)
        return jnp.where(chunk.mask.reshape(shape), bounded, unit)

    def _quadratic_correction(
        self, curvature: _Curvature, moments: GaussianMoments, q: ConditionalMoments, shared, local
    ) -> Float[Array, ""]:
        """Exact less sampled mean of half the quadratic form, so that a quadratic factor comes out exactly.

        ``curvature``: of other draws than these, or values would be biased by how it covaries with their second moments;
        ``shared``, ``local``: how far draws are from their means.
        """
        scale = moments.scale
        if not self.family.full:
            sampled = jnp.mean(shared**2 @ curvature.shared) + jnp.mean(jnp.sum(local**2 * curvature.local, (1, 2)))
            exact = jnp.sum(curvature.shared * scale**2) + jnp.sum(curvature.local * q.root**2)
            return 0.5 * (exact - sampled)
        towards = jnp.einsum("rkj,srj->srk", curvature.local, local) + 2 * jnp.einsum(
            "rkd,sd->srk", curvature.cross, shared
        )
        sampled = jnp.mean(jnp.sum(shared @ curvature.shared * shared, -1) + jnp.sum(towards * local, (1, 2)))
        inherited = q.slope @ scale
        both = curvature.local @ inherited + 2 * curvature.cross @ scale
        exact = jnp.sum(scale * (curvature.shared @ scale)) + jnp.sum(inherited * both)
        exact = exact + jnp.sum(q.root * (curvature.local @ q.root))
        return 0.5 * (exact - sampled)


@dataclasses.dataclass(frozen=True)
class MaskedLocalProgram(LocalLatentProgram):
    """The same for models in which every group is a full pass over all rows: one pass for all groups together.

    Every group's density of the same draw is a vector, whose derivatives in theta go forward: D^2 passes, whatever the
    number of groups, instead of a reverse pass and its D tangents for each of them.

    Args:
        densities: ``(theta, z) -> nats``, Float[M], one log density per group; z Float[U K] of all units.
        group_of_unit: Int[U].
    """

    densities: Callable[[Float[Array, "D"], Float[Array, "U K"]], Float[Array, "M"]] = dataclasses.field(kw_only=True)
    group_of_unit: Int[Array, "U"] = dataclasses.field(kw_only=True)

    def expected_all(self, chunks: LocalChunk, moments: GaussianMoments, probe: Any, noise: LocalNoise) -> Expected:
        """Expectations of every group: see :meth:`expected`; leading axis M.

        ``chunks``: one chunk per group, of all units, stacked; ``moments``: q(theta); ``probe``: Float[D] vector for the
        curvature product, or None; ``noise``: the round's draws. Returns the groups' expectations.
        """
        group, units = self.group_of_unit, jnp.arange(self.group_of_unit.shape[0])
        num_groups = chunks.mask.shape[0]
        own = jax.tree.map(lambda x: x[group, units], chunks.rows)
        q = conditional_moments(own)
        eps, local, count = _both_signs(noise, noise.local)
        theta = self.family.draw(moments, eps)
        z = jax.vmap(q.draw)(theta, local)
        mean = q.mean(moments.loc)
        (value, slope, slope_local, curvature), apart = self._all_derivatives(theta, z, (moments.loc, mean), count)
        shared, cross, wanted = curvature
        away, out = theta[:count] - moments.loc, z[:count] - mean

        def total(x):
            return jax.ops.segment_sum(x, group, num_groups)

        sampled, exact = self._quadratic_parts(apart, moments, q, away, out)
        value = value - 0.5 * (exact[0] - sampled[0] + total(exact[1] - sampled[1])) + total(q.entropy)
        precision = bounded_precision(wanted, own)
        curve = (lambda v: shared @ v) if self.family.full else (lambda v: shared * v)
        vector, linear = slope + curve(moments.loc), slope_local + _times(precision, mean)
        if self.family.full:
            vector = vector + total(jnp.einsum("ukd,uk->ud", cross, mean))
            linear = linear + cross @ moments.loc
        else:
            cross = own.cross
        new = ConditionalNatural(linear, precision, cross)
        rows = jax.tree.map(lambda x, y: x.at[group, units].set(y), chunks.rows, new)
        zero = jnp.zeros_like(value)
        product = jnp.zeros_like(slope) if probe is None else curve(probe)
        return Expected(value, self.family.natural(vector, shared), product, zero, zero, zero, rows)

    def _all_derivatives(self, theta: Float[Array, "S D"], z: Float[Array, "S U K"], middle: tuple, count: int):
        full, width = self.family.full, z.shape[-1]

        def bend(theta, z):
            return jax.jacfwd(jax.jacfwd(lambda a: self.densities(a, z)))(theta)

        def one(theta, z):
            value, slope = self.densities(theta, z), jax.jacfwd(lambda a: self.densities(a, z))(theta)
            shared = jnp.zeros((0, 0, 0), theta.dtype) if self.at_mean else bend(theta, z)
            pull = grad(lambda a, b: jnp.sum(self.densities(a, b)), argnums=1)
            slope_local, tangent = jax.linearize(pull, theta, z)
            zero, none = jnp.zeros_like(z), jnp.zeros_like(theta)
            local = jax.vmap(lambda e: tangent(none, zero + e))(jnp.eye(width, dtype=z.dtype))
            local = jnp.moveaxis(local, 0, -1)
            cross = jnp.zeros((0,), theta.dtype)
            if full:
                cross = jax.vmap(lambda e: tangent(e, zero))(jnp.eye(theta.shape[0], dtype=theta.dtype))
                cross = jnp.moveaxis(cross, 0, -1)
            else:
                shared = jnp.diagonal(shared, axis1=-2, axis2=-1)
                local = jnp.diagonal(local, axis1=-2, axis2=-1)
            return value, slope, slope_local, _Curvature(-shared, -cross, -local)

        (value, slope, slope_local, own), (*_, apart) = _over_draws(jax.vmap(one)(theta, z), count)
        if self.at_mean:
            shared = -bend(*middle) if full else -diagonal(bend(*middle))
            own, apart = (x._replace(shared=shared) for x in (own, apart))
        if full:
            own, apart = (_symmetric(x) for x in (own, apart))
        return (value, slope, slope_local, own), apart

    def _quadratic_parts(self, curvature: _Curvature, moments: GaussianMoments, q: ConditionalMoments, away, out):
        """Sampled and exact means of the quadratic form: of theta by group, and of everything with z by unit."""
        scale, (shared, cross, local) = moments.scale, curvature
        if not self.family.full:
            sampled = jnp.mean(away**2 @ shared.T, axis=0), jnp.mean(jnp.sum(out**2 * local, -1), axis=0)
            return sampled, (shared @ scale**2, jnp.sum(local * q.root**2, -1))
        by_group = jnp.mean(jnp.einsum("sd,mde,se->sm", away, shared, away, optimize="greedy"), axis=0)
        towards = jnp.einsum("ukj,suj->suk", local, out) + 2 * jnp.einsum("ukd,sd->suk", cross, away)
        by_unit = jnp.mean(jnp.sum(towards * out, -1), axis=0)
        inherited = q.slope @ scale
        both = local @ inherited + 2 * cross @ scale
        exact = jnp.sum(inherited * both, (-2, -1)) + jnp.sum(q.root * (local @ q.root), (-2, -1))
        return (by_group, by_unit), (jnp.sum(scale * (shared @ scale), (-2, -1)), exact)


def _times(matrix: Array, vector: Array) -> Array:
    """Matrix-vector product, or the elementwise one with a diagonal."""
    return matrix * vector if matrix.ndim == vector.ndim else jnp.einsum("...ij,...j->...i", matrix, vector)


# ----------------------------------------------------------------------------------------------- integrals unit by unit
# Local latents integrated out, unit by unit, by quadrature about their mode at each value of the shared latents.

# Nodes per axis of the product rules, by the number of a unit's latents; beyond, so many quasi-random points.
_NODES = {1: 15, 2: 7, 3: 5}
_QUASI_POINTS = 256
# Newton steps at most, and the step in sds after which the mode is near enough to centre a rule at.
_NEWTON_STEPS = 40
_CENTRED = 1e-3
# Roundings of its value by which a step towards the mode may fall.
_ROUNDING = 8
# Curvatures are raised to this share of the largest one, and to this number.
_LEAST_SHARE, _LEAST = 1e-6, 1e-10
_LOG_2PI = math.log(2 * math.pi)


class Integrated(NamedTuple):
    """What is left of units when their own latents z have been integrated out at one theta."""

    # log of the integral of exp f_u(theta, z) over z, nats.
    value: Float[Array, "R"]
    # Mean and covariance of z given theta and the data.
    mean: Float[Array, "R K"]
    covariance: Float[Array, "R K K"]


class _Climb(NamedTuple):
    z: Float[Array, "R K"]
    value: Float[Array, "R"]
    # Newton's step from here, the inverse root S of the curvature (S S^T its inverse), and the share of the step tried next.
    step: Float[Array, "R K"]
    root: Float[Array, "R K K"]
    share: Float[Array, "R"]
    # Length of the step in sds.
    length: Float[Array, "R"]
    count: Any


def integrate_units(
    values: Callable[[Float[Array, "R K"]], Float[Array, "R"]],
    frozen: Callable[[Float[Array, "R K"]], Float[Array, "R"]],
    start: Float[Array, "R K"],
    mask: Bool[Array, "R"],
) -> Integrated:
    r"""Integrate every unit's own latents out of ``exp f_u(theta, z_u)``.

    With ``z^`` the mode of ``f_u(theta, .)``, ``S S^T`` the inverse of its curvature there and nodes ``x_i`` with weights
    ``w_i`` for the standard normal, adaptive Gauss-Hermite quadrature is

        log int exp f(z) dz = log |S| + K/2 log 2 pi + log sum_i w_i exp(f(z^ + S x_i) + 1/2 |x_i|^2),

    exact where f is quadratic in z, whatever its width. Nodes do not move with theta when this is differentiated: the
    derivative is the mean of ``df/dtheta`` over z given theta and the data, as it is of the integral itself.

    Args:
        values: z of all units to the log density of every unit, nats; differentiable in what it closes over.
        frozen: the same with theta held fixed for differentiation, for the search of the mode.
        start: where to search from.
        mask: which units count; the others' values are zero.

    Returns:
        The integrals, and the moments of z.

    References:
        Liu and Pierce, A note on Gauss-Hermite quadrature, Biometrika 81 (1994), eq. 3. Pinheiro and Bates, Approximations
        to the log-likelihood function in the nonlinear mixed-effects model, JCGS 4 (1995), section 2.4.
    """
    width, dtype = start.shape[-1], start.dtype
    nodes, log_weight = (jnp.asarray(x, dtype) for x in _rule(width))
    found = jax.lax.stop_gradient(_climb(lambda z: jnp.where(mask, frozen(z), 0.0), start, mask))
    z = found.z + jnp.einsum("rkj,ij->irk", found.root, nodes)
    logs = jax.vmap(lambda z: jnp.where(mask, values(z), 0.0))(z)
    logs = logs + (log_weight + 0.5 * jnp.sum(nodes**2, axis=-1))[:, None]
    # A node where the density overflows has no weight.
    logs = jnp.where(jnp.isnan(logs), -jnp.inf, logs)
    scale = jnp.sum(jnp.log(jnp.abs(diagonal(found.root))), axis=-1) + 0.5 * width * _LOG_2PI
    value = jnp.where(mask, jax.nn.logsumexp(logs, axis=0) + scale, 0.0)
    share = jax.nn.softmax(logs, axis=0)
    mean = jnp.einsum("ir,irk->rk", share, z)
    gap = z - mean
    return Integrated(value, mean, symmetrise(jnp.einsum("ir,irk,irj->rkj", share, gap, gap)))


def _climb(values: Callable, start: Float[Array, "R K"], mask: Bool[Array, "R"]) -> _Climb:
    """The mode of every unit by Newton's method, each unit's step halved while its value would fall."""
    basis = jnp.eye(start.shape[-1], dtype=start.dtype)
    eps = jnp.finfo(start.dtype).eps

    def slope(z):
        return grad(lambda z: (jnp.sum(own := values(z)), own), has_aux=True)(z)

    def look(z):
        # Units do not see each other's latents: one tangent moves the k-th coordinate of all of them.
        (gradient, value), tangent = jax.linearize(slope, z)
        hessian = jax.vmap(lambda e: tangent(jnp.zeros_like(z) + e)[0])(basis)
        root = _curvature_root(-jnp.moveaxis(hessian, 0, -1), mask)
        white = jnp.einsum("rkj,rk->rj", root, gradient)
        length = jnp.sqrt(jnp.sum(white**2, axis=-1))
        return value, jnp.einsum("rkj,rj->rk", root, white), root, length

    def unfinished(climb: _Climb):
        busy = mask & ~(climb.length < _CENTRED) & (climb.share > 1e-6)
        return jnp.any(busy) & (climb.count < _NEWTON_STEPS)

    def advance(climb: _Climb) -> _Climb:
        z = climb.z + climb.share[:, None] * climb.step
        value, step, root, length = look(z)
        usable = jnp.isfinite(value) & jnp.isfinite(length) & jnp.all(jnp.isfinite(root), axis=(-2, -1))
        lowest = climb.value - _ROUNDING * eps * jnp.abs(climb.value)
        good = usable & ((value >= lowest) | ~jnp.isfinite(climb.value))
        share = jnp.where(good, jnp.minimum(2 * climb.share, 1.0), 0.25 * climb.share)
        new = _Climb(z, value, step, root, share, length, climb.count + 1)
        old = climb._replace(share=share, count=climb.count + 1)
        return _Climb(*(_pick(good, a, b) for a, b in zip(new[:-1], old[:-1], strict=True)), climb.count + 1)

    # The first step is none: the place where the search starts is looked at in the loop, so that one program does both.
    count = start.shape[0]
    low, one = jnp.full((count,), -jnp.inf, start.dtype), jnp.ones((count,), start.dtype)
    root = jnp.broadcast_to(basis, (count, *basis.shape))
    first = _Climb(start, low, jnp.zeros_like(start), root, one, jnp.inf * one, jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, first)


def _pick(good: Bool[Array, "R"], new: Array, old: Array) -> Array:
    return jnp.where(good.reshape(good.shape + (1,) * (new.ndim - 1)), new, old)


def _curvature_root(curvature: Float[Array, "R K K"], mask: Bool[Array, "R"]) -> Float[Array, "R K K"]:
    """``S`` with ``S S^T`` the inverse of the curvature, its eigenvalues by size: a saddle is left, not approached."""
    width = curvature.shape[-1]
    curvature = jnp.where(mask[:, None, None], curvature, jnp.eye(width, dtype=curvature.dtype))
    if width == 1:
        return 1.0 / jnp.sqrt(jnp.maximum(jnp.abs(curvature), _LEAST))
    values, vectors = jnp.linalg.eigh(symmetrise(jnp.where(jnp.isfinite(curvature), curvature, 0.0)))
    size = jnp.abs(values)
    size = jnp.maximum(size, jnp.maximum(_LEAST_SHARE * jnp.max(size, axis=-1, keepdims=True), _LEAST))
    factor, _ = scaled_cholesky(jnp.einsum("rik,rk,rjk->rij", vectors, size, vectors))
    return inverse_root(factor)


@functools.cache
def _rule(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and log weights for a standard normal in so many dimensions."""
    if width in _NODES:
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES[width])
        points = np.stack([g.ravel() for g in np.meshgrid(*[nodes] * width, indexing="ij")], axis=-1)
        logs = np.log(weights / weights.sum())
        return points, np.sum([g.ravel() for g in np.meshgrid(*[logs] * width, indexing="ij")], axis=0)
    from scipy.special import ndtri
    from scipy.stats import qmc

    sobol = qmc.Sobol(width, scramble=True, rng=np.random.default_rng(0)).random(_QUASI_POINTS // 2)
    half = ndtri(np.clip(sobol, 1.0 / _QUASI_POINTS, 1.0 - 1.0 / _QUASI_POINTS))
    points = np.concatenate([half, -half])
    back = np.linalg.inv(np.linalg.cholesky(points.T @ points / _QUASI_POINTS))
    return points @ back.T, np.full(_QUASI_POINTS, -math.log(_QUASI_POINTS))


def nodes_of(width: int) -> int:
    """Points at which a unit's density is looked at for one integral over ``width`` latents."""
    return _NODES[width] ** width if width in _NODES else _QUASI_POINTS


def as_conditional(
    mean: Float[Array, "S R K"], covariance: Float[Array, "S R K K"], eps: Float[Array, "S D"]
) -> tuple[Float[Array, "R K"], Float[Array, "R K D"], Float[Array, "R K K"]]:
    """The affine Gaussian of z given whitened theta with the first two moments of (theta, z).

    ``mean``: of z given theta, at the points; ``eps``: the points, whose own mean is 0 and whose own covariance is the
    identity. Returns mean at the centre, slope, and what covariance is left.
    """
    center = jnp.mean(mean, axis=0)
    slope = jnp.einsum("srk,sd->rkd", mean, eps) / eps.shape[0]
    # What the line leaves is squared itself: no difference of large numbers.
    rest = mean - center - jnp.einsum("rkd,sd->srk", slope, eps)
    left = jnp.mean(covariance, axis=0) + jnp.einsum("srk,srj->rkj", rest, rest) / eps.shape[0]
    return center, slope, symmetrise(left)


# ---------------------------------------------------------------------------------- factors of the shared latents alone
# Factors whose groups have latents of their own, as functions of the shared latents alone.

# Points of q under which values and conditionals are averaged: at least so many, and so many per latent.
_LEAST_POINTS, _PER_LATENT = 32, 4
# Numbers of rows, nodes and points that are held at once.
_AT_ONCE = 1 << 20
# Seed of the points: the same at every q, so that values of two q compare.
_SEED = 0x1A7


@dataclasses.dataclass(frozen=True)
class IntegratedProgram:
    """``E_q`` of ``log p(y_m | theta)`` with a group's own latents integrated out at every theta.

    The value is that of q(theta) with the exact conditional of the local latents, ``E_q[log int p(y, z | theta) dz]``, a
    tighter bound than that of any Gaussian over both. Averages are over a fixed set of points of q whose own mean and
    covariance are q's, so that they are exact for quadratic factors.

    ``unit_values``: ``(data, theta, z) -> nats``, log density of every unit's observations and latents, Float[R]; z Float[R K]
    unconstrained; ``rows``: most rows that one evaluation of a chunk reads, beside the units.
    """

    unit_values: Callable[[Any, Float[Array, "D"], Float[Array, "R K"]], Float[Array, "R"]]
    family: GaussianFamily
    rows: int
    noisy: bool = dataclasses.field(default=False, init=False)

    # One pass serves all groups.
    whole = False

    def working_bytes(self, chunks: LocalChunk) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes."""
        return 4 * min(self.cost(chunks.rows.linear.shape[-1]) * self._count, 4 * _AT_ONCE)

    def cost(self, width: int) -> int:
        """Numbers that one evaluation at one theta holds."""
        return max(1, self.rows * nodes_of(width))

    @property
    def _count(self) -> int:
        return max(_LEAST_POINTS, _PER_LATENT * self.family.dim)

    def integrate(self, chunk: LocalChunk, theta: Float[Array, "D"]) -> Integrated:
        """The units' integrals at one theta, searched from where their conditionals lie."""
        start = jax.lax.stop_gradient(conditional_moments(chunk.rows).mean(theta))
        return self._integrate(lambda at, z: self.unit_values(chunk.data, at, z), start, chunk.mask, theta)

    def _integrate(self, values: Callable, start, mask, theta) -> Integrated:
        still = jax.lax.stop_gradient(theta)
        start = jnp.where(jnp.isfinite(start), start, 0.0)
        return integrate_units(lambda z: values(theta, z), lambda z: values(still, z), start, mask)

    def log_density(self, chunk: LocalChunk, theta: Float[Array, "D"]) -> Float[Array, ""]:
        """``log int p(y, z | theta) dz`` of one chunk, nats; differentiable in theta."""
        return jnp.sum(self.integrate(chunk, theta).value)

    def expected(
        self, chunk: LocalChunk, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: rows, and the conditionals from which modes are searched; ``moments``: q(theta); ``probe``: Float[D] vector
        for the curvature product, or None; ``level``: unused; there is no rule to choose; ``noise``: unused; ``clip``: unused.
        Returns the chunk's expectations, without anything of the local latents.
        """
        eps = self.points(moments.loc.dtype)
        look = value_and_grad(lambda theta: self.log_density(chunk, theta))
        value, slope = self._map(look, self.family.draw(moments, eps), chunk)
        return self._expected(value, slope, eps, moments, probe)

    def match(self, chunk: LocalChunk, q: GaussianNatural, moments: GaussianMoments) -> ConditionalNatural:
        """The Gaussians of the units' latents with the moments of ``q(theta) p(z | theta, y)``.

        ``chunk``: rows, and their conditionals as they stand; ``q``: natural parameters of q(theta); ``moments``: the same as
        moments. Returns natural parameters by unit: affine in theta (full), or the marginals (mean-field). A unit whose moments
        are not finite keeps its own.
        """
        eps = self.points(moments.loc.dtype)
        found = self._map(lambda theta: self.integrate(chunk, theta), self.family.draw(moments, eps), chunk)
        return self._matched(found, chunk.rows, chunk.mask, eps, q, moments)

    def points(self, dtype: Any) -> Float[Array, "S D"]:
        """The points of a standard normal that stand for q."""
        return normal_cloud(jax.random.key(_SEED), self.family.dim, self._count, dtype).eps

    def _map(self, look: Callable, points: Float[Array, "S D"], chunk: LocalChunk) -> Any:
        batch = max(1, _AT_ONCE // self.cost(chunk.rows.linear.shape[-1]))
        if batch >= points.shape[0]:
            return jax.vmap(look)(points)
        return jax.lax.map(look, points, batch_size=batch)

    def _expected(self, value, slope, eps, moments: GaussianMoments, probe: Any) -> Expected:
        """Averages over points (leading axis S; any group axis behind it), curvature by Stein's identity."""
        mean, force = jnp.mean(value, axis=0), jnp.mean(slope, axis=0)
        tilt = jnp.einsum("sd,s...e->...de", eps, slope) / eps.shape[0]
        if self.family.full:
            # S^-T E[eps g^T] is the expected Hessian.
            curve = -symmetrise(jnp.linalg.solve(moments.scale.T, tilt))
            times = lambda v: curve @ v  # noqa: E731
        else:
            curve = -jnp.diagonal(tilt, axis1=-2, axis2=-1) / moments.scale
            times = lambda v: curve * v  # noqa: E731
        zero = jnp.zeros_like(mean)
        product = jnp.zeros_like(force) if probe is None else times(probe)
        return Expected(mean, GaussianNatural(force + times(moments.loc), curve), product, zero, zero, zero)

    def _matched(self, found: Integrated, old: ConditionalNatural, mask, eps, q, moments) -> ConditionalNatural:
        center, slope, left = as_conditional(found.mean, found.covariance, eps)
        if self.family.full:
            factor, good = scaled_cholesky(left)
            root = inverse_root(factor)
            precision = root @ jnp.swapaxes(root, -1, -2)
            # S^-T: whitened slopes in theta.
            slope = slope @ (q.precision @ moments.scale).T
            cross = -precision @ slope
            linear = jnp.einsum("rkj,rj->rk", precision, center - slope @ moments.loc)
        else:
            spread = jnp.diagonal(left, axis1=-2, axis2=-1) + jnp.sum(slope**2, axis=-1)
            good = jnp.all(spread > 0, axis=-1)
            precision, cross = 1.0 / spread, old.cross
            linear = precision * center
        for x in (linear, precision, cross):
            good = good & jnp.all(jnp.isfinite(x).reshape(x.shape[0], -1), axis=-1)
        keep = good & mask & moments.valid
        return jax.tree.map(
            lambda a, b: jnp.where(keep.reshape(keep.shape + (1,) * (a.ndim - 1)), a, b),
            ConditionalNatural(linear, precision, cross),
            old,
        )


@dataclasses.dataclass(frozen=True)
class MaskedIntegratedProgram(IntegratedProgram):
    """The same for models in which every group is a full pass over all rows: one pass for all groups together.

    ``group_of_unit``: Int[U]; ``rest``: theta to the log density of the rows that depend on no unit's latents, by group,
    Float[M]; None where there are none.
    """

    group_of_unit: Int[Array, "U"] = dataclasses.field(kw_only=True)
    num_groups: int = dataclasses.field(kw_only=True)
    rest: Callable[[Float[Array, "D"]], Float[Array, "M"]] | None = dataclasses.field(kw_only=True)

    whole = True

    def log_density(self, chunk: LocalChunk, theta: Float[Array, "D"]) -> Float[Array, ""]:
        """See :meth:`IntegratedProgram.log_density`."""
        own = super().log_density(chunk, theta)
        return own if self.rest is None else own + self.rest(theta)[chunk.data]

    def own(self, chunks: LocalChunk) -> LocalChunk:
        """All units once, each with its own group's conditional.

        ``chunks``: one chunk per group, of all units, stacked. Returns one chunk.
        """
        units = jnp.arange(self.group_of_unit.shape[0])
        rows = jax.tree.map(lambda x: x[self.group_of_unit, units], chunks.rows)
        return LocalChunk(jnp.int32(0), units, self.group_of_unit >= 0, rows)

    def log_densities(self, chunks: LocalChunk, theta: Float[Array, "D"]) -> Float[Array, "M"]:
        """Every group's log density at one theta, from one pass over all rows."""
        values = self.integrate(self.own(chunks), theta).value
        total = jax.ops.segment_sum(values, self.group_of_unit, self.num_groups)
        return total if self.rest is None else total + self.rest(theta)

    def log_densities_at(self, chunks: LocalChunk, points: Float[Array, "S D"]) -> Float[Array, "S M"]:
        """The same at many points."""
        return self._map(lambda theta: self.log_densities(chunks, theta), points, chunks)

    def expected_all(self, chunks: LocalChunk, moments: GaussianMoments, probe: Any, noise: Any) -> Expected:
        """Expectations of every group: see :meth:`expected`; leading axis M.

        ``chunks``: one chunk per group, of all units, stacked; ``moments``: q(theta); ``probe``: Float[D] vector for the
        curvature product, or None; ``noise``: unused. Returns the groups' expectations.
        """
        eps = self.points(moments.loc.dtype)

        def look(theta):
            value, tangent = jax.linearize(lambda at: self.log_densities(chunks, at), theta)
            return value, jax.vmap(tangent)(jnp.eye(theta.shape[0], dtype=theta.dtype)).T

        value, slope = self._map(look, self.family.draw(moments, eps), chunks)
        return self._expected(value, slope, eps, moments, probe)

    def match_all(self, chunks: LocalChunk, q: GaussianNatural, moments: GaussianMoments) -> ConditionalNatural:
        """Every unit's conditional: see :meth:`match`; in the slots of all groups' chunks."""
        found = self.match(self.own(chunks), q, moments)
        units = jnp.arange(self.group_of_unit.shape[0])
        return jax.tree.map(lambda x, y: x.at[self.group_of_unit, units].set(y), chunks.rows, found)


def owners(
    values: Callable[[Float[Array, "D"], Float[Array, "U K"]], dict[str, Float[Array, "N"]]],
    dim: int,
    shape: tuple[int, int],
    dtype: Any,
) -> dict[str, Int[Array, "N"]]:
    """Which unit's latents each row depends on, read off derivatives at a few points.

    With ``t = a_u w_k`` for a tangent of unit u's k-th latent, a row of unit u has a derivative ``a_u`` times that with ``a =
    1``: the ratio names the unit. ``values``: ``(theta, z) -> nats`` by row and sample site; ``dim``: D; ``shape``: U and K;
    ``dtype``: floating dtype. Returns units by sample site; -1 for rows that depend on none.
    """
    count, width = shape
    units = jnp.arange(count)
    # Two digits, each small enough to be read off a float32.
    base = max(1, int(count**0.5) + 1)
    high, low = (units // base + 1).astype(dtype), (units % base + 1).astype(dtype)
    found: dict[str, Any] = {}
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), 3)
        theta = 0.5 * jax.random.normal(keys[0], (dim,), dtype)
        z, weight = 0.5 * jax.random.normal(keys[1], shape, dtype), jax.random.uniform(keys[2], (width,), dtype) + 0.5
        _, tangent = jax.linearize(lambda z, theta=theta: values(theta, z), z)
        one, tall, small = (tangent(a[:, None] * weight) for a in (jnp.ones_like(high), high, low))
        for name in one:
            slope = one[name]
            known = jnp.isfinite(slope) & (slope != 0)
            digits = (jnp.round(x[name] / jnp.where(known, slope, 1.0)) - 1 for x in (tall, small))
            first, second = (jnp.where(known, x, 0.0).astype(jnp.int32) for x in digits)
            unit = jnp.where(known, first * base + second, -1)
            found[name] = jnp.where(found.get(name, unit) < 0, unit, found.get(name, unit))
    return found
