"""One visit to a batch, and what it says of the values at its pseudo-inputs and of the hyperparameters.

At the best rows' numbers the bound's gradient with the numbers held is that of the collapsed bound, so that every step
takes the numbers first, and then moves what an optimiser moves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from .._numerics import all_finite, diagonal, scaled_cholesky, symmetrise
from ..expectations import shifted_normals
from ..families import GaussianNatural, NormalFamily
from ..solvers import of_params
from ._likelihoods import Likelihood, RowExpectations
from ._process import Kernel, Prior, Process, conditioned, evidence, reach

# ------------------------------------------------------------------------------------------------------------ one batch
# What one batch says of the values at its pseudo-inputs, and of the hyperparameters.
#
# Every row n says ``exp(first_n r_n - 1/2 second_n r_n^2)`` of what its predictor is given the pseudo-values b, ``r_n =
# E[f_n | b] - E[f_n] = A_n (b - E b)``, under the process without the batch: two numbers a row (Opper and Archambeau
# 2009), which natural-gradient steps move. Under Gaussian noise one step is exact.

# Steps of rows' numbers until the bound stands still; each costs O(n m^2).
_MOST_STEPS = 100
# Smallest precision of a row, in units of the largest: a row of negative curvature says its slope and next to nothing else.
_LEAST = 1e-10


class RowSites(NamedTuple):
    """Two numbers a row: natural parameters of its term in ``r_n``."""

    first: Float[Array, "N"]
    second: Float[Array, "N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PseudoSite:
    """A site ``exp(log_scale + h^T u - 1/2 u^T Lambda u)`` in the values at pseudo-inputs."""

    natural: GaussianNatural
    log_scale: Float[Array, ""]

    def __add__(self, other: PseudoSite) -> PseudoSite:
        return PseudoSite(self.natural + other.natural, self.log_scale + other.log_scale)

    def __sub__(self, other: PseudoSite) -> PseudoSite:
        return PseudoSite(self.natural - other.natural, self.log_scale - other.log_scale)


def unit_site(size: int, dtype: Any) -> PseudoSite:
    """A site that says nothing."""
    natural = GaussianNatural(jnp.zeros((size,), dtype), jnp.zeros((size, size), dtype))
    return PseudoSite(natural, jnp.zeros((), dtype))


class Local(NamedTuple):
    """A batch's predictors in whitened pseudo-values ``v = L^-1 (b - E b)``, under the process without the batch."""

    factor: Float[Array, "m m"]  # L, of the pseudo-values' covariance
    design: Float[Array, "m N"]  # r_n = design[:, n] . v
    mean: Float[Array, "N"]
    rest: Float[Array, "N"]  # var(f_n | b)
    start: Float[Array, "m"]  # L^-1 E b
    base: PseudoSite  # what is known of v beside: the other batches' sites where pseudo-inputs are shared
    known: Float[Array, ""]  # log evidence of the process without the batch, the base aside
    valid: Bool[Array, ""]


class Bound(NamedTuple):
    """The bound at some rows' numbers, with what the next ones would be."""

    value: Float[Array, ""]  # nats, everything known before included
    likelihood: Float[Array, ""]  # sum over rows of E log p
    target: RowSites
    offset: Float[Array, "N"]  # E r_n
    spread: Float[Array, "N"]  # var r_n


