"""PowerEP with moments by chains: whole fits, what they report, keep and save, and when weights give way to chains."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import optimize

from numpyro_pvi import PVI, Partition
from numpyro_pvi._driver import _raise_if_stuck
from numpyro_pvi._group_lifecycle import begin_chains
from numpyro_pvi.errors import PVIError, SkippedGroupError
from numpyro_pvi.families import MultivariateNormalFamily
from numpyro_pvi.runtime import LaxMap, Vmap, chains_wanted
from numpyro_pvi.runtime._tilted import method_of
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import SNEP, MCMCMoments, PowerEP
from numpyro_pvi.solvers._matching import COLLAPSES, DIVERGENT, NOT_MIXED, SLOW
from tests.laws import ep_oracles

LABELS = np.repeat(["a", "b", "c"], 6)
IN_STEP = MCMCMoments(num_warmup=50, num_samples=64, kernel="lockstep")


def regression(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(18, 2))
    return X, (rng.random(18) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0])))).astype(int)


def pvi_of(solver, labels=LABELS, schedule=None, runtime=None, model=regression):
    return PVI(
        Partition(model, "data", labels),
        AutoMultivariateNormal(model),
        solver=solver,
        schedule=schedule or Synchronous(),
        runtime=runtime or Vmap(),
    )


def moments_of(result):
    root = np.asarray(result.params["auto_scale_tril"], float)
    return np.asarray(result.params["auto_loc"], float), root @ root.T


def gap(result, wanted):
    """Largest difference in means and covariances, in sds."""
    (loc, covariance), sd = moments_of(result), np.sqrt(np.diag(wanted[1]))
    return max(np.max(np.abs(loc - wanted[0]) / sd), np.max(np.abs(covariance - wanted[1]) / np.outer(sd, sd)))


@pytest.fixture(scope="module")
def fitted(data):
    pvi = pvi_of(PowerEP(moments=IN_STEP))
    return pvi, pvi.run(jax.random.key(0), 16, *data, progress_bar=False)


def test_a_fit_ends_near_ep_on_a_grid(data, fitted):
    """256 draws a group a round: each round's noise is .01 to .02 sds, and late rounds are averaged."""
    wanted = ep_oracles.grid_ep(data[0], data[1], LABELS)
    assert gap(fitted[1], wanted) < 0.03


def test_chains_are_reported(fitted):
    info = fitted[1].info
    assert info.expectation == ("mcmc",) * 3
    assert np.all((info.rhat > 0.9) & (info.rhat < 1.1)) and np.all(info.divergent == 0)
    assert np.all((info.ess > 30) & (info.ess <= IN_STEP.num_draws))
    # Draws ask for more than late rounds, which are averaged, take.
    assert "R-hat" in str(info) and all(note.startswith("small steps") for note in info.notes)
    assert np.all(np.asarray(fitted[1].state.solver_state.chains.visits) == 16)


def test_snep_keeps_its_chains(data, fitted):
    """Chains go on from visit to visit; with one inner step from each anchor it is power EP, damped."""
    pvi = pvi_of(SNEP(moments=IN_STEP, step_size=0.5))
    result = pvi.run(jax.random.key(0), 16, *data, progress_bar=False)
    info, states = result.info, result.state.solver_state
    assert info.expectation == ("mcmc",) * 3 and np.all((info.rhat > 0.9) & (info.rhat < 1.1))
    assert np.all(np.asarray(states.chains.visits) == 16)
    assert gap(result, moments_of(fitted[1])) < 0.05
    stuck = dataclasses.replace(result.state, solver_state=states._replace(trouble=states.trouble.at[1].set(NOT_MIXED)))
    assert [note for note in pvi.info(stuck).notes if "'b'" in note and "R-hat" in note]


