"""What clients keep to themselves, and what they are asked of it: latents of a group's own, and slopes by the model's params."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from numpyro.optim import Adam, Minimize
from scipy.special import gammaln

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, _fits
from numpyro_pvi.clients import Client, InMemorySums, InProcess, Processes, Summand, SummedClients
from numpyro_pvi.clients._kept import Kept
from numpyro_pvi.errors import ClientError, PVIError, StateError
from numpyro_pvi.runtime import Answers
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, Streaming, Synchronous
from numpyro_pvi.solvers import LocalELBO, NaturalGradient, PowerEP, StochasticNaturalGradient
from numpyro_pvi.wire import decode
from tests.client_model import both
from tests.laws.test_restored import Mortal
from tests.test_rowless import Unread, assert_same

KEY = jax.random.key(0)
RNG = np.random.default_rng(5)
N, NAMES = 12, ("east", "north", "south")
# Rows in the order of their clients, in which a server without rows counts them.
LABELS = np.repeat(NAMES, (5, 4, 3))
X = RNG.normal(size=(N, 2))
COUNTS = RNG.poisson(np.exp(0.4 + 0.5 * RNG.normal(size=N)))
OUTCOMES = (RNG.random(N) < 0.5).astype(int)
FULL, DIAGONAL, FIELD = AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal
GRADIENT, EP, ELBO = NaturalGradient(), PowerEP(), LocalELBO(Adam(0.01), num_steps=3, optimiser_state="keep")
STEPS = StochasticNaturalGradient(step_size=0.3, num_steps=3, batch_size=2)
PARALLEL, CYCLIC, FEW = Synchronous(), Sequential(), StochasticSubset(k=2)


def effects(X, y):
    """A latent of every row's own; neither Gaussian nor seen through one predictor."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.3 * w[0], 0.5))
        numpyro.sample("obs", dist.Poisson(jnp.exp(0.5 * (X @ w) + u)), obs=y)


def shifted(X, y):
    """Params of the likelihood and of the prior."""
    shift = numpyro.param("shift", jnp.array(0.3))
    scale = numpyro.param("scale", jnp.array(1.5), constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w + shift), obs=y)


DATA = {effects: COUNTS, shifted: OUTCOMES, both: COUNTS}
# Model, solver, schedule, guide, optimiser of params.
CELLS = {
    "own-gradient-parallel": (effects, GRADIENT, PARALLEL, FULL, None),
    "own-gradient-cyclic": (effects, GRADIENT, CYCLIC, FULL, None),
    "own-gradient-few": (effects, GRADIENT, FEW, FULL, None),
    "own-gradient-parallel-field": (effects, GRADIENT, PARALLEL, FIELD, None),
    "own-gradient-cyclic-diagonal": (effects, GRADIENT, CYCLIC, DIAGONAL, None),
    "own-elbo-parallel": (effects, ELBO, PARALLEL, FULL, None),
    "own-steps-few-field": (effects, STEPS, FEW, FIELD, None),
    "own-steps-cyclic": (effects, STEPS, CYCLIC, FULL, None),
    "own-ep-parallel": (effects, EP, PARALLEL, FULL, None),
    "own-ep-cyclic": (effects, EP, CYCLIC, FULL, None),
    "own-ep-few": (effects, EP, FEW, FULL, None),
    "own-ep-few-field": (effects, EP, FEW, FIELD, None),
    "params-gradient-parallel": (shifted, GRADIENT, PARALLEL, FULL, lambda: Adam(0.05)),
    "params-gradient-cyclic": (shifted, GRADIENT, CYCLIC, FULL, lambda: Adam(0.05)),
    "params-gradient-few": (shifted, GRADIENT, FEW, FIELD, lambda: Adam(0.05)),
    "params-gradient-searching": (shifted, GRADIENT, PARALLEL, FULL, Minimize),
    "params-elbo-parallel": (shifted, ELBO, PARALLEL, FULL, lambda: Adam(0.05)),
    "params-elbo-cyclic": (shifted, ELBO, CYCLIC, FULL, lambda: Adam(0.05)),
    "params-elbo-few": (shifted, ELBO, FEW, FULL, lambda: Adam(0.05)),
    "params-ep-parallel": (shifted, EP, PARALLEL, FULL, lambda: Adam(0.05)),
    "both-gradient-parallel": (both, GRADIENT, PARALLEL, FULL, lambda: Adam(0.05)),
    "both-ep-cyclic": (both, EP, CYCLIC, FULL, lambda: Adam(0.05)),
}
# The one that every day tests: a param, and latents of rows' own.
QUICK = "both-gradient-parallel"


