"""Diagnostics: read a state, never edit it."""

from ._khat import khat
from ._prequential import LogScore, log_score

__all__ = ["LogScore", "khat", "log_score"]
