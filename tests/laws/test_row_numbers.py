"""Sites as two numbers per row: the laws, against the dense path, closed forms and quadrature by hand; planted faults.

The oracles are NumPy on dense matrices and Gauss-Hermite nodes; they share no code with the package.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import RowNumbersProgram
from numpyro_pvi.families import RowPrior
from numpyro_pvi.runtime import _row_problem
from numpyro_pvi.schedules import Asynchronous, Sequential, Synchronous
from numpyro_pvi.solvers import NaturalGradient, _natural_gradient

RNG = np.random.default_rng(3)
KEY = jax.random.key(0)
N, D = 7, 10
X = RNG.normal(size=(N, D)) * np.logspace(-0.5, 0.5, D)
# Rows that depend on each other: their predictors' covariance is singular.
X[6] = X[1]
Y = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
LABELS = [0, 0, 1, 2, 1, 1, 2]
ROUNDS = 4
PRIOR_MEAN = np.r_[0.5, np.full(D, -0.2)]
PRIOR_SD = np.r_[2.0, np.full(D, 1.3)]
DESIGN = np.c_[np.ones(N), X]


def logistic(x, y):
    intercept = numpyro.sample("intercept", dist.Normal(0.5, 2.0))
    w = numpyro.sample("w", dist.Normal(-0.2, 1.3).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=intercept + x @ w), obs=y)


def linear(x, y):
    w = numpyro.sample("w", dist.Normal(-0.2, 1.3).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)


def make(model, sites="rows", schedule=None, labels=LABELS, **settings):
    solver = NaturalGradient(sites=sites, **settings)
    return PVI(Partition(model, "data", labels), AutoMultivariateNormal(model), solver=solver, schedule=schedule)


def follow(pvi, *data, rounds=ROUNDS):
    """Every round's naturals (prior, sites, q), report and loss as NumPy arrays, by the public surface."""
    state, found = pvi.init(KEY, *data), []
    for _ in range(rounds):
        state, loss = pvi.update(state, *data)
        names = state.plan.partition.layout.names
        q, p = pvi.posterior(state, joint=True)[names], pvi.prior(state, joint=True)[names]
        sites = [pvi.site(state, label) for label in pvi.groups]
        info = pvi.info(state)
        found.append(
            {
                "mean": np.asarray(q.mean),
                "covariance": np.asarray(q.covariance_matrix),
                "prior": (np.asarray(p.mean), np.asarray(p.covariance_matrix)),
                "sites": [(np.asarray(s.precision_mean), np.asarray(s.precision)) for s in sites],
                "cavity": np.asarray(pvi.cavity(state, 1).precision),
                "move": np.r_[info.move, info.total_move],
                "step": np.asarray(info.step),
                "loss": float(loss),
            }
        )
    return state, found


def nodes():
    x, w = np.polynomial.hermite_e.hermegauss(100)
    return x, w / w.sum()


def accounting(found):
    """sum_m {E_q log p(y_m | theta) - <eta_m, mu_q>} + A(eta_q) - A(eta_0), nats, by hand."""
    mean, covariance, (prior_mean, prior_covariance) = found["mean"], found["covariance"], found["prior"]
    at, sd = DESIGN @ mean, np.sqrt(np.einsum("nd,de,ne->n", DESIGN, covariance, DESIGN))
    x, w = nodes()
    logits = at[:, None] + sd[:, None] * x
    total = np.sum((Y[:, None] * logits - np.logaddexp(0.0, logits)) @ w)
    second = covariance + np.outer(mean, mean)
    for vector, precision in found["sites"]:
        total -= vector @ mean - 0.5 * np.sum(precision * second)

    def partition(loc, cov):
        return 0.5 * loc @ np.linalg.solve(cov, loc) + 0.5 * np.linalg.slogdet(cov)[1]

    return total + partition(mean, covariance) - partition(prior_mean, prior_covariance)


