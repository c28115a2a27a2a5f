"""Explanation of out-of-memory errors: live bytes on this rank by kind, and the smallest plan changes that would help.

Nothing is allocated on the device here: sizes are read from tensors that training already has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.config.rules.rule import Facts
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.devices import access
from weft.errors import ModelError, OutOfMemory, WeftError
from weft.models.inspect import layers
from weft.models.inspect.blocks import class_name, repeated_blocks
from weft.monitor.step_times import memory_bytes
from weft.planner.report import verdict as footprint
from weft.private_torch import storage_key, tree_leaves
from weft.train.batches.microbatches import microbatch_size
from weft.units import format_bytes, parse_bytes

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Substrings of RuntimeError messages that report a lack of memory. CUDA also has a separate exception class.
_TEXTS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: Matches "Tried to allocate 2.50 GiB" (CUDA) and "you tried to allocate 1048576 bytes" (CPU).
_ASKED = re.compile(r"ried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)")


class ExplainedStep(Protocol):
    """Attributes of a training step that are used to explain its errors. has_trained: True after a successful step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    has_trained: bool

    def local_gradients(self) -> Iterable[torch.Tensor]:
        """Return the tensors of this rank's gradients, including those that no parameter's `.grad` references."""
        ...


_S = TypeVar("_S", bound=ExplainedStep)


