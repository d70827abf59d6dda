"""ArviZ data: groups, axes, and numbers against NumPy."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

from numpyro_pvi import PVI, Partition, PVIError, StateError
from numpyro_pvi.export import to_arviz

ROWS = 40


def model(x, y):
    """A fitted noise level, a deterministic per row, an event axis with a name, and a latent with a Jacobian."""
    noise = numpyro.param("noise", 50.0, constraint=dist.constraints.positive)
    numpyro.sample("s", dist.HalfNormal(2.0))
    numpyro.sample("pair", dist.Normal(0, 1).expand([2]).to_event(1), infer={"event_dims": ["side"]})
    with numpyro.plate("coef", 3):
        w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ w)
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3))
    return jnp.asarray(x), jnp.asarray(x @ [1.0, -0.5, 0.2] + 0.3 * rng.normal(size=ROWS))


def fitted(guide, data, **values):
    """The guide's initial params, and given values of the model's numpyro.param sites."""
    with handlers.seed(rng_seed=0):
        params = {n: s["value"] for n, s in handlers.trace(guide).get_trace(*data).items() if s["type"] == "param"}
    return {**params, **{n: jnp.asarray(v) for n, v in values.items()}}


@pytest.fixture(scope="module")
def idata(data):
    guide = AutoMultivariateNormal(model)
    params = fitted(guide, data, noise=0.3)
    return to_arviz(jax.random.key(1), model, guide, params, data, {}, num_samples=200)


def array(idata, group, name):
    return np.asarray(idata[group][name])


class TestStructure:
    def test_groups_and_variables(self, idata):
        assert set(idata["posterior"].data_vars) == {"s", "pair", "w", "mean"}
        assert set(idata["log_likelihood"].data_vars) == {"y"}
        assert set(idata["observed_data"].data_vars) == {"y"}

    @pytest.mark.parametrize(
        ("group", "name", "dims", "shape"),
        [
            ("posterior", "s", ("chain", "draw"), (1, 200)),
            ("posterior", "w", ("chain", "draw", "coef"), (1, 200, 3)),
            ("posterior", "pair", ("chain", "draw", "side"), (1, 200, 2)),
            ("posterior", "mean", ("chain", "draw", "rows"), (1, 200, ROWS)),
            ("log_likelihood", "y", ("chain", "draw", "rows"), (1, 200, ROWS)),
            ("observed_data", "y", ("rows",), (ROWS,)),
        ],
    )
    def test_dims(self, idata, group, name, dims, shape):
        assert idata[group][name].dims == dims
        assert idata[group][name].shape == shape

    def test_is_what_this_arviz_reads(self, idata):
        import arviz as az

        assert type(idata).__name__ == ("InferenceData" if hasattr(az, "psislw") else "DataTree")
        assert idata["posterior"].attrs["inference_library"] == "numpyro"

    def test_two_plates_and_no_plate(self, rng_key):
        def crossed(y):
            outer = numpyro.plate("outer", 2, dim=-2)
            inner = numpyro.plate("inner", 3, dim=-1)
            numpyro.sample("free", dist.Normal(0, 1).expand([4]))
            with outer:
                numpyro.sample("a", dist.Normal(0, 1))
            with outer, inner:
                b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
                numpyro.deterministic("total", b.sum(-1))
                numpyro.deterministic("both", b)
                numpyro.deterministic("scalar", 1.0)
                numpyro.sample("y", dist.Normal(b, 1.0).to_event(1), obs=y)

        guide, y = AutoNormal(crossed), (jnp.zeros((2, 3, 2)),)
        idata = to_arviz(rng_key, crossed, guide, fitted(guide, y), y, {}, num_samples=5)
        posterior = idata["posterior"]
        dims = {name: posterior[name].dims[2:] for name in posterior.data_vars}
        assert dims == {
            "free": ("free_dim_0",),
            "a": ("outer", "a_dim_1"),
            "b": ("outer", "inner", "b_dim_2"),
            "total": ("outer", "inner"),
            "both": ("outer", "inner", "both_dim_2"),
            "scalar": (),
        }
        assert idata["log_likelihood"]["y"].dims == ("chain", "draw", "outer", "inner")
        assert idata["observed_data"]["y"].dims == ("outer", "inner", "y_dim_2")

    def test_names_that_axes_cannot_bear(self, rng_key):
        def awkward(y):
            numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1), infer={"event_dims": ["v"]})
            numpyro.sample("u", dist.Normal(0, 1).expand([3]).to_event(1), infer={"event_dims": ["k"]})
            numpyro.sample("t", dist.Normal(0, 1).expand([4]).to_event(1), infer={"event_dims": ["k"]})
            with numpyro.plate("draw", 2):
                numpyro.sample("y", dist.Normal(0, 1), obs=y)

        guide, y = AutoNormal(awkward), (jnp.zeros(2),)
        idata = to_arviz(rng_key, awkward, guide, fitted(guide, y), y, {}, num_samples=5)
        dims = {n: idata["posterior"][n].dims[2:] for n in idata["posterior"].data_vars}
        assert dims == {"v": ("v_dim_0",), "u": ("k",), "t": ("t_dim_0",)}
        assert idata["log_likelihood"]["y"].dims == ("chain", "draw", "y_dim_0")

    def test_factor_has_a_likelihood_and_no_data(self, rng_key):
        def with_factor(y):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.factor("penalty", -(z**2))
            with numpyro.plate("rows", 2):
                numpyro.sample("y", dist.Normal(z, 1), obs=y)

        guide, y = AutoNormal(with_factor), (jnp.zeros(2),)
        idata = to_arviz(rng_key, with_factor, guide, fitted(guide, y), y, {}, num_samples=5)
        np.testing.assert_allclose(array(idata, "log_likelihood", "penalty"), -(array(idata, "posterior", "z") ** 2))
        assert set(idata["observed_data"].data_vars) == {"y"}

    def test_sites_with_discrete_latents_summed_out_have_their_data(self, rng_key):
        def mixture(y, weight):
            m = numpyro.sample("m", dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1))
            with numpyro.plate("rows", y.shape[0]):
                z = numpyro.sample("z", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
                numpyro.sample("y", dist.Normal(m[z], 1.0), obs=y)
            numpyro.sample("weight", dist.Normal(m.sum(), 1.0), obs=weight)

        y = jnp.linspace(-2.0, 3.0, 6)
        pvi = PVI(Partition(mixture, "rows", 2), AutoMultivariateNormal(mixture))
        idata = pvi.to_arviz(rng_key, pvi.init(rng_key, y, 0.5), y, 0.5, num_samples=5)
        assert idata["observed_data"]["y"].dims == ("rows",)
        np.testing.assert_allclose(array(idata, "observed_data", "y"), y)
        np.testing.assert_allclose(idata["observed_data"]["weight"], 0.5)
        assert idata["log_likelihood"]["y"].dims == ("chain", "draw", "rows")


class TestNumbers:
    def test_log_likelihood_at_the_fitted_param(self, idata, data, tolerance):
        x, y = (np.asarray(v, np.float64) for v in data)
        mean = array(idata, "posterior", "w").astype(np.float64) @ x.T
        expected = -0.5 * ((y - mean) / 0.3) ** 2 - math.log(0.3) - 0.5 * math.log(2 * math.pi)
        np.testing.assert_allclose(
            array(idata, "log_likelihood", "y"), expected, rtol=100 * tolerance, atol=100 * tolerance
        )

    def test_observed_data(self, idata, data):
        np.testing.assert_array_equal(array(idata, "observed_data", "y"), data[1])

    def test_deterministics_belong_to_these_arguments(self, rng_key, data, tolerance):
        guide = AutoMultivariateNormal(model)
        params = fitted(guide, data, noise=0.3)
        other = (-2.0 * data[0], data[1] + 1.0)
        idata = to_arviz(rng_key, model, guide, params, other, {}, num_samples=20)
        expected = array(idata, "posterior", "w") @ np.asarray(other[0]).T
        np.testing.assert_allclose(
            array(idata, "posterior", "mean"), expected, rtol=100 * tolerance, atol=100 * tolerance
        )
        np.testing.assert_array_equal(array(idata, "observed_data", "y"), other[1])

    @pytest.mark.parametrize("guide_type", [AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal])
    def test_draws_are_those_of_the_guide(self, rng_key, data, guide_type):
        guide = guide_type(model)
        params = fitted(guide, data, noise=0.3)
        idata = to_arviz(rng_key, model, guide, params, data, {}, num_samples=4000)
        assert set(idata["posterior"].data_vars) == {"s", "pair", "w", "mean"}
        low, high = guide.quantiles(params, [0.25, 0.75])["s"]
        inside = np.mean((array(idata, "posterior", "s") > low) & (array(idata, "posterior", "s") < high))
        assert inside == pytest.approx(0.5, abs=0.04)
        median = np.median(array(idata, "posterior", "w"), axis=(0, 1))
        np.testing.assert_allclose(median, guide.median(params)["w"], atol=0.01)

    def test_masked_rows(self, rng_key):
        def masked(y, keep):
            z = numpyro.sample("z", dist.Normal(0, 1))
            with numpyro.plate("rows", 3), handlers.mask(mask=keep):
                numpyro.sample("y", dist.Normal(z, 1), obs=y)

        guide, args = AutoNormal(masked), (jnp.zeros(3), jnp.array([True, False, True]))
        idata = to_arviz(rng_key, masked, guide, fitted(guide, args), args, {}, num_samples=5)
        log_likelihood = array(idata, "log_likelihood", "y")
        assert np.all(log_likelihood[..., 1] == 0) and np.all(log_likelihood[..., [0, 2]] != 0)

    def test_static_and_keyword_arguments(self, rng_key):
        def poly(x, degree, y=None, shift="none"):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([degree]).to_event(1))
            offset = 0.0 if shift == "none" else 7.0
            with numpyro.plate("rows", x.shape[0]):
                numpyro.sample("y", dist.Normal(x[:, None] ** jnp.arange(degree) @ w + offset, 1.0), obs=y)

        x = jnp.linspace(0, 1, 6)
        args, kwargs = (x, 3), {"y": x, "shift": "up"}
        guide = AutoDiagonalNormal(poly)
        params = {"auto_loc": jnp.zeros(3), "auto_scale": jnp.full(3, 1e-3)}
        idata = to_arviz(rng_key, poly, guide, params, args, kwargs, num_samples=10)
        expected = -0.5 * (np.asarray(x) - 7.0) ** 2 - 0.5 * math.log(2 * math.pi)
        np.testing.assert_allclose(array(idata, "log_likelihood", "y").mean((0, 1)), expected, atol=0.05)


class TestArvizReadsIt:
    def test_summary_loo_and_forest(self, idata):
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("Agg")
        import arviz as az

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            summary = az.summary(idata, var_names=["w", "s"])
            assert list(summary.index) == ["w[0]", "w[1]", "w[2]", "s"]
            loo = az.loo(idata)
            az.plot_forest(idata, var_names=["w"], combined=True)
        elpd = getattr(loo, "elpd_loo", None) if hasattr(az, "psislw") else loo.elpd
        assert math.isfinite(elpd)


class TestRefusals:
    def test_missing_param(self, rng_key, data):
        guide = AutoNormal(model)
        params = fitted(guide, data)
        with pytest.raises(PVIError, match=r"lacks a value of the model's numpyro\.param 'noise'"):
            to_arviz(rng_key, model, guide, params, data, {}, num_samples=5)

    def test_guide_of_another_model(self, rng_key):
        def one():
            numpyro.sample("a", dist.Normal(0, 1))

        def two():
            one()
            numpyro.sample("b", dist.Normal(0, 1))

        guide = AutoNormal(one)
        with pytest.raises(PVIError, match="AutoNormal has no latent 'b'"):
            to_arviz(rng_key, two, guide, fitted(guide, ()), (), {}, num_samples=5)

    def test_no_draws(self, rng_key, data):
        with pytest.raises(PVIError, match="at least one draw"):
            to_arviz(rng_key, model, AutoNormal(model), {}, data, {}, num_samples=0)


class TestOfAFit:
    def test_state_and_result(self, rng_key, data):
        def regression(x, y):
            noise = numpyro.param("noise", 3.0, constraint=dist.constraints.positive)
            with numpyro.plate("coef", 3):
                w = numpyro.sample("w", dist.Normal(0, 1))
            with numpyro.plate("rows", x.shape[0]):
                numpyro.sample("y", dist.Normal(x @ w, noise), obs=y)

        pvi = PVI(regression, AutoMultivariateNormal(regression), numpyro.optim.Adam(0.05), num_groups=4)
        result = pvi.run(rng_key, 150, *data, progress_bar=False)
        idata = pvi.to_arviz(rng_key, result, *data, num_samples=300)
        w = array(idata, "posterior", "w")
        np.testing.assert_allclose(w.mean((0, 1)), pvi.guide.median(result.params)["w"], atol=0.05)
        noise = float(result.params["noise"])
        assert noise < 1.0
        x, y = (np.asarray(v) for v in data)
        expected = -0.5 * ((y - w @ x.T) / noise) ** 2 - math.log(noise) - 0.5 * math.log(2 * math.pi)
        np.testing.assert_allclose(array(idata, "log_likelihood", "y"), expected, rtol=1e-3, atol=1e-3)
        same = pvi.to_arviz(rng_key, result.state, *data, num_samples=300)
        np.testing.assert_array_equal(array(same, "posterior", "w"), w)


def test_rows_of_all_groups_are_shown_after_one_has_come():
    X, y = np.linspace(-1.0, 1.0, 12).reshape(6, 2), np.linspace(0.0, 1.0, 6)

    def line(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, 0.5), obs=y)

    pvi = PVI(line, AutoMultivariateNormal(line), num_groups=2)
    state = pvi.run(jax.random.key(0), 2, X[:4], y[:4], progress_bar=False).state
    state = pvi.add_group(state, "new", X[4:], y[4:], num_steps=2)
    for rows in (slice(None), slice(4, None), slice(0, 3)):
        data = pvi.to_arviz(jax.random.key(1), state, X[rows], y[rows], num_samples=5)
        assert data["log_likelihood"]["obs"].shape == (1, 5, len(y[rows]))
    with pytest.raises(StateError):
        pvi.to_arviz(jax.random.key(1), state, X[:, :1], y, num_samples=5)
