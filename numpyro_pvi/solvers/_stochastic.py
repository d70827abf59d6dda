"""Natural-gradient steps on one site by mini-batches of its group's rows."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..errors import PVIError
from ..expectations import Expected
from ..sites import select
from ._base import LocalFactor, LocalResult
from ._minibatch import (
    BatchSolver,
    check_steps,
    move_precision,
    next_draws,
    plan_batches,
    stein_moment,
    stein_precision,
)


class _Walk(NamedTuple):
    """The way through one visit: the site, the average of late ones, and the last draws where a step takes rows at points."""

    site: Any
    average: Any
    noise: Float[Array, "..."]
    backoffs: Int[Array, ""]
    # Whether any step was taken.
    moved: Bool[Array, ""]


# Latents up to which the curvature of a batch comes from Hessians.
_SMALL = 64


@dataclasses.dataclass(frozen=True)
class StochasticNaturalGradient(BatchSolver):
    """Natural-gradient steps on one site from mini-batches of its group's rows (PVI section 3.4.1, eq. 13).

    At every step, with q = cavity * t_m, B rows weighted by ``N_m / B`` and draws ``theta = loc + S eps`` of q,

        Lambda_m <- Lambda_m + step_size * (C - Lambda_m),        C an estimate of -E[hess f_m]
        h_m <- h_m + step_size * (g + Lambda_m loc - h_m) + (change of Lambda_m) loc,    g an estimate of E[grad f_m]

    which is ``eta_m <- (1 - step_size) eta_m + step_size * grad_mu E_q[f_m]`` wherever q stays normalisable; a precision of
    the local q falls by at most nine tenths in a step.

    Under ``AutoExponentialFamily`` a batch's message, a gradient in mean parameters, is ``N_m / B`` times that of its rows, and
    every step takes the latents in turn, each from the q that the last one left, ``eta_m <- eta_m + step_size * (message -
    eta_m)`` for those that move. Under ``Synchronous`` and ``StochasticSubset`` all groups that take part step together: with one
    group, B rows and damping 1 that is stochastic variational inference. Latents of the rows' own then move first, those of the
    batch alone and all the way; no round is tested by the ELBO, which would take all rows; losses are computed where
    ``run(loss_every=...)`` asks for them; and under damping "auto" steps are 10 / (10 + k) of ``step_size`` after k rounds in
    which q turned back, so that noise averages out. Under every other schedule a group makes the steps of its visit alone, beside
    its cavity, as with a Gaussian guide; rows have no latents of their own there.

    Args:
        step_size: the step in (0, 1], in natural space; 1 is the full step. Small steps average the noise of batches.
        num_steps: steps per visit; or give ``epochs``.
        epochs: passes over the group's rows per visit; 1 by default.
        batch_size: rows per step, without replacement within an epoch; None takes all rows at every step.
        num_particles: draws per step: 1 (its sign is turned over at the next step), or an even number (pairs of both
            signs). Independent draws of each latent that is drawn under ``AutoExponentialFamily``.
        average: share of the visit's steps, counted from the end, whose naturals are averaged, in [0, 1); 0 keeps the last.
        curvature: "hessian" (second derivatives of the batch), "stein" (from gradients alone), or "auto": Hessians up to
            64 latents.

    Raises:
        PVIError: on construction, for values outside these ranges, or both ``num_steps`` and ``epochs``.

    References:
        Ashman et al., Partitioned Variational Inference, eq. 13 and appendix E.6. Hoffman et al., Stochastic Variational
        Inference, figure 4. Kesten, Accelerated Stochastic Approximation (a step that falls with the changes of sign).
    """

    step_size: float = 0.1
    num_steps: int | None = None
    epochs: int | float | None = None
    batch_size: int | None = None
    num_particles: int = 2
    average: float = 0.5
    curvature: str = "auto"

    stochastic = True
    fused_families = True
    num_draws = 8

    def __post_init__(self):
        name = "StochasticNaturalGradient"
        check_steps(name, self.batch_size, self.num_steps, self.epochs, self.num_particles)
        if not (isinstance(self.step_size, (int, float)) and 0.0 < self.step_size <= 1.0):
            raise PVIError(f"{name}(step_size={self.step_size!r}): expected a number in (0, 1]; 1 is the full step.")
        if not (isinstance(self.average, (int, float)) and 0.0 <= self.average < 1.0):
            raise PVIError(f"{name}(average={self.average!r}): expected a share of the steps in [0, 1).")
        if self.curvature not in ("auto", "hessian", "stein"):
            raise PVIError(f"{name}(curvature={self.curvature!r}): expected 'auto', 'hessian' or 'stein'.")

    def init(self, family: Any, dtype: Any) -> tuple:
        """No state."""
        del family, dtype
        return ()

    def check_families(self) -> None:
        """Refuse a forced source of second derivatives.

        Raises:
            PVIError: naming the argument and what to write.
        """
        if self.curvature != "auto":
            raise PVIError(
                f"StochasticNaturalGradient(curvature={self.curvature!r}) is for Gaussian guides; under AutoExponentialFamily "
                "messages are natural gradients in the latents' own families. Leave it out."
            )

    def solve(
        self,
        factor: LocalFactor,
        cavity: Any,
        site: Any,
        state: tuple,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        del start, guarded
        family = factor.family
        rows_key, noise_key = jax.random.split(key)
        batches = plan_batches(factor, rows_key, self.batch_size, self.num_steps, self.epochs)
        last = jnp.ceil((1.0 - self.average) * batches.num_steps)
        first = jnp.minimum(batches.num_steps - 1, last).astype(jnp.int32)

        def step(k, walk: _Walk) -> _Walk:
            noise, rows = walk.noise, None if batches.rows is None else batches.rows(k)
            if factor.pointwise:
                noise = next_draws(noise_key, k, noise)
                now, halved = self._step(factor, cavity, walk.site, rows, batches.weight, noise)
                moved = jnp.array(True)
            else:
                own = jax.random.fold_in(noise_key, k)
                now, halved, moved = factor.step(cavity, walk.site, self.step_size, own, rows)
            late = jnp.maximum(k - first + 1, 0)
            weight = jnp.where(late > 0, 1.0 / jnp.maximum(late, 1), 0.0)
            average = walk.average + (now - walk.average) * weight
            return _Walk(now, average, noise, walk.backoffs + halved, walk.moved | moved)

        dtype = jax.tree.leaves(site)[0].dtype
        noise = jnp.zeros((self.num_particles, family.dim) if factor.pointwise else (), dtype)
        begin = _Walk(site, site, noise, jnp.int32(0), jnp.array(False))
        walk = jax.lax.fori_loop(0, batches.num_steps, step, begin)
        new = family.symmetrise(walk.average)
        good = walk.moved & all_finite(new) & family.in_domain(cavity + new)
        # So much of the way to a target that stands still, on the average of the iterates that are averaged.
        share = 1.0 - (1.0 - self.step_size) ** (0.5 * (first + 1 + batches.num_steps))
        share = jnp.where(good, jnp.asarray(share, dtype), 0.0)
        return LocalResult(select(good, new, site), state, walk.backoffs, good, share)

    def _step(self, factor: LocalFactor, cavity: Any, site: Any, rows: Any, weight: Any, noise: Any) -> tuple[Any, Any]:
        family, q = factor.family, cavity + site
        moments = family.moments(q)
        hessian = self.curvature == "hessian" or (self.curvature == "auto" and family.dim <= _SMALL)
        found = factor.derivatives(family.draw(moments, noise), rows, hessian)
        gradient = weight * found.gradient
        if found.hessian is not None:
            dense = -weight * jnp.mean(found.hessian, axis=0)
            wanted = 0.5 * (dense + dense.T) if family.full else jnp.diagonal(dense)
        else:
            wanted = stein_precision(family, q, moments, stein_moment(family, noise, gradient))
        change, halvings = move_precision(family, site, q, wanted, self.step_size)
        own = family.precision_product(site, moments.loc)
        force = self.step_size * (jnp.mean(gradient, axis=0) + own - site.precision_mean)
        turned = family.precision_product(family.natural(force, change), moments.loc)
        return family.natural(site.precision_mean + force + turned, site.precision + change), halvings
