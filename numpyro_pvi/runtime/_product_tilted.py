"""Tilted moments of the factors of a product of families: which way fits a factor, and how it is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import PVIError
from ..expectations import (
    GRID_DIM,
    FactorStructure,
    ImportanceMoments,
    LaplaceMoments,
    MCMCMoments,
    Tilted,
    draw,
    grid_of,
    linear_tilted,
    probe_values,
    tilted_by_draws,
    tilted_on_grid,
    with_settings,
)
from ..factors import chunk_log_likelihood
from ..families import ProductFamily, ProductNatural
from ..sites import SiteStack, posterior, take
from ._product_plan import ProductPlan
from ._product_problem import ProductProblem

# Rows that are evaluated together, times points.
TOGETHER = 1 << 16
# Points at which a factor is compared with what its message says, and how far off it may be, relative to what is compared.
_PROBES, _AFFINE = 24, {"float64": 1e-8, "float32": 3e-4}
# What is folded into a round's key for the draws of its moments.
_MOMENTS = 0x51


def touched(family: ProductFamily, factor: FactorStructure) -> ProductFamily:
    """The components that a factor depends on."""
    absent = {role.name for role in factor.roles if role.kind == "absent"}
    return ProductFamily([(n, f) for n, f in family.components if n not in absent])


def method_of_factor(family: ProductFamily, affine: bool, moments: Any, where: str) -> str:
    """How a factor's tilted moments are taken.

    Args:
        family: the components that the factor depends on.
        affine: whether it is affine in their statistics jointly.
        moments: what was asked for.
        where: the factor's name.

    Returns:
        "exact", "quadrature" or "importance".

    Raises:
        PVIError: where what was asked for does not fit.
    """
    wanted, fits = with_settings(moments), affine or not family.components
    if isinstance(wanted, LaplaceMoments | MCMCMoments):
        raise PVIError(
            f"PowerEP(moments={moments!r}) is for Gaussian guides; under AutoExponentialFamily write moments='auto', 'exact', "
            "'quadrature', 'importance' or ImportanceMoments(...)."
        )
    if isinstance(wanted, ImportanceMoments):
        return "importance" if family.components else "exact"
    if fits and wanted in ("auto", "exact"):
        return "exact"
    names = ", ".join(n for n, _ in family.components)
    if wanted == "exact":
        raise PVIError(
            f"PowerEP(moments='exact'): the {where} is not affine in the statistics of {names} jointly; leave moments='auto'."
        )
    if not family.components or grid_of(family) is not None:
        return "quadrature" if family.components else "exact"
    if wanted == "quadrature":
        raise PVIError(
            f"PowerEP(moments='quadrature'): the {where} sees {names}, and quadrature takes at most {GRID_DIM} numbers of "
            "scalar or normal latents (or a Dirichlet's three shares) together, with a few values of discrete ones; use "
            "moments='importance'."
        )
    return "importance"


def jointly_affine(problem: ProductProblem, sites: SiteStack, key: Any) -> tuple[Array, Array]:
    """Whether the groups' factors, and the prior factor, are affine in the statistics of all latents jointly.

    A factor affine in each latent given the others need not be. Its message at one q is compared with its values elsewhere:
    ``log f - <message, T>`` has to be the same at all points.

    Args:
        problem: the factors.
        sites: where q is.
        key: a random key.

    Returns:
        Two flags; the second False where there is no prior factor.
    """
    family, q = problem.family, posterior(problem.prior, sites)
    plan = problem.plan
    near = jax.vmap(lambda k: probe_values(family, q, k))(jax.random.split(key, _PROBES))
    drawn = family.sample(q, jax.random.fold_in(key, 1), (_PROBES,))
    points = {n: jnp.concatenate([near[n], drawn[n]]) for n in near}
    own: Any = {n: f.sufficient_statistics(points[n]) for n, f in family.components}
    limit = _AFFINE[jnp.result_type(float).name]

    def same(values: Array, message: Any) -> Array:
        parts = [jax.vmap(lambda t, n=n, f=f: f.inner(message.parts[n], t))(own[n]) for n, f in family.components]
        left, size = values - sum(parts), jnp.abs(values) + sum(jnp.abs(x) for x in parts)
        return jnp.max(jnp.abs(left - left[0])) <= limit * (1 + jnp.max(size))

    likelihood, prior = jnp.array(False), jnp.array(False)
    if _may_be_affine(plan.likelihood):
        messages = problem.group_messages(q, key).groups
        tilted = ProductTilted(problem, None, key)
        numbers = jnp.arange(problem.num_groups)
        likelihood = jnp.all(jax.lax.map(lambda g: same(tilted.group_values(g)(points), take(messages, g)), numbers))
    if plan.prior_factor is not None and _may_be_affine(plan.prior_factor):
        message = problem.prior_message(q, key)
        prior = same(jax.vmap(problem._prior_density)(points), message)
    return likelihood, prior


def _may_be_affine(factor: FactorStructure) -> bool:
    return factor.exact and not factor.by_nodes


@dataclasses.dataclass(frozen=True)
class ProductTilted:
    """Takes the tilted moments of the factors of one round.

    Args:
        problem: the factors.
        solver: whose ``power`` and ``moments`` count.
        key: of the round's draws, common to all groups.
    """

    problem: ProductProblem
    solver: Any
    key: Any

    @property
    def _methods(self) -> tuple[str, ...]:
        return self.problem.plan.tilted

    def group_values(self, index: Any) -> Callable[[dict], Float[Array, "S"]]:
        """One group's log-likelihood, in nats, at values of all components with a leading axis of points.

        Args:
            index: the group's position.

        Returns:
            A function of the values.
        """
        problem, plan = self.problem, self.problem.plan
        part, packing = plan.partition, self.problem.packing

        def of_chunk(chunk: Any, values: dict) -> Array:
            def one(own: dict) -> Array:
                arguments = part.rows, part.reading, packing, chunk, plan.exact_latents
                return chunk_log_likelihood(problem.call, plan.latent_values(own), *arguments)

            return _over_points(one, values, max(part.chunk_rows, 1))

        def of(values: dict) -> Array:
            if packing.chunk_group.shape[0] == problem.num_groups:
                return of_chunk(take(packing.chunks, index), values)
            count = jax.tree.leaves(values)[0].shape[0]
            zero = jnp.zeros((count,), jax.eval_shape(lambda: of_chunk(take(packing.chunks, 0), values)).dtype)
            span = packing.offsets[index], packing.offsets[index + 1]
            return jax.lax.fori_loop(*span, lambda c, total: total + of_chunk(take(packing.chunks, c), values), zero)

        return of

    def shared(self, q: ProductNatural) -> Any:
        """What the groups' visits at one q have in common: exact factors, or draws.

        Args:
            q: natural parameters.

        Returns:
            Constants and natural parameters of all groups' factors, weighable draws, or None.
        """
        if self._methods[0] == "exact":
            values, messages = self.problem.values_and_messages(q, self.key)
            constants = self.problem._by_group(values) - jax.vmap(lambda own: self._paired(own, q))(messages.groups)
            return constants, messages.groups
        return self._draws(q, self.problem.plan.likelihood) if self._methods[0] == "importance" else None

    def _paired(self, message: ProductNatural, q: ProductNatural) -> Array:
        return jnp.asarray(self.problem.family.inner(message, self.problem.family.natural_to_mean(q)))

    def _draws(self, q: ProductNatural, factor: FactorStructure) -> Any:
        family = touched(self.problem.family, factor)
        count = getattr(with_settings(self.solver.moments), "num_draws", ImportanceMoments().num_draws)
        return draw(family, _some(q, family), jax.random.fold_in(self.key, _MOMENTS), count)

    def group(self, index: Int[Array, ""], q: ProductNatural, site: ProductNatural, shared: Any) -> Tilted:
        """One group's tilted moments.

        Args:
            index: its position.
            q: natural parameters of q.
            site: the group's site.
            shared: as of :meth:`shared` at this q.

        Returns:
            What moment matching asks for.
        """
        if self._methods[0] == "exact":
            constants, messages = shared
            own = take(messages, index)
            return linear_tilted(self.problem.family, own, constants[index], q, site, self.solver.power)
        return self._pointed(self.problem.plan.likelihood, self._methods[0], self.group_values(index), q, site, shared)

    def prior(self, q: ProductNatural, site: ProductNatural) -> Tilted:
        """The prior factor's tilted moments: see :meth:`group`."""
        factor = self.problem.plan.prior_factor
        assert factor is not None  # asked for where there is one
        if self._methods[1] == "exact":
            found = self.problem.prior_value_and_message(q, self.key)
            assert found is not None
            value, message = found
            constant = value - self._paired(message, q)
            return linear_tilted(self.problem.family, message, constant, q, site, self.solver.power)
        draws = self._draws(q, factor) if self._methods[1] == "importance" else None
        return self._pointed(factor, self._methods[1], self._prior_values, q, site, draws)

    def _prior_values(self, values: dict) -> Array:
        return _over_points(self.problem._prior_density, values, 1)

    def _pointed(
        self,
        factor: FactorStructure,
        method: str,
        values: Callable,
        q: ProductNatural,
        site: ProductNatural,
        draws: Any,
    ) -> Tilted:
        """Moments from points of the components that the factor sees; of the others its site is taken out in closed form."""
        family, power = self.problem.family, self.solver.power
        seen = touched(family, factor)
        others = ProductFamily([(n, f) for n, f in family.components if n not in dict(seen.components)])

        def everywhere(own: dict) -> Array:
            count = jax.tree.leaves(own)[0].shape[0]
            fixed = others.sample(_some(q, others), jax.random.key(0))
            fixed = {n: jnp.broadcast_to(x, (count, *x.shape)) for n, x in fixed.items()}
            return values(fixed | own)

        arguments = _some(q, seen), _some(site, seen), power
        if method == "quadrature":
            grid = grid_of(seen)
            assert grid is not None  # the plan says so
            found = tilted_on_grid(grid, everywhere, *arguments)
        else:
            found = tilted_by_draws(seen, draws, everywhere(draws.values), *arguments)
        if not others.components:
            return found
        own, known = _some(q, others), _some(site, others)
        gap = (others.log_partition(own - known * power) - others.log_partition(own)) / power
        change = ProductNatural((known * -1.0).parts | found.change.parts)
        return found._replace(change=change, value=found.value + gap)


def _some(natural: ProductNatural, family: ProductFamily) -> ProductNatural:
    return ProductNatural({n: natural.parts[n] for n, _ in family.components})


def _over_points(one: Callable, values: dict, rows: int) -> Array:
    count, batch = jax.tree.leaves(values)[0].shape[0], max(1, TOGETHER // rows)
    return jax.vmap(one)(values) if batch >= count else jax.lax.map(one, values, batch_size=batch)


def check_tilted(plan: ProductPlan) -> None:
    """Refuse what moments are not matched of.

    Args:
        plan: the plan.

    Raises:
        PVIError: naming the latents inside the plate.
    """
    if plan.inside:
        names = ", ".join(latent.name for latent in plan.inside)
        raise PVIError(
            f"PowerEP under AutoExponentialFamily: latent(s) {names} are inside the partitioned plate, where moments are not "
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
            found.append(method_of_factor(touched(plan.family, factor), flag, solver.moments, where))
    return dataclasses.replace(plan, tilted=tuple(found))
