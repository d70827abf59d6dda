"""Numbers in one place: every symmetrisation, jitter and clip of the package, and its gradients in either mode.

All functions accept leading batch axes, keep the dtype of their inputs, and are pure. Factorisations work on the
Jacobi-scaled matrix (unit diagonal), so column scales that differ by many decades cost no accuracy in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

# Triangular matrices up to this size are inverted by substitution in one compiled loop, up to the other without any loop.
_SMALL, _FEW = 128, 3


def symmetrise(matrix: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Return ``(A + A^T) / 2``.

    Returns the symmetric part. Rounding that is left asymmetric grows about threefold a round, so sites pass through here at
    every update.
    """
    return 0.5 * (matrix + jnp.swapaxes(matrix, -1, -2))


def diagonal(matrix: Float[Array, "*batch D D"]) -> Float[Array, "*batch D"]:
    """Return the diagonals of a stack of square matrices."""
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)


def scaled_cholesky(matrix: Float[Array, "*batch D D"]) -> tuple[Float[Array, "*batch D D"], Bool[Array, "*batch"]]:
    """Cholesky factor of a symmetric matrix after Jacobi scaling, with a validity flag instead of an exception.

    Factorises ``S A S`` with ``S = diag(A)^-1/2`` and scales the factor back. ``matrix``: symmetric matrices, in natural
    (precision) space or covariances. Returns ``(L, ok)``: lower factors with ``L L^T = A``, and whether each matrix is finite
    and positive definite. Where ``ok`` is False the factor is the identity, so that what follows stays finite and can be
    discarded by ``jnp.where``.
    """
    diag = diagonal(matrix)
    if matrix.shape[-1] == 1:
        # Where rows have one latent each, as most have, this is all that there is to factorise.
        good = jnp.isfinite(diag) & (diag > 0)
        return jnp.sqrt(jnp.where(good, diag, 1.0))[..., None], good[..., 0]
    positive = jnp.all(jnp.isfinite(diag) & (diag > 0), axis=-1)
    root = jnp.sqrt(jnp.where(jnp.isfinite(diag) & (diag > 0), diag, 1.0))
    unit = matrix / (root[..., :, None] * root[..., None, :])
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    unit = jnp.where(jnp.isfinite(unit), unit, 0.0)
    factor = jnp.linalg.cholesky(unit, symmetrize_input=False)
    good = positive & jnp.all(jnp.isfinite(factor), axis=(-2, -1)) & jnp.all(jnp.isfinite(matrix), axis=(-2, -1))
    scaled = factor * root[..., :, None]
    return jnp.where(good[..., None, None], scaled, eye), good


def with_jitter(
    gram: Float[Array, "*batch D D"], variance: Float[Array, "*batch D"], share: float | None
) -> Float[Array, "*batch D D"]:
    """A Gram matrix of values of a Gaussian process that carry a little independent noise each.

    ``gram``: positive semi-definite matrices; ``variance``: of each value, which the noise is a share of; ``share``: of the
    noise; None for 1e-6 in float64 and 1e-5 in float32. Returns ``A + share * diag(variance)``: as a covariance exact for the
    noisy values, whatever the share.
    """
    if share is None:
        share = 1e-6 if gram.dtype == jnp.float64 else 1e-5
    return gram + (share * variance)[..., :, None] * jnp.eye(gram.shape[-1], dtype=gram.dtype)


def psd_root(matrix: Float[Array, "*batch D D"]) -> tuple[Float[Array, "*batch D D"], Float[Array, "*batch D D"]]:
    """A square root of positive semi-definite matrices, of any rank, and its pseudo-inverse. Not to be differentiated.

    ``matrix``: symmetric matrices A. Returns ``(R, P)`` with ``R R^T = A`` and ``P = R^-1``. Eigenvalues below rounding of the
    largest are raised to it, so that ``P`` exists; ``R P`` is the identity.
    """
    values, vectors = jnp.linalg.eigh(symmetrise(matrix))
    info = jnp.finfo(matrix.dtype)
    least = jnp.maximum(info.eps * values[..., -1:], info.tiny)
    roots = jnp.sqrt(jnp.maximum(values, least))
    return vectors * roots[..., None, :], jnp.swapaxes(vectors / roots[..., None, :], -1, -2)


