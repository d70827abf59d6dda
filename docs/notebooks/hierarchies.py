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
# # Hierarchies: effects that stay with their group
#
# **How much does a small county borrow from the others, if no county ever shows its houses?**
#
# Radon in houses by county is the textbook example of partial pooling. The data here are *simulated* after it: sixty
# counties in six states, from one house to several dozen each; log radon depends on the floor where it was measured,
# on the uranium in the county's soil, and on an effect of the county's own. Each **state** is a group. The effects of
# its counties are *local* latents: they have a posterior, but they never enter a site, and nothing of them leaves the
# state.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.reparam import LocScaleReparam

from numpyro_pvi import PVI, Partition, export
from numpyro_pvi.solvers import PowerEP

rng = np.random.default_rng(4)
COUNTIES = 60
state_of_county = np.repeat(["A", "B", "C", "D", "E", "F"], 10)
houses = rng.geometric(0.09, size=COUNTIES)
uranium = rng.normal(size=COUNTIES)
true_effect = 1.3 + 0.6 * uranium + 0.35 * rng.normal(size=COUNTIES)
county = np.repeat(np.arange(COUNTIES), houses)
floor = (rng.random(len(county)) < 0.2).astype(float)
radon = true_effect[county] - 0.7 * floor + 0.75 * rng.normal(size=len(county))
print(f"{len(county)} houses, {houses.min()} to {houses.max()} in a county")


# %%
def model(county, floor, uranium, radon=None):
    base = numpyro.sample("base", dist.Normal(0.0, 2.0))
    by_uranium = numpyro.sample("by_uranium", dist.Normal(0.0, 1.0))
    by_floor = numpyro.sample("by_floor", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))  # spread of the counties
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))  # spread of the houses
    with numpyro.plate("counties", uranium.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(base + by_uranium * uranium, tau))
    with numpyro.plate("houses", county.shape[0]):
        numpyro.sample("radon", dist.Normal(effect[county] + by_floor * floor, sigma), obs=radon)


data = county, floor, uranium, radon
groups = {"counties": state_of_county, "houses": state_of_county[county]}
pvi = PVI(
    Partition(model, groups=groups, mode="mask"), AutoMultivariateNormal(model), solver=PowerEP(moments="importance")
)
result = pvi.run(jax.random.key(0), 40, *data, tol=1e-2, progress_bar=False)
posterior = pvi.posterior(result.state)
print(result.message)

# %% [markdown]
# ## Shrinkage
#
# For every county, the mean of its houses (less what the floor explains) is an open circle; the arrow goes to the
# posterior mean of its effect.

# %%
effect, width = np.asarray(posterior["effect"].mean), np.sqrt(np.asarray(posterior["effect"].variance))
base, by_uranium, by_floor = (float(posterior[name].mean) for name in ("base", "by_uranium", "by_floor"))
own = np.bincount(county, radon - by_floor * floor) / houses

figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
colors = plt.get_cmap("viridis")(np.log(houses) / np.log(houses).max())
for c in np.argsort(houses):
    axes.annotate(
        "", (uranium[c], effect[c]), (uranium[c], own[c]), arrowprops={"arrowstyle": "->", "color": colors[c]}
    )
axes.scatter(uranium, own, facecolors="none", edgecolors=colors, s=28)
line = np.linspace(uranium.min(), uranium.max(), 2)
axes.plot(line, base + by_uranium * line, color="0.4", linewidth=1)
shade = plt.cm.ScalarMappable(plt.Normalize(0, np.log(houses).max()), "viridis")
ticks = [1, 3, 10, 30]
bar = figure.colorbar(shade, ax=axes, label="houses in the county", ticks=np.log(ticks))
bar.set_ticklabels([str(t) for t in ticks])
_ = axes.set(xlabel="uranium in the soil (standardised)", ylabel="log radon of the county")

# %% [markdown]
# Counties with few houses are drawn all the way to the line that all states agreed on, counties with many stay where
# they are. The line, the two spreads and the effect of the floor are shared; they are all that the states exchange.
#
# ## Against NUTS
#
# NUTS sees all houses (with the effects written as deviations, which suits it better).

# %%
written = numpyro.handlers.reparam(model, config={"effect": LocScaleReparam(0)})
mcmc = MCMC(NUTS(written), num_warmup=300, num_samples=500, num_chains=2, chain_method="vectorized", progress_bar=False)
mcmc.run(jax.random.key(1), *data)
draws = {name: np.asarray(values) for name, values in mcmc.get_samples().items()}

# %%
variational = PVI(Partition(model, groups=groups, mode="mask"), AutoMultivariateNormal(model))
by_elbo = variational.run(jax.random.key(0), 100, *data, progress_bar=False)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
sds = draws["effect"].std(0)
left.errorbar(draws["effect"].mean(0), effect, 1.645 * width, 1.645 * sds, fmt=".", linewidth=0.6, color="C0")
ends = np.array([effect.min(), effect.max()])
left.plot(ends, ends, color="0.5", linewidth=1, zorder=0)
left.set(xlabel="effect by NUTS, 90 %", ylabel="effect by PVI, 90 %", aspect="equal")
right.hist(draws["tau"], bins=40, density=True, color="0.88", label="NUTS")
grid = jnp.linspace(0.05, 0.7, 300)
for name, law in (("PowerEP", posterior["tau"]), ("variational", variational.posterior(by_elbo.state)["tau"])):
    right.plot(grid, jnp.exp(law.log_prob(grid)), label=name)
right.set(xlabel="tau, spread of the counties", yticks=[])
right.legend(frameon=False)
error = np.abs(effect - draws["effect"].mean(0)) / sds
print(f"effects: means differ by {np.median(error):.3f} sd in the median, {error.max():.3f} at most;")
print(f"sds are {np.min(width / sds):.2f} to {np.max(width / sds):.2f} times those of NUTS")

# %% [markdown]
# `PowerEP` integrates every county's effect out of its state's factor, at each value of the shared latents that it asks for, so the
# posterior of the spread need not be a Gaussian joint with sixty effects. The variational fit makes that approximation, and is surer
# of the spread than it should be. (Moments are by weighted draws; `moments="importance"` keeps to them, where the default would
# compile chains as well if weights collapsed.)
#
# ## What each state says
#
# Only shared latents can be drawn here: there is nothing else in a site.

# %%
_ = export.plot_forest(pvi, result.state, ["by_uranium", "by_floor", "tau"])

# %% [markdown]
# A state alone, with its ten counties, knows the slope of uranium only roughly, and two of the six are far from what
# all say together. (Every county's effect is integrated over all houses here, because two plates are split together:
# each group costs a pass over all rows, which `mode="mask"` accepts.)
#
# ## What to try next
#
# - How local latents are kept, and what they may depend on: {doc}`../partitioning`.
# - What leaves a group, and what does not: {doc}`../privacy`.
# - Scales and rates in families of their own: {doc}`families`.
