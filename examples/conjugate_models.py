"""Four models in which every message is in closed form: what is found, beside the exact posterior where there is one.

    python examples/conjugate_models.py
    python examples/conjugate_models.py counties --seed 3

`regression`: linear regression with unknown noise. `tests`: A/B tests on several sites, Beta-Binomial. `counties`:
rates by county with a common unknown scale, Gamma-Poisson. `faces`: several dice, Dirichlet-Categorical.
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

from numpyro_pvi import PVI, AutoExponentialFamily, Partition


def regression(X: Float[Array, "N D"], y: Float[Array, " N"]) -> None:
    """Coefficients ~ Normal(0, 2), precision of the noise ~ Gamma(1, 1)."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1 / jnp.sqrt(tau)), obs=y)


def tests(
    site: Int[Array, " N"], variant: Int[Array, " N"], shown: Int[Array, " N"], clicked: Int[Array, " N"]
) -> None:
    """One rate of clicks ~ Beta(1, 9) for every site and variant."""
    with numpyro.plate("sites", 3, dim=-2), numpyro.plate("variants", 2, dim=-1):
        rate = numpyro.sample("rate", dist.Beta(1.0, 9.0))
    with numpyro.plate("days", shown.shape[0]):
        numpyro.sample("clicked", dist.Binomial(shown, rate[site, variant]), obs=clicked)


def counties(county: Int[Array, " N"], years: Float[Array, " N"], cases: Int[Array, " N"]) -> None:
    """A rate ~ Gamma(2, scale) for every county, their common scale ~ Gamma(2, 1): the prior is a factor of its own."""
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    with numpyro.plate("counties", 6):
        rate = numpyro.sample("rate", dist.Gamma(2.0, scale))
    with numpyro.plate("reports", cases.shape[0]):
        numpyro.sample("cases", dist.Poisson(years * rate[county]), obs=cases)


def faces(die: Int[Array, " N"], face: Int[Array, " N"]) -> None:
    """Shares of the six faces ~ Dirichlet(1) for each of four dice."""
    with numpyro.plate("dice", 4):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(6)))
    with numpyro.plate("throws", face.shape[0]):
        numpyro.sample("face", dist.Categorical(shares[die]), obs=face)


def generate(name: str, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, ...]:
    """Data of one of the models."""
    if name == "regression":
        X = rng.normal(size=(rows, 3))
        return X, X @ np.array([1.0, -2.0, 0.5]) + 0.7 * rng.normal(size=rows)
    if name == "tests":
        site, variant, shown = rng.integers(0, 3, rows), rng.integers(0, 2, rows), rng.integers(50, 200, rows)
        return site, variant, shown, rng.binomial(shown, 0.05 + 0.02 * site + 0.03 * variant)
    if name == "counties":
        county, years = rng.integers(0, 6, rows), rng.uniform(1.0, 3.0, rows)
        return county, years, rng.poisson(years * (0.5 + county))
    die = rng.integers(0, 4, rows)
    return die, np.where(rng.random(rows) < 0.1 * die, 5, rng.integers(0, 6, rows))


def fit(name: str, data: tuple[np.ndarray, ...], seed: int = 0) -> tuple[dict[str, Any], Any]:
    """The posterior by latent and the run's result; rows in four groups."""
    model, plate = MODELS[name]
    pvi = PVI(Partition(model, plate, 4), AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(seed), 100, *map(jnp.asarray, data), tol=1e-4, progress_bar=False)
    return pvi.posterior(result.state), result


def exact_mean(name: str, data: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Posterior means of the models whose posterior is known by hand."""
    if name == "tests":
        site, variant, shown, clicked = data
        ones, all_ = np.ones((3, 2)), np.full((3, 2), 10.0)
        np.add.at(ones, (site, variant), clicked)
        np.add.at(all_, (site, variant), shown)
        return {"rate": ones / all_}
    if name == "faces":
        counts = np.ones((4, 6))
        np.add.at(counts, data, 1)
        return {"shares": counts / counts.sum(axis=1, keepdims=True)}
    return {}


MODELS: dict[str, tuple[Callable[..., None], str]] = {
    "regression": (regression, "rows"),
    "tests": (tests, "days"),
    "counties": (counties, "reports"),
    "faces": (faces, "throws"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="conjugate_models.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in args.models:
        data = generate(name, np.random.default_rng(args.seed), args.rows)
        found, result = fit(name, data, args.seed)
        print(f"{name}: {len(result.losses)} rounds, {result.message} ELBO {-float(result.losses[-1]):.3f} nats")
        print(f"  found: {'; '.join(dict.fromkeys(result.info.structure))} ({result.info.expectation[0]})")
        exact = exact_mean(name, data)
        for latent, own in found.items():
            mean, sd = np.asarray(own.mean, float), np.sqrt(np.asarray(own.variance, float))
            error = f", off the exact one by {np.abs(mean - exact[latent]).max():.1e}" if latent in exact else ""
            print(f"  {latent}: mean {np.round(mean, 3).tolist()}{error}; sd {np.round(sd, 3).tolist()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
