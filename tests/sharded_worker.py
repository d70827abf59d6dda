"""Fits on several devices beside Vmap's, in a process of its own: prints one JSON line; see tests/test_sharded.py.

``python -m tests.sharded_worker two``, ``few``, ``rest`` or ``processes PORT RANK``. XLA_FLAGS says how many devices there are.
"""

import functools
import gc
import json
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi._group_lifecycle import reduced
from numpyro_pvi._user_inputs import placed, run_rounds
from numpyro_pvi.factors import split_arguments
from numpyro_pvi.runtime import Sharded, Vmap
from numpyro_pvi.runtime._product_rounds import SomeRows
from numpyro_pvi.schedules import Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import (
    SNEP,
    LocalELBO,
    NaturalGradient,
    PowerEP,
    StochasticEP,
    StochasticNaturalGradient,
)

ROWS = 23
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 2))
CLASSES = (_random.uniform(size=ROWS) < 0.5).astype(int)
Y = X @ np.array([1.0, -1.0]) + _random.normal(size=ROWS)
COUNTS = np.random.default_rng(1).poisson(3, size=ROWS)
# Unequal groups, in no order.
LABELS = _random.permutation(np.repeat(np.arange(5), [9, 5, 4, 3, 2]))


def logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def linear(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def scaled(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("data", ROWS):
        numpyro.sample("y", dist.Normal(X @ w, s), obs=y)


def own_effects(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + b), obs=y)


def with_params(X, y):
    sd = numpyro.param("sd", 1.5, constraint=dist.constraints.positive)
    shift = numpyro.param("shift", 0.1)
    w = numpyro.sample("w", dist.Normal(0, sd).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + shift), obs=y)


def rates(X, y):
    mean = numpyro.sample("mean", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        rate = numpyro.sample("rate", dist.Gamma(3.0, mean))
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def drawn(X, y):
    """A prior factor, and a likelihood whose expectations are by draws."""
    a = numpyro.sample("a", dist.Gamma(2.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0, 1 / jnp.sqrt(a)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(a * jnp.exp(0.1 * jnp.sin(b) + 0.1 * X[:, 0])), obs=y)


def family_params(X, y):
    rate = numpyro.param("rate", 1.0, constraint=dist.constraints.positive)
    slope = numpyro.param("slope", 0.1)
    lam = numpyro.sample("lam", dist.Gamma(2.0, rate))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(lam * jnp.exp(slope * X[:, 0])), obs=y)


def gamma_prior_of_rows(X, y):
    lam = numpyro.sample("lam", dist.Gamma(2.0, X[:, 0].std()))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(lam), obs=y)


