"""Trace of one block's forward: bytes saved for backward under each policy, and the cost of recomputing them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from weft.devices import access
from weft.memory.block_state import spare_attributes
from weft.memory.policy import (
    Forward,
    Policy,
    is_attention,
    is_heavy,
    spare_buffers,
    state_of,
    without_cache,
    without_graph,
)
from weft.private_torch import TorchDispatchMode, graph_task, storage_key, tree_leaves, tree_map

#: Storages by identity. Holding the storage keeps its identity from being reused.
Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class HeavyOperation:
    """A matmul, convolution or attention call that recomputation would repeat. `num_bytes`: size of its outputs."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Cost of one policy for a block: bytes saved in addition to its inputs, and recompute time per call."""

    policy: Policy
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Trace of one block's forward. Bytes count storages once, without parameters and the block's inputs and outputs.

    Attributes:
        kept_bytes: bytes saved for backward without recompute.
        attention_bytes: bytes saved if attention's core is recomputed.
        heavy: heavy operations in forward order. Operations after the last one that backward needs are None, since
            recomputation stops before them.
        light_s: seconds of all other operations that recomputation runs.
        core_s: seconds of attention's core.
        num_calls: number of calls to attention's core.
        keeps_output: True if backward needs the block's output (of a ReLU), which is usually the next block's input
            too.
        takes_gradient: True if forward computes a gradient. Selective recompute cannot repeat it.
        buffers: names of the buffers that forward changed.
    """

    kept_bytes: int
    attention_bytes: int
    heavy: tuple[HeavyOperation | None, ...]
    light_s: float
    core_s: float
    num_calls: int
    keeps_output: bool
    takes_gradient: bool
    buffers: tuple[str, ...]

    def named(self, name: str) -> Policy:
        """Return the block's policy with this name."""
        return Policy(name, frozenset(self._needed()) if name == "selective" else frozenset(), self.buffers)

    def options(self, output_bytes: int = 0) -> list[PolicyCost]:
        """Return the costs of policies: none, attention, selective with ever fewer saved operations, full.

        Attention is omitted if it saves no memory, and selective if forward computes a gradient.

        `output_bytes` is the size of the block's outputs that backward needs and that nothing else keeps alive.
        """
        found = [PolicyCost(self.named("none"), self.kept_bytes + output_bytes, 0.0)]
        if self.num_calls and self.attention_bytes < self.kept_bytes:
            found.append(PolicyCost(self.named("attention"), self.attention_bytes + output_bytes, self.core_s))
        # Operations that save the most time per byte are dropped last.
        heavy = {order: operation for order, operation in enumerate(self.heavy) if operation is not None}
        by_worth = sorted(heavy, key=lambda order: -heavy[order].seconds / max(heavy[order].num_bytes, 1))
        for count in range(0 if self.takes_gradient else len(by_worth), 0, -1):
            saved, again = by_worth[:count], by_worth[count:]
            seconds = self.light_s + sum(heavy[order].seconds for order in again)
            policy = Policy("selective", frozenset(saved), self.buffers)
            found.append(PolicyCost(policy, sum(heavy[order].num_bytes for order in saved), seconds))
        all_s = self.light_s + sum(operation.seconds for operation in heavy.values())
        return [*found, PolicyCost(self.named("full"), 0, all_s)]

    def _needed(self) -> list[int]:
        return [order for order, operation in enumerate(self.heavy) if operation is not None]


