"""Sparse Gaussian processes with pseudo-inputs over batches that arrive, one Gaussian site for each (PVI, section 6)."""

from ._likelihoods import GaussianNoise, Likelihood, LogDensity, RowExpectations, from_distribution
from ._process import kernel_params, matern, squared_exponential
from ._streaming import BatchSite, SparseGP, SparseGPState
from ._visit import PseudoSite

__all__ = [
    "BatchSite",
    "GaussianNoise",
    "Likelihood",
    "LogDensity",
    "PseudoSite",
    "RowExpectations",
    "SparseGP",
    "SparseGPState",
    "from_distribution",
    "kernel_params",
    "matern",
    "squared_exponential",
]
