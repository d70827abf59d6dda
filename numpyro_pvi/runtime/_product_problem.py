"""The factors of a model under a q that is a product of families: expectations, messages and the ELBO."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import MeanSpace
from ..factors import GroupMasks, Packing, ValueCall, chunk_log_likelihood, prior_log_density
from ..families import NormalFamily, ProductFamily, ProductNatural, ScalarNormalFamily
from ..sites import SiteStack, posterior, select, take
from ._product_plan import ProductPlan

# Rows that are evaluated together, times the points of an expectation.
_ROWS_TOGETHER = 1 << 16


class Objective(NamedTuple):
    """The global ELBO in nats, the size of the terms that make it, and whether q is normalisable."""

    elbo: Float[Array, ""]
    size: Float[Array, ""]
    valid: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class ProductProblem:
    """Everything that rounds need to know of a model and its data.

    Args:
        plan: the static plan.
        call: the model with all rows.
        packing: rows of each chunk.
        prior: natural parameters of the exactly held prior; zero for the other components.
        num_draws: draws of a latent that is drawn.
        together: whether chunks are evaluated many at a time.
    """

    plan: ProductPlan
    call: ValueCall
    packing: Packing | GroupMasks
    prior: ProductNatural
    num_draws: int
    together: bool

    @property
    def family(self) -> ProductFamily:
        """Of q."""
        return self.plan.family

    @property
    def num_groups(self) -> int:
        """M."""
        return len(self.plan.partition.table.labels)

    def _likelihood(self) -> MeanSpace:
        return MeanSpace(self.family, self.plan.likelihood, self.num_draws)

    def _prior_factor(self) -> MeanSpace | None:
        found = self.plan.prior_factor
        return None if found is None else MeanSpace(self.family, found, self.num_draws)

    def _chunk_density(self, chunk: Any):
        part = self.plan.partition

        def density(values: dict) -> Array:
            latents = self.plan.latent_values(values)
            return chunk_log_likelihood(self.call, latents, part.rows, part.reading, self.packing, chunk)

        return density

    def _prior_density(self, values: dict) -> Array:
        latents = self.plan.latent_values(values)
        density = prior_log_density(self.call, latents, self.plan.partition.rows, self.plan.exact_latents)
        return density - sum(jnp.sum(x) for x in self.plan.log_base_measures(values).values())

    def _over_chunks(self, one: Any) -> Any:
        """One result per group: those of its chunks, added up."""
        chunks, owner = self.packing.chunks, self.packing.chunk_group
        count, rows = owner.shape[0], self.plan.partition.chunk_rows
        batch = max(1, _ROWS_TOGETHER // max(rows, 1)) if self.together else 1
        results = jax.vmap(one)(chunks) if batch >= count else jax.lax.map(one, chunks, batch_size=batch)
        if count == self.num_groups:
            return results
        return jax.tree.map(lambda x: jax.ops.segment_sum(x, owner, self.num_groups, indices_are_sorted=True), results)

    # ---------------------------------------------------------------------------------------------------- messages

    def group_messages(self, q: ProductNatural, key: Any) -> tuple[ProductNatural, Bool[Array, "M"]]:
        """Every group's ``dE_q[log f_m]/dmu``, with a leading group axis, and which are finite."""
        space = self._likelihood()
        variables, rest = space.variables(q)

        def one(chunk: Any) -> Any:
            return jax.grad(lambda v: space.average(v, rest, self._chunk_density(chunk), key))(variables)

        if not jax.tree.leaves(variables):
            zero = jax.tree.map(lambda x: jnp.zeros((self.num_groups, *x.shape), x.dtype), q)
            return zero, jnp.ones((self.num_groups,), bool)
        found = jax.vmap(lambda g: space.message(q, variables, g))(self._over_chunks(one))
        return found, jax.vmap(all_finite)(found)

    def group_message(self, q: ProductNatural, group: Int[Array, ""], key: Any) -> ProductNatural:
        """One group's."""
        space, chunks, offsets = self._likelihood(), self.packing.chunks, self.packing.offsets
        variables, rest = space.variables(q)

        def one(chunk: Any) -> Any:
            return jax.grad(lambda v: space.average(v, rest, self._chunk_density(chunk), key))(variables)

        if self.packing.chunk_group.shape[0] == self.num_groups:
            gradient = one(take(chunks, group))
        else:
            zero = jax.tree.map(jnp.zeros_like, variables)

            def add(chunk: Any, total: Any) -> Any:
                return jax.tree.map(jnp.add, total, one(take(chunks, chunk)))

            gradient = jax.lax.fori_loop(offsets[group], offsets[group + 1], add, zero)
        return space.message(q, variables, gradient)

    def prior_message(self, q: ProductNatural, key: Any) -> ProductNatural | None:
        """That of the prior factor; None where there is none."""
        space = self._prior_factor()
        if space is None:
            return None
        variables, rest = space.variables(q)
        gradient = jax.grad(lambda v: space.average(v, rest, self._prior_density, key))(variables)
        return space.message(q, variables, gradient)

    # -------------------------------------------------------------------------------------------------------- ELBO

    def objective(self, sites: SiteStack, key: Any) -> Objective:
        """``sum_m E_q[log f_m] - KL(q | exact prior) + H(q)`` over components with and without an exact prior.

        Args:
            sites: all sites.
            key: for draws.

        Returns:
            The ELBO; NaN where q is not normalisable.
        """
        q = posterior(self.prior, sites)
        valid = self.family.in_domain(q)
        # Only the value is not used where q is outside: a point inside keeps everything finite.
        space = self._likelihood()
        variables, rest = space.variables(q)
        groups = self._over_chunks(lambda chunk: space.average(variables, rest, self._chunk_density(chunk), key))
        terms = [groups.reshape(-1), self._divergences(q)]
        prior = self._prior_factor()
        if prior is not None:
            variables, rest = prior.variables(q)
            terms.append(prior.average(variables, rest, self._prior_density, key)[None])
        whole = jnp.concatenate(terms)
        elbo = jnp.where(valid, jnp.sum(whole), jnp.nan)
        return Objective(elbo, jnp.sum(jnp.abs(whole)), valid & jnp.isfinite(elbo))

    def _divergences(self, q: ProductNatural) -> Float[Array, "C"]:
        found = []
        for name, family in self.family.components:
            own = q.parts[name]
            held = name in self.plan.exact
            found.append(-family.kl(own, self.prior.parts[name]) if held else family.entropy(own))
        return jnp.stack([jnp.asarray(x) for x in found])

    # ------------------------------------------------------------------------------------------------------ pieces

    def only(self, change: Any, turn: Int[Array, ""]) -> Any:
        """A change of natural parameters with everything but one turn's components set to zero."""
        if self.plan.num_turns == 1:
            return change
        names = [name for name, _ in self.family.components]
        flags = jnp.asarray(self.plan.turns) == turn
        parts = {
            name: jax.tree.map(lambda x, flag=flag: jnp.where(flag, x, 0.0), change.parts[name])
            for name, flag in zip(names, flags, strict=True)
        }
        return ProductNatural(parts)

    def size(self, q: ProductNatural, change: ProductNatural) -> Float[Array, ""]:
        """Largest change of a member, in its Fisher metric at q: posterior sds, for a shift of a normal."""
        return jnp.max(jnp.stack([jnp.max(x) for x in self._sizes(q, change)]))

    def _sizes(self, q: ProductNatural, change: ProductNatural) -> list[Array]:
        found = []
        for name, family in self.family.components:
            own, step = q.parts[name], change.parts[name]
            image, base = family.fisher_product(own, step), family
            while hasattr(base, "base"):
                base = base.base
            if isinstance(base, NormalFamily):
                base = ScalarNormalFamily()
            square = (
                base.inner(step, image)
                if not isinstance(base, ScalarNormalFamily)
                else sum(a * b for a, b in zip(jax.tree.leaves(step), jax.tree.leaves(image), strict=True))
            )
            found.append(jnp.sqrt(jnp.maximum(jnp.asarray(square), 0.0)))
        return found


def finite_or(new: Any, old: Any) -> tuple[Any, Bool[Array, ""]]:
    """``(new, True)`` where everything in it is finite, else ``(old, False)``."""
    good = all_finite(new)
    return select(good, new, old), good
