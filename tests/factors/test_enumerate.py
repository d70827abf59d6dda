"""Discrete latents of the partitioned plate, summed out: the sum by hand, in NumPy, is the oracle."""

import builtins
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from scipy.special import gammaln, logsumexp

from numpyro_pvi import PVI, Partition, PartitionError, PVIError
from numpyro_pvi.factors import ModelCall, row_log_likelihood
from numpyro_pvi.factors import _enumerate as enumerate_rows
from numpyro_pvi.factors import _marginal as marginal
from numpyro_pvi.factors._arguments import as_arrays
from numpyro_pvi.factors._planner import plan_factors

N, K, J, T = 7, 3, 4, 3
RNG = np.random.default_rng(5)
Y = RNG.normal(size=N) * 2
COUNTS = np.array([0, 0, 3, 1, 0, 2, 0])
TABLE = RNG.normal(size=(J, T))
JY = jnp.asarray(Y)
LABELS = ["b", "a", "a", "b", "a", "c", "b"]
SD = 0.7


def weights():
    return numpyro.sample("w", dist.Dirichlet(jnp.ones(K)))


def locations():
    with numpyro.plate("components", K):
        return numpyro.sample("mu", dist.Normal(0.0, 2.0))


def by_args(y):
    w, mu = weights(), locations()
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=y)


def by_index(y):
    # A batch axis that is no plate's, which NumPyro's own enumeration takes for one.
    w, mu = weights(), numpyro.sample("mu", dist.Normal(0.0, 2.0).expand([K]))
    with numpyro.plate("data", N) as i:
        z = numpyro.sample("z", dist.Categorical(w), infer={"enumerate": "parallel"})
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=y[i])


def by_subsample(y):
    w, mu = weights(), locations()
    with numpyro.plate("data", N, subsample_size=4):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=numpyro.subsample(y, event_dim=0))


def indexing_two_axes(y):
    w, mu = weights(), locations()
    with numpyro.plate("data", N) as i:
        z = numpyro.sample("z", dist.Categorical(w))
        # One index must still be an axis: a scalar could not be indexed again.
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=y[i][:, None][:, 0])


def closed_over():
    w, mu = weights(), locations()
    with numpyro.plate("data", N):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=JY)


def mixture_rows(values):
    """Every row's log sum over components, given constrained latents."""
    log_normal = -0.5 * ((Y[:, None] - values["mu"]) / SD) ** 2 - np.log(SD * np.sqrt(2 * np.pi))
    return logsumexp(np.log(values["w"]) + log_normal, axis=1)


def inflated(count):
    """Zero-inflated counts."""
    p = numpyro.sample("p", dist.Beta(2.0, 2.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", count.shape[0]):
        off = numpyro.sample("off", dist.Bernoulli(p))
        numpyro.sample("obs", dist.Poisson(jnp.where(off == 1, 1e-3, rate)), obs=count)


def inflated_rows(values):
    def poisson(rate):
        return COUNTS * np.log(rate) - rate - gammaln(COUNTS + 1)

    p = values["p"]
    return np.logaddexp(np.log(p) + poisson(1e-3), np.log(1 - p) + poisson(values["rate"]))


def two_latents(y, count):
    """Two discrete latents a row, the second given the first, and two observed sites of different kinds."""
    w, mu = weights(), locations()
    p = numpyro.sample("p", dist.Beta(2.0, 2.0).expand([K]).to_event(1))
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Categorical(w))
        b = numpyro.sample("b", dist.Bernoulli(p[z]))
        numpyro.sample("real", dist.Normal(mu[z] + b, SD), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(0.3 * b)), obs=count)


def two_latents_rows(values):
    terms = []
    for b in (0.0, 1.0):
        log_b = np.log(values["p"] if b else 1 - values["p"])
        normal = -0.5 * ((Y[:, None] - values["mu"] - b) / SD) ** 2 - np.log(SD * np.sqrt(2 * np.pi))
        poisson = COUNTS * 0.3 * b - np.exp(0.3 * b) - gammaln(COUNTS + 1)
        terms.append(np.log(values["w"]) + log_b + normal + poisson[:, None])
    return logsumexp(np.concatenate(terms, axis=1), axis=1)


