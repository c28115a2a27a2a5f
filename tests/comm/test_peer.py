"""Point-to-point exchanges for every transport, and gradients of all collectives against one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm import autograd
from weft.comm.collectives import all_reduce, start_all_reduce
from weft.comm.connect import join
from weft.comm.ledger import Ledger
from weft.comm.mesh import Axis, build_mesh
from weft.comm.peer import all_to_all, shift, start_receive, start_send
from weft.comm.transports.shared_memory import SLOT_BYTES
from weft.config.plan import Plan
from weft.errors import CommError

TRANSPORTS = ("shared memory", "gloo exchange", "backend", "staged through the host")


def axis_of(size: int, transport: str = "") -> Axis:
    axis = build_mesh(Plan(dp_replicate=size)).data
    if transport:
        join(axis, "cpu", transport)
    return axis


def rows(rank: int, to: int, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count * width).view(count, width) % 50 + 100 * rank + 10 * to).to(dtype)


def wrong_exchanges(size: int, transport: str, counts: list[list[int]], width: int, dtype: torch.dtype) -> list:
    """Return the wrong exchanges. `counts[i][j]` is the number of rows from rank i to rank j."""
    axis = axis_of(size, transport)
    me, wrong = axis.rank, []
    receive = [counts[peer][me] for peer in range(size)]
    mine = torch.cat([rows(me, to, counts[me][to], width, dtype) for to in range(size)])
    expected = torch.cat([rows(peer, me, receive[peer], width, dtype) for peer in range(size)])
    for _ in range(2):
        if not torch.equal(all_to_all(mine, axis, send=counts[me], receive=receive), expected):
            wrong.append("unequal")
    same = torch.cat([rows(me, to, 3, width, dtype) for to in range(size)])
    if not torch.equal(all_to_all(same, axis), torch.cat([rows(p, me, 3, width, dtype) for p in range(size)])):
        wrong.append("equal")
    for by in (1, -1, 2):
        if not torch.equal(shift(rows(me, 0, 3, width, dtype), axis, by), rows((me - by) % size, 0, 3, width, dtype)):
            wrong.append(f"shift {by}")
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_reach_their_destination_ranks(ranks2, ranks4, transport):
    big = SLOT_BYTES // 8 // 5 + 7
    for pool, counts in (
        (ranks2, [[1, 2], [0, 3]]),
        (ranks4, [[1, 0, 2, 5], [0, 0, 0, 0], [4, 1, big, big], [0, 7, 1, 1]]),
    ):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            assert pool.run(wrong_exchanges, len(counts), transport, counts, 5, dtype) == [[]] * len(counts)


def messages(size: int, is_staged: bool) -> tuple[list[float], dict[str, tuple[int, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        if is_staged:
            patch.setattr("weft.comm.peer._needs_host", lambda *_: True)
        return sent_messages(size)


def sent_messages(size: int) -> tuple[list[float], dict[str, tuple[int, int]]]:
    ledger = Ledger()
    axis = build_mesh(Plan(dp_replicate=size), record=ledger.record).data
    if axis.rank == 0:
        sent = [start_send(torch.full((3,), float(index)), axis, 1) for index in range(4)]
        for one in sent:
            one.wait()
        return [], {operation: (entry.calls, entry.num_bytes) for _, operation, entry in ledger.rows()}
    buffers = [torch.empty(3) for _ in range(4)]
    pending = [start_receive(buffer, axis, 0) for buffer in buffers]
    return [float(one.wait()[0]) for one in pending], {
        operation: (entry.calls, entry.num_bytes) for _, operation, entry in ledger.rows()
    }


@pytest.mark.parametrize("is_staged", [False, True])
def test_messages_are_received_in_order_and_counted(ranks2, is_staged):
    first, second = ranks2.run(messages, 2, is_staged)
    assert second[0] == [0.0, 1.0, 2.0, 3.0]
    assert first[1] == {"send": (4, 48)}
    assert second[1] == {"receive": (4, 48)}


def argument_errors(size: int) -> list[str]:
    axis = axis_of(size)
    found = []
    for call in (
        lambda: all_to_all(torch.zeros(3, 2), axis),
        lambda: all_to_all(torch.zeros(3, 2), axis, send=[1, 1], receive=[1, 1]),
        lambda: start_send(torch.zeros(2), axis, axis.rank),
        lambda: autograd.slice_to(torch.zeros(3), axis, 0),
    ):
        with pytest.raises(CommError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_mismatched_arguments_are_rejected(ranks2):
    assert ranks2.run(argument_errors, 2)[0] == [
        "all_to_all over dp_replicate: 3 rows are not a multiple of its 2 ranks. Give send= and receive=, or pad.",
        "all_to_all over dp_replicate: send=[1, 1] and receive=[1, 1] for 3 rows. Give both, one count for "
        "each of the 2 ranks, with send adding up to the rows.",
        "send over dp_replicate: rank 0 is not another rank of it. Use 0 to 1.",
        "axis dp_replicate: dim 0 of shape (3,) is not a multiple of its 2 ranks. Pad it to 4.",
    ]


def reference_outputs(name: str, parts: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Return every rank's output of collective `name` for all ranks' inputs, in plain torch."""
    size = len(parts)
    match name:
        case "copy_to":
            return parts
        case "sum_over":
            return [sum(parts)] * size
        case "gather_from":
            return [torch.cat(parts, dim)] * size
        case "scatter_sum":
            return list(sum(parts).chunk(size, dim))
        case "exchange_dims":
            chunks = [part.chunk(size, dim) for part in parts]
            return [torch.cat([one[rank] for one in chunks], 1 - dim) for rank in range(size)]
    raise AssertionError(name)


