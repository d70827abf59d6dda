"""``blackbox``: models without structure, a small differential equation and a neural regression of width 8.

Both sides start from the same guide params, for a network has many optima. ELBOs are compared on common draws.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_sample, init_to_uniform
from numpyro.infer.util import potential_energy

from benchmarks import _nonlinear, _opponent, _report, _subjects
from benchmarks._opponent import Setting

TOLERANCE = 0.1
SEEDS = 5
NUM_DRAWS = 4_096
ROUNDS_BETWEEN = 4


@dataclasses.dataclass(frozen=True)
class Problem:
    """One model with its data, and where its fits start."""

    name: str
    model: Callable[..., Any]
    arrays: tuple[Any, ...]
    labels: np.ndarray
    num_rounds: int
    init: Any

    def start(self, seed: int) -> dict[str, Any]:
        """Guide params that both sides start from."""
        guide = AutoMultivariateNormal(self.model, init_loc_fn=self.init, init_scale=0.05)
        svi = SVI(self.model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        return svi.get_params(svi.init(jax.random.key(seed), *self.arrays))


def run(options: argparse.Namespace) -> _report.Report:
    """Both problems, five seeds each."""
    report = _report.Report("blackbox")
    quick = options.quick
    start, y = _nonlinear.simulate_predators(6, 12, 0)
    X, z = _nonlinear.simulate_network(200 if quick else 1_000, 0)
    problems = (
        Problem(
            "ode, D = 6, 6 experiments in 3 groups", _nonlinear.predators,
            (jnp.asarray(start), jnp.asarray(y)), np.arange(6) % 3, 64, init_to_sample(),
        ),
        Problem(
            f"network, D = 49, {len(z)} rows in 4 groups", _nonlinear.network,
            (jnp.asarray(X), jnp.asarray(z)), np.arange(len(z)) % 4, 400, init_to_uniform(),
        ),
    )  # fmt: skip
    steps = 500 if quick else 40_000
    settings = tuple(Setting(rate, steps, init_scale=0.05) for rate in ((0.01,) if quick else (0.003, 0.01, 0.03)))
    for problem in problems:
        _compare(report, problem, settings, 1 if quick else SEEDS, decides=not quick)
    return report


def _compare(
    report: _report.Report, problem: Problem, settings: tuple[Setting, ...], seeds: int, decides: bool
) -> None:
    elbo = _elbo(problem)
    best = _best_setting(report, problem, settings, elbo)
    rows, costs, curves, opposing, times = [], [], [], [], []
    baseline = _points_function(problem)
    for seed in range(seeds):
        start = problem.start(seed)
        svi_curve, svi_time = _svi(problem, best, start, elbo)
        final = svi_curve[-1][1]
        svi_steps = next(step for step, value in svi_curve if value >= final - TOLERANCE)
        pvi = _subjects.build(problem.model, problem.labels)
        state = pvi.init(jax.random.key(seed), *problem.arrays, init_params=start)
        curve, last = _pvi_curve(problem, pvi, state, elbo)
        reached = [r for r, value in curve if value >= final - TOLERANCE]
        rounds = reached[0] if reached else problem.num_rounds
        one = _report.paired_medians(
            {
                "pvi": _run_function(pvi, state, rounds, problem),
                "short": _run_function(pvi, last, 32, problem),
                "long": _run_function(pvi, last, 96, problem),
                "points": baseline,
            },
            3,
        )
        seconds, each = svi_time * svi_steps / best.num_steps, (one["long"] - one["short"]) / 64
        curves.append([(r, value - final) for r, value in curve])
        opposing.append([(step, value - final) for step, value in svi_curve])
        times.append((each, svi_time / best.num_steps))
        costs.append(each / one["points"])
        words = pvi.info(last).expectation[-1]
        share = one["pvi"] / seconds if reached else "none"
        rows.append((seed, final, curve[-1][1], svi_steps, seconds, rounds if reached else "none", one["pvi"],
                     share, costs[-1], words))  # fmt: skip
    header = ("seed", "SVI's ELBO", "PVI's ELBO", f"SVI steps to {TOLERANCE}", "s", f"PVI rounds to {TOLERANCE}", "s",
              "PVI s / SVI s", "round / points", "expectation at the end")  # fmt: skip
    report.add_table(f"{problem.name}: {best.name} against PVI's defaults, common starts", header, rows)
    if decides:
        name = problem.name.split(",")[0]
        mean = _mean_curve(curves)
        report.add_target(f"{name}: PVI's ELBO less long SVI's, mean", mean[-1][1], -TOLERANCE, at_least=True)
        rounds, steps = _first_near(mean), _first_near(_mean_curve(opposing))
        own, other = (statistics.fmean(t) for t in zip(*times, strict=True))
        report.add_target(
            f"{name}: PVI's time until the mean over seeds is within {TOLERANCE} of long SVI's, share of SVI's",
            rounds * own / (steps * other),
            0.5,
        )
        report.add_target(
            f"{name}: round, times value and gradient of all rows at 2D points, median", statistics.median(costs), 1.5
        )


def _mean_curve(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Mean over seeds at every checkpoint, nats above the end of SVI's run of the same seed."""
    return [(points[0][0], statistics.fmean(value for _, value in points)) for points in zip(*curves, strict=True)]


