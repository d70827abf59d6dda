"""The fits on which the laws are checked, one per cell of the table, and what each model's oracle is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
)
from numpyro_pvi.solvers import (
    SNEP,
    AlphaDivergence,
    Conjugate,
    LocalELBO,
    NaturalGradient,
    PowerEP,
    StochasticNaturalGradient,
)

from . import checks, models, oracles
from .fits import Fit, fit, shapes_compared


class Cell(NamedTuple):
    """One fit: a model, a solver, a schedule, a number of groups, and the laws checked on its trajectory."""

    name: str
    kind: str
    solver: Any
    schedule: Any
    num_groups: int
    laws: tuple[int, ...]
    rounds: int
    guide: Any = AutoMultivariateNormal
    init_sites: str = "prior"
    # Beyond the pairwise covering: the full product.
    slow: bool = False

    @property
    def repeated(self) -> bool:
        """Whether float32 repeats it: the plain schedules of each solver and model, the others under one solver."""
        return type(self.schedule) in (Sequential, Synchronous) or self.name.startswith("linear-conjugate")

    @property
    def damping(self) -> float:
        damping = getattr(self.schedule, "damping", 1.0)
        return 1.0 if damping == "auto" else damping


SEQUENTIAL, RANDOM = Sequential(), Sequential(order="random")
STREAMING = Streaming()
SYNCHRONOUS, DAMPED = Synchronous(), Synchronous(damping=0.5)
AT_ONCE, LATE = Asynchronous(), Asynchronous(("exponential", {0: 4.0}), max_staleness=30)
LOSSY = Asynchronous(1.0, loss_rate=0.3, duplicate_rate=0.3, reorder=True)
FEW, RARE = StochasticSubset(0.5), StochasticSubset(rates={0: 0.2})
CONJUGATE, NATURAL = Conjugate(), NaturalGradient()
ALPHA = AlphaDivergence(0.5, num_steps=5)
LOCAL, STOCHASTIC = LocalELBO(num_steps=5), StochasticNaturalGradient(num_steps=5)


def ring(n):
    """Agents in a circle (a pair has one link, one agent none)."""
    return Decentralized([[float((i - j) % n in (1, n - 1)) for j in range(n)] for i in range(n)])


# The full product for the quadratic model; pairwise for the others: every schedule and M in {1, 2, 5, N} occurs.
CELLS = (
    Cell("linear-conjugate-cyclic", "linear", CONJUGATE, SEQUENTIAL, 3, (1, 2, 3, 6), 2),
    Cell("linear-conjugate-random", "linear", CONJUGATE, RANDOM, 5, (1, 2, 3, 6), 2),
    Cell("linear-conjugate-parallel", "linear", CONJUGATE, SYNCHRONOUS, 12, (1, 2, 3, 6), 2),
    Cell("linear-conjugate-damped", "linear", CONJUGATE, DAMPED, 3, (1, 2, 6), 5),
    Cell("linear-natural-cyclic", "linear", NATURAL, SEQUENTIAL, 12, (1, 2, 3, 6), 2),
    Cell("linear-natural-random-damped", "linear", NATURAL, Sequential("random", 0.5), 3, (1, 2, 6), 5),
    Cell("linear-natural-random", "linear", NATURAL, RANDOM, 3, (1, 2, 3, 6), 2),
    Cell("linear-natural-parallel", "linear", NATURAL, SYNCHRONOUS, 1, (1, 2, 3, 6), 2),
    Cell("linear-natural-damped", "linear", NATURAL, DAMPED, 5, (1, 2, 6), 5),
    Cell("linear-conjugate-late", "linear", CONJUGATE, Asynchronous(1.0), 3, (1, 2, 3, 6), 2),
    Cell("linear-natural-at-once", "linear", NATURAL, AT_ONCE, 5, (1, 2, 3, 6), 2),
    Cell("linear-natural-late-damped", "linear", NATURAL, Asynchronous(2.0, damping=0.5), 3, (1, 2, 6), 5),
    Cell("linear-conjugate-few", "linear", CONJUGATE, FEW, 5, (1, 3, 6), 30),
    Cell("linear-conjugate-committee", "linear", CONJUGATE, Committee(), 3, (1, 2, 3, 6), 2),
    Cell("linear-natural-committee", "linear", NATURAL, Committee("split"), 5, (1, 2, 6), 2),
    *(
        Cell(f"linear-{kind}-{word}", "linear", solver, schedule, 3, (1, 6), 2)
        for kind, solver in (("local", LOCAL), ("stochastic", STOCHASTIC))
        for word, schedule in (("late", LOSSY), ("few", FEW), ("committee", Committee(max_visits=2)))
    ),
    Cell("linear-local-cyclic", "linear", LOCAL, SEQUENTIAL, 3, (1, 6), 2),
    Cell("linear-local-parallel", "linear", LOCAL, SYNCHRONOUS, 5, (1, 6), 2),
    Cell("linear-stochastic-cyclic", "linear", STOCHASTIC, SEQUENTIAL, 3, (1, 6), 2),
    Cell("linear-stochastic-parallel", "linear", STOCHASTIC, SYNCHRONOUS, 5, (1, 6), 2),
    Cell("linear-ep-cyclic", "linear", PowerEP(), SEQUENTIAL, 3, (1, 2, 6), 2),
    Cell("linear-power-ep-parallel", "linear", PowerEP(0.3), SYNCHRONOUS, 12, (1, 2, 6), 2),
    Cell("linear-ep-late", "linear", PowerEP(), Asynchronous(1.0), 3, (1, 2, 6), 2),
    Cell("linear-power-ep-few", "linear", PowerEP(0.5), FEW, 5, (1, 6), 3),
    Cell("linear-ep-committee", "linear", PowerEP(), Committee(), 3, (1, 2, 6), 2),
    Cell("linear-power-ep-ring", "linear", PowerEP(0.5), ring(5), 5, (1, 2, 6), 5),
    Cell("linear-ep-streaming", "linear", PowerEP(), STREAMING, 3, (1, 2, 6), 2),
    Cell("linear-ep-rows-damped", "linear", PowerEP(factors="row"), DAMPED, 5, (1, 2, 6), 5),
    Cell("linear-snep-cyclic", "linear", SNEP(beta=(1.0, 2.0, 1.5)), SEQUENTIAL, 3, (1, 6), 2),
    Cell("linear-snep-parallel", "linear", SNEP(num_steps=3, outer_period=2), SYNCHRONOUS, 5, (1, 6), 2, slow=True),
    *(
        Cell(f"linear-snep-{word}", "linear", SNEP(), schedule, 3, (1, 6), 2, slow=True)
        for word, schedule in (
            ("late", LOSSY),
            ("few", FEW),
            ("committee", Committee(max_visits=2)),
            ("ring", ring(3)),
            ("streaming", STREAMING),
        )
    ),
    *(
        Cell(f"linear-alpha-{word}", "linear", ALPHA, schedule, 3, (1, 6), 2, slow=True)
        for word, schedule in (
            ("cyclic", SEQUENTIAL),
            ("parallel", SYNCHRONOUS),
            ("late", Asynchronous(1.0)),
            ("few", FEW),
            ("committee", Committee(max_visits=2)),
            ("ring", ring(3)),
            ("streaming", STREAMING),
        )
    ),
    Cell("linear-conjugate-streaming", "linear", CONJUGATE, STREAMING, 5, (1, 2, 3, 6), 2),
    Cell("linear-natural-streaming", "linear", NATURAL, STREAMING, 3, (1, 2, 6), 2),
    Cell("linear-local-streaming", "linear", LOCAL, STREAMING, 3, (1, 6), 2),
    Cell("linear-stochastic-streaming", "linear", STOCHASTIC, STREAMING, 3, (1, 6), 2),
    Cell("logistic-streaming", "logistic", NATURAL, STREAMING, 5, (1, 6), 2),
    Cell("logistic-cyclic", "logistic", NATURAL, SEQUENTIAL, 5, (1, 3, 6), 20),
    Cell("logistic-random", "logistic", NATURAL, RANDOM, 2, (1, 3, 6), 20),
    Cell("logistic-parallel", "logistic", NATURAL, SYNCHRONOUS, 1, (1, 3, 6), 25),
    Cell("logistic-damped", "logistic", NATURAL, DAMPED, 12, (1, 3, 6), 45),
    Cell("scale-parallel", "scale", NATURAL, SYNCHRONOUS, 3, (1, 3, 6), 60, init_sites="auto"),
    Cell("scale-cyclic", "scale", NATURAL, SEQUENTIAL, 2, (1, 3, 6), 60, init_sites="auto"),
    Cell("logistic-late", "logistic", NATURAL, LATE, 5, (1, 3, 6), 60),
    Cell("logistic-lossy", "logistic", NATURAL, LOSSY, 5, (1, 3, 6), 60),
    Cell("logistic-few", "logistic", NATURAL, FEW, 5, (1, 3, 6), 60),
    Cell("logistic-rare", "logistic", NATURAL, RARE, 2, (1, 3, 6), 90),
    Cell("scale-late", "scale", NATURAL, Asynchronous(1.0), 3, (1, 3, 6), 60, init_sites="auto"),
    Cell("scale-few", "scale", NATURAL, StochasticSubset(2), 3, (1, 3, 6), 90, init_sites="auto"),
    *(
        Cell(
            f"meanfield-{word}-{m}",
            "meanfield",
            NATURAL,
            ring(m) if schedule is None else schedule,
            m,
            (1, 3, 6, 12),
            2500 if schedule is None else 700,
            AutoDiagonalNormal,
            "auto",
            slow=m != 2 and word in ("late", "few", "ring"),
        )
        for word, schedule in (
            ("cyclic", SEQUENTIAL),
            ("parallel", SYNCHRONOUS),
            ("late", Asynchronous(1.0)),
            ("few", FEW),
            ("ring", None),
        )
        for m in (1, 2, 12)
    ),
    Cell("linear-conjugate-ring", "linear", CONJUGATE, ring(5), 5, (1, 2, 6), 5),
    Cell("linear-conjugate-ring-long", "linear", CONJUGATE, ring(3), 3, (1, 3, 6), 45),
    Cell("linear-natural-ring", "linear", NATURAL, ring(12), 12, (1, 2, 6), 5),
    Cell("linear-local-ring", "linear", LOCAL, ring(3), 3, (1, 6), 2),
    Cell("linear-stochastic-ring", "linear", STOCHASTIC, ring(5), 5, (1, 6), 2),
    Cell("logistic-ring", "logistic", NATURAL, ring(5), 5, (1, 3, 6), 60),
    Cell("meanfield-logistic", "logistic", NATURAL, SYNCHRONOUS, 2, (1, 3, 6, 12), 300, AutoDiagonalNormal, "auto"),
)

PRIORS = {
    "linear": (models.PRIOR_LOC, models.PRIOR_COVARIANCE),
    "meanfield": (np.zeros(2), 4 * np.eye(2)),
}
MAKERS: dict[str, Callable] = {
    "linear": models.make_linear,
    "meanfield": models.make_independent_linear,
    "logistic": models.make_logistic,
    "scale": models.make_scale,
}


def data_of(cell: Cell):
    """Covariates and responses: correlation .9 where q is mean-field."""
    X, y, labels = models.rows(correlation=0.9 if cell.guide is AutoDiagonalNormal else 0.0)
    return X, labels if cell.kind == "logistic" else y


@functools.cache
def fit_of(cell: Cell) -> Fit:
    """The cell's trajectory."""
    X, y = data_of(cell)
    labels = models.groups(cell.num_groups)
    how = cell.solver, cell.schedule, cell.rounds, cell.guide, cell.init_sites
    with shapes_compared():
        return fit(MAKERS[cell.kind](), X, y, labels, *how)


