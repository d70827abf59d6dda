"""Export of posteriors to other libraries, and pictures of runs and of what groups say."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from ._compiling import owned_jit
from ._state import PVIRunResult, PVIState, PVITrace
from .diagnostics import map_draws
from .errors import ImproperError, PVIError
from .factors import ModelCall, join_arguments, split_arguments
from .guides import marginal_quantiles, setup_guide
from .handlers import PRIOR
from .sites import with_shares

__all__ = [
    "plot_agents",
    "plot_error",
    "plot_forest",
    "plot_influence",
    "plot_khat",
    "plot_rounds",
    "rounds_dataset",
    "to_arviz",
]


# -------------------------------------------------------------------------------------------------------- names of axes
# Names for the axes of a model's variables, read from its plates.


@dataclasses.dataclass(frozen=True)
class Dims:
    """Axis names of a model's variables.

    ``wanted`` holds, for each variable, one name or None per axis: batch axes, then event axes. ``sizes`` holds the
    length that a name stands for; an axis of another length does not get it.
    """

    wanted: dict[str, list[str | None]]
    sizes: dict[str, int]

    def of(self, variable: str, shape: tuple[int, ...]) -> list[str]:
        """Names for the axes of an array of a variable; ``<variable>_dim_<i>`` where there is none.

        ``variable``: name of the sample or deterministic site; ``shape``: shape without sample dims; the event axes may be
        missing, as in log-likelihoods. Returns one name per axis, without repetition.
        """
        wanted = (self.wanted.get(variable, []) + [None] * len(shape))[: len(shape)]
        names: list[str] = []
        for axis, (name, size) in enumerate(zip(wanted, shape, strict=True)):
            fits = name is not None and self.sizes.get(name) == size and name not in names
            names.append(name if fits else f"{variable}_dim_{axis}")
        return names


def site_dims(trace: dict, sample_dims: Collection[str]) -> Dims:
    """Read axis names from a trace: plates for batch axes, ``infer["event_dims"]`` for event axes.

    ``trace``: a NumPyro trace; only names and shapes are read; ``sample_dims``: names of the axes of draws, which no other axis
    may bear; neither may it bear a variable's name. Returns the names. A deterministic has no batch shape of its own; its
    leading axes are named when their lengths are those of the plates around it.
    """
    sizes: dict[str, int] = {}
    wanted: dict[str, list[str | None]] = {}
    variables = {name: site for name, site in trace.items() if site["type"] in ("sample", "deterministic")}
    reserved = {*sample_dims, *variables}
    for name, site in variables.items():
        shape = tuple(jnp.shape(site["value"]))
        frames = {frame.dim: frame for frame in site["cond_indep_stack"]}
        if site["type"] == "sample":
            batch, event = len(site["fn"].batch_shape), tuple(site["fn"].event_shape)
        else:
            batch, event = max((-dim for dim in frames), default=0), ()
            if len(shape) < batch or any(shape[batch + dim] != frame.size for dim, frame in frames.items()):
                continue
        labels = [frames[axis - batch].name if axis - batch in frames else None for axis in range(batch)]
        labels = [None if label in reserved else label for label in labels]
        sizes.update({frame.name: frame.size for frame in frames.values()})
        for label, size in zip((site.get("infer") or {}).get("event_dims", ()), event, strict=False):
            labels.append(None if label in reserved else label)
            sizes.setdefault(label, size)
        wanted[name] = labels
    return Dims(wanted, sizes)


# ---------------------------------------------------------------------------------------------- agents without a server
# What every agent of a network without a server holds, as an xarray data set.


def agents_dataset(labels: Sequence[Hashable], marginals: Callable[[Hashable], dict[str, Any]], dims: Dims) -> Any:
    """Means and standard deviations of every agent's own marginals.

    ``marginals``: one agent's distributions by latent, in the latents' own supports. Returns ``xarray.Dataset`` with one
    variable per latent, of dims ``agent``, ``moment`` ("mean", "sd") and its own; labels of agents are shown as strings. A
    moment that a marginal does not have is NaN.
    """
    import xarray

    held = [marginals(label) for label in labels]
    variables = {}
    for name in held[0]:
        values = np.stack([np.stack([_moment(q[name], moment) for moment in ("mean", "sd")]) for q in held])
        variables[name] = (["agent", "moment", *dims.of(name, values.shape[2:])], values)
    return xarray.Dataset(variables, coords={"agent": [str(label) for label in labels], "moment": ["mean", "sd"]})


def _moment(q: Any, moment: str) -> np.ndarray:
    try:
        value = q.mean if moment == "mean" else q.variance**0.5
    except NotImplementedError:
        return np.full((*q.batch_shape, *q.event_shape), np.nan)
    return np.asarray(value)


# ----------------------------------------------------------------------------------------------------------------- runs
# A run's trace as an xarray data set and as pictures.

_PER_FACTOR = ("move", "step", "backoffs", "skipped", "staleness")
_PER_ROUND = ("elbo", "total_move", "clock", "bytes", "consensus", "trips", "sent", "received")
_GAPS = ("consensus_gap", "modelling_gap")
_AXES = {
    "rounds": "rounds",
    "time": "simulated time",
    "messages": "natural parameters sent",
    "bytes": "bytes sent",
}
# Lines with names of their own in a picture; more groups than these are drawn in one colour.
_NAMED_LINES = 10


def rounds_dataset(trace: PVITrace) -> Any:
    """A trace as ``xarray.Dataset`` with dims ``round``, ``factor`` and ``direction``.

    Args:
        trace: of a run.

    Returns:
        The data set; labels of factors are shown as strings, units are those of :class:`numpyro_pvi.PVITrace`.
    """
    import xarray

    values: dict[str, Any] = {name: ("round", np.asarray(getattr(trace, name))) for name in _PER_ROUND}
    values |= {name: (("round", "factor"), np.asarray(getattr(trace, name))) for name in _PER_FACTOR}
    values["messages"] = (("round", "direction"), np.asarray(trace.messages))
    if trace.gaps is not None:
        values |= {name: ("round", np.asarray(trace.gaps)[:, i]) for i, name in enumerate(_GAPS)}
    labels = [str(label) for label in trace.labels]
    coords = {"round": np.asarray(trace.rounds), "factor": labels, "direction": ["to_server", "from_server"]}
    return xarray.Dataset(values, coords=coords)


def plot_rounds(result: PVIRunResult | PVITrace) -> Any:
    """Draw a run round by round: ELBO, moves of every factor, staleness, and what was sent.

    Args:
        result: what ``run`` returned, or its ``trace``.

    Returns:
        A matplotlib figure of four panels.

    Raises:
        PVIError: when no round ran, or without matplotlib (extra ``plots``).
    """
    plt, trace = _pyplot(), _trace(result, "result")
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    rounds = np.asarray(trace.rounds)
    axes[0, 0].plot(rounds, trace.elbo, color="black")
    axes[0, 0].set_ylabel("ELBO (nats)")
    axes[0, 1].set_ylabel("move (posterior sds)")
    axes[0, 1].set_yscale("log")
    axes[1, 0].set_ylabel("staleness (changes of q)")
    named = len(trace.labels) <= _NAMED_LINES
    for i, label in enumerate(trace.labels):
        style: dict[str, Any] = {"label": str(label)} if named else {"color": "C0", "alpha": 0.4}
        for axis, values in ((axes[0, 1], trace.move), (axes[1, 0], trace.staleness)):
            axis.plot(rounds, _positive(values[:, i]) if axis is axes[0, 1] else values[:, i], **style)
    if named:
        axes[0, 1].legend(fontsize="small")
    to_server, from_server = np.asarray(trace.messages).T
    axes[1, 1].plot(rounds, to_server, label="by groups")
    axes[1, 1].plot(rounds, from_server, label="to groups", linestyle="--")
    axes[1, 1].set_ylabel("natural parameters sent")
    axes[1, 1].legend(fontsize="small")
    for axis in axes[1]:
        axis.set_xlabel("rounds")
    return figure


def plot_error(
    results: PVIRunResult | PVITrace | Mapping[str, PVIRunResult | PVITrace],
    against: str = "rounds",
    reference: float | None = None,
    ax: Any = None,
) -> Any:
    """Draw how far each run's ELBO is from the best one against rounds, simulated time, messages or bytes.

    Args:
        results: what ``run`` returned (or its ``trace``), or several under the names that the legend shows.
        against: "rounds", "time", "messages" (sent in both directions) or "bytes".
        reference: the ELBO that the error is taken from, nats; the highest one of all runs by default.
        ax: matplotlib axes to draw on; new ones by default.

    Returns:
        The matplotlib axes: error in nats on a logarithmic scale. Points at or above the reference are left out.

    Raises:
        PVIError: for another word, a result without rounds, or without matplotlib (extra ``plots``).

    References:
        Ashman et al., Partitioned Variational Inference, section 7 (error against wall-clock time and against messages).
    """
    if against not in _AXES:
        raise PVIError(f"plot_error(against={against!r}): expected one of {', '.join(map(repr, _AXES))}.")
    named = results if isinstance(results, Mapping) else {"": results}
    traces = {name: _trace(result, f"results[{name!r}]") for name, result in named.items()}
    if not traces:
        raise PVIError("plot_error(results={}): there is nothing to draw; pass what run returned.")
    ax = _pyplot().subplots(layout="constrained")[1] if ax is None else ax
    best = max(float(np.nanmax(t.elbo)) for t in traces.values()) if reference is None else float(reference)
    for name, trace in traces.items():
        ax.plot(_against(trace, against), _positive(best - np.asarray(trace.elbo)), label=name, marker=".")
    ax.set(xlabel=_AXES[against], ylabel="ELBO below the best (nats)", yscale="log")
    if "" not in traces:
        ax.legend()
    return ax


def plot_agents(pvi: Any, result: PVIRunResult, latent: str | None = None, most: int = 12) -> Any:
    """Draw how far agents without a server are apart by round, and what each of them holds at the end.

    Args:
        pvi: the fit, under ``Decentralized``.
        result: what its ``run`` returned.
        latent: whose marginals; the first latent by default.
        most: coordinates that are drawn.

    Returns:
        A matplotlib figure: the largest distance of an agent's mean from the network's, in its sds, by round (with DELBO's
        consensus gap in nats, where there is one), and every agent's mean and two sds beside the network's.

    Raises:
        PVIError: under a schedule with a server, for a result without rounds, an unknown latent, or without matplotlib.
    """
    trace, network = _trace(result, "result"), pvi.posterior(result.state)
    latent = next(iter(network)) if latent is None else latent
    if latent not in network:
        raise PVIError(f"plot_agents(latent={latent!r}): expected one of {', '.join(map(repr, network))}.")
    labels = result.state.plan.partition.table.labels
    held = {label: pvi.posterior(result.state, agent=label)[latent] for label in labels}
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(trace.rounds, _positive(trace.consensus), color="black", label="largest distance (sds)")
    if trace.gaps is not None and np.any(np.isfinite(trace.gaps[:, 0])):
        left.plot(trace.rounds, _positive(trace.gaps[:, 0]), linestyle="--", label="consensus gap (nats)")
    left.set(xlabel="rounds", yscale="log")
    left.legend(fontsize="small")
    shift = np.linspace(-0.3, 0.3, len(labels)) if len(labels) > 1 else np.zeros(1)
    named = len(labels) <= _NAMED_LINES
    for at, (label, q) in zip(shift, held.items(), strict=True):
        loc, sd = (np.ravel(x)[:most] for x in (q.mean, np.sqrt(q.variance)))
        style: dict[str, Any] = {"label": str(label)} if named else {"color": "C0", "alpha": 0.4}
        right.errorbar(np.arange(len(loc)) + at, loc, 2 * sd, fmt=".", **style)
    loc = np.ravel(network[latent].mean)[:most]
    right.plot(np.arange(len(loc)), loc, "_", color="black", markersize=18, label="network's mean")
    right.set(xlabel=f"coordinates of {latent}", ylabel="mean and two sds")
    right.legend(fontsize="small")
    return figure


def _against(trace: PVITrace, against: str) -> np.ndarray:
    if against == "messages":
        return np.asarray(trace.messages).sum(-1)
    return np.asarray({"rounds": trace.rounds, "time": trace.clock, "bytes": trace.bytes}[against])


def _positive(values: Any) -> np.ndarray:
    """Values for a logarithmic axis: NaN where there is no logarithm."""
    values = np.asarray(values, float)
    return np.where((values > 0) & np.isfinite(values), values, np.nan)


def _trace(result: Any, where: str) -> PVITrace:
    trace = result if isinstance(result, PVITrace) else getattr(result, "trace", None)
    if not isinstance(trace, PVITrace):
        raise PVIError(f"{where} has no trace of rounds; pass what pvi.run returned, or its .trace.")
    return trace


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise PVIError("pictures need matplotlib, which is not installed: pip install 'numpyro_pvi[plots]'.") from error
    return pyplot


# ---------------------------------------------------------------------------------------------------------------- ArviZ
# Posterior draws as ArviZ data, for ArviZ 0.23 and 1.x alike.

_SAMPLE_DIMS = ["chain", "draw"]


def to_arviz(
    rng_key: Any,
    model: Callable,
    guide: Any,
    params: dict[str, Any],
    args: tuple,
    kwargs: dict,
    *,
    num_samples: int = 1000,
    trace: PVITrace | None = None,
    agents: tuple[Sequence[Hashable], Callable[[Hashable], dict[str, Any]]] | None = None,
    whole: Callable | None = None,
) -> Any:
    """Draw from q and arrange the draws, their log-likelihoods and the observed data as ArviZ data.

    Groups: ``posterior`` (latents in their own supports and deterministics), ``log_likelihood`` (one variable per
    observed site, in its batch shape, nats, without ``handlers.scale``), ``observed_data``; with a trace, ``rounds`` (see
    :func:`numpyro_pvi.export.rounds_dataset`); without a server, ``agents``: mean and sd of every agent's own marginals, with dims
    ``agent`` and ``moment`` before the latent's own. Draws are independent
    and come as one chain, so r-hat has no meaning and effective sample sizes say nothing about the fit. Axes of plates
    bear the plate's name; ``infer={"event_dims": [...]}`` of a sample site names its event axes.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        guide: the guide; set up with these arguments if it is not yet.
        params: the guide's params and the constrained values of the model's ``numpyro.param`` sites. Deterministics and
            log-likelihoods are computed at these values and these arguments.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        trace: what happened in every round, of a run that has it.
        agents: labels of agents that each have a q of their own, and what gives one's marginals.
        whole: the model with the observed sites that ``model`` has summed out with discrete latents, where it has: their data
            are read off it.
        num_samples: draws S. The result holds S numbers for every observed row (1000 draws of 100,000 rows: 800 MB in
            float64), and for every row of a deterministic; nothing else grows with S.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.23, ``xarray.DataTree`` under 1.x, with dims ``chain`` (1) and ``draw``
        (S).

    Raises:
        PVIError: for a number of draws below 1, params that lack a ``numpyro.param`` value, or a guide that lacks a
        latent.
    """
    if num_samples < 1:
        raise PVIError(f"to_arviz(num_samples={num_samples!r}): expected at least one draw.")
    setup_guide(guide, jax.random.key(0), args, kwargs)
    arrays, static = split_arguments(args, kwargs)
    drawn = _posterior_draws(model, guide, static, num_samples, rng_key, params, arrays)
    posterior, log_likelihood, observed = jax.device_get(drawn)
    sites: dict = {}
    jax.eval_shape(lambda key: sites.update(_trace_at(model, guide, key, params, args, kwargs)), jax.random.key(0))
    observed = {name: value for name, value in observed.items() if np.size(value)}
    if whole is not None:
        of_whole = _observed_by(whole, guide, rng_key, params, args, kwargs)
        observed, sites = {name: site["value"] for name, site in of_whole.items()} | observed, of_whole | sites
    dims = site_dims(sites, _SAMPLE_DIMS)
    groups = {
        "posterior": _one_chain(posterior),
        "log_likelihood": _one_chain(log_likelihood),
        "observed_data": {name: np.asarray(value) for name, value in observed.items()},
    }
    made = {} if trace is None else {"rounds": rounds_dataset(trace)}
    if agents is not None:
        made["agents"] = agents_dataset(*agents, dims)
    return _assemble({group: values for group, values in groups.items() if values}, dims, made)


def shared_to_arviz(
    rng_key: Any,
    model: Callable,
    plan: Any,
    natural: Any,
    args: tuple,
    kwargs: dict,
    params: dict[str, Any],
    *,
    num_samples: int = 1000,
    trace: PVITrace | None = None,
) -> Any:
    """Draws of the latents outside the plate as ArviZ data, where the rows are elsewhere: see :func:`to_arviz`.

    ``args``: what stands for the model's positional arguments; no row is read; ``params``: constrained values of the model's
    ``numpyro.param`` sites; ``trace``: what happened in every round, of a run that has it. Returns as of :func:`to_arviz`, with
    the group ``posterior`` and, with a trace, ``rounds``. Deterministics, log-likelihoods and observed data are made of rows,
    and are not there. Raises PVIError for a number of draws below 1; ImproperError when q is not normalisable.
    """
    _check_draws(plan.family, natural, num_samples)
    part = plan.partition
    own = None if part.local is None else jnp.zeros((part.local.size, part.local.width))
    call = ModelCall(model, part.layout, args, kwargs, params, part.local, own)

    def one(point: Any) -> dict[str, Any]:
        sites, _ = call.trace(point)
        return {name: sites[name]["value"] for name in part.layout.names}

    draws = plan.shared_draws(natural, rng_key, num_samples)
    values = jax.device_get(jax.jit(lambda draws: map_draws(one, draws, num_samples))(draws))
    sites: dict = {}
    jax.eval_shape(lambda point: sites.update(call.trace(point)[0]), draws[0])
    return _draws_alone(values, sites, trace)


def product_to_arviz(
    rng_key: Any, plan: Any, natural: Any, *, num_samples: int = 1000, trace: PVITrace | None = None
) -> Any:
    """The same of a product of families, whose draws are in the latents' own supports already.

    ``trace``: what happened in every round, of a run that has it. Returns as of :func:`shared_to_arviz`. Raises PVIError for a
    number of draws below 1; ImproperError when q is not normalisable.
    """
    _check_draws(plan.family, natural, num_samples)
    draws = jax.jit(lambda q, key: plan.latent_values(plan.family.sample(q, key, (num_samples,))))
    return _draws_alone(jax.device_get(draws(natural, rng_key)), {}, trace)


def _check_draws(family: Any, natural: Any, num_samples: int) -> None:
    if num_samples < 1:
        raise PVIError(f"to_arviz(num_samples={num_samples!r}): expected at least one draw.")
    if not bool(family.in_domain(natural)):
        raise ImproperError(
            "q is not normalisable, so it cannot be drawn from: run more rounds before calling to_arviz."
        )


def _draws_alone(values: Any, sites: dict, trace: PVITrace | None) -> Any:
    made = {} if trace is None else {"rounds": rounds_dataset(trace)}
    return _assemble({"posterior": _one_chain(values)}, site_dims(sites, _SAMPLE_DIMS), made)


@functools.partial(owned_jit, static_argnames=("model", "guide", "static", "num_samples"))
def _posterior_draws(model, guide, static, num_samples, rng_key, params, arrays):
    """Posterior values and log-likelihoods with a leading draw axis, and the observed values."""
    args, kwargs = join_arguments(arrays, static)

    def one(key):
        trace = _trace_at(model, guide, key, params, args, kwargs)
        values = {
            n: s["value"] for n, s in trace.items() if s["type"] == "deterministic" or _is_sample(s, observed=False)
        }
        return values, {n: s["fn"].log_prob(s["value"]) for n, s in trace.items() if _is_sample(s, observed=True)}

    posterior, log_likelihood = map_draws(one, jax.random.split(rng_key, num_samples), num_samples)
    trace = _trace_at(model, guide, rng_key, params, args, kwargs)
    return posterior, log_likelihood, {n: s["value"] for n, s in trace.items() if _is_sample(s, observed=True)}


def _trace_at(model: Callable, guide: Any, key: Any, params: dict, args: tuple, kwargs: dict) -> dict:
    """Trace of the model at one draw from the guide and at the fitted params."""
    # The guide's own deterministics are left out: they belong to the arguments it was set up with.
    drawn = guide.sample_posterior(key, params, *args, **kwargs)
    point = {n: drawn[n] for n, s in guide.prototype_trace.items() if n in drawn and _is_sample(s, observed=False)}
    seeded = handlers.seed(handlers.substitute(model, data={**params, **point}), key)
    trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    for name, site in trace.items():
        if site["type"] == "param" and name not in params:
            raise PVIError(f"params lacks a value of the model's numpyro.param {name!r}; pass pvi.get_params(state).")
        if _is_sample(site, observed=False) and name not in point:
            raise PVIError(
                f"the guide {type(guide).__name__} has no latent {name!r} of the model; pass the fitted guide."
            )
    return trace


def _observed_by(model: Callable, guide: Any, key: Any, params: dict, args: tuple, kwargs: dict) -> dict:
    """Observed sites of a model at one draw from the guide; latents that this lacks are drawn."""
    drawn = guide.sample_posterior(key, params, *args, **kwargs)
    at_draw = handlers.seed(handlers.substitute(model, data={**params, **drawn}), key)
    trace = handlers.trace(at_draw).get_trace(*args, **kwargs)
    return {name: site for name, site in trace.items() if _is_sample(site, observed=True)}


def _is_sample(site: dict, observed: bool) -> bool:
    return site["type"] == "sample" and site["is_observed"] == observed


def _one_chain(values: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[None] for name, value in values.items()}


def _assemble(groups: dict[str, dict[str, np.ndarray]], dims: Dims, made: dict[str, Any]) -> Any:
    """Make ArviZ's container from named arrays, and from data sets that are made already."""
    # Imported here: ArviZ takes seconds to import. 1.x still answers to hasattr(arviz, "InferenceData"), with a
    # warning.
    import arviz

    old = "InferenceData" in vars(arviz)
    library, sample_dims = ("library", "default_dims") if old else ("inference_library", "sample_dims")
    datasets = {}
    for group, values in groups.items():
        leading = [] if group == "observed_data" else _SAMPLE_DIMS
        names = {name: dims.of(name, value.shape[len(leading) :]) for name, value in values.items()}
        datasets[group] = arviz.dict_to_dataset(values, dims=names, **{library: numpyro, sample_dims: leading})
    datasets |= made
    if old:
        return arviz.InferenceData(**datasets)
    from xarray import DataTree

    return DataTree.from_dict(datasets)


