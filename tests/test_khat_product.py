"""k-hat where q is a product of families: which weights it gets, and what it says of a q that is exact or too narrow."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, ImproperError, Partition, PVIError
from numpyro_pvi.diagnostics import pareto_khat, product_group_weights, product_weights
from numpyro_pvi.families import BetaNatural, CategoricalFamily, GammaNatural, ProductNatural
from numpyro_pvi.sites import posterior
from numpyro_pvi.solvers import StochasticEP

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
COUNTS, HEADS = RNG.poisson(3.0, 12), RNG.integers(0, 2, 12)
CLOSE = {"float32": 2e-3, "float64": 1e-9}[jnp.result_type(float).name]


def counts_and_heads(counts, heads):
    """A rate and a chance, both conjugate."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate), obs=counts)
        numpyro.sample("head", dist.Bernoulli(p), obs=heads)


DATA = jnp.asarray(COUNTS), jnp.asarray(HEADS)


@functools.cache
def fitted():
    """A state whose q is the posterior: one site has all that the rows say."""
    pvi = PVI(Partition(counts_and_heads, "data", 1), AutoExponentialFamily(counts_and_heads))
    state = pvi.init(KEY, *DATA)
    ones = HEADS.sum()
    said = {
        "rate": GammaNatural(jnp.array([1.0 * COUNTS.sum()]), jnp.array([12.0])),
        "p": BetaNatural(jnp.array([1.0 * ones]), jnp.array([12.0 - ones])),
    }
    return pvi, dataclasses.replace(state, sites=dataclasses.replace(state.sites, groups=ProductNatural(said)))


def with_rate(state, concentration, rate):
    """A q whose gamma is another one."""
    site = GammaNatural(jnp.asarray(concentration - 1.0), jnp.asarray(rate))
    q = posterior(state.prior, state.sites)
    return ProductNatural(q.parts | {"rate": site})


def weights(q, num_samples):
    pvi, state = fitted()
    return np.asarray(product_weights(KEY, pvi.model, state.plan, q, DATA, {}, num_samples))


def test_weights_are_densities_over_densities():
    """With scipy's densities, at the same draws."""
    _, state = fitted()
    q = with_rate(state, 20.0, 7.0)
    draws = {n: np.asarray(x, float) for n, x in state.plan.family.sample(q, KEY, (40,)).items()}
    rate, p = draws["rate"], draws["p"]
    joint = stats.gamma.logpdf(rate, 2.0, scale=2.0) + stats.beta.logpdf(p, 2.0, 3.0)
    joint = (
        joint + stats.poisson.logpmf(COUNTS[:, None], rate).sum(0) + stats.bernoulli.logpmf(HEADS[:, None], p).sum(0)
    )
    log_q = stats.gamma.logpdf(rate, 20.0, scale=1 / 7.0)
    log_q = log_q + stats.beta.logpdf(p, 2.0 + HEADS.sum(), 15.0 - HEADS.sum())
    expected = joint - log_q
    np.testing.assert_allclose(weights(q, 40), expected - expected[0], atol=CLOSE)


def test_an_exact_q_has_equal_weights():
    pvi, state = fitted()
    found = pvi.khat(state, *DATA, rng_key=KEY, num_samples=200)
    assert found == 0.0 if CLOSE < 1e-6 else found < 0.3


@pytest.mark.parametrize("narrower", [2.0, 4.0])
def test_a_rate_that_is_too_high_has_pareto_weights(narrower):
    """Weights are ``exp((b_q - b) theta)`` of gammas of concentration 1 and rate b_q: exactly Pareto, of shape 1 - b / b_q."""
    exact = 2.0 + COUNTS.sum(), 12.5
    _, state = fitted()
    state = with_rate(state, 1.0, narrower * exact[1])
    found = weights(state, 20_000)
    theta = np.asarray(fitted()[1].plan.family.sample(state, KEY, (20_000,))["rate"], float)
    # The posterior's concentration would add a power of theta, which is taken off here.
    found = found - (exact[0] - 1.0) * (np.log(theta) - np.log(theta[0]))
    # The shape is fitted to 424 weights, with a standard error of (1 + k) / 424^(1/2); three of them, from either side.
    shape = 1 - 1 / narrower
    assert pareto_khat(found, 1e-6) == pytest.approx(shape, abs=3 * (1 + shape) / 424**0.5)


def mixture(x):
    """Normal means in one block, and responsibilities: a block, discrete and rows' own latents at once."""
    a = numpyro.sample("a", dist.Normal(-3.0, 1.0))
    b = numpyro.sample("b", dist.Normal(3.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.5])))
        numpyro.sample("x", dist.Normal(jnp.where(z == 0, a, b), 1.0), obs=x)


