"""A synthetic machine: two cores whose primitives follow laws exactly, so that estimates can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weft.planner.measured.laws import BETWEEN
from weft.planner.measured.machine_profile import Lesson, Machine, Measurement, Profile
from weft.planner.measured.profile_tables import this_host

#: Operations per second of a core, values per second through memory, bytes per second between ranks, seconds per call.
FLOPS, VALUES, BYTES, CALL = 5e10, 1e9, 2e9, 1e-5
CORES = 2
PASSES = ("norm_f", "norm_b", "layer_norm_f", "layer_norm_b", "rope_f", "rope_b", "swiglu_f", "swiglu_b", "gelu_f",
          "gelu_b", "add", "add_to", "copy", "loss_f", "loss_b", "cut_loss")  # fmt: skip
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")


def machine() -> Machine:
    """Return this host's software with a processor that does not exist."""
    return replace(this_host(), device="loom", cores=CORES)


#: Operation -> (its sizes, the time of one in seconds).
COMPUTE: tuple[tuple[tuple[str, ...], tuple[tuple[int, ...], ...], Callable[..., float]], ...] = (
    (
        ("linear_f", "linear_dx", "linear_dw"),
        ((64, 64, 64), (512, 512, 512), (128, 512, 256), (512, 128, 256), (256, 256, 1024), (32, 8, 8)),
        lambda m, n, k: 2 * m * n * k / FLOPS,
    ),
    (
        ("attention_f", "attention_b"),
        ((1, 4, 64, 32), (2, 4, 128, 32), (1, 8, 256, 64), (1, 2, 512, 32)),
        lambda b, h, s, c: 2 * b * h * s * s * c / FLOPS,
    ),
    (PASSES, ((16, 64), (256, 64), (256, 512), (1024, 1024)), lambda t, d: t * d / VALUES),
    (("block_f", "block_b"), ((16, 64),), lambda t, d: 1e-9),
    (("embedding",), ((64, 64, 128), (256, 64, 1024), (1024, 256, 512)), lambda t, d, v: t * d / VALUES),
    (("adamw", "clip"), ((1 << 10,), (1 << 16,), (1 << 20,)), lambda params: params / VALUES),
)


def profile(
    counts: tuple[int, ...] = (1, 2, 4), learned: tuple[Lesson, ...] = (), waiting: float | None = None
) -> Profile:
    """Compute slows down with more ranks than cores; collectives do not depend on contention.

    waiting: seconds that ranks wait for each other after a second of compute. It scales with the root of the compute
    time. None: not measured.
    """
    samples = [
        Measurement(op=op, size=size, seconds=max(1.0, ranks / CORES) * (CALL + work(*size)), ranks=ranks)
        for ranks in counts
        for ops, sizes, work in COMPUTE
        for op in ops
        for size in sizes
    ]
    samples += [
        Measurement(op=op, size=(size,), seconds=CALL + size / BYTES, ranks=ranks, group=group)
        for ranks in counts
        for group in counts
        if 1 < group <= ranks
        for op in COLLECTIVES
        for size in (1 << 8, 1 << 14, 1 << 20)
    ]
    product = 2 * np.prod(BETWEEN) / FLOPS + CALL
    samples += [
        Measurement(op="meeting", size=(count,), ranks=ranks, group=group,
               seconds=CALL + (waiting or 0.0) * (count * max(1.0, ranks / CORES) * product) ** 0.5)
        for ranks in counts
        for group in counts
        if waiting is not None and 1 < group <= ranks
        for count in (1, 8, 32, 128)
    ]  # fmt: skip
    return Profile(machine=machine(), samples=tuple(samples), made="2026-01-31T12:00:00", took_s=1.0, learned=learned)
