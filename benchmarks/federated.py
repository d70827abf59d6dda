"""``federated``: logistic regression of a1a by ten skewed owners who are clients, beside FedAvg and one pooled fit."""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoDiagonalNormal

from benchmarks import _report
from benchmarks.privacy import DELTA, KEY, OWNERS, PRECISION, Data, load, model, score, solvers
from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import InProcess
from numpyro_pvi.schedules import Sequential
from numpyro_pvi.solvers import NaturalGradient

BUDGETS = (math.inf, 5.0, 2.0, 1.0)
# Rounds of the fits that nobody protects, after which each is scored.
ROUNDS = (1, 3, 10)
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


def fedavg(data: Data, length: float, rounds: int) -> list[np.ndarray]:
    """Coefficients after every round of FedAvg (McMahan et al.): owners' gradient steps from one point, averaged by their rows.

    Args:
        data: of all owners.
        length: of a step, of the gradient per row.
        rounds: how many.

    Returns:
        One vector a round; the objective of an owner is its rows' and its share of the prior.
    """
    masks = jnp.asarray(data.owner[:, None] == np.arange(OWNERS)).T * 1.0
    sizes, X, y = jnp.sum(masks, axis=1), jnp.asarray(data.X), jnp.asarray(data.y)

    def loss(w: Any, mask: Any, size: Any) -> Any:
        rows = mask * (jnp.logaddexp(0.0, X @ w) - y * (X @ w))
        return (jnp.sum(rows) + size / len(data.y) * 0.5 * PRECISION * w @ w) / size

    def local(w: Any, mask: Any, size: Any) -> Any:
        return jax.lax.fori_loop(0, LOCAL_STEPS, lambda _, w: w - length * jax.grad(loss)(w, mask, size), w)

    @jax.jit
    def one(w: Any) -> Any:
        return jnp.average(jax.vmap(local, (None, 0, 0))(w, masks, sizes), axis=0, weights=sizes)

    w, found = jnp.zeros(data.X.shape[1]), []
    for _ in range(rounds):
        w = one(w)
        found.append(np.asarray(w))
    return found


def score_point(w: np.ndarray, data: Data) -> tuple[float, float]:
    """As :func:`benchmarks.privacy.score`, of one point."""
    right = -np.logaddexp(0.0, -(2 * data.y_test - 1) * (data.X_test @ w))
    return float(np.mean(right)), float(np.mean(right > math.log(0.5)))


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
        curves = {length: fedavg(data, length, FEDAVG_ROUNDS[-1]) for length in LENGTHS}
        for rounds in FEDAVG_ROUNDS:
            length = max(LENGTHS, key=lambda a: score_point(curves[a][rounds - 1], data)[0])
            found = score_point(curves[length][rounds - 1], data)
            rows.append((f"FedAvg, steps of {length:g}", "none", rounds, *found, rounds, 2 * 8 * dim * rounds))
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
            f"{len(data.y_test)} rows to score; delta {DELTA:g}. FedAvg: {LOCAL_STEPS} steps of all of an owner's rows a round, of "
            f"{len(LENGTHS)} lengths the best; its bytes are the coefficients' alone"
        )
        header = ("fit", "epsilon", "rounds", "log score (nats)", "accuracy", "round trips", "bytes, a client")
        report.add_table(caption, header, rows)
    return report


def _each(traffic: Any) -> int:
    """Bytes to and from one client."""
    return round((traffic.sent + traffic.received) / OWNERS)
