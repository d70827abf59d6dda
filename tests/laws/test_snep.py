"""SNEP: its fixed points are power EP's, its objective is climbed, and a worker reads three things only."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi.solvers._snep as snep
from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Asynchronous, Committee, Decentralized, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import SNEP, ImportanceMoments

from . import checks, ep_oracles, servers
from .fits import fit, numbers
from .models import NOISE, PRIOR_COVARIANCE, PRIOR_LOC, groups, make_linear, make_logistic, rows
from .oracles import linear_log_evidence, linear_posterior
from .servers import Server
from .test_moments import gaps

X, Y, LABELS = rows()


def oracle(beta=1.0):
    """Location, variance and evidence of power EP in the servers' problem."""
    loc, covariance, evidence = ep_oracles.grid_ep(
        servers.X, servers.LABELS, servers.GROUPS, power=1 / beta, prior_sd=servers.PRIOR_SD
    )
    return float(loc[0]), float(covariance[0, 0]), float(evidence)


def distance(server, wanted):
    """Difference of the location in sds, and of the variance, relative."""
    loc, variance = server.moments()
    return max(abs(loc - wanted[0]) / wanted[1] ** 0.5, abs(variance / wanted[1] - 1))


# ------------------------------------------------------------------------------------------------- posterior server


def test_the_double_loop_climbs_to_eps_fixed_point(x64):
    """Inner steps lower the objective, anchors raise it; what each period ends with never falls; the limit is EP's."""
    period, server, last = 12, Server(SNEP(outer_period=12)), -np.inf
    slack = 1e-9 if x64 else 2e-5
    for outer in range(60):
        values = []
        for _ in range(period):
            server.round()
            values.append(server.objective())
        if outer < 6:
            assert np.all(np.diff(values) <= slack), f"outer loop {outer}: an inner step raised the objective"
            assert values[-1] >= last - slack, f"outer loop {outer}: the objective has fallen"
            # What a new anchor gains, before inner steps take back some of it.
            assert outer == 0 or values[0] >= last - slack
        last = values[-1]
    wanted = oracle()
    assert distance(server, wanted) < (1e-6 if x64 else 1e-3)
    assert abs(last - wanted[2]) < (1e-8 if x64 else 1e-4)


def test_parallel_steps_of_one_over_m_lower_the_objective_too(x64):
    """By convexity; full steps of all sites from the same sum do not."""
    rises = []
    for joint_step in (1 / 3, 1.0):
        server, values = Server(SNEP(outer_period=12), joint_step), []
        for _ in range(12):
            server.round()
            values.append(server.objective())
        rises.append(np.max(np.diff(values)))
    assert rises[0] <= (1e-9 if x64 else 2e-5)
    assert rises[1] > 1e-3


@pytest.mark.parametrize(
    ("joint_step", "betas"),
    [(None, (1.0, 1.0, 1.0)), (1.0, (1.0, 1.0, 1.0)), (1.0, (2.0, 2.0, 2.0))],
    ids=["in-turn", "parallel", "half-power"],
)
def test_short_periods_end_at_the_same_point(joint_step, betas, x64):
    """One compiled visit for all: a worker's beta is data."""
    server = Server(SNEP(), joint_step, betas)
    for _ in range(80):
        server.round()
    assert distance(server, oracle(betas[0])) < (1e-8 if x64 else 1e-3)


def slopes(server):
    """Slopes of the objective along every site's two naturals, in units of q's own."""
    found = []
    for g, site in enumerate(server.sites):
        for unit in (dataclasses.replace(server.total, precision=0 * site.precision), server.total):
            values = []
            for step in (1e-3, -1e-3):
                server.sites[g] = site + unit * step
                values.append(server.objective())
            server.sites[g] = site
            found.append(abs(values[0] - values[1]) / 2e-3)
    return max(found)


def test_betas_of_their_own_are_stationary(x64):
    """One compiled visit again: the objective at each group's own power, written out in NumPy, is flat where it ends."""
    server = Server(SNEP(), betas=(1.0, 2.0, 4.0))
    for _ in range(2):
        server.round()
    assert slopes(server) > 1e-2
    for _ in range(300):
        server.round()
    assert slopes(server) < (1e-6 if x64 else 1e-2)
    assert distance(server, oracle(1.0)) > 1e-5


def test_a_worker_reads_its_anchor_its_site_and_the_sum():
    """Two worlds that differ in everything else: other groups' sites of equal sum, and other workers' anchors."""
    one, other = Server(SNEP(outer_period=4)), Server(SNEP(outer_period=4))
    for server in (one, other):
        for _ in range(2):
            server.round()
    shift = one.prior * 0.3
    other.sites[1], other.sites[2] = other.sites[1] + shift, other.sites[2] - shift
    other.states[1] = other.states[1]._replace(anchor=one.prior)
    key = jax.random.key(1)
    found = [servers.work(s.solver, *s.data[0], one.total, s.sites[0], s.states[0], key) for s in (one, other)]
    for a, b in zip(*(jax.tree.leaves(f) for f in found), strict=True):
        np.testing.assert_array_equal(a, b)
    # And it does read each of the three.
    state, site, data = one.states[0], one.sites[0], one.data[0]
    moved = [
        servers.work(one.solver, *data, one.total * 1.1, site, state, key),
        servers.work(one.solver, *data, one.total, site * 1.1, state, key),
        servers.work(one.solver, *data, one.total, site, state._replace(anchor=state.anchor * 1.1), key),
    ]
    assert all(abs(float((m.site - found[0].site).precision_mean[0])) > 1e-4 for m in moved)


