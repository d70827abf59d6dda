"""The errors of the package: one family, so that ``except PVIError`` catches what the package itself refuses.

Every message says what happened, where (group, latent, plate or argument) and what to write instead. No message holds a
value from the data: rows are named by index only.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "ClientError",
    "DataError",
    "GuideError",
    "ImproperError",
    "NonFiniteLossError",
    "PVIError",
    "PartitionError",
    "SkippedGroupError",
    "StateError",
    "WireError",
]


class PVIError(ValueError):
    """Base of every error raised by numpyro_pvi."""


class PartitionError(PVIError):
    """The model's likelihood cannot be split as asked: plate, labels, group or sample site do not fit together."""


class GuideError(PVIError):
    """The guide is of an unsupported kind, or was made for another model."""


class ImproperError(PVIError):
    """A distribution that must be normalisable is not: an improper prior without data, a site asked for moments."""


class DataError(PVIError):
    """An argument cannot be used as data: non-finite entries, text, objects, ragged lists."""


class StateError(PVIError):
    """A state and what is used with it do not fit: argument shapes changed after ``init``, or a foreign state."""


class CheckpointError(PVIError):
    """A checkpoint cannot be written, read, or does not belong to this model, guide and data."""


class WireError(PVIError):
    """Bytes that came are no message of this package, or are not what the message may hold; nothing was done with them.

    Args:
        message: What is wrong.
        fault: A word for it.

    Attributes:
        fault: As above: "empty", "foreign", "short", "damaged", "newer", "older", "large" or "value".
    """

    def __init__(self, message: str, fault: str = "value") -> None:
        super().__init__(message)
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep ``fault`` through pickling."""
        return (type(self), (str(self), self.fault))


class ClientError(PVIError):
    """What a client said, or did not say, cannot be used; nothing of it was absorbed.

    Args:
        message: Says what, and names the client.
        label: The client's label, or None where none is known.

    Attributes:
        label: As above.
    """

    def __init__(self, message: str, label: Any = None) -> None:
        super().__init__(message)
        self.label = label

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep ``label`` through pickling."""
        return (type(self), (str(self), self.label))


class _WithState(PVIError):
    """An error that ends a run, with the state that the run had reached.

    ``message``: Names the factor, the latent and the likely causes; ``state``: The last state, or None where there is none; it
    can be passed on as ``init_state``.
    """

    def __init__(self, message: str, state: Any = None) -> None:
        super().__init__(message)
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep ``state`` through pickling: exceptions otherwise rebuild from the message alone."""
        return (type(self), (str(self), self.state))


class SkippedGroupError(_WithState):
    """A group was skipped in 10 rounds running, so the run cannot make progress there; ``.state`` is the last good state."""


class NonFiniteLossError(_WithState):
    """A run has ended with a loss that is NaN, infinite or too large to be one; ``.state`` is the last state."""


# ------------------------------------------------------------------------------------------------------- kept contracts
# What an object that means to keep a contract does not have of it, and what it does not go with.

GAUSSIAN_GUIDES = "AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal"


def not_under_families(word: str, value: Any, wanted: str) -> PVIError:
    """The error for a choice that is for Gaussian guides only.

    ``wanted``: what goes with AutoExponentialFamily, in code. Returns what to raise.
    """
    return PVIError(
        f"{word}={type(value).__name__}(...) does not go with AutoExponentialFamily: pass {word}={wanted}, or use "
        f"{GAUSSIAN_GUIDES}."
    )


def lacking(value: Any, contract: type, base: type | None, room: str) -> str:
    """A sentence that names what is missing, and where the rest of the contract has defaults.

    ``base``: the class to derive from, or None. Returns the sentence, with a space before it; empty for a class, or for an
    object that has nothing of the contract.
    """
    parts = [part for part in contract.__mro__ if part.__dict__.get("_is_protocol", False)]
    names = {name for part in parts for name in vars(part) if not name.startswith("_")}
    missing = sorted(name for name in names if not hasattr(value, name))
    if isinstance(value, type) or not missing or len(missing) == len(names):
        return ""
    given = base is not None and any(hasattr(base, name) for name in missing)
    derive = f" Derive it from {room}.{base.__name__}, which has defaults." if given and base is not None else ""
    return f" It lacks {', '.join(missing)}.{derive}"
