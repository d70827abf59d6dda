"""Schedules without a server: what a graph can be, what is said when it cannot, and what agents hold."""

import jax
import networkx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PRIOR, PVI, Partition
from numpyro_pvi.errors import PartitionError, PVIError
from numpyro_pvi.export import plot_agents
from numpyro_pvi.schedules import Decentralized, Synchronous
from numpyro_pvi.solvers import NaturalGradient
from tests.laws.models import NOISE, groups, make_linear, rows

X, Y, CLASSES = rows()
KEY = jax.random.key(0)


def made(schedule, model=None, solver=None):
    model = make_linear() if model is None else model
    return PVI(Partition(model, "data", groups(3)), AutoMultivariateNormal(model), solver=solver, schedule=schedule)


def scaled(X, y):
    """A prior outside the family."""
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.2 + s), obs=y)


class TestDecentralizedSettings:
    """What a graph can be, and what is said when it cannot."""

    @pytest.mark.parametrize(
        ("adjacency", "words"),
        [
            ([(0, 1), (2, 3)], "nothing that agent 2 sends reaches agent 0"),
            ([(0, 1), (1, 7)], "numbered from 0 here: for links between groups' labels pass nodes=pvi.groups"),
            (np.ones((2, 3)), "square matrix"),
            (-np.ones((3, 3)), "not negative"),
            ([("a", "b"), ("b", "c")], "pass nodes=pvi.groups"),
            ("ring", "got str"),
            ([], r"empty list.*np\.ones\(\(1, 1\)\) is one agent"),
        ],
    )
    def test_graphs_that_cannot_be(self, adjacency, words):
        with pytest.raises(PVIError, match=words):
            Decentralized(adjacency)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"mixing": "gradient"}, "mixing='gradient'"),
            ({"steps_per_round": 0}, "steps_per_round=0"),
            ({"damping": 0.0}, r"in \(0, 1\]; 1 is the full step"),
            ({"link_failure": 1.0}, "probability below 1"),
            ({"availability": (1.0, 1.0)}, "one for each of 3 agents"),
            ({"adjacency": np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1.0]]), "link_failure": 0.1}, "go both ways"),
            ({"nodes": ("a", "b", "c")}, "link .* names 0"),
        ],
    )
    def test_settings_that_cannot_be(self, settings, words):
        with pytest.raises(PVIError, match=words):
            Decentralized(**({"adjacency": [(0, 1), (1, 2)]} | settings))

    def test_links_between_names_matrices_and_networkx_are_one_graph(self):
        named = Decentralized([("a", "b"), ("b", "c")], nodes=("a", "b", "c"))
        matrix = Decentralized(np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0.0]]), nodes=("a", "b", "c"))
        drawn = Decentralized(networkx.Graph([("a", "b"), ("b", "c")]))
        assert named == matrix == drawn and hash(named) == hash(drawn)
        assert named.adjacency.nodes == ("a", "b", "c")

    def test_a_graph_of_another_size_than_the_groups(self):
        pvi = made(Decentralized([(0, 1), (1, 2), (2, 3), (3, 4)]))
        with pytest.raises(PVIError, match="5 agents, but the data has 3 groups"):
            pvi.init(jax.random.key(0), X, Y)

    def test_agents_need_a_schedule_without_a_server(self):
        pvi = made(Synchronous())
        state = pvi.init(jax.random.key(0), X, Y)
        with pytest.raises(PVIError, match="one q for all groups"):
            pvi.posterior(state, agent=0)


@pytest.fixture(scope="module")
def fits():
    """A model with a prior factor by a server, and by agents that come and go on a path."""
    # Fixed points, so that both fits have one limit.
    solver = NaturalGradient(expectation="sigma_points")
    central = made(Synchronous(), scaled, solver)
    network = made(Decentralized([(0, 1), (1, 2)], availability=(1.0, 0.7, 1.0)), scaled, solver)
    return central, network, *(p.run(KEY, 150, X, Y, progress_bar=False) for p in (central, network))


def test_a_prior_factor_is_refined_by_every_agent(fits):
    central, network, wanted, found = fits
    for agent in (None, 0, 1, 2):
        for name, q in network.posterior(found.state, agent=agent).items():
            best = central.posterior(wanted.state)[name]
            draws = [d.sample(KEY, (4000,)) for d in (q, best)]
            np.testing.assert_allclose(*(d.mean(0) for d in draws), atol=1e-3, err_msg=f"{name} of agent {agent}")
            np.testing.assert_allclose(*(d.std(0) for d in draws), rtol=1e-3)
    np.testing.assert_allclose(found.losses[-1], wanted.losses[-1], atol=1e-3)


def test_the_report_covers_every_factor(fits):
    _, network, _, found = fits
    assert found.trace.labels == (PRIOR, 0, 1, 2) and str(network.info(found.state))
    # An agent that is away takes no step, and is not taken for one that is stuck.
    steps = found.trace.step[:, 2]
    assert 0 < np.sum(steps == 0) < len(steps) and not found.trace.skipped.any()
    assert found.trace.consensus[-1] < 1e-2 < found.trace.consensus[0]
    # The network's mean of what agents hold is the network's q.
    held = network.info(found.state).agents
    assert list(held) == [0, 1, 2] and "x" not in held
    mean = np.mean([view.precision_mean for view in held.values()], axis=0)
    whole = found.state.prior + found.state.sites.prior + jax.tree.map(lambda x: x.sum(0), found.state.sites.groups)
    np.testing.assert_allclose(mean, whole.precision_mean, rtol=1e-3)
    # Both ends of each link that is up send one message a step.
    assert np.all(np.diff(found.trace.messages[:, 0]) % 2 == 0)
    assert found.trace.messages[-1, 0] < 150 * network.schedule.gossip.count * 4


