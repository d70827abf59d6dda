"""FedAvg of the same model, to compare with: hospitals' gradient steps towards the mode of the posterior, and their averages."""

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpyro import handlers

ROUTE = "train.fedavg"
# Where all latents start. Not at 0, where log(1 + exp(-|logits|)), by which a Bernoulli is evaluated, has a kink, and automatic
# derivatives are wrong.
START = 0.01


def objective(model, theta, X, y, hospitals):
    """Minus a hospital's part of log p(y, theta), per row: its log-likelihood and its share of the prior, nats.

    Averaged by hospitals' numbers of rows, as FedAvg does, it is minus log p(y, theta) per row, exactly.
    """
    sites = handlers.trace(handlers.substitute(model, theta)).get_trace(X, y).values()
    density = {True: 0.0, False: 0.0}
    for site in sites:
        if site["type"] == "sample":
            density[site["is_observed"]] += site["fn"].log_prob(site["value"]).sum()
    return -(density[True] + density[False] / hospitals) / len(y)


# Once for all messages that a process answers.
gradient = jax.jit(jax.grad(objective, argnums=1), static_argnums=(0, 4))


def steps(model, theta, X, y, hospitals, length, count):
    """Some gradient steps of a hospital's own, each over all its rows."""
    for _ in range(count):
        theta = jax.tree.map(lambda x, g: x - length * g, theta, gradient(model, theta, X, y, hospitals))
    return theta


def descend(message, model, X, y):
    """A hospital's answer: where its steps have led."""
    content = message.content
    theta, config = latents_of(content["arrays"]), content["config"]
    theta = steps(model, theta, X, y, config["hospitals"], config["length"], config["steps"])
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays_of(theta), "metrics": metrics}), reply_to=message)


def arrays_of(theta):
    """Latents as Flower sends them."""
    return ArrayRecord({name: Array(np.asarray(x)) for name, x in theta.items()})


def latents_of(arrays):
    """What Flower has sent, by name."""
    return {name: array.numpy() for name, array in arrays.items()}


class Averages(FedAvg):
    """Flower's FedAvg, whose messages go to the hospitals' ``train.fedavg``; their ``train`` is secure aggregation's."""

    def configure_train(self, server_round, arrays, config, grid):
        """As Flower's, by another route."""
        for message in super().configure_train(server_round, arrays, config, grid):
            message.metadata.message_type = ROUTE
            yield message


def average(grid, shapes, hospitals, rounds, length, count, heard=None):
    """The mode that some rounds of FedAvg lead to, and what its messages held.

    Args:
        grid: Flower's.
        shapes: of latents, by name.
        hospitals: how many take part.
        rounds: of messages.
        length: of a gradient step; the gradient is per row.
        count: steps of a hospital in a round.
        heard: called with the number of every round and latents after it; 0 with those at the start.

    Returns:
        Latents by name, and bytes of all rounds to and from all hospitals.
    """
    start = arrays_of({name: np.full(shape, START) for name, shape in shapes.items()})
    strategy = Averages(fraction_evaluate=0.0, min_train_nodes=hospitals, min_available_nodes=hospitals)
    config = ConfigRecord({"hospitals": hospitals, "length": length, "steps": count})
    told = None if heard is None else lambda number, arrays: heard(number, latents_of(arrays))
    found = strategy.start(grid, start, num_rounds=rounds, train_config=config, evaluate_fn=told).arrays
    return latents_of(found), 2 * rounds * hospitals * found.count_bytes()
