"""``glm``: PVI against SVI on logistic regression with a full-covariance Gaussian.

``glm --size`` is in `benchmarks.sizes`.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _cold, _models, _opponent, _problems, _references, _report, _subjects
from benchmarks._models import Data
from benchmarks._opponent import Setting

GAP = 1e-3
TARGETS = (1.0, 0.1)
ROUND_LIMITS = {"sequential": 3, "synchronous": 6}
MAX_ROUNDS = 30


def load_covtype(path: str, num_rows: int | None, num_groups: int) -> Data:
    """Forest cover: 54 columns scaled to [0, 1], lodgepole pine against the rest, in equal groups."""
    z = np.load(path)
    low = np.zeros(10)
    low[[0, 4]] = 1859, -173
    high = np.array([3858, 360, 66, 1397, 601, 7117, 254, 254, 254, 7173.0])
    X = np.c_[(z["numeric"] - low) / (high - low), np.eye(4)[z["wilderness"] - 1], np.eye(40)[z["soil"] - 1]]
    y = z["cover_type"] == 2
    rows = slice(num_rows)
    return Data(X[rows].astype(np.float32), y[rows].astype(np.float32), _models.equal_labels(len(y[rows]), num_groups))


def run(options: argparse.Namespace) -> _report.Report:
    """Runs the simulated comparison and, with ``--data``, the one on real data."""
    report = _report.Report("glm")
    shape = (2_000, 10, 5) if options.quick else (20_000, 50, 10)
    data = _models.simulate_logistic(*shape)
    where = {"num_rows": shape[0], "dim": shape[1], "num_groups": shape[2]}
    settings = _opponent.QUICK_SETTINGS if options.quick else _opponent.SETTINGS
    _compare(report, "simulated", data, where, settings, options, decides=not options.quick)
    if options.data is not None:
        path = Path(options.data) / "covtype_397k.npz"
        where = {"covtype": {"path": str(path), "num_rows": 5_000 if options.quick else options.rows, "num_groups": 10}}
        _compare(report, "covtype", load_covtype(**where["covtype"]), where, settings, options, decides=False)
    return report


def _compare(
    report: _report.Report,
    name: str,
    data: Data,
    where: dict[str, Any],
    settings: tuple[Setting, ...],
    options: argparse.Namespace,
    decides: bool,
) -> None:
    """All tables for one data set; ``decides`` adds the targets."""
    num_rows, dim = data.X.shape
    title = f"{name}: logistic regression, N = {num_rows:,}, D = {dim}, M = {data.num_groups}, full covariance"
    arrays = _subjects.device_arrays(data)
    optimum = _references.solve(_problems.logistic_problem(data.X, data.y))
    rounds = _rounds(report, title, data, arrays, optimum, decides)
    steps = _svi_steps(report, title, settings, arrays, optimum)
    repeats = 3 if options.quick else 7
    best = _warm(report, title, data, arrays, rounds, steps, repeats, decides)
    if not options.no_cold:
        _cold_runs(report, title, where, rounds, best, options, decides)


def _rounds(
    report: _report.Report, title: str, data: Data, arrays: Any, optimum: _references.Optimum, decides: bool
) -> dict[str, int]:
    rows, rounds = [], {}
    for schedule in ROUND_LIMITS:
        pvi = _subjects.build(_models.logistic, data.labels, schedule)
        order = {"w": (data.X.shape[1],)}
        gaps = _subjects.gaps_by_round(pvi, arrays, optimum, order, MAX_ROUNDS, GAP)
        reached = gaps[-1] <= GAP
        rounds[schedule] = len(gaps)
        rows.append(
            (schedule, len(gaps) if reached else f"> {MAX_ROUNDS}", gaps[-1], ", ".join(f"{g:.2g}" for g in gaps[:8]))
        )
        if decides:
            value = float(len(gaps)) if reached else float("inf")
            report.add_target(f"rounds to {GAP} nats, {schedule}", value, ROUND_LIMITS[schedule])
    report.add_table(
        f"{title}: rounds to a gap of {GAP} nats", ("schedule", "rounds", "gap", "gap after rounds 1 to 8"), rows
    )
    return rounds


def _svi_steps(
    report: _report.Report, title: str, settings: tuple[Setting, ...], arrays: Any, optimum: _references.Optimum
) -> dict[tuple[Setting, float], int]:
    """Steps every setting needs to every target it reaches."""
    rows, steps = [], {}
    for setting in settings:
        every = max(setting.num_steps // 150, 5)
        found, final = _opponent.steps_to_targets(setting, _models.logistic, arrays, optimum, TARGETS, every)
        steps.update({(setting, target): count for target, count in found.items() if count is not None})
        rows.append((setting.name, final, *(found[t] if found[t] is not None else "not reached" for t in TARGETS)))
    header = ("SVI setting", "final gap", *(f"steps to {t} nat" for t in TARGETS))
    report.add_table(f"{title}: SVI with AutoMultivariateNormal", header, rows)
    return steps


def _warm(
    report: _report.Report,
    title: str,
    data: Data,
    arrays: Any,
    rounds: dict[str, int],
    steps: dict[tuple[Setting, float], int],
    repeats: int,
    decides: bool,
) -> dict[float, tuple[Setting, int]]:
    """Warm times in one process; returns the fastest SVI setting for every target."""
    functions: dict[str, Any] = {}
    for schedule, count in rounds.items():
        pvi = _subjects.build(_models.logistic, data.labels, schedule)
        functions[f"PVI {schedule}, {count} compiled rounds"] = _subjects.rounds_function(pvi, count, arrays)
        functions[f"PVI {schedule}, run of {count} rounds from a state"] = _subjects.resumed_function(
            pvi, count, arrays
        )
        functions[f"PVI {schedule}, run of {count} rounds with init"] = _subjects.run_function(pvi, count, arrays)
    pvi_times = _report.paired_medians(functions, repeats)
    svi_times = _svi_times(steps, arrays, repeats=3)
    best: dict[float, tuple[Setting, int]] = {}
    for target in TARGETS:
        reached = [(seconds, key[0]) for key, seconds in svi_times.items() if key[1] == target]
        if reached:
            _, setting = min(reached, key=lambda item: item[0])
            best[target] = (setting, steps[setting, target])
    finalists = {f"SVI to {t} nat: {s.name}, {n} of them": _svi_function(s, n, arrays) for t, (s, n) in best.items()}
    # The finalists are timed again, in turn with PVI: the two sides of a ratio come from the same minutes.
    again = _report.paired_medians({**functions, **finalists}, repeats)
    pvi_times = {name: again[name] for name in pvi_times}
    svi = {target: again[name] for target, name in zip(best, finalists, strict=True)}
    header = ("what", "warm s", *(f"times faster than SVI to {t} nat" for t in svi))
    rows = [(name, again[name], *("" if name in finalists else svi[t] / again[name] for t in svi)) for name in again]
    report.add_table(f"{title}: warm times, median of {repeats}", header, rows)
    # From a state at hand both sides run one compiled loop: SVI a scan of its steps, PVI the rounds of `run`.
    fastest = min(pvi_times[f"PVI {s}, run of {n} rounds from a state"] for s, n in rounds.items())
    if decides:
        for target, limit in zip(TARGETS, (25.0, 100.0), strict=True):
            value = svi[target] / fastest if target in svi else float("nan")
            report.add_target(f"warm, times faster than SVI to {target} nat", value, limit, at_least=True)
    return best


def _svi_function(setting: Setting, num_steps: int, arrays: Any) -> Any:
    svi = setting.build(_models.logistic)
    state = svi.init(jax.random.key(0), *arrays)
    scan = _opponent.scan_steps(svi, num_steps)
    return lambda: scan(state, *arrays)


def _svi_times(
    steps: dict[tuple[Setting, float], int], arrays: Any, repeats: int
) -> dict[tuple[Setting, float], float]:
    """Median seconds of the compiled scan of exactly the steps each setting needs to each target."""
    times = {}
    for key, count in steps.items():
        times[key] = _report.paired_medians({"scan": _svi_function(key[0], count, arrays)}, repeats)["scan"]
    return times


def _cold_runs(
    report: _report.Report,
    title: str,
    where: dict[str, Any],
    rounds: dict[str, int],
    best: dict[float, tuple[Setting, int]],
    options: argparse.Namespace,
    decides: bool,
) -> None:
    """Fresh processes, alternating sides: init, planning, compilation and run, compilation cache off."""
    requests: dict[str, dict[str, Any]] = {
        f"PVI {schedule}, {count} rounds": {
            "kind": "pvi",
            "model": "logistic",
            "schedule": schedule,
            "num_steps": count,
        }
        for schedule, count in rounds.items()
    }
    for target, (setting, count) in best.items():
        requests[f"SVI to {target} nat, {count} steps"] = {
            "kind": "svi", "model": "logistic", "setting": vars(setting), "num_steps": count
        }  # fmt: skip
    repeats = 1 if options.quick else 3
    found: dict[str, list[dict[str, float]]] = {name: [] for name in requests}
    for _ in range(repeats):
        for name, request in requests.items():
            found[name].append(_cold.measure(**request, **where))
    middle = {n: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for n, runs in found.items()}
    rows = [(name, m["init"], m["run"], m["total"]) for name, m in middle.items()]
    header = ("what", "init s", "compile and run s", "total s")
    report.add_table(f"{title}: cold, fresh processes, median of {repeats}", header, rows)
    if decides:
        svi = next((m["total"] for n, m in middle.items() if n.startswith("SVI to 0.1")), float("nan"))
        pvi = min(m["total"] for n, m in middle.items() if n.startswith("PVI"))
        report.add_target("cold, times faster than SVI to 0.1 nat", svi / pvi, 4.0, at_least=True)
