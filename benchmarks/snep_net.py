"""``snep-net``: SNEP on a network of two layers for digits, beside power EP, VI and consensus Monte Carlo at equal gradients."""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
from numpyro.infer import HMC, MCMC
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.hmc_util import consensus, parametric

from benchmarks import _report
from numpyro_pvi import PVI, Partition
from numpyro_pvi.solvers import SNEP, MCMCMoments, NaturalGradient, PowerEP

SIDE, HIDDEN, GROUPS = 7, 5, 4
SHAPES = {"w1": (SIDE * SIDE, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN,), "b2": ()}
DIM = sum(int(np.prod(s)) for s in SHAPES.values())
# Leapfrog steps of one transition of the sub-posteriors' chains, and of the tilted distributions' (a quarter period by .4).
LEAPFROGS, OWN_LEAPFROGS = 8, 5
PREDICTIVE_DRAWS = 200


def network(X: Any, y: Any = None, share: float = 1.0) -> None:
    """One hidden layer of tanh units for two classes, standard normal weights; ``share`` is of the prior."""
    with scale(scale=share):
        value = {n: numpyro.sample(n, dist.Normal(0.0, 1.0).expand(s).to_event(len(s))) for n, s in SHAPES.items()}
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=_logits(value, X)), obs=y)


def _logits(value: dict[str, Any], X: Any) -> Any:
    return jnp.tanh(X @ value["w1"] + value["b1"]) @ value["w2"] + value["b2"]


def load(folder: str | None, rows: int) -> dict[str, Any]:
    """Threes and fives of ``mnist.npz``, averaged over 4 x 4 pixels and centred; a made-up stand-in without a folder."""
    if folder is None:
        rng = np.random.default_rng(0)
        y = rng.integers(0, 2, rows + 500)
        X = rng.normal(size=(rows + 500, SIDE * SIDE)) + np.where(y[:, None] == 1, 0.3, -0.3)
        return {"X": X[:rows], "y": y[:rows], "X_test": X[rows:], "y_test": y[rows:]}
    found, parts = np.load(Path(folder) / "mnist.npz"), {}
    for part, end in (("train", ""), ("test", "_test")):
        chosen = np.isin(found[f"y_{part}"], (3, 5))
        images = found[f"x_{part}"][chosen][: rows if not end else None] / 255.0
        pooled = images.reshape(-1, SIDE, 4, SIDE, 4).mean(axis=(2, 4)).reshape(-1, SIDE * SIDE)
        parts["X" + end], parts["y" + end] = 2 * pooled - 0.5, (found[f"y_{part}"][chosen] == 3)[: len(pooled)]
    return {n: np.asarray(v, np.float32) for n, v in parts.items()}


def start(seed: int) -> dict[str, Any]:
    """Guide params that every method with a guide starts from."""
    draw = 0.3 * np.random.default_rng(seed).normal(size=DIM)
    return {"auto_loc": jnp.asarray(draw, jnp.float32), "auto_scale": jnp.full((DIM,), 0.3, jnp.float32)}


def fit(data: dict[str, Any], solver: Any, rounds: int, seed: int) -> tuple[dict[str, Any], Any, float]:
    """Draws of q over the weights, the run's result, and seconds."""
    guide, labels = AutoDiagonalNormal(network), np.arange(len(data["y"])) % GROUPS
    pvi = PVI(Partition(network, "data", labels), guide, solver=solver)
    args, begin = (jnp.asarray(data["X"]), jnp.asarray(data["y"])), time.perf_counter()
    result = pvi.run(jax.random.key(seed), rounds, *args, init_params=start(seed), progress_bar=False)
    jax.block_until_ready(result.params)
    seconds = time.perf_counter() - begin
    draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(PREDICTIVE_DRAWS,))
    return {n: draws[n] for n in SHAPES}, result, seconds


def score(draws: dict[str, Any], data: dict[str, Any]) -> tuple[float, float]:
    """Test error, and mean log predictive density in nats."""
    logits = jax.vmap(lambda value: _logits(value, jnp.asarray(data["X_test"])))(draws)
    signed = jnp.where(jnp.asarray(data["y_test"]) > 0, logits, -logits)
    log_density = jax.nn.logsumexp(jax.nn.log_sigmoid(signed), axis=0) - np.log(logits.shape[0])
    return float(jnp.mean(log_density < np.log(0.5))), float(jnp.mean(log_density))


