"""Latents inside the partitioned plate and discrete ones under AutoExponentialFamily: planned around, and begun apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ._compiling import look
from ._exponential_guide import AutoExponentialFamily
from ._state import PVIState
from .errors import GuideError
from .factors import Planned, is_latent, join_arguments, plan_factors, split_arguments, with_values_held
from .families import ProductFamily, ProductNatural, base_family
from .handlers import Partition, RowAxes
from .runtime import ProductEngine, RowLatent, apart, best_of_short_runs, curvature_start, first_weights, spread
from .sites import posterior


def plan_beside(
    partition: Partition, family: ProductFamily, held: tuple[str, ...], args: tuple, kwargs: dict, key: Any
) -> Planned:
    """Plan how groups are read, with the discrete latents that q holds at one value.

    Args:
        partition: the model with its grouping.
        family: of q.
        held: the latents.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.
        key: a random key.

    Returns:
        The plan, in which those latents are no observations.
    """
    if partition.mode == "auto" and any(base_family(f).chained for _, f in family.components):
        # A chain has as many states as there are rows: looking up a chunk's states in it costs as much as all rows.
        partition = partition._copy(mode="mask")
    if not held:
        return plan_factors(partition, args, kwargs, key=key)
    assert partition.fn is not None  # PVI was given a model
    planned = plan_factors(partition._copy(fn=with_values_held(partition.fn, held)), args, kwargs, key=key)
    plan = dataclasses.replace(
        planned.plan,
        observed=tuple(n for n in planned.plan.observed if n not in held),
        outside=tuple(n for n in planned.plan.outside if n not in held),
    )
    return dataclasses.replace(planned, plan=plan)


def inside_of(trace: dict, rows: RowAxes, guide: AutoExponentialFamily) -> tuple[RowLatent, ...]:
    """The latents inside the partitioned plate.

    Args:
        trace: an abstract trace of the model.
        rows: the partitioned axes.
        guide: set up.

    Returns:
        The latents.

    Raises:
        GuideError: for a joint block with one of them, or where they are in several partitioned plates.
    """
    axes = {n: axis for n, s in trace.items() if is_latent(s) and (axis := rows.of(s)) is not None}
    blocked = [n for n in axes if n not in guide._latents]
    if blocked:
        raise GuideError(
            f"joint={[list(block.names) for block in guide._blocks]}: latent {blocked[0]!r} is inside the partitioned plate, one "
            "per row, and a Gaussian with full covariance would couple the rows: leave it out of the block."
        )
    if len({axis.key for axis in axes.values()}) > 1:
        raise GuideError(
            f"latents {', '.join(map(repr, axes))} are in several partitioned plates: keep those of one plate inside it, and "
            "declare the others outside, in plates of their own."
        )
    ranks = {n: len(trace[n]["fn"].batch_shape) for n in axes}
    return tuple(RowLatent(n, ranks[n] + axis.dim, guide._latents[n].family, axis.key) for n, axis in axes.items())


def begun(
    engine: ProductEngine, state: PVIState, start: ProductNatural, args: tuple, kwargs: dict, curved: bool
) -> PVIState:
    """Put q where its rounds begin: at the prior, but for what would stay there for ever, or for very long.

    Latents that are taken by quadrature begin at the curvature of the groups' factors. Where values are summed over, q
    begins where the best of a few short runs ends (not where moments are matched); else latents inside the partitioned plate
    begin half way to a draw each.

    Args:
        engine: of the fit.
        state: with sites at 1.
        start: the prior, or the members of the families nearest to it.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.
        curved: whether sites may begin at curvatures.

    Returns:
        The state.
    """
    plan: Any = state.plan
    by_predictors = plan.likelihood.by_predictors and not plan.inside
    if curved and (plan.likelihood.by_nodes or by_predictors) and not plan.summed:
        arrays, static = split_arguments(args, kwargs)

        def curvature(state: PVIState, arrays: list) -> Any:
            args, kwargs = join_arguments(arrays, static)
            return curvature_start(engine.problem(state, args, kwargs), state.sites, engine.noise(state.rng_key))

        return dataclasses.replace(state, sites=look(curvature, state, arrays))
    if engine.solver.matches_moments or (not plan.inside and not plan.summed):
        return state
    key, old = jax.random.fold_in(state.rng_key, 0), posterior(state.prior, state.sites)
    q = ProductNatural({n: start.parts[n] if n in plan.row_axes else x for n, x in old.parts.items()})
    if not plan.summed:
        q = look(lambda q, key: apart(plan.family, tuple(plan.row_axes), q, key), q, key)
    else:
        arrays, static = split_arguments(args, kwargs)

        def run(state: PVIState, q: Any, weights: dict, arrays: list) -> Any:
            args, kwargs = join_arguments(arrays, static)
            return best_of_short_runs(engine.problem(state, args, kwargs), q, weights, engine.noise(state.rng_key))

        q = look(run, state, q, first_weights(plan, key), arrays)
    return dataclasses.replace(state, sites=spread(plan, state.sites, q - old))
