"""Which outcomes count as 1: ``--positive`` parsed into a comparison. Nothing is ever evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

FORMS = "write it as '> 0', 'COLUMN >= 2', '== 2', '!= no' or a plain value such as yes (quotes are allowed)"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_OPERATORS = (">=", "<=", "==", "!=", ">", "<")


class TableError(ValueError):
    """A table, or a request about one, that cannot be used. The message holds column names and counts only."""


@dataclass(frozen=True)
class Positive:
    """A parsed ``--positive`` expression: ``target <operator> value``."""

    operator: str
    text: str
    number: float | None

    def __call__(self, target: str, values: Sequence[str]) -> Bool[np.ndarray, " N"]:
        """Says which rows are positive.

        Args:
            target: Name of the target column, for messages.
            values: The column as text, without missing entries.

        Returns:
            One truth value per row. ``==`` and ``!=`` compare as numbers when both sides are numbers, else as text.

        Raises:
            TableError: An order is asked of values that are not numbers.
        """
        numbers = [to_number(value) for value in values]
        if self.operator in ("==", "!="):
            equal = np.array(
                [
                    number == self.number if number is not None and self.number is not None else value == self.text
                    for number, value in zip(numbers, values, strict=True)
                ]
            )
            return equal if self.operator == "==" else ~equal
        wrong = sum(number is None for number in numbers)
        if wrong:
            raise TableError(
                f"--positive: '{self.operator}' needs numbers, but {wrong} of {len(values)} values of column "
                f"'{target}' are not numbers; use '== VALUE' for text"
            )
        column = np.array(numbers, dtype=np.float64)
        compare = {">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal}[self.operator]
        return compare(column, self.number)


def parse_positive(expression: str, target: str) -> Positive:
    """Parses ``[COLUMN] OPERATOR VALUE`` or a plain ``VALUE`` without ever evaluating it.

    Args:
        expression: What the user wrote after ``--positive``, for example ``num > 0``, ``>0``, ``== 2`` or ``yes``.
        target: The target column; a column named in the expression must be this one.

    Returns:
        The rule, to be called with the column.

    Raises:
        TableError: The expression is none of these forms, names another column, or orders by something not a number.
    """
    rest = expression.strip()
    if not rest or len(rest) > 200 or not rest.isprintable():
        raise TableError(f"--positive: empty, longer than 200 characters or not printable; {FORMS}")
    after_name = rest.removeprefix(target).lstrip()
    if after_name != rest and after_name.startswith(_OPERATORS):
        rest = after_name
    quoted = rest[0] in "'\""
    found = None if quoted else re.search(r"[<>=!]+", rest)
    if found is None:
        text = _unquote(rest)
        return Positive("==", text, None if quoted else to_number(text))
    name, operator, text = rest[: found.start()].strip(), found.group(), rest[found.end() :].strip()
    if operator not in _OPERATORS:
        raise TableError(f"--positive: '{operator}' is not one of {', '.join(_OPERATORS)}; {FORMS}")
    if name:
        raise TableError(f"--positive: it may only compare the target column '{target}'; {FORMS}")
    value = _unquote(text)
    number = to_number(value) if value == text else None
    if not value or (operator not in ("==", "!=") and number is None):
        raise TableError(
            f"--positive: '{operator}' must be followed by one {'value' if not value else 'number'}; {FORMS}"
        )
    return Positive(operator, value, number)


def to_number(text: str) -> float | None:
    """The number a text is, or None. Stricter than ``float``: no underscores, no nan, no inf."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if np.isfinite(number) else None


def _unquote(text: str) -> str:
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
