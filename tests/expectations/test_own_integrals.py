"""Integrals of rows' factors over latents of their own, by sums over grids: values known by name, and what counts as unknown."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_pvi.expectations import OwnGrids, grid_of, own_draws, own_grid, own_integral, tilted_on_grid
from numpyro_pvi.families import GammaFamily, ProductFamily, ProductNatural, ScalarNormalFamily

X64 = jnp.result_type(float).name == "float64"
FAMILY = ProductFamily([("z", ScalarNormalFamily())])


def grids(rows, counted=None):
    one = ProductNatural({"z": ScalarNormalFamily().from_distribution(dist.Normal(0.0, 1.0))})
    q = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.result_type(float)), (rows, *jnp.shape(x))), one)
    return OwnGrids(own_grid(FAMILY), q, jnp.ones(rows, bool) if counted is None else counted)


def integrals(own, factor):
    return own.integrals(own.windows(factor), factor)


def test_mass_is_found_however_far_and_narrow():
    """A normal's density has integral 1 and its own mean; of rows that do not count everything is 0."""
    loc, scale = jnp.array([0.0, 40.0, -3e3, 5.0]), jnp.array([1.0, 0.01, 10.0, 1.0])
    own = grids(4, jnp.arange(4) < 3)
    value, means = integrals(own, lambda at: dist.Normal(loc[:, None], scale[:, None]).log_prob(at["z"]))
    # Rounding of z - loc over the scale is all that is left.
    np.testing.assert_allclose(value, 0.0, atol=1e-9 if X64 else 1e-3)
    np.testing.assert_allclose(jax.tree.leaves(means["z"])[0][:3], loc[:3], rtol=1e-9 if X64 else 1e-5, atol=1e-5)


def test_values_and_slopes_are_the_marginals():
    """A Poisson count with a gamma rate is negative binomial, and so are its slopes in the gamma's rate."""
    family = ProductFamily([("rate", GammaFamily())])
    counts = jnp.arange(5.0) * 7
    one = ProductNatural({"rate": GammaFamily().from_distribution(dist.Gamma(2.0, 1.0))})
    q = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.result_type(float)), (5, *jnp.shape(x))), one)
    own = OwnGrids(own_grid(family), q, jnp.ones(5, bool))

    def marginal(b):
        def factor(own_b):
            return lambda at: (
                dist.Gamma(2.0, own_b).log_prob(at["rate"]) + dist.Poisson(at["rate"]).log_prob(counts[:, None])
            )

        windows = own.windows(factor(jax.lax.stop_gradient(b)))
        return own.integrals(windows, factor(b))[0].sum()

    (value, slope), bend = jax.value_and_grad(marginal)(0.7), jax.hessian(marginal)(0.7)
    y = np.arange(5) * 7
    tight = 1e-9 if X64 else 1e-4
    np.testing.assert_allclose(value, stats.nbinom.logpmf(y, 2, 0.7 / 1.7).sum(), rtol=tight)
    np.testing.assert_allclose(slope, (2 / 0.7 - (2 + y) / 1.7).sum(), rtol=tight)
    # Every derivative weighs the ends of the grid more: two digits less.
    np.testing.assert_allclose(bend, (-2 / 0.7**2 + (2 + y) / 1.7**2).sum(), rtol=1e3 * tight if X64 else 1e-3)


def test_what_the_points_do_not_tell_is_unknown():
    """A comb finer than the points; a density without an end; one that is no number beside its mass. Zero is known."""
    factors = [
        lambda z: -0.5 * z**2 + 20.0 * jnp.sin(300.0 * z),
        lambda z: 0.0 * z,
        lambda z: jnp.where(z > 0.5, jnp.nan, -0.5 * z**2),
        lambda z: jnp.full_like(z, -jnp.inf),
    ]
    value, _ = integrals(grids(4), lambda at: jnp.stack([f(at["z"][k]) for k, f in enumerate(factors)]))
    assert np.isnan(value[:3]).all()
    assert value[3] == -np.inf


@pytest.mark.parametrize("lost", [True, False])
def test_a_grid_that_does_not_know_a_factor_where_mass_is_says_so(lost):
    """Points beside the mass at which a factor is no number are not taken for points at which it is 0."""
    q = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.result_type(float)),
        ProductNatural({"z": ScalarNormalFamily().from_distribution(dist.Normal(0.0, 1.0))}),
    )

    def factor(values):
        z = values["z"]
        return jnp.where(z > (0.5 if lost else 30.0), jnp.nan, -0.5 * (z - 1.0) ** 2)

    found = tilted_on_grid(grid_of(FAMILY), factor, q, q * 0.0, 1.0)
    assert bool(found.valid) != lost


def test_closed_forms_of_many_rows_call_no_library_that_waits_for_threads():
    """Two batches of LAPACK's triangular solves at once wait for each other's threads for ever where there are two."""
    family = ProductFamily([("rate", GammaFamily())])
    rows, count = 3, 16
    member = GammaFamily().from_distribution(dist.Gamma(2.0, 1.0))
    drawn = GammaFamily().sample_with_statistics(member, jax.random.key(0), (count,))
    natural = ProductNatural({"rate": member})
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), (natural, {"rate": drawn[1]}))

    def values(shares):
        made = jax.vmap(lambda *own: own_draws(family, *own, jnp.zeros(count)))(*many)
        return jax.vmap(lambda share: jax.vmap(lambda own: own_integral(family, own, -share * drawn[0])[0])(made))(
            shares
        )

    lowered = jax.jit(values).lower(jnp.arange(1.0, 5.0))
    assert "trsm" not in lowered.as_text()
    np.testing.assert_allclose(values(jnp.ones(1)), 0.0, atol=1e-10 if X64 else 1e-4)
