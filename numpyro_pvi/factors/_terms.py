"""Terms: log densities whose every element depends on the latents through one or two affine predictors.

An observed site whose parameters are ``link^-1(a_n^T theta + c_n)`` is such a term (every GLM is), and so is a latent's
own prior when it depends on its coordinate and at most one more predictor (a HalfNormal scale, a Normal with an unknown
scale).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logit, ndtr, ndtri
from jaxtyping import Array, Float
from numpyro.distributions.transforms import biject_to

from ._model import TracedAt

# (link, inverse): a parameter p has predictor link(p). Tried in this order.
LINKS = {
    "identity": (lambda p: p, lambda u: u),
    "log": (jnp.log, jnp.exp),
    "logit": (logit, jax.nn.sigmoid),
    "softplus": (lambda p: p + jnp.log(-jnp.expm1(-p)), jax.nn.softplus),
    "probit": (ndtri, ndtr),
}
OWN_VALUE = "value"
# What a constructor computes from a distribution's parameters: no parameters themselves, and stale once one is
# replaced.
_COMPUTED = {dist.OrderedLogistic: ("probs",)}


@dataclasses.dataclass(frozen=True)
class Predictor:
    """One affine predictor: where it is read (a parameter's path, or ``value``), under which link, and whether rows share it."""

    path: str
    link: str
    shared: bool


@dataclasses.dataclass(frozen=True)
class DerivedLeaf:
    """A distribution parameter as ``link^-1(sum_k coefficients[k] u_k + constant)`` of the term's predictors."""

    path: str
    link: str
    coefficients: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class TermSpec:
    """What was found about one sample site: its predictors, and every parameter that moves with them."""

    site: str
    latent: bool
    predictors: tuple[Predictor, ...]
    leaves: tuple[DerivedLeaf, ...]
    # The partitioned batch axis: its key (plate, or labelled site) and place (negative); None where there is none.
    row_key: str | None = None
    row_dim: int | None = None
    # Whether the predictors are proved for all latents and parameters, and not found at a few points.
    proved: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TermData:
    """Arrays of one term on one chunk of rows; E elements (rows times the site's other batch axes)."""

    # The distribution at theta = 0; its moving parameters are replaced, its constant ones (known scales, totals) are
    # data.
    fn: Any
    # The observation, or None for a latent (whose value is its predictor).
    value: Any
    # Per predictor: Float["E D"], or Float["D"] when all rows share it; and its value at theta = 0.
    design: tuple
    offset: tuple
    # Per moving parameter: the part of its predictor that the term's predictors do not explain (a constant in theta).
    constant: tuple
    # numpyro.handlers.scale of the site.
    scale: Any


def leaf_paths(fn: dist.Distribution, prefix: str = "") -> list[tuple[str, int | None]]:
    """Names of a distribution's pytree leaves, in flattening order.

    Args:
        fn: a NumPyro distribution.
        prefix: path of the enclosing distributions.

    Returns:
        ``(path, event_dim)`` per leaf; ``event_dim`` is None for leaves that are not plain parameters (inside
        transforms).
    """
    paths: list[tuple[str, int | None]] = []
    # A mixture's inner parameters have an axis over its components, which is no axis of the mixture's own batch.
    mixture = isinstance(fn, dist.MixtureSameFamily | dist.MixtureGeneral)
    for name in type(fn).gather_pytree_data_fields():
        field = fn.__dict__.get(name)
        if isinstance(fn, dist.MaskedDistribution) and isinstance(field, bool):
            # `mask(False)` is part of the distribution's structure, and no leaf.
            continue
        if isinstance(field, dist.Distribution):
            inner = leaf_paths(field, f"{prefix}{name}/")
            paths += [(path, None) for path, _ in inner] if mixture else inner
            continue
        count = len(jax.tree.leaves(field))
        plain = hasattr(field, "dtype") or isinstance(field, (int, float))
        event_dim = _event_dim(fn, name, field) if plain else None
        paths += [(f"{prefix}{name}" + ("" if plain else f".{i}"), event_dim if plain else None) for i in range(count)]
    return paths


def _event_dim(fn: dist.Distribution, name: str, field: Any) -> int:
    """Event dimension of a parameter: its constraint's, or what sticks out of the batch shape where none is declared."""
    try:
        return fn.arg_constraints[name].event_dim
    except (KeyError, NotImplementedError):
        return max(0, jnp.ndim(field) - len(fn.batch_shape))


def leaves_by_path(fn: dist.Distribution) -> dict[str, Array]:
    """Every parameter of a distribution (its pytree leaves, less what it computes from the others) under its path."""
    names, computed = [path for path, _ in leaf_paths(fn)], _computed_paths(fn)
    return {n: jnp.asarray(leaf) for n, leaf in zip(names, jax.tree.leaves(fn), strict=True) if n not in computed}


def replace_leaves(fn: dist.Distribution, new: dict[str, Array]) -> dist.Distribution:
    """The same distribution with some parameters replaced."""
    names = [path for path, _ in leaf_paths(fn)]
    leaves, structure = jax.tree.flatten(fn)
    return _recompute(structure.unflatten([new.get(n, leaf) for n, leaf in zip(names, leaves, strict=True)]))


def _nested(fn: dist.Distribution) -> dict[str, dist.Distribution]:
    fields = ((name, fn.__dict__.get(name)) for name in type(fn).gather_pytree_data_fields())
    return {name: field for name, field in fields if isinstance(field, dist.Distribution)}


def _computed_paths(fn: dist.Distribution, prefix: str = "") -> set[str]:
    paths = {prefix + name for name in _COMPUTED.get(type(fn), ())}
    return paths.union(*(_computed_paths(inner, f"{prefix}{name}/") for name, inner in _nested(fn).items()))


def _recompute(fn: dist.Distribution) -> dist.Distribution:
    """Make a distribution again, from the inside out, where its constructor computes what its density reads."""
    if type(fn) in _COMPUTED:
        return type(fn)(**{name: getattr(fn, name) for name in fn.arg_constraints}, validate_args=False)
    for name, inner in _nested(fn).items():
        setattr(fn, name, _recompute(inner))
    return fn


def read_predictors(call: TracedAt, spec: TermSpec, point: Float[Array, "D"]) -> tuple[Array, ...]:
    """The term's predictors at a flat point: scalars when shared, else in the site's batch shape."""
    trace, _ = call.trace(point)
    fn = trace[spec.site]["fn"]
    values = []
    for predictor in spec.predictors:
        if predictor.path == OWN_VALUE:
            own = call.layout.unflatten(point)[spec.site]
            values.append(jnp.reshape(own, ()) if predictor.shared else jnp.broadcast_to(own, fn.batch_shape))
            continue
        leaf = LINKS[predictor.link][0](leaves_by_path(fn)[predictor.path])
        values.append(jnp.reshape(leaf, ()) if predictor.shared else jnp.broadcast_to(leaf, fn.batch_shape))
    return tuple(values)


def prepare_term(call: TracedAt, spec: TermSpec, few: bool = False, design: bool = True) -> TermData:
    """Read a term's design, offsets and constant parameters off the model.

    Args:
        call: the model on one chunk's rows (or on all arguments for a prior term).
        spec: what structure detection found.
        few: whether the call holds fewer elements than latents, so that reverse derivatives are cheaper.
        design: whether the design is wanted; without it that field is empty, and nothing is differentiated.

    Returns:
        The term's arrays. The design costs D tangents of the model (one reverse pass an element where they are few), once
        per preparation and not once a round.
    """
    dim = call.layout.dim
    origin = jnp.zeros((dim,), _float_dtype(call))
    if not design:
        offset, found = read_predictors(call, spec, origin), ()
    elif few:
        offset = read_predictors(call, spec, origin)
        rows = jax.jacrev(lambda z: read_predictors(call, spec, z))(origin)
        found = tuple(c.reshape((-1, dim) if c.ndim > 1 else (dim,)) for c in rows)
    else:
        offset, tangent = jax.linearize(lambda z: read_predictors(call, spec, z), origin)
        columns = jax.vmap(tangent)(jnp.eye(dim, dtype=origin.dtype))
        found = tuple(jnp.moveaxis(c, 0, -1).reshape((-1, dim) if c.ndim > 1 else (dim,)) for c in columns)
    flat_offset = tuple(o.reshape(-1) if o.ndim else o for o in offset)
    trace, _ = call.trace(origin)
    site = trace[spec.site]
    leaves = leaves_by_path(site["fn"])
    constant = []
    for leaf in spec.leaves:
        explained = sum(
            (c * o for c, o in zip(leaf.coefficients, offset, strict=True)), start=jnp.zeros((), origin.dtype)
        )
        basis = any(p.path == leaf.path for p in spec.predictors)
        constant.append(jnp.zeros(()) if basis else LINKS[leaf.link][0](leaves[leaf.path]) - explained)
    value = None if spec.latent else site["value"]
    scale = jnp.ones((), origin.dtype) if site["scale"] is None else jnp.asarray(site["scale"], origin.dtype)
    return TermData(site["fn"], value, found, flat_offset, tuple(constant), scale)


def term_log_prob(spec: TermSpec, data: TermData, predictors: tuple[Float[Array, "..."], ...]) -> Float[Array, "E"]:
    """Elementwise log density of a term at given predictor values, in nats.

    Args:
        spec: the term's structure.
        data: the term's arrays on one chunk.
        predictors: one Float[E] array per predictor, or a scalar where all rows share it.

    Returns:
        One log density per element; masked sites give zero where they are masked.
    """
    shape = data.fn.batch_shape
    shaped = tuple(jnp.broadcast_to(u, data_size(data)).reshape(shape) for u in predictors)
    new = {}
    for leaf, constant in zip(spec.leaves, data.constant, strict=True):
        linear = sum((c * u for c, u in zip(leaf.coefficients, shaped, strict=True) if c != 0.0), start=constant)
        new[leaf.path] = LINKS[leaf.link][1](linear)
    fn = replace_leaves(data.fn, new)
    if spec.latent:
        index = next(i for i, p in enumerate(spec.predictors) if p.path == OWN_VALUE)
        transform = biject_to(fn.support)
        value = transform(shaped[index])
        log_prob = fn.log_prob(value) + transform.log_abs_det_jacobian(shaped[index], value)
    else:
        log_prob = fn.log_prob(data.value)
    return jnp.broadcast_to(log_prob * data.scale, shape).reshape(-1)


def data_size(data: TermData) -> tuple[int]:
    """``(E,)``, the number of elements of a term on one chunk."""
    size = 1
    for length in data.fn.batch_shape:
        size *= length
    return (size,)


def _float_dtype(call: TracedAt):
    # The package follows the precision that is switched on, as NumPyro does; a float32 design under x64 would lose
    # digits.
    return jnp.result_type(float)
