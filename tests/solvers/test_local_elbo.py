"""Optimisers on single sites: exact where the model is, the natural gradient's optimum elsewhere, whatever q started from."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.optim
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi.solvers._minibatch as minibatch
import numpyro_pvi.solvers._natural_gradient as natural_gradient
from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.families import NormalFamily
from numpyro_pvi.runtime import LaxMap
from numpyro_pvi.schedules import Asynchronous, Committee, Sequential, StochasticSubset, Streaming, Synchronous
from numpyro_pvi.solvers import Derivatives, DifferentialPrivacy, LocalELBO, NaturalGradient, StochasticNaturalGradient
from tests.laws import oracles
from tests.laws.models import (
    NOISE,
    PRIOR_LOC,
    make_independent_linear,
    make_linear,
    make_logistic,
    make_scale,
    rows,
)

KEY = jax.random.key(0)
X, Y, CLASSES = rows(24)
LABELS = np.arange(24) % 3


def fit(model, y, solver, rounds, schedule=None, guide=AutoMultivariateNormal, labels=LABELS, **options):
    pvi = PVI(Partition(model, "data", labels), guide(model), solver=solver, schedule=schedule, **options)
    return pvi, pvi.run(KEY, rounds, X, y, progress_bar=False)


def problem_of(pvi, state, args):
    """What a schedule sees of a fit."""
    return pvi._engine.problem(state.plan, state.packing, args, {}, {}, (state.prior, state.exact), 1)


def moments(result):
    """Location and marginal sds of q."""
    params = {k: np.asarray(v, np.float64) for k, v in result.params.items()}
    if "auto_scale" in params:
        return params["auto_loc"], params["auto_scale"]
    return params["auto_loc"], np.sqrt(np.sum(params["auto_scale_tril"] ** 2, axis=1))


def linear_posterior(guide):
    """Location and sds of the optimal q for the linear model."""
    loc, covariance = oracles.linear_posterior(X, Y, NOISE, np.zeros(2), 4 * np.eye(2))
    full = guide is AutoMultivariateNormal
    return loc, np.sqrt(np.diag(covariance)) if full else 1 / np.sqrt(np.diag(np.linalg.inv(covariance)))


def distance(result, loc, sd):
    """Largest difference of a location, in sds, and of a log sd."""
    own, own_sd = moments(result)
    return float(np.max(np.abs(own - loc) / sd)), float(np.max(np.abs(np.log(own_sd / sd))))


# ---------------------------------------------------------------- where it goes

PAIRS = {"num_particles": 2}
EXACT = {
    "L-BFGS": (LocalELBO(optax.lbfgs(), num_steps=10, **PAIRS), 1e-4, AutoMultivariateNormal),
    "Minimize": (LocalELBO(numpyro.optim.Minimize(), num_steps=2, **PAIRS), 1e-3, AutoDiagonalNormal),
    "SGD": (LocalELBO(optax.sgd(0.01), num_steps=60, **PAIRS), 1e-3, AutoDiagonalNormal),
    "numpyro Adam": (LocalELBO(numpyro.optim.Adam(0.05), num_steps=60, **PAIRS), 0.05, AutoMultivariateNormal),
    "natural": (StochasticNaturalGradient(0.5, num_steps=10), 1e-4, AutoMultivariateNormal),
    "natural, mean field": (StochasticNaturalGradient(0.5, num_steps=10), 1e-4, AutoDiagonalNormal),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_linear_model_ends_at_its_posterior(name):
    """Pairs of both signs make the gradient exact there; Adam's last steps remain."""
    solver, allowed, guide = EXACT[name]
    _, result = fit(make_independent_linear(), Y, solver, 20, Sequential(), guide)
    far, stretched = distance(result, *linear_posterior(guide))
    assert far < allowed
    assert stretched < 1e-4