def check_sums(found, atol):
    """Law 1: the prior, written out by hand, and all sites are q."""
    precision = np.diag(PRIOR_SD**-2.0)
    vector = PRIOR_MEAN / PRIOR_SD**2
    for site_vector, site_precision in found["sites"]:
        precision, vector = precision + site_precision, vector + site_vector
    np.testing.assert_allclose(np.linalg.inv(precision), found["covariance"], atol=atol)
    np.testing.assert_allclose(np.linalg.solve(precision, vector), found["mean"], atol=atol)


def check_same(dense, rows, tol):
    for a, b in zip(dense, rows, strict=True):
        for name in ("mean", "covariance", "cavity", "move", "step", "loss"):
            np.testing.assert_allclose(b[name], a[name], rtol=tol, atol=tol, err_msg=name)
        for one, other in zip(a["sites"], b["sites"], strict=True):
            np.testing.assert_allclose(other[0], one[0], atol=tol)
            np.testing.assert_allclose(other[1], one[1], atol=tol)


@pytest.fixture(scope="module")
def tol(x64):
    """Quadrature and sums in float32 are good to some 1e-3 of a posterior sd."""
    return 1e-8 if x64 else 5e-3


@pytest.fixture(scope="module")
def dense():
    return follow(make(logistic, "dense"), X, Y)[1]


@pytest.fixture(scope="module")
def fitted():
    pvi = make(logistic)
    return (pvi, *follow(pvi, X, Y))


@pytest.fixture(scope="module")
def rows(fitted):
    return fitted[1:]


def test_every_iterate_is_that_of_dense_sites(dense, rows, tol):
    check_same(dense, rows[1], tol)


def test_prior_and_sites_are_q(rows, tol):
    for found in rows[1]:
        check_sums(found, tol)


def test_accounting_identity_and_loss(rows, tol):
    for found in rows[1]:
        np.testing.assert_allclose(accounting(found), -found["loss"], rtol=10 * tol)


def test_cavity_is_q_without_the_site(rows, tol):
    last = rows[1][-1]
    kept = sum(precision for i, (_, precision) in enumerate(last["sites"]) if i != 1)
    np.testing.assert_allclose(last["cavity"], np.diag(PRIOR_SD**-2.0) + kept, rtol=tol, atol=tol)


def test_a_site_holds_two_numbers_a_row(rows):
    state = rows[0]
    assert state.plan.rows == "rows"
    assert [x.shape for x in jax.tree.leaves(state.sites)] == [(1, N), (1, N)]


def test_quadratic_factors_are_exact_after_one_round(tol):
    """Law 2, and the evidence of a linear regression, by hand."""
    pvi = make(linear)
    state, loss = pvi.update(pvi.init(KEY, X, Y), X, Y)
    q = pvi.posterior(state, joint=True)[("w",)]
    gain = np.linalg.solve(1.3**2 * X @ X.T + 0.7**2 * np.eye(N), 1.3**2 * X).T
    mean = -0.2 + gain @ (Y + 0.2 * X.sum(axis=1))
    covariance = 1.3**2 * (np.eye(D) - gain @ X)
    np.testing.assert_allclose(q.mean, mean, atol=tol)
    np.testing.assert_allclose(q.covariance_matrix, covariance, atol=tol)
    marginal = 1.3**2 * X @ X.T + 0.7**2 * np.eye(N)
    away = Y + 0.2 * X.sum(axis=1)
    evidence = -0.5 * (away @ np.linalg.solve(marginal, away) + np.linalg.slogdet(2 * np.pi * marginal)[1])
    np.testing.assert_allclose(-loss, evidence, rtol=10 * tol)


def kernel(points):
    return 2.0 * np.exp(-0.5 * (points[:, None] - points) ** 2 / 0.3**2) + 0.05 * np.eye(len(points))


K = kernel(np.linspace(0.0, 1.0, N))
FORMS = {
    "covariance": lambda: dist.MultivariateNormal(0.3, covariance_matrix=jnp.asarray(K)),
    "root": lambda: dist.MultivariateNormal(0.3, scale_tril=jnp.linalg.cholesky(jnp.asarray(K))),
    "precision": lambda: dist.MultivariateNormal(0.3, precision_matrix=jnp.linalg.inv(jnp.asarray(K))),
}


