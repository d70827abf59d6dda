"""Classification by a Gaussian process: one latent for every row, two numbers for every row's site.

    python examples/gp_classification.py
    python examples/gp_classification.py --rows 400 --seed 3

Draws labels whose log odds are a smooth function of one input, fits all values of that function at once from the
defaults, and prints the probability of a yes at new inputs beside the one that labels were drawn with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import special

from numpyro_pvi import PVI, Partition

SD, LENGTH = 2.0, 0.25
JITTER = 1e-4


def kernel(x: Any, other: Any) -> Any:
    """Squared exponential, Float[N M], of inputs Float[N] and Float[M]."""
    return SD**2 * jnp.exp(-0.5 * ((x[:, None] - other) / LENGTH) ** 2)


def model(x: Float[Array, " N"], y: Int[Array, " N"]) -> None:
    """Log odds f ~ Normal(0, K), one label for every one of them."""
    K = kernel(x, x) + JITTER * jnp.eye(x.shape[0])
    f: Any = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.shape[0]), covariance_matrix=K))
    with numpyro.plate("rows", x.shape[0]) as row:
        numpyro.sample("y", dist.Bernoulli(logits=f[row]), obs=y[row])


def truth(x: np.ndarray) -> np.ndarray:
    """Log odds that labels are drawn with."""
    return 2.5 * np.sin(6 * x)


def generate(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs between 0 and 2, and labels."""
    x = np.sort(rng.uniform(0, 2, rows))
    return x, rng.binomial(1, special.expit(truth(x)))


def fit(data: tuple[np.ndarray, np.ndarray], seed: int = 0, groups: int = 2) -> tuple[np.ndarray, np.ndarray, Any]:
    """Mean and covariance of q(f), and the run's result."""
    pvi = PVI(Partition(model, "rows", groups), AutoMultivariateNormal(model))
    result = pvi.run(jax.random.key(seed), 100, *map(jnp.asarray, data), tol=1e-4, progress_bar=False)
    mean, root = (np.asarray(result.params[f"auto_{n}"], float) for n in ("loc", "scale_tril"))
    return mean, root @ root.T, result


def predict(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Probability of a yes at new inputs, averaged over q."""
    K = np.asarray(kernel(x, x), float) + JITTER * np.eye(len(x))
    weights = np.linalg.solve(K, np.asarray(kernel(x, new), float))
    variance = SD**2 - np.einsum("nm,nk,km->m", weights, K - covariance, weights)
    nodes, shares = np.polynomial.hermite_e.hermegauss(40)
    at = (weights.T @ mean)[:, None] + np.sqrt(np.maximum(variance, 0))[:, None] * nodes
    return special.expit(at) @ (shares / shares.sum())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="gp_classification.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    data = generate(np.random.default_rng(args.seed), args.rows)
    mean, covariance, result = fit(data, args.seed)
    print(f"{args.rows} labels; {result.message} ELBO {-float(result.losses[-1]):.3f} nats\n{result.info}\n")
    new = np.linspace(0.1, 1.9, 10)
    print("input  drawn with  found")
    for x, drawn, found in zip(new, special.expit(truth(new)), predict(data[0], mean, covariance, new), strict=True):
        print(f"{x:>5.1f}  {drawn:>10.2f}  {found:>5.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
