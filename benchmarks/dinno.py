"""``dinno``: a floor plan by seven robots on paths of their own, which hardly overlap (003, section VI)."""

import argparse
import pathlib

import numpy as np

from benchmarks import _maps, _report

# Of the kernels, as many are narrow ones around occupied points as the paper takes; rates per square pixel, in hundreds.
KERNELS, OCCUPIED = 1000, 300
RATES = (3.0, 0.3)
AGENTS, ACCURACY, ROUNDS = 7, 0.87, 12
LINKS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 0), (0, 3))


def load(options: argparse.Namespace) -> _maps.MapData:
    """Every robot's points in random order; pixels in hundreds."""
    rng = np.random.default_rng(0)
    if options.data is None:
        X = rng.uniform(0, 16, (14_000, 2)).astype(np.float32)
        y = (np.sin(X).sum(1) > 1.2).astype(int)
        X, X_test, y, y_test = X[:7000], X[7000:], y[:7000], y[7000:]
        owner = (X[:, 0] * AGENTS / 16.001).astype(int)
    else:
        z = np.load(pathlib.Path(options.data) / "dinno_floorplan.npz")
        X, X_test = (z[f"x_{part}_px16"].astype(np.float32) / 1600 for part in ("train", "test"))
        y, y_test, owner = z["y_train"].astype(int), z["y_test"].astype(int), z["robot_train"].astype(int)
    order = rng.permutation(len(X))[: 7_000 if options.quick else options.rows]
    order = order[_maps.first_of_each(owner[order], ROUNDS * 1000)]
    X, y, owner = X[order], y[order], owner[order]
    count, occupied = (60, 20) if options.quick else (KERNELS, OCCUPIED)
    # The kernels stand where anything was seen.
    walls = rng.choice(np.flatnonzero(y == 1), occupied, replace=False)
    others = rng.choice(len(X), count - occupied, replace=False)
    centers = X[np.concatenate([walls, others])]
    rates = np.repeat(np.asarray(RATES, np.float32), (occupied, count - occupied)) * 10
    return _maps.MapData(X, y, owner, X_test, y_test, centers, rates)


def run(options: argparse.Namespace) -> _report.Report:
    """Single points, mixed after every one; beside them points replayed so that the classes are balanced."""
    report = _report.Report("dinno")
    data, rows = load(options), []
    for replay in (0, 2):
        pvi = _maps.build(data, LINKS, full=False, exchanges_per_round=1000, replay=replay)
        state, path, speed = _maps.follow(pvi, data, 3 if options.quick else ROUNDS, agents=tuple(range(AGENTS)))
        q = pvi.posterior(state)["w"]
        found = _maps.probabilities(np.asarray(q.mean), np.asarray(q.variance), data, data.X_test) > 0.5
        recall = [float(np.mean(found[data.y_test == k] == (k == 1))) for k in (0, 1)]
        rows.append((replay, _maps.first_reached(path, ACCURACY), *path[-1], *recall, speed))
        _maps.draw(pvi, state, data, options, f"dinno_replay{replay}")
        if options.data is not None and not options.quick:
            report.add_target(f"replay {replay}: accuracy of the worst agent", path[-1][1], ACCURACY, at_least=True)
    header = (
        "replay",
        "iterations to .87",
        "iterations",
        "accuracy",
        "consensus (sds)",
        "of free",
        "of occupied",
        "rows a second",
    )
    caption = f"{AGENTS} agents; occupied points are {np.mean(data.y_test):.1%} of the test set"
    report.add_table(caption, header, rows)
    return report
