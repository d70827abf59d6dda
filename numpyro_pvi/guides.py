"""Guides: NumPyro's Gaussian AutoGuides as a family and a flat layout, and marginals of their latents as distributions."""

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
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int, Shaped
from numpyro import handlers
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    IndependentTransform,
    ReshapeTransform,
    Transform,
    UnpackTransform,
    biject_to,
)
from numpyro.infer import autoguide, init_to_value
from numpyro.infer import util as infer_util

from ._compiling import Program, on_device
from ._numerics import scaled_cholesky, symmetrise, value_and_grad
from .errors import GuideError, PVIError, StateError
from .expectations import fixed_nodes
from .families import GaussianFamily, GaussianNatural, MultivariateNormalFamily, NormalFamily

# ------------------------------------------------------------------------------------------------ set-up in one program
# Setting a guide up in one program: what NumPyro's own set-up leaves behind, without its many small programs.

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
# Draws that are tried after a first one with a parameter out of its range, by guides that look for no start of their own.
_OTHER_DRAWS = 20


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

    NumPyro looks for a start of finite density among a hundred draws, but raises at the first one that it validates. A start
    that is found is validated in its turn. Raises ValueError: the first one, where no start is any better.
    """
    before = dict(guide.__dict__)
    if hasattr(guide, "finish_setup"):
        # Such a guide takes the first draw as it is.
        for own in jax.random.split(key, _OTHER_DRAWS):
            try:
                handlers.seed(guide._setup_prototype, own)(*args, **kwargs)
                return
            except ValueError:
                guide.__dict__.clear()
                guide.__dict__.update(before)
        raise error from None
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
    arrays, static = _arrays_apart((args, kwargs))

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
    _check(guide, {"prototype_trace": trace})
    made = copy.copy(guide)
    made.__dict__.update({n: copy.copy(v) for n, v in guide.__dict__.items() if isinstance(v, dict)})
    made.finish_setup(trace, args, kwargs)
    return made.__dict__


def _is_latent(site: dict) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete


# ------------------------------------------------------------------------------------- traces as what programs return


def _arrays_apart(tree: Any) -> tuple[list, Any]:
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
        parts = {f: _arrays_apart(x) for f, x in fields.items()}
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


# --------------------------------------------------------------------------------------------------------------- guides

_FAMILIES = {
    autoguide.AutoMultivariateNormal: MultivariateNormalFamily,
    autoguide.AutoDiagonalNormal: NormalFamily,
    autoguide.AutoNormal: NormalFamily,
}
NOT_SET_UP = (
    "the guide is not set up: call pvi.init(key, *args) once, its result may be thrown away; for a state from a file, "
    "pvi.load(path, *args) or pvi.evaluate(state, *args)."
)
SUPPORTED = "AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal"


def keeps_supports(guide: Any) -> bool:
    """Whether a guide's latents keep their own supports: NumPyro's own guides do not say, :class:`AutoExponentialFamily` does."""
    return not isinstance(guide, type) and getattr(guide, "keeps_supports", False)


def check_guide(guide: Any) -> None:
    """Raise unless the guide is one whose posterior is a Gaussian in unconstrained space.

    Args:
        guide: a NumPyro guide.

    Raises:
        GuideError: naming the guide and the supported ones, with the nearest.
    """
    if type(guide) in _FAMILIES or keeps_supports(guide):
        return
    if isinstance(guide, type) and issubclass(guide, autoguide.AutoGuide):
        raise GuideError(
            f"the guide is the class {guide.__name__}: pass an instance of the same model, {guide.__name__}(model)."
        )
    if not callable(guide):
        raise GuideError(f"the guide is {guide!r}: pass one of {SUPPORTED}, made of the same model.")
    name = type(guide).__name__
    nearest = {
        "AutoLowRankMultivariateNormal": "AutoMultivariateNormal keeps the full covariance",
        "AutoLaplaceApproximation": "AutoMultivariateNormal is fitted instead of expanded at the mode",
        "AutoDelta": "AutoDiagonalNormal also keeps a variance per coordinate",
    }.get(name, "AutoMultivariateNormal is the nearest")
    if callable(guide) and not isinstance(guide, autoguide.AutoGuide):
        name = "a hand-written guide (" + getattr(guide, "__name__", name) + ")"
    raise GuideError(
        f"PVI cannot use {name}: sites are Gaussian factors in unconstrained space, so the guide must be one of {SUPPORTED} "
        f"({nearest}), or AutoExponentialFamily, whose sites are terms of the families of the priors."
    )


def setup_guide(
    guide: Any, key: Any, args: tuple, kwargs: dict, wrap: Callable[[Callable], Callable] | None = None
) -> None:
    """Set a guide's prototype up outside of any ``jit``, under which it would order its latents differently.

    Args:
        guide: a supported guide.
        key: a random key.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        wrap: what hides the latents that q does not hold, discrete ones that are summed out, from the guide; None where
            there are none.
    """
    if guide.prototype_trace is None:
        own = guide.model
        try:
            guide.model = own if wrap is None else wrap(own)
            set_up(guide, key, args, kwargs)
        finally:
            # The model is the user's: what the guide was set up with has the wrapped one.
            guide.model = own


def guide_layout(
    guide: Any, latents: dict[str, tuple[int, ...]]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The guide's latents and unconstrained shapes, in the order of its flat vector.

    Args:
        guide: a guide whose prototype is set up.
        latents: the model's latents and their unconstrained shapes.

    Returns:
        ``(names, shapes)``.

    Raises:
        GuideError: when the guide was made for another model.
    """
    own = {name: tuple(jnp.shape(value)) for name, value in guide._init_locs.items()}
    if own != latents:
        missing = sorted(set(latents) - set(own))
        extra = sorted(set(own) - set(latents))
        shapes = [f"{n}: guide {own[n]}, model {latents[n]}" for n in own if n in latents and own[n] != latents[n]]
        parts = [f"latents of the model that it lacks: {', '.join(missing)}"] if missing else []
        parts += [f"latents that the model lacks: {', '.join(extra)}"] if extra else []
        parts += ["shapes differ: " + "; ".join(shapes)] if shapes else []
        raise GuideError(
            f"the guide {type(guide).__name__} was made for another model or other data ({'; '.join(parts)}). Make a fresh one, "
            f"{type(guide).__name__}(model), from the model given to PVI."
        )
    return tuple(own), tuple(own.values())


