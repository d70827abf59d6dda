"""PowerEP with a factor per row in the latents' own families: the same as one group per row, however rows are grouped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_pvi.runtime._product_matching as row_factors
from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.schedules import Sequential, Synchronous, _contract
from numpyro_pvi.solvers import ImportanceMoments, PowerEP

from . import family_ep
from .test_alpha_families import (
    CASES,
    COUNTS,
    DAYS,
    DESIGN,
    KEY,
    PAIRS,
    independent,
    logistic,
    naturals,
    textbook,
    weibull,
)

UNEVEN = np.array([1, 0, 2, 1, 1, 1])
# Seven rows of two groups, whose chunks of four have a slot to spare.
PADDED, SINGLE = np.array([1, 0, 1, 0, 1, 1, 0]), np.arange(7)
LONGER = np.append(DAYS, 1.4)


def fit(model, data, solver, rounds, groups=UNEVEN, schedule=None, **options):
    split = Partition(model, "data", groups, **options)
    # A start at curvatures gives every row of a group the same share of it, which a group of one row has for itself.
    pvi = PVI(split, AutoExponentialFamily(model), solver=solver, schedule=schedule, init_sites="prior")
    return pvi, pvi.run(KEY, rounds, *data, progress_bar=False)


def total(result, state=None):
    """Natural parameters of q, flat."""
    state = state or result.state
    q = jax.tree.map(lambda x: jnp.sum(x, axis=0), state.sites.groups) + state.prior
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(q)])


@pytest.mark.parametrize(
    ("power", "schedule"),
    [(1.0, Sequential()), pytest.param(0.5, Synchronous(), marks=pytest.mark.slow)],
    ids=str,
)
def test_the_limit_is_an_independent_eps_with_a_factor_for_every_row(power, schedule, x64):
    data = [jnp.asarray(DAYS)]
    pvi, result = fit(weibull, data, PowerEP(power, factors="row"), 60, schedule=schedule)
    _, prior, row = CASES["Gamma"]
    factors = [functools.partial(lambda y, x: row(y, x), y) for y in DAYS]
    wanted, evidence = family_ep.power_ep(["Gamma"], prior, factors, power)
    np.testing.assert_allclose(naturals(result, "x"), wanted, rtol=1e-8 if x64 else 2e-3)
    np.testing.assert_allclose(pvi.log_evidence(result.state, *data), evidence, atol=1e-8 if x64 else 1e-3)
    assert result.info.expectation == ("quadrature over the latents",) * 3
    assert result.info.notes == ()


# Model, data, moments and rounds: quadrature, draws, closed form.
ROUNDS = {
    "quadrature": (weibull, [LONGER], "auto", 4),
    "draws": (logistic, [LONGER, np.concatenate([DESIGN, -DESIGN[:1]])], ImportanceMoments(256), 3),
    "closed form": (
        independent("gamma", "normal"),
        [np.append(COUNTS, 2), np.concatenate([PAIRS, PAIRS[:1]])],
        "auto",
        2,
    ),
}


@functools.cache
def rounds_of(name, factors, groups, power=0.7, damping="auto"):
    model, data, moments, rounds = ROUNDS[name]
    solver, schedule = PowerEP(power, moments, factors), Synchronous(damping)
    return fit(model, [jnp.asarray(x) for x in data], solver, rounds, np.array(groups), schedule)


def gap(name, power=0.7, damping="auto"):
    """Largest difference, over its size, between rows as factors of two groups and as groups of their own."""
    layouts = ("row", PADDED), ("group", SINGLE)
    (pvi, rows), (_, groups) = (rounds_of(name, f, tuple(g), power, damping) for f, g in layouts)
    a, b = total(rows), total(groups)
    data = [jnp.asarray(x) for x in ROUNDS[name][1]]
    evidence = pvi.log_evidence(rows.state, *data, with_error=True)
    return np.max(np.abs(a - b)) / np.max(np.abs(b)), rows, groups, evidence


@pytest.mark.parametrize("name", ["quadrature", "draws", "closed form"])
def test_rounds_are_those_of_a_group_per_row(name, x64):
    far, rows, groups, evidence = gap(name)
    assert far < (1e-9 if x64 else 1e-3)
    np.testing.assert_allclose(rows.losses, groups.losses, rtol=1e-9 if x64 else 1e-3)
    # One site per group: the product of its rows'.
    own = jax.tree.leaves(rows.state.sites.groups)
    single = jax.tree.leaves(groups.state.sites.groups)
    for a, b in zip(own, single, strict=True):
        wanted = np.stack([np.asarray(b)[m == PADDED].sum(axis=0) for m in range(2)])
        np.testing.assert_allclose(a, wanted, rtol=1e-8, atol=1e-8 if x64 else 1e-2)
    pvi, _ = rounds_of(name, "group", tuple(SINGLE))
    alone = pvi.log_evidence(groups.state, *[jnp.asarray(x) for x in ROUNDS[name][1]], with_error=True)
    # Every factor has draws of its own there, others in each layout: four standard errors.
    error = 4 * float(np.hypot(evidence[1], alone[1]))
    assert error == 0 if name != "draws" else 0 < error < 0.5
    np.testing.assert_allclose(evidence[0], alone[0], rtol=1e-9 if x64 else 1e-3, atol=error)
    if name == "draws":
        ess = np.asarray(groups.info.ess)
        np.testing.assert_allclose(
            rows.info.ess, [ess[m == PADDED].min() for m in range(2)], rtol=1e-6 if x64 else 1e-2
        )


@pytest.mark.once
def test_rows_take_the_share_that_their_group_takes(x64, monkeypatch):
    """A damped round is that of damped groups of one row, and not one whose rows have gone all the way."""
    assert gap("quadrature", damping=0.5)[0] < (1e-9 if x64 else 1e-3)
    own = _contract.damp
    monkeypatch.setattr(
        _contract, "damp", lambda old, new, step: dataclasses.replace(own(old, new, step), local=new.local)
    )
    # Another power, here as below.
    assert gap("quadrature", 0.66, 0.5)[0] > 1e-4


def folded():
    """Visits in turn to two groups whose rows say that |x| is about 2, of x about 0: each asks for most of q's precision to go."""

    def model(y):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(jnp.abs(x), 0.2), obs=y)

    solver, pairs = PowerEP(1.0, factors="row"), np.repeat([0, 1], 2)
    _, result = fit(model, [jnp.full(4, 2.0)], solver, 1, pairs, Sequential())
    sites, report = result.state.sites, result.state.report
    rows = jax.tree.map(lambda x: jnp.sum(x.reshape(2, -1), axis=1), sites.local.sites)
    gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), rows, sites.groups)
    return report, max(jax.tree.leaves(gaps))


