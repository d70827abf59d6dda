"""Expectations by draws: how long a move is in nats, what their ELBO may lose, and how late rounds are averaged."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.expectations import Expected
from numpyro_pvi.families import (
    ConditionalNatural,
    GaussianMoments,
    GaussianNatural,
    MultivariateNormalFamily,
    NormalFamily,
)
from numpyro_pvi.runtime import _local
from numpyro_pvi.schedules import Evaluation, _acceptance, move_in_nats
from numpyro_pvi.schedules._acceptance import average_late, averaging_step, no_averaging
from numpyro_pvi.sites import SiteStack
from numpyro_pvi.solvers import NaturalGradient

KEY = jax.random.key(0)
TREATMENT = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERROR = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
DIM, ROWS, WIDTH = 2, 3, 2


def schools(error, y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("data", error.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("obs", dist.Normal(mu + tau * effect, error), obs=y)


def divergence(mean, precision, other_mean, other_precision):
    """KL between dense Gaussians, nats."""
    shift, ratio = mean - other_mean, other_precision @ np.linalg.inv(precision)
    return 0.5 * (np.trace(ratio) - len(mean) + shift @ other_precision @ shift - np.linalg.slogdet(ratio)[1])


def random_joint(rng, full):
    """A Gaussian over theta and three independent pairs of local latents: blocks, and the same densely."""
    rows = rng.normal(size=(ROWS, WIDTH, 5))
    own = np.einsum("rik,rjk->rij", rows, rows) + np.eye(WIDTH)
    cross = rng.normal(size=(ROWS, WIDTH, DIM)) * full
    root = rng.normal(size=(DIM, DIM))
    marginal = root @ root.T + np.eye(DIM)
    if not full:
        own, marginal = own * np.eye(WIDTH), marginal * np.eye(DIM)
    linear, vector = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=DIM)
    # Integrating the local latents out of the dense joint leaves the marginal and its precision-mean.
    solved = np.linalg.solve(own, np.concatenate([cross, linear[..., None]], axis=-1))
    size = DIM + ROWS * WIDTH
    precision, target = np.zeros((size, size)), np.zeros(size)
    precision[:DIM, :DIM] = marginal + np.einsum("rki,rkj->ij", cross, solved[..., :DIM])
    target[:DIM] = vector + np.einsum("rki,rk->i", cross, solved[..., DIM])
    for r in range(ROWS):
        where = slice(DIM + r * WIDTH, DIM + (r + 1) * WIDTH)
        precision[where, where], precision[where, :DIM], precision[:DIM, where] = own[r], cross[r], cross[r].T
        target[where] = linear[r]
    if full:
        natural = GaussianNatural(jnp.asarray(vector), jnp.asarray(marginal))
        blocks = ConditionalNatural(jnp.asarray(linear), jnp.asarray(own), jnp.asarray(cross))
    else:
        natural = GaussianNatural(jnp.asarray(vector), jnp.asarray(np.diag(marginal)))
        diagonals = jnp.asarray(np.diagonal(own, axis1=1, axis2=2))
        blocks = ConditionalNatural(jnp.asarray(linear), diagonals, jnp.zeros((ROWS, WIDTH, 0)))
    return natural, blocks, np.linalg.solve(precision, target), precision


@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
def test_theta_alone_moves_by_the_symmetrised_divergence(full, tolerance):
    rng = np.random.default_rng(1)
    family = MultivariateNormalFamily(DIM) if full else NormalFamily(DIM)
    dense = (lambda x: np.asarray(x)) if full else (lambda x: np.diag(np.asarray(x)))
    new, old = (random_joint(rng, full)[0] for _ in range(2))
    moments = [family.moments(x) for x in (new, old)]
    means = [np.linalg.solve(dense(x.precision), np.asarray(x.precision_mean)) for x in (new, old)]
    exact = divergence(means[0], dense(new.precision), means[1], dense(old.precision))
    exact += divergence(means[1], dense(old.precision), means[0], dense(new.precision))
    assert float(move_in_nats(family, new, old, *moments, None)) == pytest.approx(exact, rel=100 * tolerance)


@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
def test_local_latents_move_beside_theta(full, tolerance):
    rng = np.random.default_rng(2)
    family = MultivariateNormalFamily(DIM) if full else NormalFamily(DIM)
    natural, rows, mean, precision = random_joint(rng, full)
    # The same q(theta): then both divergences are expected under it, and the sum is that of the dense joints.
    _, other, *_ = random_joint(rng, full)
    moments = family.moments(natural)
    got = float(move_in_nats(family, natural, natural, moments, moments, (rows, other)))
    dense = [_dense(natural, x, full) for x in (rows, other)]
    np.testing.assert_allclose(dense[0][1], precision, rtol=1e-4)
    exact = divergence(*dense[0], *dense[1]) + divergence(*dense[1], *dense[0])
    assert got == pytest.approx(exact, rel=200 * tolerance)


def _dense(natural, rows, full):
    own, cross, linear = np.asarray(rows.precision), np.asarray(rows.cross), np.asarray(rows.linear)
    marginal, vector = np.asarray(natural.precision), np.asarray(natural.precision_mean)
    if not full:
        own, marginal = own[..., None] * np.eye(WIDTH), np.diag(marginal)
        cross = np.zeros((ROWS, WIDTH, DIM))
    size = DIM + ROWS * WIDTH
    precision, target = np.zeros((size, size)), np.zeros(size)
    precision[:DIM, :DIM], target[:DIM] = marginal, vector
    for r in range(ROWS):
        where = slice(DIM + r * WIDTH, DIM + (r + 1) * WIDTH)
        precision[where, where], precision[where, :DIM], precision[:DIM, where] = own[r], cross[r], cross[r].T
        target[where] = linear[r]
        precision[:DIM, :DIM] += cross[r].T @ np.linalg.solve(own[r], cross[r])
        target[:DIM] += cross[r].T @ np.linalg.solve(own[r], linear[r])
    return np.linalg.solve(precision, target), precision


def test_steps_shrink_with_turns_and_forget_the_start():
    start, weight = 1.0, []
    for late in range(200):
        step = float(averaging_step(no_averaging(1, jnp.float32)._replace(late=jnp.int32(late)), jnp.float32))
        start, weight = start * (1 - step), [w * (1 - step) for w in weight] + [step]
    weights = np.array(weight)
    assert start == 0.0 and weights.sum() == pytest.approx(1.0, rel=1e-4)
    # Variance of the weighted mean of independent targets: c^2 / (2 c - 1) / k with c = 10.
    assert np.sum(weights**2) == pytest.approx(100 / 19 / 209, rel=0.06)
    assert weights[:50].sum() < 0.01


class Noisy(NamedTuple):
    """All that averaging asks of a problem."""

    family: NormalFamily
    in_turns: bool = False

    def sampled(self, rule):
        return jnp.array(True)


class Place(NamedTuple):
    q: GaussianNatural
    moments: GaussianMoments
    rule: Any = None


def walks(slow, start, dim, rounds, count=24, others=1.0):
    """Averaged steps whose full ones go to 0, but for the first coordinate's, of which they go a share; noise of .15 sds each.

    ``others``: the share of all others.

    Returns, by walk, the last places, the steps afterwards, and how far q is said to have drifted in every round.
    """
    problem, one = Noisy(NormalFamily(dim)), jnp.ones(dim)
    share = (others * one).at[0].set(slow)

    def at(x):
        return Place(GaussianNatural(x, one), GaussianMoments(x, one, jnp.zeros(()), jnp.array(True)))

    def again(carry, key):
        x, memory = carry
        asked = 0.15 * jax.random.normal(key, (dim,)) - share * x
        new = x + averaging_step(memory, x.dtype) * asked
        memory = average_late(problem, memory, at(new), at(x))
        return (new, memory), memory.drift

    def walk(key):
        first = jnp.zeros(dim).at[0].set(start), no_averaging(dim, one.dtype)
        (x, memory), drifts = jax.lax.scan(again, first, jax.random.split(key, rounds))
        return x, averaging_step(memory, x.dtype), drifts

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(walk))(jax.random.split(KEY, count)))


def test_steps_that_drift_through_noise_do_not_shrink(monkeypatch):
    x, step, drifts = walks(0.05, 3.0, 14, 100)
    far = np.sqrt(np.mean(x[:, 0] ** 2))
    # What is said to have gone one way is no more than what there was to go, and much of it.
    most = drifts[:, :30].max(axis=1)
    assert np.all((most > 0.3) & (most < 3.0))
    monkeypatch.setattr(_acceptance, "_DRIFTS", np.inf)
    monkeypatch.setattr(_acceptance, "_CLEARLY", np.inf)
    # The planted fault: steps that shrink with every move back arrive no nearer than this, .69 sds.
    blind, short, silent = walks(0.05, 3.0, 14, 100)
    assert far < 0.7 * np.sqrt(np.mean(blind[:, 0] ** 2)) and np.mean(short) < np.mean(step)
    assert not silent.any()


@pytest.mark.parametrize("dim", [1, 14, 100])
def test_noise_alone_is_no_drift(dim):
    x, step, drifts = walks(1.0, 0.0, dim, 300)
    # Of 24 walks x 300 rounds.
    assert np.mean(drifts > 0) < 0.03
    # Variance of the weighted mean of independent targets, see above, at the steps that Kesten's rule leads to.
    assert np.mean(x**2) == pytest.approx(0.15**2 * np.mean(step) * 100 / 190, rel=0.5)
    assert np.mean(step) < 0.08


def test_many_coordinates_that_wander_about_their_end_are_averaged(monkeypatch):
    """Moves that hardly turn back are told from a drift in one coordinate of hundreds by no more than chance."""
    x, step, _ = walks(0.1, 0.0, 200, 120, count=8, others=0.1)
    monkeypatch.setattr(_acceptance, "_FEW_COORDINATES", 200)
    # The planted fault: the largest of all is held to what one may be.
    wandering, long, _ = walks(0.1, 0.0, 200, 120, count=8, others=0.1)
    assert np.mean(step) < 0.3 and np.mean(long) > 0.9
    assert np.mean(x**2) < 0.4 * np.mean(wandering**2)
    monkeypatch.undo()
    # A drift is reported all the same, and steps stay long enough for it to arrive.
    far, _, drifts = walks(0.05, 3.0, 200, 150, count=8)
    assert np.all(drifts[:, :40].max(axis=1) > 0.3) and np.sqrt(np.mean(far[:, 0] ** 2)) < 0.8


def largest_steps(pairs):
    """Of rounds 21 to 60; a number of pairs of its own keeps compiled programs apart."""
    pvi = PVI(
        Partition(schools, "data", list(range(8))),
        AutoMultivariateNormal(schools),
        solver=NaturalGradient(num_draws=pairs, expectation="monte_carlo"),
    )
    result = pvi.run(KEY, 60, jnp.asarray(ERROR), jnp.asarray(TREATMENT), progress_bar=False)
    return np.asarray(result.trace.step)[20:].max(axis=1)


def test_steps_do_not_wither_where_draws_contradict_themselves(monkeypatch):
    monkeypatch.setattr(_local, "_MOST_PAIRS", 1)
    assert np.mean(largest_steps(14) < 0.05) < 0.15
    # Judged by the draws' word alone, a step in two is halved to nothing.
    monkeypatch.setattr(_local, "_NOISE_SHARE", 0.0)
    assert np.mean(largest_steps(15) < 0.05) > 0.3


def excused(shift, step, units=None, noisy=(None,), **how):
    """Nats that a fall may be the draws' own, for a step that moves one coordinate of q by so many sds."""
    family = MultivariateNormalFamily(2)
    old = family.natural(jnp.zeros(2), jnp.eye(2))
    new = family.natural(jnp.array([shift, 0.0]), jnp.eye(2))
    sites, zero, zeros = SiteStack(family.zeros((1,)), None), jnp.zeros(()), jnp.zeros(1)
    groups = Expected(zeros, None, None, zeros, zeros, zeros)
    after, before = (
        (sites, Evaluation(q, family.moments(q), groups, None, zero, zero, zero, None, jnp.array(False)))
        for q in (new, old)
    )
    return float(_local.fall_explained(family, list(noisy), after, before, jnp.asarray(step), units, **how))


