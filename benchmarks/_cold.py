"""One cold measurement in a process of its own: imports done, data on the device, compilation cache off (or a folder)."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any


def measure(cache: Any = None, **request: Any) -> dict[str, float]:
    """Runs ``python -m benchmarks._cold`` in a fresh process and returns its seconds by phase.

    ``cache`` is a folder for JAX's compilation cache, or None to leave it off.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false" if cache is None else "true"
    if cache is not None:
        request["cache"] = str(cache)
    command = [sys.executable, "-m", "benchmarks._cold", json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the cold run {request} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _pvi_run(request: dict[str, Any], data: Any) -> dict[str, float]:
    import jax

    from benchmarks import _models, _subjects

    arrays = jax.block_until_ready(_subjects.device_arrays(data))
    start = time.perf_counter()
    pvi = _subjects.build(getattr(_models, request["model"]), data.labels, request["schedule"])
    state = jax.block_until_ready(pvi.init(jax.random.key(0), *arrays))
    ready = time.perf_counter()
    jax.block_until_ready(
        pvi.run(jax.random.key(0), request["num_steps"], *arrays, progress_bar=False, init_state=state).params
    )
    end = time.perf_counter()
    return {"init": ready - start, "run": end - ready, "total": end - start}


def _svi_run(request: dict[str, Any], data: Any) -> dict[str, float]:
    import jax

    from benchmarks import _models, _subjects
    from benchmarks._opponent import Setting, scan_steps

    arrays = jax.block_until_ready(_subjects.device_arrays(data))
    start = time.perf_counter()
    svi = Setting(**request["setting"]).build(getattr(_models, request["model"]))
    state = jax.block_until_ready(svi.init(jax.random.key(0), *arrays))
    ready = time.perf_counter()
    jax.block_until_ready(scan_steps(svi, request["num_steps"])(state, *arrays))
    end = time.perf_counter()
    return {"init": ready - start, "run": end - ready, "total": end - start}


def _first_update(request: dict[str, Any], data: Any) -> dict[str, float]:
    """`init` and the first `update`, of either side, plain or under jit."""
    import jax

    from benchmarks import _models, _subjects
    from benchmarks._opponent import Setting

    arrays = jax.block_until_ready(_subjects.device_arrays(data))
    model = getattr(_models, request["model"])
    start = time.perf_counter()
    if request["side"] == "svi":
        engine = Setting(0.03, 1_000).build(model)
    else:
        engine = _subjects.build(model, data.labels)
    state = jax.block_until_ready(engine.init(jax.random.key(0), *arrays))
    ready = time.perf_counter()
    update = jax.jit(engine.update) if request["jit"] else engine.update
    jax.block_until_ready(update(state, *arrays)[1])
    end = time.perf_counter()
    return {"init": ready - start, "run": end - ready, "total": end - start}


def _first_fit(request: dict[str, Any], data: Any) -> dict[str, float]:
    """The first `run` and the same again, of either side, as a person would call them."""
    import jax
    import jax.monitoring

    import numpyro_pvi
    from benchmarks import _first_models

    del data
    if "cache" in request:
        numpyro_pvi.use_compilation_cache(request["cache"])
    folder = None if request["data"] is None else pathlib.Path(request["data"])
    subject = _first_models.CASES[request["model"]][0](folder)
    args = jax.block_until_ready(jax.tree.map(jax.numpy.asarray, subject.args))
    compiled: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    key = jax.random.key(0)
    compiled.clear()
    start, cpu = time.perf_counter(), time.process_time()
    if request["side"] == "PVI":
        fit = subject.pvi()
        again = functools.partial(fit.run, key, subject.rounds, *args, tol=1e-3, progress_bar=False)
    else:
        fit = subject.svi()
        again = functools.partial(fit.run, key, subject.steps, *args, progress_bar=False)
    result = again()
    jax.block_until_ready(result.params)
    found = {"first": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    found |= {"programs": len(compiled), "compiling": sum(compiled)}
    compiled.clear()
    start = time.perf_counter()
    jax.block_until_ready(again().params)
    found |= {"second": time.perf_counter() - start, "again": len(compiled)}
    discrete = request["side"] == "PVI" and subject.partitioned.fn is not subject.model
    return found | {"elbo": _first_models.elbo(subject, fit.guide, result.params, args, discrete)}


def _large(request: dict[str, Any], data: Any) -> dict[str, float]:
    """`init` of many rows: its seconds, what it takes of memory beside the process and its data, and five rounds."""
    import resource

    import jax

    from benchmarks import _models, _subjects

    arrays = jax.block_until_ready(_subjects.device_arrays(data))
    size = sum(x.nbytes for x in arrays)
    pvi = _subjects.build(_models.logistic, data.labels)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    state = jax.block_until_ready(pvi.init(jax.random.key(0), *arrays))
    ready = time.perf_counter()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    found = pvi.run(jax.random.key(0), request["num_steps"], *arrays, progress_bar=False, init_state=state)
    jax.block_until_ready(found.params)
    return {"init": ready - start, "memory": taken / size, "run": time.perf_counter() - ready}


KINDS = {"large": _large, "first_fit": _first_fit, "pvi": _pvi_run, "svi": _svi_run, "first_update": _first_update}


def main() -> None:
    """Reads the request, simulates the data (or loads it), measures, prints one line of JSON."""
    request = json.loads(sys.argv[1])
    import jax

    from benchmarks import _models, _subjects  # noqa: F401  imports come before the clock starts

    jax.block_until_ready(jax.device_put(0.0))  # the backend starts before the clock does
    data = None
    if request["kind"] == "first_fit":
        pass
    elif "covtype" in request:
        from benchmarks.glm import load_covtype

        data = load_covtype(**request["covtype"])
    else:
        data = _models.simulate_logistic(request["num_rows"], request["dim"], request["num_groups"])
    print(json.dumps(KINDS[request["kind"]](request, data)))


if __name__ == "__main__":
    main()