def localised(
    prior: Prior, process: Process | None, inputs: Float[Array, "m D"], base: PseudoSite, X: Float[Array, "N D"]
) -> Local:
    """The predictors of rows given pseudo-values.

    ``process``: the process given the other batches; None for the prior; ``inputs``: pseudo-inputs; ``base``: a site in the
    values there that is no row's; not read where there is a process, which knows the others. Returns the batch in whitened
    pseudo-values.
    """
    size, gram, cross, rest = len(inputs), prior.gram(inputs), prior.covariance(inputs, X), prior.variance(X)
    mean, centre, known = jnp.zeros_like(rest), jnp.zeros_like(gram[0]), jnp.zeros((), gram.dtype)
    if process is not None:
        base = unit_site(size, gram.dtype)
        means, half = reach(prior, process, jnp.concatenate([inputs, X]))
        gram = gram - half[:, :size].T @ half[:, :size]
        cross = cross - half[:, :size].T @ half[:, size:]
        rest = rest - jnp.sum(half[:, size:] ** 2, axis=0)
        centre, mean, known = means[:size], means[size:], evidence(process)
    factor, valid = scaled_cholesky(symmetrise(gram))
    design = solve_triangular(factor, cross, lower=True)
    natural = base.natural
    whitened = GaussianNatural(factor.T @ natural.precision_mean, symmetrise(factor.T @ natural.precision @ factor))
    return Local(
        factor,
        design,
        mean,
        jnp.maximum(rest - jnp.sum(design**2, axis=0), 0.0),
        solve_triangular(factor, centre, lower=True),
        PseudoSite(whitened, base.log_scale),
        known,
        valid,
    )


def bound_at(local: Local, rows: RowSites, likelihood: Likelihood, params: Any, y: Array) -> Bound:
    """``E_q log p(y | f) - KL(q || process) + log evidence of what is known``, for the q that rows' numbers give.

    A lower bound at any numbers; at the best ones under Gaussian noise it is the collapsed one of Titsias (2009). Returns the
    bound in nats, with the natural-gradient target of the numbers.
    """
    base = local.base.natural
    eye = jnp.eye(len(local.factor), dtype=local.factor.dtype)
    precision = eye + base.precision + (local.design * rows.second) @ local.design.T
    root, _ = scaled_cholesky(symmetrise(precision))
    half = solve_triangular(root, local.design, lower=True)
    pulled = solve_triangular(root, local.design @ rows.first + base.precision_mean, lower=True)
    inverse = solve_triangular(root, eye, lower=True)
    loc = inverse.T @ pulled
    offset, spread = half.T @ pulled, jnp.sum(half**2, axis=0)
    found: RowExpectations = likelihood.expected(params, y, local.mean + offset, local.rest + spread)
    divergence = 0.5 * (jnp.sum(inverse**2) - len(eye) + jnp.vdot(loc, loc)) + jnp.sum(jnp.log(diagonal(root)))
    bent = jnp.vdot(loc, base.precision @ loc) + jnp.sum((inverse @ base.precision) * inverse)
    beside = local.base.log_scale + jnp.vdot(base.precision_mean, loc) - 0.5 * bent
    total = jnp.sum(found.value)
    second = jnp.maximum(-found.hess, _LEAST * jnp.maximum(jnp.max(-found.hess), 1e-3))
    target = RowSites(found.grad + second * offset, second)
    return Bound(local.known + total - divergence + beside, total, target, offset, spread)


def mixed(old: RowSites, new: RowSites, damping: Any) -> RowSites:
    """A natural-gradient step of a length in (0, 1], 1 the whole of it."""
    return jax.tree.map(lambda a, b: a + damping * (b - a), old, new)


