"""Schedules: who moves when, and how far."""

from ._asynchronous import Asynchronous
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
from ._committee import Committee
from ._convergence import (
    CRAWL,
    FELL,
    IMPROPER,
    NOT_FINITE,
    STALL_ROUNDS,
    VISITS,
    Asked,
    asked_by_move,
    finished,
    pace,
    refusals,
    settled,
    sketch,
    sound,
    stalled,
    within_noise,
)
from ._decentralized import Decentralized
from ._delays import MeasuredDelays, measured_delays
from ._noise import move_in_nats
from ._report import BY_FACTOR, UNHEARD_MOVE, RoundReport, empty_report
from ._sequential import Sequential
from ._streaming import Streaming
from ._subset import StochasticSubset
from ._synchronous import Synchronous

__all__ = [
    "UNHEARD_MOVE",
    "Asked",
    "CRAWL",
    "FELL",
    "NOT_FINITE",
    "asked_by_move",
    "pace",
    "refusals",
    "sketch",
    "sound",
    "BY_FACTOR",
    "IMPROPER",
    "STALL_ROUNDS",
    "VISITS",
    "Decentralized",
    "Asynchronous",
    "Committee",
    "Evaluation",
    "MeasuredDelays",
    "Points",
    "Problem",
    "RoundCarry",
    "RoundReport",
    "Rule",
    "Schedule",
    "Sequential",
    "StochasticSubset",
    "Streaming",
    "Synchronous",
    "accept_jointly",
    "elbo_has_not_fallen",
    "empty_report",
    "finished",
    "measured_delays",
    "move_in_nats",
    "settled",
    "stalled",
    "within_noise",
]
