"""What calls leave to the next one, the evaluation and the arguments: of the same state, model and data, and of no others."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi._numerics import Flat
from numpyro_pvi.errors import StateError
from numpyro_pvi.factors import _arguments

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(13, 2)), rng.integers(0, 2, 13)


def logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def waves(X, y):
    """Without structure: by draws, fresh ones for every round."""
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.arctan2(a + X[:, 0], 3.0 + b**2), 1.0), obs=1.0 * y)


def scaled(X, y):
    """With a param, after whose steps the prior and all factors are others."""
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def made(model, guide=AutoMultivariateNormal):
    optim = numpyro.optim.Adam(0.05) if model is scaled else None
    return PVI(Partition(model, "n", np.arange(13) % 3), guide(model), optim)


@pytest.fixture(scope="module")
def regression():
    return made(logistic)


def updated(pvi, state, rounds, data, between=lambda: None):
    losses = []
    for _ in range(rounds):
        state, loss = pvi.update(state, *data)
        losses.append(float(loss))
        between()
    return state, losses


def forget(pvi):
    pvi._memory.look._kept = pvi._memory.call._kept = None


def spoil(pvi):
    kept = pvi._memory.look._kept
    spoiled = jax.tree.map(lambda x: x + 7 if jnp.issubdtype(x.dtype, jnp.inexact) else x, kept.evaluation)
    pvi._memory.look._kept = kept._replace(evaluation=spoiled, losses=kept.losses + 7)


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoExponentialFamily])
@pytest.mark.parametrize("model", [logistic, waves, scaled])
def test_rounds_that_go_on_from_a_look_are_those_that_look_again(model, guide, regression):
    pvi = regression if (model, guide) == (logistic, AutoMultivariateNormal) else made(model, guide)
    first = pvi.init(KEY, X, Y)
    kept, losses = updated(pvi, first, 3, (X, Y))
    anew, others = updated(pvi, first, 3, (X, Y), lambda: forget(pvi))
    assert losses == others
    for a, b in zip(jax.tree.leaves(kept.sites), jax.tree.leaves(anew.sites), strict=True):
        np.testing.assert_array_equal(a, b)
    run = pvi.run(KEY, 3, X, Y, init_state=first, progress_bar=False)
    np.testing.assert_array_equal(np.asarray(run.losses), np.asarray(losses, run.losses.dtype))
    # A planted fault shows: what is kept is what the next round goes on from.
    state, _ = pvi.update(first, X, Y)
    spoil(pvi)
    assert float(pvi.update(state, X, Y)[1]) != losses[1]


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoExponentialFamily])
@pytest.mark.parametrize("model", [logistic, waves, scaled])
def test_a_state_is_evaluated_by_what_its_round_has_found(model, guide, regression, known_losses):
    pvi = regression if (model, guide) == (logistic, AutoMultivariateNormal) else made(model, guide)
    state, _ = updated(pvi, pvi.init(KEY, X, Y), 2, (X, Y))
    known = pvi.evaluate(state, X, Y)
    forget(pvi)
    looked = pvi.evaluate(state, X, Y)
    assert known.dtype == looked.dtype and known.shape == looked.shape
    np.testing.assert_allclose(known, looked, rtol=1e-12 if known.dtype == jnp.float64 else 2e-6)
    state, _ = pvi.update(state, X, Y)
    spoil(pvi)
    assert float(pvi.evaluate(state, X, Y)) != float(pvi.evaluate(dataclasses.replace(state), X, Y))


def _other_rows(pvi, state):
    return state, (X + 0.5, Y)


def _in_place(pvi, state):
    changed = X.copy()
    state = pvi.update(pvi.init(KEY, changed, Y), changed, Y)[0]
    changed[0, 0] += 1.0
    return state, (changed, Y)


def _earlier_state(pvi, state):
    return pvi.init(KEY, X, Y), (X, Y)


def _equal_state(pvi, state):
    return dataclasses.replace(state, step=state.step), (X, Y)


@pytest.mark.parametrize("case", [_other_rows, _in_place, _earlier_state, _equal_state])
def test_a_look_holds_for_its_own_state_and_rows(case, regression, known_losses):
    pvi = regression
    last, _ = pvi.update(pvi.init(KEY, X, Y), X, Y)
    state, data = case(pvi, last)
    spoil(pvi)
    now = pvi.evaluate(state, *data)
    loss = pvi.update(state, *data)[1]
    forget(pvi)
    np.testing.assert_allclose(now, pvi.evaluate(state, *data), rtol=1e-6)
    np.testing.assert_array_equal(loss, pvi.update(state, *data)[1])
    assert np.isfinite(float(loss))


def test_a_look_goes_with_its_state_and_is_of_one_pvi(regression):
    pvi = regression
    state, _ = pvi.update(pvi.init(KEY, X, Y), X, Y)
    assert pvi._memory.look._kept is not None
    assert copy.deepcopy(pvi)._memory.look._kept is None
    del state
    assert pvi._memory.look._kept is None


@pytest.mark.parametrize("seen", [True, False], ids=["closed over", "a file"])
def test_a_look_is_of_the_model_as_it_was(seen, tmp_path, known_losses):
    width, file = np.array([1.0]), tmp_path / "width"
    file.write_text("1.0")

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("n", X.shape[0]):
            factor = width[0] if seen else float(file.read_text())
            numpyro.sample("y", dist.Bernoulli(logits=X @ w * factor), obs=y)

    pvi = made(model)
    state, _ = pvi.update(pvi.init(KEY, X, Y), X, Y)
    spoil(pvi)
    width[0] = 2.0
    file.write_text("2.0")
    now = pvi.evaluate(state, X, Y)
    loss = pvi.update(state, X, Y)[1]
    forget(pvi)
    np.testing.assert_allclose(now, pvi.evaluate(state, X, Y), rtol=1e-6)
    np.testing.assert_array_equal(loss, pvi.update(state, X, Y)[1])
    assert np.isfinite(float(loss))


def test_the_same_arguments_are_converted_once(regression, monkeypatch):
    pvi, converted = regression, []
    own = _arguments._convert
    monkeypatch.setattr(_arguments, "_convert", lambda leaf, name: converted.append(name) or own(leaf, name))
    state, _ = pvi.update(pvi.init(KEY, X, Y), X, Y)
    converted.clear()
    state, loss = pvi.update(state, X, Y.copy())
    assert not converted
    # Neither is anything else: what else is left for the next call is of these very arrays.
    rows = pvi._memory.call._kept.rows[0]
    assert all(a is b for a, b in zip(pvi._memory.look._kept.rows, rows, strict=True))
    pvi.update(state, X, 1 - Y)
    assert converted
    # A planted fault shows: what is kept is what the next round reads.
    pvi.update(state, X, Y)
    kept = pvi._memory.call._kept
    pvi._memory.call._kept = kept._replace(rows=([x + 1 for x in kept.rows[0]], kept.rows[1]))
    assert float(pvi.update(state, X, Y)[1]) != float(updated(made(logistic), state, 1, (X, Y))[1][0])


def test_arguments_that_differ_only_in_kind_are_others():
    def model(X, y, power):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("n", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    pvi = made(model)
    state, _ = pvi.update(pvi.init(KEY, X, Y, 1), X, Y, 1)
    for other in (True, 1.0, 2, "1", None, np.int64(2), np.float64(1.0)):
        with pytest.raises(StateError, match="power"):
            pvi.update(state, X, Y, other)
        pvi.update(state, X, Y, 1)


def test_what_is_laid_flat_comes_back():
    tree = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": (np.array(True), None, np.zeros((0, 2))),
        "c": [np.int32(4), np.float32(0.5)],
    }
    flat = Flat.of(tree)
    assert [x.ndim for x in flat.vectors] == [1] * len(flat.vectors)
    many = jax.tree.map(lambda x: np.stack([np.asarray(x)] * 5), flat).tree
    for x, one, stacked in zip(jax.tree.leaves(tree), jax.tree.leaves(flat.tree), jax.tree.leaves(many), strict=True):
        assert one.dtype == jnp.asarray(x).dtype and type(stacked) is np.ndarray
        np.testing.assert_array_equal(one, x)
        np.testing.assert_array_equal(stacked, np.broadcast_to(x, (5, *np.shape(x))))
    assert jax.tree.structure(flat.tree) == jax.tree.structure(tree)
