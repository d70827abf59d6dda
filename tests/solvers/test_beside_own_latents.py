"""Steps by batches of rows that have latents of their own: at draws of these given the shared ones, which then move themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi._compiling import work_of
from numpyro_pvi.expectations import LocalLatentProgram, LocalNoise
from numpyro_pvi.expectations._local_latents import LocalChunk
from numpyro_pvi.families import ConditionalNatural, MultivariateNormalFamily, NormalFamily, conditional_moments
from numpyro_pvi.runtime import _programs
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
)
from numpyro_pvi.solvers import LocalELBO, NaturalGradient, StochasticNaturalGradient
from tests.solvers.test_integrated_latents import KEY, LABELS, X, Y, closed_form, row_effects

RNG = np.random.default_rng(6)
COUNTS = RNG.poisson(np.exp(0.5 + 0.8 * RNG.normal(size=12)))
RING = np.eye(4)[[1, 2, 3, 0]] + np.eye(4)[[3, 0, 1, 2]]


def counts(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.4))
    with numpyro.plate("data", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(mu, scale))
        numpyro.sample("obs", dist.Poisson(jnp.exp(u)), obs=y)


def fitted(solver, schedule, rounds, mode="auto", guide=AutoMultivariateNormal, runtime=None, init_sites="auto"):
    pvi = PVI(
        Partition(row_effects, "data", LABELS, mode=mode),
        guide(row_effects),
        solver=solver,
        schedule=schedule,
        runtime=runtime,
        init_sites=init_sites,
    )
    state = pvi.init(KEY, X, Y)
    for _ in range(rounds):
        state, _ = pvi.update(state, X, Y)
    return pvi, state


def errors(pvi, state):
    """Errors of mean (in posterior sds), covariance (in correlations) and ELBO (nats) of a fit of `row_effects`."""
    mean, covariance, evidence = closed_form()
    params, sd = pvi.get_params(state), np.sqrt(np.diag(covariance))
    root = np.asarray(params["auto_scale_tril"])
    off = np.max(np.abs(np.asarray(params["auto_loc"]) - mean) / sd)
    bent = np.max(np.abs(root @ root.T - covariance) / np.outer(sd, sd))
    return np.array([off, bent, abs(float(pvi.evaluate(state, X, Y)) + evidence)])


FULL = StochasticNaturalGradient(step_size=1.0, num_steps=1)
SEARCHED = LocalELBO(optax.lbfgs(), num_steps=12, num_particles=2)
TOGETHER = Synchronous(damping=1.0)


@pytest.mark.parametrize(
    ("solver", "schedule", "mode"),
    [
        (FULL, TOGETHER, "args"),
        (FULL, Sequential(), "mask"),
        (SEARCHED, TOGETHER, "args"),
        pytest.param(FULL, TOGETHER, "mask", marks=pytest.mark.slow),
        pytest.param(FULL, Asynchronous(), "args", marks=pytest.mark.slow),
        pytest.param(FULL, StochasticSubset(4, damping=1.0), "args", marks=pytest.mark.slow),
        pytest.param(FULL, Streaming(visits=2), "args", marks=pytest.mark.slow),
        pytest.param(FULL, Committee(), "args", marks=pytest.mark.slow),
    ],
    ids=["together", "in turn by masks", "line search", "masked", "late", "drawn", "once", "committee"],
)
def test_two_visits_are_exact_where_everything_is_gaussian(solver, schedule, mode, tolerance):
    """The first finds the rows' conditionals, the second the sites given these: the joint posterior, by dense algebra."""
    rounds = {Streaming: 1, Committee: 1, Asynchronous: 30}.get(type(schedule), 2 + (solver is SEARCHED))
    pvi, state = fitted(solver, schedule, rounds, mode)
    # A line search ends where its own gradient is small.
    close = 1e-3 if solver is SEARCHED else 1000 * tolerance
    assert np.all(errors(pvi, state) < close), errors(pvi, state)


def test_rows_whose_latents_do_not_move_with_the_shared_ones_are_seen(monkeypatch):
    """The planted fault: draws of the rows' own at a mean that stands still have the curvature of the joint factor's block."""

    def still(natural):
        found = conditional_moments(natural)
        return found._replace(slope=0.0 * found.slope)

    monkeypatch.setattr(_programs, "conditional_moments", still)
    assert errors(*fitted(FULL, TOGETHER, 2))[1] > 0.05


