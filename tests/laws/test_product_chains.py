"""Tilted moments of products of families by chains and by Laplace approximations: exact where factors are conjugate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_pvi.expectations._product_moments as product_moments
from numpyro_pvi import PVIError
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import LaplaceMoments, MCMCMoments, PowerEP

from . import family_ep
from .test_alpha_families import (
    CASES,
    COUNTS,
    DAYS,
    GIVEN,
    PAIRS,
    factors_of,
    independent,
    natural_leaves,
    run,
    textbook,
)

FEW = MCMCMoments(num_warmup=60, num_samples=64, num_chains=2)
POINTS = {"chains": FEW, "laplace": LaplaceMoments(256)}


@pytest.mark.parametrize(
    ("names", "moments", "schedule"),
    [
        (("gamma", "normal"), "chains", Synchronous()),
        pytest.param(("beta", "inverse_gamma"), "laplace", Synchronous(), marks=pytest.mark.slow),
        pytest.param(("wishart", "dirichlet"), "chains", Sequential(), marks=pytest.mark.slow),
        pytest.param(("wishart", "dirichlet"), "laplace", Synchronous(), marks=pytest.mark.slow),
        pytest.param(("vector", "log_normal"), "laplace", Sequential(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_conjugate_factors_are_exact_whatever_the_draws(names, moments, schedule, x64):
    data = [jnp.asarray(COUNTS), jnp.asarray(PAIRS)]
    pvi, result = run(independent(*names), data, PowerEP(0.5, POINTS[moments]), 1, schedule)
    words = {"chains": "mcmc", "laplace": "weighted draws of a Laplace approximation"}
    assert set(result.info.expectation) == {words[moments]}
    tight = {"rtol": 1e-7, "atol": 1e-7} if x64 else {"rtol": 2e-2, "atol": 2e-2}
    for name in names:
        if textbook(name)[0] is not None:
            for a, b in zip(natural_leaves(result, name), textbook(name)[0], strict=True):
                np.testing.assert_allclose(a, b, err_msg=name, **tight)
    if "wishart" in names:
        q = pvi.posterior(result.state)["wishart"]
        np.testing.assert_allclose(q.concentration, 10, **tight)
        np.testing.assert_allclose(q.rate_matrix, np.eye(2) + PAIRS.T @ PAIRS, **tight)
    evidence = sum(textbook(name)[1] for name in names)
    np.testing.assert_allclose(pvi.log_evidence(result.state, *data), evidence, rtol=1e-7 if x64 else 1e-2)


@functools.cache
def limit(name, power):
    return family_ep.power_ep([name], CASES[name][1], factors_of(name), power)


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("Gamma", "laplace"),
        *(
            pytest.param(name, moments, marks=pytest.mark.slow)
            for name, moments in (
                ("Beta", "laplace"),
                ("Normal", "chains"),
                ("LogNormal", "chains"),
                ("VonMises", "chains"),
            )
        ),
    ],
)
def test_limits_are_an_independent_eps_within_the_draws_error(name, moments):
    """Four standard errors of what the rounds themselves say of their noise, and no less than a hundredth of an sd."""
    wanted, evidence = limit(name, 0.7)
    data = [jnp.asarray(DAYS)]
    pvi, result = run(CASES[name][0], data, PowerEP(0.7, POINTS[moments]), 40)
    found = np.array(natural_leaves(result, "x"))
    state = result.state
    family = dict(state.plan.family.components)["x"]
    like = jax.tree.structure(state.prior.parts["x"])
    gap = jax.tree.unflatten(like, [jnp.asarray(x) for x in found - wanted])
    q = jax.tree.unflatten(like, [jnp.asarray(x) for x in wanted])
    far = float(jnp.sqrt(family.inner(gap, family.fisher_product(q, gap))))
    noise = float(np.sqrt(np.sum(np.asarray(state.solver_state.noise) ** 2)))
    assert far < max(4 * noise, 0.01)
    # The noise is that of what an affine function leaves of the log factor, far below that of plain draws (1 / 11).
    assert noise < 0.08
    assert abs(float(pvi.log_evidence(state, *data)) - evidence) < 0.05
    assert np.all(result.info.ess > 20)
    if moments == "chains":
        assert np.all(result.info.rhat < 1.5) and np.all(result.info.divergent < 0.2)


def test_a_site_that_stays_in_is_noticed(monkeypatch):
    """The comparison can fail: draws weighted by the factor alone, not by the factor over its site."""
    monkeypatch.setattr(product_moments, "paired", lambda family, natural, statistics: 0.0)
    wanted, _ = limit("Gamma", 0.7)
    _, result = run(CASES["Gamma"][0], [jnp.asarray(DAYS)], PowerEP(0.7, MCMCMoments(20, 65, 2)), 4)
    assert np.max(np.abs(np.array(natural_leaves(result, "x")) / wanted - 1)) > 0.2


def counts(y):
    x = numpyro.sample("x", dist.Gamma(1.0, 1e-5))
    z = numpyro.sample("z", dist.Gamma(1.0, 1.0))
    w = numpyro.sample("w", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(x + z + w), obs=y)


FAR = [jnp.asarray(100_000 + COUNTS)]


def test_a_mode_far_from_q_is_found_where_its_own_draws_collapse():
    """Hardly any of q's draws hits counts of a hundred thousand; those about the mode do, in one round."""
    _, result = run(counts, FAR, PowerEP(1.0, LaplaceMoments(256)), 1, Sequential())
    assert np.all(result.info.ess > 64)
    assert not any(note.startswith("group") for note in result.info.notes)
    q = natural_leaves(result, "x")
    # Exact but for z and w, whose three units are nothing beside the sum's sd of 129.
    np.testing.assert_allclose((q[0] + 1) / q[1], 100_000 + COUNTS.mean() - 3, rtol=1e-3)
    np.testing.assert_allclose((q[0] + 1) / q[1] ** 2, 100_000 / 6, rtol=0.1)


