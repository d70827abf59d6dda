"""Hostile and careless inputs: each ends in the package's own error, with the argument's name and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_pvi import (
    PVI,
    AutoExponentialFamily,
    DataError,
    GuideError,
    Partition,
    PartitionError,
    PVIError,
    StateError,
)
from numpyro_pvi.errors import ImproperError
from numpyro_pvi.factors._planner import _without_number as without_number
from numpyro_pvi.schedules import Asynchronous, Decentralized
from numpyro_pvi.schedules._network import delay_sampler
from numpyro_pvi.solvers import NaturalGradient, PowerEP

KEY = jax.random.key(0)
N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = X @ np.array([1.0, -1.0]) + 0.5 * RNG.normal(size=N)


def model(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 0.5), obs=y)


def of(model=model, groups=3, guide=AutoDiagonalNormal, **options):
    return PVI(Partition(model, "data", groups), guide(model), **options)


# ----------------------------------------------------------------------------------------------------------- arguments


def test_arviz_data_of_something_else_than_a_state_are_refused():
    pvi = of()
    state = pvi.init(KEY, X, Y)
    with pytest.raises(PVIError, match=r"takes a random key, then a state or a result of run, and got ndarray there"):
        pvi.to_arviz(state, X, Y, rng_key=KEY)


def test_a_mask_is_not_thrown_away():
    masked = np.ma.array(Y, mask=np.arange(N) == 3)
    with pytest.raises(
        DataError, match=r"argument 1 \('y'\) is a masked array.*y.filled\(0.0\).*getmaskarray\(y\).*obs_mask"
    ):
        of().init(KEY, X, masked)
    with pytest.raises(PartitionError, match="`groups` is a masked array"):
        of(groups=np.ma.array(np.arange(N) % 3)).init(KEY, X, Y)


def in_batches(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("data", N, subsample_size=4) as rows:
        numpyro.sample("obs", dist.Normal((X[rows] if len(X) == N else X) @ w, 0.5), obs=y)


@pytest.mark.parametrize("guide", [AutoDiagonalNormal, AutoExponentialFamily], ids=["gaussian", "family"])
@pytest.mark.parametrize("length", [N - 3, N + 2])
def test_observations_of_another_length_than_the_rows_are_named(guide, length):
    y = np.resize(Y, length)
    words = rf"sample site 'obs' is observed with shape \({length},\), and its distribution has shape \({N},\).*"
    with pytest.raises(DataError, match=words + rf"plate 'data' has {N} rows\. Give one observation for every row"):
        of(guide=guide).init(KEY, X, y)
    with pytest.raises(DataError, match=words):
        PVI(model, guide(model)).init(KEY, X, y)


def test_a_mini_batch_of_another_length_than_its_observations_is_named():
    pvi = PVI(in_batches, AutoDiagonalNormal(in_batches))
    with pytest.raises(
        DataError, match=rf"shape \(3,\).*shape \({N},\).*plate 'data' has {N} rows, of which it draws 4\."
    ):
        pvi.init(KEY, X, Y[:3])
    with pytest.raises(DataError, match=r"shape \(3,\).*shape \(4,\).*plate 'data' has 4 rows\."):
        pvi.init(KEY, X[:4], Y[:3])
    pvi.init(KEY, X[:4], Y[:4])


@pytest.mark.parametrize("guide", [AutoDiagonalNormal, AutoExponentialFamily], ids=["gaussian", "family"])
def test_a_column_of_observations_is_refused_by_whatever_is_split(guide):
    """Kept whole, which is what a default that cannot split rows falls back to, it ended in an error of shapes."""
    with pytest.raises(
        PartitionError, match="every row would be compared with every other. Pass observations of shape"
    ):
        PVI(model, guide(model), num_groups=3).init(KEY, X, Y[:, None])


@pytest.mark.filterwarnings("ignore:Missing a plate statement")
def test_observations_may_have_axes_of_their_own_beside_a_plate():
    """Rows observed three times over, in no plate for that, are what they are in one."""

    def one(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("obs", dist.Normal(X[i] @ w, 0.5), obs=y[:, i])

    def two(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("times", y.shape[0], dim=-2), numpyro.plate("data", X.shape[0], dim=-1) as i:
            numpyro.sample("obs", dist.Normal(X[i] @ w, 0.5), obs=y[:, i])

    y = np.stack([Y, Y + 0.5, Y - 1.0])
    found = [
        PVI(Partition(m, "data", 3), AutoDiagonalNormal(m)).run(KEY, 20, X, y, progress_bar=False) for m in (one, two)
    ]
    np.testing.assert_allclose(found[0].params["auto_loc"], found[1].params["auto_loc"], rtol=1e-5)
    np.testing.assert_allclose(found[0].losses[-1], found[1].losses[-1], rtol=1e-6)


@pytest.mark.parametrize("guide", [AutoDiagonalNormal, AutoExponentialFamily], ids=["gaussian", "family"])
def test_a_healthy_fit_goes_through_under_debug_nans(guide):
    """What nobody has looked at yet is NaN in reports, and is no fault of the model's."""
    with jax.debug_nans(True):
        pvi = of(guide=guide)
        state, loss = pvi.update(pvi.init(KEY, X, Y), X, Y)
        assert np.isfinite(loss) and np.all(np.isfinite(pvi.posterior(state)["w"].mean))
        assert pvi.get_params(state) and "factor" in str(pvi.info(state))
        assert jax.config.jax_debug_nans


