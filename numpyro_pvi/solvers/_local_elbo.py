"""Any optimiser on one site's local free energy, by mini-batches of its group's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..errors import PVIError
from ..expectations import Expected
from ..families import whitening
from ..sites import MAX_HALVINGS, back_off, select
from ._base import LocalFactor, LocalResult
from ._minibatch import (
    SMALLEST_SHARE,
    BatchSolver,
    Gaps,
    Optimiser,
    as_optimiser,
    check_steps,
    late_from,
    late_weight,
    move_precision,
    next_draws,
    plan_batches,
    stein_moment,
    stein_precision,
)

# Latents up to which curvatures of factors without structure come from Hessians rather than from the steps' gradients.
_SMALL = 64


class _Walk(NamedTuple):
    """The optimiser's way through one visit; ``shift`` is the location of the local q less that at the start."""

    shift: Float[Array, "D"]
    optimiser: Any
    noise: Float[Array, "S D"]
    # Running mean of late shifts, and the sum of Stein's moments.
    average: Float[Array, "D"]
    moment: Any


def held_back(family: Any, cavity: Any, q: Any, power: float) -> Any:
    """What holds a visit's location back: the precision of ``cavity``, or ``Lambda_q / power - Lambda_m`` at a larger power.

    ``family``: the family of q, mean-field where the power is not 1; ``cavity``: q less the site; ``power``: at least 1.
    Returns natural parameters of which the precision counts; at a power above 1 at least a tenth of ``Lambda_q / power``.
    """
    if power == 1.0:
        return cavity
    share = q.precision / power
    kept = jnp.maximum(share - (q.precision - cavity.precision), SMALLEST_SHARE * share)
    return family.natural(jnp.zeros_like(kept), kept)


class _Whitened(NamedTuple):
    """The same over a product of families: ``x`` are whitened coordinates of the site's change since the start."""

    x: Float[Array, "K"]
    optimiser: Any
    average: Float[Array, "K"]
    backoffs: Int[Array, ""]
    # Whether any step was taken.
    moved: Bool[Array, ""]
    # What was asked for, in these coordinates.
    gaps: Gaps


