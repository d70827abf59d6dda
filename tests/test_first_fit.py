"""What a first fit costs: programs are counted, kept with their PVI, and never stale."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections import OrderedDict

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tqdm
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi import _compiling as compiling
from numpyro_pvi._closures import ModelPrograms
from numpyro_pvi._compiling import ROUNDS, Program, Programs, level_of, look, look_again, work_of
from numpyro_pvi.factors import _probe, model_work

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
_counts: list[list[str]] = []


def _listen(event: str, duration: float, **about: str) -> None:
    if event.endswith("backend_compile_duration"):
        for count in _counts:
            count.append(str(about.get("fun_name", "?")))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def programs():
    """Names of the programs that are compiled (or fetched from a folder) meanwhile."""
    count: list[str] = []
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


def logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def schools(y):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("n", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * z, 1.0), obs=y)


def counts(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def waits(y):
    rate = numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


def precision(y):
    """Of no use to start from under its prior: the guide's start is looked at."""
    tau = numpyro.sample("tau", dist.Gamma(1e-3, 1e-3))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(0.0, tau**-0.5), obs=y)


def waves(y):
    """Without structure in its latents."""
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.arctan2(a, 3.0 + b**2), 1.0), obs=y)


X, Y = rng.normal(size=(13, 2)), rng.integers(0, 2, 13)
# The most that a first run may compile, with whatever this process has not compiled yet. It only ever goes down.
RATCHET = (
    (logistic, AutoMultivariateNormal, (X, Y), 9),
    (schools, AutoMultivariateNormal, (rng.normal(size=13),), 10),
    (counts, AutoExponentialFamily, (rng.poisson(3.0, 13),), 22),
    (precision, AutoMultivariateNormal, (rng.normal(size=13),), 10),
)


@pytest.fixture(scope="module", autouse=True)
def options():
    """What this XLA knows of the levels' options is found out once a process, by a program that is then compiled again."""
    for level in ("cheap", "middle", "full"):
        Program(lambda x: x + 1)(jnp.zeros(()), level=level)
    # Nor do small programs that fits of families share count for one of them, whichever tests came before.
    PVI(Partition(waits, "n", np.arange(11) % 3), AutoExponentialFamily(waits)).init(KEY, rng.exponential(size=11))


@pytest.fixture(scope="module")
def regression():
    return PVI(Partition(logistic, "n", np.arange(13) % 3), AutoMultivariateNormal(logistic))


@pytest.mark.parametrize(("model", "guide", "data", "most"), RATCHET)
def test_programs_of_a_first_run_and_none_of_a_second(model, guide, data, most, regression):
    pvi = regression if model is logistic else PVI(Partition(model, "n", np.arange(13) % 3), guide(model))
    with programs() as first:
        result = pvi.run(KEY, 2, *data, tol=1e-12, progress_bar=False)
    assert 2 < len(first) <= most, first
    with programs() as second:
        again = pvi.run(KEY, 2, *data, tol=1e-12, progress_bar=False)
    assert second == []
    np.testing.assert_array_equal(again.losses, result.losses)
    # One program for `run` and `update`.
    with programs() as after:
        _, loss = pvi.update(pvi.init(KEY, *data), *data)
    assert [name for name in after if "rounds" in name] == []
    np.testing.assert_array_equal(loss, result.losses[0])


def _passes(program, primitive):
    """How often an operation of the rows' density stands in a program."""

    def count(jaxpr):
        inner = (j for equation in jaxpr.eqns for j in compiling._jaxprs_in(equation))
        return sum(e.primitive.name == primitive for e in jaxpr.eqns) + sum(map(count, inner))

    return count(jax.make_jaxpr(program)().jaxpr)


def _places(pvi, data, primitive):
    """Passes over the rows in the program of rounds, in units of those in one evaluation."""
    data = tuple(jnp.asarray(x) for x in data)
    state, engine = pvi.init(KEY, *data), pvi._engine
    rounds = _passes(lambda: engine.rounds(state, data, {}, jnp.int32(2), jnp.asarray(0.0), 2, False), primitive)
    return rounds / _passes(lambda: engine.loss(state, data, {}, False), primitive)