class Recorded:
    """A transport that remembers all bytes of both directions."""

    def __init__(self, inner, said):
        self.inner, self.said, self.close = inner, said, inner.close

    def send(self, place, data):
        self.said.append(data)
        self.inner.send(place, data)

    def receive(self, wait):
        came = self.inner.receive(wait)
        if came is not None:
            self.said.append(came[1])
        return came


@pytest.fixture
def same_start(monkeypatch):
    """Own latents start from draws of their prior, which are others where rows are counted otherwise; here from one place."""
    monkeypatch.setattr(_fits, "plan_factors", from_one_place)


FOUND = _fits.plan_factors


def from_one_place(*args, **how):
    planned = FOUND(*args, **how)
    if planned.local_loc is None:
        return planned
    here = np.full_like(planned.local_loc, 0.1), np.full_like(planned.local_sd, 0.5)
    return dataclasses.replace(planned, local_loc=here[0], local_sd=here[1])


def here(name, runtime=None):
    model, solver, schedule, guide, optim = CELLS[name]
    given = guide(model), None if optim is None else optim()
    return PVI(Partition(model, "data", LABELS), *given, solver=solver, schedule=schedule, runtime=runtime)


def client_of(name, label):
    model, solver, _, guide, _ = CELLS[name]
    mine = label == LABELS
    return Client(model, guide(model), label, X[mine], DATA[model][mine], solver=solver)


def elsewhere(name, **how):
    """A server that never has a row, and its clients."""
    model, solver, schedule, guide, optim = CELLS[name]
    runtime = InProcess(clients=[client_of(name, x) for x in ("south", "east", "north")], **how)
    given = guide(model), None if optim is None else optim()
    return PVI(model, *given, solver=solver, schedule=schedule, runtime=runtime)


def rows_of(name):
    return X, DATA[CELLS[name][0]]


def numbers(result):
    q = result.state.prior + jax.tree.map(lambda x: jnp.sum(x, axis=0), result.state.sites.groups)
    params = {n: x for n, x in result.params.items() if "auto" not in n}
    return jax.device_get((result.state.sites.groups, q, params, result.losses, result.state.report.total_move))


@pytest.fixture(scope="module")
def fits():
    """By cell: the fit of one process, and that of a server without rows, with the bytes that were said in it."""
    made = {}

    def of(name):
        if name not in made:
            before, _fits.plan_factors = _fits.plan_factors, from_one_place
            try:
                wanted = here(name).run(KEY, 3, *rows_of(name), progress_bar=False)
                said = []
                far = elsewhere(name, through=lambda inner: Recorded(inner, said))
                found = far.run(KEY, 3, *map(Unread, rows_of(name)), progress_bar=False)
            finally:
                _fits.plan_factors = before
            made[name] = wanted, found, far, said
        return made[name]

    return of


@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CELLS])
def test_a_server_without_rows_fits_what_one_process_fits(name, fits, tolerance):
    """Sites, q, params, losses and moves; arguments that raise where one is read."""
    wanted, found, *_ = fits(name)
    assert_same(numbers(found), numbers(wanted), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["own-gradient-cyclic", "own-ep-parallel", "params-gradient-parallel", "both-gradient-parallel"]
)
def test_rows_that_are_dealt_out_make_no_difference(name, tolerance):
    wanted = here(name).run(KEY, 3, *rows_of(name), progress_bar=False)
    found = here(name, InProcess()).run(KEY, 3, *rows_of(name), progress_bar=False)
    assert_same(numbers(found), numbers(wanted), tolerance)


