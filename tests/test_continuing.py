"""A state under a PVI of other choices: its q stays, what solver and schedule remember begins anew, the rest is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, StateError
from numpyro_pvi.schedules import Decentralized, Sequential
from numpyro_pvi.solvers import Conjugate, NaturalGradient, PowerEP, StochasticEP

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(9, 2))
Y = (X[:, 0] > 0.3).astype(int)


def coins(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def made(guide=AutoMultivariateNormal, **options):
    return PVI(Partition(coins, "data", 3, check=False), guide(coins), **options)


@pytest.fixture(scope="module")
def parallel():
    """The optimum that every schedule of the default solver has."""
    pvi = made()
    return pvi, pvi.run(KEY, 30, X, Y, progress_bar=False, tol=1e-6).state


@pytest.mark.parametrize("options", [{"schedule": Sequential()}, {"solver": PowerEP(1.0)}], ids=["schedule", "solver"])
def test_memories_of_another_solver_or_schedule_begin_anew(parallel, options):
    first, state = parallel
    other = made(**options)
    result = other.run(KEY, 12, X, Y, init_state=state, progress_bar=False)
    before, after = (np.asarray(pvi.posterior(s)["w"].mean) for pvi, s in ((first, state), (other, result.state)))
    # One optimum has all schedules; that of EP is near it.
    np.testing.assert_allclose(after, before, atol=0.1 if "solver" in options else 1e-4)
    assert int(result.state.step) == int(state.step) + 12
    # And back, by single rounds.
    again, loss = first.update(result.state, X, Y)
    assert jnp.isfinite(loss) and first.evaluate(again, X, Y) == pytest.approx(float(loss), rel=1e-6)


def test_the_same_choices_keep_their_memories(parallel):
    """To the bit what the PVI itself goes on with."""
    first, state = parallel
    ours, theirs = (pvi.update(state, X, Y)[0] for pvi in (first, made()))
    for one, other in zip(jax.tree.leaves(ours.sites), jax.tree.leaves(theirs.sites), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(theirs.report.refused) == int(ours.report.refused) and float(theirs.report.before) < jnp.inf


@pytest.mark.parametrize("guide", [AutoDiagonalNormal, AutoExponentialFamily], ids=["diagonal", "family"])
def test_a_state_of_another_guide_is_refused(parallel, guide):
    other = made(guide)
    for call in (
        lambda: other.run(KEY, 2, X, Y, init_state=parallel[1], progress_bar=False),
        lambda: other.update(parallel[1], X, Y),
        lambda: other.evaluate(parallel[1], X, Y),
        lambda: other.posterior(parallel[1]),
        lambda: other.get_params(parallel[1]),
    ):
        with pytest.raises(StateError, match=guide.__name__):
            call()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"solver": Conjugate()}, "cannot go on under the solver of this PVI"),
        ({"solver": StochasticEP()}, "one site that all groups share"),
        ({"schedule": Decentralized([(0, 1), (1, 2)])}, "no q of every agent"),
    ],
    ids=["conjugate", "tied", "agents"],
)
def test_a_state_that_a_solver_or_schedule_cannot_go_on_from_is_refused(parallel, options, words):
    with pytest.raises(StateError, match=words):
        made(**options).run(KEY, 2, X, Y, init_state=parallel[1], progress_bar=False)


def counts(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def weibull(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Weibull(rate, 1.5), obs=y)


@pytest.mark.parametrize(
    ("model", "before", "after", "words"),
    [
        (counts, NaturalGradient(), PowerEP(), "planned for expectations, and PowerEP takes tilted moments"),
        (counts, PowerEP(), NaturalGradient(), "planned for tilted moments, and NaturalGradient takes expectations"),
        (weibull, NaturalGradient(), Conjugate(), "Conjugate needs factors in closed form"),
    ],
    ids=["to moments", "from moments", "closed form"],
)
def test_a_state_of_families_is_refused_by_a_solver_that_takes_its_factors_in_another_way(model, before, after, words):
    def fit(solver):
        return PVI(Partition(model, "data", 2), AutoExponentialFamily(model), solver=solver)

    y = np.array([1.0, 3.0, 2.0, 4.0])
    state = fit(before).init(KEY, y)
    with pytest.raises(StateError, match=words):
        fit(after).update(state, y)


def scaled(y):
    scale = numpyro.param("scale", 1.0)
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(w * scale, 1.0), obs=y)


@pytest.mark.parametrize(
    ("optim", "words"),
    [(numpyro.optim.SGD(0.1), "another optimiser"), (None, "this PVI no optimiser")],
    ids=["other", "none"],
)
def test_a_state_of_another_optimiser_is_refused(optim, words):
    y = np.array([1.0, 3.0, 2.0, 4.0])
    state = PVI(scaled, AutoDiagonalNormal(scaled), numpyro.optim.Adam(0.1), num_groups=2).init(KEY, y)
    with pytest.raises(StateError, match=words):
        PVI(scaled, AutoDiagonalNormal(scaled), optim, num_groups=2).update(state, y)
