"""PowerEP's settings, sampled moments, safety, and what it says when moments fail."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_pvi.solvers._matching as matching
from numpyro_pvi import PVI, Partition
from numpyro_pvi._driver import _raise_if_stuck
from numpyro_pvi._posterior_views import words_of
from numpyro_pvi._state import PVIState
from numpyro_pvi.errors import PVIError, SkippedGroupError
from numpyro_pvi.expectations import RULES, Proposal, Tilted, from_points, grid_cloud, normal_cloud
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily, NormalFamily
from numpyro_pvi.runtime import noise_floor
from numpyro_pvi.runtime._tilted import method_of
from numpyro_pvi.schedules import Committee, ScheduleDefaults, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import SNEP, ImportanceMoments, LaplaceMoments, LocalResult, PowerEP, match_rules

FAMILY = MultivariateNormalFamily(2)
Q = GaussianNatural(jnp.array([1.0, -0.5]), jnp.array([[2.0, 0.3], [0.3, 1.0]]))
SITE = GaussianNatural(jnp.array([0.2, 0.1]), jnp.array([[0.5, 0.1], [0.1, 0.2]]))


def regression(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(18, 3))
    return X, (rng.random(18) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0, 0.5])))).astype(int)


def pvi_of(model, labels, solver, schedule=None, guide=AutoMultivariateNormal):
    return PVI(Partition(model, "data", labels), guide(model), solver=solver, schedule=schedule or Synchronous())


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"power": 0.0}, "NaturalGradient"),
        ({"power": 1.5}, "power"),
        ({"damping": 0.0}, "full step"),
        ({"factors": "rows"}, "'group' or 'row'"),
        ({"moments": "gibbs"}, "importance"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(PVIError, match=words):
        PowerEP(**options)


def blank(own):
    """What rounds that match moments begin with, where none of its values is a number."""

    def unvalued(self, problem, sites, rule):
        found = own(self, problem, sites, rule)
        assert found is not None
        values = found.groups, found.prior, found.rest, found.elbo, found.size
        values = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), values)
        return found._replace(**dict(zip(("groups", "prior", "rest", "elbo", "size"), values, strict=True)))

    return unvalued


@pytest.mark.parametrize(
    "schedule", [Synchronous(), Sequential(), StochasticSubset(2), pytest.param(Committee(), id="fault")]
)
def test_rounds_that_match_moments_read_no_values_of_where_they_begin(data, schedule, monkeypatch, request):
    """And make no pass over the rows for them; of a schedule that keeps what it was given it is seen."""
    fault, own = isinstance(schedule, Committee), ScheduleDefaults.unvalued
    if fault:
        monkeypatch.setattr(Committee, "evaluates", True)
    monkeypatch.setattr(ScheduleDefaults, "unvalued", blank(own))
    pvi = pvi_of(regression, np.arange(18) % 3, PowerEP(), schedule, AutoDiagonalNormal)
    state, losses = pvi.init(jax.random.key(0), *data), []
    for _ in range(2):
        state, loss = pvi.update(state, *data)
        losses.append(float(loss))
    assert np.all(np.isfinite(losses)) != fault


@pytest.fixture(scope="module")
def started(data):
    """A fit by rows after one round."""
    pvi = pvi_of(regression, np.arange(18) % 3, PowerEP(factors="row"))
    return pvi, pvi.update(pvi.init(jax.random.key(0), *data), *data)[0]


@pytest.mark.parametrize("call", ["add_group", "revisit"])
def test_rows_with_sites_do_not_come_to_a_state(data, started, call):
    (X, y), (pvi, state) = data, started
    label = "new" if call == "add_group" else 0
    with pytest.raises(PVIError, match="single rows have sites.*factors='group'"):
        getattr(pvi, call)(state, label, X[::3], y[::3])


def test_labels_are_no_part_of_the_evidence_program(data, started):
    (X, y), (pvi, state) = data, started
    value = pvi.log_evidence(state, X, y)
    size = len(pvi._followed.programs)
    table = dataclasses.replace(state.plan.partition.table, labels=("a", "b", "c"))
    plan = dataclasses.replace(state.plan, partition=dataclasses.replace(state.plan.partition, table=table))
    assert pvi.log_evidence(dataclasses.replace(state, plan=plan), X, y) == value
    assert len(pvi._followed.programs) == size > 0


def test_params_are_fitted_beside_sites_of_rows(data):
    X, y = data

    def model(X, y):
        shift = numpyro.param("shift", 0.0)
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Bernoulli(logits=X @ w + shift), obs=y)

    pvi = PVI(
        Partition(model, "data", np.arange(18) % 3),
        AutoMultivariateNormal(model),
        numpyro.optim.Adam(0.05),
        solver=PowerEP(factors="row"),
    )
    result = pvi.run(jax.random.key(0), 3, X, y, progress_bar=False)
    assert result.params["shift"] != 0
    assert bool(result.state.report.valid)


def test_sizes_of_samples_are_checked():
    with pytest.raises(PVIError, match="16 or more"):
        ImportanceMoments(num_draws=4)
    with pytest.raises(PVIError, match="num_steps"):
        LaplaceMoments(num_steps=0)
    few = SimpleNamespace(
        solver=PowerEP(moments=ImportanceMoments(16)), family=MultivariateNormalFamily(6), program=None
    )
    with pytest.raises(PVIError, match="too few draws for 6 latents"):
        method_of(few, False)


@pytest.mark.parametrize(
    ("structure", "full", "solver", "words"),
    [
        ("draws", True, PowerEP(factors="row"), "affine predictors"),
        ("quadratic", False, PowerEP(factors="row"), "mean-field"),
        ("affine", True, PowerEP(moments="exact"), "'affine'"),
        ("local", True, PowerEP(factors="row"), "affine predictors"),
        ("affine", True, PowerEP(factors="row", moments="laplace"), "quadrature"),
    ],
)
def test_structures_that_do_not_fit_are_named(structure, full, solver, words):
    with pytest.raises(PVIError, match=words):
        solver.check(structure, full, "likelihood in plate 'data'")


def test_quadrature_of_a_group_is_for_few_latents(data):
    with pytest.raises(PVIError, match="factors='row'"):
        pvi_of(regression, 3, PowerEP(moments="quadrature")).init(jax.random.key(0), *data)


# ------------------------------------------------------------------------------------------------- weighted points


def exact_of(factor, power):
    """Moments on a fine grid in NumPy: change of the naturals over alpha, and log E_q[(p/t)^alpha] over alpha."""
    h, P = np.asarray(Q.precision_mean, float), np.asarray(Q.precision, float)
    covariance = np.linalg.inv(P)
    root = np.linalg.cholesky(covariance)
    axis = np.linspace(-10, 10, 401)
    eps = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    theta = covariance @ h + eps @ root.T
    site = theta @ np.asarray(SITE.precision_mean) - 0.5 * np.einsum("ni,ij,nj->n", theta, SITE.precision, theta)
    logs = -0.5 * (eps**2).sum(1) + power * (factor(theta) - site)
    weights = np.exp(logs - logs.max())
    value = (logs.max() + np.log(weights.sum()) - np.log(np.exp(-0.5 * (eps**2).sum(1)).sum())) / power
    weights /= weights.sum()
    loc = weights @ theta
    new = np.linalg.inv((theta - loc).T @ (weights[:, None] * (theta - loc)))
    return (new @ loc - h) / power, (new - P) / power, value


def skewed(theta):
    return -2 * np.logaddexp(0, 1 - 1.5 * theta[..., 0]) - 0.3 * np.sqrt(1 + (theta[..., 1] - 0.5) ** 2)


def tilted_of(cloud, power, proposal=None, factor=None):
    proposal = proposal or Proposal(Q, FAMILY.moments(Q))
    points = FAMILY.draw(proposal.moments, cloud.eps)
    values = jnp.asarray(skewed(np.asarray(points))) if factor is None else factor(points)
    return from_points(FAMILY, cloud, values, Q, SITE, proposal, power)


@pytest.mark.parametrize("power", [1.0, 0.4])
def test_a_grid_gives_the_moments(power, x64):
    vector, precision, value = exact_of(skewed, power)
    found = tilted_of(grid_cloud(2, Q.precision.dtype), power)
    tolerance = 1e-6 if x64 else 1e-3
    np.testing.assert_allclose(found.change.precision_mean, vector, atol=tolerance)
    np.testing.assert_allclose(found.change.precision, precision, atol=tolerance)
    np.testing.assert_allclose(found.value, value, atol=tolerance)
    assert np.isnan(found.ess) and float(found.temper) == 1.0 and bool(found.valid)


def test_draws_give_the_moments_within_their_error():
    """From q and from another Gaussian alike; and the evidence within 5 of its own standard errors."""
    vector, precision, value = exact_of(skewed, 1.0)
    other = Q * 0.8
    for proposal in (None, Proposal(other, FAMILY.moments(other))):
        found = tilted_of(normal_cloud(jax.random.key(1), 2, 8192, Q.precision.dtype), 1.0, proposal)
        np.testing.assert_allclose(found.change.precision_mean, vector, atol=0.05)
        np.testing.assert_allclose(found.change.precision, precision, atol=0.05)
        assert abs(float(found.value) - value) < 5 * float(jnp.sqrt(found.variance))
        assert 0.2 * 8192 < float(found.ess) < 8192


@pytest.mark.parametrize("dim", [2, 40])
def test_the_draws_own_moments_are_exact(dim, x64):
    """So that a factor equal to its site leaves q where it is, to rounding."""
    cloud = normal_cloud(jax.random.key(0), dim, 512, jnp.zeros(()).dtype)
    tolerance = 1e-12 if x64 else 1e-5
    np.testing.assert_allclose(jnp.mean(cloud.eps, axis=0), 0, atol=tolerance)
    np.testing.assert_allclose(cloud.eps.T @ cloud.eps / 512, np.eye(dim), atol=10 * tolerance)
    if dim == 2:
        site = lambda x: x @ SITE.precision_mean - 0.5 * jnp.einsum("ni,ij,nj->n", x, SITE.precision, x)  # noqa: E731
        found = tilted_of(cloud, 1.0, factor=site)
        assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(found.change)) < 100 * tolerance


def test_control_variates_matter():
    """The same weights on draws whose own moments are left alone are several times further off."""
    vector, precision, _ = exact_of(lambda t: 0.2 * skewed(t), 1.0)
    wanted = np.concatenate([vector, precision.ravel()])

    def error(cloud):
        found = tilted_of(cloud, 1.0, factor=lambda x: 0.2 * jnp.asarray(skewed(np.asarray(x))))
        return np.linalg.norm(np.concatenate([found.change.precision_mean, found.change.precision.ravel()]) - wanted)

    controlled, raw = [], []
    for seed in range(8):
        cloud = normal_cloud(jax.random.key(seed), 2, 1024, Q.precision.dtype)
        draws = jax.random.normal(jax.random.key(seed), cloud.eps.shape, cloud.eps.dtype)
        controlled.append(error(cloud))
        raw.append(error(cloud._replace(eps=draws)))
    assert np.median(raw) > 3 * np.median(controlled)


def test_mean_field_moments_are_the_marginals():
    family = NormalFamily(2)
    q = GaussianNatural(jnp.array([1.0, -0.5]), jnp.array([2.0, 1.0]))
    proposal = Proposal(q, family.moments(q))
    cloud = grid_cloud(2, q.precision.dtype)
    points = family.draw(proposal.moments, cloud.eps)
    found = from_points(family, cloud, jnp.asarray(skewed(np.asarray(points))), q, q * 0.0, proposal, 1.0)
    theta, weights = np.asarray(points, float), np.asarray(cloud.log_weight, float) + skewed(np.asarray(points, float))
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    variance = weights @ (theta - weights @ theta) ** 2
    new = q + found.change
    np.testing.assert_allclose(1 / new.precision, variance, rtol=1e-3)
    np.testing.assert_allclose(new.precision_mean / new.precision, weights @ theta, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------- safety


def test_collapsed_weights_halve_the_power():
    """A factor far from q: at full power one draw would have all of the weight."""
    cloud = normal_cloud(jax.random.key(0), 2, 256, Q.precision.dtype)
    found = tilted_of(cloud, 1.0, factor=lambda x: -400.0 * jnp.sum((x - 2.0) ** 2, axis=-1))
    assert float(found.ess) < 12.8
    assert float(found.temper) < 0.1 and bool(found.valid)


def test_an_improper_cavity_is_never_weighed():
    cloud = normal_cloud(jax.random.key(0), 2, 256, Q.precision.dtype)
    points = FAMILY.draw(FAMILY.moments(Q), cloud.eps)
    found = from_points(FAMILY, cloud, jnp.zeros(256), Q, Q * 1.2, Proposal(Q, FAMILY.moments(Q)), 1.0)
    assert points.shape == (256, 2)
    assert float(found.temper) == 0.5 and bool(found.valid)


def test_a_grid_sees_mass_run_off_its_border():
    """The cavity is improper and the factor flat; at half the power the tilted distribution is proper again."""
    cloud = grid_cloud(2, Q.precision.dtype)
    found = from_points(FAMILY, cloud, jnp.zeros(cloud.eps.shape[0]), Q, Q * 1.2, Proposal(Q, FAMILY.moments(Q)), 1.0)
    assert float(found.temper) == 0.5


def test_a_factor_that_is_nowhere_finite_is_refused():
    cloud = normal_cloud(jax.random.key(0), 2, 256, Q.precision.dtype)
    found = tilted_of(cloud, 1.0, factor=lambda x: jnp.full(x.shape[0], jnp.nan))
    assert not bool(found.finite) and not bool(found.valid)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A factor whose moments are given."""

    family: MultivariateNormalFamily
    found: Tilted
    rules = match_rules(PowerEP(), 2)

    def tilted(self, q, site, power, key):
        return self.found


