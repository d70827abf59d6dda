"""``ep-speed``: chains of 32 groups in one vectorised program, against a program called per group and an MCMC object per group."""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _report
from benchmarks._ep import kl
from numpyro_pvi import PVI, Partition
from numpyro_pvi.expectations import from_chains, no_chains
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily
from numpyro_pvi.runtime._tilted import lanes_pay
from numpyro_pvi.solvers import MCMCMoments, PowerEP

_DIM, _GROUPS = 8, 32


def _logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def _simulate(shape, seed=0):
    rng = np.random.default_rng(seed)
    X, w = rng.normal(size=(*shape, _DIM)), rng.normal(size=_DIM) / np.sqrt(_DIM)
    return jnp.asarray(X, jnp.float32), jnp.asarray(rng.random(shape) < 1 / (1 + np.exp(-X @ w)), jnp.float32)


def _visit(settings):
    """One group's visit: rows, key and chains to change, step and chains, at a q that knows about as much as the group."""
    family = MultivariateNormalFamily(_DIM)

    def visit(X, y, key, chains):
        def density(w):
            u = X @ w
            return jnp.sum(y * u - jnp.logaddexp(0.0, u))

        q = GaussianNatural(jnp.zeros(_DIM), jnp.eye(_DIM) * (1.0 + 0.2 * X.shape[0]))
        site = GaussianNatural(jnp.zeros(_DIM), jnp.eye(_DIM) * 0.1 * X.shape[0])
        found = from_chains(family, jax.value_and_grad(density), q, site, 1.0, key, settings, chains)
        return found.change, found.memory

    return visit


def _seconds(run, repeats):
    """Median wall time of calls that have been compiled and have run once."""
    jax.block_until_ready(run(0))
    times = []
    for index in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(1 + index))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def _opponents(rows, settings, repeats):
    """Seconds of a warm visit to all groups side by side and one by one, and of a cold one side by side."""
    X, y = _simulate((_GROUPS, rows))
    fresh = no_chains(settings, _DIM, jnp.float32, True)
    chains = jax.tree.map(lambda x: jnp.broadcast_to(x, (_GROUPS, *x.shape)), fresh)
    keys = [jax.random.split(jax.random.key(seed), _GROUPS) for seed in range(repeats + 2)]
    visit = _visit(settings)
    # As the library runs it: side by side, or one group after another where that is faster.
    all_groups = jax.vmap(visit) if lanes_pay(rows) else lambda *xs: jax.lax.map(lambda x: visit(*x), xs)
    together, alone = jax.jit(all_groups), jax.jit(visit)
    start = time.perf_counter()
    _, warm = jax.block_until_ready(together(X, y, keys[0], chains))
    cold = time.perf_counter() - start
    one = [jax.tree.map(lambda x, m=m: x[m], (X, y, warm)) for m in range(_GROUPS)]

    def in_turn(seed):
        return [alone(*parts[:2], keys[seed][m], parts[2]) for m, parts in enumerate(one)]

    side = _seconds(lambda seed: together(X, y, keys[seed], warm), repeats)
    return side, _seconds(in_turn, repeats), cold


def _objects(rows, settings, count):
    """Seconds of a cold MCMC object per group, from ``count`` of them, for all groups."""
    X, y = _simulate((_GROUPS, rows))
    start = time.perf_counter()
    for m in range(count):
        mcmc = MCMC(
            NUTS(_logistic),
            num_warmup=settings.num_warmup,
            num_samples=settings.num_samples,
            num_chains=settings.num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(m), X[m], y[m])
        jax.block_until_ready(mcmc.get_samples())
    return (time.perf_counter() - start) * _GROUPS / count


def _whole_fit(report, quick):
    """Power EP by chains against NUTS on all rows: times to the same distance from the exact moments."""
    rows, rounds, length = (2_000, 4, 100) if quick else (100_000, 8, 1_000)
    X, y = (x.reshape(-1, *x.shape[2:]) for x in _simulate((_GROUPS, rows // _GROUPS)))

    def gaussian(result):
        root = np.asarray(result.params["auto_scale_tril"], float)
        return np.asarray(result.params["auto_loc"], float), root @ root.T

    def fit(solver, count):
        model = Partition(_logistic, "data", np.arange(X.shape[0]) % _GROUPS)
        pvi, start = PVI(model, AutoMultivariateNormal(_logistic), solver=solver), time.perf_counter()
        return gaussian(pvi.run(jax.random.key(0), count, X, y, progress_bar=False)), time.perf_counter() - start

    # Factors of thousands of rows are all but Gaussian under q, so that quadrature by rows is next to exact.
    exact = fit(PowerEP(factors="row"), 12)[0]
    own, seconds = fit(PowerEP(moments=MCMCMoments()), rounds)
    batches = MCMCMoments(kernel="langevin", batch_size=20 if quick else 100)
    few, few_seconds = fit(PowerEP(moments=batches), rounds)
    start = time.perf_counter()
    mcmc = MCMC(NUTS(_logistic), num_warmup=length // 2, num_samples=length, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    draws, nuts = np.asarray(mcmc.get_samples()["w"], float), time.perf_counter() - start
    gaps = kl(exact, own), kl(exact, (draws.mean(0), np.cov(draws.T)))
    # The distance of plain draws falls as one over their number.
    equal = nuts * max(gaps[1] / gaps[0], 1.0)
    table = [
        ("power EP by chains", seconds, gaps[0]),
        (f"power EP by chains on {batches.batch_size} rows a step", few_seconds, kl(exact, few)),
        (f"NUTS, {length:,} draws", nuts, gaps[1]),
    ]
    caption = f"whole fit, N = {X.shape[0]:,}, D = {_DIM}, M = {_GROUPS}: seconds (cold), KL(exact moments || found)"
    report.add_table(caption, ("method", "seconds", "KL, nats"), table)
    report.add_target("seconds over those of NUTS at equal KL", seconds / equal, 1.0)


def run(options: argparse.Namespace) -> _report.Report:
    """Draws a second of three ways to run the chains of 32 groups; with ``--size``, a whole fit against NUTS on all rows."""
    report = _report.Report("ep-speed")
    if options.size:
        _whole_fit(report, options.quick)
        return report
    settings = MCMCMoments(num_warmup=50, num_samples=32) if options.quick else MCMCMoments()
    repeats, draws, table = 3 if options.quick else 5, _GROUPS * settings.num_draws, []
    for rows, least in ((50, 2.0), (3_000, 1.0)):
        side, turn, first = _opponents(rows, settings, repeats)
        table.append((f"{rows:,}", draws / side, draws / turn, turn / side))
        report.add_target(
            f"draws a second at {rows:,} rows, over one program per group", turn / side, least, at_least=True
        )
        if rows == 50:
            cold, objects = first, _objects(rows, settings, 2 if options.quick else _GROUPS)
            report.add_target("cold, one MCMC object per group over one program", objects / cold, 5.0, at_least=True)
    caption = (
        f"draws a second once warm, M = {_GROUPS}, D = {_DIM}, {settings.num_chains} chains of {settings.num_samples}"
    )
    report.add_table(caption, ("rows a group", "one program for all", "one program called per group", "ratio"), table)
    caption = "cold, compiling included: seconds for all groups at 50 rows"
    report.add_table(caption, ("one program for all", "one MCMC object per group"), [(cold, objects)])
    return report
