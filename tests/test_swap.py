"""The literal swap of PVI for SVI, without a Partition: what can be split is split, the rest is kept whole, nothing is refused."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from scipy.stats import multivariate_normal

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, DataError, Partition, PartitionError, StateError
from numpyro_pvi._initial import default_partitions
from numpyro_pvi.factors import ValueCall, abstract_trace, enumerated
from numpyro_pvi.handlers import RowAxes
from numpyro_pvi.schedules import Streaming

N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = X @ [1.0, -0.5] + RNG.normal(size=N)
GROUP = np.repeat(np.arange(4), 3)
KEY = jax.random.key(0)


def evidence(y, covariance):
    return multivariate_normal(np.zeros(len(y)), covariance + np.eye(len(y))).logpdf(y)


def fit(model, *args, guide=AutoMultivariateNormal, rounds=2, optim=None, **kwargs):
    """A fit under warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pvi = PVI(model, guide(model), optim)
        return pvi, pvi.run(KEY, rounds, *args, progress_bar=False, **kwargs)


def plan_of(result):
    return result.state.plan.partition


# ---------------------------------------------------------------------------------------------------------------- models


def plateless(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)


def two_plates(y):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("a", 8):
        numpyro.sample("first", dist.Normal(m, 1.0), obs=y[:8])
    with numpyro.plate("b", 4):
        numpyro.sample("second", dist.Normal(m, 1.0), obs=y[8:])


def nested_and_beside(y):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("b", 4), numpyro.plate("a", 2):
        numpyro.sample("first", dist.Normal(m, 1.0), obs=y[:8].reshape(2, 4))
    with numpyro.plate("c", 4):
        numpyro.sample("second", dist.Normal(m, 1.0), obs=y[8:])


def all_local(y):
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("obs", dist.Normal(z, 1.0), obs=y)


def one_law_for_all(y):
    """No plate, and a distribution without a batch."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)


def coupled(y):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(m, 1))
        numpyro.sample("obs", dist.Normal(jnp.cumsum(z), 1.0), obs=y)


def counted(index, y):
    """The number of groups is read off the values, in both of the usual ways."""
    assert len(np.unique(index)) == int(np.max(index)) + 1
    with numpyro.plate("groups", len(np.unique(index))):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("data", len(index)):
        numpyro.sample("obs", dist.Normal(a[index], 1.0), obs=y)


def drifting(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)


def numbered(J, shift, y):
    """The plate's size is an integer argument."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("J", J):
        numpyro.sample("obs", dist.Normal(m + shift, 1.0), obs=y)


SAME_GROUP = (GROUP[:, None] == GROUP).astype(float)
CUMULATIVE = np.tril(np.ones((N, N)))
WHOLE = {
    "no plate": (plateless, (X, Y), evidence(Y, X @ X.T), "no plate holds the observed sample site"),
    "nothing shared": (all_local, (Y,), evidence(Y, np.eye(N)), "every latent .z. is inside plate 'data'"),
    "coupled rows": (
        coupled,
        (Y,),
        evidence(Y, CUMULATIVE @ (1 + np.eye(N)) @ CUMULATIVE.T),
        "local latent 'z' at index .* depends on the same terms",
    ),
}


# -------------------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_split_is_one_group_of_the_whole_likelihood(case, x64):
    model, args, exact, reason = WHOLE[case]
    pvi, result = fit(model, *args)
    assert plan_of(result).rows == RowAxes(whole=True)
    assert result.state.groups == pvi.groups == (0,)
    assert -result.losses[-1] == pytest.approx(exact, abs=1e-6 if x64 else 1e-3)
    (note,) = result.info.notes
    assert note.startswith("kept whole, as one group: ")
    with pytest.warns(UserWarning, match=f"num_groups=3: the model is kept whole.*{reason}"):
        PVI(model, AutoMultivariateNormal(model), num_groups=3).init(KEY, *args)
    assert "nothing" in str(plan_of(result)).splitlines()[0]


