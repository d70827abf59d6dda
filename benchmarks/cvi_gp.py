"""``cvi-gp``: Gaussian-process classification by sites of two numbers per row, against the optimum over dense covariances.

Float64 and warm. The kernel is squared exponential with the paper's settings for USPS. With ``--peer DIR`` GPJax's
``fit_natgrads`` runs the same problems, one after another with ours, in an environment of its own that is made in that folder.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import scipy.linalg

from benchmarks import _models, _problems, _report, _subjects

GAP = 0.01
MAX_ROUNDS = 100
JITTER = 1e-6
# Rows from which on a fit takes long enough to be timed once.
LARGE = 1_000
PEER = "gpjax==1.0.0"


@dataclasses.dataclass(frozen=True)
class Case:
    """One data set, with the kernel's log sd and log length-scale."""

    name: str
    X: np.ndarray
    y: np.ndarray
    log_sd: float
    log_length: float

    @property
    def gram(self) -> np.ndarray:
        """K with a jitter of 1e-6 of its diagonal."""
        squares = np.sum(self.X**2, axis=1)
        distance = np.maximum(squares[:, None] + squares - 2 * self.X @ self.X.T, 0.0)
        unit = np.exp(-0.5 * distance * np.exp(-2 * self.log_length))
        return np.exp(2 * self.log_sd) * (unit + JITTER * np.eye(len(self.X)))


def load(folder: Path, quick: bool) -> list[Case]:
    """The data sets that are in a folder; few rows of each for ``--quick``."""
    rows, found = slice(60 if quick else None), []
    if (folder / "usps_3vs5.npz").exists():
        z = np.load(folder / "usps_3vs5.npz")
        X, y = np.r_[z["x_train"], z["x_test"]], np.r_[z["y_train"], z["y_test"]]
        found.append(("usps 3 vs 5", X, y, 5.0, 2.5))
    if (folder / "usps.npz").exists():
        z = np.load(folder / "usps.npz")
        X, y = np.r_[z["x_train_milli"], z["x_test_milli"]] / 1000.0, np.r_[z["y_train"], z["y_test"]]
        kept = (y == 2) | (y == 4)
        found.append(("usps 2 vs 4", X[kept], y[kept] == 4, 5.0, 2.5))
    if (folder / "ionosphere.npz").exists():
        z = np.load(folder / "ionosphere.npz")
        X, y = np.r_[z["x_train"], z["x_test"]], np.r_[z["y_train"], z["y_test"]]
        found.append(("ionosphere", X, y, 2.5, 1.0))
    return [Case(n, np.asarray(X, float)[rows], np.asarray(y, float)[rows], s, w) for n, X, y, s, w in found]


def simulated() -> list[Case]:
    """Points on a line, for ``--quick`` without data."""
    rng = np.random.default_rng(0)
    x = np.linspace(0.0, 1.0, 80)
    y = rng.random(80) < 1 / (1 + np.exp(-4 * np.sin(6 * x)))
    return [Case("line", x[:, None], y.astype(float), 1.0, -1.5)]


def run(options: argparse.Namespace) -> _report.Report:
    """All data sets of the folder; a simulated one where there is no folder."""
    report = _report.Report("cvi-gp")
    with jax.enable_x64(True):
        cases = simulated() if options.data is None else load(Path(options.data), options.quick)
        rows = []
        for case in cases:
            if options.only is None or case.name in options.only:
                rows.append(_compare(case, options))
                print(*rows[-1], flush=True)
    header = ("data", "N", "-ELBO at optimum", "gap of sites by rows", "rounds", "s", "s / round", "Cholesky of K, s")
    if options.peer is not None:
        header = (*header, "GPJax: steps", "s", "of step size", "-ELBO")
    caption = f"warm, to {GAP} nats of the optimum, float64; numbers kept for sites: 2 N"
    report.add_table(caption, header, rows)
    if not options.quick:
        for row in rows:
            report.add_target(f"{row[0]}: |gap|", abs(row[3]), GAP)
            if options.peer is not None:
                report.add_target(f"{row[0]}: seconds of GPJax over PVI's", row[9] / row[5], 1.0, at_least=True)
    return report


