"""One fit with its whole trajectory, from which every law reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.runtime import _engine, _product_engine

# Rounds whose every state is kept.
FIRST = 6


class Fit(NamedTuple):
    """A trajectory: the start, every one of the first rounds, then a few. ``losses[i]`` belongs to ``states[i]``."""

    pvi: Any
    states: list
    losses: list
    X: np.ndarray
    y: np.ndarray
    labels: np.ndarray

    @property
    def last(self):
        return self.states[-1]

    def rows_of(self, index):
        """Covariates and responses of the group at a position of the stacked arrays."""
        mine = self.labels == self.last.plan.partition.table.labels[index]
        return self.X[mine], self.y[mine]


@contextlib.contextmanager
def shapes_compared(known_by: Any = None) -> Iterator[list[bool]]:
    """Hold what factors know of an evaluation's shapes to those of one that is traced.

    ``known_by``: a factor's own word in the place of ``Problem.shaped``. The value fills with whether they were known, once a look.
    """
    found: list[bool] = []

    def compared(problem, sites, rule, evaluate):
        known = jax.eval_shape(lambda: (known_by or type(problem).shaped)(problem, sites, rule))
        traced = jax.eval_shape(evaluate)
        if known is not None:
            # But for the rule, which is the state's.
            one, other = (jax.tree.flatten(x._replace(rule=None)) for x in (known, traced))
            assert one[1] == other[1], f"{type(problem).__name__} says {one[1]}, and an evaluation is {other[1]}"
            assert [(x.shape, x.dtype) for x in one[0]] == [(x.shape, x.dtype) for x in other[0]]
        found.append(known is not None)
        return own(problem, sites, rule, evaluate)

    own = _engine.unevaluated
    with (
        mock.patch.object(_engine, "unevaluated", compared),
        mock.patch.object(_product_engine, "unevaluated", compared),
    ):
        yield found


class Numbers(NamedTuple):
    """A state's natural parameters as dense float64 matrices, whatever the family."""

    prior: tuple
    groups: list
    prior_site: tuple | None
    total: tuple

    @property
    def moments(self):
        covariance = np.linalg.inv(self.total[1])
        return covariance @ self.total[0], covariance


def fit(
    model,
    X,
    y,
    labels,
    solver,
    schedule,
    rounds,
    guide=AutoMultivariateNormal,
    init_sites="prior",
    runtime=None,
    seed=0,
):
    """Run ``rounds`` rounds and keep every state of the first six, then four more up to the last.

    ``run`` compiles one program for any number of rounds (law 11), so the pieces cost nothing to compile.
    """
    pvi = PVI(
        Partition(model, "data", labels),
        guide(model),
        solver=solver,
        schedule=schedule,
        init_sites=init_sites,
        runtime=runtime,
    )
    state = pvi.init(jax.random.key(seed), X, y)
    states, losses = [state], [np.nan]
    kept = sorted({*range(1, min(rounds, FIRST) + 1), *np.linspace(FIRST, rounds, 5).astype(int)[1:].clip(1, rounds)})
    for before, upto in zip([0, *kept], kept, strict=False):
        result = pvi.run(jax.random.key(seed), int(upto - before), X, y, init_state=state, progress_bar=False)
        state = result.state
        states.append(state)
        losses.append(float(result.losses[-1]))
    return Fit(pvi, states, losses, np.asarray(X, float), np.asarray(y, float), np.asarray(labels))


def numbers(state) -> Numbers:
    """Read a state: the sum is taken here, not by the package."""

    def dense(natural, index=...):
        vector = np.asarray(natural.precision_mean, np.float64)[index]
        precision = np.asarray(natural.precision, np.float64)[index]
        return vector, precision if state.plan.family.full else np.diag(precision)

    prior = dense(state.prior)
    sites = [dense(state.sites.groups, i) for i in range(state.sites.groups.precision_mean.shape[0])]
    # Absent groups come first, as in the state's own order; slots beyond their labels are empty.
    sites = [dense(state.sites.others, i) for i in range(len(state.plan.absent))] + sites
    prior_site = None if state.sites.prior is None else dense(state.sites.prior)
    parts = [prior, *sites, *([] if prior_site is None else [prior_site])]
    total = tuple(np.sum([p[i] for p in parts], axis=0) for i in (0, 1))
    return Numbers(prior, sites, prior_site, total)


def guide_moments(pvi, state):
    """Location and covariance of q as the guide's params say them."""
    params = {k: np.asarray(v, np.float64) for k, v in pvi.get_params(state).items()}
    if "auto_scale_tril" in params:
        return params["auto_loc"], params["auto_scale_tril"] @ params["auto_scale_tril"].T
    return params["auto_loc"], np.diag(params["auto_scale"] ** 2)


def scale_of(fitted):
    """Cholesky factor, or standard deviations, of the last q."""
    loc, covariance = numbers(fitted.last).moments
    return loc, np.linalg.cholesky(covariance) if fitted.last.plan.family.full else np.sqrt(np.diag(covariance))
