"""One interface for optax's and NumPyro's optimisers: of a flat vector, and of a model's ``numpyro.param`` values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.example_libraries import optimizers
from jaxtyping import Array, Float
from numpyro.optim import Minimize, _NumPyroOptim

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
    if isinstance(optim, _NumPyroOptim):
        return _of_numpyro(optim, isinstance(optim, Minimize))
    if optim is None:
        import optax

        return _of_optax(optax.adam(_DEFAULT_STEP))
    if not isinstance(optim, type) and callable(getattr(optim, "init", None)) and callable(getattr(optim, "update", 0)):
        return _of_optax(optim)
    raise PVIError(
        f"{owner}(optim={optim!r}): expected an optax or numpyro optimiser, such as optax.adam(0.01) or "
        "numpyro.optim.Adam(0.01)."
    )


class OptaxOptim(_NumPyroOptim):
    """An optax optimiser of a tree of params under NumPyro's interface, which sees the objective and not its gradient alone.

    NumPyro's own adapter passes the value on, which is enough for ``optax.contrib.reduce_on_plateau``; line searches
    (``optax.lbfgs``) also ask for the gradient and for the function.

    Args:
        transformation: optax's.
    """

    def __init__(self, transformation: Any) -> None:
        super().__init__(lambda: (lambda params: (params, transformation.init(params)), None, lambda state: state[0]))
        self._transformation = transformation

    def update(self, g: Any, state: Any, value: Any = None) -> Any:
        """A step along a gradient that is known already, as in SVI."""
        return self._step(g, state, {} if value is None else {"value": value})

    def eval_and_update(self, fn: Callable, state: Any, forward_mode_differentiation: bool = False) -> Any:
        """Value and gradient at the state's params, and a step."""

        def twice(params: Any) -> Any:
            found = fn(params)
            return found[0], found

        derivative = jax.jacfwd if forward_mode_differentiation else jax.grad
        gradient, (value, aux) = derivative(twice, has_aux=True)(self.get_params(state))
        known = {"value": value, "grad": gradient, "value_fn": lambda params: fn(params)[0]}
        return (value, aux), self._step(gradient, state, known)

    def _step(self, gradient: Any, state: Any, known: dict) -> Any:
        import optax

        count, (params, inner) = state
        update, inner = optax.with_extra_args_support(self._transformation).update(gradient, inner, params, **known)
        return count + 1, (optax.apply_updates(params, update), inner)


def of_params(optim: Any) -> _NumPyroOptim:
    """The optimiser of a model's ``numpyro.param`` values under NumPyro's interface.

    Args:
        optim: an optimiser of ``numpyro.optim``, ``jax.example_libraries.optimizers`` or optax.

    Returns:
        NumPyro's, as it is, or what stands for the others.

    Raises:
        PVIError: for anything else.
    """
    if isinstance(optim, _NumPyroOptim):
        return optim
    if isinstance(optim, optimizers.Optimizer):
        return _NumPyroOptim(lambda: tuple(optim))
    if not isinstance(optim, type) and callable(getattr(optim, "init", None)) and callable(getattr(optim, "update", 0)):
        return OptaxOptim(optim)
    made = f"{optim.__name__}(0.01)" if isinstance(optim, type) or callable(optim) else "numpyro.optim.Adam(0.01)"
    raise PVIError(
        f"optim={optim!r}: expected an optimiser of numpyro.optim, jax.example_libraries.optimizers or optax, made with its "
        f"settings, such as {made}; None where the model has no numpyro.param site."
    )


def _of_numpyro(optim: Any, searches: bool) -> Optimiser:
    def step(objective: Objective, point, state):
        if searches:
            function = differentiable(objective)
            _, state = optim.eval_and_update(lambda x: (function(x), None), state)
        else:
            value, gradient = objective(point)
            before, state = optim.get_params(state), optim.update(gradient, state, value=value)
            # A state that was kept holds the point where the last visit ended: what counts is the step.
            after = optim.get_params(state)
            return jnp.where(before == point, after, point + (after - before)), state
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
