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
    9: "saved, and resumed by a fresh PVI: bit for bit what an unbroken run gives",
    10: "conjugate models: forgetting a group equals never having seen it",
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
_NETWORK = "at the network's mean: it is the sum of all sites whatever has been heard of whom"
_AGENTS = "every agent takes visits from a q of its own, which depends on the partition"
for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
    _exact = _solver in ("Conjugate", "NaturalGradient")
    TABLE |= {
        (1, _solver, "Decentralized"): Verdict(HOLDS, _NETWORK),
        (2, _solver, "Decentralized"): Verdict(
            HOLDS, "each agent's damped site, so the network's mean, not each agent's q"
        )
        if _exact
        else Verdict(DOES_NOT, "noisy sites are taken n-fold by their own agent, and nothing averages them out"),
        (3, _solver, "Decentralized"): Verdict(
            LIMIT, "the tracked mean is the mean site, and its fixed point a server's"
        )
        if _exact
        else Verdict(DOES_NOT, "agents hover within the n-fold noise of their own visits"),
        (4, _solver, "Decentralized"): Verdict(DOES_NOT, _AGENTS),
        (6, _solver, "Decentralized"): Verdict(HOLDS, _IDENTITY),
        (12, _solver, "Decentralized"): Verdict(DOES_NOT, _REFUSED)
        if _solver == "Conjugate"
        else Verdict(LIMIT, "half steps in parallel; below 4 latents no correlation makes them overshoot")
        if _exact
        else Verdict(DOES_NOT, "agents hover within the n-fold noise of their own visits"),
    }
_LATE = "fixed points are those of the visits, and visits come to rest with q, whatever the order and age of messages"
_ALONE = "members do not see each other: a product of posteriors is no fixed point, except where each is exact"
for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
    _exact = _solver in ("Conjugate", "NaturalGradient")
    _steps = Verdict(LIMIT, "visits approach the exact site, and a lossy link only makes them later")
    for _schedule in ("Asynchronous", "StochasticSubset", "Committee"):
        TABLE |= {
            (1, _solver, _schedule): Verdict(HOLDS, _SUMS),
            (4, _solver, _schedule): Verdict(DOES_NOT, "groups do not all move from one q in one round"),
            (6, _solver, _schedule): Verdict(HOLDS, _IDENTITY),
        }
    TABLE |= {
        (2, _solver, "Asynchronous"): Verdict(HOLDS, _QUADRATIC) if _exact else _steps,
        (2, _solver, "StochasticSubset"): Verdict(LIMIT, "exact once every group was drawn, which takes a random time"),
        (2, _solver, "Committee"): Verdict(
            HOLDS if _exact else LIMIT, "a member's site is its factor's, whatever its share"
        ),
        (3, _solver, "Committee"): Verdict(DOES_NOT, _ALONE),
        (12, _solver, "Committee"): Verdict(
            DOES_NOT, "members weigh their locations with their own diagonals, not with the posterior's"
        ),
    }
    for _schedule in ("Asynchronous", "StochasticSubset"):
        _noise = Verdict(LIMIT, _LATE if _exact else _NOISE)
        TABLE |= {
            (3, _solver, _schedule): _noise,
            (12, _solver, _schedule): Verdict(
                LIMIT,
                "a group whose changes turn back undiminished halves its step, and nothing else is lost on the way",
            ),
        }
TABLE[3, "Conjugate", "Committee"] = Verdict(HOLDS, "the exact posterior, as members' sites are exact")
for _schedule in ("Asynchronous", "StochasticSubset", "Committee"):
    TABLE[12, "Conjugate", _schedule] = Verdict(DOES_NOT, _REFUSED)
