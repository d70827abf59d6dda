"""Rows that see q widely, apart from the others: the same passes, the same optimum, from any partition, in fewer rounds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.optimize
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.families import MultivariateNormalFamily
from numpyro_pvi.runtime import _refinement

NUM_ROWS, DIM, SCALE = 48, 3, 8.0
SIZES = {1: (48,), 3: (9, 25, 14)}


def _data() -> tuple[jax.Array, jax.Array]:
    """Logistic rows, of which six alone see the last latent, all with one label: a direction that labels separate."""
    rng = np.random.default_rng(5)
    X = np.c_[rng.normal(size=(NUM_ROWS, DIM - 1)), np.zeros(NUM_ROWS)]
    y = (rng.random(NUM_ROWS) < 1 / (1 + np.exp(-X[:, 0]))).astype(float)
    rare = rng.permutation(NUM_ROWS)[:6]
    X[rare, -1], y[rare] = 1.0, 1.0
    return jnp.asarray(X), jnp.asarray(y)


def _model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, SCALE).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def _fit(num_groups: int, rounds: int):
    """A fit by rounds, under whatever rule is in force."""
    labels = np.repeat(np.arange(num_groups), SIZES[num_groups])
    split = Partition(_model, "rows", np.random.default_rng(1).permutation(labels))
    pvi = PVI(split, AutoMultivariateNormal(_model))
    return pvi, pvi.run(jax.random.key(0), rounds, *_data(), progress_bar=False)


def _lowest() -> float:
    """Negative ELBO of the best Gaussian, nats: quasi-Newton steps on (m, L), trapezoids for the rows."""
    X, y = (np.asarray(a) for a in _data())
    z = np.linspace(-10.0, 10.0, 1001)
    mass = np.exp(-0.5 * z**2)
    mass /= mass.sum()
    below = np.tril_indices(DIM)

    def loss(flat):
        m, tril = flat[:DIM], np.zeros((DIM, DIM))
        tril[below] = flat[DIM:]
        u = (X @ m)[:, None] + np.linalg.norm(X @ tril, axis=1)[:, None] * z
        fit = np.sum((y[:, None] * u - np.logaddexp(0.0, u)) @ mass)
        square = np.sum(tril**2) + m @ m
        divergence = 0.5 * (square / SCALE**2 - DIM) + DIM * np.log(SCALE) - np.sum(np.log(np.abs(np.diag(tril))))
        return divergence - fit

    start = np.r_[np.zeros(DIM), np.eye(DIM)[below]]
    found = scipy.optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-6, "maxiter": 2000})
    return float(found.fun)


@pytest.fixture
def apart(monkeypatch):
    """The rule for many rows on few, and no program compiled under another."""
    jax.clear_caches()
    monkeypatch.setattr(_refinement, "LEAST_ROWS", 16)
    monkeypatch.setattr(_refinement, "SHARE", 6)
    # Blocks of four, so that groups share one and one is not all.
    monkeypatch.setattr(_refinement, "_BLOCK", 4)
    monkeypatch.setattr(_refinement, "_SMALLEST", 4)
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _double():
    if not jax.config.jax_enable_x64:
        pytest.skip("gaps of 1e-6 nats are below the rounding of float32")


def _reaches(losses, lowest: float) -> None:
    assert losses[-1] == pytest.approx(lowest, abs=1e-6)
    assert np.all(np.diff(losses) < 1e-8)
    assert np.sum(losses > lowest + 1e-4) < 6


def test_few_rounds_reach_the_optimum_whatever_the_partition(apart):
    lowest, fits = _lowest(), {m: _fit(m, 8)[1] for m in SIZES}
    losses = {m: np.asarray(fit.losses) for m, fit in fits.items()}
    _reaches(losses[1], lowest)
    assert losses[3] == pytest.approx(losses[1], abs=1e-8)
    ends = [jax.tree.map(lambda x: np.asarray(x).sum(axis=0), fit.state.sites.groups) for fit in fits.values()]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8)


def test_without_rows_apart_rounds_are_many():
    assert NUM_ROWS < _refinement.LEAST_ROWS
    with pytest.raises(AssertionError):
        _reaches(np.asarray(_fit(1, 8)[1].losses), _lowest())


def _same_pass(num_groups: int) -> None:
    pvi, fit = _fit(num_groups, 1)
    state, arrays = fit.state, _data()
    problem = pvi._engine._state_problem(state, arrays, {}, False)
    assert problem.wide is not None
    assert (problem.wide.count, problem.wide.block) == (8, 4)
    tight = state.rule._replace(tolerance=jnp.asarray(1e-10))

    @jax.jit
    def both():
        whole = dataclasses.replace(problem, wide=None)
        return problem.evaluate(state.sites, tight, None), whole.evaluate(state.sites, tight, None)

    here, there = both()
    assert float(here.elbo) == pytest.approx(float(there.elbo), rel=1e-9)
    for a, b in zip(jax.tree.leaves(here.groups.target), jax.tree.leaves(there.groups.target), strict=True):
        assert np.asarray(a) == pytest.approx(np.asarray(b), rel=1e-7, abs=1e-9)
    # The six rows that alone see the direction that is still wide are among those set apart.
    picked = np.asarray(problem.wide.rows).reshape(-1)[np.asarray(here.wide)]
    assert set(np.flatnonzero(np.asarray(arrays[0])[:, -1])) <= set(picked.tolist())
    # What is left takes a cheaper rule.
    assert int(here.rule.level) < int(there.rule.level)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_pass_with_rows_apart_is_the_pass(apart, num_groups):
    _same_pass(num_groups)


def test_rows_counted_twice_are_seen(apart, monkeypatch):
    monkeypatch.setattr(_refinement.WideRows, "without", lambda self, chunks, slots: chunks)
    with pytest.raises(AssertionError):
        _same_pass(3)


def test_a_search_whose_change_has_the_wrong_sign_is_seen(apart, monkeypatch):
    whole = _refinement.climb

    def turned(start, found, value):
        best, usable = whole(start, found, value)
        return best._replace(numbers=jax.tree.map(lambda new, old: 2 * old - new, best.numbers, start.numbers)), usable

    monkeypatch.setattr(_refinement, "climb", turned)
    with pytest.raises(AssertionError):
        _reaches(np.asarray(_fit(1, 8)[1].losses), _lowest())


def test_mixing_converges_where_plain_steps_run_away():
    """A step whose linearisation has eigenvalues -1.5 and .95 about a known q; the energy is minus the distance from it."""
    dim = 2
    family = MultivariateNormalFamily(dim)
    goal = family.natural(jnp.array([1.0, -2.0]), jnp.array([[3.0, 0.5], [0.5, 2.0]]))
    slopes = jnp.array([-1.5, 0.95])

    def value(point):
        off = point.natural.precision_mean - goal.precision_mean
        target = family.natural(goal.precision_mean + slopes * off, 0.5 * (point.natural.precision + goal.precision))
        away = point.natural.precision - goal.precision
        energy = -jnp.sum(off**2) - jnp.sum(away**2)
        return energy, jnp.abs(energy), family.moments(point.natural), _refinement._Rows(target, ())

    start = _refinement._Rows(family.natural(goal.precision_mean + 1.0, 1.5 * goal.precision), ())
    best, usable = _refinement.climb(start, value(start), value)
    assert bool(usable)
    for a, b in zip(jax.tree.leaves(best.natural), jax.tree.leaves(goal), strict=True):
        assert np.asarray(a) == pytest.approx(np.asarray(b), abs=1e-3)
