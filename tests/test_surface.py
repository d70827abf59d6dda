"""What a user types: the SVI swap, results under the guide's own names, distributions per latent, states."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer import autoguide as ag

from numpyro_pvi import PRIOR, PVI, ImproperError, Partition, PartitionError, PVIRunResult, StateError
from numpyro_pvi.schedules import Streaming
from numpyro_pvi.solvers import NaturalGradient

N, D = 15, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
Y = X @ [1.0, -0.5] + 0.4 + RNG.normal(size=N)
LABELS = ["a"] * 7 + ["b"] * 5 + ["c"] * 3
KEY = jax.random.key(0)
GUIDES = [ag.AutoMultivariateNormal, ag.AutoDiagonalNormal, ag.AutoNormal]
# Rows, and the posterior of (w, b) under standard normal priors and unit noise, in closed form.
DESIGN = np.column_stack([X, np.ones(N)])
COVARIANCE = np.linalg.inv(DESIGN.T @ DESIGN + np.eye(D + 1))
MEAN = COVARIANCE @ DESIGN.T @ Y


def model(X, y, noise=1.0):
    # "w" before "b": alphabetical order, which jit gives, is another one.
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w + b, noise), obs=y)


def fit(guide=None, num_steps=3, partition=None, **options):
    guide = ag.AutoMultivariateNormal(model) if guide is None else guide
    pvi = PVI(Partition(model, "data", LABELS) if partition is None else partition, guide, **options)
    return pvi, pvi.run(KEY, num_steps, X, Y, progress_bar=False)


@pytest.fixture(scope="module")
def full():
    return fit()


@pytest.fixture(scope="module", params=GUIDES, ids=lambda g: g.__name__)
def each(request):
    guide = request.param(model, prefix="q")
    # Jacobi rounds of a mean-field q contract by .9 here: the rows correlate the latents.
    pvi, result = fit(guide, 160)
    return guide, pvi, result


class TestSwap:
    def test_signature_starts_as_svi(self):
        svi = list(inspect.signature(SVI.__init__).parameters)[:5]
        assert list(inspect.signature(PVI.__init__).parameters)[:5] == svi
        for verb in ("init", "update", "stable_update", "run", "evaluate", "get_params"):
            theirs, ours = (list(inspect.signature(getattr(c, verb)).parameters) for c in (SVI, PVI))
            theirs = [{"svi_state": "state"}.get(name, name) for name in theirs]
            assert set(theirs) <= set(ours)
            assert [n for n in ours if n in theirs] == list(theirs)

    def test_literal_swap(self):
        guide = ag.AutoMultivariateNormal(model)
        pvi = PVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO(), num_groups=3)
        assert isinstance(pvi, SVI)
        result = pvi.run(KEY, 2, X, Y, progress_bar=False)
        params, state, losses = result
        assert isinstance(result, PVIRunResult) and result.params is params and result.state is state
        assert losses.shape == (2,) and result.losses is losses and pvi.groups == (0, 1, 2)
        np.testing.assert_allclose(params["auto_loc"], MEAN, rtol=1e-4)
        assert "nothing for it to optimise" in str(result.info)

    def test_nothing_can_be_put_into_a_pvi_that_is_made(self):
        pvi = PVI(model, ag.AutoNormal(model))
        before = {n: x for n, x in vars(pvi).items() if n != "_memory"}
        with pytest.raises(AttributeError, match=r"PVI\.solver cannot be set.*Make a new one"):
            pvi.solver = PVI(model, ag.AutoNormal(model)).solver
        pvi.init(KEY, X, Y)
        assert all(vars(pvi)[n] is x for n, x in before.items()) and vars(pvi).keys() == {*before, "_memory"}

        class Named(PVI):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.name = "mine"

        assert Named(model, ag.AutoNormal(model)).name == "mine"

    def test_default_is_ten_random_blocks(self):
        pvi = PVI(model, ag.AutoNormal(model))
        pvi.init(KEY, X, Y)
        assert pvi.groups == tuple(range(10))


class TestPosterior:
    def test_guides_reach_the_optimum_under_their_own_names(self, each):
        guide, pvi, result = each
        sd = (
            np.sqrt(np.diag(COVARIANCE))
            if pvi.guide.__class__ is GUIDES[0]
            else np.diag(np.linalg.inv(COVARIANCE)) ** -0.5
        )
        assert all(name.startswith("q_") or "_q_" in name for name in result.params)
        found = guide.median(result.params)
        np.testing.assert_allclose(found["w"], MEAN[:D], rtol=2e-3)
        np.testing.assert_allclose(found["b"], MEAN[D], rtol=2e-3)
        upper = guide.quantiles(result.params, [0.8413447])["b"]
        np.testing.assert_allclose(np.squeeze(upper), MEAN[D] + sd[D], rtol=2e-3)
        own = pvi.posterior(result.state)
        np.testing.assert_allclose(own["w"].mean, found["w"], rtol=1e-5)
        np.testing.assert_allclose(np.sqrt(own["w"].variance), sd[:D], rtol=2e-3)
        assert own["b"].event_shape == () and own["w"].event_shape == (D,)
        draws = guide.sample_posterior(KEY, result.params, sample_shape=(5,))
        assert draws["w"].shape == (5, D) and draws["b"].shape == (5,)

    def test_fresh_guide_reads_the_same_posterior(self, full):
        state, fresh = full[1].state, ag.AutoMultivariateNormal(model)
        pvi = PVI(Partition(model, "data", LABELS), fresh)
        # Predictive would set the guide up under vmap, in another order: params for it are not written before init has.
        with pytest.raises(StateError, match="not set up: call pvi.init"):
            pvi.get_params(state)
        pvi.init(KEY, X, Y)
        draws = Predictive(fresh, params=pvi.get_params(state), num_samples=4000)(jax.random.key(1), X, Y)
        found = np.concatenate([draws["w"].mean(axis=0), [draws["b"].mean()]])
        np.testing.assert_allclose(found, MEAN, atol=5 * np.sqrt(np.diag(COVARIANCE).max() / 4000))

    def test_guide_set_up_under_jit_beforehand(self):
        guide = ag.AutoMultivariateNormal(model)
        svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
        jax.jit(svi.init)(KEY, jnp.asarray(X), jnp.asarray(Y))
        _, result = fit(guide, 2)
        found = guide.median(result.params)
        np.testing.assert_allclose(np.append(found["w"], found["b"]), MEAN, rtol=1e-4)

    def test_joint(self, full):
        pvi, result = full
        found = pvi.posterior(result.state, joint=True)
        assert set(found) == {"w", "b", ("w", "b")}
        np.testing.assert_allclose(found["w", "b"].covariance_matrix, COVARIANCE, rtol=1e-4, atol=1e-7)

    def test_evidence_is_exact_for_a_linear_model(self, full):
        pvi, result = full
        marginal = dist.MultivariateNormal(jnp.zeros(N), jnp.asarray(DESIGN @ DESIGN.T + np.eye(N)))
        expected = float(marginal.log_prob(jnp.asarray(Y)))
        np.testing.assert_allclose(float(pvi.log_evidence(result.state, X, Y)), expected, rtol=1e-5)
        np.testing.assert_allclose(float(result.losses[-1]), -expected, rtol=1e-5)

    def test_prior_site_and_cavity(self, full):
        pvi, result = full
        prior = pvi.prior(result.state)
        np.testing.assert_allclose(prior["w"].mean, np.zeros(D), atol=1e-12)
        np.testing.assert_allclose(prior["b"].variance, 1.0, rtol=1e-6)
        rows = DESIGN[np.array(LABELS) == "c"]
        np.testing.assert_allclose(pvi.site(result.state, "c").precision, rows.T @ rows, rtol=1e-4, atol=1e-6)
        cavity = pvi.cavity(result.state, "a").to_distribution()
        keep = DESIGN[np.array(LABELS) != "a"]
        expected = np.linalg.inv(keep.T @ keep + np.eye(D + 1))
        np.testing.assert_allclose(cavity.covariance_matrix, expected, rtol=1e-4, atol=1e-7)

    def test_improper_site_has_no_distribution(self):
        pvi = PVI(Partition(model, "data", np.arange(N)), ag.AutoMultivariateNormal(model))
        state = pvi.init(KEY, X, Y)
        with pytest.raises(ImproperError, match="site of group 0 is not normalisable"):
            pvi.site(state, 0).to_distribution()
        with pytest.raises(PartitionError, match="no PRIOR site"):
            pvi.site(state, PRIOR)


def supports(y):
    numpyro.sample("half", dist.HalfNormal(2.0))
    numpyro.sample("beta", dist.Beta(2.0, 3.0))
    numpyro.sample("matrix", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    numpyro.sample("simplex", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("batch", dist.Normal(0, 1).expand([2]))
    numpyro.sample("positive", dist.LogNormal(0, 1).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(b, 1.0), obs=y)


@pytest.mark.parametrize("make", GUIDES[:2], ids=lambda g: g.__name__)
def test_marginals_have_the_models_shapes_and_supports(make):
    pvi = PVI(Partition(supports, "data", LABELS), make(supports))
    state = pvi.init(KEY, Y)
    trace = numpyro.handlers.trace(numpyro.handlers.seed(supports, 0)).get_trace(jnp.asarray(Y))
    for found in (pvi.posterior(state), pvi.prior(state)):
        assert list(found) == ["half", "beta", "matrix", "simplex", "batch", "positive", "b"]
        for name, marginal in found.items():
            fn = trace[name]["fn"]
            assert (marginal.batch_shape, marginal.event_shape) == (fn.batch_shape, fn.event_shape), name
            draws = marginal.sample(KEY, (4,))
            assert draws.shape == (4, *fn.shape()) and bool(jnp.all(fn.support(draws))), name
            assert bool(jnp.all(jnp.isfinite(marginal.log_prob(draws)))), name
        for name in ("matrix", "batch", "b"):
            np.testing.assert_array_equal(found[name].mean.shape, trace[name]["fn"].shape())
        for name in ("half", "positive", "matrix"):
            many = np.asarray(found[name].sample(KEY, (40_000,)), np.float64)
            spread = np.sqrt(np.asarray(found[name].variance))
            np.testing.assert_array_less(np.abs(many.mean(0) - found[name].mean) / spread, 5 / 200)
            # Two sds of the error of a log-normal's variance, whose fourth moment is large.
            np.testing.assert_allclose(many.std(0), spread, rtol=0.25)
    assert pvi.site(state, PRIOR).precision_mean.shape == (15,)


class TestStart:
    def test_init_params_are_spread_over_the_sites(self):
        guide = ag.AutoMultivariateNormal(model)
        pvi = PVI(Partition(model, "data", LABELS), guide)
        scale = np.array([[0.5, 0, 0], [0.1, 0.6, 0], [-0.2, 0.3, 0.7]])
        given = {"auto_loc": np.array([0.3, -0.2, 0.9]), "auto_scale_tril": scale}
        state = pvi.init(KEY, X, Y, init_params=given)
        for name, value in pvi.get_params(state).items():
            np.testing.assert_allclose(value, given[name], rtol=1e-4, atol=1e-6)
        sites = [pvi.site(state, g).precision for g in pvi.groups]
        np.testing.assert_allclose(sites[0], sites[2])
        np.testing.assert_allclose(np.eye(D + 1) + sum(sites), np.linalg.inv(scale @ scale.T), rtol=1e-3, atol=1e-4)

    def test_partial_init_params(self):
        guide = ag.AutoNormal(model)
        pvi = PVI(Partition(model, "data", LABELS), guide)
        params = pvi.get_params(pvi.init(KEY, X, Y, init_params={"w_auto_loc": np.array([0.3, -0.2])}))
        np.testing.assert_allclose(params["w_auto_loc"], [0.3, -0.2], rtol=1e-5)
        np.testing.assert_allclose(params["b_auto_loc"], 0.0, atol=1e-6)

    def test_init_state_continues(self, full):
        pvi, _ = full
        once = pvi.run(KEY, 4, X, Y, progress_bar=False)
        half = pvi.run(KEY, 2, X, Y, progress_bar=False)
        rest = pvi.run(None, 2, X, Y, init_state=half.state, progress_bar=False)
        assert int(rest.state.step) == 4
        np.testing.assert_array_equal(rest.params["auto_loc"], once.params["auto_loc"])


class TestRun:
    def test_update_and_evaluate(self, full):
        pvi, result = full
        state, loss = pvi.update(pvi.init(KEY, X, Y), X, Y)
        np.testing.assert_allclose(float(loss), float(pvi.evaluate(state, X, Y)), rtol=1e-6)
        again, stable = pvi.stable_update(pvi.init(KEY, X, Y), X, Y)
        assert float(stable) == float(loss) and int(again.step) == 1

    def test_tolerance(self, full):
        pvi, _ = full
        result = pvi.run(KEY, 50, X, Y, tol=1e-3, progress_bar=False)
        assert result.converged is True and len(result.losses) < 50 and "converged after" in result.message

    def test_a_single_pass_is_complete_and_no_fixed_point(self, full):
        pvi, _ = full
        once = PVI(pvi.partition, ag.AutoMultivariateNormal(pvi.model), schedule=Streaming())
        result = once.run(KEY, 50, X, Y, tol=1e-3, progress_bar=False)
        assert result.converged is True and len(result.losses) < 5
        assert result.message.startswith("complete after") and "left to move" not in result.message

    def test_tolerance_not_reached(self, full):
        pvi, _ = full
        result = pvi.run(KEY, 1, X, Y, tol=1e-30, progress_bar=False)
        assert result.converged is False and "without reaching" in result.message

    def test_callback(self, full):
        pvi, result = full
        seen = []
        stopped = pvi.run(KEY, 9, X, Y, callback=lambda *a: seen.append(a) or a[0] == 2, progress_bar=False)
        assert [s for s, _, _ in seen] == [1, 2] and len(stopped.losses) == 2 and "callback" in stopped.message
        assert result.converged is None and seen[1][2].rounds == 2

    def test_loss_every(self, full):
        losses = full[0].run(KEY, 5, X, Y, loss_every=2, progress_bar=False).losses
        assert np.isnan(losses).tolist() == [True, False, True, False, True]

    def test_progress_bar(self, full, capfd):
        full[0].run(KEY, 2, X, Y)
        shown = capfd.readouterr().err
        assert "elbo" in shown and "largest move" in shown and "2/2" in shown

    def test_info(self, full):
        pvi, result = full
        table = str(pvi.info(result.state))
        for word in ("a ", "b ", "c ", "quadratic", "closed form", "after 3 rounds: q is normalisable"):
            assert word in table


class TestState:
    def test_pickles(self, full):
        pvi, result = full
        other = pickle.loads(pickle.dumps(result.state))
        assert other.plan == result.state.plan
        np.testing.assert_array_equal(pvi.get_params(other)["auto_loc"], result.params["auto_loc"])
        pvi.update(other, X, Y)

    def test_is_frozen(self, full):
        with pytest.raises(AttributeError):
            full[1].state.step = 3

    def test_holds_no_data(self, full):
        state = full[1].state
        for leaf in jax.tree.leaves(state):
            if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating):
                values = np.asarray(leaf).reshape(-1)
                assert not np.isin(values, np.asarray(jnp.asarray(X)).reshape(-1)).any()
                assert not np.isin(values, np.asarray(jnp.asarray(Y))).any()

    def test_is_a_pytree(self, full):
        state = full[1].state
        leaves, structure = jax.tree.flatten(state)
        assert structure.unflatten(leaves).plan is state.plan and hash(state.plan) == hash(state.plan)


class TestArguments:
    """The same posterior whatever the container."""

    @staticmethod
    def check(pvi, *args, **kwargs):
        result = pvi.run(KEY, 2, *args, progress_bar=False, **kwargs)
        np.testing.assert_allclose(result.params["auto_loc"], MEAN, rtol=1e-4)

    def test_containers(self, full):
        pandas = pytest.importorskip("pandas")
        pvi, _ = full
        self.check(pvi, X.tolist(), Y.tolist())
        self.check(pvi, pandas.DataFrame(X), pandas.Series(Y))
        self.check(pvi, jnp.asarray(X), jnp.asarray(Y))

    def test_keywords_and_static_keywords(self):
        pvi = PVI(Partition(model, "data", LABELS), ag.AutoMultivariateNormal(model), noise=1.0)
        self.check(pvi, X=X, y=Y)

    def test_static_arguments(self):
        def static(X, y, width, kind, intercept, nothing):
            assert isinstance(width, int) and kind == "linear" and intercept is True and nothing is None
            w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1)) if intercept else 0.0
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(X @ w + b, 1.0), obs=y)

        pvi = PVI(Partition(static, "data", LABELS), ag.AutoMultivariateNormal(static), intercept=True, nothing=None)
        self.check(pvi, X, Y, D, "linear")

    @pytest.mark.parametrize(
        "labels",
        [
            [0] * 7 + [1] * 5 + [5] * 3,
            [("x", 1)] * 7 + [("x", 2)] * 8,
            np.array([True] * 7 + [False] * 8),
            [0.5] * 7 + [frozenset("a")] * 8,
            ["only one"] * N,
            list(range(N)),
        ],
        ids=["ints", "tuples", "bools", "mixed", "one group", "one row each"],
    )
    def test_labels(self, labels):
        pvi = PVI(Partition(model, "data", labels), ag.AutoMultivariateNormal(model))
        state = pvi.init(KEY, X, Y)
        assert set(pvi.groups) == set(labels)
        assert all(str(label) in str(pvi.info(state)) for label in pvi.groups)
        for label in set(labels):
            rows = DESIGN[[at == label for at in labels]]
            updated = pvi.update(state, X, Y)[0]
            np.testing.assert_allclose(pvi.site(updated, label).precision, rows.T @ rows, rtol=1e-4, atol=1e-6)
            break

    def test_excluded_argument(self):
        # As long as the plate by chance; without data_axes it would be sliced, which the additive check sees.
        def centred(X, y, centre):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(X @ w + b + jnp.mean(centre), 1.0), obs=y)

        centre = np.arange(N) - 7.0
        with pytest.raises(PartitionError, match="'centre'|centre"):
            Partition(centred, "data", LABELS, mode="args").plan(X, Y, centre)
        partition = Partition(centred, "data", LABELS, data_axes={"centre": None})
        self.check(PVI(partition, ag.AutoMultivariateNormal(centred)), X, Y, centre)


@pytest.mark.parametrize("make", GUIDES, ids=lambda g: g.__name__)
def test_one_scalar_latent_one_row(make):
    def scalar(y):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("obs", dist.Normal(z, 1.0), obs=y)

    guide = make(scalar)
    pvi = PVI(scalar, guide)
    result = pvi.run(KEY, 1, np.array([3.0]), progress_bar=False)
    assert pvi.groups == (0,)
    np.testing.assert_allclose(guide.median(result.params)["z"], 1.5, rtol=1e-5)
    np.testing.assert_allclose(pvi.posterior(result.state)["z"].variance, 0.5, rtol=1e-5)


def test_backtracking_options_reach_the_solver():
    _, result = fit(solver=NaturalGradient(step_size=0.5), num_steps=30)
    np.testing.assert_allclose(result.params["auto_loc"], MEAN, rtol=1e-3)
