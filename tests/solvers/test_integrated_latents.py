"""Moments where groups have latents of their own: integrated out of the factor, exactly where everything is Gaussian."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from scipy.special import gammaln, logsumexp

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import owners
from numpyro_pvi.expectations._integrated_latents import integrate_units
from numpyro_pvi.runtime import _local_latents
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
)
from numpyro_pvi.sites import posterior
from numpyro_pvi.solvers import SNEP, AlphaDivergence, PowerEP, StochasticEP

KEY = jax.random.key(0)
RNG = np.random.default_rng(5)
N, NOISE, SPREAD = 12, 0.7, 1.3
X = RNG.normal(size=(N, 2))
LABELS = np.array(list("aaaaabbbbccd"))
Y = X @ [1.0, -0.5] + SPREAD * RNG.normal(size=N) + NOISE * RNG.normal(size=N)
# Five units in three groups, several rows each; the last rows know the shared latent alone.
COUNTS, IDS = np.array([3, 0, 1, 4, 7, 2, 0, 5, 1, 2]), np.array([0, 0, 1, 2, 3, 3, 4, 4, 4, 2])
LOOSE = np.array([0.4, -1.1])
UNIT_GROUPS, ROW_GROUPS, LOOSE_GROUPS = list("aabbc"), [list("aabbc")[i] for i in IDS], ["b", "c"]


def row_effects(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.3 * w[0], SPREAD))
        numpyro.sample("obs", dist.Normal(X @ w + u, NOISE), obs=y)


def counts_by_unit(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("unit", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(mu, 0.8))
        numpyro.sample("obs", dist.Poisson(jnp.exp(u)), obs=y)


def counts_by_id(y, ids, loose):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("unit", 5):
        u = numpyro.sample("u", dist.Normal(mu, 0.8))
    with numpyro.plate("row", y.shape[0]):
        numpyro.sample("obs", dist.Poisson(jnp.exp(u[ids])), obs=y)
    with numpyro.plate("other", loose.shape[0]):
        numpyro.sample("beside", dist.Normal(mu, 1.5), obs=loose)


class Joint(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray
    evidence: float


def closed_form() -> Joint:
    """Posterior of (w, u) and log evidence of `row_effects`, from dense linear algebra."""
    effects = np.hstack([-0.3 * np.ones((N, 1)), np.zeros((N, 1)), np.eye(N)])
    prior = np.zeros((N + 2, N + 2))
    prior[:2, :2] = np.eye(2)
    design = np.hstack([X, np.eye(N)])
    precision = prior + effects.T @ effects / SPREAD**2 + design.T @ design / NOISE**2
    covariance = np.linalg.inv(precision)
    slope = X + np.array([0.3, 0.0])
    marginal = slope @ slope.T + (SPREAD**2 + NOISE**2) * np.eye(N)
    evidence = -0.5 * (Y @ np.linalg.solve(marginal, Y) + np.linalg.slogdet(2 * np.pi * marginal)[1])
    return Joint(covariance @ design.T @ Y / NOISE**2, covariance, evidence)


def close(tolerance, got, wanted, factor=100):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=factor * tolerance * (1 + np.abs(wanted).max()))


def one_round(solver, model=row_effects, labels=LABELS, args=(X, Y), schedule=None):
    pvi = PVI(Partition(model, "data", labels), AutoMultivariateNormal(model), solver=solver, schedule=schedule)
    state, loss = pvi.update(pvi.init(KEY, *args), *args)
    return pvi, state, float(loss)


def searched(alpha):
    """An optimiser whose visits end where the divergence is least."""
    return AlphaDivergence(alpha, optax.lbfgs(), num_steps=6)


def check_exact(pvi, state, tolerance):
    wanted, params = closed_form(), pvi.get_params(state)
    close(tolerance, params["auto_loc"], wanted.mean)
    root = np.asarray(params["auto_scale_tril"])
    close(tolerance, root @ root.T, wanted.covariance)
    if not isinstance(pvi.solver, StochasticEP):
        close(tolerance, pvi.log_evidence(state, X, Y), wanted.evidence)


@pytest.mark.parametrize(
    "solver",
    [
        PowerEP(),
        pytest.param(PowerEP(0.3, moments="laplace"), marks=pytest.mark.slow),
        pytest.param(StochasticEP(0.5), marks=pytest.mark.slow),
    ],
    ids=["grid", "laplace", "tied"],
)
def test_one_round_is_exact_where_everything_is_gaussian(solver, tolerance):
    """Laws 1, 2 and 6 with latents of the groups' own, for any power: their joint posterior too, and the bound."""
    pvi, state, loss = one_round(solver)
    check_exact(pvi, state, tolerance)
    close(tolerance, -loss, closed_form().evidence)
    q = posterior(state.prior, state.sites)
    close(tolerance, sum(np.asarray(pvi.site(state, g).precision) for g in "abcd") + np.eye(2), q.precision)
    if solver.moments == "auto":
        guide, wanted = AutoMultivariateNormal(row_effects), closed_form()
        draws = Predictive(guide, params=pvi.get_params(state), num_samples=4)(jax.random.key(1), X, Y)
        assert draws["u"].shape == (4, N)
        found = pvi.posterior(state)["u"]
        close(tolerance, found.variance, np.diag(wanted.covariance)[2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "schedule"),
    [(PowerEP(0.5), None), (StochasticEP(0.5), Sequential()), (AlphaDivergence(0.5, num_steps=3), None)],
    ids=["ep", "tied", "alpha"],
)
def test_a_saved_state_goes_on_to_the_same_bits(solver, schedule, tmp_path):
    """Sites, and what groups hold of their own latents, come back as they were."""
    args, partition = (COUNTS[:5],), Partition(counts_by_unit, "unit", UNIT_GROUPS)
    how = {"solver": solver, "schedule": schedule}
    pvi, fresh = (PVI(partition, AutoMultivariateNormal(counts_by_unit), **how) for _ in range(2))
    state, _ = pvi.update(pvi.init(KEY, *args), *args)
    pvi.save(tmp_path / "state", state)
    again = fresh.load(tmp_path / "state", *args)
    (state, loss), (again, lost) = pvi.update(state, *args), fresh.update(again, *args)
    assert float(loss) == float(lost)
    for name, value in pvi.get_params(state).items():
        np.testing.assert_array_equal(value, fresh.get_params(again)[name])


