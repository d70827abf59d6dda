"""Laws 1, 2, 6 and 10 while groups come, come back and leave; and the batch fixed point after all have come back."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi._group_lifecycle as groups_part
import numpyro_pvi.runtime._engine as engine
import numpyro_pvi.runtime._local as local
import numpyro_pvi.sites as sites_room
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Asynchronous, Committee, Sequential, StochasticSubset, Streaming, Synchronous
from numpyro_pvi.solvers import (
    SNEP,
    AlphaDivergence,
    Conjugate,
    LocalELBO,
    NaturalGradient,
    PowerEP,
    StochasticNaturalGradient,
)

from . import oracles
from .fits import guide_moments, numbers
from .models import NOISE, PRIOR_COVARIANCE, PRIOR_LOC, make_hyper, make_linear, make_logistic, rows

FAR = 1e-2
KEY = jax.random.key(0)
X, Y, BINARY = rows(22)
# Groups of different sizes, in the order of arrival.
LABELS = np.repeat(["first", "b", "c", "d"], [6, 9, 4, 3])
SCHEDULES = {"streaming": Streaming(), "parallel": Synchronous(), "cyclic": Sequential()}
# Those whose settings know nothing of which groups there are.
ALL_SCHEDULES = SCHEDULES | {"late": Asynchronous(), "few": StochasticSubset(1), "committee": Committee()}


def rows_of(label, y=Y):
    mine = label == LABELS
    return X[mine], y[mine]


def begin(make, schedule=None, solver=None, y=Y, guide=AutoMultivariateNormal, label="first", rounds=40, **options):
    """A fit of one group; a fresh model each time, so that no program compiled with or without a fault is found again."""
    model, data = make(), rows_of(label, y)
    partition = Partition(model, "data", [label] * len(data[1]))
    pvi = PVI(partition, guide(model), solver=solver, schedule=schedule or Streaming(), **options)
    state = pvi.init(KEY, *data)
    return pvi, pvi.run(KEY, rounds, *data, init_state=state, tol=1e-9, progress_bar=False).state


def stream(make=make_linear, schedule=None, solver=None, y=Y, labels=("first", "b", "c", "d"), **options):
    pvi, state = begin(make, schedule, solver, y, label=labels[0], **options)
    for label in labels[1:]:
        state = pvi.add_group(state, label, *rows_of(label, y))
    return pvi, state


@functools.cache
def shared(make=make_linear, schedule=SCHEDULES["streaming"], labels=("first", "b", "c", "d")):
    """One stream for all tests that only read it; faults need programs, and so models, of their own."""
    return stream(make, schedule, y=BINARY if make is make_logistic else Y, labels=labels)


def conjugate_gap(pvi, state, labels):
    """Law 2: largest relative difference from the closed-form posterior given the groups named."""
    mine = np.isin(LABELS, labels)
    wanted = oracles.linear_posterior(X[mine], Y[mine], NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    found = guide_moments(pvi, state)
    return max(float(np.max(np.abs(f - w)) / np.max(np.abs(w))) for f, w in zip(found, wanted, strict=True))


def sum_gap(pvi, state):
    """Law 1: prior and all sites, summed in float64, against the guide's params; relative."""
    loc, covariance = guide_moments(pvi, state)
    vector, precision = numbers(state).total
    found = np.linalg.inv(covariance)
    gaps = np.abs(found - precision).max() / np.abs(precision).max(), np.abs(found @ loc - vector).max()
    return float(max(gaps[0], gaps[1] / np.abs(vector).max()))


def distance(pvi, state, best):
    loc, covariance = guide_moments(pvi, state)
    return float(np.max(np.abs(loc - best[0]) / np.sqrt(np.diag(best[1])))), float(
        np.max(np.abs(covariance / best[1] - 1))
    )


# ------------------------------------------------------------------------------------------------------ conjugate models


SOLVERS = {"conjugate": Conjugate(), "natural": NaturalGradient(), "ep": PowerEP()}
# Float32 repeats every schedule and every solver, not each with each.
ARRIVALS = [
    pytest.param(solver, ALL_SCHEDULES[word], id=f"{name}-{word}", marks=[pytest.mark.once] * again)
    for name, solver in SOLVERS.items()
    for word in ALL_SCHEDULES
    for again in [name != "conjugate" and word != "parallel"]
]


