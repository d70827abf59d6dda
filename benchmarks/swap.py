"""``swap``: models as their authors wrote them, PVI put in SVI's place without a word about groups, beside the best of two SVIs.

For each model: whether its rows were split (by which mechanism, into how many groups) or it was kept whole, the final ELBO
less SVI's best, and the seconds of a first run with everything it compiles.
"""

import argparse
import time
import warnings
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from benchmarks import _report
from benchmarks._swap_models import SUBJECTS, Subject
from numpyro_pvi import PVI
from numpyro_pvi.handlers import FullPlates

ROUNDS, STEPS, RATES = 50, 3_000, (0.03, 0.01)
QUICK_ROUNDS, QUICK_STEPS = 20, 500
# Nats that PVI may end below SVI's best, besides two standard errors of the estimates.
DEFICIT = 0.5


def run(options: argparse.Namespace) -> _report.Report:
    """Fits every model by both."""
    # First-run seconds would otherwise be those of an earlier run's compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    report = _report.Report("swap")
    names = options.only or list(SUBJECTS)
    rows = []
    for name in names:
        rows.append((name, *_compare(SUBJECTS[name], options.quick)))
        print(rows[-1], flush=True)
    header = ("model", "split", "PVI's ELBO less SVI's best, nats", "se", "PVI first run, s", "SVI first run, s")
    report.add_table("PVI in the place of SVI", header, rows)
    if not options.quick:
        for name, _, above, error, *_ in rows:
            report.add_target(f"{name}: PVI's ELBO less SVI's best, nats", above + 2 * error, -DEFICIT, at_least=True)
    return report


def _compare(subject: Subject, quick: bool) -> tuple[Any, ...]:
    guide = AutoMultivariateNormal if subject.full else AutoNormal
    start = time.perf_counter()
    with warnings.catch_warnings():
        # A swap that warns of nothing but full passes that take time.
        warnings.simplefilter("error")
        pvi = PVI(subject.model, guide(subject.model))
        result = pvi.run(jax.random.key(0), QUICK_ROUNDS if quick else ROUNDS, *subject.args, progress_bar=False)
    seconds = time.perf_counter() - start
    part = result.state.plan.partition
    model, draws = FullPlates(part.model(subject.model)), 400 if quick else 10_000
    own = _elbo(model, pvi.guide, result.params, subject.args, draws)
    others, slowest = [], 0.0
    for rate in RATES:
        start = time.perf_counter()
        svi = SVI(model, guide(model), numpyro.optim.Adam(rate), Trace_ELBO())
        fit = svi.run(jax.random.key(1), QUICK_STEPS if quick else STEPS, *subject.args, progress_bar=False)
        slowest = max(slowest, time.perf_counter() - start)
        others.append(_elbo(model, svi.guide, fit.params, subject.args, draws))
    best = max(others)
    split = "whole" if part.rows.whole else f"{part.table.num_groups} groups, {part.mechanism}"
    return split, own[0] - best[0], float(np.hypot(own[1], best[1])), seconds, slowest


def _elbo(model: Any, guide: Any, params: Any, args: tuple, draws: int) -> tuple[float, float]:
    """ELBO and its standard error, nats, by NumPyro's own estimator for both sides."""
    keys = jax.random.split(jax.random.key(2), 20)
    loss = jax.jit(lambda key: Trace_ELBO(num_particles=draws // 20).loss(key, params, model, guide, *args))
    values = -np.array([float(loss(key)) for key in keys])
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
