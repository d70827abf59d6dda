"""Law 9: a state that was saved and is taken up by a fresh PVI goes on bit for bit as an unbroken run does."""

import dataclasses

import jax
import numpy as np
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import (
    Asynchronous,
    Committee,
    Decentralized,
    Sequential,
    StochasticSubset,
    Streaming,
    Synchronous,
)
from numpyro_pvi.solvers import (
    SNEP,
    AlphaDivergence,
    Conjugate,
    LocalELBO,
    NaturalGradient,
    PowerEP,
    StochasticEP,
    StochasticNaturalGradient,
)

from .models import groups, make_linear, make_logistic, make_scale, rows

X, Y, LABELS = rows()
COUNT = 3
RING = [[float(i != j) for j in range(COUNT)] for i in range(COUNT)]
# Every schedule and every solver once; the table's other cells are products of the two.
CASES = {
    "conjugate-sequential": (make_linear, Conjugate(), Sequential("random"), AutoMultivariateNormal),
    "natural-synchronous": (make_scale, NaturalGradient(), Synchronous(), AutoMultivariateNormal),
    "ep-rows": (make_logistic, PowerEP(factors="row"), Synchronous(), AutoMultivariateNormal),
    "snep": (make_linear, SNEP(beta={0: 2.0}, outer_period=3), Sequential(), AutoMultivariateNormal),
    "tied-sequential": (make_linear, StochasticEP(), Sequential("random"), AutoMultivariateNormal),
    "alpha-sequential": (make_linear, AlphaDivergence(0.5, num_steps=2), Sequential(), AutoMultivariateNormal),
    "natural-mean-field": (make_logistic, NaturalGradient(), Synchronous(), AutoDiagonalNormal),
    "local-synchronous": (
        make_logistic,
        LocalELBO(num_steps=3, optimiser_state="keep"),
        Synchronous(),
        AutoMultivariateNormal,
    ),
    "stochastic-sequential": (
        make_logistic,
        StochasticNaturalGradient(num_steps=3),
        Sequential(),
        AutoMultivariateNormal,
    ),
    "natural-asynchronous": (
        make_logistic,
        NaturalGradient(),
        Asynchronous(delays=(1.0, 2.0, 5.0), loss_rate=0.2, duplicate_rate=0.2, reorder=True),
        AutoMultivariateNormal,
    ),
    "natural-subset": (make_logistic, NaturalGradient(), StochasticSubset(2), AutoMultivariateNormal),
    "conjugate-committee": (make_linear, Conjugate(), Committee(), AutoMultivariateNormal),
    "conjugate-streaming": (make_linear, Conjugate(), Streaming(), AutoMultivariateNormal),
    "conjugate-decentralized": (make_linear, Conjugate(), Decentralized(RING), AutoMultivariateNormal),
}
KEY = jax.random.key(3)


def numbers(tree):
    """The bytes of every leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keys = [jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x for _, x in leaves]
    return {
        jax.tree_util.keystr(path): (str(x.dtype), x.shape, np.asarray(x).tobytes())
        for (path, _), x in zip(leaves, keys, strict=True)
    }


def both(name, path, spoil=lambda state: state):
    """States and losses of an unbroken run, and of one that was saved after two rounds and resumed by a fresh PVI."""
    make, solver, schedule, guide = CASES[name]
    model, y = make(), LABELS if make is make_logistic else Y

    def fresh():
        return PVI(Partition(model, "data", groups(COUNT)), guide(model), solver=solver, schedule=schedule)

    first = fresh()
    start = first.init(KEY, X, y)
    whole = first.run(KEY, 6, X, y, init_state=start, progress_bar=False)
    first.save(path, first.run(KEY, 2, X, y, init_state=start, progress_bar=False).state)
    second = fresh()
    state = spoil(second.load(path))
    rest = second.run(jax.random.key(99), 4, X, y, init_state=state, progress_bar=False)
    return first, whole, second, rest


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("snep", "alpha-sequential"))) for n in CASES]
)
def test_resumed_is_unbroken(name, tmp_path):
    first, whole, second, rest = both(name, tmp_path / "fit.pvi")
    assert numbers(rest.state) == numbers(whole.state)
    assert rest.state.plan == whole.state.plan
    assert np.asarray(rest.losses).tobytes() == np.asarray(whole.losses)[2:].tobytes()
    draws = [
        Predictive(p.guide, params=r.params, num_samples=3)(KEY, X, None)["w"]
        for p, r in ((first, whole), (second, rest))
    ]
    np.testing.assert_array_equal(*draws)


def test_lost_digits_are_noticed(tmp_path):
    """The comparison can fail: sites that a file keeps in half precision change what comes after."""

    def spoil(state):
        groups = jax.tree.map(lambda x: x.astype(jax.numpy.float16).astype(x.dtype), state.sites.groups)
        return dataclasses.replace(state, sites=dataclasses.replace(state.sites, groups=groups))

    _, whole, _, rest = both("natural-mean-field", tmp_path / "fit.pvi", spoil)
    assert numbers(rest.state) != numbers(whole.state)
