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
# # Data that arrives
#
# **Rows come day by day. Can one look at each of them once, notice the day that went wrong, and take it out again?**
#
# A stream of twelve days, forty rows each. Before a day is absorbed it is *predicted*: its log predictive density
# under the posterior of all days before, the prequential score, is an honest test that costs no data. On day eight
# the labels were recorded the wrong way round.

# %% tags=["hide-input"]
import warnings

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition, export
from numpyro_pvi.schedules import Streaming, Synchronous

# %%
rng = np.random.default_rng(7)
DAYS, ROWS, TRUE = 12, 40, np.array([1.0, -1.5, 0.5])
X = rng.normal(size=(DAYS * ROWS, 3))
y = (X @ TRUE + rng.logistic(size=len(X)) > 0).astype(int)
day = np.repeat([f"day {d + 1}" for d in range(DAYS)], ROWS)
y[day == "day 8"] = 1 - y[day == "day 8"]


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def rows_of(label):
    return jnp.asarray(X[day == label]), jnp.asarray(y[day == label])


labels = list(dict.fromkeys(day))
pvi = PVI(Partition(model, "data", ["day 1"] * ROWS), AutoMultivariateNormal(model), schedule=Streaming())
state = pvi.run(random.key(0), 1, *rows_of("day 1"), progress_bar=False).state
states, scores = {"day 1": state}, {}
for label in labels[1:]:
    scores[label] = pvi.prequential(state, *rows_of(label), rng_key=random.key(1))  # predict ...
    state = pvi.add_group(state, label, *rows_of(label))  # ... then update
    states[label] = state

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
means = np.array([float(s.total) / ROWS for s in scores.values()])
error = np.array([np.asarray(s.rows).std() / ROWS**0.5 for s in scores.values()])
left.errorbar(range(2, DAYS + 1), means, 2 * error, fmt="o-", markersize=4)
left.axhline(np.log(0.5), color="0.6", linestyle=":", label="a coin")
left.set(xlabel="day", ylabel="log score before it was seen (nats a row)")
left.legend()
for i, true in enumerate(TRUE):
    laws = [pvi.posterior(s)["w"] for s in states.values()]
    middle = np.array([float(law.mean[i]) for law in laws])
    width = np.array([float(law.variance[i]) ** 0.5 for law in laws])
    right.plot(range(1, DAYS + 1), middle, color=f"C{i}")
    right.fill_between(range(1, DAYS + 1), middle - 2 * width, middle + 2 * width, color=f"C{i}", alpha=0.2)
    right.axhline(true, color=f"C{i}", linestyle=":")
_ = right.set(xlabel="day", ylabel="w, mean and two sds")

# %% [markdown]
# On the left, the score of every day before it was seen, with two standard errors. Most days are predicted better
# than by a coin, and day eight far worse. On the right, the posterior day by day; dotted lines are the values that
# made the data. One bad day pulls all three coefficients towards zero, and the good days after it only slowly pull
# them back.
#
# `Streaming()` absorbs every group once. After `add_group` the new group alone is *present*: the state holds a site of
# every other one, and nothing of its rows.

# %%
print(state.groups, "present:", state.present)

# %% [markdown]
# ## Who is it?
#
# Every day has a site, so every day can be left out:

# %%
axes = export.plot_influence(pvi, state)
axes.figure.set_size_inches(6, 5)

# %% [markdown]
# ## Forgetting
#
# Taking a day out is one division. No rows are needed.

# %%
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    without = pvi.forget_group(state, "day 8")
print(said[0].message)

# %%
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
good = day != "day 8"
clean = PVI(Partition(model, "data", day[good]), AutoMultivariateNormal(model))
batch = clean.run(random.key(0), 30, X[good], y[good], tol=1e-4, progress_bar=False)
again = clean.revisit(without, day[good], X[good], y[good], num_steps=30, tol=1e-4)
shown = {
    "all twelve days": (pvi, state),
    "day 8 forgotten": (pvi, without),
    "... and the rest revisited": (clean, again),
    "never seen day 8": (clean, batch.state),
}
for i, (name, (own, held)) in enumerate(shown.items()):
    law = own.posterior(held)["w"]
    style = {"fmt": "o", "color": f"C{i}", "markersize": 4, "label": name}
    axes.errorbar(law.mean, np.arange(3) + 0.16 * (i - 1.5), xerr=1.645 * np.sqrt(law.variance), **style)
axes.vlines(
    TRUE, np.arange(3) - 0.35, np.arange(3) + 0.35, color="black", linewidth=1, label="values that made the data"
)
axes.set_yticks(range(3), [f"w[{i}]" for i in range(3)])
axes.invert_yaxis()
axes.set_xlabel("90 % interval")
_ = figure.legend(loc="outside right center", fontsize="small")

# %% [markdown]
# Forgetting undoes most of the damage at no cost. What is left is what the warning says: days nine to twelve were
# absorbed while day eight was in $q$, and their sites were fitted there. Revisiting the rest removes that trace; the
# result is the fit that has never seen day eight:

# %%
gap = np.abs(clean.get_params(again)["auto_loc"] - batch.params["auto_loc"]).max()
print(f"largest difference of the means after revisiting: {gap:.1e}")

# %% [markdown]
# ## Once, or again and again?
#
# A stream absorbs each day at the posterior of its time, and nothing that comes later mends an early site. How much
# is lost by that, with the same days seen as often as one likes:

# %%
everything = PVI(Partition(model, "data", day), AutoMultivariateNormal(model), schedule=Synchronous())
full = everything.run(random.key(0), 30, X, y, tol=1e-4, progress_bar=False)
once, often = pvi.posterior(state)["w"], everything.posterior(full.state)["w"]
print("one pass less batch, in posterior sds:", np.round((once.mean - often.mean) / np.sqrt(often.variance), 3))

# %% [markdown]
# ## What to try next
#
# - What is compiled when, and what `present` means: {doc}`../streaming`.
# - What forgetting is, and what it is not: {doc}`../forgetting` and {doc}`../privacy`.
# - A stream that is spread over agents: {doc}`agents`.
