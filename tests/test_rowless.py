"""A server that is given no row: clients describe their own, and the fit is that of one process."""

import dataclasses
import functools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from numpyro.optim import Adam

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, Partition, _arriving_groups, _fits
from numpyro_pvi.clients import Client, Exchange, InProcess, Processes
from numpyro_pvi.clients._holders import Holders
from numpyro_pvi.errors import ClientError, PartitionError, PVIError, StateError
from numpyro_pvi.handlers import labels_table
from numpyro_pvi.schedules import Asynchronous, Committee, Sequential, StochasticSubset, Streaming, Synchronous
from numpyro_pvi.sites import Held
from numpyro_pvi.solvers import Conjugate, LocalELBO, NaturalGradient, PowerEP
from numpyro_pvi.wire import decode
from tests.client_model import client_of, logistic
from tests.laws.models import rows
from tests.test_clients import Weather

X, _, Y = rows(12)
LABELS = np.array(["east", "north", "south"])[np.arange(12) % 3]
KEY = jax.random.key(0)
ELBO = LocalELBO(Adam(0.01), num_steps=3, optimiser_state="keep")


def linear(X, y, noise):
    """Conjugate; the noise is no row."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, noise), obs=y)


def bent(X, y):
    """Neither quadratic nor seen through affine predictors: by sigma points, while draws agree with them."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(w[0] * w[1] * X[:, 0] + jax.numpy.abs(w[1]), 0.5), obs=y)


class Unread:
    """An argument of which only shape and dtype may be known."""

    def __init__(self, array):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __array__(self, *args, **kwargs):
        raise AssertionError("the server has read a row")

    __jax_array__ = item = tolist = __float__ = __iter__ = __getitem__ = __array__


def clients_of(model, solver, *others, guide=AutoMultivariateNormal, labels=LABELS, order=("south", "east", "north")):
    return [Client(model, guide(model), x, X[labels == x], Y[labels == x], *others, solver=solver) for x in order]


def server(model, runtime, solver=None, schedule=None, guide=AutoMultivariateNormal):
    return PVI(model, guide(model), solver=solver, schedule=schedule, runtime=runtime)


def assert_same(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


FULL, DIAGONAL, FIELD = AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal
DELAYED = Asynchronous(delays=("exponential", 1.0))
CELLS = {
    "conjugate-synchronous": (linear, Conjugate(), Synchronous(), FULL),
    "gradient-streaming-field": (logistic, NaturalGradient(), Streaming(), FIELD),
    "elbo-subset": (logistic, ELBO, StochasticSubset(k=2), FULL),
    "ep-synchronous-diagonal": (logistic, PowerEP(), Synchronous(), DIAGONAL),
    "points-synchronous": (bent, NaturalGradient(), Synchronous(), FULL),
    "points-sequential-field": (bent, NaturalGradient(), Sequential(), FIELD),
    "points-ep-synchronous": (bent, PowerEP(), Synchronous(), FULL),
    "points-elbo-synchronous": (bent, ELBO, Synchronous(), FULL),
    "gradient-synchronous": (logistic, NaturalGradient(), Synchronous(), FULL),
    "ep-synchronous": (logistic, PowerEP(), Synchronous(), FULL),
    "conjugate-sequential": (linear, Conjugate(), Sequential(), FULL),
    "gradient-sequential": (logistic, NaturalGradient(), Sequential(), FULL),
    "elbo-synchronous": (logistic, ELBO, Synchronous(), FULL),
    "elbo-sequential": (logistic, ELBO, Sequential(), FULL),
    "ep-sequential": (logistic, PowerEP(), Sequential(), FULL),
    "gradient-subset": (logistic, NaturalGradient(), StochasticSubset(k=2), FULL),
    "gradient-asynchronous": (logistic, NaturalGradient(), DELAYED, FULL),
    "elbo-asynchronous": (logistic, ELBO, DELAYED, FULL),
    "ep-asynchronous": (logistic, PowerEP(), DELAYED, FULL),
    "conjugate-streaming": (linear, Conjugate(), Streaming(), FULL),
    "gradient-committee": (logistic, NaturalGradient(), Committee(), FULL),
    "gradient-synchronous-diagonal": (logistic, NaturalGradient(), Synchronous(), DIAGONAL),
    "gradient-synchronous-field": (logistic, NaturalGradient(), Synchronous(), FIELD),
    "elbo-synchronous-diagonal": (logistic, ELBO, Synchronous(), DIAGONAL),
}
LONG = list(CELLS)[4:]
# Rows whose labels come in the order in which clients are given, and not in that of the alphabet.
CAME = np.argsort(np.array(["south", "east", "north"])[:, None] == LABELS, axis=1, kind="stable")[:, -4:].reshape(-1)


def one_process(model, solver, schedule, *others, guide=FULL, rounds=3):
    pvi = PVI(Partition(model, "data", LABELS[CAME]), guide(model), solver=solver, schedule=schedule)
    return pvi, pvi.run(KEY, rounds, X[CAME], Y[CAME], *others, progress_bar=False)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CELLS])
