"""Site algebra in natural space: sum, cavity, damping. Pure; no keys, no data, no densities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ._numerics import in_batches
from .families import ConditionalNatural, GaussianNatural, Vector, natural_parameters, schur_complement

__all__ = [
    "MAX_HALVINGS",
    "Held",
    "back_off",
    "LocalSites",
    "MemberSites",
    "OwnConditionals",
    "OwnMembers",
    "RowSites",
    "RowVisits",
    "SiteStack",
    "add_slots",
    "cavity",
    "damp",
    "keep_groups",
    "keep_slots",
    "late_share",
    "marginal_sites",
    "next_step",
    "posterior",
    "select",
    "stack_sites",
    "sum_slots",
    "swings",
    "take",
    "tie",
    "tied_site",
    "with_more",
    "with_shares",
]


# ---------------------------------------------------------------------------------- members of latents inside the plate
# Sites of latents inside the partitioned plate: every member belongs to one row and has its group's site alone.


@natural_parameters
class MemberSites(Vector):
    """Natural parameters by latent, all rows' members once: the sum of all groups' sites, of which one is not zero each."""

    parts: Any


@natural_parameters
class OwnMembers(Vector):
    """The same beside a q of shared latents alone: what groups hold beside their sites, of which q has nothing."""

    parts: Any


# ------------------------------------------------------------------------------------ groups whose rows are not at hand
# Sites of groups whose rows are not at hand: slots along a leading axis whose length doubles, empty ones zero.
#
# A zero site is the unit factor, so the sum over all slots is the sum over the groups, and a program that is compiled
# for a number of slots serves every number of groups up to it.

_FEWEST = 4


def capacity(count: int) -> int:
    """Slots for ``count`` sites: the next power of two, at least four."""
    return max(_FEWEST, 1 << (count - 1).bit_length())


def sum_slots(others: Any) -> Any:
    """The product of all factors in the slots, in natural space.

    ``others``: natural parameters with a leading axis of slots. Returns natural parameters without it.
    """
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), others)


def add_slots(others: Any, count: int, sites: Any) -> Any:
    """Put more sites behind those that are there, in twice the slots when they do not fit.

    ``others``: the slots, or None; ``count``: slots in use; ``sites``: natural parameters with a leading axis. Returns the
    slots; None when there is nothing to hold.
    """
    more = jax.tree.leaves(sites)[0].shape[0]
    if count + more == 0:
        return None
    wanted = capacity(count + more)
    if others is None:
        others = jax.tree.map(lambda x: jnp.zeros((wanted, *x.shape[1:]), x.dtype), sites)
    elif jax.tree.leaves(others)[0].shape[0] < wanted:
        others = _grow(others, wanted)
    return others if more == 0 else _write(others, jnp.int32(count), sites)


def keep_slots(others: Any, kept: np.ndarray) -> Any:
    """Some of the slots, moved to the front in the order given; the others become empty.

    ``others``: the slots; ``kept``: positions of those to keep. Returns as many slots as before; None when none is kept.
    """
    if len(kept) == 0:
        return None
    size = jax.tree.leaves(others)[0].shape[0]
    order = np.zeros(size, np.int32)
    order[: len(kept)] = kept
    return _keep(others, order, jnp.int32(len(kept)))


def stack_sites(others: Any, chosen: np.ndarray) -> Any:
    """The sites in some slots, with a leading axis of their number."""
    return _take(others, np.asarray(chosen, np.int32))


_grow = jax.jit(
    lambda others, size: jax.tree.map(
        lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype).at[: x.shape[0]].set(x), others
    ),
    static_argnums=1,
)


@jax.jit
def _write(others: Any, start: Any, sites: Any) -> Any:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0), others, sites)


@jax.jit
def _keep(others: Any, order: Any, count: Any) -> Any:
    def keep(x):
        used = jnp.arange(x.shape[0]) < count
        return jnp.where(used.reshape(-1, *(1,) * (x.ndim - 1)), x[order], 0)

    return jax.tree.map(keep, others)


@jax.jit
def _take(others: Any, chosen: Any) -> Any:
    return jax.tree.map(lambda x: x[chosen], others)


# ---------------------------------------------------------------------------------------------------------- the algebra
# Sites are natural parameters: they add to the prior to give q, and subtract from q to give a cavity.

# Halvings of a step before it is given up: 2^-20 is about 1e-6.
MAX_HALVINGS = 20


@natural_parameters
class SiteStack(Vector):
    """Every site of a state, in natural space.

    ``groups`` is one natural-parameter object whose leaves carry a leading group axis M (of length 1 where all groups share
    one site: :mod:`numpyro_pvi.sites`); ``prior`` is the site of the
    prior factor (no group axis), or None when the prior is held exactly. ``local`` holds what groups with local latents
    keep beside their sites (:class:`LocalSites`; :class:`Held` where clients do), or the sites of latents inside the plate
    (:class:`MemberSites`, which ``groups`` then leaves out), or what rows that are factors keep (:class:`RowSites`,
    :class:`RowVisits`), or None. ``others`` holds the sites of groups whose rows are not at
    hand, with a leading axis of slots (:mod:`numpyro_pvi.sites`; empty slots are zero), or None without any.
    """

    groups: Any
    prior: Any
    local: Any = None
    others: Any = None


def posterior(prior_natural: Any, sites: SiteStack) -> Any:
    """Sum the prior and every site, absent groups' included: ``eta_q = eta_0 + eta_PRIOR + sum_m eta_m`` (PVI eq. 1).

    ``prior_natural``: natural parameters of the exactly held part of the prior; ``sites``: all sites. Returns natural
    parameters of q. Always a fresh sum: carrying q along as ``q + new - old`` drifts in float32.
    """
    total = jax.tree.map(lambda eta, site: eta + site, prior_natural, _sum_groups(prior_natural, sites))
    if sites.others is not None:
        # Of latents of rows that are at hand, sites of others say nothing.
        total = total.combine(sum_slots(sites.others))
    return total if sites.prior is None else total + sites.prior


def _sum_groups(prior_natural: Any, sites: SiteStack) -> Any:
    total = jax.tree.map(lambda site: jnp.sum(site, axis=0), sites.groups)
    if not isinstance(sites.local, MemberSites):
        return total
    return type(prior_natural)({**total.parts, **sites.local.parts})


def with_shares(sites: SiteStack, groups: Any, others: Any = None, prior: float = 1.0) -> SiteStack:
    """Every site to a power of its own: share 0 takes it out of the product, 1 leaves it as it is.

    ``sites``: all sites; ``groups``: Float[M], shares of the groups whose rows are at hand (Float[1] where all groups share one
    site, Float[1 P] where sites are held by P rows); ``others``: Float[S], shares of the slots of the other groups; as they are
    by default; ``prior``: share of the prior factor's site. Returns the sites ``share * eta``; what groups with local latents
    keep stays as it is.
    """

    def scaled(stack: Any, shares: Any) -> Any:
        shape = jnp.shape(shares)
        return jax.tree.map(
            lambda x: x * jnp.reshape(jnp.asarray(shares, x.dtype), (*shape, *(1,) * (x.ndim - len(shape)))), stack
        )

    return SiteStack(
        groups=scaled(sites.groups, groups),
        prior=None if sites.prior is None else sites.prior * prior,
        local=sites.local,
        others=sites.others if sites.others is None or others is None else scaled(sites.others, others),
    )


def cavity(posterior_natural: Any, site: Any, power: float | Float[Array, ""] = 1.0) -> Any:
    """Natural parameters of q with a ``power`` share of one site removed, ``eta_q - power * eta_m``."""
    return posterior_natural - site * power


def damp(old: Any, new: Any, damping: Any) -> Any:
    """``old + damping * (new - old)`` in natural space; ``damping`` 1 is the full step, as in earlier PVI code."""
    return old + (new - old) * damping


def back_off(
    valid: Callable[[Any], Bool[Array, ""]], step: Float[Array, ""], halvings: Int[Array, ""] | int = 0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Halve a step until it is valid.

    ``valid``: whether a step may be taken; ``step``: the first one tried; ``halvings``: those made before; they count towards
    the :data:`MAX_HALVINGS` after which a step is given up. Returns ``(step, halvings)``; the step is not valid where there are
    MAX_HALVINGS of them, unless the last one was.
    """

    def refused(tried):
        return ~valid(tried[0]) & (tried[1] < MAX_HALVINGS)

    first = step, jnp.asarray(halvings, jnp.int32)
    return jax.lax.while_loop(refused, lambda tried: (0.5 * tried[0], tried[1] + 1), first)


