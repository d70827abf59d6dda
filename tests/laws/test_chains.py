"""Laws of Gaussian chains as latents: exact where the observations are Gaussian, else the optimum that a dense Gaussian has."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.families import MarkovNatural
from numpyro_pvi.families._pairs import ChainPairs
from numpyro_pvi.solvers import Conjugate, NaturalGradient

STEPS, SCALE, NOISE = 12, 0.4, 0.7
KEY = jax.random.key(0)
RNG = np.random.default_rng(3)
REAL = np.cumsum(RNG.normal(0, SCALE, STEPS)) + NOISE * RNG.normal(size=STEPS)
COUNTS = RNG.poisson(np.exp(1 + np.sin(np.arange(STEPS) / 2)))
LABELS = (RNG.random(STEPS) < 0.6).astype(int)
THIRDS = np.arange(STEPS) // 4

WALK = np.tril(np.ones((STEPS, STEPS)))
COVARIANCE = SCALE**2 * WALK @ WALK.T


def walk(law):
    """A random walk, observed at every time."""

    def model(steps, y=None):
        x = numpyro.sample("x", dist.GaussianRandomWalk(SCALE, steps))
        with numpyro.plate("time", steps) as t:
            numpyro.sample("y", law(x[t]), obs=None if y is None else y[t])

    return model


def fit(model, y, rounds, solver=None, groups=THIRDS):
    pvi = PVI(Partition(model, "time", groups), AutoExponentialFamily(model), solver=solver)
    return pvi, pvi.run(KEY, rounds, STEPS, jnp.asarray(y), progress_bar=False)


@pytest.fixture
def tolerance(x64):
    return 1e-9 if x64 else 1e-4


def gaussian_oracle(y):
    """Mean and covariance of the states, and the log evidence, by dense algebra."""
    total = COVARIANCE + NOISE**2 * np.eye(STEPS)
    gain = COVARIANCE @ np.linalg.inv(total)
    evidence = -0.5 * (y @ np.linalg.solve(total, y) + np.linalg.slogdet(2 * np.pi * total)[1])
    return gain @ y, COVARIANCE - gain @ COVARIANCE, evidence


@pytest.mark.parametrize(
    "solver",
    [NaturalGradient(), pytest.param(Conjugate(), marks=pytest.mark.slow)],
    ids=["natural", "conjugate"],
)
def test_gaussian_observations_are_smoothed_exactly_in_one_round(solver, tolerance):
    pvi, result = fit(walk(lambda x: dist.Normal(x, NOISE)), REAL, 1, solver)
    mean, covariance, evidence = gaussian_oracle(REAL)
    q = pvi.posterior(result.state)["x"]
    np.testing.assert_allclose(q.mean, mean, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(q.variance, np.diag(covariance), rtol=tolerance)
    assert -result.losses[-1] == pytest.approx(evidence, rel=tolerance)
    assert set(pvi.info(result.state).expectation) == {"closed form"}


@pytest.mark.slow
def test_states_that_are_vectors_are_smoothed_exactly(tolerance):
    """A level and its slope, of which the level is seen."""
    transition, tril = np.array([[1.0, 1.0], [0.0, 0.9]]), np.array([[0.3, 0.0], [0.1, 0.2]])
    seen = jnp.array([1.0, -0.5])

    def model(steps, y=None):
        law = dist.GaussianStateSpace(steps, jnp.asarray(transition), scale_tril=jnp.asarray(tril))
        x = numpyro.sample("x", law)
        with numpyro.plate("time", steps) as t:
            numpyro.sample("y", dist.Normal(x[t] @ seen, NOISE), obs=None if y is None else y[t])

    pvi, result = fit(model, REAL, 1)
    # x_t = sum_s A^(t - s) L e_s, dense.
    power = [np.linalg.matrix_power(transition, k) @ tril for k in range(STEPS)]
    root = np.block([[power[t - s] if s <= t else np.zeros((2, 2)) for s in range(STEPS)] for t in range(STEPS)])
    prior, design = root @ root.T, np.kron(np.eye(STEPS), np.asarray(seen))
    total = design @ prior @ design.T + NOISE**2 * np.eye(STEPS)
    gain = prior @ design.T @ np.linalg.inv(total)
    q = pvi.posterior(result.state)["x"]
    np.testing.assert_allclose(q.mean.reshape(-1), gain @ REAL, rtol=10 * tolerance, atol=tolerance)
    np.testing.assert_allclose(q.variance.reshape(-1), np.diag(prior - gain @ design @ prior), rtol=10 * tolerance)


def dense_optimum(y, expected, rounds=300):
    """The best Gaussian over all states at once, by natural-gradient steps on dense matrices.

    ``expected(y, m, v)`` gives the sum of E log p and its derivatives in every marginal's mean and variance.
    """
    prior = np.linalg.inv(COVARIANCE)
    vector, diagonal = np.zeros(STEPS), np.ones(STEPS)
    for _ in range(rounds):
        covariance = np.linalg.inv(prior + np.diag(diagonal))
        mean = covariance @ vector
        value, slope, bend = expected(y, mean, np.diag(covariance))
        vector += 0.5 * (slope - 2 * bend * mean - vector)
        diagonal += 0.5 * (-2 * bend - diagonal)
    quadratic = np.trace(prior @ covariance) + mean @ prior @ mean
    gap = 0.5 * (quadratic - STEPS - np.linalg.slogdet(prior)[1] - np.linalg.slogdet(covariance)[1])
    return mean, np.diag(covariance), value - gap


def poisson(y, m, v):
    rate = np.exp(m + v / 2)
    factorials = np.array([np.sum(np.log(np.arange(1, k + 1))) for k in y])
    return np.sum(y * m - rate - factorials), y - rate, -rate / 2


def bernoulli(y, m, v):
    """By a fine grid of each marginal."""
    z = np.linspace(-9, 9, 4001)[:, None]
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()
    x = m + np.sqrt(v) * z
    p = 1 / (1 + np.exp(-x))
    value = np.sum(weight * (y * x - np.logaddexp(0, x)))
    return value, np.sum(weight * (y - p), 0), -0.5 * np.sum(weight * p * (1 - p), 0)


CASES = {
    "poisson": (lambda x: dist.Poisson(jnp.exp(x)), COUNTS, poisson),
    "bernoulli": (lambda x: dist.Bernoulli(logits=x), LABELS, bernoulli),
}


@pytest.fixture(scope="module")
def fits():
    return {}


def fitted(fits, name):
    if name not in fits:
        law, y, _ = CASES[name]
        fits[name] = fit(walk(law), y, 25)
    return fits[name]


@pytest.mark.parametrize("name", ["poisson", pytest.param("bernoulli", marks=pytest.mark.slow)])
def test_other_observations_reach_the_dense_optimum(fits, name, tolerance):
    pvi, result = fitted(fits, name)
    mean, variance, elbo = dense_optimum(CASES[name][1], CASES[name][2])
    q = pvi.posterior(result.state)["x"]
    np.testing.assert_allclose(q.mean, mean, atol=100 * tolerance * np.sqrt(variance.max()))
    np.testing.assert_allclose(q.variance, variance, rtol=100 * tolerance)
    assert -result.losses[-1] == pytest.approx(elbo, abs=100 * tolerance)
    assert set(pvi.info(result.state).expectation) == {"quadrature in x"}
    # Draws have the marginals, as the guide's own users see them.
    drawn = pvi.guide.sample_posterior(KEY, pvi.get_params(result.state), sample_shape=(4000,))["x"]
    np.testing.assert_allclose(drawn.mean(0), mean, atol=6 * np.sqrt(variance.max() / 4000))


def test_the_sum_of_prior_and_sites_is_q(fits):
    """Law 1, and sites have terms within states alone."""
    _, result = fitted(fits, "poisson")
    sites = result.state.sites.groups.parts["x"]
    np.testing.assert_array_equal(sites.lower, 0.0)
    own = np.asarray(sites.precision)[:, :, 0, 0]
    np.testing.assert_array_equal(own > 0, np.arange(3)[:, None] == THIRDS)


def test_expectations_that_are_insisted_on():
    model = walk(CASES["poisson"][0])
    with pytest.raises(PVIError, match="exact expectation"):
        fit(model, COUNTS, 1, NaturalGradient(expectation="exact"))

    def coupled(steps, y=None):
        x = numpyro.sample("x", dist.GaussianRandomWalk(SCALE, steps))
        with numpyro.plate("time", steps) as t:
            numpyro.sample("y", dist.Normal(x[t] * x[t - 1], NOISE), obs=None if y is None else y[t])

    with pytest.raises(PVIError, match="no term sees two members"):
        fit(coupled, REAL, 1, NaturalGradient(expectation="quadrature"))


@pytest.mark.slow
def test_planted_fault_a_message_without_the_location(monkeypatch):
    right = ChainPairs.message

    def wrong(self, coordinates, gradient):
        found = right(self, coordinates, gradient)
        return MarkovNatural(gradient.loc[..., None], found.precision, found.lower)

    monkeypatch.setattr(ChainPairs, "message", wrong)
    pvi, result = fit(walk(CASES["poisson"][0]), COUNTS, 25)
    mean, _, _ = dense_optimum(COUNTS, poisson)
    assert np.abs(pvi.posterior(result.state)["x"].mean - mean).max() > 1e-2
