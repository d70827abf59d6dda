"""Quadrature over affine predictors against dense integration that shares no code with it (NumPy panels, float64)."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_pvi.expectations.quadrature import (
    RULES,
    choose_rule,
    expect_1d,
    expect_2d,
    rule_index,
)

SDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MEANS = (0.0, 2.0, -10.0)
GRID_MEAN, GRID_SD = (a.ravel() for a in np.meshgrid(MEANS, SDS))
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
        partial(_student, scale=0.01, df=3, xp=jnp),
        partial(_student, scale=0.01, df=3, xp=np),
        partial(_student_slope, scale=0.01, df=3),
        (1.0,),
        0.01,
    ),
    "student": Link(
        partial(_student, scale=1.0, df=4, xp=jnp),
        partial(_student, scale=1.0, df=4, xp=np),
        partial(_student_slope, scale=1.0, df=4),
        (1.0,),
    ),
    "cauchy": Link(
        partial(_student, scale=0.1, df=1, xp=jnp),
        partial(_student, scale=0.1, df=1, xp=np),
        partial(_student_slope, scale=0.1, df=1),
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


def relative_errors(moments, link, mean, sd):
    """Relative error of value, grad and hess, rows by three; a hess that cancels is measured by its terms' size."""
    found = np.stack([np.asarray(a, np.float64) for a in moments[:3]], -1)
    wanted, size = (
        np.stack(a) for a in zip(*(dense_1d(link, m, s) for m, s in zip(mean, sd, strict=True)), strict=True)
    )
    scale = np.stack([size[:, 0], size[:, 1], np.maximum(np.abs(wanted[:, 2]), 1e-3 * size[:, 2])], -1)
    return np.abs(found - wanted) / scale


def run_1d(row_fn, mean, sd, rule, dtype):
    """`expect_1d` under jit in the given dtype."""
    mean, sd = jnp.asarray(mean, dtype), jnp.asarray(sd, dtype)
    return jax.jit(lambda m, s: expect_1d(row_fn, m, s, rule=rule))(mean, sd)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", LINKS)
def test_mapped_rule_reaches_the_target_at_every_sd(name, x64):
    link = LINKS[name]
    kept = link.max_sd >= GRID_SD
    mean, sd = GRID_MEAN[kept], GRID_SD[kept]
    moments = run_1d(link.row_fn, mean, sd, "mapped", jnp.float64)
    assert relative_errors(moments, link, mean, sd).max() < 1e-8


@pytest.mark.parametrize("name", ["logit", "student", "laplace", "ordered", "softplus_poisson"])
def test_mapped_rule_in_single_precision(name):
    link = LINKS[name]
    kept = min(link.max_sd, 10.0) >= GRID_SD
    mean, sd = (a[kept].astype(np.float32).astype(np.float64) for a in (GRID_MEAN, GRID_SD))
    moments = run_1d(link.row_fn, mean, sd, "mapped", jnp.float32)
    assert moments.value.dtype == jnp.float32
    assert relative_errors(moments, link, mean, sd)[:, :2].max() < 1e-5


@pytest.mark.parametrize("name", ["logit", "probit", "negative_binomial", "ordered_close", "student", "poisson"])
@pytest.mark.parametrize(
    ("rule", "sd", "tolerance"), [("gh8", 0.1, 1e-8), ("gh20", 0.3, 1e-8), ("trapezoid", 1.0, 1e-8)]
)
def test_fixed_rules_reach_the_target_where_they_serve(name, rule, sd, tolerance, x64):
    link, mean = LINKS[name], np.array(MEANS)
    errors = relative_errors(run_1d(link.row_fn, mean, np.full(3, sd), rule, jnp.float64), link, mean, np.full(3, sd))
    assert errors.max() < tolerance


def test_a_rule_that_is_too_small_fails_and_says_so(x64):
    link, mean, sd = LINKS["logit"], np.array(MEANS), np.full(3, 30.0)
    moments = run_1d(link.row_fn, mean, sd, "gh20", jnp.float64)
    assert relative_errors(moments, link, mean, sd).max() > 1e-2
    assert np.asarray(moments.error).min() > 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_error_estimates_are_honest(rule, x64):
    for name in ("logit", "probit", "student", "cauchy", "ordered", "laplace", "poisson"):
        link = LINKS[name]
        kept = min(link.max_sd, 30.0) >= GRID_SD
        mean, sd = GRID_MEAN[kept], GRID_SD[kept]
        moments = run_1d(link.row_fn, mean, sd, rule, jnp.float64)
        true, claimed = relative_errors(moments, link, mean, sd).max(-1), np.asarray(moments.error)
        wrong = true > 1e-8
        # Where a rule is hopeless the estimate need only be hopeless too.
        assert np.all(claimed[wrong] > np.minimum(0.2 * true[wrong], 0.05)), name


def test_mass_outside_the_range_of_floats_is_reported(x64):
    moments = run_1d(LINKS["poisson"].row_fn, np.zeros(2), np.array([30.0, 100.0]), "mapped", jnp.float64)
    assert np.all(np.isinf(np.asarray(moments.error)))


def test_choose_rule_follows_the_rows(x64):
    logit, laplace = LINKS["logit"].row_fn, LINKS["laplace"].row_fn
    mean = jnp.linspace(-3.0, 3.0, 7)

    def chosen(row_fn, sd):
        return RULES[int(jax.jit(lambda: choose_rule(row_fn, mean, jnp.full(7, sd)))())]

    assert [chosen(logit, sd) for sd in (0.05, 0.5, 1.5, 30.0)] == ["gh8", "gh20", "trapezoid", "mapped"]
    assert chosen(laplace, 0.05) == "mapped"
    assert [int(rule_index(jnp.asarray(sd))) for sd in (0.05, 0.5, 1.5, 30.0)] == [0, 1, 2, 3]


