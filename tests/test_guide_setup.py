"""A guide that is set up in one program is the guide that NumPyro sets up; where it cannot be, NumPyro does it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import autoguide, init_to_median, init_to_uniform, init_to_value

from numpyro_pvi import PVI, AutoExponentialFamily
from numpyro_pvi.guides import setup_guide

rng = np.random.default_rng(0)
X, Y = jnp.asarray(rng.normal(size=(12, 3))), jnp.asarray(rng.normal(size=12))
# Whether the model ran on arrays without values, by call.
traced = []


def supports(X, y=None):
    """Array-valued bounds, a support that follows another latent, a matrix, a simplex, an order, a deterministic site."""
    traced.append(isinstance(X, jax.core.Tracer))
    b = numpyro.sample("b", dist.Uniform(jnp.array([0.0, 1.0]), jnp.array([2.0, 5.0])).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    low = numpyro.sample("low", dist.Uniform(0, s))
    root = numpyro.sample("c", dist.LKJCholesky(3, 1.0))
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("d", a * 2)
    order = dist.transforms.OrderedTransform()
    o = numpyro.sample("o", dist.TransformedDistribution(dist.Normal(jnp.zeros(3), 1).to_event(1), order))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ p + b.sum() + a.sum() + low + root[1, 0] + o.sum(), s), obs=y)


def params(X, y=None):
    """Params, one of them drawn, an improper prior and a plate that draws a mini-batch."""
    traced.append(isinstance(X, jax.core.Tracer))
    scale = numpyro.param("scale", jnp.array(2.0), constraint=dist.constraints.positive)
    shift = numpyro.param("shift", lambda key: jax.random.normal(key, (3,)))
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (3,)))
    with numpyro.plate("n", X.shape[0], subsample_size=5) as i:
        numpyro.sample("obs", dist.Normal(X[i] @ (w + shift), scale), obs=None if y is None else y[i])


def series(X, y=None):
    """A scan with a latent of its own, and a latent of every row."""
    traced.append(isinstance(X, jax.core.Tracer))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("z", dist.Normal(0, s))

    def step(carry, value):
        x = numpyro.sample("x", dist.Normal(carry, s))
        numpyro.sample("obs", dist.Normal(x, 1.0), obs=value)
        return x, None

    scan(step, 0.0, y)


def reads_values(X, y=None):
    """Python looks at a number of the data."""
    traced.append(isinstance(X, jax.core.Tracer))
    if float(X[0, 0]) < 1e6:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("obs", dist.Normal(X @ w, 1.0).to_event(1), obs=np.asarray(y))


def nowhere(X, y=None):
    """A density that is finite nowhere."""
    w = numpyro.sample("w", dist.Normal(0, 1))
    numpyro.factor("never", jnp.log(-jnp.exp(w)))


START = init_to_value(values={"s": jnp.array(0.7)})
CASES = (
    (supports, autoguide.AutoMultivariateNormal, init_to_uniform, True),
    (params, autoguide.AutoDiagonalNormal, init_to_median, True),
    (series, autoguide.AutoNormal, START, True),
    (reads_values, autoguide.AutoMultivariateNormal, init_to_uniform, False),
)


def pair(model, kind, init, key):
    """The guide as NumPyro sets it up, and ours; whether ours ran without values."""
    theirs, ours = kind(model, init_loc_fn=init), kind(model, init_loc_fn=init)
    handlers.seed(theirs._setup_prototype, key)(X, Y)
    traced.clear()
    setup_guide(ours, key, (X, Y), {})
    return theirs, ours, all(traced)


def same(one, other):
    leaves = [jax.tree.leaves(x) for x in (one, other)]
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def read_off(guide):
    """Values in the latents' own supports, and the density, as the guide has them."""
    return lambda locs: (guide._postprocess_fn(locs), handlers.seed(guide._potential_fn, 1)(locs))


@pytest.mark.parametrize(("model", "kind", "init", "together"), CASES)
def test_the_same_guide(model, kind, init, together):
    theirs, ours, ahead = pair(model, kind, init, jax.random.key(3))
    assert ahead is together
    assert list(ours.prototype_trace) == list(theirs.prototype_trace)
    # In the trace's order, which a program does not keep: the flat vector follows it.
    assert list(ours._init_locs) == list(theirs._init_locs)
    same(ours._init_locs, theirs._init_locs)
    assert set(vars(ours)) == set(vars(theirs))
    for name, site in theirs.prototype_trace.items():
        own = ours.prototype_trace[name]
        assert (own["type"], jnp.shape(own["value"])) == (site["type"], jnp.shape(site["value"]))
        if site["type"] == "sample" and not site["is_observed"]:
            assert str(own["fn"].support) == str(site["fn"].support)
            assert [f.name for f in own["cond_indep_stack"]] == [f.name for f in site["cond_indep_stack"]]
    if model in (params, series):
        same(*(jax.jit(read_off(g))(theirs._init_locs) for g in (theirs, ours)))
    if kind is not autoguide.AutoNormal:
        same(ours._init_latent, theirs._init_latent)
        same(ours._unpack_latent(ours._init_latent), theirs._unpack_latent(theirs._init_latent))
        assert ours.latent_dim == theirs.latent_dim
    else:
        assert ours._event_dims == theirs._event_dims


