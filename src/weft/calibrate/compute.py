"""Measured sizes of each primitive operation, timing of calls, and the operations that one rank computes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.nn import functional as F

from weft.comm.collectives import all_reduce, barrier
from weft.comm.mesh import Axis
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.devices import access
from weft.errors import ConfigError, Problem
from weft.models.attention import rotate, rotation, see_causally
from weft.models.decoder import Block
from weft.planner.measured import profile_tables as here
from weft.planner.measured.machine_profile import Machine
from weft.planner.measured.profile_tables import TINY

_PRODUCTS = (
    (512, 512, 512), (64, 512, 512), (256, 256, 256), (2048, 256, 256), (512, 64, 512), (512, 2048, 512),
    (512, 512, 64), (512, 512, 2048), (1024, 768, 256), (1024, 256, 768), (256, 4096, 256), (1024, 2048, 256),
)  # fmt: skip
_LARGE_PRODUCTS = tuple((m, n, k) for m in (1024, 4096, 8192) for n, k in ((4096, 4096), (8192, 1024), (1024, 8192)))
_ATTENTION = ((4, 8, 256, 32), (1, 8, 256, 32), (2, 8, 128, 64), (1, 4, 512, 64), (1, 4, 1024, 64))
_LARGE_ATTENTION = ((1, 16, 2048, 128), (1, 16, 4096, 128), (1, 16, 8192, 128), (2, 16, 2048, 64))
#: Operations (`PROBES`) and their sizes by chapter, most valuable first. `planner/measured/profile_tables.py` reads
#: each of them. GPUs need larger sizes, because small kernels do not fill them.
POINTS: dict[str, dict[str, tuple[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]], ...]]] = {
    "cpu": {
        "products": ((("linear_f", "linear_dx", "linear_dw"), _PRODUCTS),),
        "attention": ((("attention_f", "attention_b"), _ATTENTION),),
        "passes": (
            (
                ("norm_f", "norm_b", "rope_f", "rope_b", "swiglu_f", "swiglu_b", "add", "copy"),
                ((512, 256), (1024, 256), (1024, 768), (2048, 1024)),
            ),
            (("block_f", "block_b"), (TINY[:2],)),
        ),
        "optimizer": ((("adamw",), ((1 << 22,),)),),
        "transfers": ((("to_host", "to_device"), ((1 << 23,),)), (("host_adamw",), ((1 << 20,),))),
        "products in bf16": ((("linear_f",), _PRODUCTS),),
    },
    "cuda": {
        "products": ((("linear_f",), _LARGE_PRODUCTS),),
        "passes": ((("copy",), ((8192, 8192),)), (("add",), ((16, 64),))),
        "optimizer": ((("adamw",), ((1 << 27,),)),),
        "transfers": ((("to_host", "to_device"), ((1 << 28,),)), (("host_adamw",), ((1 << 25,),))),
        "kernels in bf16": (
            (("linear_f",), _LARGE_PRODUCTS),
            (("attention_f", "attention_b"), _LARGE_ATTENTION),
            (("copy",), ((8192, 8192),)),
        ),
    },
}
#: Bytes of a collective: the full buffer, before it is sharded.
MESSAGES = {"cpu": (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 23), "cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 25, 1 << 28)}


# Time (s) of one call, measured in windows of many calls while the other ranks run the same work.

Call = Callable[[], object]
#: Windows of one measurement. The result is the median, because training steps also run under the usual background
#: load.
WINDOWS = 4
_MOST_CALLS = 10_000
#: Minimum total bytes of all buffers of a measured call: about the memory that a step touches between two uses of a
#: tensor.
_COLD_BYTES, _MOST_COPIES = 64 * 2**20, 64


class Timing(NamedTuple):
    """Time of one call.

    Attributes:
        seconds: median over windows of the mean time (s) of a call.
        spread: relative excess of the median over the fastest window.
    """

    seconds: float
    spread: float


class ColdCalls:
    """Calls of one operation, each on separate buffers, so that caches are cold when timed.

    Buffers are allocated on first use: for at most 64 calls, and at most 64 MiB unless one call needs more.
    """

    def __init__(self, make: Callable[[], Call], num_bytes: int):
        """Create no call yet.

        num_bytes: bytes of the buffers of one call.
        """
        self._make, self._most = make, max(1, min(_MOST_COPIES, _COLD_BYTES // max(1, num_bytes)))
        self._made: list[Call] = []

    def first(self, count: int) -> Sequence[Call]:
        """Return the first `count` calls, or all if there are fewer."""
        self._made += [self._make() for _ in range(min(count, self._most) - len(self._made))]
        return self._made[:count]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures calls on this rank.

    Attributes:
        axis: the ranks that run the same work concurrently.
        device: device of the calls.
        window_s: length of a window (s).
    """

    axis: Axis
    device: torch.device
    window_s: float

    def time(self, calls: ColdCalls) -> Timing:
        """Measure `calls` in turn, repeatedly. Each call uses other buffers, so that caches stay cold.

        The slowest rank decides a window's time: if ranks share cores, the faster ranks slowed it down.
        """
        for call in calls.first(2):
            call()
        count = self._count(calls.first(1)[0])
        # Windows are short, so the next window continues with the calls after the last one of this window.
        turns = itertools.cycle(calls.first(WINDOWS * count))

        def window() -> float:
            self._start()
            start = time.perf_counter()
            for call in itertools.islice(turns, count):
                call()
            self._finalize()
            return self._joined((time.perf_counter() - start) / count, "max")

        return _median([window() for _ in range(WINDOWS)])

    def time_after(self, work: Call, call: Call) -> Timing:
        """Measure `call` after `work`, as a collective follows compute. The time of `work` does not count.

        The result includes waiting for other ranks, and is the mean over the ranks.
        """
        work()
        call()
        count = self._count(lambda: (work(), call()))

        def window() -> float:
            self._start()
            spent = 0.0
            for _ in range(count):
                work()
                self._finalize()
                start = time.perf_counter()
                call()
                self._finalize()
                spent += time.perf_counter() - start
            return self._joined(spent / count, "sum") / self.axis.size

        return _median([window() for _ in range(WINDOWS)])

    def _start(self) -> None:
        self._finalize()
        barrier(self.axis)

    def _joined(self, seconds: float, op: str) -> float:
        return float(all_reduce(torch.tensor([seconds], dtype=torch.float64), self.axis, op))

    def _count(self, call: Call) -> int:
        """Return the number of calls in a window, the same on all ranks, because collectives must match."""
        self._finalize()
        start = time.perf_counter()
        call()
        self._finalize()
        calls = min(self.window_s / max(time.perf_counter() - start, 1e-7), _MOST_CALLS)
        return max(1, round(self._joined(calls, "max")))

    def _finalize(self) -> None:
        access.synchronize(self.device)


