"""A mixture of Gaussians with Wishart precisions, by variational message passing.

    python examples/mixture.py
    python examples/mixture.py --rows 600 --seed 3

Draws points from three Gaussians of different shapes, fits the mixture from the defaults, and prints what was found
beside what was drawn. Every message is in closed form: nothing is sampled.
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
from numpyro_pvi.families import CategoricalFamily

CENTRES = np.array([[0.0, 0.0], [4.0, 1.0], [-1.0, 5.0]])
ROOTS = np.array([[[1.0, 0.0], [0.8, 0.4]], [[0.5, 0.0], [0.0, 1.2]], [[0.7, 0.0], [-0.5, 0.5]]])
SHARES = np.array([0.5, 0.3, 0.2])


def model(x: Float[Array, "N 2"], components: int = 3) -> None:
    """Weights ~ Dirichlet(1), means ~ Normal(0, 5^2 I), precisions ~ Wishart(4, I)."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(components)))
    with numpyro.plate("components", components):
        mean = numpyro.sample("mean", dist.MultivariateNormal(jnp.zeros(2), 25.0 * jnp.eye(2)))
        precision = numpyro.sample("precision", dist.Wishart(4.0, jnp.eye(2)))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("x", dist.MultivariateNormal(mean[z], precision_matrix=precision[z]), obs=x)


def generate(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Points, and the component of each."""
    z = rng.choice(len(SHARES), rows, p=SHARES)
    return CENTRES[z] + np.einsum("nij,nj->ni", ROOTS[z], rng.normal(size=(rows, 2))), z


def fit(x: np.ndarray, seed: int, groups: int = 2, rounds: int = 200):
    """The posterior by latent, and the run's result."""
    guide = AutoExponentialFamily(model, families={"z": CategoricalFamily(len(SHARES))})
    pvi = PVI(Partition(model, "data", groups), guide)
    result = pvi.run(jax.random.key(seed), rounds, jnp.asarray(x), tol=1e-3, progress_bar=False)
    return pvi.posterior(result.state), result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="mixture.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    x, z = generate(np.random.default_rng(args.seed), args.rows)
    found, result = fit(x, args.seed)
    print(f"{args.rows} points; {result.message} ELBO {-float(result.losses[-1]):.2f} nats\n{result.info}\n")
    mean = np.asarray(found["mean"].mean, float)
    covariance = np.linalg.inv(np.asarray(found["precision"].mean, float))
    nearest = [int(np.argmin(((mean - centre) ** 2).sum(axis=1))) for centre in CENTRES]
    print("drawn: share, mean, covariance; then what was found")
    for k, own in enumerate(nearest):
        drawn = f"{SHARES[k]:.2f} {np.round(CENTRES[k], 1)} {np.round(ROOTS[k] @ ROOTS[k].T, 2).tolist()}"
        share = float(found["weights"].mean[own])
        print(f"{drawn}\n{share:.2f} {np.round(mean[own], 1)} {np.round(covariance[own], 2).tolist()}")
    right = np.mean(np.argmax(np.asarray(found["z"].probs), axis=1) == np.asarray(nearest)[z])
    print(f"points whose likeliest component is their own: {right:.0%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