def nested(table):
    """One discrete latent in every cell of a plate inside the partitioned one."""
    w, mu = weights(), locations()
    with numpyro.plate("rows", table.shape[0], dim=-2), numpyro.plate("columns", T, dim=-1):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=table)


def nested_rows(values):
    log_normal = -0.5 * ((TABLE[..., None] - values["mu"]) / SD) ** 2 - np.log(SD * np.sqrt(2 * np.pi))
    return logsumexp(np.log(values["w"]) + log_normal, axis=-1).sum(-1)


def shared_by_columns(table):
    """One discrete latent a row, several observations given it."""
    w, mu = weights(), locations()
    with numpyro.plate("rows", table.shape[0], dim=-2):
        z = numpyro.sample("z", dist.Categorical(w))
        with numpyro.plate("columns", T, dim=-1):
            numpyro.sample("obs", dist.Normal(mu[z], SD), obs=table)


def shared_rows(values):
    log_normal = -0.5 * ((TABLE[..., None] - values["mu"]) / SD) ** 2 - np.log(SD * np.sqrt(2 * np.pi))
    return logsumexp(np.log(values["w"]) + log_normal.sum(1), axis=-1)


def chains(table):
    """A hidden Markov chain in every row."""
    from numpyro.contrib.funsor import markov

    w, mu = weights(), locations()
    stay = numpyro.sample("stay", dist.Beta(2.0, 2.0))
    transition = stay * jnp.eye(K) + (1 - stay) / K
    with numpyro.plate("rows", table.shape[0]):
        state = None
        for t in markov(range(T)):
            probs = w if state is None else transition[state]
            state = numpyro.sample(f"state_{t}", dist.Categorical(probs))
            numpyro.sample(f"obs_{t}", dist.Normal(mu[state], SD), obs=table[:, t])


def chains_rows(values):
    transition = np.log(values["stay"] * np.eye(K) + (1 - values["stay"]) / K)
    log_normal = -0.5 * ((TABLE[..., None] - values["mu"]) / SD) ** 2 - np.log(SD * np.sqrt(2 * np.pi))
    forward = np.log(values["w"]) + log_normal[:, 0]
    for t in range(1, T):
        forward = logsumexp(forward[:, :, None] + transition, axis=1) + log_normal[:, t]
    return logsumexp(forward, axis=1)


CASES = {
    "args": (by_args, (Y,), "args", mixture_rows, "data"),
    "index": (by_index, (Y,), "index", mixture_rows, "data"),
    "subsample": (by_subsample, (Y,), "index", mixture_rows, "data"),
    "two axes": (indexing_two_axes, (Y,), "index", mixture_rows, "data"),
    "mask": (closed_over, (), "mask", mixture_rows, "data"),
    "zero inflation": (inflated, (COUNTS,), "args", inflated_rows, "data"),
    "two latents": (two_latents, (Y, COUNTS), "args", two_latents_rows, "data"),
    "nested plate": (nested, (TABLE,), "args", nested_rows, "rows"),
    "shared": (shared_by_columns, (TABLE,), "args", shared_rows, "rows"),
    "chains": (chains, (TABLE,), "args", chains_rows, "rows"),
}