def test_the_order_of_bytes_does_not_matter():
    pvi = of()
    swapped = X.astype(">f8"), Y.astype(">f8")
    assert all(
        np.array_equal(a, b.astype(a.dtype)) for a, b in zip(pvi._arguments(swapped, {})[0], (X, Y), strict=True)
    )
    assert np.array_equal(pvi._arguments((np.arange(3, dtype=">i2"),), {})[0][0], np.arange(3))


@pytest.mark.parametrize("labels", [set("abcdefghijkl"), frozenset(range(N)), dict.fromkeys(range(N)).keys()], ids=type)
def test_labels_without_an_order_are_refused(labels):
    with pytest.raises(PartitionError, match="`groups` is a .*whose order says nothing of rows.*list or array"):
        of(groups=labels).init(KEY, X, Y)


def test_a_column_that_another_plate_repeats_is_a_models_own():
    """Every y_t under each of two scales of a plate of its own: NumPyro broadcasts it, and the other axis is the distribution's."""

    def repeated(y):
        s = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", y.shape[0], dim=-2), numpyro.plate("scales", 2, dim=-1):
            numpyro.sample("obs", dist.Normal(s, jnp.array([0.5, 1.0])), obs=y[:, None])

    pvi = of(repeated)
    state = pvi.run(KEY, 3, Y, progress_bar=False).state
    precision = 1.0 + N * (4.0 + 1.0)
    np.testing.assert_allclose(pvi.posterior(state)["w"].loc, 5.0 * Y.sum() / precision, rtol=1e-4)


def test_a_column_of_observations_is_refused():
    with pytest.raises(
        PartitionError, match=r"'obs' is observed with shape \(12, 1\).*plate 'data'.*\(12,\).*y\[:, 0\].*to_event"
    ):
        of().init(KEY, X, Y[:, None])
    with pytest.raises(PartitionError, match=r"'obs' is observed with shape \(12, 1\)"):
        of(guide=AutoExponentialFamily).init(KEY, X, Y[:, None])


# ------------------------------------------------------------------------------------------------------------- starting


def wrong_support(X, y):
    s = numpyro.sample("s", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Gamma(2.0, jnp.exp(s)), obs=y)


def no_number(X, y):
    s = numpyro.sample("s", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(jnp.log(-jnp.exp(s)), 1.0), obs=y)


