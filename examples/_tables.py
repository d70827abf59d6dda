"""Tables for the examples: a CSV file, or scikit-learn's breast-cancer data, as a design matrix with groups.

Only the standard library and NumPy. No function here prints, and no message holds a value of a row: errors and the
report name columns and counts. Two kinds of value do leave a table by name, because a result cannot be read without
them: the labels of the group column, and the levels of a text column that at least ``MIN_LEVEL_ROWS`` rows share.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _positive import FORMS, TableError, parse_positive, to_number
from jaxtyping import Bool, Float, Int

MISSING = frozenset({"", "na", "nan", "n/a", "?"})
MAX_LEVELS = 12
MAX_GROUPS = 50
MIN_LEVEL_ROWS = 5


@dataclass(frozen=True)
class ColumnReport:
    """What became of one column of the file."""

    name: str
    kind: str  # "number" or "text"
    missing: int  # rows in which the column was missing
    became: str  # the columns made of it, or why it was dropped


@dataclass(frozen=True)
class Table:
    """A binary regression problem with groups.

    Attributes:
        X: Standardised columns, float32: mean 0 over all rows; standard deviation 1, or for a column of two values a
            step of 1 from the lower to the higher.
        y: 1 where the target is positive, int32.
        groups: One label per row.
        features: The name of every column of ``X``.
        columns: What became of every column of the file.
        dropped_rows: Rows left out because the target or the group was missing.
        source: What the data are, in words.
        target: What y = 1 means, in words.
    """

    X: Float[np.ndarray, "N D"]
    y: Int[np.ndarray, " N"]
    groups: tuple[str, ...]
    features: tuple[str, ...]
    columns: tuple[ColumnReport, ...]
    dropped_rows: int
    source: str
    target: str

    def group_sizes(self) -> dict[str, int]:
        """Rows per group, the largest group first, ties by label."""
        return dict(sorted(Counter(self.groups).items(), key=lambda item: (-item[1], item[0])))

    def rows_of(self, label: str) -> Bool[np.ndarray, " N"]:
        """True for the rows of one group."""
        return np.array([group == label for group in self.groups])


def read_table(path: str | Path, group: str, target: str, positive: str | None = None) -> Table:
    """Reads a CSV file (plain or gzip) into a standardised binary regression problem.

    A column of numbers stays one column, its missing entries (empty, NA, NaN, N/A, ?) replaced by the column's median
    and marked in an extra 0/1 column ``NAME missing``. A text column becomes one 0/1 column per level but the most
    frequent one; levels of fewer than ``MIN_LEVEL_ROWS`` rows are taken together as ``other``, and a text column of
    more than ``MAX_LEVELS`` levels is left out. Columns that do not vary are left out. Codes written as numbers are
    numbers: write them as text to have them as levels.

    Args:
        path: The file; the delimiter is the one of comma, semicolon and tab that the header has most of.
        group: Column that holds the group of every row.
        target: Column that holds the outcome.
        positive: Which outcomes count as 1, see :func:`parse_positive`. May be left out when the column is 0/1.

    Returns:
        The table; its ``columns`` say what became of every column.

    Raises:
        TableError: The file cannot be read as a table, a column is missing or repeated, the target has one class, there
            are no groups to compare, or a column is a mixture of numbers and something else.
    """
    header, rows = _read_rows(Path(path))
    for name, option in ((group, "--group"), (target, "--target")):
        if name not in header:
            raise TableError(f"{option}: the file has no column '{name}'; it has {', '.join(map(repr, header))}")
    if group == target:
        raise TableError(f"--group and --target both name column '{group}'; they must differ")
    columns = {name: [row[i].strip() for row in rows] for i, name in enumerate(header)}
    keep = [
        g.lower() not in MISSING and t.lower() not in MISSING
        for g, t in zip(columns[group], columns[target], strict=True)
    ]
    columns = {name: [v for v, kept in zip(values, keep, strict=True) if kept] for name, values in columns.items()}
    y = _outcomes(target, columns[target], positive)
    labels = _group_labels(group, columns[group])
    made: dict[str, Float[np.ndarray, " N"]] = {}
    reports = []
    for name in header:
        if name in (group, target):
            continue
        report, new = _column(name, columns[name])
        reports.append(report)
        clash = sorted(made.keys() & new.keys())
        if clash:
            raise TableError(f"two columns would both be called '{clash[0]}': rename column '{name}'")
        made.update(new)
    if not made:
        raise TableError(
            f"no column is left to predict '{target}' from; every other column is constant, missing or free text"
        )
    return Table(
        X=_standardise(np.stack(list(made.values()), axis=1)),
        y=y,
        groups=labels,
        features=tuple(made),
        columns=tuple(reports),
        dropped_rows=len(keep) - sum(keep),
        source=f"{Path(path).name}, groups: column '{group}'",
        target=f"{target} (--positive {positive})" if positive else f"{target} = 1",
    )


def breast_cancer() -> Table:
    """Scikit-learn's breast-cancer data in five unequal, *simulated* clinics.

    The data are one series of 569 patients and have no groups. To make groups that differ, patients are ranked by
    ``mean texture`` plus noise of .5 standard deviations (seed 0) and cut at 5, 15, 30, 55 and 100 %: the smallest
    clinic sees the lowest textures and few malignant cases, the largest the highest and many.

    Returns:
        569 rows, 30 columns, y = 1 for a malignant tumour.

    Raises:
        TableError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ModuleNotFoundError:
        raise TableError(
            "the built-in data need scikit-learn: pip install 'numpyro_pvi[examples]', or give --data"
        ) from None
    data = load_breast_cancer()
    X = _standardise(data.data)
    names = [str(name) for name in data.feature_names]
    noise = np.random.default_rng(0).normal(size=len(X))
    order = np.argsort(X[:, names.index("mean texture")] + 0.5 * noise)
    labels = np.empty(len(X), dtype=object)
    cuts = np.round(np.cumsum([0.05, 0.10, 0.15, 0.25]) * len(X)).astype(int)
    for label, rows in zip("EDCBA", np.split(order, cuts), strict=True):
        labels[rows] = f"clinic {label}"
    return Table(
        X=X,
        y=(data.target == 0).astype(np.int32),
        groups=tuple(labels),
        features=tuple(names),
        columns=tuple(ColumnReport(name, "number", 0, "1 column") for name in names),
        dropped_rows=0,
        source="scikit-learn's breast-cancer data, groups: 5 simulated clinics",
        target="malignant tumour",
    )


