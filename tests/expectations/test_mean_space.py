"""What a factor is affine in is found by values, and expectations and messages follow from it."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import integrate, special, stats

from numpyro_pvi import PVIError
from numpyro_pvi.expectations import FactorStructure, LatentRole, MeanSpace, find_structure, joint_design, with_draws
from numpyro_pvi.expectations._mean_space import _typical, all_signs, strength_five, strength_three
from numpyro_pvi.families import GammaFamily, NormalFamily, ProductFamily, ScalarNormalFamily, VonMisesFamily
from tests.families.cases import CASES

KEY = jax.random.key(0)
TIGHT = {"float32": 3e-4, "float64": 1e-9}[jnp.result_type(float).name]
RNG = np.random.default_rng(0)


def product(**distributions):
    """A product family and its member, of distributions by name."""
    family = ProductFamily.for_distributions(distributions)
    return family, family.from_distribution(distributions)


def find(family, natural, terms, expectation="auto"):
    return find_structure(family, natural, terms, KEY, expectation, "test factor")


def expect(family, natural, structure, terms, num_draws=1):
    """The expectation of the sum of all terms, and its message."""
    space = MeanSpace(family, structure, num_draws)

    @jax.jit
    def run(natural):
        variables, rest = space.variables(natural)
        value, gradient = jax.value_and_grad(lambda v: space.average(v, rest, lambda x: jnp.sum(terms(x)), KEY))(
            variables
        )
        return value, space.message(natural, variables, gradient)

    return run(natural)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_arrays_of_strength_three(count):
    """Every product of up to three different columns sums to zero, and of four not always."""
    rows = strength_three(count)
    assert len(rows) <= 4 * count
    for size in (1, 2, 3):
        for columns in itertools.combinations(range(count), size):
            assert rows[:, columns].prod(axis=1).sum() == 0
    assert all_signs(3).shape == (8, 3)


@pytest.mark.parametrize("count", [3, 8, 9, 16])
def test_arrays_of_strength_five(count):
    """Every product of up to five different columns sums to zero; the fault: a column that is the product of three others."""
    rows = strength_five(count)
    assert len(rows) == (128 if count <= 8 else 512)

    def largest(rows):
        sizes = range(1, min(count, 5) + 1)
        every = (c for size in sizes for c in itertools.combinations(range(count), size))
        return max(abs(rows[:, columns].prod(axis=1).sum()) for columns in every)

    assert largest(rows) == 0
    if count > 3:
        assert largest(np.concatenate([rows[:, :-1], rows[:, :3].prod(axis=1, keepdims=True)], axis=1)) == len(rows)


WEIGHTS = RNG.normal(size=(7, 6))
RESPONSE = RNG.normal(size=7)


def regression(values):
    """Every row of a linear model sees all coefficients, and the precision."""
    return 0.5 * jnp.log(values["tau"]) - 0.5 * values["tau"] * (RESPONSE - WEIGHTS @ values["w"]) ** 2


def test_a_linear_model_with_unknown_noise_needs_three_signs_to_meet():
    family, natural = product(w=dist.Normal(jnp.zeros(6), 2.0).to_event(1), tau=dist.Gamma(3.0, 2.0))
    structure = find(family, natural, regression)
    assert structure.conjugate == ("tau", "w")
    assert structure.exact
    assert structure.design == "strength 3"
    assert structure.num_signs == 7


def test_the_mean_of_a_linear_model_and_its_messages_are_textbook():
    loc, sd = jnp.asarray(RNG.normal(size=6)), jnp.asarray(RNG.uniform(0.5, 1.5, size=6))
    family, natural = product(w=dist.Normal(loc, sd).to_event(1), tau=dist.Gamma(3.0, 2.0))
    structure = find(family, natural, regression)
    value, message = expect(family, natural, structure, regression)
    loc, sd = np.asarray(loc), np.asarray(sd)
    residual = RESPONSE - WEIGHTS @ loc
    square = residual**2 + (WEIGHTS**2) @ sd**2
    log_tau, tau = special.digamma(3.0) - np.log(2.0), 1.5
    np.testing.assert_allclose(value, (0.5 * log_tau - 0.5 * tau * square).sum(), rtol=TIGHT)
    np.testing.assert_allclose(message.parts["tau"].log, 3.5, rtol=TIGHT)
    np.testing.assert_allclose(message.parts["tau"].rate, 0.5 * square.sum(), rtol=TIGHT)
    precision = tau * (WEIGHTS**2).sum(axis=0)
    np.testing.assert_allclose(message.parts["w"].precision, precision, rtol=10 * TIGHT)
    pull = tau * WEIGHTS.T @ residual + precision * loc
    np.testing.assert_allclose(message.parts["w"].precision_mean, pull, rtol=10 * TIGHT, atol=10 * TIGHT)


def test_rows_that_see_one_member_each_share_a_sign():
    group = np.arange(7) % 3
    family, natural = product(
        w=dist.Normal(jnp.zeros(3), 2.0), tau=dist.Gamma(jnp.full(3, 3.0), 2.0), x=dist.Normal(0.0, 1.0)
    )

    def terms(values):
        return 0.5 * jnp.log(values["tau"][group]) - 0.5 * values["tau"][group] * (RESPONSE - values["w"][group]) ** 2

    structure = find(family, natural, terms)
    assert structure.exact
    assert structure.num_signs == 2
    assert {role.name: role.kind for role in structure.roles} == {"tau": "exact", "w": "exact", "x": "absent"}
    assert str(structure) == "conjugate in tau, w"


SCORES = RNG.normal(size=(6, 4))


def factor_analysis(values):
    """Every cell sees one column of loadings, one row's scores, and the precision: five members meet in a product."""
    residual = SCORES - values["scores"] @ values["loadings"]
    return 0.5 * jnp.log(values["tau"]) - 0.5 * values["tau"] * residual**2


