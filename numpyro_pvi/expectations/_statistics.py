"""Every family's sufficient statistics as the interpreter of traces knows them."""

from __future__ import annotations

from typing import Any

from ..factors import Form, Statistics, marked
from ..families import (
    BetaFamily,
    DirichletFamily,
    ExponentialLawFamily,
    GammaFamily,
    InverseGammaFamily,
    LogNormalFamily,
    MarkovGaussianFamily,
    MultivariateNormalFamily,
    NormalFamily,
    ScalarNormalFamily,
    VonMisesFamily,
    base_family,
)

_LOG = frozenset(("log",))
_QUADRATIC = Statistics(2)
# A product of two members counts as affine in those of either, given the other's. Of a chain this is so for terms that see one
# state; (log x)^2, of a log-normal, is not followed.
_STATISTICS: dict[type, tuple[Statistics, str]] = {
    ScalarNormalFamily: (_QUADRATIC, ""),
    NormalFamily: (_QUADRATIC, ""),
    MultivariateNormalFamily: (_QUADRATIC, ""),
    MarkovGaussianFamily: (_QUADRATIC, ""),
    GammaFamily: (Statistics(1, (), _LOG), "+"),
    InverseGammaFamily: (Statistics(0, (-1.0,), _LOG), "+"),
    ExponentialLawFamily: (Statistics(1), "+"),
    LogNormalFamily: (Statistics(0, (), _LOG), "+"),
    BetaFamily: (Statistics(0, (), frozenset(("log", "log1m"))), "unit"),
    DirichletFamily: (Statistics(0, (), _LOG), "unit"),
    VonMisesFamily: (Statistics(0, (), frozenset(("cos", "sin"))), "angle"),
}


def statistics_of(family: Any) -> Statistics:
    """Functions of a value that a factor may be affine in to be conjugate; none of a family that is not known.

    Args:
        family: a family; repetitions are looked through.

    Returns:
        The statistics.
    """
    return _STATISTICS.get(type(base_family(family)), (Statistics(), ""))[0]


def marked_component(name: str, family: Any) -> Form:
    """The form of a component's values, with what their support says of their sign.

    Args:
        name: the component.
        family: of it.

    Returns:
        The form.
    """
    return marked(name, _STATISTICS.get(type(base_family(family)), (None, ""))[1])
