"""When memory runs out: what was live on this rank, and the smallest changes of the plan that would help.

Nothing is allocated on the device here: sizes are read off the tensors that training holds anyway.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from weft.errors import OutOfMemory
from weft.mesh import Mesh
from weft.monitor.times import memory_bytes
from weft.planner.tell import footprint
from weft.private_torch import storage_key, tree_leaves
from weft.spec import DecoderSpec
from weft.spec.rules import Facts
from weft.structure import repeated_blocks
from weft.train.microbatch import microbatch_size
from weft.units import format_bytes, parse_bytes

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Pieces of the texts of RuntimeErrors that mean: no memory. CUDA has an exception of its own besides.
_TEXTS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: "Tried to allocate 2.50 GiB" (CUDA), "you tried to allocate 1048576 bytes" (CPU).
_ASKED = re.compile(r"ried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)")


class ExplainedStep(Protocol):
    """What a training step must show to be explained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh

    def held_gradients(self) -> Iterable[torch.Tensor]:
        """The tensors that gradients lie in, also those that no parameter's `.grad` shows."""
        ...


_S = TypeVar("_S", bound=ExplainedStep)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes of what training holds on this rank. expected_optimizer: of states that the first update will make."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    expected_optimizer: int = 0

    @property
    def total(self) -> int:
        """What is live now."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def explains_memory(call: Callable[Concatenate[_S, Any, _P], _R]) -> Callable[Concatenate[_S, Any, _P], _R]:
    """For a step's call on its batch: raise OutOfMemory, with what would help, where memory runs out in it."""

    @functools.wraps(call)
    def explained(self: _S, batch: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(self, batch, *args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(explain(self, batch, error)) from error

    return explained


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that host or device memory ran out. False for one that is explained already."""
    if isinstance(error, OutOfMemory):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(piece in str(error) for piece in _TEXTS)


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Iterable[torch.Tensor] = ()) -> HeldBytes:
    """Count what model and optimizer hold on this rank, each storage once.

    Args:
        model: its parameters and buffers.
        optimizer: its parameters and states.
        gradients: those that `.grad` hides.
    """
    seen: set[int] = set()
    params = list(model.parameters())
    # Shards and master weights are the optimizer's own parameters.
    owned = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [*gradients, *(param.grad for param in (*params, *owned) if param.grad is not None)]
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    states = [value for value in leaves if isinstance(value, torch.Tensor)]
    counted = [_count(part, seen) for part in (params, grads, [*owned, *states], model.buffers())]
    return HeldBytes(*counted, expected_optimizer=0 if states else _expected(optimizer, owned))


def explain(step: ExplainedStep, batch: Any, error: BaseException) -> str:
    """The text of OutOfMemory: what was live, by class, and three changes of the plan."""
    mesh, live = step.mesh, live_bytes(step.model, step.optimizer, step.held_gradients())
    asked = _asked(error)
    held, other, lines = _rows(mesh.device, live)
    if live.expected_optimizer:
        later = f"{format_bytes(live.expected_optimizer)} more with the first update"
        lines[2] += f"  ({later})" if not live.optimizer else f"  ({later} of states)"
    shape = getattr(step.model, "spec", None)
    shape = shape if isinstance(shape, DecoderSpec) else None
    rows, tokens = microbatch_size(batch, mesh.plan.microbatches_per_step)
    usage = footprint.Usage(
        parameters=live.parameters,
        gradients=live.gradients,
        optimizer=live.optimizer + live.expected_optimizer,
        activations=other,
        num_rows=rows,
        num_tokens=tokens,
        num_blocks=max(1, len(repeated_blocks(step.model))),
    )
    missing = live.expected_optimizer + asked
    if shape is not None and tokens:
        # The allocation that failed was not the last one that the pass had before it.
        whole = footprint.activation_bytes(shape, tokens, mesh.plan.precision, mesh.plan.recompute)
        missing = live.expected_optimizer + max(asked, whole - other)
    facts = Facts(world_size=mesh.world_size, model=shape)
    # An accelerator reports its full memory by this error; a host's memory is full for what offload moves, too.
    can_offload = mesh.device.type != "cpu" or isinstance(error, torch.OutOfMemoryError)
    found = footprint.remedies(mesh.plan, usage, missing, facts, shape, can_offload)
    wanted = f"an allocation of {format_bytes(asked)} failed" if asked else "an allocation failed"
    text = [f"plan={mesh.plan}: rank {mesh.rank} ran out of memory on {mesh.device}: {wanted}, with {held}:", *lines]
    if not found:
        return "\n".join([*text, "No change of the plan would help. Use a smaller model or fewer tokens per sequence."])
    text.append("Try these changes of the plan, best first (each alone; saved bytes are estimates):")
    for number, remedy in enumerate(found, 1):
        note = "" if remedy.enough else ", not enough alone"
        more = f", on {remedy.plan.world_size} ranks" if remedy.plan.world_size != mesh.plan.world_size else ""
        text.append(f"  {number}. {remedy.change}  (about {format_bytes(remedy.saved_bytes)} less{more}{note})")
    return "\n".join(text)


def _rows(device: torch.device, live: HeldBytes) -> tuple[str, int, list[str]]:
    """(total in words, bytes of activations and temporaries, table) of this rank."""
    rows = [
        ("parameters", live.parameters),
        ("gradients", live.gradients),
        ("optimizer states", live.optimizer),
        ("buffers", live.buffers),
    ]
    now, peak = memory_bytes(device)
    other = max(0, peak - live.total)
    if device.type == "cuda":
        # The peak, because what a failed backward held is freed before anybody can look.
        reserve = max(0, torch.cuda.memory_reserved(device) - now)
        rows += [("activations", other), ("reserve", reserve)]
        held = f"{format_bytes(peak)} live at the peak"
    else:
        rows.append(("activations, Python and libraries", other))
        held = f"{format_bytes(peak)} resident at the peak"
    width = max(len(name) for name, _ in rows)
    return held, other, [f"  {name:<{width}}  {format_bytes(size):>8}" for name, size in rows]


def _asked(error: BaseException) -> int:
    """How many bytes the allocation that failed was for; 0 where its text does not say."""
    match = _ASKED.search(str(error))
    if match is None:
        return 0
    number, unit = match.groups()
    return parse_bytes(int(number)) if unit == "bytes" else parse_bytes(f"{number}{unit}")


def _count(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages that were not met before; they are added to `seen`."""
    total = 0
    for tensor in tensors:
        # A DTensor's storage here is that of its local shard.
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            total += storage.nbytes() if local.device.type != "meta" else 0
    return total


def _expected(optimizer: torch.optim.Optimizer, owned: list[torch.Tensor]) -> int:
    """States that the first update makes, for the optimizers whose options tell."""
    options = optimizer.defaults
    copies = 2 if "betas" in options else int(bool(options.get("momentum")))
    return copies * sum(getattr(param, "_local_tensor", param).nbytes for param in owned)
