from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.order.stream import Mixture

shares = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shares=shares, seed=st.integers(0, 99), length=st.integers(1, 900))
def test_each_source_is_read_in_sequence(shares: list[float], seed: int, length: int) -> None:
    """The ordinals of a source over any prefix are 0, 1, ... in some order, and each occurs once at block borders."""
    mixture = Mixture(shares, seed=seed, block=64)
    blocks = -(-length // 64) * 64
    seen: dict[int, list[int]] = {}
    for index in range(blocks):
        source, ordinal = mixture.locate(index)
        seen.setdefault(source, []).append(ordinal)
    assert all(ordinals == list(range(len(ordinals))) for ordinals in seen.values())
    assert mixture.counts_before(blocks) == [len(seen.get(source, [])) for source in range(len(shares))]


@settings(max_examples=60, deadline=None)
@given(shares=shares, seed=st.integers(0, 9), index=st.integers(0, 2**45))
def test_counts_depend_only_on_index_and_are_near_the_shares(shares: list[float], seed: int, index: int) -> None:
    mixture = Mixture(shares, seed=seed)
    counts = mixture.counts_before(index)
    assert sum(counts) == index
    for share, count in zip(shares, counts, strict=True):
        # The block's own order, the number of sources, and the rounding of the weights to 2**-32.
        assert abs(count - index * share / sum(shares)) < 256 + len(shares) + index * 2**-32 * (len(shares) + 1)
    source, ordinal = mixture.locate(index)
    after = mixture.counts_before(index + 1)
    assert ordinal == counts[source]
    assert [now - before for before, now in zip(counts, after, strict=True)] == [
        int(number == source) for number in range(len(shares))
    ]


def test_long_run_shares_are_exact() -> None:
    mixture = Mixture([0.7, 0.2, 0.0999, 0.0001], seed=0)
    assert mixture.counts_before(10_000_128) == [7000089, 2000026, 999013, 1000]


def test_order_within_a_block_depends_on_the_seed() -> None:
    one, other = (Mixture([1, 1], seed=seed) for seed in (0, 1))
    order = [one.locate(index)[0] for index in range(256)]
    assert Counter(order) == {0: 128, 1: 128}
    assert order != [other.locate(index)[0] for index in range(256)]
    assert order != sorted(order)
    assert order != [0, 1] * 128
