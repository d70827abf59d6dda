"""Slopes of expected log densities in what they depend on beside their predictors, against integration of slopes by hand.

They are taken at the nodes of the density's own rule, which its curvature chooses: the law is that a rule that is fine enough for
that is fine enough for them. The oracle is SciPy's adaptive quadrature (a dense grid over two predictors) of slopes in closed form.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import integrate, special, stats

from numpyro_pvi.expectations import _affine
from numpyro_pvi.expectations._rules import RULES, TOLERANCE
from numpyro_pvi.expectations.quadrature import Share, expect_1d
from tests.conftest import X64

# Of the predictors, of which all rows of one expectation have one.
SDS = (0.01, 0.1, 0.3, 1.0, 2.0, 4.0)
MEANS = np.array([0.3, -0.8, 1.5])
FIXED = len(RULES) - 1
DTYPE = "float64" if X64 else "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    """A log density of rows y at ``leaves`` and a predictor, and its slope in logarithms of the leaves in NumPy."""

    density: Callable  # (leaves, y, u)
    slope: Callable  # (leaves, y, u)
    y: tuple[float, ...]
    leaves: tuple[float, ...]
    # Where it has features.
    features: Callable = lambda y: (y,)
    width: float = 1.0
    # The finest rule is costly to compile: only where rows need it.
    num_rules: int = FIXED
    # Leaves that move as one.
    tied: bool = False
    # The widest predictors of which the finest of these rules gets the curvature right.
    max_sd: float = 4.0


def student_slopes(leaves, y, u):
    df, scale = leaves
    t = ((y - u) / scale) ** 2 / df
    grown = (df + 1) * t / (1 + t)
    half = special.digamma((df + 1) / 2) - special.digamma(df / 2) - 1 / df - np.log1p(t) + grown / df
    return 0.5 * df * half, grown - 1


def negative_binomial_slope(leaves, y, u):
    (k,) = leaves
    mean = np.exp(u)
    return (
        k * (special.digamma(y + k) - special.digamma(k) + np.log(k) + 1 - np.log(k + mean) - (k + y) / (k + mean)),
    )


def truncated_slope(leaves, y, u):
    (scale,) = leaves
    a = u / scale
    return (((y - u) / scale) ** 2 - 1 + a * np.exp(stats.norm.logpdf(a) - special.log_ndtr(a)),)


def beta_slope(leaves, y, u):
    (b,) = leaves
    return (b * (np.log1p(-y) - special.digamma(b) + special.digamma(np.exp(u) + b)),)


def gamma_slope(leaves, y, u):
    k = leaves[0]
    return (k * (np.log(k) - u + 1 + np.log(y) - special.digamma(k) - y * np.exp(-u)),)


NEAR_ZERO = {"features": lambda _: (0.0,)}
STUDENT = {
    "density": lambda p, y, u: dist.StudentT(p[0], u, p[1]).log_prob(y),
    "slope": student_slopes,
    "num_rules": len(RULES),
}
CASES = {
    "student": Case(y=(0.1, -1.2, 6.0), leaves=(4.0, 0.7), **STUDENT),
    "narrow student": Case(y=(0.3, -1.2, 2.0), leaves=(3.0, 0.02), width=0.02, max_sd=1.0, **STUDENT),
    "negative binomial": Case(
        lambda p, y, u: dist.NegativeBinomial2(jnp.exp(u), p[0]).log_prob(y),
        negative_binomial_slope,
        # JAX's log beta function is wrong by 3e-7 where an argument is 8 or more.
        (0.0, 3.0, 6.0),
        (1.7,),
        **NEAR_ZERO,
    ),
    "truncated normal": Case(
        lambda p, y, u: dist.TruncatedNormal(u, p[0], low=0.0).log_prob(y),
        truncated_slope,
        (0.2, 1.0, 2.5),
        (0.8,),
        # Beyond it NumPyro's density overflows where there is mass.
        max_sd=2.0 if X64 else 1.0,
        **NEAR_ZERO,
    ),
    "beta": Case(
        lambda p, y, u: dist.Beta(jnp.exp(u), p[0]).log_prob(y), beta_slope, (0.1, 0.5, 0.9), (1.4,), **NEAR_ZERO
    ),
    "gamma": Case(
        lambda p, y, u: dist.Gamma(p[0], p[1] * jnp.exp(-u)).log_prob(y),
        gamma_slope,
        (0.4, 1.0, 3.0),
        (2.2, 2.2),
        tied=True,
        max_sd=2.0,
        **NEAR_ZERO,
    ),
    "laplace": Case(
        # With a shift beside the predictor, whose slope jumps at the kink.
        lambda p, y, u: dist.Laplace(u + p[1], p[0]).log_prob(y),
        lambda p, y, u: (np.abs(y - u - p[1]) / p[0] - 1, p[1] * np.sign(y - u - p[1]) / p[0]),
        (0.1, -1.2, 2.0),
        (0.7, 0.4),
        features=lambda y: (y - 0.4,),
        num_rules=len(RULES),
    ),
}


@functools.cache
def by_hand(name, sd):
    """E of the slopes, by leaf and row, in SciPy alone."""
    case = CASES[name]

    def one(mean, y, k):
        near = [c + case.width * far for c in case.features(y) for far in (-5, -1, 0, 1, 5)]
        # Rows may grow exponentially: there is mass a variance away.
        low, high = mean - 12 * sd - sd**2, mean + 12 * sd + sd**2
        points = sorted({c for c in near if low < c < high} | {mean - 3 * sd, mean, mean + 3 * sd})
        inner = lambda u: case.slope(case.leaves, y, u)[k] * np.exp(-0.5 * ((u - mean) / sd) ** 2)  # noqa: E731
        found = integrate.quad(inner, low, high, points=points, limit=400, epsabs=1e-13, epsrel=1e-12)[0]
        return found / (sd * np.sqrt(2 * np.pi))

    count = 1 if case.tied else len(case.leaves)
    return np.array([[one(mean, y, k) for mean, y in zip(MEANS, case.y, strict=True)] for k in range(count)])


def slopes(density, leaves, mean, covariance, num_rules, tied=False):
    """Of E f in the logarithms of the leaves, by row, and of its curvature the size, which is what the search goes by."""
    expected = _affine._expectation_of(density, mean[0].shape, num_rules)

    def total(logs, covariance):
        own = tuple(jnp.exp(x) for x in logs)
        return jnp.sum(expected(mean, covariance, jnp.ones_like(mean[0]), (own[0],) * 2 if tied else own))

    logs = tuple(jnp.log(p) * jnp.ones_like(mean[0]) for p in (leaves[:1] if tied else leaves))
    found, turned = jax.grad(total, argnums=(0, 1))(logs, covariance)
    sizes = [(2.0 if i == j else 1.0) * jnp.abs(t * covariance[i, j]) for (i, j), t in turned.items()]
    return jnp.stack(found), sum(jnp.sum(s) for s in sizes)


@functools.cache
def program(density, num_rules, tied):
    """One for all cases with the same density."""

    def run(leaves, y, mean, variance):
        return slopes(lambda p, u: density(p, y, u), leaves, (mean,), {(0, 0): variance}, num_rules, tied)

    return jax.jit(run)


def excess(found, wanted, size, mean):
    """Errors of all rows beyond rounding, in units of what is tolerated of the curvature: the worst leaf's."""
    wrong = jnp.abs(jnp.asarray(np.asarray(found, float) - wanted))
    beyond = [_affine._error_beyond_rounding(own, jnp.zeros_like(own), mean) for own in wrong]
    return np.max([float(jnp.sum(own)) for own in beyond]) / (TOLERANCE[DTYPE] * max(float(size), 1.0))