@pytest.mark.parametrize("full", [True, False])
def test_the_factor_given_conditionals_is_that_of_their_affine_means(full, tolerance):
    """Of a quadratic, at conditionals that are not its own: gradient and curvature of E over z of f(theta, M theta + b + e)."""
    rng = np.random.default_rng(3)
    dim, rows = 2, 3
    root = rng.normal(size=(dim + rows, dim + rows))
    bend, push = root @ root.T, rng.normal(size=dim + rows)
    # Rows do not see each other's latents.
    bend[dim:, dim:] = np.diag(np.diag(bend)[dim:])
    family = MultivariateNormalFamily(dim) if full else NormalFamily(dim)
    slope, offset = (rng.normal(size=(rows, dim)) if full else np.zeros((rows, dim))), rng.normal(size=rows)
    own = np.exp(rng.normal(size=rows))
    linear, cross = (own * offset)[:, None], -own[:, None, None] * slope[:, None]
    precision = own[:, None, None] if full else own[:, None]
    kept = ConditionalNatural(*map(jnp.asarray, (linear, precision, cross if full else np.zeros((rows, 1, 0)))))

    def density(_, theta, z):
        x = jnp.concatenate([theta, z[:, 0]])
        return -0.5 * x @ bend @ x + push @ x

    q = family.from_loc_sd(jnp.asarray(rng.normal(size=dim)), jnp.full((dim,), 0.6))
    moments = family.moments(q)
    noise = LocalNoise(jnp.asarray(rng.normal(size=(4, dim))), jnp.asarray(rng.normal(size=(rows, 4, 1))))
    chunk = LocalChunk(None, jnp.arange(rows), jnp.ones((rows,), bool), kept)
    found = LocalLatentProgram(density, family).given(chunk, moments, noise)
    lift, base = np.vstack([np.eye(dim), slope]), np.concatenate([np.zeros(dim), offset])
    wanted = lift.T @ bend @ lift
    wanted = wanted if full else np.diag(np.diag(wanted))
    loc = np.asarray(moments.loc)
    force = lift.T @ (push - bend @ (lift @ loc + base))
    np.testing.assert_allclose(found.target.precision, wanted if full else np.diag(wanted), atol=1e3 * tolerance)
    np.testing.assert_allclose(found.target.precision_mean, force + wanted @ loc, atol=1e3 * tolerance)


def coupled(dim, rows, full):
    """A quadratic of shared latents and one of every row's own, which do not see each other, and a pass over it.

    Returns its curvature, slope, a program made ``at_mean`` or not, the pass's arguments, and mean and covariance of q over all.
    """
    rng = np.random.default_rng(5)
    root = rng.normal(size=(dim + rows, dim + rows))
    bend, push = root @ root.T / dim, rng.normal(size=dim + rows)
    own, spread = np.arange(dim, dim + rows), np.full(dim, 0.6)
    bend[np.ix_(own, own)] = np.diag(np.diag(bend)[dim:])
    slope, precision = (rng.normal(size=(rows, dim)) if full else np.zeros((rows, dim))), np.exp(rng.normal(size=rows))
    if not full:
        # Of products of two latents a mean-field q knows no more than its draws do.
        bend = np.diag(np.diag(bend))
    offset, loc = rng.normal(size=rows), rng.normal(size=dim)
    kept = ConditionalNatural(
        jnp.asarray(precision * offset)[:, None],
        jnp.asarray(precision[:, None, None] if full else precision[:, None]),
        jnp.asarray(-precision[:, None, None] * slope[:, None] if full else np.zeros((rows, 1, 0))),
    )

    def density(_, theta, z):
        x = jnp.concatenate([theta, z[:, 0]])
        return -0.5 * x @ bend @ x + push @ x

    family = MultivariateNormalFamily(dim) if full else NormalFamily(dim)
    moments = family.moments(family.from_loc_sd(jnp.asarray(loc), jnp.asarray(spread)))
    noise = LocalNoise(jnp.asarray(rng.normal(size=(4, dim))), jnp.asarray(rng.normal(size=(rows, 5, 1))))
    chunk = LocalChunk(None, jnp.arange(rows), jnp.ones((rows,), bool), kept)
    lift = np.vstack([np.eye(dim), slope])
    mean, covariance = lift @ loc + np.concatenate([np.zeros(dim), offset]), lift @ np.diag(spread**2) @ lift.T
    covariance[own, own] += 1.0 / precision

    def made(at_mean):
        return LocalLatentProgram(density, family, at_mean)

    return bend, push, made, (chunk, moments, None, 0, noise, False), (mean, covariance, precision)


