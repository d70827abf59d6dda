"""Any optimiser on the alpha-divergence between one tilted distribution and q."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import all_finite, value_and_grad
from ..errors import PVIError
from ..expectations import Expected, Moments, Tilted
from ..families import (
    GaussianFamily,
    GaussianMoments,
    GaussianNatural,
    ProductFamily,
    ProductNatural,
    Whitening,
    whitening,
)
from ..sites import back_off, select
from ._base import LocalResult, TiltedFactor
from ._matching import MatchesMoments, MatchState, check_moments, check_share, match_visit
from ._minibatch import Gaps, Optimiser, as_optimiser, late_weight
from ._power_ep import PowerEP


class _Walk(NamedTuple):
    """The optimiser's way through one visit."""

    point: Float[Array, "P"]
    optimiser: Any
    # Running mean of late points.
    average: Float[Array, "P"]
    # What was found at the last step.
    found: Tilted
    # What was asked for.
    gaps: Gaps


@dataclasses.dataclass(frozen=True)
class _Whitened:
    """Coordinates of local q's in which the visit's first q is 0, with unit covariance.

    A point is ``(u, log k, l)``: location ``m + S u`` and precision ``S^-T K K^T S^-1``, K lower triangular with diagonal k and
    strict lower part l (no l for a mean-field q), S S^T and m the covariance and location of the first q. Every point is
    a normalisable q.
    """

    family: GaussianFamily
    q: GaussianNatural
    moments: GaussianMoments
    # Whether an optimiser compares values.
    searched: bool

    @property
    def size(self) -> int:
        """Length of a point."""
        dim = self.family.dim
        return dim + dim * (dim + 1) // 2 if self.family.full else 2 * dim

    def split(self, point: Float[Array, "P"]) -> tuple[Float[Array, "D"], Array]:
        """``(u, K)``, K as its diagonal for a mean-field q."""
        dim = self.family.dim
        shift, diagonal = point[:dim], jnp.exp(point[dim : 2 * dim])
        if not self.family.full:
            return shift, diagonal
        lower = jnp.zeros((dim, dim), point.dtype).at[jnp.tril_indices(dim, -1)].set(point[2 * dim :])
        return shift, lower + jnp.diag(diagonal)

    @property
    def back(self) -> Array:
        """``S^-T``, its diagonal for a mean-field q."""
        return self.q.precision @ self.moments.scale if self.family.full else 1.0 / self.moments.scale

    def change(self, point: Float[Array, "P"]) -> GaussianNatural:
        """Natural parameters of the local q less the first one's, formed without their difference."""
        shift, root = self.split(point)
        back, scale = self.back, self.moments.scale
        if not self.family.full:
            precision = (root**2 - 1.0) * back**2
            return self.family.natural(precision * (self.moments.loc + scale * shift) + back * shift, precision)
        inner = root @ root.T - jnp.eye(root.shape[0], dtype=root.dtype)
        precision = back @ inner @ back.T
        precision = 0.5 * (precision + precision.T)
        return self.family.natural(precision @ (self.moments.loc + scale @ shift) + back @ shift, precision)

    def length(self, change: GaussianNatural) -> Float[Array, ""]:
        """Length of a change of natural parameters in sds of the first q, to first order."""
        scale, shift = self.moments.scale, self.family.shift(change, self.moments)
        stretch = scale.T @ change.precision @ scale if self.family.full else scale**2 * change.precision
        return jnp.sqrt(jnp.sum(shift**2) + 0.5 * jnp.sum(stretch**2))

    def within(self, last: Float[Array, "P"], new: Float[Array, "P"]) -> Float[Array, "P"]:
        """The new point: there is none that is not normalisable."""
        return new

    def toward(
        self, point: Float[Array, "P"], gap: GaussianNatural
    ) -> tuple[Float[Array, ""], Float[Array, "P"], Bool[Array, ""]]:
        """``KL(other || local q)`` in nats up to a constant, its gradient, and whether the other is normalisable.

        ``gap``: natural parameters of the other less those of the local q.
        """
        other = self.family.moments(self.q + self.change(point) + gap)
        value, slope = value_and_grad(self.divergence)(point, jax.lax.stop_gradient(other))
        return value, slope, other.valid

    def divergence(self, point: Float[Array, "P"], other: GaussianMoments) -> Float[Array, ""]:
        """``KL(other || local q)`` in nats, up to a constant."""
        shift, root = self.split(point)
        gap = other.loc - self.moments.loc
        if not self.family.full:
            spread = (other.scale / self.moments.scale) ** 2
            distance = gap / self.moments.scale - shift
            return jnp.sum(-jnp.log(root) + 0.5 * root**2 * (spread + distance**2))
        back = self.back
        distance, spread = root.T @ (back.T @ gap - shift), root.T @ (back.T @ other.scale)
        return -jnp.sum(jnp.log(jnp.diagonal(root))) + 0.5 * (jnp.sum(spread**2) + jnp.sum(distance**2))


