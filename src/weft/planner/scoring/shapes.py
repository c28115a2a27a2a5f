"""Shapes of models from rows of a table, and iteration times from the TFLOP/s that some tables print instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.planner.shape import Shape

#: Families whose heads are not hidden / heads wide, or that look back over a window in a part of their layers.
_HEAD_DIMS = (("qwen3", 128), ("gpt-oss", 64), ("gpt_oss", 64), ("gemma", 256), ("nemotron-h", 128))
_WINDOWS = (("gpt-oss", 128), ("gpt_oss", 128))
_GPT_VOCAB = 50_257


def shape_of(row: Mapping[str, str]) -> Shape:
    """The shape of a row's model. What the row does not say is as in its family: see the comments."""
    number = {key: int(float(row[key])) for key in _COUNTS if row.get(key)}
    hidden, heads = number["hidden"], number["heads"]
    family = f"{row.get('model_family', '')} {row.get('table', '')}".lower()
    ffn = number.get("ffn_hidden", 4 * hidden)
    gated = row["gated_mlp"] in ("1", "true", "True") if row.get("gated_mlp") else ffn != 4 * hidden
    experts = number.get("experts", 0)
    mixture = experts > 1
    head_dim = next((width for word, width in _HEAD_DIMS if word in family), max(1, hidden // heads))
    window = next((width for word, width in _WINDOWS if word in family), 0)
    gpt = not gated and number.get("kv_heads", heads) == heads
    return Shape(
        vocab=number.get("vocab", _GPT_VOCAB),
        hidden=hidden,
        layers=number["layers"],
        heads=heads,
        kv_heads=number.get("kv_heads", heads),
        head_dim=head_dim,
        ffn=0 if mixture else ffn,
        gated=gated,
        tied=_tied(row, gpt),
        biases=gpt and "no bias" not in row.get("notes", "").lower(),
        layer_norm=not gated,
        learned_positions=number["seq_len"] if gpt else 0,
        num_experts=experts if mixture else 0,
        top_k=number.get("top_k", 1) if mixture else 0,
        expert_ffn=ffn if mixture else 0,
        window=window,
        windowed_layers=number["layers"] // 2 if window else 0,
    )


_COUNTS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "experts", "top_k")


def _tied(row: Mapping[str, str], gpt: bool) -> bool:
    notes = row.get("notes", "").lower()
    if "untied" in notes:
        return False
    return gpt


def iteration_s(row: Mapping[str, str], shape: Shape, gpus: int) -> float | None:
    """Measured seconds of a step: printed, or from tokens/s, or from TFLOP/s; None where the row has neither."""
    if row.get("measured_iter_s"):
        return float(row["measured_iter_s"])
    if not row.get("global_batch"):
        return None
    tokens = float(row["global_batch"]) * float(row["seq_len"])
    if row.get("measured_tokens_per_s_per_gpu"):
        return tokens / (float(row["measured_tokens_per_s_per_gpu"]) * gpus)
    notes = row.get("notes", "")
    stated = re.search(r"\bd_iter=([0-9.]+)", notes)
    if stated:
        return float(stated[1])
    if row.get("measured_tflops_per_gpu"):
        hardware = "flops=hw" in notes
        flops = step_flops(shape, int(float(row["seq_len"])), tokens, hardware)
        return flops / (float(row["measured_tflops_per_gpu"]) * 1e12 * gpus)
    return None


def step_flops(shape: Shape, seq_len: int, tokens: float, with_recompute: bool = False) -> float:
    """FLOPs of a step as most tables count them: forward three times, attention over the whole square.

    with_recompute: layers four times (Narayanan et al. 2021, arXiv 2104.04473, and what follows it).
    """
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ups = 3 if shape.gated else 2
    dense = shape.layers - shape.moe_layers
    ffn = dense * shape.ffn + shape.moe_layers * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    attention = shape.layers * (2.0 * shape.hidden * (2 * width + 2 * kv) + 4.0 * seq_len * width)
    layers = attention + 2.0 * ups * shape.hidden * ffn
    head = 2.0 * shape.hidden * shape.vocab
    return tokens * ((4 if with_recompute else 3) * layers + 3 * head)
