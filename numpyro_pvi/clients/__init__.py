"""Clients: groups whose rows are in a process of their own, and what they say to the server that fits q."""

from ._client import Respondent
from ._exchange import Exchange, Traffic, Transport
from ._own import Client
from ._ray import Ray
from ._runtimes import ClientsRuntime, InProcess, Nearby, Processes
from ._sums import InMemorySums, SecureSum, Summand, Summed, SummedClients, SumReport

__all__ = [
    "Client",
    "ClientsRuntime",
    "Exchange",
    "InMemorySums",
    "InProcess",
    "Nearby",
    "Processes",
    "Ray",
    "Respondent",
    "SecureSum",
    "SumReport",
    "Summand",
    "Summed",
    "SummedClients",
    "Traffic",
    "Transport",
]
