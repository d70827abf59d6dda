"""The trace of a run: its numbers against the states of single rounds, as an ArviZ group, and as pictures."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PRIOR, PVI, Partition, PVIError, PVIRunResult, PVITrace
from numpyro_pvi.export import plot_error, plot_rounds
from numpyro_pvi.schedules import Sequential, Synchronous

ROUNDS, GROUPS = 4, 3
KEY = jax.random.key(0)


def model(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + scale), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(18, 2))
    return jnp.asarray(x), jnp.asarray((rng.random(18) < 0.5).astype(float))


@pytest.fixture(scope="module")
def fits(data):
    """Per schedule: the PVI object, its first state, and one run from there."""
    found = {}
    for schedule in (Synchronous(), Sequential()):
        partition = Partition(model, "rows", ["a", "b", "c"] * 6)
        pvi = PVI(partition, AutoMultivariateNormal(model), schedule=schedule)
        state = pvi.init(KEY, *data)
        found[type(schedule).__name__] = pvi, pvi.run(KEY, ROUNDS, *data, init_state=state, progress_bar=False), state
    return found


@pytest.fixture(scope="module")
def one_by_one(fits, data):
    """By schedule: the states and losses of the same rounds taken one by one."""

    @functools.cache
    def of(name):
        pvi, _, state = fits[name]
        states = []
        for _ in range(ROUNDS):
            state, loss = pvi.update(state, *data)
            states.append((state, loss))
        return states

    return of


@pytest.mark.parametrize("name", ["Synchronous", "Sequential"])
def test_trace_is_what_each_round_reported(fits, one_by_one, name):
    trace, states = fits[name][1].trace, one_by_one(name)
    assert trace.labels == (PRIOR, "a", "b", "c") and list(trace.rounds) == [1, 2, 3, 4]
    for k, (state, loss) in enumerate(states):
        np.testing.assert_allclose(trace.elbo[k], -loss, rtol=1e-5)
        for field in ("move", "step", "backoffs", "skipped", "staleness", "total_move", "clock", "messages"):
            wanted = np.asarray(getattr(state.report, field))
            np.testing.assert_allclose(getattr(trace, field)[k], wanted, rtol=1e-4, atol=1e-7, err_msg=field)


def test_the_total_move_is_the_largest_change_of_a_mean_in_sds_or_of_a_log_sd(fits, one_by_one):
    for name, (pvi, *_) in fits.items():
        states = one_by_one(name)
        read = [pvi.get_params(state) for state, _ in states]
        sds = [np.sqrt(np.sum(np.asarray(params["auto_scale_tril"]) ** 2, axis=1)) for params in read]
        for k in range(1, len(read)):
            shift = np.abs(read[k]["auto_loc"] - read[k - 1]["auto_loc"]) / sds[k]
            wanted = np.max([shift, np.abs(np.log(sds[k] / sds[k - 1]))])
            np.testing.assert_allclose(states[k][0].report.total_move, wanted, rtol=1e-3, atol=1e-7)


def test_messages_are_counted(fits):
    # A joint step costs one exchange with every group for each ELBO that it asks for; a sweep one more, for its visits.
    for name, visits in (("Synchronous", 0), ("Sequential", 1)):
        trace = fits[name][1].trace
        sent = np.diff(trace.messages, axis=0, prepend=0)
        assert np.all(sent[:, 0] == sent[:, 1]) and np.all(sent % GROUPS == 0)
        assert np.all(sent >= GROUPS * (1 + visits))
        # Both directions; D numbers of precision-mean and D x D of precision each.
        size = (3 + 9) * trace.elbo.dtype.itemsize
        np.testing.assert_array_equal(trace.bytes, trace.messages.sum(-1) * size)
        np.testing.assert_allclose(trace.clock, [1, 2, 3, 4])


def test_a_run_continues_its_totals(fits, data):
    pvi, result, _ = fits["Synchronous"]
    more = pvi.run(KEY, 2, *data, init_state=result.state, progress_bar=False).trace
    assert list(more.rounds) == [5, 6] and more.clock[0] == 5
    assert np.all(more.messages[0] > result.trace.messages[-1])


def test_blocks_of_rounds_join(fits, data):
    pvi, result, start = fits["Synchronous"]
    # A callback looks between rounds, so that every block is of one round.
    split = pvi.run(KEY, ROUNDS, *data, init_state=start, progress_bar=False, callback=lambda *_: None).trace
    np.testing.assert_allclose(split.elbo, result.trace.elbo, rtol=1e-6)
    np.testing.assert_array_equal(split.messages, result.trace.messages)


def test_arviz_group(fits, data):
    pvi, result, _ = fits["Synchronous"]
    idata = pvi.to_arviz(KEY, result, *data, num_samples=5)
    rounds = idata["rounds"]
    assert rounds["move"].dims == ("round", "factor") and rounds["elbo"].dims == ("round",)
    assert rounds["messages"].dims == ("round", "direction")
    assert list(np.asarray(rounds["factor"])) == [str(PRIOR), "a", "b", "c"]
    np.testing.assert_array_equal(np.asarray(rounds["elbo"]), result.trace.elbo)
    alone = pvi.to_arviz(KEY, result.state, *data, num_samples=5)
    names = alone.groups() if callable(alone.groups) else alone.groups
    assert not any("rounds" in name for name in names)


@pytest.mark.parametrize("against", ["rounds", "time", "messages", "bytes"])
def test_error_picture(fits, against):
    traces = {name: result for name, (_, result, _) in fits.items()}
    best = max(r.trace.elbo.max() for r in traces.values()) + 0.5
    ax = plot_error(traces, against=against, reference=best)
    assert [line.get_label() for line in ax.lines] == list(traces) and ax.get_yscale() == "log"
    for line, result in zip(ax.lines, traces.values(), strict=True):
        trace = result.trace
        wanted = {"rounds": trace.rounds, "time": trace.clock, "messages": trace.messages.sum(-1), "bytes": trace.bytes}
        np.testing.assert_allclose(line.get_xdata(), wanted[against])
        np.testing.assert_allclose(line.get_ydata(), best - trace.elbo, rtol=1e-6)


def test_error_picture_of_one_run_drops_the_best_point(fits):
    trace = fits["Synchronous"][1].trace
    ax = plot_error(trace)
    (line,) = ax.lines
    shown = np.isfinite(line.get_ydata())
    assert shown.sum() == np.sum(trace.elbo < trace.elbo.max()) and ax.get_legend() is None


def test_rounds_picture(fits):
    figure = plot_rounds(fits["Sequential"][1])
    assert len(figure.axes) == 4
    assert [line.get_label() for line in figure.axes[1].lines] == [str(PRIOR), "a", "b", "c"]
    assert all(axis.lines for axis in figure.axes)


def test_what_cannot_be_drawn():
    empty = PVIRunResult({}, None, jnp.zeros(0))
    with pytest.raises(PVIError, match=r"results\['slow'\] has no trace"):
        plot_error({"slow": empty})
    with pytest.raises(PVIError, match="no trace"):
        plot_rounds(empty)
    with pytest.raises(PVIError, match="against='seconds'"):
        plot_error(empty, against="seconds")
    with pytest.raises(PVIError, match="nothing to draw"):
        plot_error({})


def test_without_matplotlib_the_extra_is_named(fits, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PVIError, match=r"numpyro_pvi\[plots\]"):
        plot_error(fits["Synchronous"][1])


def test_trace_is_public():
    assert PVITrace.__doc__ and "nats" in PVITrace.__doc__
