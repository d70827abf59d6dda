"""The joint step of every schedule: the test that it passes through, and how late rounds average noise away."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..expectations import Expected
from ..families import GaussianFamily, GaussianMoments, Moments, conditional_divergence
from ..sites import MAX_HALVINGS, SiteStack, back_off, late_share, posterior, select
from ._contract import Accepted, Evaluation, Problem, Rule
from ._convergence import FELL, IMPROPER, NOT_FINITE

# Halvings of a sweep's joint step before the natural gradient at the old q takes its place.
SWEEP_HALVINGS = 4
# Fall of the ELBO, in units of the size of its terms, that is no error of a coarse quadrature rule.
_HOPELESS = 0.1


def elbo_gain(new: Evaluation, old: Evaluation) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How much the global ELBO has risen, over the factors that were finite before.

    ``old``: evaluation of the q it would replace, on the same draws if there are any. Returns ``(gain, rounding)`` in nats:
    gains smaller than ``rounding`` in size mean nothing.
    """
    known = jnp.isfinite(old.groups.value)
    gain = jnp.sum(jnp.where(known, new.groups.value - old.groups.value, 0.0)) + new.rest - old.rest
    if new.prior is not None and old.prior is not None:
        gain = gain + jnp.where(jnp.isfinite(old.prior.value), new.prior.value - old.prior.value, 0.0)
    rounding = 8 * jnp.finfo(new.size.dtype).eps * jnp.where(jnp.isfinite(old.size), old.size, 0.0)
    return gain, rounding


def elbo_has_not_fallen(new: Evaluation, old: Evaluation, allowance: Any = 0.0) -> Bool[Array, ""]:
    """Whether a candidate is at least as good as the old q beyond rounding.

    Groups whose factor was not finite before are left out of the comparison; none may become non-finite, in its value or in
    what it asks for: from a q where that is no number no visit would lead away. ``new``: evaluation of
    the candidate; ``old``: evaluation of the q it would replace, on the same draws if there are any; ``allowance``: nats it may
    lose beside rounding. Returns True when the candidate may be taken.
    """
    stays_finite = jnp.all(_finite(new.groups) | ~_finite(old.groups))
    gain, rounding = elbo_gain(new, old)
    # A q that was not normalisable has no bound to fall from.
    better = (gain >= -rounding - allowance) | ~old.moments.valid
    return new.moments.valid & stays_finite & better


def _finite(groups: Expected) -> Bool[Array, "M"]:
    """Of which groups value and target are numbers; of a target all its vectors, and the smallest of its arrays, tell."""
    leaves, finite = jax.tree.leaves(groups.target), jnp.isfinite(groups.value)
    least = min((x.size for x in leaves), default=0)
    for x in leaves:
        if x.ndim <= 2 or x.size == least:
            # Sites of all groups may lie in one vector.
            own = x.ndim > 0 and x.shape[0] == finite.shape[0]
            finite = finite & jnp.all(jnp.isfinite(x).reshape(finite.shape[0] if own else 1, -1), axis=-1)
    return finite


def taken_whole(problem: Problem) -> float:
    """How many groups' changes may be absorbed at once and whole: a joint step is this over the groups that are, or 1.

    Returns infinity where a visit knows where the other sites are going to (a step to its factor's target); else as many as it
    allows for: one, or the ``power`` of :class:`numpyro_pvi.solvers.LocalELBO`.
    """
    alone = problem.stochastic or problem.solver.moves_alone
    return max(1.0, float(problem.solver.power)) if alone else math.inf


def refuse_power(schedule: Any, problem: Problem) -> None:
    """Raise for a power above 1 where groups are not visited in parallel, again and again.

    Raises PVIError naming the schedule.
    """
    if problem.solver.power > 1.0:
        raise PVIError(
            f"{type(schedule).__name__} fits one group after another and is done, while visits of "
            f"LocalELBO(power={problem.solver.power!r}) go a part of the way each, for groups that are visited in parallel: leave "
            "power out."
        )


