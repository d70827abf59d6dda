"""Poisson-gamma matrix factorisation (Khan and Lin, appendix K): counts ~ Poisson(W z), both factors gamma distributed.

    python examples/poisson_factors.py
    python examples/poisson_factors.py --rows 100 --seed 3

Every row has weights of its own, inside the plate that is split into groups. A rate that is a sum of products is conjugate in
neither factor, and needs no auxiliary counts: both are drawn. Prints how well the rates are found.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float

from numpyro_pvi import PVI, AutoExponentialFamily, Partition


def model(x: Float[Array, "N V"], factors: int = 2) -> None:
    """Patterns ~ Gamma(0.5, 0.2) by column, weights ~ Gamma(0.5, 0.5) by row, counts ~ Poisson of their products."""
    with numpyro.plate("columns", x.shape[1]):
        pattern = numpyro.sample("pattern", dist.Gamma(jnp.full(factors, 0.5), 0.2).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        weight = numpyro.sample("weight", dist.Gamma(jnp.full(factors, 0.5), 0.5).to_event(1))
        numpyro.sample("x", dist.Poisson(weight @ pattern.T).to_event(1), obs=x)


def generate(rng: np.random.Generator, rows: int, columns: int = 8, factors: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Counts, and the rates they were drawn with."""
    rates = rng.gamma(0.5, 2.0, (rows, factors)) @ rng.gamma(0.5, 5.0, (factors, columns))
    return rng.poisson(rates), rates


def fit(x: np.ndarray, seed: int, groups: int = 2, rounds: int = 200):
    """The posterior by latent, and the run's result."""
    pvi = PVI(Partition(model, "rows", groups), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), rounds, jnp.asarray(x, jnp.result_type(float)), progress_bar=False)
    return pvi.posterior(result.state), result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="poisson_factors.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    x, rates = generate(np.random.default_rng(args.seed), args.rows)
    found, result = fit(x, args.seed)
    print(f"{args.rows} rows; {result.message} ELBO {-float(result.losses[-1]):.2f} nats\n{result.info}\n")
    mean = np.asarray(found["weight"].mean) @ np.asarray(found["pattern"].mean).T
    print(f"correlation of found and drawn rates: {np.corrcoef(mean.ravel(), rates.ravel())[0, 1]:.3f};")
    print(f"of the counts themselves with the rates: {np.corrcoef(x.ravel(), rates.ravel())[0, 1]:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
