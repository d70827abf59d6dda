"""The factors of a model under a q that is a product of families: expectations, messages and the ELBO."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, in_batches, value_and_grad
from ..expectations import MeanSpace, expected_terms, worst_error
from ..factors import (
    GroupMasks,
    Instead,
    Packing,
    ValueCall,
    chunk_log_likelihood,
    plate_rows,
    prior_log_density,
    take_rows,
)
from ..families import ProductFamily, ProductNatural, member_family
from ..sites import MemberSites, SiteStack, posterior, select, take, tied_site
from ._base import Runtime
from ._product_plan import ProductPlan, owners

# Rows that are evaluated together, times the points of an expectation.
_ROWS_TOGETHER = 1 << 16


_NO_ROW = np.iinfo(np.int32).max


class LookedUp(NamedTuple):
    """Some chunks, or slots of chunks, by their places among those of all devices."""

    # Plate indices of the rows, and where they stand here.
    rows: Int[Array, "*slots"]
    stands: Int[Array, "*slots"]
    # Which slots hold a row, and which of these are held here.
    mask: Bool[Array, "*slots"]
    here: Bool[Array, "*slots"]


@dataclasses.dataclass(frozen=True)
class ProductProblem:
    """Everything that rounds need to know of a model and its data.

    ``prior``: natural parameters of the exactly held prior; zero for the other components; ``num_draws``: draws of a latent
    that is drawn.
    """

    plan: ProductPlan
    call: ValueCall
    packing: Packing | GroupMasks
    prior: ProductNatural
    num_draws: int
    runtime: Runtime

    @property
    def family(self) -> ProductFamily:
        """Of q."""
        return self.plan.family

    @property
    def num_groups(self) -> int:
        """M."""
        return len(self.plan.partition.table.labels)

    @property
    def placed(self) -> Packing | None:
        """The packing where each device has some of the rows; None where all rows are here."""
        packing = self.packing
        return packing if isinstance(packing, Packing) and packing.places is not None else None

    @property
    def held(self) -> int:
        """Chunks held here."""
        return jax.tree.leaves(self.packing.chunks)[0].shape[0]

    @property
    def one_chunk_each(self) -> bool:
        """Whether every group has exactly one chunk, held here at the group's position."""
        return self.packing.chunk_group.shape[0] == self.num_groups == self.held

    @property
    def chunks(self) -> Any:
        """What identifies each chunk held here: where its rows stand, which are no padding, and which of the plate's they are."""
        return self.packing.chunks if self.placed is None else (*self.placed.chunks, self.placed.rows)

    def look_up(
        self, group: Int[Array, "..."], chunk: Int[Array, "..."], slot: Int[Array, "..."] | None = None
    ) -> LookedUp:
        """Rows of some chunks.

        ``group``: whose; of a shape that broadcasts against the chunks'; ``slot``: which of the chunk's slots; None for all of
        them. Returns the rows, of which every device knows the plate indices.
        """
        packing, placed = self.packing, self.placed
        assert isinstance(packing, Packing)  # where rows are masked none are looked up
        first, here = packing.offsets[group], jnp.array(True)
        at = first + chunk
        if placed is not None:
            # Chunks that fill devices' shares up are passed over.
            filled, counts = self.runtime.gathered(jnp.any(placed.mask, axis=1)), self.chunk_counts()
            (real,) = jnp.nonzero(filled, size=self.plan.partition.num_chunks)
            at = real[(jnp.cumsum(counts) - counts)[group] + chunk]
            at = at - self.runtime.mine(jnp.arange(filled.shape[0]), self.held)[0]
            here = (at >= 0) & (at < self.held)
            at = jnp.clip(at, 0, self.held - 1)
        index = (at,) if slot is None else (at, slot)
        rows, mask, stands = packing.rows[index], packing.mask[index], packing.stands[index]
        if placed is None:
            return LookedUp(rows, stands, mask, mask)
        held = jnp.reshape(here, here.shape + (1,) * (rows.ndim - here.ndim))
        rows, every = self.runtime.total((rows, mask), here)
        return LookedUp(rows, stands, every, mask & held)

    def owners(self, count: int) -> Int[Array, "N"]:
        """Position of each row's group, of all rows of the plate; -1 for rows of none."""
        own = dataclasses.replace(self.packing, chunk_group=self.runtime.mine(self.packing.chunk_group, self.held))
        return self.runtime.total(owners(own, count, self.plan.row_key) + 1) - 1

    def beside_rows(self, values: dict) -> tuple[ValueCall, dict]:
        """The model and values of the latents for what is not of its rows: where each device has some, on those of one chunk."""
        if self.placed is None:
            return self.call, values
        reading, chunk = self.plan.partition.reading, take(self.chunks, 0)
        return self.call.rows(reading, chunk), take_rows(values, self.plan.row_axes, reading, chunk)

    def _rows_call(self) -> ValueCall:
        """The model for its rows: each device differentiates what its own say, in params that all of them know."""
        return dataclasses.replace(self.call, params=self.runtime.shared(self.call.params))

    def differentiable(self) -> ProductProblem:
        """The same, whose rows' terms are to be differentiated in the model's params: see :meth:`_rows_call`."""
        return dataclasses.replace(self, call=self._rows_call())

    def held_still(self) -> ProductProblem:
        """The same, of which nothing is differentiated in the model's params."""
        return dataclasses.replace(
            self, call=dataclasses.replace(self.call, params=jax.lax.stop_gradient(self.call.params))
        )

    def _likelihood(self) -> MeanSpace:
        return MeanSpace(self.family, self.plan.likelihood, self.num_draws)

    def _prior_factor(self) -> MeanSpace | None:
        found = self.plan.prior_factor
        return None if found is None else MeanSpace(self.family, found, self.num_draws)

    def _chunk_average(
        self, space: MeanSpace, variables: Any, rest: Any, chunk: Any, key: Any, known: dict[str, Any] | None = None
    ) -> Array:
        """``E_q[log f]`` of one chunk, of what :meth:`_of_chunk` gives for it."""
        return self._left_over(space, variables, rest, chunk, key, known or {})[1]

    def _left_over(
        self, space: MeanSpace, variables: Any, rest: Any, chunk: Any, key: Any, known: dict[str, Any]
    ) -> tuple[Array, Array]:
        """The same, less what is known of it, and the whole."""
        part, plan, call = self.plan.partition, self.plan, self._rows_call()

        def density(values: dict, weights: Any = None, laws: Any = None) -> Array:
            def weigh(name: str, term: Array) -> Array:
                term = plan.over_base_measure(values, name, term)
                return term if weights is None else plan.likelihood.weigh(weights, name, term)

            latents = plan.latent_values(values)
            arguments = part.rows, part.reading, self.packing, chunk, plan.exact_latents
            instead = self._instead(space, latents, laws)
            return chunk_log_likelihood(call, latents, *arguments, weigh, instead)

        return space.left_over(variables, rest, density, key, self._rows_key(key, chunk), known)

    def _instead(self, space: MeanSpace, latents: dict, laws: Any) -> Instead | None:
        """Expectations of terms that are taken over predictors, given the other latents."""
        return None if laws is None else expected_terms(self.plan.predictor_law(space.structure, laws), latents)

    def _rows_key(self, key: Any, chunk: Any) -> Any:
        """Key of the draws of a chunk's own rows: those of different chunks are independent."""
        return None if isinstance(self.packing, GroupMasks) else jax.random.fold_in(key, plate_rows(chunk)[0])

    def _of_chunk(self, tree: dict[str, dict], chunk: Any) -> dict[str, dict]:
        """Variables (or the rest) with one chunk's rows of what belongs to latents inside the plate."""
        axes, reading = self.plan.row_axes, self.plan.partition.reading
        return {kind: take_rows(own, axes, reading, chunk) for kind, own in tree.items()} if axes else tree

    def _chunk_gradient(
        self, space: MeanSpace, variables: Any, rest: Any, chunk: Any, key: Any, known: dict[str, Any] | None = None
    ) -> tuple[Array, Any]:
        """Value and derivative of a chunk's expectation, in its own rows' part of the variables.

        ``known`` are natural parameters by drawn component, what the chunk's site says already: the derivative is of what they
        leave over.
        """
        rest = self._of_chunk(rest, chunk)
        (_, value), slope = value_and_grad(
            lambda v: self._left_over(space, v, rest, chunk, key, known or {}), has_aux=True
        )(self._of_chunk(variables, chunk))
        return value, slope

    def chunk_counts(self) -> Int[Array, "M"]:
        """Chunks of every group; of those that fill devices' shares up none."""
        offsets, placed = self.packing.offsets, self.placed
        if placed is None:
            return offsets[1:] - offsets[:-1]
        owner, filled = self.runtime.mine(placed.chunk_group, self.held), jnp.any(placed.mask, axis=1)
        return self.runtime.total(jax.ops.segment_sum(filled.astype(offsets.dtype), owner, self.num_groups))

    def _known(
        self, sites: SiteStack | None, chunk: Any, group: Int[Array, ""], place: Int[Array, ""], counts: Any
    ) -> dict[str, Any]:
        """A chunk's share of what its group's site, at some place of the stack, says of drawn components.

        ``counts`` are those of :meth:`chunk_counts`, which a loop that is not as long on every device cannot ask for.
        """
        if sites is None:
            return {}
        drawn, axes = self.plan.likelihood.drawn, self.plan.row_axes
        site = tied_site(sites.groups, self.num_groups) if self.plan.tied else take(sites.groups, place)
        own = {n: x for n, x in site.parts.items() if n in drawn}
        found = jax.tree.map(lambda x: x / counts[group], own)
        if self.placed is not None:
            # Of a chunk without rows there is nothing to know.
            found = jax.tree.map(lambda x: jnp.where(jnp.any(chunk[1]), x, 0.0), found)
        rows = {} if sites.local is None else sites.local.parts
        for name in (n for n in drawn if n in rows):
            part = take_rows({name: rows[name]}, axes, self.plan.partition.reading, chunk)[name]
            found[name] = self.plan.masked(name, part, self._counted(chunk))
        return found

    def _counted(self, chunk: Any) -> Bool[Array, "R"]:
        """Which of a chunk's rows count."""
        return self.plan.partition.reading.masks(self.packing, chunk)[self.plan.row_key]

    def group_gradients(self, space: MeanSpace, variables: Any, rest: Any, key: Any) -> tuple[Float[Array, "M"], Any]:
        """``E_q[log f_m]`` of every group in nats, and its derivative in the variables, of components outside the plate.

        ``space``: how the expectation is taken. Returns both, with a leading axis of groups.
        """
        parts = self._map_chunks(lambda own: self._chunk_gradient(space, variables, rest, own[0], key))
        return self._by_group(parts)

    def prior_density(self, values: dict, weights: Any = None, laws: Any = None) -> Array:
        """The prior factor's log density over base measures at values of all components, in nats: see :meth:`MeanSpace.average`."""
        plan, factor = self.plan, self.plan.prior_factor
        weigh: dict = {} if weights is None or factor is None else {"weigh": partial(factor.weigh, weights)}
        call, values = self.beside_rows(values)
        latents, space = plan.latent_values(values), self._prior_factor()
        weigh |= {} if space is None else {"instead": self._instead(space, latents, laws)}
        density = prior_log_density(call, latents, plan.partition.rows, plan.exact_latents, **weigh)
        return density - sum(jnp.sum(x) for x in plan.log_base_measures(values).values())

    def _map_chunks(self, one: Any) -> Any:
        """One result per chunk held here, of a function of what identifies it and its group."""
        count, rows = self.held, self.plan.partition.chunk_rows
        operands = self.chunks, self.runtime.mine(self.packing.chunk_group, count)
        batch = max(1, _ROWS_TOGETHER // max(rows, 1)) if self.runtime.vectorised else 1
        return in_batches(one, operands, batch)

    def _by_group(self, results: Any) -> Any:
        """Results of chunks, added up by group, those of all devices."""
        if self.one_chunk_each:
            return self.runtime.total(results)
        owner = self.runtime.mine(self.packing.chunk_group, self.held)
        return self.runtime.total(
            jax.tree.map(lambda x: jax.ops.segment_sum(x, owner, self.num_groups, indices_are_sorted=True), results)
        )

    def _rows_of_all(self, parts: Any, whole: Any, name: str) -> Any:
        """Chunks' results in their own rows of a latent inside the plate, as one of all rows."""
        if isinstance(self.packing, GroupMasks):
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)
        axis, rows = self.plan.row_axes[name], self.packing.rows

        def scattered(whole: Array, parts: Array) -> Array:
            zero = jnp.moveaxis(jnp.zeros_like(whole), axis, 0)
            # Slots of padding have no derivative, so that what they add to a row is zero.
            return jnp.moveaxis(zero.at[rows].add(jnp.moveaxis(parts, axis + 1, 1)), 0, axis)

        return self.runtime.total(jax.tree.map(scattered, whole, parts))

    # ---------------------------------------------------------------------------------------------------- messages

    def group_messages(self, q: ProductNatural, key: Any, sites: SiteStack | None = None) -> SiteStack:
        """Every group's ``dE_q[log f_m]/dmu``, those about rows' own latents in ``local``.

        ``sites``: where the sites are, which says part of the messages without draws. Returns the messages in the places of the
        sites.
        """
        variables, _ = self._likelihood().variables(q)
        if not jax.tree.leaves(variables):
            shared = {n: q.parts[n] for n in self.plan.shared}
            zero = jax.tree.map(lambda x: jnp.zeros((self.num_groups, *x.shape), x.dtype), shared)
            rows = {n: jax.tree.map(jnp.zeros_like, q.parts[n]) for n in self.plan.row_axes}
            return SiteStack(ProductNatural(zero), None, MemberSites(rows) if rows else None)
        return self.values_and_messages(q, key, sites=sites)[1]

    def values_and_messages(
        self, q: ProductNatural, key: Any, probs: Any = None, sites: SiteStack | None = None
    ) -> tuple[Float[Array, "C"], SiteStack]:
        """Every chunk's ``E_q[log f]`` in nats, and every group's message.

        ``probs``: by component that is summed over, weights of its values in place of q's probabilities. Returns the values and
        the messages.
        """
        space = self._likelihood()
        variables, rest = space.variables(q)
        if probs is not None:
            variables = variables | {"probs": {n: probs[n] for n in variables["probs"]}}

        counts = self.chunk_counts()

        def one(own: tuple) -> tuple:
            chunk, group = own
            known = self._known(sites, chunk, group, group, counts)
            return self._chunk_gradient(space, variables, rest, chunk, key, known)

        values, parts = self._map_chunks(one)
        messages = self._messages(space, q, variables, parts)
        return values, messages if sites is None else messages + self._said(sites)

    def group_values(self, q: ProductNatural, key: Any, sites: SiteStack) -> tuple[Float[Array, "M"], SiteStack]:
        """Every group's ``E_q[log f_m]`` in nats, and its message; see :meth:`group_messages`."""
        values, messages = self.values_and_messages(q, key, sites=sites)
        return self._by_group(values), messages

    def _said(self, sites: SiteStack) -> SiteStack:
        """The part of the sites that :meth:`_known` gives, in its place; zero elsewhere."""
        drawn = self.plan.likelihood.drawn

        def kept(parts: dict) -> dict:
            return {n: x if n in drawn else jax.tree.map(jnp.zeros_like, x) for n, x in parts.items()}

        groups = ProductNatural(kept(sites.groups.parts))
        groups = groups * (1.0 / self.num_groups) if self.plan.tied else groups
        rows = {} if sites.local is None else kept(sites.local.parts)
        return SiteStack(groups, None, MemberSites(rows) if rows else None)

    def _messages(self, space: MeanSpace, q: ProductNatural, variables: dict, parts: dict) -> SiteStack:
        """Messages from the derivatives of all chunks."""
        axes = self.plan.row_axes
        shared = {k: {n: self._by_group(x) for n, x in own.items() if n not in axes} for k, own in parts.items()}
        numbers = jnp.arange(self.num_groups)
        groups = jax.vmap(lambda g, _: space.message(q, variables, g, self.plan.shared))(shared, numbers)
        if not axes:
            return SiteStack(groups, None)
        own = {
            kind: {n: self._rows_of_all(x, variables[kind][n], n) for n, x in found.items() if n in axes}
            for kind, found in parts.items()
        }
        return SiteStack(groups, None, MemberSites(space.message(q, variables, own, tuple(axes)).parts))

    def finite(self, messages: SiteStack) -> Bool[Array, "M"]:
        """Whether every group's message is finite."""
        numbers = jnp.arange(self.num_groups)
        good = jax.vmap(lambda own, _: all_finite(own))(messages.groups, numbers)
        for name, own in () if messages.local is None else messages.local.parts.items():
            good = good & (self.largest_by_group(name, jax.tree.map(lambda x: ~jnp.isfinite(x), own)) == 0)
        return good

    def curvatures(self, q: ProductNatural, widest: float, key: Any) -> SiteStack:
        """Every group's message about the latents that are taken by quadrature, at no more than some variance.

        Returns the messages; precisions below zero of independent latents, of factors that are not log-concave, are zero.
        """
        space, found = self._likelihood(), self.plan.likelihood
        variables, rest = space.variables(q)
        names = (*found.by_nodes, *found.by_predictors)
        narrow = {n: variables["coordinates"][n].narrowed(widest) for n in names}
        variables = variables | {"coordinates": variables["coordinates"] | narrow}

        def one(own: tuple) -> dict:
            _, gradient = self._chunk_gradient(space, variables, rest, own[0], key)
            slopes = gradient["coordinates"]
            return gradient | {"coordinates": slopes | {n: slopes[n].bent() for n in names}}

        return self._messages(space, q, variables, self._map_chunks(one))

    def group_message(
        self, q: ProductNatural, sites: SiteStack, group: Int[Array, ""], key: Any
    ) -> tuple[ProductNatural, MemberSites | None]:
        """:meth:`group_value_and_message` without the value."""
        return self.group_value_and_message(q, sites, group, key)[:2]

    def group_value_and_message(
        self, q: ProductNatural, sites: SiteStack, group: Int[Array, ""], key: Any
    ) -> tuple[ProductNatural, MemberSites | None, Float[Array, ""]]:
        """One group's message.

        ``sites``: the group's, as a stack of one, and those of all latents inside the plate. Returns the message about shared
        components; the sites of all latents inside the plate, of which the group's rows' are their messages; and ``E_q[log f]``
        in nats.
        """
        space, chunks, (counts, span) = self._likelihood(), self.chunks, self.chunks_of(group)
        variables, rest = space.variables(q)
        shared = self.plan.shared
        zero = {
            k: {n: jax.tree.map(jnp.zeros_like, x) for n, x in own.items() if n in shared}
            for k, own in variables.items()
        }

        def add(chunk: Any, carry: Any) -> Any:
            total, local, value = carry
            here = take(chunks, chunk)
            known = self._known(sites, here, group, jnp.int32(0), counts)
            here_value, found = self._chunk_gradient(space, variables, rest, here, key, known)
            total = {k: {n: jax.tree.map(jnp.add, x, found[k][n]) for n, x in own.items()} for k, own in total.items()}
            return total, self._with_rows(space, local, q, variables, found, here, known), value + here_value

        first = zero, sites.local, jnp.zeros((), jax.tree.leaves(q)[0].dtype)
        if self.one_chunk_each:
            gradient, local, value = add(group, first)
        else:
            gradient, local, value = jax.lax.fori_loop(*span, add, first)
        (gradient, value), local = self.runtime.total((gradient, value)), self._of_all(local)
        said = take(self._said(sites).groups, 0)
        return space.message(q, variables, gradient, shared) + said, local, value

    def chunks_of(self, group: Int[Array, ""]) -> tuple[Any, tuple[Any, Any]]:
        """Chunks of every group, as :meth:`chunk_counts` has them, and a group's first one held here, and past its last."""
        return self.chunk_counts(), self.span(group)

    def span(self, group: Int[Array, ""]) -> tuple[Any, Any]:
        """A group's first chunk among those held here, and past its last."""
        return self.runtime.span(self.packing.offsets, group, self.held)

    def _of_all(self, local: MemberSites | None) -> MemberSites | None:
        """Sites of latents inside the plate, each of its row as the device has them that holds the row."""
        placed = self.placed
        if local is None or placed is None:
            return local
        rows, axes = jnp.where(placed.mask, placed.rows, _NO_ROW), self.plan.row_axes

        def known(x: Array, axis: int) -> Array:
            here = jnp.zeros((x.shape[axis],), bool).at[rows].set(True, mode="drop")
            return jnp.moveaxis(self.runtime.total(jnp.moveaxis(x, axis, 0), here), 0, axis)

        return MemberSites({n: jax.tree.map(lambda x, n=n: known(x, axes[n]), own) for n, own in local.parts.items()})

    def _with_rows(
        self, space: MeanSpace, local: Any, q: ProductNatural, variables: dict, gradient: dict, chunk: Any, known: dict
    ) -> Any:
        """Sites of latents inside the plate with one chunk's rows' at their messages."""
        axes, reading = self.plan.row_axes, self.plan.partition.reading
        if not axes:
            return local
        here, parts = self._of_chunk(variables, chunk), dict(local.parts)
        own = ProductNatural(take_rows(q.parts, axes, reading, chunk))
        for name, message in space.message(own, here, gradient, tuple(axes)).parts.items():
            new = message + known[name] if name in known else message
            parts[name] = self.with_rows(name, parts[name], new, chunk)
        return MemberSites(parts)

    def with_rows(self, name: str, whole: Any, new: Any, chunk: Any) -> Any:
        """Parameters of a latent inside the plate with those of one chunk's rows replaced."""
        if isinstance(self.packing, GroupMasks):
            return whole + self.plan.masked(name, new - whole, self._counted(chunk))
        # A row that is not there stands for padding.
        rows = jnp.where(chunk[1], plate_rows(chunk), _NO_ROW)
        return jax.tree.map(partial(_placed, rows=rows, axis=self.plan.row_axes[name]), whole, new)

    def prior_message(self, q: ProductNatural, key: Any, site: ProductNatural | None = None) -> ProductNatural | None:
        """That of the prior factor; None where there is none."""
        found = self.prior_value_and_message(q, key, site)
        return None if found is None else found[1]

    def prior_value_and_message(
        self, q: ProductNatural, key: Any, site: ProductNatural | None = None
    ) -> tuple[Float[Array, ""], ProductNatural] | None:
        """``E_q[log f]`` of the prior factor in nats, and its message; None where there is none.

        ``site``: where the factor's site is, which says part of the message without draws.
        """
        space = self._prior_factor()
        if space is None:
            return None
        variables, rest = space.variables(q)
        known = {} if site is None else {n: site.parts[n] for n in space.structure.drawn}

        (_, value), gradient = value_and_grad(
            lambda v: space.left_over(v, rest, self.prior_density, key, None, known), has_aux=True
        )(variables)
        found = dict(space.message(q, variables, gradient).parts)
        return value, ProductNatural(found | {n: found[n] + x for n, x in known.items()})

    def quadrature_error(self, sites: SiteStack, key: Any) -> Float[Array, ""]:
        """Largest estimated error of any factor's curvature over its predictors, relative to the curvature.

        ``key``: for draws of the other latents. Returns the error; zero where no factor is taken over predictors.
        """
        q, found = posterior(self.prior, sites), [jnp.zeros(())]
        prior = self._prior_factor()
        if self.plan.likelihood.terms:
            found.append(jnp.max(self.rows_error(q, key)))
        if prior is not None and prior.structure.terms:

            def outside(values: dict, _: Any = None, laws: Any = None) -> Array:
                call, values = self.beside_rows(values)
                law = self.plan.predictor_law(prior.structure, laws)
                return worst_error(law, self.plan.latent_values(values), call, {})

            found.append(prior.average(*prior.variables(q), outside, key))
        worst = jnp.stack(found).max()
        return jnp.where(jnp.isnan(worst), jnp.inf, worst)

    def of_rows(
        self, what: str, here: Callable[[], tuple], q: ProductNatural, key: Any, own: Any = (), **how: Any
    ) -> tuple:
        """What only a pass over every group's rows can say: ``here()``, where the rows are here.

        ``what``: its name, where it is asked for; ``here``: makes arrays with a leading axis of groups, of nothing but the rows
        and the other arguments; ``own``: of each group, trees with a leading axis of groups.
        """
        return here()

    def rows_error(self, q: ProductNatural, key: Any) -> Float[Array, "M"]:
        """Every group's part of :meth:`quadrature_error`, where factors are taken over predictors."""
        return self.of_rows("error", lambda: (self._rows_error(q, key),), q, key)[0]

    def _rows_error(self, q: ProductNatural, key: Any) -> Float[Array, "M"]:
        space, reading = self._likelihood(), self.plan.partition.reading
        variables, rest = space.variables(q)

        def one(own: tuple) -> Array:
            chunk = own[0]
            here, masks = self.call.rows(reading, chunk), reading.masks(self.packing, chunk)

            def error(values: dict, _: Any = None, laws: Any = None) -> Array:
                law = self.plan.predictor_law(space.structure, laws)
                return worst_error(law, self.plan.latent_values(values), here, masks)

            own = self._of_chunk(variables, chunk), self._of_chunk(rest, chunk)
            return space.average(*own, error, key, self._rows_key(key, chunk))

        owner = self.runtime.mine(self.packing.chunk_group, self.held)
        worst = jax.ops.segment_max(self._map_chunks(one), owner, self.num_groups)
        # Of groups without a chunk here there is none.
        return self.runtime.largest(jnp.maximum(worst, 0.0))

    # -------------------------------------------------------------------------------------------------------- ELBO

    def elbo(self, sites: SiteStack, key: Any, q: ProductNatural | None = None) -> Float[Array, ""]:
        """``sum_m E_q[log f_m] - KL(q | exact prior) + H(q)`` over components with and without an exact prior, in nats.

        Where expectations are by draws, only what the sites leave over is drawn: ``E[log f_m - <eta, T>] + <eta, mu>``. Its
        derivatives are the messages at those sites, so that it tells whether a step along them was too long. ``q``: natural
        parameters, held fixed while the prior moves with the model's params; those of prior and sites by default. Returns the
        ELBO; NaN where q is not normalisable.
        """
        q = posterior(self.prior, sites) if q is None else q
        terms = [self.group_averages(q, key, sites).reshape(-1), self.divergences(q)]
        prior = self.prior_average(q, key, sites)
        if prior is not None:
            terms.append(prior[None])
        # Only the value is not used where q is outside: a point inside keeps everything finite.
        return jnp.where(self.family.in_domain(q), jnp.sum(jnp.concatenate(terms)), jnp.nan)

    def group_averages(self, q: ProductNatural, key: Any, control: SiteStack | None) -> Float[Array, "M"]:
        """Every group's ``E_q[log f_m]`` in nats, without its message; ``control`` stands beside the factors on the draws."""
        space, counts = self._likelihood(), self.chunk_counts()
        variables, rest = space.variables(q)

        def one(own: tuple) -> Array:
            chunk, group = own
            known = self._known(control, chunk, group, group, counts)
            own = self._of_chunk(variables, chunk), self._of_chunk(rest, chunk)
            return self._chunk_average(space, *own, chunk, key, known)

        return self._by_group(self._map_chunks(one))

    def prior_average(self, q: ProductNatural, key: Any, control: SiteStack) -> Float[Array, ""] | None:
        """The prior factor's ``E_q[log f]`` in nats, without its message; None where there is none."""
        prior = self._prior_factor()
        if prior is None:
            return None
        variables, rest = prior.variables(q)
        known = {n: control.prior.parts[n] for n in prior.structure.drawn}
        return prior.left_over(variables, rest, self.prior_density, key, None, known)[1]

    def divergences(self, q: ProductNatural, names: Collection[str] | None = None) -> Float[Array, "C"]:
        """Of every component, or of some, minus KL to its exact prior; the entropy where it has none. In nats."""
        found = []
        for name, family in self.family.components:
            if names is not None and name not in names:
                continue
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
        flags = dict(zip(names, jnp.asarray(self.plan.turns) == turn, strict=True))
        parts = {
            name: jax.tree.map(lambda x, flag=flags[name]: jnp.where(flag, x, 0.0), own)
            for name, own in change.parts.items()
        }
        return type(change)(parts)

    def size(self, q: ProductNatural, change: Any) -> Float[Array, ""]:
        """Largest change of a member, in its Fisher metric at q: posterior sds, for a shift of a normal."""
        sizes = [jnp.max(x) for x in self.sizes(q, change).values()]
        return jnp.max(jnp.stack(sizes)) if sizes else jnp.zeros(())

    def sizes(self, q: ProductNatural, change: Any) -> dict[str, Array]:
        """The same of every member of the components that a change has."""
        found, families = {}, dict(self.family.components)
        for name, step in change.parts.items():
            own, family = q.parts[name], families[name]
            member, change = member_family(family, step)
            square = member.inner(change, family.fisher_product(own, step))
            found[name] = jnp.sqrt(jnp.maximum(jnp.asarray(square), 0.0))
        return found

    def largest_by_group(self, name: str, found: Any) -> Float[Array, "M"]:
        """See :meth:`ProductPlan.largest_by_group`."""
        rows = jax.tree.leaves(found)[0].shape[self.plan.row_axes[name]]
        return self.plan.largest_by_group(name, found, self.owners(rows), self.num_groups)

    def moves(self, q: ProductNatural, change: SiteStack) -> Float[Array, "M"]:
        """:meth:`size` of every group's part of a change of the sites."""
        numbers = jnp.arange(self.num_groups)
        found = jax.vmap(lambda own, _: self.size(q, own))(change.groups, numbers)
        if change.local is not None:
            for name, sizes in self.sizes(q, change.local).items():
                found = jnp.maximum(found, self.largest_by_group(name, sizes))
        return found


def _placed(whole: Array, part: Array, rows: Array, axis: int) -> Array:
    """Some rows replaced; rows that are not there are left out."""
    return jnp.moveaxis(jnp.moveaxis(whole, axis, 0).at[rows].set(jnp.moveaxis(part, axis, 0), mode="drop"), 0, axis)


def finite_or(new: Any, old: Any) -> tuple[Any, Bool[Array, ""]]:
    """``(new, True)`` where everything in it is finite, else ``(old, False)``."""
    good = all_finite(new)
    return select(good, new, old), good
