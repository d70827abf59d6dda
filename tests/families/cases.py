"""Every family with NumPyro distributions of it: moderate ones to compare digit by digit, extreme ones to survive."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints

from numpyro_pvi.families import (
    BernoulliFamily,
    BetaFamily,
    BlockNormalFamily,
    CategoricalFamily,
    DirichletFamily,
    ExponentialLawFamily,
    GammaFamily,
    IndependentFamily,
    InverseGammaFamily,
    LogNormalFamily,
    MarkovGaussianFamily,
    MarkovNatural,
    MarkovNormal,
    MultivariateNormalFamily,
    NormalFamily,
    ProductFamily,
    ScalarNormalFamily,
    TransformedNormalFamily,
    VonMisesFamily,
    WishartFamily,
)

BATCH = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A family, a generator of NumPyro distributions in it (batch of BATCH), and extreme members."""

    name: str
    family: Any
    make: Callable[[np.random.Generator, float], Any]
    # One distribution whose batch runs over extremes, or None.
    extremes: Callable[[], Any] | None = None
    # Statistics are real numbers that can be differentiated through.
    continuous: bool = True

    @property
    def product(self) -> bool:
        return isinstance(self.family, ProductFamily)

    def distribution(self, seed, spread=0.7):
        return self.make(np.random.default_rng(seed), spread)

    def natural(self, seed, spread=0.7):
        return self.family.from_distribution(self.distribution(seed, spread))


def draws(distribution, key, shape=()):
    """NumPyro's own draws of a distribution or of a dict of them."""
    if isinstance(distribution, dict):
        keys = jax.random.split(key, len(distribution))
        return {name: d.sample(k, shape) for k, (name, d) in zip(keys, sorted(distribution.items()), strict=True)}
    return distribution.sample(key, shape)


def log_prob(distribution, value):
    """NumPyro's own log density of a distribution or of a dict of them."""
    if isinstance(distribution, dict):
        return sum(d.log_prob(value[name]) for name, d in distribution.items())
    return distribution.log_prob(value)


def positive(rng, spread, *shape):
    return jnp.asarray(np.exp(spread * 2 * rng.uniform(-1, 1, (BATCH, *shape))))


def real(rng, *shape):
    return jnp.asarray(rng.normal(size=(BATCH, *shape)))


def root(rng, spread, size):
    own = np.eye(size) + 0.5 * np.tril(rng.uniform(-1, 1, (BATCH, size, size)), -1)
    return jnp.asarray(own * np.exp(spread * rng.uniform(-1, 1, (BATCH, size, 1))))


def multivariate(rng, spread, size=3):
    return dist.MultivariateNormal(real(rng, size), scale_tril=root(rng, spread, size))


def block(rng, spread):
    tril = np.array(root(rng, spread, 3))
    tril[..., 2, :2] = 0.0
    return dist.MultivariateNormal(real(rng, 3), scale_tril=jnp.asarray(tril))


def normal(rng, spread):
    return dist.Normal(real(rng), positive(rng, 0.5 * spread))


def wishart(rng, spread, size=3):
    return dist.Wishart(size + positive(rng, spread), scale_tril=root(rng, spread, size))


def chain(rng, spread, steps=4, size=2):
    """A valid chain: a random regression of every state on the one before, unequal over time."""
    noise = np.exp(spread * rng.uniform(-1, 1, (BATCH, steps, size, 1))) * (np.eye(size) + 0.1)
    noise = noise @ np.swapaxes(noise, -1, -2)
    slope = 0.5 * rng.normal(size=(BATCH, steps, size, size))
    precision = noise.copy()
    precision[:, :-1] += np.swapaxes(slope[:, 1:], -1, -2) @ noise[:, 1:] @ slope[:, 1:]
    lower = -noise[:, 1:] @ slope[:, 1:]
    return MarkovNatural(real(rng, steps, size), jnp.asarray(precision), jnp.asarray(lower))


def markov(rng, spread):
    found = chain(rng, spread)
    return MarkovNormal(found.precision_mean, found.precision, found.lower)


def scalar_markov(rng, spread):
    found = chain(rng, spread, 5, 1)
    return MarkovNormal(found.precision_mean, found.precision, found.lower, scalar=True)


def several(rng, spread):
    return {
        "rate": dist.Gamma(positive(rng, spread), positive(rng, spread)),
        "loc": dist.Normal(real(rng, 2), positive(rng, spread, 2)).to_event(1),
        "prob": dist.Beta(positive(rng, spread, 2), positive(rng, spread, 2)).to_event(1),
    }


def transformed(support, *shape):
    """Normals, or normal vectors, carried to a support by NumPyro."""

    def make(rng, spread):
        if not shape:
            normal = dist.Normal(real(rng), positive(rng, 0.5 * spread))
        else:
            root = jnp.tril(0.3 * real(rng, *shape, *shape), -1)
            normal = dist.MultivariateNormal(
                0.5 * real(rng, *shape), scale_tril=root + jax.vmap(jnp.diag)(0.5 * positive(rng, 0.5 * spread, *shape))
            )
        return dist.TransformedDistribution(normal, biject_to(support))

    return make


PRODUCT = ProductFamily({"rate": GammaFamily(), "loc": NormalFamily(2), "prob": IndependentFamily(BetaFamily(), (2,))})
# Float32 holds a concentration as 1 plus its natural parameter, so tiny ones to about 6e-8.
TINY, HUGE = 1e-3, 1e6


