"""StochasticEP's and AlphaDivergence's settings, the coordinates of a visit, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import exact_tilted
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily, NormalFamily
from numpyro_pvi.runtime._moments import solver_of_prior
from numpyro_pvi.solvers import AlphaDivergence, ImportanceMoments, NaturalGradient, PowerEP, StochasticEP, match_rules
from numpyro_pvi.solvers._alpha_divergence import _Whitened

MATRIX = jnp.array([[2.0, 0.3], [0.3, 1.0]])
FACTOR = GaussianNatural(jnp.array([0.7, -0.2]), jnp.array([[1.5, -0.4], [-0.4, 0.8]]))


def q_of(full):
    family = MultivariateNormalFamily(2) if full else NormalFamily(2)
    precision, site = (MATRIX, 0.2 * MATRIX) if full else (jnp.diagonal(MATRIX), jnp.array([0.4, 0.1]))
    return family, GaussianNatural(jnp.array([1.0, -0.5]), precision), GaussianNatural(jnp.array([0.2, 0.1]), site)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StochasticEP(power=0.0), r"StochasticEP\(power=0.0\).*StochasticNaturalGradient"),
        (lambda: StochasticEP(damping=2.0), "full step"),
        (lambda: StochasticEP(moments="gibbs"), "importance"),
        (lambda: AlphaDivergence(0.0), r"AlphaDivergence\(alpha=0.0\).*LocalELBO"),
        (lambda: AlphaDivergence(1.5), r"\(0, 1\]"),
        (lambda: AlphaDivergence(True), r"\(0, 1\]"),
        (lambda: AlphaDivergence(0.5, num_steps=0), "positive int"),
        (lambda: AlphaDivergence(0.5, average=1.0), "share of the steps"),
        (lambda: AlphaDivergence(0.5, "adam"), "optax or numpyro optimiser"),
        (lambda: AlphaDivergence(0.5, damping=0.0), "full step"),
        (lambda: AlphaDivergence(0.5, moments=3), "ImportanceMoments"),
    ],
)
def test_settings_are_checked(make, words):
    with pytest.raises(PVIError, match=words):
        make()


@pytest.mark.parametrize("solver", [StochasticEP(), AlphaDivergence(0.5)], ids=lambda s: type(s).__name__)
def test_structures_that_do_not_fit_are_named(solver):
    with pytest.raises(PVIError, match="'affine'; leave"):
        type(solver)(0.5, moments="exact").check("affine", True, "likelihood in plate 'data'")
    for structure in ("draws", "local"):
        solver.check(structure, False, "likelihood in plate 'data'")


def test_the_prior_factor_is_matched_at_the_same_power():
    moments = ImportanceMoments(64)
    assert solver_of_prior(StochasticEP(0.3, moments)) == PowerEP(0.3, moments)
    assert solver_of_prior(AlphaDivergence(0.3, moments=moments)) == PowerEP(0.3, moments)
    assert solver_of_prior(NaturalGradient()) == NaturalGradient()


@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
def test_points_are_normalisable_qs(full, x64):
    """A point's natural parameters are those of the location and precision that it stands for."""
    family, q, _ = q_of(full)
    local = _Whitened(family, q, family.moments(q), False)
    point = jnp.linspace(-0.7, 0.9, local.size)
    shift, root = local.split(point)
    new = q + local.change(point)
    moments = family.moments(q)
    scale = np.asarray(moments.scale)
    loc = np.asarray(moments.loc) + (scale @ shift if full else scale * shift)
    precision = np.linalg.inv(scale).T @ root @ root.T @ np.linalg.inv(scale) if full else (root / scale) ** 2
    wanted = precision @ loc if full else precision * loc
    tolerance = 1e-10 if x64 else 1e-4
    np.testing.assert_allclose(new.precision, precision, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(new.precision_mean, wanted, rtol=tolerance, atol=tolerance)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(local.change(0.0 * point))) < tolerance


@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
def test_the_slope_is_that_of_the_divergence(full, x64):
    """By moments, against the derivative of the divergence's own value, in closed form for a quadratic factor."""
    family, q, site = q_of(full)
    solver, local = AlphaDivergence(0.4), _Whitened(family, q, family.moments(q), False)

    def loss(point):
        change = local.change(point)
        found = exact_tilted(family, FACTOR, jnp.zeros(()), q + change, site + change, 0.4)
        return solver._loss(local, q, point, found)

    point = jnp.linspace(0.3, -0.2, local.size)
    wanted = jax.jit(jax.grad(lambda x: loss(x)[0]))(point)
    np.testing.assert_allclose(jax.jit(loss)(point)[1], wanted, rtol=1e-8 if x64 else 2e-2, atol=1e-9 if x64 else 1e-3)
    assert float(jnp.max(jnp.abs(wanted))) > 0.05


class Quadratic:
    """A Gaussian factor as a solver that matches moments sees it."""

    def __init__(self, family, factor):
        self.family, self.factor, self.rules = family, factor, match_rules(AlphaDivergence(1.0), 2)

    def tilted(self, q, site, power, key):
        return exact_tilted(self.family, self.factor, jnp.zeros(()), q, site, power)


def visit(solver, factor):
    family, q, site = q_of(True)
    state = solver.init(family, q.precision.dtype)
    run = jax.jit(lambda key: solver.solve(Quadratic(family, factor), q - site, site, state, key))
    return site, run(jax.random.key(0))


@pytest.mark.parametrize(
    "solver",
    [
        AlphaDivergence(1.0, optax.sgd(0.4), num_steps=60),
        pytest.param(AlphaDivergence(0.4, optax.lbfgs(), num_steps=15), marks=pytest.mark.slow),
    ],
    ids=["gradient", "line-search"],
)
def test_a_visit_to_a_quadratic_factor_ends_at_it(solver, x64):
    """Under full covariance a Gaussian tilted distribution is met at every alpha: the site is the factor."""
    _, result = visit(solver, FACTOR)
    assert bool(result.moved)
    np.testing.assert_allclose(result.site.precision, FACTOR.precision, atol=1e-4 if x64 else 5e-3)
    np.testing.assert_allclose(result.site.precision_mean, FACTOR.precision_mean, atol=1e-4 if x64 else 5e-3)


def test_moments_that_fail_keep_the_site():
    site, result = visit(AlphaDivergence(0.5, optax.sgd(0.4), num_steps=2), FACTOR * jnp.nan)
    assert not bool(result.moved)
    np.testing.assert_array_equal(result.site.precision, site.precision)