def test_noise_excuses_falls_near_the_optimum_and_none_of_a_step_that_throws_q_far(monkeypatch):
    assert excused(0.5, 1.0) == pytest.approx(2 * 0.5**2)
    assert excused(0.5, 0.5) == pytest.approx(4 * 0.5**2)
    # More than one sd in each of two coordinates, and in each of 2 + 4 * 3.
    assert excused(1.5, 1.0) == 0.0
    assert excused(1.5, 1.0, (4, 3)) == pytest.approx(2 * 1.5**2)
    assert excused(3.0, 1.0, (4, 3)) == 0.0
    # By sigma points alone: an optimum .02 sds behind, and nothing of a step that is longer.
    sigma = {"noisy": (), "sigma": jnp.array(True)}
    assert excused(0.01, 1.0, **sigma) == pytest.approx(0.02 * 0.01 + 0.5 * 0.01**2, rel=1e-3)
    assert excused(0.03, 1.0, **sigma) == excused(0.01, 1.0, noisy=(), sigma=jnp.array(False)) == 0.0
    assert excused(0.5, 1.0, sigma=jnp.array(True)) == excused(0.5, 1.0)
    monkeypatch.setattr(_local, "_FARTHEST", np.inf)
    assert excused(30.0, 1.0) == pytest.approx(2 * 30.0**2)
