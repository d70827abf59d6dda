"""Laws of a network without a server: what its mean is, where every agent ends, and how fast gossip mixes."""

import functools

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from scipy import integrate, stats

from numpyro_pvi.schedules import Decentralized, _decentralized, _graph, _stream
from numpyro_pvi.solvers import Conjugate, NaturalGradient

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


def test_balanced_weights_keep_the_graphs_own_ratios():
    """``D A E`` of diagonal D, E changes no ratio of products round a cycle: neither of own loops, nor of directions."""
    path = np.array([[0.0, 2, 0], [2, 0, 4], [0, 4, 0]])
    (found,) = _graph.read_graph(path).matrices
    # An own loop weighs what a link of the graph does on average: 3.
    assert found[0, 1] * found[1, 0] / (found[0, 0] * found[1, 1]) == pytest.approx(4 / 9)
    directed = np.array([[1.0, 2, 1], [1.5, 1, 3], [1, 2.5, 1]])
    (found,) = _graph.read_graph(directed).matrices
    np.testing.assert_allclose([found.sum(0), found.sum(1)], 1.0, rtol=1e-9)
    round_and_back = [a[0, 1] * a[1, 2] * a[2, 0] / (a[1, 0] * a[2, 1] * a[0, 2]) for a in (found, directed)]
    assert round_and_back[0] == pytest.approx(round_and_back[1])
    assert abs(round_and_back[1] - 1) > 0.1


@pytest.mark.parametrize("name", GRAPHS)
def test_gossip_contracts_at_the_second_modulus(name, x64):
    if not x64:
        pytest.skip("a ratio of small numbers")
    graph = _graph.read_graph(GRAPHS[name])
    mix = jax.jit(lambda z, k: _graph.Gossip(graph, 1).mix(z, KEY, jnp.ones(graph.size, bool), k)[0])
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
    gossip = _graph.Gossip(graph)
    values = jax.random.normal(KEY, (graph.size, 3))
    mixed, sent = gossip.mix(values, KEY, jnp.ones(graph.size, bool), jnp.int32(0))
    np.testing.assert_allclose(mixed.mean(0), values.mean(0), atol=1e-12 if x64 else 1e-5)
    left = np.linalg.norm(mixed - mixed.mean(0)) / np.linalg.norm(values - values.mean(0))
    assert gossip.polynomial and left < 1.01 * _graph.AUTO_SHRINK
    assert gossip.count <= _graph.auto_steps(graph, polynomial=False)
    assert int(sent) == gossip.count * 2 * GRAPHS[name].number_of_edges()


@pytest.mark.parametrize("failure", [0.1, 0.5, 0.9])
def test_gossip_with_memory_shrinks_fivefold_where_links_fail_and_keeps_the_mean(failure, x64):
    """In fewer steps than plain gossip; median of 20 seeds, twofold for chance."""
    for name in ("ring", "star"):
        graph = _graph.read_graph(GRAPHS[name])
        gossip = _graph.Gossip(graph, link_failure=failure)
        values = jax.random.normal(KEY, (graph.size, 3))
        mix = jax.jit(jax.vmap(lambda key: gossip.mix(values, key, jnp.ones(graph.size, bool), jnp.int32(0))[0]))  # noqa: B023
        mixed = mix(jax.random.split(KEY, 20))
        np.testing.assert_allclose(mixed.mean(1), np.tile(values.mean(0), (20, 1)), atol=1e-12 if x64 else 1e-5)
        left = np.linalg.norm(mixed - mixed.mean(1, keepdims=True), axis=(1, 2)) / np.linalg.norm(
            values - values.mean(0)
        )
        assert np.median(left) < 2 * _graph.FAILING_SHRINK
        assert gossip.polynomial and gossip.count < _graph.auto_steps(graph, False, failure)


def test_too_much_memory_does_not_survive_failing_links(monkeypatch):
    """Why the polynomials' memory is bounded: on 32 agents in a ring with half of the links failing they blow up."""
    graph = _graph.read_graph(networkx.cycle_graph(32))
    values = jax.random.normal(KEY, (32, 3))

    def left():
        gossip = _graph.Gossip(graph, link_failure=0.5)
        mixed, _ = gossip.mix(values, KEY, jnp.ones(32, bool), jnp.int32(0))
        return np.linalg.norm(mixed - mixed.mean(0)) / np.linalg.norm(values - values.mean(0))

    assert left() < 2 * _graph.FAILING_SHRINK
    bold = functools.partial(_graph.failing_modulus, link_failure=0.5)
    steps = _graph.auto_steps(graph, True, 0.5)
    monkeypatch.setattr(_graph, "chebyshev_interval", lambda modulus, failure: bold(modulus))
    monkeypatch.setattr(_graph, "auto_steps", lambda *arguments: steps)
    assert left() > 1.0


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


