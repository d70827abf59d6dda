"""Groups that come and go, as a user meets them: labels, present rows, compilations, mechanisms, local latents, messages."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_pvi import (
    PRIOR,
    PVI,
    AutoExponentialFamily,
    DataError,
    Partition,
    PartitionError,
    PVIError,
    SkippedGroupError,
    StateError,
)
from numpyro_pvi.factors._plan import _pack_padded
from numpyro_pvi.runtime._factors import GroupRows
from numpyro_pvi.runtime._refinement import first_rule
from numpyro_pvi.schedules import Asynchronous, StochasticSubset, Streaming, Synchronous
from numpyro_pvi.sites import add_slots, keep_slots, posterior, stack_sites
from numpyro_pvi.solvers import Conjugate, LocalELBO

KEY = jax.random.key(0)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 2))
Y = X @ [1.0, -0.5] + 0.3 * RNG.normal(size=40)
LABELS = np.repeat(["a", "b", "c"], [8, 20, 12])


def linear(X, y, noise=1.0):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, noise), obs=y)


def rows_of(label):
    return X[label == LABELS], Y[label == LABELS]


def exact(labels):
    mine = np.isin(LABELS, list(labels))
    precision = np.eye(2) + X[mine].T @ X[mine]
    return np.linalg.solve(precision, X[mine].T @ Y[mine])


def loc_of(pvi, state):
    return np.asarray(pvi.get_params(state)["auto_loc"])


def begin(model=linear, label="a", solver=None, data=None, schedule=None, **options):
    data = rows_of(label) if data is None else data
    plate = options.pop("plate", "data")
    partition = Partition(model, plate, [label] * len(data[-1]), **options)
    pvi = PVI(partition, AutoMultivariateNormal(model), solver=solver or Conjugate(), schedule=schedule or Streaming())
    return pvi, pvi.run(KEY, 1, *data, progress_bar=False).state


@pytest.fixture(scope="module")
def streamed():
    pvi, state = begin()
    for label in "bc":
        state = pvi.add_group(state, label, *rows_of(label))
    return pvi, state


# ------------------------------------------------------------------------------------------------------- labels and views


class TestViews:
    def test_labels_are_listed_absent_first(self, streamed):
        pvi, state = streamed
        assert state.groups == ("a", "b", "c") == pvi.groups
        assert state.present == ("c",)
        info = pvi.info(state)
        assert info.labels == state.groups
        assert "site only" in str(info)

    def test_sites_and_cavities_of_absent_groups(self, streamed):
        pvi, state = streamed
        for label in "abc":
            mine, y = rows_of(label)
            np.testing.assert_allclose(pvi.site(state, label).precision, mine.T @ mine, rtol=1e-5)
            np.testing.assert_allclose(pvi.site(state, label).precision_mean, mine.T @ y, rtol=1e-4, atol=1e-5)
            rest = pvi.cavity(state, label).to_distribution().mean
            np.testing.assert_allclose(rest, exact([x for x in "abc" if x != label]), rtol=1e-4, atol=1e-6)

    def test_update_takes_the_present_groups_rows(self, streamed):
        pvi, state = streamed
        after, loss = pvi.update(state, *rows_of("c"))
        np.testing.assert_allclose(loc_of(pvi, after), exact("abc"), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(loss, pvi.evaluate(state, *rows_of("c")), rtol=1e-5)
        back = pvi.revisit(
            state, ["a"] * 8 + ["b"] * 20, *(np.concatenate(x) for x in zip(rows_of("a"), rows_of("b"), strict=True))
        )
        assert back.groups == ("c", "a", "b") and back.present == ("a", "b")
        np.testing.assert_allclose(loc_of(pvi, back), exact("abc"), rtol=1e-4, atol=1e-6)

    def test_revisiting_leaves_other_sites_to_the_last_bit(self, streamed):
        pvi, state = streamed
        back = pvi.revisit(state, "b", *rows_of("b"))
        for label in "ac":
            np.testing.assert_array_equal(pvi.site(back, label).precision, pvi.site(state, label).precision)

    def test_a_group_at_its_start_changes_nothing(self, streamed):
        """num_steps=0: the site is 1, and update fits it later."""
        pvi, state = streamed
        without = pvi.forget_group(state, "b")
        waiting = pvi.add_group(without, "b", *rows_of("b"), num_steps=0)
        np.testing.assert_allclose(loc_of(pvi, waiting), exact("ac"), rtol=1e-4, atol=1e-6)
        with pytest.warns(UserWarning, match="'b'.*have not been updated"):
            pvi.add_group(waiting, "d", *rows_of("a"), num_steps=0)
        after, _ = pvi.update(waiting, *rows_of("b"))
        np.testing.assert_allclose(loc_of(pvi, after), exact("abc"), rtol=1e-4, atol=1e-6)

    def test_forgetting_the_present_group_leaves_none_present(self, streamed):
        pvi, state = streamed
        left = pvi.forget_group(state, "c")
        assert left.groups == ("a", "b") and left.present == ()
        assert pvi.info(left).labels == ("a", "b")
        np.testing.assert_allclose(loc_of(pvi, left), exact("ab"), rtol=1e-4, atol=1e-6)
        with pytest.raises(StateError, match="no group's rows are at hand.*revisit"):
            pvi.update(left, *rows_of("a"))

    def test_a_fresh_object_goes_on_from_a_stored_state(self, streamed):
        pvi, state = streamed
        leaves, structure = jax.tree.flatten(state)
        again = jax.tree.unflatten(
            structure, [np.asarray(x) if hasattr(x, "dtype") and not _is_key(x) else x for x in leaves]
        )
        again = type(state)(**{**vars(again), "plan": pickle.loads(pickle.dumps(state.plan))})
        fresh = PVI(pvi.partition, AutoMultivariateNormal(linear), solver=Conjugate(), schedule=Streaming())
        found = fresh.add_group(again, "d", *rows_of("a"))
        wanted = pvi.add_group(state, "d", *rows_of("a"))
        for one, other in zip(*(jax.tree.leaves(posterior(s.prior, s.sites)) for s in (found, wanted)), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_update_may_be_jitted(self, streamed):
        pvi, state = streamed
        after, loss = jax.jit(pvi.update)(state, *map(jnp.asarray, rows_of("c")))
        assert after.groups == state.groups
        np.testing.assert_allclose(loss, pvi.evaluate(state, *rows_of("c")), rtol=1e-5)


def test_a_saved_stream_is_streamed_on(streamed, tmp_path):
    """Sites of groups without rows come back from the file to the bit, and take part in all that follows."""
    pvi, state = streamed
    pvi.save(tmp_path / "stream.pvi", state)
    fresh = PVI(pvi.partition, AutoMultivariateNormal(linear), solver=Conjugate(), schedule=Streaming())
    loaded = fresh.load(tmp_path / "stream.pvi")
    assert loaded.groups == ("a", "b", "c") and loaded.present == ("c",)
    for act in (
        lambda p, s: p.add_group(s, "d", *rows_of("a")),
        lambda p, s: p.forget_group(s, "a"),
        lambda p, s: p.revisit(s, "b", *rows_of("b")),
        lambda p, s: p.run(KEY, 2, *rows_of("c"), init_state=s, progress_bar=False).state,
    ):
        found, wanted = act(fresh, loaded), act(pvi, state)
        assert found.groups == wanted.groups
        for one, other in zip(*(jax.tree.leaves(posterior(s.prior, s.sites)) for s in (found, wanted)), strict=True):
            np.testing.assert_array_equal(one, other)


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoExponentialFamily])
@pytest.mark.parametrize("verb", ["add_group", "revisit"])
def test_a_fresh_pvi_streams_on_and_knows_its_guide_by_the_rows_that_come(guide, verb):
    def made():
        return PVI(Partition(linear, "data", ["a"] * 8), guide(linear), schedule=Streaming())

    first, fresh, label = made(), made(), "b" if verb == "add_group" else "a"
    state = first.run(KEY, 1, *rows_of("a"), progress_bar=False).state
    found, wanted = (
        pvi.get_params(getattr(pvi, verb)(state, label, *rows_of(label), num_steps=1)) for pvi in (fresh, first)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_slots_double_and_close_up():
    sites = {"x": jnp.arange(3.0)[:, None] + jnp.ones((3, 2))}
    others = add_slots(None, 0, sites)
    assert others["x"].shape == (4, 2)
    others = add_slots(others, 3, sites)
    assert others["x"].shape == (8, 2)
    np.testing.assert_array_equal(others["x"][:, 0], [1, 2, 3, 1, 2, 3, 0, 0])
    kept = keep_slots(others, np.array([0, 2, 5]))
    np.testing.assert_array_equal(kept["x"][:, 0], [1, 3, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(stack_sites(kept, np.array([1]))["x"], [[3, 3]])
    assert keep_slots(others, np.zeros(0, int)) is None
    assert add_slots(None, 0, {"x": jnp.zeros((0, 2))}) is None


# ------------------------------------------------------------------------------------------------------------ compilation


def test_a_thousand_groups_compile_a_few_programs():
    """Law 11 for streams: the model is traced once for each power of two of rows, whatever labels and numbers of groups."""
    calls = []

    @functools.wraps(linear)
    def counted(X, y):
        calls.append(X.shape[0])
        return linear(X, y)

    compiled = []
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    pvi, state = begin(counted)
    state = pvi.add_group(state, "b", *rows_of("b"))
    state = pvi.add_group(state, "c", *rows_of("c"))
    traced = len(calls)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        total = 3
        for i in range(1000):
            size = 1 + i % 31
            state = pvi.add_group(state, ("group", i), X[:size], Y[:size], num_steps=1)
            total += 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(state.groups) == total
    assert len(calls) == traced, "rows of sizes up to 32 need no program beyond those for 16 and 32"
    # Slots double from 4 to 1024: eight times, with a few small programs each.
    assert state.sites.others.precision.shape[0] == 1024
    assert len(compiled) <= 8 * 6
    counts = [np.sum(1 + np.arange(1000) % 31 > n) for n in range(31)]
    precision = np.eye(2) + X.T @ X + sum(c * np.outer(x, x) for c, x in zip(counts, X[:31], strict=True))
    found = posterior(state.prior, state.sites).precision
    np.testing.assert_allclose(found, precision, rtol=1e-4)


def test_a_new_power_of_two_is_compiled(streamed):
    """The counter can move."""
    calls = []

    @functools.wraps(linear)
    def counted(X, y):
        calls.append(X.shape[0])
        return linear(X, y)

    pvi, state = begin(counted)
    first = len(calls)
    pvi.add_group(state, "b", *rows_of("b"))
    assert len(calls) > first and set(calls[first:]) <= {16, 32}


# ------------------------------------------------------------------------------------------------------------- mechanisms


def indexed(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("obs", dist.Normal(X[i] @ w, 1.0), obs=y[i])


@pytest.mark.parametrize("mode", ["index", "mask"])
def test_other_mechanisms_take_rows_as_they_are(mode):
    pvi, state = begin(indexed, mode=mode)
    state = pvi.add_group(state, "b", *rows_of("b"))
    assert state.plan.padded_rows == 0
    np.testing.assert_allclose(loc_of(pvi, state), exact("ab"), rtol=1e-4, atol=1e-6)
    state = pvi.revisit(state, "a", *rows_of("a"))
    np.testing.assert_allclose(loc_of(pvi, state), exact("ab"), rtol=1e-4, atol=1e-6)


def test_a_plate_of_constant_size_is_refused():
    def constant(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", 8) as i:
            numpyro.sample("obs", dist.Normal(X[i] @ w, 1.0), obs=y[i])

    pvi, state = begin(constant)
    with pytest.raises(PartitionError, match=r"group 'b': 'data' has 8 rows.*numpyro.plate\('data', X.shape\[0\]\)"):
        pvi.add_group(state, "b", *rows_of("b"))


def test_batches_of_padded_rows_know_how_many_there_are():
    """Mini-batches come from a group's own rows: the room for 16 would bring the first row in again and again."""
    packing = _pack_padded(9, 16, 1)
    padded = GroupRows(lambda chunk, point: point[0], packing, (16,), padded=True)
    assert int(padded.num_rows(jnp.int32(0))) == 9
    assert int(GroupRows(padded.density, packing, (16,)).num_rows(jnp.int32(0))) == 16


