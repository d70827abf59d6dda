"""Gossip: every agent mixes what its neighbours send, with weights that keep the network's mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._graph import Graph, auto_steps, chebyshev_coefficients, realised_weights


@dataclasses.dataclass(frozen=True)
class Gossip:
    """``z <- A z``, a number of times; hashable settings.

    Args:
        graph: the weights.
        steps: how often in a round, or "auto": until disagreement has shrunk about tenfold, by Chebyshev's polynomials
            where the weights are symmetric, fixed and reliable.
        link_failure: probability of each link's failing in each step.
        reliable: whether all agents are there all the time.
    """

    graph: Graph
    steps: int | str = "auto"
    link_failure: float = 0.0
    reliable: bool = True

    @property
    def polynomial(self) -> bool:
        """Whether Chebyshev's polynomials are used: they need the same symmetric weights in every step."""
        fixed = len(self.graph.matrices) == 1 and self.graph.symmetric
        return self.steps == "auto" and fixed and self.link_failure == 0 and self.reliable

    @property
    def count(self) -> int:
        """K, steps in a round."""
        if self.steps != "auto":
            return int(self.steps)
        return auto_steps(self.graph, self.polynomial) if self.graph.size > 1 else 0

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
        if self.polynomial:
            links = jnp.sum(weights[0] > 0) - jnp.sum(jnp.diag(weights[0]) > 0)
            return self._polynomial(values, weights[0], count), links.astype(jnp.int32) * count

        def one(carry, step):
            values, sent = carry
            at = weights[(done + step) % weights.shape[0]]
            if self.link_failure > 0 or not self.reliable:
                at, links = realised_weights(at, jax.random.fold_in(key, step), self.link_failure, present)
            else:
                links = (jnp.sum(at > 0) - jnp.sum(jnp.diag(at) > 0)).astype(jnp.int32)
            return (_apply(at, values), sent + links), None

        (values, sent), _ = jax.lax.scan(one, (values, jnp.int32(0)), jnp.arange(count))
        return values, sent

    def _polynomial(self, values: Any, weights: Float[Array, "n n"], count: int) -> Any:
        coefficients = jnp.asarray(chebyshev_coefficients(self.graph.modulus, count), weights.dtype)

        def one(carry, row):
            last, before = carry
            new = jax.tree.map(lambda z, y: row[0] * z - row[1] * y, _apply(weights, last), before)
            return (new, last), None

        (values, _), _ = jax.lax.scan(one, (values, values), coefficients)
        return values


def _apply(weights: Float[Array, "n n"], values: Any) -> Any:
    return jax.tree.map(lambda x: jnp.einsum("ij,j...->i...", weights, x, precision="highest"), values)
