"""One compiled look at a model: prior draws, values and parameters along rays, and the chunks beside the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import biject_to

from .._compiling import look, look_again, loops_on
from .._numerics import grad, in_batches
from ..handlers import FullPlates, RowAxes
from ._arguments import ReadByValue, is_dynamic, split_arguments
from ._chunks import GroupMasks, Packing, Reading
from ._model import (
    DrawImproper,
    EnumeratedRows,
    Layout,
    ModelCall,
    base_distribution,
    is_latent,
    is_observed,
    latent_log_density,
    outside_log_likelihood,
    row_log_likelihood,
    rows_first,
    site_log_prob,
    with_wide_observations,
)
from ._proof import LATENTS, Form, TracedLook, forms_of, is_guard, marked, moved_values, trace_look, unmarked
from ._structure import (
    MAX_PREDICTORS,
    POINTS_PER_RAY,
    Rays,
    SiteFacts,
    TermSpec,
    find_term,
    in_parts,
    leaf_paths,
    leaves_by_path,
)

_NUM_DRAWS = 64
# Directions are prior deviations; five decades of step cover links that saturate and links that look linear.
_RAY_SCALES = (1e-4, 1e-2, 0.3, 3.0, 30.0)
# One more than a term may have predictors: on two directions any third number is a sum of two others.
NUM_DIRECTIONS = MAX_PREDICTORS + 1
# The farthest step where the model has loops whose length is known only as they run: a solver of differential equations takes as
# many steps as its rates are large, without end at e^30.
_REACH_OF_LOOPS = 3.0
_CHECK_STEPS = (0.3, 0.01)
# How far to both sides of the prior's location, in prior sds, densities are looked at as well: a link may overflow on one side.
_ASIDE = 3.0
# Arguments and points looked at together.
_LOOK_BYTES = 1 << 28
# NumPyro's distributions whose log density can be quadratic in their parameters, once expansions and transforms are
# taken off; Unit is numpyro.factor's, and a flat prior is quadratic where its support is the whole space.
GAUSSIAN = (
    dist.Normal,
    dist.MultivariateNormal,
    dist.LowRankMultivariateNormal,
    dist.MatrixNormal,
    dist.GaussianRandomWalk,
    dist.GaussianStateSpace,
    dist.CAR,
    dist.ImproperUniform,
    dist.Unit,
)
# NumPyro's distributions of single numbers whose density depends on the distance of the value from ``loc``.
LOCATION_FAMILIES = (
    dist.Normal,
    dist.StudentT,
    dist.Cauchy,
    dist.Laplace,
    dist.Logistic,
    dist.Gumbel,
    dist.SoftLaplace,
    dist.AsymmetricLaplace,
)
# Rows in which structure is looked for: a pass over millions for every point would take gigabytes and seconds. What is not proved
# is verified at draws from q over all rows.
_MOST_ROWS = 1 << 13


@dataclasses.dataclass(frozen=True)
class Probe:
    """Host-side (numpy) results of :func:`run_probe`; the leading axis P runs over probe points."""

    rays: Rays
    points: np.ndarray
    rows: dict[str, np.ndarray]
    latents: dict[str, np.ndarray]
    leaves: dict[str, dict[str, np.ndarray]]
    facts: dict[str, SiteFacts]
    # Of more than _MOST_ROWS rows these are some, evenly; the first point's are all of them.
    first_rows: dict[str, np.ndarray]
    first_leaves: dict[str, dict[str, np.ndarray]]
    # What is proved of each of these, for all latents and parameters.
    row_forms: dict[str, Form]
    latent_forms: dict[str, Form]
    leaf_forms: dict[str, dict[str, Form]]
    # The rows' sites whose log density may have a kink in the latents, or in rows' own.
    kinked: frozenset[str]
    # Per-row reference values at the check points (and again at moved parameters), and what the chunks gave, summed over
    # observed sites: Float[K, N].
    reference: np.ndarray
    chunked: np.ndarray
    prior_loc: np.ndarray
    prior_sd: np.ndarray
    params: dict
    # Names of ``numpyro.param`` sites that the log density does not depend on, whatever their values.
    inert: tuple[str, ...]
    # Float[2]: all rows' log density to both sides of the prior's location; structure is not looked for there.
    sides: np.ndarray
    # Prior location and sd of every unit's local latents, Float[U K], and what couples them; None when there are none.
    local: LocalProbe | None = None

    def own(self, name: str, layout) -> np.ndarray:
        """A latent's unconstrained value at every probe point."""
        shape = layout.shapes[layout.names.index(name)]
        return self.points[:, layout.slice_of(name)].reshape(-1, *shape)

    def depends_on_others(self, name: str) -> bool:
        """Whether the parameters of a latent's prior move with other latents."""
        return any(not form.constant for form in self.leaf_forms[name].values())


