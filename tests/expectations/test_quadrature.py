"""Quadrature over affine predictors against dense integration that shares no code with it (NumPy panels, float64)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.scipy.special import ndtr
from numpy.testing import assert_allclose
from scipy import special

from numpyro_pvi.expectations.quadrature import (
    RULES,
    Share,
    choose_rule,
    expect_1d,
    expect_2d,
    gaussian_law,
    log_expectation_1d,
    rule_index,
)
from tests.conftest import X64

SDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MEANS = (0.0, 2.0, -10.0)
expit = special.expit


@dataclasses.dataclass(frozen=True)
class Link:
    """A row log-likelihood for JAX, with value and slope written again in NumPy."""

    row_fn: Callable
    value: Callable
    slope: Callable
    breaks: tuple[float, ...] = (0.0,)  # where its features are
    width: float = 1.0
    tilt: float = 0.0  # exponential growth rate: the mass moves to mean + tilt sd^2
    max_sd: float = 100.0  # beyond it the dtype overflows


def _student(u, scale, df, xp):
    return -0.5 * (df + 1) * xp.log1p(((u - 1) / scale) ** 2 / df)


def _student_slope(u, scale, df):
    return -(df + 1) * (u - 1) / (df * scale**2 + (u - 1) ** 2)


def _ordered(low, high):
    def row_fn(u):
        return jax.nn.log_sigmoid(high - u) + jax.nn.log_sigmoid(u - low) + np.log(-np.expm1(low - high))

    return Link(
        row_fn,
        lambda u: -np.logaddexp(0, u - high) - np.logaddexp(0, low - u) + np.log(-np.expm1(low - high)),
        lambda u: expit(low - u) - expit(u - high),
        (low, high),
    )


def _softplus_scale(u):
    scale = jax.nn.softplus(u)
    return -jnp.log(scale) - 0.5 * (1.3 / scale) ** 2


def _softplus_scale_slope(u):
    scale = np.logaddexp(0, u)
    return expit(u) * (1.69 / scale**3 - 1 / scale)


LINKS = {
    "logit": Link(jax.nn.log_sigmoid, lambda u: -np.logaddexp(0, -u), lambda u: expit(-u)),
    "binomial": Link(
        lambda u: 3 * u - 7 * jax.nn.softplus(u), lambda u: 3 * u - 7 * np.logaddexp(0, u), lambda u: 3 - 7 * expit(u)
    ),
    "probit": Link(
        jax.scipy.special.log_ndtr,
        special.log_ndtr,
        lambda u: np.exp(-0.5 * u * u - 0.5 * np.log(2 * np.pi) - special.log_ndtr(u)),
    ),
    "poisson": Link(
        lambda u: 3 * u - jnp.exp(u), lambda u: 3 * u - np.exp(u), lambda u: 3 - np.exp(u), (), tilt=1.0, max_sd=10.0
    ),
    "gamma": Link(
        lambda u: -2 * u - 3 * jnp.exp(-u),
        lambda u: -2 * u - 3 * np.exp(-u),
        lambda u: -2 + 3 * np.exp(-u),
        (),
        tilt=-1.0,
        max_sd=10.0,
    ),
    "negative_binomial": Link(
        lambda u: 3 * u - 5 * jax.nn.softplus(u - 0.5),
        lambda u: 3 * u - 5 * np.logaddexp(0, u - 0.5),
        lambda u: 3 - 5 * expit(u - 0.5),
        (0.5,),
    ),
    "softplus_poisson": Link(
        lambda u: 4 * jnp.log(jax.nn.softplus(u)) - jax.nn.softplus(u),
        lambda u: 4 * np.log(np.logaddexp(0, u)) - np.logaddexp(0, u),
        lambda u: expit(u) * (4 / np.logaddexp(0, u) - 1),
        max_sd=30.0,
    ),
    "softplus_scale": Link(
        _softplus_scale,
        lambda u: -np.log(np.logaddexp(0, u)) - 0.5 * (1.3 / np.logaddexp(0, u)) ** 2,
        _softplus_scale_slope,
        tilt=-2.0,
        max_sd=3.0,
    ),
    "student_narrow": Link(
        functools.partial(_student, scale=0.01, df=3, xp=jnp),
        functools.partial(_student, scale=0.01, df=3, xp=np),
        functools.partial(_student_slope, scale=0.01, df=3),
        (1.0,),
        0.01,
    ),
    "student": Link(
        functools.partial(_student, scale=1.0, df=4, xp=jnp),
        functools.partial(_student, scale=1.0, df=4, xp=np),
        functools.partial(_student_slope, scale=1.0, df=4),
        (1.0,),
    ),
    "cauchy": Link(
        functools.partial(_student, scale=0.1, df=1, xp=jnp),
        functools.partial(_student, scale=0.1, df=1, xp=np),
        functools.partial(_student_slope, scale=0.1, df=1),
        (1.0,),
        0.1,
    ),
    "laplace": Link(
        lambda u: -jnp.abs(u - 0.7) / 0.5,
        lambda u: -np.abs(u - 0.7) / 0.5,
        lambda u: -np.sign(u - 0.7) / 0.5,
        (0.7,),
        1e-10,
    ),
    "logistic": Link(
        lambda u: -(u - 0.7) / 0.1 - 2 * jax.nn.softplus(-(u - 0.7) / 0.1),
        lambda u: -(u - 0.7) / 0.1 - 2 * np.logaddexp(0, -(u - 0.7) / 0.1),
        lambda u: -10 + 20 * expit(-(u - 0.7) / 0.1),
        (0.7,),
        0.1,
    ),
    "ordered": _ordered(-2.0, 3.0),
    "ordered_close": _ordered(-0.3, 0.3),
}


def _panels(mean, sd, breaks, width, tilt=0.0):
    """Gauss-Legendre nodes and Gaussian weights on panels graded geometrically towards the breaks."""
    low = mean - 12 * sd + min(0.0, tilt * sd**2)
    high = mean + 12 * sd + max(0.0, tilt * sd**2)
    steps = np.concatenate([[0.0], np.geomspace(0.1 * width, high - low, 120)])
    edges = np.concatenate([np.linspace(low, high, 160), *(b + s * steps for b in breaks for s in (-1, 1))])
    edges = np.unique(np.clip(edges, low, high))
    nodes, weights = np.polynomial.legendre.leggauss(14)
    half = 0.5 * np.diff(edges)[:, None]
    u = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * nodes).ravel()
    z = (u - mean) / sd
    weight = (half * weights).ravel() * np.exp(-0.5 * z**2) / (sd * np.sqrt(2 * np.pi))
    kept = weight > 0
    return u[kept], z[kept], weight[kept]


def dense_1d(link, mean, sd):
    """E psi, E psi' and E psi'' (by Stein, so that kinks count), each with the E|.| of its integrand."""
    u, z, weight = _panels(mean, sd, link.breaks, link.width, link.tilt)
    terms = [weight * link.value(u), weight * link.slope(u)]
    terms.append(terms[1] * z / sd)
    return np.array([t.sum() for t in terms]), np.array([np.abs(t).sum() for t in terms])


