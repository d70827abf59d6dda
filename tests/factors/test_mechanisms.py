"""Every shape of model in turn: which mechanism evaluates one group, and that it does so rightly.

The oracle traces the untouched model and sums its rows by group; it knows nothing of plates' indices, slices or masks.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import flax_module, random_flax_module
from numpyro.distributions.transforms import biject_to
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.reparam import LocScaleReparam

from numpyro_pvi import PVI, Partition, PartitionError
from numpyro_pvi.factors import ModelCall, row_log_likelihood
from numpyro_pvi.factors._arguments import as_arrays
from numpyro_pvi.factors._planner import plan_factors

N, J, T = 7, 3, 5
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(N, 2)), RNG.normal(size=N)
G = np.array([0, 1, 2, 0, 1, 2, 0])
TABLE, MASKED = RNG.normal(size=(J, T)), RNG.random((J, T)) < 0.7
LABELS = ["b", "a", "a", "b", "a", "c", "b"]
ONE_ROW = ["a"] * 5 + ["b", "c"]
JX, JY = jnp.asarray(X), jnp.asarray(Y)


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))


def constant_indexed(x, y):
    w = weights()
    with numpyro.plate("data", N) as i:
        numpyro.sample("obs", dist.Normal(x[i] @ w, 0.7), obs=y[i])


def by_subsample(x, y):
    w = weights()
    with numpyro.plate("data", N):
        rows = numpyro.subsample(x, event_dim=1)
        numpyro.sample("obs", dist.Normal(rows @ w, 0.7), obs=numpyro.subsample(y, event_dim=0))


def plain(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)


def own_subsample(x, y):
    w = weights()
    with numpyro.plate("data", N, subsample_size=4) as i:
        numpyro.sample("obs", dist.Normal(x[i] @ w, 0.7), obs=y[i])


def closed_over():
    w = weights()
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(JX @ w, 0.7), obs=JY)


def closed_over_indexed():
    w = weights()
    with numpyro.plate("data", N) as i:
        numpyro.sample("obs", dist.Normal(JX[i] @ w, 0.7), obs=JY[i])


def x_closed_over(y):
    w = weights()
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(JX @ w, 0.7), obs=y)


def crossed_indexed(table):
    a = numpyro.sample("a", dist.Normal(0, 1))
    rows, columns = numpyro.plate("rows", J, dim=-2), numpyro.plate("columns", T, dim=-1)
    with rows as i, columns as j:
        numpyro.sample("obs", dist.Normal(a, 1.0), obs=table[i][:, j])


def crossed_plain(table):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", table.shape[0], dim=-2), numpyro.plate("columns", T, dim=-1):
        numpyro.sample("obs", dist.Normal(a, 1.0), obs=table)


def random_effects(x, g, y):
    with numpyro.plate("effects", J):
        th = numpyro.sample("th", dist.Normal(0, 1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(th[g] + x[:, 0], 0.7), obs=y)


def row_latents(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("obs", dist.Normal(x @ w + u, 0.7), obs=y)


def factor_indexed(x, y):
    w = weights()
    with numpyro.plate("data", N) as i:
        numpyro.factor("obs", -((y[i] - x[i] @ w) ** 2))


def factor_plain(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]):
        numpyro.factor("obs", -((y - x @ w) ** 2))


def summed_factor(x, y):
    w = weights()
    numpyro.factor("obs", -jnp.sum((y - x @ w) ** 2))


def without_plate(x, y):
    w = weights()
    numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)


def with_params(x, y):
    b = numpyro.param("b", 0.3)
    w = weights()
    numpyro.deterministic("twice", 2 * w)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w + b, 0.7), obs=y)


def masked_and_scaled(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]), handlers.scale(scale=0.5), handlers.mask(mask=y > -0.5):
        numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)


def masked_outside(x, y):
    w = weights()
    with handlers.mask(mask=JY > -0.5), numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)


def mask_from_argument(x, y, keep):
    w = weights()
    with handlers.mask(mask=keep), numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)


def standardising(x, y):
    w = weights()
    z = (x - x.mean(0)) / x.std(0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(z @ w, 0.7), obs=y)


def imputed(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1), obs=x[:, 0], obs_mask=x[:, 1] > 0)
        numpyro.sample("obs", dist.Normal(u * w[0], 0.7), obs=y)


def row_events(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x * w, 0.7).to_event(1), obs=x + y[:, None])


def two_sites(x, y):
    w = weights()
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("first", dist.Normal(x @ w, 0.7), obs=y)
        numpyro.sample("second", dist.Poisson(jnp.exp(0.1 * x @ w)), obs=jnp.round(y**2))


def square_argument(k, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(a * k.sum(-1), 1.0), obs=y)


def _dense():
    import flax.linen as nn

    return nn.Dense(1)


def with_flax(x, y):
    net = flax_module("net", _dense(), input_shape=(1, 2))
    s = numpyro.sample("s", dist.Normal(0, 1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(net(x)[:, 0] + s, 0.7), obs=y)


def with_random_flax(x, y):
    net = random_flax_module("net", _dense(), dist.Normal(0, 1), input_shape=(1, 2))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(net(x)[:, 0], 0.7), obs=y)


def shared_dropout(x, y):
    w = weights()
    keep = jax.random.bernoulli(numpyro.prng_key(), 0.5, (2,))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal((x * keep) @ w, 0.7), obs=y)


def row_dropout(x, y):
    w = weights()
    noise = jax.random.normal(jax.random.key(5), (x.shape[0],))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w + noise, 0.7), obs=y)


def plate_in_scan(table):
    a = numpyro.sample("a", dist.Normal(0, 1))

    def step(carry, row):
        with numpyro.plate("data", T):
            numpyro.sample("obs", dist.Normal(a + 0 * carry, 1.0), obs=row)
        return carry, None

    scan(step, 0.0, table)


def scan_in_plate(table):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("data", T):
        scan(lambda c, row: (c, numpyro.sample("obs", dist.Normal(a, 1.0), obs=row)), 0.0, table)


def global_ids(g, y):
    with numpyro.plate("effects", J) as j:
        th = numpyro.sample("th", dist.Normal(0, 1))
        numpyro.sample("size", dist.Normal(th, 1.0), obs=jnp.arange(J)[j] * 0.1)
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(th[g], 0.7), obs=y)


def global_ids_without_latents(g, y, size):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("effects", J):
        numpyro.sample("size", dist.Normal(a, 1.0), obs=size)
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(a * size[g], 0.7), obs=y)


def rectangular(table, keep):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", table.shape[0], dim=-2):
        th = numpyro.sample("th", dist.Normal(a, 1.0))
        with numpyro.plate("columns", T, dim=-1), handlers.mask(mask=keep):
            numpyro.sample("obs", dist.Normal(th, 1.0), obs=table)


def time_series(y):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))

    def step(level, value):
        level = numpyro.sample("level", dist.Normal(level, 0.5))
        numpyro.sample("obs", dist.Normal(level, scale), obs=value)
        return level, None

    scan(step, 0.0, y)


conditioned = handlers.condition(lambda: closed_free(), {"obs": JY})


def closed_free():
    w = weights()
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(JX @ w, 0.7))


class Row(NamedTuple):
    """One row of the table: a model, its arguments, how it is split, and the mechanism (or the words of the error)."""

    model: Callable
    args: tuple
    expected: str
    plate: Any = "data"
    groups: Any = tuple(LABELS)
    words: str = ""
    options: dict[str, Any] = {}


EFFECTS = {"effects": ["a", "b", "c"], "data": [["a", "b", "c"][k] for k in G]}
reparametrised = handlers.reparam(random_effects, config={"th": LocScaleReparam(0.5)})
TABLE_ROWS = {
    "a1": Row(constant_indexed, (X, Y), "index"),
    "a2": Row(by_subsample, (X, Y), "index"),
    "a3": Row(plain, (X, Y), "args"),
    "a4": Row(own_subsample, (X, Y), "index"),
    "a5": Row(plain, (X, Y), "args", groups=tuple(ONE_ROW)),
    "b1": Row(closed_over, (), "mask"),
    "b2": Row(closed_over_indexed, (), "index"),
    "b3": Row(x_closed_over, (Y,), "mask"),
    "c1": Row(crossed_indexed, (TABLE,), "index", "rows", ("a", "b", "a")),
    "c2": Row(crossed_plain, (TABLE,), "args", "rows", ("a", "b", "a")),
    "c3": Row(crossed_indexed, (TABLE,), "index", "columns", ("a", "b", "a", "a", "b")),
    "c4": Row(random_effects, (X, G, Y), "args"),
    "c5": Row(row_latents, (X, Y), "args"),
    "d1": Row(factor_indexed, (X, Y), "index"),
    "d2": Row(factor_plain, (X, Y), "args"),
    "d3": Row(summed_factor, (X, Y), "error", words="summed numpyro.factor"),
    "d4": Row(without_plate, (X, Y), "args", None, options={"sites": {"obs": -1}}),
    "f1": Row(with_params, (X, Y), "args"),
    "f2": Row(masked_and_scaled, (X, Y), "args"),
    "f3": Row(mask_from_argument, (X, Y, Y > -0.5), "args"),
    "f3-closed": Row(masked_outside, (X, Y), "mask"),
    "f4": Row(handlers.scope(plain, "blk"), (X, Y), "args", "blk/data"),
    "f4-index": Row(handlers.scope(constant_indexed, "blk"), (X, Y), "index", "blk/data"),
    "f5": Row(standardising, (X, Y), "mask"),
    "f6": Row(reparametrised, (X, G, Y), "args"),
    "f7": Row(imputed, (X, Y), "args"),
    "f8": Row(row_events, (X, Y), "args"),
    "f9": Row(two_sites, (X, Y), "args"),
    "f10": Row(square_argument, (RNG.normal(size=(N, N)), Y), "args"),
    "g1": Row(plate_in_scan, (TABLE,), "mask", "data", ("a", "b", "a", "a", "b")),
    "g2": Row(scan_in_plate, (TABLE,), "numpyro", "data", ("a", "b", "a", "a", "b"), words="control flow"),
    "h1": Row(with_flax, (X, Y), "args"),
    "h2": Row(with_random_flax, (X, Y), "args"),
    "h3": Row(shared_dropout, (X, Y), "args"),
    "h4": Row(row_dropout, (X, Y), "mask"),
    "h5": Row(global_ids, (G, Y), "mask", None, EFFECTS),
    "h5-observed": Row(global_ids_without_latents, (G, Y, TABLE[:, 0]), "mask", None, EFFECTS),
    "h6": Row(rectangular, (TABLE, MASKED), "args", "rows", ("a", "b", "a")),
    "h8": Row(time_series, (Y[:T],), "mask", None, ("a", "a", "b", "b", "b"), options={"sites": {"obs": -1}}),
    "condition": Row(conditioned, (), "mask"),
}


def test_every_row_is_here():
    assert len(TABLE_ROWS) == 40


def partition_of(row: Row, **more: Any) -> Partition:
    groups = row.groups if isinstance(row.groups, dict) else list(row.groups)
    return Partition(row.model, row.plate, groups, **row.options, **more)


def plan_of(row: Row, **more: Any):
    args, kwargs = as_arrays(row.args, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_factors(partition_of(row, **more), args, kwargs, key=jax.random.key(0)), args


def local_point(planned: Any) -> np.ndarray:
    """Values of the local latents, one row per index of their plate."""
    size, width = planned.local_loc.shape
    return planned.local_loc + 0.4 * np.sin(1 + np.arange(size * width).reshape(size, width))


def by_group(planned: Any, model: Callable, args: tuple, point: Any) -> np.ndarray:
    """Each group's log-likelihood through the mechanism."""
    plan, packing = planned.plan, planned.packing
    own = None if plan.local is None else jnp.asarray(local_point(planned), jnp.result_type(float))
    call = ModelCall(model, plan.layout, args, {}, planned.params, plan.local, own)

    def chunk(chunk):
        masks = plan.reading.masks(packing, chunk)
        terms = row_log_likelihood(plan.reading.call(call, chunk), point, plan.rows)
        return sum(jnp.sum(jnp.where(masks[key], values, 0.0)) for key, values in terms.values())

    chunks = jax.lax.map(chunk, packing.chunks)
    return np.asarray(jax.ops.segment_sum(chunks, packing.chunk_group, plan.table.num_groups))