# Nats that values must be known to for a line search, and how much coarser than where a visit begins they may be else.
_RESOLVED, _COARSER = 1e-3, 8.0
# Squared sds up to which a gap is told to first order.
_NEAR = 1.0


@dataclasses.dataclass(frozen=True)
class _MetricCoordinates:
    """Coordinates of local q's in a product of families in which the visit's first q is 0, with the identity for its metric.

    A point is ``L^T (eta - eta_q)`` of every component, in minimal coordinates, ``L L^T`` the Fisher metric of the first q: lengths
    are in its sds. Points of an open convex set about 0 are normalisable.
    """

    family: ProductFamily
    q: ProductNatural
    # The coordinates, at q.
    metric: Whitening
    # Whether an optimiser compares values along the gradient, which has to be theirs.
    searched: bool

    @property
    def size(self) -> int:
        """Length of a point."""
        return self.metric.size

    def change(self, point: Float[Array, "P"]) -> ProductNatural:
        """Natural parameters of the local q less the first one's."""
        return self.metric.change(point)

    def length(self, change: ProductNatural) -> Float[Array, ""]:
        """Length of a change of natural parameters in sds of the first q."""
        return jnp.linalg.norm(self.metric.coordinates(change))

    def within(self, last: Float[Array, "P"], new: Float[Array, "P"]) -> Float[Array, "P"]:
        """The new point, or one nearer to the last one that is normalisable."""
        new = jnp.where(all_finite(new), new, last)
        full = jnp.ones((), last.dtype)
        step, _ = back_off(lambda s: self.family.in_domain(self.q + self.change(last + s * (new - last))), full)
        at = last + step * (new - last)
        return jnp.where(self.family.in_domain(self.q + self.change(at)), at, last)

    def toward(
        self, point: Float[Array, "P"], gap: ProductNatural
    ) -> tuple[Float[Array, ""], Float[Array, "P"], Bool[Array, ""]]:
        """``KL(other || local q)`` in nats up to a constant, its gradient, and whether both are normalisable.

        In single precision, where no line search compares values, the gradient is to first order in the gap, and has its zeros
        where that vanishes. ``gap``: natural parameters of the other less those of the local q.
        """
        family, change = self.family, self.change(point)
        now = self.q + change
        valid = family.in_domain(now) & family.in_domain(now + gap)
        # Numbers that are finite, for a gradient that is not asked for.
        now, gap = select(valid, now, self.q), select(valid, gap, jax.tree.map(jnp.zeros_like, gap))
        mean, other = family.natural_to_mean(now), family.natural_to_mean(now + gap)
        value = family.log_partition(now) - family.log_partition(self.q) - family.inner(change, other)
        if value.dtype != jnp.float64 and not self.searched:
            # Of narrow members means are large numbers whose difference has lost the width. To first order it is the gap itself in
            # the first q's coordinates; from farther than a sd, the gap in the metric half way.
            near, half = self.metric.coordinates(gap), family.fisher_product(now + gap * 0.5, gap)
            return value, -jnp.where(jnp.sum(near**2) < _NEAR, near, self.metric.slope(half)), valid
        return value, self.metric.slope(jax.tree.map(jnp.subtract, mean, other)), valid


