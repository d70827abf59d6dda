"""Sites of groups that have local latents: what is kept beside them, and the marginal that is the site."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..families import ConditionalNatural, GaussianNatural, Vector, natural_parameters, schur_complement


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
    """What groups keep of their own latents where these are integrated out of the factor: Gaussians given the shared ones.

    Sites are over the shared latents alone, and nothing of this enters q.
    """

    # Per chunk and row (leading axes C, R), as the rows are packed.
    rows: ConditionalNatural


def marginal_sites(local: LocalSites, chunk_group: Int[Array, "C"]) -> GaussianNatural:
    """Integrate every group's local latents out of its natural parameters.

    Args:
        local: natural parameters over shared and local latents.
        chunk_group: group of each chunk, ascending.

    Returns:
        The sites, with a leading group axis M. Under a mean-field q they are the shared blocks as they stand.
    """
    if not local.rows.full:
        return local.shared
    num_groups = local.shared.precision_mean.shape[0]
    # One chunk after another: all chunks at once would hold a D x D block for each.
    vector, matrix = jax.lax.map(schur_complement, local.rows, batch_size=min(64, chunk_group.shape[0]))

    def total(x):
        return jax.ops.segment_sum(x, chunk_group, num_groups, indices_are_sorted=True)

    shared = local.shared
    return GaussianNatural(shared.precision_mean - total(vector), shared.precision - total(matrix))


def keep_groups(good: Bool[Array, "M"], new: Any, old: Any, chunk_group: Int[Array, "C"]) -> Any:
    """Group by group, the new natural parameters where ``good``, else the old ones."""

    def pick(flags, a: Any, b: Any):
        return jax.tree.map(lambda x, y: jnp.where(flags.reshape(flags.shape + (1,) * (x.ndim - 1)), x, y), a, b)

    rows = pick(good[chunk_group], new.rows, old.rows)
    if isinstance(new, OwnConditionals):
        return OwnConditionals(rows)
    return LocalSites(pick(good, new.shared, old.shared), rows)
