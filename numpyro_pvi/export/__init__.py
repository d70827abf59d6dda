"""Export of posteriors to other libraries."""

from ._arviz import to_arviz

__all__ = ["to_arviz"]
