"""Of many rows structure is looked for in some: it is what all of them show, and what every row must meet is asked of all."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import Partition
from numpyro_pvi.factors import _probe, plan_factors

N, KEY = 12, jax.random.key(0)
RNG = np.random.default_rng(0)
X, Y, Z = RNG.normal(size=(N, 2)), RNG.normal(size=N), RNG.normal(size=(N, 3))
COUNTS, GROUP, EXPOSURE = RNG.poisson(2.0, N), np.arange(N) % 3, 1 + RNG.random(N)


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))


def linear(X, y):
    w = weights()
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def exposed(X, y, exposure):
    w = weights()
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(X @ w)), obs=y)


def varying(group, y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, s))
    with numpyro.plate("data", group.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, a[group], 1.0), obs=y)


def two_axes(Z):
    m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("columns", 3, dim=-1), numpyro.plate("data", Z.shape[0], dim=-2):
        numpyro.sample("y", dist.Normal(m, s), obs=Z)


def own(y):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(m, 1))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


CASES = {
    "linear": (linear, (X, Y)),
    "exposed": (exposed, (X, COUNTS, EXPOSURE)),
    "varying": (varying, (GROUP, Y)),
    "two axes": (two_axes, (Z,)),
    "own latents": (own, (Y,)),
}


def plan(model, args):
    return plan_factors(Partition(model, "data", 3), tuple(map(jnp.asarray, args)), {}, key=KEY).plan


@pytest.mark.parametrize("name", CASES)
def test_some_rows_show_what_all_do(name, monkeypatch):
    whole = plan(*CASES[name])
    monkeypatch.setattr(_probe, "_MOST_ROWS", 5)
    assert plan(*CASES[name]) == whole


def test_an_offset_of_zero_in_any_row_is_no_predictor(monkeypatch):
    """A row without exposure has no log-rate: quadrature over it would be of log 0. The row is not among those looked at."""
    monkeypatch.setattr(_probe, "_MOST_ROWS", 5)
    exposure = np.where(np.arange(N) == 1, 0.0, EXPOSURE)
    assert 1 not in np.linspace(0, N - 1, 5).astype(int)
    found = plan(exposed, (X, np.where(exposure > 0, COUNTS, 0), exposure))
    assert "likelihood" not in found.proved
