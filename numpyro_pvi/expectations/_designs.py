"""Sign designs: rows of +1 and -1 over which low-order products of signs average to zero.

An average over all combinations of signs is exact for every function of them, and takes 2^K evaluations. A function in
which at most three signs meet in any product has the same average over an orthogonal array of strength 3, which takes
about 2 K: the rows of a Hadamard matrix and their negatives.
"""

from __future__ import annotations

import itertools

import numpy as np

# Signs up to which all combinations are taken without asking for more structure.
FEW_SIGNS = 4
# Signs up to which all combinations are taken where three or more meet in a product.
MANY_SIGNS = 9


def all_signs(count: int) -> np.ndarray:
    """All combinations of ``count`` signs, Float[2^count count]."""
    rows = list(itertools.product([1.0, -1.0], repeat=count))
    return np.asarray(rows).reshape(2**count, count)


def strength_three(count: int) -> np.ndarray:
    """An orthogonal array of strength 3.

    Args:
        count: signs, K >= 1.

    Returns:
        Float[R K] with R the power of two from 2 K on: every product of one, two or three different columns sums to zero.

    References:
        Hedayat, Sloane and Stufken, Orthogonal Arrays, 1999, theorem 7.5.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < count:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.concatenate([matrix, -matrix])[:, :count]