def test_more_observations_than_their_distribution_has_numbers(x64):
    """Each counts, as in NumPyro's own log density."""
    pvi, result = fit(one_law_for_all, Y)
    assert -result.losses[-1] == pytest.approx(evidence(Y, np.ones((N, N))), abs=1e-6 if x64 else 1e-3)
    assert pvi.posterior(result.state)["m"].mean == pytest.approx(Y.sum() / (N + 1), rel=1e-5)


def test_a_distribution_may_keep_a_plain_number(x64):
    """Two scale-location predictors, which a whole model reads from arrays that all passes share."""

    def heavy_tails(df, y):
        m, s = numpyro.sample("m", dist.Normal(0, 1)), numpyro.sample("s", dist.HalfNormal(1))
        numpyro.sample("obs", dist.StudentT(df, m, s).expand([N]), obs=y)

    losses = []
    for df in (3.0, jnp.full((N,), 3.0)):
        model = functools.partial(heavy_tails, df)
        losses.append(fit(model, Y, guide=AutoNormal)[1].losses[-1])
    assert losses[0] == pytest.approx(float(losses[1]), rel=1e-6 if x64 else 1e-4)


def test_a_whole_model_has_all_views(tmp_path):
    pvi, result = fit(plateless, X, Y)
    pvi.save(tmp_path / "fit", result.state)
    fresh = PVI(plateless, AutoMultivariateNormal(plateless))
    loaded = fresh.load(tmp_path / "fit", X, Y)
    assert fresh.evaluate(loaded, X, Y) == pytest.approx(float(result.losses[-1]))
    assert loaded.plan.partition.why == plan_of(result).why
    assert pvi.khat(result.state, X, Y, rng_key=KEY, num_samples=200) < 0.7
    with pytest.raises(PartitionError, match="kept whole.*Partition\\(model, plate, groups\\)"):
        pvi.add_group(result.state, "more", X, Y)


def test_several_plates_are_split_together(x64):
    _, result = fit(two_plates, Y)
    assert plan_of(result).rows.plates == ("a", "b")
    assert plan_of(result).table.sizes == (2, 2, 2, 2, 1, 1, 1, 1)
    assert -result.losses[-1] == pytest.approx(evidence(Y, np.ones((N, N))), abs=1e-6 if x64 else 1e-3)
    assert any("plates 'a' and 'b' hold observed sites, and are split together" in note for note in result.info.notes)
    assert any("full pass over all 12 rows" in note for note in result.info.notes)


def test_the_progress_bar_ends_with_what_groups_cost(capfd):
    PVI(two_plates, AutoNormal(two_plates)).run(KEY, 1, Y)
    assert "8 groups at a full pass each (see info)" in capfd.readouterr().err.splitlines()[-1]


def test_of_nested_plates_the_one_with_most_observations_is_split(x64):
    pvi, result = fit(nested_and_beside, Y)
    assert plan_of(result).rows.plates == ("b",)
    assert plan_of(result).outside == ("second",)
    assert -result.losses[-1] == pytest.approx(evidence(Y, np.ones((N, N))), abs=1e-6 if x64 else 1e-3)
    assert any("'b' has most observations, and the likelihood of 'second' joins" in note for note in result.info.notes)
    assert pvi.site(result.state, PRIOR).precision[0] == pytest.approx(4.0, rel=1e-4)


def test_one_site_in_nested_plates_is_told_as_one():
    def model():
        with numpyro.plate("schools", 2, dim=-2), numpyro.plate("pupils", 3, dim=-1):
            numpyro.sample("y", dist.Normal(0.0, 1.0), obs=jnp.zeros((2, 3)))

    trace = abstract_trace(model, KEY, (), {})
    assert (
        default_partitions(model, trace, None)[0].why
        == "observed site 'y' lies in plates 'schools' and 'pupils'; 'pupils' has most rows"
    )