@pytest.mark.slow
def test_a_group_that_comes_later_ends_where_all_at_once_do(tolerance):
    """The exact posterior of what all share and of the fourth group's own latents; those of absent groups are dropped."""
    early = LABELS != "d"
    pvi, state, _ = one_round(PowerEP(), labels=LABELS[early], args=(X[early], Y[early]))
    state = pvi.add_group(state, "d", X[~early], Y[~early])
    wanted, params = closed_form(), pvi.get_params(state)
    kept = np.r_[:2, 2 + np.flatnonzero(~early)]
    close(tolerance, params["auto_loc"], wanted.mean[kept])
    root = np.asarray(params["auto_scale_tril"])
    close(tolerance, root @ root.T, wanted.covariance[np.ix_(kept, kept)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "schedule"),
    [(PowerEP(moments="mcmc"), None), (PowerEP(0.5), Sequential()), (SNEP(), None)],
    ids=["mcmc", "cyclic", "snep"],
)
def test_chains_sweeps_and_other_solvers_are_exact_too(solver, schedule, tolerance):
    """The factor is the same whoever takes its moments, at once or in the limit; chains are exact in Gaussian factors."""
    pvi, state, _ = one_round(solver, schedule=schedule)
    wanted, params = closed_form(), pvi.get_params(state)
    if isinstance(solver, SNEP):
        # Its steps go half the way.
        for _ in range(40):
            state, _ = pvi.update(state, X, Y)
        params, tolerance = pvi.get_params(state), 1e-5
    close(tolerance, params["auto_loc"], wanted.mean)


