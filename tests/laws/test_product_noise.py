"""Draws under a product of families: a site beside its factor takes the noise away that it explains, rounds average the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import _pairs
from numpyro_pvi.runtime._product_factors import ProductFactors
from numpyro_pvi.runtime._product_problem import ProductProblem
from numpyro_pvi.schedules import Sequential, Synchronous, _acceptance
from numpyro_pvi.solvers import NaturalGradient

COUNTS = np.array([2, 0, 3, 1, 4, 2])
TIGHT = {"float32": 2e-3, "float64": 1e-6}[jnp.result_type(float).name]
SHAPES = np.random.default_rng(3).gamma(3.0, 1.0, size=12)


def drawn(schedule):
    """After 60 rounds: the posterior of a Poisson rate, though it is drawn, and minus the log evidence."""

    def rates(counts):
        scale = numpyro.sample("scale", dist.Gamma(3.0, 2.0))
        with numpyro.plate("data", counts.shape[0]):
            numpyro.sample("obs", dist.Poisson(scale), obs=counts)

    pvi = PVI(
        Partition(rates, "data", [0, 0, 1, 1, 1, 2]),
        AutoExponentialFamily(rates),
        solver=NaturalGradient(expectation="monte_carlo", num_draws=8),
        schedule=schedule,
    )
    result = pvi.run(jax.random.key(0), 60, jnp.asarray(COUNTS), progress_bar=False)
    assert result.info.expectation == ("draws of scale",) * 3
    found = pvi.posterior(result.state)["scale"]
    a, b = 3.0 + COUNTS.sum(), 2.0 + len(COUNTS)
    evidence = (
        3 * np.log(2) - special.gammaln(3) + special.gammaln(a) - a * np.log(b) - special.gammaln(COUNTS + 1).sum()
    )
    errors = [float(found.concentration) / a - 1, float(found.rate) / b - 1, -float(result.losses[-1]) / evidence - 1]
    return np.abs(errors).max()


@pytest.mark.parametrize("schedule", [Synchronous(), pytest.param(Sequential(), marks=pytest.mark.slow)])
def test_what_a_site_explains_is_not_noise(schedule, monkeypatch):
    """Draws of a conjugate factor say nothing that its site does not, so that rounds close in on the exact posterior."""
    assert drawn(schedule) < TIGHT
    monkeypatch.setattr(ProductProblem, "_known", lambda *_: {})
    monkeypatch.setattr(ProductProblem, "_said", lambda _, sites: jax.tree.map(jnp.zeros_like, sites))
    assert drawn(schedule) > 20 * TIGHT


def scatter(keys, rounds):
    """Sd over keys of the log concentration and the log mean of an unknown shape, after some rounds."""

    def shape(y):
        value = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("obs", dist.Gamma(value, 1.0), obs=y)

    pvi = PVI(Partition(shape, "data", 1), AutoExponentialFamily(shape), solver=NaturalGradient(num_draws=2))
    found = []
    for seed in range(keys):
        params = pvi.run(jax.random.key(seed), rounds, jnp.asarray(SHAPES), progress_bar=False).params
        a, b = (float(params[f"shape_auto_{n}"]) for n in ("concentration", "rate"))
        found.append((np.log(a), np.log(a / b)))
    return np.std(found, axis=0, ddof=1)


def refused_for_rounding(rounds=60):
    """Rounds with a refused step in float32, of twelve rows that stand for a million: 2e6 nats, whose last place is a quarter."""

    def shape(y):
        value = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("data", y.shape[0]), numpyro.handlers.scale(scale=1e5):
            numpyro.sample("obs", dist.Gamma(value, rate), obs=y)

    with jax.enable_x64(False):
        labels = np.repeat(["a", "b", "c"], 4)
        pvi = PVI(Partition(shape, "data", labels), AutoExponentialFamily(shape), solver=NaturalGradient(num_draws=4))
        trace = pvi.run(jax.random.key(0), rounds, jnp.asarray(SHAPES, jnp.float32), progress_bar=False).trace
        return int(np.sum(np.max(trace.backoffs, axis=1) > 0))


@pytest.mark.once
def test_steps_are_not_refused_for_what_rounding_makes_of_many_rows(monkeypatch):
    """A step of a round gains as much as its draws err, a nat at most: the fault is to hold it to the last places of all rows."""
    # A gamma that is not conjugate is drawn where it has no nodes.
    monkeypatch.setattr(_pairs, "_Gamma", functools.partial(_pairs._Gamma, nodes=False))
    assert refused_for_rounding() < 3
    monkeypatch.setattr(ProductFactors, "allowance", lambda *_: 0.0)
    assert refused_for_rounding() > 10


@pytest.mark.slow
def test_the_noise_of_late_rounds_is_averaged(monkeypatch):
    """Wrong by chance about once in 500 seeds: sds of 16 are off by 18 % each, and the steps of round 150 promise a third."""
    averaged = scatter(16, 150)
    monkeypatch.setattr(_acceptance, "late_share", lambda late, dtype: jnp.ones((), dtype))
    assert np.all(averaged < 0.6 * scatter(16, 150))