def plan_of(model, plate, groups, args, **options):
    args, kwargs = as_arrays(args, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_factors(Partition(model, plate, groups, **options), args, kwargs, key=jax.random.key(0)), args


def point_of(plan):
    return jnp.asarray(0.4 * np.cos(1.0 + np.arange(plan.layout.dim)), jnp.result_type(float))


def by_group(planned, model, args, point):
    """Each group's log-likelihood through the mechanism that was chosen."""
    plan, packing = planned.plan, planned.packing
    call = ModelCall(plan.model(model), plan.layout, args, {}, planned.params)

    def one(chunk):
        masks = plan.reading.masks(packing, chunk)
        terms = row_log_likelihood(plan.reading.call(call, chunk), point, plan.rows)
        return sum(jnp.sum(jnp.where(masks[key], values, 0.0)) for key, values in terms.values())

    return jax.ops.segment_sum(jax.lax.map(one, packing.chunks), packing.chunk_group, plan.table.num_groups)


def constrained(model, args, plan, point):
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
    return {n: np.asarray(biject_to(trace[n]["fn"].support)(v)) for n, v in plan.layout.unflatten(point).items()}


def groupings(size):
    """Unequal groups with padding, one row each, and one group of all."""
    return {"unequal": LABELS[:size], "one row each": list(range(size)), "one": ["a"] * size}


@pytest.mark.parametrize(
    ("case", "groups"),
    [(case, "unequal") for case in CASES]
    + [(case, "one row each") for case in ("args", "index", "subsample", "two axes", "mask", "shared")]
    + [(case, "one") for case in ("index", "subsample", "nested plate")],
)
def test_the_sum_by_hand(case, groups, tolerance):
    model, args, mechanism, oracle, plate = CASES[case]
    size = J if plate == "rows" else N
    planned, arrays = plan_of(model, plate, groupings(size)[groups], args)
    plan = planned.plan
    assert plan.mechanism == mechanism
    point = point_of(plan)
    rows = oracle(constrained(model, arrays, plan, point))
    wanted = [rows[plan.table.index_of_row == m].sum() for m in range(plan.table.num_groups)]
    np.testing.assert_allclose(by_group(planned, model, arrays, point), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["index", "mask", "chains"])
def test_gradients_are_finite_and_right(case):
    model, args, _, _, plate = CASES[case]
    planned, arrays = plan_of(model, plate, groupings(J if plate == "rows" else N)["unequal"], args)
    point = point_of(planned.plan)

    def total(z):
        return jnp.sum(by_group(planned, model, arrays, z))

    gradient = jax.grad(total)(point)
    assert np.all(np.isfinite(gradient))
    if jax.config.jax_enable_x64:
        ahead = 1e-5 * jnp.eye(len(point))
        numeric = [(total(point + step) - total(point - step)) / 2e-5 for step in ahead]
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["args", "mask"])
def test_a_mode_that_was_asked_for(mode, tolerance):
    planned, arrays = plan_of(by_args, "data", LABELS, (Y,), mode=mode)
    assert planned.plan.mechanism == mode
    point = point_of(planned.plan)
    rows = mixture_rows(constrained(by_args, arrays, planned.plan, point))
    wanted = [rows[planned.plan.table.index_of_row == m].sum() for m in range(3)]
    np.testing.assert_allclose(by_group(planned, by_args, arrays, point), wanted, rtol=tolerance)


def test_the_plan_says_so():
    plan = plan_of(by_args, "data", LABELS, (Y,))[0].plan
    assert "z in plate 'data', summed out exactly row by row" in str(plan)
    assert plan.likelihood == "draws"
    assert hash(plan) == hash(plan_of(by_args, "data", LABELS, (Y,))[0].plan)


def test_never_taken_for_a_quadratic():
    """Well apart, every row knows its component wherever the rays look, and the sum looks Gaussian."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(jnp.array([-50.0, 50.0]), 1e-3).to_event(1))
        with numpyro.plate("data", y.shape[0]):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("obs", dist.Normal(mu[z], SD), obs=y)

    plan = plan_of(model, "data", LABELS, (np.where(np.arange(N) < 3, -50.0, 50.0),))[0].plan
    assert plan.likelihood == "draws"


def test_components_of_a_mixture_are_not_rows():
    """As many components as rows: its inner locations have the rows' shape, and are none of theirs."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 2.0).expand([K]).to_event(1))
        with numpyro.plate("data", y.shape[0]):
            weights = dist.Categorical(jnp.ones(K) / K)
            numpyro.sample("obs", dist.MixtureSameFamily(weights, dist.Normal(mu, SD)), obs=y)

    assert plan_of(model, "data", ["a", "b", "b"], (Y[:K],))[0].plan.likelihood == "draws"


def rolled(shift):
    """A mixture whose rows take their neighbours' components."""

    def model(y):
        mu = locations()
        with numpyro.plate("data", y.shape[0]):
            z = numpyro.sample("z", dist.Categorical(jnp.ones(K) / K))
            numpyro.sample("obs", dist.Normal(mu[jnp.roll(z, shift, axis=-1)], SD), obs=y)

    return model


