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
# # Gallery: eight SVI programs with `SVI` swapped for `PVI`
#
# Eight models after NumPyro's own examples, each fitted twice with the same guide: by `SVI`, as its author would, and by
# `PVI`. What changes is the two lines that make and run the fit; the model, the guide and everything afterwards stay.
# Data are published textbook numbers or simulated with the seeds shown. All of it runs while these pages are built.
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


def elbo(model, guide, params, args, num_draws=4000):
    """ELBO of a fitted full-covariance guide, and its standard error, in nats."""
    loc, root = params["auto_loc"], params["auto_scale_tril"]

    def log_ratio(eps):  # log p(y, theta) - log q(theta), less the constants
        return -potential_energy(model, args, {}, guide._unpack_latent(loc + root @ eps)) + eps @ eps / 2

    draws = random.normal(random.key(9), (num_draws, len(loc)))
    constants = jnp.log(jnp.diagonal(root)).sum() + len(loc) / 2 * jnp.log(2 * jnp.pi)
    values = jax.jit(jax.vmap(log_ratio))(draws) + constants
    return float(values.mean()), float(values.std() / num_draws**0.5)


table = {}  # by model: ELBO by PVI less that by SVI, its standard error, and the largest difference of the means


def compare(model, args, by_svi, svi_guide, by_pvi, pvi_guide):
    """Print both ELBOs and how far apart the posterior means are."""
    found = []
    for word, guide, result in (("SVI", svi_guide, by_svi), ("PVI", pvi_guide, by_pvi)):
        value, error = elbo(model, guide, result.params, args)
        found.append((value, error))
        print(
            f"{word}: ELBO {value:9.3f} ({error:.3f})", f"{len(result.losses)} {'steps' if word == 'SVI' else 'rounds'}"
        )
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
# ## 5. Batting averages
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
# ## 6. Eight schools
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
# ## 7. A mixture
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
# ## 8. A Bayesian network
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
# With affine predictors (1 to 4) PVI needs a handful of rounds and ends at the optimum itself, a little above SVI, whose
# steps never stop shaking. Where expectations are by draws (5 to 8) both sides are noisy, and more
# draws a round buy a steadier end. The benchmark `python -m benchmarks gallery` measures how long
# both take on such models.
#
# ## What to try next
#
# - One of these against the clock: {doc}`svi_to_pvi`.
# - What the groups of a model say: {doc}`hospitals`.
