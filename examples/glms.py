"""Regressions whose rows see the coefficients through one affine predictor: Gaussian posteriors beside the exact ones.

    python examples/glms.py
    python examples/glms.py poisson --rows 400 --seed 3

`logistic`, `probit`: yes or no. `poisson`: counts. `negative_binomial`: counts that scatter more, by an unknown amount.
Each is fitted from the defaults, rows in four groups; nothing is sampled. With an intercept and one slope the exact
posterior is a sum over a grid, to which means and sds are compared.
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
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, Int
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import special, stats

from numpyro_pvi import PVI, Partition

COEFFICIENTS = np.array([-0.5, 1.2])
CONCENTRATION = 3.0
# Points of the grid along each axis, and how far it goes, in posterior sds of the fit.
POINTS, REACH = 41, 6.0


def logistic(X: Float[Array, "N D"], y: Int[Array, " N"]) -> None:
    """Yes or no, with log odds affine in the coefficients ~ Normal(0, 2)."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def probit(X: Float[Array, "N D"], y: Int[Array, " N"]) -> None:
    """Yes or no, with the normal distribution function as link."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(probs=ndtr(X @ w)), obs=y)


def poisson(X: Float[Array, "N D"], y: Int[Array, " N"]) -> None:
    """Counts with log rates affine in the coefficients."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)


def negative_binomial(X: Float[Array, "N D"], y: Int[Array, " N"]) -> None:
    """Counts of variance ``mean + mean^2 / concentration``, concentration ~ Gamma(2, 0.5)."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), concentration), obs=y)


MODELS: dict[str, Callable[..., None]] = {
    "logistic": logistic,
    "probit": probit,
    "poisson": poisson,
    "negative_binomial": negative_binomial,
}


def generate(name: str, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A column of ones beside a normal one, and responses."""
    X = np.c_[np.ones(rows), rng.normal(size=rows)]
    predictor = X @ COEFFICIENTS
    if name == "logistic":
        return X, rng.binomial(1, special.expit(predictor))
    if name == "probit":
        return X, rng.binomial(1, stats.norm.cdf(predictor))
    rate = np.exp(predictor)
    return X, rng.poisson(rate if name == "poisson" else rate * rng.gamma(CONCENTRATION, 1 / CONCENTRATION, rows))


def fit(name: str, data: tuple[np.ndarray, np.ndarray], seed: int = 0) -> tuple[np.ndarray, np.ndarray, Any]:
    """Posterior mean and covariance of the coefficients (and the log concentration), and the run's result."""
    model = MODELS[name]
    pvi = PVI(Partition(model, "rows", 4), AutoMultivariateNormal(model))
    result = pvi.run(jax.random.key(seed), 50, *map(jnp.asarray, data), tol=1e-4, progress_bar=False)
    # The guide keeps latents in the model's order, positive ones by their logs.
    mean, root = (np.asarray(result.params[f"auto_{n}"], float) for n in ("loc", "scale_tril"))
    return mean, root @ root.T, result


def log_posterior(name: str, data: tuple[np.ndarray, np.ndarray], at: np.ndarray) -> np.ndarray:
    """Log density, up to a constant, of points in their rows: coefficients (and the log concentration)."""
    X, y = data
    predictor, total = at[:, :2] @ X.T, stats.norm.logpdf(at[:, :2], scale=2.0).sum(axis=1)
    if name == "logistic":
        rows = -np.logaddexp(0, (1 - 2 * y) * predictor)
    elif name == "probit":
        rows = special.log_ndtr((2 * y - 1) * predictor)
    elif name == "poisson":
        rows = y * predictor - np.exp(predictor)
    else:
        c = np.exp(at[:, 2:])
        total = total + (2 * at[:, 2:] - 0.5 * c)[:, 0]
        rows = special.gammaln(y + c) - special.gammaln(c) + c * at[:, 2:] + y * predictor
        rows = rows - (y + c) * np.logaddexp(at[:, 2:], predictor)
    return total + rows.sum(axis=1)


def exact_moments(
    name: str, data: tuple[np.ndarray, np.ndarray], mean: np.ndarray, covariance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Exact posterior means and sds, by a sum over a grid along the axes of a Gaussian that covers it."""
    axes = np.meshgrid(*[np.linspace(-REACH, REACH, POINTS)] * mean.size, indexing="ij")
    at = mean + np.stack([x.ravel() for x in axes], axis=1) @ np.linalg.cholesky(covariance).T
    weights = special.softmax(np.concatenate([log_posterior(name, data, x) for x in np.array_split(at, 64)]))
    exact = weights @ at
    return exact, np.sqrt(weights @ (at - exact) ** 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="glms.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in args.models:
        data = generate(name, np.random.default_rng(args.seed), args.rows)
        mean, covariance, result = fit(name, data, args.seed)
        exact, spread = exact_moments(name, data, mean, covariance)
        print(f"{name}: {len(result.losses)} rounds, {result.message} ELBO {-float(result.losses[-1]):.3f} nats")
        drawn = [*COEFFICIENTS, np.log(CONCENTRATION)]
        print(f"  {'':<17} {'drawn':>7} {'mean':>7} {'exact':>7} {'sd':>6} {'exact':>6}")
        names, sd = ("intercept", "slope", "log concentration"), np.sqrt(np.diag(covariance))
        for latent, *row in zip(names, drawn, mean, exact, sd, spread, strict=False):
            print(f"  {latent:<17} {row[0]:>7.3f} {row[1]:>7.3f} {row[2]:>7.3f} {row[3]:>6.3f} {row[4]:>6.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
