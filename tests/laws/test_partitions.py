"""Law 4 (PVI property 5): one inner step, a common damping, all sites in parallel: one q for every partition."""

import numpy as np
import pytest

from numpyro_pvi.schedules import Synchronous
from numpyro_pvi.solvers import Conjugate, NaturalGradient

from .fits import fit, numbers
from .models import groups, make_linear, make_logistic, rows

PLAIN = NaturalGradient(backtracking=False)
# Rounding: sums of the same rows in another order, through a handful of rounds.
TOLERANCE = (1e-10, 1e-5)


def largest_gap(first, second):
    """Largest relative difference between the naturals of two trajectories' q, at any state."""
    pairs = [(numbers(a).total, numbers(b).total) for a, b in zip(first.states, second.states, strict=True)]
    return max(np.max(np.abs(x - y)) / (np.max(np.abs(y)) or 1.0) for a, b in pairs for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("solver", [Conjugate(), PLAIN], ids=["conjugate", "natural"])
def test_linear_trajectories_do_not_depend_on_the_partition(solver, x64):
    X, y, _ = rows()
    found = [fit(make_linear(), X, y, groups(m), solver, Synchronous(damping=0.3), 4) for m in (1, 3, 12)]
    assert all(largest_gap(other, found[0]) <= TOLERANCE[not x64] for other in found[1:])
    # The law would be empty if nothing moved.
    first = found[0]
    assert largest_gap(first._replace(states=first.states[1:]), first._replace(states=first.states[:-1])) > 0.01


def test_logistic_trajectories_do_not_depend_on_the_partition(x64):
    X, _, y = rows()
    found = [fit(make_logistic(), X, y, groups(m), PLAIN, Synchronous(damping=0.5), 6) for m in (1, 5)]
    assert largest_gap(found[1], found[0]) <= TOLERANCE[not x64]