def shorten(problem: Problem, at: Callable[[Any], SiteStack], step: Any, halvings: Any = 0) -> tuple[Any, Any]:
    """Halve a joint step until q is normalisable at the sites ``at(step)``."""

    def valid(step):
        return problem.family.in_domain(posterior(problem.prior_natural, at(step)))

    return back_off(valid, step, halvings)


def accept_jointly(
    problem: Problem,
    old_sites: SiteStack,
    proposal: SiteStack,
    old: Evaluation,
    step: Float[Array, ""],
    noise: Any,
    probe: Any = None,
    fallback: SiteStack | None = None,
    test: Callable[[Evaluation, SiteStack], Any] | None = None,
    restart: Any = None,
    opening: Any = None,
) -> Accepted:
    """Move all sites together towards their proposals, halving the joint step until q is valid and the ELBO has not fallen.

    ``eta <- eta + step * (proposal - eta)`` with one common factor.

    Args:
        problem: the factors.
        old_sites: where the sites are.
        proposal: where the local solves want them.
        old: evaluation at the old sites, on the same draws.
        step: first step tried.
        noise: the round's draws, or None.
        probe: vector for the curvature product of a mean-field q, or None.
        fallback: proposals that take over, from a full step again, when a few halvings have not helped.
        test: whether a candidate may be taken, from its evaluation and sites, in place of the test of the global ELBO.
        restart: the step below which they do; None for ``2^-SWEEP_HALVINGS`` of the first.
        opening: whether there is no evaluation at the old sites yet: it is all that is done, and accepted.

    Returns:
        The accepted sites with their evaluation; the old ones, with ``accepted`` False, when no step was acceptable.
    """
    if problem.matches_moments or problem.blind:
        return accept_valid(problem, old_sites, proposal, old, step, noise, probe)
    restart = step * 2.0**-SWEEP_HALVINGS if restart is None else restart
    if opening is not None:
        # Any share of the way from where the sites are to there; a copy of them less than to choose between candidates.
        proposal = select(opening, old_sites, proposal)
        fallback = None if fallback is None else select(opening, old_sites, fallback)

    def share(step):
        """The share of the proposal's change: the fallback begins again with a full step."""
        return step if fallback is None else jnp.where(step < restart, 2 * step / restart, step)

    def at(step):
        aim = proposal if fallback is None else select(step < restart, fallback, proposal)
        return problem.between(old_sites, aim, share(step))

    # A fall that no error of quadrature explains is refused by the rule at hand.
    hopeless = jnp.where(old.moments.valid, old.elbo - _HOPELESS * (1.0 + old.size), -jnp.inf) if test is None else None

    def unfinished(state: Accepted):
        return ~state.accepted & (state.halvings < MAX_HALVINGS)

    def attempt(state: Accepted) -> Accepted:
        # Validity costs one Cholesky, the ELBO a pass over the data: settle the first before paying for the second.
        step, halvings = shorten(problem, at, state.step, state.halvings)
        sites, again = at(step), False if opening is None else opening
        evaluation = problem.evaluate(sites, old.rule, noise, probe, again, trial=probe is None, hopeless=hopeless)
        if test is None:
            spare = problem.allowance(sites, evaluation, old_sites, old, share(step))
            good = elbo_has_not_fallen(evaluation, old, spare)
        else:
            good = test(evaluation, sites)
        good = good if opening is None else good | opening
        halved, lost = jnp.where(good, step, 0.5 * step), state.why + _lost(evaluation, old)
        return Accepted(sites, evaluation, halved, halvings + ~good, good, state.tries + 1, lost)

    # While it looks, ``why`` counts the candidates that were not finite.
    first = Accepted(old_sites, old, step, jnp.int32(0), jnp.array(False), jnp.int32(0), jnp.int32(0))
    last = jax.lax.while_loop(unfinished, attempt, first)

    def keep(new, previous):
        return jax.tree.map(lambda a, b: jnp.where(last.accepted, a, b), new, previous)

    sites, evaluation = keep(last.sites, old_sites), keep(last.evaluation, old)
    why = jnp.where(2 * last.why > last.tries, NOT_FINITE, _why(last.evaluation, old)).astype(jnp.int32)
    return last._replace(sites=sites, evaluation=evaluation, step=share(last.step), why=why)