def oracle(row: Row, planned: Any, args: tuple, point: Any) -> dict[Any, float]:
    """Each group's log-likelihood from one trace of the untouched model with whole plates."""
    layout, local = planned.plan.layout, planned.plan.local
    model = row.model
    if model is own_subsample:
        model = constant_indexed
    names = dict(zip(layout.names, (np.asarray(v) for v in layout.unflatten(point).values()), strict=True))
    if local is not None:
        (name,) = local.names
        names[name] = np.moveaxis(
            local_point(planned).reshape(-1, *local.shapes[0]), 0, len(local.shapes[0]) + 1 + local.dims[0]
        )

    def constrain(site):
        if site["type"] == "sample" and not site["is_observed"] and site["name"] in names:
            return biject_to(site["fn"].support)(jnp.asarray(names[site["name"]]))
        return None

    seeded = handlers.seed(
        handlers.substitute(handlers.substitute(model, data=planned.params), substitute_fn=constrain), 0
    )
    trace = handlers.trace(seeded).get_trace(*args)
    labels = row.groups if isinstance(row.groups, dict) else {None: row.groups}
    total: dict[Any, float] = dict.fromkeys({label for own in labels.values() for label in own}, 0.0)
    for name, site in trace.items():
        own_latent = local is not None and name in local.names
        if site["type"] != "sample" or not (site["is_observed"] or own_latent):
            continue
        values = np.asarray(site["fn"].log_prob(site["value"])) * (1.0 if site["scale"] is None else site["scale"])
        if name.endswith("_unobserved"):
            # Where the data are there, NumPyro's own latent has no density, and is given a standard normal's.
            values = values + np.where(site["fn"]._mask, 0.0, dist.Normal(0, 1).log_prob(site["value"]))
        for own_plate, own in labels.items():
            plate = own_plate or row.plate
            if row.options:
                dim = row.options["sites"].get(name)
            else:
                dim = next((f.dim for f in site["cond_indep_stack"] if f.name == plate), None)
            if dim is not None:
                rows = np.moveaxis(values, dim, 0).reshape(values.shape[dim], -1).sum(1)
                for label, value in zip(own, rows, strict=True):
                    total[label] += float(value)
    return total


