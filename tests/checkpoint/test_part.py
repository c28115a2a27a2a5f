"""Parts and ownership maps compared with numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.checkpoint.read import OwnershipMap, Part, assign_evenly, intersect_boxes


def random_part(chance: random.Random) -> Part:
    shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(0, 4)))
    order = list(range(len(shape)))
    chance.shuffle(order)
    ordered = tuple(order) if chance.random() < 0.5 else ()
    if not shape or chance.random() < 0.3:
        return Part(shape, order=ordered)
    dim = chance.randrange(len(shape))
    rows, place = [], 0
    for _ in range(chance.randint(1, 3)):
        low = place + chance.randint(0, 2)
        high = low + chance.randint(1, 3)
        rows.append((low, high))
        place = high
    chance.shuffle(rows)
    return Part(shape, dim, tuple(rows), ordered)


def line(part: Part) -> np.ndarray:
    """Return the index in the full tensor of each element of the part, and -1 for padding."""
    whole = np.arange(int(np.prod(part.shape, dtype=int))).reshape(part.shape)
    if part.rows is not None:
        most = max(end for _, end in part.rows)
        missing = max(0, most - part.shape[part.dim])
        widths = [(0, missing if dim == part.dim else 0) for dim in range(len(part.shape))]
        whole = np.pad(whole, widths, constant_values=-1)
        whole = np.concatenate([np.take(whole, range(*one), part.dim) for one in part.rows], part.dim)
    assert whole.shape == part.local_shape
    return (whole.transpose(part.order) if part.order else whole).reshape(-1)


@pytest.mark.parametrize("seed", range(40))
def test_several_chunks_of_one_rank_are_one_slice(seed):
    chance = random.Random(seed)
    shares, length = [chance.randint(1, 4) for _ in range(chance.randint(2, 4))], chance.randint(1, 5)
    owners = tuple(rank for rank, share in enumerate(shares) for _ in range(share))
    total = length * len(owners)
    start = chance.randrange(total)
    numel = chance.randint(1, total - start)
    found = OwnershipMap(owners, length, start)
    of_each = [owners[(start + position) // length] for position in range(numel)]
    runs = list(found.runs(0, numel, numel))
    assert [rank for rank, low, high in runs for _ in range(low, high)] == of_each
    assert len({rank for rank, _, _ in runs}) == len(runs)
    for rank in range(len(shares)):
        mine = [(low, high) for owner, low, high in runs if owner == rank]
        assert found.run_of(rank, 0, numel, numel) == (mine[0] if mine else None)
    middle = chance.randrange(numel)
    assert next(found.runs(middle, middle + 1, numel)) == next(run for run in runs if run[1] <= middle < run[2])
    assert found.holder(middle) == of_each[middle]


@pytest.mark.parametrize("seed", range(300))
def test_boxes_of_a_run_contain_its_elements(seed):
    chance = random.Random(seed)
    part = random_part(chance)
    want, whole = line(part), np.arange(int(np.prod(part.shape, dtype=int))).reshape(part.shape)
    start = chance.randint(0, part.numel)
    end = chance.randint(start, part.numel)
    found = np.full(end - start, -1)
    for view in part.views(start, end):
        values = whole[tuple(slice(low, high) for low, high in view.box)]
        target = np.lib.stride_tricks.as_strided(
            found[view.offset :], values.shape, [stride * found.itemsize for stride in view.strides]
        )
        assert (target == -1).all()
        target[...] = values
    assert np.array_equal(found, want[start:end])


@pytest.mark.parametrize("seed", range(200))
def test_span_covers_its_box(seed):
    chance = random.Random(seed)
    part, other = random_part(chance), None
    low = [chance.randrange(size) for size in part.shape]
    other = tuple((one, chance.randint(one + 1, size)) for one, size in zip(low, part.shape, strict=True))
    numbers = line(part)
    inside = set(np.arange(int(np.prod(part.shape, dtype=int))).reshape(part.shape)[
        tuple(slice(*one) for one in other)].reshape(-1).tolist())  # fmt: skip
    places = [place for place, number in enumerate(numbers.tolist()) if number in inside]
    span = part.span(other)
    assert span == ((places[0], places[-1] + 1) if places else None)


@pytest.mark.parametrize("seed", range(200))
def test_each_element_is_owned_by_one_rank(seed, monkeypatch):
    chance = random.Random(seed)
    monkeypatch.setattr("weft.checkpoint.read.LEAST_SHARE", chance.choice([1, 4]))
    lengths, times, length = chance.randint(1, 4), chance.randint(1, 4), chance.randint(1, 12)
    ranks = list(range(100, 100 + lengths * times))
    numel = chance.randint(0, lengths * length)
    start = chance.randint(0, lengths * length - numel)
    deal = assign_evenly(ranks, length, times, start=start, turn=chance.randint(0, 9))
    owners = [deal.holder(place) for place in range(numel)]
    runs = list(deal.runs(0, numel, numel))
    assert [rank for rank, low, high in runs for _ in range(low, high)] == owners
    assert [low for _, low, _ in runs] == [0, *(high for _, _, high in runs)][: len(runs)]
    for place, rank in enumerate(owners):
        assert ranks.index(rank) // times == (start + place) // length  # among its replicas
    if numel:
        low = chance.randrange(numel)
        high = chance.randint(low + 1, numel)
        assert list(deal.runs(low, high, numel)) == [run for run in runs if run[1] < high and run[2] > low]
        for rank in ranks:
            mine = [run[1:] for run in runs if run[0] == rank]
            assert deal.run_of(rank, 0, numel, numel) == (mine[0] if mine else None)
    else:
        assert [rank for rank in ranks if deal.run_of(rank, 0, 0, 0) == (0, 0)] == [deal.holder(0)]


def test_undivided_part_is_one_slice():
    deal = OwnershipMap.to_one(3, 12)
    assert list(deal.runs(0, 12, 12)) == [(3, 0, 12)]
    assert next(iter(Part((3, 4)).views(0, 12))).box == ((0, 3), (0, 4))
    assert intersect_boxes((), ()) == ()


def test_replicas_write_equal_shares():
    """Each of 8 replicas of a large model writes an eighth, except for tensors too small to divide."""
    written = dict.fromkeys(range(8), 0)
    turn = 0
    for length in [6_500_000] * 4 + [70_000, 300] * 8:
        deal = assign_evenly(range(8), length, 8, turn=turn)
        turn += -(-length // deal.each)
        for rank, low, high in deal.runs(0, length, length):
            written[rank] += high - low
    assert max(written.values()) <= 1.1 * min(written.values())
