"""Schedules: who moves when, and how far."""

from ._base import (
    Evaluation,
    Points,
    Problem,
    RoundCarry,
    Rule,
    Schedule,
    accept_jointly,
    elbo_has_not_fallen,
)
from ._report import BY_FACTOR, RoundReport, empty_report
from ._sequential import Sequential
from ._streaming import Streaming
from ._synchronous import Synchronous

__all__ = [
    "BY_FACTOR",
    "Evaluation",
    "Points",
    "Problem",
    "RoundCarry",
    "RoundReport",
    "Rule",
    "Schedule",
    "Sequential",
    "Streaming",
    "Synchronous",
    "accept_jointly",
    "elbo_has_not_fallen",
    "empty_report",
]
