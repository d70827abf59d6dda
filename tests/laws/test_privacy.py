"""Differential privacy: plain without noise, bounded releases, a true count, and nobody but visits looks at rows.

Every law is seen to fail on a planted fault: clipping that is forgotten or comes after the noise, noise of half the scale or
none, rounds that look at values.
"""

import dataclasses
import importlib.util
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.optim
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from scipy import stats

import numpyro_pvi.solvers._differential_privacy as privacy
from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError, StateError
from numpyro_pvi.clients import (
    Client,
    InMemorySums,
    InProcess,
    Respondent,
    Summand,
    Summed,
    SummedClients,
    _exchange,
    _sums,
)
from numpyro_pvi.clients._sums import EVERYONE, SumExchange, _step, lattice
from numpyro_pvi.errors import ClientError
from numpyro_pvi.families import MultivariateNormalFamily, NormalFamily, inner, whitening
from numpyro_pvi.runtime import _factors, _product_factors
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
)
from numpyro_pvi.sites import posterior
from numpyro_pvi.solvers import (
    SNEP,
    Derivatives,
    DifferentialPrivacy,
    LocalELBO,
    LocalResult,
    NaturalGradient,
    PowerEP,
    SolverDefaults,
    StochasticEP,
    StochasticNaturalGradient,
)
from numpyro_pvi.wire import KeyData, Message, decode, digest_of, encode

counts = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting (the extra `privacy`) is not installed"
)
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
Y = RNG.normal(1.0, 1.0, 6)
LABELS = ["a", "a", "b", "b", "c", "c"]


def location(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def make(solver, schedule=None, guide=AutoMultivariateNormal, model=location, **options):
    return PVI(Partition(model, "data", LABELS), guide(model), solver=solver, schedule=schedule, **options)


def run(pvi, rounds=2, y=Y, **options):
    return pvi.run(KEY, rounds, y, progress_bar=False, **options)


def arrays(tree):
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x) for x in leaves]


def same(one, other):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(arrays(one), arrays(other), strict=True))


# ----------------------------------------------------------------------------------------------- without noise it is plain

PLAIN = {
    "group": (NaturalGradient(), "group"),
    "group by steps": (LocalELBO(num_steps=3), "group"),
    "row": (LocalELBO(num_steps=3, curvature="steps", num_particles=2), "row"),
}


@pytest.mark.parametrize(
    ("name", "clip"), [("group", math.inf), ("group", 1e9), ("group by steps", 1e9), ("row", math.inf), ("row", 1e9)]
)
def test_without_noise_and_clipping_a_fit_is_the_plain_solvers(name, clip):
    solver, level = PLAIN[name]
    plain, own = (run(make(s), 1) for s in (solver, DifferentialPrivacy(solver, 0.0, clip, level)))
    assert np.isnan(own.losses).all() and own.epsilon == math.inf
    for n, x in plain.params.items():
        np.testing.assert_allclose(own.params[n], x, rtol=1e-12 if x.dtype == np.float64 else 1e-5)


def test_clipping_alone_is_seen():
    plain, own = (run(make(s), 1) for s in (NaturalGradient(), DifferentialPrivacy(NaturalGradient(), 0.0, 1e-3)))
    assert abs(float(own.params["auto_loc"][0] - plain.params["auto_loc"][0])) > 1e-2


@pytest.mark.parametrize("level", ["group", "row"])
def test_so_it_is_where_q_is_a_product_of_families(level):
    solver = LocalELBO(optax.sgd(0.3), num_steps=3)
    plain, own = (
        run(make(s, guide=AutoExponentialFamily), 1) for s in (solver, DifferentialPrivacy(solver, 0.0, 1e9, level))
    )
    for n, x in plain.params.items():
        np.testing.assert_allclose(own.params[n], x, rtol=1e-11 if x.dtype == np.float64 else 1e-5)


# -------------------------------------------------------------------------------------------------- whitened coordinates


def points():
    """Families with a member each and a change of natural parameters."""
    rng = np.random.default_rng(1)
    root = np.linalg.cholesky(np.cov(rng.normal(size=(3, 9))))
    full, mean_field = MultivariateNormalFamily(3), NormalFamily(3)
    bend = rng.normal(size=(3, 3))
    yield (
        full,
        full.from_loc_covariance(jnp.arange(3.0), jnp.asarray(root @ root.T)),
        full.natural(jnp.asarray(rng.normal(size=3)), jnp.asarray(bend + bend.T)),
    )
    yield (
        mean_field,
        mean_field.from_loc_sd(jnp.arange(3.0), jnp.array([0.1, 1.0, 9.0])),
        mean_field.natural(jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=3))),
    )


