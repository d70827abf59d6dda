"""Law 9 where q is a product of families: saved, and taken up by a fresh PVI and guide, it goes on bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import PVI, AutoExponentialFamily, CheckpointError, Partition, StateError
from numpyro_pvi.families import CategoricalFamily, LogNormalFamily
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import (
    SNEP,
    AlphaDivergence,
    NaturalGradient,
    PowerEP,
    StochasticEP,
    StochasticNaturalGradient,
)

from .test_resume import numbers

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
Y = jnp.asarray(np.exp(RNG.normal(size=12)))
COUNTS = jnp.asarray(RNG.poisson(3.0, 12))
LABELS = ["a"] * 3 + [("b", 1)] * 2 + [7] * 7


def shaped(y):
    """Two latents that one term sees together, so that both are drawn; their common block of normals is conjugate to nothing."""
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape + 0.1 * rate, rate), obs=y)


def line(y):
    """A joint block and a precision."""
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    b = numpyro.sample("b", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a + b[0] + 0.5 * b[1], 1 / jnp.sqrt(tau)), obs=y)


def rates(counts):
    """A rate for every row, under a rate of their own."""
    b = numpyro.sample("b", dist.Gamma(1.5, 0.7))
    with numpyro.plate("data", counts.shape[0]):
        rate = numpyro.sample("rate", dist.Gamma(2.0, b))
        numpyro.sample("count", dist.Poisson(rate), obs=counts)


def mixture(x):
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("components", 2):
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("x", dist.Normal(mu[z], 1.0), obs=x)


BATCHES = StochasticNaturalGradient(batch_size=2, num_steps=2)
CASES = {
    "drawn": (shaped, Y, {}, NaturalGradient(expectation="monte_carlo"), Synchronous()),
    "joint-random": (line, Y, {"joint": [("a", "b")]}, NaturalGradient(), Sequential("random")),
    "rows-stochastic": (rates, COUNTS, {}, BATCHES, StochasticSubset(2)),
    "matched": (shaped, Y, {}, PowerEP(0.5, moments="importance"), Synchronous()),
    "mixture": (mixture, Y, {"families": {"z": CategoricalFamily(2)}}, NaturalGradient(), Synchronous()),
}
# Beside those whose trajectories are stored.
MORE = {
    "tied": (shaped, Y, {}, StochasticEP(0.5, moments="importance"), Sequential("random")),
    "anchored": (shaped, Y, {}, SNEP({"a": 2.0}, num_steps=2, outer_period=3), StochasticSubset(2)),
    "searched": (shaped, Y, {}, AlphaDivergence(0.5, num_steps=2), Asynchronous(delays=1.5)),
}
SLOW = ("mixture", "drawn", "joint-random", "tied", "searched")
each = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES | MORE])


def fresh(name, **changes):
    model, data, options, solver, schedule = (CASES | MORE)[name]
    guide = AutoExponentialFamily(changes.get("model", model), **(options | changes.get("options", {})))
    return PVI(Partition(guide.model, "data", LABELS), guide, solver=solver, schedule=schedule), data


def both(name, path, spoil=lambda state: state):
    """An unbroken run, and one that was saved after two rounds and resumed by a fresh PVI."""
    first, data = fresh(name)
    start = first.init(KEY, data)
    whole = first.run(KEY, 5, data, init_state=start, progress_bar=False)
    first.save(path, first.run(KEY, 2, data, init_state=start, progress_bar=False).state)
    second, _ = fresh(name)
    state = spoil(second.load(path))
    return whole, second.run(jax.random.key(99), 3, data, init_state=state, progress_bar=False)


@each
def test_resumed_is_unbroken(name, tmp_path):
    whole, rest = both(name, tmp_path / "fit.pvi")
    assert numbers(rest.state) == numbers(whole.state)
    assert rest.state.plan == whole.state.plan
    assert np.asarray(rest.losses).tobytes() == np.asarray(whole.losses)[2:].tobytes()
    assert numbers(rest.params) == numbers(whole.params)


def test_lost_digits_are_noticed(tmp_path):
    """The comparison can fail: sites that a file keeps in half precision change what comes after."""

    def spoil(state):
        groups = jax.tree.map(lambda x: x.astype(jnp.float16).astype(x.dtype), state.sites.groups)
        return dataclasses.replace(state, sites=dataclasses.replace(state.sites, groups=groups))

    whole, rest = both("rows-stochastic", tmp_path / "fit.pvi", spoil)
    assert numbers(rest.state) != numbers(whole.state)


@pytest.mark.parametrize("loss_every", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_is_finished_by_the_same_call(loss_every, tmp_path):
    first, data = fresh("rows-stochastic")
    whole = first.run(KEY, 5, data, progress_bar=False, loss_every=loss_every)
    keep = {"checkpoint": tmp_path / "fit.pvi", "checkpoint_every": 1, "progress_bar": False, "loss_every": loss_every}
    stopped = first.run(KEY, 5, data, callback=lambda step, state, info: step == 3, **keep)
    assert len(stopped.losses) == 3
    rest = fresh("rows-stochastic")[0].run(KEY, 5, data, **keep)
    assert numbers(rest.state) == numbers(whole.state)
    np.testing.assert_array_equal(rest.losses, whole.losses)
    np.testing.assert_array_equal(np.isfinite(rest.losses), np.arange(1, 6) % loss_every == 0)


@pytest.mark.once
def test_a_loaded_state_can_be_read_and_tells_whose_it_is(tmp_path):
    path = tmp_path / "fit.pvi"
    first, data = fresh("joint-random")
    state = first.init(KEY, data)
    first.save(path, state)
    second, _ = fresh("joint-random")
    loaded = second.load(path)
    assert second.groups == ("a", ("b", 1), 7)
    assert second.info(loaded).structure == first.info(state).structure
    with pytest.raises(StateError, match=r"pvi.load\(path, \*args\)"):
        second.get_params(loaded)
    # Marginals need no guide that has seen the arguments.
    shown = second.posterior(loaded, joint=True)
    second.load(path, data)
    assert numbers(second.get_params(loaded)) == numbers(first.get_params(state))
    for name, own in second.guide.get_posterior(second.get_params(loaded)).items():
        assert (type(shown[name]), shown[name].shape(), shown[name].event_dim) == (
            type(own),
            own.shape(),
            own.event_dim,
        )
        point = own.sample(KEY)
        np.testing.assert_allclose(shown[name].log_prob(point), own.log_prob(point), rtol=1e-4, err_msg=str(name))
    with pytest.raises(CheckpointError, match="with guide .*joint"):
        fresh("joint-random", options={"joint": None})[0].load(path)
    with pytest.raises(CheckpointError, match="with guide .*families"):
        fresh("joint-random", options={"families": {"tau": LogNormalFamily()}})[0].load(path)
    with pytest.raises(CheckpointError, match="of the file's latents.*lacks a"):
        fresh("joint-random", model=shaped)[0].load(path)


def other_prior(y):
    """The line's latents, of which one has a prior of another family."""
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    b = numpyro.sample("b", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.LogNormal(1.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a + b[0] + 0.5 * b[1], 1 / jnp.sqrt(tau)), obs=y)


