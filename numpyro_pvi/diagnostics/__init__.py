"""Diagnostics: read a state, never edit it."""

from ._khat import khat

__all__ = ["khat"]