def test_whitened_length_is_that_in_the_fisher_metric_of_q():
    for family, q, change in points():
        white = whitening(family, q)
        x = white.coordinates(change)
        assert x.shape == (white.size,)
        length = float(inner(change, family.fisher_product(q, change)))
        tolerance = 1e-10 if x.dtype == np.float64 else 1e-3
        np.testing.assert_allclose(float(x @ x), length, rtol=tolerance)
        for a, b in zip(jax.tree.leaves(white.change(x)), jax.tree.leaves(change), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------- what a release can move


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows ``N(y_n; theta, 1)`` of one group in one dimension, at points; a stand-in for a group's factor."""

    y: jax.Array
    family = NormalFamily(1)
    quadratic, noisy, pointwise, fresh_batches = False, True, True, False

    @property
    def num_rows(self):
        return len(self.y)

    max_rows = num_rows

    def expected(self, moments):
        raise NotImplementedError

    message = step = at_rows_draws = expected

    def derivatives(self, points, rows=None, hessian=False, key=None):
        y = self.y if rows is None else self.y[rows]
        gap = y - points
        return Derivatives(-0.5 * (gap**2).sum(-1), gap.sum(-1)[:, None], None)


class Exact(SolverDefaults):
    """Gives the group's exact site in one visit."""

    def init(self, family, dtype):
        return ()

    def check(self, structure, full, where):
        pass

    def solve(self, factor, cavity, site, state, key, start=None, guarded=False):
        new = factor.family.natural(jnp.sum(factor.y)[None], jnp.full((1,), float(len(factor.y))))
        return LocalResult(new, state, jnp.int32(0), jnp.array(True))


PRIOR = NormalFamily(1).from_loc_sd(jnp.zeros(1), jnp.ones(1))
CALM, WILD, OTHER = jnp.array([0.1, -0.2, 0.3]), jnp.array([1e3, 4e2, 3e3]), jnp.array([-5e5, 2e3, 1.0])


def released(solver, y, key=KEY):
    """Whitened coordinates of a group's change by one visit, before what is made of it."""
    site = jax.tree.map(jnp.zeros_like, PRIOR)
    change = solver.solver.solve(Rows(y), PRIOR, site, (), key).site - site
    return solver._released(whitening(NormalFamily(1), PRIOR).coordinates(change), key)


def group_gap(solver, *data):
    """Largest distance of what is released of neighbouring groups on the same noise."""
    found = [released(solver, y) for y in data]
    return max(float(jnp.linalg.norm(a - b)) for a in found for b in found)


def row_gap(solver, *data):
    """The same of the sum of rows that a step hears, whitened: the first row is replaced."""
    moments = NormalFamily(1).moments(PRIOR)
    at = jnp.array([[0.3], [-0.3]])

    def heard(y):
        own = privacy.PrivateRows(
            NormalFamily(1), Rows(y), solver.clip, solver.noise_multiplier * solver.sensitivity, moments, None
        )
        return jnp.mean(own.derivatives(at, None, key=KEY).gradient * moments.scale, axis=0)

    found = [heard(y) for y in data]
    return max(float(jnp.linalg.norm(a - b)) for a in found for b in found)


GROUP = DifferentialPrivacy(Exact(), 1.0, 0.5) if importlib.util.find_spec("dp_accounting") else None
ROW = DifferentialPrivacy(LocalELBO(), 1.0, 0.5, level="row") if GROUP else None
NEIGHBOURS = [jnp.array([x, 0.2, -0.1]) for x in (0.1, 1e6, -1e5)]


@counts
def test_neighbouring_groups_and_rows_move_a_release_by_no_more_than_the_sensitivity(monkeypatch):
    for gap, solver, data in ((group_gap, GROUP, (CALM, WILD, OTHER)), (row_gap, ROW, NEIGHBOURS)):
        found = gap(solver, *data)
        assert found <= solver.sensitivity * (1 + 1e-5)
        # The bound is reached, so that no smaller one would do.
        assert found > 0.9 * solver.sensitivity
        removed = gap(solver, data[1], jnp.zeros_like(data[1]) if gap is row_gap else data[1] * 0)
        assert removed <= solver.sensitivity
    with monkeypatch.context() as patch:
        patch.setattr(privacy, "clipped", lambda x, clip: x)
        assert group_gap(GROUP, CALM, WILD, OTHER) > GROUP.sensitivity
        assert row_gap(ROW, *NEIGHBOURS) > ROW.sensitivity


def test_a_group_without_rows_moves_a_release_by_the_clip():
    for x in (jnp.zeros(2), jnp.array([3.0, 4.0]), jnp.array([1e30, -1e30]), jnp.array([jnp.nan, 1.0])):
        found = privacy.clipped(jnp.asarray(x, jnp.result_type(float)), 0.5)
        assert float(jnp.linalg.norm(found)) <= 0.5 * (1 + 1e-6)
    np.testing.assert_allclose(privacy.clipped(jnp.array([0.1, 0.2]), 0.5), [0.1, 0.2])


def spread_of(solver, number=2000):
    """The sd of what is released of a group that says nothing, by its coordinates."""
    return np.std(jax.vmap(lambda key: released(solver, jnp.zeros(0), key))(jax.random.split(KEY, number)), axis=0)


def has_its_noise(solver):
    """Whether the noise is of the size that is counted: a chi-square test that errs once in 10,000 times."""
    number = 2000
    found = number * (spread_of(solver, number) / (solver.noise_multiplier * solver.sensitivity)) ** 2
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], number)
    return bool(np.all((low < found) & (found < high)))


@counts
def test_noise_is_of_the_size_that_is_counted(monkeypatch):
    assert has_its_noise(GROUP)

    def after(self, x, key):
        noisy = x + self.noise_multiplier * self.sensitivity * jax.random.normal(key, x.shape, x.dtype)
        return privacy.clipped(noisy, self.clip)

    def halved(self, x, key):
        return privacy.clipped(x, self.clip) + 0.5 * self.noise_multiplier * self.sensitivity * jax.random.normal(
            key, x.shape, x.dtype
        )

    for fault in (after, halved):
        monkeypatch.setattr(DifferentialPrivacy, "_released", fault)
        assert not has_its_noise(GROUP)


@counts
def test_a_visit_releases_what_was_noised_and_a_row_step_has_its_noise():
    """Through ``solve``: the site's change is the released one, halved only where q would not be normalisable."""
    site = jax.tree.map(jnp.zeros_like, PRIOR)
    solver = DifferentialPrivacy(Exact(), 0.05, 0.5)
    state = solver.init(NormalFamily(1), jnp.result_type(float))
    found = solver.solve(Rows(WILD), PRIOR, site, state, KEY)
    white = whitening(NormalFamily(1), PRIOR)
    wanted = released(solver, WILD, jax.random.fold_in(KEY, privacy._NOISE))
    np.testing.assert_allclose(white.coordinates(found.site), wanted, rtol=1e-5)
    assert int(found.state.releases) == 1 and bool(found.moved)

    rows, moments = Rows(jnp.zeros(3)), NormalFamily(1).moments(PRIOR)
    at = jnp.zeros((2, 1))

    def heard(key):
        return jnp.mean(
            privacy.PrivateRows(NormalFamily(1), rows, 0.5, 1.0, moments, None).derivatives(at, None, key=key).gradient
        )

    many = np.asarray(jax.vmap(heard)(jax.random.split(KEY, 2000)))
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], 2000)
    assert low < np.sum(many**2) < high


# ---------------------------------------------------------------------------------------------------------- what it adds up to


def by_hand(noise, releases, delta):
    """Epsilon of Gaussian mechanisms by Renyi's divergence: ``T a / (2 s^2)``, and the conversion of Canonne et al., prop. 12."""
    order = np.concatenate([1 + np.arange(1, 400) / 100, np.arange(5, 2000)])
    divergence = releases * order / (2 * noise**2)
    return float(np.min(divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)))


def analytic(noise, delta):
    """Epsilon of one Gaussian mechanism, exactly (Balle and Wang, theorem 8), by bisection."""

    def excess(epsilon):
        a, b = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
        return stats.norm.cdf(a) - np.exp(epsilon + stats.norm.logcdf(b)) - delta

    low, high = 0.0, 200.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@counts
@pytest.mark.parametrize("noise", [0.7, 2.0, 20.0])
def test_epsilon_is_that_of_independent_accounts(noise):
    solver = DifferentialPrivacy(NaturalGradient(), noise, 1.0)
    for visits in (1, 7):
        # The library's orders are fewer than these.
        assert 0.997 <= solver.epsilon(visits) / by_hand(noise, visits, 1e-5) <= 1.03
        # T releases are one of a noise that is smaller by the root of T.
        exact = analytic(noise / math.sqrt(visits), 1e-5)
        assert exact <= solver.epsilon(visits) <= 1.15 * exact
    assert solver.epsilon(0) == 0.0
    steps = DifferentialPrivacy(LocalELBO(num_steps=7), noise, 1.0, level="row")
    assert steps.epsilon(1) == solver.epsilon(7)


