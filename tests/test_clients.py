"""Clients answer, a server fits q: the trajectory is that of one process, whatever happens to the messages."""

import collections
import hashlib
import multiprocessing
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import Client, Exchange, InProcess, Processes, Respondent
from numpyro_pvi.clients._runtimes import Maker, Pipes, Share, serve
from numpyro_pvi.errors import ClientError, PVIError, WireError
from numpyro_pvi.runtime import _network
from numpyro_pvi.schedules import Asynchronous, Decentralized, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import LocalELBO, NaturalGradient, PowerEP
from numpyro_pvi.wire import Message, decode, encode
from tests.client_model import logistic
from tests.laws.models import rows

X, _, Y = rows(12)
LABELS = np.array(["east", "north", "south"])[np.arange(12) % 3]
KEY = jax.random.key(0)
EP, ELBO = PowerEP(), LocalELBO(Adam(0.01), num_steps=3, optimiser_state="keep")
DELAYED = Asynchronous(delays=("exponential", 1.0))


def make(runtime, solver=None, schedule=None, guide=AutoMultivariateNormal, labels=LABELS):
    return PVI(Partition(logistic, "data", labels), guide(logistic), solver=solver, schedule=schedule, runtime=runtime)


def fit(pvi):
    """Sites and losses after three rounds."""
    result = pvi.run(KEY, 3, X, Y, progress_bar=False)
    return jax.device_get(result.state.sites), np.asarray(result.losses)


def assert_same(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


CELLS = {
    "gradient-synchronous": (NaturalGradient(), Synchronous()),
    "gradient-subset": (NaturalGradient(), StochasticSubset(k=2)),
    "gradient-sequential": (NaturalGradient(), Sequential()),
    "ep-synchronous": (EP, Synchronous()),
    "elbo-synchronous": (ELBO, Synchronous()),
    "elbo-asynchronous": (ELBO, DELAYED),
    "ep-sequential": (EP, Sequential()),
    "backtracking-subset": (NaturalGradient(backtracking=True), StochasticSubset(k=2)),
    "gradient-asynchronous": (NaturalGradient(), DELAYED),
}


class Weather:
    """Loses, doubles, delays and reorders what goes through it, both ways."""

    def __init__(self, inner, rate, seed=0):
        self.inner, self.rate, self.rng = inner, rate, np.random.default_rng(seed)
        self.held, self.happened = [], collections.Counter()

    def _chance(self, what):
        hit = self.rng.random() < self.rate
        self.happened[what] += hit
        return hit

    def send(self, place, data):
        if self._chance("lost"):
            return
        self.inner.send(place, data)
        if self._chance("doubled"):
            self.inner.send(place, data)

    def receive(self, wait):
        while (came := self.inner.receive(wait)) is not None:
            if not self._chance("answer lost"):
                self.held += [came] * (1 + self._chance("answer doubled"))
        if not self.held or self._chance("delayed"):
            return None
        return self.held.pop(int(self.rng.integers(len(self.held))) if self._chance("reordered") else 0)

    def close(self):
        self.inner.close()


@pytest.fixture(scope="module")
def here():
    """Fits in one process, each made once."""
    made = {}

    def of(name, guide=AutoMultivariateNormal):
        if (name, guide) not in made:
            made[name, guide] = fit(make(None, *CELLS[name], guide=guide))
        return made[name, guide]

    return of


@pytest.fixture(scope="module")
def there():
    """The same with clients, and the weather between them, fair at first."""
    made = {}

    def of(name, guide=AutoMultivariateNormal):
        if (name, guide) not in made:
            weather = []
            runtime = InProcess(tries=400, through=lambda inner: weather.append(Weather(inner, 0.0)) or weather[-1])
            made[name, guide] = make(runtime, *CELLS[name], guide=guide), weather
        return made[name, guide]

    return of


@pytest.mark.parametrize(
    ("name", "guide"),
    [(name, AutoMultivariateNormal) for name in CELLS] + [("gradient-synchronous", AutoDiagonalNormal)],
)
def test_trajectories_are_those_of_one_process(name, guide, here, there, tolerance):
    """Nothing is done twice: also where half of everything is lost, doubled, delayed and reordered."""
    (pvi, weather), wanted = there(name, guide), here(name, guide)
    assert_same(fit(pvi), wanted, tolerance)
    before = pvi.runtime.traffic
    assert (before.visits == 0) == (name in ("gradient-synchronous", "gradient-subset"))
    # Three rounds, a hello, a look to begin with where values test steps, and what was asked again: refined rules and memories.
    solver, schedule = CELLS[name]
    assert before.looks + before.visits >= 3 * schedule.round_trips(solver, 3) + (not solver.matches_moments)
    assert before.looks + before.visits <= before.trips - 1
    assert before.repeats == before.dropped == before.damaged == 0
    weather[0].rate = 0.5
    assert_same(fit(pvi), wanted, tolerance)
    weather[0].rate = 0.0
    kinds = {"lost", "doubled", "answer lost", "answer doubled", "delayed", "reordered"}
    assert {what for what, count in weather[0].happened.items() if count} == kinds
    now = pvi.runtime.traffic
    assert now.repeats and now.dropped
    assert (now.looks, now.visits) == (2 * before.looks, 2 * before.visits)


def _in_another_thread(call):
    """As a program may call back, or not: from a thread that was told of no settings."""

    def called(*operands):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *operands).result()

    return called


