"""Host copies of tensors that were moved to a device. The meta device represents the device."""

from __future__ import annotations

import torch

from weft.data.batches import host_values, move_batch

META = torch.device("meta")


def test_host_values_of_integer_tensors_and_their_views():
    ids = torch.arange(24).view(4, 6)
    moved = move_batch({"ids": ids, "scores": torch.ones(4)}, META)
    assert host_values(moved["ids"]) is ids
    assert torch.equal(host_values(moved["ids"][1:3]), ids[1:3])
    assert torch.equal(host_values(moved["ids"][:, 2:5].t()), ids[:, 2:5].t())
    assert host_values(moved["scores"]) is None
    assert host_values(torch.arange(4, device=META)) is None
    assert host_values(ids) is ids


def test_modified_tensors_have_no_host_values():
    ids = torch.arange(6)
    moved, other = move_batch(ids, META), move_batch(ids, META)
    part = moved[2:]
    part.add_(1)
    assert host_values(moved) is None
    assert host_values(part) is None
    assert host_values(other) is ids
    ids.mul_(2)
    assert host_values(other) is None


def test_results_of_operations_have_no_host_values():
    moved = move_batch(torch.arange(6), META)
    assert host_values(moved + 1) is None
    assert host_values(moved.to(torch.int32)) is None
