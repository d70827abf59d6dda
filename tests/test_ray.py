"""Groups in actors of Ray: the fit is that of one process, whatever dies, hangs or is slow in the meantime."""

import collections
import importlib
import os
import pickle
import signal
import subprocess
import sys
import types
from functools import partial

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.clients import Ray, _ray
from numpyro_pvi.clients._ray import Actors, Crew
from numpyro_pvi.errors import ClientError, PVIError
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import SNEP, NaturalGradient, PowerEP
from tests import ray_faults
from tests.client_model import both, family_client_of, line, logistic
from tests.laws.models import rows

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'numpyro_pvi[ray]'")
pytestmark = pytest.mark.once

X, _, Y = rows(12)
LABELS = np.array(["east", "north", "south"])[np.arange(12) % 3]
KEY = jax.random.key(0)
REAL = Asynchronous(delays="real")
# Rounds until q has settled: groups that are not heard move by what they moved last, so that nothing ends without them.
LIMIT = {"num_steps": 100_000, "tol": 1e-10}


def make(runtime=None, solver=None, schedule=None):
    partition = Partition(logistic, "data", LABELS)
    return PVI(partition, AutoMultivariateNormal(logistic), solver=solver, schedule=schedule, runtime=runtime)


def fit(pvi, num_steps=3, **options):
    return pvi.run(KEY, num_steps, X, Y, progress_bar=False, **options)


def sites_of(result):
    return jax.device_get(result.state.sites)


def assert_same(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-300))


def assert_law(pvi, result):
    """Prior plus sites is the q that users read."""
    state = result.state
    sites = [pvi.site(state, label) for label in state.groups]
    precision = np.diag([0.25, 0.25]) + sum(np.asarray(site.precision) for site in sites)
    vector = sum(np.asarray(site.precision_mean) for site in sites)
    factor = np.asarray(result.params["auto_scale_tril"])
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(precision), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.params["auto_loc"], np.linalg.solve(precision, vector), rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def here():
    """The same fits in one process, each made once."""
    made = {}

    def of(solver=None, schedule=None, num_steps=3):
        name = solver, schedule, num_steps
        if name not in made:
            made[name] = sites_of(fit(make(None, solver, schedule), num_steps))
        return made[name]

    return of


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, begun once: nothing is told to anybody outside of it."""
    # Ray has its workers wait for all other programs of a machine (nice 15), and a busy one does not come to them.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    yield ray.init(num_cpus=2, object_store_memory=100 << 20, _node_ip_address="127.0.0.1", **quiet)
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where actors load their rows, and look for what is to go wrong."""
    path = tmp_path_factory.mktemp("rows")
    for label in np.unique(LABELS):
        np.savez(path / f"{label}.npz", X=X[label == LABELS], Y=Y[label == LABELS])
    np.savez(path / "all.npz", X=X, Y=Y, labels=LABELS)
    return path


@pytest.fixture(scope="module")
def runtime(cluster, folder):
    """Two actors, for two groups and for one, which load their rows; every test's fits are with these."""
    runtime = Ray(wait=8.0, tries=12, groups_per_actor=2, rows=partial(ray_faults.load, str(folder)))
    yield runtime
    runtime.close()


@pytest.mark.parametrize(
    ("solver", "schedule"),
    [
        (None, Synchronous()),
        (None, StochasticSubset(k=2)),
        (None, Sequential()),
        (None, Asynchronous(delays=("exponential", 1.0))),
        (PowerEP(), Synchronous()),
        (SNEP(), Synchronous()),
    ],
    ids=["synchronous", "subset", "sequential", "asynchronous", "ep", "snep"],
)
def test_trajectories_are_those_of_one_process(runtime, here, solver, schedule, tolerance):
    pvi = make(runtime, solver, schedule)
    result = fit(pvi)
    assert_same(sites_of(result), here(solver, schedule), tolerance)
    assert_law(pvi, result)


