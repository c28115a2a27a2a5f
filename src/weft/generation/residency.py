"""Which weights of a model stay in memory, and which are read from files each time they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.models.inspect.blocks import repeated_blocks
from weft.units import format_bytes

#: Each weight begins at a multiple of this in the buffer. It is the alignment of torch's own allocations, on which the
#: order of summation in matrix products can depend.
_ALIGNMENT = 64
#: Memory for the Python objects of a model and the work areas of torch's kernels, at most a 16th of the limit.
_OBJECT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter: its first name in the state_dict, shape and dtype. Tied parameters are one weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in memory, with alignment."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def view(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return the part of `memory` (bytes) that the weight has from byte `start` on, (numel,) of its dtype."""
        return memory[start : start + math.prod(self.shape) * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StreamUnit:
    """A module whose weights are read together: a block, or the output layer."""

    path: str
    module: nn.Module
    weights: tuple[Weight, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the weights in memory."""
        return sum(weight.num_bytes for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Residency:
    """Weights that stay in memory, and weights that do not.

    Attributes:
        resident: weights that stay in memory.
        streamed: units in the expected order of their forwards, each with its weights that are not resident.
        rows: embeddings whose rows are read from the files, with their weights.
        extra_bytes: memory for module buffers, conversions and rearranging.
    """

    resident: tuple[Weight, ...]
    streamed: tuple[StreamUnit, ...]
    rows: tuple[tuple[nn.Embedding, Weight], ...]
    extra_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer that streamed units are read into: the two largest units fit."""
        return sum(sorted((unit.num_bytes for unit in self.streamed), reverse=True)[:2])

    @property
    def total_bytes(self) -> int:
        """Memory of weights and buffers."""
        return self.extra_bytes + sum(weight.num_bytes for weight in self.resident) + self.buffer_bytes


class ModelWeights:
    """A model's weights, by the modules that use them.

    reads_rows: returns True for an embedding and the name of its weight if single rows can be read.
    """

    def __init__(self, model: nn.Module, reads_rows: Callable[[nn.Embedding, str], bool]):
        self._model = model
        names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), name)
        self.by_param: dict[torch.Tensor, Weight] = {
            param: Weight(names[id(param)], tuple(param.shape), param.dtype) for param in model.parameters()
        }
        blocks = repeated_blocks(model)
        self._blocks = [self._unit(path, block) for path, block in blocks.items()]
        in_blocks = {part for block in blocks.values() for part in block.modules()}
        outside = {path: part for path, part in model.named_modules() if part not in in_blocks}
        find: Any = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        self._heads = [self._unit(path, part) for path, part in outside.items() if part is head and is_linear]
        self._embeddings = [
            (part, self.by_param[part.weight])
            for part in outside.values()
            if isinstance(part, nn.Embedding) and reads_rows(part, self.by_param[part.weight].name)
        ]
        apart = {*(unit.module for unit in self._heads), *(part for part, _ in self._embeddings)}
        rest = [param for part in outside.values() if part not in apart for param in part.parameters(recurse=False)]
        self._fixed = [self.by_param[param] for param in rest]

    def _unit(self, path: str, module: nn.Module) -> StreamUnit:
        return StreamUnit(path, module, tuple(dict.fromkeys(self.by_param[param] for param in module.parameters())))

    def choose(self, memory_bytes: int, extra_bytes: int) -> Residency:
        """Return the choice within `memory_bytes` that reads the fewest bytes per forward.

        Resident blocks are spread evenly over the model, so that reading continues while they compute.
        Raises ModelError if not even two units fit. The message has the least memory.
        """
        usable = memory_bytes - min(memory_bytes // 16, _OBJECT_BYTES)
        with_heads, without = (self._with(heads, 0, extra_bytes) for heads in (self._heads, []))
        least = min(with_heads, without, key=lambda option: option.total_bytes)
        if least.total_bytes > usable:
            largest = max((unit.num_bytes for unit in least.streamed), default=0)
            needed = least.total_bytes + min(least.total_bytes // 15 + 16, _OBJECT_BYTES)
            raise ModelError(
                f"memory={format_bytes(memory_bytes)}: {type(self._model).__name__} needs at least "
                f"{format_bytes(needed)}: {format_bytes(least.total_bytes - least.buffer_bytes)} that stay in memory, "
                f"and a buffer for two blocks of up to {format_bytes(largest)}. Give more memory."
            )
        heads = self._heads if with_heads.total_bytes <= usable else []
        counts = range(len(self._blocks), -1, -1)
        options = (self._with(heads, count, extra_bytes) for count in counts)
        found = next(option for option in options if option.total_bytes <= usable)
        for _, weight in sorted(found.rows, key=lambda row: row[1].num_bytes):
            if found.total_bytes + weight.num_bytes <= usable and weight not in found.resident:
                rows = tuple(row for row in found.rows if row[1] is not weight)
                found = replace(found, resident=(*found.resident, weight), rows=rows)
        return found

    def _with(self, heads: Iterable[StreamUnit], count: int, extra_bytes: int) -> Residency:
        """Return the choice of these output layers and of `count` blocks."""
        number = len(self._blocks)
        chosen = [unit for at, unit in enumerate(self._blocks) if (at + 1) * count // number > at * count // number]
        resident = dict.fromkeys([*self._fixed, *(weight for unit in (*heads, *chosen) for weight in unit.weights)])
        units = [
            replace(unit, weights=tuple(weight for weight in unit.weights if weight not in resident))
            for unit in (*self._blocks, *self._heads)
        ]
        rows = tuple(row for row in self._embeddings if row[1] not in resident)
        return Residency(tuple(resident), tuple(unit for unit in units if unit.weights), rows, extra_bytes)
