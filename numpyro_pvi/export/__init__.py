"""Export of posteriors to other libraries, and pictures of runs."""

from ._arviz import to_arviz
from ._rounds import plot_agents, plot_error, plot_rounds, rounds_dataset

__all__ = ["plot_agents", "plot_error", "plot_rounds", "rounds_dataset", "to_arviz"]
