"""Diagnostics: read a state, never edit it. Importance weights of q and of single sites, and how q foretells rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._compiling import owned_jit
from ._numerics import in_batches
from ._state import PVIState
from ._warnings import warn
from .errors import ImproperError, PVIError
from .factors import (
    Layout,
    ModelCall,
    ValueCall,
    join_arguments,
    observed_log_likelihood,
    pad_rows,
    padded_length,
    prior_factor_log_density,
    site_log_prob,
    split_arguments,
    summed_out,
)
from .families import GaussianFamily, GaussianNatural, ProductNatural, conditional_moments, member_family
from .handlers import PRIOR
from .runtime import (
    JointBlock,
    ProductEngine,
    ProductProblem,
    Vmap,
    chunk_log_likelihoods,
    factor_values,
    latent_values,
    sum_of_units,
    whole_call,
)
from .sites import SiteStack, posterior, tied_site

__all__ = [
    "LogScore",
    "khat",
    "khat_by_group",
    "khat_of_sites",
    "khat_of_product",
    "log_score",
    "map_draws",
]


# ----------------------------------------------------------------------------------------------------------- many draws
# Evaluating a model at many draws: compiled once per model, in batches of bounded memory.

# Array elements that one batch of draws may hold per intermediate array; 2^22 are 32 MB in float64.
BATCH_ELEMENTS = 2**22


def map_draws(one: Callable, draws: Any, num_samples: int, elements_of: Callable | None = None) -> Any:
    """``vmap(one)(draws)`` in batches, so that memory beyond the result itself does not grow with the number of draws.

    Args:
        one: function of one draw.
        draws: pytree of arrays with a leading axis of length ``num_samples``.
        num_samples: number of draws.
        elements_of: function of one draw whose outputs are as large as what is computed on the way to ``one``'s;
            ``one`` itself by default.

    Returns:
        What ``one`` returns, with a leading axis of length ``num_samples``.
    """
    first = jax.tree.map(lambda x: x[0], draws)
    elements = sum(x.size for x in jax.tree.leaves(jax.eval_shape(elements_of or one, first)))
    return in_batches(one, draws, BATCH_ELEMENTS // max(1, elements))


# --------------------------------------------------------------------------------------------------------- Pareto shape
# Pareto shape of importance weights, from whichever ArviZ is installed.

# Fewest weights in a tail that a generalised Pareto distribution is fitted to, and fewest draws for a usable tail:
# ArviZ 1.3 finds no fit in tails of five.
_TAIL = 5
MIN_SAMPLES = 100


def pareto_khat(log_weights: np.ndarray, rounding: float) -> float:
    """Shape of the generalised Pareto distribution fitted to the largest importance weights.

    The tail is the ``min(S / 5, 3 sqrt(S))`` largest of S weights. Two cases have no fit and are decided here, because ArviZ
    0.23 and 1.x answer them differently: where the tail is flat up to rounding the weights are as good as equal, and k-hat is
    0.0; where fewer than five weights are distinguishable from zero next to the largest, k-hat is inf. ``log_weights``:
    Float[S]; unnormalised log importance weights, in nats. -inf is a weight of zero; ``rounding``: spread, in nats, below which
    weights count as equal. Returns k-hat; NaN when a weight is NaN or +inf.

    References:
        Vehtari et al., Pareto Smoothed Importance Sampling, section 3.
    """
    values = np.asarray(log_weights, np.float64)
    if np.any(np.isnan(values) | (values == np.inf)) or np.all(values == -np.inf):
        return math.nan
    ordered = np.sort(values - values.max())
    cut = ordered[-int(min(len(values) / 5, 3 * math.sqrt(len(values)))) - 1]
    if -cut <= rounding:
        return 0.0
    if ordered[-_TAIL] < math.log(np.finfo(np.float64).tiny):
        return math.inf
    with np.errstate(all="ignore"):
        shape = _fit(values)
    return math.inf if math.isnan(shape) else shape


def _fit(values: np.ndarray) -> float:
    # Imported here: ArviZ takes seconds to import. The psislw of 1.x takes log-likelihoods, that is, *negative* log
    # weights; its pareto_khat(log_weights=True) ignores that flag in the fit (1.3).
    import arviz

    if hasattr(arviz, "psislw"):
        return float(arviz.psislw(values)[1])
    from arviz_stats.base import array_stats  # pyright: ignore[reportMissingImports]

    return float(array_stats.psislw(-values, axis=-1)[1])


# ----------------------------------------------------------------------------------------------------------- k-hat of q
# How far q is from the exact posterior, by importance weights.

# Above this k-hat importance weights do not repair q.
USABLE = 0.7
# Share of S that the effective sample size has where weights are nearly equal, factor to more draws, numbers that they may read.
_NEARLY_EQUAL, _MORE, _MOST_READ = 0.5, 8, 1e8


def khat(
    rng_key: Any,
    model: Callable,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
    local: Any = None,
) -> float:
    """Pareto k-hat of the importance weights from q to the exact posterior.

    ``log w_s = log p(y, theta_s) - log q(theta_s)`` at draws from q, in unconstrained space (Jacobians included); k-hat
    is the shape of a generalised Pareto distribution fitted to the largest weights. It judges the whole q at once, so
    it grows with the number of latents, and one bad direction is enough to raise it.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        state: a state; it is only read.
        args: the model's positional arguments. All rows are read.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        local: natural parameters of every unit's local latents given the shared ones, or None.
        num_samples: draws S from q, at least 100. Each costs one evaluation of the model on all rows; draws go in
            batches, so memory does not grow with S. More are taken where so few cannot tell: see :func:`settled`.

    Returns:
        k-hat: below .5 good, below .7 usable, above that q's means and (first of all) variances cannot be trusted, nor
        repaired by importance weighting. 0.0 when the weights are equal up to rounding (q is exact); inf when a handful
        of draws carries all the weight; NaN, with a warning, when the model's log density is NaN or +inf at a draw.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.

    References:
        Yao et al., Yes, but Did It Work?: Evaluating Variational Inference, section 3. Vehtari et al., Pareto Smoothed
        Importance Sampling.
    """
    plan = state.plan
    q = posterior(state.prior, state.sites)
    check_draws(num_samples, plan, q)
    fixed = model, plan.partition.layout, plan.family, q, args, kwargs, params
    own = None if local is None else (plan.partition.local, local)
    return settled(
        lambda count: log_importance_weights(rng_key, *fixed, num_samples=count, local=own),
        num_samples,
        (q, args, kwargs),
    )


def settled(weights_of: Callable[[int], Any], num_samples: int, read: Any) -> float:
    """k-hat of some draws, or of more where these are too few to say that q is bad.

    The tail of S draws is the largest ``3 sqrt(S)`` weights, a tenth of a thousand. Of a q that is nearly right, log weights
    are about cubic in a skewed direction: they have a local maximum near one sd, and the largest tenth mixes the draws about it
    with those of the far tail. A Pareto shape fitted to both is above 1 where that of the far tail is .2. ``weights_of``: a
    number of draws to their log weights. Returns k-hat: of eight times as many draws, up to 64 times, while it is above .7 and
    the effective sample size above S / 2, as far as that reads a hundred million numbers at most.
    """
    count, size = num_samples, sum(jnp.size(x) for x in jax.tree.leaves(read))
    while True:
        weights = np.asarray(weights_of(count))
        found = judged(weights, count)
        more = _MORE * count
        if not (USABLE < found < np.inf) or more > _MORE**2 * num_samples or more * size > _MOST_READ:
            return found
        shares = np.exp(weights - weights.max(), dtype=np.float64)
        if shares.sum() ** 2 < _NEARLY_EQUAL * count * (shares**2).sum():
            return found
        count = more


def check_draws(num_samples: int, plan: Any, q: Any) -> None:
    """Refuse too few draws, and a q that cannot be drawn from.

    Raises PVIError for fewer than 100 draws; ImproperError when q is not normalisable.
    """
    if num_samples < MIN_SAMPLES:
        raise PVIError(f"khat(num_samples={num_samples!r}): the fit of the tail needs at least {MIN_SAMPLES} draws.")
    if not bool(plan.family.in_domain(q)):
        raise ImproperError("q is not normalisable, so it cannot be drawn from: run more rounds before calling khat.")


def judged(log_weights: Float[np.ndarray | Array, "S"], num_samples: int) -> float:
    """k-hat of some log weights; NaN, with a warning, where some are NaN or +inf.

    ``log_weights``: in nats, up to a constant. Returns k-hat.
    """
    values = np.asarray(log_weights)
    bad = int(np.sum(np.isnan(values) | (values == np.inf)))
    if bad:
        warn(
            f"khat is NaN: the model's log density is NaN or +inf at {bad} of {num_samples} draws from q; look for "
            "a latent that overflows there (an exp link, a scale near zero).",
        )
    return pareto_khat(values, rounding=float(np.sqrt(np.finfo(values.dtype).eps)))


def log_importance_weights(
    rng_key: Any,
    model: Callable,
    layout: Layout,
    family: GaussianFamily,
    natural: GaussianNatural,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int,
    local: Any = None,
) -> Float[Array, "S"]:
    """Log importance weights of draws from a Gaussian in unconstrained space, up to a constant.

    ``params``: constrained values of the model's ``numpyro.param`` sites; ``local``: layout of the local latents, and their
    natural parameters given the shared ones by unit; or None. Returns ``log p(y, theta_s) - log q(theta_s)`` minus its value at
    q's location, in nats.
    """
    arrays, static = split_arguments(args, kwargs)
    own, rows = (None, None) if local is None else local
    return _log_weights(model, (layout, own), family, static, num_samples, rng_key, natural, params, arrays, rows)


@functools.partial(owned_jit, static_argnames=("model", "layouts", "family", "static", "num_samples"))
def _log_weights(model, layouts, family, static, num_samples, rng_key, natural, params, arrays, local):
    call = ModelCall(model, layouts[0], *join_arguments(arrays, static), params, layouts[1])
    moments, own = family.moments(natural), None if local is None else conditional_moments(local)

    def at(point, noise):
        return call if own is None else dataclasses.replace(call, local=own.draw(point, noise))

    # Every term is taken relative to its value at q's location before summing: over many rows the sums are large and
    # nearly equal, and float32 would keep little of their differences.
    mean = at(moments.loc, None if local is None else jnp.zeros_like(local.linear))
    centre = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), _log_terms(mean, moments.loc))

    def terms(noise):
        point = family.draw(moments, noise[0])
        return jax.tree.map(jnp.subtract, _log_terms(at(point, noise[1]), point), centre)

    def weight(noise):
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(noise))
        return sum(jnp.sum(x) for x in jax.tree.leaves(terms(noise))) + 0.5 * squares

    noise = _standard_normals(rng_key, num_samples, moments.loc, local)
    return map_draws(weight, noise, num_samples, elements_of=terms)


def _log_terms(call: ModelCall, point: Float[Array, "D"]) -> dict[str, Array]:
    """Elementwise log densities of every sample site, latent and observed."""
    trace, jacobians = call.trace(point)
    return {n: site_log_prob(s, jacobians.get(n)) for n, s in trace.items() if s["type"] == "sample"}


# ---------------------------------------------------------------------------------------- k-hat of products of families
# How far a product of families is from the exact posterior, by importance weights in the latents' own supports.


def khat_of_product(
    weights_of: Callable[[int], Any],
    state: PVIState,
    read: Any,
    *,
    num_samples: int = 1000,
    by_group: bool = False,
    elsewhere: Callable[[Any, Any], dict] | None = None,
) -> Any:
    """Pareto k-hat of the importance weights from a product of families to the exact posterior: see :func:`khat`.

    At draws of all latents in their own supports, rows' own and discrete ones among them; latents that the model sums out stay
    summed out. A change of variables multiplies both densities alike, so that this is k-hat in unconstrained space as well.

    Args:
        weights_of: from a number of draws S to Float[S], log weights in nats up to a constant; or by group to Float[S F], those of
            every factor whose rows are here over its site, the prior factor's (if any) first.
        state: a state; it is only read.
        read: arrays that every draw reads.
        num_samples: draws S from q, at least 100; more are taken as of :func:`khat`.
        by_group: whether factors are judged: see :func:`khat_by_group`.
        elsewhere: of q and the groups' sites, k-hat by label where holders have the rows; None where they are here.

    Returns:
        k-hat, as of :func:`khat`; by group a dict of one by label, ``PRIOR`` first where the prior has a site.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.
    """
    q, part = posterior(state.prior, state.sites), state.plan.partition
    check_draws(num_samples, state.plan, q)
    if not by_group:
        return settled(weights_of, num_samples, (q, read))
    labels = (*((PRIOR,) if part.has_prior_factor else ()), *(part.table.labels if elsewhere is None else ()))
    found = dict(zip(labels, _settled_each(weights_of, len(labels), num_samples, (q, read)), strict=True))
    return found if elsewhere is None else found | elsewhere(q, state.sites.groups)


def product_weights(
    rng_key: Any,
    model: Callable,
    plan: Any,
    q: ProductNatural,
    args: tuple,
    kwargs: dict,
    num_samples: int,
    params: dict | None = None,
) -> Float[Array, "S"]:
    """Log importance weights of :meth:`ProductFamily.sample`, up to a constant.

    ``params``: constrained values of the model's ``numpyro.param`` sites. Returns ``log p(y, theta_s) - log q(theta_s)`` less
    its value at the first draw, in nats.
    """
    arrays, static = split_arguments(args, kwargs)
    return _weights(model, plan.family, plan.blocks, static, num_samples, rng_key, q, arrays, params or {})


@functools.partial(owned_jit, static_argnames=("model", "family", "blocks", "static", "num_samples"))
def _weights(
    model: Callable,
    family: Any,
    blocks: tuple[JointBlock, ...],
    static: tuple,
    num_samples: int,
    rng_key: Any,
    q: ProductNatural,
    arrays: list,
    params: dict,
) -> Array:
    call = ValueCall(model, *join_arguments(arrays, static), params=params)
    draws = family.sample(q, rng_key, (num_samples,))

    def terms(values: dict) -> tuple[dict, dict]:
        trace = call.trace(latent_values(blocks, values))
        model_terms = {n: site_log_prob(s) for n, s in trace.items() if s["type"] == "sample"}
        own = {n: (f.sufficient_statistics(values[n]), f.log_base_measure(values[n])) for n, f in family.components}
        return model_terms, own

    # Terms and statistics are compared with those of the first draw one by one: over many rows the sums are large and nearly
    # equal, and float32 would keep little of their differences.
    first = terms(jax.tree.map(lambda x: x[0], draws))
    first = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), first)

    def weight(values: dict) -> Array:
        model_terms, own = jax.tree.map(jnp.subtract, terms(values), first)
        found = sum(jnp.sum(x) for x in model_terms.values())
        for name, part in family.components:
            statistics, base = own[name]
            found = found - part.inner(q.parts[name], statistics) - base
        return jnp.asarray(found)

    return map_draws(weight, draws, num_samples, elements_of=terms)


def product_group_weights(
    rng_key: Any,
    engine: ProductEngine,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    num_samples: int,
    likelihood: bool = True,
) -> Float[Array, "S F"]:
    """Log weights of every factor over its site at draws of :meth:`ProductFamily.sample`, the prior factor (if any) first.

    ``likelihood``: whether the groups' are among them. Returns in nats, less their values at the first draw; their sum over
    factors is that of :func:`product_weights`.
    """
    arrays, static = split_arguments(args, kwargs)
    return _factor_weights(engine, static, num_samples, rng_key, state, arrays, likelihood=likelihood)


@functools.partial(owned_jit, static_argnames=("engine", "static", "num_samples", "likelihood"))
def _factor_weights(
    engine: ProductEngine,
    static: tuple,
    num_samples: int,
    rng_key: Any,
    state: PVIState,
    arrays: list,
    likelihood: bool,
) -> Array:
    problem, sites = engine.problem(state, *join_arguments(arrays, static)), state.sites
    q = posterior(state.prior, sites)
    if engine.solver.tied:
        one = tied_site(sites.groups, problem.num_groups)
        groups = jax.tree.map(lambda x: jnp.broadcast_to(x, (problem.num_groups, *x.shape)), one)
        sites = dataclasses.replace(sites, groups=groups)
    return _weights_over_sites(problem, q, sites, rng_key, num_samples, likelihood)


def khat_of_members(
    rng_key: Any,
    model: Callable,
    plan: Any,
    q: ProductNatural,
    sites: ProductNatural,
    packing: Any,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
) -> list[float]:
    """k-hat of every group whose rows are given, in order, under a product of families: see :func:`khat_of_product`.

    Args:
        rng_key: random key; all groups are judged at the same draws.
        model: the NumPyro model.
        plan: the plan of these rows, none of which has latents of its own.
        q: natural parameters.
        sites: those of the groups, with a leading axis.
        packing: of the rows.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_samples: draws S from q.
    """
    arrays, static = split_arguments(args, kwargs)

    def weights(count: int) -> Any:
        return _member_weights(model, plan, static, count, rng_key, q, sites, packing, params, arrays)

    return _settled_each(weights, len(plan.partition.table.labels), num_samples, (q, args, kwargs))


@functools.partial(owned_jit, static_argnames=("model", "plan", "static", "num_samples"))
def _member_weights(
    model: Callable,
    plan: Any,
    static: tuple,
    num_samples: int,
    rng_key: Any,
    q: ProductNatural,
    sites: ProductNatural,
    packing: Any,
    params: dict,
    arrays: list,
) -> Array:
    call = ValueCall(plan.partition.model(model), *join_arguments(arrays, static), params=params)
    # Of the problem nothing is asked but its factors' densities: q is told, and nothing is drawn by it.
    problem = ProductProblem(plan, call, packing, q, 1, Vmap())
    return _weights_over_sites(problem, q, SiteStack(sites, None), rng_key, num_samples)


def _weights_over_sites(
    problem: ProductProblem, q: ProductNatural, sites: Any, rng_key: Any, num_samples: int, likelihood: bool = True
) -> Float[Array, "S F"]:
    """See :func:`product_group_weights`; ``sites``: one of each factor that is judged."""
    plan, families, values = problem.plan, dict(problem.family.components), []
    draws = problem.family.sample(q, rng_key, (num_samples,))

    def of_sites(values: dict) -> list[Array]:
        statistics = {n: f.sufficient_statistics(values[n]) for n, f in families.items()}

        def paired(site: ProductNatural) -> Array:
            return sum((families[n].inner(x, statistics[n]) for n, x in site.parts.items()), start=jnp.zeros(()))

        prior = () if sites.prior is None else (paired(sites.prior)[None],)
        if not likelihood:
            return [*prior]
        groups = jax.vmap(paired)(sites.groups)
        for name, own in () if sites.local is None else sites.local.parts.items():
            member, natural, mean = member_family(families[name], own, statistics[name])
            groups = groups + plan.sum_by_group(name, jnp.asarray(member.inner(natural, mean)), problem.packing)
        return [*prior, groups]

    if sites.prior is not None:
        values.append(factor_values(problem, "prior factor", draws)[0])
    if likelihood:
        values.append(factor_values(problem, "likelihood", draws)[0])
    if not values:
        return jnp.zeros((num_samples, 0))
    found = jnp.concatenate(values, axis=1) - jnp.concatenate(jax.lax.map(of_sites, draws), axis=1)
    # Where the first draw is outside a factor's support nothing is taken off.
    return found - jnp.where(jnp.isfinite(found[0]), found[0], 0.0)


# ------------------------------------------------------------------------------------------------------ k-hat of groups
# How well each group's site stands in for its factor where q is, by importance weights.


def khat_by_group(
    rng_key: Any,
    model: Callable,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
    local: Any = None,
    elsewhere: Any = None,
) -> dict[Hashable, float]:
    """Pareto k-hat of ``p(y_m | theta) / t_m(theta)`` at draws from q, for every group m.

    These are the weights from q to the tilted distribution of group m: q with the exact factor in its site's place. Their product
    over all factors is the weight from q to the posterior, which :func:`khat` judges.

    Args:
        rng_key: random key.
        model: the NumPyro model, as factors are read off it.
        state: a Gaussian fit's state with dense sites, all rows at hand; it is only read.
        args: the model's positional arguments. All rows are read.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_samples: draws S from q, at least 100; more are taken as of :func:`khat`.
        local: natural parameters of every unit's local latents given the shared ones, or None.
        elsewhere: who has the rows (:class:`numpyro_pvi.runtime.Elsewhere`), and judges its own site; None where they are here.

    Returns:
        k-hat by label, ``PRIOR`` first where the prior has a site; read as :func:`khat`'s. Of a factor that is quadratic in the
        latents it is 0.

    Raises:
        PVIError: for fewer than 100 draws.
        ImproperError: when q is not normalisable.
    """
    plan, part = state.plan, state.plan.partition
    q = posterior(state.prior, state.sites)
    check_draws(num_samples, plan, q)
    sites, groups = state.sites.groups, len(part.table.labels)
    if plan.tied:
        sites = jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape)), tied_site(sites, groups))
    found = {}
    if part.has_prior_factor:
        arrays, static = split_arguments(args, kwargs)
        fixed = model, part, plan.family, static
        found[PRIOR] = settled(
            lambda count: _site_weights(*fixed, count, rng_key, q, state.sites.prior, None, params, arrays, None),
            num_samples,
            (q, args, kwargs),
        )
    if elsewhere is not None:
        return found | elsewhere.judged(plan, rng_key, q, sites, params, num_samples)
    fixed = rng_key, model, part, plan.family, q, sites, state.packing, args, kwargs, params
    own = khat_of_sites(*fixed, num_samples=num_samples, local=local)
    return found | dict(zip(part.table.labels, own, strict=True))


def khat_of_sites(
    rng_key: Any,
    model: Callable,
    part: Any,
    family: Any,
    q: Any,
    sites: Any,
    packing: Any,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
    local: Any = None,
) -> list[float]:
    """k-hat of every group whose rows are given, in order: see :func:`khat_by_group`.

    Args:
        rng_key: random key; all groups are judged at the same draws.
        model: the NumPyro model, as factors are read off it.
        part: the plan of these rows.
        family: of q.
        q: natural parameters.
        sites: those of the groups, with a leading axis.
        packing: of the rows.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_samples: draws S from q.
        local: natural parameters of every unit's local latents given the shared ones, or None.
    """
    arrays, static = split_arguments(args, kwargs)

    def weights(count: int) -> Any:
        return _site_weights(model, part, family, static, count, rng_key, q, sites, packing, params, arrays, local)

    return _settled_each(weights, len(part.table.labels), num_samples, (q, args, kwargs))


def _settled_each(weights_of: Callable[[int], Any], factors: int, num_samples: int, read: Any) -> list[float]:
    """:func:`settled` of every factor, whose weights at the same draws are columns."""
    known = functools.cache(lambda count: np.asarray(weights_of(count)))
    return [settled(lambda count, i=i: known(count)[:, i], num_samples, read) for i in range(factors)]


@functools.partial(owned_jit, static_argnames=("model", "part", "family", "static", "num_samples"))
def _site_weights(
    model: Callable,
    part: Any,
    family: Any,
    static: tuple,
    num_samples: int,
    rng_key: Any,
    natural: Any,
    sites: Any,
    packing: Any,
    params: dict,
    arrays: list,
    local: Any,
) -> Float[Array, "S *M"]:
    """Log weights of the groups' factors over their sites, at common draws; of the prior factor over its own without a packing.

    Latents of rows' own are drawn given the shared ones, and count by their density in the model over that in q.
    """
    call = whole_call(model, part, *join_arguments(arrays, static), params)
    moments, own = family.moments(natural), None if local is None else conditional_moments(local)

    def terms(point: Array, noise: Array | None) -> tuple[Array, Array, Array]:
        """A factor's log density, and the log of its site as two terms."""

        def of_site(site: Any) -> tuple[Array, Array]:
            return jnp.vdot(site.precision_mean, point), -0.5 * jnp.vdot(point, family.precision_product(site, point))

        if packing is None:
            factor = prior_factor_log_density(call, point, part.prior_latents, part.outside, part.rows)
            return factor, *of_site(sites)
        drawn = None if own is None else own.draw(point, noise)
        return chunk_log_likelihoods(part, packing, call, point, drawn), *jax.vmap(of_site)(sites)

    # Relative to q's location, as of the whole q's weights.
    centre = terms(moments.loc, None if local is None else jnp.zeros_like(local.linear))
    centre = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), centre)

    def differences(noise: tuple[Array, Array | None]) -> tuple[Array, Array, Array]:
        return jax.tree.map(jnp.subtract, terms(family.draw(moments, noise[0]), noise[1]), centre)

    def weight(noise: tuple[Array, Array | None]) -> Array:
        factor, linear, square = differences(noise)
        found = factor - linear - square
        if noise[1] is None:
            return found
        return found + 0.5 * sum_of_units(part, packing, jnp.sum(noise[1] ** 2, axis=-1))

    noise = _standard_normals(rng_key, num_samples, moments.loc, local)
    return map_draws(weight, noise, num_samples, elements_of=differences)


