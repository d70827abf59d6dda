"""``federated``: logistic regression of a1a by ten skewed owners who are clients, beside FedAvg and one pooled fit."""

import argparse
import functools
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoDiagonalNormal

from benchmarks import _report
from benchmarks.privacy import DELTA, KEY, OWNERS, Data, load, model, score, solvers
from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import InProcess
from numpyro_pvi.schedules import Sequential
from numpyro_pvi.solvers import NaturalGradient

BUDGETS = (math.inf, 5.0, 2.0, 1.0)
# Rounds of the fits that nobody protects, after which each is scored.
ROUNDS = (1, 3, 10)
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "federated"
# Of FedAvg: gradient steps of an owner a round, and their lengths, of which the best is shown (a favour).
LOCAL_STEPS, LENGTHS = 5, (0.1, 0.3, 1.0, 3.0)
FEDAVG_ROUNDS = (1, 3, 10, 30, 100)


def by_clients(data: Data, solver: Any, rounds: int) -> tuple[Any, Any]:
    """The result of some rounds of clients in turn, and what was sent for them."""
    runtime = InProcess()
    split = Partition(model, "data", data.owner)
    pvi = PVI(split, AutoDiagonalNormal(model), solver=solver, schedule=Sequential(), runtime=runtime)
    result = pvi.run(KEY, rounds, jnp.asarray(data.X), jnp.asarray(data.y), progress_bar=False)
    traffic = runtime.traffic
    runtime.close()
    return result, traffic


def pooled(data: Data) -> Any:
    """One group of all rows."""
    pvi = PVI(model, AutoDiagonalNormal(model), num_groups=1)
    return pvi.run(KEY, 30, jnp.asarray(data.X), jnp.asarray(data.y), progress_bar=False)


def fedavg(options: argparse.Namespace, dim: int, rounds: int) -> dict[float, tuple[list[np.ndarray], int]] | None:
    """Flower's FedAvg as examples/federated has it, over simulated nodes of these owners.

    Args:
        options: where the rows are.
        dim: number of coefficients.
        rounds: how many.

    Returns:
        By length of steps, of the gradient per row, the coefficients after every round, and bytes to and from one owner in a
        round; None where flwr or ray is not installed.
    """
    if not all(map(importlib.util.find_spec, ("flwr", "ray"))):
        return None
    # Read where Flower and Ray are imported, and by their workers.
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    sys.path.insert(0, str(EXAMPLE))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(EXAMPLE), str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation
    from hospitals_app import fedavg as app  # pyright: ignore[reportMissingImports]

    found, where = {}, (options.data, options.quick)
    server, owner = ServerApp(), ClientApp()

    @owner.train("fedavg")
    def train(message: Any, context: Any) -> Any:
        with jax.enable_x64(True):
            return app.descend(message, model, *rows_of(*where, int(context.node_config["partition-id"])))

    @server.main()
    def main(grid: Any, context: Any) -> None:
        del context
        for length in LENGTHS:
            path: dict[int, np.ndarray] = {}
            how = OWNERS, rounds, length, LOCAL_STEPS
            _, sent = app.average(grid, {"w": (dim,)}, *how, lambda n, theta, path=path: path.update({n: theta["w"]}))
            found[length] = [path[n + 1] for n in range(rounds)], sent // (rounds * OWNERS)

    run_simulation(server, owner, OWNERS, backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}})
    return found


@functools.cache
def rows_of(folder: str | None, quick: bool, number: int) -> tuple[np.ndarray, np.ndarray]:
    """One owner's rows, loaded where that owner is."""
    data = load(folder, quick)
    mine = data.owner == number
    return data.X[mine], data.y[mine]


def score_point(w: np.ndarray, data: Data) -> tuple[float, float]:
    """As :func:`benchmarks.privacy.score`, of one point."""
    right = -np.logaddexp(0.0, -(2 * data.y_test - 1) * (data.X_test @ w))
    return float(np.mean(right)), float(np.mean(right > math.log(0.5)))


def best_of_fedavg(data: Data, curves: dict[float, tuple[list[np.ndarray], int]] | None) -> list[tuple]:
    """Rows of the table, of the length of steps that is best after so many rounds."""
    if curves is None:
        print("FedAvg is left out: pip install 'numpyro_pvi[flower,ray]'", flush=True)
        return []
    found = []
    for rounds in FEDAVG_ROUNDS:
        if rounds <= len(curves[LENGTHS[0]][0]):
            scores = {length: score_point(path[rounds - 1], data) for length, (path, _) in curves.items()}
            length = max(scores, key=lambda a: scores[a][0])
            sent = curves[length][1] * rounds
            found.append((f"FedAvg, steps of {length:g}", "none", rounds, *scores[length], rounds, sent))
    return found


def run(options: argparse.Namespace) -> _report.Report:
    """Clients without and with protection of rows, FedAvg, and one pooled fit."""
    report = _report.Report("federated")
    with jax.enable_x64(True):
        data = load(options.data, options.quick)
        sizes, dim = np.bincount(data.owner), data.X.shape[1]
        best = score(pooled(data), data)
        rows: list[tuple] = [("pooled", "none", "-", *best, "-", "-")]
        for rounds in ROUNDS[:1] if options.quick else ROUNDS:
            result, traffic = by_clients(data, NaturalGradient(), rounds)
            rows.append(("PVI", "none", rounds, *score(result, data), traffic.trips, _each(traffic)))
        last = rows[-1]
        rows += best_of_fedavg(data, fedavg(options, dim, FEDAVG_ROUNDS[1 if options.quick else -1]))
        for epsilon in BUDGETS[:2] if options.quick else BUDGETS:
            solver, rounds = solvers(epsilon)["row"]
            result, traffic = by_clients(data, solver, rounds)
            shown = "none (clipped)" if math.isinf(epsilon) else f"{epsilon:g}"
            rows.append(("PVI, rows", shown, rounds, *score(result, data), traffic.trips, _each(traffic)))
        for row in rows:
            print(*row, flush=True)
        if not options.quick:
            report.add_target("PVI, 10 rounds: log score within .002 nats of the pooled fit", best[0] - last[3], 0.002)
        caption = (
            f"{len(data.y)} rows of {OWNERS} owners ({sizes.min()} to {sizes.max()} each), {dim} coefficients, mean-field; "
            f"{len(data.y_test)} rows to score; delta {DELTA:g}. FedAvg (Flower's): {LOCAL_STEPS} steps of all of an owner's rows "
            f"a round, of {len(LENGTHS)} lengths the best; its bytes are those of the coefficients as Flower sends them"
        )
        header = ("fit", "epsilon", "rounds", "log score (nats)", "accuracy", "round trips", "bytes, a client")
        report.add_table(caption, header, rows)
    return report


def _each(traffic: Any) -> int:
    """Bytes to and from one client."""
    return round((traffic.sent + traffic.received) / OWNERS)