def _compare(case: Case, options: argparse.Namespace) -> tuple:
    gram = case.gram
    optimum = _optimum(gram, case.y)
    arrays = jnp.asarray(gram), jnp.asarray(case.y)
    pvi = _subjects.build(_model, _models.equal_labels(len(case.y), 1))
    state = pvi.init(jax.random.key(0), *arrays)
    update, current, losses = jax.jit(pvi.update), state, []
    while len(losses) < MAX_ROUNDS and not (losses and losses[-1] <= optimum + GAP):
        current, loss = update(current, *arrays)
        losses.append(float(loss))
    rounds, key = len(losses), jax.random.key(0)
    factor = jax.jit(jnp.linalg.cholesky)
    times = _report.paired_medians(
        {
            "fit": lambda: pvi.run(key, rounds, *arrays, progress_bar=False, init_state=state).state,
            "factor": lambda: factor(arrays[0]),
        },
        2 if options.quick else 5 if len(case.y) < LARGE else 1,
    )
    row = (case.name, len(case.y), f"{optimum:.4f}", losses[-1] - optimum, rounds, times["fit"])
    row = (*row, times["fit"] / rounds, times["factor"])
    return row if options.peer is None else (*row, *_peer(case, optimum, Path(options.peer)))


def _peer(case: Case, optimum: float, folder: Path) -> tuple:
    """Steps, warm seconds, step size and best negative ELBO of GPJax on the same problem, in a process of its own."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        path, settings = Path(scratch) / "problem.npz", {"log_sd": case.log_sd, "log_length": case.log_length}
        np.savez(path, X=case.X, y=case.y, jitter=JITTER, limit=optimum + GAP, **settings)
        script = Path(__file__).with_name("_gpjax_peer.py")
        done = subprocess.run([python, script, path], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return ("failed",) + (float("nan"),) * 3
    found = json.loads(done.stdout.splitlines()[-1])
    return found["steps"], found["seconds"], found["rate"], found["best"]


def _model(K: Any, y: Any = None) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(K.shape[0]), covariance_matrix=K))
    with numpyro.plate("data", K.shape[0]) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=f[i]), obs=y[i])


def _optimum(gram: np.ndarray, y: np.ndarray) -> float:
    """Negative ELBO at the best Gaussian, in dense covariances and without the package.

    At the optimum ``V^-1 = K^-1 + diag(l)`` and ``m = K a`` with ``a = E f'``, ``l = -E f''`` (Opper and Archambeau): damped
    steps towards that until the ELBO stands still.
    """
    size, eye = len(y), np.eye(len(y))
    target = jnp.asarray(y)

    @jax.jit
    def rows(mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def total(mean: jax.Array, variance: jax.Array) -> jax.Array:
            return jnp.sum(target * mean - _problems.expected_softplus(mean, variance))

        value, (slope, bend) = jax.value_and_grad(total, argnums=(0, 1))(mean, variance)
        return value, slope, -2 * bend

    curvature, linear, step, best = np.zeros(size), np.zeros(size), 1.0, -np.inf
    wanted = None
    for _ in range(1_000):
        proposal = (curvature, linear)
        if wanted is not None:
            proposal = curvature + step * (wanted[0] - curvature), linear + step * (wanted[1] - linear)
        root = np.sqrt(proposal[0])
        # With B = I + R K R = F F', R^2 the precisions: V = K - (F^-1 R K)'(F^-1 R K), and tr B^-1 = N - sum_n R_n^2 V_nn.
        factor = np.linalg.cholesky(eye + root[:, None] * gram * root)
        half = scipy.linalg.solve_triangular(factor, root[:, None] * gram, lower=True)
        variance = np.diag(gram) - np.sum(half**2, axis=0)
        mean = gram @ proposal[1] - half.T @ (half @ proposal[1])
        value, slope, bend = (np.asarray(x) for x in rows(jnp.asarray(mean), jnp.asarray(variance)))
        alpha = proposal[1] - proposal[0] * mean
        divergence = 0.5 * (mean @ alpha - proposal[0] @ variance) + np.sum(np.log(np.diag(factor)))
        elbo = float(value) - divergence
        if elbo < best - 1e-9:
            step *= 0.5
            continue
        if elbo - best < 1e-7:
            return -max(elbo, best)
        curvature, linear = proposal
        wanted, best, step = (bend, slope + bend * mean), elbo, min(1.0, 2 * step)
    return -best
