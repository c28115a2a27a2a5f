"""Tensors of the plain model, and flat slices of model and optimizer state for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.checkpoint.read import OwnershipMap, Part
from weft.checkpoint.safetensors_files import torch_formats
from weft.config.plan import Plan
from weft.errors import CheckpointError, ModelError
from weft.parallel.state.precision import Precision
from weft.units import format_bytes


@dataclass(frozen=True, slots=True)
class Original:
    """One entry of the plain model's state_dict. `first` is the first name of its tensor, if entries share one."""

    first: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    is_parameter: bool

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes, in the dtype in which they were loaded."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def originals_of(model: nn.Module) -> dict[str, Original]:
    """Return the entries of a plain model's state_dict by name, in its order.

    Raises ModelError if a parameter or buffer belongs to a lazy module, which has no shape yet.
    """
    first: dict[int, str] = {}
    found: dict[str, Original] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            if is_lazy(tensor):
                raise ModelError(
                    f"model: {name} belongs to a lazy module, which has no shape before its first forward. Run one "
                    "batch through the model before parallelize, or build the module with its sizes."
                )
            first.setdefault(id(tensor), name)
            is_parameter = isinstance(tensor, nn.Parameter)
            found[name] = Original(
                first[id(tensor)], tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_parameter
            )
    return found


def refuse_float64(model: nn.Module, plan: Plan) -> None:
    """Raise ModelError for a model with float64 parameters under a precision that keeps weights in float32."""
    if Precision.of(plan).master == torch.float64:
        return
    wide = [name for name, one in model.named_parameters() if one.dtype == torch.float64]
    if wide:
        raise ModelError(
            f"precision={plan.precision}: parameter {wide[0]!r} is float64, and this precision keeps weights in "
            "float32. Use precision=fp64, or call model.float() before parallelize."
        )


def dtype_growth_warning(originals: Mapping[str, Original], precision: Precision) -> str:
    """Return a warning if parameters loaded in 16 bits will take more memory, else ""."""
    params = [one for name, one in originals.items() if one.is_parameter and one.first == name]
    narrow = {one.dtype for one in params} & {torch.bfloat16, torch.float16}
    before, after = sum(one.num_bytes for one in params), 0
    for one in params:
        masters = precision.master.itemsize if one.is_trained and precision.is_mixed else 0
        is_float = one.dtype.is_floating_point
        after += one.numel * (precision.compute.itemsize + masters) if is_float else one.num_bytes
    if not narrow or after <= before:
        return ""
    loaded = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
    sizes = f"the model was loaded in {loaded} with {format_bytes(before)} of parameters and has {format_bytes(after)}"
    if not precision.is_mixed:
        kept = str(precision.master).removeprefix("torch.")
        return (
            f"precision: {sizes} from here on, all in {kept}. Use precision=bf16 to compute in bfloat16: frozen "
            "weights then stay in bfloat16, and trained ones have float32 masters too."
        )
    return (
        f"precision: {sizes} from here on, since each trained weight has a float32 master too. Every plan keeps "
        "these masters. Use zero=1, 2 or 3 to divide them, or offload=optimizer to keep them on the host."
    )


# Flat slices of a model's tensors and an optimizer's states on a rank, for checkpoints.

#: Number of elements per copy if the saved dtype differs, or the memory is on a device.
_AT_ONCE = 2**23


class SavedTensor(Protocol):
    """Shape and dtype of a tensor in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the dtype, as safetensors writes it."""
        ...


