"""``startup``: what a user waits for before anything moves, `init` and the first `update`, in fresh processes."""

import argparse
import statistics

from benchmarks import _cold, _report

SIDES = {
    "SVI, update": {"side": "svi", "jit": False},
    "SVI, jit(update)": {"side": "svi", "jit": True},
    "PVI, update": {"side": "pvi", "jit": False},
    "PVI, jit(update)": {"side": "pvi", "jit": True},
}


def run(options: argparse.Namespace) -> _report.Report:
    """Alternates fresh processes of both sides; compilation cache off."""
    report = _report.Report("startup")
    repeats = 1 if options.quick else 7
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(repeats):
        for name, side in SIDES.items():
            request = {"kind": "first_update", "model": "logistic", "num_rows": 1_000, "dim": 10, "num_groups": 5}
            found[name].append(_cold.measure(**request, **side))
    middle = {n: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for n, runs in found.items()}
    svi = min(m["total"] for n, m in middle.items() if n.startswith("SVI"))
    pvi = min(m["total"] for n, m in middle.items() if n.startswith("PVI"))
    rows = [(name, m["init"], m["run"], m["total"], m["total"] / svi) for name, m in middle.items()]
    header = ("what", "init s", "first update s", "together s", "over the faster SVI")
    report.add_table(
        f"logistic regression, N = 1,000, D = 10, M = 5, fresh processes, median of {repeats}", header, rows
    )
    report.add_target("PVI over SVI, the faster way of each", pvi / svi, 2.0)
    return report