def family_of(guide: Any, dim: int) -> GaussianFamily:
    """The exponential family of a supported guide over ``dim`` unconstrained coordinates."""
    return _FAMILIES[type(guide)](dim)


def given_params(given: dict, own: dict) -> dict[str, Array]:
    """Params of a guide that a user gave, in the shapes of its own.

    ``given``: constrained values by name, every one a name of ``own``; ``own``: arrays, or their shapes. Returns the given ones.
    Raises PVIError for a shape that does not broadcast to the guide's, and for entries that are not finite.
    """
    found = {}
    for name, value in given.items():
        value, shape = jnp.asarray(value), tuple(own[name].shape)
        try:
            fits = jnp.broadcast_shapes(value.shape, shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise PVIError(f"init_params[{name!r}] has shape {value.shape}, and the guide's is {shape}: give it that.")
        if not isinstance(value, jax.core.Tracer) and not bool(jnp.all(jnp.isfinite(value))):
            raise PVIError(f"init_params[{name!r}] has entries that are not finite.")
        found[name] = jnp.broadcast_to(value, shape).astype(own[name].dtype)
    return found


def natural_to_params(
    guide: Any, family: GaussianFamily, names: tuple[str, ...], shapes: tuple, natural: GaussianNatural
) -> dict[str, Array]:
    """Write a posterior as the guide's own params (constrained values, the guide's own names).

    Args:
        guide: the guide that will read them; its prototype decides the order of its flat vector.
        family: the family of q.
        names: latents in the order of ``natural``.
        shapes: their unconstrained shapes.
        natural: natural parameters of q.

    Returns:
        Params for ``Predictive(guide, params=...)``, ``guide.median`` and the like.
    """
    prefix = guide.prefix
    if isinstance(guide, autoguide.AutoNormal):
        loc, scale = _by_latent(family, shapes, natural)
        params = {f"{name}_{prefix}_loc": x for name, x in zip(names, loc, strict=True)}
        return params | {f"{name}_{prefix}_scale": x for name, x in zip(names, scale, strict=True)}
    loc, scale = _in_order(family, natural, guide_order(guide, names, shapes))
    return {f"{prefix}_loc": loc, f"{prefix}_scale{'_tril' * family.full}": scale}


# Compiled: operation by operation, these cost seconds the first time.
@partial(Program, static=("family", "shapes"))
def _by_latent(family: GaussianFamily, shapes: tuple, natural: GaussianNatural) -> tuple[list[Array], list[Array]]:
    moments = family.moments(natural)
    parts = list(zip(slices(shapes), shapes, strict=True))
    return [moments.loc[w].reshape(s) for w, s in parts], [moments.scale[w].reshape(s) for w, s in parts]


@partial(Program, static=("family",))
def _in_order(family: GaussianFamily, natural: GaussianNatural, order: Any) -> tuple[Array, Array]:
    moments = family.moments(natural)
    scale = moments.scale[order]
    return moments.loc[order], scaled_cholesky(symmetrise(scale @ scale.T))[0] if family.full else scale


def flat_to_params(
    guide: Any, names: tuple[str, ...], shapes: tuple, loc: Float[Array, "D"], spread: Float[Array, "..."]
) -> dict[str, Array]:
    """Write a Gaussian over all of a guide's latents as the guide's own params.

    Args:
        guide: the guide that will read them.
        names: its latents, in the order of ``loc``.
        shapes: their unconstrained shapes.
        loc: the location.
        spread: covariance (``AutoMultivariateNormal``) or standard deviations.

    Returns:
        Params under the guide's own names.
    """
    prefix = guide.prefix
    if isinstance(guide, autoguide.AutoNormal):
        found = _split(shapes, loc, spread)
        by_kind = zip(("loc", "scale"), found, strict=True)
        return {f"{n}_{prefix}_{kind}": x for kind, own in by_kind for n, x in zip(names, own, strict=True)}
    loc, spread = _reordered(loc, spread, guide_order(guide, names, shapes))
    return {f"{prefix}_loc": loc, f"{prefix}_scale{'_tril' * (spread.ndim == 2)}": spread}


@partial(Program, static=("shapes",))
def _split(shapes: tuple, *flat: Float[Array, "D"]) -> list[list[Array]]:
    parts = list(zip(slices(shapes), shapes, strict=True))
    return [[x[where].reshape(s) for where, s in parts] for x in flat]


@Program
def _reordered(loc: Float[Array, "D"], spread: Float[Array, "..."], order: Any) -> tuple[Array, Array]:
    """A location and the root of a covariance, or sds, in another order."""
    if spread.ndim == 1:
        return loc[order], spread[order]
    return loc[order], scaled_cholesky(symmetrise(spread[order][:, order]))[0]


def params_to_natural(
    guide: Any, family: GaussianFamily, names: tuple[str, ...], shapes: tuple, params: dict, default: GaussianNatural
) -> GaussianNatural:
    """Read a (partial) dict of the guide's params; what is missing is taken from ``default``.

    Args:
        guide: the guide whose names the params bear.
        family: the family of q.
        names: latents in the order of the flat vector.
        shapes: their unconstrained shapes.
        params: constrained values under the guide's own names.
        default: natural parameters to complete the dict from.

    Returns:
        Natural parameters of q.
    """
    full = natural_to_params(guide, family, names, shapes, default)
    full.update({k: jnp.asarray(v) for k, v in params.items() if k in full})
    loc, spread = params_to_flat(guide, names, shapes, full)
    return family.from_loc_covariance(loc, spread) if family.full else family.from_loc_sd(loc, spread)


def params_to_flat(
    guide: Any, names: tuple[str, ...], shapes: tuple, params: dict
) -> tuple[Float[Array, "D"], Float[Array, "..."]]:
    """Read the guide's params as a Gaussian over all of its latents: the inverse of :func:`flat_to_params`.

    Args:
        guide: the guide whose names the params bear.
        names: its latents, in the order of the flat vector.
        shapes: their unconstrained shapes.
        params: constrained values under the guide's own names, of all latents.

    Returns:
        The location, and the covariance (``AutoMultivariateNormal``) or standard deviations.
    """
    prefix = guide.prefix
    if isinstance(guide, autoguide.AutoNormal):
        each = ([params[f"{n}_{prefix}_{kind}"].reshape(-1) for n in names] for kind in ("loc", "scale"))
        loc, spread = map(jnp.concatenate, each)
        return loc, spread
    inverse = np.argsort(guide_order(guide, names, shapes))
    loc = params[f"{prefix}_loc"][inverse]
    if not isinstance(guide, autoguide.AutoMultivariateNormal):
        return loc, params[f"{prefix}_scale"][inverse]
    tril = params[f"{prefix}_scale_tril"][inverse]
    return loc, tril @ tril.T


def guide_param_names(guide: Any, names: tuple[str, ...]) -> set[str]:
    """Names under which a supported guide keeps its params."""
    prefix = guide.prefix
    if isinstance(guide, autoguide.AutoNormal):
        return {f"{n}_{prefix}_{part}" for n in names for part in ("loc", "scale")}
    scale = "scale_tril" if isinstance(guide, autoguide.AutoMultivariateNormal) else "scale"
    return {f"{prefix}_loc", f"{prefix}_{scale}"}


def latents_given(guide: Any) -> set[str]:
    """Latents that a guide was given values for to start at, by ``init_to_value``."""
    strategy = guide.init_loc_fn
    known = isinstance(strategy, partial) and strategy.func is init_to_value
    return set(strategy.keywords.get("values") or {}) if known else set()


def param_transforms(guide: Any) -> dict[str, Any]:
    """Bijections from unconstrained space to the supports of the model's ``numpyro.param`` sites.

    Args:
        guide: a guide whose prototype is set up.

    Returns:
        One transform per site.

    Raises:
        StateError: when the guide is not set up.
    """
    if guide.prototype_trace is None:
        raise StateError(NOT_SET_UP)
    sites = guide.prototype_trace.items()
    return {n: biject_to(s["kwargs"].get("constraint", constraints.real)) for n, s in sites if s["type"] == "param"}


def slices(shapes: tuple[tuple[int, ...], ...]) -> list[slice]:
    """Where each latent lies in the flat vector."""
    found, start = [], 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        found.append(slice(start, start + size))
        start += size
    return found


def guide_order(guide: Any, names: tuple[str, ...], shapes: tuple) -> Int[np.ndarray, "D"]:
    """Where each coordinate of a guide's own flat vector stands in that of ``names``.

    Args:
        guide: the guide.
        names: latents in the order of the flat vector.
        shapes: their unconstrained shapes.

    Returns:
        Positions.

    Raises:
        StateError: when the guide is not set up.
    """
    where = dict(zip(names, slices(shapes), strict=True))
    if guide.prototype_trace is None:
        # Set up later under jit or vmap (as Predictive does) it would order its flat vector otherwise, and read another
        # posterior.
        raise StateError(NOT_SET_UP)
    # Latents that clients keep to themselves are not among the names.
    own = [n for n in guide._init_locs if n in where]
    return np.concatenate([np.arange(where[n].start, where[n].stop) for n in own])


# ------------------------------------------------------------------------------------------------------------ marginals
# The marginal of one latent as a distribution in its own support, with the moments that NumPyro leaves out.


class Marginal(dist.TransformedDistribution):
    """A Gaussian seen through one transform, which knows its mean and variance: in closed form, or by quadrature of an element."""

    @property
    def _kind(self) -> Any:
        """The transform of one element, or of the shape."""
        (transform,) = self.transforms
        return transform.base_transform if isinstance(transform, IndependentTransform) else transform

    def _parts(self) -> tuple[Any, Any, Any]:
        """The transform of one element before it is shifted and scaled, as on intervals and half-lines, and by what it is."""
        parts = list(self._kind.parts) if isinstance(self._kind, ComposeTransform) else [self._kind]
        last: Any = parts.pop() if isinstance(parts[-1], AffineTransform) else AffineTransform(0.0, 1.0)
        return (parts[0] if len(parts) == 1 else ComposeTransform(parts)), last.loc, last.scale

    @property
    def mean(self) -> Array:
        """Of every element. Raises NotImplementedError where elements hang together."""
        if isinstance(self._kind, ReshapeTransform):
            return self.base_dist.mean.reshape(self.batch_shape + self.event_shape)
        kind, loc, scale = self._parts()
        return loc + scale * self._moments(kind, "mean")[0]

    @property
    def variance(self) -> Array:
        """Of every element. Raises NotImplementedError where elements hang together."""
        if isinstance(self._kind, ReshapeTransform):
            return self.base_dist.variance.reshape(self.batch_shape + self.event_shape)
        kind, _, scale = self._parts()
        return scale**2 * self._moments(kind, "variance")[1]

    def _moments(self, kind: Any, what: str) -> tuple[Array, Array]:
        """Mean and variance of every element through a transform; ``what``: which, for who asks of elements that hang together."""
        if isinstance(kind, ExpTransform):
            mean = jnp.exp(self.base_dist.mean + 0.5 * self.base_dist.variance)
            return mean, mean**2 * jnp.expm1(self.base_dist.variance)
        if kind.domain.event_dim or kind.codomain.event_dim:
            raise NotImplementedError(
                f"{what} of a latent with support {self.support}: a Gaussian seen through {type(kind).__name__} has none in "
                f"closed form. Average over draws, as of .sample(key, (1000,))."
            )
        loc, sd = self.base_dist.mean, jnp.sqrt(self.base_dist.variance)
        nodes, weights = (
            jnp.asarray(x, loc.dtype).reshape(-1, *[1] * loc.ndim) for x in fixed_nodes("trapezoid", "float64")
        )
        values = kind(loc + sd * nodes)
        mean = jnp.sum(weights * values, axis=0)
        return mean, jnp.sum(weights * (values - mean) ** 2, axis=0)


def event_rank(fn: Any) -> int:
    """Number of axes of one event of a latent in unconstrained space."""
    return biject_to(fn.support).domain.event_dim


def in_own_support(
    fn: Any, loc: Float[Array, "*shape"], sd: Float[Array, "*shape"], covariance: Float[Array, "*batch E E"] | None
) -> dist.Distribution:
    """The distribution of a latent that is Gaussian in unconstrained space.

    Args:
        fn: the latent's distribution in the model, which gives the support.
        loc: unconstrained mean.
        sd: unconstrained standard deviations.
        covariance: within each event, flattened; None where its elements are independent.

    Returns:
        A distribution with the latent's shapes. ``mean`` and ``variance`` are there where every element has its own transform: real
        and positive supports and half-lines, in closed form, and intervals, by quadrature (to 2e-9 at an unconstrained sd of 4).
    """
    rank, transform = event_rank(fn), biject_to(fn.support)
    if covariance is None or rank == 0:
        base: dist.Distribution = dist.Normal(loc, sd).to_event(rank)
    else:
        event = loc.shape[loc.ndim - rank :]
        size = int(np.prod(event))
        # By its root: of coordinates of other scales NumPyro's check of a covariance finds none in single precision.
        root, _ = scaled_cholesky(covariance)
        base = dist.MultivariateNormal(loc.reshape(*loc.shape[: loc.ndim - rank], size), scale_tril=root)
        if rank != 1:
            base = Marginal(base, ReshapeTransform(event, (size,)))
    real = getattr(fn.support, "base_constraint", fn.support) is dist.constraints.real
    return base if real else Marginal(base, transform)


# ------------------------------------------------------------------------------------------------------------ quantiles
# Quantiles of the elements of a distribution, also where NumPyro has no inverse of its distribution function.

_HALVINGS = {"float32": 40, "float64": 70}
_GRID = 4096
_DRAWS = 20_000
_CLOSED = (dist.Normal, dist.LogNormal, dist.Exponential)


def marginal_quantiles(distribution: Any, levels: Float[Array, "Q"]) -> Shaped[Array, "Q *shape"]:
    """Quantiles of every element of a distribution's values.

    To rounding for normals, monotone images of single ones, and exponentials, and by bisection of the distribution function
    for gamma, inverse gamma and beta distributions and the elements of a Dirichlet; for von Mises angles, counted from -pi, by a
    grid of 4,096 points; the smallest value whose probability is enough for discrete ones. What is left (elements of a Wishart
    matrix, of correlations or of an ordered vector) is read off 20,000 draws, with a standard error of about ``sqrt(p (1 - p) /
    20,000)`` in the level.

    Args:
        distribution: a NumPyro distribution.
        levels: numbers in [0, 1].

    Returns:
        Values, with the levels' axis first.
    """
    while isinstance(distribution, dist.Independent):
        distribution = distribution.base_dist
    if isinstance(distribution, dist.Dirichlet):
        alpha = distribution.concentration
        return marginal_quantiles(dist.Beta(alpha, jnp.sum(alpha, -1, keepdims=True) - alpha), levels)
    shape = distribution.batch_shape + distribution.event_shape
    column = levels.reshape(-1, *(1,) * len(shape))
    image = isinstance(distribution, dist.TransformedDistribution) and type(distribution.base_dist) is dist.Normal
    if isinstance(distribution, _CLOSED) or (image and not distribution.event_shape):
        return distribution.icdf(jnp.broadcast_to(column, (len(levels), *shape)))
    if isinstance(distribution, dist.VonMises):
        return _circular(distribution, levels)
    if distribution.support.is_discrete:
        return _discrete(distribution, levels)
    if distribution.event_shape and distribution.support in _REAL:
        return dist.Normal(distribution.mean, jnp.sqrt(distribution.variance)).icdf(
            jnp.broadcast_to(column, (len(levels), *shape))
        )
    if not distribution.event_shape and type(distribution).cdf is not dist.Distribution.cdf:
        return _bisected(distribution, column, shape)
    draws = distribution.sample(jax.random.key(0), (_DRAWS,))
    return jnp.quantile(draws, levels, axis=0)


_REAL = (dist.constraints.real_vector, dist.constraints.real_matrix)


def _bisected(distribution: Any, column: Array, shape: tuple[int, ...]) -> Array:
    """Bisection along the real line that the support is mapped to."""
    transform = biject_to(distribution.support)
    falling = transform(1.0) < transform(0.0)
    dtype = jnp.result_type(float)
    edge = -0.9 * jnp.log(jnp.finfo(dtype).tiny)
    start = jnp.broadcast_to(column, (column.shape[0], *shape)).astype(dtype)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        below = (distribution.cdf(transform(middle)) < start) != falling
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    bounds = jnp.full(start.shape, -edge), jnp.full(start.shape, edge)
    low, high = jax.lax.fori_loop(0, _HALVINGS[dtype.name], halve, bounds)
    return transform(0.5 * (low + high))


def _circular(distribution: Any, levels: Array) -> Array:
    """Inverse of a trapezoid sum of the density over one turn."""
    grid = jnp.linspace(-jnp.pi, jnp.pi, _GRID + 1)
    shape = distribution.batch_shape
    density = jnp.exp(distribution.log_prob(grid.reshape(-1, *(1,) * len(shape)))).reshape(_GRID + 1, -1)
    cells = 0.5 * (density[1:] + density[:-1])
    total = jnp.concatenate([jnp.zeros_like(cells[:1]), jnp.cumsum(cells, axis=0)])
    found = jax.vmap(lambda mass: jnp.interp(levels, mass / mass[-1], grid), in_axes=1, out_axes=1)(total)
    return found.reshape(len(levels), *shape)


def _discrete(distribution: Any, levels: Array) -> Array:
    """The smallest value of the support whose cumulative probability reaches the level."""
    support = distribution.enumerate_support(expand=True)
    mass = jnp.cumsum(jnp.exp(distribution.log_prob(support)), axis=0)
    # A sum that rounding leaves below one still reaches level one.
    mass = mass / mass[-1]
    index = jax.vmap(lambda level: jnp.argmax(mass >= level, axis=0))(levels)
    return jnp.take_along_axis(support, index, axis=0)
