"""What one batch says of the values at its pseudo-inputs, and of the hyperparameters.

Every row n says ``exp(first_n r_n - 1/2 second_n r_n^2)`` of what its predictor is given the pseudo-values b,
``r_n = E[f_n | b] - E[f_n] = A_n (b - E b)``, under the process without the batch: two numbers a row (Opper and Archambeau
2009), which natural-gradient steps move. Under Gaussian noise one step is exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from .._numerics import diagonal, scaled_cholesky, symmetrise
from ..families import GaussianNatural
from ._likelihoods import Likelihood, RowExpectations
from ._process import Prior, Process, evidence, reach

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

    Args:
        prior: the kernel.
        process: the process given the other batches; None for the prior.
        inputs: pseudo-inputs.
        base: a site in the values there that is no row's; not read where there is a process, which knows the others.
        X: the rows' inputs.

    Returns:
        The batch in whitened pseudo-values.
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

    A lower bound at any numbers; at the best ones under Gaussian noise it is the collapsed one of Titsias (2009).

    Args:
        local: the batch.
        rows: its rows' numbers.
        likelihood: of one predictor.
        params: of the likelihood.
        y: observations.

    Returns:
        The bound in nats, with the natural-gradient target of the numbers.
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

    Args:
        local: the batch.
        rows: where to start.
        likelihood: of one predictor.
        params: of the likelihood.
        y: observations.

    Returns:
        The numbers at the bound's maximum over them, and the bound there.
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

    Args:
        local: the batch.
        rows: its rows' numbers.
        found: the bound there.

    Returns:
        ``h = A^T (first + second s)``, ``Lambda = A^T diag(second) A`` with ``s = A E b`` under the process without the batch.
    """
    lift = solve_triangular(local.factor, local.design, lower=True, trans=1)  # A^T
    shift = local.design.T @ local.start
    natural = GaussianNatural(lift @ (rows.first + rows.second * shift), symmetrise((lift * rows.second) @ lift.T))
    seen = jnp.sum(rows.first * found.offset - 0.5 * rows.second * (found.offset**2 + found.spread))
    moved = jnp.sum(rows.first * shift + 0.5 * rows.second * shift**2)
    return PseudoSite(natural, found.likelihood - seen - moved)


def projected(prior: Prior, old: Float[Array, "m D"], site: PseudoSite, new: Float[Array, "k D"]) -> PseudoSite:
    """A site in old pseudo-values as one in new ones, by ``E[log t(u_old) | u_new]`` under the prior conditional (C.1).

    Args:
        prior: the kernel.
        old: pseudo-inputs of the site.
        site: in the values there.
        new: pseudo-inputs to have it at.

    Returns:
        With ``P = K_old,new K_new^-1``: ``h' = P^T h``, ``Lambda' = P^T Lambda P``, and the scale less
        ``1/2 tr Lambda (K_old - P K_new,old)``, what the new values leave open of the old ones.
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
