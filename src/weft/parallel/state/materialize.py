"""Materialization of meta parameters: allocation of this rank's part, with initial values determined by name.

A model larger than one device is built and sharded on the meta device, which needs no memory. Then each full parameter
is created on the host, one at a time, and copied in part to this rank's device.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce
from weft.errors import CommError, ModelError
from weft.models.adapters import AdaptedLinear
from weft.models.adapters_experts import AdaptedExperts
from weft.models.initialize import initialise_parameter
from weft.models.inspect.blocks import class_name
from weft.parallel.private_torch import apply_to_tensors
from weft.parallel.state.placement import AxisMap


class Materialise:
    """Materializes the parameters of one model.

    Args:
        seed: seed for `weft.models.initialize`, or None if no parameter needs initialization.
        filled_later: True if values are loaded from files afterwards, so that each rank only allocates its part. A and
            B of LoRA adapters are initialized from the seed, because files do not contain them.

    Raises:
        ModelError: if a buffer is on the meta device, or a parameter needs initialization and there is no seed.
    """

    def __init__(
        self, model: nn.Module, axes: AxisMap, seed: int | None, device: torch.device, filled_later: bool = False
    ):
        self._filled_later = filled_later
        self._awaited: set[int] = set()
        self._axes, self._seed, self._device = axes, seed, device
        self._owners: dict[int, tuple[str, nn.Module]] = {}
        for path, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                self._owners.setdefault(id(param), (f"{path}.{name}" if path else name, module))
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ModelError(
                    f"buffer {name!r}: it is on the meta device, and Weft has no rule for its values. Give it values "
                    "first."
                )
        meta = [name for name, param in model.named_parameters() if param.is_meta and not self._is_filled_later(param)]
        if meta and seed is None:
            raise ModelError(
                f"parameter {meta[0]!r}: it is on the meta device. Give the model weights first, or seed= to make them."
            )

    @torch.no_grad()
    def make(
        self, params: Iterable[nn.Parameter], frozen_formats: Mapping[nn.Parameter, torch.dtype] | None = None
    ) -> None:
        """Create the values of the meta parameters in `params` in place. Only allocate those that are filled later.

        `frozen_formats` overrides the dtype of frozen parameters that are filled later.
        """
        formats = frozen_formats or {}
        for param in params:
            if not param.is_meta:
                continue
            if self._is_filled_later(param):
                dtype = param.dtype if param.requires_grad else formats.get(param, param.dtype)
                here = torch.empty(param.shape, dtype=dtype, device=self._device)
                torch.utils.swap_tensors(param, nn.Parameter(here, requires_grad=param.requires_grad))
                self._awaited.add(id(param))
                continue
            assert self._seed is not None
            name, owner = self._owners[id(param)]
            whole = torch.empty(self._axes.full_shape(name, param.shape), dtype=param.dtype)
            initialise_parameter(whole, self._axes.saved_name(name), owner, self._seed)
            part = self._axes.part(name, whole).to(self._device, copy=True).contiguous()
            torch.utils.swap_tensors(param, nn.Parameter(part, requires_grad=param.requires_grad))

    def value_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's values, or None if they are loaded later and must not be communicated yet."""
        return None if id(param) in self._awaited else param.detach()

    def _is_filled_later(self, param: nn.Parameter) -> bool:
        if not self._filled_later:
            return False
        name, owner = self._owners[id(param)]
        return not (isinstance(owner, AdaptedLinear | AdaptedExperts) and name.endswith(("lora_A", "lora_B")))


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device. Meta tensors stay on the meta device."""
    apply_to_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


# Check that all ranks built the same model, before any collective could fail on different shapes.


def check_same_model(model: nn.Module, axes: AxisMap, device: torch.device) -> None:
    """Compare names, full shapes, sharding and requires_grad among the ranks of one stage.

    Raises CommError if a rank built another model. The message names the tensor and the ranks. Raises ModelError if a
    parameter is complex.
    """
    axis = axes.stage
    rows: list[tuple[Any, ...]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        rows.append((name, axes.full_shape(name, tensor.shape), is_trained, *axes.agreed_fields(name)))
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ModelError(f"parameter {name!r}: it is complex. Keep it as torch.view_as_real of it.")
    if axis.size == 1:
        return
    most = all_reduce(torch.tensor([len(rows)], device=device), axis, op="max").item()
    hashes = [hashlib.blake2b(repr(row).encode(), digest_size=8).digest() for row in rows]
    numbers = [int.from_bytes(one, "little", signed=True) for one in hashes]
    marks = torch.tensor(numbers + [0] * (int(most) - len(rows)), device=device)
    # Reduce min and max instead of gathering, so that the received bytes do not grow with the number of ranks.
    unlike = (all_reduce(marks.clone(), axis, op="max") != all_reduce(marks.clone(), axis, op="min")).nonzero()
    if len(unlike):
        column = int(unlike[0])
        others = all_gather(marks[column : column + 1], axis)
        ranks = [axis.ranks[rank] for rank in (others != others[0]).nonzero().flatten().tolist()]
        here = rows[column] if column < len(rows) else None
        what = f"tensor {here[0]!r} with shape {here[1]} and requires_grad={here[2]}" if here else "no further tensor"
        raise CommError(
            f"model: rank {', '.join(map(str, ranks))} built another model than rank {axis.ranks[0]}. The first "
            f"difference is tensor number {column}: this rank has {what}. Build the same model on every rank."
        )


# Guards of state_dict and related methods if a rank holds only shards: they raise an error that names the right call.

_ATTRIBUTE = "_weft_pieces"


def guard_model(model: nn.Module, axes: AxisMap) -> None:
    """Make state_dict and load_state_dict of a sharded model raise ModelError, and under zero=3 also copy.deepcopy.

    Applies to each submodule with parameters too. Does nothing if this rank has the full model.
    """
    words = _divided_model(axes)
    if not words:
        return
    guard, kind = _Guard(), class_name(model)
    start = f"model of type {kind}: under {words} this rank has only a part of it"
    save = (
        f"{start}, so state_dict() would return shards. Use run.save(folder, step=..., model=..., optimizer=...) to "
        "resume later, run.full_state_dict(model) for full tensors, or run.save_pretrained(model, folder) for Hugging "
        "Face files."
    )
    load = (
        f"{start}, so load_state_dict() would load full tensors into shards. Load before run.parallelize(model), or "
        "use run.load(folder, model=..., optimizer=...) for what run.save wrote."
    )
    copy = (
        f"model of type {kind}: under zero=3 its weights are shards, and it cannot be copied, as AveragedModel and "
        "copy.deepcopy do. Use run.ema(model, decay=0.999) for averaged weights, or run.full_state_dict(model)."
    )
    # On each module: scripts often save the model inside a wrapper.
    for module in model.modules():
        if next(module.parameters(), None) is not None or module is model:
            module.register_state_dict_pre_hook(functools.partial(guard.refuse, save))
            module.register_load_state_dict_pre_hook(functools.partial(guard.refuse, load))
            if axes.mesh.plan.zero == 3:
                # copy.deepcopy looks at the instance. fully_shard's own class would only raise an assertion.
                module.__dict__["__deepcopy__"] = functools.partial(_refuse, copy)
    setattr(model, _ATTRIBUTE, guard)


@contextlib.contextmanager
def allow_sharded_state(model: nn.Module) -> Iterator[None]:
    """Let state_dict and load_state_dict of the model handle this rank's shards in this context, without an error."""
    guard = getattr(model, _ATTRIBUTE, None)
    if guard is None:
        yield
        return
    guard.is_open = True
    try:
        yield
    finally:
        guard.is_open = False