# By quadrature a round's candidates; by draws the candidates, and the q of the next round's draws with what compares them.
PLACES = {"quadrature": (logistic, (X, Y), "log1p", 1), "draws": (waves, (X[:, 0],), "atan2", 1.7)}


@pytest.mark.parametrize("case", PLACES)
def test_the_first_evaluation_stands_where_those_of_rounds_do(case, regression, monkeypatch):
    model, data, primitive, most = PLACES[case]
    pvi = (
        regression
        if model is logistic
        else PVI(Partition(model, "n", np.arange(13) % 3), AutoMultivariateNormal(model))
    )
    found = _places(pvi, data, primitive)
    assert found <= most
    # A planted fault: a place of its own.
    monkeypatch.setattr(type(pvi._engine), "_opens", lambda self, *about: False)
    assert _places(pvi, data, primitive) > found + 0.5


def test_what_is_forgotten_is_compiled_again():
    kept = Programs()
    for _ in range(2):
        with programs() as found:
            kept(lambda x: 5 * x, np.ones(3))
        assert len(found) == 1
        with programs() as found:
            kept(lambda x: 5 * x, np.ones(3))
        assert found == []
        kept.clear()


def test_looks_follow_what_they_close_over():
    kept, table, offset = Programs(), np.arange(3.0), jnp.asarray(1.0)

    @jax.custom_jvp
    def inner(x):
        return x * table[1]

    inner.defjvp(lambda p, t: (inner(*p), t[0]))

    def read(x):
        return {"a": inner(x) + offset, "b": jax.lax.map(lambda row: row + jnp.asarray(table).sum(), x)}

    x = jnp.ones(2)
    for place, count in ((3.0, 1), (7.0, 2)):
        # A number taken out by Python is another program, an array another argument.
        table[1] = place
        found = kept(read, x)
        np.testing.assert_allclose(found["a"], place + 1)
        np.testing.assert_allclose(found["b"], 1 + table.sum())
        assert len(kept) == count
    offset = jnp.asarray(5.0)
    np.testing.assert_allclose(kept(read, x)["a"], 12)
    assert len(kept) == 2


def test_a_look_at_python_is_never_kept():
    kept, answer = Programs(), np.asarray(1.0)

    def read(x):
        return jax.pure_callback(lambda _: answer, jax.ShapeDtypeStruct((), x.dtype), x)

    assert float(kept(read, jnp.zeros(()))) == 1
    answer = np.asarray(2.0)
    assert float(kept(read, jnp.zeros(()))) == 2


def test_few_looks_are_kept(monkeypatch):
    kept = Programs()
    monkeypatch.setattr(compiling, "_MOST_KEPT", 2)
    for size in (1, 2, 3):
        kept(lambda x: 2 * x, np.ones(size))
    assert len(kept) == 2
    kept.clear()
    assert len(kept) == 0


def test_programs_work_wherever_they_are_called():
    double = Program(lambda x, times: times * x, static=("times",))
    x = jnp.arange(3.0)
    for level in ("cheap", "middle", "full", "plain", None):
        np.testing.assert_array_equal(double(x, times=2, level=level), 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: double(x, times=2))(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda: double(np.arange(3.0), times=2))(), 2 * x)
    np.testing.assert_array_equal(jax.vmap(lambda x: double(x, times=2))(x), 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: double(x, times=2).sum())(x), [2, 2, 2])
    np.testing.assert_array_equal(look(lambda x: 2 * x, x), 2 * x)


