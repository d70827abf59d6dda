"""k-hat: which weights it gets, and what it says of a q that is exact, too narrow, or too wide."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PRIOR, PVI, Partition, PVIError, diagnostics
from numpyro_pvi._state_marginals import by_unit
from numpyro_pvi.diagnostics import USABLE, _site_weights, log_importance_weights, map_draws, pareto_khat, settled
from numpyro_pvi.factors import Layout, split_arguments
from numpyro_pvi.families import MultivariateNormalFamily, NormalFamily
from numpyro_pvi.handlers import FullPlates
from numpyro_pvi.sites import posterior

NOISE = 0.7
PRIOR_SD = 2.0


def regression(x, y):
    with numpyro.plate("coef", 2):
        w = numpyro.sample("w", dist.Normal(0, PRIOR_SD))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


@pytest.fixture
def data(rng):
    x = rng.normal(size=(30, 2))
    return jnp.asarray(x), jnp.asarray(x @ [1.0, -0.5] + NOISE * rng.normal(size=30))


def exact_posterior(x, y):
    """Location and covariance of the conjugate posterior, in NumPy."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    covariance = np.linalg.inv(np.eye(2) / PRIOR_SD**2 + x.T @ x / NOISE**2)
    return covariance @ x.T @ y / NOISE**2, covariance


def weights(rng_key, data, loc, covariance, family=MultivariateNormalFamily, num_samples=1000):
    family = family(2)
    natural = family.from_loc_covariance(jnp.asarray(loc), jnp.asarray(covariance))
    layout = Layout(("w",), ((2,),))
    return log_importance_weights(rng_key, regression, layout, family, natural, data, {}, {}, num_samples=num_samples)


class TestLogImportanceWeights:
    def test_constant_at_the_exact_posterior(self, rng_key, data, x64):
        log_weights = weights(rng_key, data, *exact_posterior(*data))
        np.testing.assert_allclose(log_weights, 0.0, atol=1e-9 if x64 else 1e-3)

    @pytest.mark.parametrize("family", [MultivariateNormalFamily, NormalFamily])
    def test_against_numpy(self, rng_key, data, family, x64):
        loc, covariance = exact_posterior(*data)
        loc, covariance = loc + 0.1, np.diag(np.diag(covariance)) * 0.5
        got = np.sort(weights(rng_key, data, loc, covariance, family, num_samples=50))
        # The same draws: both families have a diagonal root here.
        noise = np.asarray(jax.random.normal(rng_key, (50, 2), got.dtype), np.float64)
        draws = np.concatenate([loc[None], loc + noise * np.sqrt(np.diag(covariance))])
        x, y = (np.asarray(v, np.float64) for v in data)
        joint = -0.5 * ((y - draws @ x.T) ** 2).sum(1) / NOISE**2 - 0.5 * (draws**2).sum(1) / PRIOR_SD**2
        log_q = -0.5 * ((draws - loc) ** 2 / np.diag(covariance)).sum(1)
        expected = joint - log_q
        np.testing.assert_allclose(got, np.sort(expected[1:] - expected[0]), atol=1e-9 if x64 else 1e-3)

    def test_jacobian_and_scale(self, rng_key, x64):
        def model():
            with numpyro.handlers.scale(scale=3.0):
                numpyro.sample("s", dist.Exponential(2.0))

        family = NormalFamily(1)
        natural = family.from_loc_sd(jnp.array([0.3]), jnp.array([0.8]))
        got = log_importance_weights(rng_key, model, Layout(("s",), ((),)), family, natural, (), {}, {}, num_samples=40)
        noise = np.asarray(jax.random.normal(rng_key, (40, 1), got.dtype), np.float64)[:, 0]
        z = np.concatenate([[0.3], 0.3 + 0.8 * noise])
        # NumPyro scales a site's log density together with its Jacobian.
        joint = 3.0 * (math.log(2.0) - 2.0 * np.exp(z) + z)
        expected = joint[1:] - joint[0] + 0.5 * noise**2
        np.testing.assert_allclose(got, expected, rtol=1e-9 if x64 else 1e-4, atol=1e-9 if x64 else 1e-4)

    def test_uses_the_params(self, rng_key):
        def model():
            numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0), 1.0))

        family = NormalFamily(1)
        natural = family.from_loc_sd(jnp.array([5.0]), jnp.array([1.0]))
        got = log_importance_weights(
            rng_key, model, Layout(("z",), ((),)), family, natural, (), {}, {"m": jnp.array(5.0)}, num_samples=30
        )
        np.testing.assert_allclose(got, 0.0, atol=1e-4)

    def test_batches_do_not_change_the_result(self, rng_key, data, monkeypatch, tolerance):
        at_once = weights(rng_key, data, [0.0, 0.0], np.eye(2), num_samples=37)
        monkeypatch.setattr("numpyro_pvi.diagnostics.BATCH_ELEMENTS", 70)
        in_batches = weights(rng_key, data, [0.0, 0.0], np.eye(2), num_samples=37)
        np.testing.assert_allclose(at_once, in_batches, rtol=tolerance, atol=10 * tolerance)

    def test_batch_is_bounded(self, monkeypatch):
        monkeypatch.setattr("numpyro_pvi.diagnostics.BATCH_ELEMENTS", 100)
        jaxpr = str(jax.make_jaxpr(lambda d: map_draws(lambda z: jnp.outer(z, z), d, 50))(jnp.ones((50, 5))))
        assert "[4,5,5] = mul" in jaxpr and "[50,5,5] = mul" not in jaxpr


