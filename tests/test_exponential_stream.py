"""Groups that come and go under AutoExponentialFamily: law 10, and streams that end where a fit of all rows does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import special, stats

from numpyro_pvi import PVI, AutoExponentialFamily, GuideError, Partition, PVIError, StateError
from numpyro_pvi.families import GammaFamily, ProductFamily, ProductNatural
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, Streaming
from numpyro_pvi.sites import SiteStack, posterior
from numpyro_pvi.solvers import NaturalGradient, PowerEP, StochasticNaturalGradient

KEY = jax.random.key(0)
TIGHT = {"float32": 1e-4, "float64": 1e-10}[jnp.result_type(float).name]
RNG = np.random.default_rng(0)
COUNTS = RNG.poisson(3.0, 12)
LABELS = np.array(["a"] * 3 + ["b"] * 4 + ["c"] * 5)


def poisson(counts):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate), obs=counts)


def rows(*labels):
    return jnp.asarray(COUNTS[np.isin(LABELS, labels)])


def gamma_is(pvi, state, counts):
    """The posterior by hand."""
    params = pvi.get_params(state)
    np.testing.assert_allclose(params["rate_auto_concentration"], 2.0 + counts.sum(), rtol=TIGHT)
    np.testing.assert_allclose(params["rate_auto_rate"], 0.5 + len(counts), rtol=TIGHT)


@functools.cache
def fitted():
    pvi = PVI(Partition(poisson, "data", LABELS), AutoExponentialFamily(poisson))
    return pvi, pvi.run(KEY, 2, jnp.asarray(COUNTS), progress_bar=False).state


def law_10(state):
    pvi, _ = fitted()
    gamma_is(pvi, state, rows("a", "c"))
    assert state.groups == ("a", "c")


def test_forgetting_a_group_is_never_having_seen_it():
    pvi, state = fitted()
    law_10(pvi.forget_group(state, "b"))


def test_a_group_that_was_not_forgotten_is_noticed():
    pvi, state = fitted()
    with pytest.raises(AssertionError):
        law_10(pvi.forget_group(state, "c"))


def test_groups_that_leave_and_come_back_are_fitted_again():
    pvi, state = fitted()
    state = pvi.forget_group(state, "b")
    with pytest.raises(StateError, match="no group's rows are at hand"):
        pvi.update(state, rows("a", "c"))
    state = pvi.revisit(state, LABELS[np.isin(LABELS, ["a", "c"])], rows("a", "c"))
    gamma_is(pvi, state, rows("a", "c"))
    state = pvi.add_group(state, "b", rows("b"))
    gamma_is(pvi, state, COUNTS)
    assert state.present == ("b",)
    np.testing.assert_allclose(pvi.site(state, "c").natural.parts["rate"].log, rows("c").sum(), rtol=TIGHT)
    info = pvi.info(state)
    assert info.labels == state.groups == ("a", "c", "b")
    assert info.expectation == ("site only", "site only", "closed form")
    assert list(info.cavity_proper) == [True] * 3
    with pytest.raises(StateError, match="khat compares q with the posterior given all rows"):
        pvi.khat(state, rows("b"), rng_key=KEY)


SLOPES = np.linspace(-1.0, 1.0, 12)


def regression(x, counts=None):
    a, b = (numpyro.sample(n, dist.Normal(0.0, 2.0)) for n in "ab")
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("count", dist.Poisson(jnp.exp(a * x + b)), obs=counts)


def test_a_group_comes_where_predictors_may_ask_for_a_finer_rule():
    """A group that comes is fitted beside the sites of all others as under a Gaussian guide.

    A round of which a finer rule is asked is gone back from: to a state with the sites of the absent groups.
    """
    here = LABELS != "c"

    def streamed(guide):
        pvi = PVI(Partition(regression, "data", LABELS[here]), guide)
        state = pvi.run(KEY, 8, SLOPES[here], COUNTS[here], progress_bar=False).state
        return pvi, pvi.add_group(state, "c", SLOPES[~here], COUNTS[~here], tol=1e-6)

    pvi, state = streamed(AutoExponentialFamily(regression, joint=[("a", "b")]))
    assert state.groups == ("a", "b", "c") and state.present == ("c",)
    found = pvi.posterior(state, joint=True)["a", "b"]
    pvi, state = streamed(AutoMultivariateNormal(regression))
    params = pvi.get_params(state)
    np.testing.assert_allclose(found.mean, params["auto_loc"], atol=1e-5 + 10 * TIGHT)
    root = params["auto_scale_tril"]
    np.testing.assert_allclose(found.covariance_matrix, root @ root.T, atol=1e-5 + 10 * TIGHT)


# --------------------------------------------------------------------------------------------------------- prequential


def evidence(counts):
    """log p(y) of the gamma-Poisson model, in closed form."""
    shape, rate = 2.0 + counts.sum(), 0.5 + len(counts)
    return (
        2.0 * np.log(0.5)
        - special.gammaln(2.0)
        + special.gammaln(shape)
        - shape * np.log(rate)
        - special.gammaln(counts + 1).sum()
    )


def scored(look_ahead=False):
    """Joint scores of the groups as they come, their sum less log p(y), in standard errors of the draws."""
    pvi = PVI(Partition(poisson, "data", LABELS[:3]), AutoExponentialFamily(poisson))
    state, total, error = pvi.init(KEY, rows("a")), 0.0, 0.0
    for i, label in enumerate("abc"):
        new = pvi.update(state, rows("a"))[0] if label == "a" else pvi.add_group(state, label, rows(label), tol=None)
        seen = new if look_ahead else state
        score = pvi.prequential(seen, rows(label), rng_key=jax.random.fold_in(KEY, i), num_samples=4000)
        total, error, state = total + float(score.joint), error + 1 / float(score.ess) - 1 / 4000, new
    return (total - evidence(COUNTS)) / np.sqrt(error)


def test_scores_before_absorbing_sum_to_the_evidence():
    """4 standard errors of the draws: one false alarm in 15,000 keys."""
    assert abs(scored()) < 4


def test_scores_after_absorbing_are_noticed():
    assert scored(look_ahead=True) > 8


def test_row_scores_are_negative_binomial():
    """Of q = Gamma(a, b), row by row; 4,000 draws, whose own error is below .02 nats at these counts."""
    pvi, state = fitted()
    found = pvi.prequential(state, jnp.asarray(COUNTS), rng_key=KEY, num_samples=4000)
    shape, rate = 2.0 + COUNTS.sum(), 12.5
    np.testing.assert_allclose(found.rows, stats.nbinom.logpmf(COUNTS, shape, rate / (1 + rate)), atol=0.05)


def scattered(counts):
    """Every row has a rate of its own."""
    tau = numpyro.sample("tau", dist.Gamma(3.0, 3.0))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(numpyro.sample("u", dist.Gamma(2.0, tau))), obs=counts)


def test_own_latents_of_rows_that_come_are_drawn_from_their_prior():
    """As many rows as may be, whatever init saw: given tau a count is negative binomial; tau by a fine sum under q."""
    pvi = PVI(scattered, AutoExponentialFamily(scattered), num_groups=2)
    state = pvi.run(KEY, 5, jnp.asarray(COUNTS[:8]), progress_bar=False).state
    q = pvi.posterior(state)["tau"]
    tau = (np.arange(4000) + 0.5) / 4000 * 6.0
    weights = stats.gamma.pdf(tau, float(q.concentration), scale=1 / float(q.rate))
    wanted = [np.log(weights @ stats.nbinom.pmf(y, 2.0, tau / (1 + tau)) / weights.sum()) for y in COUNTS[8:]]
    found = pvi.prequential(state, jnp.asarray(COUNTS[8:]), rng_key=KEY, num_samples=20_000)
    # The spread of a Poisson density over its rates is about its mean: 4 standard errors.
    np.testing.assert_allclose(found.rows, wanted, atol=4 * 1.2 / np.sqrt(20_000))


def line(x, y):
    """Linear regression with unknown noise: messages look at each other."""
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * x, 1 / jnp.sqrt(tau)), obs=y)


@pytest.mark.slow
def test_a_stream_that_is_revisited_ends_where_all_rows_do(tmp_path):
    x, y = jnp.asarray(RNG.normal(size=12)), jnp.asarray(RNG.normal(size=12))
    make = lambda labels: PVI(Partition(line, "data", labels), AutoExponentialFamily(line))  # noqa: E731
    whole = make(LABELS)
    wanted = whole.run(KEY, 100, x, y, progress_bar=False, tol=1e-7)
    first = LABELS == "a"
    pvi = make(LABELS[first])
    state = pvi.run(KEY, 5, x[first], y[first], progress_bar=False).state
    for label in "bc":
        state = pvi.add_group(state, label, x[label == LABELS], y[label == LABELS])
    # Each message was taken beside what came before it.
    early = pvi.get_params(state)["tau_auto_rate"]
    assert abs(float(early - wanted.params["tau_auto_rate"])) > 1e-3
    pvi.save(tmp_path / "fit.pvi", state)
    state = make(LABELS[first]).load(tmp_path / "fit.pvi")
    state = pvi.revisit(state, LABELS, x, y, num_steps=100, tol=1e-7)
    found = pvi.get_params(state)
    for name, value in wanted.params.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(pvi.log_evidence(state, x, y), -wanted.losses[-1], rtol=1e-5)
    with pytest.warns(UserWarning, match="fitted at a q that had it in"):
        pvi.forget_group(state, "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": StochasticSubset(1)},
        {"solver": StochasticNaturalGradient(1.0, num_steps=3, batch_size=3, average=0.0)},
    ],
    ids=["subset", "batches"],
)
def test_random_groups_and_rows_stand_beside_absent_groups(options):
    first = np.isin(LABELS, ["a", "b"])
    pvi = PVI(Partition(poisson, "data", LABELS[first]), AutoExponentialFamily(poisson), **options)
    solver = NaturalGradient()
    exact = PVI(pvi.partition, pvi.guide, solver=solver)
    state = exact.run(KEY, 1, jnp.asarray(COUNTS[first]), progress_bar=False).state
    data = (jnp.asarray(COUNTS[first]),)
    fields = pvi._engine.unvisited(state, state.report.move.dtype, None, data)
    state = pvi.add_group(dataclasses.replace(state, schedule_state=fields["schedule_state"]), "c", rows("c"), tol=None)
    found = pvi.get_params(state)
    np.testing.assert_allclose(found["rate_auto_rate"], 12.5, rtol=TIGHT)
    total = 2.0 + COUNTS.sum()
    if "schedule" in options:
        np.testing.assert_allclose(found["rate_auto_concentration"], total, rtol=TIGHT)
    else:
        assert abs(float(found["rate_auto_concentration"]) - total) < 0.5 * COUNTS[7:].sum()


# Seen of b itself, beside the plate: a factor of the prior's.
EXTRA = 4


def rates(counts, extra=None):
    b = numpyro.sample("b", dist.Gamma(1.5, 0.7))
    if extra is not None:
        numpyro.sample("extra", dist.Poisson(b), obs=extra)
    with numpyro.plate("data", counts.shape[0]):
        rate = numpyro.sample("rate", dist.Gamma(2.0, b))
        numpyro.sample("count", dist.Poisson(rate), obs=counts)


def rates_by_hand(counts, absent=(0, 0.0), extra=None):
    """Coordinate ascent on q(b) and every row's q(rate), beside sites that say how many rows there are elsewhere, and their sum.

    Returns shape and rate of b, and every row's rate.
    """
    mean, prior = 1.0, (1.5, 0.7) if extra is None else (1.5 + extra, 0.7 + 1)
    for _ in range(500):
        own = (2.0 + counts) / (1.0 + mean)
        shape, rate = prior[0] + 2.0 * (absent[0] + len(counts)), prior[1] + absent[1] + own.sum()
        mean = shape / rate
    return shape, rate, own


def rates_are(pvi, state, counts, absent=(0, 0.0), extra=None):
    shape, rate, own = rates_by_hand(np.asarray(counts), absent, extra)
    found, close = pvi.posterior(state), {"rtol": max(TIGHT, 1e-7)}
    np.testing.assert_allclose(found["b"].concentration, shape, **close)
    np.testing.assert_allclose(found["b"].rate, rate, **close)
    np.testing.assert_allclose(found["rate"].mean, own, **close)


@pytest.mark.once
def test_rows_with_members_come_and_go(tmp_path):
    """Their members go with them and what they have said of shared latents stays; those of rows that come start anew."""
    first = LABELS != "c"
    pvi = PVI(Partition(rates, "data", LABELS[first]), AutoExponentialFamily(rates))
    state = pvi.run(KEY, 60, jnp.asarray(COUNTS[first]), progress_bar=False).state
    rates_are(pvi, state, COUNTS[first])
    before = int(first.sum()), rates_by_hand(COUNTS[first])[2].sum()
    state = pvi.add_group(state, "c", rows("c"), num_steps=60, tol=None)
    rates_are(pvi, state, rows("c"), before)
    # Sites of absent groups that are left out are seen.
    with pytest.raises(AssertionError):
        rates_are(pvi, state, rows("c"))
    assert pvi.get_params(state)["rate_auto_rate"].shape == (5,)
    pvi.save(tmp_path / "fit.pvi", state)
    loaded = PVI(pvi.partition, AutoExponentialFamily(rates)).load(tmp_path / "fit.pvi", rows("c"))
    np.testing.assert_allclose(pvi.site(loaded, "a").natural.parts["b"].log, 6.0, rtol=TIGHT)
    # The guide is set up for the rows of the beginning, and the file is of others.
    again = pvi.load(tmp_path / "fit.pvi", rows("c"))
    np.testing.assert_allclose(pvi.site(again, "a").natural.parts["b"].log, 6.0, rtol=TIGHT)
    state = pvi.revisit(state, LABELS, jnp.asarray(COUNTS), num_steps=60, tol=None)
    rates_are(pvi, state, COUNTS)
    # Beside an absent group, sites are still their own groups'.
    two = pvi.revisit(state, LABELS[first], jnp.asarray(COUNTS[first]), num_steps=3, tol=None)
    for label in "ab":
        np.testing.assert_allclose(
            pvi.site(two, label).natural.parts["b"].log, 2.0 * np.sum(label == LABELS), rtol=TIGHT
        )
    own = rates_by_hand(COUNTS)[2][LABELS != "b"]
    with pytest.warns(UserWarning, match="fitted at a q that had it in"):
        state = pvi.forget_group(state, "b")
    q = pvi.posterior(state)
    assert set(q) == {"b"} and state.present == ()
    np.testing.assert_allclose(
        [q["b"].concentration, q["b"].rate], [1.5 + 2.0 * 8, 0.7 + own.sum()], rtol=max(TIGHT, 1e-7)
    )


def schools(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    with numpyro.plate("data", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mu, 2.0))
        numpyro.sample("obs", dist.Normal(effect, 3.0), obs=y)


@pytest.mark.once
def test_rows_with_normal_members_come_and_go_and_have_no_prior_by_themselves():
    """A vector of scalar normals is one family, of as many dimensions as there are rows."""
    y = jnp.asarray([1.0, 2.0, -1.0, 4.0])
    pvi = PVI(Partition(schools, "data", list("aabb")), AutoExponentialFamily(schools))
    state = pvi.run(KEY, 3, y, progress_bar=False).state
    assert list(pvi.prior(state)) == ["mu"] and float(pvi.prior(state)["mu"].variance) == pytest.approx(25.0)
    state = pvi.revisit(state, "b", y[2:], num_steps=1)
    assert pvi.posterior(state)["effect"].mean.shape == (2,)
    state = pvi.add_group(state, "c", y[:1], num_steps=0)
    assert pvi.posterior(state)["effect"].mean.shape == (1,)


COMING = {
    "sequential": (Sequential(), 40),
    "subset": (StochasticSubset(1), 200),
    "streaming": (Streaming(visits=300, tol=1e-10 if TIGHT < 1e-6 else 1e-6), 1),
    "asynchronous": (Asynchronous(), 60),
}


def come_and_go(name, extra=None, forgotten="a"):
    """Two groups, one more beside them, and one of the first out again: where by hand each of these ends."""
    schedule, rounds = COMING[name]
    first, more = LABELS != "c", () if extra is None else (jnp.asarray(extra),)
    pvi = PVI(Partition(rates, "data", LABELS[first]), AutoExponentialFamily(rates), schedule=schedule)
    state = pvi.run(KEY, rounds, jnp.asarray(COUNTS[first]), *more, progress_bar=False).state
    if isinstance(schedule, Streaming):
        _, _, a = rates_by_hand(COUNTS[:3], extra=extra)
        _, _, b = rates_by_hand(COUNTS[3:7], (3, a.sum()), extra)
        own = np.concatenate([a, b])
    else:
        rates_are(pvi, state, COUNTS[first], extra=extra)
        own = rates_by_hand(COUNTS[first], extra=extra)[2]
    state = pvi.add_group(state, "c", rows("c"), *more, num_steps=rounds, tol=None)
    rates_are(pvi, state, rows("c"), (7, own.sum()), extra)
    own_c = rates_by_hand(COUNTS[7:], (7, own.sum()), extra)[2]
    with pytest.warns(UserWarning, match="fitted at a q that had it in"):
        state = pvi.forget_group(state, forgotten)
    # An absent group was taken out, and the rows at hand are put away with what they have of their own.
    state = pvi.revisit(state, "c", rows("c"), *more, num_steps=0)
    left = own[3:]
    q = pvi.posterior(state)["b"]
    base = (1.5, 0.7) if extra is None else (1.5 + extra, 1.7)
    wanted = [base[0] + 2.0 * 9, base[1] + left.sum() + own_c.sum()]
    np.testing.assert_allclose([q.concentration, q.rate], wanted, rtol=max(TIGHT, 1e-7))
    return pvi, state


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("streaming", EXTRA),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in COMING),
        pytest.param("sequential", EXTRA, marks=pytest.mark.slow),
    ],
)
def test_rows_with_members_come_and_go_under_every_schedule(name, extra):
    come_and_go(name, extra)


@pytest.mark.slow
def test_another_group_that_is_taken_out_is_noticed():
    with pytest.raises(AssertionError):
        come_and_go("sequential", EXTRA, "b")


@pytest.mark.once
def test_what_is_left_without_rows_is_drawn_and_predicts_new_ones():
    """The posterior of shared latents; rows that Predictive is given have latents drawn from their prior given those."""
    pvi = PVI(Partition(rates, "data", LABELS), AutoExponentialFamily(rates))
    state = pvi.run(KEY, 20, jnp.asarray(COUNTS), progress_bar=False).state
    with pytest.warns(UserWarning, match="fitted at a q that had it in"):
        state = pvi.forget_group(state, "b")
    params, q = pvi.get_params(state), pvi.posterior(state)["b"]
    assert params["rate_auto_rate"].shape == (0,)
    assert set(pvi.guide.get_posterior(params)) == set(pvi.guide.median(params)) == {"b"}
    draws = pvi.guide.sample_posterior(KEY, params, sample_shape=(4000,))
    assert set(draws) == {"b"}
    given = {"guide": pvi.guide, "params": params, "num_samples": 4000}
    for predictive in (Predictive(rates, draws), Predictive(rates, **given)):
        found = predictive(jax.random.key(1), jnp.zeros(5))
        # Given b a rate has mean 2 / b: 4 standard errors of 4,000 draws of b and 5 rows each, whose 1 / b has sd .3 of its mean.
        assert found["rate"].shape == (4000, 5)
        wanted = 2.0 * float(q.rate) / (float(q.concentration) - 1)
        assert abs(float(found["rate"].mean()) / wanted - 1) < 4 * 0.8 / np.sqrt(4000)
    again = pvi.init(KEY, jnp.asarray(COUNTS), init_params=params)
    np.testing.assert_allclose(pvi.posterior(again)["b"].rate, q.rate, rtol=TIGHT)
    with pytest.raises(GuideError, match="params lack 'rate_auto_concentration', 'rate_auto_rate' of latent 'rate'"):
        pvi.guide.get_posterior({n: x for n, x in params.items() if n.startswith("b_")})


@pytest.mark.once
def test_sums_are_of_the_same_latents():
    family = ProductFamily({"a": GammaFamily(), "b": GammaFamily()})
    both = family.from_distribution({"a": dist.Gamma(2.0, 3.0), "b": dist.Gamma(4.0, 5.0)})
    one = ProductNatural({"a": both.parts["a"]})
    for wrong in (lambda: both + one, lambda: one - both, lambda: posterior(both, SiteStack(both * jnp.zeros(1), one))):
        with pytest.raises(PVIError, match="'b' on one side only"):
            wrong()
    for found in (both.combine(one), one.combine(both)):
        np.testing.assert_allclose(found.parts["a"].rate, 6.0)
        np.testing.assert_allclose(found.parts["b"].rate, 5.0)


@pytest.mark.once
@pytest.mark.parametrize("solver", [PowerEP(), PowerEP(0.5), PowerEP(factors="row")], ids=["ep", "half", "rows"])
def test_groups_whose_moments_are_matched_come_and_go(solver):
    """Of conjugate factors every site is exact: beside absent groups, come back, and with one forgotten."""
    first = LABELS != "c"
    pvi = PVI(Partition(poisson, "data", LABELS[first]), AutoExponentialFamily(poisson), solver=solver)
    state = pvi.run(KEY, 1, jnp.asarray(COUNTS[first]), progress_bar=False).state
    state = pvi.add_group(state, "c", rows("c"))
    gamma_is(pvi, state, COUNTS)
    state = pvi.revisit(state, LABELS[first], jnp.asarray(COUNTS[first]))
    gamma_is(pvi, state, COUNTS)
    gamma_is(pvi, pvi.forget_group(state, "c"), COUNTS[first])
    # A group whose site stays in is seen.
    with pytest.raises(AssertionError):
        gamma_is(pvi, state, COUNTS[first])
