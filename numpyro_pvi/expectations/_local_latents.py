"""Factors whose groups have latents of their own, taken together with the shared ones: by draws, or by fixed points."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._numerics import diagonal, grad, hessian_of, invert_lower, value_and_grad
from ..families import (
    ConditionalMoments,
    ConditionalNatural,
    GaussianFamily,
    GaussianMoments,
    bounded_precision,
    conditional_moments,
)
from ._expected import Expected, ProgramDefaults
from ._point_sets import FixedRule, JointRules, differing
from ._tilted import shifted_normals


class LocalNoise(NamedTuple):
    """Standard normal draws of one round, see :func:`own_normals`, and whether fixed points take their place."""

    # For the shared latents; all groups use the same.
    shared: Float[Array, "S D"]
    # For every unit's (plate index's) local latents, so that a unit's draws do not depend on the partition; those after the first S
    # are for the curvature that corrects values.
    local: Float[Array, "U T K"]
    # Whether draws are in use; of fixed points, whether those are that others are held to.
    sampled: Bool[Array, ""] | bool = True
    checking: Bool[Array, ""] | bool = False
    # Which batch of the draws is in use, of those that fixed points are compared with; all where it is negative, or None.
    batch: Int[Array, ""] | None = None


# Pairs whose curvature corrects values: one for so many, up to so many. Four leave .95 to 1.4 times the noise that the draws' own
# curvature does (graded responses, Gamma-Poisson, measurement error).
_PAIRS_A_CORRECTION, _MOST_CORRECTIONS = 4, 4
# Batches of a round's draws, each with its own expectations, that fixed points are compared with.
_BATCHES = 3
# Of the shared latents' part in corrections, which is the same in every round; and what makes the key of the others. A small number
# would give one of the keys that the round's own draws are of: splitting a key folds numbers from 0 in.
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


def _weigh(weight: Float[Array, "P"], x: Float[Array, "P ..."]) -> Array:
    """A weighted sum over points, of those that count; no product of matrices, which accelerators take in half the digits."""
    weight = weight.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.sum(jnp.where(weight != 0, weight * x, 0.0), axis=0)


@dataclasses.dataclass(frozen=True)
class _Points:
    """The points of one evaluation in blocks about as large as the draws: these in one, or fixed ones in as many as they need.

    ``shared``, ``local``: draws with both signs, leading axis P; ``count``: of the round's, the others correct values; ``noise``:
    which points are in use; ``rules``: the fixed ones, or None where there are none; ``unrolled``: whether the loop over blocks is
    to be differentiated in reverse mode.
    """

    shared: Float[Array, "P D"]
    local: Float[Array, "P R K"]
    count: int
    noise: LocalNoise
    rules: JointRules | None
    unrolled: bool

    @classmethod
    def of(cls, noise: LocalNoise, local: Float[Array, "R T K"], rules: JointRules | None, unrolled: bool) -> _Points:
        """``local``: draws of the rows at hand; see :class:`_Points` for the others."""
        return cls(*_both_signs(noise, local), noise, rules, unrolled)

    @property
    def own(self) -> Float[Array, "P"]:
        """Weights of the draws: of the round's, or of a batch of them."""
        pairs, place = self.count // 2, jnp.arange(self.shared.shape[0])
        weight = jnp.where(place < self.count, 1 / self.count, 0.0).astype(self.shared.dtype)
        if (batch := self.noise.batch) is None:
            return weight
        size = pairs // min(_BATCHES, pairs)
        there = (place < self.count) & (place % pairs // size == batch)
        return jnp.where(batch < 0, weight, jnp.where(there, 0.5 / size, 0.0).astype(weight.dtype))

    def mean(self, x: Float[Array, "S ..."]) -> Array:
        """Mean over the draws of what there is at each of the round's."""
        return _weigh(self.own[: self.count], x)

    def means(self, look: Callable, place: Callable) -> tuple[Any, Any]:
        """Means over the points that are in use, and, where these are draws, over those that correct values.

        ``look``: theta and z to arrays; ``place``: whitened points of both, with a leading axis, to these.
        """
        size, own = self.shared.shape[0], self.own
        apart = jnp.where(jnp.arange(size) < self.count, 0.0, 1 / max(size - self.count, 1)).astype(own.dtype)
        look_at = jax.vmap(look)

        def block(shared: Array, local: Array, *weights: Array) -> tuple[Any, Any]:
            found = look_at(*place(shared, local))
            return tuple(jax.tree.map(partial(_weigh, w), found) for w in weights)  # type: ignore[return-value]

        if self.rules is None:
            return block(self.shared, self.local, own, apart)
        # Where fixed points are a few more than draws these are filled up, and not those to twice as many.
        blocks = max(1, round(len(self.rules.used.weight) / size))
        most = max(size, -(-len(self.rules.used.weight) // blocks))
        drawn = tuple(
            jnp.pad(x, [(0, most - size)] + [(0, 0)] * (x.ndim - 1)) for x in (self.shared, self.local, own, apart)
        )
        eps, weight, count = self._fixed(self.rules, most)
        dim, sampled = self.shared.shape[1], jnp.asarray(self.noise.sampled)

        def at(i: Any) -> tuple[Any, Any]:
            local = jnp.broadcast_to(eps[i][:, None, dim:], drawn[1].shape)
            both = drawn, (eps[i][:, :dim], local, weight[i], weight[i])
            return block(*jax.tree.map(partial(jnp.where, sampled), *both))

        if self.unrolled:
            used = jnp.arange(len(eps)) < jnp.where(sampled, 1, count)
            found = jax.lax.map(
                lambda i: jax.tree.map(lambda x: jnp.where(used[i], x, 0.0), at(i)), jnp.arange(len(eps))
            )
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), found)
        # One trace serves for the shapes and for the loop.
        at = jax.jit(at, inline=True)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(at, 0))
        count = jnp.where(sampled, 1, count)
        return jax.lax.fori_loop(0, count, lambda i, total: jax.tree.map(jnp.add, total, at(i)), zero)

    def _fixed(self, rules: JointRules, size: int) -> tuple[Array, Array, Array]:
        """Points and weights of the fixed rule that is meant, in blocks of a size, and how many of these it has."""
        dtype, checking = self.shared.dtype, self.noise.checking
        if checking is False:
            eps, weight = _blocks(rules.used, size, 1)
            return jnp.asarray(eps, dtype), jnp.asarray(weight, dtype), jnp.asarray(len(eps))
        both = rules.used, rules.check
        blocks = [-(-len(r.weight) // size) for r in both]
        eps, weight = (np.stack(x) for x in zip(*(_blocks(r, size, max(blocks)) for r in both), strict=True))
        which = jnp.asarray(checking, jnp.int32)
        return jnp.asarray(eps, dtype)[which], jnp.asarray(weight, dtype)[which], jnp.asarray(blocks)[which]

    def corrects(self, correction: Array) -> Array:
        """What draws' own second moments are off; those of fixed points are not."""
        return correction if self.rules is None else jnp.where(self.noise.sampled, correction, 0.0)


def _blocks(rule: FixedRule, size: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """A rule in blocks of so many points, filled up with some that do not count to at least so many blocks."""
    count = max(least, -(-len(rule.weight) // size))
    spare = size * count - len(rule.weight)
    eps, weight = np.pad(rule.eps, [(0, spare), (0, 0)]), np.pad(rule.weight, (0, spare))
    return eps.reshape(count, size, -1), weight.reshape(count, size)


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


class _Seen(NamedTuple):
    """Products of scores (minus slopes of log q) with gradients, and with how far points are from the means, by block."""

    own: tuple
    cross: tuple
    shared: tuple


@dataclasses.dataclass(frozen=True)
class _Bends:
    """Mean curvature of a log density with kinks, of which its second derivatives see nothing.

    By Stein's identity ``E[hess f] = E[s grad f^T]``, s minus the slope of log q. Of the gradient only what the mean second
    derivatives leave over, ``grad f - E[hess] (x - E x)``, is taken so, which of quadratics is nothing at all: elsewhere
    it is noisy. Of a row's blocks the score is that of theta and the row's own latents alone.

    ``precision_root``: ``R^-T`` of the conditionals' roots R (their inverses, under a mean-field q); ``shared_root``: that of
    q(theta)'s; ``slope``: of the conditionals' means in theta, None under a mean-field q; ``mask``: which rows are there.

    References:
        Stein, Estimation of the mean of a multivariate normal distribution, 1981, lemma 2.
    """

    precision_root: Float[Array, "R K ..."]
    shared_root: Float[Array, "D ..."]
    slope: Float[Array, "R K D"] | None
    mask: Bool[Array, "R"]

    @classmethod
    def of(cls, moments: GaussianMoments, q: ConditionalMoments, mask: Bool[Array, "R"]) -> _Bends:
        """``moments``: q(theta); ``q``: the rows' conditionals."""
        if moments.scale.ndim == 1:
            return cls(1 / q.root, 1 / moments.scale, None, mask)
        return cls(invert_lower(jnp.swapaxes(q.root, -1, -2)), invert_lower(moments.scale.T), q.slope, mask)

    def scores(self, shared: Float[Array, "P D"], local: Float[Array, "P R K"]) -> tuple[Array, Array, Array]:
        """Of the rows' own latents, of theta alone (``S^-T e``), and of theta beside all rows, of whitened points."""
        if self.slope is None:
            alone = shared * self.shared_root
            return local * self.precision_root, alone, alone
        own = jnp.where(self.mask[:, None], jnp.einsum("rkj,prj->prk", self.precision_root, local), 0.0)
        alone = shared @ self.shared_root.T
        return own, alone, alone - jnp.einsum("rkd,prk->pd", self.slope, own)

    def products(
        self,
        gradient: tuple[Array, Array],
        at: tuple[Array, Array],
        middle: tuple[Array, Array],
        own: Float[Array, "R K"],
        alone: Float[Array, "D"],
        beside: Float[Array, "D"],
    ) -> _Seen:
        """What is averaged over the points; arguments after ``gradient``, the points and the means are the scores at one."""
        (slope, slope_own), (away, out) = gradient, (a - b for a, b in zip(at, middle, strict=True))
        if self.slope is None:
            return _Seen((own * slope_own, own * out), (), (alone * slope, alone * away))
        row = alone - jnp.einsum("rkd,rk->rd", self.slope, own)
        given = slope_own[:, None, :], out[:, None, :], away
        of_own = tuple(own[..., None] * x for x in given)
        of_row = tuple(row[..., None] * x for x in given)
        return _Seen(
            of_own, of_row, (jnp.outer(beside, slope), jnp.outer(beside, away), beside[:, None] * out[:, None])
        )

    def seen(self, curvature: _Curvature, found: _Seen) -> _Curvature:
        """The curvature with what its second derivatives have left over; ``found``: means of :meth:`products`."""
        shared, cross, own = curvature
        (pull, out, *more), (pull_all, away, *rest) = found.own, found.shared
        if self.slope is None:
            return curvature._replace(local=own - pull - own * out, shared=shared - pull_all - shared * away)

        def left(pull: Array, out: Array, away: Array) -> Array:
            return pull + jnp.einsum("rij,rkj->rik", out, own) + jnp.einsum("rid,rkd->rik", away, cross)

        together = pull_all + away @ shared.T + jnp.einsum("rdk,rke->de", rest[0], cross)
        return _Curvature(
            shared - together,
            cross - jnp.swapaxes(left(*found.cross), -1, -2),
            own - left(pull, out, *more),
        )


@dataclasses.dataclass(frozen=True)
class LocalLatentProgram(ProgramDefaults):
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
        rules: fixed points that take the place of draws while these, and other fixed ones, agree with them: see
            :func:`numpyro_pvi.expectations.joint_rules`. None for draws alone.
        kinks: whether the log density may have kinks, of which second derivatives see nothing: see :class:`_Bends`.
    """

    log_density: Callable[[Any, Float[Array, "D"], Float[Array, "R K"]], Float[Array, ""]]
    family: GaussianFamily
    at_mean: bool = False
    rules: JointRules | None = None
    kinks: bool = False
    noisy: bool = dataclasses.field(default=True, init=False)

    @property
    def mode(self) -> str:
        """As of :class:`numpyro_pvi.expectations.PointsProgram`: "auto" or "monte_carlo"."""
        return "monte_carlo" if self.rules is None else "auto"

    @property
    def refinable(self) -> bool:
        """Whether fixed points are a product rule, which nothing coarser comes before."""
        return self.rules is not None and self.rules.product

    @property
    def begins_finer(self) -> bool:
        """The same: whether such a rule is what is tried first."""
        return self.refinable

    def choose(self, noise: LocalNoise, sampled: Bool[Array, ""] | bool, finer: Bool[Array, ""] | bool) -> LocalNoise:
        """The points to use.

        ``noise``: the round's draws; ``sampled``: whether they take the place of fixed points; ``finer``: whether a product rule
        was in use. Returns the draws, and what is in use.
        """
        if self.rules is None:
            return noise
        # As of PointsProgram.choose: where there is no product rule any more, draws stand for it.
        sampled = sampled if self.refinable else jnp.asarray(sampled) | finer
        if (batch := noise.batch) is None:
            return noise._replace(sampled=sampled)
        last = self.looks_apart(noise.shared.shape[0]) - 1
        return noise._replace(sampled=jnp.where(batch < 0, sampled, batch < last), checking=batch == last)

    def looks_apart(self, count: int) -> int:
        """How many other looks fixed points are compared with: batches of draws, and other points. ``count``: S, draws."""
        return min(_BATCHES, count) + 1

    def contradicted(
        self, value: Float[Array, "B"], even: Float[Array, "B J"], odd: Float[Array, "B"], dim: int
    ) -> Bool[Array, ""]:
        """Whether expectations at fixed points are contradicted by batches of draws, or by other fixed points.

        ``value``, ``even``, ``odd``: how far those are from these, as :meth:`apart` finds it, the other points last; ``dim``:
        coordinates of q that are compared. Returns whether they are: see :func:`differing`.
        """
        known = jnp.isfinite(value[-1]) & jnp.all(jnp.isfinite(even[-1])) & jnp.isfinite(odd[-1])
        by_draws = differing(value[:-1], even[:-1], odd[:-1], dim, telling=False)
        weight = jnp.ones((1,), value.dtype)
        return ~known | by_draws | differing(value[-1:], even[-1:], odd[-1:], dim, weight=weight)

    def apart(
        self, found: Expected, factor: Expected, moments: GaussianMoments, rows: ConditionalNatural | None
    ) -> tuple[Float[Array, ""], Float[Array, "J"], Float[Array, ""]]:
        """How far expectations are from others: in value, in gradients, and in the traces of curvatures, in whitened coordinates.

        ``found``: expectations by group; ``factor``: those at fixed points; ``moments``: q(theta); ``rows``: what q says of the
        rows' own latents; None where they are not here, and values and shared latents alone are compared. Returns nats, nats a
        posterior sd of shared latents and of the rows' own, and the trace.
        """
        value = jnp.sum(found.value - factor.value)
        change = jax.tree.map(lambda a, b: jnp.sum(a - b, axis=0), found.target, factor.target)
        pull, scale = self.family.pull(change, moments.loc), moments.scale
        if self.family.full:
            even, odd = pull @ scale, jnp.sum(scale * (change.precision @ scale))
        else:
            even, odd = pull * scale, jnp.sum(change.precision * scale**2)
        if rows is None:
            return value, even, odd
        q = conditional_moments(rows)
        change = jax.tree.map(lambda a, b: a - b, found.local.rows, factor.local.rows)
        mean, root = q.mean(moments.loc), q.root
        own = change.linear - _times(change.precision, mean)
        if self.family.full:
            own = jnp.einsum("...kj,...k->...j", root, own - change.cross @ moments.loc)
            odd = odd + jnp.sum(root * (change.precision @ root))
        else:
            own, odd = own * root, odd + jnp.sum(change.precision * root**2)
        return value, jnp.concatenate([even, own.ravel()]), odd

    def working_bytes(self, chunks: LocalChunk) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: the draws' tangents of every row."""
        rows, width = chunks.rows.linear.shape[1:]
        return 4 * rows * width * (self.family.dim + width) * 40

    def expected(
        self, chunk: LocalChunk, moments: GaussianMoments, probe: Any, level: Any, noise: LocalNoise, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        ``chunk``: rows and their conditionals; ``moments``: q(theta); ``probe``: Float[D] vector for the curvature product, or
        None; ``level``: a Python int where the result is to be differentiated in reverse mode; not used otherwise; ``noise``: the
        round's draws, each of which is used with both signs, or the fixed points in their place;
        ``clip``: unused; precisions of local latents are always bounded from below. Returns the chunk's expectations;
        ``target`` is the shared block, ``local`` the rows' targets.
        """
        q = conditional_moments(chunk.rows)
        points = _Points.of(noise, noise.local[chunk.units], self.rules, unrolled=isinstance(level, int))

        def place(shared: Float[Array, "P D"], local: Float[Array, "P R K"]) -> tuple[Array, Array]:
            theta = self.family.draw(moments, shared)
            return theta, jax.vmap(q.draw)(theta, local)

        mean = q.mean(moments.loc)
        middle, bends = (moments.loc, mean), _Bends.of(moments, q, chunk.mask) if self.kinks else None
        found, apart = self._derivatives(chunk.data, points, place, middle, bends)
        value, (slope, slope_local), curvature = found
        away, out = (
            x[: points.count] - at
            for x, at in zip(place(points.shared, points.local), (moments.loc, mean), strict=True)
        )
        value = value - points.corrects(self._quadratic_correction(apart, moments, q, (away, out), points.mean))
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
        found = self.expected(chunk, moments, None, None, noise, False)
        wanted: Any = found.local
        count = chunk.mask.shape[0]
        finite = [jnp.all(jnp.isfinite(x).reshape(count, -1), axis=-1) for x in jax.tree.leaves(wanted)]
        good = functools.reduce(jnp.logical_and, finite)
        return jax.tree.map(lambda new, old: pick(good, new, old), wanted, chunk.rows), found.value

    def given(self, chunk: LocalChunk, moments: GaussianMoments, noise: LocalNoise) -> Expected:
        """Expectations of the factor over theta alone that is left where rows' latents are what their conditionals say.

        ``E[log p(y, z | theta)] + H(q(z | theta))`` over ``q(z | theta)``, whose mean is affine in theta with slopes M, bends in
        theta by ``A + C^T M + M^T C + M^T B M``, with the blocks of ``-E[hess f]``. ``chunk``, ``moments``, ``noise``: as of
        :meth:`expected`. Returns the chunk's expectations, without any for the rows' own latents.
        """
        found = self.expected(chunk, moments, None, None, noise, False)
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

    def _derivatives(self, data, points: _Points, place: Callable, middle: tuple, bends: _Bends | None = None):
        """Means over points of value, gradients and curvature blocks (their diagonals under a mean-field q).

        ``place``: whitened points to theta and z; ``middle``: q's means of both; ``bends``: what sees kinks, or None. Returns them,
        and the curvature that corrects values.
        """
        dim, width, full = self.family.dim, points.local.shape[-1], self.family.full

        def one(theta, z, *scores):
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
            seen = bends.products(gradient, (theta, z), middle, *scores) if bends is not None else None
            return value, gradient, _Curvature(-shared, -cross, -local), seen

        def placed(shared: Array, local: Array) -> tuple:
            scores = () if bends is None else bends.scores(shared, local)
            return (*place(shared, local), *scores)

        (value, gradient, own, seen), (_, _, apart, _) = points.means(one, placed)
        if bends is not None:
            # Draws contradict fixed points where kinks matter; where they do not, these have no noise.
            own = jax.tree.map(partial(jnp.where, points.noise.sampled), bends.seen(own, seen), own)
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
        self, curvature: _Curvature, moments: GaussianMoments, q: ConditionalMoments, away: tuple, mean: Callable
    ) -> Float[Array, ""]:
        """Exact less sampled mean of half the quadratic form, so that a quadratic factor comes out exactly.

        ``curvature``: of other draws than these, or values would be biased by how it covaries with their second moments;
        ``away``: how far draws are from their means, of shared and of own latents; ``mean``: of these draws.
        """
        scale, (shared, local) = moments.scale, away
        if not self.family.full:
            sampled = mean(shared**2 @ curvature.shared) + mean(jnp.sum(local**2 * curvature.local, (1, 2)))
            exact = jnp.sum(curvature.shared * scale**2) + jnp.sum(curvature.local * q.root**2)
            return 0.5 * (exact - sampled)
        towards = jnp.einsum("rkj,srj->srk", curvature.local, local) + 2 * jnp.einsum(
            "rkd,sd->srk", curvature.cross, shared
        )
        sampled = mean(jnp.sum(shared @ curvature.shared * shared, -1) + jnp.sum(towards * local, (1, 2)))
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
        points = _Points.of(noise, noise.local, self.rules, unrolled=False)

        def place(shared: Float[Array, "P D"], local: Float[Array, "P U K"]) -> tuple[Array, Array]:
            theta = self.family.draw(moments, shared)
            return theta, jax.vmap(q.draw)(theta, local)

        mean = q.mean(moments.loc)
        (value, slope, slope_local, curvature), apart = self._all_derivatives(points, place, (moments.loc, mean))
        shared, cross, wanted = curvature
        away, out = (
            x[: points.count] - at
            for x, at in zip(place(points.shared, points.local), (moments.loc, mean), strict=True)
        )

        def total(x):
            return jax.ops.segment_sum(x, group, num_groups)

        sampled, exact = self._quadratic_parts(apart, moments, q, (away, out), points.mean)
        off = exact[0] - sampled[0] + total(exact[1] - sampled[1])
        value = value - 0.5 * points.corrects(off) + total(q.entropy)
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

    def _all_derivatives(self, points: _Points, place: Callable, middle: tuple):
        full, width = self.family.full, points.local.shape[-1]

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

        (value, slope, slope_local, own), (*_, apart) = points.means(one, place)
        if self.at_mean:
            shared = -bend(*middle) if full else -diagonal(bend(*middle))
            own, apart = (x._replace(shared=shared) for x in (own, apart))
        if full:
            own, apart = (_symmetric(x) for x in (own, apart))
        return (value, slope, slope_local, own), apart

    def _quadratic_parts(self, curvature: _Curvature, moments: GaussianMoments, q: ConditionalMoments, off, mean):
        """Sampled and exact means of the quadratic form: of theta by group, and of everything with z by unit."""
        scale, (shared, cross, local), (away, out) = moments.scale, curvature, off
        if not self.family.full:
            sampled = mean(away**2 @ shared.T), mean(jnp.sum(out**2 * local, -1))
            return sampled, (shared @ scale**2, jnp.sum(local * q.root**2, -1))
        by_group = mean(jnp.einsum("sd,mde,se->sm", away, shared, away, optimize="greedy"))
        towards = jnp.einsum("ukj,suj->suk", local, out) + 2 * jnp.einsum("ukd,sd->suk", cross, away)
        by_unit = mean(jnp.sum(towards * out, -1))
        inherited = q.slope @ scale
        both = local @ inherited + 2 * cross @ scale
        exact = jnp.sum(inherited * both, (-2, -1)) + jnp.sum(q.root * (local @ q.root), (-2, -1))
        return (by_group, by_unit), (jnp.sum(scale * (shared @ scale), (-2, -1)), exact)


def pick(good: Bool[Array, "R"], new: Array, old: Array) -> Array:
    """Row by row, one of two arrays."""
    return jnp.where(good.reshape(good.shape + (1,) * (new.ndim - 1)), new, old)


def _times(matrix: Array, vector: Array) -> Array:
    """Matrix-vector product, or the elementwise one with a diagonal."""
    return matrix * vector if matrix.ndim == vector.ndim else jnp.einsum("...ij,...j->...i", matrix, vector)