@pytest.mark.parametrize(
    ("seen", "design", "signs"),
    [
        (lambda values: factor_analysis(values).reshape(-1), "all", 5),
        (lambda values: jnp.sum(factor_analysis(values), axis=1), "strength 5", 11),
    ],
    ids=["by cell", "by row"],
)
def test_factor_analysis_is_in_closed_form(seen, design, signs):
    """Loadings of columns that no cell sees two of share their signs; where rows are vectors an array of strength 5 serves."""
    loc = RNG.normal(size=(6, 2)), RNG.normal(size=(2, 4))
    scores, loadings = dist.Normal(jnp.asarray(loc[0]), 0.7).to_event(1), dist.Normal(jnp.asarray(loc[1]), 1.3)
    family, natural = product(scores=scores, loadings=loadings, tau=dist.Gamma(3.0, 2.0))
    structure = find_structure(family, natural, seen, KEY, "exact", "test factor", {"scores": 0})
    assert (structure.design, structure.num_signs, structure.closed) == (design, signs, True)
    assert structure.evidence == "found"
    value, message = expect(family, natural, structure, seen)
    second = [np.einsum("ik,il->ikl", x, x) + sd**2 * np.eye(2) for x, sd in ((loc[0], 0.7), (loc[1].T, 1.3))]
    square = SCORES**2 - 2 * SCORES * (loc[0] @ loc[1]) + np.einsum("ikl,jkl->ij", *second)
    log_tau, tau = special.digamma(3.0) - np.log(2.0), 1.5
    np.testing.assert_allclose(value, (0.5 * log_tau - 0.5 * tau * square).sum(), rtol=TIGHT)
    np.testing.assert_allclose(message.parts["tau"].rate, 0.5 * square.sum(), rtol=TIGHT)
    # Each coordinate given the means of the others.
    precision = tau * second[0][:, [0, 1], [0, 1]].sum(axis=0)[:, None] * np.ones(4)
    np.testing.assert_allclose(message.parts["loadings"].precision, precision, rtol=10 * TIGHT)


