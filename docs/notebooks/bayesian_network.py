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
# # A Bayesian network over ten groups
#
# **Ten people each label digits, and most of them never see all ten. Can one network learn from all of them, and does
# it know what it does not know?**
#
# A network of 64-24-10 on the 8 x 8 digits that ship with scikit-learn: 1,810 weights under a mean-field Gaussian,
# fitted by a local optimiser in every group, on mini-batches of the group's own rows. Every group has three of the
# digits only.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer.autoguide import AutoNormal
from sklearn.datasets import load_digits

from numpyro_pvi import PVI, Partition
from numpyro_pvi.solvers import LocalELBO

rng = np.random.default_rng(0)
digits = load_digits()
order = rng.permutation(len(digits.target))
pixels, digit = jnp.asarray(digits.data[order] / 16.0, jnp.float32), digits.target[order]
X, y, X_test, y_test = pixels[:1_300], jnp.asarray(digit[:1_300]), pixels[1_300:], digit[1_300:]
# Group g has the digits g, g + 1 and g + 2 (modulo ten).
group = (digit[:1_300] - rng.integers(0, 3, 1_300)) % 10
SHAPES = {"w1": (64, 24), "b1": (24,), "w2": (24, 10), "b2": (10,)}


# %%
def network(X, y=None):
    value = {
        name: numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
        for name, shape in SHAPES.items()
    }
    with numpyro.plate("data", X.shape[0]):
        hidden = jax.nn.relu(X @ value["w1"] + value["b1"])
        numpyro.sample("digit", dist.Categorical(logits=hidden @ value["w2"] + value["b2"]), obs=y)


start = {f"{n}_auto_loc": jnp.asarray(0.1 * rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}
start |= {f"{n}_auto_scale": jnp.full(s, 0.1, jnp.float32) for n, s in SHAPES.items()}
solver = LocalELBO(optax.adam(5e-3), epochs=2, batch_size=20)
pvi = PVI(Partition(network, "data", group), AutoNormal(network), solver=solver)


# %% tags=["hide-input"]
@jax.jit
def probabilities(params, X):
    """Class probabilities, averaged over thirty draws of q."""

    def one(key):
        keys = jax.random.split(key, 4)
        value = {
            n: params[f"{n}_auto_loc"] + params[f"{n}_auto_scale"] * jax.random.normal(k, SHAPES[n])
            for n, k in zip(SHAPES, keys, strict=True)
        }
        return jax.nn.softmax(jax.nn.relu(X @ value["w1"] + value["b1"]) @ value["w2"] + value["b2"])

    return jnp.mean(jax.lax.map(one, jax.random.split(jax.random.key(1), 30)), axis=0)


# %%
ROUNDS = 40
state = pvi.init(jax.random.key(0), X, y, init_params=start)
errors = []
for _ in range(ROUNDS):
    state, loss = pvi.update(state, X, y)
    errors.append(float(np.mean(np.argmax(probabilities(pvi.get_params(state), X_test), 1) != y_test)))
params = pvi.get_params(state)

# %% tags=["hide-input"]
found = np.asarray(probabilities(params, X_test))
entropy = -np.sum(found * np.log(np.maximum(found, 1e-12)), axis=1)
unsure = np.argsort(-entropy)[:6]
figure = plt.figure(figsize=(11, 4), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1, 1.3))
axis = left.subplots()
axis.plot(range(1, ROUNDS + 1), errors, ".-")
axis.set(xlabel="rounds", ylabel="test error", yscale="log")
panels = right.subplots(2, 6, height_ratios=(1, 1))
for column, i in enumerate(unsure):
    panels[0, column].imshow(np.asarray(X_test[i]).reshape(8, 8), cmap="Greys")
    panels[0, column].set(xticks=[], yticks=[], title=f"a {y_test[i]}")
    panels[1, column].bar(range(10), found[i], color=["C3" if k == y_test[i] else "0.6" for k in range(10)])
    panels[1, column].set(ylim=(0, 1), yticks=[], xticks=[0, 9])
print(f"test error after {ROUNDS} rounds: {errors[-1]:.3f}")

# %% [markdown]
# Left, the error on 497 digits that nobody has seen. Right, the six that the network is least sure of, with the
# probabilities of all digits; the right one is red.
#
# ## Does it know what it does not know?
#
# Three kinds of pictures: test digits, test digits whose pixels have been shuffled, and noise.

# %%
shuffled = jnp.asarray(np.asarray(X_test)[:, rng.permutation(64)])
noise = jnp.asarray(rng.uniform(0, 1, X_test.shape), jnp.float32)
location_only = {n: jnp.zeros_like(x) if n.endswith("scale") else x for n, x in params.items()}

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for axis, (name, own) in zip(
    axes, {"averaged over q": params, "at q's location only": location_only}.items(), strict=True
):
    for label, pictures in (("digits", X_test), ("shuffled digits", shuffled), ("noise", noise)):
        sure = np.max(np.asarray(probabilities(own, pictures)), axis=1)
        axis.hist(sure, bins=np.linspace(0.1, 1, 25), density=True, histtype="step", linewidth=1.5, label=label)
    axis.set(xlabel="probability of the likeliest digit", title=name)
_ = axes[0].legend(loc="upper right", fontsize="small")

# %% [markdown]
# Averaged over $q$, hardly any noise or shuffled digit gets more than .4, and most digits do. The same network at a
# single setting of its weights is surer of everything, of noise as well.
#
# ## A group on its own
#
# Without the others a group knows three digits. How much do the ten lose by never putting their rows together?

# %%
own_rows = np.asarray(group) == 0
alone = PVI(Partition(network, "data", [0] * int(own_rows.sum())), AutoNormal(network), solver=solver)
by_one = alone.run(jax.random.key(0), 40, X[own_rows], y[own_rows], init_params=start, progress_bar=False)
pooled = PVI(Partition(network, "data", [0] * len(y)), AutoNormal(network), solver=solver)
by_all = pooled.run(jax.random.key(0), 40, X, y, init_params=start, progress_bar=False)
for name, result in (("one group alone", by_one.params), ("ten groups", params), ("all rows in one", by_all.params)):
    wrong = np.mean(np.argmax(probabilities(result, X_test), 1) != y_test)
    print(f"{name:16s} test error {wrong:.3f}")

# %% [markdown]
# One group by itself, a hundred and thirty rows of three digits, learns next to nothing about the ten. Together they
# come close to what all rows in one place give, and no row has been moved.
#
# ## What to try next
#
# - Solvers by local optimisers, and their settings: {doc}`../choosing`.
# - A benchmark of this kind on larger digits: {doc}`../benchmarks`.
# - Groups that come one after another: {doc}`arrivals`.
