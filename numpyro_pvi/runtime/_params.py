"""Values of a model's ``numpyro.param`` sites: constrained for the model, and moved by one step of the user's optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from .._derivatives import either_mode
from .._state import Plan
from ..factors import abstract_trace


class FitsParams:
    """What engines know of the model's params; a base class for those that have ``model`` and ``optim``."""

    model: Callable
    optim: Any

    def param_transforms(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Bijections from unconstrained space to the supports of the model's ``numpyro.param`` sites."""
        trace = abstract_trace(self.model, jax.random.key(0), args, kwargs)
        return {
            n: biject_to(s["kwargs"].get("constraint", constraints.real))
            for n, s in trace.items()
            if s["type"] == "param"
        }

    def constrain(self, plan: Plan, args: tuple, kwargs: dict, optim_state: Any) -> dict[str, Any]:
        """Constrained values of the model's ``numpyro.param`` sites held in an optimiser state."""
        if not plan.partition.params:
            return {}
        transforms = self.param_transforms(args, kwargs)
        return {n: transforms[n](v) for n, v in self.optim.get_params(optim_state).items()}

    def moved_params(
        self, loss: Callable[[dict], Float[Array, ""]], optim_state: Any, args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Any]]:
        """One step of the optimiser (PVI eq. 5); none where the loss, or what it leads to, is not finite.

        Args:
            loss: negative ELBO in nats at constrained values, q held fixed.
            optim_state: the optimiser's state.
            args: the model's positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The optimiser's state and the constrained values after it.
        """
        transforms = self.param_transforms(args, kwargs)

        def constrained(values: dict) -> dict:
            return {n: transforms[n](v) for n, v in values.items()}

        # The optimiser looks at the objective itself: its value, and as often as a line search or a minimiser wants.
        def step(forward: bool):
            own = {"forward_mode_differentiation": forward}
            return self.optim.eval_and_update(lambda values: (loss(constrained(values)), None), optim_state, **own)

        (value, _), moved = either_mode(step)
        numbers = [value, *jax.tree.leaves(self.optim.get_params(moved))]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in numbers]))
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, optim_state)
        return moved, constrained(self.optim.get_params(moved))
