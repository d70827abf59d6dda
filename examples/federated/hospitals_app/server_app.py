"""The server: it fits q from what hospitals answer, and is given no row."""

import jax
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from numpyro_pvi.flower import PVIStrategy

from .task import COLUMNS, HOSPITALS, guide, model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Fit, and print the posterior."""
    config = context.run_config
    owners = tuple(str(config.get("hospitals") or ",".join(HOSPITALS)).split(","))
    strategy = PVIStrategy(model, guide(), owners=owners)
    rounds = int(config.get("num-server-rounds", 20))
    result = strategy.start(grid, num_rounds=rounds, key=jax.random.key(0), tol=1e-3)
    posterior = result.pvi.posterior(result.fit.state)
    mean = np.append(posterior["intercept"].mean, posterior["coefficients"].mean)
    sd = np.sqrt(np.append(posterior["intercept"].variance, posterior["coefficients"].variance))
    for name, m, s in zip(("intercept", *COLUMNS), mean, sd, strict=True):
        print(f"{name:>20} {m:8.4f} +- {s:.4f}", flush=True)
    traffic = result.fit.info.traffic
    print(f"{traffic.trips} round trips, {traffic.sent + traffic.received} bytes; {result.fit.message}", flush=True)
    if config.get("out"):
        np.savez(str(config["out"]), mean=mean, sd=sd, losses=np.asarray(result.fit.losses))