# --------------------------------------------------------------------------------------------------- pictures of groups
# Pictures of what each group says: intervals, influence, and how well its site stands in for its factor.

# Levels between which one sd lies on either side of a Gaussian's median.
_ONE_SD = 0.15865525393145707
_GOOD, _USABLE = 0.5, 0.7
# Cells of an influence picture that bear their numbers.
_NUMBERED = 120


class _Marginals(NamedTuple):
    """Low, middle and high quantile of every shown element; None where there is no distribution."""

    q: np.ndarray
    cavity: dict[Hashable, np.ndarray | None]
    alone: dict[Hashable, np.ndarray | None]


def plot_forest(
    pvi: Any,
    state: PVIState,
    latents: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    groups: Iterable[Hashable] | None = None,
    *,
    prob: float = 0.9,
    parts: Sequence[str] = ("cavity", "alone"),
    names: Mapping[str, Sequence[str]] | None = None,
    most: int = 12,
    ax: Any = None,
) -> Any:
    """Draw q, what all others say without each group, and what each group says alone.

    For every element a block of intervals with their medians: q, then for every group the *cavity* ``q / t_m`` (open circle), and
    the group *alone*, ``p(theta) t_m(theta)`` (filled circle, dashed). The site of a group was fitted beside the others, where q
    is; the prior times a site is a fit to the group's rows alone for conjugate factors only, and near one where factors are near
    Gaussian. What is not normalisable is left out.

    Args:
        pvi: the fit.
        state: a state of it; it is only read.
        latents: names of shared latents; or a mapping from a name to positions of its elements (in the order of ``ravel``). All
            shared latents by default.
        groups: labels of the groups to draw; all of the state by default.
        prob: probability between the ends of each interval, with as much on either side.
        parts: "cavity", "alone", or both.
        names: what to call the elements of a latent, in the order of ``ravel``.
        most: elements that are drawn, the first ones.
        ax: matplotlib axes to draw on; new ones by default.

    Returns:
        The matplotlib axes: values in the latents' own supports along x, elements along y.

    Raises:
        PVIError: for an unknown latent or part, a level outside (0, 1), or without matplotlib (extra ``plots``).
        PartitionError: for an unknown label.
        ImproperError: when q is not normalisable.
    """
    if not 0 < prob < 1:
        raise PVIError(f"plot_forest(prob={prob!r}): expected a probability between 0 and 1.")
    if not parts or set(parts) - {"cavity", "alone"}:
        raise PVIError(f"plot_forest(parts={parts!r}): expected 'cavity', 'alone', or both in a tuple.")
    plt = _pyplot()
    shown, ticks = _elements(pvi, state, latents, names, "plot_forest", most)
    tail = 0.5 * (1 - prob)
    found = _marginals(pvi, state, shown, groups, (tail, 0.5, 1 - tail), parts)
    labels = tuple(found.cavity or found.alone)
    lines = 1 + len(parts) * len(labels)
    if ax is None:
        height = 1.2 + 0.14 * len(ticks) * (lines + 2)
        ax = plt.subplots(figsize=(7.5, min(14.0, max(3.0, height))), layout="constrained")[1]
    offset = iter(np.linspace(-0.38, 0.38, lines) if lines > 1 else [0.0])
    rows = np.arange(len(ticks))
    _draw_interval(ax, rows + next(offset), found.q, color="black", fmt="o", markersize=5, linewidth=2.2, label="q")
    for i, label in enumerate(labels):
        color = f"C{i}"
        if "cavity" in parts:
            style = {"markerfacecolor": "white", "label": f"without {label}"}
            _draw_interval(ax, rows + next(offset), found.cavity[label], color=color, fmt="o", markersize=4, **style)
        if "alone" in parts:
            style = {"linestyle": "--", "label": f"{label} alone"}
            _draw_interval(ax, rows + next(offset), found.alone[label], color=color, fmt=".", markersize=5, **style)
    ax.set_yticks(rows, ticks)
    ax.set_ylim(len(ticks) - 0.5, -0.5)
    for between in rows[1:] - 0.5:
        ax.axhline(between, color="0.85", linewidth=0.8, zorder=0)
    ax.set_xlabel(f"{100 * prob:g} % interval and median")
    ax.grid(False, axis="y")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return ax


