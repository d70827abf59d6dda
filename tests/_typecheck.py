"""The checker that tests/conftest.py hooks into the package: beartype, except on the making of objects."""

from beartype import beartype


def check(function):
    """Checks a function's annotations, `__init__` excepted.

    JAX rebuilds dataclasses that are pytrees with leaves that are no arrays at all (shapes, axis numbers, None), so the
    annotations of their fields hold where functions take and return them, not for every object made. And what a user
    passes to a constructor is checked by the constructor, whose own message is what the tests want to see.
    """
    return function if function.__name__ == "__init__" else beartype(function)
