"""Setting a guide up in one program: what NumPyro's own set-up leaves behind, without its many small programs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.transforms import Transform, UnpackTransform, biject_to
from numpyro.infer import autoguide
from numpyro.infer import util as infer_util

from ._compiling import Program, on_device
from ._derivatives import value_and_grad

# What is made anew from concrete values: the copy's own hold tracers.
_REMADE = (
    "prototype_trace",
    "_init_locs",
    "_potential_fn_gen",
    "_potential_fn",
    "_postprocess_fn",
    "_init_latent",
    "_unpack_latent",
)


# What NumPyro's validation says of a parameter out of its range.
_INVALID = "got invalid"


class _NotInOneProgram(Exception):
    """The model or this NumPyro needs values while it runs, or has no valid start."""


def set_up(guide: Any, key: Any, args: tuple, kwargs: dict) -> None:
    """Run a guide's own set-up: in one program, or eagerly where a model reads concrete values.

    Args:
        guide: a NumPyro guide that has not been set up.
        key: a random key.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
    """
    finish = _finish_own if hasattr(guide, "finish_setup") else _finish
    try:
        done = _ahead(guide, key, args, kwargs, finish)
    except Exception:  # whatever it is: the eager way works, or raises what NumPyro itself raises
        done = None
    if done is not None:
        guide.__dict__.update(done)
        return
    before = dict(guide.__dict__)
    try:
        handlers.seed(guide._setup_prototype, key)(*args, **kwargs)
    except ValueError as error:
        if not (Distribution._validate_args and _INVALID in str(error)):
            raise
        guide.__dict__.clear()
        guide.__dict__.update(before)
        _from_another_draw(guide, key, args, kwargs, error)


def _from_another_draw(guide: Any, key: Any, args: tuple, kwargs: dict, error: ValueError) -> None:
    """The eager way once more where a first draw has a parameter out of its range, as a rate that overflows.

    NumPyro looks for a start of finite density among a hundred draws, but raises at the first one that it validates. A start that
    is found is validated in its turn.

    Raises:
        ValueError: the first one, where no start is any better.
    """
    before = dict(guide.__dict__)
    try:
        with numpyro.validation_enabled(False):
            handlers.seed(guide._setup_prototype, key)(*args, **kwargs)
        start = guide._postprocess_fn(guide._init_locs)
        handlers.seed(handlers.substitute(guide.model, data=start), key)(*args, **kwargs)
    except (ValueError, RuntimeError, AttributeError):
        guide.__dict__.clear()
        guide.__dict__.update(before)
        raise error from None


def _ahead(guide: Any, key: Any, args: tuple, kwargs: dict, finish: Callable) -> dict[str, Any]:
    """Attributes of the guide once it is set up; nothing is done to the guide itself."""
    twin, notes = copy.copy(guide), {}
    twin.__dict__.update({n: copy.copy(v) for n, v in guide.__dict__.items() if isinstance(v, dict)})
    arrays, static = _split((args, kwargs))

    def run(key, arrays):
        given, named = _join(arrays, static)
        if hasattr(guide, "prototype"):
            with handlers.seed(rng_seed=key):
                trace, locs = twin.prototype(*given, **named), {}
            good = []
        else:
            handlers.seed(twin._setup_prototype, key)(*given, **named)
            trace, locs = twin.prototype_trace, twin._init_locs
            good = _start_is_finite(twin)
        if Distribution._validate_args:
            good += _is_inside(trace)
        found, notes["sites"] = _pack(trace)
        notes["transforms"] = infer_util._transforms_from_trace(trace, raise_warnings=False)
        return found, dict(locs), jnp.all(jnp.array([True, *good]))

    found, locs, good = Program(run)(key, arrays)
    if not bool(good):
        raise _NotInOneProgram
    trace = _unpack(found, notes["sites"])
    return finish(guide, twin, trace, locs, notes["transforms"], args, kwargs)


def _start_is_finite(twin: Any) -> list:
    """Whether the density and its gradient are finite at the start, without which NumPyro's set-up raises."""
    trace, locs = twin.prototype_trace, twin._init_locs
    for name, value in locs.items():
        fn = trace[name]["fn"]
        if jnp.shape(value) != tuple(biject_to(fn.support).inverse_shape(jnp.shape(trace[name]["value"]))):
            # Repeated to the size of a plate that draws a mini-batch.
            raise _NotInOneProgram
    plates = {n: s["value"] for n, s in trace.items() if s["type"] == "plate"}
    density, slope = value_and_grad(handlers.substitute(twin._potential_fn, data=plates))(locs)
    return [jnp.all(jnp.isfinite(x)) for x in (density, *jax.tree.leaves(slope))]


def _is_inside(trace: dict) -> list:
    """Whether values lie in supports and parameters where they may: NumPyro warns or raises, but only where it sees values."""
    found = []
    for site in trace.values():
        if site["type"] == "sample":
            if site["is_observed"] and site["fn"].support is not None:
                found.append(jnp.all(site["fn"].support(site["value"])))
            found += _parameters_inside(site["fn"])
    return found


