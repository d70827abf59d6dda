"""Groups at their own pace: zero delay is a sweep, and no fault of the link leaves a trace in the end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_pvi.schedules._asynchronous as asynchronous
import numpyro_pvi.schedules._convergence as convergence
import numpyro_pvi.schedules._network as network
from numpyro_pvi import PVI, Partition
from numpyro_pvi.expectations import ImportanceMoments
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, empty_report, settled
from numpyro_pvi.solvers import Conjugate, LocalELBO, NaturalGradient, PowerEP

from . import checks, ep_oracles, oracles
from .fits import Fit, fit, numbers
from .models import NOISE, PRIOR_COVARIANCE, PRIOR_LOC, groups, make_linear, make_logistic, make_scale, rows

X, Y, CLASSES = rows()
SEEDS = 20
# Everything that can happen to a message, groups of which one is three times slower, and a bound on staleness.
LINK = Asynchronous(("exponential", {0: 3.0}), max_staleness=40, loss_rate=0.25, duplicate_rate=0.25, reorder=True)


def largest_gap(first, second):
    pairs = zip(jax.tree.leaves(first.sites), jax.tree.leaves(second.sites), strict=True)
    return max(float(np.max(np.abs(a - b)) / (1 + np.max(np.abs(b)))) for a, b in pairs)


@pytest.mark.parametrize(
    ("make", "y", "solver"),
    [
        (make_linear, Y, NaturalGradient()),
        (make_logistic, CLASSES, NaturalGradient(num_steps=2)),
        (make_scale, Y, NaturalGradient()),
    ],
    ids=["linear", "logistic", "prior factor"],
)
def test_zero_delay_is_a_cyclic_sweep(make, y, solver, tolerance):
    """State by state while Sequential's guard accepts, which it does here."""
    first, second = (
        fit(make(), X, y, groups(5), solver, schedule, 4, init_sites="auto")
        for schedule in (Sequential(), Asynchronous(damping=1.0))
    )
    assert all(largest_gap(b, a) < tolerance for a, b in zip(first.states, second.states, strict=True))
    np.testing.assert_allclose(second.losses, first.losses, rtol=tolerance)
    assert largest_gap(first.states[1], first.states[0]) > 0.01
    assert not any(np.any(state.report.staleness) for state in second.states)


def test_zero_delay_shares_a_stochastic_solvers_draws(tolerance):
    """The same keys go to the same visits."""
    first, second = (
        fit(make_linear(), X, Y, groups(3), LocalELBO(num_steps=3), schedule, 2)
        for schedule in (Sequential(), Asynchronous(damping=1.0))
    )
    assert all(largest_gap(b, a) < tolerance for a, b in zip(first.states, second.states, strict=True))


def ends(schedule, rounds, seeds, num_groups=5):
    """The states after ``rounds`` rounds from several keys; one program serves them all."""
    model = make_logistic()
    pvi = PVI(Partition(model, "data", groups(num_groups)), AutoMultivariateNormal(model), schedule=schedule)
    start = pvi.init(jax.random.key(0), X, CLASSES)
    keys = jax.random.split(jax.random.key(1), seeds)
    states = [dataclasses.replace(start, rng_key=key) for key in keys]
    return pvi, [pvi.run(None, rounds, X, CLASSES, init_state=s, progress_bar=False).state for s in states]


def test_every_lossy_link_ends_at_the_central_fixed_point(x64):
    """20 seeds: lost, doubled and overtaking messages, random delays; law 1 holds, and q is batch VI's."""
    pvi, states = ends(LINK, 96, SEEDS)
    loc, covariance = oracles.batch_vi_logistic(X, CLASSES)
    for seed, state in enumerate(states):
        fitted = Fit(pvi, [state], [np.nan], X, CLASSES, groups(5))
        assert checks.sums(fitted) < (1e-10 if x64 else 2e-5)
        assert checks.distance(fitted, loc, covariance) < (1e-6 if x64 else 1e-3), f"seed {seed}"
    # The link was as bad as it was meant to be: more was sent than absorbed, less came back, and nothing was too old.
    sent, answered = np.asarray([state.report.messages for state in states], float).T
    assert np.all(sent > 1.3 * 96 * 5) and np.all(answered < 0.8 * sent)
    assert 4 < max(np.max(state.report.staleness) for state in states) <= 40
    assert len({float(state.report.clock) for state in states}) == SEEDS


