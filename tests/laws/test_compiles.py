"""Law 11: one compilation per shape, whatever the number of rounds, and none for what was compiled before."""

import functools

import jax
import jax.numpy as jnp
import pytest

from numpyro_pvi import PVI, Partition
from numpyro_pvi.runtime._refinement import escalate
from numpyro_pvi.schedules import Rule
from numpyro_pvi.solvers import Conjugate

from .models import groups, make_linear, rows


@pytest.fixture
def counted():
    """A model that counts how often its Python body runs, with a fit of it and its data."""
    calls, inner = [], make_linear()

    @functools.wraps(inner)
    def model(X, y):
        calls.append(1)
        return inner(X, y)

    from numpyro.infer.autoguide import AutoMultivariateNormal

    X, y, _ = rows()
    pvi = PVI(Partition(model, "data", groups(3)), AutoMultivariateNormal(model), solver=Conjugate())
    return pvi, pvi.init(jax.random.key(0), X, y), calls, (X, y)


def test_update_traces_the_model_once(counted):
    pvi, state, calls, data = counted
    state, _ = pvi.update(state, *data)
    first = len(calls)
    for _ in range(3):
        state, _ = pvi.update(state, *data)
    assert len(calls) == first


def test_run_reuses_its_program_for_any_number_of_rounds(counted):
    pvi, state, calls, data = counted
    pvi.run(jax.random.key(0), 2, *data, init_state=state, progress_bar=False)
    first = len(calls)
    for count, options in ((2, {}), (7, {}), (40, {"tol": 1e-9}), (3, {"callback": lambda *_: None, "loss_every": 2})):
        pvi.run(jax.random.key(0), count, *data, init_state=state, progress_bar=False, **options)
    assert len(calls) == first


def test_evaluate_traces_once(counted):
    pvi, state, calls, data = counted
    pvi.evaluate(state, *data)
    first = len(calls)
    pvi.evaluate(state, *data)
    assert len(calls) == first


def test_new_shapes_are_compiled_anew(counted):
    """The counter can move: with rows of another number the body runs again."""
    pvi, state, calls, (X, y) = counted
    state, _ = pvi.update(state, X, y)
    first = len(calls)
    wider = PVI(Partition(pvi.model, "data", groups(3, 16)), pvi.guide, solver=Conjugate())
    X, y, _ = rows(16)
    wider.update(wider.init(jax.random.key(0), X, y), X, y)
    assert len(calls) > first


def test_a_factor_is_traced_once_for_its_shapes_and_its_loop():
    levels = []

    def evaluate(level):
        levels.append(level)
        return 10 * level, 0.1**level

    def finest(tolerance):
        nothing = jnp.asarray(0.0)
        rule = Rule(jnp.int32(0), nothing, nothing, jnp.asarray(tolerance), nothing)
        return escalate(evaluate, rule, 4)

    result, used, _ = jax.jit(finest)(0.02)
    assert (int(result), int(used)) == (20, 2)
    assert len(levels) == 1
