"""The table is complete, and everything it promises is checked by some fit."""

import inspect
import pathlib

import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import autoguide

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError, runtime, schedules, solvers

from .applicability import (
    CANNOT,
    CHECKED_ELSEWHERE,
    COMBINATIONS,
    DOES_NOT,
    FEATURES,
    GUIDES,
    HOLDS,
    LAWS,
    LIMIT,
    MOST_UNBUILT,
    MOST_UNBUILT_FEATURES,
    RUNTIMES,
    SOLVERS,
    TABLE,
    UNBUILT,
    WORKS,
)
from .cells import ALPHA, CELLS, CONJUGATE, LOCAL, NATURAL, STOCHASTIC, ring


def concrete(module, method):
    """Names of the public classes of a room that implement its contract."""
    found = [getattr(module, name) for name in module.__all__]
    return {
        c.__name__
        for c in found
        if inspect.isclass(c) and callable(getattr(c, method, None)) and not getattr(c, "_is_protocol", False)
    }


def test_every_public_solver_and_schedule_has_a_row_for_every_law():
    wanted = {
        (law, solver, schedule)
        for law in LAWS
        for solver in concrete(solvers, "solve")
        for schedule in concrete(schedules, "round")
    }
    missing, stale = sorted(wanted - set(TABLE)), sorted(set(TABLE) - wanted)
    # Small sets are compared: pytest's own account of two tables takes it half a minute.
    assert not missing and not stale, f"missing: {missing}; stale: {stale}"


def test_every_public_runtime_has_a_row():
    assert concrete(runtime, "sum_chunks") == set(RUNTIMES)


def test_rows_have_a_verdict_and_a_reason():
    for verdict in [*TABLE.values(), *RUNTIMES.values()]:
        assert verdict.verdict in (HOLDS, LIMIT, DOES_NOT)
        assert len(verdict.reason) > 10


def test_every_promise_is_checked_by_a_fit():
    checked = {(law, type(c.solver).__name__, type(c.schedule).__name__) for c in CELLS for law in c.laws}
    promised = {key for key, verdict in TABLE.items() if verdict.verdict != DOES_NOT}
    missing = promised - checked - set(CHECKED_ELSEWHERE)
    assert not missing, f"no fit checks {sorted(missing)}"
    here = pathlib.Path(__file__).parent
    assert all((here / name).is_file() for name in CHECKED_ELSEWHERE.values())


@pytest.mark.parametrize("room", ["solver", "schedule"])
def test_a_public_object_without_a_row_is_noticed(monkeypatch, room):
    """The completeness check can fail: a class added to a room's public names is found missing."""
    module, method = (solvers, "solve") if room == "solver" else (schedules, "round")
    newcomer = type("Newcomer", (), {method: lambda self: None})
    monkeypatch.setattr(module, "Newcomer", newcomer, raising=False)
    monkeypatch.setattr(module, "__all__", [*module.__all__, "Newcomer"])
    with pytest.raises(AssertionError, match="Newcomer"):
        test_every_public_solver_and_schedule_has_a_row_for_every_law()


# ----------------------------------------------------------------------------------------------------------- guides

EXAMPLES = {
    "NaturalGradient": NATURAL,
    "Conjugate": CONJUGATE,
    "LocalELBO": LOCAL,
    "StochasticNaturalGradient": STOCHASTIC,
    "AlphaDivergence": ALPHA,
    "DifferentialPrivacy": solvers.DifferentialPrivacy(NATURAL, 0.0, 1.0),
    "StochasticSubset": schedules.StochasticSubset(2),
    "Decentralized": ring(3),
}


def example(name):
    """One object of a public class."""
    return EXAMPLES.get(name) or getattr(solvers, name, getattr(schedules, name, None))()


def location(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def make(guide, solver, schedule):
    """A PVI of these; whether they go together is known before any data are."""
    cls = AutoExponentialFamily if guide == "AutoExponentialFamily" else getattr(autoguide, guide)
    split = Partition(location, "data", [0, 1, 2])
    return PVI(split, cls(location), solver=example(solver), schedule=example(schedule))


def test_every_combination_of_a_guide_a_solver_and_a_schedule_has_a_verdict():
    rooms = concrete(solvers, "solve"), concrete(schedules, "round")
    wanted = {(guide, solver, schedule) for guide in GUIDES for solver in rooms[0] for schedule in rooms[1]}
    assert set(COMBINATIONS) == wanted and set(SOLVERS) == rooms[0]


@pytest.mark.parametrize("guide", GUIDES)
def test_combinations_are_taken_or_refused_as_the_table_says(guide):
    wrong = []
    for (own, solver, schedule), verdict in COMBINATIONS.items():
        if own != guide:
            continue
        try:
            make(guide, solver, schedule)
            works = True
        except PVIError as error:
            works = False
            # A refusal names what the user wrote and something to write instead.
            assert solver in str(error) or schedule in str(error), (solver, schedule, str(error))
            assert "use " in str(error) or "write " in str(error), (solver, schedule, str(error))
        if works != (verdict.verdict == WORKS):
            wrong.append((solver, schedule, verdict.verdict))
    assert not wrong
    unbuilt = sum(v.verdict == UNBUILT for (own, *_), v in COMBINATIONS.items() if own == guide)
    assert unbuilt <= MOST_UNBUILT[guide]


def test_a_tenth_of_the_combinations_at_most_cannot_be():
    cannot = [key for key, verdict in COMBINATIONS.items() if verdict.verdict == CANNOT]
    assert len(cannot) <= 0.1 * len(COMBINATIONS)


def test_every_feature_has_a_verdict_for_every_guide():
    names = {feature for feature, _ in FEATURES}
    assert set(FEATURES) == {(feature, guide) for feature in names for guide in GUIDES}
    assert sum(v.verdict == UNBUILT for v in FEATURES.values()) <= MOST_UNBUILT_FEATURES
    root = pathlib.Path(__file__).parents[2]
    for verdict in FEATURES.values():
        if verdict.verdict == WORKS:
            path, _, name = verdict.reason.partition("::")
            text = (root / path).read_text()
            assert not name or f"def {name}(" in text, verdict.reason
