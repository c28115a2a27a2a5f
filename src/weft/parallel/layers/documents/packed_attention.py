"""Attention of Hugging Face models within the documents of packed sequences, without a mask over pairs of tokens.

Where positions begin anew, transformers makes a mask of (B, 1, T, T), which no flash kernel takes, and it asks the
device whether any do. Here the borders, which the loader knows, travel as the attention mask: a model hands one of
four dims through to every layer unread. The modules get a config of their own, with the name of a function that reads
it; whatever else that function is given goes to the one in whose place it is called.

B sequences, T tokens, M places, H query heads, C width of one head.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.attention import document_attention, find_starts, ids_of
from weft.structure import hugging_face, token_flow

#: transformers' name for torch's fused attention, whose place is taken, and ours.
_OWN, _NAME = "sdpa", "weft_sdpa_by_documents"
_READY = "_weft_reads_documents"
#: What a model remembers of its positions, and of the call under way.
_FIRST, _TOLD = "_weft_first_position", "_weft_is_told_documents"
#: Of borders as masks: of places where documents begin, and of ids.
_PLACES, _IDS = torch.int64, torch.int32
#: What some models ask of attention that reads a mask over pairs.
_BESIDE = ("softcap", "s_aux", "position_bias", "head_mask", "indices")


def reads_documents(model: nn.Module) -> bool:
    """Whether `attend_in_documents` lets this model's layers read borders."""
    return hugging_face.is_hugging_face(model) and _is_usual(model)


def attend_in_documents(model: nn.Module) -> None:
    """Let the layers of a causal model of transformers read what `borders_of` gives, in place."""
    if not reads_documents(model):
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS.register(_NAME, partial(_attend, ALL_ATTENTION_FUNCTIONS[_OWN]))
    masks.register(_NAME, masks[_OWN])
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hugging_face.attention_name(module) is None:
            continue
        config: Any = module.config
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation_internal = _NAME
        module.config = copies[id(config)]
    setattr(model, _READY, True)


def borders_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what tells a model where the documents of a batch of the loader begin, as arguments of its forward.

    Empty where the model does not read it: positions tell it then. In a batch without a border the mask is empty, so
    that transformers does not look for some.
    """
    if not reads_borders(model):
        return {}
    starts_BM, ids_BT = batch.get("document_starts"), batch.get("document_ids")
    if starts_BM is None and ids_BT is not None:
        starts_BM = find_starts(ids_BT)
        if starts_BM is None:
            return {}
    if starts_BM is None:
        starts_BM = torch.empty((1, 0), dtype=torch.int64, device=batch["input_ids"].device)
    return {"attention_mask": as_borders(starts_BM)}


def as_borders(starts_BM: Tensor | None, ids_BT: Tensor | None = None) -> Tensor:
    """Return the attention mask that says where documents begin: (B, 1, 1, M), or (B, 1, 1, T) of ids.

    Args:
        starts_BM: the places, of a fixed number; None: the device would have to be asked how many there are.
        ids_BT: then an id for each token, ascending.
    """
    if starts_BM is not None:
        return starts_BM[:, None, None]
    assert ids_BT is not None
    return ids_BT.to(_IDS)[:, None, None]


def reads_borders(model: nn.Module) -> bool:
    """Whether `attend_in_documents` has let this model's layers read borders."""
    return getattr(model, _READY, False)


