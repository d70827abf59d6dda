"""The examples of variational message passing, at small sizes: what they find is what was drawn, or the exact posterior."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TIGHT = {"float32": 1e-4, "float64": 1e-9}[jnp.result_type(float).name]


@pytest.fixture(scope="module")
def load():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module


def test_unknown_models_are_refused(load, capsys):
    with pytest.raises(SystemExit, match="2"):
        load("conjugate_models").main(["dice"])
    assert "no model 'dice'; there are regression, tests, counties, faces" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tests", "faces"])
def test_conjugate_posteriors_are_exact(load, name):
    module = load("conjugate_models")
    data = module.generate(name, np.random.default_rng(0), 40)
    found, result = module.fit(name, data)
    assert set(result.info.expectation) == {"closed form"}
    for latent, wanted in module.exact_mean(name, data).items():
        np.testing.assert_allclose(found[latent].mean, wanted, rtol=TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regression", "counties"])
def test_coupled_models_converge_to_what_was_drawn(load, name, capsys):
    module = load("conjugate_models")
    data = module.generate(name, np.random.default_rng(0), 120)
    found, result = module.fit(name, data)
    assert result.converged
    assert set(result.info.expectation) == {"closed form"}
    if name == "regression":
        np.testing.assert_allclose(found["w"].mean, [1.0, -2.0, 0.5], atol=0.25)
        np.testing.assert_allclose(found["tau"].mean, 1 / 0.7**2, rtol=0.3)
    else:
        np.testing.assert_allclose(found["rate"].mean, 0.5 + np.arange(6), rtol=0.5)
    assert module.main([name, "--rows", "120"]) == 0
    assert "closed form" in capsys.readouterr().out


@pytest.mark.slow
def test_the_mixture_is_found_again(load, capsys):
    assert load("mixture").main(["--rows", "120"]) == 0
    out = capsys.readouterr().out
    assert "conjugate in mean, precision, weights, z" in out
    assert int(out.rsplit(": ", 1)[1].strip("%\n")) >= 95


@pytest.mark.slow
def test_topics_are_found_again(load, capsys):
    assert load("topics").main(["--documents", "30", "--words", "20"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("topic ")]
    assert len({line.split("drawn: ")[1] for line in lines}) == 3
    assert all("(5 of 5" in line or "(4 of 5" in line for line in lines)


@pytest.mark.slow
def test_principal_components_span_the_plane_drawn_from(load):
    module = load("components")
    x, loading = module.generate(np.random.default_rng(0), 60)
    found, result = module.fit(x, 0)
    assert set(result.info.expectation) == {"closed form"}
    # Rows' noise over their number: a few degrees.
    assert module.angle(np.asarray(found["loading"].mean), loading) < 10
    np.testing.assert_allclose(found["tau"].mean, 1 / 0.3**2, rtol=0.3)


@pytest.mark.slow
def test_gamma_factors_give_the_rows_covariance(load):
    module = load("gamma_factors")
    y, _ = module.generate(np.random.default_rng(0), 200)
    found, _ = module.fit(y, 0)
    seen = y.T @ y / len(y)
    assert np.max(np.abs(module.covariance_of(found) - seen)) < 0.15 * np.max(seen)


@pytest.mark.slow
def test_poisson_factors_find_the_rates(load, capsys):
    assert load("poisson_factors").main(["--rows", "40"]) == 0
    out = capsys.readouterr().out
    assert "not conjugate in pattern, weight" in out
    found, counts = (float(line.rsplit(": ", 1)[1].strip(";")) for line in out.splitlines()[-2:])
    assert found > counts
