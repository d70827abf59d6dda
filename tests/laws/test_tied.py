"""Laws of stochastic EP: one site for all groups, EP for one group, mini-batch natural gradients as the power tends to 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi.runtime._moments as visits
import numpyro_pvi.schedules._sequential as sweeps
from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
)
from numpyro_pvi.sites import tied_site
from numpyro_pvi.solvers import PowerEP, StochasticEP

from . import oracles
from .fits import fit, numbers
from .models import NOISE, PRIOR_COVARIANCE, PRIOR_LOC, groups, make_independent_linear, make_linear, rows
from .test_moments import make_logistic_of
from .tied_oracles import decayed, grid_stochastic_ep, minibatch_mean_field, minibatch_natural_gradient

X, Y, LABELS = rows()
COLUMN = X[:, :1]
FACTORS = [oracles.linear_factor(x[None], y[None], NOISE) for x, y in zip(X, Y, strict=True)]
EXACT = oracles.linear_posterior(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)


@functools.cache
def linear(num_groups, schedule):
    return fit(make_linear(), X, Y, groups(num_groups), StochasticEP(), schedule, 6)


@functools.cache
def logistic(num_groups, solver, schedule, rounds=6):
    return fit(make_logistic_of(1), COLUMN, LABELS, groups(num_groups), solver, schedule, rounds)


def naturals(fitted):
    """Precision-mean and precision of q on one latent, at every state after the first."""
    totals = [numbers(state).total for state in fitted.states[1:]]
    return np.array([[h[0], p[0, 0]] for h, p in totals])


def evidence(fitted, X, y):
    return float(fitted.pvi.log_evidence(fitted.last, jnp.asarray(X), jnp.asarray(y)))


# ------------------------------------------------------------------------------------------------------------- one site


@pytest.mark.parametrize(
    ("num_groups", "schedule"), [(3, Synchronous()), (12, Sequential())], ids=["parallel", "in-turn"]
)
def test_q_is_the_prior_times_the_site_once_per_group(num_groups, schedule, x64):
    """Law 1, read through ``site``; every label names the same one."""
    fitted = linear(num_groups, schedule)
    for state in (fitted.states[1], fitted.last):
        site = fitted.pvi.site(state, 0)
        precision = np.asarray(state.prior.precision) + num_groups * np.asarray(site.precision)
        params = fitted.pvi.get_params(state)
        covariance = params["auto_scale_tril"] @ params["auto_scale_tril"].T
        np.testing.assert_allclose(np.linalg.inv(covariance), precision, rtol=1e-9 if x64 else 2e-4)
        np.testing.assert_array_equal(fitted.pvi.site(state, num_groups - 1).precision, site.precision)
        rest = fitted.pvi.cavity(state, 0).precision
        np.testing.assert_allclose(rest, precision - np.asarray(site.precision), rtol=1e-9 if x64 else 2e-4)


def test_the_state_holds_one_site_whatever_the_number_of_groups():
    few, many = linear(3, Synchronous()).last, linear(12, Sequential()).last
    sizes = [sum(x.size for x in jax.tree.leaves(state.sites)) for state in (few, many)]
    assert sizes == [6, 6]
    # Beside it a few numbers per group, whatever the number of latents.
    count = [sum(x.size for x in jax.tree.leaves(state.solver_state)) for state in (few, many)]
    assert count[1] == 4 * count[0] <= 12 * 8


# ------------------------------------------------------------------------------------------------------ quadratic factors


def test_a_parallel_round_of_a_linear_model_is_exact(x64):
    """Law 2, groups of unequal sizes; and it stays so."""
    fitted = linear(3, Synchronous())
    for state in fitted.states[1:]:
        loc, covariance = numbers(state).moments
        np.testing.assert_allclose(loc, EXACT[0], rtol=1e-8 if x64 else 1e-3)
        np.testing.assert_allclose(covariance, EXACT[1], rtol=1e-8 if x64 else 1e-3)


def test_sweeps_of_a_linear_model_take_the_steps_they_say(x64):
    """A visit moves the site by step / M towards the visited factor; the closed form of that, sweep by sweep."""
    fitted, labels = linear(12, Sequential()), groups(12)
    site = np.zeros((2, 3))
    for sweep, state in enumerate(fitted.states[1:]):
        for label in state.plan.partition.table.labels:
            h, P = FACTORS[int(np.flatnonzero(labels == label)[0])]
            site = site + decayed(sweep) / 12 * (np.column_stack([P, h]) - site)
        own = numbers(state)
        np.testing.assert_allclose(own.total[1] - own.prior[1], 12 * site[:, :2], rtol=1e-9 if x64 else 1e-3)
        np.testing.assert_allclose(own.total[0] - own.prior[0], 12 * site[:, 2], rtol=1e-9 if x64 else 1e-3)


def test_the_bound_of_a_tied_site_is_the_elbo(x64):
    """Law 6: M copies of one site in the accounting identity."""
    fitted = linear(3, Synchronous())
    own = numbers(fitted.last)
    loc, covariance = own.moments
    second = covariance + np.outer(loc, loc)
    elbo = oracles.expected_linear(X, Y, loc, covariance, NOISE).sum()
    whole = [total - prior for total, prior in zip(own.total, own.prior, strict=True)]
    elbo -= whole[0] @ loc - 0.5 * np.sum(whole[1] * second)
    elbo += oracles.log_partition(*own.total) - oracles.log_partition(*own.prior)
    assert abs(fitted.losses[-1] + elbo) < (1e-8 if x64 else 1e-3)


def test_evidence_of_a_linear_model_exceeds_the_exact_one_by_how_groups_differ(x64):
    """In closed form: a mean of logs of E_q[p_m / t], which Jensen puts above log p(y)."""
    fitted = linear(3, Synchronous())
    loc, covariance = EXACT
    base = np.linalg.inv(PRIOR_COVARIANCE)
    total = np.linalg.inv(covariance)
    mean = (total @ loc - base @ PRIOR_LOC) / 3, (total - base) / 3
    wanted = oracles.log_partition(total @ loc, total) - oracles.log_partition(base @ PRIOR_LOC, base)
    for index in range(3):
        x, y = fitted.rows_of(index)
        h, P = oracles.linear_factor(x, y, NOISE)
        constant = -0.5 * np.sum(y**2) / NOISE**2 - len(y) * np.log(NOISE * np.sqrt(2 * np.pi))
        tilted = oracles.log_partition(total @ loc + h - mean[0], total + P - mean[1])
        wanted += constant + tilted - oracles.log_partition(total @ loc, total)
    found = evidence(fitted, X, Y)
    assert abs(found - wanted) < (1e-8 if x64 else 1e-3)
    assert found > oracles.linear_log_evidence(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE) + 1e-3


# ------------------------------------------------------------------------------------------------------------ EP and VI


def diagonal(num_groups, solver, schedule):
    """A mean-field q of a quadratic model: its tilted marginals take rounds, at a fraction of a grid's cost."""
    return fit(make_independent_linear(), X, Y, groups(num_groups), solver, schedule, 6, AutoDiagonalNormal)