class AtPoints:
    """Rows that are read at points: a Gaussian's steps ask for nothing else."""

    pointwise = True
    fresh_batches = False

    def message(self, cavity, site, key, rows=None):
        raise NotImplementedError

    def step(self, cavity, site, share, key, rows=None):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class NormalRows(AtPoints):
    """Rows ``N(y_n; theta, 1)`` of one group: every batch has curvature B, and the group N."""

    y: Any
    family = NormalFamily(1)
    quadratic, noisy = False, True

    @property
    def num_rows(self):
        return len(self.y)

    max_rows = num_rows

    def expected(self, moments):
        raise NotImplementedError  # a visit by batches never passes over all rows

    def derivatives(self, points, rows=None, hessian=False, key=None):
        y = self.y if rows is None else self.y[rows]
        gap = y - points
        bend = -jnp.full((len(points), 1, 1), float(len(y)), points.dtype)
        return Derivatives(-0.5 * (gap**2).sum(-1), gap.sum(-1)[:, None], bend if hessian else None)


def batched_site():
    """The site's precision and location after one visit by batches of two of eight rows."""
    y, family = jnp.linspace(-1.0, 2.0, 8), NormalFamily(1)
    solver = StochasticNaturalGradient(0.2, num_steps=80, batch_size=2, curvature="hessian")
    prior, site = family.from_loc_sd(jnp.zeros(1), jnp.ones(1)), family.zeros((), y.dtype)
    found = jax.jit(lambda key: solver.solve(NormalRows(y), prior, site, solver.init(family, y.dtype), key).site)(KEY)
    return float(found.precision[0]), float(found.precision_mean[0] / found.precision[0]), float(y.mean())


def test_a_batch_stands_for_all_rows_of_its_group(monkeypatch):
    """Weighted by N_m / B a visit by batches ends at the factor's own site; a weight that is forgotten is seen."""
    precision, loc, mean = batched_site()
    assert precision == pytest.approx(8.0, rel=1e-4)
    assert loc == pytest.approx(mean, abs=0.15)
    right = natural_gradient.plan_batches
    monkeypatch.setattr(natural_gradient, "plan_batches", lambda *given: right(*given)._replace(weight=1.0))
    assert batched_site()[0] < 3.0


def make_curved():
    def curved(X, y):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(2 * jnp.tanh(X @ w), 0.5), obs=y)

    return curved


def test_the_evidence_of_an_unstructured_model_is_its_elbo():
    """Losses are on few draws that stay; the bound is on many fresh ones, and equals the ELBO of q by a grid."""
    pvi, result = fit(make_curved(), Y, LocalELBO(), 4)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    params = {k: np.asarray(v, float) for k, v in result.params.items()}
    loc, root = params["auto_loc"], params["auto_scale_tril"]
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    shares = np.outer(weights, weights).reshape(-1) / (2 * np.pi)
    points = loc + grid @ root.T
    fitted = -0.5 * ((Y - 2 * np.tanh(points @ X.T)) ** 2 / 0.25 + np.log(2 * np.pi * 0.25)).sum(1)
    prior = -0.5 * (points**2 / 9 + np.log(2 * np.pi * 9)).sum(1)
    entropy = 1 + np.log(2 * np.pi) + np.log(np.abs(np.diag(root))).sum()
    value, error = pvi.log_evidence(result.state, X, Y, with_error=True)
    assert float(error) < 0.1
    assert float(value) == pytest.approx(shares @ (fitted + prior) + entropy, abs=0.05 + 4 * float(error))


def test_parallel_visits_are_damped_by_the_number_of_groups():
    guide = AutoDiagonalNormal
    _, result = fit(make_independent_linear(), Y, EXACT["L-BFGS"][0], 25, Synchronous(), guide)
    assert np.allclose(result.info.step, 1 / 3)
    assert max(distance(result, *linear_posterior(guide))) < 1e-3


@pytest.mark.parametrize(
    "solver",
    [
        LocalELBO(optax.adam(0.03), epochs=8, batch_size=4),
        LocalELBO(optax.adam(0.03), num_steps=40, num_particles=4),
        LocalELBO(optax.adam(0.03), num_steps=60, num_particles=4, curvature="steps", precision_step=0.3),
        StochasticNaturalGradient(0.05, epochs=8, batch_size=4),
        StochasticNaturalGradient(0.03, num_steps=60, num_particles=4, curvature="stein"),
    ],
    ids=["batches", "all rows", "curvature from steps", "natural", "natural, Stein"],
)
def test_a_logistic_model_ends_at_the_natural_gradients_optimum(solver):
    """Monte Carlo error is what remains: a quarter of a posterior sd, a fifth of an sd's size."""
    _, best = fit(make_logistic(), CLASSES, NaturalGradient(), 20)
    _, result = fit(make_logistic(), CLASSES, solver, 40)
    far, stretched = distance(result, *moments(best))
    assert far < 0.25
    assert stretched < 0.2
    assert float(result.losses[-1]) < float(best.losses[-1]) + 0.05