# ------------------------------------------------------------------------------------------------------- quadrature oracle


class Dense(NamedTuple):
    mean: float
    variance: float
    evidence: float
    own_mean: np.ndarray
    own_variance: np.ndarray


THETA, OWN = np.linspace(-5.0, 5.0, 1201), np.linspace(-9.0, 7.0, 3201)


def dense_factors(counts, ids, loose, groups):
    """Log density of every group on the grid of theta, and every unit's conditional moments there, by brute force."""
    step = OWN[1] - OWN[0]
    prior = -0.5 * ((OWN[None] - THETA[:, None]) / 0.8) ** 2 - np.log(0.8 * np.sqrt(2 * np.pi))
    factors, mean, variance = dict.fromkeys(groups, 0.0), [], []
    for unit, group in enumerate(groups):
        own = counts[ids == unit][:, None]
        joint = prior + np.sum(own * OWN - np.exp(OWN) - gammaln(own + 1), axis=0)
        factors[group] = factors[group] + logsumexp(joint, axis=1) + np.log(step)
        weights = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
        mean.append(weights @ OWN)
        variance.append(weights @ OWN**2 - mean[-1] ** 2)
    for value, group in zip(loose, LOOSE_GROUPS, strict=False):
        factors[group] = factors[group] - 0.5 * ((value - THETA) / 1.5) ** 2 - np.log(1.5 * np.sqrt(2 * np.pi))
    return list(factors.values()), np.array(mean), np.array(variance)


def dense_ep(factors, own_mean, own_variance, power, tied=False) -> Dense:
    """Textbook power EP of a scalar on a grid, in parallel, every quantity by sums over the grid; one site of all where tied."""
    step, sites = THETA[1] - THETA[0], np.zeros((len(factors), 2))

    def gaussian(natural):
        return natural[0] * THETA - 0.5 * natural[1] * THETA**2

    def normaliser(natural):
        return 0.5 * natural[0] ** 2 / natural[1] - 0.5 * np.log(natural[1]) + 0.5 * np.log(2 * np.pi)

    prior = np.array([0.0, 1.0])
    for _ in range(400):
        q, new = prior + sites.sum(0), sites.copy()
        for m, factor in enumerate(factors):
            logs = gaussian(q) + power * (factor - gaussian(sites[m]))
            weights = np.exp(logs - logsumexp(logs))
            mean = weights @ THETA
            variance = weights @ (THETA - mean) ** 2
            new[m] += (np.array([mean, 1.0]) / variance - q) / power
        new = np.broadcast_to(new.mean(0), new.shape) if tied else new
        sites = sites + 0.5 * (new - sites)
    q = prior + sites.sum(0)
    logs = [gaussian(q) + power * (f - gaussian(s)) for f, s in zip(factors, sites, strict=True)]
    shares = [(logsumexp(x) + np.log(step) - normaliser(q)) / power for x in logs]
    weights = np.exp(gaussian(q) - logsumexp(gaussian(q)))
    mean = own_mean @ weights
    spread = own_variance @ weights + own_mean**2 @ weights - mean**2
    evidence = normaliser(q) - normaliser(prior) + sum(shares)
    return Dense(q[0] / q[1], 1.0 / q[1], evidence, mean, spread)


def check_dense(pvi, state, args, factors, tolerance):
    wanted, found = dense_ep(*factors, pvi.solver.power, pvi.solver.tied), pvi.posterior(state)
    close(tolerance, found["mu"].mean, wanted.mean)
    close(tolerance, found["mu"].variance, wanted.variance)
    close(tolerance, pvi.log_evidence(state, *args), wanted.evidence)
    # Of the own latents the Gaussian matches moments that are averaged over points of q.
    np.testing.assert_allclose(np.asarray(found["u"].mean), wanted.own_mean, atol=2e-3)
    np.testing.assert_allclose(np.asarray(found["u"].variance), wanted.own_variance, rtol=1e-2)


