"""Checkpoints: what is written comes back to the bit, and nothing else is ever taken for it."""

import copy
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, AutoExponentialFamily, CheckpointError, Partition, PVIError, StateError
from numpyro_pvi._checkpoint import VERSION, read_checkpoint, write_checkpoint
from numpyro_pvi.families import BernoulliFamily, CategoricalFamily
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import Conjugate, LocalELBO
from tests import quick

ROOT = pathlib.Path(__file__).parents[1]
KEY = jax.random.key(0)
X = np.random.default_rng(1).normal(size=(12, 2))
Y = X @ np.array([1.0, -0.5]) + 0.3 * np.cos(np.arange(12))
LABELS = np.array(["north", "south", "east"])[np.arange(12) % 3]


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 0.5), obs=y)


def wider(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(b + X @ w, 0.5), obs=y)


def make(model=model, guide=AutoMultivariateNormal, labels=LABELS, **options):
    options = {"solver": Conjugate(), "schedule": Synchronous(damping=0.5)} | options
    return PVI(Partition(model, "data", labels), guide(model), **options)


@pytest.fixture(scope="module")
def fitted():
    pvi = make()
    return pvi, pvi.run(KEY, 2, X, Y, progress_bar=False).state


@pytest.fixture
def file(fitted, tmp_path):
    pvi, state = fitted
    pvi.save(tmp_path / "fit.pvi", state)
    return tmp_path / "fit.pvi"


ORDER = np.argsort(LABELS, kind="stable")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            LABELS[ORDER],
            r"row 0 belongs to group 'north' in the state and to 'east' in this PVI's Partition \(9 of 12 rows",
        ),
        (
            np.where(LABELS == "east", "west", LABELS),
            r"the state has group\(s\) 'east' and this PVI's Partition has 'west'",
        ),
    ],
    ids=["order", "names"],
)
def test_labels_of_other_rows_are_refused(fitted, file, labels, words):
    """Rows in another order, under labels that fit them, would be taken for other groups' rows without a word."""
    other = make(labels=labels)
    with pytest.raises(CheckpointError, match=words):
        other.load(file)
    with pytest.raises(StateError, match=words):
        other.run(KEY, 1, X[ORDER], Y[ORDER], init_state=fitted[1], progress_bar=False)


def test_labels_of_rows_to_come_are_not(fitted, file):
    """Tomorrow's batch, as large as all rows of the file, or of another size with a label that is known."""
    pvi, state = fitted
    for labels in (np.repeat(["today", "tomorrow"], 6), LABELS[:5]):
        assert make(labels=labels).load(file).groups == state.groups
    assert make(labels=list(LABELS)).load(file).groups == state.groups
    assert PVI(model, AutoMultivariateNormal(model), solver=pvi.solver, schedule=pvi.schedule).load(file)


def leaves(state):
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        kind = str(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path)] = kind, leaf.shape, np.asarray(leaf).tobytes()
    return found


def same(a, b):
    return leaves(a) == leaves(b) and a.plan == b.plan and jax.tree.structure(a) == jax.tree.structure(b)


# ------------------------------------------------------------------------------------------------------------- the file


def test_every_dtype_comes_back(tmp_path):
    names = ["bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64", "complex128"]
    arrays = [(name, np.arange(6).reshape(2, 3).astype(jnp.dtype(name))) for name in names]
    arrays += [("scalar", np.array(-0.0)), ("empty", np.zeros((0, 3), np.float32)), ("nan", np.array([np.nan, np.inf]))]
    write_checkpoint(tmp_path / "a", {"x": "\N{SNOWMAN}"}, arrays)
    header, found = read_checkpoint(tmp_path / "a")
    assert header["x"] == "\N{SNOWMAN}"
    for (name, wanted), got in zip(arrays, found, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), name


@pytest.mark.parametrize("array", [np.array([{}], object), np.array(["a"]), np.zeros(2, "datetime64[s]")])
def test_what_is_no_number_is_not_written(tmp_path, array):
    with pytest.raises(CheckpointError, match="thing has dtype .* cannot hold"):
        write_checkpoint(tmp_path / "a", {}, [("thing", array)])
    assert list(tmp_path.iterdir()) == []


