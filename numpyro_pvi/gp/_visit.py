"""One visit to a batch: hyperparameters and pseudo-inputs by gradient of the bound, rows' numbers by natural gradients.

At the best rows' numbers the bound's gradient with the numbers held is that of the collapsed bound, so that every step
takes the numbers first, and then moves what an optimiser moves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._numerics import all_finite
from ..expectations import shifted_normals
from ..families import GaussianNatural, NormalFamily
from ..solvers import of_params
from ._batch import (
    Bound,
    Local,
    PseudoSite,
    RowSites,
    best_rows,
    bound_at,
    localised,
    mixed,
    projected,
    site_evidence,
    site_of,
)
from ._kernels import Kernel
from ._likelihoods import Likelihood
from ._process import Prior, Process, conditioned, evidence

# Length of a natural-gradient step between two steps of the optimiser, where the whole of it is not the best already.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a visit is told beside arrays; hashable.

    Args:
        kernel: covariances.
        likelihood: of one predictor.
        jitter: share of noise in pseudo-values.
        optim: moves hyperparameters and pseudo-inputs.
        num_steps: of it.
        learn: "params" (a point), "q" (a Gaussian over hyperparameters), "inputs".
        moved: whether the base is at other pseudo-inputs than the batch's.
        num_nodes: draws of hyperparameters a step.
        whole: whether q over hyperparameters answers to the whole bound, not to what the batch adds to it.
    """

    kernel: Kernel
    likelihood: Likelihood
    jitter: float | None
    optim: Any
    num_steps: int
    learn: frozenset[str]
    moved: bool
    num_nodes: int
    whole: bool

    def prior(self, params: Any) -> Prior:
        """The kernel at parameters."""
        return Prior(self.kernel, params["kernel"], self.jitter)


class Problem(NamedTuple):
    """The batch, and all that is known without it."""

    X: Float[Array, "N D"]
    y: Array
    process: Process | None  # given the other batches' private sites; None where pseudo-inputs are shared
    base: PseudoSite  # the other batches' sites where pseudo-inputs are shared
    base_inputs: Float[Array, "m D"]
    slopes: Float[Array, "P"]  # of the other batches' terms by the hyperparameters, revisited ones only
    around: GaussianNatural | None  # over hyperparameters: q before a new batch, the prior at a visit again


class Visit(NamedTuple):
    """What a visit found."""

    params: Any
    inputs: Float[Array, "m D"]
    site: PseudoSite
    rows: RowSites
    # The bound, all that was known before included; under q over hyperparameters its increment, or all of it.
    value: Float[Array, ""]
    q: GaussianNatural | None
    valid: Array


def _localised(setting: Setting, problem: Problem, params: Any, inputs: Array) -> Local:
    prior, process, base = setting.prior(params), problem.process, problem.base
    if process is not None and setting.learn & {"params", "q"}:
        process = conditioned(prior, process)
    if setting.moved:
        base = projected(prior, problem.base_inputs, base, inputs)
    return localised(prior, process, inputs, base, problem.X)


def _bound(setting: Setting, problem: Problem, params: Any, local: Local, rows: RowSites) -> Bound:
    return bound_at(local, rows, setting.likelihood, params["likelihood"], problem.y)


def _stepped(
    setting: Setting, problem: Problem, params: Any, inputs: Array, rows: RowSites
) -> tuple[Array, RowSites, Array]:
    """The bound after a step of the rows' numbers, the numbers there, and what of it was known before, in nats."""
    local = _localised(setting, problem, params, inputs)
    held = jax.lax.stop_gradient((params, local))
    target = _bound(setting, problem, *held, rows).target
    rows = mixed(rows, target, 1.0 if setting.likelihood.exact else _SHORT)
    value = _bound(setting, problem, params, local, rows).value
    known = jnp.zeros_like(value) if setting.whole else local.known
    if problem.process is None and "q" in setting.learn and not setting.whole:
        known = site_evidence(setting.prior(params), problem.base_inputs, problem.base)
    return value, rows, known


def _start(setting: Setting, params: Any, inputs: Array, q: GaussianNatural | None) -> dict[str, Any]:
    """What the optimiser moves."""
    moved: dict[str, Any] = {}
    if "params" in setting.learn:
        moved["params"] = params
    if q is not None and "q" in setting.learn:
        moved["loc"], moved["log_sd"] = ravel_pytree(params)[0], -0.5 * jnp.log(q.precision)
    if "inputs" in setting.learn:
        moved["inputs"] = inputs
    return moved


def _params_of(moved: dict[str, Any], params: Any) -> Any:
    if "loc" in moved:
        return ravel_pytree(params)[1](moved["loc"])
    return moved.get("params", params)