def _lost(tried: Evaluation, old: Evaluation) -> Bool[Array, ""]:
    """Whether a candidate lost a group whose factor was finite."""
    return ~jnp.all(jnp.isfinite(tried.groups.value) | ~jnp.isfinite(old.groups.value))


def _why(tried: Evaluation, old: Evaluation) -> Int[Array, ""]:
    """Why the last candidate of a search was refused."""
    code = jnp.where(_lost(tried, old) | ~jnp.isfinite(old.elbo), NOT_FINITE, FELL)
    return jnp.where(tried.moments.valid, code, IMPROPER).astype(jnp.int32)


def accept_valid(
    problem: Problem,
    old_sites: SiteStack,
    proposal: SiteStack,
    old: Evaluation,
    step: Float[Array, ""],
    noise: Any,
    probe: Any = None,
) -> Accepted:
    """Take proposals as far as q stays valid: of a solver that matches moments, or whose rows nobody else may look at.

    ``proposal``: where the local solves want them; ``old``: evaluation at the old sites; ``step``: joint step; halved until q
    is normalisable, at most 20 times; ``probe``: vector for the curvature product of a mean-field q, or None. Returns as of
    :func:`accept_jointly`.
    """

    def at(step):
        return problem.between(old_sites, proposal, step)

    step, halvings = shorten(problem, at, step)
    sites = at(step)
    good = problem.family.in_domain(posterior(problem.prior_natural, sites))
    sites = jax.tree.map(lambda a, b: jnp.where(good, a, b), sites, old_sites)
    evaluation = problem.evaluate(sites, old.rule, noise, probe)
    return Accepted(sites, evaluation, step, halvings, good, jnp.int32(1), IMPROPER)


def accept_once(
    problem: Problem,
    old_sites: SiteStack,
    proposal: SiteStack,
    old: Evaluation,
    step: Float[Array, ""],
    noise: Any,
    test: Callable[[Evaluation, SiteStack], Any] | None = None,
) -> Accepted:
    """Take the proposals of a stochastic solver after one evaluation: refuse only what its own noise cannot explain.

    A jitter of one posterior sd in every coordinate costs ``D / 2`` nats. A round that loses no more stays; one that loses
    more, or leaves a factor that is not finite, is undone, and the next one begins with half the step. There is no second
    evaluation: a round costs its gradients and one look at the values. ``problem``: the factors; ``old_sites``: where the sites
    are; ``proposal``: where the local solves want them; ``old``: evaluation at the old sites, on the same draws; ``step``:
    joint step; halved until q is normalisable; ``noise``: the draws of all evaluations, or None; ``test``: as of
    :func:`accept_jointly`. Returns as of :func:`accept_jointly`.
    """
    if problem.blind:
        return accept_valid(problem, old_sites, proposal, old, step, noise)

    def at(step):
        return problem.between(old_sites, proposal, step)

    step, halvings = shorten(problem, at, step)
    sites = at(step)
    evaluation = problem.evaluate(sites, old.rule, noise)
    gain, rounding = elbo_gain(evaluation, old)
    known = jnp.isfinite(old.groups.value)
    slack = 0.5 * problem.family.dim
    if problem.units is not None:
        # Groups' own latents move by the draws that they are tested on.
        slack = slack + problem.allowance(sites, evaluation, old_sites, old, step)
    good = (gain >= -rounding - slack) | ~old.moments.valid
    good &= evaluation.moments.valid & jnp.all(jnp.isfinite(evaluation.groups.value) | ~known)
    good = good if test is None else test(evaluation, sites)

    def keep(new, previous):
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, previous)

    why = _why(evaluation, old)
    sites, evaluation = keep(sites, old_sites), keep(evaluation, old)
    return Accepted(sites, evaluation, jnp.where(good, step, 0.5 * step), halvings + ~good, good, jnp.int32(1), why)


