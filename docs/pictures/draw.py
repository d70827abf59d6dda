"""Draws the pictures that are kept beside this file: python docs/pictures/draw.py [partitioned benchmark networks plots thumbnails ...].

`partitioned`, `plots`, `chunks`, `streaming` and `forgetting` are of plans and fits that are made here, `choosing`, `server` and
`graphs` are diagrams, `benchmark` and `networks` are of tables in docs/benchmarks.md, and `thumbnails` of the notebooks as the last `make docs` has
executed them.
"""

import base64
import io
import json
import pathlib
import re
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib import pyplot as plt
from numpyro.infer.autoguide import AutoMultivariateNormal
from PIL import Image

from numpyro_pvi import PVI, Partition, export
from numpyro_pvi.schedules import Decentralized, Streaming, Synchronous

HERE = pathlib.Path(__file__).parent
# Which picture of each notebook stands for it.
SHOWN = {
    "agents": 2,
    "arrivals": 0,
    "bayesian_network": 0,
    "did_it_work": 3,
    "families": 0,
    "gallery": 0,
    "gallery_latents": 0,
    "gallery_pooling": 0,
    "gaussian_processes": 0,
    "hierarchies": 0,
    "hospitals": 0,
    "never_meet": 0,
    "svi_to_pvi": 0,
    "topics": 0,
    "which_divergence": 0,
}
SIZE = (480, 300)


def model(x, y=None):
    """Logistic regression with two coefficients."""
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def partitioned():
    """Rows in three groups; each group's exact factor and its site; the product of the sites and the exact posterior."""
    rng = np.random.default_rng(8)
    angle = np.repeat([0.2, 1.3, 2.3], [26, 18, 14])
    group = np.repeat(["north", "east", "south"], [26, 18, 14])
    along = rng.normal(size=len(angle)) * 1.6
    x = np.stack([np.cos(angle), np.sin(angle)], 1) * along[:, None] + 0.45 * rng.normal(size=(len(angle), 2))
    y = (x @ [1.2, 0.9] + rng.logistic(size=len(x)) > 0).astype(int)
    pvi = PVI(Partition(model, "rows", group), AutoMultivariateNormal(model))
    state = pvi.run(jax.random.key(0), 40, jnp.asarray(x), jnp.asarray(y), tol=1e-5, progress_bar=False).state

    side = np.linspace(-2.6, 5.0, 300), np.linspace(-2.6, 5.0, 300)
    grid = np.stack(np.meshgrid(*side), -1)
    logits = grid @ x.T
    rows = y * logits - np.logaddexp(0, logits)
    levels = np.exp([-0.5 * 6.0, -0.5 * 2.8, -0.5 * 0.7])

    def gaussian(natural):
        precision, shift = np.asarray(natural.precision), np.asarray(natural.precision_mean)
        return grid @ shift - 0.5 * np.einsum("...i,ij,...j->...", grid, precision, grid)

    def draw(axis, exact, approximate, color):
        axis.contourf(*side, np.exp(exact - exact.max()), levels=[*levels, 1.01], colors=[color] * 3, alpha=0.22)
        axis.contour(*side, np.exp(approximate - approximate.max()), levels=levels, colors=["black"], linewidths=1.1)
        axis.set(xticks=[], yticks=[], aspect="equal")

    colors = {"north": "C0", "east": "C1", "south": "C2"}
    figure = plt.figure(figsize=(10, 4.7), layout="constrained")
    grid_of = figure.add_gridspec(2, 4, width_ratios=(1.15, 1, 1, 1), height_ratios=(1, 1))
    data = figure.add_subplot(grid_of[:, 0])
    for label, color in colors.items():
        chosen = group == label
        for value, marker in ((0, "o"), (1, "^")):
            at = x[chosen & (y == value)]
            style = {"facecolors": "none"} if value == 0 else {"facecolors": color}
            data.scatter(*at.T, marker=marker, edgecolors=color, s=26, **style)
        data.scatter([], [], color=color, s=26, label=label)
    data.set(xticks=[], yticks=[], aspect="equal")
    data.set_title("rows, in three groups", fontsize="medium")
    data.legend(loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3, fontsize="small", frameon=False)
    for i, (label, color) in enumerate(colors.items()):
        axis = figure.add_subplot(grid_of[0, 1 + i])
        draw(axis, rows[..., group == label].sum(-1), gaussian(pvi.site(state, label).natural), color)
        axis.set_title(f"{label}: factor and site", fontsize="medium")
    prior = -0.5 * (grid**2).sum(-1) / 9.0
    whole = figure.add_subplot(grid_of[1, 2])
    sites = sum(gaussian(pvi.site(state, label).natural) for label in colors)
    draw(whole, prior + rows.sum(-1), prior + sites, "C3")
    for label, color in colors.items():
        site = gaussian(pvi.site(state, label).natural)
        whole.contour(*side, np.exp(site - site.max()), levels=levels[:1], colors=[color], linewidths=1)
    whole.set_title("posterior and q, with all sites", fontsize="medium")
    words = figure.add_subplot(grid_of[1, 1])
    words.text(
        0.5, 0.62, r"$q(\theta) \propto p(\theta)\,\prod_{m}\;\, t_m(\theta)$", ha="center", va="center", fontsize=15
    )
    words.text(0.5, 0.3, "prior times sites", ha="center", va="center")
    key = figure.add_subplot(grid_of[1, 3])
    key.fill_between([0.05, 0.25], 0.58, 0.72, color="C3", alpha=0.4)
    key.plot([0.05, 0.25], [0.35, 0.35], color="black", linewidth=1.1)
    key.text(0.32, 0.65, "exact", va="center")
    key.text(0.32, 0.35, "Gaussian, by PVI", va="center")
    for axis in (words, key):
        axis.set(xlim=(0, 1), ylim=(0, 1))
        axis.set_axis_off()
    figure.savefig(HERE / "partitioned.png", dpi=110)