@counts
def test_sampled_batches_cost_less_and_whole_ones_the_same():
    batches = DifferentialPrivacy(LocalELBO(num_steps=4, batch_size=5), 2.0, 1.0, level="row")
    whole = DifferentialPrivacy(LocalELBO(num_steps=4), 2.0, 1.0, level="row")
    assert batches.epsilon(3, 5) == whole.epsilon(3)
    assert batches.epsilon(3, 500) < batches.epsilon(3, 50) < whole.epsilon(3)
    passes = DifferentialPrivacy(LocalELBO(epochs=2, batch_size=5), 2.0, 1.0, level="row")
    assert passes.epsilon(1, 50) == DifferentialPrivacy(LocalELBO(num_steps=20, batch_size=5), 2.0, 1.0, "row").epsilon(
        1, 50
    )
    with pytest.raises(PVIError, match="Give num_rows"):
        batches.epsilon(1)


def test_a_group_that_is_removed_changes_its_site_back():
    """From a site that says something, data that say nothing take it back: as far the other way as wild data go on."""
    noise, back = DifferentialPrivacy(NaturalGradient(), 0.0, 0.5, relation="remove"), []
    for change in (7.0, -7.0):
        back.append(privacy.clipped(jnp.array([change, 0.0]), noise.clip))
    assert float(jnp.linalg.norm(back[0] - back[1])) <= noise.sensitivity
    assert DifferentialPrivacy(LocalELBO(), 0.0, 0.5, "row", "remove").sensitivity == 0.5


def standardised(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", 6) as i:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=(y - jnp.mean(y))[i])


@pytest.mark.parametrize("level", ["group", "row"])
def test_rows_that_say_something_of_others_are_refused(level):
    solver = DifferentialPrivacy(LocalELBO() if level == "row" else NaturalGradient(), 0.0, 1.0, level)
    pvi = PVI(Partition(standardised, "data", list("aabbcc")), AutoMultivariateNormal(standardised), solver=solver)
    with pytest.raises(PVIError, match="evaluated by 'index'"):
        pvi.init(KEY, Y)


@counts
def test_the_least_noise_that_keeps_to_a_budget():
    solver = DifferentialPrivacy.calibrated(NaturalGradient(), epsilon=2.0, clip=1.0, rounds=10)
    assert 1.98 <= solver.epsilon(10) <= 2.0 < solver.epsilon(11)
    # Passes over a group of 11 take a step more than of 10, and a batch is a larger share of one of 5: the worst of all counts.
    passes = LocalELBO(epochs=1, batch_size=10)
    budget = {"epsilon": 2.0, "clip": 1.0, "rounds": 5, "level": "row"}
    solver = DifferentialPrivacy.calibrated(passes, **budget, num_rows=[10, 11, 40])
    assert 1.98 <= max(solver.epsilon(5, size) for size in (10, 11, 40)) <= 2.0
    assert DifferentialPrivacy.calibrated(passes, **budget, num_rows=10).epsilon(5, 11) > 2.0
    with pytest.raises(PVIError, match="no noise multiplier"):
        DifferentialPrivacy.calibrated(NaturalGradient(), epsilon=1e-6, clip=1.0, rounds=10**6)


# ------------------------------------------------------------------------------------------------------------- membership


def epsilon_from_below(solver, trials=100_000, risk=1e-4):
    """What a test of membership shows epsilon to be at least: who releases, WILD's owner or OTHER's?

    The attacker projects what is released on the line between the two and takes the best of some thresholds; rates of the
    two kinds of error are bounded by Clopper and Pearson, all thresholds together wrong with a chance of at most ``risk``.
    """
    keys = jax.random.split(KEY, 2 * trials)

    def draw(y, keys):
        return np.asarray(jax.jit(jax.vmap(lambda key: released(solver, y, key)))(keys))

    quiet = dataclasses.replace(solver, noise_multiplier=0.0)
    direction = np.asarray(released(quiet, WILD) - released(quiet, OTHER))
    one, other = (
        draw(y, k) @ direction / np.linalg.norm(direction) for y, k in ((WILD, keys[:trials]), (OTHER, keys[trials:]))
    )
    # Thresholds are fixed beforehand, in sds of the counted noise.
    thresholds = np.linspace(-1.0, 4.0, 11) * solver.noise_multiplier * solver.sensitivity
    each, best = risk / (2 * len(thresholds)), 0.0
    for threshold in thresholds:
        hits, alarms = np.sum(one > threshold), np.sum(other > threshold)
        low = stats.beta.ppf(each, hits, trials - hits + 1) if hits else 0.0
        high = stats.beta.ppf(1 - each, alarms + 1, trials - alarms) if alarms < trials else 1.0
        if low > solver.delta:
            best = max(best, math.log((low - solver.delta) / high))
    return best


@counts
def test_a_membership_test_bounds_epsilon_from_below(monkeypatch):
    """Wrong once in 10,000 times where the claim is true; missing or halved noise is found."""
    claim, found = GROUP.epsilon(1), epsilon_from_below(GROUP)
    assert 0.4 * claim < found < claim

    def fault(scale):
        def faulty(self, x, key):
            noise = scale * self.noise_multiplier * self.sensitivity * jax.random.normal(key, x.shape, x.dtype)
            return privacy.clipped(x, self.clip) + noise

        return faulty

    for scale in (0.0, 0.4):
        monkeypatch.setattr(DifferentialPrivacy, "_released", fault(scale))
        assert epsilon_from_below(GROUP) > claim


# ---------------------------------------------------------------------------------------- nobody but visits looks at rows


@dataclasses.dataclass(frozen=True)
class Deaf(SolverDefaults):
    """Says what its group is asked to say whatever its rows are: nothing."""

    def init(self, family, dtype):
        return ()

    def check(self, structure, full, where):
        pass

    def check_families(self):
        pass

    def solve(self, factor, cavity, site, state, key, start=None, guarded=False):
        return LocalResult(site, state, jnp.int32(0), jnp.array(True))


@dataclasses.dataclass(frozen=True)
class Telling(Deaf):
    """Remembers what its group's rows say at q."""

    rereads = True

    def init(self, family, dtype):
        return jnp.zeros((), dtype)

    def solve(self, factor, cavity, site, state, key, start=None, guarded=False):
        value = factor.expected(factor.family.moments(cavity + site)).value
        return LocalResult(site, value, jnp.int32(0), jnp.array(True))


SCHEDULES = {
    "Synchronous": Synchronous(),
    "Sequential": Sequential(),
    "StochasticSubset": StochasticSubset(2),
    "Asynchronous": Asynchronous(1.0, loss_rate=0.3),
    "Committee": Committee(max_visits=2),
    "Decentralized": Decentralized(np.ones((3, 3)) - np.eye(3)),
    "Streaming": Streaming(visits=2),
}
# The other pairs have the same problem under the same schedules.
_QUICK = {"Synchronous", "StochasticSubset"}
PAIRS = [
    *((schedule, AutoMultivariateNormal) for schedule in SCHEDULES),
    *(
        pytest.param(schedule, guide, marks=[] if schedule in _QUICK else pytest.mark.slow)
        for guide in (AutoExponentialFamily, AutoDiagonalNormal)
        for schedule in SCHEDULES
    ),
]
QUIET = 0.2
OTHERS = np.array([40.0, -3.0, 1e3, 0.0, 0.0, -70.0])


def deaf(schedule, guide):
    return make(DifferentialPrivacy(Deaf(), QUIET, 1.0), SCHEDULES[schedule], guide)


@counts
@pytest.mark.parametrize(("schedule", "guide"), PAIRS)
def test_where_visits_are_deaf_nothing_depends_on_the_rows(schedule, guide):
    """All numbers of the state, of info and of the trace: bit for bit; and prior + sum of sites is q (law 1)."""
    pvi = deaf(schedule, guide)
    one, other = run(pvi), run(pvi, y=OTHERS)
    assert same(one.state, other.state) and str(one.info) == str(other.info) and one.message == other.message
    assert np.isnan(one.losses).all() and np.isnan(other.losses).all()
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one.trace.move, other.trace.move, strict=True))
    assert float(one.info.total_move) > 0 or schedule in ("Committee", "Streaming")
    total = pvi.posterior(one.state)["theta"]
    natural = posterior(one.state.prior, one.state.sites)
    own = one.state.plan.family.to_distribution(natural)
    own = own["theta"] if isinstance(own, dict) else own
    np.testing.assert_allclose(np.squeeze(own.mean), np.squeeze(total.mean), rtol=1e-5)
    assert one.epsilon == max(one.info.epsilons.values()) > 0


