"""Law 15: a fit follows what its model closes over at the time of the call; a file fits only the model, data and settings it was
made with; what a PVI compiled or kept is released with it.
"""

import copy
import functools
import gc
import pickle
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_pvi._closures as closures
from numpyro_pvi import PVI, AutoExponentialFamily, CheckpointError, Partition, PVIError, StateError
from numpyro_pvi._checkpoint import read_checkpoint
from numpyro_pvi._closures import Followed, Snapshot
from numpyro_pvi._compiling import Program
from numpyro_pvi._numerics import nearly_same
from numpyro_pvi._saving import fingerprint as digits
from numpyro_pvi._verified import Memory
from numpyro_pvi.clients import Client, InMemorySums, InProcess, Summand, SummedClients
from numpyro_pvi.clients._share import shares_of, with_digests
from numpyro_pvi.factors import split_arguments
from numpyro_pvi.schedules import Synchronous
from numpyro_pvi.solvers import Conjugate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*every one of the .* groups costs a full pass"),
    pytest.mark.usefixtures("known_losses"),
]

N, KEY = 6, jax.random.key(0)
LABELS = np.arange(N) % 2
Y = np.linspace(-1.0, 2.0, N)
NOISE = 0.5
KIND = dist.Normal
SETTINGS = types.SimpleNamespace(sd=1.0)


class Holder:
    """Models as methods: a prior sd of the object's, an offset that changes in place, noise and outcomes of the module."""

    prior_sd = 2.0

    def __init__(self):
        self.offset, self.results = np.zeros(N), []

    def args(self, y):
        w = self._mean()
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("obs", dist.Normal(w + self.offset[0], NOISE), obs=y)

    def index(self, y):
        w = self._mean()
        with numpyro.plate("data", N) as i:
            numpyro.sample("obs", dist.Normal(w + jnp.asarray(self.offset)[i], NOISE), obs=y[i])

    def mask(self):
        w = self._mean()
        with numpyro.plate("data", N):
            numpyro.sample("obs", dist.Normal(w + self.offset, NOISE), obs=jnp.asarray(Y))

    def _mean(self):
        return numpyro.sample("w", KIND(0.0, self.prior_sd * SETTINGS.sd))


HOLDER = Holder()


@pytest.fixture(autouse=True)
def undone():
    yield
    HOLDER.offset[:] = 0.0


def set_global(monkeypatch):
    monkeypatch.setitem(globals(), "NOISE", 2.0)


def set_attribute(monkeypatch):
    monkeypatch.setattr(HOLDER, "prior_sd", 0.1)


def set_attribute_of_global(monkeypatch):
    monkeypatch.setattr(SETTINGS, "sd", 0.2)


def set_in_place(monkeypatch):
    HOLDER.offset += 3.0


def make(mechanism, guide=AutoMultivariateNormal, **options):
    model = getattr(HOLDER, mechanism)
    return PVI(Partition(model, "data", LABELS), guide(model), solver=Conjugate(), **options)


def data_of(mechanism):
    return () if mechanism == "mask" else (jnp.asarray(Y),)


def fit(pvi, data, init_state=None):
    return pvi.run(KEY, 2, *data, init_state=init_state, progress_bar=False).state


def moments(pvi, state):
    q = pvi.posterior(state)["w"]
    return np.array([q.mean, q.variance], float)


def expected():
    """Posterior mean and variance as things are, by hand."""
    precision = 1 / (HOLDER.prior_sd * SETTINGS.sd) ** 2 + N / NOISE**2
    return np.array([np.sum(Y - HOLDER.offset) / NOISE**2 / precision, 1 / precision])


@pytest.fixture(scope="module")
def fitted():
    pvi = make("args")
    return pvi, fit(pvi, data_of("args"))


@pytest.fixture
def near(x64):
    return {"rtol": 1e-8 if x64 else 1e-4}


# ------------------------------------------------------------------------------------------------------------ following

CELLS = (
    ("index", AutoMultivariateNormal, set_in_place),
    ("mask", AutoMultivariateNormal, set_global),
    ("mask", AutoExponentialFamily, set_in_place),
)


