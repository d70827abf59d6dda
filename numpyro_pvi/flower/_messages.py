"""What a message of Flower holds here: the bytes of one message of ours, and nothing that Flower itself would look at."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import PVIError

# Types of Flower's messages: who somebody is, and a question to a client.
WHO, ASK = "query.pvi_who", "query.pvi"
# Under which record of a message, or of a node's own state, and there by which name.
RECORD, FRAME, UNTOLD = "numpyro_pvi", "frame", "untold"


def flwr(module: str) -> Any:
    """A module of Flower, where it is installed.

    Args:
        module: its dotted name.

    Returns:
        The module.

    Raises:
        PVIError: naming the line to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PVIError(
            "numpyro_pvi.flower needs flwr, which is not installed: pip install 'numpyro_pvi[flower]'."
        ) from error


def pack(data: bytes | None, untold: bool = False) -> Any:
    """A record that holds the bytes of a message of ours.

    Args:
        data: the bytes; None says nothing.
        untold: whether whoever says it has not been told what its rows are to be taken for.

    Returns:
        Flower's ``RecordDict``.
    """
    app, fields = flwr("flwr.app"), {}
    if data is not None:
        fields[FRAME] = data
    if untold:
        fields[UNTOLD] = True
    return app.RecordDict({RECORD: app.ConfigRecord(fields)})


def unpack(records: Any) -> tuple[bytes | None, bool]:
    """What :func:`pack` was given, as far as it is there."""
    fields = records.get(RECORD, {})
    found = fields.get(FRAME)
    return (found if type(found) is bytes else None), fields.get(UNTOLD) is True
