"""Clients under families: a question to each in every turn over components, and the trajectory of one process."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.optim import Adam

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi.clients import InProcess, Processes
from numpyro_pvi.runtime import RowLatent, _remote, _remote_engine
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
    Conjugate,
    DifferentialPrivacy,
    LocalELBO,
    NaturalGradient,
    PowerEP,
    StochasticEP,
    StochasticNaturalGradient,
)
from tests.client_model import family_client_of, line
from tests.laws import models

KEY = jax.random.key(0)
RNG = np.random.default_rng(7)
X = RNG.normal(size=12)
Y = 1.5 * X + 0.5 * RNG.normal(size=12)
COUNTS = RNG.poisson(3.0, 12)
LABELS = np.array(["b"] * 3 + ["a"] * 4 + ["c"] * 5)
TOLERANCE = 1e-10 if jnp.result_type(float).name == "float64" else 2e-4


def counts(y, scale):
    """Gamma-Poisson, and Beta-Bernoulli beside it; the scale is no row."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, scale))
    share = numpyro.sample("share", dist.Beta(1.0, 3.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)
        numpyro.sample("large", dist.Bernoulli(share), obs=(y > 3).astype(int))


def plane(x, y):
    """A joint block of two, whose precision is a matrix, under a prior of its scale that is a factor."""
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), scale * jnp.eye(2)))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, 0.5), obs=y)


def drawn(x, y):
    """A gamma shape that moves with the rate: one term sees both, of which there is no closed form, and both are drawn."""
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape + 0.1 * rate, rate), obs=jnp.abs(y) + 0.1)


def odds(x, y):
    """Seen through one predictor, by quadrature."""
    w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), 4 * jnp.eye(2)))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * x), obs=(y > 0).astype(int))


def ridge(x, y):
    """With a param that the server's optimiser moves."""
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * x, noise), obs=y)


ROWS = {counts: (COUNTS, 0.5)}
ELBO = LocalELBO(num_steps=3)
CELLS = {
    "conjugate-synchronous": (counts, Conjugate(), Synchronous()),
    "line-sequential": (line, NaturalGradient(), Sequential()),
    "drawn-synchronous": (drawn, NaturalGradient(expectation="monte_carlo", num_draws=4), Synchronous()),
    "ep-synchronous": (line, PowerEP(0.5), Synchronous()),
    "line-subset": (line, NaturalGradient(), StochasticSubset(k=2)),
    "conjugate-sequential": (counts, Conjugate(), Sequential("random", damping=0.5)),
    "line-synchronous": (line, NaturalGradient(), Synchronous()),
    "line-steps": (line, NaturalGradient(num_steps=3, step_size=0.5), Synchronous(damping=0.5)),
    "plane-synchronous": (plane, NaturalGradient(), Synchronous()),
    "plane-sequential": (plane, NaturalGradient(), Sequential()),
    "drawn-sequential": (drawn, NaturalGradient(expectation="monte_carlo", num_draws=4), Sequential()),
    "drawn-subset": (drawn, NaturalGradient(expectation="monte_carlo", num_draws=4), StochasticSubset(rates=0.7)),
    "odds-synchronous": (odds, NaturalGradient(), Synchronous()),
    "ep-sequential": (line, PowerEP(), Sequential()),
    "ep-subset": (counts, PowerEP(), StochasticSubset(k=2)),
    "ep-drawn-synchronous": (drawn, PowerEP(moments="importance"), Synchronous()),
    "ep-drawn-sequential": (drawn, PowerEP(moments="importance"), Sequential()),
    "line-asynchronous": (line, NaturalGradient(), Asynchronous(delays={"a": 1.0, "b": 2.5, "c": 1.0})),
    "line-streaming": (line, NaturalGradient(), Streaming()),
    "line-committee": (line, NaturalGradient(), Committee()),
    "elbo-synchronous": (line, ELBO, Synchronous()),
    "elbo-asynchronous": (line, ELBO, Asynchronous(delays={"a": 1.0, "b": 2.5, "c": 1.0})),
}
CELLS |= {
    "params-synchronous": (ridge, NaturalGradient(), Synchronous()),
    "params-sequential": (ridge, NaturalGradient(), Sequential()),
}
if importlib.util.find_spec("dp_accounting"):
    CELLS["private-synchronous"] = line, DifferentialPrivacy(ELBO, 1.0, 1.0), Synchronous(damping=0.5)
QUICK = ["line-sequential", "drawn-synchronous"]
names = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CELLS]


def made(name, runtime=None, model=None, **options):
    own, solver, schedule = CELLS[name]
    model = own if model is None else model
    split = Partition(model, "data", LABELS)
    options |= {"optim": Adam(0.1)} if model is ridge else {}
    return PVI(split, AutoExponentialFamily(model), solver=solver, schedule=schedule, runtime=runtime, **options)


def fit(pvi, name, rounds=3):
    return pvi.run(KEY, rounds, *ROWS.get(CELLS[name][0], (X, Y)), progress_bar=False)


@functools.cache
def here(name):
    return fit(made(name), name)


@functools.cache
def there(name):
    pvi = made(name, InProcess())
    return pvi, fit(pvi, name)


def assert_same(found, wanted, tolerance=TOLERANCE):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


def assert_same_fit(found, wanted):
    assert_same(found.state.sites, wanted.state.sites)
    assert_same(found.losses, wanted.losses)
    assert_same(found.params, wanted.params)
    report, other = found.state.report, wanted.state.report
    assert_same((report.move, report.total_move), (other.move, other.total_move), 1e3 * TOLERANCE)


@pytest.mark.parametrize("name", names)
def test_trajectories_are_those_of_one_process(name):
    assert_same_fit(there(name)[1], here(name))


