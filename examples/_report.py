"""What the hospitals example shows: printed tables and the forest plot. Nothing here fits anything."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _tables import Table
from jaxtyping import Float, Int

MAX_ROWS = 31  # one more coefficient than this and only the MAX_SHOWN largest are drawn and summarised
MAX_SHOWN = 12
MAX_GROUPS_DRAWN = 8
_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b2a800", "#7f5fb0", "#8c6d46")


@dataclass(frozen=True)
class Fit:
    """One approximation of the posterior of the intercept and the D coefficients.

    Attributes:
        method: Its name in the table.
        work: How much was run, in words.
        mean: Posterior means, intercept first.
        sd: Posterior standard deviations.
        low: 5 % quantiles.
        high: 95 % quantiles.
        first: Seconds of the first run, compilation included.
        second: Seconds of the same run again; None where it was not repeated.
        elbo: Evidence lower bound in nats (up is better); None where there is none.
        elbo_error: Monte Carlo standard error of ``elbo`` in nats.
    """

    method: str
    work: str
    mean: Float[np.ndarray, " P"]
    sd: Float[np.ndarray, " P"]
    low: Float[np.ndarray, " P"]
    high: Float[np.ndarray, " P"]
    first: float
    second: float | None = None
    elbo: float | None = None
    elbo_error: float | None = None


@dataclass(frozen=True)
class Influence:
    """How far one group pulls the posterior: posterior against cavity (the posterior without that group's site).

    ``moves`` is (posterior mean - cavity mean) / posterior sd per coefficient; ``widths`` is cavity sd / posterior sd.
    """

    label: str
    moves: Float[np.ndarray, " P"]
    widths: Float[np.ndarray, " P"]


def data_lines(table: Table) -> list[str]:
    """The data in words: size, groups, and what became of every column of the file."""
    sizes = table.group_sizes()
    lines = [
        f"Data: {table.source}",
        f"{len(table.y)} rows, {table.X.shape[1]} standardised columns",
        f"y = 1: {table.target}, {table.y.mean():.0%} of the rows",
    ]
    if table.dropped_rows:
        lines.append(f"{table.dropped_rows} rows left out: their target or group is missing")
    width = max(len("group"), *map(len, sizes))
    lines += ["", f"{'group':<{width}} {'rows':>6} {'share':>6} {'y = 1':>6}"]
    for label, rows in sizes.items():
        lines.append(
            f"{label:<{width}} {rows:>6} {rows / len(table.y):>6.0%} {table.y[table.rows_of(label)].mean():>6.0%}"
        )
    if not any(column.missing or column.kind == "text" or "dropped" in column.became for column in table.columns):
        return [*lines, "", f"All {len(table.columns)} columns are numbers that vary; nothing is missing."]
    width = max(len("column"), *(len(column.name) for column in table.columns))
    lines += ["", f"{'column':<{width}} {'kind':<6} {'missing':>7} {'share':>6}  became"]
    for column in table.columns:
        share = column.missing / len(table.y)
        lines.append(f"{column.name:<{width}} {column.kind:<6} {column.missing:>7} {share:>6.0%}  {column.became}")
    return [*lines, "Missing numbers became the column's median over all groups; an extra 0/1 column marks them."]


def fit_lines(fits: Sequence[Fit], reference: Fit) -> list[str]:
    """One line per method: errors against the reference in the reference's sd, ELBO, work and seconds."""
    work = max(len(fit.work) for fit in (*fits, reference))
    lines = [
        f"{'':<5} {'mean error':^13} {'sd error':^13}",
        f"{'':<5}{' max   mean ' * 2:>28} {'ELBO (nats)':>18}  {'work':<{work}} {'first s':>8} {'second s':>8}",
    ]
    for fit in (*fits, reference):
        errors = [abs(fit.mean - reference.mean) / reference.sd, abs(fit.sd - reference.sd) / reference.sd]
        numbers = "".join(f" {number:>6.3f}" for error in errors for number in (error.max(), error.mean()))
        elbo = "-" if fit.elbo is None else f"{fit.elbo:.3f} +- {fit.elbo_error:.3f}"
        second = "-" if fit.second is None else f"{fit.second:.2f}"
        numbers = f"{'(the reference)':^28}" if fit is reference else numbers
        lines.append(f"{fit.method:<5}{numbers} {elbo:>18}  {fit.work:<{work}} {fit.first:>8.2f} {second:>8}")
    return lines


def influence_lines(influences: Sequence[Influence], table: Table, names: Sequence[str]) -> list[str]:
    """One line per group: the move of the posterior mean that its site makes, in posterior sd."""
    sizes = table.group_sizes()
    width = max(len("group"), *map(len, sizes))
    lines = [
        f"{'group':<{width}} {'rows':>6} {'largest move':>12} {'mean':>6} {'sd without':>10}  most moved coefficient"
    ]
    for influence in influences:
        most = int(np.argmax(abs(influence.moves)))
        lines.append(
            f"{influence.label:<{width}} {sizes[influence.label]:>6} {influence.moves[most]:>+12.2f} "
            f"{abs(influence.moves).mean():>6.2f} {np.median(influence.widths):>9.2f}x  {names[most]}"
        )
    return [
        *lines,
        "In posterior sd: the posterior mean with all groups minus the mean with that group's site removed.",
    ]


def summary_lines(idata: Any, names: Sequence[str], shown: Int[np.ndarray, " S"]) -> list[str]:
    """ArviZ's summary of the PVI posterior, rows named by column and restricted to ``shown``."""
    import arviz

    with warnings.catch_warnings():  # one chain of independent draws: r-hat across chains does not apply
        warnings.simplefilter("ignore")
        frame = arviz.summary(idata, var_names=["intercept", "coefficients"], kind="stats", round_to=2)
    frame.index = list(names)
    return frame.iloc[list(shown)].to_string().splitlines()


def choose_rows(reference: Fit) -> Int[np.ndarray, " S"]:
    """Which coefficients to show, by posterior mean, the intercept first; the largest only if there are many."""
    order = 1 + np.argsort(-abs(reference.mean[1:]))
    kept = order if len(order) <= MAX_ROWS else order[:MAX_SHOWN]
    return np.concatenate([[0], kept[np.argsort(-reference.mean[kept])]])


def forest_plot(
    path: Path, table: Table, reference: Fit, pvi: Fit, alone: Mapping[str, Fit], names: Sequence[str]
) -> None:
    """Draws the coefficients: pooled NUTS and PVI on the left, every group alone against PVI on the right.

    Args:
        path: Where the picture goes; its suffix gives the format.
        table: The data, for group sizes and the title.
        reference: NUTS on the pooled data.
        pvi: The PVI posterior.
        alone: By group label, the posterior of prior x that group's rows only.
        names: "intercept", then the columns.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = choose_rows(reference)
    rows = np.arange(len(shown), dtype=float)
    sizes = table.group_sizes()
    drawn = [label for label in sizes if label in alone][:MAX_GROUPS_DRAWN]
    height = 1.9 + len(shown) * max(0.24, 0.075 * (len(drawn) + 1))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, height), sharey=True, width_ratios=[1, 1.25])
    for fit, offset, colour, marker, label in (
        (reference, -0.16, "black", "o", "NUTS, all rows pooled"),
        (pvi, 0.16, "#0072b2", "s", "PVI, groups apart"),
    ):
        _intervals(left, fit, shown, rows + offset, colour, marker, label, 1.8)
    for row in rows:
        right.plot(
            [pvi.low[shown[int(row)]], pvi.high[shown[int(row)]]],
            [row, row],
            color="#0072b2",
            alpha=0.18,
            lw=9,
            solid_capstyle="butt",
            zorder=0,
            label="PVI, all groups" if row == 0 else None,
        )
    offsets = np.linspace(-0.33, 0.33, len(drawn)) if len(drawn) > 1 else np.zeros(1)
    for label, offset, colour in zip(drawn, offsets, _COLOURS, strict=False):
        _intervals(right, alone[label], shown, rows + offset, colour, "o", f"{label} alone ({sizes[label]} rows)", 1.1)
    left.set_yticks(rows, [names[i] for i in shown])
    left.set_ylim(len(shown) - 0.45, -0.55)
    left.set_title("All groups together", fontsize=11)
    more = "" if len(drawn) == len(alone) else f", the {len(drawn)} largest of {len(alone)}"
    right.set_title(f"Every group alone (prior x its own rows{more})", fontsize=11)
    for axis in (left, right):
        _dress(axis, rows)
    few = "" if len(shown) == len(names) else f"; the {len(shown) - 1} largest of {len(names) - 1} coefficients"
    figure.suptitle(f"Logistic regression of: {table.target}{few}\n{table.source}", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.12 / height))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _intervals(
    axis: Any,
    fit: Fit,
    shown: Int[np.ndarray, " S"],
    at: Float[np.ndarray, " S"],
    colour: str,
    marker: str,
    label: str,
    width: float,
) -> None:
    axis.hlines(at, fit.low[shown], fit.high[shown], color=colour, lw=width)
    axis.plot(fit.mean[shown], at, marker, color=colour, ms=2.6 + width / 2, label=label)


def _dress(axis: Any, rows: Float[np.ndarray, " S"]) -> None:
    for row in rows[1::2]:
        axis.axhspan(row - 0.5, row + 0.5, color="0.955", zorder=-2, lw=0)
    axis.axvline(0, color="0.45", lw=0.8, zorder=-1)
    axis.axhline(0.5, color="0.45", lw=0.8)  # below the intercept, whose scale is its own
    axis.set_xlabel("log odds per sd of the column, or per step of a two-valued one (mean, 90 %)", fontsize=9)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / axis.figure.get_figheight()),
        ncols=3,
        fontsize=9,
        frameon=False,
    )
