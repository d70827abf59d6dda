"""Warnings stand at the user's line that they are about, by whichever way it came into the package."""

import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_pvi import PVI, Partition

KEY = random.key(0)
X = np.linspace(-1.0, 1.0, 6)


def model(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w, 1.0), obs=x)


def standardised(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    x = x - x.mean()
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w, 1.0), obs=x)


def unplated(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("obs", dist.Normal(w, 1.0).expand([6]).to_event(1), obs=x)


def fit(fitted=model, **kwargs):
    return PVI(Partition(fitted, "data", list("aabbcc")), AutoDiagonalNormal(fitted), **kwargs)


def plan():
    Partition(standardised, "data", list("aabbcc")).plan(X)


def first_state():
    fit(standardised).init(KEY, X)


def run():
    fit(standardised).run(KEY, 1, X, progress_bar=False)


def kept_whole():
    PVI(unplated, AutoDiagonalNormal(unplated), num_groups=3).init(KEY, X)


def forgotten():
    pvi = fit()
    pvi.forget_group(pvi.init(KEY, X), "b")


def unread():
    pvi = fit()
    state = pvi.init(KEY, X)
    state = pvi.add_group(state, "d", X[:2], num_steps=0)
    pvi.add_group(state, "e", X[:2], num_steps=0)


@pytest.mark.parametrize("way", [plan, first_state, run, kept_whole, forgotten, unread])
def test_warnings_name_the_line_that_called(way):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        way()
    ours = [x for x in seen if x.category is UserWarning]
    assert ours
    first = way.__code__.co_firstlineno
    for x in ours:
        assert x.filename == __file__ and first < x.lineno <= first + 6, (x.filename, x.lineno, str(x.message)[:80])
