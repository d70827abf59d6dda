"""Export of posteriors to other libraries, and pictures of runs and of what groups say."""

from ._arviz import to_arviz
from ._groups import plot_forest, plot_influence, plot_khat
from ._rounds import plot_agents, plot_error, plot_rounds, rounds_dataset

__all__ = [
    "plot_agents",
    "plot_error",
    "plot_forest",
    "plot_influence",
    "plot_khat",
    "plot_rounds",
    "rounds_dataset",
    "to_arviz",
]
