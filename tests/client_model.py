"""Models that a process of its own can import by name."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import AutoExponentialFamily
from numpyro_pvi.clients import Client
from tests.laws.models import rows


def logistic(X, y):
    """One affine predictor per row."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def both(X, y):
    """A latent of every row's own, and a param of its prior; neither Gaussian nor seen through one predictor."""
    spread = numpyro.param("spread", jnp.array(0.5), constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.3 * w[0], spread))
        numpyro.sample("obs", dist.Poisson(jnp.exp(0.5 * (X @ w) + u)), obs=y)


def line(x, y):
    """A normal slope and a gamma precision, each conjugate given the other."""
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * x, 1 / jnp.sqrt(tau)), obs=y)


def client_of(label):
    """The client of one label, from rows that it makes itself."""
    X, y = rows_of(label)
    return Client(logistic, AutoMultivariateNormal(logistic), label, load_rows=lambda: (X, y))


def family_client_of(label, solver=None):
    """The same under families: of :func:`line`."""
    X, y = rows_of(label)
    return Client(line, AutoExponentialFamily(line), label, load_rows=lambda: (X[:, 0], y), solver=solver)


def rows_of(label):
    """Of one label, every third row."""
    X, _, y = rows(12)
    mine = np.array(["east", "north", "south"])[np.arange(12) % 3] == label
    return X[mine], y[mine]