def storages_of(values: Any) -> Storages:
    """Return the storages of all tensors in a tree of values."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {storage_key(storage): storage for tensor in tensors for storage in [tensor.untyped_storage()]}


def num_bytes(storages: Storages) -> int:
    """Return the total bytes of storages."""
    return sum(storage.nbytes() for storage in storages.values())


def trace_block(block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> BlockTrace:
    """Run a block twice on its next inputs, and trace the second run.

    Random generators, attributes and buffers of the block are restored. It needs as much memory as training the block.
    """
    args, kwargs = tree_map(_leaf, ([without_cache(value) for value in args], kwargs))
    kwargs = {name: without_cache(value) for name, value in kwargs.items()}
    ignored = storages_of([args, kwargs, list(block.parameters())])
    buffers = [name for name, tensor in block.named_buffers() if tensor is not None]
    device = next((leaf.device for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)), None)
    with access.forked_generators(device):
        before = dict(block.named_buffers())
        # With gradients, because forward may compute some. Hooks around the block do not get this run's saved tensors.
        with (
            spare_attributes(block), spare_buffers(block, buffers), state_of(block), torch.enable_grad(),
            saved_tensors_hooks(without_graph, lambda tensor: tensor),
        ):  # fmt: skip
            forward(block, *args, **kwargs)  # warm-up: kernel selection and page faults
        with (
            spare_attributes(block), spare_buffers(block, buffers), _Recording(_clock(device)) as record,
            torch.enable_grad(),
        ):  # fmt: skip
            with state_of(block):
                outputs = storages_of(forward(block, *args, **kwargs))
            changed = [name for name, tensor in block.named_buffers() if not torch.equal(tensor, before[name])]
    return record.trace(ignored, outputs, tuple(changed))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _clock(device: torch.device | None) -> Callable[[], float]:
    """Return a function that reads the time in seconds. On an accelerator it synchronizes the device first."""
    if device is None or not access.is_accelerator(device):
        return time.perf_counter

    def read() -> float:
        access.synchronize(device)
        return time.perf_counter()

    return read


@dataclass(slots=True)
class _Operation:
    seconds: float
    in_core: bool
    outputs: Storages | None  # of heavy operations


class _Recording:
    """Records the operations that run inside this context, and the tensors that autograd saves, in order."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.operations: list[_Operation] = []
        self.num_calls = 0
        self.in_core = False
        self.takes_gradient = False
        self._kept: Storages = {}
        self._kept_around_cores: Storages = {}
        self._needed = 0  # number of operations before the last kept tensor
        self._stack = ExitStack()

    def __enter__(self) -> _Recording:
        self._stack.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def enter_core(self, args: Any) -> None:
        self.num_calls += 1
        self._kept_around_cores.update(storages_of(args))
        self.in_core = True

    def leave_core(self, seconds: float, num_seen: int) -> None:
        """End attention's core.

        If more than half of its time is in no recorded operation, that time is added as one operation without saved
        outputs.

        seconds: time of the core. num_seen: number of operations recorded before it.
        """
        self.in_core = False
        hidden = seconds - sum(operation.seconds for operation in self.operations[num_seen:])
        if hidden > seconds / 2:
            self.operations.append(_Operation(hidden, True, None))

    def trace(self, ignored: Storages, outputs: Storages, buffers: tuple[str, ...]) -> BlockTrace:
        """Return the trace without the ignored storages. `outputs` are the storages of the block's outputs."""
        keeps_output = bool(outputs.keys() & self._kept.keys())
        ignored = {**ignored, **outputs}
        kept = {key: value for key, value in self._kept.items() if key not in ignored}
        around = {key: value for key, value in self._kept_around_cores.items() if key not in ignored}
        needed = self.operations[: self._needed]
        heavy = [
            HeavyOperation(num_bytes(operation.outputs), operation.seconds) if index < self._needed else None
            for index, operation in enumerate(self.operations)
            if operation.outputs is not None
        ]
        return BlockTrace(
            kept_bytes=num_bytes(kept),
            attention_bytes=num_bytes(around),
            heavy=tuple(heavy),
            light_s=sum(operation.seconds for operation in needed if operation.outputs is None),
            core_s=sum(operation.seconds for operation in needed if operation.in_core),
            num_calls=self.num_calls,
            keeps_output=keeps_output,
            takes_gradient=self.takes_gradient,
            buffers=buffers,
        )

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._kept[storage_key(storage)] = storage
        if not self.in_core:
            self._kept_around_cores[storage_key(storage)] = storage
        self._needed = len(self.operations)
        return without_graph(tensor)


class _Calls(TorchFunctionMode):
    """Function mode that detects the model's calls to attention."""

    def __init__(self, record: _Recording):
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_attention(func):
            return func(*args, **kwargs)
        self._record.enter_core([args, kwargs])
        start, num_seen = self._record.clock(), len(self._record.operations)
        try:
            return func(*args, **kwargs)
        finally:
            self._record.leave_core(self._record.clock() - start, num_seen)


class _Operations(TorchDispatchMode):
    """Dispatch mode that times each operation, and stores the outputs of the heavy ones."""

    def __init__(self, record: _Recording):
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = self._record
        record.takes_gradient |= graph_task() != -1
        start = record.clock()
        outputs = func(*args, **(kwargs or {}))
        seconds = record.clock() - start
        made = storages_of(outputs) if is_heavy(func, args) else None
        record.operations.append(_Operation(seconds, record.in_core, made))
        return outputs
