"""Arguments: what is refused and how, what is converted, and what may not change after init."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_pvi.errors import DataError, StateError
from numpyro_pvi.factors._arguments import as_arrays, check_finite_arguments, check_same_signature, signature_of

X = np.arange(12.0).reshape(6, 2)


def with_bad(*rows, value=np.nan):
    x = X.copy()
    x[list(rows), 0] = value
    return x


class TestFinite:
    def test_accepts_finite_data_and_statics(self):
        check_finite_arguments((X, jnp.ones(3), [1, 2], None, "name", 3, True, 2.5, len), {"d": {"y": np.arange(3)}})

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda x: x.tolist()], ids=["numpy", "jax", "list"])
    def test_names_argument_and_rows(self, convert, value):
        with pytest.raises(
            DataError, match=r"^argument 1 has 2 non-finite .* in 2 row\(s\), first at row\(s\) 1, 4: "
        ) as caught:
            check_finite_arguments((X, convert(with_bad(1, 4, value=value))), {})
        assert "obs_mask" in str(caught.value)

    def test_names_keyword_path_and_parameter(self):
        with pytest.raises(DataError, match=r"^argument 'data'\['train'\]\[1\] has 1 non-finite .* entry"):
            check_finite_arguments((), {"data": {"train": (X, with_bad(2))}})
        with pytest.raises(DataError, match=r"^argument 0 \('features'\) has"):
            check_finite_arguments((with_bad(2),), {}, ("features", "y"))

    def test_counts_entries_and_shows_ten_rows(self):
        x = np.full((40, 2), np.nan)
        with pytest.raises(DataError, match=r"80 non-finite .* in 40 row\(s\), first at row\(s\) 0, 1, .*, 9, \.\.\.:"):
            check_finite_arguments((x,), {})

    def test_never_shows_values(self):
        x = np.array([123456.5, np.nan])
        with pytest.raises(DataError) as caught:
            check_finite_arguments((x,), {})
        assert "123456" not in str(caught.value)

    def test_scalar(self):
        with pytest.raises(DataError, match="argument 0 is not finite"):
            check_finite_arguments((float("nan"),), {})

    def test_overflow_of_the_cast_counts(self, x64):
        if x64:
            pytest.skip("float64 holds it")
        with pytest.raises(DataError, match=r"row\(s\) 0"):
            check_finite_arguments((np.array([1e300]),), {})

    def test_traced_arrays_pass(self):
        @jax.jit
        def double(x):
            check_finite_arguments((x,), {})
            return 2 * x

        assert double(jnp.ones(2)).sum() == 4

    def test_keys_pass(self):
        check_finite_arguments((jax.random.key(0),), {})


class TestAsArrays:
    def test_numbers_become_arrays(self):
        (x, y, beta, nested), kwargs = as_arrays((X, [1, 0, 1], 0.5, {"a": [np.ones(2), np.float32(3)]}), {"z": X[0]})
        for leaf in (x, y, beta, nested["a"][0], nested["a"][1], kwargs["z"]):
            assert isinstance(leaf, jax.Array)
        assert x.dtype == jnp.result_type(float) and y.dtype == jnp.result_type(int)
        assert nested["a"][1].dtype == jnp.float32 and y.shape == (3,)

    def test_statics_stay(self):
        statics = (None, "name", 3, True, (200, 10), len)
        assert as_arrays(statics, {}) == (statics, {})
        (three, yes), _ = as_arrays((np.int64(3), np.bool_(True)), {})
        assert type(three) is int and yes is True

    def test_jax_arrays_are_not_copied(self):
        x = jnp.ones(3)
        assert as_arrays((x,), {})[0][0] is x

    def test_pandas(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
        (x, y), _ = as_arrays((frame, frame["a"]), {})
        assert x.tolist() == [[1, 3], [2, 4]] and y.tolist() == [1, 2]
        with pytest.raises(DataError, match="argument 0 holds objects"):
            as_arrays((frame.assign(c=["u", "v"]),), {})

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (np.array(["a", "b"]), "argument 0 holds text .*encode it as numbers"),
            (np.array([1, None], dtype=object), "argument 0 holds objects"),
            (np.array(["2020-01-01"], dtype="datetime64[D]"), "argument 0 holds dates"),
            ([[1.0, 2.0], [3.0]], "argument 0 is a list whose rows have different lengths"),
        ],
    )
    def test_refuses(self, value, message):
        for function in (as_arrays, check_finite_arguments, signature_of):
            with pytest.raises(DataError, match=message):
                function((value,), {})

    def test_sparse(self):
        sparse = pytest.importorskip("scipy.sparse")
        with pytest.raises(DataError, match=r"argument 'x' is a csr_.*toarray"):
            as_arrays((), {"x": sparse.csr_matrix(X)})

    def test_integers_that_would_wrap(self, x64):
        value = np.array([2**40])
        if x64:
            assert as_arrays((value,), {})[0][0].tolist() == [2**40]
            return
        with pytest.raises(DataError, match="argument 0 has integers that do not fit int32"):
            as_arrays((value,), {})


class TestSignature:
    ARGS = (X, [1, 0, 1], None, "name", 3, 2.5)
    KWARGS: ClassVar = {"d": {"y": np.arange(3)}, "flag": True}

    def test_same_before_and_after_conversion(self):
        before, after = signature_of(self.ARGS, self.KWARGS), signature_of(*as_arrays(self.ARGS, self.KWARGS))
        assert before == after and hash(before) == hash(after)
        check_same_signature(before, after)

    def test_values_do_not_matter(self):
        check_same_signature(signature_of((X, 0.5), {}), signature_of((X + 1, 0.7), {}))

    def test_works_on_traced_arrays(self):
        expected = signature_of((jnp.ones(3),), {})
        jax.jit(lambda x: check_same_signature(expected, signature_of((x,), {})))(jnp.ones(3))

    @pytest.mark.parametrize(
        ("got", "message"),
        [
            (
                ((X[:5], 3), {"y": X}),
                r"argument 0 \('x'\) is float\d\d of shape \(5, 2\), .* made with float\d\d of shape \(6, 2\)",
            ),
            (((X.astype(int), 3), {"y": X}), r"argument 0 \('x'\) is int\d\d of shape .* made with float"),
            (((X, 4), {"y": X}), r"argument 1 is int 4, but the state was made with int 3"),
            (((X, 3), {"y": X[0]}), r"argument 'y' is float\d\d of shape \(2,\)"),
            (((X, 3), {}), r"missing: argument 'y'"),
            (((X, 3), {"y": X, "z": 1}), r"not there before: argument 'z'"),
            (((X, 3, X), {}), r"missing: argument 'y'; not there before: argument 2"),
            (((X, 3), {"y": None}), r"missing: argument 'y'"),
        ],
    )
    def test_names_what_changed(self, got, message):
        expected = signature_of((X, 3), {"y": X}, ("x",))
        with pytest.raises(StateError, match=message):
            check_same_signature(expected, signature_of(*got, ("x",)))

    def test_containers(self):
        with pytest.raises(StateError, match="containers differ"):
            check_same_signature(signature_of(((X, X),), {}), signature_of(([X, X],), {}))

    def test_unhashable_static(self):
        with pytest.raises(DataError, match="argument 0 is a set, neither an array nor hashable"):
            signature_of(({1, 2},), {})
