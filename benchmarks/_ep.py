"""``ep-probit`` and ``ep-logistic``: power EP against textbook EP, and against the exact posterior beside VI and Laplace."""

import argparse

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import ndtr
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import optimize, stats
from scipy.special import log_ndtr

from benchmarks import _report
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Synchronous
from numpyro_pvi.solvers import ImportanceMoments, NaturalGradient, PowerEP

PRIOR_SD = 1.0


def _probit(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, PRIOR_SD).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(probs=ndtr(X @ w)), obs=y)


def _logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, PRIOR_SD).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def simulate(num_rows, dim, num_groups, link):
    """Rows sorted by their first covariate, so that groups differ; labels of equal consecutive groups."""
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(num_rows, dim)), rng.normal(size=dim)
    y = (rng.random(num_rows) < link(X @ w)).astype(int)
    order = np.argsort(X[:, 0])
    return X[order], y[order], np.arange(num_rows) * num_groups // num_rows


def _fit(model, data, solver, rounds, seed=0):
    X, y, labels = data
    pvi = PVI(Partition(model, "data", labels), AutoMultivariateNormal(model), solver=solver, schedule=Synchronous())
    result = pvi.run(jax.random.key(seed), rounds, X, y, progress_bar=False)
    scale = np.asarray(result.params["auto_scale_tril"], float)
    return np.asarray(result.params["auto_loc"], float), scale @ scale.T, pvi, result


def textbook_probit(X, y, sweeps):
    """EP with one site per row, rank-one updates of the covariance: its moments and log evidence.

    References:
        Rasmussen and Williams, Gaussian Processes for Machine Learning, algorithm 3.5, for a linear predictor.
    """
    size, dim = X.shape
    sign, tau, nu = 2 * y - 1, np.zeros(size), np.zeros(size)
    covariance, vector = PRIOR_SD**2 * np.eye(dim), np.zeros(dim)
    for _ in range(sweeps):
        for n in range(size):
            image = covariance @ X[n]
            variance, mean = X[n] @ image, image @ vector
            tau_c, nu_c = 1 / variance - tau[n], mean / variance - nu[n]
            m, v = nu_c / tau_c, 1 / tau_c
            z = sign[n] * m / np.sqrt(1 + v)
            ratio = np.exp(stats.norm.logpdf(z) - log_ndtr(z))
            new_v = v - v**2 * ratio / (1 + v) * (z + ratio)
            new_tau = 1 / new_v - tau_c
            new_nu = (m + sign[n] * v * ratio / np.sqrt(1 + v)) / new_v - nu_c
            step = new_tau - tau[n]
            covariance -= np.outer(image, image) * (step / (1 + step * variance))
            vector += X[n] * (new_nu - nu[n])
            tau[n], nu[n] = new_tau, new_nu
        covariance = np.linalg.inv(np.eye(dim) / PRIOR_SD**2 + (X.T * tau) @ X)
        vector = X.T @ nu
    loc = covariance @ vector
    variance, mean = np.einsum("ni,ij,nj->n", X, covariance, X), X @ loc
    v = 1 / (1 / variance - tau)
    m = v * (mean / variance - nu)
    # Every site's constant makes it agree with its factor under the cavity.
    constants = log_ndtr(sign * m / np.sqrt(1 + v))
    constants += 0.5 * np.log(v / variance) + 0.5 * (m**2 / v - mean**2 / variance)
    _, log_det = np.linalg.slogdet(covariance / PRIOR_SD**2)
    return loc, covariance, constants.sum() + 0.5 * vector @ loc + 0.5 * log_det


def probit(options: argparse.Namespace) -> _report.Report:
    """Moments and evidence against textbook EP."""
    report = _report.Report("ep-probit")
    size, dim = (100, 3) if options.quick else (1_000, 5)
    data = simulate(size, dim, 10, stats.norm.cdf)
    loc, covariance, evidence = textbook_probit(*data[:2], sweeps=30)
    with jax.enable_x64(True):
        own, spread, pvi, result = _fit(_probit, data, PowerEP(factors="row"), 40)
        found = float(pvi.log_evidence(result.state, *data[:2]))
    sd = np.sqrt(np.diag(covariance))
    gaps = {
        "mean, sds": np.max(np.abs(own - loc) / sd),
        "covariance, relative": np.max(np.abs(spread - covariance) / np.outer(sd, sd)),
        "log evidence, nats": abs(found - evidence),
    }
    caption = f"linear probit, N = {size:,}, D = {dim}, one site per row in 10 groups, against textbook EP (float64)"
    report.add_table(caption, ("what", "largest difference"), list(gaps.items()))
    for name, gap in gaps.items():
        report.add_target(name, float(gap), 1e-6)
    return report


