"""Which way of taking tilted moments fits a factor of a product of families, and what moments are not matched of."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import PVIError
from ..expectations import (
    GRID_DIM,
    ImportanceMoments,
    LaplaceMoments,
    MCMCMoments,
    discrete_of,
    grid_of,
    with_settings,
)
from ..families import ProductFamily
from ._product_plan import ProductPlan, touched

# Ways that are noisy: late rounds are averaged.
SAMPLED_WAYS = frozenset({"importance", "laplace", "mcmc"})


def method_of_factor(family: ProductFamily, affine: bool, moments: Any, where: str, owner: str = "PowerEP") -> str:
    """How a factor's tilted moments are taken.

    Args:
        family: the components that the factor depends on.
        affine: whether it is affine in their statistics jointly.
        moments: what was asked for.
        where: the factor's name.
        owner: the solver's name.

    Returns:
        "exact", "quadrature", "importance", "laplace" or "mcmc".

    Raises:
        PVIError: where what was asked for does not fit.
    """
    wanted, fits = with_settings(moments), affine or not family.components
    if isinstance(wanted, LaplaceMoments | MCMCMoments) and family.components:
        return _of_points(family, wanted, moments, where, owner)
    if isinstance(wanted, ImportanceMoments | LaplaceMoments | MCMCMoments):
        return "importance" if family.components else "exact"
    if fits and wanted in ("auto", "exact"):
        return "exact"
    names = ", ".join(n for n, _ in family.components)
    if wanted == "exact":
        raise PVIError(
            f"{owner}(moments='exact'): the {where} is not affine in the statistics of {names} jointly; leave moments='auto'."
        )
    if not family.components or grid_of(family) is not None:
        return "quadrature" if family.components else "exact"
    if wanted == "quadrature":
        raise PVIError(
            f"{owner}(moments='quadrature'): the {where} sees {names}, and quadrature takes at most {GRID_DIM} numbers of "
            "scalar or normal latents (or a Dirichlet's three shares) together, with a few values of discrete ones; use "
            "moments='importance'."
        )
    return "importance"


def _of_points(family: ProductFamily, wanted: Any, moments: Any, where: str, owner: str) -> str:
    """The way of a Laplace approximation or of chains, which need every latent to be continuous."""
    discrete = discrete_of(family)
    if discrete:
        raise PVIError(
            f"{owner}(moments={moments!r}): the {where} sees {', '.join(discrete)} with finitely many values, where no gradient "
            "leads; use moments='importance', or leave discrete latents without a family so that they are summed out."
        )
    if isinstance(wanted, LaplaceMoments):
        return "laplace"
    if wanted.kernel == "langevin":
        raise PVIError(
            f"{owner}(moments={moments!r}): chains on mini-batches are for Gaussian guides; under AutoExponentialFamily use "
            "kernel='nuts', 'hmc' or 'lockstep'."
        )
    return "mcmc"


def check_tilted(plan: ProductPlan, owner: str) -> None:
    """Refuse what moments are not matched of.

    Args:
        plan: the plan.
        owner: the solver's name.

    Raises:
        PVIError: naming the latents inside the plate.
    """
    if plan.inside:
        names = ", ".join(latent.name for latent in plan.inside)
        raise PVIError(
            f"{owner} under AutoExponentialFamily: latent(s) {names} are inside the partitioned plate, where moments are not "
            "matched: use solver=NaturalGradient(), leave discrete ones without a family so that they are summed out, or use "
            "PowerEP with AutoMultivariateNormal, which integrates out continuous ones."
        )


def with_tilted(plan: ProductPlan, solver: Any, affine: tuple[bool, bool]) -> ProductPlan:
    """The plan with the ways in which tilted moments are taken.

    Args:
        plan: the plan.
        solver: whose ``moments`` count.
        affine: as of :func:`jointly_affine`.

    Returns:
        The plan.

    Raises:
        PVIError: where what was asked for does not fit.
    """
    factors = ((plan.likelihood, "groups' likelihood"), (plan.prior_factor, "prior factor"))
    found = []
    for (factor, where), flag in zip(factors, affine, strict=True):
        if factor is not None:
            found.append(
                method_of_factor(touched(plan.family, factor), flag, solver.moments, where, type(solver).__name__)
            )
    if found[0] == "mcmc" and solver.factors == "row":
        raise PVIError(
            f"PowerEP(factors='row', moments={solver.moments!r}): every row would have chains of its own; leave moments='auto', or "
            "use factors='group'."
        )
    return dataclasses.replace(plan, tilted=tuple(found))
