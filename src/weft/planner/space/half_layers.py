"""Which share of the products of blocks stays in bf16 under precision=fp8, by `train.bf16_layers`, without a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from weft.planner.space.trained_part import parameters_of
from weft.spec import DecoderSpec

_LINEAR = re.compile(r"blocks\.(\d+)\.((?:attn|mlp)\.(?!router).*)\.weight")
_END = re.compile(r"(first|last):(\d+)")
#: What models of transformers call the layers that Weft's decoders have.
_ELSEWHERE = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def half_share(spec: DecoderSpec, words: Sequence[str]) -> float:
    """Return the share, 0 to 1, of the work of linear layers in blocks, stacked experts apart, that stays in bf16.

    Args:
        spec: of the decoder.
        words: `first:N`, `last:N`, and patterns of paths, of Weft's decoders or of the Llama family in transformers.
            Those that name nothing here count for nothing.
    """
    kept = whole = 0.0
    for _, name, size in parameters_of(spec) if words else ():
        if not (found := _LINEAR.fullmatch(name)):
            continue
        block, layer = found.groups()
        whole += size
        paths = [f"blocks.{block}.{layer}", f"model.layers.{block}.{_ELSEWHERE.get(layer, layer)}"]
        kept += size * any(_names(word, int(block), paths, spec.num_layers) for word in words)
    return kept / whole if whole else 0.0


def _names(word: str, block: int, paths: Sequence[str], num_blocks: int) -> bool:
    if end := _END.fullmatch(word):
        count = int(end[2])
        return block < count if end[1] == "first" else block >= num_blocks - count
    return any(fnmatchcase(path, word) for path in paths)
