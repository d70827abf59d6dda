"""PVI with AutoExponentialFamily: what the results look like, models as a user writes them, and what is refused."""

import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import integrate, special, stats

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, GuideError, ImproperError, Partition, PVIError
from numpyro_pvi.families import (
    BernoulliFamily,
    CategoricalFamily,
    GaussianNatural,
    IndependentFamily,
    LogNormalFamily,
    NormalFamily,
    ScalarNormalFamily,
    ScalarNormalNatural,
)
from numpyro_pvi.runtime import LaxMap
from numpyro_pvi.runtime._product_engine import proper_members
from numpyro_pvi.schedules import Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import (
    Conjugate,
    LocalELBO,
    NaturalGradient,
    PowerEP,
    SolverDefaults,
    StochasticNaturalGradient,
)

KEY = jax.random.key(0)
TIGHT = {"float32": 2e-3, "float64": 1e-8}[jnp.result_type(float).name]
RNG = np.random.default_rng(1)
X = RNG.normal(size=(12, 2))
Y = X @ np.array([1.0, -2.0]) + 0.5 + 0.4 * RNG.normal(size=12)


def regression(X, y):
    """Linear regression with unknown noise: coefficients and intercept in one Gaussian, the precision in a gamma."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w + b, 1 / jnp.sqrt(tau)), obs=y)


def poisson(counts):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate), obs=counts)


def textbook_regression(rounds=100):
    """q(w, b) q(tau) by coordinate ascent (Bishop, section 10.3, with the prior's precision known)."""
    design = np.column_stack([X, np.ones(12)])
    tau, prior = 2.0, np.diag([0.25, 0.25, 1 / 9])
    for _ in range(rounds):
        covariance = np.linalg.inv(prior + tau * design.T @ design)
        loc = covariance @ (tau * design.T @ Y)
        square = ((Y - design @ loc) ** 2).sum() + np.trace(design @ covariance @ design.T)
        tau = 8 / (1 + 0.5 * square)
    return loc, covariance, 8.0, 1 + 0.5 * square


@functools.cache
def fitted():
    guide = AutoExponentialFamily(regression, joint=[("w", "b")])
    pvi = PVI(Partition(regression, "data", ["north"] * 5 + ["south"] * 7), guide)
    return pvi, pvi.run(KEY, 60, jnp.asarray(X), jnp.asarray(Y), progress_bar=False, tol=1e-3 * TIGHT**0.5)


def test_results_come_back_as_the_guides_own():
    pvi, result = fitted()
    loc, covariance, concentration, rate = textbook_regression()
    params = result.params
    assert result.converged
    np.testing.assert_allclose(params["w_auto_joint_loc"], loc, rtol=TIGHT)
    root = params["w_auto_joint_scale_tril"]
    np.testing.assert_allclose(root @ root.T, covariance, rtol=10 * TIGHT, atol=TIGHT)
    np.testing.assert_allclose(params["tau_auto_concentration"], concentration, rtol=TIGHT)
    np.testing.assert_allclose(params["tau_auto_rate"], rate, rtol=TIGHT)
    draws = Predictive(pvi.guide, params=params, num_samples=50)(KEY, jnp.asarray(X), jnp.asarray(Y))
    assert draws["w"].shape == (50, 2)
    assert jnp.all(draws["tau"] > 0)


def test_there_is_one_pvi():
    """Whatever the guide: what differs is an answer of the kind of q, and no other class is made; pickled or not."""
    for guide in (AutoExponentialFamily(poisson), AutoNormal(poisson)):
        pvi = PVI(poisson, guide)
        assert type(pvi) is PVI
        assert type(pickle.loads(pickle.dumps(pvi))) is PVI
    own = inspect.signature(PVI.__init__)
    assert inspect.signature(PVI) == own.replace(parameters=list(own.parameters.values())[1:])


def test_posterior_and_prior_are_members_in_their_own_supports():
    pvi, result = fitted()
    posterior, prior = pvi.posterior(result.state, joint=True), pvi.prior(result.state)
    assert set(posterior) == {"w", "b", "tau", ("w", "b")}
    assert set(pvi.posterior(result.state)) == set(prior) == {"w", "b", "tau"}
    assert isinstance(posterior["tau"], dist.Gamma)
    np.testing.assert_allclose(prior["tau"].rate, 1.0, rtol=TIGHT)
    np.testing.assert_allclose(prior["b"].variance, 9.0, rtol=TIGHT)
    with pytest.raises(PVIError, match="leave agent out"):
        pvi.posterior(result.state, agent="north")


def test_site_and_cavity_make_q_and_show_as_distributions_where_they_are():
    pvi, result = fitted()
    site, cavity = pvi.site(result.state, "north"), pvi.cavity(result.state, "north")
    whole = (site.natural + cavity.natural).parts["tau"]
    np.testing.assert_allclose(whole.log + 1, result.params["tau_auto_concentration"], rtol=TIGHT)
    # Five rows add 5/2 to the concentration.
    np.testing.assert_allclose(site.natural.parts["tau"].log, 2.5, rtol=TIGHT)
    assert isinstance(cavity.to_distribution()["tau"], dist.Gamma)
    with pytest.raises(ImproperError, match="not normalisable"):
        nothing = dataclasses.replace(result.state, sites=result.state.sites * 0.0)
        pvi.site(nothing, "north").to_distribution()


def test_info_says_what_was_found_and_what_it_costs():
    pvi, result = fitted()
    assert result.info.structure == ("conjugate in tau, w+b",) * 2
    assert result.info.expectation == ("closed form",) * 2
    assert "conjugate in tau, w+b" in str(result.info)
    assert result.trace.elbo.shape == result.losses.shape


def test_the_elbo_is_the_evidence_bound():
    pvi, result = fitted()
    X_, y = jnp.asarray(X), jnp.asarray(Y)
    np.testing.assert_allclose(pvi.log_evidence(result.state, X_, y), -result.losses[-1], rtol=TIGHT)
    design = np.column_stack([X, np.ones(12)])
    prior = np.diag([4.0, 4.0, 9.0])

    def density(tau):
        covariance = design @ prior @ design.T + np.eye(12) / tau
        log_density = -0.5 * (Y @ np.linalg.solve(covariance, Y) + np.linalg.slogdet(2 * np.pi * covariance)[1])
        return np.exp(log_density + np.log(tau) - tau)

    evidence = np.log(integrate.quad(density, 0, 40, limit=200)[0])
    assert 0 < evidence + float(result.losses[-1]) < 0.5


def test_arviz_has_latents_in_their_supports():
    pvi, result = fitted()
    pytest.importorskip("arviz")
    data = pvi.to_arviz(KEY, result, jnp.asarray(X), jnp.asarray(Y), num_samples=20)
    assert data["posterior"]["w"].shape == (1, 20, 2)
    assert data["log_likelihood"]["y"].shape == (1, 20, 12)
    assert float(data["posterior"]["tau"].min()) > 0


# ----------------------------------------------------------------------------------------- models as users write them


def by_county(county, counts, exposure):
    """Gamma-Poisson rates by county with an unknown common rate parameter."""
    b = numpyro.sample("b", dist.Gamma(2.0, 1.0))
    with numpyro.plate("counties", 3):
        rate = numpyro.sample("rate", dist.Gamma(3.0, b))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("cases", dist.Poisson(rate[county] * exposure), obs=counts)


@pytest.mark.slow
def test_rates_by_county():
    county = np.arange(12) % 3
    exposure, counts = RNG.uniform(1, 3, 12), RNG.poisson(4, 12)
    pvi = PVI(Partition(by_county, "data", list("aabb") * 3), AutoExponentialFamily(by_county))
    arguments = tuple(map(jnp.asarray, (county, counts, exposure)))
    result = pvi.run(KEY, 100, *arguments, progress_bar=False, tol=1e-8)
    a, n, b = 3 + np.bincount(county, counts), np.bincount(county, exposure), 2.0
    for _ in range(200):
        b = (2 + 9) / (1 + (a / (b + n)).sum())
    np.testing.assert_allclose(result.params["rate_auto_concentration"], a, rtol=TIGHT)
    np.testing.assert_allclose(result.params["rate_auto_rate"], b + n, rtol=10 * TIGHT)
    assert pvi.info(result.state).labels[0] is PRIOR


def clicks_by_site(site, shown, clicked, variant):
    """Beta-Binomial A/B tests: one rate per site and variant."""
    with numpyro.plate("sites", 3, dim=-2), numpyro.plate("variants", 2, dim=-1):
        p = numpyro.sample("p", dist.Beta(1.0, 4.0))
    with numpyro.plate("data", shown.shape[0]):
        numpyro.sample("clicks", dist.Binomial(shown, p[site, variant]), obs=clicked)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Synchronous(), Sequential("random")], ids=["synchronous", "sequential"])
