"""The family of one latent, and its members as params of a guide."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from jaxtyping import Array
from numpyro.distributions import constraints

from ._contracts import lacking
from .errors import GuideError
from .families import (
    BernoulliFamily,
    BetaFamily,
    DirichletFamily,
    Family,
    FamilyDefaults,
    LogNormalFamily,
    MarkovNormal,
    MultivariateNormalFamily,
    ScalarNormalFamily,
    VonMisesFamily,
    WishartFamily,
    family_for,
    repeated,
)

# Parameters a member is optimised by, where its class could be built from several sets of them.
_PARAMETERS: dict[type, tuple[str, ...]] = {
    dist.MultivariateNormal: ("loc", "scale_tril"),
    dist.Wishart: ("concentration", "scale_tril"),
}
# Draws that a prior outside its latent's family is matched by.
NUM_MATCHED = 2000


class Latent(NamedTuple):
    """What the guide knows of one latent: its family, and how a member is written as params."""

    family: Family
    # The member's own class, and the event axes that were added to it.
    kind: type
    rank: int
    # Parameter -> value at the start, and its constraint.
    start: dict[str, Array]
    constraint: dict[str, Any]

    def params(self, member: Any) -> dict[str, Array]:
        """A member of the family as params, in its constrained space: the inverse of :meth:`member`."""
        bare, _ = _bare(member)
        return _chain_start(bare)[0] if self.kind is MarkovNormal else {p: getattr(bare, p) for p in self.start}

    def member(self, params: dict[str, Array]) -> dist.Distribution:
        """The member of the family with these params, events of the latent's own shape."""
        if self.kind is MarkovNormal:
            return _chain(len(self.family.event_shape) == 1, **params)
        return self.kind(**params).to_event(self.rank)


def _bare(member: Any) -> tuple[Any, int]:
    """A distribution without ``to_event``, and how many axes that had added."""
    rank = 0
    while isinstance(member, dist.Independent):
        member, rank = member.base_dist, rank + member.reinterpreted_batch_ndims
    return member, rank


def make_latent(name: str, fn: Any, given: Any) -> Latent:
    """Find a latent's family and where its params start.

    Args:
        name: the latent, for messages.
        fn: its prior.
        given: the family asked for, or None for that of the prior.

    Returns:
        The latent, its params with the prior's batch axes leading.

    Raises:
        GuideError: where there is no family, or one with other shapes or another support.
    """
    family = _family_of(name, fn, given)
    member, rank = _bare(family.to_distribution(_start(name, family, fn, given is not None)))
    kind = type(member)
    if kind is MarkovNormal:
        return Latent(family, kind, rank, *_chain_start(member))
    wanted = _PARAMETERS.get(kind) or tuple(kind.arg_constraints)
    start = {p: jnp.asarray(getattr(member, p)) for p in wanted}
    return Latent(family, kind, rank, start, {p: kind.arg_constraints[p] for p in wanted})


def _family_of(name: str, fn: dist.Distribution, given: Any) -> Family:
    """The family of one latent, with its event axes."""
    if given is not None:
        if not isinstance(given, Family):
            said = lacking(given, Family, FamilyDefaults, "numpyro_pvi.families")
            raise GuideError(f"families[{name!r}]={given!r} is not a family.{said}")
        own, shape = tuple(given.event_shape), tuple(fn.event_shape)
        if shape[len(shape) - len(own) :] != own or len(own) > len(shape):
            raise GuideError(
                f"families[{name!r}] has events of shape {own}, but the latent's are {shape}: the last axes must agree."
            )
        return repeated(given, shape[: len(shape) - len(own)])
    try:
        return family_for(fn)
    except GuideError as error:
        found = _by_support(fn)
        if found is None:
            raise GuideError(
                f"latent {name!r}: {error} There is no family for its support, {fn.support}, either: pass "
                f"families={{{name!r}: ...}}, or use a guide in unconstrained space such as AutoNormal."
            ) from None
        return found


