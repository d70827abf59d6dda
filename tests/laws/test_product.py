"""Laws 1, 2 and 6 where q is a product of families, and rounds that are textbook coordinate ascent, iterate by iterate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import GammaNatural, ProductNatural
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.sites import posterior
from numpyro_pvi.solvers import Conjugate, NaturalGradient

KEY = jax.random.key(0)
DEFAULT = NaturalGradient()
# Rounding of a few hundred operations.
TIGHT = {"float32": 2e-4, "float64": 1e-9}[jnp.result_type(float).name]
RNG = np.random.default_rng(0)
COUNTY = np.arange(12) % 3
COUNTS, HEADS, FACES = RNG.poisson(3, 12), RNG.integers(0, 2, 12), RNG.integers(0, 4, 12)
GROUPS = ["a"] * 5 + ["b"] * 3 + ["c"] * 4


def several(county, counts, heads, faces):
    """Gamma-Poisson by county, Beta-Bernoulli and Dirichlet-Categorical at once."""
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    faces_p = numpyro.sample("faces_p", dist.Dirichlet(jnp.ones(4)))
    with numpyro.plate("counties", 3):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate[county]), obs=counts)
        numpyro.sample("head", dist.Bernoulli(p), obs=heads)
        numpyro.sample("face", dist.Categorical(faces_p), obs=faces)


DATA = tuple(map(jnp.asarray, (COUNTY, COUNTS, HEADS, FACES)))


def closed_form(rows=slice(None)):
    """Naturals that the rows add to the prior, written by hand."""
    county, counts, heads, faces = COUNTY[rows], COUNTS[rows], HEADS[rows], FACES[rows]
    return {
        "rate": ([counts[county == k].sum() for k in range(3)], np.bincount(county, minlength=3)),
        "p": (heads.sum(), (1 - heads).sum()),
        "faces_p": (np.bincount(faces, minlength=4),),
    }


def log_evidence():
    found = special.betaln(2 + HEADS.sum(), 3 + (1 - HEADS).sum()) - special.betaln(2, 3)
    for k in range(3):
        y = COUNTS[k == COUNTY]
        a, b = 2 + y.sum(), 0.5 + len(y)
        found += (
            2 * np.log(0.5) - special.gammaln(2) + special.gammaln(a) - a * np.log(b) - special.gammaln(y + 1).sum()
        )
    faces = np.bincount(FACES, minlength=4)
    return found + special.gammaln(4) - special.gammaln(16) + special.gammaln(1 + faces).sum()


def leaves(part):
    return [np.asarray(x) for x in jax.tree.leaves(part)]


def sites_are(state, share=1.0):
    """Law 2: every group's site is the closed form of its rows."""
    for i, label in enumerate(state.groups):
        wanted = closed_form(np.array([g == label for g in GROUPS]))
        for name, part in state.sites.groups.parts.items():
            for got, want in zip(leaves(part), wanted[name], strict=True):
                np.testing.assert_allclose(got[i], share * np.asarray(want), rtol=TIGHT, atol=TIGHT)


def sums_are(state, params):
    """Law 1: prior and sites, summed by hand, are what the guide's params say."""
    for name, fields in (("rate", ("concentration", "rate")), ("p", ("concentration1", "concentration0"))):
        prior, groups = leaves(state.prior.parts[name]), leaves(state.sites.groups.parts[name])
        for field, own, each, shift in zip(fields, prior, groups, (1.0, 0.0 if name == "rate" else 1.0), strict=True):
            found = np.asarray(params[f"{name}_auto_{field}"])
            np.testing.assert_allclose(found, own + each.sum(axis=0) + shift, rtol=TIGHT)


@functools.cache
def begun():
    """One start for every schedule and solver: what is found about the model is the same."""
    pvi = PVI(Partition(several, "data", GROUPS), AutoExponentialFamily(several))
    return pvi, pvi.init(KEY, *DATA)


@functools.cache
def fitted(schedule, solver=DEFAULT):
    first, start = begun()
    pvi = PVI(first.partition, first.guide, solver=solver, schedule=schedule)
    # What schedules remember is their own.
    fields = pvi._engine.unvisited(start, start.report.move.dtype, None, DATA)
    start = dataclasses.replace(start, **fields)
    return pvi, start, *pvi.update(start, *DATA)


