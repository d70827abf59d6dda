"""Fits of factors without structure: what is chosen, what can be forced, and where it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PRIOR, PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.runtime import _programs
from numpyro_pvi.schedules import Sequential, Synchronous, _acceptance
from numpyro_pvi.solvers import NaturalGradient
from tests.laws import oracles
from tests.laws.models import groups, make_logistic, rows

KEY = jax.random.key(0)
X, Y, LABELS = rows()


def fit(model, y, expectation="auto", schedule=None, guide=AutoMultivariateNormal, rounds=40, start="auto"):
    solver = NaturalGradient(expectation=expectation)
    pvi = PVI(Partition(model, "data", groups(3)), guide(model), solver=solver, schedule=schedule, init_sites=start)
    return pvi, pvi.run(KEY, rounds, jnp.asarray(X), jnp.asarray(y), progress_bar=False)


def sine(x, y):
    """Nonlinear in the latents, gently where the data put them."""
    w = numpyro.sample("w", dist.Normal(0.0, 0.5).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(jnp.tanh(x @ w) + 0.1 * jnp.sin(w[0] * w[1]), 0.5), obs=y)


def bumps(x, y):
    """Narrow bumps and a wide q: nothing of them lies where sigma points look."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.factor("bump", 0.5 * jnp.sum(jnp.exp(-4.0 * w**2)) + 0.0 * y)


def test_sigma_points_serve_where_draws_agree():
    # From where data put q: under the prior draws contradict them, and a product rule takes their place.
    pvi, result = fit(sine, Y, start="curvature")
    assert result.info.structure == ("draws",) * 3
    assert result.info.expectation == ("sigma_points",) * 3
    assert "sigma_points" in str(result.info)
    # Without noise the fit converges to rounding.
    assert result.info.total_move < 1e-3
    assert "sigma points" in str(pvi.partition.plan(jnp.asarray(X), jnp.asarray(Y)))


def test_draws_take_over_where_sigma_points_fail():
    _, result = fit(bumps, Y, rounds=1, start="prior")
    assert result.info.expectation == ("monte_carlo",) * 3


def test_sigma_points_that_disagree_with_themselves_by_little_are_followed_to_where_they_lead(monkeypatch):
    """Steps of less than .005 sds were refused, each of them, as values fall by 1e-5 nats where gradients say that they rise.

    There is no product rule to give way to, as of more rows.
    """
    monkeypatch.setattr(_programs, "product_nodes", lambda dim, num_rows: 0)
    jax.clear_caches()

    def wide(x, y):
        nu, s = numpyro.sample("nu", dist.Gamma(2.0, 0.1)), numpyro.sample("s", dist.HalfNormal(1.0))
        a, b = numpyro.sample("a", dist.Normal(0, 2)), numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.StudentT(nu, a + x @ b, s), obs=y)

    known = np.random.default_rng(3)
    x = known.normal(size=(100, 3))
    y = 0.5 + x @ np.array([1.0, -1.0, 0.3]) + 0.5 * known.standard_t(3, 100)
    pvi = PVI(Partition(wide, "data", np.arange(100) % 2), AutoMultivariateNormal(wide))
    result = pvi.run(KEY, 40, x, y, tol=1e-3, progress_bar=False)
    assert result.converged, result.message
    assert result.info.expectation[1:] == ("sigma_points",) * 2
    jax.clear_caches()


def test_sigma_points_whose_values_no_step_raises_are_given_up(monkeypatch):
    """Polls by state stood still at them, a quarter of a nat above the bound and a tenth of a sd from where draws end."""

    def fresh(x, y):
        sine(x, y)

    monkeypatch.setattr(_acceptance, "elbo_has_not_fallen", lambda *_: jnp.array(False))
    pvi = PVI(Partition(fresh, "data", groups(3)), AutoMultivariateNormal(fresh))
    # So narrow that draws agree with sigma points.
    near = {"auto_loc": jnp.zeros(2), "auto_scale_tril": 0.02 * jnp.eye(2)}
    result = pvi.run(KEY, 3, jnp.asarray(X), jnp.asarray(Y), init_params=near, progress_bar=False)
    assert result.info.total_move == 0.0
    assert result.info.expectation == ("monte_carlo",) * 3


@pytest.mark.parametrize(
    ("word", "shown", "error"),
    [
        ("sigma_points", "sigma_points", 0.06),
        ("monte_carlo", "monte_carlo", 0.1),
    ],
)
@pytest.mark.parametrize("schedule", [Synchronous(), Sequential()], ids=["parallel", "cyclic"])
def test_what_is_insisted_on_is_used_and_ends_at_the_optimum(word, shown, error, schedule):
    """Logistic regression, whose optimum is known; draws come near it because late naturals are averaged."""
    loc, covariance = oracles.batch_vi_logistic(X, LABELS)
    pvi, result = fit(make_logistic(), LABELS, word, schedule, rounds=60)
    assert set(result.info.expectation) == {shown}
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((np.asarray(result.params["auto_loc"]) - loc) / sd).max() < error
    root = np.asarray(result.params["auto_scale_tril"])
    assert np.abs(np.log(np.sqrt(np.diag(root @ root.T)) / sd)).max() < error


def test_mean_field_draws_end_at_the_mean_field_optimum():
    loc, covariance = oracles.batch_vi_logistic(X, LABELS, diagonal=True)
    _, result = fit(make_logistic(), LABELS, "monte_carlo", guide=AutoDiagonalNormal, rounds=60)
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((np.asarray(result.params["auto_loc"]) - loc) / sd).max() < 0.1


def test_the_prior_factor_is_chosen_for_by_itself():
    def model(x, y):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Normal(p[0] * x[:, 0], 0.5), obs=y)

    _, result = fit(model, Y, rounds=20)
    assert result.info.labels[0] is PRIOR
    assert set(result.info.expectation) <= {"sigma_points", "monte_carlo"}


def test_the_loss_is_that_of_the_state_it_comes_with(tolerance):
    """Whichever points are in use: a state carries the choice."""
    for model in (sine, bumps):
        pvi, result = fit(model, Y, rounds=2)
        again = pvi.evaluate(result.state, jnp.asarray(X), jnp.asarray(Y))
        np.testing.assert_allclose(result.losses[-1], again, rtol=10 * tolerance)


@pytest.mark.parametrize(("word", "said"), [("simpson", "sigma_points, monte_carlo"), ("hessian", "'monte_carlo' now")])
def test_unknown_words_are_refused(word, said):
    with pytest.raises(PVIError, match=said):
        NaturalGradient(expectation=word)