def scripted(change, **fields):
    zero = jnp.zeros(())
    found = Tilted(
        change, zero, zero, zero + jnp.nan, zero, zero + 1, jnp.int32(0), *(jnp.array(f) for f in (False, True, True))
    )
    return Scripted(FAMILY, found._replace(**fields))


def visit(factor, state=None, solver=None) -> LocalResult:
    solver = solver or PowerEP()
    state = solver.init(FAMILY, Q.precision.dtype) if state is None else state
    return solver.solve(factor, Q - SITE, SITE, state, jax.random.key(0))


def test_a_step_is_halved_until_q_is_normalisable():
    result = visit(scripted(Q * -1.5))
    assert bool(result.moved) and int(result.backoffs) == 1
    np.testing.assert_allclose(result.site.precision, SITE.precision - 0.75 * Q.precision, rtol=1e-5)


def test_swinging_moves_halve_the_step_and_steady_ones_restore_it():
    push = GaussianNatural(jnp.array([0.5, 0.1]), jnp.zeros((2, 2)))
    state, steps = None, []
    for sign in (1, -1, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1):
        result = visit(scripted(push * sign), state)
        state = result.state
        steps.append(float(state.step))
    np.testing.assert_allclose(steps[:4], [1, 0.5, 0.25, 0.125])
    assert steps[-1] > 0.6


