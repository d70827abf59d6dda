"""The package's side of a comparison: how a PVI is built, run and measured.

The only module that imports the package.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks._gallery import Example
from benchmarks._models import Data
from benchmarks._opponent import gaussian_of_params
from benchmarks._references import Optimum
from numpyro_pvi import PVI, Partition
from numpyro_pvi._compiling import at_work
from numpyro_pvi._group_lifecycle import reduced
from numpyro_pvi._user_inputs import run_rounds
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import NaturalGradient

SCHEDULES: dict[str, Callable[[], Any]] = {"sequential": Sequential, "synchronous": Synchronous}


def device_arrays(data: Data) -> tuple[jax.Array, jax.Array]:
    """Rows and targets as arrays on the device, as both sides receive them."""
    return jnp.asarray(data.X), jnp.asarray(data.y)


def build(
    model: Callable[..., Any],
    labels: np.ndarray,
    schedule: str | None = None,
    guide_class: type = AutoMultivariateNormal,
) -> PVI:
    """PVI with every default; ``schedule`` is a name in `SCHEDULES`, or None for the default schedule."""
    options = {} if schedule is None else {"schedule": SCHEDULES[schedule]()}
    return PVI(Partition(model, "data", labels), guide_class(model), **options)


def build_gallery(example: Example, guide: AutoMultivariateNormal) -> PVI:
    """PVI for one example of the gallery: every default, or sweeps with so many draws where expectations are by draws."""
    options: dict[str, Any] = {}
    if example.draws:
        options = {"schedule": Sequential(), "solver": NaturalGradient(num_draws=example.draws)}
    return PVI(Partition(example.model, example.plate, example.groups), guide, **options)


def gap_of(pvi: PVI, params: Any, optimum: Optimum, order: dict[str, tuple[int, ...]]) -> float:
    """Distance of fitted parameters from the float64 optimum, nats."""
    loc, tril = gaussian_of_params(pvi.guide, jax.device_get(params), order)
    return optimum.gap(loc, tril)


def gaps_by_round(
    pvi: PVI,
    arrays: tuple[Any, ...],
    optimum: Optimum,
    order: dict[str, tuple[int, ...]],
    num_rounds: int,
    stop_at: float | None = None,
) -> list[float]:
    """Gap after every round, nats; stops early once it is at or below ``stop_at``."""
    state = pvi.init(jax.random.key(0), *arrays)
    update = jax.jit(pvi.update)
    gaps = []
    for _ in range(num_rounds):
        state, _ = update(state, *arrays)
        gaps.append(gap_of(pvi, pvi.get_params(state), optimum, order))
        if stop_at is not None and gaps[-1] <= stop_at:
            break
    return gaps


def first_within(gaps: list[float], limit: float) -> int | None:
    """First round (counted from 1) after which the gap is within ``limit`` and stays there; None if there is none."""
    inside = [abs(gap) <= limit for gap in gaps]
    if not inside or not inside[-1]:
        return None
    return len(inside) - inside[::-1].index(False) + 1 if False in inside else 1


def rounds_function(pvi: PVI, num_rounds: int, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """``num_rounds`` calls of the compiled update from one initial state, without what `run` adds."""
    start = pvi.init(jax.random.key(0), *arrays)
    update = jax.jit(pvi.update)

    def call() -> Any:
        state, loss = start, None
        for _ in range(num_rounds):
            state, loss = update(state, *arrays)
        return loss, state

    return call


def program_function(pvi: PVI, state: Any, num_rounds: int, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """The compiled rounds that ``pvi.run`` calls from a state at hand, without what it does in Python around them.

    One program even where a run would change to that with the finest quadrature rule on its way.
    """
    fine = pvi.run(jax.random.key(0), num_rounds, *arrays, progress_bar=False, init_state=state).state.plan.fine
    dynamic, static = pvi._rows(state, arrays, {})
    small, count, tol = reduced(state, pvi._engine), jnp.int32(num_rounds), jnp.asarray(-1.0)
    level, programs = pvi._level(state.plan, dynamic, static), pvi._followed.programs
    call = pvi._engine, small, dynamic, static, count, tol, None

    def loop() -> Any:
        with at_work(programs):
            return run_rounds(*call, length=num_rounds, fine=fine, level=level)

    return loop


def run_function(pvi: PVI, num_rounds: int, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """``pvi.run`` with everything it does, initialisation and planning included."""
    return lambda: pvi.run(jax.random.key(0), num_rounds, *arrays, progress_bar=False).params


def resumed_function(pvi: PVI, num_rounds: int, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """``pvi.run`` from a state at hand (``init_state``): all of `run` but the initialisation."""
    start = pvi.init(jax.random.key(0), *arrays)
    key = jax.random.key(0)
    return lambda: pvi.run(key, num_rounds, *arrays, progress_bar=False, init_state=start).params
