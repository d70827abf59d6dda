"""Law 7 for every family: the two maps are inverse, grad A is the mean parameter, densities are NumPyro's, and so on.

Everything is asked once, of one batch, in one compiled program per family.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions.kl import kl_divergence
from scipy import special

from numpyro_pvi.families import BetaFamily, BetaNatural, FamilyDefaults, GammaFamily, GammaNatural
from tests.families.cases import BATCH, CASES, draws, log_prob

KEY = jax.random.key(0)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
with_extremes = pytest.mark.parametrize("case", [c for c in CASES if c.extremes], ids=lambda case: case.name)


def leaves(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def assert_close(found, wanted, tolerance, scale=None):
    """Equal to a tolerance relative to each entry, or to 1 (or `scale`) where it is smaller."""
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert np.all(np.isfinite(a)) and np.all(np.isfinite(b))
        size = np.maximum(np.abs(b), 1.0 if scale is None else scale)
        assert np.max(np.abs(a - b) / size, initial=0.0) < tolerance


def gradient_in_minimal_coordinates(family, natural):
    """grad of A by autodiff, as the pairing of mu with every coordinate of natural space."""
    point = family.to_minimal(natural)
    return jax.grad(lambda x: jnp.sum(family.log_partition(family.from_minimal(x))))(point)


def in_coordinates(family, natural, mean_params):
    """The same pairing of given mean parameters."""
    dual = jax.tree.unflatten(jax.tree.structure(natural), jax.tree.leaves(mean_params))
    return jax.linear_transpose(family.from_minimal, family.to_minimal(natural))(dual)[0]


@functools.partial(jax.jit, static_argnums=0)
def everything(family, natural, other, theta):
    mean_params = family.natural_to_mean(natural)
    back = family.mean_to_natural(mean_params)
    tangent = family.from_minimal(family.to_minimal(other * 0.1))
    pushed = family.fisher_product(natural, tangent)
    gradient, here = gradient_in_minimal_coordinates(family, natural), family.log_partition(natural)
    found = {
        "coordinates": family.to_minimal(natural),
        "round_trip": family.to_minimal(back),
        "mean": in_coordinates(family, natural, mean_params),
        "mean_round_trip": in_coordinates(family, natural, family.natural_to_mean(back)),
        "gradient": gradient,
        "density": family.inner(natural, family.sufficient_statistics(theta)) - here + family.log_base_measure(theta),
        "entropy": family.entropy(natural),
        "bregman_entropy": here - family.inner(natural, mean_params),
        "kl": family.kl(natural, other),
        "bregman_kl": family.log_partition(other) - here - family.inner(other - natural, mean_params),
        "pushed": in_coordinates(family, natural, pushed),
        "solved": family.to_minimal(family.fisher_solve(natural, pushed)),
        "tangent": family.to_minimal(tangent),
        "implicit": family.to_minimal(jax.jvp(family.mean_to_natural, (mean_params,), (pushed,))[1]),
        "in_domain": family.in_domain(natural),
        "nearest": family.nearest_valid(natural),
    }
    if type(family).fisher_product is not FamilyDefaults.fisher_product:
        slope = jax.jvp(family.natural_to_mean, (natural,), (tangent,))[1]
        found["pushed_by_autodiff"] = in_coordinates(family, natural, slope)
    return found


@functools.partial(jax.jit, static_argnums=0)
def read(family, distribution):
    return family.from_distribution(distribution)


@jax.jit
def numpyro_side(distribution, key):
    theta = draws(distribution, key)
    return theta, log_prob(distribution, theta)


def ask(case, seed, spread):
    family, distribution = case.family, case.distribution(seed, spread)
    natural, other = read(family, distribution), read(family, case.distribution(seed + 1, spread))
    theta, density = numpyro_side(distribution, jax.random.key(seed % 1000))
    return natural, everything(family, natural, other, theta), density


# Float32: 6e-8 times the condition of what follows, up to a few thousand (inverse maps of near-flat gammas).
LOOSE, TIGHT = (1e-9, 2e-3), (1e-10, 3e-5)


def check(case, x64, seed, spread):
    """All laws at a batch of moderate points."""
    natural, found, wanted_density = ask(case, seed, spread)
    loose, tight = LOOSE[not x64], TIGHT[not x64]
    assert np.all(found["in_domain"])
    assert_close(found["nearest"], natural, 1e-300)
    coordinates = found["coordinates"]
    # A categorical's logits come back normalised: minimal coordinates are what is compared.
    assert_close(found["round_trip"], coordinates, loose)
    assert_close(found["mean_round_trip"], found["mean"], tight)
    assert_close(found["gradient"], found["mean"], tight)
    assert_close(found["density"], wanted_density, tight * 5)
    assert_close(found["entropy"], found["bregman_entropy"], tight * 5)
    assert_close(found["kl"], found["bregman_kl"], tight * 20)
    assert np.all(np.asarray(found["kl"]) > 0)
    if "pushed_by_autodiff" in found:
        assert_close(found["pushed"], found["pushed_by_autodiff"], tight * 5)
    assert_close(found["solved"], found["tangent"], loose)
    assert_close(found["implicit"], found["tangent"], loose)


@each_case
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31 - 2), spread=st.floats(0.1, 0.8))
def test_law_seven(case, x64, seed, spread):
    check(case, x64, seed, spread)


@functools.partial(jax.jit, static_argnums=0)
def one_by_one_and_together(family, natural):
    def values(n):
        return family.log_partition(n), family.natural_to_mean(n), family.entropy(n), family.in_domain(n)

    return jax.vmap(values)(natural), values(natural)


@each_case
def test_batches_are_the_stack_of_single_results(case, x64):
    single, together = one_by_one_and_together(case.family, case.natural(3))
    assert together[0].shape == (BATCH,)
    assert_close(single, together, TIGHT[not x64])


@functools.partial(jax.jit, static_argnums=0)
def round_trip(family, natural):
    return family.log_partition(natural), family.from_minimal(family.to_minimal(natural))


@each_case
def test_unbatched_and_two_batch_axes(case, x64):
    family, natural = case.family, case.natural(4)
    one = jax.tree.map(lambda x: x[0], natural)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), natural)

    def shape(function, *args):
        return jax.tree.map(lambda x: x.shape, jax.eval_shape(function, *args))

    assert shape(family.log_partition, one) == shape(family.entropy, one) == shape(family.in_domain, one) == ()
    assert shape(family.log_partition, two) == shape(family.kl, two, two) == (2, BATCH)
    assert shape(family.to_minimal, two)[:-1] == (2, BATCH)
    (many, back), (single, _) = round_trip(family, two), round_trip(family, one)
    assert_close(many[1, 0], single, TIGHT[not x64])
    assert_close(back, two, 1e-6) if case.name != "categorical" else None
    event = [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda n, k: family.sample(n, k, (3,)), two, KEY))]
    wanted = jax.tree.leaves(family.event_shape, is_leaf=lambda x: isinstance(x, tuple))
    assert event == [(3, 2, BATCH, *shape) for shape in wanted]


@each_case
def test_dtype_is_kept(case):
    def every_map(natural):
        family, mean_params = case.family, case.family.natural_to_mean(natural)
        results = (family.log_partition(natural), mean_params, family.mean_to_natural(mean_params))
        return (
            *results,
            family.entropy(natural),
            family.nearest_valid(natural),
            family.fisher_solve(natural, mean_params),
        )

    natural = jax.tree.map(lambda x: x.astype(jnp.float32), case.natural(5))
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(every_map, natural))} == {jnp.dtype("float32")}


@each_case
def test_distributions_there_and_back(case, x64):
    natural = case.natural(6)
    again = case.family.from_distribution(case.family.to_distribution(natural))
    assert_close(again, natural, LOOSE[not x64])


KL_OF_NUMPYRO = [c for c in CASES if c.name in ("normal", "full", "gamma", "beta", "dirichlet", "block")]


@pytest.mark.parametrize("case", KL_OF_NUMPYRO, ids=lambda case: case.name)
def test_divergence_is_numpyros(case, x64):
    q, p = case.distribution(7), case.distribution(8)
    found = case.family.kl(case.family.from_distribution(q), case.family.from_distribution(p))
    assert_close(found, kl_divergence(q, p), TIGHT[not x64] * 20)


@functools.partial(jax.jit, static_argnums=0)
def statistics_of_draws(family, natural):
    found = family.sample(natural, jax.random.key(1), (20_000,))
    return family.sufficient_statistics(found), family.natural_to_mean(natural)


@each_case
def test_draws_have_the_mean_parameters(case, x64):
    """20,000 draws: every statistic within 4.5 standard errors (a false alarm in about 1 of 1,000 runs of this file)."""
    family, natural = case.family, case.natural(9, 0.3)
    found, means = statistics_of_draws(family, natural)
    for own, wanted in zip(leaves(found), leaves(means), strict=True):
        error = own.std(0) / np.sqrt(len(own))
        assert np.all(np.abs(own.mean(0) - wanted) < 4.5 * error + 1e-5)


REPARAMETERISED = (
    "normal",
    "full",
    "diagonal",
    "block",
    "gamma",
    "inverse_gamma",
    "beta",
    "dirichlet",
    "wishart",
    "markov",
)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in REPARAMETERISED], ids=lambda case: case.name)
def test_draws_carry_the_gradient(case):
    """The gradient of <v, mean T of draws> is F v, within 5 standard errors of 40 batches."""
    family = case.family
    natural = jax.tree.map(lambda x: x[0], case.natural(10, 0.2))
    direction = jax.tree.map(lambda x: 0.1 * jnp.ones_like(x), family.natural_to_mean(natural))

    def statistic(n, key):
        found = family.sufficient_statistics(family.sample(n, key, (200,)))
        return jnp.mean(family.inner(direction, found))

    @jax.jit
    def both(natural, keys):
        slopes = jax.vmap(jax.grad(statistic), in_axes=(None, 0))(natural, keys)
        dual = jax.tree.unflatten(jax.tree.structure(natural), jax.tree.leaves(direction))
        wanted = in_coordinates(family, natural, family.fisher_product(natural, dual))
        return jax.vmap(lambda s: in_coordinates(family, natural, s))(slopes), wanted

    found, wanted = both(natural, jax.random.split(jax.random.key(2), 40))
    found = np.asarray(found, np.float64)
    error = found.std(0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - np.asarray(wanted)) < 5 * error + 1e-5)


@with_extremes
def test_extremes(case, x64):
    """Tiny, huge and nearly degenerate members: everything finite, inverse maps back to the mean parameters."""
    family, distribution = case.family, case.extremes()
    natural = family.from_distribution(distribution)
    found = everything(family, natural, natural, draws(distribution, jax.random.key(0)))
    assert np.all(found["in_domain"])
    for key in ("round_trip", "mean", "entropy", "kl", "pushed", "solved", "implicit", "density"):
        if key != "density" or case.continuous is False:
            assert np.all(np.isfinite(found[key])), key
    tight = 2 * TIGHT[not x64]
    assert_close(found["mean_round_trip"], found["mean"], tight)
    assert np.max(np.abs(found["kl"])) < tight
    if case.name == "wishart":
        return  # matrices of a concentration just above D - 1 are singular to rounding: their log determinant is not finite
    sampled = family.sample(natural, jax.random.key(3), (7,))
    assert all(np.all(np.isfinite(x)) for x in leaves(family.sufficient_statistics(sampled)))


def of_betas(q, p):
    """KL between betas by SciPy's special functions, in double precision."""
    gap = (p - q) @ special.digamma(q) - (p - q).sum() * special.digamma(q.sum())
    ends = special.gammaln(q.sum()) - special.gammaln(q).sum() - special.gammaln(p.sum()) + special.gammaln(p).sum()
    return ends - gap