def worst(name, num_rules=None):
    """Over all widths."""
    case, mean, found = CASES[name], jnp.asarray(MEANS), []
    run = program(case.density, num_rules or case.num_rules, case.tied)
    for sd in (s for s in SDS if s <= case.max_sd):
        given = tuple(map(jnp.asarray, case.leaves)), jnp.asarray(case.y), mean, jnp.full_like(mean, sd**2)
        own, size = run(*given)
        found.append(excess(own, by_hand(name, sd), size, (mean,)))
    # What is not a number is no small error.
    return np.max(found)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_that_serves_the_curvature_serves_slopes_beside_it(name):
    assert worst(name) <= 1.0


@pytest.mark.parametrize("name", ["student", "laplace"])
def test_a_search_that_ends_with_the_coarsest_rule_is_seen(name):
    assert worst(name, num_rules=1) > 100.0


Y = np.array([0.1, -1.2, 6.0])
AFAR = {(0, 0): 1.0, (0, 1): 0.3, (1, 1): 0.25}


def on_a_grid(df, sd):
    """E of a Student-t's slope in the logarithm of its degrees of freedom, over location and log scale."""
    line = np.linspace(-9.0, 9.0, 361)
    z = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1)
    weight = np.exp(-0.5 * (z**2).sum(axis=-1))
    root = sd * np.linalg.cholesky(np.array([[AFAR[0, 0], AFAR[0, 1]], [AFAR[0, 1], AFAR[1, 1]]]))
    u, v = np.moveaxis(z @ root.T, -1, 0)
    found = [weight * student_slopes((df, np.exp(v)), y, mean + u)[0] for mean, y in zip(MEANS, Y, strict=True)]
    return np.array([[own.sum() / weight.sum() for own in found]])


