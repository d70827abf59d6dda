"""Partition: the additive law, the labels, and what each refusal says."""

import copy
import pickle

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_pvi.errors import PartitionError
from numpyro_pvi.handlers import PRIOR, Partition, choose_plate, find_plates

N, J = 11, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = RNG.normal(size=N)
GRID = RNG.normal(size=(N, J))
LABELS = ["b", "a", "b", "c", "c", "b", "a", "b", "b", "c", "b"]
THETA = {"w": jnp.array([0.3, -0.7]), "scale": jnp.array(1.3), "z": jnp.asarray(RNG.normal(size=N)), "v": jnp.ones(J)}


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(x @ w, scale), obs=y)


def nested_plates(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("columns", J, dim=-1):
        v = numpyro.sample("v", dist.Normal(0, 1))
        with numpyro.plate("data", N, dim=-2):
            numpyro.sample("obs", dist.StudentT(3.0, (x @ w)[:, None] + v, 1.0), obs=jnp.asarray(GRID))


def local_latents(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("data", N):
        z = numpyro.sample("z", dist.Normal(x[:, 0], scale))
        numpyro.sample("obs", dist.Normal(z, 0.5), obs=y)


def masked_and_scaled(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", N), handlers.mask(mask=y > 0), handlers.scale(scale=2.5):
        numpyro.sample("obs", dist.Normal(x @ w, 1.0), obs=y)


def factor_and_event(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.factor("outside", -jnp.sum(w**4))
    with numpyro.plate("data", N):
        numpyro.factor("inside", jnp.sin(x @ w) * y)
        numpyro.sample("obs", dist.Normal(x * w, 1.0).to_event(1), obs=x + y[:, None])


def partly_observed(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(x @ w, 1.0), obs=y, obs_mask=y > 0)


MODELS = [regression, nested_plates, local_latents, masked_and_scaled, factor_and_event, partly_observed]


def density(model, args=(X, Y)):
    params = THETA | {"obs_unobserved": jnp.asarray(Y) * 0.3}
    return float(log_density(model, args, {}, params)[0])


def sum_of_groups(partition):
    groups = partition.resolve(N).labels
    return sum(density(partition.for_group(g)) for g in groups) - (len(groups) - 1) * density(
        partition.for_group(PRIOR)
    )


class TestAdditiveLaw:
    @pytest.mark.parametrize("groups", [LABELS, 1, 4, N], ids=["labels", "one", "four", "rows"])
    @pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
    def test_groups_and_prior_sum_to_the_model(self, model, groups):
        partition = Partition(model, "data", groups)
        np.testing.assert_allclose(sum_of_groups(partition), density(model), rtol=3e-6)

    @pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
    def test_transparent_without_a_group(self, model):
        assert density(Partition(model, "data", LABELS)) == density(model)

    def test_one_group_equals_the_model_on_its_rows(self):
        rows = [row for row, label in enumerate(LABELS) if label == "c"]
        restricted = density(Partition(regression, "data", LABELS, group="c"))
        np.testing.assert_allclose(restricted, density(regression, (X[rows], Y[rows])), rtol=1e-6)

    def test_prior_keeps_no_term_of_the_plate(self):
        # HalfNormal(2) at 1.3 and x[:, 0]-centred latents: only the former is left.
        expected = float(dist.HalfNormal(2.0).log_prob(1.3))
        np.testing.assert_allclose(density(Partition(local_latents, "data", LABELS, group=PRIOR)), expected, rtol=1e-6)

    def test_plate_is_found_where_it_is_the_only_one(self):
        partition = Partition(regression, groups=LABELS)
        np.testing.assert_allclose(sum_of_groups(partition), density(regression), rtol=3e-6)

    def test_other_plates_are_left_alone(self):
        # v has a prior density of its own in "columns"; splitting "data" leaves it in every group.
        trace = handlers.trace(
            handlers.substitute(Partition(nested_plates, "data", LABELS, group="a"), data=THETA)
        ).get_trace(X, Y)
        assert trace["v"]["fn"].log_prob(THETA["v"]).tolist() == dist.Normal(0, 1).log_prob(THETA["v"]).tolist()
        kept = np.flatnonzero(np.asarray(trace["obs"]["fn"].log_prob(GRID)).any(axis=1))
        assert kept.tolist() == [1, 6]

    def test_under_jit_and_grad(self):
        def value(w, group):
            return log_density(Partition(regression, "data", LABELS, group=group), (X, Y), {}, THETA | {"w": w})[0]

        total = sum(jax.jit(jax.grad(value), static_argnums=1)(THETA["w"], g) for g in "abc")
        prior = jax.grad(value)(THETA["w"], PRIOR)
        whole = jax.grad(lambda w: log_density(regression, (X, Y), {}, THETA | {"w": w})[0])(THETA["w"])
        np.testing.assert_allclose(total - 2 * prior, whole, rtol=1e-5)

    def test_plate_inside_scan(self):
        from numpyro.contrib.control_flow import scan

        def model(x, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))

            def step(carry, t):
                with numpyro.plate("data", N):
                    numpyro.sample("obs", dist.Normal(x @ w + t, 1.0), obs=y)
                return carry, None

            scan(step, 0, jnp.arange(3.0))

        np.testing.assert_allclose(sum_of_groups(Partition(model, "data", LABELS)), density(model), rtol=3e-6)

    def test_scoped_plate_name(self):
        scoped = handlers.scope(regression, prefix="block")
        params = {f"block/{name}": value for name, value in THETA.items()}
        partition = Partition(scoped, "block/data", LABELS)

        def value(model):
            return float(log_density(model, (X, Y), {}, params)[0])

        total = sum(value(partition.for_group(g)) for g in "abc") - 2 * value(partition.for_group(PRIOR))
        np.testing.assert_allclose(total, value(scoped), rtol=3e-6)

    def test_enumerated_local_latent_costs_other_groups_nothing(self):
        pytest.importorskip("funsor")
        from numpyro.contrib.funsor import config_enumerate, enum
        from numpyro.contrib.funsor import log_density as enum_log_density

        def mixture(y):
            loc = numpyro.sample("loc", dist.Normal(0, 3).expand([2]).to_event(1))
            with numpyro.plate("data", len(y)):
                k = numpyro.sample("k", dist.Categorical(jnp.array([0.3, 0.7])))
                numpyro.sample("obs", dist.Normal(loc[k], 1.0), obs=y)

        def value(model):
            params = {"loc": jnp.array([-1.0, 2.0])}
            return float(enum_log_density(enum(model, first_available_dim=-2), (Y,), {}, params)[0])

        partition = Partition(config_enumerate(mixture), "data", LABELS)
        prior = float(dist.Normal(0, 3).log_prob(jnp.array([-1.0, 2.0])).sum())
        rows = Y[np.array(LABELS) == "a"]
        # Written out by hand: log sum_k pi_k N(y | loc_k, 1), rows of the group only.
        terms = 0.3 * np.exp(-0.5 * (rows + 1) ** 2) + 0.7 * np.exp(-0.5 * (rows - 2) ** 2)
        expected = prior + np.log(terms / np.sqrt(2 * np.pi)).sum()
        np.testing.assert_allclose(value(partition.for_group("a")), expected, rtol=1e-5)
        np.testing.assert_allclose(value(partition.for_group(PRIOR)), prior, rtol=1e-5)


class TestSeveralPlatesAndSites:
    @staticmethod
    def two_plates(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("A", N):
            numpyro.sample("obs_a", dist.Normal(x @ w, 1.0), obs=y)
        with numpyro.plate("B", 4):
            numpyro.sample("obs_b", dist.Poisson(jnp.exp(w[0])), obs=jnp.arange(4))

    def test_plates_split_together_obey_the_law(self):
        # Group "b" has no row in plate B, group "d" none in plate A.
        partition = Partition(self.two_plates, groups={"A": LABELS, "B": ["a", "c", "d", "d"]})
        groups = "abcd"
        total = sum(density(partition.for_group(g)) for g in groups) - 3 * density(partition.for_group(PRIOR))
        np.testing.assert_allclose(total, density(self.two_plates), rtol=3e-6)

    def test_crossed_plates_are_refused(self):
        partition = Partition(nested_plates, groups={"data": LABELS, "columns": ["a", "b", "c"]}, group="a")
        with pytest.raises(PartitionError, match=r"'obs' is inside the partitioned plates 'data', 'columns'.*disagree"):
            density(partition)

    def test_axis_of_a_site_without_plate(self):
        def model(x, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.sample("obs", dist.Normal(x @ w, 1.0), obs=y)

        partition = Partition(model, groups=LABELS, sites={"obs": -1})
        np.testing.assert_allclose(sum_of_groups(partition), density(model), rtol=3e-6)

    def test_joint_event_has_no_axis_to_split(self):
        def model(x, y):
            numpyro.sample("obs", dist.Normal(x[:, 0], 1.0).to_event(1), obs=y)

        with pytest.raises(
            PartitionError, match=r"'obs' has batch shape \(\) and event shape \(11,\).*cannot be split"
        ):
            density(Partition(model, groups=LABELS, sites={"obs": -1}, group="a"))

    def test_resolve_needs_the_plate_of_several(self):
        partition = Partition(groups={"A": LABELS, "B": [0, 1]})
        assert partition.resolve(2, "B").labels == (0, 1)
        with pytest.raises(PartitionError, match="splits the plates 'A', 'B', not one plate"):
            partition.resolve(N)


class TestUse:
    def test_decorator(self):
        decorated = Partition(plate="data", groups=LABELS)(regression)
        assert isinstance(decorated, Partition) and density(decorated) == density(regression)

    def test_context_manager(self):
        def inside(x, y):
            with Partition(plate="data", groups=LABELS, group="b"):
                return regression(x, y)

        assert density(inside) == density(Partition(regression, "data", LABELS, group="b"))

    def test_context_manager_needs_the_plate(self):
        with pytest.raises(PartitionError, match="name the plate"), Partition(groups=LABELS, group="a"):
            pass

    def test_for_group_leaves_the_original_alone(self):
        partition = Partition(regression, "data", LABELS)
        restricted = partition.for_group("a")
        assert partition.group is None and restricted.group == "a" and restricted.fn is regression

    def test_handler_is_usable_after_an_error(self):
        partition = Partition(regression, "data", LABELS[:-1], group="a")
        with pytest.raises(PartitionError):
            density(partition)
        assert density(Partition(regression, "data", LABELS, group="a")) < 0

    def test_typo_in_the_plate_does_not_pass_silently(self):
        with pytest.raises(
            PartitionError, match=r"no plate 'dat', so nothing was left out; its plates are: 'data' \(size 11\)"
        ):
            density(Partition(regression, "dat", LABELS, group="a"))

    def test_signature_is_the_models(self):
        import inspect

        assert list(inspect.signature(Partition(regression, "data", LABELS)).parameters) == ["x", "y"]


class TestTable:
    @pytest.mark.parametrize(
        "labels",
        [LABELS, np.array(LABELS), np.array(LABELS, dtype=object), tuple(LABELS)],
        ids=["list", "text", "objects", "tuple"],
    )
    def test_kinds_of_sequences_agree(self, labels):
        table = Partition(groups=labels).resolve(N)
        assert table == Partition(groups=LABELS).resolve(N)
        assert hash(table) == hash(Partition(groups=LABELS).resolve(N))
        assert table.labels == ("a", "b", "c") and table.sizes == (2, 6, 3)
        assert table.rows("a").tolist() == [1, 6]
        assert [table.labels[index] for index in table.index_of_row] == LABELS

    def test_numpy_and_jax_ints_become_python_ints(self):
        for labels in (np.array([7, 3, 7]), jnp.array([7, 3, 7]), [np.int64(7), 3, 7]):
            table = Partition(groups=labels).resolve(3)
            assert table.labels == (3, 7) and all(type(label) is int for label in table.labels)
            assert table.index(np.int64(7)) == 1

    def test_pandas(self):
        pandas = pytest.importorskip("pandas")
        assert Partition(groups=pandas.Series(LABELS)).resolve(N) == Partition(groups=LABELS).resolve(N)
        assert Partition(groups=pandas.Categorical(LABELS)).resolve(N) == Partition(groups=LABELS).resolve(N)
        with pytest.raises(PartitionError, match=r"no row uses: 'z'"):
            Partition(groups=pandas.Series(pandas.Categorical(["a", "b"], categories=["a", "b", "z"])))
        with pytest.raises(PartitionError, match=r"missing label\(s\).* row\(s\) 1"):
            Partition(groups=pandas.Series(["a", pandas.NA, "b"]))

    def test_mixed_types_keep_first_appearance(self):
        assert Partition(groups=["z", 3, "z", (1, "x")]).resolve(4).labels == ("z", 3, (1, "x"))
        assert Partition(groups=[(1, "b"), (1, "a")]).resolve(2).labels == ((1, "a"), (1, "b"))
        assert Partition(groups=[frozenset("b"), frozenset("a")]).resolve(2).labels == (frozenset("b"), frozenset("a"))

    def test_tables_differ_by_rows_and_types(self):
        table = Partition(groups=[0, 1, 1]).resolve(3)
        assert table != Partition(groups=[1, 0, 1]).resolve(3)
        assert table != Partition(groups=[False, True, True]).resolve(3)
        assert pickle.loads(pickle.dumps(table)) == table

    def test_random_blocks(self):
        table = Partition(groups=4).resolve(N)
        assert table.labels == (0, 1, 2, 3) and sorted(table.sizes) == [2, 3, 3, 3]
        assert table == Partition(groups=np.int64(4)).resolve(N)
        permutation = np.random.default_rng(0).permutation(N)
        assert table.rows(0).tolist() == sorted(permutation[:3].tolist())

    def test_default_blocks(self):
        assert Partition().resolve(4).num_groups == 4 and Partition().resolve(400).num_groups == 10

    def test_rows_are_read_only(self):
        with pytest.raises(ValueError, match="read-only"):
            Partition(groups=3).resolve(5).index_of_row[0] = 1

    def test_unknown_label_names_the_known(self):
        with pytest.raises(PartitionError, match="no group 'z'; the groups are: 'a', 'b', 'c'"):
            Partition(groups=LABELS).resolve(N).index("z")
        with pytest.raises(PartitionError, match=r"the groups are: 0, 1, .*\(200 in all\)"):
            Partition(groups=200, group=200)


class TestPrior:
    def test_singleton(self):
        assert repr(PRIOR) == "PRIOR" and {PRIOR: 1}[PRIOR] == 1
        assert pickle.loads(pickle.dumps(PRIOR)) is PRIOR and copy.deepcopy(PRIOR) is PRIOR
        assert PRIOR != "PRIOR" and PRIOR != 0


@pytest.fixture
def unchecked_types():
    """What a user has: arguments of the wrong type reach the package's own refusals."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


class TestRefusals:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: Partition(groups=[1.0, np.nan]), r"missing label\(s\) \(NaN or None\), at row\(s\) 1"),
            (lambda: Partition(groups=np.array([np.nan, 1.0])), r"missing label\(s\).*row\(s\) 0"),
            (lambda: Partition(groups=["a", None]), r"missing label\(s\).*row\(s\) 1"),
            (lambda: Partition(groups=[None, "a", np.nan]), r"2 missing label\(s\).*row\(s\) 0, 2"),
            (lambda: Partition(groups=["a", ["b"]]), "label of row 1 is a list, which is not hashable"),
            (lambda: Partition(groups=["a", ("b", [])]), "label of row 1 is a tuple, which is not hashable"),
            (lambda: Partition(groups=["a", PRIOR]), "label of row 1 is PRIOR"),
            (lambda: Partition(groups=[1, True]), "labels 1 and True .row 1. that are equal but of different types"),
            (lambda: Partition(groups=np.zeros((3, 2))), r"shape \(3, 2\)"),
            (lambda: Partition(groups=[]), "is empty"),
            (lambda: Partition(groups="hospital"), "expected one label per plate index"),
            (lambda: Partition(groups=2.5), "expected one label per plate index"),
            (lambda: Partition(groups=True), "expected one label per plate index"),
            (lambda: Partition(groups=0), "write at least 1"),
            (lambda: Partition(groups=12).resolve(N), "12 groups were asked for but the plate has 11 rows"),
            (lambda: Partition(plate="data", groups=LABELS[:9]).resolve(N), "'data' has size 11 but .* 9 labels"),
            (lambda: Partition(groups=LABELS, group="z"), "no group 'z'; the groups are: 'a', 'b', 'c'"),
            (lambda: Partition(groups=LABELS).for_group(None), "PRIOR for none"),
            (lambda: Partition(groups=LABELS).for_group(["a"]), r"no group \['a'\]"),
            (lambda: Partition("data", groups=LABELS), "write Partition.model, plate, groups."),
            (lambda: Partition(regression, 3), "plate is a int"),
            (lambda: Partition(mode="fast"), "mode is 'fast'; expected one of 'auto', 'args', 'index', 'mask'"),
            (lambda: Partition(chunk_size=0), "chunk_size is 0"),
            (lambda: Partition(chunk_size=1.5), "chunk_size is 1.5"),
            (lambda: Partition(sites={"obs": 0}), "counted from the right"),
            (lambda: Partition(sites=["obs"]), "sites is .*expected a dict"),
            (lambda: Partition(data_axes={}), "data_axes is .*expected a dict"),
            (lambda: Partition(plate="data", sites={"obs": -1}), "both given"),
            (lambda: Partition(plate="data", groups={"A": [1]}), "names the plates itself"),
            (lambda: Partition()(X, Y), "holds no model"),
        ],
    )
    def test_constructor_and_resolve(self, build, message, unchecked_types):
        with pytest.raises(PartitionError, match=message):
            build()

    def test_traced_labels(self):
        with pytest.raises(PartitionError, match="traced"):
            jax.jit(lambda groups: Partition(groups=groups).resolve(3).num_groups)(jnp.arange(3))

    def test_subsampled_plate(self):
        def model(x, y):
            with numpyro.plate("data", N, subsample_size=4) as i:
                numpyro.sample("obs", dist.Normal(0, 1), obs=y[i])

        whole = handlers.seed(Partition(model, "data", LABELS, group="a"), 0)
        rows = np.asarray(Y)[np.asarray(LABELS) == "a"]
        np.testing.assert_allclose(density(whole), dist.Normal(0, 1).log_prob(rows).sum(), rtol=1e-5)


def trace_of(model, *args):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args)


class TestPlates:
    def test_find_plates(self):
        plates = find_plates(trace_of(nested_plates, X, Y))
        assert list(plates) == ["columns", "data"]
        assert plates["data"].size == N and plates["data"].dims == (-2,)
        assert plates["data"].observed == ("obs",) and plates["data"].latents == ()
        assert plates["columns"].latents == ("v",) and plates["columns"].observed == ("obs",)

    def test_find_plates_counts_factors_as_observed(self):
        assert find_plates(trace_of(factor_and_event, X, Y))["data"].observed == ("inside", "obs")

    def test_choose(self):
        assert choose_plate(trace_of(regression, X, Y)) == "data"
        assert choose_plate(trace_of(nested_plates, X, Y), "data") == "data"
        # A factor outside every plate is legal: it belongs to the prior factor.
        assert choose_plate(trace_of(factor_and_event, X, Y)) == "data"

    def test_several_candidates(self):
        with pytest.raises(
            PartitionError, match=r"several plates .*'columns' \(size 3\), 'data' \(size 11\); name the one"
        ):
            choose_plate(trace_of(nested_plates, X, Y))

    def test_no_such_plate(self):
        with pytest.raises(
            PartitionError, match=r"no plate 'rows'; its plates are: 'data' \(size 11\).*Partition\(model, 'data'"
        ):
            choose_plate(trace_of(regression, X, Y), "rows")

    def test_no_plate_at_all(self):
        def model(y):
            numpyro.sample("obs", dist.Normal(0, 1).expand([N]), obs=y)

        with pytest.raises(
            PartitionError, match=r"it has no plates.*'obs' has batch shape \(11,\).*plate\('data', 11\)"
        ):
            choose_plate(trace_of(model, Y), "data")
        with pytest.raises(PartitionError, match=r"no plate of the model holds .*plate\('data', 11\)"):
            choose_plate(trace_of(model, Y))

    @pytest.mark.parametrize(
        "likelihood",
        [
            lambda y: numpyro.sample("obs", dist.Normal(jnp.zeros(N), 1).to_event(1), obs=y),
            lambda y: numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(N), jnp.eye(N)), obs=y),
            lambda y: numpyro.factor("obs", -jnp.sum(y**2)),
        ],
        ids=["to_event", "mvn", "summed factor"],
    )
    def test_joint_terms_cannot_be_split(self, likelihood):
        with pytest.raises(
            PartitionError, match=r"'obs' \(event shape .*cannot be split into groups.*numpyro.plate\('data'"
        ):
            choose_plate(trace_of(likelihood, Y))

    def test_plate_without_observed_site(self):
        def model(x, y):
            with numpyro.plate("units", 3):
                u = numpyro.sample("u", dist.Normal(0, 1))
            with numpyro.plate("data", N):
                numpyro.sample("obs", dist.Normal(u[0], 1), obs=y)

        with pytest.raises(
            PartitionError, match=r"'units' .*no observed sample site inside \(latents inside: 'u'\).*'data'"
        ):
            choose_plate(trace_of(model, X, Y), "units")

    def test_nothing_observed(self):
        with pytest.raises(PartitionError, match="No sample site is observed"):
            choose_plate(trace_of(regression, X, None))

    def test_local_latents(self):
        assert choose_plate(trace_of(local_latents, X, Y)) == "data"

    def test_global_discrete_latent(self):
        def model(y):
            k = numpyro.sample("k", dist.Bernoulli(0.5))
            with numpyro.plate("data", N):
                numpyro.sample("obs", dist.Normal(k, 1), obs=y)

        with pytest.raises(PartitionError, match=r"discrete latent\(s\) 'k' outside plate 'data' couple all groups"):
            choose_plate(trace_of(model, Y))