def test_flipped_bytes_never_pass(file, fitted):
    pvi, state = fitted
    whole, rng = file.read_bytes(), np.random.default_rng(7)
    for _ in range(150):
        spoilt = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 4)):
            spoilt[place] ^= int(rng.integers(1, 256))
        file.write_bytes(spoilt)
        if bytes(spoilt) == whole:
            continue
        with pytest.raises(CheckpointError, match="corrupted|no checkpoint"):
            pvi.load(file)
    file.write_bytes(whole)
    assert same(pvi.load(file), state)


def test_cut_files_never_pass(file):
    whole = file.read_bytes()
    for length in {0, 1, 7, 8, 20, 63, 64, 65, *np.random.default_rng(8).integers(len(whole), size=60).tolist()}:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated" if length else "empty"):
            read_checkpoint(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="corrupted: 1 bytes follow its end"):
        read_checkpoint(file)


def crafted(header: bytes, numbers: bytes = b"", version: int = VERSION) -> bytes:
    """A file with right checksums, made here and not by the package."""
    first = struct.pack("<8sIIQQ", b"\x89PVI\r\n\x1a\n", version, 0, len(header), len(numbers))
    body = first + hashlib.sha256(first).digest() + header + numbers
    return body + hashlib.sha256(body).digest()


def test_other_versions_are_said_to_be_newer_or_older(file):
    file.write_bytes(crafted(b"whatever it holds", version=VERSION + 1))
    with pytest.raises(CheckpointError, match="format 3, newer than the 2"):
        read_checkpoint(file)
    file.write_bytes(crafted(b"whatever it holds", version=1))
    with pytest.raises(CheckpointError, match="format 1, which does not say what model it was made with"):
        read_checkpoint(file)


@pytest.mark.parametrize(
    "header",
    [
        b'{"arrays": [["a", "float64", [1000000000, 1000000000]]]}',
        b'{"arrays": [["a", "float64", [-1]]]}',
        b'{"arrays": [["a", "object", [0]]]}',
        b'{"arrays": [["a", "float64", [true]]]}',
        b'{"arrays": [["a", "bool", [1]]]}',
        b'{"arrays": 3}',
        b'{"arrays": [], "arrays": []}',
        b"[" * 100_000,
        b"\xff",
        b"{}",
    ],
)
def test_senseless_headers_allocate_nothing(file, header):
    file.write_bytes(crafted(header, b"\7" if b"bool" in header else b""))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="corrupted: its header"):
            read_checkpoint(file)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_foreign_files_are_said_to_be_foreign(fitted, tmp_path):
    pvi, path = fitted[0], tmp_path / "other"
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    for contents in ((tmp_path / "other.npz").read_bytes(), np.random.default_rng(0).bytes(500), b"hello"):
        path.write_bytes(contents)
        with pytest.raises(CheckpointError, match="no checkpoint of numpyro_pvi"):
            pvi.load(path)
    with pytest.raises(CheckpointError, match="is no file"):
        pvi.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        pvi.load(tmp_path / "missing")
    path.write_bytes(crafted(b'{"arrays": [], "format": "another"}'))
    with pytest.raises(CheckpointError, match="does not describe a state"):
        pvi.load(path)


def test_links_are_refused_and_files_are_private(file, fitted, tmp_path):
    pvi, state = fitted
    assert file.stat().st_mode & 0o777 == 0o600
    link, other = tmp_path / "link", tmp_path / "other.pvi"
    link.symlink_to(file)
    for act in (lambda: pvi.load(link), lambda: pvi.save(link, state)):
        with pytest.raises(CheckpointError, match="symbolic link, which is not followed"):
            act()
    # A hard link keeps the content it had.
    os.link(file, other)
    before = other.read_bytes()
    write_checkpoint(file, {"new": 1}, [])
    assert other.read_bytes() == before != file.read_bytes()
    for path, message in ((tmp_path, "is no file"), (tmp_path / "no" / "x", "there is no folder"), (3, "write a str")):
        with pytest.raises(CheckpointError, match=message):
            pvi.save(path, state)


