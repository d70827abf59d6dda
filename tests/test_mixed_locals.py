"""Continuous and discrete latents inside the partitioned plates of one model.

Oracles: NumPyro's own enumeration of the whole model at given continuous latents, and the Gaussian with the largest ELBO,
by dense quadrature in float64 over the shared latent and one row's own at a time, the discrete one summed by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.funsor import config_enumerate, enum, log_density
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import optimize

from numpyro_pvi import PVI, Partition, PartitionError
from numpyro_pvi.factors import ModelCall, row_log_likelihood
from numpyro_pvi.factors import _enumerate as enumeration
from numpyro_pvi.factors._arguments import as_arrays
from numpyro_pvi.factors._planner import plan_factors
from numpyro_pvi.schedules import Sequential, Synchronous

KEY = jax.random.key(0)
RNG = np.random.default_rng(8)
N, PRIOR, OWN, NOISE = 4, 1.2, 0.6, 0.5
SHIFT = np.array([-0.7, 1.1])
LABELS = list("abca")
Y = np.where(RNG.random(N) < 0.4, SHIFT[0], SHIFT[1]) + 0.5 + OWN * RNG.normal(size=N) + NOISE * RNG.normal(size=N)
COUNTY = np.array([0, 0, 1, 2, 2, 2, 1, 0])
STATES = {"county": list("aba"), "house": [list("aba")[c] for c in COUNTY]}
HOUSE = SHIFT[RNG.integers(0, 2, size=8)] + RNG.normal(size=3)[COUNTY] + NOISE * RNG.normal(size=8)


def rows(y):
    """Both in one plate: the prior of a row's component moves with its effect."""
    mu = numpyro.sample("mu", dist.Normal(0.0, PRIOR))
    with numpyro.plate("data", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.0, OWN))
        z = numpyro.sample("z", dist.Bernoulli(logits=u - 0.3 * mu))
        numpyro.sample("obs", dist.Normal(mu + u + jnp.asarray(SHIFT)[z], NOISE), obs=y)


def rows_indexed(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, PRIOR))
    with numpyro.plate("data", N) as i:
        u = numpyro.sample("u", dist.Normal(0.0, OWN))
        z = numpyro.sample("z", dist.Bernoulli(logits=u - 0.3 * mu))
        numpyro.sample("obs", dist.Normal(mu + u + jnp.asarray(SHIFT)[z], NOISE), obs=y[i])


def houses(y, county):
    """An effect per county, a component per house."""
    mu = numpyro.sample("mu", dist.Normal(0.0, PRIOR))
    with numpyro.plate("county", 3):
        u = numpyro.sample("u", dist.Normal(mu, OWN))
    with numpyro.plate("house", y.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("obs", dist.Normal(u[county] + jnp.asarray(SHIFT)[z], NOISE), obs=y)


CASES = {
    "one plate": (rows, {"plate": "data", "groups": LABELS}, (Y,)),
    "two plates": (houses, {"groups": STATES, "mode": "mask"}, (HOUSE, COUNTY)),
}


@pytest.mark.parametrize("name", ["one plate", pytest.param("two plates", marks=pytest.mark.slow)])
def test_rows_are_numpyros_own_enumeration(name, tolerance):
    model, split, args = CASES[name]
    planned = plan_factors(Partition(model, **split), *as_arrays(args, {}), key=KEY)
    plan = planned.plan
    assert plan.likelihood == "local" and plan.enumeration.latents == ("z",)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        mu, u = rng.normal(), rng.normal(size=plan.local.size)
        call = ModelCall(plan.model(model), plan.layout, args, {}, {}, plan.local, jnp.asarray(u[:, None]))
        found = sum(jnp.sum(v) for _, v in row_log_likelihood(call, jnp.asarray([mu]), plan.rows).values())
        whole = enum(config_enumerate(handlers.substitute(model, {"mu": mu, "u": jnp.asarray(u)})), -2)
        theirs = log_density(whole, args, {}, {})[0] - dist.Normal(0.0, PRIOR).log_prob(mu)
        np.testing.assert_allclose(found, theirs, rtol=100 * tolerance)


# ------------------------------------------------------------------------------------------------------- dense quadrature

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def normal(x, sd):
    return -0.5 * (x / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)


def density(mu, u, y):
    """log p(y, u | mu) with the component summed out, by hand."""
    logits = u - 0.3 * mu
    off, on = -np.logaddexp(0, logits), -np.logaddexp(0, -logits)
    return normal(u, OWN) + np.logaddexp(
        off + normal(y - mu - u - SHIFT[0], NOISE), on + normal(y - mu - u - SHIFT[1], NOISE)
    )


def elbo(parameters):
    """ELBO in nats of q(mu) q(u | mu): mean, log sd of mu; then per row intercept, slope, log sd."""
    (loc, log_sd), rest = parameters[:2], parameters[2:].reshape(3, N)
    mu = loc + np.exp(log_sd) * NODES
    inner = rest[0][:, None] + rest[1][:, None] * (mu - loc)
    u = inner[..., None] + np.exp(rest[2])[:, None, None] * NODES
    expected = np.einsum("i,j,nij->", WEIGHTS, WEIGHTS, density(mu[None, :, None], u, Y[:, None, None]))
    entropy = (N + 1) * 0.5 * (1 + np.log(2 * np.pi)) + log_sd + rest[2].sum()
    return expected + WEIGHTS @ normal(mu, PRIOR) + entropy


def parameters_of(params):
    """The same of a fitted guide, whose latents are mu and then the rows' own."""
    root = np.asarray(params["auto_scale_tril"], float)
    loc, covariance = np.asarray(params["auto_loc"], float), root @ root.T
    slope = covariance[1:, 0] / covariance[0, 0]
    conditional = covariance[1:, 1:] - np.outer(slope, slope) * covariance[0, 0]
    # Rows are independent given mu.
    np.testing.assert_allclose(conditional, np.diag(np.diag(conditional)), atol=1e-5)
    own = 0.5 * np.log(np.diag(conditional))
    return np.concatenate([[loc[0], 0.5 * np.log(covariance[0, 0])], loc[1:], slope, own])


@functools.cache
def best():
    start = np.concatenate([[0.3, -1.0], np.zeros(N), np.zeros(N), np.full(N, np.log(OWN))])
    found = optimize.minimize(lambda p: -elbo(p), start, method="BFGS", options={"gtol": 1e-4})
    return found.x, -found.fun


@functools.cache
def fitted(mode, cyclic):
    model = rows_indexed if mode == "index" else rows
    schedule = Sequential() if cyclic else Synchronous()
    pvi = PVI(Partition(model, "data", LABELS, mode=mode), AutoMultivariateNormal(model), schedule=schedule)
    state, elbos = pvi.init(KEY, Y), []
    for _ in range(30):
        state, _ = pvi.update(state, Y)
        elbos.append(elbo(parameters_of(pvi.get_params(state))))
    return pvi, state, elbos


def test_the_best_gaussian_is_reached():
    pvi, state, elbos = fitted("args", False)
    wanted, most = best()
    # 64 pairs of draws a round, averaged: in float64 and float32 alike.
    assert most - elbos[-1] < 0.02
    params = pvi.get_params(state)
    assert abs(float(params["auto_loc"][0]) - wanted[0]) < 0.1 * np.exp(wanted[1])
    assert abs(-float(pvi.evaluate(state, Y)) - elbos[-1]) < 0.1
    # The start is nowhere near.
    assert most - elbo(parameters_of(pvi.get_params(pvi.init(KEY, Y)))) > 0.5
    assert pvi.site(state, "a").precision.shape == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "cyclic"), [("mask", False), ("index", False), ("args", True)])
