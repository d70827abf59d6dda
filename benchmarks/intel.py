"""``intel``: maps of the Intel Research Lab from streamed LiDAR points, by one agent and by four (003, section VI)."""

import argparse
import pathlib

import numpy as np

from benchmarks import _maps, _report

# One over the squared width of a kernel, per square metre: walls are thinner than the paper's half would show.
RATE = 2.0
AGENTS = 4
RING = tuple((i, (i + 1) % AGENTS) for i in range(AGENTS))
ACCURACY, SHARE = 0.87, 0.25


def load(options: argparse.Namespace, kernels: int, agents: int, most: int) -> _maps.MapData:
    """Nine tenths of the points for training: one stretch of the tour for every agent, its first ones in random order."""
    rng = np.random.default_rng(0)
    if options.data is None:
        X = rng.uniform(-10, 10, (20_000, 2)).astype(np.float32)
        y = (np.sin(X).sum(1) > 0.3).astype(int)
    else:
        z = np.load(pathlib.Path(options.data) / "intel_lidar.npz")
        X, y = z["xy_mm"].astype(np.float32) / 1000, z["occupied"].astype(int)
    test = rng.permutation(len(X))[: len(X) // 10]
    train = np.setdiff1d(np.arange(len(X)), test)
    owner = np.arange(len(train)) * agents // len(train)
    order = rng.permutation(len(train))[: 20_000 if options.quick else options.rows]
    order = order[_maps.first_of_each(owner[order], most)]
    train, owner = train[order], owner[order]
    centers = X[test[rng.choice(len(test), kernels, replace=False)]]
    rates = np.full(kernels, RATE, np.float32)
    return _maps.MapData(X[train], y[train], owner, X[test], y[test], centers, rates)


def run(options: argparse.Namespace) -> _report.Report:
    """The single agent first, then four on a ring that mix after every point, then full covariances beside diagonal ones."""
    report = _report.Report("intel")
    decides = options.data is not None and not options.quick
    kernels = (60, 80) if options.quick else (1200, 1500)
    rows = []
    data = load(options, kernels[0], 1, 60_000)
    pvi = _maps.build(data, np.ones((1, 1)), full=False, updates_per_exchange=1000)
    state, path, speed = _maps.follow(pvi, data, 4 if options.quick else 60)
    single = _maps.first_reached(path, ACCURACY)
    rows.append(("1", kernels[0], "diagonal", single, *path[-1][:2], 0.0, speed))
    _maps.draw(pvi, state, data, options, "intel_single")
    data = load(options, kernels[1], AGENTS, 12_000)
    pvi = _maps.build(data, RING, full=False, exchanges_per_round=500)
    state, path, speed = _maps.follow(pvi, data, 4 if options.quick else 24, agents=tuple(range(AGENTS)))
    four = _maps.first_reached(path, ACCURACY)
    rows.append((str(AGENTS), kernels[1], "diagonal", four, *path[-1], speed))
    _maps.draw(pvi, state, data, options, "intel_four")
    if decides:
        report.add_target("four agents: accuracy of the worst agent", path[-1][1], ACCURACY, at_least=True)
        report.add_target("iterations of four agents to .87, share of the single agent's", four / single, SHARE)
    few = 40 if options.quick else kernels[0]
    data = load(options, few, 1, 24_000)
    for full in (False, True):
        pvi = _maps.build(data, np.ones((1, 1)), full=full, updates_per_exchange=1000)
        _, path, speed = _maps.follow(pvi, data, 2 if options.quick else 24)
        reached = _maps.first_reached(path, ACCURACY)
        rows.append(("1", few, "full" if full else "diagonal", reached, *path[-1][:2], 0.0, speed))
    header = (
        "agents",
        "kernels",
        "covariance",
        "iterations to .87",
        "iterations",
        "accuracy",
        "consensus (sds)",
        "rows a second",
    )
    report.add_table("test accuracy; of several agents the worst one's", header, rows)
    return report