def test_a_server_without_rows_fits_what_one_process_fits(name, tolerance):
    model, solver, schedule, guide = CELLS[name]
    others = (0.5,) if model is linear else ()
    pvi, wanted = one_process(model, solver, schedule, *others, guide=guide)
    far = server(model, InProcess(clients=clients_of(model, solver, *others, guide=guide)), solver, schedule, guide)
    found = far.run(KEY, 3, Unread(X), Unread(Y), *others, progress_bar=False)
    assert found.state.groups == wanted.state.groups == ("east", "north", "south")
    assert found.state.plan.partition.table.sizes == (4, 4, 4)
    assert_same(found.state.sites, wanted.state.sites, tolerance)
    assert_same(found.losses, wanted.losses, tolerance)
    here = pvi.log_evidence(wanted.state, X[CAME], Y[CAME], *others)
    there = far.log_evidence(found.state, Unread(X), Unread(Y), *others)
    assert_same(there, here, tolerance)


def test_a_client_of_one_row_sees_what_the_others_see(tolerance):
    """Of a single row nobody sees whether others share its predictor: taken for another structure it turned all to sigma points."""
    labels = np.where(np.arange(12) == 5, "east", "north")
    clients = [Client(logistic, FULL(logistic), x, X[labels == x], Y[labels == x]) for x in ("east", "north")]
    run = PVI(logistic, FULL(logistic), runtime=InProcess(clients=clients)).run(KEY, 3, progress_bar=False)
    assert run.state.plan.partition.likelihood == "affine"
    here = PVI(Partition(logistic, "data", labels), FULL(logistic)).run(KEY, 3, X, Y, progress_bar=False)
    np.testing.assert_allclose(run.losses, here.losses, rtol=0, atol=tolerance)
    assert_same(run.params, here.params, tolerance)


@pytest.mark.filterwarnings("ignore:forget_group")
@pytest.mark.parametrize("guide", [FULL, AutoExponentialFamily], ids=["full", "family"])
def test_a_client_that_leaves_is_forgotten_and_the_others_go_on(guide, tolerance):
    """To the fit without it, from the sites that are left; and no run goes on before."""

    def model(X, y):
        linear(X, y, 0.5)

    def fit(labels):
        clients = [Client(model, guide(model), x, X[x == LABELS], Y[x == LABELS]) for x in labels]
        return PVI(model, guide(model), runtime=InProcess(clients=clients))

    three, two = fit(["east", "north", "south"]), fit(["south", "east"])
    without = three.forget_group(three.run(KEY, 4, progress_bar=False).state, "north")
    with pytest.raises(StateError, match="no group's rows are at hand"):
        two.run(KEY, 1, init_state=without, progress_bar=False)
    with pytest.raises(StateError, match="the clients are 'east', 'north', 'south', the state has 'east', 'south'"):
        three.revisit(without, ["east", "south"])
    back = two.revisit(without, ["east", "south"], num_steps=0)
    assert back.present == ("east", "south")
    q, wanted = (pvi.posterior(s)["w"] for pvi, s in ((two, back), (three, without)))
    assert_same((q.mean, q.variance), (wanted.mean, wanted.variance), 10 * tolerance)
    # A mean-field q of two correlated coordinates takes some rounds.
    rounds, near = (4, 10 * tolerance) if guide is FULL else (40, 1e-4)
    run = two.run(KEY, rounds, init_state=back, progress_bar=False)
    assert_same(run.params, two.run(KEY, rounds, progress_bar=False).params, near)


class Reborn:
    """A transport whose clients are begun anew, from their rows, before every so many questions."""

    def __init__(self, inner, make, every):
        self.inner, self.make, self.every, self.count, self.births = inner, make, every, 0, 0
        self.receive, self.close = inner.receive, inner.close

    def send(self, place, data):
        self.count += 1
        if self.count % self.every == 0:
            self.births += 1
            self.inner._respondents[place] = self.make()[place]
        self.inner.send(place, data)