class LocalProbe(NamedTuple):
    """What draws and derivatives say about latents inside the partitioned plate."""

    loc: np.ndarray
    sd: np.ndarray
    # Derivatives of the log density that must vanish, and the size of those that they are parts of.
    between_units: np.ndarray
    between_groups: np.ndarray
    outside: np.ndarray
    size: np.ndarray


def draw_trace(model, key, args: tuple, kwargs: dict, params: dict) -> dict:
    """A trace of the model with its latents drawn from the prior, improper ones replaced by standard normals."""
    seeded = handlers.seed(handlers.substitute(DrawImproper(FullPlates(model), key), data=params), key)
    return with_wide_observations(handlers.trace(seeded).get_trace(*args, **kwargs))


# Static arguments that are what they are by their values.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), ReadByValue)


def run_probe(
    call: ModelCall,
    trace: dict,
    rows: RowAxes,
    reading: Reading,
    packing: Packing | GroupMasks,
    key: Array,
    params: dict | None,
    known: Any = None,
) -> Probe:
    """Evaluate the model on rays through the prior, whole and in chunks, in one compiled program.

    ``call``: the model, its layout and arguments; ``call.params`` is replaced by initial values when ``params`` is None;
    ``trace``: an abstract trace; ``params``: given values of ``numpyro.param`` sites, or None; ``known``: hashable, what
    ``call.model`` is; None where that cannot be told, and the probe is traced anew. Returns the probe, on the host.
    """
    arrays, statics = split_arguments(call.args, call.kwargs)
    facts = {n: _facts(n, s, rows, parts=True) for n, s in trace.items() if _is_sampled(s)}

    def make() -> tuple:
        own_sites = {n: s for n, s in trace.items() if s["type"] == "param"}
        static = _StaticArgs(call, rows, reading, params, own_sites, facts)
        traced = trace_look(static.look_at, arrays, static.abstract_params(), call)
        return partial(static.probe, traced), traced

    # Values of params, and of rows' own latents, would be constants of the trace; of other objects than plain values nothing says
    # whether they are what they were.
    plain = all(x is None or isinstance(x[0], _PLAIN) for x in statics[1])
    still = known is not None and plain and params is None and not call.params and call.local is None
    # 1 and True are equal, and may be traced apart.
    kinds = tuple(None if x is None else type(x[0]) for x in statics[1])
    about = (known, rows, reading, call.layout, call.local_layout, statics, kinds) if still else None
    found, traced = look_again(about, make, arrays, packing, key)
    found = jax.device_get(found)
    return _on_host(found, traced, packing, {n: facts_of_some_rows(f) for n, f in facts.items()})


def _is_sampled(site: dict) -> bool:
    return is_latent(site) or is_observed(site)


