"""Command line: ``python -m benchmarks NAME [--data DIR] [--device gpu] [--quick]``."""

import argparse
import importlib
import os
import sys

NAMES = {
    "glm": "PVI against SVI on logistic regression: rounds, warm and cold times (--size: growth with N, D, M)",
    "skew": "one group with half the rows against balanced groups",
    "regressions": "Poisson, negative binomial, Student-t, ordinal, multinomial against float64 optima",
    "wide": "prior sd 100, nearly separable labels, column scales over six decades",
    "meanfield": "diagonal q on correlated columns converges to its own optimum",
    "bnn": "a Bayesian network on MNIST: test error, posterior sds, time and memory of a round beside SVI's",
    "networks": "that network by workers of like images, of two classes, of one, and of wrong labels, beside batch VI and FedAvg",
    "hierarchical": "radon, eight schools, baseball with private effects against long NUTS, beside SVI",
    "mixed-effects": "power EP with effects integrated out, beside variational inference, against long NUTS",
    "continual": "tasks and counties that come one after another: streaming, revisiting, batch; forgetting",
    "gallery": "eight models after NumPyro's examples: ELBO and time against SVI's best with the same guide",
    "blackbox": "a differential equation and a neural network of width 8, against long SVI from the same start",
    "ep-probit": "power EP by rows against textbook EP: moments and evidence",
    "ep-logistic": "EP from sampled moments against the exact posterior, beside VI and Laplace",
    "snep": "stochastic natural-gradient EP beside EP, VI and consensus Monte Carlo at an equal budget of gradients",
    "snep-net": "SNEP on a small network for digits, beside power EP, VI and consensus Monte Carlo at equal gradients",
    "ep-speed": "chains of 32 groups in one program against a program per group (--size: a whole fit against NUTS)",
    "async": "ten groups, one twenty times slower, in simulated time: asynchronous against synchronous rounds",
    "resume": "kill -9 at random moments of a run that keeps a file: does it go on, to the same bits (--kills)",
    "graph": "agents without a server: contraction, steps to the central optimum through link failures, DELBO's mean",
    "banana": "DELBO on banana.npz: test accuracy by single-datum steps, and steps a second",
    "intel": "DELBO maps of intel_lidar.npz: one agent and four, both covariances, pictures with --out",
    "dinno": "DELBO map of dinno_floorplan.npz by seven agents, a picture with --out",
    "cvi-glm": "logistic regression on a1a, australian, breast cancer, colon cancer and covtype beside L-BFGS on (m, L)",
    "cvi-gp": "Gaussian-process classification (USPS, ionosphere) by two numbers per row, against the dense optimum",
    "streaming-gp": "sparse Gaussian processes over batches, private and shared pseudo-points: cost, banana by regions, SARCOS",
    "kalman": "counts along a random walk: linear in T, and equal to dense covariances at T = 500",
    "vmp": "a mixture and LDA beside textbook coordinate ascent, iterate by iterate; a message beside NC-VMP's",
    "cvi-gamma": "gamma factors of CyTOF counts and Poisson-gamma factors of MNIST beside Adam on the same gammas",
    "conjugacy": "three models with the messages that are found conjugate in closed form, against drawing every latent",
    "first-fit": "the first run and the next one beside SVI's, in fresh processes: seconds and compiled programs",
    "swap": "forty-four models as their authors wrote them, PVI in SVI's place: split or whole, ELBO and first-run seconds of both",
    "privacy": "logistic regression of a1a by ten skewed owners: log score and accuracy against epsilon",
    "federated": "the same by ten clients: messages and bytes, beside FedAvg and one pooled fit",
    "sharding": "seconds a round with the rows over 1, 2, 4 and 8 devices, in fresh processes: the overhead of sharing them",
    "ray": "eight actors, one ten times slower: seconds to a gap, asynchronous beside synchronous; what a round costs",
    "startup": "init and first update against SVI's, in fresh processes",
    "papers": "the four papers' experiments: a page each with a picture, the paper's figures and ours, in --out's folder",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    listing = "\n".join(f"  {name:12} {text}" for name, text in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*NAMES, "all"], help="which benchmark")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder with covtype_397k.npz (glm runs on it too), mnist.npz (bnn, networks, continual) and the maps' data",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="with banana, intel, dinno, streaming-gp, ray or papers: folder for the pictures (extra plots); networks: for scores",
    )
    parser.add_argument("--rows", type=int, help="use only the first ROWS rows of the real data")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where PVI and SVI run (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all; decides no target")
    parser.add_argument(
        "--size", action="store_true", help="glm: growth of time and memory instead; ep-speed: a whole fit"
    )
    parser.add_argument("--no-cold", action="store_true", help="with glm: leave the fresh processes out")
    parser.add_argument("--peer", metavar="DIR", help="with cvi-gp: also GPJax, in an environment made in this folder")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="MODEL",
        help="with regressions, gallery, hierarchical, mixed-effects, cvi-glm, cvi-gp, cvi-gamma, first-fit, networks or papers: "
        "only these",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="with networks, as one of papers too: after so many no fit is begun or goes on (default: 60)",
    )
    parser.add_argument("--kills", type=int, help="with resume: how many processes are killed (default: 50)")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 when a target is missed")
    return parser.parse_args(arguments)


def main() -> int:
    """Runs what was asked for and prints the tables as Markdown."""
    options = parse()
    # Before JAX is imported. The float64 references need the CPU whatever device is measured.
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if options.device == "gpu" else "cpu"
    from benchmarks import _report

    # The papers' experiments are other benchmarks again.
    names = [name for name in NAMES if name != "papers"] if options.name == "all" else [options.name]
    met = True
    for name in names:
        modules = ["sizes"] if name == "glm" and options.size else [name]
        if options.name == "all" and name == "glm":
            modules = ["glm", "sizes"]
        # "async" is a word of the language, which no module can be called.
        modules = ["asynchronous" if module == "async" else module for module in modules]
        for module in modules:
            print(f"## {module}\n\n{_report.describe_machine()}", flush=True)
            report = importlib.import_module(f"benchmarks.{module.replace('-', '_')}").run(options)
            report.print_targets()
            met = met and report.met
    return 0 if met or not options.strict else 1


if __name__ == "__main__":
    sys.exit(main())
