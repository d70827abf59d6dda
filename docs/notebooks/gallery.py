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
# # Gallery: four regressions with `SVI` swapped for `PVI`
#
# **What changes in a program that NumPyro's users have already?**
#
# Models after NumPyro's own examples, each fitted twice with the same guide: by `SVI`, as its author would, and by
# `PVI`. What changes is the two lines that make and run the fit; the model, the guide and everything afterwards stay.
# Data are simulated with the seeds shown. Two more pages do the same: {doc}`gallery_pooling` and
# {doc}`gallery_latents`. All of it runs while these pages are built.
#
# Below every pair of fits stand the ELBO of both posteriors, estimated from the same number of draws (with its standard
# error), and the largest difference between their means in posterior sds.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.util import potential_energy
from numpyro.optim import Adam

from numpyro_pvi import PVI, Partition


# %% tags=["hide-input"]
def elbos(model, guide, fits, args, num_draws=4000):
    """ELBO of every fit with this full-covariance guide, and its standard error, in nats, by the same draws."""

    def log_ratio(loc, root, eps):  # log p(y, theta) - log q(theta), less the constants
        return -potential_energy(model, args, {}, guide._unpack_latent(loc + root @ eps)) + eps @ eps / 2

    draws = random.normal(random.key(9), (num_draws, len(fits[0].params["auto_loc"])))
    ratios, found = jax.jit(jax.vmap(log_ratio, in_axes=(None, None, 0))), []
    for fit in fits:
        loc, root = fit.params["auto_loc"], fit.params["auto_scale_tril"]
        values = ratios(loc, root, draws) + jnp.log(jnp.diagonal(root)).sum() + len(loc) / 2 * jnp.log(2 * jnp.pi)
        found.append((float(values.mean()), float(values.std() / num_draws**0.5)))
    return found


table = {}  # by model: ELBO by PVI less that by SVI, its standard error, and the largest difference of the means


def compare(model, args, by_svi, svi_guide, by_pvi, pvi_guide):
    """Print both ELBOs and how far apart the posterior means are."""
    found = elbos(model, svi_guide, (by_svi, by_pvi), args)
    counts = f"{len(by_svi.losses)} steps", f"{len(by_pvi.losses)} rounds"
    for word, (value, error), count in zip(("SVI", "PVI"), found, counts, strict=True):
        print(f"{word}: ELBO {value:9.3f} ({error:.3f}) {count}")
    loc = {
        w: g._unpack_latent(r.params["auto_loc"]) for w, g, r in (("s", svi_guide, by_svi), ("p", pvi_guide, by_pvi))
    }
    root = by_pvi.params["auto_scale_tril"]
    sd = pvi_guide._unpack_latent(jnp.sqrt(jnp.sum(root**2, axis=1)))
    gap = max(float(jnp.max(jnp.abs(loc["s"][n] - loc["p"][n]) / sd[n])) for n in sd)
    print(f"largest difference of the means: {gap:.2f} posterior sd")
    (before, first), (after, second) = found
    table[model.__name__] = after - before, (first**2 + second**2) ** 0.5, gap


# %% [markdown]
# ## 1. Linear regression
#
# A rate explained by two correlated columns, as in the divorce example of *Statistical Rethinking*; data simulated.
#
# **Groups:** four regions with their states.

# %%
rng = np.random.default_rng(1)
age = rng.normal(size=50)
marriage = -0.7 * age + 0.7 * rng.normal(size=50)
rate = -0.6 * age + 0.8 * rng.normal(size=50)
region = rng.choice(["north", "east", "south", "west"], size=50)


