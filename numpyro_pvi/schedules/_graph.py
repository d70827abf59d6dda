"""Communication graphs: doubly stochastic weights, links that fail, and gossip as fast as the graph allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError

# Sinkhorn's row and column sums are balanced to this error; the limit of its sweeps is far above what graphs need.
_BALANCED = 1e-14
_SWEEPS = 100_000
# Shrinkage of disagreement that "auto" gossip aims at in one round.
AUTO_SHRINK = 0.1
# The same where links fail: gossip takes many steps there, and a round's update closes only half of the way anyhow.
FAILING_SHRINK = 0.2
MAX_AUTO_STEPS = 20_000


@dataclasses.dataclass(frozen=True)
class Graph:
    """One or several doubly stochastic weight matrices, hashable, in the order of the agents.

    ``weights``: bytes of the float64 weights of all graphs (taken in turn, one a gossip step), which hash quickly; A_ij is the
    weight of what agent i gets from agent j; ``modulus``: the largest second modulus of an eigenvalue: what one gossip step
    leaves of the disagreement. For several graphs in turn, the one of a whole turn by its length's root.
    """

    weights: bytes
    nodes: tuple[Hashable, ...]
    modulus: float

    @property
    def size(self) -> int:
        """n, the number of agents."""
        return len(self.nodes)

    @property
    def matrices(self) -> Float[np.ndarray, "T n n"]:
        """The weight matrices."""
        return np.frombuffer(self.weights).reshape(-1, self.size, self.size)

    @property
    def symmetric(self) -> bool:
        """Whether every link has the same weight in both directions."""
        return bool(np.allclose(self.matrices, self.matrices.transpose(0, 2, 1), atol=1e-12))


def read_graph(adjacency: Any, nodes: Sequence[Hashable] | None = None) -> Graph:
    """Read a graph and balance it to doubly stochastic weights: self-loops added where missing, then Sinkhorn's algorithm.

    ``adjacency``: a square matrix of non-negative weights (row i, column j: what i gets from j), a list of links ``(a, b)``
    (both ways), a networkx graph, or several of these in a list: graphs that are taken in turn; ``nodes``: names of the agents
    in the order of ``pvi.groups``; by default those of a networkx graph in its order, else 0 to n - 1. Raises PVIError for
    anything else, negative or non-finite weights, or a graph (of several: their union) that does not let everything reach
    everyone.

    References:
        Sinkhorn and Knopp, Concerning nonnegative matrices and doubly stochastic matrices, 1967. A matrix with a positive
        diagonal whose graph is strongly connected has total support, so that the balance exists.
    """
    many = _is_many(adjacency)
    parts = [_matrix(a, nodes) for a in (adjacency if many else [adjacency])]
    names = parts[0][1]
    if any(part[1] != names for part in parts):
        raise PVIError("Decentralized: graphs that are taken in turn must have the same agents; pass nodes=pvi.groups.")
    matrices = [part[0] for part in parts]
    union = sum(matrices, start=np.zeros_like(matrices[0])) > 0
    reach = np.linalg.matrix_power(union | np.eye(len(names), dtype=bool), max(len(names) - 1, 1)) > 0
    if not reach.all():
        i, j = np.argwhere(~reach)[0]
        # Of labels with gaps, as of groups that are numbered 0, 1, 2 and 7.
        numbered = " Agents are numbered from 0 here: for links between groups' labels pass nodes=pvi.groups."
        raise PVIError(
            f"Decentralized: the graph is not connected: nothing that agent {names[j]!r} sends reaches agent {names[i]!r}. "
            f"Add a link between their parts.{numbered if nodes is None and names == tuple(range(len(names))) else ''}"
        )
    balanced = [_sinkhorn(a) for a in matrices]
    turn = balanced[0]
    for a in balanced[1:]:
        turn = a @ turn
    return Graph(np.stack(balanced).tobytes(), names, second_modulus(turn) ** (1 / len(balanced)))


def second_modulus(weights: Any) -> float:
    """The second-largest modulus of a doubly stochastic matrix's eigenvalues: the rate at which disagreement shrinks."""
    a = np.asarray(weights, float)
    n = a.shape[0]
    return float(np.max(np.abs(np.linalg.eigvals(a - np.ones((n, n)) / n)))) if n > 1 else 0.0


def failing_modulus(modulus: float, link_failure: float) -> float:
    """Second modulus of the mean of the realised weights: failed links leave their weight on the diagonal."""
    return 1.0 - (1.0 - link_failure) * (1.0 - modulus)


