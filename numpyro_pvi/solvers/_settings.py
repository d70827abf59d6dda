"""Settings that differ from group to group: one number for all, one per group in their order, or by label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import PVIError


@runtime_checkable
class Labelled(Protocol):
    """What settings by label read of the factors."""

    @property
    def num_groups(self) -> int:
        """M, without the prior factor."""
        ...

    @property
    def labels(self) -> tuple:
        """The groups' labels, in the order of every stacked array."""
        ...

    @property
    def continued(self) -> bool:
        """Whether there are groups whose rows are not at hand."""
        ...


class ByLabel(NamedTuple):
    """A hashable dict: pairs of label and value."""

    items: tuple


def by_label(value: Any) -> bool:
    """Whether a setting that :func:`freeze` made names groups."""
    return isinstance(value, ByLabel)


def freeze(value: Any, argument: str, legal: Callable[[float], bool], wanted: str) -> Any:
    """Make a per-group setting hashable, and refuse values out of range.

    Args:
        value: a number, a sequence of numbers in the order of ``pvi.groups``, or a dict of them by label.
        argument: how the setting is written, for messages.
        legal: whether one number is in range.
        wanted: what one number must be, for messages.

    Returns:
        A float, a tuple of floats, or :class:`ByLabel`.

    Raises:
        PVIError: naming the argument, the value and, by label, the group.
    """

    def number(x: Any, where: str) -> float:
        try:
            found = float(x)
        except (TypeError, ValueError):
            found = float("nan")
        if isinstance(x, (str, bool)) or not legal(found):
            raise PVIError(f"{argument}={value!r}: {where}expected {wanted}, got {x!r}.")
        return found

    if isinstance(value, ByLabel):
        value = dict(value.items)
    if isinstance(value, Mapping):
        if not value:
            raise PVIError(
                f"{argument}={value!r}: the dict is empty; write {{label: number}}, a number, or one per group."
            )
        return ByLabel(tuple((label, number(x, f"for group {label!r} ")) for label, x in value.items()))
    if np.ndim(value) == 0:
        return number(value, "")
    if np.ndim(value) != 1 or len(value) == 0:
        raise PVIError(f"{argument}={value!r}: expected a number, one number per group, or a dict by label.")
    return tuple(number(x, f"for group number {i} ") for i, x in enumerate(value))


def resolve(value: Any, argument: str, problem: Labelled, default: float) -> np.ndarray:
    """One number per group.

    Args:
        value: what :func:`freeze` made.
        argument: how the setting is written, for messages.
        problem: the factors.
        default: for groups that a dict does not name.

    Returns:
        Float[M].

    Raises:
        PVIError: for a wrong number of values, or a label that no group has.
    """
    count = problem.num_groups
    if isinstance(value, float):
        return np.full(count, value)
    if isinstance(value, ByLabel):
        found, labels = np.full(count, default), list(problem.labels)
        for label, x in value.items:
            if label not in labels:
                if problem.continued:
                    # One of those whose rows are not at hand.
                    continue
                known = ", ".join(repr(known) for known in labels[:10]) + (", ..." if count > 10 else "")
                raise PVIError(f"{argument} names group {label!r}, which is not there; the groups are {known}.")
            found[labels.index(label)] = x
        return found
    if len(value) != count:
        raise PVIError(
            f"{argument} has {len(value)} numbers for {count} groups; give one per group in the order of pvi.groups, "
            "one for all, or a dict by label."
        )
    return np.asarray(value)