def _standard_normals(rng_key: Any, num_samples: int, loc: Float[Array, "D"], local: Any) -> tuple[Array, Array | None]:
    """Of the shared latents, and of every unit's own where ``local``, their natural parameters, is not None."""
    noise = jax.random.normal(rng_key, (num_samples, *loc.shape), loc.dtype)
    if local is None:
        return noise, None
    return noise, jax.random.normal(jax.random.fold_in(rng_key, 1), (num_samples, *local.linear.shape), loc.dtype)


# ---------------------------------------------------------------------------------------------------------- unseen rows
# How well q foretells rows that it has not seen.


class LogScore(NamedTuple):
    """Log predictive densities of rows under q, in nats; higher is better.

    Attributes:
        rows: Float[N], of each row by itself, ``log E_q[p(y_n | theta)]``, in the order in which the rows were given.
        joint: of all rows together, ``log E_q[prod_n p(y_n | theta)]``: what rows say of each other counts.
        ess: effective number of draws behind ``joint``; below some tens it is too low by chance, and ``rows`` is the better
            figure.
    """

    rows: Float[Array, "N"]
    joint: Float[Array, ""]
    ess: Float[Array, ""]

    @property
    def total(self) -> Float[Array, ""]:
        """Sum over the rows of their own log predictive densities, in nats."""
        return jnp.sum(self.rows)


