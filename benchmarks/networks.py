"""``networks``: the network of ``bnn`` by workers whose images are alike, or of two classes, or of one, beside batch VI and FedAvg.

Every fit is scored by the error, the log score and the calibration error of its test probabilities, against exchanges (what a
worker sends) and against gradients. Nothing is fitted to pooled images but the batch fit, no likelihood is tempered, and the
prior is N(0, 1). With ``--out`` every score goes to ``networks.jsonl`` in that folder at once, and a fit that is there
to its last round, under the same settings, is read from there. After ``--minutes`` no fit goes on: tables say which were
cut, and with ``--out`` the next call runs only those.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from benchmarks import _report
from benchmarks.bnn import BATCH, SHAPES, compare, load, network, probabilities, start_params, svi_epoch
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Asynchronous, Sequential, Synchronous
from numpyro_pvi.solvers import LocalELBO

# Exchanges after which a fit is scored, beside its last; bins of the calibration error.
SCORED = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 60, 80, 100, 125, 150, 200, 250, 300)
BINS = 15
START_SD = 0.1
# Lengths of FedAvg's gradient steps, of which the best is shown (a favour).
LENGTHS = (0.1, 0.3)
# Epochs over which batch VI's steps fall, beside the parts that have it; it is scored on its way, too.
BATCH_EPOCHS = {"alike": (60,), "noise": (20, 60)}


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
        schedule: of the rounds; None is FedAvg.
        step: Adam's, in units of a weight; of FedAvg the length of gradient steps.
        epochs: passes over a worker's rows in a visit.
        rounds: how many.
        workers: how many.
        noise: share of wrong labels.
        start_sd: of q.
        settings: of the solver, beside those of :func:`solver`.
    """

    name: str
    split: Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
    schedule: Any
    step: float
    epochs: float
    rounds: int
    workers: int = 10
    noise: float = 0.0
    start_sd: float = START_SD
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def words(self) -> str:
        """All that a round of it depends on but the seed and the images."""
        others = [f.name for f in dataclasses.fields(self) if f.name not in ("settings", "rounds")]
        found = {name: getattr(self, name) for name in others}
        found |= {"split": self.split.__name__, "schedule": repr(self.schedule)}
        return json.dumps(found | dict(self.settings), sort_keys=True)


def solver(
    step: float, epochs: float = 1, falls: int | None = None, optimiser: str = "adam", **changed: Any
) -> LocalELBO:
    """What was found to be needed; ``changed`` takes single parts of it back.

    Args:
        step: Adam's, in units of a weight; or a gradient's factor, of the log-likelihood of all of a worker's rows.
        epochs: passes over a worker's rows in a visit.
        falls: a worker's steps, over which theirs fall along a cosine, with an optimiser that is kept; None: they never do.
        optimiser: "adam", or "sgd" for steps along the gradient.
        changed: other settings of the solver.

    Returns:
        It, begun anew at every visit; rows with draws of their own; precisions that go a twentieth of the way in a visit.
    """
    settings = {"batch_size": BATCH, "local_reparameterisation": True, "precision_step": 0.05, "curvature": "steps"}
    if falls is not None:
        settings["optimiser_state"] = "keep"
    length = step if falls is None else optax.cosine_decay_schedule(step, falls)
    return LocalELBO(getattr(optax, optimiser)(length), epochs=epochs, **settings | changed)


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
    visits = solver(fit.step, fit.epochs, **fit.settings)
    pvi = PVI(Partition(network, "data", owner), AutoNormal(network), solver=visits, schedule=fit.schedule)
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
            return jax.tree.map(lambda x, g: x - fit.step * g, w, jax.grad(loss)(w, rows)), None

        return jax.lax.scan(step, w, order)[0]

    w = {n: start[f"{n}_auto_loc"] for n in SHAPES}
    for _ in range(fit.rounds):
        found = []
        for own, count in zip(places, steps, strict=True):
            order = np.concatenate([rng.permutation(own) for _ in range(math.ceil(fit.epochs))])[: count * BATCH]
            found.append(visit(w, jnp.asarray(order.reshape(count, BATCH))))
        w = jax.tree.map(lambda *xs: sum(a * x for a, x in zip(weights, xs, strict=True)), *found)
        yield {f"{n}_auto_loc": x for n, x in w.items()} | {f"{n}_auto_scale": jnp.zeros_like(x) for n, x in w.items()}


