"""Gradients of a model's densities, in the mode of differentiation that the model has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# What JAX says of a loop whose length is known only as it runs.
_NO_REVERSE = "Reverse-mode differentiation does not work"


def either_mode(run: Callable[[bool], Any]) -> Any:
    """What ``run(False)`` gives, or ``run(True)`` where JAX refuses to differentiate in reverse mode.

    A ``while_loop`` in a model has no reverse mode. Nothing is looked for beforehand: JAX refuses while it traces, and only then
    is anything traced a second time.

    Args:
        run: takes whether to differentiate in forward mode.

    Returns:
        The result.
    """
    try:
        return run(False)
    except ValueError as error:
        if _NO_REVERSE not in str(error):
            raise
    return run(True)


def value_and_grad(
    function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """As ``jax.value_and_grad``, by forward passes, one per number of the argument, where the function has no reverse mode.

    Args:
        function: of a scalar value, or with ``has_aux`` of a pair of one and of whatever else it found.
        argnums: the argument (an array, or a pytree of arrays) to differentiate by, or several.
        has_aux: whether the function gives a pair.

    Returns:
        A function of the same arguments that gives what the function does, and the gradient.
    """

    def twice(*args: Any) -> tuple[Any, Any]:
        found = function(*args)
        return (found[0] if has_aux else found), found

    def both(*args: Any) -> tuple[Any, Any]:
        def run(forward: bool) -> tuple[Any, Any]:
            if not forward:
                return jax.value_and_grad(function, argnums, has_aux=has_aux)(*args)
            gradient, found = jax.jacfwd(twice, argnums, has_aux=True)(*args)
            return found, gradient

        return either_mode(run)

    return both


def grad(function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient, and with ``has_aux`` what else the function found: see :func:`value_and_grad`.

    Args:
        function: of a scalar value, or with ``has_aux`` of a pair.
        argnums: the argument to differentiate by, or several.
        has_aux: whether the function gives a pair.

    Returns:
        A function of the same arguments that gives the gradient.
    """
    both = value_and_grad(function, argnums, has_aux)

    def slope(*args: Any) -> Any:
        found, gradient = both(*args)
        return (gradient, found[1]) if has_aux else gradient

    return slope


def hessian_of(function: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """Second derivatives, by forward passes over :func:`grad`.

    Args:
        function: of a scalar value.
        argnums: the argument (an array) to differentiate by.

    Returns:
        A function of the same arguments that gives the Hessian.
    """
    return jax.jacfwd(grad(function, argnums), argnums)


__all__ = ["either_mode", "grad", "hessian_of", "value_and_grad"]
