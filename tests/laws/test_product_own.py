"""Rows' own latents where groups are visited alone, over products of families; coordinate ascent by hand tells the end."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi.runtime import _product_factors
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
    _subset,
)
from numpyro_pvi.solvers import DifferentialPrivacy, LocalELBO, NaturalGradient, StochasticNaturalGradient

KEY = jax.random.key(0)
X64 = jnp.result_type(float).name == "float64"
TIGHT = 1e-6 if X64 else 2e-3
COUNTS = np.random.default_rng(0).poisson(3.0, 12)
LABELS = np.array(["b"] * 3 + ["a"] * 4 + ["c"] * 5)
# As rows come: Streaming takes groups in this order.
ORDER = "bac"


def rates(counts, extra=None):
    """Every row has a rate of its own; a count beside the plate is a factor of the prior's."""
    b = numpyro.sample("b", dist.Gamma(1.5, 0.7))
    if extra is not None:
        numpyro.sample("extra", dist.Poisson(b), obs=extra)
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(numpyro.sample("rate", dist.Gamma(2.0, b))), obs=counts)


# Shape and rate of b.
PRIOR = np.array([1.5, 0.7])


def ascent(prior, counts):
    """The best q(b) and rows' mean rates given these rows and a gamma of b, by textbook coordinate ascent."""
    mean = prior[0] / prior[1]
    for _ in range(500):
        own = (2.0 + counts) / (1.0 + mean)
        q = prior + np.array([2.0 * len(counts), own.sum()])
        mean = q[0] / q[1]
    return q, own


def one_after_another():
    """Every group once, beside what came before it and not what comes after: Broderick et al., 2013, alg. 3."""
    q, own = PRIOR, np.zeros(12)
    for label in ORDER:
        here = label == LABELS
        q, own[here] = ascent(q, COUNTS[here])
    return q, own


def each_alone():
    """The product of what every group makes of the prior and its own rows."""
    q, own = PRIOR, np.zeros(12)
    for label in ORDER:
        here = label == LABELS
        alone, own[here] = ascent(PRIOR, COUNTS[here])
        q = q + alone - PRIOR
    return q, own


WHOLE = StochasticNaturalGradient(1.0, num_steps=1, average=0.0)
GRADIENT = LocalELBO(optax.sgd(1.0), num_steps=1, average=0.0)
CHAIN = [("a", "b"), ("b", "c")]
LATE = {"a": 1.0, "b": 2.5, "c": 1.0}
# Schedule, solver and rounds.
CASES = {
    "streaming": (Streaming(visits=300, tol=1e-10 if X64 else 1e-6), NaturalGradient(), 1),
    "asynchronous": (Asynchronous(delays=LATE), NaturalGradient(), 60),
    "decentralized": (Decentralized(CHAIN, nodes=["a", "b", "c"]), NaturalGradient(), 100),
    "sequential steps": (Sequential(), WHOLE, 40),
    "streamed steps": (Streaming(visits=60), WHOLE, 1),
    "an optimiser": (Sequential(), GRADIENT, 60),
    "an optimiser in parallel": (Synchronous(), GRADIENT, 200),
    "an optimiser of some": (StochasticSubset(2), GRADIENT, 200),
    "committee": (Committee(tol=1e-8 if X64 else 1e-4, max_visits=300), NaturalGradient(), 1),
}
# Those whose visits are another case's, under another schedule.
HELD = {"decentralized", "streamed steps", "an optimiser in parallel", "an optimiser of some"}
each = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in HELD)) for n in CASES])


def made(schedule, solver, model=rates):
    return PVI(Partition(model, "data", LABELS), AutoExponentialFamily(model), schedule=schedule, solver=solver)


def run(name, model=rates, *extra):
    schedule, solver, rounds = CASES[name]
    pvi = made(schedule, solver, model)
    return pvi, pvi.run(KEY, rounds, jnp.asarray(COUNTS), *extra, progress_bar=False)


fitted = functools.cache(run)


