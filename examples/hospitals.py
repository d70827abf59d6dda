"""Five clinics, one regression: Bayesian logistic regression as SVI, as PVI and as NUTS on the pooled data.

    python examples/hospitals.py
    python examples/hospitals.py --data FILE.csv --group COLUMN --target COLUMN --positive "COLUMN > 0"

The first line runs on scikit-learn's breast-cancer data, cut into five unequal simulated clinics. It prints how far SVI
and PVI (the same guide) are from NUTS, an ArviZ summary, what each group contributes, and draws the coefficients.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _report
import _tables
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import ImproperError, PVIError

SD_QUANTILES = (0.15865525, 0.84134475)  # one sd either side of a normal's mean


def model(X: Float[Array, "N D"], y: Int[Array, " N"] | None = None) -> None:
    """Logistic regression on standardised columns: intercept ~ Normal(0, 5), coefficients ~ Normal(0, 2.5)."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    coefficients = numpyro.sample("coefficients", dist.Normal(0.0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ coefficients), obs=y)


def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """Seconds until every array of the result is there, and the result."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)])
    return time.perf_counter() - start, result


def moments(guide: AutoMultivariateNormal, params: dict[str, Array]) -> dict[str, Float[np.ndarray, " P"]]:
    """Mean, sd and 90 % interval of the intercept and the coefficients under a fitted guide, exact for a Gaussian."""
    quantiles = guide.quantiles(params, [0.05, SD_QUANTILES[0], 0.5, SD_QUANTILES[1], 0.95])
    low, below, middle, above, high = np.concatenate(
        [np.asarray(quantiles["intercept"])[:, None], np.asarray(quantiles["coefficients"])], axis=1
    )
    return {"mean": middle, "sd": (above - below) / 2, "low": low, "high": high}


def elbo(
    rng_key: Array, guide: AutoMultivariateNormal, params: dict[str, Array], X: Array, y: Array, batches: int = 32
) -> dict[str, float]:
    """ELBO of a fitted guide in nats from ``batches`` x 1,000 draws, and its Monte Carlo standard error.

    SVI and PVI are measured by this one function with the same key, hence with common draws.
    """
    loss = Trace_ELBO(num_particles=1_000).loss
    draws = jax.lax.map(lambda key: -loss(key, params, model, guide, X, y), jax.random.split(rng_key, batches))
    return {"elbo": float(draws.mean()), "elbo_error": float(draws.std(ddof=1) / np.sqrt(batches))}


def fit_svi(rng_key: Array, X: Array, y: Array, num_steps: int) -> _report.Fit:
    """NumPyro's SVI: Adam from .03 down a cosine, one particle."""
    start = time.perf_counter()
    guide = AutoMultivariateNormal(model)
    optim = Adam(lambda step: 0.015 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / num_steps, 1.0))))
    svi = SVI(model, guide, optim, Trace_ELBO())
    result = svi.run(rng_key, num_steps, X, y, progress_bar=False)
    jax.block_until_ready(result.params)
    first = time.perf_counter() - start
    second, _ = timed(svi.run, rng_key, num_steps, X, y, progress_bar=False)
    bound = elbo(jax.random.key(1), guide, result.params, X, y)
    work = f"{num_steps} Adam steps"
    return _report.Fit("SVI", work, first=first, second=second, **moments(guide, result.params), **bound)


def fit_pvi(rng_key: Array, X: Array, y: Array, groups: Sequence[str], rounds: int) -> tuple[_report.Fit, PVI, Any]:
    """PVI with the same guide: one site per group, all defaults. Returns the fit, the PVI object and its result."""
    start = time.perf_counter()
    guide = AutoMultivariateNormal(model)
    pvi = PVI(Partition(model, "patients", groups), guide)
    result = pvi.run(rng_key, rounds, X, y, tol=1e-3, progress_bar=False)
    jax.block_until_ready(result.params)
    first = time.perf_counter() - start
    second, _ = timed(pvi.run, rng_key, rounds, X, y, tol=1e-3, progress_bar=False)
    bound = elbo(jax.random.key(1), guide, result.params, X, y)
    work = f"{len(result.losses)} rounds"
    fit = _report.Fit("PVI", work, first=first, second=second, **moments(guide, result.params), **bound)
    return fit, pvi, result


