"""Within a host, the backend link sends bf16 and fp16 unconverted when their sum is requested in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.comm.reference import data
from tests.comm.test_two_level import on_hosts
from weft.comm.collectives import start_reduce_scatter
from weft.comm.connect import join, sends_short_summands, transports
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.transports.backend import BackendLink
from weft.comm.transports.scattered_tensor import Parts
from weft.config.plan import Plan

NUMEL, GAP = 1200, 7


def parts_of(rank: int, dtype: torch.dtype, size: int) -> Parts:
    """Return two parts with a gap between them. Their sums over ranks are exact."""
    flat = (data(rank, NUMEL * size, torch.float32) * 64).round().clamp(-127, 127).to(dtype) / 64
    return Parts([(0, flat[:1000]), (1000 + GAP, flat[1000 + GAP :])], NUMEL * size, torch.float32)


def sums(size: int, dtype: torch.dtype) -> tuple[bool, torch.Tensor, int, str]:
    """Return whether the link sends short summands, this rank's sums, the ledger's bytes and the transport."""
    ledger = Ledger()
    mesh = build_mesh(Plan(dp_replicate=size), record=ledger.record)
    axis = mesh.data
    join(axis, "cpu", BackendLink.transport)
    out = torch.full((NUMEL,), torch.nan)
    start_reduce_scatter(parts_of(axis.rank, dtype, size), axis, out).wait()
    num_bytes = sum(entry.num_bytes for _, kind, entry in ledger.rows() if kind == "reduce_scatter")
    return sends_short_summands(axis, torch.device("cpu")), out, num_bytes, transports(mesh)[0].transport


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)])
def test_short_summands_give_fp32_sums_in_half_the_bytes(ranks4, dtype, width):
    expected = sum(parts_of(rank, dtype, 4).joined().double() for rank in range(4)).float()
    for rank, (is_short, out, num_bytes, transport) in enumerate(ranks4.run(sums, 4, dtype)):
        assert transport == "backend"
        assert is_short
        assert torch.equal(out, expected[rank * NUMEL :][:NUMEL])
        assert num_bytes == width * 4 * NUMEL


def test_links_between_hosts_send_fp32_summands(ranks4):
    for is_short, _, num_bytes, _ in ranks4.run(on_hosts, 2, sums, 4, torch.bfloat16):
        assert not is_short
        assert num_bytes == 4 * 4 * NUMEL
