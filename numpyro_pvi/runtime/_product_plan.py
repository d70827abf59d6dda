"""What is decided beforehand about a fit whose q is a product of families: blocks, exact priors, tilted moments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._state import Plan
from ..errors import GuideError, PVIError
from ..expectations import (
    GRID_DIM,
    MOST_VALUES,
    RULES,
    FactorStructure,
    ImportanceMoments,
    LaplaceMoments,
    Laws,
    MCMCMoments,
    PredictorLaw,
    Unconstrained,
    all_values,
    discrete_of,
    grid_of,
    own_grid,
    with_settings,
)
from ..factors import GroupMasks, Layout, Packing, ValueCall, is_latent
from ..families import (
    MultivariateNormalFamily,
    NormalFamily,
    ProductFamily,
    ProductNatural,
    ScalarNormalFamily,
    base_family,
    family_for,
    members_of,
    repeated,
    support_of,
)

# Least draws of a row's own latents that tell a member, twice.
_OWN_MEMBER = 8
# Rounds after which a fixed rule is first held to others: about as many as moves are long in.
_RULE_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class JointBlock:
    """Latents that share one Gaussian: a component whose value is their entries in one vector."""

    name: str
    latents: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def split(self, value: Array) -> dict[str, Array]:
        """Name -> value in the latent's own shape, of one vector."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = jnp.split(value, ends[:-1], axis=-1)
        return {n: x.reshape(s) for n, x, s in zip(self.latents, parts, self.shapes, strict=True)}


@dataclasses.dataclass(frozen=True)
class RowLatent:
    """A latent inside the partitioned plate, one or more members per row.

    Attributes:
        name: the latent, a component of its own.
        axis: the plate's axis, counted from the left, of values and parameters alike.
        family: of one event.
        key: of the partitioned axis, the same for all of them.
    """

    name: str
    axis: int
    family: Any
    key: str


@dataclasses.dataclass(frozen=True)
class ProductLatents:
    """How a model is traced at draws of the components of a product.

    Args:
        blocks: joint blocks, whose values are vectors.
    """

    blocks: tuple[JointBlock, ...]

    def trace(self, model: Callable, args: tuple, kwargs: dict, params: dict, draw: Any, rng_key: Any) -> dict:
        """The model's trace at one draw: see :meth:`numpyro_pvi.factors.FlatLatents.trace`."""
        return ValueCall(model, args, kwargs, params=params).trace(latent_values(self.blocks, draw), rng_key)


