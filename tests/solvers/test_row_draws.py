"""Rows with draws of their own: unbiased whatever the network, noisier nowhere, and refused where rows cannot have them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi.expectations._local_reparameterisation as module
from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import at_rows_draws
from numpyro_pvi.solvers import LocalELBO
from tests.laws import oracles
from tests.laws.models import NOISE, make_independent_linear, rows

X, Y, _ = rows(24)
NUMBERS = np.array([0.5, -1.2, 0.8, 1.7])
LOC, SD = np.array([0.7, -0.4, 0.3]), np.array([0.5, 0.6, 0.4])


# What rows make of three latents, in products of matrices and, for the oracle, row by row. In turn: every latent is seen once;
# the first layer is read twice; a weight is in two layers; a latent is seen by no product; a row has two numbers, or sees a
# latent in as many places as there are rows.
NETWORKS = {
    "layers": (lambda x, w, v, b: jnp.tanh(x @ w + b) @ v, lambda x, w, v, b: np.tanh(x * w + b) * v),
    "around": (lambda x, w, v, b: around(x @ w + b) @ v, lambda x, w, v, b: (np.tanh(x * w + b) + x * w + b) * v),
    "tied": (lambda x, w, v, b: jnp.tanh(x @ w + b) @ w + x @ v, lambda x, w, v, b: np.tanh(x * w + b) * w + x * v),
    "scale": (lambda x, w, v, b: (x @ w + b) * jnp.exp(v[0, 0]), lambda x, w, v, b: (x * w + b) * np.exp(v)),
    "times": (
        lambda x, w, v, b: jnp.prod(jnp.tanh(jnp.stack([x, 2 * x], 1) @ w + b), 1) @ v,
        lambda x, w, v, b: np.tanh(x * w + b) * np.tanh(2 * x * w + b) * v,
    ),
    "places": (
        lambda x, w, v, b: jnp.sum(jnp.tanh(x @ w + jnp.broadcast_to(b, (4,))), 1, keepdims=True) / 4 @ v,
        lambda x, w, v, b: np.tanh(x * w + b) * v,
    ),
}


def around(a):
    return jnp.tanh(a) + a


def density(network):
    def of(chunk, point):
        x = jnp.asarray(NUMBERS, point.dtype)[chunk[0]][:, None]
        w, v, b = point[:1].reshape(1, 1), point[1:2].reshape(1, 1), point[2:]
        return -0.5 * jnp.sum(jnp.square(NETWORKS[network][0](x, w, v, b) - 0.3) * chunk[1][:, None])

    return of


def by_quadrature(network):
    """E f, E grad f and the diagonal of E hess f over a grid of Gauss and Hermite's nodes, in NumPy."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    total, slope, bend = 0.0, np.zeros(3), np.zeros(3)
    for e, p in zip(itertools.product(nodes, repeat=3), itertools.product(weights, repeat=3), strict=True):
        e, p = np.array(e), np.prod(p)
        if p < 1e-14:
            continue
        value = -0.5 * np.sum((NETWORKS[network][1](NUMBERS, *(LOC + SD * e)) - 0.3) ** 2)
        # Stein's identities.
        total, slope, bend = total + p * value, slope + p * value * e / SD, bend + p * value * (e**2 - 1) / SD**2
    return total, slope, bend


def errors(network):
    """How many standard errors the mean of many draws is off, at most."""
    chunk, count = (jnp.arange(4), jnp.ones(4)), 20_000

    @jax.jit
    def draws(keys):
        one = lambda key: at_rows_draws(density(network), chunk, 4, jnp.asarray(LOC), jnp.asarray(SD), key)  # noqa: E731
        return jax.vmap(one)(keys)

    worst = 0.0
    for found, wanted in zip(draws(jax.random.split(jax.random.key(0), count)), by_quadrature(network), strict=True):
        found = np.asarray(found, np.float64)
        off = np.abs(found.mean(0) - wanted) / (found.std(0) / np.sqrt(count) + 1e-12)
        worst = max(worst, float(np.max(off)))
    return worst