_ONCE = "a site is absorbed once, from what came before it, and nothing that comes later mends it"
for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
    _exact = _solver in ("Conjugate", "NaturalGradient")
    TABLE |= {
        (1, _solver, "Streaming"): Verdict(HOLDS, _SUMS),
        (2, _solver, "Streaming"): Verdict(HOLDS, _QUADRATIC) if _exact else Verdict(DOES_NOT, f"{_STEPS}; {_ONCE}"),
        (3, _solver, "Streaming"): Verdict(DOES_NOT, _ONCE),
        (4, _solver, "Streaming"): Verdict(DOES_NOT, "a visit sees the q that earlier groups have moved"),
        (6, _solver, "Streaming"): Verdict(HOLDS, _IDENTITY),
        (12, _solver, "Streaming"): Verdict(DOES_NOT, _REFUSED if _solver == "Conjugate" else _ONCE),
    }
TABLE[3, "Conjugate", "Streaming"] = Verdict(HOLDS, "the exact posterior is the only fixed point")

_FORGET = (
    "a quadratic factor's site says nothing of any other group's rows, so taking one out leaves what the others say"
)
_APPROACH = "the solver's own noise remains in the other sites, which were drawn beside the group"
for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
    TABLE[10, _solver, "Decentralized"] = Verdict(DOES_NOT, "the agents of a graph are those it was made with")
    for _schedule in ("Sequential", "Synchronous", "Streaming", "Asynchronous", "StochasticSubset", "Committee"):
        _exact = _solver in ("Conjugate", "NaturalGradient")
        TABLE[10, _solver, _schedule] = Verdict(HOLDS, _FORGET) if _exact else Verdict(DOES_NOT, _APPROACH)

for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
    for _schedule in (
        "Sequential",
        "Synchronous",
        "Asynchronous",
        "StochasticSubset",
        "Committee",
        "Decentralized",
        "Streaming",
    ):
        TABLE[9, _solver, _schedule] = Verdict(HOLDS, "a round reads the state and the data, and nothing else")

_SCHEDULES = (
    "Sequential",
    "Synchronous",
    "Asynchronous",
    "StochasticSubset",
    "Committee",
    "Decentralized",
    "Streaming",
)
_TO_EP = "rounds contract towards EP's fixed point, they do not reach it"
_NOT_EP = "a group's tilted distribution is matched before the other groups have settled"
for _schedule in _SCHEDULES:
    for _solver in ("Conjugate", "NaturalGradient", "LocalELBO", "StochasticNaturalGradient"):
        TABLE[5, _solver, _schedule] = Verdict(DOES_NOT, "it matches no moments")
    TABLE |= {
        (1, "PowerEP", _schedule): Verdict(HOLDS, _NETWORK if _schedule == "Decentralized" else _SUMS),
        (2, "PowerEP", _schedule): Verdict(HOLDS, "a quadratic factor's tilted distribution is Gaussian at any power"),
        (3, "PowerEP", _schedule): Verdict(
            DOES_NOT, "its fixed points are stationary for its own evidence, not the ELBO"
        ),
        (4, "PowerEP", _schedule): Verdict(
            DOES_NOT, "a group's tilted distribution depends on what else is in the group"
        ),
        (5, "PowerEP", _schedule): Verdict(DOES_NOT, _NOT_EP)
        if _schedule in ("Committee", "Streaming")
        else Verdict(LIMIT, _TO_EP),
        (6, "PowerEP", _schedule): Verdict(HOLDS, _IDENTITY),
        (9, "PowerEP", _schedule): Verdict(HOLDS, "a round reads the state and the data, and nothing else"),
        (10, "PowerEP", _schedule): Verdict(DOES_NOT, "the agents of a graph are those it was made with")
        if _schedule == "Decentralized"
        else Verdict(HOLDS, _FORGET),
        (12, "PowerEP", _schedule): Verdict(DOES_NOT, "matched marginals are wider than the mean-field optimum's"),
    }
TABLE[2, "PowerEP", "StochasticSubset"] = Verdict(LIMIT, "exact once every group was drawn, which takes a random time")