def _on_host(found: dict, look: TracedLook, packing: Packing | GroupMasks, facts: dict[str, SiteFacts]) -> Probe:
    chunked = found["reference"]
    if isinstance(packing, Packing):
        chunked = np.zeros_like(chunked)
        mask = np.asarray(packing.mask)
        for point in range(chunked.shape[0]):
            chunked[point, np.asarray(packing.rows)[mask]] = found["chunks"][point][mask]
    return Probe(
        rays=rays_of(2 if found["params"] else 1),
        points=found["points"],
        rows=found["rows"],
        latents=found["latents"],
        leaves={n: dict(leaves) for n, leaves in found["leaves"].items()},
        facts=facts,
        first_rows=found["first"]["rows"],
        first_leaves={n: dict(leaves) for n, leaves in found["first"]["leaves"].items()},
        row_forms=look.forms["rows"],
        latent_forms=look.forms["latents"],
        leaf_forms=look.forms["leaves"],
        kinked=frozenset(
            n for n, form in (look.with_own or look.forms)["rows"].items() if form.kink and not is_guard(form.kink)
        ),
        reference=found["reference"],
        chunked=chunked,
        prior_loc=found["loc"],
        prior_sd=found["sd"],
        params=found["params"],
        inert=tuple(n for n in found["params"] if n not in look.labels),
        sides=found["sides"],
        local=None if found["local"] is None else LocalProbe(*found["local"]),
    )


