"""The server: it fits q from what hospitals answer, and is given no row."""

import jax
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from numpyro_pvi.flower import PVIStrategy

from .fedavg import average
from .task import COLUMNS, HOSPITALS, guide, model

app = ServerApp()
NAMES = ("intercept", *COLUMNS)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Fit, and print what was found."""
    fit(grid, context.run_config)


def fit(grid, config):
    """Fit as a run's config says, print what was found, and write it where the config names a file."""
    owners = tuple(str(config.get("hospitals") or ",".join(HOSPITALS)).split(","))
    rounds = int(config.get("num-server-rounds", 20))
    method = str(config.get("method") or "pvi")
    if method not in ("pvi", "fedavg"):
        raise ValueError(f"method={method!r}: expected pvi or fedavg")
    found = by_fedavg(grid, owners, rounds, config) if method == "fedavg" else by_pvi(grid, owners, rounds, config)
    print(f"{found['trips']} round trips, {found['bytes']} bytes; {found.pop('message')}", flush=True)
    if config.get("out"):
        np.savez(str(config["out"]), **found)


def by_pvi(grid, owners, rounds, config):
    """Partitioned variational inference: the posterior; with ``secure``, from sums of what hospitals say."""
    strategy = PVIStrategy(model, guide(), owners=owners, secure=bool(config.get("secure")))
    result = strategy.start(grid, num_rounds=rounds, key=jax.random.key(0), tol=1e-3)
    posterior = result.pvi.posterior(result.fit.state)
    mean = np.append(posterior["intercept"].mean, posterior["coefficients"].mean)
    sd = np.sqrt(np.append(posterior["intercept"].variance, posterior["coefficients"].variance))
    for name, m, s in zip(NAMES, mean, sd, strict=True):
        print(f"{name:>20} {m:8.4f} +- {s:.4f}", flush=True)
    traffic, losses = result.fit.info.traffic, np.asarray(result.fit.losses)
    sent = {"trips": traffic.trips, "bytes": traffic.sent + traffic.received, "message": result.fit.message}
    return {"mean": mean, "sd": sd, "losses": losses, **sent}


def by_fedavg(grid, owners, rounds, config):
    """The posterior's mode by Flower's FedAvg, to compare with: no sd comes of it."""
    length, count = float(config.get("step-length", 1.0)), int(config.get("local-steps", 5))
    shapes = {"intercept": (), "coefficients": (len(COLUMNS),)}
    theta, sent = average(grid, shapes, len(owners), rounds, length, count)
    mode = np.append(theta["intercept"], theta["coefficients"])
    for name, m in zip(NAMES, mode, strict=True):
        print(f"{name:>20} {m:8.4f}", flush=True)
    return {"mean": mode, "trips": rounds, "bytes": sent, "message": "the mode, by FedAvg"}