def test_what_two_columns_meet_in_shares_no_sign():
    """A term of two neighbouring columns' loadings, as a kink that hides it does not either."""
    loadings = dist.Normal(jnp.zeros((2, 4)), 1.0)
    family, natural = product(loadings=loadings, tau=dist.Gamma(3.0, 2.0))

    def neighbours(values):
        both = values["loadings"] + jnp.roll(values["loadings"], 1, axis=1)
        return -0.5 * values["tau"] * (jnp.sum(both, axis=0) - 1.0) ** 2

    def hidden(values):
        cells = jnp.sum(values["loadings"], axis=0)
        return -0.5 * values["tau"] * (cells + jnp.where(jnp.abs(cells[0]) > 1e3, jnp.roll(cells, 1), 0.0) - 1.0) ** 2

    for terms in (neighbours, hidden):
        (role,) = (x for x in find(family, natural, terms).roles if x.name == "loadings")
        assert role.apart == ()


def exponential_rates(values):
    return jnp.asarray([3.0, 1.0]) * values["w"] - values["rate"] * jnp.exp(values["w"]) + jnp.log(values["rate"])


def test_one_normal_latent_that_is_not_affine_is_by_nodes():
    """E exp(w) of a normal is known; the other latent's message is exact for it."""
    family, natural = product(w=dist.Normal(0.2, 0.6), rate=dist.Gamma(2.0, 1.0))
    structure = find(family, natural, exponential_rates)
    assert structure.conjugate == ("rate",) and structure.by_nodes == ("w",) and not structure.drawn
    assert structure.exact and structure.expectation == "quadrature in w"
    assert str(structure) == "conjugate in rate; not conjugate in w"
    value, message = expect(family, natural, structure, exponential_rates)
    grown, log_rate = np.exp(0.2 + 0.18), special.digamma(2.0)
    np.testing.assert_allclose(value, 4 * 0.2 - 2 * 2.0 * grown + 2 * log_rate, rtol=TIGHT)
    np.testing.assert_allclose(message.parts["rate"].log, 2.0, rtol=TIGHT)
    np.testing.assert_allclose(message.parts["rate"].rate, 2 * grown, rtol=TIGHT)
    np.testing.assert_allclose(message.parts["w"].precision, 4 * grown, rtol=10 * TIGHT)
    with pytest.raises(PVIError, match="not conjugate in w"):
        find(family, natural, exponential_rates, "exact")


def test_several_latents_that_are_not_affine_are_at_points():
    family, natural = product(w=dist.Normal(0.0, 1.0), v=dist.Normal(0.0, 1.0), rate=dist.Gamma(2.0, 1.0))

    def terms(values):
        return exponential_rates(values | {"w": values["w"] + values["v"]})

    structure = find(family, natural, terms)
    assert structure.conjugate == ("rate",)
    assert set(structure.by_rule) == {"w", "v"} and not structure.drawn
    assert structure.expectation == "a product rule in v, w"
    assert set(find(family, natural, terms, "monte_carlo").drawn) == {"rate", "w", "v"}
    assert find(family, natural, terms, "quadrature") == structure
    names = "abcdef"
    family, natural = product(**{n: dist.Normal(0.0, 1.0) for n in names})
    many = lambda values: jnp.exp(sum(values[n] for n in names))[None]  # noqa: E731
    with pytest.raises(PVIError, match="or few of any kind"):
        find_structure(family, natural, many, KEY, "quadrature", "test factor", size=10**7)


SEEN_BY_S, SEEN_BY_T = np.asarray([0.7, -0.3, 1.1]), np.asarray([0.4, -1.6])


def two_scales(values):
    """Scales of normal latents with locations at hand, under half-normal priors; no term sees both."""
    s, t = values["s"], values["t"]
    return jnp.concatenate(
        [
            dist.Normal(SEEN_BY_S, s).log_prob(values["a"]),
            dist.Normal(SEEN_BY_T, t[..., None]).log_prob(values["b"]).reshape(-1),
            dist.HalfNormal(1.5).log_prob(s)[None],
            dist.HalfNormal(2.0).log_prob(t),
        ]
    )


