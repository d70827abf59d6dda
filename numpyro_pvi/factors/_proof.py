"""One trace of a model's log densities and parameters: evaluated at points, and interpreted for what holds at all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from ._degrees import forms_of
from ._forms import Form, marked, unmarked
from ._model import ModelCall

# Label of the flat vector of latents; parameters have their own names.
LATENTS = "the latents"
# How far parameters are moved, in units of their own size and one, where they are unconstrained.
_MOVE = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLook:
    """A traced function of (data, parameters, rows' own latents, flat point), and the form of each of its outputs.

    Attributes:
        closed: its jaxpr.
        structure: of its outputs.
        forms: of its outputs, in their structure.
    """

    closed: Any
    structure: Any
    forms: Any

    def __call__(self, arrays: list, params: dict, local: Any, point: Array) -> Any:
        """The outputs."""
        flat = jax.tree.leaves((arrays, params, local, point))
        return jax.tree.unflatten(self.structure, jaxpr_as_fun(self.closed)(*flat))

    @property
    def labels(self) -> frozenset[str]:
        """Everything that the outputs depend on: names of parameters, and ``LATENTS``."""
        found = jax.tree.leaves(self.forms, is_leaf=lambda x: isinstance(x, Form))
        return frozenset().union(*(form.labels for form in found))


def trace_look(look: Callable, arrays: list, params: dict, call: ModelCall) -> TracedLook:
    """Trace a look once, and interpret the trace.

    Args:
        look: a function of data, parameters, rows' own latents and a flat point.
        arrays: the data.
        params: shapes and dtypes of the parameters.
        call: says how many latents there are.

    Returns:
        The look. Forms hold for all latents, parameters and data of these shapes; polynomials are in the latents jointly.
    """
    dtype, own = jnp.result_type(float), call.local_layout
    local = None if own is None else jax.ShapeDtypeStruct((own.size, own.width), dtype)
    point = jax.ShapeDtypeStruct((call.layout.dim,), dtype)
    closed, shapes = jax.make_jaxpr(look, return_shape=True)(arrays, params, local, point)
    labels = [unmarked(n) for n in sorted(params) for _ in jax.tree.leaves(params[n])]
    still = [unmarked()] * len(arrays), [unmarked()] * (local is not None)
    forms = forms_of(closed, [*still[0], *labels, *still[1], marked(LATENTS)])
    structure = jax.tree.structure(shapes)
    return TracedLook(closed, structure, jax.tree.unflatten(structure, forms))


def moved_values(params: dict, sites: dict, key: Any) -> dict:
    """Other values of the parameters, inside their constraints.

    Args:
        params: constrained values by name; trees of arrays where a module's parameters are one site.
        sites: the ``numpyro.param`` sites.
        key: a random key.

    Returns:
        Values about a tenth of their size, or of one, away in unconstrained space. Where a start makes a term vanish, as
        zeros in a last layer do, these do not.
    """
    found = {}
    for i, (name, value) in enumerate(params.items()):
        constraint = sites[name]["kwargs"].get("constraint", constraints.real) if name in sites else constraints.real
        leaves, structure = jax.tree.flatten(value)
        keys = jax.random.split(jax.random.fold_in(key, 1000 + i), len(leaves))
        moved = [_moved(x, biject_to(constraint), k) for x, k in zip(leaves, keys, strict=True)]
        found[name] = jax.tree.unflatten(structure, moved)
    return found


def _moved(value: Any, transform: Any, key: Any) -> Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    free = transform.inv(value)
    noise = jax.random.normal(key, jnp.shape(free), value.dtype)
    return transform(free + _MOVE * (1 + jnp.abs(free)) * noise).astype(value.dtype)
