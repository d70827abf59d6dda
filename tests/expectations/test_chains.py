"""Moments of tilted distributions from chains: exact for Gaussians, else within their error of a grid; bad ones are told of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_pvi.expectations._chains as chains_room
from numpyro_pvi.errors import PVIError
from numpyro_pvi.expectations import LEAST_PER_LATENT, MCMCMoments, Tilted, from_chains, no_chains
from numpyro_pvi.expectations._chains import batch_variance, effective_size, split_rhat
from numpyro_pvi.families import GaussianNatural, MultivariateNormalFamily, NormalFamily
from numpyro_pvi.solvers._matching import DIVERGENT, NOT_MIXED, SLOW, chain_troubles

POWER = 0.6
LOC, PRECISION = np.array([1.0, -0.5]), np.array([[2.0, 0.3], [0.3, 1.0]])
SITE = np.array([0.2, 0.1]), np.array([[0.5, 0.1], [0.1, 0.2]])
FACTOR = np.array([3.0, 1.0]), np.array([[4.0, 1.0], [1.0, 2.0]])
SETTINGS = MCMCMoments(num_warmup=100, num_samples=128, num_chains=4)
GAUSSIAN, SKEWED, MODES, NOWHERE = (
    jnp.array(row) for row in ([1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [jnp.nan] * 4)
)


def density(shares, t, np=jnp):
    """A mixture of log densities by shares: Gaussian, skewed, two modes, and one that is not finite."""
    gaussian = FACTOR[0] @ t - 0.5 * t @ (FACTOR[1] @ t)
    skewed = -2 * np.logaddexp(0.0, 1 - 1.5 * t[0]) - 0.3 * np.sqrt(1 + (t[1] - 0.5) ** 2)
    modes = 3 * np.logaddexp(-20 * (t[0] - 1.5) ** 2, -20 * (t[0] + 0.5) ** 2)
    return shares[0] * gaussian + shares[1] * skewed + shares[2] * modes


def naturals(vector, precision):
    return GaussianNatural(jnp.asarray(vector), jnp.asarray(precision))


Q, T = functools.partial(naturals, LOC, PRECISION), functools.partial(naturals, *SITE)


def visit(settings=SETTINGS):
    """One compiled program for whatever is asked of it: (key, site, shares, chains) to tilted moments."""
    family = MultivariateNormalFamily(2)

    @jax.jit
    def run(key, site, shares, chains):
        look = jax.value_and_grad(functools.partial(density, shares))
        return from_chains(family, look, Q(), site, POWER, key, settings, chains)

    return lambda seed, site, shares, chains=None: run(
        jax.random.key(seed),
        site,
        shares,
        no_chains(settings, 2, jnp.result_type(float), True) if chains is None else chains,
    )


@pytest.fixture(scope="module")
def chained():
    return visit()


@pytest.fixture(scope="module", params=["nuts", "lockstep"])
def many(chained, request):
    """The skewed factor from sixteen seeds."""
    take = chained if request.param == SETTINGS.kernel else visit(dataclasses.replace(SETTINGS, kernel=request.param))
    return [take(seed, T(), SKEWED) for seed in range(16)]


def grid():
    """Change of the naturals over alpha, and the evidence's share, of the skewed factor: sums over a grid in NumPy."""
    covariance = np.linalg.inv(PRECISION)
    root = np.linalg.cholesky(covariance)
    axis = np.linspace(-10, 10, 401)
    eps = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    theta = covariance @ LOC + eps @ root.T
    site = theta @ SITE[0] - 0.5 * np.einsum("ni,ij,nj->n", theta, SITE[1], theta)
    factor = -2 * np.logaddexp(0, 1 - 1.5 * theta[:, 0]) - 0.3 * np.sqrt(1 + (theta[:, 1] - 0.5) ** 2)
    base = -0.5 * (eps**2).sum(1)
    logs = base + POWER * (factor - site)
    weights = np.exp(logs - logs.max())
    value = (logs.max() + np.log(weights.sum()) - np.log(np.exp(base).sum())) / POWER
    weights /= weights.sum()
    mean = weights @ theta
    new = np.linalg.inv((theta - mean).T @ (weights[:, None] * (theta - mean)))
    return (new @ mean - LOC) / POWER, (new - PRECISION) / POWER, value


def numbers(found):
    change = found.change
    return np.concatenate([change.precision_mean, np.ravel(change.precision), [found.value]])


# ----------------------------------------------------------------------------------------------------------------- laws


def test_a_gaussian_factor_is_exact_from_any_draws(chained, x64):
    """The score is linear there, so control variates leave no noise; and the bridge has one density on either side."""
    found = chained(0, T(), GAUSSIAN)
    tolerance = 1e-9 if x64 else 2e-3
    np.testing.assert_allclose(found.change.precision_mean, FACTOR[0] - SITE[0], atol=tolerance)
    np.testing.assert_allclose(found.change.precision, FACTOR[1] - SITE[1], atol=tolerance)
    vector, precision = LOC + POWER * (FACTOR[0] - SITE[0]), PRECISION + POWER * (FACTOR[1] - SITE[1])
    parts = [
        0.5 * h @ np.linalg.solve(P, h) - 0.5 * np.linalg.slogdet(P)[1]
        for h, P in ((vector, precision), (LOC, PRECISION))
    ]
    np.testing.assert_allclose(found.value, (parts[0] - parts[1]) / POWER, atol=tolerance)
    assert float(found.noise) < tolerance and float(jnp.sqrt(found.variance)) < tolerance
    assert bool(found.valid) and float(found.temper) == 1.0


