"""``wide``: a prior that says nothing, labels that nearly separate, columns whose scales span six decades."""

import argparse

from benchmarks import _models, _problems, _references, _report, _subjects

LIMIT = 0.1
MAX_ROUNDS = 30


def run(options: argparse.Namespace) -> _report.Report:
    """Three data sets, every default, both schedules."""
    report = _report.Report("wide")
    num_rows, dim = (300, 6) if options.quick else (1_000, 10)
    rows = []
    for seed in range(1 if options.quick else 3):
        data = _models.simulate_wide(num_rows, dim, 5, seed)
        optimum = _references.solve(_problems.logistic_problem(data.X, data.y, 100.0, wide=True))
        arrays = _subjects.device_arrays(data)
        for schedule in (None, "sequential", "synchronous"):
            pvi = _subjects.build(_models.logistic_wide, data.labels, schedule)
            gaps = _subjects.gaps_by_round(pvi, arrays, optimum, {"w": (dim,)}, MAX_ROUNDS)
            first = _subjects.first_within(gaps, LIMIT)
            name = schedule or "default"
            rows.append((seed, name, f"{optimum.elbo:.3f}", "none" if first is None else first, gaps[-1]))
            if not options.quick:
                report.add_target(f"seed {seed}, {name}: |gap| after {MAX_ROUNDS} rounds", abs(gaps[-1]), LIMIT)
    caption = f"logistic, prior sd 100, N = {num_rows:,}, D = {dim}, M = 5, column scales 1e-3 to 1e3 (gaps in nats)"
    header = ("seed", "schedule", "ELBO of the optimum", f"first round within {LIMIT}", f"gap after {MAX_ROUNDS}")
    report.add_table(caption, header, rows)
    return report
