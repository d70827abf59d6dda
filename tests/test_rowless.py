"""A server that is given no row: clients describe their own, and the fit is that of one process."""

import dataclasses
import functools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, Partition, _opening
from numpyro_pvi.clients import Client, Exchange, InProcess, Processes
from numpyro_pvi.clients._holders import Holders
from numpyro_pvi.errors import ClientError, PVIError
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import Conjugate, LocalELBO, NaturalGradient, PowerEP
from tests.client_model import client_of, logistic
from tests.laws.models import rows

X, _, Y = rows(12)
LABELS = np.array(["east", "north", "south"])[np.arange(12) % 3]
KEY = jax.random.key(0)
ELBO = LocalELBO(Adam(0.01), num_steps=3, optimiser_state="keep")


def linear(X, y, noise):
    """Conjugate; the noise is no row."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, noise), obs=y)


class Unread:
    """An argument of which only shape and dtype may be known."""

    def __init__(self, array):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __array__(self, *args, **kwargs):
        raise AssertionError("the server has read a row")

    __jax_array__ = item = tolist = __float__ = __iter__ = __getitem__ = __array__


def clients_of(model, solver, *others, labels=LABELS, order=("south", "east", "north")):
    guide = AutoMultivariateNormal
    return [Client(model, guide(model), x, X[labels == x], Y[labels == x], *others, solver=solver) for x in order]


def server(model, runtime, solver=None, schedule=None):
    return PVI(model, AutoMultivariateNormal(model), solver=solver, schedule=schedule, runtime=runtime)


def assert_same(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


CELLS = {
    "conjugate-synchronous": (linear, Conjugate(), Synchronous()),
    "gradient-synchronous": (logistic, NaturalGradient(), Synchronous()),
    "elbo-sequential": (logistic, ELBO, Sequential()),
    "ep-synchronous": (logistic, PowerEP(), Synchronous()),
    "conjugate-sequential": (linear, Conjugate(), Sequential()),
    "gradient-sequential": (logistic, NaturalGradient(), Sequential()),
    "elbo-synchronous": (logistic, ELBO, Synchronous()),
    "ep-sequential": (logistic, PowerEP(), Sequential()),
}
LONG = list(CELLS)[4:]


def one_process(model, solver, schedule, *others):
    pvi = PVI(Partition(model, "data", LABELS), AutoMultivariateNormal(model), solver=solver, schedule=schedule)
    return pvi, pvi.run(KEY, 3, X, Y, *others, progress_bar=False)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CELLS])
def test_a_server_without_rows_fits_what_one_process_fits(name, tolerance):
    model, solver, schedule = CELLS[name]
    others = (0.5,) if model is linear else ()
    pvi, wanted = one_process(model, solver, schedule, *others)
    far = server(model, InProcess(clients=clients_of(model, solver, *others)), solver, schedule)
    found = far.run(KEY, 3, Unread(X), Unread(Y), *others, progress_bar=False)
    assert found.state.groups == wanted.state.groups == ("east", "north", "south")
    assert found.state.plan.partition.table.sizes == (4, 4, 4)
    assert_same(found.state.sites, wanted.state.sites, tolerance)
    assert_same(found.losses, wanted.losses, tolerance)
    here = pvi.log_evidence(wanted.state, X, Y, *others)
    there = far.log_evidence(found.state, Unread(X), Unread(Y), *others)
    assert_same(there, here, tolerance)


@pytest.fixture(scope="module")
def gradient():
    runtime = InProcess(clients=clients_of(logistic, None))
    return server(logistic, runtime), runtime


def test_a_server_that_reads_a_row_is_seen(gradient, monkeypatch):
    """The law has teeth: where arguments are taken for what they are, or what stands in for them is evaluated, it shows."""
    pvi, _ = gradient
    monkeypatch.setattr(Holders, "arguments", lambda self, args, kwargs, names: (args, kwargs))
    with pytest.raises(AssertionError, match="has read a row"):
        pvi.init(KEY, Unread(X), Unread(Y))
    monkeypatch.undo()
    (args, _) = Holders(pvi.runtime).arguments((Unread(X), Unread(Y)), {}, ())
    assert args[0].shape == X.shape and bool(np.isnan(np.asarray(args[0])).all())


def test_shapes_are_enough_and_need_not_be_given(gradient):
    pvi, _ = gradient
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (X, Y)]
    one, other = pvi.init(KEY, *shapes), pvi.init(KEY)
    assert_same(one.sites, other.sites, 0.0)
    with pytest.raises(PVIError, match=r"has the shape \(11, 2\), and all clients' rows together \(12, 2\)"):
        pvi.init(KEY, jax.ShapeDtypeStruct((11, 2), X.dtype), shapes[1])
    with pytest.raises(PVIError, match="positional and by keyword as they do, or nothing at all"):
        pvi.init(KEY, shapes[0])
    with pytest.raises(PVIError, match="under their own labels"):
        PVI(Partition(logistic, "data", LABELS), AutoMultivariateNormal(logistic), runtime=pvi.runtime).init(KEY)


def test_structure_that_is_not_proved_is_verified_at_the_clients_rows(monkeypatch):
    """What holds passes, and was asked for; what does not hold, and no question can be asked without, is named."""
    asked, look, found = [], Exchange.look, _opening.plan_factors

    def watched(self, how, *rest):
        asked.append(how["ask"])
        return look(self, how, *rest)

    def unproved(**taken):
        def plan(*args, **how):
            own = found(*args, **how)
            return dataclasses.replace(own, plan=dataclasses.replace(own.plan, proved=frozenset({"prior"}), **taken))

        monkeypatch.setattr(_opening, "plan_factors", plan)

    monkeypatch.setattr(Exchange, "look", watched)
    unproved()
    server(logistic, InProcess(clients=clients_of(logistic, None))).run(KEY, 1, progress_bar=False)
    assert asked.count("verify") == 1
    unproved(likelihood="quadratic", terms=())
    with pytest.raises(PVIError, match="'draws'"):
        server(logistic, InProcess(clients=clients_of(logistic, None))).run(KEY, 1, progress_bar=False)
    assert asked.count("verify") == 2


def test_what_reads_rows_is_refused_by_name(gradient):
    pvi, _ = gradient
    state = pvi.init(KEY)
    calls = {
        "khat": lambda: pvi.khat(state, rng_key=KEY),
        "to_arviz": lambda: pvi.to_arviz(KEY, state),
        "prequential": lambda: pvi.prequential(state, X, Y, rng_key=KEY),
        "add_group": lambda: pvi.add_group(state, "west", X, Y),
        "revisit": lambda: pvi.revisit(state, "east", X, Y),
    }
    for verb, call in calls.items():
        with pytest.raises(PVIError, match=f"{verb} reads rows, which are with the clients alone"):
            call()


def scaled(X, y):
    """A prior that depends on the rows."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0 + X.std()).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def whole(X, y):
    """No plate."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    numpyro.sample("obs", dist.Bernoulli(logits=X @ w).to_event(1), obs=y)


def test_clients_that_do_not_fit_are_refused_by_name():
    """Another solver, another noise, rows of other columns, a prior of the rows, two of one label, no rows to split."""
    apart = clients_of(logistic, NaturalGradient())
    apart[1] = Client(logistic, AutoMultivariateNormal(logistic), "east", X[:4], Y[:4], solver=PowerEP())
    with pytest.raises(ClientError, match="client 'north' says settings.*client 'east'"):
        server(logistic, InProcess(clients=apart)).init(KEY)
    with pytest.raises(ClientError, match="made with another solver than the server: NaturalGradient") as caught:
        server(logistic, InProcess(clients=clients_of(logistic, None)), PowerEP()).init(KEY)
    assert caught.value.label == "east"
    noisy = server(linear, InProcess(clients=clients_of(linear, None, 0.5)))
    with pytest.raises(PVIError, match="other values than with client 'east'"):
        noisy.init(KEY, Unread(X), Unread(Y), 0.7)
    with pytest.raises(PVIError, match="the server has to be given its values"):
        noisy.init(KEY)
    with pytest.raises(ClientError, match="has another prior than the server"):
        server(scaled, InProcess(clients=clients_of(scaled, None))).init(KEY)
    with pytest.raises(PVIError, match="two clients have the label 'north'"):
        InProcess(clients=clients_of(logistic, None, order=("north", "north")))
    with pytest.raises(PVIError, match="along one plate of the model"):
        Client(whole, AutoMultivariateNormal(whole), "north", X, Y)
    with pytest.raises(PVIError, match="load_rows, which loads them"):
        Client(logistic, AutoMultivariateNormal(logistic), "north", X, Y, load_rows=lambda: (X, Y))


def test_every_client_loads_its_rows_in_its_own_process(tolerance):
    """No row is in any message, nor in the process that fits q."""
    _, wanted = one_process(logistic, NaturalGradient(), Synchronous())
    runtime = Processes(clients={x: functools.partial(client_of, x) for x in ("south", "east", "north")})
    pvi = server(logistic, runtime)
    try:
        found = pvi.run(KEY, 3, progress_bar=False)
        assert_same(found.state.sites, wanted.state.sites, tolerance)
        assert len({child.pid for child in runtime._line.exchange.transport._children}) == 3
    finally:
        runtime.close()