def benchmark():
    """Seconds of `glm` as docs/benchmarks.md has them."""
    text = (HERE.parent / "benchmarks.md").read_text().split("### `glm`\n")[1].split("\n### ")[0]
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.match(r"(PVI|SVI) ", cells[0]) and re.match(r"[\d., ]+$", cells[1]):
            found[cells[0]] = [float(number) for number in cells[1].split(",")]
    figure, axis = plt.subplots(figsize=(8, 2.9), layout="constrained")
    for i, (name, seconds) in enumerate(found.items()):
        axis.plot(
            seconds, [i] * len(seconds), "o", color="C0" if name.startswith("PVI") else "C1", markersize=7, alpha=0.8
        )
    axis.set_yticks(range(len(found)), [name.replace("`", "") for name in found])
    axis.set(xscale="log", xlabel="seconds, once compiled (logarithmic; lower is better)")
    axis.invert_yaxis()
    axis.grid(True, axis="x", which="both", color="0.9")
    figure.savefig(HERE / "benchmark.png", dpi=110)


def networks():
    """Test errors of `networks` as the first table of docs/benchmarks.md has them: means, and from the least to the largest seed."""
    text = (HERE.parent / "benchmarks.md").read_text().split("### `networks`\n")[1].split("\n### ")[0]
    found, name = {}, ""
    for line in text.split("\n| fit |")[1].split("\n\n")[0].splitlines()[2:]:
        cells = [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        name = cells[0].split(",")[0].split(" (")[0] or name
        places = [float(cell.replace(",", "")) if cell != "-" else np.nan for cell in cells[1:3]]
        errors = [float(number) for number in cells[3].split(",")]
        found.setdefault(name, []).append((*places, np.mean(errors), min(errors), max(errors)))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for i, (name, rows) in enumerate(found.items()):
        for axis, at in zip(axes, (0, 1), strict=True):
            x, _, mean, low, high = (np.array(rows)[:, k] for k in (at, 0, 2, 3, 4))
            axis.plot(x, mean, "o-", color=f"C{i}", markersize=4, label=name)
            axis.fill_between(x, low, high, color=f"C{i}", alpha=0.25, linewidth=0)
    for axis, what in zip(axes, ("exchanges", "gradients of 100 images"), strict=True):
        axis.axhline(2.0, color="0.5", linewidth=1, linestyle="--")
        axis.set(xscale="log", yscale="log", xlabel=what)
        axis.set_yticks([2, 3, 4, 6, 8], ["2", "3", "4", "6", "8"])
        axis.set_yticks([], minor=True)
        axis.grid(True, which="both", color="0.93")
    axes[0].set_ylabel("test error, %")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(HERE / "networks.png", dpi=110)


def plots():
    """What each function of `numpyro_pvi.export` draws, of one small regression."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(160, 2))
    y = (x @ [1.0, -0.7] + rng.logistic(size=160) > 0).astype(int)
    group = rng.choice(["north", "east", "south"], size=160, p=[0.6, 0.3, 0.1])
    data = jnp.asarray(x), jnp.asarray(y)

    def fit(schedule, rounds):
        pvi = PVI(Partition(model, "rows", group), AutoMultivariateNormal(model), schedule=schedule)
        return pvi, pvi.run(jax.random.key(0), rounds, *data, progress_bar=False)

    pvi, result = fit(Synchronous(), 8)
    chain = Decentralized([("north", "east"), ("east", "south")], nodes=pvi.groups, steps_per_round=1)
    agents, gossip = fit(chain, 12)
    drawn = {
        "forest": export.plot_forest(pvi, result.state).figure,
        "influence": export.plot_influence(pvi, result.state).figure,
        "khat": export.plot_khat(pvi, result.state, *data, rng_key=jax.random.key(1)).figure,
        "error": export.plot_error({"synchronous": result, "no server": gossip}).figure,
        "rounds": export.plot_rounds(result),
        "agents": export.plot_agents(agents, gossip),
    }
    for name, figure in drawn.items():
        figure.savefig(HERE / f"plot_{name}.png", dpi=80)


def regression(rng, count):
    """Rows and labels of the model above."""
    x = rng.normal(size=(count, 2))
    return x, (x @ [1.0, -0.7] + rng.logistic(size=count) > 0).astype(int)


def chunks():
    """Rows as they come, by group, and in chunks of one length."""
    rng = np.random.default_rng(5)
    group = rng.choice(["north", "east", "south"], size=40, p=[0.55, 0.3, 0.15])
    length, colors = 8, {"north": "C0", "east": "C1", "south": "C2"}
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")

    def row(at, height, color, **style):
        axis.add_patch(
            plt.Rectangle((at + 0.06, height), 0.88, 0.8, facecolor=color, edgecolor="black", linewidth=0.5, **style)
        )

    def say(height, text):
        axis.text(0, height, text, ha="left", va="bottom", fontsize="medium")

    for i, label in enumerate(group):
        row(i, 8.6, colors[label])
    say(9.7, "rows, in the order of the arguments; one label each")
    at = 0.0
    for label, color in colors.items():
        count = int((group == label).sum())
        for i in range(count):
            row(at + i, 5.8, color)
        axis.text(at + count / 2, 5.6, label, ha="center", va="top", fontsize="small")
        at += count + 1.5
    say(6.9, "groups: a factor and a site for each")
    at, below = 0.0, 2.2
    for label, color in colors.items():
        count = int((group == label).sum())
        for first in range(0, count, length):
            if at + length > 44:
                at, below = 0.0, below - 1.7
            for i in range(length):
                filled = first + i < count
                row(at + i, below, color if filled else "white", **({} if filled else {"linestyle": ":"}))
            frame = plt.Rectangle((at - 0.15, below - 0.2), length + 0.3, 1.2, fill=False, linewidth=1.4)
            axis.add_patch(frame)
            at += length + 1.2
    say(3.5, "chunks of one length, each of one group; white is filled up and masked")
    axis.set(xlim=(-0.5, 45), ylim=(below - 0.6, 10.8))
    axis.set_axis_off()
    figure.savefig(HERE / "chunks.png", dpi=110)


LADDERS = {
    "guide": (
        [
            ("rates, shares or covariances: a Gaussian is the wrong shape", "AutoExponentialFamily"),
            ("more than some hundreds of latents, or only marginals matter", "AutoDiagonalNormal"),
        ],
        "AutoMultivariateNormal",
    ),
    "solver": (
        [
            ("a network, or large groups without structure", "LocalELBO"),
            ("skewed posterior, so many groups that a site each is too much", "StochasticEP"),
            ("skewed posterior, and PowerEP swings or workers talk seldom", "SNEP"),
            ("skewed posterior: its sds, tails or evidence matter", "PowerEP"),
        ],
        "NaturalGradient",
    ),
    "schedule": (
        [
            ("there is no server", "Decentralized"),
            ("groups arrive one by one, and are seen once", "Streaming"),
            ("groups take very different times, or messages get lost", "Asynchronous"),
            ("only some groups are there each time", "StochasticSubset"),
            ("expectations by draws, or correlated latents under a mean-field guide", "Sequential"),
        ],
        "Synchronous",
    ),
}


def choosing():
    """Questions from the top; the first yes decides, and the default is at the end of each ladder."""
    figure, axis = plt.subplots(figsize=(6.4, 11.2), layout="constrained")
    at = 0.0
    question = {"boxstyle": "round,pad=0.35", "facecolor": "0.95", "edgecolor": "0.4"}
    answer = {"boxstyle": "round,pad=0.35", "facecolor": "#cfe2f3", "edgecolor": "C0"}
    default = answer | {"facecolor": "#d9ead3", "edgecolor": "C2"}
    arrow = {"arrowstyle": "->", "color": "0.3"}
    for name, (questions, last) in LADDERS.items():
        axis.text(-0.3, at, name, fontsize="x-large", fontweight="bold", va="center")
        at -= 1.0
        for text, choice in questions:
            axis.text(2.4, at, textwrap.fill(text, 36), ha="center", va="center", bbox=question, fontsize=10.5)
            axis.text(7.9, at, choice, ha="center", va="center", bbox=answer, fontsize=10.5, family="monospace")
            axis.annotate("", (6.1, at), (4.75, at), arrowprops=arrow)
            axis.text(5.4, at + 0.08, "yes", ha="center", va="bottom", fontsize="small")
            axis.annotate("", (2.4, at - 0.81), (2.4, at - 0.42), arrowprops=arrow)
            axis.text(2.55, at - 0.61, "no", va="center", fontsize="small")
            at -= 1.25
        axis.text(2.4, at, last, ha="center", va="center", bbox=default, fontsize=10.5, family="monospace")
        at -= 1.15
    axis.set(xlim=(-0.4, 9.9), ylim=(at + 0.4, 0.5))
    axis.set_axis_off()
    figure.savefig(HERE / "choosing.png", dpi=110)


def streaming():
    """Twelve days, each predicted before it is absorbed; q after every day beside the fit to all days."""
    x, y = regression(np.random.default_rng(3), 12 * 20)
    day = np.repeat(np.arange(12), 20)
    pvi = PVI(Partition(model, "rows", [0] * 20), AutoMultivariateNormal(model), schedule=Streaming())
    state, scores = None, []
    laws = []
    for label in range(12):
        rows = jnp.asarray(x[day == label]), jnp.asarray(y[day == label])
        if state is None:
            state = pvi.run(jax.random.key(0), 1, *rows, progress_bar=False).state
        else:
            score = pvi.prequential(state, *rows, rng_key=jax.random.key(label))
            scores.append(float(score.total) / 20)
            state = pvi.add_group(state, label, *rows)
        laws.append(pvi.posterior(state)["w"])
    batch = PVI(Partition(model, "rows", day), AutoMultivariateNormal(model))
    whole = batch.run(jax.random.key(0), 30, jnp.asarray(x), jnp.asarray(y), tol=1e-4, progress_bar=False)
    exact = batch.posterior(whole.state)["w"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    means, sds = (np.array([f(law) for law in laws]) for f in (lambda q: q.mean, lambda q: np.sqrt(q.variance)))
    days = np.arange(1, 13)
    for i, color in enumerate(("C0", "C1")):
        left.fill_between(
            days, means[:, i] - 2 * sds[:, i], means[:, i] + 2 * sds[:, i], color=color, alpha=0.2, linewidth=0
        )
        left.plot(days, means[:, i], "o-", color=color, markersize=3, label=f"coefficient {i + 1}, two sds")
        for end in (-2, 2):
            value = float(exact.mean[i] + end * np.sqrt(exact.variance[i]))
            label = "all days together" if i == 0 and end == 2 else None
            left.plot([11.6, 12.6], [value, value], color="black", linestyle=":", label=label)
    left.set(xlabel="days absorbed", ylabel="coefficient")
    left.legend(fontsize="small")
    right.plot(days[1:], scores, "o", color="C2", label="the day, before it was seen")
    running = np.cumsum(scores) / np.arange(1, 12)
    right.plot(days[1:], running, color="C2", label="mean so far")
    right.axhline(np.log(0.5), color="0.6", linewidth=0.8, label="a coin")
    right.set(xlabel="day", ylabel="log score (nats a row)")
    right.legend(fontsize="small")
    figure.savefig(HERE / "streaming.png", dpi=100)


def forgetting():
    """One coefficient with a clinic, without it, without it and refitted, and never having seen it."""
    rng = np.random.default_rng(4)
    x, y = regression(rng, 150)
    clinic = rng.choice(["north", "south", "west"], size=150)
    odd = clinic == "south"
    y = np.where(odd & (rng.random(150) < 0.6), x[:, 0] < 0, y).astype(int)
    data = jnp.asarray(x), jnp.asarray(y)
    pvi = PVI(Partition(model, "rows", clinic), AutoMultivariateNormal(model))
    state = pvi.run(jax.random.key(0), 40, *data, tol=1e-6, progress_bar=False).state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forgot = pvi.forget_group(state, "south")
    rest = (clinic[~odd], data[0][~odd], data[1][~odd])
    again = pvi.revisit(forgot, *rest, num_steps=40, tol=1e-6)
    never = PVI(Partition(model, "rows", rest[0]), AutoMultivariateNormal(model))
    refit = never.run(jax.random.key(0), 40, *rest[1:], tol=1e-6, progress_bar=False).state
    curves = {
        "with the south": (pvi, state, {"color": "C3"}),
        "the south forgotten": (pvi, forgot, {"color": "C0", "linestyle": "--"}),
        "and the rest revisited": (pvi, again, {"color": "C0"}),
        "never saw the south": (never, refit, {"color": "black", "linestyle": ":", "linewidth": 2.5}),
    }
    grid = np.linspace(-0.6, 2.4, 400)
    figure, axis = plt.subplots(figsize=(7, 3.1), layout="constrained")
    for name, (fit, held, style) in curves.items():
        law = fit.posterior(held)["w"]
        mean, sd = float(law.mean[0]), float(np.sqrt(law.variance[0]))
        axis.plot(grid, np.exp(-0.5 * ((grid - mean) / sd) ** 2) / sd, label=name, **style)
    axis.set(xlabel="first coefficient", yticks=[], ylabel="density")
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(HERE / "forgetting.png", dpi=110)


def server():
    """What stays with a worker, and what travels."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    box = {"boxstyle": "round,pad=0.5", "edgecolor": "0.3"}
    sums = "server\n" + r"$\eta_q = \eta_0 + \sum_m \eta_m$"
    axis.text(0.5, 0.86, sums, ha="center", va="center", bbox=box | {"facecolor": "#cfe2f3"})
    for i, at in enumerate((0.14, 0.5, 0.86), 1):
        words = f"worker {i}\nits rows, " + rf"$\eta_{i}$, $\theta'_{i}$"
        axis.text(at, 0.13, words, ha="center", va="center", bbox=box | {"facecolor": "0.95"})
        top = 0.5 + 0.3 * (at - 0.5)
        axis.annotate("", (at - 0.02, 0.27), (top - 0.02, 0.73), arrowprops={"arrowstyle": "->", "color": "C0"})
        axis.annotate("", (top + 0.02, 0.73), (at + 0.02, 0.27), arrowprops={"arrowstyle": "->", "color": "C1"})
    axis.text(0.01, 0.62, r"the sum $\eta_q$, down", color="C0", fontsize="medium")
    axis.text(0.99, 0.62, r"a site $\eta_m$, up", color="C1", ha="right", fontsize="medium")
    axis.set(xlim=(-0.02, 1.02), ylim=(0, 1))
    axis.set_axis_off()
    figure.savefig(HERE / "server.png", dpi=110)


def graphs():
    """The same six groups with a server, and as agents on a ring and on a chain."""
    angle = np.pi / 2 + 2 * np.pi * np.arange(6) / 6
    round_table = np.stack([np.cos(angle), np.sin(angle)], 1)
    figure, panels = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained")
    ring = [(i, (i + 1) % 6) for i in range(6)]
    for axis, (title, links) in zip(
        panels, {"a server": [], "a ring": ring, "a chain": ring[:-1]}.items(), strict=True
    ):
        for a, b in links:
            axis.plot(*round_table[[a, b]].T, color="0.6", zorder=1)
        if not links:
            for place in round_table:
                axis.plot([0, place[0]], [0, place[1]], color="0.6", zorder=1)
            axis.scatter(0, 0, s=480, marker="s", color="C0", zorder=2)
            axis.annotate("q", (0, 0), ha="center", va="center", color="white", fontsize="large")
        for i, place in enumerate(round_table):
            axis.scatter(*place, s=420, color="0.3" if not links else "C2", zorder=2)
            axis.annotate(
                f"$t_{i + 1}$" if not links else f"$q_{i + 1}$", place, ha="center", va="center", color="white"
            )
        axis.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
        axis.set_title(title)
        axis.set_axis_off()
    figure.savefig(HERE / "graphs.png", dpi=100)


def thumbnails():
    """Small copies of one picture of every notebook."""
    executed = HERE.parent / "_build" / "html" / "notebooks"
    for name, which in SHOWN.items():
        cells = json.loads((executed / f"{name}.ipynb").read_text())["cells"]
        outputs = [o.get("data", {}) for cell in cells for o in cell.get("outputs", ())]
        pictures = [data["image/png"] for data in outputs if "image/png" in data]
        picture = Image.open(io.BytesIO(base64.b64decode(pictures[which]))).convert("RGB")
        picture.thumbnail(SIZE, Image.Resampling.LANCZOS)
        card = Image.new("RGB", SIZE, "white")
        card.paste(picture, ((SIZE[0] - picture.width) // 2, (SIZE[1] - picture.height) // 2))
        card.quantize(64).save(HERE / f"{name}.png", optimize=True)


DRAWN = (partitioned, benchmark, networks, plots, chunks, choosing, streaming, forgetting, server, graphs, thumbnails)

if __name__ == "__main__":
    matplotlib.use("Agg")
    everything = {f.__name__: f for f in DRAWN}
    for name in sys.argv[1:] or everything:
        everything[name]()