CASES = [(name, mean, sd) for name, link in LINKS.items() for mean in MEANS for sd in SDS if sd <= link.max_sd]
NAMES, CASE_MEAN, CASE_SD = (np.array(column) for column in zip(*CASES, strict=True))


def every_link(which):
    """One row function for rows of different links, so that a rule is compiled once for all of them."""

    def row_fn(u):
        return jnp.select([which == name for name in LINKS], [link.row_fn(u) for link in LINKS.values()])

    return row_fn


@functools.cache
def run_all(rule, dtype):
    """Moments of every case under one rule, with their relative errors against dense integration."""
    with jax.enable_x64(dtype == "float64"):
        mean, sd = jnp.asarray(CASE_MEAN, dtype), jnp.asarray(CASE_SD, dtype)
        moments = jax.jit(lambda m, s: expect_1d(every_link(NAMES), m, s, rule=rule))(mean, sd)
        moments = jax.tree.map(np.asarray, moments)
        rows = zip(NAMES, np.asarray(mean, np.float64), np.asarray(sd, np.float64), strict=True)
        dense = [dense_1d(LINKS[name], m, s) for name, m, s in rows]
    found = np.stack([a.astype(np.float64) for a in moments[:3]], -1)
    wanted, size = (np.stack(a) for a in zip(*dense, strict=True))
    # A hess that cancels is measured by the size of its terms.
    scale = np.stack([size[:, 0], size[:, 1], np.maximum(np.abs(wanted[:, 2]), 1e-3 * size[:, 2])], -1)
    return moments, np.abs(found - wanted) / scale


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", LINKS)
def test_mapped_rule_reaches_the_target_at_every_sd(name):
    _, errors = run_all("mapped", "float64")
    # JAX's log_ndtr changes series at -20, where its slope has a step of that size.
    assert errors[name == NAMES].max() < (3e-7 if name == "probit" else 1e-8)


