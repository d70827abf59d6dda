"""The efax package, which shares no code with ours, as an oracle of log-partitions, mean maps, entropies and KL.

efax needs Python 3.12; these tests say so and are skipped where it is missing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.families.cases import CASES

efax = pytest.importorskip("efax", reason="efax, the independent oracle, needs Python >= 3.12 and the extra 'test'")

BY_NAME = {case.name: case for case in CASES}


def wishart(n):
    return efax.WishartNP(-0.5 * n.rate, n.log_det)


# efax's natural parameters from ours, and the statistics of ours from efax's expectation parameters.
PAIRS = {
    "normal": (
        lambda n: efax.NormalNP(n.precision_mean, -0.5 * n.precision),
        lambda e: (e.mean, -0.5 * e.second_moment),
    ),
    "log_normal": (
        lambda n: efax.LogNormalNP(n.log + 1, -0.5 * n.precision),
        lambda e: (e.mean, -0.5 * e.second_moment),
    ),
    "full": (
        lambda n: efax.MultivariateNormalNP(n.precision_mean, -0.5 * n.precision),
        lambda e: (e.mean, -0.5 * e.second_moment),
    ),
    "gamma": (lambda n: efax.GammaNP(-n.rate, n.log), lambda e: (e.mean_log, -e.mean)),
    "exponential": (lambda n: efax.ExponentialNP(-n.rate), lambda e: (-e.mean,)),
    "beta": (
        lambda n: efax.BetaNP(jnp.stack([n.log, n.log_complement], -1)),
        lambda e: (e.mean_log_probability[..., 0], e.mean_log_probability[..., 1]),
    ),
    "dirichlet": (lambda n: efax.DirichletNP(n.log), lambda e: (e.mean_log_probability,)),
    "bernoulli": (lambda n: efax.BernoulliNP(n.logit), lambda e: (e.probability,)),
    "wishart": (wishart, lambda e: (e.expected_log_det, -0.5 * e.mean)),
    "von_mises": (
        lambda n: efax.VonMisesFisherNP(jnp.stack([n.cos, n.sin], -1)),
        lambda e: (e.mean[..., 0], e.mean[..., 1]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equal_to_efax(name, x64):
    case, (convert, statistics) = BY_NAME[name], PAIRS[name]
    q, p = case.natural(21, 0.6), case.natural(22, 0.6)
    theirs_q, theirs_p = convert(q), convert(p)
    # efax's Bessel functions and exponential-family entropies carry a few more rounding errors than ours.
    tolerance = 1e-7 if x64 else 2e-3

    def close(a, b):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)

    theirs_mean = statistics(theirs_q.to_exp())
    ours_mean = jax.tree.leaves(case.family.natural_to_mean(q))
    for a, b in zip(ours_mean, theirs_mean, strict=True):
        close(a, b)
    # Normalisers may differ by the base measure's constant, which no difference of two of them sees.
    close(
        case.family.log_partition(q) - case.family.log_partition(p),
        theirs_q.log_normalizer() - theirs_p.log_normalizer(),
    )
    close(case.family.entropy(q), theirs_q.entropy())
    close(case.family.kl(q, p), theirs_q.kl_divergence(theirs_p))
