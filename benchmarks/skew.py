"""``skew``: one group holds half the rows; a round must not cost as if every group did."""

import argparse

import jax

from benchmarks import _models, _report, _subjects


def run(options: argparse.Namespace) -> _report.Report:
    """Times one warm round with skewed and with balanced groups, in turn."""
    num_rows, dim, num_groups = (4_000, 10, 20) if options.quick else (20_000, 50, 20)
    report = _report.Report("skew")
    data = _models.simulate_logistic(num_rows, dim, num_groups)
    labels = {"balanced": data.labels, "skewed": _models.skewed_labels(num_rows, num_groups)}
    rows = []
    for schedule in ("sequential", "synchronous"):
        functions = {}
        for name, groups in labels.items():
            pvi = _subjects.build(_models.logistic, groups, schedule)
            functions[name] = _round_function(pvi, _subjects.device_arrays(data))
        times = _report.paired_medians(functions, 3 if options.quick else 15)
        ratio = times["skewed"] / times["balanced"]
        rows.append((schedule, times["balanced"] * 1e3, times["skewed"] * 1e3, ratio))
        report.add_target(f"skewed over balanced, {schedule}", ratio, 1.5)
    caption = f"logistic regression, N = {num_rows:,}, D = {dim}, M = {num_groups}, one group with half the rows"
    report.add_table(caption, ("schedule", "balanced ms a round", "skewed ms a round", "ratio"), rows)
    return report


def _round_function(pvi, arrays):
    state = pvi.init(jax.random.key(0), *arrays)
    update = jax.jit(pvi.update)
    state, _ = update(state, *arrays)
    return lambda: update(state, *arrays)