def test_leftovers_go_and_other_writers_stay(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "a"
    dead, alive, foreign = (tmp_path / name for name in (".a.12345678.tmp", ".a.abcdefgh.tmp", ".ab.12345678.tmp"))
    for each in (dead, alive, foreign):
        each.write_bytes(b"half a file")
    with alive.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_checkpoint(path, {}, [])
        assert {p.name for p in tmp_path.iterdir()} == {path.name, alive.name, foreign.name}


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    path, arrays = tmp_path / "a", [("x", np.arange(20_000.0))]
    write_checkpoint(path, {"writer": -1}, arrays)
    faults = []

    def write(number):
        for _ in range(10):
            try:
                write_checkpoint(path, {"writer": number}, arrays)
            except CheckpointError as error:
                faults.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        np.testing.assert_array_equal(read_checkpoint(path).arrays[0], arrays[0][1])
    assert faults == [] and [p.name for p in tmp_path.iterdir()] == ["a"]


# ------------------------------------------------------------------------------------------------------------ the state


def test_a_fresh_pvi_reads_the_state(file, fitted):
    pvi, state = fitted
    fresh = make()
    loaded = fresh.load(file)
    assert same(loaded, state) and fresh.groups == ("east", "north", "south")
    np.testing.assert_array_equal(fresh.posterior(loaded)["w"].mean, pvi.posterior(state)["w"].mean)
    with pytest.raises(StateError, match="pvi.load"):
        fresh.get_params(loaded)
    assert float(fresh.evaluate(loaded, X, Y)) == float(pvi.evaluate(state, X, Y))
    for name, value in fresh.get_params(loaded).items():
        np.testing.assert_array_equal(value, pvi.get_params(state)[name])


def test_load_with_arguments_sets_the_guide_up(file, fitted):
    pvi, state = fitted
    fresh = make()
    loaded = fresh.load(file, X, Y)
    drawn = [
        Predictive(p.guide, params=p.get_params(s), num_samples=3)(KEY, X)["w"]
        for p, s in ((pvi, state), (fresh, loaded))
    ]
    np.testing.assert_array_equal(*drawn)


def test_supports_travel(tmp_path):
    def bounded(X, y=None):
        s = numpyro.sample("s", dist.HalfNormal(2.0))
        u = numpyro.sample("u", dist.Uniform(-1.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ u, s), obs=y)

    first, second = (make(bounded, solver=None, schedule=None) for _ in range(2))
    state = first.init(KEY, X, Y)
    first.save(tmp_path / "a", state)
    loaded = second.load(tmp_path / "a")
    # A state may be saved again before the guide is set up.
    second.save(tmp_path / "b", loaded)
    third = make(bounded, solver=None, schedule=None)
    loaded = third.load(tmp_path / "b")
    for name in ("s", "u"):
        drawn = [p.posterior(s)[name].sample(KEY, (5,)) for p, s in ((first, state), (third, loaded))]
        np.testing.assert_array_equal(*drawn)


def test_supports_of_discrete_latents_travel(tmp_path):
    """A posterior is read before the guide is set up, whatever q holds."""

    def heads(y):
        p = numpyro.sample("p", dist.Beta(2.0, 2.0))
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Categorical(jnp.stack([p, 1 - p])))
            b = numpyro.sample("b", dist.Bernoulli(p))
            numpyro.sample("y", dist.Normal(jnp.where(z == 0, -1.0, 1.0) + jnp.where(b == 0, -3.0, 3.0), 1.0), obs=y)

    families = {"z": CategoricalFamily(2), "b": BernoulliFamily()}
    first, second = (
        PVI(Partition(heads, "data", 2), AutoExponentialFamily(heads, families=families)) for _ in range(2)
    )
    state = first.init(KEY, np.linspace(-4.0, 4.0, 6))
    first.save(tmp_path / "a", state)
    loaded = second.load(tmp_path / "a")
    for name in ("p", "z", "b"):
        drawn = [p.posterior(s)[name].sample(KEY, (5,)) for p, s in ((first, state), (second, loaded))]
        np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize("key", [jax.random.PRNGKey(5), jax.random.key(5, impl="rbg")], ids=["old", "rbg"])
