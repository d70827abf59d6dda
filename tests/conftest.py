"""What every test shares: precision, checked annotations, and which tests run.

Environment switches, all on unless set to 0:

* ``NUMPYRO_PVI_TEST_X64``: the suite runs in float64; 0 leaves JAX's float32 (``make test-float32`` runs the laws so).
* ``NUMPYRO_PVI_TEST_TYPES``: jaxtyping annotations of the package are enforced by beartype while the tests run.
* ``NUMPYRO_PVI_TEST_QUICK``: XLA leaves out its expensive optimisations and its fusion emitters, because compiling tiny
  programs is what the suite spends its time on (less than half of it cold). With 0 programs are those that users run; examples
  and documentation always are.
"""

import functools
import gc
import itertools
import os
import pathlib
import subprocess
import sys
import time
import zlib
from unittest import mock

import jax
import numpy as np
import pytest

from tests import quick

X64 = os.environ.get("NUMPYRO_PVI_TEST_X64", "1") != "0"
QUICK = os.environ.get("NUMPYRO_PVI_TEST_QUICK", "1") != "0"
HERE = pathlib.Path(__file__).parent
_MOST_MAPS = 35_000
_TESTS = itertools.count()
# Seconds from which a late run has only the first of every test's sets of parameters.
_VERY_LATE = 1200
# What a late run skips: tests that whole.txt lists, and all sets of parameters but a test's first.
_LISTED, _LATER_SETS = pytest.StashKey[set](), pytest.StashKey[set]()

if os.environ.get("NUMPYRO_PVI_TEST_TYPES", "1") != "0":
    from jaxtyping import install_import_hook

    import tests._typecheck  # noqa: F401 - the hook looks it up by this name

    # The hook only reaches modules that are imported after it; it lives as long as the session.
    install_import_hook("numpyro_pvi", "tests._typecheck.check")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--sample",
        action="store_true",
        help="of n sets of a test's parameters only about n ** .4, evenly over them, and one where all are in whole.txt",
    )
    parser.addoption("--brief", action="store_true", help="as --sample, and nothing that whole.txt lists")
    parser.addoption(
        "--turn",
        metavar="K/N",
        help="with --sample: what --first leaves out, of the files alone whose turn it is, one in N; all files in N turns",
    )
    parser.addoption("--first", action="store_true", help="as --brief, of a test's sets of parameters the first alone")
    parser.addoption(
        "--late-from",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="time since 1970 from which tests are skipped that --brief leaves out, and 20 minutes later those that --first does",
    )


def pytest_configure(config):
    jax.config.update("jax_enable_x64", X64)
    jax.config.update("jax_disable_most_optimizations", QUICK)
    _set_flags(quick.FLAGS if QUICK else quick.WHOLE)
    if QUICK:
        # Where an operation came from is written into every program, for nobody to read.
        jax.config.update("jax_traceback_in_locations_limit", 0)


def _set_flags(wanted):
    """Sets XLA's flags for this process alone: it reads them when its first device is made, and only children that ask see them."""
    before = os.environ.get("XLA_FLAGS")
    flags = {**os.environ, "XLA_FLAGS": f"{before or ''} {wanted}".strip()}
    if quick.ASKED not in os.environ:
        # An XLA that no longer knows one ends the process: another one asks it, once for all workers.
        asked = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=flags, capture_output=True)
        os.environ[quick.ASKED] = str(asked.returncode)
    if os.environ[quick.ASKED] != "0":
        return
    os.environ["XLA_FLAGS"] = flags["XLA_FLAGS"]
    jax.devices()
    if before is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = before


