"""Attention of encoders that take pictures one after another, in one call for all pictures of a batch.

Models of transformers with such an encoder (Qwen2-VL and its kin) call torch's fused attention once for each picture in
each layer, and ask the device for the borders each time. Only a function whose name has "flash" in it gets the borders
in one call; so the encoder's modules get a config of their own, with the name of one that takes them.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.attention import bordered_attention
from weft.structure import hugging_face

#: transformers gives borders to functions with "flash" in their names.
_NAME = "weft_flash_by_borders"
_BORDERS = "cu_seqlens"


def attend_by_borders(model: nn.Module) -> None:
    """Let the encoders of a model of transformers attend to all pictures in one call, in place."""
    if not hugging_face.is_hugging_face(model):
        return
    attending = [module for module in model.modules() if _calls_by_picture(module)]
    if not attending:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs: dict[int, Any] = {id(module.config): module.config for module in attending}
    sharing = [module for module in model.modules() if id(getattr(module, "config", None)) in configs]
    if any("attention_mask" in inspect.signature(module.forward).parameters for module in sharing):
        return  # a part of the text has the same config, and its attention wants no borders
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    for one in configs.values():
        own = copy.copy(one)
        own._attn_implementation_internal = _NAME
        for module in sharing:
            if getattr(module, "config", None) is one:
                module.config = own


def _calls_by_picture(module: nn.Module) -> bool:
    """Whether it attends to the rows between borders, by torch's fused attention, and drops nothing."""
    if hugging_face.attention_name(module) != "sdpa" or not hasattr(module, "scaling"):
        return False
    drops = getattr(module, "attention_dropout", 0.0)
    return _BORDERS in inspect.signature(module.forward).parameters and not drops


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function in the manner of transformers: (1, H, P, C) in, (1, P, H, C) out."""
    usual = query.shape[-1] ** -0.5
    if cu_seq_lens_q is None or query.shape[1] != key.shape[1] or is_causal or dropout:
        own = hugging_face.attention_function(module, "sdpa")
        return own(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    longest = int(max_length_q) if max_length_q is not None else query.shape[2]
    starts = cu_seq_lens_q[:-1].to(torch.int64)[None]
    return bordered_attention(query, key, value, starts, longest).transpose(1, 2), None
