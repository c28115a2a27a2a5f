"""Errors of collectives: invalid arguments, and ranks that disagree, hang or exit."""

from __future__ import annotations

import datetime
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from weft.comm.connect import join
from weft.comm.mesh import Axis, build_mesh
from weft.config.plan import Plan
from weft.errors import CommError
from weft.verify.rank_pool import RankPool

SHARED, EXCHANGE = "shared memory", "gloo exchange"


def test_invalid_arguments_are_rejected_before_sending():
    axis = Axis("dp_shard", 2, 1, (0, 1))
    flat = torch.zeros(8)
    cases = {
        "reduce_scatter over dp_shard: 7 elements are not a multiple of its 2 ranks. Pad the tensor to 8.": (
            lambda: reduce_scatter(torch.zeros(7), axis)
        ),
        "all_reduce over dp_shard: tensor of shape (3, 2) is not contiguous, and it is written in place. Pass a "
        "contiguous tensor, such as tensor.contiguous().": lambda: all_reduce(torch.zeros(2, 3).t(), axis),
        "broadcast over dp_shard: tensor of shape (3,) is not contiguous, and it is written in place. Pass a "
        "contiguous tensor, such as tensor.contiguous().": lambda: broadcast(torch.zeros(1).expand(3), axis),
        "all_gather over dp_shard: out of shape (2, 3) is not contiguous, and it is written in place. Pass a "
        "contiguous tensor, such as out.contiguous().": (
            lambda: all_gather(torch.zeros(3), axis, out=torch.zeros(3, 2).t())
        ),
        "all_gather over dp_shard: out has 5 float32 on cpu, but the result is 2 shards of 3 elements of float32 on "
        "cpu. Pass an out of 6 float32 on cpu.": lambda: all_gather(torch.zeros(3), axis, out=torch.zeros(5)),
        "reduce_scatter over dp_shard: out has 4 float64 on cpu, but the result is a slice of 4 elements of float32 "
        "on cpu. Pass an out of 4 float32 on cpu.": (
            lambda: reduce_scatter(flat, axis, out=torch.zeros(4, dtype=torch.float64))
        ),
        "reduce_scatter over dp_shard: the shard overlaps the full tensor, but not at this rank's position, element "
        "4. Pass that slice, or separate memory.": lambda: reduce_scatter(flat, axis, out=flat[:4]),
        "all_gather over dp_shard: the shard overlaps the full tensor, but not at this rank's position, element 4. "
        "Pass that slice, or separate memory.": lambda: all_gather(flat[3:7], axis, out=flat),
        "all_reduce over dp_shard: op='mean' is not known. Use one of sum, max, min.": (
            lambda: all_reduce(flat, axis, "mean")
        ),
        "broadcast over dp_shard: source=2 is not one of its ranks. Use 0 to 1.": lambda: broadcast(flat, axis, 2),
        "all_reduce over dp_shard: bool has no sum on cpu. Use float32, float64, bfloat16, float16, int64, int32, "
        "int8, uint8, int16, complex64, complex128.": lambda: all_reduce(torch.zeros(1).bool(), axis),
    }
    for text, call in cases.items():
        with pytest.raises(CommError) as caught:
            call()
        assert str(caught.value) == text


def disagree() -> str:
    axis = build_mesh(Plan(dp_replicate=2)).data
    barrier(axis)
    try:
        if axis.rank:
            reduce_scatter(torch.zeros(10), axis, op="max")
        else:
            all_reduce(torch.zeros(12, dtype=torch.float64), axis)
    except CommError as error:
        return str(error)
    return "no error"


def test_mismatched_operations_are_reported_on_all_ranks(ranks2):
    what = (
        "the ranks do not call the same operation here (rank 0: all_reduce (sum) of 12 float64; "
        "rank 1: reduce_scatter (max) of 10 float32). Let every rank take the same path through the model and the "
        "training loop."
    )
    assert ranks2.run(disagree) == [
        f"all_reduce over dp_replicate: {what}",
        f"reduce_scatter over dp_replicate: {what}",
    ]


def axis_with_timeout(transport: str, timeout_s: float) -> Axis:
    """Return an axis of all ranks whose group has a short timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    ranks = tuple(range(dist.get_world_size()))
    axis = Axis("dp_shard", len(ranks), dist.get_rank(), ranks, group)
    join(axis, "cpu", transport)
    all_reduce(torch.zeros(1), axis)
    return axis


def one_hangs(transport: str) -> tuple[str, float, float]:
    """Delay the last rank past the timeout. Return the others' error text, wall seconds and CPU seconds."""
    axis = axis_with_timeout(transport, 1.5)
    start, cpu = time.perf_counter(), time.process_time()
    if axis.rank == axis.size - 1:
        time.sleep(4)
        return "", 0.0, 0.0
    text = ""
    try:
        start_reduce_scatter(torch.ones(3 << 14), axis).wait()
    except CommError as error:
        text = str(error)
    waited, used = time.perf_counter() - start, time.process_time() - cpu
    time.sleep(max(0, 4 - waited))  # no rank exits before the late rank has finished
    return text, waited, used


def test_hanging_rank_is_named_within_the_timeout():
    with RankPool(3) as pool:
        for transport in (SHARED, EXCHANGE):
            for text, waited, used in pool.run(one_hangs, transport)[:2]:
                assert text.startswith("reduce_scatter over dp_shard: ")
                assert 1.0 < waited < 3.8
                if transport == SHARED:
                    assert "no message from rank 2 in 1.5 s, the timeout of the group" in text
                    # A waiting rank sleeps, since other processes need the core.
                    assert used < 0.25 * waited


def one_dies(transport: str, folder: str) -> None:
    axis = axis_with_timeout(transport, 60)
    pending = start_all_reduce(torch.ones(1 << 22), axis)
    if axis.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    try:
        pending.wait()
        text = "no error"
    except CommError as error:
        text = str(error)
    (Path(folder) / f"{axis.rank}").write_text(f"{time.perf_counter() - start} {text}")
    # After a failure, every later call fails with a message.
    with pytest.raises(CommError, match="dp_shard"):
        all_reduce(torch.ones(1), axis)
    (Path(folder) / f"{axis.rank} again").touch()


@pytest.mark.parametrize("transport", [SHARED, EXCHANGE])
def test_killed_rank_is_named_long_before_the_timeout(transport, tmp_path):
    with RankPool(3) as pool:
        with pytest.raises(CommError, match="rank 1 of 3 failed"):
            pool.run(one_dies, transport, str(tmp_path))
        # The pool gives the other ranks a few seconds after a failure, and ends them when it is closed. On a busy
        # machine they may need longer to see it.
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline and not all((tmp_path / f"{rank} again").exists() for rank in (0, 2)):
            time.sleep(0.05)
        for rank in (0, 2):
            seconds, text = (tmp_path / f"{rank}").read_text().split(" ", 1)
            assert text.startswith("all_reduce over dp_shard: ")
            assert float(seconds) < 50  # the group's timeout is 60 s
            assert (tmp_path / f"{rank} again").exists()
            if transport == SHARED:
                assert re.search("rank 1 has ended. Look at its log for the cause", text)
    assert not [path for path in Path("/dev/shm").iterdir() if "weft" in path.name]
