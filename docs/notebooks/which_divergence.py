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
# # Which divergence?
#
# **A posterior is skewed, and $q$ is a Gaussian. What does each method make of it?**
#
# Twenty animals got a drug at four doses, five at each; none, one, three and five of them died (Racine, Grieve,
# Flühler and Smith, *Applied Statistics* 35, 1986). A logistic regression on the log dose has two latents, and with
# so few data the posterior of the slope has a long tail to the right. Each dose is a group. Everything below is one
# model, and one word changed.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.solvers import SNEP, NaturalGradient, PowerEP

# %%
log_dose = jnp.array([-0.86, -0.30, -0.05, 0.73])
deaths = jnp.array([0, 1, 3, 5])


def bioassay(log_dose, deaths=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 10.0))
    with numpyro.plate("doses", log_dose.shape[0]):
        numpyro.sample("deaths", dist.Binomial(5, logits=intercept + slope * log_dose), obs=deaths)


solvers = {
    "variational": NaturalGradient(),
    "power EP, 0.5": PowerEP(0.5),
    "EP": PowerEP(1.0),
    "SNEP": SNEP(),
}


def fit(solver, groups=(0, 1, 2, 3)):
    pvi = PVI(Partition(bioassay, "doses", groups), AutoMultivariateNormal(bioassay), solver=solver)
    return pvi, pvi.run(jax.random.key(0), 200, log_dose, deaths, tol=1e-4, progress_bar=False)


def slope(pvi, result):
    return pvi.posterior(result.state)["slope"]


runs = {name: fit(solver) for name, solver in solvers.items()}
fits = {
    name: (slope(*run), float(run[0].log_evidence(run[1].state, log_dose, deaths)), len(run[1].losses))
    for name, run in runs.items()
}

# %% [markdown]
# Two yardsticks: NUTS, and, because two latents are few enough, sums over a fine grid, which are exact for every
# practical purpose.

# %%
mcmc = MCMC(
    NUTS(bioassay), num_warmup=500, num_samples=4_000, num_chains=2, chain_method="vectorized", progress_bar=False
)
mcmc.run(jax.random.key(1), log_dose, deaths)
draws = np.asarray(mcmc.get_samples()["slope"])

a, b = np.linspace(-10, 14, 401), np.linspace(-15, 65, 801)
logits = a[:, None, None] + b[:, None] * np.asarray(log_dose)
joint = dist.Binomial(5, logits=logits).log_prob(deaths).sum(-1)
joint = joint + dist.Normal(0, 3).log_prob(a)[:, None] + dist.Normal(0, 10).log_prob(b)
cell = (a[1] - a[0]) * (b[1] - b[0])
mass = np.exp(np.asarray(joint, np.float64))
log_evidence = np.log(mass.sum() * cell)
density = mass.sum(0) / mass.sum() / (b[1] - b[0])

# %%
figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
axes.hist(draws, bins=80, range=(-5, 35), density=True, color="0.88", label="NUTS")
axes.plot(b, density, color="black", linewidth=1, label="exact")
for (name, (law, _, _)), style in zip(fits.items(), ("-", "--", "-", ":"), strict=True):
    axes.plot(b, np.exp(law.log_prob(b)), style, linewidth=2, label=name)
axes.set(xlim=(-5, 35), xlabel="slope", yticks=[], ylabel="density")
_ = axes.legend(frameon=False)

# %%
mean = (density * b).sum() * (b[1] - b[0])
sd = np.sqrt((density * (b - mean) ** 2).sum() * (b[1] - b[0]))
print(f"{'':14}{'mean':>8}{'sd':>8}{'log evidence':>14}{'rounds':>8}")
for name, (law, evidence, rounds) in fits.items():
    print(f"{name:14}{float(law.mean):8.3f}{float(law.variance) ** 0.5:8.3f}{evidence:14.4f}{rounds:8d}")
print(f"{'NUTS':14}{draws.mean():8.3f}{draws.std():8.3f}")
print(f"{'exact':14}{mean:8.3f}{sd:8.3f}{log_evidence:14.4f}")

# %% [markdown]
# The variational fit minimises $\mathrm{KL}(q \,\|\, p)$: it must not put mass where the exact density is nearly
# zero, which here is at slopes below zero, and pays for that with a $q$ that is too narrow. EP matches the mean and
# the standard deviation of each group's *tilted* distribution, $q$ with the exact factor in the place of the site,
# and so covers more of the tail at the price of some mass below zero. Power EP at .5 lies between. SNEP is another
# way to the fixed points of power EP, by a double loop with an objective; at its default power it ends where EP does.
#
# The evidence says the same. The variational value is a lower bound. EP's is no bound, and nearer.

# %%
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
for i, (_, evidence, _) in enumerate(fits.values()):
    axes.plot(evidence - log_evidence, i, "o", color=f"C{i}")
axes.axvline(0.0, color="black", linewidth=1)
axes.set_yticks(range(len(fits)), list(fits))
axes.invert_yaxis()
_ = axes.set_xlabel("log evidence less the exact one (nats)")

# %% [markdown]
# ## Powers in between, and fewer groups

# %%
powers = (0.1, 0.25, 0.75)
widths = [float(slope(*fit(PowerEP(power))).variance) ** 0.5 for power in powers]
one_group = slope(*fit(PowerEP(1.0), groups=1))

# %% tags=["hide-input"]
widths_of = {name: float(law.variance) ** 0.5 for name, (law, _, _) in fits.items()}
at = np.array([*powers, 0.5, 1.0])
line = np.array([*widths, widths_of["power EP, 0.5"], widths_of["EP"]])
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(np.sort(at), line[np.argsort(at)], "o-", label="power EP, four groups")
axes.plot(0, widths_of["variational"], "s", color="C1", label="variational")
axes.plot(1, float(one_group.variance) ** 0.5, "D", color="C2", label="EP, one group")
axes.axhline(sd, color="black", linewidth=1, label="exact")
axes.set(xlabel="power", ylabel="sd of the slope")
_ = axes.legend(fontsize="small")

# %% [markdown]
# As the power tends to 0, power EP becomes variational inference. And with a single group the tilted distribution at
# power 1 *is* the posterior, so that EP has its mean and standard deviation exactly: how far EP is off depends on how
# many factors are replaced by sites.
#
# None of this matters much when every group has many rows: then all of these are nearly the same Gaussian.
#
# ## What to try next
#
# - The theory, and which solver to take when: {doc}`../divergences` and {doc}`../snep`.
# - What to do when no Gaussian fits: {doc}`families`.
# - How to tell without an exact answer at hand: {doc}`did_it_work`.