@pytest.mark.slow
def test_chains_take_over_from_weights_that_keep_collapsing():
    """Short steps keep q far from where the counts are: after three visits chains look there instead of draws of q."""
    _, result = run(counts, FAR, PowerEP(1.0), 3, Synchronous(damping=1e-6))
    assert set(result.info.expectation) == {"weighted draws"}
    assert "its moments were taken at" in result.info.notes[0]
    pvi, result = run(counts, FAR, PowerEP(1.0), 6, Synchronous(damping=1e-6))
    assert result.state.plan.chained and set(result.info.expectation) == {"mcmc"}
    assert np.all(np.isfinite(result.info.rhat)) and bool(result.info.valid)
    # Six rounds asked for a millionth each of what three groups say of x.
    np.testing.assert_allclose(natural_leaves(result, "x")[0], 6e-6 * (600_000 + COUNTS.sum()), rtol=1e-3)


@pytest.mark.slow
def test_chains_go_on_where_they_stood(tmp_path):
    """A state with chains goes into a file, and on from there bit by bit."""
    model, data = CASES["Gamma"][0], [jnp.asarray(DAYS)]
    pvi, whole = run(model, data, PowerEP(0.7, FEW), 4)
    half = pvi.run(jax.random.key(0), 2, *data, progress_bar=False)
    pvi.save(tmp_path / "half", half.state)
    rest = pvi.run(jax.random.key(0), 2, *data, progress_bar=False, init_state=pvi.load(tmp_path / "half"))
    for a, b in zip(natural_leaves(rest, "x"), natural_leaves(whole, "x"), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(rest.state.solver_state.chains.visits[0]) == 4


@pytest.mark.once
def test_choices_that_do_not_fit_are_refused_by_name():
    weibull, data = CASES["Gamma"][0], [jnp.asarray(DAYS)]
    mixed, both = independent("bernoulli", "normal"), [jnp.asarray(COUNTS), jnp.asarray(PAIRS)]
    for model, own, solver, words, given in [
        (weibull, data, PowerEP(factors="row", moments="mcmc"), "every row would have chains", {}),
        (weibull, data, PowerEP(moments=MCMCMoments(kernel="langevin")), "chains on mini-batches", {}),
        (
            mixed,
            both,
            PowerEP(moments="mcmc"),
            "sees bernoulli with finitely many values",
            {"bernoulli": GIVEN["bernoulli"]},
        ),
        (mixed, both, PowerEP(moments="laplace"), "sees bernoulli.*importance", {"bernoulli": GIVEN["bernoulli"]}),
    ]:
        with pytest.raises(PVIError, match=words):
            run(model, own, solver, 1, families=given)
