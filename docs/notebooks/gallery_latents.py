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
# # Gallery: a mixture and a network with `SVI` swapped for `PVI`
#
# **What if a posterior has many modes, and where one starts decides which one is found?**
#
# Two models after NumPyro's own examples, each fitted twice with the same guide: by `SVI`, as its author would, and by
# `PVI`. Data are simulated with the seeds shown.
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
from numpyro.infer import SVI, Predictive, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.util import potential_energy
from numpyro.optim import Adam

from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Sequential
from numpyro_pvi.solvers import NaturalGradient


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
# ## 1. A mixture
#
# Every row's component is a discrete latent. `PVI` takes the model as it is and sums the component out of every row; the
# extra `enum` (funsor) does the sum. `SVI` with this guide needs it done by hand: `TraceEnum_ELBO` does not support it.
#
# **Groups:** four batches.

# %%
rng = np.random.default_rng(4)
x = np.where(rng.random(120) < 0.35, -1.5, 1.5) + rng.normal(size=120)
batch = rng.integers(0, 4, 120)


def latents():
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 2.0).to_event(1))
    return weight, mu, numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))


def mixture(x):
    weight, mu, sigma = latents()
    with numpyro.plate("rows", x.shape[0]):
        component = numpyro.sample("component", dist.Bernoulli(weight))
        numpyro.sample("x", dist.Normal(mu[component], sigma), obs=x)


def mixture_summed(x):
    weight, mu, sigma = latents()
    with numpyro.plate("rows", x.shape[0]):
        weights = dist.Categorical(jnp.stack([1 - weight, weight]))
        numpyro.sample("x", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=x)


# %%
# SVI starts at a uniform draw: from many of them it ends with both components on the same side.
centre = {"mu": jnp.array([-1.0, 1.0]), "weight": 0.5, "sigma": 1.0}
svi_guide = AutoMultivariateNormal(mixture_summed, init_loc_fn=init_to_value(values=centre))
svi = SVI(mixture_summed, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 3000, x, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(mixture)
pvi = PVI(Partition(mixture, "rows", batch), pvi_guide, schedule=Sequential())
# SVI's own start, which is narrow: from the prior's width PVI ends with the components' names exchanged.
started = svi.get_params(svi.init(random.key(0), x))
by_pvi = pvi.run(random.key(0), 40, x, init_params=started, progress_bar=False)
compare(mixture_summed, (x,), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# The assignments follow from the fitted params, by NumPyro's own `infer_discrete`:

# %%
predictive = Predictive(mixture, guide=pvi_guide, params=by_pvi.params, num_samples=500, infer_discrete=True)
share = predictive(random.key(1), x)["component"].mean(axis=0)
for low, high in ((-4, -1), (-1, 0), (0, 1), (1, 4)):
    rows = (x > low) & (x <= high)
    print(f"rows between {low:2d} and {high:2d}: in the upper component with probability {share[rows].mean():.2f}")

# %% [markdown]
# ## 2. A Bayesian network
#
# One hidden layer of two units, after NumPyro's `bnn` example. All hidden units have the same prior, so q must start
# where they differ: for SVI that is `init_loc_fn`, for PVI `init_params`, under the guide's own names. Such a posterior
# has many modes, one for every order of the units; a Gaussian covers one of them.
#
# **Groups:** four experiments.

# %%
rng = np.random.default_rng(6)
inputs = np.sort(rng.uniform(-2.0, 2.0, size=60))
output = np.tanh(2 * inputs) - 0.5 * inputs + 0.3 * rng.normal(size=60)
features = np.stack([inputs, np.ones_like(inputs)], axis=1)
experiment = rng.integers(0, 4, 60)


def network(features, output=None):
    inner = numpyro.sample("inner", dist.Normal(0.0, 1.0).expand([features.shape[1], 2]).to_event(2))
    outer = numpyro.sample("outer", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("rows", features.shape[0]):
        mean = jnp.tanh(features @ inner) @ outer
        numpyro.sample("output", dist.Normal(mean, 1 / jnp.sqrt(precision)), obs=output)


start = {
    "inner": jnp.array([[1.5, -0.5], [0.0, 0.0]]),
    "outer": jnp.array([1.0, 0.5]),
    "precision": jnp.array(3.0),
}

# %%
svi_guide = AutoMultivariateNormal(network, init_loc_fn=init_to_value(values=start))
svi = SVI(network, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 6000, features, output, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(network)
pvi = PVI(
    Partition(network, "rows", experiment), pvi_guide, schedule=Sequential(), solver=NaturalGradient(num_draws=32)
)
auto_loc = jnp.concatenate([start["inner"].ravel(), start["outer"], jnp.log(start["precision"])[None]])
by_pvi = pvi.run(random.key(0), 40, features, output, init_params={"auto_loc": auto_loc}, progress_bar=False)
compare(network, (features, output), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# ## What to take from this

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.4), sharey=True, layout="constrained")
for i, (gain, error, gap) in enumerate(table.values()):
    left.errorbar(gain, i, xerr=2 * error, fmt="o", color="C0")
    right.plot(gap, i, "o", color="C1")
left.axvline(0.0, color="0.5", linewidth=0.8)
left.set_yticks(range(len(table)), list(table))
left.invert_yaxis()
left.set_xlabel("ELBO by PVI less that by SVI (nats), two standard errors")
_ = right.set(xlabel="largest difference of the means (posterior sds)", xlim=(0, None))

# %% [markdown]
# Both sides start at the same point and stay with the mode that it belongs to; with draws both are noisy.
#
# ## What to try next
#
# - A mixture whose components stay in $q$: {doc}`families`.
# - Larger networks: {doc}`bayesian_network`.
# - The same swap for regressions and for partial pooling: {doc}`gallery` and {doc}`gallery_pooling`.