def log_score(
    rng_key: Any,
    model: Callable,
    state: PVIState,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    num_rows: int,
    *,
    num_samples: int = 1000,
) -> LogScore:
    """Log predictive density of rows under q, by Monte Carlo.

    ``rows[n] = log 1/S sum_s p(y_n | theta_s)`` and ``joint = log 1/S sum_s prod_n p(y_n | theta_s)`` with ``theta_s`` from q.
    Latents of the rows' own are drawn from their prior given ``theta_s``, once for every s; discrete ones are summed out.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        state: a state that has not seen these rows; it is only read.
        args: the rows.
        kwargs: likewise.
        params: constrained values of the model's ``numpyro.param`` sites.
        num_rows: number of rows.
        num_samples: draws S.

    Returns:
        The scores. Both estimates are too low by about half their relative variance; neither counts observed sites outside the
        partitioned plates.

    Raises:
        PVIError: for fewer than 2 draws.
        ImproperError: when q is not normalisable.

    References:
        Dawid, Statistical Theory: The Prequential Approach, J. R. Statist. Soc. A 147 (1984), section 2.
    """
    if num_samples < 2:
        raise PVIError(f"prequential(num_samples={num_samples!r}): expected at least 2 draws from q.")
    plan = state.plan
    q = posterior(state.prior, state.sites)
    if not bool(plan.family.in_domain(q)):
        raise ImproperError("q is not normalisable, so it foretells nothing: run rounds, or use a proper prior.")
    part, length = plan.partition, 0
    if part.mechanism == "args":
        length = padded_length(num_rows)
        args, kwargs = pad_rows(part.reading.axes, args, kwargs, length)
    arrays, static = split_arguments(args, kwargs)
    draws = plan.shared_draws(q, rng_key, num_samples)
    # Not the whole plan, which knows labels and sizes of the state's own groups: a program serves rows of any group.
    reading = part.enumeration, plan.latents, part.rows
    counted = num_rows if length else -1
    rows, joint, ess = _scores(model, reading, static, draws, rng_key, params, arrays, jnp.int32(counted))
    return LogScore(rows[:num_rows] if length else rows, joint, ess)


