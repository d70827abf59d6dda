"""Where sites of two numbers per row start: at their factors' curvature under the prior, or under a narrower Gaussian.

Under a prior whose predictors have a wide law, a log-linear factor is two straight lines with a kink. Looked at from the
prior's location alone its curvature is that of the kink, many times what it will be where q ends, and from there q reaches
out by a few units of the predictor a round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..expectations import RULES
from ..families import RowMoments
from ..schedules import Rule
from ..sites import SiteStack
from ._row_problem import RowProblem
from ._rules import first_rule

# Largest sds of predictors, in units of the link's scale, under which factors are looked at between the prior's own and none.
_BETWEEN = (96.0, 24.0)


def first_numbers(problem: RowProblem, at_prior: RowMoments) -> tuple[SiteStack, Rule]:
    """One natural-gradient step of all groups from that Gaussian around the prior's location after which the ELBO is highest.

    The Gaussians are the prior, the prior at a single point, and between them the prior narrowed until no predictor's sd is
    above one of a few limits.

    Args:
        problem: the factors, with all quadrature rules compiled in.
        at_prior: the prior as moments.

    Returns:
        Sites, unit ones where no step leaves an ELBO, and the quadrature rule to begin with.
    """
    finest, dtype = len(RULES) - 1, problem.dtype
    sd = jnp.sqrt(jnp.max(jnp.where(problem.family.prior.group >= 0, jnp.sum(at_prior.scale**2, axis=-1), 0.0)))
    between = [jnp.minimum(1.0, limit / jnp.maximum(sd, 1e-30)) for limit in _BETWEEN]
    shares = jnp.stack([jnp.ones((), dtype), *between, jnp.zeros((), dtype)]).astype(dtype)

    def look(share: Float[Array, ""]) -> tuple:
        around = at_prior._replace(scale=share * at_prior.scale)
        found = problem.expect(problem.program, moments=around, level=finest, clip=share < 1)
        groups = problem.finite_sites(found.target)
        return groups, *after(groups)

    def after(groups) -> tuple[Float[Array, ""], Bool[Array, ""], Float[Array, ""]]:
        moments = problem.family.moments(jax.tree.map(lambda x: x[0], groups))
        found = problem.expect(problem.program, moments=moments, level=finest, clip=False)
        elbo = jnp.sum(found.value) + problem.rest(moments)
        return elbo, moments.valid & jnp.isfinite(elbo), jnp.max(found.spread)

    groups, elbos, valid, spread = jax.lax.map(look, shares)
    best = jnp.argmax(jnp.where(valid, elbos, -jnp.inf))
    usable = jnp.any(valid)
    chosen = jax.tree.map(lambda x: jnp.where(usable, x[best], 0.0), groups)
    return SiteStack(chosen, None), first_rule(dtype, jnp.where(usable, spread[best], 0.0))


__all__ = ["first_numbers"]