@counts
def test_a_round_that_looks_is_noticed(monkeypatch):
    monkeypatch.setattr(_factors.Factors, "blind", False)
    monkeypatch.setattr(_product_factors.ProductFactors, "blind", False)
    for guide in (AutoMultivariateNormal, AutoExponentialFamily):
        pvi = deaf("Synchronous", guide)
        one, other = run(pvi), run(pvi, y=OTHERS)
        assert not (same(one.state, other.state) and np.isnan(one.losses).all())


@counts
def test_clients_are_visited_and_never_asked_for_a_look():
    """Where every group is behind messages: the same numbers, and no question but visits."""
    solver = DifferentialPrivacy(LocalELBO(num_steps=2, batch_size=1), 1.0, 1.0, level="row")
    here, there = (run(make(solver, runtime=runtime)) for runtime in (None, InProcess()))
    np.testing.assert_allclose(there.params["auto_loc"], here.params["auto_loc"], rtol=1e-4)
    traffic = there.info.traffic
    assert (traffic.looks, traffic.visits) == (0, 2) and there.epsilon == here.epsilon


# What clients describe in place of their rows.
PUBLIC = np.array([0.5, -1.5, 2.0, 0.7])
# Programs of all these clients.
KNOWN = {}


class Heard:
    """A transport that keeps all that is said to clients and by them."""

    def __init__(self, inner, said):
        self._inner, self._said = inner, said

    def send(self, place, data):
        self._said.append(("asked", place, data))
        self._inner.send(place, data)

    def receive(self, wait):
        found = self._inner.receive(wait)
        self._said.append(("said", *(found or ())))
        return found

    def close(self):
        self._inner.close()


def rowless(solver, y=Y, model=location, kind=Client, guide=AutoMultivariateNormal, **options):
    """A fit whose clients have their own rows, and all that is said in it."""
    said, mine, kind_of_q = [], np.array(LABELS), guide
    guide = kind_of_q(model)
    clients = [kind(model, guide, c, y[mine == c], solver=solver, like=PUBLIC, **options) for c in "abc"]
    runtime = InProcess(clients=clients, through=lambda inner: Heard(inner, said))
    for client in clients:
        client.compile_with(KNOWN)
    return PVI(model, kind_of_q(model), solver=solver, runtime=runtime), said


def sly(y):
    """Quadratic at calm rows, which only their values show."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(theta + jnp.where(y > 30.0, theta**2, 0.0), 1.0), obs=y)


def slope(y):
    """Seen through an affine predictor, which is proved where it is found; rows of zeros do not show it."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("won", dist.Bernoulli(logits=theta * y), obs=jnp.ones(len(y)))


class Open(Client):
    """Planted: describes its own rows."""

    def _shown(self, key):
        return self._begin(key)


def talk(solver, monkeypatch, y, rounds=2, **options):
    """All bytes of a fit, and its result; without rounds, of its beginning."""
    monkeypatch.setattr(_exchange.secrets, "token_hex", lambda size: "0" * 2 * size)
    pvi, said = rowless(solver, y, **options)
    return said, pvi.run(KEY, rounds, progress_bar=False) if rounds else pvi.init(KEY)


DESCRIBED = {
    "found": (sly, OTHERS, AutoMultivariateNormal),
    "hidden": (slope, 0.0 * OTHERS, AutoMultivariateNormal),
    "families": (sly, OTHERS, AutoExponentialFamily),
    "location": (location, OTHERS, AutoMultivariateNormal),
}


@counts
@pytest.mark.parametrize("name", [*list(DESCRIBED)[:3], pytest.param("location", marks=pytest.mark.slow)])
def test_clients_with_rows_of_their_own_say_nothing_of_them_but_by_visits(name, monkeypatch):
    """Every byte in both directions, from the first question to the last: the same whatever the rows are."""
    solver, (model, others, guide) = DifferentialPrivacy(Deaf(), QUIET, 1.0), DESCRIBED[name]
    (one, here), (other, there) = (talk(solver, monkeypatch, y, model=model, guide=guide) for y in (Y, others))
    assert len(one) > 12 and one == other
    assert same(here.state, there.state) and here.epsilon == there.epsilon == solver.epsilon(2)
    how = {"model": model, "kind": Open, "guide": guide}
    (one, _), (other, _) = (talk(solver, monkeypatch, y, 0, **how) for y in (Y, others))
    assert one != other


@counts
@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoExponentialFamily])
def test_clients_with_rows_of_their_own_fit_and_count_as_one_process(guide):
    solver = DifferentialPrivacy(NaturalGradient(), 1.0, 1.0)
    pvi, _ = rowless(solver, guide=guide)
    found, wanted = pvi.run(KEY, 2, progress_bar=False), run(make(solver, guide=guide))
    for n, x in wanted.params.items():
        np.testing.assert_allclose(found.params[n], x, rtol=1e-10 if x.dtype == np.float64 else 1e-4)
    assert found.epsilon == wanted.epsilon == solver.epsilon(2) and found.info.epsilons == wanted.info.epsilons
    assert found.info.traffic.looks == 0 and np.isnan(found.losses).all()


@counts
def test_with_a_secret_the_server_cannot_make_the_noise_again():
    """What is released of rows that say nothing is the noise: another by every secret."""
    solver = DifferentialPrivacy(Deaf(), QUIET, 1.0)
    open_, one, other = (
        rowless(solver, **options)[0].run(KEY, 1, progress_bar=False)
        for options in ({}, *({"secret": bytes([i]) * 32} for i in (1, 2)))
    )
    assert one.epsilon == open_.epsilon == solver.epsilon(1)
    sites = [np.ravel(x.state.sites.groups.precision_mean) for x in (open_, one, other)]
    assert min(np.abs(a - b).min() for a, b in itertools.combinations(sites, 2)) > 1e-6