@dataclasses.dataclass(frozen=True)
class _StaticArgs:
    call: ModelCall
    rows: RowAxes
    reading: Reading
    params: dict | None
    # The model's ``numpyro.param`` sites, of an abstract trace.
    sites: dict
    facts: dict[str, SiteFacts] = dataclasses.field(default_factory=dict)

    def probe(self, look: TracedLook, arrays, packing: Packing | GroupMasks, key) -> dict:
        """The traced body: prior draws, rays, values, parameters and the additive comparison."""
        call = dataclasses.replace(self.call, **self._arguments(arrays))
        draws_key, direction_key = jax.random.split(key)
        params = self._initial_params(call, draws_key) if self.params is None else self.params
        call = dataclasses.replace(call, params=params)
        draws, own = jax.vmap(lambda k: self._draw(call, k))(jax.random.split(draws_key, _NUM_DRAWS))
        loc, sd = _robust_moments(draws)
        own_loc = own_sd = None
        if own is not None:
            own_loc, own_sd = _robust_moments(own)
            call = dataclasses.replace(call, local=own_loc)
        noise = jax.random.normal(direction_key, (NUM_DIRECTIONS, call.layout.dim), loc.dtype)
        looked = _with_sides(ray_points(loc, sd * noise, look.closed.jaxpr), loc, sd, noise[0])
        # What holds at the parameters' start alone is told from what holds for all of their values.
        several = [params, moved_values(params, self.sites, direction_key)] if params else [params]

        def along(params):
            return _over_points(lambda z: self._some_rows(look(arrays, params, call.local, z)), looked, arrays)

        seen, sides = _apart([along(p) for p in several])
        first = {kind: jax.tree.map(lambda x: x[0], seen[kind]) for kind in ("rows", "leaves")}
        if any(_samples(f) for f in self.facts.values()):
            first = look(arrays, params, call.local, looked[0])
        points = jnp.concatenate([looked[:-2]] * len(several))
        checks = loc + jnp.asarray(_CHECK_STEPS, loc.dtype)[:, None] * sd * noise[: len(_CHECK_STEPS)]
        own_checks, local = None, None
        if own_loc is not None and own_sd is not None:
            noise = jax.random.normal(jax.random.fold_in(direction_key, 1), own_loc.shape, loc.dtype)
            own_checks = own_loc + jnp.asarray(_CHECK_STEPS, loc.dtype)[:, None, None] * own_sd * noise
            at = dataclasses.replace(call, local=own_checks[0])
            local = (own_loc, own_sd, *self._couplings(at, packing, checks[0], noise))

        def at_checks(look):
            return jax.tree.map(lambda *x: jnp.concatenate(x), *(at_params(look, p) for p in several))

        def at_params(look, params):
            at = dataclasses.replace(call, params=params)
            if own_checks is None:
                return _over_points(lambda z: look(at, z), checks, arrays)
            return jax.vmap(lambda z, own: look(dataclasses.replace(at, local=own), z))(checks, own_checks)

        reference = at_checks(self._all_rows)
        chunks = None
        if isinstance(packing, Packing):
            chunks = at_checks(lambda at, z: self._chunk_rows(at, packing, z))
        return {
            "points": points,
            "rows": seen["rows"],
            "latents": seen["latents"],
            "leaves": seen["leaves"],
            "first": {kind: first[kind] for kind in ("rows", "leaves")},
            "reference": reference,
            "chunks": chunks,
            "loc": loc,
            "sd": sd,
            "params": params,
            "local": local,
            "sides": sides,
        }

    def _some_rows(self, seen: dict) -> dict:
        """What a look saw, of some rows only where there are many."""
        rows, leaves = dict(seen["rows"]), dict(seen["leaves"])
        for name, facts in self.facts.items():
            if not _samples(facts) or name not in rows:
                continue
            rows[name] = rows[name][_chosen_rows(facts)]
            leaves[name] = leaves_of_some_rows(facts, leaves[name])
        return {**seen, "rows": rows, "leaves": leaves}

    def _arguments(self, arrays) -> dict:
        leaves, structure = jax.tree.flatten((self.call.args, self.call.kwargs))
        remaining = iter(arrays)
        args, kwargs = structure.unflatten([next(remaining) if is_dynamic(x) else x for x in leaves])
        return {"args": args, "kwargs": kwargs}

    def _initial_params(self, call: ModelCall, key) -> dict:
        trace = draw_trace(call.model, key, call.args, call.kwargs, {})
        return {n: jax.tree.map(_real, s["value"]) for n, s in trace.items() if s["type"] == "param"}

    def _draw(self, call: ModelCall, key) -> tuple[Float[Array, "D"], Float[Array, "U K"] | None]:
        trace = draw_trace(call.model, key, call.args, call.kwargs, call.params)

        def unconstrained(names):
            return {n: biject_to(trace[n]["fn"].support).inv(trace[n]["value"]) for n in names}

        dtype, local = jnp.result_type(float), call.local_layout
        own = None if local is None else local.flatten(unconstrained(local.names)).astype(dtype)
        return call.layout.flatten(unconstrained(call.layout.names)).astype(dtype), own

    def _couplings(self, call: ModelCall, packing: Packing | GroupMasks, point, noise: Float[Array, "U K"]) -> tuple:
        """Derivatives in local latents that vanish if every one of them belongs to one unit of one group.

        A unit's Hessian block is found by one tangent for all units at once, which is right only if the Hessian has no
        block between two units: then a random product agrees. With random weights on the groups' rows, a local latent's
        slope is its own group's weight times the slope without weights.
        """
        plan_rows, layout, weights = self.rows, call.local_layout, None
        if isinstance(packing, GroupMasks):
            group = packing.group_of_row
            draws = jax.random.uniform(jax.random.key(3), (packing.chunk_group.shape[0] + 1,), noise.dtype, 0.5, 1.5)
            weights = {key: draws[index] for key, index in group.items()}

        def inside(own, weighted):
            terms = row_log_likelihood(dataclasses.replace(call, local=own), point, plan_rows)
            parts = (jnp.sum(v * weights[k] if weighted and weights is not None else v) for k, v in terms.values())
            return sum(parts, start=jnp.zeros((), point.dtype))

        def outside(own):
            at = dataclasses.replace(call, local=own)
            latents = latent_log_density(at, point)
            rest = outside_log_likelihood(at, point, plan_rows)
            return sum((latents[n] for n in call.layout.names), start=rest)

        slope = grad(lambda own: inside(own, False))
        _, tangent = jax.linearize(slope, call.local)
        columns = [tangent(jnp.zeros_like(noise).at[:, k].set(1.0)) for k in range(layout.width)]
        blocks = sum(c * noise[:, k : k + 1] for k, c in enumerate(columns))
        size = jnp.abs(slope(call.local)) + sum(jnp.abs(c) for c in columns)
        across = jnp.zeros_like(noise)
        if weights is not None:
            across = grad(lambda own: inside(own, True))(call.local)
            across = across - weights[layout.key][:, None] * slope(call.local)
        return tangent(noise) - blocks, across, grad(outside)(call.local), size

    def abstract_params(self) -> dict:
        """Shapes and dtypes of the parameters' values."""
        values = {n: s["value"] for n, s in self.sites.items()} if self.params is None else self.params
        return jax.eval_shape(partial(jax.tree.map, _real), values)

    def look_at(self, arrays: list, params: dict, local: Any, point: Array) -> dict:
        """Log densities of rows, latents and all else, and every distribution's parameters, at a flat point."""
        call = dataclasses.replace(self.call, **self._arguments(arrays), params=params, local=local)
        trace, jacobians = call.trace(point)
        rows, latents, leaves, outside = {}, {}, {}, {}
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            density, axis = site_log_prob(site, jacobians.get(name)), self.rows.of(site)
            if is_latent(site):
                latents[name] = jnp.sum(density)
            elif axis is None:
                outside[name] = jnp.sum(density)
            if axis is not None:
                rows[name] = rows_first(density, axis.dim)
            own = self.facts.get(name)
            leaves[name] = leaves_by_path(in_parts(site["fn"])[0] if own is not None and own.apart else site["fn"])
        return {"rows": rows, "latents": latents, "leaves": leaves, "outside": outside}

    def _all_rows(self, call: ModelCall, point) -> Float[Array, "N"]:
        # Only what rows own: with a chunk's arguments a shared latent's prior may have another shape than its value.
        trace, jacobians = call.trace(point)
        rows = []
        for name, site in trace.items():
            if site["type"] == "sample" and (axis := self.rows.of(site)) is not None:
                rows.append(rows_first(site_log_prob(site, jacobians.get(name)), axis.dim))
        if len(self.rows.plates) > 1:
            return jnp.concatenate(rows)
        return sum(rows, start=jnp.zeros((1,) if self.rows.whole else (), point.dtype))

    def _chunk_rows(self, call: ModelCall, packing: Packing, point) -> Float[Array, "C R"]:
        def chunk(chunk):
            return self._all_rows(self.reading.call(call, chunk), point)

        return in_batches(chunk, packing.chunks, 16)