def _by_support(fn: Any) -> Family | None:
    """A family with a prior's support; None where none is known."""
    support, shape = fn.support, tuple(fn.event_shape)
    base = getattr(support, "base_constraint", support)
    scalar: list[tuple[Any, Family]] = [
        (constraints.real, ScalarNormalFamily()),
        (constraints.positive, LogNormalFamily()),
        (constraints.nonnegative, LogNormalFamily()),
        (constraints.unit_interval, BetaFamily()),
        (constraints.circular, VonMisesFamily()),
        (constraints.boolean, BernoulliFamily()),
    ]
    for constraint, family in scalar:
        if base is constraint or _same_interval(base, constraint):
            return repeated(family, shape)
    if base is constraints.simplex:
        return repeated(DirichletFamily(shape[-1]), shape[:-1])
    if base is constraints.real_vector:
        return repeated(MultivariateNormalFamily(shape[-1]), shape[:-1])
    if base is constraints.positive_definite:
        return repeated(WishartFamily(shape[-1]), shape[:-2])
    return None


def _same_interval(one: Any, other: Any) -> bool:
    """Whether two supports are intervals with the same known ends: that of ``Uniform(0, 1)`` is another object."""
    ends = [(getattr(x, "lower_bound", None), getattr(x, "upper_bound", None)) for x in (one, other)]
    if any(isinstance(end, Tracer) for pair in ends for end in pair) or ends[0] == (None, None):
        return False
    return all((a is None) == (b is None) and (a is None or bool(np.all(a == b))) for a, b in zip(*ends, strict=True))


def _start(name: str, family: Family, fn: Any, given: bool) -> Any:
    """The prior as a member of the family, or the member with the prior's mean statistics, by draws."""
    try:
        if (not given or fn.support.is_discrete) and family_for(fn) == family:
            return family.from_distribution(fn)
    except GuideError:
        pass
    draws = fn.sample(jax.random.key(0), (NUM_MATCHED,))
    member = family.to_distribution
    mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), family.sufficient_statistics(draws))
    natural = family.nearest_valid(family.mean_to_natural(mean))
    own = member(natural)
    inside = (
        np.all(np.asarray(own.support(draws))),
        np.all(np.asarray(fn.support(own.sample(jax.random.key(1), (64,))))),
    )
    if not all(inside):
        raise GuideError(
            f"families[{name!r}]: the family's support, {own.support}, is not that of the prior, {fn.support}. Give a "
            "family over the same values."
        )
    return natural


def _chain_start(member: MarkovNormal) -> tuple[dict[str, Array], dict[str, Any]]:
    """A chain by its mean and the block-bidiagonal Cholesky factor of its precision, which no step can make improper."""
    blocks, lower = member.precision, member.lower

    def step(carry: Array, here: tuple) -> tuple:
        block, below = here
        root = jnp.linalg.cholesky(block - carry @ jnp.swapaxes(carry, -1, -2))
        off = jnp.swapaxes(jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(below, -1, -2), lower=True), -1, -2)
        return off, (root, off)

    below = jnp.concatenate([lower, jnp.zeros_like(blocks[..., :1, :, :])], axis=-3)
    along = tuple(jnp.moveaxis(x, -3, 0) for x in (blocks, below))
    _, (roots, offs) = jax.lax.scan(step, jnp.zeros_like(along[0][0]), along)
    roots, offs = jnp.moveaxis(roots, 0, -3), jnp.moveaxis(offs, 0, -3)[..., :-1, :, :]
    start = {"loc": member.mean, "root": roots, "below": offs}
    kinds = {
        "loc": constraints.real_vector if member.scalar else constraints.real_matrix,
        "root": constraints.independent(constraints.lower_cholesky, 1),
        "below": constraints.independent(constraints.real_matrix, 1),
    }
    return start, kinds


def _chain(scalar: bool, loc: Array, root: Array, below: Array) -> MarkovNormal:
    """The inverse of :func:`_chain_start`: ``Lambda = R R^T`` with R block-bidiagonal."""
    transposed = jnp.swapaxes(root, -1, -2)
    precision = root @ transposed
    inner = below @ jnp.swapaxes(below, -1, -2)
    precision = precision.at[..., 1:, :, :].add(inner)
    lower = below @ transposed[..., :-1, :, :]
    states = loc[..., None] if scalar else loc
    image = jnp.einsum("...tij,...tj->...ti", precision, states)
    image = image.at[..., 1:, :].add(jnp.einsum("...tij,...tj->...ti", lower, states[..., :-1, :]))
    image = image.at[..., :-1, :].add(jnp.einsum("...tji,...tj->...ti", lower, states[..., 1:, :]))
    return MarkovNormal(image, precision, lower, scalar=scalar)
