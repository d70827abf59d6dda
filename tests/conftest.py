"""What every test shares: precision, checked annotations, and which tests run.

Environment switches, all on unless set to 0:

* ``NUMPYRO_PVI_TEST_X64``: the suite runs in float64; 0 leaves JAX's float32 (``make test-float32`` runs the laws so).
* ``NUMPYRO_PVI_TEST_TYPES``: jaxtyping annotations of the package are enforced by beartype while the tests run.
* ``NUMPYRO_PVI_TEST_QUICK``: XLA leaves out its expensive optimisations, because compiling tiny programs is what the suite
  spends its time on (a third less of it cold). With 0 programs are those that users run; examples and documentation always are.
"""

import gc
import os
import pathlib

import jax
import numpy as np
import pytest

X64 = os.environ.get("NUMPYRO_PVI_TEST_X64", "1") != "0"
QUICK = os.environ.get("NUMPYRO_PVI_TEST_QUICK", "1") != "0"
HERE = pathlib.Path(__file__).parent
_MOST_MAPS = 35_000

if os.environ.get("NUMPYRO_PVI_TEST_TYPES", "1") != "0":
    from jaxtyping import install_import_hook

    import tests._typecheck  # noqa: F401 - the hook looks it up by this name

    # The hook only reaches modules that are imported after it; it lives as long as the session.
    install_import_hook("numpyro_pvi", "tests._typecheck.check")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config):
    jax.config.update("jax_enable_x64", X64)
    jax.config.update("jax_disable_most_optimizations", QUICK)


def pytest_collection_modifyitems(config, items):
    """Marks the laws, and leaves out what is marked slow, or in float32 once, unless --slow, -m or a node id asks for it."""
    for item in items:
        if HERE / "laws" in item.path.parents:
            item.add_marker(pytest.mark.laws)
    named = any("::" in argument for argument in config.args)
    if config.getoption("--slow") or "slow" in config.getoption("-m") or named:
        return
    marks = ("slow",) if X64 else ("slow", "once")
    left = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_runtest_teardown(item):
    """Frees compiled programs before they are too many."""
    # Linux gives a process 65,530 memory maps and every compiled program takes some: a worker that has compiled a thousand
    # of them dies inside the compiler.
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


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
