"""Rounds with latents inside the partitioned plate are textbook variational message passing, iterate by iterate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import BernoulliFamily, CategoricalFamily
from numpyro_pvi.runtime import LaxMap
from numpyro_pvi.schedules import Sequential
from numpyro_pvi.solvers import NaturalGradient

KEY = jax.random.key(0)
# Rounding of a few hundred operations.
TIGHT = {"float32": 1e-3, "float64": 1e-9}[jnp.result_type(float).name]
RNG = np.random.default_rng(0)
X = np.concatenate([RNG.normal(-3.0, 0.7, 8), RNG.normal(2.0, 0.5, 10)])
COMPONENTS = 2


def mixture(x):
    """A mixture of normals: means, precisions and weights unknown."""
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(COMPONENTS)))
    with numpyro.plate("components", COMPONENTS):
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(w))
        numpyro.sample("x", dist.Normal(mu[z], 1 / jnp.sqrt(tau[z])), obs=x)


class TextbookMixture:
    """Coordinate ascent by hand (Bishop, section 10.2, with means and precisions independent under q), one block at a time."""

    def __init__(self, params):
        self.r = np.asarray(special.softmax(params["z_auto_logits"], axis=-1), float)
        self.alpha = np.asarray(params["w_auto_concentration"], float)
        self.loc, self.var = np.asarray(params["mu_auto_loc"], float), np.asarray(params["mu_auto_scale"], float) ** 2
        self.a = np.asarray(params["tau_auto_concentration"], float)
        self.b = np.asarray(params["tau_auto_rate"], float)

    @property
    def square(self):
        """E (x_n - mu_k)^2."""
        return (X[:, None] - self.loc) ** 2 + self.var

    def w(self):
        self.alpha = 1 + self.r.sum(axis=0)

    def mu(self):
        tau = self.a / self.b
        self.var = 1 / (1 / 25 + tau * self.r.sum(axis=0))
        self.loc = self.var * tau * (self.r * X[:, None]).sum(axis=0)

    def tau(self):
        self.a, self.b = 2 + 0.5 * self.r.sum(axis=0), 1 + 0.5 * (self.r * self.square).sum(axis=0)

    def log_rho(self):
        log_w = special.digamma(self.alpha) - special.digamma(self.alpha.sum())
        log_tau = special.digamma(self.a) - np.log(self.b)
        return log_w + 0.5 * log_tau - 0.5 * self.a / self.b * self.square - 0.5 * np.log(2 * np.pi)

    def z(self):
        self.r = special.softmax(self.log_rho(), axis=-1)

    def elbo(self):
        """E log p(x, z) + H(z) - KL of the other three blocks, all written out."""
        found = (self.r * self.log_rho()).sum() - special.xlogy(self.r, self.r).sum()
        found -= kl_dirichlet(self.alpha, np.ones(COMPONENTS))
        found -= 0.5 * ((self.var + self.loc**2) / 25 - 1 - np.log(self.var / 25)).sum()
        log_tau, tau = special.digamma(self.a) - np.log(self.b), self.a / self.b
        log_q = self.a * np.log(self.b) - special.gammaln(self.a) + (self.a - 1) * log_tau - self.b * tau
        return found - (log_q - (log_tau - tau)).sum()

    def matches(self, params):
        for name, wanted in {
            "w_auto_concentration": self.alpha,
            "mu_auto_loc": self.loc,
            "mu_auto_scale": self.var**0.5,
            "tau_auto_concentration": self.a,
            "tau_auto_rate": self.b,
        }.items():
            np.testing.assert_allclose(params[name], wanted, rtol=TIGHT, atol=TIGHT, err_msg=name)
        np.testing.assert_allclose(jax.nn.softmax(params["z_auto_logits"]), self.r, atol=TIGHT)


def kl_dirichlet(a, b):
    found = special.gammaln(a.sum()) - special.gammaln(b.sum()) - (special.gammaln(a) - special.gammaln(b)).sum()
    return found + ((a - b) * (special.digamma(a) - special.digamma(a.sum()))).sum()


@functools.cache
def begun():
    guide = AutoExponentialFamily(mixture, families={"z": CategoricalFamily(COMPONENTS)})
    pvi = PVI(Partition(mixture, "data", ["a"] * 5 + ["b"] * 13), guide)
    return pvi, pvi.init(KEY, jnp.asarray(X))


# Where q is put so that nothing has converged yet.
AWAY = {"mu_auto_loc": jnp.array([-1.0, 0.5]), "tau_auto_rate": jnp.array([3.0, 9.0])}


def rounds_are(pvi, state, order):
    params = pvi.get_params(state)
    book, losses = TextbookMixture(params), []
    for _ in range(4):
        state, loss = pvi.update(state, jnp.asarray(X))
        for block in order:
            getattr(book, block)()
        book.matches(pvi.get_params(state))
        losses.append(float(loss))
        np.testing.assert_allclose(-loss, book.elbo(), rtol=TIGHT)
    assert losses == sorted(losses, reverse=True)
    return state


def test_rounds_are_coordinate_ascent_of_a_mixture():
    pvi, start = begun()
    state = rounds_are(pvi, pvi._fit.at_params(pvi, start, AWAY), ("w", "mu", "tau", "z"))
    assert pvi.info(state).structure == ("conjugate in mu, tau, w, z",) * 2
    assert pvi.info(state).expectation == ("closed form",) * 2


def own_rows(pvi, state):
    """Law 1 inside the plate: a group's site has terms in its own rows' members, and they add up to q with the prior."""
    logits = np.stack([np.asarray(pvi.site(state, g).natural.parts["z"].logits) for g in pvi.groups])
    assert np.all(logits[0, 5:] == 0)
    assert np.all(logits[1, :5] == 0)
    assert np.all(np.ptp(logits[0, :5], axis=-1) > 0)
    assert np.all(np.ptp(logits[1, 5:], axis=-1) > 0)


def test_sites_hold_their_own_rows():
    pvi, start = begun()
    state, _ = pvi.update(start, jnp.asarray(X))
    own_rows(pvi, start)
    own_rows(pvi, state)
    q = jax.nn.softmax(state.sites.local.parts["z"].logits)
    np.testing.assert_allclose(pvi.posterior(state)["z"].probs, q, atol=TIGHT)


@pytest.mark.once
def test_the_start_tells_the_components_apart_and_fits_well():
    """From the defaults: no worse than the best of many textbook runs from random responsibilities."""
    pvi, state = begun()
    assert float(jnp.ptp(pvi.get_params(state)["mu_auto_loc"])) > 0.5
    for _ in range(25):
        state, loss = pvi.update(state, jnp.asarray(X))
    best, rng, book = -np.inf, np.random.default_rng(1), TextbookMixture(pvi.get_params(state))
    for _ in range(20):
        book.r = rng.dirichlet(np.ones(COMPONENTS), len(X))
        book.a, book.b = np.full(COMPONENTS, 2.0), np.ones(COMPONENTS)
        for _ in range(60):
            for block in ("w", "mu", "tau", "z"):
                getattr(book, block)()
        best = max(best, book.elbo())
    assert -float(loss) > best - 0.01
    np.testing.assert_allclose(np.sort(pvi.posterior(state)["mu"].mean), [X[:8].mean(), X[8:].mean()], atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [("z", "w", "mu", "tau"), ("tau", "z")])
def test_blocks_choose_the_textbooks_order(blocks):
    """Expectation before maximisation, and any other order, from where a user puts q."""
    first, _ = begun()
    pvi = PVI(first.partition, first.guide, solver=NaturalGradient(blocks=blocks))
    state = pvi.init(KEY, jnp.asarray(X), init_params=AWAY)
    np.testing.assert_allclose(pvi.get_params(state)["tau_auto_rate"], AWAY["tau_auto_rate"], rtol=TIGHT)
    rounds_are(pvi, state, (*blocks, *(b for b in ("w", "mu", "tau", "z") if b not in blocks)))


# --------------------------------------------------------------------------------------------------------------- LDA

TOPICS, VOCABULARY = 2, 5
DOCUMENTS = np.array([[0, 0, 1, 1], [3, 4, 4, 3], [0, 1, 4, 0], [3, 3, 4, 2], [1, 0, 1, 2], [4, 2, 3, 4]])


def lda(documents):
    """Latent Dirichlet allocation: a document's topic shares and its words' topics belong to the document."""
    with numpyro.plate("topics", TOPICS):
        beta = numpyro.sample("beta", dist.Dirichlet(0.5 * jnp.ones(VOCABULARY)))
    with numpyro.plate("documents", documents.shape[0], dim=-2):
        theta = numpyro.sample("theta", dist.Dirichlet(0.8 * jnp.ones(TOPICS)))
        with numpyro.plate("words", documents.shape[1], dim=-1):
            z = numpyro.sample("z", dist.Categorical(theta))
            numpyro.sample("word", dist.Categorical(beta[z]), obs=documents)


def expected_log(a):
    return special.digamma(a) - special.digamma(a.sum(axis=-1, keepdims=True))


def textbook_lda(params, rounds):
    """Blei, Ng and Jordan's updates (Hoffman et al., figure 5 with step 1): topics, shares, words' topics, ELBO."""
    gamma, r = np.asarray(params["theta_auto_concentration"], float)[:, 0], None
    r = special.softmax(np.asarray(params["z_auto_logits"], float), axis=-1)
    one_hot = np.eye(VOCABULARY)[DOCUMENTS]
    for _ in range(rounds):
        lam = 0.5 + np.einsum("dlk,dlv->kv", r, one_hot)
        gamma = 0.8 + r.sum(axis=1)
        log_rho = expected_log(gamma)[:, None] + expected_log(lam).T[DOCUMENTS]
        r = special.softmax(log_rho, axis=-1)
        elbo = (r * log_rho).sum() - special.xlogy(r, r).sum()
        elbo -= sum(kl_dirichlet(a, np.full(VOCABULARY, 0.5)) for a in lam)
        elbo -= sum(kl_dirichlet(a, np.full(TOPICS, 0.8)) for a in gamma)
        yield lam, gamma, r, elbo


LDA_GROUPS = {1: 1, "two": ["x", "y"] * 3}


@functools.cache
def lda_begun(groups):
    guide = AutoExponentialFamily(lda, families={"z": CategoricalFamily(TOPICS)})
    pvi = PVI(Partition(lda, "documents", LDA_GROUPS[groups]), guide)
    return pvi, pvi.init(KEY, jnp.asarray(DOCUMENTS))


@pytest.mark.parametrize("groups", ["two", pytest.param(1, marks=pytest.mark.slow)])
def test_rounds_are_coordinate_ascent_of_lda(groups):
    pvi, state = lda_begun(groups)
    away = {"theta_auto_concentration": jnp.asarray(RNG.uniform(0.5, 3.0, (6, 1, TOPICS)), jnp.result_type(float))}
    state = pvi._fit.at_params(pvi, state, away)
    for lam, gamma, r, elbo in textbook_lda(pvi.get_params(state), 4):
        state, loss = pvi.update(state, jnp.asarray(DOCUMENTS))
        params = pvi.get_params(state)
        np.testing.assert_allclose(params["beta_auto_concentration"], lam, rtol=TIGHT)
        np.testing.assert_allclose(params["theta_auto_concentration"][:, 0], gamma, rtol=TIGHT)
        np.testing.assert_allclose(jax.nn.softmax(params["z_auto_logits"]), r, atol=TIGHT)
        np.testing.assert_allclose(-loss, elbo, rtol=TIGHT)


# ------------------------------------------------------------------------------------------- principal components

TABLE = RNG.normal(size=(6, 2)) @ RNG.normal(size=(2, 3)) + 0.3 * RNG.normal(size=(6, 3))


def pca(x):
    """Probabilistic principal components: the scores are continuous latents inside the plate."""
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    columns = numpyro.plate("columns", x.shape[1], dim=-1)
    with columns:
        loading = numpyro.sample("loading", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    with numpyro.plate("rows", x.shape[0], dim=-2):
        score = numpyro.sample("score", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
        with columns:
            numpyro.sample("x", dist.Normal(jnp.sum(score * loading, axis=-1), 1 / jnp.sqrt(tau)), obs=x)


def textbook_pca(params, rounds):
    """Precision of the noise, loadings, scores in turn (Bishop, Variational principal components, 1999, equations 17 to 20)."""

    def gaussian(name):
        root = np.asarray(params[f"{name}_auto_scale_tril"], float)
        return np.asarray(params[f"{name}_auto_loc"], float).reshape(-1, 2), (root @ np.swapaxes(root, -1, -2)).reshape(
            -1, 2, 2
        )

    (loading, v), (score, u) = gaussian("loading"), gaussian("score")
    for _ in range(rounds):
        second, other = v + np.einsum("di,dj->dij", loading, loading), u + np.einsum("ni,nj->nij", score, score)
        square = (TABLE**2 - 2 * TABLE * (score @ loading.T)).sum() + np.einsum("dij,nij->", second, other)
        a, b = 1 + TABLE.size / 2, 1 + 0.5 * square
        v = np.broadcast_to(np.linalg.inv(np.eye(2) + a / b * other.sum(axis=0)), (3, 2, 2))
        loading = np.einsum("dij,dj->di", v, a / b * TABLE.T @ score)
        second = v + np.einsum("di,dj->dij", loading, loading)
        u = np.broadcast_to(np.linalg.inv(np.eye(2) + a / b * second.sum(axis=0)), (6, 2, 2))
        score = np.einsum("nij,nj->ni", u, a / b * TABLE @ loading)
        yield a, b, loading, v, score, u


@pytest.mark.slow
def test_rounds_are_coordinate_ascent_of_principal_components():
    pvi = PVI(Partition(pca, "rows", ["a", "b", "b"] * 2), AutoExponentialFamily(pca))
    state = pvi.init(KEY, jnp.asarray(TABLE))
    assert pvi.info(state).expectation == ("closed form",) * 2
    for a, b, loading, v, score, u in textbook_pca(pvi.get_params(state), 4):
        state, _ = pvi.update(state, jnp.asarray(TABLE))
        params = pvi.get_params(state)
        np.testing.assert_allclose(params["tau_auto_concentration"], a, rtol=TIGHT)
        np.testing.assert_allclose(params["tau_auto_rate"], b, rtol=TIGHT)
        np.testing.assert_allclose(params["loading_auto_loc"], loading, rtol=10 * TIGHT, atol=10 * TIGHT)
        np.testing.assert_allclose(params["loading_auto_scale_tril"], np.linalg.cholesky(v), rtol=TIGHT, atol=TIGHT)
        np.testing.assert_allclose(params["score_auto_loc"][:, 0], score, rtol=10 * TIGHT, atol=10 * TIGHT)
        np.testing.assert_allclose(params["score_auto_scale_tril"][:, 0], np.linalg.cholesky(u), rtol=TIGHT, atol=TIGHT)


# --------------------------------------------------------------------------------------------- other ways to the same


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["index", "mask"])
def test_every_mechanism_gives_the_same_rounds(mode):
    """Rows by the plate's indices, and all rows masked, in several chunks per group."""

    def indexed(x):
        w = numpyro.sample("w", dist.Dirichlet(jnp.ones(COMPONENTS)))
        with numpyro.plate("components", COMPONENTS):
            mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
            tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        with numpyro.plate("data", x.shape[0]) as i:
            z = numpyro.sample("z", dist.Categorical(w))
            numpyro.sample("x", dist.Normal(mu[z], 1 / jnp.sqrt(tau[z])), obs=x[i])

    guide = AutoExponentialFamily(indexed, families={"z": CategoricalFamily(COMPONENTS)})
    split = Partition(indexed, "data", ["a"] * 5 + ["b"] * 13, mode=mode, chunk_size=1)
    pvi = PVI(split, guide, runtime=LaxMap())
    rounds_are(pvi, pvi.init(KEY, jnp.asarray(X), init_params=AWAY), ("w", "mu", "tau", "z"))


