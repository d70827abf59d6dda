"""What a coarse quadrature rule may say against a step: no more than its error, which the threshold of refusals covers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from numpyro_pvi.expectations import RULES
from numpyro_pvi.expectations.quadrature import expect_1d
from numpyro_pvi.schedules import _acceptance

# Log densities of one row at its predictor: a class, a count, a class with a probit link, and a measurement with heavy tails.
ROWS = {
    "logistic": (lambda u: -jax.nn.softplus(-u), lambda u: -np.logaddexp(0.0, -u)),
    "poisson": (lambda u: 3.0 * u - jnp.exp(u), lambda u: 3.0 * u - np.exp(u)),
    "probit": (jax.scipy.stats.norm.logcdf, scipy.stats.norm.logcdf),
    "heavy": (lambda u: -2.0 * jnp.log1p(u**2 / 3.0), lambda u: -2.0 * np.log1p(u**2 / 3.0)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("rule", RULES[:3])
def test_no_good_step_is_refused_for_the_error_of_a_coarse_rule(name, rule):
    """A rule never makes a value look worse than it is by more than the share of its size that refusals wait for."""
    found, exact = ROWS[name]
    # A rate whose logarithm has an sd of ten is no q that a fit comes by; a probability's may have thirty.
    widths = [0.1, 0.5, 1.0, 2.0, 5.0] + ([] if name == "poisson" else [10.0, 30.0])
    mean, sd = (x.ravel() for x in np.meshgrid(np.linspace(-20.0, 20.0, 41), widths))
    z = np.linspace(-12.0, 12.0, 24_001)
    mass = np.exp(-0.5 * z**2)
    truth = np.array([exact(m + s * z) @ (mass / mass.sum()) for m, s in zip(mean, sd, strict=True)])
    value = np.asarray(expect_1d(found, jnp.asarray(mean), jnp.asarray(sd), rule=rule).value)
    fall = (truth - value) / (1.0 + np.abs(value))
    assert fall.max() < _acceptance._HOPELESS, (mean[fall.argmax()], sd[fall.argmax()])
    # The threshold is not idle: the coarsest rule does err.
    if name == "logistic" and rule == "gh8":
        assert np.abs(fall).max() > 1e-3