@pytest.mark.parametrize("network", NETWORKS)
def test_rows_draws_are_unbiased(network):
    assert errors(network) < 4.5


def _one_reader(users):
    return dict.fromkeys(users, 1)


def _take_always(self, index):
    self.by_row[index.reshape(-1)] = True
    return True


FAULTS = {
    "squares": ("layers", lambda plant: plant.setattr(module.jnp, "square", jnp.abs)),
    "every reader draws": ("around", lambda plant: plant.setattr(module, "Counter", _one_reader)),
    "a weight drawn twice": ("tied", lambda plant: plant.setattr(module._Walk, "_take", _take_always)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    network, plant = FAULTS[fault]
    plant(monkeypatch)
    assert errors(network) > 6


def test_curvatures_are_less_noisy_than_from_one_draw_for_all_rows():
    """What a row's draw says of the others is noise: four rows of a linear layer have half its sd."""
    chunk, keys = (jnp.arange(4), jnp.ones(4)), jax.random.split(jax.random.key(1), 4_000)
    loc, sd = jnp.asarray(LOC), jnp.asarray(SD)

    @jax.jit
    def both(keys):
        def by_row(key):
            return at_rows_draws(density("layers"), chunk, 4, loc, sd, key)[2]

        def at_once(key):
            eps = jax.random.normal(key, (3,))
            return jax.grad(lambda p: density("layers")(chunk, p))(loc + sd * eps) * eps / sd

        return jax.vmap(by_row)(keys), jax.vmap(at_once)(keys)

    own, common = (np.asarray(x, np.float64).std(0) for x in both(keys))
    assert np.all(own < 0.8 * common)


# ----------------------------------------------------------------------------------------------------------- in a solver

MANY = LocalELBO(
    optax.adam(0.02), num_steps=60, num_particles=32, batch_size=6, curvature="steps", local_reparameterisation=True
)


def fitted(model, solver, guide=AutoDiagonalNormal, rounds=30):
    pvi = PVI(Partition(model, "data", np.arange(24) % 3), guide(model), solver=solver)
    return pvi.run(jax.random.key(0), rounds, X, Y, progress_bar=False).params


def test_a_linear_model_ends_at_its_mean_field_posterior():
    found = fitted(make_independent_linear(), MANY)
    exact = oracles.linear_posterior(X, Y, NOISE, np.zeros(2), 4 * np.eye(2))
    loc, variances = oracles.mean_field_of_gaussian(*exact)
    assert np.max(np.abs(found["auto_loc"] - loc) / np.sqrt(variances)) < 0.1
    assert np.max(np.abs(np.log(found["auto_scale"] / np.sqrt(variances)))) < 0.05


def test_what_cannot_be_drawn_by_row_is_refused():
    def elsewhere(X, y=None):
        """A latent that rows see by no product."""
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(X[:, 0] * jnp.exp(w), 1.0), obs=y)

    with pytest.raises(PVIError, match="AutoNormal or AutoDiagonalNormal"):
        fitted(make_independent_linear(), MANY, AutoMultivariateNormal, 1)
    with pytest.raises(PVIError, match="no latent is seen by rows through a product"):
        fitted(elsewhere, MANY, AutoDiagonalNormal, 1)
    with pytest.raises(PVIError, match="expected True or False"):
        LocalELBO(local_reparameterisation=1)
    with pytest.raises(PVIError, match="one draw of all latents"):
        MANY.by_gradients(True)
    with pytest.raises(PVIError, match="evaluated by masks"):
        MANY.check_groups({"a": 24}, "mask")
    with pytest.raises(PVIError, match=r"local_reparameterisation=True\) is about"):
        LocalELBO(local_reparameterisation=True).check_families()
