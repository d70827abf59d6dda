"""``meanfield``: a diagonal Gaussian on columns with correlation .9, where parallel updates like to diverge."""

import argparse

import numpy as np
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

from benchmarks import _models, _problems, _references, _report, _subjects

LIMIT = 1e-3
MAX_ROUNDS = 2_000
GROUPS = (1, 2, 10)
KINDS = {
    "linear": (_models.linear, _problems.linear_problem),
    "logistic": (_models.logistic, _problems.logistic_problem),
}


def run(options: argparse.Namespace) -> _report.Report:
    """Linear and logistic, M = 1, 2, 10, both schedules, both diagonal guides, every default."""
    report = _report.Report("meanfield")
    num_rows, dim = (200, 3) if options.quick else (500, 5)
    max_rounds = 100 if options.quick else MAX_ROUNDS
    rows = []
    for kind, (model, problem) in KINDS.items():
        data = _models.simulate_correlated(kind, num_rows, dim, 1)
        optimum = _references.solve(problem(data.X, data.y), diagonal=True)
        arrays = _subjects.device_arrays(data)
        for guide in (AutoDiagonalNormal,) if options.quick else (AutoDiagonalNormal, AutoNormal):
            for schedule in _subjects.SCHEDULES:
                for num_groups in GROUPS:
                    labels = _models.equal_labels(num_rows, num_groups)
                    pvi = _subjects.build(model, labels, schedule, guide)
                    gaps = _subjects.gaps_by_round(pvi, arrays, optimum, {"w": (dim,)}, max_rounds, LIMIT)
                    reached = len(gaps) if gaps[-1] <= LIMIT else f"> {max_rounds}"
                    rows.append((kind, guide.__name__, schedule, num_groups, reached, gaps[0], gaps[-1]))
                    if not options.quick:
                        name = f"{kind}, {guide.__name__}, {schedule}, M = {num_groups}: |gap|, nats"
                        report.add_target(name, float(np.abs(gaps[-1])), LIMIT)
    caption = f"N = {num_rows}, D = {dim}, correlation .9, defaults: rounds to {LIMIT} nats of the mean-field optimum"
    header = ("model", "guide", "schedule", "M", "rounds", "gap after 1", "last gap")
    report.add_table(caption, header, rows)
    return report
