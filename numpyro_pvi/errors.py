"""The errors of the package: one family, so that ``except PVIError`` catches what the package itself refuses.

Every message says what happened, where (group, latent, plate or argument) and what to write instead. No message holds a
value from the data: rows are named by index only.
"""

from typing import Any

__all__ = [
    "CheckpointError",
    "DataError",
    "GuideError",
    "ImproperError",
    "NonFiniteLossError",
    "PVIError",
    "PartitionError",
    "SkippedGroupError",
    "StateError",
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


class _WithState(PVIError):
    """An error that ends a run, with the state that the run had reached.

    Args:
        message: Names the factor, the latent and the likely causes.
        state: The last state, or None where there is none; it can be passed on as ``init_state``.

    Attributes:
        state: As above.
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
