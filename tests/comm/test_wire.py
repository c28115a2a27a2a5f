"""Encoded sums equal the sums of the same codec in one process, for every transport and size."""

from __future__ import annotations

import math

import pytest
import torch

from tests.comm import block8
from tests.comm.reference import data
from weft.comm.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce, start_reduce_scatter
from weft.comm.connect import join
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.transports.backend import ExchangeLink
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.transports.shared_memory import SharedLink
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.wire_format import find_wire
from weft.config.fields.wire_formats import WIRES, WireSpec, register, wire_spec
from weft.config.plan import Plan
from weft.errors import CommError, PlanError
from weft.parallel.state.precision import Precision
from weft.verify.oracles import WireOracle

SIZES = (1, 63, 64, 1000, 70001)
STEPS = 3


def grads(step: int, rank: int, numel: int) -> torch.Tensor:
    return data(rank + 10 * step, numel, torch.float32)


def sums(size: int, transport: str, name: str, numel: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, for each step, this rank's all_reduce and its shard of the padded reduce_scatter."""
    mesh = build_mesh(Plan(dp_replicate=size))
    join(mesh.data, "cpu", transport)
    full, part, found = Coder(find_wire(name), "full"), Coder(find_wire(name), "part"), []
    for step in range(STEPS):
        mine = grads(step, mesh.rank, numel)
        divided = torch.cat([mine, mine.new_zeros(-numel % size)])
        own = divided[mesh.rank * divided.numel() // size :][: divided.numel() // size]
        found.append((all_reduce(mine, mesh.data, wire=full),
                      reduce_scatter(divided, mesh.data, out=own, wire=part).clone()))  # fmt: skip
        full.commit()
        part.commit()
    return found


@pytest.mark.parametrize("transport", [SharedLink.transport, ExchangeLink.transport])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "block8"])
@pytest.mark.parametrize("size", [2, 4])
def test_encoded_sums_match_the_oracle(size, name, transport, request):
    pool = request.getfixturevalue(f"ranks{size}")
    for numel in SIZES if size == 2 else SIZES[-2:]:
        found, oracle = pool.run(sums, size, transport, name, numel), WireOracle(name)
        for step in range(STEPS):
            flats = [grads(step, rank, numel) for rank in range(size)]
            total = oracle.all_reduce(flats, "full")
            padded = [torch.cat([flat, flat.new_zeros(-numel % size)]) for flat in flats]
            parts = oracle.reduce_scatter(padded, "part")
            oracle.commit()
            for rank in range(size):
                assert torch.equal(found[rank][step][0], total), (numel, step)
                assert torch.equal(found[rank][step][1], parts[rank]), (numel, step)


