"""``kalman``: counts along a random walk, smoothed in time linear in their number, beside dense covariances at T = 500; float64."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from benchmarks import _report
from numpyro_pvi import PVI, AutoExponentialFamily, Partition

SCALE = 0.1
ROUNDS = 6
EQUAL, GROWTH = 1e-6, 1.25


def model(steps: int, y: Any = None) -> None:
    """A random walk of the log rate, one count at every time."""
    x = numpyro.sample("x", dist.GaussianRandomWalk(SCALE, steps))
    with numpyro.plate("time", steps):
        numpyro.sample("y", dist.Poisson(jnp.exp(x)), obs=y)


def simulate(steps: int) -> np.ndarray:
    """Counts whose log rate goes up and down."""
    rng = np.random.default_rng(steps)
    return rng.poisson(np.exp(1.0 + np.sin(np.arange(steps) / 30.0)))


def run(options: argparse.Namespace) -> _report.Report:
    """The dense answer first, then times."""
    report = _report.Report("kalman")
    with jax.enable_x64(True):
        steps = 60 if options.quick else 500
        rounds, (mean, sd, elbo) = _against_dense(steps)
        header = ("T", "rounds", "largest difference of means, sds", "of log sds", "of ELBOs, nats")
        report.add_table("beside the dense optimum", header, [(steps, rounds, mean, sd, elbo)])
        report.add_target(f"T = {steps}: largest difference from the dense optimum", max(mean, sd, elbo), EQUAL)
        rows = []
        for size in (100, 200) if options.quick else (1_000, 10_000, 30_000, 100_000):
            rows.append((size, *_seconds(size)))
            print(rows[-1], flush=True)
        growth = rows[-1][2] / rows[1][2] / (rows[-1][0] / rows[1][0])
        report.add_table(
            "warm seconds", ("T", "start and planning, s (cold)", f"{ROUNDS} rounds, s", "s a round"), rows
        )
        if not options.quick:
            report.add_target("growth of time over growth of T, 10,000 to 100,000", growth, GROWTH)
    return report


def _fit(steps: int) -> tuple[PVI, jax.Array]:
    return PVI(Partition(model, "time", np.zeros(steps, int)), AutoExponentialFamily(model)), jnp.asarray(
        simulate(steps)
    )


def _against_dense(steps: int) -> tuple[int, tuple[float, float, float]]:
    pvi, y = _fit(steps)
    result = pvi.run(jax.random.key(0), 50, steps, y, tol=1e-9, progress_bar=False)
    q = pvi.posterior(result.state)["x"]
    mean, variance, elbo = _dense(np.asarray(y))
    losses = np.asarray(result.losses)
    losses = losses[np.isfinite(losses)]
    found = (
        float(np.max(np.abs(q.mean - mean) / np.sqrt(variance))),
        float(np.max(np.abs(0.5 * np.log(np.asarray(q.variance) / variance)))),
        abs(-float(losses[-1]) - elbo),
    )
    return len(losses), found


def _dense(y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Marginal means and variances of the best Gaussian over all states at once, and its ELBO; E exp(x) is known."""
    steps = len(y)
    walk = SCALE * np.tril(np.ones((steps, steps)))
    prior = np.linalg.inv(walk @ walk.T)
    vector, diagonal = np.log(y + 1.0) * (y + 1.0), y + 1.0
    for _ in range(200):
        covariance = np.linalg.inv(prior + np.diag(diagonal))
        mean = covariance @ vector
        rate = np.exp(mean + 0.5 * np.diag(covariance))
        moved = np.max(np.abs(rate - diagonal) / rate)
        vector, diagonal = y - rate + rate * mean, rate
        if moved < 1e-13:
            break
    square = np.trace(prior @ covariance) + mean @ prior @ mean
    divergence = 0.5 * (square - steps - np.linalg.slogdet(prior)[1] - np.linalg.slogdet(covariance)[1])
    factorials = np.sum([np.sum(np.log(np.arange(1, k + 1))) for k in y])
    return mean, np.diag(covariance), float(np.sum(y * mean - rate) - factorials - divergence)


def _seconds(steps: int) -> tuple[float, float, float]:
    pvi, y = _fit(steps)
    state = None

    def start() -> Any:
        nonlocal state
        state = pvi.init(jax.random.key(0), steps, y)
        return state

    planning = _report.seconds(start)
    again = _report.paired_medians(
        {"fit": lambda: pvi.run(None, ROUNDS, steps, y, init_state=state, progress_bar=False).state}, 3
    )["fit"]
    return planning, again, again / ROUNDS