class TestParetoKhat:
    @pytest.mark.parametrize("shape", [0.2, 0.6, 1.0])
    def test_recovers_the_shape(self, rng, shape):
        # w = u^-k has a generalised Pareto tail of shape k.
        log_weights = -shape * np.log(rng.uniform(size=20_000))
        assert pareto_khat(log_weights, 1e-8) == pytest.approx(shape, abs=0.16)

    def test_heavy_tail_of_small_weights_does_not_count(self, rng):
        assert pareto_khat(1.0 * np.log(rng.uniform(size=5000)), 1e-8) < 0

    @pytest.mark.parametrize("constant", [0.0, -1e4])
    def test_equal_weights(self, constant, rng):
        assert pareto_khat(np.full(100, constant), 1e-8) == 0.0
        assert pareto_khat(constant + 1e-10 * rng.normal(size=100), 1e-8) == 0.0

    def test_zero_weights(self):
        values = np.zeros(100)
        values[:30] = -np.inf
        assert pareto_khat(values, 1e-8) == 0.0

    def test_one_draw_carries_all(self, rng):
        values = rng.normal(size=100)
        values[7] += 2000
        assert pareto_khat(values, 1e-8) == math.inf

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_undefined_weight(self, rng, bad):
        values = rng.normal(size=100)
        values[3] = bad
        assert math.isnan(pareto_khat(values, 1e-8))

    def test_all_zero(self):
        assert math.isnan(pareto_khat(np.full(100, -np.inf), 1e-8))

    @pytest.mark.parametrize("num_samples", [100, 225, 226])
    def test_small_samples(self, rng, num_samples):
        assert math.isfinite(pareto_khat(rng.normal(size=num_samples), 1e-8))


class TestKhatOfQ:
    def test_exact(self, rng_key, data, x64):
        log_weights = np.asarray(weights(rng_key, data, *exact_posterior(*data)))
        # In float32 the location itself is rounded, and the weights with it.
        assert pareto_khat(log_weights, 1e-8 if x64 else 5e-3) == 0.0

    @pytest.mark.parametrize("narrower", [2, 4])
    def test_too_narrow(self, rng_key, data, narrower):
        loc, covariance = exact_posterior(*data)
        log_weights = weights(rng_key, data, loc, covariance / narrower**2, num_samples=20_000)
        got = pareto_khat(np.asarray(log_weights), 1e-6)
        # In two dimensions the log weights are exponential with mean 1 - 1/c^2, so the weights are exactly Pareto.
        assert got == pytest.approx(1 - 1 / narrower**2, abs=0.2)
        assert narrower == 2 or got > 0.7

    def test_twice_the_sd(self, rng_key, data):
        loc, covariance = exact_posterior(*data)
        assert pareto_khat(np.asarray(weights(rng_key, data, loc, covariance * 4, num_samples=4000)), 1e-6) < 0.5


class TestOfAFit:
    def test_exact_model(self, rng_key, data):
        pvi = PVI(regression, AutoMultivariateNormal(regression), num_groups=3)
        result = pvi.run(rng_key, 20, *data, progress_bar=False)
        assert pvi.khat(result.state, *data, rng_key=rng_key, num_samples=200) < 0.3
        with pytest.raises(PVIError, match="at least 100 draws"):
            pvi.khat(result.state, *data, rng_key=rng_key, num_samples=99)


