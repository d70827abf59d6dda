"""``async``: ten groups of which one is twenty times slower, in simulated time; no figure depends on the machine's speed."""

import argparse
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _models, _problems, _references, _report, _subjects
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Asynchronous, StochasticSubset, Synchronous

SLOW = 20.0
# Gap in nats, and the largest share of the synchronous time in which it must be reached.
LIMITS = {5.0: 0.2, 1e-2: 0.75}
MOST_ROUNDS = 12
# Gaps below this are rounding of float32 naturals, and rise and fall by themselves.
ROUNDING = 1e-6


class Point(NamedTuple):
    """The simulated time, the gap in nats, the step of every group and its staleness after one change of q."""

    time: float
    gap: float
    step: np.ndarray
    staleness: np.ndarray


@dataclasses.dataclass(frozen=True)
class OneChange(Asynchronous):
    """The same schedule, looked at after every absorbed change."""

    def _changes(self, problem: Any) -> int:
        return 1


def follow(
    data: _models.Data, optimum: _references.Optimum, schedule: Any, until: float, init_sites: str
) -> list[Point]:
    """The path of a fit, from the start until a simulated time."""
    arrays, order = _subjects.device_arrays(data), {"w": (data.X.shape[1],)}
    partition = Partition(_models.logistic, "data", data.labels)
    pvi = PVI(partition, AutoMultivariateNormal(_models.logistic), schedule=schedule, init_sites=init_sites)
    state, update = pvi.init(jax.random.key(0), *arrays), jax.jit(pvi.update)
    points: list[Point] = []
    while not points or points[-1].time < until:
        if points:
            state, _ = update(state, *arrays)
        report = jax.device_get(state.report)
        gap = _subjects.gap_of(pvi, pvi.get_params(state), optimum, order)
        points.append(Point(float(report.clock), gap, report.step, report.staleness))
    return points


def time_to(points: list[Point], limit: float) -> float:
    """Time from which on the gap stays within the limit; infinity if it never does."""
    outside = [i for i, point in enumerate(points) if abs(point.gap) > limit]
    first = outside[-1] + 1 if outside else 0
    return points[first].time if first < len(points) else float("inf")


def largest_rise(points: list[Point]) -> float:
    """Largest factor by which one absorbed change raised the gap."""
    return max(max(b.gap, ROUNDING) / max(a.gap, ROUNDING) for a, b in itertools.pairwise(points))


def run(options: argparse.Namespace) -> _report.Report:
    """Both kinds of start; delays that are fixed, and random ones."""
    report = _report.Report("async")
    num_rows, dim = (2_000, 10) if options.quick else (20_000, 50)
    data = _models.simulate_logistic(num_rows, dim, 10)
    optimum = _references.solve(_problems.logistic_problem(data.X, data.y))
    delays = {0: SLOW}
    for init_sites in ("prior",) if options.quick else ("prior", "auto"):
        rounds = follow(data, optimum, Synchronous(), MOST_ROUNDS, init_sites)
        # Everybody waits for the slowest, once a round; passes of rounds that are tried again are not counted.
        paths = {"synchronous": [point._replace(time=SLOW * point.time) for point in rounds]}
        until = SLOW * (MOST_ROUNDS // 2)
        subset = follow(data, optimum, StochasticSubset(rates={0: 1 / SLOW}), until, init_sites)
        paths["subset, slow group in 1 of 20 rounds"] = subset
        for name, law in (("fixed", delays), ("exponential", ("exponential", delays))):
            paths[f"asynchronous, {name}"] = follow(data, optimum, OneChange(law), until, init_sites)
        _tabulate(report, paths, f"N = {num_rows:,}, D = {dim}, M = 10, init_sites={init_sites!r}")
        if init_sites == "prior" and not options.quick:
            _decide(report, paths)
    return report


def _tabulate(report: _report.Report, paths: dict[str, list[Point]], title: str) -> None:
    rows = []
    for name, points in paths.items():
        times = [time_to(points, limit) for limit in LIMITS]
        shares = [t / time_to(paths["synchronous"], limit) for t, limit in zip(times, LIMITS, strict=True)]
        stale = max(int(np.max(point.staleness)) for point in points)
        rise = largest_rise(points) if name.startswith("async") else "-"
        rows.append((name, *times, *shares, rise, stale))
    header = (
        "schedule",
        *(f"time to {limit:g} nats" for limit in LIMITS),
        *(f"of synchronous, {limit:g}" for limit in LIMITS),
        "largest rise",
        "staleness",
    )
    report.add_table(f"Logistic regression, {title}, one group {SLOW:g} times slower: simulated time", header, rows)
    slow = [
        (name, after.time, int(after.staleness[0]), float(after.step[0]), before.gap, after.gap)
        for name, points in paths.items()
        if name.startswith("async")
        for before, after in itertools.pairwise(points)
        if after.step[0] > 0
    ]
    report.add_table(
        "Sites of the slow group", ("schedule", "time", "staleness", "step", "gap before", "gap after"), slow
    )


def _decide(report: _report.Report, paths: dict[str, list[Point]]) -> None:
    points, together = paths["asynchronous, fixed"], paths["synchronous"]
    for limit, share in LIMITS.items():
        report.add_target(
            f"share of the synchronous time to {limit:g} nats", time_to(points, limit) / time_to(together, limit), share
        )
    for name in ("fixed", "exponential"):
        report.add_target(f"largest rise of the gap, {name} delays", largest_rise(paths[f"asynchronous, {name}"]), 10.0)
