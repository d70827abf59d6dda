"""The table is complete, and everything it promises is checked by some fit."""

import inspect
import pathlib

import pytest

from numpyro_pvi import runtime, schedules, solvers

from .applicability import CHECKED_ELSEWHERE, DOES_NOT, HOLDS, LAWS, LIMIT, RUNTIMES, TABLE
from .cells import CELLS


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
