"""Gossip: every agent mixes what its neighbours send, with weights that keep the network's mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ._graph import Graph, auto_steps, chebyshev_coefficients, chebyshev_interval, realised_weights


@dataclasses.dataclass(frozen=True)
class Gossip:
    """``z <- A z``, a number of times; hashable settings.

    Args:
        graph: the weights.
        steps: how often in a round, or "auto": until disagreement has shrunk about tenfold (fivefold where links fail), by
            Chebyshev's polynomials where the weights are symmetric and of one graph; with less memory where links fail.
        link_failure: probability of each link's failing in each step.
        reliable: whether all agents are there all the time.
    """

    graph: Graph
    steps: int | str = "auto"
    link_failure: float = 0.0
    reliable: bool = True

    @property
    def polynomial(self) -> bool:
        """Whether Chebyshev's polynomials are used: they need symmetric weights, the same in every step or on average.

        Failed links and absent agents only raise the weights' eigenvalues (a Laplacian is added), so that none leaves the
        interval downwards, and what is above it shrinks less but never grows.
        """
        return self.steps == "auto" and len(self.graph.matrices) == 1 and self.graph.symmetric

    @property
    def count(self) -> int:
        """K, steps in a round."""
        if self.steps != "auto":
            return int(self.steps)
        return auto_steps(self.graph, self.polynomial, self.link_failure) if self.graph.size > 1 else 0

    def mix(self, values: Any, key: Any, present: Bool[Array, "n"], done: Int[Array, ""]) -> tuple[Any, Int[Array, ""]]:
        """One round of gossip.

        Args:
            values: a pytree whose leaves have a leading axis of agents.
            key: random key of the failures.
            present: which agents are there.
            done: gossip steps before this round; says whose turn it is among several graphs.

        Returns:
            The mixed values, and how many messages were sent.
        """
        leaves = jax.tree.leaves(values)
        dtype = leaves[0].dtype
        weights = jnp.asarray(self.graph.matrices, dtype)
        count = self.count
        if count == 0:
            # An agent alone has nobody to talk to.
            return values, jnp.int32(0)
        memory = jnp.asarray(self._memory(count), dtype)

        def one(carry, step):
            last, before, sent = carry
            at = weights[(done + step) % weights.shape[0]]
            if self.link_failure > 0 or not self.reliable:
                at, links = realised_weights(at, jax.random.fold_in(key, step), self.link_failure, present)
            else:
                links = (jnp.sum(at > 0) - jnp.sum(jnp.diag(at) > 0)).astype(jnp.int32)
            new = _apply(at, last)
            if self.polynomial:
                a, b = memory[step]
                new = jax.tree.map(lambda z, y: a * z - b * y, new, before)
            return (new, last if self.polynomial else None, sent + links), None

        start = values, values if self.polynomial else None, jnp.int32(0)
        (values, _, sent), _ = jax.lax.scan(one, start, jnp.arange(count))
        return values, sent

    def _memory(self, count: int) -> Float[np.ndarray, "K 2"]:
        if not self.polynomial:
            return np.zeros((count, 2))
        return chebyshev_coefficients(chebyshev_interval(self.graph.modulus, self.link_failure), count)


def _apply(weights: Float[Array, "n n"], values: Any) -> Any:
    return jax.tree.map(lambda x: jnp.einsum("ij,j...->i...", weights, x, precision="highest"), values)