@pytest.mark.parametrize("curvature", ["expected", "steps"])
def test_sites_are_data_and_not_where_q_started(curvature):
    """q starts six times too narrow, and three times too wide: the sites forget it, though thirty Adam steps would not."""
    solver = LocalELBO(optax.adam(0.03), num_steps=30, num_particles=4, curvature=curvature, precision_step=0.5)
    ends = []
    for sd in (0.1, 2.0):
        model = make_logistic()
        pvi = PVI(Partition(model, "data", LABELS), AutoDiagonalNormal(model), solver=solver)
        first = {"auto_loc": jnp.zeros(2), "auto_scale": jnp.full(2, sd)}
        state = pvi.init(KEY, X, CLASSES, init_params=first)
        begin = np.asarray(state.sites.groups.precision)
        state = pvi.run(KEY, 50, X, CLASSES, init_state=state, progress_bar=False).state
        ends.append((begin, np.asarray(state.sites.groups.precision)))
    (narrow_first, narrow), (wide_first, wide) = ends
    assert np.abs(narrow_first - wide_first).min() > 30
    assert np.abs(narrow - wide).max() < 0.1 * np.abs(wide).max() + 0.05


def test_a_prior_outside_the_family_gets_its_natural_gradient():
    _, best = fit(make_scale(), Y, NaturalGradient(), 40)
    _, result = fit(make_scale(), Y, LocalELBO(optax.adam(0.03), num_steps=30, num_particles=4), 40)
    far, stretched = distance(result, *moments(best))
    assert far < 0.25
    assert stretched < 0.2


# ---------------------------------------------------------------- visits in parallel that allow for one another

SHARE = 0.4
NARROW = {"auto_loc": jnp.array([0.3, -0.1]), "auto_scale": jnp.full(2, 0.03)}
GROUPS = [(X[m == LABELS], Y[m == LABELS]) for m in range(3)]


def allowing(power):
    """Pairs of both signs and a search along lines: visits go all the way, and nothing is drawn that would be seen."""
    return LocalELBO(optax.lbfgs(), num_steps=8, num_particles=2, power=power, precision_step=SHARE)


@functools.cache
def trajectory(power, rounds, fault=""):
    """Under a fault or none: locations and precisions of q, round by round, from a start that is a fifth as wide as its end."""
    model = make_independent_linear()
    pvi = PVI(Partition(model, "data", LABELS), AutoDiagonalNormal(model), solver=allowing(power))
    state, found = pvi.init(KEY, X, Y, init_params=NARROW), []
    for _ in range(rounds):
        state, _ = pvi.update(state, X, Y)
        params = pvi.get_params(state)
        found.append(np.concatenate([params["auto_loc"], params["auto_scale"] ** -2.0]))
    return np.array(found)


def recursion(power, rounds, groups=GROUPS, start=(0.3, -0.1), total=0.03**-2.0, share=SHARE):
    """The same of visits that end where the gradient of ``power f - KL(q || q / t^power)`` is 0, one linear system each."""
    prior, count = np.full(2, 0.25), len(groups)
    vectors, precisions = [total * np.asarray(start) / count] * count, [(total - prior) / count] * count
    found = []
    for _ in range(rounds):
        vector, precision = sum(vectors), prior + sum(precisions)
        loc = vector / precision
        for m, (rows_of, response) in enumerate(groups):
            curvature = rows_of.T @ rows_of / NOISE**2
            cavity = vector - power * vectors[m], precision - power * precisions[m]
            # The tilted distribution of the location: a likelihood to a power times what is left of q.
            tilted = power * curvature + np.diag(np.maximum(cavity[1], 0.1 * precision))
            slope = power * (rows_of.T @ response / NOISE**2 - curvature @ loc) + cavity[0] - cavity[1] * loc
            there = loc + np.linalg.solve(tilted, slope) / power
            widened = share * (np.diag(curvature) - precisions[m])
            change = (precision + widened) * there - vector
            # All of them together: the power over the number of groups.
            vectors[m] = vectors[m] + min(1.0, power / count) * change
            precisions[m] = precisions[m] + min(1.0, power / count) * widened
        found.append(np.concatenate([sum(vectors) / (prior + sum(precisions)), prior + sum(precisions)]))
    return np.array(found)


