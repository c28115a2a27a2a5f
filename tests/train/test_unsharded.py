"""Fingerprints of batches, added up over ranks."""

from __future__ import annotations

import warnings

import pytest
import torch

from weft.errors import WeftWarning
from weft.train.step.checks import fingerprint, warn_if_identical


def sums(*batches) -> list[float]:
    return torch.stack([fingerprint(batch) for batch in batches]).sum(0).tolist()


def said(*batches) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_identical(sums(*batches), len(batches), len(batches))
    return any(one.category is WeftWarning for one in caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_equal_batches_of_many_ranks_are_seen_whatever_their_format(dtype):
    x = torch.rand(1000).round().to(dtype)
    batch = [x, {"y": (x[:3], torch.tensor(2.0)), "name": "cats"}]
    assert said(*[batch] * 4096)


def test_one_rank_with_another_value_is_enough():
    batch = [torch.arange(8), torch.arange(3)]
    for changed in ([torch.arange(8), torch.tensor([0, 2, 1])], [torch.arange(8).flip(0), torch.arange(3)]):
        assert not said(*[batch] * 7, changed)


def test_batches_without_tensors_say_nothing():
    assert not said("cats", "cats")
    assert not said([torch.ones(3)], "cats")