def test_a_guide_of_families_in_one_program():
    def model(X, y=None):
        traced.append(isinstance(X, jax.core.Tracer))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("n", X.shape[0]):
            numpyro.sample("obs", dist.Normal(0.0, rate.sum()), obs=y)

    theirs, ours, ahead = pair(model, AutoExponentialFamily, init_to_median, jax.random.key(3))
    assert ahead
    same(ours._latents["rate"].start, theirs._latents["rate"].start)
    assert (ours._prototype_frame_full_sizes, list(ours.prototype_trace)) == ({"n": 12}, list(theirs.prototype_trace))


def test_what_numpyro_refuses_is_refused_with_its_words():
    guide = autoguide.AutoNormal(nowhere)
    with pytest.raises(RuntimeError, match="Cannot find valid initial parameters"):
        setup_guide(guide, jax.random.key(0), (X, Y), {})
    assert guide.prototype_trace is None


def overflowing(X, y):
    """A rate that is infinite at most draws of the start."""
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("n", X.shape[0]):
        numpyro.sample("obs", dist.Gamma(1.0, jnp.exp(w * X[:, 0])), obs=y)


def test_a_first_draw_out_of_range_is_not_the_last():
    """Uniform in (-2, 2) times 3e3: two of three draws overflow, and NumPyro's search finds another."""
    x, y = 3e3 * jnp.ones((4, 1)), jnp.ones(4)
    starts = 0
    for seed in range(6):
        guide = autoguide.AutoNormal(overflowing)
        setup_guide(guide, jax.random.key(seed), (x, y), {})
        starts += bool(np.isfinite(guide._potential_fn(guide._init_locs)))
        assert guide.prototype_trace is not None
    assert starts == 6


def test_a_parameter_that_is_never_in_range_is_refused_with_numpyros_words():
    def negative(y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("n", y.shape[0]):
            numpyro.sample("obs", dist.Bernoulli(probs=2.0 + 0.0 * w), obs=y)

    guide = autoguide.AutoNormal(negative)
    with pytest.raises(ValueError, match="invalid probs"):
        setup_guide(guide, jax.random.key(0), (jnp.ones(3),), {})
    assert guide.prototype_trace is None


# ------------------------------------------------------------------------------------------------- values that it was given


def exchangeable(y):
    """Either order of the means explains the data."""
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.Normal(1, 2))
    with numpyro.plate("data", len(y)):
        kinds = dist.Normal(mu, 1.0)
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), kinds), obs=y)
        numpyro.sample("z", dist.Normal(tau, 1.0), obs=y)


BIMODAL = np.array([-3.2, -2.9, -3.1, 3.0, 3.3, 2.8])
TOLD = init_to_value(values={"mu": jnp.array([-3.0, 3.0])})


@pytest.mark.parametrize("kind", [autoguide.AutoNormal, autoguide.AutoMultivariateNormal])
def test_q_starts_at_the_values_that_the_guide_was_given(kind):
    """With the guide's scale; a latent without a value is where it was, and what a call says has precedence."""
    pvi = PVI(exchangeable, kind(exchangeable, init_loc_fn=TOLD, init_scale=0.2), num_groups=2)
    state = pvi.init(jax.random.key(0), BIMODAL)
    q = pvi.posterior(state)
    np.testing.assert_allclose(q["mu"].mean, [-3, 3], rtol=1e-5)
    np.testing.assert_allclose(q["mu"].variance, 0.04, rtol=1e-4)
    np.testing.assert_allclose([q["tau"].mean, q["tau"].variance], [1, 4], rtol=1e-4)
    if kind is autoguide.AutoMultivariateNormal:
        return
    # Its labelling is the one that the fit ends in.
    end = pvi.posterior(pvi.run(None, 10, BIMODAL, init_state=state, progress_bar=False).state)["mu"].mean
    assert end[0] < -2 and end[1] > 2
    there = pvi.init(jax.random.key(0), BIMODAL, init_params={"mu_auto_loc": jnp.full(2, 0.5)})
    np.testing.assert_allclose(pvi.posterior(there)["mu"].mean, [0.5, 0.5], rtol=1e-5)


def test_a_draw_out_of_a_parameters_range_is_followed_by_another():
    """Of a vague gamma prior half the draws underflow to 0, where the scale that it makes has no number."""
    vague = 1e-3 if jax.config.jax_enable_x64 else 8e-3

    def model(y):
        tau = numpyro.sample("tau", dist.Gamma(vague, vague))
        with numpyro.plate("rows", len(y)):
            b = numpyro.sample("b", dist.Normal(0.0, tau**-0.5))
            numpyro.sample("obs", dist.Normal(b, 1.0), obs=y)

    for seed in range(4):
        guide = AutoExponentialFamily(model)
        setup_guide(guide, jax.random.key(seed), (jnp.zeros(3),), {})
        assert guide.prototype_trace["tau"]["value"] > 0
