"""Points and Stein's identity: exact for cubics, right where gradients jump, and contradicted where they fail."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy.optimize import minimize

from numpyro_pvi import PVI, Partition
from numpyro_pvi.expectations import PointsProgram, _points, disagreement, product_nodes, random_points, sigma_points
from numpyro_pvi.families import MultivariateNormalFamily, NormalFamily
from numpyro_pvi.runtime import _programs

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def moments(dim, full=True, scale=0.7):
    family = MultivariateNormalFamily(dim) if full else NormalFamily(dim)
    root = np.tril(RNG.normal(size=(dim, dim)) * 0.3) + np.eye(dim)
    loc = jnp.asarray(RNG.normal(size=dim))
    precision = root @ root.T / scale**2 if full else np.diag(root) ** 2 / scale**2
    vector = precision @ loc if full else precision * loc
    return family, family.moments(family.natural(jnp.asarray(vector), jnp.asarray(precision)))


def covariance(family, q):
    return np.asarray(q.scale @ q.scale.T) if family.full else np.diag(np.asarray(q.scale) ** 2)


def cubic(dim):
    """A random cubic with its derivatives' expectations under a Gaussian, in closed form."""
    tensor = RNG.normal(size=(dim, dim, dim))
    tensor = (
        sum(np.transpose(tensor, p) for p in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]) / 6
    )
    matrix = RNG.normal(size=(dim, dim))
    matrix, vector = matrix + matrix.T, RNG.normal(size=dim)

    def density(_, z):
        t = jnp.asarray(tensor)
        return jnp.einsum("ijk,i,j,k->", t, z, z, z) / 6 + 0.5 * z @ jnp.asarray(matrix) @ z + jnp.asarray(vector) @ z

    def expectations(loc, cov):
        hessian = np.einsum("ijk,k->ij", tensor, loc) + matrix
        gradient = 0.5 * np.einsum("ijk,jk->i", tensor, np.outer(loc, loc) + cov) + matrix @ loc + vector
        value = np.einsum("ijk,i,j,k->", tensor, loc, loc, loc) / 6 + 0.5 * np.einsum("ijk,ij,k->", tensor, cov, loc)
        return value + 0.5 * loc @ matrix @ loc + 0.5 * np.sum(matrix * cov) + vector @ loc, gradient, hessian

    return density, expectations


def parts(family, q, expected):
    """``(value, E grad f, E hess f)`` from what a program returns."""
    precision = np.asarray(expected.target.precision)
    pull = precision @ np.asarray(q.loc) if family.full else precision * np.asarray(q.loc)
    return float(expected.value), np.asarray(expected.target.precision_mean) - pull, -precision


