"""Rows as they come: in which order, drawn again from those seen so far, and q updated by a few of them at a time."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import RowProgram
from ..families import GaussianFamily, GaussianNatural


@runtime_checkable
class Stream(Protocol):
    """What a runtime offers to a schedule that takes rows as they come."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        ...

    def first_rows(self) -> Int[Array, "M"]:
        """Index of every group's first row: where its label first appears."""
        ...

    def program(self, expectation: str) -> RowProgram:
        """How expectations of single rows are taken; raises where rows have no affine predictors."""
        ...

    def row(self, group: Int[Array, ""], position: Int[Array, ""]) -> Any:
        """The arrays of one row of one group."""
        ...

    def classes(self) -> tuple[Int[Array, "M N"], int] | None:
        """The class of every group's rows (-1 beyond the last), and the number of classes; None without classes."""
        ...


class Replay(NamedTuple):
    """Where each class's rows stand, for draws from the rows seen so far."""

    # Positions of each group's rows, sorted by class, and within a class in their order.
    order: Int[Array, "M N"]
    # First entry of each class, and of what comes after the last.
    starts: Int[Array, "M ends"]


def sort_classes(stream: Stream) -> Replay:
    """Sort every group's rows by class; one class where the responses have none.

    Returns the order, in which rows seen so far are the first of each class.
    """
    found = stream.classes()
    sizes = jnp.asarray(stream.sizes, jnp.int32)
    positions = jnp.arange(max(stream.sizes), dtype=jnp.int32)
    inside = positions < sizes[:, None]
    classes, count = (jnp.where(inside, 0, -1), 1) if found is None else found
    kept = jnp.where(classes < 0, count, classes)
    order = jnp.argsort(kept, axis=1, stable=True).astype(jnp.int32)
    starts = jnp.stack([jnp.sum(kept < c, axis=1) for c in range(count + 1)], axis=1).astype(jnp.int32)
    return Replay(order, starts)


def draw_seen(
    replay: Replay, group: Int[Array, ""], seen: Int[Array, ""], key: Any, count: int
) -> tuple[Int[Array, "r"], Bool[Array, "r"]]:
    """Draw positions among a group's first rows: a class with a seen row uniformly, then one of its seen rows uniformly.

    ``count``: how many to draw, with replacement. Returns the positions, and whether there was anything to draw.
    """
    order, starts = replay.order[group], replay.starts[group]
    # Rows of one class stand in their order, so those seen are a prefix: found by bisection.
    before = jax.vmap(lambda low, high: _count_below(order, low, high, seen))(starts[:-1], starts[1:])
    class_key, row_key = jax.random.split(key)
    chosen = jax.random.categorical(class_key, jnp.where(before > 0, 0.0, -jnp.inf), shape=(count,))
    offset = jax.random.randint(row_key, (count,), 0, jnp.maximum(before[chosen], 1))
    return order[starts[chosen] + offset], jnp.full((count,), seen > 0)


def _count_below(order, low, high, limit) -> Int[Array, ""]:
    """How many of the ascending entries of ``order[low:high]`` are below a limit."""

    def halve(at, _):
        left, right = at
        middle = (left + right) // 2
        below = (order[jnp.minimum(middle, order.shape[0] - 1)] < limit) & (left < right)
        return (jnp.where(below, middle + 1, left), jnp.where(below | (left >= right), right, middle)), None

    steps = max(order.shape[0], 1).bit_length() + 1
    (left, _), _ = jax.lax.scan(halve, (low, high), None, length=steps)
    return left - low


# ------------------------------------------------------------------------------------------------ updates by a few rows
# Updates of an agent's q by a few rows each, in closed form, many in one compiled loop.
#
# Between two mixings an agent is alone, and a row of K affine predictors changes q by rank K: with ``S = A V A^T``, g
# and W the row's weighted gradient and curvature there, ``V <- V - V A^T (I + W S)^-1 W A V`` and ``m <- m + V A^T g``
# with the *new* V, in O(K D^2); under a mean-field q all of it is O(K D). Natural parameters are formed when agents
# mix.


class Taken(NamedTuple):
    """What one exchange's updates did, summed over the agents."""

    # Change of each agent's natural parameters.
    change: GaussianNatural
    # Updates left out because q would not have stayed normalisable.
    refused: Int[Array, "n"]
    # DELBO of the rows taken, and its modelling gap (NaN where it is not known), nats.
    value: Float[Array, ""]
    gap: Float[Array, ""]