@pytest.mark.parametrize("full", [True, False])
def test_curvature_at_the_mean_leaves_a_quadratic_as_exact_as_that_of_all_draws(full, tolerance):
    bend, push, made, given, (mean, covariance, precision) = coupled(3, 4, full)
    found, before = made(True).expected(*given), made(False).expected(*given)
    entropy = 0.5 * np.sum(1 + np.log(2 * np.pi / precision))
    wanted = -0.5 * (np.trace(bend @ covariance) + mean @ bend @ mean) + push @ mean + entropy
    np.testing.assert_allclose(found.value, wanted, rtol=1e3 * tolerance)
    for new, old in zip(jax.tree.leaves(found.local), jax.tree.leaves(before.local), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e3 * tolerance, atol=1e3 * tolerance)


def test_steps_by_batches_take_shared_curvature_once_and_not_at_every_draw():
    """Numbers that a pass makes, 8 draws of 40 shared latents: those of one draw's tangents in place of eight draws'."""
    _, _, made, given, _ = coupled(40, 24, False)
    design = np.random.default_rng(0).normal(size=(24, 40))

    def rates(_, theta, z):
        return -jnp.sum(jnp.exp(0.1 * design @ theta + z[:, 0]))

    def work(at_mean):
        program = dataclasses.replace(made(at_mean), log_density=rates)
        return work_of(jax.make_jaxpr(lambda noise: program.expected(*given[:4], noise, False))(given[4]).jaxpr)

    assert work(True) < 0.4 * work(False)
    for solver, once in [(FULL, True), (NaturalGradient(), False)]:
        pvi, state = fitted(solver, TOGETHER, 0)
        assert pvi._engine._state_problem(state, tuple(map(jnp.asarray, (X, Y))), {}, True).program.at_mean is once


@pytest.mark.parametrize("schedule", [Sequential(), pytest.param(Streaming(visits=5), marks=pytest.mark.slow)])
def test_effects_behind_an_exponential_do_not_overshoot(schedule):
    """From the prior a full step of theirs goes to where rates overflow; every sweep was undone, and a stream ended there."""
    many, labels = np.array([6, 79, 20, 35, 12, 51, 8, 28, 44, 17, 63, 9]), np.repeat(list("abcd"), 3)
    steps = StochasticNaturalGradient(num_steps=5)
    pvi = PVI(Partition(counts, "data", labels), AutoMultivariateNormal(counts), solver=steps, schedule=schedule)
    state = pvi.init(KEY, many)
    first = float(pvi.evaluate(state, many))
    for _ in range(8):
        state, _ = pvi.update(state, many)
    assert float(pvi.evaluate(state, many)) < 0.2 * first


def test_batches_end_near_where_all_rows_do():
    """One row a step, and what thirty steps of Adam leave: a tenth of an sd, of everything Gaussian (one key)."""
    solver = LocalELBO(optax.adam(0.03), num_steps=30, batch_size=1, num_particles=2)
    assert np.all(errors(*fitted(solver, Synchronous(), 15)) < [0.15, 0.05, 0.02])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "schedule", "guide"),
    [
        (
            LocalELBO(optax.adam(0.02), num_steps=30, batch_size=2, num_particles=2),
            Synchronous(),
            AutoMultivariateNormal,
        ),
        pytest.param(
            StochasticNaturalGradient(num_steps=20, batch_size=2),
            Decentralized(RING),
            AutoDiagonalNormal,
        ),
        pytest.param(
            LocalELBO(optax.adam(0.02), num_steps=30, num_particles=8, curvature="steps"),
            Sequential(),
            AutoNormal,
        ),
    ],
    ids=["batches", "no server", "no second derivatives"],
)
def test_batches_end_where_natural_gradients_do(solver, schedule, guide):
    """Counts with effects of their own: the ELBO of NaturalGradient's fit, within what steps by batches leave (one key)."""
    labels = np.repeat(list("abcd"), 3)

    def evidence(solver, schedule):
        pvi = PVI(Partition(counts, "data", labels), guide(counts), solver=solver, schedule=schedule)
        result = pvi.run(KEY, 60, COUNTS, progress_bar=False)
        return float(pvi.log_evidence(result.state, COUNTS))

    assert abs(evidence(solver, schedule) - evidence(NaturalGradient(), Synchronous())) < 0.03
