"""What a state says: the guide's params, marginals of the latents, sites and cavities, whatever form its sites have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions.transforms import PermuteTransform

from ._compiling import Program, owned_jit
from ._group_lifecycle import position, site_of
from ._numerics import scaled_cholesky, symmetrise
from ._posterior_views import NaturalView, agent_natural
from ._state import Plan, PVIState
from .errors import ImproperError, PartitionError, PVIError
from .factors import (
    GroupMasks,
    LocalLayout,
    ModelCall,
    Planned,
    join_arguments,
    look_at_rows,
    num_elements,
    why_not_rows,
)
from .families import (
    ConditionalMoments,
    ConditionalNatural,
    GaussianFamily,
    GaussianMoments,
    GaussianNatural,
    MultivariateNormalFamily,
    RowGaussian,
    RowPrior,
    RowRoot,
    conditional_moments,
    dense_natural,
    row_gaussian,
)
from .guides import (
    event_rank,
    flat_to_params,
    given_params,
    guide_order,
    guide_param_names,
    in_own_support,
    natural_to_params,
    params_to_flat,
)
from .handlers import PRIOR
from .runtime import Engine
from .schedules import without_mixing
from .sites import Held, SiteStack, cavity, posterior

# -------------------------------------------------------------------------------------------------- two numbers per row
# States whose sites are two numbers per row: when they are chosen, and how they are shown without D x D matrices.

# Latents below which dense sites are as fast, and small; of their own accord sites are then not kept by rows.
LEAST_LATENTS = 64


# ---------------------------------------------------------------------------------------------------------- the choice


def choose_rows(
    engine: Engine, guide: Any, plan: Plan, planned: Planned, trace: dict, arguments: tuple, init_params: Any, key: Any
) -> Plan:
    """Decide how sites are held.

    ``key``: a random key, for the points at which the prior is compared. Returns the plan, with ``rows`` set where sites are
    held by rows. Raises PVIError saying why not, where the solver insists on it.
    """
    wanted = engine.solver.sites
    if wanted == "dense":
        return plan
    insists = wanted == "rows"
    if not insists and plan.family.dim < LEAST_LATENTS:
        return plan
    reason = _why_not(engine, guide, plan, trace, init_params)
    count = 0 if reason else num_elements(plan.partition, trace)
    if not insists and (reason or count > plan.family.dim):
        return plan
    diagonal = False
    if reason is None:
        noise = jax.random.normal(key, (2, plan.family.dim), jnp.result_type(float))
        points = planned.prior_loc + planned.prior_sd * noise
        agrees, diagonal = _look(engine, plan, *arguments, points, planned.params)
        if not bool(agrees):
            reason = "some latent's prior depends on others, or is masked or scaled"
    if reason is not None:
        if not insists:
            return plan
        raise PVIError(
            f"NaturalGradient(sites='rows') is not possible: {reason}. It takes a fit of full covariance (AutoMultivariateNormal) "
            "under Synchronous() or Sequential(), Normal or MultivariateNormal priors independent of each other, and one affine "
            "predictor per row; leave sites='auto'."
        )
    if not insists and count == plan.family.dim and not bool(diagonal):
        return plan
    return dataclasses.replace(plan, rows="latents" if bool(diagonal) else "rows")


def _why_not(engine: Engine, guide: Any, plan: Plan, trace: dict, init_params: Any) -> str | None:
    if not plan.family.full:
        return "q is mean-field"
    if not engine.schedule.carries_numbers:
        return f"{type(engine.schedule).__name__} passes sites on as D x D numbers"
    if set(init_params or {}) & guide_param_names(guide, plan.partition.layout.names):
        return "init_params of the guide need not be of that form"
    return why_not_rows(plan.partition, trace)


@partial(owned_jit, static_argnames=("engine", "plan", "static"))
def _look(engine: Engine, plan: Plan, dynamic: list, static: tuple, points: Any, params: dict):
    args, kwargs = join_arguments(dynamic, static)
    part = plan.partition
    call = ModelCall(part.model(engine.model), part.layout, args, kwargs, params)
    return look_at_rows(call, part, points)


# --------------------------------------------------------------------------------------------------------------- views


@dataclasses.dataclass(frozen=True)
class RowView(NaturalView):
    """Natural parameters of a site or cavity that is held by rows; D x D numbers are made when they are asked for.

    Attributes:
        natural: the rows' numbers: ``precision_mean`` Float[P] and ``precision`` Float[P] of their centred predictors.
        prior: the prior, and what the rows see of it.
        with_prior: whether the prior is a factor of it, as of a cavity.
    """

    prior: RowPrior
    with_prior: bool

    @property
    def precision_mean(self):
        """Float[D], ``Lambda m``."""
        return self._dense.precision_mean

    @property
    def precision(self):
        """Float[D D], Lambda."""
        return self._dense.precision

    @property
    def _dense(self) -> GaussianNatural:
        return _dense(self.prior, self.natural, self.with_prior)

    def to_distribution(self) -> dist.Distribution:
        """The normalised Gaussian with these natural parameters; a cavity's holds no D x D matrix.

        Raises:
            ImproperError: when they are not normalisable, as a site's need not be.
        """
        if not self.with_prior:
            family = MultivariateNormalFamily(self.prior.loc.shape[0])
            return NaturalView(self._dense, family, self.what).to_distribution()
        law, valid = _law(self.prior, self.natural)
        if not bool(valid):
            raise ImproperError(
                f"the {self.what} is not normalisable: a site or cavity is a factor, not always a distribution. Read .precision "
                "and .precision_mean instead."
            )
        return law


def row_view(state: PVIState, place: int, what: str, without: bool) -> RowView:
    """One group's site, or q without it. ``state``: a state held by rows; ``without``: whether q without the site is meant."""
    rows, own = jax.tree.map(lambda x: x[0], state.sites.groups), state.prior.group == place
    kept = jax.tree.map(lambda x: jnp.where(~own if without else own, x, 0.0), rows)
    return RowView(kept, state.plan.family, what, state.prior, without)