@pytest.mark.filterwarnings("ignore:.*[Oo]ut-of-support")
def test_where_nothing_is_finite_the_sample_site_is_named():
    with pytest.raises(
        DataError, match=r"observations of sample site 'obs' are outside.*'obs' \(Gamma, whose observations"
    ):
        of(wrong_support).init(KEY, X, -np.abs(Y))
    with pytest.raises(GuideError, match=r"AutoDiagonalNormal found no point.*'obs' \(Normal\) in 12 of 12 entries"):
        of(no_number).init(KEY, X, Y)


def robust(y, seen, level):
    """The level of every row's observation is masked as ``level`` says, and the observation as ``seen`` does."""
    m = numpyro.sample("m", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", y.shape[0]):
        with numpyro.handlers.mask(mask=level):
            z = numpyro.sample("z", dist.Gamma(2.0, 2.0))
        with numpyro.handlers.mask(mask=seen):
            numpyro.sample("obs", dist.Normal(m, z**-0.5), obs=y)


SEEN, ALL = np.arange(N) != 7, np.full(N, True)


def test_rows_own_latents_that_a_mask_leaves_without_their_prior_are_named():
    """Masked together with the observation, a latent is held by nothing: rounds under NaturalGradient drifted without a word."""
    words = r"latent 'z' is without its prior in row 7 of plate 'data', .*sites alone\."
    with pytest.raises(ImproperError, match=words):
        of(robust, guide=AutoExponentialFamily).init(KEY, Y, SEEN, SEEN)


def test_latents_that_cannot_run_away_need_nothing_to_hold_them():
    """A share that ends on both sides is as proper without its prior."""

    def shares(y, seen):
        m = numpyro.sample("m", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", y.shape[0]), numpyro.handlers.mask(mask=seen):
            z = numpyro.sample("z", dist.Beta(2.0, 2.0))
            numpyro.sample("obs", dist.Normal(m + z, 1.0), obs=y)

    of(shares, guide=AutoExponentialFamily).init(KEY, Y, SEEN)


@pytest.mark.parametrize("solver", [NaturalGradient(), PowerEP()], ids=["variational", "integrated"])
def test_a_latent_inside_a_mask_has_the_family_of_its_prior(solver):
    """Of positive support, it had the family that any positive latent has, whose start was no number there."""
    runs = [
        of(robust, guide=AutoExponentialFamily, solver=solver).run(KEY, 12, Y, SEEN, x, progress_bar=False)
        for x in (ALL, True)
    ]
    np.testing.assert_allclose(*(run.losses[-1] for run in runs), rtol=1e-6)
    assert sorted(runs[0].params) == sorted(runs[1].params)


def jittered(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    noise = 0.1 * jax.random.normal(numpyro.prng_key(), (X.shape[0],))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w + noise, 0.5), obs=y)


def simulated(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    numpyro.deterministic("like_y", X @ w + 0.5 * jax.random.normal(numpyro.prng_key(), (X.shape[0],)))
    b = numpyro.param("b", lambda key: jax.random.normal(key))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w + b, 0.5), obs=y)


def test_a_tables_columns_by_name_are_told_to_be_passed_as_a_dict():
    """Models see a table as one array; the columns' names ended in a TypeError of JAX's."""
    frame = pytest.importorskip("pandas").DataFrame({"x": X[:, 0], "y": Y})

    def model(df):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(df["y"])):
            numpyro.sample("obs", dist.Normal(w * df["x"], 1.0), obs=df["y"])

    words = r"argument 0 \('df'\).* as a dict, {c: df\[c\].to_numpy\(\) for c in df.columns}"
    for table in (frame, frame.assign(g="u")):
        with pytest.raises(DataError, match=words):
            of(model).init(KEY, table)
    assert of(model).init(KEY, {c: frame[c].to_numpy() for c in frame.columns}).step == 0