def test_mini_batches_stream():
    """Stochastic local solves of groups that come one by one end near the exact posterior, and forget one again."""
    solver = LocalELBO(optax.adam(0.02), epochs=60, batch_size=4)
    pvi, state = begin(solver=solver)
    for label in "bc":
        state = pvi.add_group(state, label, *rows_of(label), num_steps=3)
    sd = np.sqrt(np.diag(np.linalg.inv(np.eye(2) + X.T @ X)))
    np.testing.assert_array_less(np.abs(loc_of(pvi, state) - exact("abc")) / sd, 0.3)
    with pytest.warns(UserWarning, match="LocalELBO nears the other groups' sites from a q that had it in"):
        state = pvi.forget_group(state, "b")
    sd = np.sqrt(np.diag(np.linalg.inv(np.eye(2) + X[LABELS != "b"].T @ X[LABELS != "b"])))
    np.testing.assert_array_less(np.abs(loc_of(pvi, state) - exact("ac")) / sd, 0.5)


# --------------------------------------------------------------------------------------------------------- local latents


def effects(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.3 * w[0], 0.7))
        numpyro.sample("obs", dist.Normal(X @ w + u, 0.5), obs=y)


def test_local_latents_come_and_go_with_their_rows():
    """Integrated out by hand, the rows are Gaussian again: sites of absent groups keep what their effects said of w."""
    model = effects
    pvi = PVI(Partition(model, "data", ["a"] * 8), AutoMultivariateNormal(model), schedule=Synchronous())
    state = pvi.run(KEY, 10, *rows_of("a"), tol=1e-4, progress_bar=False).state
    for label in "bc":
        state = pvi.add_group(state, label, *rows_of(label))
        assert pvi.posterior(state)["u"].mean.shape == (len(rows_of(label)[1]),)
    design = X + np.array([0.3, 0.0])
    precision = np.eye(2) + design.T @ design / (0.49 + 0.25)
    wanted = np.linalg.solve(precision, design.T @ Y / 0.74)
    np.testing.assert_allclose(pvi.posterior(state)["w"].mean, wanted, rtol=2e-3, atol=1e-4)
    back = pvi.revisit(state, "b", *rows_of("b"), num_steps=0)
    np.testing.assert_allclose(pvi.posterior(back)["w"].mean, pvi.posterior(state)["w"].mean, rtol=1e-4)
    score = pvi.prequential(state, *rows_of("a"), rng_key=KEY, num_samples=200)
    assert score.rows.shape == (8,) and np.all(np.isfinite(score.rows))
    # The guide was set up for the eight rows of "a"; draws are of the latest rows' effects, and leave it as it was.
    few = pvi.add_group(state, "d", X[:3], Y[:3])
    drawn = pvi.to_arviz(KEY, few, X[:3], Y[:3], num_samples=4).posterior
    assert drawn["u"].shape == (1, 4, 3) and drawn["w"].shape == (1, 4, 2)
    assert pvi.to_arviz(KEY, back, *rows_of("b"), num_samples=4).posterior["u"].shape == (1, 4, len(rows_of("b")[1]))
    assert len(pvi.guide.prototype_trace["u"]["value"]) == 8


