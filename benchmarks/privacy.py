"""``privacy``: logistic regression of a1a by ten skewed owners; log score and accuracy against epsilon, of rows and of owners."""

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy.special import logsumexp

from benchmarks import _report
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Sequential
from numpyro_pvi.solvers import DifferentialPrivacy, LocalELBO, NaturalGradient

OWNERS, DELTA = 10, 1e-4
BUDGETS = (math.inf, 5.0, 2.0, 1.0)
# Precision of the prior, of the paper's Table 3 for these data.
PRECISION = 2.8072
KEY = jax.random.key(20)


class Data(NamedTuple):
    """Rows to fit and rows to score, and whose the first are."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    owner: np.ndarray


def model(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0.0, PRECISION**-0.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def skewed(y: np.ndarray, owners: int, rng: np.random.Generator) -> np.ndarray:
    """Whose every row is: shares of both labels differ from owner to owner (Dirichlet), at least eight rows each."""
    owner = np.empty(len(y), int)
    for label in (0, 1):
        mine = rng.permutation(np.flatnonzero(y == label))
        ends = np.cumsum(rng.dirichlet(np.full(owners, 2.0)) * (len(mine) - 4 * owners) + 4).astype(int)[:-1]
        for number, part in enumerate(np.split(mine, ends)):
            owner[part] = number
    return owner


def load(folder: str | None, quick: bool) -> Data:
    """a1a, with a column of ones; a few simulated rows where there is no folder."""
    rng = np.random.default_rng(0)
    if folder is None or not (Path(folder) / "a1a.npz").exists():
        X = np.c_[rng.normal(size=(700, 3)), np.ones(700)]
        y = (rng.random(700) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.5, 0.2]))).astype(float)
        return Data(X[:400], y[:400], X[400:], y[400:], skewed(y[:400], OWNERS, rng))
    z = np.load(Path(folder) / "a1a.npz")
    few = slice(400 if quick else None)
    X, y, X_test, y_test = (z[n].astype(float)[few] for n in ("x_train", "y_train", "x_test", "y_test"))
    X, X_test = (np.c_[x, np.ones(len(x))] for x in (X, X_test))
    return Data(X, y, X_test, y_test, skewed(y, OWNERS, rng))


def score(result: Any, data: Data) -> tuple[float, float]:
    """Mean log predictive density of a row to score, nats, and the share of labels that are predicted."""
    loc, scale = (np.asarray(result.params[n]) for n in ("auto_loc", "auto_scale"))
    # The predictor is normal under q.
    mean, sd = data.X_test @ loc, np.sqrt(data.X_test**2 @ scale**2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    signed = (2 * data.y_test - 1)[:, None] * (mean[:, None] + sd[:, None] * nodes)
    # By logarithms: a q that noise has thrown far out is sure of what is wrong.
    right = logsumexp(-np.logaddexp(0.0, -signed), b=weights / weights.sum(), axis=1)
    return float(np.mean(right)), float(np.mean(right > math.log(0.5)))


def solvers(epsilon: float) -> dict[str, tuple[Any, int]]:
    """By level the private solver and its number of rounds, to a budget."""
    # Batches would hold a large share of these owners' rows, and weigh their noise by N / B: all rows at every step.
    rows = LocalELBO(optax.sgd(0.02), num_steps=5, num_particles=2, precision_step=0.2)
    found = {}
    for level, inner, clip, rounds in (("row", rows, 0.25, 3), ("group", NaturalGradient(), 1.0, 1)):
        if math.isinf(epsilon):
            found[level] = DifferentialPrivacy(inner, 0.0, clip, level, delta=DELTA), rounds
        else:
            budget = {"epsilon": epsilon, "delta": DELTA, "clip": clip, "rounds": rounds, "level": level}
            found[level] = DifferentialPrivacy.calibrated(inner, **budget), rounds
    return found


def fit(data: Data, solver: Any, rounds: int, key: Any = KEY) -> tuple[Any, float]:
    """The result of some rounds, owners one after another, and its seconds."""
    pvi = PVI(Partition(model, "data", data.owner), AutoDiagonalNormal(model), solver=solver, schedule=Sequential())
    start = time.perf_counter()
    result = pvi.run(key, rounds, jnp.asarray(data.X), jnp.asarray(data.y), progress_bar=False)
    return result, time.perf_counter() - start


def run(options: argparse.Namespace) -> _report.Report:
    """Both levels at every budget, beside a fit that nobody protects."""
    report = _report.Report("privacy")
    with jax.enable_x64(True):
        data = load(options.data, options.quick)
        sizes = np.bincount(data.owner)
        plain, seconds = fit(data, NaturalGradient(), 10)
        best = score(plain, data)
        rows = [("nobody", "none", "none", "-", "-", *best, seconds)]
        for epsilon in BUDGETS[:2] if options.quick else BUDGETS:
            for level, (solver, rounds) in solvers(epsilon).items():
                result, seconds = fit(data, solver, rounds)
                shown = "none" if math.isinf(epsilon) else epsilon
                spent = "-" if math.isinf(epsilon) else f"{result.epsilon:.3f}"
                found = score(result, data)
                rows.append((level, shown, spent, solver.noise_multiplier, rounds, *found, seconds))
                print(*rows[-1], flush=True)
                if not math.isinf(epsilon):
                    report.add_target(f"{level}, epsilon {epsilon:g}: spent no more", result.epsilon, epsilon)
                if level == "row" and epsilon == 5.0:
                    report.add_target("row, epsilon 5: log score within .1 nats of plain", best[0] - found[0], 0.1)
        chance = float(max(np.mean(data.y_test), 1 - np.mean(data.y_test)))
        caption = (
            f"{len(data.y)} rows of {OWNERS} owners ({sizes.min()} to {sizes.max()} each), {data.X.shape[1]} coefficients, "
            f"mean-field; {len(data.y_test)} rows to score, of which {chance:.3f} have the more frequent label; delta {DELTA:g}"
        )
        header = ("protected", "budget", "epsilon", "noise multiplier", "rounds", "log score (nats)", "accuracy", "s")
        report.add_table(caption, header, rows)
    return report
