"""Dispatch of torch operations: real on the host, and on the device with fake tensors and counts.

Results that depend on weights have no values. The host reads them as 1, and True for a bool. So an operation whose
result depends on values acts as if every element were true.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from tools.gpu_sim.device import (
    CUDA,
    UNKNOWN,
    Met,
    PaperDevice,
    follow,
    forget,
    give,
    is_fake,
    leaves,
    on_device,
    on_host,
    reserve,
    value_of,
)
from weft.comm.transports.backend import NCCL_FORMATS

#: Operations that launch no kernel.
_EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
#: In-place operations that do not read their output. All others read it too.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_", "index_copy_")
)
#: Arguments of Weft's operators that are only written, and those that are only read although torch's schema declares
#: them as mutable.
_ONLY_WRITTEN, _ONLY_READ = frozenset({"weights"}), frozenset({"grads"})
#: Collectives whose schema does not declare that their first argument is written.
_UNSAID = frozenset(f"c10d::{name}" for name in ("_reduce_scatter_base_", "_allgather_base_", "allreduce_", "recv_"))
_NO_KERNEL = _EMPTY | {"aten::detach", "aten::lift_fresh", "aten::set_", "aten::_reshape_alias"}
_Call = Callable[..., Any]
_ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class PaperMode(TorchDispatchMode):
    """Dispatch mode that enables tensors of cuda:0.

    It acts as a device and not as an observer, so `without_modes` does not disable it.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Disable the mode while torch.compile traces and lowers. It is enabled when the compiled code runs."""
        return True

    def __init__(self, device: PaperDevice) -> None:
        super().__init__()
        self.device = device
        self._is_quiet = False
        self._special: dict[str, Callable[[_Call, tuple[Any, ...], dict[str, Any]], Any]] = {
            "aten::_local_scalar_dense": self._item,
            "aten::equal": self._equal,
            "aten::is_pinned": self._is_pinned,
            "aten::nonzero": self._nonzero,
            "aten::masked_select": self._masked_select,
            "aten::repeat_interleave": self._repeat_interleave,
            "aten::searchsorted": self._searchsorted,
            "aten::index": self._index,
            "aten::index_put_": self._index,
            "aten::index_put": self._index,
            "aten::_index_put_impl_": self._index,
            "aten::_to_copy": self._to_copy,
            "aten::copy_": self._copy_,
            "aten::_foreach_copy_": self._foreach_copy_,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor dispatches its inner operations here again
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == "cuda"
        if to_device:
            kwargs["device"] = CUDA
        if not to_device and not any(is_fake(x) for x in leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("c10d::"):
            return self._collective(func, args, kwargs)
        if name.startswith("weft_"):
            # Code that a compiled graph holds as one operator. Count its operations, not the operator.
            with self:
                return func.redispatch(_ON_CUDA, *args, **kwargs)
        special = self._special.get(name)
        return special(func, args, kwargs) if special is not None else self._run(func, args, kwargs)

    @contextlib.contextmanager
    def quietly(self, quiet: bool) -> Iterator[None]:
        """Count no kernels during a block that only computes shapes."""
        before, self._is_quiet = self._is_quiet, quiet
        try:
            yield
        finally:
            self._is_quiet = before

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a device operation on fake tensors."""
        name = func._schema.name
        try:
            with self.device.fake:
                out = func(*args, **kwargs)
        except RuntimeError as error:
            # Record it here too, because the program may convert or catch the error.
            if re.search("two (different )?devices", str(error)) and not self.device.mismatch:
                self.device.mismatch = f"{name}: {str(error).splitlines()[0]}"
            raise
        writes = written(func, args, kwargs)
        if self.device.capture is not None and not getattr(func, "is_view", False):
            changed = {id(x) for x in writes}
            self.device.capture.make(x for x in leaves(out) if id(x) not in changed)
        if name in _EMPTY:
            self.device.races.made(out, self.device.current)
            reserve(out)
        else:
            follow(func, args, kwargs, out, writes)
        quiet = name in _NO_KERNEL or getattr(func, "is_view", False) or name.startswith(("prim::", "profiler::"))
        if not (quiet or self._is_quiet):
            self._count(func, args, kwargs, out, writes)
        return out

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, writes: list[torch.Tensor]
    ) -> None:
        changed = {id(x) for x in writes}
        outs = [x for x in leaves(out) if id(x) not in changed]
        reads = [x for x in leaves((args, kwargs)) if id(x) not in changed]
        if not any(on_device(x) for x in (*reads, *writes, *outs)):
            return
        updated, kept = _updated(func, args, kwargs)
        reads, writes = [*reads, *updated], [x for x in writes if id(x) not in kept]
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        # FLOP formulas do not accept the trailing dtype of a product's sum.
        given = args[:-1] if args and isinstance(args[-1], torch.dtype) else args
        flops = float(formula(*given, **kwargs, out_val=out)) if formula is not None else 0.0
        self.device.launch(func._schema.name, reads, [*writes, *outs], flops)

    def _item(self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        self.device.sync("item", self.device.current)
        known = value_of(tensor)
        if known is not None and not known.isnan():
            return known.item()
        return torch.tensor(UNKNOWN, dtype=tensor.dtype).item()

    def _equal(self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self.device.sync("equal", self.device.current)
        one, other = value_of(args[0]), value_of(args[1])
        if one is not None and other is not None:
            return torch.equal(one, other)
        return True

    def _is_pinned(self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return False

    def _nonzero(self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self.device.sync("nonzero", self.device.current)
        known = value_of(args[0])
        found = None if known is None else known.nonzero()
        shape = (args[0].numel(), args[0].dim()) if found is None else found.shape
        with self.device.fake:
            rows = torch.empty(shape, dtype=torch.int64, device=CUDA)
        if found is not None:
            give(rows, found)
        return rows

    def _masked_select(self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return self._index(torch.ops.aten.index.Tensor, (args[0], [args[1].expand(args[0].shape)]), {})

    def _repeat_interleave(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if kwargs.get("output_size") is None:
            self.device.sync("repeat_interleave without output_size", self.device.current)
            known = value_of(args[0])
            kwargs["output_size"] = args[0].numel() if known is None else int(known.sum())
        return self._run(func, args, kwargs)

    def _searchsorted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Assume a uniform distribution if sorted numbers are unknown, such as a router's choice."""
        places = self._run(func, args, kwargs)
        if value_of(args[0]) is None and isinstance(args[1], torch.Tensor) and args[1].dim() == args[0].dim() == 1:
            ranks = torch.arange(args[1].numel()) + int(bool(kwargs.get("right")))
            give(places, ranks * args[0].numel() // max(1, args[1].numel()))
        return places

    def _index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy indices from the host. For a bool index, the host must wait for the number of true elements."""
        found: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is not None and not is_fake(index):
                moved = self.device.empty(index)
                self.device.copy(index, moved, non_blocking=False)
                index = moved
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                rows = self._nonzero(func, (index,), {})
                found += self._run(torch.ops.aten.unbind.int, (rows, 1), {})
            else:
                found.append(index)
        return self._run(func, (args[0], found, *args[2:]), kwargs)

    def _to_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        if target.type == source.device.type or target.type == "meta":
            return self._run(func, args, kwargs)
        dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if target.type == "cuda":
            # Either the host converts before the copy, or the device after it. Both are one copy.
            out = self.device.empty(_as_format(source, kwargs), dtype)
        else:
            like = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
            out = torch.empty_like(_as_format(like, kwargs), device="cpu", pin_memory=non_blocking)
        self.device.copy(source, out, non_blocking)
        return out

    def _copy_(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, source = args[:2]
        if is_fake(target) == is_fake(source):
            return self._run(func, args, kwargs)
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if source.shape != target.shape:
            torch.broadcast_shapes(source.shape, target.shape)
        self.device.copy(source, target, non_blocking)
        return target

    def _foreach_copy_(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        targets, sources = args[:2]
        if all(is_fake(x) for x in (*targets, *sources)):
            return self._run(func, args, kwargs)
        for target, source in zip(targets, sources, strict=True):
            self._copy_(torch.ops.aten.copy_.default, (target, source, *args[2:]), kwargs)
        return None

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in filter(on_device, leaves((args, kwargs))):
            self.device.counts.formats[f"{func._schema.name[6:]} of {str(tensor.dtype).removeprefix('torch.')}"] += 1
            if tensor.dtype not in NCCL_FORMATS:
                raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype} in {func._schema.name[6:]}")
        with self.device.fake:
            out = func(*args, **kwargs)
        work = out[-1] if isinstance(out, tuple | list) else out
        boxed = [x for x in args if isinstance(x, torch.ScriptObject)]
        group = next((ProcessGroup.unbox(x) for x in boxed if "ProcessGroup" in str(x._type())), None)
        unsaid = func._schema.name in _UNSAID
        writes = list(leaves(args[0])) if unsaid else written(func, args, kwargs)
        changed = {id(x) for x in writes}
        reads = [x for x in leaves((args, kwargs)) if id(x) not in changed]
        self._run_collective(func, args, kwargs, reads, writes)
        met = _met(func._schema.name, args, group)
        self.device.collective(func._schema.name[6:], FakeWork.unbox(work), met, reads, writes)
        return out

    def _run_collective(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[torch.Tensor], writes: list[Any]
    ) -> None:
        """Run a collective on values with the fake process group.

        In this group, other ranks add nothing to integers, and have no larger and no smaller value. Sums of floating
        tensors are unknown: only the last stage of a pipeline has a loss and tokens.
        """
        if func._schema.name in ("c10d::send", "c10d::recv_"):
            self._run_message(reads, writes)
            return
        inputs = [value_of(x) for x in reads or writes]
        is_reduced = func._schema.name == "c10d::allreduce_" and any(x.is_floating_point() for x in writes)
        is_sum = is_reduced and args[2].op() == dist.ReduceOp.SUM.value
        if is_sum or any(x is None for x in inputs):
            forget(writes)
            return
        for out in writes if reads else ():
            give(out, torch.zeros(out.shape, dtype=out.dtype))
        if all(value_of(x) is not None for x in writes):
            func(*tree_map(on_host, args), **tree_map(on_host, kwargs))

    def _run_message(self, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Forget received values, except integers such as a stage's shapes, which are those that were last sent."""
        for sent in reads:
            known = value_of(sent)
            self.device.said = known.clone() if known is not None and sent.dtype == torch.int64 else self.device.said
        said = self.device.said
        for out in writes:
            if said is not None and said.shape == out.shape and out.dtype == torch.int64:
                give(out, said)
            else:
                forget([out])


def _met(name: str, args: tuple[Any, ...], group: ProcessGroup | None) -> Met:
    """Return the participants. Weft binds only the group of all ranks to its device."""
    if group is None:
        return Met("", 2)
    ends = None
    if name in ("c10d::send", "c10d::recv_"):
        ends = (group.rank(), args[2]) if name == "c10d::send" else (args[2], group.rank())
    return Met(group.group_name, group.size(), ends, group is dist.group.WORLD)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation changes."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _updated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], frozenset[int]]:
    """Return the changed arguments that an operation also reads, and the ids of those that it does not change."""
    name = func._schema.name
    if name in _OVERWRITES or not (name.endswith("_") or name.startswith("weft::")):
        return [], frozenset()
    found: list[torch.Tensor] = []
    kept: set[int] = set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in _ONLY_WRITTEN:
            given = list(leaves(args[index] if index < len(args) else kwargs.get(argument.name)))
            found += given
            kept |= {id(x) for x in given} if argument.name in _ONLY_READ else set[int]()
    return found, frozenset(kept)


def _as_format(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a meta tensor with the strides of a copy of `source`."""
    return torch.empty_like(
        torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"),
        memory_format=kwargs.get("memory_format") or torch.preserve_format,
    )