def test_moments_that_fail_keep_the_site():
    result = visit(scripted(Q * jnp.nan))
    assert not bool(result.moved)
    np.testing.assert_array_equal(result.site.precision, SITE.precision)


@pytest.fixture(scope="module")
def steep(data):
    """One round from the prior with few draws, one group's rows of huge leverage."""
    X = data[0] * np.where(np.arange(18) < 6, 200.0, 1.0)[:, None]
    labels = np.repeat(["steep", "mild", "calm"], 6)
    solver = PowerEP(moments=ImportanceMoments(64))
    pvi = PVI(
        Partition(regression, "data", labels), AutoMultivariateNormal(regression), solver=solver, init_sites="prior"
    )
    return pvi, pvi.run(jax.random.key(0), 1, X, data[1], progress_bar=False)


def test_a_group_with_collapsed_weights_is_named_with_a_remedy(steep):
    info = steep[1].info
    notes = [n for n in info.notes if "'steep'" in n]
    assert notes and "num_draws" in notes[0] and notes[0] in str(info)
    assert info.ess[info.labels.index("steep")] < 0.05 * 64
    assert info.backoffs[info.labels.index("steep")] > 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (matching.NOT_FINITE, "not finite anywhere under q: narrow the prior"),
        (matching.NO_TILTED, "cannot be normalised.*laplace"),
        (matching.NO_STEP, "smaller power"),
        (matching.COLLAPSED, "effective sample size.*num_draws"),
        (matching.IMPROPER, "cavity.*smaller power"),
        (matching.HELD, "kept their sites"),
    ],
)
def test_a_group_that_is_stuck_stops_the_run_by_name_and_remedy(steep, code, words):
    pvi, result = steep
    state, index = result.state, result.info.labels.index("mild")
    found = state.solver_state._replace(trouble=state.solver_state.trouble.at[index].set(code))
    stuck = dataclasses.replace(
        state, solver_state=found, report=state.report._replace(skip_run=state.report.skip_run.at[index].set(10))
    )
    with pytest.raises(SkippedGroupError, match=f"'mild' was skipped in 10 rounds running: .*{words}"):
        _raise_if_stuck(stuck)
    assert any("'mild'" in note for note in pvi.info(stuck).notes)


