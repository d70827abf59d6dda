"""The latents that a plan, a guide and a model have, and setting a guide up once there are arguments."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._compiling import is_traced
from ._exponential_files import check_families, guide_shapes, product_latents
from ._state import Plan, PVIState
from .errors import CheckpointError, StateError
from .factors import abstract_trace, is_latent, join_arguments, model_layout, summed_out
from .guides import NOT_SET_UP, keeps_supports, setup_guide
from .runtime import ProductPlan

Latents = dict[str, tuple[int, ...]]


class _Stored(NamedTuple):
    """All that is asked of a latent's distribution once the fit is made."""

    support: Any


def latents_of(plan: Plan) -> Latents:
    """Unconstrained shapes of a plan's latents, shared and local; those of values where q is a product of families."""
    if isinstance(plan, ProductPlan):
        return product_latents(plan)
    part = plan.partition
    found = dict(zip(part.layout.names, part.layout.shapes, strict=True))
    if part.local is not None:
        flat = jax.ShapeDtypeStruct((part.local.size, part.local.width), jnp.result_type(float))
        found |= {n: tuple(x.shape) for n, x in jax.eval_shape(part.local.unflatten, flat).items()}
    return found


def guide_latents(guide: Any) -> Latents:
    """Unconstrained shapes of the latents of a guide that is set up; those of values where latents keep their supports."""
    if keeps_supports(guide):
        return guide_shapes(guide)
    return {name: tuple(jnp.shape(value)) for name, value in guide._init_locs.items()}


def abstract_arguments(plan: Plan) -> tuple[list, tuple]:
    """Arguments like those that a plan was made with, split into shapes of arrays and static leaves."""
    leaves = plan.signature.leaves
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in leaves if x.shape is not None]
    return arrays, (plan.signature.structure, tuple(None if x.shape is not None else (x.static,) for x in leaves))


def model_latents(name: str, model: Any, plan: Plan) -> Latents:
    """Unconstrained shapes of a model's latents, for arguments like those that a plan was made with.

    Args:
        name: the checkpoint, for the message.
        model: the NumPyro model.
        plan: the plan; its signature has the arguments' shapes.

    Returns:
        The shapes; nothing is computed.

    Raises:
        CheckpointError: when the model does not run with such arguments.
    """
    if plan.signature.by_value:
        # A file has no data, and the model asks for values: it is compared with the state once there are arguments.
        return latents_of(plan)
    arrays, static = abstract_arguments(plan)
    found: Latents = {}

    def run(key, arrays):
        args, kwargs = join_arguments(arrays, static)
        trace = abstract_trace(plan.partition.model(model), key, args, kwargs)
        if isinstance(plan, ProductPlan):
            found.update({n: tuple(s["fn"].shape()) for n, s in trace.items() if is_latent(s)})
            return key
        layout = model_layout(trace)
        found.update(zip(layout.names, layout.shapes, strict=True))
        return key

    try:
        jax.eval_shape(run, jax.random.key(0), arrays)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
        raise CheckpointError(
            f"the checkpoint {name!r} was written for another model than this PVI's, which does not run with arguments of the "
            f"file's shapes ({type(error).__name__}: {error})."
        ) from error
    return found


def prepare_guide(pvi: Any, state: PVIState, args: tuple, kwargs: dict) -> None:
    """Set a guide up that has not seen the model's arguments, as after ``load``. Under ``jit`` it is left alone.

    Args:
        pvi: what the guide belongs to.
        state: a state of it.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
    """
    if pvi.guide.prototype_trace is not None:
        return
    if is_traced((state, args, kwargs)):
        return
    enumeration = state.plan.partition.enumeration
    # The key gives the guide starting values, which nothing reads.
    setup_guide(
        pvi.guide, jax.random.key(0), args, kwargs, enumeration and partial(summed_out, enumeration=enumeration)
    )
    wanted, found = latents_of(state.plan), guide_latents(pvi.guide)
    if found != wanted:
        raise StateError(
            f"the state has the latents {_listed(wanted)}, but the guide {_listed(found)} (unconstrained shapes): it belongs to "
            "another model. Make the PVI from the model that the state was fitted with."
        )
    if isinstance(state.plan, ProductPlan):
        check_families(pvi.guide, state.plan)


def prototype(pvi: Any, state: PVIState) -> dict:
    """The guide's prototype trace; before it is set up, the supports that a loaded file has.

    Args:
        pvi: what the guide belongs to.
        state: a state of it.

    Returns:
        An entry with a distribution, or its support, for every latent.

    Raises:
        StateError: when neither is there.
    """
    found = pvi.guide.prototype_trace
    return stored_prototype(pvi._memory.supports, state) if found is None else found


def stored_prototype(supports: dict[str, Any], state: PVIState) -> dict[str, dict[str, Any]]:
    """What stands in for a guide's prototype trace where only supports are asked for.

    Args:
        supports: by latent, as a file has them.
        state: a state.

    Returns:
        An entry for every latent.

    Raises:
        StateError: when a latent's support is not known.
    """
    if not set(latents_of(state.plan)) <= set(supports):
        raise StateError(NOT_SET_UP)
    return {name: {"fn": _Stored(support)} for name, support in supports.items()}


def _listed(latents: Latents) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in latents.items())
