"""Tilted moments of products of families where they are hard: far, narrow, heavy at an end, improper, in two pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_pvi.expectations import draw, grid_of, tilted_by_draws, tilted_on_grid
from numpyro_pvi.families import (
    BernoulliFamily,
    BernoulliNatural,
    BetaFamily,
    BetaNatural,
    DirichletFamily,
    DirichletNatural,
    GammaFamily,
    GammaNatural,
    IndependentFamily,
    MarkovGaussianFamily,
    NormalFamily,
    ProductFamily,
    ProductNatural,
    ScalarNormalFamily,
    ScalarNormalNatural,
    VonMisesFamily,
    VonMisesNatural,
    WishartFamily,
    WishartNatural,
)

NONE = jnp.zeros(())


def product(family, natural):
    return ProductFamily({"x": family}), ProductNatural({"x": natural})


def affine(family, factor):
    """A factor that is affine in the statistics: its own natural parameters are the change that matching asks for."""
    return lambda values: jax.vmap(lambda x: family.inner(factor, family.sufficient_statistics(x)))(values["x"])


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def on_grid(family, factor, q, site, power):
    grid = grid_of(family)
    assert grid is not None
    return tilted_on_grid(grid, factor, q, site, power)


def gamma(a, b):
    return GammaNatural(jnp.asarray(a - 1.0), jnp.asarray(1.0 * b))


@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "q", "factor"),
    [
        # A million events under a vague prior: a thousandth of its width, and far from it.
        (GammaFamily(), gamma(1, 1e-3), GammaNatural(jnp.asarray(1e6), jnp.asarray(10.0))),
        # Most mass near zero, down to where floats end.
        (GammaFamily(), gamma(0.05, 1), GammaNatural(jnp.asarray(0.02), jnp.asarray(0.5))),
        (BetaFamily(), BetaNatural(NONE - 0.99, NONE + 3), BetaNatural(NONE + 400, NONE + 2)),
        (ScalarNormalFamily(), ScalarNormalNatural(NONE, NONE + 1), ScalarNormalNatural(NONE + 4e5, NONE + 1e4)),
        (VonMisesFamily(), VonMisesNatural(NONE, NONE), VonMisesNatural(NONE - 900, NONE + 1e-3)),
        # Every member has a coordinate of its own.
        (
            IndependentFamily(DirichletFamily(2), (2,)),
            DirichletNatural(jnp.array([[-0.2, 1.0], [2.0, 0.5]])),
            DirichletNatural(jnp.array([[30.0, 2.0], [1.0, 4.0]])),
        ),
    ],
    ids=["far", "at-zero", "beta", "normal", "circle", "two-members"],
)
def test_affine_factors_are_found_wherever_they_are(family, q, factor):
    whole, natural = product(family, q)
    found = on_grid(whole, affine(family, factor), natural, natural * 0.0, 1.0)
    assert bool(found.valid)
    assert float(found.temper) == 1.0
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (found.change, factor, q)), strict=True):
        np.testing.assert_allclose(a + c, b + c, rtol=1e-8, atol=1e-8)
    wanted = family.log_partition(q + factor) - family.log_partition(q)
    np.testing.assert_allclose(found.value, wanted, rtol=1e-9, atol=1e-9)


def test_shares_that_begin_at_an_edge_are_found_in_float32_as_well(x64):
    family, factor = DirichletFamily(3), DirichletNatural(jnp.array([200.0, 3.0, 1.0]))
    whole, natural = product(family, DirichletNatural(jnp.array([-0.9, 0.0, 5.0])))
    found = on_grid(whole, affine(family, factor), natural, natural * 0.0, 1.0)
    assert float(found.temper) == 1.0
    np.testing.assert_allclose(found.change.parts["x"].log, factor.log, rtol=1e-8 if x64 else 2e-3)


def test_an_improper_tilted_distribution_takes_less_of_the_power():
    """Cavity concentrations of -1 and 0.5 at powers 1 and a half; a factor that vanishes at zero needs no proper cavity."""
    family, q = product(GammaFamily(), gamma(2, 1))
    site = ProductNatural({"x": GammaNatural(jnp.asarray(3.0), jnp.asarray(0.0))})
    flat = on_grid(family, affine(GammaFamily(), gamma(1, 0.5)), q, site, 1.0)
    assert float(flat.temper) == 0.5
    np.testing.assert_allclose(flat.change.parts["x"].log, -3.0, rtol=1e-3)
    steep = on_grid(family, affine(GammaFamily(), gamma(5, 0.5)), q, site, 1.0)
    assert float(steep.temper) == 1.0
    np.testing.assert_allclose(steep.change.parts["x"].log, 1.0, rtol=1e-3)
    draws = draw(family, q, jax.random.key(0), 512)
    weighted = tilted_by_draws(family, draws, 0.0 * draws.values["x"], q, site, 1.0)
    assert float(weighted.temper) < 1.0


def test_points_where_a_factor_is_no_number_count_for_nothing(x64):
    """Beyond 60, where q times the factor has a mass of exp(-90): the closed form of the factor that is finite everywhere."""
    own, factor = gamma(3, 1), gamma(2, 0.5)
    family, q = product(GammaFamily(), own)
    whole = affine(GammaFamily(), factor)
    found = on_grid(family, lambda at: jnp.where(at["x"] > 60.0, jnp.nan, whole(at)), q, q * 0.0, 1.0)
    assert bool(found.valid)
    for a, b in zip(jax.tree.leaves(found.change), jax.tree.leaves(factor), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6 if x64 else 1e-3)
    wanted = GammaFamily().log_partition(own + factor) - GammaFamily().log_partition(own)
    np.testing.assert_allclose(found.value, wanted, rtol=1e-6 if x64 else 1e-3, atol=1e-3)


def test_nothing_finite_is_said():
    family, q = product(GammaFamily(), gamma(2, 1))
    found = on_grid(family, lambda values: values["x"] * jnp.nan, q, q * 0.0, 1.0)
    assert not bool(found.finite)
    assert not bool(found.valid)


def test_a_switch_and_a_location_are_summed_and_integrated(x64):
    """Two normals, of which a coin chooses the location: q (p)^1 in closed form."""
    family = ProductFamily({"m": ScalarNormalFamily(), "z": BernoulliFamily()})
    q = ProductNatural({"m": ScalarNormalNatural(NONE + 0.3, NONE + 0.5), "z": BernoulliNatural(NONE - 0.4)})

    def factor(values):
        return -0.5 * (1.7 - values["m"] - 2.0 * values["z"]) ** 2

    found = on_grid(family, factor, q, q * 0.0, 1.0)
    # Given z, m has precision 1.5 and is seen at 1.7 - 2 z.
    loc = (0.3 + np.array([1.7, -0.3])) / 1.5
    log_mass = 0.5 * 1.5 * loc**2 - 0.5 * np.array([1.7, -0.3]) ** 2 + np.array([0.0, -0.4])
    share = special.softmax(log_mass)
    mean = share @ loc
    variance = share @ (1 / 1.5 + loc**2) - mean**2
    tight = 1e-9 if x64 else 1e-4
    np.testing.assert_allclose(found.change.parts["m"].precision, 1 / variance - 0.5, rtol=tight)
    np.testing.assert_allclose(found.change.parts["m"].precision_mean, mean / variance - 0.3, rtol=tight)
    np.testing.assert_allclose(found.change.parts["z"].logit, log_mass[1] - log_mass[0] + 0.4, rtol=tight)


@pytest.mark.parametrize(
    ("family", "q", "factor"),
    [
        (
            WishartFamily(2),
            WishartNatural(NONE + 3, jnp.eye(2) + 0.3),
            WishartNatural(NONE + 0.5, jnp.array([[1.0, 0.4], [0.4, 0.3]])),
        ),
        (
            DirichletFamily(4),
            DirichletNatural(jnp.array([1.0, 2.0, 0.5, 1.0])),
            DirichletNatural(jnp.array([1.0, 0, 2, 0])),
        ),
    ],
    ids=["wishart", "dirichlet"],
)
def test_draws_of_affine_factors_have_no_noise(family, q, factor, x64):
    whole, natural = product(family, q)
    draws = draw(whole, natural, jax.random.key(1), 512)
    site = ProductNatural({"x": factor * 0.3})
    values = affine(family, factor)(draws.values)
    found = jax.jit(tilted_by_draws, static_argnums=0)(whole, draws, values, natural, site, 0.5)
    assert float(found.temper) == 1.0
    assert float(found.ess) < 500
    for a, b in zip(jax.tree.leaves(found.change.parts["x"]), jax.tree.leaves(factor * 0.7), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10 if x64 else 2e-3)
    wanted = (family.log_partition(q + factor * 0.35) - family.log_partition(q)) / 0.5
    np.testing.assert_allclose(found.value, wanted, rtol=1e-10 if x64 else 1e-3)
    assert float(found.noise) < (1e-10 if x64 else 1e-3)


def test_what_no_grid_covers():
    for family in (WishartFamily(2), DirichletFamily(4), NormalFamily(3), MarkovGaussianFamily(4)):
        assert grid_of(ProductFamily({"x": family})) is None