def test_ab_clicks_by_site(schedule):
    site, variant = np.arange(12) % 3, np.arange(12) // 6
    shown = RNG.integers(20, 60, 12)
    clicked = RNG.binomial(shown, 0.2)
    pvi = PVI(
        Partition(clicks_by_site, "data", list("xyz") * 4), AutoExponentialFamily(clicks_by_site), schedule=schedule
    )
    result = pvi.run(KEY, 1, *map(jnp.asarray, (site, shown, clicked, variant)), progress_bar=False)
    ones, zeros = np.zeros((3, 2)), np.zeros((3, 2))
    np.add.at(ones, (site, variant), clicked)
    np.add.at(zeros, (site, variant), shown - clicked)
    np.testing.assert_allclose(result.params["p_auto_concentration1"], 1 + ones, rtol=TIGHT)
    np.testing.assert_allclose(result.params["p_auto_concentration0"], 4 + zeros, rtol=TIGHT)
    evidence = special.betaln(1 + ones, 4 + zeros) - special.betaln(1, 4)
    choose = special.gammaln(shown + 1) - special.gammaln(clicked + 1) - special.gammaln(shown - clicked + 1)
    np.testing.assert_allclose(-result.losses[-1], evidence.sum() + choose.sum(), rtol=TIGHT)