@pytest.mark.parametrize(
    ("schedule", "solver"),
    [
        (Synchronous(), DEFAULT),
        (Sequential(), DEFAULT),
        pytest.param(Synchronous(), Conjugate(), marks=pytest.mark.slow),
        pytest.param(Sequential("random"), Conjugate(), marks=pytest.mark.slow),
    ],
    ids=["synchronous", "sequential", "conjugate", "conjugate-random"],
)
def test_conjugate_models_are_exact_after_one_round(schedule, solver):
    pvi, start, state, loss = fitted(schedule, solver)
    sites_are(state)
    sums_are(state, pvi.get_params(state))
    sums_are(start, pvi.get_params(start))
    np.testing.assert_allclose(-loss, log_evidence(), rtol=TIGHT)
    assert np.all(pvi.info(state).step == 1.0)
    assert pvi.info(state).structure[0] == "conjugate in faces_p, p, rate"


def test_damped_sites_close_in_geometrically():
    first, state = begun()
    damped = PVI(first.partition, first.guide, schedule=Synchronous(damping=0.25))
    for rounds in (1, 2, 3):
        state, _ = damped.update(state, *DATA)
        sites_are(state, 1 - 0.75**rounds)
        sums_are(state, damped.get_params(state))


def accounting(pvi, state, expected):
    """Law 6: ``sum_m (E log f_m - <eta_m, mu>) + A(eta_q) - A(eta_0)``, with E log f_m from the outside."""
    family, q = state.plan.family, posterior(state.prior, state.sites)
    mean = family.natural_to_mean(q)
    paired = sum(float(family.inner(jax.tree.map(lambda x, i=i: x[i], state.sites.groups), mean)) for i in range(3))
    return expected - paired + float(family.log_partition(q) - family.log_partition(state.prior))


def expected_log_likelihood(params):
    a, b = np.asarray(params["rate_auto_concentration"]), np.asarray(params["rate_auto_rate"])
    log_rate, rate = special.digamma(a) - np.log(b), a / b
    found = (COUNTS * log_rate[COUNTY] - rate[COUNTY] - special.gammaln(COUNTS + 1)).sum()
    one, zero = float(params["p_auto_concentration1"]), float(params["p_auto_concentration0"])
    total = special.digamma(one + zero)
    found += (np.where(HEADS, special.digamma(one), special.digamma(zero)) - total).sum()
    c = np.asarray(params["faces_p_auto_concentration"])
    return found + (special.digamma(c) - special.digamma(c.sum()))[FACES].sum()


def test_the_accounting_identity_holds_away_from_the_optimum():
    pvi, start = begun()
    params = {"rate_auto_rate": jnp.array([0.7, 2.0, 3.0]), "p_auto_concentration1": 0.3}
    state = pvi._fit.at_params(pvi, start, params)
    own = pvi.get_params(state)
    np.testing.assert_allclose(own["rate_auto_rate"], params["rate_auto_rate"], rtol=TIGHT)
    elbo = -float(pvi.evaluate(state, *DATA))
    np.testing.assert_allclose(elbo, accounting(pvi, state, expected_log_likelihood(own)), rtol=10 * TIGHT)
    assert elbo < log_evidence()


# ------------------------------------------------------------------------------------------------ coordinate ascent

Y = RNG.normal(size=12) + 1.0
X = RNG.normal(size=12)


def line(x, y):
    """Linear regression with unknown noise, mean-field over intercept, slope and precision; the noise has a wide prior."""
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.Gamma(1e-3, 1e-3))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a + b * x, 1 / jnp.sqrt(tau)), obs=y)


def textbook_line(rounds):
    """Coordinate ascent as in Bishop, section 10.1.3: a, b, tau in turn."""
    (mean_a, var_a), (mean_b, var_b), tau = (0.0, 9.0), (0.0, 4.0), 1.0
    for _ in range(rounds):
        var_a = 1 / (1 / 9 + 12 * tau)
        mean_a = var_a * tau * (Y - mean_b * X).sum()
        var_b = 1 / (1 / 4 + tau * (X**2).sum())
        mean_b = var_b * tau * (X * (Y - mean_a)).sum()
        square = ((Y - mean_a - mean_b * X) ** 2).sum() + 12 * var_a + (X**2).sum() * var_b
        concentration, rate = 1e-3 + 6, 1e-3 + 0.5 * square
        tau = concentration / rate
        yield mean_a, var_a**0.5, mean_b, var_b**0.5, concentration, rate


def line_params(params):
    return [float(params[f"{n}"]) for n in LINE]


LINE = ("a_auto_loc", "a_auto_scale", "b_auto_loc", "b_auto_scale", "tau_auto_concentration", "tau_auto_rate")