def test_the_noise_is_of_the_question_and_not_of_the_key_alone():
    """A server that asks twice by one key would else take the noise out of the difference."""
    solver = DifferentialPrivacy(NaturalGradient(), 0.0, math.inf)
    client = Client(
        location, AutoMultivariateNormal(location), "a", Y[:2], solver=solver, like=PUBLIC, secret=b"x" * 16
    )
    key = KeyData(np.asarray(jax.random.key_data(KEY)), str(jax.random.key_impl(KEY)))
    asked = {"label": "a", "how": {}, "cavity": (np.zeros(1),), "site": (np.ones(1),), "digest": b"1" * 16}
    asked |= {"memory": (), "rest": (key, (), (), ()), "run": "now", "sequence": 7}

    def by(memory=(), **others):
        return tuple(np.asarray(jax.random.key_data(client._key(key, asked | others, memory))))

    assert by() == by(sequence=8, run="later") and by() != by(memory=(np.ones(3),))
    questions = [by(), by(cavity=(np.ones(1),)), by(site=(np.zeros(1),)), by(digest=b"2" * 16), by(how={"a": 1})]
    assert len(set(questions)) == 5 and tuple(np.asarray(jax.random.key_data(KEY))) not in questions
    with pytest.raises(PVIError, match="expected secret= to be 16 to 64 bytes"):
        Client(location, AutoMultivariateNormal(location), "a", Y[:2], solver=solver, like=PUBLIC, secret=b"short")
    with pytest.raises(PVIError, match="secret= is for solver=DifferentialPrivacy.*, and this is NaturalGradient"):
        Client(location, AutoMultivariateNormal(location), "a", Y[:2], secret=b"x" * 16)
    with pytest.raises(
        PVIError, match=r"like= has, but for the number of rows, the shapes \[\[2\]\], and its rows \[\[\]\]"
    ):
        Client(location, AutoMultivariateNormal(location), "a", Y[:2], solver=solver, like=np.zeros((3, 2)))
    with pytest.raises(PVIError, match="neither noised nor counted. Pass like=, the model's arguments with rows that"):
        Client(location, AutoMultivariateNormal(location), "a", Y[:2], solver=solver)


def test_memory_that_is_not_what_its_digest_says_is_refused():
    """A server that sends another would have a client draw for it by the key of the first."""
    client, sent = Respondent("a", None, {}), (np.ones(1),)
    client._memory, client._answers = (np.zeros(1),), SimpleNamespace(site=())
    asked = {"memory": sent, "cavity": (), "site": (), "rest": ((), (), (), (), ())}
    with pytest.raises(PVIError, match="is not the one that the digest beside it is of"):
        client._visit(asked | {"digest": b"1" * 8})
    with pytest.raises(PVIError, match="a visit needs a random key"):
        client._visit(asked | {"digest": digest_of(sent)})


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, FloatingPointError])
def test_of_an_error_a_private_client_tells_the_kind_alone(kind, monkeypatch, caplog):
    """Whatever has gone wrong, and wherever; planted: one that is not private, whose errors are told in full."""
    solver = DifferentialPrivacy(NaturalGradient(), 0.0, 1.0)
    guide = AutoMultivariateNormal(location)
    private = Client(location, guide, "a", Y[:2], solver=solver, like=PUBLIC)
    key = KeyData(np.asarray(jax.random.key_data(KEY)), str(jax.random.key_impl(KEY)))

    def fail(*_):
        raise kind("row 3 is 41.5")

    def why(client):
        asked = Message("hello?", {"run": "1" * 16, "sequence": 1, "label": "a"})
        return decode(client.answer(encode(asked))).fields["why"]

    monkeypatch.setattr(Respondent, "_reply", fail)
    assert kind.__name__ in why(private) and "41.5" not in why(private)
    if kind is ValueError:
        assert why(Client(location, guide, "a", Y[:2])) == "row 3 is 41.5"
    # In sums nothing answers for it: what carries an error out of its process would carry its words.
    for solver_, said in ((solver, rf"cannot answer \({kind.__name__}\)"), (NaturalGradient(), "41.5")):
        summand = Summand(
            location, guide, "a", Y[:2], solver=solver_, **({"like": PUBLIC} if solver_ is solver else {})
        )
        with monkeypatch.context() as patched, pytest.raises((PVIError, kind), match=said) as caught:
            patched.setattr(Summand, "_contributed", fail)
            summand.contribute(b"", 1)
        assert ("41.5" in str(caught.value)) == (solver_ is not solver)
    monkeypatch.setattr(Client, "_begin", fail)
    with pytest.raises(PVIError, match=rf"cannot be fitted \({kind.__name__}\)") as caught:
        private._privately(key)
    assert "41.5" not in str(caught.value) and "41.5" in caplog.text


def test_what_is_wrong_with_rows_is_not_told(caplog):
    solver = DifferentialPrivacy(NaturalGradient(), 0.0, 1.0)
    pvi, said = rowless(solver, np.array([0.1, np.nan, *Y[2:]]))
    with pytest.raises(ClientError, match="its rows cannot be fitted .DataError.: the log in its own process"):
        pvi.init(KEY)
    assert not any(b"NaN" in data for _, _, data in said)
    assert "NaN" in caplog.text or "not finite" in caplog.text


# ----------------------------------------------------------------------------------------------------- heard in sums only


class Overheard(InMemorySums):
    """Sums that keep all that is asked and what comes of it; by number of the visit, whose answer is lost ("" for everybody's)."""

    def __init__(self, clients, lost=()):
        super().__init__(clients)
        self.lost, self.asked, self.seen, self.alone = dict(lost), 0, [], []

    def open(self):
        return Heard(super().open(), self.alone)

    def sum(self, question):
        self.asked += decode(question).fields["how"]["ask"] == "visit"
        said = {place: c.contribute(question, self.capacity) for place, c in enumerate(self.clients)}
        lost = self.lost.get(self.asked)
        there = () if lost == "" else [i for i in said if self.labels[i] != lost]
        found = Summed(np.sum([said[i] for i in there], axis=0), tuple(there)) if there else None
        self.seen.append((question, found, said))
        return found


def in_sums(solver, y=Y, lost=(), model=location, kind=Summand, secrets=None):
    """A fit whose clients keep their sites, and its sums."""
    mine, guide, clients = np.array(LABELS), AutoMultivariateNormal(model), []
    for c in "abc":
        given = {} if secrets is None else {"secret": secrets[c]}
        given |= {"like": PUBLIC} if solver.private else {}
        clients.append(kind(model, guide, c, y[mine == c], solver=solver, **given))
        clients[-1].compile_with(KNOWN)
    sums = Overheard(clients, lost)
    how = {"schedule": Synchronous(damping=0.5), "runtime": SummedClients(sums=sums)}
    return PVI(model, AutoMultivariateNormal(model), solver=solver, **how), sums