@pytest.mark.slow
@pytest.mark.once
def test_so_it_is_in_processes_of_their_own(fits, same_start, tolerance):
    """Latents of rows' own and params, over pipes."""
    wanted, *_ = fits(QUICK)
    runtime = Processes()
    try:
        found = here(QUICK, runtime).run(KEY, 3, *rows_of(QUICK), progress_bar=False)
    finally:
        runtime.close()
    assert_same(numbers(found), numbers(wanted), tolerance)


@pytest.mark.slow
@pytest.mark.once
def test_so_it_is_at_flowers_nodes(fits, same_start, tolerance):
    """The same at nodes whose state is bytes between two questions."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'numpyro_pvi[flower]'")
    from numpyro_pvi.flower import Flower, client_app
    from tests.flower_grid import Fake

    wanted, *_ = fits(QUICK)
    model, solver, schedule, guide, optim = CELLS[QUICK]

    def load(context):
        mine = context.node_config["label"] == LABELS
        return X[mine], DATA[model][mine]

    grid = Fake(dict.fromkeys(("south", "east", "north"), client_app(model, guide(model), load, solver=solver)))
    runtime = Flower(grid=grid, owners=NAMES, patience=5.0, wait=0.2, tries=30)
    pvi = PVI(model, guide(model), optim(), solver=solver, schedule=schedule, runtime=runtime)
    assert_same(numbers(pvi.run(KEY, 3, progress_bar=False)), numbers(wanted), tolerance)


def test_clients_that_forget_their_own_latents_are_seen(fits, monkeypatch):
    """The law has teeth: where a client goes on from its first latents, or stays at the old ones, sites come out others."""
    _, found, far, _ = fits(QUICK)

    def off(found):
        again = far.run(KEY, 2, progress_bar=False).state.sites.groups.precision_mean
        return float(jnp.max(jnp.abs(again - found)))

    right = far.run(KEY, 2, progress_bar=False).state.sites.groups.precision_mean
    assert off(right) == 0.0
    monkeypatch.setattr(Kept, "at", lambda self, ticket: self.first)
    assert off(right) > 1e-6


def test_slopes_that_are_not_added_up_are_seen(fits, monkeypatch):
    """The law has teeth: a client whose slopes do not count leaves params elsewhere."""
    _, found, far, _ = fits(QUICK)
    slope = Answers._slope

    def deaf(self, how, rows, *rest):
        value, *slopes = slope(self, how, rows, *rest)
        return (value, *(jnp.zeros_like(x) if rows[0][0].shape[0] == 4 else x for x in slopes))

    monkeypatch.setattr(Answers, "_slope", deaf)
    again = far.run(KEY, 3, progress_bar=False).params
    assert abs(float(again["spread"] - found.params["spread"])) > 1e-6


def kept_numbers(pvi):
    """Every number that clients hold of their own latents, but those that any message may have by chance."""
    values = [x for c in pvi.runtime.clients for value in c._kept._held.values() for x in jax.tree.leaves(value)]
    flat = np.concatenate([np.ravel(np.asarray(x)) for x in values])
    return [x for x in flat if np.isfinite(x) and (1024 * x) % 1 != 0]


def told(said, secret):
    """How many of some numbers are in messages, as they are."""
    size, everything = secret[0].nbytes, b"".join(said)
    windows = {everything[i : i + size] for i in range(len(everything))}
    return sum(x.tobytes() in windows for x in secret)


def test_no_message_has_latents_of_a_clients_own(fits):
    """Every number of every message of a fit: nothing that clients hold, nor the posteriors that they give their owner."""
    _, found, far, said = fits(QUICK)
    secret = kept_numbers(far)
    owners = [client.posterior()["u"] for client in far.runtime.clients]
    secret += [x for own in owners for x in (*np.asarray(own.mean), *np.asarray(own.variance))]
    assert len(secret) > 100 and len(said) > 60
    assert told(said, secret) == 0
    # What is in the server's state is no more.
    assert found.state.sites.local.first is None and found.state.sites.local.tickets.dtype == jnp.int32


def test_a_client_that_tells_one_of_its_own_latents_is_seen(fits, monkeypatch):
    """The law has teeth: where the error of a look is a mean of a row's own latent, it is found."""
    _, _, far, said = fits(QUICK)
    ask = Answers.ask_held

    def loose(self, how, shared, own, held):
        found, made = ask(self, how, shared, own, held)
        if how["ask"] == "look":
            found = (*found[:3], held(own[0]).rows.linear[0, 0, 0], *found[4:])
        return found, made

    monkeypatch.setattr(Answers, "ask_held", loose)
    count = len(said)
    far.run(KEY, 1, progress_bar=False)
    assert told(said[count:], kept_numbers(far)) > 0


