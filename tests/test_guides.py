"""Gaussian AutoGuides as a family and a flat layout, and their params from natural parameters and back."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import autoguide as ag
from scipy.integrate import quad

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import GuideError
from numpyro_pvi.families import MultivariateNormalFamily, NormalFamily
from numpyro_pvi.guides import (
    check_guide,
    family_of,
    guide_layout,
    guide_param_names,
    in_own_support,
    natural_to_params,
    params_to_natural,
    setup_guide,
    slices,
)

KEY = jax.random.key(0)
NAMES, SHAPES = ("w", "b"), ((2, 2), ())
FULL, DIAGONAL, NAMED = ag.AutoMultivariateNormal, ag.AutoDiagonalNormal, ag.AutoNormal


def model():
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 2]).to_event(2))
    b = numpyro.sample("b", dist.HalfNormal(1.0))
    numpyro.sample("obs", dist.Normal(w.sum() * b, 1.0), obs=0.3)


def ready(make, **options):
    guide = make(model, **options)
    setup_guide(guide, KEY, (), {})
    return guide


def params_of(make, prefix="auto"):
    rng = np.random.default_rng(0)
    loc, root = rng.normal(size=5), np.tril(rng.normal(size=(5, 5))) + 3 * np.eye(5)
    if make is FULL:
        return {f"{prefix}_loc": loc, f"{prefix}_scale_tril": root}
    if make is DIAGONAL:
        return {f"{prefix}_loc": loc, f"{prefix}_scale": np.diag(root)}
    scale = np.diag(root)
    return {
        f"w_{prefix}_loc": loc[:4].reshape(2, 2),
        f"w_{prefix}_scale": scale[:4].reshape(2, 2),
        f"b_{prefix}_loc": loc[4],
        f"b_{prefix}_scale": scale[4],
    }


def test_family():
    assert isinstance(family_of(ready(FULL), 5), MultivariateNormalFamily)
    assert isinstance(family_of(ready(DIAGONAL), 5), NormalFamily)
    assert isinstance(family_of(ready(NAMED), 5), NormalFamily)


def test_slices():
    assert slices(((2, 3), (), (4,), (0,))) == [slice(0, 6), slice(6, 7), slice(7, 11), slice(11, 11)]


@pytest.mark.parametrize("make", [FULL, DIAGONAL, NAMED])
def test_layout_is_the_guides_own(make):
    assert guide_layout(ready(make), {"b": (), "w": (2, 2)}) == (NAMES, SHAPES)
    with pytest.raises(GuideError, match="lacks: z"):
        guide_layout(ready(make), {"w": (2, 2), "b": (), "z": ()})


@pytest.mark.parametrize("prefix", ["auto", "q"])
@pytest.mark.parametrize("make", [FULL, DIAGONAL, NAMED])
def test_params_round_trip(make, prefix):
    guide, given = ready(make, prefix=prefix), params_of(make, prefix)
    family = family_of(guide, 5)
    assert guide_param_names(guide, NAMES) == set(given)
    start = family.from_loc_sd(jnp.zeros(5), jnp.ones(5))
    natural = params_to_natural(guide, family, NAMES, SHAPES, given, start)
    found = natural_to_params(guide, family, NAMES, SHAPES, natural)
    assert set(found) == set(given)
    for name, value in given.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("make", [FULL, DIAGONAL, NAMED])
def test_the_guide_reads_what_was_written(make):
    guide, given = ready(make), params_of(make)
    loc = given["auto_loc"] if make is not NAMED else np.append(given["w_auto_loc"], given["b_auto_loc"])
    family = family_of(guide, 5)
    natural = params_to_natural(guide, family, NAMES, SHAPES, given, family.from_loc_sd(jnp.zeros(5), jnp.ones(5)))
    median = guide.median(natural_to_params(guide, family, NAMES, SHAPES, natural))
    np.testing.assert_allclose(median["w"].reshape(-1), loc[:4], rtol=1e-4)
    np.testing.assert_allclose(median["b"], np.exp(loc[4]), rtol=1e-4)


@pytest.mark.parametrize("make", [FULL, DIAGONAL])
def test_another_order_of_the_same_latents(make):
    """A guide set up under jit lists its latents alphabetically; its params follow its own order."""
    guide, jitted = ready(make), make(model)
    jax.jit(lambda: setup_guide(jitted, KEY, (), {}))()
    jitted._init_locs = dict(sorted(guide._init_locs.items()))
    family = family_of(guide, 5)
    natural = params_to_natural(
        guide, family, NAMES, SHAPES, params_of(make), family.from_loc_sd(jnp.zeros(5), jnp.ones(5))
    )
    own, other = (natural_to_params(g, family, NAMES, SHAPES, natural) for g in (guide, jitted))
    order = [4, 0, 1, 2, 3]
    np.testing.assert_allclose(other["auto_loc"], own["auto_loc"][jnp.array(order)], rtol=1e-6)
    if make is FULL:
        covariances = [p["auto_scale_tril"] @ p["auto_scale_tril"].T for p in (own, other)]
        np.testing.assert_allclose(covariances[1], covariances[0][np.ix_(order, order)], rtol=1e-4, atol=1e-4)
    back = params_to_natural(jitted, family, NAMES, SHAPES, other, natural)
    np.testing.assert_allclose(back.precision, natural.precision, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [FULL, DIAGONAL, NAMED])
def test_partial_params_keep_the_rest(make):
    guide, given = ready(make), params_of(make)
    name = next(iter(given))
    family = family_of(guide, 5)
    start = family.from_loc_sd(jnp.arange(5.0), 0.5 * jnp.ones(5))
    natural = params_to_natural(guide, family, NAMES, SHAPES, {name: given[name]}, start)
    before, after = (natural_to_params(guide, family, NAMES, SHAPES, n) for n in (start, natural))
    np.testing.assert_allclose(after[name], given[name], rtol=1e-5, atol=1e-6)
    for other in set(given) - {name}:
        np.testing.assert_allclose(after[other], before[other], rtol=1e-5, atol=1e-6)


def test_supported_kinds_pass_and_others_do_not():
    for make in (FULL, DIAGONAL, NAMED):
        check_guide(make(model))
    with pytest.raises(GuideError, match=r"class AutoNormal.*AutoNormal\(model\)"):
        check_guide(ag.AutoNormal)
    with pytest.raises(GuideError, match="AutoLowRank.*must be one of"):
        check_guide(ag.AutoLowRankMultivariateNormal(model))


OWN = {
    "unit interval": (dist.Beta(2.0, 3.0), lambda u: 1 / (1 + math.exp(-u)), 4.0),
    "interval": (dist.Uniform(-1.0, 4.0), lambda u: 5 / (1 + math.exp(-u)) - 1, 4.0),
    "half-line": (dist.Pareto(2.0, 3.0), lambda u: 2 + math.exp(u), 1.1),
    "half-line below": (dist.TruncatedNormal(0.0, 1.0, high=2.0), lambda u: 2 - math.exp(u), 1.1),
}


@pytest.mark.parametrize("name", OWN)
def test_means_and_variances_of_elements_with_a_transform_of_their_own(name, tolerance):
    """Against adaptive quadrature, of independent elements and of ones that are jointly Gaussian within an event."""
    fn, transform, widest = OWN[name]
    loc, sd = np.array([-0.7, 1.2]), np.array([0.4, widest])

    def moment(power, center, at):
        def term(z):
            return (transform(loc[at] + sd[at] * z) - center) ** power * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

        return quad(term, -12, 12, epsabs=1e-12, limit=200)[0]

    mean = [moment(1, 0.0, at) for at in range(2)]
    variance = [moment(2, mean[at], at) for at in range(2)]
    root = np.array([[sd[0], 0.0], [0.6 * sd[1], 0.8 * sd[1]]])
    for event, covariance in ((0, None), (1, None), (1, jnp.asarray(root @ root.T))):
        found = in_own_support(fn.expand([2]).to_event(event), jnp.asarray(loc), jnp.asarray(sd), covariance)
        np.testing.assert_allclose(found.mean, mean, rtol=max(1e-8, 0.2 * tolerance))
        np.testing.assert_allclose(found.variance, variance, rtol=max(1e-8, tolerance))


def test_moments_of_elements_that_hang_together_are_refused_in_words():
    found = in_own_support(dist.Dirichlet(jnp.ones(3)), jnp.zeros(2), jnp.ones(2), None)
    for what in ("mean", "variance"):
        with pytest.raises(NotImplementedError, match=f"{what} of a latent with support.*draws"):
            getattr(found, what)


def test_a_latent_of_coordinates_of_other_scales_has_a_posterior():
    """In single precision NumPyro takes the covariance of coordinates 1e4 apart for none."""
    rng = np.random.default_rng(0)
    design = np.stack([np.ones(40), 1e4 * rng.normal(size=40), rng.normal(size=40)], axis=1)
    y = design @ [1.0, 2e-4, -0.5] + 0.3 * rng.normal(size=40)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, jnp.array([10.0, 1e-3, 1.0])).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)

    pvi = PVI(Partition(model, "rows", 3), ag.AutoMultivariateNormal(model))
    state = pvi.run(jax.random.key(0), 6, design, y, progress_bar=False).state
    precision = np.diag([1e-2, 1e6, 1.0]) + design.T @ design / 0.09
    found = pvi.posterior(state)["w"]
    exact = np.linalg.inv(precision)
    np.testing.assert_allclose(found.mean, exact @ design.T @ y / 0.09, rtol=1e-3)
    np.testing.assert_allclose(found.variance, np.diag(exact), rtol=1e-3)
