"""``graph``: how fast agents without a server agree, and where they end; float64, no figure depends on the machine's speed."""

import argparse
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _models, _problems, _references, _report
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Decentralized

FAILURE = 0.1
# Gossip steps allowed, in units of 1 / gap, and the KL to reach in nats.
STEPS, KL = 20, 1e-10


def graphs(size: int) -> dict[str, networkx.Graph]:
    """The four graphs of one size."""
    side = math.isqrt(size)
    rows = side if side * side == size else 2
    radius = 1.2 * math.sqrt(math.log(size) / (math.pi * size))
    candidates = (networkx.random_geometric_graph(size, radius, seed=seed) for seed in itertools.count())
    geometric = next(graph for graph in candidates if networkx.is_connected(graph))
    return {
        "ring": networkx.cycle_graph(size),
        "grid": networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(rows, size // rows)),
        "star": networkx.star_graph(size - 1),
        "geometric": geometric,
    }


def contraction(schedule: Decentralized) -> float:
    """What plain gossip leaves of the disagreement in one step, over its late steps."""
    gap = 1 - schedule.adjacency.modulus
    steps = math.ceil(8 / gap)
    gossip = Decentralized(schedule.adjacency, steps_per_round=steps).gossip
    present = jnp.ones(schedule.adjacency.size, bool)
    values = jax.random.normal(jax.random.key(0), (schedule.adjacency.size, 8))
    spread = []
    mix = jax.jit(lambda v: gossip.mix(v, jax.random.key(0), present, jnp.int32(0))[0])
    for _ in range(2):
        values = mix(values)
        # Far below the first step's disagreement rounding would take over.
        values = (values - values.mean(0)) / jnp.linalg.norm(values - values.mean(0))
        mixed = mix(values)
        spread.append(float(jnp.linalg.norm(mixed - mixed.mean(0))))
    return spread[-1] ** (1 / steps)


def kl(left: tuple, right: tuple) -> float:
    """KL of two Gaussians given by mean and covariance, nats."""
    (m, v), (n, w) = left, right
    precision = np.linalg.inv(w)
    shift = n - m
    inner = np.trace(precision @ v) - len(m) + shift @ precision @ shift
    return 0.5 * float(inner + np.linalg.slogdet(w)[1] - np.linalg.slogdet(v)[1])


def agents(state: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean and covariance of every agent's own q."""
    tracked, count = state.schedule_state.tracked, len(state.schedule_state.tracked.precision_mean)
    found = []
    for i in range(count):
        covariance = np.linalg.inv(state.prior.precision + count * tracked.precision[i])
        found.append((covariance @ (state.prior.precision_mean + count * tracked.precision_mean[i]), covariance))
    return found


def steps_to_centre(
    graph: networkx.Graph, failure: float, data: _models.Data, optimum: Any
) -> tuple[float, float, int]:
    """Gossip steps until every agent is within the KL of the centre, the KL at the end, and steps allowed."""
    allowed = STEPS / (1 - Decentralized(graph).adjacency.modulus)
    schedule = Decentralized(graph, link_failure=failure)
    pvi = PVI(
        Partition(_models.logistic, "data", data.labels), AutoMultivariateNormal(_models.logistic), schedule=schedule
    )
    state = pvi.init(jax.random.key(0), data.X, data.y)
    worst, steps = float("inf"), 0
    while steps + schedule.gossip.count <= allowed and worst > KL:
        count = min(4, int(allowed - steps) // schedule.gossip.count)
        state = pvi.run(None, count, data.X, data.y, init_state=state, progress_bar=False).state
        steps += count * schedule.gossip.count
        worst = max(kl(q, (optimum.loc, optimum.tril @ optimum.tril.T)) for q in agents(state))
    return steps / allowed, worst, schedule.gossip.count


def stream_error(graph: networkx.Graph, rows: int = 6, dim: int = 4) -> float:
    """Largest relative distance of the agents' mean precision from the central one, over every step of a conjugate stream."""
    size = graph.number_of_nodes()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(size * rows, dim))
    y = X @ rng.normal(size=dim) + rng.normal(size=len(X))
    owner = np.repeat(np.arange(size), rows)
    schedule = Decentralized(graph, mixing="consensus", batch_size=1, link_failure=FAILURE)
    pvi = PVI(Partition(_models.linear, "data", owner), AutoMultivariateNormal(_models.linear), schedule=schedule)
    state, worst = pvi.init(jax.random.key(0), X, y), 0.0
    update = jax.jit(pvi.update)
    for step in range(rows):
        state, _ = update(state, X, y)
        seen = X[np.arange(len(X)) % rows <= step]
        central = np.eye(dim) + seen.T @ seen
        mean = np.mean([np.linalg.inv(v) for _, v in agents(state)], axis=0)
        worst = max(worst, float(np.abs(mean - central).max() / np.abs(central).max()))
    return worst


def run(options: argparse.Namespace) -> _report.Report:
    """Every graph and size."""
    report = _report.Report("graph")
    sizes = (8,) if options.quick else (8, 32, 256)
    with jax.enable_x64(True):
        rows = []
        for size in sizes:
            data = _models.simulate_logistic(4 * size, 3, size)
            data = dataclasses.replace(data, X=data.X.astype(float))
            optimum = _references.solve(_problems.logistic_problem(data.X, data.y))
            for name, graph in graphs(size).items():
                schedule = Decentralized(graph)
                modulus = schedule.adjacency.modulus
                rate = contraction(schedule)
                reliable = steps_to_centre(graph, 0.0, data, optimum)
                failing = steps_to_centre(graph, FAILURE, data, optimum)
                rows.append((name, size, f"{modulus:.6f}", f"{rate:.6f}", *reliable, *failing))
                print(rows[-1], flush=True)
                report.add_target(f"{name} of {size}: contraction less the second modulus", abs(rate - modulus), 1e-3)
                report.add_target(f"{name} of {size}: KL to the centre within 20/gap steps", reliable[1], KL)
                report.add_target(f"{name} of {size}: the same through 10 % failures", failing[1], KL)
        header = ("graph", "agents", "second modulus", "contraction", "share of 20/gap", "KL", "steps a round")
        report.add_table(
            "tracking, logistic regression, D = 3", (*header, "failing: share", "KL", "steps a round"), rows
        )
        rows = []
        for name, graph in graphs(sizes[0] if options.quick else 32).items():
            rows.append((name, graph.number_of_nodes(), stream_error(graph)))
            report.add_target(f"{name}: mean precision of a conjugate stream", rows[-1][-1], 1e-9)
        report.add_table("DELBO, linear regression, 10 % failures", ("graph", "agents", "relative error"), rows)
    return report