def test_an_explicit_partition_stays_strict():
    for plate, model, args in (("data", all_local, (Y,)), ("data", coupled, (Y,)), (None, plateless, (X, Y))):
        with pytest.raises(PartitionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PVI(Partition(model, plate, 3), AutoMultivariateNormal(model)).init(KEY, *args)


# ------------------------------------------------------------------------------------------ arguments read in Python


def test_arguments_that_are_read_by_value(tmp_path, x64):
    pvi, result = fit(counted, GROUP, Y)
    state, exact = result.state, evidence(Y, SAME_GROUP)
    assert -result.losses[-1] == pytest.approx(exact, abs=1e-6 if x64 else 1e-3)
    assert state.plan.signature.by_value == (0,)
    # They are part of the program: the same content is the same program, other content is refused by name.
    assert -pvi.evaluate(state, list(GROUP), Y) == pytest.approx(exact, abs=1e-6 if x64 else 1e-3)
    with pytest.raises(StateError, match=r"argument 0 \('index'\).*read by value"):
        pvi.update(state, GROUP[::-1], Y)
    _, loss = jax.jit(lambda state, y: pvi.update(state, GROUP, y))(state, Y)
    assert -loss == pytest.approx(exact, abs=1e-6 if x64 else 1e-3)
    with pytest.raises(StateError, match=r"argument 0 \('index'\) is traced.*close over it"):
        jax.jit(pvi.update)(state, GROUP, Y)
    with pytest.warns(UserWarning, match="full pass"):
        assert Partition(counted, "data", 3).plan(GROUP, Y).mechanism == "mask"
    pvi.save(tmp_path / "fit", state)
    fresh = PVI(counted, AutoMultivariateNormal(counted))
    assert -fresh.evaluate(fresh.load(tmp_path / "fit"), GROUP, Y) == pytest.approx(exact, abs=1e-6 if x64 else 1e-3)


def test_a_plate_sized_by_an_integer_follows_the_rows_of_the_arguments(x64):
    _, result = fit(numbered, N, np.zeros(N), Y)
    assert plan_of(result).mechanism == "args"
    assert plan_of(result).reading.resized
    assert -result.losses[-1] == pytest.approx(evidence(Y, np.ones((N, N))), abs=1e-6 if x64 else 1e-3)


# ----------------------------------------------------------------------------------------------------- small idioms


def test_masked_params_and_missing_entries(x64):
    """`mask(False)` on a latent and on an observed site, a param written as an integer, and NaN that the model masks."""
    y = np.where(np.arange(N) == 3, np.nan, Y)

    def model(y):
        seen = ~jnp.isnan(y)
        shift = numpyro.param("shift", 1)
        numpyro.sample("unused", dist.Normal(0, 1))
        m = numpyro.sample("m", dist.Normal(0, 5).mask(False))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("obs", dist.Normal(m + 0 * shift, 1.0).mask(seen), obs=jnp.where(seen, y, 0.0))
            numpyro.sample("ignored", dist.Normal(m, 1.0).mask(False), obs=y)

    pvi, result = fit(model, y, optim=numpyro.optim.Adam(0.01))
    assert pvi.posterior(result.state)["m"].mean == pytest.approx(np.nanmean(y), abs=1e-5)
    assert np.isfinite(result.losses).all()


def test_missing_entries_that_reach_the_density_are_refused():
    y = np.where(np.arange(N) == 3, np.nan, Y)
    with pytest.raises(DataError, match=r"argument 1 \('y'\) has 1 non-finite"):
        PVI(plateless, AutoMultivariateNormal(plateless)).init(KEY, X, y)


def test_data_that_are_a_mini_batch_already(x64):
    def model(y):
        m = numpyro.sample("m", dist.Normal(0, 1))
        with numpyro.plate("data", 2 * N, subsample_size=N):
            numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)

    pvi, result = fit(model, Y)
    # Every row counts twice, as it does for SVI.
    assert pvi.posterior(result.state)["m"].mean == pytest.approx(2 * Y.sum() / (1 + 2 * N), rel=1e-4)
    assert "mini-batch" in result.info.notes[0]


# ------------------------------------------------------------------------------------------------ discrete latents


def hidden_markov(y):
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))
    rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))

    def step(state, value):
        state = numpyro.sample("state", dist.Categorical(rows[state]))
        numpyro.sample("obs", dist.Normal(mu[state], 1.0), obs=value)
        return state, None

    scan(step, 0, y)


def shared_switch(y):
    k = numpyro.sample("k", dist.Bernoulli(0.3))
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(m + 2.0 * k, 1.0), obs=y)


