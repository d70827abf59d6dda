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
# # SVI to PVI in one line
#
# **What does one get for replacing `SVI` by `PVI`, and what does it cost?**
#
# One model, one guide, fitted twice: by stochastic optimisation, and by natural-gradient steps on ten sites. Below is
# how far the ELBO of each is from the best one, against the time that has passed and against passes over the data.

# %% tags=["hide-input"]
import os

# These pages are built with XLA's optimiser off, because they mostly compile. Here run time is what we look at.
for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
    os.environ.pop(name, None)

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, export

# %%
rng = np.random.default_rng(0)
N, D = 5_000, 20
mixing = np.eye(D) + 0.3 * rng.normal(size=(D, D))
X = jnp.asarray(rng.normal(size=(N, D)) @ mixing)
y = jnp.asarray((X @ rng.normal(size=D) * 0.5 + rng.logistic(size=N) > 0).astype(int))


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


# %% [markdown]
# The swap. The first line is NumPyro's own:

# %%
svi = SVI(model, AutoMultivariateNormal(model), Adam(0.01), Trace_ELBO())

# %%
pvi = PVI(model, AutoMultivariateNormal(model), Adam(0.01), Trace_ELBO(), num_groups=10)

# %% [markdown]
# Both fits, step by step with a clock. The first call of everything compiles and is not counted in the picture; its
# time is printed below it.

# %% tags=["hide-input"]
nodes, weights = np.polynomial.hermite_e.hermegauss(32)
nodes, weights = jnp.asarray(nodes), jnp.asarray(weights / weights.sum())


@jax.jit
def elbo(loc, root):
    """ELBO of a Gaussian q in nats: the expected log-likelihood by quadrature, the KL divergence in closed form."""
    centre, width = X @ loc, jnp.linalg.norm(X @ root, axis=1)
    logits = centre[:, None] + width[:, None] * nodes
    likelihood = jnp.sum((y[:, None] * logits - jax.nn.softplus(logits)) @ weights)
    kl = 0.5 * (loc @ loc + jnp.sum(root**2) - D) - jnp.sum(jnp.log(jnp.diagonal(root)))
    return likelihood - kl


def clocked(start, step, params_of, count):
    """Parameters and seconds after every step; the clock stops while they are looked at."""
    seconds, found, state = 0.0, [], None
    for i in range(count + 1):
        begun = time.perf_counter()
        state = jax.block_until_ready(start() if i == 0 else step(state))
        seconds += time.perf_counter() - begun
        params = params_of(state)
        found.append((seconds, float(elbo(params["auto_loc"], params["auto_scale_tril"]))))
    return np.array(found)


EVERY, STEPS = 50, 10_000  # steps of SVI between two looks, and in all


def svi_curve(rate, looks=STEPS // EVERY):
    svi = SVI(model, AutoMultivariateNormal(model), Adam(rate), Trace_ELBO())
    steps = jax.jit(lambda s: jax.lax.scan(lambda s, _: (svi.update(s, X, y)[0], None), s, None, length=EVERY)[0])
    state = svi.init(random.key(0), X, y)
    begun = time.perf_counter()
    jax.block_until_ready(steps(state))
    compiling = time.perf_counter() - begun
    curve = clocked(lambda: svi.init(random.key(0), X, y), steps, svi.get_params, looks)
    return curve, np.arange(looks + 1) * EVERY, compiling


def falling(step):
    """A rate that falls from 0.03 to 0 along a cosine."""
    return 0.015 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / STEPS, 1.0)))


curves = {"SVI, rate 0.01": svi_curve(0.01), "SVI, rate 0.03 to 0": svi_curve(falling)}

begun = time.perf_counter()
state, _ = pvi.update(pvi.init(random.key(0), X, y), X, y)
jax.block_until_ready(state)
compiling = time.perf_counter() - begun
rounds = 10
curve = clocked(lambda: pvi.init(random.key(0), X, y), lambda s: pvi.update(s, X, y)[0], pvi.get_params, rounds)
# A pass is one look of every group at its rows; groups send one message for each.
trace = pvi.run(random.key(0), rounds, X, y, progress_bar=False).trace
passes = np.concatenate([[0], trace.messages[:, 0] / 10])
curves["PVI, ten groups"] = curve, passes, compiling

# %%
best = max(curve[:, 1].max() for curve, _, _ in curves.values())
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
for (name, (curve, passes, _)), marker in zip(curves.items(), ("", "", "o"), strict=True):
    below = np.where(curve[:, 1] < best, best - curve[:, 1], np.nan)
    left.plot(curve[:, 0], below, marker=marker, markersize=4)
    right.plot(passes, below, marker=marker, markersize=4, label=name)
left.set(yscale="log", xlabel="seconds, once compiled", ylabel="ELBO below the best (nats)", xscale="log")
right.set(xlabel="passes over the data", xscale="symlog", xlim=(0, None))
for axis in (left, right):
    axis.axhline(0.1, color="0.7", linewidth=0.8, zorder=0)
_ = right.legend()

# %%
for name, (curve, passes, compiling) in curves.items():
    close = np.flatnonzero(best - curve[:, 1] < 0.1)
    reached = f"{curve[close[0], 0]:6.2f} s, {passes[close[0]]:5.0f} passes" if close.size else "not reached"
    print(f"{name:20s} within 0.1 nats of the best: {reached};  first call, with compiling: {compiling:.1f} s")

# %% [markdown]
# The grey line is a tenth of a nat, below which two posteriors are the same for every practical purpose. SVI takes
# one draw of $q$ a step, so that with a fixed rate its last steps keep shaking. A rate that falls to zero settles, if
# one knows beforehand how many steps there will be. PVI takes expectations by quadrature here, and every round solves
# for the site that a group asks for: it ends at the optimum itself, and there is no rate to choose.
#
# What PVI pays is the time before its first point: it looks at the model to find out how to split it, finds that rows
# depend on the latents through one affine predictor, and reads the rows a few times for a start (these looks are in
# the seconds, not in the passes). That, and compiling more than one program, is also most of the first call.
#
# ## Everything after the fit is the same

# %%
result = pvi.run(random.key(0), 30, X, y, tol=1e-3, progress_bar=False)
params, state, losses = result  # unpacks like SVI's result
predictions = Predictive(pvi.guide, params=params, num_samples=200)(random.key(1), X[:5])
print({name: values.shape for name, values in predictions.items()})
print(result.message)

# %% [markdown]
# And there is more in the state than in SVI's, because there is a site for every group:

# %%
axes = export.plot_influence(pvi, state, {"w": range(8)})
axes.figure.set_size_inches(7, 3.8)

# %% [markdown]
# These are ten random blocks of rows, all alike, so no one of them matters much: a shift of half a standard deviation
# from a tenth of the data is what chance does.
#
# ## What to try next
#
# - Groups that mean something: {doc}`hospitals`.
# - Eight models after NumPyro's examples, each by both: {doc}`gallery`, {doc}`gallery_pooling` and
#   {doc}`gallery_latents`.
# - When the defaults are not the right choice: {doc}`../choosing`.