class _Update(NamedTuple):
    """One update: the law of its predictors before and after it, and what its rows said."""

    mean: Float[Array, "K"]
    spread: Float[Array, "K K"]
    gradient: Float[Array, "K"]
    curvature: Float[Array, "K K"]
    new_mean: Float[Array, "K"]
    new_spread: Float[Array, "K K"]
    # KL of q after the update to q before it, nats.
    divergence: Float[Array, ""]
    good: Bool[Array, ""]


def take_rows(
    family: GaussianFamily,
    program: RowProgram,
    stream: Stream,
    own: GaussianNatural,
    positions: Int[Array, "n U B"],
    counted: Bool[Array, "n U B"],
    weight: float,
) -> Taken:
    """A number of updates of every agent, each by a few rows, from its own q.

    ``program``: how expectations of rows are taken; ``own``: natural parameters of every agent's q, with a leading axis of
    agents; ``positions``: per agent and update, its rows; ``weight``: w, the weight of the likelihood. Returns what was done.
    """
    agents = jnp.arange(positions.shape[0])

    def one(agent, natural, positions, counted):
        data = jax.vmap(jax.vmap(lambda at: stream.row(agent, at)))(positions)
        design, offset = jax.vmap(jax.vmap(program.linear))(data)
        steps = (data, design, offset, counted)
        walk = _walk_full if family.full else _walk_diagonal
        change, updates = walk(family, program, natural, steps, weight)
        value, gap = _bound(program, family, data, counted, updates, weight)
        any_rows = jnp.any(counted, axis=1)
        refused = jnp.sum(any_rows & ~updates.good)
        return change, refused, value, gap

    change, refused, value, gap = jax.vmap(one)(agents, own, positions, counted)
    return Taken(change, refused.astype(jnp.int32), jnp.sum(value), jnp.sum(gap))


def _walk_full(family, program, natural: GaussianNatural, steps, weight) -> tuple[GaussianNatural, _Update]:
    """Updates on the covariance, and the natural parameters that all of them together add."""
    moments = family.moments(natural)
    covariance = moments.scale @ moments.scale.T

    def one(law, step):
        loc, covariance = law
        data, design, offset, counted = step
        rows, constant = _flat(design), _flat(offset)
        image = rows @ covariance
        mean, spread = rows @ loc + constant, image @ rows.T
        gradient, curvature = _weighted(program, data, mean, spread, counted, weight)
        gain, ratio = _gain(curvature, spread)
        good = (ratio > 0) & jnp.all(jnp.isfinite(gain)) & jnp.all(jnp.isfinite(gradient))
        gradient, curvature, gain = (jnp.where(good, x, 0.0) for x in (gradient, curvature, gain))
        loc = loc + _new_gradient(gradient, spread, gain) @ image
        covariance = covariance - image.T @ (gain @ image)
        return (loc, covariance), (mean, spread, gradient, curvature, good)

    _, (mean, spread, gradient, curvature, good) = jax.lax.scan(one, (moments.loc, covariance), steps)
    _, design, offset, _ = steps
    rows = design.reshape(*mean.shape, -1)
    center = mean - offset.reshape(mean.shape)
    slope = gradient + jnp.einsum("ukl,ul->uk", curvature, center)
    bent = jnp.einsum("ukl,uld->ukd", curvature, rows)
    flat = rows.reshape(-1, rows.shape[-1])
    change = GaussianNatural(slope.reshape(-1) @ flat, flat.T @ bent.reshape(flat.shape))
    return family.symmetrise(change), jax.vmap(_after)(mean, spread, gradient, curvature, good)


def _new_gradient(gradient, spread, gain):
    """What makes ``V A^T g`` one with the new V; without it the mean would move as misprinted in 003, lemma 3."""
    return gradient - (spread @ gradient) @ gain.T


def _after(mean, spread, gradient, curvature, good) -> _Update:
    """The law of the predictors after an update of a full covariance, by K numbers alone."""
    gain, ratio = _gain(curvature, spread)
    new = spread - spread @ gain @ spread
    shift = new @ gradient
    size = jnp.dot(gradient, shift) - jnp.dot(shift, curvature @ shift)
    divergence = 0.5 * (jnp.log(jnp.where(ratio > 0, ratio, 1.0)) - jnp.sum(curvature * new) + size)
    return _Update(mean, spread, gradient, curvature, mean + shift, new, divergence, good)


