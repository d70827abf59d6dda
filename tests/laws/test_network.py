"""Laws of a network without a server: what its mean is, where every agent ends, and how fast gossip mixes."""

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest

from numpyro_pvi.schedules import Decentralized, _decentralized, _gossip, _graph
from numpyro_pvi.solvers import Conjugate, NaturalGradient

from . import checks, oracles
from .fits import fit, numbers
from .models import NOISE, PRIOR_COVARIANCE, PRIOR_LOC, groups, make_linear, make_logistic, rows

N = 5
RING = tuple((i, (i + 1) % N) for i in range(N))
KEY = jax.random.key(0)
X, Y, LABELS = rows()

GRAPHS = {
    "ring": networkx.cycle_graph(8),
    "path": networkx.path_graph(6),
    "star": networkx.star_graph(9),
    "grid": networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(3, 4)),
    "geometric": networkx.random_geometric_graph(12, 0.6, seed=2),
    "one-way": networkx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]),
}


@pytest.fixture
def tolerance(x64):
    return 1e-10 if x64 else 1e-4


def agents(fitted, state):
    """Every agent's natural parameters, from the tracked means by the test's own arithmetic."""
    prior, tracked = numbers(state).prior, state.schedule_state.tracked
    n = len(tracked.precision_mean)
    return [
        (
            prior[0] + n * np.asarray(tracked.precision_mean[i], float),
            prior[1] + n * np.asarray(tracked.precision[i], float),
        )
        for i in range(n)
    ]


def mean_gap(fitted):
    """Law 1 of a network: the mean of what agents hold is the prior and all sites, after every round."""
    worst = 0.0
    for state in fitted.states[1:]:
        total = numbers(state).total
        held = [np.mean([a[k] for a in agents(fitted, state)], axis=0) for k in (0, 1)]
        worst = max(worst, *(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(held, total, strict=True)))
    return worst


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_are_doubly_stochastic_and_follow_the_links(name):
    graph = _graph.read_graph(GRAPHS[name])
    (a,) = graph.matrices
    np.testing.assert_allclose(a.sum(0), 1, atol=1e-10)
    np.testing.assert_allclose(a.sum(1), 1, atol=1e-10)
    # Row i is what i gets: networkx's link (j, i) leads from j to i.
    links = networkx.to_numpy_array(GRAPHS[name]).T > 0
    np.testing.assert_array_equal((a > 0) & ~np.eye(len(a), dtype=bool), links)
    assert np.all(np.diag(a) > 0) and 0 < graph.modulus < 1


@pytest.mark.parametrize("name", ["ring", "star", "geometric"])
def test_weights_stay_doubly_stochastic_under_failures(name):
    (a,) = _graph.read_graph(GRAPHS[name]).matrices
    lost = 0
    for seed in range(20):
        key = jax.random.key(seed)
        present = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.8, (len(a),))
        found, sent = _graph.realised_weights(jnp.asarray(a), key, 0.3, present)
        found, away = np.asarray(found), ~np.asarray(present)
        np.testing.assert_allclose(found.sum(0), 1, atol=1e-6)
        np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
        np.testing.assert_allclose(found[away][:, away], np.eye(away.sum()), atol=1e-6)
        off = (found > 0) & ~np.eye(len(a), dtype=bool)
        assert np.all(off <= (a > 0)) and int(sent) == off.sum() and np.all(found >= 0)
        lost += (a > 0).sum() - len(a) - off.sum()
    assert lost > 0


@pytest.mark.parametrize("name", GRAPHS)
def test_gossip_contracts_at_the_second_modulus(name, x64):
    if not x64:
        pytest.skip("a ratio of small numbers")
    graph = _graph.read_graph(GRAPHS[name])
    mix = jax.jit(lambda z, k: _gossip.Gossip(graph, 1).mix(z, KEY, jnp.ones(graph.size, bool), k)[0])
    values = jax.random.normal(KEY, (graph.size, 1))
    spread = []
    for k in range(60):
        values = mix(values, k)
        spread.append(float(jnp.linalg.norm(values - values.mean())))
    # A pair of complex eigenvalues turns as it shrinks: take the rate over many steps.
    assert (spread[59] / spread[29]) ** (1 / 30) == pytest.approx(
        graph.modulus, rel=1e-3 if name != "one-way" else 0.02
    )


