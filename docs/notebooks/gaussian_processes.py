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
# # Gaussian processes
#
# **A function is a latent with as many coordinates as rows. Can it be split over groups, and what does one group know
# of it?**
#
# Three surveyors have each been along their own stretch of a road, and asked people a question with yes or no. The
# log odds are a smooth function of the place, with a Gaussian-process prior. Every row sees one coordinate of the
# function only, so its site is two numbers, whatever the number of rows. (Data simulated.)

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import make_moons

from numpyro_pvi import PVI, AutoExponentialFamily, Partition

numpyro.enable_x64()
rng = np.random.default_rng(3)


def kernel(a, b, length, sd=2.0):
    """Squared exponential, Float[N M], of places Float[N D] and Float[M D]."""
    return sd**2 * jnp.exp(-0.5 * jnp.sum((a[:, None] - b) ** 2, axis=-1) / length**2)


# %%
def classify(K, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(K)), covariance_matrix=K))
    with numpyro.plate("rows", len(K)) as row:
        numpyro.sample("y", dist.Bernoulli(logits=f[row]), obs=None if y is None else y[row])


road = np.sort(np.repeat([0, 1, 2], 60) + rng.uniform(0, 1, 180))[:, None]
true = 2.2 * np.sin(3.5 * road[:, 0])
y = rng.binomial(1, 1 / (1 + np.exp(-true)))
surveyor = np.array(["west", "middle", "east"])[np.minimum(road[:, 0].astype(int), 2)]
K = kernel(road, road, 0.3) + 1e-4 * jnp.eye(len(road))

pvi = PVI(Partition(classify, "rows", surveyor), AutoMultivariateNormal(classify))
result = pvi.run(jax.random.key(0), 60, K, jnp.asarray(y), tol=1e-4, progress_bar=False)
print(result.message)


# %% tags=["hide-input"]
def predict(gaussian, K, across, own):
    """Mean and sd of the function at new places, from a Gaussian over its values at the rows."""
    weights = np.linalg.solve(np.asarray(K), np.asarray(across))
    spread = np.asarray(K) - np.asarray(gaussian.covariance_matrix)
    variance = own - np.einsum("nm,nk,km->m", weights, spread, weights)
    return weights.T @ np.asarray(gaussian.mean), np.sqrt(np.maximum(variance, 0))


new = np.linspace(0, 3, 241)[:, None]
across = kernel(road, new, 0.3)
figure, axes = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True, sharey=True, layout="constrained")
panels = {"everybody": pvi.posterior(result.state)["f"]}
panels["without the middle"] = pvi.cavity(result.state, "middle").to_distribution()
for axis, (name, gaussian) in zip(axes, panels.items(), strict=True):
    mean, sd = predict(gaussian, K, across, 4.0)
    for width, alpha in ((2, 0.15), (1, 0.25)):
        axis.fill_between(new[:, 0], mean - width * sd, mean + width * sd, color="C0", alpha=alpha, linewidth=0)
    axis.plot(new, mean, color="C0", label="found, one and two sds")
    axis.plot(road, true, ":", color="black", label="log odds that made the data")
    for label, color in (("west", "C1"), ("middle", "C2"), ("east", "C3")):
        rows = surveyor == label
        if name == "everybody" or label != "middle":
            axis.plot(road[rows], np.where(y[rows] == 1, 5.2, -5.2), "|", color=color, markersize=8)
    axis.set(ylabel=f"log odds, {name}", ylim=(-6, 6))
axes[0].legend(loc="upper right", fontsize="small", ncols=2, bbox_to_anchor=(1.0, 0.93))
_ = axes[1].set_xlabel("place on the road")

# %% [markdown]
# Ticks are answers, coloured by surveyor. Above, what all three know. Below, the *cavity* without the middle one:
# taking that site out leaves the two others untouched, and little more than the prior there. No fit was made for that.

# %%
print(pvi.info(result.state))

# %% [markdown]
# The note says how sites are held: two numbers for each row. A site as a matrix would have 180 x 180.
#
# ## Two dimensions
#
# The same model, with another kernel matrix. The two moons of scikit-learn, dealt out to three groups at random:

# %%
places, label = make_moons(180, noise=0.25, random_state=0)
K2 = kernel(places, places, 0.6) + 1e-4 * jnp.eye(len(places))
flat = PVI(Partition(classify, "rows", 3), AutoMultivariateNormal(classify))
moons = flat.run(jax.random.key(0), 60, K2, jnp.asarray(label), tol=1e-4, progress_bar=False)

# %% tags=["hide-input"]
horizontal, vertical = np.linspace(-2.5, 3.5, 70), np.linspace(-2, 2.5, 60)
grid = np.stack(np.meshgrid(horizontal, vertical), -1).reshape(-1, 2)
mean, sd = predict(flat.posterior(moons.state)["f"], K2, kernel(places, grid, 0.6), 4.0)
nodes, weights = np.polynomial.hermite_e.hermegauss(30)
chance = (1 / (1 + np.exp(-(mean[:, None] + sd[:, None] * nodes)))) @ weights / weights.sum()
figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
for axis, values, cmap, name in (
    (panels[0], chance, "RdBu_r", "probability of red"),
    (panels[1], sd, "Greys", "sd of the log odds"),
):
    shade = axis.contourf(horizontal, vertical, values.reshape(60, 70), 20, cmap=cmap)
    axis.scatter(*places.T, c=np.where(label == 1, "C3", "C0"), s=8, edgecolors="white", linewidths=0.3)
    axis.set_aspect("equal")
    figure.colorbar(shade, ax=axis, label=name, shrink=0.85)

# %% [markdown]
# Away from the data the probability returns to a half, and the standard deviation to that of the prior.
#
# ## A series of counts
#
# A random walk is a Gaussian process whose precision is a band. `AutoExponentialFamily` gives it a family of Gaussian
# Markov chains, so that a round costs as much as a Kalman smoother, and no matrix has an entry for every pair of
# times.

# %%
STEPS = 400


def series(steps, counts=None):
    rate = numpyro.sample("log_rate", dist.GaussianRandomWalk(0.1, steps))
    with numpyro.plate("time", steps):
        numpyro.sample("counts", dist.Poisson(jnp.exp(rate)), obs=counts)


walk = np.cumsum(0.1 * rng.normal(size=STEPS))
counts = rng.poisson(np.exp(walk))
chain = PVI(Partition(series, "time", 1), AutoExponentialFamily(series))
smoothed = chain.run(jax.random.key(0), 50, STEPS, jnp.asarray(counts), tol=1e-4, progress_bar=False)
law = chain.posterior(smoothed.state)["log_rate"]
middle, width = np.asarray(law.mean), np.sqrt(np.asarray(law.variance))
print(
    smoothed.message, f"- the walk lies within two sds at {np.mean(np.abs(walk - middle) < 2 * width):.0%} of the times"
)

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
axes.plot(counts, ".", color="0.75", markersize=3, label="counts")
axes.fill_between(range(STEPS), np.exp(middle - 2 * width), np.exp(middle + 2 * width), alpha=0.3, linewidth=0)
axes.plot(np.exp(middle), label="rate found, two sds")
axes.plot(np.exp(walk), ":", color="black", linewidth=1, label="rate that made the data")
axes.set(xlabel="time", ylim=(0, None))
_ = axes.legend()

# %% [markdown]
# ## What to try next
#
# - When sites are held by rows, and what they cost: {doc}`../choosing`.
# - Families of the latents' own: {doc}`families`.
# - A map by agents without a server, from features: {doc}`agents`.