def sets(program, sampled):
    random = random_points(KEY, program.family.dim, 16, jnp.result_type(float))
    return program.choose(random, jnp.array(sampled), jnp.result_type(float))


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["sigma", "random", "product"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
def test_points_are_exact_for_cubics(dim, kind, full, x64):
    family, q = moments(dim, full)
    density, closed = cubic(dim)
    program = PointsProgram(density, family, nodes=product_nodes(dim, 24))
    points = _fixed(program, True) if kind == "product" else sets(program, kind == "random")
    value, gradient, hessian = parts(family, q, program.expected(None, q, None, jnp.int32(0), points, False))
    exact = closed(np.asarray(q.loc), covariance(family, q))
    tolerance = 1e-9 if x64 else 2e-3
    np.testing.assert_allclose(value, exact[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(gradient, exact[1], rtol=tolerance, atol=10 * tolerance)
    wanted = exact[2] if full else np.diag(exact[2])
    np.testing.assert_allclose(hessian, wanted, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 9])
def test_both_kinds_of_points_have_unit_covariance(dim):
    for found in (sigma_points(dim, float), random_points(KEY, dim, 30, jnp.result_type(float))):
        eps, weight = np.asarray(found.eps), np.asarray(found.weight)
        for block in range(eps.shape[0]):
            second = np.einsum("p,pi,pj->ij", weight[block], eps[block], eps[block])
            np.testing.assert_allclose(second, np.eye(dim), atol=2e-5)


def test_random_points_are_unbiased_for_a_quartic(x64):
    """E|z|^4 = D (D + 2), which sigma points at radius sqrt(D) put at D^2."""
    dim = 5
    family = MultivariateNormalFamily(dim)
    q = family.moments(family.natural(jnp.zeros(dim), jnp.eye(dim)))
    program = PointsProgram(lambda _, z: jnp.sum(z**2) ** 2, family, "monte_carlo", 16)
    found = [
        float(program.expected(None, q, None, 0, program.draw(jax.random.key(i), jnp.result_type(float)), False).value)
        for i in range(40)
    ]
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - dim * (dim + 2)) < 4 * error + 1e-3
    assert error < 0.5


def laplace(dim, num_rows):
    X, y = RNG.normal(size=(num_rows, dim)), RNG.normal(size=num_rows)

    def density(_, z):
        return -jnp.sum(jnp.abs(jnp.asarray(y) - jnp.asarray(X) @ z))

    def curvature(loc, cov):
        """-E hess: every row has -2 times the density of its residual at zero along its own direction."""
        sd = np.sqrt(np.einsum("ni,ij,nj->n", X, cov, X))
        height = 2 * np.exp(-0.5 * ((y - X @ loc) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
        return (X.T * height) @ X

    return density, curvature


def test_random_points_see_the_curvature_of_kinks(x64):
    dim = 3
    family, q = moments(dim)
    density, curvature = laplace(dim, 20)
    exact = curvature(np.asarray(q.loc), covariance(family, q))
    program = PointsProgram(density, family, "monte_carlo", 3_000)
    points = program.draw(KEY, jnp.result_type(float))
    found = parts(family, q, program.expected(None, q, None, jnp.int32(0), points, False))[2]
    np.testing.assert_allclose(-found, exact, atol=0.05 * np.abs(exact).max())


CONTRADICTED = {
    # Sigma points lie sqrt(D) sds out, where nothing of a Gaussian is.
    "narrow bumps": (lambda _, z: 30.0 * jnp.sum(jnp.exp(-(z**2) / 0.5)), True),
    "quartic": (lambda _, z: -0.3 * jnp.sum(z**2) ** 2, True),
    "exponential": (lambda _, z: -jnp.sum(jnp.exp(2.0 * z)), True),
    "quadratic": (lambda _, z: -40.0 * jnp.sum(z**2) + 3 * z[0], False),
    "nearly quadratic": (lambda _, z: -0.5 * jnp.sum(z**2) + 0.01 * jnp.sum(jnp.cos(z)), False),
    "cubic": (lambda _, z: 0.1 * jnp.sum(z**3) - jnp.sum(z**2), False),
}


@pytest.mark.parametrize("name", CONTRADICTED)
@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
def test_a_few_draws_contradict_sigma_points_where_they_fail(name, full):
    density, fails = CONTRADICTED[name]
    dim = 12
    family = MultivariateNormalFamily(dim) if full else NormalFamily(dim)
    one = jnp.eye(dim) if full else jnp.ones(dim)
    q = family.moments(family.natural(jnp.zeros(dim), one))
    program = PointsProgram(density, family)
    factor = program.expected(None, q, None, jnp.int32(0), sigma_points(dim, jnp.result_type(float)), False)
    verdicts = []
    for seed in range(8):
        eps = jax.random.normal(jax.random.key(seed), (16, dim))
        pairs = jax.vmap(lambda e: program.pair(None, q, e))(eps)
        verdicts.append([bool(disagreement(family, q, factor, eps, pairs, again)) for again in (False, True)])
    # Agreement is never doubted, whether or not it was broken before.
    assert np.all(verdicts) if fails else not np.any(verdicts)


@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
@pytest.mark.parametrize(("part", "harmless"), [("value", 0.05), ("gradient", 0.1), ("curvature", 0.2)])
def test_errors_are_contradicted_from_what_does_harm(part, harmless, full):
    """Of a quadratic density draws know everything: half of what would do harm is let pass, four times as much is not."""
    dim, sd = 3, jnp.array([0.1, 1.0, 20.0])
    family = MultivariateNormalFamily(dim) if full else NormalFamily(dim)
    precision = jnp.diag(sd**-2) if full else sd**-2
    q = family.moments(family.natural(jnp.array([0.5, -1.0, 40.0]) * sd**-2, precision))
    program = PointsProgram(lambda _, z: -0.5 * jnp.sum((z / sd) ** 2) + jnp.sum(z / sd), family)
    factor = program.expected(None, q, None, jnp.int32(0), sigma_points(dim, jnp.result_type(float)), False)
    eps = jax.random.normal(jax.random.key(0), (16, dim))
    pairs = jax.vmap(lambda e: program.pair(None, q, e))(eps)
    verdicts = []
    for size in (0.5 * harmless, 4 * harmless):
        value, vector, bend = factor.value, factor.target.precision_mean, factor.target.precision
        if part == "value":
            value = value + size
        elif part == "gradient":
            # In nats per posterior sd, along the widest direction.
            vector = vector.at[2].add(size / sd[2])
        else:
            # The whitened trace; the gradient at the location stays as it is.
            change = size * dim**0.5 / dim * sd**-2
            bend = bend + (jnp.diag(change) if full else change)
            vector = vector + change * q.loc
        wrong = dataclasses.replace(factor, value=value, target=family.natural(vector, bend))
        verdicts.append(bool(disagreement(family, q, wrong, eps, pairs)))
    assert verdicts == [False, True]


def test_points_that_failed_come_back_only_where_draws_confirm_them():
    """A scale that multiplies effects: points on the axes never see both far out, and few draws do."""

    def density(_, z):
        return -0.5 * jnp.exp(1.2 * z[0]) * jnp.sum(z[1:] ** 2) / 16

    dim = 9
    family = MultivariateNormalFamily(dim)
    q = family.moments(family.natural(jnp.zeros(dim), jnp.eye(dim)))
    program = PointsProgram(density, family)
    factor = program.expected(None, q, None, jnp.int32(0), sigma_points(dim, jnp.result_type(float)), False)
    seen = []
    for seed in range(20):
        eps = jax.random.normal(jax.random.key(seed), (16, dim))
        pairs = jax.vmap(lambda e: program.pair(None, q, e))(eps)
        seen.append([bool(disagreement(family, q, factor, eps, pairs, again)) for again in (False, True)])
    first, again = np.mean(seen, axis=0)
    # E f is -0.51 nats, of which the points miss over 0.1: most first looks let that pass, later ones do not.
    exact = -0.25 * np.exp(0.72)
    assert float(factor.value) - exact > 0.1
    assert first < 0.6 and again > 0.9


def test_values_alone_equal_values_with_gradients(tolerance):
    family, q = moments(4)
    program = PointsProgram(lambda _, z: jnp.sum(jnp.sin(z)) ** 2, family)
    points = sets(program, True)
    whole = program.expected(None, q, None, jnp.int32(0), points, False)
    for slopes in (False, jnp.array(False)):
        alone = program.expected(None, q, None, jnp.int32(0), points._replace(slopes=slopes), False)
        np.testing.assert_allclose(alone.value, whole.value, rtol=10 * tolerance)
        assert not np.any(alone.target.precision)


def test_a_traced_loop_over_blocks_equals_the_unrolled_one(tolerance):
    family, q = moments(2)
    program = PointsProgram(lambda _, z: jnp.sum(jnp.sin(z)) ** 2, family, "auto", 40)
    for sampled in (False, True):
        random = program.draw(KEY, jnp.result_type(float))
        points = program.choose(random, jnp.array(sampled), jnp.result_type(float))
        first, second = (
            jax.jit(program.expected, static_argnums=3)(None, q, None, 0, points, False),
            jax.jit(program.expected)(None, q, None, jnp.int32(0), points, False),
        )
        np.testing.assert_allclose(first.value, second.value, rtol=10 * tolerance)
        np.testing.assert_allclose(first.target.precision, second.target.precision, rtol=1e-4, atol=10 * tolerance)


# ---------------------------------------------------------------- product rules


def _refined(density, family):
    return PointsProgram(density, family, nodes=product_nodes(family.dim, 24))


def _fixed(program, finer):
    random = random_points(KEY, program.family.dim, 16, jnp.result_type(float))
    return program.choose(random, jnp.array(False), jnp.result_type(float), finer=jnp.array(finer))


@pytest.mark.parametrize("finer", [True, False], ids=["product", "sigma points"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "mean-field"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_product_rules_are_right_far_from_cubics(dim, full, finer, x64):
    """An exponential's expectations are closed forms; sigma points, for a planted fault, are off by more."""
    slope = np.array([0.9, -0.6, 0.4, 0.5])[:dim]
    family = MultivariateNormalFamily(dim) if full else NormalFamily(dim)
    root = np.tril(np.full((dim, dim), 0.2)) + 0.8 * np.eye(dim)
    precision = np.linalg.inv(root @ root.T) if full else 1 / np.diag(root) ** 2
    loc = np.linspace(-0.5, 0.5, dim)
    q = family.moments(family.natural(*map(jnp.asarray, (precision @ loc if full else precision * loc, precision))))
    program = _refined(lambda _, z: jnp.exp(jnp.asarray(slope) @ z), family)
    found = parts(family, q, program.expected(None, q, None, jnp.int32(0), _fixed(program, finer), False))
    value = np.exp(slope @ loc + 0.5 * slope @ covariance(family, q) @ slope)
    hessian = value * np.outer(slope, slope) if full else value * slope**2
    errors = [np.max(np.abs(a - b)) for a, b in zip(found, (value, value * slope, hessian), strict=True)]
    # Five nodes an axis, for four latents, know exponentials of .5 to some 1e-4.
    bound = 5e-4 if dim == 4 else 2e-6 if x64 else 2e-5
    assert max(errors) < bound if finer else dim == 1 or max(errors) > 2 * bound


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 6])
def test_a_coarser_rule_confirms_what_draws_cannot_tell_and_contradicts_kinks(dim):
    """Values vary by nats from draw to draw where a factor is far from quadratic; a rule has no such error."""
    family = MultivariateNormalFamily(dim)
    q = family.moments(family.natural(jnp.zeros(dim), jnp.eye(dim)))
    draws = jax.random.normal(jax.random.key(1), (16, dim))
    smooth, kinked = (lambda _, z: -2.0 * jnp.exp(jnp.mean(z))), (lambda _, z: -9.0 * jnp.sum(jnp.abs(z - 0.3)))
    verdicts = []
    for density in (smooth, kinked):
        program = _refined(density, family)
        pairs = jax.vmap(lambda e, program=program: program.pair(None, q, e))
        factor = program.expected(None, q, None, jnp.int32(0), _fixed(program, True), False)
        verdicts.append(bool(program.contradicted(q, factor, draws, pairs, jnp.array(True), jnp.array(True))))
        # Nor does a rule stay that is no number at its nodes.
        nowhere = dataclasses.replace(factor, value=jnp.nan * factor.value)
        assert program.contradicted(q, nowhere, draws, pairs, jnp.array(False), jnp.array(True))
        # Of sigma points draws alone judge, with the coarser rule's pairs beside them or without.
        factor = program.expected(None, q, None, jnp.int32(0), _fixed(program, False), False)
        for before in (False, True):
            said = program.contradicted(q, factor, draws, pairs, jnp.array(before), jnp.array(False))
            assert said == disagreement(family, q, factor, draws, pairs(draws), before)
    assert verdicts == [False, True]


@pytest.mark.parametrize("part", ["value", "gradient"])
def test_draws_contradict_a_product_rule_as_well(part, monkeypatch):
    """What a coarser rule cannot be asked about, for a planted fault, draws of a quadratic know everything of."""

    def draws_alone(*args, weight=None, **options):
        return disagreement(*args, **options) if weight is None else jnp.array(False)

    monkeypatch.setattr(_points, "disagreement", draws_alone)
    dim = 2
    family = MultivariateNormalFamily(dim)
    q = family.moments(family.natural(jnp.zeros(dim), jnp.eye(dim)))
    program = _refined(lambda _, z: -0.5 * jnp.sum(z**2), family)
    factor = program.expected(None, q, None, jnp.int32(0), _fixed(program, True), False)
    draws, pairs = jax.random.normal(jax.random.key(0), (16, dim)), jax.vmap(lambda e: program.pair(None, q, e))
    off = {"value": (0.4, 0.0), "gradient": (0.0, 0.6)}[part]
    wrong = dataclasses.replace(
        factor,
        value=factor.value + off[0],
        target=family.natural(factor.target.precision_mean + off[1], factor.target.precision),
    )
    flags = jnp.array(False), jnp.array(True)
    assert [bool(program.contradicted(q, x, draws, pairs, *flags)) for x in (factor, wrong)] == [False, True]


def test_product_rules_are_for_few_latents_and_rows():
    assert [product_nodes(dim, 24) for dim in (1, 2, 3, 4, 5, 6, 8, 9, 60)] == [15, 11, 7, 5, 4, 4, 3, 0, 0]
    assert [product_nodes(3, rows) for rows in (700, 2_000, 4_000, 5_000)] == [7, 5, 4, 0]
    # Never of a lower degree than sigma points, which are eight nodes of one latent.
    assert [product_nodes(1, rows) for rows in (29_000, 30_000)] == [9, 0]


def decay(t, y):
    rate, size = numpyro.sample("rate", dist.LogNormal(0, 1)), numpyro.sample("size", dist.Normal(0, 2))
    with numpyro.plate("rows", len(t)):
        numpyro.sample("y", dist.Normal(size * jnp.exp(-rate * t), 0.3), obs=y)


@pytest.fixture(scope="module")
def decayed():
    t = np.linspace(0.3, 3, 6)
    return t, 1.5 * np.exp(-0.7 * t) + np.array([0.1, -0.2, 0.15, 0.05, -0.1, 0.12])


@pytest.fixture(scope="module")
def best_normal(decayed):
    """Loss and location of the best normal q, in nats, by a minimiser over sums on 40 x 40 nodes of its own."""
    t, y = decayed
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    eps = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    weight = np.outer(weights, weights).ravel() / weights.sum() ** 2

    def normal(x, sd):
        return -0.5 * (x / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)

    def loss(p):
        root = np.array([[np.exp(p[2]), 0.0], [p[4], np.exp(p[3])]])
        z = p[:2] + eps @ root.T
        fitted = z[:, 1:] * np.exp(-np.exp(z[:, :1]) * t)
        joint = normal(z[:, 0], 1.0) + normal(z[:, 1], 2.0) + normal(y - fitted, 0.3).sum(axis=1)
        return -(weight @ joint + p[2] + p[3] + 1 + np.log(2 * np.pi))

    found = minimize(loss, [0.0, 1.0, -1.0, -1.0, 0.0], method="BFGS")
    return found.fun, found.x[:2]


def _fit(decayed):
    pvi = PVI(Partition(decay, "rows", 3), AutoMultivariateNormal(decay))
    return pvi, pvi.run(jax.random.key(0), 60, *decayed, tol=1e-4, progress_bar=False)


def test_two_latents_without_structure_are_taken_by_a_product_rule(decayed, best_normal, x64):
    """Draws contradict the sigma points of a decay that few rows tell of; no noise is left in what takes their place."""
    pvi, result = _fit(decayed)
    assert result.converged
    assert "product rule" in str(pvi.info(result.state))
    assert float(result.losses[-1]) == pytest.approx(best_normal[0], abs=1e-6 if x64 else 1e-4)
    np.testing.assert_allclose(result.params["auto_loc"], best_normal[1], atol=1e-4 if x64 else 1e-3)
    # Nor is there any in its evidence.
    assert float(pvi.log_evidence(result.state, *decayed, with_error=True)[1]) == 0.0


def test_the_law_sees_fits_without_a_product_rule(decayed, best_normal, monkeypatch):
    monkeypatch.setattr(_programs, "product_nodes", lambda dim, num_rows: 0)
    jax.clear_caches()
    _, result = _fit(decayed)
    jax.clear_caches()
    assert abs(float(result.losses[-1]) - best_normal[0]) > 1e-3


def test_draws_stand_for_a_product_rule_that_more_rows_have_none_of(decayed, monkeypatch):
    """A state that goes on with them neither says that it has the rule nor takes sigma points for it, nor is its evidence exact."""
    state = _fit(decayed)[1].state
    assert bool(state.rule.points.finer[0]) and not bool(state.rule.points.sampled[0])
    monkeypatch.setattr(_programs, "product_nodes", lambda dim, num_rows: 0)
    jax.clear_caches()
    pvi = PVI(Partition(decay, "rows", 3), AutoMultivariateNormal(decay))
    assert float(pvi.log_evidence(state, *decayed, with_error=True)[1]) > 0.0
    after, _ = pvi.update(state, *decayed)
    jax.clear_caches()
    assert "product rule" not in str(pvi.info(after))
    assert not bool(after.rule.points.finer[0])
