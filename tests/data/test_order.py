from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.order.stream import Permutation, derive_key, permutation


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_permutation_has_every_element_once(size: int, key: int) -> None:
    permuted = Permutation(size, key)
    assert sorted(permuted(index) for index in range(size)) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
def test_arrays_and_single_indices_agree(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    permuted = Permutation(size, key)
    assert permuted.take(np.array(indices)).tolist() == [permuted(index) for index in indices]


def test_permutation_never_changes() -> None:
    """Other numbers would change the batches of every resumed run."""
    assert [permutation(10, "sequences", 0, 0, 0)(index) for index in range(10)] == [2, 4, 6, 0, 3, 9, 1, 5, 7, 8]
    assert derive_key("shift", 1, 2, 3) == 9560822074855145197


def test_keys_depend_on_type_and_order() -> None:
    assert len({derive_key(1, 2), derive_key(2, 1), derive_key("1", 2), derive_key(12), derive_key("1", "2")}) == 5


def test_permutations_are_uniform() -> None:
    """Over many keys each element is at each index with about equal frequency: chi-squared over an 8 x 8 table."""
    size, num_keys = 8, 4000
    table = np.zeros((size, size))
    for key in range(num_keys):
        order = Permutation(size, derive_key(key)).take(np.arange(size))
        table[np.arange(size), order] += 1
    expected = num_keys / size
    assert ((table - expected) ** 2 / expected).sum() < 2 * size * size


def test_neighbors_do_not_stay_neighbors() -> None:
    order = Permutation(100_000, 7).take(np.arange(100_000))
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02


@pytest.mark.parametrize("size", [2**50 + 1, 3])
def test_huge_and_tiny_sizes(size: int) -> None:
    permuted = Permutation(size, 1)
    assert all(0 <= permuted(index) < size for index in (0, 1, size - 1))
