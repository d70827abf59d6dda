"""``first-fit``: the first `run` and the next one, in fresh processes, PVI and SVI in turn; programs and seconds of compiling."""

import argparse
import pathlib
import statistics
import tempfile

from benchmarks import _cold, _first_models, _report

_HEADER = ("model", "side", "first s", "CPU s", "programs", "compiling s", "second s", "programs again", "ELBO")


def run(options: argparse.Namespace) -> _report.Report:
    """Alternates fresh processes of both sides, without and with JAX's compilation cache."""
    report = _report.Report("first-fit")
    repeats = 1 if options.quick else 5
    names = options.only or [n for n in _first_models.CASES if n != "radon" or options.data]
    rows: list[tuple] = []
    for name in names:
        _, ratio, most = _first_models.CASES[name]
        found = _measure(name, options.data, repeats, None)
        rows += [(name, side, *_figures(figures)) for side, figures in found.items()]
        report.add_target(f"{name}: first run over SVI's", found["PVI"]["first"] / found["SVI"]["first"], ratio)
        report.add_target(f"{name}: programs of the first run", found["PVI"]["programs"], most)
    report.add_table(f"cache off, fresh processes, median of {repeats}", _HEADER, rows)
    rows = []
    for name in names[:1] if options.quick else names[:4]:
        with tempfile.TemporaryDirectory() as folder:
            _measure(name, options.data, 1, pathlib.Path(folder))
            found = _measure(name, options.data, repeats, pathlib.Path(folder))
        rows += [(name, side, *_figures(figures)) for side, figures in found.items()]
        report.add_target(f"{name}: over SVI's, cache on", found["PVI"]["first"] / found["SVI"]["first"], 0.8)
    report.add_table(f"a second process with the cache on, median of {repeats}", _HEADER, rows)
    if options.only is None:
        _large(report, options.quick)
    return report


def _large(report: _report.Report, quick: bool) -> None:
    """Planning, checks and the start of a fit with many rows."""
    rows, dim, groups = (100_000 if quick else 1_000_000), 20, 10
    size = {"num_rows": rows, "dim": dim, "num_groups": groups}
    runs = [_cold.measure(kind="large", num_steps=5, **size) for _ in range(1 if quick else 3)]
    found = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    header = ("rows, columns, groups", "init s", "memory of init over the data's", "five rounds s")
    report.add_table("large data", header, [((rows, dim, groups), found["init"], found["memory"], found["run"])])
    report.add_target("large data: seconds of init", found["init"], 5.0)
    report.add_target("large data: memory of init over the data's", found["memory"], 3.0)


def _measure(name: str, data: str | None, repeats: int, cache: pathlib.Path | None) -> dict[str, dict[str, float]]:
    """Medians by side; the sides take turns."""
    found: dict[str, list[dict[str, float]]] = {"PVI": [], "SVI": []}
    for _ in range(repeats):
        for side, runs in found.items():
            runs.append(_cold.measure(cache, kind="first_fit", side=side, model=name, data=data))
    return {side: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for side, runs in found.items()}


def _figures(found: dict[str, float]) -> tuple[float | int, ...]:
    names = ("first", "cpu", "programs", "compiling", "second", "again", "elbo")
    return tuple(int(found[n]) if n in ("programs", "again") else found[n] for n in names)
