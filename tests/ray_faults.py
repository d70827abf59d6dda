"""What goes wrong in an actor, asked for by files in a folder; imported there by name."""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import Client, Ray, Respondent
from tests.client_model import logistic

ANSWER = Respondent.answer


def load(folder, label):
    """A group's rows, loaded in the actor, which from then on looks into the folder before it answers."""
    Respondent.answer = lambda client, data: disturbed(pathlib.Path(folder), client, data)
    with np.load(pathlib.Path(folder) / f"{label}.npz") as rows:
        return rows["X"], rows["Y"]


def client_of(folder, label):
    """A client that is made in the actor, from rows that it loads there."""
    return Client(logistic, AutoMultivariateNormal(logistic), label, load_rows=lambda: load(folder, label))


def disturbed(folder, client, data):
    """An answer, late where LABEL.slow is there; in its place death by signal 9 (LABEL.kill), or nothing for ever (LABEL.hang).

    LABEL.kill and LABEL.hang are for one question each.
    """
    begun = time.perf_counter()
    answer = ANSWER(client, data)
    if once(folder / f"{client.label}.kill"):
        # The site is made, and is lost.
        os.kill(os.getpid(), signal.SIGKILL)
    if once(folder / f"{client.label}.hang"):
        time.sleep(600)
    slow = folder / f"{client.label}.slow"
    if slow.exists():
        time.sleep(max(float(slow.read_text()), 19 * (time.perf_counter() - begun)))
    return answer


def once(path):
    """Whether a file is there; then it no longer is."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def drive(address, folder, checkpoint):
    """A driver that dies in its fourth round, after it has written three."""
    import ray

    jax.config.update("jax_enable_x64", True)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    with np.load(pathlib.Path(folder) / "all.npz") as rows:
        X, Y, labels = rows["X"], rows["Y"], rows["labels"]

    def die(done, state, info):
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    pvi = PVI(Partition(logistic, "data", labels), AutoMultivariateNormal(logistic), runtime=Ray(groups_per_actor=3))
    pvi.run(jax.random.key(0), 6, X, Y, progress_bar=False, callback=die, checkpoint=checkpoint, checkpoint_every=1)


if __name__ == "__main__":
    drive(*sys.argv[1:])
