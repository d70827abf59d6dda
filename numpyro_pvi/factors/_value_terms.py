"""Terms that see some latents, in their own supports, through one or two affine predictors, whatever all others are.

The latents asked about lie in one vector. What parameters of the sites' distributions are of that vector is proved on the trace
where that can be, for all values of the other latents and of the model's params, and else found by values on rays, at several
values of the others: see :mod:`._structure`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._compiling import look
from ..handlers import RowAxes
from ._degrees import forms_of
from ._forms import Form, marked, unmarked
from ._model import Layout, is_latent
from ._probe import _facts, facts_of_some_rows, leaves_of_some_rows, ray_points, rays_of
from ._proof import LATENTS
from ._structure import Rays, SiteFacts, find_term
from ._terms import TermSpec, leaves_by_path

# Label of everything beside the latents asked about, which may have any value.
_OTHERS = "everything else"


@dataclasses.dataclass(frozen=True)
class SeenFactor:
    """A factor whose sites are asked for their predictors.

    Args:
        trace: NumPyro's trace of the factor's own sites, given values of all latents by name and of the model's params.
        layout: of the latents asked about, in one vector.
        rows: the partitioned axes.
        others: values of all latents by name, at several places.
        params: values of the model's params.
        points: Float[3, D], values of the vector: where rays begin, and what they run towards.
    """

    trace: Callable[[dict, dict], dict]
    layout: Layout
    rows: RowAxes
    others: Sequence[dict[str, Array]]
    params: dict
    points: Float[Array, "3 D"]


def predictor_terms(factor: SeenFactor) -> tuple[TermSpec, ...] | None:
    """Every term that moves with the vector, as a density of at most two affine predictors per element.

    Args:
        factor: the factor.

    Returns:
        The terms' structures; None where some term is none.
    """
    facts: dict[str, SiteFacts] = {}

    def read(point: Array, others: dict, params: dict) -> dict[str, dict[str, Array]]:
        trace = factor.trace({**others, **factor.layout.unflatten(point)}, params)
        for name, site in trace.items():
            own = _facts(name, site, factor.rows)
            asked = is_latent(site) and name in factor.layout.names
            # A latent whose value is given counts as an observation.
            facts[name] = own if asked else dataclasses.replace(own, latent=False)
        return {name: leaves_by_path(site["fn"]) for name, site in trace.items()}

    points = jnp.asarray(factor.points)
    given = points[0], factor.others[0], factor.params
    closed, shapes = jax.make_jaxpr(read, return_shape=True)(*given)
    labels = [marked(LATENTS), *(unmarked(_OTHERS) for _ in jax.tree.leaves(given[1:]))]
    forms = jax.tree.unflatten(jax.tree.structure(shapes), forms_of(closed, labels))
    moving = [name for name in forms if facts[name].latent or any(LATENTS in f.labels for f in forms[name].values())]
    if not moving or not all(_whole(facts[name], forms[name]) for name in moving):
        return None
    seen, first = _along_rays(factor, read, facts, moving, points)
    found, rays = [], rays_of(len(factor.others))
    for name in moving:
        own = _own(factor, name, points, rays) if facts[name].latent else None
        # What is proved of a kink holds in values, too; a latent's own value is a predictor, whatever its prior is.
        term = find_term(facts_of_some_rows(facts[name]), seen[name], own, rays, forms[name], first[name])
        if term is None:
            return None
        found.append(term)
    return tuple(found)


def _whole(facts: SiteFacts, forms: dict[str, Form]) -> bool:
    """Whether the parameters that anything moves are numbers of single elements, so that each has a slope of its own."""
    dims = dict(facts.leaf_event_dims)
    return all(dims.get(path) == 0 for path, form in forms.items() if form.labels)


def _along_rays(
    factor: SeenFactor, read: Callable, facts: dict[str, SiteFacts], names: list[str], points: Array
) -> tuple[dict, dict]:
    """The sites' parameters at all points of all rays, of some rows where there are many; and at the first, of all rows."""
    along = ray_points(points[0], points[1:] - points[0])

    def looked(along: Array, others: list, params: dict) -> tuple[dict, dict]:
        def one(point: Array, own: dict) -> dict:
            leaves = read(point, own, params)
            return {n: leaves_of_some_rows(facts[n], leaves[n]) for n in names}

        seen = [jax.lax.map(lambda point, own=own: one(point, own), along) for own in others]
        first = read(along[0], others[0], params)
        return jax.tree.map(lambda *x: jnp.concatenate(x), *seen), {n: first[n] for n in names}

    return jax.device_get(look(looked, along, list(factor.others), factor.params))


def _own(factor: SeenFactor, name: str, points: Array, rays: Rays) -> np.ndarray:
    """A latent's value at every point of every ray."""
    along = np.asarray(ray_points(points[0], points[1:] - points[0]))
    own = along[:, factor.layout.slice_of(name)].reshape(-1, *factor.layout.shapes[factor.layout.names.index(name)])
    return np.concatenate([own] * rays.blocks)


__all__ = ["SeenFactor", "predictor_terms"]