@pytest.mark.slow
def test_groups_in_turn_end_where_they_end_together():
    """A visit moves q for stale sites of the other group, which is no coordinate ascent: the guard may refuse the last steps."""
    first, start = begun()
    pvi = PVI(first.partition, first.guide, schedule=Sequential())
    # What schedules remember is their own.
    fields = pvi._engine.unvisited(start, start.report.move.dtype, None, (X,))
    other = dataclasses.replace(start, **fields)
    for _ in range(40):
        start, loss = first.update(start, jnp.asarray(X))
        other, last = pvi.update(other, jnp.asarray(X))
    own_rows(first, other)
    np.testing.assert_allclose(last, loss, rtol=max(TIGHT, 1e-7))
    np.testing.assert_allclose(pvi.posterior(other)["mu"].mean, first.posterior(start)["mu"].mean, atol=1e-3)


def switched(y):
    """A discrete latent that all rows share, and one normal latent."""
    s = numpyro.sample("s", dist.Bernoulli(0.3))
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(m + s, 2.0), obs=y)


@pytest.mark.slow
def test_a_shared_discrete_latent_is_summed_over():
    y = jnp.asarray(X[8:])
    pvi = PVI(Partition(switched, "data", 2), AutoExponentialFamily(switched, families={"s": BernoulliFamily()}))
    state = pvi.init(KEY, y)
    for _ in range(200):
        state, _ = pvi.update(state, y)
    p = 0.3
    for _ in range(400):
        mean = (np.asarray(y) - p).sum() / 4 / (1 + 10 / 4)
        p = special.expit(special.logit(0.3) + ((np.asarray(y) - mean).sum() - 5) / 4)
    found = pvi.posterior(state)
    np.testing.assert_allclose(found["m"].mean, mean, rtol=TIGHT)
    np.testing.assert_allclose(found["s"].mean, p, rtol=TIGHT)


