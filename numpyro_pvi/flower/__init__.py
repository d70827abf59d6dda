"""Flower: clients that keep their rows, and a server that hears them in sums only, through Flower's SecAgg+."""

from ._secure import SecAggSums, summed_client_app

__all__ = ["SecAggSums", "summed_client_app"]