_ANCHORED = "an inner step closes half of a site's gap or so, at an anchor that follows q"
for _schedule in _SCHEDULES:
    _once = _schedule == "Streaming"
    TABLE |= {
        (1, "SNEP", _schedule): Verdict(HOLDS, _NETWORK if _schedule == "Decentralized" else _SUMS),
        (2, "SNEP", _schedule): Verdict(DOES_NOT, f"{_ANCHORED}; {_ONCE}") if _once else Verdict(LIMIT, _ANCHORED),
        (3, "SNEP", _schedule): TABLE[3, "PowerEP", _schedule],
        (4, "SNEP", _schedule): TABLE[4, "PowerEP", _schedule],
        (5, "SNEP", _schedule): TABLE[5, "PowerEP", _schedule],
        (6, "SNEP", _schedule): Verdict(HOLDS, _IDENTITY),
        (9, "SNEP", _schedule): TABLE[9, "PowerEP", _schedule],
        (10, "SNEP", _schedule): Verdict(
            DOES_NOT, "the other sites are on their way still, and their anchors remember the group"
        ),
        (12, "SNEP", _schedule): TABLE[12, "PowerEP", _schedule],
    }
_TIED = "it is refused when PVI is made: the schedule keeps a site per group, and the solver has one for all"
_AVERAGE = "the one site stands for the average group, and so depends on the partition"
for _schedule in _SCHEDULES:
    TABLE |= {(law, "StochasticEP", _schedule): Verdict(DOES_NOT, _TIED) for law in LAWS}
for _schedule in ("Sequential", "Synchronous"):
    TABLE |= {
        (1, "StochasticEP", _schedule): Verdict(HOLDS, "prior + M * site; q is re-summed from it after every round"),
        (2, "StochasticEP", _schedule): Verdict(
            HOLDS, "the site moves to the mean of the factors, their natural parameters"
        ),
        (3, "StochasticEP", _schedule): Verdict(DOES_NOT, _AVERAGE),
        (4, "StochasticEP", _schedule): Verdict(DOES_NOT, _AVERAGE),
        (5, "StochasticEP", _schedule): Verdict(
            LIMIT, "EP for one group; small powers meet mini-batch natural gradients"
        ),
        (6, "StochasticEP", _schedule): Verdict(HOLDS, f"{_IDENTITY}; the evidence is exact for one group only"),
        (9, "StochasticEP", _schedule): Verdict(HOLDS, "a round reads the state and the data, and nothing else"),
        (10, "StochasticEP", _schedule): Verdict(
            DOES_NOT, "a group's share of the site is not known, so it is refused"
        ),
        (12, "StochasticEP", _schedule): Verdict(DOES_NOT, "matched marginals are wider than the mean-field optimum's"),
    }
TABLE[2, "StochasticEP", "Sequential"] = Verdict(LIMIT, "groups are mini-batches of the mean, and steps shrink")
for _schedule in _SCHEDULES:
    TABLE |= {(law, "AlphaDivergence", _schedule): TABLE[law, "PowerEP", _schedule] for law in (1, 3, 4, 5, 6, 9, 12)}
    TABLE[2, "AlphaDivergence", _schedule] = Verdict(
        DOES_NOT, "a visit ends as near to the exact site as its optimiser's steps"
    )
    TABLE[10, "AlphaDivergence", _schedule] = Verdict(DOES_NOT, f"{_APPROACH} (of its optimiser)")

_NOISED = "every site keeps the noise of its last release, and clipping bounds what one release says"
for _schedule in _SCHEDULES:
    TABLE |= {
        (1, "DifferentialPrivacy", _schedule): Verdict(
            HOLDS, "a group keeps the noised site, and q is re-summed from these after every round"
        ),
        (2, "DifferentialPrivacy", _schedule): Verdict(DOES_NOT, _NOISED),
        (3, "DifferentialPrivacy", _schedule): Verdict(DOES_NOT, _NOISED),
        (4, "DifferentialPrivacy", _schedule): Verdict(
            DOES_NOT, "changes are clipped and noised group by group, so that the partition matters"
        ),
        (5, "DifferentialPrivacy", _schedule): Verdict(DOES_NOT, "it matches no moments"),
        (6, "DifferentialPrivacy", _schedule): Verdict(
            DOES_NOT, "no loss and no evidence is given: they are looks at the rows that nothing bounds"
        ),
        (9, "DifferentialPrivacy", _schedule): Verdict(
            HOLDS, "the noise is of the state's key, and the count of releases is part of the state"
        ),
        (10, "DifferentialPrivacy", _schedule): Verdict(
            DOES_NOT, "it is refused: what was released of a group cannot be taken back, and its count would be lost"
        ),
        (12, "DifferentialPrivacy", _schedule): Verdict(DOES_NOT, _NOISED),
    }