def whole_density(model, values, *args):
    trace = abstract_trace(model, KEY, args, {})
    marginal, _, found = enumerated(model, trace, RowAxes(whole=True), KEY, args, {})
    assert found.plates == ()
    terms = ValueCall(marginal, args, {}).likelihood_terms(values, RowAxes(whole=True))
    return float(sum(jnp.sum(x) for x in terms.values()))


def test_discrete_states_of_a_scan_are_summed_out():
    pytest.importorskip("funsor")
    mu, rows = np.array([-0.7, 1.2]), np.array([[0.8, 0.2], [0.4, 0.6]])
    alpha = np.array([1.0, 0.0])
    for value in Y:
        alpha = (alpha @ rows) * np.exp(-0.5 * (value - mu) ** 2) / np.sqrt(2 * np.pi)
    found = whole_density(hidden_markov, {"mu": jnp.asarray(mu), "rows": jnp.asarray(rows)}, Y)
    assert found == pytest.approx(np.log(alpha.sum()), rel=1e-5)


def test_a_discrete_latent_shared_by_all_rows_is_summed_out():
    pytest.importorskip("funsor")
    m = 0.4
    parts = [np.log(p) + dist.Normal(m + 2.0 * k, 1.0).log_prob(Y).sum() for k, p in ((0, 0.7), (1, 0.3))]
    assert whole_density(shared_switch, {"m": jnp.asarray(m)}, Y) == pytest.approx(
        float(np.logaddexp(*parts)), rel=1e-5
    )


def test_a_continuous_latent_that_depends_on_a_shared_discrete_one_is_refused():
    pytest.importorskip("funsor")

    def model(y):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        m = numpyro.sample("m", dist.Normal(2.0 * k, 1))
        numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)

    with pytest.raises(PartitionError, match="'m' depends on the enumerated latent"):
        PVI(model, AutoNormal(model)).init(KEY, Y)


# ---------------------------------------------------------------------------------------------- mini-batches of other sizes


def all_rows(y):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)


def batched(y):
    """Any number of rows stands for N."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("data", N, subsample_size=len(y)):
        numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)


def test_a_mini_batch_of_another_size_is_scaled_as_the_model_scales_it():
    pvi = PVI(batched, AutoNormal(batched))
    state, _ = pvi.update(pvi.init(KEY, Y), Y)
    assert pvi.posterior(state)["m"].mean == pytest.approx(Y.sum() / (N + 1), rel=1e-5)
    before = pvi.evaluate(state, Y)
    for part in (Y[:4], Y[4:10], Y):
        # q is taken over as it is, and its loss is of the data given.
        assert pvi.posterior(state)["m"].variance == pytest.approx(1 / (N + 1), rel=1e-5)
        state, loss = pvi.update(state, part)
        assert pvi.posterior(state)["m"].mean == pytest.approx(part.mean() * N / (N + 1), rel=1e-5)
        assert pvi.evaluate(state, part) == pytest.approx(float(loss), rel=1e-5)
    assert pvi.evaluate(state, Y) == pytest.approx(float(before), rel=1e-5)
    assert int(state.step) == 4
    found = pvi.run(KEY, 1, Y[:4], init_state=state, progress_bar=False).state
    assert pvi.posterior(found)["m"].mean == pytest.approx(Y[:4].mean() * N / (N + 1), rel=1e-5)


def centred(y):
    """The same about a param."""
    m = numpyro.sample("m", dist.Normal(numpyro.param("centre", 0.0), 1))
    with numpyro.plate("data", N, subsample_size=len(y)):
        numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)


@pytest.mark.parametrize("guide", [AutoNormal, AutoExponentialFamily], ids=["gaussian", "family"])
def test_a_mini_batch_of_another_size_keeps_the_prior_of_the_params(guide):
    """The loss is of the prior that the params have by then, by hand."""
    pvi = PVI(centred, guide(centred), optim=numpyro.optim.Adam(0.5))
    state = pvi.run(KEY, 8, Y + 3, progress_bar=False).state
    q, centre, part = pvi.posterior(state)["m"], float(pvi.get_params(state)["centre"]), Y[:4] + 3
    assert centre > 1
    mean, variance = float(q.mean), float(q.variance)
    value = -N / 8 * np.sum(np.log(2 * np.pi) + (part - mean) ** 2 + variance)
    divergence = 0.5 * (variance + (mean - centre) ** 2 - 1 - np.log(variance))
    assert float(pvi.evaluate(state, part)) == pytest.approx(divergence - value, rel=1e-4)


def test_a_mini_batch_of_another_size_under_families():
    """The same numbers where q is a product: rows stand for N, and q is taken over as it is."""
    pvi = PVI(batched, AutoExponentialFamily(batched))
    state, _ = pvi.update(pvi.init(KEY, Y), Y)
    state, loss = pvi.update(state, Y[:4])
    assert pvi.posterior(state)["m"].mean == pytest.approx(Y[:4].mean() * N / (N + 1), rel=1e-5)
    assert pvi.posterior(state)["m"].variance == pytest.approx(1 / (N + 1), rel=1e-5)
    # The bound is tight, of every row N/4 times.
    assert -float(loss) == pytest.approx(evidence(np.repeat(Y[:4], N // 4), np.ones((N, N))), rel=1e-4)
    # Evaluated with all rows, q stays where the batch has put it.
    taken = pvi.evaluate(state, Y)
    assert float(taken) > -evidence(Y, np.ones((N, N)))


def regression_of_batches(X, y):
    """Any number of rows stands for N; what rows of covariates give is as long as the batch, and does not broadcast to N."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoExponentialFamily], ids=["gaussian", "family"])
