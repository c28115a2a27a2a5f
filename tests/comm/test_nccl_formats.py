"""Tensors that are sent over NCCL have a dtype that NCCL supports, whatever the caller's dtype."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from weft.comm.transports import backend
from weft.comm.transports import backend as nccl_formats
from weft.comm.transports.backend import NCCL_FORMATS, BackendLink
from weft.comm.transports.link import Operation

OTHERS = (torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)


class Done:
    def wait(self):
        return True


@pytest.fixture
def nccl(monkeypatch):
    """Return a link to a simulated NCCL group of one rank, which rejects dtypes as torch does, and the seen dtypes."""
    seen = deque()

    def record_and_copy(*tensors):
        for tensor in tensors:
            if tensor.dtype not in NCCL_FORMATS:
                raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype}")
        seen.append(tensors[0].dtype)
        tensors[0].copy_(tensors[-1])
        return Done()

    def exchange(out, source, receive, send, **_):
        assert (sum(receive), sum(send)) == (out.numel(), source.numel())
        return record_and_copy(out, source)

    monkeypatch.setattr(backend, "all_reduce", lambda out, **_: record_and_copy(out))
    monkeypatch.setattr(backend, "broadcast", lambda out, **_: record_and_copy(out))
    monkeypatch.setattr(backend, "all_gather_single", lambda out, source, **_: record_and_copy(out, source))
    monkeypatch.setattr(backend, "reduce_scatter_single", lambda out, source, **_: record_and_copy(out, source))
    monkeypatch.setattr(backend, "all_to_all_single", exchange)
    return BackendLink(None, (0,), "a test", lambda: False), seen


def run_operation(link, kind, source):
    numel = (source.numel(),)
    out = source.clone() if kind in ("all_reduce", "broadcast") else torch.zeros_like(source)
    counts = {"send": numel, "receive": numel} if kind == "all_to_all" else {}
    operation = Operation(kind, "dp", out if kind == "all_reduce" else source, out, "sum", **counts)
    link.start(operation)
    link.block(operation)
    return out


@pytest.mark.parametrize("dtype", [*OTHERS, *sorted(NCCL_FORMATS, key=str)], ids=str)
@pytest.mark.parametrize("kind", ["all_gather", "broadcast", "all_to_all"])
def test_copying_collectives_accept_any_dtype(nccl, kind, dtype):
    link, seen = nccl
    source = torch.randint(0, 255, (5 * dtype.itemsize,), dtype=torch.uint8).remainder_(2).view(dtype)
    out = run_operation(link, kind, source)
    assert torch.equal(nccl_formats.as_bytes(out), nccl_formats.as_bytes(source))
    assert seen.pop() == (dtype if dtype in NCCL_FORMATS else torch.uint8)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_complex_sums_are_sent_as_real_pairs(nccl, kind):
    link, seen = nccl
    source = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(run_operation(link, kind, source), source)
    assert seen.pop() == torch.float32
