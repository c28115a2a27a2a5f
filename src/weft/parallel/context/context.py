"""Public API of context parallelism: prepare a model, shard a batch, and run with sharded sequences."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from weft.comm.mesh import Mesh
from weft.errors import ModelError, WeftWarning
from weft.memory.opaque import Opaque
from weft.models.decoder import Decoder
from weft.models.inspect import hugging_face, token_flow
from weft.parallel.context.apply import Context
from weft.parallel.context.attention import (
    register_attention_operator,
    register_core_operators,
    replace_attention,
    replace_cores,
)
from weft.parallel.context.full_mixers import (
    FullSequenceMixers,
    chains_of,
    check_mixers,
    find_own_mixers,
    gather_mixers,
    mixers_of,
)
from weft.parallel.context.full_samples import FullSamples, FullSamplesPlan, apply_full_samples, sharded_paths
from weft.parallel.context.state_layers import can_keep_tokens
from weft.parallel.state.placement import Placement

_ATTRIBUTE = "_weft_context"
_MIXERS = "_weft_mixers"  # modules of a custom model that need all tokens


def check_sequences(model: nn.Module, mesh: Mesh, example: Any = None) -> str:
    """Check a full model before it is sharded, and return the reason if its attention needs all tokens.

    Returns "" if attention itself can be sharded. Pass the result to `apply_context`. example: arguments of a forward
    of a custom model, or None to generate them.

    Raises ModelError if attention can neither be replaced nor get all tokens, or does not support the plan's pp, sp or
    compile. Raises LayoutError if a block mixes tokens outside the modules that would get all tokens.
    """
    if mesh["cp"].size == 1 or isinstance(model, Decoder):
        return ""
    is_own = not hugging_face.is_hugging_face(model)
    why = f"{type(model).__name__} is a model of your own" if is_own else token_flow.why_fixed_attention(model)
    if why:
        if is_own and mesh.plan.pp > 1:
            raise ModelError(f"cp={mesh['cp'].size} pp={mesh.plan.pp}: {why}. Use pp=1 or cp=1.")
        if mesh.plan.sp:
            raise ModelError(
                f"cp={mesh['cp'].size} sp=on: {why}, so it gets all tokens on every rank, and sp would shard them "
                "again. Use sp=off or cp=1 for this model."
            )
        if mesh.plan.compile:
            raise ModelError(
                f"cp={mesh['cp'].size} compile=on: {why}, so it gets all tokens on every rank, and compiled blocks do "
                "not do that yet. Use compile=off or cp=1 for this model."
            )
        if is_own:
            setattr(model, _MIXERS, find_own_mixers(model, mesh["cp"], example))
        else:
            check_mixers(model, mesh["cp"])
    return why


def apply_context(
    model: nn.Module,
    mesh: Mesh,
    why: str = "",
    runs: Sequence[Sequence[str]] | None = None,
    full_samples: FullSamplesPlan | None = None,
) -> dict[str, Placement]:
    """Make `model` take sequences that are sharded over `mesh["cp"]`, in place. Does nothing if cp is 1.

    Returns the placements of changed parameters, which is empty: every cp rank stores full parameters. Raises
    ModelError if the model's attention cannot be replaced.

    Args:
        why: result of `check_sequences` for the full model.
        runs: paths of the blocks of each pipeline stage on this rank; None if all blocks are on this rank.
        full_samples: result of `choose_full_samples` for the full model.
    """
    if mesh["cp"].size == 1:
        return {}
    if full_samples is not None:
        context = _take_full_samples(model, mesh, full_samples)
    elif why:
        context = _give_all(model, mesh, why, runs)
    elif hugging_face.is_hugging_face(model):
        heads = hugging_face.attention_heads(model)
        assert heads is not None  # else attention gets all tokens
        context = Context(mesh.plan, mesh["cp"], *heads)
        replace_attention(model, context)
    elif isinstance(model, Decoder):
        context = Context(mesh.plan, mesh["cp"], model.spec.num_heads, model.spec.num_kv_heads)
        replace_cores(model, context)
    else:
        raise ModelError(f"cp={mesh['cp'].size}: {type(model).__name__} was not checked by check_sequences. Use cp=1.")
    setattr(model, _ATTRIBUTE, context)
    return {}


def _give_all(model: nn.Module, mesh: Mesh, why: str, runs: Sequence[Sequence[str]] | None) -> FullSequenceMixers:
    here = chains_of(model) if runs is None else runs
    own: tuple[str, ...] | None = getattr(model, _MIXERS, None)
    mixers = mixers_of(model) if own is None else own
    blocks = [path for run in here for path in run]
    context = FullSequenceMixers(mesh.plan, mesh["cp"], blocks, mixers, is_own=own is not None)
    gather_mixers(model, context, here, mixers)
    modules = dict(model.named_modules())
    cp = mesh["cp"].size
    if mesh.rank == 0 and not all(can_keep_tokens(modules[path], cp) for path in mixers if path in modules):
        warnings.warn(
            f"cp={cp}: {why}, so modules that mix tokens get all of them on every rank of cp, except layers that "
            "carry a state if cp divides their heads. Results equal one process, and the rest of each block is "
            "sharded, but attention costs every rank the memory and time of a full sequence, and each of its calls "
            "gathers the hidden states. cp_mode has no effect.",
            WeftWarning,
            stacklevel=2,
        )
    return context


def _take_full_samples(model: nn.Module, mesh: Mesh, chosen: FullSamplesPlan) -> FullSamples:
    if mesh.rank == 0:
        kept = "".join(f" Every rank computes {path or 'the model'} for all tokens." for path, _ in chosen.undivided)
        warnings.warn(
            f"cp={mesh['cp'].size}: every rank gets full samples, and tokens are sharded only in the blocks of "
            f"{', '.join(sharded_paths(chosen))}, between their modules that mix tokens. Embeddings, attention, heads "
            f"and the loss cost every rank the memory and time of full samples.{kept}",
            WeftWarning,
            stacklevel=2,
        )
    return apply_full_samples(model, mesh, chosen)


def takes_full_samples(model: nn.Module) -> bool:
    """Return True if every cp rank gets full samples and computes the same loss."""
    context = context_of(model)
    return context is not None and not context.shards_samples


def counts_loss(model: nn.Module) -> bool:
    """Return True if this rank's loss is part of the sum over ranks. False if another cp rank counts the same loss."""
    context = context_of(model)
    return context is None or context.counts_loss