@functools.partial(owned_jit, static_argnames=("model", "reading", "static"))
def _scores(model, reading, static, draws, rng_key, params, arrays, num_rows):
    """Scores of the first ``num_rows`` rows; of all of them where it is negative."""
    enumeration, latents, axes = reading
    model = model if enumeration is None else summed_out(model, enumeration)
    args, kwargs = join_arguments(arrays, static)
    count = jax.tree.leaves(draws)[0].shape[0]
    keys = jax.random.split(jax.random.fold_in(rng_key, 1), count)

    def rows_at(draw, key):
        return observed_log_likelihood(latents.trace(model, args, kwargs, params, draw, key), axes)

    def one(total, drawn):
        rows = rows_at(*drawn)
        counted = (num_rows < 0) | (jnp.arange(rows.shape[0]) < num_rows)
        return jnp.logaddexp(total, rows), jnp.sum(jnp.where(counted, rows, 0.0))

    shape = jax.eval_shape(rows_at, *jax.tree.map(lambda x: x[0], (draws, keys)))
    # One draw after another: all at once would hold every row's density under each.
    first = jnp.full(shape.shape, -jnp.inf, shape.dtype)
    total, joint = jax.lax.scan(one, first, (draws, keys))
    log_count = jnp.log(jnp.asarray(count, shape.dtype))
    weights = jax.nn.softmax(joint)
    return total - log_count, jax.nn.logsumexp(joint) - log_count, 1.0 / jnp.sum(weights**2)