def inverse_root(factor: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Upper-triangular ``S = L^-T``, so that ``S S^T`` is the inverse of ``L L^T``.

    ``factor``: lower Cholesky factors of a precision. Returns square roots of the covariance: ``loc + S @ eps`` is a draw for a
    standard normal ``eps``.
    """
    # The rows of L carry the scales; taking them out first keeps the inversion well conditioned.
    scale = jnp.linalg.norm(factor, axis=-1)
    inverse = invert_lower(factor / scale[..., :, None]) / scale[..., None, :]
    return jnp.swapaxes(inverse, -1, -2)


@jax.jit
def invert_lower(factor: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Inverse of lower-triangular matrices. ``factor``: lower-triangular matrices with a non-zero diagonal."""
    size = factor.shape[-1]
    eye = jnp.eye(size, dtype=factor.dtype)
    if size <= _FEW:
        rows: list[Array] = []
        for i in range(size):
            left = eye[i] - sum(factor[..., i, j, None] * row for j, row in enumerate(rows))
            rows.append(left / factor[..., i, i, None])
        return jnp.stack(rows, axis=-2)
    if size > _SMALL or jax.default_backend() != "cpu":
        return solve_triangular(factor, jnp.broadcast_to(eye, factor.shape), lower=True)

    # Row by row. On a CPU the library's triangular solve wakes threads for any size, which costs milliseconds on a busy machine; on
    # a GPU every row would be four programs to launch, which were four in ten of a round's.
    def row(i, inverse):
        solved = eye[i] - jnp.einsum("...k,...kj->...j", factor[..., i, :], inverse)
        return inverse.at[..., i, :].set(solved / factor[..., i, i][..., None])

    return jax.lax.fori_loop(0, size, row, jnp.zeros_like(factor))


def solve_lower(factor: Float[Array, "*batch D D"], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """``L^-1 right``, of a vector or of columns; ``factor``: lower-triangular matrices.

    Small ones by the inverse on a CPU: two batches that the library solves there at once wait for each other's threads for ever,
    where there are no more than two.
    """
    if factor.shape[-1] > _SMALL or jax.default_backend() != "cpu":
        return solve_triangular(factor, right, lower=True)
    return invert_lower(factor) @ right


def solve_root(factor: Float[Array, "*batch D D"], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """``L^-T right``, likewise."""
    if factor.shape[-1] > _SMALL or jax.default_backend() != "cpu":
        return solve_triangular(factor, right, trans=1, lower=True)
    return jnp.swapaxes(invert_lower(factor), -1, -2) @ right


def clip_to_psd(matrix: Float[Array, "*batch D D"], floor: float = 0.0) -> Float[Array, "*batch D D"]:
    """Nearest positive semi-definite matrix in the Jacobi-scaled metric.

    ``matrix``: symmetric matrices; ``floor``: smallest eigenvalue kept, relative to the unit diagonal of the scaled matrix.
    Returns the matrix with negative eigenvalues raised to ``floor``; a matrix that is already valid comes back up to rounding.
    """
    size = jnp.sqrt(jnp.clip(jnp.abs(diagonal(matrix)), jnp.finfo(matrix.dtype).tiny, None))
    scaled = symmetrise(matrix / (size[..., :, None] * size[..., None, :]))
    values, vectors = jnp.linalg.eigh(scaled)
    clipped = jnp.einsum("...ik,...k,...jk->...ij", vectors, jnp.clip(values, floor, None), vectors)
    return clipped * (size[..., :, None] * size[..., None, :])


def congruent(root: Float[Array, "*batch D D"], matrix: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Return ``R A R^T``, symmetrised, of symmetric matrices A."""
    return symmetrise(root @ matrix @ jnp.swapaxes(root, -1, -2))


def missing_eigenvalues(matrix: Float[Array, "*batch D D"], floor: float) -> Float[Array, "*batch D D"]:
    """What has to be added to a symmetric matrix to raise its smaller eigenvalues to a floor.

    ``matrix``: symmetric matrices. Returns positive semi-definite matrices with the same eigenvectors; zero where all
    eigenvalues are at the floor or above.
    """
    values, vectors = jnp.linalg.eigh(matrix)
    lack = jnp.clip(floor - values, 0.0, None)
    return symmetrise(jnp.einsum("...ik,...k,...jk->...ij", vectors, lack, vectors))


def clip_psd_2x2(
    uu: Float[Array, "*batch"], uv: Float[Array, "*batch"], vv: Float[Array, "*batch"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Closed-form projection of symmetric 2 x 2 matrices onto the positive semi-definite cone.

    ``uu``: upper-left entries; ``uv``: off-diagonal entries; ``vv``: lower-right entries. Returns the entries of the projected
    matrices; valid ones come back unchanged.
    """
    middle = 0.5 * (uu + vv)
    tiny = jnp.finfo(uu.dtype).tiny
    radius = jnp.sqrt(0.25 * (uu - vv) ** 2 + uv**2)
    safe = jnp.where(radius > tiny, radius, 1.0)
    low, high = middle - radius, middle + radius
    # P = high+ * E_high + low+ * E_low with E_high = (A - low I) / (high - low).
    weight_high, weight_low = jnp.clip(high, 0, None), jnp.clip(low, 0, None)
    slope = jnp.where(radius > tiny, (weight_high - weight_low) / (2 * safe), 0.0)
    shift = jnp.where(radius > tiny, weight_high - slope * high, jnp.clip(middle, 0, None))
    valid = low >= 0
    return (
        jnp.where(valid, uu, slope * uu + shift),
        jnp.where(valid, uv, slope * uv),
        jnp.where(valid, vv, slope * vv + shift),
    )


def all_finite(tree) -> Bool[Array, ""]:
    """Whether every floating entry of a pytree is finite."""
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.array(True)


def power_iteration_step(
    product: Float[Array, "D"], scale: Float[Array, "D"], probe: Float[Array, "D"]
) -> tuple[Float[Array, ""], Float[Array, "D"]]:
    """One step of power iteration on ``S^-1/2 A S^-1/2`` for a diagonal S.

    ``product``: ``A @ (S^-1/2 probe)``; ``scale``: the positive diagonal of S. Returns ``(eigenvalue, probe)``: the Rayleigh
    quotient (a lower bound of the largest eigenvalue) and the next unit vector.
    """
    image = product / jnp.sqrt(scale)
    value = jnp.dot(probe, image)
    norm = jnp.linalg.norm(image)
    return value, jnp.where(norm > 0, image / jnp.where(norm > 0, norm, 1.0), probe)


def newton_in_bracket(function, low, high, start, num_steps: int, increasing: bool = True) -> Float[Array, "..."]:
    """Elementwise root of a function with one change of sign: Newton steps, halving the bracket where they leave it.

    ``function``: maps x to (value, slope), elementwise; ``low``: lower ends of the brackets; ``high``: upper ends; ``start``:
    where to begin, inside the brackets; ``num_steps``: number of evaluations, fixed so that the program has one shape;
    ``increasing``: whether the function is negative below the root; where it is almost flat its slope may round to 0. Returns
    the roots; where the function does not change sign, the end of the bracket that is closest to doing so. Not meant to be
    differentiated: its callers have the derivative from the implicit function theorem.
    """

    def step(_, carry):
        low, high, x = carry
        value, slope = function(x)
        right = value < 0 if increasing else value > 0
        low, high = jnp.where(right, x, low), jnp.where(right, high, x)
        proposal = x - value / slope
        # At the root rounding may put the step an ulp outside: that is convergence, not a reason to halve.
        slack = 4 * jnp.finfo(x.dtype).eps * (1 + jnp.abs(x))
        inside = (proposal >= low - slack) & (proposal <= high + slack)
        return low, high, jnp.where(value == 0, x, jnp.where(inside, proposal, 0.5 * (low + high)))

    return jax.lax.fori_loop(0, num_steps, step, (low, high, start))[2]


def snap_to_positive(value: Float[Array, "..."], resolution: Float[Array, "..."]) -> Float[Array, "..."]:
    """A quantity that is positive in exact arithmetic and was found as a difference of rounded numbers.

    ``resolution``: the rounding error they carry. Returns the differences, raised to the resolution where rounding has brought
    them below it; NaN where they are negative by far more than rounding explains.
    """
    return jnp.where(value < -32 * resolution, jnp.nan, jnp.maximum(value, resolution))


def keep_positive(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """Raise non-positive (and underflowed) numbers to the square root of the smallest normal number."""
    return jnp.where(value > 0, value, jnp.sqrt(jnp.finfo(value.dtype).tiny))


def above_minus_one(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """Raise numbers to the smallest one above -1: ``concentration - 1`` of the smallest concentration it can hold."""
    return jnp.where(value > -1, value, -1 + jnp.finfo(value.dtype).epsneg)


def inside_support(
    value: Float[Array, "..."], low: float | None = 0.0, high: float | None = None
) -> Float[Array, "..."]:
    """Draws moved off the ends of an open interval, where rounding has put them: log statistics stay finite there.

    Returns the draws; those at an end come back as the closest number inside.
    """
    info = jnp.finfo(value.dtype)
    if low is not None:
        value = jnp.maximum(value, low + info.tiny if low == 0 else low + info.eps * abs(low))
    if high is not None:
        value = jnp.minimum(value, high - info.epsneg * abs(high))
    return value


def inside_unit(length: Float[Array, "..."]) -> Float[Array, "..."]:
    """Lengths that are below 1 in exact arithmetic: 1 and what rounding adds to it become the closest number below 1.

    ``length``: numbers >= 0. Returns numbers in [0, 1); NaN where the length is above 1 by far more than rounding explains.
    """
    info = jnp.finfo(length.dtype)
    return jnp.where(length > 1 + 16 * info.eps, jnp.nan, jnp.minimum(length, 1 - info.epsneg))


def finite_logits(logit: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replace infinite logits by finite ones whose probability rounds to 0 or 1."""
    far = -jnp.log(jnp.finfo(logit.dtype).tiny)
    return jnp.where(jnp.isinf(logit), jnp.sign(logit) * far, logit)


def symmetric_to_lower(matrix: Float[Array, "*batch D D"]) -> Float[Array, "*batch P"]:
    """The lower triangle, diagonal included, of symmetric matrices, row by row."""
    rows, columns = np.tril_indices(matrix.shape[-1])
    return matrix[..., rows, columns]


def lower_to_symmetric(entries: Float[Array, "*batch P"], dim: int) -> Float[Array, "*batch D D"]:
    """The inverse of :func:`symmetric_to_lower`. ``entries``: D (D + 1) / 2 numbers. Returns symmetric matrices."""
    rows, columns = np.tril_indices(dim)
    place = np.zeros((dim, dim), int)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    return entries[..., place]


def polar_parts(matrix: Float[Array, "*batch D D"]) -> tuple[Float[Array, "*batch D D"], Float[Array, "*batch D D"]]:
    """``(M M^T)^1/2`` and ``(M^T M)^1/2``, by singular values."""
    left, values, right = jnp.linalg.svd(matrix)
    outer = jnp.einsum("...ik,...k,...jk->...ij", left, values, left)
    return outer, jnp.einsum("...ki,...k,...kj->...ij", right, values, right)


def mixing_shares(gram: Float[Array, "W W"], filled: Int[Array, ""]) -> Float[Array, "W"]:
    """Shares of the last steps' targets, summing to one, that make the mixture of their residuals least (Anderson 1965).

    ``gram``: inner products of ``r_W - r_i`` for the older residuals i, oldest first, and of the newest, ``r_W``, last;
    ``filled``: how many residuals there are; the others' shares are zero. Returns one share per step; the newest's alone where
    the equations cannot be solved.
    """
    count = gram.shape[0]
    there = jnp.arange(count - 1) >= count - filled
    square = jnp.where(there[:, None] & there, gram[:-1, :-1], 0.0)
    info = jnp.finfo(gram.dtype)
    ridge = 10 * info.eps * jnp.trace(square) + info.tiny
    shares = jnp.linalg.solve(square + jnp.diag(jnp.where(there, ridge, 1.0)), jnp.where(there, gram[:-1, -1], 0.0))
    shares = jnp.where(there & jnp.all(jnp.isfinite(shares)), shares, 0.0)
    return jnp.append(shares, 1.0 - jnp.sum(shares))


# Relative differences that are rounding: numbers that were made by another program keep their digits.
_ROUNDING = {"float32": 1e-5, "float64": 1e-10}


def nearly_same(one: Any, other: Any) -> bool:
    """Whether two trees of arrays of the same structure are equal up to rounding. Decided on the host.

    Returns True where all entries agree: of a matrix each by the scales of its row and column, of all else each by its own
    size.
    """
    trees = [jax.tree.leaves(jax.device_get(x)) for x in (one, other)]
    return len(trees[0]) == len(trees[1]) and all(
        _agrees(np.asarray(a), np.asarray(b)) for a, b in zip(*trees, strict=True)
    )


def _agrees(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.size or not jnp.issubdtype(one.dtype, jnp.floating):
        return np.array_equal(one, other)
    # Entry by entry: beside a tight prior a wide one is small. Of a matrix an entry has the scale of its row and column.
    size = np.maximum(np.abs(one), np.abs(other))
    if one.ndim == 2 and one.shape[0] == one.shape[1]:
        scale = np.sqrt(np.diagonal(size))
        size = np.maximum(size, np.outer(scale, scale))
    return bool(np.all(np.abs(one - other) <= _ROUNDING[one.dtype.name] * size))


# ---------------------------------------------------------------------------------------------------------- derivatives
# Gradients of a model's densities, in the mode of differentiation that the model has.

# What JAX says of a loop whose length is known only as it runs.
_NO_REVERSE = "Reverse-mode differentiation does not work"


def either_mode(run: Callable[[bool], Any]) -> Any:
    """What ``run(False)`` gives, or ``run(True)`` where JAX refuses to differentiate in reverse mode.

    A ``while_loop`` in a model has no reverse mode. Nothing is looked for beforehand: JAX refuses while it traces, and only
    then is anything traced a second time. ``run``: takes whether to differentiate in forward mode.
    """
    try:
        return run(False)
    except ValueError as error:
        if _NO_REVERSE not in str(error):
            raise
    return run(True)


def in_batches(function: Callable[[Any], Any], operands: Any, batch: int) -> Any:
    """What ``jax.lax.map(function, operands, batch_size=batch)`` returns, in the memory of its results and one batch.

    ``jax.lax.map`` copies operands and results whose number is no multiple of the batch, and compiles the function a second
    time for what is left over. Here batches are as even as they can be and read in place; the last one begins where it ends
    with the operands, so that some of them are evaluated twice. ``function``: of one operand: a pytree of arrays to a pytree of
    arrays; ``operands``: a pytree of arrays with a common leading axis; ``batch``: most operands that are evaluated side by
    side. Returns the function's values, with a leading axis.
    """
    count = jax.tree.leaves(operands)[0].shape[0]
    if batch >= count:
        return jax.vmap(function)(operands)
    if batch <= 1:
        return jax.lax.map(function, operands)
    steps = -(-count // batch)
    size = -(-count // steps)
    starts = jnp.minimum(jnp.arange(steps) * size, count - size)

    # Traced once for its shapes and the loop.
    @functools.partial(jax.jit, inline=True)
    def side_by_side(some: Any) -> Any:
        return jax.vmap(function)(some)

    def one(results: Any, start: Int[Array, ""]) -> tuple[Any, None]:
        some = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), operands)
        place = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(place, results, side_by_side(some)), None

    shapes = jax.eval_shape(
        side_by_side, jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), operands)
    )
    return jax.lax.scan(one, jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), shapes), starts)[0]


def value_and_grad(
    function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """As ``jax.value_and_grad``, by forward passes, one per number of the argument, where the function has no reverse mode.

    ``function``: of a scalar value, or with ``has_aux`` of a pair of one and of whatever else it found; ``argnums``: the
    argument (an array, or a pytree of arrays) to differentiate by, or several. Returns a function of the same arguments that
    gives what the function does, and the gradient.
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

    ``function``: of a scalar value, or with ``has_aux`` of a pair; ``argnums``: the argument to differentiate by, or several.
    Returns a function of the same arguments that gives the gradient.
    """
    both = value_and_grad(function, argnums, has_aux)

    def slope(*args: Any) -> Any:
        found, gradient = both(*args)
        return (gradient, found[1]) if has_aux else gradient

    return slope


def hessian_of(function: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """Second derivatives, by forward passes over :func:`grad`.

    ``argnums``: the argument (an array) to differentiate by. Returns a function of the same arguments that gives the Hessian.
    """
    return jax.jacfwd(grad(function, argnums), argnums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flat:
    """A pytree of many small arrays as one vector per dtype, with any axes in front.

    What a program takes and gives costs some microseconds an array, on the host and in a loop, however small it is.

    Attributes:
        vectors: one array per dtype.
        structure: of the pytree.
        leaves: of every leaf its place among the dtypes, where it begins there, and its shape.
    """

    vectors: tuple[Any, ...]
    structure: Any = dataclasses.field(metadata={"static": True})
    leaves: tuple[tuple[int, int, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> Flat:
        """A pytree of arrays, laid flat."""
        arrays, structure = jax.tree.flatten(tree)
        by_dtype: dict[Any, list] = {}
        leaves = []
        for x in map(jnp.asarray, arrays):
            own = by_dtype.setdefault(x.dtype, [])
            leaves.append((list(by_dtype).index(x.dtype), sum(y.size for y in own), x.shape))
            own.append(x.reshape(-1))
        return cls(tuple(jnp.concatenate(own) for own in by_dtype.values()), structure, tuple(leaves))

    @property
    def tree(self) -> Any:
        """The pytree, of arrays with the axes that stand in front; of NumPy's where the vectors are."""

        def leaf(place: int, begin: int, shape: tuple[int, ...]) -> Any:
            vector = self.vectors[place]
            # In one tuple: NumPy's arrays of no axes take no empty list of arguments.
            return vector[..., begin : begin + math.prod(shape)].reshape((*vector.shape[:-1], *shape))

        return self.structure.unflatten([leaf(*x) for x in self.leaves])