def row_distributions(state: PVIState, trace: dict, what: str, joint: bool) -> dict[Any, dist.Distribution]:
    """Marginals of every latent in its own support: see :func:`numpyro_pvi._posterior_views.latent_distributions`.

    ``state``: a state held by rows; ``trace``: a prototype trace; ``what``: "posterior" or "prior"; ``joint``: whether to add
    the joint Gaussian under the tuple of names. Returns distributions by latent name. None holds a matrix over the latents
    until it is asked for one. Raises ImproperError when q is not normalisable.
    """
    rows = jax.tree.map(lambda x: x[0] * (what == "posterior"), state.sites.groups)
    law, valid = _law(state.prior, rows)
    if not bool(valid):
        raise ImproperError(f"the {what} is not normalisable; run rounds until the data complete it.")
    layout, mean, sd = state.plan.partition.layout, law.mean, jnp.sqrt(law.variance)
    found: dict[Any, dist.Distribution] = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        where, fn = layout.slice_of(name), trace[name]["fn"]
        rank = event_rank(fn)
        part = RowGaussian(law.prior, law.white, law.white_root, law.log_det, where.start, shape)
        if rank == len(shape) and rank:
            found[name] = part
        else:
            blocks = None if rank == 0 else _blocks(part.covariance_matrix, shape, rank)
            found[name] = in_own_support(fn, mean[where].reshape(shape), sd[where].reshape(shape), blocks)
    if joint:
        found[layout.names] = law
    return found


def _blocks(covariance: Any, shape: tuple[int, ...], rank: int) -> Any:
    """Covariances within each event of a latent with batch axes, of which there are few where an event is large."""
    size = int(np.prod(shape[len(shape) - rank :]))
    count = int(np.prod(shape[: len(shape) - rank]))
    split = covariance.reshape(count, size, count, size)
    return split[jnp.arange(count), :, jnp.arange(count), :].reshape(*shape[: len(shape) - rank], size, size)


