# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # No server
#
# **Nine stations can talk to their neighbours only, and links fail. Do they end up with the same posterior?**
#
# Under `Decentralized` every group is an *agent* on a graph. It knows its own rows, refines its own site, and
# exchanges natural parameters with its neighbours. There is no server, and no agent ever sees another's rows. Each of
# the nine below sees a narrow slice of the first covariate, so that alone none of them could learn its coefficient
# well.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Decentralized, Synchronous

# %%
rng = np.random.default_rng(0)
X = rng.normal(size=(900, 3))
y = (X @ np.array([1.0, -2.0, 0.5]) + rng.logistic(size=900) > 0).astype(int)
station = np.argsort(np.argsort(X[:, 0])) // 100  # every station has 100 rows and one slice of the first covariate
places = np.array([[0, 0], [1, 0.3], [2, 0], [0.3, 1], [1.2, 1.2], [2.1, 1], [0, 2], [1, 2.2], [2.2, 2]])
links = [(0, 1), (1, 2), (0, 3), (1, 4), (3, 4), (4, 5), (2, 5), (3, 6), (6, 7), (4, 7), (7, 8), (5, 8)]


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def fit(schedule, rounds, watch=None):
    pvi = PVI(Partition(model, "data", station), AutoMultivariateNormal(model), schedule=schedule)
    return pvi, pvi.run(jax.random.key(0), rounds, X, y, progress_bar=False, callback=watch)


held = []


def watch(rounds, state, info):
    """Mean and sd of the first coefficient as each agent holds it."""
    laws = [info.agents[agent].to_distribution() for agent in range(9)]
    held.append([(float(law.mean[0]), float(law.variance[0]) ** 0.5) for law in laws])


server, central = fit(Synchronous(), 15)
agents, result = fit(Decentralized(links, steps_per_round=2), 15, watch)

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(1, 1.5), layout="constrained")
for a, b in links:
    left.plot(*places[[a, b]].T, color="0.7", zorder=1)
for agent, place in enumerate(places):
    left.scatter(*place, s=320, color=plt.get_cmap("viridis")(agent / 8), zorder=2)
    left.annotate(str(agent), place, ha="center", va="center", color="white" if agent < 6 else "black")
left.set_axis_off()
left.set_aspect("equal")
left.margins(0.15)
path = np.array(held)
law = server.posterior(central.state)["w"]
for end in (-2, 2):
    label = "with a server, two sds" if end == 2 else None
    right.axhline(law.mean[0] + end * np.sqrt(law.variance[0]), color="black", linestyle=":", label=label)
for agent in range(9):
    color = plt.get_cmap("viridis")(agent / 8)
    rounds, (middle, width) = np.arange(1, len(path) + 1), path[:, agent].T
    right.plot(rounds, middle, color=color, linewidth=1.2)
    right.fill_between(rounds, middle - 2 * width, middle + 2 * width, color=color, alpha=0.08)
right.set(xlabel="rounds", ylabel="first coefficient, as each agent holds it", xlim=(1, 15))
_ = right.legend()

# %% [markdown]
# Left, who talks to whom. Right, what each agent holds, round by round, with two standard deviations. At the start
# they differ; at the end all nine hold the posterior that a server would have found from all the rows (dotted).
#
# ## A link that fails
#
# Weights are doubly stochastic, and where a link fails both ends keep their share. So the network's mean stays right
# whatever is lost; agreement takes more rounds.

# %%
schedules = {
    "all links": Decentralized(links, steps_per_round=2),
    "30 % of messages fail": Decentralized(links, steps_per_round=2, link_failure=0.3),
    "agents away half of the time": Decentralized(links, steps_per_round=2, availability=0.5),
    "a chain": Decentralized([(i, i + 1) for i in range(8)], steps_per_round=2),
}
runs = {name: fit(schedule, 40) for name, schedule in schedules.items()}
best = float(np.max(central.trace.elbo))
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for name, (_, run) in runs.items():
    trace = run.trace
    left.plot(trace.rounds, np.where(trace.consensus > 0, trace.consensus, np.nan), label=name)
    right.plot(trace.messages.sum(1), np.where(best - trace.elbo > 5e-4, best - trace.elbo, np.nan))
