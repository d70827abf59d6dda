"""Data of which some are missing (``obs_mask``): entries that are there have nothing to say but what is observed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions.transforms import biject_to
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density

from numpyro_pvi import PVI, AutoExponentialFamily, PartitionError, PVIError
from numpyro_pvi.handlers import FullPlates, _partition

N = 12
X = np.linspace(-1.5, 1.5, N)
Y = 0.4 + 0.7 * X + 0.5 * np.sin(7.0 * np.arange(N))
HERE = np.arange(N) % 4 != 1
ALL = np.ones(N, bool)


def regression(x, y, here=None):
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, 0.8), obs=y, obs_mask=here)


def counted(x, y, here=None):
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y, obs_mask=here, infer={"enumerate": "parallel"})


def fitted(model, guide, *args, rounds=40, num_groups=2):
    pvi = PVI(model, guide(model), num_groups=num_groups)
    result = pvi.run(jax.random.key(0), rounds, *args, progress_bar=False, tol=1e-6)
    return pvi, result


def evidence(x, y):
    design = np.column_stack([np.ones(len(x)), x])
    covariance = design @ np.diag([4.0, 1.0]) @ design.T + 0.64 * np.eye(len(x))
    return -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1])


@pytest.mark.parametrize("guide", [AutoNormal, AutoExponentialFamily])
def test_where_nothing_is_missing_the_fit_is_that_of_the_data(guide, tolerance):
    pvi, masked = fitted(regression, guide, X, Y, ALL)
    plain_pvi, plain = fitted(regression, guide, X, Y)
    np.testing.assert_allclose(masked.losses[-1], plain.losses[-1], atol=1e5 * tolerance)
    for name in "ab":
        found, wanted = (p.guide.quantiles(r.params, [0.1, 0.9])[name] for p, r in ((pvi, masked), (plain_pvi, plain)))
        np.testing.assert_allclose(found, wanted, atol=1e5 * tolerance)


def test_the_evidence_is_that_of_what_is_observed(tolerance):
    """And what is missing is predicted: the closed form of a linear model, which a full covariance matches."""
    given = np.where(HERE, Y, 1e3)
    pvi, result = fitted(regression, AutoMultivariateNormal, X, given, HERE)
    np.testing.assert_allclose(result.losses[-1], -evidence(X[HERE], Y[HERE]), atol=1e5 * tolerance)
    design = np.column_stack([np.ones(N), X])
    precision = np.diag([0.25, 1.0]) + design[HERE].T @ design[HERE] / 0.64
    mean = np.linalg.solve(precision, design[HERE].T @ Y[HERE] / 0.64)
    median, quantile = pvi.guide.median(result.params), pvi.guide.quantiles(result.params, [0.5, 0.8413447460685429])
    np.testing.assert_allclose(median["y_unobserved"][~HERE], (design @ mean)[~HERE], atol=1e5 * tolerance)
    sd = np.sqrt(0.64 + np.einsum("nd,de,ne->n", design, np.linalg.inv(precision), design))
    found = quantile["y_unobserved"][1] - quantile["y_unobserved"][0]
    np.testing.assert_allclose(found, np.where(HERE, 1.0, sd), atol=1e5 * tolerance)


def test_a_flat_density_of_what_is_not_missing_is_seen(monkeypatch):
    """The planted fault: q spreads for ever, and the loss falls with it, below what any fit could have."""
    monkeypatch.setattr(_partition, "with_missing_only", lambda *_: None)
    _, result = fitted(regression, AutoMultivariateNormal, X, Y, HERE, rounds=10)
    assert result.losses[-1] < -evidence(X[HERE], Y[HERE]) - 5.0


def test_values_that_are_summed_out_are_not_counted():
    """Else 12 log 2 nats apart; expectations are by draws where values are summed out, and by quadrature where not."""
    y = (Y > 0.4).astype(float)
    _, masked = fitted(counted, AutoMultivariateNormal, X, y, ALL)
    _, plain = fitted(counted, AutoMultivariateNormal, X, y)
    np.testing.assert_allclose(masked.losses[-1], plain.losses[-1], atol=0.01)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Gamma(jnp.full(3, 2.0), 1.5),
        dist.Beta(jnp.full(3, 2.0), 1.5),
        dist.Dirichlet(jnp.full((3, 2), 1.3)),
        dist.MultivariateNormal(jnp.zeros((3, 2)), 2.0 * jnp.eye(2)),
    ],
    ids=["gamma", "beta", "dirichlet", "vector"],
)
def test_the_density_is_a_normal_in_unconstrained_space(fn, tolerance):
    """Beside NumPyro's own of the transformed normal; where an entry is missing the density is the model's."""
    here = np.array([True, False, True])
    transform = biject_to(fn.support)
    normal = dist.Normal().expand(transform.inverse_shape((3, *fn.event_shape))).to_event(transform.domain.event_dim)
    wanted = dist.TransformedDistribution(normal, transform)

    def model():
        with numpyro.plate("rows", 3):
            numpyro.sample("z", fn, obs=value, obs_mask=here)

    value = fn.sample(jax.random.key(0))
    trace = handlers.trace(handlers.seed(FullPlates(model), 0)).get_trace()
    free = fn.sample(jax.random.key(1))
    found = trace["z_unobserved"]["fn"].log_prob(free)
    np.testing.assert_allclose(found[~here], fn.log_prob(free)[~here], rtol=1e2 * tolerance)
    np.testing.assert_allclose(found[here], wanted.log_prob(free)[here], rtol=1e3 * tolerance)


def by_hand(reads):
    """What ``obs_mask`` is made of, by a user's own hand, who may read the latent elsewhere."""

    def model(y, here):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("rows", len(y)):
            fn = dist.Normal(a, 1.0)
            with handlers.mask(mask=here):
                numpyro.sample("y_observed", fn, obs=y)
            with handlers.mask(mask=~here):
                z = numpyro.sample("y_unobserved", fn)
            numpyro.sample("w", dist.Normal(jnp.where(here, reads * z, 0.0), 1.0), obs=y)

    return model


