"""Where q starts: changes spread over sites, and short runs from random groupings where values are summed over.

At the prior all components of a mixture are equal, and so is every message to them: a fixed point. Several runs of a few
rounds start from weights that differ between the components, and the one with the highest ELBO goes on (Biernacki, Celeux
and Govaert's em-EM).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._numerics import all_finite
from ..families import ProductFamily, ProductNatural, members_of, support_of
from ..sites import MemberSites, SiteStack, posterior, select, take
from ._product_plan import ProductPlan
from ._product_problem import ProductProblem

# Short runs, and rounds of each after the one that its weights start.
_RUNS, _ROUNDS = 10, 4


def site_with_rows(plan: ProductPlan, sites: SiteStack, group: int) -> ProductNatural:
    """One group's site: of a latent inside the plate, its own rows' members, zero elsewhere.

    Args:
        plan: the plan.
        sites: all sites.
        group: the group's position.

    Returns:
        Natural parameters.
    """
    own = jnp.asarray(plan.partition.table.index_of_row == group)
    rows = () if sites.local is None else sites.local.parts.items()
    return ProductNatural(take(sites.groups, group).parts | {n: plan.masked(n, x, own) for n, x in rows})


def spread(plan: ProductPlan, sites: SiteStack, change: ProductNatural) -> SiteStack:
    """Add a change of q to the sites: in equal shares, but that of a row's own latents to its group's site.

    Args:
        plan: the plan.
        sites: all sites.
        change: natural parameters.

    Returns:
        Sites whose sum has moved by the change.
    """
    count, inside = len(plan.partition.table.labels), plan.row_axes
    share = 1.0 / (count + (sites.prior is not None))
    groups, prior = dict(sites.groups.parts), None if sites.prior is None else dict(sites.prior.parts)
    rows = {} if sites.local is None else dict(sites.local.parts)
    for name, own in change.parts.items():
        if name in inside:
            rows[name] = rows[name] + own
            continue
        # A tied site's stack holds the product of all groups'.
        copies = count if plan.tied else 1
        groups[name] = jax.tree.map(lambda site, x, s=share * copies: site + s * x, groups[name], own)
        if prior is not None:
            prior[name] = jax.tree.map(lambda site, x: site + share * x, prior[name], own)
    local = MemberSites(rows) if rows else None
    return SiteStack(ProductNatural(groups), None if prior is None else ProductNatural(prior), local)


def apart(family: ProductFamily, inside: tuple[str, ...], q: ProductNatural, key: Any) -> ProductNatural:
    """Move the latents inside the plate half way from their mean statistics to those of a draw, each of its own.

    Where a loading and a score are both zero on average, neither learns from the other; members that differ do.

    Args:
        family: of q.
        inside: the latents.
        q: natural parameters.
        key: a random key.

    Returns:
        Natural parameters.
    """
    parts, families = dict(q.parts), dict(family.components)
    for i, name in enumerate(inside):
        own, natural = families[name], parts[name]
        draw = own.sufficient_statistics(own.sample(natural, jax.random.fold_in(key, i)))
        middle = jax.tree.map(lambda a, b: 0.5 * (a + b), own.natural_to_mean(natural), draw)
        parts[name] = own.mean_to_natural(middle)
    return ProductNatural(parts)


def first_weights(plan: ProductPlan, key: Any) -> dict[str, Float[Array, "..."]]:
    """Weights of the values of every component that is summed over, one set for each short run.

    Every other run takes one row for each value and leaves the other rows out; the rest take random probabilities.

    Args:
        plan: the plan.
        key: a random key.

    Returns:
        By component, Float[runs members K].
    """
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    found, families = {}, dict(plan.family.components)
    for name in plan.summed:
        support = support_of(families[name])
        assert support is not None
        shape, axis = members_of(families[name]), plan.row_axes.get(name)
        weights = rng.dirichlet(np.ones(support.size), (_RUNS, *shape))
        if axis is not None and shape[axis] >= support.size:
            for run in range(0, _RUNS, 2):
                rows = rng.choice(shape[axis], support.size, replace=False)
                chosen = np.zeros((shape[axis], support.size))
                chosen[rows, np.arange(support.size)] = 1.0
                across = [1] * len(shape)
                across[axis] = shape[axis]
                weights[run] = chosen.reshape(*across, support.size)
        found[name] = jnp.asarray(weights, jnp.result_type(float))
    return found


def best_of_short_runs(
    problem: ProductProblem, q: ProductNatural, weights: dict[str, Float[Array, "..."]], key: Any
) -> ProductNatural:
    """Run a few rounds of coordinate ascent from every set of weights, and keep the q with the highest ELBO.

    Args:
        problem: the factors.
        q: where all runs start but for the weights.
        weights: as :func:`first_weights` gives them.
        key: of draws.

    Returns:
        Natural parameters of the best.
    """
    turns, families = problem.plan.num_turns, dict(problem.family.components)

    def turn(i: Int[Array, ""], carry: tuple, own: dict) -> tuple:
        q, _ = carry
        probs = {}
        for name, x in own.items():
            support = support_of(families[name])
            assert support is not None
            probs[name] = jnp.where(i < turns, x, support.probs(q.parts[name]))
        values, messages = problem.values_and_messages(q, key, probs)
        target = posterior(problem.prior, messages)
        elbo = jnp.sum(values) + jnp.sum(problem.divergences(q))
        prior = problem.prior_value_and_message(q, key)
        if prior is not None:
            elbo, target = elbo + prior[0], target + prior[1]
        new = q + problem.only(target - q, i % turns)
        good = all_finite(new) & problem.family.in_domain(new)
        return select(good, new, q), elbo

    def run(own: dict) -> tuple:
        return jax.lax.fori_loop(0, turns * (1 + _ROUNDS), lambda i, c: turn(i, c, own), (q, jnp.zeros(())))

    found, elbos = jax.lax.map(run, weights)
    best = jnp.argmax(jnp.where(jnp.isfinite(elbos), elbos, -jnp.inf))
    return jax.tree.map(lambda x: x[best], found)
