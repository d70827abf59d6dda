"""A runtime may not change a trajectory beyond rounding."""

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.runtime import LaxMap, Vmap
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import Conjugate, NaturalGradient
from tests.laws.models import groups, make_hyper, make_linear, make_logistic, rows

X, Y, CLASSES = rows(24)


def trajectory(make_model, runtime, schedule, solver, rounds, chunk_size=128):
    model = make_model()
    y = Y if make_model is make_linear else CLASSES
    labels = np.arange(24) % 3 * (np.arange(24) > 11)
    pvi = PVI(
        Partition(model, "data", labels, chunk_size=chunk_size),
        AutoMultivariateNormal(model),
        solver=solver,
        schedule=schedule,
        runtime=runtime,
    )
    state, found = pvi.init(jax.random.key(0), X, y), []
    for _ in range(rounds):
        state, loss = pvi.update(state, X, y)
        found.append((jax.device_get(state.sites), float(loss)))
    return found


def assert_same(found, wanted, tolerance):
    for (sites, loss), (other, other_loss) in zip(found, wanted, strict=True):
        assert abs(loss - other_loss) <= tolerance * abs(other_loss)
        for a, b in zip(jax.tree.leaves(sites), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(
    ("schedule", "solver"),
    [(Sequential(), NaturalGradient()), (Synchronous(damping=0.5), Conjugate())],
    ids=["cyclic", "parallel"],
)
def test_linear_trajectories_are_the_same(schedule, solver, tolerance):
    reference = trajectory(make_linear, Vmap(), schedule, solver, 3)
    assert_same(trajectory(make_linear, LaxMap(), schedule, solver, 3), reference, tolerance)


def test_logistic_trajectories_are_the_same(tolerance):
    """Groups of several chunks (8 rows each): in one batch, in batches of one (added up at the end or on the way), in a loop."""
    found = [
        trajectory(make_logistic, runtime, Synchronous(), NaturalGradient(), 4, chunk_size=8)
        for runtime in (Vmap(), Vmap(batch_bytes=100), Vmap(batch_bytes=1), LaxMap())
    ]
    for other in found[1:]:
        assert_same(other, found[0], tolerance)


def test_hyperparameters_take_the_same_steps_under_every_runtime(tolerance):
    """The gradient in numpyro.param sites passes through the factors, whatever loop the runtime puts around them."""
    found = []
    for runtime in (Vmap(), LaxMap()):
        model = make_hyper()
        labels = groups(3, 24)
        pvi = PVI(Partition(model, "data", labels), AutoMultivariateNormal(model), Adam(0.05), runtime=runtime)
        state = pvi.init(jax.random.key(0), X, Y)
        for _ in range(2):
            state, _ = pvi.update(state, X, Y)
        found.append(float(pvi.get_params(state)["sigma"]))
    assert found[0] != 1.5 and abs(found[1] - found[0]) <= tolerance


@pytest.mark.parametrize("size", [0, -1, 2.5, "8MB"])
def test_senseless_batch_sizes_are_refused(size):
    with pytest.raises(PVIError, match="batch_bytes"):
        Vmap(batch_bytes=size)