def process(form):
    def model(y):
        f = numpyro.sample("f", FORMS[form]())
        with numpyro.plate("data", N) as i:
            numpyro.sample("obs", dist.Poisson(jnp.exp(0.5 * f[i])), obs=y[i])

    return model


COUNTS = np.array([2, 0, 1, 4, 3, 0, 1])


def settled(sites, form="covariance"):
    pvi = make(process(form), sites)
    state, loss = pvi.init(KEY, COUNTS), None
    for _ in range(3):
        state, loss = pvi.update(state, COUNTS)
    return pvi, state, float(loss)


@pytest.mark.parametrize(
    "form",
    ["covariance", pytest.param("root", marks=pytest.mark.slow), pytest.param("precision", marks=pytest.mark.slow)],
)
def test_one_predictor_per_latent_of_a_process(form, tol):
    """A Gaussian-process prior keeps 2 N numbers, and every q is that of dense sites."""
    (pvi, state, loss), (other, wide, expected) = settled("rows", form), settled("dense", form)
    assert state.plan.rows == "latents"
    assert sum(x.size for x in jax.tree.leaves(state.sites)) == 2 * N
    a, b = pvi.posterior(state)["f"], other.posterior(wide)["f"]
    np.testing.assert_allclose(a.mean, b.mean, atol=tol)
    np.testing.assert_allclose(a.covariance_matrix, b.covariance_matrix, atol=tol)
    np.testing.assert_allclose(a.variance, np.diag(b.covariance_matrix), atol=tol)
    np.testing.assert_allclose(loss, expected, atol=10 * tol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, settings",
    [
        (Sequential(), {}),
        (Sequential("random", damping=0.6), {"step_size": 0.7}),
        (Synchronous(damping=0.5), {"num_steps": 2}),
        (Synchronous(), {"backtracking": True}),
    ],
)
def test_every_iterate_under_other_settings(schedule, settings, tol):
    dense = follow(make(logistic, "dense", schedule, **settings), X, Y)[1]
    check_same(dense, follow(make(logistic, "rows", schedule, **settings), X, Y)[1], tol)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["prior", "curvature"])
def test_a_row_a_group_from_any_start(start, tol):
    found = []
    for sites in ("dense", "rows"):
        solver, guide = NaturalGradient(sites=sites), AutoMultivariateNormal(logistic)
        pvi = PVI(Partition(logistic, "data", list(range(N))), guide, solver=solver, init_sites=start)
        found.append(follow(pvi, X, Y)[1])
    check_same(*found, tol)


