"""Checks shared by solvers whose visits need the tilted moments of a group as a whole."""

from __future__ import annotations

from typing import Any

from ..errors import PVIError
from ..expectations import ImportanceMoments, LaplaceMoments

# Words for ``moments=`` of a group as a whole.
_WORDS = ("auto", "exact", "quadrature", "importance", "laplace")


def check_share(owner: str, name: str, value: Any, remedy: str) -> None:
    """Refuse what is no number in (0, 1].

    Args:
        owner: the solver's name.
        name: the option's.
        value: its value.
        remedy: what to write instead.

    Raises:
        PVIError: naming all of them.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise PVIError(f"{owner}({name}={value!r}): expected a number in (0, 1]; {remedy}.")


def check_moments(owner: str, moments: Any) -> None:
    """Refuse ways to take moments that are none.

    Args:
        owner: the solver's name.
        moments: a word, or an instance with settings.

    Raises:
        PVIError: listing the ways.
    """
    if moments not in _WORDS and not isinstance(moments, ImportanceMoments | LaplaceMoments):
        raise PVIError(
            f"{owner}(moments={moments!r}): expected one of {', '.join(_WORDS)}, or ImportanceMoments(...) or LaplaceMoments(...)."
        )


def check_structure(owner: str, moments: Any, structure: str, where: str) -> None:
    """Refuse factors whose tilted distribution cannot be treated.

    Args:
        owner: the solver's name.
        moments: the solver's option.
        structure: "quadratic", "affine", "draws", "reparameterised" or "local".
        where: the factor's name.

    Raises:
        PVIError: naming the factor and the choices that work.
    """
    if structure == "local":
        raise PVIError(
            f"{owner} does not integrate out local latents, and the {where} has some: use solver=NaturalGradient(), or keep the "
            "latents shared by leaving them outside the partitioned plate."
        )
    if moments == "exact" and structure != "quadratic":
        raise PVIError(
            f"{owner}(moments='exact') needs a factor that is quadratic in the latents, but the {where} was found to be "
            f"{structure!r}; leave moments='auto'."
        )
