"""Quantiles of gammas from a table, against SciPy's; and what quadrature makes of them, against closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_pvi.families import GammaFamily, InverseGammaFamily, pair_rule
from numpyro_pvi.families._gamma_quantiles import log_gamma_quantile

Z = np.array([-6.0, -3.0, -1.0, -0.2, 0.0, 0.5, 2.0, 4.0, 6.0])


def wanted(z, a):
    with np.errstate(all="ignore"):
        x = np.where(z <= 0, special.gammaincinv(a, stats.norm.cdf(z)), special.gammainccinv(a, stats.norm.sf(z)))
    return np.log(x)


@pytest.mark.parametrize(
    ("a", "tolerance"), [(0.05, 1e-5), (0.4, 1e-6), (3.0, 1e-7), (40.0, 1e-7), (2900.0, 1e-7), (2e4, 1e-4)]
)
def test_they_are_those_of_scipy(a, tolerance, x64):
    found = jax.vmap(log_gamma_quantile, (0, None))(jnp.asarray(Z), jnp.asarray(a))
    error = (np.asarray(found, float) - wanted(Z, a)) / max(a**-0.5, 1 / a)
    # In single precision log x itself is rounded.
    rounding = 0.0 if x64 else 1e-4 + 2e-7 * abs(np.log(a)) * a**0.5
    assert np.max(np.abs(error)) < tolerance + rounding


@pytest.mark.parametrize("a", [0.4, 3.0, 40.0])
def test_their_slope_in_the_concentration(a, x64):
    # That of a draw, whose error is small where draws are.
    z, step = Z[1:-1], 1e-3 * a
    slopes = jax.vmap(jax.grad(log_gamma_quantile, 1), (0, None))(jnp.asarray(z), jnp.asarray(a))
    differences = (wanted(z, a + step) - wanted(z, a - step)) / (2 * step)
    # Second order in the step.
    np.testing.assert_allclose(slopes, differences, rtol=1e-4 if x64 else 1e-3, atol=1e-5 / a)


def closed(a, b):
    """E log y, E y, E 1/y and E 1/y^2 of a gamma."""
    return special.digamma(a) - np.log(b), a / b, b / (a - 1), b**2 / ((a - 1) * (a - 2))


@pytest.mark.parametrize(("a", "tolerance"), [(2.5, 1e-3), (4.0, 1e-6), (30.0, 1e-7)])
def test_expectations_at_the_nodes_are_closed_forms(a, tolerance, x64):
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    kept = np.abs(nodes) < 9
    nodes, weights = jnp.asarray(nodes[kept]), weights[kept] / weights[kept].sum()
    for family, sign in ((GammaFamily(), 1), (InverseGammaFamily(), -1)):
        rule = pair_rule(family)
        natural = type(family.zeros())(jnp.asarray(a - sign), jnp.asarray(1.7))
        at = functools.partial(rule.at_nodes, rule.node_coordinates(natural))
        y = np.asarray(jax.vmap(at)(nodes), float) ** sign
        found = [weights @ f(y) for f in (np.log, lambda y: y, lambda y: 1 / y, lambda y: y**-2.0)]
        np.testing.assert_allclose(found, closed(a, 1.7), rtol=tolerance if x64 else max(tolerance, 2e-4))


@pytest.mark.parametrize("family", [GammaFamily(), InverseGammaFamily()])
def test_messages_are_what_is_affine_in_the_statistics(family, x64):
    rule, kind = pair_rule(family), type(family.zeros())
    natural, site = kind(jnp.asarray(4.0), jnp.asarray(1.3)), kind(jnp.asarray(0.7), jnp.asarray(-0.4))
    nodes, weights = (jnp.asarray(x) for x in np.polynomial.hermite_e.hermegauss(16))

    def average(coordinates):
        values = jax.vmap(lambda z: family.inner(site, family.sufficient_statistics(rule.at_nodes(coordinates, z))))(
            nodes
        )
        return weights @ values / weights.sum()

    coordinates = rule.node_coordinates(natural)
    found = rule.node_message(coordinates, jax.grad(average)(coordinates))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(site), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4 if x64 else 5e-3)