def _real(value) -> Array:
    """A param's initial value; one written as an integer is a number to be fitted like any other."""
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.result_type(float))


def ray_steps() -> Float[np.ndarray, "P"]:
    """How many sds every point of a block lies from the first, which is the prior's location."""
    steps = [s * k / (POINTS_PER_RAY - 1) for s in _RAY_SCALES for k in range(1, POINTS_PER_RAY)]
    return np.asarray([0.0, *steps * NUM_DIRECTIONS])


def _facts(name: str, site: dict, rows: RowAxes, parts: bool = False) -> SiteFacts:
    """What is known of a site beforehand. ``parts``: whether independent numbers of a latent's event are elements of it."""
    axis, latent = rows.of(site), is_latent(site)
    fn, apart = in_parts(site["fn"]) if parts and latent and axis is None else (site["fn"], 0)
    elementwise = False
    if latent:
        transform = biject_to(fn.support)
        elementwise = transform.domain.event_dim == 0 == transform.codomain.event_dim and not fn.event_shape
    return SiteFacts(
        name=name,
        latent=latent,
        discrete=bool(fn.support.is_discrete) if fn.support is not None else False,
        batch_shape=tuple(fn.batch_shape),
        event_dim=len(fn.event_shape),
        leaf_event_dims=tuple(leaf_paths(fn)),
        elementwise=elementwise,
        row_key=None if axis is None or rows.whole else axis.key,
        row_dim=None if axis is None or rows.whole else axis.dim,
        may_be_quadratic=_may_be_quadratic(fn),
        apart=apart,
        location=_location_of(fn) if latent else "",
    )


def _location_of(fn: Any, prefix: str = "") -> str:
    """Path of the location of a distribution whose density depends on the distance from it alone; empty where there is none."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution):
        fn, prefix = fn.base_dist, f"{prefix}base_dist/"
    return f"{prefix}loc" if type(fn) in LOCATION_FAMILIES else ""


def _samples(facts: SiteFacts) -> bool:
    """Whether a site has so many rows that structure is looked for in some."""
    return facts.row_dim is not None and facts.batch_shape[facts.row_dim] > _MOST_ROWS


def _chosen_rows(facts: SiteFacts) -> np.ndarray:
    return np.linspace(0, facts.batch_shape[facts.row_dim] - 1, _MOST_ROWS).astype(int)


def leaves_of_some_rows(facts: SiteFacts, leaves: dict[str, Array]) -> dict[str, Array]:
    """A site's parameters by path, of some rows only where there are many."""
    if not _samples(facts):
        return leaves
    size, dim, dims, found = facts.batch_shape[facts.row_dim], facts.row_dim, dict(facts.leaf_event_dims), {}
    for path, leaf in leaves.items():
        axis = dim - (dims.get(path) or 0)
        thinned = jnp.ndim(leaf) >= -axis and leaf.shape[axis] == size
        found[path] = jnp.take(leaf, _chosen_rows(facts), axis=axis) if thinned else leaf
    return found


