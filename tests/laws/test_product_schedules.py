"""Schedules' own rounds over a product of families: coordinate ascent written by hand tells where each of them ends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import optimize, special

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi.families import LogNormalFamily
from numpyro_pvi.runtime import _product_factors
from numpyro_pvi.schedules import Asynchronous, Committee, Decentralized, StochasticSubset, Streaming, _subset
from numpyro_pvi.solvers import PowerEP, StochasticNaturalGradient

KEY = jax.random.key(0)
X64 = jnp.result_type(float).name == "float64"
TIGHT = 1e-6 if X64 else 2e-3
RNG = np.random.default_rng(5)
X = RNG.normal(size=12)
Y = 1.5 * X + 0.5 * RNG.normal(size=12)
LABELS = np.array(["b"] * 3 + ["a"] * 4 + ["c"] * 5)
ORDER = "bac"
CHAIN = [("a", "b"), ("b", "c")]
SETTLED = 1e-9 if X64 else 1e-5


def line(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * x, 1 / jnp.sqrt(tau)), obs=y)


# (precision-mean, precision) of the slope, (shape, rate) of the precision of rows.
PRIOR = np.array([0.0, 1 / 9, 2.0, 1.0])


def ascent(prior, x, y):
    """The best product given these rows and a prior of the same form, by textbook coordinate ascent."""
    q = np.array(prior)
    for _ in range(400):
        tau = q[2] / q[3]
        q[:2] = prior[0] + tau * x @ y, prior[1] + tau * x @ x
        loc, square = q[0] / q[1], (q[0] / q[1]) ** 2 + 1 / q[1]
        q[2:] = prior[2] + len(y) / 2, prior[3] + 0.5 * (y @ y - 2 * loc * x @ y + square * x @ x)
    return q


def of(label):
    return X[label == LABELS], Y[label == LABELS]


def after(labels):
    """Every group once, beside what came before it and not what comes after: Broderick et al., 2013, alg. 3."""
    return functools.reduce(lambda q, label: ascent(q, *of(label)), labels, PRIOR)


WANTED = {
    "streaming": lambda: after(ORDER),
    # Tresp, 2000: what each member learns by itself, once.
    "committee": lambda: PRIOR + sum(ascent(PRIOR, *of(label)) - PRIOR for label in ORDER),
    "asynchronous": lambda: ascent(PRIOR, X, Y),
    "decentralized": lambda: ascent(PRIOR, X, Y),
}
CASES = {
    "streaming": (Streaming(visits=200, tol=SETTLED), 1),
    "committee": (Committee(tol=SETTLED), 1),
    "asynchronous": (Asynchronous(delays={"a": 1.0, "b": 2.5, "c": 1.0}), 40),
    "decentralized": (Decentralized(CHAIN, nodes=["a", "b", "c"]), 60),
}
each = pytest.mark.parametrize("name", CASES)


def made(schedule, model=line, **options):
    return PVI(Partition(model, "data", LABELS), AutoExponentialFamily(model), schedule=schedule, **options)


def run(name, model=line):
    schedule, rounds = CASES[name]
    pvi = made(schedule, model)
    tol = None if rounds == 1 else 1e-7 if X64 else 1e-3
    return pvi, pvi.run(KEY, rounds, jnp.asarray(X), jnp.asarray(Y), progress_bar=False, tol=tol)


fitted = functools.cache(run)


def natural(params):
    precision = params["a_auto_scale"] ** -2.0
    shape, rate = params["tau_auto_concentration"], params["tau_auto_rate"]
    return np.array([params["a_auto_loc"] * precision, precision, shape, rate])


def ends_where_ascent_does(name, params):
    np.testing.assert_allclose(natural(params), WANTED[name](), rtol=TIGHT)


@each
def test_a_schedule_ends_where_ascent_by_hand_does(name):
    pvi, result = fitted(name)
    ends_where_ascent_does(name, result.params)
    assert result.converged is (None if CASES[name][1] == 1 else True)


@each
def test_prior_and_sites_make_q(name):
    """Law 1, in the parameters that a user sees."""
    pvi, result = fitted(name)
    sites = [pvi.site(result.state, label).natural for label in pvi.groups]
    total = functools.reduce(lambda p, site: p + site, sites, result.state.prior)
    q = natural(result.params)
    np.testing.assert_allclose(total.parts["tau"].log + 1.0, q[2], rtol=TIGHT)
    np.testing.assert_allclose(total.parts["tau"].rate, q[3], rtol=TIGHT)


@pytest.mark.once
@each
def test_rows_of_another_group_are_noticed(name, monkeypatch):
    own = _product_factors.ProductFactors._factor
    monkeypatch.setattr(
        _product_factors.ProductFactors, "_factor", lambda self, index, site, noise: own(self, 0 * index, site, noise)
    )
    with pytest.raises(AssertionError):
        ends_where_ascent_does(name, run(name, lambda x, y: line(x, y))[1].params)


def test_agents_agree_in_the_end():
    pvi, result = fitted("decentralized")
    for label in pvi.groups:
        own = pvi.posterior(result.state, agent=label)
        np.testing.assert_allclose(float(own["tau"].rate), float(result.params["tau_auto_rate"]), rtol=10 * TIGHT)
    info = pvi.info(result.state)
    assert set(info.agents) == set(ORDER) and 0 <= info.consensus < 1e-3
    assert "agents" in str(info)


# --------------------------------------------------------------------------------------------------------- moments

# Nodes of the slope and of the log precision, far out enough for a prior and one group.
SLOPES, LOGS = np.linspace(-24.0, 24.0, 1921)[:, None], np.linspace(-7.0, 4.0, 441)[None, :]


def matched(cavity, x, y):
    """The product with the moments of cavity times rows, by sums over nodes."""
    rate = np.exp(LOGS)
    log = cavity[0] * SLOPES - 0.5 * cavity[1] * SLOPES**2 + cavity[2] * LOGS - cavity[3] * rate
    squares = y @ y - 2 * SLOPES * (x @ y) + SLOPES**2 * (x @ x)
    log = log + 0.5 * len(y) * LOGS - 0.5 * rate * squares
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    loc, mean, mean_log = ((weight * what).sum() for what in (SLOPES, rate, LOGS))
    precision = 1 / ((weight * SLOPES**2).sum() - loc**2)
    gap = np.log(mean) - mean_log
    shape = optimize.brentq(lambda a: np.log(a) - special.psi(a) - gap, 1e-3, 1e5, xtol=1e-12)
    return np.array([loc * precision, precision, shape, shape / mean])


def fixed_point():
    """Expectation propagation, group by group."""
    sites, q = dict.fromkeys(ORDER, 0 * PRIOR), PRIOR
    for _ in range(60):
        for label in ORDER:
            new = matched(q - sites[label], *of(label))
            sites[label], q = sites[label] + new - q, new
    return q


WANTED_MOMENTS = {
    # Assumed-density filtering.
    "streaming": lambda: functools.reduce(lambda q, label: matched(q, *of(label)), ORDER, PRIOR),
    "committee": lambda: PRIOR + sum(matched(PRIOR, *of(label)) - PRIOR for label in ORDER),
    "asynchronous": fixed_point,
    "decentralized": fixed_point,
    "subset": fixed_point,
}
MATCHING = CASES | {"subset": (StochasticSubset(2), 60)}


@pytest.mark.parametrize("name", MATCHING)
def test_matched_moments_end_where_sums_over_nodes_do(name):
    schedule, rounds = MATCHING[name]
    pvi = made(schedule, solver=PowerEP())
    result = pvi.run(KEY, rounds, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    np.testing.assert_allclose(natural(result.params), WANTED_MOMENTS[name](), rtol=1e-4 if X64 else 5e-3)
    assert "quadrature" in result.info.expectation[-1]


def changed(new, old):
    """Which of the groups have another value of a stack."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return np.any([np.any(np.asarray(a != b).reshape(3, -1), axis=1) for a, b in pairs], axis=0)


