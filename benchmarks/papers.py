"""``papers``: the experiments of the four papers that data could be found for, each as a page with a picture and tables.

An experiment is a benchmark of this folder, beside what its paper reports and what differs in the set-up. Pages are Markdown in
the folder that ``--out`` names, with an index; ``--only`` takes names of experiments, or their first words (``cvi``, ``pvi``,
``dgvi``, ``snep``).
"""

import argparse
import copy
import dataclasses
import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks import _report, cvi_glm

PAPERS = {
    "cvi": "Khan and Lin, Conjugate-Computation Variational Inference, AISTATS 2017",
    "pvi": "Bui et al., Partitioned Variational Inference: A unified framework, 2018",
    "dgvi": "Paritosh et al., Distributed Variational Inference for Online Supervised Learning",
    "snep": "Hasenclever et al., Distributed Bayesian Learning with Stochastic Natural Gradient EP, JMLR 18, 2017",
}


# -------------------------------------------------------------------------------------------------------------- pictures


@dataclasses.dataclass(frozen=True)
class Bars:
    """One group of bars a row of a table.

    Attributes:
        table: which of the report's tables.
        label: column with the groups' names.
        columns: what each bar is called, and its column.
        ylabel: the axis.
        beside: further bars by what they are called: the paper's figures by group, on its own machine.
        log: whether the axis is logarithmic.
    """

    table: int
    label: str
    columns: Mapping[str, str]
    ylabel: str
    beside: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    log: bool = False

    def draw(self, report: _report.Report, axes: Any) -> None:
        """Draws the table onto matplotlib axes."""
        table = report.tables[self.table]
        groups = [str(name) for name in table.column(self.label)]
        bars = {name: [number(x) for x in table.column(column)] for name, column in self.columns.items()}
        bars |= {name: [found.get(group, float("nan")) for group in groups] for name, found in self.beside.items()}
        width = 0.8 / len(bars)
        for k, (name, heights) in enumerate(bars.items()):
            at = [i + (k - 0.5 * (len(bars) - 1)) * width for i in range(len(groups))]
            axes.bar(at, heights, width, label=name)
        axes.set_xticks(
            range(len(groups)),
            groups,
            rotation=20 if len(groups) > 3 else 0,
            ha="right" if len(groups) > 3 else "center",
        )
        axes.set_ylabel(self.ylabel)
        if self.log:
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)


