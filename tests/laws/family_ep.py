"""Power EP for one or two latents in their own supports, in NumPy and SciPy only: what the package is compared with.

Integrals are Gauss and Legendre's in panels over a coordinate u of each latent; members are found from mean statistics by SciPy's
roots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special


class OneDimension(NamedTuple):
    """A family: x and log |dx/du| of u, statistics of (x, u), and the member of given mean statistics."""

    value: Any
    log_slope: Any
    statistics: Any
    member: Any
    span: tuple[float, float]

    def points(self, panels, nodes):
        """u, and the log weights of an integral over x."""
        at, weights = np.polynomial.legendre.leggauss(nodes)
        edges = np.linspace(*self.span, panels + 1)
        middle, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * np.diff(edges)
        u = (middle[:, None] + half[:, None] * at).ravel()
        return u, np.log((half[:, None] * weights).ravel()) + self.log_slope(u)


def _gamma(moments):
    gap = np.log(-moments[1]) - moments[0]
    log_a = optimize.brentq(lambda s: s - special.digamma(np.exp(s)) - gap, -12, 16, xtol=1e-15, rtol=1e-15)
    return np.array([np.exp(log_a) - 1, np.exp(log_a) / -moments[1]])


def _inverse_gamma(moments):
    # 1/x is a gamma with E log = moments[0].
    found = _gamma(moments)
    return np.array([found[0] + 2, found[1]])


def dirichlet(moments):
    """Concentrations less 1 of E[log x]."""

    def gap(logs):
        a = np.exp(logs)
        return special.digamma(a) - special.digamma(a.sum()) - moments

    # The gap's derivative by hand keeps the root to rounding.
    def slope(logs):
        a = np.exp(logs)
        return (np.diag(special.polygamma(1, a)) - special.polygamma(1, a.sum())) * a

    return np.exp(optimize.root(gap, np.zeros(len(moments)), jac=slope, tol=1e-14).x) - 1


def _normal(moments):
    precision = 1 / (-2 * moments[1] - moments[0] ** 2)
    return np.array([precision * moments[0], precision])


def _von_mises(moments):
    length = np.hypot(*moments)
    kappa = optimize.brentq(lambda k: special.i1e(k) / special.i0e(k) - length, 1e-9, 1e4, xtol=1e-14, rtol=1e-15)
    return kappa * np.asarray(moments) / length


def _same(u):
    return u


def _zero(u):
    return 0 * u


FAMILIES = {
    "Gamma": OneDimension(np.exp, _same, lambda x, u: (u, -x), _gamma, (-30.0, 6.0)),
    "InverseGamma": OneDimension(np.exp, _same, lambda x, u: (-u, -1 / x), _inverse_gamma, (-6.0, 30.0)),
    "Exponential": OneDimension(np.exp, _same, lambda x, u: (-x,), lambda m: np.array([-1 / m[0]]), (-50.0, 6.0)),
    "Beta": OneDimension(
        special.expit,
        lambda u: special.log_expit(u) + special.log_expit(-u),
        lambda x, u: (special.log_expit(u), special.log_expit(-u)),
        dirichlet,
        (-60.0, 60.0),
    ),
    "LogNormal": OneDimension(
        np.exp, _same, lambda x, u: (u, -(u**2) / 2), lambda m: _normal(m) - [1, 0], (-14.0, 14.0)
    ),
    "Normal": OneDimension(_same, _zero, lambda x, u: (x, -(x**2) / 2), _normal, (-14.0, 14.0)),
    "VonMises": OneDimension(_same, _zero, lambda x, u: (np.cos(x), np.sin(x)), _von_mises, (-np.pi, np.pi)),
}


class _Plane:
    """All combinations of the latents' points."""

    def __init__(self, families):
        self.families = [FAMILIES[f] for f in families]
        sizes = (200, 20) if len(families) == 1 else (40, 16)
        ones = [f.points(*sizes) for f in self.families]
        grids = np.meshgrid(*[np.arange(len(u)) for u, _ in ones], indexing="ij")
        picked = [(u[g.ravel()], w[g.ravel()]) for (u, w), g in zip(ones, grids, strict=True)]
        self.base = sum(w for _, w in picked)
        self.values = [f.value(u) for f, (u, _) in zip(self.families, picked, strict=True)]
        own = [f.statistics(x, u) for f, x, (u, _) in zip(self.families, self.values, picked, strict=True)]
        self.sizes = [len(t) for t in own]
        self.statistics = np.concatenate([np.stack(t) for t in own])

    def log_mass(self, natural, extra: Any = 0.0):
        return special.logsumexp(self.base + natural @ self.statistics + extra)

    def matched(self, logs):
        moments = self.statistics @ np.exp(logs - special.logsumexp(logs))
        parts = np.split(moments, np.cumsum(self.sizes)[:-1])
        return np.concatenate([f.member(m) for f, m in zip(self.families, parts, strict=True)])