def test_what_is_mapped_over_states_is_compiled_as_what_is_not():
    """Under ``vmap`` alone no outer program decides the level; within one that is being written none can be asked for."""
    double, x = Program(lambda x: 2 * x), jnp.arange(3.0)
    jax.vmap(lambda x: double(x, level="cheap"))(x)
    assert list(double._ways) == ["cheap"]
    np.testing.assert_array_equal(jax.jit(jax.vmap(double))(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(jax.grad(double))(x), [2, 2, 2])
    np.testing.assert_array_equal(jax.grad(lambda x: jax.vmap(double)(x).sum())(x), [2, 2, 2])
    assert "plain" in double._ways


def test_an_option_that_is_gone_takes_no_other_with_it(monkeypatch):
    """Newer XLAs drop options: the rest of a level is what makes programs compile several times faster."""
    known = compiling._OPTIONS["cheap"]
    monkeypatch.setitem(compiling._OPTIONS, "cheap", {"xla_no_such_option": 1, **known})
    monkeypatch.setattr(compiling, "_unknown", set(compiling._unknown))
    double = Program(lambda x: 2 * x)
    for _ in range(2):
        assert float(double(jnp.asarray(2.0), level="cheap")) == 4
    assert list(double._ways) == ["cheap"]
    assert "xla_no_such_option" in compiling._unknown
    assert compiling._options("cheap")["xla_backend_optimization_level"] == 0


@pytest.mark.parametrize("level", ["cheap", "middle", "full"])
def test_two_sums_of_one_large_array_are_right(level):
    """What Beta and Dirichlet log densities are made of, which jaxlib 0.10.2 gets wrong on CPU beyond 65,536 numbers."""
    known = np.random.default_rng(0)
    many, spread = (known.uniform(size=s).astype(np.float32) for s in ((400, 150, 2), (150, 2)))
    sums = Program(lambda many, spread: (spread * many).sum(-1) + many.sum(-1))(many, spread, level=level)
    np.testing.assert_allclose(sums, ((1 + spread.astype(float)) * many).sum(-1), rtol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="levels are XLA's on CPU")
@pytest.mark.parametrize("least, level", [(True, "cheap"), (False, "middle")])
def test_whoever_asks_jax_for_the_least_optimising_gets_it(least, level):
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", least)
    try:
        double = Program(lambda x: 2 * x)
        assert float(double(jnp.asarray(2.0), level="middle")) == 4
        assert list(double._ways) == [level]
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def test_levels_follow_sizes():
    assert [level_of(1000, often) for often in (ROUNDS, None)] == ["cheap", "cheap"]
    assert [level_of(10**6, often) for often in (ROUNDS, None)] == ["middle", "cheap"]
    assert [level_of(10**12, often) for often in (ROUNDS, None)] == ["full", "middle"]
    x = np.ones((10, 4))
    assert work_of(jax.make_jaxpr(lambda x: x @ x.T)(x).jaxpr) >= 400
    once, often = (jax.make_jaxpr(lambda x, n=n: jax.lax.fori_loop(0, n, lambda _, x: x + 1, x))(x) for n in (1, 50))
    assert work_of(often.jaxpr) >= 40 * work_of(once.jaxpr)
    sizes = [model_work(logistic, (np.ones((n, 3)), np.ones(n, int)), {}) for n in (100, 1000)]
    assert 8 < sizes[1] / sizes[0] < 11


def test_values_follow_what_the_model_closes_over(monkeypatch):
    """A second plan of the same PVI sees data that have changed, and not those of the program that it keeps."""
    offset, seen = np.zeros(13), []

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("n", 13):
            numpyro.sample("y", dist.Normal(X @ w + jnp.asarray(offset), 1.0), obs=y)

    def seeing(*args):
        found = look_again(*args)
        seen.append(found[0])
        return found

    monkeypatch.setattr(_probe, "look_again", seeing)
    pvi = PVI(Partition(model, "n", np.arange(13) % 3, mode="mask"), AutoMultivariateNormal(model))
    for value in (0.0, 3.0):
        offset[:] = value
        pvi.init(KEY, X, Y * 1.0)
    assert np.abs(seen[0]["reference"] - seen[1]["reference"]).max() > 0.1


_bend = np.zeros(1)


def bent(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w + jnp.asarray(_bend) * w[0] * w[1], 1.0), obs=y)


def _plans(monkeypatch):
    """Under other keys, rows and closed-over values, one after another: traces of a plan, and whether it is as if traced."""
    traced, look_at = [], _probe.trace_look
    monkeypatch.setattr(_probe, "trace_look", lambda *args: traced.append(0) or look_at(*args))
    pvi = PVI(Partition(bent, "n", np.arange(11) % 3), AutoMultivariateNormal(bent))
    for seed, order, bend in ((0, 1, 0.0), (0, 1, 0.0), (1, 1, 0.0), (0, -1, 0.0), (0, 1, 3.0)):
        monkeypatch.setattr(sys.modules[__name__], "_bend", np.full(1, bend))
        data = np.random.default_rng(3).normal(size=(11, 2))[::order], np.arange(11.0)
        before, found = len(traced), pvi.init(jax.random.key(seed), *data)
        count = len(traced) - before
        with monkeypatch.context() as patch:
            patch.setattr(ModelPrograms, "settled", False)
            expected = pvi.init(jax.random.key(seed), *data)
        ours, theirs = (jax.device_get(jax.tree.leaves((x.prior, x.sites))) for x in (found, expected))
        yield count, found.plan == expected.plan and all(map(np.array_equal, ours, theirs))


