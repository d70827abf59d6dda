"""``bnn``: a Bayesian network of 784-200-10 on MNIST, mean field, 10 groups, one epoch a round, beside NumPyro's SVI."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from benchmarks import _report
from numpyro_pvi import PVI, Partition
from numpyro_pvi.solvers import LocalELBO

WIDTH, BATCH, GROUPS, STEP = 200, 100, 10, 5e-3
SHAPES = {"w1": (784, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, 10), "b2": (10,)}
ERROR_LIMITS = {10: 0.055, 66: 0.035}
START_SD, OTHER_SD = 0.1, 0.2
TIMED_ROUNDS = 5


def network(X: Any, y: Any = None, scale: float = 1.0) -> None:
    """One hidden layer of rectified linear units, standard normal priors; ``scale`` weighs the rows of an SVI batch."""
    value = {
        name: numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
        for name, shape in SHAPES.items()
    }
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.scale(scale=scale):
        hidden = jax.nn.relu(X @ value["w1"] + value["b1"])
        numpyro.sample("obs", dist.Categorical(logits=hidden @ value["w2"] + value["b2"]), obs=y)


def load(folder: str | None, num_rows: int | None) -> dict[str, Any]:
    """Pixels in [0, 1] and classes, from ``mnist.npz``; a made-up stand-in where no folder is given."""
    if folder is None:
        rng = np.random.default_rng(0)
        centers = rng.random((10, 784)) * (rng.random((10, 784)) < 0.2)
        count = 2_000 if num_rows is None else num_rows
        y = rng.integers(0, 10, 2 * count)
        X = np.clip(centers[y] + 0.3 * rng.normal(size=(2 * count, 784)), 0, 1)
        parts = {"X": X[:count], "y": y[:count], "X_test": X[count:], "y_test": y[count:]}
    else:
        found = np.load(Path(folder) / "mnist.npz")
        rows = slice(num_rows)
        parts = {"X": found["x_train"][rows], "y": found["y_train"][rows]}
        parts |= {"X_test": found["x_test"], "y_test": found["y_test"]}
        parts |= {name: parts[name].reshape(-1, 784) / 255.0 for name in ("X", "X_test")}
    return {n: jnp.asarray(v, jnp.float32 if n.startswith("X") else jnp.int32) for n, v in parts.items()}


def start_params(sd: float, seed: int = 0) -> dict[str, jax.Array]:
    """Where all methods start: small random locations, one sd for all weights."""
    rng = np.random.default_rng(seed)
    found = {f"{n}_auto_loc": jnp.asarray(0.05 * rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}
    return found | {f"{n}_auto_scale": jnp.full(s, sd, jnp.float32) for n, s in SHAPES.items()}


@jax.jit
def probabilities(params: dict[str, jax.Array], X: jax.Array) -> jax.Array:
    """Class probabilities of images, the mean of those at eight draws of q."""

    def at_draw(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(SHAPES))
        value = {
            n: params[f"{n}_auto_loc"] + params[f"{n}_auto_scale"] * jax.random.normal(k, SHAPES[n])
            for n, k in zip(SHAPES, keys, strict=True)
        }
        hidden = jax.nn.relu(X @ value["w1"] + value["b1"])
        return jax.nn.softmax(hidden @ value["w2"] + value["b2"])

    return jnp.mean(jax.lax.map(at_draw, jax.random.split(jax.random.key(1), 8)), axis=0)


def test_error(params: dict[str, jax.Array], X: jax.Array, y: jax.Array) -> jax.Array:
    """Share of test images whose likeliest class is wrong."""
    return jnp.mean(jnp.argmax(probabilities(params, X), axis=-1) != y)


def build(num_rows: int) -> PVI:
    """Ten iid groups of equal size, Adam on every site, one epoch a round."""
    labels = np.random.default_rng(0).permutation(num_rows) % GROUPS
    solver = LocalELBO(optax.adam(STEP), epochs=1, batch_size=BATCH)
    return PVI(Partition(network, "data", labels), AutoNormal(network), solver=solver)


def all_sds(params: dict[str, jax.Array]) -> np.ndarray:
    """Posterior sds of all weights."""
    return np.concatenate([np.ravel(params[f"{n}_auto_scale"]) for n in SHAPES])


def fit(
    pvi: PVI, data: dict[str, Any], sd: float, rounds: int
) -> tuple[list[float], list[float], dict[int, np.ndarray]]:
    """Test errors and losses by round, and the posterior sds after rounds 0, 10 and the last."""
    state = pvi.init(jax.random.key(0), data["X"], data["y"], init_params=start_params(sd))
    errors, losses, sds = [], [], {0: all_sds(pvi.get_params(state))}
    for done in range(1, rounds + 1):
        state, loss = pvi.update(state, data["X"], data["y"])
        params = pvi.get_params(state)
        errors.append(float(test_error(params, data["X_test"], data["y_test"])))
        losses.append(float(loss))
        if done in (10, rounds):
            sds[done] = all_sds(params)
    return errors, losses, sds


def svi_epoch(svi: SVI, num_rows: int, epochs: int = 1) -> Callable[..., Any]:
    """An epoch of SVI gradients on shuffled batches, or more, and one loss on all rows, compiled together."""
    steps = num_rows // BATCH

    @jax.jit
    def epoch(state: Any, key: jax.Array, X: jax.Array, y: jax.Array) -> Any:
        keys = [key, *(jax.random.fold_in(key, k) for k in range(1, epochs))]
        shuffled = [jax.random.permutation(key, num_rows)[: steps * BATCH] for key in keys]
        order = jnp.concatenate(shuffled).reshape(epochs * steps, BATCH)

        def step(state: Any, rows: jax.Array) -> Any:
            return svi.update(state, X[rows], y[rows], scale=num_rows / BATCH)[0], None

        state, _ = jax.lax.scan(step, state, order)
        return state, svi.evaluate(state, X, y)

    return epoch


def compare(
    report: _report.Report,
    pvi: PVI,
    data: dict[str, Any],
    repeats: int,
    decides: bool,
    whose: str = "",
    epochs: int = 1,
) -> None:
    """Seconds and bytes of a round of so many epochs beside as many SVI gradients and one loss; ``whose`` goes before captions."""
    X, y = data["X"], data["y"]
    num_rows = X.shape[0]
    start = pvi.init(jax.random.key(0), X, y, init_params=start_params(START_SD))
    svi = SVI(network, AutoNormal(network), optax.adam(1e-3), Trace_ELBO())
    svi_state = svi.init(jax.random.key(0), X[:BATCH], y[:BATCH], init_params=start_params(START_SD))
    epoch = svi_epoch(svi, num_rows, epochs)

    def svi_rounds() -> Any:
        state, loss = svi_state, None
        for i in range(TIMED_ROUNDS):
            state, loss = epoch(state, jax.random.key(i), X, y)
        return loss

    def pvi_rounds() -> Any:
        return pvi.run(jax.random.key(0), TIMED_ROUNDS, X, y, init_state=start, progress_bar=False).losses

    times = _report.paired_medians({"PVI": pvi_rounds, "SVI": svi_rounds}, repeats)
    analyses = {
        "PVI": jax.jit(pvi.update).lower(start, X, y).compile().memory_analysis(),
        "SVI": epoch.lower(svi_state, jax.random.key(0), X, y).compile().memory_analysis(),
    }
    used = {
        name: a.argument_size_in_bytes + a.output_size_in_bytes + a.temp_size_in_bytes for name, a in analyses.items()
    }
    rows = [
        (name, times[name] / TIMED_ROUNDS, a.argument_size_in_bytes / 2**20, a.temp_size_in_bytes / 2**20,
         a.output_size_in_bytes / 2**20, used[name] / 2**20)
        for name, a in analyses.items()
    ]  # fmt: skip
    header = ("what", "s a round", "arguments MiB", "temporary MiB", "results MiB", "together MiB")
    caption = f"{whose}{epochs * (num_rows // BATCH)} gradients of {BATCH} rows and one loss on {num_rows:,}, median of {repeats}"
    report.add_table(f"{caption} runs of {TIMED_ROUNDS} rounds", header, rows)
    if decides:
        report.add_target(f"{whose}seconds of a round over SVI's", times["PVI"] / times["SVI"], 1.1)
        report.add_target(f"{whose}memory over SVI's", used["PVI"] / used["SVI"], 1.5)


def svi_errors(data: dict[str, Any], rounds: int) -> list[float]:
    """Test error by epoch of SVI from the same start."""
    svi = SVI(network, AutoNormal(network), optax.adam(1e-3), Trace_ELBO())
    state = svi.init(jax.random.key(0), data["X"][:BATCH], data["y"][:BATCH], init_params=start_params(START_SD))
    epoch, errors = svi_epoch(svi, data["X"].shape[0]), []
    for i in range(rounds):
        state, _ = epoch(state, jax.random.key(i), data["X"], data["y"])
        errors.append(float(test_error(svi.get_params(state), data["X_test"], data["y_test"])))
    return errors


def run(options: argparse.Namespace) -> _report.Report:
    """Errors by round, posterior sds from two starts, time and memory; made-up images without ``--data`` decide nothing."""
    report = _report.Report("bnn")
    data = load(options.data, 2_000 if options.quick else options.rows)
    decides = options.data is not None and not options.quick
    rounds = 3 if options.quick or options.data is None else 66
    pvi = build(data["X"].shape[0])
    compare(report, pvi, data, 3, decides)
    errors, losses, sds = fit(pvi, data, START_SD, rounds)
    other = fit(pvi, data, OTHER_SD, rounds)
    beside = svi_errors(data, min(rounds, 10))
    shown = [r for r in (1, 2, 3, 5, 10, 20, 30, 40, 50, 60, 66) if r <= rounds]
    rows = [
        (r, losses[r - 1], errors[r - 1], other[0][r - 1], beside[r - 1] if r <= len(beside) else "") for r in shown
    ]
    header = (
        "round",
        "loss, nats",
        f"test error from sd {START_SD}",
        f"from sd {OTHER_SD}",
        "SVI after as many epochs",
    )
    report.add_table("test error by round", header, rows)
    shares = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    rows = [
        (first, r, *np.quantile(values, shares).tolist(), float(np.mean(np.abs(values / first - 1) > 0.05)))
        for first, found in ((START_SD, sds), (OTHER_SD, other[2]))
        for r, values in found.items()
    ]
    header = ("start sd", "round", *(f"{q:.0%}" for q in shares), "moved over 5 %")
    report.add_table("quantiles of the posterior sds of all weights", header, rows)
    if decides:
        for r, limit in ERROR_LIMITS.items():
            report.add_target(f"test error at round {r}", errors[r - 1], limit)
        moved = float(np.mean(np.abs(sds[rounds] / START_SD - 1) > 0.05))
        report.add_target("share of sds that moved over 5 % from the start", moved, 0.5, at_least=True)
    return report