def test_moments_and_evidence_meet_a_grid(many):
    """Sixteen seeds' mean within 5 standard errors: with 7 numbers of 15 degrees of freedom, one choice of seeds in 900 fails."""
    found = np.array([numbers(one) for one in many])
    error = found.std(0, ddof=1) / 4
    assert np.all(np.abs(found.mean(0) - np.concatenate([grid()[0], np.ravel(grid()[1]), [grid()[2]]])) < 5 * error)
    assert all(one.valid and float(one.memory.rhat) < 1.05 and float(one.memory.divergent) == 0 for one in many)


def test_reported_errors_are_those_between_seeds(many):
    """Of the evidence and of the mean: a variance of 15 degrees of freedom is within a factor of 3 of the truth."""
    spread = np.std([float(one.value) for one in many], ddof=1)
    told = np.sqrt(np.mean([float(one.variance) for one in many]))
    assert 1 / 3 < spread / told < 3
    moved = np.array(
        [
            np.linalg.solve(
                PRECISION + POWER * np.asarray(one.change.precision),
                LOC + POWER * np.asarray(one.change.precision_mean),
            )
            for one in many
        ]
    )
    root = np.linalg.cholesky(np.linalg.inv(PRECISION))
    spread = np.max(np.std(np.linalg.solve(root, moved.T), axis=1, ddof=1))
    assert 1 / 3 < spread / (POWER * np.mean([float(one.noise) for one in many])) < 3


def test_control_variates_matter(many):
    """The noise of plain draws of as many effective ones is several times larger."""
    plain = POWER**-1 * 0.6 / np.sqrt([float(one.ess) for one in many])
    assert np.mean([float(one.noise) for one in many]) < 0.3 * np.mean(plain)


def test_chains_go_on_from_where_they_stood(chained):
    first = chained(0, T(), SKEWED)
    second = chained(1, T(), SKEWED, first.memory)
    assert int(first.memory.visits) == 1 and int(second.memory.visits) == 2
    ratio = np.asarray(second.memory.step_size / first.memory.step_size)
    assert np.all((ratio > 0.8) & (ratio < 1.25)) and not np.all(ratio == 1)
    assert 0.6 < float(second.memory.acceptance) < 1
    gap = np.abs(numbers(second) - numbers(first))
    assert 0 < gap.max() < 0.2


# -------------------------------------------------------------------------------------------------------------- failure


def test_an_improper_cavity_is_found_before_chains_move(chained):
    """At the full power its precision would be 1 - 1.2 of q's."""
    found = chained(0, naturals(2 * LOC, 2 * PRECISION), GAUSSIAN)
    assert float(found.temper) == 0.5 and bool(found.valid)
    np.testing.assert_allclose(found.change.precision, FACTOR[1] - 2 * PRECISION, atol=1e-3)


def test_a_factor_that_is_nowhere_finite_is_refused_and_starts_anew(chained):
    found = chained(0, T(), NOWHERE)
    assert not bool(found.finite) and not bool(found.valid) and int(found.memory.visits) == 0
    assert bool(chained(1, T(), GAUSSIAN, found.memory).valid)


def told(found):
    """What a solver says of a visit."""
    said = chain_troubles(SETTINGS, found.memory, found.ess, 2 * LEAST_PER_LATENT)
    return [code for flag, code in said if bool(flag)]


def test_chains_that_disagree_are_told_of(chained, many):
    assert told(many[0]) == []
    assert NOT_MIXED in told(chained(3, T(), MODES))


@pytest.mark.parametrize(
    ("field", "value", "code"), [("divergent", 0.2, DIVERGENT), ("rhat", jnp.nan, NOT_MIXED), ("ess", 3.0, SLOW)]
)
def test_every_kind_of_trouble_is_told_of(many, field, value, code):
    one: Tilted = many[0]
    worse = (
        one._replace(ess=jnp.array(value))
        if field == "ess"
        else one._replace(memory=one.memory._replace(**{field: jnp.array(value)}))
    )
    assert told(worse) == [code]
    assert told(one._replace(memory=worse.memory._replace(used=jnp.array(False)))) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 4}, "num_samples=4.*16 or more"),
        ({"num_chains": 1}, "2 or more"),
        ({"kernel": "gibbs"}, "'nuts', 'lockstep' or 'langevin'"),
        ({"target_accept": 1.0}, "between 0 and 1"),
        ({"num_warmup": True}, "num_warmup"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(PVIError, match=words):
        MCMCMoments(**options)


# ---------------------------------------------------------------------------------------------------------- diagnostics


def test_diagnostics_of_independent_draws():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(4, 1024, 2)))
    assert 0.99 < float(split_rhat(values)) < 1.02
    np.testing.assert_allclose(batch_variance(values), 1 / 4096, rtol=0.5)
    assert float(effective_size(values)) > 2000
    apart = values + jnp.arange(4.0)[:, None, None]
    # Batches of chains that far apart vary by 1.25 instead of 1 / 32.
    assert float(split_rhat(apart)) > 1.4 and float(effective_size(apart)) < 2.25 / 1.25 * 128


