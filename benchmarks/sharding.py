"""``sharding``: seconds a round with the rows over 1, 2, 4 and 8 devices that the CPU is told to be, in fresh processes.

With ``--device gpu`` over as many of 1, 2, 4 and 8 as there are.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from benchmarks import _report

DEVICES = (1, 2, 4, 8)


def measure(runtime: str, devices: int, solver: str, rows: int, rounds: int) -> dict[str, float]:
    """A run of so many rounds in a process with so many devices: seconds a round, the last loss, and how many devices there are."""
    environment = dict(os.environ)
    if environment["JAX_PLATFORMS"] == "cpu":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    request = {"runtime": runtime, "devices": devices, "solver": solver, "rows": rows, "rounds": rounds}
    command = [sys.executable, "-m", "benchmarks.sharding", json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{devices} devices failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def fit(request: dict) -> dict[str, float]:
    """What :func:`measure` asks of its process: the second run of a fit, whose programs are compiled."""
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.autoguide import AutoMultivariateNormal
    from numpyro.optim import Adam

    from numpyro_pvi import PVI, Partition
    from numpyro_pvi.runtime import Sharded, Vmap
    from numpyro_pvi.solvers import LocalELBO, NaturalGradient

    rows, dim = request["rows"], 10
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, dim)).astype(np.float32)
    y = (random.uniform(size=rows) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int32)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    solver = NaturalGradient() if request["solver"] == "NaturalGradient" else LocalELBO(Adam(0.02), num_steps=20)
    devices = jax.devices()
    mesh = jax.make_mesh((request["devices"],), ("rows",), devices=devices[: request["devices"]])
    runtime = Vmap() if request["runtime"] == "Vmap" else Sharded(mesh)
    pvi = PVI(
        Partition(model, "data", np.arange(rows) % 16), AutoMultivariateNormal(model), solver=solver, runtime=runtime
    )
    arrays = jax.numpy.asarray(x), jax.numpy.asarray(y)
    state = pvi.init(jax.random.key(0), *arrays)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = pvi.run(jax.random.key(0), request["rounds"], *arrays, progress_bar=False, init_state=state)
        jax.block_until_ready(result.params)
        seconds.append((time.perf_counter() - start) / request["rounds"])
    return {"seconds": min(seconds[1:]), "loss": float(result.losses[-1]), "devices": len(devices)}


def run(options: argparse.Namespace) -> _report.Report:
    """Rounds of passes alone, and of visits that read rows again and again, on every number of devices beside ``Vmap``."""
    report = _report.Report("sharding")
    rows, rounds = (2_000, 4) if options.quick else (100_000, 16)
    table, worst = [], 0.0
    for solver in ("NaturalGradient", "LocalELBO"):
        alone = measure("Vmap", 1, solver, rows, rounds)
        table.append((solver, "Vmap, 1", 1e3 * alone["seconds"], 1.0, 0.0))
        most = max(DEVICES) if options.device == "cpu" else alone["devices"]
        for devices in [number for number in DEVICES if number <= most]:
            found = measure("Sharded", devices, solver, rows, rounds)
            gap = abs(found["loss"] - alone["loss"]) / abs(alone["loss"])
            worst = max(worst, gap)
            table.append(
                (solver, f"Sharded, {devices}", 1e3 * found["seconds"], found["seconds"] / alone["seconds"], gap)
            )
    cores = os.cpu_count() or 1
    threads = f". The devices are threads on {cores} cores: with more devices than cores times say what sharing costs, no more"
    header = ("solver", "runtime, devices", "ms a round", "over Vmap", "gap of the loss")
    report.add_table(
        f"logistic regression, N = {rows:,}, D = 10, M = 16, float32, the faster of two warm runs of {rounds} rounds"
        + (threads if options.device == "cpu" else ""),
        header,
        table,
    )
    report.add_target("largest relative gap of the loss to Vmap's", worst, 1e-4)
    return report


if __name__ == "__main__":
    print(json.dumps(fit(json.loads(sys.argv[1]))))