def fit_by_unit(solver, schedule=None, rounds=60, model=counts_by_unit, guide=AutoMultivariateNormal, labels="aabbc"):
    y = COUNTS[:5]
    pvi = PVI(Partition(model, "unit", list(labels)), guide(model), solver=solver, schedule=schedule)
    return pvi, pvi.run(KEY, rounds, y, progress_bar=False).state, y


# Solvers, schedules and guides whose limits have an oracle of their own.
LIMITS = {
    "ep": (PowerEP(), None, AutoMultivariateNormal),
    "power": (PowerEP(0.5), None, AutoMultivariateNormal),
    "tied": (StochasticEP(), None, AutoMultivariateNormal),
    "tied-power-field": (StochasticEP(0.5), None, AutoNormal),
    "alpha": (searched(0.5), None, AutoMultivariateNormal),
    "alpha-one-cyclic-diagonal": (searched(1.0), Sequential(), AutoDiagonalNormal),
    "alpha-some": (searched(0.5), StochasticSubset(2), AutoMultivariateNormal),
    "alpha-late": (searched(0.5), Asynchronous(), AutoNormal),
    "alpha-network": (searched(0.5), Decentralized([(0, 1), (1, 2), (0, 2)]), AutoMultivariateNormal),
}
QUICK = "tied", "alpha"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LIMITS])
def test_the_limit_is_that_of_power_ep_by_dense_quadrature(name, tolerance):
    """Law 5 with a latent per unit: an independent EP on grids of theta and of z."""
    solver, schedule, guide = LIMITS[name]
    pvi, state, y = fit_by_unit(solver, schedule, guide=guide)
    factors = dense_factors(y, np.arange(5), (), list("aabbc"))
    check_dense(pvi, state, (y,), factors, max(tolerance, 1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Committee(tol=1e-10, max_visits=200), Streaming(visits=200, tol=1e-10)])
def test_members_of_a_committee_and_groups_of_a_stream_end_where_power_eps_do(schedule, tolerance):
    """There the limit is none of EP's of all groups; each group's own is."""
    found = []
    for solver in (searched(0.5), PowerEP(0.5)):
        pvi, state, y = fit_by_unit(solver, schedule, rounds=1)
        found.append(pvi.get_params(state) | {"evidence": pvi.log_evidence(state, y)})
    for name, value in found[0].items():
        close(max(tolerance, 1e-8), value, found[1][name])


@pytest.mark.parametrize("schedule", [Sequential(), pytest.param(Synchronous(), marks=pytest.mark.slow)])
def test_one_site_of_one_group_is_that_groups_own(schedule, tolerance):
    """Round by round, with the own latents, which are matched to the q that a sweep ends at."""
    found = []
    for solver in (StochasticEP(0.5), PowerEP(0.5)):
        pvi, state, y = fit_by_unit(solver, schedule, rounds=2, labels="aaaaa")
        found.append(pvi.get_params(state) | {"evidence": pvi.log_evidence(state, y)})
    for name, value in found[0].items():
        close(tolerance, value, found[1][name])


def dropped(terms):
    """The own latents' prior left out."""
    return {n: term for n, term in terms.items() if n != "u"}


def doubled(terms):
    """The own latents' prior counted twice."""
    return {n: (key, 2 * v if n == "u" else v) for n, (key, v) in terms.items()}


@pytest.mark.parametrize("fault", [pytest.param(dropped, marks=pytest.mark.slow), doubled])
def test_a_prior_of_own_latents_that_is_miscounted_is_seen(fault, tolerance, monkeypatch):
    """The mutants of the test above."""
    honest = _local_latents.row_log_likelihood
    monkeypatch.setattr(_local_latents, "row_log_likelihood", lambda *args: fault(honest(*args)))

    def model(y):
        """Another model to the cache of compiled programs."""
        counts_by_unit(y)

    pvi, state, y = fit_by_unit(PowerEP(), rounds=20, model=model)
    wanted = dense_ep(*dense_factors(y, np.arange(5), (), list("aabbc")), 1.0)
    assert abs(float(pvi.posterior(state)["mu"].mean) - wanted.mean) > 0.02


