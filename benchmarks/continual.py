"""``continual``: tasks and counties that come one after another, beside revisiting them and beside one fit of all."""

import argparse
import csv
import gzip
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from benchmarks import _report
from numpyro_pvi import PVI, ImproperError, Partition
from numpyro_pvi.schedules import Streaming, Synchronous
from numpyro_pvi.solvers import LocalELBO, NaturalGradient

TASKS, SIDE, WIDTH = 5, 7, 16
PIXELS = SIDE * SIDE
KEY = jax.random.key(0)


class Method(NamedTuple):
    """A fit of all tasks by one of the ways compared."""

    name: str
    pvi: PVI
    state: Any
    seconds: float


class Problem(NamedTuple):
    """A model with what fits it, and how many rounds the fits of all groups take."""

    name: str
    model: Callable
    guide: Any
    solver: Callable[[], Any]
    rounds: int
    start: dict[str, Any] | None = None


def linear(X: Any, task: Any, y: Any = None, heads: int = 1) -> None:
    """Logistic regression, one head for all tasks or one for each."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([heads, PIXELS + 1]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=jnp.sum(X * w[task % heads], -1)), obs=y)


def network(X: Any, task: Any, y: Any = None, heads: int = 1) -> None:
    """One hidden layer, shared by all tasks; one head for all tasks or one for each."""
    hidden = numpyro.sample("hidden", dist.Normal(0.0, 1.0).expand([PIXELS + 1, WIDTH]).to_event(2))
    out = numpyro.sample("out", dist.Normal(0.0, 1.0).expand([heads, WIDTH]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=jnp.sum(jnp.tanh(X @ hidden) * out[task % heads], -1)), obs=y)


def radon(uranium: Any, floor: Any, seen: Any, level: Any = None) -> None:
    """A county is a row: its houses, as many as ``seen`` says, share an effect that is private to it."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    basement = numpyro.sample("basement", dist.Normal(0.0, 3.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("county", uranium.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        centre = (mu + slope * uranium + tau * effect)[:, None] + basement * floor
        numpyro.sample("obs", dist.Normal(centre, sigma).mask(seen).to_event(1), obs=level)


