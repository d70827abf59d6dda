"""Gamma factors of a covariance (Khan and Lin, appendix J): rows ~ Normal(0, Z Z' + noise), entries of Z gamma distributed.

    python examples/gamma_factors.py
    python examples/gamma_factors.py --rows 400 --seed 3

The loadings keep their gamma family although the likelihood is conjugate in none of them: their messages are natural
gradients from implicitly reparameterised draws. Prints the covariance that is found beside the one drawn from.
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

NOISE = 0.1


def model(y: Float[Array, "N D"], factors: int = 2) -> None:
    """Loadings ~ Gamma(1, 1), rows ~ MultivariateNormal(0, Z Z' + noise I)."""
    columns = y.shape[1]
    with numpyro.plate("columns", columns, dim=-2), numpyro.plate("factors", factors, dim=-1):
        loading = numpyro.sample("loading", dist.Gamma(1.0, 1.0))
    covariance = loading @ loading.T + NOISE * jnp.eye(columns)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(columns), covariance), obs=y)


def generate(rng: np.random.Generator, rows: int, columns: int = 4, factors: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and the covariance they were drawn with."""
    loading = rng.gamma(1.0, 1.0, (columns, factors))
    covariance = loading @ loading.T + NOISE * np.eye(columns)
    return rng.multivariate_normal(np.zeros(columns), covariance, rows), covariance


def fit(y: np.ndarray, seed: int, groups: int = 4, rounds: int = 200):
    """The posterior by latent, and the run's result."""
    pvi = PVI(Partition(model, "rows", groups), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), rounds, jnp.asarray(y, jnp.result_type(float)), progress_bar=False)
    return pvi.posterior(result.state), result


def covariance_of(found: dict) -> np.ndarray:
    """Mean of ``Z Z' + noise I`` under the factorised posterior."""
    mean, variance = (np.asarray(x, float) for x in (found["loading"].mean, found["loading"].variance))
    return mean @ mean.T + np.diag(variance.sum(axis=1) + NOISE)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="gamma_factors.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    y, covariance = generate(np.random.default_rng(args.seed), args.rows)
    found, result = fit(y, args.seed)
    print(f"{args.rows} rows; {result.message} ELBO {-float(result.losses[-1]):.2f} nats\n{result.info}\n")
    for name, own in (("drawn from", covariance), ("of the rows", y.T @ y / len(y)), ("found", covariance_of(found))):
        print(f"covariance {name}:\n{np.array_str(own, precision=2, suppress_small=True)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
