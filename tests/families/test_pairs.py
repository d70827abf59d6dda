"""Pairs of points have q's mean statistics, and the derivative of an average over them is a conjugate message."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_pvi.families import (
    BernoulliFamily,
    BetaFamily,
    DirichletFamily,
    ExponentialLawFamily,
    GammaFamily,
    IndependentFamily,
    InverseGammaFamily,
    LogNormalFamily,
    MarkovGaussianFamily,
    MultivariateNormalFamily,
    NormalFamily,
    ScalarNormalFamily,
    VonMisesFamily,
    WishartFamily,
    members_of,
    pair_rule,
)

TIGHT = {"float32": 2e-4, "float64": 1e-10}[jnp.result_type(float).name]
MATRIX = np.array([[2.0, 0.3], [0.3, 1.0]])
# The family, a member (very wide and very narrow entries among them), and coefficients <b, T> of an affine function.
CASES = {
    "gamma": (GammaFamily(), dist.Gamma(np.array([1e-3, 2.0, 1e5]), 3.0), (np.array([2.0, 0.3, -1.0]), 0.7)),
    "inverse-gamma": (InverseGammaFamily(), dist.InverseGamma(np.array([3.0, 0.01]), 2.0), (np.array([2.0, 0.3]), 0.7)),
    "exponential": (ExponentialLawFamily(), dist.Exponential(np.array([0.3, 2.0])), (np.array([2.0, 0.3]),)),
    "beta": (
        BetaFamily(),
        dist.Beta(np.array([1e-3, 2.0, 50.0]), np.array([2e-3, 300.0, 0.5])),
        (np.array([2.0, 0.3, 1.0]), np.array([0.5, 2.0, 3.0])),
    ),
    "dirichlet": (
        DirichletFamily(3),
        dist.Dirichlet(np.array([[1e-3, 2e-3, 1e-3], [3.0, 300.0, 1.0]])),
        (np.array([[1.0, 2.0, 0.5], [0.0, 3.0, 1.0]]),),
    ),
    "wishart": (WishartFamily(2), dist.Wishart(np.array([3.0, 2.5, 40.0]), MATRIX), (2.0, MATRIX @ MATRIX)),
    "von-mises": (
        VonMisesFamily(),
        dist.VonMises(np.array([1.0, 0.0, -2.0]), np.array([2.0, 1e-8, 1e3])),
        (np.array([2.0, 0.3, 1.0]), np.array([0.5, -2.0, 3.0])),
    ),
    "normal": (ScalarNormalFamily(), dist.Normal(np.array([1.0, -3.0]), np.array([2.0, 0.1])), (0.4, 1.7)),
    "diagonal": (
        NormalFamily(2),
        dist.Normal(np.array([1.0, -3.0]), 2.0).to_event(1),
        (np.ones(2), np.array([0.5, 2.0])),
    ),
    "log-normal": (LogNormalFamily(), dist.LogNormal(np.array([1.0, 0.0]), np.array([2.0, 0.1])), (0.4, 1.7)),
    "multivariate": (
        MultivariateNormalFamily(2),
        dist.MultivariateNormal(jnp.array([1.0, -3.0]), jnp.asarray(MATRIX)),
        (np.ones(2), MATRIX),
    ),
}


def sign_rows(rule):
    return [np.asarray(s) for s in itertools.product([1.0, -1.0], repeat=rule.axes)] if rule.axes else [1.0, -1.0]


def setting(name):
    family, member, coefficients = CASES[name]
    natural = family.from_distribution(member)
    like = jax.tree.leaves(natural)
    given = [jnp.broadcast_to(jnp.asarray(c, x.dtype), x.shape) for c, x in zip(coefficients, like, strict=True)]
    return family, pair_rule(family), natural, jax.tree.unflatten(jax.tree.structure(natural), given)


def relative(got, wanted):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.max(jnp.abs(a - b) / (1 + jnp.abs(b)))) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_an_affine_function_and_its_message(name):
    family, rule, natural, slope = setting(name)

    @jax.jit
    def run(natural, slope):
        own, at = rule.coordinates(natural), rule.anchor(natural) if rule.anchored else rule.coordinates(natural)
        beyond = jax.tree.map(jnp.subtract, own, at)

        def average(at):
            def one(signs):
                return family.inner(slope, family.sufficient_statistics(rule.points(at, jnp.asarray(signs))))

            return sum(one(s) for s in sign_rows(rule)) / len(sign_rows(rule))

        def continued(at):
            value = average(at) + jax.jvp(average, (jax.lax.stop_gradient(at),), (beyond,))[1]
            return jnp.sum(value), value

        (_, value), gradient = jax.value_and_grad(continued, has_aux=True)(at)
        return value, rule.message(at, gradient), family.inner(slope, family.natural_to_mean(natural))

    value, message, wanted = run(natural, slope)
    assert relative(value, wanted) < TIGHT
    assert relative(message, slope) < 10 * TIGHT


@pytest.mark.parametrize("name", CASES)
def test_pairs_fitted_to_values_have_their_average_statistics(name):
    family, rule, natural, _ = setting(name)

    @jax.jit
    def run(natural):
        values = rule.probe(natural, jax.random.key(0), 4)
        at = rule.fit(values)
        found = [family.sufficient_statistics(rule.points(at, jnp.asarray(s))) for s in sign_rows(rule)]
        average = jax.tree.map(lambda *x: sum(x) / len(x), *found)
        return average, jax.tree.map(lambda x: jnp.mean(x, axis=0), family.sufficient_statistics(values))

    average, wanted = run(natural)
    assert relative(average, wanted) < 10 * TIGHT


def test_families_without_pairs_say_so():
    assert pair_rule(BernoulliFamily()) is None
    assert pair_rule(IndependentFamily(GammaFamily(), (3,))) == pair_rule(GammaFamily())


def test_members_are_what_is_independent_inside_an_event():
    assert members_of(GammaFamily()) == ()
    assert members_of(IndependentFamily(IndependentFamily(GammaFamily(), (3,)), (2,))) == (2, 3)
    assert members_of(IndependentFamily(NormalFamily(4), (2,))) == (2, 4)
    assert members_of(IndependentFamily(MultivariateNormalFamily(4), (2,))) == (2,)
    assert members_of(IndependentFamily(MarkovGaussianFamily(5, 2), (3,))) == (3, 5)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
@pytest.mark.parametrize("size", [3, 40])
def test_points_of_a_dirichlet_are_on_the_simplex_as_programs_compute_them(size, fault):
    """NumPyro's check of a value has no density beside it. The fault: the difference of two numbers that are nearly equal."""
    rng = np.random.default_rng(0)
    concentration = rng.gamma(0.7, 30.0, (2000, size)) + 0.02
    family = DirichletFamily(size)
    rule, natural = pair_rule(family), family.from_distribution(dist.Dirichlet(jnp.asarray(concentration, jnp.float32)))

    def cancelling(log):
        own = log == jnp.max(log, axis=-1, keepdims=True)
        a, b = (jnp.sum(jnp.where(at, jnp.exp(log), 0.0), axis=-1, keepdims=True) for at in (own, ~own))
        middle = 0.5 * (1 + a**2 - b**2)
        x = (middle + jnp.sqrt(middle**2 - a**2)) / a
        return jnp.exp(log - jnp.where(own, jnp.log(x), -jnp.log(b / (1 - a * x))))

    def off(natural):
        at = rule.anchor(natural)
        points = (
            [cancelling(at.first)] if fault else [rule.points(at, jnp.asarray(s, jnp.float32)) for s in (1.0, -1.0)]
        )
        return jnp.stack([jnp.abs(jnp.sum(x, axis=-1) - 1) for x in points])

    largest = float(jnp.max(jax.jit(off)(natural)))
    assert largest < 1e-6 or fault
    assert not fault or size > 3 or largest > 1e-5
