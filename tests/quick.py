"""How the suite compiles, in this process and in those that tests start: ``NUMPYRO_PVI_TEST_QUICK`` of conftest.py."""

import os

import jax

# XLA reads its flags once, when a process makes its first device. By itself it cuts a program into up to 32 parts:
# where each core has a worker of its own, a whole one takes an eighth less of its time.
WHOLE = "--xla_cpu_parallel_codegen_split_count=1"
FLAGS = f"--xla_cpu_use_fusion_emitters=false {WHOLE}"
# Whether this XLA knows those flags ("0": it does): one process asks, for all workers.
ASKED = "NUMPYRO_PVI_TEST_FLAGS"


def environment(flags=""):
    """That of a process which is to compile as this one does; flags: XLA's, beside those."""
    quick = bool(jax.config.values["jax_disable_most_optimizations"])
    known = quick and os.environ.get(ASKED) == "0"
    before = os.environ.get("XLA_FLAGS", "")
    return os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick)),
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": str(jax.config.values["jax_traceback_in_locations_limit"]),
        "XLA_FLAGS": " ".join(part for part in (before, flags, FLAGS * known) if part),
    }
