"""Models as textbooks and NumPyro's pages write them, with small simulated data: what a person with an SVI program brings.

Each is a plain NumPyro model with its arguments. Nothing in them was written with groups in mind: some have one plate, some
several or none, some size plates by numbers or by values, scan, or couple their rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

_RNG = np.random.default_rng(7)
_N = 30
_X = _RNG.normal(size=(_N, 2))
_LINE = _X @ np.array([1.0, -0.5])
_NORMAL = _LINE + 0.5 * _RNG.normal(size=_N)
_BINARY = (_RNG.random(_N) < 1 / (1 + np.exp(-2 * _LINE))).astype(int)
_COUNTS = _RNG.poisson(np.exp(0.5 + 0.5 * _LINE))
_GROUP = np.repeat(np.arange(6), 5)
_EFFECT = _RNG.normal(size=6)
_GROUPED = _LINE + _EFFECT[_GROUP] + 0.5 * _RNG.normal(size=_N)
_WALK = np.cumsum(0.5 * _RNG.normal(size=_N))
_SERIES = _WALK + 0.3 * _RNG.normal(size=_N)


class Subject(NamedTuple):
    """A model with its arguments, and whether q has full covariance."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    full: bool = True


def linear(X, y):
    """Regression in a plate of the arguments' size."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, sigma), obs=y)


def linear_without_plate(X, y):
    """The same without a plate."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    numpyro.sample("obs", dist.Normal(a + X @ w, sigma), obs=y)


def logistic(X, y):
    """Logistic regression without a plate."""
    w = numpyro.sample("w", dist.Normal(jnp.zeros(X.shape[1]), jnp.ones(X.shape[1])))
    numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def poisson(X, y):
    """Poisson regression."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Poisson(jnp.exp(a + X @ w)), obs=y)


def robust(X, y):
    """Student-t errors."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.StudentT(4.0, X @ w, sigma), obs=y)


def negative_binomial(X, y):
    """Overdispersed counts."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    shape = numpyro.sample("shape", dist.Exponential(0.5))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.NegativeBinomial2(jnp.exp(X @ w), shape), obs=y)


def softmax(X, y):
    """Three classes."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1], 3]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Categorical(logits=X @ w), obs=y)


def eight_schools(J, sigma, y):
    """The centred hierarchy, its plate sized by a number."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.LogNormal(1.0, 1.0))
    with numpyro.plate("J", J):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def eight_schools_decentred(J, sigma, y):
    """The same under a reparametrisation."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.LogNormal(1.0, 1.0))
    with numpyro.plate("J", J):
        with reparam(config={"theta": LocScaleReparam(0)}):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def varying_intercepts(index, x, y):
    """Groups counted by their distinct values."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("groups", len(np.unique(index))):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("data", len(index)):
        numpyro.sample("obs", dist.Normal(a[index] + slope * x, 0.5), obs=y)


def varying_slopes(index, x, y):
    """Groups counted by the largest index, correlated effects."""
    with numpyro.plate("groups", int(np.max(index)) + 1):
        effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2) + 0.3))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.sample("obs", dist.Normal(effect[index, 0] + effect[index, 1] * x, sigma), obs=y)


def seeds(index, n, y):
    """Binomial counts with random effects, all inside the plate of trials."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("plates", len(y)):
        b = numpyro.sample("b", dist.Normal(0, tau))
        numpyro.sample("obs", dist.Binomial(n, logits=a + 0.5 * index + b), obs=y)


def batting(hits, at_bats):
    """Beta-binomial averages of players."""
    m = numpyro.sample("m", dist.Uniform(0, 1))
    kappa = numpyro.sample("kappa", dist.LogNormal(2.0, 0.5))
    with numpyro.plate("players", at_bats.shape[0]):
        phi = numpyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
        numpyro.sample("obs", dist.Binomial(at_bats, probs=phi), obs=hits)


def separate_means(y):
    """Every latent is inside the plate."""
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 2))
        numpyro.sample("obs", dist.Normal(z, 1.0), obs=y)


def local_level(y):
    """A random walk by `scan`."""
    drift = numpyro.sample("drift", dist.LogNormal(-1, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5))

    def step(level, value):
        level = numpyro.sample("level", dist.Normal(level, drift))
        numpyro.sample("obs", dist.Normal(level, noise), obs=value)
        return level, None

    scan(step, jnp.zeros(()), y)


