"""``cvi-gamma``: gamma factors of CyTOF counts and Poisson-gamma factors of MNIST, beside Adam on the same factorised gammas.

Khan and Lin, section 5 and appendices J and K. Both sides start from one q, see all rows at every step or a mini-batch of the same
size, and take as many draws, by the same sampler with the same derivatives: NumPyro's own takes about fifty times as long for
Adam's step on MNIST. They run for the same time, without compilation and without what is spent on held-out losses.
"""

import argparse
import dataclasses
import math
import time
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

from benchmarks import _report
from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import GammaFamily, GammaNatural
from numpyro_pvi.solvers import NaturalGradient, StochasticNaturalGradient

NOISE, STEPS, DRAWS = 0.1, (1.0, 0.5, 0.2), 8
# Rounds, and steps of Adam, between two looks at the clock; held-out losses that are looked at along a side's path.
ROUNDS, BLOCK, LOOKS = 3, 5, 40
# Of mini-batches: shares of the rows, PVI's steps a round and largest step, Adam's steps.
SHARE, ROUND, STEP, SMALL_STEPS = 24, 20, 0.1, (0.3, 0.1, 0.03)
# Concentration that every gamma starts with.
START = 20.0


def _rows(rows: Any, size: int | None) -> numpyro.plate:
    """The rows' plate; of a mini-batch, with the weights of as many rows as there are."""
    if size is None:
        return numpyro.plate("rows", rows.shape[0])
    return numpyro.plate("rows", size, subsample_size=rows.shape[0])


def gamma_factors(y: Any, factors: int, size: int | None = None) -> None:
    """Appendix J."""
    columns = y.shape[1]
    with numpyro.plate("columns", columns, dim=-2), numpyro.plate("factors", factors, dim=-1):
        z = numpyro.sample("z", dist.Gamma(1.0, 1.0))
    with _rows(y, size):
        covariance = z @ z.T + NOISE * jnp.eye(columns)
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(columns), covariance), obs=y)


def poisson_factors(x: Any, factors: int, size: int | None = None) -> None:
    """Appendix K."""
    with numpyro.plate("columns", x.shape[1]):
        w = numpyro.sample("w", dist.Gamma(jnp.full(factors, 0.1), 0.3).to_event(1))
    with _rows(x, size):
        z = numpyro.sample("z", dist.Gamma(jnp.full(factors, 0.1), 0.1).to_event(1))
        numpyro.sample("x", dist.Poisson(z @ w.T).to_event(1), obs=x)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model with its data, the means that q starts with, and its loss on rows held out."""

    model: Callable
    rows: np.ndarray
    factors: int
    means: dict[str, np.ndarray]
    held_out: Callable[[dict], Any]

    def start(self) -> dict[str, Any]:
        """The guide's params where both sides begin."""
        found = {}
        for name, mean in self.means.items():
            found[f"{name}_auto_concentration"] = jnp.full(mean.shape, START)
            found[f"{name}_auto_rate"] = jnp.asarray(START / mean)
        return found


def cytof(data: np.ndarray, test: np.ndarray, factors: int) -> Case:
    """Loss: minus the mean log density of a row held out, nats, over 64 draws of the loadings."""
    held = jnp.asarray(test)

    def loss(params: dict) -> Any:
        q = dist.Gamma(params["z_auto_concentration"], params["z_auto_rate"])
        z = q.sample(jax.random.key(7), (64,))

        def one(z: Any) -> Any:
            covariance = z @ z.T + NOISE * jnp.eye(held.shape[1])
            return dist.MultivariateNormal(jnp.zeros(held.shape[1]), covariance).log_prob(held)

        return -jnp.mean(jax.nn.logsumexp(jax.lax.map(one, z), axis=0) - math.log(64))

    mean = 0.2 * np.random.default_rng(1).gamma(1.0, 1.0, (data.shape[1], factors)).astype(np.float32)
    return Case(gamma_factors, data, factors, {"z": mean}, loss)