class TestPlantedFaults:
    """What must not be done, and what sees it."""

    def test_rows_of_padding_masked_on_the_latent_cost_log_k(self):
        """The reason why only observed sites may be masked: here nothing is masked, and padding is left out by row."""
        w, mu = np.full(K, 1 / K), np.zeros(K)
        masked = handlers.mask(by_args, mask=False)
        latents = {"w": jnp.asarray(w), "mu": jnp.asarray(mu)}
        call = ModelCall(masked, None, (JY,), {}, {})
        enumeration = plan_of(by_args, "data", LABELS, (Y,))[0].plan.enumeration
        assert float(marginal.numpyro_log_density(call, enumeration, latents)) == pytest.approx(N * np.log(K))

    def test_mini_batch_scale_inside_the_sum(self, monkeypatch):
        monkeypatch.setattr(marginal.RowTerms, "_own_scale", lambda self, site: site["scale"])
        with pytest.raises(PartitionError, match=r"'z' has a scale|'obs' has a scale"):
            plan_of(by_index, "data", LABELS, (Y,), mode="index")

    def test_a_scale_that_slips_through_is_seen_by_the_check(self, monkeypatch):
        def scaled(self, site):
            log_prob = site["fn"].log_prob(site["value"]) * (1.0 if site["scale"] is None else site["scale"])
            return marginal.funsor.to_funsor(log_prob, output=marginal.funsor.Real, dim_to_name=site["axes"])

        monkeypatch.setattr(marginal.RowTerms, "_factor", scaled)
        with pytest.raises(PartitionError, match="not a sum over groups by 'index'"):
            plan_of(by_index, "data", LABELS, (Y,), mode="index")

    def test_a_wrong_sum_is_seen_by_numpyros_own(self, monkeypatch):
        right = marginal.RowTerms.row_log_likelihood
        monkeypatch.setattr(
            marginal.RowTerms, "row_log_likelihood", lambda self, plate, length: right(self, plate, length) + np.log(K)
        )
        with pytest.raises(PartitionError, match="differs from NumPyro's own enumeration"):
            plan_of(by_args, "data", LABELS, (Y,))

    def test_an_index_squeezed_to_a_scalar(self, monkeypatch):
        monkeypatch.setattr(marginal, "_Plate", marginal.enum_plate)
        with pytest.raises(PartitionError, match="cannot be evaluated on 1 indices"):
            plan_of(indexing_two_axes, "data", list(range(N)), (Y,), mode="index")