def row_params(guide: Any, state: PVIState) -> dict[str, Any]:
    """The guide's params. Its ``scale_tril`` stands for a dense array, and is made one where an array is needed.

    ``guide``: AutoMultivariateNormal, set up; it learns to draw from such params pathwise; ``state``: a state held by rows.
    Returns params for ``Predictive(guide, params=...)``, ``guide.median`` and the like.
    """
    layout = state.plan.partition.layout
    order = guide_order(guide, layout.names, layout.shapes)
    moved = not np.array_equal(order, np.arange(len(order)))
    law, _ = _law(state.prior, jax.tree.map(lambda x: x[0], state.sites.groups))
    _teach(guide)
    root = RowRoot(law, jnp.asarray(order) if moved else None)
    return {f"{guide.prefix}_loc": law.mean[order] if moved else law.mean, f"{guide.prefix}_scale_tril": root}


def _teach(guide: Any) -> None:
    """Let a guide take a :class:`RowRoot` for its ``scale_tril``; with arrays it does what it did."""
    if "get_transform" in vars(guide):
        return
    name, transform, quantiles = f"{guide.prefix}_scale_tril", guide.get_transform, guide.quantiles

    def law_of(root: RowRoot) -> dist.Distribution:
        return root.law if root.order is None else dist.TransformedDistribution(root.law, PermuteTransform(root.order))

    def get_posterior_site() -> dist.Distribution:
        loc = numpyro.param(f"{guide.prefix}_loc", guide._init_latent)
        root = numpyro.param(
            name, lambda _: jnp.identity(guide.latent_dim) * guide._init_scale, constraint=guide.scale_tril_constraint
        )
        return law_of(root) if isinstance(root, RowRoot) else dist.MultivariateNormal(loc, scale_tril=root)

    def get_transform(params: dict) -> Any:
        root = params[name]
        return transform({**params, name: root.__jax_array__()} if isinstance(root, RowRoot) else params)

    def get_posterior(params: dict) -> dist.Distribution:
        root = params[name]
        return law_of(root) if isinstance(root, RowRoot) else type(guide).get_posterior(guide, params)

    def get_quantiles(params: dict, levels: Any) -> dict:
        root = params[name]
        if not isinstance(root, RowRoot):
            return quantiles(params, levels)
        sd = jnp.sqrt(root.law.variance)
        sd = sd if root.order is None else sd[root.order]
        drawn = dist.Normal(params[f"{guide.prefix}_loc"], sd).icdf(jnp.array(levels)[..., None])
        return guide._unpack_and_constrain(drawn, params)

    guide._get_posterior, guide.get_transform = get_posterior_site, get_transform
    guide.get_posterior, guide.quantiles = get_posterior, get_quantiles


def dense_form(state: PVIState) -> PVIState:
    """The same state with D x D numbers a group: what all methods and all schedules know. Other states as they are."""
    if not isinstance(state, PVIState) or state.plan.rows is None:
        return state
    groups, prior = _dense_sites(state.prior, state.sites.groups, jnp.zeros(len(state.plan.partition.table.labels)))
    # Of a full covariance, rounds with dense sites are not extrapolated.
    plan, memory = dataclasses.replace(state.plan, rows=None), without_mixing(state.schedule_state)
    return dataclasses.replace(state, plan=plan, prior=prior, sites=SiteStack(groups, None), schedule_state=memory)


@jax.jit
def _dense_sites(prior: RowPrior, groups: GaussianNatural, count: Any) -> tuple[GaussianNatural, GaussianNatural]:
    rows = jax.tree.map(lambda x: x[0], groups)

    def one(index):
        own = jax.tree.map(lambda x: jnp.where(prior.group == index, x, 0.0), rows)
        return dense_natural(prior, own, False)

    nothing = jax.tree.map(jnp.zeros_like, rows)
    return jax.lax.map(one, jnp.arange(count.shape[0])), dense_natural(prior, nothing, True)


_law = jax.jit(lambda prior, natural: row_gaussian(prior, natural))
_dense = jax.jit(dense_natural, static_argnums=2)


# -------------------------------------------------------------------------------------------------------- local latents
# Local latents as a user sees them: joined with the shared ones under the guide's names, and their marginals.


def by_unit(state: PVIState) -> ConditionalNatural:
    """Natural parameters of every unit's local latents given the shared ones, in the plate's order.

    ``state``: a state of a model with local latents. Returns arrays with a leading axis U.
    """
    return rows_by_unit(state.sites.local.rows, state.plan.partition.local, state.packing)