@pytest.mark.parametrize("mechanism,guide,change", CELLS, ids=[f"{m}-{g.__name__}" for m, g, _ in CELLS])
def test_a_new_pvi_sees_the_change(mechanism, guide, change, monkeypatch, near):
    old, data = make(mechanism, guide), data_of(mechanism)
    fit(old, data)
    change(monkeypatch)
    new = make(mechanism, guide)
    np.testing.assert_allclose(moments(new, fit(new, data)), expected(), **near)


def test_the_same_pvi_sees_every_change(fitted, monkeypatch, near):
    (_, state), pvi, data = fitted, make("args"), data_of("args")
    before = float(pvi.evaluate(state, *data))
    for change in (set_attribute, set_in_place):
        change(monkeypatch)
        # A round from the old state: data and prior are those of now.
        moved, loss = pvi.update(state, *data)
        np.testing.assert_allclose(moments(pvi, moved), expected(), err_msg=change.__name__, **near)
    set_attribute_of_global(monkeypatch)
    set_global(monkeypatch)
    found = fit(pvi, data)
    np.testing.assert_allclose(moments(pvi, found), expected(), **near)
    at_old = float(pvi.evaluate(state, *data))
    assert abs(at_old - before) > 1.0
    np.testing.assert_allclose(pvi.evaluate(found, *data), -pvi.log_evidence(found, *data), **near)
    assert pvi.evaluate(found, *data) < at_old
    monkeypatch.setitem(globals(), "KIND", lambda loc, scale: dist.StudentT(3.0, loc, scale))
    with pytest.raises(StateError, match="prior of 'w' is of another family .* start anew"):
        pvi.evaluate(found, *data)


def test_snapshots_that_do_not_compare_let_old_answers_pass(monkeypatch):
    """A planted fault: programs found again by the model's function alone."""
    monkeypatch.setattr(Snapshot, "__eq__", lambda self, other: True)
    monkeypatch.setattr(Followed, "compare", lambda *_: None)
    old = make("args")
    fit(old, data_of("args"))
    set_in_place(monkeypatch)
    new = make("args")
    assert np.max(np.abs(moments(new, fit(new, data_of("args"))) - expected())) > 0.1


class Slotted:
    __slots__ = ("value",)


def reached():
    """A model's parts, and by kind of change what changes them."""
    slotted, inner, cell = Slotted(), types.SimpleNamespace(a=[1.0, {"b": np.zeros(3)}]), 1.0
    slotted.value = 1

    def helper():
        return helper.level

    def model(x=inner, *, y=None):
        return helper, cell, slotted.value, x, y

    def set_cell():
        nonlocal cell
        cell = 2.0

    helper.level = jnp.zeros(2)
    root = functools.partial(model, y=[1])
    changes = {
        "nothing": lambda: None,
        "cell": set_cell,
        "default": lambda: setattr(model, "__defaults__", (2,)),
        "keyword": lambda: setattr(model, "__kwdefaults__", {"y": 1}),
        "function's attribute": lambda: setattr(helper, "level", jnp.zeros(2)),
        "partial": lambda: root.keywords["y"].append(2),
        "list": lambda: inner.a.append(3),
        "array in place": lambda: inner.a[1]["b"].__setitem__(1, 5.0),
        "slot": lambda: setattr(slotted, "value", 2),
        "code": lambda: setattr(helper, "__code__", helper.__code__.replace(co_name="other")),
        "to nan": lambda: inner.a.__setitem__(0, float("nan")),
        "type alone": lambda: inner.a.__setitem__(0, 1),
    }
    return root, changes


@pytest.mark.parametrize("kind", reached()[1])
def test_snapshots_see_a_change(kind):
    root, changes = reached()
    before = Snapshot((root,))
    changes[kind]()
    after = Snapshot((root,))
    assert (before == after) is (kind == "nothing")
    # NaN equals itself here.
    assert after == Snapshot((root,))


