"""``regressions``: five likelihoods, unequal groups, every default, against float64 optima; SVI beside it."""

import argparse
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import _models, _opponent, _problems, _references, _report, _subjects
from benchmarks._models import Data
from benchmarks._opponent import Setting

LIMIT = 0.05
NUM_ROUNDS = 50


def _problem(name: str, data: Data) -> tuple[_references.Problem, dict[str, tuple[int, ...]]]:
    """The float64 problem of a model and the order of its latents there."""
    dim = data.X.shape[1]
    problems: dict[str, tuple[Callable[[], _references.Problem], dict[str, tuple[int, ...]]]] = {
        "poisson": (lambda: _problems.poisson_problem(data.X, data.y), {"w": (dim,)}),
        "negative_binomial": (
            lambda: _problems.negative_binomial_problem(data.X, data.y),
            {"w": (dim,), "concentration": ()},
        ),
        "student_t": (lambda: _problems.student_t_problem(data.X, data.y), {"w": (dim,), "sigma": ()}),
        "ordinal": (
            lambda: _problems.ordinal_problem(data.X, data.y, _models.NUM_LEVELS),
            {"w": (dim,), "cutpoints": (_models.NUM_LEVELS - 1,)},
        ),
        "multinomial": (
            lambda: _problems.multinomial_problem(data.X, data.y, _models.NUM_CLASSES),
            {"w": (dim, _models.NUM_CLASSES)},
        ),
    }
    build, order = problems[name]
    return build(), order


def run(options: argparse.Namespace) -> _report.Report:
    """Fits every regression with PVI's defaults and with SVI, and measures both against the optimum."""
    report = _report.Report("regressions")
    num_rows, dim = (400, 4) if options.quick else (2_000, 10)
    num_rounds = 20 if options.quick else NUM_ROUNDS
    rows, checks = [], []
    for name, model in _models.REGRESSIONS.items():
        if options.only is not None and name not in options.only:
            continue
        data = _models.simulate_regression(name, num_rows, dim)
        problem, order = _problem(name, data)
        optimum = _references.solve(problem)
        by_draws, error = _references.elbo_by_draws(model, data.X, data.y, optimum, order)
        checks.append((name, f"{optimum.elbo:.4f}", f"{by_draws:.4f}", error))
        row, final = _fit(name, model, data, optimum, order, num_rounds, 300 if options.quick else 5_000)
        rows.append(row)
        print(f"{name}: final gap {final:.3g} nats", flush=True)
        if not options.quick:
            report.add_target(f"{name}: |gap| after {num_rounds} rounds", abs(final), LIMIT)
    caption = f"N = {num_rows:,}, D = {dim}, groups of 50/25/15/8/2 %, all defaults, {num_rounds} rounds (gaps in nats)"
    header = (
        *("regression", "latents", "ELBO of the optimum", f"first round within {LIMIT}"),
        *("PVI gap", "PVI warm s", "SVI gap", "SVI warm s"),
    )
    report.add_table(caption, header, rows)
    header = ("regression", "by quadrature", "by 8,192 draws through NumPyro's density", "standard error")
    report.add_table("the references themselves: ELBO of each optimum, two independent ways, nats", header, checks)
    return report


def _fit(
    name: str,
    model: Callable[..., None],
    data: Data,
    optimum: _references.Optimum,
    order: dict[str, tuple[int, ...]],
    num_rounds: int,
    num_steps: int,
) -> tuple[tuple[Any, ...], float]:
    arrays = _subjects.device_arrays(data)
    pvi = _subjects.build(model, data.labels)
    gaps = _subjects.gaps_by_round(pvi, arrays, optimum, order, num_rounds)
    setting = Setting(0.03, num_steps, num_particles=4)
    svi = setting.build(model)
    state = svi.init(jax.random.key(0), *arrays)
    scan = _opponent.scan_steps(svi, num_steps)
    svi_params = svi.get_params(scan(state, *arrays))
    svi_gap = optimum.gap(*_opponent.gaussian_of_params(svi.guide, jax.device_get(svi_params), order))
    times = _report.paired_medians(
        {"pvi": _subjects.rounds_function(pvi, num_rounds, arrays), "svi": lambda: scan(state, *arrays)}, 3
    )
    first = _subjects.first_within(gaps, LIMIT)
    label = "none" if first is None else first
    return (name, len(optimum.loc), f"{optimum.elbo:.3f}", label, gaps[-1], times["pvi"], svi_gap, times["svi"]), gaps[
        -1
    ]