@dataclasses.dataclass(frozen=True)
class AlphaDivergence(MatchesMoments):
    """Minimise the alpha-divergence between a group's tilted distribution and q, with any optimiser (PVI algorithm 3).

    With the cavity ``eta_q - eta_m`` held fixed and the tilted distribution ``cavity(theta) p(y_m | theta)``, a visit lowers

        D_alpha[tilted || q] = (1 - E_q[(tilted / q)^alpha]) / (alpha (1 - alpha)),    q = cavity * t_m,

    over the site's own parameters, by way of ``-log E_q[(tilted / q)^alpha] / (alpha (1 - alpha))``, which falls with it. The
    gradient in the site's natural parameters is ``(E_q[T] - E_alpha[T]) / alpha``, with the moments of
    ``q (p(y_m | theta) / t_m)^alpha`` that power EP matches; so the fixed points are those of ``PowerEP(alpha)``, for every
    alpha: 1 is KL(tilted || q), as in EP, and towards 0 it is KL(q || tilted), the variational bound. The
    optimiser moves location and precision root of q in coordinates whitened by the visit's first q, where every point is
    normalisable; it starts afresh at every visit. A visit that only walks about where it
    began, as steps of a length of their own do near the limit, takes the step of matched moments in the end, as does one whose
    line search has not halved what is asked for. ``PowerEP`` reaches the same limits with one set of moments per visit, where this
    takes ``num_steps``; an optimiser cannot overshoot within a visit.

    Latents of the groups' own are integrated out as by :class:`PowerEP`, afresh at every step: integrals are laid about each unit's
    mode at every theta, wherever q has gone meanwhile; what was known of own latents at the start of the visit is where that is
    searched from.

    Under :class:`numpyro_pvi.AutoExponentialFamily` it moves the natural parameters of q, in coordinates whitened by the Fisher
    metric of the visit's first q; a step that would leave the families' domain is halved until it does not. Moments are of all
    latents that a factor sees together, as of :class:`PowerEP`.

    Every step takes the tilted moments of the whole group: in closed form, by a grid, by quadrature (groups of a single
    row) or from weighted draws, as ``moments`` says, fresh at every step but under a line search. Weights that collapse are
    reported (``info``), and no chains take their place: see :class:`PowerEP`, which has them. A prior outside the family
    has a PRIOR site, whose moments are matched by ``PowerEP(alpha)``. ``log_evidence`` is that of ``PowerEP(alpha)``.

    Args:
        alpha: in (0, 1].
        optim: an optax or ``numpyro.optim`` optimiser (L-BFGS and ``Minimize`` included); None is Adam with step 0.01, which
            is in sds of q.
        num_steps: steps per visit.
        moments: as of :class:`PowerEP`, for ``factors="group"``.
        average: share of the visit's steps, counted from the end, whose iterates are averaged, in [0, 1); 0 keeps the last.
            "auto" is 1/2, and 0 for an optimiser with a line search.
        damping: largest share of a visit's change that is taken, in (0, 1]; 1 is the full step, as in earlier PVI code. It is
            halved while a group's changes turn back and forth.

    Raises:
        PVIError: on construction, for values outside these ranges.

    References:
        Ashman et al., Partitioned Variational Inference, section 4.5 and algorithm 3. Minka, Divergence measures and message
        passing, 2005, section 3 (stationary points of alpha-divergences and power EP).
    """

    alpha: float
    optim: Any = None
    num_steps: int = 50
    moments: Moments = "auto"
    average: float | str = "auto"
    damping: float = 1.0

    # A group's site is any member of the family, not a sum over its rows.
    whole_sites = True

    @property
    def rereads(self) -> bool:
        """Whether a visit has further steps, each a pass over the rows."""
        return self.num_steps > 1

    def __post_init__(self):
        check_share(
            "AlphaDivergence", "alpha", self.alpha, "1 is EP's KL(tilted || q); for the limit 0 use LocalELBO()"
        )
        check_share("AlphaDivergence", "damping", self.damping, "1 is the full step")
        check_moments("AlphaDivergence", self.moments)
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise PVIError(f"AlphaDivergence(num_steps={self.num_steps!r}): expected a positive int.")
        share = self.average
        if share != "auto" and not (isinstance(share, (int, float)) and 0.0 <= share < 1.0):
            raise PVIError(f"AlphaDivergence(average={share!r}): expected 'auto' or a share of the steps in [0, 1).")
        if self.optim is not None:
            as_optimiser(self.optim, "AlphaDivergence")

    @property
    def power(self) -> float:
        """The power whose moments the gradient is made of: alpha."""
        return self.alpha

    @property
    def for_prior(self) -> PowerEP:
        """Who refines the PRIOR site."""
        return PowerEP(self.alpha, self.moments, damping=self.damping)

    def solve(
        self,
        factor: TiltedFactor,
        cavity: Any,
        site: Any,
        state: MatchState,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        family, q = factor.family, cavity + site
        searched = as_optimiser(self.optim, "AlphaDivergence").searches
        local: Any = (
            _Whitened(family, q, family.moments(q), searched)
            if family.located
            else _MetricCoordinates(family, q, whitening(family, q), searched)
        )
        walk, begun = self._walk(factor, local, q, site, key)
        change, found = local.change(walk.average), walk.found
        # A line search that ends no nearer to what is asked for, or nowhere, compared values that are none.
        gaps, how = walk.gaps, (walk.average, local.length)
        stray = gaps.about(*how) | gaps.swung(*how) if begun is None else ~gaps.nearer(local.length)
        change = select(stray, gaps.first, change)
        if begun is not None:
            found = select(stray, begun, found)
        found = found._replace(change=change)
        # No chains: they would start at every step.
        return match_visit(family, q, site, found, state, factor.rules._replace(may_chain=False))

    def _walk(self, factor: Any, local: Any, q: Any, site: Any, key: Any) -> tuple[_Walk, Tilted | None]:
        """The way through a visit, and under a line search what was found where it began."""
        optimiser: Optimiser = as_optimiser(self.optim, "AlphaDivergence")
        family = local.family
        share = (0.0 if optimiser.searches else 0.5) if self.average == "auto" else float(self.average)
        first = min(self.num_steps - 1, int((1.0 - share) * self.num_steps))

        def look(point, key) -> Tilted:
            change = local.change(point)
            return factor.tilted(q + change, site + change, self.alpha, key)

        def step(k, walk: _Walk) -> _Walk:
            # A line search compares values: it keeps its draws for the whole visit.
            own = key if optimiser.searches else jax.random.fold_in(key, k)
            seen = []

            def loss(point):
                seen.append(found := look(point, own))
                return self._loss(local, q, point, found)

            point, state = optimiser.step(loss, walk.point, walk.optimiser)
            point = local.within(walk.point, point)
            # What a line search saw on its way is its own.
            found = look(point, own) if optimiser.searches else seen[0]
            weight, gaps = late_weight(k, first), walk.gaps
            average = walk.average + weight * (point - walk.average)
            asked = family.symmetrise(found.change)
            gaps = gaps._replace(late=asked) if optimiser.searches else gaps.seen(k, weight, asked, point)
            return _Walk(point, state, average, found, gaps)

        zero = jnp.zeros((local.size,), jax.tree.leaves(q)[0].dtype)
        begun = look(zero, key) if optimiser.searches else None
        shapes = jax.eval_shape(lambda: look(zero, key))
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        asked = empty.change if begun is None else family.symmetrise(begun.change)
        gaps = Gaps(asked, empty.change, jnp.zeros((), zero.dtype))
        walk = _Walk(zero, optimiser.init(zero), zero, empty, gaps)
        return jax.lax.fori_loop(0, self.num_steps, step, walk), begun

    def _loss(self, local: Any, q: Any, point: Float[Array, "P"], found: Tilted) -> tuple[Array, Array]:
        """The divergence up to a constant, in nats, and its gradient; where moments fail, infinity and no direction."""
        family, now = local.family, q + local.change(point)
        used = self.alpha * found.temper
        # At its own q the KL from the matched member has the divergence's slope.
        value, slope, matched = local.toward(point, found.change * used)
        if self.alpha < 1.0:
            value = -(family.log_partition(now) - family.log_partition(q) + found.value) / (1.0 - self.alpha)
        good = found.valid & matched & jnp.all(jnp.isfinite(slope))
        if local.searched:
            # Values are compared: where what they are a difference of has rounded it away, or they are at less than the power
            # because weights collapsed, none is lower than another.
            begun, here = jnp.abs(family.log_partition(q)), jnp.abs(family.log_partition(now)) + jnp.abs(found.value)
            eps = jnp.finfo(value.dtype).eps
            good &= eps * (begun + here) < jnp.maximum(_RESOLVED, _COARSER * eps * begun)
            good &= found.temper >= 1.0
        return jnp.where(good & jnp.isfinite(value), value, jnp.inf), jnp.where(good, slope / used, 0.0)
