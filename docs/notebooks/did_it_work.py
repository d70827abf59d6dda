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
# # Did it work?
#
# **A fit always returns a number. How does one tell that it can be trusted?**
#
# Four readings, from the cheapest to the most thorough: the message that a run ends with, the picture of its rounds,
# Pareto k-hat, and simulation-based calibration. Each is shown on a fit that is fine and on one that is not.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from scipy import stats

from numpyro_pvi import PVI, Partition, export
from numpyro_pvi.solvers import NaturalGradient

# %%
rng = np.random.default_rng(0)
# Six readings of the weather that rise and fall together, and visits on sixty days at four stations.
weather = rng.normal(size=(60, 1)) + 0.4 * rng.normal(size=(60, 6))
visits = rng.poisson(np.exp(0.5 + weather @ [0.2, 0.1, -0.1, 0.3, 0.0, -0.2]))
station = rng.choice(["north", "east", "south", "west"], size=60)


def model(weather, visits=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 0.3).expand([6]).to_event(1))
    with numpyro.plate("days", weather.shape[0]):
        numpyro.sample("visits", dist.Poisson(jnp.exp(intercept + weather @ slopes)), obs=visits)


full = PVI(Partition(model, "days", station), AutoMultivariateNormal(model))
fit = full.run(jax.random.key(0), 40, weather, visits, tol=1e-3, progress_bar=False)
narrow = PVI(Partition(model, "days", station), AutoDiagonalNormal(model))
mean_field = narrow.run(jax.random.key(0), 400, weather, visits, tol=1e-3, progress_bar=False)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
export.plot_khat(full, fit.state, weather, visits, rng_key=jax.random.key(1), ax=left).set_title("full covariance")
export.plot_khat(narrow, mean_field.state, weather, visits, rng_key=jax.random.key(1), ax=right).set_title("mean-field")
for axes in (left, right):
    axes.set_ylim(-0.1, 1.2)

# %% [markdown]
# Two guides on the same data. k-hat is the shape of the tail of the importance weights from $q$ to the exact
# posterior: below .5 good, below .7 usable, above that neither means nor variances of $q$ can be repaired by
# reweighting. On the left all is well. On the right every group's *site* stands in well for its factor where $q$ is,
# and the *whole* fails all the same: small misfits of four groups add up, because a mean-field $q$ cannot follow the
# correlation that they share.
#
# ## 1. What the run says
#
# `result.message` is one sentence, `result.converged` a flag, and `pvi.info(state)` a table.

# %%
print("full covariance:", fit.message)
print("mean-field:     ", mean_field.message)
print(full.info(fit.state))

# %% [markdown]
# | column | what it says | look closer when |
# |---|---|---|
# | asked | how far the group's own proposal would move $q$, in posterior sds | it stays above `tol` while `taken` is near zero: steps are refused |
# | taken, step | what was taken of it, and the share | the step stays far below 1: groups pull against each other (where expectations are by draws it shrinks by itself, as late rounds average) |
# | back-offs, skipped | halvings; rounds without a step | a group is skipped again and again: its factor is not finite somewhere |
# | cavity | whether $q$ without the group is a distribution | it says *improper*: nothing but this group holds some latent |
# | ess | effective number of weighted draws, where `PowerEP` and `SNEP` match moments by them; else "-" | it is a few per cent of the draws |
# | structure | what every factor was found to be: *quadratic* (its site is exact at once), *affine* (rows see the latents through one or two affine predictors), *draws* (neither), *local* (rows have latents of their own), *enumerated* (discrete latents summed out); *proved* for all values, or *found* and verified where $q$ is | *draws* where you expected *affine*: the predictor is not affine |
# | expectation | *closed form*; *quadrature* with its rule, of the last round (`gh8`, `gh20`: Gauss-Hermite with so many nodes; `mapped`: nodes moved to where the density bends); *sigma_points*; *monte_carlo*; *site only*: the group's rows are not at hand | draws, and more of them are affordable |
# | PRIOR | the site of priors that $q$'s family does not have (a scale's, a hierarchy's); groups' cavities share it | |
#
# A run that is stopped too early says so:

# %%
short = full.run(jax.random.key(0), 2, weather, visits, tol=1e-3, progress_bar=False)
print(short.converged, "-", short.message)

# %% [markdown]
# ## 2. The rounds
#
# A healthy run: the ELBO rises and levels off, and what is left to move shrinks by a factor in every round.
# Mean-field takes longer by far, because it must treat six correlated latents as independent.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, result in (("full covariance", fit), ("mean-field", mean_field)):
    left.plot(result.trace.rounds, result.trace.elbo, label=name)
    right.plot(result.trace.rounds, np.where(result.trace.left > 0, result.trace.left, np.nan), label=name)
left.set(xlabel="rounds", ylabel="ELBO (nats)", xscale="log")
right.set(xlabel="rounds", ylabel="sds left to move", yscale="log", xscale="log")
right.axhline(1e-3, color="0.7", linewidth=0.8)
_ = right.legend()

# %% [markdown]
# Mean-field also ends at a lower ELBO; the difference is how much worse it is, in nats of $\mathrm{KL}(q \,\|\, p)$.
#
# Noise looks different. With draws in place of quadrature, moves stop falling where the draws' error is. From there on late
# rounds are averaged, and what is left falls with the root of their number: a `tol` below the noise takes very many
# rounds, and the message says so when they run out:

