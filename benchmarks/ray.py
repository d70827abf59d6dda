"""``ray``: eight groups in actors of Ray, one ten times slower than the others; asynchronous absorption beside rounds that wait.

A worker's speed is a matter of sleeping: every answer takes at least so long, on machines with fewer cores than workers too.
"""

import argparse
import functools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _models, _problems, _references, _report, _subjects
from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import Ray, Respondent
from numpyro_pvi.schedules import Asynchronous, Synchronous
from numpyro_pvi.solvers import NaturalGradient

WORKERS, SLOW = 8, 10.0
GAP = 1e-2
# Seconds that an answer of a worker takes at least.
SECONDS = 0.1
ANSWER = Respondent.answer
# Steps that a visit makes, and the damping of asynchronous changes: a site that has settled at its own rows is taken as it comes.
STEPS = ((1, "auto"), (3, 1.0))


def load(rows: tuple[int, int], seconds: float, label: int) -> tuple[np.ndarray, np.ndarray]:
    """A group's rows, in its actor, whose answers take their time from then on."""

    def answer(client: Any, data: bytes) -> bytes | None:
        begun, found = time.perf_counter(), ANSWER(client, data)
        share = SLOW if client.label == 0 else 1.0
        time.sleep(max(0.0, share * seconds - (time.perf_counter() - begun)))
        return found

    if seconds:
        Respondent.answer = answer
    data = _models.simulate_logistic(*rows, WORKERS)
    mine = data.labels == label
    return data.X[mine], data.y[mine]


def fit_of(data: _models.Data, schedule: Any, runtime: Any, solver: Any = None) -> PVI:
    """A fit from the prior."""
    partition = Partition(_models.logistic, "data", data.labels)
    guide = AutoMultivariateNormal(_models.logistic)
    return PVI(partition, guide, solver=solver, schedule=schedule, runtime=runtime, init_sites="prior")


def follow(
    pvi: PVI, data: _models.Data, optimum: _references.Optimum, rounds: int, until: float
) -> list[tuple[float, float]]:
    """Seconds and gaps in nats after every round; programs were compiled by a run before."""
    arrays, order = _subjects.device_arrays(data), {"w": (data.X.shape[1],)}
    start = pvi.init(jax.random.key(0), *arrays)
    seen: list[tuple[float, Any]] = []
    begun = 0.0

    def look(done: int, state: Any, info: Any) -> bool:
        del done, info
        seen.append((time.perf_counter() - begun, state))
        return seen[-1][0] > until

    # Programs are compiled, those of finer quadrature rules too.
    pvi.run(jax.random.key(0), 20, *arrays, init_state=start, callback=lambda *_: False, progress_bar=False)
    # What clients are at is given up, so that both schedules start from nothing.
    pvi.evaluate(start, *arrays)
    begun = time.perf_counter()
    pvi.run(jax.random.key(0), rounds, *arrays, init_state=start, callback=look, progress_bar=False)
    return [(seconds, _subjects.gap_of(pvi, pvi.get_params(state), optimum, order)) for seconds, state in seen]


def time_to(path: list[tuple[float, float]], limit: float) -> float:
    """Seconds from which on the gap stays within the limit; infinity if it never does."""
    outside = [i for i, (_, gap) in enumerate(path) if abs(gap) > limit]
    first = outside[-1] + 1 if outside else 0
    return path[first][0] if first < len(path) else float("inf")


def seconds_a_round(pvi: PVI, data: _models.Data, rounds: int) -> float:
    """Of a run whose programs are compiled, the faster of two."""
    arrays = _subjects.device_arrays(data)
    start, taken = pvi.init(jax.random.key(0), *arrays), []
    for _ in range(3):
        begun = time.perf_counter()
        result = pvi.run(jax.random.key(0), rounds, *arrays, init_state=start, progress_bar=False)
        jax.block_until_ready(result.params)
        taken.append((time.perf_counter() - begun) / rounds)
    return min(taken[1:])


def run(options: argparse.Namespace) -> _report.Report:
    """Seconds to the gap under both schedules; then, without any sleep, seconds and bytes of a round."""
    report = _report.Report("ray")
    rows = (400, 3) if options.quick else (8_000, 10)
    seconds, until = (0.02, 2.0) if options.quick else (SECONDS, 15.0)
    data = _models.simulate_logistic(*rows, WORKERS)
    optimum = _references.solve(_problems.logistic_problem(data.X, data.y))
    runtime = Ray(rows=functools.partial(load, rows, seconds))
    paths, shares = {}, {}
    for steps, damping in STEPS[:1] if options.quick else STEPS:
        solver, last = NaturalGradient(num_steps=steps), "" if steps == 1 else f", {steps} steps a visit"
        schedules = ((Synchronous(), 8), (Asynchronous(delays="real", damping=damping), 400))
        for schedule, rounds in schedules:
            name = f"{type(schedule).__name__.lower()}{last}"
            paths[name] = follow(fit_of(data, schedule, runtime, solver), data, optimum, rounds, until)
        times = [time_to(paths[f"{name}{last}"], GAP) for name in ("asynchronous", "synchronous")]
        shares[steps] = times[0] / times[1]
    runtime.close()
    table = [(name, len(path), time_to(path, GAP), path[-1][0], path[-1][1]) for name, path in paths.items()]
    header = ("schedule", "rounds", f"s to {GAP:g} nats", "s in all", "gap at the end")
    report.add_table(
        f"logistic regression, N = {rows[0]:,}, D = {rows[1]}, {WORKERS} actors, an answer takes {seconds:g} s, of one of them "
        f"{SLOW:g} times as long",
        header,
        table,
    )
    if not options.quick:
        for steps, share in shares.items():
            report.add_target(f"share of the synchronous time, steps of a visit: {steps}", share, 1 / 3)
    _overhead(report, data, rows[1], 4 if options.quick else 50)
    if options.out:
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ray.json").write_text(json.dumps(paths))
        _draw(folder / "ray.png", paths)
    return report


def _overhead(report: _report.Report, data: _models.Data, dim: int, rounds: int) -> None:
    here = seconds_a_round(fit_of(data, Synchronous(), None), data, rounds)
    runtime = Ray()
    pvi = fit_of(data, Synchronous(), runtime)
    there = seconds_a_round(pvi, data, rounds)
    before, start = runtime.traffic, pvi.init(jax.random.key(0), *_subjects.device_arrays(data))
    pvi.run(jax.random.key(0), rounds, *_subjects.device_arrays(data), init_state=start, progress_bar=False)
    trips, sent, received = (getattr(runtime.traffic, n) - getattr(before, n) for n in ("trips", "sent", "received"))
    runtime.close()
    # Precision and precision-mean, float32.
    site = 4 * (dim * dim + dim)
    header = ("ms a round, Vmap", "ms a round, Ray", "bytes to a client", "bytes from a client", "bytes of a site")
    each = trips * WORKERS
    report.add_table(
        f"the same without any sleep, Synchronous, {rounds} rounds",
        header,
        [(1e3 * here, 1e3 * there, sent / each, received / each, site)],
    )


def _draw(path: pathlib.Path, paths: dict[str, list[tuple[float, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for name, points in paths.items():
        seconds, gaps = zip(*points, strict=True)
        axes.plot(seconds, np.maximum(np.abs(gaps), 1e-6), marker=".", label=name)
    axes.axhline(GAP, color="grey", linewidth=0.8)
    axes.set(yscale="log", xlabel="seconds", ylabel="gap in nats")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
