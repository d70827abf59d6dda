"""Rounds extrapolated from the last ones, where sites are two numbers per row, q is mean-field, or components move in turns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.optimize
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import ConditionalNatural, GaussianNatural, MultivariateNormalFamily, conditional_products
from numpyro_pvi.runtime._rounds import carry_of
from numpyro_pvi.schedules import StochasticSubset, Synchronous, _synchronous, natural_gradient_proposal
from numpyro_pvi.solvers import LocalResult, NaturalGradient

NUM_ROWS = 24
SIZES = {1: (24,), 3: (5, 12, 7)}


def _data() -> tuple[jax.Array, jax.Array]:
    """A smooth function under a prior so wide that labels all but separate it."""
    x = np.linspace(0.0, 3.0, NUM_ROWS)
    gram = 25.0 * (np.exp(-2.0 * (x[:, None] - x) ** 2) + 1e-6 * np.eye(NUM_ROWS))
    return jnp.asarray(gram), jnp.asarray((np.sin(3.0 * x) + 0.3 * np.cos(11.0 * x) > 0).astype(float))


def _model(gram, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(gram.shape[0]), gram))
    with numpyro.plate("rows", gram.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=f[i]), obs=None if y is None else y[i])


def _pvi(num_groups: int = 1, schedule: Synchronous | None = None) -> PVI:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(num_groups), SIZES[num_groups]))
    split = Partition(_model, "rows", labels)
    return PVI(split, AutoMultivariateNormal(_model), solver=NaturalGradient(sites="rows"), schedule=schedule)


def _fit(num_groups: int, rounds: int) -> np.ndarray:
    """Losses by round."""
    fit = _pvi(num_groups).run(jax.random.key(0), rounds, *_data(), progress_bar=False)
    assert (fit.state.schedule_state.mixing is not None) == (NUM_ROWS >= _synchronous.LEAST_ROWS)
    return np.asarray(fit.losses)


@pytest.fixture
def extrapolated(monkeypatch):
    """The rule for many rows on few, and no program compiled under another."""
    jax.clear_caches()
    monkeypatch.setattr(_synchronous, "LEAST_ROWS", 16)
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _double():
    if not jax.config.jax_enable_x64:
        pytest.skip("gaps of 1e-6 nats are below the rounding of float32")


@pytest.fixture(scope="module")
def plain():
    return _fit(1, 60)


def _pays(plain: np.ndarray, losses: np.ndarray) -> None:
    lowest = plain.min()
    assert losses[-1] == pytest.approx(lowest, abs=1e-5)
    assert np.all(np.diff(losses) < 1e-8)
    assert np.sum(losses > lowest + 1e-5) <= 7 < np.sum(plain > lowest + 1e-5) / 3


def test_fewer_rounds_reach_the_same_optimum_whatever_the_partition(plain, extrapolated):
    fits = {m: _fit(m, 30) for m in SIZES}
    _pays(plain, fits[1])
    assert fits[3] == pytest.approx(fits[1], abs=1e-6)


def test_a_mixture_that_looks_back_is_seen(plain, extrapolated, monkeypatch):
    right = _synchronous.mixing_shares

    def back(gram, filled):
        shares = -right(gram, filled)[:-1]
        return jnp.append(shares, 1.0 - jnp.sum(shares))

    monkeypatch.setattr(_synchronous, "mixing_shares", back)
    with pytest.raises(AssertionError):
        _pays(plain, _fit(1, 30))


def test_an_extrapolated_state_is_saved_and_goes_over_to_dense_sites(extrapolated, tmp_path):
    pvi = _pvi(3)
    start = pvi.init(jax.random.key(0), *_data())

    def after(pvi, state, rounds):
        return pvi.run(jax.random.key(1), rounds, *_data(), init_state=state, progress_bar=False)

    whole = after(pvi, start, 5)
    pvi.save(tmp_path / "fit.pvi", after(pvi, start, 3).state)
    rest = _pvi(3)
    again = after(rest, rest.load(tmp_path / "fit.pvi"), 2)
    for a, b in zip(jax.tree.leaves(whole.state.sites), jax.tree.leaves(again.state.sites), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    # A group that is forgotten leaves dense sites, and rounds that are not extrapolated.
    label = pvi.groups[0]
    with pytest.warns(UserWarning, match="approximate"):
        left = pvi.forget_group(whole.state, label)
    assert left.schedule_state.mixing is None
    assert pvi.khat(whole.state, *_data(), rng_key=jax.random.key(2)) < 1.0


def test_a_damping_that_was_given_takes_plain_steps(extrapolated):
    for damping in (1.0, 0.5):
        state = _pvi(schedule=Synchronous(damping=damping)).init(jax.random.key(0), *_data())
        assert state.schedule_state.mixing is None
    assert _pvi(schedule=Synchronous()).init(jax.random.key(0), *_data()).schedule_state.mixing is not None


def test_inner_products_are_those_of_divergences():
    """Half the inner product of a small change with itself is KL to second order, between dense Gaussians by NumPy."""
    pvi = _pvi()
    state = pvi.init(jax.random.key(0), *_data())
    problem = pvi._engine._state_problem(state, _data(), {}, False)
    rng, scale = np.random.default_rng(3), 1e-4
    natural = GaussianNatural(jnp.asarray(rng.normal(size=NUM_ROWS)), jnp.asarray(rng.uniform(0.1, 1.0, NUM_ROWS)))
    change = scale * rng.normal(size=(2, NUM_ROWS))
    moments = problem.family.moments(natural)
    found = problem.family.inner_products(moments, GaussianNatural(*(jnp.asarray(c)[None] for c in change)))
    prior = np.linalg.inv(np.asarray(_data()[0]))

    def dense(h, ell):
        precision = prior + np.diag(ell)
        return np.linalg.solve(precision, h), precision

    (m, left), (n, right) = (
        dense(*map(np.asarray, (natural.precision_mean, natural.precision))),
        dense(np.asarray(natural.precision_mean) + change[0], np.asarray(natural.precision) + change[1]),
    )
    trace = np.trace(np.linalg.solve(left, right)) - NUM_ROWS
    log_dets = np.linalg.slogdet(left)[1] - np.linalg.slogdet(right)[1]
    divergence = 0.5 * (trace + log_dets + (n - m) @ right @ (n - m))
    assert 0.5 * float(found[0, 0]) == pytest.approx(divergence, rel=1e-2)


# -------------------------------------------------------------------------------------------------------- a mean-field q
# Parallel rounds on a mean-field q contract by the correlations of the posterior, which it does not have.


def _correlated() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = np.sqrt(0.9) * rng.normal(size=(NUM_ROWS, 1)) + np.sqrt(0.1) * rng.normal(size=(NUM_ROWS, 3))
    return 2.0 * X, (rng.uniform(size=NUM_ROWS) < 0.6).astype(float)


def _logistic(X, y):
    w = numpyro.sample("w", dist.StudentT(5.0, 0.0, 2.0).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def _optimum() -> tuple[np.ndarray, np.ndarray]:
    """Means and sds of the best mean-field q: every expectation is of one normal, by quadrature in NumPy."""
    (X, y), (nodes, weights) = _correlated(), np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def loss(p):
        mean, sd = p[:3], np.exp(p[3:])
        f = X @ mean + np.sqrt(X**2 @ sd**2) * nodes[:, None]
        fit = weights @ np.sum(np.logaddexp(0.0, f) - y * f, axis=1)
        prior = weights @ np.sum(3.0 * np.log1p((mean + sd * nodes[:, None]) ** 2 / 20.0), axis=1)
        return fit + prior - np.sum(p[3:])

    best = scipy.optimize.minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-9})
    return best.x[:3], np.exp(best.x[3:])


def _mean_field(num_groups: int) -> PVI:
    return PVI(Partition(_logistic, "rows", np.arange(NUM_ROWS) % num_groups), AutoNormal(_logistic))


@pytest.mark.parametrize("num_groups", [1, 4])
def test_a_mean_field_q_converges_in_few_rounds_to_the_best(num_groups, monkeypatch):
    data, (mean, sd) = _correlated(), _optimum()
    fit = _mean_field(num_groups).run(jax.random.key(0), 600, *data, tol=1e-3, progress_bar=False)
    assert fit.converged and fit.state.schedule_state.mixing is not None
    # What is said to be left is.
    np.testing.assert_array_less(np.abs(fit.params["w_auto_loc"] - mean) / sd, 1e-3)
    np.testing.assert_allclose(fit.params["w_auto_scale"], sd, rtol=1e-3)
    assert np.all(np.diff(np.asarray(fit.losses)) < 1e-8)
    if num_groups > 1:
        monkeypatch.setattr(_synchronous, "_mixes_sites", lambda problem: False)
        plain = _mean_field(num_groups).run(jax.random.key(0), 600, *data, tol=1e-3, progress_bar=False)
        assert 3 * len(fit.losses) < len(plain.losses)


def _own_levels(y):
    """Members of a hierarchy that are the rows' own, and say what they have in common."""
    common = numpyro.sample("common", dist.Normal(0.0, 10.0))
    with numpyro.plate("owners", y.shape[0]):
        level = numpyro.sample("level", dist.Normal(common, 0.3))
        numpyro.sample("y", dist.Normal(level, 1.0).expand([y.shape[0]]), obs=y)


