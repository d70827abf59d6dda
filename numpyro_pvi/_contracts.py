"""What an object that means to keep a contract does not have of it, and what it does not go with."""

from __future__ import annotations

from typing import Any

from .errors import PVIError

GAUSSIAN_GUIDES = "AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal"


def not_under_families(word: str, value: Any, wanted: str) -> PVIError:
    """The error for a choice that is for Gaussian guides only.

    Args:
        word: the argument's name.
        value: what was chosen.
        wanted: what goes with AutoExponentialFamily, in code.

    Returns:
        What to raise.
    """
    return PVIError(
        f"{word}={type(value).__name__}(...) does not go with AutoExponentialFamily: pass {word}={wanted}, or use "
        f"{GAUSSIAN_GUIDES}."
    )


def lacking(value: Any, contract: type, base: type | None, room: str) -> str:
    """A sentence that names what is missing, and where the rest of the contract has defaults.

    Args:
        value: what was given.
        contract: the Protocol.
        base: the class to derive from, or None.
        room: where that class is found.

    Returns:
        The sentence, with a space before it; empty for a class, or for an object that has nothing of the contract.
    """
    names = {name for name in vars(contract) if not name.startswith("_")}
    missing = sorted(name for name in names if not hasattr(value, name))
    if isinstance(value, type) or not missing or len(missing) == len(names):
        return ""
    given = base is not None and any(hasattr(base, name) for name in missing)
    derive = f" Derive it from {room}.{base.__name__}, which has defaults." if given and base is not None else ""
    return f" It lacks {', '.join(missing)}.{derive}"