EVEN = np.arange(12) % 4
SQUARE = tuple((i, (i + 1) % 4) for i in range(4))
STREAMS = {
    "one-row": {"batch_size": 1},
    "all-rows": {},
    "many-a-round": {"batch_size": 1, "updates_per_exchange": 2, "exchanges_per_round": 2},
    "failures": {"batch_size": 2, "link_failure": 0.3},
    "absences": {"batch_size": 1, "availability": 0.6},
    "replay": {"batch_size": 1, "replay": 2},
}


def consensus(adjacency=SQUARE, **settings):
    return Decentralized(adjacency, mixing="consensus", **settings)


# Of a linear model the same is asserted on every stream below; other ways to take rows are the same program there.
LOGISTIC_STREAMS = ("one-row", "many-a-round", "replay")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in LOGISTIC_STREAMS)) for n in STREAMS]
)
def test_consensus_keeps_the_networks_mean(name, tolerance):
    """Law 1, on a logistic model, under either covariance."""
    guide = AutoDiagonalNormal if name == "many-a-round" else AutoMultivariateNormal
    schedule = consensus(**STREAMS[name])
    fitted = fit(make_logistic(), X, LABELS, EVEN, NaturalGradient(), schedule, 6, guide=guide)
    assert dense_mean_gap(fitted) < tolerance
    taken = np.asarray(fitted.last.schedule_state.taken)
    assert np.all(taken <= 3) and taken.sum() > 0


def dense_mean_gap(fitted):
    """As :func:`mean_gap`, for either family."""
    worst = 0.0
    for state in fitted.states[1:]:
        prior, total, tracked = numbers(state).prior, numbers(state).total, state.schedule_state.tracked
        vectors, precisions = (np.asarray(x, float) for x in (tracked.precision_mean, tracked.precision))
        count, full = len(vectors), precisions.ndim == 3
        mean = np.mean(precisions, axis=0) if full else np.diag(np.mean(precisions, axis=0))
        held = prior[0] + count * vectors.mean(0), prior[1] + count * mean
        worst = max(worst, *(np.abs(a - b).max() / max(np.abs(b).max(), 1) for a, b in zip(held, total, strict=True)))
    return worst


def streamed_gap(fitted):
    """How far the mean of the agents' precisions is from the central one of the rows taken, in every round."""
    worst, prior = 0.0, np.linalg.inv(PRIOR_COVARIANCE)
    for state in fitted.states[1:]:
        rows = [np.flatnonzero(i == EVEN)[:k] for i, k in enumerate(np.asarray(state.schedule_state.taken))]
        seen = np.concatenate(rows)
        central = prior + X[seen].T @ X[seen] / NOISE**2
        mean = np.mean([a[1] for a in agents(fitted, state)], axis=0)
        worst = max(worst, np.abs(mean - central).max() / np.abs(central).max())
    return worst


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "replay"])
def test_conjugate_streams_have_the_central_precision_at_every_step(name, x64, tolerance):
    """Laws 1 and 2: the network's mean from the first round, every agent in the limit."""
    schedule = consensus(**STREAMS[name])
    fitted = fit(make_linear(), X, Y, EVEN, Conjugate(), schedule, 80)
    assert dense_mean_gap(fitted) < tolerance
    assert streamed_gap(fitted) < (1e-9 if x64 else 1e-5)
    exact = oracles.linear_posterior(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    for vector, precision in agents(fitted, fitted.last):
        covariance = np.linalg.inv(precision)
        np.testing.assert_allclose(covariance, exact[1], atol=1e-8 if x64 else 1e-4)
        np.testing.assert_allclose(covariance @ vector, exact[0], atol=1e-8 if x64 else 1e-4)


def probit_steps(X, y, sd, diagonal=False, slope=0.61):
    """003's updates for classification (lemmas 5 and 6), in its own notation, with the new information matrix."""
    loc, information = np.zeros(X.shape[1]), np.eye(X.shape[1]) / sd**2
    for phi, label in zip(X, y, strict=True):
        beta = 1 + slope**2 * phi @ np.linalg.solve(information, phi)
        gamma = np.sqrt(slope**2 / (2 * np.pi * beta)) * np.exp(-0.5 * slope**2 / beta * (phi @ loc) ** 2)
        miss = label - stats.norm.cdf(slope * (phi @ loc) / np.sqrt(beta))
        added = gamma * np.outer(phi, phi)
        information = information + (np.diag(np.diag(added)) if diagonal else added)
        loc = loc + miss * np.linalg.solve(information, phi)
    return loc, np.linalg.inv(information)


def alone(model, y, guide, **settings):
    """One agent that takes row after row in one round."""
    schedule = consensus(np.ones((1, 1)), batch_size=1, updates_per_exchange=len(y), **settings)
    return fit(model, X, y, np.zeros(len(y), int), NaturalGradient(), schedule, 1, guide=guide)


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoDiagonalNormal])
def test_probit_updates_are_those_of_the_paper(guide, x64):
    fitted = alone(make_logistic(), LABELS, guide, expectation="probit")
    expected = probit_steps(X, LABELS, 2.0, guide is AutoDiagonalNormal)
    for found, wanted in zip(numbers(fitted.last).moments, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-10 if x64 else 1e-4)


