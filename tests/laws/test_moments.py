"""Law 5: power EP is EP at power 1 and meets variational inference linearly as the power tends to 0; its evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import ndtr
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi.runtime._tilted as moments
from numpyro_pvi import PVI, Partition
from numpyro_pvi.expectations import AffineProgram, row_sites_zero, tilted_rows
from numpyro_pvi.factors import TermData, TermSpec
from numpyro_pvi.factors._structure import DerivedLeaf, Predictor
from numpyro_pvi.families import MultivariateNormalFamily, NormalFamily
from numpyro_pvi.schedules import Asynchronous, Decentralized, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import PowerEP

from . import checks, ep_oracles, oracles
from .fits import fit, numbers
from .models import NOISE, PRIOR_COVARIANCE, PRIOR_LOC, groups, make_linear, make_logistic, rows

X, Y, LABELS = rows()


def make_probit():
    def probit(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Bernoulli(probs=ndtr(X @ w)), obs=y)

    return probit


def gaps(fitted, wanted, int_labels=True):
    """Largest difference in means, in sds, in covariances, relative, and in evidence, in nats."""
    loc, covariance, evidence = wanted
    own, spread = numbers(fitted.last).moments
    y = fitted.y.astype(int) if int_labels else fitted.y
    found = fitted.pvi.log_evidence(fitted.last, jnp.asarray(fitted.X), jnp.asarray(y))
    sd = np.sqrt(np.diag(covariance))
    return np.array(
        [
            np.max(np.abs(own - loc) / sd),
            np.max(np.abs(spread - covariance) / np.outer(sd, sd)),
            abs(float(found) - evidence),
        ]
    )


GRID_FITS = {
    "groups-in-turn": (2, PowerEP(), Sequential(), AutoMultivariateNormal),
    "one-latent-half-power": (1, PowerEP(0.5), Synchronous(), AutoMultivariateNormal),
    "mean-field": (2, PowerEP(0.7), Synchronous(), AutoDiagonalNormal),
    "late": (1, PowerEP(), Asynchronous(1.0), AutoMultivariateNormal),
    "few": (1, PowerEP(), StochasticSubset(2), AutoMultivariateNormal),
    "network": (1, PowerEP(), Decentralized(1.0 - np.eye(3)), AutoMultivariateNormal),
}


@pytest.mark.parametrize(
    ("dim", "solver", "schedule", "guide"),
    # Float32 repeats the plain schedules.
    [pytest.param(*v, id=k, marks=[pytest.mark.once] * (i > 2)) for i, (k, v) in enumerate(GRID_FITS.items())],
)
def test_groups_meet_ep_on_a_grid(dim, solver, schedule, guide, x64):
    fitted = fit(make_logistic_of(dim), X[:, :dim], LABELS, groups(3), solver, schedule, 60, guide)
    wanted = ep_oracles.grid_ep(X[:, :dim], LABELS, groups(3), power=solver.power, diagonal=guide is AutoDiagonalNormal)
    assert np.all(gaps(fitted, wanted) < (1e-8 if x64 else 2e-3))


def make_logistic_of(dim):
    def logistic(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([dim]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)

    return logistic


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(Sequential(), marks=pytest.mark.once), Synchronous()],
    ids=["in-turn", "parallel"],
)
def test_rows_meet_textbook_ep_for_probit(schedule, x64):
    solver = PowerEP(factors="row")
    fitted = fit(make_probit(), X, LABELS, groups(3), solver, schedule, 60, init_sites="auto")
    loc, covariance, evidence = ep_oracles.probit_ep(4 * X @ X.T + 1e-9 * np.eye(len(X)), LABELS)
    back = np.linalg.pinv(X)
    assert np.all(gaps(fitted, (back @ loc, back @ covariance @ back.T, evidence)) < (1e-6 if x64 else 2e-3))


def test_rows_of_a_mean_field_q_meet_ep_on_a_grid(x64):
    """Whatever the groups: a row's factor is the same in each."""
    fitted = fit(make_logistic(), X, LABELS, groups(3), PowerEP(factors="row"), Sequential(), 60, AutoDiagonalNormal)
    wanted = ep_oracles.grid_ep(X, LABELS, np.arange(len(X)), diagonal=True)
    assert np.all(gaps(fitted, wanted) < (1e-8 if x64 else 2e-3))