SCALES = {
    "s": dist.LogNormal(0.3, 0.4),
    "t": dist.LogNormal(jnp.asarray([-0.2, 0.1]), jnp.asarray([0.2, 0.5])),
    "a": dist.Normal(jnp.asarray([0.5, 0.0, 1.0]), jnp.asarray([0.3, 0.6, 0.2])),
    "b": dist.Normal(jnp.zeros((2, 2)), 0.5),
}


def scale_by_hand(loc, variance, squares, prior, count):
    """E_q of what is said of a log-normal scale, and the precision of its message: -2 dF/dv."""
    power = lambda k: np.exp(k * loc + 0.5 * k**2 * variance)  # noqa: E731
    half = math.log(2.0) - 0.5 * math.log(2 * math.pi) - math.log(prior)
    value = -0.5 * count * math.log(2 * math.pi) - count * loc - 0.5 * squares * power(-2) + half
    return value - 0.5 * power(2) / prior**2, 2 * squares * power(-2) + 2 * power(2) / prior**2


def opaquely(terms):
    """The same terms by a product with the identity, in which every entry may see all others."""
    return lambda values: jnp.eye(10) @ terms(values)


@pytest.mark.parametrize("proved", [True, False], ids=["proved", "found"])
def test_latents_of_which_no_term_sees_two_are_by_nodes_together(proved):
    """Inverse second moments of log-normals are known."""
    terms = two_scales if proved else opaquely(two_scales)
    family, natural = product(**SCALES)
    structure = find(family, natural, terms)
    assert set(structure.by_nodes) == {"s", "t"} and structure.expectation == "quadrature in s, t"
    assert structure.exact and structure.evidence == ("proved" if proved else "found")
    value, message = expect(family, natural, structure, terms)
    squares = np.sum((np.asarray(SCALES["a"].loc) - SEEN_BY_S) ** 2 + np.asarray(SCALES["a"].scale) ** 2)
    wanted, precision = scale_by_hand(0.3, 0.16, squares, 1.5, 3)
    np.testing.assert_allclose(message.parts["s"].precision, precision, rtol=30 * TIGHT)
    for k in range(2):
        own = scale_by_hand(*((-0.2, 0.04), (0.1, 0.25))[k], np.sum(SEEN_BY_T**2 + 0.25), 2.0, 2)
        wanted += own[0]
        np.testing.assert_allclose(message.parts["t"].precision[k], own[1], rtol=30 * TIGHT)
    np.testing.assert_allclose(value, wanted, rtol=TIGHT)
    inverse = np.exp(-2 * 0.3 + 2 * 0.16)
    np.testing.assert_allclose(message.parts["a"].precision, np.full(3, inverse), rtol=10 * TIGHT)
    np.testing.assert_allclose(message.parts["a"].precision_mean, inverse * SEEN_BY_S, rtol=10 * TIGHT)


@pytest.mark.parametrize(
    "seen", [lambda s, t: jnp.exp(-s * t[0]), lambda s, t: jnp.cos(t[0] * t[1])], ids=["s t", "t t"]
)
def test_one_term_that_sees_two_of_them_has_a_product_rule_in_all(seen):
    """As one node in both would be: the fault that the test for it is there for is planted beside it."""

    def terms(values):
        return jnp.concatenate([two_scales(values)[:-1], seen(values["s"], values["t"])[None]])

    family, natural = product(**SCALES)
    for own in (terms, opaquely(terms)):
        structure = find(family, natural, own)
        assert set(structure.by_rule) == {"s", "t"} and not (structure.by_nodes or structure.drawn)
    planted = dataclasses.replace(structure, roles=find(family, natural, two_scales).roles)
    alone = lambda values: seen(values["s"], values["t"])[None]  # noqa: E731
    sampled = np.asarray(jax.vmap(alone)(family.sample(natural, KEY, (100_000,))), np.float64)
    error = sampled.std() / np.sqrt(len(sampled))
    assert abs(float(expect(family, natural, planted, alone)[0]) - sampled.mean()) > 6 * error


