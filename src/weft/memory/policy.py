"""Recompute policies of blocks: saved and recomputed operations, and the choice of policies by a budget.

Selective recompute uses torch's selective checkpoint, which stores the outputs that a policy names and recomputes the
rest. Two things are added. Stored outputs become saved tensors of autograd, so that offload hooks receive them. A
matmul output that forward later modified is recomputed; torch's version check does not always detect such changes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from weft.comm.autograd import is_product
from weft.comm.transports.link import unobserved
from weft.devices import access
from weft.errors import ModelError
from weft.memory.block_state import BlockState
from weft.memory.private_torch import GROUPED_MM, StoredValue, recompute_marker, written_arguments
from weft.models.inspect import hugging_face
from weft.models.inspect.kernel_recorder import is_worth_saving
from weft.private_torch import storage_key, tree_leaves, tree_map_only, version_of

#: Since 2.15 torch can pass stored outputs to saved-tensor hooks. Disabled, because `keep_as_autograd_does` does it.
OWN_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}
)

#: Batched matmuls. The last two arguments are (batch, n, k) and (batch, k, m).
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def is_heavy(op: Any, args: Sequence[Any]) -> bool:
    """Return True if an operation's output is worth saving: if it is a matmul, a convolution or attention.

    Batched matmuls only count if the result is not larger than the inputs. The decision uses the inputs only, because
    torch 2.11 does not pass outputs to a policy.
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
    return is_worth_saving(packet, made, sum(arg.numel() for arg in args))


def selective_contexts(saved: frozenset[int]) -> tuple[Any, Any]:
    """Return torch's pair of contexts (forward, recomputation) for code that torch.compile traces."""
    return SelectiveChoice(saved).contexts()


