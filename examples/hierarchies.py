"""Eight schools and batting averages: hierarchies whose scales and rates keep their own supports.

    python examples/hierarchies.py
    python examples/hierarchies.py baseball

`schools`: effects of coaching in eight schools (Rubin, 1981), with a half-Cauchy scale. `baseball`: hits of 18 players in
their first 45 times at bat (Efron and Morris, 1975), every player with a rate between 0 and 1. Every latent has a family over
its own values; what is conjugate is found and taken in closed form, the rest is drawn. Fitted from the defaults, beside the
exact posterior, which a sum over a grid gives: without the effects there are two latents.
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
from jaxtyping import Array, Float, Int
from scipy import special, stats

from numpyro_pvi import PVI, AutoExponentialFamily, Partition

# Estimated effects and their standard errors (Rubin, Estimation in parallel randomized experiments, 1981, table 1).
EFFECT = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERROR = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
# Hits in the first 45 times at bat of 1970 (Efron and Morris, Data analysis using Stein's estimator, 1975, table 1).
HITS = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
AT_BATS = 45


def schools(error: Float[Array, " J"], y: Float[Array, " J"]) -> None:
    """Effects around a common one, written by their deviations."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("school", error.shape[0]):
        deviation = numpyro.sample("deviation", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * deviation, error), obs=y)


def baseball(at_bats: Int[Array, " J"], hits: Int[Array, " J"]) -> None:
    """Rates ~ Beta of an unknown mean, worth an unknown number of times at bat."""
    centre = numpyro.sample("centre", dist.Uniform(0.0, 1.0))
    worth = numpyro.sample("worth", dist.Gamma(2.0, 0.02))
    with numpyro.plate("player", at_bats.shape[0]):
        rate = numpyro.sample("rate", dist.Beta(centre * worth, (1 - centre) * worth))
        numpyro.sample("hits", dist.Binomial(at_bats, rate), obs=hits)


MODELS: dict[str, tuple[Callable[..., None], str, tuple[np.ndarray, np.ndarray]]] = {
    "schools": (schools, "school", (ERROR, EFFECT)),
    "baseball": (baseball, "player", (np.full(len(HITS), AT_BATS), HITS)),
}


def fit(name: str, seed: int = 0, rounds: int = 200) -> tuple[dict[str, Any], Any]:
    """The posterior by latent, and the run's result; every school and player a group."""
    model, plate, data = MODELS[name]
    pvi = PVI(Partition(model, plate, list(range(len(data[0])))), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), rounds, *map(jnp.asarray, data), progress_bar=False)
    return pvi.posterior(result.state), result


def exact(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Exact posterior means and sds: the two latents that all share on a grid, every other one given those."""
    if name == "schools":
        mu, log_tau = np.meshgrid(np.linspace(-20, 30, 501), np.linspace(-6, 6, 601), indexing="ij")
        tau = np.exp(log_tau)
        total = np.sqrt(ERROR**2 + tau[..., None] ** 2)
        log = stats.norm.logpdf(EFFECT, mu[..., None], total).sum(-1)
        log += stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, scale=5) + log_tau
        shared, (first, second) = {"mu": mu, "tau": tau}, _deviations(mu, tau)
        own = "deviation"
    else:
        logit, log_worth = np.meshgrid(np.linspace(-3, 1, 401), np.linspace(0, 9, 401), indexing="ij")
        centre, worth = special.expit(logit), np.exp(log_worth)
        a, b = (centre * worth)[..., None], ((1 - centre) * worth)[..., None]
        log = (special.betaln(a + HITS, b + AT_BATS - HITS) - special.betaln(a, b)).sum(-1)
        log += stats.gamma.logpdf(worth, 2, scale=50) + log_worth + np.log(centre) + np.log1p(-centre)
        first = (a + HITS) / (a + b + AT_BATS)
        second = first * (a + HITS + 1) / (a + b + AT_BATS + 1)
        shared, own = {"centre": centre, "worth": worth}, "rate"
    weights = special.softmax(log)
    found = {n: (np.sum(weights * x), np.sum(weights * x**2)) for n, x in shared.items()}
    found[own] = tuple(np.einsum("ij,ijk->k", weights, x) for x in (first, second))
    return {n: (mean, np.sqrt(square - mean**2)) for n, (mean, square) in found.items()}


def _deviations(mu: np.ndarray, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and second moments of the deviations given the latents that all share."""
    tau = tau[..., None]
    variance = 1 / (1 + (tau / ERROR) ** 2)
    mean = variance * tau * (EFFECT - mu[..., None]) / ERROR**2
    return mean, variance + mean**2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="hierarchies.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in args.models:
        found, result = fit(name, args.seed)
        print(f"{name}: {len(result.losses)} rounds; ELBO {-float(result.losses[-1]):.3f} nats")
        print(f"  found: {'; '.join(dict.fromkeys(result.info.structure))} ({result.info.expectation[-1]})")
        print(f"  {'':<14} {'mean':>7} {'exact':>7} {'sd':>6} {'exact':>6}")
        for latent, (mean, sd) in exact(name).items():
            own = found[latent]
            columns = [np.atleast_1d(np.asarray(x, float)) for x in (own.mean, mean, np.sqrt(own.variance), sd)]
            for i, row in enumerate(zip(*columns, strict=True)):
                label = latent if columns[0].size == 1 else f"{latent} {i + 1}"
                print(f"  {label:<14} {row[0]:>7.3f} {row[1]:>7.3f} {row[2]:>6.3f} {row[3]:>6.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
