"""Trajectories as they were, so that moving code about is seen to change none of them.

A law says what is right; many engines would keep it on different ways. These numbers say that the way is the same: stored
with this script, in float64 and in float32, and compared by ``test_cells.py`` (the cells of the laws, whose fits it has anyway)
and ``test_golden.py`` (products of families, and features that cells of the laws do not have)::

    python -m tests.laws.golden             # writes golden/float64.json and golden/float32.json
    python -m tests.laws.golden families-ep # the same, of these alone

A change that means to move a trajectory stores them anew and says in its commit which moved, and why.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import CategoricalFamily
from numpyro_pvi.schedules import Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import Conjugate, PowerEP, StochasticNaturalGradient

from . import test_alpha_families, test_any_model, test_product, test_product_resume, test_row_numbers, test_vmp
from .cells import CELLS, fit_of
from .fits import FIRST, shapes_compared

FOLDER = pathlib.Path(__file__).parent / "golden"
KEY = jax.random.key(0)
ROUNDS = 4
DIGITS = 13
PRECISION = jnp.result_type(float).name

# Largest distance of the first rounds, and of a limit, which a guarded fit reaches up to the square root of rounding.
TOLERANCES = {"float64": (1e-9, 1e-6), "float32": (1e-4, 2e-3)}[PRECISION]


class Case(NamedTuple):
    """A fit that no cell of the laws is: how it is made, and the arguments of the model."""

    make: Callable[[], Any]
    data: tuple


class Trajectory(NamedTuple):
    """What is stored: parameters of q by state, losses by round, and which of the rounds are among the first ``FIRST``."""

    q: list[dict[str, list[float]]]
    losses: list[float]


# ------------------------------------------------------------------------------------------------------- fits beside the cells


def regression(x, y):
    """An affine predictor under normal and gamma priors."""
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1 / jnp.sqrt(tau)), obs=y)


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def scaled(x, y):
    """A hyperparameter that is learnt."""
    scale = numpyro.param("scale", 0.8, constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


_RNG = np.random.default_rng(2)
_X = _RNG.normal(size=(12, 2))
_Y = _X @ np.array([1.0, -0.5]) + 0.5 * _RNG.normal(size=12)
_LABELS = np.arange(12) % 3


def families(model, labels=_LABELS, data=(_X, _Y), plate="data", solver=None, schedule=None, **options):
    """A fit under a product of families."""

    def make():
        guide = AutoExponentialFamily(model, **options)
        return PVI(Partition(model, plate, labels), guide, solver=solver, schedule=schedule)

    return Case(make, tuple(map(jnp.asarray, data)))


def gaussian(
    model,
    guide=AutoMultivariateNormal,
    labels=_LABELS,
    data=(_X, _Y),
    solver=None,
    schedule=None,
    optim=None,
    **options,
):
    """A fit under a Gaussian guide."""

    def make():
        split = Partition(model, "data", labels, **options)
        return PVI(split, guide(model), optim, solver=solver, schedule=schedule)

    return Case(make, tuple(map(jnp.asarray, data)))


def _resumed(name):
    return Case(lambda: test_product_resume.fresh(name)[0], (test_product_resume.CASES[name][1],))


_several = functools.partial(families, test_product.several, test_product.GROUPS, test_product.DATA)
_shaped = functools.partial(
    families, test_product_resume.shaped, test_product_resume.LABELS, (test_product_resume.Y,), "data"
)


def _of_any_model(name):
    case = test_any_model.CASES[name]
    data = test_any_model.X, test_any_model.Y
    return gaussian(case.model, case.guide, test_any_model.COARSE, data, case.solver, mode=case.modes[0])


CASES = {
    "families-conjugate-parallel": _several(schedule=Synchronous(damping=0.5)),
    "families-conjugate-cyclic": _several(schedule=Sequential()),
    "families-conjugate-random": _several(solver=Conjugate(), schedule=Sequential("random")),
    **{f"families-{name.replace(' ', '-')}": _resumed(name) for name in test_product_resume.CASES},
    "families-rule-few": _shaped(solver=StochasticNaturalGradient(num_steps=3), schedule=StochasticSubset(2)),
    "families-lda": families(
        test_vmp.lda,
        test_vmp.LDA_GROUPS["two"],
        (test_vmp.DOCUMENTS,),
        "documents",
        families={"z": CategoricalFamily(test_vmp.TOPICS)},
    ),
    "families-regression": families(regression),
    "families-logistic": families(logistic, data=(_X, 1.0 * (_Y > 0))),
    "families-ep": families(
        test_alpha_families.weibull,
        test_alpha_families.GROUPS,
        (test_alpha_families.DAYS,),
        solver=PowerEP(0.7),
    ),
    "families-ep-rows": families(
        test_alpha_families.weibull,
        test_alpha_families.GROUPS,
        (test_alpha_families.DAYS,),
        solver=PowerEP(0.7, factors="row"),
    ),
    **{f"any-{name.replace(' ', '-').replace(',', '')}": _of_any_model(name) for name in test_any_model.CASES},
    "rows-logistic": Case(
        lambda: test_row_numbers.make(test_row_numbers.logistic), (test_row_numbers.X, test_row_numbers.Y)
    ),
    "param-parallel": gaussian(scaled, optim=numpyro.optim.Adam(0.01)),
    "param-cyclic-diagonal": gaussian(
        scaled, AutoDiagonalNormal, schedule=Sequential(), optim=numpyro.optim.Adam(0.01)
    ),
}
CELLS_STORED = tuple(cell for cell in CELLS if not cell.slow)


# ------------------------------------------------------------------------------------------------------ reading and comparing


def of_cell(cell) -> Trajectory:
    """A cell's trajectory, from the fit that its laws are read from."""
    found = fit_of(cell)
    return Trajectory([_parameters(found.pvi, state) for state in found.states], [float(x) for x in found.losses[1:]])


