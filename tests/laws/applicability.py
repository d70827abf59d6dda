"""Which law holds for which solver under which schedule, and why; and for which runtime.

One row per law x solver x schedule. Adding a public solver, schedule or runtime without a row fails the suite
(``test_applicability.py``), and so does a "holds" or "in the limit" that no fit checks.
"""

from __future__ import annotations

from typing import NamedTuple

HOLDS, LIMIT, DOES_NOT = "holds", "in the limit", "does not"


class Verdict(NamedTuple):
    """``verdict`` is one of "holds", "in the limit", "does not"; ``reason`` is why."""

    verdict: str
    reason: str


LAWS = {
    1: "prior + sum of sites = posterior naturals after every update",
    2: "conjugate models: exact once every group was absorbed, and error (1 - damping)^rounds",
    3: "a fixed point is stationary for the global ELBO, whatever the partition",
    4: "one inner step, common damping, in parallel: the same q for every partition",
    5: "moments: power 1 is EP, and the limit meets variational inference linearly in the power",
    6: "the accounting identity, and the evidence of conjugate models",
    12: "mean-field q, correlation .9, defaults: converges to the mean-field optimum",
}

_SUMS = "q is re-summed from the stored sites after every round"
_QUADRATIC = "a quadratic factor's site is the same at every q, so the order of visits is of no account"
_IDENTITY = "the identity is algebra: it is true of any sites whose q is normalisable"
_NOISE = "Monte Carlo noise of a visit's steps; it shrinks with draws, and vanishes for a quadratic factor with pairs"
_STEPS = "some steps of an optimiser, damped by 1/M in parallel, approach the exact site"
_REFUSED = "Conjugate refuses a mean-field q: a coupled quadratic factor is not in the span of its statistics"

TABLE: dict[tuple[int, str, str], Verdict] = {
    (1, "Conjugate", "Sequential"): Verdict(HOLDS, _SUMS),
    (1, "Conjugate", "Synchronous"): Verdict(HOLDS, _SUMS),
    (1, "NaturalGradient", "Sequential"): Verdict(HOLDS, _SUMS),
    (1, "NaturalGradient", "Synchronous"): Verdict(HOLDS, _SUMS),
    (2, "Conjugate", "Sequential"): Verdict(HOLDS, _QUADRATIC),
    (2, "Conjugate", "Synchronous"): Verdict(HOLDS, _QUADRATIC),
    (2, "NaturalGradient", "Sequential"): Verdict(
        HOLDS, "a full natural-gradient step on a quadratic factor is Conjugate's"
    ),
    (2, "NaturalGradient", "Synchronous"): Verdict(
        HOLDS, "a full natural-gradient step on a quadratic factor is Conjugate's"
    ),
    (3, "Conjugate", "Sequential"): Verdict(HOLDS, "the exact posterior is the only fixed point"),
    (3, "Conjugate", "Synchronous"): Verdict(HOLDS, "the exact posterior is the only fixed point"),
    (3, "NaturalGradient", "Sequential"): Verdict(
        LIMIT, "rounds contract towards the fixed point, they do not reach it"
    ),
    (3, "NaturalGradient", "Synchronous"): Verdict(
        LIMIT, "rounds contract towards the fixed point, they do not reach it"
    ),
    (4, "Conjugate", "Sequential"): Verdict(
        DOES_NOT, "visits are not in parallel; only what law 2 says is common to all partitions"
    ),
    (4, "Conjugate", "Synchronous"): Verdict(
        HOLDS, "the sum of the sites moves by damping times the sum of the targets"
    ),
    (4, "NaturalGradient", "Sequential"): Verdict(DOES_NOT, "a visit sees the q that earlier groups have moved"),
    (4, "NaturalGradient", "Synchronous"): Verdict(
        HOLDS, "the sum of the sites moves by damping times the sum of the targets"
    ),
    (6, "Conjugate", "Sequential"): Verdict(HOLDS, _IDENTITY),
    (6, "Conjugate", "Synchronous"): Verdict(HOLDS, _IDENTITY),
    (6, "NaturalGradient", "Sequential"): Verdict(HOLDS, _IDENTITY),
    (6, "NaturalGradient", "Synchronous"): Verdict(HOLDS, _IDENTITY),
    (12, "Conjugate", "Sequential"): Verdict(DOES_NOT, _REFUSED),
    (12, "Conjugate", "Synchronous"): Verdict(DOES_NOT, _REFUSED),
    (12, "NaturalGradient", "Sequential"): Verdict(
        LIMIT, "coordinate ascent over groups, each visit guarded by its free energy"
    ),
    (12, "NaturalGradient", "Synchronous"): Verdict(
        LIMIT, "the joint step is capped by the largest eigenvalue of the scaled curvature"
    ),
}
for _solver in ("LocalELBO", "StochasticNaturalGradient"):
    for _schedule in ("Sequential", "Synchronous"):
        TABLE |= {
            (1, _solver, _schedule): Verdict(HOLDS, _SUMS),
            (2, _solver, _schedule): Verdict(LIMIT, _STEPS),
            (3, _solver, _schedule): Verdict(LIMIT, _NOISE),
            (4, _solver, _schedule): Verdict(DOES_NOT, "a visit takes several steps at its own local q"),
            (6, _solver, _schedule): Verdict(HOLDS, _IDENTITY),
            (12, _solver, _schedule): Verdict(
                LIMIT, "a visit moves one site as if alone; 1/M of the joint step, or a sweep, cannot overshoot"
            ),
        }
for _schedule in ("Sequential", "Synchronous"):
    for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
        TABLE[5, _solver, _schedule] = Verdict(DOES_NOT, "it matches no moments")
    TABLE |= {
        (1, "PowerEP", _schedule): Verdict(HOLDS, _SUMS),
        (2, "PowerEP", _schedule): Verdict(HOLDS, "a quadratic factor's tilted distribution is Gaussian at any power"),
        (3, "PowerEP", _schedule): Verdict(
            DOES_NOT, "its fixed points are stationary for its own evidence, not the ELBO"
        ),
        (4, "PowerEP", _schedule): Verdict(
            DOES_NOT, "a group's tilted distribution depends on what else is in the group"
        ),
        (5, "PowerEP", _schedule): Verdict(LIMIT, "rounds contract towards EP's fixed point, they do not reach it"),
        (6, "PowerEP", _schedule): Verdict(HOLDS, _IDENTITY),
        (12, "PowerEP", _schedule): Verdict(DOES_NOT, "matched marginals are wider than the mean-field optimum's"),
    }

# Runtimes share every law: they may not change a trajectory beyond rounding (tests/test_runtime.py).
RUNTIMES: dict[str, Verdict] = {
    "Vmap": Verdict(HOLDS, "the reference"),
    "LaxMap": Verdict(HOLDS, "the same sums, one chunk at a time"),
}

# Laws that compare several fits are checked in files of their own.
CHECKED_ELSEWHERE = {
    (5, "PowerEP", "Sequential"): "test_moments.py",
    (5, "PowerEP", "Synchronous"): "test_moments.py",
    (4, "Conjugate", "Synchronous"): "test_partitions.py",
    (4, "NaturalGradient", "Synchronous"): "test_partitions.py",
    **{
        (law, solver, schedule): "test_stochastic.py"
        for law in (2, 3, 12)
        for solver in ("LocalELBO", "StochasticNaturalGradient")
        for schedule in ("Sequential", "Synchronous")
    },
}