def register_context_operators(model: nn.Module, recomputes: bool) -> None:
    """Make each attention call over sharded sequences one operator in compiled blocks. Call it before compiling."""
    if context_of(model) is not None:
        opaque = Opaque(is_attention=True, recomputes=recomputes)
        register_core_operators(model, opaque)
        register_attention_operator(model, opaque)


def context_of(model: nn.Module) -> Context | None:
    """Return the context that `apply_context` attached to this model, or None if its sequences are not sharded."""
    return getattr(model, _ATTRIBUTE, None)


def shard_sequence(model: nn.Module, batch: Any) -> Any:
    """Return this rank's shard of a batch of full sequences, for a loop of your own.

    It has this rank's tokens of each tensor whose dim 1 is the sequence. Returns the batch unchanged if the model's
    sequences are not sharded. Labels must already be shifted.

    Raises:
        ModelError: if every cp rank gets full samples, because the loop would count each loss cp times.
    """
    if takes_full_samples(model):
        raise ModelError(
            "cp: every rank gets full samples of this model, and a loop of your own would count each loss on every "
            "rank. Use run.train_step, or cp=1."
        )
    return local_batch(model, batch)


def local_batch(model: nn.Module, batch: Any) -> Any:
    """Return what this rank computes of a batch: its tokens, or full samples of which only the first rank counts."""
    context = context_of(model)
    return batch if context is None else context.shard(batch)


def sequence_in_use(model: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which to run forward and backward on a batch from `shard_sequence`.

    Outside it, the model takes full sequences.
    """
    context = context_of(model)
    return contextlib.nullcontext() if context is None else context.use()
