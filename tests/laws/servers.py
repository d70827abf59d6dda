"""A posterior server by hand: workers that see an anchor, their own site and the current sum, and a server that adds up.

The objective of the double loop is summed here on a grid in NumPy, and shares no code with the package.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_pvi.expectations import Proposal, from_points, grid_cloud, normal_cloud
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily
from numpyro_pvi.solvers import SNEP, match_rules

from .models import groups, rows
from .oracles import log_partition

PRIOR_SD = 2.0
FAMILY = MultivariateNormalFamily(1)
X, _, LABELS = rows()
X = X[:, :1]
GROUPS = groups(3)


@dataclasses.dataclass(frozen=True)
class GridFactor:
    """A group of a logistic regression with one latent, its moments summed over a grid, or by weighted draws."""

    x: Any
    sign: Any
    num_draws: int | None = None
    family: Any = FAMILY
    rules = match_rules(SNEP(), 1)

    def tilted(self, q, site, power, key):
        """See :class:`numpyro_pvi.solvers.TiltedFactor`."""
        dtype, proposal = q.precision.dtype, Proposal(q, self.family.moments(q))
        cloud = grid_cloud(1, dtype) if self.num_draws is None else normal_cloud(key, 1, self.num_draws, dtype)
        points = self.family.draw(proposal.moments, cloud.eps)
        # Rows that pad a group have the sign 0, and add a constant.
        values = jax.nn.log_sigmoid(points * self.x * self.sign).sum(1)
        return from_points(self.family, cloud, values, q, site, proposal, power)


@partial(jax.jit, static_argnums=(0, 7))
def work(solver, x, sign, total, site, state, key, num_draws=None):
    """What one worker computes: everything it reads is here."""
    return solver.solve(GridFactor(x, sign, num_draws), total - site, site, state, key)


@dataclasses.dataclass
class Server:
    """Sites, workers' states, and the sum. Worker by worker, or (``joint_step``) all from the same sum."""

    solver: Any
    joint_step: float | None = None
    betas: tuple = (1.0, 1.0, 1.0)
    num_draws: int | None = None

    def __post_init__(self):
        dtype = jnp.zeros(()).dtype
        size = max(np.bincount(GROUPS))
        self.data = []
        for g in range(3):
            x, sign = np.zeros(size), np.zeros(size)
            mine = np.flatnonzero(g == GROUPS)
            x[: len(mine)], sign[: len(mine)] = X[mine, 0], 2.0 * LABELS[mine] - 1
            self.data.append((jnp.asarray(x, dtype), jnp.asarray(sign, dtype)))
        start = self.solver.init(FAMILY, dtype)
        self.states = [start._replace(beta=jnp.asarray(b, dtype)) for b in self.betas]
        self.sites = [FAMILY.zeros((), dtype)] * 3
        self.prior = GaussianNatural(jnp.zeros(1, dtype), jnp.eye(1, dtype=dtype) / PRIOR_SD**2)

    @property
    def total(self):
        """The current sum of naturals."""
        return sum(self.sites, start=self.prior)

    def round(self, key=None):
        """Every worker once."""
        keys = jax.random.split(jax.random.key(0) if key is None else key, 3)
        total, old = self.total, list(self.sites)
        for g, data in enumerate(self.data):
            if self.joint_step is None:
                total = self.total
            result = work(self.solver, *data, total, old[g], self.states[g], keys[g], self.num_draws)
            share = 1.0 if self.joint_step is None else self.joint_step
            self.sites[g] = old[g] + (result.site - old[g]) * share
            self.states[g] = result.state

    def moments(self):
        """Location and variance of q."""
        h, precision = (np.asarray(v, float).squeeze() for v in dataclasses.astuple(self.total))
        return float(h / precision), float(1 / precision)

    def objective(self):
        """The energy of the double loop at the workers' anchors, less that of the prior, in nats."""
        total = _pair(self.total)
        value = log_partition(*total) - log_partition(*_pair(self.prior))
        for g, beta in enumerate(self.betas):
            anchor, site = _pair(self.states[g].anchor), _pair(self.sites[g])
            mine = g == GROUPS
            factor = lambda t, m=mine: -np.logaddexp(0, -np.outer(t, X[m, 0]) * (2 * LABELS[m] - 1)).sum(1)  # noqa: E731
            tilted = _log_mass(anchor[0] - site[0] / beta, anchor[1] - site[1] / beta, factor, 1 / beta, anchor)
            value += beta * (tilted - log_partition(*anchor))
        return float(value)


def _pair(natural):
    return np.asarray(natural.precision_mean, float), np.asarray(natural.precision, float)


def _log_mass(h, precision, factor, power, around):
    """log of the integral of ``exp(h t - precision t^2 / 2) exp(power factor(t))`` over 24 sds of another Gaussian."""
    loc, sd = float((around[0] / around[1][0])[0]), float(around[1][0, 0] ** -0.5)
    t = loc + sd * np.linspace(-12, 12, 4801)
    logs = h[0] * t - 0.5 * precision[0, 0] * t**2 + power * factor(t)
    return logs.max() + np.log(np.exp(logs - logs.max()).sum() * (t[1] - t[0]))