def reference(X, y, loc, covariance, draws, seed=5):
    """Moments of the exact posterior from draws of a Gaussian near it, in pairs of both signs, reweighted."""
    rng, sign, dim = np.random.default_rng(seed), 2 * y - 1, len(loc)
    root = np.linalg.cholesky(covariance)
    total, first, second, top, block = 0.0, 0.0, 0.0, None, 50_000
    for _ in range(draws // (2 * block)):
        eps = rng.standard_normal((block, dim))
        eps = np.concatenate([eps, -eps])
        theta = loc + eps @ root.T
        logs = -np.logaddexp(0, -(theta @ X.T) * sign).sum(1) - 0.5 * (theta**2).sum(1) / PRIOR_SD**2
        logs += 0.5 * (eps**2).sum(1)
        top = logs.max() if top is None else top
        weights = np.exp(logs - top)
        total, first, second = total + weights.sum(), first + weights @ eps, second + (weights[:, None] * eps).T @ eps
    mean = first / total
    return loc + root @ mean, root @ (second / total - np.outer(mean, mean)) @ root.T


def laplace(X, y):
    """Gaussian at the posterior's mode."""
    sign, dim = 2 * y - 1, X.shape[1]

    def loss(w):
        slope = -sign / (1 + np.exp(sign * (X @ w)))
        return np.logaddexp(0, -(X @ w) * sign).sum() + 0.5 * w @ w / PRIOR_SD**2, X.T @ slope + w / PRIOR_SD**2

    mode = optimize.minimize(loss, np.zeros(dim), jac=True, method="BFGS", options={"gtol": 1e-8}).x
    p = 1 / (1 + np.exp(-X @ mode))
    return mode, np.linalg.inv((X.T * (p * (1 - p))) @ X + np.eye(dim) / PRIOR_SD**2)


def kl(left, right) -> float:
    """KL(left || right) of Gaussians, nats."""
    precision, gap = np.linalg.inv(right[1]), right[0] - left[0]
    log_dets = [np.linalg.slogdet(c)[1] for c in (left[1], right[1])]
    return 0.5 * (np.trace(precision @ left[1]) + gap @ precision @ gap - len(gap) + log_dets[1] - log_dets[0])


def logistic(options: argparse.Namespace) -> _report.Report:
    """KL from a Gaussian with the exact posterior's moments, over ten seeds of sampled moments, beside VI and Laplace."""
    report = _report.Report("ep-logistic")
    size, draws, seeds, rounds = (80, 200_000, 2, 6) if options.quick else (400, 3_000_000, 10, 30)
    data = simulate(size, 8, 8, lambda u: 1 / (1 + np.exp(-u)))
    variational = _fit(_logistic, data, NaturalGradient(), 30)[:2]
    exact = reference(*data[:2], *variational, draws)
    sampled = PowerEP(moments=ImportanceMoments(num_draws=4096))
    found = sorted(kl(exact, _fit(_logistic, data, sampled, rounds, seed)[:2]) for seed in range(seeds))
    by_rows = kl(exact, _fit(_logistic, data, PowerEP(factors="row"), 30)[:2])
    vi, mode = kl(exact, variational), kl(exact, laplace(*data[:2]))
    rows = [
        (f"EP, 4,096 draws a group a round, {rounds} rounds: median of {seeds} seeds", float(np.median(found))),
        ("the same: best seed", found[0]),
        ("the same: worst seed", found[-1]),
        ("EP, one site per row, by quadrature", by_rows),
        ("variational", vi),
        ("Laplace", mode),
    ]
    caption = f"logistic regression, N = {size}, D = 8, M = 8, sorted by a covariate: KL(exact moments || q), nats"
    report.add_table(f"{caption}; reference of {draws:,} reweighted draws", ("q", "KL"), rows)
    if not options.quick:
        report.add_target("EP, median", float(np.median(found)), 2.0e-4)
        report.add_target("EP, worst", found[-1], 2.5e-4)
        report.add_target("EP, median over variational", float(np.median(found)) / vi, 1.0)
    return report
