"""Shapes of models from rows of a table, and iteration times from the TFLOP/s that some tables print instead."""

from __future__ import annotations

import re

from weft.planner.scoring.rows.cells import Row, count, number, size
from weft.planner.space import Shape

#: Families whose heads are not hidden / heads wide, or that look back over a window in a part of their layers.
_HEAD_DIMS = (("qwen3", 128), ("gpt-oss", 64), ("gpt_oss", 64), ("gemma", 256), ("nemotron-h", 128))
_WINDOWS = (("gpt-oss", 128), ("gpt_oss", 128))
#: Families with latent attention: hidden width -> ranks of queries and of keys and values, width of positions.
_LATENT = {7168: (1536, 512, 64), 5120: (1536, 512, 64), 2048: (0, 512, 64)}
#: Width that every token passes beside its experts, and layers without experts: by word and hidden width.
_SHARED = {
    ("deepseek", 7168): (2048, 3),
    ("deepseek", 5120): (3072, 1),
    ("deepseek", 2048): (2816, 1),
    ("qwen2", 3584): (20_480, 0),
    ("llama4", 5120): (8192, 0),
}
_GPT_VOCAB = 50_257


def shape_of(row: Row) -> Shape:
    """The shape of a row's model. What the row does not say is as in its family: see the comments."""
    have = {key: size(row, key) for key in _COUNTS if count(row, key, 0)}
    hidden, heads = have["hidden"], have["heads"]
    family = f"{row.get('model_family', '')} {row.get('table', '')}".lower()
    notes = row.get("notes", "").lower()
    ffn = have.get("ffn_hidden", 4 * hidden)
    gated = row["gated_mlp"] in ("1", "true", "True") if row.get("gated_mlp") else ffn != 4 * hidden
    experts = have.get("experts", 0)
    mixture = experts > 1
    head_dim = 128 if "deepseek" in family else max(1, hidden // heads)
    head_dim = next((width for word, width in _HEAD_DIMS if word in family), head_dim)
    head_dim = int(said[1]) if (said := re.search(r"head_dim[ =](\d+)", notes)) else head_dim
    window, windowed = _windows(family, notes, have["layers"])
    gpt = not gated and have.get("kv_heads", heads) == heads
    return Shape(
        vocab=have.get("vocab", _GPT_VOCAB),
        hidden=hidden,
        layers=have["layers"],
        heads=heads,
        kv_heads=have.get("kv_heads", heads),
        head_dim=head_dim,
        gated=gated,
        tied=_tied(row, gpt),
        biases=gpt and "no bias" not in row.get("notes", "").lower(),
        layer_norm=not gated,
        learned_positions=have["seq_len"] if gpt else 0,
        **_latent(family, notes, hidden),
        **_shared(f"{family} {notes}", hidden, have["layers"], mixture, ffn),
        num_experts=experts if mixture else 0,
        top_k=have.get("top_k", 1) if mixture else 0,
        expert_ffn=ffn if mixture else 0,
        window=window,
        windowed_layers=windowed,
    )


_COUNTS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "experts", "top_k")


def _windows(family: str, notes: str, layers: int) -> tuple[int, int]:
    """The window of attention and how many layers have it: "5:1 with 1024 window", or as in the model's family."""
    said = re.search(r"(\d+):(\d+) with (\d+) window", notes)
    if said:
        local, whole, width = (int(each) for each in said.groups())
        return width, layers * local // (local + whole)
    window = next((width for word, width in _WINDOWS if word in family), 0)
    return window, layers // 2 if window else 0


def _latent(family: str, notes: str, hidden: int) -> dict[str, int]:
    if ("deepseek" not in family and not re.search(r"\bmla\b", notes)) or hidden not in _LATENT:
        return {}
    return dict(zip(("q_rank", "kv_rank", "rope_dim"), _LATENT[hidden], strict=True))


def _shared(family: str, hidden: int, layers: int, mixture: bool, ffn: int) -> dict[str, int]:
    """The feed-forward layer, the shared one beside experts, and how many layers have no experts."""
    if not mixture:
        return {"ffn": ffn}
    if "every other layer" in family:
        return {"ffn": 2 * ffn, "shared_ffn": ffn, "dense_layers": layers // 2}
    for (word, width), (shared, dense) in _SHARED.items():
        if word in family and width == hidden:
            return {"ffn": 9 * ffn if dense else 0, "shared_ffn": shared, "dense_layers": dense}
    return {"ffn": 0}


def _tied(row: Row, gpt: bool) -> bool:
    notes = row.get("notes", "").lower()
    if "untied" in notes:
        return False
    return gpt


def iteration_s(row: Row, shape: Shape, gpus: int, causal: bool = False) -> float | None:
    """Measured seconds of a step: printed, or from tokens/s, or from TFLOP/s; None where the row has neither.

    causal: the TFLOP/s count the causal half of attention.
    """
    seconds, rate = number(row, "measured_iter_s"), number(row, "measured_tokens_per_s_per_gpu")
    if seconds:
        return seconds
    if not count(row, "global_batch", 0):
        return None
    tokens = float(size(row, "global_batch") * size(row, "seq_len"))
    if rate:
        return tokens / (rate * gpus)
    notes = row.get("notes", "")
    stated = re.search(r"\bd_iter=([0-9.]+)", notes)
    if stated:
        return float(stated[1])
    teraflops = number(row, "measured_tflops_per_gpu")
    if not teraflops:
        return None
    seq_len = size(row, "seq_len") / (2 if causal else 1)
    return step_flops(shape, seq_len, tokens, "flops=hw" in notes) / (teraflops * 1e12 * gpus)


def step_flops(shape: Shape, seq_len: float, tokens: float, with_recompute: bool = False) -> float:
    """Return the FLOPs of a step as most tables count them: forward three times, attention over the whole square.

    Args:
        shape: of the model.
        seq_len: tokens of a sequence.
        tokens: of a step.
        with_recompute: layers four times (Narayanan et al. 2021, arXiv 2104.04473, and what follows it).
    """
    width = shape.heads * shape.head_dim
    ups = 3 if shape.gated else 2
    dense = shape.layers - shape.moe_layers
    ffn = dense * shape.ffn + shape.moe_layers * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    seen = seq_len * (width + shape.heads * shape.rope_dim / 2)
    attention = shape.layers * (2.0 * shape.attention_params + 4.0 * seen)
    layers = attention + 2.0 * ups * shape.hidden * ffn
    head = 2.0 * shape.hidden * shape.vocab
    return tokens * ((4 if with_recompute else 3) * layers + 3 * head)
