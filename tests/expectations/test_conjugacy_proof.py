"""Conjugacy is proved where a trace shows it, and not claimed where a kink may hide beyond the values looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import AutoExponentialFamily
from numpyro_pvi._exponential_plan import _exact_prior, components_of
from numpyro_pvi.expectations import _affinity as affinity
from numpyro_pvi.expectations import find_structure
from numpyro_pvi.factors import Form, ValueCall
from numpyro_pvi.families import ProductFamily

X = np.linspace(-1, 1, 5)
Y, COUNTS = np.sin(3 * X), np.array([1, 0, 2, 1, 3])
KEYS = range(8)


def roles(terms, key, **distributions):
    """What is found of every latent, with or without the interpreter's word."""
    family = ProductFamily.for_distributions(distributions)
    natural = family.from_distribution(distributions)
    found = find_structure(family, natural, terms, jax.random.key(key), "auto", "test factor")
    return found, {role.name: role for role in found.roles}


def clipped_rate(values):
    return dist.Poisson(jnp.minimum(values["r"], 6.0)).log_prob(COUNTS)


def rectified(values):
    return dist.Normal(jnp.maximum(values["w"], 0) * X, 0.5).log_prob(Y)


def regression(values):
    return dist.Normal(values["w"][jnp.array([0, 1, 2, 0, 1])] * X, values["tau"] ** -0.5).log_prob(Y)


@pytest.mark.parametrize(
    ("terms", "latent", "prior"),
    [(clipped_rate, "r", dist.Gamma(2.0, 1.0)), (rectified, "w", dist.Normal(0.0, 1.0))],
    ids=["minimum of a rate", "rectified slope"],
)
def test_a_kink_forbids_what_values_suggest(terms, latent, prior, monkeypatch):
    kinds = {roles(terms, key, **{latent: prior})[1][latent].kind for key in KEYS}
    assert not kinds & {"exact", "absent"}
    # An interpreter that knows nothing leaves the word to values, which are wrong for some keys.
    monkeypatch.setattr(affinity, "forms_of", lambda *_: [Form("unknown", opaque="everything")])
    kinds = {roles(terms, key, **{latent: prior})[1][latent].kind for key in KEYS}
    assert kinds & {"exact", "absent"}


def test_what_is_conjugate_for_all_values_is_proved():
    found, by_name = roles(regression, 0, w=dist.Normal(jnp.zeros(3), 1.0), tau=dist.Gamma(2.0, 1.0))
    assert found.evidence == "proved" and str(found) == "conjugate in tau, w"
    assert by_name["w"].single and all(role.proved for role in by_name.values())
    found, by_name = roles(
        regression, 0, w=dist.Normal(jnp.zeros(3), 1.0), tau=dist.Gamma(2.0, 1.0), v=dist.Beta(2.0, 2.0)
    )
    assert by_name["v"].kind == "absent" and by_name["v"].proved


def test_what_the_interpreter_does_not_follow_is_found_by_values():
    def terms(values):
        return dist.MultivariateNormal(0.0, precision_matrix=values["t"] * jnp.eye(5)).log_prob(Y)[None]

    found, by_name = roles(terms, 0, t=dist.Gamma(2.0, 1.0))
    assert by_name["t"].kind == "exact" and found.evidence == "found"


def test_rounding_is_no_conjugacy_in_single_precision():
    def softened(values):
        return dist.Poisson(0.01 + values["r"]).log_prob(COUNTS)

    with jax.enable_x64(False):
        found, by_name = roles(softened, 0, r=dist.Gamma(jnp.float32(30.0), jnp.float32(1.0)))
        assert by_name["r"].kind == "quadrature"


def switched(y):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, jnp.where(z > 0, 3.0, 0.1)))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Normal(w * X, 0.5), obs=y)


def test_a_prior_that_switches_is_not_held_exactly(monkeypatch):
    guide = AutoExponentialFamily(switched)
    numpyro.handlers.seed(guide, 0)(jnp.asarray(Y))
    components = components_of(guide, {"z": (), "w": ()})
    call = ValueCall(switched, (jnp.asarray(Y),), {})

    def held(key):
        return _exact_prior(components, call, jax.random.key(key))

    assert all(set(own) == {"z"} and proved for own, proved in map(held, range(3)))
    monkeypatch.setattr(
        "numpyro_pvi._exponential_plan.forms_of", lambda closed, _: [Form()] * len(closed.jaxpr.outvars)
    )
    assert any("w" in held(key)[0] for key in range(6))


def test_kinks_within_one_member_leave_quadrature():
    """NumPyro writes a Bernoulli's log density with clamps and switches, all of them of one logit."""
    labels = np.array([1, 0, 1, 1, 0])

    def terms(values):
        return dist.Bernoulli(logits=values["x"][jnp.array([2, 0, 1, 0, 2])], validate_args=True).log_prob(labels)

    found, by_name = roles(terms, 0, x=dist.Normal(jnp.zeros(3), 1.0))
    assert by_name["x"].kind == "quadrature" and by_name["x"].proved