left.set(xlabel="rounds", ylabel="largest distance from the mean (sds)", yscale="log")
left.legend(fontsize="small")
_ = right.set(xlabel="messages", ylabel="ELBO of the mean below the server's (nats)", yscale="log")

# %% [markdown]
# A chain is the hardest graph of all: news from one end to the other passes through everybody. Without
# `steps_per_round` the schedule gossips after every round as long as disagreement asks for it.
#
# ## A map from passing by
#
# With `mixing="consensus"` agents mix their whole posteriors and take every row *once*, as a vehicle does that passes
# by and keeps nothing. Four vehicles drive through an area with two buildings (simulated), each in a quarter of its
# own. What they measure is free or occupied; the latents are weights of 14 x 14 bumps. Below is the map that *one* of
# them holds as time passes.


# %% tags=["hide-input"]
def occupied(at):
    """Two buildings in the unit square."""
    one = (np.abs(at[:, 0] - 0.35) < 0.15) & (np.abs(at[:, 1] - 0.65) < 0.12)
    return one | (np.hypot(at[:, 0] - 0.7, at[:, 1] - 0.3) < 0.15)


steps = 60
corner = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [0.5, 0.5]])
angle = np.linspace(0, 4 * np.pi, steps)
spiral = 0.25 + np.linspace(0.02, 0.24, steps)[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
seen = corner[:, None, None] + spiral[None, :, None] + 0.06 * rng.normal(size=(4, steps, 5, 2))
vehicle = np.repeat(np.arange(4), steps * 5)
points = seen.reshape(-1, 2)
knots = np.stack(np.meshgrid(*[np.linspace(0, 1, 14)] * 2), -1).reshape(-1, 2)


def bumps(at):
    return np.exp(-0.5 * ((at[:, None] - knots) ** 2).sum(-1) / 0.06**2)


# %%
def world(features, occupied=None):
    weight = numpyro.sample("weight", dist.Normal(0.0, 3.0).expand([features.shape[1]]).to_event(1))
    with numpyro.plate("returns", features.shape[0]):
        numpyro.sample("occupied", dist.Bernoulli(logits=features @ weight), obs=occupied)


ring = [(0, 1), (1, 3), (3, 2), (2, 0)]
schedule = Decentralized(ring, mixing="consensus", batch_size=5, exchanges_per_round=1)
drive = PVI(Partition(world, "returns", vehicle), AutoDiagonalNormal(world), schedule=schedule)
rows = jnp.asarray(bumps(points)), jnp.asarray(occupied(points).astype(int))
kept = {}


def photograph(rounds, state, info):
    if rounds in (6, 20, 60):
        kept[rounds] = drive.posterior(state, agent=0)["weight"]


_ = drive.run(jax.random.key(0), 60, *rows, progress_bar=False, callback=photograph)

# %% tags=["hide-input"]
side = np.linspace(0, 1, 60)
grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
shape = bumps(grid)
figure, panels = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
panels[0].contourf(side, side, occupied(grid).reshape(60, 60), levels=[0.5, 1], colors=["0.3"])
for v in range(4):
    panels[0].plot(*(corner[v] + spiral).T, linewidth=1, color="C3" if v == 0 else "0.6")
panels[0].set_title("the area; one vehicle in red")
for panel, (rounds, law) in zip(panels[1:], kept.items(), strict=True):
    logit = shape @ np.asarray(law.mean)
    variance = shape**2 @ np.asarray(law.variance)
    probability = 1 / (1 + np.exp(-logit / np.sqrt(1 + np.pi * variance / 8)))
    image = panel.imshow(
        probability.reshape(60, 60), origin="lower", extent=(0, 1, 0, 1), vmin=0, vmax=1, cmap="RdBu_r"
    )
    panel.set_title(f"its map after {rounds} rounds")
for panel in panels:
    panel.set(xticks=[], yticks=[], aspect="equal", xlim=(0, 1), ylim=(0, 1))
_ = figure.colorbar(image, ax=panels, label="probability of being occupied", shrink=0.8)

# %% [markdown]
# The red vehicle never leaves its quarter, and knows the other three from its neighbours. White is where nobody has
# been.
#
# ## What to try next
#
# - The two ways of mixing, and what each needs: {doc}`../no_server`.
# - A server that does not wait: {doc}`never_meet`.
# - Data as a stream at one place: {doc}`arrivals`.
