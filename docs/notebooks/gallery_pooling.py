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
# # Gallery: partial pooling with `SVI` swapped for `PVI`
#
# **What if no structure is found, and expectations are by draws?**
#
# Two hierarchies after NumPyro's own examples, each fitted twice with the same guide: by `SVI`, as its author would, and
# by `PVI`. Data are published textbook numbers.
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
# ## 1. Batting averages
#
# Hits of 18 players in their first 45 at-bats of the 1970 season (Efron and Morris, 1975), partially pooled on the logit
# scale. The logit is a product of two latents, so no structure is found and expectations are by draws; a `Sequential`
# schedule suits those. Its last rounds move by the noise of the draws, so `tol` is left out.
#
# **Groups:** six, of three players each.

# %%
hits = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
player, at_bats = np.arange(18), np.full(18, 45)


def baseball(player, at_bats, hits=None):
    loc = numpyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("players", 18):
        alpha = numpyro.sample("alpha", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", player.shape[0]):
        numpyro.sample("hits", dist.Binomial(at_bats, logits=(loc + scale * alpha)[player]), obs=hits)


# %%
svi_guide = AutoMultivariateNormal(baseball)
svi = SVI(baseball, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 6000, player, at_bats, hits, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(baseball)
pvi = PVI(Partition(baseball, "rows", player // 3), pvi_guide, schedule=Sequential())
by_pvi = pvi.run(random.key(0), 40, player, at_bats, hits, progress_bar=False)
compare(baseball, (player, at_bats, hits), by_svi, svi_guide, by_pvi, pvi_guide)

# %% [markdown]
# ## 2. Eight schools
#
# Not centred, as one writes it for any Gaussian guide. More draws a round make the last ones steadier.
#
# **Groups:** the schools; a site is then one school's evidence.

# %%
effect = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
school = np.arange(8)


def schools(school, error, effect=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", school.shape[0]):
        numpyro.sample("effect", dist.Normal((mu + tau * theta)[school], error), obs=effect)


# %%
svi_guide = AutoMultivariateNormal(schools)
svi = SVI(schools, svi_guide, Adam(0.01), Trace_ELBO(num_particles=8))
by_svi = svi.run(random.key(0), 6000, school, error, effect, progress_bar=False)

# %%
pvi_guide = AutoMultivariateNormal(schools)
pvi = PVI(
    Partition(schools, "rows", list("ABCDEFGH")), pvi_guide, schedule=Sequential(), solver=NaturalGradient(num_draws=64)
)
by_pvi = pvi.run(random.key(0), 40, school, error, effect, progress_bar=False)
compare(schools, (school, error, effect), by_svi, svi_guide, by_pvi, pvi_guide)

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
# With draws both sides are noisy, and more draws a round buy a steadier end.
#
# ## What to try next
#
# - Effects that never leave their group: {doc}`hierarchies`.
# - The same swap where all is quadrature, and for a mixture: {doc}`gallery` and {doc}`gallery_latents`.
