"""``mixed-effects``: power EP with the groups' own effects integrated out, beside variational inference, against long NUTS."""

import argparse
import csv
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _report
from benchmarks.hierarchical import Hierarchy, load, sample
from numpyro_pvi import PVI, Partition
from numpyro_pvi.solvers import NaturalGradient, PowerEP

NUM_ROUNDS = 60
SCALES = ("tau", "sigma")


def sleepstudy(days: Any, reaction: Any = None) -> None:
    """Reaction times (hundreds of ms) under lack of sleep: an intercept and a slope of every subject's own, centred."""
    mean = numpyro.sample("mean", dist.Normal(jnp.array([3.0, 0.0]), 1.0).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([1.0, 0.5])).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("subject", reaction.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mean, tau).to_event(1))
        level = effect[:, :1] + effect[:, 1:] * days
        numpyro.sample("obs", dist.Normal(level, sigma).to_event(1), obs=reaction)


def problems(folder: pathlib.Path) -> dict[str, Hierarchy]:
    """Eight schools, sleepstudy and radon; every school, subject and county is a group."""
    rows = list(csv.DictReader((folder / "sleepstudy.csv").read_text().splitlines()))
    subjects = sorted({r["subject"] for r in rows})
    table = np.zeros((len(subjects), 10), np.float32)
    for r in rows:
        table[subjects.index(r["subject"]), int(r["days"])] = float(r["reaction"]) / 100
    days = np.arange(10, dtype=np.float32)
    found = load(folder)
    return {
        "eight schools": found["eight schools"],
        "sleepstudy": Hierarchy(sleepstudy, (days, table), {"subject": subjects}, ("mean", "tau", "sigma"), "effect"),
        "radon": found["radon"],
    }


def run(options: argparse.Namespace) -> _report.Report:
    """Fit each by NUTS (the reference), by power EP and by variational inference from the defaults."""
    report = _report.Report("mixed-effects")
    if not options.data:
        raise SystemExit("mixed-effects needs --data DIR with eight_schools.csv, sleepstudy.csv, radon_mn.csv.gz")
    rows = []
    for name, problem in problems(pathlib.Path(options.data)).items():
        if options.only and name not in options.only:
            continue
        args = tuple(jnp.asarray(x) for x in problem.args)
        reference = sample(problem, args, 250 if options.quick else 5_000)
        errors = {}
        for method, solver in (("PowerEP", PowerEP()), ("NaturalGradient", NaturalGradient())):
            found, rounds, seconds = fit(problem, args, solver)
            scales = tuple(n for n in problem.hyper if n in SCALES)
            errors[method] = [distance(found, reference, names) for names in (scales, problem.hyper)]
            rows.append((name, method, rounds, *np.ravel(errors[method]), seconds))
        for i, what in enumerate(("mean", "log sd")):
            # Two Monte Carlo errors of the reference: of its means in sds, of its log sds.
            slack = 2 * reference["error"] * (1.0, 0.5**0.5)[i]
            gap = errors["PowerEP"][0][i] - errors["NaturalGradient"][0][i]
            report.add_target(f"{name}: scales, error of the {what}, PowerEP's less VI's", gap, slack)
    report.add_table(
        "errors of posterior means (root mean square, NUTS sds) and of log sds of the hyperparameters, scales in logs",
        ("data", "solver", "rounds", "scales: mean", "scales: log sd", "all: mean", "all: log sd", "cold s"),
        rows,
    )
    return report


def fit(problem: Hierarchy, args: tuple[Any, ...], solver: Any) -> tuple[dict[str, tuple[Any, Any]], int, float]:
    """Locations and sds in unconstrained space by hyperparameter; rounds; seconds of everything, compilation included."""
    model = Partition(problem.model, groups=problem.groups)
    pvi = PVI(model, AutoMultivariateNormal(problem.model), solver=solver)
    started = time.perf_counter()
    result = pvi.run(jax.random.key(0), NUM_ROUNDS, *args, progress_bar=False)
    seconds = time.perf_counter() - started
    found = {}
    for name, q in pvi.posterior(result.state).items():
        base = q
        while isinstance(base, dist.TransformedDistribution | dist.Independent):
            base = base.base_dist
        found[name] = np.asarray(base.mean), np.asarray(base.variance) ** 0.5
    return found, len(result.losses), seconds


def distance(found: dict[str, Any], reference: dict[str, Any], names: tuple[str, ...]) -> tuple[float, float]:
    """Root mean squares of mean errors in NUTS sds, and of log sd ratios."""
    means, sds = [], []
    for name in names:
        exact, (loc, sd) = reference["draws"][name], found[name]
        means.append(np.ravel((loc - exact.mean(0)) / exact.std(0)))
        sds.append(np.ravel(np.log(sd / exact.std(0))))
    return tuple(float(np.sqrt(np.mean(np.concatenate(x) ** 2))) for x in (means, sds))