def autoregression(y):
    """AR(2) by `scan` over the observations."""
    c = numpyro.sample("c", dist.Normal(0, 1))
    a = numpyro.sample("a", dist.Normal(0, 0.5).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))

    def step(carry, value):
        numpyro.sample("obs", dist.Normal(c + a[0] * carry[0] + a[1] * carry[1], sigma), obs=value)
        return (value, carry[0]), None

    scan(step, (y[1], y[0]), y[2:])


def random_walk(y):
    """A walk as one joint distribution."""
    scale = numpyro.sample("scale", dist.LogNormal(-1, 0.5))
    level = numpyro.sample("level", dist.GaussianRandomWalk(scale, num_steps=len(y)))
    with numpyro.plate("time", len(y)):
        numpyro.sample("obs", dist.Normal(level, 0.3), obs=y)


def volatility(y):
    """Stochastic volatility: a walk of log scales."""
    step = numpyro.sample("step", dist.LogNormal(-2, 0.5))
    level = numpyro.sample("level", dist.GaussianRandomWalk(step, num_steps=len(y)))
    numpyro.sample("obs", dist.Normal(0.0, jnp.exp(level)), obs=y)


def gaussian_process(x, y):
    """Kernel hyperparameters of a joint normal over all rows."""
    variance = numpyro.sample("variance", dist.LogNormal(0, 0.5))
    length = numpyro.sample("length", dist.LogNormal(0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5))
    kernel = variance * jnp.exp(-(((x[:, None] - x) / length) ** 2) / 2) + (noise + 1e-4) * jnp.eye(len(x))
    numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(len(x)), kernel), obs=y)


def joint_event(X, y):
    """Rows declared as one event."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    numpyro.sample("obs", dist.Normal(X @ w, 0.5).to_event(1), obs=y)


def summed_factor(X, y):
    """A log-likelihood summed by hand."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    numpyro.factor("likelihood", dist.Normal(X @ w, 0.5).log_prob(y).sum())


def standardised(X, y):
    """A model that standardises inside."""
    Z = (X - X.mean(0)) / X.std(0)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(Z @ w, 0.5), obs=y)


def two_outcomes(X, y, counts):
    """Two observed sites in two plates."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("first", len(y)):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
    with numpyro.plate("second", len(counts)):
        numpyro.sample("counts", dist.Poisson(jnp.exp(0.5 + X[: len(counts)] @ w / 2)), obs=counts)


def two_way(table):
    """Rows and columns, nested plates."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("columns", table.shape[1], dim=-1):
        b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", table.shape[0], dim=-2), numpyro.plate("columns2", table.shape[1], dim=-1):
        numpyro.sample("obs", dist.Normal(m + b, 0.5), obs=table)


def censored(time, event):
    """Exponential survival, censored rows in a plate of their own."""
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    with numpyro.plate("seen", int(np.sum(event))):
        numpyro.sample("time", dist.Exponential(rate), obs=time[np.nonzero(event)[0]])
    with numpyro.plate("censored", int(np.sum(1 - event))):
        numpyro.factor("beyond", -rate * time[np.nonzero(1 - event)[0]])


def weibull(x, time, cut):
    """Weibull survival under wide priors, censored rows by a factor."""
    a, b = numpyro.sample("a", dist.Normal(0, 10)), numpyro.sample("b", dist.Normal(0, 10))
    k = numpyro.sample("k", dist.HalfNormal(5))
    with numpyro.plate("N", len(time)):
        scale = jnp.exp(a + b * x)
        log_prob = dist.Weibull(scale, k).log_prob(time)
        numpyro.factor("seen", jnp.where(cut, -((time / scale) ** k), log_prob))


def waiting_times(x, time, late, limit):
    """Exponential waiting times under wide priors, those that were cut off in a second plate."""
    a, b = numpyro.sample("a", dist.Normal(0, 10)), numpyro.sample("b", dist.Normal(0, 10))
    with numpyro.plate("seen", len(time)):
        numpyro.sample("time", dist.Exponential(jnp.exp(-(a + b * x))), obs=time)
    with numpyro.plate("cut", len(limit)):
        numpyro.factor("beyond", -limit * jnp.exp(-(a + b * late)))


def germination(n, y):
    """Random effects whose precision has the vaguest of gamma priors."""
    level, tau = numpyro.sample("level", dist.Normal(0, 1000)), numpyro.sample("tau", dist.Gamma(1e-3, 1e-3))
    with numpyro.plate("plates", len(y)):
        b = numpyro.sample("b", dist.Normal(0, 1 / jnp.sqrt(tau)))
        numpyro.sample("obs", dist.Binomial(n, logits=level + b), obs=y)