def curve(
    fit: Fit, data: dict[str, Any], seed: int, record: pathlib.Path | None = None, until: float = math.inf
) -> list[tuple]:
    """Rows of the table: fit, seed, exchanges, gradients of a batch, scores, seconds so far without scoring."""
    per_round = round(fit.epochs * data["X"].shape[0] / BATCH)
    wanted = {"fit": fit.words, "seed": seed, "images": data["X"].shape[0]}

    def rows() -> Iterator[tuple]:
        for done, params, spent in timed(states(fit, data, seed), fit.rounds):
            yield fit.name, seed, done, done * per_round, *scores(params, data), spent

    return kept(rows(), wanted, fit.rounds, record, until=until)


def batch(
    data: dict[str, Any],
    epochs: int,
    noise: float,
    seed: int,
    record: pathlib.Path | None = None,
    until: float = math.inf,
) -> list[tuple]:
    """The same of NumPyro's SVI on all images: Adam, steps of 1e-3 that fall along a cosine, and no exchanges."""
    X, steps = data["X"], data["X"].shape[0] // BATCH
    wanted = {"fit": f"batch VI, {epochs} epochs, noise {noise}", "seed": seed, "images": X.shape[0]}

    def epoch_by_epoch() -> Iterator[dict[str, Any]]:
        y = jnp.asarray(with_noise(np.asarray(data["y"]), noise, np.random.default_rng(seed)), jnp.int32)
        svi = SVI(
            network, AutoNormal(network), optax.adam(optax.cosine_decay_schedule(1e-3, epochs * steps)), Trace_ELBO()
        )
        state = svi.init(jax.random.key(seed), X[:BATCH], y[:BATCH], init_params=start_params(START_SD, seed))
        epoch = svi_epoch(svi, X.shape[0])
        for done in range(1, epochs + 1):
            state, _ = epoch(state, jax.random.fold_in(jax.random.key(seed), done), X, y)
            yield svi.get_params(state)

    def rows() -> Iterator[tuple]:
        for done, params, spent in timed(epoch_by_epoch(), epochs):
            # Epochs stand in the place of rounds, and are no exchanges.
            yield batch_name(epochs), seed, "", done * steps, *scores(params, data), spent

    return kept(rows(), wanted, epochs * steps, record, at=3, until=until)


def batch_name(epochs: int) -> str:
    """What batch VI is called in the tables."""
    return f"batch VI, {epochs} epochs"


