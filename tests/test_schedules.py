"""What a round is, how a run ends, and what happens to a factor that cannot be evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError, SkippedGroupError
from numpyro_pvi.schedules import Sequential, StochasticSubset, Synchronous, _subset, asked_by_move, empty_report
from numpyro_pvi.solvers import Conjugate, NaturalGradient
from tests.laws import oracles
from tests.laws.models import groups, make_hyper, make_linear, make_logistic, rows

KEY = jax.random.key(0)
X, Y, CLASSES = rows()


def make(model, labels, schedule=None, solver=None, optim=None, init_sites="auto"):
    return PVI(
        Partition(model, "data", labels),
        AutoMultivariateNormal(model),
        optim,
        solver=solver,
        schedule=schedule,
        init_sites=init_sites,
    )


def naturals(state):
    return [np.asarray(x) for x in jax.tree.leaves(state.sites)]


def assert_same_sites(first, second, tolerance):
    for a, b in zip(naturals(first), naturals(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("make_model", [make_linear, make_logistic])
def test_with_one_group_sequential_and_synchronous_are_the_same(make_model, tolerance):
    """Without back-off a sweep over one group is a joint step of one site."""
    y = Y if make_model is make_linear else CLASSES
    ends = []
    for schedule in (Sequential(), Synchronous()):
        pvi = make(make_model(), np.zeros(12, int), schedule, NaturalGradient(backtracking=False))
        state = pvi.init(KEY, X, y)
        for _ in range(3):
            state, _ = pvi.update(state, X, y)
        ends.append(state)
    assert_same_sites(*ends, tolerance)


@pytest.mark.parametrize("schedule", [Sequential(), Synchronous()], ids=["cyclic", "parallel"])
def test_mean_field_sweeps_do_not_stand_still(schedule):
    """Two sites can oppose each other so that no share of a whole sweep raises the ELBO; the fit must go on all the same."""
    rng = np.random.default_rng(3)
    X = np.sqrt(0.9) * rng.standard_normal((500, 1)) + np.sqrt(0.1) * rng.standard_normal((500, 5))
    y = X @ rng.standard_normal(5) + rng.standard_normal(500)

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)

    pvi = PVI(Partition(model, "data", np.arange(500) // 250), AutoDiagonalNormal(model), schedule=schedule)
    result = pvi.run(KEY, 400, jnp.asarray(X), jnp.asarray(y), progress_bar=False)
    precision = np.eye(5) + X.T @ X
    params = result.params
    sd = np.asarray(params["auto_scale"])
    mean = np.linalg.solve(precision, X.T @ y)
    assert np.abs((params["auto_loc"] - mean) / sd).max() < 0.05
    np.testing.assert_allclose(sd, np.diag(precision) ** -0.5, rtol=1e-4)


@pytest.mark.parametrize("schedule", [Sequential(), Synchronous()], ids=["cyclic", "parallel"])
@pytest.mark.parametrize("shape", [(1, 1), (12, 1), (12, 2)], ids=["one row", "D = 1", "a row per group"])
def test_edges_of_size(schedule, shape, tolerance):
    """One row, one latent coordinate, and every row a group of its own, against the closed form."""
    num_rows, dim = shape
    covariates, y = X[:num_rows, :dim], Y[:num_rows]

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([dim]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, 0.7), obs=y)

    pvi = make(model, np.arange(num_rows), schedule)
    state, loss = pvi.update(pvi.init(KEY, covariates, y), covariates, y)
    loc, covariance = oracles.linear_posterior(covariates, y, 0.7, np.zeros(dim), 4 * np.eye(dim))
    params = pvi.get_params(state)
    tril = np.asarray(params["auto_scale_tril"])
    np.testing.assert_allclose(params["auto_loc"], loc, rtol=0, atol=10 * tolerance)
    np.testing.assert_allclose(tril @ tril.T, covariance, rtol=0, atol=10 * tolerance)
    evidence = oracles.linear_log_evidence(covariates, y, 0.7, np.zeros(dim), 4 * np.eye(dim))
    np.testing.assert_allclose(-loss, evidence, rtol=10 * tolerance)


@pytest.mark.parametrize("schedule", [Sequential(), Synchronous()], ids=["cyclic", "parallel"])
def test_loss_of_update_is_evaluate_of_the_new_state(schedule, tolerance):
    pvi = make(make_logistic(), groups(3), schedule)
    state, loss = pvi.update(pvi.init(KEY, X, CLASSES), X, CLASSES)
    np.testing.assert_allclose(loss, pvi.evaluate(state, X, CLASSES), rtol=tolerance)
    np.testing.assert_allclose(-loss, pvi.log_evidence(state, X, CLASSES), rtol=tolerance)


def test_update_under_jit_and_over_seeds(tolerance):
    """``jit(pvi.update)`` is ``pvi.update``; ``vmap`` over states of several seeds is a loop over them."""
    pvi = make(make_linear(), groups(3), Sequential(order="random", damping=0.5), init_sites="prior")
    states = [pvi.init(jax.random.key(seed), X, Y) for seed in range(3)]
    plain = [pvi.update(state, X, Y) for state in states]
    state, loss = jax.jit(pvi.update)(states[0], X, Y)
    assert_same_sites(state, plain[0][0], tolerance)
    np.testing.assert_allclose(loss, plain[0][1], rtol=tolerance)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    several, losses = jax.vmap(lambda s: pvi.update(s, X, Y))(stack)
    for k, (state, loss) in enumerate(plain):
        assert_same_sites(jax.tree.map(lambda leaf, k=k: leaf[k], several), state, tolerance)
        np.testing.assert_allclose(losses[k], loss, rtol=tolerance)


# ---------------------------------------------------------------- run


@pytest.fixture(scope="module")
def damped():
    """A fit whose error halves every round, and its start."""
    pvi = make(make_linear(), groups(3), Synchronous(damping=0.5), Conjugate())
    return pvi, pvi.init(KEY, X, Y)


def run(damped, count, **options):
    pvi, state = damped
    return pvi.run(KEY, count, X, Y, init_state=state, progress_bar=False, **options)


def test_run_takes_the_rounds_asked_for(damped, tolerance):
    pvi, state = damped
    result = run(damped, 5)
    assert result.losses.shape == (5,) and int(result.state.step) == 5
    assert result.converged is None and "5 rounds" in result.message
    for k in range(5):
        state, loss = pvi.update(state, X, Y)
        np.testing.assert_allclose(result.losses[k], loss, rtol=tolerance)
    assert_same_sites(result.state, state, tolerance)
    # More rounds than one compiled block has.
    assert run(damped, 70).losses.shape == (70,)


def test_run_stops_at_the_tolerance(damped):
    result = run(damped, 60, tol=1e-3)
    assert result.converged is True and "converged" in result.message
    assert 5 < len(result.losses) < 30 and float(result.info.left) <= 1e-3
    assert float(run(damped, len(result.losses) - 1).info.left) > 1e-3
    short = run(damped, 3, tol=1e-6)
    assert short.converged is False and "without reaching" in short.message


def test_callback_sees_every_round_and_may_stop(damped):
    seen = []

    def callback(step, state, info):
        seen.append((step, int(state.step), info.rounds))
        return step == 4

    result = run(damped, 10, callback=callback)
    assert seen == [(k, k, k) for k in (1, 2, 3, 4)]
    assert len(result.losses) == 4 and "callback" in result.message


def test_loss_every_leaves_nan_between(damped):
    losses = np.asarray(run(damped, 6, loss_every=3).losses)
    assert np.isnan(losses[[0, 1, 3, 4]]).all() and np.isfinite(losses[[2, 5]]).all()


def test_interruption_keeps_the_last_state(damped):
    def callback(step, state, info):
        if step == 3:
            raise KeyboardInterrupt

    result = run(damped, 10, callback=callback)
    assert int(result.state.step) == 3 and len(result.losses) == 3 and "interrupted" in result.message


@pytest.mark.parametrize("options", [{"tol": 0.0}, {"tol": -1.0}, {"loss_every": 0}])
def test_senseless_options_are_refused(damped, options):
    with pytest.raises(PVIError, match=next(iter(options))):
        run(damped, 3, **options)


@pytest.mark.parametrize("count", [0, -1])
def test_senseless_numbers_of_rounds_are_refused(damped, count):
    with pytest.raises(PVIError, match="num_steps"):
        run(damped, count)


def test_what_was_asked_is_what_was_taken_over_its_share():
    """Half and a quarter of the way: twice and four times as much was asked; after a refusal, what was asked before."""
    last = empty_report(2, jnp.result_type(float))._replace(asked=jnp.array([3.0, 5.0]), estimate=jnp.array(7.0))
    move, moved = jnp.array([0.1, 0.2]), jnp.array(0.3)
    asked = asked_by_move(move, moved, jnp.array([0.5, 0.25]), True, last)
    np.testing.assert_allclose(asked.factors, [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(asked.together, 1.2, rtol=1e-6)
    refused = asked_by_move(move, moved, jnp.array([0.5, 0.0]), True, last)
    np.testing.assert_allclose(refused.factors, [0.2, 5.0], rtol=1e-6)
    np.testing.assert_allclose(refused.together, 7.0, rtol=1e-6)
    assert np.array_equal(asked_by_move(move, moved, 0.5, False, last).factors, [3.0, 5.0])


@pytest.mark.parametrize("damping", [0.0, 1.5, -0.5, "full"])
def test_damping_outside_its_range_is_refused(damping):
    for schedule in (Sequential, Synchronous):
        with pytest.raises(PVIError, match="damping"):
            schedule(damping=damping)


def test_unknown_orders_are_refused():
    with pytest.raises(PVIError, match="cyclic"):
        Sequential(order="backwards")


# ---------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize("schedule", [Sequential(), Synchronous()], ids=["cyclic", "parallel"])
def test_hyperparameters_maximise_the_evidence(schedule, x64):
    """With a conjugate model the ELBO is the evidence, so sigma must reach its maximiser; law 1 holds on the way."""
    pvi = make(make_hyper(), groups(3), schedule, optim=numpyro.optim.Adam(0.05))
    result = pvi.run(KEY, 500, X, Y, progress_bar=False)
    best = oracles.best_noise(X, Y, np.zeros(2), 4 * np.eye(2))
    np.testing.assert_allclose(result.params["sigma"], best, rtol=1e-4)
    loc, covariance = oracles.linear_posterior(X, Y, best, np.zeros(2), 4 * np.eye(2))
    np.testing.assert_allclose(result.params["auto_loc"], loc, atol=1e-3)
    state = result.state
    precision = np.asarray(state.prior.precision) + np.asarray(state.sites.groups.precision).sum(0)
    tril = np.asarray(result.params["auto_scale_tril"])
    np.testing.assert_allclose(np.linalg.inv(tril @ tril.T), precision, rtol=1e-9 if x64 else 1e-4)
    evidence = oracles.linear_log_evidence(X, Y, best, np.zeros(2), 4 * np.eye(2))
    np.testing.assert_allclose(-result.losses[-1], evidence, rtol=1e-5)


# ---------------------------------------------------------------- a factor that cannot be evaluated


def make_fragile():
    """Group "bad" (large x) has a log-likelihood that is NaN for every q; the others are plain."""

    def fragile(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            rate = jnp.exp(X * w)
            numpyro.sample("obs", dist.Poisson(rate), obs=y)

    return fragile


FRAGILE_X = np.array([0.2, -0.3, 0.5, 0.1, 2000.0, 1500.0])
FRAGILE_Y = np.array([1, 0, 2, 1, 3, 1])
FRAGILE_GROUPS = np.array(["a", "a", "b", "b", "bad", "bad"])


@pytest.mark.parametrize(
    "schedule", [pytest.param(Sequential(), marks=pytest.mark.slow), Synchronous()], ids=["cyclic", "parallel"]
)
def test_a_group_that_is_not_finite_is_skipped_and_reported(schedule):
    """exp(2000 w) overflows under the prior: that site stays, the other groups move, and 10 times in a row raises."""
    pvi = make(make_fragile(), FRAGILE_GROUPS, schedule, init_sites="prior")
    state = pvi.init(KEY, FRAGILE_X, FRAGILE_Y)
    before = pvi.site(state, "bad")
    state, _ = pvi.update(state, FRAGILE_X, FRAGILE_Y)
    info = pvi.info(state)
    assert dict(zip(info.labels, info.skipped, strict=True)) == {"a": False, "b": False, "bad": True}
    after = pvi.site(state, "bad")
    for name in ("precision_mean", "precision"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        assert np.abs(getattr(pvi.site(state, "a"), name)).max() > 0
    assert all(np.isfinite(leaf).all() for leaf in naturals(state))
    with pytest.raises(SkippedGroupError, match="'bad'") as caught:
        pvi.run(KEY, 50, FRAGILE_X, FRAGILE_Y, init_state=state, progress_bar=False)
    assert caught.value.state is not None and int(caught.value.state.step) == 10
    assert all(np.isfinite(leaf).all() for leaf in naturals(caught.value.state))


SLOPE = np.random.default_rng(24)
ABSCISSAS = SLOPE.normal(size=16).astype("f4")
ORDINATES = (0.4 * ABSCISSAS + 0.6 * SLOPE.normal(size=16)).astype("f4")


def twice(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    sd, bent = numpyro.sample("sd", dist.Exponential(1.0)), numpyro.sample("bent", dist.Uniform(-1.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(w * x + bent * jnp.tanh(x), sd), obs=y)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
def test_some_groups_take_q_no_farther_than_all_bear(fault, monkeypatch):
    """Of sites that were fitted elsewhere the free energy of two groups may rise while the ELBO falls by 30 nats in a round."""
    if fault:
        right = _subset._free_energy_has_not_fallen

        def blind(problem, new, old, there):
            unseen = [
                (evaluation._replace(elbo=jnp.zeros_like(evaluation.elbo)), sites) for evaluation, sites in (new, old)
            ]
            return right(problem, *unseen, there)

        monkeypatch.setattr(_subset, "_free_energy_has_not_fallen", blind)
    rises = np.diff(_losses_of_two(jax.random.key(22), 30, fault))
    assert rises.max() > 20 if fault else rises.max() < 1.5 + 1e-3


def _losses_of_two(key, rounds, fault):
    model = (lambda x, y: twice(x, y)) if fault else twice
    pvi = PVI(Partition(model, "data", np.arange(16) % 4), AutoDiagonalNormal(model), schedule=StochasticSubset(2))
    return pvi.run(key, rounds, ABSCISSAS, ORDINATES, tol=1e-3, progress_bar=False).losses


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
def test_the_prior_factor_moves_no_more_than_groups_do(fault, x64, monkeypatch):
    """Moved whole beside two groups of four, it outruns the sites that it balances: q drifts off, by a nat a round."""
    if fault:
        monkeypatch.setattr(_subset, "_fraction", lambda taking_part, dtype: jnp.ones((), dtype))
    loss = _losses_of_two(jax.random.key(1 if x64 else 18), 40, fault)[-1]
    assert loss > 60 if fault else 20.9 < loss < 21