def _median(windows: Sequence[float]) -> Timing:
    middle = statistics.median(windows)
    return Timing(middle, middle / min(windows) - 1)


# This machine's description in a profile: its processor, or its GPUs as torch reports them.


def this_machine(kind: str = "auto") -> Machine:
    """Return this machine's description. kind: "cpu", "cuda", or "auto", which uses GPUs if torch finds any.

    Raises:
        ConfigError: for "cuda" on a machine whose GPUs torch cannot use.
    """
    host = here.this_host()
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return host
    if not torch.cuda.is_available():
        rule = "torch sees no GPU on this machine. Use --device cpu, or run `weft doctor` to see why."
        raise ConfigError([Problem.of("device", kind, rule)])
    found = torch.cuda.get_device_properties(0)
    release = ".".join(map(str, nccl.version()))
    return replace(
        host,
        kind="cuda",
        device=found.name,
        count=torch.cuda.device_count(),
        memory_bytes=found.total_memory,
        transports=(f"nccl {release}",),
    )


# Operations that one rank computes: matmuls, attention, element-wise kernels, the optimizer's step, transfers.

#: Number of random values that are repeated to fill test tensors, because drawing all values would take longer than
#: timing.
_DRAWN = 2**18


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Device and dtype of the test tensors."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, trained: bool = False) -> Tensor:
        """Return random numbers. Zeros would draw less power, and run faster, than values of a training run."""
        count, drawn = math.prod(shape), _random_tensor(self.device, self.dtype)
        found = drawn[:count].clone() if count <= _DRAWN else drawn.repeat(-(-count // _DRAWN))[:count]
        return found.view(shape).requires_grad_(trained)


@cache
def _random_tensor(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(_DRAWN, device=device, dtype=dtype)


def _backward(output: Tensor, *inputs: Tensor) -> Call:
    grad = torch.randn_like(output) if output.dim() else torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def linear_f(place: TensorPlacement, m: int, n: int, k: int) -> Call:
    x, weight = place.normal(m, k), place.normal(n, k)
    return lambda: F.linear(x, weight)


def linear_dx(place: TensorPlacement, m: int, n: int, k: int) -> Call:
    grad, weight = place.normal(m, n), place.normal(n, k)
    return lambda: grad @ weight


def linear_dw(place: TensorPlacement, m: int, n: int, k: int) -> Call:
    grad, x = place.normal(m, n), place.normal(m, k)
    return lambda: grad.t() @ x


def attention_f(place: TensorPlacement, b: int, h: int, s: int, c: int) -> Call:
    # Heads are adjacent in memory, as in the model.
    q, k, v = (place.normal(b, s, h, c).transpose(1, 2) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_b(place: TensorPlacement, b: int, h: int, s: int, c: int) -> Call:
    inputs = [place.normal(b, s, h, c, trained=True) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return _backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), *inputs)


def norm_f(place: TensorPlacement, t: int, d: int) -> Call:
    x, weight = place.normal(t, d, trained=True), place.normal(d, trained=True)
    return lambda: F.rms_norm(x, (d,), weight, 1e-5)


def norm_b(place: TensorPlacement, t: int, d: int) -> Call:
    x, weight = place.normal(t, d, trained=True), place.normal(d, trained=True)
    return _backward(F.rms_norm(x, (d,), weight, 1e-5), x, weight)


def _turned(place: TensorPlacement, t: int, d: int) -> tuple[Callable[[], Tensor], Tensor]:
    width = min(64, d)
    x = place.normal(1, t, d // width, width, trained=True)
    turn = rotation(torch.arange(t, device=place.device)[None], width, 1e4, 1.0, torch.float32)
    return lambda: rotate(x, turn), x


def rope_f(place: TensorPlacement, t: int, d: int) -> Call:
    return _turned(place, t, d)[0]


def rope_b(place: TensorPlacement, t: int, d: int) -> Call:
    turn, x = _turned(place, t, d)
    return _backward(turn(), x)


def swiglu_f(place: TensorPlacement, t: int, d: int) -> Call:
    gate, up = place.normal(t, d, trained=True), place.normal(t, d, trained=True)
    return lambda: F.silu(gate) * up


def swiglu_b(place: TensorPlacement, t: int, d: int) -> Call:
    gate, up = place.normal(t, d, trained=True), place.normal(t, d, trained=True)
    return _backward(F.silu(gate) * up, gate, up)


def add(place: TensorPlacement, t: int, d: int) -> Call:
    """Return a call that adds into new memory, as residual streams and the gradients of branches do."""
    x, y = place.normal(t, d), place.normal(t, d)
    return lambda: x + y


def copy(place: TensorPlacement, t: int, d: int) -> Call:
    x, y = place.normal(t, d), place.normal(t, d)
    return lambda: x.copy_(y)


def adamw(place: TensorPlacement, params: int) -> Call:
    weight = torch.nn.Parameter(place.normal(params))
    weight.grad = place.normal(params)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    return optimizer.step


def to_host(place: TensorPlacement, num_bytes: int) -> Call:
    """Return a call that copies to host memory, as offload does. The memory is page-locked if there is a GPU."""
    here, there = _both_sides(place, num_bytes)
    return lambda: there.copy_(here, non_blocking=True)


def to_device(place: TensorPlacement, num_bytes: int) -> Call:
    here, there = _both_sides(place, num_bytes)
    return lambda: here.copy_(there, non_blocking=True)


def _both_sides(place: TensorPlacement, num_bytes: int) -> tuple[Tensor, Tensor]:
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    return here, torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=access.pins_memory(place.device))


def host_adamw(place: TensorPlacement, params: int) -> Call:
    """Return a call of an optimizer step on the host, with fp32 master weights and this rank's threads."""
    del place
    return adamw(TensorPlacement(torch.device("cpu"), torch.float32), params)


def _block(place: TensorPlacement) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return the forward of a decoder layer, and the inputs and parameters to differentiate by.

    The layer is so small that its time is call overhead: modules, views and autograd nodes.
    """
    tokens, width, ffn, heads = TINY
    spec = DecoderSpec(
        vocab_size=8, dim=width, num_layers=1, num_heads=heads, num_kv_heads=heads, ffn_dim=ffn, max_seq_len=tokens
    )
    block = Block(spec).to(place.device, place.dtype)
    x = place.normal(1, tokens, width, trained=True)
    positions = torch.arange(tokens, device=place.device)[None]
    turn = rotation(positions, spec.head_dim, 1e4, 1.0, torch.float32)
    visible = see_causally(positions, None, 0, place.dtype)
    return lambda: block(x, visible, turn), [x, *block.parameters()]


def block_f(place: TensorPlacement, t: int, d: int) -> Call:
    return _block(place)[0]


def block_b(place: TensorPlacement, t: int, d: int) -> Call:
    forward, inputs = _block(place)
    return _backward(forward(), *inputs)


#: Operation -> (function that makes its call, number of values that the operation reads or writes, from its size).
PROBES: dict[str, tuple[Callable[..., Call], Callable[..., int]]] = {
    **{name.__name__: (name, lambda m, n, k: m * n + n * k + m * k) for name in (linear_f, linear_dx, linear_dw)},
    **{name.__name__: (name, lambda b, h, s, c: 4 * b * h * s * c) for name in (attention_f, attention_b)},
    **{
        name.__name__: (name, lambda t, d: 3 * t * d)
        for name in (norm_f, norm_b, rope_f, rope_b, swiglu_f, swiglu_b, block_f, block_b, add, copy)
    },
    **{name.__name__: (name, lambda count: 4 * count) for name in (adamw, host_adamw)},
    **{name.__name__: (name, lambda num_bytes: num_bytes) for name in (to_host, to_device)},
}


def calls_of(op: str, size: tuple[int, ...], place: TensorPlacement) -> ColdCalls:
    """Return the calls that measure an operation at one size."""
    make, values = PROBES[op]
    return ColdCalls(lambda: make(place, *size), values(*size) * place.dtype.itemsize)
