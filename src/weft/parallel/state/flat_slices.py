"""A model's tensors as one process holds them: recorded before it is laid over a mesh, when all of them are there."""

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
    """One entry of the plain model's state_dict.

    first: the first name of the tensor, which is its own where no other entry shares it.
    """

    first: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    is_parameter: bool

    @property
    def num_bytes(self) -> int:
        """Of the values, as they were loaded."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.shape).numel()

    def bytes_laid_out(self, precision: Precision) -> int:
        """Return the bytes of the values in forward and backward, and of the master where they are rounded."""
        if not self.dtype.is_floating_point:
            return self.num_bytes
        masters = precision.master.itemsize if self.is_trained and precision.is_mixed else 0
        return self.numel * (precision.compute.itemsize + masters)


def originals_of(model: nn.Module) -> dict[str, Original]:
    """Return the entries of a plain model's state_dict by name, in its order.

    Raises:
        ModelError: for a parameter or buffer of a lazy module, which has no shape yet.
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
    """Refuse a model in float64 under a precision that keeps weights in float32.

    Raises:
        ModelError: with the first such parameter.
    """
    if Precision.of(plan).master == torch.float64:
        return
    wide = [name for name, one in model.named_parameters() if one.dtype == torch.float64]
    if wide:
        raise ModelError(
            f"precision={plan.precision}: parameter {wide[0]!r} is float64, and this precision keeps weights in "
            "float32. Use precision=fp64, or call model.float() before parallelize."
        )


def dtype_growth_warning(originals: Mapping[str, Original], precision: Precision) -> str:
    """Tell, in a sentence, of parameters loaded in 16 bits that take more memory from here on; "": there are none."""
    params = [one for name, one in originals.items() if one.is_parameter and one.first == name]
    narrow = {one.dtype for one in params} & {torch.bfloat16, torch.float16}
    before, after = sum(one.num_bytes for one in params), sum(one.bytes_laid_out(precision) for one in params)
    if not narrow or after <= before:
        return ""
    loaded = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
    sizes = f"the model was loaded in {loaded} with {format_bytes(before)} of parameters and has {format_bytes(after)}"
    if not precision.is_mixed:
        kept = str(precision.master).removeprefix("torch.")
        return (
            f"precision: {sizes} from here on, all in {kept}. Use precision=bf16 to compute in bfloat16: "
            f"frozen weights then stay in it, and trained ones have float32 masters beside them."
        )
    return (
        f"precision: {sizes} from here on, since each trained weight has a float32 master beside it. Every plan "
        "keeps these masters. Use zero=1, 2 or 3 to divide them, or offload=optimizer to keep them on the host."
    )


# What a rank holds of a model's tensors and of an optimizer's states, for checkpoints: each a stretch of memory.

#: Elements that travel at once where the saved format is another than ours, or the memory is a device's.
_AT_ONCE = 2**23


class SavedTensor(Protocol):
    """Shape and format of a tensor in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its dtype, as safetensors writes it."""
        ...


class StateSource(Protocol):
    """A group of a checkpoint: what there is, and any stretch of it."""

    @property
    def entries(self) -> Mapping[str, SavedTensor]:
        """What was saved, by name."""
        ...

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's line, in the saved format.

        Args:
            name: of the tensor.
            part: which elements of the whole tensor.
            start: place in its line where reading begins, in elements.
            out: filled to its end.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FlatSlice:
    """Elements of one tensor that lie here. flat: its memory, 1-D, the part's line from `start` on.

    name: in checkpoints. deal: who writes which of them. home: where they go once loaded, where `flat` is a copy.
    """

    name: str
    part: Part
    deal: OwnershipMap
    start: int
    flat: torch.Tensor
    home: torch.Tensor | None = None

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, part: Part, deal: OwnershipMap) -> FlatSlice:
        """Return the stretch of a tensor of which this rank holds all of its part.

        Args:
            name: in the checkpoint.
            tensor: the part, of any strides.
            part: which elements of the whole tensor it is.
            deal: which ranks hold the same part.
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
        """Return what of it this rank writes, and from where on; None: others do."""
        run = self.deal.run_of(rank, self.start, self.start + self.flat.numel(), self.part.numel)
        return None if run is None else (run[0], self.flat[run[0] - self.start : run[1] - self.start])

    @torch.no_grad()
    def fill(self, source: StateSource) -> None:
        """Take its elements from a checkpoint.

        Raises:
            CheckpointError: where that has none of them, or another shape.
        """
        saved = expected(source, self.name, self.part.shape)
        kind, flat = torch_formats()[saved.dtype], self.flat
        if not flat.numel():
            return
        if flat.dtype == kind and flat.device.type == "cpu" and flat.is_contiguous():
            source.read(self.name, self.part, self.start, flat.view(torch.uint8).numpy().data)
            torch.autograd.graph.increment_version(flat)
            self._bring_home()
            return
        for first in range(0, flat.numel(), _AT_ONCE):
            target = flat[first : first + _AT_ONCE]
            staged = torch.empty(target.numel(), dtype=kind)
            source.read(self.name, self.part, self.start + first, staged.view(torch.uint8).numpy().data)
            target.copy_(staged)
        self._bring_home()

    def _bring_home(self) -> None:
        if self.home is not None:
            self.home.copy_(self.flat.view(self.home.shape))


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A run of a part's line, for optimizers that ask where it lies. name: in checkpoints. start: its first element."""

    name: str
    part: Part
    start: int
    device: torch.device

    def positions(self, first: int, last: int) -> torch.Tensor:
        """Return where elements of the run lie in the whole tensor, counted in the order of its memory: int64."""
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
    """Tell an optimizer that asks for it, by a dict `places`, where what it updates lies in whole parameters."""
    places = getattr(optimizer, "places", None)
    if isinstance(places, dict):
        places.clear()
        places.update(held)


def expected(source: StateSource, name: str, shape: tuple[int, ...]) -> SavedTensor:
    """What a checkpoint has under that name. CheckpointError where it has nothing, or another shape."""
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
    """Return a dense tensor's elements in the order of its memory, or in that of `stride`, which may take a copy."""
    if stride is not None and stride != tensor.stride() and tensor.numel():
        like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = like.copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def filled(full_name: str, like: FlatSlice, piece: torch.Tensor, source: StateSource) -> torch.Tensor:
    """Return a state of a piece, in the saved format, from a checkpoint.

    Args:
        full_name: of the state in the checkpoint, `parameter/key`.
        like: where the piece lies in the whole parameter.
        piece: the parameter's piece on this rank; the state has its shape.
        source: the checkpoint.
    """
    target = torch.empty_like(piece, dtype=torch_formats()[source.entries[full_name].dtype], requires_grad=False)
    FlatSlice(full_name, like.part, like.deal, like.start, flat_of(target)).fill(source)
    return target


def alone(name: str, value: torch.Tensor, rank: int) -> FlatSlice:
    """Return the stretch of a tensor that is shaped as no parameter, which one of the ranks that have it writes whole.

    Args:
        name: in the checkpoint.
        value: the same on all ranks.
        rank: the one that writes it.
    """
    value = value.detach().contiguous()
    return FlatSlice(name, Part(tuple(value.shape)), OwnershipMap.to_one(rank, value.numel()), 0, value.view(-1))
