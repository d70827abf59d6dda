"""How a factor's expectations or tilted moments are taken, in words for the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._state import PVIState
from .expectations import GRID_DIM, RULES, ImportanceMoments, LaplaceMoments, MCMCMoments, with_settings
from .solvers import LocalSolver

# How tilted moments are taken where they are sampled.
_SAMPLED_WORDS = {ImportanceMoments: "weighted draws", LaplaceMoments: "weighted draws (laplace)", MCMCMoments: "mcmc"}


def words_of(kind: str, state: PVIState, which: int, solver: LocalSolver) -> str:
    """The words of one factor.

    Args:
        kind: its structure.
        state: the state.
        which: 0 for the groups', 1 for the prior factor.
        solver: who refines its site.

    Returns:
        A few words, with the quadrature rule of the last round.
    """
    if solver.matches_moments:
        word = _moment_words(kind, state, which, solver)
        if word is not None:
            return word
    if kind == "affine":
        return f"quadrature ({RULES[min(int(state.rule.level), len(RULES) - 1)]})"
    if kind in ("quadratic", "reparameterised"):
        return {"quadratic": "closed form", "reparameterised": "reparameterised draws"}[kind]
    if kind == "local":
        return "monte_carlo (hessian)"
    mode = state.plan.partition.unstructured
    if mode == "auto":
        mode = "stein" if np.asarray(state.rule.points.sampled)[which] else "sigma_points"
    return mode if mode == "sigma_points" else f"monte_carlo ({mode})"


def _moment_words(kind: str, state: PVIState, which: int, solver: Any) -> str | None:
    """How tilted moments are taken of the groups (0) or of the prior factor (1); None where by rows, as expectations are."""
    wanted, one_dimensional = with_settings(solver.moments), which == 1 and kind == "affine"
    if not isinstance(wanted, str):
        return None if one_dimensional and isinstance(wanted, MCMCMoments) else _SAMPLED_WORDS[type(wanted)]
    if which == 0 and kind == "quadratic":
        return "closed form"
    single = all(size == 1 for size in state.plan.partition.table.sizes) and not solver.anchored
    if one_dimensional or (which == 0 and kind == "affine" and (solver.factors == "row" or single)):
        return None
    return "quadrature over the latents" if state.plan.family.dim <= GRID_DIM else _SAMPLED_WORDS[ImportanceMoments]
