"""``banana``: one agent takes single rows of a kernel classifier with full covariance (003, section VI)."""

import argparse
import pathlib

import jax
import numpy as np

from benchmarks import _maps, _report

KERNELS, RATE, STEPS = 50, 0.3, 20_000


def load(folder: str | None, seed: int) -> _maps.MapData:
    """Half of the 5,300 points for training, at random, and kernels around some of them; without a folder, two arcs."""
    rng = np.random.default_rng(seed)
    if folder is None:
        angle, y = rng.uniform(0, np.pi, 800), rng.integers(0, 2, 800)
        X = np.stack([np.cos(angle), np.sin(angle)], 1) * np.where(y, 1, -1)[:, None] + 0.3 * rng.normal(size=(800, 2))
    else:
        z = np.load(pathlib.Path(folder) / "banana.npz")
        X, y = np.concatenate([z["x_train"], z["x_test"]]), np.concatenate([z["y_train"], z["y_test"]])
    order, half = rng.permutation(len(X)), len(X) // 2
    X, y = X[order].astype(np.float32), y[order].astype(int)
    centers = X[rng.choice(half, KERNELS, replace=False)]
    rates = np.full(KERNELS, RATE, np.float32)
    return _maps.MapData(X[:half], y[:half], np.zeros(half, int), X[half:], y[half:], centers, rates, prior_sd=3.0)


def run(options: argparse.Namespace) -> _report.Report:
    """Three splits; the speed is that of a run of 20,000 steps, warm."""
    report = _report.Report("banana")
    decides = options.data is not None and not options.quick
    rows = []
    for seed in range(3 if decides else 1):
        data = load(options.data, seed)
        pvi = _maps.build(data, np.ones((1, 1)), full=True, updates_per_exchange=1000)
        state, path, _ = _maps.follow(pvi, data, 4 if options.quick else STEPS // 1000)
        start = pvi.init(jax.random.key(0), *data.arrays)

        def whole(pvi=pvi, start=start, data=data):
            return pvi.run(None, STEPS // 1000, *data.arrays, init_state=start, progress_bar=False).state.sites

        speed = STEPS / _report.paired_medians({"run": whole}, 5)["run"]
        shown = {count: found for count, found, _ in path}
        rows.append(
            (
                seed,
                *(f"{shown.get(k, float('nan')):.4f}" for k in (1000, 5000, 20_000)),
                _maps.first_reached(path, 0.88),
                speed,
            )
        )
        _maps.draw(pvi, state, data, options, f"banana{seed}")
        if decides:
            report.add_target(f"split {seed}: test accuracy after 20,000 steps", path[-1][1], 0.88, at_least=True)
            report.add_target(f"split {seed}: steps a second, warm", speed, 50_000, at_least=True)
    header = ("split", "accuracy at 1,000", "5,000", "20,000 steps", "steps to .88", "steps a second")
    report.add_table(f"{KERNELS} kernels and a constant, full covariance, probit expectations", header, rows)
    return report