@dataclass(frozen=True, slots=True)
class MemoryByKind:
    """Live bytes of training on this rank. expected_optimizer: bytes of optimizer states that do not exist yet."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    expected_optimizer: int = 0

    @property
    def total(self) -> int:
        """Total of live bytes, without `expected_optimizer`."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def explains_failures(call: Callable[Concatenate[_S, Any, _P], _R]) -> Callable[Concatenate[_S, Any, _P], _R]:
    """Decorate a step's `__call__` to explain out-of-memory errors, and failures of the model in the first step.

    The call then raises OutOfMemory with suggestions, or ModelError if `explain_failure` finds an explanation. The
    original error is the cause. Other errors are unchanged. A successful call sets `has_trained`.
    """

    @functools.wraps(call)
    def explained(self: _S, batch: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            result = call(self, batch, *args, **kwargs)
        except WeftError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(explain(self, batch, error)) from error
            text = None if self.has_trained else explain_failure(error, self.model, self.mesh.plan)
            if text is None:
                raise
            raise ModelError(text) from error
        self.has_trained = True
        return result

    return explained


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception reports that host or device memory ran out, and is not explained yet."""
    if isinstance(error, OutOfMemory):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(piece in str(error) for piece in _TEXTS)


def live_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Iterable[torch.Tensor] = ()
) -> MemoryByKind:
    """Count the live bytes of model and optimizer on this rank, each storage once.

    Args:
        model: its parameters and buffers.
        optimizer: its parameters and states.
        gradients: tensors that no `.grad` references.
    """
    seen: set[int] = set()
    params = list(model.parameters())
    # Shards and master weights are the optimizer's own parameters.
    owned = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [*gradients, *(param.grad for param in (*params, *owned) if param.grad is not None)]
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    states = [value for value in leaves if isinstance(value, torch.Tensor)]
    counted = [_count(part, seen) for part in (params, grads, [*owned, *states], model.buffers())]
    return MemoryByKind(*counted, expected_optimizer=0 if states else _expected(optimizer, owned))


def explain(step: ExplainedStep, batch: Any, error: BaseException) -> str:
    """Return the message of OutOfMemory: live bytes by kind, and up to three possible changes of the plan."""
    mesh, live = step.mesh, live_bytes(step.model, step.optimizer, step.local_gradients())
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
        # The failed allocation was not the last one of the microbatch.
        whole = footprint.activation_bytes(shape, tokens, mesh.plan.precision, mesh.stage_plan.recompute)
        missing = live.expected_optimizer + max(asked, whole - other)
    facts = Facts(world_size=mesh.world_size, model=shape)
    # This exception means that the accelerator is full. Host memory may be full of offloaded tensors.
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


def _rows(device: torch.device, live: MemoryByKind) -> tuple[str, int, list[str]]:
    rows = [
        ("parameters", live.parameters),
        ("gradients", live.gradients),
        ("optimizer states", live.optimizer),
        ("buffers", live.buffers),
    ]
    now, peak = memory_bytes(device)
    other = max(0, peak - live.total)
    if access.allocated_bytes(device) is not None:
        # Use the peak, because a failed backward frees its tensors before this code runs.
        reserve = max(0, access.reserved_bytes(device) - now)
        rows += [("activations", other), ("reserve", reserve)]
        held = f"{format_bytes(peak)} live at the peak"
    else:
        rows.append(("activations, Python and libraries", other))
        held = f"{format_bytes(peak)} resident at the peak"
    width = max(len(name) for name, _ in rows)
    return held, other, [f"  {name:<{width}}  {format_bytes(size):>8}" for name, size in rows]


def _asked(error: BaseException) -> int:
    match = _ASKED.search(str(error))
    if match is None:
        return 0
    number, unit = match.groups()
    return parse_bytes(int(number)) if unit == "bytes" else parse_bytes(f"{number}{unit}")


def _count(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        # For a DTensor, count the storage of the local shard.
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            total += storage.nbytes() if local.device.type != "meta" else 0
    return total


def _expected(optimizer: torch.optim.Optimizer, owned: list[torch.Tensor]) -> int:
    options = optimizer.defaults
    copies = 2 if "betas" in options else int(bool(options.get("momentum")))
    return copies * sum(getattr(param, "_local_tensor", param).nbytes for param in owned)


# Explanation of failures in the first step of models whose code needs full tensors but gets only a rank's part.


def explain_failure(error: Exception, model: nn.Module, plan: Plan) -> str | None:
    """Return a message with the failed module, the plan settings that may make it fail, and the fix, or None.

    The result is None for Weft's own decoders, if no module failed, or if no setting of the plan can be the cause:
    sharding, recompute or offloading of activations.
    """
    if isinstance(model, layers.KnownModel):
        return None  # Weft's decoders support every plan: their failure is a bug that the user cannot avoid
    parts, path = _parts(plan), _failed_module(error, model)
    if path is None:
        return None
    name = f"{path} ({class_name(model.get_submodule(path))})" if path else class_name(model)
    hooked = [f"recompute={plan.recompute}"] if plan.recompute != "none" else []
    hooked += [f"offload={each}" for each in plan.offload if each.startswith("activations")]
    if hooked and "support saved tensor hooks" in str(error):
        return (
            f"{hooked[0]}: the forward of {name} calls torch.func.grad, vjp, jacrev or hessian, which torch does not "
            f"support with it. Use torch.autograd.grad with create_graph=True, or leave out {' and '.join(hooked)}."
        )
    if not parts:
        return None
    fields, kinds, remedies = zip(*parts, strict=True)
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return (
        f"{' '.join(fields)}: {name} fails on a rank's part of {' and '.join(kinds)} ({type(error).__name__}: "
        f"{first}). If one process can train this model, use {' or '.join(remedies)}."
    )


def _parts(plan: Plan) -> list[tuple[str, str, str]]:
    found = [
        (plan.sp, "sp=on", "the tokens between layers", "sp=off"),
        (plan.tp > 1, f"tp={plan.tp}", "the features, heads or vocabulary", "tp=1"),
        (plan.cp > 1, f"cp={plan.cp}", "each sequence", "cp=1"),
        (plan.pp > 1, f"pp={plan.pp}", "the blocks", "pp=1"),
        (plan.zero == 3, "zero=3", "the weights, which are unsharded only while their own module is called", "zero=2"),
    ]
    return [(name, divided, remedy) for is_on, name, divided, remedy in found if is_on]


def _failed_module(error: Exception, model: nn.Module) -> str | None:
    """Return the path of the innermost module of the model whose method raised, or None."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
