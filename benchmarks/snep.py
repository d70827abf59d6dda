"""``snep``: stochastic natural-gradient EP beside EP, VI and consensus Monte Carlo at an equal budget of gradients."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
from numpyro.infer import HMC, MCMC
from numpyro.infer.hmc_util import consensus, parametric

from benchmarks import _report
from benchmarks._ep import PRIOR_SD, _fit, _logistic, kl, reference, simulate
from numpyro_pvi.solvers import SNEP, ImportanceMoments, NaturalGradient, PowerEP

# Leapfrog steps of one transition.
LEAPFROGS = 8
# A gradient costs about as much as two values.
VALUES_PER_GRADIENT = 2


def _share(X, y, num_groups):
    """A group's rows with its share of the prior: the sub-posterior of consensus Monte Carlo."""
    with scale(scale=1.0 / num_groups):
        w = numpyro.sample("w", dist.Normal(0.0, PRIOR_SD).expand([X.shape[1]]).to_event(1))
    numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def sub_posteriors(data, num_groups, gradients, seed):
    """Draws of every group's sub-posterior by HMC, with a fifth of the gradients spent on warm-up."""
    X, y, labels = data
    transitions = max(gradients // LEAPFROGS, 50)
    warmup = transitions // 5
    # Without a length of their own, trajectories leave the step size to warm-up.
    kernel = HMC(_share, num_steps=LEAPFROGS, trajectory_length=None)
    chains = MCMC(kernel, num_warmup=warmup, num_samples=transitions - warmup, progress_bar=False, jit_model_args=True)
    found = []
    for g in range(num_groups):
        mine = labels == g
        # Groups are of equal size, so that all of them share one compiled program.
        chains.run(jax.random.fold_in(jax.random.key(seed), g), X[mine], y[mine], num_groups)
        found.append(chains.get_samples()["w"])
    return found


def consensus_moments(data, num_groups, gradients, seed):
    """Moments by the weighted average of draws, and by the product of the sub-posteriors' Gaussians."""
    draws = sub_posteriors(data, num_groups, gradients, seed)
    joined = np.asarray(consensus(draws), float)
    mean, covariance = (np.asarray(v, float) for v in parametric(draws))
    return (joined.mean(0), np.cov(joined.T)), (mean, covariance)


def run(options: argparse.Namespace) -> _report.Report:
    """KL from a Gaussian with the exact posterior's moments, over seeds, and whether q stayed proper in all of them."""
    report = _report.Report("snep")
    quick = options.quick
    size, draws, exact_draws, seeds, rounds = (80, 512, 200_000, 3, 12) if quick else (400, 4096, 3_000_000, 20, 30)
    num_groups = 8
    data = simulate(size, 8, num_groups, lambda u: 1 / (1 + np.exp(-u)))
    variational = _fit(_logistic, data, NaturalGradient(), 30)[:2]
    exact = reference(*data[:2], *variational, exact_draws)
    moments = ImportanceMoments(num_draws=draws)
    found, proper = {}, True
    solvers = {
        "SNEP, defaults": SNEP(moments=moments),
        "SNEP, three inner steps a visit": SNEP(moments=moments, num_steps=3, outer_period=3),
        "EP": PowerEP(moments=moments),
    }
    for name, solver in solvers.items():
        # Equal numbers of draws, whatever they are spent on.
        length = rounds // getattr(solver, "num_steps", 1)
        values = []
        for seed in range(seeds if name != "EP" else min(seeds, 10)):
            loc, covariance, _, result = _fit(_logistic, data, solver, length, seed)
            values.append(kl(exact, (loc, covariance)))
            if name == "SNEP, defaults":
                proper = proper and bool(result.state.report.valid) and bool(jnp.all(jnp.isfinite(result.losses)))
        found[name] = values
    gradients = draws * rounds // VALUES_PER_GRADIENT
    pairs = [consensus_moments(data, num_groups, gradients, seed) for seed in range(2 if quick else 5)]
    found["consensus Monte Carlo"] = [kl(exact, pair[0]) for pair in pairs]
    found["consensus, product of Gaussians"] = [kl(exact, pair[1]) for pair in pairs]
    found["variational"] = [kl(exact, variational)]
    rows = [(name, float(np.median(v)), float(np.max(v)), len(v)) for name, v in found.items()]
    caption = (
        f"logistic regression, N = {size}, D = 8, M = {num_groups}, sorted by a covariate: KL(exact moments || q), nats; "
        f"{draws * rounds:,} values a group, or {gradients:,} gradients"
    )
    report.add_table(caption, ("q", "median", "worst", "seeds"), rows)
    report.add_target(
        "SNEP's q proper in every round from the defaults, share of seeds", float(proper), 1.0, at_least=True
    )
    if not quick:
        ratio = float(np.median(found["SNEP, defaults"]) / np.median(found["EP"]))
        report.add_target("SNEP, median, over EP's", ratio, 1.5)
    return report