# ----------------------------------------------------------------------------------------------------------- guides

# Which solver goes with which schedule under which guide, and why not where it does not: for a reason of mathematics, or
# because nobody has built it. The second kind may only become fewer.
GUIDES = ("AutoMultivariateNormal", "AutoDiagonalNormal", "AutoNormal", "AutoExponentialFamily")
WORKS, CANNOT, UNBUILT = "works", "cannot", "unbuilt"
MOST_UNBUILT = {"AutoMultivariateNormal": 0, "AutoDiagonalNormal": 0, "AutoNormal": 0, "AutoExponentialFamily": 0}

SOLVERS = (
    "NaturalGradient",
    "Conjugate",
    "LocalELBO",
    "StochasticNaturalGradient",
    "PowerEP",
    "SNEP",
    "StochasticEP",
    "AlphaDivergence",
    "DifferentialPrivacy",
)
COMBINATIONS: dict[tuple[str, str, str], Verdict] = {
    (guide, solver, schedule): Verdict(
        WORKS, "sites are natural parameters, and a visit is a solver's whatever the schedule"
    )
    for guide in GUIDES
    for solver in SOLVERS
    for schedule in _SCHEDULES
}
for _guide in GUIDES:
    for _schedule in ("Asynchronous", "StochasticSubset", "Committee", "Decentralized", "Streaming"):
        COMBINATIONS[_guide, "StochasticEP", _schedule] = Verdict(
            CANNOT,
            "one site stands for all groups: there is none of a group's own to be late, drawn, averaged or absorbed",
        )
_FAMILIES = "AutoExponentialFamily"

# What a fit can do beside its rounds, by guide. Where it can, the test that shows it.
FEATURES: dict[tuple[str, str], Verdict] = {
    **{
        (feature, guide): Verdict(WORKS, test)
        for guide in GUIDES[:3]
        for feature, test in {
            "own latents": "tests/laws/test_any_model.py::test_law_1_sites_and_priors_sum_to_q",
            "numpyro.param": "tests/test_params.py",
            "discrete latents summed out": "tests/laws/test_any_model.py::test_law_6_the_loss_is_the_elbo_of_the_guide",
            "save": "tests/laws/test_resume.py::test_resumed_is_unbroken",
            "add": "tests/laws/test_groups.py::test_laws_hold_at_every_arrival_and_departure",
            "revisit": "tests/laws/test_groups.py::test_forgetting_is_approximate_until_the_rest_is_revisited",
            "forget": "tests/laws/test_groups.py::test_laws_hold_at_every_arrival_and_departure",
            "own latents of groups that come and go": "tests/test_local_latents.py",
            "own latents under every schedule": "tests/test_local_latents.py::test_one_round_is_exact_where_everything_is_gaussian",
            "own latents integrated out of moments": "tests/solvers/test_integrated_latents.py",
            "own latents beside batches of rows": "tests/solvers/test_beside_own_latents.py",
            "khat": "tests/test_khat.py",
            "prequential": "tests/test_groups.py",
            "clients": "tests/test_clients.py::test_trajectories_are_those_of_one_process",
            "clients with rows of their own": "tests/test_rowless.py::test_a_server_without_rows_fits_what_one_process_fits",
        }.items()
    },
    **{
        (feature, _FAMILIES): Verdict(WORKS, test)
        for feature, test in {
            "own latents": "tests/laws/test_vmp.py::test_sites_hold_their_own_rows",
            "discrete latents summed out": "tests/laws/test_vmp.py::test_a_shared_discrete_latent_is_summed_over",
            "discrete latents in q": "tests/laws/test_vmp.py::test_rounds_are_coordinate_ascent_of_a_mixture",
            "save": "tests/laws/test_product_resume.py::test_resumed_is_unbroken",
            "add": "tests/test_exponential_stream.py::test_groups_that_leave_and_come_back_are_fitted_again",
            "revisit": "tests/test_exponential_stream.py::test_a_stream_that_is_revisited_ends_where_all_rows_do",
            "forget": "tests/test_exponential_stream.py::test_forgetting_a_group_is_never_having_seen_it",
            "own latents of groups that come and go": "tests/test_exponential_stream.py::test_rows_with_members_come_and_go",
            "khat": "tests/test_khat_product.py",
            "numpyro.param": "tests/test_product_params.py::test_a_prior_is_fitted_to_the_marginal_likelihood",
            "prequential": "tests/test_exponential_stream.py::test_scores_before_absorbing_sum_to_the_evidence",
            "clients": "tests/laws/test_product_clients.py::test_trajectories_are_those_of_one_process",
            "clients with rows of their own": (
                "tests/laws/test_product_rowless.py::test_a_server_without_rows_fits_what_one_process_fits"
            ),
        }.items()
    },
    **{
        ("discrete latents in q", guide): Verdict(CANNOT, "a Gaussian has no mass on single values")
        for guide in GUIDES[:3]
    },
    ("own latents under every schedule", _FAMILIES): Verdict(
        WORKS, "tests/laws/test_product_own.py::test_visits_end_where_ascent_by_hand_does"
    ),
    ("own latents beside batches of rows", _FAMILIES): Verdict(
        WORKS, "tests/laws/test_product_some.py::test_rows_whose_latents_have_events_of_their_own_are_drawn"
    ),
    ("own latents integrated out of moments", _FAMILIES): Verdict(
        WORKS, "tests/laws/test_product_integrated.py::test_counts_with_rates_of_their_own_are_negative_binomial"
    ),
}
MOST_UNBUILT_FEATURES = 0

