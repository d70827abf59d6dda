"""Fits through every mechanism: the same data read in three ways give the same posterior, and exact ones are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import Conjugate

N = 12
RNG = np.random.default_rng(7)
X = RNG.normal(size=(N, 2))
REAL = X @ np.array([0.8, -0.5]) + 0.3 * RNG.normal(size=N)
BINARY = (RNG.random(N) < 1 / (1 + np.exp(-2 * X[:, 0]))).astype(float)
LABELS = ["a"] * 3 + ["b"] * 7 + ["a"] + ["c"]
EXACT = jax.config.jax_enable_x64
KEY = jax.random.key(0)

pytestmark = pytest.mark.filterwarnings("ignore:.*full pass over all.*:UserWarning")

LIKELIHOODS = {
    "quadratic": (lambda x, w: dist.Normal(x @ w, 0.5), REAL),
    "affine": (lambda x, w: dist.Bernoulli(logits=x @ w), BINARY),
    "draws": (lambda x, w: dist.Normal(jnp.tanh(x @ w), 0.5), REAL),
}


def models(kind):
    """The same model with sliceable arguments, indexed, and closed over."""
    likelihood, y = LIKELIHOODS[kind]
    X_, y_ = jnp.asarray(X), jnp.asarray(y)

    def weights():
        return numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))

    def args(x, y):
        w = weights()
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", likelihood(x, w), obs=y)

    def index(x, y):
        w = weights()
        with numpyro.plate("data", N) as i:
            numpyro.sample("obs", likelihood(x[i], w), obs=y[i])

    def mask():
        w = weights()
        with numpyro.plate("data", N):
            numpyro.sample("obs", likelihood(X_, w), obs=y_)

    return {"args": (args, (X, y)), "index": (index, (X, y)), "mask": (mask, ())}


def fit(model, arguments, groups, rounds=3, plate="data", guide=AutoMultivariateNormal, **options):
    kwargs = {k: options.pop(k) for k in ("sites",) if k in options}
    pvi = PVI(Partition(model, plate, groups, **kwargs), guide(model), **options)
    return pvi, pvi.run(KEY, rounds, *arguments, progress_bar=False)


def moments(pvi, state):
    q = state.prior + jax.tree.map(lambda x: x.sum(0), state.sites.groups)
    return np.asarray(q.precision_mean), np.asarray(q.precision)


# Draws under the sequential schedule, which takes them like the other, compile for long.
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, id=f"{kind}-{name}", marks=[pytest.mark.slow] * (kind == "draws" and late))
        for kind in LIKELIHOODS
        for name, schedule, late in (("synchronous", Synchronous(), False), ("sequential", Sequential(), True))
    ],
)
def test_mechanisms_agree(kind, schedule):
    found = {}
    for mechanism, (model, arguments) in models(kind).items():
        pvi, result = fit(model, arguments, LABELS, schedule=schedule)
        part = result.state.plan.partition
        assert part.mechanism == mechanism and part.likelihood == kind
        found[mechanism] = (*moments(pvi, result.state), np.asarray(result.losses))
    for mechanism in ("index", "mask"):
        for got, wanted in zip(found[mechanism], found["args"], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9 if EXACT else 3e-4, atol=1e-9 if EXACT else 1e-4)


def test_two_plates_split_together_are_exact():
    """Measurements of two kinds, each with its own labels; one group is absent from the second."""

    def model(first, second):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("A", first.shape[0]):
            numpyro.sample("a", dist.Normal(w[0], 0.5), obs=first)
        with numpyro.plate("B", second.shape[0]):
            numpyro.sample("b", dist.Normal(w[0] + w[1], 2.0), obs=second)

    first, second = REAL[:5], REAL[5:9]
    groups = {"A": ["x", "y", "z", "x", "x"], "B": ["x", "y", "y", "x"]}
    pvi, result = fit(model, (first, second), groups, 1, plate=None, solver=Conjugate())
    a, b = np.array([1.0, 0.0]), np.array([1.0, 1.0])
    precision = np.eye(2) + 5 * np.outer(a, a) / 0.25 + 4 * np.outer(b, b) / 4.0
    vector = a * first.sum() / 0.25 + b * second.sum() / 4.0
    got_vector, got_precision = moments(pvi, result.state)
    np.testing.assert_allclose(got_precision, precision, rtol=1e-6)
    np.testing.assert_allclose(got_vector, vector, rtol=1e-5)
    site = pvi.site(result.state, "z")
    np.testing.assert_allclose(site.precision, np.outer(a, a) / 0.25, rtol=1e-6, atol=1e-6)
    assert pvi.groups == ("x", "y", "z")


def test_time_blocks_of_a_scan_are_exact():
    """A local-level model: blocks of time as groups; the states are shared, and their prior is one Gaussian."""

    def model(y):
        def step(level, value):
            level = numpyro.sample("level", dist.Normal(level, 0.5))
            numpyro.sample("obs", dist.Normal(level, 0.7), obs=value)
            return level, None

        scan(step, 0.0, y)

    y = REAL[:5]
    pvi, result = fit(model, (y,), ["a", "a", "b", "b", "b"], 1, plate=None, sites={"obs": -1}, solver=Conjugate())
    assert result.state.plan.partition.mechanism == "mask" and not result.state.plan.partition.has_prior_factor
    steps = np.eye(5) - np.eye(5, k=-1)
    precision = steps.T @ steps / 0.25 + np.eye(5) / 0.49
    got_vector, got_precision = moments(pvi, result.state)
    np.testing.assert_allclose(got_precision, precision, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_vector, y / 0.49, rtol=1e-5)
    site = np.diag(pvi.site(result.state, "a").precision)
    np.testing.assert_allclose(site, np.array([1, 1, 0, 0, 0]) / 0.49, atol=1e-5)


def test_a_users_own_mini_batch_is_replaced_by_all_rows():
    def batched(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", N, subsample_size=4) as i:
            numpyro.sample("obs", dist.Normal(x[i] @ w, 0.5), obs=y[i])

    pvi, result = fit(batched, (X, REAL), LABELS, 1)
    precision = np.eye(2) + X.T @ X / 0.25
    np.testing.assert_allclose(moments(pvi, result.state)[1], precision, rtol=1e-5)
    # Everything after the fit sees all rows, too.
    idata = pvi.to_arviz(KEY, result, X, REAL, num_samples=10)
    assert idata.log_likelihood["obs"].shape[-1] == N
    assert pvi.khat(result.state, X, REAL, rng_key=KEY, num_samples=200) < 0.5


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoDiagonalNormal])
def test_a_flax_module_with_priors_needs_no_optimiser(guide):
    nn = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    def model(x, y):
        net = random_flax_module("net", nn.Dense(1), dist.Normal(0, 1), input_shape=(1, 2))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Normal(net(x)[:, 0], 0.5), obs=y)

    _, result = fit(model, (X, REAL), LABELS, 3, guide=guide)
    assert result.state.plan.partition.params == ()
    features = np.c_[np.ones(N), X]
    precision = np.eye(3) + features.T @ features / 0.25
    loc = np.linalg.solve(precision, features.T @ REAL / 0.25)
    if guide is AutoMultivariateNormal:
        np.testing.assert_allclose(result.params["auto_loc"], loc, atol=1e-4)


def test_a_flax_module_of_params_is_optimised():
    nn = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import flax_module

    def model(x, y):
        net = flax_module("net", nn.Dense(1), input_shape=(1, 2))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Normal(net(x)[:, 0] + b, 0.5), obs=y)

    pvi, result = fit(model, (X, REAL), LABELS, 40, optim=numpyro.optim.Adam(0.05))
    assert result.state.plan.partition.params == ("net$params",)
    assert result.losses[-1] < result.losses[0] - 1.0
    kernel = pvi.get_params(result.state)["net$params"]["kernel"]
    assert kernel.shape == (2, 1)