def rows_by_unit(rows: ConditionalNatural, local: LocalLayout, packing: Any) -> ConditionalNatural:
    """The same of what is packed as rows are.

    ``rows``: natural parameters with leading axes of chunks and slots. Returns arrays with a leading axis U.
    """
    return _take(rows, _places(local, packing))


def _places(local: LocalLayout, packing: Any) -> tuple:
    """Where every unit's numbers lie: its group and itself, or its chunk and its slot there."""
    if isinstance(packing, GroupMasks):
        group = packing.group_of_row[local.key]
        return group, np.arange(group.shape[0])
    where = np.flatnonzero(np.asarray(packing.mask).reshape(-1))
    slot = where[np.argsort(np.asarray(packing.rows).reshape(-1)[where])]
    return tuple(np.divmod(slot, packing.rows.shape[1]))


@Program
def _take(rows: ConditionalNatural, places: tuple) -> ConditionalNatural:
    return jax.tree.map(lambda x: x[places], rows)


def joint_params(guide: Any, state: PVIState, natural: Any) -> dict[str, Array]:
    """The guide's params over shared and local latents together.

    ``state``: a state of a model with local latents. Returns params under the guide's own names; a guide of full covariance
    gets a dense matrix over all of them.
    """
    part, family = state.plan.partition, state.plan.family
    names, shapes, order = _flat_order(part.layout, part.local)
    at = natural, state.sites.local.rows, _places(part.local, state.packing)
    if family.full:
        guides = order[guide_order(guide, names, shapes)]
        turn = _turn_of_units(guides, part.layout.dim, part.local)
        if turn is not None:
            loc, root = _joint_root(family, *at, guides, turn)
            return {f"{guide.prefix}_loc": loc, f"{guide.prefix}_scale_tril": root}
    return flat_to_params(guide, names, shapes, *_joint(family, *at, order))


def _turn_of_units(order: np.ndarray, dim: int, local: LocalLayout) -> np.ndarray | None:
    """In which order every unit's latents come; None where it differs, or some of them come before a shared one.

    ``order``: of all latents, as places in (theta, z of unit 0, z of unit 1, ...).
    """
    if not (dim and local.size) or order[:dim].max() >= dim:
        return None
    place = np.argsort(order)[dim:].reshape(local.size, local.width)
    turns = np.argsort(place, axis=1)
    return turns[0] if np.all(turns == turns[:1]) else None


@partial(Program, static=("family",))
def _joint_root(
    family: GaussianFamily, natural: Any, rows: ConditionalNatural, places: tuple, order: Any, turn: Any
) -> tuple[Array, Array]:
    """Location and lower root of the covariance where shared latents come first: those of single units are all that is solved."""
    rows = _take(rows, places)
    shared, q = family.moments(natural), conditional_moments(rows)
    dim, (count, width) = family.dim, rows.linear.shape
    loc = jnp.concatenate([shared.loc, q.mean(shared.loc).reshape(-1)])
    first = order[:dim]
    top, _ = scaled_cholesky(symmetrise(shared.scale[first] @ shared.scale[first].T))
    inherited = (q.slope[:, :, first] @ top).reshape(-1, dim)[order[dim:] - dim]
    root, place = q.root[:, turn], jnp.argsort(order)[dim:].reshape(count, width)[:, turn]
    own, _ = scaled_cholesky(symmetrise(root @ jnp.swapaxes(root, -1, -2)))
    whole = jnp.zeros((dim + count * width,) * 2, loc.dtype).at[:, :dim].set(jnp.concatenate([top, inherited]))
    return loc[order], whole.at[place[:, :, None], place[:, None, :]].set(own)


