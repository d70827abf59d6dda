"""Laws 2, 3 and 12 for solvers that take steps of their own: they hold in the limit of many rounds."""

import numpy as np
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_pvi.schedules import Asynchronous, Committee, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import LocalELBO, StochasticNaturalGradient

from . import checks, oracles
from .fits import fit, numbers
from .models import (
    NOISE,
    PRIOR_COVARIANCE,
    PRIOR_LOC,
    groups,
    make_independent_linear,
    make_linear,
    make_logistic,
    rows,
)

# Pairs of both signs make gradients of a quadratic factor exact, so that laws 2 and 12 are met to the steps' accuracy.
SOLVERS = {
    "local": LocalELBO(optax.lbfgs(), num_steps=6, num_particles=2),
    "stochastic": StochasticNaturalGradient(0.5, num_steps=10, num_particles=2),
}
SCHEDULES = {
    "cyclic": Sequential(),
    "parallel": Synchronous(),
    "late": Asynchronous({0: 2.0}, loss_rate=0.2, reorder=True),
    "few": StochasticSubset(2),
}

each_solver = pytest.mark.parametrize("solver", SOLVERS)
# Float32 repeats the plain schedules.
each_schedule = pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=[pytest.mark.once] * (s in ("late", "few"))) for s in SCHEDULES]
)


@each_solver
@each_schedule
def test_conjugate_models_become_exact(solver, schedule):
    X, y, _ = rows()
    fitted = fit(make_linear(), X, y, groups(3), SOLVERS[solver], SCHEDULES[schedule], 40)
    exact = oracles.linear_posterior(X, y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    assert checks.distance(fitted, *exact) < 1e-3
    # Not in one round, in parallel: the law is one of the limit.
    if schedule == "parallel":
        assert checks.distance(fitted._replace(states=fitted.states[:2]), *exact) > 0.1


@each_solver
def test_committees_of_conjugate_models_become_exact(solver):
    X, y, _ = rows()
    fitted = fit(make_linear(), X, y, groups(3), SOLVERS[solver], Committee("split", max_visits=60), 1)
    assert checks.distance(fitted, *oracles.linear_posterior(X, y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)) < 1e-3


@each_solver
@each_schedule
def test_the_limit_is_stationary_whatever_the_partition(solver, schedule):
    """Up to the noise of 64 draws a step: a twentieth of a posterior sd, and as much of the covariance."""
    X, _, y = rows()
    best = oracles.batch_vi_logistic(X, y)
    many = {
        "local": LocalELBO(optax.adam(0.02), num_steps=40, num_particles=64),
        "stochastic": StochasticNaturalGradient(0.1, num_steps=40, num_particles=64),
    }
    for count in (1, 3) if schedule == "parallel" else (3,):
        fitted = fit(make_logistic(), X, y, groups(count), many[solver], SCHEDULES[schedule], 40)
        assert checks.distance(fitted, *best) < 0.1


@each_solver
@each_schedule
def test_mean_field_fits_of_correlated_columns_converge(solver, schedule):
    X, y, _ = rows(correlation=0.9)
    exact = oracles.linear_posterior(X, y, NOISE, np.zeros(2), 4 * np.eye(2))
    loc, variances = oracles.mean_field_of_gaussian(*exact)
    fitted = fit(
        make_independent_linear(),
        X,
        y,
        groups(2),
        SOLVERS[solver],
        SCHEDULES[schedule],
        # A lossy link makes the same visits later.
        400 if schedule == "late" else 150,
        AutoDiagonalNormal,
        "auto",
    )
    assert checks.distance(fitted, loc, np.diag(variances)) < 1e-2


@pytest.mark.parametrize("average", [0.0, 0.5])
def test_a_visit_knows_what_share_of_the_way_it_went(average, x64):
    """A quadratic factor asks for the same site at every step: n steps of s go 1 - (1 - s)^n of the way, on average less."""
    X, y, _ = rows()
    size, count = 0.2, 4
    solver = StochasticNaturalGradient(size, num_steps=count, num_particles=2, average=average)
    start, end = fit(make_linear(), X, y, np.zeros(len(y), int), solver, Synchronous(damping=1.0), 1).states
    went = numbers(end).groups[0][1] / (X.T @ X / NOISE**2)
    gone = [1 - (1 - size) ** k for k in range(1, count + 1)]
    late = gone[-1:] if average == 0.0 else gone[count - round(average * count) :]
    np.testing.assert_allclose(went, np.mean(late), rtol=1e-8 if x64 else 1e-3)
    # The schedule divides the move by that share (the power at the middle of those averaged) to know what is asked for.
    share = float(end.report.move[0] / end.report.asked[0])
    assert share == pytest.approx(np.mean(late), rel=0.05 if average else 1e-4)