def timed(params: Iterable[dict[str, Any]], last: int) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Rounds that are scored, with their params, and the seconds up to them without scoring."""
    spent, since = 0.0, time.perf_counter()
    for done, found in enumerate(params, 1):
        jax.block_until_ready(found)
        if done in SCORED or done == last:
            spent += time.perf_counter() - since
            yield done, found, spent
            since = time.perf_counter()


def kept(
    rows: Iterable[tuple],
    wanted: dict[str, Any],
    last: int,
    record: pathlib.Path | None,
    at: int = 2,
    until: float = math.inf,
) -> list[tuple]:
    """Rows as they come, written down one by one; or those of a fit that is on record up to its last row.

    Args:
        rows: of one fit; nothing is run where they are not asked for.
        wanted: what tells the fit from others.
        last: what its last row has in column ``at``.
        record: the file, or None.
        at: a column.
        until: the time by ``time.perf_counter`` from which on nothing is begun or gone on with.

    Returns:
        The rows: fewer where they were cut, and those on record where none was begun.
    """
    lines = record.read_text().splitlines() if record is not None and record.exists() else []
    found = [tuple(line["row"]) for line in map(json.loads, lines) if all(line[k] == v for k, v in wanted.items())]
    # A fit that was cut off and begun anew is there twice up to some round.
    there = list({row[at]: row for row in found if row[at] <= last}.values())
    if any(row[at] == last for row in there) or time.perf_counter() > until:
        return there
    found = []
    for row in rows:
        found.append(row)
        print(*row, flush=True)
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps(wanted | {"row": row}) + "\n")
        if time.perf_counter() > until:
            break
    return found


# ---------------------------------------------------------------------------------------------------------------- parts


def fits(part: str, quick: bool) -> list[Fit]:
    """What a part of the benchmark runs."""

    def rounds(count: int) -> int:
        return 2 if quick else count

    if part == "ablation":
        return _one_change_at_a_time(rounds(10), rounds(40))
    if part == "noise":
        return [Fit(f"sequential, {m} workers", alike, Sequential(), 1.5e-3, 1, rounds(20), m, 0.1) for m in (10, 3)]
    if part == "alike":
        step, epochs, own = TOGETHER
        found = [
            Fit("sequential", alike, Sequential(), 1.5e-3, 1, rounds(40)),
            Fit("synchronous", alike, Synchronous(), step, epochs, rounds(40), settings=own),
            Fit("asynchronous", alike, AT_THEIR_PACE, step, epochs, rounds(40), settings=own),
        ]
        return found + [Fit(f"FedAvg, steps of {x:g}", alike, None, x, 1, rounds(40)) for x in LENGTHS]
    # Visits are short where workers disagree: q is with the classes of the last ones.
    split, in_turn = two_classes if part == "two-classes" else one_class, Sequential(order="random")
    found = [Fit("sequential", split, in_turn, ALONG, 0.25, rounds(300), settings=BY_GRADIENTS)]
    if part == "two-classes":
        step, _, own = TOGETHER
        found = [
            Fit("sequential, Adam", split, in_turn, 1e-3, 0.25, rounds(200), settings=SLOW),
            Fit("synchronous, Adam", split, Synchronous(), step, 1, rounds(100), settings=own),
            *found,
        ]
    found += [Fit(f"FedAvg, steps of {x:g}", split, None, x, 0.25, rounds(300)) for x in LENGTHS]
    found.append(Fit("asynchronous", split, AT_THEIR_PACE, ALONG, 0.25, rounds(300), settings=BY_GRADIENTS))
    if part == "one-class":
        settings = BY_GRADIENTS | {"power": 5.0}
        found.append(Fit("synchronous", split, Synchronous(), ALONG, 1, rounds(100), settings=settings))
    return found


def seeds(part: str, fit: Fit) -> range:
    """Three where a part decides how good PVI's fits of workers alike are."""
    return range(3 if part == "alike" and fit.name in ("sequential", "synchronous") else 1)