def regression(age, marriage, rate=None):
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    b_marriage = numpyro.sample("b_marriage", dist.Normal(0.0, 0.5))
    b_age = numpyro.sample("b_age", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("states", age.shape[0]):
        numpyro.sample("rate", dist.Normal(a + b_marriage * marriage + b_age * age, sigma), obs=rate)


# %%
svi_guide = AutoMultivariateNormal(regression)
svi = SVI(regression, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 3000, age, marriage, rate, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(regression)
pvi = PVI(Partition(regression, "states", region), pvi_guide)
by_pvi = pvi.run(random.key(0), 20, age, marriage, rate, tol=1e-3, progress_bar=False)
compare(regression, (age, marriage, rate), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# ## 2. Logistic regression
#
# **Groups:** five clinics. With one affine predictor per row, expectations are quadratures and no draw enters the fit.

# %%
rng = np.random.default_rng(2)
X = rng.normal(size=(200, 4))
y = (X @ np.array([1.0, -2.0, 0.5, 0.0]) + rng.logistic(size=200) > 0).astype(int)
clinic = rng.integers(0, 5, 200)


def logistic(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


# %%
svi_guide = AutoMultivariateNormal(logistic)
svi = SVI(logistic, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 3000, X, y, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(logistic)
pvi = PVI(Partition(logistic, "patients", clinic), pvi_guide)
by_pvi = pvi.run(random.key(0), 20, X, y, tol=1e-3, progress_bar=False)
compare(logistic, (X, y), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# ## 3. Counts
#
# Poisson regression with a known exposure.
#
# **Groups:** five observers.

# %%
rng = np.random.default_rng(3)
Z = rng.normal(size=(150, 3))
exposure = rng.uniform(0.5, 2.0, size=150)
count = rng.poisson(exposure * np.exp(1.0 + Z @ np.array([0.5, -0.3, 0.0])))
observer = rng.integers(0, 5, 150)


def counts(Z, exposure, count=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 0.5).expand([Z.shape[1]]).to_event(1))
    with numpyro.plate("visits", Z.shape[0]):
        numpyro.sample("count", dist.Poisson(exposure * jnp.exp(intercept + Z @ w)), obs=count)


# %%
svi_guide = AutoMultivariateNormal(counts)
svi = SVI(counts, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 3000, Z, exposure, count, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(counts)
pvi = PVI(Partition(counts, "visits", observer), pvi_guide)
by_pvi = pvi.run(random.key(0), 30, Z, exposure, count, tol=1e-3, progress_bar=False)
compare(counts, (Z, exposure, count), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# ## 4. Robust regression
#
# Student-t noise with unknown scale: two affine predictors per row, the mean and the log of the scale.
#
# **Groups:** four instruments.

# %%
rng = np.random.default_rng(5)
V = rng.normal(size=(100, 3))
u = V @ np.array([1.0, 0.0, -1.0]) + 0.5 * rng.standard_t(2.0, size=100)
instrument = rng.integers(0, 4, 100)


def robust(V, u=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([V.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("readings", V.shape[0]):
        numpyro.sample("u", dist.StudentT(3.0, intercept + V @ w, sigma), obs=u)


# %%
svi_guide = AutoMultivariateNormal(robust)
svi = SVI(robust, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 3000, V, u, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(robust)
pvi = PVI(Partition(robust, "readings", instrument), pvi_guide)
by_pvi = pvi.run(random.key(0), 30, V, u, tol=1e-3, progress_bar=False)
compare(robust, (V, u), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# ## What to take from this

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for i, (gain, error, gap) in enumerate(table.values()):
    left.errorbar(gain, i, xerr=2 * error, fmt="o", color="C0")
    right.plot(gap, i, "o", color="C1")
left.axvline(0.0, color="0.5", linewidth=0.8)
left.set_yticks(range(len(table)), list(table))
left.invert_yaxis()
left.set_xlabel("ELBO by PVI less that by SVI (nats), two standard errors")
_ = right.set(xlabel="largest difference of the means (posterior sds)", xlim=(0, None))

# %% [markdown]
# With affine predictors PVI needs a handful of rounds and ends at the optimum itself, a little above SVI, whose steps
# never stop shaking. The benchmark `python -m benchmarks gallery` measures how long both take on such models.
#
# ## What to try next
#
# - Where expectations are by draws: {doc}`gallery_pooling` and {doc}`gallery_latents`.
# - One of these against the clock: {doc}`svi_to_pvi`.
# - What the groups of a model say: {doc}`hospitals`.