def test_latents_of_rows_are_mixed_with_the_shared_ones(monkeypatch):
    """Exact means in a fraction of the rounds."""
    y = 2.0 + np.random.default_rng(6).normal(size=8)
    own, common = 1.0 + 0.3**-2, 8 * 0.3**-2 + 0.01
    precision = np.diag([own] * 8 + [common])
    precision[8, :8] = precision[:8, 8] = -(0.3**-2)
    exact = np.linalg.solve(precision, np.append(y, 0.0))

    def fit() -> tuple[int, float]:
        pvi = PVI(Partition(_own_levels, "owners", np.arange(8) % 4), AutoNormal(_own_levels))
        done = pvi.run(jax.random.key(0), 600, y, tol=1e-4, progress_bar=False)
        assert done.converged
        q = pvi.posterior(done.state)
        off = (np.append(q["level"].mean, q["common"].mean) - exact) * np.sqrt(np.diagonal(precision))
        return len(done.losses), np.max(np.abs(off))

    rounds, off = fit()
    assert off < 3e-4
    with monkeypatch.context() as patched:
        jax.clear_caches()
        patched.setattr(_synchronous, "_mixes_sites", lambda problem: False)
        plain, _ = fit()
    jax.clear_caches()
    assert 3 * rounds < plain


_CENTRED = np.array([3, 0, 1, 7, 2, 4, 0, 1, 9, 2, 1, 3])


