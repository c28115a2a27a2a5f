"""Time one training step of a decoder on a CPU: torch eager, torch.compile, the JAX engine, and JAX by hand.

The contenders take turns, and the table has medians. Each trains the same decoder with AdamW on the same tokens.

    python benchmarks/jax_engine.py --rounds 5 --sizes small medium
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.jax_engine.capture import capture, to_array
from weft.jax_engine.program import Program, Sharding
from weft.jax_engine.update import read_optimizer
from weft.models.registry import build_decoder
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

_LR, _DECAY, _EPS, _BETAS = 1e-3, 0.1, 1e-8, (0.9, 0.999)
SIZES = {
    "small": DecoderSpec(
        vocab_size=2048, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=384, max_seq_len=128
    ),
    "medium": DecoderSpec(
        vocab_size=8192, dim=512, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=1536, max_seq_len=256
    ),
}


def loss_of(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return token_cross_entropy(model_forward(model, dict(batch)), dict(batch))


def tokens(spec: DecoderSpec, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (rows, spec.max_seq_len)
    ids = torch.randint(spec.vocab_size, shape, generator=generator)
    labels = torch.randint(spec.vocab_size, shape, generator=generator)
    return {"input_ids": ids, "labels": labels, "positions": torch.arange(shape[1]).repeat(rows, 1)}


def torch_step(spec: DecoderSpec, batch: Mapping[str, torch.Tensor], *, compiled: bool) -> Callable[[], float]:
    model = build_decoder(spec).train()
    run = torch.compile(loss_of) if compiled else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=_DECAY, fused=True)

    def step() -> float:
        loss, count = run(model, batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float((loss / count).detach())

    return step


def captured_step(spec: DecoderSpec, batch: Mapping[str, torch.Tensor]) -> Callable[[], float]:
    model = build_decoder(spec).train()
    captured = capture(model, loss_of, dict(batch))
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=_DECAY), model)
    params = {name: to_array(param) for name, param in model.named_parameters()}
    shapes = {name: one.shape for name, one in params.items()}
    program = Program(captured, optimizer, Sharding.of(Plan()), max_grad_norm=1.0, shapes=shapes)
    buffers = {name: to_array(one) for name, one in model.named_buffers()}
    held = [*program.place(params), 0]

    def step() -> float:
        inputs = program.place_batch([captured.inputs(dict(batch), dict(model.named_buffers()))])
        held[0], report, held[1], _, _ = program.step(
            held[0], buffers, held[1], inputs, np.int64(held[2]), np.float64(1.0)
        )
        held[2] += 1
        return float(np.asarray(report)[0])

    return step


# The same decoder and step, written for JAX by hand.


def norm(x: Any, weight: Any, eps: float) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    low, high = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-high, low], -1) * sin


def logits(spec: DecoderSpec, params: Mapping[str, Any], ids: Any) -> Any:
    batch, length = ids.shape
    x, width = params["embed.weight"][ids], spec.head_dim
    angles = jnp.arange(length)[:, None] / spec.rope_theta ** (jnp.arange(0, width, 2) / width)
    cos, sin = (
        jnp.concatenate([turn, turn], -1)[None, :, None].astype(x.dtype) for turn in (jnp.cos(angles), jnp.sin(angles))
    )
    seen = jnp.tri(length, dtype=bool)
    for layer in range(spec.num_layers):
        of = {name: params[f"blocks.{layer}.{name}.weight"] for name in (
            "norm1", "attn.q", "attn.k", "attn.v", "attn.o", "norm2", "mlp.gate", "mlp.up", "mlp.down")}  # fmt: skip
        h = norm(x, of["norm1"], spec.norm_eps)
        q, k, v = ((h @ of[f"attn.{name}"].T).reshape(batch, length, -1, width) for name in "qkv")
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (jnp.repeat(one, spec.num_heads // spec.num_kv_heads, 2) for one in (k, v))
        scores = jnp.einsum("bthc,bshc->bhts", q, k) / width**0.5
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhts,bshc->bthc", shares, v).reshape(batch, length, -1)
        x = x + out @ of["attn.o"].T
        h = norm(x, of["norm2"], spec.norm_eps)
        x = x + (jax.nn.silu(h @ of["mlp.gate"].T) * (h @ of["mlp.up"].T)) @ of["mlp.down"].T
    return norm(x, params["norm.weight"], spec.norm_eps) @ params["head.weight"].T


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def written_step(spec: DecoderSpec, params: Any, first: Any, second: Any, ids: Any, labels: Any, number: Any) -> Any:
    def mean_loss(params: Any) -> Any:
        shares = jax.nn.log_softmax(logits(spec, params, ids))
        return -jnp.take_along_axis(shares, labels[..., None], -1).mean()

    loss, grads = jax.value_and_grad(mean_loss)(params)
    length = jnp.sqrt(sum(jnp.sum(jnp.square(one)) for one in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda one: one * jnp.minimum(1.0, 1.0 / (length + 1e-6)), grads)
    beta1, beta2 = _BETAS
    first = jax.tree.map(lambda old, grad: beta1 * old + (1 - beta1) * grad, first, grads)
    second = jax.tree.map(lambda old, grad: beta2 * old + (1 - beta2) * grad * grad, second, grads)
    size, root = _LR / (1 - beta1**number), jnp.sqrt(1 - beta2**number)
    params = jax.tree.map(
        lambda one, m, v: one * (1 - _LR * _DECAY) - size * m / (jnp.sqrt(v) / root + _EPS), params, first, second
    )
    return params, first, second, loss


def hand_step(spec: DecoderSpec, batch: Mapping[str, torch.Tensor]) -> Callable[[], float]:
    params = {name: jnp.asarray(to_array(one)) for name, one in build_decoder(spec).named_parameters()}
    held = [params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)), 1]

    def step() -> float:
        ids, labels = to_array(batch["input_ids"]), to_array(batch["labels"])
        *held[:3], loss = written_step(spec, *held[:3], ids, labels, np.float32(held[3]))
        held[3] += 1
        return float(loss)

    return step


def measure(spec: DecoderSpec, rows: int, rounds: int, steps: int, compiles: bool) -> dict[str, dict[str, float]]:
    """Return the median step time and the last loss of each contender."""
    batch = tokens(spec, rows)
    contenders: dict[str, Callable[[], float]] = {
        "torch eager": torch_step(spec, batch, compiled=False),
        "JAX engine": captured_step(spec, batch),
        "JAX by hand": hand_step(spec, batch),
    }
    if compiles:
        contenders["torch.compile"] = torch_step(spec, batch, compiled=True)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for step in contenders.values():
        step()
    for _ in range(rounds):
        for name, step in contenders.items():
            for _ in range(steps):
                start = time.perf_counter()
                losses[name] = step()
                times[name].append(time.perf_counter() - start)
    return {name: {"step_s": statistics.median(times[name]), "loss": losses[name]} for name in contenders}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", type=int, default=4, help="sequences in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which needs a C++ compiler")
    given = parser.parse_args()
    for size in given.sizes:
        found = measure(SIZES[size], given.rows, given.rounds, given.steps, not given.no_compile)
        print(json.dumps({"size": size, **found}), flush=True)
        engine, hand = found["JAX engine"]["step_s"], found["JAX by hand"]["step_s"]
        print(f"{size}: engine / by hand {engine / hand:.3f}", flush=True)


if __name__ == "__main__":
    main()