def those_away_keep_what_they_have(model):
    """Every group is there in every other round or so: a round changes the sites, and the memories, of those that are."""
    pvi = made(StochasticSubset(rates=0.5), model, solver=PowerEP())
    args = jnp.asarray(X), jnp.asarray(Y)
    state, seen = pvi.init(jax.random.key(1), *args), set()
    for _ in range(4):
        before, (state, _) = state, pvi.update(state, *args)
        moved = changed(state.sites.groups, before.sites.groups)
        np.testing.assert_array_equal(moved, np.asarray(state.report.step) > 0)
        np.testing.assert_array_equal(moved, changed(state.solver_state.last, before.solver_state.last))
        seen.add(int(moved.sum()))
    assert seen & {1, 2}


def test_groups_that_take_no_part_keep_their_sites_and_memories():
    those_away_keep_what_they_have(line)


@pytest.mark.once
def test_memories_of_groups_that_took_no_part_are_noticed(monkeypatch):
    monkeypatch.setattr(_subset, "select", lambda _, new, old: new)
    with pytest.raises(AssertionError):
        those_away_keep_what_they_have(lambda x, y: line(x, y))


@pytest.mark.once
def test_late_messages_are_taken_up_where_they_were_left(tmp_path):
    """Law 9: bit for bit, delays and all."""
    schedule, args = CASES["asynchronous"][0], (jnp.asarray(X), jnp.asarray(Y))
    pvi, fresh = made(schedule), made(schedule)
    state = pvi.run(KEY, 2, *args, progress_bar=False).state
    pvi.save(tmp_path / "fit.pvi", state)
    on = [
        p.run(KEY, 2, *args, progress_bar=False, init_state=s)
        for p, s in [(pvi, state), (fresh, fresh.load(tmp_path / "fit.pvi", *args))]
    ]
    for one, other in zip(*(jax.tree.leaves(r.state.sites) for r in on), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stream_goes_on_with_groups_that_come():
    """Two groups at first, the third when it is there: the same as three at once; and one comes back."""
    early = np.isin(LABELS, ["a", "b"])
    pvi = PVI(Partition(line, "data", LABELS[early]), AutoExponentialFamily(line), schedule=CASES["streaming"][0])
    state = pvi.run(KEY, 1, jnp.asarray(X[early]), jnp.asarray(Y[early]), progress_bar=False).state
    state = pvi.add_group(state, "c", *map(jnp.asarray, of("c")), tol=None)
    np.testing.assert_allclose(natural(pvi.get_params(state)), after(ORDER), rtol=TIGHT)
    state = pvi.revisit(state, "a", *map(jnp.asarray, of("a")), tol=None)
    rest = after("bac") - (after("ba") - after("b"))
    np.testing.assert_allclose(natural(pvi.get_params(state)), ascent(rest, *of("a")), rtol=10 * TIGHT)


def shaped(y):
    """A drawn factor, and a prior outside its family."""
    shape = numpyro.sample("shape", dist.HalfNormal(3.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, rate), obs=y)


@pytest.mark.once
@pytest.mark.parametrize("name", ["asynchronous", "decentralized"])
def test_a_factor_of_the_prior_has_the_limit_of_server_rounds(name):
    guide = AutoExponentialFamily(shaped, families={"shape": LogNormalFamily()})
    means, y = [], jnp.asarray(np.exp(Y))
    for options in ({}, {"schedule": CASES[name][0]}):
        pvi = PVI(Partition(shaped, "data", LABELS), guide, **options)
        q = pvi.posterior(pvi.run(KEY, 60, y, progress_bar=False).state)
        means.append([(float(q[n].mean), float(q[n].variance) ** 0.5) for n in ("shape", "rate")])
    for (mean, sd), (wanted, width) in zip(*means, strict=True):
        assert abs(mean - wanted) < 1e-3 * width and abs(sd / width - 1) < 1e-3


# ------------------------------------------------------------------------------------------------------------ refusals


def rates(counts):
    b = numpyro.sample("b", dist.Gamma(1.5, 0.7))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(numpyro.sample("rate", dist.Gamma(2.0, b))), obs=counts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": Asynchronous(), "solver": StochasticNaturalGradient()}, "or schedule=Synchronous"),
        ({"schedule": Streaming(), "solver": PowerEP(factors="row")}, r"PowerEP\(factors='row'\).*or PowerEP\(\)"),
        ({"schedule": Decentralized(CHAIN, nodes=["a", "b", "c"], mixing="consensus")}, "write mixing='tracking'"),
    ],
    ids=["batches", "rows", "consensus"],
)
def test_what_is_not_there_says_what_to_write(options, words):
    with pytest.raises(PVIError, match=words):
        made(**options)


@pytest.mark.once
def test_rows_own_latents_are_refused_by_name():
    pvi = made(Asynchronous(), rates)
    with pytest.raises(PVIError, match="'rate' is inside the partitioned plate: write schedule=Synchronous"):
        pvi.init(KEY, jnp.asarray(RNG.poisson(3.0, 12)))