def _walk_diagonal(family, program, natural: GaussianNatural, steps, weight) -> tuple[GaussianNatural, _Update]:
    """Updates of a mean-field q, on its natural parameters."""

    def one(law, step):
        vector, precision = law
        data, design, offset, counted = step
        rows, constant = _flat(design), _flat(offset)
        loc = vector / precision
        mean, spread = rows @ loc + constant, (rows / precision) @ rows.T
        gradient, curvature = _weighted(program, data, mean, spread, counted, weight)
        bend = jnp.sum(rows * (curvature @ rows), axis=0)
        good = jnp.all(precision + bend > 0) & jnp.all(jnp.isfinite(bend)) & jnp.all(jnp.isfinite(gradient))
        gradient, bend = jnp.where(good, gradient, 0.0), jnp.where(good, bend, 0.0)
        new = GaussianNatural(vector + gradient @ rows + bend * loc, precision + bend)
        new_loc = new.precision_mean / new.precision
        share, shift = precision / new.precision, new_loc - loc
        divergence = 0.5 * jnp.sum(share - 1.0 - jnp.log(share) + precision * shift**2)
        after = rows @ new_loc + constant, (rows / new.precision) @ rows.T
        found = _Update(mean, spread, gradient, curvature, *after, divergence, good)
        return (new.precision_mean, new.precision), found

    last, updates = jax.lax.scan(one, (natural.precision_mean, natural.precision), steps)
    return GaussianNatural(*last) - natural, updates


def _flat(batch: Float[Array, "B K *rest"]) -> Float[Array, "..."]:
    return batch.reshape(-1, *batch.shape[2:])


def _weighted(program: RowProgram, data, mean, spread, counted, weight):
    """Gradient and curvature of all rows of an update at the law of their predictors, times the weight of the likelihood."""
    batch = counted.shape[0]
    size = mean.shape[0] // batch
    means = mean.reshape(batch, size)
    spreads = _own_blocks(spread, batch)
    found = jax.vmap(lambda d, m, s: program.expected(d, m, s, value=False))(data, means, spreads)
    share = weight * counted.astype(mean.dtype)
    gradient = jnp.where(share[:, None] > 0, share[:, None] * found.gradient, 0.0).reshape(-1)
    blocks = jnp.where(share[:, None, None] > 0, share[:, None, None] * found.curvature, 0.0)
    if batch == 1:
        return gradient, blocks[0]
    eye = jnp.eye(batch, dtype=mean.dtype)
    return gradient, jnp.einsum("bc,bkl->bkcl", eye, blocks).reshape(batch * size, batch * size)


def _own_blocks(matrix: Float[Array, "L L"], batch: int) -> Float[Array, "B K K"]:
    size = matrix.shape[0] // batch
    return jnp.einsum("bkbl->bkl", matrix.reshape(batch, size, batch, size))


def _gain(curvature: Float[Array, "K K"], spread: Float[Array, "K K"]) -> tuple[Float[Array, "K K"], Float[Array, ""]]:
    """``(I + W S)^-1 W`` and ``det(I + W S)``, the ratio of the precisions' determinants."""
    if curvature.shape[0] == 1:
        ratio = 1.0 + curvature[0, 0] * spread[0, 0]
        return curvature / jnp.where(ratio > 0, ratio, 1.0), ratio
    matrix = jnp.eye(curvature.shape[0], dtype=curvature.dtype) + curvature @ spread
    sign, log = jnp.linalg.slogdet(matrix)
    return jnp.linalg.solve(matrix, curvature), sign * jnp.exp(log)


def _bound(program: RowProgram, family, data, counted, updates: _Update, weight) -> tuple[Array, Array]:
    """DELBO of one agent's rows, ``sum_u E log l - KL / w``, and how far it is below the exact updates' log normalisers."""
    batch = counted.shape[1]

    def value(data, counted, mean, spread):
        found = jax.vmap(program.value)(data, mean.reshape(batch, -1), _own_blocks(spread, batch))
        return jnp.sum(jnp.where(counted, found, 0.0))

    values = jax.vmap(value)(data, counted, updates.new_mean, updates.new_spread)
    used = jnp.any(counted, axis=1)
    bounds = jnp.where(used, values - updates.divergence / weight, 0.0)
    if program.rule == "exact" and family.full:
        return jnp.sum(bounds), jnp.zeros((), bounds.dtype)
    if updates.mean.shape[1] > 1:
        return jnp.sum(bounds), jnp.where(jnp.any(used), jnp.nan, jnp.zeros((), bounds.dtype))

    def exact(data, mean, spread, new_mean, new_spread):
        first = jax.tree.map(lambda x: x[0], data)
        sds = jnp.sqrt(spread[0, 0]), jnp.sqrt(new_spread[0, 0])
        return program.log_normaliser(first, weight, mean[0], sds[0], new_mean[0], sds[1]) / weight

    logs = jax.vmap(exact)(data, updates.mean, updates.spread, updates.new_mean, updates.new_spread)
    return jnp.sum(bounds), jnp.sum(jnp.where(used, logs - bounds, 0.0))
