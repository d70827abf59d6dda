"""Clients at their own pace: nobody waits for the slowest, not even to begin with, and nothing is said of what was not seen."""

import contextlib

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import Exchange, InProcess
from numpyro_pvi.runtime import _answers
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, Synchronous, _asynchronous
from tests.client_model import logistic
from tests.laws.models import rows

X, _, Y = rows(12)
LABELS = np.array(["east", "north", "south"])[np.arange(12) % 3]
KEY = jax.random.key(0)
REAL = Asynchronous(delays="real")
EAST, SOUTH = 0, 2


class HeldBack:
    """A transport that keeps some clients' answers until it is told to let them go."""

    def __init__(self, inner):
        self.inner, self.held, self.kept = inner, (), []
        self.send, self.close = inner.send, inner.close

    def receive(self, wait):
        while (came := self.inner.receive(wait)) is not None:
            self.kept.append(came)
        for i, (place, _) in enumerate(self.kept):
            if place not in self.held:
                return self.kept.pop(i)
        return None

    @contextlib.contextmanager
    def holding(self, *places):
        """Let nothing of some clients through."""
        self.held = places
        yield
        self.held = ()


@pytest.fixture(scope="module")
def clients():
    """One set of clients, what may hold some of them back, and a fit: made once, and compiled once."""
    held = []
    runtime = InProcess(tries=10_000, through=lambda inner: held.append(HeldBack(inner)) or held[-1])
    pvi = make(runtime)
    fit(pvi, 1)
    yield pvi, held[-1]
    assert len(held) == 1


def make(runtime=None, schedule=REAL):
    partition, guide = Partition(logistic, "data", LABELS), AutoMultivariateNormal(logistic)
    return PVI(partition, guide, schedule=schedule, runtime=runtime, init_sites="prior")


def fit(pvi, num_steps=5000, **options):
    return pvi.run(KEY, num_steps, X, Y, progress_bar=False, **options)


def assert_same(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def assert_law(pvi, state):
    """Prior plus sites is the q that users read."""
    sites = [pvi.site(state, label) for label in state.groups]
    precision = np.eye(2) / 4 + sum(np.asarray(site.precision) for site in sites)
    factor = np.asarray(pvi.get_params(state)["auto_scale_tril"])
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(precision), rtol=1e-9, atol=1e-12)


@pytest.fixture
def plant(request):
    """Plant a fault in what is traced, and forget what was traced before and with it."""

    def put(monkeypatch, where, name, fault):
        monkeypatch.setattr(where, name, fault)
        jax.clear_caches()
        request.addfinalizer(jax.clear_caches)

    return put


@pytest.fixture(scope="module")
def limit():
    """Sites of one process where nothing moves any more, and the loss there."""
    found = fit(make(schedule=Sequential()), tol=1e-11)
    return jax.device_get(found.state.sites), float(found.losses[-1])


def assert_at_limit(pvi, result, limit):
    assert result.converged
    assert_law(pvi, result.state)
    assert_same(jax.device_get(result.state.sites), limit[0], 1e-8)
    np.testing.assert_allclose(result.losses[-1], limit[1], rtol=1e-9)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "what was not said counts as nought"])
def test_nobody_waits_for_the_slowest_to_begin_with(fault, clients, limit, monkeypatch):
    """The others are absorbed before it has said anything, and until then neither a loss nor convergence is claimed."""
    pvi, link = clients
    if fault:
        seen = Exchange.seen
        monkeypatch.setattr(Exchange, "seen", lambda self, shapes: (np.ones(3, bool), *seen(self, shapes)[1:]))
    before = pvi.runtime.traffic
    with link.holding(SOUTH):
        alone = fit(pvi, 60, tol=1e-3)
    after = pvi.runtime.traffic
    assert after.looks == before.looks and after.visits == before.visits + 3 * len(alone.losses)
    assert not np.any(pvi.site(alone.state, "south").precision) and np.any(pvi.site(alone.state, "north").precision)
    assert_law(pvi, alone.state)
    if fault:
        assert np.isfinite(alone.losses).all()
        return
    assert len(alone.losses) == 60 and not alone.converged
    assert np.isnan(alone.losses).all() and np.isinf(alone.trace.left).all()
    assert "not all has been told" in alone.message and "has not answered yet" in str(alone.info)
    assert_at_limit(pvi, fit(pvi, tol=1e-11, init_state=alone.state), limit)
    assert pvi.runtime.traffic.looks == before.looks


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "whoever is behind is left out"])
def test_nothing_converges_while_a_client_is_at_an_older_q(fault, clients, limit, plant, monkeypatch):
    """South has settled beside north, and is held back while east comes in: by all that it has said, it asks for nothing."""
    pvi, link = clients
    if fault:
        plant(monkeypatch, _asynchronous, "_furthest", lambda family, told, here: jax.numpy.zeros(()))
    with link.holding(EAST):
        state = fit(pvi, 60).state
    with link.holding(SOUTH):
        result = fit(pvi, 60, tol=1e-6, init_state=state)
    assert float(result.state.report.total_move) < 1e-6
    assert result.converged == fault
    if not fault:
        assert len(result.losses) == 60 and float(result.trace.left[-1]) > 0.1
        assert_at_limit(pvi, fit(pvi, tol=1e-11, init_state=result.state), limit)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "tickets are not looked at"])