def test_quadrature_updates_are_natural_gradients(x64):
    fitted = alone(make_logistic(), LABELS, AutoMultivariateNormal)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    loc, precision = np.zeros(2), np.eye(2) / 4
    for x, label in zip(X, LABELS, strict=True):
        predictor = x @ loc + np.sqrt(x @ np.linalg.solve(precision, x)) * nodes
        mean = 1 / (1 + np.exp(-predictor))
        slope, bend = (np.dot(weights, v) / weights.sum() for v in (label - mean, mean * (1 - mean)))
        new = precision + bend * np.outer(x, x)
        loc, precision = np.linalg.solve(new, precision @ loc + x * slope + bend * x * (x @ loc)), new
    found = numbers(fitted.last).moments
    np.testing.assert_allclose(found[0], loc, atol=1e-7 if x64 else 1e-4)
    np.testing.assert_allclose(found[1], np.linalg.inv(precision), atol=1e-7 if x64 else 1e-4)


def test_delbo_of_a_conjugate_stream_is_the_evidence(x64):
    """Every row's bound is its log predictive density where the updates are exact, and there is nobody to agree with."""
    fitted = alone(make_linear(), Y, AutoMultivariateNormal)
    covariance = X @ PRIOR_COVARIANCE @ X.T + NOISE**2 * np.eye(len(Y))
    evidence = stats.multivariate_normal.logpdf(Y, X @ PRIOR_LOC, covariance)
    np.testing.assert_allclose(-fitted.losses[-1], evidence, rtol=1e-9 if x64 else 1e-4)
    np.testing.assert_allclose(fitted.last.report.delbo, [evidence, 0.0, 0.0], rtol=1e-4, atol=1e-9 if x64 else 1e-4)


def test_delbo_of_a_mean_field_stream_is_the_sum_of_its_rows_bounds(x64):
    """Normal rows one by one: the bound is ``E log l - KL``, and its gap is to the density of the row under the q before."""
    fitted = alone(make_independent_linear(), Y, AutoDiagonalNormal)
    loc, variance, bound, whole = np.zeros(2), np.full(2, 4.0), 0.0, 0.0
    for x, y in zip(X, Y, strict=True):
        new = 1 / (1 / variance + x**2 / NOISE**2)
        there = loc + new * x * (y - x @ loc) / NOISE**2
        divergence = 0.5 * np.sum(new / variance - 1 + np.log(variance / new) + (there - loc) ** 2 / variance)
        bound += stats.norm.logpdf(y, x @ there, NOISE) - 0.5 * x**2 @ new / NOISE**2 - divergence
        whole += stats.norm.logpdf(y, x @ loc, np.sqrt(NOISE**2 + x**2 @ variance))
        loc, variance = there, new
    rounding = 1e-9 if x64 else 1e-4
    np.testing.assert_allclose(fitted.last.report.delbo, [bound, 0.0, whole - bound], rtol=rounding, atol=rounding)


def test_delbo_and_its_modelling_gap_add_up_to_the_predictive_density(x64):
    """One row of a logistic model: the bound, and its gap to the integral that it bounds."""
    far = 3 * X
    schedule = consensus(np.ones((1, 1)), batch_size=1)
    fitted = fit(make_logistic(), far, LABELS, np.zeros(12, int), NaturalGradient(), schedule, 1)
    sd = 2 * np.linalg.norm(far[0])

    def density(u):
        return stats.norm.pdf(u, 0, sd) / (1 + np.exp(-(2 * LABELS[0] - 1) * u))

    exact = np.log(integrate.quad(density, -12 * sd, 12 * sd, epsabs=1e-12)[0])
    value, _, gap = np.asarray(fitted.last.report.delbo)
    assert gap > 1e-4
    np.testing.assert_allclose(value + gap, exact, atol=1e-6 if x64 else 1e-4)