def best_rows(local: Local, rows: RowSites, likelihood: Likelihood, params: Any, y: Array) -> tuple[RowSites, Bound]:
    """Natural-gradient steps of rows' numbers until the bound stands still; a step that lowers it is halved.

    Returns the numbers at the bound's maximum over them, and the bound there.
    """
    dtype = local.mean.dtype
    eps = jnp.finfo(dtype).eps

    def going(carry: tuple) -> Array:
        _, _, damping, moving, count = carry
        return moving & (count < _MOST_STEPS) & (damping > 1e-3)

    def step(carry: tuple) -> tuple:
        here, bound, damping, _, count = carry
        proposal = mixed(here, bound.target, damping)
        found = bound_at(local, proposal, likelihood, params, y)
        better = found.value >= bound.value - 64 * eps * (1 + jnp.abs(bound.value))
        gaps = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b) / (1 + jnp.abs(b))), found.target, proposal)
        kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), (proposal, found), (here, bound))
        longer = jnp.where(better, jnp.minimum(2 * damping, 1.0), 0.5 * damping)
        return *kept, longer, ~better | (jnp.maximum(*gaps) > 1e3 * eps), count + 1

    # The first step stays where it is, and finds what the bound is there.
    zeros = jnp.zeros_like(local.mean)
    nothing = Bound(jnp.asarray(-jnp.inf, dtype), jnp.zeros((), dtype), rows, zeros, zeros)
    start = (rows, nothing, jnp.ones((), dtype), jnp.asarray(True), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(going, step, start)[:2]


def site_of(local: Local, rows: RowSites, found: Bound) -> PseudoSite:
    """The batch's site in the pseudo-values themselves, with ``E_q log t = E_q log p(y | f)``.

    Returns ``h = A^T (first + second s)``, ``Lambda = A^T diag(second) A`` with ``s = A E b`` under the process without the
    batch.
    """
    lift = solve_triangular(local.factor, local.design, lower=True, trans=1)  # A^T
    shift = local.design.T @ local.start
    natural = GaussianNatural(lift @ (rows.first + rows.second * shift), symmetrise((lift * rows.second) @ lift.T))
    seen = jnp.sum(rows.first * found.offset - 0.5 * rows.second * (found.offset**2 + found.spread))
    moved = jnp.sum(rows.first * shift + 0.5 * rows.second * shift**2)
    return PseudoSite(natural, found.likelihood - seen - moved)


def projected(prior: Prior, old: Float[Array, "m D"], site: PseudoSite, new: Float[Array, "k D"]) -> PseudoSite:
    """A site in old pseudo-values as one in new ones, by ``E[log t(u_old) | u_new]`` under the prior conditional (C.1).

    ``old``: pseudo-inputs of the site; ``new``: pseudo-inputs to have it at. Returns with ``P = K_old,new K_new^-1``: ``h' =
    P^T h``, ``Lambda' = P^T Lambda P``, and the scale less ``1/2 tr Lambda (K_old - P K_new,old)``, what the new values leave
    open of the old ones.
    """
    factor, _ = scaled_cholesky(prior.gram(new))
    half = solve_triangular(factor, prior.covariance(new, old), lower=True)
    lift = solve_triangular(factor, half, lower=True, trans=1)  # P^T
    precision = site.natural.precision
    left = prior.gram(old) - half.T @ half
    natural = GaussianNatural(lift @ site.natural.precision_mean, symmetrise(lift @ precision @ lift.T))
    return PseudoSite(natural, site.log_scale - 0.5 * jnp.sum(precision * left))


def site_evidence(prior: Prior, inputs: Float[Array, "m D"], site: PseudoSite) -> Float[Array, ""]:
    """``log int p(u) t(u) du`` in nats for one site under the prior, differentiable in the kernel's parameters."""
    factor, _ = scaled_cholesky(prior.gram(inputs))
    precision = symmetrise(factor.T @ site.natural.precision @ factor)
    root, _ = scaled_cholesky(jnp.eye(len(inputs), dtype=precision.dtype) + precision)
    pulled = solve_triangular(root, factor.T @ site.natural.precision_mean, lower=True)
    return site.log_scale + 0.5 * jnp.vdot(pulled, pulled) - jnp.sum(jnp.log(diagonal(root)))


# ---------------------------------------------------------------------------------------------------------------- visit

# Length of a natural-gradient step between two steps of the optimiser, where the whole of it is not the best already.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a visit is told beside arrays; hashable.

    ``kernel``: covariances; ``jitter``: share of noise in pseudo-values; ``optim``: moves hyperparameters and pseudo-inputs;
    ``learn``: "params" (a point), "q" (a Gaussian over hyperparameters), "inputs"; ``moved``: whether the base is at other
    pseudo-inputs than the batch's; ``whole``: whether q over hyperparameters answers to the whole bound, not to what the batch
    adds to it.
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

    ``q``: over them, to start at; None where they are a point; ``inputs``: pseudo-inputs to start at.
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

    The bound of all batches is the log evidence of the sites plus such a term for each of them, which is 0 where its site was
    made. ``params``: hyperparameters, where the site was made; ``inputs``: its pseudo-inputs; ``after``: all batches' sites:
    the process given them, or their sum where pseudo-inputs are shared. In nats per unit of each unconstrained
    hyperparameter.
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