@pytest.mark.parametrize(("solver", "schedule"), ARRIVALS)
def test_laws_hold_at_every_arrival_and_departure(solver, schedule, x64):
    """1, 2 and 10: after each arrival q is the posterior of what has come; after a departure, of what is left."""
    tolerance = 1e-9 if x64 else 2e-5
    pvi, state = begin(make_linear, schedule, solver)
    come = ["first"]
    for label in ("b", "c", "d"):
        state = pvi.add_group(state, label, *rows_of(label))
        come.append(label)
        assert state.groups == tuple(come)
        assert sum_gap(pvi, state) < (1e-9 if x64 else 1e-3)
        assert conjugate_gap(pvi, state, come) < tolerance
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # law 10 holds here, so that nothing need be said
        for label in ("b", "d"):
            state = pvi.forget_group(state, label)
            come.remove(label)
            assert conjugate_gap(pvi, state, come) < tolerance
    state = pvi.revisit(state, "c", *rows_of("c"))
    assert state.groups == ("first", "c")
    assert conjugate_gap(pvi, state, come) < tolerance
    state = pvi.add_group(state, "d", *rows_of("d"))
    assert conjugate_gap(pvi, state, ["first", "c", "d"]) < tolerance


def test_the_bound_with_absent_groups_is_their_sites_up_to_a_constant(x64):
    """Law 6: where sites are exact, the loss differs from -log p(y) by what sites leave out of their factors."""
    pvi, state = shared()
    loss = float(pvi.evaluate(state, *rows_of("d")))
    evidence = oracles.linear_log_evidence(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    absent = LABELS != "d"
    left_out = oracles.expected_linear(X[absent], Y[absent], np.zeros(2), np.zeros((2, 2)), NOISE).sum()
    assert abs(loss + evidence - left_out) < (1e-8 if x64 else 2e-3)


def test_scores_before_absorbing_sum_to_the_evidence():
    """Prequential: the joint scores of groups, each before it is added, sum to log p(y); 4 standard errors of the draws."""
    pvi, data = shared()[0], rows_of("first")
    state = pvi.init(KEY, *data)
    total = error = 0.0
    for label in ("first", "b", "c", "d"):
        score = pvi.prequential(state, *rows_of(label), rng_key=jax.random.fold_in(KEY, len(label)), num_samples=4000)
        total, error = total + float(score.joint), error + 1 / float(score.ess) - 1 / 4000
        state = pvi.update(state, *data)[0] if label == "first" else pvi.add_group(state, label, *rows_of(label))
    exact = oracles.linear_log_evidence(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    assert abs(total - exact) < 4 * np.sqrt(error)


def test_row_scores_are_predictive_densities():
    """Each row's score against the closed form, Normal(x m, x V x + noise^2)."""
    pvi, state = shared()
    covariates, y = rows_of("c")
    score = pvi.prequential(state, covariates, y, rng_key=KEY, num_samples=20_000)
    loc, covariance = guide_moments(pvi, state)
    variance = np.einsum("ni,ij,nj->n", covariates, covariance, covariates) + NOISE**2
    exact = -0.5 * (oracles.LOG_2PI + np.log(variance) + (y - covariates @ loc) ** 2 / variance)
    assert np.max(np.abs(np.asarray(score.rows) - exact)) < 0.03
    np.testing.assert_allclose(float(score.total), np.asarray(score.rows).sum(), rtol=1e-5)


# -------------------------------------------------------------------------------------------------- what is not conjugate


def test_streaming_is_the_fit_to_the_tilted_posterior_of_each_group(x64):
    """After the second group q maximises its own bound, with the first group's site as part of the prior."""
    pvi, first = begin(make_logistic, Streaming(tol=1e-8), y=BINARY)
    state = pvi.add_group(first, "b", *rows_of("b", BINARY))
    prior = numbers(first)
    covariance = np.linalg.inv(prior.total[1])
    covariates, y = rows_of("b", BINARY)

    def elbo(loc, spread):
        kl = oracles.gaussian_kl(loc, spread, covariance @ prior.total[0], covariance)
        return oracles.expected_logistic(covariates, y, loc, spread).sum() - kl

    loc, spread = numbers(state).moments
    slope = oracles.elbo_gradient(elbo, loc, np.linalg.cholesky(spread))
    assert np.abs(slope).max() < (1e-5 if x64 else 5e-3)
    # The first group's site is untouched, and its fit is that of its own rows alone.
    np.testing.assert_array_equal(pvi.site(state, "first").precision, pvi.site(first, "first").precision)
    best = oracles.batch_vi_logistic(*rows_of("first", BINARY))
    assert max(distance(pvi, first, best)) < (1e-6 if x64 else 2e-3)


@pytest.mark.parametrize(
    "schedule",
    [SCHEDULES["streaming"], pytest.param(SCHEDULES["parallel"], marks=pytest.mark.once)],
    ids=["streaming", "parallel"],
)
def test_all_groups_back_reach_the_batch_fixed_point(schedule, x64):
    """Streaming is not batch VI; a stream whose groups have all been revisited is."""
    pvi, state = shared(make_logistic, schedule)
    best = oracles.batch_vi_logistic(X, BINARY)
    assert distance(pvi, state, best)[0] > 1e-2
    for _ in range(8 if isinstance(schedule, Streaming) else 1):
        state = pvi.revisit(state, list(LABELS), X, BINARY, num_steps=60, tol=1e-9)
    assert set(state.present) == set(LABELS)
    assert max(distance(pvi, state, best)) < (1e-4 if isinstance(schedule, Streaming) else 1e-6 if x64 else 2e-3)
    float(pvi.evaluate(state, X, BINARY))


def test_forgetting_is_approximate_until_the_rest_is_revisited(x64):
    pvi, state = shared(make_logistic, SCHEDULES["parallel"])
    with pytest.warns(UserWarning, match="forget_group\\('b'\\).*approximate until"):
        state = pvi.forget_group(state, "b")
    rest = LABELS != "b"
    best = oracles.batch_vi_logistic(X[rest], BINARY[rest])
    before = distance(pvi, state, best)[0]
    state = pvi.revisit(state, list(LABELS[rest]), X[rest], BINARY[rest], num_steps=60, tol=1e-9)
    assert before > 1e-2
    assert max(distance(pvi, state, best)) < (1e-6 if x64 else 2e-3)


def test_what_is_forgotten_exactly_depends_on_the_solver():
    """Steps and draws leave traces of the other groups in a site even where factors are quadratic."""
    plan = shared()[1].plan
    exact = [Conjugate(), NaturalGradient(), PowerEP(0.5), PowerEP(moments="exact")]
    near = [SNEP(), LocalELBO(), StochasticNaturalGradient(), AlphaDivergence(0.5), PowerEP(moments="importance")]
    assert all(groups_part.approximate_because(plan, solver) is None for solver in exact)
    for solver in near:
        assert type(solver).__name__ in groups_part.approximate_because(plan, solver)


@pytest.mark.filterwarnings("ignore:forget_group")
def test_absent_groups_count_in_the_rounds_of_present_ones(x64):
    """Rounds of one group maximise the bound in which the others are stood in for by their sites."""
    pvi, state = shared(make_logistic, SCHEDULES["parallel"])
    state = pvi.forget_group(pvi.forget_group(state, "c"), "first")
    data = rows_of("d", BINARY)
    state = pvi.revisit(state, "d", *data, num_steps=0)
    result = pvi.run(KEY, 60, *data, init_state=state, tol=1e-9, progress_bar=False)
    rest = numbers(result.state)
    absent = rest.groups[0]
    covariance = np.linalg.inv(rest.prior[1] + absent[1])

    def elbo(loc, spread):
        kl = oracles.gaussian_kl(loc, spread, covariance @ (rest.prior[0] + absent[0]), covariance)
        return oracles.expected_logistic(*data, loc, spread).sum() - kl

    loc, spread = rest.moments
    assert np.abs(oracles.elbo_gradient(elbo, loc, np.linalg.cholesky(spread))).max() < (1e-5 if x64 else 5e-3)
    np.testing.assert_allclose(float(result.losses[-1]), float(pvi.evaluate(result.state, *data)), rtol=1e-6)


def make_heavy_tailed():
    """A prior outside the family, over a quadratic likelihood."""

    def heavy_tailed(X, y):
        w = numpyro.sample("w", dist.StudentT(3.0, 0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(X @ w, NOISE), obs=y)

    return heavy_tailed


@pytest.mark.parametrize(
    ("make", "guide", "reason"),
    [
        (make_heavy_tailed, AutoMultivariateNormal, "PRIOR site \\(w\\)"),
        (make_linear, AutoDiagonalNormal, "mean-field"),
    ],
    ids=["prior factor", "mean field"],
)
def test_prior_factor_and_mean_field_stream_with_their_sums(make, guide, reason, x64):
    pvi, state = stream(make, Streaming(), labels=("first", "b"), guide=guide)
    if state.sites.prior is not None:
        np.testing.assert_array_equal(
            state.sites.prior.precision, pvi.revisit(state, "b", *rows_of("b")).sites.prior.precision
        )
    assert sum_gap(pvi, state) < (1e-8 if x64 else 1e-3)
    with pytest.warns(UserWarning, match=f"{reason}.*approximate"):
        pvi.forget_group(state, "b")


@pytest.mark.once
def test_a_hyperparameter_waits_for_all_groups():
    model, data = make_hyper(), rows_of("first")
    pvi = PVI(Partition(model, "data", ["first"] * 6), AutoMultivariateNormal(model), numpyro.optim.Adam(0.05))
    state = pvi.run(KEY, 8, *data, progress_bar=False).state
    sigma = float(pvi.get_params(state)["sigma"])
    assert abs(sigma - 1.5) > FAR
    added = pvi.add_group(state, "b", *rows_of("b"))
    assert float(pvi.get_params(added)["sigma"]) == sigma
    both = np.isin(LABELS, ["first", "b"])
    back = pvi.revisit(added, list(LABELS[both]), X[both], Y[both], num_steps=5)
    assert float(pvi.get_params(back)["sigma"]) != sigma
    with pytest.warns(UserWarning, match="sigma"):
        pvi.forget_group(back, "b")


# ---------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.once
def test_absent_groups_left_out_of_q_are_seen_by_law_1(monkeypatch):
    monkeypatch.setattr(sites_room, "sum_slots", lambda others: jax.tree.map(lambda x: 0 * x[0], others))
    monkeypatch.setattr(engine, "sum_slots", lambda others: jax.tree.map(lambda x: 0 * x[0], others))
    # Readings of states are programs of the process.
    jax.clear_caches()
    pvi, state = stream(labels=("first", "b"))
    found = sum_gap(pvi, state), conjugate_gap(pvi, state, ["first", "b"])
    jax.clear_caches()
    assert min(found) > FAR


@pytest.mark.once
def test_absent_groups_left_out_of_the_bound_are_seen_by_law_6(monkeypatch):
    right = local.LocalProblem.rest

    def wrong(self, moments):
        return right(dataclasses.replace(self, data=dataclasses.replace(self.data, others=None)), moments)

    monkeypatch.setattr(local.LocalProblem, "rest", wrong)
    pvi, state = stream(labels=("first", "b"))
    absent, both = LABELS == "first", np.isin(LABELS, ["first", "b"])
    left_out = oracles.expected_linear(X[absent], Y[absent], np.zeros(2), np.zeros((2, 2)), NOISE).sum()
    evidence = oracles.linear_log_evidence(X[both], Y[both], NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    assert abs(float(pvi.evaluate(state, *rows_of("b"))) + evidence - left_out) > FAR


@pytest.mark.once
def test_the_wrong_slot_kept_is_seen_by_law_10(monkeypatch):
    monkeypatch.setattr(
        groups_part, "keep_slots", lambda others, kept: sites_room.keep_slots(others, np.roll(kept, 1) * 0)
    )
    pvi, state = shared()
    assert conjugate_gap(pvi, pvi.forget_group(state, "b"), ["first", "c", "d"]) > FAR


@pytest.mark.once
def test_padding_that_counts_is_seen_by_law_2(monkeypatch):
    import numpyro_pvi.factors._plan as arrival

    right = arrival._pack_padded

    def wrong(num_rows, length, dim):
        packing = right(num_rows, length, dim)
        return dataclasses.replace(packing, mask=jnp.ones_like(packing.mask))

    pvi, state = shared()
    state = pvi.forget_group(state, "d")
    assert conjugate_gap(pvi, pvi.add_group(state, "d", *rows_of("d")), LABELS) < 1e-3
    monkeypatch.setattr(arrival, "_pack_padded", wrong)
    assert conjugate_gap(pvi, pvi.add_group(state, "d", *rows_of("d")), LABELS) > FAR


@pytest.mark.once
def test_a_group_absorbed_beside_later_ones_is_no_stream(monkeypatch):
    """The start of later groups' sites in an earlier one's cavity: seen by what its own rows alone say."""
    import numpyro_pvi.schedules._streaming as streaming

    right = streaming.Streaming.init

    def wrong(self, problem, dtype):
        return right(self, problem, dtype)._replace(fresh=jnp.zeros((problem.num_groups,), bool))

    def sites(faulty):
        model = make_logistic()
        with monkeypatch.context() as patched:
            if faulty:
                patched.setattr(streaming.Streaming, "init", wrong)
            partition = Partition(model, "data", LABELS)
            pvi = PVI(partition, AutoMultivariateNormal(model), schedule=Streaming(), init_sites="curvature")
            state = pvi.run(KEY, 1, X, BINARY, progress_bar=False).state
        return np.asarray(pvi.site(state, first).precision)

    # The stream takes groups as they appear in the data.
    first = str(LABELS[0])
    alone = begin(make_logistic, Streaming(), y=BINARY, label=first)
    own = np.asarray(alone[0].site(alone[1], first).precision)
    assert np.abs(sites(False) - own).max() < 5e-3
    assert np.abs(sites(True) - own).max() > FAR