def test_one_group_is_ep_state_by_state(x64):
    """Half the power: at power 1 a single group is exact at once."""
    tied, own = (diagonal(1, solver(0.5), Sequential()) for solver in (StochasticEP, PowerEP))
    found, wanted = (np.array([np.column_stack(numbers(s).total) for s in f.states[1:]]) for f in (tied, own))
    np.testing.assert_allclose(found, wanted, rtol=1e-12 if x64 else 1e-5, atol=1e-12 if x64 else 1e-5)
    assert np.abs(wanted[2] - wanted[1]).max() > 1e-3
    assert abs(evidence(tied, X, Y) - evidence(own, X, Y)) < (1e-10 if x64 else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [3, 12], ids=["grid", "rows"])
def test_sweeps_are_stochastic_ep_on_a_grid(num_groups, x64):
    """Moments of groups by a grid, and of single rows by quadrature over their predictor."""
    fitted = logistic(num_groups, StochasticEP(), Sequential())
    wanted, _ = grid_stochastic_ep(COLUMN, LABELS, groups(num_groups), 6)
    # Quadrature is loose on purpose while q moves by posterior sds.
    exact = 1e-8 if num_groups == 3 else 1e-6
    np.testing.assert_allclose(naturals(fitted)[:6], wanted, rtol=exact if x64 else 2e-3, atol=1e-9 if x64 else 1e-3)


