"""Pictures of what each group says: intervals, influence, and how well its site stands in for its factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist

from .._quantiles import marginal_quantiles
from .._state import PVIState
from ..errors import ImproperError, PVIError
from ..handlers import PRIOR
from ..sites import with_shares
from ._rounds import _pyplot

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
    _draw(ax, rows + next(offset), found.q, color="black", fmt="o", markersize=5, linewidth=2.2, label="q")
    for i, label in enumerate(labels):
        color = f"C{i}"
        if "cavity" in parts:
            style = {"markerfacecolor": "white", "label": f"without {label}"}
            _draw(ax, rows + next(offset), found.cavity[label], color=color, fmt="o", markersize=4, **style)
        if "alone" in parts:
            style = {"linestyle": "--", "label": f"{label} alone"}
            _draw(ax, rows + next(offset), found.alone[label], color=color, fmt=".", markersize=5, **style)
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
        .5 and .7. An infinite one is an arrow at the upper edge. Where k-hat by group is not to be had (latents inside the plate
        under a Gaussian guide) the whole q's is drawn alone, under a title that says so.

    Raises:
        PVIError: for fewer than 100 draws, or without matplotlib (extra ``plots``).
        StateError: when the rows of some groups are not at hand.
        ImproperError: when q is not normalisable.
    """
    plt = _pyplot()
    whole = pvi.khat(state, *args, rng_key=rng_key, num_samples=num_samples, **kwargs)
    found: dict[Any, float] = {}
    title = ""
    try:
        found |= pvi.khat(state, *args, rng_key=rng_key, num_samples=num_samples, by_group=True, **kwargs)
    except PVIError as error:
        # Whatever else is wrong, the whole q's has been refused for already.
        title = str(error).partition(". ")[0].partition(": ")[0]
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
    if title:
        ax.set_title(title, fontsize="small", wrap=True)
    ax.set(ylabel="Pareto k-hat", ylim=(bottom, top), xlim=(-0.6, len(ticks) - 0.4))
    return ax


def _draw(ax: Any, rows: np.ndarray, values: np.ndarray | None, *, linestyle: str = "-", **style: Any) -> None:
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
    local = state.plan.partition.local
    own = set() if local is None else set(getattr(local, "names", ()))
    members = getattr(state.sites.local, "parts", {})
    posterior = pvi.posterior(state)
    return {n: d.batch_shape + d.event_shape for n, d in posterior.items() if n not in own and n not in members}


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


__all__ = ["plot_forest", "plot_influence", "plot_khat"]
