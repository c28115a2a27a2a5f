"""Selective recompute of one run of a block: which products it keeps for backward, and how.

torch's selective checkpoint stores what the policy names and computes the rest again. Two things are added: what is
stored becomes a saved tensor of autograd, so that offload's hooks see it; and a product that forward changed in place
afterwards is computed again, which the version that torch compares does not always tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from weft.comm.autograd import is_product
from weft.memory.private_torch import GROUPED_MM, StoredValue, recompute_word, written_arguments
from weft.private_torch import storage_key, tree_leaves, tree_map_only, version_of
from weft.structure.cost import is_worth_keeping

#: Since 2.15 torch asks whether it shall show hooks on saved tensors what it stores: `keep_as_autograd_does` does that.
OWN_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}
)

#: Batched products: (batch, n, k) times (batch, k, m), the last two arguments.
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def is_heavy(op: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is worth keeping: it is a product or attention, and its result is not the larger side.

    Asked before the operation runs: torch 2.11 does not show a policy what an operation gave.
    """
    if is_product(op):
        return True
    packet = getattr(op, "overloadpacket", None)
    if packet not in flop_registry and packet is not GROUPED_MM and "scaled_dot_product" not in str(packet):
        return False
    if packet not in _BATCHED:
        return True
    left, right = args[-2:]
    made = left.shape[0] * left.shape[1] * right.shape[2]
    return is_worth_keeping(packet, made, sum(arg.numel() for arg in args))


def selective_contexts(saved: frozenset[int]) -> tuple[Any, Any]:
    """torch's pair of contexts, one for forward and one for its replay, for code that torch.compile traces."""
    return SelectiveChoice(saved).contexts()


class SelectiveChoice:
    """What one run of a block under "selective" keeps, and what its replay computes again.

    saved: by order among heavy operations. written: the storages that forward has changed in place, each with how many
    products had been stored. kept: the orders of what was stored, and how many had been stored, by operation.
    """

    def __init__(self, saved: frozenset[int]) -> None:
        self.saved = set(saved)
        self.written: dict[int, int] = {}
        self.kept: dict[Any, list[tuple[int, int]]] = {}
        self._num_stored = 0
        # Torch 2.11 asks again when it replays, later ones do not.
        self._forward, self._replay = itertools.count(), itertools.count()

    def contexts(self) -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(self._decide)

    def _decide(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute and not torch.compiler.is_compiling():
            # By storage, not by version: what torch cuts "unsafely" has versions of its own, such as the gates of
            # its recurrent layers and, since 2.15, the output of a linear layer with three dimensions.
            self.written.update((_storage(one), self._num_stored) for one in written_arguments(op, args, kwargs))
        if not is_heavy(op, args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        order = next(self._replay if context.is_recompute else self._forward)
        if order not in self.saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            self._num_stored += 1
            self.kept.setdefault(op, []).append((order, self._num_stored))
            for one in _tensors(getattr(context, "op_output", None)):
                self.written.pop(_storage(one), None)  # of a tensor that is gone, whose memory this one has
        return CheckpointPolicy.MUST_SAVE

    def keep_as_autograd_does(self, storage: dict[Any, Any]) -> None:
        """Let what was stored, a list or a dict for each operation, be saved tensors of autograd.

        What forward changed in place after it was stored is not what the operation gave: that is computed again.
        """
        for op, entries in storage.items():
            if isinstance(entries, list):
                entries[:] = self._kept_of_list(op, entries)
                continue
            for key, entry in entries.items():
                changed = any(self._was_changed(one, 0) for one in _stored(entry))
                entries[key] = recompute_word() if changed else tree_map_only(StoredValue, _as_saved, entry)

    def _kept_of_list(self, op: Any, entries: list[Any]) -> Iterator[Any]:
        """For torch 2.11, which takes what was stored in turn, wherever the policy says at replay that it was."""
        for entry, (order, num_stored) in zip(entries, self.kept[op], strict=True):
            if any(self._was_changed(one, num_stored) for one in _stored(entry)):
                self.saved.remove(order)
            else:
                yield tree_map_only(StoredValue, _as_saved, entry)

    def _was_changed(self, entry: StoredValue, num_stored: int) -> bool:
        """Whether the value is no longer what the operation gave. num_stored: earlier writes were to another tensor."""
        tensor = entry.val
        if not isinstance(tensor, torch.Tensor):
            return False
        return version_of(tensor) != entry.version or self.written.get(_storage(tensor), -1) >= num_stored


def _stored(entry: Any) -> list[StoredValue]:
    return [one for one in tree_leaves(entry) if isinstance(one, StoredValue)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


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


def _as_saved(entry: StoredValue) -> Any:
    return _Kept(entry) if isinstance(entry.val, torch.Tensor) else entry