def rats(days, weight):
    """Growth curves with wide priors on means far from zero."""
    mu_a, mu_b = numpyro.sample("mu_a", dist.Normal(0, 100)), numpyro.sample("mu_b", dist.Normal(0, 100))
    s_a, s_b = numpyro.sample("s_a", dist.HalfNormal(10)), numpyro.sample("s_b", dist.HalfNormal(10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    with numpyro.plate("rats", len(weight), dim=-2):
        a, b = numpyro.sample("a", dist.Normal(mu_a, s_a)), numpyro.sample("b", dist.Normal(mu_b, s_b))
        with numpyro.plate("weighings", len(days), dim=-1):
            numpyro.sample("weight", dist.Normal(a + b * (days - 22.0), sigma), obs=weight)


def missing(age, y):
    """Missing entries imputed by an unscored latent, after the tutorial on missing data."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    where = np.nonzero(np.isnan(age))[0]
    imputed = numpyro.sample("imputed", dist.Normal(m, 1.0).expand([len(where)]).mask(False))
    age = jnp.asarray(age).at[where].set(imputed)
    numpyro.sample("age", dist.Normal(m, 1.0), obs=age)
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("obs", dist.Normal(b * age, 0.5), obs=y)


def zero_inflated(X, y):
    """Zero-inflated counts."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    gate = numpyro.sample("gate", dist.Beta(1.0, 3.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.ZeroInflatedPoisson(gate, jnp.exp(0.5 + X @ w)), obs=y)


def ordinal(x, y):
    """Ordered categories."""
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(dist.Normal(0, 2).expand([2]).to_event(1), _ORDERED))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.OrderedLogistic(slope * x, cuts), obs=y)


def horseshoe(X, y):
    """Shrinkage by half-Cauchy scales."""
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    scales = numpyro.sample("scales", dist.HalfCauchy(jnp.ones(X.shape[1])))
    base = numpyro.sample("base", dist.Normal(jnp.zeros(X.shape[1]), 1.0))
    numpyro.sample("obs", dist.Normal(X @ (base * tau * scales), 0.5), obs=y)


def lasso(X, y):
    """Laplace priors."""
    w = numpyro.sample("w", dist.Laplace(0, 0.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 0.5), obs=y)


def heteroskedastic(X, y):
    """Scales by a second predictor."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, X.shape[1]]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w[0], jnp.exp(0.3 * X @ w[1] - 0.5)), obs=y)


def growth(x, y):
    """A nonlinear curve."""
    top = numpyro.sample("top", dist.LogNormal(0.5, 0.3))
    rate = numpyro.sample("rate", dist.LogNormal(0, 0.3))
    with numpyro.plate("data", len(x)):
        numpyro.sample("obs", dist.Normal(top * (1 - jnp.exp(-rate * x)), 0.1), obs=y)


def coin(flips):
    """A Beta prior and flips without a plate."""
    p = numpyro.sample("p", dist.Beta(10, 10))
    numpyro.sample("obs", dist.Bernoulli(p), obs=flips)


def normal_scale(y):
    """Mean and scale."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.Normal(mu, sigma), obs=y)


def change_point(y):
    """Two rates with a continuous change point."""
    rates = numpyro.sample("rates", dist.LogNormal(0.5, 0.5).expand([2]).to_event(1))
    place = numpyro.sample("place", dist.Normal(len(y) / 2, len(y) / 8))
    share = jax.nn.sigmoid(jnp.arange(len(y)) - place)
    numpyro.sample("obs", dist.Poisson((1 - share) * rates[0] + share * rates[1]), obs=y)


def covariance(y):
    """An LKJ prior over a correlation."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale[:, None] * root), obs=y)


def closed_over(y):
    """Columns that the model closes over."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", _N):
        numpyro.sample("obs", dist.Normal(jnp.asarray(_X) @ w, 0.5), obs=y)


