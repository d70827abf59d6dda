"""How long a group takes from reading q to handing in its site."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..errors import PVIError
from ..solvers import ByLabel, by_label, freeze, resolve

_FORMS = (
    "None (no delay), a positive number, one per group, a dict by label, ('exponential', means), "
    "measured_delays(seconds), or a function of (key, num_groups)"
)

# Keys for which what a function of delays returns is looked at before it is used.
_LOOKS = 8


def _positive(x: float) -> bool:
    return 0.0 < x < math.inf


@dataclasses.dataclass(frozen=True)
class MeasuredDelays:
    """Delays drawn anew for every visit from what was measured; made by :func:`measured_delays`.

    Args:
        seconds: pairs of label and measured durations.
    """

    seconds: tuple[tuple[Hashable, tuple[float, ...]], ...]


def measured_delays(seconds: Mapping[Hashable, Sequence[float] | float]) -> MeasuredDelays:
    """Turn measured durations of the groups' visits into delays of :class:`Asynchronous`.

    Every visit takes one of its group's measured durations, drawn with equal chances, so the simulated clock runs in the
    unit that was measured.

    Args:
        seconds: durations by group label, one or more each.

    Returns:
        A hashable value for ``Asynchronous(delays=...)``.

    Raises:
        PVIError: for a group without durations, or a duration that is not positive.
    """
    if not isinstance(seconds, Mapping) or not seconds:
        raise PVIError(f"measured_delays({seconds!r}): expected a dict of durations by group label.")
    found = []
    for label, values in seconds.items():
        several = freeze(values, f"measured_delays, group {label!r}: seconds", _positive, "a positive duration")
        if isinstance(several, ByLabel):
            raise PVIError(f"measured_delays, group {label!r}: expected durations, got a dict.")
        found.append((label, (several,) if isinstance(several, float) else several))
    return MeasuredDelays(tuple(found))


def freeze_delays(delays: Any) -> Any:
    """Make the ``delays`` of a schedule hashable.

    Args:
        delays: None, numbers, a dict by label, a random law or a function.

    Returns:
        The same, hashable.

    Raises:
        PVIError: naming the forms that are understood.
    """
    if delays is None or isinstance(delays, MeasuredDelays):
        return delays
    if isinstance(delays, str) or (isinstance(delays, tuple) and delays and isinstance(delays[0], str)):
        if isinstance(delays, str) or delays[0] != "exponential" or len(delays) != 2:
            raise PVIError(f"delays={delays!r}: expected {_FORMS}.")
        return ("exponential", freeze(delays[1], "delays=('exponential', means): means", _positive, "a positive mean"))
    if callable(delays):
        try:
            hash(delays)
        except TypeError:
            raise PVIError(
                f"delays={delays!r} is not hashable, and settings of a schedule must be: pass a plain function of "
                "(key, num_groups)."
            ) from None
        return delays
    return freeze(delays, "delays", _positive, "a positive number (delays=None is no delay)")


def delays_by_label(delays: Any) -> bool:
    """Whether delays that :func:`freeze_delays` made name groups."""
    # ("exponential", means) is a pair whose second entry may name groups.
    means = delays[1] if isinstance(delays, tuple) and len(delays) == 2 else None
    return isinstance(delays, MeasuredDelays) or by_label(delays) or by_label(means)


def delay_sampler(delays: Any, problem: Any, dtype: Any) -> Callable[[Any, Any], Float[Array, ""]]:
    """How long a group's next visit takes.

    Args:
        delays: what :func:`freeze_delays` made; not None.
        problem: the factors.
        dtype: floating dtype of the clock.

    Returns:
        A function of a key and a group's index.

    Raises:
        PVIError: for delays that do not fit the groups.
    """
    if isinstance(delays, MeasuredDelays):
        return _resampled(delays, problem, dtype)
    if isinstance(delays, tuple) and not isinstance(delays, ByLabel) and delays[0] == "exponential":
        means = jnp.asarray(resolve(delays[1], "delays=('exponential', means)", problem, 1.0), dtype)
        return lambda key, m: means[m] * jax.random.exponential(key, (), dtype)
    if callable(delays):
        draw = cast(Callable[..., Any], delays)
        _check_drawn(draw, problem)
        tiny = jnp.finfo(dtype).tiny

        def sample(key, m):
            found = jnp.asarray(draw(key, problem.num_groups), dtype)[m]
            # A clock that stands still or runs backwards would never get to the other groups.
            return jnp.where((found > tiny) & jnp.isfinite(found), found, tiny)

        return sample
    fixed = jnp.asarray(resolve(delays, "delays", problem, 1.0), dtype)
    return lambda key, m: fixed[m]


def _check_drawn(draw: Callable[..., Any], problem: Any) -> None:
    """Look at what a function of delays returns for a few keys: durations, one for each group."""
    count, who = problem.num_groups, f"Asynchronous(delays={getattr(draw, '__name__', draw)!s})"
    wanted = (
        f"it must return one positive, finite duration for each of the {count} groups, in an array of shape ({count},)"
    )
    try:
        # init runs compiled, where random numbers have no values unless they are asked for.
        with jax.ensure_compile_time_eval():
            found = [np.asarray(draw(jax.random.key(seed), count), float) for seed in range(_LOOKS)]
    except (TypeError, ValueError) as error:
        raise PVIError(f"{who} returned what is no array of numbers ({error}); {wanted}.") from error
    if found[0].shape != (count,):
        raise PVIError(f"{who} returned shape {found[0].shape}; {wanted}.")
    for each in found:
        for label, seconds in zip(problem.labels, each.tolist(), strict=True):
            if not _positive(seconds):
                raise PVIError(f"{who} returned {seconds:g} for group {label!r}; {wanted}.")


def _resampled(delays: MeasuredDelays, problem: Any, dtype: Any) -> Callable[[Any, Any], Float[Array, ""]]:
    known = dict(delays.seconds)
    resolve(ByLabel(tuple((label, 1.0) for label in known)), "delays=measured_delays(seconds)", problem, 1.0)
    if missing := [label for label in problem.labels if label not in known]:
        raise PVIError(
            f"delays=measured_delays(seconds) has no durations of group {missing[0]!r}; measure every group."
        )
    rows = [known[label] for label in problem.labels]
    counts = jnp.asarray([len(row) for row in rows])
    table = np.zeros((len(rows), max(len(row) for row in rows)))
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    padded = jnp.asarray(table, dtype)
    return lambda key, m: padded[m, jax.random.randint(key, (), 0, counts[m])]
