"""Latent Dirichlet allocation on a small generated corpus, by variational message passing.

    python examples/topics.py
    python examples/topics.py --documents 60 --words 40

Every document has its own shares of the topics and every word its own topic, both inside the plate of documents, whose
rows are split into groups as for any other model. Prints each topic's likeliest words beside the words it was drawn
from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Int

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import CategoricalFamily

WORDS = (
    ("river", "rain", "delta", "ice", "flood"),
    ("flour", "oven", "salt", "yeast", "sugar"),
    ("chord", "drum", "choir", "tempo", "flute"),
)
VOCABULARY = tuple(word for topic in WORDS for word in topic)


def model(corpus: Int[Array, "D L"], topics: int = 3, vocabulary: int = len(VOCABULARY)) -> None:
    """Topics ~ Dirichlet(0.2) over words, shares ~ Dirichlet(0.3) over topics; one topic per word."""
    with numpyro.plate("topics", topics):
        topic = numpyro.sample("topic", dist.Dirichlet(jnp.full(vocabulary, 0.2)))
    with numpyro.plate("documents", corpus.shape[0], dim=-2):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(topics, 0.3)))
        with numpyro.plate("words", corpus.shape[1], dim=-1):
            z = numpyro.sample("z", dist.Categorical(shares))
            numpyro.sample("word", dist.Categorical(topic[z]), obs=corpus)


def generate(rng: np.random.Generator, documents: int, words: int) -> np.ndarray:
    """Int[D L]: documents of one or two topics, words with a little noise."""
    shares = rng.dirichlet(np.full(len(WORDS), 0.3), documents)
    topic = np.stack([rng.choice(len(WORDS), words, p=share) for share in shares])
    word = len(WORDS[0]) * topic + rng.integers(0, len(WORDS[0]), topic.shape)
    return np.where(rng.random(topic.shape) < 0.05, rng.integers(0, len(VOCABULARY), topic.shape), word)


def fit(corpus: np.ndarray, seed: int, groups: int = 2, rounds: int = 200):
    """The posterior by latent, and the run's result."""
    guide = AutoExponentialFamily(model, families={"z": CategoricalFamily(len(WORDS))})
    pvi = PVI(Partition(model, "documents", groups), guide)
    result = pvi.run(jax.random.key(seed), rounds, jnp.asarray(corpus), tol=1e-2, progress_bar=False)
    return pvi.posterior(result.state), result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = argparse.ArgumentParser(prog="topics.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--words", type=int, default=30, help="words in every document")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    corpus = generate(np.random.default_rng(args.seed), args.documents, args.words)
    found, result = fit(corpus, args.seed)
    print(f"{args.documents} documents; {result.message} ELBO {-float(result.losses[-1]):.2f} nats\n{result.info}\n")
    for k, weights in enumerate(np.asarray(found["topic"].mean)):
        best = [VOCABULARY[i] for i in np.argsort(-weights)[: len(WORDS[0])]]
        overlap, drawn = max((len(set(best) & set(words)), words) for words in WORDS)
        print(f"topic {k}: {' '.join(best)}  ({overlap} of {len(drawn)} as drawn: {' '.join(drawn)})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