@dataclasses.dataclass(frozen=True)
class LocalELBO(BatchSolver):
    """Maximise the local free energy over the site's own parameters, with any optimiser and mini-batches (PVI alg. 1).

    With q = cavity * t_m, of location m and covariance V = S S^T, a visit raises

        F_m = E_q[log p(y_m | theta)] - KL(q || cavity)

    in the site's precision-mean and in its precision, in turn. The optimiser moves the precision-mean, seen as the location
    that it gives to q, along reparameterised draws ``theta = m + S eps`` on ``batch_size`` rows whose sum is weighted by
    ``N_m / B``. The precision then takes a natural-gradient step, ``Lambda_m <- Lambda_m + precision_step * (-E[hess f_m] -
    Lambda_m)``. An optimiser of log-sds would crawl there: some thirty Adam steps a visit leave q's sd, and with it the
    site, where they were at the start. The fixed point is that of the natural gradient, whatever q started from.

    Latents of the rows' own (inside the partitioned plate) stand beside the site as Gaussians ``q(z | theta)``, of a mean affine in
    theta (under a mean-field guide independent of it). A visit sees its rows at pairs of draws of these, ``log p(y, z | theta)``
    with z moving as theta does: the site is that of the bound which these Gaussians leave of the factor with z integrated out. They
    take natural-gradient steps by a pass with second derivatives, whatever ``curvature`` says: after a visit, halved until the
    bound has not fallen, or together in a round.

    Under ``AutoExponentialFamily`` the optimiser moves all natural parameters of the site, ``eta_m <- eta_m + R^-T x``, with
    ``R R^T`` the Fisher metric of q at the start of the visit, member by member (the root of its diagonal for members with more
    than 64 coordinates). With ``target`` the gradient of ``E_q[log p(y_m | theta)]`` in mean parameters, of ``batch_size`` rows
    times ``N_m / B``, it sees the natural gradient of F_m at q = cavity * t_m in these coordinates,

        g = R^T (target - eta_m),

    so that ``optax.sgd(s)`` makes the steps ``eta_m <- eta_m + s (target - eta_m)``, and ``optax.adam(s)`` moves q by s posterior
    sds or so. One with a line search, which compares values, sees those of F_m and their own gradient ``R^-1 F(q) (target -
    eta_m)``. A step that goes more than nine tenths of the way out of the domain is halved until it does not, and the
    optimiser begins anew there; one along a gradient that is not finite is left out. Late x are averaged; a visit of all rows that
    only walked about its beginning takes the natural gradient's step. The fixed point, ``target = eta_m``, is that of the natural
    gradient.

    Groups that are visited in parallel, each as if the others stood still, move q M times too far together, so that a joint
    step of 1/M is taken; where the sites hold more precision than the data give, as after a narrow start, that is M times too
    little. With ``power`` a, a visit allows for a groups that want the same: it raises, by way of the location,

        a E_q[log p(y_m | theta)] - KL(q || q / t_m^a),

    and moves q's location an a-th of the way there, at the precision that q comes to, which moves as at power 1 (power EP's
    update, with the divergence turned round, takes an a-th of both). Every power has the fixed point of power 1. Joint steps
    are then ``a / M``. Where precisions stand still, a round leaves ``s / (s + h)`` of the way to a quadratic factor of curvature
    h under sites of precision s at a = M/2, and ``(M - 1) s / ((M - 1) s + h)`` at 1; a larger power lets differences between
    groups swing. Where sites begin at 1 nothing holds q back, and a power is slower: ten groups that agree go .99 of the way in
    a round at 1, and .20 at 5. ``Streaming`` and ``Committee``, which do not come back to a group, refuse it.

    With ``local_reparameterisation`` every row of a batch takes its own draw of what it sees of a mean-field q: where that is
    ``h^T w``, as in the layers of a network, it is normal with location ``h^T m`` and variance ``(h^2)^T v``. Gradients have the
    noise of as many draws as a batch has rows, and so have the curvatures of the steps, ``2 dE[f]/dv``; a step costs a
    second product with the squares and draws far fewer numbers. Latents that rows see in another way are drawn as ever. Needs
    ``AutoNormal`` or ``AutoDiagonalNormal`` and a model whose rows are taken, not masked.

    Args:
        optim: an optax or ``numpyro.optim`` optimiser (L-BFGS and ``Minimize`` included); None is Adam with step 0.01.
        num_steps: steps per visit; or give ``epochs``.
        epochs: passes over the group's rows per visit; 1 by default.
        batch_size: rows per step, without replacement within an epoch; a batch goes around a group that has fewer, which leaves
            its sum unbiased. None takes all rows at every step.
        num_particles: draws per step: 1 (its sign is turned over at the next step), or an even number (pairs of both
            signs). Independent draws of each latent that is drawn under ``AutoExponentialFamily``.
        average: share of the visit's steps, counted from the end, whose iterates are averaged, in [0, 1); 0 keeps the
            last. "auto" is 1/2, and 0 for an optimiser with a line search.
        optimiser_state: "reset" at every visit, or "keep" from visit to visit.
        precision_step: largest step of the precision in (0, 1], in natural space; 1 is the full step.
        curvature: "expected" (one pass over the group's rows at the visit's end), "steps" (Stein's identity on the
            gradients of the steps, at no cost; needs no second derivative), or "auto": "expected" where the structure
            gives it exactly or there are at most 64 latents.
        num_draws: antithetic pairs of that pass, where expectations are by draws.
        local_reparameterisation: whether every row of a step takes draws of its own, ``num_particles`` of them, which do not
            come in pairs then.
        power: how many groups that want the same a visit allows for, at least 1: half the groups that are visited in parallel,
            where they are alike. For guides without correlations.

    Raises:
        PVIError: on construction, for values outside these ranges, both ``num_steps`` and ``epochs``, or mini-batches
            under a line search; before the first round, where rows cannot have draws of their own.

    References:
        Ashman et al., Partitioned Variational Inference, algorithm 1 and eq. 2, section 3.4.1 (mini-batches); eq. 10
        (precision). Minka, Power EP, 2004 (a change to the power 1/a). Kingma, Salimans and Welling, Variational Dropout and the
        Local Reparameterization Trick, section 2.2.
    """

    optim: Any = None
    num_steps: int | None = None
    epochs: int | float | None = None
    batch_size: int | None = None
    num_particles: int = 1
    average: float | str = "auto"
    optimiser_state: str = "reset"
    precision_step: float = 1.0
    curvature: str = "auto"
    num_draws: int = 8
    local_reparameterisation: bool = False
    power: float = 1.0

    stochastic = True

    def __post_init__(self):
        check_steps("LocalELBO", self.batch_size, self.num_steps, self.epochs, self.num_particles)
        if self.average != "auto" and not (isinstance(self.average, (int, float)) and 0.0 <= self.average < 1.0):
            raise PVIError(f"LocalELBO(average={self.average!r}): expected 'auto' or a share of the steps in [0, 1).")
        if self.optimiser_state not in ("reset", "keep"):
            raise PVIError(f"LocalELBO(optimiser_state={self.optimiser_state!r}): expected 'reset' or 'keep'.")
        if not (isinstance(self.precision_step, (int, float)) and 0.0 < self.precision_step <= 1.0):
            raise PVIError(
                f"LocalELBO(precision_step={self.precision_step!r}): expected a number in (0, 1]; 1 is the full step."
            )
        if self.curvature not in ("auto", "expected", "steps"):
            raise PVIError(f"LocalELBO(curvature={self.curvature!r}): expected 'auto', 'expected' or 'steps'.")
        if not isinstance(self.local_reparameterisation, bool):
            raise PVIError(
                f"LocalELBO(local_reparameterisation={self.local_reparameterisation!r}): expected True or False."
            )
        if not (
            isinstance(self.power, (int, float)) and not isinstance(self.power, bool) and 1.0 <= self.power < jnp.inf
        ):
            raise PVIError(
                f"LocalELBO(power={self.power!r}): expected a number of at least 1, of groups that a visit allows for."
            )
        if not isinstance(self.num_draws, int) or self.num_draws < 1:
            raise PVIError(f"LocalELBO(num_draws={self.num_draws!r}): expected a positive int.")
        if self.optim is not None and self._optimiser.searches and self.batch_size is not None:
            raise PVIError(
                f"LocalELBO(batch_size={self.batch_size}): this optimiser's line search compares values, which needs the same rows "
                "at every step. Leave batch_size=None, or take an optimiser without one, such as optax.adam(0.01)."
            )

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise for rows' own draws and a power of a q whose latents are correlated."""
        super().check(structure, full, where)
        if self.power != 1.0 and full:
            raise PVIError(
                f"LocalELBO(power={self.power!r}) is for guides without correlations, whose precisions can be kept positive one by "
                "one. Use AutoNormal or AutoDiagonalNormal, or leave it out."
            )
        if self.local_reparameterisation and full:
            raise PVIError(
                "LocalELBO(local_reparameterisation=True) is for guides without correlations: what a row sees of q has the "
                "variances of single latents added up. Use AutoNormal or AutoDiagonalNormal, or leave it out."
            )

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """As of every solver by batches; rows that are masked have no draws of their own."""
        super().check_groups(sizes, mechanism)
        if self.local_reparameterisation and mechanism == "mask":
            raise PVIError(
                "LocalELBO(local_reparameterisation=True): groups are evaluated by masks here, so that rows cannot be told apart. "
                "Leave it out, or write the model so that rows can be taken: see Partition.plan(*args)."
            )

    @property
    def carries_optimiser(self) -> bool:
        """Whether the optimiser's state is kept."""
        return self.optimiser_state == "keep"

    @property
    def _optimiser(self) -> Optimiser:
        return as_optimiser(self.optim, "LocalELBO")

    def by_gradients(self, pointwise: bool) -> LocalELBO:
        """Itself, with precisions by Stein's identity from the steps' own gradients.

        Raises:
            PVIError: for an optimiser with a line search, which compares values, and for ``curvature="expected"``.
        """
        if self._optimiser.searches:
            raise PVIError(
                "LocalELBO(optim=...): this optimiser's line search compares values of the rows' log-likelihood, "
                "which are looks that clipped gradients do not cover. Take an optimiser without one, such as "
                "optax.adam(0.01)."
            )
        if self.curvature == "expected":
            raise PVIError(
                "LocalELBO(curvature='expected') takes curvatures of all rows at a visit's end, which clipped "
                "gradients do not cover: write curvature='steps', or leave it out."
            )
        if self.local_reparameterisation:
            raise PVIError(
                "LocalELBO(local_reparameterisation=True): clipped gradients are of one draw of all latents. Leave it out."
            )
        return dataclasses.replace(self, curvature="steps") if pointwise else self

    def init(self, family: Any, dtype: Any) -> Any:
        """The optimiser's state where it is kept."""
        return self._optimiser.init(jnp.zeros((family.degrees,), dtype)) if self.optimiser_state == "keep" else ()

    def check_families(self) -> None:
        """Refuse settings that say something about a precision.

        Raises:
            PVIError: naming the argument and what to write.
        """
        for name, plain in (
            ("curvature", "auto"),
            ("precision_step", 1.0),
            ("local_reparameterisation", False),
            ("power", 1.0),
        ):
            if getattr(self, name) != plain:
                raise PVIError(
                    f"LocalELBO({name}={getattr(self, name)!r}) is about the steps under a Gaussian guide; under "
                    "AutoExponentialFamily the optimiser moves all natural parameters of a site. Leave it out."
                )

    def solve(
        self,
        factor: LocalFactor,
        cavity: Any,
        site: Any,
        state: Any,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        if not factor.pointwise:
            return self._solve_whitened(factor, cavity, site, state, key)
        family, q = factor.family, cavity + site
        moments = family.moments(q)
        walk, num_steps = self._walk(factor, cavity, q, moments, state, key)
        if self._by_pass(factor):
            wanted = factor.expected(moments._replace(loc=moments.loc + walk.average)).target.precision
        elif self.local_reparameterisation:
            wanted = -walk.moment / num_steps
        else:
            wanted = stein_precision(family, q, moments, walk.moment / num_steps)
        # A precision's change is taken whole, and goes as far down as leaves the mean of the groups' q's normalisable.
        change, halvings = move_precision(family, site, q * (1.0 / self.power), wanted, self.precision_step)
        added = family.natural(jnp.zeros_like(moments.loc), change)
        # Of the new precision-mean (Lambda_q + change) (loc + shift) only the difference from the old one is formed:
        # nothing is lost to a cavity that is much larger than the site.
        force = family.precision_product(q + added, walk.average / self.power) + family.precision_product(
            added, moments.loc
        )
        new = family.natural(site.precision_mean + force, site.precision + change)
        good = moments.valid & all_finite(new)
        if self.optimiser_state == "keep":
            state = jax.tree.map(lambda a, b: jnp.where(good, a, b), walk.optimiser, state)
        return LocalResult(select(good, new, site), state, halvings, good)

    def _by_pass(self, factor: LocalFactor) -> bool:
        if self.curvature == "auto":
            return not factor.noisy or factor.family.dim <= _SMALL
        return self.curvature == "expected"

    def _first_averaged(self, num_steps: Any) -> Int[Array, ""]:
        """The step from which on iterates are averaged."""
        share = (0.0 if self._optimiser.searches else 0.5) if self.average == "auto" else float(self.average)
        return late_from(num_steps, share)

    def _solve_whitened(self, factor: LocalFactor, cavity: Any, site: Any, state: Any, key: Any) -> LocalResult:
        """A visit over a product of families."""
        family, optimiser, q = factor.family, self._optimiser, cavity + site
        rows_key, noise_key = jax.random.split(key)
        batches = plan_batches(factor, rows_key, self.batch_size, self.num_steps, self.epochs)
        first, white = self._first_averaged(batches.num_steps), whitening(family, q)
        seen: list = []

        def loss(k: Any, x: Array) -> tuple[Array, Array]:
            here = site + white.change(x)
            at = cavity + here
            rows = None if batches.rows is None else batches.rows(k)
            # A line search compares values: it keeps its draws for the whole visit.
            own = jax.random.fold_in(noise_key, 0 if optimiser.searches else k)
            found = factor.message(cavity, here, own, rows)
            gap = found.target - here
            if not optimiser.searches:
                seen.append(asked := white.coordinates(gap))
                return -found.value, -asked
            value = found.value - family.inner(here, family.natural_to_mean(at)) + family.log_partition(at)
            slope, valid = white.slope(family.fisher_product(at, gap)), family.in_domain(at)
            return jnp.where(valid, -value, jnp.inf), jnp.where(valid, -slope, 0.0)

        def step(k: Any, walk: _Whitened) -> _Whitened:
            new, state = optimiser.step(lambda x: loss(k, x), walk.x, walk.optimiser)
            sound = all_finite(new)
            change = jnp.where(sound, new - walk.x, 0.0)

            def valid(share: Any) -> Array:
                return family.in_domain(q + white.change(walk.x + change * (share / (1 - SMALLEST_SHARE))))

            share, tries = back_off(valid, jnp.ones((), change.dtype))
            x = walk.x + change * jnp.where(tries < MAX_HALVINGS, share, 0.0)
            state = select(tries > 0, optimiser.init(x), select(sound, state, walk.optimiser))
            weight = late_weight(k, first)
            average = walk.average + weight * (x - walk.average)
            gaps = walk.gaps if optimiser.searches else walk.gaps.seen(k, weight, seen.pop(), x)
            moved = walk.moved | (sound & (tries < MAX_HALVINGS))
            return _Whitened(x, state, average, walk.backoffs + tries, moved, gaps)

        zero = jnp.zeros((white.size,), jax.tree.leaves(site)[0].dtype)
        kept = self.optimiser_state == "keep"
        begin = _Whitened(
            zero,
            state if kept else optimiser.init(zero),
            zero,
            jnp.int32(0),
            jnp.array(False),
            Gaps(zero, zero, jnp.zeros((), zero.dtype)),
        )
        walk = jax.lax.fori_loop(0, batches.num_steps, step, begin)
        x = walk.average
        if not optimiser.searches and batches.rows is None:
            x = select(walk.gaps.about(x, jnp.linalg.norm), walk.gaps.first, x)
        new = family.symmetrise(site + white.change(x))
        good = walk.moved & family.in_domain(q) & all_finite(new) & family.in_domain(cavity + new)
        state = select(good, walk.optimiser, state) if kept else state
        return LocalResult(select(good, new, site), state, walk.backoffs, good)

    def _walk(self, factor: LocalFactor, cavity: Any, q: Any, moments: Any, state: Any, key: Any) -> tuple[_Walk, Any]:
        family, optimiser = factor.family, self._optimiser
        rows_key, noise_key = jax.random.split(key)
        batches = plan_batches(factor, rows_key, self.batch_size, self.num_steps, self.epochs)
        zero = jnp.zeros_like(moments.loc)
        # As q is prior times sites, a power a makes the pull and the rows' gradient a times as large: that is left out.
        pull, around = family.pull(cavity, moments.loc), held_back(family, cavity, q, self.power)
        first = self._first_averaged(batches.num_steps)
        needs_moment, by_row = not self._by_pass(factor), self.local_reparameterisation

        def step(k, walk: _Walk) -> _Walk:
            # A line search compares values: it keeps its draws for the whole visit.
            drawn = 0 if optimiser.searches else k
            own = jax.random.fold_in(noise_key, drawn)
            noise = walk.noise if by_row else next_draws(noise_key, drawn, walk.noise)
            offset, rows = family.draw(moments, noise) - moments.loc, None if batches.rows is None else batches.rows(k)
            seen = []

            def at(shift):
                """The rows' value and derivatives: at a draw of their own each, or at common ones."""
                if not by_row:
                    return factor.derivatives(moments.loc + shift + offset, rows, key=own)
                here = moments._replace(loc=moments.loc + shift)
                return factor.at_rows_draws(here, self.num_particles, jax.random.fold_in(noise_key, drawn), rows)

            def loss(shift):
                found = at(shift)
                gradient = batches.weight * found.gradient
                seen.append(found)
                bend = family.precision_product(around, shift)
                value = batches.weight * jnp.mean(found.value) + jnp.vdot(shift, pull - 0.5 * bend)
                return -value, bend - pull - jnp.mean(gradient, axis=0)

            shift, optimiser_state = optimiser.step(loss, walk.shift, walk.optimiser)
            moment = walk.moment
            if needs_moment:
                # What a line search saw on its way is its own.
                found = at(shift) if optimiser.searches else seen[0]
                if by_row:
                    moment = moment + batches.weight * jnp.mean(found.hessian, axis=0)
                else:
                    moment = moment + stein_moment(family, noise, batches.weight * found.gradient)
            average = walk.average + late_weight(k, first) * (shift - walk.average)
            return _Walk(shift, optimiser_state, noise, average, moment)

        moment = jnp.zeros((family.dim,) * (1 + family.full), zero.dtype) if needs_moment else ()
        # Of rows' own draws nothing goes from step to step.
        noise = jnp.zeros((self.num_particles, family.dim), zero.dtype)
        begin = _Walk(zero, state if self.optimiser_state == "keep" else optimiser.init(zero), noise, zero, moment)
        return jax.lax.fori_loop(0, batches.num_steps, step, begin), batches.num_steps
