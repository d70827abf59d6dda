"""Where the groups' sites start."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._numerics import all_finite, clip_to_psd
from ..errors import PVIError
from ..expectations import FIXED_RULES, LocalNoise, PointsProgram
from ..families import ConditionalNatural, GaussianMoments, GaussianNatural, RowMoments
from ..schedules import Rule
from ..sites import LocalSites, OwnConditionals, SiteStack, keep_groups, posterior, select
from ._local import LocalProblem
from ._row_problem import RowProblem
from ._rules import first_rule, relative_error

# The first step from the prior may be cruder still: at worst a step is halved.
START_TOLERANCE = 0.3
# Scale of the q, in prior sds, under which a factor's curvature at a point is read from gradients.
POINT_SCALE = 0.01


def first_sites(
    problem: LocalProblem | RowProblem, at_prior: GaussianMoments | RowMoments, loc: Float[Array, "D"], mode: str
) -> tuple[SiteStack, Rule]:
    """Where the groups' sites start.

    Args:
        problem: the factors.
        at_prior: the prior as moments.
        loc: its location.
        mode: "prior" (unit sites), "curvature" (each factor's positive semi-definite curvature and gradient at
            ``loc``, the cure for wide priors), or "auto": curvature, or one natural-gradient step of all groups
            from the prior where a fixed quadrature rule resolves every factor there and the global ELBO is higher
            after it.

    Returns:
        Sites (the prior factor's is None), and the quadrature rule to begin with. A factor that is not finite where
        it is read gets the unit site.
    """
    if mode == "prior":
        return problem.empty_sites(None), first_rule(problem.dtype)
    points = isinstance(problem.program, PointsProgram)
    # One row of zeros evaluates at the location; points at a distance read the curvature there from gradients.
    zero = jnp.zeros((1, problem.family.dim), problem.dtype)
    draws = problem.draws_of(problem.program, None, None) if points else zero

    def look(xs):
        moments, clip = xs
        expect = partial(
            problem.expect,
            problem.program,
            moments=moments,
            probe=None,
            level=len(FIXED_RULES) - 1,
            noise=draws,
            clip=clip,
        )
        return problem.sum_groups(expect)

    def stage(moments, _):
        found = jax.lax.map(look, (moments, jnp.array([False, True])))
        finite = getattr(problem, "finite_sites", None) or partial(_finite_sites, problem)
        sites = jax.vmap(finite)(found.target)
        after = jax.vmap(
            lambda groups: problem.family.moments(posterior(problem.prior_natural, SiteStack(groups, None)))
        )(sites)
        return after, (found, sites, after.valid, jnp.sum(found.value, axis=-1) + jax.vmap(problem.rest)(moments))

    point = at_prior._replace(loc=loc, scale=(POINT_SCALE if points else 0.0) * at_prior.scale)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), at_prior, point)
    quick = mode == "curvature" or problem.redraws or points
    # First at the prior and at its location, then at the two q that come of it: one program for all four looks.
    _, (found, sites, valid, elbo) = jax.lax.scan(stage, both, length=1 if quick else 2)
    first = [jax.tree.map(lambda x, i=i: x[0, i], sites) for i in (0, 1)]
    if quick:
        return SiteStack(first[1], None), first_rule(problem.dtype)
    prior_look = jax.tree.map(lambda x: x[0, 0], found)
    usable = (
        jnp.all(problem.data.exact)
        & all_finite(prior_look)
        & (relative_error(prior_look) <= START_TOLERANCE)
        & valid[0, 0]
    )
    better = usable & ((elbo[1, 0] > elbo[1, 1]) | ~valid[0, 1])
    rules = [first_rule(problem.dtype, jnp.max(found.spread[1, i])) for i in (0, 1)]
    return SiteStack(select(better, *first), None), select(better, *rules)


def refuse_curvature(solver: Any, mode: str) -> None:
    """Raise where sites should start from curvature though moments are matched and local latents integrated out.

    Raises:
        PVIError: naming what to write instead.
    """
    if mode == "curvature":
        raise PVIError(
            f"init_sites='curvature' does not fit {type(solver).__name__} with local latents, whose integrals at a single point "
            "say little: leave init_sites out, so that sites start at 1."
        )


def first_local_sites(
    problem: LocalProblem, at_prior: GaussianMoments, loc: Float[Array, "D"], mode: str, rows: ConditionalNatural
) -> tuple[SiteStack, Rule]:
    """Where sites of groups with local latents start.

    Args:
        problem: the factors.
        at_prior: the prior as moments.
        loc: its location.
        mode: "prior" and "auto" (unit sites: in a hierarchy the curvature at one point says little), or
            "curvature": each factor's positive semi-definite curvature, local latents integrated out, at ``loc``.
        rows: the local latents' prior given ``loc``.

    Returns:
        Sites (the prior factor's is None), and the quadrature rule to begin with. A factor that is not finite where
        it is read gets the unit site.
    """
    dtype, group = problem.dtype, problem.data.chunk_group
    if problem.matches_moments:
        refuse_curvature(problem.solver, mode)
        return SiteStack(problem.family.zeros((problem.num_groups,), dtype), None, OwnConditionals(rows)), first_rule(
            dtype
        )
    local = LocalSites(problem.family.zeros((problem.num_groups,), dtype), rows)
    start = SiteStack(problem.family.zeros((problem.num_groups,), dtype), None, local)
    if mode != "curvature" or problem.units is None:
        return start, first_rule(dtype)
    count, width = problem.units
    point = at_prior._replace(loc=loc, scale=jnp.zeros_like(at_prior.scale))
    noise = LocalNoise(jnp.zeros((1, problem.family.dim), dtype), jnp.zeros((count, 1, width), dtype))
    expect = partial(problem.expect, problem.program, moments=point, probe=None, level=0, noise=noise, clip=False)
    found = problem.sum_groups(expect, local)
    precision = found.target.precision
    precision = clip_to_psd(precision) if problem.family.full else jnp.maximum(precision, 0.0)
    site = problem.family.natural(found.target.precision_mean, precision)
    # The shared block is the site and what integrating the local latents out takes from it.
    wanted = LocalSites(found.local.shared + (site - found.target), found.local.rows)
    finite = jax.vmap(all_finite)((site, wanted.shared)) & jnp.isfinite(found.value)
    rows_finite = jax.vmap(all_finite)(wanted.rows).astype(jnp.int32)
    finite &= jax.ops.segment_min(rows_finite, group, problem.num_groups) > 0
    kept = keep_groups(finite, wanted, local, group)
    return problem.tidy(SiteStack(start.groups, None, kept)), first_rule(dtype)


def _finite_sites(problem: LocalProblem, natural: GaussianNatural) -> GaussianNatural:
    precision = natural.precision
    if problem.quadratic and problem.family.full:
        precision = clip_to_psd(precision)
    finite = jnp.isfinite(natural.precision_mean).all(-1)
    finite &= jnp.isfinite(precision).all((-2, -1) if problem.family.full else -1)
    zero = problem.family.zeros((problem.num_groups,), problem.dtype)
    return select(finite, problem.family.natural(natural.precision_mean, precision), zero)
