"""The examples of non-conjugate factors, at small sizes: against exact posteriors on grids and dense optima in NumPy."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_pvi import Partition

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Fits stop where q moves by less than 1e-4 sds.
TIGHT = {"float32": 2e-3, "float64": 1e-4}[jnp.result_type(float).name]
NODES, SHARES = np.polynomial.hermite_e.hermegauss(60)
SHARES = SHARES / SHARES.sum()


@pytest.fixture(scope="module")
def load():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module


def best_gaussian(covariance, y, kind):
    """Marginal means and sds of the best Gaussian for one predictor a latent: steps towards the stationary naturals.

    At the optimum the precision is the prior's plus ``diag(-E f'')``, and the mean the covariance times ``E f' + (-E f'') m``.
    """
    size = len(y)
    curvature, linear, step, best = np.zeros(size), np.zeros(size), 1.0, -np.inf
    wanted = None
    prior = np.linalg.inv(covariance)
    for _ in range(500):
        new = (curvature, linear) if wanted is None else (curvature + step * wanted[0], linear + step * wanted[1])
        V = np.linalg.inv(prior + np.diag(new[0]))
        m = V @ new[1]
        u = m[:, None] + np.sqrt(np.diag(V))[:, None] * NODES
        if kind == "counts":
            value, slope, bend = y[:, None] * u - np.exp(u), y[:, None] - np.exp(u), -np.exp(u)
        else:
            p = special.expit(u)
            value, slope, bend = y[:, None] * u - np.logaddexp(0, u), y[:, None] - p, -p * (1 - p)
        value, slope, bend = (x @ SHARES for x in (value, slope, bend))
        kl = np.trace(prior @ V) - size + m @ prior @ m - np.linalg.slogdet(prior @ V)[1]
        elbo = value.sum() - kl / 2
        if elbo < best - 1e-9:
            step /= 2
            continue
        curvature, linear = new
        wanted, best = (-bend - curvature, slope - bend * m - linear), elbo
        if max(np.abs(wanted[0]).max(), np.abs(wanted[1]).max()) < 1e-11:
            break
    return m, np.sqrt(np.diag(V)), best


GLMS = [
    "logistic",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("probit", "poisson", "negative_binomial")),
]


@pytest.mark.parametrize("name", GLMS)
def test_regressions_are_close_to_the_exact_posterior(load, name):
    """A Gaussian cannot be exact; of 60 rows its means are off by less than .1 sds. As users run it, in float32."""
    module = load("glms")
    data = module.generate(name, np.random.default_rng(0), 60)
    # To float64's error, quadrature over a predictor and a concentration takes minutes.
    with jax.enable_x64(False):
        mean, covariance, result = module.fit(name, data)
    assert result.converged
    exact, sd = module.exact_moments(name, data, mean, covariance)
    assert np.all(np.abs(mean - exact) < 0.1 * sd)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), sd, rtol=0.1)


def test_a_prior_over_the_rows_inputs_is_read_by_indices(load):
    """With a group's inputs alone the process would be another one: its values are looked up, and its prior is whole."""
    module = load("gp_classification")
    data = module.generate(np.random.default_rng(0), 6)
    plan = Partition(module.model, "rows", 2).plan(*map(jnp.asarray, data))
    assert plan.mechanism == "index"


@pytest.mark.slow
def test_a_process_is_classified_by_the_best_gaussian(load, capsys):
    module = load("gp_classification")
    x, y = module.generate(np.random.default_rng(0), 24)
    mean, covariance, result = module.fit((x, y))
    assert result.converged
    K = np.asarray(module.kernel(x, x), float) + module.JITTER * np.eye(24)
    m, sd, elbo = best_gaussian(K, y, "labels")
    np.testing.assert_allclose(mean, m, atol=20 * TIGHT)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), sd, rtol=20 * TIGHT)
    np.testing.assert_allclose(-float(result.losses[-1]), elbo, rtol=TIGHT)
    # A new input at an old one has the old one's law, but for the jitter.
    found = module.predict(x, mean, covariance, x[:3])
    wanted = special.expit(mean[:3, None] + np.sqrt(np.diag(covariance)[:3])[:, None] * NODES) @ SHARES
    np.testing.assert_allclose(found, wanted, atol=5e-3)
    assert module.main(["--rows", "24"]) == 0
    assert "quadrature" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counts", "events"])
def test_states_over_time_are_the_best_gaussian(load, name, capsys):
    module = load("state_space")
    _, y = module.generate(name, np.random.default_rng(0), 24)
    mean, sd, result = module.fit(name, y)
    assert result.converged
    assert result.info.expectation == ("quadrature in x",)
    walk = module.SCALE * np.tril(np.ones((24, 24)))
    m, wanted, elbo = best_gaussian(walk @ walk.T, y, name)
    np.testing.assert_allclose(mean, m, atol=TIGHT)
    np.testing.assert_allclose(sd, wanted, rtol=TIGHT)
    if name == "counts":
        elbo = elbo - special.gammaln(y + 1).sum()
    np.testing.assert_allclose(-float(result.losses[-1]), elbo, rtol=TIGHT)
    assert module.main([name, "--steps", "24"]) == 0
    assert "states within two sds" in capsys.readouterr().out


@pytest.mark.slow
def test_the_shape_of_a_gamma_is_the_best_gammas(load):
    """Over 20 seeds the mean is off the best Gamma's by at most .02 sds and the ELBO by at most 1e-3 nats; five times that."""
    module = load("gamma_shape")
    y = np.random.default_rng(0).gamma(module.SHAPE, 1.0, 20)
    (a, b), result = module.fit(y)
    assert result.info.structure == ("not conjugate in shape",) * 2
    c, d = module.best(y)
    assert abs(a / b - c / d) < 0.1 * np.sqrt(c) / d
    np.testing.assert_allclose(np.sqrt(a) / b, np.sqrt(c) / d, rtol=0.1)
    assert 0 <= module.elbo(y, c, d) - module.elbo(y, a, b) + 1e-6 < 0.005
    assert module.exact(y)[2] > module.elbo(y, c, d)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schools", "baseball"])
def test_hierarchies_are_close_to_the_exact_posterior(load, name):
    """Effects and rates; what q leaves out is how they hang together with what they share, whose sds come out too small."""
    module = load("hierarchies")
    found, result = module.fit(name)
    own, shared = ("deviation", ("mu", "tau")) if name == "schools" else ("rate", ("centre", "worth"))
    assert own in result.info.structure[-1].split(";")[0]
    exact = module.exact(name)
    mean, sd = exact[own]
    assert np.max(np.abs(np.asarray(found[own].mean) - mean) / sd) < 0.1
    np.testing.assert_allclose(np.sqrt(np.asarray(found[own].variance)), sd, rtol=0.15)
    for latent in shared:
        mean, sd = exact[latent]
        assert abs(float(found[latent].mean) - mean) < 0.4 * sd
        assert 0.4 < float(np.sqrt(found[latent].variance)) / sd < 1.05


def test_unknown_names_are_refused(load, capsys):
    for script, names in (
        ("glms", "logistic, probit, poisson, negative_binomial"),
        ("state_space", "counts, events"),
        ("hierarchies", "schools, baseball"),
    ):
        with pytest.raises(SystemExit, match="2"):
            load(script).main(["dice"])
        assert f"no model 'dice'; there are {names}" in capsys.readouterr().err