def test_parallel_sites_and_latents_in_turn_are_coordinate_ascent():
    x, y = jnp.asarray(X), jnp.asarray(Y)
    pvi = PVI(Partition(line, "data", [0, 1] * 6), AutoExponentialFamily(line))
    state, losses = pvi.init(KEY, x, y), []
    for wanted in textbook_line(4):
        state, loss = pvi.update(state, x, y)
        losses.append(float(loss))
        np.testing.assert_allclose(line_params(pvi.get_params(state)), wanted, rtol=20 * TIGHT)
    assert losses == sorted(losses, reverse=True)


def grouped(unit, counts):
    """A hierarchical prior: the rates' own rate is a latent, so the prior is a factor."""
    b = numpyro.sample("b", dist.Gamma(1.5, 0.7))
    with numpyro.plate("units", 4):
        rate = numpyro.sample("rate", dist.Gamma(2.0, b))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate[unit]), obs=counts)


def textbook_grouped(start, rounds, parallel):
    """Coordinate ascent (b, then all rates), or all latents from the same q; b starts at its prior, the rates at ``start``."""
    unit = np.arange(12) % 4
    a, n = 2 + np.bincount(unit, COUNTS), np.bincount(unit)
    mean_rate = start
    b = 1.5 / 0.7
    for _ in range(rounds):
        old = b
        c, d = 1.5 + 8, 0.7 + mean_rate.sum()
        b = c / d
        rate = n + (old if parallel else b)
        mean_rate = a / rate
        yield c, d, a, rate


@pytest.mark.parametrize("blocks", ["auto", pytest.param("parallel", marks=pytest.mark.slow)])
def test_hierarchical_priors_are_factors_of_their_own(blocks):
    unit, counts = jnp.arange(12) % 4, DATA[1]
    solver = NaturalGradient(blocks=blocks)
    pvi = PVI(Partition(grouped, "data", [0, 1, 1] * 4), AutoExponentialFamily(grouped), solver=solver)
    state = pvi.init(KEY, unit, counts)
    first = pvi.posterior(state)["rate"].mean
    for c, d, a, rate in textbook_grouped(np.asarray(first), 3, blocks == "parallel"):
        state, _ = pvi.update(state, unit, counts)
        found = pvi.get_params(state)
        np.testing.assert_allclose(found["b_auto_concentration"], c, rtol=TIGHT)
        np.testing.assert_allclose(found["b_auto_rate"], d, rtol=TIGHT)
        np.testing.assert_allclose(found["rate_auto_concentration"], a, rtol=TIGHT)
        np.testing.assert_allclose(found["rate_auto_rate"], rate, rtol=TIGHT)
    # The groups' rows speak of the rates alone, exactly; the prior factor of both.
    assert pvi.info(state).structure == ("conjugate in b, rate", "conjugate in rate", "conjugate in rate")
    prior = pvi.site(state, PRIOR).natural.parts["rate"]
    np.testing.assert_allclose(prior.log, 1.0, rtol=TIGHT)


# ------------------------------------------------------------------------------------------------------------ mutants


def _negated(part):
    return jax.tree.map(jnp.negative, part)


def _without_first(part):
    return jax.tree.map(lambda x: x.at[0].set(0.0), part)


def _undamped_twice(part):
    return jax.tree.map(lambda x: 2 * x, part)


@pytest.mark.parametrize("fault", [_negated, _without_first, _undamped_twice])
def test_law_2_sees_planted_faults(fault):
    """Wrong sign, dropped group, missing damping: what each does to the sites is what the law must catch."""
    _, _, state, _ = fitted(Synchronous())
    broken = dataclasses.replace(state.sites, groups=fault(state.sites.groups))
    with pytest.raises(AssertionError):
        sites_are(dataclasses.replace(state, sites=broken))


def test_law_1_sees_a_site_that_is_not_counted():
    pvi, _, state, _ = fitted(Synchronous())
    params = pvi.get_params(state)
    params["rate_auto_concentration"] = params["rate_auto_concentration"] - np.array([0.0, 0.0, 0.01])
    with pytest.raises(AssertionError):
        sums_are(state, params)


@pytest.mark.once
def test_the_identity_sees_a_prior_that_is_counted_twice():
    pvi, _, state, loss = fitted(Synchronous())
    elbo = accounting(pvi, state, expected_log_likelihood(pvi.get_params(state)))
    np.testing.assert_allclose(elbo, -float(loss), rtol=10 * TIGHT)
    twice = ProductNatural({n: x + x if isinstance(x, GammaNatural) else x for n, x in state.prior.parts.items()})
    broken = accounting(pvi, dataclasses.replace(state, prior=twice), expected_log_likelihood(pvi.get_params(state)))
    assert abs(broken + float(loss)) > 0.1
