"""One compiled look at a model: prior draws, values and parameters along rays, and the chunks beside the whole."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import biject_to

from ..errors import PartitionError
from ..handlers import FullPlates, GroupTable, RowAxes
from ._model import (
    DrawImproper,
    ModelCall,
    base_distribution,
    is_latent,
    is_observed,
    rows_first,
    site_log_prob,
)
from ._packing import Packing
from ._reading import GroupMasks, Reading
from ._structure import POINTS_PER_RAY, Rays, SiteFacts, moves
from ._terms import leaf_paths, leaves_by_path

_NUM_DRAWS = 64
# Directions are prior deviations; five decades of step cover links that saturate and links that look linear.
_RAY_SCALES = (1e-4, 1e-2, 0.3, 3.0, 30.0)
_NUM_DIRECTIONS = 2
_CHECK_STEPS = (0.3, 0.01)
# NumPyro's distributions whose log density can be quadratic in their parameters, once expansions and transforms are
# taken off; Unit is numpyro.factor's, and a flat prior is quadratic where its support is the whole space.
_GAUSSIAN = (
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


@dataclasses.dataclass(frozen=True)
class Probe:
    """Host-side (numpy) results of :func:`run_probe`; the leading axis P runs over probe points."""

    rays: Rays
    points: np.ndarray
    rows: dict[str, np.ndarray]
    latents: dict[str, np.ndarray]
    leaves: dict[str, dict[str, np.ndarray]]
    facts: dict[str, SiteFacts]
    # Per-row reference values at the check points, and what the chunks gave, summed over observed sites: Float[2, N].
    reference: np.ndarray
    chunked: np.ndarray
    prior_loc: np.ndarray
    prior_sd: np.ndarray
    params: dict
    # Names of ``numpyro.param`` sites that the log density does not depend on.
    inert: tuple[str, ...]

    def own(self, name: str, layout) -> np.ndarray:
        """A latent's unconstrained value at every probe point."""
        shape = layout.shapes[layout.names.index(name)]
        return self.points[:, layout.slice_of(name)].reshape(-1, *shape)

    def depends_on_others(self, name: str) -> bool:
        """Whether the parameters of a latent's prior move with other latents."""
        return any(moves(values, self.rays) for values in self.leaves[name].values())


def draw_trace(model, key, args: tuple, kwargs: dict, params: dict) -> dict:
    """A trace of the model with its latents drawn from the prior, improper ones replaced by standard normals."""
    seeded = handlers.seed(handlers.substitute(DrawImproper(FullPlates(model), key), data=params), key)
    return handlers.trace(seeded).get_trace(*args, **kwargs)


def run_probe(
    call: ModelCall,
    trace: dict,
    rows: RowAxes,
    reading: Reading,
    packing: Packing | GroupMasks,
    key: Array,
    params: dict | None,
) -> Probe:
    """Evaluate the model on rays through the prior, whole and in chunks, in one compiled program.

    Args:
        call: the model, its layout and arguments; ``call.params`` is replaced by initial values when ``params`` is
            None.
        trace: an abstract trace.
        rows: the partitioned axes.
        reading: how a chunk is read.
        packing: rows of each chunk.
        key: a random key.
        params: given values of ``numpyro.param`` sites, or None.

    Returns:
        The probe, on the host.
    """
    static = _StaticArgs(call, rows, reading, params)
    arrays = [x for x in jax.tree.leaves((call.args, call.kwargs)) if hasattr(x, "dtype")]
    found = jax.device_get(jax.jit(static.probe)(arrays, packing, key))
    chunked = found["reference"]
    if isinstance(packing, Packing):
        chunked = np.zeros_like(chunked)
        mask = np.asarray(packing.mask)
        for point in range(chunked.shape[0]):
            chunked[point, np.asarray(packing.rows)[mask]] = found["chunks"][point][mask]
    return Probe(
        rays=_rays(),
        points=found["points"],
        rows=found["rows"],
        latents=found["latents"],
        leaves={n: dict(leaves) for n, leaves in found["leaves"].items()},
        facts={n: _facts(n, s, rows) for n, s in trace.items() if is_latent(s) or is_observed(s)},
        reference=found["reference"],
        chunked=chunked,
        prior_loc=found["loc"],
        prior_sd=found["sd"],
        params=found["params"],
        inert=tuple(n for n, slope in found["slopes"].items() if slope == 0.0),
    )


