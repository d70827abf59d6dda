"""``vmp``: rounds of a mixture and of LDA beside textbook coordinate ascent in NumPy, and a message beside NC-VMP's; float64.

No figure depends on the machine's speed, but the seconds of a round.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import integrate, special, stats

from benchmarks import _report
from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import CategoricalFamily
from numpyro_pvi.sites import posterior
from numpyro_pvi.solvers import NaturalGradient

# Largest relative difference of any parameter in any round that counts as rounding.
ROUNDING = 1e-8
KEYS, DRAWS = 40, 400


def mixture(x: Any, components: int) -> None:
    """Bishop's mixture of Gaussians, means and precisions independent under the prior."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(components)))
    with numpyro.plate("components", components):
        mean = numpyro.sample("mean", dist.MultivariateNormal(jnp.zeros(2), 25.0 * jnp.eye(2)))
        precision = numpyro.sample("precision", dist.Wishart(4.0, jnp.eye(2)))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("x", dist.MultivariateNormal(mean[z], precision_matrix=precision[z]), obs=x)


def textbook_mixture(x: np.ndarray, params: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Responsibilities, weights, means, precisions in turn (Bishop, 2006, section 10.2)."""
    alpha, loc = params["weights_auto_concentration"], params["mean_auto_loc"]
    root = params["mean_auto_scale_tril"]
    covariance = root @ np.swapaxes(root, 1, 2)
    nu, root = params["precision_auto_concentration"], params["precision_auto_scale_tril"]
    scale = root @ np.swapaxes(root, 1, 2)
    while True:
        log_det = special.digamma((nu[:, None] - np.arange(2)) / 2).sum(axis=1) + 2 * np.log(2)
        log_det = log_det + np.linalg.slogdet(scale)[1]
        apart = x[:, None] - loc
        square = np.einsum("nki,kij,nkj->nk", apart, scale, apart) + np.einsum("kij,kji->k", scale, covariance)
        r = special.softmax(special.digamma(alpha) + 0.5 * log_det - 0.5 * nu * square, axis=1)
        count = r.sum(axis=0)
        alpha = 1 + count
        precision = nu[:, None, None] * scale
        covariance = np.linalg.inv(np.eye(2) / 25 + count[:, None, None] * precision)
        loc = np.einsum("kij,kjl,kl->ki", covariance, precision, r.T @ x)
        apart = x[:, None] - loc
        scatter = np.einsum("nk,nki,nkj->kij", r, apart, apart) + count[:, None, None] * covariance
        nu, scale = 4 + count, np.linalg.inv(np.eye(2) + scatter)
        yield {
            "weights_auto_concentration": alpha,
            "mean_auto_loc": loc,
            "mean_auto_scale_tril": np.linalg.cholesky(covariance),
            "precision_auto_concentration": nu,
            "precision_auto_scale_tril": np.linalg.cholesky(scale),
        }


def lda(corpus: Any, topics: int, vocabulary: int) -> None:
    """Latent Dirichlet allocation, all words of a document in one row."""
    with numpyro.plate("topics", topics):
        topic = numpyro.sample("topic", dist.Dirichlet(jnp.full(vocabulary, 0.1)))
    with numpyro.plate("documents", corpus.shape[0], dim=-2):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(topics, 0.5)))
        with numpyro.plate("words", corpus.shape[1], dim=-1):
            z = numpyro.sample("z", dist.Categorical(shares))
            numpyro.sample("word", dist.Categorical(topic[z]), obs=corpus)


def textbook_lda(corpus: np.ndarray, params: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Words' topics, shares, topics in turn (Blei, Ng and Jordan, 2003, figure 6; Hoffman et al., 2013, figure 5)."""
    gamma, lam = params["shares_auto_concentration"][:, 0], params["topic_auto_concentration"]
    one_hot = np.eye(lam.shape[1])[corpus]
    while True:
        log_topic = special.digamma(lam) - special.digamma(lam.sum(axis=1, keepdims=True))
        phi = special.softmax(special.digamma(gamma)[:, None] + log_topic.T[corpus], axis=2)
        gamma = 0.5 + phi.sum(axis=1)
        lam = 0.1 + np.einsum("dlk,dlv->kv", phi, one_hot)
        yield {"shares_auto_concentration": gamma[:, None], "topic_auto_concentration": lam}


def generate_corpus(documents: int, words: int, topics: int, vocabulary: int) -> np.ndarray:
    """Words drawn from the model."""
    rng = np.random.default_rng(0)
    topic = rng.dirichlet(np.full(vocabulary, 0.1), topics)
    shares = rng.dirichlet(np.full(topics, 0.5), documents)
    return np.stack([[rng.choice(vocabulary, p=topic[rng.choice(topics, p=s)]) for _ in range(words)] for s in shares])


def compare(
    model: Callable,
    plate: str,
    data: tuple,
    sizes: tuple[int, ...],
    textbook: Callable[..., Iterator[dict[str, np.ndarray]]],
    blocks: tuple[str, ...],
    away: dict[str, np.ndarray],
    groups: int,
    rounds: int,
) -> tuple[float, float, float]:
    """Largest relative difference over all rounds and parameters, the last round's loss, and seconds of a round."""
    guide = AutoExponentialFamily(model, families={"z": CategoricalFamily(sizes[0])})
    pvi = PVI(Partition(model, plate, groups), guide, solver=NaturalGradient(blocks=blocks))
    arguments = (*map(jnp.asarray, data), *sizes)
    # The start has been fitted a little: this puts q where there is more to do.
    state = pvi.init(jax.random.key(0), *arguments, init_params={n: jnp.asarray(x) for n, x in away.items()})
    book = textbook(*data, {n: np.asarray(x) for n, x in pvi.get_params(state).items()})
    worst, loss, times = 0.0, np.nan, []
    for _ in range(rounds):
        start = time.perf_counter()
        state, loss = pvi.update(state, *arguments)
        jax.block_until_ready(loss)
        times.append(time.perf_counter() - start)
        found, wanted = pvi.get_params(state), next(book)
        for name, x in wanted.items():
            worst = max(worst, float(np.max(np.abs(np.asarray(found[name]) - x)) / np.max(np.abs(x))))
    return worst, float(loss), float(np.median(times))


def shape_model(y: Any) -> None:
    """Gamma observations of unknown shape: not conjugate (Khan and Lin, appendix E.3)."""
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, 1.0), obs=y)