def test_a_driver_that_is_given_no_row(cluster, folder, here, tolerance):
    """Actors make their own clients; one that dies is begun anew, and is told what its rows are taken for."""
    clients = {x: partial(ray_faults.client_of, str(folder), x) for x in ("south", "east", "north")}
    with pytest.raises(PVIError, match=r"Ray\(rows=..., clients=...\)"):
        Ray(rows=partial(ray_faults.load, str(folder)), clients=clients)
    runtime = Ray(clients=clients, groups_per_actor=3)
    pvi = PVI(logistic, AutoMultivariateNormal(logistic), schedule=Sequential(), runtime=runtime)
    try:
        state = pvi.init(KEY)
        (folder / "north.kill").touch()
        result = pvi.run(KEY, 3, init_state=state, progress_bar=False)
    finally:
        runtime.close()
    assert not (folder / "north.kill").exists() and runtime.restarts["north"] == 1
    assert_law(pvi, result)
    assert_same(sites_of(result), here(None, Sequential()), tolerance)


@pytest.mark.slow
def test_own_latents_and_params_in_an_actor(cluster, tolerance):
    """What rows keep for themselves stays in the actor, whose trajectory is that of one process."""
    counts = np.random.default_rng(5).poisson(1.5, 12)

    def fit_of(runtime):
        pvi = PVI(Partition(both, "data", LABELS), AutoMultivariateNormal(both), Adam(0.05), runtime=runtime)
        result = pvi.run(KEY, 2, X, counts, progress_bar=False)
        return result.state.sites.groups, result.params["spread"], result.losses

    runtime = Ray(groups_per_actor=3)
    try:
        assert_same(fit_of(runtime), fit_of(None), tolerance)
    finally:
        runtime.close()


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "own"), [(NaturalGradient(), True), (PowerEP(), False)], ids=["own", "dealt out"])
def test_families_in_an_actor_that_is_killed(cluster, solver, own):
    """By signal 9 after a round, with all its clients: turns over components go on, with memories of the server's."""
    x, names, how = X[:, 0], ("east", "north", "south"), {"solver": solver, "schedule": Sequential()}
    split, guide = Partition(line, "data", LABELS), AutoExponentialFamily
    wanted = PVI(split, guide(line), **how).run(KEY, 3, x, Y, progress_bar=False)
    makers = {n: partial(family_client_of, n, solver) for n in names} if own else {}
    runtime, killed = Ray(groups_per_actor=3, clients=makers), []

    def kill(done, state, info):
        if done == 1:
            killed.extend(runtime.processes.values())
            os.kill(killed[0], signal.SIGKILL)

    pvi = PVI(line if own else split, guide(line), runtime=runtime, **how)
    try:
        found = pvi.run(KEY, 3, *(() if own else (x, Y)), callback=kill, progress_bar=False)
        # Who was being asked is begun anew: one or more of the three.
        assert len(killed) == 1 and runtime.restarts and killed[0] not in runtime.processes.values()
    finally:
        runtime.close()
    assert_same((found.state.sites.groups, found.losses), (wanted.state.sites.groups, wanted.losses), 1e-8)


@pytest.fixture(scope="module")
def real(runtime):
    """A fit whose sites are absorbed as they arrive, and whose programs are compiled."""
    pvi = make(runtime, None, REAL)
    fit(pvi, 1)
    return pvi


@pytest.fixture(scope="module")
def limit(here):
    """Sites where nothing moves any more."""
    return here(None, None, 40)


def assert_at_limit(pvi, result, limit):
    assert result.converged
    assert_law(pvi, result)
    assert_same(sites_of(result), limit, 1e-8)