def test_a_precision_of_this_thread_is_the_clients_too(monkeypatch):
    """A program calls back from a thread of its own, which ``with jax.enable_x64(...)`` says nothing to."""
    double = bool(jax.config.values["jax_enable_x64"])
    with jax.enable_x64(not double):
        sites, _ = fit(make(InProcess()))
        assert jax.tree.leaves(sites)[0].dtype == (np.float32 if double else np.float64)
        monkeypatch.setattr(_network, "as_here", _in_another_thread)
        with pytest.raises((ClientError, UserWarning), match="dtype"):
            fit(make(InProcess()))


def test_a_client_that_answers_twice_would_be_seen(here, there, monkeypatch):
    """The law has teeth: where a repeated question is answered anew, memory moves twice and sites come out others."""
    (pvi, weather), answer = there("elbo-asynchronous"), Respondent.answer
    fit(pvi)

    def forgetful(self, data):
        self._last = ("", 0, b"")
        return answer(self, data)

    monkeypatch.setattr(Respondent, "answer", forgetful)
    for module in ("_client", "_exchange"):
        # Else the client would see that its memory is not the one it is asked to go on from.
        monkeypatch.setattr(f"numpyro_pvi.clients.{module}.digest_of", lambda arrays: b"")
    weather[0].rate = 0.5
    with pytest.raises(AssertionError):
        assert_same(fit(pvi), here("elbo-asynchronous"), 1e-6)


def test_one_runtime_serves_several_fits(here, tolerance):
    """Clients of one solver do not answer for another's."""
    runtime = InProcess()
    for name in ("gradient-synchronous", "ep-synchronous", "gradient-synchronous"):
        assert_same(fit(make(runtime, *CELLS[name])), here(name), tolerance)


@pytest.mark.parametrize(
    ("solver", "guide", "bound"),
    [
        (NaturalGradient(), AutoMultivariateNormal, None),
        (EP, AutoMultivariateNormal, 2),
        (NaturalGradient(), AutoDiagonalNormal, None),
    ],
    ids=["gradient", "ep-bounded", "mean-field"],
)
def test_sites_absorbed_as_they_arrive_have_the_limit_of_one_process(solver, guide, bound):
    """Though a third of everything is lost, doubled, delayed and reordered; and what is seen last is the ELBO in the end."""
    weather = []
    runtime = InProcess(tries=400, through=lambda inner: weather.append(Weather(inner, 0.3)) or weather[-1])
    pvi = make(runtime, solver, Asynchronous(delays="real", max_staleness=bound), guide)
    found = pvi.run(KEY, 5000, X, Y, progress_bar=False, tol=1e-11)
    wanted = make(None, solver, Sequential(), guide).run(KEY, 5000, X, Y, progress_bar=False, tol=1e-11)
    assert found.converged and wanted.converged
    assert_same(jax.device_get(found.state.sites), jax.device_get(wanted.state.sites), 1e-8)
    np.testing.assert_allclose(found.losses[-1], pvi.evaluate(found.state, X, Y), rtol=1e-9)
    traffic = runtime.traffic
    assert traffic.repeats and traffic.dropped and traffic.visits == 3 * len(found.losses)
    assert bound is None or int(np.max(found.trace.staleness)) <= bound


def test_a_site_that_would_be_absorbed_twice_is_seen(monkeypatch):
    """The law has teeth: an answer that was taken from the pile and is put there again is refused."""
    pvi, kept = make(InProcess(), None, Asynchronous(delays="real")), []
    arrive, take = Exchange.arrive, Exchange._take

    def remembering(self, came):
        take(self, came)
        kept[:] = [(place, self._errands[place], message) for place, message in self._done.items()]

    def again(self, allowed, young, shapes):
        for place, errand, message in kept:
            self._errands[place], self._done[place] = errand, message
        return arrive(self, allowed, young, shapes)

    monkeypatch.setattr(Exchange, "_take", remembering)
    monkeypatch.setattr(Exchange, "arrive", again)
    with pytest.raises(ClientError, match="not newer"):
        fit(pvi)