@pytest.mark.slow
def test_heavy_tails_whose_curvature_is_negative(tol):
    """Rows of a Student-t lie where its log density is convex: their l is negative, and q is found all the same."""

    def robust(x, y):
        w = numpyro.sample("w", dist.Normal(-0.2, 1.3).expand([D]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.StudentT(3.0, x @ w, 0.3), obs=y)

    y = 4.0 * Y - 6.0
    dense, rows = (follow(make(robust, sites), X, y) for sites in ("dense", "rows"))
    assert float(jnp.min(rows[0].sites.groups.precision)) < 0
    check_same(dense[1], rows[1], tol)


@pytest.mark.slow
@pytest.mark.parametrize("order", [("w", "f"), ("f", "w")])
def test_priors_of_several_kinds(order, tol):
    """Independent latents beside a process observed at some of its points; two observed sites."""
    part = {"w": dist.Normal(-0.2, 1.3).expand([2]).to_event(1), "f": FORMS["root"]()}

    def model(x, y):
        drawn = {name: numpyro.sample(name, part[name]) for name in order}
        with numpyro.plate("data", 5) as i:
            numpyro.sample("a", dist.Bernoulli(logits=x[i] @ drawn["w"] + drawn["f"][i]), obs=y[i])
            numpyro.sample("b", dist.Normal(drawn["f"][i + 1], 0.5), obs=2 * y[i])

    labels = [0, 1, 1, 0, 2]
    dense, rows = (make(model, sites, labels=labels) for sites in ("dense", "rows"))
    check_same(follow(dense, X[:, :2], Y)[1], follow(rows, X[:, :2], Y)[1], tol)


# ---------------------------------------------------------------------------------------------------- what a user gets


def draws_of(law, count=20_000):
    drawn = np.asarray(law.sample(jax.random.key(5), (count,)))
    return drawn.mean(axis=0), np.cov(drawn.T)


def check_draws(drawn, mean, covariance):
    """Mean and covariance of draws within five standard errors."""
    sd = np.sqrt(np.diag(covariance))
    assert np.max(np.abs(drawn[0] - mean) / sd) < 5 / np.sqrt(20_000)
    assert np.max(np.abs(drawn[1] - covariance) / np.outer(sd, sd)) < 5 * np.sqrt(2 / 20_000)


def test_pathwise_draws_and_densities_are_those_of_q(fitted, tol, monkeypatch):
    pvi, state, found = fitted
    law = pvi.posterior(state, joint=True)[("intercept", "w")]
    mean, covariance = found[-1]["mean"], found[-1]["covariance"]
    check_draws(draws_of(law), mean, covariance)
    np.testing.assert_allclose(law.variance, np.diag(covariance), rtol=tol, atol=tol)
    point = mean + 0.3
    expected = -0.5 * (0.09 * np.linalg.inv(covariance).sum() + np.linalg.slogdet(2 * np.pi * covariance)[1])
    np.testing.assert_allclose(law.log_prob(jnp.asarray(point)), expected, rtol=10 * tol)
    parts = pvi.posterior(state)
    np.testing.assert_allclose(parts["w"].variance, np.diag(covariance)[1:], rtol=tol, atol=tol)
    np.testing.assert_allclose(parts["intercept"].mean, mean[0], atol=tol)
    part = parts["w"].log_prob(jnp.asarray(point[1:]))
    inner = covariance[1:, 1:]
    expected = -0.5 * (0.09 * np.linalg.inv(inner).sum() + np.linalg.slogdet(2 * np.pi * inner)[1])
    np.testing.assert_allclose(part, expected, rtol=10 * tol)
    # A planted fault: what a draw of the prior misses, with the wrong sign.
    right = RowPrior.whiten
    monkeypatch.setattr(RowPrior, "whiten", lambda self, theta: -right(self, theta))
    with pytest.raises(AssertionError):
        check_draws(draws_of(law), mean, covariance)


def test_the_guide_draws_from_the_params(fitted, tol):
    pvi, state, found = fitted
    params, guide = pvi.get_params(state), pvi.guide
    covariance = found[-1]["covariance"]
    drawn = Predictive(guide, params=params, num_samples=20_000)(jax.random.key(6), X, Y)
    flat = np.c_[drawn["intercept"], drawn["w"]]
    check_draws((flat.mean(axis=0), np.cov(flat.T)), found[-1]["mean"], covariance)
    np.testing.assert_allclose(guide.median(params)["w"], found[-1]["mean"][1:], atol=tol)
    upper = guide.quantiles(params, [0.8413447])["w"][0]
    np.testing.assert_allclose(upper, found[-1]["mean"][1:] + np.sqrt(np.diag(covariance)[1:]), rtol=1e-4, atol=tol)
    root = np.asarray(params["auto_scale_tril"])
    np.testing.assert_allclose(root @ root.T, covariance, rtol=tol, atol=tol)
    np.testing.assert_allclose(guide.get_posterior(params).mean, found[-1]["mean"], atol=tol)
    np.testing.assert_allclose(guide.get_transform(params).scale_tril, root, rtol=tol, atol=tol)


def test_saved_and_forgotten(fitted, tol, tmp_path):
    pvi, state, found = fitted
    pvi.save(tmp_path / "state.pvi", state)
    loaded = make(logistic).load(tmp_path / "state.pvi")
    assert all(
        bool(jnp.all(a == b)) for a, b in zip(jax.tree.leaves(state.sites), jax.tree.leaves(loaded.sites), strict=True)
    )
    assert pvi.info(state).sites == "rows" and "no 11 x 11 matrix" in str(pvi.info(state))
    with pytest.warns(UserWarning, match="approximate"):
        left = pvi.forget_group(state, 1)
    last = found[-1]
    precision = np.diag(PRIOR_SD**-2.0) + sum(p for i, (_, p) in enumerate(last["sites"]) if i != 1)
    law = pvi.posterior(left, joint=True)[("intercept", "w")]
    np.testing.assert_allclose(law.covariance_matrix, np.linalg.inv(precision), rtol=tol, atol=tol)


def test_rows_are_chosen_where_they_are_fewer():
    """By itself from 64 latents on; no program then has a D x D array."""
    x = np.asarray(RNG.normal(size=(5, 70)))

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([70]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("obs", dist.Normal(x @ w, 0.7), obs=y)

    pvi = PVI(Partition(model, "data", [0, 0, 1, 1, 1]), AutoMultivariateNormal(model))
    state = pvi.init(KEY, x, Y[:5])
    assert state.plan.rows == "rows"
    assert "70x70" not in jax.jit(pvi.update).lower(state, x, Y[:5]).as_text()
    assert max(leaf.size for leaf in jax.tree.leaves(state)) < 70 * 70
    law = pvi.posterior(state)["w"]
    for view in (lambda law: law.variance, lambda law: law.sample(KEY, (3,))):
        assert "70,70" not in str(jax.make_jaxpr(view)(law))


REFUSED = {
    "mean field": (lambda model: {"guide": AutoNormal(model)}, "mean-field"),
    "schedule": (lambda model: {"schedule": Asynchronous()}, "Asynchronous"),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) for name in REFUSED])
