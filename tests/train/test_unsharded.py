"""Fingerprints of batches, summed over ranks."""

from __future__ import annotations

import warnings

import pytest
import torch

from weft.errors import WeftWarning
from weft.train.step.checks import fingerprint, warn_if_identical


def sums(*batches) -> list[float]:
    return torch.stack([fingerprint(batch) for batch in batches]).sum(0).tolist()


def are_equal(*batches) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_identical(sums(*batches), len(batches), len(batches))
    return any(one.category is WeftWarning for one in caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_equal_batches_of_many_ranks_are_detected_in_any_dtype(dtype):
    x = torch.rand(1000).round().to(dtype)
    batch = [x, {"y": (x[:3], torch.tensor(2.0)), "name": "cats"}]
    assert are_equal(*[batch] * 4096)


def test_one_rank_with_another_value_is_detected():
    batch = [torch.arange(8), torch.arange(3)]
    for changed in ([torch.arange(8), torch.tensor([0, 2, 1])], [torch.arange(8).flip(0), torch.arange(3)]):
        assert not are_equal(*[batch] * 7, changed)


def test_batches_without_tensors_are_not_compared():
    assert not are_equal("cats", "cats")
    assert not are_equal([torch.ones(3)], "cats")
