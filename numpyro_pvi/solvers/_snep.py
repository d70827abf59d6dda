"""Stochastic natural-gradient expectation propagation: a convergent double loop for power EP's fixed points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, inverse_root, scaled_cholesky, solve_lower, symmetrise
from ..errors import PVIError
from ..expectations import Expected, Moments
from ..families import GaussianFamily, GaussianNatural, ProductFamily, ProductNatural, member_roots
from ..sites import MAX_HALVINGS, back_off, damp, select
from ._base import ByLabel, Labelled, LocalResult, TiltedFactor, by_label, check_labels, freeze, resolve
from ._matching import MatchesMoments, MatchState, after_match, check_moments, check_share, own_step

# -------------------------------------------------------------------------------------------- steps in mean coordinates
# Steps in mean coordinates: how a site moves when expected statistics are asked to move by a share.


def posterior_step(family: GaussianFamily, q: Any, gap: Any, step: Float[Array, ""]) -> GaussianNatural:
    """The change of a site when q's mean parameters go a share of the way to those of another Gaussian.

    ``grad A*((1 - step) mu + step mu_hat) - eta`` with mu, eta of q and mu_hat of the Gaussian with natural parameters
    ``eta + gap``. The mean domain is convex, so q is normalisable after any step in [0, 1] where both Gaussians are. With the
    covariance ``V = S S^T`` and ``eps = S^-1 (theta - loc)`` everything follows from the gap, without a difference of large
    numbers: ``B = S^T D S`` for the precision's gap D,

        delta = (1 + B)^-1 S^T (gap in h - D loc),        E = (1 - step) delta delta^T - (1 + B)^-1 B,
        dLambda = -step S^-T (1 + step E)^-1 E S^-1,      dh = dLambda (loc + step S delta) + step S^-T delta.

    ``gap``: natural parameters of the other Gaussian less those of q; ``step``: share of the way, in [0, 1], in mean space.
    Returns the change, in natural space.
    """
    moments = family.moments(q)
    force = family.pull(gap, moments.loc)
    if not family.full:
        sd = moments.scale
        bend = gap.precision * sd**2
        delta = sd * force / (1.0 + bend)
        spread = (1.0 - step) * delta**2 - bend / (1.0 + bend)
        precision = -step * spread / ((1.0 + step * spread) * sd**2)
        return GaussianNatural(precision * (moments.loc + step * sd * delta) + step * delta / sd, precision)
    root, eye = moments.scale, jnp.eye(family.dim, dtype=moments.scale.dtype)
    bend = symmetrise(root.T @ gap.precision @ root)
    shrink = _inverse(eye + bend)
    delta = shrink @ (root.T @ force)
    spread = symmetrise((1.0 - step) * delta[:, None] * delta - shrink @ bend)
    # S^-T of the covariance root S.
    back = q.precision @ root
    precision = -step * symmetrise(back @ (_inverse(eye + step * spread) @ spread) @ back.T)
    vector = precision @ (moments.loc + step * (root @ delta)) + step * (back @ delta)
    return GaussianNatural(vector, precision)


def site_step(
    family: GaussianFamily, site: Any, q: Any, gap: Any, step: Float[Array, ""]
) -> tuple[GaussianNatural, Bool[Array, ""]]:
    """The change of a site when its own mean parameters take a step: ``grad A*(gamma + step (mu_hat - mu)) - eta_m``.

    Here ``gamma = grad A(eta_m)`` are the site's own mean parameters, so the site has to be normalisable by itself, before and
    after. ``site``: natural parameters of the site, normalisable; ``q``: natural parameters of q, with mean parameters mu;
    ``gap``: natural parameters of the Gaussian with mean parameters mu_hat, less those of q; ``step``: the step, in mean space.
    Returns the change, in natural space, and whether the step stays in the mean domain.
    """
    own, here, there = (family.natural_to_mean(x) for x in (site, q, q + gap))
    new = own + (there - here) * step
    if family.full:
        inside = scaled_cholesky(-2 * new.second - new.first[:, None] * new.first)[1]
    else:
        inside = jnp.all(-2 * new.second > new.first**2)
    return family.mean_to_natural(new) - site, inside


def widening(family: GaussianFamily, q: Any, gap: Any) -> Float[Array, ""]:
    """The largest ratio, over all directions, of another Gaussian's variance to that of q.

    ``gap``: natural parameters of the other Gaussian, which is normalisable, less those of q. Returns a positive number; 1
    where the two have the same covariance.
    """
    scale = family.moments(q).scale
    if not family.full:
        return 1.0 / jnp.min(1.0 + gap.precision * scale**2)
    bend = symmetrise(scale.T @ gap.precision @ scale)
    return 1.0 / (1.0 + jnp.linalg.eigvalsh(bend)[0])


# What rounding may make of a step through mean space and back, as a share of its length.
_LOST = 0.05


def mean_step(family: ProductFamily, q: Any, gap: Any, step: Float[Array, ""]) -> ProductNatural:
    """:func:`posterior_step` of any family: ``grad A*((1 - step) mu + step mu_hat) - eta``.

    Of narrow members far from 0 mean parameters do not hold the width (``E log x`` and ``E x`` of a gamma of shape 1e4 in single
    precision): where the way there and back would lose a twentieth of the step, the step is ``step gap``, which is the same to
    first order. ``q``: its natural parameters, with mean parameters mu; ``gap``: natural parameters of the other member less those
    of q; ``step``: share of the way, in [0, 1], in mean space. Returns the change, in natural space; zero to the letter where the
    gap is.
    """
    here, there = family.natural_to_mean(q), family.natural_to_mean(q + gap)
    # The rounding of the way back is that of both.
    back = family.mean_to_natural(here)
    change = family.mean_to_natural(here + (there - here) * step) - back
    if jax.tree.leaves(q)[0].dtype == jnp.float64:
        return change
    straight, lost = gap * step, back - q
    names = list(change.parts)
    squares = [_square(family.of([n]), q, x) for x in (lost, straight) for n in names]
    parts = {}
    for name, off, length in zip(names, squares[: len(names)], squares[len(names) :], strict=True):
        keep = jnp.isfinite(off) & (off <= _LOST**2 * length) & all_finite(change.parts[name])
        parts[name] = select(keep, change.parts[name], straight.parts[name])
    return ProductNatural(parts)


def _square(family: ProductFamily, q: Any, change: Any) -> Float[Array, ""]:
    """The squared length of one component's change in q's Fisher metric."""
    own, at = (ProductNatural({name: x.parts[name] for name, _ in family.components}) for x in (change, q))
    return jnp.sum(family.inner(own, family.fisher_product(at, own)))


def metric_widening(family: ProductFamily, q: Any, gap: Any) -> Float[Array, ""]:
    """The largest ratio, over all directions, of another member's Fisher metric to that of q.

    Of Gaussians that is the square of the largest ratio of variances, where that is above 1: see :func:`widening`. ``gap``:
    natural parameters of the other member, which is normalisable, less those of q. Returns a positive number; 1 where the two
    are the same.
    """
    ratios = []
    for name, own in family.components:
        # By roots: the metric of a narrow member far from 0 is singular to single precision.
        root, other = (member_roots(own, at) for at in (q.parts[name], q.parts[name] + gap.parts[name]))
        half = solve_lower(root, other)
        ratios.append(jnp.max(jnp.linalg.eigvalsh(symmetrise(half @ jnp.swapaxes(half, -1, -2)))))
    return jnp.max(jnp.stack(ratios))


def _inverse(matrix: Float[Array, "D D"]) -> Float[Array, "D D"]:
    root = inverse_root(scaled_cholesky(matrix)[0])
    return root @ root.T


# ----------------------------------------------------------------------------------------------------------------- snep

# Share of q that a site which is not normalisable by itself starts from under metric="site".
_SMALL_SHARE = 0.01


class _Walk(NamedTuple):
    site: Any
    state: MatchState
    halvings: Int[Array, ""]
    moved: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class SNEP(MatchesMoments):
    """Stochastic natural-gradient expectation propagation (SNEP): power EP's fixed points by a convergent double loop.

    Every group keeps beside its site eta_m an auxiliary natural parameter theta'_m, the *anchor*. The objective is

        max over theta'  min over eta  of
            A(eta_0 + sum_m eta_m) + sum_m beta_m [A_m(theta'_m - eta_m / beta_m, 1 / beta_m) - A(theta'_m)]

    with ``A_m(eta, a)`` the log normaliser of ``exp(<eta, T(theta)>) p(y_m | theta)^a``. For fixed anchors it is convex in the
    sites, with gradient ``mu_q - s_m``: s_m are the expected statistics of the tilted distribution
    ``exp(<theta'_m - eta_m / beta_m, T>) p(y_m | theta)^(1 / beta_m)``. Inner steps go down this gradient in the Fisher metric
    of q, taken in mean coordinates, where q stays normalisable for any step in [0, 1]:

        eta_m <- eta_m + grad A*(mu_q + step (s_m - mu_q)) - eta_q.

    Every ``outer_period`` inner steps the group sets ``theta'_m <- eta_q``, which solves the outer problem for the sites at
    hand: once the inner loop has converged this cannot lower the objective. At a fixed point ``s_m = mu_q`` and
    ``theta'_m = eta_q``, which is power EP's condition at power ``1 / beta_m``, and the objective less ``A(eta_0)`` is power
    EP's estimate of the evidence. :meth:`numpyro_pvi.PVI.log_evidence` gives it at the anchors of a state.

    With ``outer_period=1`` each step begins at its own anchor: power EP, damped by ``step / beta``, as fast as that and with as
    little of a guarantee. Longer periods climb the objective where power EP swings; each outer loop then closes about
    ``1 / (1 + sum_m beta_m)`` of what is left, which is the price. A period longer than a visit spans rounds; sites are then moved
    as if alone, and schedules in parallel take a joint step of one over the number of groups.

    Under :class:`numpyro_pvi.AutoExponentialFamily` T are the statistics of the latents' own families, moments are those of
    :class:`PowerEP`, and r^2 below is the largest ratio of a tilted distribution's Fisher metric to that of q.

    A worker reads its anchor, its own site and the current sum ``eta_q``, and nothing else; its draws are fresh at every
    inner step, and the schedules average late rounds. Of a large group, ``moments=MCMCMoments(kernel="langevin",
    batch_size=...)`` reads mini-batches.

    Args:
        beta: at least 1: one over the power, ``beta=1`` for EP. A number, one per group, or a dict by label (1 for groups it does
            not name). A prior factor takes the number, or 1.
        moments: how tilted moments are taken: as of :class:`PowerEP` with ``factors="group"``. A factor's chains go on from inner
            step to inner step, in coordinates whitened by its anchor.
        num_steps: inner steps per visit.
        outer_period: inner steps after which a group's anchor moves to q.
        step_size: the inner step in (0, 1], in mean space: a number, a function of the number of inner steps taken so far (a
            hashable one, an optax schedule for example), or "auto": ``beta / (beta + max(1, r^2))`` with r the largest ratio of
            a variance of the tilted distribution to that of q. That is Newton's step for a single group where both are as wide,
            and lowers the objective where an anchor wider than q makes it steeper. A group whose moves turn back halves its
            share of it, and lets it grow again.
        damping: share of a visit's change that is taken, in (0, 1]; 1 is the full step, as in earlier PVI code.
        metric: "posterior" (as above: sites may be improper), or "site": the step is taken in the site's own mean coordinates,
            ``gamma_m <- gamma_m + step (s_m - mu_q)`` with ``eta_m = grad A*(gamma_m)``. That needs sites normalisable by
            themselves, shrinks steps until they stay so, and crawls where a group has fewer rows than latents; under
            AutoExponentialFamily it is refused, because a site says nothing of latents that its rows do not see.

    Raises:
        PVIError: on construction, for values outside these ranges; at ``init``, for a number of betas that does not fit, or a
            label that no group has.

    References:
        Hasenclever et al., Distributed Bayesian Learning with Stochastic Natural Gradient Expectation Propagation and the
        Posterior Server, JMLR 18 (2017), section 3. Heskes and Zoeter, Expectation propagation for approximate inference in
        dynamic Bayesian networks, UAI 2002 (the double loop).
    """

    beta: float | Sequence[float] | Mapping[Hashable, float] | ByLabel = 1.0
    moments: Moments = "auto"
    num_steps: int = 1
    outer_period: int = 1
    step_size: float | str | Callable[[Any], Any] = "auto"
    damping: float = 1.0
    metric: str = "posterior"

    # Tilted distributions are anchored at theta', not at q.
    anchored = True

    @property
    def rereads(self) -> bool:
        """Whether a visit has further steps, each a pass over the rows."""
        return self.num_steps > 1

    def __post_init__(self):
        beta = freeze(self.beta, "SNEP(beta)", lambda x: 1.0 <= x < float("inf"), "a number of at least 1; 1 is EP")
        object.__setattr__(self, "beta", beta)
        for name in ("num_steps", "outer_period"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PVIError(f"SNEP({name}={value!r}): expected a positive int, a number of inner steps.")
        check_share("SNEP", "damping", self.damping, "1 is the full step")
        if not (callable(self.step_size) or _is_share(self.step_size) or self.step_size == "auto"):
            raise PVIError(
                f"SNEP(step_size={self.step_size!r}): expected 'auto' (beta / (1 + beta), less where tilted distributions are "
                "wider than q), a number in (0, 1], or a function of the number of inner steps taken."
            )
        if self.metric not in ("posterior", "site"):
            raise PVIError(f"SNEP(metric={self.metric!r}): expected 'posterior' or 'site'.")
        check_moments("SNEP", self.moments, chains=True)

    @property
    def by_label(self) -> bool:
        """Whether settings name groups, so that compiled programs depend on the labels."""
        return by_label(self.beta)

    @property
    def moves_alone(self) -> bool:
        """Whether sites are moved as if alone, so that a parallel schedule takes a joint step of one over their number."""
        return self.outer_period > self.num_steps

    def init(self, family: Any, dtype: Any) -> MatchState:
        """No anchor yet: the first inner step sets it. Groups have the number ``beta``, or 1 where it differs between them."""
        anchor, beta = family.zeros((), dtype), jnp.asarray(self.beta if isinstance(self.beta, float) else 1.0, dtype)
        # Steps of a visit are a share of step_size; damping counts after the last of them.
        one = jnp.ones((), dtype)
        return super().init(family, dtype)._replace(step=one, anchor=anchor, age=jnp.int32(0), beta=beta)

    def init_groups(self, groups: Labelled, state: Any) -> Any:
        """The start of every group, with its own beta.

        Args:
            groups: how many groups there are, and their labels.
            state: the start of any, with a leading group axis.

        Returns:
            The same with ``beta`` by group.

        Raises:
            PVIError: for a wrong number of values, or a label that no group has.
        """
        check_labels(self.beta, "SNEP(beta)", groups)
        return state._replace(beta=jnp.asarray(resolve(self.beta, "SNEP(beta)", groups, 1.0), state.beta.dtype))

    def vantage(self, state: Any, q: Any) -> tuple[Any, Float[Array, ""]]:
        """Where a group's tilted distribution is taken: its anchor (q before its first visit), and the power 1 / beta."""
        return select(state.age == 0, q, state.anchor), 1.0 / state.beta

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
        """One visit of ``num_steps`` inner steps, all that a worker computes: see :class:`numpyro_pvi.solvers.LocalSolver`.

        Of the rest of the fit it reads ``cavity + site``, the current sum of naturals, and nothing else.
        """

        def step(k, walk: _Walk) -> _Walk:
            return self._step(factor, cavity, walk, k, jax.random.fold_in(key, k))

        walk = _Walk(site, state, jnp.int32(0), jnp.array(False))
        if self.num_steps == 1:
            walk = step(jnp.int32(0), walk)
        else:
            walk = jax.lax.fori_loop(0, self.num_steps, step, walk)
        new = damp(site, walk.site, self.damping)
        good = walk.moved & all_finite(new) & factor.family.in_domain(cavity + new)
        taken = jnp.where(good, jnp.ones_like(state.noise), 0.0)
        return LocalResult(select(good, new, site), walk.state, walk.halvings, good, taken)

    def check_families(self) -> None:
        """Goes with every family whose tilted moments can be taken, in the metric of q.

        Raises:
            PVIError: for the metric of the sites, of which there need be none.
        """
        if self.metric == "site":
            raise PVIError(
                "SNEP(metric='site') takes steps in the mean parameters of a site that is normalisable by itself. Under "
                "AutoExponentialFamily a group's site of a latent that its rows do not see is the unit factor, which is no member "
                "of any family on an unbounded support, and of an inverse gamma no site near it is: write metric='posterior', "
                "which asks for a normalisable q alone."
            )

    def _step(self, factor: Any, cavity: Any, walk: _Walk, k: Any, key: Any) -> _Walk:
        """One inner step."""
        family, state, site = factor.family, walk.state, walk.site
        if self.metric == "site":
            site = select(family.in_domain(site), site, (cavity + site) * _SMALL_SHARE)
        assert state.age is not None and state.beta is not None  # of this solver's own memory
        q, power = cavity + site, 1.0 / state.beta
        anchor = select(state.age % self.outer_period == 0, q, state.anchor)
        known = () if state.chains is None else (state.chains,)
        found = factor.tilted(anchor, site, power, key, *known)
        # Of a smaller power the tilted distribution is nearer to the anchor, and proper.
        used = power * found.temper
        gap = family.symmetrise((anchor - q) + found.change * used)
        usable = found.valid & all_finite(gap) & family.in_domain(q + gap)
        gap = select(usable, gap, jax.tree.map(jnp.zeros_like, gap))
        share, last = own_step(family, q, gap, found.noise * used, state, 1.0)
        share, last = jnp.where(k == 0, share, state.step), select((k == 0) & usable, last, state.last)
        size = share * self._size(state, family, q, gap)
        change, size, halvings, inside = self._change(family, site, q, gap, size)
        change = family.symmetrise(change)
        good = usable & inside & all_finite(change) & family.in_domain(q + change)
        new = after_match(found, state, factor.rules, usable, usable & ~good)._replace(
            step=jnp.where(usable, share, state.step),
            last=last,
            noise=jnp.where(usable, found.noise * used * size, state.noise),
            anchor=anchor,
            age=state.age + 1,
        )
        return _Walk(select(good, site + change, walk.site), new, walk.halvings + halvings, walk.moved | good)

    def _change(self, family: Any, site: Any, q: Any, gap: Any, size: Any):
        """The site's change, the step that was taken, how often it was halved, and whether it stays in the mean domain."""
        if self.metric == "posterior":
            step = posterior_step if family.located else mean_step
            return step(family, q, gap, size), size, jnp.int32(0), jnp.array(True)

        def inside(size):
            change, valid = site_step(family, site, q, gap, size)
            return valid & family.in_domain(q + change)

        size, halvings = back_off(inside, size)
        return site_step(family, site, q, gap, size)[0], size, halvings, halvings < MAX_HALVINGS

    def _size(self, state: Any, family: Any, q: Any, gap: Any) -> Float[Array, ""]:
        """The inner step."""
        if callable(self.step_size):
            wanted = jnp.asarray(self.step_size(state.age), state.noise.dtype)
            return jnp.clip(wanted, 0.0, 1.0)
        if self.step_size == "auto":
            # Second moments weigh as squares of variances in the Hessian.
            wider = widening(family, q, gap) ** 2 if family.located else metric_widening(family, q, gap)
            return state.beta / (state.beta + jnp.maximum(wider, 1.0))
        return jnp.full_like(state.noise, cast(float, self.step_size))


def _is_share(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0.0 < value <= 1.0
