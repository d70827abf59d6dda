"""Law 8 on several devices and in several processes: the trajectory is Vmap's, rows stay where they were put."""

import dataclasses
import json
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from numpyro_pvi.errors import PVIError
from numpyro_pvi.factors import even_packing, pack_rows
from numpyro_pvi.handlers import numbered_table
from numpyro_pvi.runtime import Sharded
from tests import quick

ROOT = pathlib.Path(__file__).parents[1]
# Rounding of sums in another order, in float64.
ROUNDING = 1e-10


def start(devices, *words):
    """A process with so many devices, which compiles as quickly as this one."""
    environment = quick.environment(f"--xla_force_host_platform_device_count={devices}") | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.sharded_worker", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def answers(*processes, limit=400):
    """What they print, as long as they are done in time."""
    try:
        found = [process.communicate(timeout=limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), found[0][1][-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


@pytest.fixture(scope="module")
def two():
    """Two devices in one process."""
    (found,) = answers(start(2, "two"))
    return found


def test_trajectories_on_two_devices_are_those_of_one(two):
    """Families with latents of the rows' own, groups that a device visits side by side, and numbers of the rows.

    Planted: sites that one device keeps to itself, and visits that end with the first groups that fit beside one another.
    """
    assert two["gap"] <= ROUNDING and two["lanes"] == 0.0
    assert two["planted rows"] > 0.01 and two["planted step"] > 1.0


def test_numbers_that_are_told_of_other_rows_are_seen(two):
    """The planted fault: every device takes its rows for those that stand first."""
    assert two["planted places"] > 0.01


@pytest.fixture(scope="module")
def few():
    """Eight devices in one process."""
    (found,) = answers(start(8, "few"))
    return found


def test_trajectories_on_eight_devices_are_those_of_one(few):
    """Also with an optimiser that starts from constants, whose gradients a check of varying axes would sum over the devices."""
    assert len(few["gaps"]) == 6 and max(few["gaps"].values()) <= ROUNDING, few["gaps"]


def test_a_sum_that_leaves_a_device_out_is_seen(few):
    """The planted fault: each device adds up its own chunks and no others'."""
    assert few["planted sum"] > 0.01


def test_gradients_that_are_summed_unasked_are_seen(few):
    """The planted fault: with JAX's check of varying axes an optimiser's steps are refused, or not those of the group."""
    assert few["planted check"] is None or few["planted check"] > 0.01


def test_no_row_is_gathered(few):
    """In the compiled rounds nothing is gathered from all devices and messages are summed; a gather that is planted is seen."""
    # Which chunks have rows at all is told to every device.
    none: dict = {name: [] for name in ("gradient", "numbers of rows", "optimiser, batches")}
    assert few["gathers"] == {**none, "families, some rows": ["pred[16]"]}
    assert all(few["sums"].values())
    assert few["planted gather"] == ["f64[48,2]"]


def test_a_device_has_its_share_of_the_rows(few):
    """X and y of its slots (24 bytes each), and where these stand (5 bytes): an eighth each, whatever the groups' sizes."""
    memory = few["memory"]
    assert memory["held"] == [memory["slots"] // 8 * (24 + 5)] * 8
    # Five sites of two by two and two numbers.
    assert memory["sites"] == 5 * 6 * 8


def test_what_cannot_be_divided_is_refused_with_what_to_write(few):
    found = few["refusals"]
    assert "with masks" in found["masks"] and "runtime=Vmap()" in found["masks"]
    assert found["prior"] == found["prior of families"]
    assert "X.std()" in found["prior"] and "argument of its own" in found["prior"]


@pytest.mark.slow
def test_every_way_of_dividing_the_work():
    """All other cases, a mesh of two devices, groups that come and are seen again, `run`, evidence and `jit`."""
    (found,) = answers(start(8, "rest"), limit=900)
    assert len(found["gaps"]) == 24 and max(found["gaps"].values()) <= ROUNDING, found["gaps"]
    assert max(found["two devices"], found["arrivals"], found["run"]) <= ROUNDING, found


def test_two_processes_have_half_of_the_rows_each_and_the_same_trajectory():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = answers(*(start(2, "processes", port, rank) for rank in range(2)))
    for answer in found:
        assert answer["devices"] == [2, 4] and answer["here"] == [0.5, 0.5]
        assert max(answer["gaps"].values()) <= ROUNDING, answer["gaps"]


def test_senseless_meshes_are_refused():
    for mesh in ("rows", 8, jax.make_mesh((1, 1), ("a", "b"))):
        with pytest.raises(PVIError, match="make_mesh"):
            Sharded(mesh)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sizes", [(9, 5, 4, 3, 2), (1, 1, 1), (30,)], ids=["unequal", "few", "one"])
def test_packings_fall_into_even_parts(sizes, whole):
    """Every row once, groups in order, and where it is asked for no group in two parts; laid out again nothing changes."""
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    table = dataclasses.replace(numbered_table(sizes), index_of_row=index)
    packing = even_packing(pack_rows(table, 4), 4, whole)
    rows, mask, group = (np.asarray(x) for x in (packing.rows, packing.mask, packing.chunk_group))
    assert len(rows) % 4 == 0 and sorted(rows[mask]) == list(range(sum(sizes)))
    assert np.all(np.diff(group) >= 0) and np.all(np.repeat(group[:, None], 4, 1)[mask] == index[rows[mask]])
    np.testing.assert_array_equal(packing.offsets, np.searchsorted(group, np.arange(len(sizes) + 1)))
    parts = [set(g[m.any(1)]) for g, m in zip(np.split(group, 4), np.split(mask, 4), strict=True)]
    if whole:
        assert sum(map(len, parts)) == len(sizes)
    assert even_packing(packing, 4, whole) is packing


def test_the_page_says_the_command_that_runs_it():
    text = (ROOT / "docs" / "several_devices.md").read_text()
    assert re.search(r"xla_force_host_platform_device_count=8", text) and "python -m benchmarks sharding" in text
