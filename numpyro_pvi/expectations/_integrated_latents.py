"""Factors whose groups have latents of their own, which are integrated out at every value of the shared ones."""

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

from .._numerics import diagonal, grad, in_batches, inverse_root, scaled_cholesky, symmetrise, value_and_grad
from ..families import ConditionalNatural, GaussianFamily, GaussianMoments, GaussianNatural, conditional_moments
from ._expected import Expected, ProgramDefaults
from ._local_latents import LocalChunk, pick
from ._tilted import normal_cloud

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
        return _Climb(*(pick(good, a, b) for a, b in zip(new[:-1], old[:-1], strict=True)), climb.count + 1)

    # The first step is none: the place where the search starts is looked at in the loop, so that one program does both.
    count = start.shape[0]
    low, one = jnp.full((count,), -jnp.inf, start.dtype), jnp.ones((count,), start.dtype)
    root = jnp.broadcast_to(basis, (count, *basis.shape))
    first = _Climb(start, low, jnp.zeros_like(start), root, one, jnp.inf * one, jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, first)


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
class IntegratedProgram(ProgramDefaults):
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
        return in_batches(look, points, _AT_ONCE // self.cost(chunk.rows.linear.shape[-1]))

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
