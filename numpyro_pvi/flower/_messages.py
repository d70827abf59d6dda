"""What a message of Flower holds here: the bytes of one message of ours, and nothing that Flower itself would look at."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import PVIError

# Types of Flower's messages: who somebody is, and a question to a client.
WHO, ASK = "query.pvi_who", "query.pvi"
# Under which record of a message, or of a node's own state, and there by which name.
RECORD, FRAME = "numpyro_pvi", "frame"
# Where a question to all clients that add to a sum is, in a message of Flower's training.
QUESTION = "question"
# The SecAgg+ mod takes numbers within the clipping range to whole ones of the target range: with twice the clipping range for the
# target range a whole number is taken to itself, and nothing is left to its rounding by chance.
CLIP = 1 << 29
TARGET, MODULUS = 2 * CLIP, 1 << 40


def flwr(module: str) -> Any:
    """A module of Flower, where it is installed. Raises PVIError naming the line to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PVIError(
            "numpyro_pvi.flower needs flwr, which is not installed: pip install 'numpyro_pvi[flower]'."
        ) from error


def pack(data: bytes | None) -> Any:
    """A record that holds the bytes of a message of ours. Returns Flower's ``RecordDict``."""
    app = flwr("flwr.app")
    return app.RecordDict({RECORD: app.ConfigRecord({} if data is None else {FRAME: data})})


def unpack(records: Any) -> bytes | None:
    """What :func:`pack` was given, as far as it is there."""
    found = records.get(RECORD, {}).get(FRAME)
    return found if type(found) is bytes else None
