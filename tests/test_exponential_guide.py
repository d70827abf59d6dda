"""AutoExponentialFamily in plain SVI: exact where conjugate, in the model's shapes and supports; refusals say what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO
from scipy import special, stats

from numpyro_pvi import AutoExponentialFamily, GuideError
from numpyro_pvi.families import BernoulliFamily, GammaFamily, MultivariateNormalFamily, ScalarNormalFamily

KEY = jax.random.key(0)
COUNTS = np.array([2, 0, 3, 1, 4])
HEADS = np.array([1, 0, 1, 1])


def rates(counts):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("data", len(counts)):
        numpyro.sample("obs", dist.Poisson(rate), obs=counts)


def coin(heads):
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    with numpyro.plate("data", len(heads)):
        numpyro.sample("obs", dist.Bernoulli(p), obs=heads)


def rolls(counts):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(5)))
    numpyro.sample("obs", dist.Multinomial(10, p), obs=counts)


def line(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(1.0, 3.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.Normal(X @ w + b, 1.0), obs=y)


X = np.random.default_rng(0).normal(size=(7, 2))
Y = np.random.default_rng(1).normal(size=7)


def line_posterior():
    design = np.column_stack([X, np.ones(7)])
    precision = np.diag([0.25, 0.25, 1 / 9]) + design.T @ design
    covariance = np.linalg.inv(precision)
    return covariance @ (design.T @ Y + np.array([0, 0, 1 / 9])), covariance


CONJUGATE = {
    "gamma": (rates, (COUNTS,), None, {"rate_auto_concentration": 12.0, "rate_auto_rate": 5.5}),
    "beta": (coin, (HEADS,), None, {"p_auto_concentration1": 5.0, "p_auto_concentration0": 4.0}),
    "dirichlet": (rolls, (COUNTS,), None, {"p_auto_concentration": COUNTS + 1.0}),
    "joint": (
        line,
        (X, Y),
        [("w", "b")],
        {
            "w_auto_joint_loc": line_posterior()[0],
            "w_auto_joint_scale_tril": np.linalg.cholesky(line_posterior()[1]),
        },
    ),
}


def log_evidence(name):
    if name == "gamma":
        found = 2 * np.log(0.5) - special.gammaln(2) + special.gammaln(12) - 12 * np.log(5.5)
        return found - special.gammaln(COUNTS + 1).sum()
    if name == "beta":
        return special.betaln(5, 4) - special.betaln(2, 3)
    if name == "dirichlet":
        return np.log(1 / special.comb(14, 4))
    design = np.column_stack([X, np.ones(7)])
    covariance = np.eye(7) + design @ np.diag([4.0, 4.0, 9.0]) @ design.T
    return stats.multivariate_normal(np.ones(7), covariance).logpdf(Y)


@pytest.mark.parametrize("name", CONJUGATE)
def test_at_the_exact_posterior_every_draw_gives_the_evidence(name, tolerance):
    """log p(y, theta) - log q(theta) is constant where q is the posterior: a wrong density or parameter is seen at once."""
    model, args, joint, params = CONJUGATE[name]
    guide = AutoExponentialFamily(model, joint=joint)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    state = svi.init(KEY, *args)
    assert set(svi.get_params(state)) == set(params)
    params = {n: jnp.asarray(v, float) for n, v in params.items()}
    for seed in range(3):
        loss = Trace_ELBO().loss(jax.random.key(seed), params, model, guide, *args)
        np.testing.assert_allclose(-loss, log_evidence(name), rtol=10 * tolerance)


@pytest.mark.parametrize("name", CONJUGATE)
def test_svi_ends_at_the_posterior(name):
    model, args, joint, params = CONJUGATE[name]
    svi = SVI(
        model,
        AutoExponentialFamily(model, joint=joint),
        optax.adam(optax.cosine_decay_schedule(0.1, 600)),
        Trace_ELBO(4),
    )
    result = svi.run(KEY, 600, *args, progress_bar=False)
    found = svi.guide.get_posterior(result.params)
    exact = svi.guide.get_posterior({n: jnp.asarray(v, float) for n, v in params.items()})
    for latent in (n for n in found if isinstance(n, str)):
        sd = jnp.sqrt(exact[latent].variance)
        np.testing.assert_array_less(jnp.abs(found[latent].mean - exact[latent].mean) / sd, 0.15)
        np.testing.assert_allclose(jnp.sqrt(found[latent].variance), sd, rtol=0.15)


def test_it_starts_at_the_prior():
    guide = AutoExponentialFamily(rates)
    svi = SVI(rates, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, COUNTS))
    np.testing.assert_allclose([params["rate_auto_concentration"], params["rate_auto_rate"]], [2.0, 0.5], rtol=1e-5)


def supports(y=None):
    numpyro.sample("real", dist.StudentT(5.0, 1.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    numpyro.sample("share", dist.Uniform(0.0, 1.0))
    numpyro.sample("rates", dist.Gamma(2.0, scale).expand([2, 3]).to_event(1))
    numpyro.sample("mix", dist.Dirichlet(jnp.ones(3)).expand([2]).to_event(1))
    numpyro.sample("vector", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    numpyro.sample("matrix", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    numpyro.sample("angle", dist.VonMises(0.3, 2.0))
    numpyro.sample("precision", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
    numpyro.sample("chain", dist.GaussianRandomWalk(0.5, 4))
    with numpyro.plate("groups", 4):
        numpyro.sample("effect", dist.Exponential(2.0))
    numpyro.deterministic("twice", 2 * scale)
    numpyro.sample("obs", dist.Normal(scale, 1.0), obs=y)


def test_shapes_supports_and_densities():
    guide = AutoExponentialFamily(supports)
    drawn = handlers.trace(handlers.seed(guide, KEY)).get_trace(1.0)
    model = handlers.trace(handlers.seed(supports, KEY)).get_trace(1.0)
    latents = {n: s for n, s in model.items() if s["type"] == "sample" and not s["is_observed"]}
    params = {n: s["value"] for n, s in drawn.items() if s["type"] == "param"}
    posterior = guide.get_posterior(params)
    assert list(posterior) == list(latents)
    found = jax.jit(lambda p: guide.sample_posterior(KEY, p, sample_shape=(3,)))(params)
    levels = jax.jit(lambda p: guide.quantiles(p, [0.1, 0.5, 0.9]))(params)
    for name, site in latents.items():
        fn, q = site["fn"], posterior[name]
        assert (q.batch_shape, q.event_shape) == (fn.batch_shape, fn.event_shape), name
        assert found[name].shape == (3, *fn.shape()) and bool(jnp.all(fn.support(found[name]))), name
        value = drawn[name]["value"]
        own = drawn[name]["fn"].log_prob(value)
        np.testing.assert_allclose(jnp.sum(q.log_prob(value)), jnp.sum(own), rtol=1e-5)
        assert levels[name].shape == (3, *fn.shape()), name
        assert bool(jnp.all(jnp.diff(levels[name], axis=0) > 0)), name
    np.testing.assert_allclose(found["twice"], 2 * found["scale"], rtol=1e-6)
    assert guide.median(params)["mix"].shape == (2, 3)


def test_chains_are_held_by_factors_and_start_at_the_walk():
    guide = AutoExponentialFamily(supports)
    drawn = handlers.trace(handlers.seed(guide, KEY)).get_trace(1.0)
    params = {n: s["value"] for n, s in drawn.items() if s["type"] == "param"}
    q = guide.get_posterior(params)["chain"]
    walk = dist.GaussianRandomWalk(0.5, 4)
    values = walk.sample(KEY, (5,))
    np.testing.assert_allclose(q.log_prob(values), walk.log_prob(values), rtol=1e-4)
    moved = params | {
        "chain_auto_below": params["chain_auto_below"] * 3.0,
        "chain_auto_loc": params["chain_auto_loc"] + 1.0,
    }
    q = guide.get_posterior(moved)["chain"]
    np.testing.assert_allclose(q.mean, np.ones(4), rtol=1e-5)
    assert bool(jnp.isfinite(q.log_prob(values)).all())


LEVELS = np.array([0.01, 0.3, 0.5, 0.975])
BELOW = dist.biject_to(dist.constraints.less_than(2.0))


class _Below:
    """2 - x of a log-normal x."""

    def ppf(self, levels):
        return 2 - stats.lognorm(0.8, scale=np.exp(0.3)).ppf(1 - levels)


@pytest.mark.parametrize(
    ("prior", "family", "oracle"),
    [
        (dist.Gamma(2.5, 0.7), None, stats.gamma(2.5, scale=1 / 0.7)),
        (dist.InverseGamma(3.0, 2.0), None, stats.invgamma(3.0, scale=2.0)),
        (dist.Beta(0.4, 3.0), None, stats.beta(0.4, 3.0)),
        (dist.LogNormal(0.3, 0.8), None, stats.lognorm(0.8, scale=np.exp(0.3))),
        (dist.Normal(0.3, 0.8), None, stats.norm(0.3, 0.8)),
        (dist.Uniform(0, 1), None, stats.uniform(0, 1)),
        (dist.TransformedDistribution(dist.Normal(0.3, 0.8), BELOW), None, _Below()),
        (dist.VonMises(0.3, 2.0), None, stats.vonmises(2.0, loc=0.3)),
        (dist.Dirichlet(jnp.array([0.5, 2.0])), None, stats.beta(0.5, 2.0)),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, dist.Distribution) else "",
)
def test_quantiles_against_scipy(prior, family, oracle):
    guide = AutoExponentialFamily(lambda: numpyro.sample("x", prior))
    drawn = handlers.trace(handlers.seed(guide, KEY)).get_trace()
    params = {n: s["value"] for n, s in drawn.items() if s["type"] == "param"}
    found = guide.quantiles(params, LEVELS)["x"]
    wanted = oracle.ppf(LEVELS)
    if isinstance(prior, dist.VonMises):
        # Counted from -pi there as here: SciPy's start at the location less pi.
        turn = stats.vonmises(2.0, loc=0.3)
        wanted = np.array([_invert(lambda x: turn.cdf(x) - turn.cdf(-np.pi), level) for level in LEVELS])
    np.testing.assert_allclose(found if found.ndim == 1 else found[:, 0], wanted, rtol=2e-4, atol=1e-6)


def _invert(function, level):
    low, high = -np.pi, np.pi
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) < level else (low, middle)
    return low


def mixture(y):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(p))
        numpyro.sample("obs", dist.Normal(2.0 * z, 1.0), obs=y)


def test_a_discrete_latent_may_have_a_family():
    guide = AutoExponentialFamily(mixture, families={"z": BernoulliFamily()})
    drawn = handlers.trace(handlers.seed(guide, KEY)).get_trace(Y)
    params = {n: s["value"] for n, s in drawn.items() if s["type"] == "param"}
    assert params["z_auto_logits"].shape == (7,)
    low, high = guide.quantiles(params | {"z_auto_logits": jnp.full(7, 2.0)}, [0.1, 0.2])["z"]
    assert low.tolist() == [0] * 7 and high.tolist() == [1] * 7


def test_params_of_a_subsampled_plate_are_of_full_size():
    def model(y):
        with numpyro.plate("data", 6, subsample_size=2) as i:
            r = numpyro.sample("r", dist.Gamma(2.0, 1.0))
            numpyro.sample("obs", dist.Poisson(r), obs=y[i])

    guide = AutoExponentialFamily(model)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    state = svi.init(KEY, np.arange(6))
    assert svi.get_params(state)["r_auto_rate"].shape == (6,)
    state, loss = svi.update(state, np.arange(6))
    assert np.isfinite(loss)


def test_predictive_and_a_family_of_ones_own():
    guide = AutoExponentialFamily(line, families={"w": MultivariateNormalFamily(2), "b": ScalarNormalFamily()})
    svi = SVI(line, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.run(KEY, 5, X, Y, progress_bar=False).params
    assert params["w_auto_scale_tril"].shape == (2, 2)
    draws = Predictive(guide, params=params, num_samples=4)(KEY, X, Y)
    assert draws["w"].shape == (4, 2)
    seen = Predictive(line, posterior_samples={n: draws[n] for n in ("w", "b")})(KEY, X, Y)
    assert seen["obs"].shape == (4, 7)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            lambda: numpyro.sample("x", dist.ZeroSumNormal(1.0, (2, 3))),
            {},
            "latent 'x'.*no exponential family.*families=.*AutoNormal",
        ),
        (lambda: numpyro.sample("x", dist.Normal()), {"families": {"z": GammaFamily()}}, "names z.*it has x"),
        (lambda: numpyro.sample("x", dist.Normal()), {"families": {"x": GammaFamily()}}, r"families\['x'\].*support"),
        (
            lambda: numpyro.sample("x", dist.Normal().expand([3]).to_event(1)),
            {"families": {"x": MultivariateNormalFamily(2)}},
            r"events of shape \(2,\), but the latent's are \(3,\)",
        ),
        (lambda: numpyro.sample("x", dist.Gamma(1.0, 1.0)), {"joint": [("x",)]}, "latent 'x' has support.*logarithm"),
        (
            lambda: numpyro.sample("x", dist.Normal()),
            {"joint": [("x",)], "families": {"x": ScalarNormalFamily()}},
            "x more than once",
        ),
        (lambda: numpyro.sample("x", dist.Bernoulli(0.3)), {}, "latent 'x' is discrete.*enumerate.*families="),
    ],
)
def test_refusals_say_what_to_write(model, options, words):
    with pytest.raises(GuideError, match=words):
        handlers.seed(AutoExponentialFamily(model, **options), KEY)()


def test_a_guide_that_has_seen_no_data_says_so():
    with pytest.raises(GuideError, match="not set up"):
        AutoExponentialFamily(rates).get_posterior({})