@pytest.mark.once
def test_rows_that_ask_for_too_much_together_are_shortened_together(monkeypatch):
    """Their sites still make up their group's, and the next group sees a normalisable q; where all rows go all the way, none."""
    report, far = folded()
    assert int(report.backoffs[0]) > 0 and far < 1e-9
    assert not np.any(report.skipped)
    own = row_factors.back_off
    monkeypatch.setattr(row_factors, "back_off", lambda valid, step, *more: (step, own(valid, step, *more)[1]))
    assert np.asarray(folded()[0].skipped).tolist() == [False, True]


def test_the_evidences_error_is_its_spread_over_keys():
    """Sixteen keys tell a standard deviation to 18%; what is said of it lies within a factor of 2."""
    pvi, rows = rounds_of("draws", "row", tuple(PADDED))
    data, keys = [jnp.asarray(x) for x in ROUNDS["draws"][1]], jax.random.split(jax.random.key(5), 16)
    found = [pvi.log_evidence(dataclasses.replace(rows.state, rng_key=key), *data, with_error=True) for key in keys]
    values, errors = np.array(found, float).T
    assert 0.5 < np.median(errors) / np.std(values, ddof=1) < 2


@pytest.mark.once
def test_a_row_that_counts_twice_is_noticed(monkeypatch):
    """The comparison can fail: padding that counts as a row."""
    own, padded = row_factors.by_rows, []

    def all_count(problem):
        found = own(problem)
        everywhere = jnp.ones_like(found.counted)
        padded.append(found.counted.shape[0] > 7)
        packing = dataclasses.replace(found.packing, mask=everywhere[:, None])
        return dataclasses.replace(found, counted=everywhere, packing=packing)

    monkeypatch.setattr(row_factors, "by_rows", all_count)
    # Another power: compiled programs of the same settings would be used again.
    far, *_ = gap("quadrature", 0.65)
    rounds_of.cache_clear()
    assert all(padded) and far > 1e-2


