"""Models that see their latents through no affine predictor: a differential equation, and a neural network."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

RATES = np.array([0.6, 0.03, 0.8, 0.025])
_STEPS = 4
HIDDEN = 8


def _slope(logs: Any, rates: Any) -> Any:
    # Clipped where a population has left any sensible range, so that draws from a wide q stay finite.
    prey, predators = jnp.exp(jnp.clip(logs, -10.0, 8.0))
    return jnp.stack([rates[0] - rates[1] * predators, -rates[2] + rates[3] * prey])


def populations(start: Any, rates: Any, num_times: int) -> Any:
    """Log populations of predators and prey (Lotka-Volterra) at times 1 to ``num_times``: Runge-Kutta, 4 steps a unit."""
    step = 1.0 / _STEPS

    def advance(logs: Any, _: None) -> Any:
        k1 = _slope(logs, rates)
        k2 = _slope(logs + step / 2 * k1, rates)
        k3 = _slope(logs + step / 2 * k2, rates)
        k4 = _slope(logs + step * k3, rates)
        return logs + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    def unit(logs: Any, _: None) -> Any:
        logs, _ = jax.lax.scan(advance, logs, None, length=_STEPS)
        return logs, logs

    return jax.lax.scan(unit, jnp.log(start), None, length=num_times)[1]


def predators(start: Any, y: Any) -> None:
    """Replicate experiments with known starts, common rates and noise: D = 6, a row is one experiment."""
    guess = jnp.log(jnp.array([1.0, 0.05, 1.0, 0.05]))
    rates = numpyro.sample("rates", dist.LogNormal(guess, 0.5 * jnp.ones(4)).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", start.shape[0]):
        logs = jax.vmap(lambda first: populations(first, rates, y.shape[1]))(start)
        numpyro.sample("obs", dist.LogNormal(logs, noise).to_event(2), obs=y)


def simulate_predators(num_experiments: int, num_times: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts, and observations with 25 % noise."""
    rng = np.random.default_rng(seed)
    start = np.stack([rng.uniform(20, 40, num_experiments), rng.uniform(8, 20, num_experiments)], axis=1)
    rates = jnp.asarray(RATES)
    logs = jax.vmap(lambda first: populations(first, rates, num_times))(jnp.asarray(start))
    noisy = np.exp(np.asarray(logs) + 0.25 * rng.normal(size=logs.shape))
    return start.astype(np.float32), noisy.astype(np.float32)


def network(X: Any, y: Any) -> None:
    """Regression on one hidden layer of 8 tanh units: with four columns D = 49."""
    w1 = numpyro.sample("w1", dist.Normal(0.0, 1.0).expand([X.shape[1], HIDDEN]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1))
    b2 = numpyro.sample("b2", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(jnp.tanh(X @ w1 + b1) @ w2 + b2, 0.3), obs=y)


def simulate_network(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of four columns, and the answers of a random network of the same width with noise of sd 0.3."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, 4))
    w1, b1, w2 = rng.normal(size=(4, HIDDEN)), rng.normal(size=HIDDEN), rng.normal(size=HIDDEN)
    y = np.tanh(X @ w1 + b1) @ w2 + 0.3 * rng.normal(size=num_rows)
    return X.astype(np.float32), y.astype(np.float32)