@pytest.mark.once
def test_a_prior_of_another_family_is_refused(tmp_path):
    first, data = fresh("joint-random")
    state = first.init(KEY, data)
    first.save(tmp_path / "fit.pvi", state)
    with pytest.raises(
        CheckpointError, match="the prior of 'tau' differs: a latent, Gamma .* in the file; .* LogNormal .* here"
    ):
        fresh("joint-random", model=other_prior)[0].load(tmp_path / "fit.pvi", data)
    with pytest.raises(StateError, match="GammaFamily for latent 'tau', but the guide LogNormalFamily"):
        fresh("joint-random", model=other_prior)[0].evaluate(state, data)


def many(y):
    """A latent of every family that the others lack."""
    with numpyro.plate("two", 2):
        numpyro.sample("beta", dist.Beta(2.0, 3.0))
        numpyro.sample("log", dist.LogNormal(0.0, 1.0))
    numpyro.sample("inverse", dist.InverseGamma(3.0, 2.0))
    numpyro.sample("angle", dist.VonMises(0.0, 2.0))
    numpyro.sample("wishart", dist.Wishart(4.0, jnp.eye(2)))
    numpyro.sample("vector", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    numpyro.sample("walk", dist.GaussianRandomWalk(0.3, 5))
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, 1.0), obs=y)


@pytest.mark.slow
def test_every_family_can_be_stored(tmp_path):
    path = tmp_path / "fit.pvi"
    pvi = PVI(Partition(many, "data", LABELS), AutoExponentialFamily(many))
    state = pvi.init(KEY, Y)
    pvi.save(path, state)
    later = PVI(Partition(many, "data", LABELS), AutoExponentialFamily(many))
    found = later.load(path)
    assert numbers(found) == numbers(state)
    assert found.plan == state.plan
