"""A hospital: it reads its own rows and answers questions about q, alone or in sums. No row leaves it."""

import os

from numpyro_pvi.flower import client_app

from .fedavg import descend
from .task import HOSPITALS, guide, model, rows_of


def label(context):
    """Its name: what its node was begun with, or in a simulation the letter of its number."""
    return context.node_config.get("label") or HOSPITALS[int(context.node_config["partition-id"])]


def load_rows(context):
    """Its rows: of the file that its node was begun with, or in a simulation its part of the built-in data."""
    return rows_of(label(context), context.node_config.get("data"))


def heard_in_sums(context):
    """Whether it answers in sums only: as its node was begun, which nobody else can change, or else as the run is to be."""
    return bool(context.node_config.get("secure", context.run_config.get("secure", False)))


def hospital(secure=heard_in_sums):
    """The app; ``secure`` as of :func:`numpyro_pvi.flower.client_app`."""
    # Programs outlive processes that end after every message, and memory outlives a node, in folders of the hospital's own.
    own = {"cache": os.environ.get("PVI_CACHE"), "keep": os.environ.get("PVI_KEEP")}
    made = client_app(model, guide(), load_rows, label=label, secure=secure, **own)

    @made.train("fedavg")
    def train(message, context):
        if secure(context) if callable(secure) else secure:
            raise ValueError("this hospital is heard in sums only, and takes no part in FedAvg, which shows its steps")
        return descend(message, model, *load_rows(context))

    return made


app = hospital()
