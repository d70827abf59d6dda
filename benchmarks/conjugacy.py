"""``conjugacy``: what closed-form messages save, against drawing every latent of the same models from the same start.

Three models under ``AutoExponentialFamily``, float64. *As found* is ``NaturalGradient()``; *all drawn* is
``NaturalGradient(expectation="monte_carlo")`` with as many draws (16). Errors are those of all latents' means, in the sds of the
limit of the first, at its fixed point; where a latent is drawn in both, of 1,024 draws.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from benchmarks import _report
from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.solvers import NaturalGradient

ROUNDS, LONG = (3, 30), 100
SEEDS = 5


def regression(X: Any, y: Any) -> None:
    """Coefficients and the precision of the noise."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1 / jnp.sqrt(tau)), obs=y)


def counties(years: Any, cases: Any) -> None:
    """Rates of 20 counties, and their common scale."""
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    with numpyro.plate("counties", 20):
        rate = numpyro.sample("rate", dist.Gamma(2.0, scale))
    with numpyro.plate("reports", cases.shape[0]):
        numpyro.sample("cases", dist.Poisson(years[:, None] * rate).to_event(1), obs=cases)


def shapes(y: Any) -> None:
    """Both parameters of a gamma distribution."""
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, rate), obs=y)


def problems(rows: int) -> dict[str, tuple]:
    """Models, their simulated data, and the plate that is split."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 5))
    years = rng.uniform(0.5, 2.0, rows)
    return {
        "regression": (regression, (X, X @ rng.normal(size=5) + 0.7 * rng.normal(size=rows)), "rows"),
        "counties": (counties, (years, rng.poisson(years[:, None] * rng.gamma(2.0, 0.5, 20))), "reports"),
        "shapes": (shapes, (rng.gamma(3.0, 0.5, rows),), "rows"),
    }


def _means(pvi: PVI, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means and sds of all latents end to end."""
    found = pvi.posterior(state)
    flat = [np.concatenate([np.ravel(getattr(d, of)) for d in found.values()]) for of in ("mean", "variance")]
    return flat[0], np.sqrt(flat[1])


def _compare(name: str, model: Any, arrays: tuple, plate: str, quick: bool) -> list[tuple]:
    """A row for each solver, and what was found."""
    arrays = tuple(jnp.asarray(a) for a in arrays)

    def build(solver: NaturalGradient) -> PVI:
        return PVI(Partition(model, plate, 4), AutoExponentialFamily(model), solver=solver)

    def fit(pvi: PVI, seed: int, rounds: int) -> Any:
        return pvi.run(jax.random.key(seed), rounds, *arrays, progress_bar=False)

    long = build(NaturalGradient(num_draws=64 if quick else 1024))
    goal, sd = _means(long, fit(long, 0, 20 if quick else LONG).state)
    fits = {"as found": build(NaturalGradient()), "all drawn": build(NaturalGradient(expectation="monte_carlo"))}
    seeds, states = range(2 if quick else SEEDS), {w: p.init(jax.random.key(0), *arrays) for w, p in fits.items()}
    calls = {
        word: lambda p=p, s=states[word]: (
            p.run(jax.random.key(0), 20, *arrays, progress_bar=False, init_state=s).state.sites
        )
        for word, p in fits.items()
    }
    times, rows = _report.paired_medians(calls, 3 if quick else 15), []
    for word, pvi in fits.items():
        ends = [[fit(pvi, seed, r) for seed in seeds] for r in ROUNDS]
        errors = [np.median([np.max(np.abs(_means(pvi, f.state)[0] - goal) / sd) for f in found]) for found in ends]
        hover = np.std([float(f.losses[-1]) for f in ends[-1]])
        structure = ends[-1][0].info.expectation if word == "as found" else ("all drawn",)
        rows.append((name, "; ".join(sorted(set(structure))), 1e3 * times[word] / 20, *errors, hover))
    return rows


def run(options: argparse.Namespace) -> _report.Report:
    """All three models."""
    report, rows = _report.Report("conjugacy"), []
    with jax.enable_x64(True):
        for name, problem in problems(60 if options.quick else 500).items():
            if options.only is None or name in options.only:
                rows += _compare(name, *problem, options.quick)
    header = ("model", "expectations", "ms / round", *(f"error after {r}, sd" for r in ROUNDS), "loss's sd, nats")
    report.add_table("16 draws where there are any; medians over seeds", header, rows)
    return report
