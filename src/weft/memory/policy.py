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

_NO_CACHES = (torch.Tensor, bool, int, float, str, tuple, list, dict)


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
    choice = _Choice(policy.saved)
    keeping, replaying = choice.contexts() if selective else _no_contexts()
    if policy.buffers:
        # Batch statistics and their like count a batch once: the replay writes into copies.
        replaying = _both(spare_buffers(block, policy.buffers), replaying)
    if (state := getattr(block, "_weft_travels", None)) is not None:
        # What forward reads besides its arguments, and another microbatch may have changed when the replay comes.
        replaying = _both(state.travelling(), replaying)
    pair = keeping, replaying
    outputs = checkpoint(forward, block, *args, use_reentrant=False, context_fn=lambda: pair, **kwargs)
    if selective:
        choice.keep_as_autograd_does(keeping.storage)
    return outputs


def _run_traced(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same inside of torch.compile, whose tracer takes no contexts but torch's own.

    Compiled code writes buffers once, whatever it computes twice.
    """
    if policy.name == "selective":
        return checkpoint(
            forward, block, *args, use_reentrant=False, context_fn=partial(_contexts, policy.saved), **kwargs
        )
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
    # The plain types first: torch 2.11 breaks the graph at the name of a bool's type.
    if value is None or isinstance(value, _NO_CACHES) or not type(value).__name__.endswith("Cache"):
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


def _contexts(saved: frozenset[int]) -> tuple[Any, Any]:
    return _Choice(saved).contexts()


class _Choice:
    """What one run of a block under "selective" keeps, and what its replay computes again.

    saved: by order among heavy operations. split: the storages that forward has cut into parts which it may change
    unseen. kept: the orders of what was stored, by operation.
    """

    def __init__(self, saved: frozenset[int]) -> None:
        self.saved = set(saved)
        self.split: set[int] = set()
        self.kept: dict[Any, list[int]] = {}
        # Torch 2.11 asks again when it replays, later ones do not.
        self._forward, self._replay = itertools.count(), itertools.count()

    def contexts(self) -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(self._decide)

    def _decide(self, context: Any, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if getattr(op, "overloadpacket", None) in _SPLITS and not torch.compiler.is_compiling():
            self.split.add(_storage(args[0]))
        if not is_heavy(op, args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        order = next(self._replay if context.is_recompute else self._forward)
        if order not in self.saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            self.kept.setdefault(op, []).append(order)
        return CheckpointPolicy.MUST_SAVE

    def keep_as_autograd_does(self, storage: dict[Any, Any]) -> None:
        """Let what was stored, a list or a dict for each operation, be saved tensors of autograd.

        What forward changed in place after it was stored is not what the operation gave: that is computed again.
        """
        for op, entries in storage.items():
            changed = [
                key for key in _keys(entries) if any(_was_changed(one, self.split) for one in _stored(entries[key]))
            ]
            for key in _keys(entries):
                if key not in changed:
                    entries[key] = tree_map_only(StoredValue, _as_saved, entries[key])
            for key in reversed(changed):
                if isinstance(entries, list):  # torch 2.11 takes them in turn, where the policy says so
                    del entries[key]
                    self.saved.remove(self.kept[op][key])
                else:
                    entries[key] = recompute_word()


def _keys(entries: list[Any] | dict[int, Any]) -> list[int]:
    return list(range(len(entries))) if isinstance(entries, list) else list(entries)


def _stored(entry: Any) -> list[StoredValue]:
    return [one for one in tree_leaves(entry) if isinstance(one, StoredValue)]


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


def _was_changed(entry: StoredValue, split: set[int]) -> bool:
    tensor = entry.val
    if not isinstance(tensor, torch.Tensor):
        return False
    return version_of(tensor) != entry.version or _storage(tensor) in split


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _as_saved(entry: StoredValue) -> Any:
    return _Kept(entry) if isinstance(entry.val, torch.Tensor) else entry


class _RecomputedAttention(TorchFunctionMode):
    """While active, calls of fused attention keep their inputs alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_attention(func):
            return checkpoint(func, *args, use_reentrant=False, **kwargs)
        return func(*args, **kwargs)