# ------------------------------------------------------------------------------------------------------------ mutants


def test_the_law_sees_another_order():
    pvi, start = begun()
    with pytest.raises(AssertionError):
        rounds_are(pvi, pvi._fit.at_params(pvi, start, AWAY), ("z", "w", "mu", "tau"))


@pytest.mark.parametrize("fault", ["swapped", "shared"])
def test_own_rows_sees_terms_in_other_groups_rows(fault):
    pvi, state = begun()
    own = state.plan.partition.table.index_of_row
    other = own[::-1] if fault == "swapped" else np.zeros_like(own)
    table = dataclasses.replace(state.plan.partition.table, index_of_row=other)
    partition = dataclasses.replace(state.plan.partition, table=table)
    plan = dataclasses.replace(state.plan, partition=partition)
    with pytest.raises(AssertionError):
        own_rows(pvi, dataclasses.replace(state, plan=plan))


def test_the_law_sees_a_row_without_weight():
    pvi, start = begun()
    own = jax.tree.map(lambda x: x.at[9].set(0.0), start.sites.local)
    book = TextbookMixture(pvi.get_params(start))
    broken = dataclasses.replace(start, sites=dataclasses.replace(start.sites, local=own))
    with pytest.raises(AssertionError):
        book.matches(pvi.get_params(broken))
