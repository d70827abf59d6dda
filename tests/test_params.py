"""The optimiser of ``numpyro.param`` sites: every kind that ``PVI(optim=)`` names moves them, and what is none is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.example_libraries import optimizers
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_pvi import PVI, PVIError
from numpyro_pvi.solvers import of_params

Y = np.array([0.4, 1.9, 1.1, 0.2, 1.5, 0.7])
# Name: (the optimiser, steps after which it has arrived).
KINDS = {
    "numpyro": (lambda: numpyro.optim.Adam(0.1), 300),
    "numpyro, searching": (numpyro.optim.Minimize, 1),
    "jax": (lambda: optimizers.adam(0.1), 300),
    "optax": (lambda: optax.adam(0.1), 300),
    "optax, by the value": (lambda: optax.chain(optax.sgd(0.2), optax.contrib.reduce_on_plateau()), 300),
    "optax, searching": (optax.lbfgs, 20),
}


def model(y):
    """Its evidence is largest where ``loc`` is the mean of y."""
    loc = numpyro.param("loc", jnp.array(0.0))
    w = numpyro.sample("w", dist.Normal(loc, 0.5))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(w, 0.7), obs=y)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lowers_an_objective(kind):
    make, steps = KINDS[kind]
    optim = of_params(make())

    def objective(params):
        return jnp.sum((params["a"] - 1.5) ** 2) + 3 * (params["b"] + 0.5) ** 2, None

    state = optim.init({"a": jnp.zeros(2), "b": jnp.zeros(())})
    state = jax.lax.fori_loop(0, steps, lambda _, state: optim.eval_and_update(objective, state)[1], state)
    found = optim.get_params(state)
    np.testing.assert_allclose(found["a"], 1.5, atol=2e-3)
    np.testing.assert_allclose(found["b"], -0.5, atol=2e-3)


def test_an_optimiser_that_searches_fits_the_params_of_a_model():
    """It does nothing unless it is given the objective itself."""
    pvi = PVI(model, AutoDiagonalNormal(model), numpyro.optim.Minimize(), num_groups=2)
    result = pvi.run(jax.random.key(0), 60, jnp.asarray(Y), progress_bar=False)
    assert float(result.params["loc"]) == pytest.approx(Y.mean(), abs=1e-3)


@pytest.mark.parametrize(
    "optim", ["adam", numpyro.optim.Adam, optax.adam, 0.01], ids=["name", "class", "function", "number"]
)
def test_what_is_no_optimiser_is_refused(optim):
    with pytest.raises(PVIError, match=r"optim=.*expected an optimiser of numpyro.optim, .*\(0.01\)"):
        PVI(model, AutoDiagonalNormal(model), optim)


def positive(y):
    scale = numpyro.param("scale", jnp.ones(2), constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(0.0, scale).to_event(1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(w.sum(), 0.7), obs=y)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (np.ones(3), r"init_params\['scale'\] has shape \(3,\), and the model's numpyro.param \(2,\)"),
        (np.array([1.0, np.nan]), r"init_params\['scale'\], a numpyro.param, has entries that are not finite"),
        (np.array([2.0, -1.0]), r"numpyro.param 'scale' starts outside of its constraint"),
        ({"a": 1.0}, r"init_params\['scale'\] is another tree than the model's numpyro.param: give it \(2,\)"),
    ],
    ids=["shape", "nan", "outside", "tree"],
)
def test_a_start_that_a_param_cannot_have_is_refused_by_its_name(start, said):
    pvi = PVI(positive, AutoDiagonalNormal(positive), numpyro.optim.Adam(0.1), num_groups=2)
    with pytest.raises(PVIError, match=said):
        pvi.init(jax.random.key(0), jnp.asarray(Y), init_params={"scale": start})
