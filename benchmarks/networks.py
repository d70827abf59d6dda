"""``networks``: the network of ``bnn`` by workers whose images are alike, or of two classes, or of one, beside batch VI and FedAvg.

Every fit is scored by the error, the log score and the calibration error of its test probabilities, against exchanges (what a
worker sends) and against gradients. Nothing is fitted to pooled images but the batch fit, no likelihood is tempered, and the
prior is N(0, 1).
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from benchmarks import _report
from benchmarks.bnn import BATCH, SHAPES, load, network, probabilities, start_params, svi_epoch
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Asynchronous, Sequential, Synchronous
from numpyro_pvi.solvers import LocalELBO

# Exchanges after which a fit is scored, beside its last; bins of the calibration error.
SCORED = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 60, 80, 100, 125, 150, 200, 250, 300)
BINS = 15
START_SD = 0.1
# Lengths of FedAvg's gradient steps, of which the best is shown (a favour).
LENGTHS = (0.1, 0.3)


# ------------------------------------------------------------------------------------------------------------------ data


def alike(y: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    """Workers of equally many rows at random."""
    return rng.permutation(len(y)) % workers


def two_classes(y: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    """Rows sorted by class and cut into two shards a worker, which are dealt out (McMahan et al.): two classes each, or so."""
    owner, found = rng.permutation(2 * workers) // 2, np.empty(len(y), int)
    found[np.argsort(y, kind="stable")] = owner[np.arange(len(y)) * 2 * workers // len(y)]
    return found


def one_class(y: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    """A worker for every class."""
    del workers, rng
    return np.asarray(y)


def with_noise(y: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A share of the labels changed to one of the nine others, all equally likely."""
    other = (y + rng.integers(1, 10, len(y))) % 10
    return np.where(rng.random(len(y)) < share, other, y)


# ----------------------------------------------------------------------------------------------------------------- fits


@dataclasses.dataclass(frozen=True)
class Fit:
    """One fit by workers.

    Attributes:
        name: in the tables.
        split: labels, number of workers and a generator to each row's worker.
        schedule: of the rounds; None is FedAvg, whose solver is the length of its steps.
        solver: of a visit.
        epochs: passes over a worker's rows in a visit.
        rounds: how many.
        workers: how many.
        noise: share of wrong labels.
        start_sd: of q.
    """

    name: str
    split: Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
    schedule: Any
    solver: Any
    epochs: float
    rounds: int
    workers: int = 10
    noise: float = 0.0
    start_sd: float = START_SD


def solver(step: float, epochs: float = 1, **changed: Any) -> LocalELBO:
    """What was found to be needed; ``changed`` takes single parts of it back.

    Args:
        step: Adam's, in units of a weight.
        epochs: passes over a worker's rows in a visit.
        changed: other settings of the solver.

    Returns:
        Adam, begun anew at every visit; rows with draws of their own; precisions that go a twentieth of the way in a visit.
    """
    settings = {"batch_size": BATCH, "local_reparameterisation": True, "precision_step": 0.05, "curvature": "steps"}
    return LocalELBO(optax.adam(step), epochs=epochs, **settings | changed)


def scores(params: dict[str, Any], data: dict[str, Any]) -> tuple[float, float, float, float]:
    """Error in per cent, log score in nats a test image, expected calibration error in per cent; the median sd of weights."""
    found, y = np.asarray(probabilities(params, data["X_test"]), np.float64), np.asarray(data["y_test"])
    sure, right = found.max(axis=1), found.argmax(axis=1) == y
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs(np.sum(sure[bins == k] - right[bins == k])) for k in range(BINS)]
    log_score = float(np.mean(np.log(np.maximum(found[np.arange(len(y)), y], 1e-30))))
    sds = np.concatenate([np.ravel(params[f"{n}_auto_scale"]) for n in SHAPES])
    return 100 * float(np.mean(~right)), log_score, 100 * float(sum(gaps)) / len(y), float(np.median(sds))


