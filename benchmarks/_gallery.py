"""Eight small models after NumPyro's own examples, with their data and groups: what `benchmarks.gallery` compares.

Data are simulated with a stated seed, or are the published numbers of a textbook example.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

__all__ = ["EXAMPLES", "Example"]


@dataclasses.dataclass(frozen=True)
class Example:
    """One model as both sides get it.

    Attributes:
        model: the model as PVI gets it.
        plate: the partitioned plate.
        groups: one label per row.
        args: the model's arguments.
        rounds: PVI's rounds.
        draws: PVI's antithetic pairs a round, visited one group at a time; 0 where its defaults need none.
        whole: the same density for SVI, where discrete latents keep a full-covariance guide from the model itself.
        start: constrained values of the latents to start SVI from; None for its default.
        exchangeable: whether latents could change places, so that PVI too needs that start.
    """

    model: Callable[..., Any]
    plate: str
    groups: np.ndarray
    args: tuple[Any, ...]
    rounds: int = 60
    draws: int = 0
    whole: Callable[..., Any] | None = None
    start: Any = None
    exchangeable: bool = False

    @property
    def reference(self) -> Callable[..., Any]:
        """The model that SVI fits and that both posteriors are judged by."""
        return self.whole or self.model


def divorce(age, marriage, rate):
    """Linear regression of a rate on two correlated columns, after the divorce example of Rethinking."""
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    b_marriage = numpyro.sample("b_marriage", dist.Normal(0.0, 0.5))
    b_age = numpyro.sample("b_age", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("states", rate.shape[0]):
        numpyro.sample("rate", dist.Normal(a + b_marriage * marriage + b_age * age, sigma), obs=rate)


def _divorce() -> Example:
    rng = np.random.default_rng(1)
    age = rng.normal(size=50)
    marriage = -0.7 * age + 0.7 * rng.normal(size=50)
    rate = -0.6 * age + 0.8 * rng.normal(size=50)
    return Example(divorce, "states", rng.integers(0, 4, 50), (age, marriage, rate), rounds=20)


def logistic(X, y):
    """Logistic regression."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


def _logistic() -> Example:
    rng = np.random.default_rng(2)
    X = rng.normal(size=(200, 4))
    y = (X @ np.array([1.0, -2.0, 0.5, 0.0]) + rng.logistic(size=200) > 0).astype(int)
    return Example(logistic, "rows", rng.integers(0, 5, 200), (X, y), rounds=15)


def negative_binomial(X, y):
    """Overdispersed counts with a log link."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with numpyro.plate("rows", X.shape[0]):
        mean = jnp.exp(intercept + X @ w)
        numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y)


def _negative_binomial() -> Example:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(150, 3))
    mean = np.exp(1.0 + X @ np.array([0.5, -0.3, 0.0]))
    y = rng.poisson(mean * rng.gamma(3.0, 1 / 3.0, size=150))
    return Example(negative_binomial, "rows", rng.integers(0, 5, 150), (X, y), rounds=30)


def baseball(player, at_bats, hits):
    """Batting averages, partially pooled on the logit scale (NumPyro's baseball example)."""
    loc = numpyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("players", 18):
        alpha = numpyro.sample("alpha", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", hits.shape[0]):
        numpyro.sample("hits", dist.Binomial(at_bats, logits=(loc + scale * alpha)[player]), obs=hits)


def _baseball() -> Example:
    # Efron and Morris (1975): hits of 18 players in their first 45 at-bats of 1970.
    hits = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
    return Example(baseball, "rows", np.arange(18) // 3, (np.arange(18), np.full(18, 45), hits), rounds=40, draws=32)


def eight_schools(school, effect, error):
    """Eight schools, not centred."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", effect.shape[0]):
        numpyro.sample("effect", dist.Normal((mu + tau * theta)[school], error), obs=effect)


def _eight_schools() -> Example:
    effect = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    return Example(eight_schools, "rows", np.arange(8), (np.arange(8), effect, error), rounds=40, draws=32)


def mixture(y):
    """Two Gaussian components with unknown weight, locations and scale; every row's component is a discrete latent."""
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 2.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        component = numpyro.sample("component", dist.Bernoulli(weight))
        numpyro.sample("y", dist.Normal(mu[component], sigma), obs=y)


def mixture_summed(y):
    """The same density with the components summed out by hand."""
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 2.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        weights = dist.Categorical(jnp.stack([1 - weight, weight]))
        numpyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def _mixture() -> Example:
    rng = np.random.default_rng(4)
    y = np.where(rng.random(120) < 0.35, -1.5, 1.5) + rng.normal(size=120)
    # From a uniform draw SVI may end with both components on one side, and a first step from the prior itself may cross
    # them: both start at the prior's centre.
    start = {"weight": np.array(0.5), "mu": np.array([-1.0, 1.0]), "sigma": np.array(1.0)}
    groups = rng.integers(0, 4, 120)
    return Example(
        mixture, "rows", groups, (y,), rounds=40, draws=16, whole=mixture_summed, start=start, exchangeable=True
    )


def robust(X, y):
    """Linear regression with Student-t noise and unknown scale."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, intercept + X @ w, sigma), obs=y)


def _robust() -> Example:
    rng = np.random.default_rng(5)
    X = rng.normal(size=(100, 3))
    y = X @ np.array([1.0, 0.0, -1.0]) + 0.5 * rng.standard_t(2.0, size=100)
    return Example(robust, "rows", rng.integers(0, 4, 100), (X, y), rounds=30)


def network(X, y):
    """A Bayesian network of one hidden layer (after NumPyro's bnn example)."""
    inner = numpyro.sample("inner", dist.Normal(0.0, 1.0).expand([X.shape[1], 2]).to_event(2))
    outer = numpyro.sample("outer", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.tanh(X @ inner) @ outer, 1 / jnp.sqrt(precision)), obs=y)


def _network() -> Example:
    rng = np.random.default_rng(6)
    x = np.sort(rng.uniform(-2.0, 2.0, size=60))
    y = np.tanh(2 * x) - 0.5 * x + 0.3 * rng.normal(size=60)
    # The prior is the same for both hidden units: q must start where they differ.
    start = {"inner": np.array([[1.5, -0.5], [0.0, 0.0]]), "outer": np.array([1.0, 0.5]), "precision": np.array(3.0)}
    args = (np.stack([x, np.ones_like(x)], 1), y)
    return Example(network, "rows", rng.integers(0, 4, 60), args, rounds=60, draws=32, start=start, exchangeable=True)


EXAMPLES: dict[str, Callable[[], Example]] = {
    "regression": _divorce,
    "logistic": _logistic,
    "counts": _negative_binomial,
    "baseball": _baseball,
    "eight schools": _eight_schools,
    "mixture": _mixture,
    "robust": _robust,
    "network": _network,
}
