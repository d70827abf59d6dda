"""``hierarchical``: effects private to their groups (radon, eight schools, baseball) against long NUTS, beside SVI."""

import argparse
import csv
import dataclasses
import gzip
import pathlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _report
from numpyro_pvi import PVI, Partition

# Rounds tried for PVI, and how much higher the loss of fewer may be, nats.
NUM_ROUNDS, WORSE = (40, 20), 0.02
NUM_DRAWS = 20_000
# Adam settings tried for SVI: peak learning rate (cosine to 0), steps, particles.
SETTINGS = ((0.02, 2_000, 1), (0.02, 4_000, 4), (0.05, 2_000, 4), (0.01, 6_000, 8))


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """One data set with its model, its groups, and which latents are hyperparameters."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    groups: dict[str, list[Any]]
    hyper: tuple[str, ...]
    effects: str


def radon(counties: Any, floor: Any, uranium: Any, log_radon: Any = None) -> None:
    """Varying intercepts with a county-level predictor, centred."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    basement = numpyro.sample("basement", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("county", uranium.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mu + slope * uranium, tau))
    with numpyro.plate("house", floor.shape[0]):
        numpyro.sample("obs", dist.Normal(effect[counties] + basement * floor, sigma), obs=log_radon)


def eight_schools(error: Any, y: Any = None) -> None:
    """Non-centred, as in Rubin's example."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("school", error.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("obs", dist.Normal(mu + tau * effect, error), obs=y)


def baseball(at_bats: Any, hits: Any = None) -> None:
    """Batting averages with partial pooling on the logit scale, non-centred."""
    mu = numpyro.sample("mu", dist.Normal(-1.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("player", at_bats.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("obs", dist.Binomial(at_bats, logits=mu + tau * effect), obs=hits)


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def load(folder: pathlib.Path) -> dict[str, Hierarchy]:
    """The three data sets; every county, school and player is a group."""
    with gzip.open(folder / "radon_mn.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    counties = np.array([int(r["county"]) for r in rows]) - 1
    uranium = np.zeros(counties.max() + 1, np.float32)
    uranium[counties] = [float(r["log_uppm"]) for r in rows]
    floor, level = (np.array([float(r[k]) for r in rows], np.float32) for k in ("floor", "log_radon"))
    schools, players = (_rows(folder / f"{name}.csv") for name in ("eight_schools", "efron_morris_baseball"))
    y, error = (np.array([float(r[k]) for r in schools], np.float32) for k in ("y", "sigma"))
    bats, hits = (np.array([int(r[k]) for r in players]) for k in ("At-Bats", "Hits"))
    county_names = list(range(len(uranium)))
    return {
        "radon": Hierarchy(
            radon,
            (counties, floor, uranium, level),
            {"county": county_names, "house": [int(c) for c in counties]},
            ("mu", "slope", "basement", "tau", "sigma"),
            "effect",
        ),
        "eight schools": Hierarchy(eight_schools, (error, y), {"school": list(range(len(y)))}, ("mu", "tau"), "effect"),
        "baseball": Hierarchy(baseball, (bats, hits), {"player": list(range(len(bats)))}, ("mu", "tau"), "effect"),
    }


def run(options: argparse.Namespace) -> _report.Report:
    """Fit each by NUTS (the reference), by SVI at its best of several settings, and by PVI with local latents."""
    report = _report.Report("hierarchical")
    if not options.data:
        raise SystemExit(
            "hierarchical needs --data DIR with radon_mn.csv.gz, eight_schools.csv, efron_morris_baseball.csv"
        )
    rows = []
    for name, problem in load(pathlib.Path(options.data)).items():
        if options.only and name not in options.only:
            continue
        args = tuple(jnp.asarray(x) for x in problem.args)
        reference = sample(problem, args, 500 if options.quick else 5_000)
        svi, enough = best_svi(problem, args, options.quick)
        found = {"PVI": fit_pvi(problem, args, enough), "SVI": svi}
        warm = _report.paired_medians({method: again for method, (_, again, *_) in found.items()}, 5)
        errors = {}
        for method, (draws, _, cold, setting) in found.items():
            errors[method] = [distance(draws, reference, names) for names in (problem.hyper, (problem.effects,))]
            rows.append((name, method, setting, *np.ravel(errors[method]), warm[method], cold))
        for i, what in enumerate(("hyperparameters", "effects")):
            # Two Monte Carlo errors of the comparison itself, in sd units.
            slack = 2 * (NUM_DRAWS**-0.5 + reference["error"])
            report.add_target(
                f"{name}: {what}, mean error of PVI less SVI's, sd", errors["PVI"][i][0] - errors["SVI"][i][0], slack
            )
        report.add_target(f"{name}: time, PVI over SVI (warm)", warm["PVI"] / warm["SVI"], 1.0)
    report.add_table(
        "errors of posterior means (root mean square, NUTS sds) and of log sds, against NUTS",
        (
            "data",
            "method",
            "setting",
            "hyper: mean",
            "hyper: log sd",
            "effects: mean",
            "effects: log sd",
            "warm s",
            "cold s",
        ),
        rows,
    )
    return report


def sample(problem: Hierarchy, args: tuple[Any, ...], num_samples: int) -> dict[str, Any]:
    """Long NUTS on the pooled data, logs of scales; with the Monte Carlo error of its means in sd units."""
    mcmc = MCMC(
        NUTS(problem.model, target_accept_prob=0.95),
        num_warmup=1_000,
        num_samples=num_samples,
        num_chains=4,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(7), *args)
    grouped = {n: unconstrain(n, v) for n, v in mcmc.get_samples(group_by_chain=True).items()}
    from numpyro.diagnostics import effective_sample_size

    least = min(float(np.min(effective_sample_size(np.asarray(v)))) for v in grouped.values())
    draws = {n: np.asarray(v).reshape(-1, *v.shape[2:]) for n, v in grouped.items()}
    return {"draws": draws, "error": least**-0.5}


def unconstrain(name: str, draws: Any) -> Any:
    """Log of scales, so that errors are in the space in which q is Gaussian."""
    return jnp.log(draws) if name in ("tau", "sigma") else draws


def distance(draws: dict[str, Any], reference: dict[str, Any], names: tuple[str, ...]) -> tuple[float, float]:
    """Root mean squares of mean errors in NUTS sds, and of log sd ratios."""
    means, sds = [], []
    for name in names:
        exact, got = reference["draws"][name], np.asarray(unconstrain(name, draws[name]))
        means.append(np.ravel((got.mean(0) - exact.mean(0)) / exact.std(0)))
        sds.append(np.ravel(np.log(got.std(0) / exact.std(0))))
    return tuple(float(np.sqrt(np.mean(np.concatenate(x) ** 2))) for x in (means, sds))


def fit_pvi(
    problem: Hierarchy, args: tuple[Any, ...], enough: float
) -> tuple[dict[str, Any], Callable[[], Any], float, str]:
    """PVI with every default but the number of rounds; the call from a state at hand, and seconds of everything."""
    guide = AutoMultivariateNormal(problem.model)
    pvi = PVI(Partition(problem.model, groups=problem.groups), guide)
    started = time.perf_counter()
    result = pvi.run(jax.random.key(0), NUM_ROUNDS[0], *args, progress_bar=False)
    cold = time.perf_counter() - started
    state = pvi.init(jax.random.key(0), *args)
    fits = [partial(pvi.run, jax.random.key(0), n, *args, progress_bar=False, init_state=state) for n in NUM_ROUNDS]
    losses = [common_loss(problem, guide, fit().params, args) for fit in fits]
    # The fewest rounds that do as well, or better than SVI.
    loss, fit, rounds = [
        x for x in zip(losses, fits, NUM_ROUNDS, strict=True) if x[0] <= max(losses[0] + WORSE, enough)
    ][-1]
    result = fit()
    draws = guide.sample_posterior(jax.random.key(1), result.params, *args, sample_shape=(NUM_DRAWS,))
    return draws, lambda: fit().params, cold, f"{rounds} rounds, loss {loss:.2f}"


def common_loss(problem: Hierarchy, guide: Any, params: dict[str, Any], args: tuple[Any, ...]) -> float:
    """The loss of fitted params by the same 10,000 draws for both sides, nats."""
    return float(Trace_ELBO(10_000).loss(jax.random.key(3), params, problem.model, guide, *args))


def best_svi(problem: Hierarchy, args: tuple[Any, ...], quick: bool) -> tuple[tuple[Any, ...], float]:
    """SVI with the same guide, as :func:`fit_pvi`: the setting with the least final loss; and that loss."""
    found = []
    for rate, steps, particles in SETTINGS[:1] if quick else SETTINGS:
        guide = AutoMultivariateNormal(problem.model, init_scale=0.05)
        optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))
        svi = SVI(problem.model, guide, optimiser, Trace_ELBO(particles))
        started = time.perf_counter()
        state = svi.init(jax.random.key(0), *args)

        @jax.jit
        def fit(state, svi=svi, steps=steps):
            return jax.lax.scan(lambda s, _: (svi.update(s, *args)[0], None), state, None, length=steps)[0]

        last = jax.block_until_ready(fit(state))
        cold = time.perf_counter() - started
        params = svi.get_params(last)
        loss = common_loss(problem, guide, params, args)
        again = partial(fit, state)
        found.append((loss, again, cold, guide, params, f"Adam {rate}, {steps} steps, {particles} particles"))
    loss, again, cold, guide, params, setting = min(found, key=lambda f: f[0])
    draws = guide.sample_posterior(jax.random.key(1), params, *args, sample_shape=(NUM_DRAWS,))
    return (draws, again, cold, f"{setting}, loss {loss:.2f}"), loss