def consensus_draws(data: dict[str, Any], gradients: int, seed: int) -> dict[str, dict[str, Any]]:
    """Weights by the weighted average of the sub-posteriors' draws, and by the product of their Gaussians."""
    transitions = max(gradients // LEAPFROGS, 50)
    kernel, labels = HMC(network, num_steps=LEAPFROGS, trajectory_length=None), np.arange(len(data["y"])) % GROUPS
    warmup = transitions // 5
    chains = MCMC(kernel, num_warmup=warmup, num_samples=transitions - warmup, progress_bar=False, jit_model_args=True)
    found = []
    for g in range(GROUPS):
        mine = labels == g
        chains.run(jax.random.fold_in(jax.random.key(seed), g), data["X"][mine], data["y"][mine], 1.0 / GROUPS)
        drawn = chains.get_samples()
        # A few thousand draws of each carry their moments.
        every = max(len(drawn["b2"]) // 2_000, 1)
        found.append(jnp.concatenate([drawn[n].reshape(len(drawn[n]), -1)[::every] for n in SHAPES], axis=1))
    mean, variance = parametric(found, diagonal=True)
    noise = jax.random.normal(jax.random.key(2), (PREDICTIVE_DRAWS, DIM))
    joined = consensus(found, PREDICTIVE_DRAWS)
    return {
        "consensus Monte Carlo": _unflatten(joined),
        "consensus, product of Gaussians": _unflatten(mean + jnp.sqrt(variance) * noise),
    }


def _unflatten(flat: Any) -> dict[str, Any]:
    found, at = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        found[name] = flat[:, at : at + size].reshape(-1, *shape)
        at += size
    return found


def run(options: argparse.Namespace) -> _report.Report:
    """Test errors and log predictive densities over seeds; whether SNEP's q stayed proper in twenty of them."""
    report = _report.Report("snep-net")
    quick = options.quick
    rows, samples, rounds, seeds, proper_seeds = (80, 280, 3, 1, 1) if quick else (400, 256, 20, 3, 20)
    data = load(options.data, rows)
    moments = MCMCMoments(num_samples=samples, kernel="lockstep", num_warmup=100)
    gradients = rounds * moments.num_draws * OWN_LEAPFROGS
    # A pair of draws of the variational fit is two gradients.
    solvers = {
        "SNEP": (SNEP(moments=moments), rounds),
        "SNEP, step 1": (SNEP(moments=moments, step_size=1.0), rounds),
        "power EP": (PowerEP(moments=moments), rounds),
        "variational": (NaturalGradient(), 50 if quick else min(gradients // 32, 2_000)),
    }
    found: dict[str, list] = {}
    for seed in range(seeds):
        for name, (solver, count) in solvers.items():
            draws, _, seconds = fit(data, solver, count, seed)
            found.setdefault(name, []).append((*score(draws, data), seconds))
        begin = time.perf_counter()
        for name, draws in consensus_draws(data, gradients, seed).items():
            found.setdefault(name, []).append((*score(draws, data), time.perf_counter() - begin))
    table = [(name, *np.median(values, axis=0), len(values)) for name, values in found.items()]
    caption = (
        f"{SIDE * SIDE}-{HIDDEN}-1, D = {DIM}, N = {len(data['y'])}, M = {GROUPS}, mean field, about {gradients:,} gradients of "
        "a group's rows each: medians over seeds"
    )
    report.add_table(caption, ("method", "test error", "nats a test row", "cold s", "seeds"), table)
    for name, (solver, _) in list(solvers.items())[:2]:
        proper = []
        for seed in range(proper_seeds):
            _, result, _ = fit(data, solver, 2 if quick else 8, seed)
            proper.append(bool(result.state.report.valid) and bool(jnp.all(jnp.isfinite(result.losses))))
        report.add_target(f"{name}: q proper, share of starts", float(np.mean(proper)), 1.0, at_least=True)
    if not quick:
        nats = {name: float(np.median(values, axis=0)[1]) for name, values in found.items()}
        for name in list(solvers)[:2]:
            report.add_target(f"power EP's nats a test row less those of {name}", nats["power EP"] - nats[name], 0.02)
    return report
