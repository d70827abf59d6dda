"""Pictures of groups: what they draw against closed forms, then what they refuse."""

import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot as plt
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import stats

from numpyro_pvi import PRIOR, PVI, AutoExponentialFamily, Partition, PartitionError, PVIError
from numpyro_pvi.export import plot_forest, plot_influence, plot_khat
from numpyro_pvi.solvers import NaturalGradient

matplotlib.use("Agg")
NOISE, PRIOR_SD, KEY = 0.7, 2.0, jax.random.key(0)
LABELS = np.array(["a", "b", "c"] * 4)
Z90 = stats.norm.ppf(0.95)


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


def counts(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, 2))
    return jnp.asarray(x), jnp.asarray(x @ [1.0, -0.5] + NOISE * rng.normal(size=12))


@pytest.fixture(scope="module")
def fitted(data):
    pvi = PVI(Partition(regression, "rows", LABELS), AutoMultivariateNormal(regression))
    return pvi, pvi.run(KEY, 3, *data, progress_bar=False).state


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def exact(data, rows):
    """Mean and sds of the conjugate posterior given some rows."""
    x, y = (np.asarray(v, np.float64)[rows] for v in data)
    covariance = np.linalg.inv(np.eye(2) / PRIOR_SD**2 + x.T @ x / NOISE**2)
    return covariance @ x.T @ y / NOISE**2, np.sqrt(np.diag(covariance))


def intervals(ax):
    """By legend entry: medians and both ends, one per element, and their heights."""
    found = {}
    for drawn in ax.containers:
        ends = np.stack([s[:, 0] for s in drawn.lines[2][0].get_segments()])
        found[drawn.get_label()] = drawn.lines[0].get_xdata(), ends, drawn.lines[0].get_ydata()
    return found


def test_forest_is_the_closed_forms(fitted, data, tolerance):
    found = intervals(plot_forest(*fitted))
    chosen = {"q": slice(None)}
    for label in "abc":
        chosen |= {f"without {label}": label != LABELS, f"{label} alone": label == LABELS}
    assert found.keys() == chosen.keys()
    for name, rows in chosen.items():
        mean, sd = exact(data, rows)
        medians, ends, _ = found[name]
        np.testing.assert_allclose(medians, mean, atol=1e3 * tolerance, err_msg=name)
        wanted = np.stack([mean - Z90 * sd, mean + Z90 * sd], 1)
        np.testing.assert_allclose(np.sort(ends.reshape(2, -1), 1)[:, [0, -1]], wanted, atol=1e3 * tolerance)


def test_forest_of_some(fitted):
    ax = plot_forest(
        *fitted, {"w": [1]}, ["c"], parts=("cavity",), names={"w": ["slope", "bend"]}, ax=plt.subplots()[1]
    )
    assert [t.get_text() for t in ax.get_yticklabels()] == ["bend"]
    found = intervals(ax)
    assert list(found) == ["q", "without c"] and [t.get_text() for t in ax.get_legend().texts] == list(found)
    # Nothing lies on anything else, and all within the element's own band.
    heights = np.concatenate([y for _, _, y in found.values()])
    assert len(set(heights)) == 2 and np.all(np.abs(heights) < 0.5)