class LowestFirst:
    """A transport that hands out the answers of the first client before all others, as pipes that are looked at in order do."""

    def __init__(self, inner):
        self.inner, self.waiting = inner, []
        self.send, self.close = inner.send, inner.close

    def receive(self, wait):
        while (came := self.inner.receive(0.0)) is not None:
            self.waiting.append(came)
        self.waiting.sort(key=lambda came: came[0])
        return self.waiting.pop(0) if self.waiting else None


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "one answer at a time"])
def test_a_quick_client_is_not_heard_before_all_others(fault, monkeypatch):
    if fault:
        monkeypatch.setattr(Exchange, "_take_what_came", lambda self: None)
    runtime = InProcess(through=LowestFirst)
    make(runtime, None, Asynchronous(delays="real")).run(KEY, 6, X, Y, progress_bar=False)
    absorbed = runtime._line.exchange._versions
    assert min(absorbed) < max(absorbed) // 2 if fault else max(absorbed) - min(absorbed) <= 1


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "visits are forgotten"])
def test_an_evaluation_between_rounds_loses_no_visit(fault, monkeypatch):
    if fault:
        ask = Exchange._ask
        monkeypatch.setattr(Exchange, "_ask", lambda self, asks, *kinds, keep=False: ask(self, asks, *kinds))
    runtime = InProcess()
    pvi = make(runtime, None, Asynchronous(delays="real"))
    state = pvi.init(KEY, X, Y)
    for _ in range(4):
        state, _ = pvi.update(state, X, Y)
        pvi.evaluate(state, X, Y)
    assert runtime.traffic.dropped == 0
    # Visits that were under way were waited for, and are still to be absorbed.
    assert len(runtime._line.exchange._done) == (0 if fault else 3)


def test_clocks_that_are_real_are_refused_where_nobody_works_alone():
    with pytest.raises(PVIError, match=r"delays='real'\) is for groups that work on their own: pass runtime="):
        fit(make(None, None, Asynchronous(delays="real")))
    with pytest.raises(PVIError, match="simulated with simulated delays"):
        Asynchronous(delays="real", loss_rate=0.1)
    with pytest.raises(PVIError, match="delays='now'"):
        Asynchronous(delays="now")


def test_info_and_the_bar_tell_what_was_sent(there, capsys):
    pvi, _ = there("gradient-synchronous")

    def spent(state):
        before = pvi.runtime.traffic
        result = pvi.run(KEY, 3, X, Y, progress_bar=False, init_state=state)
        return result, [b - a for a, b in zip(before, pvi.runtime.traffic, strict=True)][:3]

    # The first run makes the transport, which the fixture keeps in a list that its runtime closes over: programs are dropped by it.
    pvi.run(KEY, 3, X, Y, progress_bar=False)
    result = pvi.run(KEY, 3, X, Y, progress_bar=False)
    # One look a round: an immediate solver's visit is no question, and what the last run ended with is known.
    result, trips = spent(result.state)
    assert trips == [3, 3, 0] and Synchronous().round_trips(NaturalGradient(), 3) == 1
    # One more to begin with where it is not.
    pvi._memory.look._kept = None
    result, trips = spent(result.state)
    assert trips == [4, 4, 0]
    assert f"clients: {pvi.runtime.traffic.trips} round trips so far" in str(pvi.info(result.state))
    capsys.readouterr()
    pvi.run(KEY, 3, X, Y, init_state=result.state)
    assert f"3 clients, {pvi.runtime.workers.split(', ')[1]}" in capsys.readouterr().err