def of_case(name) -> Trajectory:
    """The first rounds of another fit."""
    pvi, data = CASES[name].make(), CASES[name].data
    state = pvi.init(KEY, *data)
    states, losses = [state], []
    with shapes_compared():
        for _ in range(ROUNDS):
            state, loss = pvi.update(state, *data)
            states.append(state)
            losses.append(float(loss))
    return Trajectory([_parameters(pvi, state) for state in states], losses)


def _parameters(pvi, state):
    """What the guide is told; a Gaussian as location and covariance, whatever its parameters are called."""
    params = {name: np.asarray(value, np.float64) for name, value in pvi.get_params(state).items()}
    if "auto_scale_tril" in params:
        params["covariance"] = params["auto_scale_tril"] @ params.pop("auto_scale_tril").T
    elif "auto_scale" in params:
        params["covariance"] = np.diag(params.pop("auto_scale") ** 2)
    return {name: np.ravel(params[name]).tolist() for name in sorted(params)}


def distances(found: Trajectory, stored: Trajectory) -> tuple[float, float]:
    """The largest distance in the first rounds and in those after them.

    Locations and covariances are compared in posterior sds, other parameters relative to their size, losses in nats or
    relative to theirs.
    """
    far = [_between(q, wanted) for q, wanted in zip(found.q, stored.q, strict=True)]
    for k, (loss, wanted) in enumerate(zip(found.losses, stored.losses, strict=True)):
        far[k + 1] = max(far[k + 1], _or_inf(abs(loss - wanted) / max(1.0, abs(wanted))))
    return max(far[: FIRST + 1]), max(far[FIRST + 1 :], default=0.0)


def _between(found, wanted):
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    found, wanted = ({name: np.array(values) for name, values in q.items()} for q in (found, wanted))
    scales = {name: np.maximum(np.abs(values), 1.0) for name, values in wanted.items()}
    if "covariance" in wanted:
        dim = wanted["auto_loc"].size
        sd = np.sqrt(np.diag(wanted["covariance"].reshape(dim, dim)))
        scales |= {"auto_loc": sd, "covariance": np.outer(sd, sd).ravel()}
    return max(_or_inf(np.max(np.abs(found[n] - wanted[n]) / scales[n])) for n in wanted)


def _or_inf(distance):
    """NaN is far from everything."""
    return np.inf if np.isnan(distance) else float(distance)


@functools.cache
def stored() -> dict[str, Trajectory]:
    """What the file of this precision holds."""
    held = json.loads((FOLDER / f"{PRECISION}.json").read_text())
    return {name: Trajectory(one["q"], one["losses"]) for name, one in held.items()}


def too_far(name, found: Trajectory) -> tuple[float, float] | None:
    """The distances from what is stored, if either is beyond its tolerance."""
    first, later = distances(found, stored()[name])
    return None if first <= TOLERANCES[0] and later <= TOLERANCES[1] else (first, later)


def write(*names):
    """Runs everything in this process's precision, or these names alone, and stores it, a line a trajectory."""
    trajectories = dict(stored()) if names else {}
    trajectories |= {name: of_case(name) for name in CASES if name in names or not names}
    cells = [cell for cell in CELLS_STORED if PRECISION == "float64" or cell.repeated]
    trajectories |= {cell.name: of_cell(cell) for cell in cells if cell.name in names or not names}
    lines = []
    for name in sorted(trajectories):
        one = trajectories[name]
        q = [{k: [_rounded(x) for x in values] for k, values in state.items()} for state in one.q]
        held = {"losses": [_rounded(x) for x in one.losses], "q": q}
        lines.append(f"{json.dumps(name)}: {json.dumps(held, separators=(',', ':'))}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{PRECISION}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rounded(x):
    return float(f"{x:.{DIGITS if PRECISION == 'float64' else 8}g}")


if __name__ == "__main__":
    # Precision and compiler options are set before anything is compiled, as in the suite.
    program = "import sys; from tests.conftest import pytest_configure as c; c(None); from tests.laws import golden; "
    program += "golden.write(*sys.argv[1:])"
    for x64 in ("1", "0"):
        environment = {**os.environ, "NUMPYRO_PVI_TEST_X64": x64, "NUMPYRO_PVI_TEST_TYPES": "0"}
        subprocess.run([sys.executable, "-c", program, *sys.argv[1:]], env=environment, check=True)