def means_and_precision(y):
    """A normal vector with unknown mean and precision."""
    mean = numpyro.sample("mean", dist.MultivariateNormal(jnp.zeros(2), 5 * jnp.eye(2)))
    precision = numpyro.sample("precision", dist.Wishart(4.0, jnp.eye(2)))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(mean, precision_matrix=precision), obs=y)


@pytest.mark.slow
def test_a_wishart_precision():
    y = RNG.normal(size=(14, 2)) @ np.array([[1.0, 0.5], [0.0, 1.0]])
    pvi = PVI(Partition(means_and_precision, "data", 3), AutoExponentialFamily(means_and_precision))
    result = pvi.run(KEY, 60, jnp.asarray(y), progress_bar=False, tol=1e-9)
    precision = 4 * np.eye(2)
    for _ in range(100):
        covariance = np.linalg.inv(np.eye(2) / 5 + 14 * precision)
        loc = covariance @ precision @ y.sum(axis=0)
        scale = np.linalg.inv(np.eye(2) + (y - loc).T @ (y - loc) + 14 * covariance)
        precision = 18 * scale
    np.testing.assert_allclose(result.params["mean_auto_loc"], loc, rtol=10 * TIGHT)
    np.testing.assert_allclose(result.params["precision_auto_concentration"], 18.0, rtol=TIGHT)
    np.testing.assert_allclose(result.params["precision_auto_scale_tril"], np.linalg.cholesky(scale), rtol=10 * TIGHT)


def shape_model(y):
    """The shape model of Khan and Lin, appendix E.3: conjugate in the rate, not in the shape."""
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, rate), obs=y)