class TestRefused:
    """What cannot be summed out row by row, with the line to write instead."""

    def refused(self, match, model, args=(Y,), plate="data", labels=LABELS, **options):
        with pytest.raises(PartitionError, match=match):
            plan_of(model, plate, labels, args, **options)

    def test_global(self):
        def model(y):
            k = numpyro.sample("k", dist.Bernoulli(0.5))
            m = numpyro.sample("m", dist.Normal(0, 1))
            with numpyro.plate("data", y.shape[0]):
                numpyro.sample("obs", dist.Normal(m + k, 1.0), obs=y)

        self.refused(r"latent 'k' is discrete \(BernoulliProbs\) and outside the partitioned plate 'data'", model)

    def test_in_another_plate(self):
        def model(y):
            m = numpyro.sample("m", dist.Normal(0, 1))
            with numpyro.plate("other", K):
                numpyro.sample("k", dist.Bernoulli(0.5))
            with numpyro.plate("data", y.shape[0]):
                numpyro.sample("obs", dist.Normal(m, 1.0), obs=y)

        self.refused(r"'k' is discrete .*one value per row, `with numpyro.plate\('data', N\)", model)

    def test_labelled_axis(self):
        def model(y):
            m = numpyro.sample("m", dist.Normal(0, 1))
            k = numpyro.sample("k", dist.Bernoulli(0.5).expand([N]))
            numpyro.sample("obs", dist.Normal(m + k, 1.0), obs=y)

        self.refused("cannot say which of its values belong to which row", model, plate=None, sites={"obs": -1})

    def test_infinite_support(self):
        def model(y):
            rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
            with numpyro.plate("data", y.shape[0]):
                k = numpyro.sample("k", dist.Poisson(rate))
                numpyro.sample("obs", dist.Normal(k, 1.0), obs=y)

        self.refused(r"'k' is discrete \(Poisson\) and has infinitely many values", model)

    def test_support_that_does_not_start_at_zero(self):
        def model(y):
            m = numpyro.sample("m", dist.Normal(0, 1))
            with numpyro.plate("data", y.shape[0]):
                k = numpyro.sample("k", dist.DiscreteUniform(1, 3))
                numpyro.sample("obs", dist.Normal(m + k, 1.0), obs=y)

        self.refused("do not start at 0", model)

    def test_axis_of_no_plate(self):
        def model(table):
            w, mu = weights(), locations()
            with numpyro.plate("rows", J):
                z = numpyro.sample("z", dist.Categorical(w))
                numpyro.sample("obs", dist.Normal(mu[z], SD), obs=table.T)

        self.refused(r"its axis -2 \(size 3\) is no plate's", model, (TABLE,), "rows", LABELS[:J])

    def test_scan(self):
        from numpyro.contrib.control_flow import scan

        def model(table):
            w, mu = weights(), locations()

            def step(state, row):
                with numpyro.plate("rows", J):
                    state = numpyro.sample("state", dist.Categorical(w))
                    numpyro.sample("obs", dist.Normal(mu[state], SD), obs=row)
                return state, None

            scan(step, jnp.zeros(J, int), table.T)

        self.refused(
            r"states of a `scan` are not supported: .*markov\(range\(T\)\)", model, (TABLE,), "rows", LABELS[:J]
        )

    def test_continuous_latent_given_a_discrete_one(self):
        def model(y):
            mu = locations()
            with numpyro.plate("data", y.shape[0]):
                z = numpyro.sample("z", dist.Categorical(jnp.ones(K) / K))
                u = numpyro.sample("u", dist.Normal(mu[z], 1.0))
                numpyro.sample("obs", dist.Normal(u, SD), obs=y)

        self.refused(r"'u', a continuous latent, depends on the enumerated latent\(s\) z", model)

    @pytest.mark.parametrize("shift", [1, 3])
    def test_a_latent_of_another_row(self, shift):
        """Under enumeration its axis along the plate has length one: NumPyro's own sum does not see the roll either."""
        self.refused("row .* of plate 'data' changes by .* when the values of 'z' change on other rows", rolled(shift))

    def test_a_latent_of_another_row_slips_through_where_no_value_is_changed(self, monkeypatch):
        monkeypatch.setattr(enumerate_rows, "_coupled_rows", lambda *_: {})
        assert plan_of(rolled(1), "data", LABELS, (Y,))[0].plan.enumeration.latents == ("z",)

    def test_scale_of_the_user(self):
        self.refused("has a scale", handlers.scale(by_args, scale=0.5))

    def test_nothing_continuous(self):
        def model(y):
            with numpyro.plate("data", y.shape[0]):
                z = numpyro.sample("z", dist.Bernoulli(0.5))
                numpyro.sample("obs", dist.Normal(z, SD), obs=y)

        self.refused("no latent but the discrete 'z'", model)

    def test_without_funsor(self, monkeypatch):
        plain = builtins.__import__

        def without(name, *args, **kwargs):
            if name.split(".")[0] == "funsor":
                raise ModuleNotFoundError("No module named 'funsor'", name="funsor")
            return plain(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        monkeypatch.delitem(sys.modules, "funsor")
        with pytest.raises(PVIError, match=r"'z' are summed out by funsor.*numpyro_pvi\[enum\]"):
            plan_of(by_args, "data", LABELS, (Y,))


# ------------------------------------------------------------------------------------------------------------- fitting

SEPARATED = np.where(RNG.random(12) < 0.4, -2.0, 1.5) + 0.6 * RNG.normal(size=12)


def two_components(y):
    w = numpyro.sample("w", dist.Beta(2.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 2.0).to_event(1))
    with numpyro.plate("data", y.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(w))
        numpyro.deterministic("centre", mu[z])
        numpyro.sample("obs", dist.Normal(mu[z], SD), obs=y)


def summed_out_by_the_user(y):
    w = numpyro.sample("w", dist.Beta(2.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 2.0).to_event(1))
    with numpyro.plate("data", y.shape[0]):
        weight = dist.Categorical(jnp.stack([1 - w, w]))
        numpyro.sample("obs", dist.MixtureSameFamily(weight, dist.Normal(mu, SD)), obs=y)


def fit(model, guide=AutoMultivariateNormal, rounds=4, **options):
    pvi = PVI(Partition(model, "data", np.arange(12) % 3), guide(model), **options)
    return pvi, pvi.run(jax.random.key(0), rounds, SEPARATED, progress_bar=False)


@pytest.fixture(scope="module")
def fitted():
    return fit(two_components, loss=TraceEnum_ELBO())


def test_the_same_posterior_as_a_mixture_distribution(fitted, tolerance):
    _, result = fitted
    _, wanted = fit(summed_out_by_the_user)
    np.testing.assert_allclose(result.losses, wanted.losses, rtol=100 * tolerance)
    for name, value in wanted.params.items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e3 * tolerance, atol=1e3 * tolerance)


