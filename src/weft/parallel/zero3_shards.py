"""This rank's shards of a module's parameters under fully_shard, and whole tensors made from them.

A parameter of shape (n, ...) is cut along dim 0 into parts of ceil(n / size) rows; the last ranks have fewer rows, or
none. Optimizers whose update is elementwise get plain tensors that share the shard's memory: DTensor's dispatch would
cost more than a small update itself. All others get the DTensors, whose operations know the whole shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm import all_gather
from weft.errors import CheckpointError, ModelError
from weft.mesh import Axis
from weft.parallel.adopt import ELEMENTWISE


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One parameter's part on this rank. param: what fully_shard keeps; local: the same memory as a plain parameter."""

    name: str
    param: nn.Parameter
    local: nn.Parameter
    axis: Axis

    @property
    def rows(self) -> int:
        """Rows of the whole parameter on each rank but the last ones."""
        return -(-self.param.shape[0] // self.axis.size)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor, as a view."""
        start = min(self.axis.rank * self.rows, tensor.shape[0])
        return tensor[start : start + self.local.shape[0]]

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from a tensor like `local` on each rank. A collective over the shard axis."""
        shape = self.param.shape
        padded = local
        if local.shape[0] != self.rows:
            padded = local.new_zeros(self.rows, *shape[1:])
            padded[: local.shape[0]] = local
        return all_gather(padded.reshape(-1), self.axis)[: shape.numel()].view(shape)

    def like(self, param: nn.Parameter, value: Any) -> Any:
        """A state of the whole parameter as a state of `param`: this rank's rows, in a tensor of `param`'s kind."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim == 0 or value.shape != self.param.shape:
            # Counters of steps stay where the optimizer wants them: fused kernels read them on the device.
            return value.clone().to(self.local.device)
        part = local_part(value) if isinstance(value, DTensor) else self.part(value)
        return _as(param, part.clone().to(self.local.device))

    def whole_state(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A state of the shard as a state of the whole parameter. A collective."""
        if value.ndim == 0:
            return value
        if value.shape in (self.local.shape, self.param.shape):
            return self.whole(local_part(value))
        if isinstance(value, DTensor):
            return value.full_tensor()
        raise CheckpointError(
            f"optimizer state {name!r}: its shape {tuple(value.shape)} is not the parameter's, so it cannot be joined. "
            f"Say elementwise=False in the parameter group, so that the optimizer sees whole shapes."
        )

    def link(self) -> None:
        """Let the plain parameter have the DTensor's gradient; zeros where no rank used the parameter."""
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param)
        self.local.grad = local_part(self.param.grad)


def find_shards(model: nn.Module, names: list[str], axis: Axis) -> dict[str, Shard]:
    """Shards by name, of those parameters that fully_shard took."""
    params = dict(model.named_parameters())
    found: dict[str, Shard] = {}
    for name in names:
        param = params[name]
        if isinstance(param, DTensor):
            local = nn.Parameter(local_part(param), requires_grad=param.requires_grad)
            found[name] = Shard(name, param, local, axis)
    return found


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's tensor on this rank; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(param: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return part
    return DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


class ShardAdoption:
    """Puts shards in the place of parameters in optimizers, whether these were built before or after sharding."""

    def __init__(self, shards: Mapping[str, Shard], originals: Mapping[str, nn.Parameter]):
        self._shards = shards
        # An original dies with its optimizer, and its id may then be another tensor's: hence the references.
        self._originals = {id(param): (weakref.ref(param), name) for name, param in originals.items()}
        self._names = {id(shard.param): shard.name for shard in shards.values()}
        #: What each adopted optimizer holds of the sharded parameters, by name.
        self.held: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, nn.Parameter]]
        self.held = weakref.WeakKeyDictionary()

    def name_of(self, param: torch.Tensor) -> str | None:
        """The name of one of the model's parameters, as it was before sharding or is now."""
        reference, name = self._originals.get(id(param), (lambda: None, None))
        return name if reference() is param else self._names.get(id(param))

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of all groups. States that the optimizer has already are cut to fit."""
        usual = getattr(optimizer, "elementwise", type(optimizer) in ELEMENTWISE)
        held: dict[str, nn.Parameter] = {}
        groups = []
        for group in optimizer.param_groups:
            elementwise = group.get("elementwise", usual)
            groups.append([self._replacement(param, elementwise, held) for param in group["params"]])
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            for old, new in zip(group["params"], params, strict=True):
                if old is not new and (state := optimizer.state.pop(old, None)):
                    shard = self._shards[self.name_of(old) or ""]
                    optimizer.state[new] = {key: shard.like(new, value) for key, value in state.items()}
                if old is not new and not isinstance(old, DTensor):
                    # Its weights live in the shards now: whoever still holds it should not hold their memory too.
                    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
            group["params"] = params
        self.held[optimizer] = held

    def _replacement(self, param: nn.Parameter, elementwise: bool, held: dict[str, nn.Parameter]) -> nn.Parameter:
        name = self.name_of(param)
        if name is None and param.requires_grad:
            raise ModelError(
                f"optimizer: it holds a parameter of shape {tuple(param.shape)} that the parallelized model does not "
                f"have, so each rank would train its own. Make it a parameter of the model, before parallelize."
            )
        if name not in self._shards:
            return param  # not sharded: every rank keeps it whole
        shard = self._shards[name]
        held[name] = shard.local if elementwise else shard.param
        return held[name]

    def states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the states of sharded parameters, whole, as `name/key`. A collective."""
        for name, param in self.held[optimizer].items():
            shard = self._shards[name]
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}/{key}", shard.whole_state(f"{name}/{key}", value)

    def load(self, optimizer: torch.optim.Optimizer, full_name: str, saved: torch.Tensor) -> None:
        """Give the optimizer this rank's part of one whole state."""
        name, _, key = full_name.rpartition("/")
        param = self.held[optimizer].get(name)
        if param is None:
            raise CheckpointError(f"optimizer state {full_name!r}: the optimizer has no parameter {name!r}.")
        optimizer.state[param][key] = self._shards[name].like(param, saved)