# What is said of a factor's moments is how they are taken, not how its expectations would be.
WORDS = [
    (PowerEP(), "quadratic", 0, 5, (3, 3), "closed form"),
    (PowerEP(), "affine", 0, 5, (3, 3), "weighted draws"),
    (PowerEP(), "affine", 0, 2, (3, 3), "quadrature over the latents"),
    (PowerEP(), "affine", 0, 5, (1, 1), "quadrature (gh20)"),
    (SNEP(), "affine", 0, 5, (1, 1), "weighted draws"),
    (PowerEP(factors="row"), "affine", 0, 5, (3, 3), "quadrature (gh20)"),
    (PowerEP(moments="mcmc"), "affine", 1, 5, (3, 3), "quadrature (gh20)"),
    (PowerEP(moments="mcmc"), "sigma_points", 1, 5, (3, 3), "mcmc"),
    (PowerEP(moments=LaplaceMoments(64)), "affine", 0, 5, (3, 3), "weighted draws (laplace)"),
]


@pytest.mark.parametrize(("solver", "kind", "which", "dim", "sizes", "wanted"), WORDS)
def test_info_says_how_moments_are_taken(solver, kind, which, dim, sizes, wanted):
    state = object.__new__(PVIState)
    partition = SimpleNamespace(table=SimpleNamespace(sizes=sizes))
    object.__setattr__(state, "plan", SimpleNamespace(partition=partition, family=MultivariateNormalFamily(dim)))
    object.__setattr__(state, "rule", SimpleNamespace(level=RULES.index("gh20")))
    assert words_of(kind, state, which, solver) == wanted


