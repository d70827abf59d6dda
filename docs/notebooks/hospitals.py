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
# # Five hospitals, one regression
#
# **What does each hospital know, and what do all of them know together?**
#
# A Bayesian logistic regression on the breast-cancer data that ship with scikit-learn: 569 tumours, 30 measurements,
# benign or malignant. We cut the rows into five groups of very different size and call them hospitals; **they are
# simulated**, the data come from one clinic. One fit then answers four questions. What does each hospital say alone,
# and what do the others say without it? How many rounds does it take to reach the posterior of the pooled data? What
# does each hospital contribute? And are the probabilities that come out calibrated?
#
# `examples/hospitals.py` is the script version, with a command line for a table of one's own.

# %%
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import load_breast_cancer

from numpyro_pvi import PVI, Partition, export

data = load_breast_cancer()
X = jnp.asarray((data.data - data.data.mean(0)) / data.data.std(0))
y = jnp.asarray(1 - data.target)  # 1 is malignant

rng = np.random.default_rng(0)
shares = {"Aster": 0.50, "Birch": 0.25, "Cedar": 0.15, "Dahlia": 0.06, "Elm": 0.04}
hospital = rng.choice(list(shares), size=len(y), p=list(shares.values()))


def model(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    coefficients = numpyro.sample("coefficients", dist.Normal(0.0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ coefficients), obs=y)


guide = AutoMultivariateNormal(model)
pvi = PVI(Partition(model, "patients", hospital), guide)
result = pvi.run(jax.random.key(0), 30, X, y, tol=1e-3, progress_bar=False)

# %% [markdown]
# That is the whole fit. Below are three of the thirty coefficients, those furthest from zero in posterior standard
# deviations. Black is $q$, the posterior given everybody. For every hospital there are two more intervals: the
# *cavity* (open circle), which is what all the others say without it, and the hospital *alone* (filled, dashed),
# which is the prior times its own site.

# %%
q = pvi.posterior(result.state)["coefficients"]
strongest = np.argsort(-np.abs(np.asarray(q.mean)) / np.sqrt(np.asarray(q.variance)))[:3]
names = {"coefficients": list(data.feature_names)}
axes = export.plot_forest(pvi, result.state, {"coefficients": strongest}, names=names)
axes.axvline(0.0, color="0.5", linewidth=0.8, zorder=0)
_ = axes.set_xlabel("coefficient of the standardised column: 90 % interval and median")

# %% [markdown]
# Without Aster, which has half of the rows, everything gets wider. Without Elm hardly anything changes: alone, it
# says little more than the prior. Dahlia disagrees with the others about texture, but it has 34 rows, and is
# outvoted.
#
# ## The data, and what was found
#
# Columns are standardised, and rows are dealt out at random in unequal shares. The smallest hospital has fewer rows
# than there are coefficients: alone it could not fit this model without a prior.

# %%
for label in shares:
    rows = hospital == label
    print(f"{label:7s} {rows.sum():4d} rows, {int(y[rows].sum()):4d} malignant")
print(pvi.partition.plan(X, y))

# %% [markdown]
# The plan found that the likelihood depends on the latents through one affine predictor per row. Expectations are
# then one-dimensional quadratures, and no random draw enters the fit. Every round updates all five sites from the
# same $q$.

# %%
print(result.message)
print("rounds:", len(result.losses), " ELBO:", -float(result.losses[-1]))
print(pvi.info(result.state))
_ = export.plot_rounds(result)

# %% [markdown]
# ## The pooled posterior, by NUTS
#
# NUTS sees all rows at once and makes no Gaussian approximation.

# %%
mcmc = MCMC(
    NUTS(model, dense_mass=True),
    num_warmup=250,
    num_samples=400,
    num_chains=2,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(1), X, y)
draws = mcmc.get_samples()
nuts = np.concatenate([np.asarray(draws["intercept"])[:, None], np.asarray(draws["coefficients"])], axis=1)


def moments(fitted_guide, params):
    """Means and sds under a fitted Gaussian guide, the intercept first."""
    found = fitted_guide.quantiles(params, [0.1587, 0.5, 0.8413])  # one sd either side of the middle
    low, middle, high = np.concatenate([found["intercept"][:, None], found["coefficients"]], axis=1)
    return middle, (high - low) / 2


mean, sd = moments(guide, result.params)
error = np.abs(mean - nuts.mean(0)) / nuts.std(0)
ratio = sd / nuts.std(0)
print(f"error of the mean, in NUTS sd: median {np.median(error):.3f}, largest {error.max():.3f}")
print(f"sd relative to NUTS: from {ratio.min():.2f} to {ratio.max():.2f}")

# %% [markdown]
# For the smallest hospital, a fit of its own, to its rows only:

# %%
elm = hospital == "Elm"
elm_guide = AutoMultivariateNormal(model)
elm_pvi = PVI(Partition(model, "patients", ["Elm"] * int(elm.sum())), elm_guide)
elm_fit = elm_pvi.run(jax.random.key(0), 30, X[elm], y[elm], tol=1e-3, progress_bar=False)

figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
fits = {"NUTS, pooled": (nuts.mean(0), nuts.std(0)), "PVI": (mean, sd)}
fits["Elm's rows only"] = moments(elm_guide, elm_fit.params)
for i, (label, (centre, width)) in enumerate(fits.items()):
    heights = np.arange(len(strongest)) + 0.2 * (i - 1)
    axes.errorbar(centre[1 + strongest], heights, xerr=1.645 * width[1 + strongest], fmt="o", markersize=4, label=label)
axes.set_yticks(np.arange(len(strongest)), data.feature_names[strongest])
axes.invert_yaxis()
axes.axvline(0.0, color="0.5", linewidth=0.8)
axes.set_xlabel("coefficient of the standardised column: 90 % interval and mean")
_ = figure.legend(loc="outside upper center", ncols=3)

# %% [markdown]
# PVI lies on the pooled posterior, and Elm's rows by themselves leave nearly everything open. ("Elm alone" in the
# first picture is not quite this fit: a site stands in for its factor where $q$ is, not where the prior is.) What
# remains is not the partition's doing. It is the Gaussian approximation of a skewed posterior, together with the
# Monte Carlo error of NUTS; a variational fit to the pooled data with the same guide ends at the same $q$.
#
# ## What each hospital contributes
#
# Taking a site out of $q$ leaves the cavity. How far the two are apart, in posterior standard deviations, is that
# hospital's *influence* on each coefficient.

# %%
axes = export.plot_influence(
    pvi, result.state, ["intercept", "coefficients"], names={"coefficients": list(data.feature_names)}, most=31
)
axes.figure.set_size_inches(11, 3.6)

# %% [markdown]
# ## Are the predictions calibrated?
#
# The cavity of a hospital is a posterior that has not taken in its rows. So every tumour can be predicted by the
# *other* hospitals, without a single new fit. If the predictions are calibrated, then among tumours called malignant
# with probability .8 about eight in ten are.

# %%
order = next(key for key in pvi.posterior(result.state, joint=True) if isinstance(key, tuple))
design = {"intercept": np.ones((len(y), 1)), "coefficients": np.asarray(X)}
design = np.concatenate([design[name] for name in order], axis=1)


def probabilities(gaussian, rows):
    """Predictive probability of malignancy: the logit is Gaussian, the average over it by Gauss-Hermite."""
    location = rows @ np.asarray(gaussian.mean)
    width = np.sqrt(np.einsum("nd,de,ne->n", rows, np.asarray(gaussian.covariance_matrix), rows))
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    return (1 / (1 + np.exp(-(location[:, None] + width[:, None] * nodes)))) @ weights / weights.sum()


by_others = np.zeros(len(y))
for label in shares:
    rows = hospital == label
    by_others[rows] = probabilities(pvi.cavity(result.state, label).to_distribution(), design[rows])

# %%
edges = np.array([0.0, 0.02, 0.1, 0.3, 0.7, 0.9, 0.98, 1.0])
figure, axes = plt.subplots(figsize=(4.6, 4.4), layout="constrained")
axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
for low, high in itertools.pairwise(edges):
    chosen = (by_others >= low) & (by_others <= high)
    count, hits = chosen.sum(), int(np.asarray(y)[chosen].sum())
    below, above = np.quantile(rng.beta(hits + 0.5, count - hits + 0.5, size=20_000), [0.05, 0.95])  # Jeffreys interval
    at, share = by_others[chosen].mean(), hits / count
    axes.vlines(at, min(below, share), max(above, share), color="C0")
    axes.plot(at, share, "o", color="C0")
    axes.annotate(f"{count}", (at, share), (7, -9 if at < 0.97 else 5), textcoords="offset points", fontsize="small")
axes.set(xlabel="predicted by the other hospitals", ylabel="share that is malignant", aspect="equal")
score = np.where(np.asarray(y) == 1, np.log(by_others), np.log1p(-by_others))
print(
    f"log score {score.mean():.3f} nats a tumour, {np.mean((by_others > 0.5) == np.asarray(y)):.1%} on the right side"
)

# %% [markdown]
# Numbers beside the points count tumours, bars are 90 % intervals for the share.
#
# One thing to keep in mind: the other sites were fitted while this hospital's site was there, so a cavity is not
# quite the posterior of the others. How much does that matter? The worst case is the largest hospital: take it out,
# fit the rest again, and compare.

# %%
rest = hospital != "Aster"
without = PVI(Partition(model, "patients", hospital[rest]), AutoMultivariateNormal(model))
refit = without.run(jax.random.key(0), 30, X[rest], y[rest], tol=1e-3, progress_bar=False)
honest = probabilities(without.posterior(refit.state, joint=True)[order], design[~rest])
gap = np.abs(honest - by_others[~rest])
truth = np.asarray(y)[~rest]
for word, p in (("cavity", by_others[~rest]), ("fitted again", honest)):
    print(f"{word:13s} log score of Aster's tumours {np.where(truth == 1, np.log(p), np.log1p(-p)).mean():.3f}")
print(f"probabilities differ by {np.median(gap):.4f} in the median and by {gap.max():.3f} at most")

# %% [markdown]
# In the median it hardly matters, for single tumours it does. A hospital with half of the rows shapes where everybody
# else's site is fitted; where its leaving matters, fit again ({doc}`../forgetting` does that from the state that is
# there).
#
# ## What to try next
#
# - The same with groups of your own: {doc}`../getting_started` and {doc}`../partitioning`.
# - A new hospital joins, another withdraws its data: {doc}`arrivals`.
# - How to tell that a fit can be trusted: {doc}`did_it_work`.