def test_a_plan_is_traced_once_and_looks_at_the_values_of_each_call(monkeypatch):
    """Other keys and data are looked at without a trace; what the model closes over makes a new one."""
    assert list(_plans(monkeypatch)) == [(1, True), (0, True), (0, True), (0, True), (1, True)]


def test_what_no_value_tells_is_traced_anew(monkeypatch):
    """An object among the arguments may have changed; so may JAX's settings."""
    traced, look_at = [], _probe.trace_look
    monkeypatch.setattr(_probe, "trace_look", lambda *args: traced.append(0) or look_at(*args))

    class Settings:
        square = False

    def model(X, y, settings):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("n", X.shape[0]):
            loc = X @ w
            numpyro.sample("y", dist.Normal(loc**2 if settings.square else loc, 1.0), obs=y)

    settings, data = Settings(), (np.random.default_rng(3).normal(size=(11, 2)), np.arange(11.0))
    pvi = PVI(Partition(model, "n", np.arange(11) % 3), AutoMultivariateNormal(model))
    found = []
    for settings.square in (False, True):
        found.append(pvi.init(KEY, *data, settings).plan.partition.likelihood)
    assert found == ["quadratic", "draws"]
    plain = PVI(Partition(bent, "n", np.arange(11) % 3), AutoMultivariateNormal(bent))
    traced.clear()
    for precision in ("default", "default", "highest"):
        with jax.default_matmul_precision(precision):
            plain.init(KEY, *data)
    assert len(traced) == 2


def test_a_trace_that_outlives_its_model_is_seen(monkeypatch):
    store, make = OrderedDict(), Programs.__init__

    def with_one_store(self):
        make(self)
        self._traced = store

    monkeypatch.setattr(Programs, "__init__", with_one_store)
    assert list(_plans(monkeypatch))[-1] == (0, False)


class _Shown:
    """A stream that keeps what a bar writes."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_the_bar_says_what_is_waited_for(monkeypatch, regression):
    shown, make = _Shown(), tqdm.tqdm.__init__

    def into(self, *args, **kwargs):
        make(self, *args, **kwargs, file=shown, mininterval=0)

    monkeypatch.setattr(tqdm.tqdm, "__init__", into)
    result = regression.run(KEY, 60, X, Y)
    places = [shown.text.index(words) for words in ("planning", "compiling", "| 1/60", "| 60/60")]
    assert places == sorted(places)
    assert result.trace.rounds.tolist() == list(range(1, 61))
    with pytest.raises(ValueError, match="rows"):
        regression.run(KEY, 3, X[:5], Y)


CACHE = """
import json, os, sys
import jax
import numpyro_pvi
before = jax.config.jax_compilation_cache_dir
jax.numpy.zeros(3) + 1
folder = numpyro_pvi.use_compilation_cache(sys.argv[1])
again = numpyro_pvi.use_compilation_cache(sys.argv[1] + "-other")
jax.jit(lambda x: x * 3 + 1)(jax.numpy.ones(5)).block_until_ready()
print(json.dumps([before, folder, again, len(os.listdir(folder)), oct(os.stat(folder).st_mode & 0o777)]))
"""


def test_the_compilation_cache_is_the_users_choice(tmp_path):
    environment = {n: v for n, v in os.environ.items() if not n.startswith("JAX_")}
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-c", CACHE, str(tmp_path / "a" / "b")]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    before, folder, again, files, mode = json.loads(done.stdout.splitlines()[-1])
    assert (before, folder, again, mode) == (None, str(tmp_path / "a" / "b"), folder, "0o700")
    assert files > 0