# ---------------------------------------------------------------------------------------------------------------- noise
# What draws do to rounds: how large a move is in nats, and steps that average the noise of late rounds away.


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


@runtime_checkable
class ByDraws(Protocol):
    """All that averaging asks of a problem."""

    @property
    def family(self) -> Any:
        """Of q."""
        ...

    @property
    def in_turns(self) -> bool:
        """Whether components move in turns."""
        ...

    def sampled(self, rule: Rule) -> Any:
        """Whether a rule's expectations are by draws."""
        ...


def move_in_nats(
    family: GaussianFamily, new: Any, old: Any, new_moments: GaussianMoments, old_moments: GaussianMoments, rows: Any
) -> Float[Array, ""]:
    """Symmetrised Kullback-Leibler divergence between two q, local latents included: a move's squared length.

    Shared latents: ``1/2 d^T (L + L') d + 1/2 tr (L - L')(V' - V)``, with ``d`` the change of the location, ``L`` and ``V``
    precisions and covariances; local ones add the same of ``q(z | theta)``, expected under the new q(theta). Written in
    differences, so that float32 resolves small moves. ``family``: the family of q(theta); ``new``: natural parameters of the
    new q(theta); ``old``: of the old one; ``new_moments``: the new q(theta) as moments; ``old_moments``: the old one; ``rows``:
    new and old natural parameters of the local latents given theta, or None. Returns nats; ``s^2`` for a move of ``s``
    posterior sds along one direction.
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


# Rounds that moves are averaged over at least, and how many more for every round that counts as late.
_WINDOW, _WINDOW_SHARE = 10.0, 0.5
# Rounds that a mean move has to rest on; its square, in units of what noise alone makes of it, above which it is a drift; and how
# many times what is put up with it is where steps lengthen.
_LEAST_SEEN, _DRIFTS, _CLEARLY = 6.0, 1.0, 2.0
# Share of the largest coordinate's moves below which one's own count as standing still.
_STILL = 1e-2
# The coordinates among which the largest such square is put up with up to a drift; it grows with the log of their number.
_FEW_COORDINATES = 4


class Averaging(NamedTuple):
    """Memory of how far noise, not progress, decides the moves: late naturals are averaged.

    Moves by coordinate, in posterior sds, are averaged over a window that grows with ``late``: their mean, their mean square, and
    sums of the weights and of their squares.
    """

    # Rounds in which the move turned back, less those in which it went on.
    late: Int[Array, ""]
    # The last change of the location.
    shift: Float[Array, "D"]
    mean: Float[Array, "D"]
    square: Float[Array, "D"]
    weights: Float[Array, "2"]

    def remembering(self, move: Float[Array, "D"]) -> Averaging:
        """The memory after a move, in posterior sds."""
        share = (1.0 / self._window(move.dtype)).astype(move.dtype)
        mean, square = self.mean + share * (move - self.mean), self.square + share * (move**2 - self.square)
        weights = jnp.stack([(1 - share) * self.weights[0] + share, (1 - share) ** 2 * self.weights[1] + share**2])
        return self._replace(mean=mean, square=square, weights=weights.astype(self.weights.dtype))

    def at(self, place: Callable[..., Array], *before: Averaging) -> Averaging:
        """The same of other coordinates, by a map of vectors; ``before``: memories whose vectors are its first arguments."""
        own = {n: place(*(getattr(x, n) for x in before), getattr(self, n)) for n in ("shift", "mean", "square")}
        return self._replace(**own)

    def _window(self, dtype: Any) -> Float[Array, ""]:
        return _WINDOW + _WINDOW_SHARE * self.late.astype(dtype)

    @property
    def _excess(self) -> Float[Array, "D"]:
        """Squared mean moves, in units of what independent moves of this size would make of them."""
        one, two = self.weights
        seen = (two > 0) & (one**2 >= _LEAST_SEEN * two)
        chance = self.square * two / jnp.where(one > 0, one, 1.0)
        # A coordinate that hardly moves beside others goes one way without getting anywhere.
        seen = seen & (self.square > _STILL**2 * jnp.max(self.square, initial=0.0))
        return jnp.where(seen & (chance > 0), self.mean**2 / jnp.where(chance > 0, chance, 1.0), 0.0)

    @property
    def chance(self) -> float:
        """What excess is put up with: in one of hundreds of coordinates chance alone makes moves add up, and steps would stay."""
        return max(_DRIFTS, math.log(max(self.mean.shape[-1], 1) / _FEW_COORDINATES))

    @property
    def excess(self) -> Float[Array, ""]:
        """The largest of these; far below 1 where noise moves q to and fro, as what one round adds the next ones take back."""
        return jnp.max(self._excess, initial=0.0)

    @property
    def drift(self) -> Float[Array, ""]:
        """How far q has drifted within the window, posterior sds of the coordinate that did most; 0 where noise explains all."""
        one = self.weights[0]
        own = jnp.where(self._excess > _DRIFTS, jnp.abs(self.mean) / jnp.where(one > 0, one, 1.0), 0.0)
        return jnp.max(own, initial=0.0) * self._window(self.mean.dtype)


def no_averaging(dim: int, dtype: Any) -> Averaging:
    """The memory of a fresh schedule."""
    none = jnp.zeros((dim,), dtype)
    return Averaging(jnp.int32(0), none, none, none, jnp.zeros((2,), dtype))


def averaging_step(state: Averaging, dtype: Any) -> Float[Array, ""]:
    """The largest step of the next round: see :func:`numpyro_pvi.sites.late_share`."""
    return late_share(state.late, dtype)


def average_late(problem: ByDraws, state: Averaging, new: Placed, old: Placed) -> Averaging:
    """Shorten steps while successive moves turn back, as noise makes them do, and lengthen them when they clearly go on.

    Half of all noisy moves turn back, also where q drifts slowly through them, along a valley say: by steps that shrink it would
    never arrive. So none counts while any coordinate's moves of many rounds add up to more than their noise does. ``new``:
    evaluation after the round; ``old``: evaluation before it. Returns the memory after the round; nothing is counted where
    expectations are not by draws.

    References:
        Delyon and Juditsky, Accelerated stochastic approximation, SIAM J. Optim. 3 (1993), after Kesten (1958).
    """
    shift = jnp.where(old.moments.valid, problem.family.displacement(new.moments, old.moments), 0.0)
    image = problem.family.precision_product(new.q, shift)
    last = problem.family.precision_product(new.q, state.shift)
    inner = jnp.dot(state.shift, image)
    size = jnp.sqrt(jnp.abs(jnp.dot(shift, image) * jnp.dot(state.shift, last)))
    back = inner < 0
    # In D dimensions chance alone makes cosines of 1 / sqrt(D). In one dimension every cosine is that, up to rounding, which
    # must not decide: nothing goes on clearly there.
    # The statistics of one member move together, so that chance makes large cosines where components move in turns as well.
    dim = 1 if problem.in_turns else problem.family.dim
    on = inner * dim**0.5 > size * (1 + jnp.finfo(size.dtype).eps ** 0.5)
    sds = problem.family.displacement_sds(new.moments)
    after = state.remembering(jnp.where(sds > 0, shift / jnp.where(sds > 0, sds, 1.0), 0.0).astype(shift.dtype))
    back, on = back & (after.excess <= after.chance), (on & (size > 0)) | (after.excess > _CLEARLY * after.chance)
    late = jnp.maximum(state.late + back.astype(jnp.int32) - on.astype(jnp.int32), 0)
    moved = jnp.any(shift != 0)
    counted = after._replace(late=late, shift=jnp.where(moved, shift, state.shift))
    fresh = no_averaging(shift.shape[0], shift.dtype)._replace(shift=shift)
    return jax.tree.map(lambda a, b: jnp.where(problem.sampled(old.rule), a, b), counted, fresh)