def chebyshev_interval(modulus: float, link_failure: float) -> float:
    """rho of the polynomials that gossip takes: of the interval [-rho, rho] on which they are small.

    With reliable links it is the second modulus. Weights that change at random from step to step carry a product of different
    matrices through the recurrence, which long memories do not survive: its last coefficient ``a_k`` tends to ``2 / (1 + sqrt(1
    - rho^2))``, and is kept at or below ``1 + (1 - link_failure) / 2``. (At 1.7 disagreement grew without limits on rings of 32
    and 100 agents with half of the links failing; at the bound it shrank on rings, grids, stars and random geometric graphs of
    8 and 32 agents with 10 to 90 % failing.) ``link_failure``: probability of each link's failing in each step. Returns rho.
    """
    if link_failure == 0.0:
        return modulus
    most = 2.0 / (1.0 + 0.5 * (1.0 - link_failure)) - 1.0
    return min(failing_modulus(modulus, link_failure), math.sqrt(1.0 - most**2))


def auto_steps(graph: Graph, polynomial: bool, link_failure: float = 0.0) -> int:
    """Gossip steps that shrink disagreement about tenfold; about fivefold where links fail.

    ``polynomial``: whether Chebyshev's polynomials are used: on reliable graphs the root of the number of steps that plain
    gossip takes; ``link_failure``: probability of each link's failing in each step. Returns at least 1.
    """
    rho = failing_modulus(graph.modulus, link_failure)
    shrink = FAILING_SHRINK if link_failure > 0 else AUTO_SHRINK
    if rho <= shrink:
        return 1
    if rho >= 1.0:
        return MAX_AUTO_STEPS
    needed = math.log(shrink) / math.log(rho)
    if polynomial:
        interval = chebyshev_interval(graph.modulus, link_failure)
        counts = np.arange(1, MAX_AUTO_STEPS + 1)
        # What T_k(A / interval) / T_k(1 / interval) leaves of the slowest disagreement, as logarithms of hyperbolic cosines.
        inside, outside = (
            np.logaddexp(x, -x) for x in (counts * math.acosh(max(y / interval, 1.0)) for y in (rho, 1.0))
        )
        found = np.flatnonzero(inside - outside <= math.log(shrink))
        needed = counts[found[0]] if found.size else MAX_AUTO_STEPS
    return min(max(1, math.ceil(needed)), MAX_AUTO_STEPS)


def chebyshev_coefficients(modulus: float, steps: int) -> Float[np.ndarray, "K 2"]:
    """Coefficients ``(a_k, b_k)`` of ``z_k = a_k A z_{k-1} - b_k z_{k-2}``, which is ``T_k(A / rho) / T_k(1 / rho)``.

    Of all polynomials with value 1 at 1 it is the smallest on [-rho, rho], where the eigenvalues of a symmetric A are.
    ``modulus``: rho, the second-largest modulus of A's eigenvalues. Returns one row per step; ``a_k - b_k = 1``, so that the
    mean stays.

    References:
        Golub and Varga, Chebyshev semi-iterative methods, 1961.
    """
    rows = np.zeros((steps, 2))
    # r_k = T_{k-1}(1/rho) / T_k(1/rho), by the three-term recurrence of ratios.
    ratio = modulus
    for k in range(steps):
        if k == 0:
            rows[0] = 1.0, 0.0
            continue
        new = 1.0 / (2.0 / modulus - ratio) if modulus > 0 else 0.0
        rows[k] = (2.0 * new / modulus if modulus > 0 else 1.0), new * ratio
        ratio = new
    return rows


def realised_weights(
    weights: Float[Array, "n n"], key: Any, link_failure: float, present: Bool[Array, "n"]
) -> tuple[Float[Array, "n n"], Int[Array, ""]]:
    """The weights of one gossip step in which links fail and agents are away: doubly stochastic again.

    Both ends of a failed link keep its weight on their own diagonals; the weights must be symmetric. ``weights``: symmetric and
    doubly stochastic. Returns the weights, and how many directed links carried a message.
    """
    n = weights.shape[0]
    up = jnp.ones((n, n), bool)
    if link_failure > 0:
        draw = jnp.triu(jax.random.bernoulli(key, 1.0 - link_failure, (n, n)), 1)
        up = draw | draw.T
    off = weights * (up & present[:, None] & present[None, :] & ~jnp.eye(n, dtype=bool))
    return off + jnp.diag(1.0 - jnp.sum(off, axis=1)), jnp.sum(off > 0).astype(jnp.int32)


def _is_many(adjacency: Any) -> bool:
    if isinstance(adjacency, (np.ndarray, jax.Array)):
        return np.ndim(adjacency) == 3
    if not isinstance(adjacency, (list, tuple)) or not adjacency:
        return False
    return all(hasattr(a, "edges") or np.ndim(_array(a)) == 2 for a in adjacency) and not _is_links(adjacency)


def _is_links(adjacency: Sequence) -> bool:
    # Fractions are weights: a pair of rows of two is then a matrix.
    return all(
        isinstance(a, (list, tuple)) and len(a) == 2 and not isinstance(a[0], (list, tuple, float)) for a in adjacency
    )


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value, float)
    except (TypeError, ValueError):
        return np.zeros(0)


