"""Context parallelism of Hugging Face models, through their own registry of attention functions.

The models look their attention function up by a name in their config, and hand it keys and values as they are, before
heads are repeated. Here each model gets a config of its own with our name in it. The function finds the model's Context
on the calling module; without one, or out of use, it is what the model would have called. What documents there are
travels as the attention mask, which a model hands through to every layer unread when it has four dims.

B sequences, T tokens of this rank, H query heads, K key-value heads, C width of one head.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.memory import Handle, Opaque
from weft.parallel.context.context_mode import Context
from weft.parallel.context.document_borders import PADDING
from weft.parallel.context.kernel import Scoring
from weft.parallel.context.order import remember_whole, whole_values
from weft.parallel.context.pieces import Sight
from weft.parallel.context.positions import positions_of
from weft.parallel.context.whole_mixers import BESIDE_TOKENS
from weft.private_torch import uncompiled
from weft.structure import hugging_face, repeated_blocks

#: Our attention functions are registered under this and the name of the one whose place they take.
PREFIX = "weft_context_parallel_"
_ATTRIBUTE, _OWN, _HANDLE = "_weft_context", "_weft_own_attention", "_weft_handle"
_SITE = "_weft_site"  # where dropout by position put what it knows of a module
#: What some models ask of attention and a cut sequence does not have yet.
_UNKNOWN = ("position_bias", "head_mask", "indices")


def replace_attention(model: Any, context: Context) -> None:
    """Let the model's attention, which it looks up by name, call `attend_cut` while the context is in use."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    context.positions = positions_of(model)
    copies: dict[int, Any] = {}
    for module in model.modules():
        own, config = hugging_face.attention_name(module), getattr(module, "config", None)
        if own is None:
            continue
        if id(config) not in copies:
            # Pure functions under a name of our own: what other models look up is not touched.
            ALL_ATTENTION_FUNCTIONS.register(PREFIX + own, attend_by_name)
            if own in ALL_MASK_ATTENTION_FUNCTIONS:
                ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation_internal = PREFIX + own
        module.config = copies[id(config)]
        setattr(module, _ATTRIBUTE, context)
        setattr(module, _OWN, own)
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after)


def hold_attention(model: nn.Module, opaque: Opaque) -> None:
    """Let compiled blocks hold attention over a cut sequence as an operator, where it drops nothing."""
    for module in model.modules():
        if hasattr(module, _ATTRIBUTE) and hasattr(module, _OWN):
            setattr(module, _HANDLE, opaque.handle(_attend, module))


