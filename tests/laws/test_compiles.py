"""Law 11: one compilation per shape, whatever the number of rounds, and none for what was compiled before."""

import functools

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.runtime._refinement import escalate
from numpyro_pvi.schedules import Rule
from numpyro_pvi.solvers import Conjugate, NaturalGradient

from .models import groups, make_linear, rows


@pytest.fixture
def counted():
    """A model that counts how often its Python body runs, with a fit of it and its data."""
    calls, inner = [], make_linear()

    @functools.wraps(inner)
    def model(X, y):
        calls.append(1)
        return inner(X, y)

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


def _times(jaxpr, name):
    """How often a primitive stands in a program."""
    found = sum(x.primitive.name == name for x in jaxpr.eqns)
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            found += _times(getattr(value, "jaxpr", value), name) if _is_program(value) else 0
    return found


def _is_program(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


# Turns of components look, and candidates are looked at; on draws, so is q on fresh ones after every round, in the same place.
@pytest.mark.parametrize("means", ["slots", "rule", "draws"])
def test_the_likelihood_stands_in_as_few_places_as_rounds_have_of_their_own(means):
    """The state's own q, of which nothing is known before the first round, is looked at in one of them."""

    def model(X, y):
        a, b = (numpyro.sample(n, dist.Normal(0, 1)) for n in "ab")
        rate = a if means == "slots" else jnp.cosh(a * b)
        with numpyro.plate("data", y.shape[0]):
            # Its digamma has no other place in a program; a sample site's own checks do not evaluate it.
            numpyro.factor("y", -(jax.lax.digamma(3.0 + jnp.exp(-(rate**2))) * y))

    X, y, _ = rows()
    solver = NaturalGradient(expectation="monte_carlo") if means == "draws" else None
    pvi = PVI(Partition(model, "data", groups(3)), AutoExponentialFamily(model), solver=solver)
    state = pvi.init(jax.random.key(0), X, y)
    assert state.plan.noisy == (means == "draws")
    program = jax.make_jaxpr(lambda state: pvi.update(state, X, y)[1])(state).jaxpr
    assert _times(program, "digamma") == 2


def test_a_mean_field_round_holds_no_more_of_the_likelihood_than_one_of_full_covariance():
    """The curvature that its step is capped by is of the candidate; what a state's own q has of it is thrown away."""

    def program(guide):
        def model(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
            with numpyro.plate("data", y.shape[0]):
                numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

        X, _, y = rows()
        pvi = PVI(Partition(model, "data", groups(3)), guide(model))
        state = pvi.init(jax.random.key(0), X, y)
        return jax.make_jaxpr(lambda state: pvi.update(state, X, y)[1])(state).jaxpr

    # Of the density and its two derivatives, under every rule.
    full, capped = (_times(program(guide), "log1p") for guide in (AutoMultivariateNormal, AutoNormal))
    assert full == capped > 0


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