class Tampered:
    """Changes answers on the way."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def send(self, place, data):
        self.inner.send(place, data)

    def receive(self, wait):
        came = self.inner.receive(wait)
        if came is None:
            return None
        place, data = came
        message = decode(data)
        return place, self.change(message) if message.kind == "visit" and place == 1 else data

    def close(self):
        self.inner.close()


def told(**changed):
    return lambda message: encode(message._replace(fields=message.fields | changed))


def of_version(version, data):
    """The same frame as another version would write it: its first bytes say which, and have a checksum."""
    first = data[:8] + version.to_bytes(4, "little") + data[12:32]
    body = first + hashlib.sha256(first).digest() + data[64:-32]
    return body + hashlib.sha256(body).digest()


def spoilt_site(spoil):
    def change(message):
        return told(site=tuple(spoil(x.copy()) for x in message.fields["site"]))(message)

    return change


def skewed(x):
    if x.ndim == 2:
        x[0, 1] += 1.0
    return x


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (spoilt_site(lambda x: x * np.nan), "site is not finite"),
        (spoilt_site(skewed), "not symmetric"),
        (spoilt_site(lambda x: x[:1]), "site has the shapes"),
        (told(version=0), "version 0, which is not newer"),
        (told(label="west"), "'west', which is not known here"),
        (told(sequence=99), "answers question 99"),
        (told(rest=()), "report has the shapes"),
        (
            lambda message: encode(
                Message("gap", {n: message.fields[n] for n in ("run", "sequence", "label")} | {"digest": b""})
            ),
            None,
        ),
        (lambda message: b"garbage", "has not answered question"),
        (lambda message: of_version(2, encode(message)), "is of format 2, older than the 3 that is read here"),
        (lambda message: of_version(4, encode(message)), "is of format 4, newer than the 3 that is read here"),
    ],
    ids=["nan", "skewed", "shape", "version", "label", "ahead", "report", "gap", "garbage", "older", "later"],
)
def test_answers_that_cannot_be_are_refused_by_name(refused, change, word):
    """And the state is what it was: the next round, undisturbed, is the one that would have been."""
    pvi, runtime, state, wanted, changes = refused
    changes[0] = change
    with pytest.raises(ClientError, match=word) as caught:
        pvi.update(state, X, Y)
    assert caught.value.label == ("west" if word and "west" in word else "north")
    changes[0] = lambda message: encode(message)
    assert_same(jax.device_get(pvi.update(state, X, Y)[0].sites), wanted, 0.0)


@pytest.fixture(scope="module")
def refused():
    changes = [lambda message: encode(message)]
    runtime = InProcess(tries=2, through=lambda inner: Tampered(inner, lambda message: changes[0](message)))
    pvi = make(runtime, EP, Synchronous())
    state = pvi.init(KEY, X, Y)
    return pvi, runtime, state, jax.device_get(pvi.update(state, X, Y)[0].sites), changes


def test_a_client_refuses_what_it_cannot_do_and_stays_as_it_was(refused):
    """Garbage, questions for others, wrong shapes, old questions: memory, version and the last answer stay."""
    pvi, runtime, state, _, changes = refused
    changes[0] = lambda message: encode(message)
    asked = []
    pvi.update(state, X, Y)
    client = runtime._line.exchange.transport.inner._respondents[0]
    before = jax.device_get(client._memory), client._version, client._last
    head = {"run": "x", "sequence": 1, "label": "east"}
    for message, kind in (
        (Message("hello?", head | {"label": "west"}), "refusal"),
        (Message("look?", head | {"how": {}, "q": (), "rest": ()}), "refusal"),
        (Message("gap", head | {"digest": b""}), "refusal"),
    ):
        message.fields["sequence"] = len(asked) + 1
        asked.append(decode(client.answer(encode(message))))
        assert asked[-1].kind == kind
    assert "question is for 'west'" in asked[0].fields["why"]
    with pytest.raises(WireError):
        client.answer(b"garbage")
    run, sequence, last = before[2]
    again = Message("hello?", {"run": run, "sequence": sequence, "label": "east"})
    assert client.answer(encode(again)) == last
    assert client.answer(encode(again._replace(fields=again.fields | {"sequence": sequence - 1}))) is None
    same = jax.device_get(client._memory), client._version, client._last
    assert (
        jax.tree.all(jax.tree.map(partial(np.array_equal, equal_nan=True), same[0], before[0]))
        and same[1:] == before[1:]
    )


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        (
            {"schedule": Decentralized(np.ones((3, 3)) - np.eye(3))},
            "do not go with Decentralized: its groups talk with each",
        ),
        ({"solver": PowerEP(factors="row")}, "sites of single rows"),
        ({"solver": NaturalGradient(expectation="monte_carlo")}, None),
    ],
)
def test_what_does_not_go_is_refused_by_name(choices, word):
    pvi = make(InProcess(), **choices)
    if word is None:
        assert np.isfinite(float(pvi.run(KEY, 1, X, Y, progress_bar=False).losses[-1]))
        return
    with pytest.raises(PVIError, match=word):
        pvi.run(KEY, 1, X, Y, progress_bar=False)


def test_what_no_process_can_be_handed_is_refused_by_name():
    with pytest.raises(PVIError, match="'east' is made of cannot be handed to a process"):
        Pipes([Share("east", logistic, ELBO, 1, None, None, [], (), ())])
    with pytest.raises(PVIError, match=r"wait=0.*positive"):
        Processes(wait=0)
    with pytest.raises(PVIError, match=r"tries=0.*positive"):
        InProcess(tries=0)
    pvi = make(InProcess())
    again = pickle.loads(pickle.dumps(pvi))
    assert again._engine.network is again.runtime._line and again.runtime.traffic.trips == 0
    state = pvi.init(KEY, X, Y)
    with pytest.raises(PVIError, match="jit, vmap and grad cannot"):
        jax.jit(pvi.update)(state, X, Y)


def test_every_group_in_a_process_of_its_own(here, tolerance):
    """The literal swap; no message holds a row; a process that is killed is named, and the next round begins anew."""
    runtime = Processes()
    pvi = make(runtime, EP, Synchronous())
    try:
        state, said = pvi.init(KEY, X, Y), []
        assert_same(fit(pvi), here("ep-synchronous"), tolerance)
        pipes = runtime._line.exchange.transport
        assert len({child.pid for child in pipes._children}) == 3
        receive, send = pipes.receive, pipes.send
        pipes.receive = lambda wait: said.append(receive(wait)) or said[-1]
        pipes.send = lambda place, data: said.append((place, data)) or send(place, data)
        wanted = jax.device_get(pvi.update(state, X, Y)[0].sites)
        assert len(said) > 6
        for row in np.asarray(X, wanted.groups.precision.dtype):
            assert not any(number.tobytes() in data for _, data in said for number in row)
        child = pipes._children[1]
        child.kill()
        child.join(10)
        with pytest.raises(ClientError, match=r"client 'north' has ended \(exit code -9\)") as caught:
            pvi.update(state, X, Y)
        assert caught.value.label == "north"
        assert_same(jax.device_get(pvi.update(state, X, Y)[0].sites), wanted, 0.0)
    finally:
        runtime.close()
    assert not any(child.is_alive() for child in pipes._children)


SIZE = 1 << 20


def slow_answers(pipe):
    """What a client's process does with large questions, which takes it a moment."""
    while True:
        try:
            question = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        time.sleep(0.2)
        pipe.send_bytes(question[:1] * SIZE)