@partial(Program, static=("family",))
def _joint(
    family: GaussianFamily, natural: Any, rows: ConditionalNatural, places: tuple, order: Any
) -> tuple[Array, Array]:
    """Location, and covariance (full) or sds (mean-field), of (theta, z of unit 0, z of unit 1, ...), in another order."""
    rows = _take(rows, places)
    shared, q = family.moments(natural), conditional_moments(rows)
    loc = jnp.concatenate([shared.loc, q.mean(shared.loc).reshape(-1)])
    if not family.full:
        return loc[order], jnp.concatenate([shared.scale, q.root.reshape(-1)])[order]
    dim, (count, width) = family.dim, rows.linear.shape
    inherited = (q.slope @ shared.scale).reshape(-1, dim)
    root = jnp.concatenate([shared.scale, inherited])
    own = jnp.einsum("uik,ujk->uij", q.root, q.root)
    unit = jnp.arange(count)
    blocks = jnp.zeros((count, width, count, width), loc.dtype).at[unit, :, unit, :].set(own)
    covariance = (root @ root.T).at[dim:, dim:].add(blocks.reshape(count * width, count * width))
    return loc[order], covariance[order][:, order]


def own_at_params(guide: Any, state: PVIState, params: dict) -> tuple[Any, dict[str, Array], dict[str, Array]]:
    """Where q starts at (partial) params over shared and local latents together.

    Correlations of local latents are left to their first visit. ``params``: constrained values under the guide's own names; what is
    missing is the state's. Returns natural parameters of the shared latents, and location and sds of the local ones by name, in
    the model's unconstrained shapes.
    """
    part, family = state.plan.partition, state.plan.family
    assert part.local is not None
    full = joint_params(guide, state, _posterior(state.prior, state.sites))
    full.update(given_params({k: v for k, v in params.items() if k in full}, full))
    names, shapes, _ = _flat_order(part.layout, part.local)
    loc, spread = params_to_flat(guide, names, shapes, full)
    dim, sd = part.layout.dim, jnp.sqrt(jnp.diagonal(spread)) if family.full else spread
    shared = (
        family.from_loc_covariance(loc[:dim], spread[:dim, :dim])
        if family.full
        else family.from_loc_sd(loc[:dim], spread[:dim])
    )
    ends, found = np.cumsum([np.prod(shape, dtype=int) for shape in shapes]), []
    for flat in (loc, sd):
        pieces = zip(names, shapes, jnp.split(flat, ends[:-1]), strict=True)
        found.append({n: x.reshape(shape) for n, shape, x in pieces if n in part.local.names})
    return shared, *found


def _flat_order(layout: Any, local: LocalLayout) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], np.ndarray]:
    """All latents, and where their flattened values lie in (theta, z of unit 0, ...)."""
    index, own = layout.dim + np.arange(local.size * local.width).reshape(local.size, local.width), {}
    for name, shape, dim in zip(local.names, local.shapes, local.dims, strict=True):
        value = index[:, local.slice_of(name)].reshape(local.size, *shape)
        own[name] = np.moveaxis(value, 0, value.ndim + dim)
    names = (*layout.names, *own)
    shapes = (*layout.shapes, *(v.shape for v in own.values()))
    order = np.concatenate([np.arange(layout.dim), *(v.reshape(-1) for v in own.values())])
    return names, shapes, order


def local_distributions(state: PVIState, natural: Any, trace: dict) -> dict[str, dist.Distribution]:
    """Marginal posteriors of the local latents, in their own supports and the model's shapes.

    ``trace``: a prototype trace with every latent's support. Returns distributions by name; empty when the model has no local
    latents.
    """
    local = state.plan.partition.local
    if local is None or isinstance(state.sites.local, Held):
        return {}
    return own_distributions(local, state.plan.family, state.plan.family.moments(natural), by_unit(state), trace)


def own_distributions(
    local: LocalLayout, family: GaussianFamily, shared: GaussianMoments, rows: ConditionalNatural, trace: dict
) -> dict[str, dist.Distribution]:
    """Marginals of latents inside the plate, in their own supports and the model's shapes.

    ``shared``: q(theta) as moments; ``rows``: natural parameters of every unit's latents given theta; ``trace``: a prototype
    trace with every latent's support. Returns distributions by name.
    """
    q = conditional_moments(rows)
    mean, sd = q.mean(shared.loc), q.marginal_sd(shared)
    locs, sds = local.unflatten(mean), local.unflatten(sd)
    found = {}
    for name in local.names:
        fn = trace[name]["fn"]
        rank, covariance = event_rank(fn), None
        if rank and family.full:
            covariance = _event_covariance(q, shared, local, name, rank)
        found[name] = in_own_support(fn, locs[name], sds[name], covariance)
    return found