@dataclasses.dataclass(frozen=True)
class ProductPlan(Plan):
    """The plan of a fit under :class:`numpyro_pvi.AutoExponentialFamily`; ``family`` is a ``ProductFamily``.

    Attributes:
        likelihood: how the groups' expectations are taken.
        prior_factor: the same of the prior factor; None where there is none.
        exact: components whose prior is held exactly.
        blocks: joint blocks.
        turns: for every component, in the family's order, the number of the step of a round that moves it.
        inside: latents inside the partitioned plate. A group's site has terms in its own rows' members alone.
        tilted: how tilted moments are taken ("exact", "quadrature" or "importance"), of the groups and of the prior factor;
            empty where nobody matches moments.
    """

    likelihood: FactorStructure = dataclasses.field(default_factory=lambda: FactorStructure(()))
    prior_factor: FactorStructure | None = None
    exact: tuple[str, ...] = ()
    blocks: tuple[JointBlock, ...] = ()
    turns: tuple[int, ...] = ()
    inside: tuple[RowLatent, ...] = ()
    tilted: tuple[str, ...] = ()

    measured = "shapes"
    # Of fields that are there, as well: a data class would make a hash of its own, anew at every call.
    __hash__ = Plan.__hash__

    @property
    def factors(self) -> tuple:
        """As of :class:`Plan`."""
        return self.likelihood, self.prior_factor, self.tilted

    @property
    def own_latents(self) -> tuple[str, ...]:
        """Latents inside the partitioned plate, of which every row has its own."""
        return tuple(latent.name for latent in self.inside)

    @property
    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all latents by name, in their own supports."""
        layout = self.vector_layout([name for name, _ in self.family.components])
        return dict(zip(layout.names, layout.shapes, strict=True))

    def shapes_in(self, trace: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The same as a trace of the model has them."""
        return value_shapes(trace)

    def without_members(self, natural: Any) -> tuple[ProductPlan, Any]:
        """The plan, and natural parameters, of the components outside the partitioned plate."""
        own = dataclasses.replace(self, family=self.family.of(self.shared))
        if natural is None:
            return own, None
        return own, ProductNatural({n: natural.parts[n] for n in self.shared})

    @property
    def _coupled_by_q(self) -> str | None:
        return None if self.separate else "the other groups' sites were fitted at a q that had it in"

    @property
    def told(self) -> dict[str, Any]:
        """See :attr:`numpyro_pvi._state.Plan.told`: what is found at rows, and at draws, of the groups' factors."""
        return {"structure": self.likelihood, "exact": self.exact, "tilted": self.tilted, "chained": self.chained}

    def taking(self, told: Mapping[str, Any]) -> ProductPlan:
        """See :meth:`numpyro_pvi._state.Plan.taking`."""
        own = {n: told[n] for n in ("exact", "tilted", "chained")}
        return dataclasses.replace(self, likelihood=told["structure"], **own)

    @property
    def found(self) -> dict[str, Any]:
        """See :attr:`numpyro_pvi._state.Plan.found`."""
        families = tuple((name, repr(family)) for name, family in self.family.components)
        inside = tuple(latent.name for latent in self.inside)
        return {"structure": self.likelihood, "exact": self.exact, "families": families, "inside": inside}

    @property
    def chain_dim(self) -> int:
        """Unconstrained coordinates of the components that the groups' factors see."""
        return Unconstrained(touched(self.matched, self.likelihood)).dim

    @property
    def row_axes(self) -> dict[str, int]:
        """By latent inside the partitioned plate, the plate's axis."""
        return {latent.name: latent.axis for latent in self.inside}

    @property
    def row_key(self) -> str:
        """Key of the partitioned axis of the latents inside the plate, of which there is at least one."""
        return self.inside[0].key

    @property
    def matched(self) -> ProductFamily:
        """Of the components that sites and tilted moments are of: without those inside the partitioned plate."""
        return self.family.of(self.shared) if self.inside else self.family

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Axes of one row's members of a latent inside the partitioned plate."""
        latent = next(latent for latent in self.inside if latent.name == name)
        members = members_of(dict(self.family.components)[name])
        batch = members[: len(members) - len(members_of(latent.family))]
        return (*batch[: latent.axis], *batch[latent.axis + 1 :])

    @property
    def row_family(self) -> ProductFamily:
        """Of one row's own latents."""
        return ProductFamily([(own.name, repeated(own.family, self.row_shape(own.name))) for own in self.inside])

    @property
    def own_cells(self) -> tuple[tuple[str, ...], Int[np.ndarray, "C J"]]:
        """One row's own latents with finitely many values, and all combinations of these, a column per member."""
        names, sizes = [], {}
        for name, own in self.row_family.components:
            if (support := support_of(own)) is not None:
                names.append(name)
                sizes |= {f"{name}/{place}": support.size for place in range(math.prod(self.row_shape(name)))}
        count = math.prod(sizes.values())
        if count > MOST_VALUES:
            raise PVIError(
                f"the values of {', '.join(names)} are summed over together in every row, at most {MOST_VALUES} combinations, "
                f"and here are {count}: put fewer of them in a row (let the partitioned plate run over single observations), "
                "sum them out in the model, or use solver=NaturalGradient(), which takes them one by one."
            )
        return tuple(names), all_values(sizes)

    @property
    def own_without_form(self) -> tuple[str, ...]:
        """Continuous latents inside the plate whose integral, given shared and finite ones, is known to no closed form."""
        own = [name for name, family in self.row_family.components if support_of(family) is None]
        roles = {role.name: role for role in self.likelihood.roles}
        alone = len(own) == 1 and (roles[own[0]].single or not self.row_shape(own[0]))
        return () if not own or (alone and roles[own[0]].kind == "exact") else tuple(own)

    @property
    def own_draws(self) -> int:
        """Draws of a row's own continuous latents: as many as tell a member twice, 0 without any."""
        own = [family for _, family in self.row_family.components if support_of(family) is None]
        size = sum(family.to_minimal(family.zeros()).shape[-1] for family in own)
        return max(_OWN_MEMBER, 4 * size) if own else 0

    @property
    def shared(self) -> tuple[str, ...]:
        """Components outside the partitioned plate, in the family's order."""
        return tuple(name for name, _ in self.family.components if name not in self.row_axes)

    @property
    def latents(self) -> ProductLatents:
        """How the model is traced at one of :meth:`shared_draws`."""
        return ProductLatents(self.blocks)

    def shared_draws(self, q: ProductNatural, rng_key: Any, count: int) -> dict[str, Any]:
        """See :meth:`numpyro_pvi._state.Plan.shared_draws`: values by component."""
        own = self.family.of(self.shared)
        return own.sample(ProductNatural({n: q.parts[n] for n in self.shared}), rng_key, (count,))

    def masked(self, name: str, own: Any, rows: Bool[Array, "R"]) -> Any:
        """Parameters of a latent inside the plate, zero but in some rows."""
        axis = self.row_axes[name]
        return jax.tree.map(lambda x: jnp.where(along(rows, axis, x.ndim), x, 0.0), own)

    def largest_by_group(
        self, name: str, found: Any, owner: Int[Array, "N"], groups: int | None = None
    ) -> Float[Array, "M"]:
        """The largest number of every group's rows, of arrays by member of a latent inside the plate (M is ``groups`` if given)."""
        count, axis = groups or len(self.partition.table.labels), self.row_axes[name]
        total = jnp.zeros((count,))
        for x in jax.tree.leaves(found):
            rows = jnp.max(jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) * 1.0, axis=1)
            total = jnp.maximum(total, jax.ops.segment_max(rows, owner, count))
        return total

    def sum_by_group(self, name: str, found: Array, packing: Packing | GroupMasks) -> Float[Array, "M"]:
        """The sum over every group's rows, of an array by member of a latent inside the plate."""
        axis = self.row_axes[name]
        rows = jnp.sum(jnp.moveaxis(found, axis, 0).reshape(found.shape[axis], -1), axis=1)
        owner = owners(packing, rows.shape[0], self.row_key)
        return jax.ops.segment_sum(rows, owner, len(self.partition.table.labels))

    @property
    def num_turns(self) -> int:
        """Steps of a round, each of which moves some components."""
        return max(self.turns) + 1

    @property
    def exact_latents(self) -> tuple[str, ...]:
        """Latents whose prior is held exactly."""
        inside = {block.name: block.latents for block in self.blocks}
        return tuple(latent for name in self.exact for latent in inside.get(name, (name,)))

    @property
    def summed(self) -> tuple[str, ...]:
        """Components whose values are summed over."""
        factors = [f for f in (self.likelihood, self.prior_factor) if f is not None]
        return tuple(dict.fromkeys(name for factor in factors for name, _ in factor.cells))

    @property
    def separate(self) -> bool:
        """Whether it is known that no message depends on q: every factor sees one latent alone, member by member, exactly."""
        seen = [role for role in self.likelihood.roles if role.kind != "absent"]
        alone = len(seen) == 1 and seen[0].kind == "exact" and seen[0].single
        return alone and self.prior_factor is None and not self.inside

    @property
    def loss_by_draws(self) -> bool:
        """See :attr:`Plan.loss_by_draws`; where moments are by draws these say so of themselves."""
        factors = zip((self.likelihood, self.prior_factor), self.tilted, strict=False)
        return any(x is not None and not x.exact and way not in SAMPLED_WAYS for x, way in factors)

    @property
    def starts_curved(self) -> bool:
        """Whether ``init_sites="curvature"`` is for such a fit: q starts at the prior."""
        return False

    @property
    def by_slopes(self) -> bool:
        """Whether any factor that may jump is taken to change as its slopes say; moments are of values."""
        factors = (self.likelihood, self.prior_factor)
        return not self.tilted and any(factor is not None and factor.by_slopes for factor in factors)

    @property
    def terms_together(self) -> int:
        """Rows that an evaluation of the groups' factors has, fillings included, times combinations of values summed over."""
        sizes = (support.size for _, f in self.family.components if (support := support_of(f)) is not None)
        return self.partition.num_chunks * self.partition.chunk_rows * math.prod(sizes)

    @property
    def early_checks(self) -> tuple[int, ...]:
        """See :attr:`Plan.early_checks`; a fixed rule is worst while q is wide, and rounds may stand still where it is wrong."""
        ruled = any(factor is not None and factor.by_rule for factor in (self.likelihood, self.prior_factor))
        return (*super().early_checks, *((_RULE_ROUNDS,) if ruled else ()))

    @property
    def noisy(self) -> bool:
        """Whether any expectation is by draws."""
        factors = (self.likelihood, self.prior_factor)
        return any(factor is not None and not factor.exact for factor in factors)

    def by_draws(self, rule: Any) -> bool:
        """Whether any expectation is by draws, whatever the rule."""
        del rule
        return self.noisy

    def log_base_measures(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """log h of every shared component whose prior is a factor, member by member in nats: the factor is the prior's over h."""
        outside = {n: f for n, f in self.family.components if n not in self.exact and n not in self.row_axes}
        return {n: jnp.asarray(base_family(f).log_base_measure(values[n])) for n, f in outside.items()}

    def over_base_measure(self, values: Mapping[str, Array], name: str, term: Array) -> Array:
        """A term, over the base measure h where it is the prior of a latent inside the partitioned plate, in nats."""
        own = next((latent for latent in self.inside if latent.name == name), None)
        return term if own is None else term - own.family.log_base_measure(values[name])

    def vector_layout(self, names: Collection[str]) -> Layout:
        """Of the latents that some components hold, in one vector of the components' values, end to end."""
        blocks, shapes = {block.name: block for block in self.blocks}, {}
        for name, family in self.family.components:
            if name in names:
                block = blocks.get(name)
                own = (
                    {name: tuple(family.event_shape)}
                    if block is None
                    else zip(block.latents, block.shapes, strict=True)
                )
                shapes |= dict(own)
        return Layout(tuple(shapes), tuple(shapes.values()))

    def predictor_law(self, factor: FactorStructure, laws: Laws) -> PredictorLaw:
        """The law of what a factor sees through predictors, of its components' coordinates."""
        names = factor.by_predictors
        rules = len(RULES) - (not self.fine)
        own = tuple(laws.coordinates[n] for n in names)
        return PredictorLaw(factor.terms, self.vector_layout(names), own, rules, laws.share)

    def latent_values(self, values: Mapping[str, Array]) -> dict[str, Any]:
        """Latent -> value, of component -> value."""
        return latent_values(self.blocks, values)


def value_shapes(trace: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the latents of a trace, in their own supports."""
    return {n: tuple(s["fn"].shape()) for n, s in trace.items() if is_latent(s)}


def touched(family: ProductFamily, factor: FactorStructure) -> ProductFamily:
    """The components that a factor depends on."""
    absent = {role.name for role in factor.roles if role.kind == "absent"}
    return ProductFamily([(n, f) for n, f in family.components if n not in absent])


def owners(packing: Packing | GroupMasks, count: int, key: str) -> Int[Array, "N"]:
    """Position of each row's group.

    Args:
        packing: rows of each chunk.
        count: N.
        key: of the partitioned axis.

    Returns:
        The positions; -1 for rows of none.
    """
    if isinstance(packing, GroupMasks):
        return packing.group_of_row[key]
    rows = jnp.where(packing.mask, packing.rows, count)
    nobody = jnp.full((count,), -1, packing.chunk_group.dtype)
    return nobody.at[rows].set(packing.chunk_group[:, None], mode="drop")


def along(rows: Array, axis: int, rank: int) -> Array:
    """Flags of rows in a shape that broadcasts against members."""
    return rows.reshape((1,) * axis + (-1,) + (1,) * (rank - axis - 1))


def latent_values(blocks: tuple[JointBlock, ...], values: Mapping[str, Array]) -> dict[str, Any]:
    """Latent -> value, of component -> value.

    Args:
        blocks: joint blocks, whose values are vectors.
        values: by component.

    Returns:
        Values by latent, in their own shapes.
    """
    found = dict(values)
    for block in blocks:
        found |= block.split(found.pop(block.name))
    return found


# --------------------------------------------------------------------------------------------------------- exact priors
# The priors that are members of the latents' own families, read off the model.

_GAUSSIAN = (ScalarNormalFamily, NormalFamily, MultivariateNormalFamily)


def prior_members(
    call: ValueCall, family: ProductFamily, blocks: tuple[JointBlock, ...], values: dict[str, Any]
) -> dict[str, Any]:
    """Natural parameters of every component whose prior, given the others, is a member of its family.

    Args:
        call: the model with its arguments.
        family: of q.
        blocks: joint blocks.
        values: of all components.

    Returns:
        Natural parameters by component.
    """
    trace, found = call.trace(latent_values(blocks, values)), {}
    for name, own in family.components:
        block = next((b for b in blocks if b.name == name), None)
        natural = _member(trace[name], own) if block is None else _gaussian_block(trace, block, own)
        if natural is not None:
            found[name] = natural
    return found


def exact_prior_of(problem: Any, q: ProductNatural) -> ProductNatural:
    """The exactly held prior as the model's params have it.

    Args:
        problem: the factors at these params, of which only the model is looked at.
        q: where the other latents are looked at, of which it does not depend.

    Returns:
        Natural parameters by component, zero where the prior is a factor.
    """
    plan = problem.plan
    call, values = problem.beside_rows(plan.family.sample(q, jax.random.key(0)))
    held = prior_members(call, plan.family, plan.blocks, values)
    return ProductNatural(
        {n: held[n] if n in plan.exact else jax.tree.map(jnp.zeros_like, x) for n, x in q.parts.items()}
    )


def _member(site: dict, family: Any) -> Any:
    """Natural parameters of a latent's prior; None where it is not a member of the latent's family."""
    if site["scale"] is not None:
        return None
    try:
        own = repeated(family_for(site["fn"]), site["fn"].batch_shape)
    except GuideError:
        return None
    if own != family:
        return None
    natural = family.from_distribution(site["fn"])
    dtype = jnp.result_type(float)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), natural)


def _gaussian_block(trace: dict, block: JointBlock, family: MultivariateNormalFamily) -> Any:
    """That of a joint block whose latents have normal priors."""
    locs, sizes, covariance, begin = [], 0, jnp.zeros((family.dim, family.dim)), 0
    for name in block.latents:
        site = trace[name]
        fn = site["fn"]
        try:
            base = family_for(fn)
        except GuideError:
            return None
        while (inner := getattr(base, "base", None)) is not None:
            base = inner
        if site["scale"] is not None or not isinstance(base, _GAUSSIAN):
            return None
        locs.append(jnp.broadcast_to(fn.mean, fn.shape()).reshape(-1))
        sizes = int(np.prod(fn.shape()))
        if base.full:
            if fn.shape() != tuple(fn.event_shape):
                return None
            own = fn.covariance_matrix
        else:
            own = jnp.diag(jnp.broadcast_to(fn.variance, fn.shape()).reshape(-1))
        covariance = covariance.at[begin : begin + sizes, begin : begin + sizes].set(own)
        begin += sizes
    return family.from_loc_covariance(jnp.concatenate(locs), covariance)


# ------------------------------------------------------------------------------------------ ways to take tilted moments
# Which way of taking tilted moments fits a factor of a product of families, and what moments are not matched of.

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
            "kernel='nuts' or 'lockstep'."
        )
    return "mcmc"


def check_tilted(plan: ProductPlan, solver: Any) -> None:
    """Refuse what moments are not matched of.

    Args:
        plan: the plan.
        solver: the solver.

    Raises:
        PVIError: naming the latents inside the plate.
    """
    if not plan.inside:
        return
    names, owner = ", ".join(plan.own_latents), type(solver).__name__
    if not plan.shared:
        raise PVIError(
            f"{owner} under AutoExponentialFamily: every latent ({names}) is inside the partitioned plate, so that no site "
            "is left once these are integrated out: rows have nothing to tell one another. Use solver=NaturalGradient()."
        )
    if solver.factors == "row":
        raise PVIError(
            f"{owner}(factors='row') under AutoExponentialFamily: latent(s) {names} are inside the partitioned plate, and a row's "
            "factor, with these integrated out, is that of a group of one row: give every row a group of its own (a label each), "
            "which is the same fit, or use factors='group'."
        )
    if len(plan.partition.reading.keys) > 1:
        raise PVIError(
            f"{owner} under AutoExponentialFamily: latent(s) {names} are inside one of several plates that are split together, and "
            "integrating them out takes all rows that see them, of every plate, at once: keep everything of a row in one plate, or "
            "use solver=NaturalGradient()."
        )
    where = f"{owner} under AutoExponentialFamily: latent(s) {names} are inside the partitioned plate"
    continuous = [(n, f) for n, f in plan.row_family.components if support_of(f) is None]
    if plan.own_without_form and own_grid(ProductFamily(continuous)) is None:
        raise PVIError(
            f"{where}, and the integral over {', '.join(plan.own_without_form)} has no closed form given the shared latents; sums "
            "over a grid are of at most two numbers a row: put fewer of them in a row (let the partitioned plate run over single "
            "observations), or use solver=NaturalGradient()."
        )
    _ = plan.own_cells


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
    owner = type(solver).__name__
    for (factor, where), flag in zip(factors, affine, strict=True):
        if factor is not None:
            found.append(method_of_factor(touched(plan.matched, factor), flag, solver.moments, where, owner))
    if found[0] == "mcmc" and solver.factors == "row":
        raise PVIError(
            f"PowerEP(factors='row', moments={solver.moments!r}): every row would have chains of its own; leave moments='auto', or "
            "use factors='group'."
        )
    return dataclasses.replace(plan, tilted=tuple(found))