def facts_of_some_rows(facts: SiteFacts) -> SiteFacts:
    """A site's facts as :func:`leaves_of_some_rows` leaves it."""
    if not _samples(facts):
        return facts
    shape = list(facts.batch_shape)
    shape[facts.row_dim] = _MOST_ROWS
    return dataclasses.replace(facts, batch_shape=tuple(shape))


def _may_be_quadratic(fn) -> bool:
    base = base_distribution(fn)
    if isinstance(base, EnumeratedRows):
        return False
    # Of a user's own distribution nothing is known beforehand: its values decide.
    return isinstance(base, GAUSSIAN) or not type(base).__module__.startswith("numpyro.")


def rays_of(blocks: int) -> Rays:
    """The rays, once for every block of points: those at the parameters' start, and those at moved ones."""
    per_ray = POINTS_PER_RAY - 1
    count = NUM_DIRECTIONS * len(_RAY_SCALES)
    index = 1 + np.arange(count * per_ray).reshape(count, per_ray)
    one = np.concatenate([np.zeros((count, 1), int), index], axis=1)
    return Rays(np.concatenate([one + b * (count * per_ray + 1) for b in range(blocks)]), blocks)


def ray_points(loc: Float[Array, "D"], directions: Float[Array, "K D"], jaxpr: Any) -> Float[Array, "P D"]:
    """Points along K rays in unconstrained space: their common origin first, then every ray's steps of :func:`ray_steps`.

    ``jaxpr``: of what is looked at there. Where it loops for as long as its numbers ask for, the longest rays end nearer.
    """
    steps = jnp.asarray(ray_steps()[1:], loc.dtype).reshape(len(directions), -1)
    if loops_on(jaxpr):
        steps = steps * jnp.minimum(1.0, _REACH_OF_LOOPS / steps[:, -1:])
    moved = loc + steps[:, :, None] * directions[:, None, :]
    return jnp.concatenate([loc[None], moved.reshape(moved.shape[0] * moved.shape[1], loc.shape[0])])


def _with_sides(points: Float[Array, "P D"], loc, sd, direction) -> Float[Array, "P+2 D"]:
    """Points, and one to either side of the prior's location: every latent at its full distance, to sides that a direction says.

    In the proportions of the direction a precision may hardly move, and what it does to the rows is not seen.
    """
    aside = _ASIDE * sd * jnp.where(direction < 0, -1.0, 1.0)
    return jnp.concatenate([points, jnp.stack([loc - aside, loc + aside])])


def _apart(looks: list[dict]) -> tuple[dict, Float[Array, "2"]]:
    """What was seen at the points, of all parameters; and the log density of all rows at the sides, of the first."""
    sides = sum((jnp.sum(x[-2:].reshape(2, -1), axis=1) for x in looks[0]["rows"].values()), start=jnp.zeros((2,)))
    return jax.tree.map(lambda *parts: jnp.concatenate([x[:-2] for x in parts]), *looks), sides