def test_consensus_gap_is_the_log_of_the_geometric_means_mass(x64):
    fitted = fit(make_logistic(), X, LABELS, EVEN, NaturalGradient(), consensus(batch_size=1), 1)
    held = agents(fitted, fitted.last)

    def partition(vector, precision):
        return 0.5 * vector @ np.linalg.solve(precision, vector) - 0.5 * np.linalg.slogdet(precision)[1]

    mean = partition(*(np.mean([a[k] for a in held], axis=0) for k in (0, 1)))
    wanted = np.mean([partition(*a) for a in held]) - mean
    np.testing.assert_allclose(fitted.last.report.delbo[1], wanted, rtol=1e-8 if x64 else 1e-3)


def test_replays_are_balanced_over_the_classes_seen():
    class Rows:
        sizes = (8, 5)
        program = row = first_rows = print

        def classes(self):
            return jnp.array([[0, 0, 0, 1, 0, 0, 2, 1], [1, 1, 1, 1, 1, -1, -1, -1]]), 3

    replay = _stream.sort_classes(Rows())
    positions, known = _stream.draw_seen(replay, jnp.int32(0), jnp.int32(6), KEY, 4000)
    share = np.bincount(np.asarray(positions), minlength=8) / 4000
    # Six rows seen: five of class 0 and one of class 1; class 2 has not come yet.
    np.testing.assert_allclose(share, [0.1, 0.1, 0.1, 0.5, 0.1, 0.1, 0, 0], atol=0.03)
    assert known.all()
    assert not _stream.draw_seen(replay, jnp.int32(0), jnp.int32(0), KEY, 2)[1].any()
    single, _ = _stream.draw_seen(replay, jnp.int32(1), jnp.int32(3), KEY, 3000)
    np.testing.assert_allclose(np.bincount(np.asarray(single), minlength=5) / 3000, [1 / 3] * 3 + [0, 0], atol=0.04)


@pytest.mark.once
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

        monkeypatch.setattr(_graph, "realised_weights", leaky)
        schedule = Decentralized(RING, link_failure=0.3)
        assert mean_gap(fit(make_linear(), X, Y, groups(N), Conjugate(), schedule, 4)) > 1e-2

    def test_a_polynomial_that_loses_the_mean(self, monkeypatch):
        right = _graph.chebyshev_coefficients
        monkeypatch.setattr(_graph, "chebyshev_coefficients", lambda rho, k: right(rho, k) * [1.0, 0.9])
        assert mean_gap(fit(make_linear(), X, Y, groups(N), Conjugate(), Decentralized(RING), 4)) > 1e-2

    def test_weight_one_leaves_a_share_of_the_precision(self):
        """003, (11) read literally: every row counts 1/n in the network's mean."""
        fitted = fit(make_linear(), X, Y, EVEN, Conjugate(), consensus(batch_size=1, likelihood_weight=1.0), 6)
        assert streamed_gap(fitted) > 0.1
        found = numbers(fitted.last).total[1] - np.linalg.inv(PRIOR_COVARIANCE)
        np.testing.assert_allclose(found, X.T @ X / NOISE**2 / 4, rtol=1e-4)
        assert mean_gap(fitted) < 1e-4

    def test_a_mean_that_moves_by_the_old_information(self, monkeypatch):
        """003, (13) as printed."""
        monkeypatch.setattr(_stream, "_new_gradient", lambda gradient, spread, gain: gradient)
        fitted = alone(make_logistic(), LABELS, AutoMultivariateNormal, expectation="probit")
        assert np.abs(numbers(fitted.last).moments[0] - probit_steps(X, LABELS, 2.0)[0]).max() > 1e-2

    def test_mixing_exponents_that_do_not_sum_to_one(self, monkeypatch):
        """003, (11) has A_ij / n for A_ij."""
        right = _graph._apply
        monkeypatch.setattr(_graph, "_apply", lambda weights, values: right(weights / len(weights), values))
        assert mean_gap(fit(make_linear(), X, Y, EVEN, Conjugate(), consensus(batch_size=1), 3)) > 1e-2