def far(found, wanted):
    """Largest difference, in sds of the recursion's q, and of a log precision."""
    shift = np.abs(found[:, :2] - wanted[:, :2]) * np.sqrt(wanted[:, 2:])
    return max(shift.max(), np.abs(np.log(found[:, 2:] / wanted[:, 2:])).max())


@pytest.mark.parametrize("power", [1.5, 2.0])
def test_parallel_rounds_are_those_of_power_visits(power, x64):
    assert far(trajectory(power, 40), recursion(power, 40)) < (1e-5 if x64 else 1e-2)


def test_every_power_ends_at_the_mean_field_posterior():
    exact = oracles.linear_posterior(X, Y, NOISE, np.zeros(2), 4 * np.eye(2))
    loc, variances = oracles.mean_field_of_gaussian(*exact)
    end = np.concatenate([loc, 1 / variances])[None]
    assert max(far(recursion(power, 400)[-1:], end) for power in (1.0, 1.5, 2.0)) < 1e-6
    assert far(trajectory(2.0, 40)[-1:], end) < 0.02


@pytest.mark.parametrize("schedule", [Streaming(), Committee()], ids=["streaming", "committee"])
def test_a_power_is_refused_where_no_group_is_visited_again(schedule):
    """A part of every change would be all that is ever taken."""
    model = make_independent_linear()
    pvi = PVI(Partition(model, "data", LABELS), AutoDiagonalNormal(model), solver=allowing(2.0), schedule=schedule)
    with pytest.raises(PVIError, match=r"LocalELBO\(power=2.0\) go a part of the way each"):
        pvi.init(KEY, X, Y)


@pytest.mark.parametrize(("power", "kept"), [(1.0, 9.0), (5.0, 1.0)])
def test_a_round_leaves_of_the_way_what_the_docstring_says(power, kept):
    """Ten groups of the same rows, columns at right angles: ``k s / (k s + h)``, k = M - 1 at power 1 and 1 at M / 2."""
    x, y = np.linalg.qr(np.array([[1.0, 2.0], [2.0, 1.0]]))[0] * 40, np.array([10.0, -20.0])
    h, s = 1600 / NOISE**2, 16_000 / NOISE**2
    found = recursion(power, 3, [(x, y)] * 10, (0.0, 0.0), 0.25 + 10 * s, 1e-9)[:, :2]
    end = oracles.linear_posterior(np.tile(x, (10, 1)), np.tile(y, 10), NOISE, np.zeros(2), 4 * np.eye(2))[0]
    left = (kept * s / (kept * s + h)) ** np.arange(1, 4)
    np.testing.assert_allclose(1 - found / end, np.stack([left, left], 1), rtol=1e-4)


@pytest.mark.once
def test_visits_of_a_power_that_are_held_back_by_the_cavity_would_be_seen(monkeypatch):
    monkeypatch.setattr("numpyro_pvi.solvers._local_elbo.held_back", lambda family, cavity, q, power: cavity)
    assert far(trajectory(1.5, 3, "cavity"), recursion(1.5, 3)) > 0.1


@pytest.mark.once
def test_joint_steps_that_do_not_know_of_the_power_would_be_seen(monkeypatch):
    monkeypatch.setattr("numpyro_pvi.schedules._synchronous.taken_whole", lambda problem: 1.0)
    assert far(trajectory(1.5, 3, "joint step"), recursion(1.5, 3)) > 0.1


def halvings_of_hollow_factors():
    """Where every group asks for a precision below zero."""

    def hollow(x):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.factor("up", 0.5 * jnp.square(x @ w))

    solver = LocalELBO(optax.sgd(1e-6), num_steps=1, num_particles=2, power=2.0)
    pvi = PVI(Partition(hollow, "data", LABELS), AutoDiagonalNormal(hollow), solver=solver)
    state, _ = pvi.update(pvi.init(KEY, X), X)
    return int(np.sum(np.asarray(pvi.info(state).backoffs)))


