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
# # Topics
#
# **What are documents about, if two libraries may not show each other theirs?**
#
# Latent Dirichlet allocation: a document has shares of topics, each word has a topic of its own, and a topic is a
# distribution over words. Forty documents of thirty words (simulated), from three topics of five words each, with five
# per cent of noise, are split over two libraries. `AutoExponentialFamily` holds every latent in the family of its
# prior, so that all messages are in closed form.

# %% tags=["hide-input"]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import CategoricalFamily

rng = np.random.default_rng(0)
words = np.array(
    [
        "river",
        "rain",
        "delta",
        "ice",
        "flood",
        "flour",
        "oven",
        "salt",
        "yeast",
        "sugar",
        "chord",
        "drum",
        "choir",
        "tempo",
        "flute",
    ]
)
true_shares = rng.dirichlet(np.full(3, 0.3), 40)
topic_of_word = np.stack([rng.choice(3, 30, p=share) for share in true_shares])
corpus = 5 * topic_of_word + rng.integers(0, 5, (40, 30))
corpus = np.where(rng.random((40, 30)) < 0.05, rng.integers(0, 15, (40, 30)), corpus)


# %%
def topics(corpus):
    with numpyro.plate("topics", 3):
        topic = numpyro.sample("topic", dist.Dirichlet(jnp.full(15, 0.2)))
    with numpyro.plate("documents", corpus.shape[0], dim=-2):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(3, 0.3)))
        with numpyro.plate("words", corpus.shape[1], dim=-1):
            z = numpyro.sample("z", dist.Categorical(shares))
            numpyro.sample("word", dist.Categorical(topic[z]), obs=corpus)


by_topic = PVI(Partition(topics, "documents", 2), AutoExponentialFamily(topics, families={"z": CategoricalFamily(3)}))
read = by_topic.run(jax.random.key(0), 200, jnp.asarray(corpus), tol=1e-2, progress_bar=False)
topic = np.asarray(by_topic.posterior(read.state)["topic"].mean)
shares = np.asarray(by_topic.posterior(read.state)["shares"].mean).reshape(40, 3)

# %% tags=["hide-input"]
order = np.argsort(np.argmax(topic.reshape(3, 3, 5).sum(-1), axis=1))  # by the block of words that each has most of
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1.4, 1), layout="constrained")
image = left.imshow(topic[order], cmap="Blues", aspect="auto", vmin=0)
left.set_xticks(range(15), words, rotation=60, ha="right")
left.set_yticks(range(3), [f"topic {k + 1}" for k in range(3)])
figure.colorbar(image, ax=left, label="probability")
sort = np.lexsort(shares[:, order].T)
bottom = np.zeros(40)
for k in range(3):
    right.bar(range(40), shares[sort][:, order[k]], bottom=bottom, width=1.0, label=f"topic {k + 1}")
    bottom += shares[sort][:, order[k]]
right.set(xlabel="documents", ylabel="shares of topics", xlim=(-0.5, 39.5), ylim=(0, 1))
_ = right.legend(fontsize="small", loc="lower right")

# %% [markdown]
# Each topic's words are found, up to the order of the topics, which means nothing. Shares belong to their documents:
# they are latents inside the partitioned plate and never leave their group.
#
# ## What to try next
#
# - A mixture, and rates: {doc}`families`.
# - Every family, and what happens where a model is *not* conjugate: {doc}`../families`.