def test_sites_are_absorbed_as_they_arrive(real, runtime, limit):
    """To the limit of one process, on a clock that runs in seconds; no round waits for a look."""
    before = runtime.traffic
    result = fit(real, **LIMIT)
    assert_at_limit(real, result, limit)
    spent = [b - a for a, b in zip(before, runtime.traffic, strict=True)]
    # Rounds of three absorbed visits; looks at most before the first.
    assert spent[2] == 3 * len(result.losses) and spent[1] <= 2
    assert 0 < float(result.state.report.clock) < 120
    assert runtime.workers.startswith("2 of 2 workers live, 3 clients, ") and len(set(runtime.processes.values())) == 2
    np.testing.assert_allclose(result.losses[-1], real.evaluate(result.state, X, Y), rtol=1e-9)


@pytest.mark.slow
def test_an_actor_that_dies_in_the_middle_of_a_round_is_begun_anew(runtime, folder, here, tolerance):
    """By signal 9, after the site was made and before it was sent: the trajectory is that of one process."""
    pvi = make(runtime, None, Sequential())
    (folder / "north.kill").touch()
    before = runtime.restarts.get("north", 0)
    result = fit(pvi)
    assert not (folder / "north.kill").exists() and runtime.restarts["north"] == before + 1
    assert_law(pvi, result)
    assert_same(sites_of(result), here(None, Sequential()), tolerance)


def test_an_actor_that_dies_while_others_are_absorbed_is_begun_anew(real, runtime, folder, limit):
    before = runtime.restarts.get("north", 0)
    (folder / "north.kill").touch()
    result = fit(real, **LIMIT)
    assert not (folder / "north.kill").exists() and runtime.restarts["north"] == before + 1
    assert f", {runtime.traffic.restarts} clients begun anew" in str(result.info)
    assert_at_limit(real, result, limit)


def test_an_actor_that_never_answers_is_named_and_begun_anew(real, runtime, folder, limit, caplog):
    before = runtime.restarts.get("south", 0)
    (folder / "south.hang").touch()
    with caplog.at_level("WARNING", "numpyro_pvi"):
        result = fit(real, **LIMIT)
    # On a busy machine one that is merely late may be begun anew as well.
    assert runtime.restarts["south"] > before
    assert "the actor of client 'south' has not answered and is begun anew" in caplog.text
    assert_at_limit(real, result, limit)


def test_nobody_waits_for_a_slow_actor(real, runtime, folder, limit):
    """Twenty times slower: the others go on, and its stale sites count for less, to the same limit."""
    before = runtime.restarts
    # "south" is alone in its actor.
    (folder / "south.slow").write_text("0.2")
    try:
        result = fit(real, **LIMIT)
    finally:
        (folder / "south.slow").unlink()
    assert runtime.restarts == before
    assert int(np.max(result.trace.staleness)) > 3
    assert_at_limit(real, result, limit)