def of_gammas(q, p):
    (a, b), (c, d) = q, p
    ends = special.gammaln(c) - special.gammaln(a) + c * np.log(b / d) + a * (d - b) / b
    return (a - c) * special.digamma(a) + ends


@pytest.mark.parametrize(
    "family, natural, divergence",
    [(GammaFamily(), lambda x: GammaNatural(x[0] - 1, x[1]), of_gammas)]
    + [(BetaFamily(), lambda x: BetaNatural(x[0] - 1, x[1] - 1), of_betas)],
    ids=["gamma", "beta"],
)
def test_divergences_of_far_members_are_right_to_rounding(family, natural, divergence, x64):
    """Concentrations from .1 to 3e4, each of q beside each of p, a prior's say: what rounds' ELBOs are tested by."""
    sizes = np.array([0.1, 1.0, 4.0, 7.9, 8.1, 60.0, 900.0, 3e4])
    pairs = np.stack(np.meshgrid(sizes, 1.7 * sizes, sizes, 0.3 * sizes, indexing="ij"), -1).reshape(-1, 2, 2)
    # What one less than a concentration is in the precision at hand.
    dtype = np.result_type(jnp.zeros(()).dtype)
    numbers = jnp.asarray(pairs, dtype)
    found = jax.jit(jax.vmap(lambda x: family.kl(natural(x[0]), natural(x[1]))))(numbers)
    held = np.stack([[jax.tree.leaves(natural(x)) for x in pair] for pair in np.asarray(numbers)]).astype(float)
    held[..., 0] += 1
    held[..., 1] += family == BetaFamily()
    wanted = np.array([divergence(*pair) for pair in held])
    gap = np.abs(np.asarray(found, float) - wanted) / (1 + np.abs(wanted))
    assert np.max(gap) < (1e-9 if x64 else 1e-4)


def test_every_public_family_has_a_case():
    from numpyro_pvi import families

    public = {n for n in families.__all__ if n.endswith("Family") and isinstance(getattr(families, n), type)}
    # The family of sites held by rows is seen through a prior and a design; its laws are in tests/laws/test_row_numbers.py.
    assert public - {"Family", "RowFamily"} == {type(case.family).__name__ for case in CASES}