def plot_influence(
    pvi: Any,
    state: PVIState,
    latents: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    groups: Iterable[Hashable] | None = None,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    most: int = 40,
    ax: Any = None,
) -> Any:
    """Draw by how many posterior sds each group moves each element: the median of q less that of the cavity without the group.

    Args:
        pvi: the fit.
        state: a state of it; it is only read.
        latents: as of :func:`plot_forest`.
        groups: labels of the groups to draw; all of the state by default.
        names: what to call the elements of a latent, in the order of ``ravel``.
        most: elements that are drawn, the first ones.
        ax: matplotlib axes to draw on; new ones by default.

    Returns:
        The matplotlib axes: one row per group, one column per element, colours in units of half the distance between the
        15.9 % and 84.1 % quantiles of q (the sd, where the marginal is Gaussian). Rows of groups without a normalisable cavity are
        empty.

    Raises:
        PVIError: for an unknown latent, or without matplotlib (extra ``plots``).
        PartitionError: for an unknown label.
        ImproperError: when q is not normalisable.
    """
    plt = _pyplot()
    shown, ticks = _elements(pvi, state, latents, names, "plot_influence", most)
    found = _marginals(pvi, state, shown, groups, (_ONE_SD, 0.5, 1 - _ONE_SD), ("cavity",))
    low, middle, high = found.q
    nothing = np.full(len(ticks), np.nan)
    cavities = np.stack([nothing if x is None else x[1] for x in found.cavity.values()])
    shift = (middle - cavities) / (0.5 * (high - low))
    if ax is None:
        size = max(4.5, min(14.0, 2.5 + 0.45 * len(ticks))), max(2.4, min(12.0, 1.6 + 0.4 * len(shift)))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    finite = np.abs(shift[np.isfinite(shift)])
    edge = max(float(finite.max()) if finite.size else 0.0, 1e-12)
    image = ax.imshow(shift, cmap="RdBu_r", vmin=-edge, vmax=edge, aspect="auto", interpolation="nearest")
    improper = {label for label, x in found.cavity.items() if x is None}
    named = [f"{label} (no cavity)" if label in improper else str(label) for label in found.cavity]
    ax.set_yticks(np.arange(len(named)), named)
    ax.set_xticks(
        np.arange(len(ticks)), ticks, rotation=45 if len(ticks) > 6 else 0, ha="right" if len(ticks) > 6 else "center"
    )
    ax.grid(False)
    if shift.size <= _NUMBERED:
        for (i, j), value in np.ndenumerate(shift):
            if np.isfinite(value):
                color = "white" if abs(value) > 0.6 * edge else "black"
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize="small", color=color)
    ax.figure.colorbar(image, ax=ax, label="shift of the median (sds)")
    return ax


