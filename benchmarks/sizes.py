"""``glm --size``: how a round's time and temporary memory grow with rows, latents and groups, one factor at a time."""

import argparse
import gc
from typing import Any

import jax

from benchmarks import _models, _report, _subjects

BASE = (20_000, 50, 10)
SERIES = {
    "N": [(n, 50, 10) for n in (5_000, 20_000, 80_000, 320_000)],
    "D": [(20_000, d, 10) for d in (10, 50, 200, 500)],
    "M": [(20_000, 50, m) for m in (1, 10, 100, 1_000)],
    "corners": [(320_000, 200, 100), (20_000, 200, 1_000), (5_000, 500, 1)],
}
QUICK_SERIES = {
    "N": [(1_000, 10, 5), (4_000, 10, 5)],
    "D": [(1_000, 5, 5), (1_000, 20, 5)],
    "M": [(1_000, 10, 1), (1_000, 10, 20)],
}
# A growth ratio counts as met within this factor: repeated medians differ by as much on a shared machine.
TIMING_NOISE = 1.25


def flops(shape: tuple[int, int, int]) -> float:
    """The yardstick N D^2 + M D^3."""
    num_rows, dim, num_groups = shape
    return num_rows * dim**2 + num_groups * dim**3


def memory_limit(data_bytes: int, shape: tuple[int, int, int], itemsize: int) -> float:
    """1.3 times the data plus six times all sites (precision matrix and precision-mean each), bytes."""
    _, dim, num_groups = shape
    return 1.3 * data_bytes + 6 * num_groups * (dim * dim + dim) * itemsize


def measure(shape: tuple[int, int, int], schedule: str, repeats: int) -> dict[str, float]:
    """Median seconds of one warm round, temporary bytes of the compiled update and their limit."""
    data = _models.simulate_logistic(*shape)
    arrays = _subjects.device_arrays(data)
    pvi = _subjects.build(_models.logistic, data.labels, schedule)
    state = pvi.init(jax.random.key(0), *arrays)
    update = jax.jit(pvi.update)
    analysis = update.lower(state, *arrays).compile().memory_analysis()
    state, _ = update(state, *arrays)  # the first round starts at the prior; time a later one
    time = _report.paired_medians({"round": lambda: update(state, *arrays)}, repeats)["round"]
    limit = memory_limit(sum(a.nbytes for a in arrays), shape, arrays[0].dtype.itemsize)
    return {"time": time, "temporary": float(analysis.temp_size_in_bytes), "limit": limit}


def run(options: argparse.Namespace) -> _report.Report:
    """Measures every series with both schedules."""
    report = _report.Report("glm --size")
    for schedule in ("synchronous", "sequential"):
        done: dict[tuple[int, int, int], dict[str, float]] = {}
        for name, shapes in (QUICK_SERIES if options.quick else SERIES).items():
            for shape in shapes:
                if shape not in done:
                    done[shape] = measure(shape, schedule, 3 if options.quick else 5)
                    gc.collect()
            _tabulate(report, name, schedule, shapes, done, decides=not options.quick)
    return report


def _tabulate(
    report: _report.Report,
    name: str,
    schedule: str,
    shapes: list[tuple[int, int, int]],
    done: dict[tuple[int, int, int], dict[str, float]],
    decides: bool,
) -> None:
    rows: list[tuple[Any, ...]] = []
    previous = None
    for shape in shapes:
        found = done[shape]
        growth: tuple[Any, ...] = ("", "")
        if previous is not None and name != "corners":
            growth = (found["time"] / done[previous]["time"], flops(shape) / flops(previous))
        used = found["temporary"] / found["limit"]
        rows.append((*shape, found["time"] * 1e3, *growth, found["temporary"] / 2**20, found["limit"] / 2**20, used))
        previous = shape
        if decides:
            report.add_target(f"{schedule} {shape}: temporary memory over its limit", used, 1.0)
    header = (
        "N",
        "D",
        "M",
        "ms a round",
        "time grew by",
        "N D^2 + M D^3 grew by",
        "temporary MiB",
        "limit MiB",
        "used",
    )
    report.add_table(f"{schedule}, {name}: warm round of logistic regression, float32", header, rows)
    if decides and name != "corners":
        worst = max((row[4] / row[5] for row in rows[1:]), default=0.0)
        report.add_target(f"{schedule}, {name}: largest time growth over N D^2 + M D^3 growth", worst, TIMING_NOISE)
