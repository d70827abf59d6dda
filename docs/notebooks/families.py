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
# # Families: sites in the latents' own supports
#
# **What if a latent is a covariance, a distribution over words, or a rate, and a Gaussian is the wrong shape for
# it?**
#
# `AutoExponentialFamily` gives every latent the family of its prior: Wishart for precisions, Dirichlet for weights, gamma
# for rates. Sites then live in those families, and where the model is conjugate they are found in closed form: the
# rounds are variational message passing. Two models, both simulated; first a mixture of Gaussians, split over three
# laboratories. A third one, of words, is {doc}`topics`.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.patches import Ellipse
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import stats

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, export
from numpyro_pvi.families import CategoricalFamily

rng = np.random.default_rng(0)
centres = np.array([[0.0, 0.0], [4.0, 1.0], [-1.0, 5.0]])
roots = np.array([[[1.0, 0.0], [0.8, 0.4]], [[0.5, 0.0], [0.0, 1.2]], [[0.7, 0.0], [-0.5, 0.5]]])
true_component = rng.choice(3, 300, p=[0.5, 0.3, 0.2])
points = centres[true_component] + np.einsum("nij,nj->ni", roots[true_component], rng.normal(size=(300, 2)))
laboratory = rng.choice(["A", "B", "C"], size=300, p=[0.6, 0.3, 0.1])


# %%
def mixture(x):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("components", 3):
        mean = numpyro.sample("mean", dist.MultivariateNormal(jnp.zeros(2), 25.0 * jnp.eye(2)))
        precision = numpyro.sample("precision", dist.Wishart(4.0, jnp.eye(2)))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("x", dist.MultivariateNormal(mean[z], precision_matrix=precision[z]), obs=x)


guide = AutoExponentialFamily(mixture, families={"z": CategoricalFamily(3)})
pvi = PVI(Partition(mixture, "data", laboratory), guide)
result = pvi.run(jax.random.key(0), 200, jnp.asarray(points), tol=1e-3, progress_bar=False)
found = pvi.posterior(result.state)

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(7, 5.2), layout="constrained")
likely = np.asarray(found["z"].probs)
for label, marker in zip("ABC", "o^s", strict=True):
    rows = laboratory == label
    colors = np.array([[0.12, 0.47, 0.71], [1.0, 0.5, 0.05], [0.17, 0.63, 0.17]])
    axes.scatter(*points[rows].T, c=np.clip(likely[rows] @ colors, 0, 1), marker=marker, s=16)
    axes.scatter([], [], c="0.5", marker=marker, s=16, label=f"laboratory {label}")
draws = {n: np.asarray(found[n].sample(jax.random.key(1), (20,))) for n in ("mean", "precision")}


def outline(mean, precision, **style):
    """The ellipse of two standard deviations."""
    values, vectors = np.linalg.eigh(np.linalg.inv(precision))
    turn = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    axes.add_patch(Ellipse(mean, 4 * values[1] ** 0.5, 4 * values[0] ** 0.5, angle=turn, fill=False, **style))


for k in range(3):
    for s in range(20):
        outline(draws["mean"][s, k], draws["precision"][s, k], color=colors[k], alpha=0.25, linewidth=0.6)
    outline(np.asarray(found["mean"].mean)[k], np.asarray(found["precision"].mean)[k], color="black", linewidth=1.4)
axes.set(aspect="equal")
_ = axes.legend(fontsize="small")

# %% [markdown]
# Every point is coloured by its probabilities of belonging to each component. Black ellipses are two standard
# deviations at the posterior means, thin ones are twenty draws from $q$: how sure the fit is of the shapes
# themselves, which is a posterior over matrices.

# %%
print(result.message)
print(pvi.info(result.state))

# %% [markdown]
# The table says what was found: the likelihood is conjugate in each latent given the others, so every message is in
# closed form and nothing is sampled. What does each laboratory know about the weights?

# %%
_ = export.plot_forest(pvi, result.state, "weights")

# %% [markdown]
# These are intervals of Dirichlet distributions: a weight stays between 0 and 1.
#
# ## Rates
#
# A rate with few events is skewed. One event in three days, with a vague gamma prior, is conjugate: $q$ is the exact
# posterior, where a Gaussian of the log rate is not.


# %%
def rates(events):
    rate = numpyro.sample("rate", dist.Gamma(0.5, 0.1))
    with numpyro.plate("days", events.shape[0]):
        numpyro.sample("events", dist.Poisson(rate), obs=events)


events = jnp.array([0, 1, 0])
grid = np.linspace(1e-3, 3.5, 400)
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, own in (("gamma", AutoExponentialFamily(rates)), ("Gaussian of the log", AutoMultivariateNormal(rates))):
    fit = PVI(Partition(rates, "days", 3), own)
    law = fit.posterior(fit.run(jax.random.key(0), 30, events, progress_bar=False).state)["rate"]
    axes.plot(grid, np.exp(law.log_prob(grid)), label=name)
exact = stats.gamma(0.5 + 1, scale=1 / (0.1 + 3))
axes.plot(grid, exact.pdf(grid), ":", color="black", linewidth=2, label="exact")
axes.set(xlabel="rate", yticks=[])
_ = axes.legend()

# %% [markdown]
# ## What to try next
#
# - Words, documents and topics: {doc}`topics`.
# - Every family, and what happens where a model is *not* conjugate: {doc}`../families`.
# - Scripts for probabilistic principal components, matrix factorisation and more are in the repository's `examples`.
# - How to choose a guide: {doc}`../choosing`.
