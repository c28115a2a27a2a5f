"""What travels over NCCL is of a number format that it takes, whatever Weft is given to send."""

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
    """A link to a group of NCCL's of this rank alone: copies at once, and raises as torch does."""
    seen = deque()

    def take(*tensors):
        for tensor in tensors:
            if tensor.dtype not in NCCL_FORMATS:
                raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype}")
        seen.append(tensors[0].dtype)
        tensors[0].copy_(tensors[-1])
        return Done()

    def exchange(out, source, receive, send, **_):
        assert (sum(receive), sum(send)) == (out.numel(), source.numel())
        return take(out, source)

    monkeypatch.setattr(backend, "all_reduce", lambda out, **_: take(out))
    monkeypatch.setattr(backend, "broadcast", lambda out, **_: take(out))
    monkeypatch.setattr(backend, "all_gather_single", lambda out, source, **_: take(out, source))
    monkeypatch.setattr(backend, "reduce_scatter_single", lambda out, source, **_: take(out, source))
    monkeypatch.setattr(backend, "all_to_all_single", exchange)
    return BackendLink(None, (0,), "a test", lambda: False), seen


def carried(link, kind, source):
    numel = (source.numel(),)
    out = source.clone() if kind in ("all_reduce", "broadcast") else torch.zeros_like(source)
    counts = {"send": numel, "receive": numel} if kind == "all_to_all" else {}
    operation = Operation(kind, "dp", out if kind == "all_reduce" else source, out, "sum", **counts)
    link.start(operation)
    link.block(operation)
    return out


@pytest.mark.parametrize("dtype", [*OTHERS, *sorted(NCCL_FORMATS, key=str)], ids=str)
@pytest.mark.parametrize("kind", ["all_gather", "broadcast", "all_to_all"])
def test_what_is_only_moved_may_have_any_format(nccl, kind, dtype):
    link, seen = nccl
    source = torch.randint(0, 255, (5 * dtype.itemsize,), dtype=torch.uint8).remainder_(2).view(dtype)
    out = carried(link, kind, source)
    assert torch.equal(nccl_formats.as_bytes(out), nccl_formats.as_bytes(source))
    assert seen.pop() == (dtype if dtype in NCCL_FORMATS else torch.uint8)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_sums_of_complex_numbers_go_by_their_parts(nccl, kind):
    link, seen = nccl
    source = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(carried(link, kind, source), source)
    assert seen.pop() == torch.float32
