"""``ep-probit``: see `benchmarks._ep`."""

from benchmarks._ep import probit as run

__all__ = ["run"]
