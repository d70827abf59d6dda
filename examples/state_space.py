"""A Kalman filter whose observations are not Gaussian: counts, or yes and no, along a random walk.

    python examples/state_space.py
    python examples/state_space.py events --steps 2000 --seed 3

`counts`: Poisson, with the state as log rate. `events`: Bernoulli, with the state as log odds. The family of the states is
that of Gaussian Markov chains, so that a round costs as much as a Kalman smoother, and nothing has a row for every pair of
times. Fitted from the defaults; what was found is printed beside the states that observations were drawn from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Int
from scipy import special

from numpyro_pvi import PVI, AutoExponentialFamily, Partition

SCALE = 0.3


def counts(steps: int, y: Int[Array, " T"]) -> None:
    """Counts with log rates along a random walk of steps ~ Normal(0, 0.3)."""
    x = numpyro.sample("x", dist.GaussianRandomWalk(SCALE, steps))
    with numpyro.plate("time", steps):
        numpyro.sample("y", dist.Poisson(jnp.exp(x)), obs=y)


def events(steps: int, y: Int[Array, " T"]) -> None:
    """Yes or no, with log odds along the same walk."""
    x = numpyro.sample("x", dist.GaussianRandomWalk(SCALE, steps))
    with numpyro.plate("time", steps):
        numpyro.sample("y", dist.Bernoulli(logits=x), obs=y)


MODELS: dict[str, Callable[..., None]] = {"counts": counts, "events": events}


def generate(name: str, rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """States, and observations of them."""
    x = np.cumsum(SCALE * rng.normal(size=steps))
    return x, rng.poisson(np.exp(x)) if name == "counts" else rng.binomial(1, special.expit(x))


def fit(name: str, y: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Any]:
    """Means and sds of all states, and the run's result."""
    model = MODELS[name]
    pvi = PVI(Partition(model, "time", 1), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), 50, len(y), jnp.asarray(y), tol=1e-4, progress_bar=False)
    found = pvi.posterior(result.state)["x"]
    return np.asarray(found.mean, float), np.sqrt(np.asarray(found.variance, float)), result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="state_space.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in args.models:
        x, y = generate(name, np.random.default_rng(args.seed), args.steps)
        mean, sd, result = fit(name, y, args.seed)
        print(f"{name}: {args.steps} steps; {result.message} ELBO {-float(result.losses[-1]):.3f} nats")
        print(f"  found: {result.info.structure[0]} ({result.info.expectation[0]})")
        print("  time  observed  state: drawn   mean    sd")
        for t in np.linspace(0, args.steps - 1, 8).astype(int):
            print(f"  {t:>4} {y[t]:>9}  {x[t]:>12.2f} {mean[t]:>6.2f} {sd[t]:>5.2f}")
        print(f"  states within two sds: {np.mean(np.abs(x - mean) < 2 * sd):.0%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