@pytest.mark.parametrize("family", [MultivariateNormalFamily(1), NormalFamily(1)], ids=["full", "mean-field"])
def test_rows_whose_density_is_below_all_floats_have_their_moments(family, x64):
    """A Laplace density thousands of widths off is log-linear under q: its site is its slope, and its integral in closed form."""
    spec = TermSpec("y", False, (Predictor("loc", "identity", False),), (DerivedLeaf("loc", "identity", (1.0,)),))
    zero, design, y, power = jnp.zeros(2), jnp.array([[1.0], [0.5]]), jnp.array([8000.0, -6000.0]), 0.5
    data = TermData(dist.Laplace(zero, 2 * jnp.ones(2)), y, (design,), (zero,), (zero,), 1.0)
    program, chunk = AffineProgram((spec,), family, 2), ((data, jnp.ones(2, bool)),)
    q = family.moments(family.from_loc_sd(jnp.array([0.4]), jnp.array([0.7])))
    sites = row_sites_zero(program, chunk, zero.dtype)
    found = jax.jit(lambda chunk, q: tilted_rows(program, chunk, sites, q, power, 1, 2))(chunk, q)
    slope = np.array([0.5, -0.5])
    mean, variance = 0.4 * np.array([1.0, 0.5]), 0.49 * np.array([1.0, 0.25])
    wanted = -np.log(4) - np.abs(y) / 2 + slope * mean + 0.5 * power * slope**2 * variance
    rounding = 1e-9 if x64 else 1e-3
    np.testing.assert_allclose(found.value, np.sum(wanted), rtol=rounding)
    np.testing.assert_allclose(found.target.change.precision_mean, [0.25], rtol=rounding)
    np.testing.assert_allclose(found.target.change.precision, 0.0, atol=rounding)
    assert int(found.target.held) == int(found.target.tempered) == 0


@pytest.mark.slow
def test_two_predictors_a_row_and_a_prior_factor(x64):
    """Unknown noise: 2-D quadrature for the rows, and a PRIOR site whose moments are its own coordinate's."""

    def scale(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X[:, 0] * w, s), obs=y)

    def row(x, y):
        def log_density(theta):
            gap = (y - x * theta[:, 0]) * np.exp(-theta[:, 1])
            return -theta[:, 1] - 0.5 * gap**2 - 0.5 * oracles.LOG_2PI

        return log_density

    def prior_factor(theta):
        return 0.5 * np.log(2 / np.pi) + theta[:, 1] - 0.5 * np.exp(2 * theta[:, 1])

    fitted = fit(scale, X, Y, groups(2), PowerEP(factors="row"), Sequential(), 60, init_sites="auto")
    factors = [prior_factor, *(row(x, y) for x, y in zip(X[:, 0], Y, strict=True))]
    held = np.zeros(2), np.diag([0.25, 0.0])
    start = [(np.zeros(2), np.diag([0.0, 1.0]))] + [(np.zeros(2), np.zeros((2, 2)))] * len(X)
    wanted = ep_oracles.factors_ep(factors, held, 0.5 * np.log(2 * np.pi * 4), start)
    assert np.all(gaps(fitted, wanted, int_labels=False) < (1e-6 if x64 else 5e-3))


def test_the_distance_to_variational_inference_is_linear_in_the_power(x64):
    best = oracles.batch_vi_logistic(X, LABELS)
    found = []
    for power in (0.2, 0.1):
        solver = PowerEP(power, factors="row")
        fitted = fit(make_logistic(), X, LABELS, groups(3), solver, Synchronous(), 40, init_sites="auto")
        found.append(checks.distance(fitted, *best))
    assert found[1] < 0.05
    assert 1.8 < found[0] / found[1] < 2.2


