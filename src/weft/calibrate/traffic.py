"""What collectives add to a step, through the project's own communication and thus over its transports.

Each is measured as training has it, after a product: so what ranks lose by waiting for the slower one, and by being
woken, is inside. What they lose more where they compute for longer between two meetings is measured by itself: with
more ranks than cores it grows with the compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.calibrate.compute import Place, linear_f
from weft.calibrate.stopwatch import Stopwatch, Timing
from weft.comm import all_gather, all_reduce, broadcast, reduce_scatter
from weft.comm.peer import all_to_all, shift, start_receive, start_send
from weft.mesh import Axis
from weft.planner.measured import BETWEEN

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")


def extra_s(watch: Stopwatch, axis: Axis, op: str, size: int) -> Timing:
    """Seconds that the collective adds where it follows a product; of a meeting, where it follows `size` products.

    size: bytes of the whole buffer, of which shards are parts; of an all_to_all what each rank sends, its own share
    included; of a shift or a send the message.
    """
    work = linear_f(Place(watch.device, torch.float32), *BETWEEN)
    if op == "meeting":
        return _meeting_s(watch, axis, work, size)
    return watch.time_after(work, _collective(axis, op, size, watch.device))


def _meeting_s(watch: Stopwatch, axis: Axis, work: Callable[[], object], num_products: int) -> Timing:
    """Seconds of a meeting after `num_products` products."""
    meet = _collective(axis, "all_reduce", 64, watch.device)

    def works() -> None:
        for _ in range(num_products):
            work()

    return watch.time_after(works, meet)


def _collective(axis: Axis, op: str, num_bytes: int, device: torch.device) -> Callable[[], object]:
    shard = max(1, num_bytes // 4 // axis.size)
    whole = torch.randn(shard * axis.size, device=device)
    part = torch.randn(shard, device=device)
    if op == "all_reduce":
        return lambda: all_reduce(whole, axis, "max")  # sums of many calls would grow without end
    if op == "all_gather":
        return lambda: all_gather(part, axis, out=whole)
    if op == "reduce_scatter":
        return lambda: reduce_scatter(whole, axis, out=part)
    if op == "broadcast":
        return lambda: broadcast(whole, axis)
    if op == "all_to_all":
        received = torch.empty_like(whole).view(axis.size, shard)
        return lambda: all_to_all(whole.view(axis.size, shard), axis, out=received)
    if op == "shift":
        arrives = torch.empty_like(whole)
        return lambda: shift(whole, axis, out=arrives)
    return _message(axis, whole)


def _message(axis: Axis, whole: torch.Tensor) -> Callable[[], object]:
    """One message on its way from the first rank of each pair to the second, which answers with as much: half each."""
    partner, arrives = axis.rank ^ 1, torch.empty_like(whole)
    is_first = axis.rank % 2 == 0
    turn = [is_first]

    def call() -> None:
        # Calls alternate in direction, so that a call is one message.
        if turn[0]:
            start_send(whole, axis, partner).wait()
        else:
            start_receive(arrives, axis, partner).wait()
        turn[0] = not turn[0]

    return call