def call_in_documents(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a causal model of transformers on a batch of the loader: tokens see only those of their own document.

    A model that does not read borders gets masks that keep to them, whether or not it tells transformers its positions.
    """
    if not hasattr(model, _FIRST):
        setattr(model, _FIRST, hugging_face.first_position(model))
    borders, ids_BT = borders_of(model, batch), batch.get("document_ids")
    places = {"input_ids": batch["input_ids"], "position_ids": batch["positions"] + getattr(model, _FIRST)}
    setattr(model, _TOLD, True)
    try:
        with within_documents(ids_BT) if ids_BT is not None and not borders else contextlib.nullcontext():
            return model(**places, use_cache=False, **borders)
    finally:
        setattr(model, _TOLD, False)


def is_told(model: nn.Module) -> bool:
    """Whether the call under way is one of `call_in_documents`, which says itself where documents begin."""
    return getattr(model, _TOLD, False)


@contextlib.contextmanager
def within_documents(ids_BT: torch.Tensor) -> Generator[None]:
    """Inside, every mask that transformers makes over these tokens stays among tokens of one id.

    Some of its models (OPT, gpt-oss) have positions, and do not tell them where they ask for a mask; others (BioGPT)
    ask with a mask of ones, beside which it does not look at positions.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    known: Any = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", {})
    before = {name: known[name] for name in known}
    num_tokens = ids_BT.shape[1]

    def made(own: Any, **given: Any) -> Any:
        if given.get("q_length") != num_tokens or given.get("kv_length") != num_tokens:
            return own(**given)
        given["mask_function"] = masks.and_masks(given["mask_function"], masks.packed_sequence_mask_function(ids_BT))
        return own(**given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    try:
        for name, own in before.items():
            known[name] = partial(made, own)
        yield
    finally:
        for name, own in before.items():
            known[name] = own


def _is_usual(model: Any) -> bool:
    """Whether all layers look up torch's fused attention, are causal, and nothing else reads the mask."""
    takes = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    layers = [module for module in model.modules() if hasattr(module, "is_causal")]
    return (
        "attention_mask" in takes
        and importlib.util.find_spec("transformers.masking_utils") is not None
        and {hugging_face.attention_name(module) for module in model.modules()} <= {None, _OWN}
        and bool(layers)
        and all(layer.is_causal and not hugging_face.attention_chunk(layer) for layer in layers)
        and not getattr(config, "output_router_logits", False)  # whose loss reads the mask
        and not any(map(_reads_mask, model.modules()))
        and not token_flow.why_fixed_attention(model)
    )


def _reads_mask(module: nn.Module) -> bool:
    """Whether a module takes the mask, and has no attention in it to hand it to: an indexer of sparse attention."""
    takes = "attention_mask" in inspect.signature(module.forward).parameters
    return takes and not any(hasattr(one, "is_causal") for one in module.modules())


def _attend(
    own: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """An attention function in the manner of transformers: (B, H, T, C) in, (B, T, H, C) out.

    own: the one in whose place it is called. Blocks are compiled with it: a name could not be looked up there.
    """
    how = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    if attention_mask is None or attention_mask.dtype not in (_PLACES, _IDS):
        return own(module, query, key, value, attention_mask, **how)
    num_tokens, window = query.shape[2], kwargs.get("sliding_window")
    window = None if window is None or window >= num_tokens else window
    starts_BM, ids_BT = attention_mask[:, 0, 0], None
    if attention_mask.dtype == _IDS:
        starts_BM, ids_BT = None, starts_BM
    elif starts_BM.shape[1] == 0 and window is None:
        return own(module, query, key, value, None, **how)
    if dropout or any(kwargs.get(name) is not None for name in _BESIDE):
        return own(module, query, key, value, _mask(starts_BM, ids_BT, num_tokens, window), **how)
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    return document_attention(query, key, value, starts_BM, ids_BT, window).transpose(1, 2).contiguous(), None


def _mask(starts_BM: Tensor | None, ids_BT: Tensor | None, num_tokens: int, window: int | None) -> Tensor:
    """What each token sees, bool (B, 1, T, T)."""
    if ids_BT is None:
        assert starts_BM is not None
        ids_BT = ids_of(starts_BM, num_tokens)
    place_T = torch.arange(num_tokens, device=ids_BT.device)
    seen = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (place_T[:, None] >= place_T)
    if window is not None:
        seen = seen & (place_T[:, None] - place_T < window)
    return seen[:, None]
