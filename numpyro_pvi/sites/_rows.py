"""Sites of single rows: what a solver with one factor per row keeps beside the groups' sites."""

from __future__ import annotations

from typing import Any

from ..families import Vector, natural_parameters


@natural_parameters
class RowSites(Vector):
    """Natural parameters of one site per row, packed as the rows are: leading axes C (chunks) and E (elements of a term).

    Under a full-covariance q a row's site is a function of its affine predictors alone, ``exp(h^T z - 1/2 z^T L z)`` with
    ``z = A theta`` (without the predictors' offset): ``(h, L)`` are two numbers for one predictor, five for two. Under a
    mean-field q it has its own diagonal natural parameters over theta. A group's site is the sum of its rows'.
    """

    # Per term ``(vector, precision)``: Float[C E K] and Float[C E K K], or Float[C E D] each under a mean-field q.
    terms: Any