def _read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and body; every failure is a message without content (``from None`` keeps values out of tracebacks)."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise TableError(f"--data: cannot read {path.name}: {error.strerror or 'not a valid gzip file'}") from None
    except EOFError:
        raise TableError(f"--data: {path.name} is an incomplete gzip file") from None
    except UnicodeDecodeError:
        raise TableError(f"--data: {path.name} is not UTF-8 text; save it as UTF-8") from None
    first = text.split("\n", 1)[0]
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count)))
    except csv.Error:
        raise TableError(f"--data: {path.name} cannot be read as CSV (unbalanced quotes or a stray NUL)") from None
    lines = [line for line in lines if line]
    if len(lines) < 3:
        raise TableError(
            f"--data: {path.name} has {max(len(lines) - 1, 0)} rows below the header; at least 2 are needed"
        )
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    numbers = sum(to_number(name) is not None for name in header)
    if numbers:  # the line may be a patient's: its content must not go into a message
        raise TableError(
            f"--data: {numbers} of {len(header)} names in the first line are numbers; a header line is needed"
        )
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated or "" in header:
        raise TableError(
            f"--data: every column needs its own name; unnamed or repeated: {', '.join(map(repr, repeated)) or 1}"
        )
    ragged = sum(len(row) != len(header) for row in rows)
    if ragged:
        raise TableError(f"--data: {ragged} of {len(rows)} rows do not have the {len(header)} fields of the header")
    return header, rows