# Runtimes share every law: they may not change a trajectory beyond rounding (tests/test_runtime.py).
RUNTIMES: dict[str, Verdict] = {
    "Vmap": Verdict(HOLDS, "the reference"),
    "LaxMap": Verdict(HOLDS, "the same sums, one chunk at a time"),
    "Sharded": Verdict(HOLDS, "the same sums, those of every device added up (tests/test_sharded.py)"),
}

# Laws that compare several fits are checked in files of their own.
CHECKED_ELSEWHERE = {
    **{key: "test_moments.py" for key in TABLE if key[0] == 5},
    **{key: "test_alpha.py" for key in TABLE if key[:2] == (5, "AlphaDivergence")},
    **{key: "test_tied.py" for key in TABLE if key[1] == "StochasticEP"},
    **{
        (10, solver, schedule): "test_groups.py"
        for solver in ("Conjugate", "NaturalGradient", "PowerEP")
        for schedule in ("Sequential", "Synchronous", "Streaming", "Asynchronous", "StochasticSubset", "Committee")
    },
    **{key: "test_resume.py" for key in TABLE if key[0] == 9},
    **{key: "test_privacy.py" for key in TABLE if key[1] == "DifferentialPrivacy"},
    (4, "Conjugate", "Synchronous"): "test_partitions.py",
    (4, "NaturalGradient", "Synchronous"): "test_partitions.py",
    **{
        (law, solver, schedule): "test_stochastic.py"
        for law in (2, 3, 12)
        for solver in ("LocalELBO", "StochasticNaturalGradient")
        for schedule in ("Sequential", "Synchronous", "Asynchronous", "StochasticSubset")
    },
    **{(2, solver, "StochasticSubset"): "test_asynchronous.py" for solver in ("Conjugate", "NaturalGradient")},
    (2, "PowerEP", "StochasticSubset"): "test_moments.py",
    **{(law, "SNEP", schedule): "test_snep.py" for law in (2, 5) for schedule in _SCHEDULES},
    **{(2, solver, "Committee"): "test_stochastic.py" for solver in ("LocalELBO", "StochasticNaturalGradient")},
}
