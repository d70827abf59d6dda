"""What draws do to rounds: how large a move is in nats, and steps that average the noise of late rounds away."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..families import GaussianFamily, GaussianMoments, Moments, conditional_divergence
from ..sites import late_share
from ._contract import Problem, Rule


@runtime_checkable
class Placed(Protocol):
    """A q with its moments, and how expectations were taken: all that averaging looks at of an evaluation."""

    @property
    def q(self) -> Any:
        """Natural parameters."""
        ...

    @property
    def moments(self) -> Moments:
        """The same as moments."""
        ...

    @property
    def rule(self) -> Rule:
        """Which rule, or draws, expectations were taken by."""
        ...


def move_in_nats(
    family: GaussianFamily, new: Any, old: Any, new_moments: GaussianMoments, old_moments: GaussianMoments, rows: Any
) -> Float[Array, ""]:
    """Symmetrised Kullback-Leibler divergence between two q, local latents included: a move's squared length.

    Shared latents: ``1/2 d^T (L + L') d + 1/2 tr (L - L')(V' - V)``, with ``d`` the change of the location, ``L`` and ``V``
    precisions and covariances; local ones add the same of ``q(z | theta)``, expected under the new q(theta). Written in
    differences, so that float32 resolves small moves.

    Args:
        family: the family of q(theta).
        new: natural parameters of the new q(theta).
        old: of the old one.
        new_moments: the new q(theta) as moments.
        old_moments: the old one.
        rows: new and old natural parameters of the local latents given theta, or None.

    Returns:
        Nats; ``s^2`` for a move of ``s`` posterior sds along one direction.
    """
    shift, change = new_moments.loc - old_moments.loc, old - new
    total = 0.5 * jnp.dot(shift, family.precision_product(new + old, shift))
    if family.full:
        spread = new_moments.scale @ new_moments.scale.T - old_moments.scale @ old_moments.scale.T
    else:
        spread = new_moments.scale**2 - old_moments.scale**2
    total = total + 0.5 * jnp.sum(change.precision * spread)
    if rows is not None:
        total = total + jnp.sum(conditional_divergence(*rows, new_moments))
    return total


class Averaging(NamedTuple):
    """Memory of how far noise, not progress, decides the moves: late naturals are averaged."""

    # Rounds in which the move turned back, less those in which it went on.
    late: Int[Array, ""]
    # The last change of the location.
    shift: Float[Array, "D"]


def no_averaging(dim: int, dtype: Any) -> Averaging:
    """The memory of a fresh schedule."""
    return Averaging(jnp.int32(0), jnp.zeros((dim,), dtype))


def averaging_step(state: Averaging, dtype: Any) -> Float[Array, ""]:
    """The largest step of the next round: see :func:`numpyro_pvi.sites.late_share`."""
    return late_share(state.late, dtype)


def average_late(problem: Problem, state: Averaging, new: Placed, old: Placed) -> Averaging:
    """Shorten steps while successive moves turn back, as noise makes them do, and lengthen them when they clearly go on.

    Args:
        problem: the factors.
        state: the memory.
        new: evaluation after the round.
        old: evaluation before it.

    Returns:
        The memory after the round; nothing is counted where expectations are not by draws.

    References:
        Delyon and Juditsky, Accelerated stochastic approximation, SIAM J. Optim. 3 (1993), after Kesten (1958).
    """
    shift = jnp.where(old.moments.valid, new.moments.loc - old.moments.loc, 0.0)
    image = problem.family.precision_product(new.q, shift)
    last = problem.family.precision_product(new.q, state.shift)
    inner = jnp.dot(state.shift, image)
    size = jnp.sqrt(jnp.abs(jnp.dot(shift, image) * jnp.dot(state.shift, last)))
    back = inner < 0
    # In D dimensions chance alone makes cosines of 1 / sqrt(D). In one dimension every cosine is that, up to rounding, which
    # must not decide: nothing goes on clearly there.
    on = inner * problem.family.dim**0.5 > size * (1 + jnp.finfo(size.dtype).eps ** 0.5)
    late = jnp.maximum(state.late + back.astype(jnp.int32) - (on & (size > 0)).astype(jnp.int32), 0)
    moved = jnp.any(shift != 0)
    counted = Averaging(late, jnp.where(moved, shift, state.shift))
    return jax.tree.map(
        lambda a, b: jnp.where(problem.sampled(old.rule), a, b), counted, Averaging(jnp.zeros_like(late), shift)
    )
