"""Settings of the schedules in which groups do not all take part at once: errors, clocks, staleness, participation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.errors import PVIError
from numpyro_pvi.families import marginal_distance
from numpyro_pvi.schedules import Asynchronous, Committee, StochasticSubset, measured_delays
from numpyro_pvi.schedules._network import may_be_absorbed
from numpyro_pvi.solvers import Conjugate
from tests.laws.models import groups, make_linear, make_scale, rows

KEY = jax.random.key(0)
X, Y, _ = rows()
LABELS = np.array(["slow", "b", "c"])[groups(3)]


def fitted(schedule, rounds, labels=LABELS, **options):
    model = make_linear()
    pvi = PVI(Partition(model, "data", labels), AutoMultivariateNormal(model), solver=Conjugate(), schedule=schedule)
    return pvi.run(KEY, rounds, X, Y, progress_bar=False, **options)


def started(schedule, make=make_linear):
    model = make()
    pvi = PVI(Partition(model, "data", LABELS), AutoMultivariateNormal(model), schedule=schedule)
    return pvi.init(KEY, X, Y)


# ---------------------------------------------------------------- errors

REFUSED = {
    "delays=0": (lambda: Asynchronous(delays=0.0), r"delays=0.0.*positive.*delays=None"),
    "delays by label": (lambda: Asynchronous(delays={"b": -1.0}), r"group 'b'.*positive"),
    "law": (lambda: Asynchronous(delays=("gamma", 1.0)), r"'gamma'.*exponential.*measured_delays"),
    "word": (lambda: Asynchronous(delays="measured"), "measured_delays"),
    "means": (lambda: Asynchronous(delays=("exponential", [1.0, np.inf])), "group number 1"),
    "max_staleness": (lambda: Asynchronous(max_staleness=-1), r"max_staleness=-1.*M - 1"),
    "damping": (lambda: Asynchronous(damping=2.0), r"damping=2.0.*'auto'"),
    "loss_rate": (lambda: Asynchronous(loss_rate=1.0), r"loss_rate=1.0.*\[0, 1\)"),
    "duplicate_rate": (lambda: Asynchronous(duplicate_rate=-0.1), "duplicate_rate=-0.1"),
    "reorder": (lambda: Asynchronous(reorder=1), "reorder=1"),
    "seconds": (lambda: measured_delays({"b": []}), "group 'b'"),
    "k=0": (lambda: StochasticSubset(0), r"k=0"),
    "neither": (lambda: StochasticSubset(), r"rates.*Synchronous\(\)"),
    "rates": (lambda: StochasticSubset(rates={"b": 0.0}), r"group 'b'.*\(0, 1\]"),
    "subset damping": (lambda: StochasticSubset(2, damping="half"), r"damping.*'auto'"),
    "committee": (lambda: Committee("equal"), "'same' or 'split'"),
    "tol": (lambda: Committee(tol=0.0), "tol=0.0"),
    "visits": (lambda: Committee(max_visits=0), "max_visits=0"),
    "wrong count": (lambda: started(Asynchronous(delays=[1.0, 2.0])), "delays has 2 numbers for 3 groups.*by label"),
    "wrong label": (lambda: started(Asynchronous(delays={"d": 1.0})), r"group 'd'.*'b', 'c', 'slow'"),
    "no bound": (lambda: started(Asynchronous(1.0, max_staleness=1)), r"3 groups.*max_staleness=2"),
    "not measured": (
        lambda: started(Asynchronous(measured_delays({"b": 1.0, "c": 2.0}))),
        "no durations of group 'slow'",
    ),
    "shape": (lambda: started(Asynchronous(lambda key, n: jnp.ones(n + 1))), r"\(4,\).*3 groups"),
    "too many": (lambda: started(StochasticSubset(4)), "only 3 groups"),
    "rates of whom": (lambda: started(StochasticSubset(rates={"d": 0.5})), r"StochasticSubset\(rates\).*'d'"),
    "split": (lambda: started(Committee("split"), make_scale), r"prior='same'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_write(case):
    call, words = REFUSED[case]
    with pytest.raises(PVIError, match=words):
        call()


# ---------------------------------------------------------------- clocks and staleness


def test_fixed_delays_give_the_arrivals_one_can_count(tolerance):
    """Delays 5, 1, 1: the slow group is heard at 5, 10, ..., the others at every unit of time."""
    result = fitted(Asynchronous({"slow": 5.0}), 11)
    changes = 3 * np.arange(1, 12)
    arrivals = np.sort(np.concatenate([np.arange(1, 40), np.arange(1, 40), 5 * np.arange(1, 8)]))
    np.testing.assert_allclose(result.trace.clock, arrivals[changes - 1], rtol=1e-6)
    np.testing.assert_array_equal(result.trace.messages, np.stack([changes, changes], axis=1))
    slow = list(result.trace.labels).index("slow")
    # Eight changes by the others before its first site, then ten each time.
    assert set(result.trace.staleness[4:, slow]) <= {8, 9, 10} and result.trace.staleness[0, slow] == 0
    assert np.all(np.delete(result.trace.staleness, slow, axis=1) <= 3)


def test_a_settled_fit_waits_for_the_slow_group():
    """The others are done after a round; tol is not met before the slow group has come twice."""
    result = fitted(Asynchronous({"slow": 30.0}), 60, tol=1e-6)
    assert result.converged and 30 < float(result.trace.clock[-1]) <= 62
    assert np.all(result.trace.move[:5, list(result.trace.labels).index("slow")] == np.inf)


def test_bounded_staleness_makes_the_fast_wait():
    free, bounded = (fitted(Asynchronous({"slow": 20.0}, max_staleness=s), 20) for s in (None, 4))
    assert np.max(bounded.trace.staleness) <= 4 < np.max(free.trace.staleness)
    # 60 changes at no more than four others for one of the slow group's.
    assert bounded.trace.clock[-1] >= 20 * (60 // 5 - 1) > free.trace.clock[-1]


def test_only_those_who_leave_time_for_the_others_may_go():
    """Two groups have one place left between them and the bound: neither a third nor a fourth may take it."""
    np.testing.assert_array_equal(may_be_absorbed(jnp.array([4, 4, 0, 1]), 5), [True, True, False, False])
    np.testing.assert_array_equal(may_be_absorbed(jnp.array([5, 1, 1]), 5), [True, False, False])
    np.testing.assert_array_equal(may_be_absorbed(jnp.array([3, 2, 1]), 5), [True, True, True])
    # Work that is too old already is sent back, and nobody waits for it.
    np.testing.assert_array_equal(may_be_absorbed(jnp.array([9, 1, 1]), 5), [True, True, True])


def test_measured_durations_are_the_ones_that_pass():
    seconds = {"slow": [4.0, 6.0], "b": [1.0], "c": 1.0}
    result = fitted(Asynchronous(measured_delays(seconds)), 40)
    slow = list(result.trace.labels).index("slow")
    heard = result.trace.staleness[:, slow]
    assert heard[5:].min() >= 8 and heard.max() <= 14
    # Per unit of time two sites of the fast groups and about a fifth of one of the slow.
    assert 120 / 2.3 < result.trace.clock[-1] < 120 / 2.1


def test_settings_compare_by_value():
    assert Asynchronous({"b": 2}) == Asynchronous({"b": 2.0}) and hash(Asynchronous([1, 2])) == hash(
        Asynchronous((1.0, 2.0))
    )
    assert StochasticSubset(rates={"b": 0.5}) == StochasticSubset(rates={"b": 0.5})
    assert Asynchronous(measured_delays({"b": [1.0, 2.0]})) == Asynchronous(measured_delays({"b": (1.0, 2.0)}))


# ---------------------------------------------------------------- participation


def test_only_chosen_groups_move():
    result = fitted(StochasticSubset(1), 12)
    stepped = (result.trace.step > 0).sum(axis=1)
    assert np.all(stepped == 1) and len({int(i) for i in result.trace.step.argmax(axis=1)}) == 3
    assert not np.any(result.trace.skipped)


def test_rates_are_kept():
    """One group in one of five rounds; within 4 binomial sds."""
    result = fitted(StochasticSubset(rates={"slow": 0.2}), 200)
    share = (result.trace.step > 0).mean(axis=0)[list(result.trace.labels).index("slow")]
    assert abs(share - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 200)
    assert np.all(np.delete(result.trace.step, list(result.trace.labels).index("slow"), axis=1) == 1)


def test_per_group_damping_is_the_groups_own(x64):
    """Law 2's rate, group by group: (1 - damping)^rounds where all take part."""
    result = fitted(StochasticSubset(rates=1.0, damping={"b": 0.5}), 3)
    model = make_linear()
    exact = PVI(Partition(model, "data", LABELS), AutoMultivariateNormal(model), solver=Conjugate())
    best = exact.run(KEY, 1, X, Y, progress_bar=False).state
    for i, label in enumerate(result.trace.labels):
        left = 0.125 if label == "b" else 0.0
        found = np.asarray(result.state.sites.groups.precision[i] / best.sites.groups.precision[i])
        np.testing.assert_allclose(found, 1 - left, rtol=1e-9 if x64 else 1e-4)


def test_a_committee_is_complete_after_one_round():
    result = fitted(Committee(), 5, tol=1e-9)
    assert result.converged and len(result.losses) == 2
    assert result.trace.total_move[-1] == 0 and list(result.trace.messages[-1]) == [3, 3]


def test_distance_is_a_metric(rng):
    """Close by it is the number of sds; the triangle inequality holds for random Gaussians."""
    one, zero = jnp.ones(3), jnp.zeros(3)
    np.testing.assert_allclose(marginal_distance(zero, one, 1e-3 * one, one), 1e-3, rtol=1e-4)
    pairs = [(rng.normal(size=3) * 5, np.exp(2 * rng.normal(size=3))) for _ in range(60)]
    draws = [(jnp.asarray(loc), jnp.asarray(sd)) for loc, sd in pairs]
    for a, b, c in zip(draws[:20], draws[20:40], draws[40:], strict=True):
        assert marginal_distance(*a, *c) <= marginal_distance(*a, *b) + marginal_distance(*b, *c) + 1e-5
