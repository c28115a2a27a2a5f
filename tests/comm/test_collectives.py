"""Collectives on real ranks: values, identity over axes of size 1, and what the ledger counts."""

from __future__ import annotations

import torch

from weft.comm import Ledger, all_reduce, barrier, broadcast
from weft.mesh import build_mesh
from weft.spec.plan import Plan


def exercise(plan_text: str) -> dict[str, object]:
    ledger = Ledger()
    mesh = build_mesh(Plan.parse(plan_text), record=ledger.record)
    axis = mesh.data
    value = torch.arange(3.0) + 10 * mesh.rank
    found = {op: all_reduce(value.clone(), axis, op).tolist() for op in ("sum", "max", "min")}
    found["broadcast"] = [broadcast(value.clone(), axis, source).tolist() for source in range(axis.size)]
    barrier(axis)
    found["ledger"] = {(name, op): (entry.calls, entry.num_bytes) for name, op, entry in ledger.rows()}
    return found


def test_values_and_counts_on_two_ranks(ranks2):
    for found in ranks2.run(exercise, "dp_replicate=2"):
        assert found["sum"] == [10, 12, 14]
        assert found["max"] == [10, 11, 12]
        assert found["min"] == [0, 1, 2]
        assert found["broadcast"] == [[0, 1, 2], [10, 11, 12]]
        # Three all_reduces of three fp32 numbers, two broadcasts.
        assert found["ledger"] == {
            ("dp_replicate*dp_shard", "all_reduce"): (3, 36),
            ("dp_replicate*dp_shard", "broadcast"): (2, 24),
            ("dp_replicate*dp_shard", "barrier"): (1, 0),
        }


def test_one_rank_communicates_nothing():
    found = exercise("dp_replicate=1")
    assert found["sum"] == [0, 1, 2]
    assert found["ledger"] == {}
