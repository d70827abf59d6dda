"""What server and hospitals agree on beforehand: the model, the guide, and on which scale columns are measured."""

from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal

# Set where the module is read, which is in every process of the server's and of the hospitals'.
numpyro.enable_x64()

HOSPITALS = "ABCDE"
COLUMNS = ("mean radius", "mean smoothness", "mean concave points")
# Agreed on, and not taken from the rows: nobody knows the mean of all of them.
CENTRE, SCALE = np.array([14.0, 0.096, 0.049]), np.array([3.5, 0.014, 0.039])


def model(X, y=None):
    """Logistic regression: intercept ~ Normal(0, 5), coefficients ~ Normal(0, 2.5)."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    coefficients = numpyro.sample("coefficients", dist.Normal(0.0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ coefficients), obs=y)


def guide():
    """The approximation's family, as server and hospitals have it."""
    return AutoMultivariateNormal(model)


def table_of(hospital):
    """One hospital's table: columns of X, then the outcome.

    The hospitals are simulated: scikit-learn's breast-cancer data (569 patients), ranked by a noisy column and cut into five.
    """
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    names = list(data.feature_names)
    texture = data.data[:, names.index("mean texture")]
    order = np.argsort(texture + np.random.default_rng(0).normal(0.0, 3.0, size=len(texture)))
    parts = np.split(order, [28, 85, 171, 313])
    mine = parts[HOSPITALS.index(hospital)]
    X = data.data[mine][:, [names.index(name) for name in COLUMNS]]
    return np.column_stack([X, 1 - data.target[mine]])


def rows_of(hospital, path=None):
    """One hospital's rows as the model takes them, from its own file where it has one."""
    table = table_of(hospital) if path is None else np.loadtxt(Path(path), delimiter=",")
    return (table[:, :-1] - CENTRE) / SCALE, table[:, -1].astype(int)