def _one_change_at_a_time(count: int, parallel: int) -> list[Fit]:
    """Fits of like workers that differ from the first, sequential or in parallel, in one setting."""
    changes: dict[str, dict[str, Any]] = {
        "the settings": {},
        "one draw for all rows of a batch": {"local_reparameterisation": False},
        "precisions a tenth of the way": {"precision_step": 0.1},
        "precisions all the way": {"precision_step": 1.0},
        "Adam kept from visit to visit": {"optimiser_state": "keep"},
    }
    found = [Fit(name, alike, Sequential(), 1.5e-3, 1, count, settings=own) for name, own in changes.items()]
    found.append(Fit("start at the prior's sd", alike, Sequential(), 1.5e-3, 1, count, start_sd=1.0))
    step, epochs, own = TOGETHER
    others = {
        "synchronous": {},
        "synchronous, visits as if alone": {"power": 1.0},
        # Over all rounds of 6,000 rows a worker.
        "synchronous, steps that fall": {"falls": parallel * epochs * 6_000 // BATCH},
    }
    for name, other in others.items():
        found.append(Fit(name, alike, Synchronous(), step, epochs, parallel, settings=own | other))
    return found


PARTS = {
    "alike": "ten workers of random images",
    "two-classes": "ten workers of two classes each",
    "one-class": "ten workers of one class each",
    "noise": "random images, one label in ten wrong",
    "seconds": "a round of the first two beside SVI's gradients",
    "ablation": "ten workers of random images, one change at a time",
}
# Adam's steps, epochs and settings of visits that ten workers alike make in parallel, each allowing for four others.
TOGETHER = (5e-3, 2, {"precision_step": 0.1, "power": 5.0})
AT_THEIR_PACE = Asynchronous(("exponential", 1.0))
# Where workers disagree: a tenth of the gradient of the mean over a worker's 6,000 rows, in units that all workers share. Adam
# divides by the size of a worker's own gradients, so that nine who have a little against a class outvote the one that has it.
SLOW = {"precision_step": 0.03}
ALONG, BY_GRADIENTS = 0.1 / 6_000, SLOW | {"optimiser": "sgd"}
# Part, fit, error in per cent, and exchanges within which it is to be reached.
LIMITS = (
    ("alike", "sequential", 2.0, 100),
    ("alike", "synchronous", 2.0, 100),
    ("two-classes", "sequential, Adam", 5.0, 300),
)


HEADER = (
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


def seconds(report: _report.Report, data: dict[str, Any], decides: bool) -> None:
    """A round of workers alike beside as many gradients of SVI and one loss."""
    owner = alike(np.asarray(data["y"]), 10, np.random.default_rng(0))
    for fit in fits("alike", not decides)[:2]:
        visits = solver(fit.step, fit.epochs, **fit.settings)
        pvi = PVI(Partition(network, "data", owner), AutoNormal(network), solver=visits, schedule=fit.schedule)
        compare(report, pvi, data, 3 if decides else 1, decides, f"{fit.name}: ", round(fit.epochs))


def table(
    part: str, data: dict[str, Any], quick: bool, record: pathlib.Path | None, until: float
) -> tuple[list[tuple], list[str]]:
    """Rows of a part's fits, and what was cut at the time ``until``."""
    rows: list[tuple] = []
    cut: list[str] = []

    def add(found: list[tuple], name: str, at: int, last: int, what: str) -> None:
        rows.extend(found)
        done = found[-1][at] if found else 0
        if done < last:
            cut.append(f"{name} at {done:,} of {last:,} {what}")

    every = fits(part, quick)
    # Programs take long to compile.
    for fit in (every[0], every[-1]) if quick else every:
        for seed in range(1) if quick else seeds(part, fit):
            found = curve(fit, data, seed, record, until)
            add(found, f"{fit.name} (seed {seed})", 2, fit.rounds, "exchanges")
    for epochs in BATCH_EPOCHS.get(part, ())[: 1 if quick else None]:
        count = 2 if quick else epochs
        found = batch(data, count, 0.1 * (part == "noise"), 0, record, until)
        add(found, batch_name(count), 3, count * (data["X"].shape[0] // BATCH), "gradients")
    return rows, cut


def run(options: argparse.Namespace) -> _report.Report:
    """A table a part; ``--only`` names some; made-up images without ``--data`` decide nothing."""
    report, until = _report.Report("networks"), time.perf_counter() + 60 * options.minutes
    chosen = list(PARTS) if options.only is None else options.only
    for name in chosen:
        if name not in PARTS:
            raise SystemExit(f"networks: {name!r} is none of its parts: {', '.join(PARTS)}")
    data = load(options.data, 2_000 if options.quick or options.data is None else options.rows)
    decides = options.data is not None and not options.quick
    record = None if options.out is None or not decides else pathlib.Path(options.out) / "networks.jsonl"
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        if part == "seconds":
            if time.perf_counter() > until:
                report.add_table(f"{PARTS[part]}: not run in {options.minutes:g} minutes", ("what",), ())
            else:
                seconds(report, data, decides)
            continue
        rows, cut = table(part, data, options.quick, record, until)
        caption = f"{PARTS[part]}; {data['X'].shape[0]:,} images"
        if cut:
            caption += f"; cut after {options.minutes:g} minutes: {', '.join(cut)}"
        report.add_table(caption, HEADER, rows)
        for of, fit_name, limit, exchanges in LIMITS if decides else ():
            error = reached(rows, fit_name, exchanges)
            if of == part and error is not None:
                report.add_target(f"{part}, {fit_name}: error in {exchanges} exchanges, %", error, limit)
    return report


def reached(rows: list[tuple], name: str, exchanges: int) -> float | None:
    """The lowest error in so many exchanges, the mean over seeds; None where there is no row."""
    errors: dict[int, list[float]] = {}
    for row in rows:
        if row[0] == name and row[2] <= exchanges:
            errors.setdefault(row[2], []).append(row[4])
    return min((float(np.mean(found)) for found in errors.values()), default=None)