def test_a_density_that_changes_with_keys_is_refused():
    """It was frozen at one key without a word; keys that leave the density alone pass."""
    with pytest.raises(
        PVIError, match=r"numpyro.prng_key\(\), and its log density changes.*as an argument of the model"
    ):
        of(jittered).init(KEY, X, Y)
    assert of(simulated, optim=numpyro.optim.Adam(0.01)).init(KEY, X, Y).step == 0


# ------------------------------------------------------------------------------------------------------------ schedules


class Problem:
    """What delays read of the factors."""

    num_groups, labels, continued = 3, ("a", "b", "c"), False


DELAYS = {
    "NaN": (lambda key, n: jnp.array([1.0, jnp.nan, 1.0]), "returned nan for group 'b'"),
    "negative": (lambda key, n: jnp.array([1.0, 1.0, -2.0]), "returned -2 for group 'c'"),
    "infinite": (lambda key, n: jnp.full((n,), jnp.inf), "returned inf for group 'a'"),
    "now and then": (lambda key, n: jax.random.normal(key, (n,)), "returned -.* for group"),
    "text": (lambda key, n: ["soon"] * n, "what is no array of numbers"),
    "None": (lambda key, n: None, "returned .*one positive, finite duration"),
    "one": (lambda key, n: 1.0, r"returned shape \(\)"),
}


@pytest.mark.parametrize("kind", DELAYS)
def test_delays_that_are_no_durations_are_refused(kind):
    delays, message = DELAYS[kind]
    with pytest.raises(PVIError, match=rf"Asynchronous\(delays=.*{message}"):
        # As init does: compiled.
        jax.jit(lambda: delay_sampler(Asynchronous(delays=delays).delays, Problem(), jnp.float32)(KEY, 0))()


def test_an_agent_alone_needs_no_neighbours():
    pvi = of(groups=1, schedule=Decentralized([[1.0]], damping=1.0))
    result = pvi.run(KEY, 30, X, Y, tol=1e-6, progress_bar=False)
    precision = np.eye(2) / 9 + X.T @ X / 0.25
    np.testing.assert_allclose(result.params["auto_loc"], np.linalg.solve(precision, X.T @ Y / 0.25), rtol=1e-3)


def of_states(state, y, num_samples=0.7):
    """A model whose parameters have names that verbs of PVI have too."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(w[state], num_samples), obs=y)


def test_arguments_of_a_model_may_be_called_state():
    rows = {"state": np.array([0, 1, 0, 1]), "y": np.array([0.1, 1.2, 0.3, 0.9])}
    pvi = PVI(of_states, AutoDiagonalNormal(of_states), num_groups=2)
    state = pvi.run(jax.random.key(0), 2, progress_bar=False, **rows).state
    assert float(pvi.update(state, **rows)[1]) == pytest.approx(float(pvi.evaluate(state, **rows)), abs=1e-4)
    assert np.isfinite(pvi.log_evidence(state, **rows))
    with pytest.raises(
        PVIError, match=r"num_samples= is a keyword of PVI.khat, and the model has a parameter of that name"
    ):
        pvi.khat(state, rng_key=jax.random.key(1), num_samples=200, **rows)
    # By position there is no doubt whose it is; the state was made with keywords.
    with pytest.raises(StateError, match="arguments are not those"):
        pvi.khat(state, *rows.values(), 0.7, rng_key=jax.random.key(1), num_samples=200)


def test_a_number_of_groups_that_could_be_the_models_is_refused():
    def hierarchical(y, num_groups=2):
        return of_states(np.zeros(y.shape[0], int), y, num_groups)

    with pytest.raises(PVIError, match=r"num_groups=5 is how many groups PVI makes, and the model has a parameter"):
        PVI(hierarchical, AutoDiagonalNormal(hierarchical), num_groups=5)


@pytest.mark.parametrize("family", ["bernoulli", "normal"])
def test_data_that_are_no_numbers_are_refused_by_every_call(family):
    """NumPyro's density of a zero is finite at a logit that is NaN under jit, and a loss that is NaN does not say why."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            eta = x @ w
            numpyro.sample("y", dist.Bernoulli(logits=eta) if family == "bernoulli" else dist.Normal(eta, 1.0), obs=y)

    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(12, 2)), (rng.uniform(size=12) < 0.5) * 1.0
    y[7], spoilt = 0.0, x.copy()
    spoilt[7, 1] = np.nan
    pvi = PVI(Partition(model, "data", 3), AutoDiagonalNormal(model))
    with pytest.raises(DataError, match=r"'x'.* first at row\(s\) 7"):
        pvi.init(jax.random.key(0), spoilt, y)
    state, _ = pvi.update(pvi.init(jax.random.key(0), x, y), x, y)
    calls = [
        lambda: pvi.update(state, spoilt, y),
        lambda: pvi.evaluate(state, spoilt, y),
        lambda: pvi.run(jax.random.key(0), 2, spoilt, y, init_state=state, progress_bar=False),
    ]
    for call in calls:
        with pytest.raises(DataError, match=r"'x'.* first at row\(s\) 7"):
            call()
    assert np.isfinite(pvi.evaluate(state, x, y))


