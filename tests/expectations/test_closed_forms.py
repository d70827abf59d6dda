"""Closed forms over affine predictors beside sums over a grid, and their derivatives beside those of their values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import Partition
from numpyro_pvi.expectations import _closed_forms
from numpyro_pvi.expectations._closed_forms import closed_form, has_closed_form
from numpyro_pvi.factors import ModelCall, prepare_term, term_log_prob
from numpyro_pvi.factors._planner import plan_factors

ROWS, D = 6, 3
RNG = np.random.default_rng(0)
X, Y = jnp.asarray(RNG.normal(size=(ROWS, D))), jnp.asarray(2.0 * RNG.normal(size=ROWS))


def of_rows(kind, scale=1.0):
    """A regression whose rows' scale is unknown."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("data", x.shape[0]), numpyro.handlers.scale(scale=scale):
            numpyro.sample("obs", kind(x @ w, s), obs=y)

    return model


def of_members(prior):
    """Members whose prior's location, or scale, or both are unknown."""

    def model(x, y):
        m, t = numpyro.sample("m", dist.Normal(0, 2)), numpyro.sample("t", dist.HalfNormal(1.0))
        with numpyro.plate("members", D):
            w = numpyro.sample("w", prior(m, t))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.StudentT(4.0, x @ w, 1.0), obs=y)

    return model


MODELS = {
    "normal": of_rows(dist.Normal),
    "normal, scaled": of_rows(dist.Normal, 2.5),
    "laplace": of_rows(dist.Laplace),
    "members": of_members(dist.Normal),
    "members of a known location": of_members(lambda m, t: dist.Normal(1.5, t)),
    "members beside a slope": of_members(
        lambda m, t: dist.Normal(m * jnp.arange(1.0, 4.0) - 1.0, t * jnp.arange(1.0, 4.0))
    ),
    "laplace members": of_members(lambda m, t: dist.Laplace(m, t)),
}


def terms_of(model):
    found = plan_factors(Partition(model, "data", 2), (X, Y), {}, key=jax.random.key(1))
    call = ModelCall(model, found.plan.layout, (X, Y), {}, {})
    for spec in (*found.plan.terms, *found.plan.prior_terms):
        yield spec, prepare_term(call, spec)


def law_of(data):
    """Random laws of the term's two predictors: means, and covariances by pair."""
    count, rng = int(np.prod(data.fn.batch_shape)), np.random.default_rng(3)
    roots = 0.4 * rng.normal(size=(count, 2, 2))
    covariance = jnp.asarray(roots @ roots.swapaxes(1, 2))
    mean = jnp.asarray(rng.normal(size=count)), jnp.asarray(0.3 * rng.normal(size=count))
    return mean, {(i, j): covariance[:, i, j] for i, j in ((0, 0), (0, 1), (1, 1))}


def on_a_grid(spec, data, mean, spread):
    """Expectations of values over a fine grid of both predictors, element by element."""
    nodes = np.linspace(-11.0, 11.0, 1101)
    density = np.exp(-0.5 * nodes**2) / np.exp(-0.5 * nodes**2).sum()
    sd = np.sqrt(spread[1, 1])
    slope, rest = spread[0, 1] / sd, np.sqrt(spread[0, 0] - (spread[0, 1] / sd) ** 2)

    def line(z, weight):
        values = jax.vmap(lambda x: term_log_prob(spec, data, (mean[0] + slope * z + rest * x, mean[1] + sd * z)))
        return weight * jnp.asarray(density, sd.dtype) @ values(jnp.asarray(nodes, sd.dtype))

    return jax.lax.map(lambda xs: line(*xs), (jnp.asarray(nodes, sd.dtype), jnp.asarray(density, sd.dtype))).sum(axis=0)


def gaps(spec, data):
    """How far a closed form is from the grid, and its derivatives from those of its value in the law; relative."""
    mean, spread = law_of(data)
    value, slopes, bends, _ = closed_form(spec, data, mean, spread)
    along, across = jax.grad(lambda *law: jnp.sum(closed_form(spec, data, *law)[0]), (0, 1))(mean, spread)
    wanted = on_a_grid(spec, data, mean, spread), *along, 2 * across[0, 0], across[0, 1], 2 * across[1, 1]
    pairs = zip((value, *slopes, *bends.values()), wanted, strict=True)
    return max(float(jnp.max(jnp.abs(a - b) / (1.0 + jnp.abs(b)))) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_expectation_and_its_derivatives(name):
    closed = [(s, d) for s, d in terms_of(MODELS[name]) if has_closed_form(s, d.fn)]
    ((spec, data),) = closed
    assert spec.site == ("w" if "members" in name else "obs") and len(spec.predictors) == 2
    # Across a kink a grid is good to the square of its step.
    assert gaps(spec, data) < (5e-5 if "laplace" in name or data.scale.dtype == jnp.float32 else 1e-11)


def test_a_planted_fault_is_seen(monkeypatch):
    """Without the weight's pull on the distance, with its variance left out, and with half a second derivative."""
    spec, data = next(x for x in terms_of(MODELS["members"]) if x[0].site == "w")
    whole = _closed_forms._FORMS[dist.Normal]

    def halved(*law):
        value, slopes, bends = whole(*law)
        return value, slopes, bends | {(0, 1): 0.5 * bends[0, 1]}

    faults = lambda d, v, w, x, a: whole(d, v, w, 0 * x, a), lambda d, v, w, x, a: whole(d, v, 0 * w, x, a), halved
    for fault in faults:
        monkeypatch.setitem(_closed_forms._FORMS, dist.Normal, fault)
        assert gaps(spec, data) > 0.01


def test_what_has_none_is_left_to_quadrature():
    student = partial(dist.StudentT, 4.0)
    for model in (of_rows(student), of_members(student)):
        assert not any(has_closed_form(s, d.fn) for s, d in terms_of(model))