@pytest.mark.once
def test_means_of_normalisable_q_are_normalisable_at_every_power(monkeypatch):
    assert halvings_of_hollow_factors() == 0
    plain = minibatch.move_precision

    def fault(family, site, q, *more):
        return plain(family, site, q * 2.0, *more)

    monkeypatch.setattr("numpyro_pvi.solvers._local_elbo.move_precision", fault)
    assert halvings_of_hollow_factors() > 0


@pytest.mark.once
def test_schedules_take_a_powers_part_of_what_comes_at_once():
    pvi, result = fit(make_independent_linear(), Y, allowing(1.5), 3, Asynchronous(1.0), AutoDiagonalNormal)
    # From the second round on every group is two changes late.
    assert np.allclose(result.info.step, 0.5)
    problem = problem_of(pvi, result.state, (jnp.asarray(X), jnp.asarray(Y)))
    assert Synchronous()._full(problem) == 0.5
    assert StochasticSubset(2)._full(problem) == 0.75
    assert DifferentialPrivacy(allowing(1.5), 0.0, 1.0).power == 1.5


def test_a_power_needs_a_guide_without_correlations():
    with pytest.raises(PVIError, match=r"power=1.5\) is for guides without correlations"):
        fit(make_independent_linear(), Y, allowing(1.5), 1)


# ---------------------------------------------------------------- batches


@dataclasses.dataclass
class Rows(AtPoints):
    """A factor of which only the number of rows is asked."""

    num_rows: Any
    max_rows: int = 7
    family: Any = None
    quadratic = noisy = False

    def expected(self, moments):
        raise NotImplementedError

    def derivatives(self, points, rows=None, hessian=False, key=None):
        raise NotImplementedError


@pytest.mark.parametrize("traced", [False, True])
def test_an_epoch_takes_every_row_once(traced):
    count = jnp.int32(12) if traced else 12
    batches = minibatch.plan_batches(Rows(count, 20), KEY, 4, None, 1)
    assert int(batches.num_steps) == 3
    taken = np.concatenate([np.asarray(batches.rows(k)) for k in range(3)])
    assert sorted(taken) == list(range(12))
    assert float(batches.weight) == 3.0


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("count", [7, 2])
def test_batch_sums_times_their_weight_are_unbiased(count, fresh):
    """Over many keys, at every step, also where the batch does not divide the group, or is larger; five standard errors."""
    values = np.arange(1.0, count + 1.0)

    def estimate(key, step):
        factor = types.SimpleNamespace(num_rows=count, max_rows=7, fresh_batches=fresh)
        batches = minibatch.plan_batches(factor, key, 3, None, 2)
        return batches.weight * jnp.sum(jnp.asarray(values)[batches.rows(step)])

    keys = jax.random.split(KEY, 4_000)
    for step in range(5):
        draws = np.asarray(jax.vmap(lambda k, s=step: estimate(k, s))(keys))
        assert abs(draws.mean() - values.sum()) < 5 * draws.std() / np.sqrt(len(draws))


def test_batches_without_their_weight_would_be_seen(monkeypatch):
    """Under a prior as strong as the data, which half of the data's force cannot match."""
    solver, strong = LocalELBO(optax.adam(0.02), epochs=10, batch_size=4), 0.02 * np.eye(2)
    loc, covariance = oracles.linear_posterior(X, Y, NOISE, PRIOR_LOC, strong)
    wanted = loc, np.sqrt(np.diag(covariance))
    _, right = fit(make_linear(strong), Y, solver, 30)
    assert distance(right, *wanted)[0] < 0.4
    plain = minibatch.plan_batches

    def unweighted(*args):
        return plain(*args)._replace(weight=1.0)

    monkeypatch.setattr("numpyro_pvi.solvers._local_elbo.plan_batches", unweighted)
    _, wrong = fit(make_linear(strong), Y, solver, 30)
    assert distance(wrong, *wanted)[0] > 0.6


def test_draws_come_in_pairs_over_steps():
    zero = jnp.zeros((1, 3))
    first = minibatch.next_draws(KEY, 0, zero)
    second = minibatch.next_draws(KEY, 1, first)
    third = minibatch.next_draws(KEY, 2, second)
    assert np.array_equal(second, -first)
    assert not np.array_equal(np.abs(third), np.abs(first))
    pairs = minibatch.next_draws(KEY, 3, jnp.zeros((4, 3)))
    assert np.array_equal(pairs[:2], -pairs[2:])