def mnist(data: np.ndarray, test: np.ndarray, factors: int) -> Case:
    """Loss: root mean square error of images held out, their weights found by multiplicative updates at the mean patterns."""
    held = jnp.asarray(test)

    def loss(params: dict) -> Any:
        w = params["w_auto_concentration"] / params["w_auto_rate"] + 1e-6

        def update(_: Any, z: Any) -> Any:
            return z * ((held / (z @ w.T)) @ w) / jnp.sum(w, axis=0)

        z = jax.lax.fori_loop(0, 100, update, jnp.ones((held.shape[0], factors)))
        return jnp.sqrt(jnp.mean((held - z @ w.T) ** 2))

    rng = np.random.default_rng(1)
    z = rng.gamma(1.0, 1.0, (len(data), factors)).astype(np.float32)
    w = (data.mean() / factors * rng.gamma(1.0, 1.0, (data.shape[1], factors))).astype(np.float32)
    return Case(poisson_factors, data, factors, {"w": w + 1e-3, "z": z + 1e-3}, loss)


def watch(
    advance: Callable, read: Callable, state: Any, loss: Callable, seconds: float
) -> list[tuple[float, int, float]]:
    """Seconds, steps and held-out loss along a path; ``advance`` gives the state and its number of steps."""
    loss = jax.jit(loss)
    # Compiled outside the clock.
    jax.block_until_ready((advance(state)[0], loss(read(state))))
    spent, steps, found = 0.0, 0, [(0.0, 0, float(loss(read(state))))]
    while spent < seconds:
        begin = time.perf_counter()
        state, count = advance(state)
        jax.block_until_ready(state)
        spent, steps = spent + time.perf_counter() - begin, steps + count
        if spent >= min(seconds, found[-1][0] + seconds / LOOKS):
            value = float(loss(read(state)))
            found.append((spent, steps, value if math.isfinite(value) else math.inf))
    return found


class _Gamma(dist.Gamma):
    """A gamma with the sampler that PVI has."""

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return GammaFamily().sample(GammaNatural(self.concentration - 1, self.rate), key, sample_shape)


