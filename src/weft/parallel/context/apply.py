"""The doors of context parallelism: prepare a model, cut a batch, say when cut sequences are in use."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from weft.errors import ModelError
from weft.memory import Opaque
from weft.mesh import Mesh
from weft.models import Decoder
from weft.parallel.context.attention_functions import hold_attention, replace_attention
from weft.parallel.context.context_mode import Context
from weft.parallel.context.decoder_attention import hold_cores, replace_cores
from weft.parallel.placement import Placement
from weft.structure import hugging_face

_ATTRIBUTE = "_weft_context"


def apply_context(model: nn.Module, mesh: Mesh) -> dict[str, Placement]:
    """Let `model` take sequences that are cut over `mesh["cp"]`, in place. Nothing happens where cp is 1.

    Returns the placements of the parameters it changed: none, since every rank of cp keeps them whole.

    Raises:
        ModelError: for a model whose attention cannot be replaced from outside.
    """
    if mesh["cp"].size == 1:
        return {}
    if hugging_face.is_hugging_face(model):
        if (heads := hugging_face.attention_heads(model)) is None:
            raise ModelError(
                f"cp={mesh['cp'].size}: {type(model).__name__} gives no single number of attention heads, and Weft "
                "cuts sequences only through attention. Use cp=1 for this model."
            )
        context = Context(mesh.plan, mesh["cp"], *heads)
        replace_attention(model, context)
    elif isinstance(model, Decoder):
        context = Context(mesh.plan, mesh["cp"], model.spec.num_heads, model.spec.num_kv_heads)
        replace_cores(model, context)
    else:
        raise ModelError(
            f"cp={mesh['cp'].size}: {type(model).__name__} is neither one of Weft's decoders nor one of transformers, "
            f"so its attention cannot be replaced. Use cp=1."
        )
    setattr(model, _ATTRIBUTE, context)
    return {}


def hold_context(model: nn.Module, recomputes: bool) -> None:
    """Let compiled blocks hold attention over cut sequences as one operator each. Call it before they are compiled."""
    if context_of(model) is not None:
        opaque = Opaque(is_attention=True, recomputes=recomputes)
        hold_cores(model, opaque)
        hold_attention(model, opaque)


def context_of(model: nn.Module) -> Context | None:
    """Return what `apply_context` made for this model; None where its sequences are whole."""
    return getattr(model, _ATTRIBUTE, None)


def cut_sequence(model: nn.Module, batch: Any) -> Any:
    """Return this rank's part of a batch of whole sequences: of each tensor whose dim 1 is the sequence, its tokens.

    The batch itself where the model's sequences are whole. Labels must be shifted already.
    """
    context = context_of(model)
    return batch if context is None else context.cut(batch)


def sequence_in_use(model: nn.Module) -> AbstractContextManager[None]:
    """Surround forward and backward of what `cut_sequence` gave. Outside of it the model takes whole sequences."""
    context = context_of(model)
    return contextlib.nullcontext() if context is None else context.use()