def test_keys_of_every_kind(tmp_path, fitted, key):
    pvi, state = fitted
    state = dataclasses.replace(state, rng_key=key)
    pvi.save(tmp_path / "a", state)
    loaded = make().load(tmp_path / "a")
    assert same(loaded, state)
    np.testing.assert_array_equal(jax.random.normal(loaded.rng_key, (3,)), jax.random.normal(key, (3,)))


def test_optimiser_state_comes_from_optim(tmp_path):
    def learned(X, y=None):
        sd = numpyro.param("sd", 1.0, constraint=dist.constraints.positive)
        w = numpyro.sample("w", dist.Normal(0.0, sd).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, 0.5), obs=y)

    def fresh(optim):
        return make(learned, optim=optim, solver=None, schedule=None)

    pvi = fresh(numpyro.optim.Adam(0.1))
    state = pvi.run(KEY, 2, X, Y, progress_bar=False).state
    pvi.save(tmp_path / "a", state)
    again = fresh(numpyro.optim.Adam(0.1))
    loaded = again.load(tmp_path / "a", X, Y)
    assert leaves(loaded) == leaves(state)
    assert float(again.get_params(loaded)["sd"]) == float(pvi.get_params(state)["sd"])
    for optim, word in ((None, "optim Adam, but this PVI has None"), (numpyro.optim.SGD(0.1), "this PVI has SGD")):
        with pytest.raises(CheckpointError, match=word):
            fresh(optim).load(tmp_path / "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": LocalELBO()}, "solver Conjugate, but this PVI has LocalELBO"),
        ({"schedule": Sequential()}, "schedule Synchronous, but this PVI has Sequential"),
        ({"schedule": Synchronous()}, r"Synchronous\(damping=0.5\), but this PVI has Synchronous\(damping='auto'\)"),
        ({"guide": AutoDiagonalNormal}, "guide AutoMultivariateNormal, but this PVI has AutoDiagonalNormal"),
        ({"model": wider}, "another model .* it has b more"),
    ],
)
def test_another_pvi_is_refused_by_name(file, options, message):
    with pytest.raises(CheckpointError, match=message):
        make(**options).load(file)


def rewritten(file, change):
    header, arrays = read_checkpoint(file)
    names = [name for name, *_ in header.pop("arrays")]
    change(header)
    write_checkpoint(file, header, list(zip(names, arrays, strict=True)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(x64=not h["x64"]), "bits"),
        (lambda h: h["state"].pop("rule"), "another version .* lacks 'rule'"),
        (lambda h: h["state"].update(novel=None), "has 'novel' more"),
        (
            lambda h: (h["state"]["report"]["fields"].pop("param_gain"), h["versions"].update(numpyro_pvi="0.0.1")),
            r"another version .* RoundReport lacks 'param_gain'. Install 0.0.1 \(this is ",
        ),
        (lambda h: h["state"]["report"].update(type="Popen"), "a Popen, which this PVI"),
        (lambda h: h["state"]["solver_state"].append([".x", 1]), "solver_state .* has '.x' more"),
        (lambda h: h["state"].update(step={"array": 10**6}), "does not describe a state"),
        (lambda h: h["state"].update(step={"eval": "1"}), "does not describe a state"),
        (lambda h: h["state"].update(plan=3), "does not describe a state"),
        (lambda h: h.pop("settings"), "does not describe a state"),
    ],
)
def test_headers_that_do_not_fit_are_refused(file, change, message):
    rewritten(file, change)
    with pytest.raises(CheckpointError, match=message):
        make().load(file)


ODD = (
    None,
    True,
    -1,
    1e300,
    "x",
    [],
    {},
    {"array": 0},
    {"tuple": [1]},
    {"type": "Plan", "fields": {}},
    {"dict": [[1, 2]]},
)
ODD += (
    {"bytes": "zz"},
    {"array": 10**9},
    [[]],
    {"structure": 1},
    {"support": "x"},
    {"key": 0, "implementation": "rbg"},
)


def places(tree, path=()):
    """Every node of a header, the list of its arrays left out."""
    yield path
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, part in inside:
        yield from places(part, (*path, name))


def part_of(header, path):
    for name in path:
        header = header[name]
    return header


