"""Batches of a map: the values of ``jax.lax.map`` without its copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_pvi._numerics import in_batches


def _operands(count):
    rng = np.random.default_rng(count)
    return {"x": jnp.asarray(rng.normal(size=(count, 3))), "n": jnp.arange(count), "on": jnp.arange(count) % 2 == 0}


def _function(one):
    return jnp.where(one["on"], jnp.sin(one["x"]), one["n"] * one["x"]), one["n"] + 1


@pytest.mark.parametrize(("count", "batch"), [(7, 3), (8, 4), (5, 1), (4, 9), (11, 10), (6, 6)])
def test_values_and_slopes_are_those_of_one_after_another(count, batch):
    operands = _operands(count)

    def total(x, mapped):
        values, numbers = mapped(operands | {"x": x})
        return jnp.sum(values**2 * numbers[:, None]), (values, numbers)

    def one_by_one(given):
        return jax.tree.map(
            lambda *r: jnp.stack(r), *[_function(jax.tree.map(lambda x, i=i: x[i], given)) for i in range(count)]
        )

    take = jax.value_and_grad(total, has_aux=True)
    (_, wanted), slopes = take(operands["x"], one_by_one)
    (_, found), found_slopes = take(operands["x"], lambda given: in_batches(_function, given, batch))
    for a, b in zip((*wanted, slopes), (*found, found_slopes), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_operands_are_read_in_place():
    """What `jax.lax.map` needs beside arguments and results is a copy of the operands; here it is some batches."""
    operands = jnp.zeros((101, 64, 64))

    def temporary(mapped):
        compiled = jax.jit(lambda x: mapped(lambda one: jnp.sum(jnp.tanh(one) ** 2), x, 4)).lower(operands).compile()
        return compiled.memory_analysis().temp_size_in_bytes / operands.nbytes

    assert temporary(in_batches) < 0.2
    assert temporary(lambda function, x, batch: jax.lax.map(function, x, batch_size=batch)) > 0.5