def _centred(y):
    """Levels of the rows' own whose spread is unknown: what they are and how far they spread follow one another."""
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("rows", y.shape[0]):
        level = numpyro.sample("level", dist.Normal(common, spread))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


def _rounds_of_centred() -> tuple[int, float, dict]:
    pvi = PVI(Partition(_centred, "rows", np.arange(12) % 3), AutoMultivariateNormal(_centred))
    done = pvi.run(jax.random.key(0), 400, _CENTRED, tol=1e-4, progress_bar=False)
    assert done.converged
    return len(done.losses), float(done.losses[-1]), done.params


def test_latents_of_rows_are_mixed_under_full_covariance(monkeypatch):
    """Plain rounds end at the same q, after more than twice as many."""
    rounds, loss, params = _rounds_of_centred()
    with monkeypatch.context() as patched:
        jax.clear_caches()
        patched.setattr(_synchronous, "_mixes_sites", lambda problem: False)
        plain, other, wanted = _rounds_of_centred()
    jax.clear_caches()
    assert 2 * rounds < plain and abs(loss - other) < 1e-6
    for name, value in wanted.items():
        np.testing.assert_allclose(params[name], value, atol=1e-3)


def test_inner_products_of_conditionals_are_those_of_divergences(rng):
    """Half of that of a small change with itself is KL to second order, of the dense Gaussians of shared and own latents."""
    rows, own, dim = 3, 2, 2
    root = rng.normal(size=(rows, own, own))
    natural = ConditionalNatural(
        rng.normal(size=(rows, own)), root @ np.swapaxes(root, 1, 2) + np.eye(own), rng.normal(size=(rows, own, dim))
    )
    covariance = np.array([[1.5, 0.4], [0.4, 0.7]])
    mean = rng.normal(size=dim)
    shared = MultivariateNormalFamily(dim).moments(
        GaussianNatural(jnp.linalg.solve(covariance, mean), jnp.linalg.inv(covariance))
    )
    bend = rng.normal(size=(2, rows, own, own))
    changes = ConditionalNatural(
        rng.normal(size=(2, rows, own)), bend + np.swapaxes(bend, 2, 3), rng.normal(size=(2, rows, own, dim))
    )
    found = conditional_products(natural, shared, jax.tree.map(jnp.asarray, changes))

    def dense(x):
        """Mean and covariance of all latents jointly, the shared ones first."""
        slope = np.concatenate(
            [np.eye(dim), *(-np.linalg.solve(b, c) for b, c in zip(x.precision, x.cross, strict=True))]
        )
        offset = np.concatenate(
            [np.zeros(dim), *(np.linalg.solve(b, h) for b, h in zip(x.precision, x.linear, strict=True))]
        )
        noise = np.zeros((dim + rows * own, dim + rows * own))
        for i, b in enumerate(x.precision):
            noise[dim + own * i :, dim + own * i :][:own, :own] = np.linalg.inv(b)
        return slope @ mean + offset, slope @ covariance @ slope.T + noise

    def divergence(change):
        (m, left), (n, right) = (
            dense(natural),
            dense(jax.tree.map(lambda x, d: np.asarray(x + 1e-4 * d), natural, change)),
        )
        log_dets = np.linalg.slogdet(right)[1] - np.linalg.slogdet(left)[1]
        inverse = np.linalg.inv(right)
        return 0.5 * (np.trace(inverse @ left) - len(m) + log_dets + (n - m) @ inverse @ (n - m))

    one, two = (jax.tree.map(lambda x, i=i: x[i], changes) for i in (0, 1))
    both = jax.tree.map(jnp.add, one, two)
    squares = [2e8 * divergence(x) for x in (one, two, both)]
    wanted = (
        np.array([[squares[0], 0.0], [0.0, squares[1]]])
        + 0.5 * (squares[2] - squares[0] - squares[1]) * np.eye(2)[::-1]
    )
    np.testing.assert_allclose(found, wanted, rtol=5e-3, atol=5e-3 * np.max(wanted))