def test_a_rowless_fit_goes_on_where_it_was_left_whatever_happens_to_its_clients(tmp_path, tolerance):
    """A fresh server goes on from a file with clients that lived on, and with new ones, over a link that loses and doubles."""
    solver, schedule = ELBO, StochasticSubset(k=2)
    _, wanted = one_process(logistic, solver, schedule)
    kept, path = [], tmp_path / "run"

    def fit(clients, rounds, through=None):
        runtime = InProcess(clients=clients, through=through, tries=400)
        return server(logistic, runtime, solver, schedule).run(KEY, rounds, checkpoint=path, progress_bar=False)

    def bad(inner):
        def make():
            return [clients[i] for i in (1, 2, 0)]

        clients = clients_of(logistic, solver)
        kept.append(Reborn(inner, make, 7))
        return Weather(kept[-1], 0.3)

    clients = clients_of(logistic, solver)
    fit(clients, 1)
    # A question that the last server has asked is not one of the next one's.
    fit(clients, 2)
    found = fit(clients_of(logistic, solver), 3, bad)
    assert found.message.startswith("ran 3 rounds") and "2 of them before" in found.message
    assert_same(found.state.sites, wanted.state.sites, tolerance)
    assert_same(found.losses, wanted.losses, tolerance)
    assert kept[0].births > 2


@pytest.fixture(scope="module")
def gradient():
    runtime = InProcess(clients=clients_of(logistic, None))
    return server(logistic, runtime), runtime


def test_a_server_that_reads_a_row_is_seen(gradient, monkeypatch):
    """The law has teeth: where arguments are taken for what they are, or what stands in for them is evaluated, it shows."""
    pvi, _ = gradient
    monkeypatch.setattr(Holders, "arguments", lambda self, pvi, args, kwargs, names: (args, kwargs))
    with pytest.raises(AssertionError, match="has read a row"):
        pvi.init(KEY, Unread(X), Unread(Y))
    monkeypatch.undo()
    (args, _) = Holders(pvi.runtime).arguments(pvi, (Unread(X), Unread(Y)), {}, ())
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
    """What holds passes, and was asked for; what does not hold is taken by draws from then on."""
    asked, look, found = [], Exchange.look, _fits.plan_factors

    def watched(self, how, *rest):
        asked.append(how["ask"])
        return look(self, how, *rest)

    def unproved(**taken):
        def plan(*args, **how):
            own = found(*args, **how)
            return dataclasses.replace(own, plan=dataclasses.replace(own.plan, proved=frozenset({"prior"}), **taken))

        monkeypatch.setattr(_fits, "plan_factors", plan)

    monkeypatch.setattr(Exchange, "look", watched)
    unproved()
    server(logistic, InProcess(clients=clients_of(logistic, None))).run(KEY, 1, progress_bar=False)
    assert asked.count("verify") == 1
    unproved(likelihood="quadratic", terms=())
    far = server(logistic, InProcess(clients=clients_of(logistic, None)))
    there = far.run(KEY, 1, progress_bar=False)
    assert asked.count("verify") == 2 and there.state.plan.partition.likelihood == "draws"
    assert "its likelihood was taken as quadratic" in str(there.info)


@pytest.mark.slow
def test_structure_that_is_given_up_is_given_up_as_in_one_process(monkeypatch, tolerance):
    """Rounds go on with the same q, by sigma points, and by draws once these contradict them."""
    found = _fits.plan_factors

    def plan(*args, **how):
        own = found(*args, **how)
        taken = {"proved": frozenset({"prior"}), "likelihood": "quadratic", "terms": ()}
        return dataclasses.replace(own, plan=dataclasses.replace(own.plan, **taken))

    monkeypatch.setattr(_fits, "plan_factors", plan)
    far = server(logistic, InProcess(clients=clients_of(logistic, None)))
    there, (pvi, here) = far.run(KEY, 1, progress_bar=False), one_process(logistic, None, None, rounds=1)
    assert there.state.plan.partition.likelihood == here.state.plan.partition.likelihood == "draws"
    (one, loss), (other, its) = far.update(there.state), pvi.update(here.state, X[CAME], Y[CAME])
    assert_same((one.sites, loss), (other.sites, its), tolerance)


