"""The checker that tests/conftest.py hooks into the package: beartype, except where users enter."""

from beartype import beartype


def check(function):
    """Checks a function's annotations, `__init__` excepted.

    JAX rebuilds dataclasses that are pytrees with leaves that are no arrays at all (shapes, axis numbers, None), so the
    annotations of their fields hold where functions take and return them, not for every object made. And what a user
    passes to a constructor, or to the shell PVI, is checked there, and that message is what the tests want to see.
    """
    shell = function.__module__ == "numpyro_pvi.pvi"
    return function if shell or function.__name__ == "__init__" else beartype(function)
