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
# A Bayesian logistic regression on the breast-cancer data that ship with scikit-learn: 569 tumours, 30 measurements,
# benign or malignant. We cut the rows into five groups of very different size and call them hospitals; **they are
# simulated**, the data come from one clinic. Then we ask three things. Does a fit that only ever sees one group at a
# time, plus everybody else's site, reach the posterior of the pooled data? How many rounds does that take? And what
# does each hospital contribute?
#
# `examples/hospitals.py` is the script version, with a command line for a table of one's own.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import load_breast_cancer

from numpyro_pvi import PVI, Partition

# %% [markdown]
# ## Data
#
# Columns are standardised, and rows are dealt out at random in unequal shares. The smallest hospital has fewer rows
# than there are coefficients: alone it could not fit this model without a prior.

# %%
data = load_breast_cancer()
X = jnp.asarray((data.data - data.data.mean(0)) / data.data.std(0))
y = jnp.asarray(1 - data.target)  # 1 is malignant
names = ["intercept", *data.feature_names]

rng = np.random.default_rng(0)
shares = {"Aster": 0.50, "Birch": 0.25, "Cedar": 0.15, "Dahlia": 0.06, "Elm": 0.04}
hospital = rng.choice(list(shares), size=len(y), p=list(shares.values()))
for label in shares:
    rows = hospital == label
    print(f"{label:7s} {rows.sum():4d} rows, {int(y[rows].sum()):4d} malignant")


# %% [markdown]
# ## Model
#
# The plate's size follows the argument. That is all a partition needs.


# %%
def model(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    coefficients = numpyro.sample("coefficients", dist.Normal(0.0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ coefficients), obs=y)


partition = Partition(model, "patients", hospital)
print(partition.plan(X, y))

# %% [markdown]
# The plan found that the likelihood depends on the latents through one affine predictor per row. Expectations are then
# one-dimensional quadratures, and no random draw enters the fit.
#
# ## PVI
#
# Every round updates all five sites from the same q.

# %%
guide = AutoMultivariateNormal(model)
pvi = PVI(partition, guide)
result = pvi.run(jax.random.key(0), 30, X, y, tol=1e-3, progress_bar=False)
print(result.message)
print("rounds:", len(result.losses), " ELBO:", -float(result.losses[-1]))
print(pvi.info(result.state))

# %% [markdown]
# ## The pooled posterior, by NUTS
#
# NUTS sees all rows at once and makes no Gaussian approximation.

# %%
mcmc = MCMC(
    NUTS(model, dense_mass=True),
    num_warmup=400,
    num_samples=500,
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
# What remains is not the partition's doing. It is the Gaussian approximation of a skewed posterior, together with the
# Monte Carlo error of NUTS; a variational fit to the pooled data with the same guide ends at the same q.
#
# ## What each hospital contributes
#
# Taking a site out of q leaves the cavity, the posterior of everybody else. The distance between the two is that
# hospital's influence.

# %%
posterior = pvi.posterior(result.state, joint=True)["intercept", "coefficients"]
everything, spread = np.asarray(posterior.mean), np.sqrt(np.asarray(posterior.variance))
for label in pvi.groups:
    cavity = pvi.cavity(result.state, label).to_distribution()
    shift = np.abs(everything - np.asarray(cavity.mean)) / spread
    wider = np.sqrt(np.asarray(cavity.variance)) / spread
    print(f"without {label:7s} means move by up to {shift.max():5.2f} sd, sds grow by up to {wider.max():5.2f}x")

# %% [markdown]
# ## Alone and together
#
# For comparison, the largest and the smallest hospital on their own: the prior times their own rows.

# %%
alone = {}
for label in ("Aster", "Elm"):
    rows = hospital == label
    own_guide = AutoMultivariateNormal(model)
    own = PVI(Partition(model, "patients", [label] * int(rows.sum())), own_guide)
    fit = own.run(jax.random.key(0), 30, X[rows], y[rows], tol=1e-3, progress_bar=False)
    alone[f"{label} alone"] = moments(own_guide, fit.params)

shown = np.argsort(-np.abs(nuts.mean(0) / nuts.std(0)))[:8]
figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
fits = {"NUTS, pooled": (nuts.mean(0), nuts.std(0)), "PVI": (mean, sd), **alone}
for i, (label, (centre, width)) in enumerate(fits.items()):
    style = {"fmt": "o", "markersize": 4, "linewidth": 2} if i < 2 else {"fmt": ".", "linewidth": 0.8, "alpha": 0.7}
    axes.errorbar(
        centre[shown], np.arange(len(shown)) + 0.12 * (i - 1.5), xerr=1.64 * width[shown], label=label, **style
    )
axes.set_yticks(np.arange(len(shown)), [names[i] for i in shown])
axes.invert_yaxis()
axes.axvline(0.0, color="grey", linewidth=0.5)
axes.set_xlabel("coefficient of the standardised column, 90 % interval")
_ = figure.legend(loc="outside upper center", ncols=4)

# %% [markdown]
# PVI lies on the pooled posterior. A hospital alone is wider, and the smallest hardly narrower than the prior.
