"""Planning: which arguments are sliced, what is refused and why, and what the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_pvi import Partition, PartitionError
from numpyro_pvi.factors import abstract_trace, model_layout, slice_rows
from numpyro_pvi.factors._planner import make_plan

N, D = 9, 2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)), RNG.normal(size=N)
LABELS = ["b"] * 2 + ["a"] * 7


def regression(data, offset=0.0, transposed=False):
    x = data["x"].T if transposed else data["x"]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", data["y"].shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w + offset, scale), obs=data["y"])
    numpyro.sample("total", dist.Normal(w.sum(), 1.0), obs=0.3)


@pytest.fixture(scope="module")
def plan():
    return make_plan(Partition(regression, "data", LABELS, chunk_size=4), ({"x": X, "y": Y},), {"offset": 0.5})


class TestPlan:
    def test_says_what_was_chosen(self, plan):
        text = str(plan)
        for words in ("'data', size 9", "'a': 7, 'b': 2", "args:", "data['x'], data['y']", "prior held exactly  w"):
            assert words in text
        assert "scale; observed outside the plate: total" in text and "obs: 2 affine predictors (quadrature)" in text

    def test_fields(self, plan):
        assert plan.table.labels == ("a", "b") and plan.mechanism == "args" and plan.reading.axes == (0, 0, None)
        assert plan.observed == ("obs",) and plan.outside == ("total",)
        assert plan.layout.names == ("w", "scale") and plan.layout.shapes == ((D,), ())
        assert plan.exact == ("w",) and plan.prior_latents == ("scale",) and plan.prior_kind == "affine"
        assert plan.num_chunks * plan.chunk_rows >= N

    def test_is_hashable_and_equal_to_itself_made_again(self, plan):
        again = make_plan(Partition(regression, "data", LABELS, chunk_size=4), ({"x": X, "y": Y},), {"offset": 0.5})
        assert again == plan and hash(again) == hash(plan)

    def test_without_the_check_a_wrong_split_passes(self):
        def standardised(y):
            z = numpyro.sample("z", dist.Normal(0, 1))
            with numpyro.plate("data", y.shape[0]):
                numpyro.sample("obs", dist.Normal(z, 1.0), obs=y - y.mean())

        with pytest.raises(PartitionError, match="group 'a'"):
            make_plan(Partition(standardised, "data", LABELS, mode="args"), (Y,), {})
        assert make_plan(Partition(standardised, "data", LABELS, check=False), (Y,), {}).likelihood == "quadratic"


class TestAxes:
    def test_axis_that_is_not_there(self):
        with pytest.raises(PartitionError, match=r"data_axes says that argument .*'x'.* on axis 2, but it does not"):
            make_plan(Partition(regression, "data", LABELS, data_axes={"data": 2}), ({"x": X, "y": Y},), {})

    def test_slice_rows(self):
        tree = ((jnp.asarray(X), jnp.asarray(X.T), "static"), {"k": 3})
        (rows, columns, word), kwargs = slice_rows(tree, (0, 1, None, None), jnp.array([4, 1]))
        np.testing.assert_array_equal(rows, jnp.asarray(X)[jnp.array([4, 1])])
        np.testing.assert_array_equal(columns, jnp.asarray(X).T[:, jnp.array([4, 1])])
        assert word == "static" and kwargs == {"k": 3}


def test_partition_without_a_model():
    with pytest.raises(PartitionError, match="holds no model"):
        make_plan(Partition(plate="data", groups=LABELS), (X,), {})


def test_several_plates_with_observed_sites():
    def two(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("first", x.shape[0]):
            numpyro.sample("a", dist.Normal(w, 1), obs=x)
        with numpyro.plate("second", y.shape[0]):
            numpyro.sample("b", dist.Normal(w, 1), obs=y)

    with pytest.raises(PartitionError, match=r"several plates.*'first' \(size 9\), 'second' \(size 9\)"):
        make_plan(Partition(two, None, LABELS), (Y, Y), {})


def test_layout_holds_unconstrained_shapes():
    def model():
        numpyro.sample("simplex", dist.Dirichlet(jnp.ones(4)))
        numpyro.sample("corr", dist.LKJCholesky(3))
        numpyro.sample("flat", dist.ImproperUniform(dist.constraints.positive, (2,), ()))

    layout = model_layout(abstract_trace(model, jax.random.key(0), (), {}))
    assert layout.names == ("simplex", "corr", "flat") and layout.shapes == ((3,), (3,), (2,))
    assert layout.dim == 8 and layout.coordinate_name(7) == "flat[1]"