def test_a_driver_that_is_killed_goes_on_from_its_checkpoint(cluster, runtime, folder, here, tmp_path, tolerance):
    path = tmp_path / "run.ckpt"
    address = cluster.address_info["gcs_address"]
    command = [sys.executable, "-m", "tests.ray_faults", address, str(folder), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr[-2000:]
    pvi = make(runtime)
    result = fit(pvi, 6, checkpoint=path, checkpoint_every=1)
    assert "(3 of them before, as the checkpoint has them)" in result.message
    assert_law(pvi, result)
    assert_same(sites_of(result), here(None, None, 6), tolerance)


def test_actors_that_nobody_needs_and_those_of_an_ended_session_are_let_go():
    crew = Crew({})
    crew.attend(3, "first")
    crew._handles.update({index: object() for index in range(3)})
    crew.attend(2, "first")
    assert sorted(crew._handles) == [0, 1]
    crew.attend(2, "second")
    assert not crew._handles


class Staged:
    """Ray with a clock of its own, and one actor after another in one place: each is done with its question so long after it began.

    Args:
        acts: of each actor, seconds from when it has begun to its answer (negative: to its death; infinite: never).
        begins: seconds that each takes to begin.
    """

    exceptions = types.SimpleNamespace(RayError=RuntimeError, RayTaskError=ValueError)

    def __init__(self, acts, begins=0.1):
        self.now, self.when, self.dismissed = 0.0, {}, []
        self.acts, self.begins, self.number = acts, begins, 0
        self.restarts, self.processes = collections.Counter(), {}
        self.begin = types.SimpleNamespace(remote=lambda orders: self.happens("begin", self.begins))
        self.answer = types.SimpleNamespace(
            remote=lambda place, data: self.happens("answer", self.begins + abs(self.act))
        )

    @property
    def act(self):
        return self.acts[self.number]

    def happens(self, what, after):
        self.when[what, self.number] = self.now + after
        return what, self.number

    def actor(self, index):
        return self

    def dismiss(self, index):
        self.dismissed.append(self.now)
        self.number += 1

    def wait(self, refs, num_returns, timeout):
        first = min(refs, key=self.when.get)
        if self.when[first] <= self.now + timeout:
            self.now = max(self.now, self.when[first])
            return [first], []
        self.now += timeout
        return [], refs

    def get(self, ref):
        if ref[0] == "answer" and self.acts[ref[1]] < 0:
            raise RuntimeError("dead")
        return b"answer" if ref[0] == "answer" else 1


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "half of the wait is enough"])
def test_an_actor_begun_anew_has_all_of_its_time_again(fault, monkeypatch):
    """Begun near half of the wait, and done with its question before its own is over; one that hangs is replaced when it is."""
    if fault:
        due = Actors._due
        monkeypatch.setattr(Actors, "_due", lambda self: {i: t - 0.5 * self._wait for i, t in due(self).items()})

    def heard(*acts):
        stage = Staged(acts)
        monkeypatch.setattr(_ray, "_ray", lambda: stage)
        monkeypatch.setattr(_ray, "time", types.SimpleNamespace(monotonic=lambda: stage.now))
        actors = Actors(("east",), [None], stage, 1, wait=10.0, tries=5)
        for _ in range(9):
            # As it is repeated by whoever asks.
            actors.send(0, b"question")
            if actors.receive(10.0) is not None:
                break
        return stage

    stage = heard(-4.5, 8.0, 1.0)
    if fault:
        assert len(stage.dismissed) > 1
        return
    # The first has died 4.5 seconds after it had begun.
    assert stage.dismissed == pytest.approx([4.6]) and stage.now == pytest.approx(4.6 + 0.1 + 8.0)
    stage = heard(-4.5, np.inf, 1.0)
    assert stage.dismissed == pytest.approx([4.6, 14.7]) and stage.restarts["east"] == 2


def test_what_cannot_be_is_refused_by_name(cluster, folder):
    """Rows that are others than those of the plan, and an actor that dies of every question."""
    with pytest.raises(ClientError, match=r"rows\('north'\) has loaded arrays of shapes") as caught:
        fit(make(Ray(groups_per_actor=3, rows=lambda label: (X[:2], Y[:2]) if label == "north" else rows_of(label))), 1)
    assert caught.value.label == "north"


def rows_of(label):
    return X[label == LABELS], Y[label == LABELS]


def test_settings_are_refused_by_name(monkeypatch):
    with pytest.raises(PVIError, match=r"groups_per_actor=0.*positive int"):
        Ray(groups_per_actor=0)
    with pytest.raises(PVIError, match=r"rows=3.*function of a label"):
        Ray(rows=3)
    with pytest.raises(PVIError, match="options=1.*dict of Ray's options"):
        Ray(options=1)
    with pytest.raises(PVIError, match="max_restarts.*Leave it out"):
        Ray(options={"max_restarts": 3})
    again = pickle.loads(pickle.dumps(Ray(groups_per_actor=3)))
    assert again.groups_per_actor == 3 and again.traffic.trips == 0

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PVIError, match=r"not installed: pip install 'numpyro_pvi\[ray\]'"):
        Ray()
