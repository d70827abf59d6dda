"""``ep-logistic``: see `benchmarks._ep`."""

from benchmarks._ep import logistic as run

__all__ = ["run"]
