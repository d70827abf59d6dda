"""Schedules: who moves when, and how far."""

from ._acceptance import accept_jointly, accept_once, elbo_has_not_fallen, move_in_nats
from ._asynchronous import Asynchronous
from ._committee import Committee
from ._contract import Accepted, Evaluation, Points, Problem, RoundCarry, RoundReport, Rule, Schedule, ScheduleDefaults
from ._convergence import (
    BY_FACTOR,
    CRAWL,
    FELL,
    IMPROPER,
    NOT_FINITE,
    STALL_ROUNDS,
    UNHEARD_MOVE,
    VISITS,
    Asked,
    asked_by_move,
    empty_report,
    finished,
    natural_gradient_proposal,
    pace,
    refusals,
    round_report,
    rounding,
    settled,
    sketch,
    sound,
    stalled,
    within_noise,
)
from ._decentralized import Decentralized
from ._network import MeasuredDelays, measured_delays
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
    "rounding",
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
    "ScheduleDefaults",
    "Sequential",
    "StochasticSubset",
    "Streaming",
    "Synchronous",
    "Accepted",
    "accept_jointly",
    "accept_once",
    "natural_gradient_proposal",
    "round_report",
    "elbo_has_not_fallen",
    "empty_report",
    "finished",
    "measured_delays",
    "move_in_nats",
    "settled",
    "stalled",
    "within_noise",
]