def _linear(X, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def test_what_is_left_counts_the_slowest_mode(monkeypatch):
    """Linear regression has the means of the full posterior. The planted fault: a mixture's last move is all that is left."""
    rng = np.random.default_rng(0)
    X = np.sqrt(0.9) * rng.normal(size=(NUM_ROWS, 1)) + np.sqrt(0.1) * rng.normal(size=(NUM_ROWS, 16))
    y = X @ rng.normal(size=16) + rng.normal(size=NUM_ROWS)
    precision = X.T @ X + np.eye(16)
    mean = np.linalg.solve(precision, X.T @ y)

    def off():
        pvi = PVI(Partition(_linear, "rows", np.arange(NUM_ROWS) % 4), AutoNormal(_linear), init_sites="prior")
        fit = pvi.run(jax.random.key(0), 600, X, y, tol=1e-2, progress_bar=False)
        assert fit.converged and len(fit.losses) < 100
        return np.max(np.abs(fit.params["w_auto_loc"] - mean) * np.sqrt(np.diag(precision)))

    assert off() < 1e-2
    monkeypatch.setattr(_synchronous, "_still_to_go", lambda problem, old, local, gram, *rest: (0.0 * gram[0, 0],) * 2)
    jax.clear_caches()
    wrong = off()
    jax.clear_caches()
    assert wrong > 1e-2


OWNERS = np.repeat(np.arange(6), 4)


def _levels(y):
    """Levels that hang together: coordinate ascent goes from their common level to them and back by small steps."""
    common = numpyro.sample("common", dist.Normal(0.0, 10.0))
    with numpyro.plate("owners", 6):
        level = numpyro.sample("level", dist.Normal(common, 0.15))
    with numpyro.plate("rows", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(level[jnp.asarray(OWNERS)[i]], 1.0), obs=y[i])


@pytest.mark.parametrize("num_groups", [1, 4])
def test_turns_of_components_converge_in_few_rounds_to_exact_means(num_groups, monkeypatch):
    """Means of a product of normals are exact for a normal posterior, and rounds without mixing many."""
    y = 2.0 + np.random.default_rng(6).normal(size=OWNERS.size)

    def fit() -> tuple[int, np.ndarray]:
        pvi = PVI(Partition(_levels, "rows", np.arange(OWNERS.size) % num_groups), AutoExponentialFamily(_levels))
        done = pvi.run(jax.random.key(0), 400, y, tol=1e-4, progress_bar=False)
        assert done.converged
        # The first mixture is longer than the plain rounds before it, which is no mode that hardly shrinks.
        first = pvi.run(jax.random.key(0), 6, y, tol=None, progress_bar=False).state
        assert float(first.report.left) < 100.0
        q = pvi.posterior(done.state)
        return len(done.losses), np.append(q["level"].mean, q["common"].mean)

    # Of the levels and what they have in common, by completing the square.
    precision = np.diag([4.0 + 0.15**-2] * 6 + [6 * 0.15**-2 + 0.01])
    precision[6, :6] = precision[:6, 6] = -(0.15**-2)
    pull = np.append(np.bincount(OWNERS, weights=y), 0.0)
    exact, sds = np.linalg.solve(precision, pull), 1 / np.sqrt(np.diagonal(precision))
    rounds, means = fit()
    assert np.max(np.abs(means - exact) / sds) < 3e-4
    with monkeypatch.context() as patched:
        jax.clear_caches()
        patched.setattr(_synchronous, "_mixes_sites", lambda problem: False)
        assert fit()[0] > 3 * rounds
    jax.clear_caches()


@pytest.mark.parametrize("guide", [AutoNormal, AutoExponentialFamily])
def test_states_go_on_whether_or_not_rounds_are_mixed(guide):
    """Under another damping, or steps of another size, the memory begins anew, and nothing else."""
    model, data = (_logistic, _correlated()) if guide is AutoNormal else (_levels, (1.0 * OWNERS,))
    part = Partition(model, "rows", np.arange(NUM_ROWS if guide is AutoNormal else OWNERS.size) % 2)
    ways = {
        "mixed": (Synchronous(), NaturalGradient()),
        "damped": (Synchronous(damping=1.0), NaturalGradient()),
        "short": (Synchronous(), NaturalGradient(step_size=0.5)),
    }
    pvis = {n: PVI(part, guide(model), solver=solver, schedule=schedule) for n, (schedule, solver) in ways.items()}
    state = pvis["mixed"].run(jax.random.key(0), 8, *data, progress_bar=False).state
    assert int(state.schedule_state.mixing.filled) == _synchronous.WINDOW
    # What was asked for where data were others says nothing here.
    others = (*data[:-1], 1.0 - np.asarray(data[-1]))
    for given, kept in ((data, _synchronous.WINDOW), (others, 1)):
        assert int(pvis["mixed"].update(state, *given)[0].schedule_state.mixing.filled) == kept
    for name in ("damped", "mixed", "short", "mixed"):
        before = float(pvis[name].evaluate(state, *data))
        state = pvis[name].update(state, *data)[0]
        found = state.schedule_state.mixing
        assert (found is None) == (name != "mixed")
        assert found is None or int(found.filled) <= 1
        assert float(pvis[name].evaluate(state, *data)) <= before + 1e-8


class _As:
    """A problem that says otherwise of itself."""

    def __init__(self, problem, **said):
        self._problem = problem
        vars(self).update(said)

    def __getattr__(self, name):
        return getattr(self._problem, name)


@pytest.fixture(scope="module")
def late():
    """A mean-field fit whose eighth round went to a mixture, with its factors, and where its rounds stand."""
    pvi, data = _mean_field(2), _correlated()
    fit = pvi.run(jax.random.key(0), 8, *data, tol=None, progress_bar=False)
    problem = pvi._engine._state_problem(fit.state, data, {}, False)
    carry = carry_of(fit.state, pvi._engine._evaluated(problem, fit.state))
    return problem, carry, natural_gradient_proposal(problem, carry), fit


def test_a_mixture_is_no_measure_of_plain_rounds(late):
    """Neither how long the next one may be, nor the rate at which they shrink."""
    *_, fit = late
    moves = np.asarray(fit.trace.total_move)
    assert moves[-1] > 5.0 * moves[-2]
    # Of the last plain round, what a whole step would have moved by.
    step = np.max(np.asarray(fit.trace.step)[-2])
    assert float(fit.state.schedule_state.last_move) == pytest.approx(moves[-2] / step, rel=1e-12)
    assert not np.any(np.asarray(fit.state.report.trail))


def test_what_was_remembered_goes_where_rounds_are_not_the_same(late, monkeypatch):
    """Of other data, and of factors that do not ask for all that they want; what it told of slow modes stays."""
    problem, carry, proposal, _ = late
    mixing, window = carry.schedule.mixing, _synchronous.WINDOW
    assert int(mixing.filled) == window and float(mixing.reach) > 4.0

    def after(mixing, whole):
        kept, _, attempt = _synchronous.mixture(problem, mixing, carry, proposal, 1.0, whole)
        return int(kept.filled), bool(attempt), float(kept.left)

    filled, attempt, left = after(mixing._replace(refused=jnp.array(False)), True)
    assert filled == window and attempt and left > 0.0
    for elsewhere, whole, kept in ((1e-3, True, 1), (jnp.nan, True, 1), (0.0, False, 0)):
        filled, attempt, still = after(mixing._replace(elbo=mixing.elbo + elsewhere), whole)
        assert filled == kept and not attempt and still > 0.5 * left
    monkeypatch.setattr(_synchronous, "_is_where_it_ended", lambda mixing, here: jnp.array(True))
    assert after(mixing._replace(elbo=mixing.elbo + 1e-3), True)[0] == window


def test_where_one_factor_asked_for_less_rounds_are_not_the_same():
    def factor(backoffs, moved):
        return LocalResult(None, None, jnp.asarray(backoffs), jnp.asarray(moved))

    whole = factor([0, 0], [True, True])
    for groups, prior, expected in (
        (whole, None, True),
        (whole, factor(0, True), True),
        (factor([0, 1], [True, True]), None, False),
        (factor([0, 0], [True, False]), None, False),
        (whole, factor(1, True), False),
        (whole, factor(0, False), False),
    ):
        assert bool(_synchronous._all_asked(groups, prior)) is expected


@pytest.mark.parametrize(
    "said",
    [
        {"stochastic": True},
        {"blind": True},
        {"matches_moments": True},
        {"tied": True},
        {"units": 3},
        {"in_turns": True, "noisy": True},
        {"solver": NaturalGradient(step_size=0.5)},
        {"solver": NaturalGradient(num_steps=2)},
    ],
    ids=str,
)
def test_rounds_that_do_not_tell_how_they_contract_are_not_mixed(late, said):
    problem, dtype = late[0], jnp.zeros(()).dtype
    assert _synchronous.no_mixing(problem, True, dtype) is not None
    assert _synchronous.no_mixing(problem, False, dtype) is None
    said = {"capped": False} | said if "in_turns" in said else said
    assert _synchronous.no_mixing(_As(problem, **said), True, dtype) is None


def _unknown_scale(y):
    level = numpyro.sample("level", dist.Normal(0.0, 10.0))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 2.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(level, 1 / jnp.sqrt(precision)), obs=y)


