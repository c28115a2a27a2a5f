"""Activations on the host: what blocks keep for backward travels down in forward, and up again ahead of backward.

While a block's forward runs, autograd hands every tensor that it would keep to `_Pass`, which begins its copy to the
host. The device's tensors are let go when the block ends, so the activations of about one block are on the device at a
time. In backward, the first tensor asked for brings all of its block, and begins to bring those of the block before.
The first blocks travel, because they wait longest for their backward. The later ones, which stay, give them time: as
the backward of one of those ends, one that travelled is brought in its room, so copies that take longer than a block's
backward hide behind that of several. With recompute that is what the policy keeps: of recompute=full the block's
inputs. A compiled block hands over what its generated backward reads.

Parameters and buffers, small tensors and tensors that show the same memory at several places stay where they are.
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

#: Smaller tensors cost more in copies than they hold.
LEAST_BYTES = 1 << 20
_FIELD = "offload=activations"


class Activations:
    """Moves what some blocks of a model keep for backward.

    sent_bytes: copied to the host so far.

    Args:
        host: the pool, and the way to the device.
        least_bytes: smaller tensors stay on the device.
        room: of so many blocks the activations may be on the device in backward, as many as stay there in forward.
    """

    def __init__(self, host: Host, least_bytes: int = LEAST_BYTES, room: int = 2):
        self.host = host
        self.least_bytes = least_bytes
        self.room = max(2, room)
        self.sent_bytes = 0
        self.last: weakref.ref[_Pass] | None = None  # the pass before, in the order of forward
        self._open: list[_Pass | None] = []

    def watch(self, name: str, block: nn.Module) -> None:
        """From here the block's activations live on the host between forward and backward."""
        if (call := compiled_call(block)) is not None:
            # Hooks of the block are compiled with it, so this lies around it; copies of the block are not compiled.
            set_compiled_call(block, functools.partial(self._around, name, block, call))
            return
        block.register_forward_pre_hook(_Enter(self, name))
        block.register_forward_hook(_Leave(self), always_call=True)
        for part in block.modules():
            if next(part.parameters(), None) is not None or next(part.buffers(), None) is not None:
                part.register_forward_pre_hook(_Part(self))

    def follow(self, block: nn.Module, staying: int) -> None:
        """A block stays on the device: as its backward begins, those that travelled get the room of those behind it.

        staying: it and those before it that stay.
        """
        count = self.room - staying
        if (call := compiled_call(block)) is not None:
            set_compiled_call(block, functools.partial(_called, call, self, count))
            return
        block.register_forward_hook(_Stays(self, count))

    def bring_before(self, output: Any, count: int) -> None:
        """When the backward of what gave this output begins, begin to bring `count` of the passes before it.

        Those of the same microbatch: others may go forward in between. A recomputed forward runs inside of backward.
        """
        last = self.last() if self.last is not None else None
        if last is None or not torch.is_grad_enabled() or graph_task() != -1:
            return
        first = next((one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad), None)
        if first is not None:
            first.register_hook(functools.partial(_bring, weakref.ref(last), count))

    def _around(self, name: str, block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled block."""
        self.enter(name, compiled=block)
        try:
            return call(*args, **kwargs)
        finally:
            self.leave()

    def enter(self, name: str, compiled: nn.Module | None = None) -> None:
        """A block's forward begins. compiled: the block, where its parts are not called one by one."""
        # A recomputed forward runs inside of backward: what it keeps is used at once.
        wanted = torch.is_grad_enabled() and graph_task() == -1
        one = _Pass(self, name, compiled) if wanted else None
        self._open.append(one)
        if one is not None:
            self.last = weakref.ref(one)
            one.open()

    def call(self, part: nn.Module) -> None:
        """A part of a block is called."""
        if self._open and (one := self._open[-1]) is not None:
            one.keep(part)

    def leave(self) -> None:
        """A block's forward ends, by an exception or not."""
        one = self._open.pop() if self._open else None
        if one is not None:
            one.close()


class _Pass:
    """One forward of one block, and its backward."""

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
        """Leave a module's parameters and buffers where they are.

        By address: autograd hands over views of them too, and under fully_shard they come into being just before the
        module is called.
        """
        for tensor in (*part.parameters(), *part.buffers()):
            if type(tensor) in _PLAIN:
                self._stay.add(tensor.untyped_storage().data_ptr())

    def open(self) -> None:
        """The block's forward begins."""
        assert self.hooks is not None
        self.hooks.__enter__()

    def close(self) -> None:
        """The block's forward is over: the device need not keep what the host has."""
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
        """Begin to bring this pass and those before it, `count` together."""
        one: _Pass | None = self
        for _ in range(count):
            if one is None:
                return
            one.bring()
            one = one._before

    def bring(self) -> None:
        """Begin to bring all that is still wanted, the last kept first: the order of backward."""
        for reference in reversed(self._saved):
            if (saved := reference()) is not None:
                saved.bring()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not self._moves(tensor) or (self._compiled is not None and not self._moves_compiled(tensor)):
            return without_graph(tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version_of(tensor))
        saved = self._known.get(key)
        if saved is None:
            # The tensor is held until the block ends, so no other can come to its address before.
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
        """Generated code saves parameters too, wherever they lie now, and asks for strides as they were."""
        assert self._compiled is not None
        self.keep(self._compiled)
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        return dense and tensor.untyped_storage().data_ptr() not in self._stay


class _Saved:
    """One tensor that a block keeps for backward.

    Lives as long as autograd wants it; then its buffer goes back to the pool.
    """

    def __init__(self, one: _Pass, tensor: torch.Tensor):
        self._pass = one  # keeps the pass, and so its list, until backward is through
        self._host = one.owner.host
        self._buffer, last = self._host.pool.take_unawaited(tensor.nbytes, _FIELD)
        # In the order of the tensor's own memory, without its holes.
        self._like = torch.empty_like(tensor, device="meta")
        self._device = tensor.device
        self._version = version_of(tensor)
        self._tensor: torch.Tensor | None = tensor
        self._copy: Copy = self._host.link.down(tensor, self._there(), last)
        self._is_down = True
        one.owner.sent_bytes += tensor.nbytes

    @property
    def is_changed(self) -> bool:
        return self._tensor is not None and version_of(self._tensor) != self._version

    @property
    def is_away(self) -> bool:
        """Whether the tensor is on the host alone."""
        return self._tensor is None

    def let_go(self) -> None:
        self._tensor = None

    def bring(self) -> None:
        """Begin to bring the tensor back."""
        if self._tensor is None:
            self._tensor = torch.empty_like(self._like, device=self._device)
            # It is on its way down still, perhaps: the copy waits for that, and the device goes on.
            self._copy = self._host.link.up(self._there(), self._tensor, self._copy)
            self._is_down = False

    def value(self) -> torch.Tensor:
        """The tensor, on the device."""
        assert self._tensor is not None
        if not self._is_down:
            self._copy.wait()
        return self._tensor

    def _there(self) -> torch.Tensor:
        flat = self._buffer[: self._like.nbytes].view(self._like.dtype)
        return flat.as_strided(self._like.shape, self._like.stride())

    def __del__(self) -> None:
        if hasattr(self, "_copy"):  # else no buffer could be had
            self._host.pool.give_back(self._buffer, self._copy)


_PLAIN = (torch.Tensor, nn.Parameter)


class _Enter:
    """A hook of a block; a copy of the block gets one that does nothing."""

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
    """A hook of a block that stays on the device; a copy of the block gets one that does nothing."""

    def __init__(self, owner: Activations | None = None, count: int = 0):
        self._owner, self._count = owner, count

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._owner is not None:
            self._owner.bring_before(output, self._count)

    def __reduce__(self) -> tuple[type[_Stays], tuple[()]]:
        return _Stays, ()


def _called(call: Callable[..., Any], owner: Activations, count: int, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled block that stays on the device."""
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
    """Let the first blocks, as many as make up the share but at least one, keep their activations on the host.

    Args:
        blocks: names and modules in the order of forward; the first ones wait longest for their backward.
        share: of the blocks, 0 to 1.
        host: the pool, and the way to the device.
        least_bytes: smaller tensors stay on the device; None: a usual size.
    """
    count = max(1, round(share * len(blocks)))
    least = LEAST_BYTES if least_bytes is None else least_bytes
    activations = Activations(host, least, room=len(blocks) - count)
    for name, block in blocks[:count]:
        activations.watch(name, block)
    for staying, (_, block) in enumerate(blocks[count:], start=1):
        activations.follow(block, staying)
    return activations