@pytest.mark.parametrize(
    "solver", [LocalELBO(epochs=2, batch_size=3), StochasticNaturalGradient(epochs=2, batch_size=3)]
)
def test_unequal_groups_and_another_runtime(solver, tolerance):
    labels = np.repeat([0, 1, 2], [3, 8, 13])
    ends = [
        fit(make_logistic(), CLASSES, solver, 3, labels=labels, **options)[1].state.sites
        for options in ({}, {"runtime": LaxMap()})
    ]
    for first, second in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=100 * tolerance)


# ---------------------------------------------------------------- states and rounds


@pytest.mark.parametrize(("word", "steps"), [("reset", None), ("keep", 8)])
def test_the_optimisers_state(word, steps):
    solver = LocalELBO(optax.adam(0.02), num_steps=4, optimiser_state=word)
    _, result = fit(make_logistic(), CLASSES, solver, 2)
    counts = [np.asarray(x) for x in jax.tree.leaves(result.state.solver_state) if x.dtype == jnp.int32]
    assert [c.tolist() for c in counts] == ([] if steps is None else [[steps] * 3])


def test_a_line_search_sees_the_same_draws_all_along():
    """Else values that it compares would differ by their noise: a second visit of more steps must not move the site."""
    model = make_logistic()
    ends = []
    for steps in (20, 40):
        solver = LocalELBO(optax.lbfgs(), num_steps=steps, num_particles=4)
        _, result = fit(model, CLASSES, solver, 1, Sequential(), AutoDiagonalNormal)
        ends.append(moments(result)[0])
    np.testing.assert_allclose(*ends, atol=1e-4)


@pytest.mark.parametrize("make_model", [make_logistic, make_scale])
def test_the_loss_is_that_of_the_state(make_model, tolerance):
    y = CLASSES if make_model is make_logistic else Y
    pvi, result = fit(make_model(), y, LocalELBO(num_steps=5), 3)
    np.testing.assert_allclose(pvi.evaluate(result.state, X, y), result.losses[-1], rtol=100 * tolerance)


def test_rounds_are_tested_by_values_only():
    """Nothing that only a natural gradient would read is computed after a round."""
    pvi, result = fit(make_logistic(), CLASSES, LocalELBO(num_steps=2), 1)
    state = result.state
    problem = problem_of(pvi, state, (jnp.asarray(X), jnp.asarray(CLASSES)))
    evaluation = problem.evaluate(state.sites, state.rule, pvi._engine.noise(problem, state.rng_key))
    assert evaluation.groups.target is None
    assert evaluation.groups.product is None


@pytest.mark.parametrize("schedule", [Sequential(), Synchronous(damping=1.0)], ids=["cyclic", "parallel"])
def test_a_round_that_loses_too_much_is_undone(schedule):
    """Steps of a hundred nats' worth: the ELBO never falls by more than noise explains, D / 2 = 1 nat a round."""
    solver = LocalELBO(optax.sgd(30.0), num_steps=2)
    pvi, result = fit(make_logistic(), CLASSES, solver, 8, schedule)
    start = float(pvi.evaluate(pvi.init(KEY, X, CLASSES), X, CLASSES))
    losses = np.concatenate([[start], np.asarray(result.losses)])
    assert np.all(np.diff(losses) < 1.01)
    assert int(np.max(result.info.backoffs)) > 0
    assert result.info.valid


