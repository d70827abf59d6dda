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
from ._decentralized import Decentralized
from ._noise import move_in_nats
from ._report import RoundReport, empty_report
from ._sequential import Sequential
from ._synchronous import Synchronous

__all__ = [
    "Decentralized",
    "Evaluation",
    "Points",
    "Problem",
    "RoundCarry",
    "RoundReport",
    "Rule",
    "Schedule",
    "Sequential",
    "Synchronous",
    "accept_jointly",
    "elbo_has_not_fallen",
    "empty_report",
    "move_in_nats",
]