def test_owners_have_the_posteriors_of_their_own_latents(fits, tolerance):
    """In a client's own process they are those of one process; with the server they are refused by name."""
    wanted, _, far, _ = fits(QUICK)
    found = far.run(KEY, 3, progress_bar=False)
    means = {c.label: np.asarray(c.posterior()["u"].mean) for c in far.runtime.clients}
    mine = np.concatenate([means[x] for x in NAMES])
    loc = np.asarray(wanted.params["auto_loc"])
    assert_same(mine, loc[2:], tolerance)
    shared = far.posterior(found.state)
    assert list(shared) == ["w"] and found.params["auto_loc"].shape == (2,)
    with pytest.raises(PVIError, match=r"latent 'u' is inside plate 'data', .* client.posterior\(\) in its process"):
        shared["u"]
    with pytest.raises(KeyError):
        shared["v"]


def test_owners_have_draws_with_their_own_rows(fits):
    """ArviZ data of one client: log-likelihoods are those of its draws, by hand; the server has draws of what all share."""
    pytest.importorskip("arviz")
    _, found, far, _ = fits(QUICK)
    far.run(KEY, 1, init_state=far.run(KEY, 2, progress_bar=False).state, progress_bar=False)
    client = far.runtime.clients[0]
    mine = client.label == LABELS
    data = client.to_arviz(KEY, num_samples=400)
    w, u, logs = (
        np.asarray(data[g][n])[0] for g, n in (("posterior", "w"), ("posterior", "u"), ("log_likelihood", "obs"))
    )
    rate = 0.5 * w @ X[mine].T + u
    assert u.shape == (400, 3)
    by_hand, rounding = COUNTS[mine] * rate - np.exp(rate) - gammaln(COUNTS[mine] + 1.0), 10 * np.finfo(logs.dtype).eps
    np.testing.assert_allclose(logs, by_hand, rtol=1e-6, atol=rounding)
    own = client.posterior()["u"]
    gap = np.abs(u.mean(0) - np.asarray(own.mean)) / np.sqrt(np.asarray(own.variance) / 400)
    assert gap.max() < 5.0 and np.abs(u.var(0) / np.asarray(own.variance) - 1).max() < 0.5
    shared = far.to_arviz(KEY, found, num_samples=400)
    assert list(shared["posterior"].data_vars) == ["w"] and "log_likelihood" not in shared
    q = far.posterior(found.state)["w"]
    gap = np.abs(np.asarray(shared["posterior"]["w"])[0].mean(0) - q.mean) / np.sqrt(np.asarray(q.variance) / 400)
    assert gap.max() < 5.0


@pytest.mark.slow
def test_owners_draw_at_the_params_that_they_were_told_last(fits, tolerance):
    """Log-likelihoods by hand, at the server's params; planted: those that the fit started from."""
    pytest.importorskip("arviz")
    _, found, far, _ = fits("params-gradient-parallel")
    far.evaluate(found.state)
    client = far.runtime.clients[0]
    mine = client.label == LABELS

    def gap():
        data = client.to_arviz(KEY, num_samples=20)
        w, logs = np.asarray(data["posterior"]["w"])[0], np.asarray(data["log_likelihood"]["obs"])[0]
        logits = w @ X[mine].T + np.asarray(found.params["shift"])
        return np.abs(logs + np.logaddexp(0, -(2 * OUTCOMES[mine] - 1) * logits)).max()

    assert gap() < 100 * tolerance
    client._last_params = tuple(np.asarray(x) for x in jax.tree.leaves(client._begun[1].planned.params))
    assert gap() > 1e-2