def violations(cell: Cell, fitted: Fit) -> dict[str, float]:
    """Every law of the cell with its largest violation."""
    found = {"law 1": checks.sums(fitted), "law 1, symmetry": checks.asymmetry(fitted)}
    elbo, expected, expected_prior = _oracle(cell, fitted)
    if 2 in cell.laws:
        found["law 2"] = checks.conjugate(fitted, models.NOISE, cell.damping)
    if 3 in cell.laws:
        found["law 3, slope"] = checks.stationarity(fitted, elbo)
        best = _optimum(cell, fitted)
        if best is not None:
            found["law 12" if 12 in cell.laws else "law 3, optimum"] = checks.distance(fitted, *best)
    if 6 in cell.laws:
        found["law 6"], found["law 6, moving"] = checks.accounting(fitted, expected, expected_prior)
        if 2 in cell.laws and cell.damping == 1.0:
            found["law 6, evidence"] = checks.evidence(fitted, models.NOISE)
    return found


def _oracle(cell: Cell, fitted: Fit):
    X, y = fitted.X, fitted.y
    if cell.kind == "logistic":
        return oracles.elbo_logistic(X, y), oracles.expected_logistic, None
    if cell.kind == "scale":
        return oracles.elbo_scale(X, y), oracles.expected_scale, oracles.expected_half_normal
    expected = functools.partial(oracles.expected_linear, noise=models.NOISE)
    return oracles.elbo_linear(X, y, models.NOISE, *PRIORS[cell.kind]), expected, None


def _optimum(cell: Cell, fitted: Fit):
    X, y = fitted.X, fitted.y
    if cell.kind == "logistic":
        return oracles.batch_vi_logistic(X, y, diagonal=cell.guide is AutoDiagonalNormal)
    if cell.kind == "scale":
        return None
    exact = oracles.linear_posterior(X, y, models.NOISE, *PRIORS[cell.kind])
    if cell.kind == "meanfield":
        loc, variances = oracles.mean_field_of_gaussian(*exact)
        return loc, np.diag(variances)
    return exact
