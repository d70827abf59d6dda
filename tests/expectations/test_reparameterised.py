"""Reparameterised draws: closed forms on quadratics, quadrature elsewhere, kinks, and memory.

Statistical bounds are five standard errors of a mean over independent sets of draws: a correct estimate of one number is
outside with probability below 1e-6.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import ReparameterisedProgram
from numpyro_pvi.factors._planner import LARGEST_HESSIAN
from numpyro_pvi.families import GaussianMoments, NormalFamily
from numpyro_pvi.solvers import NaturalGradient

KEY = jax.random.key(0)
LOC, SD = jnp.array([0.3, -0.6, 0.2]), jnp.array([0.5, 1.2, 0.8])
MATRIX = jnp.array([[2.0, 0.4, -0.3], [0.4, 1.0, 0.2], [-0.3, 0.2, 0.7]])
SETS, PAIRS = 3_000, 8


def moments(loc=LOC, sd=SD):
    return GaussianMoments(loc, sd, -2 * jnp.sum(jnp.log(sd)), jnp.array(True))


def coupled(chunk, point):
    return -0.5 * point @ MATRIX @ point + point[0] - chunk[0]


def separable(chunk, point):
    return -0.5 * jnp.sum(jnp.diagonal(MATRIX) * point**2) - chunk[0]


def bent(chunk, point):
    return -jnp.sum(jnp.cosh(0.7 * point)) + jnp.sin(point[0] * point[1]) - chunk[0]


def kinked(chunk, point):
    return -jnp.sum(jnp.abs(point - 0.1)) - chunk[0]


def expectations(density, probe=None, pairs=PAIRS, sets=SETS):
    """Value, precision-mean, precision and product of many independent sets of draws."""
    noise = jax.random.normal(KEY, (sets, pairs, 3))
    chunk, made = (
        (jnp.zeros(1), None),
        ReparameterisedProgram(lambda data, point: density(data[0], point), NormalFamily(3)),
    )
    found = jax.vmap(lambda eps: made.expected(chunk, moments(), probe, None, eps, False))(noise)
    return {
        "value": found.value,
        "vector": found.target.precision_mean,
        "precision": found.target.precision,
        "product": found.product,
    }


def outside(draws, wanted):
    """Largest distance of a mean from what it should be, in standard errors (rounding counts as none)."""
    draws = np.asarray(draws, np.float64)
    error = draws.std(0) / np.sqrt(len(draws)) + 1e-6 * np.abs(wanted) + 1e-6
    return float(np.max(np.abs(draws.mean(0) - wanted) / error))


@pytest.mark.parametrize("density", [coupled, separable])
def test_quadratics_are_right_in_expectation(density):
    found = expectations(density)
    curvature = jnp.diagonal(MATRIX)
    gradient = jax.grad(density, argnums=1)(jnp.zeros(1), LOC)
    assert outside(found["precision"], curvature) < 5
    assert outside(found["vector"], gradient + curvature * LOC) < 5
    assert outside(found["value"], density(jnp.zeros(1), LOC) - 0.5 * jnp.sum(curvature * SD**2)) < 5


def test_bent_factors_agree_with_quadrature():
    found = expectations(bent)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3)
    mass = np.prod(np.stack(np.meshgrid(weights, weights, weights, indexing="ij"), -1).reshape(-1, 3), -1)
    at, mass = jnp.asarray(LOC + grid * SD), mass / mass.sum()

    def mean(function):
        return mass @ np.asarray(jax.vmap(lambda u: function(lambda z: bent(jnp.zeros(1), z))(u))(at)).reshape(
            len(mass), -1
        )

    curvature = -mean(lambda f: lambda u: jnp.diagonal(jax.hessian(f)(u)))
    assert outside(found["value"], mean(lambda f: f)[0]) < 5
    assert outside(found["precision"], curvature) < 5
    assert outside(found["vector"], mean(jax.grad) + curvature * np.asarray(LOC)) < 5


def test_kinks_have_curvature_that_second_derivatives_miss():
    """For -|u - a| the expected second derivative is -2 N(a; loc, sd), all of it at the kink."""
    wanted = 2 * np.exp(-0.5 * ((0.1 - LOC) / SD) ** 2) / (np.sqrt(2 * np.pi) * SD)
    assert outside(expectations(kinked)["precision"], wanted) < 5


def test_other_draws_coefficient_lowers_the_variance():
    """Sixteen pairs by themselves would have a sixteenth of one pair's variance; 8 / (S (S - 1)) is a sixtieth."""
    alone, many = (np.var(expectations(separable, pairs=p)["precision"], axis=0) for p in (1, 16))
    assert np.all(alone > 35 * many)