@pytest.mark.slow
def test_sums_without_noise_and_clipping_are_the_plain_solvers():
    plain = run(make(NaturalGradient(), Synchronous(damping=0.5), init_sites="prior"), 3)
    found = in_sums(DifferentialPrivacy(NaturalGradient(), 0.0, 1e9))[0].run(KEY, 3, progress_bar=False)
    for n, x in plain.params.items():
        np.testing.assert_allclose(found.params[n], x, rtol=1e-9 if x.dtype == np.float64 else 1e-4)
    assert np.isnan(found.losses).all() and found.epsilon == math.inf


def squared_length(question, numbers, capacity):
    """Of what a sum or a client says, a change of natural parameters, in the Fisher metric of q; one latent, by hand."""
    fields = decode(question).fields
    units, step = np.concatenate([np.ravel(x) for x in lattice(fields["q"])]), _step(fields["reach"], capacity)
    h, precision = numbers[2:] * step * units
    m, v = (float(x.squeeze()) for x in (fields["q"][0] / fields["q"][1][0], 1 / fields["q"][1]))
    # Of T = (theta, -theta^2 / 2): its covariance.
    return h * h * v - 2 * h * precision * m * v + precision * precision * (v * v / 2 + m * m * v)


def noise_of_sums(solver, rounds=40, **options):
    """Of clients who say nothing: chi-square of the sums' noise, and of single clients', each in its counted size."""
    pvi, sums = in_sums(solver, **options)
    pvi.run(KEY, rounds, progress_bar=False)
    size = (solver.noise_multiplier * solver.sensitivity) ** 2
    seen = [x for x in sums.seen if decode(x[0]).fields["how"]["ask"] == "visit"]
    whole = sum(squared_length(question, found.numbers, sums.capacity) for question, found, _ in seen)
    one = [squared_length(question, x, sums.capacity) for question, _, said in seen for x in said.values()]
    return whole / (len(sums.clients) * size), sum(one) / size


def right(chi, freedom):
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], freedom)
    return bool(low < chi < high)


@counts
@pytest.mark.parametrize("secret", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["open", "secret"])
def test_every_client_adds_all_of_its_noise_and_the_sum_has_that_of_them_all(secret):
    """M times one client's variance, so that what anybody adds or knows besides takes off nothing of it."""
    options = {"secrets": {c: c.encode() * 16 for c in "abc"}} if secret else {}
    whole, one = noise_of_sums(DifferentialPrivacy(Deaf(), QUIET, 0.2), **options)
    assert right(whole, 2 * 40) and right(one, 2 * 3 * 40)


@counts
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shared out", "alike"])
def test_noise_that_clients_share_out_or_draw_alike_is_seen(fault, monkeypatch):
    """The law has teeth: each adds its part of one client's noise, or all add the same."""
    released = DifferentialPrivacy._released

    def shared(self, x, key):
        own = privacy.clipped(x, self.clip)
        return own + (released(self, x, key) - own) / math.sqrt(3)

    KNOWN.clear()
    if fault == "shared out":
        monkeypatch.setattr(DifferentialPrivacy, "_released", shared)
    else:
        monkeypatch.setattr(Summand, "_own_key", lambda self, key, fields: jax.random.key(fields["sequence"]))
    whole, one = noise_of_sums(DifferentialPrivacy(Deaf(), QUIET, 0.2))
    KNOWN.clear()
    assert not right(whole, 2 * 40)
    assert right(one, 2 * 3 * 40) is (fault == "alike")


def test_noise_that_is_shared_out_is_not_counted_by_the_sum():
    """The counterexample of the page on privacy: the same sums, the same differences of noises, one client's data replaced.

    Given what is seen, the second sum moves by more than the sensitivity, since nobody sees the noise that sites have taken in.
    """
    rho, clip, count, rng = 0.5, 1.0, 10, np.random.default_rng(0)
    aims, apart = 0.1 * rng.normal(size=count), rng.normal(size=count)
    apart, total = apart - apart.mean(), 0.3

    def second(first):
        own = np.append(first, aims[1:])
        change = np.clip(own, -clip, clip)
        # The noise that makes the first sum what was seen.
        noise = (total - change.sum()) / count + 0.1 * apart
        return np.clip(own - rho * (change + noise), -clip, clip).sum()

    moved = second(100.0) - second(-100.0)
    np.testing.assert_allclose(moved, 2 * clip * (1 + rho * (count - 1) / count), rtol=1e-12)


class Loose(Summand):
    """Planted: describes its own rows."""

    def _shown(self, key):
        return self._begin(key)


def overheard(solver, y, kind, rounds, monkeypatch, model):
    """All that is said alone, all questions and sums of a fit, and its result."""
    monkeypatch.setattr(_exchange.secrets, "token_hex", lambda size: "0" * 2 * size)
    pvi, sums = in_sums(solver, y, model=model, kind=kind)
    result = pvi.run(KEY, rounds, progress_bar=False) if rounds else pvi.init(KEY)
    return sums.alone, [(question, total.numbers.tobytes(), total.who) for question, total, _ in sums.seen], result


@counts
@pytest.mark.parametrize("model", [location, pytest.param(sly, marks=pytest.mark.slow)], ids=["location", "sly"])
def test_the_servers_view_of_sums_depends_on_no_row_but_by_visits(model, monkeypatch):
    """The same whatever the rows are, where visits are deaf; planted: clients that describe their own rows."""
    solver = DifferentialPrivacy(Deaf(), QUIET, 0.2)
    found = [overheard(solver, y, Summand, 2, monkeypatch, model) for y in (Y, OTHERS)]
    (alone, heard, one), (others, again, other) = found
    assert len(alone) > 12 and alone == others and len(heard) == 2 and heard == again
    assert same(one.state, other.state) and one.epsilon == other.epsilon == solver.epsilon(2)
    if model is sly:
        loose, _, _ = overheard(solver, OTHERS, Loose, 0, monkeypatch, model)
        assert loose[: len(alone)] != alone[: len(loose)]


@pytest.fixture(scope="module")
def added():
    """A fit of sums whose second is without a client, and whose third did not come about."""
    pytest.importorskip("dp_accounting", reason="dp-accounting (the extra `privacy`) is not installed")
    solver = DifferentialPrivacy(NaturalGradient(), 2.0, 1.0)
    pvi, sums = in_sums(solver, lost={2: "b", 3: ""})
    return solver, pvi, sums, pvi.run(KEY, 3, progress_bar=False)