def test_what_cannot_be_by_rows_is_refused(case):
    settings, words = REFUSED[case]
    chosen = {"guide": AutoMultivariateNormal(logistic)} | settings(logistic)
    pvi = PVI(Partition(logistic, "data", LABELS), solver=NaturalGradient(sites="rows"), **chosen)
    with pytest.raises(PVIError, match=words):
        pvi.init(KEY, X, Y)


def hierarchical(x, y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(mean, 1.0).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=x @ w), obs=y)


def two_predictors(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, jnp.exp(x @ w[::-1])), obs=y)


def scaled(x, y):
    with numpyro.handlers.scale(scale=2.0):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=x @ w), obs=y)


@pytest.mark.parametrize(
    "model, words",
    [
        (hierarchical, "depends on others"),
        pytest.param(two_predictors, "two predictors", marks=pytest.mark.slow),
        pytest.param(scaled, "neither Normal", marks=pytest.mark.slow),
    ],
)
def test_models_that_cannot_be_by_rows_are_refused(model, words):
    with pytest.raises(PVIError, match=words):
        make(model).init(KEY, X, Y)


def test_settings_are_checked():
    with pytest.raises(PVIError, match="sites="):
        NaturalGradient(sites="row")


# --------------------------------------------------------------------------------------------------------- planted faults


def wrong_sign(monkeypatch):
    right = RowNumbersProgram._term

    def term(self, spec, data, loc, *rest):
        value, vector, weight, *others = right(self, spec, data, loc, *rest)
        return value, vector - 2 * weight * loc, weight, *others

    monkeypatch.setattr(RowNumbersProgram, "_term", term)


def dropped_group(monkeypatch):
    right = _row_problem.RowProblem.visit_all

    def visit(self, carry, *rest):
        result = right(self, carry, *rest)
        own = self.family.prior.group == 1
        return result._replace(site=jax.tree.map(lambda x: jnp.where(own, 0.0, x), result.site))

    monkeypatch.setattr(_row_problem.RowProblem, "visit_all", visit)


def missing_damping(monkeypatch):
    monkeypatch.setattr(_natural_gradient, "damp", lambda old, new, step: new)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, settings", [(wrong_sign, {}), (dropped_group, {}), (missing_damping, {"step_size": 0.5})]
)
def test_planted_faults_are_seen(fault, settings, monkeypatch, tol):
    right = follow(make(logistic, "dense", **settings), X, Y)[1]
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_same(right, follow(make(logistic, "rows", **settings), X, Y)[1], max(tol, 1e-4))