@pytest.mark.parametrize("name", names)
def test_prior_and_sites_make_q(name):
    """Law 1, of what a user sees."""
    pvi, result = there(name)
    labels = [*pvi.groups, *([PRIOR] if result.state.sites.prior is not None else [])]
    sites = [pvi.site(result.state, label).natural for label in labels]
    total = functools.reduce(lambda p, site: p + site, sites, result.state.prior)
    for part, family in result.state.plan.family.components:
        own = family.from_distribution(pvi.posterior(result.state)[part])
        assert_same(own, total.parts[part], 100 * TOLERANCE)


@pytest.mark.parametrize(
    ("name", "trips"),
    [
        ("line-sequential", 3 * 2 + 1),
        pytest.param("conjugate-synchronous", 3, marks=pytest.mark.slow),
        pytest.param("ep-synchronous", 2, marks=pytest.mark.slow),
    ],
)
def test_what_was_really_sent_is_told(name, trips):
    """A question to all in every turn, and one for every test of where they lead; to one alone in a sweep of single groups."""
    pvi, result = there(name)
    trace, traffic = result.trace, pvi.runtime.traffic
    assert trace.trips.tolist()[1:] == [trips] * 2
    # And a look at the start; before that every client says hello.
    assert trace.trips[0] == trips + 1 and traffic.trips == trace.trips.sum() + 1
    assert (trace.sent > 0).all() and (trace.received > 0).all() and trace.sent.sum() < traffic.sent
    assert (traffic.visits == 0) == (name != "ep-synchronous")
    assert f"clients: {traffic.trips} round trips so far" in str(result.info)


@pytest.mark.once
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dealt out", "its own"])
def test_so_it_is_in_processes_of_their_own(own):
    """Over pipes, with rows that are dealt out or that each process makes itself, which the server is not given."""
    names = ("east", "north", "south") if own else ("east", "north")
    X, _, y = models.rows(12)
    labels = np.array(names)[np.arange(12) % len(names)]
    how = {"solver": NaturalGradient(), "schedule": Sequential()}
    split = Partition(line, "data", labels)
    wanted = PVI(split, AutoExponentialFamily(line), **how).run(KEY, 3, X[:, 0], y, progress_bar=False)
    makers = {n: functools.partial(family_client_of, n, NaturalGradient()) for n in names} if own else {}
    runtime = Processes(clients=makers)
    pvi = PVI(line if own else split, AutoExponentialFamily(line), runtime=runtime, **how)
    try:
        found = pvi.run(KEY, 3, *(() if own else (X[:, 0], y)), progress_bar=False)
        assert len({child.pid for child in runtime._line.exchange.transport._children}) == len(names)
    finally:
        runtime.close()
    assert_same_fit(found, wanted)


# --------------------------------------------------------------------------------------------------------------- faults


def dropped(monkeypatch):
    own = _remote.AskedProduct._answers

    def without_one(self, *args):
        return tuple(x.at[-1].set(0) if x.shape[0] == 3 else x for x in own(self, *args))

    monkeypatch.setattr(_remote.AskedProduct, "_answers", without_one)


def stale(monkeypatch):
    own = _remote.AskedProduct._question

    def as_it_was(self, what, q, key, sites):
        return own(self, what, q, key, None if sites is None else jax.tree.map(jnp.zeros_like, sites))

    monkeypatch.setattr(_remote.AskedProduct, "_question", as_it_was)


def turned(monkeypatch):
    own = _remote.AskedProduct.only
    monkeypatch.setattr(
        _remote.AskedProduct,
        "only",
        lambda self, change, turn: own(self, change, (turn + 1) % 2),
        raising=False,
    )


def misplaced(monkeypatch):
    own = _remote.AskedProduct.group_value_and_message
    monkeypatch.setattr(
        _remote.AskedProduct, "group_value_and_message", lambda self, q, s, g, k: own(self, q, s, 0 * g, k)
    )


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("line-sequential", turned),
        ("drawn-synchronous", stale),
        pytest.param("conjugate-synchronous", dropped, marks=pytest.mark.slow),
        pytest.param("line-sequential", misplaced, marks=pytest.mark.slow),
        pytest.param("line-subset", dropped, marks=pytest.mark.slow),
    ],
)
def test_faults_are_noticed(name, fault, monkeypatch):
    wanted = here(name)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same_fit(fit(made(name, InProcess()), name), wanted)


# ----------------------------------------------------------------------------------------------------- what does not go


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (
            {"schedule": Decentralized([("a", "b"), ("b", "c")], nodes=["a", "b", "c"])},
            "Decentralized: its groups talk with each other",
        ),
        ({"solver": StochasticNaturalGradient(batch_size=2)}, "groups take every step together"),
        ({"solver": PowerEP(factors="row")}, r"sites of single rows \(PowerEP"),
        ({"solver": StochasticEP()}, "every client has a site of its own"),
    ],
)
def test_what_does_not_go_is_refused_by_name(options, word):
    plan = dataclasses.replace(here("line-sequential").state.plan, tied=isinstance(options.get("solver"), StochasticEP))
    pvi = PVI(Partition(line, "data", LABELS), AutoExponentialFamily(line), runtime=InProcess(), **options)
    with pytest.raises(PVIError, match=f"clients do not go with .*{word}"):
        _remote_engine.refuse_remotely(plan, pvi._engine)


def test_rows_latents_are_refused_by_name():
    inside = RowLatent("b", 0, None, "data")
    plan = dataclasses.replace(here("line-sequential").state.plan, inside=(inside,))
    with pytest.raises(PVIError, match=r"latents inside the partitioned plate \(b\).*a server would hold"):
        _remote_engine.refuse_remotely(plan, there("line-sequential")[0]._engine)