def test_a_biased_correction_would_be_seen():
    """The own draws' coefficient in place of the others' (a ratio estimate) is biased for a quartic factor."""

    def quartic(chunk, point):
        return -jnp.sum(point**4) / 12 - chunk[0]

    wanted = np.asarray(LOC**2 + SD**2)
    assert outside(expectations(quartic)["precision"], wanted) < 5
    noise = np.asarray(jax.random.normal(KEY, (SETS, PAIRS, 3)))
    up, down = (np.asarray(LOC + s * SD * noise) for s in (1, -1))
    turn = 0.5 * noise * (up**3 - down**3) / 3
    ratio = turn.sum(1) / (noise**2).sum(1) / np.asarray(SD)
    assert outside(ratio, wanted) > 20


def test_products_are_exact_on_quadratics(tolerance):
    probe = jnp.array([0.2, -0.4, 1.0])
    product = expectations(coupled, probe=probe, sets=2)["product"]
    np.testing.assert_allclose(product, jnp.stack([MATRIX @ probe] * 2), rtol=1e3 * tolerance)


def test_memory_is_linear_in_the_number_of_latents():
    dim = 20_000
    program = ReparameterisedProgram(lambda data, point: -jnp.sum(jnp.cosh(point)), NormalFamily(dim))

    def run(loc, noise):
        return program.expected((jnp.zeros(1), None), moments(loc, jnp.ones(dim)), None, None, noise, False)

    args = jnp.zeros(dim), jnp.zeros((16, dim))
    found = jax.jit(run).lower(*args).compile().memory_analysis()
    assert found.temp_size_in_bytes < 30 * dim * args[0].dtype.itemsize


# ---------------------------------------------------------------- the choice


def make_net(width):
    def net(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([width, 2]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([width]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal(jnp.tanh(X @ w.T) @ v / width**0.5, 0.5), obs=y)

    return net


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12, 2))
    return X, np.tanh(X[:, 0]) + 0.3 * rng.normal(size=12)


def start(width, rows, guide, **options):
    model = make_net(width)
    pvi = PVI(Partition(model, "data", np.arange(12) % 3), guide(model), **options)
    return pvi, pvi.init(KEY, *rows)


@pytest.mark.parametrize(
    ("width", "guide", "kind"),
    [(2, AutoDiagonalNormal, "draws"), (86, AutoDiagonalNormal, "reparameterised")],
    ids=["few latents", "many latents"],
)
def test_the_number_of_latents_decides(rows, width, guide, kind):
    pvi, state = start(width, rows, guide)
    assert (3 * width > LARGEST_HESSIAN) == (kind == "reparameterised")
    assert state.plan.partition.likelihood == kind
    info = pvi.info(state)
    assert set(info.structure) == {kind}
    assert ("reparameterised" in info.expectation[0]) == (kind == "reparameterised")


def test_it_can_be_forced_on_a_mean_field_q(rows):
    pvi, state = start(2, rows, AutoDiagonalNormal, solver=NaturalGradient(expectation="reparameterised"))
    assert state.plan.partition.likelihood == "reparameterised"
    first = float(pvi.evaluate(state, *rows))
    for _ in range(10):
        state, loss = pvi.update(state, *rows)
    assert float(loss) < first - 1


def test_a_full_q_is_refused(rows):
    with pytest.raises(PVIError, match="AutoDiagonalNormal"):
        start(2, rows, AutoMultivariateNormal, solver=NaturalGradient(expectation="reparameterised"))


def test_a_start_from_curvature_is_refused(rows):
    solver = NaturalGradient(expectation="reparameterised")
    with pytest.raises(PVIError, match="init_params"):
        start(2, rows, AutoDiagonalNormal, solver=solver, init_sites="curvature")