# ------------------------------------------------------------------------------------------------------ whole fits


@pytest.fixture(scope="module")
def by_rows(data):
    """The limit of one row a group: by rows, whose moments are quadrature."""
    X, y = data[0][:8], data[1][:8]
    exact = pvi_of(regression, np.arange(8), PowerEP(factors="row"))
    limit = exact.run(jax.random.key(0), 30, X, y, progress_bar=False)
    return limit.params, float(exact.log_evidence(limit.state, X, y))


@pytest.mark.parametrize(
    "moments",
    [ImportanceMoments(2048), pytest.param(LaplaceMoments(1024), marks=pytest.mark.slow)],
    ids=["importance", "laplace"],
)
def test_sampled_moments_meet_the_rows_by_quadrature(data, by_rows, moments):
    """With one row a group both factorisations are the same, so draws must come to quadrature's answer."""
    X, y = data[0][:8], data[1][:8]
    wanted, evidence = by_rows
    covariance = wanted["auto_scale_tril"] @ wanted["auto_scale_tril"].T
    sampled = pvi_of(regression, np.arange(8), PowerEP(moments=moments), Sequential())
    result = sampled.run(jax.random.key(1), 15, X, y, progress_bar=False)
    gap = (result.params["auto_loc"] - wanted["auto_loc"]) / jnp.sqrt(jnp.diag(covariance))
    assert float(jnp.max(jnp.abs(gap))) < 0.05
    assert np.all(result.info.ess > 100)
    value, error = sampled.log_evidence(result.state, X, y, with_error=True)
    # The evidence is stationary at the limit, so that q's own noise counts only squared.
    assert 0 < float(error) < 0.1
    assert abs(float(value) - evidence) < 5 * float(error)