@pytest.mark.slow
def test_a_client_that_joins_finds_the_others_latents_where_they_were(fits):
    """The state's sites are kept to the bit, and clients go on from what they held; limits are those of all from the start."""
    *_, far, _ = fits(QUICK)
    model, solver, schedule, guide, optim = CELLS[QUICK]
    known, clients = far.runtime._line.known, [client_of(QUICK, x) for x in NAMES]

    def fit(*clients):
        runtime = InProcess(clients=clients)
        for client in clients:
            client.compile_with(known)
        return PVI(model, guide(model), optim(), solver=solver, schedule=schedule, runtime=runtime)

    state = fit(*clients[:2]).run(KEY, 3, progress_bar=False).state
    more = fit(*clients)
    joined = more.add_group(state, "south", num_steps=0)
    assert joined.groups == NAMES and int(joined.step) == 3
    for now, before in zip(jax.tree.leaves(joined.sites.groups), jax.tree.leaves(state.sites.groups), strict=True):
        np.testing.assert_array_equal(now[:2], before)
        assert not np.any(now[2])
    np.testing.assert_array_equal(joined.sites.local.tickets[:2], state.sites.local.tickets)
    held = [np.asarray(c._kept.at(t).rows.linear) for c, t in zip(clients, joined.sites.local.tickets, strict=True)]
    found = more.update(joined)[0]
    assert np.abs(held[0] - np.asarray(clients[0]._kept.first.rows.linear)).max() > 1e-3
    assert np.any(found.sites.groups.precision[2]) and np.any(found.sites.local.tickets[2])


def test_a_client_that_was_kept_goes_on_with_its_own_latents(fits):
    """To the bit; one that was begun anew without what was kept is refused by name, and the state stays what it was."""
    *_, far, _ = fits(QUICK)
    found = far.run(KEY, 1, progress_bar=False)
    wanted = far.update(found.state)[0]
    clients, talk = far.runtime.clients, far.runtime._line.exchange.transport.inner
    (place,) = (i for i, c in enumerate(talk._respondents) if c.label == "north")
    old = talk._respondents[place]

    def instead(restored):
        new = client_of(QUICK, "north")
        new.compile_with(far.runtime._line.known)
        if restored:
            new.restore(old.save())
        talk._respondents[place] = new
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fits, "plan_factors", from_one_place)
        new = instead(True)
        again = far.update(found.state)[0]
        assert new.posterior()["u"].mean.shape == (4,)
        jax.tree.map(np.testing.assert_array_equal, again.sites.groups, wanted.sites.groups)
        instead(False)
        with pytest.raises(
            ClientError, match="'north' is refused: it says: it does not have its own latents as this state left"
        ):
            far.update(found.state)
    assert clients[2].label == "north"
    jax.tree.map(np.testing.assert_array_equal, far.update(found.state)[0].sites.groups, wanted.sites.groups)


def test_a_client_of_every_question_keeps_its_latents_from_the_first_on(fits, same_start):
    """As under Flower where it is deployed: what is saved before the plan is known says nothing of latents, and is taken up."""
    *_, far, _ = fits(QUICK)
    wanted = far.run(KEY, 2, progress_bar=False)
    model, solver, schedule, guide, optim = CELLS[QUICK]
    clients = [client_of(QUICK, "east"), Mortal(partial(client_of, QUICK), "north"), client_of(QUICK, "south")]
    pvi = PVI(model, guide(model), optim(), solver=solver, schedule=schedule, runtime=InProcess(clients=clients))
    for client in clients:
        client.compile_with(far.runtime._line.known)
    found = pvi.run(KEY, 2, progress_bar=False)
    jax.tree.map(np.testing.assert_array_equal, found.state.sites.groups, wanted.state.sites.groups)