def test_parallel_rounds_reach_the_limit_that_sweeps_tend_to(x64):
    """The limit on a grid, and its evidence; sweeps on the grid approach it as their steps shrink."""
    fitted = logistic(3, StochasticEP(), Synchronous(), 30)
    wanted, mass = grid_stochastic_ep(COLUMN, LABELS, groups(3), 60, parallel=True)
    np.testing.assert_allclose(naturals(fitted)[-1], wanted[-1], rtol=1e-8 if x64 else 2e-3)
    assert abs(evidence(fitted, COLUMN, LABELS) - mass) < (1e-8 if x64 else 1e-3)
    in_turn, _ = grid_stochastic_ep(COLUMN, LABELS, groups(3), 90)
    gaps = np.abs(in_turn[[14, 89]] - wanted[-1]).max(axis=1)
    # The step of sweep 15 over that of sweep 90 is 4.
    assert 2.5 < gaps[0] / gaps[1] < 6.0


def test_small_powers_are_minibatch_natural_gradients(x64):
    """PVI property 7: whole trajectories meet, linearly in the power once sweeps have left the wide prior behind."""
    factors = [oracles.linear_factor(X[groups(3) == g], Y[groups(3) == g], NOISE) for g in range(3)]
    wanted, gaps = minibatch_mean_field(factors, 0.25, 6), []
    for power in (0.04, 0.02):
        own = [numbers(state).total for state in diagonal(3, StochasticEP(power), Sequential()).states[1:7]]
        gaps.append(np.abs(np.array([[h, np.diag(P)] for h, P in own]) - wanted).max(axis=(1, 2)))
    assert gaps[1].max() < 0.02 * np.abs(wanted).max()
    assert 1.8 < gaps[0][-1] / gaps[1][-1] < 2.2


@pytest.mark.slow
def test_small_powers_of_a_logistic_model_are_minibatch_natural_gradients(x64):
    wanted = minibatch_natural_gradient(COLUMN, LABELS, groups(3), 6)
    gaps = []
    for power in (0.2, 0.1):
        found = naturals(logistic(3, StochasticEP(power), Sequential()))[:6]
        gaps.append(np.abs(found - wanted).max())
    assert gaps[1] < 0.1
    assert 1.7 < gaps[0] / gaps[1] < 2.3


# -------------------------------------------------------------------------------------------------- what has no meaning


@pytest.mark.parametrize(
    "schedule",
    [Asynchronous(), Committee(), Decentralized(1.0 - np.eye(3)), StochasticSubset(2), Streaming()],
    ids=lambda s: type(s).__name__,
)
def test_schedules_that_keep_a_site_per_group_are_refused(schedule):
    model = make_linear()
    with pytest.raises(PVIError, match=f"one site for all groups.*{type(schedule).__name__}.*PowerEP"):
        PVI(
            Partition(model, "data", groups(3)), AutoMultivariateNormal(model), solver=StochasticEP(), schedule=schedule
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda pvi, state: pvi.add_group(state, "new", X, Y),
        lambda pvi, state: pvi.revisit(state, 0, X, Y),
        lambda pvi, state: pvi.forget_group(state, 0),
    ],
    ids=["add_group", "revisit", "forget_group"],
)
def test_a_single_groups_site_is_not_to_be_had(call):
    fitted = linear(3, Synchronous())
    with pytest.raises(PVIError, match="StochasticEP: its one site.*PowerEP"):
        call(fitted.pvi, fitted.last)


# ---------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.once
@pytest.mark.slow
def test_a_site_of_the_wrong_power_is_seen(monkeypatch, x64):
    """q = prior * t^(M - 1) in place of t^M: a parallel round is exact once, and no more after it."""
    for room in (visits, sweeps):
        monkeypatch.setattr(room, "tied_site", lambda whole, count: tied_site(whole, count - 1))
    fitted = fit(make_linear(), X, Y, groups(3), StochasticEP(), Synchronous(), 2)
    loc, covariance = numbers(fitted.last).moments
    assert np.max(np.abs(covariance / EXACT[1] - 1)) > 1e-2