@dataclasses.dataclass(frozen=True)
class Lines:
    """One line a column of a table, over another column; rows whose place is no number are left out.

    Of several rows at one place (seeds) the line is the mean, in a band from the least to the largest.

    Attributes:
        table: which of the report's tables.
        x: column with the places.
        columns: what each line is called, and its column; numbers before a stroke count.
        xlabel: the axis.
        ylabel: the other.
        log: which axes are logarithmic.
        levels: horizontal lines, by what they are called: the paper's figures.
        by: column whose values part the rows into lines of their own, or None.
    """

    table: int
    x: str
    columns: Mapping[str, str]
    xlabel: str
    ylabel: str
    log: str = ""
    levels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    by: str | None = None

    def draw(self, report: _report.Report, axes: Any) -> None:
        """Draws the table onto matplotlib axes."""
        table = report.tables[self.table]
        kinds = [""] if self.by is None else list(dict.fromkeys(table.column(self.by)))
        for kind in kinds:
            kept = [self.by is None or of == kind for of in (table.column(self.by) if self.by else table.rows)]
            places = [number(x) for x, keep in zip(table.column(self.x), kept, strict=True) if keep]
            for name, column in self.columns.items():
                values = [number(y) for y, keep in zip(table.column(column), kept, strict=True) if keep]
                at: dict[float, list[float]] = {}
                for x, y in zip(places, values, strict=True):
                    if x == x and y == y:
                        at.setdefault(x, []).append(y)
                if at:
                    means = [sum(found) / len(found) for found in at.values()]
                    (line,) = axes.plot(list(at), means, "o-", ms=4, label=" ".join(filter(None, (str(kind), name))))
                    if any(len(found) > 1 for found in at.values()):
                        ends = [[end(found) for found in at.values()] for end in (min, max)]
                        axes.fill_between(list(at), *ends, color=line.get_color(), alpha=0.25, lw=0)
        for name, level in self.levels.items():
            axes.axhline(level, color="0.5", lw=1, ls="--")
            axes.annotate(name, (0.99, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        axes.set_xlabel(self.xlabel)
        axes.set_ylabel(self.ylabel)
        if "x" in self.log:
            axes.set_xscale("log")
        if "y" in self.log:
            axes.set_yscale("log")
        # Of an experiment that was cut nothing may be there.
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)


def number(entry: Any) -> float:
    """An entry of a table as a number: what stands before a stroke; NaN where that is no number."""
    try:
        return float(str(entry).partition("/")[0].replace(",", ""))
    except ValueError:
        return float("nan")


# ----------------------------------------------------------------------------------------------------------- experiments


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Attributes:
        name: of its page; the first word says which paper.
        title: one line.
        where: section, figure or table of the paper.
        benchmark: module of this package that runs it.
        files: data it needs.
        reported: the paper's figures: names of columns, and rows.
        differs: what is not as in the paper.
        pictures: what is drawn of the tables.
        only: what the benchmark's ``--only`` is, or None.
    """

    name: str
    title: str
    where: str
    benchmark: str
    files: tuple[str, ...]
    reported: tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]
    differs: str
    pictures: tuple[Bars | Lines, ...] = ()
    only: tuple[str, ...] | None = None

    @property
    def paper(self) -> str:
        """Which of the papers."""
        return self.name.partition("-")[0]


EXPERIMENTS = (
    Experiment(
        "cvi-glm",
        "Bayesian logistic regression",
        "table 3, figure 1 (a) and (c)",
        "cvi_glm",
        ("a1a.npz", "australian_scale.npz", "breast_cancer_scale.npz", "colon_cancer.npz", "covtype_397k.npz"),
        (
            ("data", "Chol: -ELBO", "Chol, s", "CVI-exact: -ELBO", "CVI-exact, s"),
            (
                ("a1a", 591.4, 0.82, 590.5, 0.10),
                ("australian_scale", 191.62, 0.193, 191.14, 0.020),
                ("breast_cancer_scale", 34.21, 0.110, 34.24, 0.032),
                ("colon_cancer", 18.26, 93.229, 18.26, 0.012),
                ("covtype", 149_641.0, 198.19, 149_615.0, 39.57),
            ),
        ),
        "The paper's random halves are not known: only a1a has a public split, and the paper's 590.4 for it is below the "
        "optimum of every model that was tried (591.733). covtype has 397,050 of 581,012 rows here. Seconds are to 0.01 nats "
        "of the optimum, on another machine.",
        (
            Bars(
                0,
                "data",
                {"PVI": "PVI, s", "Chol (L-BFGS on m, L)": "Chol, s"},
                "seconds to the optimum",
                {
                    "the paper's Chol, its machine": {name: found[1] for name, found in cvi_glm.PAPER.items()},
                    "the paper's CVI-exact": {
                        "a1a": 0.10,
                        "australian_scale": 0.020,
                        "breast_cancer_scale": 0.032,
                        "colon_cancer": 0.012,
                        "covtype": 39.57,
                    },
                },
                log=True,
            ),
        ),
    ),
    Experiment(
        "cvi-gp",
        "Gaussian-process classification",
        "figure 2",
        "cvi_gp",
        ("ionosphere.npz", "usps.npz", "usps_3vs5.npz"),
        (("what", "found"), (("CVI-exact, Chol, EP, PG-SVI", "curves that end at the same negative ELBO; no table"),)),
        "The paper's USPS set of 1,781 images has as many as digits 2 and 4 have, and not 3 and 5: both pairs are run. "
        "The opponent is the dense optimum, by L-BFGS in float64.",
        (
            Bars(0, "data", {"gap to the dense optimum": "gap of sites by rows"}, "nats above the optimum at the end"),
            Bars(
                0, "data", {"PVI, two numbers a row": "s", "one Cholesky of K": "Cholesky of K, s"}, "seconds", log=True
            ),
        ),
    ),
    Experiment(
        "cvi-gamma",
        "Gamma factors and Poisson-gamma factorisation",
        "figure 1 (b) and (d), tables 4 and 5",
        "cvi_gamma",
        ("cytof_cytofkit_15942.npz", "mnist.npz"),
        (
            ("data", "method", "held-out loss", "s"),
            (
                ("Cytof (522,656 x 40)", "Knowles", 52.25, 210.03),
                ("Cytof (522,656 x 40)", "CVI", 52.52, 50.91),
                ("MNIST (60,000)", "Adam", 0.000125, 1776.83),
                ("MNIST (60,000)", "CVI", 0.000119, 1692.64),
            ),
        ),
        "The paper's CyTOF file was not found: 15,942 other cells stand in, so that only the sides here compare with one another. "
        "MNIST: 5,000 images and 50 factors (the paper: 60,000 and 100), 60 s a side; the paper divides its root by rows "
        "times pixels.",
        (
            Bars(0, "side", {"CyTOF": "at the end"}, "held-out loss after 60 s"),
            Bars(1, "side", {"MNIST": "at the end"}, "held-out loss after 60 s"),
        ),
    ),
    Experiment(
        "cvi-kalman",
        "Counts along a random walk, by Kalman smoothing",
        "appendix E.2",
        "kalman",
        (),
        (("what", "found"), (("cost of a pass", "linear in T: messages of a chain, two numbers a step"),)),
        "The paper gives the example without figures; the counts are simulated.",
        (Lines(1, "T", {"six rounds": "6 rounds, s"}, "steps T", "seconds, warm", log="xy"),),
    ),
    Experiment(
        "pvi-networks",
        "Federated Bayesian networks, workers alike and with classes of their own",
        "section 7.1, figures 4 and 5; label noise after FedGVI's table",
        "networks",
        ("mnist.npz",),
        (
            ("workers", "method", "test error, %"),
            (
                ("ten, alike", "PVI, synchronous, best settings", "under 2"),
                ("ten, alike", "PVI, synchronous, at a tenth of global VI's messages", "3"),
                ("ten, of one class each", "PVI, best settings", "comparable, after far more messages (figure 5)"),
                ("ten, alike, 10 % label noise (FedGVI)", "PVI", 4.44),
                ("three, alike, 10 % label noise (FedGVI)", "PVI", 3.32),
            ),
        ),
        "Batches of 100 (the paper: 200). The paper chooses step sizes and damping by test error; here by 10,000 training images "
        "held out, and in the end by test error too. FedAvg gets the better of two lengths of steps. Workers that disagree take "
        "steps along the gradient in place of Adam's where nothing else is said. FedGVI's noise and network are not known here: "
        "one label in ten is one of the nine others, and the network is that of the PVI paper. Calibration "
        "errors are over 15 bins.",
        (
            *(
                Lines(
                    table,
                    place,
                    {"": "error, %"},
                    f"{place}, {what}",
                    "test error, %",
                    log="xy",
                    levels=levels,
                    by="fit",
                )
                for table, what, levels in (
                    (0, "workers alike", {"the paper's best": 2.0}),
                    (1, "two classes a worker", {}),
                    (2, "one class a worker", {}),
                )
                for place in ("exchanges", "gradients of 100 rows")[: 1 if table == 2 else 2]
            ),
        ),
    ),
    Experiment(
        "pvi-streams",
        "Streams of sparse Gaussian processes",
        "section 7.2, figures 6 and 7",
        "streaming_gp",
        ("banana.npz", "sarcos_test_4449.npz"),
        (
            ("data", "method", "final SMSE"),
            (
                ("Barrett WAM, third joint", "private pseudo-points", "0.100 +- 0.004"),
                ("Barrett WAM, third joint", "shared pseudo-points", "0.313 +- 0.079"),
                ("Barrett WAM, third joint", "exact, limited memory", "1.021 +- 0.113"),
            ),
        ),
        "The paper's recording was not found: the test part of SARCOS stands in, 3,560 rows in eight batches, torque of the first "
        "joint. Hyperparameters are a point for the arm (the paper: distributions). Shared pseudo-points move with their sites "
        "projected; the paper's are chosen anew at every batch.",
        (
            Lines(
                1,
                "batches seen",
                {"accuracy": "test accuracy"},
                "regions seen",
                "test accuracy (banana)",
                by="pseudo-points",
            ),
            Lines(
                2,
                "batches seen",
                {"private": "private", "shared": "shared", "last batch only": "last batch only"},
                "batches seen (file's order)",
                "SMSE",
                log="y",
            ),
            Lines(
                3,
                "batches seen",
                {"private": "private", "shared": "shared", "last batch only": "last batch only"},
                "batches seen (sorted by the joint)",
                "SMSE",
                log="y",
            ),
        ),
    ),
    Experiment(
        "dgvi-banana",
        "Classification by single points",
        "section VI, figure 2",
        "banana",
        ("banana.npz",),
        (("steps", "test accuracy"), (("20,000", "88 %"),)),
        "Splits and kernel centres are drawn anew (three of them).",
        (Bars(0, "split", {"1,000 steps": "accuracy at 1,000", "20,000 steps": "20,000 steps"}, "test accuracy", {}),),
    ),
    Experiment(
        "dgvi-intel",
        "Mapping the Intel laboratory, one agent and four",
        "section VI, figures 3, 5 and 6",
        "intel",
        ("intel_lidar.npz",),
        (
            ("agents", "kernels", "iterations", "test accuracy"),
            ((1, 1200, "400,000", "87 %"), (4, 1500, "a quarter of the single agent's", "about 87 %")),
        ),
        "The paper's derived points were not found: free-space points were drawn along the beams of the same 910 scans.",
        (Bars(0, "covariance", {"test accuracy": "accuracy"}, "test accuracy"),),
    ),
    Experiment(
        "dgvi-robots",
        "Seven robots map a floor plan",
        "section VI, figure 7",
        "dinno",
        ("dinno_floorplan.npz",),
        (("agents", "kernels", "found"), ((7, 1000, "maps and errors by iteration as pictures; no table"),)),
        "Scans are simulated again along the original paths. The paper keeps a replay buffer and balances classes; without "
        "(replay 0) and with (replay 2) are both run.",
        (Bars(0, "replay", {"accuracy": "accuracy", "of occupied points": "of occupied"}, "share right"),),
    ),
    Experiment(
        "snep-logistic",
        "Logistic regression beside EP and consensus Monte Carlo",
        "its logistic regression",
        "snep",
        (),
        (("what", "found"), (("figures of the paper", "not at hand: its summary has none"),)),
        "Simulated data, eight workers sorted by a covariate; all methods get as many density values or gradients.",
        (Bars(0, "q", {"median over seeds": "median", "worst": "worst"}, "KL(exact moments, q), nats", log=True),),
    ),
    Experiment(
        "snep-network",
        "A network for threes and fives beside power EP and consensus Monte Carlo",
        "its network",
        "snep_net",
        ("mnist.npz",),
        (("what", "found"), (("figures of the paper", "not at hand: its summary has none"),)),
        "A small network (49-5-1, 400 rows, four workers), so that power EP and consensus Monte Carlo can run beside it.",
        (
            Bars(0, "method", {"test error": "test error"}, "test error"),
            Bars(0, "method", {"log score": "nats a test row"}, "nats a test row"),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------------------- pages


def page(experiment: Experiment, report: _report.Report, pictures: list[str], machine: str) -> str:
    """The experiment's page: pictures, the paper's figures, ours, what differs."""
    lines = [f"# {experiment.title}", "", f"{PAPERS[experiment.paper]}, {experiment.where}.", ""]
    lines += [f"![{experiment.title}]({name})" for name in pictures]
    lines += ["", _report.Table("the paper", *experiment.reported).text, ""]
    for table in report.tables:
        lines += [table.text, ""]
    lines += [f"What differs: {experiment.differs}", ""]
    if report.targets:
        lines += [report.verdicts.text, ""]
    return "\n".join([*lines, machine, ""])


def run_one(experiment: Experiment, options: argparse.Namespace, folder: pathlib.Path) -> _report.Report:
    """Runs an experiment's benchmark, and writes its picture and its page."""
    from matplotlib import pyplot

    own = copy.copy(options)
    own.out, own.only, own.peer = str(folder), experiment.only, None
    before = {path.name for path in folder.glob("*.png")}
    report = importlib.import_module(f"benchmarks.{experiment.benchmark}").run(own)
    report.print_targets()
    figure, axes = pyplot.subplots(
        1, len(experiment.pictures), figsize=(5.5 * len(experiment.pictures), 4), layout="constrained", squeeze=False
    )
    for spec, each in zip(experiment.pictures, axes[0], strict=True):
        if spec.table < len(report.tables):
            spec.draw(report, each)
        else:
            each.set_axis_off()
    figure.savefig(folder / f"{experiment.name}.png", dpi=90)
    pyplot.close(figure)
    # Maps are pictures of the benchmark's own.
    others = sorted({path.name for path in folder.glob("*.png")} - before - {f"{experiment.name}.png"})
    text = page(experiment, report, [f"{experiment.name}.png", *others], _report.describe_machine())
    (folder / f"{experiment.name}.md").write_text(text)
    return report


def chosen(only: list[str] | None) -> list[Experiment]:
    """The experiments that some names mean, in their order.

    Raises:
        SystemExit: for a name that means none.
    """
    if only is None:
        return list(EXPERIMENTS)
    for name in only:
        if not any(name in (e.name, e.paper) for e in EXPERIMENTS):
            known = ", ".join([*PAPERS, *(e.name for e in EXPERIMENTS)])
            raise SystemExit(f"papers: {name!r} is none of its experiments or papers: {known}")
    return [e for e in EXPERIMENTS if any(name in (e.name, e.paper) for name in only)]


def run(options: argparse.Namespace) -> _report.Report:
    """Every chosen experiment whose data are there; the index says which were left out."""
    folder = pathlib.Path("papers" if options.out is None else options.out)
    folder.mkdir(parents=True, exist_ok=True)
    whole = _report.Report("papers")
    summary: list[tuple[Any, ...]] = []
    for experiment in chosen(options.only):
        missing = missing_files(experiment, options.data)
        if missing and not options.quick:
            summary.append(
                (experiment.paper, experiment.title, f"not run: {', '.join(missing)} not in the data folder")
            )
            continue
        print(f"### {experiment.name}: {experiment.title}\n", flush=True)
        report = run_one(experiment, options, folder)
        missed = sum(not target.met for target in report.targets)
        verdict = "" if not report.targets else f", {len(report.targets) - missed} of {len(report.targets)} targets met"
        summary.append((experiment.paper, experiment.title, f"[{experiment.name}]({experiment.name}.md){verdict}"))
        whole.targets += report.targets
        _index(folder, summary)
    _index(folder, summary)
    whole.add_table(f"pages in {folder}", ("paper", "experiment", "page"), summary)
    return whole


def missing_files(experiment: Experiment, data: str | None) -> list[str]:
    """Which of the files that an experiment needs are not in the data folder."""
    return [name for name in experiment.files if data is None or not (pathlib.Path(data) / name).exists()]


def _index(folder: pathlib.Path, summary: list[tuple[Any, ...]]) -> None:
    table = _report.Table("the papers' experiments", ("paper", "experiment", "page"), tuple(summary))
    names = "\n".join(f"- {short}: {name}" for short, name in PAPERS.items())
    (folder / "README.md").write_text(f"# The papers' experiments\n\n{names}\n\n{table.text}\n")