def subsampled(X, y):
    """Mini-batches by the plate itself."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0], subsample_size=10):
        rows, value = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("obs", dist.Normal(rows @ w, 0.5), obs=value)


def marginal_mixture(y):
    """A mixture with its components summed out."""
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.5, 1.5]), 0.5).to_event(1))
    mixing = dist.Categorical(probs=jnp.stack([weight, 1 - weight]))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.MixtureSameFamily(mixing, dist.Normal(mu, 1.0)), obs=y)


def hidden_states(y):
    """A hidden Markov model by `scan`."""
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 0.5).to_event(1))
    rows = numpyro.sample("rows", dist.Dirichlet(1 + 3 * jnp.eye(2)).to_event(1))

    def step(state, value):
        state = numpyro.sample("state", dist.Categorical(rows[state]))
        numpyro.sample("obs", dist.Normal(mu[state], 0.7), obs=value)
        return state, None

    scan(step, 0, y)


_ORDERED = dist.transforms.OrderedTransform()
_CLASSES = _RNG.integers(0, 3, _N)
_TIMES = _RNG.exponential(0.7, _N)
_SEEN = (np.arange(_N) % 4 > 0).astype(int)
_AGE = np.where(np.arange(_N) % 6 == 2, np.nan, _X[:, 0])
_POSITIVE = np.linspace(0.1, 4, _N)
_MIXED = np.where(_BINARY == 1, 1.5, -1.5) + _RNG.normal(size=_N)
_PAIRS = _RNG.multivariate_normal(np.zeros(2), [[1.0, 0.6], [0.6, 1.0]], _N)
_DELAYS = np.exp(1 + 0.5 * _X[:, 0]) * _RNG.weibull(1.5, _N)
_LATE = _DELAYS > 5
_DAYS = np.array([8.0, 15, 22, 29, 36])
_RATS = _RNG.normal(240, 14, (12, 1)) + _RNG.normal(6.2, 0.5, (12, 1)) * (_DAYS - 22) + _RNG.normal(0, 6, (12, 5))
_SCHOOLS = (8, np.array([15.0, 10, 16, 11, 9, 11, 10, 18]), np.array([28.0, 8, -3, 7, -1, 1, 18, 12]))
_CURVE = 1.5 * (1 - np.exp(-_POSITIVE)) + 0.1 * _RNG.normal(size=_N)

SUBJECTS = {
    subject.model.__name__.replace("_", "-"): subject
    for subject in (
        Subject(linear, (_X, _NORMAL)),
        Subject(linear_without_plate, (_X, _NORMAL)),
        Subject(logistic, (_X, _BINARY)),
        Subject(poisson, (_X, _COUNTS)),
        Subject(robust, (_X, _NORMAL)),
        Subject(negative_binomial, (_X, _COUNTS)),
        Subject(softmax, (_X, _CLASSES)),
        Subject(eight_schools, _SCHOOLS),
        Subject(eight_schools_decentred, _SCHOOLS),
        Subject(varying_intercepts, (_GROUP, _X[:, 0], _GROUPED)),
        Subject(varying_slopes, (_GROUP, _X[:, 0], _GROUPED)),
        Subject(seeds, (_BINARY[:12], np.full(12, 20), _RNG.binomial(20, 0.5, 12))),
        Subject(batting, (_RNG.binomial(40, 0.3, 10), np.full(10, 40)), full=False),
        Subject(separate_means, (_NORMAL,), full=False),
        Subject(local_level, (_SERIES[:15],), full=False),
        Subject(autoregression, (_SERIES,)),
        Subject(random_walk, (_SERIES[:15],)),
        Subject(volatility, (_NORMAL[:15],), full=False),
        Subject(gaussian_process, (_POSITIVE, _NORMAL)),
        Subject(joint_event, (_X, _NORMAL)),
        Subject(summed_factor, (_X, _NORMAL)),
        Subject(standardised, (_X, _NORMAL)),
        Subject(two_outcomes, (_X, _NORMAL, _COUNTS[:12])),
        Subject(two_way, (_GROUPED.reshape(6, 5),)),
        Subject(censored, (_TIMES, _SEEN)),
        Subject(weibull, (_X[:, 0], np.minimum(_DELAYS, 5.0), _LATE)),
        Subject(waiting_times, (_X[~_LATE, 0], _DELAYS[~_LATE], _X[_LATE, 0], np.full(_LATE.sum(), 5.0))),
        Subject(germination, (np.full(12, 20), _RNG.binomial(20, 0.5, 12))),
        Subject(rats, (_DAYS, _RATS)),
        Subject(missing, (_AGE, _NORMAL)),
        Subject(zero_inflated, (_X, _COUNTS)),
        Subject(ordinal, (_X[:, 0], _CLASSES)),
        Subject(horseshoe, (_X, _NORMAL), full=False),
        Subject(lasso, (_X, _NORMAL)),
        Subject(heteroskedastic, (_X, _NORMAL)),
        Subject(growth, (_POSITIVE, _CURVE)),
        Subject(coin, (_BINARY,)),
        Subject(normal_scale, (_NORMAL,)),
        Subject(change_point, (_COUNTS,)),
        Subject(covariance, (_PAIRS,)),
        Subject(closed_over, (_NORMAL,)),
        Subject(subsampled, (_X, _NORMAL)),
        Subject(marginal_mixture, (_MIXED,)),
        Subject(hidden_states, (_MIXED[:20],), full=False),
    )
}
