"""Structure that a few values suggest and that does not hold: kinks which rays miss, and parameters that begin where it vanishes.

Each model below was misjudged by values at two random rays for some keys. All keys of a model are looked at in one program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import Partition, PartitionError
from numpyro_pvi.factors import ModelCall, abstract_trace, model_layout
from numpyro_pvi.factors import _proof as degrees
from numpyro_pvi.factors import _proof as proof
from numpyro_pvi.factors._chunks import Reading, group_masks
from numpyro_pvi.factors._mechanism import CoupledLatentError, check_local
from numpyro_pvi.factors._model import LocalLayout, is_observed
from numpyro_pvi.factors._planner import _structure, plan_factors
from numpyro_pvi.factors._probe import LocalProbe, Probe, _facts, _is_sampled, _on_host, _StaticArgs
from numpyro_pvi.factors._proof import Form
from numpyro_pvi.factors._structure import find_term, is_quadratic

N, KEYS = 6, 24
X, Z = np.linspace(-1, 1, N), np.linspace(0, 1, N) ** 2
Y = np.sin(3 * X)


def rows(y, likelihood):
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", likelihood, obs=y)


def normal(name, sd=1.0):
    return numpyro.sample(name, dist.Normal(0.0, sd))


def absolute(y):
    rows(y, dist.Normal(jnp.abs(normal("w")) * X, 0.5))


def rectified(y):
    rows(y, dist.Normal(normal("b") + jnp.maximum(normal("w"), 0) * X, 0.5))


def clamped_logits(y):
    rows(jnp.int32(y > 0), dist.Bernoulli(logits=normal("w") * X + jnp.maximum(normal("t"), 0.5)))


def switched_prior(y):
    w = numpyro.sample("w", dist.Normal(0.0, jnp.where(normal("z") > 0, 3.0, 0.1)))
    rows(y, dist.Normal(w * X, 0.5))


def bent(y):
    rows(y, dist.Normal(normal("a", 1e4) + 3 * jnp.tanh(normal("w") * X), 0.5))


def vanishing_square(y):
    w, a = normal("w"), numpyro.param("a", 0.0)
    rows(y, dist.Normal(w * X + a * w**2 * Z, 0.5))


def dormant_square(y):
    w, a = normal("w"), numpyro.param("a", -1.0)
    rows(y, dist.Normal(w * X + jax.nn.relu(a) * w**2 * Z, 0.5))


def linear(y):
    a = numpyro.param("a", 0.0)
    rows(y, dist.Normal(normal("w") * X + a * Z, jnp.exp(numpyro.param("s", 0.0))))


def heteroscedastic(y):
    w, a = normal("w"), numpyro.param("a", 0.0)
    rows(y, dist.Normal(w * X, jnp.exp(a * normal("v"))))


def net(y):
    hidden = jnp.tanh(numpyro.param("first", jnp.asarray([0.3, 1.0])) * X[:, None])
    rows(y, dist.Normal(normal("b") + hidden @ numpyro.param("last", jnp.zeros(2)), 0.5))


def probes(model, y=Y, count=KEYS):
    """Probes of a model for many keys, compiled once; groups are read by masks."""
    y = jnp.asarray(y)
    trace = abstract_trace(model, jax.random.key(0), (y,), {})
    partition = Partition(model, "data", 2)
    axes = partition.row_axes(trace)
    _, group_of_row = partition.tables(axes.sizes(trace))
    call = ModelCall(model, model_layout(trace), (y,), {}, {})
    reading, packing = Reading("mask", ("data",), ()), group_masks(group_of_row, 2)
    params = {n: s for n, s in trace.items() if s["type"] == "param"}
    static = _StaticArgs(call, axes, reading, None, params)
    look = proof.trace_look(static.look_at, [y], static.abstract_params(), call)
    run = jax.jit(jax.vmap(functools.partial(static.probe, look), (None, None, 0)))
    found = jax.device_get(run([y], packing, jax.random.split(jax.random.key(0), count)))
    facts = {n: _facts(n, s, axes) for n, s in trace.items() if _is_sampled(s)}
    observed = tuple(n for n, s in trace.items() if is_observed(s))
    each = [jax.tree.map(lambda x, k=k: x[k], found) for k in range(count)]
    return [_on_host(x, look, packing, facts) for x in each], observed, call.layout


def structures(model, **options):
    """What is planned for every key."""
    found, observed, layout = probes(model, **options)
    return [_structure(probe, observed, (), layout) for probe in found]


def share(flags):
    """How many of the keys; neither none nor all where values decide by luck."""
    return sum(map(bool, flags))


@pytest.fixture(scope="module")
def looked():
    """Probes by model, each looked at once."""
    return functools.cache(probes)


def planned(found):
    probes, observed, layout = found
    return [_structure(p, observed, (), layout) for p in probes]


class TestKinks:
    """The rays miss some kinks: values alone would claim a structure for some keys, and claim none for others."""

    @pytest.mark.parametrize("model", [absolute, rectified])
    def test_of_a_mean(self, model, looked):
        found = looked(model)
        assert 0 < share(is_quadratic(p.rows["obs"], p.rays) for p in found[0]) < KEYS
        assert {plan["likelihood"] for plan in planned(found)} == {"draws"}

    def test_of_logits(self, looked):
        found = looked(clamped_logits)
        values = [find_term(p.facts["obs"], p.leaves["obs"], None, p.rays) for p in found[0]]
        assert 0 < share(values) < KEYS
        assert {plan["likelihood"] for plan in planned(found)} == {"draws"}

    def test_of_a_prior(self, looked):
        found = looked(switched_prior)
        assert 0 < share(is_quadratic(p.latents["w"], p.rays) for p in found[0]) < KEYS
        for plan in planned(found):
            assert plan["exact"] == ("z",) and plan["prior_kind"] == "draws"
            assert plan["likelihood"] == "quadratic" and plan["proved"] == {"likelihood", "prior"}

    def test_an_interpreter_that_calls_a_maximum_linear_is_seen(self, monkeypatch):
        monkeypatch.setitem(degrees._RULES, "max", lambda eqn, forms, _: max(forms, key=lambda f: f.degree))
        with pytest.raises(AssertionError):
            self.test_of_a_mean(rectified, probes)


def test_rounding_does_not_hide_a_bend_in_single_precision():
    with jax.enable_x64(False):
        found = probes(bent, np.float32(Y))
        assert found[0][0].rows["obs"].dtype == np.float32
        assert share(is_quadratic(p.rows["obs"], p.rays) for p in found[0])
        assert {plan["likelihood"] for plan in planned(found)} == {"draws"}


class TestParameters:
    """Structure holds for all values of ``numpyro.param`` sites, wherever they begin."""

    def test_that_begins_where_a_square_vanishes(self, looked):
        found = looked(vanishing_square)
        start = [p.rays.index[: len(p.rays.index) // 2] for p in found[0]]
        at_start = [type(p.rays)(i) for p, i in zip(found[0], start, strict=True)]
        assert all(is_quadratic(p.rows["obs"], rays) for p, rays in zip(found[0], at_start, strict=True))
        assert {plan["likelihood"] for plan in planned(found)} == {"draws"}

    def test_whose_neighbourhood_hides_a_square(self, looked):
        found = looked(dormant_square)
        assert all(is_quadratic(p.rows["obs"], p.rays) for p in found[0])
        assert {plan["likelihood"] for plan in planned(found)} == {"draws"}

    def test_that_leave_a_structure_what_it_is(self):
        (plan,) = structures(linear, count=1)
        assert plan["likelihood"] == "quadratic" and plan["proved"] == {"likelihood", "prior"}

    def test_that_begins_where_a_predictor_stands_still(self):
        (plan,) = structures(heteroscedastic, count=1)
        (term,) = plan["terms"]
        assert plan["likelihood"] == "affine" and [p.path for p in term.predictors] == ["loc", "scale"] and term.proved

    def test_whose_slope_vanishes_at_the_start_is_kept(self):
        (found,), _, _ = probes(net, count=1)
        assert found.inert == ()

    def test_whose_labels_are_ignored_are_seen(self, monkeypatch, looked):
        monkeypatch.setattr(Form, "forbids", lambda self, single, latents: bool(self.kink))
        with pytest.raises(AssertionError):
            self.test_whose_neighbourhood_hides_a_square(looked)


def coupled(x):
    a = numpyro.param("a", 0.0)
    w = normal("w")
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w + a * (x - x.mean()), 0.5), obs=x)


def test_rows_that_a_parameter_couples_away_from_its_start_are_no_sum_over_groups(monkeypatch):
    def plan():
        x = jnp.asarray(X + 0.3)
        return plan_factors(Partition(coupled, "data", 2, mode="args"), (x,), {}, key=jax.random.key(0))

    with pytest.raises(PartitionError, match="not a sum over groups"):
        plan()
    monkeypatch.setattr("numpyro_pvi.factors._probe.moved_values", lambda params, *_: params)
    assert plan().plan.mechanism == "args"


class TestUnits:
    """Latents inside the plate are told apart unit by unit."""

    LAYOUT = LocalLayout("data", 4, ("z",), ((),), (-1,))

    def check(self, coupling, steep):
        size = np.array([[1.0], [2.0], [1.0], [steep]])
        gaps = np.array([[0.0], [coupling], [0.0], [1e-9 * steep]])
        probe = object.__new__(Probe)
        nothing = np.zeros((4, 1))
        object.__setattr__(probe, "local", LocalProbe(nothing, nothing + 1, gaps, nothing, nothing, size))
        check_local(probe, "plate 'data'", self.LAYOUT)

    def test_one_steep_row_does_not_hide_the_coupling_of_others(self):
        self.check(0.0, 1e12)
        for steep in (1.0, 1e12):
            with pytest.raises(CoupledLatentError, match="at index 1"):
                self.check(0.5, steep)