@pytest.mark.parametrize("written_over", [False, True], ids=["as it is", "planted"])
def test_a_question_that_is_repeated_while_a_large_answer_is_on_its_way_is_no_deadlock(written_over, monkeypatch):
    """Neither pipe has room for a message; planted: questions that are written over an answer that nobody reads."""
    if written_over:
        monkeypatch.setattr(Pipes, "send", lambda self, place, data: self._here[place].send_bytes(data))
    pipes, (here, there) = Pipes([]), multiprocessing.Pipe()
    pipes._here, pipes._labels = [here], ["north"]
    threading.Thread(target=slow_answers, args=(there,), daemon=True).start()

    def ask():
        for question in (b"a" * SIZE, b"a" * SIZE, b"b" * SIZE):
            pipes.send(0, question)
            found.append(pipes.receive(0.05))
        found.extend(pipes.receive(5.0)[1][:1] for _ in range(2))
        found.append(pipes.receive(0.3))

    found = []
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2.0 if written_over else 10.0)
    if written_over:
        assert asking.is_alive()
    else:
        assert not asking.is_alive() and found == [None, None, None, b"a", b"b", None]
        here.close()


def mistaken(label):
    return Client(logistic, AutoMultivariateNormal(logistic), label[:3], load_rows=lambda: (X, Y))


def test_a_client_that_could_not_be_made_says_why_when_it_is_asked():
    here, there = multiprocessing.Pipe()
    threading.Thread(target=serve, args=(there, Maker("north", partial(mistaken, "north")), {}), daemon=True).start()
    head = {"run": "1" * 16, "sequence": 1, "label": "north"}
    here.send_bytes(encode(Message("describe?", {**head, "key": ()})))
    assert here.poll(20.0)
    answer = decode(here.recv_bytes())
    assert answer.kind == "refusal" and answer.fields["label"] == "north"
    assert "could not be made (PVIError): what was to make client 'north' has made 'nor'" in answer.fields["why"]
    here.close()


@pytest.mark.parametrize("gone", [EOFError, BrokenPipeError], ids=["before it is asked", "before it answers"])
def test_a_client_ends_quietly_where_whoever_asks_has_gone(gone):
    """As those do that are left when another one could not be made."""
    head = {"run": "1" * 16, "sequence": 1, "label": "north"}
    asked = [encode(Message("describe?", {**head, "key": ()}))] if gone is BrokenPipeError else []

    class Closed:
        def recv_bytes(self, most):
            if not asked:
                raise EOFError
            return asked.pop()

        def send_bytes(self, data):
            raise gone

    serve(Closed(), Maker("north", partial(mistaken, "north")), {})