def test_what_is_pinned_is_held_however_much_comes_after():
    """Beside the last sixteen, which are; a client that is restored holds as much."""
    kept = Kept(np.zeros(2))
    kept.pinned = ((1, 1), (1, 3))
    for i in range(1, 41):
        kept.keep((1, i), np.full(2, float(i)))
    assert [n for _, n in kept._held] == [1, 3, *range(25, 41)]
    again = Kept(np.zeros(2))
    again.restore(kept.save())
    assert list(again._held) == list(kept._held) and kept.after(again)._held is again._held
    with pytest.raises(PVIError, match="it does not have its own latents as this state left them"):
        kept.at((1, 2))


class Breaks:
    """A transport that carries nothing any more after a number of questions."""

    left = np.inf

    def __init__(self, inner):
        self.inner, self.close = inner, inner.close

    def send(self, place, data):
        Breaks.left -= 1
        if Breaks.left > 0:
            self.inner.send(place, data)

    def receive(self, wait):
        return self.inner.receive(wait)


@pytest.mark.slow
def test_a_call_that_ends_in_an_error_leaves_its_state_and_the_checkpoint_good(fits, tmp_path, monkeypatch):
    """After more rounds than a client holds the ends of; planted: a server that does not say what is to be held."""
    *_, far, _ = fits(QUICK)
    model, solver, schedule, guide, optim = CELLS[QUICK]
    clients, file = [client_of(QUICK, x) for x in NAMES], {"checkpoint": tmp_path / "run", "progress_bar": False}
    runtime = InProcess(clients=clients, through=Breaks)
    for client in clients:
        client.compile_with(far.runtime._line.known)
    pvi = PVI(model, guide(model), optim(), solver=solver, schedule=schedule, runtime=runtime)
    state = pvi.run(KEY, 2, **file).state

    def broken():
        monkeypatch.setattr(Breaks, "left", 3 * 45)
        with pytest.raises(ClientError, match="has not answered"):
            pvi.run(KEY, 40, init_state=state, progress_bar=False)
        monkeypatch.setattr(Breaks, "left", np.inf)

    broken()
    assert int(pvi.run(KEY, 1, init_state=state, progress_bar=False).state.step) == 3
    assert int(pvi.run(KEY, 3, **file).state.step) == 3
    monkeypatch.setattr(type(runtime), "hold", lambda *_: None)
    runtime._line.pins.clear()
    broken()
    with pytest.raises(ClientError, match="it does not have its own latents as this state left"):
        pvi.run(KEY, 1, init_state=state, progress_bar=False)


@pytest.mark.slow
def test_a_fit_goes_on_from_a_file_with_the_clients_that_have_its_latents(tmp_path, same_start, tolerance):
    name = "own-ep-few"
    wanted = here(name).run(KEY, 3, *rows_of(name), progress_bar=False)
    first = elsewhere(name)
    first.run(KEY, 1, checkpoint=tmp_path / "run", progress_bar=False)
    model, solver, schedule, guide, _ = CELLS[name]
    again = PVI(model, guide(model), solver=solver, schedule=schedule, runtime=InProcess(clients=first.runtime.clients))
    found = again.run(KEY, 3, checkpoint=tmp_path / "run", progress_bar=False)
    assert_same(numbers(found), numbers(wanted), tolerance)


REFUSED = {
    "asynchronous": (
        {"schedule": Asynchronous()},
        r"latents inside the partitioned plate under Asynchronous.*pass Sync",
    ),
    "streaming": ({"schedule": Streaming()}, r"latents inside the partitioned plate under Streaming"),
    "damped": ({"schedule": Sequential(damping=0.5)}, r"under Sequential.*damping=0.5"),
    "clock": (
        {"schedule": Asynchronous(delays="real")},
        r"numpyro.param sites \(spread\) under Asynchronous.*no round waits",
    ),
}


@pytest.fixture(scope="module")
def beginner():
    pvi = PVI(Partition(both, "data", LABELS), FULL(both), Adam(0.1), runtime=InProcess())
    return pvi, pvi.init(KEY, X, COUNTS)


@pytest.fixture
def begun(beginner):
    return beginner[1]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("streaming", "damped") else n for n in REFUSED]
)
def test_what_does_not_go_is_refused_by_name(name, begun):
    choices, word = REFUSED[name]
    pvi = PVI(Partition(both, "data", LABELS), FULL(both), Adam(0.1), runtime=InProcess(), **choices)
    with pytest.raises(PVIError, match=word):
        pvi.update(begun, X, COUNTS)