@pytest.mark.parametrize("power", [1.0, 0.3])
def test_evidence_of_a_linear_model_is_exact_after_one_round(power, x64):
    fitted = fit(make_linear(), X, Y, groups(3), PowerEP(power), Synchronous(), 1)
    exact = oracles.linear_log_evidence(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    value, error = fitted.pvi.log_evidence(fitted.last, jnp.asarray(X), jnp.asarray(Y), with_error=True)
    assert abs(float(value) - exact) < (1e-8 if x64 else 1e-3)
    assert float(error) == 0.0


# --------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.once
def test_a_step_that_forgets_the_power_is_seen(monkeypatch):
    right = moments.exact_tilted

    def wrong(family, factor, constant, q, site, power):
        found = right(family, factor, constant, q, site, power)
        return found._replace(change=found.change * power)

    monkeypatch.setattr(moments, "exact_tilted", wrong)
    fitted = fit(make_linear(), X, Y, groups(3), PowerEP(0.5), Synchronous(), 2)
    assert checks.conjugate(fitted, NOISE) > 1e-2


@pytest.mark.once
def test_a_tilted_distribution_that_keeps_its_site_is_seen(monkeypatch):
    """The cavity forgotten: the factor is counted on top of its own site."""
    right = moments.from_points

    def wrong(family, cloud, factor, q, site, proposal, power):
        return right(family, cloud, factor, q, site * 0.0, proposal, power)

    monkeypatch.setattr(moments, "from_points", wrong)
    fitted = fit(make_logistic(), X, LABELS, groups(3), PowerEP(), Sequential(), 10)
    assert np.max(gaps(fitted, ep_oracles.grid_ep(X, LABELS, groups(3)))) > 1e-2


def test_one_group_has_the_moments_of_a_posterior_with_a_long_tail(x64):
    """Deaths by dose (Racine et al., 1986): EP with one site is the posterior's own mean and covariance, whatever the precision."""
    dose, deaths = np.array([-0.86, -0.30, -0.05, 0.73]), np.array([0, 1, 3, 5])

    def bioassay(x, y):
        a, b = numpyro.sample("a", dist.Normal(0.0, 3.0)), numpyro.sample("b", dist.Normal(0.0, 20.0))
        with numpyro.plate("doses", len(x)):
            numpyro.sample("y", dist.Binomial(5, logits=a + b * x), obs=y)

    a, b = np.meshgrid(np.linspace(-15, 15, 601), np.linspace(-60, 120, 1801), indexing="ij")
    u = a[..., None] + b[..., None] * dose
    logs = np.sum(deaths * u - 5 * np.logaddexp(0, u), -1) - 0.5 * (a / 3) ** 2 - 0.5 * (b / 20) ** 2
    mass = np.exp(logs - logs.max())
    mass /= mass.sum()
    mean = np.array([np.sum(mass * v) for v in (a, b)])
    sd = np.sqrt([np.sum(mass * (v - m) ** 2) for v, m in zip((a, b), mean, strict=True)])
    pvi = PVI(Partition(bioassay, "doses", 1), AutoMultivariateNormal(bioassay), solver=PowerEP(1.0))
    result = pvi.run(jax.random.key(0), 40, dose, deaths, tol=1e-4, progress_bar=False)
    tril = np.asarray(result.params["auto_scale_tril"])
    assert result.converged
    np.testing.assert_allclose((np.asarray(result.params["auto_loc"]) - mean) / sd, 0.0, atol=1e-3)
    np.testing.assert_allclose(np.sqrt(np.sum(tril**2, 1)) / sd, 1.0, atol=1e-3)
    assert not any("less" in note for note in result.info.notes)
