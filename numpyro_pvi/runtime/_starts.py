"""Where the groups' sites start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, clip_to_psd
from ..errors import PVIError
from ..expectations import FIXED_RULES, LocalNoise, PointsProgram, rule_index
from ..families import ConditionalNatural, GaussianMoments, GaussianNatural, RowMoments
from ..schedules import Rule
from ..sites import LocalSites, OwnConditionals, SiteStack, keep_groups, posterior, select
from ._local import LocalProblem
from ._row_problem import RowProblem
from ._rules import escalate, first_rule, relative_error

# The first step from the prior may be cruder still: at worst a step is halved.
START_TOLERANCE = 0.3
# How often a step from the prior to a worse q is halved.
MAX_START_HALVINGS = 12
# Scale of the q, in prior sds, under which a factor's curvature at a point is read from gradients.
POINT_SCALE = 0.01


def first_sites(
    problem: LocalProblem | RowProblem,
    at_prior: GaussianMoments | RowMoments,
    loc: Float[Array, "D"],
    mode: str,
    base: GaussianNatural | None = None,
) -> tuple[SiteStack, Rule]:
    """Where the groups' sites start.

    Args:
        problem: the factors.
        at_prior: the prior as moments.
        loc: its location.
        mode: "prior" (unit sites), "curvature" (each factor's positive semi-definite curvature and gradient at
            ``loc``, the cure for wide priors), or "auto": curvature, or one natural-gradient step of all groups
            from the prior where a fixed quadrature rule resolves every factor there and the global ELBO is higher
            after it; halved where both end below the prior's own ELBO.
        base: what stands in for the part of the prior that is not exact, None where there is none.

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

        def by(level):
            return problem.sum_groups(
                partial(
                    problem.expect, problem.program, moments=moments, probe=None, level=level, noise=draws, clip=clip
                )
            )

        def judged(level):
            found = by(level)
            wanted = rule_index(jnp.max(found.spread))
            # One rule finer than the widths ask for, where errors do: what that does not resolve is no matter of nodes.
            error = jnp.where(level > wanted, 0.0, relative_error(found))
            return found, jnp.where(level < wanted, jnp.inf, error)

        # Two predictors have 2,348 nodes under the finest rule and 64 under the first, which serves all but the prior's own width.
        return by(0) if points else escalate(judged, first_rule(problem.dtype), len(FIXED_RULES))[0]

    def rest(moments):
        outside = 0.0 if base is None else problem.family.expect_quadratic(base, moments)
        return problem.rest(moments) + outside

    # Traced once for its shapes and the loop.
    @partial(jax.jit, inline=True)
    def look_at(moments):
        found = jax.lax.map(look, (moments, jnp.array([False, True])))
        return found, jnp.sum(found.value, axis=-1) + jax.vmap(rest)(moments)

    def after(sites):
        return jax.vmap(
            lambda groups: problem.family.moments(posterior(problem.prior_natural, SiteStack(groups, base)))
        )(sites)

    point = at_prior._replace(loc=loc, scale=(POINT_SCALE if points else 0.0) * at_prior.scale)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), at_prior, point)
    finite = jax.vmap(getattr(problem, "finite_sites", None) or partial(_finite_sites, problem))
    if mode == "curvature" or problem.redraws or points:
        sites = finite(look_at(both)[0].target)
        return SiteStack(jax.tree.map(lambda x: x[1], sites), None), first_rule(problem.dtype)
    return _best_step(problem, both, look_at, lambda found: finite(found.target), after)


class _Steps(NamedTuple):
    """The sites that two looks ask for, and the shares of them taken so far."""

    turn: Int[Array, ""]
    # What q is looked at next, the prior and its location or a step from there.
    moments: Any
    sites: Any
    # Of the prior, where quadrature resolves every factor there; minus infinity where not.
    lowest: Float[Array, ""]
    resolved: Bool[Array, ""]
    share: Float[Array, ""]
    elbos: Float[Array, "2"]
    spreads: Float[Array, "2"]


def _best_step(problem, both: Any, look_at: Callable, sites_of: Callable, after: Callable) -> tuple[SiteStack, Rule]:
    """The better of two steps, from the factors under the prior and at its location; halved until q beats the prior.

    Args:
        problem: the factors.
        both: the prior and its location, as moments.
        look_at: two q to the factors' expectations and ELBOs.
        sites_of: those expectations to the sites they ask for.
        after: sites to the two q that come of them.

    Returns:
        As :func:`first_sites`.
    """

    def unfinished(steps: _Steps) -> Bool[Array, ""]:
        below = ~jnp.any(steps.elbos > steps.lowest)
        return (steps.turn < 2) | (below & (steps.turn <= MAX_START_HALVINGS + 1))

    def stage(steps: _Steps) -> _Steps:
        # First at the prior and at its location, then at the two q that come of them: one program for all looks.
        found, elbos = look_at(steps.moments)
        first = steps.turn == 0
        sites = select(first, sites_of(found), steps.sites)
        share = jnp.where(first, 1.0, 0.5 * steps.share).astype(problem.dtype)
        moments = after(jax.tree.map(lambda x: share * x, sites))
        at_prior = jax.tree.map(lambda x: x[0], found)
        resolved = all_finite(at_prior) & (relative_error(at_prior) <= START_TOLERANCE)
        resolved = jnp.where(first, resolved, steps.resolved)
        usable = steps.moments.valid & jnp.isfinite(elbos) & jnp.stack([resolved, jnp.array(True)])
        return _Steps(
            turn=steps.turn + 1,
            moments=moments,
            sites=sites,
            lowest=jnp.where(first, jnp.where(resolved & jnp.isfinite(elbos[0]), elbos[0], -jnp.inf), steps.lowest),
            resolved=resolved,
            share=share,
            elbos=jnp.where(first, -jnp.inf, jnp.where(usable, elbos, -jnp.inf)),
            spreads=jnp.max(found.spread, axis=-1),
        )

    blank = jnp.zeros((2,), problem.dtype)
    shapes = jax.eval_shape(lambda m: sites_of(look_at(m)[0]), both)
    sites = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    lowest = jnp.full((), -jnp.inf, problem.dtype)
    first = _Steps(jnp.int32(0), both, sites, lowest, jnp.array(False), blank[0], blank, blank)
    steps = jax.lax.while_loop(unfinished, stage, first)
    # The share of the last look: the next one has been prepared already.
    share, better = 2.0 * steps.share, steps.elbos[0] > steps.elbos[1]
    # Where no share beats the prior q stays there; what it is compared with may be unknown, and no ELBO found at all.
    missed = ~jnp.any(steps.elbos > steps.lowest)
    share = jnp.where(missed, jnp.where(jnp.isfinite(steps.lowest), 0.0, 1.0), share).astype(problem.dtype)
    groups = [jax.tree.map(lambda x, i=i: share * x[i], steps.sites) for i in (0, 1)]
    # From a start that had to be halved q still moves far: one rule cheaper serves, and is tested.
    far = (share < 1).astype(jnp.int32)
    rules = [first_rule(problem.dtype, steps.spreads[i], far) for i in (0, 1)]
    return SiteStack(select(better, *groups), None), select(better, *rules)


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