def test_sampled_moments_over_a_lossy_link_converge_where_exact_ones_do():
    """Three seeds of power EP by 64 draws a visit: what says that it converged is within .1 sd of EP on a grid."""
    model = make_logistic()
    split = Partition(model, "data", groups(5))
    pvi = PVI(split, AutoMultivariateNormal(model), solver=PowerEP(1.0, moments=ImportanceMoments(64)), schedule=LINK)
    loc, covariance, _ = ep_oracles.grid_ep(X, CLASSES, groups(5), sweeps=20)
    runs = [pvi.run(jax.random.key(seed), 60, X, CLASSES, tol=1e-3, progress_bar=False) for seed in range(3)]
    claims = [result.params for result in runs if result.converged]
    assert claims
    for params in claims:
        tril = np.asarray(params["auto_scale_tril"])
        assert np.max(np.abs(params["auto_loc"] - loc) / np.sqrt(np.diag(covariance))) < 0.1
        assert np.max(np.abs(np.log(np.diag(tril @ tril.T) / np.diag(covariance)))) < 0.2


def test_noise_beyond_a_tenth_of_a_sd_excuses_nothing(monkeypatch):
    """Moments so noisy that any move is explained by them: such a round has not converged, and without the limit it has."""
    report = empty_report(1, jnp.zeros(()).dtype)._replace(
        valid=jnp.asarray(True),
        finite=jnp.asarray(True),
        estimate=jnp.asarray(800.0),
        left=jnp.asarray(800.0),
        step=jnp.ones(1),
    )
    assert not settled(report, 1e-3, 837.0)
    assert settled(report._replace(estimate=jnp.asarray(0.05)), 1e-3, 0.09)
    monkeypatch.setattr(convergence, "LARGEST_NOISE", np.inf)
    assert settled(report, 1e-3, 837.0)


BAD = Asynchronous(1.0, loss_rate=0.4, duplicate_rate=0.4, reorder=True)


def test_half_of_the_messages_are_held_back_where_they_may_overtake():
    """No answer comes to what is held back: of n messages that are not lost n / 2 are answered, within three sds."""
    _, (state,) = ends(Asynchronous(1.0, reorder=True), 24, 1)
    sent, answered = np.asarray(state.report.messages, float)
    assert sent > 60
    assert abs(answered / sent - 0.5) < 3 * 0.5 / np.sqrt(sent)


def test_a_missing_version_check_is_seen(monkeypatch):
    """Copies that are absorbed a second time fill rounds with fewer messages, and law 3 is not what sees it."""
    right = network.Faults.transmit

    def careless(self, link, *rest):
        delivery, after = right(self, link._replace(absorbed=jnp.full_like(link.absorbed, -1)), *rest)
        return delivery, after

    sent = np.sum([state.report.messages for state in ends(BAD, 6, 3)[1]])
    monkeypatch.setattr(network.Faults, "transmit", careless)
    assert np.sum([state.report.messages for state in ends(BAD, 6, 3)[1]]) < 0.9 * sent


def test_differences_instead_of_absolute_sites_are_seen(monkeypatch):
    """A server that adds what it is sent to what it has: every message that it hears counts once more."""
    right = asynchronous.Messages._absorb

    def differences(self, walk, m, change, usable):
        return right(self, walk, m, change + jax.tree.map(lambda x: x[m], walk.sites), usable)

    def distance():
        pvi, (state,) = ends(BAD, 40, 1)
        fitted = Fit(pvi, [state], [], X, CLASSES, groups(5))
        return checks.distance(fitted, *oracles.batch_vi_logistic(X, CLASSES))

    assert distance() < 1e-2
    monkeypatch.setattr(asynchronous.Messages, "_absorb", differences)
    assert not distance() < 1e-2


@pytest.mark.parametrize("solver", [Conjugate(), NaturalGradient()], ids=["conjugate", "natural"])
def test_subsets_are_exact_once_every_group_was_drawn(solver, x64):
    """Law 2 under StochasticSubset: a round with all groups behind it, and not one earlier."""
    fitted = fit(make_linear(), X, Y, groups(3), solver, StochasticSubset(1), 40)
    exact = oracles.linear_posterior(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    assert checks.distance(fitted, *exact) < (1e-6 if x64 else 2e-5)
    for state in fitted.states[1:6]:
        drawn = [np.any(site[1] != 0) for site in numbers(state).groups]
        gap = checks.distance(fitted._replace(states=[state]), *exact)
        assert (gap < 1e-3) == all(drawn)