@pytest.mark.parametrize("guide", [AutoDiagonalNormal, AutoExponentialFamily], ids=lambda g: g.__name__)
def test_params_of_the_guide_have_its_shapes(guide):
    """Three numbers for a vector of two began at the first two of them."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)

    pvi, y = PVI(Partition(model, "data", 2), guide(model)), np.ones((6, 2))
    name = next(n for n in pvi.get_params(pvi.init(KEY, y)) if n.endswith("auto_loc"))
    for value, words in (
        (np.arange(3.0), rf"{name}'\] has shape \(3,\), and the guide's is \(2,\)"),
        (np.zeros((2, 2)), r"has shape \(2, 2\)"),
        ([np.nan, 0.0], "not finite"),
    ):
        with pytest.raises(PVIError, match=words):
            pvi.init(KEY, y, init_params={name: value})
    for value in (0.5, [0.5, 0.5]):
        state = pvi.init(KEY, y, init_params={name: value})
        np.testing.assert_allclose(pvi.get_params(state)[name], [0.5, 0.5], rtol=1e-6)


NAN = np.array([0.0, np.nan, 1.0])
MASKED = np.array([True, False, True])


@pytest.mark.parametrize(
    ("made", "value", "wanted"),
    [
        (lambda: dist.Normal(NAN, 1.0), None, True),
        (lambda: dist.Normal(0.0, 1.0).expand([3]), NAN, True),
        (lambda: dist.Normal(NAN, 1.0).mask(MASKED), None, False),
        (lambda: dist.Normal(NAN, 1.0).mask(~MASKED), None, True),
        (lambda: dist.Normal(0.0, 1.0).expand([3]).mask(MASKED), NAN, False),
        (lambda: dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1).mask(MASKED), np.stack([NAN, NAN], 1), False),
        (lambda: dist.Normal(np.stack([NAN, NAN], 1), 1.0).to_event(1).mask(~MASKED), None, True),
        (lambda: dist.MultivariateNormal(np.zeros((3, 2)), np.eye(2)), np.zeros((3, 2)), False),
        (lambda: dist.OrderedLogistic(np.zeros(3), np.array([-1.0, 0.0])), None, False),
        (lambda: dist.OrderedLogistic(np.zeros(3), np.array([-1.0, np.nan])), None, True),
        (
            lambda: dist.MixtureSameFamily(dist.Categorical(np.ones(2) / 2), dist.Normal(np.zeros((3, 2)), 1.0)),
            NAN,
            True,
        ),
        (lambda: dist.ZeroInflatedPoisson(0.2, np.exp(NAN)), None, True),
        (lambda: dist.Bernoulli(logits=np.where(np.isnan(NAN), 0.0, NAN)), None, False),
    ],
)
def test_where_a_density_sees_what_is_no_number(made, value, wanted):
    with numpyro.validation_enabled(False):
        assert bool(jnp.any(without_number(made(), value))) is wanted
