"""Attention whose dropout depends only on token positions, and context-parallel attention of models.

B sequences, T queries, S keys, H query heads, K key-value heads, C head dim.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from weft.errors import ModelError
from weft.memory.opaque import Handle, Opaque
from weft.models.attention import Attention, SdpaCore, Visible
from weft.models.decoder import Decoder
from weft.models.inspect import hugging_face
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.dry_run import call_traced
from weft.parallel.context.apply import Context
from weft.parallel.context.full_mixers import BESIDE_TOKENS
from weft.parallel.context.kernels import (
    AttentionDrop,
    AttentionWindow,
    Noise,
    Scoring,
    attend_plainly,
    plain_gradients,
)
from weft.parallel.context.modes import PADDING, full_sequence, full_values, remember_full
from weft.private_torch import uncompiled, without_modes


def dropped_attention(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    drop: AttentionDrop,
) -> Tensor:  # fmt: skip
    """Attend as F.scaled_dot_product_attention does, with dropout by position. Returns (B, H, T, C).

    Args:
        mask: bool (True: attend) or a float added to scores, broadcastable to (B, H, T, S); None for no mask.
        is_causal: True if each token attends only to itself and earlier tokens.
        drop: dropout of attention weights, as a function of their positions.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    args = (q_BHTC, k_BKSC, v_BKSC, mask, is_causal, scale, drop)
    if has_torch_function((q_BHTC, k_BKSC, v_BKSC)):
        return handle_torch_function(dropped_attention, (q_BHTC, k_BKSC, v_BKSC), *args)
    return _Dropped.apply(*args)


#: Marker that `weft.memory` looks for.
dropped_attention.is_attention = True


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
        drop: AttentionDrop,
    ) -> Tensor:  # fmt: skip
        ctx.is_causal, ctx.scoring, ctx.drop, ctx.mask = is_causal, Scoring(scale), drop, mask
        with without_modes():
            noise = _noise(drop, q_BHTC, k_BKSC)
            out_BHTC, lse_BHT = attend_plainly(q_BHTC, k_BKSC, v_BKSC, is_causal, ctx.scoring, noise, mask)
        ctx.save_for_backward(q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT)
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, grad_BHTC: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT = ctx.saved_tensors
        noise = _noise(ctx.drop, q_BHTC, k_BKSC)
        grads = plain_gradients(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, ctx.is_causal, ctx.scoring, noise, ctx.mask
        )
        return (*grads, None, None, None, None)


def _noise(drop: AttentionDrop, q_BHTC: Tensor, k_BKSC: Tensor) -> Noise:
    queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (q_BHTC, k_BKSC))
    return drop.noise(drop.lines(q_BHTC.shape[1], queries), keys)


# Context parallelism of Weft's decoders: the core of each attention is replaced.


class ContextCore(SdpaCore):
    """Attention over a sharded sequence while the context is in use, otherwise the decoder's own core."""

    def __init__(self, context: Context):
        super().__init__()
        self.context: Context | None = context
        self.handle = Handle()

    @property
    def takes_ids(self) -> bool:
        """True while the sequence is sharded: a document can continue on other ranks, so its id is needed."""
        return self.context is not None and self.context.in_use

    def forward(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, visible: Visible) -> Tensor:
        """Return the attention output, (B, H, T, C)."""
        if self.context is None or not self.context.in_use:
            return super().forward(q_BHTC, k_BKSC, v_BKSC, visible)
        ids_BT = visible.document_ids_BT
        if self.handle.is_open:
            inputs = [q_BHTC, k_BKSC, v_BKSC] if ids_BT is None else [q_BHTC, k_BKSC, v_BKSC, ids_BT]
            return self.handle(q_BHTC.shape, q_BHTC.dtype, inputs)
        return self.attend(q_BHTC, k_BKSC, v_BKSC, ids_BT)

    @uncompiled
    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, ids_BT: Tensor | None = None) -> Tensor:
        """Attend over the full sequence. Returns (B, H, T, C)."""
        assert self.context is not None
        return self.context.attend(q_BHTC, k_BKTC, v_BKTC, Scoring(q_BHTC.shape[-1] ** -0.5), ids_BT)


def replace_cores(model: nn.Module, context: Context) -> int:
    """Replace the core of each attention of the model with a ContextCore. Returns the number of replaced cores.

    In a Decoder, missing positions are then filled in with positions in the full sequence.
    """
    found = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in found:
        attention.core = ContextCore(context)
    if isinstance(model, Decoder):
        model.register_forward_pre_hook(_FillPositions(context, model), with_kwargs=True)
    return len(found)


def register_core_operators(model: nn.Module, opaque: Opaque) -> None:
    for core in [module for module in model.modules() if isinstance(module, ContextCore)]:
        core.handle = opaque.handle(_attend, core)


