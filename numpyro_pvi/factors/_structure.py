"""What kind of function of the latents a factor is, found by looking at values on random rays, and its affine terms.

The tests run on numpy arrays that one compiled probe of the model returned: third differences along rays for "quadratic
in theta", second differences of a distribution's parameters under the usual links for "affine predictors". Values
decide, never Hessians at a point: a Laplace density has a zero Hessian wherever it is evaluated and is not Gaussian.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logit, ndtr, ndtri
from jaxtyping import Array, Float
from numpyro.distributions.transforms import biject_to

from ._model import TracedAt
from ._proof import LATENTS, Form

# ---------------------------------------------------------------------------------------------------------------- terms
# Terms: log densities whose every element depends on the latents through one or two affine predictors.
#
# An observed site whose parameters are ``link^-1(a_n^T theta + c_n)`` is such a term (every GLM is), and so is a
# latent's own prior when it depends on its coordinate and at most one more predictor (a HalfNormal scale, a Normal with
# an unknown scale). A prior with an unknown location and an unknown scale depends on the distance from the location, and on
# the scale.

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
    """One affine predictor: where it is read (a parameter's path, or ``value``), under which link, and whether rows share it.

    ``location``: of a latent's value, the path of the location that it is measured from; empty where it is the value itself.
    """

    path: str
    link: str
    shared: bool
    location: str = ""


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
    # How many axes of its events, which `to_event` made of independent numbers, are elements of the term.
    apart: int = 0


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


def in_parts(fn: dist.Distribution) -> tuple[dist.Distribution, int]:
    """A distribution of independent numbers without the ``to_event`` around it, and how many axes that made an event of."""
    if not isinstance(fn, dist.Independent):
        return fn, 0
    inner, axes = in_parts(fn.base_dist)
    return inner, axes + fn.reinterpreted_batch_ndims


def leaf_paths(fn: dist.Distribution, prefix: str = "") -> list[tuple[str, int | None]]:
    """Names of a distribution's pytree leaves, in flattening order.

    Returns ``(path, event_dim)`` per leaf; ``event_dim`` is None for leaves that are not plain parameters (inside transforms).
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
    fn = in_parts(fn)[0] if spec.apart else fn
    values = []
    for predictor in spec.predictors:
        if predictor.path == OWN_VALUE:
            own = call.layout.unflatten(point)[spec.site]
            own = own - leaves_by_path(fn)[predictor.location] if predictor.location else own
            values.append(jnp.reshape(own, ()) if predictor.shared else jnp.broadcast_to(own, fn.batch_shape))
            continue
        leaf = LINKS[predictor.link][0](leaves_by_path(fn)[predictor.path])
        values.append(jnp.reshape(leaf, ()) if predictor.shared else jnp.broadcast_to(leaf, fn.batch_shape))
    return tuple(values)


def prepare_term(call: TracedAt, spec: TermSpec, few: bool = False, design: bool = True) -> TermData:
    """Read a term's design, offsets and constant parameters off the model.

    ``call``: the model on one chunk's rows (or on all arguments for a prior term); ``spec``: what structure detection found;
    ``few``: whether the call holds fewer elements than latents, so that reverse derivatives are cheaper; ``design``: whether
    the design is wanted; without it that field is empty, and nothing is differentiated. Returns the term's arrays. The design
    costs D tangents of the model (one reverse pass an element where they are few), once per preparation and not once a round.
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
    fn = in_parts(site["fn"])[0] if spec.apart else site["fn"]
    leaves = leaves_by_path(fn)
    constant = []
    for leaf in spec.leaves:
        explained = sum(
            (c * o for c, o in zip(leaf.coefficients, offset, strict=True)), start=jnp.zeros((), origin.dtype)
        )
        # A location from which values are measured is 0.
        basis = any(leaf.path in (p.path, p.location) for p in spec.predictors)
        constant.append(jnp.zeros(()) if basis else LINKS[leaf.link][0](leaves[leaf.path]) - explained)
    value = None if spec.latent else site["value"]
    scale = jnp.ones((), origin.dtype) if site["scale"] is None else jnp.asarray(site["scale"], origin.dtype)
    scale = scale.reshape(scale.shape + (1,) * spec.apart) if scale.ndim else scale
    return TermData(fn, value, found, flat_offset, tuple(constant), scale)


def term_log_prob(spec: TermSpec, data: TermData, predictors: tuple[Float[Array, "..."], ...]) -> Float[Array, "E"]:
    """Elementwise log density of a term at given predictor values, in nats.

    ``spec``: the term's structure; ``data``: the term's arrays on one chunk; ``predictors``: one Float[E] array per predictor,
    or a scalar where all rows share it. Returns one log density per element; masked sites give zero where they are masked.
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


def unread_held(spec: TermSpec, data: TermData) -> TermData:
    """The same term, in which nothing is differentiated that :func:`term_log_prob` does not read of the distribution.

    That is what predictors stand for, and what constructors compute. ``spec``: the term's structure; ``data``: its arrays.
    """
    unread = {leaf.path for leaf in spec.leaves} | _computed_paths(data.fn)
    leaves, structure = jax.tree.flatten(data.fn)
    paths = [path for path, _ in leaf_paths(data.fn)]
    held = [jax.lax.stop_gradient(x) if path in unread else x for path, x in zip(paths, leaves, strict=True)]
    return dataclasses.replace(data, fn=structure.unflatten(held))


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


# ------------------------------------------------------------------------------------------------------------ structure

# Points on each ray: base + k * step, k = 0..3 (the base is shared by all rays).
POINTS_PER_RAY = 4
# Largest number of affine predictors per element that quadrature is used for.
MAX_PREDICTORS = 2
_LINK_ORDER = ("identity", "log", "logit", "softplus", "probit")


@dataclasses.dataclass(frozen=True)
class Rays:
    """How the rows of a probe's point matrix form rays: ``index[r, k]`` is the k-th point of ray r.

    Points come in ``blocks`` of equal length, each at other values of the model's parameters.
    """

    index: np.ndarray
    blocks: int = 1

    @property
    def points(self) -> np.ndarray:
        """Every distinct point that lies on a ray."""
        return np.unique(self.index)


@dataclasses.dataclass(frozen=True)
class SiteFacts:
    """Static facts of one sample site, read from an abstract trace."""

    name: str
    latent: bool
    discrete: bool
    batch_shape: tuple[int, ...]
    event_dim: int
    # Event dimension of each parameter, by path; None for leaves inside transforms.
    leaf_event_dims: tuple[tuple[str, int | None], ...]
    elementwise: bool
    # The partitioned batch axis: its key (plate, or labelled site) and place (negative); None where there is none.
    row_key: str | None = None
    row_dim: int | None = None
    # False for a distribution that is never Gaussian in its parameters. Under a narrow prior the rays are short, and a
    # Laplace density whose kinks they do not reach, or a Student-t far from its bend, has no third difference.
    may_be_quadratic: bool = True
    # How many axes of its events are independent numbers, which count as axes of the batch here.
    apart: int = 0
    # Path of the parameter that values are measured from where the density depends on the difference alone; or empty.
    location: str = ""


def is_quadratic(values: np.ndarray, rays: Rays) -> bool:
    """Whether values are quadratic along every ray.

    ``values``: Float[P, ...]; a log density (per row, or summed) at each probe point. Returns True when every third difference
    vanishes to rounding. A value that overflows on a ray is not quadratic.
    """
    values = np.asarray(values)
    if not np.all(np.isfinite(values[rays.points])):
        return False
    tolerance = 2e-4 if values.dtype == np.float32 else 1e-9
    v = np.asarray(values, np.float64)[rays.index]
    third = v[:, 0] - 3 * v[:, 1] + 3 * v[:, 2] - v[:, 3]
    size = np.abs(v).sum(axis=1)
    # Values may be small because large parts cancel; the largest row on a ray stands for the rounding of the parts.
    parts = size if size.ndim == 1 else size.max(axis=tuple(range(1, size.ndim)), keepdims=True)
    return bool(np.all(np.abs(third) <= tolerance * (size + 0.02 * parts) + 1e-30))


def moves(values: np.ndarray, rays: Rays) -> bool:
    """Whether an array of parameters changes anywhere along a ray."""
    v = np.asarray(values)[rays.index]
    with np.errstate(invalid="ignore"):
        return not bool(np.all((v == v[:, :1]) | (np.isnan(v) & np.isnan(v[:, :1]))))


def judge_quadratic(values: np.ndarray, rays: Rays, form: Form, possible: bool, first: Any = None) -> str:
    """Whether a log density is quadratic in the latents.

    ``values``: Float[P, ...] at each probe point, perhaps of some rows; ``first``: the first point's values of all rows; those
    of ``values`` by default. Returns "proved" for all latents and parameters, "found" at the points looked at, or "" where it
    is not.
    """
    if not possible:
        return ""
    if form.at_most(2) and np.all(np.isfinite(np.asarray(values)[0] if first is None else first)):
        return "proved"
    if form.forbids(np.asarray(values).dtype == np.float32, LATENTS):
        return ""
    return "found" if is_quadratic(values, rays) else ""


def affine_link(values: np.ndarray, rays: Rays) -> tuple[str, np.ndarray] | None:
    """The first link under which a parameter is affine in the latents.

    ``values``: Float[P, ...]; the parameter at each probe point. Returns ``(link, predictor values)``, or None. Entries where
    the link saturates are left out of the test, but a link needs usable entries that move on at least one ray.
    """
    values = np.asarray(values)
    for name in _LINK_ORDER:
        predictor = _apply_link(name, values)
        if predictor is not None and _is_affine(predictor, rays, values.dtype):
            return name, predictor
    return None


def find_term(
    facts: SiteFacts,
    leaves: dict[str, np.ndarray],
    own: np.ndarray | None,
    rays: Rays,
    forms: dict[str, Form] | None = None,
    first: dict[str, Any] | None = None,
) -> TermSpec | None:
    """Find at most two affine predictors that every element of a site depends on.

    ``leaves``: Float[P, ...] per parameter path, perhaps of some rows; ``own``: Float[P, ...], a latent's unconstrained value
    at each point; None for an observed site; ``forms``: what is proved of every parameter, by path; None where nothing is;
    ``first``: the first point's values of all rows, by path; those of ``leaves`` by default. Returns the term's structure, or
    None when some parameter is not affine under any link or more than two predictors remain.
    """
    if facts.event_dim or (facts.latent and not facts.elementwise):
        return None
    first = first or {path: values[0] for path, values in leaves.items()}
    if own is None:
        return _with_parameters(facts, _Basis(), leaves, rays, forms, first)
    flat = np.asarray(own, np.float64).reshape(own.shape[0], -1)
    count = _num_elements(facts)
    value = np.broadcast_to(flat, (flat.shape[0], count))
    predictor = Predictor(OWN_VALUE, "identity", count == 1)
    found = _with_parameters(facts, _Basis(((predictor, value),)), leaves, rays, forms, first)
    if found is not None or not facts.location:
        return found
    location = leaves[facts.location]
    judged = _judge_link(location, rays, None if forms is None else forms[facts.location], first[facts.location])
    if judged is None or judged[0] != "identity":
        return None
    apart = value - _broadcast_elements(judged[1], facts.batch_shape)
    predictor = dataclasses.replace(predictor, location=facts.location)
    basis = _Basis(((predictor, apart),), (DerivedLeaf(facts.location, "identity", (0.0,)),), judged[2])
    rest = {path: values for path, values in leaves.items() if path != facts.location}
    return _with_parameters(facts, basis, rest, rays, forms, first)


@dataclasses.dataclass(frozen=True)
class _Basis:
    """What a search for predictors begins with: predictors and their values, parameters made of them, and whether it is proved."""

    predictors: tuple[tuple[Predictor, np.ndarray], ...] = ()
    leaves: tuple[DerivedLeaf, ...] = ()
    proved: bool = True


def _num_elements(facts: SiteFacts) -> int:
    return int(np.prod(facts.batch_shape)) if facts.batch_shape else 1


def _with_parameters(
    facts: SiteFacts,
    start: _Basis,
    leaves: dict[str, np.ndarray],
    rays: Rays,
    forms: dict[str, Form] | None,
    first: dict[str, Any],
) -> TermSpec | None:
    """A term of the predictors that there are and those that its parameters add; None where these are too many."""
    basis, derived, proved = list(start.predictors), list(start.leaves), start.proved
    event_dims = dict(facts.leaf_event_dims)
    # Whole-row parameters first, so that a row's own predictor becomes the basis and derived ones are written through
    # it.
    for path in sorted(leaves, key=lambda p: (p.count("/"), p.startswith("_"), p)):
        values = leaves[path]
        form = None if forms is None else forms[path]
        if not (form is not None and _may_move(form)) and not moves(values, rays):
            if form is not None and not form.constant:
                if not form.predictor_link and form.forbids(values.dtype == np.float32, LATENTS):
                    return None
                # It may be the data that hold it still.
                proved = False
            continue
        found = _judge_link(values, rays, form, first[path]) if event_dims.get(path) == 0 else None
        if found is None:
            return None
        link, predictor, certain = found
        spread = _broadcast_elements(predictor, facts.batch_shape)
        # What stands still now may move when a parameter does, and is then no multiple of the others.
        still = not moves(values, rays)
        combination = None if still else _combine([b for _, b in basis], spread, rays)
        # That it is a multiple of the others may be the data's doing, or a parameter's.
        proved = proved and certain and combination is None
        if combination is None:
            if len(basis) == MAX_PREDICTORS:
                return None
            basis.append((Predictor(path, link, values[0].size == 1), spread))
            combination = (0.0,) * (len(basis) - 1) + (1.0,)
        derived.append(DerivedLeaf(path, link, combination))
    if not basis:
        return None
    width = len(basis)
    padded = tuple(
        DerivedLeaf(d.path, d.link, d.coefficients + (0.0,) * (width - len(d.coefficients))) for d in derived
    )
    names = tuple(p for p, _ in basis)
    proved = proved and forms is not None
    return TermSpec(facts.name, facts.latent, names, padded, facts.row_key, facts.row_dim, proved, facts.apart)


def _may_move(form: Form) -> bool:
    """Whether a parameter of the model decides whether the latents move it."""
    return not form.constant and bool(form.labels - {LATENTS})


def _judge_link(values: np.ndarray, rays: Rays, form: Form | None, first: Any) -> tuple[str, np.ndarray, bool] | None:
    """The link under which a parameter is affine, its predictor, and whether that is proved; None where there is none."""
    values = np.asarray(values)
    if form is not None and form.predictor_link:
        predictor = _apply_link(form.predictor_link, values)
        if predictor is not None and _has_offsets(form.predictor_link, first):
            return form.predictor_link, predictor, True
    elif form is not None and form.forbids(values.dtype == np.float32, LATENTS):
        return None
    found = affine_link(values, rays)
    return None if found is None else (*found, False)


def _has_offsets(link: str, values: Any) -> bool:
    """Whether every entry has a predictor: none is zero, or of the wrong sign, for all latents."""
    with np.errstate(all="ignore"):
        return link == "identity" or bool(np.all((values > 0) & np.isfinite(values)))


def _apply_link(name: str, values: np.ndarray) -> np.ndarray | None:
    with np.errstate(all="ignore"):
        v = np.asarray(values, np.float64)
        if name == "identity":
            return v
        if name == "log":
            return np.where((v > 1e-30) & (v < 1e30), np.log(v), np.nan) if np.nanmin(v) >= 0 else None
        if name == "softplus":
            return np.where((v > 1e-4) & (v < 1e30), v + np.log(-np.expm1(-v)), np.nan) if np.nanmin(v) >= 0 else None
        if np.nanmin(v) < 0 or np.nanmax(v) > 1:
            return None
        inside = (v > 1e-3) & (v < 1 - 1e-3)
        if name == "logit":
            return np.where(inside, np.log(v) - np.log1p(-v), np.nan)
        return np.where(inside, np.asarray(LINKS["probit"][0](v), np.float64), np.nan)


def _is_affine(predictor: np.ndarray, rays: Rays, dtype: Any) -> bool:
    u = predictor.reshape(predictor.shape[0], -1)[rays.index]
    single = dtype == np.float32
    with np.errstate(all="ignore"):
        second = np.stack([u[:, 0] - 2 * u[:, 1] + u[:, 2], u[:, 1] - 2 * u[:, 2] + u[:, 3]], axis=1)
        span = np.stack([_span(u[:, :3]), _span(u[:, 1:])], axis=1)
        size = np.max(np.abs(u), axis=1, keepdims=True)
        # A row's predictor may be small because large parts cancel: the rounding is that of the parts, which the largest
        # row on the ray stands for.
        parts = np.max(np.where(np.isfinite(size), size, 0.0), axis=-1, keepdims=True)
        # Rounding of the parameter itself, and of the sums that made it.
        allowed = (1e-3 if single else 1e-8) * span + (2e-5 if single else 1e-11) * (1 + size)
        allowed = allowed + (5e-6 if single else 1e-13) * parts
        usable = np.isfinite(second) & np.isfinite(span)
        informative = usable & (span > 10 * allowed)
        wrong = usable & (np.abs(second) > allowed)
    if not np.any(informative):
        return False
    # Every element must have been seen to move somewhere, or not move at all.
    return not bool(np.any(wrong))


def _span(u: np.ndarray) -> np.ndarray:
    return np.max(u, axis=1) - np.min(u, axis=1)


def _broadcast_elements(values: np.ndarray, batch_shape: tuple[int, ...]) -> np.ndarray:
    points = values.shape[0]
    inner = values.reshape((points,) + (1,) * (len(batch_shape) - values.ndim + 1) + values.shape[1:])
    return np.broadcast_to(inner, (points, *batch_shape)).reshape(points, -1)


def _combine(basis: list[np.ndarray], target: np.ndarray, rays: Rays) -> tuple[float, ...] | None:
    """Coefficients (the same for all elements, up to a constant per element) that give the target from the basis."""
    if not basis:
        return None
    usable = np.all(np.isfinite(np.stack([*basis, target])), axis=0)
    usable &= np.isin(np.arange(target.shape[0]), rays.points)[:, None]
    # The constants may depend on the model's parameters, and so on the block.
    usable = usable.reshape(rays.blocks, -1, usable.shape[1])
    count = np.maximum(usable.astype(np.float64).sum(axis=1, keepdims=True), 1.0)

    def centre(x):
        x = np.where(usable, x.reshape(usable.shape), 0.0)
        return np.where(usable, x - x.sum(axis=1, keepdims=True) / count, 0.0).reshape(-1)

    matrix = np.stack([centre(b) for b in basis], axis=1)
    wanted = centre(target)
    coefficients, *_ = np.linalg.lstsq(matrix, wanted, rcond=1e-9)
    rounded = np.where(np.abs(coefficients - np.round(coefficients)) < 1e-3, np.round(coefficients), coefficients)
    residual = np.abs(wanted - matrix @ rounded).max()
    return tuple(float(c) for c in rounded) if residual <= 1e-3 * max(np.abs(wanted).max(), 1e-12) else None