@dataclasses.dataclass(frozen=True)
class _StaticArgs:
    call: ModelCall
    rows: RowAxes
    reading: Reading
    params: dict | None

    def probe(self, arrays, packing: Packing | GroupMasks, key) -> dict:
        """The traced body: prior draws, rays, values, parameters and the additive comparison."""
        call = dataclasses.replace(self.call, **self._arguments(arrays))
        draws_key, direction_key = jax.random.split(key)
        params = self._initial_params(call, draws_key) if self.params is None else self.params
        call = dataclasses.replace(call, params=params)
        draws = jax.vmap(lambda k: self._draw(call, k))(jax.random.split(draws_key, _NUM_DRAWS))
        loc, sd = _robust_moments(draws)
        noise = jax.random.normal(direction_key, (_NUM_DIRECTIONS, call.layout.dim), loc.dtype)
        points = _ray_points(loc, sd * noise)
        rows, latents, leaves = jax.vmap(lambda z: self._look(call, z))(points)
        checks = loc + jnp.asarray(_CHECK_STEPS, loc.dtype)[:, None] * sd * noise
        reference = jax.vmap(lambda z: self._all_rows(call, z))(checks)
        chunks = None
        if isinstance(packing, Packing):
            chunks = jax.vmap(lambda z: self._chunk_rows(call, packing, z))(checks)
        return {
            "points": points, "rows": rows, "latents": latents, "leaves": leaves, "reference": reference,
            "chunks": chunks, "loc": loc, "sd": sd, "params": params, "slopes": self._slopes(call, checks),
        }  # fmt: skip

    def _arguments(self, arrays) -> dict:
        leaves, structure = jax.tree.flatten((self.call.args, self.call.kwargs))
        remaining = iter(arrays)
        args, kwargs = structure.unflatten([next(remaining) if hasattr(x, "dtype") else x for x in leaves])
        return {"args": args, "kwargs": kwargs}

    def _initial_params(self, call: ModelCall, key) -> dict:
        trace = draw_trace(call.model, key, call.args, call.kwargs, {})
        return {n: jax.tree.map(jnp.asarray, s["value"]) for n, s in trace.items() if s["type"] == "param"}

    def _slopes(self, call: ModelCall, points) -> dict[str, Array]:
        """Size of the log density's slope along every param; zero where priors have replaced it (random_flax_module)."""
        if not call.params:
            return {}

        def density(params, point):
            trace, jacobians = dataclasses.replace(call, params=params).trace(point)
            return sum(jnp.sum(site_log_prob(s, jacobians.get(n))) for n, s in trace.items() if s["type"] == "sample")

        def slope(tree):
            return sum((jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(tree)), start=jnp.zeros(()))

        gradients = jax.vmap(jax.grad(density), (None, 0))(call.params, points)
        return {n: slope(g) for n, g in gradients.items()}

    def _draw(self, call: ModelCall, key) -> Float[Array, "D"]:
        trace = draw_trace(call.model, key, call.args, call.kwargs, call.params)
        values = {n: biject_to(trace[n]["fn"].support).inv(trace[n]["value"]) for n in call.layout.names}
        return call.layout.flatten(values).astype(jnp.result_type(float))

    def _look(self, call: ModelCall, point):
        trace, jacobians = call.trace(point)
        rows, latents, leaves = {}, {}, {}
        for name, site in trace.items():
            if is_latent(site):
                latents[name] = jnp.sum(site_log_prob(site, jacobians[name]))
            elif is_observed(site) and (axis := self.rows.of(site)) is not None:
                rows[name] = rows_first(site_log_prob(site), axis.dim)
            if site["type"] == "sample":
                leaves[name] = leaves_by_path(site["fn"])
        return rows, latents, leaves

    def _all_rows(self, call: ModelCall, point) -> Float[Array, "N"]:
        rows, _, _ = self._look(call, point)
        if len(self.rows.plates) > 1:
            return jnp.concatenate(list(rows.values()))
        return sum(rows.values(), start=jnp.zeros((), point.dtype))

    def _chunk_rows(self, call: ModelCall, packing: Packing, point) -> Float[Array, "C R"]:
        def chunk(chunk):
            return self._all_rows(self.reading.call(call, chunk), point)

        return jax.lax.map(chunk, packing.chunks, batch_size=min(16, packing.rows.shape[0]))