def test_what_was_asked_for_counts_whether_or_not_it_was_absorbed(added, monkeypatch):
    """A client that drops out has made its release, and so have all where no sum came about and it is asked again."""
    solver, pvi, sums, found = added
    assert sums.asked == 4 and found.epsilon == solver.epsilon(4)
    assert found.info.epsilons == {EVERYONE: found.epsilon}
    assert [int(c._memory.releases) for c in sums.clients] == [4, 4, 4]
    again = pvi.run(KEY, 1, init_state=found.state, progress_bar=False)
    assert again.epsilon == solver.epsilon(5)
    # A state that is gone back from: its visits were made.
    again = pvi.run(KEY, 1, init_state=found.state, progress_bar=False)
    assert again.epsilon == solver.epsilon(6) == solver.epsilon(sums.asked)
    pvi.runtime.settle(again.state)
    own = [np.sum([c.site[i] for c in sums.clients], axis=0) for i in range(2)]
    for a, b in zip(own, jax.tree.leaves(again.state.sites.groups), strict=True):
        np.testing.assert_allclose(a, b[0], rtol=1e-9 if b.dtype == np.float64 else 1e-3)
    # Planted: a server that counts what is absorbed, and not what was asked for.
    real = SumExchange._sum

    def once(self, how, *rest):
        before, found = self._made.get(self._fit, 0), real(self, how, *rest)
        self._made[self._fit] = min(self._made.get(self._fit, 0), before + 1)
        return found

    monkeypatch.setattr(SumExchange, "_sum", once)
    sums.asked = 0
    other = pvi.run(jax.random.key(1), 3, progress_bar=False)
    assert other.epsilon == solver.epsilon(3) and sums.asked == 4


def test_the_count_of_sums_outlives_the_servers_process(added, tmp_path, monkeypatch):
    """Rounds that no file has were made all the same, as the clients know; planted: clients that keep it to themselves."""
    (solver, pvi, sums, _), (one, other, third) = added, map(jax.random.key, (3, 4, 5))
    monkeypatch.setattr(sums, "lost", {})
    half = pvi.run(one, 2, progress_bar=False).state
    pvi.save(tmp_path / "state", half)
    assert pvi.run(one, 3, init_state=half, progress_bar=False).epsilon == solver.epsilon(5)

    def end():
        """Of the server's process: another one has files, and the clients, who lived on."""
        pvi.runtime.close()
        pvi.runtime._made.clear()

    def begun_anew():
        """Epsilon after one round more than the file has."""
        end()
        return pvi.run(one, 1, init_state=pvi.load(tmp_path / "state"), progress_bar=False).epsilon

    assert begun_anew() == solver.epsilon(6)
    # A fit by another key is another one, which does not take the count of the first away; one by the same key is the same.
    assert pvi.run(other, 1, progress_bar=False).epsilon == solver.epsilon(1)
    assert pvi.run(one, 1, progress_bar=False).epsilon == solver.epsilon(7)
    assert begun_anew() == solver.epsilon(8)
    with monkeypatch.context() as patch:
        patch.setattr(_sums, "_as_arrays", lambda released: (np.zeros(0, np.int32),) * 2)
        assert begun_anew() == solver.epsilon(3)

    def die(done, state, info):
        if done == 3:
            raise KeyError("killed before anything was written but the start")

    file = {"checkpoint": tmp_path / "run", "checkpoint_every": 10, "progress_bar": False}
    with pytest.raises(KeyError):
        pvi.run(third, 9, callback=die, **file)
    end()
    assert pvi.run(third, 2, **file).epsilon == solver.epsilon(5)


def test_a_private_client_answers_visits_alone_and_draws_by_all_that_is_asked(added):
    solver, _, sums, _ = added
    client, fields = sums.clients[0], decode(sums.seen[0][0]).fields
    look = {"ask": "values", "rules": 1, "clip": False}
    alone = Client(location, AutoMultivariateNormal(location), "a", Y[:2], solver=solver, like=PUBLIC)
    with pytest.raises(PVIError, match="under DifferentialPrivacy it answers visits alone"):
        alone._reply(Message("look?", {"how": look, "q": (np.zeros((1, 1)),), "rest": ()}))
    # Nor one that comes with a visit.
    visit = {"how": fields["how"] | {"look": look}, "q": (), "rest": ()}
    with pytest.raises(PVIError, match="under DifferentialPrivacy it answers visits alone"):
        alone._reply(Message("visit?", visit))
    ask = fields | {"how": look, "q": (np.zeros((1, 1)),), "run": "another", "sequence": 99}
    with pytest.raises(PVIError, match="under DifferentialPrivacy it answers visits alone"):
        client.contribute(encode(Message("sum?", ask), _exchange.RECORDS), sums.capacity)
    client._secret = b"x" * 16

    def by(**others):
        return tuple(np.asarray(jax.random.key_data(client._own_key(KEY, fields | others))))

    assert by() == by(sequence=8, run="later")
    other = [by(), by(q=(np.ones(1), np.ones((1, 1)))), by(reach=3.0), by(how={"ask": "visit"})]
    client._site = tuple(x + 1e-9 for x in client._site)
    other.append(by())
    client._memory = client._memory._replace(releases=jnp.int32(7))
    assert len({*other, by(), tuple(np.asarray(jax.random.key_data(KEY)))}) == 7


# ------------------------------------------------------------------------------------------------------------- the count


@pytest.fixture(scope="module")
def counted():
    pytest.importorskip("dp_accounting", reason="dp-accounting (the extra `privacy`) is not installed")
    solver = DifferentialPrivacy(NaturalGradient(), 2.0, 1.0)
    pvi = make(solver)
    return solver, pvi, run(pvi, 4)


def test_every_visit_counts_also_of_a_run_that_goes_on(counted, tmp_path):
    """From a state, a file of it, and a checkpoint: bit for bit what an unbroken run gives, the count included (law 9)."""
    solver, pvi, whole = counted
    assert whole.epsilon == solver.epsilon(4) and whole.delta == 1e-5
    assert "released so far: epsilon" in str(whole.info) and whole.info.epsilons == dict.fromkeys("abc", whole.epsilon)
    half = run(pvi)
    assert half.epsilon == solver.epsilon(2)
    pvi.save(tmp_path / "state", half.state)
    fresh = make(solver)
    again = run(fresh, init_state=fresh.load(tmp_path / "state", Y))
    assert same(again.state, whole.state) and again.epsilon == whole.epsilon
    run(pvi, checkpoint=tmp_path / "run")
    resumed = run(make(solver), 4, checkpoint=tmp_path / "run")
    assert same(resumed.state, whole.state) and resumed.epsilon == whole.epsilon


def test_a_state_of_other_terms_is_refused(counted):
    """With more noise a count would say less than was released."""
    _, _, whole = counted
    with pytest.raises(StateError, match="another noise_multiplier"):
        run(make(DifferentialPrivacy(NaturalGradient(), 9.0, 1.0)), init_state=whole.state)
    plain = run(make(NaturalGradient()), 1)
    with pytest.raises(StateError, match="made without DifferentialPrivacy"):
        run(make(DifferentialPrivacy(NaturalGradient(), 9.0, 1.0)), init_state=plain.state)