def test_made_up_headers_end_in_our_error_or_a_state(file, fitted):
    """Nodes replaced by what is odd, taken away, or exchanged for others, under a checksum that fits: no other error."""
    pvi, rng = fitted[0], random.Random(0)
    known = read_checkpoint(file).header
    known.pop("arrays")
    whole, refused = list(places(known))[1:], 0
    for i in range(120):
        path, other = rng.choice(whole), rng.choice(whole)

        def change(header, path=path, other=other, how=i % 3):
            spot = part_of(header, path[:-1])
            if how == 0:
                spot[path[-1]] = rng.choice(ODD)
            elif how == 1:
                del spot[path[-1]]
            else:
                spot[path[-1]] = copy.deepcopy(part_of(known, other))

        before = file.read_bytes()
        rewritten(file, change)
        try:
            state = pvi.load(file)
        except CheckpointError:
            refused += 1
        else:
            # What was changed is no part of q: the state can be read.
            assert np.isfinite(np.asarray(pvi.get_params(state)["auto_loc"])).all()
        file.write_bytes(before)
    assert refused > 60


@pytest.mark.parametrize(
    "path",
    [3, True, None, "fit\0.pvi", "\ud800.pvi", "x" * 300 + ".pvi", b"a\0b"],
    ids=["int", "bool", "None", "NUL", "surrogate", "long", "bytes with NUL"],
)
def test_what_is_no_path_is_refused(fitted, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    pvi, state = fitted
    calls = [lambda: pvi.save(path, state), lambda: pvi.load(path)]
    if path is not None:
        calls.append(lambda: pvi.run(KEY, 1, X, Y, checkpoint=path, progress_bar=False))
    for call in calls:
        with pytest.raises(CheckpointError, match="path|cannot be"):
            call()
    assert not list(tmp_path.iterdir())


def test_labels_are_text_or_numbers(tmp_path):
    labels = [[("a", 1, True, None), b"x", 2.5, "y"][i % 4] for i in range(12)]
    pvi = make(labels=labels)
    state = pvi.init(KEY, X, Y)
    pvi.save(tmp_path / "a", state)
    table = make(labels=labels).load(tmp_path / "a").plan.partition.table
    assert [repr(x) for x in table.labels] == [repr(x) for x in state.plan.partition.table.labels]


def test_other_labels_are_refused_before_the_first_round(tmp_path):
    pvi = make(labels=[datetime.date(2024, 1, 1 + i % 4) for i in range(12)])
    state = pvi.init(KEY, X, Y)
    for act in (lambda: pvi.save(tmp_path / "b", state), lambda: pvi.run(KEY, 1, X, Y, checkpoint=tmp_path / "b")):
        with pytest.raises(CheckpointError, match=r"group datetime.date\(2024, 1, 1\) is a date"):
            act()
    assert not (tmp_path / "b").exists()


def test_only_states_with_values_are_saved(fitted, tmp_path):
    pvi, state = fitted
    with pytest.raises(StateError, match="expected a PVIState"):
        pvi.save(tmp_path / "a", {"w": 1})
    with pytest.raises(CheckpointError, match="outside jit"):
        jax.jit(lambda s: pvi.save(tmp_path / "a", s))(state)


# ------------------------------------------------------------------------------------------------------------- the runs


def test_the_same_command_finishes_the_run(fitted, tmp_path):
    path, rounds = tmp_path / "run", {"progress_bar": False}
    whole = make().run(KEY, 7, X, Y, **rounds)
    make().run(KEY, 3, X, Y, checkpoint=path, checkpoint_every=2, **rounds)
    seen = []
    rest = make().run(
        KEY, 7, X, Y, checkpoint=path, checkpoint_every=3, callback=lambda i, *_: seen.append(i), loss_every=2, **rounds
    )
    assert same(rest.state, whole.state) and seen == [3, 4, 5, 6, 7]
    assert rest.message == "ran 7 rounds (3 of them before, as the checkpoint has them)"
    np.testing.assert_array_equal(np.asarray(rest.losses)[1::2], np.asarray(whole.losses)[1::2])
    np.testing.assert_array_equal(rest.trace.total_move, whole.trace.total_move)
    done = make().run(KEY, 7, X, Y, checkpoint=path, **rounds)
    assert same(done.state, whole.state) and len(done.losses) == 7


def test_convergence_and_stopping_are_remembered(tmp_path):
    path, rounds = tmp_path / "run", {"progress_bar": False, "checkpoint": tmp_path / "run"}
    first = make().run(KEY, 60, X, Y, tol=1e-3, **rounds)
    second = make().run(KEY, 60, X, Y, tol=1e-3, **rounds)
    assert first.converged and second.converged and len(second.losses) == len(first.losses) < 60
    stop = {"callback": lambda i, *_: i == 4}
    path.unlink()
    assert [len(make().run(KEY, 9, X, Y, **stop, **rounds).losses) for _ in range(2)] == [4, 4]


def test_another_run_s_file_is_refused_and_kept(fitted, tmp_path):
    path = tmp_path / "run"
    make().run(KEY, 2, X, Y, checkpoint=path, progress_bar=False)
    before = path.read_bytes()
    other = dict(zip(("east", "north", "south"), ("south", "east", "north"), strict=True))
    for options, key, data, message in (
        ({}, jax.random.key(1), (X, Y), "other rng_key"),
        ({}, KEY, (X, Y + 1), "other arguments of the model"),
        ({}, KEY, (X[:9], Y[:9]), "other arguments"),
        ({"labels": [other[x] for x in LABELS]}, KEY, (X, Y), "row 0 belongs to group .* in the state"),
        (
            {"labels": ["west" if x == "east" else x for x in LABELS]},
            KEY,
            (X, Y),
            "the state has group.*'east' and this PVI's Partition has 'west'",
        ),
        ({"schedule": Sequential()}, KEY, (X, Y), "schedule Synchronous"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make(**options).run(key, 3, *data, checkpoint=path, progress_bar=False)
    assert path.read_bytes() == before
    pvi, state = fitted
    pvi.save(tmp_path / "state", state)
    with pytest.raises(CheckpointError, match="written by pvi.save and holds no run"):
        make().run(KEY, 3, X, Y, checkpoint=tmp_path / "state", progress_bar=False)
    with pytest.raises(PVIError, match="without checkpoint"):
        make().run(KEY, 3, X, Y, checkpoint_every=2)
    with pytest.raises(PVIError, match="checkpoint_every=0"):
        make().run(KEY, 3, X, Y, checkpoint=path, checkpoint_every=0)


CHILD = """
import sys
import jax
jax.config.update("jax_enable_x64", {x64})
import tests.test_saving as t
run = t.make().run(t.KEY, 2000, t.X, t.Y, checkpoint=sys.argv[1], checkpoint_every=1, progress_bar=False)
print("done", len(run.losses))
"""


def test_killed_at_any_moment_it_goes_on(tmp_path, x64):
    """Three processes are killed while they write a file a round; the file is whole each time, and the run is the same."""
    path = tmp_path / "run"
    # The same bits come from programs compiled alike.
    environment = quick.environment() | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NUMPYRO_PVI_TEST_TYPES": "0"}
    reached, rng = [0], np.random.default_rng(0)
    for _ in range(3):
        command = [sys.executable, "-c", CHILD.format(x64=x64), str(path)]
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while time.monotonic() < until and child.poll() is None:
            if path.exists() and int(make().load(path).step) > reached[-1]:
                break
            time.sleep(0.02)
        time.sleep(float(rng.uniform(0, 0.2)))
        child.send_signal(signal.SIGKILL)
        child.wait()
        reached.append(int(make().load(path).step))
    assert sorted(set(reached)) == reached
    whole = make().run(KEY, reached[-1] + 3, X, Y, progress_bar=False)
    rest = make().run(KEY, reached[-1] + 3, X, Y, checkpoint=path, progress_bar=False)
    assert same(rest.state, whole.state)
    np.testing.assert_array_equal(rest.losses, whole.losses)


def test_headers_are_plain_json(file):
    raw = file.read_bytes()
    length = struct.unpack("<8sIIQQ", raw[:32])[3]
    header = json.loads(raw[64 : 64 + length])
    assert header["settings"]["solver"]["type"] == "Conjugate"
    assert ["sites.groups.precision", str(jnp.zeros(()).dtype), [3, 2, 2]] in header["arrays"]