class _Simplex(_Plane):
    """Three shares, by the logarithms of two of them over the third."""

    def __init__(self):
        u, weights = OneDimension(_same, _zero, None, None, (-45.0, 45.0)).points(80, 16)
        grids = np.stack(np.meshgrid(u, u, [0.0], indexing="ij"), -1).reshape(-1, 3)
        logs = grids - special.logsumexp(grids, axis=-1, keepdims=True)
        self.base = (weights[:, None] + weights).ravel() + logs.sum(axis=-1)
        self.values, self.statistics = [np.exp(logs)], logs.T

    def matched(self, logs):
        return dirichlet(self.statistics @ np.exp(logs - special.logsumexp(logs)))


def dirichlet_ep(prior, factors, power):
    """:func:`power_ep` of one Dirichlet latent with three shares, whose factors take Float[S, 3]."""
    return _iterated(_Simplex(), prior, factors, power, 60)


def power_ep(families, prior, factors, power, sweeps=60):
    """Sequential power EP.

    Args:
        families: names in FAMILIES, one per latent.
        prior: natural parameters of the prior, one latent's after another's.
        factors: log densities of arrays of values, one per site.
        power: alpha.
        sweeps: sweeps over all factors.

    Returns:
        ``(natural parameters of q, log evidence)``.
    """
    return _iterated(_Plane(families), np.asarray(prior, float), factors, power, sweeps)


def _iterated(plane, prior, factors, power, sweeps):
    logs = [factor(*plane.values) for factor in factors]
    sites = [np.zeros_like(prior) for _ in factors]
    for _ in range(sweeps):
        before = np.concatenate(sites)
        for m, factor in enumerate(logs):
            q = prior + sum(sites)
            tilted = plane.base + (q - power * sites[m]) @ plane.statistics + power * factor
            sites[m] = sites[m] + (plane.matched(tilted) - q) / power
        if np.allclose(before, np.concatenate(sites), rtol=1e-12, atol=1e-12):
            break
    q = prior + sum(sites)
    evidence = plane.log_mass(q) - plane.log_mass(prior)
    for site, factor in zip(sites, logs, strict=True):
        evidence += (plane.log_mass(q - power * site, power * factor) - plane.log_mass(q)) / power
    return q, evidence


def stochastic_ep(families, prior, factors, power, rounds=400, sweeps=None):
    """One site t for all M factors, ``eta_q = eta_0 + M eta_t``: t moves half way to the mean of what they ask for.

    Args:
        families: as of :func:`power_ep`.
        prior: natural parameters of the prior.
        factors: log densities, one per group.
        power: alpha.
        rounds: at most.
        sweeps: None for the limit, else so many sweeps in which every factor moves t in its turn, by steps 10 / (10 + k).

    Returns:
        ``(natural parameters of q, log evidence)``.
    """
    plane, prior, count = _Plane(families), np.asarray(prior, float), len(factors)
    logs = [factor(*plane.values) for factor in factors]
    site = np.zeros_like(prior)

    def asked(factor):
        q = prior + count * site
        base = plane.base + (q - power * site) @ plane.statistics
        return (plane.matched(base + power * factor) - q) / (power * count)

    for _ in range(rounds if sweeps is None else 0):
        step = sum(asked(factor) for factor in logs)
        site = site + 0.5 * step
        if np.max(np.abs(step)) < 1e-13:
            break
    for k in range(sweeps or 0):
        for factor in logs:
            site = site + 10 / (10 + k) * asked(factor)
    q = prior + count * site
    evidence = plane.log_mass(q) - plane.log_mass(prior)
    evidence += sum((plane.log_mass(q - power * site, power * f) - plane.log_mass(q)) / power for f in logs)
    return q, evidence


def variational(families, prior, factors, sweeps=400):
    """The fixed point of natural-gradient steps ``site <- d E_q[log f] / d mu``, which power EP tends to as the power does to 0.

    The derivative in the mean statistics is ``Cov_q(T)^-1 Cov_q(T, log f)``; of one latent only.
    """
    plane, prior = _Plane(families), np.asarray(prior, float)
    total, q = sum(factor(*plane.values) for factor in factors), prior
    for _ in range(sweeps):
        logs = plane.base + q @ plane.statistics
        mass = np.exp(logs - special.logsumexp(logs))
        about = plane.statistics - (plane.statistics @ mass)[:, None]
        step = np.linalg.solve((about * mass) @ about.T, (about * mass) @ total)
        q = 0.5 * q + 0.5 * (prior + step)
    return q
