"""Which weights of a model stay in memory, and which are read from files each time they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.models.inspect.blocks import repeated_blocks
from weft.units import format_bytes

#: Each weight begins at a multiple of this in the buffer. It is the alignment of torch's own allocations, on which the
#: order of summation in matrix products can depend.
ALIGNMENT = 64
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
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
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
    """Where the weights are.

    Attributes:
        resident: weights that stay in memory.
        streamed: units in the expected order of their forwards, each with its weights that are not resident.
        rows: embeddings whose rows are read from the files, by path, with their weights.
        extra_bytes: memory for module buffers, conversions and rearranging.
    """

    resident: tuple[Weight, ...]
    streamed: tuple[Unit, ...]
    rows: tuple[tuple[nn.Embedding, Weight], ...]
    extra_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer that streamed units are read into: the two largest units fit."""
        return sum(sorted((unit.num_bytes for unit in self.streamed), reverse=True)[:2])

    @property
    def resident_bytes(self) -> int:
        """Size of the resident weights."""
        return sum(weight.num_bytes for weight in self.resident)

    @property
    def total_bytes(self) -> int:
        """Memory of weights and buffers."""
        return self.extra_bytes + self.resident_bytes + self.buffer_bytes


class ModelWeights:
    """A model's weights by the modules that use them.

    Args:
        model: its parameters have names, shapes and dtypes, and need no values.
        reads_rows: returns True for an embedding and its weight if single rows can be read.
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
        self.blocks = [self._unit(path, block) for path, block in blocks.items()]
        in_blocks = {part for block in blocks.values() for part in block.modules()}
        outside = {path: part for path, part in model.named_modules() if part not in in_blocks}
        find: Any = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        self.heads = [self._unit(path, part) for path, part in outside.items() if part is head and _is_linear(part)]
        self.embeddings = [
            (part, weight)
            for part in outside.values()
            if isinstance(part, nn.Embedding) and reads_rows(part, (weight := self.by_param[part.weight]).name)
        ]
        apart = {*(unit.module for unit in self.heads), *(part for part, _ in self.embeddings)}
        self.fixed = tuple(
            dict.fromkeys(
                self.by_param[param]
                for part in outside.values()
                if part not in apart
                for param in part.parameters(recurse=False)
            )
        )

    def _unit(self, path: str, module: nn.Module) -> Unit:
        return Unit(path, module, tuple(dict.fromkeys(self.by_param[param] for param in module.parameters())))

    def choose(self, memory_bytes: int, extra_bytes: int) -> Residency:
        """Return the placement in `memory_bytes` that reads the fewest bytes per forward.

        The resident blocks are spread evenly over the model, so that reading continues while they compute.

        Raises:
            ModelError: if not even two units fit. The message has the least memory.
        """
        given, memory_bytes = memory_bytes, memory_bytes - min(memory_bytes // 16, _OBJECT_BYTES)
        with_heads, without = (self._placed(heads, extra_bytes) for heads in (self.heads, ()))
        least = min(with_heads, without, key=lambda option: option.total_bytes)
        if least.total_bytes > memory_bytes:
            largest = max((unit.num_bytes for unit in least.streamed), default=0)
            needed = least.total_bytes + min(least.total_bytes // 15 + 16, _OBJECT_BYTES)
            raise ModelError(
                f"memory={format_bytes(given)}: {type(self._model).__name__} needs at least {format_bytes(needed)}: "
                f"{format_bytes(least.resident_bytes + extra_bytes)} that stay in memory, and a buffer for two blocks "
                f"of up to {format_bytes(largest)}. Give more memory."
            )
        heads = self.heads if with_heads.total_bytes <= memory_bytes else []
        low, high = 0, len(self.blocks)
        while low < high:  # the largest number of resident blocks that fits
            middle = (low + high + 1) // 2
            fits = self._placed((*heads, *self._spread(middle)), extra_bytes).total_bytes <= memory_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        found = self._placed((*heads, *self._spread(low)), extra_bytes)
        for _, weight in sorted(found.rows, key=lambda row: row[1].num_bytes):
            if found.total_bytes + weight.num_bytes <= memory_bytes and weight not in found.resident:
                rows = tuple(row for row in found.rows if row[1] is not weight)
                found = replace(found, resident=(*found.resident, weight), rows=rows)
        return found

    def _spread(self, number: int) -> list[Unit]:
        count = len(self.blocks)
        return [unit for at, unit in enumerate(self.blocks) if (at + 1) * number // count > at * number // count]

    def _placed(self, resident_units: Iterable[Unit], extra_bytes: int) -> Residency:
        stays = {unit.path for unit in resident_units}
        units: Sequence[Unit] = (*self.blocks, *self.heads)
        resident = dict.fromkeys(
            (*self.fixed, *(weight for unit in units if unit.path in stays for weight in unit.weights))
        )
        left = [
            replace(unit, weights=tuple(weight for weight in unit.weights if weight not in resident)) for unit in units
        ]
        rows = tuple(row for row in self.embeddings if row[1] not in resident)
        return Residency(tuple(resident), tuple(unit for unit in left if unit.weights), rows, extra_bytes)


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward
