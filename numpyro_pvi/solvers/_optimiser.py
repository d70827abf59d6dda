"""One interface for optax's and NumPyro's optimisers of a flat vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import PVIError

_DEFAULT_STEP = 0.01

Objective = Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]]
"""A point to the loss there, in nats, and its gradient."""


class Optimiser(NamedTuple):
    """``init(point)`` to a state, and ``step(objective, point, state)`` to the next point and state."""

    init: Callable[[Float[Array, "D"]], Any]
    step: Callable[[Objective, Float[Array, "D"], Any], tuple[Float[Array, "D"], Any]]
    # Whether a step looks at the objective more than once, so that it must not be noisy (a line search).
    searches: bool


def as_optimiser(optim: Any, owner: str) -> Optimiser:
    """Wrap an optimiser.

    Args:
        optim: an optax ``GradientTransformation``, a ``numpyro.optim`` optimiser, or None for Adam with step 0.01.
        owner: whose option it is, for the message.

    Returns:
        The wrapped optimiser.

    Raises:
        PVIError: for anything else.
    """
    import numpyro.optim

    if isinstance(optim, numpyro.optim._NumPyroOptim):
        return _of_numpyro(optim, isinstance(optim, numpyro.optim.Minimize))
    if optim is None:
        import optax

        return _of_optax(optax.adam(_DEFAULT_STEP))
    if not isinstance(optim, type) and callable(getattr(optim, "init", None)) and callable(getattr(optim, "update", 0)):
        return _of_optax(optim)
    raise PVIError(
        f"{owner}(optim={optim!r}): expected an optax or numpyro optimiser, such as optax.adam(0.01) or "
        "numpyro.optim.Adam(0.01)."
    )


def _of_numpyro(optim: Any, searches: bool) -> Optimiser:
    def step(objective: Objective, point, state):
        if searches:
            function = differentiable(objective)
            _, state = optim.eval_and_update(lambda x: (function(x), None), state)
        else:
            value, gradient = objective(point)
            state = optim.update(gradient, state, value=value)
        return optim.get_params(state), state

    return Optimiser(optim.init, step, searches)


def _of_optax(optim: Any) -> Optimiser:
    import optax

    def step(objective: Objective, point, state):
        value, gradient = objective(point)
        update, state = optax.with_extra_args_support(optim).update(
            gradient, state, point, value=value, grad=gradient, value_fn=differentiable(objective)
        )
        return optax.apply_updates(point, update), state

    state = jax.eval_shape(optim.init, jax.ShapeDtypeStruct((2,), jnp.result_type(float)))
    kinds = (optax.ScaleByZoomLinesearchState, optax.ScaleByBacktrackingLinesearchState, optax.ScaleByLBFGSState)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return Optimiser(optim.init, step, any(isinstance(x, kinds) for x in nodes))


def differentiable(objective: Objective) -> Callable[[Float[Array, "D"]], Float[Array, ""]]:
    """The loss as a function that reverse mode differentiates by the gradient that comes with it.

    Args:
        objective: a point to value and gradient; loops of traced length inside have no reverse mode of their own.

    Returns:
        A point to the value.
    """

    @jax.custom_vjp
    def function(point):
        return objective(point)[0]

    def forward(point):
        return objective(point)

    def backward(gradient, cotangent):
        return (cotangent * gradient,)

    function.defvjp(forward, backward)
    return function