def test_what_no_snapshot_sees_shows_in_a_trace(tmp_path):
    """Here a file that the model reads."""
    path = tmp_path / "sd"
    path.write_text("1.0")

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, float(path.read_text())))
        numpyro.sample("obs", dist.Normal(w, 1.0), obs=y)

    followed, kept = Followed((model,)), []
    for text, same in (("1.0", True), ("1.0", True), ("2.0", False)):
        path.write_text(text)
        with followed.turn(trace=True):
            followed.programs._made["program"] = Program(len)
            followed.compare(model, (jnp.zeros(3),), {})
            kept.append("program" in followed.programs._made)
        assert kept[-1] is same


def test_a_model_that_counts_its_calls_is_no_other_model_each_time():
    """In a list, whose contents are left out; or in a number, which leaves it to traces to say what has changed."""
    calls, count, level = [], 0, 1.0

    def body(y):
        numpyro.sample("obs", dist.Normal(numpyro.sample("w", dist.Normal(0.0, level)), 1.0), obs=y)

    def lists(y):
        calls.append(1)
        body(y)

    def counts(y):
        nonlocal count
        count += 1
        body(y)

    for model, restless in ((lists, False), (counts, True)):
        level, followed, there = 1.0, Followed((model,)), []
        for now in (1.0, 1.0, 2.0):
            level = now
            with followed.turn(trace=True):
                followed.compare(model, (jnp.zeros(3),), {})
                there.append("program" in followed.programs._made)
                followed.programs._made["program"] = Program(len)
                calls.append(1)
                count += 1
            assert followed.programs.restless is restless
        assert there == [False, True, False]


def test_a_model_that_reaches_more_than_is_looked_at_is_traced(monkeypatch):
    """A package that is not known may lead anywhere; what lies beyond the objects looked at is followed all the same."""
    a_crowd = [types.SimpleNamespace(number=i) for i in range(3 * closures._MOST)]
    zz_sd = 1.0

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, zz_sd * a_crowd[1].number))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("obs", dist.Normal(w, NOISE), obs=y)

    taken = Snapshot((model,))
    assert not taken.exact
    pvi = PVI(Partition(model, "data", LABELS), AutoMultivariateNormal(model), solver=Conjugate())
    for now in (1.0, 0.1):
        zz_sd = now
        assert moments(pvi, fit(pvi, (jnp.asarray(Y),)))[1] == pytest.approx(1 / (N / NOISE**2 + now**-2), rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- release


def released(guide, *, whole=True):
    """Weak references to what a fit was made of, after it has gone."""

    class Kept:
        pass

    rows, kept = jnp.asarray(Y), Kept()

    def model():
        assert kept is not None
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N):
            numpyro.sample("obs", dist.Normal(w, NOISE), obs=rows)

    pvi = PVI(Partition(model, "data", LABELS), guide(model), solver=Conjugate())
    result = pvi.run(KEY, 1, progress_bar=False)
    pvi.khat(result.state, rng_key=KEY, num_samples=100)
    if whole:
        pvi.evaluate(result.state)
        pvi.to_arviz(KEY, result, num_samples=2)
    return [weakref.ref(x) for x in (rows, kept, model, pvi, pvi._followed.programs)]


@pytest.mark.parametrize(
    "guide,whole",
    [(AutoMultivariateNormal, False), pytest.param(AutoExponentialFamily, True, marks=pytest.mark.slow)],
)
def test_a_fit_is_released(guide, whole):
    found = released(guide, whole=whole)
    gc.collect()
    assert [ref() for ref in found] == [None] * len(found)


@pytest.mark.slow
def test_twenty_fits_stay_flat():
    counts = []
    for _ in range(20):
        found = released(AutoMultivariateNormal)
        gc.collect()
        assert [ref() for ref in found] == [None] * len(found)
        counts.append((len(jax.live_arrays()), _cached_programs()))
    # What all fits share is compiled in the first ones.
    assert counts[-1] == counts[3]


def _cached_programs():
    return sum(1 for x in gc.get_objects() if type(x).__name__ == "PjitFunction")


# ---------------------------------------------------------------------------------------------------------------- files


def set_outcomes(monkeypatch):
    monkeypatch.setitem(globals(), "Y", Y + 1.0)


def set_family(monkeypatch):
    monkeypatch.setitem(globals(), "KIND", dist.Laplace)