def run_collective(size: int, name: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    axis = axis_of(size)
    x = leaf(axis.rank, size)
    arguments = {"copy_to": (), "sum_over": (), "exchange_dims": (dim, 1 - dim)}.get(name, (dim,))
    y = getattr(autograd, name)(x, axis, *arguments)
    (y * weight(axis.rank, y.shape)).sum().backward()
    return y.detach(), x.grad


def leaf(rank: int, size: int) -> torch.Tensor:
    return torch.randn(2 * size, 2 * size, 3, generator=torch.Generator().manual_seed(rank)).double().requires_grad_()


def weight(rank: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)).double()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["gather_from", "scatter_sum", "exchange_dims"])
def test_collective_gradients_match_one_process(ranks2, ranks4, name, dim):
    """Use a loss that is the sum over ranks, with a different weight on each."""
    for pool, size in ((ranks2, 2), (ranks4, 4)):
        leaves = [leaf(rank, size) for rank in range(size)]
        expected = reference_outputs(name, leaves, dim)
        sum((one * weight(rank, one.shape)).sum() for rank, one in enumerate(expected)).backward()
        for rank, (y, grad) in enumerate(pool.run(run_collective, size, name, dim)):
            torch.testing.assert_close(y, expected[rank].detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(grad, leaves[rank].grad, rtol=1e-12, atol=1e-12)


def column_row_pair(size: int) -> tuple[torch.Tensor, ...]:
    """Run a column-parallel and a row-parallel product, then slice_to and gather_slice on the replicated result."""
    axis = axis_of(size)
    x = leaf(0, size)
    up = leaf(1, size).detach()[..., 0].chunk(size, 0)[axis.rank].contiguous().requires_grad_()
    hidden = autograd.copy_to(x, axis)
    y = autograd.sum_over(torch.tanh(hidden[..., 0] @ up.T) @ up, axis)
    z = autograd.gather_slice(autograd.slice_to(y, axis, 0) * 3, axis, 0)
    (z * weight(7, z.shape)).sum().backward()
    return z.detach(), x.grad, up.grad


def test_column_and_row_parallel_pair_matches_one_process(ranks2, ranks4):
    for pool, size in ((ranks2, 2), (ranks4, 4)):
        x, up = leaf(0, size), leaf(1, size).detach()[..., 0].contiguous().requires_grad_()
        z = (torch.tanh(x[..., 0] @ up.T) @ up) * 3
        (z * weight(7, z.shape)).sum().backward()
        for rank, (ours, x_grad, up_grad) in enumerate(pool.run(column_row_pair, size)):
            torch.testing.assert_close(ours, z.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x_grad, x.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(up_grad, up.grad.chunk(size, 0)[rank], rtol=1e-12, atol=1e-12)


def exchanged(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    axis = axis_of(size)
    x = leaf(axis.rank, size)
    counts = [[1, 3], [2, 2]]
    y = autograd.exchange(x, axis, counts[axis.rank], [counts[0][axis.rank], counts[1][axis.rank]])
    (y * weight(axis.rank, y.shape)).sum().backward()
    return y.detach(), x.grad


def test_exchange_returns_gradients_to_their_rows(ranks2):
    a, b = leaf(0, 2), leaf(1, 2)
    expected = [torch.cat([a[:1], b[:2]]), torch.cat([a[1:], b[2:]])]
    sum((one * weight(rank, one.shape)).sum() for rank, one in enumerate(expected)).backward()
    for (y, grad), one, x in zip(ranks2.run(exchanged, 2), expected, (a, b), strict=True):
        assert torch.equal(y, one.detach())
        assert torch.equal(grad, x.grad)


class OperationCounter(TorchDispatchMode):
    """Count the operations that a dispatch mode intercepts, as selective recompute does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(size: int, transport: str) -> list[int]:
    axis = axis_of(size, transport)
    found = []
    for is_busy in (False, True):
        big, small = torch.ones(1 << 21), torch.ones(4)
        pending = start_all_reduce(big, axis) if is_busy else None
        with OperationCounter() as counter:
            all_reduce(small, axis)
        if pending is not None:
            pending.wait()
        found.append(counter.count)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_background_progress_is_hidden_from_dispatch_modes(ranks4, transport):
    """Check it because a recomputed forward would otherwise differ from the first by concurrent collectives."""
    for idle, busy in ranks4.run(num_operations, 4, transport):
        assert idle == busy
