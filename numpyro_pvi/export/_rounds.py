"""A run's trace as an xarray data set and as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._state import PVIRunResult, PVITrace
from ..errors import PVIError

_PER_FACTOR = ("move", "step", "backoffs", "skipped", "staleness")
_PER_ROUND = ("elbo", "total_move", "clock", "bytes", "consensus")
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