class SelectiveChoice:
    """Saved and recomputed operations of one run of a block under "selective".

    `saved` holds the indices of the saved operations among the heavy operations. `written` maps each storage that an
    operation of forward modified to the number of outputs that were stored before. `kept` holds, per operation, pairs
    (index, number of outputs stored up to and including this one).
    """

    def __init__(self, saved: frozenset[int]) -> None:
        self.saved = set(saved)
        self.written: dict[int, int] = {}
        self.kept: dict[Any, list[tuple[int, int]]] = {}
        self._num_stored = 0
        # Torch 2.11 calls the policy again in recomputation, later versions do not.
        self._forward, self._replay = itertools.count(), itertools.count()

    def contexts(self) -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(self._decide)

    def _decide(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute and not torch.compiler.is_compiling():
            # Identify tensors by storage and not by version: "unsafe" splits in torch have separate versions, for
            # example the gates of recurrent layers and, since 2.15, the output of a linear layer with three dims.
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
                self.written.pop(_storage(one), None)  # recorded for a freed tensor whose memory this one reuses
        return CheckpointPolicy.MUST_SAVE

    def keep_as_autograd_does(self, storage: dict[Any, Any]) -> None:
        """Make stored outputs, a list or a dict per operation, saved tensors of autograd.

        An output that forward modified after it was stored is recomputed.
        """
        for op, entries in storage.items():
            if isinstance(entries, list):
                entries[:] = self._stored_in_order(op, entries)
                continue
            for key, entry in entries.items():
                changed = any(self._was_changed(one, 0) for one in _stored(entry))
                entries[key] = recompute_marker() if changed else tree_map_only(StoredValue, _as_saved, entry)

    def _stored_in_order(self, op: Any, entries: list[Any]) -> Iterator[Any]:
        """Yield stored entries for torch 2.11, which consumes them in order when the policy keeps an operation."""
        for entry, (order, num_stored) in zip(entries, self.kept[op], strict=True):
            if any(self._was_changed(one, num_stored) for one in _stored(entry)):
                self.saved.remove(order)
            else:
                yield tree_map_only(StoredValue, _as_saved, entry)

    def _was_changed(self, entry: StoredValue, num_stored: int) -> bool:
        """Return True if a stored output was modified after it was stored.

        num_stored: number of outputs stored up to and including this one. With 0, every recorded write counts.
        """
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
    """Autograd function that saves one tensor. Its backward never runs: the tensor is read directly from the node."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()


class _StoredEntry:
    """Substitute for an entry in torch's storage of selective checkpoints. torch calls its `get_val`."""

    def __init__(self, entry: StoredValue):
        anchor = torch.empty(0, requires_grad=True)
        self._output = _Keep.apply(
            anchor, entry.get_val(False)
        )  # torch 2.11 frees a node's saved tensors with its output

    def get_val(self, allow_cache_entry_mutation: bool) -> torch.Tensor:
        del allow_cache_entry_mutation  # autograd checks for changes in place
        return self._output.grad_fn.saved_tensors[0]


def _as_saved(entry: StoredValue) -> Any:
    return _StoredEntry(entry) if isinstance(entry.val, torch.Tensor) else entry


# Execution of one block under a policy: some tensors of forward are saved for backward, others recomputed.

Forward = Callable[..., Any]

#: Calls that contain the core of attention. nn.MultiheadAttention does not expose its core separately.
ATTENTION_CALLS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def is_attention(func: Any) -> bool:
    """Return True if a function is attention: one of torch's, or one marked by `is_attention`."""
    return func in ATTENTION_CALLS or getattr(func, "is_attention", False)


@dataclass(frozen=True, slots=True)
class Policy:
    """Recompute policy of a block.

    `name` is "none", "full", "attention" or "selective". `saved` holds the indices, in forward order, of the heavy
    operations whose outputs are saved under "selective". `buffers` holds the names of buffers that forward changes.
    """

    name: str
    saved: frozenset[int] = frozenset()
    buffers: tuple[str, ...] = ()


def run_block(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `forward(block, *args, **kwargs)` under a policy.

    Empty key-value caches among the arguments are replaced with None, and use_cache with False.
    """
    # Applies to every policy: if blocks share a cache, it is no longer empty for the next block.
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
    choice = SelectiveChoice(policy.saved)
    keeping: Any = contextlib.nullcontext()
    replaying: Any = contextlib.nullcontext()
    if selective:
        keeping, replaying = choice.contexts()
    around: list[Callable[[], AbstractContextManager[Any]]] = []
    if policy.buffers:
        # Buffers such as batch statistics must be updated once per batch: the recomputation uses copies of the current
        # values.
        copies = [block.get_buffer(name).detach().clone() for name in policy.buffers]
        around.append(partial(spare_buffers, block, policy.buffers, copies))
    state = BlockState.of(block)
    if state is not None:
        around.append(state.restored)
    # Forward also reads state that another microbatch may change before the recomputation.
    draws = state_of(block)
    around.append(lambda: draws)
    around.append(partial(_with_tensors, _tensors_of(block)))
    replaying = _Replay(around, replaying)
    pair = keeping, replaying
    settings = {**(OWN_HOOKS if selective else {}), **_rng_settings()}
    outputs = checkpoint(forward, block, *args, use_reentrant=False, context_fn=lambda: pair, **settings, **kwargs)
    if selective:
        choice.keep_as_autograd_does(keeping.storage)
    if state is not None:
        state.compare(policy.buffers)
    return outputs


def state_of(block: nn.Module) -> AbstractContextManager[Any]:
    """Return a context for a later recomputation of the current forward, with the same random numbers."""
    state = getattr(block, "_weft_travels", None)
    return nullcontext() if state is None else state.travelling()


#: Parameters and buffers of a block: (dict of their module, name, tensor).
_Tensors = list[tuple[dict[str, Any], str, torch.Tensor | None]]


def _tensors_of(block: nn.Module) -> _Tensors:
    """Return the tensors of a block, without the tensors of nested units, which fully_shard gathers and frees."""
    units = [unit for unit in block.modules() if unit is not block and hasattr(type(unit), "set_reshard_after_forward")]
    gathered = {module for unit in units for module in unit.modules()}
    dicts = [
        vars(module)[kind]
        for module in block.modules()
        if module not in gathered
        for kind in ("_parameters", "_buffers")
    ]
    return [(each, name, tensor) for each in dicts for name, tensor in each.items()]


@contextlib.contextmanager
def _with_tensors(tensors: _Tensors) -> Iterator[None]:
    """Set parameters and buffers inside this context: torch.func.functional_call sets them for one forward only."""
    replaced = [(each, name, each.get(name)) for each, name, tensor in tensors if each.get(name) is not tensor]
    for each, name, tensor in tensors:
        each[name] = tensor
    try:
        yield
    finally:
        for each, name, tensor in replaced:
            each[name] = tensor


def _run_traced(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a block with torch's own activation checkpointing, which torch.compile can trace.

    A compiled block updates its buffers once, even if its forward is recomputed.
    """
    if policy.name == "selective":
        return checkpoint(
            forward, block, *args, use_reentrant=False, context_fn=partial(selective_contexts, policy.saved), **kwargs
        )
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)


def without_cache(value: Any) -> Any:
    """Return None for an empty key-value cache, and any other value unchanged.

    Recomputing a block would add to the cache twice. Hugging Face models create an empty cache in every training
    forward unless use_cache=False is set.

    Raises:
        ModelError: if the cache already holds tokens.
    """
    if not hugging_face.is_cache(value):
        return value
    if hugging_face.holds_tokens(value):
        raise ModelError(
            f"{type(value).__name__} in a recomputed block: it has tokens already, and replaying the block would add "
            "to it twice. Use recompute=none, or train without a cache."
        )
    return None


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor, for saved-tensor hooks that store a tensor.

    Returning the tensor itself would create a reference cycle between an operation and its saved output. Backward
    breaks the cycle. Without a backward, block and mesh would never be freed, because the garbage collector does not
    detect this cycle.
    """
    with unobserved():
        return tensor.detach()


@contextlib.contextmanager
def spare_buffers(
    module: nn.Module, names: Sequence[str], values: Sequence[torch.Tensor] | None = None
) -> Iterator[None]:
    """Replace the named buffers with copies inside this context, so that writes to them are lost.

    `values` are the replacements; None for copies of the current values.
    """
    owners = [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in names]
    originals = [getattr(owner, name) for owner, name in owners]
    copies = [tensor.clone() if tensor is not None else None for tensor in values or originals]
    for (owner, name), copied in zip(owners, copies, strict=True):
        setattr(owner, name, copied)
    try:
        yield
    finally:
        for (owner, name), tensor in zip(owners, originals, strict=True):
            setattr(owner, name, tensor)


def _rng_settings() -> dict[str, bool]:
    """Return keyword arguments of torch's checkpoint that skip the generator's state while a CUDA graph is recorded.

    The state cannot be read then. The recorder rejects models that use the generator.
    """
    return {"preserve_rng_state": not access.is_capturing()}


class _Replay:
    """Contexts of one recomputation, the last outermost. `around` is new per recomputation: backward may run twice."""

    def __init__(self, around: Sequence[Callable[[], AbstractContextManager[Any]]], inner: AbstractContextManager[Any]):
        self._around, self._inner = around, inner
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in reversed(self._around):
                stack.enter_context(make())
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class _RecomputedAttention(TorchFunctionMode):
    """Mode in which fused attention saves only its inputs and is recomputed in backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_attention(func):
            return checkpoint(func, *args, use_reentrant=False, **_rng_settings(), **kwargs)
        return func(*args, **kwargs)


# Choice of each block's policy, so that saved bytes fit a budget and recompute takes the least time.

#: Resolution of a budget. Each block's bytes are rounded up to a step, so this bounds the unused part of the budget.
_NUM_STEPS = 16_384


def cheapest_choice(menus: Sequence[Sequence[tuple[int, float]]], budget_bytes: int) -> list[int] | None:
    """Choose one option per block, with the least total time and at most `budget_bytes` in total.

    `menus` holds each block's options as (bytes, seconds). Returns the index of each block's option, or None if even
    the smallest options do not fit. The result is optimal up to the rounding of bytes.
    """
    fastest = [min(range(len(menu)), key=lambda i, m=menu: (m[i][1], m[i][0])) for menu in menus]
    if _total(menus, fastest) <= budget_bytes:
        return fastest
    smallest = [min(range(len(menu)), key=lambda i, m=menu: m[i]) for menu in menus]
    if _total(menus, smallest) > budget_bytes:
        return None
    return _cheapest(menus, budget_bytes) or smallest


def _total(menus: Sequence[Sequence[tuple[int, float]]], choice: Sequence[int]) -> int:
    return sum(menu[index][0] for menu, index in zip(menus, choice, strict=True))


def _cheapest(menus: Sequence[Sequence[tuple[int, float]]], budget_bytes: int) -> list[int] | None:
    step = max(1, -(-budget_bytes // _NUM_STEPS))
    capacity = budget_bytes // step
    best = np.zeros(capacity + 1)  # least seconds by number of steps
    picks = []
    for menu in menus:
        after = np.full(capacity + 1, np.inf)
        pick = np.zeros(capacity + 1, dtype=np.int32)
        for index, (num_bytes, seconds) in enumerate(menu):
            steps = -(-num_bytes // step)
            if steps > capacity:
                continue
            candidate = np.full(capacity + 1, np.inf)
            candidate[steps:] = best[: capacity + 1 - steps] + seconds
            better = candidate < after
            after[better], pick[better] = candidate[better], index
        best = after
        picks.append(pick)
    if not np.isfinite(best[capacity]):
        return None
    choice, left = [], capacity
    for menu, pick in zip(reversed(menus), reversed(picks), strict=True):
        choice.append(int(pick[left]))
        left -= -(-menu[choice[-1]][0] // step)
    return choice[::-1]