def _attend(core: ContextCore, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    del numbers
    return core.attend(*inputs)


class _FillPositions:
    """Forward pre-hook that fills in missing positions with positions in the full sequence."""

    def __init__(self, context: Context, model: Decoder):
        self._context: Context | None = context
        self._signature = inspect.signature(model.forward)
        self._longest = model.spec.max_seq_len if model.pos_embed is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _FillPositions:
        copied = object.__new__(_FillPositions)
        copied.__dict__ = {**self.__dict__, "_context": None}
        return copied

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        context = self._context
        if context is None or not context.in_use:
            return None
        given = self._signature.bind(*args, **kwargs).arguments
        if given.get("cache") is not None:
            raise ModelError("cache: a sharded sequence has no cache. Generate outside training steps.")
        ids_BT = given["input_ids_BT"]
        seq_len = ids_BT.shape[1] * context.axis.size
        if self._longest is not None and seq_len > self._longest:
            raise ModelError(
                f"sequence of {seq_len} tokens: the model has a table of {self._longest} positions. "
                f"Use at most {self._longest} tokens, or a larger model.max_seq_len."
            )
        if given.get("positions_BT") is None:
            given["positions_BT"] = context.token_positions(ids_BT.shape[1], ids_BT.device)[None]
        context.divide(seq_len, given.get("document_ids_BT"))  # before the blocks, which may be compiled
        return (), given


# Context parallelism of Hugging Face models, through their own registry of attention functions.

#: Attention functions are registered under this prefix plus the name of the function they replace.
PREFIX = "weft_context_parallel_"
_ATTRIBUTE, _OWN, _HANDLE = "_weft_context", "_weft_own_attention", "_weft_handle"
_SITE = "_weft_site"  # attribute in which dropout by position stores a module's site
#: Arguments of some models' attention that are unsupported with sharded sequences.
_UNKNOWN = ("position_bias", "head_mask", "indices")


def replace_attention(model: Any, context: Context) -> None:
    """Replace the attention functions that a Hugging Face model looks up by name.

    The new ones call `attend_sharded` while the context is in use, and otherwise the original function.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    context.positions = positions_of(model)
    copies: dict[int, Any] = {}
    for module in model.modules():
        own, config = hugging_face.attention_name(module), getattr(module, "config", None)
        if own is None:
            continue
        if id(config) not in copies:
            # Pure functions under a separate name: other models' lookups are not affected.
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


def register_attention_operator(model: nn.Module, opaque: Opaque) -> None:
    for module in model.modules():
        if hasattr(module, _ATTRIBUTE) and hasattr(module, _OWN):
            setattr(module, _HANDLE, opaque.handle(_attend_hugging_face, module))


def _attend_hugging_face(module: nn.Module, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    query, key, value = inputs[:3]
    ids_BT = inputs[3] if len(inputs) > 3 and inputs[3].numel() else None
    scaling, is_causal, window, softcap = (None if math.isnan(one) else one for one in numbers)
    sink_H = inputs[4] if len(inputs) > 4 else None
    asked = {"sliding_window": None if window is None else int(window), "softcap": softcap, "s_aux": sink_H}
    causal = None if is_causal is None else bool(is_causal)
    return _attend_sharded(module, getattr(module, _ATTRIBUTE), query, key, value, ids_BT, 0.0, scaling, causal, asked)


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
    """Return (attention, None), as transformers' attention functions: (B, H, T, C) in, (B, T, H, C) out.

    If no context is in use, call the model's own function. Raises ModelError for a mask that is made by the model.
    """
    context: Context | None = getattr(module, _ATTRIBUTE, None)
    if context is None or not context.in_use:
        own = hugging_face.attention_function(module, getattr(module, _OWN, "sdpa"))
        return own(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    ids_BT = None if attention_mask is None or attention_mask.numel() == 0 else attention_mask
    if ids_BT is not None and (ids_BT.is_floating_point() or ids_BT.shape[1:3] != (1, 1)):
        raise ModelError(
            f"cp={context.axis.size}: {type(module).__name__} makes its own attention mask, which is not supported "
            "for a sharded sequence. Use cp=1 for this model."
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
    return _attend_sharded(module, context, query, key, value, ids_BT, dropout, scaling, is_causal, kwargs), None


@uncompiled
def _attend_sharded(
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
    """Compute a layer's attention over the sharded sequence with the options of the call. Returns (B, T, H, C)."""
    _refuse(module, context, dropout, asked)
    refuse_chunks(module, context, key.shape[2] * context.axis.size)
    if not context.has_looked:
        context.callers.add(module)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = asked.get("sliding_window")
    whole = key.shape[2] * context.axis.size
    before = None if window is None or window >= whole else window - 1  # a window includes the token itself
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    drop = getattr(module, _SITE).attention(dropout, *query.shape[:2], query.device) if dropout else None
    scoring = Scoring(scale, AttentionWindow(before, 0 if causal else before), asked.get("softcap"), drop)
    return context.attend(query, key, value, scoring, ids_BT, asked.get("s_aux")).transpose(1, 2)


def _refuse(module: nn.Module, context: Context, dropout: float, asked: dict[str, Any]) -> None:
    """Raise ModelError for options that attention over a sharded sequence does not support."""
    where = f"cp={context.axis.size}: {type(module).__name__}"
    if dropout and not hasattr(module, _SITE):
        raise ModelError(
            f"{where} drops {dropout:g} of its attention weights in training, and Weft finds that rate under none of "
            "the usual names. Store it as module.attention_dropout, or set it to 0."
        )
    if unknown := _unknown(asked):
        raise ModelError(
            f"{where} passes {unknown[0]} to its attention, which is not supported for a sharded sequence. Use cp=1."
        )


def _unknown(asked: dict[str, Any]) -> list[str]:
    return [name for name in _UNKNOWN if asked.get(name) is not None]


def _before(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Forward pre-hook: pass positions in the full sequence, and pass document ids as the attention mask.

    Raises ModelError if the model takes no tokens or no positions, or gets images or audio in addition to tokens.
    """
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
            f"cp={context.axis.size}: {type(model).__name__} has no input_ids or no position_ids, so its positions "
            "in the sequence cannot be set. Use cp=1 for this model."
        )
    if others := [name for name in BESIDE_TOKENS if given.get(name) is not None]:
        raise ModelError(
            f"cp={context.axis.size}: {type(model).__name__} takes {others[0]} in addition to its tokens, and it is "
            "unclear which part belongs to a rank's tokens. Use cp=1 for this model."
        )
    places_T = context.token_positions(tokens.shape[1], tokens.device)
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
        remember_full(ids_B11T, full_values(ids_BT))
        context.divide(tokens.shape[1] * context.axis.size, ids_B11T)  # before the blocks, which may be compiled
    if "use_cache" in signature.parameters:
        given["use_cache"] = False  # it would hold unused keys and values
    return (), {**given, **extra}


def _document_ids(
    context: Context, mask: Tensor | None, positions: Tensor | None, places_T: Tensor, batch: int
) -> Tensor | None:
    """Return a document id per token, (B, T), by the rules of transformers, or None without mask and positions.

    A mask marks padding. Without a mask and a cache (`use_cache=False`), a document begins where positions restart.
    Raises ModelError if the mask or the positions have an unsupported shape.
    """
    if mask is not None:
        if mask.shape != (batch, places_T.shape[0]):
            raise ModelError(
                f"attention_mask of shape {tuple(mask.shape)}: a sharded sequence needs the shape (batch, tokens of "
                f"this rank) = {(batch, places_T.shape[0])}. Leave it out, or put it in the batch."
            )
        ids_BT = torch.where(mask.bool(), 0, PADDING)
        if (whole := full_values(mask)) is not None:
            remember_full(ids_BT, torch.where(whole.bool(), 0, PADDING))
        return ids_BT
    if positions is None:
        return None
    if positions.ndim != 2:
        raise ModelError(
            f"position_ids of shape {tuple(positions.shape)}: context parallelism needs (batch, sequence). Use cp=1."
        )
    # Position of the first token of the token's document: constant in a document, and larger in the next one.
    first = getattr(context.positions, "first", 0)  # else an id could equal PADDING
    ids_BT = (places_T - positions + first).expand(batch, -1)
    if (whole := full_values(positions)) is not None:
        remember_full(ids_BT, (torch.arange(whole.shape[1]) - whole + first).expand(batch, -1))
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
    """Raise ModelError if a block did not call attention in the first forward: other code may mix its tokens.

    Blocks without submodules are not checked.
    """
    callers, context.callers, context.has_looked = context.callers, set(), True
    for path, block in repeated_blocks(model).items():
        is_layer = next(block.children(), None) is not None
        if is_layer and callers.isdisjoint(block.modules()):
            raise ModelError(
                f"cp={context.axis.size}: {path} ({type(block).__name__}) called no attention, and sequences are "
                "sharded only through attention. Use cp=1 for this model."
            )


def refuse_chunks(module: nn.Module, context: Context, seq_len: int) -> None:
    """Raise ModelError for chunked attention (Llama 4), which needs a mask, if the sequence is longer than a chunk."""
    if 0 < (chunk := hugging_face.attention_chunk(module)) < seq_len:
        raise ModelError(
            f"cp={context.axis.size}: {type(module).__name__} attends within chunks of {chunk} tokens, which a "
            f"sharded sequence of {seq_len} does not support. Use cp=1, or sequences of at most {chunk} tokens."
        )


# Default positions of a model.


#: Function of RoBERTa in transformers that counts positions: a method of the embeddings, in earlier versions a
#: module-level function.
_COUNTS = "create_position_ids_from_input_ids"

#: Function from a rank's (tokens or their embeddings, mask, token indices) to positions, (B, T) or (1, T).
Positions = Callable[[Context, Tensor, Tensor | None, Tensor], Tensor]


def positions_of(model: nn.Module) -> Positions:
    """Return the function that computes this model's default positions."""
    for module in model.modules():
        count = getattr(module, _COUNTS, None) or getattr(sys.modules.get(type(module).__module__), _COUNTS, None)
        padding = getattr(module, "padding_idx", None)
        if (
            count is not None
            and isinstance(padding, int)
            and isinstance(getattr(module, "position_embeddings", None), nn.Embedding)
        ):
            return _PastPadding(count, padding)
        if isinstance(module, nn.Embedding) and {"attention_mask", "position_ids"} <= _arguments(module):
            return _by_mask
    return _positions


def _arguments(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def _positions(context: Context, tokens: Tensor, mask: Tensor | None, places_T: Tensor) -> Tensor:
    del context, tokens, mask
    return places_T[None]


class _PastPadding:
    """Default positions of RoBERTa: they start at padding_idx + 1, and padding has position padding_idx."""

    def __init__(self, count: Callable[[Tensor, int], Any], padding_idx: int):
        self._count, self._padding_idx = count, padding_idx
        self.first = padding_idx + 1

    def __call__(self, context: Context, tokens: Tensor, mask: Tensor | None, places_T: Tensor) -> Tensor:
        del mask
        if tokens.is_floating_point():  # embeddings do not show which tokens are padding
            return places_T[None] + self.first
        order = context.order(places_T.shape[0] * context.axis.size)
        return order.shard(self._count(full_sequence(tokens, context.axis, order), self._padding_idx))


def _by_mask(context: Context, tokens: Tensor, mask: Tensor | None, places_T: Tensor) -> Tensor:
    del tokens
    if mask is None:
        return places_T[None]
    order = context.order(places_T.shape[0] * context.axis.size)
    seen_BS = full_sequence(mask.to(torch.int64), context.axis, order)
    return order.shard(seen_BS.cumsum(1) * seen_BS - 1)


# Trial on the meta device.


def why_attention_fails(model: nn.Module) -> str:
    """Return the reason why a transformers model cannot run on a rank's tokens with sharded attention, or "".

    Runs one forward without values, with the arguments that the model gets from `replace_attention`. Code that reads
    masks or positions of full sequences fails. Chunked attention needs a mask, and is refused too.
    """
    where = f"{type(model).__name__} fails on a rank's part of each sequence"
    layers = (module for module in model.modules() if hasattr(module, "layer_idx"))
    if any(hugging_face.attention_chunk(layer) > 0 for layer in layers):
        return f"{type(model).__name__} attends within chunks of tokens"
    example = {
        "input_ids": torch.zeros(2, 8, dtype=torch.int64),
        "position_ids": torch.arange(8)[None],
        "attention_mask": torch.empty((1, 1, 1, 0), dtype=torch.int64),
    }
    try:
        call_traced(model, example, lambda inputs: _stand_in(model))
    except ModelError as error:
        try:
            call_traced(model, {"input_ids": example["input_ids"]}, lambda inputs: contextlib.nullcontext())
        except ModelError:
            return ""  # such a model cannot be tried
        return f"{where} ({error})"
    return ""


@contextlib.contextmanager
def _stand_in(model: nn.Module) -> Iterator[None]:
    """Replace attention functions by one that keeps tokens apart. Restores the modules' configs."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before: list[tuple[Any, Any]] = []
    for module in model.modules():
        own = hugging_face.attention_name(module)
        config: Any = getattr(module, "config", None)
        if own is not None:
            name = f"{PREFIX}trial_{own}"
            ALL_ATTENTION_FUNCTIONS.register(name, _attend_to_self)
            if own in ALL_MASK_ATTENTION_FUNCTIONS:
                ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
            before.append((module, config))
            changed: Any = copy.copy(config)
            changed._attn_implementation_internal = name
            module.config = changed
    try:
        yield
    finally:
        for module, config in before:
            module.config = config


def _attend_to_self(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return each token's own values, (B, T, H, C), as an attention function of transformers.

    Raises ModelError for a mask that the model made.
    """
    del key, kwargs
    if attention_mask is not None and attention_mask.numel():
        raise ModelError(f"{type(module).__name__} makes its own attention mask")
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None
