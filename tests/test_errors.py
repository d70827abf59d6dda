"""Bad input: every refusal names what is wrong and where, and a state is never lost."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer import autoguide as ag

from numpyro_pvi import PVI, DataError, GuideError, ImproperError, Partition, PartitionError, PVIError, StateError
from numpyro_pvi._state import PVIRunResult

N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = RNG.normal(size=N)
LABELS = ["a"] * 5 + ["b"] * 4 + ["c"] * 3
KEY = jax.random.key(0)


def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)


def other(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0, 1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(w.sum() + v, 1.0), obs=y)


def refused(error, message, fn=model, args=(X, Y), kwargs=None, plate="data", groups=LABELS, guide=None, **options):
    """Check that ``init`` refuses a model, naming everything in the (regular expression) message."""
    guide = ag.AutoDiagonalNormal(fn) if guide is None else guide
    with pytest.raises(error, match=message) as caught:
        PVI(Partition(fn, plate, groups), guide, **options).init(KEY, *args, **(kwargs or {}))
    assert isinstance(caught.value, PVIError)
    return str(caught.value)


@pytest.fixture(scope="module")
def fitted():
    pvi = PVI(Partition(model, "data", LABELS), ag.AutoMultivariateNormal(model))
    return pvi, pvi.init(KEY, X, Y)


class TestPlatesAndLabels:
    def test_no_such_plate(self):
        refused(PartitionError, r"no plate 'rows'.*'data' \(size 12\).*Partition\(model, 'data'", plate="rows")

    def test_no_observed_site_in_the_plate(self):
        def unobserved(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1))
            with numpyro.plate("data", 2):
                numpyro.sample("z", dist.Normal(w, 1))
            with numpyro.plate("rows", y.shape[0]):
                numpyro.sample("obs", dist.Normal(w, 1), obs=y)

        refused(PartitionError, r"plate 'data' \(size 2\) has no observed sample site.*'z'.*'rows'", unobserved)

    def test_no_data(self):
        refused(PartitionError, "obs=", args=(X, None))

    def test_label_count(self):
        message = refused(PartitionError, "11.*12|12.*11", groups=LABELS[:-1])
        assert "data" in message

    @pytest.mark.parametrize("missing", [np.nan, None])
    def test_missing_labels(self, missing):
        with pytest.raises(PartitionError, match=r"missing label.*row\(s\) 3"):
            Partition(model, "data", [1.0, 2.0, 2.0, missing] + [1.0] * 8)

    def test_more_groups_than_rows(self):
        refused(PartitionError, "13 groups.*12 rows", groups=13)

    def test_unused_category_is_an_empty_group(self):
        pandas = pytest.importorskip("pandas")
        with pytest.raises(PartitionError, match="categories that no row uses: 'd'"):
            Partition(model, "data", pandas.Categorical(LABELS, categories=["a", "b", "c", "d"]))

    def test_no_plate_at_all(self):
        def plateless(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)

        refused(PartitionError, r"no plate.*'obs' has batch shape \(12,\)", plateless, plate=None)

    def test_scan(self):
        def scanned(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1))
            scan(lambda c, v: (v, numpyro.sample("pred", dist.Normal(w * c, 1.0), obs=v)), 0.0, y)

        refused(
            PartitionError,
            r"sites=\{'pred': -1\}\) \(12 rows\), which is the way for steps of a scan",
            scanned,
            plate=None,
        )

    def test_outcome_of_two_axes(self):
        def outcomes(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1))
            numpyro.sample("obs", dist.Normal(w * jnp.ones_like(X), 1.0), obs=X)

        refused(
            PartitionError,
            r"sites=\{'obs': -2\}\) \(12 rows\) or .*sites=\{'obs': -1\}\) \(2 rows\)",
            outcomes,
            plate=None,
        )

    def test_two_plates_of_data(self):
        def two(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1))
            for name in ("A", "B"):
                with numpyro.plate(name, 12):
                    numpyro.sample(f"obs{name}", dist.Normal(w, 1.0), obs=y)

        refused(PartitionError, r"groups=\{'A': labels_1, 'B': labels_2\}", two, plate=None)

    def test_forced_mode(self):
        def closed(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1))
            with numpyro.plate("data", 12):
                numpyro.sample("obs", dist.Normal(w, 1.0), obs=jnp.asarray(Y))

        with pytest.raises(PartitionError, match="mode='args' was asked for, but the model cannot be evaluated"):
            PVI(Partition(closed, "data", LABELS, mode="args"), ag.AutoNormal(closed)).init(KEY, X, Y)

    @pytest.mark.parametrize("number", [0, -1, 2.5, True])
    def test_number_of_groups(self, number):
        with pytest.raises(PVIError, match=f"num_groups={number}: expected a positive int"):
            PVI(model, ag.AutoNormal(model), num_groups=number)

    def test_number_of_groups_beyond_the_rows(self):
        with pytest.raises(PartitionError, match=r"num_groups=64, but the plate.*'data' \(size 12\).*num_groups=12"):
            PVI(model, ag.AutoNormal(model), num_groups=64).init(KEY, X, Y)

    def test_signature_of_the_constructor(self):
        names = list(inspect.signature(PVI).parameters)
        assert names[:4] == ["model", "guide", "optim", "loss"]
        assert "num_groups" in names and "self" not in names

    def test_summed_factor(self):
        def summed(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.factor("lik", dist.Normal(X @ w, 1.0).log_prob(y).sum())

        refused(PartitionError, "summed numpyro.factor", summed, plate=None)

    def test_local_latents(self):
        def local(X, y):
            with numpyro.plate("data", X.shape[0]):
                z = numpyro.sample("z", dist.Normal(0, 1))
                numpyro.sample("obs", dist.Normal(z, 1.0), obs=y)

        refused(PartitionError, r"every latent \(z\) is inside plate 'data', so no latent is shared", local)

    def test_discrete_latent(self):
        def mixture(X, y):
            k = numpyro.sample("k", dist.Bernoulli(0.5))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(k, 1.0), obs=y)

        refused(PartitionError, "latent 'k' is discrete", mixture)

    def test_no_latent(self):
        def fixed(X, y):
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(0, 1.0), obs=y)

        refused(PartitionError, "no latent", fixed)

    def test_rows_closed_over(self):
        def closed():
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            with numpyro.plate("data", N):
                numpyro.sample("obs", dist.Normal(jnp.asarray(X) @ w, 1.0), obs=jnp.asarray(Y))

        with pytest.warns(UserWarning, match="full pass over all 12 rows.*no argument of the model has 12 entries"):
            Partition(closed, "data", LABELS).plan()

    def test_constant_plate_size(self):
        def constant(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            with numpyro.plate("data", N):
                numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)

        with pytest.raises(
            PartitionError, match=r"mode='args'.*plate 'data' with argument\(s\) X, y sliced.*X.shape\[0\]"
        ):
            Partition(constant, "data", LABELS, mode="args").plan(X, Y)
        # Left to choose, the plate is given as many rows as the arguments have, and nothing is to be said.
        assert Partition(constant, "data", LABELS).plan(X, Y).mechanism == "args"

    def test_standardising_inside_the_model(self):
        def standardised(X, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            X = (X - X.mean(axis=0)) / X.std(axis=0)
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)

        with pytest.warns(UserWarning, match="not a sum over groups.*group 'a'.*standardising"):
            Partition(standardised, "data", LABELS).plan(X, Y)

    def test_mutable_state(self):
        def mutable(X, y):
            numpyro.primitives.mutable("running", {"mean": jnp.zeros(())})
            model(X, y)

        refused(PartitionError, "mutable site 'running'", mutable)


class TestData:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_nonfinite_data(self, bad):
        x = 777.25 + X
        x[[2, 7], 1] = bad
        message = refused(DataError, r"argument 0 \('X'\).*row\(s\) 2, 7", args=(x, Y))
        assert "777" not in message and "778" not in message

    def test_nonfinite_keyword(self):
        refused(DataError, r"argument 'y'.*row\(s\) 0", args=(X,), kwargs={"y": np.where(np.arange(N) == 0, np.nan, Y)})

    def test_nonfinite_in_run(self):
        with pytest.raises(DataError, match="argument 1"):
            PVI(model, ag.AutoNormal(model)).run(KEY, 2, X, Y * np.nan)


class TestGuides:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (ag.AutoLowRankMultivariateNormal, "AutoLowRankMultivariateNormal.*AutoMultivariateNormal keeps"),
            (ag.AutoLaplaceApproximation, "AutoLaplaceApproximation.*AutoMultivariateNormal"),
            (ag.AutoDelta, "AutoDelta.*AutoDiagonalNormal"),
            (ag.AutoBNAFNormal, "AutoBNAFNormal"),
            (ag.AutoGuideList, "AutoGuideList"),
        ],
    )
    def test_kind(self, make, message):
        with pytest.raises(GuideError, match=message):
            PVI(model, make(model), num_groups=3)

    def test_hand_written(self):
        def my_guide(X, y):
            pass

        with pytest.raises(GuideError, match=r"hand-written guide \(my_guide\)"):
            PVI(model, my_guide)

    def test_class_instead_of_instance(self):
        with pytest.raises(GuideError, match=r"AutoNormal.*AutoNormal\(model\)"):
            PVI(model, ag.AutoNormal)

    def test_none(self):
        with pytest.raises(GuideError, match="guide"):
            PVI(model, None)

    @pytest.mark.parametrize("make", [ag.AutoNormal, ag.AutoDiagonalNormal, ag.AutoMultivariateNormal])
    def test_another_model(self, make):
        message = refused(GuideError, "made for another model", guide=make(other))
        assert "model lacks: v" in message and "w: guide (3,), model (2,)" in message


class TestOptions:
    def test_unknown_keyword(self):
        with pytest.raises(PVIError, match="'num_group'.*Did you mean 'num_groups'"):
            PVI(model, ag.AutoNormal(model), num_group=3)

    def test_a_state_and_params_to_start_from(self):
        pvi = PVI(Partition(model, "data", LABELS), ag.AutoMultivariateNormal(model))
        state, start = pvi.init(KEY, X, Y), {"auto_loc": jnp.ones(2)}
        with pytest.raises(PVIError, match="init_params would be dropped"):
            pvi.run(KEY, 2, X, Y, init_state=state, init_params=start, progress_bar=False)

    @pytest.mark.parametrize("name", ["tol", "num_steps", "init_state", "rng_key"])
    def test_model_keyword_equal_to_run_keyword(self, name):
        space = {"numpyro": numpyro}
        exec(f"def clashing(X, y, {name}=None): pass", space)
        with pytest.raises(PVIError, match=f"'{name}'.*rename"):
            PVI(space["clashing"], ag.AutoNormal(model))

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (RenyiELBO(), "RenyiELBO"),
            (TraceMeanField_ELBO(sum_sites=False), "sum_sites"),
            (Trace_ELBO(multi_sample_guide=True), "multi_sample_guide"),
            ("elbo", "not a NumPyro ELBO"),
        ],
    )
    def test_loss(self, loss, message):
        with pytest.raises(PVIError, match=message):
            PVI(model, ag.AutoNormal(model), None, loss)

    @pytest.mark.parametrize("option", ["solver", "schedule", "runtime"])
    def test_parts(self, option):
        with pytest.raises(PVIError, match=f"{option}='fast' is not a {option}"):
            PVI(model, ag.AutoNormal(model), **{option: "fast"})

    def test_init_sites(self):
        with pytest.raises(PVIError, match="init_sites='zero'"):
            PVI(model, ag.AutoNormal(model), init_sites="zero")

    def test_num_groups_beside_a_partition(self):
        with pytest.raises(PVIError, match="num_groups is given beside a Partition"):
            PVI(Partition(model, "data", LABELS), ag.AutoNormal(model), num_groups=3)

    def test_restricted_partition(self):
        with pytest.raises(PVIError, match="restricted to one group"):
            PVI(Partition(model, "data", LABELS, group="a"), ag.AutoNormal(model))

    @pytest.mark.parametrize("num_groups", [0, -1, 2.5, "three"])
    def test_num_groups(self, num_groups):
        with pytest.raises(PVIError, match="group"):
            PVI(model, ag.AutoNormal(model), num_groups=num_groups).init(KEY, X, Y)

    def test_model_that_cannot_be_called(self):
        with pytest.raises(PVIError, match="cannot be called"):
            PVI(None, ag.AutoNormal(model))
        with pytest.raises(PVIError, match="cannot be called"):
            PVI(Partition(plate="data", groups=3), ag.AutoNormal(model))

    def test_param_without_optim(self):
        def with_param(X, y):
            scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("obs", dist.Normal(X @ w, scale), obs=y)

        refused(PVIError, r"numpyro.param site\(s\) scale.*optim is None", with_param)

    def test_init_under_jit(self):
        pvi = PVI(model, ag.AutoNormal(model), num_groups=2)
        with pytest.raises(PVIError, match=r"jit\(pvi.init\)"):
            jax.jit(pvi.init)(KEY, X, Y)
        with pytest.raises(PVIError, match="nor under vmap.*stacked leaf by leaf"):
            jax.vmap(lambda key: pvi.init(key, X, Y))(jax.random.split(KEY, 2))

    @pytest.mark.parametrize("num_steps", [0, -3, 1.5, None])
    def test_num_steps(self, num_steps):
        with pytest.raises(PVIError, match="num_steps.*positive int"):
            PVI(model, ag.AutoNormal(model)).run(KEY, num_steps, X, Y)

    @pytest.mark.parametrize("options", [{}, {"tol": Y, "num_steps": 3}, {"loss_every": Y, "num_steps": 3}])
    def test_no_message_holds_the_data(self, options):
        """The number of rounds is forgotten, or an array comes where a number should."""
        options = dict(options)
        given = (options.pop("num_steps"), X, Y) if options else (X, Y)
        with pytest.raises(PVIError, match=r"=<an array of shape") as caught:
            PVI(model, ag.AutoNormal(model)).run(KEY, *given, **options)
        assert str(float(Y[0]))[:6] not in str(caught.value) and str(float(X[0, 0]))[:6] not in str(caught.value)

    @pytest.mark.parametrize(("option", "value"), [("tol", 0.0), ("tol", -1.0), ("loss_every", 0)])
    def test_run_options(self, option, value):
        with pytest.raises(PVIError, match=option):
            PVI(model, ag.AutoNormal(model)).run(KEY, 2, X, Y, **{option: value})


class TestStates:
    """One fitted state; nothing here may change it."""

    def test_a_result_is_no_state(self, fitted):
        result = PVIRunResult({}, fitted[1], jnp.zeros(1))
        with pytest.raises(AttributeError, match=r"'plan': its state has, so pass result.state"):
            _ = result.plan
        assert not hasattr(result, "colour")

    def test_shape_changed(self, fitted):
        pvi, state = fitted
        with pytest.raises(StateError, match=r"argument 0 \('X'\).*\(11, 2\).*\(12, 2\)"):
            pvi.update(state, X[:-1], Y)

    def test_dtype_changed(self, fitted):
        pvi, state = fitted
        with pytest.raises(StateError, match=r"argument 1 \('y'\) is int"):
            pvi.update(state, X, Y.astype(int))

    def test_arguments_missing(self, fitted):
        pvi, state = fitted
        with pytest.raises(StateError, match=r"missing: argument 1 \('y'\)"):
            pvi.evaluate(state, X)

    @pytest.mark.parametrize("verb", ["update", "stable_update", "evaluate"])
    def test_foreign_state(self, fitted, verb):
        pvi, _ = fitted
        svi = SVI(model, ag.AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
        with pytest.raises(StateError, match="SVIState"):
            getattr(pvi, verb)(svi.init(KEY, jnp.asarray(X), jnp.asarray(Y)), X, Y)

    def test_unknown_group(self, fitted):
        pvi, state = fitted
        for view in (pvi.site, pvi.cavity):
            with pytest.raises(PartitionError, match="no group 'd'; the groups are: 'a', 'b', 'c'"):
                view(state, "d")

    def test_unknown_init_params(self):
        pvi = PVI(Partition(model, "data", LABELS), ag.AutoMultivariateNormal(model))
        with pytest.raises(PVIError, match=r"init_params.*auto_locs.*auto_loc"):
            pvi.init(KEY, X, Y, init_params={"auto_locs": np.zeros(2)})

    def test_interrupt_keeps_the_last_state(self, fitted):
        pvi, state = fitted

        def interrupt(step, state, info):
            if step == 3:
                raise KeyboardInterrupt

        result = pvi.run(KEY, 9, X, Y, init_state=state, callback=interrupt, progress_bar=False)
        assert len(result.losses) == 3 == int(result.state.step) and "interrupted" in result.message
        again = pvi.run(KEY, 2, X, Y, init_state=result.state, progress_bar=False)
        assert int(again.state.step) == 5


class TestImproper:
    @staticmethod
    def flat(X, y, informed=True):
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
        v = numpyro.sample("v", dist.Normal(0, 1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("obs", dist.Normal((X[:, 0] * w if informed else 0.0) + v, 1.0), obs=y)

    def test_no_data_determines_it(self):
        refused(ImproperError, "latent w has no proper prior", self.flat, (X, Y, False))

    def test_with_data(self):
        pvi = PVI(Partition(self.flat, "data", LABELS), ag.AutoMultivariateNormal(self.flat))
        result = pvi.run(KEY, 2, X, Y, progress_bar=False)
        design = np.stack([X[:, 0], np.ones(N)], axis=1)
        expected = np.linalg.solve(design.T @ design + np.diag([0.0, 1.0]), design.T @ Y)
        np.testing.assert_allclose(result.params["auto_loc"], expected, rtol=1e-4)