def ends_where_ascent_does(name, found, prior=PRIOR):
    pvi, result = found
    once = {Streaming: one_after_another, Committee: each_alone}.get(type(pvi.schedule))
    q, own = ascent(prior, COUNTS) if once is None else once()
    seen = pvi.posterior(result.state)
    np.testing.assert_allclose([seen["b"].concentration, seen["b"].rate], q, rtol=TIGHT)
    np.testing.assert_allclose(seen["rate"].concentration, 2.0 + COUNTS, rtol=TIGHT)
    np.testing.assert_allclose(seen["rate"].mean, own, rtol=5 * TIGHT)


@each
def test_visits_end_where_ascent_by_hand_does(name):
    ends_where_ascent_does(name, fitted(name))


@each
def test_prior_and_sites_make_q(name):
    """Law 1, of shared latents and the rows' own, in the parameters that a user sees."""
    pvi, result = fitted(name)
    sites = [pvi.site(result.state, label).natural for label in pvi.groups]
    total = functools.reduce(lambda p, site: p + site, sites, result.state.prior)
    seen = pvi.posterior(result.state)
    for latent in ("b", "rate"):
        np.testing.assert_allclose(total.parts[latent].log + 1.0, seen[latent].concentration, rtol=TIGHT)
        np.testing.assert_allclose(total.parts[latent].rate, seen[latent].rate, rtol=TIGHT)
    # A group says nothing of other groups' rows.
    for label, site in zip(pvi.groups, sites, strict=True):
        assert np.all(np.asarray(site.parts["rate"].rate)[label != LABELS] == 0)


@pytest.mark.once
@pytest.mark.parametrize("name", [pytest.param("asynchronous", marks=pytest.mark.slow), "sequential steps"])
def test_rows_latents_that_stay_where_they_were_are_noticed(name, monkeypatch):
    own = _product_factors.OwnFactors.visit_group

    def visit(self, *args, **kwargs):
        return own(self, *args, **kwargs)[0], args[7]

    monkeypatch.setattr(_product_factors.OwnFactors, "visit_group", visit)
    with pytest.raises(AssertionError):
        ends_where_ascent_does(name, run(name, lambda counts: rates(counts)))