def states(fit: Fit, data: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """q's params after every round."""
    rng = np.random.default_rng(seed)
    y = np.asarray(data["y"])
    owner = fit.split(y, fit.workers, rng)
    X, y = data["X"], jnp.asarray(with_noise(y, fit.noise, rng), jnp.int32)
    start = start_params(fit.start_sd, seed)
    if fit.schedule is None:
        yield from averaged(fit, X, y, owner, start)
        return
    pvi = PVI(Partition(network, "data", owner), AutoNormal(network), solver=fit.solver, schedule=fit.schedule)
    state = pvi.init(jax.random.key(seed), X, y, init_params=start)
    for _ in range(fit.rounds):
        state, _ = pvi.update(state, X, y)
        yield pvi.get_params(state)


def averaged(fit: Fit, X: Any, y: Any, owner: np.ndarray, start: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """FedAvg (McMahan et al.) on the log posterior: workers' gradient steps from one point, averaged by their rows."""
    places = [np.flatnonzero(owner == k) for k in np.unique(owner)]
    weights = np.array([len(own) for own in places]) / len(owner)
    steps, rng = [max(1, int(len(own) * fit.epochs) // BATCH) for own in places], np.random.default_rng(0)

    def loss(w: dict, rows: Any) -> Any:
        logits = jax.nn.relu(X[rows] @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
        prior = sum(jnp.sum(jnp.square(x)) for x in w.values()) / (2 * len(owner))
        return prior - jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(BATCH), y[rows]])

    @jax.jit
    def visit(w: dict, order: Any) -> dict:
        def step(w: dict, rows: Any) -> tuple[dict, None]:
            return jax.tree.map(lambda x, g: x - fit.solver * g, w, jax.grad(loss)(w, rows)), None

        return jax.lax.scan(step, w, order)[0]

    w = {n: start[f"{n}_auto_loc"] for n in SHAPES}
    for _ in range(fit.rounds):
        found = []
        for own, count in zip(places, steps, strict=True):
            order = np.concatenate([rng.permutation(own) for _ in range(math.ceil(fit.epochs))])[: count * BATCH]
            found.append(visit(w, jnp.asarray(order.reshape(count, BATCH))))
        w = jax.tree.map(lambda *xs: sum(a * x for a, x in zip(weights, xs, strict=True)), *found)
        yield {f"{n}_auto_loc": x for n, x in w.items()} | {f"{n}_auto_scale": jnp.zeros_like(x) for n, x in w.items()}


def curve(fit: Fit, data: dict[str, Any], seed: int) -> list[tuple]:
    """Rows of the table: fit, seed, exchanges, gradients of a batch, scores, seconds so far without scoring."""
    found, spent, since = [], 0.0, time.perf_counter()
    per_round = round(fit.epochs * data["X"].shape[0] / BATCH)
    for done, params in enumerate(states(fit, data, seed), 1):
        jax.block_until_ready(params)
        if done in SCORED or done == fit.rounds:
            spent += time.perf_counter() - since
            found.append((fit.name, seed, done, done * per_round, *scores(params, data), spent))
            print(*found[-1], flush=True)
            since = time.perf_counter()
    return found


def batch(data: dict[str, Any], epochs: int, noise: float, seed: int) -> list[tuple]:
    """The same of NumPyro's SVI on all images: Adam, steps of 1e-3 that fall along a cosine, and no exchanges."""
    X, steps = data["X"], data["X"].shape[0] // BATCH
    y = jnp.asarray(with_noise(np.asarray(data["y"]), noise, np.random.default_rng(seed)), jnp.int32)
    svi = SVI(network, AutoNormal(network), optax.adam(optax.cosine_decay_schedule(1e-3, epochs * steps)), Trace_ELBO())
    state = svi.init(jax.random.key(seed), X[:BATCH], y[:BATCH], init_params=start_params(START_SD, seed))
    epoch, found = svi_epoch(svi, X.shape[0]), []
    spent, since = 0.0, time.perf_counter()
    for done in range(1, epochs + 1):
        state, loss = epoch(state, jax.random.fold_in(jax.random.key(seed), done), X, y)
        if done in SCORED or done == epochs:
            jax.block_until_ready(loss)
            spent += time.perf_counter() - since
            found.append(("batch VI", seed, "", done * steps, *scores(svi.get_params(state), data), spent))
            print(*found[-1], flush=True)
            since = time.perf_counter()
    return found


# ---------------------------------------------------------------------------------------------------------------- parts


def fits(part: str, quick: bool) -> list[Fit]:
    """What a part of the benchmark runs."""

    def rounds(count: int) -> int:
        return 2 if quick else count

    if part == "ablation":
        return _one_change_at_a_time(rounds(10))
    count = rounds(20)
    if part == "noise":
        return [Fit(f"sequential, {m} workers", alike, Sequential(), solver(1.5e-3), 1, count, m, 0.1) for m in (10, 3)]
    if part == "alike":
        count = rounds(40)
        split, epochs, visit, one_after_another = alike, 1.0, solver(1.5e-3), Sequential()
        together = Fit("synchronous", split, Synchronous(), solver(3e-3, 5), 5, rounds(20))
    else:
        # Visits are short where workers disagree: q is with the classes of the last ones.
        split, epochs = two_classes if part == "two-classes" else one_class, 0.25
        count, visit, one_after_another = (
            rounds(140),
            solver(1e-3, epochs, precision_step=0.03),
            Sequential(order="random"),
        )
        together = Fit("synchronous", split, Synchronous(), solver(2e-3), 1, rounds(40))
    found = [
        Fit("sequential", split, one_after_another, visit, epochs, count),
        Fit("asynchronous", split, Asynchronous(("exponential", 1.0)), visit, epochs, count),
        together,
    ]
    return found + [Fit(f"FedAvg, steps of {length:g}", split, None, length, epochs, count) for length in LENGTHS]


def _one_change_at_a_time(count: int) -> list[Fit]:
    """Fits of like workers that differ from the first in one setting."""
    changes: dict[str, dict[str, Any]] = {
        "the settings": {},
        "one draw for all rows of a batch": {"local_reparameterisation": False},
        "precisions a tenth of the way": {"precision_step": 0.1},
        "precisions all the way": {"precision_step": 1.0},
        "Adam kept from visit to visit": {"optimiser_state": "keep"},
    }
    found = [Fit(name, alike, Sequential(), solver(1.5e-3, **own), 1, count) for name, own in changes.items()]
    found.append(Fit("start at the prior's sd", alike, Sequential(), solver(1.5e-3), 1, count, start_sd=1.0))
    return [*found, Fit("synchronous", alike, Synchronous(), solver(1.5e-3), 1, count)]


PARTS = {
    "alike": "ten workers of random images",
    "two-classes": "ten workers of two classes each",
    "one-class": "ten workers of one class each",
    "noise": "random images, one label in ten wrong",
    "ablation": "ten workers of random images, one change at a time",
}
# Part, fits whose name begins so, error in per cent, and exchanges within which it is to be reached.
LIMITS = (
    ("alike", "sequential", 2.0, 100),
    ("alike", "synchronous", 2.0, 100),
    ("two-classes", "sequential", 5.0, 300),
)


def run(options: argparse.Namespace) -> _report.Report:
    """A table a part; ``--only`` names some; made-up images without ``--data`` decide nothing."""
    report = _report.Report("networks")
    chosen = list(PARTS) if options.only is None else options.only
    for name in chosen:
        if name not in PARTS:
            raise SystemExit(f"networks: {name!r} is none of its parts: {', '.join(PARTS)}")
    data = load(options.data, 2_000 if options.quick or options.data is None else options.rows)
    decides = options.data is not None and not options.quick
    for part in chosen:
        rows: list[tuple] = []
        every = fits(part, options.quick)
        # Programs take long to compile.
        for fit in (every[0], every[-1]) if options.quick else every:
            rows += curve(fit, data, 0)
        if part in ("alike", "noise"):
            rows += batch(data, 2 if options.quick else 60, 0.1 * (part == "noise"), 0)
        header = (
            "fit",
            "seed",
            "exchanges",
            f"gradients of {BATCH} rows",
            "error, %",
            "log score, nats",
            "calibration error, %",
            "median sd",
            "s",
        )
        report.add_table(f"{PARTS[part]}; {data['X'].shape[0]:,} images", header, rows)
        for of, fit_name, limit, exchanges in LIMITS if decides else ():
            reached = [row[4] for row in rows if of == part and row[0].startswith(fit_name) and row[2] <= exchanges]
            if reached:
                report.add_target(f"{part}, {fit_name}: error in {exchanges} exchanges, %", min(reached), limit)
    return report