@pytest.mark.slow
def test_the_shape_of_a_gamma_is_drawn_and_its_rate_is_not():
    y = np.random.default_rng(3).gamma(3.0, 0.5, size=20)
    pvi = PVI(
        Partition(shape_model, "data", 2), AutoExponentialFamily(shape_model), solver=NaturalGradient(num_draws=64)
    )
    result = pvi.run(KEY, 300, jnp.asarray(y), progress_bar=False)
    assert result.info.structure == ("conjugate in rate; not conjugate in shape",) * 2
    # The mean-field optimum on a grid: q(rate) is a gamma given E[shape]; q(shape) any density given q(rate), whose mean the
    # gamma's is close to.
    grid = np.linspace(0.05, 12, 4000)
    mean_shape = 3.0
    for _ in range(300):
        a, b = 2 + 20 * mean_shape, 1 + y.sum()
        log_rate = special.digamma(a) - np.log(b)
        log_q = np.log(grid) - grid + 20 * (grid * log_rate - special.gammaln(grid)) + grid * np.log(y).sum()
        weight = np.exp(log_q - log_q.max())
        mean_shape = (grid * weight).sum() / weight.sum()
    sd = np.sqrt(((grid - mean_shape) ** 2 * weight).sum() / weight.sum())
    found = pvi.posterior(result.state)
    assert abs(float(found["shape"].mean) - mean_shape) < 0.5 * sd
    assert 0.8 < float(jnp.sqrt(found["shape"].variance)) / sd < 1.25
    np.testing.assert_allclose(float(found["rate"].mean), (2 + 20 * mean_shape) / (1 + y.sum()), rtol=0.1)


@pytest.mark.slow
def test_options_give_the_same_fit():
    """Another runtime, an optimiser with nothing to do, families by hand, and priors outside their family."""
    X_, y = jnp.asarray(X), jnp.asarray(Y)
    model = Partition(regression, "data", ["north"] * 5 + ["south"] * 7)
    guide = AutoExponentialFamily(regression, joint=[("w", "b")])
    pvi = PVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO(), runtime=LaxMap(), schedule=Sequential())
    result = pvi.run(KEY, 60, X_, y, progress_bar=False, tol=1e-3 * TIGHT**0.5)
    assert "nothing for it to optimise" in str(result.info)
    for name, wanted in fitted()[1].params.items():
        np.testing.assert_allclose(result.params[name], wanted, rtol=10 * TIGHT, atol=TIGHT)
    other = PVI(model, AutoExponentialFamily(regression, families={"tau": LogNormalFamily()}))
    fit = other.run(KEY, 60, X_, y, progress_bar=False)
    assert fit.info.labels[0] is PRIOR
    assert "not conjugate in tau" in fit.info.structure[1]
    np.testing.assert_allclose(float(other.posterior(fit.state)["tau"].mean), 8 / textbook_regression()[3], rtol=0.2)


# ----------------------------------------------------------------------------------------------------------- refusals


@dataclasses.dataclass(frozen=True)
class Outside(NaturalGradient):
    """A solver from outside whose visit is written for a Gaussian, and says nothing of families."""

    check_families = SolverDefaults.check_families