@pytest.mark.parametrize("name", LINKS)
def test_mapped_rule_in_single_precision(name):
    moments, errors = run_all("mapped", "float32")
    assert moments.value.dtype == np.float32
    largest = 1.0 if name == "probit" else min(LINKS[name].max_sd / 10, 10.0)
    kept = (name == NAMES) & (largest >= CASE_SD)
    assert errors[kept, :2].max() < 5e-6
    # Far out in a tail psi'' itself is mostly rounding.
    assert errors[kept & (CASE_MEAN > -10), 2].max() < (1e-3 if name == "laplace" else 5e-5)


@pytest.mark.parametrize(("mean", "sd"), [(-1.0, 1.4), (0.5, 3.0), (-4.0, 2.0)])
def test_clamped_probabilities_in_single_precision(mean, sd):
    """NumPyro's own probabilities: in float32 the second derivative of their logarithm is not a number beyond -9."""

    def probability(u):
        return jnp.exp(dist.Bernoulli(probs=ndtr(u)).log_prob(0))

    def both(u, v):
        return dist.Bernoulli(probs=ndtr(u + v)).log_prob(0)

    with jax.enable_x64(False):
        found = expect_1d(probability, jnp.array([mean]), jnp.array([sd]), rule="mapped")
        laws = [jnp.array([x]) for x in (mean, 0.0, 0.5 * sd**2, 0.0, 0.5 * sd**2)]
        two = expect_2d(both, *laws, rule="mapped")
        one = expect_1d(lambda u: both(u, 0.0), jnp.array([mean]), jnp.array([sd]), rule="mapped")
        coarse = expect_1d(probability, jnp.array([mean - 9.0]), jnp.array([sd]), rule="gh8")
    spread = np.hypot(1.0, sd)
    density = np.exp(-0.5 * (mean / spread) ** 2) / np.sqrt(2 * np.pi) / spread
    wanted = special.ndtr(-mean / spread), -density, density * mean / spread**2
    assert_allclose([np.asarray(x)[0] for x in found[:3]], wanted, rtol=2e-5)
    assert np.isnan(coarse.hess[0]) and np.isinf([coarse.error[0], coarse.absolute[0]]).all()
    # Next to one a probability has few digits in float32, and the clamp is a kink: two sets of nodes see it differently
    # (by .2 to .5 % in the second derivative, as the compiler rounds).
    assert_allclose(two.value, one.value, rtol=1e-3)
    assert_allclose(two.hess, np.broadcast_to(np.asarray(one.hess)[:, None], (1, 3)), rtol=1e-2)


