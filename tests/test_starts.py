"""Where sites start: never at a q that is worse than the prior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.runtime import _starts


def counts(x, y):
    slope = numpyro.sample("slope", dist.StudentT(5.0, 0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(slope * x)), obs=y)


@pytest.fixture(scope="module")
def data():
    """Large counts, which the prior expects to be about 1."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1.0, 2.0, size=12)
    return jnp.asarray(x), jnp.asarray(rng.poisson(np.exp(3.0 * x)))


@pytest.fixture(scope="module")
def unit_sites(data):
    """The fit from unit sites, and its first loss: the prior's."""
    pvi = PVI(Partition(counts, "rows", 3), AutoMultivariateNormal(counts), init_sites="prior")
    return pvi, float(pvi.evaluate(pvi.init(jax.random.key(0), *data), *data))


def _start(unit_sites, data):
    """The loss where q starts from the defaults."""
    pvi = PVI(Partition(counts, "rows", 3), AutoMultivariateNormal(counts))
    return float(unit_sites[0].evaluate(pvi.init(jax.random.key(0), *data), *data))


def test_a_start_is_better_than_the_prior(unit_sites, data):
    """Full steps from the prior and from its location overshoot here: they are halved until the ELBO is above the prior's."""
    assert _start(unit_sites, data) < unit_sites[1]


def test_the_law_sees_full_steps(unit_sites, data, monkeypatch):
    """Without halving no step is found, and q starts at the prior: what the law must not miss."""
    monkeypatch.setattr(_starts, "MAX_START_HALVINGS", 0)
    jax.clear_caches()
    start = _start(unit_sites, data)
    jax.clear_caches()
    assert start >= unit_sites[1]
