"""Long: machines that go and come, and two hundred workers killed in one run."""

import os
import signal
import time

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import Ray
from numpyro_pvi.schedules import Asynchronous
from tests.client_model import logistic
from tests.laws.models import rows

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'numpyro_pvi[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.timeout(3000)]

X, _, Y = rows(24)
LABELS = np.arange(24) % 4
KEY = jax.random.key(0)
LIMIT = {"num_steps": 1_000_000, "tol": 1e-10, "progress_bar": False}
KILLS = int(os.environ.get("NUMPYRO_PVI_TEST_KILLS", "200"))


def make(runtime=None, schedule=None):
    return PVI(
        Partition(logistic, "data", LABELS), AutoMultivariateNormal(logistic), schedule=schedule, runtime=runtime
    )


def assert_at_limit(pvi, result):
    """That of one process; and prior plus sites is the q that users read."""
    assert result.converged
    found, wanted = (jax.device_get(x.state.sites) for x in (result, make().run(KEY, 60, X, Y, progress_bar=False)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-8 * np.abs(b).max())
    sites = [pvi.site(result.state, label) for label in result.state.groups]
    factor = np.asarray(result.params["auto_scale_tril"])
    precision = np.eye(2) / 4 + sum(np.asarray(site.precision) for site in sites)
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(precision), rtol=1e-9)


@pytest.fixture
def quiet(monkeypatch):
    """Nothing is told to anybody outside of this machine."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray has its workers wait for all other programs of a machine (nice 15), and a busy one does not come to them.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    yield {"log_to_driver": False, "logging_level": "ERROR"}
    ray.shutdown()


def test_a_machine_goes_and_another_comes(quiet):
    """With all actors on it, in the middle of a run."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1, resources={"far": 1})
        ray.init(address=cluster.address, **quiet)
        runtime = Ray(wait=60.0, groups_per_actor=2, options={"resources": {"far": 0.1}})
        pvi = make(runtime, Asynchronous(delays="real"))

        def move(done, state, info):
            if done == 2:
                cluster.remove_node(node)
                cluster.add_node(num_cpus=1, resources={"far": 1})

        assert_at_limit(pvi, run(pvi, move))
        # Who shares an actor goes with it, whether or not it was asked.
        assert set(runtime.restarts.values()) == {1} and {label // 2 for label in runtime.restarts} == {0, 1}
        runtime.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(pvi, callback=None, **options):
    settings = LIMIT | options
    return pvi.run(KEY, settings.pop("num_steps"), X, Y, callback=callback, **settings)


def test_two_hundred_workers_are_killed_in_one_run(quiet, tmp_path, monkeypatch):
    """At random, one to all of those that work, after every round; what they had made and not sent is lost, and nothing else.

    Nearly all that a kill costs is a process that begins anew: it imports JAX, and takes its programs from a cache of all of them.
    """
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    ray.init(num_cpus=2, include_dashboard=False, **quiet)
    runtime = Ray(wait=120.0, tries=1000)
    pvi, random = make(runtime, Asynchronous(delays="real")), np.random.default_rng(0)
    killed, waves = [], []

    def kill(done, state, info):
        living = random.permutation([pid for pid in runtime.processes.values() if pid not in killed])
        wave = [int(pid) for pid in living[: random.integers(1, 5)]][: KILLS - len(killed)]
        for pid in wave:
            os.kill(pid, signal.SIGKILL)
        killed.extend(wave)
        waves.append(len(wave))
        return len(killed) >= KILLS

    begun = time.monotonic()
    before = run(pvi, kill, tol=None)
    print(f"{len(killed)} kills in {len(waves)} waves, {(time.monotonic() - begun) / KILLS:.2f} s each")
    result = run(pvi, init_state=before.state)
    assert len(set(killed)) == KILLS and sum(runtime.restarts.values()) >= KILLS
    # Every round absorbs four visits, and nothing else is absorbed: nothing twice.
    absorbed = 4 * (len(before.losses) + len(result.losses))
    assert runtime.traffic.visits == absorbed
    assert_at_limit(pvi, result)
    runtime.close()