@pytest.mark.parametrize(
    ("solver", "schedule"),
    [
        (PowerEP(), None),
        pytest.param(StochasticEP(), None, marks=pytest.mark.slow),
        pytest.param(searched(0.5), Sequential(), marks=pytest.mark.slow),
    ],
    ids=["ep", "tied", "alpha"],
)
def test_units_of_other_plates_rows_are_found_and_integrated(solver, schedule, tolerance):
    """Several units a group, their rows in another plate, and rows that no unit has: one pass serves all groups."""
    args, labels = (COUNTS, IDS, LOOSE), {"unit": UNIT_GROUPS, "row": ROW_GROUPS, "other": LOOSE_GROUPS}
    partition, guide = Partition(counts_by_id, groups=labels, mode="mask"), AutoMultivariateNormal(counts_by_id)
    pvi = PVI(partition, guide, solver=solver, schedule=schedule)
    state = pvi.run(KEY, 60, *args, progress_bar=False).state
    factors = dense_factors(COUNTS, IDS, LOOSE, UNIT_GROUPS)
    check_dense(pvi, state, args, factors, max(tolerance, 1e-8))


def test_rows_know_their_unit():
    """Owners by derivatives: of a unit, of none."""

    def values(theta, z):
        own = z[jnp.asarray(IDS), 0] * jnp.arange(1.0, 11.0) + z[jnp.asarray(IDS), 1] ** 2
        return {"obs": own * (jnp.asarray(IDS) != 1), "beside": theta[0] * jnp.ones(3)}

    found = owners(values, 1, (5, 2), jnp.result_type(float))
    np.testing.assert_array_equal(found["obs"], np.where(IDS == 1, -1, IDS))
    np.testing.assert_array_equal(found["beside"], -np.ones(3))


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_integrals_of_one_unit(width, tolerance):
    """Exact for a quadratic of any width and place; near for a skewed one; a unit that does not count is nothing."""
    rng = np.random.default_rng(width)
    root = rng.normal(size=(width, width)) + 3 * np.eye(width)
    precision, centre = root @ root.T, 5 * rng.normal(size=width)

    def quadratic(z):
        gap = z - jnp.asarray(centre)
        return -0.5 * jnp.einsum("rk,kj,rj->r", gap, jnp.asarray(precision), gap) + 1.5

    mask = jnp.array([True, False])
    found = integrate_units(quadratic, quadratic, jnp.zeros((2, width)), mask)
    exact = 1.5 + 0.5 * width * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(precision)[1]
    close(tolerance, found.value, [exact, 0.0])
    close(tolerance, found.mean[0], centre)
    close(tolerance, found.covariance[0], np.linalg.inv(precision))

    def skewed(z):
        return jnp.sum(2.0 * z - jnp.exp(z) - 0.5 * z**2, axis=-1)

    found = integrate_units(skewed, skewed, jnp.full((2, width), 9.0), mask)
    density = 2.0 * OWN - np.exp(OWN) - 0.5 * OWN**2
    one = logsumexp(density) + np.log(OWN[1] - OWN[0])
    weights = np.exp(density - logsumexp(density))
    rough = {1: 1e-6, 2: 5e-4, 3: 5e-3, 5: 0.05}[width]
    np.testing.assert_allclose(float(found.value[0]), width * one, atol=max(rough, 100 * tolerance))
    np.testing.assert_allclose(np.asarray(found.mean[0]), weights @ OWN, atol=max(rough, 100 * tolerance))


@pytest.mark.parametrize("solver", [PowerEP(), StochasticEP()], ids=["ep", "tied"])
def test_curvature_at_one_point_is_no_start(solver):
    guide = AutoMultivariateNormal(row_effects)
    pvi = PVI(Partition(row_effects, "data", 3), guide, solver=solver, init_sites="curvature")
    with pytest.raises(PVIError, match="leave init_sites out"):
        pvi.init(KEY, X, Y)
