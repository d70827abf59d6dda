"""``streaming-gp``: sparse Gaussian processes over batches, private and shared pseudo-points (PVI, sections 6 and 7.2).

Float64. Banana by regions (classification), the SARCOS test part in time order (regression), and seconds of a batch as
pseudo-points and batches grow.
"""

import argparse
import pathlib
import time
from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
import optax

from benchmarks import _report
from numpyro_pvi import gp


def run(options: argparse.Namespace) -> _report.Report:
    """Each part whose data are there; the growth always."""
    report = _report.Report("streaming-gp")
    folder = None if options.data is None else pathlib.Path(options.data)
    with jax.enable_x64(True):
        _growth(report, options)
        _banana(report, options, folder)
        _arm(report, options, folder)
    return report


# --------------------------------------------------------------------------------------------------------------- growth


def _growth(report: _report.Report, options: argparse.Namespace) -> None:
    """Warm seconds of one batch at fixed hyperparameters, given so many pseudo-points of others."""
    rng, rows, own = np.random.default_rng(0), 200, 20
    found = []
    for others in (3, 11) if options.quick else (3, 11, 27, 59):
        times = {}
        for pseudo in ("private", "shared"):
            total = (others + 1) * own
            X = rng.uniform(-3, 3, (total, 4))
            y = np.sin(X.sum(1)) + 0.1 * rng.normal(size=total)
            model = gp.SparseGP(gp.squared_exponential, gp.GaussianNoise(0.1), pseudo, hyperparameters="fixed")
            state = model.init(jax.random.key(0), 4, pseudo_inputs=X[:own] if pseudo == "shared" else None)
            for k in range(others):
                part = slice(k * own, (k + 1) * own)
                at = X[part] if pseudo == "private" else None
                state = model.add_batch(state, X[part], y[part], pseudo_inputs=at)
            new = rng.uniform(-3, 3, (rows, 4))
            labels, at = np.sin(new.sum(1)), new[:own] if pseudo == "private" else None

            def batch(
                model: Any = model, state: Any = state, new: Any = new, labels: Any = labels, at: Any = at
            ) -> Any:
                return model.add_batch(state, new, labels, pseudo_inputs=at).process

            times[pseudo] = batch
        medians = _report.paired_medians(times, 5)
        found.append((others, (others + 1) * own, 1e3 * medians["private"], 1e3 * medians["shared"]))
    header = ("batches before", "private pseudo-points with the new ones", "private, ms", "shared (20), ms")
    report.add_table(f"one batch of {rows} rows and {own} pseudo-points, fixed hyperparameters, warm", header, found)


# --------------------------------------------------------------------------------------------------------------- banana


def _banana(report: _report.Report, options: argparse.Namespace, folder: pathlib.Path | None) -> None:
    """Three regions from left to right, ten pseudo-points each (7.2.1)."""
    if folder is None or not (folder / "banana.npz").exists():
        return
    z = np.load(folder / "banana.npz")
    X, y, X_test, y_test = (np.asarray(z[k], float) for k in ("x_train", "y_train", "x_test", "y_test"))
    order = np.argsort(X[:, 0], kind="stable")
    size = len(X) // 3
    parts = [order[k * size : (k + 1) * size] for k in range(3)]
    steps, found = (10 if options.quick else 150), []
    for name, settings in (
        ("private", {}),
        ("private, q over hyperparameters", {"hyperparameters": "distribution", "num_nodes": 8}),
        ("shared (30)", {"pseudo": "shared", "move_pseudo_inputs": True}),
    ):
        model = gp.SparseGP(gp.squared_exponential, _logistic, num_steps=steps, **settings)
        shared = X[np.random.default_rng(0).choice(len(X), 30, replace=False)] if model.pseudo == "shared" else None
        state = model.init(
            jax.random.key(0), 2, kernel_params=gp.kernel_params(2, sd=2.0, length=0.7), pseudo_inputs=shared
        )
        states = []
        for k, part in enumerate(parts):
            began = time.perf_counter()
            state = model.add_batch(state, X[part], y[part])
            seconds = time.perf_counter() - began
            found.append((name, k + 1, *_scores(model, state, X_test, y_test), seconds))
            states.append(state)
        for _ in range(0 if options.quick else 2):
            for k, part in enumerate(parts):
                state = model.revisit(state, k, X[part], y[part])
        found.append((name, "all, revisited twice", *_scores(model, state, X_test, y_test), ""))
        _draw(model, [*states, state], X, y, parts, options, name.partition(",")[0].partition(" ")[0] + str(len(found)))
    header = ("pseudo-points", "batches seen", "test accuracy", "mean log score", "s, compiling included")
    report.add_table("banana, 399 rows in three regions from left to right, 4,900 test rows", header, found)
    if not options.quick:
        report.add_target("banana, private: accuracy after all batches", found[2][2], 0.87, at_least=True)


def _logistic(f: Any) -> dist.Distribution:
    return dist.Bernoulli(logits=f)