def take(stack: Any, index: Any) -> Any:
    """One group's slice of a stacked pytree."""
    return jax.tree.map(lambda x: x[index], stack)


def select(keep: Bool[Array, "*batch"], new: Any, old: Any) -> Any:
    """Leaf-wise ``where(keep, new, old)`` with ``keep`` broadcast over trailing axes."""
    return jax.tree.map(lambda a, b: jnp.where(keep.reshape(keep.shape + (1,) * (a.ndim - keep.ndim)), a, b), new, old)


# ---------------------------------------------------------------------------------------------- one site for all groups
# One site that all groups share: ``q = prior * t^M``, held as the product ``t^M`` in the place of a stack of one site.


def tie(groups: Any) -> Any:
    """Put the product of all groups' sites in the place of the sites.

    ``groups``: natural parameters with a leading group axis M. Returns their sum with a leading axis of 1: q is the same.
    """
    return jax.tree.map(lambda x: jnp.sum(x, axis=0, keepdims=True), groups)


def tied_site(whole: Any, count: int) -> Any:
    """The site that each of ``count`` groups has: the count-th root of the product, ``eta_t = eta_(t^M) / M``.

    ``whole``: natural parameters of the product, with a leading axis of 1; ``count``: M. Returns natural parameters of t.
    """
    return jax.tree.map(lambda x: x[0] / count, whole)