ACCEPTED = [name for name, row in TABLE_ROWS.items() if row.expected in ("args", "index", "mask")]
REFUSED = [name for name, row in TABLE_ROWS.items() if row.expected == "error"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_mechanism(name):
    row = TABLE_ROWS[name]
    if name in ("h1", "h2"):
        pytest.importorskip("flax")
    planned, args = plan_of(row)
    assert planned.plan.mechanism == row.expected
    point = planned.prior_loc + 0.3 * np.cos(np.arange(planned.plan.layout.dim))
    got = by_group(planned, row.model, args, jnp.asarray(point, jnp.result_type(float)))
    wanted = oracle(row, planned, args, jnp.asarray(point, jnp.result_type(float)))
    tolerance = 1e-10 if jax.config.jax_enable_x64 else 2e-5
    for label, value in zip(planned.plan.table.labels, got, strict=True):
        assert value == pytest.approx(wanted[label], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name):
    row = TABLE_ROWS[name]
    with pytest.raises(PartitionError, match=row.words):
        plan_of(row)


def test_scan_inside_a_plate_is_numpyros_own_error():
    row = TABLE_ROWS["g2"]
    with pytest.raises(NotImplementedError, match=row.words):
        plan_of(row)


class TestAsked:
    """A mode that was asked for is used, or refused with the line to write instead."""

    @pytest.mark.parametrize("name", ["a1", "a3", "c2", "f9", "d4"])
    def test_masks_fit_every_model(self, name):
        row = TABLE_ROWS[name]
        planned, args = plan_of(row, mode="mask")
        assert planned.plan.mechanism == "mask"
        point = jnp.asarray(planned.prior_loc + 0.2, jnp.result_type(float))
        got, wanted = by_group(planned, row.model, args, point), oracle(row, planned, args, point)
        np.testing.assert_allclose(got, [wanted[label] for label in planned.plan.table.labels], rtol=2e-5)

    def test_args_where_the_size_is_constant(self):
        with pytest.raises(
            PartitionError,
            match=r"evaluated on .* rows of plate 'data'.*plate\('data', X.shape\[0\]\)",
        ):
            plan_of(TABLE_ROWS["a1"], mode="args")

    def test_index_where_the_model_ignores_it(self):
        with pytest.raises(PartitionError, match=r"indices of plate 'data'.*as i: \.\.\. X\[i\]"):
            plan_of(TABLE_ROWS["a3"], mode="index")

    def test_index_without_a_plate(self):
        with pytest.raises(PartitionError, match="no plate whose indices could be set"):
            plan_of(TABLE_ROWS["d4"], mode="index")

    def test_several_plates_by_rows(self):
        with pytest.raises(PartitionError, match="split together, which 'args' cannot do"):
            plan_of(TABLE_ROWS["h5-observed"], mode="args")

    def test_coupled_rows(self):
        with pytest.raises(PartitionError, match="not a sum over groups by 'args'.*Something couples rows"):
            plan_of(TABLE_ROWS["f5"], mode="args")


class TestTraps:
    """Silent mis-splits, each of which the additive check or the shape check must see."""

    def test_one_row_groups_are_not_broadcast(self):
        """A plate of one index broadcasts a model that ignores the index: all rows, N times."""
        with pytest.raises(PartitionError, match="should have 1 rows"):
            plan_of(TABLE_ROWS["b1"]._replace(groups=tuple(range(N))), mode="index")

    def test_one_group_of_permuted_rows(self):
        """With as many rows as indices, subsample() takes nothing: rows must come in order."""
        row = TABLE_ROWS["a2"]._replace(groups=("a",) * N)
        planned, args = plan_of(row)
        np.testing.assert_array_equal(np.asarray(planned.packing.rows)[0], np.arange(N))
        point = jnp.asarray(planned.prior_loc + 0.2, jnp.result_type(float))
        np.testing.assert_allclose(
            by_group(planned, row.model, args, point), [oracle(row, planned, args, point)["a"]], rtol=2e-5
        )

    def test_global_ids_into_restricted_rows(self):
        """Ids that point outside a chunk are clamped without a word; the check sees the difference."""

        def tied(g, y, size):
            a = numpyro.sample("a", dist.Normal(0, 1))
            with numpyro.plate("data", y.shape[0]):
                numpyro.sample("obs", dist.Normal(a * size[g], 0.7), obs=y)

        ids = np.array([6, 5, 4, 3, 2, 1, 0])
        row = Row(tied, (ids, Y, Y), "mask")
        with pytest.raises(PartitionError, match="not a sum over groups"):
            plan_of(row, mode="args")
        assert plan_of(row)[0].plan.mechanism == "mask"

    def test_mini_batch_scale_is_taken_out(self):
        """N/B left in would make a group's factor N/B times too large."""
        row = TABLE_ROWS["a4"]
        planned, args = plan_of(row)
        call = ModelCall(row.model, planned.plan.layout, args, {}, {})
        chunk = jax.tree.map(lambda x: x[0], planned.packing.chunks)
        trace, _ = planned.plan.reading.call(call, chunk).trace(jnp.zeros(2))
        assert trace["obs"]["scale"] is None

    def test_a_users_own_scale_stays(self):
        def scaled(x, y):
            w = weights()
            with numpyro.plate("data", N) as i, handlers.scale(scale=0.25):
                numpyro.sample("obs", dist.Normal(x[i] @ w, 0.7), obs=y[i])

        planned, args = plan_of(Row(scaled, (X, Y), "index"))
        call = ModelCall(scaled, planned.plan.layout, args, {}, {})
        chunk = jax.tree.map(lambda x: x[0], planned.packing.chunks)
        trace, _ = planned.plan.reading.call(call, chunk).trace(jnp.zeros(2))
        assert trace["obs"]["scale"] == pytest.approx(0.25)


def test_masks_warn_with_their_cost_and_the_reasons():
    with pytest.warns(UserWarning, match=r"3 groups costs a full pass over all 7 rows.*args: .*index: "):
        partition_of(TABLE_ROWS["b1"]).plan()


@pytest.mark.parametrize("allowed", [None, 0])
def test_several_plates_warn_only_of_what_costs_something(monkeypatch, allowed):
    """Nothing cheaper can be written for them: what is cheap is said where a state is described."""
    if allowed is not None:
        monkeypatch.setattr("numpyro_pvi.factors._mechanism._CHEAP_WORK", allowed)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = partition_of(TABLE_ROWS["h5-observed"]).plan(*TABLE_ROWS["h5-observed"].args)
    assert len(told) == (allowed is not None)
    assert "costs a full pass" in plan.reason


def test_one_group_by_masks_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition_of(TABLE_ROWS["b1"]._replace(groups=("a",) * N)).plan()


def test_labelled_sites_of_different_length():
    def model(x, y):
        w = weights()
        numpyro.sample("first", dist.Normal(x @ w, 1.0), obs=y)
        numpyro.sample("second", dist.Normal(w, 1.0), obs=jnp.zeros(2))

    with pytest.raises(PartitionError, match=r"axes differ in size|has size 2"):
        partition_of(Row(model, (X, Y), "error", None, options={"sites": {"first": -1, "second": -1}})).plan(X, Y)


def test_labelled_site_that_is_not_there():
    with pytest.raises(
        PartitionError, match=r"sample site 'nope', which is not there; the observed sample sites are: 'obs'"
    ):
        partition_of(Row(without_plate, (X, Y), "error", None, options={"sites": {"nope": -1}})).plan(X, Y)


def test_chunks_of_one_row_do_not_meet_all_observations():
    """A table that the model closes over, indexed by the plate, beside observations that it does not index."""
    table = jnp.asarray(np.random.default_rng(5).normal(size=(6, 3)))

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", len(y)) as rows:
            numpyro.sample("y", dist.Normal(table[rows] @ w, 1.0), obs=y)

    guide = AutoMultivariateNormal(model)
    pvi = PVI(Partition(model, "data", [0, 0, 1, 1, 1, 2]), guide)
    with pytest.warns(UserWarning, match="index: the model cannot be evaluated on 1 indices.*have 6 rows, not 1"):
        state = pvi.init(jax.random.key(0), jnp.arange(6.0))
    assert state.plan.partition.mechanism == "mask"