def test_draws_keep_q_proper_from_the_defaults():
    """Twenty seeds, all groups in parallel at the full joint step, from the prior: q is normalisable after every round."""
    wanted, found = oracle(), []
    for seed in range(20):
        server = Server(SNEP(), joint_step=1.0, num_draws=64)
        for number in range(15):
            server.round(jax.random.key(100 * seed + number))
            assert server.moments()[1] > 0
        found.append(distance(server, wanted))
    assert np.median(found) < 0.3 and max(found) < 2.0


@pytest.mark.slow
def test_the_sites_own_metric_crawls_to_the_same_point(x64):
    server = Server(SNEP(metric="site", num_steps=25))
    gap = []
    for _ in range(40):
        server.round()
        gap.append(distance(server, oracle()))
        assert all(float(s.precision[0, 0]) > 0 for s in server.sites)
    assert gap[-1] < 0.3 * gap[5]


# ------------------------------------------------------------------------------------------------------- whole fits


def test_groups_meet_ep_on_a_grid(x64):
    """Two latents, all groups in parallel, from the defaults; the evidence is power EP's."""
    fitted = fit(make_logistic(), X, LABELS, groups(3), SNEP(), Synchronous(), 60)
    assert np.all(gaps(fitted, ep_oracles.grid_ep(X, LABELS, groups(3))) < (1e-8 if x64 else 2e-3))


SCHEDULES = {
    "in-turn": Sequential(),
    "late": Asynchronous(1.0),
    "few": StochasticSubset(2),
    "network": Decentralized(1.0 - np.eye(3)),
}


@pytest.mark.slow
def test_anchors_that_outlast_a_round_meet_ep_in_parallel(x64):
    """Joint steps of 1/M: the first round takes a third of what one group alone would."""
    fitted = fit(make_logistic(), X, LABELS, groups(3), SNEP(outer_period=8), Synchronous(), 600)
    assert np.all(np.asarray(fitted.states[1].report.step) < 0.34)
    wanted = ep_oracles.grid_ep(X, LABELS, groups(3))
    assert np.max(gaps(fitted, wanted)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_meets_ep(name, x64):
    fitted = fit(make_logistic(), X, LABELS, groups(3), SNEP(), SCHEDULES[name], 120)
    assert np.all(gaps(fitted, ep_oracles.grid_ep(X, LABELS, groups(3))) < (1e-7 if x64 else 2e-3))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCHEDULES, "parallel", "committee"])
def test_linear_models_end_at_the_exact_posterior(name, x64):
    """Halved at every visit or thereabouts: the limit is exact, and so is the evidence."""
    schedule = {**SCHEDULES, "parallel": Synchronous(), "committee": Committee(tol=1e-12)}[name]
    fitted = fit(make_linear(), X, Y, groups(3), SNEP(), schedule, 2 if name == "committee" else 120)
    assert checks.distance(fitted, *linear_posterior(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)) < (
        1e-7 if x64 else 1e-3
    )
    found = fitted.pvi.log_evidence(fitted.last, jnp.asarray(X), jnp.asarray(Y))
    exact = linear_log_evidence(X, Y, NOISE, PRIOR_LOC, PRIOR_COVARIANCE)
    assert abs(float(found) - exact) < (1e-7 if x64 else 2e-3)


@pytest.mark.slow
def test_a_mean_field_q_meets_ep(x64):
    fitted = fit(make_logistic(), X, LABELS, groups(3), SNEP(), Synchronous(), 90, AutoDiagonalNormal)
    wanted = ep_oracles.grid_ep(X, LABELS, groups(3), diagonal=True)
    assert np.all(gaps(fitted, wanted) < (1e-7 if x64 else 2e-3))


@pytest.mark.slow
def test_fits_by_draws_keep_q_proper_from_the_defaults():
    """Twenty seeds in one program; every round's q is normalisable, and late rounds hover about EP."""
    solver = SNEP(moments=ImportanceMoments(256))
    model = make_logistic()
    pvi = PVI(Partition(model, "data", groups(3)), AutoMultivariateNormal(model), solver=solver, schedule=Synchronous())
    loc, covariance, _ = ep_oracles.grid_ep(X, LABELS, groups(3))
    sd, found = np.sqrt(np.diag(covariance)), []
    start = pvi.init(jax.random.key(0), X, LABELS)
    for seed in range(20):
        state = dataclasses.replace(start, rng_key=jax.random.key(seed))
        result = pvi.run(jax.random.key(seed), 15, X, LABELS, init_state=state, progress_bar=False)
        assert bool(result.state.report.valid) and np.all(np.isfinite(result.losses))
        found.append(float(np.max(np.abs(numbers(result.state).moments[0] - loc) / sd)))
    assert np.median(found) < 0.1


# --------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.once
def test_anchors_that_never_move_are_seen():
    """Without outer steps the inner problem is solved, and its solution is not EP's."""
    server = Server(SNEP(outer_period=12))
    for _ in range(80):
        server.round()
        # Never twelve steps old, so that no outer step is due.
        server.states = [state._replace(age=jnp.ones_like(state.age)) for state in server.states]
    assert distance(server, oracle()) > 1e-2


@pytest.mark.once
def test_a_step_of_the_wrong_sign_is_seen(monkeypatch):
    right = snep.posterior_step
    monkeypatch.setattr(snep, "posterior_step", lambda family, q, gap, step: right(family, q, gap, step) * -0.1)
    # Settings of its own: a program compiled without the fault must not be found again.
    server, values = Server(SNEP(outer_period=7)), []
    for _ in range(7):
        server.round()
        values.append(server.objective())
    assert np.max(np.diff(values)) > 1e-3