def grid(*axes):
    return [jnp.asarray(axis.reshape(-1)) for axis in np.meshgrid(*map(np.asarray, axes), indexing="ij")]


def extreme_gamma(cls):
    return lambda: cls(*grid([TINY, 1.0, HUGE], [1e-6, 1.0, 1e6]))


CASES = [
    Case(
        "normal",
        ScalarNormalFamily(),
        normal,
        lambda: dist.Normal(*grid([-10.0, 0.0, 1e-3], [1e-2, 1.0, 1e6])),
    ),
    Case(
        "log_normal",
        LogNormalFamily(),
        lambda rng, s: dist.LogNormal(real(rng), positive(rng, 0.5 * s)),
        lambda: dist.LogNormal(*grid([-3.0, 0.0, 3.0], [1e-1, 1.0, 5.0])),
    ),
    Case("diagonal", NormalFamily(3), lambda rng, s: dist.Normal(real(rng, 3), positive(rng, 0.5 * s, 3)).to_event(1)),
    Case("full", MultivariateNormalFamily(3), multivariate),
    Case("block", BlockNormalFamily((2, 1)), block),
    Case(
        "gamma",
        GammaFamily(),
        lambda rng, s: dist.Gamma(positive(rng, s), positive(rng, s)),
        extreme_gamma(dist.Gamma),
    ),
    Case(
        "inverse_gamma",
        InverseGammaFamily(),
        lambda rng, s: dist.InverseGamma(positive(rng, s), positive(rng, s)),
        extreme_gamma(dist.InverseGamma),
    ),
    Case(
        "exponential",
        ExponentialLawFamily(),
        lambda rng, s: dist.Exponential(positive(rng, s)),
        lambda: dist.Exponential(jnp.asarray([1e-15, 1.0, 1e15])),
    ),
    Case(
        "beta",
        BetaFamily(),
        lambda rng, s: dist.Beta(positive(rng, s), positive(rng, s)),
        lambda: dist.Beta(*grid([TINY, 1.0, 300.0, HUGE], [TINY, 1.0, 300.0, HUGE])),
    ),
    Case(
        "dirichlet",
        DirichletFamily(4),
        lambda rng, s: dist.Dirichlet(positive(rng, s, 4)),
        lambda: dist.Dirichlet(
            jnp.asarray(
                [[TINY] * 4, [HUGE] * 4, [TINY, 1.0, 1.0, HUGE], [1e3, TINY, TINY, TINY], [0.01, 0.01, 0.01, 100.0]]
            )
        ),
    ),
    Case(
        "bernoulli",
        BernoulliFamily(),
        lambda rng, s: dist.BernoulliLogits(3 * s * real(rng)),
        lambda: dist.BernoulliLogits(jnp.asarray([-80.0, -15.0, 0.0, 10.0])),
        continuous=False,
    ),
    Case(
        "categorical",
        CategoricalFamily(4),
        lambda rng, s: dist.CategoricalLogits(3 * s * real(rng, 4)),
        lambda: dist.CategoricalLogits(
            jnp.asarray([[-80.0, 0.0, 0.0, 0.0], [80.0, 0.0, -5.0, 1.0], [0.0, 0.0, 0.0, -60.0]])
        ),
        continuous=False,
    ),
    Case(
        "wishart",
        WishartFamily(3),
        wishart,
        lambda: dist.Wishart(
            jnp.asarray([2 + TINY, 2.5, HUGE]), scale_tril=jnp.asarray([1e-3, 1.0, 1e2])[:, None, None] * jnp.eye(3)
        ),
    ),
    Case(
        "von_mises",
        VonMisesFamily(),
        lambda rng, s: dist.VonMises(real(rng), positive(rng, s)),
        lambda: dist.VonMises(*grid([-3.0, 0.1, 3.0], [1e-6, 1.0, 29.9, 30.1, 1e6])),
    ),
    Case(
        "above",
        TransformedNormalFamily(constraints.greater_than(1.0)),
        transformed(constraints.greater_than(1.0)),
        lambda: dist.TransformedDistribution(
            dist.Normal(*grid([-3.0, 0.0, 3.0], [1e-1, 1.0, 5.0])), biject_to(constraints.greater_than(1.0))
        ),
    ),
    Case("below", TransformedNormalFamily(constraints.less_than(-2.0)), transformed(constraints.less_than(-2.0))),
    Case(
        "between", TransformedNormalFamily(constraints.interval(-1, 60)), transformed(constraints.interval(-1.0, 60.0))
    ),
    Case(
        "ordered", TransformedNormalFamily(constraints.ordered_vector, (3,)), transformed(constraints.ordered_vector, 3)
    ),
    Case(
        "positive_ordered",
        TransformedNormalFamily(constraints.positive_ordered_vector, (3,)),
        transformed(constraints.positive_ordered_vector, 3),
    ),
    Case(
        "correlations",
        TransformedNormalFamily(constraints.corr_cholesky, (3, 3)),
        transformed(constraints.corr_cholesky, 3),
    ),
    Case("markov", MarkovGaussianFamily(4, 2), markov),
    Case("scalar_markov", MarkovGaussianFamily(5), scalar_markov),
    Case(
        "independent",
        IndependentFamily(GammaFamily(), (2,)),
        lambda rng, s: dist.Gamma(positive(rng, s, 2), positive(rng, s, 2)).to_event(1),
    ),
    Case("product", PRODUCT, several),
]