# ---------------------------------------------------------------------------------------------------------- single rows
# Sites of single rows: what a solver with one factor per row keeps beside the groups' sites.


@natural_parameters
class RowSites(Vector):
    """Natural parameters of one site per row, packed as the rows are: leading axes C (chunks) and E (elements of a term).

    Under a full-covariance q a row's site is a function of its affine predictors alone, ``exp(h^T z - 1/2 z^T L z)`` with
    ``z = A theta`` (without the predictors' offset): ``(h, L)`` are two numbers for one predictor, five for two. Under a
    mean-field q it has its own diagonal natural parameters over theta. A group's site is the sum of its rows'.
    """

    # Per term ``(vector, precision)``: Float[C E K] and Float[C E K K], or Float[C E D] each under a mean-field q.
    terms: Any


@natural_parameters
class RowVisits(Vector):
    """What rows that are factors of their own keep where q is a product of families; leading axis of slots.

    A group's site is the sum of its rows'. Where a schedule takes a share of what visits ask for, steps and changes follow by the
    same share.
    """

    # Natural parameters of every row's site.
    sites: Any
    # The rows' own steps, the last change that each asked for (natural parameters), and what was taken of that.
    steps: Float[Array, "S"]
    last: Any
    taken: Float[Array, "S"]

    @property
    def parts(self) -> dict[str, Any]:
        """Members of q that rows have for themselves (:class:`MemberSites`): none."""
        return {}


# -------------------------------------------------------------------------------------------- groups with local latents
# Sites of groups that have local latents: what is kept beside them, and the marginal that is the site.


@natural_parameters
class LocalSites(Vector):
    """Natural parameters of every group over the shared latents and its own local ones jointly.

    They are damped and added in this joint space, where the natural gradient is; a group's *site* is the marginal over
    the shared latents (:func:`marginal_sites`), and nothing else of it ever enters q. Local parts stay with the rows.
    """

    # The shared block of each group (leading axis M), before local latents are integrated out.
    shared: GaussianNatural
    # Per chunk and row (leading axes C, R), as the rows are packed.
    rows: ConditionalNatural


@natural_parameters
class OwnConditionals(Vector):
    """What groups keep of their own latents beside sites that are over the shared ones alone: Gaussians given the shared ones.

    So it is where own latents are integrated out of the factor, and where steps by batches see rows at draws of these Gaussians.
    No part of q over the shared latents is kept here.
    """

    # Per chunk and row (leading axes C, R), as the rows are packed.
    rows: ConditionalNatural


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """Where clients keep what a state left their groups with beside their sites: names, of which nobody else has the numbers.

    No arithmetic: what lies between two of them is asked for (:meth:`numpyro_pvi.schedules.Problem.between`).
    """

    # By group; zeros name what a group starts from.
    tickets: Int[Array, "M 2"]
    # Location and sd of every unit's latents under their prior, Float[U K] each, where rows are dealt out to clients; else None.
    first: tuple[Float[Array, "U K"], Float[Array, "U K"]] | None = None