def left_over(y):
    """Effects beside a latent that no other factor sees, or a Student-t's rows."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mu, 1.0))
        numpyro.sample("obs", dist.Normal(effect, 1.0), obs=y)


def heavy_tails(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.StudentT(4.0, mu, 1.0), obs=y)


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoNormal, AutoExponentialFamily], ids=lambda g: g.__name__)
@pytest.mark.parametrize("model", [left_over, heavy_tails], ids=["own latents", "none"])
def test_a_state_without_any_row_is_described_and_has_params(model, guide):
    """Those of the latents that remain; before a run has ended, when something is left to move."""
    pvi = PVI(Partition(model, "data", np.arange(12) % 3), guide(model))
    state = pvi.run(KEY, 1, Y[:12], progress_bar=False, tol=None).state
    with pytest.warns(UserWarning, match="other groups"):
        state = pvi.forget_group(state, 0)
    assert pvi.info(state).labels == (1, 2) and "site only" in str(pvi.info(state))
    if guide is AutoExponentialFamily:
        pvi.get_params(state)
    else:
        sizes = {name: x.shape for name, x in pvi.get_params(state).items() if "effect" not in name}
        assert set(sizes.values()) <= {(1,), (1, 1), ()}


@pytest.mark.parametrize(
    "schedule",
    [Asynchronous(delays={"a": 4.0}), StochasticSubset(rates={"a": 0.9}, damping={"a": 0.5})],
    ids=["delays", "rates"],
)
def test_a_schedule_may_name_a_group_that_was_forgotten(schedule):
    """Where all others are revisited, no group is away; a name that no group ever had is refused where a fit begins."""
    pvi = PVI(Partition(linear, "data", LABELS), AutoMultivariateNormal(linear), solver=Conjugate(), schedule=schedule)
    state = pvi.forget_group(pvi.run(KEY, 6, X, Y, progress_bar=False).state, "a")
    rest = LABELS != "a"
    state = pvi.revisit(state, LABELS[rest], X[rest], Y[rest], num_steps=30, tol=1e-5)
    assert state.present == ("b", "c")
    np.testing.assert_allclose(loc_of(pvi, state), exact("bc"), rtol=1e-3, atol=1e-4)
    other = PVI(
        Partition(linear, "data", ["e"] * 40), AutoMultivariateNormal(linear), solver=Conjugate(), schedule=schedule
    )
    with pytest.raises(PVIError, match="names group 'a', which is not there; the groups are 'e'"):
        other.init(KEY, X, Y)


def test_as_many_rows_as_at_first_that_came_under_labels_of_their_own_are_gone_on_with(tmp_path):
    """A window that slides: a batch goes, another one of its size comes. Labels of the first rows say nothing of these."""
    pvi, first = (
        PVI(Partition(linear, "data", np.repeat(["a", "b", "c", "d"], 10)), AutoMultivariateNormal(linear)),
        "abcd",
    )
    state = pvi.run(KEY, 2, X, Y, progress_bar=False).state
    state = pvi.add_group(pvi.forget_group(state, "a"), "e", X[:10], Y[:10])
    order = np.r_[10:40, 0:10]
    state = pvi.revisit(state, np.repeat(list("bcde"), 10), X[order], Y[order], num_steps=2)
    for at in (state, pvi.run(KEY, 2, X[order], Y[order], init_state=state, progress_bar=False).state):
        pvi.save(tmp_path / "window.pvi", at)
        again = pvi.load(tmp_path / "window.pvi")
        assert again.groups == tuple("bcde")
        np.testing.assert_allclose(loc_of(pvi, again), exact("abc"), rtol=1e-3, atol=1e-4)
    start = pvi.init(KEY, X, Y)
    other = PVI(Partition(linear, "data", np.repeat(list(first[::-1]), 10)), AutoMultivariateNormal(linear))
    with pytest.raises(StateError, match="init_state was made for other rows"):
        other.run(KEY, 1, X, Y, init_state=start, progress_bar=False)


def curved(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(jnp.exp(a) * jnp.tanh(b * x + 0.3 * a), 0.5), obs=y)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
def test_points_that_draws_have_contradicted_stay_so_when_rows_come_back(fault):
    """Where q is narrow, few draws would not contradict them again: sites ended .045 sd away, .02 nats below any bound.

    The fault: what draws have said is forgotten.
    """

    def come(state, labels, rows, num_steps):
        state = pvi.revisit(state, labels, x[rows], y[rows], num_steps=0)
        if fault:
            state = dataclasses.replace(state, rule=first_rule(x.dtype))
        return pvi.run(KEY, num_steps, x[rows], y[rows], tol=1e-4, init_state=state, progress_bar=False)

    rng = np.random.default_rng(3)
    x = rng.normal(size=8).astype(jnp.result_type(float))
    y, groups = 1.5 * np.tanh(0.8 * x) + 0.5 * rng.normal(size=8), np.arange(8) % 4
    pvi = PVI(Partition(curved, "data", groups), AutoMultivariateNormal(curved))
    run = pvi.run(KEY, 100, x, y, tol=1e-4, progress_bar=False)
    assert np.asarray(run.state.rule.points.finer)[0]
    again = come(come(run.state, 0, groups == 0, 5).state, groups, groups >= 0, 100)
    gap = abs(float(again.losses[-1] - run.losses[-1]))
    assert again.converged and (gap > 5e-3) == fault


def spread(y):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(0.0, sd), obs=y)


def test_forgetting_the_last_group_says_what_the_priors_site_is():
    """It was fitted at sds of .05, where the prior is flat in log sd: by itself it is a normal law hundreds of sds away."""
    pvi = PVI(Partition(spread, "data", np.arange(12) % 2), AutoMultivariateNormal(spread))
    state = pvi.run(KEY, 8, np.linspace(-0.1, 0.1, 12), progress_bar=False).state
    with pytest.warns(UserWarning, match="beside them|other groups"):
        state = pvi.forget_group(state, 0)
    with pytest.warns(UserWarning, match="the last group's site out.*begin anew with init"):
        state = pvi.forget_group(state, 1)
    assert loc_of(pvi, state)[0] > 50


# --------------------------------------------------------------------------------------------------------------- messages


class TestMessages:
    @pytest.mark.parametrize(
        ("act", "kind", "words"),
        [
            (
                lambda p, s: p.add_group(s, "a", *rows_of("a")),
                PartitionError,
                "group 'a' already.*revisit.*forget_group",
            ),
            (lambda p, s: p.add_group(s, PRIOR, *rows_of("a")), PartitionError, "PRIOR"),
            (lambda p, s: p.add_group(s, None, *rows_of("a")), PartitionError, "missing"),
            (lambda p, s: p.add_group(s, "d", X[:0], Y[:0]), DataError, "group 'd': there are no rows"),
            (
                lambda p, s: p.add_group(s, "d", X[:3], Y[:4]),
                DataError,
                r"differ in their number of rows.*'X'.*3.*'y'.*4",
            ),
            (lambda p, s: p.add_group(s, "d", X[:3, :1], Y[:3]), StateError, r"'X'.*\(3, 1\).*only the number of rows"),
            (lambda p, s: p.add_group(s, "d", X[:3], Y[:3] > 0), StateError, "'y'.*bool"),
            (lambda p, s: p.add_group(s, "d", X[:3]), StateError, "group 'd': the arguments are"),
            (lambda p, s: p.add_group(s, "d", X[:3] * np.nan, Y[:3]), DataError, "non-finite"),
            (lambda p, s: p.add_group(s, "d", *rows_of("a"), num_steps=-1), PVIError, "num_steps=-1"),
            (lambda p, s: p.revisit(s, "aa", *rows_of("a")), PartitionError, "no group 'aa'.*Did you mean 'a'"),
            (lambda p, s: p.revisit(s, ["a"] * 3, *rows_of("a")), PartitionError, "3 labels were given for 8 rows"),
            (lambda p, s: p.forget_group(s, "z"), PartitionError, "no group 'z'"),
            (lambda p, s: p.forget_group(s, PRIOR), PartitionError, "cannot be forgotten"),
            (lambda p, s: p.update(s, *rows_of("a")), StateError, r"group\(s\) 'c'.*revisit"),
            (lambda p, s: p.log_evidence(s, *rows_of("c")), StateError, "'a', 'b'.*Bring all of them back"),
            (lambda p, s: p.khat(s, *rows_of("c"), rng_key=KEY), StateError, "not at hand"),
            (lambda p, s: p.prequential(s, *rows_of("a"), rng_key=KEY, num_samples=1), PVIError, "at least 2 draws"),
        ],
    )
    def test_what_is_wrong_and_what_to_write(self, streamed, act, kind, words):
        with pytest.raises(kind, match=words):
            act(*streamed)

    def test_rows_that_are_coupled_are_refused(self):
        def centred(X, y):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal((X - X.mean(0)) @ w, 1.0), obs=y)

        pvi, state = begin(centred)
        with pytest.raises(PartitionError, match="do not add up.*coupled through the arguments"):
            pvi.add_group(state, "b", *rows_of("b"))

    def test_rows_of_another_structure_are_refused(self):
        """The first group's last column is zero, so its likelihood looked quadratic."""

        def bent(X, y):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(X @ w + X[:, 1] * w[0] ** 2, 1.0), obs=y)

        flat = X[:8] * np.array([1.0, 0.0])
        pvi, state = begin(bent, data=(flat, Y[:8]))
        with pytest.raises(PartitionError, match="is not 'quadratic' in the latents as that of the first rows"):
            pvi.add_group(state, "b", *rows_of("b"))

    def test_a_group_that_cannot_be_absorbed(self):
        def counts(X, y):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Poisson(jnp.exp(X @ w), validate_args=False), obs=y)

        y = np.ones(40)
        pvi = PVI(Partition(counts, "data", ["a"] * 8), AutoMultivariateNormal(counts), schedule=Streaming())
        state = pvi.run(KEY, 1, X[:8], y[:8], progress_bar=False).state
        before = loc_of(pvi, state)
        with pytest.raises(SkippedGroupError, match="group\\(s\\) 'b' could not be absorbed") as caught:
            pvi.add_group(state, "b", 1e200 * X[8:16], y[8:16], num_steps=2)
        np.testing.assert_allclose(loc_of(pvi, caught.value.state), before)