def _outcomes(target: str, values: list[str], positive: str | None) -> Int[np.ndarray, " N"]:
    if not values:
        raise TableError(f"no row has both a group and a value of column '{target}'")
    if positive is None:
        if {to_number(value) for value in set(values)} - {0.0, 1.0}:
            raise TableError(
                f"column '{target}' is not 0/1 ({len(set(values))} different values); say which count as 1 with "
                f"--positive; {FORMS}"
            )
        positive = "== 1"
    y = parse_positive(positive, target)(target, values).astype(np.int32)
    if y.min() == y.max():
        raise TableError(
            f"{'all' if y[0] else 'none'} of the {len(y)} rows are positive: the target '{target}' has one class, and "
            "a logistic regression needs both; change --target or --positive"
        )
    return y


def _group_labels(group: str, values: list[str]) -> tuple[str, ...]:
    count = len(set(values))
    if not 2 <= count <= MAX_GROUPS:
        raise TableError(
            f"--group: column '{group}' has {count} different values; between 2 and {MAX_GROUPS} groups are needed"
        )
    return tuple(values)


def _column(name: str, values: list[str]) -> tuple[ColumnReport, dict[str, Float[np.ndarray, " N"]]]:
    """One column of the file: what to say about it, and the columns made of it."""
    missing = np.array([value.lower() in MISSING for value in values])
    present = [value for value, gone in zip(values, missing, strict=True) if not gone]
    numbers = [to_number(value) for value in present]
    count, wrong, levels = int(missing.sum()), sum(number is None for number in numbers), len(set(present))
    kind = "number" if wrong == 0 else "text"
    if not present:
        return ColumnReport(name, kind, count, "dropped: missing in every row"), {}
    if wrong and levels > MAX_LEVELS:
        if wrong < len(present) / 2:
            raise TableError(
                f"column '{name}': {wrong} of {len(present)} values are not finite numbers; mark missing values as "
                "empty, NA or ?, or make the whole column text"
            )
        return ColumnReport(name, kind, count, f"dropped: text with {levels} levels (at most {MAX_LEVELS})"), {}
    made = _number_columns(name, numbers, missing) if wrong == 0 else _level_columns(name, values, missing)
    made = {key: column for key, column in made.items() if np.ptp(column) > 0}
    if not made:
        return ColumnReport(name, kind, count, "dropped: constant"), {}
    flag = " (1 marks missing)" if f"{name} missing" in made else ""
    return ColumnReport(name, kind, count, f"{len(made)} column{'s' if len(made) > 1 else ''}{flag}"), made


def _number_columns(
    name: str, numbers: list[float], missing: Bool[np.ndarray, " N"]
) -> dict[str, Float[np.ndarray, " N"]]:
    column = np.full(len(missing), np.median(numbers))
    column[~missing] = numbers
    return {name: column, f"{name} missing": missing.astype(np.float64)}


def _level_columns(name: str, values: list[str], missing: Bool[np.ndarray, " N"]) -> dict[str, Float[np.ndarray, " N"]]:
    """One 0/1 column per level; the most frequent level is the reference and has none."""
    counts = Counter(value for value, gone in zip(values, missing, strict=True) if not gone)
    shown = {level for level, count in counts.items() if count >= MIN_LEVEL_ROWS}
    coded = [
        "missing" if gone else value if value in shown else "other" for value, gone in zip(values, missing, strict=True)
    ]
    coded_counts = Counter(code for code, gone in zip(coded, missing, strict=True) if not gone)
    reference = min(coded_counts, key=lambda level: (-coded_counts[level], level))
    made = {
        f"{name}={level}": np.array(
            [code == level and not gone for code, gone in zip(coded, missing, strict=True)], np.float64
        )
        for level in sorted(coded_counts)
        if level != reference
    }
    return made | {f"{name} missing": missing.astype(np.float64)}


def _standardise(columns: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N D"]:
    """Centres every column over all groups; two-valued columns keep a step of 1, the others get standard deviation 1.

    A 0/1 column divided by its standard deviation would step by 1 / sd: 21 for a mark on 2 of 920 rows, where one and
    the same Normal(0, 2.5) prior would no longer mean the same.
    """
    spread = [np.ptp(column) if len(np.unique(column)) == 2 else column.std() for column in columns.T]
    return ((columns - columns.mean(axis=0)) / np.array(spread)).astype(np.float32)
