"""Flower: owners who keep their rows, each at a node of its own, and a server that fits q from answers, or from sums of them."""

from ._app import client_app
from ._runtime import Flower
from ._secure import SecAggSums
from ._strategy import FlowerResult, PVIStrategy

__all__ = ["Flower", "FlowerResult", "PVIStrategy", "SecAggSums", "client_app"]