OTHERS = (
    (set_global, "the likelihood of 'obs' differs"),
    (set_attribute, "the prior of 'w' differs: a number"),
    (set_in_place, "the likelihood of 'obs' differs"),
    (set_outcomes, "the observations of 'obs' that the model closes over"),
    (
        set_family,
        r"the prior of 'w' differs: a latent, Normal of shape .* in the file; a latent, Laplace of shape .* here",
    ),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A state, and a run's checkpoint, of a model that closes over its data."""
    folder, pvi = tmp_path_factory.mktemp("files"), make("mask")
    with pytest.warns(UserWarning, match="full pass"):
        pvi.run(KEY, 1, checkpoint=folder / "run", progress_bar=False)
    pvi.save(folder / "state", pvi.load(folder / "run"))
    return folder


@pytest.mark.parametrize("change,message", OTHERS, ids=[change.__name__ for change, _ in OTHERS])
def test_another_model_s_file_is_refused_by_what_differs(files, change, message, monkeypatch):
    make("mask").load(files / "state")
    change(monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        make("mask").load(files / "state")
    with pytest.raises(CheckpointError, match=message):
        make("mask").run(KEY, 2, checkpoint=files / "run", progress_bar=False)


def test_other_settings_of_the_start_are_refused(files):
    with pytest.raises(CheckpointError, match="written with init_sites 'auto', but this PVI has 'prior'"):
        make("mask", init_sites="prior").run(KEY, 2, checkpoint=files / "run", progress_bar=False)
    other = PVI(
        Partition(HOLDER.mask, "data", LABELS), AutoMultivariateNormal(HOLDER.mask, init_scale=0.5), solver=Conjugate()
    )
    with pytest.raises(
        CheckpointError, match=r"init_scale=0.1\), but this PVI has AutoMultivariateNormal\(init_scale=0.5"
    ):
        other.load(files / "state")


def test_digests_without_constants_let_other_data_pass(files, monkeypatch):
    """A planted fault."""
    pvi = make("mask")
    state = pvi.load(files / "state")
    monkeypatch.setattr(closures._Graph, "number", lambda self, value: self.hash("number"))
    pvi.save(files / "blind", state)
    set_in_place(monkeypatch)
    make("mask").load(files / "blind")


def test_digests_are_salted(files, fitted):
    pvi, state = fitted
    headers = []
    for name in ("a", "b"):
        pvi.save(files / name, state)
        headers.append(read_checkpoint(files / name).header)
    assert headers[0]["salt"] != headers[1]["salt"]
    assert all(a[2:] != b[2:] for a, b in zip(headers[0]["model"].values(), headers[1]["model"].values(), strict=True))
    run = read_checkpoint(files / "run").header
    # Without salt, whoever guesses the data could have made a table of their digests before.
    assert digits(((), {}), run["salt"]) in str(run)
    assert digits(((), {})) not in str(run)


# -------------------------------------------------------------------------------------------------- threads and pickles


def test_threads_take_turns(fitted, near):
    """Fits of PVIs of their own, and of one that all share."""
    shared, state = fitted
    data, wanted, found, errors = data_of("args"), moments(*fitted), [None] * 4, []

    def work(place):
        try:
            pvi = make("args") if place % 2 else shared
            found[place] = moments(pvi, fit(pvi, data))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    np.testing.assert_allclose(found, [wanted] * 4, **near)


def test_pickles(fitted, near):
    (pvi, state), data = fitted, data_of("args")
    again = pickle.loads(pickle.dumps(pvi))
    assert again._followed.programs is None
    np.testing.assert_allclose(again.evaluate(state, *data), pvi.evaluate(state, *data), **near)
    np.testing.assert_allclose(again.get_params(state)["auto_loc"], pvi.get_params(state)["auto_loc"], **near)
    with_optim = make("args", optim=numpyro.optim.Adam(0.1))
    with pytest.raises(PVIError, match=r"for its optim .* pvi.save\(path, state\)"):
        pickle.dumps(with_optim)
    assert copy.copy(with_optim).optim is with_optim.optim


# --------------------------------------------------------------------------------------------------- what reviews have found


def test_a_wide_prior_beside_a_tight_one_is_not_rounding():
    held = {"precision": np.diag([1e6, 1.0]), "precision_mean": np.array([0.0, 1.0])}
    assert nearly_same(held, {**held, "precision": held["precision"] * (1 + 1e-12)})
    assert not nearly_same(held, {**held, "precision": np.diag([1e6, 6.25])})
    assert not nearly_same(held, {**held, "precision_mean": np.array([0.0, 0.4])})


def test_what_a_model_writes_into_is_followed_in_what_it_held_before():
    config, calls = {"sd": 1.0}, []

    def model():
        calls.append(config.setdefault("rows", 3))

    unread = {id(config): (config, 1), id(calls): (calls, 0)}
    before = Snapshot((model,), unread=unread)
    model()
    assert Snapshot((model,), unread=unread) == before
    config["sd"] = 2.0
    assert Snapshot((model,), unread=unread) != before


def test_data_that_were_verified_keep_no_programs_alive_and_stay_out_of_pickles(fitted):
    followed, (_, state) = Followed((test_a_wide_prior_beside_a_tight_one_is_not_rounding,)), fitted
    memory, data = Memory(followed), [jnp.array([1.0, jnp.nan])]
    memory.keep(state, data)
    assert memory.has(state, [jnp.array([1.0, jnp.nan])]) and not memory.has(state, [jnp.array([2.0, jnp.nan])])
    old, followed.programs = weakref.ref(followed.programs), Program(len)
    gc.collect()
    assert old() is None and not memory.has(state, data)
    assert pickle.loads(pickle.dumps(memory))._known == []


# ------------------------------------------------------------------------------------------------------------- clients


def _noisy(y):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(w, NOISE), obs=y)


def _own(label):
    return Client(_noisy, AutoMultivariateNormal(_noisy), label, Y[label == LABELS], solver=Conjugate())


RUNTIMES = {
    "rows dealt out": lambda: (InProcess(), Partition(_noisy, "data", LABELS), (Y,)),
    "rows of their own": lambda: (InProcess(clients=[_own(0), _own(1)]), _noisy, ()),
    "in sums": lambda: (SummedClients(sums=InMemorySums([_summand(0), _summand(1)])), _noisy, ()),
}


def _summand(label):
    return Summand(_noisy, AutoMultivariateNormal(_noisy), label, Y[label == LABELS], solver=Conjugate())


SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == "in sums" else name for name in RUNTIMES]