def plot_khat(
    pvi: Any, state: PVIState, *args: Any, rng_key: Any, num_samples: int = 1000, ax: Any = None, **kwargs: Any
) -> Any:
    """Draw the Pareto k-hat of every group's site, and of the whole q.

    Args:
        pvi: the fit.
        state: a state of it; it is only read.
        args: the model's positional arguments.
        rng_key: random key.
        num_samples: draws from q, at least 100; see :meth:`numpyro_pvi.PVI.khat`.
        ax: matplotlib axes to draw on; new ones by default.
        kwargs: the model's keyword arguments.

    Returns:
        The matplotlib axes: one point per group, by ``pvi.khat(by_group=True)``, and last the whole q's, by ``pvi.khat``; lines at
        .5 and .7. An infinite one is an arrow at the upper edge.

    Raises:
        PVIError: for fewer than 100 draws, or without matplotlib (extra ``plots``).
        StateError: when the rows of some groups are not at hand.
        ImproperError: when q is not normalisable.
    """
    plt = _pyplot()
    whole = pvi.khat(state, *args, rng_key=rng_key, num_samples=num_samples, **kwargs)
    found = pvi.khat(state, *args, rng_key=rng_key, num_samples=num_samples, by_group=True, **kwargs)
    values = np.asarray([*found.values(), whole], float)
    ticks = [*(str(label) for label in found), "whole q"]
    if ax is None:
        ax = plt.subplots(figsize=(max(3.5, min(14.0, 2.0 + 0.45 * len(ticks))), 3.4), layout="constrained")[1]
    top = max(1.0, *(1.1 * values[np.isfinite(values)])) if np.any(np.isfinite(values)) else 1.0
    bottom = min(0.0, *(values[np.isfinite(values)] - 0.05)) if np.any(np.isfinite(values)) else 0.0
    for edge, color in ((_GOOD, "0.6"), (_USABLE, "black")):
        ax.axhline(edge, color=color, linestyle=":", linewidth=1)
        ax.text(1.01, edge, f"{edge:g}", transform=ax.get_yaxis_transform(), va="center", fontsize="small", color=color)
    positions = np.arange(len(ticks))
    colors = ["C0"] * len(found) + ["black"]
    ax.scatter(positions, np.where(np.isfinite(values), values, np.nan), c=colors, zorder=3)
    for at in positions[np.isposinf(values)]:
        ax.plot(at, top, marker="^", color=colors[at], clip_on=False, zorder=3)
    ax.set_xticks(positions, ticks, rotation=45 if len(ticks) > 8 else 0, ha="right" if len(ticks) > 8 else "center")
    ax.set(ylabel="Pareto k-hat", ylim=(bottom, top), xlim=(-0.6, len(ticks) - 0.4))
    return ax


