"""Moves of a product of families are lengths in its Fisher metric, so that a narrow member's width counts as its location does."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import FamilyDefaults, ProductFamily, ProductNatural, family_for
from numpyro_pvi.schedules import StochasticSubset, Synchronous
from numpyro_pvi.solvers import SNEP, AlphaDivergence, StochasticNaturalGradient, _alpha_divergence, _snep

KEY = jax.random.key(0)
MEMBERS = {
    "normal": dist.Normal(2000.0, 0.22),
    "lognormal": dist.LogNormal(3.0, 0.01),
    "gamma": dist.Gamma(2000.0, 3.0),
    "gammas": dist.Gamma(4.0 * jnp.ones((2, 3)), 2.0).to_event(2),
    "beta": dist.Beta(30.0, 5.0),
    "simplex": dist.Dirichlet(jnp.array([3.0, 5.0, 100.0])),
    "wide simplex": dist.Dirichlet(jnp.linspace(1.0, 2.0, 70)),
    "vector": dist.MultivariateNormal(jnp.array([1.0, 100.0]), jnp.array([[1.0, 0.3], [0.3, 2.0]])),
    "normals": dist.Normal(5.0 * jnp.ones(3), 1.0).to_event(1),
    "angle": dist.VonMises(1.0, 4.0),
    "choice": dist.Categorical(probs=jnp.array([0.2, 0.5, 0.3])),
}


def changed(family, natural, size):
    rng = np.random.default_rng(1)
    tangent = family.to_minimal(natural)
    return family.from_minimal(
        jnp.asarray(size * rng.normal(size=tangent.shape), tangent.dtype) * (1 + jnp.abs(tangent))
    )


@pytest.mark.parametrize("name", MEMBERS)
def test_squared_moves_are_pairings_in_the_fisher_metric(name, x64):
    part = family_for(MEMBERS[name])
    family = ProductFamily([(name, part)])
    natural = ProductNatural({name: part.from_distribution(MEMBERS[name])})
    moments, change = family.moments(natural), changed(family, natural, 1e-3)
    found = family.to_minimal(family.whitened(natural, moments.root, change))
    if name == "wide simplex":
        # Of many coordinates each mean statistic's move stands by itself.
        shifts = np.asarray(family.flat(family.fisher_product(natural, change)) / moments.scale)
        np.testing.assert_allclose(found, shifts, rtol=1e-10 if x64 else 1e-4, atol=1e-7)
        return
    wanted = float(family.inner(change, family.fisher_product(natural, change)))
    # In float32 the metric of a gamma of shape 2000 has lost three digits.
    np.testing.assert_allclose(jnp.sum(found**2), wanted, rtol=1e-8 if x64 else 2e-2)
    both = family.shift(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), change), moments)
    np.testing.assert_allclose(both[1], 2 * both[0], rtol=1e-4)
    assert both.shape == (2, family.num_moves)


def test_a_change_of_width_is_a_move_wherever_the_member_is():
    """By a share e of its sd: e times the root of 2 (in mean statistics, e times sd over location)."""
    narrow = family_for(MEMBERS["normal"])
    family = ProductFamily([("x", narrow)])
    new, old = (
        family.moments(ProductNatural({"x": narrow.from_distribution(dist.Normal(2000.0, sd))}))
        for sd in (0.22, 0.2222)
    )
    np.testing.assert_allclose(jnp.max(jnp.abs(family.moves(new, old))), 0.01 * 2**0.5, rtol=0.03)


ROWS = 2000 + np.random.default_rng(1).normal(size=20)


def level(y):
    w = numpyro.sample("w", dist.Normal(2000.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


@pytest.mark.parametrize(
    ("solver", "schedule"),
    [(None, Synchronous(damping=0.2)), (StochasticNaturalGradient(), StochasticSubset(1))],
    ids=["damped", "random groups"],
)
@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
def test_what_has_converged_has_its_width(solver, schedule, fault, x64, monkeypatch):
    """The exact posterior has an sd of 1 / sqrt(21); by mean statistics in their sds fits end at sds 1 to 12 % too wide."""
    if not x64:
        pytest.skip("in float32 the location's digits are rounding at this distance")
    if fault:

        def by_statistics(self, natural, root, change):
            pushed = ProductFamily([("x", self)]).flat(self.fisher_product(natural, change))
            variances = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(self.fisher_diagonal(natural))])
            like = jax.tree.structure(change)
            return jax.tree.unflatten(like, list(pushed / jnp.sqrt(variances)))

        for cls in (FamilyDefaults, type(family_for(MEMBERS["normal"]).by_coordinate or family_for(MEMBERS["normal"]))):
            monkeypatch.setattr(cls, "whitened", by_statistics)
    model = (lambda y: level(y)) if fault else level
    pvi = PVI(
        Partition(model, "data", np.arange(20) % 5), AutoExponentialFamily(model), solver=solver, schedule=schedule
    )
    result = pvi.run(KEY, 500, ROWS, tol=1e-3, progress_bar=False)
    off = abs(float(result.params["w_auto_scale"]) * 21**0.5 - 1)
    assert off > 5e-3 if fault else (result.converged and off < 2.5e-3)


COUNTS = np.random.default_rng(0).poisson(10_000, 20)


def rates(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.01))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.parametrize("solver", [SNEP(), AlphaDivergence(0.5)], ids=["snep", "alpha"])
@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
def test_steps_do_not_go_through_means_that_have_lost_the_width(solver, fault, x64, monkeypatch):
    """``E log x`` and ``E x`` of a gamma of shape 2e5 tell its width by their last digits in float32; the posterior is exact."""
    if x64:
        pytest.skip("means have the width in float64")
    if fault:
        monkeypatch.setattr(_snep, "_LOST", np.inf)
        right = _alpha_divergence._MetricCoordinates
        monkeypatch.setattr(_alpha_divergence, "_MetricCoordinates", lambda *given: right(*given[:-1], True))
    model = (lambda y: rates(y)) if fault else rates
    pvi = PVI(Partition(model, "data", np.arange(20) % 5), AutoExponentialFamily(model), solver=solver)
    result = pvi.run(KEY, 60, COUNTS, tol=1e-3, progress_bar=False)
    shape = float(result.params["rate_auto_concentration"])
    off = abs((shape / (2 + COUNTS.sum())) ** -0.5 - 1)
    assert not (result.converged and off < 3e-3) if fault else (result.converged and off < 3e-3)