COUNTS, HALVES = jnp.array([3, 0, 2, 5, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
EVENTS = jnp.array([2, 5, 3])


@pytest.fixture(scope="module")
def rates():
    pvi = PVI(Partition(counts, "rows", HALVES), AutoExponentialFamily(counts))
    return pvi, pvi.run(KEY, 2, COUNTS, progress_bar=False).state


def test_forest_in_the_latents_own_support(rates):
    (pvi, state), y, labels = rates, COUNTS, HALVES
    found = intervals(plot_forest(pvi, state, "rate", prob=0.5))
    for name, rows in (("q", labels >= 0), ("without 0", labels == 1), ("1 alone", labels == 1)):
        law = stats.gamma(2.0 + float(y[rows].sum()), scale=1 / (1.0 + rows.sum()))
        medians, ends, _ = found[name]
        np.testing.assert_allclose(np.sort([*medians, *ends.ravel()])[[0, 1, 2]], law.ppf([0.25, 0.5, 0.75]), rtol=1e-5)


@pytest.fixture(scope="module")
def skewed():
    """A fit of one group whose factor is not quadratic, of a positive latent."""

    def tail(y):
        s = numpyro.sample("s", dist.LogNormal(0.0, 2.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Poisson(s), obs=y)

    pvi = PVI(Partition(tail, "rows", ["one"] * 3), AutoMultivariateNormal(tail))
    return pvi, pvi.run(KEY, 5, EVENTS, progress_bar=False)


def test_forest_through_a_transform(skewed):
    pvi, result = skewed
    medians, ends, _ = intervals(plot_forest(pvi, result.state, parts=("alone",)))["q"]
    loc, sd = float(result.params["auto_loc"][0]), float(result.params["auto_scale_tril"][0, 0])
    wanted = np.exp([loc - Z90 * sd, loc, loc + Z90 * sd])
    np.testing.assert_allclose(np.sort([*medians, *ends.ravel()]), wanted, rtol=1e-4)


def test_influence_is_the_shift_in_posterior_sds(fitted, data, tolerance):
    ax = plot_influence(*fitted)
    mean, sd = exact(data, slice(None))
    wanted = np.stack([(mean - exact(data, label != LABELS)[0]) / sd for label in "abc"])
    np.testing.assert_allclose(ax.images[0].get_array(), wanted, atol=1e4 * tolerance)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b", "c"]
    assert [t.get_text() for t in ax.texts] == [f"{x:.2f}" for x in wanted.ravel()]


@pytest.mark.parametrize("held", ["absent", "rows"])
def test_sites_however_they_are_held(fitted, data, held):
    pvi, state = fitted
    wanted = np.asarray(plot_influence(pvi, state).images[0].get_array())
    if held == "absent":
        back = LABELS == "b"
        state = pvi.revisit(state, "b", data[0][back], data[1][back], num_steps=0)
        assert set(state.present) == {"b"}
    else:
        solver = NaturalGradient(sites="rows")
        pvi = PVI(Partition(regression, "rows", LABELS), AutoMultivariateNormal(regression), solver=solver)
        state = pvi.run(KEY, 3, *data, progress_bar=False).state
        assert state.plan.rows is not None
    got = plot_influence(pvi, state, groups="abc").images[0].get_array()
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_cavity_that_is_improper_is_left_out(data):
    def flat(x, y):
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    pvi = PVI(Partition(flat, "rows", ["all"] * 12), AutoMultivariateNormal(flat))
    state = pvi.run(KEY, 2, *data, progress_bar=False).state
    assert list(intervals(plot_forest(pvi, state))) == ["q", "all alone"]
    assert plot_influence(pvi, state).get_yticklabels()[0].get_text() == "all (no cavity)"


def test_khat_is_what_the_fit_says(fitted, data):
    pvi, state = fitted
    ax = plot_khat(pvi, state, *data, rng_key=KEY, num_samples=100)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "b", "c", "whole q"]
    np.testing.assert_array_equal(
        ax.collections[0].get_offsets()[:, 1], 0.0
    )  # all factors quadratic: weights are equal


def test_khat_of_one_group_is_the_whole_one(skewed):
    pvi, result = skewed
    y = EVENTS
    whole = pvi.khat(result.state, y, rng_key=KEY, num_samples=200)
    by_group = pvi.khat(result.state, y, rng_key=KEY, num_samples=200, by_group=True)
    assert by_group == {"one": pytest.approx(whole, rel=1e-3)} and whole != 0


def test_khat_of_families_has_groups_too(rates):
    (pvi, state), y = rates, COUNTS
    ax = plot_khat(pvi, state, y, rng_key=KEY, num_samples=100)
    assert [t.get_text() for t in ax.get_xticklabels()] == [*map(str, state.groups), "whole q"]


def test_every_style_of_this_arviz(fitted, data):
    import arviz  # noqa: F401 - adds its styles to matplotlib's

    names = [name for name in matplotlib.style.available if name.startswith("arviz")]
    assert names
    for name in ("default", names[0], names[-1]):
        with plt.style.context(name):
            for ax in (plot_forest(*fitted, parts=("alone",)), plot_influence(*fitted)):
                assert ax.figure.axes[0] is ax


def test_what_cannot_be_drawn(fitted):
    pvi, state = fitted
    with pytest.raises(PVIError, match=r"'v' is none of the shared latents 'w'"):
        plot_influence(pvi, state, ["v"])
    with pytest.raises(PVIError, match="probability between 0 and 1"):
        plot_forest(pvi, state, prob=1.5)
    with pytest.raises(PVIError, match="'cavity', 'alone', or both"):
        plot_forest(pvi, state, parts=("site",))
    with pytest.raises(PVIError, match="'w' has 2 elements, and 1 names"):
        plot_forest(pvi, state, names={"w": ["slope"]})
    with pytest.raises(PartitionError, match="no group 'd'"):
        plot_forest(pvi, state, groups=["d"])
    with pytest.raises(PVIError, match="PRIOR"):
        plot_influence(pvi, state, groups=[PRIOR])


def test_without_matplotlib_the_extra_is_named(fitted, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plot_forest, plot_influence):
        with pytest.raises(PVIError, match=r"numpyro_pvi\[plots\]"):
            draw(*fitted)
    with pytest.raises(PVIError, match=r"numpyro_pvi\[plots\]"):
        plot_khat(*fitted, *data, rng_key=KEY)
