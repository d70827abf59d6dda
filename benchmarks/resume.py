"""``resume``: a run that keeps a file is killed with kill -9 at random moments; every file must go on, to the same bits.

One process runs without interruption and leaves a digest of every round's state. Then fresh processes run the same command,
one after another, each from the file of the last; each is killed at a random moment between its start and its end. After every
kill the file is read by a fresh PVI, and its state, losses and round are held against the digests; a run that has reached its
end is compared and begun anew.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import _models, _report

ROUNDS = 400
_KEY = 5


class Unbroken(NamedTuple):
    """The run that nobody stopped: a digest per round (the start included), and its losses."""

    digests: list[str]
    losses: Any


def make(data: Any) -> Any:
    """A fresh PVI: 20 groups, random sweeps, so that the key matters as well."""
    from numpyro.infer.autoguide import AutoMultivariateNormal

    from numpyro_pvi import PVI, Partition
    from numpyro_pvi.schedules import Sequential

    guide = AutoMultivariateNormal(_models.logistic)
    return PVI(Partition(_models.logistic, "data", data.labels), guide, schedule=Sequential("random", damping=0.02))


def simulate() -> Any:
    """500 rows, 5 columns, 20 groups."""
    return _models.simulate_logistic(500, 5, 20)


def digest(state: Any) -> str:
    """SHA-256 of every array of a state."""
    import hashlib

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes())
    return found.hexdigest()


def unbroken(data: Any, rounds: int) -> Unbroken:
    """Run to the end in this process."""
    pvi, found = make(data), {}
    start = pvi.init(jax.random.key(_KEY), data.X, data.y)
    result = pvi.run(
        jax.random.key(_KEY),
        rounds,
        data.X,
        data.y,
        init_state=start,
        progress_bar=False,
        callback=lambda i, state, _: found.update({i: digest(state)}),
    )
    return Unbroken([digest(start), *(found[i + 1] for i in range(rounds))], np.asarray(result.losses))


def start(path: pathlib.Path, rounds: int, cache: str) -> subprocess.Popen:
    """The command that is killed, in a process of its own."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "benchmarks.resume", str(path), str(rounds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def fault(path: pathlib.Path, data: Any, whole: Unbroken) -> tuple[int, str]:
    """How many rounds a file has, and what is wrong with it; nothing where it is a prefix of the unbroken run."""
    from numpyro_pvi import CheckpointError
    from numpyro_pvi._saving import load_state

    if not path.exists():
        return -1, ""
    try:
        loaded = load_state(path, make(data))
    except CheckpointError as error:
        return -1, str(error)
    done, losses = int(loaded.state.step), loaded.run["losses"]
    if digest(loaded.state) != whole.digests[done]:
        return done, f"another state after round {done}"
    if losses.tobytes() != whole.losses[:done].tobytes():
        return done, f"other losses up to round {done}"
    return done, ""


def run(options: argparse.Namespace) -> _report.Report:
    """Kills, reads, compares."""
    report = _report.Report("resume")
    kills = options.kills or (3 if options.quick else 50)
    data, rng = simulate(), np.random.default_rng(0)
    whole = unbroken(data, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.pvi"
        begun = time.perf_counter()
        status = start(path, ROUNDS, folder + "/cache").wait()
        warm = time.perf_counter()
        start(path, 1, folder + "/cache").wait()
        startup, length = time.perf_counter() - warm, warm - begun
        faults = (
            [] if status == 0 and fault(path, data, whole) == (ROUNDS, "") else ["the first process did not finish"]
        )
        rows, finished, before, leftovers = [], 0, -1, 0
        path.unlink(missing_ok=True)
        while len(rows) < kills:
            child = start(path, ROUNDS, folder + "/cache")
            # A quarter of the moments fall before rounds run, where the process starts, reads and compiles.
            early = rng.random() < 0.25
            after = rng.uniform(0.3 * startup, startup) if early else rng.uniform(startup, max(length, startup + 1.0))
            try:
                child.wait(timeout=after)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
                done, wrong = fault(path, data, whole)
                rows.append((len(rows) + 1, after, before, done, wrong or "same bits"))
                faults += [wrong] if wrong or done < before else []
                leftovers = max(leftovers, len(list(path.parent.glob(".run.pvi.*.tmp"))))
                before = done
                if wrong:
                    break
                continue
            done, wrong = fault(path, data, whole)
            finished += child.returncode == 0 and done == ROUNDS and not wrong
            faults += [wrong or "a process failed"] if wrong or child.returncode else []
            path.unlink(missing_ok=True)
            before = -1
    good = sum(row[-1] == "same bits" for row in rows)
    header = ("kill", "after s", "rounds before", "rounds after", "file")
    report.add_table(f"kill -9 of a run of {ROUNDS} rounds, a write a round (-1: no file yet)", header, rows)
    header = ("kills", "resumable, same bits", "runs finished between", "leftover files at most", "faults")
    report.add_table("all of them", header, [(len(rows), good, finished, leftovers, "; ".join(faults) or "none")])
    report.add_target("kills after which the file goes on to the same bits", good - len(faults), kills, at_least=True)
    return report


def main() -> None:
    """What is killed: ``python -m benchmarks.resume PATH ROUNDS``."""
    data = simulate()
    make(data).run(
        jax.random.key(_KEY),
        int(sys.argv[2]),
        data.X,
        data.y,
        checkpoint=sys.argv[1],
        checkpoint_every=1,
        progress_bar=False,
    )


if __name__ == "__main__":
    main()
