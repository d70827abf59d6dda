"""Expectations from sigma points and from random points, whether they agree, and log densities at any points.

A set of P antithetic pairs ``loc +- S eps_k`` with weights ``w_k``, ``sum_k w_k eps_k eps_k^T = I``, and its centre give

    E[f]      =  f(loc) + sum_k w_k ((f_k^+ + f_k^-) / 2 - f(loc)),
    E[grad f] =  the same sum over gradients,
    E[hess f] =  sym S^-T sum_k w_k eps_k (g_k^+ - g_k^-)^T / 2         (Stein's identity, E[Lambda (theta - m) grad f^T]),

all exact for cubic f, and further where the set is a product of Gauss-Hermite rules, which few latents allow. The gradient may
jump: no second derivative is ever taken. Where f itself jumps its gradient does not say by how much, and what it leaves of f
beside the quadratic with these expectations, ``r``, has expectations of its own, by values:

    E[grad r] = S^-T E[eps r],    E[hess r] = S^-T E[(eps eps^T - I) r] S^-1           (Bonnet's and Price's theorems, by parts).

For an f that does not jump both are zero in expectation: the quadratic's curvature is that of the other blocks of points, so that
it does not hang together with those that it is taken off at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import all_finite, clip_to_psd, grad, in_batches, invert_lower, value_and_grad
from ..factors import term_log_prob
from ..families import GaussianFamily, GaussianMoments, NormalFamily
from ._affine import AffineProgram, SharedAffineProgram
from ._expected import Expected, ProgramDefaults, QuadraticProgram
from ._integrated_latents import IntegratedProgram
from ._point_sets import (
    PointSet,
    disagreement,
    either_points,
    product_arrays,
    product_rule,
    random_points,
    sigma_arrays,
    sigma_points,
)


@dataclasses.dataclass(frozen=True)
class PointsProgram(ProgramDefaults):
    """``E_q`` of a factor without structure, by values and gradients.

    ``log_density``: ``(data, point) -> nats``, the factor on one chunk's rows; ``mode``: "sigma_points" (the same points at
    every q), "monte_carlo" (fresh random rotations and radii every round), "values" (the same, with what gradients do not say of
    a factor that jumps), or "auto" (sigma points while a few random draws agree with them; then a product rule while these and a
    coarser one agree with it; then random points); ``num_pairs``: antithetic pairs of a random set, rounded up to whole
    rotations; ``nodes``: of a product rule, along every axis, 0 where there is none: see :func:`product_nodes`.
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: GaussianFamily
    mode: str = "auto"
    num_pairs: int = 16
    nodes: int = 0

    @property
    def noisy(self) -> bool:
        """Whether rounds need draws."""
        return self.mode != "sigma_points"

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: not known of a model in general."""
        return 0

    def draw(self, key: Any, dtype: Any) -> PointSet | None:
        """A round's random points, or None where none are needed."""
        if not self.noisy:
            return None
        dim, pairs = self.family.dim, self.num_pairs
        if self.mode != "values":
            return random_points(key, dim, pairs, dtype)
        # At least two blocks, and independent ones, their radii too: each is told the curvature by the others.
        size = sigma_arrays(dim)[0].shape[0]
        keys = jax.random.split(key, max(2, -(-pairs // size)))
        eps, weight = jax.vmap(lambda own: random_points(own, dim, size, dtype)[:2])(keys)
        return PointSet(eps[:, 0], weight[:, 0], len(keys))

    def choose(
        self,
        random: PointSet | None,
        sampled: Bool[Array, ""] | bool,
        dtype: Any,
        trial: bool = False,
        finer: Bool[Array, ""] | bool = False,
    ) -> PointSet:
        """The points to use.

        ``random``: what :meth:`draw` gave, or None; ``sampled``: whether random points take the place of all others ("auto"
        only); ``dtype``: of the sigma points; ``trial``: whether values alone will do of random points; ``finer``: whether a
        product rule, where there is one, takes the place of sigma points ("auto" only). Returns sigma points, a product rule, or
        the random ones, as the mode and the flags say.
        """
        sigma = sigma_points(self.family.dim, dtype)
        if random is None or self.mode == "sigma_points":
            return sigma
        if self.mode in ("monte_carlo", "values"):
            return random._replace(slopes=not trial)
        fixed = sigma
        if self.nodes:
            fixed = either_points(jnp.asarray(finer), product_rule(self.family.dim, self.nodes, dtype), sigma)
        else:
            # Sigma points that gave way to a rule which more rows have none of: they do not stand for it.
            sampled = jnp.asarray(sampled) | finer
        return either_points(jnp.asarray(sampled), random, fixed)._replace(
            slopes=jnp.logical_not(sampled) if trial else True
        )

    @property
    def refinable(self) -> bool:
        """Whether there is something finer than sigma points before draws."""
        return self.mode == "auto" and self.nodes > 0

    def contradicted(
        self,
        moments: GaussianMoments,
        factor: Expected,
        draws: Float[Array, "K D"],
        pairs: Callable[[Float[Array, "L D"]], Expected],
        before: Bool[Array, ""],
        finer: Bool[Array, ""],
    ) -> Bool[Array, ""]:
        """Whether expectations at fixed points are contradicted by random draws or, of a product rule, by a coarser one.

        ``moments``: q; ``factor``: the expectations, summed over groups; ``draws``: standard normal; ``pairs``: what :meth:`pair`
        finds at each of many points (leading axis), summed over groups; ``before``: whether draws have contradicted sigma points
        before; ``finer``: whether the points are a product rule. See :func:`disagreement`.
        """
        if not self.refinable:
            return disagreement(self.family, moments, factor, draws, pairs(draws), before)
        coarse, weight = (jnp.asarray(x, draws.dtype) for x in product_arrays(self.family.dim, self.nodes - 1, True))
        # One place for both: the density is most of what is compiled.
        found, judged = pairs(jnp.concatenate([draws, coarse])), partial(disagreement, self.family, moments, factor)
        by_draws, by_rule = (jax.tree.map(f, found) for f in (lambda x: x[: len(draws)], lambda x: x[len(draws) :]))
        # However much a factor varies about its quadratic model, a product rule knows it. Where it is no number at the same nodes
        # round after round, draws are at other places.
        lost = ~(jnp.isfinite(factor.value) & all_finite(factor.target))
        wrong = judged(draws, by_draws, before & ~finer, telling=~finer)
        return wrong | (finer & (lost | judged(coarse, by_rule, weight=weight)))

    def expected(
        self, chunk: Any, moments: GaussianMoments, probe: Any, level: Any, noise: PointSet, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: the chunk's data; ``moments``: q; ``probe``: Float[D] vector for the curvature product, or None; ``level``: a
        Python int where the result is to be differentiated in reverse mode; not used otherwise; ``noise``: the points;
        ``clip``: whether (a bool, traced or not) to raise the curvature to positive semi-definite. Returns the chunk's
        expectations.
        """
        if noise.slopes is True:
            value, gradient, cross = self._sums(chunk, moments, noise, unrolled=isinstance(level, int))
        elif noise.slopes is False:
            value, gradient, cross = self._values(chunk, moments, noise)
        else:
            value, gradient, cross = jax.lax.cond(
                noise.slopes,
                lambda: self._sums(chunk, moments, noise, unrolled=False),
                lambda: self._values(chunk, moments, noise),
            )
        curvature = -self._from_whitened(moments, cross)
        if clip is not False:
            clipped = clip_to_psd(curvature) if self.family.full else jnp.clip(curvature, 0.0, None)
            curvature = jnp.where(clip, clipped, curvature)
        product = jnp.zeros_like(moments.loc)
        if probe is not None:
            product = curvature @ probe if self.family.full else self._dense(moments, cross) @ probe
        pull = curvature @ moments.loc if self.family.full else curvature * moments.loc
        return Expected(value, self.family.natural(gradient + pull, curvature), product, *(jnp.zeros_like(value),) * 3)

    def pair(self, chunk: Any, moments: GaussianMoments, eps: Float[Array, "D"]) -> Expected:
        """One antithetic pair of draws, in the form that chunks are summed in.

        ``chunk``: the chunk's data; ``moments``: q; ``eps``: a standard normal draw. Returns ``value`` and
        ``target.precision_mean`` are the means of the two values and gradients, ``product`` is half the difference of the
        gradients; the rest is zero.
        """
        points = self.family.draw(moments, jnp.stack([eps, -eps]))
        value, gradient = self._look(chunk, points)
        zeros = self.family.zeros((), eps.dtype)
        target = dataclasses.replace(zeros, precision_mean=jnp.mean(gradient, axis=0))
        odd = 0.5 * (gradient[0] - gradient[1])
        return Expected(jnp.mean(value), target, odd, *(jnp.zeros((), eps.dtype),) * 3)

    def _values(self, chunk, moments: GaussianMoments, points: PointSet):
        """As :meth:`_sums` with zeros for everything but the value."""
        dim = self.family.dim
        eps = points.eps.reshape(-1, dim)
        at = self.family.draw(moments, jnp.concatenate([jnp.zeros((1, dim), eps.dtype), eps, -eps]))
        value = jax.vmap(lambda point: self.log_density(chunk, point))(at)
        plus, minus = jnp.split(value[1:], 2)
        even = points.weight.reshape(-1) @ (0.5 * (plus + minus) - value[0])
        total = value[0] + even / jnp.asarray(points.count, even.dtype)
        return total, jnp.zeros((dim,), eps.dtype), jnp.zeros((dim, dim), eps.dtype)

    def _look(self, chunk, points):
        return jax.vmap(lambda point: value_and_grad(self.log_density, argnums=1)(chunk, point))(points)

    def _sums(self, chunk, moments: GaussianMoments, points: PointSet, unrolled: bool) -> Any:
        """Value, gradient and ``sum_k w_k eps_k (g_k^+ - g_k^-)^T / 2``, averaged over the blocks in use."""
        blocks, pairs, dim = points.eps.shape

        def block(eps, weight):
            centre = jnp.zeros((1, dim), eps.dtype)
            value, gradient = self._look(chunk, self.family.draw(moments, jnp.concatenate([centre, eps, -eps])))
            plus, minus = slice(1, pairs + 1), slice(pairs + 1, None)
            even = 0.5 * (value[plus] + value[minus]) - value[0]
            slope = weight @ (0.5 * (gradient[plus] + gradient[minus]) - gradient[0])
            cross = (weight[:, None] * eps).T @ (0.5 * (gradient[plus] - gradient[minus]))
            found = value[0] + weight @ even, gradient[0] + slope, cross
            return (*found, even, 0.5 * (value[plus] - value[minus])) if self.mode == "values" else found

        if self.mode == "values":
            return self._with_jumps(moments, points, jax.lax.map(lambda xs: block(*xs), (points.eps, points.weight)))
        if blocks == 1:
            return block(points.eps[0], points.weight[0])
        if unrolled:
            used = jnp.arange(blocks) < points.count
            found = jax.lax.map(lambda xs: block(*xs), (points.eps, points.weight))
            totals = jax.tree.map(lambda x: jnp.tensordot(used.astype(x.dtype), x, axes=1), found)
        else:
            # One trace serves for the shapes and for the loop.
            block = jax.jit(block, inline=True)
            shapes = jax.eval_shape(block, points.eps[0], points.weight[0])
            zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            totals = jax.lax.fori_loop(
                0,
                points.count,
                lambda i, total: jax.tree.map(jnp.add, total, block(points.eps[i], points.weight[i])),
                zero,
            )
        return jax.tree.map(lambda x: x / jnp.asarray(points.count, x.dtype), totals)

    def _with_jumps(self, moments: GaussianMoments, points: PointSet, found: tuple) -> tuple:
        """Value, gradient and cross sums of all blocks with what gradients leave of values: see the top of the module.

        ``found``: by block value, gradient, cross sums, half the sums of the pairs' values less the centre's, and half their
        differences. The value has the same derivatives in q's moments.
        """
        eps, weight, count = points.eps, points.weight, points.eps.shape[0]
        value, gradient, cross = (jnp.mean(x, axis=0) for x in found[:3])
        root = moments.scale if self.family.full else jnp.diag(moments.scale)
        inverse = invert_lower(moments.scale.T).T if self.family.full else jnp.diag(1.0 / moments.scale)
        _, slopes, bends, even, odd = jax.lax.stop_gradient(found)
        root_held, inverse = jax.lax.stop_gradient((root, inverse))
        # Weights times eps eps^T add up to the identity in every block: its own gradient may be taken off at its own points.
        odd = odd - jnp.einsum("bpi,bi->bp", eps, slopes @ root_held)
        slope = inverse.T @ (jnp.einsum("bpi,bp->i", eps, weight * odd) / count)
        bends = bends @ root_held
        bends = 0.5 * (bends + jnp.swapaxes(bends, 1, 2))
        others = (jnp.sum(bends, axis=0) - bends) / max(count - 1, 1)
        share = weight * (even - 0.5 * jnp.einsum("bpi,bij,bpj->bp", eps, others, eps))
        second = jnp.einsum("bpi,bp,bpj->ij", eps, share, eps) - jnp.sum(share) * jnp.eye(
            eps.shape[-1], dtype=eps.dtype
        )
        # By blocks the others' curvature has the mean that all have.
        second = second / count
        hessian = inverse.T @ second @ inverse
        moved = slope @ moments.loc + 0.5 * jnp.sum(hessian * (root @ root.T))
        return value + moved - jax.lax.stop_gradient(moved), gradient + slope, cross + second @ inverse

    def _dense(self, moments: GaussianMoments, cross: Float[Array, "D D"]) -> Float[Array, "D D"]:
        """``-E[hess f]`` under a mean-field q, its off-diagonal entries included."""
        scaled = cross / moments.scale[:, None]
        return -0.5 * (scaled + scaled.T)

    def _from_whitened(self, moments: GaussianMoments, cross: Float[Array, "D D"]) -> Array:
        if not self.family.full:
            return jnp.diagonal(cross) / moments.scale
        hessian = invert_lower(moments.scale.T) @ cross
        return 0.5 * (hessian + hessian.T)


# ------------------------------------------------------------------------------------------------------ reparameterised
# Expectations by antithetic reparameterised draws for a mean-field q in many dimensions: nothing is D x D.

# Pairs from which the correction by the others' coefficient lowers the variance.
_ENOUGH = 6


@dataclasses.dataclass(frozen=True)
class ReparameterisedProgram(ProgramDefaults):
    """``E_q`` by pairs ``theta = loc +- sd * eps``, with two gradients and no Hessian a pair.

    The gradient is ``E[grad f]``; the diagonal of the curvature is Stein's identity under the reparameterisation,

        -E[hess f]_dd = -E[(eps_d / sd_d) grad_d f],

    from the half-difference of a pair's gradients, which the gradient at ``loc`` has left. The part of it that is
    proportional to ``eps_d^2 - 1`` (all of it for a factor that is quadratic and separable) is taken off with the
    coefficient that the *other* draws give, so that the estimate stays unbiased (of S pairs this leaves a variance of
    8 / (S (S - 1)) squared curvatures in place of 2 / S, so it is done from six pairs on). It needs no second derivative, hence is
    right where the gradient jumps (ReLU, Laplace). Memory is a handful of vectors of length D, whatever the number of
    draws.

    Args:
        log_density: ``(data, point) -> nats``, the factor on one chunk's rows.
        family: the mean-field Gaussian family of q.
        by_values: whether what gradients leave of a factor that jumps is added by values, as in :class:`PointsProgram`.

    References:
        Khan and Rue, The Bayesian Learning Rule, eq. 10 and 11 (Bonnet's and Price's theorems).
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: NormalFamily
    by_values: bool = False
    noisy: bool = dataclasses.field(default=True, init=False)

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: a few vectors of length D."""
        return 8 * self.family.dim * jnp.dtype(jnp.result_type(float)).itemsize

    def expected(
        self, chunk: tuple, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: ``(data, mask)``; ``moments``: q; ``probe``: Float[D] vector for the curvature product, or None. The product
        is a central difference of the mean gradient along it, on the same draws; ``level``: unused; there is no rule to choose;
        ``noise``: Float[S D] standard normal draws; each is used with both signs; ``clip``: whether (a bool, traced or not) to
        raise negative curvatures to zero. Returns the chunk's expectations.
        """
        loc, sd = moments.loc, moments.scale
        value_and_gradient = value_and_grad(self.log_density, argnums=1)
        zero = jnp.zeros_like(loc)

        def pair(total, eps):
            value, gradient, bend, weighted, product = total
            up, grad_up = value_and_gradient(chunk, loc + sd * eps)
            down, grad_down = value_and_gradient(chunk, loc - sd * eps)
            turn = 0.5 * eps * (grad_up - grad_down)
            product = product if probe is None else product + self._secant(chunk, moments, eps, probe)
            mean = 0.5 * (grad_up + grad_down)
            added = (value + 0.5 * (up + down), gradient + mean)
            own = None
            if self.by_values:
                # What the pair's own gradient and curvature would take off at its own points.
                square = eps**2 - 1
                own = (
                    0.5 * (up + down),
                    0.5 * (up - down),
                    eps * (eps @ (sd * mean)),
                    0.5 * square * (square @ (sd * turn)),
                )
            return (*added, bend + turn, weighted + turn * eps**2, product), own

        first = (jnp.zeros((), loc.dtype), zero, zero, zero, zero)
        totals, pairs = jax.lax.scan(pair, first, noise)
        count = noise.shape[0]
        value, gradient, bend, weighted, product = totals
        own_bend = sd * bend / count
        if count >= _ENOUGH:
            square = jnp.sum(noise**2, axis=0)
            bend = bend - (bend * (square - count + 1) - weighted) / (count - 1)
        precision = -bend / (count * sd)
        if clip is not False:
            precision = jnp.where(clip, jnp.clip(precision, 0.0, None), precision)
        gradient, value = gradient / count, value / count
        if self.by_values:
            own = noise, own_bend, pairs, clip
            gradient, precision, value = self._with_jumps(moments, gradient, value, *own)
        target = self.family.natural(gradient + precision * loc, precision)
        nothing = jnp.zeros((), loc.dtype)
        return Expected(value, target, product / count, nothing, nothing, nothing)

    def _with_jumps(self, moments, gradient, value, noise: Float[Array, "S D"], bend, found: tuple, clip: Any):
        """Gradient, precision and value with what gradients leave of the pairs' values, as in :class:`PointsProgram`.

        At every pair the quadratic that is taken off is that of all others. ``bend``: mean of the pairs' own curvatures in
        whitened coordinates; ``found``: of every pair half the sum and the difference of its values, and what its own gradient and
        curvature would take off.
        """
        count, (even, odd, by_slope, by_bend) = noise.shape[0], found
        square, sd = noise**2 - 1, jax.lax.stop_gradient(moments.scale)
        even, odd, whole, bend, by_slope, by_bend = jax.lax.stop_gradient(
            (even, odd, gradient, bend, by_slope, by_bend)
        )

        def of_others(all_of_it: Array, own: Array) -> Array:
            # From sums with everybody's and with one's own.
            return (count * jnp.mean(all_of_it, axis=0) - jnp.mean(own, axis=0)) / max(count - 1, 1)

        linear = of_others(noise * (noise @ (sd * whole))[:, None], by_slope)
        # Of a single pair there are no others.
        there = float(count > 1)
        slope = (jnp.mean(noise * odd[:, None], axis=0) - linear) / sd + there * whole
        curved = of_others(0.5 * square * (square @ bend)[:, None], by_bend)
        level = of_others(square * jnp.mean(even), square * even[:, None])
        hessian = (jnp.mean(square * even[:, None], axis=0) - level - curved + there * bend) / sd**2
        jump, precision = slope - whole, -hessian
        if clip is not False:
            precision = jnp.where(clip, jnp.clip(precision, 0.0, None), precision)
        # The value's own derivative in a deviation is the pairs' own curvature times it.
        moved = jump @ moments.loc + 0.5 * (hessian - bend / sd**2) @ moments.scale**2
        return gradient + jump, precision, value + moved - jax.lax.stop_gradient(moved)

    def _secant(self, chunk: tuple, moments: GaussianMoments, eps, probe) -> Float[Array, "D"]:
        """``-E[hess f] @ probe`` from one draw: a difference of gradients sees the jumps that a Hessian misses."""
        gradient = grad(self.log_density, argnums=1)
        point = moments.loc + moments.scale * eps
        return 0.5 * (gradient(chunk, point - probe) - gradient(chunk, point + probe))


# ---------------------------------------------------------------------------------------------- log densities at points
# Log densities of one chunk's rows at points, whatever the structure that was found.

# Rows times points that are evaluated at once.
_AT_ONCE = 1 << 18


@singledispatch
def log_density_at(program: Any, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    """The log density of one chunk's rows at one point of the flat unconstrained space, in nats.

    ``program``: the program of the expectations of the chunk; ``chunk``: its arrays; ``point``: where. Returns the sum over the
    chunk's rows; differentiable in ``point``.
    """
    raise TypeError(f"{type(program).__name__} has no log density at a point of the shared latents alone")


@log_density_at.register
def _(program: AffineProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    total = jnp.zeros((), point.dtype)
    for spec, (data, mask) in zip(program.terms, chunk, strict=True):
        predictors = tuple(a @ point + c for a, c in zip(data.design, data.offset, strict=True))
        total = total + jnp.sum(jnp.where(mask, term_log_prob(spec, data, predictors), 0.0))
    return total


@log_density_at.register
def _(program: SharedAffineProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    return log_density_at(program.program, program.program.mask(program.data, program.masks(chunk)), point)


@log_density_at.register
def _(program: QuadraticProgram, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    away = point - chunk.point
    return chunk.value + away @ chunk.slope - 0.5 * away @ (chunk.target.precision @ away)


@log_density_at.register(IntegratedProgram)
@log_density_at.register(PointsProgram)
@log_density_at.register(ReparameterisedProgram)
def _(program: Any, chunk: Any, point: Float[Array, "D"]) -> Float[Array, ""]:
    return program.log_density(chunk, point)


def log_densities_at(program: Any, chunk: Any, points: Float[Array, "S D"]) -> Float[Array, "S"]:
    """:func:`log_density_at` at many points, in batches of bounded size."""
    rows = max((x.shape[0] for x in jax.tree.leaves(chunk) if jnp.ndim(x) > 0), default=1)
    if isinstance(program, IntegratedProgram):
        rows = program.cost(chunk.rows.linear.shape[-1])
    return in_batches(lambda point: log_density_at(program, chunk, point), points, _AT_ONCE // rows)
