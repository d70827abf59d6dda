"""Schedules' own rounds over a product of families: coordinate ascent written by hand tells where each of them ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from scipy import optimize, special

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi.families import LogNormalFamily
from numpyro_pvi.runtime import _product_batches, _product_factors, _product_rounds
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
    _sequential,
    _subset,
)
from numpyro_pvi.solvers import LocalELBO, NaturalGradient, PowerEP, StochasticNaturalGradient

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
    own = _product_factors.ProductFactors.factor
    monkeypatch.setattr(
        _product_factors.ProductFactors, "factor", lambda self, index, site, noise: own(self, 0 * index, site, noise)
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


# ------------------------------------------------------------------------------------------------- steps by some rows


def poisson(counts):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("data", counts.shape[0]):
        numpyro.sample("count", dist.Poisson(rate), obs=counts)


COUNTS = np.random.default_rng(3).poisson(3.0, 12) + 3 * (LABELS == "c")


def ends_of_some_groups():
    """Runs of one group a round, whoever is drawn first and however often: prior and rows all count where they end."""
    pvi = PVI(Partition(poisson, "data", LABELS), AutoExponentialFamily(poisson), schedule=StochasticSubset(1))
    for seed in range(8):
        result = pvi.run(jax.random.key(seed), 80, jnp.asarray(COUNTS), tol=SETTLED, progress_bar=False)
        assert result.converged and float(result.info.left) <= SETTLED
        np.testing.assert_allclose(result.params["rate_auto_concentration"], 2 + COUNTS.sum(), rtol=1e-5)
        np.testing.assert_allclose(result.params["rate_auto_rate"], 0.5 + len(COUNTS), rtol=1e-5)


def test_no_run_converges_before_all_groups_were_heard():
    """Whoever is visited twice running asks for nothing the second time."""
    ends_of_some_groups()


@pytest.mark.once
def test_groups_that_nobody_heard_are_noticed(monkeypatch):
    monkeypatch.setattr(_product_rounds, "UNHEARD_MOVE", 0.0)
    with pytest.raises(AssertionError):
        ends_of_some_groups()


# All rows and the whole way: coordinate ascent of one group, by visits of a solver that takes steps of its own.
WHOLE = StochasticNaturalGradient(1.0, num_steps=1, average=0.0)
SOME = StochasticNaturalGradient(batch_size=2, num_steps=20)
WANTED["sequential"] = WANTED["asynchronous"]
# A solver of noisy steps has no tolerance to stop at, and under delays takes shares of them.
STEPS = {
    "sequential": (Sequential(), 40),
    "streaming": (Streaming(visits=40), 1),
    "committee": (Committee(max_visits=40), 1),
    "asynchronous": (CASES["asynchronous"][0], 160),
    "decentralized": CASES["decentralized"],
}
by_steps = pytest.mark.parametrize("name", STEPS)
# Parallel visits, each as if alone, go one M-th of the way.
EVERY = STEPS | {"synchronous": (Synchronous(), 120), "subset": (StochasticSubset(2), 160)}
WANTED |= dict.fromkeys(("synchronous", "subset"), WANTED["asynchronous"])


def run_steps(name, model=line, solver=WHOLE):
    schedule, rounds = EVERY[name]
    pvi = made(schedule, model, solver=solver)
    return pvi.run(KEY, rounds, jnp.asarray(X), jnp.asarray(Y), progress_bar=False).params


@by_steps
def test_steps_of_all_rows_end_where_ascent_by_hand_does(name):
    ends_where_ascent_does(name, run_steps(name))


@pytest.mark.parametrize("name", EVERY)
def test_an_optimisers_steps_of_all_rows_end_where_ascent_by_hand_does(name):
    """Under every schedule: plain gradient steps of length 1 in whitened coordinates are full natural-gradient steps."""
    ends_where_ascent_does(name, run_steps(name, solver=LocalELBO(optax.sgd(1.0), num_steps=1, average=0.0)))


def leads_to_the_posterior(name, model=poisson, solver=SOME):
    """Two rows of three to five a step: over 12 other keys the mean's error was 0.0077 sds rms at most, and that of the log
    variance 0.0011; bounds are four times that.
    """
    schedule, rounds = STEPS[name]
    pvi = made(schedule, model, solver=solver)
    state = pvi.run(KEY, rounds, jnp.asarray(COUNTS), progress_bar=False).state
    q, sites = pvi.posterior(state)["rate"], [pvi.site(state, label).natural.parts["rate"] for label in pvi.groups]
    np.testing.assert_allclose(2.0 + sum(site.log for site in sites), q.concentration, rtol=TIGHT)
    np.testing.assert_allclose(0.5 + sum(site.rate for site in sites), q.rate, rtol=TIGHT)
    a, b = 2.0 + COUNTS.sum(), 12.5
    assert abs(float(q.mean) - a / b) < 0.031 * a**0.5 / b
    assert abs(np.log(float(q.variance) * b**2 / a)) < 0.0044


@by_steps
def test_steps_by_some_rows_lead_to_the_posterior(name):
    leads_to_the_posterior(name)


def ends(solver, model=poisson, rounds=3):
    """Shape and rate after some rounds of a group after the other."""
    result = made(Sequential(), model, solver=solver).run(KEY, rounds, jnp.asarray(COUNTS), progress_bar=False)
    return np.array([result.params["rate_auto_concentration"], result.params["rate_auto_rate"]]), result


def test_plain_gradient_steps_are_natural_gradient_steps():
    """Batch by batch, on the same rows, averages and all."""
    steps = {"num_steps": 6, "batch_size": 2, "average": 0.5}
    found, _ = ends(LocalELBO(optax.sgd(0.3), **steps))
    wanted, _ = ends(StochasticNaturalGradient(0.3, **steps))
    np.testing.assert_allclose(found, wanted, rtol=TIGHT)


@pytest.mark.once
@pytest.mark.parametrize(
    ("solver", "error"),
    [
        (LocalELBO(optax.lbfgs(), num_steps=15), 1e-6),
        (LocalELBO(optax.adam(optax.exponential_decay(0.3, 20, 0.75)), num_steps=20, optimiser_state="keep"), 1e-3),
        (LocalELBO(numpyro.optim.Adam(0.05), num_steps=40), 0.02),
    ],
    ids=["line search", "kept", "numpyro"],
)
def test_any_optimiser_leads_to_the_posterior(solver, error):
    """As near as its last steps are short: 3e-4 sds where they fall to that, and 0.05 of a constant step before averages."""
    found, _ = ends(solver, rounds=24)
    np.testing.assert_allclose(found, [2.0 + COUNTS.sum(), 12.5], rtol=error)


@pytest.mark.once
def test_kept_states_of_numpyros_optimisers_are_those_of_optax():
    """They hold the point where the last visit ended, and the next one begins at 0 again."""
    steps = {"num_steps": 5, "optimiser_state": "keep"}
    found, _ = ends(LocalELBO(numpyro.optim.Adam(0.05), **steps))
    wanted, _ = ends(LocalELBO(optax.adam(0.05), **steps))
    np.testing.assert_allclose(found, wanted, rtol=1e-5 if X64 else 1e-3)


@pytest.mark.once
def test_steps_out_of_the_domain_are_shortened():
    found, result = ends(LocalELBO(optax.sgd(-50.0), num_steps=2), rounds=1)
    assert np.all(np.isfinite(found)) and np.all(found > 0)
    assert int(np.max(result.state.report.backoffs)) > 0


def _unweighted(*args, right=_product_batches.batch_rows):
    return right(*args)._replace(weights=jnp.ones(1))


@pytest.mark.once
def test_batches_without_their_weights_are_noticed(monkeypatch):
    monkeypatch.setattr(_product_batches, "batch_rows", _unweighted)
    with pytest.raises(AssertionError):
        leads_to_the_posterior("sequential", lambda counts: poisson(counts))


@pytest.mark.once
def test_the_wrong_sign_of_a_cavity_is_noticed(monkeypatch):
    """The cavity's sign: q times the site where q over the site belongs, which is q beside the site three times."""
    own = _product_batches.ProductRows.step

    def step(self, group, cavity, site, share, key, rows):
        return own(self, group, cavity + site * 2.0, site, share, key, rows)

    monkeypatch.setattr(_product_batches.ProductRows, "step", step)
    with pytest.raises(AssertionError):
        ends_where_ascent_does("sequential", run_steps("sequential", lambda x, y: line(x, y)))