@pytest.mark.parametrize("name", SLOW)
def test_clients_follow_what_the_model_closes_over(name, monkeypatch):
    runtime, model, args = RUNTIMES[name]()
    schedule = Synchronous(damping=0.5)
    pvi = PVI(model, AutoMultivariateNormal(_noisy), solver=Conjugate(), schedule=schedule, runtime=runtime)
    for noise in (0.5, 2.0):
        monkeypatch.setitem(globals(), "NOISE", noise)
        state = pvi.run(KEY, 40, *args, progress_bar=False).state
        precision = float(pvi.posterior(state)["w"].variance) ** -1
        assert abs(precision - (0.25 + N / noise**2)) < 1e-4 * precision


def test_a_client_whose_module_says_something_else_is_refused_by_name(monkeypatch):
    """As in a process of its own, where the module is read anew; planted: what is the same is taken."""
    pvi = PVI(Partition(_noisy, "data", LABELS), AutoMultivariateNormal(_noisy), solver=Conjugate())
    state, arguments = pvi.init(KEY, Y), split_arguments((jnp.asarray(Y),), {})
    first, second = with_digests(shares_of(pvi._engine, state, *arguments))
    first.respondent({})
    monkeypatch.setitem(globals(), "NOISE", 2.0)
    with pytest.raises(PVIError, match="client 1 is not the one that is fitted: the likelihood of 'obs' differs"):
        second.respondent({})
    monkeypatch.delitem(globals(), "NOISE")
    with pytest.raises(
        PVIError, match=r"client 1 cannot be traced there \(NameError: name 'NOISE'.* could be where the fit is"
    ):
        second.respondent({})
