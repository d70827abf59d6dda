"""Draws the pictures that are kept beside this file: python docs/pictures/draw.py [partitioned benchmark plots thumbnails].

`partitioned` and `plots` are of fits that are made here, `benchmark` of the table in docs/benchmarks.md, and `thumbnails` of the notebooks as the
last `make docs` has executed them.
"""

import base64
import io
import json
import pathlib
import re
import sys

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
from numpyro_pvi.schedules import Decentralized, Synchronous

HERE = pathlib.Path(__file__).parent
# Which picture of each notebook stands for it.
SHOWN = {
    "agents": 2,
    "arrivals": 0,
    "bayesian_network": 0,
    "did_it_work": 3,
    "families": 0,
    "gallery": 0,
    "gaussian_processes": 0,
    "hierarchies": 0,
    "hospitals": 0,
    "never_meet": 0,
    "svi_to_pvi": 0,
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


if __name__ == "__main__":
    matplotlib.use("Agg")
    everything = {f.__name__: f for f in (partitioned, benchmark, plots, thumbnails)}
    for name in sys.argv[1:] or everything:
        everything[name]()
