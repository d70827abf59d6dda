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
# # Groups that never meet
#
# **One group is twenty times slower than the others, and messages get lost. Who waits for whom?**
#
# Under `Asynchronous` nobody waits. A group reads $q$, takes its time over a visit, and hands in its site; the server
# absorbs it, and the group reads $q$ again. The clock is simulated, so that all of this can be tried out in one
# process before it is run anywhere. Below: a logistic regression over eight groups, one of them slow; how far $q$ is
# from where it will end, against simulated time.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Asynchronous, Synchronous

numpyro.enable_x64()

# %%
rng = np.random.default_rng(1)
X = jnp.asarray(rng.normal(size=(1_600, 8)))
y = jnp.asarray((X @ rng.normal(size=8) + rng.logistic(size=1_600) > 0).astype(int))
clinic = np.repeat(["slow", "b", "c", "d", "e", "f", "g", "h"], 200)
SLOW = 20.0  # time of a visit; 1 for all others


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def run(schedule, rounds):
    guide = AutoMultivariateNormal(model)
    pvi = PVI(Partition(model, "data", clinic), guide, schedule=schedule, init_sites="prior")
    return pvi.run(jax.random.key(0), rounds, X, y, progress_bar=False)


together = run(Synchronous(), 15)
alone = run(Asynchronous(delays={"slow": SLOW}), 110)
lossy = run(Asynchronous(delays={"slow": SLOW}, loss_rate=0.3), 130)
best = max(float(np.max(r.trace.elbo)) for r in (together, alone, lossy))

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name, result, pace in (
    ("synchronous: all wait for the slow one", together, SLOW),
    ("asynchronous", alone, 1.0),
    ("asynchronous, 30 % of messages lost", lossy, 1.0),
):
    trace = result.trace
    below = np.where(trace.elbo < best - 1e-9, best - trace.elbo, np.nan)
    axes.plot(pace * trace.clock, below, ".-", markersize=4, label=name)
for k in range(1, 8):
    axes.axvline(SLOW * k, color="0.9", linewidth=0.8, zorder=0)
axes.set(xlabel="simulated time", ylabel="ELBO below the best (nats)", yscale="log", xlim=(0, 140))
_ = axes.legend()

# %% [markdown]
# Grey lines are the times at which the slow group has finished a visit. A synchronous round ends there and not
# earlier. Asynchronously the other seven have agreed among themselves long before the slow one is first heard; then
# its site arrives, and the error falls by orders of magnitude at a time. Losing nearly every third message costs a
# little time here, and nothing else: the end is the same. (A lost message of the slow group would cost twenty units.)
#
# ## How stale is what arrives?
#
# *Staleness* is the number of changes of $q$ that a group had not seen when its site was absorbed. The slow group's
# sites are old by about 140 changes, seven others having moved $q$ twenty times each:

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
trace = alone.trace
for i, label in enumerate(trace.labels):
    style = {"color": "C3", "linewidth": 2} if label == "slow" else {"color": "0.6", "linewidth": 0.8}
    left.plot(trace.clock, trace.staleness[:, i], **style)
    right.plot(trace.clock, np.where(trace.move[:, i] > 0, trace.move[:, i], np.nan), **style)
left.plot([], [], color="C3", linewidth=2, label="slow")
left.plot([], [], color="0.6", label="the others")
left.set(xlabel="simulated time", ylabel="staleness (changes of q)")
left.legend()
_ = right.set(xlabel="simulated time", ylabel="move by the last site (sds)", yscale="log")

# %% [markdown]
# Why does such old work do no harm? A message carries the *absolute* site, so $q$ is at any time the prior times the
# sites that the server holds. And the server discounts: a site counts in full as long as $q$ has moved no further
# since its group read it than it moves in a round at present; beyond, its weight falls with the square of the
# distance. What the slow group found at the very first $q$ is next to ignored. What it finds at a $q$ that has come
# to rest is right, however late it comes.
#
# ## What a full step would do
#
# With `damping=1` nothing is discounted. And `max_staleness` makes the fast groups wait instead:

# %%
full = run(Asynchronous(delays={"slow": SLOW}, damping=1.0), 110)
bounded = run(Asynchronous(delays={"slow": SLOW}, max_staleness=20), 40)

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
for name, result in (
    ('asynchronous, damping="auto"', alone),
    ("asynchronous, full steps", full),
    ("asynchronous, at most 20 changes old", bounded),
):
    below = np.where(result.trace.elbo < best - 1e-9, best - result.trace.elbo, np.nan)
    axes.plot(result.trace.clock, below, label=name)
axes.set(xlabel="simulated time", ylabel="ELBO below the best (nats)", yscale="log", xlim=(0, 140))
_ = axes.legend(fontsize="small")

# %% [markdown]
# Full steps overshoot at the start, where every group moves $q$ as if it were alone, and what the slow group hands in
# at time 20 makes the error larger instead of smaller. That it recovers is this problem's kindness: factors are
# log-concave. Bounded staleness is safe and slow, because everybody waits after all.
#
# ## What it costs to talk

# %%
for name, result in (("synchronous", together), ("asynchronous", alone), ("with losses", lossy)):
    trace = result.trace
    close = np.flatnonzero(best - trace.elbo < 1e-3)
    if close.size:
        first = close[0]
        pace = SLOW if result is together else 1.0
        print(
            f"{name:14s} a thousandth of a nat at time {pace * trace.clock[first]:5.0f}, {trace.messages[first].sum():5d} messages"
        )

# %% [markdown]
# Asynchronous groups send more: they use the time that they would have spent waiting.
#
# ## What to try next
#
# - Delays as they were measured, and all settings: {doc}`../choosing`.
# - No server either: {doc}`agents`.
# - What of the rows can be read from a message: {doc}`../privacy`.
