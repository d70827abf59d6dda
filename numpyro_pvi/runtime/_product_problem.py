"""The factors of a model under a q that is a product of families: expectations, messages and the ELBO."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import MeanSpace
from ..factors import GroupMasks, Packing, ValueCall, chunk_log_likelihood, prior_log_density, take_rows
from ..families import NormalFamily, ProductFamily, ProductNatural, ScalarNormalFamily, base_family
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

    def _chunk_average(self, space: MeanSpace, variables: Any, rest: Any, chunk: Any, key: Any) -> Array:
        """``E_q[log f]`` of one chunk, of what :meth:`_of_chunk` gives for it."""
        part, plan = self.plan.partition, self.plan

        def density(values: dict, weights: Any = None) -> Array:
            def weigh(name: str, term: Array) -> Array:
                term = plan.over_base_measure(values, name, term)
                return term if weights is None else plan.likelihood.weigh(weights, name, term)

            latents = plan.latent_values(values)
            arguments = part.rows, part.reading, self.packing, chunk, plan.exact_latents
            return chunk_log_likelihood(self.call, latents, *arguments, weigh)

        return space.average(variables, rest, density, key)

    def _of_chunk(self, tree: dict[str, dict], chunk: Any) -> dict[str, dict]:
        """Variables (or the rest) with one chunk's rows of what belongs to latents inside the plate."""
        axes, reading = self.plan.row_axes, self.plan.partition.reading
        return {kind: take_rows(own, axes, reading, chunk) for kind, own in tree.items()} if axes else tree

    def _chunk_gradient(self, space: MeanSpace, variables: Any, rest: Any, chunk: Any, key: Any) -> tuple[Array, Any]:
        """Value and derivative of a chunk's expectation, in its own rows' part of the variables."""
        rest = self._of_chunk(rest, chunk)
        return jax.value_and_grad(lambda v: self._chunk_average(space, v, rest, chunk, key))(
            self._of_chunk(variables, chunk)
        )

    def _prior_density(self, values: dict, weights: Any = None) -> Array:
        plan, factor = self.plan, self.plan.prior_factor
        weigh = {} if weights is None or factor is None else {"weigh": partial(factor.weigh, weights)}
        latents = plan.latent_values(values)
        density = prior_log_density(self.call, latents, plan.partition.rows, plan.exact_latents, **weigh)
        return density - sum(jnp.sum(x) for x in plan.log_base_measures(values).values())

    def _map_chunks(self, one: Any) -> Any:
        """One result per chunk."""
        count, rows = self.packing.chunk_group.shape[0], self.plan.partition.chunk_rows
        batch = max(1, _ROWS_TOGETHER // max(rows, 1)) if self.together else 1
        chunks = self.packing.chunks
        return jax.vmap(one)(chunks) if batch >= count else jax.lax.map(one, chunks, batch_size=batch)

    def _by_group(self, results: Any) -> Any:
        """Results of chunks, added up by group."""
        owner = self.packing.chunk_group
        if owner.shape[0] == self.num_groups:
            return results
        return jax.tree.map(lambda x: jax.ops.segment_sum(x, owner, self.num_groups, indices_are_sorted=True), results)

    def _gradients_by_group(self, gradients: dict[str, dict], variables: dict[str, dict]) -> dict[str, dict]:
        """Derivatives by chunk, each in its own rows, as those by group in all rows."""
        axes = self.plan.row_axes
        if not axes or isinstance(self.packing, GroupMasks):
            return self._by_group(gradients)
        owner, rows = self.packing.chunk_group, self.packing.rows

        def scattered(whole: Array, parts: Array, axis: int) -> Array:
            zero = jnp.moveaxis(jnp.zeros((self.num_groups, *whole.shape), whole.dtype), axis + 1, 1)
            # Slots of padding have no derivative, so that what they add to a row is zero.
            return jnp.moveaxis(zero.at[owner[:, None], rows].add(jnp.moveaxis(parts, axis + 1, 1)), 1, axis + 1)

        found: dict[str, dict] = {}
        for kind, own in gradients.items():
            found[kind] = {n: self._by_group(x) for n, x in own.items() if n not in axes}
            for n in own.keys() & axes.keys():
                found[kind][n] = jax.tree.map(partial(scattered, axis=axes[n]), variables[kind][n], own[n])
        return found

    # ---------------------------------------------------------------------------------------------------- messages

    def group_messages(self, q: ProductNatural, key: Any) -> tuple[ProductNatural, Bool[Array, "M"]]:
        """Every group's ``dE_q[log f_m]/dmu``, with a leading group axis, and which are finite."""
        variables, _ = self._likelihood().variables(q)
        if not jax.tree.leaves(variables):
            zero = jax.tree.map(lambda x: jnp.zeros((self.num_groups, *x.shape), x.dtype), q)
            return zero, jnp.ones((self.num_groups,), bool)
        _, found = self.values_and_messages(q, key)
        return found, jax.vmap(all_finite)(found)

    def values_and_messages(
        self, q: ProductNatural, key: Any, probs: Any = None
    ) -> tuple[Float[Array, "C"], ProductNatural]:
        """Every chunk's ``E_q[log f]`` in nats, and every group's message.

        Args:
            q: natural parameters.
            key: for draws.
            probs: by component that is summed over, weights of its values in place of q's probabilities.

        Returns:
            The values and the messages, with a leading group axis.
        """
        space = self._likelihood()
        variables, rest = space.variables(q)
        if probs is not None:
            variables = variables | {"probs": {n: probs[n] for n in variables["probs"]}}
        values, gradients = self._values_and_gradients(space, variables, rest, key)
        return values, jax.vmap(lambda g: space.message(q, variables, g))(gradients)

    def _values_and_gradients(self, space: MeanSpace, variables: Any, rest: Any, key: Any) -> tuple[Array, Any]:
        """Every chunk's value, and every group's derivative in the variables."""
        values, parts = self._map_chunks(lambda chunk: self._chunk_gradient(space, variables, rest, chunk, key))
        return values, self._gradients_by_group(parts, variables)

    def curvatures(self, sites: SiteStack, widest: float, key: Any) -> ProductNatural:
        """Every group's message about the latent that is taken by quadrature, at no more than some variance.

        Args:
            sites: all sites.
            widest: the variance.
            key: for draws.

        Returns:
            The messages, with a leading group axis; precisions below zero, of factors that are not log-concave, are zero.
        """
        q = posterior(self.prior, sites)
        space = self._likelihood()
        variables, rest = space.variables(q)
        (name,) = self.plan.likelihood.by_nodes
        own = variables["coordinates"][name]
        narrow = own._replace(variance=jnp.minimum(own.variance, widest))
        variables = variables | {"coordinates": variables["coordinates"] | {name: narrow}}
        _, gradients = self._values_and_gradients(space, variables, rest, key)
        slope = gradients["coordinates"][name]
        bent = slope._replace(variance=jnp.minimum(slope.variance, 0.0))
        gradients = gradients | {"coordinates": gradients["coordinates"] | {name: bent}}
        return jax.vmap(lambda g: space.message(q, variables, g))(gradients)

    def group_message(self, q: ProductNatural, group: Int[Array, ""], key: Any) -> ProductNatural:
        """One group's."""
        space, chunks, offsets = self._likelihood(), self.packing.chunks, self.packing.offsets
        variables, rest = space.variables(q)
        axes, zero = self.plan.row_axes, jax.tree.map(jnp.zeros_like, variables)

        def placed(whole: Array, part: Array, rows: Array, axis: int) -> Array:
            return jnp.moveaxis(jnp.moveaxis(whole, axis, 0).at[rows].add(jnp.moveaxis(part, axis, 0)), 0, axis)

        def add(chunk: Any, total: Any) -> Any:
            here = take(chunks, chunk)
            _, found = self._chunk_gradient(space, variables, rest, here, key)
            if not axes or isinstance(self.packing, GroupMasks):
                return jax.tree.map(jnp.add, total, found)
            for kind, own in found.items():
                for n, x in own.items():
                    put = partial(placed, rows=here[0], axis=axes[n]) if n in axes else jnp.add
                    total[kind][n] = jax.tree.map(put, total[kind][n], x)
            return total

        if self.packing.chunk_group.shape[0] == self.num_groups:
            gradient = add(group, zero)
        else:
            gradient = jax.lax.fori_loop(offsets[group], offsets[group + 1], add, zero)
        return space.message(q, variables, gradient)

    def prior_message(self, q: ProductNatural, key: Any) -> ProductNatural | None:
        """That of the prior factor; None where there is none."""
        found = self.prior_value_and_message(q, key)
        return None if found is None else found[1]

    def prior_value_and_message(self, q: ProductNatural, key: Any) -> tuple[Float[Array, ""], ProductNatural] | None:
        """``E_q[log f]`` of the prior factor in nats, and its message; None where there is none."""
        space = self._prior_factor()
        if space is None:
            return None
        variables, rest = space.variables(q)
        value, gradient = jax.value_and_grad(lambda v: space.average(v, rest, self._prior_density, key))(variables)
        return value, space.message(q, variables, gradient)

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

        def one(chunk: Any) -> Array:
            own = self._of_chunk(variables, chunk), self._of_chunk(rest, chunk)
            return self._chunk_average(space, *own, chunk, key)

        groups = self._by_group(self._map_chunks(one))
        terms = [groups.reshape(-1), self.divergences(q)]
        prior = self._prior_factor()
        if prior is not None:
            variables, rest = prior.variables(q)
            terms.append(prior.average(variables, rest, self._prior_density, key)[None])
        whole = jnp.concatenate(terms)
        elbo = jnp.where(valid, jnp.sum(whole), jnp.nan)
        return Objective(elbo, jnp.sum(jnp.abs(whole)), valid & jnp.isfinite(elbo))

    def divergences(self, q: ProductNatural) -> Float[Array, "C"]:
        """Of every component, minus KL to its exact prior; the entropy where it has none. In nats."""
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
            image, base = family.fisher_product(own, step), base_family(family)
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