def test_conjugate_rows_are_exact_after_one_round_in_turn(x64):
    data = [jnp.asarray(COUNTS), jnp.asarray(PAIRS)]
    solver, tight = PowerEP(0.5, factors="row"), {"rtol": 1e-9 if x64 else 1e-4}
    pvi, result = fit(independent("gamma", "normal"), data, solver, 1, schedule=Sequential("random"))
    assert set(result.info.expectation) == {"closed form"}
    for name in ("gamma", "normal"):
        np.testing.assert_allclose(naturals(result, name), textbook(name)[0], err_msg=name, **tight)
    evidence = sum(textbook(name)[1] for name in ("gamma", "normal"))
    np.testing.assert_allclose(pvi.log_evidence(result.state, *data), evidence, **tight)


@pytest.mark.parametrize(
    "options", [{"mode": "mask"}, pytest.param({"mode": "index", "chunk_size": 1}, marks=pytest.mark.slow)], ids=str
)
def test_rows_are_factors_whichever_way_they_are_read(options, x64):
    """Where rows cannot be taken the others are masked: the same rounds."""

    def indexed(y):
        x = numpyro.sample("x", dist.Gamma(2.0, 0.5))
        with numpyro.plate("data", len(y)) as i:
            numpyro.sample("y", dist.Weibull(1.5, x), obs=y[i])

    _, found = fit(indexed, [jnp.asarray(LONGER)], PowerEP(0.7, factors="row"), 4, PADDED, **options)
    assert found.state.plan.partition.mechanism == options["mode"]
    _, taken = rounds_of("quadrature", "row", tuple(PADDED))
    np.testing.assert_allclose(total(found), total(taken), rtol=1e-8 if x64 else 1e-3)


@pytest.mark.once
@pytest.mark.parametrize(
    ("factors", "schedule"),
    [
        ("row", Sequential("random")),
        *(pytest.param(f, Synchronous(), marks=pytest.mark.slow) for f in ("row", "group")),
    ],
    ids=str,
)
def test_a_run_may_be_broken_off(factors, schedule, tmp_path):
    """What factors remember goes into files, and on from there bit by bit."""
    data = [jnp.asarray(DAYS)]
    pvi, whole = fit(weibull, data, PowerEP(0.7, factors=factors), 4, schedule=schedule)
    half = pvi.run(KEY, 2, *data, progress_bar=False)
    pvi.save(tmp_path / "half", half.state)
    state = pvi.load(tmp_path / "half")
    rest = pvi.run(KEY, 2, *data, progress_bar=False, init_state=state)
    np.testing.assert_array_equal(total(rest), total(whole))
    np.testing.assert_array_equal(np.r_[half.losses, rest.losses], whole.losses)


def test_rows_in_trouble_are_counted_and_named_by_group():
    """Counts far from a vague prior's draws in one group: its rows' weights collapse, and how many is said."""

    def model(y):
        x = numpyro.sample("x", dist.Gamma(1.0, 1e-5))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Poisson(x), obs=y)

    data = [jnp.asarray(100_000 + COUNTS)]
    _, result = fit(model, data, PowerEP(1.0, ImportanceMoments(32), "row"), 1)
    assert result.info.notes[1].startswith("group 1: of 4 of its rows, each a factor: the effective sample size")
    assert "pass more draws (ImportanceMoments(num_draws=...))" in result.info.notes[1]
    assert bool(result.info.valid)
