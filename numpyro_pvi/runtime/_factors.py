"""What is known of the factors of a fit before anything is evaluated."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Bool

from ..expectations import LocalLatentProgram, LocalNoise, PointsProgram
from ..families import GaussianFamily, GaussianNatural
from ..schedules import Rule
from ..solvers import LocalSolver
from ._base import Runtime
from ._data import Draws, FactorData
from ._rows import GroupRows
from ._wide import WideRows


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one model as data, and what they say of themselves; :class:`LocalProblem` visits and evaluates them.

    Args:
        family: the Gaussian family of q.
        solver: the local solver.
        runtime: how to map over chunks and groups.
        program: expectations of one chunk of the likelihood.
        prior_program: expectations of the prior factor, or None.
        quadratic: whether the likelihood is quadratic in the latents jointly.
        num_rules: how many quadrature rules are compiled in.
        data: the factors' arrays.
        units: ``(U, K)``, how many units have how many local latents each; None when there are none.
        rows: the groups' rows at points, for a stochastic solver; else None.
        labels: the groups' labels, in the order of every stacked array.
        known: which groups had a site before their rows came back; None when none had.
        stream: the groups' rows one by one.
        most_chunks: chunks of the largest group where sizes are known beforehand, else 0.
        longest: its rows, likewise.
        chained: whether chains are compiled in beside weighted draws.
        wide: how the rows that see q most widely are set apart; None where rows are few.
    """

    family: GaussianFamily
    solver: LocalSolver
    runtime: Runtime
    program: Any
    prior_program: Any
    quadratic: bool
    num_rules: int
    data: FactorData
    units: tuple[int, int] | None = None
    rows: GroupRows | None = None
    labels: tuple = ()
    known: Bool[Array, "M"] | None = None
    stream: Any = None
    most_chunks: int = 0
    longest: int = 0
    chained: bool = False
    wide: WideRows | None = None

    @property
    def stochastic(self) -> bool:
        """Whether local solves take noisy steps of their own."""
        return self.solver.stochastic

    @property
    def matches_moments(self) -> bool:
        """Whether local solves match moments, so that rounds are accepted when q is valid."""
        return self.solver.matches_moments

    @property
    def capped(self) -> bool:
        """Whether q is mean-field, so that evaluations tell products with the curvature of its factors."""
        return not self.family.full

    @property
    def tied(self) -> bool:
        """Whether all groups share one site."""
        return self.solver.tied

    @property
    def num_groups(self) -> int:
        """M, without the prior factor."""
        return self.data.offsets.shape[0] - 1

    @property
    def continued(self) -> bool:
        """Whether groups that were fitted before stand beside the prior, by their sites alone."""
        return self.data.others is not None

    @property
    def prior_natural(self) -> GaussianNatural:
        """Natural parameters of what rounds start from: the exactly held prior, times the sites of absent groups."""
        held = self.data.prior_natural
        return held if self.data.others is None else held + self.data.others

    @property
    def has_prior_factor(self) -> bool:
        """Whether part of the prior has a site."""
        return self.prior_program is not None

    @property
    def dtype(self):
        """The floating dtype of q."""
        return self.data.prior_natural.precision_mean.dtype

    @property
    def redraws(self) -> bool:
        """Whether any expectation is by draws, so that a round's fresh draws need a fresh evaluation."""
        return self.program.noisy or (self.has_prior_factor and self.prior_program.noisy)

    @property
    def can_switch(self) -> bool:
        """Whether any factor goes from sigma points to draws when these contradict them."""
        return "auto" in (getattr(p, "mode", "") for p in (self.program, self.prior_program))

    def draws_of(self, program: Any, noise: Draws | None, rule: Rule | None, trial: bool = False) -> Any:
        """What one program takes of a round's draws: sigma points or random ones, pairs, or None."""
        if isinstance(program, LocalLatentProgram) and noise is not None:
            return LocalNoise(noise.pairs, noise.local)
        if not isinstance(program, PointsProgram):
            return None if noise is None else noise.pairs
        prior = program is self.prior_program
        random = None if noise is None else noise.prior_points if prior else noise.points
        sampled = False if rule is None else rule.points.sampled[int(prior)]
        return program.choose(random, sampled, self.dtype, trial)
