"""The app of examples/federated, as a user runs it: in simulation, and as real processes over TLS."""

import importlib
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from numpyro_pvi import PVI, Partition

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'numpyro_pvi[flower]'")

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "federated"
pytestmark = [pytest.mark.slow, pytest.mark.once]


@pytest.fixture
def app(monkeypatch):
    """The app's modules, which switch float64 on, as these tests have it anyway."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("hospitals_app.task"), importlib.import_module("deploy")


def pooled(task, hospitals, rounds, tol=None):
    """The fit of one process that has all rows, and its posterior's mean and sd."""
    parts = [task.rows_of(hospital) for hospital in hospitals]
    X, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    labels = [hospital for hospital, part in zip(hospitals, parts, strict=True) for _ in part[1]]
    pvi = PVI(Partition(task.model, "patients", labels), task.guide())
    result = pvi.run(jax.random.key(0), rounds, X, y, tol=tol, progress_bar=False)
    found = pvi.posterior(result.state)
    mean = np.append(found["intercept"].mean, found["coefficients"].mean)
    sd = np.sqrt(np.append(found["intercept"].variance, found["coefficients"].variance))
    return mean, sd, result


def test_five_hospitals_in_simulation(app):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'numpyro_pvi[ray]'")
    command = [sys.executable, str(FOLDER / "simulate.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if " +- " in line]
    mean, sd, _ = pooled(app[0], "ABCDE", 20, tol=1e-3)
    np.testing.assert_allclose([float(line[-3]) for line in lines], mean, atol=6e-5)
    np.testing.assert_allclose([float(line[-1]) for line in lines], sd, atol=6e-5)


@pytest.mark.timeout(1800)
def test_two_hospitals_as_real_processes_over_tls(app, tmp_path):
    task, deploy = app
    found = deploy.deploy(tmp_path, "AB", 1, 1500.0)
    mean, sd, result = pooled(task, "AB", 1)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-8)
    np.testing.assert_allclose(found["sd"], sd, rtol=1e-8)
    np.testing.assert_allclose(found["losses"], result.losses, rtol=1e-8)
    assert "running on https://127.0.0.1" in (tmp_path / "superlink.log").read_text()