# %%
noisy = PVI(
    Partition(model, "days", station),
    AutoMultivariateNormal(model),
    solver=NaturalGradient(expectation="monte_carlo", num_draws=8),
)
by_draws = noisy.run(jax.random.key(0), 60, weather, visits, progress_bar=False)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, result in (("quadrature", fit), ("8 draws a round", by_draws)):
    axes.plot(result.trace.rounds, result.trace.total_move, label=name)
axes.set(xlabel="rounds", ylabel="largest move (posterior sds)", yscale="log")
_ = axes.legend()

# %% [markdown]
# ## 3. k-hat
#
# The picture at the top. As numbers, for the whole $q$ and by group:

# %%
for name, pvi, result in (("full covariance", full, fit), ("mean-field", narrow, mean_field)):
    whole = pvi.khat(result.state, weather, visits, rng_key=jax.random.key(1))
    by_group = pvi.khat(result.state, weather, visits, rng_key=jax.random.key(1), by_group=True)
    print(f"{name:16s} {whole:6.2f}  ", {label: round(k, 2) for label, k in by_group.items()})

# %% [markdown]
# k-hat judges $q$ against the exact posterior of *this* data set. It needs no NUTS, only a thousand evaluations of
# the model.
#
# ## 4. Simulation-based calibration
#
# A stronger question: is the method right *on average* over data that this model could produce? Draw latents from the
# prior, data from the latents, fit, and count how many of 99 posterior draws lie below the value that made the data.
# If posteriors are exact these ranks are uniform (Talts and others, *Validating Bayesian inference algorithms with
# simulation-based calibration*, 2018).
#
# The state of one `init` is where every fit starts, so that nothing is planned or compiled again, and a fit takes
# milliseconds:

# %%
SETS, DRAWS = 300, 99


@jax.jit
@jax.vmap
def simulate(key):
    """Latents from the prior and data from them; the readings stay as they are."""
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, key)).get_trace(weather)
    return jnp.stack([trace["intercept"]["value"], trace["slopes"]["value"][0]]), trace["visits"]["value"]


truth, data = map(np.asarray, simulate(jax.random.split(jax.random.key(2), SETS)))


def ranks(pvi, rounds):
    """Int[SETS 2]: ranks of the true intercept and first slope among draws from q."""
    start = pvi.init(jax.random.key(0), weather, data[0])
    found = []
    for values, counts in zip(truth, data, strict=True):
        result = pvi.run(jax.random.key(0), rounds, weather, counts, init_state=start, tol=1e-2, progress_bar=False)
        params = {name: np.asarray(x) for name, x in result.params.items()}
        noise = rng.normal(size=(DRAWS, 7))
        spread = noise @ params["auto_scale_tril"].T if "auto_scale_tril" in params else noise * params["auto_scale"]
        found.append(np.sum((params["auto_loc"] + spread)[:, :2] < values, axis=0))
    return np.array(found)


found = {
    "full covariance": ranks(PVI(Partition(model, "days", station), AutoMultivariateNormal(model)), 20),
    "mean-field": ranks(PVI(Partition(model, "days", station), AutoDiagonalNormal(model)), 80),
}

# %%
bins = 10
low, high = stats.binom.ppf([0.005, 0.995], SETS, 1 / bins)
figure, axes = plt.subplots(2, 2, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
for row, (name, rank) in zip(axes, found.items(), strict=True):
    for axis, column, latent in zip(row, rank.T, ("intercept", "first slope"), strict=True):
        axis.axhspan(low, high, color="0.9")
        axis.hist(column, bins=np.linspace(-0.5, DRAWS + 0.5, bins + 1), color="C0", edgecolor="white")
        axis.set_title(f"{latent}, {name}", fontsize="medium")
for axis in axes[1]:
    axis.set_xlabel("rank of the true value")

# %% [markdown]
# The grey band holds 99 in 100 bars of an exact method. With full covariance the ranks are uniform as far as three
# hundred data sets can tell. Mean-field is too sure of itself: the truth lies below or above nearly all draws far too
# often, which gives the U. Its posterior standard deviations are too small because they say how well each latent is
# known *given the others*.
#
# ## What each warning means
#
# | you see | it means | do |
# |---|---|---|
# | "stopped after ... rounds" | `tol` was not reached | more rounds: `run(..., init_state=result.state)` |
# | stalled | steps are refused: some group asks for what the others, or its own domain, do not allow | read which group; another start, `Sequential()`, smaller steps |
# | k-hat above .7 | $q$ cannot follow the posterior's shape | full covariance for mean-field; another parametrisation; `PowerEP`; a family of the latents' own |
# | k-hat of one group high | that group's factor is far from Gaussian where $q$ is | split it, or look at its rows |
# | k-hat of `PRIOR` high | a prior outside the family (a half-normal scale) is far from Gaussian in unconstrained space | more data on it, or `AutoExponentialFamily` |
# | contradicted structure | what was found by values is not so where $q$ is | nothing: the factor is taken by draws from then on |
# | U-shaped ranks | too narrow on average | as for k-hat |
# | ranks heaped in the middle | too wide on average | look for rows that are left out |
# | slanted ranks | biased | look for a prior that differs from the simulator's |
#
# ## What to try next
#
# - A better divergence for skewed posteriors: {doc}`which_divergence`.
# - What the sites of single groups say: {doc}`hospitals`.