def test_a_state_of_clients_is_theirs(beginner):
    """What reads own latents in this process says who has them, and another runtime does not go on from their names."""
    pvi, begun = beginner
    calls = {
        "khat": lambda: pvi.khat(begun, X, COUNTS, rng_key=KEY),
        "to_arviz": lambda: pvi.to_arviz(KEY, begun, X, COUNTS),
        "add_group": lambda: pvi.add_group(begun, "west", X, COUNTS),
    }
    for verb, call in calls.items():
        with pytest.raises(PVIError, match=f"{verb} reads latents inside the plate, which are with the clients"):
            call()
    # Rows that nobody has seen are foretold by the latents that all share alone.
    score = pvi.prequential(begun, X[:3], COUNTS[:3], rng_key=KEY, num_samples=50)
    assert score.rows.shape == (3,) and bool(np.isfinite(score.rows).all())
    with pytest.raises(StateError, match="another runtime, and what its groups hold of their own"):
        PVI(Partition(both, "data", LABELS), FULL(both), Adam(0.1)).update(begun, X, COUNTS)


@pytest.mark.slow
def test_what_does_not_begin_is_refused_by_name():
    pvi = PVI(Partition(effects, "data", LABELS), FULL(effects), runtime=InProcess(), init_sites="curvature")
    with pytest.raises(PVIError, match=r"init_sites='curvature' does not go with clients .*\(u\): leave"):
        pvi.init(KEY, X, COUNTS)
    pvi = PVI(Partition(both, "data", LABELS), FULL(both), runtime=InProcess())
    with pytest.raises(PVIError, match=r"numpyro.param site\(s\) spread but optim is None"):
        pvi.init(KEY, X, COUNTS)


def by_the_rows(X, y):
    """A param that starts from the rows."""
    loc = numpyro.param("loc", X.mean())
    w = numpyro.sample("w", dist.Normal(loc, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)


@pytest.mark.slow
def test_clients_that_do_not_fit_are_refused_by_name():
    """Families that keep their supports, before anything is fitted; params that start from the rows."""
    with pytest.raises(PVIError, match="client 'north' does not go with AutoExponentialFamily.*use a Gaussian guide"):
        Client(shifted, AutoExponentialFamily(shifted), "north", X, OUTCOMES)
    with pytest.raises(PVIError, match="does not go with AutoExponentialFamily"):
        PVI(shifted, AutoExponentialFamily(shifted), runtime=InProcess())
    clients = [Client(by_the_rows, FULL(by_the_rows), x, X[x == LABELS], COUNTS[x == LABELS]) for x in NAMES]
    with pytest.raises(ClientError, match="client 'north' has its model's numpyro.param sites start from other values"):
        PVI(by_the_rows, FULL(by_the_rows), Adam(0.1), runtime=InProcess(clients=clients)).init(KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "word"), [(effects, r"latents inside the plate \(u\)"), (shifted, r"numpyro.param sites")]
)
def test_what_is_heard_in_sums_only_has_neither(model, word):
    clients = [Summand(model, FULL(model), x, X[x == LABELS], DATA[model][x == LABELS]) for x in NAMES]
    optim = Adam(0.1) if model is shifted else None
    runtime = SummedClients(sums=InMemorySums(clients))
    with pytest.raises(PVIError, match=f"heard in sums only do not go with {word}"):
        PVI(model, FULL(model), optim, schedule=Synchronous(damping=0.5), runtime=runtime).run(
            KEY, 1, progress_bar=False
        )


def test_questions_tell_no_more_than_names_of_own_latents(fits):
    """And no question of a fit without them says more than before."""
    *_, said = fits(QUICK)
    asked = [m for m in map(decode, (d for d in said if b'"kind":"look?"' in d)) if m.kind == "look?"]
    assert {m.fields["how"]["ask"] for m in asked} == {"look", "between", "apart", "slope"}
    assert all(x.dtype == np.int32 and x.size <= 2 for m in asked for x in map(np.asarray, m.fields["rest"]))