def prior_of_rows(X, y):
    w = numpyro.sample("w", dist.HalfNormal(X.std(0)).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


_FULL, _DIAGONAL, _FAMILIES = AutoMultivariateNormal, AutoDiagonalNormal, AutoExponentialFamily
DATA = {linear: Y, scaled: Y} | dict.fromkeys((rates, drawn, family_params, gamma_prior_of_rows), COUNTS)
_BATCHES = LocalELBO(Adam(0.05), num_steps=4, batch_size=2)
# Of groups of as many rows each, which a device visits side by side.
_EVEN = LocalELBO(Adam(0.05), num_steps=2)
CASES = {
    "gradient": (logistic, _FULL, NaturalGradient(), Synchronous()),
    "gradient, one by one": (logistic, _FULL, NaturalGradient(), Sequential()),
    "gradient, diagonal": (logistic, _DIAGONAL, NaturalGradient(num_steps=2), Synchronous()),
    "numbers of rows": (logistic, _FULL, NaturalGradient(sites="rows"), Synchronous()),
    "numbers of rows, one by one": (linear, _FULL, NaturalGradient(sites="rows"), Sequential()),
    "quadratic": (linear, _FULL, NaturalGradient(), Synchronous()),
    "draws": (scaled, _DIAGONAL, NaturalGradient(), Synchronous()),
    "optimiser": (logistic, _FULL, LocalELBO(Adam(0.05), num_steps=4), Synchronous()),
    "optimiser, even groups": (logistic, _FULL, _EVEN, Synchronous()),
    "optimiser, batches": (logistic, _DIAGONAL, _BATCHES, Sequential()),
    "optimiser, some groups": (linear, _FULL, _BATCHES, StochasticSubset(2)),
    "moments": (logistic, _FULL, PowerEP(), Synchronous()),
    "moments, rows": (logistic, _DIAGONAL, PowerEP(factors="row"), Sequential()),
    "double loop": (logistic, _DIAGONAL, SNEP(), Synchronous()),
    "own latents": (own_effects, _FULL, NaturalGradient(), Synchronous()),
    "own latents, one by one": (own_effects, _DIAGONAL, NaturalGradient(), Sequential()),
    "own latents, batches": (own_effects, _DIAGONAL, _BATCHES, Sequential()),
    "own latents, optimiser": (own_effects, _FULL, LocalELBO(Adam(0.05), num_steps=4), Synchronous()),
    "own latents, moments": (own_effects, _FULL, PowerEP(), Synchronous()),
    "own latents, one site, one by one": (own_effects, _FULL, StochasticEP(), Sequential()),
    "families": (drawn, _FAMILIES, NaturalGradient(), Synchronous()),
    "families, predictors": (logistic, _FAMILIES, NaturalGradient(), Sequential()),
    "families, own latents": (rates, _FAMILIES, NaturalGradient(), Synchronous()),
    "families, own latents, one by one": (rates, _FAMILIES, NaturalGradient(), Sequential()),
    "families, optimiser, batches": (drawn, _FAMILIES, _BATCHES, Sequential()),
    "families, some groups": (rates, _FAMILIES, NaturalGradient(), StochasticSubset(2)),
    "families, some rows": (
        rates,
        _FAMILIES,
        StochasticNaturalGradient(batch_size=2, num_steps=3),
        StochasticSubset(2),
    ),
    "families, some rows, draws": (drawn, _FAMILIES, StochasticNaturalGradient(batch_size=2), Synchronous()),
    "families, moments": (drawn, _FAMILIES, PowerEP(), Synchronous()),
    "families, moments, rows": (drawn, _FAMILIES, PowerEP(factors="row"), Sequential()),
    "families, double loop": (drawn, _FAMILIES, SNEP(), Synchronous()),
    "families, params": (family_params, _FAMILIES, NaturalGradient(), Synchronous(), Adam(0.05)),
    "params": (with_params, _FULL, NaturalGradient(), Synchronous(), Adam(0.05)),
}
# Of every way to divide the work one: passes, visits side by side, visits one by one, own latents; rows looked up.
FEW = (
    "gradient",
    "numbers of rows",
    "optimiser",
    "optimiser, batches",
    "own latents, one by one",
    "families, some rows",
)
ON_TWO, EVEN, NUMBERED = "families, own latents, one by one", "optimiser, even groups", "numbers of rows"
IN_PROCESSES = ("optimiser, batches",)


def build(case, runtime):
    """The fit and its arguments."""
    model, guide, solver, schedule, *optim = case
    pvi = PVI(
        Partition(model, "data", np.arange(20) % 5 if solver is _EVEN else LABELS, chunk_size=4),
        guide(model),
        *optim,
        solver=solver,
        schedule=schedule,
        runtime=runtime,
    )
    rows = X, DATA.get(model, CLASSES)
    return pvi, tuple(x[:20] for x in rows) if solver is _EVEN else rows


def trajectory(case, runtime, rounds=2):
    """Sites, moves, params and losses of every round."""
    pvi, rows = build(case, runtime)
    state, found = pvi.init(jax.random.key(0), *rows), []
    for _ in range(rounds):
        state, loss = pvi.update(state, *rows)
        own = pvi.solver.factors != "row" and case[1] is _FAMILIES
        sites = state.sites.groups, state.sites.prior, state.sites.local if own else None
        found.append((sites, state.report.move, pvi.get_params(state), loss))
    return jax.device_get(found)


@functools.cache
def reference(name):
    """The trajectory on one device."""
    return trajectory(CASES[name], Vmap())


def gap(name, runtime):
    """The largest difference of a trajectory from Vmap's; NaN where either has one."""
    pairs = zip(jax.tree.leaves(trajectory(CASES[name], runtime)), jax.tree.leaves(reference(name)), strict=True)
    return float(np.max([_furthest(np.asarray(a, float), np.asarray(b, float)) for a, b in pairs]))


def _furthest(a, b):
    with np.errstate(invalid="ignore"):
        return np.max(np.where(a == b, 0.0, np.abs(a - b)), initial=0.0)


def rows_of_fit(case, runtime):
    """The fit, a state, and what its program of rounds takes."""
    pvi, rows = build(case, runtime)
    state = pvi.init(jax.random.key(0), *rows)
    dynamic, static = split_arguments(*pvi._arguments(rows, {}))
    return pvi, placed(pvi._engine, reduced(state, pvi._engine), dynamic, static), static


def compiled_text(case, runtime, spoil=lambda rows: rows):
    """The compiled rounds of a case, and how many rows a device has."""
    pvi, (state, rows), static = rows_of_fit(case, runtime)

    def rounds(rows, state):
        count, tol = np.int32(1), np.asarray(-1.0)
        return run_rounds(pvi._engine, state, spoil(rows), static, count, tol, None, length=1, fine=False)

    return jax.jit(rounds).lower(rows, state).compile().as_text()


def gathers(text):
    """Shapes of what a program gathers from all devices."""
    return sorted(set(re.findall(r"= (\S+?)(?:\{\S*\})? all-gather(?:-start)?\(", text)))


def memory(runtime):
    """Bytes of the rows on every device, of all rows with what fills the shares up, and rows of each."""
    _, (state, rows), _ = rows_of_fit(CASES["gradient"], runtime)
    held = {d.id: 0 for d in jax.devices()}
    for x in (*rows, state.packing.rows, state.packing.mask):
        for shard in x.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    sites = [shard.data.nbytes for x in jax.tree.leaves(state.sites.groups) for shard in x.addressable_shards[:1]]
    return {"held": list(held.values()), "slots": int(state.packing.rows.size), "sites": sum(sites)}


def refusals(runtime):
    """What is said of models that cannot be divided."""
    found = {}
    masked = Partition(logistic, "data", LABELS, mode="mask")
    rows = {
        "masks": (masked, NaturalGradient(), (X, CLASSES)),
        "prior": (Partition(prior_of_rows, "data", LABELS), NaturalGradient(), (X, Y)),
        "prior of families": (Partition(gamma_prior_of_rows, "data", LABELS), NaturalGradient(), (X, COUNTS)),
    }
    for name, (partition, solver, data) in rows.items():
        guide = AutoExponentialFamily if "families" in name else AutoMultivariateNormal
        pvi = PVI(partition, guide(partition.fn), solver=solver, runtime=runtime)
        try:
            pvi.init(jax.random.key(0), *data)
        except PVIError as error:
            found[name] = str(error)
    return found


def arrivals(runtime):
    """Parameters after a group has come and another has been seen again."""
    pvi, (x, y) = build(CASES["gradient"], runtime)
    state = pvi.init(jax.random.key(0), x, y)
    state, _ = pvi.update(state, x, y)
    state = pvi.add_group(state, "new", x[:6] + 1, y[:6], num_steps=2)
    again = LABELS == 1
    state = pvi.revisit(state, 1, x[again], y[again], num_steps=2)
    return np.concatenate([np.ravel(v) for v in jax.tree.leaves(jax.device_get(pvi.get_params(state)))])


def whole_run(runtime):
    """``run``, whose rows are placed once, evidence, and a step under ``jit``."""
    pvi, rows = build(CASES["quadratic"], runtime)
    result = pvi.run(jax.random.key(0), 4, *rows, progress_bar=False)
    state, loss = jax.jit(pvi.update)(result.state, *map(jnp.asarray, rows))
    return [float(result.losses[-1]), float(pvi.log_evidence(result.state, *rows)), float(loss)]


def on_devices_rest():
    """What is left to the full run."""
    runtime = Sharded()
    found = {"gaps": {name: gap(name, runtime) for name in CASES if name not in FEW}}
    found["two devices"] = gap("gradient", Sharded(jax.make_mesh((2,), ("some",), devices=jax.devices()[:2])))
    found["arrivals"] = float(np.max(np.abs(arrivals(runtime) - arrivals(Vmap()))))
    found["run"] = float(np.max(np.abs(np.subtract(whole_run(runtime), whole_run(Vmap())))))
    return found


def lanes():
    """How far groups that are visited side by side are from their own, where one device has more of them than it has lanes."""
    runtime, numbers, owner = Sharded(), jnp.arange(7.0), jnp.array([0, 0, 1, 0, 0, 0, 0])
    keys = jax.random.split(jax.random.key(0), 7)

    def visit(number, key):
        return {"square": number**2, "key": key}

    def on_one():
        here = owner == jax.lax.axis_index("rows")
        found = runtime.within.map_groups(visit, (numbers, keys), True, True, here)
        return found["square"][None], jax.random.key_data(found["key"])[None]

    spec = jax.sharding.PartitionSpec("rows")
    mapped = jax.shard_map(on_one, mesh=runtime.devices, in_specs=(), out_specs=(spec, spec), check_vma=False)
    squares, data = jax.jit(mapped)()
    here = owner == jnp.arange(2)[:, None]
    gaps = squares - jnp.where(here, numbers**2, 0), data - jnp.where(here[..., None], jax.random.key_data(keys), 0)
    return float(max(jnp.max(jnp.abs(x.astype(float))) for x in gaps))


def on_two():
    """What the quickest tests ask of two devices, and planted faults: rows' sites as one device has them, one step of lanes."""
    found = {"gap": max(gap(name, Sharded()) for name in (ON_TWO, EVEN, NUMBERED)), "lanes": lanes()}
    with mock.patch("jax.lax.dynamic_slice_in_dim", lambda x, start, size: x[:size]):
        found["planted step"] = lanes()
    with mock.patch.object(SomeRows, "_of_all", lambda problem, local: local):
        found["planted rows"] = gap(ON_TWO, Sharded(batch_bytes=1 << 20))
    with mock.patch("numpyro_pvi.runtime._row_problem.places_of_elements", _in_the_order_of_slots):
        found["planted places"] = gap(NUMBERED, Sharded(batch_bytes=1 << 18))
    return found


def on_devices():
    """What one process with several devices is asked."""
    runtime = Sharded()
    found = {"gaps": {name: gap(name, runtime) for name in FEW}}
    few = "gradient", "numbers of rows", "optimiser, batches", "families, some rows"
    texts = {name: compiled_text(CASES[name], runtime) for name in few}
    found["gathers"] = {name: gathers(text) for name, text in texts.items()}
    found["sums"] = {name: " all-reduce" in text for name, text in texts.items()}
    everywhere = jax.sharding.NamedSharding(runtime.devices, jax.sharding.PartitionSpec())
    spoilt = compiled_text(
        CASES["gradient"],
        runtime,
        lambda rows: [jax.lax.with_sharding_constraint(jnp.sin(x), everywhere) if x.ndim > 1 else x for x in rows],
    )
    found["planted gather"] = gathers(spoilt)
    found["memory"] = memory(runtime)
    found["refusals"] = refusals(runtime)
    with mock.patch("numpyro_pvi.runtime._sharded._total", lambda x, axis: x):
        found["planted sum"] = gap("gradient", Sharded(batch_bytes=1 << 20))
    checked = functools.partial(_with_check, jax.shard_map)
    with mock.patch("jax.shard_map", checked):
        try:
            found["planted check"] = gap("optimiser", Sharded(batch_bytes=1 << 19))
        except (ValueError, TypeError):
            found["planted check"] = None
    return found


def _in_the_order_of_slots(packing, terms, data, count):
    """Rows taken for those that stand first among all."""
    return jnp.where(packing.mask.reshape(-1), jnp.arange(packing.mask.size), count)


def _with_check(shard_map, *args, **settings):
    return shard_map(*args, **{**settings, "check_vma": True})


def on_processes(port, rank):
    """A few of the same in one of two processes."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    found = {"devices": [jax.local_device_count(), jax.device_count()]}
    found["gaps"] = {name: gap(name, Sharded()) for name in IN_PROCESSES}
    _, (_, rows), _ = rows_of_fit(CASES["gradient"], Sharded())
    found["here"] = [sum(s.data.shape[0] for s in x.addressable_shards) / x.shape[0] for x in rows]
    return found


if __name__ == "__main__":
    # As in conftest.py: looking through what lives as long as the process is a tenth of the time of tracing.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    jax.config.update("jax_enable_x64", True)
    ask = {"two": on_two, "few": on_devices, "rest": on_devices_rest, "processes": on_processes}[sys.argv[1]]
    answer = ask(*map(int, sys.argv[2:]))
    print(json.dumps(answer))
