"""First rounds by draws: q is kept from widening much where its sites ask for no Gaussian, whatever the partition."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily
from numpyro_pvi.schedules import _synchronous
from numpyro_pvi.sites import SiteStack
from numpyro_pvi.solvers import NaturalGradient

DIM, GROUPS = 3, 4
# What a held round leaves of q's precision in every direction, at least.
KEPT = 0.7
FAMILY = MultivariateNormalFamily(DIM)


def setting(lowest, seed=0):
    """A problem, proposals whose whitened precision has this lowest eigenvalue beside 0.5 and 4, and the old q."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(DIM, DIM))
    precision, loc = root @ root.T + 0.5 * np.eye(DIM), rng.normal(size=DIM)
    factor = np.linalg.cholesky(precision)
    axes = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    total = factor @ (axes * np.array([lowest, 0.5, 4.0])) @ axes.T @ factor.T
    parts = rng.normal(size=(GROUPS, DIM, DIM))
    parts = parts + parts.transpose(0, 2, 1)
    parts[0] += total - np.eye(DIM) - parts.sum(axis=0)
    vectors = rng.normal(size=(GROUPS, DIM))
    prior = FAMILY.natural(jnp.zeros(DIM), jnp.eye(DIM))
    proposal = SiteStack(GaussianNatural(jnp.asarray(vectors, prior.precision.dtype), jnp.asarray(parts)), None)
    proposal = jax.tree.map(lambda x: x.astype(prior.precision.dtype), proposal)
    old = FAMILY.natural(jnp.asarray(precision @ loc), jnp.asarray(precision))
    problem = SimpleNamespace(family=FAMILY, prior_natural=prior)
    return problem, proposal, SimpleNamespace(moments=FAMILY.moments(old)), (precision, loc, axes, factor)


def held(problem, proposal, old, moved=(True,) * GROUPS, before=0):
    return _synchronous.hold_width(problem, proposal, old, jnp.asarray(moved), jnp.int32(before))


def total_of(proposal):
    return np.eye(DIM) + np.asarray(proposal.groups.precision).sum(axis=0)


@pytest.mark.parametrize("lowest", [-0.3, -20.0])
def test_missing_precision_is_q_s_own(lowest, tolerance):
    problem, proposal, old, (_, loc, axes, factor) = setting(lowest)
    after, count = held(problem, proposal, old, moved=(True, False, True, True))
    assert int(count) == 1
    exact = factor @ (axes * np.array([KEPT, KEPT, 4.0])) @ axes.T @ factor.T
    scale = np.abs(total_of(proposal)).max()
    np.testing.assert_allclose(total_of(after), exact, atol=50 * tolerance * scale)
    # The gradient of the ELBO at the old location stays, and so does the site of a group that made no proposal.
    added = np.asarray((after.groups - proposal.groups).precision)
    shift = np.asarray((after.groups - proposal.groups).precision_mean)
    np.testing.assert_allclose(shift, added @ loc, atol=50 * tolerance * scale)
    assert not added[1].any() and not shift[1].any()
    np.testing.assert_allclose(added[0], added[3], atol=50 * tolerance * scale)


@pytest.mark.parametrize(
    "lowest, before", [(0.1, 0), (-0.3, _synchronous._MOST_HELD)], ids=["normalisable", "late"]
)  # fmt: skip
def test_other_rounds_are_left_alone(lowest, before):
    problem, proposal, old, _ = setting(lowest)
    after, count = held(problem, proposal, old, before=before)
    assert int(count) == before
    for new, was in zip(jax.tree.leaves(after), jax.tree.leaves(proposal), strict=True):
        np.testing.assert_array_equal(new, was)


ROWS = np.linspace(-2.0, 2.0, 12)
ANSWERS = np.where(ROWS > 0.3, 1.0, -1.0)


def unit(x, y):
    """One hidden unit with a strong answer: curvatures are indefinite where its weights have the wrong signs."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w[2] * jnp.tanh(x * w[0] + w[1]), 0.1), obs=y)


def first_rounds(groups, num_draws, rounds, sd=0.05):
    """States after each of the first rounds, from a q that is narrow at a poor place."""
    labels = np.arange(len(ROWS)) % groups
    solver = NaturalGradient(expectation="monte_carlo", num_draws=num_draws)
    pvi = PVI(Partition(unit, "data", labels), AutoMultivariateNormal(unit), solver=solver)
    start = {"auto_loc": jnp.array([-0.5, 0.4, 0.6]), "auto_scale_tril": sd * jnp.eye(3)}
    data = jnp.asarray(ROWS), jnp.asarray(ANSWERS)
    state = pvi.init(jax.random.key(0), *data, init_params=start)
    states = [state]
    for _ in range(rounds):
        state, _ = pvi.update(state, *data)
        states.append(state)
    return pvi, states


def widths(pvi, states):
    """Largest variance of q after each round in units of the variance before it, over all directions."""
    scales = [np.asarray(pvi.get_params(state)["auto_scale_tril"], np.float64) for state in states]
    return [np.linalg.norm(np.linalg.solve(old, new), 2) ** 2 for old, new in itertools.pairwise(scales)]


def counts(states):
    return np.diff([int(state.schedule_state.held) for state in states])


@pytest.mark.parametrize("sd", [0.05, 0.01])
def test_q_widens_by_little_while_it_is_held(sd, tolerance):
    pvi, states = first_rounds(2, 6, 8, sd)
    grown, kept = widths(pvi, states), counts(states)
    assert kept.sum() >= 2
    assert all(g * KEPT <= 1 + 1000 * tolerance for g, k in zip(grown, kept, strict=True) if k)


def test_a_narrow_q_does_not_crawl():
    # Kept from widening at all, it was some 440 nats below the optimum after thirty rounds, all of them held.
    pvi, states = first_rounds(2, 6, 20, sd=0.01)
    loss = pvi.evaluate(states[-1], jnp.asarray(ROWS), jnp.asarray(ANSWERS))
    assert loss < 12.0, loss


@pytest.mark.slow
def test_held_rounds_do_not_depend_on_the_partition(tolerance):
    (pvi, states), (alone, others) = (first_rounds(groups, 6, 8) for groups in (2, 1))
    assert counts(states).sum() >= 2
    for key, value in pvi.get_params(states[-1]).items():
        np.testing.assert_allclose(alone.get_params(others[-1])[key], value, atol=2000 * tolerance)


def test_q_widens_without(monkeypatch):
    monkeypatch.setattr(_synchronous, "_MOST_HELD", 0)
    # A number of draws of its own keeps compiled programs apart.
    assert max(widths(*first_rounds(2, 9, 8))) > 1.5