def fit_nuts(rng_key: Array, X: Array, y: Array, warmup: int, draws: int) -> tuple[_report.Fit, dict[str, float]]:
    """NUTS on the pooled data, 4 chains. Returns the fit and its own quality: worst r-hat, least ESS, divergences."""
    mcmc = MCMC(
        NUTS(model, dense_mass=True),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    first, _ = timed(mcmc.run, rng_key, X, y)
    samples = mcmc.get_samples(group_by_chain=True)
    theta = np.concatenate([np.asarray(samples["intercept"])[..., None], np.asarray(samples["coefficients"])], axis=-1)
    quality = {
        "r_hat": float(numpyro.diagnostics.split_gelman_rubin(theta).max()),
        "ess": float(numpyro.diagnostics.effective_sample_size(theta).min()),
        "divergences": int(mcmc.get_extra_fields()["diverging"].sum()),
    }
    theta = theta.reshape(-1, theta.shape[-1])
    low, high = np.quantile(theta, [0.05, 0.95], axis=0)
    work = f"4 x ({warmup} + {draws}) draws"
    return _report.Fit("NUTS", work, theta.mean(axis=0), theta.std(axis=0), low, high, first), quality


def fit_alone(rng_key: Array, table: _tables.Table, rounds: int) -> dict[str, _report.Fit]:
    """What every group knows without the others: prior x its own rows, fitted by PVI with that one group."""
    fits = {}
    for label in list(table.group_sizes())[: _report.MAX_GROUPS_DRAWN]:
        rows = table.rows_of(label)
        guide = AutoMultivariateNormal(model)
        pvi = PVI(Partition(model, "patients", [label] * int(rows.sum())), guide)
        X, y = jnp.asarray(table.X[rows]), jnp.asarray(table.y[rows])
        seconds, result = timed(pvi.run, rng_key, rounds, X, y, tol=1e-3, progress_bar=False)
        fits[label] = _report.Fit(label, f"{len(result.losses)} rounds", first=seconds, **moments(guide, result.params))
    return fits


def influences(pvi: PVI, state: Any, labels: Sequence[str]) -> list[_report.Influence]:
    """Posterior against the cavity of every group; a group whose cavity cannot be normalised is left out."""
    blocks = pvi.posterior(state, joint=True)
    names = next(key for key in blocks if isinstance(key, tuple))  # the joint block, its latents in flat order
    posterior = blocks[names]
    sizes = [1 if name == "intercept" else posterior.event_shape[0] - 1 for name in names]
    places = dict(zip(names, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), strict=True))
    order = np.concatenate([places["intercept"], places["coefficients"]])
    mean, sd = np.asarray(posterior.mean)[order], np.sqrt(np.asarray(posterior.variance))[order]
    found = []
    for label in labels:
        try:
            cavity = pvi.cavity(state, label).to_distribution()
        except ImproperError:
            continue
        without, width = np.asarray(cavity.mean)[order], np.sqrt(np.asarray(cavity.variance))[order]
        found.append(_report.Influence(label, (mean - without) / sd, width / sd))
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; options that do not go together are refused here, before anything is fitted."""
    parser = argparse.ArgumentParser(prog="hospitals.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, metavar="FILE", help="your own table, CSV, plain or gzip")
    parser.add_argument("--group", metavar="COLUMN", help="column that says which group a row is in")
    parser.add_argument("--target", metavar="COLUMN", help="column to predict")
    parser.add_argument("--positive", metavar="EXPR", help="what counts as 1: '> 0', 'COLUMN >= 2', '== 2' or a value")
    parser.add_argument("--out", type=Path, default=Path("hospitals.png"), metavar="PICTURE")
    parser.add_argument("--rounds", type=int, default=30, help="most rounds of PVI (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="short chains and few SVI steps: to see that it runs")
    args = parser.parse_args(argv)
    own = {name for name in ("group", "target", "positive") if getattr(args, name) is not None}
    if args.data is None and own:
        parser.error(f"--{min(own)} needs --data FILE")
    if args.data is not None and not {"group", "target"} <= own:
        parser.error("--data needs --group COLUMN and --target COLUMN")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: pip install 'numpyro_pvi[examples]'")
    return args


def run(args: argparse.Namespace) -> None:
    """Fits, prints and draws everything."""
    table = (
        _tables.read_table(args.data, args.group, args.target, args.positive) if args.data else _tables.breast_cancer()
    )
    names = ("intercept", *table.features)
    print(*_report.data_lines(table), "", sep="\n", flush=True)
    key_svi, key_pvi, key_nuts, key_alone, key_draws = jax.random.split(jax.random.key(args.seed), 5)
    X, y = jnp.asarray(table.X), jnp.asarray(table.y)
    svi_fit = fit_svi(key_svi, X, y, 500 if args.quick else 20_000)
    pvi_fit, pvi, result = fit_pvi(key_pvi, X, y, table.groups, args.rounds)
    nuts_fit, quality = fit_nuts(key_nuts, X, y, *((200, 200) if args.quick else (500, 1_000)))
    print(
        "Errors against NUTS on the pooled data, in its posterior sd; seconds of the first `run` (guide and fit made, compiling "
        "included) and of the same `run` again."
    )
    print(*_report.fit_lines([svi_fit, pvi_fit], nuts_fit), sep="\n")
    print(
        f"NUTS: worst r-hat {quality['r_hat']:.3f}, least ESS {quality['ess']:.0f} (so its own mean error is about "
        f"{quality['ess'] ** -0.5:.3f} sd), {quality['divergences']} divergences. PVI: {result.message}\n"
    )
    idata = pvi.to_arviz(key_draws, result, X, y, num_samples=1_000)
    shown = _report.choose_rows(nuts_fit)
    print(f"PVI posterior, ArviZ summary ({len(shown)} of {len(names)} rows)")
    print(*_report.summary_lines(idata, names, shown), "", "Influence of each group", sep="\n")
    print(
        *_report.influence_lines(influences(pvi, result.state, list(table.group_sizes())), table, names),
        sep="\n",
        flush=True,
    )
    alone = fit_alone(key_alone, table, args.rounds)
    _report.forest_plot(args.out, table, nuts_fit, pvi_fit, alone, names)
    print(f"\nForest plot (pooled NUTS, PVI, and every group alone, fitted by PVI on its own rows): {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; a bad table or option ends with one line on stderr and exit status 2."""
    args = parse_arguments(argv)
    warnings.filterwarnings("ignore", category=FutureWarning, module="arviz")  # its announcement of version 1
    try:
        run(args)
    except (_tables.TableError, PVIError) as error:
        print(f"hospitals.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