def test_mini_batches_of_a_regression(guide):
    """Their q by hand, from the first batch on; the data are never as many as the plate has rows."""
    pvi = PVI(regression_of_batches, guide(regression_of_batches))
    covariates = np.random.default_rng(3).normal(size=(N, 2))
    state = pvi.init(KEY, covariates[:4], Y[:4])
    for part in (slice(0, 4), slice(4, 10)):
        X, y = covariates[part], Y[part]
        # Means of both coefficients settle within a few rounds where q is a product, the first round is exact else.
        for _ in range(30 if guide is AutoExponentialFamily else 1):
            state, loss = pvi.update(state, X, y)
        precision = np.eye(2) + N / len(y) * X.T @ X
        mean = np.linalg.solve(precision, N / len(y) * X.T @ y)
        assert pvi.posterior(state)["w"].mean == pytest.approx(mean, rel=1e-4)
        assert pvi.evaluate(state, X, y) == pytest.approx(float(loss), rel=1e-5)
    assert "mini-batch" in pvi.info(state).notes[0]


def test_a_mini_batch_is_not_split_by_groups():
    pvi = PVI(Partition(regression_of_batches, "data", 2), AutoNormal(regression_of_batches))
    with pytest.raises(PartitionError, match="mini-batch of the 4 rows that plate 'data' of size"):
        pvi.init(KEY, X[:4], Y[:4])


def test_other_rows_are_no_mini_batch_where_the_model_does_not_say_so():
    pvi = PVI(all_rows, AutoNormal(all_rows))
    state = pvi.init(KEY, Y)
    with pytest.raises(StateError, match="of shape .4,."):
        pvi.update(state, Y[:4])
    named = PVI(Partition(batched, "data", 3), AutoNormal(batched))
    with pytest.raises(StateError, match="of shape .4,."):
        named.update(named.init(KEY, Y), Y[:4])


# -------------------------------------------------------------------------------------- loops without a reverse derivative