def _parameters_inside(fn: Any) -> list:
    own = {n: c for n, c in fn.arg_constraints.items() if n in vars(fn) and not constraints.is_dependent(c)}
    found = [jnp.all(constraint(getattr(fn, n))) for n, constraint in own.items() if hasattr(getattr(fn, n), "dtype")]
    inner = [x for x in vars(fn).values() if isinstance(x, Distribution)]
    return sum((_parameters_inside(x) for x in inner), start=found)


def _finish(
    guide: Any, twin: Any, trace: dict, locs: dict, transforms: Any, args: tuple, kwargs: dict
) -> dict[str, Any]:
    """Attributes of one of NumPyro's guides, made from a concrete trace."""
    own = {n: v for n, v in twin.__dict__.items() if n not in _REMADE}
    inverse = {n: biject_to(trace[n]["fn"].support) for n, s in trace.items() if _is_latent(s)}
    params = {n: s for n, s in trace.items() if s["type"] == "param"}
    inverse |= {n: biject_to(s["kwargs"].get("constraint", constraints.real)) for n, s in params.items()}
    enum = transforms.has_enumerate_support
    replay = transforms.has_deterministic or transforms.dynamic_support
    model = infer_util._prepare_model_for_potential(guide.model, trace, enum=enum)
    call = {"dynamic_args": True, "model_args": args, "model_kwargs": kwargs}
    make, post = infer_util.get_potential_fn(model, inverse, replay_model=replay, enum=enum, **call)
    # A program returns dicts in the order of the alphabet, and the flat vector follows the trace's.
    ordered = {n: locs[n] for n in trace if n in locs}
    own |= {"prototype_trace": trace, "_init_locs": ordered, "_potential_fn_gen": make}
    own |= {"_potential_fn": make(*args, **kwargs)}
    own |= {"_postprocess_fn": handlers.seed(post(*args, **kwargs), rng_seed=0)}
    if isinstance(guide, autoguide.AutoContinuous):
        shapes = {n: jnp.shape(x) for n, x in ordered.items()}
        flat = np.concatenate([np.asarray(x).reshape(-1) for x in ordered.values()])
        unpack = partial(autoguide._unravel_dict, shape_dict=shapes)
        own["_init_latent"] = on_device(flat)
        own["_unpack_latent"] = UnpackTransform(unpack, autoguide._ravel_dict_with_shape_dict)
    _check(guide, own)
    return own


def _finish_own(guide: Any, twin: Any, trace: dict, locs: dict, transforms: Any, args: tuple, kwargs: dict) -> dict:
    """Attributes of a guide that is set up from a trace."""
    del twin, locs, transforms
    _check(guide, {"prototype_trace": trace})
    made = copy.copy(guide)
    made.__dict__.update({n: copy.copy(v) for n, v in guide.__dict__.items() if isinstance(v, dict)})
    made.finish_setup(trace, args, kwargs)
    return made.__dict__


def _is_latent(site: dict) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete


# ------------------------------------------------------------------------------------- traces as what programs return


def _split(tree: Any) -> tuple[list, Any]:
    """The arrays of a pytree (None for every other leaf), and all else."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x if hasattr(x, "dtype") else None for x in leaves]
    return arrays, (structure, [None if hasattr(x, "dtype") else (x,) for x in leaves])


def _join(arrays: list, static: Any) -> Any:
    structure, rest = static
    return structure.unflatten([x if kept is None else kept[0] for x, kept in zip(arrays, rest, strict=True)])


def _pack(trace: dict) -> tuple[dict, OrderedDict]:
    """A trace's arrays, and what is left of it."""
    arrays, rest = {}, OrderedDict()
    for name, site in trace.items():
        fields = {f: x for f, x in site.items() if isinstance(x, Distribution) or not callable(x)}
        parts = {f: _split(x) for f, x in fields.items()}
        arrays[name] = {f: part[0] for f, part in parts.items()}
        rest[name] = site, {f: part[1] for f, part in parts.items()}
    return arrays, rest


def _unpack(arrays: dict, rest: OrderedDict) -> OrderedDict:
    found = OrderedDict()
    for name, (site, static) in rest.items():
        found[name] = {f: _join(arrays[name][f], static[f]) if f in static else x for f, x in site.items()}
    return found


def _check(guide: Any, own: dict) -> None:
    """Refuse attributes that hold what exists inside of the program only."""
    before = guide.__dict__
    if any(_holds_tracer(v, set()) for n, v in own.items() if before.get(n) is not v):
        raise _NotInOneProgram


def _holds_tracer(value: Any, seen: set[int]) -> bool:
    if isinstance(value, jax.core.Tracer):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        return any(_holds_tracer(x, seen) for x in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tracer(x, seen) for x in value)
    if isinstance(value, Distribution | Transform | constraints.Constraint):
        return any(_holds_tracer(x, seen) for x in vars(value).values())
    return False
