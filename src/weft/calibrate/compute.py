"""The primitives that one rank computes: products, attention, passes over memory, the optimizer's step, transfers.

Each is the operation as the project's models and engines call it, forward and backward apart, on random data. Several
copies of what it works on are made, so that a call does not find the last one's data in the caches.

m rows, n columns, k inner width; b sequences, h heads, s tokens, c width of a head; t tokens, d width, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.calibrate.stopwatch import Call, ColdCalls
from weft.mesh import Axis
from weft.models import Block
from weft.models.attention import rotate, rotation, see_causally
from weft.parallel.tensor import SharedLayer, token_loss
from weft.planner.measured import TINY
from weft.spec import DecoderSpec

#: Bytes that a probe's copies together take up at least: what a step touches between two uses of one tensor.
_COLD_BYTES, _MOST_COPIES = 64 * 2**20, 64
#: Random numbers that a probe's tensors repeat: drawing all of a chapter's would take longer than its windows.
_DRAWN = 2**18


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in which format tensors are made."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, trained: bool = False) -> Tensor:
        """Random numbers: zeros would draw less power, and run faster, than training's numbers."""
        count, drawn = math.prod(shape), _drawn(self.device, self.dtype)
        found = drawn[:count].clone() if count <= _DRAWN else drawn.repeat(-(-count // _DRAWN))[:count]
        return found.view(shape).requires_grad_(trained)

    def labels(self, count: int, classes: int) -> Tensor:
        return torch.randint(classes, (count,), device=self.device)


@cache
def _drawn(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(_DRAWN, device=device, dtype=dtype)


def copies(make: Callable[[], Call], num_bytes: int) -> ColdCalls:
    """As many of a probe's calls, each on memory of its own, as make caches cold."""
    return ColdCalls(make, max(1, min(_MOST_COPIES, _COLD_BYTES // max(1, num_bytes))))


def _backward(output: Tensor, *inputs: Tensor) -> Call:
    """A call of the backward of `output`, which can be made again and again."""
    grad = torch.randn_like(output) if output.dim() else torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def linear_f(place: Place, m: int, n: int, k: int) -> Call:
    x, weight = place.normal(m, k), place.normal(n, k)
    return lambda: F.linear(x, weight)


def linear_dx(place: Place, m: int, n: int, k: int) -> Call:
    grad, weight = place.normal(m, n), place.normal(n, k)
    return lambda: grad @ weight


def linear_dw(place: Place, m: int, n: int, k: int) -> Call:
    grad, x = place.normal(m, n), place.normal(m, k)
    return lambda: grad.t() @ x


def _attention(place: Place, b: int, h: int, s: int, c: int, trained: bool) -> tuple[Tensor, list[Tensor]]:
    # As the model makes them: heads lie beside each other in memory.
    inputs = [place.normal(b, s, h, c, trained=trained) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs


def attention_f(place: Place, b: int, h: int, s: int, c: int) -> Call:
    q, k, v = (place.normal(b, s, h, c).transpose(1, 2) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_b(place: Place, b: int, h: int, s: int, c: int) -> Call:
    output, inputs = _attention(place, b, h, s, c, trained=True)
    return _backward(output, *inputs)


def norm_f(place: Place, t: int, d: int) -> Call:
    x, weight = place.normal(t, d, trained=True), place.normal(d, trained=True)
    return lambda: F.rms_norm(x, (d,), weight, 1e-5)


def norm_b(place: Place, t: int, d: int) -> Call:
    x, weight = place.normal(t, d, trained=True), place.normal(d, trained=True)
    return _backward(F.rms_norm(x, (d,), weight, 1e-5), x, weight)


def layer_norm_f(place: Place, t: int, d: int) -> Call:
    x, weight, bias = place.normal(t, d, trained=True), place.normal(d, trained=True), place.normal(d, trained=True)
    return lambda: F.layer_norm(x, (d,), weight, bias)


def layer_norm_b(place: Place, t: int, d: int) -> Call:
    x, weight, bias = place.normal(t, d, trained=True), place.normal(d, trained=True), place.normal(d, trained=True)
    return _backward(F.layer_norm(x, (d,), weight, bias), x, weight, bias)


def _turned(place: Place, t: int, d: int, trained: bool) -> tuple[Callable[[], Tensor], Tensor]:
    width = min(64, d)
    x = place.normal(1, t, d // width, width, trained=trained)
    turn = rotation(torch.arange(t, device=place.device)[None], width, 1e4, 1.0, torch.float32)
    return lambda: rotate(x, turn), x


def rope_f(place: Place, t: int, d: int) -> Call:
    return _turned(place, t, d, trained=True)[0]


def rope_b(place: Place, t: int, d: int) -> Call:
    turn, x = _turned(place, t, d, trained=True)
    return _backward(turn(), x)


def swiglu_f(place: Place, t: int, d: int) -> Call:
    gate, up = place.normal(t, d, trained=True), place.normal(t, d, trained=True)
    return lambda: F.silu(gate) * up


def swiglu_b(place: Place, t: int, d: int) -> Call:
    gate, up = place.normal(t, d, trained=True), place.normal(t, d, trained=True)
    return _backward(F.silu(gate) * up, gate, up)


def gelu_f(place: Place, t: int, d: int) -> Call:
    x = place.normal(t, d, trained=True)
    return lambda: F.gelu(x, approximate="tanh")


def gelu_b(place: Place, t: int, d: int) -> Call:
    x = place.normal(t, d, trained=True)
    return _backward(F.gelu(x, approximate="tanh"), x)


def add(place: Place, t: int, d: int) -> Call:
    """A sum into new memory: residual streams, and gradients that meet."""
    x, y = place.normal(t, d), place.normal(t, d)
    return lambda: x + y


def add_to(place: Place, t: int, d: int) -> Call:
    """A sum in place: gradients of several passes."""
    x, y = place.normal(t, d), place.normal(t, d)
    return lambda: x.add_(y)


def copy(place: Place, t: int, d: int) -> Call:
    x, y = place.normal(t, d), place.normal(t, d)
    return lambda: x.copy_(y)


def loss_f(place: Place, t: int, v: int) -> Call:
    logits, labels = place.normal(t, v, trained=True), place.labels(t, v)
    return lambda: F.cross_entropy(logits.float(), labels, reduction="sum")


def loss_b(place: Place, t: int, v: int) -> Call:
    logits, labels = place.normal(t, v, trained=True), place.labels(t, v)
    return _backward(F.cross_entropy(logits.float(), labels, reduction="sum"), logits)


def cut_loss(place: Place, t: int, v: int) -> Call:
    """The loss of a cut head without its products: hidden states of width 1 stand for those."""
    x, weight = place.normal(1, t, 1, trained=True), place.normal(v, 1, trained=True)
    labels, line = place.labels(t, v).view(1, t), SharedLayer(Axis("tp", 1, 0, (0,)))
    return lambda: token_loss(x, weight, None, labels, line, v, -100)


def embedding(place: Place, t: int, d: int, v: int) -> Call:
    """Look-up and its gradient, which is as large as the table."""
    table, ids = place.normal(v, d, trained=True), place.labels(t, v)
    return lambda: torch.autograd.grad(
        F.embedding(ids, table), table, torch.ones(t, d, device=place.device).to(place.dtype)
    )


def adamw(place: Place, params: int) -> Call:
    weight = torch.nn.Parameter(place.normal(params))
    weight.grad = place.normal(params)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    return optimizer.step


def clip(place: Place, params: int) -> Call:
    """The norm of gradients, and their scaling."""
    grad = place.normal(params)
    factor = torch.ones((), device=place.device, dtype=place.dtype)

    def call() -> None:
        torch.linalg.vector_norm(grad)
        grad.mul_(factor)

    return call


def to_host(place: Place, num_bytes: int) -> Call:
    """What offload does: to memory of the host, page-locked where there is a GPU."""
    here, there = _both_sides(place, num_bytes)
    return lambda: there.copy_(here, non_blocking=True)


def to_device(place: Place, num_bytes: int) -> Call:
    here, there = _both_sides(place, num_bytes)
    return lambda: here.copy_(there, non_blocking=True)


def _both_sides(place: Place, num_bytes: int) -> tuple[Tensor, Tensor]:
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    return here, torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=place.device.type == "cuda")


def host_adamw(place: Place, params: int) -> Call:
    """The optimizer's step on the host: masters in fp32, with this rank's threads."""
    del place
    return adamw(Place(torch.device("cpu"), torch.float32), params)


def _block(place: Place) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A layer so small that calls are all it costs: what modules, views and autograd's nodes add to its parts."""
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


def block_f(place: Place, t: int, d: int) -> Call:
    return _block(place)[0]


def block_b(place: Place, t: int, d: int) -> Call:
    forward, inputs = _block(place)
    return _backward(forward(), *inputs)


#: Operation -> (what makes its call, values that it works on as a function of its size).
PROBES: dict[str, tuple[Callable[..., Call], Callable[..., int]]] = {
    **{name.__name__: (name, lambda m, n, k: m * n + n * k + m * k) for name in (linear_f, linear_dx, linear_dw)},
    **{name.__name__: (name, lambda b, h, s, c: 4 * b * h * s * c) for name in (attention_f, attention_b)},
    **{
        name.__name__: (name, lambda t, d: 3 * t * d)
        for name in (
            norm_f,
            norm_b,
            layer_norm_f,
            layer_norm_b,
            rope_f,
            rope_b,
            swiglu_f,
            swiglu_b,
            gelu_f,
            gelu_b,
            block_f,
            block_b,
        )
    },
    **{name.__name__: (name, lambda t, d: 2 * t * d) for name in (add, add_to, copy, loss_f, loss_b, cut_loss)},
    "embedding": (embedding, lambda t, d, v: v * d + t * d),
    "adamw": (adamw, lambda params: 4 * params),
    "clip": (clip, lambda params: params),
    **{name.__name__: (name, lambda num_bytes: num_bytes) for name in (to_host, to_device)},
    "host_adamw": (host_adamw, lambda params: 4 * params),
}


def calls_of(op: str, size: tuple[int, ...], place: Place) -> ColdCalls:
    """The calls that measure an operation at a size."""
    make, values = PROBES[op]
    return copies(lambda: make(place, *size), values(*size) * place.dtype.itemsize)