def _over_points(look, points: Float[Array, "P D"], arrays: list):
    """All points at once, or one after another where a model's own arrays are so large that many looks would not fit."""
    size = sum(x.size * x.dtype.itemsize for x in arrays) + points[0].size * points.dtype.itemsize
    return in_batches(look, points, _LOOK_BYTES // max(size, 1))


def _robust_moments(draws: Float[Array, "S *shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    finite = jnp.isfinite(draws)
    safe = jnp.where(finite, draws, 0.0)
    # Median and quartiles: a Cauchy prior has no mean, but a start is needed for it too.
    low, middle, high = jnp.nanpercentile(jnp.where(finite, draws, jnp.nan), jnp.asarray([25.0, 50.0, 75.0]), axis=0)
    sd = (high - low) / 1.349
    spread = jnp.sqrt(jnp.mean((safe - jnp.mean(safe, axis=0)) ** 2, axis=0))
    sd = jnp.where(jnp.isfinite(sd) & (sd > 0), sd, jnp.where(spread > 0, spread, 1.0))
    loc = jnp.where(jnp.isfinite(middle), middle, 0.0)
    return loc, jnp.clip(sd, 1e-6, math.sqrt(1e12))


# ---------------------------------------------------------------------------------------- terms given all other latents
# Terms that see some latents, in their own supports, through one or two affine predictors, whatever all others are.
#
# The latents asked about lie in one vector. What parameters of the sites' distributions are of that vector is proved on
# the trace where that can be, for all values of the other latents and of the model's params, and else found by values
# on rays, at several values of the others: see :mod:`._structure`.

# Label of everything beside the latents asked about, which may have any value.
_OTHERS = "everything else"


@dataclasses.dataclass(frozen=True)
class SeenFactor:
    """A factor whose sites are asked for their predictors.

    ``trace``: NumPyro's trace of the factor's own sites, given values of all latents by name and of the model's params;
    ``layout``: of the latents asked about, in one vector; ``others``: values of all latents by name, at several places;
    ``points``: Float[K+1, D], values of the vector: where rays begin, and what each of them runs towards.
    """

    trace: Callable[[dict, dict], dict]
    layout: Layout
    rows: RowAxes
    others: Sequence[dict[str, Array]]
    params: dict
    points: Float[Array, "K+1 D"]


def predictor_terms(factor: SeenFactor) -> tuple[TermSpec, ...] | None:
    """Every term that moves with the vector, as a density of at most two affine predictors per element.

    ``factor``: the factor. Returns the terms' structures; None where some term is none.
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

    points = np.asarray(factor.points)
    given = points[0], factor.others[0], factor.params
    closed, shapes = jax.make_jaxpr(read, return_shape=True)(*given)
    labels = [marked(LATENTS), *(unmarked(_OTHERS) for _ in jax.tree.leaves(given[1:]))]
    forms = jax.tree.unflatten(jax.tree.structure(shapes), forms_of(closed, labels))
    moving = [name for name in forms if facts[name].latent or any(LATENTS in f.labels for f in forms[name].values())]
    if not moving or not all(_whole(facts[name], forms[name]) for name in moving):
        return None
    along = look(lambda points: ray_points(points[0], points[1:] - points[0], closed.jaxpr), points)
    seen, first = _along_rays(factor, read, facts, moving, along)
    found, rays = [], rays_of(len(factor.others))
    for name in moving:
        own = _own(factor, name, np.asarray(along), rays) if facts[name].latent else None
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
    factor: SeenFactor, read: Callable, facts: dict[str, SiteFacts], names: list[str], along: Array
) -> tuple[dict, dict]:
    """The sites' parameters at all points of all rays, of some rows where there are many; and at the first, of all rows."""

    def looked(along: Array, others: list, params: dict) -> tuple[dict, dict]:
        def one(point: Array, own: dict) -> dict:
            leaves = read(point, own, params)
            return {n: leaves_of_some_rows(facts[n], leaves[n]) for n in names}

        seen = [jax.lax.map(lambda point, own=own: one(point, own), along) for own in others]
        first = read(along[0], others[0], params)
        return jax.tree.map(lambda *x: jnp.concatenate(x), *seen), {n: first[n] for n in names}

    return jax.device_get(look(looked, along, list(factor.others), factor.params))


def _own(factor: SeenFactor, name: str, along: np.ndarray, rays: Rays) -> np.ndarray:
    """A latent's value at every point of every ray."""
    own = along[:, factor.layout.slice_of(name)].reshape(-1, *factor.layout.shapes[factor.layout.names.index(name)])
    return np.concatenate([own] * rays.blocks)