def test_agents_that_are_all_away_half_of_the_time_move_half_of_the_time():
    """24 draws of 1/2: fewer than 4 or more than 20 have a probability below 3e-4."""
    steps = made(Decentralized([(0, 1), (1, 2)], availability=0.5)).run(KEY, 8, X, Y, progress_bar=False).trace.step
    assert 4 <= np.sum(steps == 0) <= 20


def test_arviz_has_every_agents_own_marginals(fits):
    central, network, wanted, found = fits
    agents = network.to_arviz(KEY, found, X, Y, num_samples=5)["agents"]
    for at, label in enumerate((0, 1, 2)):
        for name, q in network.posterior(found.state, agent=label).items():
            shown = np.asarray(agents[name])[at]
            np.testing.assert_allclose(shown, np.stack([q.mean, np.sqrt(q.variance)]), rtol=1e-6, err_msg=name)
    assert list(np.asarray(agents["moment"])) == ["mean", "sd"]
    assert "agents" not in list(central.to_arviz(KEY, wanted, X, Y, num_samples=5))


def test_an_unknown_agent(fits):
    _, network, _, found = fits
    with pytest.raises(PartitionError, match="'x'"):
        network.posterior(found.state, agent="x")


def test_tol_waits_for_consensus():
    pvi = made(Decentralized([(0, 1), (1, 2)], steps_per_round=1))
    result = pvi.run(KEY, 400, X, Y, tol=1e-3, progress_bar=False)
    assert result.converged and result.trace.consensus[-1] <= 1e-3
    still = result.trace.elbo[-1] - result.trace.elbo
    # The network's mean stood still long before its agents had heard of it.
    assert np.sum(still < 1e-4) > 1


CONSENSUS = {"adjacency": [(0, 1), (1, 2)], "mixing": "consensus"}


class TestConsensusSettings:
    """What rows as they come can be, and what is said when they cannot."""

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"mixing": "tracking", "batch_size": 2}, r"batch_size=2\) belongs to mixing='consensus'"),
            ({"damping": 0.5}, "what is left of one is lost"),
            ({"batch_size": 0}, "batch_size=0"),
            ({"exchanges_per_round": 1.5}, "exchanges_per_round=1.5"),
            ({"likelihood_weight": -1.0}, "likelihood_weight=-1.0"),
            ({"exhausted": "stop"}, "'gossip', 'again'"),
            ({"expectation": "mcmc"}, "'auto', 'quadrature', 'probit'"),
        ],
    )
    def test_settings_that_cannot_be(self, settings, words):
        with pytest.raises(PVIError, match=words):
            Decentralized(**(CONSENSUS | settings))

    @pytest.mark.parametrize(
        ("settings", "choices", "words"),
        [
            ({"expectation": "probit"}, {}, "not a Bernoulli with affine logits"),
            ({}, {"solver": NaturalGradient(num_steps=2)}, "one full natural-gradient step"),
            ({}, {"init_sites": "curvature"}, "count a second time"),
        ],
    )
    def test_fits_that_cannot_be(self, settings, choices, words):
        model, schedule = make_linear(), Decentralized(**(CONSENSUS | settings))
        pvi = PVI(Partition(model, "data", groups(3)), AutoMultivariateNormal(model), schedule=schedule, **choices)
        with pytest.raises(PVIError, match=words):
            pvi.init(KEY, X, Y)

    def test_priors_outside_the_family_are_refused(self):
        with pytest.raises(PVIError, match="outside the Gaussian family"):
            made(Decentralized(**CONSENSUS), scaled).init(KEY, X, Y)


@pytest.fixture(scope="module")
def stream():
    pvi = made(Decentralized(**CONSENSUS, batch_size=2))
    return pvi, pvi.run(KEY, 12, X, Y, progress_bar=False)


def test_agents_whose_rows_are_exhausted_only_gossip(stream):
    pvi, result = stream
    taken = np.asarray(result.state.schedule_state.taken)
    np.testing.assert_array_equal(taken, result.state.plan.partition.table.sizes)
    # The loss is minus DELBO on the rows of a round: 0 when there were none, and never that of all rows.
    assert np.all(result.losses[:2] != 0) and np.all(result.losses[-4:] == 0)
    assert np.isfinite(pvi.evaluate(result.state, X, Y))
    assert result.trace.step[-1].max() == 0 and not result.trace.skipped.any()
    assert result.trace.consensus[-1] < result.trace.consensus[2]


def test_gaps_are_shown_and_kept(stream):
    pvi, result = stream
    assert result.trace.gaps.shape == (12, 2) and result.trace.gaps[2, 0] > result.trace.gaps[-1, 0] >= -1e-4
    assert "gaps: consensus" in str(pvi.info(result.state))
    figure = plot_agents(pvi, result)
    assert len(figure.axes) == 2
    with pytest.raises(PVIError, match="latent='v'"):
        plot_agents(pvi, result, latent="v")


def test_new_rows_with_every_call():
    """Agents that begin again take whatever rows they are given as new."""
    pvi = made(Decentralized(**CONSENSUS, exhausted="again"))
    state = pvi.init(KEY, X, Y)
    for scale in (1.0, 2.0):
        state, _ = pvi.update(state, X * scale, Y)
    total = np.sum(np.asarray(state.sites.groups.precision), axis=0)
    np.testing.assert_allclose(total, 5 * X.T @ X / NOISE**2, rtol=1e-4)