def test_choices_that_do_not_go_together_name_what_does():
    guide = AutoExponentialFamily(regression)
    model = Partition(regression, "data", 2)
    for options, words in [
        (
            {"solver": Outside()},
            r"solver=Outside\(...\).*NaturalGradient\(\), Conjugate\(\), .* or AlphaDivergence\(...\)",
        ),
        (
            {"solver": LocalELBO(curvature="steps")},
            r"LocalELBO\(curvature='steps'\) is about the steps under a Gaussian guide",
        ),
        ({"solver": LocalELBO(precision_step=0.5)}, "moves all natural parameters of a site. Leave it out"),
        ({"init_sites": "curvature"}, "init_params"),
        ({"solver": NaturalGradient(expectation="sigma_points")}, "'auto', 'exact', 'quadrature', 'monte_carlo'"),
        ({"solver": NaturalGradient(backtracking=True)}, "global ELBO"),
        ({"solver": NaturalGradient(sites="rows")}, "sites are terms"),
        ({"solver": StochasticNaturalGradient(curvature="stein")}, "in the latents' own families. Leave it out"),
        ({"schedule": StochasticSubset(1, damping={0: 0.5})}, "write one number, or 'auto'"),
        (
            {"schedule": StochasticSubset(1), "solver": PowerEP(factors="row")},
            r"factors='row'\).*schedule=Synchronous\(\)",
        ),
    ]:
        with pytest.raises(PVIError, match=words):
            PVI(model, guide, **options)
    with pytest.raises(PVIError, match="blocks"):
        NaturalGradient(blocks="sideways")
    with pytest.raises(GuideError, match="instance of the same model"):
        PVI(model, AutoExponentialFamily)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": StochasticSubset(5)}, "there are only 2 groups"),
        ({"schedule": StochasticSubset(1, rates={"east": 0.5})}, "names group 'east'"),
    ],
    ids=["count", "rates"],
)
def test_random_groups_that_do_not_fit_are_refused_by_name(options, words):
    model = Partition(regression, "data", ["north"] * 5 + ["south"] * 7)
    pvi = PVI(model, AutoExponentialFamily(regression), **options)
    with pytest.raises(PVIError, match=words):
        pvi.init(KEY, jnp.asarray(X), jnp.asarray(Y))


def with_index(y):
    """Rows that see a shared discrete latent's members by an index."""
    with numpyro.plate("kinds", 3):
        s = numpyro.sample("s", dist.Bernoulli(0.3))
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(m + s[jnp.arange(y.shape[0]) % 3], 1.0), obs=y)


def with_local(y):
    """Two discrete latents and a normal one inside the partitioned plate."""
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        u = numpyro.sample("u", dist.Categorical(jnp.ones(20) / 20))
        v = numpyro.sample("v", dist.Categorical(jnp.ones(20) / 20))
        z = numpyro.sample("z", dist.Normal(m, 1.0))
        numpyro.sample("y", dist.Normal(z + u - v, 1.0), obs=y)


U, V = {"u": CategoricalFamily(20)}, {"v": CategoricalFamily(20)}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (with_index, {"families": {"s": BernoulliFamily()}}, "'y' see several members of discrete latent.*'s'"),
        (with_local, {"families": U}, "'u', and 'v' would be summed out: give all of them a family"),
        (with_local, {"families": U | V, "joint": [("m", "z")]}, "latent 'z' is inside the partitioned plate"),
        (with_local, {"families": U | V}, r"u \(20 values\), v \(20 values\).*at most 256"),
    ],
    ids=["index", "families", "joint", "values"],
)
def test_models_that_do_not_fit_are_refused_by_name(model, options, words):
    pvi = PVI(Partition(model, "data", 2), AutoExponentialFamily(model, **options))
    with pytest.raises(PVIError, match=words):
        pvi.init(KEY, jnp.asarray(Y))


