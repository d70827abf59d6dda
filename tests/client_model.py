"""A model that a process of its own can import by name."""

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi.clients import Client
from tests.laws.models import rows


def logistic(X, y):
    """One affine predictor per row."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def client_of(label):
    """The client of one label, from rows that it makes itself."""
    X, _, y = rows(12)
    mine = np.array(["east", "north", "south"])[np.arange(12) % 3] == label
    return Client(logistic, AutoMultivariateNormal(logistic), label, load_rows=lambda: (X[mine], y[mine]))