def load_tasks(folder: str | None, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Digits 0/1, 2/3, ... as five binary tasks, pooled to 7 x 7 pixels; made-up images where no folder is given."""
    if folder is None:
        rng = np.random.default_rng(0)
        digits, centres = rng.integers(0, 10, 20 * rows), rng.random((10, PIXELS))
        images = centres[digits] + 0.5 * rng.normal(size=(len(digits), PIXELS))
        parts = [(images[::2], digits[::2]), (images[1::2], digits[1::2])]
    else:
        found = np.load(pathlib.Path(folder) / "mnist.npz")
        parts = [(found[f"x_{p}"].astype(float) / 255, found[f"y_{p}"]) for p in ("train", "test")]
        parts = [(x.reshape(-1, SIDE, 4, SIDE, 4).mean((2, 4)).reshape(-1, PIXELS), y) for x, y in parts]
    return tuple(_as_tasks(x, y, rows) for x, y in parts)  # type: ignore[return-value]


def _as_tasks(images: np.ndarray, digits: np.ndarray, rows: int) -> dict[str, Any]:
    kept = np.concatenate([np.flatnonzero(digits // 2 == task)[:rows] for task in range(TASKS)])
    X = np.column_stack([4 * images[kept], np.ones(len(kept))]).astype(np.float32)
    return {"X": X, "task": (digits[kept] // 2).astype(np.int32), "y": (digits[kept] % 2).astype(np.int32)}


def problems(quick: bool) -> list[Problem]:
    """A linear model and a small net, one head or one for each task."""
    rng = np.random.default_rng(0)
    found = []
    for heads, word in ((1, "single head"), (TASKS, "multi-head")):
        found.append(Problem(f"linear, {word}", _with(linear, heads), AutoMultivariateNormal, NaturalGradient, 40))
        shapes = {"hidden": (PIXELS + 1, WIDTH), "out": (heads, WIDTH)}
        start = {f"{n}_auto_loc": jnp.asarray(0.2 * rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
        start |= {f"{n}_auto_scale": jnp.full(s, 0.1, jnp.float32) for n, s in shapes.items()}
        rounds = 3 if quick else 30
        found.append(Problem(f"net, {word}", _with(network, heads), AutoNormal, _local_elbo, rounds, start))
    return found


def _with(model: Callable, heads: int) -> Callable:
    def with_heads(X: Any, task: Any, y: Any = None) -> None:
        model(X, task, y, heads)

    return with_heads


def _local_elbo() -> LocalELBO:
    return LocalELBO(optax.adam(5e-3), epochs=2, batch_size=40)


def rows_of(data: dict[str, Any], labels: Any) -> tuple[Any, ...]:
    """The arguments of some tasks."""
    mine = np.isin(data["task"], labels)
    return tuple(data[n][mine] for n in ("X", "task", "y"))


def batch(problem: Problem, data: dict[str, Any], labels: Any) -> Method:
    """All tasks at hand at once, refined together in rounds."""
    started, args = time.perf_counter(), rows_of(data, labels)
    partition = Partition(problem.model, "data", args[1])
    pvi = PVI(partition, problem.guide(problem.model), solver=problem.solver(), schedule=Synchronous())
    result = pvi.run(KEY, problem.rounds, *args, tol=1e-3, progress_bar=False, init_params=problem.start)
    return Method("batch", pvi, result.state, time.perf_counter() - started)


def stream(problem: Problem, data: dict[str, Any], labels: Any) -> Method:
    """One task after another, each absorbed once; none is looked at again."""
    started, args = time.perf_counter(), rows_of(data, labels[0])
    partition = Partition(problem.model, "data", [labels[0]] * len(args[2]))
    pvi = PVI(partition, problem.guide(problem.model), solver=problem.solver(), schedule=Streaming())
    state = pvi.run(KEY, 1, *args, progress_bar=False, init_params=problem.start).state
    for label in labels[1:]:
        state = pvi.add_group(state, label, *rows_of(data, label), num_steps=1)
    return Method("streaming", pvi, state, time.perf_counter() - started)


def revisit(problem: Problem, data: dict[str, Any], labels: Any, streamed: Method) -> Method:
    """All tasks' rows brought back after the stream, and refined together."""
    started, args = time.perf_counter(), rows_of(data, labels)
    guide = problem.guide(problem.model)
    partition = Partition(problem.model, "data", args[1])
    pvi = PVI(partition, guide, solver=problem.solver(), schedule=Synchronous())
    pvi.init(KEY, *args)
    # What a schedule keeps of its own is made anew when groups come back, so another one may take over.
    state = pvi.revisit(streamed.state, args[1], *args, num_steps=problem.rounds)
    seconds = streamed.seconds + time.perf_counter() - started
    return Method("streaming, then all revisited", pvi, state, seconds)


def scores(method: Method, data: dict[str, Any]) -> tuple[list[float], float]:
    """Error of each task, and mean log predictive density of a test row in nats, from 200 draws of q."""
    errors, logs = [], []
    for task in range(TASKS):
        found = method.pvi.prequential(method.state, *rows_of(data, task), rng_key=jax.random.key(1), num_samples=200)
        rows = np.asarray(found.rows)
        errors.append(float(np.mean(rows < np.log(0.5))))
        logs.append(float(rows.mean()))
    return errors, float(np.mean(logs))


def distance(one: Method, other: Method) -> float:
    """Root mean square difference of posterior means, in the other's posterior sds."""
    (mean, _), (wanted, sd) = _moments(one), _moments(other)
    return float(np.sqrt(np.mean(((mean - wanted) / sd) ** 2)))


def _moments(method: Method) -> tuple[np.ndarray, np.ndarray]:
    found = method.pvi.posterior(method.state)
    shared = method.state.plan.partition.layout.names
    parts = [(np.ravel(found[n].mean), np.ravel(found[n].variance) ** 0.5) for n in shared]
    return tuple(np.concatenate(x) for x in zip(*parts, strict=True))  # type: ignore[return-value]


def compare_tasks(report: _report.Report, options: argparse.Namespace) -> None:
    """Streaming beside revisiting beside batch on five tasks, and forgetting one beside refitting without it."""
    rows = 40 if options.quick else options.rows or 300
    train, test = load_tasks(options.data, rows)
    tasks = list(range(TASKS))
    table, forgetting = [], []
    for problem in problems(options.quick):
        whole, streamed = batch(problem, train, tasks), stream(problem, train, tasks)
        again = revisit(problem, train, tasks, streamed)
        for method in (streamed, again, whole):
            errors, log = scores(method, test)
            away = distance(method, whole)
            table.append((problem.name, method.name, np.mean(errors), errors[0], log, away, method.seconds))
        forgetting += forget(problem, train, tasks, whole, again)
    caption = f"five tasks of {rows} rows (two digits each, {SIDE} x {SIDE} pixels), one after another"
    header = ("model", "method", "test error", "of the first task", "nats a row", "means from batch's, sd", "s (cold)")
    report.add_table(caption, header, table)
    header = ("model", "after", "means from a refit's, sd", "s")
    report.add_table("forgetting the third task, beside refitting without it", header, forgetting)


def forget(problem: Problem, data: dict[str, Any], labels: list, whole: Method, again: Method) -> list[tuple]:
    """Distances from the fit that never saw a group: with it, after forgetting it, after revisiting the rest."""
    gone = labels[2]
    rest = [label for label in labels if label != gone]
    refit = batch(problem, data, rest)
    found = [(problem.name, "batch, with it", distance(whole, refit), whole.seconds)]
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = whole.pvi.forget_group(whole.state, gone)
    except ImproperError:
        # The other sites were fitted beside it, and do not hold every latent of a net alone.
        found.append((problem.name, "forget_group", "refused: not normalisable", time.perf_counter() - started))
        return [*found, (problem.name, "refit without it", 0.0, refit.seconds)]
    forgot = whole._replace(state=state, seconds=time.perf_counter() - started)
    found.append((problem.name, "forget_group", distance(forgot, refit), forgot.seconds))
    started, args = time.perf_counter(), rows_of(data, rest)
    state = again.pvi.revisit(state, args[1], *args, num_steps=problem.rounds)
    mended = again._replace(state=state, seconds=time.perf_counter() - started)
    found.append((problem.name, "forget_group, the rest revisited", distance(mended, refit), mended.seconds))
    return [*found, (problem.name, "refit without it", 0.0, refit.seconds)]


def load_radon(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Counties as rows, their houses along the second axis."""
    with gzip.open(folder / "radon_mn.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    county = np.array([int(r["county"]) for r in rows]) - 1
    place = np.array([np.sum(county[:i] == c) for i, c in enumerate(county)])
    shape = (county.max() + 1, place.max() + 1)
    found = {n: np.zeros(shape, np.float32) for n in ("floor", "level")} | {"seen": np.zeros(shape, bool)}
    uranium = np.zeros(shape[0], np.float32)
    for row, c, i in zip(rows, county, place, strict=True):
        uranium[c] = float(row["log_uppm"])
        found["floor"][c, i], found["level"][c, i] = float(row["floor"]), float(row["log_radon"])
        found["seen"][c, i] = True
    return {"uranium": uranium, **found}


def compare_counties(report: _report.Report, options: argparse.Namespace) -> None:
    """Radon county by county: the same comparisons, with effects that never leave their county."""
    data = load_radon(pathlib.Path(options.data))
    counties = list(range(12 if options.quick else len(data["uranium"])))
    columns = ("uranium", "floor", "seen", "level")
    guide, rounds = AutoMultivariateNormal, 100

    def rows(of: list[int]) -> tuple[Any, ...]:
        return tuple(jnp.asarray(data[n][of]) for n in columns)

    def fit(of: list[int], name: str) -> Method:
        started = time.perf_counter()
        pvi = PVI(Partition(radon, "county", of), guide(radon))
        state = pvi.run(KEY, rounds, *rows(of), tol=1e-2, progress_bar=False).state
        return Method(name, pvi, state, time.perf_counter() - started)

    whole = fit(counties, "batch")
    started, first = time.perf_counter(), counties[:5]
    pvi = PVI(Partition(radon, "county", first), guide(radon), schedule=Streaming())
    state = pvi.run(KEY, 1, *rows(first), progress_bar=False).state
    for county in counties[5:]:
        state = pvi.add_group(state, county, *rows([county]), num_steps=1)
    streamed = Method("streaming", pvi, state, time.perf_counter() - started)
    started = time.perf_counter()
    state = whole.pvi.revisit(streamed.state, counties, *rows(counties), num_steps=rounds, tol=1e-2)
    seconds = streamed.seconds + time.perf_counter() - started
    again = Method("streaming, then all revisited", whole.pvi, state, seconds)
    largest = int(np.argmax(data["seen"][counties].sum(1)))
    rest = [c for c in counties if c != largest]
    refit = fit(rest, "refit without the largest county")
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = whole.pvi.forget_group(whole.state, largest)
    forgot = Method("forget_group(largest county)", whole.pvi, state, time.perf_counter() - started)
    started = time.perf_counter()
    state = refit.pvi.revisit(state, rest, *rows(rest), num_steps=rounds, tol=1e-2)
    mended = Method("the same, the rest revisited", refit.pvi, state, time.perf_counter() - started)
    table = [
        (m.name, distance(m, whole), distance(m, refit), m.seconds)
        for m in (streamed, again, whole, forgot, mended, refit)
    ]
    header = ("method", "means from batch's, sd", "from the refit's, sd", "s (cold)")
    report.add_table(f"radon, {len(counties)} counties one after another (the first five together)", header, table)


def run(options: argparse.Namespace) -> _report.Report:
    """Both comparisons; the counties need ``--data``."""
    report = _report.Report("continual")
    compare_tasks(report, options)
    if options.data:
        compare_counties(report, options)
    return report
