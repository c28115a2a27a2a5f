"""How one block runs under a policy: what of its forward is kept for backward, and what is computed again.

torch's non-reentrant checkpoint does the work. It replays the block's forward, with the same random numbers, when
backward first asks for something that was not kept, and stops where the last such thing has been made again. What is
kept is kept as autograd keeps it: hooks on saved tensors, such as those that bring it to the host, see all of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from weft.comm.links import unobserved
from weft.errors import ModelError
from weft.memory.private_torch import StoredValue, recompute_word
from weft.private_torch import storage_key, tree_leaves, tree_map_only, version_of
from weft.structure.cost import is_worth_keeping

Forward = Callable[..., Any]

#: Calls that hold the core of attention. nn.MultiheadAttention gives no access to its core alone.
ATTENTION_CALLS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


#: They give parts with versions of their own: torch's recurrent layers change those in place, and nothing tells.
_SPLITS = (torch.ops.aten.unsafe_chunk, torch.ops.aten.unsafe_split, torch.ops.aten.unsafe_split_with_sizes)

#: Batched products: (batch, n, k) times (batch, k, m), the last two arguments.
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def is_attention(func: Any) -> bool:
    """Whether a function that a mode was shown is attention: one of torch's, or one that says so of itself."""
    return func in ATTENTION_CALLS or getattr(func, "is_attention", False)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a block computes again in backward.

    name: "none", "full", "attention" or "selective". saved: which heavy operations keep their output under
    "selective", by their order in forward. buffers: names of those that forward changes.
    """

    name: str
    saved: frozenset[int] = frozenset()
    buffers: tuple[str, ...] = ()


def run_block(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `forward(block, *args, **kwargs)` under a policy."""
    # Under every policy: a cache that one block fills is no longer empty for the next.
    args, kwargs = [without_cache(value) for value in args], {k: without_cache(v) for k, v in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    if policy.name == "none":
        return forward(block, *args, **kwargs)
    if policy.name == "attention":
        with _RecomputedAttention():
            return forward(block, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _run_traced(policy, block, forward, args, kwargs)
    selective = policy.name == "selective"
    split: set[int] = set()
    keeping, replaying = _selective_contexts(policy.saved, split) if selective else _no_contexts()
    if policy.buffers:
        # Batch statistics and their like count a batch once: the replay writes into copies.
        replaying = _both(spare_buffers(block, policy.buffers), replaying)
    if (state := getattr(block, "_weft_travels", None)) is not None:
        # What forward reads besides its arguments, and another microbatch may have changed when the replay comes.
        replaying = _both(state.travelling(), replaying)
    pair = keeping, replaying
    outputs = checkpoint(forward, block, *args, use_reentrant=False, context_fn=lambda: pair, **kwargs)
    if selective:
        _keep_as_autograd_does(keeping.storage, split)
    return outputs


def _run_traced(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same inside of torch.compile, whose tracer takes no contexts but torch's own.

    Compiled code writes buffers once, whatever it computes twice.
    """
    if policy.name == "selective":
        contexts = partial(_selective_contexts, policy.saved)
        return checkpoint(forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)


def is_heavy(op: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is worth keeping: torch counts FLOPs for it, and its result is not the larger side.

    Asked before the operation runs: torch 2.11 does not show a policy what an operation gave.
    """
    packet = getattr(op, "overloadpacket", None)
    if packet not in flop_registry and "scaled_dot_product" not in str(packet):
        return False
    if packet not in _BATCHED:
        return True
    left, right = args[-2:]
    made = left.shape[0] * left.shape[1] * right.shape[2]
    return is_worth_keeping(packet, made, sum(arg.numel() for arg in args))


def without_cache(value: Any) -> Any:
    """None in place of an empty key-value cache: replaying a block would add to it twice.

    Models of Hugging Face make one in every training forward unless they are told use_cache=False. Raises
    ModelError where tokens are in it already.
    """
    if value is None or isinstance(value, torch.Tensor) or not type(value).__name__.endswith("Cache"):
        return value
    count = getattr(value, "get_seq_length", None)
    if count is None or count() > 0:
        raise ModelError(
            f"{type(value).__name__} in a recomputed block: it holds tokens already, and replaying the block would "
            f"add to it twice. Use recompute=none, or train without a cache."
        )
    return None


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What a hook on saved tensors returns to keep a tensor as it is.

    The tensor itself would not do: the output of an operation that saves it holds that operation, which would hold it.
    Backward breaks the ring; where none comes, block and mesh would stay for ever, and no garbage collector sees it.
    """
    with unobserved():
        return tensor.detach()


@contextlib.contextmanager
def spare_buffers(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While inside, the named buffers are copies: what is written into them is lost."""
    owners = [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in names]
    originals = [getattr(owner, name) for owner, name in owners]
    for (owner, name), tensor in zip(owners, originals, strict=True):
        setattr(owner, name, tensor.clone() if tensor is not None else None)
    try:
        yield
    finally:
        for (owner, name), tensor in zip(owners, originals, strict=True):
            setattr(owner, name, tensor)


def _no_contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _selective_contexts(saved: frozenset[int], split: set[int] | None = None) -> tuple[Any, Any]:
    """torch's pair. split: takes up the storages that forward has cut into parts which it may change unseen."""
    forward, replay = itertools.count(), itertools.count()  # torch 2.11 asks again when it replays, later ones do not

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if split is not None and getattr(op, "overloadpacket", None) in _SPLITS:
            split.add(_storage(args[0]))
        if is_heavy(op, args) and next(replay if context.is_recompute else forward) in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


class _Keep(torch.autograd.Function):
    """Saves one tensor for a backward that never comes: it is asked for by hand."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()


class _Kept:
    """Stands for an entry of torch's storage of selective checkpoints, and is asked by its name for the value."""

    def __init__(self, entry: StoredValue):
        anchor = torch.empty(0, requires_grad=True)
        self._output = _Keep.apply(anchor, entry.get_val(False))  # torch 2.11 frees what a node saved with its output

    def get_val(self, allow_cache_entry_mutation: bool) -> torch.Tensor:
        del allow_cache_entry_mutation  # autograd looks after changes in place
        return self._output.grad_fn.saved_tensors[0]


def _keep_as_autograd_does(storage: dict[Any, Any], split: set[int]) -> None:
    """Let what a selective checkpoint has stored, a list or a dict for each operation, be saved tensors of autograd.

    What forward changed in place after it was stored is not what the operation gave: that is computed again.
    """
    for entries in storage.values():
        for key in range(len(entries)) if isinstance(entries, list) else list(entries):
            kept = [one for one in tree_leaves(entries[key]) if isinstance(one, StoredValue)]
            if any(_was_changed(one, split) for one in kept):
                entries[key] = _again()
            else:
                entries[key] = tree_map_only(StoredValue, _as_saved, entries[key])


def _was_changed(entry: StoredValue, split: set[int]) -> bool:
    tensor = entry.val
    if not isinstance(tensor, torch.Tensor):
        return False
    return version_of(tensor) != entry.version or _storage(tensor) in split


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _again() -> Any:
    """What tells torch to compute an operation again; ModelError where this torch has no such word."""
    if (word := recompute_word()) is None:
        raise ModelError(
            f"recompute=selective: a block changes in place what a matrix product gave, and torch {torch.__version__} "
            f"cannot compute that again alone. Use recompute=full, or leave out inplace=True."
        )
    return word


def _as_saved(entry: StoredValue) -> Any:
    return _Kept(entry) if isinstance(entry.val, torch.Tensor) else entry


class _RecomputedAttention(TorchFunctionMode):
    """While active, calls of fused attention keep their inputs alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_attention(func):
            return checkpoint(func, *args, use_reentrant=False, **kwargs)
        return func(*args, **kwargs)