def test_a_tolerance_below_the_noise_is_met_by_the_noise(data):
    """Once late rounds are averaged the run ends, and says that it was noise that ended it."""
    pvi = pvi_of(regression, 2, PowerEP(moments=ImportanceMoments(64)))
    result = pvi.run(jax.random.key(0), 150, *data, tol=1e-9, progress_bar=False)
    assert result.converged and "noise of sampled moments" in result.message
    assert 8 < len(result.losses) < 150
    state = result.state
    assert float(noise_floor(state.solver_state, state.report)) >= float(state.report.total_move)
    assert float(noise_floor((), state.report)) == 0.0


def test_a_group_of_one_row_has_its_rows_moments(data, by_rows):
    """factors="group" with one row a group is factors="row", without being asked."""
    pvi = pvi_of(regression, np.arange(8), PowerEP())
    found = pvi.run(jax.random.key(0), 30, data[0][:8], data[1][:8], progress_bar=False)
    np.testing.assert_allclose(found.params["auto_loc"], by_rows[0]["auto_loc"], rtol=1e-6)
    assert np.all(np.isnan(found.info.ess))


def test_starting_values_of_the_guide_are_refused_where_rows_have_sites(data):
    with pytest.raises(PVIError, match="factors='group'"):
        pvi_of(regression, 3, PowerEP(factors="row")).init(
            jax.random.key(0), *data, init_params={"auto_loc": jnp.zeros(3)}
        )


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoDiagonalNormal], ids=["full", "mean-field"])
def test_the_site_of_a_group_is_the_sum_of_its_rows(data, x64, guide):
    pvi = pvi_of(regression, 3, PowerEP(factors="row"), Sequential(damping=0.7), guide)
    state = pvi.run(jax.random.key(0), 3, *data, progress_bar=False).state
    (vector, precision), packing = state.sites.local.terms[0], state.packing
    X, total = np.asarray(data[0])[np.asarray(packing.rows)], np.zeros((3, 3))
    for c, group in enumerate(np.asarray(packing.chunk_group)):
        for e in np.flatnonzero(np.asarray(packing.mask)[c]):
            own = np.asarray(vector[c, e])
            total[group] += X[c, e] * own if guide is AutoMultivariateNormal else own
    np.testing.assert_allclose(state.sites.groups.precision_mean, total, rtol=1e-6 if x64 else 1e-3, atol=1e-5)
    assert np.all(np.isfinite(precision))


# ------------------------------------------------------------------------------------------------------ collapsed weights


def simplex(x, y):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(x @ p, s), obs=y)


def test_a_visit_by_collapsed_weights_ends_at_the_member_that_they_match():
    """At a quarter of the power: not four times as far, where none of the draws was."""
    family = MultivariateNormalFamily(1)
    q, target = (family.from_loc_sd(jnp.array([m]), jnp.array([s])) for m, s in ((0.0, 1.0), (0.5, 0.8)))
    zero, one = jnp.zeros(()), jnp.ones(())
    found = Tilted(
        (target - q) * 4.0,
        zero,
        zero,
        one,
        zero,
        one / 4,
        jnp.int32(0),
        jnp.array(False),
        jnp.array(True),
        jnp.array(True),
    )
    state = matching.first_match_state(jnp.zeros(2), 1.0, zero.dtype)
    result = matching.match_visit(family, q, q * 0.0, found, state, matching.MatchRules(1.0, "auto", 50.0, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), q + result.site, target)
    # What a visit's weights were worth is of that visit: the next one begins with the whole step.
    assert result.state.step == 1.0


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("schedule", [Sequential(), StochasticSubset(2)], ids=["cyclic", "some"])
def test_rounds_over_a_simplex_stay_near_the_data(schedule):
    """One visit by one weight of 1,024, taken whole, threw q millions of nats away, from where a random few never came back."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 3))
    y = x @ [0.6, 0.3, 0.1] + 0.5 * rng.normal(size=48)
    pvi = PVI(
        Partition(simplex, "data", np.arange(48) % 6),
        AutoMultivariateNormal(simplex),
        solver=PowerEP(0.5),
        schedule=schedule,
    )
    losses = pvi.run(jax.random.key(0), 20, jnp.asarray(x), jnp.asarray(y), progress_bar=False).losses
    assert np.max(losses) < 150
    assert losses[-1] < 45