def test_saved_chains_go_on_to_the_same_bits(data, fitted, tmp_path):
    pvi, _ = fitted
    straight = pvi.run(jax.random.key(1), 4, *data, progress_bar=False)
    half = pvi.run(jax.random.key(1), 2, *data, progress_bar=False)
    path = tmp_path / "half.npz"
    pvi.save(path, half.state)
    again = pvi.run(jax.random.key(1), 2, *data, init_state=pvi.load(path), progress_bar=False)
    for one, other in zip(
        jax.tree.leaves(straight.state.solver_state), jax.tree.leaves(again.state.solver_state), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(straight.params["auto_loc"], again.params["auto_loc"])


@pytest.mark.parametrize(
    ("code", "words"), [(DIVERGENT, "target_accept"), (NOT_MIXED, "R-hat.*num_warmup"), (SLOW, "num_samples")]
)
def test_trouble_names_the_group_and_a_remedy(fitted, code, words):
    pvi, result = fitted
    state = result.state
    solver = state.solver_state._replace(trouble=state.solver_state.trouble.at[1].set(code))
    stuck = dataclasses.replace(
        state, solver_state=solver, report=state.report._replace(skip_run=state.report.skip_run.at[1].set(10))
    )
    assert [note for note in pvi.info(stuck).notes if note.startswith("group 'b': ")]
    with pytest.raises(SkippedGroupError, match=f"'b' was skipped in 10 rounds running: .*{words}"):
        _raise_if_stuck(stuck)


def test_too_few_draws_are_refused():
    few = SimpleNamespace(
        solver=PowerEP(moments=MCMCMoments(num_samples=16)), family=MultivariateNormalFamily(40), program=None
    )
    with pytest.raises(PVIError, match=r"too few draws for 40 latents.*MCMCMoments\(num_samples="):
        method_of(few, False)


def test_rows_take_no_chains():
    with pytest.raises(PVIError, match="by quadrature"):
        PowerEP(factors="row", moments="mcmc").check("affine", True, "likelihood in plate 'data'")


def test_chains_take_over_once_weights_have_collapsed_in_three_visits(fitted):
    state, auto = fitted[1].state, PowerEP()
    bare = dataclasses.replace(state, solver_state=state.solver_state._replace(chains=None))
    assert not bool(chains_wanted(auto, bare.solver_state))
    counted = bare.solver_state._replace(collapses=jnp.array([0, COLLAPSES, 1]))
    assert bool(chains_wanted(auto, counted)) and not bool(chains_wanted(PowerEP(moments="importance"), counted))
    moved = begin_chains(auto, dataclasses.replace(bare, solver_state=counted))
    assert moved.plan.chained and moved.solver_state.chains.positions.shape == (3, 4, 2)
    assert not np.any(moved.solver_state.chains.used)
    assert begin_chains(auto, moved) is moved and begin_chains(auto, bare) is bare


# -------------------------------------------------------------------------------------------------- programs of their own


@pytest.mark.slow
def test_groups_side_by_side_or_one_by_one_are_the_same(data, x64):
    """Groups of several chunks and of unequal size: side by side they are filled up, one by one a loop adds their chunks."""
    labels, found = np.repeat(["a", "b", "c"], [4, 6, 8]), []
    for runtime in (Vmap(), LaxMap()):
        pvi = pvi_of(PowerEP(moments=IN_STEP), labels, runtime=runtime)
        found.append(pvi.run(jax.random.key(0), 2, *data, progress_bar=False))
    assert found[0].state.packing.rows.shape == (5, 4)
    np.testing.assert_allclose(found[0].params["auto_loc"], found[1].params["auto_loc"], rtol=1e-6 if x64 else 1e-2)


@pytest.mark.slow
def test_chains_in_turn_and_their_evidence(data):
    pvi = pvi_of(PowerEP(moments=MCMCMoments(num_warmup=100, num_samples=128)), schedule=Sequential())
    result = pvi.run(jax.random.key(0), 12, *data, progress_bar=False)
    wanted = ep_oracles.grid_ep(data[0], data[1], LABELS)
    assert gap(result, wanted) < 0.03
    value, error = pvi.log_evidence(result.state, *data, with_error=True)
    assert 0 < float(error) < 0.05
    # Stationary at the limit: what is left of q's own noise counts squared.
    assert abs(float(value) - wanted[2]) < 5 * float(error) + 1e-3


@pytest.mark.slow
def test_auto_moves_a_group_whose_weights_keep_collapsing():
    """57 rows with a noise of .05 say far more of three latents than 1,024 draws of a wide prior can find."""

    def curve(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(jnp.tanh(X @ w), 0.05), obs=y)

    rng = np.random.default_rng(0)
    X, truth = rng.normal(size=(60, 3)), np.array([1.0, -1.0, 0.5])
    y = np.tanh(X @ truth) + 0.05 * rng.normal(size=60)
    labels = np.where(np.arange(60) < 57, "steep", "mild")
    pvi = PVI(Partition(curve, "data", labels), AutoMultivariateNormal(curve), solver=PowerEP(), init_sites="prior")
    result = pvi.run(jax.random.key(0), 12, X, y, progress_bar=False)
    assert result.state.plan.chained
    assert dict(zip(result.info.labels, result.info.expectation, strict=True))["steep"] == "mcmc"
    residuals = lambda w: np.concatenate([(np.tanh(X @ w) - y) / 0.05, w / 2.0])  # noqa: E731
    best = optimize.least_squares(residuals, truth)
    assert gap(result, (best.x, np.linalg.inv(best.jac.T @ best.jac))) < 0.5