def test_split_rhat_is_the_textbooks():
    """Gelman et al., Bayesian Data Analysis, section 11.4, over half chains: the root of ((n - 1) / n W + B / n) / W."""
    values = np.random.default_rng(2).normal(size=(3, 12, 2)) + np.arange(3.0)[:, None, None]
    halves = np.concatenate([values[:, :6], values[:, 6:]])
    within = np.mean([np.sum((h - h.mean(0)) ** 2, axis=0) / 5 for h in halves], axis=0)
    means = np.array([h.mean(0) for h in halves])
    between = 6 * np.sum((means - means.mean(0)) ** 2, axis=0) / 5
    wanted = np.max(np.sqrt((5 / 6 * within + between / 6) / within))
    np.testing.assert_allclose(split_rhat(jnp.asarray(values)), wanted, rtol=1e-5)


def test_diagnostics_of_correlated_draws():
    """AR(1) with coefficient .8: one in (1 + .8) / (1 - .8) = 9 draws counts."""
    rng, x = np.random.default_rng(1), np.zeros((4, 4096, 1))
    for t in range(1, 4096):
        x[:, t] = 0.8 * x[:, t - 1] + 0.6 * rng.normal(size=(4, 1))
    assert 0.6 < float(effective_size(jnp.asarray(x))) / (4 * 4096 / 9) < 1.6


# -------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["lockstep", "langevin"])
@pytest.mark.parametrize("family", [MultivariateNormalFamily(2), NormalFamily(2)], ids=["full", "mean-field"])
def test_other_kernels_and_the_mean_field_family_have_the_same_law(family, kernel, x64):
    settings = MCMCMoments(num_warmup=50, num_samples=64, kernel=kernel)
    q, site = Q(), T()
    if not family.full:
        q, site = (GaussianNatural(n.precision_mean, jnp.diag(n.precision)) for n in (q, site))
    look = jax.value_and_grad(functools.partial(density, GAUSSIAN))
    found = jax.jit(lambda key: from_chains(family, look, q, site, POWER, key, settings))(jax.random.key(0))
    rest = q - site * POWER
    precision = (rest.precision if family.full else np.diag(rest.precision)) + POWER * FACTOR[1]
    covariance = np.linalg.inv(precision)
    loc = covariance @ (np.asarray(rest.precision_mean) + POWER * FACTOR[0])
    new = q + found.change * POWER
    moments = family.moments(new)
    np.testing.assert_allclose(moments.loc, loc, atol=1e-9 if x64 else 1e-3)
    np.testing.assert_allclose(family.variances(moments), np.diag(covariance), atol=1e-9 if x64 else 1e-3)


@pytest.mark.parametrize("fault", ["jacobian", "power"])
def test_faults_are_seen(monkeypatch, x64, fault):
    """A gradient without the whitening's root, and a step that forgets to divide by the power, move even the Gaussian case."""
    if fault == "jacobian":
        monkeypatch.setattr(chains_room, "_pull", lambda family, moments, slope: slope)
    else:
        right = chains_room.matched_change
        monkeypatch.setattr(chains_room, "matched_change", lambda *args: right(*args) * POWER)
    found = visit(MCMCMoments(num_warmup=10, num_samples=32, kernel="lockstep"))(0, T(), GAUSSIAN)
    gap = np.abs(np.asarray(found.change.precision) - (FACTOR[1] - SITE[1])).max()
    assert not gap < 1e-2


@pytest.mark.slow
def test_trajectories_that_are_always_taken_are_seen(monkeypatch):
    """Without the test of the energy chains in step sample another distribution: of wide steps a Gaussian of the wrong width."""
    honest = chains_room._move

    def always(settings, many, walk, key, rate):
        never_refused = lambda points: (0.0 * many(points)[0], many(points)[1])  # noqa: E731
        return honest(settings, never_refused, walk, key, rate)

    def widths():
        settings = MCMCMoments(num_warmup=50, num_samples=512, kernel="lockstep")
        places, steps = jnp.zeros((4, 1)), jnp.full((4,), 1.5)
        energy = lambda eps: (0.5 * jnp.sum(eps**2), eps)  # noqa: E731
        return float(
            jnp.var(chains_room.run_lockstep(settings, energy, jax.random.key(0), places, steps, jnp.array(False)).eps)
        )

    assert 0.9 < widths() < 1.1
    monkeypatch.setattr(chains_room, "_move", always)
    assert not 0.9 < widths() < 1.1