@pytest.mark.parametrize("name", ["logit", "probit", "negative_binomial", "ordered_close", "student", "poisson"])
@pytest.mark.parametrize(("rule", "sd"), [("gh8", 0.1), ("gh20", 0.3), ("coarse", 1.0), ("trapezoid", 1.0)])
def test_fixed_rules_reach_the_target_where_they_serve(name, rule, sd):
    _, errors = run_all(rule, "float64")
    assert errors[(name == NAMES) & (sd == CASE_SD)].max() < 1e-8


def test_a_rule_that_is_too_small_fails_and_says_so():
    moments, errors = run_all("gh20", "float64")
    rows = (NAMES == "logit") & (CASE_SD == 30.0)
    assert errors[rows].max() > 1e-2
    assert moments.error[rows].min() > 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_error_estimates_are_honest(rule):
    moments, errors = run_all(rule, "float64")
    # A fixed rule cannot see a kink beyond its outermost node, nor can its estimate.
    reach = np.sqrt(4 * 8) - 1.5 if rule == "gh8" else 7.0
    hidden = (NAMES == "laplace") & (np.abs(CASE_MEAN - 0.7) > reach * CASE_SD) & (rule != "mapped")
    true = errors.max(-1)
    wrong = ~hidden & (true > 1e-8)
    # Where a rule is hopeless the estimate need only be hopeless too.
    dishonest = wrong & (moments.error < np.minimum(0.2 * true, 0.05))
    assert not dishonest.any(), [CASES[i] for i in np.nonzero(dishonest)[0]]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mapped"])
def test_error_estimates_do_not_depend_on_the_unit(rule, x64):
    """A predictor in another unit: value and both errors stay, derivatives are per unit."""
    mean, sd = jnp.array([-1.0, 0.3, 2.0]), jnp.array([0.9, 2.0, 4.0])

    @jax.jit
    def at(unit):
        return expect_1d(lambda u: jax.nn.log_sigmoid(u / unit), mean * unit, sd * unit, rule=rule)

    one, other = at(1.0), at(128.0)
    np.testing.assert_allclose(other.value, one.value, rtol=1e-12)
    np.testing.assert_allclose(other.grad * 128, one.grad, rtol=1e-9)
    np.testing.assert_allclose(other.hess * 128**2, one.hess, rtol=1e-7, atol=1e-12)
    assert np.all(one.error < 1)
    np.testing.assert_allclose(other.error, one.error, rtol=1e-3, atol=1e-12)
    np.testing.assert_allclose(other.absolute, one.absolute, rtol=1e-3, atol=1e-12)


def test_mass_outside_the_range_of_floats_is_reported(x64):
    sd = jnp.array([30.0, 100.0])
    moments = jax.jit(lambda s: expect_1d(lambda u: 3 * u - jnp.exp(u), jnp.zeros(2), s, rule="mapped"))(sd)
    assert np.all(np.isinf(moments.error))


def test_choose_rule_follows_the_rows(x64):
    mean = jnp.linspace(-3.0, 3.0, 7)

    @jax.jit
    def chosen(sd):
        return choose_rule(jax.nn.log_sigmoid, mean, jnp.full(7, sd))

    sds = (0.05, 0.5, 1.5, 3.0, 30.0)
    assert tuple(RULES[int(chosen(sd))] for sd in sds) == RULES == ("gh8", "gh20", "coarse", "trapezoid", "mapped")
    kinked = choose_rule(lambda u: -jnp.abs(u - 0.7), jnp.array([0.6]), jnp.array([0.05]))
    assert RULES[int(kinked)] == "mapped"
    assert [int(rule_index(jnp.asarray(sd))) for sd in sds] == [0, 1, 2, 3, 4]


