"""Random groups and random rows under AutoExponentialFamily: what goes together, and in which order latents then move."""

from __future__ import annotations

from typing import Any

from .errors import PVIError
from .runtime import Labels, ProductPlan, RowLatent, is_partial, most_groups
from .solvers import resolve


def blocks_of(solver: Any, inside: tuple[RowLatent, ...]) -> Any:
    """The order in which latents move: under mini-batches the rows' own first, since shared ones look at them.

    Args:
        solver: of the fit.
        inside: latents inside the partitioned plate.

    Returns:
        What :func:`turns_of` takes.
    """
    if solver.stochastic:
        return tuple(latent.name for latent in inside) or "auto"
    return solver.blocks


def check_partial(solver: Any, schedule: Any, plan: ProductPlan) -> None:
    """Refuse random groups and rows that do not fit the groups or the model.

    Args:
        solver: of the fit.
        schedule: of the fit.
        plan: of the fit.

    Raises:
        PVIError: naming the group, the latent or the argument.
    """
    if not schedule.fuses(solver) and plan.inside:
        instead = "" if solver.fused_families else "solver=NaturalGradient() and "
        raise PVIError(
            f"{type(schedule).__name__} with {type(solver).__name__} under AutoExponentialFamily is for models whose rows have no "
            f"latents of their own, and {plan.inside[0].name!r} is inside the partitioned plate: write {instead}"
            "schedule=Synchronous(), or integrate it out."
        )
    if not is_partial(solver, schedule):
        return
    table = plan.partition.table
    if solver.stochastic:
        sizes = dict(zip(table.labels, table.sizes, strict=True))
        solver.check_groups(sizes, plan.partition.reading.mechanism)
    if schedule.partial:
        if most_groups(schedule, table.num_groups) > table.num_groups:
            raise PVIError(f"StochasticSubset(k={schedule.k}): there are only {table.num_groups} groups.")
        if schedule.rates is not None:
            resolve(schedule.rates, "StochasticSubset(rates)", Labels(table.num_groups, table.labels), 1.0)
