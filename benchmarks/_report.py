"""Tables, verdicts, medians and the description of the machine."""

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass
class Target:
    """One line of the list of what a benchmark must reach.

    Attributes:
        name: what was measured.
        value: the figure found here.
        limit: the figure to reach.
        at_least: True when larger is better.
    """

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure reaches the limit (a NaN never does)."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Table:
    """One table: what it is about, the names of its columns, and its rows."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def text(self) -> str:
        """The table in Markdown, under its caption."""
        return f"**{self.caption}**\n\n" + markdown_table(self.header, self.rows)

    def column(self, name: str) -> list[Any]:
        """The entries of one column, by its name."""
        at = self.header.index(name)
        return [row[at] for row in self.rows]


@dataclasses.dataclass
class Report:
    """What one benchmark found: its tables in order, and the targets they decide."""

    title: str
    tables: list[Table] = dataclasses.field(default_factory=list)
    targets: list[Target] = dataclasses.field(default_factory=list)

    def add_table(self, caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Appends a table and prints it at once, so that a long benchmark shows its progress."""
        self.tables.append(Table(caption, tuple(header), tuple(tuple(row) for row in rows)))
        print(f"\n{self.tables[-1].text}\n", flush=True)

    def add_target(self, name: str, value: float, limit: float, at_least: bool = False) -> None:
        """Appends one line to the table of targets."""
        self.targets.append(Target(name, value, limit, at_least))

    @property
    def verdicts(self) -> Table:
        """Every target with its figure, its limit and whether it was reached."""
        rows = [
            (t.name, t.value, f"{'>=' if t.at_least else '<='} {format_cell(t.limit)}", "yes" if t.met else "**no**")
            for t in self.targets
        ]
        return Table(f"{self.title}: targets", ("target", "here", "must be", "met"), tuple(rows))

    def print_targets(self) -> None:
        """Prints the verdicts, where there are any."""
        if self.targets:
            print(f"\n{self.verdicts.text}\n", flush=True)

    @property
    def met(self) -> bool:
        """Whether every target is met."""
        return all(t.met for t in self.targets)


def format_cell(value: Any) -> str:
    """Three significant digits for floats, plain text for the rest."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with padded columns, readable as plain text too."""
    cells = [[str(h) for h in header]] + [[format_cell(v) for v in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def seconds(function: Callable[[], Any]) -> float:
    """Wall seconds of one call, its arrays awaited."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def paired_medians(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of several functions measured in turn, so that they share the machine's bad moments.

    Each is called once before (compilation, warm caches). The order is reversed every other time.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats):
        names = list(functions)
        for name in names if repeat % 2 == 0 else reversed(names):
            times[name].append(seconds(functions[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def describe_machine(dtype: str = "float32") -> str:
    """One line: dtype, device, cores and the versions that decide the figures."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("numpyro_pvi", "numpyro", "jax", "jaxlib", "numpy"))
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"dtype {dtype} (gaps in float64); device {device.platform} ({device.device_kind}), {cores} CPU cores, "
        f"{platform.machine()}; Python {platform.python_version()}, {versions}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
