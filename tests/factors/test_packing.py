"""Packing: every row once, the limits on padding and chunks, and the cases that decided the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_pvi.errors import DataError
from numpyro_pvi.factors._chunks import choose_chunk_rows, gather_rows, pack_rows
from numpyro_pvi.handlers import Partition


def table_of(sizes, seed=0):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return Partition(groups=np.random.default_rng(seed).permutation(labels)).resolve(len(labels))


def cost_of(sizes, length):
    """Padded rows as a share of the rows, and chunks per group, counted one group at a time."""
    chunks = sum((size + length - 1) // length for size in sizes)
    return chunks * length / sum(sizes), chunks / len(sizes)


SIZES = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=300),
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    # Sizes over four decades.
    st.lists(st.floats(0, 4).map(lambda power: max(1, int(10**power))), min_size=1, max_size=60),
)


def most(sizes):
    """Chunks a group that are allowed on average: 4.3, or as many as chunks of at most 1024 rows need."""
    return max(4.34, 1 + sum(sizes) / len(sizes) / min(1024, max(sizes)))


class TestChunkLength:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(sizes=SIZES, chunk_size=st.sampled_from([1, 16, 128, 1000]))
    def test_limits_hold(self, sizes, chunk_size):
        padded, chunks = cost_of(sizes, choose_chunk_rows(tuple(sizes), chunk_size))
        assert padded <= 1.3 and chunks <= most(sizes)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12), chunk_size=st.sampled_from([1, 128]))
    def test_no_length_within_the_limits_is_cheaper(self, sizes, chunk_size):
        def cost(length):
            padded, chunks = cost_of(sizes, length)
            within = padded <= 1.3 and chunks <= 1 + 1 / 0.3
            return padded * sum(sizes) + chunk_size / 16 * chunks * len(sizes) if within else np.inf

        best = min(cost(length) for length in range(1, max(sizes) + 1))
        np.testing.assert_allclose(cost(choose_chunk_rows(tuple(sizes), chunk_size)), best, rtol=1e-12)

    @pytest.mark.parametrize(
        ("size", "groups", "dim"), [(1, 1, 1), (1, 50, 3), (7, 3, 1), (320, 1000, 1), (1009, 10, 1), (2000, 10, 500)]
    )
    def test_equal_groups_have_no_padding_and_one_chunk_each(self, size, groups, dim):
        assert choose_chunk_rows((size,) * groups, dim=dim) == size

    @pytest.mark.parametrize(("size", "groups", "dim"), [(2000, 10, 1), (320_000, 1, 50), (32_000, 10, 200)])
    def test_long_groups_are_cut(self, size, groups, dim):
        """A pass holds some hundred numbers a row, so chunks stay short whatever the group's size."""
        length = choose_chunk_rows((size,) * groups, dim=dim)
        assert length <= max(1024, 8 * dim) and cost_of((size,) * groups, length)[0] <= 1.01

    def test_nearly_equal_blocks(self):
        assert choose_chunk_rows((901,) * 3 + (900,) * 7) == 901

    @pytest.mark.parametrize("seed", range(5))
    def test_one_group_with_half_the_rows(self, seed):
        rest = np.random.default_rng(seed).multinomial(10_000, np.ones(19) / 19)
        padded, chunks = cost_of((10_000, *rest), choose_chunk_rows((10_000, *rest.tolist())))
        assert padded <= 1.15 and chunks <= 4.34

    def test_tiny_groups_are_not_padded_to_the_chunk_size(self):
        sizes = tuple(np.random.default_rng(0).integers(1, 6, 1000).tolist())
        assert choose_chunk_rows(sizes) <= 3

    def test_smaller_chunk_size_accepts_more_chunks(self):
        sizes = (1000, 730, 410, 90, 55)
        assert cost_of(sizes, choose_chunk_rows(sizes, 1))[1] >= cost_of(sizes, choose_chunk_rows(sizes, 4096))[1]

    def test_many_groups_stay_fast(self):
        sizes = tuple(np.random.default_rng(0).integers(1, 20_000, 3000).tolist())
        padded, chunks = cost_of(sizes, choose_chunk_rows(sizes))
        assert padded <= 1.3 and chunks <= most(sizes)


class TestPackRows:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), length=st.integers(1, 50), seed=st.integers(0, 99)
    )
    def test_every_row_once_in_a_chunk_of_its_group(self, sizes, length, seed):
        table = table_of(sizes, seed)
        packing = jax.tree.map(np.asarray, pack_rows(table, length))
        assert packing.rows.shape == packing.mask.shape == (len(packing.chunk_group), length)
        assert sorted(packing.rows[packing.mask].tolist()) == list(range(sum(sizes)))
        for chunk, group in enumerate(packing.chunk_group):
            assert (table.index_of_row[packing.rows[chunk]] == group).all()
            # Padding comes last and repeats the first row.
            assert packing.mask[chunk, 0] and (np.diff(packing.mask[chunk].astype(int)) <= 0).all()
            assert (packing.rows[chunk][~packing.mask[chunk]] == packing.rows[chunk, 0]).all()
        for group in range(len(sizes)):
            chunks = np.arange(packing.offsets[group], packing.offsets[group + 1])
            assert (packing.chunk_group[chunks] == group).all() and len(chunks) == -(-sizes[group] // length)
        assert packing.offsets[-1] == len(packing.chunk_group)

    def test_rows_keep_their_order_within_a_group(self):
        packing = pack_rows(Partition(groups=["b", "a", "b", "b", "a"]).resolve(5), 2)
        assert packing.rows.tolist() == [[1, 4], [0, 2], [3, 3]]
        assert packing.mask.tolist() == [[True, True], [True, True], [True, False]]
        assert packing.chunk_group.tolist() == [0, 1, 1] and packing.offsets.tolist() == [0, 1, 3]

    def test_is_a_pytree_of_four_arrays(self):
        packing = pack_rows(table_of([3, 4]), 2)
        assert len(jax.tree.leaves(packing)) == 4
        assert jax.jit(lambda packing: packing.mask.sum())(packing) == 7
        assert jax.vmap(lambda rows: rows.sum())(packing.rows).shape == (4,)


class TestGatherRows:
    @pytest.mark.parametrize("sizes", [[1], [5, 1, 3], [4, 4]])
    def test_group_sums_return(self, sizes):
        table = table_of(sizes)
        packing = pack_rows(table, 2)
        values = np.random.default_rng(1).normal(size=(sum(sizes), 3))
        chunks = jnp.where(packing.mask[:, :, None], gather_rows(jnp.asarray(values), packing), 0).sum(axis=1)
        sums = jax.ops.segment_sum(chunks, packing.chunk_group, len(sizes), indices_are_sorted=True)
        for group in range(len(sizes)):
            np.testing.assert_allclose(
                sums[group], values[table.index_of_row == group].sum(axis=0), rtol=1e-5, atol=1e-6
            )

    def test_rows_stay_on_their_axis(self):
        packing = pack_rows(table_of([3, 4]), 2)
        leaf = jnp.arange(21).reshape(3, 7)
        assert gather_rows(leaf, packing, axis=-1).shape == (4, 3, 2)
        np.testing.assert_array_equal(gather_rows(leaf, packing, axis=1)[2], leaf[:, packing.rows[2]])
        assert gather_rows(leaf[0], packing).dtype == leaf.dtype

    def test_no_such_axis(self):
        with pytest.raises(DataError, match=r"shape \(7,\) has no axis 1"):
            gather_rows(jnp.arange(7), pack_rows(table_of([3, 4]), 2), axis=1)