def _draw_interval(ax: Any, rows: np.ndarray, values: np.ndarray | None, *, linestyle: str = "-", **style: Any) -> None:
    if values is None:
        return
    low, middle, high = values
    style = {"linewidth": 1.2} | style
    drawn = ax.errorbar(middle, rows, xerr=np.stack([middle - low, high - middle]), **style)
    for bar in drawn.lines[2]:
        bar.set_linestyle(linestyle)


def _elements(
    pvi: Any,
    state: PVIState,
    latents: Sequence[str] | Mapping[str, Sequence[int]] | None,
    names: Mapping[str, Sequence[str]] | None,
    where: str,
    most: int,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Positions of the elements to draw by latent, and what they are called."""
    shapes = _shared(pvi, state)
    wanted = dict.fromkeys([latents] if isinstance(latents, str) else shapes if latents is None else latents)
    chosen = latents if isinstance(latents, Mapping) else {}
    found: dict[str, np.ndarray] = {}
    ticks: list[str] = []
    for name in wanted:
        if name not in shapes:
            raise PVIError(
                f"{where}(latents=...): {name!r} is none of the shared latents {', '.join(map(repr, shapes))}."
            )
        size = int(np.prod(shapes[name]))
        at = np.arange(size)[np.asarray(chosen.get(name, np.arange(size)), int)][: max(0, most - len(ticks))]
        own = (names or {}).get(name)
        if own is not None and len(own) != size:
            raise PVIError(f"{where}(names=...): {name!r} has {size} elements, and {len(own)} names.")
        if at.size:
            found[name] = at
            ticks += [_called(name, shapes[name], i) if own is None else str(own[i]) for i in at.tolist()]
    return found, ticks


def _called(name: str, shape: tuple[int, ...], at: int) -> str:
    index = ", ".join(str(i) for i in np.unravel_index(at, shape)) if shape else ""
    return f"{name}[{index}]" if index else name


def _shared(pvi: Any, state: PVIState) -> dict[str, tuple[int, ...]]:
    """Shapes of the latents that all groups share, in their own supports."""
    own, posterior = state.plan.own_latents, pvi.posterior(state)
    return {n: d.batch_shape + d.event_shape for n, d in posterior.items() if n not in own}


def _marginals(
    pvi: Any,
    state: PVIState,
    shown: dict[str, np.ndarray],
    groups: Iterable[Hashable] | None,
    levels: tuple[float, float, float],
    parts: Sequence[str],
) -> _Marginals:
    labels = state.groups if groups is None else tuple(groups)
    for label in labels:
        pvi.site(state, label)  # refuses an unknown one, naming near ones
        if label is PRIOR:
            raise PVIError(
                "groups=...: PRIOR is no group. What it says is pvi.prior(state), and is in every group alone."
            )

    def read(sites: Any) -> np.ndarray:
        posterior = pvi.posterior(dataclasses.replace(state, sites=sites))
        return np.concatenate(
            [_quantiles(posterior[n], levels).reshape(len(levels), -1)[:, at] for n, at in shown.items()], 1
        )

    def read_or_none(sites: Any) -> np.ndarray | None:
        try:
            return read(sites)
        except ImproperError:
            return None

    without = {g: read_or_none(_shares(state, g, False)) for g in labels} if "cavity" in parts else {}
    alone = {g: read_or_none(_shares(state, g, True)) for g in labels} if "alone" in parts else {}
    return _Marginals(read(state.sites), without, alone)


def _shares(state: PVIState, label: Hashable, alone: bool) -> Any:
    """The sites with one group's taken out, or with all other groups' taken out; the prior factor's belongs to the prior."""
    plan, slots, others = state.plan, len(state.plan.absent), state.sites.others
    if plan.tied:
        share = 1 / len(plan.groups)
        return with_shares(state.sites, [share if alone else 1 - share])
    kept = np.asarray([(group == label) == alone for group in plan.groups], float)
    if plan.rows is not None:
        return with_shares(state.sites, kept[np.asarray(state.prior.group)][None])
    if others is not None:
        others = np.concatenate([kept[:slots], np.zeros(len(jax.tree.leaves(others)[0]) - slots)])
    return with_shares(state.sites, kept[slots:], others)


def _quantiles(distribution: Any, levels: tuple[float, float, float]) -> np.ndarray:
    """Quantiles of every element, levels first; through transforms of single elements in closed form."""
    back: list[Callable] = []
    inner = distribution
    while True:
        if isinstance(inner, dist.Independent):
            inner = inner.base_dist
        elif isinstance(inner, dist.TransformedDistribution) and all(map(_elementwise, inner.transforms)):
            back += reversed(inner.transforms)
            inner = inner.base_dist
        else:
            break
    values = marginal_quantiles(inner, jax.numpy.asarray(levels))
    for transform in reversed(back):
        values = transform(values)
    # A decreasing transform turns levels around; they are symmetric about a half.
    return np.sort(np.asarray(values), axis=0)


def _elementwise(transform: Any) -> bool:
    while isinstance(transform, dist.transforms.IndependentTransform):
        transform = transform.base_transform
    if isinstance(transform, dist.transforms.ComposeTransform):
        return all(map(_elementwise, transform.parts))
    return isinstance(transform, dist.transforms.ReshapeTransform) or transform.domain.event_dim == 0