def natural(case: Case, seconds: float, batches: bool) -> list[tuple[float, int, float]]:
    """PVI in one group, all latents from one q, or by mini-batches."""
    guide, count = AutoExponentialFamily(case.model), len(case.rows)
    solver: Any = NaturalGradient(num_draws=DRAWS, blocks="parallel")
    if batches:
        options = {"batch_size": -(-count // SHARE), "num_steps": ROUND, "num_particles": DRAWS}
        solver = StochasticNaturalGradient(step_size=STEP, **options)
    pvi = PVI(Partition(case.model, "rows", 1), guide, solver=solver)
    rows = jnp.asarray(case.rows)
    state = pvi.init(jax.random.key(0), rows, case.factors, init_params=case.start())
    # Under mini-batches losses are not computed where nobody asks for them.
    options = {"progress_bar": False, "loss_every": 1 << 20 if batches else 1}

    def block(state: Any) -> tuple[Any, int]:
        done = pvi.run(jax.random.key(0), ROUNDS, rows, case.factors, init_state=state, **options)
        return done.state, ROUNDS * (ROUND if batches else 1)

    return watch(block, pvi.get_params, state, case.held_out, seconds)


def adam(case: Case, step: float, seconds: float, batches: bool) -> list[tuple[float, int, float]]:
    """NumPyro's SVI with Adam on softplus shapes and rates of the same gammas."""
    start, count = case.start(), len(case.rows)
    size, every = (-(-count // SHARE), ROUNDS * ROUND) if batches else (count, BLOCK)

    def guide(rows: Any, factors: int, size: int, which: Any) -> None:
        del rows, factors
        positive = dist.constraints.softplus_positive
        for name, mean in case.means.items():
            a, b = (
                numpyro.param(f"{name}_auto_{p}", start[f"{name}_auto_{p}"], constraint=positive)
                for p in ("concentration", "rate")
            )
            own = case.model is poisson_factors and name == "z"
            _sample_as(case.model, name, _Gamma(a[which], b[which]) if own else _Gamma(a, b), mean.shape, size, which)

    def model(rows: Any, factors: int, size: int, which: Any) -> None:
        case.model(rows[which], factors, size)

    svi = SVI(model, guide, optax.adam(step), Trace_ELBO(DRAWS))
    rows, everyone = jnp.asarray(case.rows), jnp.arange(count)
    state = svi.init(jax.random.key(0), rows, case.factors, count, everyone[:size])

    def one(state: Any) -> Any:
        # Without replacement within a batch, as PVI's.
        key = jax.random.fold_in(state.rng_key, 1)
        which = jax.random.choice(key, count, (size,), replace=False) if batches else everyone
        return svi.update(state, rows, case.factors, count, which)[0]

    @jax.jit
    def block(state: Any) -> Any:
        return jax.lax.fori_loop(0, every, lambda _, s: one(s), state)

    return watch(lambda state: (block(state), every), svi.get_params, state, case.held_out, seconds)


def _sample_as(model: Callable, name: str, q: dist.Distribution, shape: tuple[int, ...], size: int, which: Any) -> None:
    """A latent in the plates that its model has it in."""
    if model is gamma_factors:
        with numpyro.plate("columns", shape[0], dim=-2), numpyro.plate("factors", shape[1], dim=-1):
            numpyro.sample(name, q)
        return
    with numpyro.plate("columns", shape[0]) if name == "w" else numpyro.plate("rows", size, subsample_size=len(which)):
        numpyro.sample(name, q.to_event(1))


def compare(report: _report.Report, name: str, case: Case, seconds: float) -> None:
    """Runs all sides on one model, and adds the table and the targets."""
    own, size = "PVI, {} rows a step", len(case.rows)
    batch = -(-size // SHARE)
    sides = {own.format(n): natural(case, seconds, n < size) for n in (batch, size)}
    sides |= {f"Adam, {size} rows, step {step:g}": adam(case, step, seconds, False) for step in STEPS}
    sides |= {f"Adam, {batch} rows, step {step:g}": adam(case, step, seconds, True) for step in SMALL_STEPS}
    print({side: path[-1] for side, path in sides.items()}, flush=True)
    table = []
    for side, path in sides.items():
        at, steps, best = min(path, key=lambda x: x[2])
        table.append((side, path[-1][1], f"{path[0][2]:.4g}", f"{best:.5g}", f"{at:.1f}", steps, f"{path[-1][2]:.5g}"))
    header = ("side", "steps", "held-out loss at the start", "best", "reached after, s", "steps then", "at the end")
    report.add_table(f"{name}, {seconds:g} s each", header, table)
    best_side = min((s for s in sides if s.startswith("Adam")), key=lambda s: min(x[2] for x in sides[s]))
    at, _, best = min(sides[best_side], key=lambda x: x[2])
    ours = sides[own.format(batch)]
    reached = next((spent for spent, _, loss in ours if loss <= best), math.inf)
    report.add_target(f"{name}: seconds to the best loss of Adam, over Adam's own", reached / at, 0.5)
    report.add_target(f"{name}: loss at the end", ours[-1][2], best)


def run(options: argparse.Namespace) -> _report.Report:
    """Both models; generated rows without ``--data``."""
    report, rng = _report.Report("cvi-gamma"), np.random.default_rng(0)
    seconds = 0.5 if options.quick else 60.0
    if options.quick or options.data is None:
        y = (rng.gamma(1.0, 1.0, (60, 2)) @ rng.gamma(1.0, 1.0, (2, 5))).astype(np.float32)
        compare(report, "gamma factors, generated", cytof(y[:40], y[40:], 2), seconds)
        x = rng.poisson(5.0 * y).astype(np.float32)
        compare(report, "Poisson factors, generated", mnist(x[:40], x[40:], 2), seconds)
        return report
    y = np.arcsinh(np.load(Path(options.data) / "cytof_cytofkit_15942.npz")["x"] / 5).astype(np.float32)
    y = y[rng.permutation(len(y))]
    train = min(options.rows or 12_000, 12_000)
    if options.only is None or "cytof" in options.only:
        compare(report, f"CyTOF, {train} rows, K = 40", cytof(y[:train], y[12_000:], 40), seconds)
    if options.only is not None and "mnist" not in options.only:
        return report
    images = np.load(Path(options.data) / "mnist.npz")
    count = min(options.rows or 5_000, 5_000)
    x, test = (images[k][:n].reshape(n, -1).astype(np.float32) for k, n in (("x_train", count), ("x_test", 500)))
    compare(report, f"MNIST, {count} images, K = 50", mnist(x, test, 50), seconds)
    return report