def test_a_factor_that_is_not_finite_keeps_its_site():
    """exp(2000 w) overflows under the prior: that site stays and is reported, the other moves."""

    def fragile(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Poisson(jnp.exp(x * w)), obs=y)

    x, y, labels = np.array([0.2, 0.1, 2000.0, 1500.0]), np.array([1, 0, 3, 1]), ["fine", "fine", "bad", "bad"]
    solver = LocalELBO(optax.sgd(0.01), num_steps=2, curvature="steps")
    pvi = PVI(Partition(fragile, "data", labels), AutoMultivariateNormal(fragile), solver=solver, init_sites="prior")
    state, _ = pvi.update(pvi.init(KEY, x, y), x, y)
    assert dict(zip(pvi.groups, pvi.info(state).skipped, strict=True)) == {"fine": False, "bad": True}
    assert np.all(np.asarray(pvi.site(state, "bad").precision) == 0)
    assert np.isfinite(pvi.site(state, "fine").precision_mean).all()


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_steps": 3, "epochs": 1}, "num_steps=3, epochs=1"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"epochs": -1}, "epochs=-1"),
        ({"epochs": 0.5}, "epochs=0.5"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"num_particles": 3}, "num_particles=3"),
        ({"average": 1.0}, "average=1.0"),
        ({"optimiser_state": "forget"}, "optimiser_state='forget'"),
        ({"precision_step": 0.0}, "precision_step=0.0"),
        ({"curvature": "hessian"}, "curvature='hessian'"),
        ({"num_draws": 0}, "num_draws=0"),
        ({"power": 0.5}, "power=0.5"),
        ({"power": True}, "power=True"),
        ({"optim": "adam"}, "optim='adam'"),
        ({"optim": optax.lbfgs(), "batch_size": 4}, "line search"),
        ({"optim": numpyro.optim.Minimize(), "batch_size": 4}, "line search"),
    ],
)
def test_senseless_settings_are_refused_by_name(options, words):
    with pytest.raises(PVIError, match=f"LocalELBO.*{words}" if "line" not in words else words):
        LocalELBO(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_steps": 3, "epochs": 1}, "num_steps=3, epochs=1"),
        ({"step_size": 1.5}, "step_size=1.5"),
        ({"average": -0.1}, "average=-0.1"),
        ({"curvature": "steps"}, "curvature='steps'"),
    ],
)
def test_natural_steps_refuse_senseless_settings_too(options, words):
    with pytest.raises(PVIError, match=f"StochasticNaturalGradient.*{words}"):
        StochasticNaturalGradient(**options)


def test_a_batch_goes_around_a_group_that_has_fewer_rows(x64):
    """Steps by a batch that every row is in equally often are those by all rows; by a batch of four of three rows they are not."""
    labels = np.array(["big"] * 21 + ["small"] * 3)

    def after(batch_size):
        solver = StochasticNaturalGradient(1.0, num_steps=1, batch_size=batch_size, average=0.0)
        return fit(make_linear(), Y, solver, 1, labels=labels)

    (pvi, once), (_, twice), (_, some) = after(None), after(42), after(4)
    tolerance = 1e-9 if x64 else 1e-4
    for label in ("big", "small"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
            pvi.site(once.state, label).natural,
            pvi.site(twice.state, label).natural,
        )
    assert not np.allclose(*(pvi.site(run.state, "small").natural.precision for run in (once, some)), rtol=1e-3)


def test_masks_have_no_batches():
    model = make_logistic()
    pvi = PVI(Partition(model, "data", LABELS, mode="mask"), AutoDiagonalNormal(model), solver=LocalELBO(batch_size=2))
    with pytest.raises(PVIError, match=r"masks.*batch_size=None"):
        pvi.init(KEY, X, CLASSES)
    all_rows = LocalELBO(optax.lbfgs(), num_steps=5, num_particles=2)
    pvi = PVI(Partition(model, "data", LABELS, mode="mask"), AutoDiagonalNormal(model), solver=all_rows)
    assert np.isfinite(pvi.run(KEY, 2, X, CLASSES, progress_bar=False).losses).all()


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoDiagonalNormal])
def test_params_of_a_model_without_structure_are_stepped_beside_values_alone(guide):
    """Evaluations hold no messages that points could be compared by; the losses are on the same draws throughout."""

    def model(X, y):
        width = numpyro.param("width", 3.0, constraint=dist.constraints.positive)
        scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
        a = numpyro.sample("a", dist.Normal(0.0, width))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.tanh(a * scale) * X[:, 0], 1.0), obs=y)

    solver = LocalELBO(num_steps=2, num_particles=4)
    pvi, result = fit(model, Y, solver, 3, guide=guide, optim=numpyro.optim.Adam(0.1))
    assert np.all(np.isfinite(result.losses))
    # Adam's steps are .1 long, in the log of the width.
    np.testing.assert_allclose(abs(np.log(result.params["width"] / 3.0)), 0.3, atol=0.1)
    np.testing.assert_allclose(result.losses[-1], pvi.evaluate(result.state, X, Y), rtol=1e-5)