def test_the_guide_keeps_the_users_model(fitted):
    assert fitted[0].guide.model is two_components


def test_info_and_diagnostics(fitted):
    pvi, result = fitted
    assert set(result.info.structure[1:]) == {"enumerated"}
    assert np.isfinite(pvi.khat(result.state, SEPARATED, rng_key=jax.random.key(1), num_samples=100))
    data = pvi.to_arviz(jax.random.key(1), result, SEPARATED, num_samples=5)
    # One number per row, with its latent summed out: what leave-one-out needs.
    assert data["log_likelihood"]["obs"].shape == (1, 5, 12)


def test_assignments_after_the_fit(fitted):
    pytest.importorskip("funsor")
    pvi, result = fitted
    predictive = Predictive(two_components, guide=pvi.guide, params=result.params, num_samples=400, infer_discrete=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        share = np.asarray(predictive(jax.random.key(2), SEPARATED)["z"]).mean(0)
    draws = Predictive(pvi.guide, params=result.params, num_samples=400)(jax.random.key(3), SEPARATED)
    w, mu = np.asarray(draws["w"])[:, None], np.asarray(draws["mu"])
    one = np.log(w) - 0.5 * ((SEPARATED - mu[:, 1:]) / SD) ** 2
    zero = np.log(1 - w) - 0.5 * ((SEPARATED - mu[:, :1]) / SD) ** 2
    # Four standard errors of 400 draws at a half.
    np.testing.assert_allclose(share, (1 / (1 + np.exp(zero - one))).mean(0), atol=0.1)


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_other_guides(guide):
    _, result = fit(two_components, guide, rounds=2)
    assert np.all(np.isfinite(result.losses))


def test_without_a_partition():
    pvi = PVI(two_components, AutoMultivariateNormal(two_components), num_groups=2)
    state = pvi.init(jax.random.key(0), SEPARATED)
    assert state.plan.partition.enumeration.latents == ("z",)


def test_a_guide_of_svi_is_taken_as_it_is():
    """The way users of SVI hide discrete latents from an AutoGuide."""
    hidden = handlers.block(handlers.seed(two_components, 0), hide=["z", "centre"])
    pvi = PVI(Partition(two_components, "data", 2), AutoMultivariateNormal(hidden))
    assert pvi.init(jax.random.key(0), SEPARATED).plan.partition.layout.names == ("w", "mu")


def test_numpyro_is_left_as_it_was(fitted):
    """Plates are ordinary plates again, also for models and SVI afterwards."""
    assert isinstance(numpyro.plate("data", 2), numpyro.plate)
    svi = SVI(
        summed_out_by_the_user,
        AutoNormal(summed_out_by_the_user),
        numpyro.optim.Adam(0.01),
        Trace_ELBO(),
    )
    state = svi.init(jax.random.key(0), SEPARATED)
    assert np.isfinite(svi.update(state, SEPARATED)[1])