def _first_near(curve: list[tuple[int, float]]) -> float:
    """The first checkpoint that is within the tolerance of the end of SVI's run; infinity without one."""
    return next((at for at, value in curve if value >= -TOLERANCE), float("inf"))


def _elbo(problem: Problem) -> Callable[[Any], float]:
    """Guide params to the ELBO, nats, on draws that all calls share."""
    dim = int(problem.start(0)["auto_loc"].shape[0])
    noise = np.random.default_rng(0).standard_normal((NUM_DRAWS // 2, dim))
    eps = jnp.asarray(np.concatenate([noise, -noise]), jnp.float32)
    density = _log_density(problem)

    @jax.jit
    def value(loc: Any, tril: Any) -> Any:
        points = loc + eps @ tril.T
        values = jax.lax.map(density, points, batch_size=64)
        entropy = 0.5 * dim * (1 + jnp.log(2 * jnp.pi)) + jnp.sum(jnp.log(jnp.diagonal(tril)))
        return jnp.mean(values) + entropy

    return lambda params: float(value(params["auto_loc"], params["auto_scale_tril"]))


def _log_density(problem: Problem) -> Callable[[Any], Any]:
    """The model's log density at a flat unconstrained point in the guide's order."""
    guide = AutoMultivariateNormal(problem.model, init_loc_fn=problem.init)
    svi = SVI(problem.model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    svi.init(jax.random.key(0), *problem.arrays)

    def density(point: Any) -> Any:
        return -potential_energy(problem.model, problem.arrays, {}, guide._unpack_latent(point))

    return density


def _points_function(problem: Problem) -> Callable[[], Any]:
    """Value and gradient of all rows (and the prior) at 2D points, compiled."""
    density = _log_density(problem)
    dim = int(problem.start(0)["auto_loc"].shape[0])
    points = jnp.asarray(0.1 * np.random.default_rng(1).standard_normal((2 * dim, dim)), jnp.float32)
    compiled = jax.jit(jax.vmap(jax.value_and_grad(density)))
    return lambda: compiled(points)


def _svi(problem: Problem, setting: Setting, start: Any, elbo: Callable[[Any], float], marks: int = 40) -> Any:
    """ELBO along a long run ``[(steps, nats)]``, and the seconds that the whole run takes."""
    svi = setting.build(problem.model)
    state = svi.init(jax.random.key(0), *problem.arrays, init_params=start)
    every = max(setting.num_steps // marks, 1)
    kept = jax.device_get(_opponent.scan_steps(svi, setting.num_steps, every)(state, *problem.arrays))
    curve = [
        ((i + 1) * every, elbo({name: value[i] for name, value in kept.items()})) for i in range(len(kept["auto_loc"]))
    ]
    whole = _opponent.scan_steps(svi, setting.num_steps)
    return curve, _report.paired_medians({"svi": lambda: whole(state, *problem.arrays)}, 1)["svi"]


def _best_setting(
    report: _report.Report, problem: Problem, settings: tuple[Setting, ...], elbo: Callable[[Any], float]
) -> Setting:
    found = {setting: _svi(problem, setting, problem.start(0), elbo)[0][-1][1] for setting in settings}
    report.add_table(
        f"{problem.name}: SVI with AutoMultivariateNormal, seed 0", ("setting", "final ELBO"),
        [(setting.name, value) for setting, value in found.items()],
    )  # fmt: skip
    return max(found, key=lambda setting: found[setting])


def _pvi_curve(problem: Problem, pvi: Any, state: Any, elbo: Callable[[Any], float]) -> tuple[list, Any]:
    curve = []
    for done in range(ROUNDS_BETWEEN, problem.num_rounds + 1, ROUNDS_BETWEEN):
        state = pvi.run(None, ROUNDS_BETWEEN, *problem.arrays, init_state=state, progress_bar=False).state
        curve.append((done, elbo(pvi.get_params(state))))
    return curve, state


def _run_function(pvi: Any, state: Any, rounds: int, problem: Problem) -> Callable[[], Any]:
    return lambda: pvi.run(None, rounds, *problem.arrays, init_state=state, progress_bar=False).state.sites