def test_products_of_many_latents_take_all_signs():
    names = "abcde"
    family, natural = product(**{n: dist.Normal(0.5, 1.0) for n in names})
    structure = find(family, natural, lambda values: jnp.prod(jnp.stack([values[n] for n in names]))[None])
    assert structure.exact
    assert structure.design == "all"


def test_a_von_mises_latent_is_conjugate_or_at_the_nodes_of_a_rule():
    family, natural = product(angle=dist.VonMises(0.5, 2.0))
    assert isinstance(dict(family.components)["angle"], VonMisesFamily)
    assert find(family, natural, lambda values: jnp.cos(values["angle"] - 0.3)[None]).exact
    twice = lambda values: jnp.cos(2 * values["angle"])[None]  # noqa: E731
    structure = find(family, natural, twice)
    assert structure.by_rule == ("angle",)
    # I_2 / I_0 at the concentration 2, turned by twice the direction; of a wide circle fifteen nodes leave .001.
    exact = special.iv(2, 2.0) / special.iv(0, 2.0) * np.cos(1.0)
    assert float(expect(family, natural, structure, twice)[0]) == pytest.approx(exact, abs=3e-3)


def test_a_von_mises_latent_is_drawn_by_values():
    """The gradient of ``E cos 2x`` in the mean cosine and sine, by the score alone.

    Of 64,000 draws, with standard errors of .0062 at most: a fifth of what is let pass.
    """
    loc, kappa, small = 0.5, 2.0, 1e-5
    family, natural = product(angle=dist.VonMises(loc, kappa))
    twice = lambda values: jnp.cos(2 * values["angle"])[None]  # noqa: E731
    structure = find(family, natural, twice, "monte_carlo")
    assert structure.drawn == structure.by_values == ("angle",)
    value, message = expect(family, natural, structure, twice, 4000)
    lengths = [[special.iv(n, k) / special.iv(0, k) for k in (kappa - small, kappa, kappa + small)] for n in (1, 2)]
    (low, r, high), (least, a, most) = lengths
    assert float(value) == pytest.approx(a * np.cos(2 * loc), abs=0.01)
    along, across = (most - least) / (high - low) * np.cos(2 * loc), -2 * a / r * np.sin(2 * loc)
    wanted = [along * np.cos(loc) - across * np.sin(loc), along * np.sin(loc) + across * np.cos(loc)]
    found = [float(x) for x in jax.tree.leaves(message.parts["angle"])]
    np.testing.assert_allclose(found, wanted, atol=0.03)


