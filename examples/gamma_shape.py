"""The unknown shape of a gamma distribution, kept positive: a factor that is not conjugate, by draws of one latent.

    python examples/gamma_shape.py
    python examples/gamma_shape.py --rows 60 --seed 3

The model of Khan and Lin (2017), appendix E.3: observations ~ Gamma(shape, 1), shape ~ Gamma(2, 1), and a Gamma
distribution for its posterior. Fitted from the defaults, beside the best Gamma and the exact posterior by quadrature.
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
from jaxtyping import Array, Float
from scipy import optimize, special, stats

from numpyro_pvi import PVI, AutoExponentialFamily, Partition

CONCENTRATION, RATE = 2.0, 1.0
SHAPE = 3.0


def model(y: Float[Array, " N"]) -> None:
    """Observations of unknown shape."""
    shape = numpyro.sample("shape", dist.Gamma(CONCENTRATION, RATE))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, 1.0), obs=y)


def fit(y: np.ndarray, seed: int = 0, rounds: int = 100, groups: int = 2) -> tuple[tuple[float, float], Any]:
    """Concentration and rate of q(shape), and the run's result."""
    pvi = PVI(Partition(model, "rows", groups), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), rounds, jnp.asarray(y), progress_bar=False)
    found = result.params
    return (float(found["shape_auto_concentration"]), float(found["shape_auto_rate"])), result


def log_joint(y: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Log density of shape and observations, at many shapes."""
    rows = (shape - 1) * np.log(y).sum() - y.sum() - len(y) * special.gammaln(shape)
    return rows + stats.gamma.logpdf(shape, CONCENTRATION, scale=1 / RATE)


def grid(y: np.ndarray) -> np.ndarray:
    """Logs of shapes, evenly spaced over all that is likely."""
    centre = np.log(max(np.exp(np.mean(np.log(y))), 0.1))
    return np.linspace(centre - 8, centre + 4, 6_001)


def exact(y: np.ndarray) -> tuple[float, float, float]:
    """Posterior mean and sd of the shape, and the log evidence in nats, by a sum over a grid."""
    logs = grid(y)
    log_density = log_joint(y, np.exp(logs)) + logs
    weights, shape = special.softmax(log_density), np.exp(logs)
    mean = weights @ shape
    return mean, np.sqrt(weights @ (shape - mean) ** 2), special.logsumexp(log_density) + np.log(logs[1] - logs[0])


def elbo(y: np.ndarray, concentration: float, rate: float) -> float:
    """ELBO of a Gamma in nats, by a sum over the same grid."""
    logs = grid(y)
    log_q = stats.gamma.logpdf(np.exp(logs), concentration, scale=1 / rate)
    weights = special.softmax(log_q + logs)
    return weights @ (log_joint(y, np.exp(logs)) - log_q)


def best(y: np.ndarray) -> tuple[float, float]:
    """Concentration and rate of the Gamma with the highest ELBO."""
    mean, sd, _ = exact(y)

    def loss(z: np.ndarray) -> float:
        return -elbo(y, np.exp(z[0]), np.exp(z[0] - z[1]))

    start, options = np.log([(mean / sd) ** 2, mean]), {"xatol": 1e-7, "fatol": 1e-10}
    z = optimize.minimize(loss, start, method="Nelder-Mead", options=options).x
    return float(np.exp(z[0])), float(np.exp(z[0] - z[1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="gamma_shape.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    y = np.random.default_rng(args.seed).gamma(SHAPE, 1.0, args.rows)
    found, result = fit(y, args.seed)
    print(f"{args.rows} observations of shape {SHAPE}, {len(result.losses)} rounds")
    print(f"  found: {result.info.structure[0]} ({result.info.expectation[0]})")
    print(f"  {'':<12} concentration   rate   mean     sd  ELBO (nats)")
    for name, (a, b) in (("here", found), ("best Gamma", best(y))):
        print(f"  {name:<12} {a:>13.2f} {b:>6.2f} {a / b:>6.3f} {np.sqrt(a) / b:>6.3f} {elbo(y, a, b):>12.4f}")
    mean, sd, evidence = exact(y)
    print(f"  {'exact':<12} {'':>13} {'':>6} {mean:>6.3f} {sd:>6.3f} {evidence:>12.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