def marginal_sites(local: LocalSites, chunk_group: Int[Array, "C"]) -> GaussianNatural:
    """Integrate every group's local latents out of its natural parameters.

    ``local``: natural parameters over shared and local latents; ``chunk_group``: group of each chunk, ascending. Returns the
    sites, with a leading group axis M. Under a mean-field q they are the shared blocks as they stand.
    """
    if not local.rows.full:
        return local.shared
    num_groups = local.shared.precision_mean.shape[0]
    # One chunk after another: all chunks at once would hold a D x D block for each.
    vector, matrix = in_batches(schur_complement, local.rows, 64)

    def total(x):
        return jax.ops.segment_sum(x, chunk_group, num_groups, indices_are_sorted=True)

    shared = local.shared
    return GaussianNatural(shared.precision_mean - total(vector), shared.precision - total(matrix))


def with_more(sites: SiteStack, extra: Any) -> SiteStack:
    """Sites of which every group's says ``extra`` (natural parameters, leading axis M) more of the shared latents."""
    local = sites.local
    if isinstance(local, LocalSites):
        local = LocalSites(local.shared + extra, local.rows)
    return SiteStack(sites.groups + extra, sites.prior, local)


def keep_groups(good: Bool[Array, "M"], new: Any, old: Any, chunk_group: Int[Array, "C"]) -> Any:
    """Group by group, the new natural parameters where ``good``, else the old ones."""

    def pick(flags, a: Any, b: Any):
        return jax.tree.map(lambda x, y: jnp.where(flags.reshape(flags.shape + (1,) * (x.ndim - 1)), x, y), a, b)

    rows = pick(good[chunk_group], new.rows, old.rows)
    if isinstance(new, OwnConditionals):
        return OwnConditionals(rows)
    return LocalSites(pick(good, new.shared, old.shared), rows)


# ------------------------------------------------------------------------------------------------------- late averaging
# Moves that turn back on each other: by overshooting, for which steps are too long, or by noise, which late rounds
# average.
#
# Every schedule and solver that tells the one from the other does it here; what a move's length is, each knows for
# itself.

# Cosine between successive moves below which they swing: 120 degrees.
_SWING = -0.5
# Growth of a step whose moves go on, and the least step that swinging leads to.
_GROWTH, LEAST_STEP = 1.25, 2.0**-6
# Of the steps c / (c + late).
_FORGETTING = 10.0


def swings(inner: Float[Array, "..."], size: Float[Array, "..."], last: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether a move turns back on the last one by more than 120 degrees without being half as short.

    A swing that dies out by itself needs no help. ``inner``: inner product of the move and the last one; ``size``: squared
    length of the move, in the same metric; ``last``: squared length of the last one. Returns False where either is 0.
    """
    both = jnp.sqrt(jnp.maximum(size, 0.0)) * jnp.sqrt(jnp.maximum(last, 0.0))
    return (inner < _SWING * both) & (both > 0) & (4 * size > last)


def next_step(
    step: Float[Array, ""],
    inner: Float[Array, ""],
    size: Float[Array, ""],
    last: Float[Array, ""],
    largest: float,
    noise: Any = 0.0,
) -> Float[Array, ""]:
    """A group's own step after one more of the moves it asks for: half where they swing, longer where they go on.

    ``step``: the last one; ``inner``: as of :func:`swings`; ``size``: as of :func:`swings`; ``last``: as of :func:`swings`;
    ``largest``: the largest step in (0, 1]; 1 is the full step; ``noise``: length of a move that draws alone explain; what is
    shorter is averaged by late rounds, not halved. Returns the step.
    """
    back = swings(inner, size, last) & (size > noise**2)
    new = jnp.where(back, jnp.maximum(0.5 * step, min(LEAST_STEP, largest)), step)
    return jnp.where(inner > 0, jnp.minimum(_GROWTH * new, largest), new).astype(step.dtype)


def late_share(late: Any, dtype: Any) -> Float[Array, ""]:
    """The largest step of the next round, ``c / (c + late)`` with c = 10.

    In the limit q is the average of its targets with weights ``k^(c - 1)``. A plain mean (c = 1) forgets where it started only
    as ``1 / k^(1 - a)`` where targets move by a share ``a`` of what q moves; ``c > 1 / (2 - 2 a)`` keeps the rate of the noise,
    whose variance is ``c^2 / (2 c - 1)`` times that of the mean. Long steps also shake q out of poor local optima. ``late``:
    rounds in which the move turned back; ``dtype``: of the result. Returns a number in (0, 1].

    References:
        Kushner and Yin, Stochastic Approximation and Recursive Algorithms, chapter 10 (rate of convergence).
    """
    return _FORGETTING / (_FORGETTING + late.astype(dtype))
