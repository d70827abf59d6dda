"""Draws for shared latents and for those of every unit, spread evenly: standard normal each, and nearer to integrals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_pvi.expectations import shifted_normals

DIM, WIDTH, UNITS, COUNT, KEYS = 2, 1, 3, 16, 4000


def many(dim=DIM, width=WIDTH, count=COUNT):
    keys = jax.random.split(jax.random.key(0), KEYS)
    return jax.jit(jax.vmap(lambda k: shifted_normals(k, dim, width, count, UNITS, jnp.result_type(float))))(keys)


@pytest.mark.parametrize("dim", [DIM, 40])
def test_moments_are_those_of_standard_normals(dim):
    """Means over 4,000 keys, within 5 of their own standard errors: one false alarm in 10^5 runs."""
    shared, own = (np.asarray(x, np.float64) for x in many(dim))
    assert shared.shape == (KEYS, COUNT, dim) and own.shape == (KEYS, UNITS, COUNT, WIDTH)
    unit = own[:, 1, :, 0]
    for values, expected in (
        (shared[..., 0], 0.0), (shared[..., 0] ** 2, 1.0), (shared[..., 0] ** 4, 3.0), (unit**2, 1.0), (unit**4, 3.0),
        (shared[..., 0] * shared[..., 1], 0.0), (shared[..., 0] * unit, 0.0), ((shared[..., 0] * unit) ** 2, 1.0),
    ):  # fmt: skip
        each = values.mean(axis=1)
        assert abs(each.mean() - expected) <= 5 * each.std() / np.sqrt(KEYS) + 1e-6


def test_integrals_over_shared_and_own_latents_are_nearer():
    def error(integrand, shared, own):
        return np.std(np.mean(integrand(shared[..., 0], own[:, 0, :, 0]), axis=1))

    shared, own = (np.asarray(x) for x in many(count=64))
    rng = np.random.default_rng(0)
    alone = rng.normal(size=shared.shape), rng.normal(size=own.shape)

    def growing(a, b):
        return np.exp(0.5 * (a + b))

    assert error(growing, shared, own) < 0.5 * error(growing, *alone)
    # The planted fault: each spread by itself, but not together.
    apart = rng.permuted(own, axis=2)
    assert error(np.multiply, shared, own) < 0.85 * error(np.multiply, *alone)
    assert error(np.multiply, shared, apart) > 0.95 * error(np.multiply, *alone)


def test_units_have_draws_of_their_own():
    _, own = many()
    assert np.all(np.abs(np.asarray(own[:, 0] - own[:, 1])).max(axis=1) > 0)