def _scores(model: gp.SparseGP, state: gp.SparseGPState, X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    mean, _ = model.predict(state, X)
    return float(np.mean((mean > 0) == y)), float(np.mean(model.log_predictive(state, X, y)))


def _draw(
    model: gp.SparseGP,
    states: list[gp.SparseGPState],
    X: np.ndarray,
    y: np.ndarray,
    parts: list[np.ndarray],
    options: argparse.Namespace,
    name: str,
) -> None:
    """The map after each batch, as a picture in the folder that was named."""
    if options.out is None:
        return
    from matplotlib import pyplot

    xs = np.linspace(-3, 3, 80)
    grid = np.stack(np.meshgrid(xs, xs), -1).reshape(-1, 2)
    figure, axes = pyplot.subplots(1, len(states), figsize=(4 * len(states), 4), layout="constrained")
    for k, (axis, state) in enumerate(zip(axes, states, strict=True)):
        found = np.exp(model.log_predictive(state, grid, np.ones(len(grid)))).reshape(80, 80)
        axis.imshow(found, origin="lower", extent=(-3, 3, -3, 3), cmap="coolwarm", vmin=0, vmax=1, alpha=0.6)
        seen = np.concatenate(parts[: k + 1])
        axis.scatter(*X[seen].T, c=y[seen], cmap="coolwarm", s=6)
        axis.scatter(*np.concatenate(state.pseudo_inputs).T, c="k", marker="x", s=20)
        axis.set_title(f"{k + 1} batches" if k < len(parts) else "revisited")
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"streaming_gp_{name}.png", dpi=100)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------------------------ arm


def _arm(report: _report.Report, options: argparse.Namespace, folder: pathlib.Path | None) -> None:
    """Inverse dynamics, one joint, batches in the order of the file and sorted by a joint's position (7.2.2)."""
    if folder is None or not (folder / "sarcos_test_4449.npz").exists():
        return
    z = np.load(folder / "sarcos_test_4449.npz")
    X, y = np.asarray(z["x"], float), np.asarray(z["torque"][:, 0], float)
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    held = np.zeros(len(X), bool)
    held[4::5] = True
    test, train = np.flatnonzero(held), np.flatnonzero(~held)
    batches, own, steps = (3, 10, 5) if options.quick else (8, 20, 60)
    for order, rows in (("in the file's order", train), ("sorted by joint 1", train[np.argsort(X[train, 0])])):
        parts = np.array_split(rows, batches)
        size = min(len(p) for p in parts)
        parts = [p[:size] for p in parts]
        kept: dict[str, list[tuple[float, float]]] = {}
        clock = {}
        for name in ("private", "shared", "last batch only"):
            began = time.perf_counter()
            kept[name] = _one_arm(name, parts, X, y, test, own, steps)
            clock[name] = time.perf_counter() - began
        whole = [np.concatenate(parts)]
        began = time.perf_counter()
        all_at_once = _one_arm("shared", whole, X, y, test, own * batches, steps)[0]
        clock["batch"] = time.perf_counter() - began
        found = [(k + 1, *(f"{kept[n][k][0]:.3f} / {kept[n][k][1]:.2f}" for n in kept)) for k in range(batches)]
        found.append(("all at once", "", f"{all_at_once[0]:.3f} / {all_at_once[1]:.2f}", ""))
        found.append(("s in all, at once", *(f"{clock[n]:.0f}" for n in kept)))
        header = ("batches seen", *(f"{n}" for n in kept))
        caption = f"SARCOS test part, joint 1, {batches} batches of {size} rows {order}: SMSE / SMLL of {len(test)} held-out rows"
        report.add_table(caption, header, found)
        if not options.quick:
            last = {n: kept[n][-1][0] for n in kept}
            report.add_target(f"{order}: SMSE of private over shared", last["private"] / last["shared"], 1.0)
            report.add_target(
                f"{order}: SMSE of private over the last batch only", last["private"] / last["last batch only"], 0.5
            )


def _one_arm(
    name: str, parts: list[np.ndarray], X: np.ndarray, y: np.ndarray, test: np.ndarray, own: int, steps: int
) -> list[tuple[float, float]]:
    """SMSE and SMLL after every batch."""
    pseudo = "shared" if name == "shared" else "private"
    model = gp.SparseGP(
        gp.squared_exponential,
        gp.GaussianNoise(0.3),
        pseudo,
        optim=optax.adam(0.03),
        num_steps=steps,
        move_pseudo_inputs=True,
    )
    # As many pseudo-points as the private batches have together; they begin at rows of the first batch.
    total = own * len(parts)
    shared = X[parts[0][np.linspace(0, len(parts[0]) - 1, min(total, len(parts[0]))).astype(int)]]
    prior = model.init(
        jax.random.key(0),
        X.shape[1],
        kernel_params=gp.kernel_params(X.shape[1], length=4.0),
        pseudo_inputs=shared if pseudo == "shared" else None,
    )
    state, found = prior, []
    for part in parts:
        before = prior if name == "last batch only" else state
        state = model.add_batch(before, X[part], y[part], pseudo_inputs=own if pseudo == "private" else None)
        mean, _ = model.predict(state, X[test])
        trivial = -0.5 * np.log(2 * np.pi) - 0.5 * y[test] ** 2
        score = float(np.mean(trivial - model.log_predictive(state, X[test], y[test])))
        found.append((float(np.mean((mean - y[test]) ** 2) / np.var(y[test])), score))
        print(name, *found[-1], flush=True)
    return found
