"""Products of families, and features that no cell of the laws has, go the way they went."""

import json

import pytest

from . import golden
from .cells import CELLS
from .fits import shapes_compared


@pytest.mark.parametrize("name", golden.CASES)
def test_the_trajectory_is_the_one_that_was_stored(name):
    found = golden.too_far(name, golden.of_case(name))
    assert found is None, f"distances {found}: python -m tests.laws.golden stores it anew, if it was meant to move"


def test_everything_that_is_stored_is_compared():
    names = {cell.name for cell in golden.CELLS_STORED if golden.PRECISION == "float64" or cell.repeated}
    assert set(golden.stored()) == names | set(golden.CASES)
    assert len({cell.name for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize("where", ["q", "losses"])
def test_another_way_is_seen(where):
    """Ten times the tolerance, anywhere in the first rounds; a number that is none, everywhere."""
    name = "families-regression"
    for change in (10 * golden.TOLERANCES[0], float("nan")):
        other = json.loads(json.dumps(golden.stored()[name]._asdict()))
        if where == "q":
            parameter = sorted(other["q"][2])[0]
            other["q"][2][parameter][0] += change * max(1.0, abs(other["q"][2][parameter][0]))
        else:
            other["losses"][1] += change * max(1.0, abs(other["losses"][1]))
        assert golden.too_far(name, golden.Trajectory(**other)) is not None


@pytest.mark.parametrize("name", ["families-logistic", "param-parallel"])
def test_shapes_of_evaluations_are_known_and_held_to(name):
    """Nobody traces the density for them alone; a wrong word of them is seen."""
    pvi, data = golden.CASES[name].make(), golden.CASES[name].data
    state = pvi.init(golden.KEY, *data)
    with shapes_compared(_without_groups), pytest.raises(AssertionError, match="says"):
        pvi.update(state, *data)
    with shapes_compared() as known:
        pvi.update(state, *data)
    assert known == [True]


def _without_groups(problem, sites, rule):
    return type(problem).shaped(problem, sites, rule)._replace(groups=None)