def check_additive(probe: Probe, where: str, table: GroupTable, reading: Reading, sliced: tuple[str, ...]) -> None:
    """Compare every group's factor, evaluated from its own rows alone, with the untouched model.

    Args:
        probe: values at the check points.
        where: what is partitioned, for the message.
        table: which row belongs to which group.
        reading: how a group is evaluated.
        sliced: names of the sliced arguments, for the message.

    Raises:
        PartitionError: naming the first group that differs by more than 1e-5 (float32; 1e-10 in x64) of its own
            absolute row terms.
    """
    tolerance = 1e-5 if probe.reference.dtype == np.float32 else 1e-10
    index = table.index_of_row
    for reference, chunked in zip(probe.reference, probe.chunked, strict=True):
        for m, label in enumerate(table.labels):
            rows = index == m
            expected, got = reference[rows].astype(np.float64), chunked[rows].astype(np.float64)
            if not np.all(np.isfinite(expected)):
                continue
            gap, size = abs(expected.sum() - got.sum()), np.abs(expected).sum()
            if not gap <= tolerance * size + 100 * np.finfo(probe.reference.dtype).tiny:
                raise PartitionError(
                    f"{where} is not a sum over groups by {reading.mechanism!r}: the log-likelihood of group {label!r} from "
                    f"its own rows differs from its share of the whole model by {gap:.3g} nats. "
                    f"{_coupling_advice(reading, sliced)}"
                )


def _coupling_advice(reading: Reading, sliced: tuple[str, ...]) -> str:
    why = "Something couples rows (standardising inside the model, ids into an array that is restricted too, per-row randomness)"
    if reading.mechanism == "args":
        return (
            f"{why}, or an argument that is not per-row was sliced (sliced: {', '.join(sliced)}). Move such steps outside the "
            "model, or exclude the argument with Partition(..., data_axes={'name': None})."
        )
    return (
        f"{why}. Move such steps outside the model, or accept a full pass per group with Partition(..., mode='mask')."
    )


def _facts(name: str, site: dict, rows: RowAxes) -> SiteFacts:
    fn, axis = site["fn"], rows.of(site)
    latent = is_latent(site)
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
        row_key=None if axis is None else axis.key,
        row_dim=None if axis is None else axis.dim,
        may_be_quadratic=_may_be_quadratic(fn),
    )


def _may_be_quadratic(fn) -> bool:
    base = base_distribution(fn)
    # Of a user's own distribution nothing is known beforehand: its values decide.
    return isinstance(base, _GAUSSIAN) or not type(base).__module__.startswith("numpyro.")


def _rays() -> Rays:
    per_ray = POINTS_PER_RAY - 1
    count = _NUM_DIRECTIONS * len(_RAY_SCALES)
    index = 1 + np.arange(count * per_ray).reshape(count, per_ray)
    return Rays(np.concatenate([np.zeros((count, 1), int), index], axis=1))


def _ray_points(loc: Float[Array, "D"], directions: Float[Array, "K D"]) -> Float[Array, "P D"]:
    steps = jnp.asarray(
        [s * k / (POINTS_PER_RAY - 1) for s in _RAY_SCALES for k in range(1, POINTS_PER_RAY)], loc.dtype
    )
    moved = loc + steps[None, :, None] * directions[:, None, :]
    return jnp.concatenate([loc[None], moved.reshape(-1, loc.shape[0])])


def _robust_moments(draws: Float[Array, "S D"]) -> tuple[Float[Array, "D"], Float[Array, "D"]]:
    finite = jnp.isfinite(draws)
    safe = jnp.where(finite, draws, 0.0)
    # Median and quartiles: a Cauchy prior has no mean, but a start is needed for it too.
    low, middle, high = jnp.nanpercentile(jnp.where(finite, draws, jnp.nan), jnp.asarray([25.0, 50.0, 75.0]), axis=0)
    sd = (high - low) / 1.349
    spread = jnp.sqrt(jnp.mean((safe - jnp.mean(safe, axis=0)) ** 2, axis=0))
    sd = jnp.where(jnp.isfinite(sd) & (sd > 0), sd, jnp.where(spread > 0, spread, 1.0))
    loc = jnp.where(jnp.isfinite(middle), middle, 0.0)
    return loc, jnp.clip(sd, 1e-6, math.sqrt(1e12))