def overlapping(size: int, backwards: bool) -> tuple[list[torch.Tensor], list]:
    """Run concurrent sums on two axes, waiting in another order on some ranks. Return sums and ledger rows."""
    ledger = Ledger()
    mesh = build_mesh(Plan(dp_replicate=2, dp_shard=size // 2), record=ledger.record)
    flats = [grads(0, mesh.rank, numel) for numel in (640, 64, 1280)]
    axes = [mesh["dp_replicate"], mesh["dp_shard"], mesh["dp_replicate"]]
    wires = [Coder(find_wire("block8")) for _ in flats]
    pending = [start_all_reduce(*each[:2], wire=each[2]) for each in zip(flats, axes, wires, strict=True)]
    plain = start_all_reduce(torch.ones(10), mesh["dp_shard"])
    waits = [*pending, plain]
    for one in reversed(waits) if backwards and mesh.rank in (1, 2) else waits:
        one.wait()
    assert plain.wait().tolist() == [size // 2] * 10
    rows = [(axis, kind, entry.calls, entry.num_bytes) for axis, kind, entry in ledger.rows()]
    return [one.wait() for one in pending], rows


def two_stages(backwards: bool) -> list[torch.Tensor]:
    """Return sums over four ranks that some ranks wait for in another order."""
    mesh = build_mesh(Plan(dp_replicate=4))
    flats = [grads(0, mesh.rank, numel) for numel in (640, 64, 1280)]
    pending = [start_all_reduce(flat, mesh.data, wire=Coder(find_wire("block8"))) for flat in flats]
    for one in reversed(pending) if backwards and mesh.rank % 2 else pending:
        one.wait()
    return flats


def test_second_stages_start_in_the_same_order_on_all_ranks(ranks4):
    straight, mixed = (ranks4.run(two_stages, backwards) for backwards in (False, True))
    for one, other in zip(straight, mixed, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_encoded_sums_may_be_waited_for_in_any_order(ranks4):
    straight, crossed = (ranks4.run(overlapping, 4, backwards) for backwards in (False, True))
    for rank in range(4):
        assert all(map(torch.equal, straight[rank][0], crossed[rank][0]))
    spec = wire_spec("block8")
    sent = spec.num_bytes(640) + spec.num_bytes(1280)  # two ranks exchange their full tensors
    assert ("dp_replicate", "all_reduce", 2, sent) in straight[0][1]
    assert ("dp_shard", "all_reduce", 2, spec.num_bytes(64) + 40) in straight[0][1]


def other_calls() -> list[object]:
    """Return the results of other calls with `wire=`: a gather, parts, an axis of one rank and a reduce_scatter."""
    mesh = build_mesh(Plan(dp_replicate=2))
    axis, single, wire = mesh.data, mesh["tp"], find_wire("block8")
    mine = grads(0, mesh.rank, 200)
    gathered = all_gather(mine, axis, wire=Coder(wire))
    parts = Parts([(0, mine[:100]), (128, mine[100:])], 256)
    summed = start_all_reduce(torch.empty(256), axis, parts=parts, wire=Coder(wire)).wait()
    untouched = all_reduce(mine.clone(), single, wire=Coder(wire))
    scattered = start_reduce_scatter(mine.clone(), axis, wire=Coder(wire)).wait()
    with pytest.raises(CommError, match=r"op='max' does not work on wire block8. Use sum, or leave wire= out."):
        all_reduce(mine, axis, op="max", wire=Coder(wire))
    return [gathered, summed, torch.equal(untouched, mine), scattered]


def test_gather_parts_and_single_rank_with_a_wire_format(ranks2):
    flats = [grads(0, rank, 200) for rank in range(2)]
    wire = find_wire("block8")
    expected = torch.cat([wire.decode(wire.encode(flat[None], None)[0], 200, flat.dtype)[0] for flat in flats])
    padded_parts = [torch.cat([flat[:100], flat.new_zeros(28), flat[100:], flat.new_zeros(28)]) for flat in flats]
    total = WireOracle("block8").all_reduce(padded_parts, "")
    shards = WireOracle("block8").reduce_scatter(flats, "")
    for rank, (gathered, summed, untouched, scattered) in enumerate(ranks2.run(other_calls)):
        assert torch.equal(gathered, expected)
        assert torch.equal(summed, total)
        assert untouched
        assert torch.equal(scattered, shards[rank])


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "block8"])
def test_encoded_bytes_match_the_spec(name):
    wire = find_wire(name)
    for numel in SIZES:
        codes, _ = wire.encode(torch.ones(3, numel), None)
        assert codes.dtype == torch.uint8
        assert codes.shape == (3, wire.spec.num_bytes(numel, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "block8"])
def test_non_finite_values_decode_to_non_finite(name, value):
    wire, x = find_wire(name), torch.ones(1, 100)
    x[0, 70] = value
    assert not wire.decode(wire.encode(x, None)[0], 100, x.dtype).isfinite().all()


def test_skipped_step_leaves_the_residual_unchanged():
    coders, x = Coders(find_wire("block8")), torch.linspace(0, 1, 100)[None]
    coders["bucket"].encode("summands", x, 0)
    assert coders.states() == {}
    coders.commit()
    residual = coders.states()["bucket/summands-1x100/residual"]
    coders["bucket"].encode("summands", x * math.nan, 0)
    coders.discard()
    coders.commit()
    assert torch.equal(coders.states()["bucket/summands-1x100/residual"], residual)
    # Two uses in one step: the second continues from the state of the first.
    first, second = Coder(find_wire("block8")), find_wire("block8")
    codes = [first.encode("summands", x, 0) for _ in range(2)]
    _, state = second.encode(x, None)
    assert torch.equal(codes[1], second.encode(x, state)[0])


def test_dynamic_loss_scale_is_rejected_with_a_stateful_wire_format():
    assert Precision.of(Plan(precision="fp16", reduce="bf16")).wire.spec.name == "bf16"
    with pytest.raises(PlanError, match=r"reduce=block8: it keeps what it rounded off .* Use precision=bf16"):
        Precision.of(Plan(precision="fp16", reduce="block8"))


def test_registered_wire_format_is_a_plan_value():
    assert Plan.parse("dp_shard=2 zero=2 reduce=block8").reduce == "block8"
    assert tuple(WIRES)[:2] == ("fp32", "bf16")
    with pytest.raises(PlanError, match=r"reduce=int9: not one of fp32, bf16, .*block8"):
        Plan.parse("reduce=int9")
    register(wire_spec("block8"))
    with pytest.raises(PlanError, match="another wire format has this name"):
        register(WireSpec("block8", f"{block8.__name__}:Other"))