@pytest.mark.slow
def test_a_prior_of_rows_latents_that_is_left_out_is_noticed(monkeypatch):
    """Their cavity: the exactly held prior's part of q, which is twice that of the site's where it is mistaken for one."""
    own = _product_factors.OwnFactors._without
    monkeypatch.setattr(
        _product_factors.OwnFactors, "_without", lambda self: jax.tree.map(lambda x: x + 0.5, own(self))
    )
    with pytest.raises(AssertionError):
        ends_where_ascent_does("asynchronous", run("asynchronous", lambda counts: rates(counts)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asynchronous", "sequential steps"])
def test_a_factor_of_the_prior_stands_beside_them(name):
    """A count of 4 seen of b itself: one site more, with which coordinate ascent starts."""
    ends_where_ascent_does(name, run(name, rates, jnp.asarray(4)), PRIOR + np.array([4.0, 1.0]))


@functools.cache
def rounds_of_some():
    """States of rounds from which groups are away by chance."""
    pvi = made(StochasticSubset(rates={"a": 0.3, "b": 0.5, "c": 0.7}, damping={"a": 0.5}), GRADIENT)
    states = [pvi.init(KEY, jnp.asarray(COUNTS))]
    for _ in range(4):
        states.append(pvi.update(states[-1], jnp.asarray(COUNTS))[0])
    return pvi, states


@pytest.mark.once
def test_some_groups_free_energy_is_the_elbo_where_they_are_all():
    """PVI eq. 2 of every group: what it rises by between two states is what the ELBO does, rows' own latents' part included."""
    pvi, states = rounds_of_some()
    engine, everyone = pvi._engine, jnp.ones((3,), bool)

    @jax.jit
    def both(sites):
        state = dataclasses.replace(states[0], sites=sites)
        factors = engine._as_seen(engine.factors(engine.problem(state, (jnp.asarray(COUNTS),), {})), sites)
        own = engine._bare(state).sites
        evaluation = factors.evaluate(own, state.rule, engine.noise(state.rng_key))
        return jnp.array([evaluation.elbo, _subset._free_energy(factors, evaluation, own, everyone, own.prior, 1.0)[0]])

    elbo, free = both(states[4].sites) - both(states[0].sites)
    assert elbo > 0.1
    np.testing.assert_allclose(free, elbo, atol=1e-9 if X64 else 1e-4)


def test_groups_that_are_away_keep_what_their_rows_have():
    (pvi, states), away = rounds_of_some(), 0
    for before, after in itertools.pairwise(states):
        moved = pvi.posterior(after)["rate"].mean != pvi.posterior(before)["rate"].mean
        for label in pvi.groups:
            pair = [pvi.site(s, label).natural for s in (before, after)]
            still = jax.tree.all(jax.tree.map(np.array_equal, *pair))
            assert np.all(np.asarray(moved)[label == LABELS] != still)
            away += still
    assert 0 < away < 12


def one_group(schedule, rounds=3):
    solver = StochasticNaturalGradient(0.3, num_steps=5, average=0.5)
    pvi = PVI(Partition(rates, "data", ["a"] * 12), AutoExponentialFamily(rates), schedule=schedule, solver=solver)
    params = pvi.run(KEY, rounds, jnp.asarray(COUNTS), progress_bar=False).params
    return np.array([params["b_auto_concentration"], params["b_auto_rate"]])


@pytest.mark.once
def test_a_lone_groups_visits_are_the_steps_of_all_groups_together():
    """Of one group and all of its rows: the trajectory of rounds in parallel, late steps' average and all."""
    np.testing.assert_allclose(one_group(Sequential()), one_group(Synchronous(damping=1.0)), rtol=TIGHT)


@pytest.mark.slow
def test_batches_of_rows_lead_to_the_optimum():
    """Two rows of three to five a step: bounds are four times the largest error over 12 other keys."""
    pvi = made(Sequential(), StochasticNaturalGradient(batch_size=2, num_steps=20))
    seen = pvi.posterior(pvi.run(KEY, 40, jnp.asarray(COUNTS), progress_bar=False).state)
    q, _ = ascent(PRIOR, COUNTS)
    np.testing.assert_allclose(seen["b"].concentration, q[0], rtol=TIGHT)
    assert abs(float(seen["b"].mean) / (q[0] / q[1]) - 1) < 0.05


@pytest.mark.once
@pytest.mark.parametrize(
    ("schedule", "solver", "words"),
    [
        (
            Synchronous(),
            DifferentialPrivacy(NaturalGradient(), 0.0, 1.0),
            r"'rate' is inside the partitioned plate; .*are not noised: fit without it",
        ),
    ],
    ids=["private"],
)
def test_what_does_not_go_with_rows_latents_says_what_to_write(schedule, solver, words):
    with pytest.raises(PVIError, match=words):
        made(schedule, solver).init(KEY, jnp.asarray(COUNTS))


@pytest.mark.parametrize("schedule", [Synchronous(damping=1.0), Sequential()], ids=["together", "alone"])
def test_a_batch_that_goes_around_a_group_finds_what_all_rows_do(schedule):
    """Where every row is in it equally often, for its own latents as for the shared one; not where one of three is there twice."""

    def after(batch_size):
        solver = StochasticNaturalGradient(0.5, num_steps=2, batch_size=batch_size, average=0.0)
        pvi = PVI(
            Partition(rates, "data", [0] * 9 + [1] * 3), AutoExponentialFamily(rates), solver=solver, schedule=schedule
        )
        return pvi.get_params(pvi.run(KEY, 1, COUNTS, progress_bar=False).state)

    once, around, some = after(None), after(18), after(4)
    assert any("rate" in name for name in once)
    for name, value in once.items():
        np.testing.assert_allclose(around[name], value, rtol=TIGHT)
    assert not all(np.allclose(some[name], value, rtol=1e-2) for name, value in once.items())
