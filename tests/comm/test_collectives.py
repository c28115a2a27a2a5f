"""Collectives on real ranks: bitwise equality with one process for every transport, and the ledger's counts."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.choice import gate_runs, todays
from tests.comm.reference import combined, data
from weft.comm.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from weft.comm.connect import join
from weft.comm.ledger import Ledger
from weft.comm.mesh import Axis, build_mesh
from weft.comm.transports.shared_memory import NUM_SLOTS, SLOT_BYTES
from weft.config.plan import Plan
from weft.verify.rank_pool import RankPool

SHARED, EXCHANGE, BACKEND, STAGED = "shared memory", "gloo exchange", "backend", "staged through the host"
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TYPES = {
    "sum": (*FLOATS, *INTEGERS, torch.complex64, torch.complex128),
    "max": (*FLOATS, *INTEGERS, torch.bool),
    "min": (*FLOATS, *INTEGERS, torch.bool),
}


@pytest.fixture(scope="module")
def ranks3():
    with RankPool(3) as pool:
        yield pool


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def axis_of(size: int, transport: str) -> Axis:
    axis = build_mesh(Plan(dp_replicate=size)).data
    join(axis, "cpu", transport)
    return axis


def wrong_values(
    size: int, transport: str, numels: list[int], dtypes: tuple = (), ops: tuple = ("sum", "max", "min")
) -> list:
    """Return the cases whose bits differ from the result of one process."""
    axis = axis_of(size, transport)
    wrong = []
    for op, numel in itertools.product(ops, numels):
        for dtype in dtypes or TYPES[op]:
            expected = combined(size, numel * size, dtype, op)
            mine = data(axis.rank, numel * size, dtype)
            own = slice(axis.rank * numel, (axis.rank + 1) * numel)
            part = reduce_scatter(mine, axis, op=op)
            untouched = same_bits(mine, data(axis.rank, numel * size, dtype))
            into_itself = mine.clone()
            reduce_scatter(into_itself, axis, out=into_itself[own], op=op)
            full = all_reduce(mine, axis, op)
            good = {
                "reduce_scatter": same_bits(part, expected[own]) and untouched,
                "reduce_scatter into itself": same_bits(into_itself[own], expected[own]),
                "all_reduce": same_bits(full, expected) and full is mine,
            }
            wrong += [(name, op, numel, dtype) for name, is_good in good.items() if not is_good]
    for numel, dtype in itertools.product(numels, dtypes or (*TYPES["sum"], torch.bool, torch.float8_e4m3fn)):
        shards = [data(rank, numel, dtype) for rank in range(size)]
        gathered = all_gather(shards[axis.rank], axis)
        out = torch.zeros(size, numel).to(dtype)
        out[axis.rank].copy_(shards[axis.rank])
        in_place = all_gather(out[axis.rank], axis, out=out)
        sent = [broadcast(shards[axis.rank].clone(), axis, source) for source in range(size)]
        good = {
            "all_gather": same_bits(gathered, torch.cat(shards)),
            "all_gather in place": same_bits(in_place, torch.cat(shards)) and in_place is out,
            "broadcast": all(map(same_bits, sent, shards)),
        }
        wrong += [(name, numel, dtype) for name, is_good in good.items() if not is_good]
    return wrong


@pytest.mark.parametrize(
    ("size", "transport"), todays(itertools.product([2, 3, 4], [SHARED, EXCHANGE, STAGED]), parts=2)
)
def test_results_are_bitwise_equal_to_one_process(request, size, transport):
    pool = request.getfixturevalue(f"ranks{size}")
    # One element; an odd number; enough to leave the path of small tensors (WHOLE_BYTES).
    for wrong in pool.run(wrong_values, size, transport, [1, 7, 5001]):
        assert wrong == []


@pytest.mark.parametrize("size", gate_runs([2, 4], 0))
def test_tensors_larger_than_all_slots_are_bitwise_equal(request, size):
    pool = request.getfixturevalue(f"ranks{size}")
    numel = NUM_SLOTS * SLOT_BYTES // 4 + 3  # for each rank
    for wrong in pool.run(wrong_values, size, SHARED, [numel], (torch.float32, torch.bfloat16), ("sum",)):
        assert wrong == []


def large(size: int, transport: str) -> bool:
    axis = axis_of(size, transport)
    numel = (64 << 20) // 4
    full = all_reduce(torch.full((numel,), 1.5**axis.rank), axis)
    part = reduce_scatter(torch.arange(numel, dtype=torch.float32), axis)
    gathered = all_gather(part, axis)
    return bool((full == sum(1.5**rank for rank in range(size))).all()) and torch.equal(
        gathered, torch.arange(numel, dtype=torch.float32) * size
    )


@pytest.mark.parametrize("transport", [SHARED, EXCHANGE, BACKEND, STAGED])
def test_64_mib_tensors_are_reduced_and_gathered_exactly(ranks2, transport):
    assert ranks2.run(large, 2, transport) == [True, True]


def backend_results(size: int) -> list:
    """Check gloo's own collectives, which no CPU axis selects by default. They add in another order."""
    axis = axis_of(size, BACKEND)
    mine = data(axis.rank, 24, torch.float64)
    expected = combined(size, 24, torch.float64, "sum")
    own = slice(axis.rank * 24 // size, (axis.rank + 1) * 24 // size)
    barrier(axis)
    return [
        torch.allclose(reduce_scatter(mine, axis), expected[own]),
        torch.allclose(all_reduce(mine.clone(), axis), expected),
        torch.equal(all_gather(mine, axis), torch.cat([data(rank, 24, torch.float64) for rank in range(size)])),
        torch.equal(broadcast(mine.clone(), axis, 1), data(1, 24, torch.float64)),
    ]


def test_backend_transport_gives_close_sums_and_exact_copies(ranks4):
    assert ranks4.run(backend_results, 4) == [[True] * 4] * 4


def reduce_nan(size: int, transport: str) -> list[list[bool]]:
    axis = axis_of(size, transport)
    value = torch.tensor([float("nan") if axis.rank == 1 else 1.0, 2.0])
    return [all_reduce(value.clone(), axis, op).isnan().tolist() for op in ("sum", "max", "min")]


@pytest.mark.parametrize("transport", [SHARED, EXCHANGE, STAGED])
def test_nan_of_one_rank_reaches_all_ranks(ranks2, transport):
    assert ranks2.run(reduce_nan, 2, transport) == [[[True, False]] * 3] * 2


def exercise(plan_text: str) -> dict[str, object]:
    ledger = Ledger()
    mesh = build_mesh(Plan.parse(plan_text), record=ledger.record)
    axis = mesh.data
    value = torch.arange(4.0) + 10 * mesh.rank
    found = {op: all_reduce(value.clone(), axis, op).tolist() for op in ("sum", "max", "min")}
    found["broadcast"] = [broadcast(value.clone(), axis, source).tolist() for source in range(axis.size)]
    found["all_gather"] = all_gather(value, axis).tolist()
    found["reduce_scatter"] = reduce_scatter(value, axis).tolist()
    barrier(axis)
    found["ledger"] = {(name, op): (entry.calls, entry.num_bytes) for name, op, entry in ledger.rows()}
    found["seconds"] = [entry.seconds for _, _, entry in ledger.rows()]
    return found


def test_values_and_ledger_counts_on_two_ranks(ranks2):
    for rank, found in enumerate(ranks2.run(exercise, "dp_replicate=2")):
        assert found["sum"] == [10, 12, 14, 16]
        assert found["max"] == [10, 11, 12, 13]
        assert found["min"] == [0, 1, 2, 3]
        assert found["broadcast"] == [[0, 1, 2, 3], [10, 11, 12, 13]]
        assert found["all_gather"] == [0, 1, 2, 3, 10, 11, 12, 13]
        assert found["reduce_scatter"] == [[10, 12], [14, 16]][rank]
        # Bytes of the full tensors: three all_reduces and two broadcasts of four fp32 numbers, one gather of eight.
        assert found["ledger"] == {
            ("dp_replicate*dp_shard", "all_reduce"): (3, 48),
            ("dp_replicate*dp_shard", "broadcast"): (2, 32),
            ("dp_replicate*dp_shard", "all_gather"): (1, 32),
            ("dp_replicate*dp_shard", "reduce_scatter"): (1, 16),
            ("dp_replicate*dp_shard", "barrier"): (1, 0),
        }
        assert all(seconds > 0 for seconds in found["seconds"])


def test_single_rank_records_no_communication():
    found = exercise("dp_replicate=1")
    assert found["sum"] == found["all_gather"] == found["reduce_scatter"] == [0, 1, 2, 3]
    assert found["ledger"] == {}


def shapes_and_gradients(size: int) -> list:
    axis = axis_of(size, SHARED)
    turned = (torch.arange(6.0).view(2, 3) + axis.rank).t()  # not contiguous: read, so copied
    weight = torch.nn.Parameter(torch.ones(2, 2) * (axis.rank + 1))
    out = torch.zeros(size, 3, 2)
    all_gather(turned, axis, out=out)
    summed = all_reduce(weight, axis)
    return [
        out[1].tolist() == (torch.arange(6.0).view(2, 3) + 1).t().tolist(),
        reduce_scatter(turned, axis).tolist()
        == (torch.tensor([0.0, 3, 1, 4, 2, 5]) * 2 + 1).chunk(2)[axis.rank].tolist(),
        summed is weight and weight.requires_grad and weight.grad_fn is None and weight.tolist() == [[3, 3], [3, 3]],
        all_reduce(torch.tensor(1.0), axis).shape == (),
        all_gather(torch.empty(0), axis).shape == (0,),
        all_reduce(torch.empty(0, 3), axis).shape == (0, 3),
    ]


def test_non_contiguous_parameter_scalar_and_empty_tensors_are_accepted(ranks2):
    assert ranks2.run(shapes_and_gradients, 2) == [[True] * 6] * 2
