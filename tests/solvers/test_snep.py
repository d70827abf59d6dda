"""SNEP's settings, its steps in mean space, and what it says when moments fail."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import polygamma

from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import Tilted
from numpyro_pvi.families import (
    GammaFamily,
    GaussianNatural,
    MultivariateNormalFamily,
    NormalFamily,
    ProductFamily,
    ProductNatural,
    ScalarNormalFamily,
)
from numpyro_pvi.solvers import SNEP, match_rules, trouble_of
from numpyro_pvi.solvers._matching import HELD
from numpyro_pvi.solvers._snep import metric_widening, posterior_step, site_step, widening

FAMILY = MultivariateNormalFamily(2)
Q = GaussianNatural(jnp.array([1.0, -0.5]), jnp.array([[2.0, 0.3], [0.3, 1.0]]))
OTHER = GaussianNatural(jnp.array([0.2, 0.7]), jnp.array([[3.0, -0.4], [-0.4, 0.8]]))
SITE = GaussianNatural(jnp.array([0.2, 0.1]), jnp.array([[0.5, 0.1], [0.1, 0.2]]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.5}, "at least 1; 1 is EP"),
        ({"beta": {"a": 0.0}}, "for group 'a'"),
        ({"beta": ()}, "one number per group"),
        ({"num_steps": 0}, "inner steps"),
        ({"outer_period": 1.5}, "inner steps"),
        ({"step_size": 0.0}, "beta / \\(1 \\+ beta\\)"),
        ({"step_size": "fast"}, "'auto'"),
        ({"damping": 2.0}, "full step"),
        ({"metric": "euclidean"}, "'posterior' or 'site'"),
        ({"moments": "gibbs"}, "importance"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(PVIError, match=words):
        SNEP(**options)


@pytest.mark.parametrize("structure", ["affine", "local"])
def test_structures_that_do_not_fit_are_named(structure):
    with pytest.raises(PVIError, match=f"'{structure}'"):
        SNEP(moments="exact").check(structure, True, "likelihood in plate 'data'")


def groups_of(*labels):
    return SimpleNamespace(num_groups=len(labels), labels=labels, continued=False, known=None)


@pytest.mark.parametrize(("beta", "wanted"), [(2.0, [2, 2, 2]), ((1.0, 3.0, 2.0), [1, 3, 2]), ({"b": 4.0}, [1, 4, 1])])
def test_beta_by_group(beta, wanted):
    solver = SNEP(beta=beta)
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, (3, *x.shape)), solver.init(FAMILY, Q.precision.dtype))
    np.testing.assert_array_equal(solver.init_groups(groups_of("a", "b", "c"), start).beta, wanted)
    assert solver.by_label == isinstance(beta, dict)


@pytest.mark.parametrize(("beta", "words"), [({"d": 2.0}, "names group 'd'"), ((1.0, 2.0), "2 numbers for 3 groups")])
def test_betas_that_fit_no_group_are_refused(beta, words):
    solver = SNEP(beta=beta)
    with pytest.raises(PVIError, match=words):
        solver.init_groups(groups_of("a", "b", "c"), solver.init(FAMILY, Q.precision.dtype))


# ------------------------------------------------------------------------------------------------ steps in mean space


def in_mean_space(one, other, step):
    """Moments of the mixture's moments, in NumPy."""
    pairs = []
    for natural in (one, other):
        precision = np.asarray(natural.precision, float)
        covariance = np.linalg.inv(np.diag(precision) if precision.ndim == 1 else precision)
        loc = covariance @ np.asarray(natural.precision_mean, float)
        pairs.append((loc, covariance + np.outer(loc, loc)))
    loc, second = ((1 - step) * a + step * b for a, b in zip(*pairs, strict=True))
    return loc, second - np.outer(loc, loc)


@pytest.mark.parametrize("step", [0.0, 0.3, 1.0])
def test_a_step_mixes_expected_statistics(step, x64):
    tolerance = 1e-12 if x64 else 1e-5
    change = posterior_step(FAMILY, Q, OTHER - Q, jnp.asarray(step))
    loc, covariance = in_mean_space(Q, OTHER, step)
    new = Q + change
    np.testing.assert_allclose(np.linalg.inv(np.asarray(new.precision, float)), covariance, atol=tolerance)
    np.testing.assert_allclose(FAMILY.moments(new).loc, loc, atol=tolerance)


