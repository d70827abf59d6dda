"""Flower: owners who keep their rows, each at a node of its own, and a server that fits q from what they answer."""

from ._app import client_app
from ._runtime import Flower
from ._strategy import FlowerResult, PVIStrategy

__all__ = ["Flower", "FlowerResult", "PVIStrategy", "client_app"]
