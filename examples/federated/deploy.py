"""Five hospitals as real processes, over TLS on this machine: python deploy.py.

A CA is made with openssl, and a certificate for 127.0.0.1; the server (flower-superlink) and one node a hospital (flower-supernode)
are begun, each hospital with its rows in a file of its own and a folder of compiled programs of its own; the app is run (flwr run);
and everything is ended again, whatever happens, after --timeout seconds at most.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
sys.path.insert(0, str(HERE))


def certificates(folder: Path) -> None:
    """A CA of this run's own, and the server's certificate, signed by it."""
    request = "[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN=127.0.0.1\n[ext]\nsubjectAltName=IP:127.0.0.1,DNS:localhost\n"
    (folder / "server.cnf").write_text(request)
    steps = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ca.key -out ca.crt -subj /CN=hospitals-ca "
        "-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -config server.cnf",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out server.crt -extfile server.cnf "
        "-extensions ext",
    )
    for step in steps:
        subprocess.run(["openssl", *step.split()], cwd=folder, check=True, capture_output=True, timeout=60)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Processes:
    """Processes that are begun here, each with a log, and ended together with their children."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self._folder, self._environment, self._all = folder, environment, []

    def begin(self, name: str, command: list[str], **environment: str) -> subprocess.Popen:
        """Begin one, in a group of its own."""
        with (self._folder / f"{name}.log").open("wb") as log:
            env = {**self._environment, **environment}
            begun = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True, cwd=self._folder)
        self._all.append(begun)
        return begun

    def end(self) -> None:
        """End all, and all that they have begun."""
        for sign, wait in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            for process in reversed(self._all):
                try:
                    os.killpg(process.pid, sign)
                except ProcessLookupError:
                    continue
            until = time.monotonic() + wait
            for process in self._all:
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue


def until_listening(port: int, seconds: float) -> None:
    """Wait for a port."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with socket.socket() as one:
            one.settimeout(1.0)
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nobody listens on port {port} after {seconds:g} s")


def begin_node(
    processes: Processes, folder: Path, hospital: str, address: str, again: bool = False
) -> subprocess.Popen:
    """Begin one hospital's node, with its own rows, programs and memory."""
    config = f'label="{hospital}" data="{folder / hospital}.csv"'
    node = ["flower-supernode", "--superlink", address, "--root-certificates", "ca.crt", "--node-config", config]
    (port,) = free_ports(1)
    own = {"PVI_CACHE": str(folder / f"programs-{hospital}"), "PVI_KEEP": str(folder / f"memory-{hospital}")}
    name = f"node-{hospital}{'-again' * again}"
    return processes.begin(name, [*node, "--host", "127.0.0.1", "--port", str(port)], **own)


def deploy(folder: Path, hospitals: str, rounds: int, timeout: float, secure: bool = False, lose: str = "") -> dict:
    """Fit, over TLS, and return what the server has written.

    Args:
        folder: for certificates, rows, logs and the result.
        hospitals: which of the five.
        rounds: at most.
        timeout: seconds after which everything is ended.
        secure: whether hospitals are heard in sums only; it takes three or more.
        lose: a hospital whose node is killed after the first round, and begun again.
    """
    import numpy as np
    from hospitals_app.task import table_of

    certificates(folder)
    (port,) = free_ports(1)
    address, out = f"127.0.0.1:{port}", folder / "out.npz"
    home = folder / "home"
    home.mkdir()
    connection = f'[superlink]\ndefault = "tls"\n\n[superlink.tls]\naddress = "{address}"\nroot-certificates = "{folder}/ca.crt"\n'
    (home / "config.toml").write_text(connection)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PYTHONPATH": path,
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    # A cache of compiled programs that is set for all processes would be one for all hospitals.
    shared = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    processes = Processes(folder, {**shared, **own})
    until = time.monotonic() + timeout
    try:
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        server = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port), *tls]
        processes.begin("superlink", [*server, "--disable-runtime-dependency-installation"])
        until_listening(port, 120.0)
        for hospital in hospitals:
            np.savetxt(folder / f"{hospital}.csv", table_of(hospital), delimiter=",")
        nodes = {hospital: begin_node(processes, folder, hospital, address) for hospital in hospitals}
        config = (
            f'num-server-rounds={rounds} hospitals="{",".join(hospitals)}" secure={str(secure).lower()} out="{out}"'
        )
        run = processes.begin("run", ["flwr", "run", str(HERE), "tls", "--run-config", config, "--stream"])
        while not out.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"there is no result after {timeout:g} s; the logs are in {folder}")
            if run.poll() not in (None, 0):
                raise RuntimeError(
                    f"flwr run has ended with {run.returncode}: {(folder / 'run.log').read_text()[-2000:]}"
                )
            if lose and "[ROUND 1/" in (folder / "run.log").read_text():
                os.killpg(nodes[lose].pid, signal.SIGKILL)
                begin_node(processes, folder, lose, address, again=True)
                lose = ""
            time.sleep(0.5)
        time.sleep(1.0)
        with np.load(out) as found:
            return dict(found)
    finally:
        processes.end()


def main() -> None:
    """Deploy, and print what was fitted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hospitals", default="ABCDE", help="which of the five")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--secure", action="store_true", help="hear hospitals in sums only, by secure aggregation")
    parser.add_argument(
        "--lose", default="", help="a hospital whose node is killed after the first round, and begun again"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which everything is ended")
    parser.add_argument("--keep", action="store_true", help="leave certificates, rows and logs where they are")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hospitals-"))
    begun = time.monotonic()
    try:
        found = deploy(folder, asked.hospitals, asked.rounds, asked.timeout, asked.secure, asked.lose)
        print("mean", found["mean"], "\nsd  ", found["sd"], "\nELBO", -found["losses"])
        print(f"{found['trips']} round trips, {found['bytes']} bytes")
        print(f"{time.monotonic() - begun:.0f} s")
    except BaseException:
        asked.keep = True
        raise
    finally:
        print(f"logs are in {folder}" if asked.keep else "all processes have ended")
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