def _event_covariance(
    q: ConditionalMoments, shared: GaussianMoments, local: LocalLayout, name: str, event_dim: int
) -> Float[Array, "*batch E E"]:
    """Covariance over the event of one latent, marginal over everything else, in the latent's batch shape."""
    inherited = q.slope @ shared.scale
    covariance = q.root @ jnp.swapaxes(q.root, -1, -2) + inherited @ jnp.swapaxes(inherited, -1, -2)
    where, index = local.slice_of(name), local.names.index(name)
    shape, dim = local.shapes[index], local.dims[index]
    batch = shape[: len(shape) - event_dim]
    units, size = covariance.shape[0], int(np.prod(shape[len(shape) - event_dim :]))
    count = (where.stop - where.start) // size
    own = covariance[:, where, where].reshape(units, count, size, count, size)
    own = jnp.einsum("ubibj->ubij", own).reshape(units, *batch, size, size)
    # The plate's axis goes back to its place among the batch axes.
    return jnp.moveaxis(own, 0, len(batch) + 1 + dim + event_dim)


# ------------------------------------------------------------------------------------------------------ state marginals

_posterior = Program(posterior)


def guide_params(guide: Any, state: PVIState) -> dict[str, Any]:
    """A Gaussian guide's params (constrained, under its own names), over shared and local latents together."""
    part = state.plan.partition
    if state.plan.rows is not None:
        return row_params(guide, state)
    q = _posterior(state.prior, state.sites)
    if part.local is not None and not isinstance(state.sites.local, Held):
        return joint_params(guide, state, q)
    return natural_to_params(guide, state.plan.family, part.layout.names, part.layout.shapes, q)


def natural_of(schedule: Any, state: PVIState, what: str, agent: Hashable | None) -> Any:
    """Natural parameters of what is shown: q, one agent's own, or the prior with its site. ``what``: "posterior" or "prior"."""
    if what == "prior":
        return state.prior if state.sites.prior is None else state.prior + state.sites.prior
    return posterior(state.prior, state.sites) if agent is None else agent_natural(schedule, state, agent)


class SharedOnly(dict):
    """Marginals of shared latents by name, where clients keep those of latents of their own."""

    def __init__(self, found: dict[str, Any], local: LocalLayout):
        super().__init__(found)
        self._local = local

    def __missing__(self, name: Any) -> Any:
        """Say who has it. Raises PVIError for a latent inside the plate; KeyError for any other name."""
        if name not in self._local.names:
            raise KeyError(name)
        raise PVIError(
            f"latent {name!r} is inside plate {self._local.key!r}, so its posterior is with the clients and is told nobody: each "
            "client's own is client.posterior() in its process."
        )


def own_marginals(pvi: Any, state: PVIState) -> tuple[tuple, Callable[[Hashable], dict[str, Any]]] | None:
    """Agents that have a q of their own, and what reads one's marginals; None where one q is everybody's.

    Returns labels, and a function of a label.
    """
    if not pvi.schedule.has_agents:
        return None
    return state.plan.partition.table.labels, lambda agent: pvi.posterior(state, agent=agent)


def group_view(state: PVIState, group: Hashable, what: str) -> NaturalView:
    """One group's site or cavity in natural space; PRIOR names the prior factor's.

    ``what``: "site" or "cavity". Raises PartitionError for an unknown label.
    """
    words = f"{what} of group {group!r}"
    if group is PRIOR and state.sites.prior is None:
        raise PartitionError("there is no PRIOR site: the prior is held exactly. See pvi.prior(state).")
    if state.plan.rows is not None:
        return row_view(state, position(state.plan, group), words, what == "cavity")
    site = state.sites.prior if group is PRIOR else site_of(state, group)
    natural = site if what == "site" else cavity(posterior(state.prior, state.sites), site)
    return NaturalView(natural, state.plan.family, words)