@functools.cache
def by_thirds():
    """The same rows in three groups, each with what its own rows say but the second, whose site is four times too narrow."""
    pvi = PVI(Partition(counts_and_heads, "data", np.arange(12) // 4), AutoExponentialFamily(counts_and_heads))
    state = pvi.init(KEY, *DATA)
    counts, ones = COUNTS.reshape(3, 4).sum(1) * 1.0, HEADS.reshape(3, 4).sum(1) * 1.0
    said = {
        "rate": GammaNatural(jnp.asarray(counts)[:, None], jnp.array([4.0, 16.0, 4.0])[:, None]),
        "p": BetaNatural(jnp.asarray(ones)[:, None], jnp.asarray(4.0 - ones)[:, None]),
    }
    said = jax.tree.map(lambda x, like: x.reshape(like.shape), ProductNatural(said), state.sites.groups)
    return pvi, dataclasses.replace(state, sites=dataclasses.replace(state.sites, groups=said))


def test_the_group_whose_site_is_off_is_the_one_that_is_told():
    """At draws from q an exact site has equal weights; ``exp((b_m - 4) theta)`` are those of a site of rate b_m."""
    pvi, state = by_thirds()
    found = pvi.khat(state, *DATA, rng_key=KEY, num_samples=200, by_group=True)
    assert list(found) == [0, 1, 2]
    own = np.asarray(product_group_weights(KEY, pvi._engine, state, DATA, {}, 50), float)
    theta = np.asarray(state.plan.family.sample(posterior(state.prior, state.sites), KEY, (50,))["rate"], float)
    np.testing.assert_allclose(own[:, 1], 12.0 * (theta - theta[0]).reshape(-1), rtol=CLOSE, atol=100 * CLOSE)
    # Equal up to rounding in the precision that they were computed in.
    assert found[1] != 0.0 and found[0] == found[2] == 0.0
    assert np.abs(own[:, [0, 2]]).max() < 100 * CLOSE


def test_weights_of_factors_add_up_to_those_of_q():
    pvi, state = by_thirds()
    q = posterior(state.prior, state.sites)
    whole = product_weights(KEY, pvi.model, state.plan, q, DATA, {}, 50)
    own = product_group_weights(KEY, pvi._engine, state, DATA, {}, 50)
    np.testing.assert_allclose(own.sum(1), whole, rtol=100 * CLOSE, atol=100 * CLOSE)
    # A dropped group is seen.
    assert np.abs(own[:, [0, 2]].sum(1) - whole).max() > 1.0


def test_a_site_that_all_groups_share_counts_once_for_each():
    pvi = PVI(
        Partition(counts_and_heads, "data", np.arange(12) // 4),
        AutoExponentialFamily(counts_and_heads),
        solver=StochasticEP(),
    )
    state = pvi.run(KEY, 1, *DATA, progress_bar=False).state
    whole = product_weights(KEY, pvi.model, state.plan, posterior(state.prior, state.sites), DATA, {}, 50)
    own = product_group_weights(KEY, pvi._engine, state, DATA, {}, 50)
    assert own.shape == (50, 3)
    np.testing.assert_allclose(own.sum(1), whole, atol=1000 * CLOSE)


@pytest.fixture(scope="module")
def rows_of_their_own():
    """Means under a prior whose precision is a latent, and every row's component: a prior factor, and members by row."""

    def model(x):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        a = numpyro.sample("a", dist.Normal(jnp.array([-3.0, 3.0]), 1 / jnp.sqrt(tau)).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            z = numpyro.sample("z", dist.Categorical(jnp.array([0.4, 0.6])))
            numpyro.sample("x", dist.Normal(a[z], 1.0), obs=x)

    x = jnp.asarray(np.concatenate([RNG.normal(-3, 1, 6), RNG.normal(3, 1, 6)]))
    pvi = PVI(Partition(model, "data", np.arange(12) % 3), AutoExponentialFamily(model, {"z": CategoricalFamily(2)}))
    return pvi, pvi.run(KEY, 3, x, progress_bar=False).state, x


def test_rows_own_latents_and_the_prior_factor_add_up_as_well(rows_of_their_own):
    pvi, state, x = rows_of_their_own
    q = posterior(state.prior, state.sites)
    whole = product_weights(KEY, pvi.model, state.plan, q, (x,), {}, 50)
    own = product_group_weights(KEY, pvi._engine, state, (x,), {}, 50)
    assert own.shape == (50, 4)
    np.testing.assert_allclose(own.sum(1), whole, rtol=1000 * CLOSE, atol=1000 * CLOSE)
    found = pvi.khat(state, x, rng_key=KEY, num_samples=200, by_group=True)
    assert list(found) == [PRIOR, 0, 1, 2] and all(np.isfinite(list(found.values())))


@pytest.mark.slow
def test_blocks_and_discrete_rows_are_drawn_too():
    x = np.concatenate([RNG.normal(-3, 1, 6), RNG.normal(3, 1, 6)])
    guide = AutoExponentialFamily(mixture, families={"z": CategoricalFamily(2)}, joint=[("a", "b")])
    pvi = PVI(Partition(mixture, "data", 2), guide)
    state = pvi.run(KEY, 20, jnp.asarray(x), progress_bar=False).state
    q = posterior(state.prior, state.sites)
    found = product_weights(KEY, pvi.model, state.plan, q, (jnp.asarray(x),), {}, 30)
    draws = state.plan.family.sample(q, KEY, (30,))
    means, z = np.asarray(draws["a+b"], float), np.asarray(draws["z"])
    own = pvi.posterior(state, joint=True)
    joint = stats.norm.logpdf(means, [-3.0, 3.0], 1.0).sum(1) + 12 * np.log(0.5)
    joint = joint + stats.norm.logpdf(x, np.take_along_axis(means, z, axis=1), 1.0).sum(1)
    log_q = stats.multivariate_normal.logpdf(
        means, *map(np.asarray, (own["a", "b"].mean, own["a", "b"].covariance_matrix))
    )
    log_q = log_q + np.log(np.asarray(own["z"].probs)[np.arange(12), z]).sum(1)
    expected = joint - log_q
    np.testing.assert_allclose(found, expected - expected[0], atol=1e-6)
    assert pvi.khat(state, jnp.asarray(x), rng_key=KEY, num_samples=200) < 0.7


def test_what_cannot_be_judged_is_refused():
    pvi, state = fitted()
    with pytest.raises(PVIError, match="at least 100 draws"):
        pvi.khat(state, *DATA, rng_key=KEY, num_samples=50)
    broken = dataclasses.replace(state, sites=state.sites * -2.0)
    with pytest.raises(ImproperError, match="cannot be drawn from"), warnings.catch_warnings():
        pvi.khat(broken, *DATA, rng_key=KEY)
