"""Five hospitals in simulation: python simulate.py.

Flower's simulation runs on Ray. Its own extra, flwr[simulation], pins a version of Ray that is older than the one that
numpyro_pvi[ray] resolves to; what it needs is there with the two extras numpyro_pvi[flower,ray].
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
# Ray's workers look for the app here.
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Run the app with one node a hospital."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpus", type=float, default=1.0, help="that one client claims")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--secure", action="store_true", help="hear hospitals in sums only, by secure aggregation")
    parser.add_argument("--method", default="pvi", choices=("pvi", "fedavg"))
    parser.add_argument("--out", default="", help="file for what was found")
    asked = parser.parse_args()

    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation
    from hospitals_app.client_app import hospital
    from hospitals_app.server_app import fit
    from hospitals_app.task import HOSPITALS

    # A simulation that is begun from Python has no run config: both sides are told here.
    config = {"num-server-rounds": asked.rounds, "secure": asked.secure, "method": asked.method, "out": asked.out}
    server, begun = ServerApp(), time.monotonic()

    @server.main()
    def main(grid, context) -> None:
        fit(grid, config)
        print(f"{time.monotonic() - begun:.1f} s", flush=True)

    resources = {"num_cpus": asked.cpus, "num_gpus": 0.0}
    client = hospital(secure=asked.secure)
    run_simulation(server, client, len(HOSPITALS), backend_config={"client_resources": resources})


if __name__ == "__main__":
    main()