def test_fits_that_take_turns_see_nothing_of_each_other(fault, clients, limit, monkeypatch):
    pvi, link = clients
    settled = fit(pvi, tol=1e-11)
    if fault:
        monkeypatch.setattr(Exchange, "_is_own", lambda self, place, ticket: True)
    one, other = settled.state, pvi.init(jax.random.key(1), X, Y)
    for _ in range(3):
        other, far = pvi.update(other, X, Y)
        one, loss = pvi.update(one, X, Y)
        if not fault:
            np.testing.assert_allclose(loss, limit[1], rtol=1e-9)
            assert_same(jax.device_get(one.sites), limit[0], 1e-8)
    assert far > limit[1]
    other, _ = pvi.update(other, X, Y)
    with link.holding(SOUTH):
        one, loss = pvi.update(one, X, Y)
    # What south has said was asked for by the other fit.
    assert bool(np.isnan(loss)) != fault
    if not fault:
        assert_at_limit(pvi, fit(pvi, tol=1e-11, init_state=one), limit)
        assert_at_limit(pvi, fit(pvi, tol=1e-11, init_state=other), limit)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "nothing is too old"])
def test_a_site_from_a_q_that_is_too_old_is_refused_by_name(fault, clients, limit, plant, monkeypatch, caplog):
    """Its visit was begun where no bound was; its group reads q anew."""
    pvi, link = clients
    with link.holding(SOUTH):
        state = fit(pvi, 10).state
    age, before = int(np.max(state.schedule_state.age)), pvi.runtime.traffic
    assert age == 30
    if fault:
        plant(monkeypatch, _asynchronous.Messages, "_young", lambda self, state: state.age >= 0)
    bounded = make(pvi.runtime, Asynchronous(delays="real", max_staleness=4))
    with caplog.at_level("WARNING", "numpyro_pvi"):
        result = fit(bounded, tol=1e-11, init_state=state)
    told = "the answer of client 'south' is refused: it is from a q older than max_staleness" in caplog.text
    assert told != fault and pvi.runtime.traffic.stale == before.stale + (not fault)
    worst = int(np.max(result.trace.staleness))
    assert worst >= age if fault else worst <= 4
    assert_at_limit(bounded, result, limit)


@pytest.mark.parametrize(
    "schedule", [REAL, Synchronous(), StochasticSubset(k=2)], ids=["real", "synchronous", "subset"]
)
def test_a_trace_counts_what_was_really_sent(schedule, clients):
    """Round by round: all of a run's traffic, and nothing of what is asked between rounds."""
    pvi, _ = clients
    pvi = make(pvi.runtime, schedule)
    state, before = pvi.init(KEY, X, Y), pvi.runtime.traffic
    result = fit(pvi, 4, init_state=state)
    after = pvi.runtime.traffic
    for name in ("trips", "sent", "received"):
        counted = getattr(result.trace, name)
        assert counted.shape == (4,) and counted.min() > 0
        assert counted.sum() == getattr(after, name) - getattr(before, name)
    if schedule is REAL:
        assert (result.trace.trips == 3).all()
    pvi.evaluate(result.state, X, Y)
    between = pvi.runtime.traffic
    assert between.trips > after.trips
    again = fit(pvi, 2, init_state=result.state).trace
    assert again.sent.sum() == pvi.runtime.traffic.sent - between.sent


def test_a_trace_without_clients_counts_nothing():
    trace = fit(make(schedule=Sequential()), 2).trace
    assert not np.any([trace.trips, trace.sent, trace.received])


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "it is forgotten"])
def test_a_round_that_is_thrown_away_is_counted_in_the_next(fault):
    exchange = Exchange(("east",), None, 1.0, 1)
    exchange._count(trips=1, sent=100, received=10)
    exchange.face(None)
    exchange._count(trips=2, sent=20, received=3)
    assert not np.any(exchange.spent(np.array(False))[0])
    if fault:
        exchange._owed = False
    exchange.face(None)
    exchange._count(trips=1, sent=2, received=2**40)
    assert exchange.spent(np.array(True))[0].tolist() == ([1, 2, 2**31 - 1] if fault else [3, 22, 2**31 - 1])
    exchange.face(None)
    exchange._count(trips=1)
    assert exchange.spent(np.array(True))[0].tolist() == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "clients keep to the rule that they are told"])
def test_clients_find_for_themselves_how_fine_a_quadrature_rule_is_to_be(fault, plant, monkeypatch):
    """From a prior that sees rows so widely that a first round is thrown away: it is counted, and asked for once more only."""
    if fault:
        plant(
            monkeypatch,
            _answers,
            "escalate",
            lambda evaluate, rule, rules: (*evaluate(rule.level)[:1], rule.level, 1.0),
        )
    wide = X * np.array([1.0, 30.0])
    runtime = InProcess(tries=100)
    pvi = make(runtime)
    result = pvi.run(KEY, 3 if fault else 200, wide, Y, progress_bar=False, tol=1e-11)
    assert result.state.plan.fine and result.trace.trips.tolist() == [6, *(3,) * (len(result.losses) - 1)]
    if fault:
        # No rule but the first is tried, and its errors are never small enough.
        assert int(result.state.rule.level) > 0
        return
    assert int(result.state.rule.level) == 0
    # And saying hello.
    assert runtime.traffic.trips == result.trace.trips.sum() + 1
    wanted = make(runtime, Synchronous()).run(KEY, 200, wide, Y, progress_bar=False, tol=1e-11)
    assert result.converged and wanted.converged
    assert_same(jax.device_get(result.state.sites), jax.device_get(wanted.state.sites), 1e-8)