class StateSource(Protocol):
    """A group of tensors in a checkpoint: its entries, and reads of any flat slice."""

    @property
    def entries(self) -> Mapping[str, SavedTensor]:
        """Saved tensors, by name."""
        ...

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with consecutive elements of a flattened part from index `start` on, in the saved dtype."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FlatSlice:
    """Elements of one tensor on this rank.

    Attributes:
        name: the name in checkpoints.
        part: this rank's part of the tensor.
        deal: assigns the elements to the ranks that write them.
        start: index of the first element of `flat` in the flattened part.
        flat: elements, 1-D.
        home: if `flat` is a copy, the tensor that gets the elements after loading.
    """

    name: str
    part: Part
    deal: OwnershipMap
    start: int
    flat: torch.Tensor
    home: torch.Tensor | None = None

    @classmethod
    def of_full(cls, name: str, tensor: torch.Tensor, part: Part, deal: OwnershipMap) -> FlatSlice:
        """Return the flat slice, of the tensor's dtype and shape (numel,), of a part that is completely on this rank.

        It is a view of a dense tensor, else a copy. deal: assignment of the elements to ranks that hold the same part.
        """
        tensor = tensor.detach()
        dense = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
        is_dense, reach = True, 1
        for step, size in dense:
            is_dense, reach = is_dense and step == reach, reach * size
        if is_dense:
            return cls(name, part, deal, 0, flat_of(tensor))
        part = Part(part.shape, part.dim, part.rows)
        return cls(name, part, deal, 0, tensor.contiguous().view(-1), tensor)

    def mine(self, rank: int) -> tuple[int, torch.Tensor] | None:
        """Return (index of the first element, elements) that this rank writes, or None if it writes nothing."""
        run = self.deal.run_of(rank, self.start, self.start + self.flat.numel(), self.part.numel)
        return None if run is None else (run[0], self.flat[run[0] - self.start : run[1] - self.start])

    @torch.no_grad()
    def fill(self, source: StateSource) -> None:
        """Read the elements from a checkpoint. Raises CheckpointError if the tensor is missing or has another shape."""
        saved = expected(source, self.name, self.part.shape)
        kind, flat = torch_formats()[saved.dtype], self.flat
        if not flat.numel():
            return
        if flat.dtype == kind and flat.device.type == "cpu" and flat.is_contiguous():
            source.read(self.name, self.part, self.start, flat.view(torch.uint8).numpy().data)
            torch.autograd.graph.increment_version(flat)
        else:
            for first in range(0, flat.numel(), _AT_ONCE):
                target = flat[first : first + _AT_ONCE]
                staged = torch.empty(target.numel(), dtype=kind)
                source.read(self.name, self.part, self.start + first, staged.view(torch.uint8).numpy().data)
                target.copy_(staged)
        self.bring_home()

    def bring_home(self) -> None:
        """Copy the elements back to `home`, if the slice is a copy."""
        if self.home is not None:
            self.home.copy_(self.flat.view(self.home.shape))


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Consecutive elements of a flattened part from `start` on. It gives optimizers positions in the full tensor."""

    name: str
    part: Part
    start: int
    device: torch.device

    def positions(self, first: int, last: int) -> torch.Tensor:
        """Return int64 positions in the full tensor, in memory order, of elements `first` to `last` (exclusive)."""
        part = self.part
        line = torch.arange(self.start + first, self.start + last, device=self.device)
        if part.rows is None:
            return line
        order, local = part.order or tuple(range(len(part.shape))), part.local_shape
        inner = math.prod(local[dim] for dim in order[order.index(part.dim) + 1 :])
        row = line // inner % local[part.dim]
        if len(part.rows) == 1:
            there = row + part.rows[0][0]
        else:
            there = torch.tensor([one for rows in part.rows for one in range(*rows)], device=line.device)[row]
        return (line // (inner * local[part.dim]) * part.shape[part.dim] + there) * inner + line % inner


def register_param_locations(optimizer: torch.optim.Optimizer, held: Iterable[tuple[nn.Parameter, PlacedPart]]) -> None:
    """Set each parameter's location in its full parameter in the optimizer's `places`, if it has this dict."""
    places = getattr(optimizer, "places", None)
    if isinstance(places, dict):
        places.clear()
        places.update(held)


def expected(source: StateSource, name: str, shape: tuple[int, ...]) -> SavedTensor:
    """Return the checkpoint's entry of that name. Raises CheckpointError if it is missing or has another shape."""
    saved = source.entries.get(name)
    if saved is None:
        raise CheckpointError(
            f"tensor {name!r}: the checkpoint lacks it. Load the checkpoint into the model it was saved from."
        )
    if tuple(saved.shape) != tuple(shape):
        raise CheckpointError(
            f"tensor {name!r}: {tuple(saved.shape)} in the checkpoint, {tuple(shape)} in the model. "
            f"Load the checkpoint into the model it was saved from."
        )
    return saved


def read_full(source: StateSource, name: str) -> torch.Tensor:
    """Return a tensor as it was saved, on the host."""
    saved = source.entries[name]
    found = torch.empty(saved.shape, dtype=torch_formats()[saved.dtype])
    if found.numel():
        source.read(name, Part(tuple(saved.shape)), 0, found.view(-1).view(torch.uint8).numpy().data)
    return found


def flat_of(tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a dense tensor's elements as shape (numel,) of its dtype, in its memory order or that of `stride`.

    It is a view, or a copy if `stride` differs from the tensor's.
    """
    if stride is not None and stride != tensor.stride() and tensor.numel():
        like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = like.copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def filled(full_name: str, like: FlatSlice, piece: torch.Tensor, source: StateSource) -> torch.Tensor:
    """Return a state of a local parameter from a checkpoint, in the saved dtype.

    full_name: name of the state in the checkpoint, `parameter/key`. like: flat slice of the parameter. piece: this
    rank's part of the parameter; the state has its shape and device.
    """
    target = torch.empty_like(piece, dtype=torch_formats()[source.entries[full_name].dtype], requires_grad=False)
    FlatSlice(full_name, like.part, like.deal, like.start, flat_of(target)).fill(source)
    return target


def single_rank_slice(name: str, value: torch.Tensor, rank: int) -> FlatSlice:
    """Return the flat slice, of the value's dtype and shape (numel,), of a tensor that one rank writes in full."""
    value = value.detach().contiguous()
    return FlatSlice(name, Part(tuple(value.shape)), OwnershipMap.to_one(rank, value.numel()), 0, value.view(-1))
