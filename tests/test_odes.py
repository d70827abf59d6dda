"""Models with a solver of differential equations: as many steps as its rates are large, and derivatives in reverse alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI
from numpyro_pvi._compiling import loops_on, without_unread
from numpyro_pvi.factors import _probe

T = np.linspace(0.2, 2.0, 8)
Y = 1.3 * np.exp(-0.8 * T) + 0.05 * np.cos(5.0 * np.arange(8))


@jax.custom_vjp
def solved(rate, t):
    """``exp(-rate t)`` as an adaptive solver has it."""
    steps = jnp.ceil(1.0 + rate)
    return jax.lax.fori_loop(0, steps.astype(jnp.int32), lambda _, x: x * jnp.exp(-rate * t / steps), jnp.ones_like(t))


def _forward(rate, t):
    return solved(rate, t), (rate, t)


def _backward(kept, slope):
    rate, t = kept
    return jnp.sum(-t * solved(rate, t) * slope), jnp.zeros_like(t)


solved.defvjp(_forward, _backward)


def decay_by(solution):
    def model(t, y):
        rate = numpyro.sample("rate", dist.LogNormal(0.0, 0.7))
        start = numpyro.sample("start", dist.Normal(1.0, 0.5))
        with numpyro.plate("times", len(t)):
            numpyro.sample("y", dist.Normal(start * solution(rate, t), 0.1), obs=y)

    return model


def test_a_solver_gives_what_the_solution_gives(tolerance):
    """Beside the closed form of the same equation; it was a TypeError of JAX, after rates that take 10^9 steps."""
    found = []
    for solution in (solved, lambda rate, t: jnp.exp(-rate * t)):
        model = decay_by(solution)
        pvi = PVI(model, AutoMultivariateNormal(model), num_groups=2)
        result = pvi.run(jax.random.key(0), 40, jnp.asarray(T), jnp.asarray(Y), progress_bar=False, tol=1e-6)
        found.append((result.losses[-1], result.params["auto_loc"], result.params["auto_scale_tril"]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e6 * tolerance)


def test_rays_end_where_a_solver_could_not():
    """Farthest step of 30 sds, and 3 where what is looked at loops; nothing else is moved."""
    loc, directions = jnp.zeros(2), jnp.ones((_probe.NUM_DIRECTIONS * len(_probe._RAY_SCALES), 2))
    here = jnp.asarray(T)
    plain, looped = (jax.make_jaxpr(f)(1.0, here) for f in (lambda r, t: jnp.exp(-r * t), solved))
    assert loops_on(looped.jaxpr) and not loops_on(plain.jaxpr)
    far, near = (np.asarray(_probe.ray_points(loc, directions, x.jaxpr)) for x in (plain, looped))
    assert far.max() == pytest.approx(30.0) and near.max() == pytest.approx(3.0)
    assert np.mean(far == near) == pytest.approx(0.8, abs=0.05)


def test_derivatives_are_of_what_is_read():
    def both(x):
        return {"read": x**3, "unread": jnp.sum(solved(x, jnp.asarray(T)))}

    wanted = without_unread(lambda x: both(x)["read"], 2.0)
    assert jax.jacfwd(jax.grad(wanted))(2.0) == pytest.approx(12.0)
    # The planted fault: all of it.
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jacfwd(jax.grad(lambda x: both(x)["read"]))(2.0)