def _attend(module: nn.Module, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    query, key, value = inputs[:3]
    ids_BT = inputs[3] if len(inputs) > 3 and inputs[3].numel() else None
    scaling, is_causal, window, softcap = (None if math.isnan(one) else one for one in numbers)
    sink_H = inputs[4] if len(inputs) > 4 else None
    asked = {"sliding_window": None if window is None else int(window), "softcap": softcap, "s_aux": sink_H}
    causal = None if is_causal is None else bool(is_causal)
    return _attend_cut(module, getattr(module, _ATTRIBUTE), query, key, value, ids_BT, 0.0, scaling, causal, asked)


def attend_by_name(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function in the manner of transformers: (B, H, T, C) in, (B, T, H, C) out."""
    context: Context | None = getattr(module, _ATTRIBUTE, None)
    if context is None or not context.in_use:
        own = hugging_face.attention_function(module, getattr(module, _OWN, "sdpa"))
        return own(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    ids_BT = None if attention_mask is None or attention_mask.numel() == 0 else attention_mask
    if ids_BT is not None and (ids_BT.is_floating_point() or ids_BT.shape[1:3] != (1, 1)):
        raise ModelError(
            f"cp={context.axis.size}: {type(module).__name__} makes its own attention mask, which a cut "
            f"sequence does not support. Use cp=1 for this model."
        )
    handle: Handle | None = getattr(module, _HANDLE, None)
    known = (scaling, is_causal, kwargs.get("sliding_window"), kwargs.get("softcap"))
    if handle is not None and handle.is_open and not dropout and not _unknown(kwargs):
        sink_H = kwargs.get("s_aux")
        ids = ids_BT if ids_BT is not None else query.new_empty(0, dtype=torch.int64)
        beside = [ids, sink_H] if sink_H is not None else [ids] if ids_BT is not None else []
        inputs = [query, key, value, *beside]
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return handle(shape, query.dtype, inputs, [math.nan if one is None else float(one) for one in known]), None
    return _attend_cut(module, context, query, key, value, ids_BT, dropout, scaling, is_causal, kwargs), None


@uncompiled
def _attend_cut(
    module: nn.Module,
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids_BT: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    asked: dict[str, Any],
) -> Tensor:
    """Read what the layer asks for, and attend; (B, T, H, C)."""
    _refuse(module, context, dropout, asked)
    refuse_chunks(module, context, key.shape[2] * context.axis.size)
    if not context.has_looked:
        context.callers.add(module)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = asked.get("sliding_window")
    whole = key.shape[2] * context.axis.size
    before = None if window is None or window >= whole else window - 1  # a window holds the token itself
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    drop = getattr(module, _SITE).attention(dropout, *query.shape[:2], query.device) if dropout else None
    scoring = Scoring(scale, Sight(before, 0 if causal else before), asked.get("softcap"), drop)
    return context.attend(query, key, value, scoring, ids_BT, asked.get("s_aux")).transpose(1, 2)


def _refuse(module: nn.Module, context: Context, dropout: float, asked: dict[str, Any]) -> None:
    """ModelError for what attention over a cut sequence does not do."""
    where = f"cp={context.axis.size}: {type(module).__name__}"
    if dropout and not hasattr(module, _SITE):
        raise ModelError(
            f"{where} drops {dropout:g} of its attention weights in training, and Weft finds that rate under none of "
            "the usual names. Store it as module.attention_dropout, or set it to 0."
        )
    if unknown := _unknown(asked):
        raise ModelError(
            f"{where} passes {unknown[0]} to its attention, and attention over a cut sequence does not support it. "
            "Use cp=1."
        )


def _unknown(asked: dict[str, Any]) -> list[str]:
    return [name for name in _UNKNOWN if asked.get(name) is not None]


def refuse_chunks(module: nn.Module, context: Context, seq_len: int) -> None:
    """ModelError for attention within chunks (Llama 4), which only a mask would tell."""
    if 0 < (chunk := hugging_face.attention_chunk(module)) < seq_len:
        raise ModelError(
            f"cp={context.axis.size}: {type(module).__name__} attends within chunks of {chunk} tokens, which a cut "
            f"sequence of {seq_len} does not support. Use cp=1, or sequences of at most {chunk} tokens."
        )


def _before(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before each forward of a cut sequence: positions are places in the whole one, and the mask says documents."""
    context: Context | None = getattr(model, _ATTRIBUTE, None)
    if context is None or not context.in_use:
        return None
    context.num_calls = 0
    signature = inspect.signature(model.forward)
    given = dict(signature.bind(*args, **kwargs).arguments)
    extra = given.pop(next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""), {})
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or "position_ids" not in signature.parameters:
        raise ModelError(
            f"cp={context.axis.size}: {type(model).__name__} has no input_ids or no position_ids, so Weft cannot "
            "give it the positions of its part of a sequence. Use cp=1 for this model."
        )
    if others := [name for name in BESIDE_TOKENS if given.get(name) is not None]:
        raise ModelError(
            f"cp={context.axis.size}: {type(model).__name__} takes {others[0]} beside its tokens, and Weft cannot "
            "tell which part of it belongs to a rank's tokens. Use cp=1 for this model."
        )
    places_T = context.places(tokens.shape[1], tokens.device)
    looks = hugging_face.looks_at_positions(model, signature, given)
    positions = given.get("position_ids") if looks else None
    ids_BT = _document_ids(context, given.get("attention_mask"), positions, places_T, tokens.shape[0])
    if given.get("position_ids") is None:
        assert context.positions is not None
        given["position_ids"] = context.positions(context, tokens, given.get("attention_mask"), places_T)
    if ids_BT is None:
        given["attention_mask"] = torch.empty((1, 1, 1, 0), dtype=torch.int64, device=tokens.device)
    else:
        given["attention_mask"] = ids_B11T = ids_BT[:, None, None]
        remember_whole(ids_B11T, whole_values(ids_BT))
        context.divide(tokens.shape[1] * context.axis.size, ids_B11T)  # in front of the blocks, which may be compiled
    if "use_cache" in signature.parameters:
        given["use_cache"] = False  # it would hold keys and values that nobody asks for
    return (), {**given, **extra}


def _document_ids(
    context: Context, mask: Tensor | None, positions: Tensor | None, places_T: Tensor, batch: int
) -> Tensor | None:
    """An id for each token, by the rules of transformers: a mask is padding; without one, documents are where
    positions begin anew (in a model that fills no cache: `use_cache=False`)."""
    if mask is not None:
        if mask.shape != (batch, places_T.shape[0]):
            raise ModelError(
                f"attention_mask of shape {tuple(mask.shape)}: a cut sequence takes one of (batch, tokens of this "
                f"rank) = {(batch, places_T.shape[0])}. Leave it out, or put it in the batch."
            )
        ids_BT = torch.where(mask.bool(), 0, PADDING)
        if (whole := whole_values(mask)) is not None:
            remember_whole(ids_BT, torch.where(whole.bool(), 0, PADDING))
        return ids_BT
    if positions is None:
        return None
    if positions.ndim != 2:
        raise ModelError(
            f"position_ids of shape {tuple(positions.shape)}: context parallelism takes (batch, sequence). Use cp=1."
        )
    # Where a document begins in the sequence: constant in it, and larger in the next.
    first = getattr(context.positions, "first", 0)  # else an id could be that of padding
    ids_BT = (places_T - positions + first).expand(batch, -1)
    if (whole := whole_values(positions)) is not None:
        remember_whole(ids_BT, (torch.arange(whole.shape[1]) - whole + first).expand(batch, -1))
    return ids_BT


def _after(model: nn.Module, args: Any, output: Any) -> None:
    context: Context | None = getattr(model, _ATTRIBUTE, None)
    if context is None or not context.in_use:
        return
    if context.num_calls == 0:
        raise ModelError(
            f"cp={context.axis.size}: {type(model).__name__} does not compute its attention through transformers' "
            "attention functions. Use cp=1 for this model."
        )
    if not context.has_looked:
        _check_blocks(model, context)


def _check_blocks(model: nn.Module, context: Context) -> None:
    """ModelError where a layer did not call attention in the first forward: something else mixes its tokens."""
    callers, context.callers, context.has_looked = context.callers, set(), True
    for path, block in repeated_blocks(model).items():
        is_layer = next(block.children(), None) is not None
        if is_layer and callers.isdisjoint(block.modules()):
            raise ModelError(
                f"cp={context.axis.size}: {path} ({type(block).__name__}) called no attention, and Weft cuts "
                "sequences only through attention. Use cp=1 for this model."
            )