def test_traced_rule_equals_the_named_one_and_rows_may_be_vmapped(x64):
    mean, sd = jnp.linspace(-2.0, 2.0, 6), jnp.linspace(0.1, 4.0, 6)

    @jax.jit
    def chunks(index):
        run = jax.vmap(lambda m, s: expect_1d(jax.nn.log_sigmoid, m, s, rule=index, num_rules=len(RULES) - 1))
        return run(mean.reshape(2, 3), sd.reshape(2, 3))

    for index, name in enumerate(RULES[:-1]):
        direct = expect_1d(jax.nn.log_sigmoid, mean, sd, rule=name)
        for a, b in zip(chunks(jnp.asarray(index))[:3], direct[:3], strict=True):
            np.testing.assert_allclose(np.asarray(a).ravel(), np.asarray(b), rtol=1e-12)
    with pytest.raises(ValueError, match="gh7"):
        expect_1d(jax.nn.log_sigmoid, mean, sd, rule="gh7")


@pytest.mark.parametrize("rule", RULES[:-1])
def test_reverse_mode_agrees_with_the_moments_themselves(rule, x64):
    def total(mean, sd, scale):
        moments = expect_1d(lambda u: -scale * jax.nn.softplus(u), mean, sd, rule=rule)
        return moments.value.sum(), moments

    mean, sd = jnp.array([0.3, -1.0]), jnp.array([0.1, 0.15])
    (by_mean, by_sd, by_scale), moments = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(mean, sd, 2.0)
    np.testing.assert_allclose(by_mean, moments.grad, rtol=1e-7)
    np.testing.assert_allclose(by_sd, sd * moments.hess, rtol=1e-6)
    np.testing.assert_allclose(by_scale, moments.value.sum() / 2.0, rtol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_a_predictor_that_does_not_vary_gives_the_plain_derivatives(rule):
    with jax.enable_x64(False):
        mean = jnp.array([0.5, -2.0])
        moments = jax.jit(lambda s: expect_1d(jax.nn.log_sigmoid, mean, s, rule=rule))(jnp.zeros(2))
    slope = expit(-np.asarray(mean))
    np.testing.assert_allclose(moments.grad, slope, rtol=2e-6)
    np.testing.assert_allclose(moments.hess, -slope * (1 - slope), rtol=2e-6)
    assert np.all(np.asarray(moments.error) < 1e-5)


def _normal_closed(y, mean_u, mean_v, cov_uu, cov_uv, cov_vv):
    """E of -v - (y-u)^2 e^{-2v} / 2 and its derivatives: e^{-2v} tilts the law to mean - 2 cov(., v)."""
    weight = np.exp(-2 * mean_v + 2 * cov_vv)
    gap = y - mean_u + 2 * cov_uv
    square = gap**2 + cov_uu
    grad = np.stack([weight * gap, -1 + weight * square], -1)
    return -mean_v - 0.5 * weight * square, grad, np.stack([-weight, -2 * weight * gap, -2 * weight * square], -1)


def _student_dense(y, mean_u, mean_v, cov_uu, cov_uv, cov_vv):
    """E of -v - 2 log(1 + (y-u)^2 e^{-2v} / 3) and its gradient on a dense grid in whitened coordinates."""
    nodes = np.linspace(-8.5, 8.5, 1301)
    z1, z2 = np.meshgrid(nodes, nodes)
    weight = np.exp(-0.5 * (z1**2 + z2**2))
    weight /= weight.sum()
    v = mean_v + np.sqrt(cov_vv) * z2
    u = mean_u + cov_uv / np.sqrt(cov_vv) * z2 + np.sqrt(cov_uu - cov_uv**2 / cov_vv) * z1
    ratio = ((y - u) * np.exp(-v)) ** 2 / 3
    by_u = 4 * (y - u) * np.exp(-2 * v) / 3 / (1 + ratio)
    by_v = -1 + 4 * ratio / (1 + ratio)
    return (weight * (-v - 2 * np.log1p(ratio))).sum(), np.array([(weight * by_u).sum(), (weight * by_v).sum()])


def _law(mean_u, mean_v, sd_u, sd_v, correlation):
    return mean_u, mean_v, sd_u**2, correlation * sd_u * sd_v, sd_v**2


def _location_scale(is_normal):
    def row_fn(u, v):
        square = ((0.7 - u) * jnp.exp(-v)) ** 2
        return -v - jnp.where(is_normal, 0.5 * square, 2 * jnp.log1p(square / 3))

    return row_fn


@pytest.mark.parametrize(
    ("rule", "sd", "times"),
    # Of few rows nodes are taken in blocks, of many one by one.
    [("gh8", 0.1, 1), ("gh20", 0.6, 1), ("gh20", 0.6, 200), ("coarse", 0.6, 1), ("trapezoid", 0.6, 1)],
)
def test_fixed_rules_for_two_predictors_in_closed_form(rule, sd, times, x64):
    correlations = (0.0, 0.7, -0.5) * times
    laws = [np.array(a) for a in zip(*[_law(0.3, -0.5, sd, sd, rho) for rho in correlations], strict=True)]
    moments = jax.jit(lambda *a: expect_2d(_location_scale(True), *a, rule=rule))(*laws)
    for found, wanted in zip(moments[:3], _normal_closed(0.7, *laws), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-8)
    assert np.all(moments.error < 1e-6)


def test_mapped_rule_for_two_predictors(x64):
    normal = [(0.3, -0.5, sd, tau, rho) for sd, tau, rho in ((5.0, 5.0, 0.7), (0.2, 10.0, -0.5), (10.0, 0.5, 0.0))]
    student = [(0.2, 0.0, 0.5, 0.5, 0.4), (0.2, 1.0, 1.0, 0.7, -0.6)]
    laws = [np.array(a) for a in zip(*[_law(*law) for law in normal + student], strict=True)]
    is_normal = np.arange(len(laws[0])) < len(normal)
    moments = jax.jit(lambda *a: expect_2d(_location_scale(is_normal), *a, rule="mapped"))(*laws)
    for found, wanted in zip(moments[:3], _normal_closed(0.7, *laws), strict=True):
        np.testing.assert_allclose(found[is_normal], wanted[is_normal], rtol=1e-8)
    for k in np.nonzero(~is_normal)[0]:
        value, grad = _student_dense(0.7, *(a[k] for a in laws))
        np.testing.assert_allclose(moments.value[k], value, rtol=1e-8)
        np.testing.assert_allclose(moments.grad[k], grad, rtol=1e-7)
    assert np.all(moments.error < 1e-6)


def test_two_predictors_out_of_reach_are_reported(x64):
    laws = [np.array([a]) for a in _law(0.3, -0.5, 3.0, 3.0, 0.3)]
    moments = jax.jit(lambda *a: expect_2d(_location_scale(False), *a, rule="gh8"))(*laws)
    assert moments.error[0] > 1e-2


def test_derivatives_in_whitened_coordinates_and_back():
    """Against JAX's own, of a cubic in (u, v) composed with the map from z; and back again."""
    law = gaussian_law(*map(jnp.asarray, (0.3, -1.2, 2.0, 0.7, 1.5)))

    def psi(x):
        return x[0] ** 3 - 2.0 * x[0] ** 2 * x[1] + 0.5 * x[0] * x[1] + x[1] ** 3

    def of(z):
        return jnp.stack([law.mean_u + law.slope * z[1] + law.sd_u * z[0], law.mean_v + law.sd_v * z[1]])

    z = jnp.array([0.4, -0.9])
    matrix = jax.hessian(psi)(of(z))
    hess = [matrix[0, 0], matrix[0, 1], matrix[1, 1]]
    found = law.whiten(list(jax.grad(psi)(of(z))), hess)
    wanted = jax.hessian(lambda z: psi(of(z)))(z)
    assert_allclose(np.array(found[0]), jax.grad(lambda z: psi(of(z)))(z), rtol=1e-5)
    assert_allclose(np.array(found[1]), np.array([wanted[0, 0], wanted[0, 1], wanted[1, 1]]), rtol=1e-5)
    assert_allclose(np.array(law.unwhiten_hess(found[1])), np.array(hess), rtol=1e-4)


# Rows of log-densities, by NumPy or JAX, and observations of them, some where nobody expects any.
DENSITIES = {
    "narrow": (lambda u, y, xp: -0.5 * ((y - u) / 0.05) ** 2 + 3.0, (0.0, 1.0, 40.0)),
    "poisson": (
        lambda u, y, xp: y * u - xp.exp(xp.minimum(u, 80.0)) - special.gammaln(y + 1.0),
        (0.0, 60.0, 200.0, 1000.0),
    ),
    "student": (lambda u, y, xp: -1.5 * xp.log1p(((y - u) / 0.05) ** 2 / 2), (0.0, 3.0, 30.0)),
    "laplace": (lambda u, y, xp: -xp.abs(y - u) / 0.05, (0.1, 9.0)),
    "bernoulli": (lambda u, y, xp: -xp.logaddexp(0.0, -y * u), (1.0, -1.0)),
}


def by_a_fine_grid(row, y, mean, sd):
    """Two million nodes within forty sds: close enough for a width of a fortieth of one."""
    u = np.linspace(mean - 40 * sd, mean + 40 * sd, 2_000_001)
    terms = row(u, y, np) - 0.5 * ((u - mean) / sd) ** 2
    return special.logsumexp(terms) + np.log((u[1] - u[0]) / sd) - 0.5 * np.log(2 * np.pi)


@pytest.mark.parametrize("name", DENSITIES)
def test_the_log_of_an_expected_density_wherever_its_mass_is(name):
    row, ys = DENSITIES[name]
    found = log_expectation_1d(
        lambda u: row(u, np.array(ys, u.dtype), jnp), jnp.full(len(ys), 0.3), jnp.full(len(ys), 2.0)
    )
    exact = np.array([by_a_fine_grid(row, y, 0.3, 2.0) for y in ys])
    # In single precision psi itself is known to some 1e-7 of its terms; a kink costs a trapezoid's h^2 / 12.
    assert np.all(np.abs(found - exact) < (1e-7 if X64 and name != "laplace" else 2e-4) * (1 + np.abs(exact)))


def test_a_density_that_is_nought_has_no_log_expectation():
    assert log_expectation_1d(lambda u: jnp.full_like(u, -jnp.inf), jnp.zeros(2), jnp.ones(2)).tolist() == [-np.inf] * 2


def overflowing(u, *_):
    """A log density that is infinite below -3.5, as one with a cancelled normaliser is."""
    return jnp.where(u < -3.5, jnp.inf, -0.5 * (u - 0.2) ** 2)


@pytest.mark.parametrize("rows", [3, 3000], ids=["blocks", "node by node"])
@pytest.mark.parametrize("predictors", [1, 2])
@pytest.mark.parametrize("share", [1e-12, 1e-3] if X64 else [1e-4, 1e-1], ids=["left out", "with care"])
def test_nodes_that_count_for_nothing_are_not_looked_at(share, predictors, rows):
    """In an average of which a rule is a small share: what is left has the moments of the density without the cliff.

    What is lost, times the share, is far below rounding.
    """
    mean, sd = jnp.full(rows, 0.1), 0.7
    share = Share(jnp.asarray(share), share > 1e-11 if X64 else share > 1e-3)
    rule = "gh20" if predictors == 2 else "coarse"
    if predictors == 1:
        expect = functools.partial(expect_1d, overflowing, mean, jnp.full(rows, sd), rule=rule)
    else:
        own = jnp.full(rows, sd**2)
        expect = functools.partial(expect_2d, overflowing, mean, mean, own, 0.1 * own, own, rule=rule)
    found = expect(share=share)
    assert_allclose(found.value, -0.5 * (sd**2 + 0.1**2), rtol=1e-3)
    assert_allclose(found.hess.reshape(rows, -1)[:, 0], -1.0, rtol=1e-3)
    assert (
        not np.isfinite(expect().value).any()
        and not np.isfinite(expect(share=Share(jnp.asarray(1e3), True)).value).any()
    )