def test_what_reads_rows_is_refused_by_name(gradient):
    pvi, _ = gradient
    state = pvi.init(KEY)
    calls = {
        "khat": lambda: pvi.khat(state, rng_key=KEY),
        "prequential": lambda: pvi.prequential(state, X, Y, rng_key=KEY),
    }
    for verb, call in calls.items():
        with pytest.raises(PVIError, match=f"{verb} reads rows, which are with the clients alone"):
            call()


def heavy(X, y):
    """A prior outside of the family, which has a site."""
    w = numpyro.sample("w", dist.Laplace(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


# Programs of the clients of the next tests.
KNOWN = {}


def known(clients, **how):
    """A server of clients whose programs are there."""
    runtime = InProcess(clients=clients, **how)
    for client in clients:
        client.compile_with(KNOWN)
    return server(clients[0]._pvi.model, runtime, NaturalGradient())


@pytest.fixture(scope="module", params=[logistic, pytest.param(heavy, marks=pytest.mark.slow)], ids=["exact", "prior"])
def judged(request):
    """A fit of one process, one of clients, and all bytes that are said; with a site of the prior's, and without."""
    model, said = request.param, []
    pvi, wanted = one_process(model, NaturalGradient(), Synchronous())
    far = known(clients_of(model, NaturalGradient()), through=lambda inner: Recorded(inner, said))
    return pvi, wanted, far, far.run(KEY, 3, progress_bar=False), said


class Recorded:
    """A transport that remembers what comes back."""

    def __init__(self, inner, said):
        self.inner, self.said, self.send, self.close = inner, said, inner.send, inner.close

    def receive(self, wait):
        came = self.inner.receive(wait)
        if came is not None:
            self.said.append(came[1])
        return came


def test_clients_judge_their_own_sites_and_tell_one_number(judged, monkeypatch):
    """k-hats are those of one process, at the same draws; planted: clients that judge another site."""
    pvi, wanted, far, found, said = judged
    how = {"rng_key": KEY, "by_group": True, "num_samples": 200}
    here, count = pvi.khat(wanted.state, X[CAME], Y[CAME], **how), len(said)
    there = far.khat(found.state, **how)
    first = [PRIOR] * (far.model is heavy)
    assert list(there) == list(here) == [*first, "east", "north", "south"]
    np.testing.assert_allclose(list(there.values()), list(here.values()), rtol=1e-6)
    answers = [decode(data).fields["found"] for data in said[count:]]
    assert [[x.size for x in found] for found in answers] == [[1]] * 3
    judge = Client._judge
    monkeypatch.setattr(Client, "_judge", lambda self, how, q, own: judge(self, how, q, tuple(0 * x for x in own)))
    assert all(abs(a - here[n]) > 1e-3 for n, a in far.khat(found.state, **how).items() if n is not PRIOR)
    with pytest.raises(ClientError, match="k-hat is of 100 to 1048576 draws, and 2000000 are asked for"):
        far.khat(found.state, **(how | {"num_samples": 2_000_000}))


def test_draws_of_what_all_share_are_exported(judged):
    """And each client's own log-likelihoods in its own process, which are those of its draws."""
    pytest.importorskip("arviz")
    _, _, far, _, _ = judged
    found = far.run(KEY, 3, progress_bar=False)
    shared = far.to_arviz(KEY, found, num_samples=500)
    assert list(shared["posterior"].data_vars) == ["w"] and "log_likelihood" not in shared and "rounds" in shared
    q = far.posterior(found.state)["w"]
    w = np.asarray(shared["posterior"]["w"])[0]
    assert np.max(np.abs(w.mean(0) - q.mean) / np.sqrt(np.asarray(q.variance) / 500)) < 5
    client = far.runtime.clients[0]
    mine, own = client.label == LABELS, client.to_arviz(KEY, num_samples=5)
    w, logs = np.asarray(own["posterior"]["w"])[0], np.asarray(own["log_likelihood"]["obs"])[0]
    np.testing.assert_allclose(logs, -np.logaddexp(0, -(2 * Y[mine] - 1) * (w @ X[mine].T)), rtol=1e-6)
    np.testing.assert_array_equal(own["observed_data"]["obs"], Y[mine])
    fresh = clients_of(logistic, NaturalGradient())[0]
    with pytest.raises(PVIError, match="has not been asked yet what it sees at a q"):
        fresh.to_arviz(KEY)


def test_a_clients_draws_have_latents_that_its_rows_do_not_see():
    """From q, as the others' rows have made it, at the state that was asked for last."""
    pytest.importorskip("arviz")
    Z = np.where((LABELS == "east")[:, None] & [False, True], 0.0, X)
    names = ("east", "north", "south")
    solver = NaturalGradient()
    clients = [Client(logistic, FULL(logistic), n, Z[n == LABELS], Y[n == LABELS], solver=solver) for n in names]
    far = known(clients)
    drawn = []
    for rounds in (3, 1):
        state = far.run(KEY, rounds, progress_bar=False).state
        far.evaluate(state)
        q, own = far.posterior(state)["w"], clients[0].to_arviz(KEY, num_samples=800)
        w, logs = np.asarray(own["posterior"]["w"])[0], np.asarray(own["log_likelihood"]["obs"])[0]
        gap = np.abs(w.mean(0) - q.mean) / np.sqrt(np.asarray(q.variance) / 800)
        assert gap.max() < 5 and np.abs(w.var(0) / np.asarray(q.variance) - 1).max() < 0.3
        signs = 2 * Y[LABELS == "east"] - 1
        np.testing.assert_allclose(logs, -np.logaddexp(0, -signs * (w @ Z[LABELS == "east"].T)), rtol=1e-6)
        drawn.append(w)
    # The same noise, at another q.
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-2
    with pytest.raises(PVIError, match="num_samples=0.*at least one draw"):
        clients[0].to_arviz(KEY, num_samples=0)


def with_partition(state, **fields):
    part = dataclasses.replace(state.plan.partition, **fields)
    return dataclasses.replace(state, plan=dataclasses.replace(state.plan, partition=part))


def other_latents(state):
    layout = state.plan.partition.layout
    return with_partition(state, layout=dataclasses.replace(layout, names=("v",)))


def other_rows(state):
    return with_partition(state, table=labels_table(["east"] * 3 + ["south"] * 4))


def other_structure(state):
    return dataclasses.replace(state, sites=dataclasses.replace(state.sites, prior=state.prior))


def other_holders(state):
    local = Held(jax.numpy.zeros((2, 2), jax.numpy.int32), None)
    return dataclasses.replace(state, sites=dataclasses.replace(state.sites, local=local))


OTHERS = {
    other_latents: "has the latents v .2,., and the clients w .2,.: they are of another model",
    other_rows: r"client.s. 'east' have other numbers of rows than when the state was made",
    other_structure: "structure is agreed on anew, and is not what the state has",
    other_holders: "the state was made with another runtime. Fit all clients",
}


@pytest.fixture(scope="module")
def joining():
    """A state of two clients, and a fresh one of three."""
    clients = {c.label: c for c in clients_of(logistic, NaturalGradient())}
    more = known(list(clients.values()))
    return more, more.init(KEY), known([clients["east"], clients["south"]]).init(KEY)


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_a_state_that_a_client_is_to_join_is_compared(other, joining, monkeypatch):
    """By all that it would be mixed with; planted: a comparison that is left out, where it goes on with what is not its own."""
    more, fresh, state = joining

    def join(state):
        return _arriving_groups.Newcomers(more).join(fresh, state, "north", ([], ()), 0, None)

    assert join(state).groups == ("east", "north", "south")
    with pytest.raises(StateError, match=OTHERS[other]):
        join(other(state))
    kept = tuple(x for x in _arriving_groups._COMPARED if x.__name__ != f"_{other.__name__}")
    assert len(kept) == len(_arriving_groups._COMPARED) - 1 == len(OTHERS) - 1
    monkeypatch.setattr(_arriving_groups, "_COMPARED", kept)
    assert join(other(state)).groups == ("east", "north", "south")


@pytest.mark.slow
def test_a_client_that_joins_is_fitted_beside_the_others(monkeypatch):
    """Others' sites are what they were, to the bit, until rounds go on; the limit is that of all from the beginning."""
    east, north, south = sorted(clients_of(logistic, NaturalGradient()), key=lambda c: c.label)
    few, more = known([east, south]), known([east, north, south])
    state = few.run(KEY, 3, progress_bar=False).state
    joined = more.add_group(state, "north", num_steps=0)
    assert joined.groups == more.groups == ("east", "north", "south")

    def sites(state, *places):
        return jax.tree.map(lambda x: np.asarray(x)[list(places)], state.sites.groups)

    assert_same(sites(joined, 0, 2), sites(state, 0, 1), 0.0)
    assert not any(np.any(x) for x in jax.tree.leaves(sites(joined, 1)))
    assert_same(more.posterior(joined)["w"].mean, few.posterior(state)["w"].mean, 1e-12)
    limit = more.run(KEY, 60, tol=1e-9, progress_bar=False).state
    found = more.add_group(state, "north", num_steps=60, tol=1e-9)
    assert_same(sites(found, 0, 1, 2), sites(limit, 0, 1, 2), 1e-6)
    with pytest.raises(StateError, match=r"the clients are 'east', 'north', 'south', and the state has 'east'"):
        more.add_group(state, "west")
    with pytest.raises(PartitionError, match="there is a group 'east' already"):
        more.add_group(state, "east")
    with monkeypatch.context() as patch:
        patch.setattr(_arriving_groups, "_with_client", lambda fresh, state, curved: fresh)
        assert np.any(
            np.asarray(sites(more.add_group(state, "north", num_steps=0), 0).precision) != sites(state, 0).precision
        )


def test_a_state_goes_on_with_the_clients_that_it_was_made_with(gradient, tmp_path):
    """Others are refused by name: of another solver, under another label, with other rows; also where a file is read."""
    pvi, _ = gradient
    pvi.save(tmp_path / "fit", pvi.init(KEY))
    labels = np.where(LABELS == "north", "west", LABELS)
    fewer = np.array(["east", "north", "south"])[[0] * 3 + [1] * 5 + [2] * 4]

    def go_on(*clients):
        far = server(logistic, InProcess(clients=clients))
        state = far.load(tmp_path / "fit")
        return far.update(state)

    guide, loss = FULL(logistic), Trace_ELBO(num_particles=64)
    counted = [
        Client(logistic, guide, x, X[x == LABELS], Y[x == LABELS], loss=loss) for x in ("east", "north", "south")
    ]
    with pytest.raises(ClientError, match="made with another num_particles than the server: 64, here 1"):
        server(logistic, InProcess(clients=counted)).init(KEY)
    with pytest.raises(ClientError, match="made with another solver than the server: PowerEP"):
        go_on(*clients_of(logistic, PowerEP()))
    with pytest.raises(StateError, match="state has group.s. 'north' and there are clients 'west'"):
        go_on(*clients_of(logistic, None, labels=labels, order=("west", "east", "south")))
    with pytest.raises(StateError, match="client 'east' had 4 and now has 3"):
        go_on(*clients_of(logistic, None, labels=fewer))


@pytest.mark.slow
def test_rows_that_are_dealt_out_are_streamed_in_their_order(tolerance):
    solver, schedule = NaturalGradient(), Streaming()
    _, wanted = one_process(logistic, solver, schedule, rounds=1)
    partition = Partition(logistic, "data", LABELS[CAME])
    far = PVI(partition, FULL(logistic), solver=solver, schedule=schedule, runtime=InProcess())
    found = far.run(KEY, 1, X[CAME], Y[CAME], progress_bar=False)
    assert_same(found.state.sites, wanted.state.sites, tolerance)


@pytest.mark.slow
def test_an_order_that_is_not_that_of_the_clients_is_seen(monkeypatch):
    """The law has teeth: where clients are streamed by their labels, and not as they came, sites come out others."""
    solver, schedule = NaturalGradient(), Streaming()
    _, wanted = one_process(logistic, solver, schedule, rounds=1)
    monkeypatch.setattr(InProcess, "came", (0, 1, 2))
    far = server(logistic, InProcess(clients=clients_of(logistic, solver)), solver, schedule)
    with pytest.raises(AssertionError):
        assert_same(far.run(KEY, 1, progress_bar=False).state.sites, wanted.state.sites, 1e-6)


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
    apart[1] = Client(logistic, AutoMultivariateNormal(logistic), "east", X[:4], Y[:4] + 0.5)
    with pytest.raises(
        ClientError, match=r"client 'north' says argument 1 = 'int.. per row \(\)', and client 'east' 'float"
    ):
        server(logistic, InProcess(clients=apart)).init(KEY)
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
    with pytest.raises(PVIError, match="expected a function that makes the client"):
        Processes(clients={"north": Client(logistic, AutoMultivariateNormal(logistic), "north", X, Y)})
    with pytest.raises(PVIError, match=r"clients=list\): expected a dict"):
        Processes(clients=[])
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
