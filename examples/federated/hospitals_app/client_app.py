"""A hospital: it reads its own rows and answers questions about q. No row leaves it."""

import os

from numpyro_pvi.flower import client_app

from .task import HOSPITALS, guide, model, rows_of


def label(context):
    """Its name: what its node was begun with, or in a simulation the letter of its number."""
    return context.node_config.get("label") or HOSPITALS[int(context.node_config["partition-id"])]


def load_rows(context):
    """Its rows: of the file that its node was begun with, or in a simulation its part of the built-in data."""
    return rows_of(label(context), context.node_config.get("data"))


# Where processes end after every message, programs outlive them here; PVI_CACHE is the hospital's own folder.
app = client_app(model, guide(), load_rows, label=label, cache=os.environ.get("PVI_CACHE"))
