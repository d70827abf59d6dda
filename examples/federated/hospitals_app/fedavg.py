"""FedAvg of the same model, to compare with: hospitals' gradient steps towards the mode of the posterior, and their averages."""

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpyro import handlers

from .task import COLUMNS, model

ROUTE = "train.fedavg"
START = 0.01


def objective(theta, X, y, hospitals):
    """Minus a hospital's part of log p(y, theta), per row: its log-likelihood and its share of the prior, nats.

    Averaged by hospitals' numbers of rows, as FedAvg does, it is minus log p(y, theta) per row, exactly.
    """
    sites = handlers.trace(handlers.substitute(model, theta)).get_trace(X, y).values()
    density = {True: 0.0, False: 0.0}
    for site in sites:
        if site["type"] == "sample":
            density[site["is_observed"]] += site["fn"].log_prob(site["value"]).sum()
    return -(density[True] + density[False] / hospitals) / len(y)


def steps(theta, X, y, hospitals, length, count):
    """Some gradient steps of a hospital's own, each over all its rows."""
    gradient = jax.jit(jax.grad(objective), static_argnums=3)
    for _ in range(count):
        theta = jax.tree.map(lambda x, g: x - length * g, theta, gradient(theta, X, y, hospitals))
    return theta


def descend(message, X, y):
    """A hospital's answer: where its steps have led."""
    content = message.content
    theta, config = {name: array.numpy() for name, array in content["arrays"].items()}, content["config"]
    theta = steps(theta, X, y, config["hospitals"], config["length"], config["steps"])
    arrays = ArrayRecord({name: Array(np.asarray(x)) for name, x in theta.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=message)


class Averages(FedAvg):
    """Flower's FedAvg, whose messages go to the hospitals' ``train.fedavg``; their ``train`` is secure aggregation's."""

    def configure_train(self, server_round, arrays, config, grid):
        """As Flower's, by another route."""
        for message in super().configure_train(server_round, arrays, config, grid):
            message.metadata.message_type = ROUTE
            yield message


def average(grid, hospitals, rounds, length, count):
    """The mode that some rounds of FedAvg lead to, and what the last round's messages held.

    Args:
        grid: Flower's.
        hospitals: how many take part.
        rounds: of messages.
        length: of a gradient step; the gradient is per row.
        count: steps of a hospital in a round.

    Returns:
        Latents by name, and bytes of all rounds to and from all hospitals.
    """
    # Not 0, where log(1 + exp(-|logits|)), by which a Bernoulli is evaluated, has a kink, and automatic derivatives are wrong.
    start = {"intercept": np.full((), START), "coefficients": np.full(len(COLUMNS), START)}
    arrays = ArrayRecord({name: Array(x) for name, x in start.items()})
    strategy = Averages(fraction_evaluate=0.0, min_train_nodes=hospitals, min_available_nodes=hospitals)
    config = ConfigRecord({"hospitals": hospitals, "length": length, "steps": count})
    found = strategy.start(grid, initial_arrays=arrays, num_rounds=rounds, train_config=config).arrays
    sent = 2 * rounds * hospitals * found.count_bytes()
    return {name: array.numpy() for name, array in found.items()}, sent