def test_slopes_beside_two_predictors():
    df, mean = 4.0, (jnp.asarray(MEANS), jnp.zeros(len(MEANS)))

    @jax.jit
    def run(sd):
        covariance = {pair: jnp.full(len(MEANS), own * sd**2) for pair, own in AFAR.items()}
        density = lambda p, u, v: dist.StudentT(p[0], u, jnp.exp(v)).log_prob(jnp.asarray(Y))  # noqa: E731
        return slopes(density, (df,), mean, covariance, FIXED)

    for sd in (0.01, 0.1, 0.3, 0.6):
        found, size = run(jnp.asarray(sd))
        assert excess(found, on_a_grid(df, sd), size, mean) <= 1.0


def cliff(u):
    """A function that overflows where a node of Gauss and Hermite's rule counts 3e-10."""
    return jnp.where(u < -4.2, jnp.inf, 1.0 + u)


@pytest.mark.parametrize("rows", [3, 3000], ids=["blocks", "node by node"])
def test_a_slope_that_overflows_far_out_takes_nothing_from_the_density(rows):
    """Its own far nodes are left out, and the density keeps all of its own."""
    density, mean = lambda u: -((u - 0.2) ** 4), jnp.zeros(rows)
    given = density, (mean,), {(0, 0): jnp.full(rows, 0.49)}, jnp.ones(rows), FIXED
    (*alone, _), error = jax.jit(lambda: _affine._settled(*given))()
    (*found, (slope,)), same = jax.jit(lambda: _affine._settled(*given, (cliff,)))()
    exact = functools.partial(np.testing.assert_allclose, rtol=1e-14 if X64 else 1e-6)
    jax.tree.map(exact, (found, same), (alone, error))
    np.testing.assert_allclose(slope, 1.0, atol=1e-8 if X64 else 1e-4)


def test_the_finest_rule_leaves_out_a_slope_alone_or_with_its_density():
    """With its density, for it is the slope of what is taken of that."""
    mean, sd, edge = jnp.zeros(3), jnp.full(3, 0.7), -4.6 if X64 else -4.0

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def taken(density, slope):
        return expect_1d(density, mean, sd, rule="mapped", share=Share(jnp.asarray(1.0)), beside=(slope,))

    density = lambda u: -((u - 0.2) ** 4)  # noqa: E731
    alone, found = (taken(density, g) for g in (jnp.sin, lambda u: jnp.where(u < edge, jnp.inf, 1.0 + u)))
    both = taken(lambda u: jnp.where(u < edge, jnp.inf, density(u)), lambda u: jnp.where(u < edge, 1e20, 1.0))
    np.testing.assert_allclose(found.value, alone.value, rtol=1e-14 if X64 else 1e-6)
    np.testing.assert_allclose(found.beside + both.beside, 1.0, atol=1e-8 if X64 else 1e-4)
