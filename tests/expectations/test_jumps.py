"""Expectations of factors that jump: by values, beside closed forms.

Statistical bounds are five standard errors of a mean over independent sets of draws: a correct estimate of one number is outside
with probability below 1e-6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_pvi.expectations import MeanSpace, PointsProgram, ReparameterisedProgram, find_structure, with_draws
from numpyro_pvi.factors import rise
from numpyro_pvi.families import GaussianMoments, MultivariateNormalFamily, NormalFamily, ProductFamily

KEY = jax.random.key(0)
TIGHT = {"float32": 1e-4, "float64": 1e-10}[jnp.result_type(float).name]
SETS, PAIRS = 20_000, 8
HEIGHT, PLACE = 1.5, 0.4
LOC, SD, ROOT = np.array([0.2, -0.3]), np.array([0.7, 0.5]), np.array([[0.7, 0.2], [0.0, 0.5]])


def stepped(chunk, z):
    """A step in the first number beside what no cubic is."""
    return 0.2 * z[0] * z[1] - jnp.exp(1.2 * z[0]) - jnp.exp(-z[1]) + jnp.where(z[0] > PLACE, HEIGHT, 0.0)


def in_closed_form(loc, cov):
    """``(E f, E grad f, E hess f)``, the derivatives of the first in the mean."""
    sd, (m, n) = np.sqrt(np.diag(cov)), loc
    u = (m - PLACE) / sd[0]
    first, second = np.exp(1.2 * m + 0.72 * cov[0, 0]), np.exp(-n + 0.5 * cov[1, 1])
    value = 0.2 * (m * n + cov[0, 1]) - first - second + HEIGHT * stats.norm.cdf(u)
    gradient = [0.2 * n - 1.2 * first + HEIGHT * stats.norm.pdf(u) / sd[0], 0.2 * m + second]
    hessian = [[-1.44 * first - HEIGHT * u * stats.norm.pdf(u) / sd[0] ** 2, 0.2], [0.2, -second]]
    return value, np.array(gradient), np.array(hessian)


def gaussian(full):
    scale = jnp.asarray(ROOT if full else SD)
    family = MultivariateNormalFamily(2) if full else NormalFamily(2)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(scale) if full else scale))
    return family, GaussianMoments(jnp.asarray(LOC), scale, -log_det, jnp.array(True))


def made(name, by_values=True):
    """A program, q, and what it finds from a key; ``level`` as of its expectations."""
    family, q = gaussian(name == "full")
    if name == "many":
        program = ReparameterisedProgram(stepped, family, by_values)

        def noise(key):
            return jax.random.normal(key, (PAIRS, 2), q.loc.dtype)
    else:
        program = PointsProgram(stepped, family, "values" if by_values else "monte_carlo", PAIRS)

        def noise(key):
            return program.draw(key, q.loc.dtype)

    def found(key, moments=q, level=None):
        own = program.expected((jnp.zeros(1), None), moments, None, level, noise(key), False)
        precision = own.target.precision
        pull = precision @ moments.loc if family.full else precision * moments.loc
        return own.value, own.target.precision_mean - pull, -precision

    return q, found


def outside(draws, wanted):
    """Largest distance of means from what they should be, in standard errors, by number; rounding counts as none."""
    draws = np.asarray(draws, np.float64)
    error = draws.std(0) / np.sqrt(len(draws)) + 1e-5
    return float(np.max(np.abs(draws.mean(0) - wanted) / error))


def estimates(name, by_values=True):
    _, found = made(name, by_values)
    return jax.jit(jax.vmap(found))(jax.random.split(KEY, SETS))


def wanted(name):
    value, gradient, hessian = in_closed_form(LOC, ROOT @ ROOT.T if name == "full" else np.diag(SD**2))
    return value, gradient, hessian if name == "full" else np.diagonal(hessian)


WAYS = ("full", "mean-field", "many")


@pytest.mark.parametrize("name", WAYS)
def test_values_say_what_slopes_do_not(name):
    value, gradient, hessian = estimates(name)
    expected = wanted(name)
    assert outside(value, expected[0]) < 5 and outside(gradient, expected[1]) < 5 and outside(hessian, expected[2]) < 5


@pytest.mark.parametrize("name", WAYS)
def test_slopes_alone_are_seen_by_it(name):
    _, gradient, hessian = estimates(name, by_values=False)
    assert outside(gradient, wanted(name)[1]) > 50 and outside(hessian, wanted(name)[2]) > 10


@pytest.mark.parametrize("name", WAYS)
def test_the_value_has_these_derivatives(name):
    """Of solvers that differentiate it: in the mean the gradient, in a deviation the curvature times it, on every draw."""
    q, found = made(name)
    _, gradient, hessian = jax.jit(found)(KEY)

    def value(loc, scale):
        return found(KEY, q._replace(loc=loc, scale=scale), 0)[0]

    along_loc, along_scale = jax.jit(jax.grad(value, argnums=(0, 1)))(q.loc, q.scale)
    np.testing.assert_allclose(along_loc, gradient, rtol=100 * TIGHT, atol=TIGHT)
    if name != "full":
        np.testing.assert_allclose(along_scale, hessian * q.scale, rtol=100 * TIGHT, atol=TIGHT)


# ------------------------------------------------------------------------------------------------------------- families


def test_messages_of_a_family_that_is_drawn_are_the_gradient_in_mean_space():
    """By the score of a gamma, with a site that stands beside the factor: derivatives of what SciPy makes of the expectation."""
    a, b, height, place = 5.0, 2.0, 1.5, 2.2
    law = dist.Gamma(a, b)
    family = ProductFamily.for_distributions({"x": law})
    natural = family.from_distribution({"x": law})

    def density(values):
        return jnp.where(values["x"] > place, height, 0.0) + 0.7 * jnp.log(values["x"])

    structure = find_structure(family, natural, lambda v: density(v)[None], KEY, "auto", "test factor")
    assert structure.by_slopes == ("x",) and not structure.by_values
    structure = with_draws(structure, family, ("x",), "auto", "factor", ("x",))
    assert structure.by_values == structure.drawn == ("x",) and not structure.by_slopes
    assert structure.expectation == "draws of x; by values in x"
    slopes = dataclasses.replace(
        structure, roles=tuple(dataclasses.replace(role, by_values=False) for role in structure.roles)
    )

    def run(key, structure, site):
        space = MeanSpace(family, structure, 50)
        variables, rest = space.variables(natural)
        beside = {"x": jax.tree.map(lambda x: jnp.full_like(x, site), natural.parts["x"])}
        (_, value), gradient = jax.value_and_grad(
            lambda v: space.left_over(v, rest, density, key, None, beside), has_aux=True
        )(variables)
        message = space.message(natural, variables, gradient).parts["x"] + beside["x"]
        return jnp.stack([value, *jax.tree.leaves(message)])

    keys = jax.random.split(KEY, 200)
    found = jax.jit(jax.vmap(lambda key: run(key, structure, 0.3)))(keys)
    without = jax.jit(jax.vmap(lambda key: run(key, slopes, 0.3)))(keys)

    def expected(a, b):
        return height * stats.gamma.sf(place, a, scale=1 / b) + 0.7 * (special.digamma(a) - np.log(b))

    def mean(a, b):
        return np.array([special.digamma(a) - np.log(b), -a / b])

    step = 1e-4
    slope = np.array([expected(a + step, b) - expected(a - step, b), expected(a, b + step) - expected(a, b - step)])
    jacobian = np.stack([mean(a + step, b) - mean(a - step, b), mean(a, b + step) - mean(a, b - step)])
    wanted = np.array([expected(a, b), *np.linalg.solve(jacobian, slope)])
    assert outside(found, wanted) < 5
    assert outside(without, wanted) > 20


# ---------------------------------------------------------------------------------------------------------------- rises


def test_what_slopes_say_of_a_line():
    """A smooth function to rounding, with little that may be missed; of a step neither says anything."""
    whole, missed = rise(lambda t: {"smooth": jnp.exp(-((t - 0.3) ** 2)), "step": jnp.where(t > 0.37, 2.0, 0.0)}, float)
    np.testing.assert_allclose(whole["smooth"], np.exp(-0.49) - np.exp(-0.09), atol=1e-6 + TIGHT)
    assert missed["smooth"] < 0.01 and whole["step"] == missed["step"] == 0.0


@pytest.mark.parametrize("count", [1, 2, 6, 100])
def test_what_nodes_miss_of_kinks_is_told(count):
    """Wherever they are, and not many times over: of several in a sum as well, of either sign."""
    rng = np.random.default_rng(0)
    places, signs = rng.uniform(size=(count, 2_000)), rng.choice([-1.0, 1.0], size=(count, 1))
    whole, missed = rise(lambda t: jnp.sum(jnp.asarray(signs) * jnp.abs(t - jnp.asarray(places)), axis=0), float)
    error = np.abs(np.asarray(whole) - np.sum(signs * (np.abs(1 - places) - places), axis=0))
    assert np.mean(error > missed + 100 * TIGHT) < 0.005
    assert np.median(missed / np.maximum(error, 1e-3)) < 40


def test_what_has_reverse_derivatives_alone_is_not_looked_at():
    @jax.custom_vjp
    def cube(t):
        return t**3

    cube.defvjp(lambda t: (cube(t), t), lambda t, g: (3 * t**2 * g,))
    whole, missed = rise(cube, float)
    assert whole == 1.0 and missed == 0.0
