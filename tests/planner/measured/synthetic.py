"""A synthetic machine: two cores with exact rates, so that estimates can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.planner.measured.machine_profile import Lesson, Machine, Measurement, Profile
from weft.planner.measured.profile_tables import this_host

#: Operations per second of a core, values per second through memory, bytes per second between ranks, seconds per call.
FLOPS, VALUES, BYTES, CALL = 5e10, 1e9, 2e9, 1e-5
CORES = 2


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
    (
        ("norm_f", "norm_b", "rope_f", "rope_b", "swiglu_f", "swiglu_b", "add", "copy"),
        ((16, 64), (256, 64), (256, 512), (1024, 1024)),
        lambda t, d: t * d / VALUES,
    ),
    (("block_f", "block_b"), ((16, 64),), lambda t, d: 31 * CALL),
    (("adamw",), ((1 << 10,), (1 << 16,), (1 << 20,)), lambda params: params / VALUES),
)


def profile(counts: tuple[int, ...] = (1, 2, 4), learned: tuple[Lesson, ...] = ()) -> Profile:
    """Compute slows down with more ranks than cores; collectives do not depend on contention."""
    samples = [
        Measurement(op=op, size=size, seconds=max(1.0, ranks / CORES) * (CALL + work(*size)), ranks=ranks)
        for ranks in counts
        for ops, sizes, work in COMPUTE
        for op in ops
        for size in sizes
    ]
    samples += [
        Measurement(op=op, size=(size,), seconds=CALL + size / BYTES, ranks=ranks, group=ranks)
        for ranks in counts
        if ranks > 1
        for op in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (1 << 8, 1 << 14, 1 << 20)
    ]
    return Profile(machine=machine(), samples=tuple(samples), made="2026-01-31T12:00:00", took_s=1.0, learned=learned)