def _matrix(adjacency: Any, nodes: Sequence[Hashable] | None) -> tuple[np.ndarray, tuple[Hashable, ...]]:
    if hasattr(adjacency, "nodes") and hasattr(adjacency, "edges"):
        names = tuple(adjacency.nodes) if nodes is None else tuple(nodes)
        directed = bool(getattr(adjacency, "is_directed", lambda: False)())
        return _from_links(list(adjacency.edges()), names, directed), names
    if isinstance(adjacency, (list, tuple)) and adjacency and _is_links(adjacency):
        ends = [end for link in adjacency for end in link]
        names = tuple(nodes) if nodes is not None else _count_up(ends)
        return _from_links(adjacency, names, False), names
    if isinstance(adjacency, (list, tuple)) and not adjacency:
        raise PVIError(
            "Decentralized(adjacency): an empty list does not say how many agents there are. Pass a square matrix of weights: "
            "np.ones((1, 1)) is one agent alone."
        )
    a = _array(adjacency)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.shape[0] == 0:
        raise PVIError(
            "Decentralized(adjacency): expected a square matrix of weights, a list of links (a, b), a networkx graph, or a list of "
            f"those; got {type(adjacency).__name__}" + (f" of shape {a.shape}." if a.size else ".")
        )
    if not np.all(np.isfinite(a)) or np.any(a < 0):
        raise PVIError("Decentralized(adjacency): weights must be finite and not negative; 0 is no link.")
    names = tuple(range(a.shape[0])) if nodes is None else tuple(nodes)
    if len(names) != a.shape[0]:
        raise PVIError(f"Decentralized: {len(names)} nodes are named for a matrix of {a.shape[0]} agents.")
    return _looped(a), names


def _count_up(ends: list) -> tuple[int, ...]:
    if not all(isinstance(end, (int, np.integer)) and end >= 0 for end in ends):
        raise PVIError(
            "Decentralized: links between agents that are not numbered need their order: pass nodes=pvi.groups."
        )
    return tuple(range(int(max(ends)) + 1))


def _from_links(links: Sequence, names: tuple, directed: bool) -> np.ndarray:
    position = {name: i for i, name in enumerate(names)}
    a = np.zeros((len(names), len(names)))
    for link in links:
        missing = [end for end in link[:2] if end not in position]
        if missing:
            raise PVIError(f"Decentralized: link {tuple(link)!r} names {missing[0]!r}, which is not one of the nodes.")
        i, j = position[link[0]], position[link[1]]
        # A link (a, b) of a directed graph carries what a sends to b.
        a[j, i] = 1.0
        if not directed:
            a[i, j] = 1.0
    return _looped(a)


def _looped(a: np.ndarray) -> np.ndarray:
    """Self-loops where there are none: without them a bipartite graph would swap its halves for ever."""
    positive = a[a > 0]
    own = float(positive.mean()) if positive.size else 1.0
    return a + np.diag(np.where(np.diag(a) > 0, 0.0, own))


def _sinkhorn(a: np.ndarray) -> np.ndarray:
    symmetric = np.allclose(a, a.T, rtol=1e-12, atol=0)
    # Blocks that do not talk in this one of several graphs are balanced each on its own by the same iteration.
    r = np.ones(len(a))
    c = np.ones(len(a))
    for _ in range(_SWEEPS):
        if symmetric:
            # The balance of a symmetric matrix is symmetric, and this iteration goes to it without swinging.
            r = c = np.sqrt(r / (a @ r))
        else:
            c = 1.0 / (a.T @ r)
            r = 1.0 / (a @ c)
        balanced = r[:, None] * a * c[None, :]
        worst = max(np.abs(balanced.sum(0) - 1).max(), np.abs(balanced.sum(1) - 1).max())
        if worst < _BALANCED * len(a):
            return 0.5 * (balanced + balanced.T) if symmetric else balanced
    raise PVIError(
        "Decentralized(adjacency): the weights cannot be balanced to rows and columns that sum to 1 (Sinkhorn's algorithm still "
        f"misses by {worst:.1e}). Weights of very different sizes do that; pass 0/1 links."
    )


# --------------------------------------------------------------------------------------------------------------- gossip
# Gossip: every agent mixes what its neighbours send, with weights that keep the network's mean.


@dataclasses.dataclass(frozen=True)
class Gossip:
    """``z <- A z``, a number of times; hashable settings.

    ``steps``: how often in a round, or "auto": until disagreement has shrunk about tenfold (fivefold where links fail), by
    Chebyshev's polynomials where the weights are symmetric and of one graph; with less memory where links fail;
    ``link_failure``: probability of each link's failing in each step; ``reliable``: whether all agents are there all the time.
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

        ``values``: a pytree whose leaves have a leading axis of agents; ``done``: gossip steps before this round; says whose
        turn it is among several graphs. Returns the mixed values, and how many messages were sent.
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
