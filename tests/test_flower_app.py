"""The app of examples/federated, as a user runs it: in simulation, and as real processes over TLS."""

import importlib
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import InMemorySums, Summand, SummedClients
from numpyro_pvi.schedules import Synchronous

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'numpyro_pvi[flower]'")

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'numpyro_pvi[examples]'")

from tests.flower_grid import Fake

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "federated"
pytestmark = pytest.mark.once


@pytest.fixture
def app(monkeypatch):
    """The app's modules, which switch float64 on, as these tests have it anyway."""
    x64 = jax.config.jax_enable_x64
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("hospitals_app.task"), importlib.import_module("deploy")
    jax.config.update("jax_enable_x64", x64)


def moments(pvi, state):
    """The posterior's mean and sd."""
    found = pvi.posterior(state)
    mean = np.append(found["intercept"].mean, found["coefficients"].mean)
    return mean, np.sqrt(np.append(found["intercept"].variance, found["coefficients"].variance))


def pooled(task, hospitals, rounds, tol=None):
    """The fit of one process that has all rows, and its posterior's mean and sd."""
    parts = [task.rows_of(hospital) for hospital in hospitals]
    X, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    labels = [hospital for hospital, part in zip(hospitals, parts, strict=True) for _ in part[1]]
    pvi = PVI(Partition(task.model, "patients", labels), task.guide())
    result = pvi.run(jax.random.key(0), rounds, X, y, tol=tol, progress_bar=False)
    return *moments(pvi, result.state), result


def summed(task, hospitals, rounds):
    """The fit of sums that nobody hides, in one process: mean and sd."""
    clients = [Summand(task.model, task.guide(), hospital, *task.rows_of(hospital)) for hospital in hospitals]
    runtime = SummedClients(sums=InMemorySums(clients))
    pvi = PVI(task.model, task.guide(), schedule=Synchronous(damping=0.5), runtime=runtime)
    return moments(pvi, pvi.run(jax.random.key(0), rounds, progress_bar=False).state)


def simulated(*options):
    """What the command prints and writes."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'numpyro_pvi[ray]'")
    command = [sys.executable, str(FOLDER / "simulate.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return done.stdout


@pytest.mark.slow
def test_five_hospitals_in_simulation(app):
    lines = [line.split() for line in simulated().splitlines() if " +- " in line]
    mean, sd, _ = pooled(app[0], "ABCDE", 20, tol=1e-3)
    np.testing.assert_allclose([float(line[-3]) for line in lines], mean, atol=6e-5)
    np.testing.assert_allclose([float(line[-1]) for line in lines], sd, atol=6e-5)


@pytest.mark.slow
def test_five_hospitals_in_sums_only_in_simulation(app, tmp_path):
    """The real engine, SecAgg+ mod and workflow: to rounding the fit of sums that nobody hides, and in the end one process's."""
    simulated("--secure", "--rounds", "12", "--out", str(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as found:
        mean, sd = summed(app[0], "ABCDE", len(found["losses"]))
        np.testing.assert_allclose(found["mean"], mean, atol=1e-4 * sd.min())
        np.testing.assert_allclose(found["sd"], sd, rtol=1e-4)
        mean, sd, _ = pooled(app[0], "ABCDE", 30)
        assert np.max(np.abs(found["mean"] - mean) / sd) < 0.01 and np.isnan(found["losses"]).all()


def by_hand(task, rounds, length, count):
    """FedAvg of the hospitals' logistic regression, written down without the app's model, objective or strategy."""
    parts = [task.rows_of(hospital) for hospital in task.HOSPITALS]
    precision, w = np.array([1 / 25.0] + [1 / 2.5**2] * 3), np.full(4, 0.01)
    sizes = np.array([len(y) for _, y in parts])
    for _ in range(rounds):
        found = []
        for X, y in parts:
            Z, own = np.column_stack([np.ones(len(y)), X]), w.copy()
            for _ in range(count):
                wrong = 1 / (1 + np.exp(-Z @ own)) - y
                own = own - length * (Z.T @ wrong + precision * own / len(parts)) / len(y)
            found.append(own)
        w = sizes @ np.array(found) / sizes.sum()
    return w


@pytest.mark.filterwarnings("ignore")
def test_fedavg_in_the_app_is_fedavg(app):
    """Flower's own strategy over the hospitals' app, against a few lines of NumPy; planted: hospitals that count alike."""
    task = app[0]
    fedavg, client = (importlib.import_module(f"hospitals_app.{name}") for name in ("fedavg", "client_app"))
    shapes, heard = {"intercept": (), "coefficients": (3,)}, []

    def average():
        grid = Fake(dict.fromkeys("ABCDE", client.app))
        return fedavg.average(grid, shapes, 5, 2, 0.5, 2, lambda *told: heard.append(told))

    found, sent = average()
    mode = np.append(found["intercept"], found["coefficients"])
    np.testing.assert_allclose(mode, by_hand(task, 2, 0.5, 2), rtol=1e-10)
    assert [number for number, _ in heard] == [0, 1, 2] and heard[-1][1]["intercept"] == found["intercept"]
    # Two rounds, five hospitals, there and back; four numbers of eight bytes, and what Flower writes beside them.
    assert sent % 20 == 0 and 32 < sent // 20 < 500
    real = fedavg.descend

    def alike(message, *given):
        reply = real(message, *given)
        reply.content["metrics"]["num-examples"] = 1
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "descend", alike)
        found, _ = average()
    assert abs(float(found["intercept"]) - mode[0]) > 1e-3


@pytest.mark.slow
def test_fedavg_in_simulation(app, tmp_path):
    simulated("--method", "fedavg", "--rounds", "10", "--out", str(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["mean"], by_hand(app[0], 10, 1.0, 5), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hospitals_as_real_processes_over_tls(app, tmp_path):
    task, deploy = app
    found = deploy.deploy(tmp_path, "AB", 1, 1500.0)
    mean, sd, result = pooled(task, "AB", 1)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-8)
    np.testing.assert_allclose(found["sd"], sd, rtol=1e-8)
    np.testing.assert_allclose(found["losses"], result.losses, rtol=1e-8)
    assert "running on https://127.0.0.1" in (tmp_path / "superlink.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hospitals_in_sums_only_as_real_processes(app, tmp_path):
    task, deploy = app
    found = deploy.deploy(tmp_path, "ABC", 1, 1500.0, secure=True)
    mean, sd = summed(task, "ABC", 1)
    np.testing.assert_allclose(found["mean"], mean, atol=1e-4 * sd.min())
    np.testing.assert_allclose(found["sd"], sd, rtol=1e-4)
    assert np.isnan(found["losses"]).all()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hospital_whose_node_is_killed_goes_on_where_it_was(app, tmp_path):
    """Its site is in its own folder and nowhere else; begun again, it is in the sums again."""
    task, deploy = app
    found = deploy.deploy(tmp_path, "ABC", 5, 1500.0, secure=True, lose="C")
    log = (tmp_path / "run.log").read_text()
    assert "client 'C' is now at node" in log
    # Whether it has missed a round or none, it was heard in the last.
    assert "without C" not in log.split("[ROUND 5/5]")[-1]
    mean, sd, _ = pooled(task, "ABC", 30)
    assert np.max(np.abs(found["mean"] - mean) / sd) < 1.0
