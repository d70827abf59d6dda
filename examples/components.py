"""Probabilistic principal components with unknown noise, by variational message passing.

    python examples/components.py
    python examples/components.py --rows 200 --seed 3

Every row has two scores of its own, inside the plate that is split into groups; every column has a loading of each.
Prints how well the plane that the loadings span is found, and the noise.
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

LATENT = 2


def model(x: Float[Array, "N D"], latent: int = LATENT) -> None:
    """Loadings ~ Normal(0, I) by column, scores ~ Normal(0, I) by row, precision of the noise ~ Gamma(1, 1)."""
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    columns = numpyro.plate("columns", x.shape[1], dim=-1)
    with columns:
        loading = numpyro.sample("loading", dist.MultivariateNormal(jnp.zeros(latent), jnp.eye(latent)))
    with numpyro.plate("rows", x.shape[0], dim=-2):
        score = numpyro.sample("score", dist.MultivariateNormal(jnp.zeros(latent), jnp.eye(latent)))
        with columns:
            numpyro.sample("x", dist.Normal(jnp.sum(score * loading, axis=-1), 1 / jnp.sqrt(tau)), obs=x)


def generate(
    rng: np.random.Generator, rows: int, columns: int = 5, noise: float = 0.3
) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and the loadings they were drawn with."""
    loading = rng.normal(size=(columns, LATENT))
    return rng.normal(size=(rows, LATENT)) @ loading.T + noise * rng.normal(size=(rows, columns)), loading


def fit(x: np.ndarray, seed: int, groups: int = 2, rounds: int = 300):
    """The posterior by latent, and the run's result."""
    pvi = PVI(Partition(model, "rows", groups), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), rounds, jnp.asarray(x), tol=1e-2, progress_bar=False)
    return pvi.posterior(result.state), result


def angle(one: np.ndarray, other: np.ndarray) -> float:
    """Largest angle between the spans of two sets of columns, in degrees."""
    bases = [np.linalg.qr(columns)[0] for columns in (one, other)]
    cosines = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)
    return float(np.degrees(np.arccos(np.clip(cosines.min(), 0.0, 1.0))))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="components.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    x, loading = generate(np.random.default_rng(args.seed), args.rows)
    found, result = fit(x, args.seed)
    print(f"{args.rows} rows; {result.message} ELBO {-float(result.losses[-1]):.2f} nats\n{result.info}\n")
    _, _, axes = np.linalg.svd(x)
    plane = np.asarray(found["loading"].mean)
    print(f"angle to the plane drawn from: {angle(plane, loading):.1f} degrees;")
    print(f"to that of the first two principal components: {angle(plane, axes[:LATENT].T):.1f}")
    print(f"sd of the noise: {float(found['tau'].mean) ** -0.5:.3f}, drawn with 0.3")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