def nonconjugate(y: np.ndarray) -> np.ndarray:
    """NC-VMP's message to the shape from its prior, ``Cov(T)^-1 Cov(T, log f)``, by quadrature (Knowles and Minka, 2011, eq. 6)."""
    q = stats.gamma(2.0)

    def factor(s: float) -> float:
        return float(((s - 1) * np.log(y) - y - special.gammaln(s)).sum())

    def mean(function: Callable[[float], float]) -> float:
        return integrate.quad(lambda s: q.pdf(s) * function(s), 0, 60, limit=400, points=[0.1, 2.0, 8.0])[0]

    statistics: tuple[Callable[[float], float], ...] = (np.log, lambda s: -s)
    means, level = [mean(t) for t in statistics], mean(factor)
    covariance = [
        [mean(lambda s, t=t, u=u, a=a, b=b: (t(s) - a) * (u(s) - b)) for u, b in zip(statistics, means, strict=True)]
        for t, a in zip(statistics, means, strict=True)
    ]
    slope = [mean(lambda s, t=t, a=a: (t(s) - a) * (factor(s) - level)) for t, a in zip(statistics, means, strict=True)]
    return np.linalg.solve(np.asarray(covariance), np.asarray(slope))


def messages(y: np.ndarray, keys: int, draws: int) -> np.ndarray:
    """What the factor's draws ask of its site at the prior, one row per key."""
    solver = NaturalGradient(num_draws=draws)
    guide = AutoExponentialFamily(shape_model)
    pvi = PVI(Partition(shape_model, "data", 1), guide, solver=solver, init_sites="prior")
    arrays = (jnp.asarray(y),)
    state = pvi.init(jax.random.key(0), *arrays)

    @jax.jit
    def one(key: Any) -> Any:
        # Before the round shortens a step that would take q further than it may go at once.
        problem = pvi._engine.problem(state, arrays, {})
        found = problem.group_messages(posterior(state.prior, state.sites), key).groups.parts["shape"]
        return jnp.stack([found.log[0], found.rate[0]])

    return np.stack([np.asarray(one(jax.random.key(seed))) for seed in range(keys)])


def run(options: argparse.Namespace) -> _report.Report:
    """Both models at one group and several, and the message of a factor that is not conjugate."""
    report = _report.Report("vmp")
    rows, documents, rounds = (24, 6, 3) if options.quick else (300, 60, 25)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = rng.choice([-4.0, 0.0, 4.0], (rows, 1)) * [1.0, 0.5] + rng.normal(size=(rows, 2))
        corpus = generate_corpus(documents, 4 if options.quick else 30, 3, 6 if options.quick else 50)
        vocabulary = int(corpus.max()) + 1
        far = {"mean_auto_loc": rng.normal(size=(3, 2)), "precision_auto_concentration": rng.uniform(3, 9, 3)}
        counts = {"topic_auto_concentration": rng.uniform(0.5, 2.0, (3, vocabulary))}
        counts |= {"shares_auto_concentration": rng.uniform(0.5, 2.0, (documents, 1, 3))}
        order, other = ("z", "weights", "mean", "precision"), ("z", "shares", "topic")
        cases = {
            "mixture": (mixture, "data", (x,), (3,), textbook_mixture, order, far),
            "LDA": (lda, "documents", (corpus,), (3, vocabulary), textbook_lda, other, counts),
        }
        table = []
        for name, case in cases.items():
            for groups in (1,) if options.quick else (1, 4):
                worst, loss, seconds = compare(*case, groups, rounds)
                table.append((name, groups, rounds, f"{worst:.1e}", f"{-loss:.4f}", f"{1e3 * seconds:.1f}"))
                report.add_target(f"{name}, {groups} group(s): largest relative difference", worst, ROUNDING)
        header = ("model", "groups", "rounds", "largest relative difference", "ELBO at the end", "ms a round")
        report.add_table("iterates beside textbook coordinate ascent, step 1, float64", header, table)
        y = np.random.default_rng(3).gamma(3.0, 1.0, size=20)
        wanted, found = nonconjugate(y), messages(y, 3 if options.quick else KEYS, DRAWS)
        error = found.std(axis=0, ddof=1) / len(found) ** 0.5
        table = [
            (name, float(w), float(f), float(e))
            for name, w, f, e in zip(("log s", "-s"), wanted, found.mean(axis=0), error, strict=True)
        ]
        report.add_table("message to a gamma shape at step 1", ("statistic", "NC-VMP", "here", "standard error"), table)
        apart = np.max(np.abs(found.mean(axis=0) - wanted) / error)
        report.add_target("NC-VMP against the mean message, standard errors", float(apart), 4.0)
    return report