def test_a_latent_that_is_read_where_the_data_are_there_is_refused():
    model = by_hand(1.0)
    with pytest.raises(
        PVIError, match="'y_unobserved' is masked where 'y_observed' is not.*'w' does: give it another name"
    ):
        PVI(model, AutoNormal(model)).init(jax.random.key(0), Y, HERE)
    model = by_hand(0.0)
    PVI(model, AutoNormal(model)).init(jax.random.key(0), Y, HERE)


def test_latents_beside_nothing_observed_are_as_the_user_wrote_them():
    def model():
        with numpyro.plate("rows", 3), handlers.mask(mask=np.array([True, False, True])):
            numpyro.sample("z_unobserved", dist.Normal(0.0, 3.0))

    values = {"z_unobserved": jnp.array([0.3, 1.0, -2.0])}
    assert log_density(FullPlates(model), (), {}, values)[0] == log_density(model, (), {}, values)[0]


def test_a_mask_of_the_users_own_stays():
    """Around ``obs_mask`` and within its distribution: entries that it leaves out have no density, missing or not."""
    here, within, around = (np.array(x, bool) for x in ([1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 0]))

    def model():
        with numpyro.plate("rows", 5), handlers.mask(mask=around):
            numpyro.sample("z", dist.Normal(0.0, 3.0).mask(within), obs=np.ones(5), obs_mask=here)

    trace = handlers.trace(handlers.seed(FullPlates(model), 0)).get_trace()
    value = jnp.linspace(-1.0, 1.0, 5)
    normal, own = (dist.Normal(0.0, sd).log_prob(value) for sd in (1.0, 3.0))
    wanted = np.where(around, np.where(here, normal, np.where(within, own, 0.0)), 0.0)
    np.testing.assert_allclose(trace["z_unobserved"]["fn"].log_prob(value), wanted, rtol=1e-6)


def test_a_fit_is_saved_and_loaded(tmp_path, tolerance):
    """Of a whole model, whose prior, that of what is not missing included, is held exactly and read anew."""

    def whole(x, y, here):
        a = numpyro.sample("a", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Normal(a * x, 0.8), obs=y, obs_mask=here)

    pvi, result = fitted(whole, AutoMultivariateNormal, X, Y, HERE, rounds=3, num_groups=1)
    pvi.save(tmp_path / "fit", result.state)
    fresh = PVI(whole, AutoMultivariateNormal(whole), num_groups=1)
    state = fresh.load(tmp_path / "fit", X, Y, HERE)
    np.testing.assert_allclose(fresh.evaluate(state, X, Y, HERE), result.losses[-1], atol=1e3 * tolerance)


@pytest.mark.parametrize(
    "fn, words",
    [
        (
            dist.Poisson(2.0),
            r"'y_unobserved' is discrete \(Poisson\).*handlers.mask\(mask=there\): numpyro.sample\('y'",
        ),
        (dist.DiscreteUniform(1, 6), r"'y_unobserved' is a DiscreteUniform whose values do not start at 0"),
    ],
    ids=["poisson", "dice"],
)
def test_values_that_cannot_be_summed_out_say_what_to_write(fn, words):
    def model(y, here):
        numpyro.sample("a", dist.Normal())
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", fn, obs=y, obs_mask=here)

    with pytest.raises(PartitionError, match=words):
        PVI(model, AutoNormal(model)).init(jax.random.key(0), np.ones(N, int), HERE)


def test_what_is_missing_in_a_scan_is_summed_over_as_elsewhere(tolerance):
    """A random walk seen at some steps: the evidence of these in closed form."""
    steps, sd = 8, 0.6
    there, path = np.array([1, 1, 0, 1, 0, 0, 1, 1], bool), 0.5 * np.cos(np.arange(8.0))

    def model(y, here):
        start = numpyro.sample("start", dist.Normal(0.0, 1.0))

        def step(before, row):
            return numpyro.sample("y", dist.Normal(before, sd), obs=row[0], obs_mask=row[1]), None

        scan(step, start, (y, here))

    _, result = fitted(model, AutoMultivariateNormal, path, there, rounds=5, num_groups=1)
    at = 1 + np.arange(steps)[there]
    covariance = 1.0 + sd**2 * np.minimum(at[:, None], at)
    seen = path[there]
    wanted = 0.5 * (seen @ np.linalg.solve(covariance, seen) + np.linalg.slogdet(2 * np.pi * covariance)[1])
    np.testing.assert_allclose(result.losses[-1], wanted, atol=1e5 * tolerance)