def logistic(X, y):
    """A logistic regression: not conjugate in the coefficients."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def test_conjugate_refuses_what_is_not_and_names_it():
    pvi = PVI(Partition(logistic, "data", 2), AutoExponentialFamily(logistic), solver=Conjugate())
    with pytest.raises(PVIError, match="not conjugate in w"):
        pvi.init(KEY, jnp.asarray(X), jnp.asarray(Y > 0))


def test_unknown_names_are_refused():
    pvi, result = fitted()
    with pytest.raises(PVIError, match="init_params has unknown name"):
        pvi._fit.at_params(pvi, result.state, {"tau_auto_loc": 1.0})
    solver = NaturalGradient(blocks=("sigma",))
    other = PVI(pvi.partition, pvi.guide, solver=solver)
    with pytest.raises(PVIError, match="'sigma', which is no latent"):
        other.init(KEY, jnp.asarray(X), jnp.asarray(Y))
    with pytest.raises(PVIError, match="AutoExponentialFamily"):
        solver.check("quadratic", True, "likelihood")


def test_members_of_a_latent_inside_the_plate_are_judged_one_by_one():
    precision = jnp.array([1.0, -1.0, 2.0])
    flat = GaussianNatural(jnp.zeros(3), precision), NormalFamily(3)
    scalar = ScalarNormalNatural(jnp.zeros(3), precision), IndependentFamily(ScalarNormalFamily(), (3,))
    for natural, family in (flat, scalar):
        assert not family.in_domain(natural)
        assert proper_members(family, natural).tolist() == [True, False, True]


def test_sweeps_that_are_refused_are_followed_by_shorter_ones():
    """Every step along a full sweep was refused, at 16.85; 14.5215 is where ``Sequential()`` ends, none of whose sweeps is."""

    def model(x, y):
        slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([3]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        level = numpyro.sample("level", dist.StudentT(3.0, 0.0, 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ slopes + level * scale), obs=y)

    random = np.random.default_rng(0)
    x = random.normal(size=(24, 3))
    y = (random.random(24) < 1 / (1 + np.exp(-x[:, 0]))).astype(int)
    pvi = PVI(Partition(model, "rows", np.arange(24) % 3), AutoExponentialFamily(model))
    found = pvi.run(jax.random.key(0), 60, x, y, progress_bar=False, tol=1e-3)
    assert found.converged and float(found.losses[-1]) == pytest.approx(14.5215, abs=1e-3)


def test_every_latent_may_be_a_rows_own():
    """Nothing is shared, and every row's posterior is its own: exact after one round."""

    def model(y):
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Normal(0.0, 2.0))
            numpyro.sample("obs", dist.Normal(z, 1.0), obs=y)

    y = np.array([0.3, -1.2, 2.5, 0.0])
    result = PVI(model, AutoExponentialFamily(model), num_groups=2).run(jax.random.key(0), 2, y, progress_bar=False)
    wanted = -dist.Normal(0.0, 5.0**0.5).log_prob(y).sum()
    np.testing.assert_allclose(result.losses[-1], wanted, rtol=1e-10 if jax.config.jax_enable_x64 else 1e-5)


def test_effects_with_a_prior_given_others_begin_without_a_curvature():
    """A scale is taken by quadrature, and rows' own effects have no q before they have heard of a row."""

    def model(sd, y):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.LogNormal(1.0, 1.0))
        with numpyro.plate("schools", len(y)):
            effect = numpyro.sample("effect", dist.Normal(mu, tau))
            numpyro.sample("obs", dist.Normal(effect, sd), obs=y)

    sd, y = np.array([15.0, 10, 16, 11, 9, 11, 10, 18]), np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    pvi = PVI(model, AutoExponentialFamily(model))
    result = pvi.run(jax.random.key(0), 30, sd, y, progress_bar=False)
    # The bound of a mean-field q is a nat or two short of the evidence, by quadrature over log tau.
    log_tau = np.linspace(-6.0, 6.0, 2001)
    logs = [
        stats.multivariate_normal.logpdf(y, np.zeros(8), np.diag(sd**2 + np.exp(2 * x)) + 25.0)
        + stats.norm.logpdf(x, 1.0)
        for x in log_tau
    ]
    evidence = special.logsumexp(logs) + np.log(log_tau[1] - log_tau[0])
    assert -evidence < result.losses[-1] < -evidence + 2.5
    assert result.losses[-1] < result.losses[0]


def test_losses_that_are_less_exact_than_moments_are_said_to_be():
    """Of one latent the ELBO is by quadrature as well."""

    def waits(y, two=True):
        a = numpyro.sample("a", dist.Gamma(2.0, 1.0))
        b = numpyro.sample("b", dist.HalfNormal(2.0)) if two else 1.0
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Weibull(b, a), obs=y)

    def notes(**given):
        pvi = PVI(Partition(waits, "rows", 2), AutoExponentialFamily(waits), solver=PowerEP())
        return [n for n in pvi.info(pvi.init(KEY, jnp.array([0.5, 1.0, 1.5, 2.0]), **given)).notes if "losses" in n]

    assert len(notes()) == 1 and notes(two=False) == []