def test_rounds_whose_mixtures_are_refused_are_plain_ones(monkeypatch):
    """Mixtures that lie outside of the family are tried once each, and cost no round."""
    y, part = np.random.default_rng(1).normal(2.0, 3.0, 24), Partition(_unknown_scale, "rows", np.arange(24) % 3)

    def fit(schedule):
        pvi = PVI(part, AutoExponentialFamily(_unknown_scale), schedule=schedule)
        done = pvi.run(jax.random.key(0), 8, y, tol=None, progress_bar=False)
        return np.asarray(done.losses), done.state.schedule_state.mixing

    plain, _ = fit(Synchronous(damping=1.0))
    with monkeypatch.context() as patched:
        jax.clear_caches()
        patched.setattr(_synchronous, "mixing_shares", lambda gram, filled: -1e9 + 0.0 * gram[0])
        refused, found = fit(Synchronous())
    jax.clear_caches()
    # Every other round tries one.
    assert int(found.filled) == _synchronous.WINDOW and bool(found.refused)
    np.testing.assert_allclose(refused, plain, rtol=1e-12)


def test_rounds_of_some_groups_are_not_mixed():
    """Each is of other groups: they are no iteration of one map, and their sites no stack of one shape."""
    y, part = np.random.default_rng(1).normal(2.0, 3.0, 24), Partition(_unknown_scale, "rows", np.arange(24) % 3)
    whole = PVI(part, AutoExponentialFamily(_unknown_scale))
    some = PVI(part, AutoExponentialFamily(_unknown_scale), schedule=StochasticSubset(2))
    best = whole.run(jax.random.key(0), 8, y, tol=None, progress_bar=False).losses[-1]
    fit = some.run(jax.random.key(0), 40, y, tol=1e-6, progress_bar=False)
    assert fit.converged
    np.testing.assert_allclose(fit.losses[-1], best, atol=1e-9)
    sizes = [x.shape[:1] for x in jax.tree.leaves(fit.state.schedule_state)]
    assert (_synchronous.WINDOW,) not in sizes


def test_sites_of_groups_that_come_and_go_are_mixed_anew():
    X, y = _correlated()
    here = np.arange(NUM_ROWS) < 12
    pvi = PVI(Partition(_logistic, "rows", np.arange(12) % 3), AutoNormal(_logistic))
    state = pvi.run(jax.random.key(0), 12, X[here], y[here], progress_bar=False).state
    state = pvi.add_group(state, "new", X[~here], y[~here])
    for _ in range(2):
        fit = pvi.run(jax.random.key(0), 12, X[~here], y[~here], init_state=state, tol=1e-4, progress_bar=False)
        assert np.all(np.diff(np.asarray(fit.losses)) < 1e-8)
        with pytest.warns(UserWarning, match="approximate"):
            state = pvi.forget_group(fit.state, pvi.groups[0])
        state = pvi.revisit(state, ["new"] * 12, X[~here], y[~here])