def guard_optimizer(optimizer: torch.optim.Optimizer, axes: AxisMap) -> None:
    """Make state_dict and load_state_dict of an adopted optimizer raise ModelError if it works on shards."""
    plan = axes.mesh.plan
    words = [_divided_model(axes)] if plan.zero in (0, 3) else [f"zero={plan.zero}", _divided_model(axes)]
    if plan.zero in (1, 2) and plan.dp_shard * plan.cp == 1:
        words = words[1:]
    said = " ".join(word for word in words if word)
    if not said:
        return
    start = f"optimizer {type(optimizer).__name__}: under {said} this rank has only a part of its states"
    save = f"{start}, so state_dict() would return shards. Use run.save(folder, step=..., model=..., optimizer=...)."
    load = (
        f"{start}, so load_state_dict() would take other states for them. Use run.load(folder, model=..., "
        "optimizer=...) for what run.save wrote."
    )
    optimizer.register_state_dict_pre_hook(functools.partial(_refuse, save))
    optimizer.register_load_state_dict_pre_hook(functools.partial(_refuse, load))


def _divided_model(axes: AxisMap) -> str:
    """Return the plan fields that shard the model on this rank, or "" if it is full."""
    plan = axes.mesh.plan
    cut = {axis for name, placement in axes.placements.items() if axes.is_divided(name) for axis in placement.cut}
    sizes = {"pp": plan.pp, "tp": plan.tp, "ep": plan.ep}
    words = [f"{axis}={size}" for axis, size in sizes.items() if axis in cut or (axis == "pp" and size > 1)]
    words += ["sharded tables"] * axes.divides_tables
    return " ".join([*words, "zero=3"] if plan.zero == 3 else words)


class _Guard:
    """Hooks of one model. They are an object because copies and pickles of a module include its hooks."""

    is_open = False

    def refuse(self, message: str, *args: Any) -> None:
        if not self.is_open:
            raise ModelError(message)


def _refuse(message: str, *args: Any) -> NoReturn:
    raise ModelError(message)