def pytest_runtest_setup(item):
    late = time.time() - item.config.getoption("--late-from")
    if (late > 0 and item in item.config.stash[_LISTED]) or (
        late > _VERY_LATE and item in item.config.stash[_LATER_SETS]
    ):
        pytest.skip(
            "the run is late, and a smaller test or set of parameters holds the same law: `make test-all` has this one"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the laws, and leaves out what is marked slow, or in float32 once, unless --slow, -m or a node id asks for it."""
    for item in items:
        if HERE / "laws" in item.path.parents:
            item.add_marker(pytest.mark.laws)
    heavy, sampled = map(set, listed_as_whole())
    config.stash[_LISTED] = _named(items, heavy | sampled)
    config.stash[_LATER_SETS] = _beyond_the_first([item for item in items if item not in config.stash[_LISTED]])
    named = any("::" in argument for argument in config.args)
    if config.getoption("--slow") or "slow" in config.getoption("-m") or named:
        return
    marks = ("slow", *(() if X64 else ("once",)))
    left = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    brief = config.getoption("--brief") or config.getoption("--first")
    if brief or config.getoption("--sample"):
        left |= _beyond_a_sample([item for item in items if item not in left])
    _refuse_unknown(heavy | sampled, items)
    if brief:
        left |= config.stash[_LISTED]
    elif config.getoption("--sample"):
        left |= _heavy_beyond_one([item for item in items if item not in left], _named(items, heavy))
        rest = config.stash[_LISTED] | config.stash[_LATER_SETS]
        left |= {item for item in rest if not has_its_turn(item, config.getoption("--turn"))}
    if config.getoption("--first"):
        left |= _beyond_the_first([item for item in items if item not in left])
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@functools.cache
def listed_as_whole():
    """The node ids of ``whole.txt``: those of which a sample has one where no other is left, and those that it has all of."""
    heavy, sampled = (HERE / "whole.txt").read_text().split("[sampled]\n")
    return [
        [line.strip() for line in part.splitlines() if line.strip() and not line.startswith("#")]
        for part in (heavy, sampled)
    ]


def _named(items, listed):
    """The tests that are listed, by their own id or all sets of parameters at once."""
    return {item for item in items if {item.nodeid, item.nodeid.partition("[")[0]} & listed}


def _refuse_unknown(listed, items):
    """A test that was renamed would come back unseen, and so would one of its sets of parameters."""
    known = {name for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    files = {name.partition("::")[0] for name in known}
    gone = sorted(name for name in listed - known if name.partition("::")[0] in files)
    if gone:
        raise pytest.UsageError(f"tests/whole.txt lists what is not there: {', '.join(gone)}")


def has_its_turn(item, turn):
    """Whether a run with ``--turn`` has more of an item's file than ``--first`` has: tests of a file share fits."""
    if turn is None:
        return True
    number, count = map(int, turn.split("/"))
    return zlib.crc32(item.nodeid.partition("::")[0].encode()) % count == number % count


def _beyond_a_sample(items):
    """All but about n ** .4 of the n sets of parameters of every test, taken evenly, the first and the last among them."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set()
    for sets in tests.values():
        count = len(sets) if len(sets) <= 2 else round(len(sets) ** 0.4)
        kept = {round(i * (len(sets) - 1) / max(count - 1, 1)) for i in range(count)}
        left |= {item for i, item in enumerate(sets) if i not in kept}
    return left


def _beyond_the_first(items):
    """All sets of parameters of a test but its first."""
    seen, left = set(), set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in seen:
            left.add(item)
        seen.add(test)
    return left


def _heavy_beyond_one(items, heavy):
    """The heavy sets of parameters of tests that have a light one; of tests whose sets are all heavy, all but the first."""
    seen, left = {item.nodeid.partition("[")[0] for item in items if item not in heavy}, set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item in heavy and test in seen:
            left.add(item)
        seen.add(test)
    return left


def pytest_collection_finish(session):
    """Keeps the collector off what lives as long as the session: looking through it is a tenth of the time of tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def pytest_runtest_teardown(item):
    """Frees compiled programs before they are too many."""
    # Linux gives a process 65,530 memory maps and every compiled program takes some: a worker that has compiled a thousand
    # of them dies inside the compiler.
    # Looked at after every tenth test: reading tens of thousands of lines takes as long as a small test.
    maps = pathlib.Path("/proc/self/maps")
    if next(_TESTS) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def evaluate_looks():
    """``evaluate`` looks at the rows itself: laws compare it with losses of rounds, which it would have from these otherwise."""
    # Imported here, once annotations are checked.
    from numpyro_pvi._verified import LastLook

    known = LastLook.loss
    with mock.patch.object(LastLook, "loss", lambda *_: None):
        yield LastLook, known


@pytest.fixture
def known_losses(evaluate_looks):
    """``evaluate`` as users have it, which goes by what the last round has found."""
    owner, known = evaluate_looks
    with mock.patch.object(owner, "loss", known):
        yield


@pytest.fixture
def rng_key():
    """The same key in every test."""
    return jax.random.key(0)


@pytest.fixture
def rng():
    """The same NumPy generator in every test."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def x64():
    """Whether this session runs in float64."""
    return X64


@pytest.fixture(scope="session")
def tolerance():
    """Relative tolerance for quantities that are equal up to rounding: 1e-10 in float64, 1e-4 in float32."""
    return 1e-10 if X64 else 1e-4