def doubled_until_large(y):
    """A mean of 4 m by a loop that only forward mode can go through."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    scale = numpyro.param("scale", 1.0)
    factor, _ = jax.lax.while_loop(lambda at: at[1] < 2, lambda at: (2.0 * at[0], at[1] + 1), (scale, 0))
    numpyro.sample("obs", dist.Normal(factor * m, 1.0), obs=y)


def test_a_model_with_a_while_loop_is_differentiated_forwards(x64):
    def forwards(model):
        return AutoNormal(model, forward_mode_differentiation=True)

    pvi, result = fit(doubled_until_large, Y, guide=forwards, rounds=3, optim=numpyro.optim.Adam(1e-9))
    # 4 m is seen with unit noise: N 16 + 1 is the precision.
    found, precision = pvi.posterior(result.state)["m"], 16 * N + 1
    rel = 1e-6 if x64 else 1e-3
    assert float(found.mean) == pytest.approx(4 * Y.sum() / precision, rel=rel)
    assert float(found.variance) == pytest.approx(1 / precision, rel=rel)


def fourfold(x, looped):
    """Four times x: by a loop that has no reverse mode, or by a product."""
    if not looped:
        return 4.0 * x
    return jax.lax.while_loop(lambda at: at[1] < 2, lambda at: (2.0 * at[0], at[1] + 1), (x, 0))[0]


def own_levels(y, looped):
    """Levels of their own that a loop goes through."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(m, 0.5))
        numpyro.sample("obs", dist.StudentT(5.0, fourfold(z, looped), 1.0), obs=y)


def own_family(y, looped):
    """A rate in its own family, of counts whose exposure a loop makes."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.NegativeBinomial2(fourfold(rate, looped), 3.0), obs=jnp.floor(jnp.abs(y)))


@pytest.mark.parametrize(
    ("model", "guide"),
    [
        (own_levels, functools.partial(AutoNormal, forward_mode_differentiation=True)),
        (own_family, AutoExponentialFamily),
    ],
    ids=["own latents", "families"],
)
def test_a_loop_fits_as_the_product_that_it_makes(model, guide, x64):
    ends = []
    for looped in (True, False):
        same = functools.partial(model, looped=looped)
        pvi = PVI(same, guide(same), num_groups=1)
        result = pvi.run(KEY, 2, Y[:4], progress_bar=False)
        ends.append((result.losses, result.params))
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8 if x64 else 1e-3)


# ------------------------------------------------------------------------------------------------------ order of streams


def test_streaming_takes_groups_as_their_labels_first_appear():
    """Under a mean-field q what a stream leaves depends on its order: labels that sort otherwise must not change it."""

    def streamed(labels, mode="auto", rows=slice(None)):
        pvi = PVI(
            Partition(drifting, "data", labels, mode=mode),
            AutoDiagonalNormal(drifting),
            schedule=Streaming(),
        )
        return pvi.get_params(pvi.run(KEY, 1, X[rows], Y[rows], progress_bar=False).state)["auto_loc"]

    labels = np.repeat(["b", "c", "a"], 4)
    in_order = streamed(np.repeat([0, 1, 2], 4))
    assert np.allclose(streamed(labels), in_order, atol=1e-6)
    assert np.allclose(streamed(labels, "mask"), in_order, atol=1e-5)
    assert not np.allclose(streamed(labels, rows=slice(None, None, -1)), in_order, atol=1e-3)


def test_a_model_without_observations_is_fitted_to_its_prior():
    def model():
        numpyro.sample("m", dist.Normal(1.0, 2.0))

    pvi, result = fit(model, guide=AutoNormal)
    assert "no sample site is observed" in result.info.notes[0]
    assert pvi.posterior(result.state)["m"].mean == pytest.approx(1.0)
    assert float(result.losses[-1]) == pytest.approx(0.0, abs=1e-6)


def test_structure_that_was_found_without_a_plate_is_verified():
    """Its rows are one; a run ended in a TypeError after its last round."""

    def overdispersed(x, y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        size = numpyro.sample("size", dist.Exponential(1.0))
        numpyro.sample("y", dist.GammaPoisson(size, size / jnp.exp(slope * x)), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=12)
    pvi, args = (
        PVI(overdispersed, AutoMultivariateNormal(overdispersed), init_sites="prior"),
        (x, rng.poisson(np.exp(0.3 * x))),
    )
    state = pvi.init(jax.random.key(0), *args)
    assert state.plan.partition.likelihood == "affine" and "likelihood" in pvi._engine.claims(state.plan)
    found = pvi._engine.verify(state, args, {})["likelihood"]
    assert found.gap.size and np.all(found.gap <= found.allowed)