def test_messages_to_a_drawn_gamma_are_the_gradient_in_mean_space():
    """Appendix E.3 of Khan and Lin: the shape of a gamma, by implicit draws and a Fisher solve, beside quadrature."""
    a, b = 5.0, 2.0
    family, natural = product(shape=dist.Gamma(a, b), rate=dist.Gamma(4.0, 3.0))
    y = np.array([1.3, 0.4, 2.2])

    def density(values):
        return jnp.sum(dist.Gamma(values["shape"], values["rate"]).log_prob(y))

    structure = find(family, natural, lambda values: density(values)[None])
    assert structure.conjugate == ("rate",)
    assert structure.by_nodes == ("shape",)
    nodes = MeanSpace(family, structure, 500)
    structure = with_draws(structure, family, ("shape",), "auto", "factor")
    assert structure.conjugate == ("rate",) and structure.drawn == ("shape",)

    draws = MeanSpace(family, structure, 500)

    def run(key, space=draws):
        variables, rest = space.variables(natural)
        value, gradient = jax.value_and_grad(lambda v: space.average(v, rest, density, key))(variables)
        parts = space.message(natural, variables, gradient).parts
        return jnp.stack([value, parts["shape"].log, parts["shape"].rate, parts["rate"].log, parts["rate"].rate])

    runs = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(KEY, 16)))
    found, error = runs.mean(axis=0), runs.std(axis=0, ddof=1) / 4
    log_rate, rate = special.digamma(4.0) - np.log(3.0), 4.0 / 3.0

    def expected(a, b):
        """E_q[f] as a function of the shape's own naturals, by quadrature."""

        def f(x):
            one = 3 * (x * log_rate - special.gammaln(x)) + (x - 1) * np.log(y).sum() - rate * y.sum()
            return one * stats.gamma.pdf(x, a, scale=1 / b)

        return integrate.quad(f, 0, 30, epsabs=1e-12, limit=200)[0]

    def mean(a, b):
        return np.array([special.digamma(a) - np.log(b), -a / b])

    step = 1e-4
    slope = np.array([expected(a + step, b) - expected(a - step, b), expected(a, b + step) - expected(a, b - step)])
    jacobian = np.stack([mean(a + step, b) - mean(a - step, b), mean(a, b + step) - mean(a, b - step)])
    wanted = np.linalg.solve(jacobian, slope)
    # At nodes to the error of the differences.
    np.testing.assert_allclose(
        jax.jit(lambda: run(KEY, nodes))()[:3], [expected(a, b), *wanted], rtol=100 * TIGHT + 1e-6
    )
    # Within 4.5 of their own standard errors: wrong for three normal errors once in 50,000 seeds.
    assert np.all(np.abs(found[:3] - [expected(a, b), *wanted]) < 4.5 * error[:3])
    assert np.all(error[1:3] < 0.1 * np.abs(wanted))
    # Given the draws, what the message to the rate has that does not depend on them is exact.
    np.testing.assert_allclose(runs[:, 4], y.sum(), rtol=10 * TIGHT)
    assert abs(found[3] - 3 * a / b) < 4.5 * error[3]


def test_components_are_named_families():
    family, _ = product(w=dist.Normal(jnp.zeros(2), 1.0), x=dist.Normal(0.0, 1.0), tau=dist.Gamma(1.0, 1.0))
    assert dict(family.components) == {"w": NormalFamily(2), "x": ScalarNormalFamily(), "tau": GammaFamily()}


@pytest.mark.parametrize("case", [c for c in CASES if not c.product], ids=lambda c: c.name)
def test_what_stands_for_a_latent_that_does_not_matter_is_a_value_of_it(case):
    """The middle of a pair of Dirichlet vectors, say, is not on the simplex."""
    natural = case.natural(0)
    value = _typical(case.family, natural)
    assert value.shape == case.family.sample(natural, jax.random.key(0)).shape
    assert np.all(np.isfinite(value)) and np.all(case.family.to_distribution(natural).support(value))


@pytest.mark.parametrize(
    ("count", "found", "wanted"),
    [
        (7, [("strength 3", 7), ("strength 3", 7)], "strength 3"),
        (16, [("strength 3", 16), ("strength 5", 16)], "strength 5"),
        # Whoever sees four signs alone has no product of more.
        (16, [("strength 5", 16), ("all", 4)], "strength 5"),
        (8, [("all", 8), ("strength 3", 8)], "all"),
        # All combinations of sixteen are too many, and nobody has found that seven do not meet.
        (16, [("strength 5", 16), ("all", 7)], "random"),
        (16, [("strength 5", 16), ("random", 16)], "random"),
        (3, [("all", 3), ("all", 2)], "all"),
        (0, [("all", 0), ("all", 0)], "all"),
    ],
)
def test_a_design_that_serves_all_who_have_found_one(count, found, wanted):
    structures = [FactorStructure((LatentRole("w", "exact", 0, signs),), design) for design, signs in found]
    assert joint_design(count, structures) == wanted