def with_effects(x, y):
    """Effects of single rows are exact under a Gaussian guide, and of the prior factor's spread none are."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
        numpyro.sample("y", dist.Normal(x[:, 0] + effect, NOISE), obs=y)


def of_two_layers(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(w, 0.5))
        numpyro.sample("y", dist.Normal(x[:, 0] + effect, NOISE), obs=y)


class TestByGroupWithRowsOwnLatents:
    """A group's weight is the joint density of its rows and their latents, over what q says of these and over its site."""

    LABELS = np.repeat(["b", "a", "c"], [14, 9, 7])

    def weights(self, model, data, rng_key):
        pvi = PVI(Partition(model, "rows", self.LABELS), AutoMultivariateNormal(model))
        state = pvi.run(rng_key, 30, *data, progress_bar=False).state
        plan, part = state.plan, state.plan.partition
        q, local, split = posterior(state.prior, state.sites), by_unit(state), FullPlates(part.model(model))
        whole = log_importance_weights(
            rng_key, split, part.layout, plan.family, q, data, {}, {}, num_samples=50, local=(part.local, local)
        )
        arrays, static = split_arguments(data, {})
        fixed = split, part, plan.family, static, 50, rng_key, q
        found = _site_weights(*fixed, state.sites.groups, state.packing, {}, arrays, local)
        if part.has_prior_factor:
            prior = _site_weights(*fixed, state.sites.prior, None, {}, arrays, None)
            found = jnp.concatenate([prior[:, None], found], axis=1)
        return pvi, state, np.asarray(whole), np.asarray(found)

    @pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
    def test_weights_of_factors_add_up_to_those_of_q(self, data, rng_key, x64, fault, monkeypatch):
        """The fault: what q says of the rows' latents is left out."""
        if fault:
            monkeypatch.setattr(diagnostics, "sum_of_units", lambda part, packing, x: jnp.zeros((3,), x.dtype))
            jax.clear_caches()
        pvi, state, whole, found = self.weights(with_effects, data, rng_key)
        assert found.shape == (50, 4)
        gap = found.sum(axis=1) - whole
        gap = np.abs(gap - gap[0]).max()
        assert gap < (1e-9 if x64 else 1e-3) * max(1.0, np.abs(whole).max()) or (fault and gap > 1.0)
        assert fault == (gap > 1.0)
        if fault:
            jax.clear_caches()
            return
        khats = pvi.khat(state, *data, rng_key=rng_key, num_samples=200, by_group=True)
        assert list(khats) == [PRIOR, "a", "b", "c"] and np.isfinite(list(khats.values())).all()

    def test_exact_sites_have_equal_weights(self, data, rng_key, x64):
        pvi, state, _, found = self.weights(of_two_layers, data, rng_key)
        assert found.shape == (50, 3) and np.abs(found).max() < (1e-8 if x64 else 5e-3)
        khats = pvi.khat(state, *data, rng_key=rng_key, num_samples=200, by_group=True)
        assert not x64 or khats == {"a": 0.0, "b": 0.0, "c": 0.0}


class TestFewDraws:
    """The logarithm of a rate whose posterior is Gamma(50, 20): skewed, and by its best Gaussian nearly right."""

    @staticmethod
    def weights_of(seed, scale=1.0):
        # The best Gaussian: e^(loc + sd^2 / 2) = 50 / 20 and sd^2 = 1 / 50.
        sd = 50**-0.5
        loc = math.log(50 / 20) - sd**2 / 2

        def of(count):
            noise = np.random.default_rng(seed).normal(size=count)
            u = loc + scale * sd * noise
            return 50 * u - 20 * np.exp(u) + 0.5 * noise**2

        return of

    @pytest.mark.parametrize("seed", range(5))
    def test_a_tenth_of_a_thousand_is_no_tail(self, seed):
        weights_of = self.weights_of(seed)
        assert pareto_khat(weights_of(1000), 1e-8) > USABLE
        assert settled(weights_of, 1000, np.zeros(20)) < USABLE
        # Of much data no more draws are taken.
        assert settled(weights_of, 1000, np.zeros(100_000)) > USABLE

    def test_what_is_too_narrow_stays_so(self):
        assert settled(self.weights_of(0, 0.5), 1000, np.zeros(20)) > USABLE