def visit(
    *,
    setting: Setting,
    params: Any,
    q: GaussianNatural | None,
    inputs: Float[Array, "m D"],
    problem: Problem,
    key: Array | None,
) -> Visit:
    """Fit a batch's site, and what the setting says beside it.

    Args:
        setting: static.
        params: hyperparameters to start at, unconstrained.
        q: over them, to start at; None where they are a point.
        inputs: pseudo-inputs to start at.
        problem: the batch.
        key: for draws of hyperparameters.

    Returns:
        The visit.
    """
    moved = _start(setting, params, inputs, q)
    loss = _loss(setting, params, inputs, problem)
    zeros = jnp.zeros_like(problem.X[:, 0])
    rows = RowSites(zeros, zeros)
    if moved and setting.num_steps:
        optim = of_params(setting.optim)

        def step(carry: tuple[Any, RowSites], count: Array) -> tuple[tuple[Any, RowSites], None]:
            state, rows = carry
            nodes = None if problem.around is None else draws(setting, params, jax.random.fold_in(key, count))
            (_, rows), state = optim.eval_and_update(lambda at: loss(at, rows, nodes), state)
            return (state, rows), None

        (state, rows), _ = jax.lax.scan(step, (optim.init(moved), rows), jnp.arange(setting.num_steps))
        moved = optim.get_params(state)
    now, at = _params_of(moved, params), moved.get("inputs", inputs)
    local = _localised(setting, problem, now, at)
    rows, found = best_rows(local, rows, setting.likelihood, now["likelihood"], problem.y)
    value = found.value
    if problem.around is not None:
        value = -loss(moved, rows, draws(setting, params, key))[0]
        q = NormalFamily(len(moved["loc"])).from_loc_sd(moved["loc"], jnp.exp(moved["log_sd"]))
    site = site_of(local, rows, found)
    return Visit(now, at, site, rows, value, q, local.valid & jnp.isfinite(value) & all_finite(site))


def _loss(setting: Setting, params: Any, inputs: Array, problem: Problem) -> Any:
    """Minus the bound of what an optimiser moves, the rows' numbers and nodes of hyperparameters; and the next numbers."""
    flat, unravel = ravel_pytree(params)

    def loss(moved: dict[str, Any], rows: RowSites, nodes: Array | None) -> tuple[Array, RowSites]:
        here = moved.get("inputs", inputs)
        if nodes is None:
            now = _params_of(moved, params)
            value, rows, _ = _stepped(setting, problem, now, here, rows)
            return -(value + jnp.vdot(problem.slopes, ravel_pytree(now)[0] - flat)), rows
        family, sd = NormalFamily(len(flat)), jnp.exp(moved["log_sd"])

        def at(node: Array) -> tuple[Array, RowSites]:
            value, own, known = _stepped(setting, problem, unravel(moved["loc"] + sd * node), here, rows)
            return value - known, own

        values, found = jax.lax.map(at, nodes)
        divergence = family.kl(family.from_loc_sd(moved["loc"], sd), problem.around)
        return divergence - jnp.mean(values), jax.tree.map(lambda x: jnp.mean(x, axis=0), found)

    return loss


def draws(setting: Setting, params: Any, key: Array) -> Float[Array, "S P"]:
    """Standard normal draws of the flat hyperparameters, in pairs of both signs."""
    flat = ravel_pytree(params)[0]
    drawn, _ = shifted_normals(key, len(flat), 0, -(-setting.num_nodes // 2), 1, flat.dtype)
    return jnp.concatenate([drawn, -drawn])


def slope(
    *,
    setting: Setting,
    params: Any,
    inputs: Float[Array, "m D"],
    problem: Problem,
    rows: RowSites,
    after: Process | PseudoSite,
) -> Float[Array, "P"]:
    """Derivative of ``E_q log p(y | f) - E_q log t`` by the hyperparameters, with all sites held: the batch's own share.

    The bound of all batches is the log evidence of the sites plus such a term for each of them, which is 0 where
    its site was made.

    Args:
        setting: static.
        params: hyperparameters, where the site was made.
        inputs: its pseudo-inputs.
        problem: the batch.
        rows: its best numbers.
        after: all batches' sites: the process given them, or their sum where pseudo-inputs are shared.

    Returns:
        In nats per unit of each unconstrained hyperparameter.
    """
    flat, unravel = ravel_pytree(params)

    def gap(at: Array) -> Array:
        now = unravel(at)
        value = _bound(setting, problem, now, _localised(setting, problem, now, inputs), rows).value
        prior = setting.prior(now)
        if isinstance(after, Process):
            return value - evidence(conditioned(prior, after))
        return value - site_evidence(prior, inputs, after)

    return jax.grad(gap)(flat)
