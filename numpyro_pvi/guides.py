"""Guides: reading NumPyro's Gaussian AutoGuides as a family and a flat layout, and writing posteriors back as their params."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer import autoguide

from ._compiling import Program
from ._guide_setup import set_up
from ._numerics import scaled_cholesky, symmetrise
from .errors import GuideError, StateError
from .families import GaussianFamily, GaussianNatural, MultivariateNormalFamily, NormalFamily

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
    prefix = guide.prefix
    if isinstance(guide, autoguide.AutoNormal):
        loc = jnp.concatenate([full[f"{n}_{prefix}_loc"].reshape(-1) for n in names])
        return family.from_loc_sd(loc, jnp.concatenate([full[f"{n}_{prefix}_scale"].reshape(-1) for n in names]))
    inverse = np.argsort(guide_order(guide, names, shapes))
    loc = full[f"{prefix}_loc"][inverse]
    if not family.full:
        return family.from_loc_sd(loc, full[f"{prefix}_scale"][inverse])
    tril = full[f"{prefix}_scale_tril"][inverse]
    return family.from_loc_covariance(loc, tril @ tril.T)


def guide_param_names(guide: Any, names: tuple[str, ...]) -> set[str]:
    """Names under which a supported guide keeps its params."""
    prefix = guide.prefix
    if isinstance(guide, autoguide.AutoNormal):
        return {f"{n}_{prefix}_{part}" for n in names for part in ("loc", "scale")}
    scale = "scale_tril" if isinstance(guide, autoguide.AutoMultivariateNormal) else "scale"
    return {f"{prefix}_loc", f"{prefix}_{scale}"}


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
    own = list(guide._init_locs)
    return np.concatenate([np.arange(where[n].start, where[n].stop) for n in own])
