"""A model that a process of its own can import by name."""

import numpyro
import numpyro.distributions as dist


def logistic(X, y):
    """One affine predictor per row."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)