def test_mechanisms_and_schedules_agree(mode, cyclic, tolerance):
    elbos = fitted(mode, cyclic)[2]
    if not cyclic:
        # Draws belong to units, whatever reads them: only rounding differs.
        np.testing.assert_allclose(elbos, fitted("args", False)[2], atol=1e3 * tolerance)
    assert best()[1] - elbos[-1] < 0.02


def test_assignments_follow_by_infer_discrete():
    """NumPyro's own draws of the components, given those of the guide."""
    pvi, state, _ = fitted("args", False)
    params = pvi.get_params(state)
    after = Predictive(rows, guide=pvi.guide, params=params, num_samples=400, infer_discrete=True)
    share = np.asarray(after(jax.random.key(1), Y)["z"]).mean(axis=0)
    (loc, log_sd), rest = parameters_of(params)[:2], parameters_of(params)[2:].reshape(3, N)
    mu = loc + np.exp(log_sd) * NODES
    u = (rest[0][:, None] + rest[1][:, None] * (mu - loc))[..., None] + np.exp(rest[2])[:, None, None] * NODES
    away = Y[:, None, None] - mu[:, None] - u
    odds = u - 0.3 * mu[:, None] + normal(away - SHIFT[1], NOISE) - normal(away - SHIFT[0], NOISE)
    wanted = np.einsum("i,j,nij->n", WEIGHTS, WEIGHTS, 1 / (1 + np.exp(-odds)))
    np.testing.assert_allclose(share, wanted, atol=4 * 0.5 / 400**0.5)


# --------------------------------------------------------------------------------------------------------------- refusals


def nested(y):
    """A continuous latent given a discrete one."""
    mu = numpyro.sample("mu", dist.Normal(0.0, PRIOR))
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        u = numpyro.sample("u", dist.Normal(mu + jnp.asarray(SHIFT)[z], OWN))
        numpyro.sample("obs", dist.Normal(u, NOISE), obs=y)


def test_a_continuous_latent_given_a_discrete_one_is_refused():
    pvi = PVI(Partition(nested, "data", LABELS), AutoMultivariateNormal(nested))
    with pytest.raises(PartitionError, match="'u', a continuous latent, depends on the enumerated"):
        pvi.init(KEY, Y)


@pytest.mark.slow
def test_a_wrong_sum_is_still_refused(monkeypatch):
    """The planted fault: a sum that is not NumPyro's is seen beside continuous local latents too."""
    right = enumeration.site_log_prob

    def wrong(site, *rest):
        return right(site, *rest) * (0.9 if isinstance(site["fn"], enumeration.EnumeratedRows) else 1.0)

    monkeypatch.setattr(enumeration, "site_log_prob", wrong)
    with pytest.raises(PartitionError, match="differs from NumPyro's own enumeration"):
        PVI(Partition(rows, "data", LABELS), AutoMultivariateNormal(rows)).init(KEY, Y)