@pytest.mark.parametrize("step", [0.3, 1.0])
def test_a_mean_field_step_mixes_marginals(step, x64):
    one, other = (GaussianNatural(n.precision_mean, jnp.diagonal(n.precision)) for n in (Q, OTHER))
    new = one + posterior_step(NormalFamily(2), one, other - one, jnp.asarray(step))
    loc, covariance = in_mean_space(one, other, step)
    np.testing.assert_allclose(1 / new.precision, np.diag(covariance), atol=1e-12 if x64 else 1e-5)
    np.testing.assert_allclose(new.precision_mean / new.precision, loc, atol=1e-12 if x64 else 1e-5)


def test_small_steps_keep_their_digits():
    """In float32 too: a step that is 1e-6 of q changes it by that, not by rounding."""
    gap = Q * 1e-6
    change = posterior_step(FAMILY, Q, gap, jnp.asarray(1.0))
    np.testing.assert_allclose(change.precision, gap.precision, rtol=1e-4)
    np.testing.assert_allclose(change.precision_mean, gap.precision_mean, rtol=1e-4)


def test_a_sites_own_step_says_when_it_leaves_the_domain():
    far = GaussianNatural(jnp.array([0.0, 0.0]), 50 * jnp.eye(2)) - Q
    change, inside = site_step(FAMILY, OTHER * 10.0, Q, far, jnp.asarray(1.0))
    assert not bool(inside)
    change, inside = site_step(FAMILY, OTHER, Q, far, jnp.asarray(0.05))
    assert bool(inside)
    own, here, there = (FAMILY.natural_to_mean(x) for x in (OTHER, Q, Q + far))
    new = FAMILY.natural_to_mean(OTHER + change)
    np.testing.assert_allclose(new.first, own.first + 0.05 * (there.first - here.first), atol=1e-5)
    np.testing.assert_allclose(new.second, own.second + 0.05 * (there.second - here.second), atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- visits


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A factor whose moments are given, and that remembers from where they were asked for."""

    family: MultivariateNormalFamily
    found: Tilted
    asked: Any
    rules = match_rules(SNEP(), 2)

    def tilted(self, q, site, power, key):
        self.asked.append((q, power))
        return self.found


def visit(change, solver=None, state=None, **fields):
    solver, zero = solver or SNEP(), jnp.zeros((), Q.precision.dtype)
    found = Tilted(
        change, zero, zero, zero + jnp.nan, zero, zero + 1, jnp.int32(0), *(jnp.array(f) for f in (False, True, True))
    )
    factor = Scripted(FAMILY, found._replace(**fields), [])
    state = solver.init(FAMILY, Q.precision.dtype) if state is None else state
    return solver.solve(factor, Q - SITE, SITE, state, jax.random.key(0)), factor.asked


def test_the_first_step_anchors_at_q_and_takes_beta_over_one_plus_beta():
    solver, gap = (
        SNEP(beta=3.0, outer_period=2),
        GaussianNatural(jnp.array([0.2, 0.7]), jnp.diag(jnp.array([0.5, 0.1]))),
    )
    result, asked = visit(gap * 3.0, solver)
    np.testing.assert_allclose(asked[0][0].precision, Q.precision, rtol=1e-6)
    np.testing.assert_allclose(asked[0][1], 1 / 3, rtol=1e-6)
    wanted = posterior_step(FAMILY, Q, gap, jnp.asarray(0.75))
    np.testing.assert_allclose(result.site.precision, SITE.precision + wanted.precision, rtol=1e-4)
    # The second inner step is from the same anchor, the third from a new one.
    state = result.state._replace(anchor=OTHER)
    anchors = [visit(Q * 0.0, solver, state._replace(age=jnp.int32(age)))[1][0][0] for age in (1, 2)]
    np.testing.assert_array_equal(anchors[0].precision, OTHER.precision)
    np.testing.assert_allclose(anchors[1].precision, Q.precision, rtol=1e-6)


def test_a_tilted_distribution_wider_than_q_shortens_the_step():
    wanted = posterior_step(FAMILY, Q, Q * -0.5, jnp.asarray(1 / 5))
    np.testing.assert_allclose(visit(Q * -0.5)[0].site.precision, SITE.precision + wanted.precision, rtol=1e-4)
    other = OTHER.precision
    ratios = np.linalg.eigvals(np.asarray(Q.precision, float) @ np.linalg.inv(np.asarray(other, float)))
    np.testing.assert_allclose(widening(FAMILY, Q, OTHER - Q), np.max(ratios.real), rtol=1e-5)
    one, two = (GaussianNatural(n.precision_mean, jnp.diagonal(n.precision)) for n in (Q, OTHER))
    np.testing.assert_allclose(
        widening(NormalFamily(2), one, two - one), np.max(one.precision / two.precision), rtol=1e-5
    )


def _normal_metric(precision_mean, precision):
    """Covariance of x and -x^2/2."""
    v = 1 / precision
    m = precision_mean * v
    return np.array([[v, -m * v], [-m * v, m**2 * v + v**2 / 2]])


def _gamma_metric(log, rate):
    """Covariance of log x and -x."""
    return np.array([[float(polygamma(1, log + 1)), -1 / rate], [-1 / rate, (log + 1) / rate**2]])


@pytest.mark.parametrize(
    ("family", "metric", "one", "other"),
    [
        (ScalarNormalFamily(), _normal_metric, (100 / 0.002**2, 1 / 0.002**2), (100.001 / 0.003**2, 1 / 0.003**2)),
        (ScalarNormalFamily(), _normal_metric, (2000 / 0.2**2, 1 / 0.2**2), (2000.1 / 0.1**2, 1 / 0.1**2)),
        (GammaFamily(), _gamma_metric, (2e5, 3.0), (1e5, 1.5)),
    ],
)
def test_a_narrow_member_has_a_metric_to_be_wider_than(family, metric, one, other, x64):
    """In single precision, too, where the metric itself is singular to rounding; beside matrices of double precision."""
    zeros = family.zeros((), jnp.result_type(float))
    both = [
        jax.tree.unflatten(jax.tree.structure(zeros), [jnp.asarray(x, jnp.result_type(float)) for x in own])
        for own in (one, other)
    ]
    exact = [metric(*(float(x) for x in jax.tree.leaves(own))) for own in both]
    whole = ProductFamily([("x", family)])
    q, new = (ProductNatural({"x": own}) for own in both)
    wanted = np.max(np.linalg.eigvals(np.linalg.solve(*exact)).real)
    np.testing.assert_allclose(metric_widening(whole, q, new - q), wanted, rtol=1e-6 if x64 else 0.05)


def test_damping_and_a_schedule_of_steps():
    wanted = posterior_step(FAMILY, Q, OTHER - Q, jnp.asarray(0.2))
    state = SNEP().init(FAMILY, Q.precision.dtype)._replace(age=jnp.int32(4))
    result, _ = visit(OTHER - Q, SNEP(step_size=halving, damping=0.5), state)
    np.testing.assert_allclose(result.site.precision, SITE.precision + 0.5 * wanted.precision, rtol=1e-4)


def halving(count):
    return 1.0 / (1.0 + count)


def test_turning_moves_halve_a_groups_own_share():
    push = GaussianNatural(jnp.array([0.5, 0.1]), jnp.zeros((2, 2)))
    state, shares = None, []
    for sign in (1, -1, 1):
        result, _ = visit(push * sign, state=state)
        state = result.state
        shares.append(float(state.step))
    np.testing.assert_allclose(shares, [1, 0.5, 0.25])


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        (Q * jnp.nan, {"valid": jnp.array(False), "finite": jnp.array(False)}, "not finite anywhere under its anchor"),
        (Q * jnp.nan, {"valid": jnp.array(False)}, "cannot be normalised.*larger beta"),
        (Q * -1.5, {}, "cannot be normalised"),
        (Q * 0.1, {"temper": jnp.array(0.5), "ess": jnp.array(7.0)}, "effective sample size.* 7,.*num_draws"),
        (Q * 0.1, {"temper": jnp.array(0.5)}, "improper at the full power"),
        (Q * 0.1, {"held": jnp.int32(2)}, "2 row"),
    ],
)
def test_moments_that_fail_are_named_with_a_remedy(change, fields, words):
    result, _ = visit(change, **fields)
    text = trouble_of(result.state)
    assert text is not None
    with pytest.raises(PVIError, match=words):
        raise PVIError(text)
    if "valid" in fields or words == "cannot be normalised":
        assert not bool(result.moved)
        np.testing.assert_array_equal(result.site.precision, SITE.precision)


def test_a_visit_that_went_well_says_nothing():
    assert trouble_of(visit(Q * 0.1)[0].state) is None
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), visit(Q * 0.1)[0].state)
    assert trouble_of(stacked, 1) is None
    assert trouble_of(stacked._replace(trouble=jnp.array([0, HELD])), 1) is not None


def test_anchors_that_outlast_a_visit_move_sites_as_if_alone():
    assert not SNEP().moves_alone and not SNEP(num_steps=5, outer_period=5).moves_alone
    assert SNEP(num_steps=5, outer_period=6).moves_alone