@counts
def test_nothing_that_a_solver_would_remember_of_rows_is_in_the_state():
    """A number of rows' own in the wrapped solver's memory stays with the visit."""
    found = run(make(DifferentialPrivacy(Telling(), 1.0, 1.0)), 1)
    assert same(found.state.solver_state.inner, jnp.zeros(3))
    assert not same(run(make(Telling()), 1).state.solver_state, jnp.zeros(3))


@counts
def test_groups_count_their_own_visits():
    solver = DifferentialPrivacy(Deaf(), 2.0, 1.0)
    found = run(make(solver, StochasticSubset(1)), 3)
    assert int(np.sum(found.state.solver_state.releases)) == 3
    wanted = {label: solver.epsilon(int(n)) for label, n in zip("abc", found.state.solver_state.releases, strict=True)}
    assert found.info.epsilons == wanted
    once = run(make(solver, Streaming(visits=2)), 1)
    assert once.epsilon == solver.epsilon(2)


# -------------------------------------------------------------------------------------------------------------- refusals

WRONG = {
    "level='rows'": lambda: DifferentialPrivacy(NaturalGradient(), 0.0, 1.0, "rows"),
    "clip=-1.0": lambda: DifferentialPrivacy(NaturalGradient(), 0.0, -1.0),
    "noise_multiplier=-1.0": lambda: DifferentialPrivacy(NaturalGradient(), -1.0, 1.0),
    "without a bound": lambda: DifferentialPrivacy(NaturalGradient(), 1.0, math.inf),
    "delta=0.0": lambda: DifferentialPrivacy(NaturalGradient(), 0.0, 1.0, delta=0.0),
    "relation='add'": lambda: DifferentialPrivacy(NaturalGradient(), 0.0, 1.0, relation="add"),
    "wrap the plain one": lambda: DifferentialPrivacy(DifferentialPrivacy(NaturalGradient(), 0.0, 1.0), 0.0, 1.0),
    "effective sample sizes": lambda: DifferentialPrivacy(PowerEP(), 0.0, 1.0),
    "SNEP.*errors of quadrature": lambda: DifferentialPrivacy(SNEP(), 0.0, 1.0),
    "share one site": lambda: DifferentialPrivacy(StochasticEP(), 0.0, 1.0),
    "optimiser_state='reset'": lambda: DifferentialPrivacy(LocalELBO(optimiser_state="keep"), 0.0, 1.0),
    "sites='rows'": lambda: DifferentialPrivacy(NaturalGradient(sites="rows"), 0.0, 1.0),
    "NaturalGradient hears more": lambda: DifferentialPrivacy(NaturalGradient(), 0.0, 1.0, "row"),
    "StochasticNaturalGradient hears more": lambda: DifferentialPrivacy(StochasticNaturalGradient(), 0.0, 1.0, "row"),
    "line search": lambda: DifferentialPrivacy(LocalELBO(optax.lbfgs()), 0.0, 1.0, "row"),
    "curvature='steps'": lambda: DifferentialPrivacy(LocalELBO(curvature="expected"), 0.0, 1.0, "row"),
    "differ by a replacement": lambda: DifferentialPrivacy(LocalELBO(batch_size=2), 0.0, 1.0, "row", "remove"),
    "init_sites='curvature'": lambda: make(DifferentialPrivacy(NaturalGradient(), 0.0, 1.0), init_sites="curvature"),
    "optim fits": lambda: make(DifferentialPrivacy(NaturalGradient(), 0.0, 1.0), optim=numpyro.optim.Adam(0.1)),
    "would have sent these answers": lambda: make(
        DifferentialPrivacy(NaturalGradient(), 0.0, 1.0), StochasticSubset(rates=0.5), runtime=InProcess()
    ),
    "what they see at a q": lambda: make(
        DifferentialPrivacy(NaturalGradient(), 0.0, 1.0), Asynchronous(delays="real"), runtime=InProcess()
    ),
    "depends on the client's own number of rows": lambda: PVI(
        location,
        AutoMultivariateNormal(location),
        solver=DifferentialPrivacy(LocalELBO(batch_size=2), 0.0, 1.0, level="row"),
        schedule=Synchronous(damping=0.5),
        runtime=SummedClients(sums=InMemorySums([])),
    ),
    "takes rows as they come": lambda: make(
        DifferentialPrivacy(NaturalGradient(), 0.0, 1.0),
        Decentralized(np.ones((3, 3)) - np.eye(3), mixing="consensus"),
    ),
}


@pytest.mark.parametrize("level", ["row", "group"])
def test_no_row_is_in_a_private_batch_twice(level):
    """It would move what is released by two clips; of a group's release all its rows are one."""
    labels = ["large"] * (len(Y) - 2) + ["small"] * 2
    solver = DifferentialPrivacy(LocalELBO(num_steps=1, batch_size=3), 0.0, 1.0, level=level)
    pvi = PVI(Partition(location, "data", labels), AutoMultivariateNormal(location), solver=solver)
    if level == "row":
        with pytest.raises(PVIError, match=r"batch_size=3.*'small' has only 2 row"):
            pvi.init(KEY, Y)
    else:
        pvi.init(KEY, Y)


@pytest.mark.parametrize("words", WRONG)
def test_what_would_look_beside_the_count_is_refused(words):
    with pytest.raises(PVIError, match=words):
        WRONG[words]()


def test_calls_that_look_at_rows_are_refused():
    pvi = make(DifferentialPrivacy(Deaf(), 0.0, math.inf))
    state = pvi.init(KEY, Y)
    calls = {
        "evaluate": lambda: pvi.evaluate(state, Y),
        "log_evidence": lambda: pvi.log_evidence(state, Y),
        "khat": lambda: pvi.khat(state, Y, rng_key=KEY),
        "prequential": lambda: pvi.prequential(state, Y, rng_key=KEY),
        "to_arviz": lambda: pvi.to_arviz(KEY, state, Y),
        "add_group": lambda: pvi.add_group(state, "d", Y),
        "revisit": lambda: pvi.revisit(state, "a", Y[:2]),
        "forget_group": lambda: pvi.forget_group(state, "a"),
    }
    for name, call in calls.items():
        with pytest.raises(PVIError, match=f"^{name} is refused under DifferentialPrivacy: "):
            call()


def outside(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    numpyro.sample("seen", dist.Normal(theta, 1.0), obs=1.0)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def inside(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(theta, 1.0))
        numpyro.sample("y", dist.StudentT(4.0, z, 1.0), obs=y)


def test_models_with_rows_beside_the_groups_are_refused():
    solver = DifferentialPrivacy(NaturalGradient(), 0.0, math.inf)
    with pytest.raises(PVIError, match="'seen' are outside"):
        make(solver, model=outside).init(KEY, Y)
    with pytest.raises(PVIError, match="local latents"):
        make(solver, model=inside).init(KEY, Y)


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PVIError, match=r"pip install 'numpyro_pvi\[privacy\]'"):
        DifferentialPrivacy(NaturalGradient(), 1.0, 1.0)
    DifferentialPrivacy(NaturalGradient(), 0.0, 1.0)
