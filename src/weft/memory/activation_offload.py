"""Activation offload: tensors saved for backward are copied to the host in forward and back before backward.

While a block's forward runs, autograd passes every tensor that it would save to `_Pass`, which starts its copy to the
host. The device tensors are released when the block ends, so about one block's activations are on the device at a time.
In backward, the first tensor that is needed fetches all tensors of its block, and starts to fetch the block before.

The first blocks are offloaded, because they wait longest for their backward. The later blocks stay on the device and
hide the copies: when the backward of one of them ends, an offloaded block is fetched into the freed memory. So copies
that take longer than one block's backward overlap with several. With recompute, only the tensors that the policy saves
are offloaded: the block's inputs under recompute=full. A compiled block passes the tensors that its compiled backward
reads.

Parameters and buffers, small tensors, and tensors with overlapping memory stay on the device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from weft.errors import ModelError
from weft.memory.host_link import Copy
from weft.memory.offload import Host
from weft.memory.policy import without_graph
from weft.memory.private_torch import compiled_call, set_compiled_call
from weft.private_torch import graph_task, tree_leaves, version_of

#: Smaller tensors stay on the device: copying them costs more than the memory is worth.
LEAST_BYTES = 1 << 20
_FIELD = "offload=activations"


class Activations:
    """Offloads the activations that some blocks of a model save for backward.

    `sent_bytes` counts the bytes copied to the host.

    Args:
        least_bytes: size in bytes below which tensors stay on the device.
        room: maximum number of blocks whose activations are on the device in backward; at least 2 is used.
    """

    def __init__(self, host: Host, least_bytes: int = LEAST_BYTES, room: int = 2):
        self.host = host
        self.least_bytes = least_bytes
        self.room = max(2, room)
        self.sent_bytes = 0
        self.last: weakref.ref[_Pass] | None = None  # the previous pass, in forward order
        self._open: list[_Pass | None] = []

    def watch(self, name: str, block: nn.Module) -> None:
        """Register hooks that move the block's activations to the host between forward and backward."""
        if (call := compiled_call(block)) is not None:
            # Hooks of the block are compiled with it, so wrap the compiled call. Copies of the block are not compiled.
            set_compiled_call(block, functools.partial(self._around, name, block, call))
            return
        block.register_forward_pre_hook(_Enter(self, name))
        block.register_forward_hook(_Leave(self), always_call=True)
        for part in block.modules():
            if next(part.parameters(), None) is not None or next(part.buffers(), None) is not None:
                part.register_forward_pre_hook(_Part(self))

    def prefetch(self, block: nn.Module, staying: int) -> None:
        """Register a hook that fetches offloaded blocks when backward of a block that stays on the device begins.

        They use the memory of later blocks, whose backward is complete. `staying` is the number of blocks, up to and
        including this one, whose activations stay on the device.
        """
        count = self.room - staying
        if (call := compiled_call(block)) is not None:
            set_compiled_call(block, functools.partial(_called, call, self, count))
            return
        block.register_forward_hook(_Stays(self, count))

    def bring_before(self, output: Any, count: int) -> None:
        """Register a hook that fetches the tensors of the last `count` block forwards when backward of `output` begins.

        Only forwards of the same microbatch are fetched: other microbatches may run in between. Does nothing in a
        recomputed forward, which runs inside backward.
        """
        last = self.last() if self.last is not None else None
        if last is None or not torch.is_grad_enabled() or graph_task() != -1:
            return
        first = next((one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad), None)
        if first is not None:
            first.register_hook(functools.partial(_bring, weakref.ref(last), count))

    def _around(self, name: str, block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.enter(name, compiled=block)
        try:
            return call(*args, **kwargs)
        finally:
            self.leave()

    def enter(self, name: str, compiled: nn.Module | None = None) -> None:
        """Begin a block's forward. compiled: the block if it is compiled, so that its parts are not called."""
        # A recomputed forward runs inside backward: its saved tensors are used immediately.
        wanted = torch.is_grad_enabled() and graph_task() == -1
        one = _Pass(self, name, compiled) if wanted else None
        self._open.append(one)
        if one is not None:
            self.last = weakref.ref(one)
            one.open()

    def call(self, part: nn.Module) -> None:
        """Keep the parameters and buffers of `part`, which the current block is about to call, on the device."""
        if self._open and (one := self._open[-1]) is not None:
            one.keep(part)

    def leave(self) -> None:
        """End a block's forward, also after an exception."""
        one = self._open.pop() if self._open else None
        if one is not None:
            one.close()


class _Pass:
    """One forward of one block, and its backward: the tensors that autograd saves in between."""

    def __init__(self, owner: Activations, name: str, compiled: nn.Module | None):
        self.owner = owner
        self._compiled = compiled
        self.hooks: saved_tensors_hooks | None = saved_tensors_hooks(self._pack, self._unpack)
        self._name = name
        self._before = owner.last() if owner.last is not None else None
        self._stay: set[int] = set()  # addresses of parameters and buffers
        self._known: dict[tuple[Any, ...], _Saved] = {}
        self._saved: list[weakref.ref[_Saved]] = []
        self._is_used = False

    def keep(self, part: nn.Module) -> None:
        """Keep a module's parameters and buffers on the device.

        They are identified by address: autograd passes views of them too, and under fully_shard they are allocated just
        before the module is called.
        """
        for tensor in (*part.parameters(), *part.buffers()):
            if type(tensor) in _PLAIN:
                self._stay.add(tensor.untyped_storage().data_ptr())

    def open(self) -> None:
        assert self.hooks is not None
        self.hooks.__enter__()

    def close(self) -> None:
        """End the block's forward, and release the device tensors that are copied to the host.

        Raises ModelError if forward modified one of these tensors.
        """
        assert self.hooks is not None
        self.hooks.__exit__(None, None, None)
        known, self._known, self.hooks, self._compiled = self._known, {}, None, None
        changed = any(saved.is_changed for saved in known.values())
        for saved in known.values():
            saved.let_go()
        if changed:
            raise ModelError(
                f"offload=activations: {self._name or 'the model'} changes in place a tensor that backward "
                f"needs. Make that operation one that returns a new tensor, or leave activations out."
            )

    def bring_ahead(self, count: int) -> None:
        """Start to fetch the tensors of this forward and of earlier ones, `count` forwards in total."""
        one: _Pass | None = self
        for _ in range(count):
            if one is None:
                return
            one.bring()
            one = one._before

    def bring(self) -> None:
        """Start to fetch all tensors that backward still needs, in the order of backward (last saved first)."""
        for reference in reversed(self._saved):
            if (saved := reference()) is not None:
                saved.bring()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not self._moves(tensor) or (self._compiled is not None and not self._moves_compiled(tensor)):
            return without_graph(tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version_of(tensor))
        saved = self._known.get(key)
        if saved is None:
            # Keep the tensor alive until the block ends, so that no other tensor gets its address before.
            saved = self._known[key] = _Saved(self, tensor.detach())
            self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, kept: torch.Tensor | _Saved) -> torch.Tensor:
        if not isinstance(kept, _Saved):
            return kept
        if kept.is_away or not self._is_used:
            self._is_used = True
            self.bring_ahead(self.owner.room)
        return kept.value()

    def _moves(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in _PLAIN
            and tensor.layout == torch.strided
            and tensor.nbytes >= self.owner.least_bytes
            and tensor.untyped_storage().data_ptr() not in self._stay
            and all(stride > 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )

    def _moves_compiled(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor that a compiled block saves can be offloaded.

        The compiled block also saves parameters, at their current addresses, and expects the original strides.
        """
        assert self._compiled is not None
        self.keep(self._compiled)
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        return dense and tensor.untyped_storage().data_ptr() not in self._stay


class _Saved:
    """One tensor that a block saves for backward.

    It lives as long as autograd needs it. Then its buffer returns to the pool.
    """

    def __init__(self, one: _Pass, tensor: torch.Tensor):
        self._pass = one  # keeps the pass, and so its list, alive until backward ends
        self._host = one.owner.host
        self._buffer, last = self._host.pool.take_unawaited(tensor.nbytes, _FIELD)
        # Same memory order of dims as the tensor, without gaps.
        self._like = torch.empty_like(tensor, device="meta")
        self._device = tensor.device
        self._version = version_of(tensor)
        self._tensor: torch.Tensor | None = tensor
        self._copy: Copy = self._host.link.down(tensor, self._offloaded(), last)
        self._is_down = True
        one.owner.sent_bytes += tensor.nbytes

    @property
    def is_changed(self) -> bool:
        return self._tensor is not None and version_of(self._tensor) != self._version

    @property
    def is_away(self) -> bool:
        """True if the tensor is only on the host."""
        return self._tensor is None

    def let_go(self) -> None:
        self._tensor = None

    def bring(self) -> None:
        if self._tensor is None:
            self._tensor = torch.empty_like(self._like, device=self._device)
            # Its copy to the host may still be running: the new copy waits for it, and the device continues.
            self._copy = self._host.link.up(self._offloaded(), self._tensor, self._copy)
            self._is_down = False

    def value(self) -> torch.Tensor:
        assert self._tensor is not None
        if not self._is_down:
            self._copy.wait()
        return self._tensor

    def _offloaded(self) -> torch.Tensor:
        flat = self._buffer[: self._like.nbytes].view(self._like.dtype)
        return flat.as_strided(self._like.shape, self._like.stride())

    def __del__(self) -> None:
        if hasattr(self, "_copy"):  # False if taking the buffer failed
            self._host.pool.give_back(self._buffer, self._copy)


_PLAIN = (torch.Tensor, nn.Parameter)


class _Enter:
    """Forward pre-hook of a block. In a copy of the block it does nothing."""

    def __init__(self, owner: Activations | None = None, name: str = ""):
        self._owner, self._name = owner, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._owner is not None:
            self._owner.enter(self._name)

    def __reduce__(self) -> tuple[type[_Enter], tuple[()]]:
        return _Enter, ()


class _Part:
    def __init__(self, owner: Activations | None = None):
        self._owner = owner

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._owner is not None:
            self._owner.call(module)

    def __reduce__(self) -> tuple[type[_Part], tuple[()]]:
        return _Part, ()


class _Stays:
    """Forward hook of a block whose activations stay on the device. In a copy of the block it does nothing."""

    def __init__(self, owner: Activations | None = None, count: int = 0):
        self._owner, self._count = owner, count

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._owner is not None:
            self._owner.bring_before(output, self._count)

    def __reduce__(self) -> tuple[type[_Stays], tuple[()]]:
        return _Stays, ()


def _called(call: Callable[..., Any], owner: Activations, count: int, *args: Any, **kwargs: Any) -> Any:
    output = call(*args, **kwargs)
    owner.bring_before(output, count)
    return output


def _bring(last: weakref.ref[_Pass], count: int, grad: torch.Tensor) -> None:
    one = last()
    if one is not None:
        one.bring_ahead(count)


class _Leave:
    def __init__(self, owner: Activations | None = None):
        self._owner = owner

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._owner is not None:
            self._owner.leave()

    def __reduce__(self) -> tuple[type[_Leave], tuple[()]]:
        return _Leave, ()


def offload_activations(
    blocks: Sequence[tuple[str, nn.Module]], share: float, host: Host, least_bytes: int | None = None
) -> Activations:
    """Make the first blocks move their activations to the host: about `share` of the blocks, at least one.

    Args:
        blocks: names and modules in forward order. The first ones wait longest for their backward.
        share: fraction of the blocks, 0 to 1.
        host: host memory pool and link.
        least_bytes: size in bytes below which tensors stay on the device; None for LEAST_BYTES.
    """
    count = max(1, round(share * len(blocks)))
    least = LEAST_BYTES if least_bytes is None else least_bytes
    activations = Activations(host, least, room=len(blocks) - count)
    for name, block in blocks[:count]:
        activations.watch(name, block)
    for staying, (_, block) in enumerate(blocks[count:], start=1):
        activations.prefetch(block, staying)
    return activations