@pytest.mark.parametrize("name", ["ring", "path", "star", "grid", "geometric"])
def test_chebyshev_gossip_shrinks_tenfold_in_fewer_steps_and_keeps_the_mean(name, x64):
    graph = _graph.read_graph(GRAPHS[name])
    gossip = _gossip.Gossip(graph)
    values = jax.random.normal(KEY, (graph.size, 3))
    mixed, sent = gossip.mix(values, KEY, jnp.ones(graph.size, bool), jnp.int32(0))
    np.testing.assert_allclose(mixed.mean(0), values.mean(0), atol=1e-12 if x64 else 1e-5)
    left = np.linalg.norm(mixed - mixed.mean(0)) / np.linalg.norm(values - values.mean(0))
    assert gossip.polynomial and left < 1.01 * _graph.AUTO_SHRINK
    assert gossip.count <= _graph.auto_steps(graph, polynomial=False)
    assert int(sent) == gossip.count * 2 * GRAPHS[name].number_of_edges()


SETTINGS = {
    "auto": {},
    "one-step": {"steps_per_round": 1},
    "failures": {"link_failure": 0.3},
    "absences": {"availability": 0.6},
    "in-turn": {"adjacency": [[(0, 1), (2, 3), (4, 4)], [(1, 2), (3, 4), (0, 0)]], "nodes": range(N)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_network_mean_and_every_agent_reach_the_central_posterior(name, x64, tolerance):
    schedule = Decentralized(**({"adjacency": RING} | SETTINGS[name]))
    fitted = fit(make_linear(), X, Y, groups(N), Conjugate(), schedule, 150)
    assert mean_gap(fitted) < tolerance
    exact = oracles.linear_posterior(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    for vector, precision in agents(fitted, fitted.last):
        covariance = np.linalg.inv(precision)
        np.testing.assert_allclose(covariance, exact[1], rtol=1e-8 if x64 else 1e-3, atol=1e-8 if x64 else 1e-4)
        np.testing.assert_allclose(covariance @ vector, exact[0], rtol=1e-8 if x64 else 1e-3, atol=1e-4)
    assert float(fitted.last.report.consensus) < (1e-8 if x64 else 1e-2)


def test_agents_of_a_logistic_model_reach_the_central_optimum(x64):
    fitted = fit(make_logistic(), X, LABELS, groups(N), NaturalGradient(), Decentralized(RING, link_failure=0.1), 60)
    best = oracles.batch_vi_logistic(X, LABELS)
    found = fitted.pvi.posterior(fitted.last, agent=3, joint=True)
    (joint,) = [d for name, d in found.items() if isinstance(name, tuple)]
    np.testing.assert_allclose(joint.mean, best[0], atol=1e-6 if x64 else 1e-3)
    np.testing.assert_allclose(joint.covariance_matrix, best[1], atol=1e-6 if x64 else 1e-3)
    assert checks.distance(fitted, *best) < (1e-6 if x64 else 1e-3)


class TestFaults:
    """Each law can fail."""

    def test_changes_that_are_not_tracked(self, monkeypatch):
        right = _decentralized._contribution
        calls = []

        def forgetful(groups, priors, n):
            # The second call of a round is what the agents add after their updates.
            calls.append(1)
            found = right(groups, priors, n)
            return found if len(calls) % 2 else found * 0.9

        monkeypatch.setattr(_decentralized, "_contribution", forgetful)
        assert mean_gap(fit(make_linear(), X, Y, groups(N), Conjugate(), Decentralized(RING), 4)) > 1e-2

    def test_failed_links_that_return_nothing(self, monkeypatch):
        def leaky(weights, key, link_failure, present):
            up = jax.random.bernoulli(key, 1 - link_failure, weights.shape) | jnp.eye(len(weights), dtype=bool)
            return weights * up, jnp.int32(0)

        monkeypatch.setattr(_gossip, "realised_weights", leaky)
        schedule = Decentralized(RING, link_failure=0.3)
        assert mean_gap(fit(make_linear(), X, Y, groups(N), Conjugate(), schedule, 4)) > 1e-2

    def test_a_polynomial_that_loses_the_mean(self, monkeypatch):
        right = _graph.chebyshev_coefficients
        monkeypatch.setattr(_gossip, "chebyshev_coefficients", lambda rho, k: right(rho, k) * [1.0, 0.9])
        assert mean_gap(fit(make_linear(), X, Y, groups(N), Conjugate(), Decentralized(RING), 4)) > 1e-2