def test_traced_rule_equals_the_named_one_and_rows_may_be_vmapped(x64):
    link, mean, sd = LINKS["logit"], jnp.linspace(-2.0, 2.0, 6), jnp.linspace(0.1, 4.0, 6)

    @jax.jit
    def chunks(index):
        run = jax.vmap(lambda m, s: expect_1d(link.row_fn, m, s, rule=index))
        return run(mean.reshape(2, 3), sd.reshape(2, 3))

    for index, name in enumerate(RULES):
        direct = expect_1d(link.row_fn, mean, sd, rule=name)
        for a, b in zip(chunks(jnp.asarray(index))[:3], direct[:3], strict=True):
            np.testing.assert_allclose(np.asarray(a).ravel(), np.asarray(b), rtol=1e-13)
    with pytest.raises(ValueError, match="gh7"):
        expect_1d(link.row_fn, mean, sd, rule="gh7")


@pytest.mark.parametrize("rule", RULES)
def test_reverse_mode_agrees_with_the_moments_themselves(rule, x64):
    def row_fn(u, scale):
        return -scale * jax.nn.softplus(u)

    def total(mean, sd, scale):
        return expect_1d(lambda u: row_fn(u, scale), mean, sd, rule=rule).value.sum()

    mean, sd = jnp.array([0.3, -1.0]), jnp.array([0.2, 0.25])
    moments = expect_1d(lambda u: row_fn(u, 2.0), mean, sd, rule=rule)
    by_mean, by_sd, by_scale = jax.grad(total, (0, 1, 2))(mean, sd, 2.0)
    np.testing.assert_allclose(by_mean, moments.grad, rtol=1e-7)
    np.testing.assert_allclose(by_sd, sd * moments.hess, rtol=1e-6)
    np.testing.assert_allclose(by_scale, moments.value.sum() / 2.0, rtol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_a_predictor_that_does_not_vary_gives_the_plain_derivatives(rule):
    mean = jnp.array([0.5, -2.0])
    moments = expect_1d(jax.nn.log_sigmoid, mean, jnp.zeros(2), rule=rule)
    slope = expit(-np.asarray(mean))
    np.testing.assert_allclose(moments.grad, slope, rtol=2e-6)
    np.testing.assert_allclose(moments.hess, -slope * (1 - slope), rtol=2e-6)
    assert np.all(np.asarray(moments.error) < 1e-5)


def _normal_closed(y, mean_u, mean_v, cov_uu, cov_uv, cov_vv):
    """E of -v - (y-u)^2 e^{-2v} / 2 and its derivatives: e^{-2v} tilts the law to mean - 2 cov(., v)."""
    weight = np.exp(-2 * mean_v + 2 * cov_vv)
    gap = y - mean_u + 2 * cov_uv
    square = gap**2 + cov_uu
    value = -mean_v - 0.5 * weight * square
    return value, (weight * gap, -1 + weight * square), (-weight, -2 * weight * gap, -2 * weight * square)


@pytest.mark.parametrize(
    ("rule", "sd", "tolerance"),
    [("gh8", 0.1, 1e-8), ("gh20", 0.8, 1e-8), ("trapezoid", 0.8, 1e-8), ("mapped", 5.0, 1e-8)],
)
def test_location_and_log_scale_of_a_normal_in_closed_form(rule, sd, tolerance, x64):
    for correlation in (0.0, 0.7, -0.5):
        law = (0.3, -0.5, sd**2, correlation * sd**2, sd**2)
        moments = jax.jit(lambda *a: expect_2d(lambda u, v: -v - 0.5 * ((0.7 - u) * jnp.exp(-v)) ** 2, *a, rule=rule))(
            *(jnp.array([x]) for x in law)
        )
        value, grad, hess = _normal_closed(0.7, *law)
        np.testing.assert_allclose(moments.value[0], value, rtol=tolerance)
        np.testing.assert_allclose(moments.grad[0], grad, rtol=tolerance)
        np.testing.assert_allclose(moments.hess[0], hess, rtol=tolerance)
        assert moments.error[0] < 1e-6


@pytest.mark.parametrize("sd", [0.3, 2.0])
def test_student_location_and_log_scale_rules_agree_with_a_dense_grid(sd, x64):
    def row_fn(u, v):
        return -v - 2 * jnp.log1p(((0.7 - u) * jnp.exp(-v)) ** 2 / 3)

    mean_u, mean_v, rho = 0.2, 1.0, 0.4
    nodes = np.linspace(-9, 9, 1401)
    z1, z2 = np.meshgrid(nodes, nodes)
    weight = np.exp(-0.5 * (z1**2 + z2**2))
    weight /= weight.sum()
    v = mean_v + sd * z2
    u = mean_u + sd * (rho * z2 + np.sqrt(1 - rho**2) * z1)
    ratio = ((0.7 - u) * np.exp(-v)) ** 2 / 3
    wanted = (
        (weight * (-v - 2 * np.log1p(ratio))).sum(),
        (weight * 4 * (0.7 - u) * np.exp(-2 * v) / 3 / (1 + ratio)).sum(),
        (weight * (-1 + 4 * ratio / (1 + ratio))).sum(),
    )
    law = (mean_u, mean_v, sd**2, rho * sd**2, sd**2)
    moments = jax.jit(lambda *a: expect_2d(row_fn, *a, rule="mapped"))(*(jnp.array([x]) for x in law))
    found = (moments.value[0], *moments.grad[0])
    np.testing.assert_allclose(found, wanted, rtol=1e-7)
    assert moments.error[0] < 1e-4
