"""A runtime may not change a trajectory beyond rounding."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi._closures import model_digest
from numpyro_pvi._compiling import precisely
from numpyro_pvi._numerics import invert_lower, scaled_cholesky
from numpyro_pvi.errors import PVIError
from numpyro_pvi.factors import split_arguments
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


def products(jaxpr):
    """Precisions of all products of matrices in a program."""
    found = {str(equation.params["precision"]) for equation in jaxpr.eqns if equation.primitive.name == "dot_general"}
    inner = [jax.extend.core.jaxprs_in_params(equation.params) for equation in jaxpr.eqns]
    return found.union(*(products(x) for some in inner for x in some))


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoExponentialFamily])
def test_devices_that_round_factors_of_products_are_told_not_to(guide, monkeypatch):
    """GPUs and TPUs multiply in 11 or 8 binary digits where nobody says otherwise; the user may."""
    model = make_logistic()
    pvi = PVI(Partition(model, "data", groups(3, 24)), guide(model))
    state = pvi.init(jax.random.key(0), X, CLASSES)
    found = {}
    for backend, precision in (("cpu", None), ("gpu", None), ("gpu", "tensorfloat32")):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        with jax.default_matmul_precision(precision):
            found[backend, precision] = products(jax.make_jaxpr(pvi.update)(state, X, CLASSES).jaxpr)
    assert {x for x in found["cpu", None] if "HIGHEST" not in x}
    assert all("HIGHEST" in x for x in found["gpu", None]) and found["gpu", None]
    assert not all("HIGHEST" in x for x in found["gpu", "tensorfloat32"])


def test_a_model_is_what_it_was_whatever_digits_its_products_have(monkeypatch):
    """What was saved or is answered for on a CPU goes on on a GPU, and the other way."""
    model = make_logistic()
    arrays, found = split_arguments((jnp.asarray(X), jnp.asarray(CLASSES)), {}), []
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        with precisely():
            found.append(model_digest(model, *arrays))
    assert found[0] == found[1]
    assert found[0] != model_digest(lambda x, y: model(2 * x, y), *arrays)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_few_coordinates_are_factorised_without_a_loop(size, tolerance):
    """The same numbers as LAPACK's, and what has no root is the identity, and said to have none."""
    root = np.tril(np.random.default_rng(size).normal(size=(4, size, size))) + 3 * np.eye(size)
    matrix = jnp.asarray(root @ np.swapaxes(root, -1, -2))
    factor, good = scaled_cholesky(matrix)
    np.testing.assert_allclose(factor, np.linalg.cholesky(matrix), rtol=tolerance, atol=tolerance)
    inverse = invert_lower.__wrapped__(factor)
    np.testing.assert_allclose(inverse @ factor, np.broadcast_to(np.eye(size), root.shape), atol=tolerance)
    assert bool(jnp.all(good))
    text = str(jax.make_jaxpr(invert_lower.__wrapped__)(factor))
    assert "scan" not in text and "while" not in text
    for wrong in (0.0, -1.0, np.nan, np.inf):
        factor, good = scaled_cholesky(matrix.at[1, 0, 0].set(wrong))
        np.testing.assert_array_equal(good, [True, False, True, True])
        np.testing.assert_array_equal(factor[1], np.eye(size))


def test_other_devices_take_larger_batches_and_the_librarys_solve(monkeypatch, tolerance):
    """The same numbers, in fewer programs to launch."""
    lower = jnp.tril(jax.random.normal(jax.random.key(0), (2, 5, 5))) + 4 * jnp.eye(5)
    chunks, here = jnp.zeros((64, 1024, 50)), jnp.linalg.inv(lower)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    np.testing.assert_allclose(invert_lower.__wrapped__(lower), here, rtol=tolerance, atol=tolerance)
    assert Vmap()._batch_size(chunks, 64, 0) < 64
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert Vmap()._batch_size(chunks, 64, 0) >= 64 > Vmap(batch_bytes=1 << 22)._batch_size(chunks, 64, 0)
    text = str(jax.make_jaxpr(lambda x: invert_lower.__wrapped__(x))(lower))
    assert "triangular_solve" in text and "while" not in text
    np.testing.assert_allclose(invert_lower.__wrapped__(lower), here, rtol=tolerance, atol=tolerance)