TAKEN_UP = {
    "late": (CASES["asynchronous"][0], NaturalGradient()),
    "rows": (Sequential(), SOME),
    "optimiser": (StochasticSubset(2), LocalELBO(num_steps=3, batch_size=2, optimiser_state="keep")),
}


@pytest.mark.once
@pytest.mark.parametrize("name", TAKEN_UP)
def test_rounds_are_taken_up_where_they_were_left(name, tmp_path):
    """Law 9: bit for bit, delays, batches and all."""
    schedule, solver = TAKEN_UP[name]
    args = (jnp.asarray(X), jnp.asarray(Y))
    pvi, fresh = made(schedule, solver=solver), made(schedule, solver=solver)
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


# Residuals of the first group are small, those of the others are not and not about 0.
UNEVEN = np.argsort(np.abs(Y - 1.5 * X))
FAR = X[UNEVEN], np.where(np.arange(12) < 3, Y[UNEVEN], 3 * Y[UNEVEN] + 2)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "fault"])
def test_sweeps_leave_an_optimum_of_sites_in_equal_shares(fault, monkeypatch):
    """Every visit by itself takes q far away, and no share of a sweep helps: sites seen from one q come right at once."""
    if fault:
        monkeypatch.setattr(_sequential, "SWEEP_HALVINGS", 99)
    pvi = made(Sequential(), lambda x, y: line(x, y))
    state, best = pvi.init(KEY, *map(jnp.asarray, FAR)), ascent(PRIOR, *FAR)
    like, structure = jax.tree.flatten(state.sites.groups)
    shares = [jnp.full((3,), total / 3, x.dtype) for total, x in zip(best - PRIOR, like, strict=True)]
    sites = dataclasses.replace(state.sites, groups=jax.tree.unflatten(structure, shares))
    state = dataclasses.replace(state, sites=sites)
    tol = 1e-7 if X64 else 1e-3
    done = pvi.run(KEY, 12, *map(jnp.asarray, FAR), tol=tol, init_state=state, progress_bar=False)
    # A group adds half its rows to the shape of their precision.
    own = np.allclose(done.state.sites.groups.parts["tau"].log, [2.0, 1.5, 2.5], rtol=TIGHT)
    assert (done.converged and own) is not fault
    assert fault or np.allclose(natural(done.params), best, rtol=TIGHT)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": Streaming(), "solver": PowerEP(factors="row")}, r"PowerEP\(factors='row'\).*or PowerEP\(\)"),
        ({"schedule": Decentralized(CHAIN, nodes=["a", "b", "c"], mixing="consensus")}, "write mixing='tracking'"),
    ],
    ids=["rows", "consensus"],
)
def test_what_is_not_there_says_what_to_write(options, words):
    with pytest.raises(PVIError, match=words):
        made(**options)
