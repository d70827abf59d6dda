"""Coordinates of natural parameters in which the Fisher metric at one q is the identity: optimisers of q take their steps there."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from .._numerics import scaled_cholesky, symmetrise
from ._independent import member_family
from ._metric import minimal_mean
from ._product import ProductFamily, ProductNatural

# Coordinates of a member up to which its whole metric is factorised; beyond, its diagonal stands for it.
_WHOLE = 64


@dataclasses.dataclass(frozen=True)
class Whitening:
    """Changes of natural parameters as whitened coordinates ``x = R^T u``, with u minimal and ``R R^T`` the Fisher metric at q.

    A step of length 1 in x is one of length 1 in that metric: for a shift of a normal, one posterior sd. Each member has an R of
    its own. Of one with more than 64 coordinates R is the root of the metric's diagonal (for entries off a matrix's diagonal, up
    to a factor), and lengths are right along axes only.

    Args:
        family: of q.
        roots: by component, of every member the lower Cholesky factor ``[*members, P, P]``, or roots of the diagonal
            ``[*members, P]``.
    """

    family: ProductFamily
    roots: dict[str, Array]

    @property
    def size(self) -> int:
        """Numbers in x."""
        return self.family.degrees

    def coordinates(self, change: ProductNatural) -> Float[Array, "K"]:
        """x of a change of natural parameters."""
        parts = {}
        for name, family in self.family.components:
            own, step = member_family(family, change.parts[name])
            parts[name] = self._times(name, own.to_minimal(step), transposed=True)
        return _joined(parts)

    def change(self, x: Float[Array, "K"]) -> ProductNatural:
        """The change of natural parameters that has these coordinates."""
        found, begin = {}, 0
        for name, family in self.family.components:
            zeros = family.zeros((), x.dtype)
            own, step = member_family(family, zeros)
            shape = own.to_minimal(step).shape
            end = begin + math.prod(shape)
            part = own.from_minimal(self._solve(name, x[begin:end].reshape(shape), transposed=True))
            # A member's parameters are those of its family under another name.
            found[name] = jax.tree.unflatten(jax.tree.structure(zeros), jax.tree.leaves(part))
            begin = end
        return ProductNatural(found)

    def slope(self, gradient: Any) -> Float[Array, "K"]:
        """The gradient in x of a function of the natural parameters.

        Args:
            gradient: its gradient in natural parameters, which has the type of mean parameters.

        Returns:
            ``R^-1 J^T g``, with J the linear map from minimal coordinates.
        """
        parts = {}
        for name, family in self.family.components:
            zeros = family.zeros((), jax.tree.leaves(gradient)[0].dtype)
            dual = jax.tree.unflatten(jax.tree.structure(zeros), jax.tree.leaves(gradient.parts[name]))
            own, dual = member_family(family, dual)
            parts[name] = self._solve(name, minimal_mean(own, dual, dual), transposed=False)
        return _joined(parts)

    def _times(self, name: str, u: Float[Array, "*members P"], transposed: bool) -> Array:
        root = self.roots[name]
        if root.ndim == u.ndim:
            return root * u
        return jnp.einsum("...ji,...j->...i" if transposed else "...ij,...j->...i", root, u)

    def _solve(self, name: str, x: Float[Array, "*members P"], transposed: bool) -> Array:
        root = self.roots[name]
        if root.ndim == x.ndim:
            return x / root
        return solve_triangular(root, x[..., None], trans=1 if transposed else 0, lower=True)[..., 0]


def whitening(family: ProductFamily, natural: ProductNatural) -> Whitening:
    """The whitened coordinates of changes at one q.

    Args:
        family: of q.
        natural: natural parameters of q.

    Returns:
        The coordinates.
    """
    roots = {}
    for name, part in family.components:
        own, at = member_family(part, natural.parts[name])
        point = own.to_minimal(at)
        if point.shape[-1] > _WHOLE:
            spread = jnp.abs(own.to_minimal(own.fisher_diagonal(at)))
            roots[name] = jnp.sqrt(jnp.maximum(spread, jnp.finfo(point.dtype).tiny))
            continue
        roots[name] = scaled_cholesky(member_metrics(part, natural.parts[name]))[0]
    return Whitening(family, roots)


def member_metrics(family: Any, natural: Any) -> Float[Array, "*members P P"]:
    """The Fisher metric of every member of a component, in minimal coordinates.

    Args:
        family: of the component.
        natural: its natural parameters.

    Returns:
        Symmetric matrices, singular nowhere in the domain; of all members together they are the blocks of the whole metric.
    """
    own, at = member_family(family, natural)
    point = own.to_minimal(at)
    eye = jnp.eye(point.shape[-1], dtype=point.dtype)
    basis = jnp.broadcast_to(eye, (*point.shape, point.shape[-1]))
    columns = jax.vmap(
        lambda v: minimal_mean(own, at, own.fisher_product(at, own.from_minimal(v))), in_axes=-2, out_axes=-1
    )
    return symmetrise(columns(basis))


def _joined(parts: dict[str, Array]) -> Float[Array, "K"]:
    return jnp.concatenate([x.reshape(-1) for x in parts.values()])
